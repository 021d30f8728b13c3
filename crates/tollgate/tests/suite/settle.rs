//! `settle` on a real Redis and in memory: the same calls at the same times leave equal counters.

use std::sync::Arc;
use std::time::Duration;

use tollgate::{
    Algorithm, Check, CheckOptions, Cost, Decision, Demand, Key, Limit, Limiter, ManualClock, Source, Timestamp,
};
use tollgate_redis::RedisStore;
use tollgate_testkit::server::Server;

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
/// So long that a busy machine makes no decision local.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A limiter on Redis and one in memory, with the same manual clock.
struct Nodes {
    limiters: [Limiter; 2],
    clock: Arc<ManualClock>,
}

impl Nodes {
    fn new(server: &Server) -> Nodes {
        let clock = Arc::new(ManualClock::new(START));
        let store = RedisStore::builder(server.url()).clock_override(clock.clone()).call_timeout(TIMEOUT);
        let store = Arc::new(store.build().unwrap());
        let on_redis = Limiter::builder().store(store).clock(clock.clone()).deadline(TIMEOUT).build();
        let in_memory = Limiter::builder().clock(clock.clone()).build();
        Nodes { limiters: [on_redis, in_memory], clock }
    }

    /// Reserves units, advances the clock, charges one more unit and settles; then asserts that both counters are equal.
    async fn settle_on_each(&self, demand: Demand<'_>, reserve: u32, wait_ms: u64, actual: u32) {
        let options = CheckOptions { refundable: true, ..CheckOptions::default() };
        let mut reserved: Vec<Decision> = Vec::new();
        let estimate = demand.cost(reserve);
        for limiter in &self.limiters {
            let decision = limiter.check_with(&Check::one(&estimate), options).await.unwrap();
            assert_eq!((decision.source, decision.allowed()), (Source::Store, true));
            reserved.push(decision);
        }
        self.clock.advance(Duration::from_millis(wait_ms));
        for (limiter, decision) in self.limiters.iter().zip(&reserved) {
            limiter.check_with(&Check::one(&demand), options).await.unwrap();
            limiter.settle(&Check::one(&estimate), decision, Cost::new(actual)).await.unwrap();
        }
        let [on_redis, in_memory] = &self.limiters;
        let context = format!("{}: {reserve}, {actual} after {wait_ms} ms", demand.limit);
        assert_eq!(on_redis.inspect(&demand).await.unwrap(), in_memory.inspect(&demand).await.unwrap(), "{context}");
    }
}

#[tokio::test]
async fn settle_on_redis_equals_settle_in_memory() {
    let server = Server::redis();
    for algorithm in Algorithm::ALL {
        let limit: Limit = format!("100/s {}", algorithm.as_str()).parse().unwrap();
        let nodes = Nodes::new(&server);
        for (number, (wait_ms, actual)) in
            [(0, 20), (150, 20), (1_100, 20), (3_000, 0), (0, 70), (150, 99), (150, 100_000)].into_iter().enumerate()
        {
            let subject = format!("{} {number}", algorithm.as_str());
            let demand = Demand::new(limit, Key::new(&subject).unwrap());
            nodes.settle_on_each(demand, 50, wait_ms, actual).await;
        }
    }
}

#[tokio::test]
async fn settle_refunds_both_limits_of_a_check_and_clears_cached_denials() {
    let server = Server::redis();
    let nodes = Nodes::new(&server);
    let demand = |limit: &str| Demand::new(limit.parse().unwrap(), Key::new("api-key:7").unwrap()).cost(900);
    let demands = [demand("1000/min"), demand("2000/day token-bucket")];
    let check = Check::new(&demands).unwrap();
    let [limiter, _] = &nodes.limiters;
    let reserved = limiter.check(&check).await.unwrap();
    assert!(!limiter.check(&check).await.unwrap().allowed(), "this denial is cached");
    limiter.settle(&check, &reserved, Cost::new(50)).await.unwrap();
    let again = limiter.check(&check).await.unwrap();
    assert_eq!((again.allowed(), again.limits[0].remaining, again.limits[1].remaining), (true, 50, 1_050));
    limiter.settle(&check, &again, Cost::new(2_000)).await.unwrap();
    for demand in &demands {
        let line = limiter.inspect(demand).await.unwrap();
        assert_eq!(line.remaining, 0, "the actual cost is more than the rest: {line:?}");
    }
}
