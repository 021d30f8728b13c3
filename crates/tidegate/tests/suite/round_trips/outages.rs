//! A server that hangs or cannot be reached: how long decisions take, and how soon a healed server is used again.
//!
//! The contract is a time: the deadline while the breaker is closed, none once it is open, and two seconds after the
//! server has healed. In virtual time these are exact, and an outage of ten minutes takes no time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::config::{Config, Format};
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::rules::RequestView;
use tidegate::{Check, Demand, Key, Limit, Limiter, Source};
use tidegate_redis::RedisStore;
use tidegate_testkit::fault::Fault;
use tidegate_testkit::simulated::{SimulatedRedis, VirtualClock};
use tokio::time::{Instant, sleep};

use super::ms;

const DEADLINE: Duration = Duration::from_millis(25);

/// What happens to the server or to the network in front of it.
#[derive(Clone, Copy, Debug)]
enum Outage {
    /// Open connections stay open, new ones are accepted, and no reply arrives until the outage ends.
    Hangs,
    /// Open connections stay open, new ones are accepted, and all bytes are lost.
    LosesEverything,
    /// Open connections are closed, new ones are refused.
    Refuses,
    /// Open connections are closed, and new ones are never established.
    NeverConnects,
}

const OUTAGES: [Outage; 4] = [Outage::Hangs, Outage::LosesEverything, Outage::Refuses, Outage::NeverConnects];

/// A limiter on a simulated server.
struct Node {
    server: SimulatedRedis,
    outage: Arc<Mutex<Option<Outage>>>,
    store: RedisStore,
    limiter: Limiter,
}

impl Node {
    /// Creates a node and waits until its store is connected.
    async fn connected() -> Node {
        let clock = VirtualClock::start();
        let server = SimulatedRedis::new(clock.clone());
        let outage = Arc::<Mutex<Option<Outage>>>::default();
        let (dial, current) = (server.clone(), outage.clone());
        let connector = move |_: &str, _| {
            let (dial, outage) = (dial.clone(), *current.lock().unwrap());
            async move {
                match outage {
                    Some(Outage::Refuses) => Err(std::io::ErrorKind::ConnectionRefused.into()),
                    Some(Outage::NeverConnects) => std::future::pending().await,
                    Some(Outage::Hangs | Outage::LosesEverything) | None => Ok(dial.connect()),
                }
            }
        };
        let store = RedisStore::builder("redis://simulated").connector(connector).build().unwrap();
        store.command(&["PING"]).await.unwrap();
        let limiter =
            Limiter::builder().store(Arc::new(store.clone())).clock(clock).deadline(DEADLINE).announce(false).build();
        Node { server, outage, store, limiter }
    }

    fn begin(&self, outage: Outage) {
        *self.outage.lock().unwrap() = Some(outage);
        self.server.set(match outage {
            Outage::Hangs => Fault::Hold,
            Outage::LosesEverything => Fault::Blackhole,
            Outage::Refuses | Outage::NeverConnects => Fault::Cut,
        });
    }

    fn heal(&self) {
        *self.outage.lock().unwrap() = None;
        self.server.set(Fault::Pass);
    }

    /// Makes one decision. Returns its source and how long it took.
    async fn check(&self) -> (Source, Duration) {
        let limit: Limit = "1000000/h".parse().unwrap();
        let demand = Demand::new(limit, Key::new("client").unwrap());
        let begun = Instant::now();
        let decision = self.limiter.check(&Check::one(&demand)).await.unwrap();
        (decision.source, begun.elapsed())
    }

    /// Makes decisions until the breaker is open. Returns how long each took.
    async fn open_breaker(&self) -> Vec<Duration> {
        let mut times = Vec::new();
        while !self.limiter.stats().breaker_open {
            let (source, time) = self.check().await;
            assert_eq!(source, Source::Local);
            times.push(time);
        }
        times
    }
}

/// An enforced rule and a shadow rule are checked by two calls, one after the other.
#[tokio::test(start_paused = true)]
async fn request_with_a_shadow_rule_is_decided_within_one_deadline() {
    let node = Node::connected().await;
    let rules = "[[rules]]\nname = 'own'\nby = ['ip']\nlimits = ['1000/h']\n\
                 [[rules]]\nname = 'trial'\nby = ['ip']\nlimits = ['10/h']\nmode = 'shadow'\n";
    let rules = Config::from_text(rules, Format::Toml).unwrap().rules;
    let engine = Engine::new(node.limiter.clone(), rules);
    node.begin(Outage::Hangs);
    let (request, begun) = (http::Request::get("/").body(()).unwrap(), Instant::now());
    let outcome = engine.check(&RequestView::of(&request), [203, 0, 113, 9].into(), RequestOptions::default()).await;
    assert_eq!(begun.elapsed(), DEADLINE);
    let Outcome::Admitted(permit) = outcome else { panic!("{outcome:?}") };
    assert_eq!(permit.decision().unwrap().source, Source::Local);
}

#[tokio::test(start_paused = true)]
async fn no_decision_outlasts_its_deadline_while_the_server_hangs() {
    for outage in OUTAGES {
        let node = Node::connected().await;
        assert_eq!(node.check().await, (Source::Store, Duration::ZERO));
        node.begin(outage);
        let times = node.open_breaker().await;
        assert_eq!(times.len(), 3, "{outage:?}: {times:?}");
        assert!(times.iter().all(|time| *time <= DEADLINE), "{outage:?}: {times:?}");
        if matches!(outage, Outage::Hangs | Outage::LosesEverything) {
            assert_eq!(times[0], DEADLINE, "{outage:?}: the reply is waited for");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn decisions_with_an_open_breaker_do_not_wait_while_probes_fail() {
    for outage in OUTAGES {
        let node = Node::connected().await;
        node.begin(outage);
        node.open_breaker().await;
        let (before, failures) = (node.store.stats(), node.limiter.stats().store_failures);
        for _ in 0..2_000 {
            assert_eq!(node.check().await, (Source::Local, Duration::ZERO), "{outage:?}");
            sleep(ms(5.0)).await;
        }
        let connects = node.store.stats().connects - before.connects;
        assert!(connects > 10, "{outage:?}: {connects} attempts to connect in ten seconds");
        assert_eq!(node.limiter.stats().store_failures, failures, "{outage:?}: no decision called the store");
        assert!(node.limiter.stats().breaker_open, "{outage:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_healed_server_is_used_within_two_seconds_of_an_outage_of_any_length() {
    for outage in OUTAGES {
        for outage_s in [1, 30, 600] {
            let node = Node::connected().await;
            node.begin(outage);
            node.open_breaker().await;
            sleep(Duration::from_secs(outage_s)).await;
            node.heal();
            let healed = Instant::now();
            while node.check().await.0 != Source::Store {
                sleep(ms(1.0)).await;
            }
            assert!(healed.elapsed() <= Duration::from_secs(2), "{outage:?} of {outage_s} s: {:?}", healed.elapsed());
        }
    }
}
