//! An HTTP/1.1 server that records every request byte for byte, and answers as a test wants.
#![allow(clippy::unwrap_used)] // a failed step fails its test

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A request that the server received.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// The request line and the headers, as they were received.
    pub head: String,
    /// The body, without the framing of chunks.
    pub body: Vec<u8>,
    /// The trailer lines of a chunked body, as they were received.
    pub trailers: String,
}

impl Recorded {
    /// Returns the path with its query.
    pub fn path(&self) -> &str {
        self.head.split(' ').nth(1).unwrap_or_default()
    }

    /// Returns the values of a header.
    pub fn all(&self, name: &str) -> Vec<&str> {
        let lines = self.head.lines().skip(1).filter_map(|line| line.split_once(": "));
        lines.filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
    }

    /// Returns the value of a header that is there exactly once.
    pub fn header(&self, name: &str) -> Option<&str> {
        let values = self.all(name);
        assert!(values.len() < 2, "{name}: {values:?}");
        values.first().copied()
    }
}

/// Answers a request on its connection. Returns whether the connection is kept.
type Respond = dyn Fn(&Recorded, &mut TcpStream) -> bool + Send + Sync;

struct Shared {
    requests: Mutex<Vec<Recorded>>,
    /// The paths of the requests that were answered and whose connections are kept.
    answered: Mutex<HashSet<String>>,
    connections: AtomicUsize,
    /// The open connections, by number.
    open: Mutex<HashMap<usize, TcpStream>>,
    is_stopped: AtomicBool,
    respond: Box<Respond>,
}

/// A recording server. Dropping it closes its socket and its connections.
pub struct Upstream {
    /// The address on which the server listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

impl Upstream {
    /// Starts a server that answers every request with 200 and `hello`.
    pub fn hello() -> Upstream {
        Upstream::start(|_, stream| ok(stream, "", b"hello"))
    }

    /// Starts a server that answers every request by `respond`.
    pub fn start(respond: impl Fn(&Recorded, &mut TcpStream) -> bool + Send + Sync + 'static) -> Upstream {
        Upstream::start_on("127.0.0.1:0".parse().unwrap(), respond)
    }

    /// Starts a server on this address.
    pub fn start_on(
        address: SocketAddr,
        respond: impl Fn(&Recorded, &mut TcpStream) -> bool + Send + Sync + 'static,
    ) -> Upstream {
        let socket = TcpListener::bind(address).unwrap();
        // The queue of the standard library is short. During an attack it would overflow, and delay connections by a second.
        socket2::SockRef::from(&socket).listen(4_096).unwrap();
        let address = socket.local_addr().unwrap();
        let shared = Arc::new(Shared {
            requests: Mutex::default(),
            answered: Mutex::default(),
            connections: AtomicUsize::new(0),
            open: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            respond: Box::new(respond),
        });
        let accepting = std::thread::spawn({
            let shared = shared.clone();
            move || accept(&socket, &shared)
        });
        Upstream { address, shared, accepting: Some(accepting) }
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the requests so far.
    pub fn requests(&self) -> Vec<Recorded> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// Returns the last request.
    pub fn last(&self) -> Recorded {
        self.requests().pop().expect("a request was received")
    }

    /// Returns the paths of the requests that were received and not answered. Paths must be unique.
    pub fn unanswered(&self) -> HashSet<String> {
        let received: HashSet<String> = self.requests().iter().map(|request| request.path().to_owned()).collect();
        received.difference(&self.shared.answered.lock().unwrap()).cloned().collect()
    }

    /// Returns the number of connections so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Closes the socket, and ends all connections at once.
    ///
    /// Requests that the gateway has sent by then are still recorded, but not answered.
    pub fn stop(&mut self) {
        let Some(accepting) = self.accepting.take() else { return };
        self.shared.is_stopped.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
        accepting.join().unwrap();
        for stream in self.shared.open.lock().unwrap().values() {
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Sends a response with status 200, these further header lines (each with its line end) and this body. Returns whether it
/// was sent.
pub fn ok(stream: &mut TcpStream, headers: &str, body: &[u8]) -> bool {
    reply(stream, "200 OK", headers, body)
}

/// Sends a response. Returns whether it was sent.
pub fn reply(stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]) -> bool {
    let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), body].concat()).is_ok()
}

fn accept(socket: &TcpListener, shared: &Arc<Shared>) {
    for stream in socket.incoming() {
        if shared.is_stopped.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else { continue };
        let number = shared.connections.fetch_add(1, Ordering::SeqCst);
        shared.open.lock().unwrap().insert(number, stream.try_clone().unwrap());
        let shared = shared.clone();
        std::thread::spawn(move || {
            let _close = CloseAtEnd { shared: &shared, number };
            serve(stream, &shared);
        });
    }
}

/// Closes a connection when it is dropped, even if its thread panics.
struct CloseAtEnd<'s> {
    shared: &'s Shared,
    number: usize,
}

impl Drop for CloseAtEnd<'_> {
    fn drop(&mut self) {
        let stream = self.shared.open.lock().unwrap().remove(&self.number);
        let _ = stream.map(|stream| stream.shutdown(Shutdown::Both));
    }
}

fn serve(mut stream: TcpStream, shared: &Shared) {
    let _ = stream.set_nodelay(true);
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Some(request) = receive(&mut reader) {
        shared.requests.lock().unwrap().push(request.clone());
        if shared.is_stopped.load(Ordering::SeqCst) {
            continue;
        }
        let is_kept = (shared.respond)(&request, &mut stream);
        if !is_kept {
            break;
        }
        shared.answered.lock().unwrap().insert(request.path().to_owned());
    }
}

/// Reads a request strictly: anything that is not exactly framed panics, which closes the connection.
fn receive(reader: &mut BufReader<TcpStream>) -> Option<Recorded> {
    let head = read_head(reader)?;
    let mut request = Recorded { head, ..Recorded::default() };
    let coding = request.header("transfer-encoding").map(str::to_owned);
    let length = request.header("content-length").map(|length| length.parse::<usize>().expect("a length"));
    match (coding.as_deref(), length) {
        (Some("chunked"), None) => loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
            let size = usize::from_str_radix(line.trim_end(), 16).expect("the size of a chunk");
            if size == 0 {
                request.trailers = read_head(reader)?;
                break;
            }
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk).ok()?;
            assert!(chunk.ends_with(b"\r\n"));
            request.body.extend_from_slice(&chunk[..size]);
        },
        (Some(other), _) => panic!("transfer-encoding {other}, content-length {length:?}"),
        (None, length) => {
            request.body = vec![0; length.unwrap_or(0)];
            reader.read_exact(&mut request.body).ok()?;
        }
    }
    Some(request)
}

/// Reads lines up to an empty one, which is not returned.
fn read_head(reader: &mut BufReader<TcpStream>) -> Option<String> {
    let mut head = String::new();
    loop {
        let mut line = Vec::new();
        reader.read_until(b'\n', &mut line).ok().filter(|count| *count > 0)?;
        let line = String::from_utf8_lossy(&line).into_owned();
        assert!(line.ends_with("\r\n"), "{line:?}");
        if line == "\r\n" {
            return Some(head);
        }
        head.push_str(&line);
    }
}
