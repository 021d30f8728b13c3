//! The mixed run: every way to use Tidegate makes checks of the same 100 keys on one Redis at the same time, and the history
//! checker verifies all decisions.
//!
//! ```text
//!   library ─────────────────────────────────────────┐
//!   HTTP, RESP ───────────────▶ tidegate serve ──────┤
//!   Python, Node, PHP, Go ┬───▶      (HTTP)          ├──▶ one redis-server
//!                         └─ the script, through ────┘
//!                            their Redis clients
//! ```
//!
//! A check has two limits of one key: the one that is verified, and a journal that is never used up (see
//! `history/reported.rs` in the testkit). After the run, the journals in Redis have the store's time of every admission.
//!
//! **Workers** are programs beside the tests of each package, which this test starts. A worker has one argument, the JSON
//! object that [`run`] creates. It prints `ready`, and starts when it receives a line. When it has made the given number of
//! checks, it prints `made` and goes on. When all workers have made theirs, their input ends, and they exit. So all of them
//! are running during the whole run, however fast they are. A worker exits with an error if a check fails. It writes one
//! line per decision to its file, with times in microseconds:
//!
//! ```text
//! sent received counter cost allowed remaining retry_after journal_remaining source
//! 1794931000000000 1794931000000850 17 1 0 0 120500 99871 store
//! ```
//!
//! `sent` and `received` are read from the wall clock of the machine, which is also the clock of Redis.
//!
//! **A busy machine.** If Redis does not answer a call of the service within 250 ms, the service decides by itself, and the
//! call may still be executed. Such a run says nothing about the decisions of Redis, so it is repeated, up to two times. The
//! service counts these decisions. A violation is never repeated.
//!
//! `scripts/test-clients.sh` runs this test after those of the packages, because it needs the built Node package. It prints the
//! languages that took part, and those that are not installed.

mod journal;
mod rust;
mod worker;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tidegate::{Limit, Source};
use tidegate_testkit::history::{Bounds, History, Report, Reported};
use tidegate_testkit::server::Server;

use crate::instances::start_with_long_deadline;
use tidegate_testkit::program::Serving;
use worker::Worker;

const KEYS: usize = 100;
/// The limit of a key is the one at its number modulo 4. All are exact.
const LIMITS: [&str; 4] = ["4/250ms", "10/s", "20/s sliding-log", "8/500ms sliding-log"];
const JOURNAL: &str = "100000/h sliding-log";
const JOURNAL_QUOTA: u64 = 100_000;
/// The checks that every participant makes at least.
const CHECKS: u64 = 600;
const RUNS_MAX: usize = 3;
/// The metric of decisions without the store.
const DEGRADED: &str = "tidegate_degraded_total{";
/// Time after which the run fails if a participant is not ready or has not made its checks.
const PATIENCE: Duration = Duration::from_secs(180);

/// The clients of the packages, by language.
const CLIENTS: [(&str, &[&str]); 4] = [
    ("Python", &["service", "service, asyncio", "redis-py", "redis-py, asyncio"]),
    ("Node", &["service", "ioredis", "node-redis"]),
    ("PHP", &["service", "phpredis", "Predis"]),
    ("Go", &["service", "go-redis"]),
];

/// A decision as a participant received it.
#[derive(Clone, Copy)]
struct Record {
    counter: usize,
    reported: Reported,
}

/// The decisions of one participant.
struct Participant {
    name: String,
    records: Vec<Record>,
}

impl Participant {
    fn count(&self, is_counted: impl Fn(&Reported) -> bool) -> usize {
        self.records.iter().filter(|record| is_counted(&record.reported)).count()
    }
}

fn limit_of(counter: usize) -> &'static str {
    LIMITS[counter % LIMITS.len()]
}

fn key_of(counter: usize) -> String {
    format!("client-{counter}")
}

/// Returns the wall clock in microseconds.
fn wall_us() -> u64 {
    micros(ClockId::Realtime)
}

fn micros(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns the command of the worker of a language, without its argument, or the reason why it cannot run.
fn command_of(language: &str, directory: &Path) -> Result<Command, String> {
    let clients = repository().join("clients");
    let (program, script) = match language {
        "Python" => ("python3", "python/tests/mixed_worker.py"),
        "Node" => ("node", "node/test/mixed-worker.mjs"),
        "PHP" => ("php", "php/tests/mixed_worker.php"),
        "Go" => ("go", ""),
        _ => unreachable!("{language}"),
    };
    let version = if program == "go" { "version" } else { "--version" };
    let found = Command::new(program).arg(version).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        return Err(format!("{program} is not installed"));
    }
    if language == "Go" {
        let binary = directory.join("mixedworker");
        let mut build = Command::new("go");
        build.current_dir(clients.join("go")).args(["build", "-o"]).arg(&binary);
        let output = build.arg("tidegate/redislimiter/internal/mixedworker").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return Ok(Command::new(binary));
    }
    let is_built = language != "Node" || clients.join("node/dist/esm/index.js").exists();
    assert!(is_built, "the Node package is not built: npm run build --prefix clients/node");
    let mut command = Command::new(program);
    command.arg(clients.join(script));
    Ok(command)
}

#[test]
#[ignore = "needs the built client packages; scripts/test-clients.sh runs it"]
fn clients_of_all_languages_on_one_redis_exceed_no_quota_and_deny_no_check_without_reason() {
    for _ in 0..RUNS_MAX {
        match run() {
            Ok(report) => return report.expect_clean(),
            Err(count) => println!("mixed run: again, since the service made {count} decisions without Redis"),
        }
    }
    panic!("this machine is too busy: Redis did not answer the service within 250 ms in {RUNS_MAX} runs");
}

/// Returns the report, or the number of decisions that the service made without Redis.
fn run() -> Result<Report, u64> {
    let directory = tempfile::tempdir().unwrap();
    let redis = Server::redis();
    let (_configuration, services) = start_with_long_deadline(&redis, 1, &[]);
    let service = &services[0];
    let offset_us = || wall_us().wrapping_sub(micros(ClockId::Monotonic));
    let offset_before_us = offset_us();

    let (mut workers, mut not_run) = (Vec::new(), Vec::new());
    let (events, received) = mpsc::channel();
    for (language, clients) in CLIENTS {
        for client in clients {
            match command_of(language, directory.path()) {
                Err(reason) => not_run.push(format!("{language}, {client} ({reason})")),
                Ok(command) => {
                    let records = directory.path().join(workers.len().to_string());
                    let name = format!("{language}, {client}");
                    let description = serde_json::json!({
                        "client": client, "service": format!("http://{}", service.http), "redis_port": redis.port(),
                        "records": records, "seed": 1 + workers.len(), "keys": KEYS, "limits": LIMITS,
                        "journal": JOURNAL, "checks": CHECKS,
                    });
                    workers.push(Worker::start(command, name, &description, records, events.clone()));
                }
            }
        }
    }
    workers.iter().for_each(|_| worker::next_event("ready", &received));
    let threads = rust::Threads::start(&redis.url(), service, &events);
    workers.iter_mut().for_each(Worker::begin);
    // One event of each participant: it has made its checks.
    for _ in 0..workers.len() + threads.participants() {
        worker::next_event("made", &received);
    }
    let mut participants = threads.end();
    participants.extend(workers.into_iter().map(Worker::end));
    match decisions_without_redis(service) {
        0 => {}
        count => return Err(count),
    }
    let moved_us = offset_us().wrapping_sub(offset_before_us) as i64;
    assert!(moved_us.abs() < 20_000, "the clock of this machine was set during the run, by {moved_us} µs");

    let report = verify(&participants, &redis);
    println!("mixed run: {report}");
    not_run.iter().for_each(|reason| println!("mixed run: not run: {reason}"));
    Ok(report)
}

/// Returns the number of checks that the service decided without an answer of Redis.
fn decisions_without_redis(service: &Serving) -> u64 {
    let metrics = service.visit("/metrics").body;
    let lines = metrics.lines().filter(|line| line.starts_with(DEGRADED));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64).sum()
}

/// Verifies the decisions of all participants, and prints their numbers.
fn verify(participants: &[Participant], redis: &Server) -> Report {
    let mut history = History::new((0..KEYS).map(|counter| limit_of(counter).parse::<Limit>().unwrap()));
    for participant in participants {
        let [admitted, denied, cached] = [
            participant.count(|reported| reported.allowed),
            participant.count(|reported| !reported.allowed && reported.source != Some(Source::DenyCache)),
            participant.count(|reported| reported.source == Some(Source::DenyCache)),
        ];
        println!("mixed run: {:<28} {admitted:>6} admitted, {denied:>6} denied, {cached:>6} cached", participant.name);
        assert!(admitted > 0 && denied + cached > 0, "{} got only one kind of decision", participant.name);
        for record in &participant.records {
            history.note_reported(record.counter, record.reported);
        }
    }
    let first_us = |participant: &Participant| participant.records.iter().map(|record| record.reported.sent_us).min();
    let last_us =
        |participant: &Participant| participant.records.iter().map(|record| record.reported.received_us).max();
    assert!(
        participants.iter().map(first_us).max() < participants.iter().map(last_us).min(),
        "there is a time at which all of them are running"
    );
    for counter in 0..KEYS {
        history.note_journal(counter, journal::read(redis, &key_of(counter)));
    }
    history.verify(Bounds::default())
}
