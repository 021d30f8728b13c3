//! Writing replies, in the version of the protocol that the client asked for.

/// RESP2 unless the client said HELLO 3.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Protocol {
    #[default]
    Resp2,
    Resp3,
}

/// What there is to write to one client.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    bytes: Vec<u8>,
    pub(crate) protocol: Protocol,
}

impl Replies {
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Everything was written. A buffer that one large reply has grown is given back.
    pub(crate) fn clear(&mut self) {
        const KEPT_BYTES_MAX: usize = 64 * 1024;
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_BYTES_MAX);
    }

    pub(crate) fn simple(&mut self, text: &str) {
        self.line(b'+', text.as_bytes());
    }

    /// An error: a code word, then what was wrong. Line breaks, which would end it early, become spaces.
    pub(crate) fn error(&mut self, text: &str) {
        let printable = |byte: u8| if byte == b'\r' || byte == b'\n' { b' ' } else { byte };
        self.bytes.push(b'-');
        self.bytes.extend(text.bytes().map(printable));
        self.bytes.extend_from_slice(b"\r\n");
    }

    pub(crate) fn integer(&mut self, value: i64) {
        self.line(b':', itoa::Buffer::new().format(value).as_bytes());
    }

    pub(crate) fn bulk(&mut self, bytes: &[u8]) {
        self.line(b'$', itoa::Buffer::new().format(bytes.len()).as_bytes());
        self.bytes.extend_from_slice(bytes);
        self.bytes.extend_from_slice(b"\r\n");
    }

    pub(crate) fn null(&mut self) {
        match self.protocol {
            Protocol::Resp2 => self.bytes.extend_from_slice(b"$-1\r\n"),
            Protocol::Resp3 => self.bytes.extend_from_slice(b"_\r\n"),
        }
    }

    pub(crate) fn array(&mut self, len: usize) {
        self.line(b'*', itoa::Buffer::new().format(len).as_bytes());
    }

    /// A map of so many pairs; RESP2 knows only flat arrays.
    pub(crate) fn map(&mut self, pairs: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(pairs * 2),
            Protocol::Resp3 => self.line(b'%', itoa::Buffer::new().format(pairs).as_bytes()),
        }
    }

    /// Five numbers, the shape of every verdict. Put together aside and added in one piece: this is the hot path of the door.
    /// From the end, because that is where the last digit of a number belongs and where it is found first.
    pub(crate) fn verdict(&mut self, numbers: [i64; 5]) {
        // "*5\r\n", and five times ':', a sign, nineteen digits and "\r\n".
        let mut verdict = [0; 4 + 5 * 23];
        let mut start = verdict.len();
        let mut put = |byte| {
            start -= 1;
            verdict[start] = byte;
        };
        for number in numbers.into_iter().rev() {
            put(b'\n');
            put(b'\r');
            let mut rest = number.unsigned_abs();
            while rest >= 10 {
                put(b'0' + (rest % 10) as u8);
                rest /= 10;
            }
            put(b'0' + rest as u8);
            if number < 0 {
                put(b'-');
            }
            put(b':');
        }
        b"*5\r\n".iter().rev().for_each(|byte| put(*byte));
        self.bytes.extend_from_slice(&verdict[start..]);
    }

    fn line(&mut self, kind: u8, text: &[u8]) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(text);
        self.bytes.extend_from_slice(b"\r\n");
    }
}

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
        replies.verdict([1, 10, 9, 0, -1]);
        replies.verdict([i64::MIN; 5]);
        replies.protocol = Protocol::Resp3;
        replies.null();
        replies.map(2);
        let expected =
            "+OK\r\n-ERR two  lines\r\n$4\r\na\r\nb\r\n$-1\r\n*2\r\n*5\r\n:1\r\n:10\r\n:9\r\n:0\r\n:-1\r\n*5\r\n"
                .to_owned()
                + &format!(":{}\r\n", i64::MIN).repeat(5)
                + "_\r\n%2\r\n";
        assert_eq!(String::from_utf8_lossy(replies.as_bytes()), expected);
    }
}
