//! The `tollgate` command: arguments, the choice of a store, and what is printed.

mod arguments;
mod ask;
mod boundary;
mod configuration;
mod secrets;
mod serve;
mod store;

use std::process::ExitCode;

use clap::Parser;

use self::arguments::{Arguments, Command};

/// An answer over HTTP takes a few dozen small allocations, which are a tenth of its cost with the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit codes of `check`: 0 allowed, 1 denied, 2 error.
const DENIED: u8 = 1;
const FAILED: u8 = 2;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match arguments.command {
        Some(Command::Serve(serve)) => in_runtime(serve::serve(serve)).map(|()| ExitCode::SUCCESS),
        Some(Command::Validate(validate)) => configuration::validate(&validate).map(|()| ExitCode::SUCCESS),
        Some(Command::Check(check)) => in_runtime(ask::check(check)).map(|allowed| match allowed {
            true => ExitCode::SUCCESS,
            false => ExitCode::from(DENIED),
        }),
        Some(Command::Inspect(inspect)) => in_runtime(ask::inspect(inspect)).map(|()| ExitCode::SUCCESS),
        Some(Command::Reset(reset)) => in_runtime(ask::reset(reset)).map(|()| ExitCode::SUCCESS),
        Some(Command::Script) => {
            print!("{}", tollgate_redis::SCRIPT);
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::Boundary) | None => {
            print!("{}", boundary::picture());
            Ok(ExitCode::SUCCESS)
        }
    };
    outcome.unwrap_or_else(|failure| {
        match failure {
            // Its findings underline the place in the file.
            Failure::Configuration(report) => eprintln!("{:?}", miette::Report::new(report)),
            failure => eprintln!("tollgate: {failure}"),
        }
        ExitCode::from(FAILED)
    })
}

/// What went wrong, in words for the terminal.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    Store(#[from] tollgate::StoreUrlError),
    #[error("{0}")]
    Configuration(tollgate::config::Report),
    #[error("{0}")]
    Redis(#[from] tollgate_redis::BuildError),
    #[error("the store did not answer: {0}")]
    Unanswered(#[from] tollgate::StoreError),
    #[error("{0}")]
    Unavailable(#[from] tollgate::Unavailable),
    #[error("{0}")]
    Key(#[from] tollgate::KeyError),
    #[error("{} cannot be read: {error}", .file.display())]
    Unreadable { file: std::path::PathBuf, error: std::io::Error },
    #[error("{place}: {error}")]
    Token { place: String, error: tollgate_server::TokenError },
    #[error("{0}")]
    Tls(#[from] tollgate_server::TlsError),
    #[error(
        "the admin door on {address} can be reached from other machines, so it needs a token that you chose: \
         give it in $TOLLGATE_ADMIN_TOKEN or by --admin-token-file FILE, or listen on 127.0.0.1"
    )]
    AdminExposed { address: std::net::SocketAddr },
    #[error("cannot listen on {address} for {door}: {error}; choose another with --{door} ADDRESS")]
    Listen { door: &'static str, address: String, error: std::io::Error },
    #[error("cannot start: {0}")]
    Runtime(#[from] std::io::Error),
}

fn in_runtime<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}
