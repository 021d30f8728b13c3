//! Output of the command. A closed pipe and a full disk never cause a panic.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

use serde_json::Value;

use crate::Failure;

/// Prints to standard output and flushes it. A closed pipe is not an error, so the exit code stays that of the command.
///
/// # Errors
/// If the text cannot be written for any other reason, such as a full disk.
pub(crate) fn print(text: impl Display) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(write!(out, "{text}").and_then(|()| out.flush())).map_err(Failure::Output)
}

/// Prints to standard output, with a newline.
///
/// # Errors
/// If [`print()`] fails.
pub(crate) fn print_line(text: impl Display) -> Result<(), Failure> {
    print(format_args!("{text}\n"))
}

/// Prints the report of a command: a line of JSON if `is_json`, else the text that `format` returns.
///
/// # Errors
/// If [`print()`] fails.
pub(crate) fn print_report(
    report: &Value,
    is_json: bool,
    format: impl FnOnce(&Value) -> String,
) -> Result<(), Failure> {
    if is_json { print_line(report) } else { print(format(report)) }
}

/// Returns a text of a report, or an empty one if the value is not a text.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns the elements of a list of a report, or none if the value is not a list.
pub(crate) fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Prints a line to standard error. An error of writing is ignored.
pub(crate) fn print_error(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Returns `Ok` if writing failed because the reader closed the pipe, and `written` itself otherwise.
pub(crate) fn ignore_broken_pipe(written: std::io::Result<()>) -> std::io::Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}
