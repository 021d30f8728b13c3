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
        // Tables are at worst not much more than half full, so a slot takes up to two places of 32 bytes.
        let overflow_counters_max = one_share / 16 / 64;
        let steady = cap - one_share - cap / 16;
        Budget { used: AtomicUsize::new(0), cap, steady, table_max: one_share, overflow_counters_max }
    }

    /// The cap in bytes.
    pub(super) fn cap(&self) -> usize {
        self.cap
    }

    /// How many overflow counters a shard may have.
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

    /// How large a table may become that replaces one of so many bytes, while both exist and after that.
    pub(super) fn table_bytes_max(&self, old: usize) -> usize {
        let used = self.used();
        let after_the_move = (self.steady + old).saturating_sub(used);
        let while_both_exist = self.cap.saturating_sub(used);
        self.table_max.min(after_the_move).min(while_both_exist)
    }

    /// Whether a log may grow if so many bytes must be moved for it: by a quarter while the old ones still exist, or to entries
    /// twice as wide.
    #[inline]
    pub(super) fn allows_log(&self, bytes: usize) -> bool {
        self.used() + 2 * bytes + 128 <= self.steady
    }
}
