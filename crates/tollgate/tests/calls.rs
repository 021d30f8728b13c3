//! How often the store is called: what waits together goes together, and what is known is not asked.
//!
//! Calls are counted where they arrive, by the server. Where minutes matter they are injected: the store and the node
//! are given the same clock, which only the test moves. Every answer is also judged by the history checker: a call saved
//! by a wrong answer saves nothing.

#![allow(clippy::unwrap_used)] // all of it is test code

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tollgate::{
    Check, CheckOptions, Clock, Decision, Demand, Key, Limit, Limiter, ManualClock, Source, SystemClock, Timestamp,
};
use tollgate_redis::RedisStore;
use tollgate_testkit::conformance::Random;
use tollgate_testkit::history::{Bounds, History, Report};
use tollgate_testkit::oracle::Oracle;
use tollgate_testkit::server::Server;

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
/// Nothing here is about time: a busy machine must not turn an answer into a local one.
const PATIENCE: Duration = Duration::from_secs(30);

/// A node whose store goes by the same invented time as itself.
struct Node {
    server: Server,
    limiter: Limiter,
    clock: Arc<ManualClock>,
}

impl Node {
    fn new() -> Node {
        let server = Server::redis();
        let clock = Arc::new(ManualClock::new(START));
        let store = RedisStore::builder(server.url()).clock_override(clock.clone()).call_timeout(PATIENCE);
        let store = Arc::new(store.build().unwrap());
        let limiter = Limiter::builder().store(store).clock(clock.clone()).deadline(PATIENCE).build();
        Node { server, limiter, clock }
    }

    /// So many requests of one client under these limits, evenly spread over so long.
    async fn offer(&self, limits: &[Limit], requests: u32, duration: Duration) -> Report {
        let mut history = History::new(limits.iter().copied());
        let counters: Vec<usize> = (0..limits.len()).collect();
        let demand = |limit: &Limit| Demand::new(*limit, Key::new("client").unwrap());
        let demands: Vec<Demand<'_>> = limits.iter().map(demand).collect();
        let check = Check::new(&demands).unwrap();
        for _ in 0..requests {
            let sent_us = self.clock.now().as_micros();
            let decision = self.limiter.check(&check).await.unwrap();
            history.note(&counters, sent_us, sent_us, &decision);
            self.clock.advance(duration / requests);
        }
        history.verify(Bounds::default())
    }
}

/// Calls of the script that the server has seen, sent along or known.
fn calls_of(server: &Server) -> u64 {
    let info = server.command(&["INFO", "commandstats"]).text();
    let of = |command: &str| {
        let line = info.lines().find(|line| line.starts_with(command))?;
        line.split("calls=").nth(1)?.split(',').next()?.parse::<u64>().ok()
    };
    of("cmdstat_evalsha:").unwrap_or(0) + of("cmdstat_eval:").unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_of_one_hot_key_share_calls() {
    const CALLERS: u64 = 64;
    const ROUNDS: u64 = 200;
    let server = Server::redis();
    let store = Arc::new(RedisStore::builder(server.url()).call_timeout(PATIENCE).build().unwrap());
    let clock = Arc::new(SystemClock::new());
    let limiter = Limiter::builder().store(store).clock(clock.clone()).deadline(PATIENCE).build();
    // Most of it is admitted, so that it is batches and not remembered denials that save the calls.
    let limit: Limit = "10000/min sliding-log".parse().unwrap();
    let callers = (0..CALLERS).map(|_| {
        let (limiter, clock) = (limiter.clone(), clock.clone());
        tokio::spawn(async move {
            let demand = Demand::new(limit, Key::new("hot").unwrap());
            let mut history = History::new([limit]);
            for _ in 0..ROUNDS {
                let sent_us = clock.now().as_micros();
                let decision = limiter.check(&Check::one(&demand)).await.unwrap();
                history.note(&[0], sent_us, clock.now().as_micros(), &decision);
            }
            history
        })
    });
    let mut history = History::new([limit]);
    for caller in callers.collect::<Vec<_>>() {
        history.merge(caller.await.unwrap());
    }
    let report = history.verify(Bounds::default());
    report.expect_clean();
    let (calls, asked) = (calls_of(&server), report.admitted + report.refused);
    println!("{} decisions, {asked} by the store, {calls} calls", report.checks);
    assert_eq!((report.checks, report.admitted), (CALLERS * ROUNDS, 10_000));
    assert!(calls * 10 <= asked, "{calls} calls for {asked} decisions of the store");
}

#[tokio::test]
async fn a_client_that_hammers_after_a_denial_costs_one_call_a_second() {
    const SECONDS: u32 = 20;
    for texts in [&["1/h"][..], &["5/h sliding-log"], &["3/h", "100/day"], &["100/day", "3/h"], &["4/h", "4/day"]] {
        let node = Node::new();
        let limits: Vec<Limit> = texts.iter().map(|text| text.parse().unwrap()).collect();
        let quota = u64::from(limits.iter().map(Limit::quota).min().unwrap());
        let report = node.offer(&limits, SECONDS * 1_000, Duration::from_secs(SECONDS.into())).await;
        report.expect_clean();
        assert_eq!(report.admitted, quota * limits.len() as u64);
        let calls = calls_of(&node.server);
        println!("{texts:?}: {calls} calls for {} decisions in {SECONDS} s", report.checks);
        // The last admission says that nothing is left, and is itself the first word to remember.
        assert!(calls <= u64::from(SECONDS) + quota, "{texts:?}: {calls} calls in {SECONDS} s");
    }
}

#[tokio::test]
async fn overload_is_refused_without_asking() {
    // An admission is a call, and so is a look once a second while refused; so the factors are of quotas above some
    // fifty a minute. Below, the second dominates, and a client costs no more than one call in it.
    for (quota, times, fewer) in [(100, 10, 4), (600, 10, 4), (100, 100, 40), (600, 100, 40)] {
        const MINUTES: u32 = 4;
        let node = Node::new();
        let limit: Limit = format!("{quota}/min").parse().unwrap();
        let requests = quota * times * MINUTES;
        let report = node.offer(&[limit], requests, Duration::from_secs(60) * MINUTES).await;
        report.expect_clean();
        let calls = calls_of(&node.server);
        println!("{quota}/min at {times} times that: {calls} calls for {requests} decisions");
        // A request comes between a unit's return and the next, so not every unit is used at once.
        assert!(report.admitted >= u64::from(quota * (MINUTES - 1)), "{report}");
        assert!(calls * fewer <= requests.into(), "{quota}/min at {times} times that: {calls} calls for {requests}");
    }
}

/// One to three demands on few counters, so that checks overlap and compete.
fn random_demands(random: &mut Random) -> Vec<Demand<'static>> {
    const SUBJECTS: [&str; 4] = ["ann", "bob", "cyd", "dan"];
    const LIMITS: [&str; 3] = ["12/s", "30/2s sliding-log", "9/s token-bucket burst=6"];
    let mut demands: Vec<Demand<'static>> = Vec::new();
    let wanted = 1 + random.below(3) as usize;
    while demands.len() < wanted {
        let limit: Limit = LIMITS[random.below(3) as usize].parse().unwrap();
        let key = Key::new(SUBJECTS[random.below(4) as usize]).unwrap();
        demands.push(Demand::new(limit, key).cost([1, 1, 1, 2, 5][random.below(5) as usize]));
        if Check::new(&demands).is_err() {
            demands.pop();
        }
    }
    demands
}

/// Every answer of the store is the oracle's, field by field; a remembered one has its verdict.
fn assert_in_order(
    node: &Node,
    oracle: &mut Oracle,
    checks: &[Check<'_>],
    decisions: &[Decision],
    seen: &mut [u32; 2],
) {
    assert_eq!(checks.len(), decisions.len());
    for (check, decision) in checks.iter().zip(decisions) {
        let expected = oracle.check(node.clock.now(), check);
        match decision.source {
            Source::Store => assert_eq!(*decision, expected, "{check:?}"),
            Source::DenyCache => assert!(!decision.allowed() && !expected.allowed(), "{check:?}: {expected:?}"),
            _ => panic!("{decision:?}"),
        }
        seen[usize::from(decision.source == Source::Store)] += 1;
    }
}

#[tokio::test]
async fn mixed_costs_and_overlapping_keys_in_one_batch_are_granted_in_order() {
    let node = Node::new();
    let (mut oracle, mut random, mut seen) = (Oracle::new(), Random::new(11), [0; 2]);
    for round in 0..300 {
        node.clock.advance(Duration::from_millis([0, 3, 90, 400][random.below(4) as usize]));
        let batch: Vec<Vec<Demand<'_>>> = (0..24).map(|_| random_demands(&mut random)).collect();
        let checks: Vec<Check<'_>> = batch.iter().map(|demands| Check::new(demands).unwrap()).collect();
        let decisions: Vec<_> = if round % 2 == 0 {
            node.limiter.check_batch(&checks, CheckOptions::default()).await
        } else {
            // Callers of their own, who come in this order.
            join_all(checks.iter().map(|check| node.limiter.check(check))).await
        };
        let decisions: Vec<Decision> = decisions.into_iter().map(Result::unwrap).collect();
        assert_in_order(&node, &mut oracle, &checks, &decisions, &mut seen);
    }
    let [remembered, by_store] = seen;
    assert!(remembered > 100 && by_store > 1_000, "both kinds: {seen:?}");
    let calls = calls_of(&node.server);
    assert!(calls <= 2 * 300 + 1, "one call a batch; of callers one for the first and one for the others: {calls}");
}

#[tokio::test]
async fn a_ban_of_one_subject_is_not_remembered_against_another() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).bans(true).call_timeout(PATIENCE).build().unwrap();
    let limiter = Limiter::builder().store(Arc::new(store.clone())).deadline(PATIENCE).build();
    let demand = |limit: &str, subject: &'static str| Demand::new(limit.parse().unwrap(), Key::new(subject).unwrap());
    let (user, global) = (demand("100/min", "user:7"), demand("1000/min", "global"));
    store.ban(b"user:7", Some(Duration::from_secs(3600))).await.unwrap();
    for demands in [[user, global], [user, global.cost(0)]] {
        assert!(!limiter.check(&Check::new(&demands).unwrap()).await.unwrap().allowed());
        for other in [global, global.cost(0)] {
            let decision = limiter.check(&Check::one(&other)).await.unwrap();
            assert_eq!((decision.allowed(), decision.source), (true, Source::Store), "{other:?} after {demands:?}");
        }
    }
    // Its own counters are the banned subject's.
    let both = [user, demand("1000/day", "user:7"), demand("9/h", "user:7").cost(0)];
    let check = Check::new(&both).unwrap();
    limiter.check(&check).await.unwrap();
    let calls = calls_of(&server);
    for demands in [&both[..2], &both[..1]] {
        let decision = limiter.check(&Check::new(demands).unwrap()).await.unwrap();
        assert_eq!((decision.allowed(), decision.source), (false, Source::Ban), "{demands:?}");
    }
    assert_eq!(calls_of(&server), calls);
    assert!(limiter.check(&Check::one(&both[2])).await.unwrap().allowed(), "a peek is never denied");
}
