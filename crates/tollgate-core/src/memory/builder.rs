//! How a memory store is made: its clock, its cap, its shards.

use std::sync::Arc;

use super::budget::Budget;
use super::naming::Naming;
use super::{MemoryStore, Padded};
use crate::time::{Clock, SystemClock, Timestamp};

/// Enough that threads rarely meet and that moving one table is never a pause.
const SHARDS_MAX: usize = 256;
/// A shard with less memory than this would hold too few keys to be worth its lock.
const SHARD_BYTES_MIN: usize = 64 * 1024;
/// The cap unless said otherwise: room for some five million one-word counters.
const BYTES_MAX_DEFAULT: usize = 256 * 1024 * 1024;
/// The smallest cap that leaves room for anything.
const BYTES_MAX_MIN: usize = SHARD_BYTES_MIN;

/// The clock that nearly everybody uses is called directly; reading it is a good part of a check.
pub(super) enum StoreClock {
    System(SystemClock),
    Given(Arc<dyn Clock>),
}

impl Clock for StoreClock {
    #[inline(always)]
    fn now(&self) -> Timestamp {
        match self {
            StoreClock::System(clock) => clock.now(),
            StoreClock::Given(clock) => clock.now(),
        }
    }

    fn now_at_least(&self, floor: Timestamp) -> Timestamp {
        match self {
            StoreClock::System(clock) => clock.now_at_least(floor),
            StoreClock::Given(clock) => clock.now_at_least(floor),
        }
    }
}

/// How a [`MemoryStore`] is made.
pub struct MemoryStoreBuilder {
    clock: StoreClock,
    max_bytes: usize,
}

impl MemoryStoreBuilder {
    pub(super) fn new() -> MemoryStoreBuilder {
        MemoryStoreBuilder { clock: StoreClock::System(SystemClock::new()), max_bytes: BYTES_MAX_DEFAULT }
    }

    /// Where time comes from; the system's clock unless said.
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        MemoryStoreBuilder { clock: StoreClock::Given(clock), ..self }
    }

    /// The most bytes that counters may take; at least 64 KiB, 256 MiB unless said.
    #[must_use]
    pub fn max_bytes(self, max_bytes: usize) -> Self {
        MemoryStoreBuilder { max_bytes: max_bytes.max(BYTES_MAX_MIN), ..self }
    }

    /// The store.
    pub fn build(self) -> MemoryStore {
        let shards = (self.max_bytes / SHARD_BYTES_MIN).clamp(4, SHARDS_MAX + 1).next_power_of_two();
        let shards = if shards > SHARDS_MAX { SHARDS_MAX } else { shards };
        MemoryStore {
            shards: (0..shards).map(|_| Padded::default()).collect(),
            naming: Naming::new(),
            clock: self.clock,
            budget: Budget::new(self.max_bytes, shards),
        }
    }
}
