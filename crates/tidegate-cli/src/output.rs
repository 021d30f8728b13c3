//! Output of the command. A closed pipe and a full disk never cause a panic.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

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
