//! The units that were refunded on buckets, which their slots have no room for.
//!
//! A bucket counts the refunded units (`bucket.rs`), because a later refund depends on them. Few buckets are
//! ever refunded, and a count matters only until a full bucket would be empty. So the counts are in a map of their own,
//! which a shard has only while it holds one.
//!
//! An entry is removed only after it has expired. Its expiry moves with every write of its bucket, but the heap, which
//! orders the entries by it, is not updated then: an entry that is found not to have expired goes back into the heap.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use foldhash::fast::RandomState;

use crate::algorithm::packed::Name;
use crate::time::Timestamp;

/// The maximum number of entries that one call of [`RefundedUnits::drop_expired`] inspects.
const SWEEP_ENTRIES: usize = 8;
/// The smallest number of entries for which the memory of removed ones is freed.
const CAPACITY_MIN: usize = 64;

/// The refunded units of the buckets of a shard, by the name of the bucket.
#[derive(Clone, Debug, Default)]
pub(crate) struct RefundedUnits {
    counts: HashMap<Name, Count, RandomState>,
    /// Has each entry of `counts` once, with a time that is not later than its expiry.
    by_expiry: BinaryHeap<Reverse<(u64, Name)>>,
}

/// The refunded units of one bucket.
#[derive(Clone, Copy, Debug)]
struct Count {
    units: u64,
    /// The time from which the units no longer matter, in microseconds since the epoch.
    expires_at_us: u64,
}

impl RefundedUnits {
    /// An upper bound on the bytes of the first entry.
    pub(crate) const FIRST_BYTES: usize = 512;

    /// Returns whether there is no entry, not even an expired one.
    pub(crate) fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Returns whether the bucket has an entry, which may have expired or have 0 units.
    #[inline(never)]
    pub(crate) fn contains(&self, name: Name) -> bool {
        self.counts.contains_key(&name)
    }

    /// Returns the refunded units of the bucket; 0 without an entry.
    pub(crate) fn units(&self, name: Name) -> u64 {
        self.counts.get(&name).map_or(0, |count| count.units)
    }

    /// Returns the time at which the entry of the bucket expires, in microseconds since the epoch; 0 without an entry.
    pub(crate) fn expires_at_us(&self, name: Name) -> u64 {
        self.counts.get(&name).map_or(0, |count| count.expires_at_us)
    }

    /// Sets the refunded units of a bucket. The entry expires at `expires_at_us`, or when it did before if that is later.
    pub(crate) fn set(&mut self, name: Name, units: u64, expires_at_us: u64) {
        let by_expiry = &mut self.by_expiry;
        let count = self.counts.entry(name).or_insert_with(|| {
            by_expiry.push(Reverse((expires_at_us, name)));
            Count { units, expires_at_us }
        });
        *count = Count { units, expires_at_us: expires_at_us.max(count.expires_at_us) };
    }

    /// Sets the refunded units of a bucket to 0, if it has an entry, and lets the entry expire.
    pub(crate) fn reset(&mut self, name: Name) {
        if let Some(count) = self.counts.get_mut(&name) {
            *count = Count { units: 0, expires_at_us: 0 };
        }
    }

    /// Removes up to eight entries that have expired at `now`, and frees memory if few are left.
    pub(crate) fn drop_expired(&mut self, now: Timestamp) {
        for _ in 0..SWEEP_ENTRIES {
            let Some(&Reverse((at_us, name))) = self.by_expiry.peek() else { break };
            if at_us > now.as_micros() {
                break;
            }
            self.by_expiry.pop();
            match self.expires_at_us(name) {
                later_us if later_us > now.as_micros() => self.by_expiry.push(Reverse((later_us, name))),
                _ => drop(self.counts.remove(&name)),
            }
        }
        let needed = 2 * self.counts.len().max(CAPACITY_MIN);
        if self.counts.capacity() > 2 * needed {
            self.counts.shrink_to(needed);
            self.by_expiry.shrink_to(needed);
        }
    }

    /// Returns the bytes that must be reallocated for one more entry; 0 if there is room for it.
    pub(crate) fn bytes_to_grow(&self) -> usize {
        let has_room = self.counts.len() < self.counts.capacity() && self.by_expiry.len() < self.by_expiry.capacity();
        if has_room { 0 } else { self.heap_bytes() }
    }

    /// Returns the bytes that the entries use on the heap.
    pub(crate) fn heap_bytes(&self) -> usize {
        // A map has a byte per place besides the entry, and uses at most seven of eight places.
        let map = self.counts.capacity() * 8 / 7 * (size_of::<(Name, Count)>() + 1);
        size_of::<RefundedUnits>() + map + self.by_expiry.capacity() * size_of::<Reverse<(u64, Name)>>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_is_removed_when_it_has_expired_and_not_before() {
        let mut refunded = RefundedUnits::default();
        refunded.set((1, 1), 5, 100);
        refunded.set((1, 2), 7, 50);
        refunded.set((1, 1), 6, 200);
        refunded.set((1, 2), 8, 40);
        refunded.drop_expired(Timestamp::from_micros(49));
        assert_eq!((refunded.units((1, 1)), refunded.units((1, 2)), refunded.units((2, 1))), (6, 8, 0));
        refunded.drop_expired(Timestamp::from_micros(199));
        assert_eq!((refunded.units((1, 1)), refunded.contains((1, 2))), (6, false));
        refunded.reset((1, 1));
        assert!(refunded.contains((1, 1)) && refunded.units((1, 1)) == 0);
        refunded.drop_expired(Timestamp::from_micros(200));
        assert!(refunded.is_empty() && refunded.by_expiry.is_empty());
    }

    #[test]
    fn memory_of_an_entry_is_as_documented_and_is_freed() {
        let mut refunded = RefundedUnits::default();
        let mut most_bytes = 0;
        for number in 1..=20_000_u64 {
            refunded.set((number, 0), 1, number);
            if number >= 64 {
                most_bytes = most_bytes.max(refunded.heap_bytes() / number as usize);
            }
        }
        assert!(most_bytes <= 125, "{most_bytes} bytes");
        while !refunded.is_empty() {
            refunded.drop_expired(Timestamp::from_micros(20_000));
        }
        assert!(refunded.heap_bytes() < 50_000, "{}", refunded.heap_bytes());
    }
}
