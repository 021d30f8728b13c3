//! Several instances on one Redis: one budget, also when one of them is killed, and decisions while Redis fails.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::sync::atomic::{AtomicU32, Ordering};

use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::poll::eventually;
use tidegate_testkit::program::{Serving, command};
use tidegate_testkit::server::{Connection, Reply, Server};

/// A configuration whose decisions wait for the store even on a busy machine, for exact counts.
const LONG_DEADLINE: &str = "deadline = \"20s\"\n";

/// Starts `count` instances with a long deadline and these further arguments.
pub(crate) fn start_with_long_deadline(
    redis: &Server,
    count: usize,
    arguments: &[&str],
) -> (tempfile::TempDir, Vec<Serving>) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, LONG_DEADLINE).unwrap();
    let (url, config) = (redis.url(), file.to_str().unwrap());
    let start = |_| Serving::start(&[&["--store", &url, "--config", config], arguments].concat());
    let instances = (0..count).map(start).collect();
    (dir, instances)
}

/// A connection to one listener of one instance.
enum CheckClient {
    Http(HttpClient),
    Resp(Connection),
}

impl CheckClient {
    /// Connects to the HTTP listener if the number is even, else to the RESP listener.
    fn new(serving: &Serving, number: usize) -> CheckClient {
        match number % 2 {
            0 => CheckClient::Http(HttpClient::open(&serving.http)),
            _ => CheckClient::Resp(serving.connect()),
        }
    }

    /// Returns whether a check was allowed, or `None` if the instance does not respond.
    fn check(&mut self, key: &str, limit: &str) -> Option<bool> {
        match self {
            CheckClient::Http(client) => {
                client.send("POST", "/v1/check", &[], &format!(r#"{{"key":"{key}","limit":"{limit}"}}"#));
                client.receive().map(|answer| answer.status == 200)
            }
            CheckClient::Resp(connection) => {
                let reply = connection.call(&["TIDEGATE.CHECK", key, limit]).ok()?;
                Some(reply.items()[0] == Reply::Integer(1))
            }
        }
    }
}

fn remaining(serving: &Serving, key: &str, limit: &str) -> i64 {
    serving.connect().call(&["TIDEGATE.PEEK", key, limit]).unwrap().items()[2].integer()
}

#[test]
fn two_instances_have_one_budget_exactly_under_sixteen_connections() {
    let redis = Server::redis();
    let (_dir, instances) = start_with_long_deadline(&redis, 2, &[]);
    for limit in ["1000/day", "1000/day sliding-log", "1000/day fixed-window"] {
        let admitted = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for number in 0..16 {
                let (instance, admitted) = (&instances[number / 2 % 2], &admitted);
                scope.spawn(move || {
                    let mut client = CheckClient::new(instance, number);
                    for _ in 0..150 {
                        admitted
                            .fetch_add(client.check("user:42", limit).expect("an answer").into(), Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(admitted.into_inner(), 1_000, "{limit}");
        assert_eq!(instances.iter().map(|one| remaining(one, "user:42", limit)).sum::<i64>(), 0);
    }
}

#[test]
fn units_charged_by_a_killed_instance_stay_charged() {
    let redis = Server::redis();
    let (_dir, mut instances) = start_with_long_deadline(&redis, 2, &[]);
    let survivor = instances.pop().unwrap();
    let mut dying = instances.pop().unwrap();
    // These units must stay charged after it is killed.
    let mut client = CheckClient::new(&dying, 1);
    assert_eq!((0..300).filter(|_| client.check("quiet", "1000/day") == Some(true)).count(), 300);

    // It is killed during checks, so the outcome of at most one check per connection is unknown.
    let admitted = AtomicU32::new(0);
    let dying_connections = 8;
    std::thread::scope(|scope| {
        for number in 0..16 {
            let (instance, admitted) = (if number < dying_connections { &dying } else { &survivor }, &admitted);
            let mut client = CheckClient::new(instance, number);
            scope.spawn(move || {
                for _ in 0..300 {
                    let Some(given) = client.check("busy", "1000/day") else { return };
                    admitted.fetch_add(given.into(), Ordering::Relaxed);
                }
            });
        }
        while admitted.load(Ordering::Relaxed) < 200 {
            std::thread::yield_now();
        }
        dying.signal("KILL");
    });
    assert!(!dying.end().success());
    let admitted = admitted.into_inner();
    assert!((1_000 - dying_connections as u32..=1_000).contains(&admitted), "{admitted}");
    assert_eq!(remaining(&survivor, "quiet", "1000/day"), 700);
    assert_eq!(remaining(&survivor, "busy", "1000/day"), 0);
}

#[test]
fn a_reset_at_one_instance_is_seen_by_the_other() {
    let redis = Server::redis();
    let (_dir, instances) = start_with_long_deadline(&redis, 2, &[]);
    let mut clients = [CheckClient::new(&instances[0], 0), CheckClient::new(&instances[1], 1)];
    let exhausted = |clients: &mut [CheckClient; 2]| {
        let mut check = |n: usize| clients[n % 2].check("user:42", "10/day").unwrap();
        (0..40).filter(|n| check(*n)).count()
    };
    assert_eq!(exhausted(&mut clients), 10);
    assert!(clients[1].check("user:42", "10/day") == Some(false), "the other instance has cached the denial");
    assert_eq!(instances[0].send_inline("TIDEGATE.RESET user:42 10/day"), "+OK +OK ");
    // The tests of the deny cache show, with a manual clock, that a denial is cached for at most a second.
    eventually(
        "the other instance allows checks after the reset",
        || clients[1].check("user:42", "10/day").unwrap(),
        |allowed| *allowed,
    );
    assert_eq!(exhausted(&mut clients), 9, "the whole quota, and no more, is available");
}

/// Returns the source of a decision.
fn source(serving: &Serving, key: &str) -> String {
    let answer = serving.check(&format!(r#"{{"key":"{key}","limit":"1000000/day"}}"#));
    let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
    body["source"].as_str().unwrap().to_owned()
}

/// Returns the number of calls of a kind to the store.
fn store_calls(serving: &Serving, kind: &str) -> u64 {
    let metrics = serving.visit("/metrics").body;
    let name = format!("tidegate_store_call_seconds_count{{call=\"{kind}\"}} ");
    let count = metrics.lines().find_map(|line| line.strip_prefix(&name));
    count.map_or(0, |count| count.parse().unwrap())
}

/// Asserts that decisions are local and that, once the circuit breaker is open, none of them calls the store.
///
/// Returns after so many probes of the store that the pauses between probes are the longest.
fn decides_locally(serving: &Serving, when: &str) {
    let probes_before = store_calls(serving, "probe");
    for n in 0..5 {
        assert_eq!(source(serving, &format!("first:{n}")), "local", "{when}, check {n}");
    }
    let ready = serving.until("/readyz", |answer| answer.status == 503 && answer.body.contains(r#""breaker":"open""#));
    assert!(ready.body.contains(r#""reachable":false"#), "{ready:?}");
    let calls_before = store_calls(serving, "decide");
    for n in 0..30 {
        assert_eq!(source(serving, &format!("user:{n}")), "local", "{when}, check {n}");
    }
    assert_eq!(store_calls(serving, "decide"), calls_before, "{when}: a decision waited for the store");
    serving.until("/metrics", |_| store_calls(serving, "probe") >= probes_before + 5);
}

/// Waits until the store makes decisions again. The tests of the limiter show, with paused time, that this takes at
/// most two seconds.
fn decides_on_the_store(serving: &Serving, when: &str) {
    eventually(when, || source(serving, "user:42"), |source| source == "store");
    serving.until("/readyz", |answer| answer.status == 200);
    let sources: Vec<String> = (0..5).map(|_| source(serving, "user:42")).collect();
    assert!(sources.iter().any(|source| source == "store"), "{when}: {sources:?}");
}

#[test]
fn decisions_are_local_while_redis_fails_and_shared_again_afterwards() {
    let redis = Server::redis();
    let serving = Serving::start(&["--store", &redis.url()]);
    decides_on_the_store(&serving, "at the start");

    redis.stop();
    decides_locally(&serving, "while Redis is stopped");
    redis.cont();
    redis.command(&["PING"]);
    decides_on_the_store(&serving, "after Redis continues");

    redis.kill9();
    decides_locally(&serving, "while Redis is down");
    redis.restart();
    decides_on_the_store(&serving, "after Redis was started again");
}

#[test]
fn an_instance_started_while_redis_is_down_uses_its_share_and_joins_later() {
    let redis = Server::redis();
    redis.kill9();
    let serving = Serving::start(&["--store", &redis.url(), "--instances", "5"]);
    let question = r#"{"key":"user:42","limit":"10/h"}"#;
    let given: Vec<u16> = (0..4).map(|_| serving.check(question).status).collect();
    assert_eq!(given, [200, 200, 429, 429], "a fifth of the quota");
    decides_locally(&serving, "before Redis was up");
    redis.restart();
    decides_on_the_store(&serving, "once Redis is up");
}

/// Waits until an instance divides quotas by this number of instances.
fn until_counted(serving: &Serving, count: u32) {
    let expected = format!(r#""instances":{count}"#);
    serving.until("/readyz", |answer| answer.body.contains(&expected));
    let metric = format!("tidegate_instances {count}");
    assert!(serving.visit("/metrics").body.lines().any(|line| line == metric));
}

/// Returns how many of 30 checks at each instance are admitted, at 10 per day.
fn admitted(instances: &[Serving], key: &str) -> u32 {
    let body = format!(r#"{{"key":"{key}","limit":"10/day"}}"#);
    let admitted = |instance: &Serving| (0..30).filter(|_| instance.check(&body).status == 200).count() as u32;
    instances.iter().map(admitted).sum()
}

#[test]
fn three_instances_with_default_settings_admit_no_more_than_the_bound_in_an_outage() {
    let redis = Server::redis();
    let instances: Vec<Serving> = (0..3).map(|_| Serving::start(&["--store", &redis.url()])).collect();
    instances.iter().for_each(|instance| until_counted(instance, 3));
    assert!(instances[2].output().contains("instances that share the store"), "{}", instances[2].output());
    let before = admitted(&instances, "across");
    redis.kill9();
    assert_eq!(admitted(&instances, "in the outage"), 12, "3 × ⌈10 / 3⌉");
    let across = before + admitted(&instances, "across");
    assert!(across <= 22, "{before} before the outage, {across} in all");
}

#[test]
fn ended_instances_are_not_counted_any_more() {
    let redis = Server::redis();
    let mut instances: Vec<Serving> = (0..4).map(|_| Serving::start(&["--store", &redis.url()])).collect();
    instances.iter().for_each(|instance| until_counted(instance, 4));
    let set = || redis.command(&["ZCARD", "tidegate:tg2:instances"]).integer();

    let mut ending = instances.pop().unwrap();
    ending.signal("TERM");
    assert!(ending.end().success());
    assert_eq!(set(), 3, "an instance that shuts down removes itself");
    instances.iter().for_each(|instance| until_counted(instance, 3));

    let mut killed = instances.pop().unwrap();
    killed.signal("KILL");
    killed.end();
    instances.iter().for_each(|instance| until_counted(instance, 2));
    redis.kill9();
    assert_eq!(admitted(&instances, "user:42"), 10, "2 × 10 / 2");
}

#[test]
fn partitioned_instance_admits_its_share_and_the_others_the_quota() {
    let redis = Server::redis();
    let proxy = Proxy::start(redis.addr());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, "deadline = \"2s\"\n").unwrap();
    let urls = [proxy.url(), redis.url(), redis.url()];
    let start = |url: &String| Serving::start(&["--store", url, "--config", file.to_str().unwrap()]);
    let instances: Vec<Serving> = urls.iter().map(start).collect();
    instances.iter().for_each(|instance| until_counted(instance, 3));
    proxy.set(Fault::Cut);
    assert_eq!(admitted(&instances[..1], "user:42"), 4, "⌈10 / 3⌉");
    instances[1..].iter().for_each(|instance| until_counted(instance, 2));
    assert_eq!(admitted(&instances[..1], "user:42"), 0, "its number stays the last known one");
    assert_eq!(admitted(&instances[1..], "user:42"), 10);
}

#[test]
fn single_commands_do_not_announce_themselves() {
    let redis = Server::redis();
    let url = redis.url();
    for arguments in [
        &["check", "user:42", "10/min"][..],
        &["inspect", "user:42", "10/min"],
        &["reset", "user:42", "10/min"],
        &["ban", "user:42"],
        &["unban", "user:42"],
    ] {
        let output = command().args(arguments).args(["--store", &url]).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        assert_eq!(redis.command(&["EXISTS", "tidegate:tg2:instances"]).integer(), 0, "{arguments:?}");
    }
}
