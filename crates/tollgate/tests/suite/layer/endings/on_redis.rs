//! Counters on a real Redis: what a request leaves behind is settled by somebody else, and can be waited for.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tollgate::Limiter;
use tollgate::engine::Engine;
use tollgate_redis::RedisStore;
use tollgate_testkit::conformance::Random;
use tollgate_testkit::server::Server;

use super::ledger::{Ledger, clock, rules, seed};
use super::scripted::{Ending, silence_planned_panics, site, told};

const ROUNDS: usize = 25;
/// Requests that are under way at the same time.
const TOGETHER: usize = 200;
/// A busy machine must not turn an answer into a local one, nor lose a refund.
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
async fn after_random_endings_the_remaining_quota_on_redis_is_exactly_what_they_say() {
    silence_planned_panics();
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(PATIENCE).clock_override(clock()).build().unwrap();
    let limiter = Limiter::builder().store(Arc::new(store)).deadline(PATIENCE).build();
    let engine = Engine::new(limiter, rules());
    let site = site(&engine);

    let seed = seed();
    let mut random = Random::new(seed);
    let mut ledger = Ledger::default();
    for round in 1..=ROUNDS {
        let mut under_way = JoinSet::new();
        for _ in 0..TOGETHER {
            let patience = Duration::from_micros(random.below(3_000));
            under_way.spawn(Ending::random(&mut random, patience).happen(site.clone(), true));
        }
        while let Some(ended) = under_way.join_next().await {
            ledger.add(ended.unwrap());
        }
        engine.settled().await;
        let context = format!("TOLLGATE_SEED={seed}, after round {round}");
        ledger.expect_told(&told(site.clone()).await, &context);
        ledger.expect_counted(&engine, &context).await;
    }
    let stats = engine.limiter().stats();
    assert_eq!((stats.local, stats.uncounted, stats.unavailable), (0, 0, 0), "every answer was the store's");
    let Ledger { succeeded, failed, unanswered } = ledger;
    assert!(succeeded.min(failed).min(unanswered) > 100, "every kind of ending: {ledger:?}");
}
