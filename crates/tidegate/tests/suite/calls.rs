//! How often the store is called: waiting checks share a call, and cached denials need none.
//!
//! The server counts the calls. Where minutes matter, the store and the node share a manual clock. The history checker
//! verifies every decision, since a call must not be saved by a wrong decision.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tidegate::{
    Check, CheckOptions, Clock, Decision, Demand, Key, Limit, Limiter, ManualClock, Source, Store, SystemClock,
    Timestamp,
};
use tidegate_redis::RedisStore;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::history::{Bounds, History, Report};
use tidegate_testkit::oracle::Oracle;
use tidegate_testkit::server::Server;

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
/// So long that a busy machine makes no decision local.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A limiter and a store with the same manual clock.
struct Node {
    server: Server,
    limiter: Limiter,
    clock: Arc<ManualClock>,
}

impl Node {
    fn new() -> Node {
        let server = Server::redis();
        let clock = Arc::new(ManualClock::new(START));
        let store = RedisStore::builder(server.url()).clock_override(clock.clone()).call_timeout(TIMEOUT);
        let store = Arc::new(store.build().unwrap());
        let limiter = Limiter::builder().store(store).clock(clock.clone()).deadline(TIMEOUT).announce(false).build();
        Node { server, limiter, clock }
    }

    /// Makes this many checks of one subject under these limits, evenly spread over `duration`.
    async fn check_evenly(&self, limits: &[Limit], requests: u32, duration: Duration) -> Report {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_checks_of_one_key_share_calls() {
    const CALLERS: u64 = 64;
    const ROUNDS: u64 = 200;
    let server = Server::redis();
    let store = Arc::new(RedisStore::builder(server.url()).call_timeout(TIMEOUT).build().unwrap());
    let clock = Arc::new(SystemClock::new());
    let limiter = Limiter::builder().store(store).clock(clock.clone()).deadline(TIMEOUT).announce(false).build();
    // Most checks are admitted, so that batches save the calls and not cached denials.
    let limit: Limit = "10000/h sliding-log".parse().unwrap();
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
    let (calls, by_store) = (server.script_calls(), report.admitted + report.refused);
    println!("{} decisions, {by_store} by the store, {calls} calls", report.checks);
    assert_eq!((report.checks, report.admitted), (CALLERS * ROUNDS, 10_000));
    assert!(calls * 10 <= by_store, "{calls} calls for {by_store} decisions of the store");
}

#[tokio::test]
async fn client_that_ignores_denials_costs_one_call_per_second() {
    const SECONDS: u32 = 20;
    for texts in [&["1/h"][..], &["5/h sliding-log"], &["3/h", "100/day"], &["100/day", "3/h"], &["4/h", "4/day"]] {
        let node = Node::new();
        let limits: Vec<Limit> = texts.iter().map(|text| text.parse().unwrap()).collect();
        let quota = u64::from(limits.iter().map(Limit::quota).min().unwrap());
        let report = node.check_evenly(&limits, SECONDS * 1_000, Duration::from_secs(SECONDS.into())).await;
        report.expect_clean();
        assert_eq!(report.admitted, quota * limits.len() as u64);
        let calls = node.server.script_calls();
        println!("{texts:?}: {calls} calls for {} decisions in {SECONDS} s", report.checks);
        // The last admission leaves nothing, so the next check is already denied from the cache.
        assert!(calls <= u64::from(SECONDS) + quota, "{texts:?}: {calls} calls in {SECONDS} s");
    }
}

#[tokio::test]
async fn most_denials_of_an_overload_are_cached() {
    // Each admission is a call, and so is one check per second while denied. So the factors hold for quotas above some
    // fifty per minute. Below, a client costs at most one call per second.
    for (quota, times, fewer) in [(100, 10, 4), (600, 10, 4), (100, 100, 40), (600, 100, 40)] {
        const MINUTES: u32 = 4;
        let node = Node::new();
        let limit: Limit = format!("{quota}/min").parse().unwrap();
        let requests = quota * times * MINUTES;
        let report = node.check_evenly(&[limit], requests, Duration::from_secs(60) * MINUTES).await;
        report.expect_clean();
        let calls = node.server.script_calls();
        println!("{quota}/min at {times} times that: {calls} calls for {requests} decisions");
        // A unit that expires between two checks is used a little later, so a window may admit less than its quota.
        assert!(report.admitted >= u64::from(quota * (MINUTES - 1)), "{report}");
        assert!(calls * fewer <= requests.into(), "{quota}/min at {times} times that: {calls} calls for {requests}");
    }
}

/// Returns one to three demands on few counters, so that checks compete for units.
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

/// Asserts that decisions of the store equal the oracle's, and that cached denials are denials of the oracle, too.
///
/// Counts cached decisions and decisions of the store in `seen`.
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
async fn checks_of_a_batch_are_decided_in_order() {
    let node = Node::new();
    let (mut oracle, mut random, mut seen) = (Oracle::new(), Random::new(11), [0; 2]);
    for round in 0..300 {
        node.clock.advance(Duration::from_millis([0, 3, 90, 400][random.below(4) as usize]));
        let batch: Vec<Vec<Demand<'_>>> = (0..24).map(|_| random_demands(&mut random)).collect();
        let checks: Vec<Check<'_>> = batch.iter().map(|demands| Check::new(demands).unwrap()).collect();
        let decisions: Vec<_> = if round % 2 == 0 {
            node.limiter.check_batch(&checks, CheckOptions::default()).await
        } else {
            // Separate callers, in this order.
            join_all(checks.iter().map(|check| node.limiter.check(check))).await
        };
        let decisions: Vec<Decision> = decisions.into_iter().map(Result::unwrap).collect();
        assert_in_order(&node, &mut oracle, &checks, &decisions, &mut seen);
    }
    let [cached, by_store] = seen;
    assert!(cached > 100 && by_store > 1_000, "both kinds: {seen:?}");
    let calls = node.server.script_calls();
    assert!(calls <= 2 * 300 + 1, "one call per batch; two for separate callers: {calls}");
}

#[tokio::test]
async fn cached_ban_of_one_subject_does_not_deny_another() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).bans(true).call_timeout(TIMEOUT).build().unwrap();
    let limiter = Limiter::builder().store(Arc::new(store.clone())).deadline(TIMEOUT).announce(false).build();
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
    // Other limits of the banned subject are denied from the cache.
    let both = [user, demand("1000/day", "user:7"), demand("9/h", "user:7").cost(0)];
    let check = Check::new(&both).unwrap();
    limiter.check(&check).await.unwrap();
    let calls = server.script_calls();
    for demands in [&both[..2], &both[..1]] {
        let decision = limiter.check(&Check::new(demands).unwrap()).await.unwrap();
        assert_eq!((decision.ban.is_some(), decision.source), (true, Source::DenyCache), "{demands:?}");
    }
    assert_eq!(server.script_calls(), calls);
    assert!(limiter.check(&Check::one(&both[2])).await.unwrap().allowed(), "a peek is never denied");
}
