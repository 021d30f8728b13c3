//! Server processes under load, and their CPU time per response.
//!
//! **The load.** One thread has a few connections, each with a fixed number of requests in flight. It sends requests on
//! every connection, then reads the responses from every connection, then sends the next ones. The code is the same for
//! all servers, so differences come from the server. All requests of one step are encoded before the first is sent. A
//! client that encodes between two sends lets the server go to sleep in between, and more often with longer requests.
//!
//! **The result** is the CPU time of the server process, user and system, divided by the number of responses. It does not
//! depend on the speed of the client, and little on other load on the machine.

use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A server that runs as a child process. Dropping it kills the process.
pub struct Process {
    child: Child,
    /// The address that the load is sent to.
    pub addr: SocketAddr,
}

/// The protocol of a server, which determines where a response ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// RESP.
    Resp {
        /// The number of lines in each response.
        lines: usize,
    },
    /// HTTP/1.1. Every response has a `content-length`.
    Http,
}

/// Appends the request with the given number, encoded, to the buffer.
pub type WriteRequest = Box<dyn FnMut(u64, &mut Vec<u8>)>;

/// A source of requests of one kind.
pub struct RequestSource {
    /// The protocol of the responses.
    pub protocol: Protocol,
    /// Encodes the requests.
    pub write: WriteRequest,
}

/// A client with several connections to one server.
pub struct Load {
    streams: Vec<TcpStream>,
    /// The number of the next request.
    sent: u64,
    /// The bytes to send on each connection.
    requests: Vec<Vec<u8>>,
    buffer: Vec<u8>,
}

impl Process {
    /// Starts the command, and waits until `addr` accepts connections. Its output is discarded.
    ///
    /// # Panics
    /// Panics if the command cannot be started or does not accept connections within about ten seconds.
    pub fn start(command: &mut Command, addr: SocketAddr) -> Process {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let process = Process { child, addr };
        for _ in 0..2_000 {
            if TcpStream::connect(addr).is_ok() {
                return process;
            }
            // There is no signal for "listening", so this polls.
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{command:?} does not listen on {addr}");
    }

    /// Returns the CPU time that the threads of the process have used so far, in seconds.
    ///
    /// # Panics
    /// Panics like [`cpu_seconds`].
    pub fn cpu_seconds(&self) -> f64 {
        cpu_seconds(self.child.id())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the CPU time that the threads of a process have used so far, in seconds.
///
/// The time of threads that have ended is not included, so no thread may end between two calls that are compared.
///
/// # Panics
/// Panics if the process does not run, or if the kernel does not provide `/proc/PID/task/TID/schedstat` (Linux with
/// `CONFIG_SCHED_INFO`).
pub fn cpu_seconds(pid: u32) -> f64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a running process");
    let ns = threads.map(|thread| {
        let path = thread.expect("a running process").path().join("schedstat");
        let schedstat = std::fs::read_to_string(path).expect("schedstat of a kernel with CONFIG_SCHED_INFO");
        schedstat.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).expect("the CPU time in nanoseconds")
    });
    ns.sum::<u64>() as f64 * 1e-9
}

/// Returns an address on 127.0.0.1 whose port is free at the moment.
///
/// The port is not reserved: another process may take it before the caller does.
pub fn free_addr() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port")
}

/// Builds `tidegate` in release mode if it is not up to date, and returns the path of the binary.
///
/// If `TIDEGATE_BENCH_BINARY` is set, builds nothing and returns that path.
///
/// # Panics
/// Panics if the build fails.
pub fn tidegate_binary() -> PathBuf {
    if let Some(binary) = std::env::var_os("TIDEGATE_BENCH_BINARY") {
        return binary.into();
    }
    cargo(&["build", "--release", "--locked", "-p", "tidegate-cli"]);
    target_dir().join("release/tidegate")
}

/// Returns the path of another `tidegate` binary to compare with, from `TIDEGATE_BENCH_BEFORE`, or `None` if it is not set.
pub fn binary_before() -> Option<PathBuf> {
    std::env::var_os("TIDEGATE_BENCH_BEFORE").map(PathBuf::from)
}

/// Returns the path of the binary of a published crate, and installs it with cargo into `target/peers` if it is missing.
///
/// `build_tool` is a program that the build of the crate needs, and `install_hint` is the command that installs it.
///
/// # Panics
/// Panics if the crate is not installed yet and the build tool is missing or the build fails.
pub fn install_peer(name: &str, build_tool: &str, install_hint: &str) -> PathBuf {
    let root = target_dir().join("peers");
    let binary = root.join("bin").join(name);
    if !binary.exists() {
        let has_tool = Command::new(build_tool).arg("--version").stdout(Stdio::null()).status().is_ok();
        assert!(has_tool, "cannot install {name}: its build needs {build_tool} ({install_hint})");
        println!("installing {name}");
        let root = root.to_str().expect("a path in Unicode");
        cargo(&["install", "--locked", "--root", root, name]);
    }
    binary
}

/// Runs cargo and panics if it fails.
fn cargo(arguments: &[&str]) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo).args(arguments).status().expect("cargo runs");
    assert!(status.success(), "cargo {arguments:?}: {status}");
}

/// Returns the target directory of cargo, in which this program lies.
fn target_dir() -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    program.ancestors().nth(3).map(Path::to_path_buf).expect("target/release/deps/program")
}

impl Load {
    /// Opens the given number of connections, at least one. The first request has the number `sent`.
    ///
    /// # Panics
    /// Panics if the server does not accept a connection.
    pub fn new(addr: SocketAddr, connections: usize, sent: u64) -> Load {
        let connect = |_| {
            let stream = TcpStream::connect(addr).expect("a connection");
            stream.set_nodelay(true).expect("a socket option");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket option");
            stream
        };
        let streams = (0..connections).map(connect).collect();
        Load { streams, sent, requests: vec![Vec::new(); connections], buffer: vec![0; 1 << 16] }
    }

    /// Returns the number of the next request: `sent` of [`new`](Load::new) plus the requests sent since.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends at least `count` requests, `depth` at a time on each connection, and returns the number of responses.
    ///
    /// All responses have been read when it returns. `depth` must be 1 for HTTP.
    ///
    /// # Panics
    /// Panics if a connection fails, if no bytes arrive for 20 seconds, or if a response has an unexpected form: an HTTP
    /// status other than 200 and 429, too few or too many RESP lines, or a RESP error first.
    pub fn run(&mut self, source: &mut RequestSource, depth: usize, count: usize) -> usize {
        let mut received = 0;
        while received < count {
            for request in &mut self.requests {
                request.clear();
                for _ in 0..depth {
                    (source.write)(self.sent, request);
                    self.sent += 1;
                }
            }
            for (stream, request) in self.streams.iter_mut().zip(&self.requests) {
                stream.write_all(request).expect("the server reads requests");
            }
            for stream in &mut self.streams {
                match source.protocol {
                    Protocol::Resp { lines } => read_lines(stream, &mut self.buffer, depth * lines),
                    Protocol::Http => (0..depth).for_each(|_| read_response(stream, &mut self.buffer)),
                }
                received += depth;
            }
        }
        received
    }
}

/// Reads exactly `lines` lines.
fn read_lines(stream: &mut TcpStream, buffer: &mut [u8], lines: usize) {
    let mut seen = 0;
    while seen < lines {
        let read = stream.read(buffer).expect("a response");
        assert!(read > 0, "the server closed the connection");
        assert!(buffer[0] != b'-' || seen > 0, "error response: {}", String::from_utf8_lossy(&buffer[..read]));
        seen += buffer[..read].iter().filter(|byte| **byte == b'\n').count();
    }
    assert_eq!(seen, lines, "more lines than expected");
}

/// Reads one HTTP response. No other may be in flight on this connection, because bytes behind it are discarded.
fn read_response(stream: &mut TcpStream, buffer: &mut [u8]) {
    let mut filled = 0;
    loop {
        let read = stream.read(&mut buffer[filled..]).expect("a response");
        assert!(read > 0, "the server closed the connection");
        filled += read;
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut response = httparse::Response::new(&mut headers);
        if let Ok(httparse::Status::Complete(head)) = response.parse(&buffer[..filled]) {
            assert!(matches!(response.code, Some(200 | 429)), "{}", String::from_utf8_lossy(&buffer[..filled]));
            let length = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
            let length: usize = length
                .and_then(|header| std::str::from_utf8(header.value).ok()?.parse().ok())
                .expect("a content-length");
            if filled >= head + length {
                return;
            }
        }
    }
}
