//! The instances that share a store: one bounded set, pruned by the server's time.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::{Check, Demand, InstanceId, Key, LiveInstances, ManualClock, Store, StoreErrorKind, Timestamp};
use tidegate_redis::{RedisStore, RedisStoreBuilder};
use tidegate_testkit::server::{Brand, Cluster, Server};

const PATIENCE: Duration = Duration::from_secs(10);
const LIFETIME: Duration = Duration::from_secs(7);
const KEY: &str = "tidegate:tg2:instances";

fn builder(server: &Server) -> RedisStoreBuilder {
    RedisStore::builder(server.url()).call_timeout(PATIENCE)
}

async fn announce(store: &RedisStore, id: u64) -> LiveInstances {
    store.announce(InstanceId::new(id), LIFETIME).await.unwrap().unwrap()
}

fn live(count: u32, was_live: bool) -> LiveInstances {
    LiveInstances::new(count, was_live)
}

/// Announces instances at times of a manual clock.
async fn assert_counted(store: &RedisStore, clock: &ManualClock) {
    assert_eq!(announce(store, 1).await, live(1, false));
    assert_eq!(announce(store, 1).await, live(1, true));
    assert_eq!(announce(store, 2).await, live(2, false));
    clock.advance(LIFETIME - Duration::from_millis(1));
    assert_eq!(announce(store, 2).await, live(2, true), "the other one is live for another millisecond");
    clock.advance(Duration::from_millis(1));
    assert_eq!(announce(store, 2).await, live(1, true), "the other one has not announced itself for its lifetime");
    assert_eq!(announce(store, 1).await, live(2, false));
    store.withdraw(InstanceId::new(2)).await.unwrap();
    store.withdraw(InstanceId::new(9)).await.unwrap();
    assert_eq!(announce(store, 1).await, live(1, true));

    // A clock that is set back neither drops instances nor keeps those that have ended.
    assert_eq!(announce(store, 3).await, live(2, false));
    clock.set(Timestamp::from_micros(1_760_000_000_000_000 - 3_600_000_000));
    assert_eq!(announce(store, 1).await, live(2, true));
    clock.advance(LIFETIME);
    assert_eq!(announce(store, 1).await, live(1, false), "both have expired");
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(Timestamp::from_micros(1_760_000_000_000_000)))
}

#[tokio::test]
async fn instances_are_live_for_their_lifetime() {
    for brand in Brand::ALL {
        let (server, clock) = (tidegate_testkit::server::Config::new(brand).start(), clock());
        assert_counted(&builder(&server).clock_override(clock.clone()).build().unwrap(), &clock).await;
        let cluster = Cluster::shared(brand);
        for across_slots in [false, true] {
            let prefix = format!("instances-{across_slots}");
            let store = RedisStore::builder(cluster.url()).prefix(prefix).call_timeout(PATIENCE);
            let clock = self::clock();
            let store = store.calls_across_slots(across_slots).clock_override(clock.clone()).build().unwrap();
            assert_counted(&store, &clock).await;
        }
    }
}

#[tokio::test]
async fn set_expires_with_its_newest_announcement_by_the_clock_of_the_server() {
    let server = Server::redis();
    let (store, other) = (builder(&server).build().unwrap(), builder(&server).prefix("other").build().unwrap());
    assert_eq!(announce(&store, 1).await, live(1, false));
    assert_eq!(announce(&other, 2).await, live(1, false), "another prefix has instances of its own");
    assert!((1..=7_000).contains(&server.command(&["PTTL", KEY]).integer()));
    let score: f64 = server.command(&["ZSCORE", KEY, "0000000000000001"]).text().parse().unwrap();
    let seconds: f64 = server.command(&["TIME"]).items()[0].text().parse().unwrap();
    assert!((seconds - score / 1_000.0).abs() < 60.0, "{score}");
    let calls = store.stats().calls;
    announce(&store, 1).await;
    assert_eq!(store.stats().calls, calls + 1, "an announcement is one call");
}

#[tokio::test]
async fn full_set_takes_no_further_instance() {
    let (server, clock) = (Server::redis(), clock());
    let store = builder(&server).clock_override(clock.clone()).build().unwrap();
    for id in 1..=1_000 {
        assert_eq!(announce(&store, id).await.count, id as u32);
    }
    for id in 1_001..1_010 {
        assert_eq!(announce(&store, id).await, live(1_000, false));
    }
    assert_eq!(server.command(&["ZCARD", KEY]).integer(), 1_000);
    assert_eq!(announce(&store, 1).await, live(1_000, true));
    // Also the longest call is short: all scores are in the future.
    clock.set(Timestamp::from_micros(1_000_000_000_000));
    assert_eq!(announce(&store, 1).await, live(1_000, true));
    clock.advance(LIFETIME);
    assert_eq!(announce(&store, 5_000).await, live(1, false));
}

#[tokio::test]
async fn other_data_under_the_key_is_an_error_and_keeps_the_connection() {
    let server = Server::redis();
    let store = builder(&server).build().unwrap();
    server.command(&["SET", KEY, "x"]);
    let error = store.announce(InstanceId::new(1), LIFETIME).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Foreign, "{error}");
    let demand = Demand::new("5/h".parse().unwrap(), Key::new("k").unwrap());
    assert!(store.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());
    assert_eq!(store.stats().connects, 1);
    assert_eq!(server.command(&["GET", KEY]).text(), "x");
}

#[tokio::test]
async fn server_without_memory_refuses_a_new_instance_and_prunes_nothing() {
    let server = Server::redis();
    let store = builder(&server).build().unwrap();
    announce(&store, 1).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = store.announce(InstanceId::new(2), LIFETIME).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert_eq!(server.command(&["ZCARD", KEY]).integer(), 1);
}
