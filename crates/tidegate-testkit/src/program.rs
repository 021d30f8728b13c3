//! The program `tidegate` as a user starts it, on free ports.
//!
//! The binary is the one that cargo built beside the test: an integration test of the package `tidegate-cli`, or any test
//! of the whole workspace, has it.
#![allow(clippy::unwrap_used)] // a failed step fails its test

mod gateway;
mod serving;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

pub use self::gateway::GatewayProcess;
pub use self::serving::Serving;

/// Time after which a test stops waiting for an event and fails.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The admin token of [`Serving`] and [`GatewayProcess`].
pub const TOKEN: &str = "a-token-for-tests-only";

/// Returns the path of the program `tidegate`.
///
/// # Panics
/// If cargo has not built it beside the test.
pub fn binary() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // target/PROFILE/deps/TEST
    let binary = test.ancestors().nth(2).expect("a target directory").join("tidegate");
    assert!(binary.exists(), "{} is missing: build the whole workspace", binary.display());
    binary
}

/// Returns the command `tidegate` without the environment variables that configure it.
pub fn command() -> Command {
    let mut command = Command::new(binary());
    let secrets = ["TIDEGATE_ADMIN_TOKEN", "TIDEGATE_RESP_PASSWORD", "TIDEGATE_HTTP_TOKEN"];
    for variable in secrets.into_iter().chain(["TIDEGATE_STORE", "REDIS_URL", "TIDEGATE_LOG"]) {
        command.env_remove(variable);
    }
    command
}

/// Runs a command that should exit by itself and returns its output.
///
/// A command that starts to serve instead is killed, so that its exit status fails the test.
pub fn ended(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut announced = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut announced).unwrap();
    if !announced.is_empty() {
        child.kill().unwrap();
    }
    child.wait_with_output().unwrap()
}

/// A running `tidegate`. Dropping it kills the process; if the test has failed, its output is printed.
#[derive(Debug)]
pub struct Program {
    /// The process.
    pub child: Child,
    /// The lines that the process printed to standard output until all listeners were announced.
    pub announced: String,
    lines: Mutex<mpsc::Receiver<String>>,
    logs: Mutex<mpsc::Receiver<String>>,
    output: Arc<Mutex<String>>,
}

impl Program {
    /// Starts a command with its standard error connected to `stderr`.
    ///
    /// Unless that is a pipe, [`wait_for_log`](Program::wait_for_log) and [`output`](Program::output) do not see its
    /// logs.
    fn start(command: &mut Command, stderr: Stdio) -> Program {
        let mut child = command.stdout(Stdio::piped()).stderr(stderr).spawn().expect("the binary runs");
        let output = Arc::new(Mutex::new(String::new()));
        let lines = read_lines(child.stdout.take().expect("a pipe"), output.clone());
        let logs = match child.stderr.take() {
            Some(pipe) => read_lines(pipe, output.clone()),
            None => read_lines(std::io::empty(), output.clone()),
        };
        Program { child, announced: String::new(), lines: Mutex::new(lines), logs: Mutex::new(logs), output }
    }

    /// Waits until the process announces the listener with this name, and returns its address.
    fn address_of(&mut self, listener: &str) -> String {
        loop {
            let line = self.lines.lock().unwrap().recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("{listener} is not announced: {}", self.output()));
            self.announced = self.announced.clone() + &line + "\n";
            if line.trim_start().starts_with(listener) {
                return line.split_whitespace().nth(1).expect("an address").to_owned();
            }
        }
    }

    /// Returns everything that the process has written so far to standard output and standard error.
    pub fn output(&self) -> String {
        self.output.lock().unwrap().clone()
    }

    /// Returns the content of a file in `/proc/PID`.
    pub fn proc(&self, file: &str) -> String {
        String::from_utf8_lossy(&std::fs::read(format!("/proc/{}/{file}", self.child.id())).unwrap()).into_owned()
    }

    /// Returns the resident memory of the process in bytes, without the pages of its files: those of the program itself
    /// become resident when they are first used.
    ///
    /// # Panics
    /// If the process has ended.
    pub fn resident_bytes(&self) -> u64 {
        self.memory_bytes("RssAnon:")
    }

    /// Returns the resident memory of the process in bytes, including the pages of its files, as
    /// [`peak_bytes`](Program::peak_bytes) does.
    pub fn resident_bytes_with_files(&self) -> u64 {
        self.memory_bytes("VmRSS:")
    }

    /// Returns the most resident memory that the process has had so far, in bytes, including the pages of its files.
    pub fn peak_bytes(&self) -> u64 {
        self.memory_bytes("VmHWM:")
    }

    fn memory_bytes(&self, field: &str) -> u64 {
        let status = self.proc("status");
        let line = status.lines().find(|line| line.starts_with(field)).expect("a size");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
    }

    /// Waits for a log line that contains `phrase` and returns it. Lines before it are skipped for later calls too.
    pub fn wait_for_log(&self, phrase: &str) -> String {
        loop {
            let line = self.logs.lock().unwrap().recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("not logged: {phrase}"));
            if line.contains(phrase) {
                return line;
            }
        }
    }

    /// Sends a signal to the process, by its name without `SIG`.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- output of tidegate ---\n{}---", self.output());
        }
    }
}

/// Reads lines from a pipe in a thread. Each line is appended to `output` and sent to the returned channel.
fn read_lines(pipe: impl Read + Send + 'static, output: Arc<Mutex<String>>) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            let mut output = output.lock().unwrap();
            output.push_str(&line);
            output.push('\n');
            let _ = sender.send(line);
        }
    });
    lines
}

/// A bind mount of one file over another. Dropping it unmounts.
#[derive(Debug)]
pub struct BindMount(PathBuf);

impl BindMount {
    /// Mounts `source` over `target`. Returns `None` if this process may not mount.
    pub fn new(source: &Path, target: &Path) -> Option<BindMount> {
        let output = Command::new("mount").arg("--bind").args([source, target]).output().ok()?;
        output.status.success().then(|| BindMount(target.to_owned()))
    }
}

impl Drop for BindMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).output();
    }
}
