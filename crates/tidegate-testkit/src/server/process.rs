//! The server's process, and its leash: a shell that kills the server if the test process dies.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// The server's process and its leash, a shell that kills the server if the test process dies.
///
/// Dropping it kills both with SIGKILL and waits until they have ended. The server's directory is left as it is.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) child: Child,
    pub(super) leash: Child,
}

impl Process {
    /// Starts the server with this configuration file and further argument, and the leash. Does not wait until the
    /// server listens.
    ///
    /// `environment` is added to the inherited environment. Standard output and standard error are written to `log`. If
    /// this process ends without dropping the result, the leash kills the server with SIGKILL and removes `dir`.
    ///
    /// # Panics
    /// If the binary or `sh` cannot be started, or the handle of `log` cannot be duplicated.
    pub(super) fn start(
        binary: &Path,
        (config, argument): (&Path, Option<&str>),
        environment: &[(String, String)],
        log: File,
        dir: &Path,
    ) -> Process {
        let mut command = Command::new(binary);
        command.arg(config).args(argument).envs(environment.iter().cloned()).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a second handle of the log")).stderr(log);
        // Own process groups: Ctrl-C reaches only the test, and the leash then kills the server.
        let child = command.process_group(0).spawn();
        let child = child.unwrap_or_else(|error| panic!("cannot start {}: {error}", binary.display()));
        let mut command = Command::new("sh");
        command.args(["-c", r#"read -r _; kill -9 "$1"; rm -rf "$2""#, "leash"]).arg(child.id().to_string()).arg(dir);
        let leash = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn();
        Process { child, leash: leash.expect("sh starts") }
    }

    /// Sends a signal to the server and returns the server's process id. Does not wait for its effect.
    ///
    /// # Panics
    /// If the signal cannot be sent.
    pub(super) fn signal(&self, signal: Signal) -> Pid {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("a signal to a child of ours");
        pid
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The leash first: once the child is reaped, its id may belong to another process.
        for child in [&mut self.leash, &mut self.child] {
            // Both calls fail only if the child has already exited.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
