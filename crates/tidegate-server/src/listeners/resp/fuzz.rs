//! Properties that hold for any bytes that arrive on the RESP listener.

use tidegate::Check;

use super::check::LimitCache;
use super::command::{RespCommand, parse_command};
use super::frame::{ARG_BYTES_MAX, ARGS_MAX, Args, COMMAND_BYTES_MAX, parse};

/// The most bytes of an error, whatever the command contains.
const ERROR_BYTES_MAX: usize = 1_000;

/// Runs a fuzz target on the bytes of one connection.
///
/// # Panics
/// If a bound is exceeded, if a command is parsed differently after more bytes have arrived, if an error grows with its
/// input, or if the demands of a check are not a valid check.
pub fn any_bytes(bytes: &[u8]) {
    let (mut args, mut limits, mut demands) = (Args::default(), LimitCache::default(), Vec::new());
    let mut rest = bytes;
    loop {
        match parse(rest, &mut args) {
            Ok(Some(consumed)) => {
                assert!((1..=rest.len().min(COMMAND_BYTES_MAX)).contains(&consumed), "{consumed} of {}", rest.len());
                assert!(args.len() <= ARGS_MAX);
                assert!((0..args.len()).all(|n| args.get(rest, n).is_some_and(|arg| arg.len() <= ARG_BYTES_MAX)));
                match parse_command(rest, &args, &mut limits, &mut demands) {
                    Ok(RespCommand::Check(check) | RespCommand::Wait { check, .. }) => {
                        assert_eq!(demands.len(), check.limits);
                        assert!(Check::new(&demands).is_ok());
                    }
                    Ok(_) => assert!(demands.is_empty()),
                    Err(error) => {
                        assert!(demands.is_empty());
                        assert!(error.len() <= ERROR_BYTES_MAX, "{} bytes: {error}", error.len());
                    }
                }
                demands.clear();
                assert_prefixes_are_incomplete(&rest[..consumed]);
                rest = &rest[consumed..];
            }
            Ok(None) => {
                assert!(rest.len() < COMMAND_BYTES_MAX, "{} bytes are no command yet", rest.len());
                return;
            }
            Err(error) => return assert_stays_malformed(rest, error),
        }
    }
}

/// Asserts that every prefix of a command is incomplete, and no error.
fn assert_prefixes_are_incomplete(command: &[u8]) {
    let mut args = Args::default();
    for cut in (0..command.len()).rev().take(64).chain([0, command.len() / 2]) {
        assert_eq!(parse(&command[..cut], &mut args), Ok(None), "after {cut} of {} bytes", command.len());
    }
}

/// Asserts that a malformed frame stays malformed when more bytes arrive.
fn assert_stays_malformed(rest: &[u8], error: super::frame::FrameError) {
    let longer = [rest, b"\r\n"].concat();
    assert_eq!(parse(&longer, &mut Args::default()), Err(error));
}
