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
        self.bytes.clear();
        self.bytes.shrink_to(crate::listeners::KEPT_BYTES_MAX);
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
    pub(crate) fn verdict(&mut self, numbers: [i64; 5]) {
        let mut verdict = Backwards { text: [0; VERDICT_BYTES_MAX], start: VERDICT_BYTES_MAX };
        for number in numbers.into_iter().rev() {
            verdict.put(b"\r\n");
            verdict.number(number);
            verdict.put(b":");
        }
        verdict.put(b"*5\r\n");
        self.bytes.extend_from_slice(&verdict.text[verdict.start..]);
    }

    fn line(&mut self, kind: u8, text: &[u8]) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(text);
        self.bytes.extend_from_slice(b"\r\n");
    }
}

/// "*5\r\n", and five times ':', a sign, nineteen digits and "\r\n".
const VERDICT_BYTES_MAX: usize = 4 + 5 * 23;

/// "00" to "99".
const PAIRS: [[u8; 2]; 100] = {
    let mut pairs = [[b'0'; 2]; 100];
    let mut n = 0;
    while n < 100 {
        pairs[n] = [b'0' + (n / 10) as u8, b'0' + (n % 10) as u8];
        n += 1;
    }
    pairs
};

/// A verdict being written from its end, because the last digits of a number are the ones that are found first.
struct Backwards {
    text: [u8; VERDICT_BYTES_MAX],
    start: usize,
}

impl Backwards {
    #[inline(always)]
    fn put<const N: usize>(&mut self, bytes: &[u8; N]) {
        self.start -= N;
        self.text[self.start..self.start + N].copy_from_slice(bytes);
    }

    fn number(&mut self, number: i64) {
        let mut rest = number.unsigned_abs();
        while rest >= 100 {
            self.put(&PAIRS[(rest % 100) as usize]);
            rest /= 100;
        }
        match rest {
            0..=9 => self.put(&[b'0' + rest as u8]),
            _ => self.put(&PAIRS[rest as usize]),
        }
        if number < 0 {
            self.put(b"-");
        }
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
        replies.verdict([i64::MAX, 99, 100, 1_005, 120_030]);
        replies.protocol = Protocol::Resp3;
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
