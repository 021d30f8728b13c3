//! The server's process, and what ends it when nobody is left to.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// The server's process and its leash.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) child: Child,
    pub(super) leash: Child,
}

impl Process {
    pub(super) fn start(
        binary: &Path,
        config: &Path,
        environment: &[(String, String)],
        log: File,
        dir: &Path,
    ) -> Process {
        let mut command = Command::new(binary);
        command.arg(config).envs(environment.iter().cloned()).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a second handle of the log")).stderr(log);
        // Groups of their own: Ctrl-C reaches the test alone, and the leash sees to the rest.
        let child = command.process_group(0).spawn();
        let child = child.unwrap_or_else(|error| panic!("{} does not start: {error}", binary.display()));
        let mut command = Command::new("sh");
        command.args(["-c", r#"read -r _; kill -9 "$1"; rm -rf "$2""#, "leash"]).arg(child.id().to_string()).arg(dir);
        let leash = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn();
        Process { child, leash: leash.expect("sh starts") }
    }

    pub(super) fn signal(&self, signal: Signal) -> Pid {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("a signal to a child of ours");
        pid
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The leash first: once the child is reaped, its id may belong to somebody else.
        for child in [&mut self.leash, &mut self.child] {
            // Both fail only for a child that has ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
