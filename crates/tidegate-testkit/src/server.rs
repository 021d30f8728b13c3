//! A real Redis or Valkey server for one test, which the test can kill, stop and restart.
//!
//! A fake store only shows the failures that its author thought of. How a store behaves when its process is killed,
//! stopped, restarted or out of memory can only be tested with a real process, so each test starts its own:
//!
//! ```no_run
//! use tidegate_testkit::server::{Brand, Config};
//!
//! let server = Config::new(Brand::Redis).set("maxmemory", "4mb").start();
//! assert_eq!(server.command(&["SET", "key", "1"]).text(), "OK");
//! server.stop(); // SIGSTOP: the port still accepts connections, but no command is answered
//! server.cont();
//! server.restart(); // kill -9, then a start on the same port with the same directory
//! ```
//!
//! **Isolated.** The server listens on a free port of 127.0.0.1 and keeps its files in a directory that is removed with
//! it. Other servers on the machine are not used, and only our own child process is ever signalled.
//!
//! **Ready means ours.** Another process may take the port between our choosing it and our server listening on it. Then
//! the other server would answer our PING. So a server is ready when its own log says that it listens and PING is
//! answered. If the port was taken, another one is tried.
//!
//! **No orphans.** If the test process is killed, a stopped server would stay forever. So each server has a *leash*: a
//! shell that reads from a pipe whose other end only the test process holds. It kills the server when the pipe closes.
//!
//! **Logs.** If a server is dropped while its test panics, the end of its log is printed.

use std::fs::{self, OpenOptions};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::process::{Signal, WaitId, WaitIdOptions, waitid};
use tempfile::TempDir;

use crate::certificates::{Authority, Identity};
use crate::poll::poll;
use process::Process;

pub use brand::Brand;
pub use cluster::{Cluster, SLOTS, SharedCluster};
pub use port::free as free_port;
pub use resp::{Connection, Reply};
pub use sentinel::{MASTER_NAME, SentinelGroup, SharedSentinelGroup};

mod brand;
mod cluster;
mod port;
mod process;
mod resp;
mod sentinel;
#[cfg(test)]
mod tests;

/// Number of ports to try before giving up.
const PORTS_TRIED_MAX: usize = 20;
/// Number of lines at the end of the log that a failure shows.
const LOG_LINES_SHOWN: usize = 40;

/// The configuration of a server.
#[derive(Clone, Debug)]
pub struct Config {
    brand: Brand,
    mode: Mode,
    settings: Vec<(String, String)>,
    environment: Vec<(String, String)>,
    has_tls: bool,
}

/// The role in which the server's binary is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// A server with keys.
    Server,
    /// A Sentinel, which writes what it learns into its configuration file.
    Sentinel,
}

impl Config {
    /// Creates a configuration without persistence and with the DEBUG command enabled.
    pub fn new(brand: Brand) -> Config {
        let (settings, environment) = (Vec::new(), Vec::new());
        let config = Config { brand, mode: Mode::Server, settings, environment, has_tls: false };
        config
            .set("save", "\"\"")
            .set("appendonly", "no")
            .set("enable-debug-command", "yes")
            .set("repl-diskless-sync-delay", "0")
    }

    /// Adds a line to the configuration file. A later line overrides an earlier one.
    ///
    /// The syntax is that of the server's documentation: `set("maxmemory", "4mb")`,
    /// `set("user", "alice on >secret ~* +@all")`, `set("replicaof", "127.0.0.1 7001")`.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Config {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Sets an environment variable of the server's process, which otherwise has the environment of this process.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Config {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Makes the server also listen for TLS, on a separate port, with the certificate `identity`. Clients need a
    /// certificate of `authority`.
    ///
    /// `tls-auth-clients` can be [set](Config::set) to `no` afterwards. Only Redis is built with TLS here, not Valkey.
    #[must_use]
    pub fn tls(mut self, authority: &Authority, identity: &Identity) -> Config {
        self.has_tls = true;
        let path = |path: &Path| path.display().to_string();
        self.set("tls-cert-file", &path(&identity.cert_file))
            .set("tls-key-file", &path(&identity.key_file))
            .set("tls-ca-cert-file", &path(authority.file()))
            .set("tls-auth-clients", "yes")
    }

    /// Adds a user with these rules, such as `~* +@all`, and disables the default user.
    ///
    /// The commands of the harness and the replication of a cluster use another user, which may do everything.
    #[must_use]
    pub fn only_user(self, name: &str, password: &str, rules: &str) -> Config {
        self.set("user", "harness on >harness ~* &* +@all")
            .set("user", "default off")
            .set("user", &format!("{name} on >{password} {rules}"))
            .set("masteruser", "harness")
            .set("masterauth", "harness")
    }

    /// Enables persistence: acknowledged writes survive [`Server::kill9`] and [`Server::restart`].
    ///
    /// The append-only file is written before the reply is sent, and the kernel keeps what a killed process has
    /// written. `appendfsync` is `no`: with `everysec` the server delays writes while it syncs, but still sends
    /// replies.
    #[must_use]
    pub fn persistent(self) -> Config {
        self.set("appendonly", "yes").set("appendfsync", "no")
    }

    /// Starts the server and waits until it answers PING.
    ///
    /// # Panics
    /// If the server's binary is not found or does not start. The message has the reason.
    pub fn start(self) -> Server {
        let binary = self.brand.binary().unwrap_or_else(|problem| panic!("{problem}"));
        let dir = TempDir::with_prefix("tidegate-").expect("a temporary directory");
        let mut server = Server { config: self, binary, dir, port: 0, tls_port: None, process: Mutex::default() };
        for _ in 0..PORTS_TRIED_MAX {
            server.port = port::free();
            server.tls_port = server.config.has_tls.then(port::free);
            if server.launch() {
                server.wait_until_serving();
                return server;
            }
        }
        panic!("{PORTS_TRIED_MAX} ports in a row were in use\n{}", server.log_end());
    }

    /// Returns the text of the configuration file: the port and directory, then the lines of [`set`](Config::set).
    fn file(&self, port: u16, tls_port: Option<u16>, dir: &Path) -> String {
        let mut file = format!("bind 127.0.0.1\nport {port}\ndir {}\n", dir.display());
        if let Some(tls_port) = tls_port {
            file.push_str(&format!("tls-port {tls_port}\n"));
        }
        for (name, value) in &self.settings {
            file.push_str(&format!("{name} {value}\n"));
        }
        file
    }

    /// Returns the value of the last line with this name, or `None` if there is none.
    fn setting(&self, name: &str) -> Option<&str> {
        self.settings.iter().rev().find(|(set, _)| set == name).map(|(_, value)| value.as_str())
    }
}

/// A running server. Dropping it kills the process, waits until it has ended, and removes its files.
///
/// If it is dropped while its thread panics, it prints the end of its log to standard error.
///
/// All methods take `&self`, so that one thread can stop or kill the server while others use it.
#[derive(Debug)]
pub struct Server {
    config: Config,
    binary: PathBuf,
    dir: TempDir,
    port: u16,
    tls_port: Option<u16>,
    process: Mutex<Option<Process>>,
}

impl Server {
    /// Starts a Redis server with the default configuration of [`Config::new`].
    ///
    /// # Panics
    /// See [`Config::start`].
    pub fn redis() -> Server {
        Config::new(Brand::Redis).start()
    }

    /// Starts a Valkey server with the default configuration of [`Config::new`].
    ///
    /// # Panics
    /// See [`Config::start`].
    pub fn valkey() -> Server {
        Config::new(Brand::Valkey).start()
    }

    /// Returns whether this is a Redis or a Valkey server.
    pub fn brand(&self) -> Brand {
        self.config.brand
    }

    /// Returns the port on 127.0.0.1. It does not change when the server is restarted.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the port on 127.0.0.1 that requires TLS.
    ///
    /// # Panics
    /// If the server was configured without [`Config::tls`].
    pub fn tls_port(&self) -> u16 {
        self.tls_port.expect("a server with TLS")
    }

    /// Returns the address: 127.0.0.1 and the port.
    pub fn addr(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// Returns `redis://127.0.0.1:PORT`, without a password.
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// Returns the process id, which changes with a restart.
    ///
    /// # Panics
    /// If the server was killed and not restarted.
    pub fn pid(&self) -> u32 {
        self.process().as_ref().expect("a running server").child.id()
    }

    /// Returns the server's log since the first start, across restarts.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_path()).unwrap_or_default()).into_owned()
    }

    /// Opens a new connection, authenticated if `requirepass` is set or the default user is
    /// [disabled](Config::only_user).
    ///
    /// # Errors
    /// If the server does not accept the connection or does not reply to AUTH. An error reply to AUTH is ignored.
    pub fn connect(&self) -> io::Result<Connection> {
        let mut connection = Connection::open(self.addr())?;
        if let Some(password) = self.config.setting("requirepass") {
            connection.call(&["AUTH", password])?;
        }
        if let (Some(user), Some(password)) = (self.config.setting("masteruser"), self.config.setting("masterauth")) {
            connection.call(&["AUTH", user, password])?;
        }
        Ok(connection)
    }

    /// Sends one command on a new connection and returns its reply, which may be an error reply.
    ///
    /// # Panics
    /// If there is no reply within 10 seconds or the connection fails.
    pub fn command(&self, parts: &[&str]) -> Reply {
        let reply = self.connect().and_then(|mut connection| connection.call(parts));
        reply.unwrap_or_else(|error| panic!("{parts:?} got no reply: {error}\n{}", self.log_end()))
    }

    /// Returns the number of script calls that the server has executed, by source or by hash.
    ///
    /// # Panics
    /// If there is no reply within 10 seconds or the connection fails.
    pub fn script_calls(&self) -> u64 {
        let calls = self.connect().and_then(|mut connection| connection.script_calls());
        calls.unwrap_or_else(|error| panic!("the number of script calls is unknown: {error}\n{}", self.log_end()))
    }

    /// Kills the process with SIGKILL and waits until it has ended. Does nothing if it does not run.
    pub fn kill9(&self) {
        *self.process() = None;
    }

    /// Stops the process with SIGSTOP and waits until it has stopped.
    ///
    /// The kernel still accepts connections, but no command is answered.
    ///
    /// # Panics
    /// If the server does not run.
    pub fn stop(&self) {
        let process = self.process();
        let pid = process.as_ref().expect("a running server").signal(Signal::STOP);
        let stopped =
            || matches!(waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG), Ok(Some(_)));
        assert!(poll(stopped), "SIGSTOP did not stop process {}", pid.as_raw_nonzero());
    }

    /// Continues a stopped process with SIGCONT, and does not wait for that. It then answers the commands sent in the
    /// meantime.
    ///
    /// # Panics
    /// If the server does not run.
    pub fn cont(&self) {
        self.process().as_ref().expect("a running server").signal(Signal::CONT);
    }

    /// Kills the process if it runs, and starts it again on the same port with the same directory.
    ///
    /// Waits until the server answers PING.
    ///
    /// # Panics
    /// If the server does not start, or its port stays in use.
    pub fn restart(&self) {
        self.restart_without_waiting();
        self.wait_until_serving();
    }

    /// Restarts the server like [`restart`](Server::restart), with one more line in its configuration.
    ///
    /// For settings that cannot be changed while the server runs, such as `cluster-enabled`.
    ///
    /// # Panics
    /// If the server does not start, or its port stays in use.
    pub fn restart_with(&mut self, name: &str, value: &str) {
        self.config.settings.push((name.into(), value.into()));
        self.restart();
    }

    /// Restarts the server like [`restart`](Server::restart), but returns as soon as it listens.
    ///
    /// While the server loads its data, it answers LOADING. To make that take longer, fill it, `SAVE`, and set
    /// `key-load-delay` and `loading-process-events-interval-bytes`.
    ///
    /// # Panics
    /// If the server does not start, or its port stays in use.
    pub fn restart_without_waiting(&self) {
        self.kill9();
        assert!(poll(|| self.launch()), "port {} is in use by another process\n{}", self.port, self.log_end());
    }

    /// Starts the process and waits until its log says that it listens.
    ///
    /// A Sentinel is started with the configuration that it has written itself, if any. Returns `true` if the process
    /// listens, and `false` if its port is in use.
    ///
    /// # Panics
    /// If the process exits for another reason, or does not listen within about 30 seconds.
    fn launch(&self) -> bool {
        let config_path = self.dir.path().join("server.conf");
        let (mode, ready) = match self.config.mode {
            Mode::Server => (None, "Server initialized"),
            Mode::Sentinel => (Some("--sentinel"), "Sentinel ID is"),
        };
        let file = self.config.file(self.port, self.tls_port, self.dir.path());
        let has_own_file =
            mode.is_some() && fs::read_to_string(&config_path).is_ok_and(|own| own.contains(&self.line()));
        if !has_own_file {
            fs::write(&config_path, file).expect("a writable temporary directory");
        }
        let log =
            OpenOptions::new().create(true).append(true).open(self.log_path()).expect("a writable temporary directory");
        let logged_before = self.log().len();
        let mut process =
            Process::start(&self.binary, (&config_path, mode), &self.config.environment, log, self.dir.path());

        let mut exited = None;
        let settled = poll(|| {
            // Check for the exit first: the log is then complete.
            exited = process.child.try_wait().expect("a child of ours");
            exited.is_some() || self.log()[logged_before..].contains(ready)
        });
        let log = self.log()[logged_before..].to_owned();
        match exited {
            None if settled => *self.process() = Some(process),
            Some(_) if log.contains("Address already in use") => return false,
            Some(status) => panic!("{} exited during its start: {status}\n{log}", self.binary.display()),
            None => panic!("{} does not listen on port {}\n{log}", self.binary.display(), self.port),
        }
        true
    }

    /// Returns the line of the configuration file that has the port.
    fn line(&self) -> String {
        format!("port {}\n", self.port)
    }

    /// Waits until the server answers PING with anything but LOADING, such as PONG or an error.
    ///
    /// # Panics
    /// If that takes longer than about 30 seconds.
    fn wait_until_serving(&self) {
        let mut last = String::new();
        let serving = poll(|| match self.connect().and_then(|mut connection| connection.call(&["PING"])) {
            Ok(Reply::Error(error)) if error.starts_with("LOADING") => {
                last = error;
                false
            }
            // Errors such as NOAUTH, NOPERM and too many clients also come from a server that is ready.
            Ok(_) => true,
            Err(error) => {
                last = error.to_string();
                false
            }
        });
        assert!(serving, "the server does not answer PING: {last}\n{}", self.log_end());
    }

    fn process(&self) -> MutexGuard<'_, Option<Process>> {
        // After a panic of another thread the process must still be killed.
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("server.log")
    }

    /// Returns the last 40 lines of the log between a heading and a line of dashes, for failure messages.
    fn log_end(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let shown = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
        format!("--- end of the log of {} on port {} ---\n{}\n---", self.binary.display(), self.port, shown.join("\n"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill9();
        if thread::panicking() {
            eprintln!("{}", self.log_end());
        }
    }
}
