//! A running shortener, which is killed when dropped.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;

use tempfile::NamedTempFile;
use tidegate_testkit::server::Server;

use crate::exchange::Answer;

/// A long deadline, for tests with exact counts: on a busy machine a decision may take longer than the default.
pub(crate) const LONG_DEADLINE: (&str, &str) = ("REDIS_DEADLINE_MS", "10000");

pub(crate) struct Instance {
    child: Child,
    address: SocketAddr,
    log: NamedTempFile,
    /// The server of another implementation that is started without one; see [`other_implementation`].
    _redis: Option<Server>,
}

/// Returns the command that starts another implementation of the service, whose words are separated by spaces: the
/// value of `SHORTENER_COMMAND`. `None` if the implementation in this crate is tested.
///
/// The other implementation needs not keep anything in memory: if a test gives it no Redis, it gets one of its own.
fn other_implementation() -> Option<String> {
    std::env::var("SHORTENER_COMMAND").ok()
}

fn command(variables: &[(&str, &str)]) -> Command {
    let mut command = match other_implementation() {
        None => Command::new(env!("CARGO_BIN_EXE_shortener")),
        Some(text) => {
            let mut words = text.split_ascii_whitespace();
            let mut command = Command::new(words.next().expect("SHORTENER_COMMAND names a program"));
            command.args(words);
            command
        }
    };
    // Without the environment variables of the test process.
    command.env_clear().env("PORT", "0").envs(variables.iter().copied());
    command
}

impl Instance {
    /// Starts the shortener on a free port, and waits until it listens.
    pub(crate) fn start(variables: &[(&str, &str)]) -> Instance {
        let log = NamedTempFile::new().unwrap();
        let is_given = variables.iter().any(|(name, _)| *name == "REDIS_URL");
        let redis = (other_implementation().is_some() && !is_given).then(Server::redis);
        let url = redis.as_ref().map(Server::url).unwrap_or_default();
        let mut variables = variables.to_vec();
        if redis.is_some() {
            variables.extend([("REDIS_URL", &*url), LONG_DEADLINE]);
        }
        let mut child = command(&variables).stdout(Stdio::piped()).stderr(log.reopen().unwrap()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split(['/', ',']).nth(2).and_then(|address| address.parse().ok());
        let log_text = || fs::read_to_string(log.path()).unwrap();
        let address = address.unwrap_or_else(|| panic!("it did not start: {line:?}\n{}", log_text()));
        Instance { child, address, log, _redis: redis }
    }

    /// Starts the shortener with an invalid variable. Returns its error output. Panics unless it exits with code 1.
    pub(crate) fn refused(variable: &str, value: &str) -> String {
        let output = command(&[(variable, value)]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{variable}={value}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// Returns what the limiter logs when Redis becomes unavailable, and when it is available again.
    ///
    /// The second is empty for another implementation, whose limiter may notice the recovery with the next request only.
    pub(crate) fn limiter_log() -> (&'static str, &'static str) {
        match other_implementation() {
            None => ("the store is not called until a probe succeeds", "the store is responding again"),
            Some(_) => ("requests pass without a limit", ""),
        }
    }

    /// Sends SIGTERM, waits for the exit, and returns the exit status.
    pub(crate) fn terminate(&mut self) -> ExitStatus {
        let sent = Command::new("kill").arg(self.child.id().to_string()).status().unwrap();
        assert!(sent.success());
        self.child.wait().unwrap()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns everything that the process has logged so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log.path()).unwrap()
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        Answer::to(self.address, &format!("GET {path}"), &[], "")
    }

    pub(crate) fn post(&self, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        Answer::to(self.address, &format!("POST {path}"), headers, body)
    }

    pub(crate) fn shorten(&self, url: &str) -> Answer {
        self.shorten_with(&[], url)
    }

    /// Sends `count` requests for a link, one after the other on one connection.
    pub(crate) fn shorten_many(&self, count: usize, url: &str) -> Vec<Answer> {
        Answer::to_many(self.address, "POST /shorten", &format!("{{\"url\":\"{url}\"}}"), count)
    }

    pub(crate) fn shorten_with(&self, headers: &[(&str, &str)], url: &str) -> Answer {
        let headers = [headers, &[("content-type", "application/json")]].concat();
        self.post("/shorten", &headers, &format!("{{\"url\":\"{url}\"}}"))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("--- log of the shortener on {} ---\n{}", self.address, self.log());
        }
    }
}
