//! A hard cap on bytes, shared by the shards.
//!
//! Tables and logs may grow until the cap less a reserve. The reserve holds what must never fail: a table that is
//! being moved exists twice for a moment, and the overflow counters exist because everything else is full.

use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
pub(super) struct Budget {
    used: AtomicUsize,
    cap: usize,
    /// What everything together may take, moments of moving aside.
    steady: usize,
    /// What one shard's table may take.
    table_max: usize,
    overflow_counters_max: usize,
}

impl Budget {
    pub(super) fn new(cap: usize, shards: usize) -> Budget {
        let one_share = cap / shards;
        // A table is a power of two of slots with a control byte each: a share that is such a power must hold those too.
        let table_max = one_share + one_share / 16;
        // Tables are at worst half empty, so a slot takes up to two places of 33 bytes.
        let overflow_counters_max = one_share / 16 / 66;
        Budget { used: AtomicUsize::new(0), cap, steady: cap - table_max - cap / 16, table_max, overflow_counters_max }
    }

    /// How many overflow counters a shard may have that are told apart by their limit.
    pub(super) fn overflow_counters_max(&self) -> usize {
        self.overflow_counters_max
    }

    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn change(&self, from: usize, to: usize) {
        // Wrapping arithmetic makes one addition of the difference, whichever way it goes.
        self.used.fetch_add(to.wrapping_sub(from), Ordering::Relaxed);
    }

    /// Whether a table may be replaced by a larger one.
    pub(super) fn allows_table(&self, old: usize, new: usize) -> bool {
        new <= self.table_max && self.used() + new - old <= self.steady && self.allows_for_a_moment(new)
    }

    /// Whether so much more may exist while something is being moved.
    pub(super) fn allows_for_a_moment(&self, bytes: usize) -> bool {
        self.used() + bytes <= self.cap
    }

    /// Whether a log of so many bytes may grow: by a quarter while the old one still exists, or to entries twice as wide.
    #[inline]
    pub(super) fn allows_log(&self, bytes: usize) -> bool {
        self.used() + 2 * bytes + 128 <= self.steady
    }
}
