//! What comes back over the wire: RESP2, as far as we ask for it.
//!
//! A reply is taken from the front of a buffer once it is whole. Lengths and nesting are bounded: a server that is none
//! (or a port that belongs to something else) must not make us allocate what it says.

/// More elements or bytes than any reply of ours has.
const LENGTH_MAX: i64 = 1 << 20;
const DEPTH_MAX: usize = 4;

/// What the server answered to a command.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reply {
    /// A number.
    Integer(i64),
    /// A simple or a bulk string.
    Text(Vec<u8>),
    /// Nothing: no such key, or a condition that did not hold.
    Nil,
    /// An error inside a list. One that is the whole reply is a [`StoreError`](tollgate_core::StoreError).
    Error(String),
    /// Several replies.
    List(Vec<Reply>),
}

/// The bytes are no RESP2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Garbled;

impl Reply {
    /// The first reply in `bytes` and how many bytes it takes; `None` while it is not whole.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Reply, usize)>, Garbled> {
        let mut parser = Parser { bytes, at: 0 };
        Ok(parser.reply(0)?.map(|reply| (reply, parser.at)))
    }

    /// The text, if it is one, and UTF-8.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Reply::Text(text) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }
}

struct Parser<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn reply(&mut self, depth: usize) -> Result<Option<Reply>, Garbled> {
        let Some(line) = self.line()? else { return Ok(None) };
        let (&kind, rest) = line.split_first().ok_or(Garbled)?;
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
            _ => Err(Garbled),
        }
    }

    fn line(&mut self) -> Result<Option<&[u8]>, Garbled> {
        let rest = &self.bytes[self.at..];
        match memchr::memchr(b'\n', rest) {
            Some(end) => {
                self.at += end + 1;
                rest[..end].strip_suffix(b"\r").map(Some).ok_or(Garbled)
            }
            None if rest.len() as i64 > LENGTH_MAX => Err(Garbled),
            None => Ok(None),
        }
    }

    fn bulk(&mut self, length: usize) -> Result<Option<Vec<u8>>, Garbled> {
        let rest = &self.bytes[self.at..];
        let Some(with_end) = rest.get(..length + 2) else { return Ok(None) };
        let (text, end) = with_end.split_at(length);
        if end != b"\r\n" {
            return Err(Garbled);
        }
        self.at += length + 2;
        Ok(Some(text.to_vec()))
    }
}

fn integer(text: &[u8]) -> Result<i64, Garbled> {
    std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).ok_or(Garbled)
}

fn length(text: &[u8]) -> Result<Option<usize>, Garbled> {
    match integer(text)? {
        -1 => Ok(None),
        length @ 0..=LENGTH_MAX => Ok(Some(length as usize)),
        _ => Err(Garbled),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_read_and_what_follows_is_left() {
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
    fn a_reply_cut_anywhere_is_waited_for() {
        let bytes = b"*3\r\n:1\r\n$2\r\nab\r\n-ERR no\r\n";
        for cut in 0..bytes.len() {
            assert_eq!(Reply::parse(&bytes[..cut]), Ok(None), "{cut}");
        }
        assert!(Reply::parse(bytes).unwrap().is_some());
    }

    #[test]
    fn what_is_no_reply_is_refused_without_allocating_for_it() {
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
            assert_eq!(Reply::parse(bytes), Err(Garbled), "{}", String::from_utf8_lossy(bytes));
        }
        assert_eq!(Reply::parse(&vec![b'+'; (LENGTH_MAX + 2) as usize]), Err(Garbled), "an endless line");
    }
}
