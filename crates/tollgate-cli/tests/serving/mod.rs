//! A running `tollgate serve`, for tests that ask it as a user would.
#![allow(dead_code)] // no test file uses all of it

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use tollgate_testkit::server::{Connection, Reply};

/// Silence for longer is a failure.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running `tollgate serve` on free ports; ended by its own id.
pub(crate) struct Serving {
    child: Child,
    pub(crate) http: String,
    pub(crate) resp: String,
    logs: mpsc::Receiver<String>,
    said: Arc<Mutex<String>>,
}

impl Serving {
    pub(crate) fn start(arguments: &[&str]) -> Serving {
        Serving::with(|command| drop(command.args(arguments)))
    }

    /// With whatever `settings` adds to the command.
    pub(crate) fn with(settings: impl FnOnce(&mut Command)) -> Serving {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
        command.args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0"]);
        command.env_remove("TOLLGATE_STORE").env_remove("REDIS_URL").env_remove("TOLLGATE_LOG");
        settings(&mut command);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
        let said = Arc::new(Mutex::new(String::new()));
        let announced = heard(child.stdout.take().expect("a pipe"), said.clone());
        let logs = heard(child.stderr.take().expect("a pipe"), said.clone());
        let address = |door: &str| loop {
            let line = announced.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{door} is not announced: {said:?}"));
            if line.trim_start().starts_with(door) {
                return line.split_whitespace().nth(1).expect("an address").to_owned();
            }
        };
        let (http, resp) = (address("http"), address("resp"));
        Serving { child, http, resp, logs, said }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it has written so far, on standard output and standard error.
    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// What the kernel knows about it.
    pub(crate) fn proc(&self, file: &str) -> String {
        String::from_utf8_lossy(&std::fs::read(format!("/proc/{}/{file}", self.pid())).unwrap()).into_owned()
    }

    /// The memory that it holds at this moment.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = self.proc("status");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a resident size");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
    }

    /// Waits until a line of its log has this in it.
    pub(crate) fn wait_for(&self, said: &str) {
        while !self.logs.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("it never said {said:?}")).contains(said) {}
    }

    /// Tells it to read its configuration again, and waits until it says what came of it.
    pub(crate) fn reload(&self, said: &str) {
        let status = Command::new("kill").args(["-HUP", &self.pid().to_string()]).status().unwrap();
        assert!(status.success());
        self.wait_for(said);
    }

    /// One question over HTTP: head and body of the answer.
    pub(crate) fn post(&self, body: &str) -> String {
        let head = format!(
            "POST /v1/check HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.send(head + body)
    }

    /// Bytes to the HTTP door, and everything that comes back until it closes.
    pub(crate) fn send(&self, request: impl AsRef<[u8]>) -> String {
        let mut stream = TcpStream::connect(&self.http).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_ref()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// One command at the RESP door, in words.
    pub(crate) fn say(&self, command: &str) -> String {
        let mut stream = TcpStream::connect(&self.resp).unwrap();
        stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.replace("\r\n", " ")
    }

    /// A connection to the RESP door.
    pub(crate) fn connect(&self) -> Connection {
        Connection::open(self.resp_addr()).unwrap()
    }

    pub(crate) fn resp_addr(&self) -> SocketAddr {
        self.resp.parse().unwrap()
    }

    /// Ends it as a crash would.
    pub(crate) fn kill9(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Whether it is still there and answers somebody new.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
            && matches!(self.connect().call(&["PING"]), Ok(Reply::Simple(pong)) if pong == "PONG")
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- tollgate serve said ---\n{}---", self.said());
        }
    }
}

/// Reads a pipe to its end, line by line: each is kept, and told to whoever waits.
fn heard(pipe: impl Read + Send + 'static, said: Arc<Mutex<String>>) -> mpsc::Receiver<String> {
    let (tell, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            let mut said = said.lock().unwrap();
            said.push_str(&line);
            said.push('\n');
            let _ = tell.send(line);
        }
    });
    lines
}
