//! A Redis Cluster as the store of the service and of commands; and a node of one behind the URL of a single server, which
//! is refused, at the start and later.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::{Brand, Cluster, Config, Reply, Server};

use tidegate_testkit::program::{Serving, command, ended};

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
        let file = dir.path().join("tidegate.toml");
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
        let count = metrics.lines().find_map(|line| line.strip_prefix("tidegate_store_failures_total "));
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
    let is_probe = |entry: &&tidegate_testkit::server::Reply| {
        entry.items()[3].items().iter().any(|part| part.text() == "tidegate:tg2:{tidegate}:probe:bucket")
    };
    entries.items().iter().filter(is_probe).count()
}

/// An idle instance announces itself, and writes one more key, under its documented name, which is gone at once.
#[test]
fn idle_instance_probes_with_its_own_key_and_leaves_nothing_behind() {
    let server = Config::new(Brand::Redis).set("slowlog-log-slower-than", "0").set("slowlog-max-len", "10000").start();
    let serving = Serving::start(&["--store", &server.url()]);
    serving.until("/readyz", |answer| answer.status == 200);
    eventually("probes without traffic", || probes(&server), |probes| *probes >= 3);
    let keys = || server.command(&["KEYS", "*"]).items().iter().map(Reply::text).collect::<Vec<_>>();
    eventually("only the set of the instances is left", keys, |keys| *keys == ["tidegate:tg2:instances"]);
}

#[test]
fn serve_and_every_command_work_on_a_cluster() {
    for brand in Brand::ALL {
        let cluster = Cluster::shared(brand);
        let url = cluster.url();
        let serving = Serving::start(&["--store", &url]);
        serving.until("/readyz", |answer| answer.status == 200);
        // Users on all masters.
        for user in 0..12 {
            let answer = serving.check(&format!(r#"{{"key":"user:{user}","limit":"10/h","cost":3}}"#));
            assert!(
                answer.body.contains(r#""source":"store""#) && answer.body.contains(r#""remaining":7"#),
                "{answer:?}"
            );
        }
        let several = r#"{"checks":[{"key":"user:1","limit":"10/h"},{"key":"user:2","limit":"10/h"},{"key":"user:3","limit":"10/h"}]}"#;
        let answer = serving.check(several);
        assert_eq!(answer.body.matches(r#""remaining":6"#).count(), 3, "{answer:?}");

        let run = |arguments: &[&str]| {
            let output = command().args(arguments).args(["--store", &url]).output().unwrap();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            (output.status.code(), text(&output.stdout) + &text(&output.stderr))
        };
        let (code, output) = run(&["check", "user:0", "10/h", "--json"]);
        assert!(code == Some(0) && output.contains(r#""remaining":6"#), "{output}");
        let (code, output) = run(&["inspect", "user:0", "10/h", "--json"]);
        assert!(code == Some(0) && output.contains(r#""remaining":6"#), "{output}");
        assert_eq!(run(&["reset", "user:0", "10/h"]).0, Some(0));
        let (_, output) = run(&["inspect", "user:0", "10/h", "--json"]);
        assert!(output.contains(r#""remaining":10"#), "{output}");
        assert_eq!(run(&["ban", "user:0", "--for", "1h"]).0, Some(0));
        assert_eq!(serving.check(r#"{"key":"user:0","limit":"10/h"}"#).status, 403);
        assert_eq!(run(&["unban", "user:0"]).0, Some(0));
        serving.until("/readyz", |answer| answer.body.matches(r#""reachable":true"#).count() == 4);

        let metrics = serving.visit("/metrics").body;
        for master in &cluster.nodes()[..3] {
            let line = format!("tidegate_store_node_reachable{{node=\"{}\"}} 1", master.url());
            assert!(metrics.contains(&line), "no {line} in {metrics}");
        }
        for user in 1..12 {
            assert_eq!(run(&["reset", &format!("user:{user}"), "10/h"]).0, Some(0));
        }
    }
}

#[test]
fn lost_master_is_named_and_the_instance_stays_ready() {
    let cluster = Cluster::with(&Config::new(Brand::Redis).set("cluster-node-timeout", "600000"));
    // An eviction policy is reported for each master.
    cluster.nodes()[1].command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let serving = Serving::start(&["--store", &cluster.url()]);
    let warning = serving.wait_for_log("maxmemory-policy is allkeys-lru");
    assert!(warning.contains(&cluster.nodes()[1].url()), "{warning}");
    cluster.nodes()[1].command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    serving.until("/readyz", |answer| answer.status == 200 && answer.body.matches(r#""reachable":true"#).count() == 4);

    let lost = &cluster.nodes()[2];
    lost.kill9();
    let reason = format!("{} does not answer", lost.url());
    let answer = serving.until("/readyz", |answer| answer.body.contains(&reason));
    assert_eq!(answer.status, 200, "{answer:?}");
    let line = format!("tidegate_store_node_reachable{{node=\"{}\"}} 0", lost.url());
    serving.until("/metrics", |answer| answer.body.contains(&line));

    cluster.nodes()[..2].iter().for_each(Server::kill9);
    serving.until("/readyz", |answer| answer.status == 503);
    cluster.nodes()[..3].iter().for_each(Server::restart);
    serving.until("/readyz", |answer| answer.status == 200 && answer.body.matches(r#""reachable":true"#).count() == 4);
}

#[test]
fn server_that_is_no_node_of_a_cluster_is_refused_behind_the_url_of_one() {
    let server = Server::redis();
    let url = format!("redis+cluster://{}", server.addr());
    let listeners = ["serve", "--http", "127.0.0.1:0", "--resp", "off", "--admin", "off"];
    for output in [
        ended(command().args(listeners).args(["--store", &url])),
        command().args(["check", "user:42", "10/min", "--store", &url]).output().unwrap(),
    ] {
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("the server is not a node of a cluster") && error.contains(&url), "{error}");
    }
}
