//! A running `tollgate serve` on free ports, as a user would start it, and clients for its listeners.
#![allow(dead_code)] // each test file uses its part

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use tollgate_testkit::poll::eventually;
use tollgate_testkit::server::{Connection, Reply};

/// Timeout of everything that a test waits for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
const TOKEN: &str = "a-token-for-tests-only";

/// Returns the command, without the variables of the environment that it reads.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    for variable in ["TOLLGATE_STORE", "REDIS_URL", "TOLLGATE_ADMIN_TOKEN", "TOLLGATE_RESP_PASSWORD", "TOLLGATE_LOG"] {
        command.env_remove(variable);
    }
    command
}

/// Runs a command that should exit by itself. If it starts to serve instead, it is killed, which fails the test.
pub(crate) fn ended(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut announced = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut announced).unwrap();
    if !announced.is_empty() {
        child.kill().unwrap();
    }
    child.wait_with_output().unwrap()
}

/// A running service. Dropping it kills the process.
pub(crate) struct Serving {
    pub(crate) child: Child,
    pub(crate) http: String,
    pub(crate) resp: String,
    pub(crate) admin: String,
    /// Everything that it printed before it served.
    pub(crate) announced: String,
    logs: Mutex<mpsc::Receiver<String>>,
    said: Arc<Mutex<String>>,
}

impl Serving {
    /// Starts the service with an admin token that the tests know.
    pub(crate) fn start(arguments: &[&str]) -> Serving {
        Serving::start_as(Serving::command(), arguments)
    }

    /// Returns the command with an admin token that the tests know.
    pub(crate) fn command() -> Command {
        let mut command = command();
        command.env("TOLLGATE_ADMIN_TOKEN", TOKEN);
        command
    }

    /// Starts the service with this command.
    pub(crate) fn start_as(command: Command, arguments: &[&str]) -> Serving {
        Serving::start_logging_to(Stdio::piped(), command, arguments)
    }

    /// Starts the service with its logs going to `stderr`. Unless that is a pipe, `hear` finds nothing.
    pub(crate) fn start_logging_to(stderr: Stdio, mut command: Command, arguments: &[&str]) -> Serving {
        command.args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        command.args(arguments).stdout(Stdio::piped()).stderr(stderr);
        let mut child = command.spawn().expect("the binary runs");
        let said = Arc::new(Mutex::new(String::new()));
        let lines = heard(child.stdout.take().expect("a pipe"), said.clone());
        let logs = match child.stderr.take() {
            Some(pipe) => heard(pipe, said.clone()),
            None => heard(std::io::empty(), said.clone()),
        };
        let mut announced = String::new();
        let mut address = |listener: &str| loop {
            let line = lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{listener} is not announced: {said:?}"));
            announced = announced.clone() + &line + "\n";
            if line.trim_start().starts_with(listener) {
                return line.split_whitespace().nth(1).expect("an address").to_owned();
            }
        };
        let [http, resp, admin] = ["http", "resp", "admin"].map(&mut address);
        Serving { child, http, resp, admin, announced, logs: Mutex::new(logs), said }
    }

    /// Returns everything that it has written so far to standard output and standard error.
    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Returns a file of the process in `/proc`.
    pub(crate) fn proc(&self, file: &str) -> String {
        String::from_utf8_lossy(&std::fs::read(format!("/proc/{}/{file}", self.child.id())).unwrap()).into_owned()
    }

    /// Returns its resident memory.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = self.proc("status");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a resident size");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
    }

    /// Sends SIGHUP, and waits for a log line that contains `said`.
    pub(crate) fn reload(&self, said: &str) {
        self.signal("HUP");
        self.hear(said);
    }

    /// Sends a check over HTTP and returns the whole response.
    pub(crate) fn post(&self, body: &str) -> String {
        let head = format!(
            "POST /v1/check HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.send(head + body)
    }

    /// Sends bytes to the HTTP listener, and returns everything that it sends until it closes the connection.
    pub(crate) fn send(&self, request: impl AsRef<[u8]>) -> String {
        let mut stream = TcpStream::connect(&self.http).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // A listener that refuses a request does not read it to the end; its response is read all the same.
        let _ = stream.write_all(request.as_ref());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Sends an inline command to the RESP listener and returns the reply, with spaces in place of line ends.
    pub(crate) fn say(&self, command: &str) -> String {
        let mut stream = TcpStream::connect(&self.resp).unwrap();
        stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.replace("\r\n", " ")
    }

    /// Connects to the RESP listener.
    pub(crate) fn connect(&self) -> Connection {
        Connection::open(self.resp_addr()).unwrap()
    }

    pub(crate) fn resp_addr(&self) -> SocketAddr {
        self.resp.parse().unwrap()
    }

    /// Returns whether it is running and answers on a new connection.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
            && matches!(self.connect().call(&["PING"]), Ok(Reply::Simple(pong)) if pong == "PONG")
    }

    /// Waits for a log line that contains this, and returns it. Earlier lines are dropped.
    pub(crate) fn hear(&self, phrase: &str) -> String {
        loop {
            let line =
                self.logs.lock().unwrap().recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("not logged: {phrase}"));
            if line.contains(phrase) {
                return line;
            }
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Waits until it exits.
    pub(crate) fn end(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Sends a check to the HTTP listener.
    pub(crate) fn check(&self, body: &str) -> Answer {
        Client::open(&self.http).ask("POST", "/v1/check", &[], body)
    }

    /// Sends a request to the admin listener, with the token.
    pub(crate) fn operate(&self, method: &str, path: &str) -> Answer {
        let bearer = format!("Bearer {TOKEN}");
        Client::open(&self.admin).ask(method, path, &[("authorization", &bearer)], "")
    }

    /// Sends a request to the admin listener, without the token.
    pub(crate) fn visit(&self, path: &str) -> Answer {
        Client::open(&self.admin).ask("GET", path, &[], "")
    }

    /// Sends requests to the admin listener until the response is as expected.
    pub(crate) fn until(&self, path: &str, holds: impl Fn(&Answer) -> bool) -> Answer {
        eventually(path, || self.visit(path), holds)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- output of tollgate serve ---\n{}---", self.said());
        }
    }
}

/// Reads a pipe to its end, and sends each line to the returned channel.
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

/// A file that is mounted over another one, until it is dropped.
pub(crate) struct BindMount(PathBuf);

impl BindMount {
    /// Returns `None` if this process may not mount.
    pub(crate) fn new(source: &Path, target: &Path) -> Option<BindMount> {
        let output = Command::new("mount").arg("--bind").args([source, target]).output().ok()?;
        output.status.success().then(|| BindMount(target.to_owned()))
    }
}

impl Drop for BindMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).output();
    }
}

/// An HTTP response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

/// An HTTP connection, kept open.
pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    pub(crate) fn open(address: &str) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client(BufReader::new(stream))
    }

    pub(crate) fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.send(method, path, headers, body);
        self.hear().expect("an answer")
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        self.raw(format!("{head}\r\n{body}").as_bytes());
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        // A listener that refuses a request does not read it to the end; its response is read all the same.
        let _ = self.0.get_mut().write_all(bytes);
    }

    /// Reads the next response; `None` if the connection was closed instead.
    pub(crate) fn hear(&mut self) -> Option<Answer> {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("neither an answer nor an end")
            }
            Err(_) => return None,
        }
        let status = line.split(' ').nth(1).expect("a status line").parse().unwrap();
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.insert(name.to_owned(), value.to_owned());
        }
        let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).ok()?;
        Some(Answer { status, headers, body: String::from_utf8(body).unwrap() })
    }
}
