//! Both doors, open on free ports, before a limiter whose clock stands still until it is moved.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tollgate::{Check, CheckOptions, Cost, Decision, Demand, Key, Limiter, ManualClock, OnFailure, Timestamp};
use tollgate_redis::RedisStore;
use tollgate_server::{BoundListeners, Listeners, run};
use tollgate_testkit::conformance::{Abilities, Subject};
use tollgate_testkit::server::Server;

/// A machine may be busy, and no answer here may come from anywhere but the store.
const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) struct BehindDoors {
    pub(crate) limiter: Limiter,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) http: SocketAddr,
    pub(crate) resp: SocketAddr,
    runtime: Runtime,
    redis: Option<Server>,
}

impl BehindDoors {
    pub(crate) fn in_memory() -> BehindDoors {
        BehindDoors::open(None)
    }

    pub(crate) fn on_redis() -> BehindDoors {
        BehindDoors::open(Some(Server::redis()))
    }

    fn open(redis: Option<Server>) -> BehindDoors {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let context = runtime.enter();
        let clock = Arc::new(ManualClock::default());
        let mut limiter = Limiter::builder().clock(clock.clone()).deadline(DEADLINE).on_failure(OnFailure::Deny);
        if let Some(redis) = &redis {
            let store = RedisStore::builder(redis.url()).clock_override(clock.clone()).build().unwrap();
            // A remembered denial repeats the store's last word, which is not what an oracle would say a moment later.
            limiter = limiter.store(Arc::new(store)).deny_cache(false);
        }
        let limiter = limiter.build();
        let (http, resp) = (listener(), listener());
        let addresses = (http.local_addr().unwrap(), resp.local_addr().unwrap());
        let listeners = Listeners {
            http: Some(tokio::net::TcpListener::from_std(http).unwrap()),
            resp: Some(tokio::net::TcpListener::from_std(resp).unwrap()),
            ..Listeners::default()
        };
        runtime.spawn(run(listeners, BoundListeners::new(limiter.clone()), std::future::pending()));
        drop(context);
        BehindDoors { limiter, clock, http: addresses.0, resp: addresses.1, runtime, redis }
    }

    pub(crate) fn is_in_memory(&self) -> bool {
        self.redis.is_none()
    }

    pub(crate) fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    pub(crate) fn reset(&self, now: Timestamp, demand: &Demand<'_>) {
        self.clock.set(now);
        self.wait(self.limiter.reset(demand)).expect("a reset");
    }

    /// One unit at each instant, asked of the limiter itself: the counter behind the doors is the same.
    pub(crate) fn fill(&self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        let demand = demand.cost(Cost::ONE);
        for now in instants {
            self.clock.set(now);
            let decision = self.wait(self.limiter.check(&Check::one(&demand))).expect("a decision");
            assert!(decision.allowed(), "filling up at {now:?}: {decision:?}");
        }
    }
}

fn listener() -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    listener
}

/// Names of subjects that no other run has used, so that one store serves all runs.
#[derive(Clone)]
pub(crate) struct Names(String);

impl Names {
    pub(crate) fn unused() -> Names {
        static RUNS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        Names(format!("run {} of ", RUNS.fetch_add(1, std::sync::atomic::Ordering::Relaxed)))
    }

    /// The subject's name in this run.
    pub(crate) fn name(&self, demand: &Demand<'_>) -> String {
        self.0.clone() + std::str::from_utf8(demand.key.subject()).unwrap()
    }

    /// What `ask` says of these demands under their names in this run.
    pub(crate) fn with<T>(&self, demands: &[Demand<'_>], ask: impl FnOnce(&[Demand<'_>]) -> T) -> T {
        let names: Vec<String> = demands.iter().map(|demand| self.name(demand)).collect();
        let mut renamed = Vec::with_capacity(demands.len());
        for (demand, name) in demands.iter().zip(&names) {
            renamed.push(Demand { key: Key::scoped(name, demand.key.scope()).unwrap(), ..*demand });
        }
        ask(&renamed)
    }
}

/// The library itself, beside which the doors stand.
pub(crate) struct Library<'d> {
    behind: &'d BehindDoors,
    names: Names,
}

impl<'d> Library<'d> {
    pub(crate) fn new(behind: &'d BehindDoors) -> Library<'d> {
        Library { behind, names: Names::unused() }
    }
}

impl Subject for Library<'_> {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        self.behind.clock.set(now);
        self.names.with(check.demands(), |demands| {
            let check = Check::new(demands).unwrap();
            self.behind.wait(self.behind.limiter.check_with(&check, CheckOptions::default())).expect("a decision")
        })
    }

    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        self.behind.clock.set(now);
        self.names.with(check.demands(), |demands| {
            let check = Check::new(demands).unwrap();
            self.behind.wait(self.behind.limiter.refund(&check, decision)).expect("a refund");
        });
    }

    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        self.names.with(&[*demand], |demands| self.behind.reset(now, &demands[0]));
    }

    fn abilities(&self) -> Abilities {
        Abilities { fills: self.behind.is_in_memory(), ..Abilities::default() }
    }

    fn fill(&mut self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        self.names.with(&[*demand], |demands| self.behind.fill(&demands[0], instants));
    }
}
