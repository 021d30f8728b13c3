//! `/healthz` and `/readyz` respond even when connections or descriptors are exhausted.
//!
//! An orchestrator restarts an instance whose probes get no response.

use std::net::TcpStream;
use std::process::Command;

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::campaign::{record, scale};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::Serving;

const QUESTION: &str = r#"{"key":"user:42","limit":"10000000/h"}"#;

fn connect(address: &str, count: usize) -> Vec<TcpStream> {
    (0..count).map(|_| TcpStream::connect(address).unwrap()).collect()
}

/// Requests both probes and panics unless they respond with 200.
fn probe(serving: &Serving) {
    for path in ["/healthz", "/readyz"] {
        let answer = serving.visit(path);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
    }
}

/// Returns the command with a limit of descriptors. `option` selects the soft (`-S`), hard (`-H`) or both limits
/// (empty).
fn limited(option: &str, descriptors: usize) -> Command {
    let mut command = Command::new("sh");
    let binary = env!("CARGO_BIN_EXE_tidegate");
    command.args(["-c", &format!("ulimit {option} -n {descriptors} && exec \"$0\" \"$@\""), binary]);
    command.env("TIDEGATE_ADMIN_TOKEN", "a-token-for-tests-only");
    command
}

/// Returns the number of open descriptors of the process.
fn descriptors(serving: &Serving) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", serving.child.id())).unwrap().count()
}

#[test]
fn probes_respond_while_every_listener_is_at_its_connection_limit() {
    let serving = Serving::start(&["--connections", "8"]);
    // A scraper that keeps its connection between scrapes.
    let mut scraper = HttpClient::open(&serving.admin);
    assert_eq!(scraper.ask("GET", "/metrics", &[], "").status, 200);
    let mut busy = HttpClient::open(&serving.http);
    assert_eq!(busy.ask("POST", "/v1/check", &[], QUESTION).status, 200);
    let silent = [connect(&serving.http, 20), connect(&serving.resp, 20), connect(&serving.admin, 80)];
    let rounds = scale(10, 1_000);
    for round in 0..rounds {
        probe(&serving);
        // A connection with half a request counts as idle too.
        let mut half = HttpClient::open(&serving.admin);
        half.raw(b"GET /metrics HTTP/1.1\r\nhost:");
        assert_eq!(busy.ask("POST", "/v1/check", &[], QUESTION).status, 200, "round {round}");
        std::mem::forget(half);
    }
    record("probes/connections", "answered", format!("{} of {}", 2 * rounds, 2 * rounds));
    drop(silent);
}

#[test]
fn soft_descriptor_limit_is_raised_and_connections_fit_into_the_hard_limit() {
    let serving = Serving::start_as(limited("-S", 64), &[]);
    let limits = serving.proc("limits");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<&str> = line.split_whitespace().skip(3).take(2).collect();
    assert_eq!(numbers[0], numbers[1], "{line}");

    let serving = Serving::start_as(limited("", 160), &[]);
    serving.wait_for_log("the open file limit (ulimit -n) is too low for this many connections");
    let mut busy = [HttpClient::open(&serving.http), HttpClient::open(&serving.http)];
    busy.iter_mut().for_each(|client| assert_eq!(client.ask("POST", "/v1/check", &[], QUESTION).status, 200));
    let mut resp = serving.connect();
    let silent = [connect(&serving.http, 300), connect(&serving.resp, 300), connect(&serving.admin, 100)];
    for _ in 0..scale(10, 1_000) {
        probe(&serving);
        busy.iter_mut().for_each(|client| assert_eq!(client.ask("POST", "/v1/check", &[], QUESTION).status, 200));
        resp.call(&["PING"]).unwrap();
    }
    // Connections above the limit are refused at once, not left waiting.
    assert!(serving.visit("/metrics").body.contains("tidegate_connections_refused_total{listener=\"http\"} 2"));
    assert!(
        !serving.output().contains("cannot accept connections"),
        "there are descriptors for all accepted connections"
    );
    drop(silent);
}

#[test]
fn probes_respond_when_the_process_has_no_descriptors_left() {
    let serving = Serving::start(&[]);
    probe(&serving);
    let silent = [connect(&serving.http, 50), connect(&serving.resp, 50)];
    serving.until("/metrics", |answer| answer.body.contains("tidegate_connections{listener=\"resp\"} 50\n"));
    let pid = Pid::from_raw(i32::try_from(serving.child.id()).unwrap());
    // Sets the limit to the number of open descriptors, so that at most a few more can be opened.
    let now = Some(descriptors(&serving) as u64);
    let was = prlimit(pid, Resource::Nofile, Rlimit { current: now, maximum: now }).unwrap();
    let rounds = scale(10, 200);
    let mut waiting = connect(&serving.http, 20);
    for _ in 0..rounds {
        probe(&serving);
    }
    record("probes/descriptors", "answered", format!("{} of {}", 2 * rounds, 2 * rounds));
    // Once descriptors are available again, all clients are served.
    drop(silent);
    let _ = prlimit(pid, Resource::Nofile, was);
    waiting.clear();
    assert_eq!(serving.check(QUESTION).status, 200);
    assert!(matches!(serving.connect().call(&["PING"]), Ok(tidegate_testkit::server::Reply::Simple(_))));
}
