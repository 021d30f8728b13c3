//! Parses commands: arrays of bulk strings, or inline commands.
//!
//! ```text
//!   *3\r\n $14\r\n TIDEGATE.CHECK\r\n $7\r\n user:42\r\n $6\r\n 10/min\r\n      from clients
//!   PING\r\n                                                                    typed by people
//! ```
//!
//! The parser returns where the arguments of the first complete command are in a buffer. It copies nothing and keeps no
//! state between calls. Every number in a frame is checked against a bound as soon as it is read, so a frame can
//! neither make the listener wait for gigabytes nor allocate by announcing a length: a length that is too large is an
//! error at once.

use std::ops::Range;

use memchr::memchr;

/// The most arguments of a command, including its name. A request with 256 headers has 516. A command with a few more than
/// it accepts gets an error that says so, and its connection stays open.
pub(crate) const ARGS_MAX: usize = 1024;
/// The most bytes of one argument: twice the longest key. A key that is somewhat too long gets an error that says so, and
/// its connection stays open.
pub(crate) const ARG_BYTES_MAX: usize = 128 * 1024;
/// The most bytes of a command.
pub(crate) const COMMAND_BYTES_MAX: usize = 256 * 1024;
/// The arguments for which a connection keeps room between batches: those of a check with 32 limits, and its options.
const KEPT_ARGS_MAX: usize = 72;
/// The most bytes of an inline command.
const LINE_BYTES_MAX: usize = 64 * 1024;
/// The most bytes of a line with a length.
const LENGTH_LINE_BYTES_MAX: usize = 16;

/// The positions of a command's arguments in the buffer. Reused between commands, so that parsing allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Args {
    ranges: Vec<Range<usize>>,
}

impl Args {
    /// Removes all positions, and frees the capacity that only few commands need.
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
        self.ranges.shrink_to(KEPT_ARGS_MAX);
    }

    /// Returns the number of arguments, including the command's name.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Returns the argument at `index`, or `None` beyond the last one. The command's name has the index 0.
    ///
    /// `buffer` must be the one that was parsed; with another one, returns wrong bytes or panics.
    pub(crate) fn get<'b>(&self, buffer: &'b [u8], index: usize) -> Option<&'b [u8]> {
        self.ranges.get(index).map(|range| &buffer[range.clone()])
    }
}

/// A malformed frame. The position of the next frame is unknown after it, so the connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("expected '*' and a number of arguments from 0 to {ARGS_MAX}")]
    Arguments,
    #[error("expected '$' and a length from 0 to {ARG_BYTES_MAX}")]
    Length,
    #[error("expected CR LF after an argument")]
    Terminator,
    #[error("a command can have at most {COMMAND_BYTES_MAX} bytes")]
    TooLarge,
    #[error("a line can have at most {LINE_BYTES_MAX} bytes")]
    LineTooLong,
}

/// Finds the command at the beginning of `buffer`, and stores the positions of its arguments in `args`.
///
/// Returns the length of the command in bytes, or `None` if it is not complete; `args` may then hold some of its
/// arguments. A blank line and an empty array are commands without arguments.
///
/// # Errors
/// If the frame is malformed or exceeds a bound.
pub(crate) fn parse(buffer: &[u8], args: &mut Args) -> Result<Option<usize>, FrameError> {
    args.ranges.clear();
    match buffer.first() {
        None => Ok(None),
        Some(b'*') => parse_array(buffer, args),
        Some(_) => parse_line(buffer, args),
    }
}

fn parse_array(buffer: &[u8], args: &mut Args) -> Result<Option<usize>, FrameError> {
    let Some((count, mut at)) = length_line(buffer, 0, ARGS_MAX, FrameError::Arguments)? else {
        return Ok(None);
    };
    for _ in 0..count {
        match buffer.get(at) {
            None => return Ok(None),
            Some(b'$') => {}
            Some(_) => return Err(FrameError::Length),
        }
        let Some((length, start)) = length_line(buffer, at, ARG_BYTES_MAX, FrameError::Length)? else {
            return Ok(None);
        };
        let end = start + length;
        if end + 2 > COMMAND_BYTES_MAX {
            return Err(FrameError::TooLarge);
        }
        match buffer.get(end..end + 2) {
            None => return Ok(None),
            Some(b"\r\n") => {}
            Some(_) => return Err(FrameError::Terminator),
        }
        args.ranges.push(start..end);
        at = end + 2;
    }
    Ok(Some(at))
}

/// Parses a type byte, which is not checked, digits and CR LF at position `at`, which must not be beyond the buffer.
///
/// Returns the number and the position after the line, or `None` if the line is not complete. Returns `error` if the
/// line is malformed or the number exceeds `max`.
#[inline(always)]
fn length_line(buffer: &[u8], at: usize, max: usize, error: FrameError) -> Result<Option<(usize, usize)>, FrameError> {
    // Nearly every number has one digit or two.
    let (value, after) = match &buffer[at..] {
        [_, ones @ b'0'..=b'9', b'\r', b'\n', ..] => (usize::from(ones - b'0'), at + 4),
        [_, tens @ b'0'..=b'9', ones @ b'0'..=b'9', b'\r', b'\n', ..] => {
            (usize::from(tens - b'0') * 10 + usize::from(ones - b'0'), at + 5)
        }
        _ => return long_length_line(buffer, at, max, error),
    };
    if value > max { Err(error) } else { Ok(Some((value, after))) }
}

fn long_length_line(
    buffer: &[u8],
    at: usize,
    max: usize,
    error: FrameError,
) -> Result<Option<(usize, usize)>, FrameError> {
    let mut value = 0;
    let mut position = at + 1;
    loop {
        match buffer.get(position) {
            None => return Ok(None),
            Some(&digit @ b'0'..=b'9') => {
                value = value * 10 + usize::from(digit - b'0');
                if value > max || position - at > LENGTH_LINE_BYTES_MAX {
                    return Err(error);
                }
                position += 1;
            }
            Some(b'\r') if position > at + 1 => break,
            Some(_) => return Err(error),
        }
    }
    match buffer.get(position + 1) {
        None => Ok(None),
        Some(b'\n') => Ok(Some((value, position + 2))),
        Some(_) => Err(error),
    }
}

fn parse_line(buffer: &[u8], args: &mut Args) -> Result<Option<usize>, FrameError> {
    let window = &buffer[..buffer.len().min(LINE_BYTES_MAX)];
    let Some(newline) = memchr(b'\n', window) else {
        return if window.len() < LINE_BYTES_MAX { Ok(None) } else { Err(FrameError::LineTooLong) };
    };
    let mut start = None;
    for (index, &byte) in buffer[..=newline].iter().enumerate() {
        match (byte.is_ascii_whitespace(), start) {
            (false, None) => start = Some(index),
            (true, Some(from)) => {
                if args.ranges.len() == ARGS_MAX {
                    return Err(FrameError::Arguments);
                }
                args.ranges.push(from..index);
                start = None;
            }
            _ => {}
        }
    }
    Ok(Some(newline + 1))
}

#[cfg(test)]
mod tests;
