//! The state of one counter in 20 bytes, whichever state machine it belongs to.
//!
//! ```text
//!   bits   0 ─ 45   45 ─ 96          52     8          4
//!          wide     small            time   lifetime   tag
//! ```
//!
//! | field | bits | log of ≤ 2 entries | longer log | pair | bucket |
//! |---|---|---|---|---|---|
//! | wide | 45 | newest − oldest time | entries, units | window | scale |
//! | small | 51 | units, units, entries | number of its ring, place of the oldest | current, previous | level |
//! | time | 52 | time of the newest entry | the same | start | time |
//! | lifetime | 8 | | | | |
//! | tag | 4 | | | | 2 of its bits belong to the level, which has 53 |
//!
//! The **tag** says which state machine the state belongs to, and in which form. The tags from 12 on are those of the
//! one state machine whose small number needs 53 bits.
//!
//! The **lifetime** ([`Lifetime`]) is how long the state matters after its time. It lets a sweep drop expired states without
//! knowing their limits, and never early.
//!
//! What does not fit is [`Beside`] the states: the entries of longer logs, and the refunded units of buckets.

use super::Machine;
use super::bucket::RefundedUnits;
use super::log::{Log, Rings};
use crate::time::Lifetime;

/// The packed state of a counter. The default is that of an unused counter, for every state machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C, packed(4))]
pub(crate) struct Packed {
    /// The wide number, and the low bits of the small one.
    low: u64,
    /// The high bits of the small number.
    high: u32,
    /// The time, the lifetime and the tag.
    time: u64,
}

/// What the packed states of a shard have no room for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Beside {
    /// The refunded units of buckets; `None` while there are none.
    pub(crate) refunded: Option<Box<RefundedUnits>>,
    /// The entries of longer logs.
    pub(crate) rings: Rings,
}

/// The name under which a counter has an entry in [`Beside::refunded`]. Unique among the counters that share a [`Beside`].
pub(crate) type Name = (u64, u32);

/// The kinds of packed states, one row each. 0 is that of an unused counter; the numbers from 5 to 11 are free.
pub(crate) mod tag {
    pub(crate) const LOG_FEW: u64 = 1;
    pub(crate) const LOG_RING: u64 = 2;
    pub(crate) const LOG_LONG: u64 = 3;
    pub(crate) const PAIR: u64 = 4;
    /// The first of four. The number of the tag from here on is the highest two bits of the level.
    pub(crate) const BUCKET: u64 = 12;
    pub(crate) const LAST: u64 = 15;
}

const WIDE_BITS: u32 = 45;
pub(crate) const SMALL_BITS: u32 = 51;
const TIME_BITS: u32 = 52;
const TAG_SHIFT: u32 = 60;
const CODE_MASK: u64 = 0xff << TIME_BITS;

impl Packed {
    /// Returns the tag: one of [`tag`], or 0 if the state is unused.
    #[inline(always)]
    pub(crate) fn tag(&self) -> u64 {
        self.time >> TAG_SHIFT
    }

    /// Returns the small number.
    #[inline(always)]
    pub(crate) fn small(&self) -> u64 {
        self.low >> WIDE_BITS | u64::from(self.high) << (u64::BITS - WIDE_BITS)
    }

    #[inline(always)]
    pub(crate) fn time_us(&self) -> u64 {
        self.time & ((1 << TIME_BITS) - 1)
    }

    #[inline(always)]
    pub(crate) fn wide(&self) -> u64 {
        self.low & ((1 << WIDE_BITS) - 1)
    }

    /// Replaces everything but the lifetime, which stays as it is: so many microseconds after `time_us`.
    #[inline(always)]
    pub(crate) fn set(&mut self, tag: u64, time_us: u64, wide: u64, small: u64) {
        debug_assert!(tag <= tag::LAST && time_us >> TIME_BITS == 0 && wide >> WIDE_BITS == 0);
        debug_assert!(small >> SMALL_BITS == 0);
        self.low = wide | small << WIDE_BITS;
        self.high = (small >> (u64::BITS - WIDE_BITS)) as u32;
        self.time = tag << TAG_SHIFT | self.time & CODE_MASK | time_us;
    }

    /// Returns the time from which the state may be dropped, in microseconds since the epoch.
    ///
    /// From then on the state affects no decision of the limits that used it. That may already be so earlier.
    #[inline(always)]
    pub(crate) fn ends_at_us(&self) -> u64 {
        self.time_us() + Lifetime((self.time >> TIME_BITS) as u8).as_micros()
    }

    /// Sets the lifetime. If it is longer already, it becomes shorter only if `may_shorten`: another limit, which needs it,
    /// may have written the state.
    #[inline(always)]
    pub(crate) fn keep(&mut self, lifetime: Lifetime, may_shorten: bool) {
        let code = u64::from(lifetime.0) << TIME_BITS;
        if may_shorten || self.time & CODE_MASK < code {
            self.time = self.time & !CODE_MASK | code;
        }
    }
}

impl Beside {
    /// Returns the bytes that are allocated.
    #[inline(always)]
    pub(crate) fn heap_bytes(&self) -> usize {
        self.rings.heap_bytes() + self.refunded.as_ref().map_or(0, |refunded| refunded.heap_bytes())
    }

    /// Frees the memory of a state, which must not be used again. The count of refunded units stays.
    pub(crate) fn free(&mut self, packed: Packed) {
        if Log::TAGS.contains(&packed.tag()) {
            Log::unpacked(&packed).free(&mut self.rings);
        }
    }

    /// Moves the memory of a state from `self` to `to`. The count of refunded units stays.
    pub(crate) fn move_rings(&mut self, packed: &mut Packed, to: &mut Rings) {
        if Log::TAGS.contains(&packed.tag()) {
            Log::unpacked(packed).moved(&mut self.rings, to).packed_into(packed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::WINDOW_US_MAX;

    #[test]
    fn packed_state_has_20_bytes() {
        assert_eq!(size_of::<Packed>(), 20);
    }

    #[test]
    fn fields_of_every_tag_survive_packing() {
        let [wide, small, time] = [WIDE_BITS, SMALL_BITS, TIME_BITS].map(|bits| (1_u64 << bits) - 1);
        for tag in 0..=tag::LAST {
            for (time_us, wide, small) in [(time, wide, small), (0, 0, 0), (5, 1 << 44, 1 << 50), (5, 1, 1)] {
                let mut packed = Packed::default();
                packed.keep(Lifetime::of_us(WINDOW_US_MAX), true);
                packed.set(tag, time_us, wide, small);
                packed.keep(Lifetime::of_us(1), false);
                assert_eq!(
                    (packed.tag(), packed.time_us(), packed.wide(), packed.small()),
                    (tag, time_us, wide, small)
                );
                let lifetime_us = packed.ends_at_us() - time_us;
                assert!((WINDOW_US_MAX..=WINDOW_US_MAX / 4 * 5).contains(&lifetime_us), "{lifetime_us}");
            }
        }
    }
}
