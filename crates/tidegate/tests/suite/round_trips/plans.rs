//! Plans from a Redis hash that is some milliseconds away: a caller is held to its own plan, by the store, within the
//! deadline.

use std::net::IpAddr;
use std::time::Duration;

use tidegate::Source;
use tidegate::config::{Config, Format};
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::rules::{KeyHash, Lookups, PlanHash, RequestView};
use tidegate_testkit::fault::Fault;
use tidegate_testkit::simulated::{SimulatedRedis, VirtualClock};
use tokio::time::{Instant, sleep};

use super::{connected, ms};

const DEADLINE_MS: f64 = 25.0;
/// The simulated server answers `OK` to HGET, so this is the plan of every caller.
const CONFIG: &str = r#"
store = "redis://simulated"
instances = 1
api_keys = "any"
deadline = "25ms"

[plans]
default = { limits = ["10/h"] }
OK = { limits = ["1000/h"] }

[plan_sources]
redis_hash = "tidegate:plans"

[[rules]]
name = "api"
limits = "plan"
"#;
const QUOTA: u32 = 1_000;

struct Setup {
    server: SimulatedRedis,
    engine: Engine,
}

impl Setup {
    /// Sets up the engine of the configuration.
    async fn configured() -> Setup {
        Setup::of(CONFIG).await
    }

    /// Sets up the engine of this configuration.
    async fn of(config: &str) -> Setup {
        let clock = VirtualClock::start();
        let server = SimulatedRedis::new(clock.clone());
        let store = connected(&server, |builder| builder).await;
        let loaded = Config::from_text(config, Format::Toml).unwrap();
        let (limiter, lookups) = loaded.settings.limiter_on(Some(store));
        let engine = Engine::with_lookups(limiter.clock(clock).announce(false).build(), loaded.rules, lookups);
        Setup { server, engine }
    }

    /// Sets up the engine of the configuration with cached plans that expire in virtual time.
    async fn in_virtual_time() -> Setup {
        let clock = VirtualClock::start();
        let server = SimulatedRedis::new(clock.clone());
        let store = connected(&server, |builder| builder).await;
        let loaded = Config::from_text(CONFIG, Format::Toml).unwrap();
        let (limiter, _) = loaded.settings.limiter_on(Some(store.clone()));
        let lookups = Lookups::new().plan(PlanHash::new(store, "tidegate:plans")).clock(clock.clone());
        let engine = Engine::with_lookups(limiter.clock(clock).announce(false).build(), loaded.rules, lookups);
        Setup { server, engine }
    }

    /// Returns the quota and the source of a decision for the caller with this key, and the time that it took.
    async fn decide(&self, key: &str) -> (u32, Source, Duration) {
        let request = http::Request::get("/").header("x-api-key", key).body(()).unwrap();
        let peer: IpAddr = [203, 0, 113, 9].into();
        let begun = Instant::now();
        match self.engine.check(&RequestView::of(&request), peer, RequestOptions::default()).await {
            Outcome::Admitted(permit) => {
                let decision = permit.decision().unwrap();
                (decision.limits[0].quota, decision.source, begun.elapsed())
            }
            refused => panic!("{refused:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn new_caller_is_held_to_its_plan_by_the_store_while_two_round_trips_fit_into_the_deadline() {
    for round_trip_ms in [0.0, 1.0, 5.0, 6.0, 8.0, 10.0] {
        let setup = Setup::configured().await;
        setup.server.set_round_trip(ms(round_trip_ms));
        for caller in 0..50 {
            let (quota, source, took) = setup.decide(&format!("key-{caller}")).await;
            assert_eq!((quota, source), (QUOTA, Source::Store), "{round_trip_ms} ms, caller {caller}");
            assert!(took <= ms(DEADLINE_MS), "{round_trip_ms} ms: {took:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn new_caller_has_its_plan_and_the_deadline_holds_while_one_round_trip_fits_into_it() {
    for round_trip_ms in [13.0, 17.0] {
        let setup = Setup::configured().await;
        setup.server.set_round_trip(ms(round_trip_ms));
        for caller in 0..50 {
            let key = format!("key-{caller}");
            let (quota, source, took) = setup.decide(&key).await;
            assert_eq!((quota, source), (QUOTA, Source::Local), "{round_trip_ms} ms, caller {caller}");
            assert!(took <= ms(DEADLINE_MS + 1.0), "{round_trip_ms} ms: {took:?}");
            // The check had only a part of the deadline, so its timeout does not open the circuit breaker.
            let (quota, source, took) = setup.decide(&key).await;
            assert_eq!((quota, source), (QUOTA, Source::Store), "{round_trip_ms} ms, caller {caller}");
            assert!(took <= ms(DEADLINE_MS), "{round_trip_ms} ms: {took:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn server_that_hangs_opens_the_breaker_after_three_waiting_requests() {
    for (lookups, sources) in [
        ("plans", "[plan_sources]\nredis_hash = 'tidegate:plans'\n"),
        ("keys", "[key_sources]\nredis_hash = 'tidegate:keys'\n"),
        (
            "keys and plans",
            "[key_sources]\nredis_hash = 'tidegate:keys'\n[plan_sources]\nredis_hash = 'tidegate:plans'\n",
        ),
    ] {
        // A request every 30 ms, and one every second: then the connection has been dropped, and another one is opened.
        for pause in [ms(5.0), ms(1_000.0)] {
            for fault in [Fault::Hold, Fault::Blackhole] {
                let setup =
                    Setup::of(&CONFIG.replace("[plan_sources]\nredis_hash = \"tidegate:plans\"\n", sources)).await;
                assert_eq!(setup.decide("first").await.1, Source::Store);
                setup.server.set(fault);
                for number in 0..3 {
                    assert!(!setup.engine.limiter().stats().breaker_open, "{lookups}: before request {number}");
                    let (_, source, took) = setup.decide(&format!("key-{number}")).await;
                    assert_eq!(source, Source::Local);
                    assert!(took <= ms(DEADLINE_MS + 1.0), "{lookups}: {took:?}");
                    sleep(pause).await;
                }
                assert!(
                    setup.engine.limiter().stats().breaker_open,
                    "{lookups}, {pause:?} between requests, {fault:?}"
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn active_caller_never_waits_for_its_plan() {
    let setup = Setup::in_virtual_time().await;
    setup.server.set_round_trip(ms(17.0));
    setup.decide("key").await;
    // Ten seconds of requests: the cached plan would expire ten times.
    for number in 0..30 {
        sleep(ms(330.0)).await;
        let (quota, source, took) = setup.decide("key").await;
        assert_eq!((quota, source), (QUOTA, Source::Store), "request {number}");
        assert!(took <= ms(19.0), "request {number}: {took:?} is more than one round trip");
    }
}

#[tokio::test(start_paused = true)]
async fn reply_that_comes_after_the_timeout_is_cached() {
    let setup = Setup::in_virtual_time().await;
    setup.server.set_round_trip(ms(60.0));
    let (quota, source, took) = setup.decide("key").await;
    assert_eq!((quota, source), (10, Source::Local), "no plan is known in time");
    assert!(took <= ms(DEADLINE_MS + 1.0), "{took:?}");
    sleep(ms(100.0)).await;
    setup.server.set_round_trip(ms(1.0));
    let (quota, source, _) = setup.decide("key").await;
    assert_eq!((quota, source), (QUOTA, Source::Store));
}

/// The simulated server answers `OK` to the key lookup too: a known key without a plan, whose plan is then looked up.
#[tokio::test(start_paused = true)]
async fn cached_caller_keeps_its_plan_while_both_hashes_hang() {
    let clock = VirtualClock::start();
    let server = SimulatedRedis::new(clock.clone());
    let store = connected(&server, |builder| builder).await;
    let text = CONFIG.replace("api_keys = \"any\"\n", "");
    let loaded = Config::from_text(&text, Format::Toml).unwrap();
    let (limiter, _) = loaded.settings.limiter_on(Some(store.clone()));
    let lookups = Lookups::new().key(KeyHash::new(store.clone(), "tidegate:keys"));
    let lookups = lookups.plan(PlanHash::new(store, "tidegate:plans")).clock(clock.clone());
    let engine = Engine::with_lookups(limiter.clock(clock).build(), loaded.rules, lookups);
    let setup = Setup { server, engine };
    assert_eq!(setup.decide("key-1").await.0, QUOTA);
    assert_eq!(setup.decide("key-2").await.0, QUOTA);
    sleep(ms(2_000.0)).await;
    setup.server.set(Fault::Hold);
    let begun = Instant::now();
    while begun.elapsed() < ms(6_000.0) {
        for key in ["key-1", "key-2"] {
            let (quota, _, took) = setup.decide(key).await;
            assert_eq!(quota, QUOTA, "{key} after {:?}", begun.elapsed());
            assert!(took <= ms(DEADLINE_MS + 1.0), "{took:?}");
        }
        sleep(ms(7.0)).await;
    }
    setup.server.set(Fault::Pass);
    sleep(ms(3_000.0)).await;
    assert_eq!(setup.decide("key-1").await.0, QUOTA);
}
