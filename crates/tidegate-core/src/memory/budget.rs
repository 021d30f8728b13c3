//! A hard cap on bytes, shared by the shards.
//!
//! Tables and logs may grow up to the cap minus a reserve. The reserve is for allocations that must never fail: a table
//! exists twice while it is resized, and overflow counters are needed exactly when everything else is full.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The memory budget of a store, in bytes. The shards report what they use.
#[derive(Debug)]
pub(super) struct Budget {
    used: AtomicUsize,
    cap: usize,
    /// The bytes that all shards together may use, not counting tables that are being resized.
    steady: usize,
    /// The bytes that the table of one shard may use.
    table_max: usize,
    overflow_counters_max: usize,
}

impl Budget {
    /// Creates a budget of `cap` bytes, divided among `shards` shards.
    pub(super) fn new(cap: usize, shards: usize) -> Budget {
        let one_share = cap / shards;
        // A table is at worst little more than half full, so a counter takes up to two places of 32 bytes.
        let overflow_counters_max = one_share / 16 / 64;
        let steady = cap - one_share - cap / 16;
        Budget { used: AtomicUsize::new(0), cap, steady, table_max: one_share, overflow_counters_max }
    }

    /// Returns the cap in bytes.
    pub(super) fn cap(&self) -> usize {
        self.cap
    }

    /// Returns the maximum number of overflow counters per shard.
    pub(super) fn overflow_counters_max(&self) -> usize {
        self.overflow_counters_max
    }

    /// Returns the bytes that the shards have reported as used.
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Records that a shard which used `from` bytes now uses `to` bytes.
    pub(super) fn change(&self, from: usize, to: usize) {
        // With wrapping arithmetic, one addition covers growth and shrinkage.
        self.used.fetch_add(to.wrapping_sub(from), Ordering::Relaxed);
    }

    /// Returns the maximum size, in bytes, of a table that replaces a shard's table of `old` bytes.
    ///
    /// With it, the cap is kept while both tables exist, and the reserve is left after the old one is dropped. At most
    /// the shard's share of the cap. May be less than `old`: then the table cannot grow.
    pub(super) fn table_bytes_max(&self, old: usize) -> usize {
        let used = self.used();
        let after_the_move = (self.steady + old).saturating_sub(used);
        let while_both_exist = self.cap.saturating_sub(used);
        self.table_max.min(after_the_move).min(while_both_exist)
    }

    /// Returns whether a log, or the counts of refunded units, may grow if `bytes` must be reallocated for it.
    ///
    /// Twice as many, and 128 bytes more, must be left besides the reserve.
    ///
    /// A log may grow by a quarter while the old memory still exists, or to entries that are twice as wide. The counts
    /// may grow to twice their size.
    #[inline]
    pub(super) fn allows_growth(&self, bytes: usize) -> bool {
        self.used() + 2 * bytes + 128 <= self.steady
    }
}
