//! Counters on a real Redis: refunds run in background tasks, which can be awaited.

use std::sync::Arc;
use std::time::Duration;

use tidegate::Limiter;
use tidegate::engine::Engine;
use tidegate_redis::RedisStore;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::server::Server;
use tokio::task::JoinSet;

use super::ledger::{Ledger, clock, rules, seed};
use super::scripted::{Ending, ratelimit_header, silence_planned_panics, site};

const ROUNDS: usize = 25;
/// Requests that are under way at the same time.
const TOGETHER: usize = 200;
/// So long that a busy machine neither makes decisions local nor loses refunds.
const TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
async fn random_endings_leave_exactly_their_charges_on_redis() {
    silence_planned_panics();
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(TIMEOUT).clock_override(clock()).build().unwrap();
    let limiter = Limiter::builder().store(Arc::new(store)).deadline(TIMEOUT).build();
    let engine = Engine::new(limiter, rules());
    let site = site(&engine);

    let seed = seed();
    let mut random = Random::new(seed);
    let mut ledger = Ledger::default();
    for round in 1..=ROUNDS {
        let mut under_way = JoinSet::new();
        for _ in 0..TOGETHER {
            let timeout = Duration::from_micros(random.below(3_000));
            under_way.spawn(Ending::random(&mut random, timeout).run(site.clone()));
        }
        while let Some(ended) = under_way.join_next().await {
            ledger.add(ended.unwrap());
        }
        engine.wait_for_pending().await;
        let context = format!("TIDEGATE_SEED={seed}, after round {round}");
        ledger.expect_header(&ratelimit_header(site.clone()).await, &context);
        ledger.expect_counters(&engine, &context).await;
    }
    let stats = engine.limiter().stats();
    assert_eq!((stats.local, stats.uncounted, stats.unavailable), (0, 0, 0), "the store made every decision");
    let Ledger { succeeded, failed, unanswered } = ledger;
    assert!(succeeded.min(failed).min(unanswered) > 100, "every kind of ending: {ledger:?}");
}
