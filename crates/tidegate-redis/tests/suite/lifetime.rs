//! The lifetime of a key that several limits use. Only the server's clock shows it: with a given time, every key lives
//! for minutes.

use tidegate_core::{Check, Cost, Demand, Key, Limit, Scope, Store};
use tidegate_redis::RedisStore;
use tidegate_testkit::server::{Brand, Config, Server};

/// Creates a demand on a rule's counter, which is the same for all limits: two versions of a rule may be in use at
/// once.
fn in_rule(limit: &str, cost: u32) -> Demand<'static> {
    let key = Key::scoped("k", Scope::rule("rule", "limit")).unwrap();
    Demand::new(limit.parse().unwrap(), key).cost(Cost::new(cost))
}

/// Returns the time at which the only key expires, by the server's clock.
fn ends_us(server: &Server) -> u64 {
    let keys = server.command(&["KEYS", "*"]);
    assert_eq!(keys.items().len(), 1);
    u64::try_from(1_000 * server.command(&["PEXPIRETIME", &keys.items()[0].text()]).integer()).unwrap()
}

async fn allows(store: &RedisStore, demand: &Demand<'_>) -> bool {
    store.decide(&[Check::one(demand)]).await.unwrap()[0].allowed()
}

#[tokio::test]
async fn denial_under_a_faster_limit_does_not_shorten_the_ttl() {
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        let store = RedisStore::builder(server.url()).call_timeout(std::time::Duration::from_secs(10)).build().unwrap();
        for (slow, quick, costs) in [
            ("10/h", "10/s", &[10][..]),
            ("4/h", "4/s", &[1, 1, 1, 1]),
            ("2000/h", "2000/s", &[1999, 1]),
            ("10/min token-bucket", "600/min token-bucket burst=10", &[10]),
            ("10/min token-bucket", "10/s token-bucket", &[10]),
        ] {
            server.command(&["FLUSHALL"]);
            for &cost in costs {
                assert!(allows(&store, &in_rule(slow, cost)).await);
            }
            let before_us = ends_us(&server);
            let all = slow.parse::<Limit>().unwrap().quota();
            assert!(!allows(&store, &in_rule(quick, all)).await, "{quick}");
            assert!(ends_us(&server) >= before_us, "{brand}: {slow} after {quick}");
        }
    }
}

#[tokio::test]
async fn denial_under_a_slower_limit_extends_the_ttl_to_its_reset_after() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(std::time::Duration::from_secs(10)).build().unwrap();
    for (quick, slow) in [
        ("10/s", "10/h"),
        ("600/min token-bucket burst=10", "10/min token-bucket"),
        ("10/s token-bucket", "10/min token-bucket"),
    ] {
        let [quick, slow] = [quick, slow].map(|limit| in_rule(limit, 10));
        let checks = [Check::one(&quick), Check::one(&quick), Check::one(&slow), Check::one(&quick)];
        // In one call, and each alone.
        for together in [checks.len(), 1] {
            server.command(&["FLUSHALL"]);
            let mut decisions = Vec::new();
            for checks in checks.chunks(together) {
                decisions.extend(store.decide(checks).await.unwrap());
            }
            let allowed: Vec<bool> = decisions.iter().map(|decision| decision.allowed()).collect();
            assert_eq!(allowed, [true, false, false, false], "{}", quick.limit);
            let told_us = decisions[2].at.as_micros() + decisions[2].limits[0].reset_after.as_micros().unwrap();
            assert!(ends_us(&server) >= told_us, "{} after {}, {together} in a call", slow.limit, quick.limit);
        }
    }
}

/// The count of a fixed window is the previous count of the sliding counter that a rule changes to.
#[tokio::test]
async fn count_of_a_fixed_window_lives_on_for_a_sliding_counter() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(std::time::Duration::from_secs(10)).build().unwrap();
    let fixed = in_rule("10/h fixed-window", 10);
    let decision = store.decide(&[Check::one(&fixed)]).await.unwrap().remove(0);
    assert!(decision.allowed());
    let cut_us = decision.at.as_micros() + decision.limits[0].reset_after.as_micros().unwrap();
    assert!(ends_us(&server) >= cut_us + fixed.limit.window_us());
}
