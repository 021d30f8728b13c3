//! A server process under load, and what each answer costs it.
//!
//! **The load.** A few connections, each with so many questions under way: they are sent on every connection, then the answers are
//! read from every connection, then the next are sent. One thread, the same code for every contestant, so that what
//! differs is the server. All that is sent at a time is written down before any of it is sent: a client that stops to
//! write lets the server fall asleep in between, the more often the longer its questions are.
//!
//! **What is measured** is the processor time of the server's process, user and system, divided by the answers: what a
//! machine must be bought for. It does not depend on how fast the client is, and little on who else uses the machine.

use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A child process, ended when dropped.
pub struct Process {
    child: Child,
    /// Where it answers.
    pub addr: SocketAddr,
}

/// How a contestant is asked, and how its answers end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// RESP; an answer has so many lines.
    Resp {
        /// How many.
        lines: usize,
    },
    /// HTTP/1.1 with a `content-length`.
    Http,
}

/// Writes the nth question.
pub type Write = Box<dyn FnMut(u64, &mut Vec<u8>)>;

/// One kind of question.
pub struct Questions {
    /// How the answers end.
    pub protocol: Protocol,
    /// What is asked.
    pub write: Write,
}

/// Connections to one server.
pub struct Load {
    streams: Vec<TcpStream>,
    asked: u64,
    /// What to send on each connection.
    requests: Vec<Vec<u8>>,
    buffer: Vec<u8>,
}

impl Process {
    /// Starts it, and waits until its port accepts.
    pub fn start(command: &mut Command, addr: SocketAddr) -> Process {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let process = Process { child, addr };
        for _ in 0..2_000 {
            if TcpStream::connect(addr).is_ok() {
                return process;
            }
            // A process tells nobody when it listens; between looks there is a pause.
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{command:?} does not listen on {addr}");
    }

    /// Processor time in seconds that it has used so far, all threads.
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

/// Processor time in seconds that a process has used so far, all its threads (none of which may have ended).
pub fn cpu_seconds(pid: u32) -> f64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a running process");
    let ns = threads.map(|thread| {
        let path = thread.expect("a running process").path().join("schedstat");
        let schedstat = std::fs::read_to_string(path).expect("a kernel that counts, by CONFIG_SCHED_INFO");
        schedstat.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).expect("nanoseconds on a processor")
    });
    ns.sum::<u64>() as f64 * 1e-9
}

/// An address of 127.0.0.1 on which nobody listens at this moment.
pub fn free_addr() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port")
}

/// The optimised `tollgate`, built if it is not.
pub fn tollgate_binary() -> PathBuf {
    cargo(&["build", "--release", "--locked", "-p", "tollgate-cli"]);
    target_dir().join("release/tollgate")
}

/// Another build to measure beside it, if `TOLLGATE_BENCH_BEFORE` names one.
pub fn binary_before() -> Option<PathBuf> {
    std::env::var_os("TOLLGATE_BENCH_BEFORE").map(PathBuf::from)
}

/// A published peer, installed beside our own builds if it is not.
///
/// # Panics
/// When it is not installed and a program that its build needs is missing; `how` says where to get that.
pub fn published(name: &str, needs: &str, how: &str) -> PathBuf {
    let root = target_dir().join("peers");
    let binary = root.join("bin").join(name);
    if !binary.exists() {
        let is_there = Command::new(needs).arg("--version").stdout(Stdio::null()).status().is_ok();
        assert!(is_there, "{name} is to be installed, and its build needs {needs}: {how}");
        println!("{name} is being installed");
        let root = root.to_str().expect("a path in Unicode");
        cargo(&["install", "--locked", "--root", root, name]);
    }
    binary
}

fn cargo(arguments: &[&str]) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo).args(arguments).status().expect("cargo runs");
    assert!(status.success(), "cargo {arguments:?}: {status}");
}

/// Where cargo puts what it builds: this very program is in it.
fn target_dir() -> PathBuf {
    let program = std::env::current_exe().expect("a program");
    program.ancestors().nth(3).map(Path::to_path_buf).expect("target/release/deps/program")
}

impl Load {
    /// So many connections, which go on after so many questions.
    pub fn new(addr: SocketAddr, connections: usize, asked: u64) -> Load {
        let connect = |_| {
            let stream = TcpStream::connect(addr).expect("the server accepts");
            stream.set_nodelay(true).expect("a socket");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
            stream
        };
        let streams = (0..connections).map(connect).collect();
        Load { streams, asked, requests: vec![Vec::new(); connections], buffer: vec![0; 1 << 16] }
    }

    /// How many were asked.
    pub fn asked(&self) -> u64 {
        self.asked
    }

    /// Asks at least `count` questions, `depth` at a time on each connection; says how many.
    pub fn run(&mut self, questions: &mut Questions, depth: usize, count: usize) -> usize {
        let mut answered = 0;
        while answered < count {
            for request in &mut self.requests {
                request.clear();
                for _ in 0..depth {
                    (questions.write)(self.asked, request);
                    self.asked += 1;
                }
            }
            for (stream, request) in self.streams.iter_mut().zip(&self.requests) {
                stream.write_all(request).expect("the server reads");
            }
            for stream in &mut self.streams {
                match questions.protocol {
                    Protocol::Resp { lines } => read_lines(stream, &mut self.buffer, depth * lines),
                    Protocol::Http => (0..depth).for_each(|_| read_response(stream, &mut self.buffer)),
                }
                answered += depth;
            }
        }
        answered
    }
}

fn read_lines(stream: &mut TcpStream, buffer: &mut [u8], lines: usize) {
    let mut seen = 0;
    while seen < lines {
        let read = stream.read(buffer).expect("the server answers");
        assert!(read > 0, "the server closed");
        assert!(buffer[0] != b'-' || seen > 0, "an error: {}", String::from_utf8_lossy(&buffer[..read]));
        seen += buffer[..read].iter().filter(|byte| **byte == b'\n').count();
    }
    assert_eq!(seen, lines, "more was answered than asked");
}

/// One response, which must be alone on its way: HTTP is not pipelined.
fn read_response(stream: &mut TcpStream, buffer: &mut [u8]) {
    let mut filled = 0;
    loop {
        let read = stream.read(&mut buffer[filled..]).expect("the server answers");
        assert!(read > 0, "the server closed");
        filled += read;
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut response = httparse::Response::new(&mut headers);
        if let Ok(httparse::Status::Complete(head)) = response.parse(&buffer[..filled]) {
            assert!(matches!(response.code, Some(200 | 429)), "{}", String::from_utf8_lossy(&buffer[..filled]));
            let length = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
            let length: usize =
                length.and_then(|header| std::str::from_utf8(header.value).ok()?.parse().ok()).expect("a length");
            if filled >= head + length {
                return;
            }
        }
    }
}
