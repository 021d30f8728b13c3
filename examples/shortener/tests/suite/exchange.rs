//! HTTP requests and their responses.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// An HTTP response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// Sends a request to `address` on a new connection and reads the whole response. `line` is the method and the
    /// path.
    pub(crate) fn to(address: SocketAddr, line: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut request = format!("{line} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // A server that rejects a body that is too large may close the connection before all of it is sent.
        let _ = stream.write_all(request.as_bytes());
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        Answer::read(&bytes).unwrap_or_else(|| panic!("{line}: no response, but {:?}", String::from_utf8_lossy(&bytes)))
    }

    /// Sends the same request `count` times on one connection, one after the other, and reads all responses.
    pub(crate) fn to_many(address: SocketAddr, line: &str, body: &str, count: usize) -> Vec<Answer> {
        let length = body.len();
        let request = format!("{line} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {length}\r\n\r\n{body}");
        let mut reader = BufReader::new(TcpStream::connect(address).unwrap());
        reader.get_ref().set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut one = || {
            reader.get_mut().write_all(request.as_bytes()).unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                assert_ne!(reader.read_until(b'\n', &mut head).unwrap(), 0, "the connection was closed");
            }
            let mut answer = Answer::read(&head).unwrap();
            answer.body.resize(answer.header("content-length").parse().unwrap(), 0);
            reader.read_exact(&mut answer.body).unwrap();
            answer
        };
        (0..count).map(|_| one()).collect()
    }

    fn read(bytes: &[u8]) -> Option<Answer> {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
        let mut lines = std::str::from_utf8(&bytes[..end]).ok()?.split("\r\n");
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let headers =
            lines.filter_map(|line| line.split_once(": ")).map(|(name, value)| (name.to_lowercase(), value.to_owned()));
        Some(Answer { status, headers: headers.collect(), body: bytes[end + 4..].to_vec() })
    }

    pub(crate) fn has_header(&self, name: &str) -> bool {
        self.header_names().any(|known| known == name)
    }

    /// Returns the value of a header. Panics if the response does not have it.
    pub(crate) fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str()).unwrap_or_else(|| panic!("no {name} in {self:?}"))
    }

    pub(crate) fn header_names(&self) -> impl Iterator<Item = &str> {
        self.headers.iter().map(|(name, _)| name.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Returns the slug of a created link. Panics if the status is not 201.
    pub(crate) fn slug(&self) -> String {
        assert_eq!(self.status, 201, "{}", self.text());
        self.json()["slug"].as_str().unwrap().to_owned()
    }

    /// Returns all texts in double quotes that directly follow one of these.
    pub(crate) fn quoted_after<const N: usize>(&self, openings: [&str; N]) -> Vec<String> {
        let text = self.text();
        let quoted = |opening| text.split(opening).skip(1).filter_map(|rest| rest.strip_prefix('"')?.split('"').next());
        openings.into_iter().flat_map(quoted).map(str::to_owned).collect()
    }
}
