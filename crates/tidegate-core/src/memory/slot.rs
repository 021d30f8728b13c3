//! A counter in 32 bytes: half a cache line, never across two.
//!
//! ```text
//!   bytes  0 ─ 8    8 ─ 12   12 ─ 32
//!          hash     hash     state (`algorithm/packed.rs`)
//! ```
//!
//! Twelve bytes of the key's hash identify the counter within its shard. The key itself is not stored.

use super::counter_hash::CounterHash;
use crate::algorithm::{Name, Packed};

/// One counter in 32 bytes: its name (a [`CounterHash`]) and its packed state; or empty.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Slot {
    /// The table part of the name; 0 in an empty slot.
    hash: u64,
    /// The second part of the name.
    rest: u32,
    pub(super) state: Packed,
}

impl Slot {
    /// Creates the slot of the counter with this name.
    pub(super) fn new(name: CounterHash, state: Packed) -> Slot {
        Slot { hash: name.table(), rest: name.rest(), state }
    }

    /// Returns whether this slot holds the counter with this name, which must be of the slot's shard.
    #[inline(always)]
    pub(super) fn holds(&self, name: CounterHash) -> bool {
        self.hash == name.table() && self.rest == name.rest()
    }

    /// Returns whether the slot holds no counter.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.hash == 0
    }

    /// Returns the name of the counter without its shard: [`CounterHash::in_table`]. Not for an empty slot.
    #[inline]
    pub(super) fn name_in_table(&self) -> Name {
        (self.hash, self.rest)
    }

    /// Returns the part of the name that determines the position in the table; 0 for an empty slot.
    #[inline]
    pub(super) fn table_hash(&self) -> u64 {
        self.hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_is_half_a_cache_line() {
        assert_eq!(size_of::<Slot>(), 32);
    }
}
