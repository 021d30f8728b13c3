//! Reading commands: arrays of bulk strings, or a line of words.
//!
//! ```text
//!   *3\r\n $14\r\n TOLLGATE.CHECK\r\n $7\r\n user:42\r\n $6\r\n 10/min\r\n      what clients send
//!   PING\r\n                                                                    what people type
//! ```
//!
//! The parser looks at a buffer and says where the arguments of the first complete command are; it copies nothing
//! and keeps nothing between calls. Every number in a frame is bounded before it is believed, so a frame can neither make
//! us wait for gigabytes nor allocate on its say-so: a length that is too large is an error at once, not after the
//! bytes have come.

use std::ops::Range;

use memchr::memchr;

/// A command's arguments, its name included. Ours have at most eight; clients introduce themselves with a few more.
pub(crate) const ARGS_MAX: usize = 64;
/// One argument: a key of 64 KiB is the longest thing that makes sense.
pub(crate) const ARG_BYTES_MAX: usize = 64 * 1024;
/// A whole command.
pub(crate) const COMMAND_BYTES_MAX: usize = 256 * 1024;
/// A typed line, or the line that announces a length.
const LINE_BYTES_MAX: usize = 64 * 1024;
const LENGTH_LINE_BYTES_MAX: usize = 16;

/// Where the arguments of a command are in the buffer. Reused, so that parsing allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Args {
    ranges: Vec<Range<usize>>,
}

impl Args {
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    pub(crate) fn get<'b>(&self, buffer: &'b [u8], index: usize) -> Option<&'b [u8]> {
        self.ranges.get(index).map(|range| &buffer[range.clone()])
    }
}

/// The frame makes no sense; after it nothing in the stream can be trusted, so the connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("expected '*' and a number of arguments from 0 to {ARGS_MAX}")]
    Arguments,
    #[error("expected '$' and a length from 0 to {ARG_BYTES_MAX}")]
    Length,
    #[error("expected CR LF after an argument")]
    Terminator,
    #[error("a command has at most {COMMAND_BYTES_MAX} bytes")]
    TooLarge,
    #[error("a line has at most {LINE_BYTES_MAX} bytes")]
    LimitStatus,
}

/// Finds the first complete command in `buffer`. Answers how many bytes it takes, or `None` if more must come.
/// A blank line and an empty array are commands without arguments.
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

/// A type byte, digits, CR LF: the number and where the next byte is. Nearly every number has one digit or two.
#[inline(always)]
fn length_line(buffer: &[u8], at: usize, max: usize, error: FrameError) -> Result<Option<(usize, usize)>, FrameError> {
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
        return if window.len() < LINE_BYTES_MAX { Ok(None) } else { Err(FrameError::LimitStatus) };
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
