//! A running `tidegate serve`, and clients for its listeners.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::{Deref, DerefMut};
use std::process::{Command, ExitStatus, Stdio};

use super::{PATIENCE, Program, TOKEN, command};
use crate::http::{HttpClient, HttpResponse};
use crate::poll::eventually;
use crate::server::{Connection, Reply};

/// A running `tidegate serve`. Dropping it kills the process; if the test has failed, its output is printed.
#[derive(Debug)]
pub struct Serving {
    program: Program,
    /// The address of the HTTP listener.
    pub http: String,
    /// The address of the RESP listener.
    pub resp: String,
    /// The address of the admin listener.
    pub admin: String,
}

impl Serving {
    /// Starts the service with these further arguments and the admin token of the tests, and waits for its listeners.
    pub fn start(arguments: &[&str]) -> Serving {
        Serving::start_as(Serving::command(), arguments)
    }

    /// Returns the command `tidegate` with the admin token of the tests.
    pub fn command() -> Command {
        let mut command = command();
        command.env("TIDEGATE_ADMIN_TOKEN", TOKEN);
        command
    }

    /// Starts the service by this command with these further arguments, and waits for its listeners.
    pub fn start_as(command: Command, arguments: &[&str]) -> Serving {
        Serving::start_logging_to(Stdio::piped(), command, arguments)
    }

    /// Starts the service with its standard error connected to `stderr`, and waits until it has printed its addresses.
    ///
    /// Unless that is a pipe, [`wait_for_log`](Program::wait_for_log) and [`output`](Program::output) do not see its
    /// logs.
    pub fn start_logging_to(stderr: Stdio, mut command: Command, arguments: &[&str]) -> Serving {
        command.args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        let mut program = Program::start(command.args(arguments), stderr);
        let [http, resp, admin] = ["http", "resp", "admin"].map(|listener| program.address_of(listener));
        Serving { program, http, resp, admin }
    }

    /// Makes the service reload its configuration, and waits for a log line that contains `expected`.
    pub fn reload(&self, expected: &str) {
        self.signal("HUP");
        self.wait_for_log(expected);
    }

    /// Posts a body to `/v1/check` on a new connection. Returns head and body of the response as text.
    pub fn post(&self, body: &str) -> String {
        let head = format!(
            "POST /v1/check HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.send(head + body)
    }

    /// Sends bytes to the HTTP listener on a new connection. Returns everything received until the connection closes.
    pub fn send(&self, request: impl AsRef<[u8]>) -> String {
        let mut stream = TcpStream::connect(&self.http).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // A listener that rejects a request does not read all of it, so that writing may fail. It still responds.
        let _ = stream.write_all(request.as_ref());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Sends an inline command to the RESP listener. Returns the reply with spaces in place of line ends.
    pub fn send_inline(&self, command: &str) -> String {
        let mut stream = TcpStream::connect(&self.resp).unwrap();
        stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.replace("\r\n", " ")
    }

    /// Opens a connection to the RESP listener.
    pub fn connect(&self) -> Connection {
        Connection::open(self.resp_addr()).unwrap()
    }

    /// Returns the address of the RESP listener.
    pub fn resp_addr(&self) -> SocketAddr {
        self.resp.parse().unwrap()
    }

    /// Returns whether the process is running and answers a PING on a new RESP connection.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
            && matches!(self.connect().call(&["PING"]), Ok(Reply::Simple(pong)) if pong == "PONG")
    }

    /// Waits until the process exits.
    pub fn end(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Posts a body to `/v1/check` on a new connection.
    pub fn check(&self, body: &str) -> HttpResponse {
        HttpClient::open(&self.http).ask("POST", "/v1/check", &[], body)
    }

    /// Sends a request with the token to the admin listener.
    pub fn operate(&self, method: &str, path: &str) -> HttpResponse {
        let bearer = format!("Bearer {TOKEN}");
        HttpClient::open(&self.admin).ask(method, path, &[("authorization", &bearer)], "")
    }

    /// Sends a GET request without a token to the admin listener.
    pub fn visit(&self, path: &str) -> HttpResponse {
        HttpClient::open(&self.admin).ask("GET", path, &[], "")
    }

    /// Repeats a GET request to the admin listener until `holds` is true for the response, and returns that response.
    ///
    /// # Panics
    /// If that takes longer than [`eventually`] waits.
    pub fn until(&self, path: &str, holds: impl Fn(&HttpResponse) -> bool) -> HttpResponse {
        eventually(path, || self.visit(path), holds)
    }
}

impl Deref for Serving {
    type Target = Program;

    fn deref(&self) -> &Program {
        &self.program
    }
}

impl DerefMut for Serving {
    fn deref_mut(&mut self) -> &mut Program {
        &mut self.program
    }
}
