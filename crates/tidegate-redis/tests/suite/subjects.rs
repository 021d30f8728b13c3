//! A server that requires the keys of a call to share a hash slot: one node of a cluster that has all slots.

use std::time::Duration;

use futures_util::future::join_all;
use tidegate_core::{Atomicity, Check, Decision, Demand, Key, Limit, Store, StoreErrorKind as Kind};
use tidegate_redis::{RedisStore, ServerCheckError};
use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::{Brand, Config, Server};

pub(crate) fn node_with_all_slots(brand: Brand) -> Server {
    let server = Config::new(brand).set("cluster-enabled", "yes").start();
    server.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let info = || server.command(&["CLUSTER", "INFO"]).text();
    eventually("the node serves all slots", info, |info| info.contains("cluster_state:ok"));
    server
}

pub(crate) fn store_on(server: &Server, one_subject_per_call: bool) -> RedisStore {
    let builder = RedisStore::builder(server.url()).call_timeout(Duration::from_secs(10));
    builder.one_subject_per_call(one_subject_per_call).build().unwrap()
}

fn subjects(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("user:{number}")).collect()
}

#[tokio::test]
async fn batch_becomes_one_call_per_subject_and_every_check_is_decided_in_order() {
    for brand in Brand::ALL {
        let server = node_with_all_slots(brand);
        let store = store_on(&server, true);
        assert_eq!(store.atomicity(), Atomicity::Subject);
        store.command(&["PING"]).await.unwrap();
        let limit: Limit = "100/h".parse().unwrap();
        let subjects = subjects(20);
        let demands: Vec<Demand<'_>> =
            subjects.iter().map(|subject| Demand::new(limit, Key::new(subject.as_str()).unwrap())).collect();

        // Many callers at once: their checks are one batch of 20 calls, each of which holds three checks.
        let before = store.stats();
        let one = |demand| {
            let store = &store;
            async move { store.decide(&[Check::one(demand)]).await.unwrap().remove(0) }
        };
        let decided: Vec<Decision> = join_all(demands.iter().chain(&demands).chain(&demands).map(one)).await;
        let remaining: Vec<u32> = decided.iter().map(|decision| decision.limits[0].remaining).collect();
        let expected: Vec<u32> = [99, 98, 97].into_iter().flat_map(|left| [left; 20]).collect();
        assert_eq!(remaining, expected, "{brand}");
        let after = store.stats();
        assert_eq!((after.calls - before.calls) % 20, 0, "a call for each subject: {after:?}");
        assert_eq!(after.decisions - before.decisions, 60);

        // One caller with many checks.
        let checks: Vec<Check<'_>> = demands.iter().chain(&demands).map(Check::one).collect();
        let decided = store.decide(&checks).await.unwrap();
        let remaining: Vec<u32> = decided.iter().map(|decision| decision.limits[0].remaining).collect();
        assert_eq!(remaining, [[96; 20], [95; 20]].concat(), "{brand}");

        // Refunds of several subjects.
        join_all(checks.iter().zip(&decided).map(|(check, decision)| store.refund(check, decision)))
            .await
            .into_iter()
            .for_each(Result::unwrap);
        for demand in &demands {
            assert_eq!(store.inspect(demand).await.unwrap().remaining, 97, "{brand}");
        }
        assert_eq!(store.stats().connects, 1);
    }
}

#[tokio::test]
async fn check_of_several_subjects_is_rejected_and_the_others_of_its_batch_are_decided() {
    let server = node_with_all_slots(Brand::Redis);
    let store = store_on(&server, true);
    let limit: Limit = "100/h".parse().unwrap();
    let [ann, bob] = ["ann", "bob"].map(|subject| Demand::new(limit, Key::new(subject).unwrap()));
    let both = [ann, bob];
    let checks = [Check::one(&ann), Check::new(&both).unwrap(), Check::one(&bob)];
    let decided = store.decide_each(&checks).await.unwrap();
    let outcomes: Vec<Result<u32, Kind>> = decided
        .into_iter()
        .map(|decided| decided.map(|decision| decision.limits[0].remaining).map_err(|error| error.kind()))
        .collect();
    assert_eq!(outcomes, [Ok(99), Err(Kind::Forbidden), Ok(99)]);
}

/// A node of a cluster holds only some keys, and rejects calls on keys of several slots. Most keys would silently be
/// decided without it, so the store refuses it as a whole, also for databases other than 0, which a node rejects.
#[tokio::test]
async fn without_the_option_a_node_of_a_cluster_is_refused_by_its_address() {
    for brand in Brand::ALL {
        let server = node_with_all_slots(brand);
        for url in [server.url(), format!("{}/3", server.url())] {
            let store = RedisStore::builder(&url).call_timeout(Duration::from_secs(10)).build().unwrap();
            assert_eq!(store.atomicity(), Atomicity::Check);
            let demand = Demand::new("100/h".parse().unwrap(), Key::new("ann").unwrap());
            let error = store.decide(&[Check::one(&demand)]).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported, "{error}");
            assert!(error.is_unexecuted() && !error.is_transient());
            let message = error.to_string();
            assert!(message.starts_with(&format!("store {url}: the server is a node of a Redis Cluster")), "{message}");
            assert!(message.contains("cluster_enabled:1") && message.contains("`cluster-enabled no`"), "{message}");
            assert!(
                matches!(store.check_server().await, Err(ServerCheckError::Store(error)) if error.kind() == Kind::Unsupported)
            );
        }
    }
}

/// A user who may run the script and nothing else can use a server, although its mode is then unknown.
#[tokio::test]
async fn user_who_may_not_ask_for_the_mode_can_use_a_server() {
    let user = "ann on >pw resetkeys ~tidegate:* resetchannels -@all +evalsha +script|load +time +get +set";
    let server = Config::new(Brand::Redis).set("user", user).start();
    let url = server.url().replace("redis://", "redis://ann:pw@");
    let store = RedisStore::builder(url).call_timeout(Duration::from_secs(10)).build().unwrap();
    let demand = Demand::new("100/h token-bucket".parse().unwrap(), Key::new("ann").unwrap());
    assert_eq!(store.decide(&[Check::one(&demand)]).await.unwrap()[0].limits[0].remaining, 99);
}
