//! The memory store as an implementation.

use std::sync::Arc;

use tidegate_core::{Check, Decision, Demand, ManualClock, MemoryStore, Redeemed, Redemption, Timestamp};

use super::{Implementation, Redeem};

/// A [`MemoryStore`] as a [`Implementation`]. Each call sets its clock to the time of the operation.
#[derive(Debug)]
pub struct InMemory {
    clock: Arc<ManualClock>,
    store: MemoryStore,
}

impl InMemory {
    /// Creates a store without counters.
    pub fn new() -> InMemory {
        let clock = Arc::new(ManualClock::default());
        let store = MemoryStore::builder().clock(clock.clone()).build();
        InMemory { clock, store }
    }
}

impl Default for InMemory {
    fn default() -> Self {
        Self::new()
    }
}

impl Implementation for InMemory {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        self.clock.set(now);
        self.store.check(check)
    }
    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        self.clock.set(now);
        self.store.refund(check, decision);
    }
    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        self.clock.set(now);
        self.store.reset(demand);
    }
}

impl Redeem for InMemory {
    fn redeem(&mut self, now: Timestamp, redemption: &Redemption<'_>) -> Redeemed {
        self.clock.set(now);
        self.store.redeem(redemption)
    }
}
