//! A running `tidegate gateway` on free ports.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};

use tidegate_testkit::poll::eventually;

use crate::serving::{Answer, Client, PATIENCE, Serving, TOKEN, read_lines};

/// A running `tidegate gateway`. Dropping it kills the process; if the test has failed, its output is printed.
pub(crate) struct GatewayProcess {
    pub(crate) child: Child,
    /// The address on which it accepts requests.
    pub(crate) address: String,
    pub(crate) admin: String,
    logs: Mutex<mpsc::Receiver<String>>,
    said: Arc<Mutex<String>>,
    /// The directory of its configuration file.
    _dir: Option<tempfile::TempDir>,
}

impl GatewayProcess {
    /// Starts the gateway with these further arguments, and waits for its listeners.
    pub(crate) fn start(arguments: &[&str]) -> GatewayProcess {
        GatewayProcess::start_as(Serving::command(), arguments, None)
    }

    /// Starts the gateway with this configuration and these further arguments.
    pub(crate) fn configured(configuration: &str, arguments: &[&str]) -> GatewayProcess {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tidegate.toml");
        std::fs::write(&file, configuration).unwrap();
        let arguments = [&["--config", file.to_str().unwrap()], arguments].concat();
        GatewayProcess::start_as(Serving::command(), &arguments, Some(dir))
    }

    /// Starts the gateway by this command with these further arguments, and keeps `dir` until it is dropped.
    pub(crate) fn start_as(mut command: Command, arguments: &[&str], dir: Option<tempfile::TempDir>) -> GatewayProcess {
        command.args(["gateway", "--admin", "127.0.0.1:0", "--drain", "0s"]).args(arguments);
        if !arguments.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
        let said = Arc::new(Mutex::new(String::new()));
        let lines = read_lines(child.stdout.take().expect("a pipe"), said.clone());
        let logs = read_lines(child.stderr.take().expect("a pipe"), said.clone());
        let address = |listener: &str| loop {
            let line = lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{listener} is not announced: {said:?}"));
            if line.trim_start().starts_with(listener) {
                return line.split_whitespace().nth(1).expect("an address").to_owned();
            }
        };
        let [address, admin] = ["gateway", "admin"].map(address);
        GatewayProcess { child, address, admin, logs: Mutex::new(logs), said, _dir: dir }
    }

    /// Returns the path of the configuration file.
    pub(crate) fn file(&self) -> std::path::PathBuf {
        self.dir().join("tidegate.toml")
    }

    pub(crate) fn dir(&self) -> &Path {
        self._dir.as_ref().expect("it was started with a configuration").path()
    }

    /// Opens a connection to the gateway.
    pub(crate) fn client(&self) -> Client {
        Client::open(&self.address)
    }

    /// Opens a connection from this address of the machine, such as 127.0.0.2.
    pub(crate) fn client_from(&self, address: &str) -> Client {
        Client::on(self.connect_from(address))
    }

    /// Opens a connection from this address of the machine, for raw bytes.
    pub(crate) fn connect_from(&self, address: &str) -> TcpStream {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::new(address.parse().unwrap(), 0).into()).unwrap();
        socket.connect(&self.address.parse::<SocketAddr>().unwrap().into()).unwrap();
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends a GET request on a new connection.
    pub(crate) fn get(&self, path: &str) -> Answer {
        self.client().ask("GET", path, &[], "")
    }

    /// Opens a connection to the gateway, for raw bytes.
    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Returns the URL of a path, with this scheme.
    pub(crate) fn url(&self, scheme: &str, path: &str) -> String {
        format!("{scheme}://{}{path}", self.address)
    }

    /// Sends a request with the token to the admin listener.
    pub(crate) fn operate(&self, method: &str, path: &str) -> Answer {
        let bearer = format!("Bearer {TOKEN}");
        Client::open(&self.admin).ask(method, path, &[("authorization", &bearer)], "")
    }

    /// Repeats a GET request to the admin listener until `holds` is true for the response.
    pub(crate) fn until(&self, path: &str, holds: impl Fn(&Answer) -> bool) -> Answer {
        eventually(path, || Client::open(&self.admin).ask("GET", path, &[], ""), holds)
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

    /// Returns everything that the process has written so far.
    pub(crate) fn output(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Returns the resident memory of the process in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.memory_bytes("VmRSS:")
    }

    /// Returns the most resident memory that the process has had so far, in bytes.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.memory_bytes("VmHWM:")
    }

    fn memory_bytes(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(field)).expect("a size");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
    }

    /// Sends a signal to the process, by its name without `SIG`.
    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for GatewayProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- output of tidegate gateway ---\n{}---", self.output());
        }
    }
}
