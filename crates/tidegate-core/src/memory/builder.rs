//! The builder of a memory store: its clock, its memory cap and its number of shards.

use std::sync::Arc;

use super::bans::Bans;
use super::budget::Budget;
use super::counter_hash::CounterHasher;
use super::receipts::UsedReceipts;
use super::{MemoryStore, Padded};
use crate::ban_list::BanTexts;
use crate::time::{Clock, SystemClock, Timestamp};

/// The maximum number of shards: threads rarely contend for one lock, and resizing one table causes no long pause.
const SHARDS_MAX: usize = 256;
/// The memory per shard from which the number of shards is computed: cap / this, rounded up to a power of two, from 4
/// to 256.
const SHARD_BYTES_MIN: usize = 64 * 1024;
/// The default cap: room for about five million counters without long logs.
const BYTES_MAX_DEFAULT: usize = 256 * 1024 * 1024;
/// The smallest cap that leaves room for counters.
const BYTES_MAX_MIN: usize = SHARD_BYTES_MIN;

/// The clock of a store: the system's, or the one given to the builder.
///
/// Reading the clock is a large part of a check, so the default clock is called directly and not through a pointer.
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

/// A builder of a [`MemoryStore`], created by [`MemoryStore::builder`].
pub struct MemoryStoreBuilder {
    clock: StoreClock,
    max_bytes: usize,
}

impl MemoryStoreBuilder {
    /// Creates a builder with the default settings: the system's clock and a cap of 256 MiB.
    pub(super) fn new() -> MemoryStoreBuilder {
        MemoryStoreBuilder { clock: StoreClock::System(SystemClock::new()), max_bytes: BYTES_MAX_DEFAULT }
    }

    /// Sets the clock by which the store decides. Defaults to [`SystemClock`].
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        MemoryStoreBuilder { clock: StoreClock::Given(clock), ..self }
    }

    /// Sets the maximum number of bytes on the heap for counters. Defaults to 256 MiB.
    ///
    /// Values below 64 KiB become 64 KiB. When the memory is used up, keys without a counter share overflow counters
    /// until expired counters make room, and are denied if no overflow counter is left. Logs do not grow then: they
    /// combine admissions, which errs towards denial.
    #[must_use]
    pub fn max_bytes(self, max_bytes: usize) -> Self {
        MemoryStoreBuilder { max_bytes: max_bytes.max(BYTES_MAX_MIN), ..self }
    }

    /// Creates the store. Memory is allocated as counters are added.
    pub fn build(self) -> MemoryStore {
        let shards = (self.max_bytes / SHARD_BYTES_MIN).clamp(4, SHARDS_MAX + 1).next_power_of_two();
        let shards = if shards > SHARDS_MAX { SHARDS_MAX } else { shards };
        MemoryStore {
            shards: (0..shards).map(|_| Padded::default()).collect(),
            hasher: CounterHasher::new(),
            clock: self.clock,
            budget: Budget::new(self.max_bytes, shards),
            bans: Bans::default(),
            ban_list: BanTexts::default(),
            receipts: UsedReceipts::default(),
        }
    }
}
