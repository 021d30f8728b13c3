//! A real Redis or Valkey for one test, and the means to mistreat it.
//!
//! A store that is faked behaves as its faker thinks. What happens when the process is killed, stopped, restarted
//! or out of memory is learned from the process itself, so each test gets its own:
//!
//! ```no_run
//! use tollgate_testkit::server::{Brand, Config};
//!
//! let server = Config::new(Brand::Redis).set("maxmemory", "4mb").start();
//! assert_eq!(server.command(&["SET", "key", "1"]).text(), "OK");
//! server.stop(); // SIGSTOP: the port still accepts, nothing answers
//! server.cont();
//! server.restart(); // kill -9, then the same port and the same directory
//! ```
//!
//! **Alone.** It listens on a free port of 127.0.0.1 and keeps everything in a directory that goes when it goes.
//! Nothing is assumed of servers that happen to run, and none but our own child is ever signalled.
//!
//! **Ready means ours.** Between choosing a free port and listening on it somebody else may take it, and then it is
//! *their* server that answers our PING. So readiness is two things: our child's own log says that it listens,
//! and PING is answered. A child that died of a taken port gets another port.
//!
//! **No orphans.** A test process may be killed, and a stopped server would then sleep forever. Each server has a
//! leash: a shell that reads from a pipe whose other end only we hold, and that ends the server when the pipe closes.
//!
//! **Logs.** When a server is dropped while its test panics, the end of its log is printed with the failure.

use std::fs::{self, OpenOptions};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::process::{Signal, WaitId, WaitIdOptions, waitid};
use tempfile::TempDir;

use crate::look::poll;
use process::Process;

pub use brand::Brand;
pub use resp::{Connection, Reply};

mod brand;
mod port;
mod process;
mod resp;
#[cfg(test)]
mod tests;

/// How often a taken port may be met before something else must be wrong.
const PORTS_TRIED_MAX: usize = 20;
/// How much of the log a failure shows.
const LOG_LINES_SHOWN: usize = 40;

/// What a server is started with.
#[derive(Clone, Debug)]
pub struct Config {
    brand: Brand,
    settings: Vec<(String, String)>,
    environment: Vec<(String, String)>,
}

impl Config {
    /// A server that keeps nothing on disk and allows DEBUG.
    pub fn new(brand: Brand) -> Config {
        let config = Config { brand, settings: Vec::new(), environment: Vec::new() };
        config
            .set("save", "\"\"")
            .set("appendonly", "no")
            .set("enable-debug-command", "yes")
            .set("repl-diskless-sync-delay", "0")
    }

    /// One line of the configuration file, as the server's documentation writes it: `set("maxmemory", "4mb")`,
    /// `set("user", "alice on >secret ~* +@all")`, `set("replicaof", "127.0.0.1 7001")`. A later line wins.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Config {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// An environment variable of the server's process.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Config {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Keeps what it answered for over [`Server::kill9`] and [`Server::restart`]: the append-only file is
    /// written before the reply is, and the kernel keeps what a killed process has written. It is left to the kernel when that
    /// reaches the disk: a server that sees to it every second does not write while it does, and replies all the same.
    #[must_use]
    pub fn persistent(self) -> Config {
        self.set("appendonly", "yes").set("appendfsync", "no")
    }

    /// Starts the server and waits until it serves.
    ///
    /// # Panics
    /// When this machine has no such server, or when it does not start; the message says why.
    pub fn start(self) -> Server {
        let binary = self.brand.binary().unwrap_or_else(|problem| panic!("{problem}"));
        let dir = TempDir::with_prefix("tollgate-").expect("a temporary directory");
        let mut server = Server { config: self, binary, dir, port: 0, process: Mutex::default() };
        for _ in 0..PORTS_TRIED_MAX {
            server.port = port::free();
            if server.launch() {
                server.wait_until_serving();
                return server;
            }
        }
        panic!("met {PORTS_TRIED_MAX} taken ports in a row\n{}", server.log_end());
    }

    fn file(&self, port: u16, dir: &Path) -> String {
        let mut file = format!("bind 127.0.0.1\nport {port}\ndir {}\n", dir.display());
        for (name, value) in &self.settings {
            file.push_str(&format!("{name} {value}\n"));
        }
        file
    }

    fn setting(&self, name: &str) -> Option<&str> {
        self.settings.iter().rev().find(|(set, _)| set == name).map(|(_, value)| value.as_str())
    }
}

/// A running server, killed and cleared away when dropped. All methods take `&self`, so that one thread can
/// mistreat it while others use it.
#[derive(Debug)]
pub struct Server {
    config: Config,
    binary: PathBuf,
    dir: TempDir,
    port: u16,
    process: Mutex<Option<Process>>,
}

impl Server {
    /// A Redis with nothing set.
    pub fn redis() -> Server {
        Config::new(Brand::Redis).start()
    }

    /// A Valkey with nothing set.
    pub fn valkey() -> Server {
        Config::new(Brand::Valkey).start()
    }

    /// Which of the two it is.
    pub fn brand(&self) -> Brand {
        self.config.brand
    }

    /// The port on 127.0.0.1; the same for as long as this value lives.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// 127.0.0.1 with the port.
    pub fn addr(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// `redis://127.0.0.1:PORT`, without any password.
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// The process id; another one after a restart.
    ///
    /// # Panics
    /// When the server has been killed and not restarted.
    pub fn pid(&self) -> u32 {
        self.process().as_ref().expect("a running server").child.id()
    }

    /// Everything the server has logged, over restarts.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_path()).unwrap_or_default()).into_owned()
    }

    /// A connection of its own, authenticated if `requirepass` is set.
    pub fn connect(&self) -> io::Result<Connection> {
        let mut connection = Connection::open(self.addr())?;
        if let Some(password) = self.config.setting("requirepass") {
            connection.call(&["AUTH", password])?;
        }
        Ok(connection)
    }

    /// One command on a connection of its own.
    ///
    /// # Panics
    /// When no reply comes; an error reply is a reply.
    pub fn command(&self, parts: &[&str]) -> Reply {
        let reply = self.connect().and_then(|mut connection| connection.call(parts));
        reply.unwrap_or_else(|error| panic!("{parts:?} got no reply: {error}\n{}", self.log_end()))
    }

    /// Ends the process at once, as a crash of the machine would. Does nothing when it is down already.
    pub fn kill9(&self) {
        *self.process() = None;
    }

    /// SIGSTOP: the kernel goes on accepting connections, the server answers nothing. Returns once it has stopped.
    pub fn stop(&self) {
        let process = self.process();
        let pid = process.as_ref().expect("a running server").signal(Signal::STOP);
        let stopped =
            || matches!(waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG), Ok(Some(_)));
        assert!(poll(stopped), "SIGSTOP did not stop process {}", pid.as_raw_nonzero());
    }

    /// SIGCONT: what was sent while it was stopped is answered.
    pub fn cont(&self) {
        self.process().as_ref().expect("a running server").signal(Signal::CONT);
    }

    /// Ends the process if it runs, starts it on the same port with the same directory, and waits until it serves.
    pub fn restart(&self) {
        self.restart_without_waiting();
        self.wait_until_serving();
    }

    /// Like [`restart`](Server::restart), but returns as soon as the server listens. One that has much to load answers
    /// LOADING for a while: fill it, `SAVE`, and set `key-load-delay` and `loading-process-events-interval-bytes`.
    pub fn restart_without_waiting(&self) {
        self.kill9();
        assert!(poll(|| self.launch()), "port {} was taken while the server was down\n{}", self.port, self.log_end());
    }

    /// Starts the process and waits until its log says that it listens; false if the port is taken.
    fn launch(&self) -> bool {
        let config_path = self.dir.path().join("server.conf");
        fs::write(&config_path, self.config.file(self.port, self.dir.path())).expect("a writable temporary directory");
        let log =
            OpenOptions::new().create(true).append(true).open(self.log_path()).expect("a writable temporary directory");
        let logged_before = self.log().len();
        let mut process = Process::start(&self.binary, &config_path, &self.config.environment, log, self.dir.path());

        let mut exited = None;
        let settled = poll(|| {
            // The exit is looked at first: whatever was logged before it is in the log by then.
            exited = process.child.try_wait().expect("a child of ours");
            exited.is_some() || self.log()[logged_before..].contains("Server initialized")
        });
        let log = self.log()[logged_before..].to_owned();
        match exited {
            None if settled => *self.process() = Some(process),
            Some(_) if log.contains("Address already in use") => return false,
            Some(status) => panic!("{} ended at its start: {status}\n{log}", self.binary.display()),
            None => panic!("{} did not start to listen\n{log}", self.binary.display()),
        }
        true
    }

    fn wait_until_serving(&self) {
        let mut last = String::new();
        let serving = poll(|| match self.connect().and_then(|mut connection| connection.call(&["PING"])) {
            Ok(Reply::Error(error)) if error.starts_with("LOADING") => {
                last = error;
                false
            }
            // NOAUTH, NOPERM, too many clients: an answer of a server that serves, though not us.
            Ok(_) => true,
            Err(error) => {
                last = error.to_string();
                false
            }
        });
        assert!(serving, "PING is not answered: {last}\n{}", self.log_end());
    }

    fn process(&self) -> MutexGuard<'_, Option<Process>> {
        // A panic of another thread must not hide the process from the one that ends it.
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("server.log")
    }

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
