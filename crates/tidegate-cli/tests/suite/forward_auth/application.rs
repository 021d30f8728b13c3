//! A small application behind the proxies, which records the requests that reach it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use tidegate_testkit::program::PATIENCE;

/// A request that reached the application.
pub(super) struct Received {
    /// The request line and the headers.
    pub(super) head: String,
    pub(super) body: Vec<u8>,
}

/// An HTTP server that answers every request with 200. Its threads end with the test process.
pub(super) struct Application {
    pub(super) address: String,
    received: Arc<Mutex<Vec<Received>>>,
}

impl Application {
    pub(super) fn start() -> Application {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let received = Arc::<Mutex<Vec<Received>>>::default();
        let kept = received.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let kept = kept.clone();
                thread::spawn(move || drop(answer(stream, &kept)));
            }
        });
        Application { address, received }
    }

    /// Returns the requests since the last call.
    pub(super) fn take(&self) -> Vec<Received> {
        std::mem::take(&mut self.received.lock().unwrap())
    }
}

/// Reads one request with a `Content-Length`, or without a body, and answers it.
fn answer(stream: TcpStream, received: &Mutex<Vec<Received>>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut stream = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body)?;
    received.lock().unwrap().push(Received { head, body });
    let text = "from the application";
    let response = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    );
    stream.get_mut().write_all(response.as_bytes())
}
