//! A node of a Redis Cluster behind the URL of a single server is refused, at the start and later.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use tollgate_testkit::poll::eventually;
use tollgate_testkit::server::{Brand, Config, Server};

use crate::serving::{Serving, command, ended};

const REASON: &str = "the server is a node of a Redis Cluster (cluster_enabled:1)";

/// Asserts that a command failed because of the kind of the server, and that its message names the address.
fn assert_refused(output: &std::process::Output, server: &Server, what: &str) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{what}: {error}");
    for phrase in [&format!("store {}: {REASON}", server.url()), "`cluster-enabled no`", "--store URL"] {
        assert!(error.contains(phrase), "{what}: no {phrase:?} in {error}");
    }
}

#[test]
fn serve_and_every_command_refuse_a_node_of_a_cluster() {
    for brand in Brand::ALL {
        let server = Config::new(brand).set("cluster-enabled", "yes").start();
        let listeners = ["serve", "--http", "127.0.0.1:0", "--resp", "off", "--admin", "off"];
        let served = ended(command().args(listeners).args(["--store", &server.url()]));
        assert_refused(&served, &server, "serve");
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tollgate.toml");
        std::fs::write(&file, "[[rules]]\nname = 'all'\nlimits = ['5/min']\n").unwrap();
        let explain = ["explain", "GET", "/", "--peer", "203.0.113.9", "--config", file.to_str().unwrap()];
        for arguments in [
            &explain[..],
            &["check", "user:42", "10/min"],
            &["inspect", "user:42", "10/min"],
            &["reset", "user:42", "10/min"],
            &["ban", "user:42"],
            &["unban", "user:42"],
        ] {
            let output = command().args(arguments).args(["--store", &server.url()]).output().unwrap();
            assert_refused(&output, &server, &format!("{brand} {arguments:?}"));
        }
    }
}

/// The server becomes a node of a cluster after the start. The instance serves and logs the error, with and without
/// traffic.
#[test]
fn server_that_becomes_a_node_of_a_cluster_is_a_failure_that_is_logged_as_an_error() {
    let mut server = Server::redis();
    let serving = Serving::start(&["--store", &server.url()]);
    serving.until("/readyz", |answer| answer.status == 200);
    let explicit = r#"{"key":"user:42","limit":"1000000/h"}"#;
    assert!(serving.check(explicit).body.contains(r#""source":"store""#));

    server.restart_with("cluster-enabled", "yes");
    let reason = format!("store {}: {REASON}", server.url());
    let line = serving.wait_for_log("the store cannot be used");
    assert!(line.contains("ERROR") && line.contains(&reason), "{line}");
    serving.until("/readyz", |answer| answer.status == 503);
    let failures = || {
        let metrics = serving.visit("/metrics").body;
        let count = metrics.lines().find_map(|line| line.strip_prefix("tollgate_store_failures_total "));
        count.unwrap().parse::<u64>().unwrap()
    };
    let before = failures();
    let answer = serving.check(explicit);
    assert!(answer.body.contains(r#""source":"local""#), "{answer:?}");
    eventually("the failure is counted", failures, |failures| *failures > before);
    let line = serving.wait_for_log("the store did not decide");
    assert!(line.contains("ERROR") && line.contains(&reason), "{line}");
}

/// Returns the number of script calls for the probe's key, from the server's slow log, which must log all commands.
fn probes(server: &Server) -> usize {
    let entries = server.command(&["SLOWLOG", "GET", "-1"]);
    let is_probe = |entry: &&tollgate_testkit::server::Reply| {
        entry.items()[3].items().iter().any(|part| part.text() == "tollgate:tg2:{tollgate}:probe:bucket")
    };
    entries.items().iter().filter(is_probe).count()
}

/// An idle instance writes one key, under its documented name, which is gone at once.
#[test]
fn idle_instance_probes_with_its_own_key_and_leaves_nothing_behind() {
    let server = Config::new(Brand::Redis).set("slowlog-log-slower-than", "0").set("slowlog-max-len", "10000").start();
    let serving = Serving::start(&["--store", &server.url()]);
    serving.until("/readyz", |answer| answer.status == 200);
    eventually("probes without traffic", || probes(&server), |probes| *probes >= 3);
    let keys = || server.command(&["KEYS", "*"]).items().len();
    eventually("no key is left", keys, |keys| *keys == 0);
}
