//! Writes replies, in the version of the protocol that the client chose.

use std::sync::Arc;

use super::command::FixedReply;
use crate::listeners::io::KEPT_BYTES_MAX;
use crate::metrics::ListenerStats;

/// The version of the protocol. RESP2 until the client sends `HELLO 3`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum RespVersion {
    #[default]
    Resp2,
    Resp3,
}

/// The encoded replies that are to be written to one client.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    bytes: Vec<u8>,
    pub(crate) version: RespVersion,
    /// The listener that counts error replies; `None` counts none.
    stats: Option<Arc<ListenerStats>>,
}

impl Replies {
    /// Creates an empty list of replies in RESP2, whose errors are counted in `stats`.
    pub(crate) fn counted(stats: Arc<ListenerStats>) -> Replies {
        Replies { stats: Some(stats), ..Replies::default() }
    }

    /// Returns the length of all replies in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Removes all replies, and frees the capacity beyond 4 KiB.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_BYTES_MAX);
    }

    /// Appends a simple string. `text` must not contain line breaks.
    pub(crate) fn simple(&mut self, text: &str) {
        self.line(b'+', text.as_bytes());
    }

    /// Appends an error: a code, then what is wrong. Line breaks, which would end it early, become spaces.
    ///
    /// The error is counted by its code.
    pub(crate) fn error(&mut self, text: &str) {
        if let Some(stats) = &self.stats {
            stats.errors.count(text.split(' ').next().unwrap_or_default());
        }
        let printable = |byte: u8| if byte == b'\r' || byte == b'\n' { b' ' } else { byte };
        self.bytes.push(b'-');
        self.bytes.extend(text.bytes().map(printable));
        self.bytes.extend_from_slice(b"\r\n");
    }

    /// Appends an integer.
    pub(crate) fn integer(&mut self, value: i64) {
        self.line(b':', itoa::Buffer::new().format(value).as_bytes());
    }

    /// Appends a bulk string.
    pub(crate) fn bulk(&mut self, bytes: &[u8]) {
        self.line(b'$', itoa::Buffer::new().format(bytes.len()).as_bytes());
        self.bytes.extend_from_slice(bytes);
        self.bytes.extend_from_slice(b"\r\n");
    }

    /// Appends a null, in the form of the protocol version.
    pub(crate) fn null(&mut self) {
        match self.version {
            RespVersion::Resp2 => self.bytes.extend_from_slice(b"$-1\r\n"),
            RespVersion::Resp3 => self.bytes.extend_from_slice(b"_\r\n"),
        }
    }

    /// Appends the header of an array with this many elements, which the caller appends next.
    pub(crate) fn array(&mut self, len: usize) {
        self.line(b'*', itoa::Buffer::new().format(len).as_bytes());
    }

    /// Appends the header of a map with this many pairs, whose keys and values the caller appends next.
    ///
    /// In RESP2, which has no maps, it is an array with twice as many elements.
    pub(crate) fn map(&mut self, pairs: usize) {
        match self.version {
            RespVersion::Resp2 => self.array(pairs * 2),
            RespVersion::Resp3 => self.line(b'%', itoa::Buffer::new().format(pairs).as_bytes()),
        }
    }

    /// Appends the reply to a command about the connection.
    pub(crate) fn fixed(&mut self, reply: FixedReply<'_>) {
        match reply {
            FixedReply::Simple(text) => self.simple(text),
            FixedReply::Bulk(bytes) => self.bulk(bytes),
            FixedReply::Integer(value) => self.integer(value),
            FixedReply::Null => self.null(),
            FixedReply::EmptyArray => self.array(0),
            FixedReply::EmptyMap => self.map(0),
        }
    }

    /// Appends the five integers of a decision as an array.
    pub(crate) fn decision(&mut self, numbers: [i64; 5]) {
        self.bytes.reserve(DECISION_BYTES_MAX);
        self.array(numbers.len());
        numbers.into_iter().for_each(|number| self.integer(number));
    }

    fn line(&mut self, kind: u8, text: &[u8]) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(text);
        self.bytes.extend_from_slice(b"\r\n");
    }
}

/// "*5\r\n", and five times ':', a sign, nineteen digits and "\r\n".
const DECISION_BYTES_MAX: usize = 4 + 5 * 23;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_reply_has_its_bytes() {
        let mut replies = Replies::default();
        replies.simple("OK");
        replies.error("ERR two\r\nlines");
        replies.bulk(b"a\r\nb");
        replies.null();
        replies.map(1);
        replies.decision([1, 10, 9, 0, -1]);
        replies.decision([i64::MIN; 5]);
        replies.decision([i64::MAX, 99, 100, 1_005, 120_030]);
        replies.version = RespVersion::Resp3;
        replies.null();
        replies.map(2);
        let expected =
            "+OK\r\n-ERR two  lines\r\n$4\r\na\r\nb\r\n$-1\r\n*2\r\n*5\r\n:1\r\n:10\r\n:9\r\n:0\r\n:-1\r\n*5\r\n"
                .to_owned()
                + &format!(":{}\r\n", i64::MIN).repeat(5)
                + &format!("*5\r\n:{}\r\n:99\r\n:100\r\n:1005\r\n:120030\r\n", i64::MAX)
                + "_\r\n%2\r\n";
        assert_eq!(String::from_utf8_lossy(replies.as_bytes()), expected);
    }
}
