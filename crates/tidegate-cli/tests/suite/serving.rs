//! A running `tidegate serve` on free ports, started as a user would start it, and clients for its listeners.
#![allow(dead_code)] // each test file uses a part of this

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::{Connection, Reply};

/// Time after which a test stops waiting for an event and fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
pub(crate) const TOKEN: &str = "a-token-for-tests-only";

/// Returns the command `tidegate` without the environment variables that configure it.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let secrets = ["TIDEGATE_ADMIN_TOKEN", "TIDEGATE_RESP_PASSWORD", "TIDEGATE_HTTP_TOKEN"];
    for variable in secrets.into_iter().chain(["TIDEGATE_STORE", "REDIS_URL", "TIDEGATE_LOG"]) {
        command.env_remove(variable);
    }
    command
}

/// Runs a command that should exit by itself and returns its output.
///
/// A command that starts to serve instead is killed, so that its exit status fails the test.
pub(crate) fn ended(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut announced = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut announced).unwrap();
    if !announced.is_empty() {
        child.kill().unwrap();
    }
    child.wait_with_output().unwrap()
}

/// A running `tidegate serve`. Dropping it kills the process; if the test has failed, its output is printed.
pub(crate) struct Serving {
    pub(crate) child: Child,
    pub(crate) http: String,
    pub(crate) resp: String,
    pub(crate) admin: String,
    /// The lines that the process printed to standard output until all listeners were announced.
    pub(crate) announced: String,
    logs: Mutex<mpsc::Receiver<String>>,
    said: Arc<Mutex<String>>,
}

impl Serving {
    /// Starts the service with these further arguments and the admin token of the tests, and waits for its listeners.
    pub(crate) fn start(arguments: &[&str]) -> Serving {
        Serving::start_as(Serving::command(), arguments)
    }

    /// Returns the command `tidegate` with the admin token of the tests.
    pub(crate) fn command() -> Command {
        let mut command = command();
        command.env("TIDEGATE_ADMIN_TOKEN", TOKEN);
        command
    }

    /// Starts the service by this command with these further arguments, and waits for its listeners.
    pub(crate) fn start_as(command: Command, arguments: &[&str]) -> Serving {
        Serving::start_logging_to(Stdio::piped(), command, arguments)
    }

    /// Starts the service with its standard error connected to `stderr`.
    ///
    /// Unless that is a pipe, [`wait_for_log`](Serving::wait_for_log) and [`output`](Serving::output) do not see its
    /// logs.
    pub(crate) fn start_logging_to(stderr: Stdio, mut command: Command, arguments: &[&str]) -> Serving {
        command.args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        command.args(arguments).stdout(Stdio::piped()).stderr(stderr);
        let mut child = command.spawn().expect("the binary runs");
        let said = Arc::new(Mutex::new(String::new()));
        let lines = read_lines(child.stdout.take().expect("a pipe"), said.clone());
        let logs = match child.stderr.take() {
            Some(pipe) => read_lines(pipe, said.clone()),
            None => read_lines(std::io::empty(), said.clone()),
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

    /// Returns everything that the process has written so far to standard output and standard error.
    pub(crate) fn output(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Returns the content of a file in `/proc/PID`.
    pub(crate) fn proc(&self, file: &str) -> String {
        String::from_utf8_lossy(&std::fs::read(format!("/proc/{}/{file}", self.child.id())).unwrap()).into_owned()
    }

    /// Returns the resident memory of the process in bytes, without the pages of its files: those of the program itself
    /// become resident when they are first used.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = self.proc("status");
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).expect("a resident size");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
    }

    /// Makes the service reload its configuration, and waits for a log line that contains `expected`.
    pub(crate) fn reload(&self, expected: &str) {
        self.signal("HUP");
        self.wait_for_log(expected);
    }

    /// Posts a body to `/v1/check` on a new connection. Returns head and body of the response as text.
    pub(crate) fn post(&self, body: &str) -> String {
        let head = format!(
            "POST /v1/check HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.send(head + body)
    }

    /// Sends bytes to the HTTP listener on a new connection. Returns everything received until the connection closes.
    pub(crate) fn send(&self, request: impl AsRef<[u8]>) -> String {
        let mut stream = TcpStream::connect(&self.http).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // A listener that rejects a request does not read all of it, so that writing may fail. It still responds.
        let _ = stream.write_all(request.as_ref());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Sends an inline command to the RESP listener. Returns the reply with spaces in place of line ends.
    pub(crate) fn send_inline(&self, command: &str) -> String {
        let mut stream = TcpStream::connect(&self.resp).unwrap();
        stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.replace("\r\n", " ")
    }

    /// Opens a connection to the RESP listener.
    pub(crate) fn connect(&self) -> Connection {
        Connection::open(self.resp_addr()).unwrap()
    }

    pub(crate) fn resp_addr(&self) -> SocketAddr {
        self.resp.parse().unwrap()
    }

    /// Returns whether the process is running and answers a PING on a new RESP connection.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
            && matches!(self.connect().call(&["PING"]), Ok(Reply::Simple(pong)) if pong == "PONG")
    }

    /// Waits for a log line that contains `phrase` and returns it. Lines before it are skipped for later calls too.
    pub(crate) fn wait_for_log(&self, phrase: &str) -> String {
        loop {
            let line =
                self.logs.lock().unwrap().recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("not logged: {phrase}"));
            if line.contains(phrase) {
                return line;
            }
        }
    }

    /// Sends a signal to the process, by its name without `SIG`.
    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Waits until the process exits.
    pub(crate) fn end(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Posts a body to `/v1/check` on a new connection.
    pub(crate) fn check(&self, body: &str) -> Answer {
        Client::open(&self.http).ask("POST", "/v1/check", &[], body)
    }

    /// Sends a request with the token to the admin listener.
    pub(crate) fn operate(&self, method: &str, path: &str) -> Answer {
        let bearer = format!("Bearer {TOKEN}");
        Client::open(&self.admin).ask(method, path, &[("authorization", &bearer)], "")
    }

    /// Sends a GET request without a token to the admin listener.
    pub(crate) fn visit(&self, path: &str) -> Answer {
        Client::open(&self.admin).ask("GET", path, &[], "")
    }

    /// Repeats a GET request to the admin listener until `holds` is true for the response, and returns that response.
    pub(crate) fn until(&self, path: &str, holds: impl Fn(&Answer) -> bool) -> Answer {
        eventually(path, || self.visit(path), holds)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- output of tidegate serve ---\n{}---", self.output());
        }
    }
}

/// Reads lines from a pipe in a thread. Each line is appended to `said` and sent to the returned channel.
pub(crate) fn read_lines(pipe: impl Read + Send + 'static, said: Arc<Mutex<String>>) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            let mut said = said.lock().unwrap();
            said.push_str(&line);
            said.push('\n');
            let _ = sender.send(line);
        }
    });
    lines
}

/// A bind mount of one file over another. Dropping it unmounts.
pub(crate) struct BindMount(PathBuf);

impl BindMount {
    /// Mounts `source` over `target`. Returns `None` if this process may not mount.
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

/// A persistent HTTP connection.
pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    /// Connects to this address.
    pub(crate) fn open(address: &str) -> Client {
        Client::on(TcpStream::connect(address).unwrap())
    }

    /// Uses this connection.
    pub(crate) fn on(stream: TcpStream) -> Client {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client(BufReader::new(stream))
    }

    /// Sends a request and returns its response.
    pub(crate) fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.send(method, path, headers, body);
        self.receive().expect("an answer")
    }

    /// Sends a request without waiting for the response.
    pub(crate) fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        self.raw(format!("{head}\r\n{body}").as_bytes());
    }

    /// Sends bytes. Errors are ignored.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        // A listener that rejects a request does not read all of it, so that writing may fail. It still responds.
        let _ = self.0.get_mut().write_all(bytes);
    }

    /// Reads the next response. Returns `None` if the connection was closed.
    ///
    /// # Panics
    /// Panics if nothing is received within [`PATIENCE`].
    pub(crate) fn receive(&mut self) -> Option<Answer> {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("neither a response nor the end of the connection")
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
