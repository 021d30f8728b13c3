//! The processes of the mixed run.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender};

use serde_json::Value;
use tidegate::Source;
use tidegate_testkit::history::Reported;

use super::{JOURNAL_QUOTA, PATIENCE, Participant, Record};

/// A line that a participant printed, or the reason why it has ended.
pub(super) type Event = Result<String, String>;

/// Waits for an event of any participant, which must be this line.
///
/// # Panics
/// If a participant has ended, or none of them prints anything for a long time.
pub(super) fn next_event(line: &str, events: &Receiver<Event>) {
    let event = events.recv_timeout(PATIENCE).expect("a participant is too slow");
    assert_eq!(event.unwrap_or_else(|reason| panic!("{reason}")), line);
}

/// A running worker. Dropping it kills the process.
pub(super) struct Worker {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    records: PathBuf,
}

impl Worker {
    /// Starts a worker. Each line that it prints is sent to `events`, and its end if that is a failure.
    pub(super) fn start(
        mut command: Command,
        name: String,
        description: &Value,
        records: PathBuf,
        events: Sender<Event>,
    ) -> Worker {
        let errors = records.with_extension("stderr");
        command.arg(description.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(File::create(&errors).unwrap()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let printed_by = name.clone();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = events.send(Ok(line));
            }
            // After the run, all workers end, and no event is read any more.
            let errors = fs::read_to_string(errors).unwrap_or_default();
            let _ = events.send(Err(format!("the worker {printed_by} has ended:\n{errors}")));
        });
        Worker { name, child, input, records }
    }

    pub(super) fn begin(&mut self) {
        self.input.as_mut().unwrap().write_all(b"begin\n").unwrap();
    }

    /// Ends the input of the worker, waits for its end, and returns its decisions.
    pub(super) fn end(mut self) -> Participant {
        drop(self.input.take());
        let status = self.child.wait().unwrap();
        let errors = fs::read_to_string(self.records.with_extension("stderr")).unwrap();
        assert!(status.success(), "the worker {} has failed: {status}\n{errors}", self.name);
        let text = fs::read_to_string(&self.records).unwrap();
        let is_service = self.name.contains("service");
        let records = text.lines().filter_map(|line| record(line, is_service)).collect();
        Participant { name: self.name.clone(), records }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the decision in a line, or `None` if neither the store nor the deny cache made it.
fn record(line: &str, is_service: bool) -> Option<Record> {
    let fields: Vec<&str> = line.split(' ').collect();
    let [numbers @ .., source] = &fields[..] else { panic!("{line}") };
    let numbers: Vec<u64> = numbers.iter().map(|field| field.parse().unwrap_or_else(|_| panic!("{line}"))).collect();
    let [sent_us, received_us, counter, cost, allowed, remaining, retry_after_us, journal_remaining] = numbers[..]
    else {
        panic!("{line}")
    };
    let source = match *source {
        "store" => Source::Store,
        "deny_cache" => Source::DenyCache,
        _ => return None,
    };
    let reported = Reported {
        sent_us,
        received_us,
        cost: cost as u32,
        allowed: allowed == 1,
        remaining: remaining as u32,
        retry_after_us,
        // The service reports waits in milliseconds, rounded up.
        rounded_up_to_us: if is_service { 1_000 } else { 1 },
        journal_units: JOURNAL_QUOTA - journal_remaining,
        source: Some(source),
    };
    Some(Record { counter: counter as usize, reported })
}
