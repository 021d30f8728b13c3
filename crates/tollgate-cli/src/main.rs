//! The `tollgate` command: arguments, the choice of a store, and what is printed.
#![warn(clippy::print_stdout, clippy::print_stderr)] // they panic where nobody reads: see `output`

mod admin;
mod arguments;
mod ban;
mod boundary;
mod client;
mod configuration;
mod counters;
mod explain;
mod failure;
mod output;
mod secrets;
mod serve;
mod store;
#[cfg(feature = "otlp")]
mod traces;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use self::arguments::{Arguments, Command};
pub(crate) use self::failure::Failure;

/// An answer over HTTP takes a few dozen small allocations, which are a tenth of its cost with the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit codes: 0 for yes, 1 for a denial (`check`), 2 for whatever went wrong.
const DENIED: u8 = 1;
const FAILED: u8 = 2;

fn main() -> ExitCode {
    failure::set_up_reports();
    let said = Arguments::try_parse().map_or_else(tell, run);
    said.unwrap_or_else(|failure| {
        output::print_error(format_args!("{:?}", miette::Report::new(failure)));
        ExitCode::from(FAILED)
    })
}

/// What cannot be understood, and what only asks for help or the version.
fn tell(answer: clap::Error) -> Result<ExitCode, Failure> {
    let said = output::ignore_broken_pipe(answer.print());
    if !answer.use_stderr() {
        said.map_err(Failure::Output)?;
    }
    Ok(if answer.use_stderr() { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    match arguments.command {
        Some(Command::Serve(serve)) => in_runtime(serve::serve(*serve))?,
        Some(Command::Explain(explain)) => in_runtime(explain::explain(explain))?,
        Some(Command::Inspect(inspect)) => in_runtime(counters::inspect(inspect))?,
        Some(Command::Reset(reset)) => in_runtime(counters::reset(reset))?,
        Some(Command::Ban(ban)) => in_runtime(ban::ban(ban))?,
        Some(Command::Unban(unban)) => in_runtime(ban::unban(unban))?,
        Some(Command::Script) => output::print(tollgate_redis::SCRIPT)?,
        Some(Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "tollgate", &mut script);
            output::print(String::from_utf8_lossy(&script))?;
        }
        Some(Command::Boundary) | None => output::print(boundary::picture())?,
        Some(Command::Validate(validate)) => {
            let usable = configuration::validate(&validate)?;
            return Ok(if usable { ExitCode::SUCCESS } else { ExitCode::from(FAILED) });
        }
        Some(Command::Check(check)) => {
            let allowed = in_runtime(counters::check(check))?;
            return Ok(if allowed { ExitCode::SUCCESS } else { ExitCode::from(DENIED) });
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn in_runtime<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}
