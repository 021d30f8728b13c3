//! The least of a Redis client: one blocking connection, one command, one reply (RESP2).
//!
//! The testkit has its own because it is what other clients are tested with: a reply read here owes nothing to the
//! client library whose reconnects and retries a test is about.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A server that says nothing for this long will not.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What a server answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// `+OK`
    Simple(String),
    /// `-ERR …`, without the minus
    Error(String),
    /// `:42`
    Integer(i64),
    /// `$3 abc`
    Bulk(Vec<u8>),
    /// `$-1` or `*-1`
    Nil,
    /// `*2 …`
    Array(Vec<Reply>),
}

impl Reply {
    /// The text of a simple string, a bulk string or a number.
    ///
    /// # Panics
    /// When it is anything else; an error reply with what it said.
    pub fn text(&self) -> String {
        match self {
            Reply::Simple(text) => text.clone(),
            Reply::Bulk(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Reply::Integer(integer) => integer.to_string(),
            other => panic!("expected a text, got {other:?}"),
        }
    }

    /// The number that an integer reply or a numeric text holds.
    ///
    /// # Panics
    /// When it holds none.
    pub fn integer(&self) -> i64 {
        let text = self.text();
        text.parse().unwrap_or_else(|_| panic!("expected an integer, got {text:?}"))
    }

    /// The items of an array.
    ///
    /// # Panics
    /// When it is no array.
    pub fn items(&self) -> &[Reply] {
        match self {
            Reply::Array(items) => items,
            other => panic!("expected an array, got {other:?}"),
        }
    }

    /// What an error reply says, if it is one.
    pub fn error(&self) -> Option<&str> {
        match self {
            Reply::Error(error) => Some(error),
            _ => None,
        }
    }
}

/// A connection that sends one command at a time.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects; silence of ten seconds is an error, here and later.
    pub fn open(addr: SocketAddr) -> io::Result<Connection> {
        let stream = TcpStream::connect_timeout(&addr, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream: BufReader::new(stream) })
    }

    /// Sends a command and reads its reply. After an error the connection is of no use any more.
    pub fn call(&mut self, parts: &[impl AsRef<[u8]>]) -> io::Result<Reply> {
        self.send(parts)?;
        self.receive()
    }

    /// The socket once more, for a thread that sends while this one receives.
    pub fn try_clone_stream(&self) -> io::Result<TcpStream> {
        self.stream.get_ref().try_clone()
    }

    /// Sends a command; its reply is for [`receive`](Connection::receive).
    pub fn send(&mut self, parts: &[impl AsRef<[u8]>]) -> io::Result<()> {
        let mut command = format!("*{}\r\n", parts.len()).into_bytes();
        for part in parts.iter().map(AsRef::as_ref) {
            command.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
            command.extend_from_slice(part);
            command.extend_from_slice(b"\r\n");
        }
        self.stream.get_mut().write_all(&command)
    }

    /// Reads one reply.
    pub fn receive(&mut self) -> io::Result<Reply> {
        let line = self.line()?;
        let (kind, rest) = line.split_at_checked(1).ok_or_else(|| malformed(&line))?;
        let number = || rest.parse::<i64>().map_err(|_| malformed(&line));
        Ok(match kind {
            "+" => Reply::Simple(rest.to_owned()),
            "-" => Reply::Error(rest.to_owned()),
            ":" => Reply::Integer(number()?),
            "$" | "*" if number()? < 0 => Reply::Nil,
            "$" => self.bulk(usize::try_from(number()?).map_err(|_| malformed(&line))?)?,
            "*" => Reply::Array((0..number()?).map(|_| self.receive()).collect::<io::Result<_>>()?),
            _ => return Err(malformed(&line)),
        })
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        match line.strip_suffix("\r\n") {
            Some(line) => Ok(line.to_owned()),
            None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("closed after {line:?}"))),
        }
    }

    fn bulk(&mut self, bytes: usize) -> io::Result<Reply> {
        let mut bulk = vec![0; bytes + 2];
        self.stream.read_exact(&mut bulk)?;
        if !bulk.ends_with(b"\r\n") {
            return Err(malformed(&String::from_utf8_lossy(&bulk)));
        }
        bulk.truncate(bytes);
        Ok(Reply::Bulk(bulk))
    }
}

fn malformed(line: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("no RESP2 reply: {line:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    /// What a client makes of a server that says this and hangs up.
    fn received(said: &'static [u8]) -> io::Result<Reply> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let server = thread::spawn(move || listener.accept().unwrap().0.write_all(said).unwrap());
        let reply = Connection::open(addr).unwrap().receive();
        server.join().unwrap();
        reply
    }

    #[test]
    fn every_kind_of_reply_is_read() {
        let said = b"*6\r\n+OK\r\n-ERR no\r\n:-7\r\n$4\r\na\r\nb\r\n$-1\r\n*0\r\n";
        let items = [
            Reply::Simple("OK".into()),
            Reply::Error("ERR no".into()),
            Reply::Integer(-7),
            Reply::Bulk(b"a\r\nb".to_vec()),
            Reply::Nil,
            Reply::Array(vec![]),
        ];
        assert_eq!(received(said).unwrap(), Reply::Array(items.to_vec()));
    }

    #[test]
    fn half_a_reply_is_an_error() {
        for said in [&b"+OK"[..], b"", b"$5\r\nabc", b"*2\r\n:1\r\n"] {
            assert_eq!(received(said).unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{said:?}");
        }
        for said in [&b"?\r\n"[..], b"\r\n", b":x\r\n", b"$3\r\nabcde"] {
            assert_eq!(received(said).unwrap_err().kind(), io::ErrorKind::InvalidData, "{said:?}");
        }
    }
}
