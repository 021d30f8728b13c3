//! A running `tidegate gateway`.

use std::net::{SocketAddr, TcpStream};
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{PATIENCE, Program, Serving, TOKEN};
use crate::http::{HttpClient, HttpResponse};
use crate::poll::eventually;

/// A running `tidegate gateway`. Dropping it kills the process; if the test has failed, its output is printed.
#[derive(Debug)]
pub struct GatewayProcess {
    program: Program,
    /// The address on which it accepts requests.
    pub address: String,
    /// The address of the admin listener.
    pub admin: String,
    /// The directory of its configuration file.
    dir: Option<tempfile::TempDir>,
}

impl GatewayProcess {
    /// Starts the gateway with these further arguments, and waits for its listeners.
    pub fn start(arguments: &[&str]) -> GatewayProcess {
        GatewayProcess::start_as(Serving::command(), arguments, None)
    }

    /// Starts the gateway with this configuration and these further arguments.
    pub fn configured(configuration: &str, arguments: &[&str]) -> GatewayProcess {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tidegate.toml");
        std::fs::write(&file, configuration).unwrap();
        let arguments = [&["--config", file.to_str().unwrap()], arguments].concat();
        GatewayProcess::start_as(Serving::command(), &arguments, Some(dir))
    }

    /// Starts the gateway by this command with these further arguments, and keeps `dir` until it is dropped.
    pub fn start_as(mut command: Command, arguments: &[&str], dir: Option<tempfile::TempDir>) -> GatewayProcess {
        command.args(["gateway", "--admin", "127.0.0.1:0", "--drain", "0s"]).args(arguments);
        if !arguments.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        let mut program = Program::start(&mut command, Stdio::piped());
        let [address, admin] = ["gateway", "admin"].map(|listener| program.address_of(listener));
        GatewayProcess { program, address, admin, dir }
    }

    /// Returns the path of the configuration file.
    ///
    /// # Panics
    /// If the gateway was started without one.
    pub fn file(&self) -> PathBuf {
        self.dir().join("tidegate.toml")
    }

    /// Returns the directory of the configuration file.
    ///
    /// # Panics
    /// If the gateway was started without one.
    pub fn dir(&self) -> &Path {
        self.dir.as_ref().expect("it was started with a configuration").path()
    }

    /// Opens a connection to the gateway.
    pub fn client(&self) -> HttpClient {
        HttpClient::open(&self.address)
    }

    /// Opens a connection from this address of the machine, such as 127.0.0.2.
    pub fn client_from(&self, address: &str) -> HttpClient {
        HttpClient::on(self.connect_from(address))
    }

    /// Opens a connection from this address of the machine, for raw bytes.
    pub fn connect_from(&self, address: &str) -> TcpStream {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::new(address.parse().unwrap(), 0).into()).unwrap();
        socket.connect(&self.address.parse::<SocketAddr>().unwrap().into()).unwrap();
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends a GET request on a new connection.
    pub fn get(&self, path: &str) -> HttpResponse {
        self.client().ask("GET", path, &[], "")
    }

    /// Opens a connection to the gateway, for raw bytes.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Returns the URL of a path, with this scheme.
    pub fn url(&self, scheme: &str, path: &str) -> String {
        format!("{scheme}://{}{path}", self.address)
    }

    /// Sends a request with the token to the admin listener.
    pub fn operate(&self, method: &str, path: &str) -> HttpResponse {
        let bearer = format!("Bearer {TOKEN}");
        HttpClient::open(&self.admin).ask(method, path, &[("authorization", &bearer)], "")
    }

    /// Repeats a GET request to the admin listener until `holds` is true for the response, and returns that response.
    pub fn until(&self, path: &str, holds: impl Fn(&HttpResponse) -> bool) -> HttpResponse {
        eventually(path, || HttpClient::open(&self.admin).ask("GET", path, &[], ""), holds)
    }
}

impl Deref for GatewayProcess {
    type Target = Program;

    fn deref(&self) -> &Program {
        &self.program
    }
}

impl DerefMut for GatewayProcess {
    fn deref_mut(&mut self) -> &mut Program {
        &mut self.program
    }
}
