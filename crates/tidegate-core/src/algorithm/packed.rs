//! The state of one counter in 20 bytes, whichever state machine it belongs to.
//!
//! ```text
//!   bytes  0 ─ 4    4 ─ 12    12 ─ 20
//!          wide     small     time
//! ```
//!
//! | field | bits | log of ≤ 2 entries | longer log | pair | bucket |
//! |---|---|---|---|---|---|
//! | time | 52 | time of the newest entry | the same | start | time |
//! | wide | 45 | newest − oldest time | entries, units | window | scale |
//! | small | 50 | units, units, entries | number of its ring, place of the oldest | current, previous | level |
//! | tag | 5 | | | | 3 of its bits belong to the level, which has 53 |
//! | lifetime | 8 | | | | |
//!
//! The **tag** says which state machine the state belongs to, and in which form. The tags from 24 on are one tag, for
//! the one state machine whose small number needs 53 bits.
//!
//! The **lifetime** is how long the state matters after its time. It is a small float, (4 + two bits) × 2^(six bits),
//! rounded up by at most a quarter. It lets a sweep drop expired states without knowing their limits, and never early.
//!
//! What does not fit is [`Beside`] the states: the entries of longer logs, and the refunded units of buckets.

use super::bucket::RefundedUnits;
use super::log::{Log, Rings};

/// The packed state of a counter. The default is that of an unused counter, for every state machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C, packed(4))]
pub(crate) struct Packed {
    // The bits of the fields, as in the layout above. `small` also has the tag, the lifetime, and the highest bit of
    // the wide number, and `time` the lowest 12.
    wide: u32,
    small: u64,
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

/// The kinds of packed states, one row each. 0 is that of an unused counter; the numbers from 5 to 23 are free.
pub(crate) mod tag {
    pub(crate) const LOG_FEW: u64 = 1;
    pub(crate) const LOG_RING: u64 = 2;
    pub(crate) const LOG_LONG: u64 = 3;
    pub(crate) const PAIR: u64 = 4;
    /// The small number of this kind has 53 bits.
    pub(crate) const BUCKET: u64 = 24;
}

const TAG_HIGH_SHIFT: u32 = 62;
const CODE_SHIFT: u32 = 54;
const CODE_MASK: u64 = 0xff << CODE_SHIFT;
const WIDE_TOP_SHIFT: u32 = 53;
const TAG_LOW_SHIFT: u32 = 50;
const TAG_MASK: u64 = 3 << TAG_HIGH_SHIFT | 7 << TAG_LOW_SHIFT;
const LEVEL_MASK: u64 = (1 << 53) - 1;
const SMALL_MASK: u64 = (1 << TAG_LOW_SHIFT) - 1;
const TIME_MASK: u64 = (1 << 52) - 1;

impl Packed {
    /// Returns whether the state has this tag: one of [`tag`].
    #[inline(always)]
    pub(crate) fn has_tag(&self, tag: u64) -> bool {
        let mask = if tag == tag::BUCKET { 3 << TAG_HIGH_SHIFT } else { TAG_MASK };
        self.small & mask == tag_bits(tag)
    }

    /// Returns the small number of a state that is not a bucket.
    #[inline(always)]
    pub(crate) fn small(&self) -> u64 {
        self.small & SMALL_MASK
    }

    /// Returns the level of a bucket: a small number with 53 bits.
    #[inline(always)]
    pub(crate) fn level(&self) -> u64 {
        self.small & LEVEL_MASK
    }

    #[inline(always)]
    pub(crate) fn time_us(&self) -> u64 {
        self.time & TIME_MASK
    }

    #[inline(always)]
    pub(crate) fn wide(&self) -> u64 {
        (self.small >> WIDE_TOP_SHIFT & 1) << 44 | u64::from(self.wide) << 12 | self.time >> 52
    }

    /// Replaces everything but the lifetime, which stays as it is: so many microseconds after `time_us`.
    #[inline(always)]
    pub(crate) fn set(&mut self, tag: u64, time_us: u64, wide: u64, small: u64) {
        debug_assert!(small <= if tag == tag::BUCKET { LEVEL_MASK } else { SMALL_MASK });
        debug_assert!(time_us <= TIME_MASK && wide < 1 << 45);
        self.small = tag_bits(tag) | self.small & CODE_MASK | (wide >> 44) << WIDE_TOP_SHIFT | small;
        (self.time, self.wide) = (wide << 52 | time_us, (wide >> 12) as u32);
    }

    /// Returns the time from which the state may be dropped, in microseconds since the epoch.
    ///
    /// From then on the state affects no decision of the limits that used it. That may already be so earlier.
    #[inline(always)]
    pub(crate) fn ends_at_us(&self) -> u64 {
        self.time_us() + decode((self.small >> CODE_SHIFT) as u8)
    }

    /// Sets the lifetime so that it ends at `ends_at_us` or later, by at most a quarter of it. If it is longer already,
    /// it becomes shorter only if `may_shorten`: another limit, which needs it, may have written the state.
    #[inline(always)]
    pub(crate) fn keep_until(&mut self, ends_at_us: u64, may_shorten: bool) {
        if may_shorten || self.ends_at_us() < ends_at_us {
            let code = code_up(ends_at_us.saturating_sub(self.time_us()));
            self.small = self.small & !CODE_MASK | u64::from(code) << CODE_SHIFT;
        }
    }
}

/// Returns the bits of a tag at their positions in `small`.
#[inline(always)]
const fn tag_bits(tag: u64) -> u64 {
    tag >> 3 << TAG_HIGH_SHIFT | (tag & 7) << TAG_LOW_SHIFT
}

impl Beside {
    /// Returns the bytes that are allocated.
    #[inline(always)]
    pub(crate) fn heap_bytes(&self) -> usize {
        self.rings.heap_bytes() + self.refunded.as_ref().map_or(0, |refunded| refunded.heap_bytes())
    }

    /// Frees the memory of a state, which must not be used again. The count of refunded units stays.
    pub(crate) fn free(&mut self, packed: Packed) {
        if Log::is_packed_in(&packed) {
            Log::unpacked(&packed).free(&mut self.rings);
        }
    }

    /// Moves the memory of a state from `self` to `to`. The count of refunded units stays.
    pub(crate) fn move_rings(&mut self, packed: &mut Packed, to: &mut Rings) {
        if Log::is_packed_in(packed) {
            Log::unpacked(packed).moved(&mut self.rings, to).packed_into(packed);
        }
    }
}

/// Returns the eight-bit code of the smallest codable number that is at least `value`, and at least 5.
///
/// It is at most a quarter more than `value` if that is 5 or more. `value` must be below 2^63.
#[inline(always)]
fn code_up(value: u64) -> u8 {
    let below = value.max(5) - 1;
    let exponent = below.ilog2() - 2;
    // Codes are ordered like their numbers, so the successor of the code below `value` is at least `value`.
    ((exponent << 2) as u8 | (below >> exponent & 3) as u8) + 1
}

/// Returns the number that an eight-bit code stands for.
#[inline(always)]
fn decode(code: u8) -> u64 {
    (4 + u64::from(code & 3)) << (code >> 2)
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
        for tag in (0..24).chain([tag::BUCKET]) {
            let largest = if tag == tag::BUCKET { LEVEL_MASK } else { SMALL_MASK };
            for (time_us, wide, small) in [(TIME_MASK, (1 << 45) - 1, largest), (0, 0, 0), (5, 1 << 44, 1 << 49)] {
                let mut packed = Packed::default();
                packed.keep_until(WINDOW_US_MAX, true);
                packed.set(tag, time_us, wide, small);
                packed.keep_until(time_us + 1, false);
                let found = if tag == tag::BUCKET { packed.level() } else { packed.small() };
                assert!(packed.has_tag(tag) && !packed.has_tag(tag ^ 1));
                assert_eq!((packed.time_us(), packed.wide(), found), (time_us, wide, small));
                let lifetime_us = packed.ends_at_us() - time_us;
                assert!((WINDOW_US_MAX..=WINDOW_US_MAX / 4 * 5).contains(&lifetime_us), "{lifetime_us}");
            }
        }
    }

    #[test]
    fn coded_lifetime_is_never_shorter_and_at_most_a_quarter_longer() {
        let mut us = 1_u64;
        while us < 1 << 54 {
            for us in [us, us + 1, us * 5 / 4, us * 3 / 2, us * 7 / 4 + 1] {
                let up = decode(code_up(us));
                assert!(up >= us && (up <= us + us / 4 || us <= 4), "{us} became {up}");
            }
            us *= 2;
        }
    }
}
