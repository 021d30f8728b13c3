//! Settled on a real Redis, an estimate leaves the same counter as in memory: the same calls by the same invented
//! time, compared line by line.

use std::sync::Arc;
use std::time::Duration;

use tollgate::{
    Algorithm, Check, CheckOptions, Cost, Decision, Demand, Key, Limit, Limiter, ManualClock, Source, Timestamp,
};
use tollgate_redis::RedisStore;
use tollgate_testkit::server::Server;

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
/// Nothing here is about time: a busy machine must not turn an answer into a local one.
const PATIENCE: Duration = Duration::from_secs(30);

struct Nodes {
    limiters: [Limiter; 2],
    clock: Arc<ManualClock>,
}

impl Nodes {
    fn new(server: &Server) -> Nodes {
        let clock = Arc::new(ManualClock::new(START));
        let store = RedisStore::builder(server.url()).clock_override(clock.clone()).call_timeout(PATIENCE);
        let store = Arc::new(store.build().unwrap());
        let on_redis = Limiter::builder().store(store).clock(clock.clone()).deadline(PATIENCE).build();
        let in_memory = Limiter::builder().clock(clock.clone()).build();
        Nodes { limiters: [on_redis, in_memory], clock }
    }

    /// Reserves, lets time pass, takes a little more, settles; then tells what is left on each.
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
        let told = format!("{}: {reserve}, {actual} after {wait_ms} ms", demand.limit);
        assert_eq!(on_redis.inspect(&demand).await.unwrap(), in_memory.inspect(&demand).await.unwrap(), "{told}");
    }
}

#[tokio::test]
async fn an_estimate_is_settled_on_redis_as_it_is_in_memory() {
    let server = Server::redis();
    for algorithm in Algorithm::ALL {
        let limit: Limit = format!("100/s {}", algorithm.name()).parse().unwrap();
        let nodes = Nodes::new(&server);
        for (number, (wait_ms, actual)) in
            [(0, 20), (150, 20), (1_100, 20), (3_000, 0), (0, 70), (150, 99), (150, 100_000)].into_iter().enumerate()
        {
            let subject = format!("{} {number}", algorithm.name());
            let demand = Demand::new(limit, Key::new(&subject).unwrap());
            nodes.settle_on_each(demand, 50, wait_ms, actual).await;
        }
    }
}

#[tokio::test]
async fn both_limits_of_a_check_are_settled_and_the_units_are_there_for_the_next() {
    let server = Server::redis();
    let nodes = Nodes::new(&server);
    let demand = |limit: &str| Demand::new(limit.parse().unwrap(), Key::new("api-key:7").unwrap()).cost(900);
    let demands = [demand("1000/min"), demand("2000/day token-bucket")];
    let check = Check::new(&demands).unwrap();
    let [limiter, _] = &nodes.limiters;
    let reserved = limiter.check(&check).await.unwrap();
    assert!(!limiter.check(&check).await.unwrap().allowed(), "and this denial is remembered");
    limiter.settle(&check, &reserved, Cost::new(50)).await.unwrap();
    let again = limiter.check(&check).await.unwrap();
    assert_eq!((again.allowed(), again.limits[0].remaining, again.limits[1].remaining), (true, 50, 1_050));
    limiter.settle(&check, &again, Cost::new(2_000)).await.unwrap();
    for demand in &demands {
        let line = limiter.inspect(demand).await.unwrap();
        assert_eq!(line.remaining, 0, "what was really used is more than there was: {line:?}");
    }
}
