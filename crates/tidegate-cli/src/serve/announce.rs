//! The text that the service prints at the start: the address of each listener, and a command to try it.

use std::fmt::Write as _;
use std::io::Write as _;

use super::listeners::OpenedListener;

/// Prints the version, where counters are, and each listener with a command to try it, to standard output.
///
/// `is_shared` says whether counters are in Redis, and `has_certificate` whether a TLS certificate was given. Errors of
/// writing, such as a closed pipe, are ignored.
pub(super) fn announce(listeners: &[OpenedListener], is_shared: bool, has_certificate: bool) {
    let kind = if is_shared { "in Redis" } else { "in memory" };
    let mut text = format!("tidegate {} is running, counters {kind}\n", env!("CARGO_PKG_VERSION"));
    for listener in listeners {
        let state = match &listener.socket {
            Ok((_, address)) => format!("{address}   try: {}", listener.example(*address, has_certificate)),
            Err(reason) => format!("off: {reason}; choose another address with --{} ADDRESS", listener.option),
        };
        writeln!(text, "  {:<5} {state}", listener.kind.name).expect("writing to memory does not fail");
    }
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
