//! The store's clock steps by an hour, back or forward.

use std::sync::Arc;
use std::time::Duration;

use tidegate::{Check, Clock, Decision, Demand, Key, Limit, Limiter, ManualClock, Source, Timestamp};
use tidegate_redis::RedisStore;
use tidegate_testkit::server::Server;

const HOUR_US: u64 = 3_600_000_000;
const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);

struct Clocks {
    limiter: Limiter,
    store: Arc<ManualClock>,
    node: Arc<ManualClock>,
}

impl Clocks {
    fn new(server: &Server) -> Clocks {
        let (store_clock, node) = (Arc::new(ManualClock::new(START)), Arc::new(ManualClock::new(START)));
        let timeout = Duration::from_secs(30);
        let store = RedisStore::builder(server.url()).clock_override(store_clock.clone()).call_timeout(timeout);
        let store = Arc::new(store.build().unwrap());
        let limiter = Limiter::builder().store(store).clock(node.clone()).deadline(timeout).build();
        Clocks { limiter, store: store_clock, node }
    }

    async fn check(&self, limit: Limit, subject: &str) -> Decision {
        let demand = Demand::new(limit, Key::new(subject).unwrap());
        let decision = self.limiter.check(&Check::one(&demand)).await.unwrap();
        assert!(matches!(decision.source, Source::Store | Source::DenyCache));
        decision
    }

    /// Advances both clocks.
    fn advance(&self, us: u64) {
        self.store.advance(Duration::from_micros(us));
        self.node.advance(Duration::from_micros(us));
    }
}

#[tokio::test]
async fn clock_step_of_an_hour_locks_no_key_longer_than_its_window() {
    let server = Server::redis();
    for way in ["back", "forward"] {
        for text in ["5/10s", "5/10s sliding-log", "3000/10s", "5/10s fixed-window", "5/10s token-bucket"] {
            let clocks = Clocks::new(&server);
            let limit: Limit = text.parse().unwrap();
            let subject = format!("{way} {text}");
            for _ in 0..limit.quota() {
                assert!(clocks.check(limit, &subject).await.allowed());
            }
            assert!(!clocks.check(limit, &subject).await.allowed());
            let now = clocks.store.now();
            clocks.store.set(if way == "back" { now.minus_micros(HOUR_US) } else { now.plus_micros(HOUR_US) });
            // A cached denial expires within a second, whatever the store's clock does.
            clocks.advance(1_000_000);
            let decision = clocks.check(limit, &subject).await;
            let wait_us = decision.retry_after().as_micros().unwrap();
            assert!(wait_us <= limit.window_us(), "{way}, {text}: {wait_us} µs");
            if !decision.allowed() {
                clocks.advance(wait_us);
                assert!(clocks.check(limit, &subject).await.allowed(), "{way}, {text}: after its retry_after");
            }
        }
    }
}

#[tokio::test]
async fn clock_step_back_admits_no_second_quota_within_the_window() {
    let server = Server::redis();
    for text in ["5/10s", "5/10s sliding-log", "3000/10s"] {
        let clocks = Clocks::new(&server);
        let limit: Limit = text.parse().unwrap();
        let mut admitted = 0;
        for n in 0..limit.quota() * 2 {
            if n == limit.quota() / 2 || n == limit.quota() {
                clocks.store.set(clocks.store.now().minus_micros(HOUR_US));
                clocks.advance(1_000_000);
            }
            admitted += u32::from(clocks.check(limit, text).await.allowed());
        }
        assert_eq!(admitted, limit.quota(), "{text}");
    }
}
