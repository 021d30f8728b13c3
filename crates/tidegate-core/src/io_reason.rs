//! The text of I/O errors in messages for people.

use std::io;

/// Returns the text of an error of the operating system without its number: `connection refused`.
///
/// The first letter is in lower case, because the text follows a colon in every message. The text of any other error is
/// returned unchanged.
#[doc(hidden)]
pub fn __io_reason(error: &io::Error) -> String {
    let text = error.to_string();
    // A wrapped error has no `raw_os_error`. Its number is only in the text.
    let Some((reason, _)) = text.split_once(" (os error ") else { return text };
    let mut letters = reason.chars();
    match (letters.next(), letters.next()) {
        (Some(first), Some(second)) if second.is_lowercase() => {
            first.to_lowercase().chain([second]).chain(letters).collect()
        }
        _ => reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_the_text_of_the_operating_system_without_its_number() {
        // The numbers of these errors on Linux: ENOENT, EMFILE, ETIMEDOUT, ECONNREFUSED.
        for (number, expected) in [
            (2, "no such file or directory"),
            (24, "too many open files"),
            (110, "connection timed out"),
            (111, "connection refused"),
        ] {
            let error = io::Error::from_raw_os_error(number);
            assert_eq!(__io_reason(&error), expected);
            assert_eq!(__io_reason(&io::Error::other(error)), expected, "an error that wraps it");
        }
        assert_eq!(__io_reason(&io::Error::other("invalid peer certificate")), "invalid peer certificate");
        assert_eq!(__io_reason(&io::ErrorKind::UnexpectedEof.into()), "unexpected end of file");
    }
}
