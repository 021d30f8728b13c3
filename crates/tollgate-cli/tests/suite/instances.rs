//! Several instances on one Redis: one budget, whoever dies, and an answer whatever happens to Redis.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::serving::{Client, Serving};
use tollgate_testkit::server::{Connection, Reply, Server};

/// A machine may be busy: where a count must be exact, the store is waited for.
const PATIENT: &str = "deadline = \"20s\"\n";
/// From the moment a healed Redis answers PING until the counters are shared again.
const HEALED_WITHIN: Duration = Duration::from_secs(2);
/// So long may a denial be remembered.
const REMEMBERED_WITHIN: Duration = Duration::from_secs(1);
/// Between two looks at another process, which tells nobody when it has noticed.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// Instances that wait for the store, however slow the machine is.
fn patient(redis: &Server, count: usize) -> (tempfile::TempDir, Vec<Serving>) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tollgate.toml");
    std::fs::write(&file, PATIENT).unwrap();
    let start = |_| Serving::start(&["--store", &redis.url(), "--config", file.to_str().unwrap()]);
    let instances = (0..count).map(start).collect();
    (dir, instances)
}

/// One connection to one door of one instance.
enum Asker {
    Http(Client),
    Resp(Connection),
}

impl Asker {
    /// Half of them at each door.
    fn new(serving: &Serving, number: usize) -> Asker {
        match number % 2 {
            0 => Asker::Http(Client::open(&serving.http)),
            _ => Asker::Resp(serving.connect()),
        }
    }

    /// Whether a unit was given; nothing if the instance is gone.
    fn ask(&mut self, key: &str, limit: &str) -> Option<bool> {
        match self {
            Asker::Http(client) => {
                client.send("POST", "/v1/check", &[], &format!(r#"{{"key":"{key}","limit":"{limit}"}}"#));
                client.hear().map(|answer| answer.status == 200)
            }
            Asker::Resp(connection) => {
                let reply = connection.call(&["TOLLGATE.CHECK", key, limit]).ok()?;
                Some(reply.items()[0] == Reply::Integer(1))
            }
        }
    }
}

fn remaining(serving: &Serving, key: &str, limit: &str) -> i64 {
    serving.connect().call(&["TOLLGATE.PEEK", key, limit]).unwrap().items()[2].integer()
}

#[test]
fn two_instances_have_one_budget_exactly_under_sixteen_connections() {
    let redis = Server::redis();
    let (_dir, instances) = patient(&redis, 2);
    for limit in ["1000/day", "1000/day sliding-log", "1000/day fixed-window"] {
        let admitted = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for number in 0..16 {
                let (instance, admitted) = (&instances[number / 2 % 2], &admitted);
                scope.spawn(move || {
                    let mut asker = Asker::new(instance, number);
                    for _ in 0..150 {
                        admitted.fetch_add(asker.ask("user:42", limit).expect("an answer").into(), Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(admitted.into_inner(), 1_000, "{limit}");
        assert_eq!(instances.iter().map(|one| remaining(one, "user:42", limit)).sum::<i64>(), 0);
    }
}

#[test]
fn a_killed_instance_takes_nothing_with_it() {
    let redis = Server::redis();
    let (_dir, mut instances) = patient(&redis, 2);
    let survivor = instances.pop().unwrap();
    let mut dying = instances.pop().unwrap();
    // What it admitted before it dies stays counted.
    let mut asker = Asker::new(&dying, 1);
    assert_eq!((0..300).filter(|_| asker.ask("quiet", "1000/day") == Some(true)).count(), 300);

    // And it dies while others are asking it: what is unknown is at most what each of them was waiting for.
    let admitted = AtomicU32::new(0);
    let dying_connections = 8;
    std::thread::scope(|scope| {
        for number in 0..16 {
            let (instance, admitted) = (if number < dying_connections { &dying } else { &survivor }, &admitted);
            let mut asker = Asker::new(instance, number);
            scope.spawn(move || {
                for _ in 0..300 {
                    let Some(given) = asker.ask("busy", "1000/day") else { return };
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
    let (_dir, instances) = patient(&redis, 2);
    let mut askers = [Asker::new(&instances[0], 0), Asker::new(&instances[1], 1)];
    let exhausted = |askers: &mut [Asker; 2]| {
        let mut ask = |n: usize| askers[n % 2].ask("user:42", "10/day").unwrap();
        (0..40).filter(|n| ask(*n)).count()
    };
    assert_eq!(exhausted(&mut askers), 10);
    assert!(askers[1].ask("user:42", "10/day") == Some(false), "the other one remembers the denial");
    assert_eq!(instances[0].say("TOLLGATE.RESET user:42 10/day"), "+OK +OK ");
    let seen = within(REMEMBERED_WITHIN, || askers[1].ask("user:42", "10/day").unwrap());
    assert!(seen, "a denial is remembered for a second at most");
    assert_eq!(exhausted(&mut askers), 9, "and the budget is whole, no more");
}

/// Whether it was so before the time was over. Time is counted in the pauses between looks: a machine that stands still
/// for a while makes one pause longer, which is no fault of those who are looked at, and adds no other.
fn within(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    for look in 0..=limit.as_millis() / LOOK_PAUSE.as_millis() {
        if is_so() {
            println!("so at look {look}");
            return true;
        }
        std::thread::sleep(LOOK_PAUSE);
    }
    false
}

/// Who answered, and how long that took.
#[allow(clippy::disallowed_methods)] // the deadline is one of real time
fn asked(serving: &Serving, key: &str) -> (String, Duration) {
    let start = Instant::now();
    let answer = serving.check(&format!(r#"{{"key":"{key}","limit":"1000000/day"}}"#));
    let took = start.elapsed();
    let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
    (body["source"].as_str().unwrap().to_owned(), took)
}

/// How often the store was asked whether it is there again.
fn probes(serving: &Serving) -> u64 {
    let metrics = serving.visit("/metrics").body;
    let count =
        metrics.lines().find_map(|line| line.strip_prefix("tollgate_store_call_seconds_count{call=\"probe\"} "));
    count.map_or(0, |count| count.parse().unwrap())
}

/// Answers come from this node, and none is waited for: forty deadlines are one second. This goes on until the store is
/// asked at the longest distances.
fn answers_by_itself(serving: &Serving, when: &str) {
    let probes_before = probes(serving);
    for n in 0..30 {
        let (source, took) = asked(serving, &format!("user:{n}"));
        assert_eq!(source, "local", "{when}, question {n}");
        assert!(took < Duration::from_secs(1), "{when}, question {n} took {took:?}");
    }
    let told = serving.until("/readyz", |answer| answer.status == 503).body;
    assert!(told.contains(r#""reachable":false"#), "{told}");
    serving.until("/metrics", |_| probes(serving) >= probes_before + 5);
}

fn shares_again(serving: &Serving, when: &str) {
    assert!(
        within(HEALED_WITHIN, || { asked(serving, "user:42").0 == "store" && serving.visit("/readyz").status == 200 }),
        "{when}: neither shared nor ready"
    );
    let sources: Vec<String> = (0..5).map(|_| asked(serving, "user:42").0).collect();
    assert!(sources.iter().any(|source| source == "store"), "{when}: {sources:?}");
}

#[test]
fn whatever_happens_to_redis_there_is_an_answer_and_then_one_budget_again() {
    let redis = Server::redis();
    let serving = Serving::start(&["--store", &redis.url()]);
    shares_again(&serving, "at the start");

    redis.stop();
    answers_by_itself(&serving, "while Redis is stopped");
    redis.cont();
    redis.command(&["PING"]);
    shares_again(&serving, "after Redis goes on");

    redis.kill9();
    answers_by_itself(&serving, "while Redis is down");
    redis.restart();
    shares_again(&serving, "after Redis was started again");
}

#[test]
fn an_instance_starts_while_redis_is_down_with_its_share_and_joins_later() {
    let redis = Server::redis();
    redis.kill9();
    let serving = Serving::start(&["--store", &redis.url(), "--instances", "5"]);
    let question = r#"{"key":"user:42","limit":"10/h"}"#;
    let given: Vec<u16> = (0..4).map(|_| serving.check(question).status).collect();
    assert_eq!(given, [200, 200, 429, 429], "a fifth of the quota");
    answers_by_itself(&serving, "before Redis was ever there");
    redis.restart();
    shares_again(&serving, "once Redis is there");
}
