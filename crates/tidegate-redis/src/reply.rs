//! A parser for the replies of a server, in RESP2.
//!
//! A reply is parsed from the front of a buffer once it is complete. Lengths and nesting are bounded, so a peer that is
//! not a Redis server cannot make the client allocate arbitrary amounts of memory.

/// The maximum number of elements of a list, and of bytes of a bulk string. Larger than any expected reply.
const LENGTH_MAX: i64 = 1 << 20;
/// The maximum nesting of lists.
const DEPTH_MAX: usize = 4;

/// The reply of the server to a command.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reply {
    /// An integer.
    Integer(i64),
    /// A simple string or a bulk string.
    Text(Vec<u8>),
    /// A null reply: the key does not exist, or a condition did not hold.
    Nil,
    /// An error inside a list. [`RedisStore::command`](crate::RedisStore::command) returns an error that is the whole
    /// reply as a [`StoreError`](tidegate_core::StoreError).
    Error(String),
    /// A list of replies.
    List(Vec<Reply>),
}

/// The error for bytes that are not valid RESP2, or that exceed the bounds on length and nesting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ProtocolError;

impl Reply {
    /// Parses the first reply in `bytes`, and returns it with its length in bytes.
    ///
    /// Returns `Ok(None)` while it is incomplete.
    ///
    /// # Errors
    /// Returns an error if the bytes are not RESP2, a string has more than 1 MiB, a list has more than 1,048,576
    /// elements, or lists are nested more than four deep.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Reply, usize)>, ProtocolError> {
        let mut parser = Parser { bytes, at: 0 };
        Ok(parser.reply(0)?.map(|reply| (reply, parser.at)))
    }

    /// Returns the string if this is [`Reply::Text`] and valid UTF-8, else `None`.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Reply::Text(text) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }

    /// Returns the elements if this is [`Reply::List`], else none.
    pub(crate) fn items(&self) -> &[Reply] {
        match self {
            Reply::List(items) => items,
            _ => &[],
        }
    }

    /// Returns the text of a field in a list of names and values, or `None` if it is missing or no text.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let pair = self.items().chunks_exact(2).find(|pair| pair[0].as_text() == Some(name))?;
        pair[1].as_text()
    }
}

struct Parser<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    /// Parses one reply, which is inside `depth` lists; `None` if it is incomplete.
    ///
    /// # Errors
    /// If the type of the reply is unknown, a number or length is invalid, or lists are nested too deep.
    fn reply(&mut self, depth: usize) -> Result<Option<Reply>, ProtocolError> {
        let Some(line) = self.line()? else { return Ok(None) };
        let (&kind, rest) = line.split_first().ok_or(ProtocolError)?;
        match kind {
            b':' => Ok(Some(Reply::Integer(integer(rest)?))),
            b'+' => Ok(Some(Reply::Text(rest.to_vec()))),
            b'-' => Ok(Some(Reply::Error(String::from_utf8_lossy(rest).into_owned()))),
            b'$' => match length(rest)? {
                None => Ok(Some(Reply::Nil)),
                Some(length) => Ok(self.bulk(length)?.map(Reply::Text)),
            },
            b'*' if depth < DEPTH_MAX => match length(rest)? {
                None => Ok(Some(Reply::Nil)),
                Some(length) => {
                    let mut list = Vec::with_capacity(length.min(1024));
                    for _ in 0..length {
                        let Some(reply) = self.reply(depth + 1)? else { return Ok(None) };
                        list.push(reply);
                    }
                    Ok(Some(Reply::List(list)))
                }
            },
            _ => Err(ProtocolError),
        }
    }

    /// Reads a line and returns it without its CRLF; `None` if it is incomplete.
    ///
    /// # Errors
    /// If the line ends without CR, or more than 1 MiB has no line end.
    fn line(&mut self) -> Result<Option<&[u8]>, ProtocolError> {
        let rest = &self.bytes[self.at..];
        match memchr::memchr(b'\n', rest) {
            Some(end) => {
                self.at += end + 1;
                rest[..end].strip_suffix(b"\r").map(Some).ok_or(ProtocolError)
            }
            None if rest.len() as i64 > LENGTH_MAX => Err(ProtocolError),
            None => Ok(None),
        }
    }

    /// Reads a bulk string of `length` bytes and the CRLF after it, and returns the string; `None` if it is incomplete.
    ///
    /// # Errors
    /// If no CRLF follows the string.
    fn bulk(&mut self, length: usize) -> Result<Option<Vec<u8>>, ProtocolError> {
        let rest = &self.bytes[self.at..];
        let Some(with_end) = rest.get(..length + 2) else { return Ok(None) };
        let (text, end) = with_end.split_at(length);
        if end != b"\r\n" {
            return Err(ProtocolError);
        }
        self.at += length + 2;
        Ok(Some(text.to_vec()))
    }
}

/// Parses a decimal integer, with an optional sign.
///
/// # Errors
/// If the text is not one, or does not fit into 64 bits.
fn integer(text: &[u8]) -> Result<i64, ProtocolError> {
    std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).ok_or(ProtocolError)
}

/// Parses the length of a bulk string or a list, at most 1,048,576; `None` for -1, which marks a null reply.
///
/// # Errors
/// If the text is not an integer, or another negative or a higher one.
fn length(text: &[u8]) -> Result<Option<usize>, ProtocolError> {
    match integer(text)? {
        -1 => Ok(None),
        length @ 0..=LENGTH_MAX => Ok(Some(length as usize)),
        _ => Err(ProtocolError),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_every_kind_and_leaves_the_following_bytes() {
        let bytes = b"*5\r\n:-7\r\n$3\r\na\r\n\r\n$-1\r\n-OOM full\r\n*1\r\n+OK\r\n:1\r\n";
        let list = Reply::List(vec![
            Reply::Integer(-7),
            Reply::Text(b"a\r\n".to_vec()),
            Reply::Nil,
            Reply::Error("OOM full".into()),
            Reply::List(vec![Reply::Text(b"OK".to_vec())]),
        ]);
        assert_eq!(Reply::parse(bytes), Ok(Some((list, bytes.len() - 4))));
    }

    #[test]
    fn incomplete_reply_is_none() {
        let bytes = b"*3\r\n:1\r\n$2\r\nab\r\n-ERR no\r\n";
        for cut in 0..bytes.len() {
            assert_eq!(Reply::parse(&bytes[..cut]), Ok(None), "{cut}");
        }
        assert!(Reply::parse(bytes).unwrap().is_some());
    }

    #[test]
    fn mode_is_a_field_of_the_reply_to_hello() {
        let hello = |mode: &str| {
            let fields = ["server", "redis", "version", "7.0.15", "mode", mode, "role", "master", "modules"];
            let mut fields: Vec<Reply> = fields.iter().map(|field| Reply::Text((*field).into())).collect();
            fields.push(Reply::List(Vec::new()));
            Reply::List(fields)
        };
        for mode in ["cluster", "standalone", "sentinel"] {
            assert_eq!(hello(mode).field("mode"), Some(mode));
        }
        // A value that reads `mode` is no field, and other replies say nothing.
        let named_mode = ["server", "mode", "cluster", "x"].map(|field| Reply::Text(field.into()));
        assert_eq!(Reply::List(named_mode.to_vec()).field("mode"), None);
        assert_eq!(Reply::Text(b"OK".to_vec()).field("mode"), None);
        assert_eq!(Reply::Error("NOPERM".into()).field("mode"), None);
    }

    #[test]
    fn invalid_or_oversized_reply_is_rejected() {
        let deep = b"*1\r\n".repeat(100);
        let cases: [&[u8]; 8] = [
            b"HTTP/1.1 400 Bad Request\r\n",
            b"$1048577\r\n",
            b"*99999999999999999999\r\n",
            b"$-2\r\n",
            b":x\r\n",
            b"$1\r\nabc\r\n",
            b"\r\n",
            &deep,
        ];
        for bytes in cases {
            assert_eq!(Reply::parse(bytes), Err(ProtocolError), "{}", String::from_utf8_lossy(bytes));
        }
        assert_eq!(Reply::parse(&vec![b'+'; (LENGTH_MAX + 2) as usize]), Err(ProtocolError), "an endless line");
    }
}
