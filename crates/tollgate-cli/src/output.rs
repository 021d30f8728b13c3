//! What the command says. A pipe that was closed and a disk that is full are answers to it, never a panic.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

use crate::Failure;

/// Prints to standard output. Whoever stops reading has seen enough: that is no failure, and the exit code says what it would
/// have said.
pub(crate) fn print(text: impl Display) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    enough(write!(out, "{text}").and_then(|()| out.flush())).map_err(Failure::Output)
}

/// The same, and the end of the line.
pub(crate) fn print_line(text: impl Display) -> Result<(), Failure> {
    print(format_args!("{text}\n"))
}

/// Says it on standard error, if that can be heard.
pub(crate) fn complain(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// What came of writing, for whoever may stop reading at any time.
pub(crate) fn enough(written: std::io::Result<()>) -> std::io::Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}
