//! A node: a limiter on a store that will be mistreated, and the way through every fault.
//!
//! ```text
//!   shared ──▶ fault ──▶ every answer local, none lost ──▶ heal ──▶ shared again, and the ledger is as it was left
//! ```

use std::sync::Arc;
use std::time::Duration;

use tollgate::{Check, CheckOptions, Decision, Demand, Key, Limit, Limiter, OnFailure, Source, StoreErrorKind};
use tollgate_redis::RedisStore;

/// How long between two looks, and how many of them a healed store may take: the promise is two seconds on a machine
/// that has time for us, and twice that fails the test on any. Looks are counted, not time, so that a machine that stands
/// still does not fail it.
const LOOK_PAUSE: Duration = Duration::from_millis(10);
const LOOKS_TO_HEAL_MAX: usize = 400;
/// A fault need not be noticed at the first look.
const LOOKS_TO_FAIL_MAX: usize = 1_000;

pub(crate) struct Node {
    pub(crate) limiter: Limiter,
    pub(crate) store: RedisStore,
}

impl Node {
    /// A node with a deadline that a busy machine keeps, connected.
    pub(crate) async fn new(url: String) -> Node {
        let node = Node::with_deadline(url, Duration::from_millis(200));
        node.wait_until_shared("at the start").await;
        node
    }

    pub(crate) fn with_deadline(url: String, deadline: Duration) -> Node {
        let store = RedisStore::builder(url).build().unwrap();
        let limiter = Limiter::builder().store(Arc::new(store.clone())).deadline(deadline).build();
        Node { limiter, store }
    }

    pub(crate) async fn ask(&self, limit: &str, subject: &str) -> Decision {
        let limit: Limit = limit.parse().unwrap();
        let demand = Demand::new(limit, Key::new(subject).unwrap());
        self.limiter.check(&Check::one(&demand)).await.expect("`local` always has an answer")
    }

    /// A request of which nothing is expected but an answer.
    pub(crate) async fn traffic(&self) -> Source {
        self.ask("1000000/h token-bucket", "traffic").await.source
    }

    /// The kind of failure that a caller is told who wants no local answer.
    pub(crate) async fn failure(&self) -> Option<StoreErrorKind> {
        let demand = Demand::new("1000000/h token-bucket".parse().unwrap(), Key::new("traffic").unwrap());
        let options = CheckOptions { on_failure: Some(OnFailure::Deny), ..CheckOptions::default() };
        self.limiter.check_with(&Check::one(&demand), options).await.err().map(|unavailable| unavailable.kind())
    }

    /// One unit on a counter that only this asks: what the store says is left.
    pub(crate) async fn ledger(&self) -> u32 {
        let decision = self.ask("1000/h", "ledger").await;
        assert_eq!(decision.source, Source::Store);
        decision.limits[0].remaining
    }

    /// Asks until the store fails with this kind.
    pub(crate) async fn wait_until_failing(&self, kind: StoreErrorKind) {
        let mut kinds = Vec::new();
        for _ in 0..LOOKS_TO_FAIL_MAX {
            match self.failure().await {
                Some(failed) if failed == kind => return,
                other => kinds.extend(other),
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        kinds.dedup();
        panic!("the store never failed as {kind:?}, but as {kinds:?}");
    }

    /// Asks until the store answers.
    pub(crate) async fn wait_until_shared(&self, when: &str) {
        for look in 0..LOOKS_TO_HEAL_MAX {
            if self.traffic().await == Source::Store {
                println!("shared again {when} at look {look}");
                return;
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
        panic!("{when}: the store is not used again; {:?}", self.limiter.stats());
    }

    /// The way through a fault that leaves the server's data alone.
    pub(crate) async fn outlive(&self, name: &str, kind: StoreErrorKind, fault: impl FnOnce(), heal: impl FnOnce()) {
        let before = self.ledger().await;
        fault();
        self.wait_until_failing(kind).await;
        self.assert_local(name).await;
        heal();
        self.wait_until_shared(name).await;
        assert_eq!(self.ledger().await, before - 1, "{name}: the shared counter goes on");
    }

    /// Every request gets an answer from this node's share, and the share is bounded.
    pub(crate) async fn assert_local(&self, name: &str) {
        let quota = 20;
        let mut allowed = 0;
        for _ in 0..quota + 10 {
            let decision = self.ask(&format!("{quota}/h"), name).await;
            assert_eq!(decision.source, Source::Local, "{name}");
            allowed += usize::from(decision.allowed());
        }
        assert_eq!(allowed, quota, "{name}: the local share is kept");
        assert!(self.limiter.stats().breaker_open, "{name}");
    }
}
