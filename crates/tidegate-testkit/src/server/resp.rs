//! A minimal Redis client: one blocking connection, one command, one reply (RESP2).
//!
//! The testkit has its own client because it tests other clients: a reply read here does not depend on the reconnects
//! and retries of the client library under test.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Timeout of connecting and of each read and write.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A RESP2 reply of a server.
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
    /// Returns the text of a simple string, a bulk string or an integer.
    ///
    /// # Panics
    /// If it is any other reply, such as an error. The message contains the reply.
    pub fn text(&self) -> String {
        match self {
            Reply::Simple(text) => text.clone(),
            Reply::Bulk(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Reply::Integer(integer) => integer.to_string(),
            other => panic!("expected a text, got {other:?}"),
        }
    }

    /// Returns the number in an integer reply or a numeric text.
    ///
    /// # Panics
    /// If the reply is not a number.
    pub fn integer(&self) -> i64 {
        let text = self.text();
        text.parse().unwrap_or_else(|_| panic!("expected an integer, got {text:?}"))
    }

    /// Returns the items of an array.
    ///
    /// # Panics
    /// If the reply is not an array.
    pub fn items(&self) -> &[Reply] {
        match self {
            Reply::Array(items) => items,
            other => panic!("expected an array, got {other:?}"),
        }
    }

    /// Returns the message of an error reply, or `None` for any other reply.
    pub fn error(&self) -> Option<&str> {
        match self {
            Reply::Error(error) => Some(error),
            _ => None,
        }
    }
}

/// A blocking connection to a server that speaks RESP2.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects to a server. Connecting and each later read or write time out after 10 seconds.
    ///
    /// # Errors
    /// If the connection cannot be opened.
    pub fn open(addr: SocketAddr) -> io::Result<Connection> {
        let stream = TcpStream::connect_timeout(&addr, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream: BufReader::new(stream) })
    }

    /// Sends a command and reads its reply, which may be an error reply.
    ///
    /// # Errors
    /// If the connection fails or times out, or the reply is malformed. The connection must not be used afterwards.
    pub fn call(&mut self, parts: &[impl AsRef<[u8]>]) -> io::Result<Reply> {
        self.send(parts)?;
        self.receive()
    }

    /// Returns the number of script calls that the server has executed, by source or by hash.
    ///
    /// # Errors
    /// If the connection fails or times out, or the server does not report it.
    pub fn script_calls(&mut self) -> io::Result<u64> {
        let info = match self.call(&["INFO", "commandstats"])? {
            Reply::Bulk(info) => String::from_utf8_lossy(&info).into_owned(),
            other => return Err(io::Error::other(format!("the reply to INFO is {other:?}"))),
        };
        let calls = |line: &str| {
            let fields = line.strip_prefix("cmdstat_evalsha:").or_else(|| line.strip_prefix("cmdstat_eval:"))?;
            fields.split(',').find_map(|field| field.strip_prefix("calls=")?.parse::<u64>().ok())
        };
        Ok(info.lines().filter_map(calls).sum())
    }

    /// Returns a second handle of the socket, for a thread that sends while this one receives.
    ///
    /// # Errors
    /// If the operating system cannot duplicate the socket.
    pub fn try_clone_stream(&self) -> io::Result<TcpStream> {
        self.stream.get_ref().try_clone()
    }

    /// Sends a command. Read its reply with [`receive`](Connection::receive).
    ///
    /// # Errors
    /// If the connection fails or times out.
    pub fn send(&mut self, parts: &[impl AsRef<[u8]>]) -> io::Result<()> {
        let mut command = format!("*{}\r\n", parts.len()).into_bytes();
        for part in parts.iter().map(AsRef::as_ref) {
            command.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
            command.extend_from_slice(part);
            command.extend_from_slice(b"\r\n");
        }
        self.stream.get_mut().write_all(&command)
    }

    /// Reads one reply, which may be an error reply.
    ///
    /// # Errors
    /// If the connection is closed or times out, or the reply is malformed.
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
    io::Error::new(io::ErrorKind::InvalidData, format!("not a RESP2 reply: {line:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    /// Returns what a client reads from a server that sends these bytes and closes the connection.
    fn received(sent: &'static [u8]) -> io::Result<Reply> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let server = thread::spawn(move || listener.accept().unwrap().0.write_all(sent).unwrap());
        let reply = Connection::open(addr).unwrap().receive();
        server.join().unwrap();
        reply
    }

    #[test]
    fn every_kind_of_reply_is_read() {
        let sent = b"*6\r\n+OK\r\n-ERR no\r\n:-7\r\n$4\r\na\r\nb\r\n$-1\r\n*0\r\n";
        let items = [
            Reply::Simple("OK".into()),
            Reply::Error("ERR no".into()),
            Reply::Integer(-7),
            Reply::Bulk(b"a\r\nb".to_vec()),
            Reply::Nil,
            Reply::Array(vec![]),
        ];
        assert_eq!(received(sent).unwrap(), Reply::Array(items.to_vec()));
    }

    #[test]
    fn half_a_reply_is_an_error() {
        for sent in [&b"+OK"[..], b"", b"$5\r\nabc", b"*2\r\n:1\r\n"] {
            assert_eq!(received(sent).unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{sent:?}");
        }
        for sent in [&b"?\r\n"[..], b"\r\n", b":x\r\n", b"$3\r\nabcde"] {
            assert_eq!(received(sent).unwrap_err().kind(), io::ErrorKind::InvalidData, "{sent:?}");
        }
    }
}
