//! A store on a server of its own, with a clock that the test sets, as a user with the least permissions.

use std::cell::Cell;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tollgate_core::{Check, Decision, Demand, ManualClock, Redeemed, Redemption, Store, Timestamp};
use tollgate_redis::{RedisStore, acl_rules};
use tollgate_testkit::conformance::{Redeem, Subject};
use tollgate_testkit::server::{Brand, Config, Server};

use crate::log_format;

pub(crate) struct OnServer {
    pub(crate) server: Server,
    pub(crate) store: RedisStore,
    pub(crate) clock: Arc<ManualClock>,
    /// The number of closed chunks in the logs that were verified.
    chunks_seen: Cell<usize>,
    runtime: Runtime,
}

impl OnServer {
    pub(crate) fn new(brand: Brand) -> OnServer {
        let rules = acl_rules("tollgate", &[]).unwrap();
        let server = Config::new(brand).only_user("tollgate", "sesame", &rules).start();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let clock = Arc::new(ManualClock::default());
        let _context = runtime.enter();
        // A timeout that does not pass on a busy machine.
        let url = format!("redis://tollgate:sesame@{}", server.addr());
        let builder = RedisStore::builder(url).call_timeout(Duration::from_secs(5));
        let store = builder.clock_override(clock.clone()).build().unwrap();
        drop(_context);
        OnServer { server, store, clock, chunks_seen: Cell::default(), runtime }
    }

    pub(crate) fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Deletes all keys.
    pub(crate) fn emptied(&self) -> &OnServer {
        self.server.command(&["FLUSHALL"]);
        self
    }

    /// Verifies the format of all logs; panics if one is not as documented.
    pub(crate) fn verified(&self) -> &OnServer {
        self.chunks_seen.set(self.chunks_seen.get() + log_format::verify_logs(&self.server));
        self
    }

    pub(crate) fn chunks_seen(&self) -> usize {
        self.chunks_seen.get()
    }
}

impl Subject for &OnServer {
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
