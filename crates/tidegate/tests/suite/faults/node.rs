//! A limiter on a store that fails and heals.
//!
//! ```text
//!   shared ──▶ fault ──▶ every decision is local ──▶ heal ──▶ shared again, with the counters as before the fault
//! ```

use std::sync::Arc;
use std::time::Duration;

use tidegate::{Check, CheckOptions, Decision, Demand, Key, Limit, Limiter, OnFailure, Source, StoreErrorKind};
use tidegate_redis::RedisStore;

/// Pause between two attempts, and their number: 30 seconds, far longer than a healed store needs on a busy machine.
const PAUSE: Duration = Duration::from_millis(10);
const ATTEMPTS_MAX: usize = 3_000;

pub(crate) struct Node {
    pub(crate) limiter: Limiter,
    pub(crate) store: RedisStore,
}

impl Node {
    /// Creates a node with a deadline that a busy machine keeps, and waits until its store is connected.
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

    pub(crate) async fn check(&self, limit: &str, subject: &str) -> Decision {
        let limit: Limit = limit.parse().unwrap();
        let demand = Demand::new(limit, Key::new(subject).unwrap());
        self.limiter.check(&Check::one(&demand)).await.expect("on_failure = local decides without the store")
    }

    /// Makes a decision on a counter that no test reads. Returns its source.
    pub(crate) async fn traffic(&self) -> Source {
        self.check("1000000/h token-bucket", "traffic").await.source
    }

    /// Makes a decision with `on_failure = deny`. Returns the kind of its error, or `None` if the store decided.
    pub(crate) async fn failure(&self) -> Option<StoreErrorKind> {
        let demand = Demand::new("1000000/h token-bucket".parse().unwrap(), Key::new("traffic").unwrap());
        let options = CheckOptions { on_failure: Some(OnFailure::Deny), ..CheckOptions::default() };
        self.limiter.check_with(&Check::one(&demand), options).await.err().map(|unavailable| unavailable.kind())
    }

    /// Charges one unit to a counter that nothing else uses. Returns what remains of it in the store.
    pub(crate) async fn ledger(&self) -> u32 {
        let decision = self.check("1000/h", "ledger").await;
        assert_eq!(decision.source, Source::Store);
        decision.limits[0].remaining
    }

    /// Makes decisions until the store fails with this kind.
    pub(crate) async fn wait_until_failing(&self, kind: StoreErrorKind) {
        let mut kinds = Vec::new();
        for _ in 0..ATTEMPTS_MAX {
            match self.failure().await {
                Some(failed) if failed == kind => return,
                other => kinds.extend(other),
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        kinds.dedup();
        panic!("the store never failed as {kind:?}, but as {kinds:?}");
    }

    /// Makes decisions until the store makes one.
    pub(crate) async fn wait_until_shared(&self, when: &str) {
        for attempt in 0..ATTEMPTS_MAX {
            if self.traffic().await == Source::Store {
                println!("shared again {when} at attempt {attempt}");
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
        panic!("{when}: the store is not used again; {:?}", self.limiter.stats());
    }

    /// Runs `fault`, checks that decisions are local, runs `heal`, and checks that the store is used again.
    ///
    /// The fault must leave the server's data as it is.
    pub(crate) async fn outlive(&self, name: &str, kind: StoreErrorKind, fault: impl FnOnce(), heal: impl FnOnce()) {
        let before = self.ledger().await;
        fault();
        self.wait_until_failing(kind).await;
        self.assert_local(name).await;
        heal();
        self.wait_until_shared(name).await;
        assert_eq!(self.ledger().await, before - 1, "{name}: the counter is as before");
    }

    /// Asserts that all decisions are local and admit exactly this node's share of the quota.
    pub(crate) async fn assert_local(&self, name: &str) {
        let quota = 20;
        let mut allowed = 0;
        for _ in 0..quota + 10 {
            let decision = self.check(&format!("{quota}/h"), name).await;
            assert_eq!(decision.source, Source::Local, "{name}");
            allowed += usize::from(decision.allowed());
        }
        assert_eq!(allowed, quota, "{name}: the local share of the quota");
        assert!(self.limiter.stats().breaker_open, "{name}");
    }
}
