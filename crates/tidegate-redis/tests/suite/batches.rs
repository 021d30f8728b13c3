//! The checks of one call are decided as if each were a call of its own.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::{Check, Cost, Decision, Demand, Key, Limit, Scope, Store, Timestamp};
use tidegate_redis::RedisStore;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::oracle::Oracle;
use tidegate_testkit::server::{Brand, Server};

use crate::on_server::OnServer;

const LIMITS: [&str; 14] = [
    "5/s",
    "40/s",
    "7/10s count_denied=true",
    "3000/s",
    "2000/s count_denied=true",
    "9/s sliding-log",
    "6/s sliding-counter",
    "4/s fixed-window",
    "5/s fixed-window count_denied=true",
    "8/s token-bucket burst=3",
    "30/s leaky-bucket queue=4",
    "3/s leaky-bucket count_denied=true",
    "1/ms",
    "6/2s",
];
const SUBJECTS: [&str; 3] = ["ann", "bob", "cyd"];

/// Creates one to three demands on different counters. Few counters and small quotas, so that checks affect each other.
fn random_demands(random: &mut Random) -> Vec<Demand<'static>> {
    let mut demands: Vec<Demand<'static>> = Vec::new();
    let wanted = 1 + random.below(8) / 6;
    while demands.len() < wanted as usize {
        let subject = SUBJECTS[random.below(3) as usize];
        let limit: Limit = LIMITS[random.below(LIMITS.len() as u64) as usize].parse().unwrap();
        let rule = Scope::rule("r", ["x", "y"][random.below(2) as usize]);
        let scope = [Scope::Explicit, Scope::Explicit, rule][random.below(3) as usize];
        let cost = [1, 1, 1, 1, 2, 0, 3, 25][random.below(8) as usize];
        demands.push(Demand::new(limit, Key::scoped(subject, scope).unwrap()).cost(Cost::new(cost)));
        if Check::new(&demands).is_err() {
            demands.pop();
        }
    }
    demands
}

/// Creates a batch in which some checks are repeated.
fn random_batch(random: &mut Random) -> Vec<Vec<Demand<'static>>> {
    let mut batch = Vec::new();
    while batch.len() < 24 {
        let demands = random_demands(random);
        let times = [1, 1, 1, 2, 5, 20][random.below(6) as usize];
        batch.extend(std::iter::repeat_n(demands, times));
    }
    batch
}

fn batches_are_decided_in_order(brand: Brand) {
    let redis = OnServer::new(brand);
    let mut random = Random::new(0x0ba7_c4e5);
    for round in 0..60 {
        redis.emptied();
        let mut oracle = Oracle::new();
        let mut now_us = 1_760_000_000_000_000;
        for call in 0..8 {
            now_us += [0, 1, 40_000, 350_000, 1_000_000][random.below(5) as usize];
            let now = Timestamp::from_micros(now_us);
            redis.clock.set(now);
            let batch = random_batch(&mut random);
            let checks: Vec<Check<'_>> = batch.iter().map(|demands| Check::new(demands).unwrap()).collect();
            let decided = redis.wait(redis.store.decide(&checks)).unwrap();
            let expected: Vec<Decision> = checks.iter().map(|check| oracle.check(now, check)).collect();
            for (index, (got, expected)) in decided.iter().zip(&expected).enumerate() {
                assert_eq!(got, expected, "round {round}, call {call}, check {index}: {:?}", checks[index]);
            }
            assert_eq!(decided.len(), expected.len());
        }
    }
}

#[test]
fn redis_decides_batches_in_order() {
    batches_are_decided_in_order(Brand::Redis);
}

#[test]
fn valkey_decides_batches_in_order() {
    batches_are_decided_in_order(Brand::Valkey);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_callers_on_one_key_share_calls_and_are_granted_exactly_the_quota() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(Duration::from_secs(10)).build().unwrap();
    store.command(&["PING"]).await.unwrap();
    let before = store.stats();
    let limit: Limit = "1000/h".parse().unwrap();
    let callers = (0..64).map(|_| {
        let store = store.clone();
        tokio::spawn(async move {
            let demand = Demand::new(limit, Key::new("hot").unwrap());
            let mut granted = 0;
            for _ in 0..200 {
                granted += usize::from(store.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());
            }
            granted
        })
    });
    let mut granted = 0;
    for caller in callers.collect::<Vec<_>>() {
        granted += caller.await.unwrap();
    }
    assert_eq!(granted, 1000);
    let stats = store.stats();
    let (calls, decisions) = (stats.calls - before.calls, stats.decisions - before.decisions);
    assert_eq!(decisions, 64 * 200);
    assert!(calls * 10 <= decisions, "{calls} calls for {decisions} decisions");
}

#[tokio::test]
async fn caller_that_gives_up_in_the_queue_is_not_charged() {
    let server = Server::redis();
    let store = Arc::new(RedisStore::builder(server.url()).call_timeout(Duration::from_secs(5)).build().unwrap());
    store.command(&["PING"]).await.unwrap();
    let limit: Limit = "100/h".parse().unwrap();
    let demand = Demand::new(limit, Key::new("k").unwrap());
    let checks = [Check::one(&demand)];

    server.stop();
    let give_up_after = |ms| tokio::time::timeout(Duration::from_millis(ms), store.decide(&checks));
    let before = store.stats();
    // Fill the calls that may be in flight.
    while store.stats().calls - before.calls < 32 {
        assert!(give_up_after(5).await.is_err(), "the server is stopped");
    }
    for _ in 0..3 {
        assert!(give_up_after(5).await.is_err(), "the server is stopped");
    }
    let sent = store.stats().decisions - before.decisions;
    server.cont();
    let line = store.inspect(&demand).await.unwrap();
    assert_eq!(u64::from(100 - line.remaining), sent, "the first were on their way, the last three were not");
}
