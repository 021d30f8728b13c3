//! A store on a server of its own, or on the master of a group with Sentinels, with a clock that the test sets, as a
//! user with the least permissions.

use std::cell::Cell;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::{Check, Decision, Demand, ManualClock, Redeemed, Redemption, Store, Timestamp};
use tidegate_redis::{RedisStore, acl_rules};
use tidegate_testkit::conformance::{Implementation, Redeem};
use tidegate_testkit::server::{Brand, Config, SentinelGroup, Server};
use tokio::runtime::{Builder, Runtime};

use crate::log_format;

pub(crate) struct OnServer {
    place: Place,
    pub(crate) store: RedisStore,
    pub(crate) clock: Arc<ManualClock>,
    /// The number of closed chunks in the logs that were verified.
    chunks_seen: Cell<usize>,
    runtime: Runtime,
}

enum Place {
    Server(Box<Server>),
    Sentinels(Box<SentinelGroup>),
}

impl OnServer {
    pub(crate) fn new(brand: Brand) -> OnServer {
        let rules = acl_rules("tidegate", None, None).unwrap();
        let server = Config::new(brand).only_user("tidegate", "sesame", &rules).start();
        let url = format!("redis://tidegate:sesame@{}", server.addr());
        OnServer::at(Place::Server(Box::new(server)), url)
    }

    /// The user is the default one: a restricted one is tested without Sentinels.
    pub(crate) fn through_sentinels(brand: Brand) -> OnServer {
        let group = SentinelGroup::start(brand);
        let url = group.url();
        OnServer::at(Place::Sentinels(Box::new(group)), url)
    }

    fn at(place: Place, url: String) -> OnServer {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let clock = Arc::new(ManualClock::default());
        let _context = runtime.enter();
        // A timeout that does not pass on a busy machine.
        let builder = RedisStore::builder(url).call_timeout(Duration::from_secs(5));
        let store = builder.clock_override(clock.clone()).build().unwrap();
        drop(_context);
        OnServer { place, store, clock, chunks_seen: Cell::default(), runtime }
    }

    /// Returns the server with the keys.
    pub(crate) fn server(&self) -> &Server {
        match &self.place {
            Place::Server(server) => server,
            Place::Sentinels(group) => &group.servers()[0],
        }
    }

    pub(crate) fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Deletes all keys.
    pub(crate) fn emptied(&self) -> &OnServer {
        self.server().command(&["FLUSHALL"]);
        self
    }

    /// Verifies the format of all logs; panics if one is not as documented.
    pub(crate) fn verified(&self) -> &OnServer {
        self.chunks_seen.set(self.chunks_seen.get() + log_format::verify_logs(self.server()));
        self
    }

    pub(crate) fn chunks_seen(&self) -> usize {
        self.chunks_seen.get()
    }
}

impl Implementation for &OnServer {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        self.clock.set(now);
        let checks = [*check];
        let mut decisions = self.wait(self.store.decide(&checks)).expect("a decision");
        assert_eq!(decisions.len(), 1);
        decisions.remove(0)
    }

    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        self.clock.set(now);
        self.wait(self.store.refund(check, decision)).expect("a refund");
    }

    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        self.clock.set(now);
        self.wait(self.store.reset(demand)).expect("a reset");
    }
}

impl Redeem for &OnServer {
    fn redeem(&mut self, now: Timestamp, redemption: &Redemption<'_>) -> Redeemed {
        self.clock.set(now);
        self.wait(self.store.redeem(redemption)).expect("an outcome")
    }
}
