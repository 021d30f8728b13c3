//! The `tidegate` command: parses the arguments, runs a subcommand, and sets the exit code.
#![warn(clippy::print_stdout, clippy::print_stderr)] // they panic if the pipe is closed: see `output`

mod admin;
mod arguments;
mod ban;
mod boundary;
mod client;
mod configuration;
mod counters;
mod explain;
mod failure;
mod inherited;
mod key;
mod man;
mod output;
mod secrets;
mod serve;
mod store;
#[cfg(feature = "otlp")]
mod traces;
mod usage;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};

use self::arguments::{Arguments, Command};
use self::configuration::Validity;
pub(crate) use self::failure::Failure;
use self::inherited::InheritedSockets;

/// Used instead of the system's allocator, where the few dozen small allocations of an HTTP response are a tenth of its
/// cost.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code of a denied `check`, of an `inspect` or `reset` of a counter that does not exist, of an `unban` of a client
/// that is not banned, of `key` for a name that no key has, and of `validate --deny-warnings` if there are warnings. Every
/// other command that succeeds exits with 0.
const NEGATIVE: u8 = 1;
/// Exit code of an error.
const FAILED: u8 = 2;

fn main() -> ExitCode {
    failure::set_up_reports();
    let outcome = Arguments::try_parse().map_or_else(print_usage, run);
    outcome.unwrap_or_else(|failure| {
        output::print_error(format_args!("{:?}", miette::Report::new(failure)));
        ExitCode::from(FAILED)
    })
}

/// Prints the help or the version and returns exit code 0, or prints why the arguments are invalid and returns exit
/// code 2. In an argument that is repeated in the message, the user and password of a URL are masked. A tip says what to
/// write instead, if that is known.
///
/// # Errors
/// If the help or the version cannot be written. A closed pipe is not an error.
fn print_usage(mut usage: clap::Error) -> Result<ExitCode, Failure> {
    let refused = match usage.kind() {
        ErrorKind::UnknownArgument => usage.get(ContextKind::InvalidArg),
        ErrorKind::ValueValidation => usage.get(ContextKind::InvalidValue),
        _ => None,
    };
    if let Some(ContextValue::String(refused)) = refused {
        let arguments: Vec<String> = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into()).collect();
        if let Some(tip) = usage::tip(refused, &arguments) {
            usage.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
    }
    for kind in [ContextKind::InvalidArg, ContextKind::InvalidSubcommand, ContextKind::InvalidValue] {
        if let Some(ContextValue::String(text)) = usage.get(kind) {
            let masked = secrets::mask_user(text);
            usage.insert(kind, ContextValue::String(masked));
        }
    }
    let printed = output::ignore_broken_pipe(usage.print());
    if !usage.use_stderr() {
        printed.map_err(Failure::Output)?;
    }
    Ok(if usage.use_stderr() { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

/// Runs the subcommand and returns its exit code: 0; 1 if `check` was denied, `inspect` or `reset` found no counter,
/// `unban` no ban, `key` no key, or `validate --deny-warnings` a warning; 2 if `validate --json` found an error.
///
/// Without a subcommand, prints the help.
fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    match arguments.command {
        Some(Command::Serve(serve)) => {
            let inherited = InheritedSockets::from_env()?;
            in_runtime(serve::serve(*serve, inherited))?;
        }
        Some(Command::Gateway(gateway)) => {
            let inherited = InheritedSockets::from_env()?;
            in_runtime(serve::gateway(*gateway, inherited))?;
        }
        Some(Command::Explain(explain)) => in_runtime(explain::explain(explain))?,
        Some(Command::Inspect(inspect)) => return in_runtime(counters::inspect(inspect)).map(exit_code),
        Some(Command::Reset(reset)) => return in_runtime(counters::reset(reset)).map(exit_code),
        Some(Command::Key { command }) => return in_runtime(key::key(command)).map(exit_code),
        Some(Command::Ban(ban)) => in_runtime(ban::ban(ban))?,
        Some(Command::Unban(unban)) => return in_runtime(ban::unban(unban)).map(exit_code),
        Some(Command::Script { acl: false, .. }) => output::print(tidegate_redis::SCRIPT)?,
        Some(Command::Script { acl: true, config }) => output::print_line(store::acl_command(config.as_deref())?)?,
        Some(Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "tidegate", &mut script);
            output::print(String::from_utf8_lossy(&script))?;
        }
        Some(Command::Man { dir }) => man::man(dir.as_deref())?,
        Some(Command::Boundary) => output::print(boundary::picture())?,
        None => output::print(Arguments::command().render_help().to_string())?,
        Some(Command::Validate(validate)) => {
            return Ok(match configuration::validate(&validate)? {
                Validity::Valid => ExitCode::SUCCESS,
                Validity::WarningsDenied => ExitCode::from(NEGATIVE),
                Validity::Invalid => ExitCode::from(FAILED),
            });
        }
        Some(Command::Check(check)) => return in_runtime(counters::check(check)).map(exit_code),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the exit code of a command that answers yes or no: 0 for `true`, 1 for `false`.
fn exit_code(answer: bool) -> ExitCode {
    if answer { ExitCode::SUCCESS } else { ExitCode::from(NEGATIVE) }
}

/// Creates a multi-threaded tokio runtime, blocks until `work` completes in it, and returns the result of `work`.
///
/// # Errors
/// If the runtime cannot be created, or `work` fails.
fn in_runtime<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}
