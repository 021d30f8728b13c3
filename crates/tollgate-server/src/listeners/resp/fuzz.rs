//! What must hold for any bytes whatever that arrive at the door.

use super::command::{LimitMemo, understand};
use super::frame::{ARG_BYTES_MAX, ARGS_MAX, Args, COMMAND_BYTES_MAX, parse};

/// The longest that an error may grow, whatever was sent: it goes back over the wire.
const ERROR_BYTES_MAX: usize = 1_000;

/// The whole of a fuzz target: takes what the fuzzer invents, as one stream, and panics when something is wrong with it.
///
/// # Panics
/// When a bound is passed, when a command reads differently once more bytes have come, or when an error grows with its input.
pub fn any_bytes(bytes: &[u8]) {
    let (mut args, mut memo) = (Args::default(), LimitMemo::default());
    let mut rest = bytes;
    loop {
        match parse(rest, &mut args) {
            Ok(Some(consumed)) => {
                assert!((1..=rest.len().min(COMMAND_BYTES_MAX)).contains(&consumed), "{consumed} of {}", rest.len());
                assert!(args.len() <= ARGS_MAX);
                assert!((0..args.len()).all(|n| args.get(rest, n).is_some_and(|arg| arg.len() <= ARG_BYTES_MAX)));
                if let Err(error) = understand(rest, &args, &mut memo) {
                    assert!(error.len() <= ERROR_BYTES_MAX, "{} bytes: {error}", error.len());
                }
                waits_until_it_is_whole(&rest[..consumed]);
                rest = &rest[consumed..];
            }
            Ok(None) => {
                assert!(rest.len() < COMMAND_BYTES_MAX, "{} bytes are no command yet", rest.len());
                return;
            }
            Err(error) => return stays_an_error(rest, error),
        }
    }
}

/// Every shorter piece of a command is no command and no error yet.
fn waits_until_it_is_whole(command: &[u8]) {
    let mut args = Args::default();
    for cut in (0..command.len()).rev().take(64).chain([0, command.len() / 2]) {
        assert_eq!(parse(&command[..cut], &mut args), Ok(None), "after {cut} of {} bytes", command.len());
    }
}

/// More bytes do not mend a broken frame.
fn stays_an_error(rest: &[u8], error: super::frame::FrameError) {
    let longer = [rest, b"\r\n"].concat();
    assert_eq!(parse(&longer, &mut Args::default()), Err(error));
}
