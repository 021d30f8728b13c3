//! A running shortener, which is killed when dropped.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;

use tempfile::NamedTempFile;

use crate::exchange::Answer;

pub(crate) struct Instance {
    child: Child,
    address: SocketAddr,
    log: NamedTempFile,
}

fn command(variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shortener"));
    // Without the environment variables of the test process.
    command.env_clear().env("PORT", "0").envs(variables.iter().copied());
    command
}

impl Instance {
    /// Starts the shortener on a free port, and waits until it listens.
    pub(crate) fn start(variables: &[(&str, &str)]) -> Instance {
        let log = NamedTempFile::new().unwrap();
        let mut child = command(variables).stdout(Stdio::piped()).stderr(log.reopen().unwrap()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split(['/', ',']).nth(2).and_then(|address| address.parse().ok());
        let log_text = || fs::read_to_string(log.path()).unwrap();
        let address = address.unwrap_or_else(|| panic!("it did not start: {line:?}\n{}", log_text()));
        Instance { child, address, log }
    }

    /// Starts the shortener with an invalid variable. Returns its error output. Panics unless it exits with code 1.
    pub(crate) fn refused(variable: &str, value: &str) -> String {
        let output = command(&[(variable, value)]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{variable}={value}");
        String::from_utf8(output.stderr).unwrap()
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
