//! A client for HTTP/1.1 that shows a test exactly what it received, HTTP/2 frames, and a server that records requests.

pub mod frames;
pub mod upstream;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};

use crate::program::PATIENCE;

/// An HTTP response.
#[derive(Debug)]
pub struct HttpResponse {
    /// The status code.
    pub status: u16,
    /// The headers, by their names in lower case. Of several headers with one name, the last.
    pub headers: BTreeMap<String, String>,
    /// The body.
    pub body: String,
}

impl HttpResponse {
    /// Returns the value of a header, whose name must be in lower case.
    ///
    /// # Panics
    /// If the response does not have it.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(String::as_str).unwrap_or_else(|| panic!("no {name} in {self:?}"))
    }

    /// Returns the body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A persistent HTTP connection.
#[derive(Debug)]
pub struct HttpClient(BufReader<TcpStream>);

impl HttpClient {
    /// Connects to this address.
    ///
    /// # Panics
    /// If that fails.
    pub fn open(address: impl ToSocketAddrs) -> HttpClient {
        HttpClient::on(TcpStream::connect(address).expect("the server accepts connections"))
    }

    /// Uses this connection.
    ///
    /// # Panics
    /// If its options cannot be set.
    pub fn on(stream: TcpStream) -> HttpClient {
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket option");
        stream.set_nodelay(true).expect("a socket option");
        HttpClient(BufReader::new(stream))
    }

    /// Sends a request and returns its response.
    ///
    /// # Panics
    /// If the connection ends before the response, or nothing is received within [`PATIENCE`].
    pub fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> HttpResponse {
        self.send(method, path, headers, body);
        self.receive().expect("an answer")
    }

    /// Sends a request without waiting for the response.
    pub fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        self.raw(format!("{head}\r\n{body}").as_bytes());
    }

    /// Sends bytes. Errors are ignored.
    pub fn raw(&mut self, bytes: &[u8]) {
        // A listener that rejects a request does not read all of it, so that writing may fail. It still responds.
        let _ = self.0.get_mut().write_all(bytes);
    }

    /// Reads the next response. Its body is as long as its `content-length` says, and empty without one.
    ///
    /// Returns `None` if the connection was closed.
    ///
    /// # Panics
    /// If nothing is received within [`PATIENCE`], or what is received is not a response.
    pub fn receive(&mut self) -> Option<HttpResponse> {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("neither a response nor the end of the connection")
            }
            Err(_) => return None,
        }
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line: {line:?}"));
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let length = headers.get("content-length").map_or(0, |length| length.parse().expect("a length"));
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).ok()?;
        Some(HttpResponse { status, headers, body: String::from_utf8(body).expect("a body in UTF-8") })
    }
}
