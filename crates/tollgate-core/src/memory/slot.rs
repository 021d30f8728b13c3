//! A counter in 32 bytes: half a cache line, never across two.
//!
//! ```text
//!   bytes  0 ─ 8    8 ─ 12   12 ─ 16   16 ─ 24    24 ─ 32
//!          hash     hash     wide      small      time
//! ```
//!
//! Twelve bytes of the key's hash name the counter (the shard was chosen by other bits of it). The
//! rest is the state; the name of the key itself is not kept.
//!
//! | kind | time (52 bits) | wide (45 bits) | small (53 bits) |
//! |---|---|---|---|
//! | log of ≤ 2 entries | first entry | second entry − first | units, units, how many |
//! | longer log | – | – | index of its ring in the shard |
//! | pair | start | window | current, previous |
//! | bucket | time | scale | level |
//!
//! Beside them stand two bits for the kind and eight for the **lifetime**: a tiny float that says how long
//! after its own time this state still matters, rounded up by at most a quarter. It lets a
//! sweep drop what has expired without knowing any limit, and never drops early.

use super::rings::Rings;
use crate::algorithm::{Bucket, Entry, Few, Log, Pair, State};
use crate::limit::{Limit, Machine};

/// The name of a counter: 128 bits of a seeded hash, of which the last 32 only choose the shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CounterHash {
    pub(super) table: u64,
    pub(super) rest: u32,
    pub(super) shard: u32,
}

#[derive(Debug)]
pub(super) struct Slot {
    hash: u64,
    rest: u32,
    wide: u32,
    small: u64,
    time: u64,
}

const FEW: u64 = 0;
const RING: u64 = 1;
const PAIR: u64 = 2;
const BUCKET: u64 = 3;

const KIND_SHIFT: u32 = 62;
const LIFETIME_SHIFT: u32 = 54;
const WIDE_TOP_SHIFT: u32 = 53;
const SMALL_MASK: u64 = (1 << 53) - 1;
const TIME_MASK: u64 = (1 << 52) - 1;
const UNITS_BITS: u32 = 24;
const UNITS_MASK: u64 = (1 << UNITS_BITS) - 1;

impl Slot {
    /// A slot for a state. A long log's ring moves into `rings`.
    pub(super) fn new(name: CounterHash, limit: &Limit, state: State, whole_at_us: u64, rings: &mut Rings) -> Slot {
        let mut slot = Slot { hash: name.table, rest: name.rest, wide: 0, small: 0, time: 0 };
        slot.pack(limit, state, whole_at_us, rings);
        slot
    }

    #[inline]
    pub(super) fn is(&self, name: CounterHash) -> bool {
        self.hash == name.table && self.rest == name.rest
    }

    /// The hash that places this slot in its table.
    #[inline]
    pub(super) fn table_hash(&self) -> u64 {
        self.hash
    }

    /// Takes the state out. Until [`Slot::pack`] puts one back, a long log is an empty one here.
    #[inline]
    pub(super) fn unpack(&mut self, rings: &mut Rings) -> State {
        let small = self.small & SMALL_MASK;
        let time_us = self.time & TIME_MASK;
        match self.small >> KIND_SHIFT {
            BUCKET => State::Bucket(Bucket { time_us, level: small, scale: self.wide() }),
            PAIR => State::Pair(Pair {
                start_us: time_us,
                window_us: self.wide(),
                current: (small & UNITS_MASK) as u32,
                previous: (small >> UNITS_BITS & UNITS_MASK) as u32,
            }),
            RING => State::Log(Log::from_ring(rings.take(small as u32))),
            _ => {
                let first = Entry { time_us, units: (small & UNITS_MASK) as u32 };
                let second_units = (small >> UNITS_BITS & UNITS_MASK) as u32;
                let len = (small >> (2 * UNITS_BITS)) as u8;
                let second = match len {
                    2 => Entry { time_us: time_us + self.wide(), units: second_units },
                    _ => Entry::default(),
                };
                State::Log(Log::from_few(Few { len, entries: [first, second] }))
            }
        }
    }

    /// Puts a state in. `whole_at_us` says when a bucket will be as if never used.
    #[inline]
    pub(super) fn pack(&mut self, limit: &Limit, state: State, whole_at_us: u64, rings: &mut Rings) {
        let old_ring = self.ring();
        match state {
            State::Bucket(bucket) => {
                let lifetime_us = whole_at_us.saturating_sub(bucket.time_us);
                self.set(BUCKET, lifetime_us, bucket.time_us, bucket.scale, bucket.level);
            }
            State::Pair(pair) => {
                let counts = u64::from(pair.current) | u64::from(pair.previous) << UNITS_BITS;
                self.set(PAIR, pair_lifetime_us(limit), pair.start_us, pair.window_us, counts);
            }
            State::Log(log) => match log.into_parts() {
                Ok(Few { len, entries: [first, second] }) => {
                    let small = u64::from(first.units)
                        | u64::from(second.units) << UNITS_BITS
                        | u64::from(len) << (2 * UNITS_BITS);
                    let apart_us = second.time_us.saturating_sub(first.time_us);
                    // The newest entry starts the lifetime; time holds the first.
                    self.set(FEW, limit.window_us() + apart_us, first.time_us, apart_us, small);
                }
                Err(ring) => {
                    let index = rings.put(old_ring, ring);
                    self.set(RING, limit.window_us(), 0, 0, u64::from(index));
                    return;
                }
            },
        }
        if let Some(index) = old_ring {
            rings.free(index);
        }
    }

    /// When this state will be as if never used; at or after the true instant, never before.
    pub(super) fn expires_at_us(&self, rings: &Rings) -> u64 {
        let base_us = match self.ring() {
            Some(index) => rings.newest_us(index),
            None => self.time & TIME_MASK,
        };
        base_us + lifetime_us((self.small >> LIFETIME_SHIFT) as u8)
    }

    /// The ring of a long log.
    #[inline]
    pub(super) fn ring(&self) -> Option<u32> {
        (self.small >> KIND_SHIFT == RING).then_some(self.small as u32)
    }

    #[inline]
    fn set(&mut self, kind: u64, lifetime: u64, time_us: u64, wide: u64, small: u64) {
        debug_assert!(wide < 1 << 45 && small <= SMALL_MASK && time_us <= TIME_MASK);
        self.small = kind << KIND_SHIFT
            | u64::from(lifetime_code(lifetime)) << LIFETIME_SHIFT
            | (wide >> 44) << WIDE_TOP_SHIFT
            | small;
        self.time = (wide & 0xfff) << 52 | time_us;
        self.wide = (wide >> 12) as u32;
    }

    #[inline]
    fn wide(&self) -> u64 {
        (self.small >> WIDE_TOP_SHIFT & 1) << 44 | u64::from(self.wide) << 12 | self.time >> 52
    }
}

fn pair_lifetime_us(limit: &Limit) -> u64 {
    match limit.machine() {
        Machine::Pair(shape) if !shape.weighs_previous => limit.window_us(),
        _ => 2 * limit.window_us(),
    }
}

/// (4 + two bits) × 2^(six bits): the smallest such number that is not below `us`.
#[inline]
fn lifetime_code(us: u64) -> u8 {
    if us <= 4 {
        return 0;
    }
    let exponent = (us - 1).ilog2() - 2;
    let quarters = us.div_ceil(1 << exponent);
    // 5 ..= 8 quarters; 8 is 4 of the next power of two.
    match quarters {
        8 => (exponent as u8 + 1) << 2,
        quarters => (exponent as u8) << 2 | (quarters as u8 - 4),
    }
}

#[inline]
fn lifetime_us(code: u8) -> u64 {
    (4 + u64::from(code & 3)) << (code >> 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::WINDOW_US_MAX;

    #[test]
    fn a_slot_is_half_a_cache_line() {
        assert_eq!(size_of::<Slot>(), 32);
    }

    #[test]
    fn a_lifetime_is_never_shortened_and_at_most_a_quarter_longer() {
        let mut us = 1_u64;
        while us < 4 * WINDOW_US_MAX {
            for us in [us, us + 1, us * 5 / 4, us * 3 / 2, us * 7 / 4 + 1] {
                let coded = lifetime_us(lifetime_code(us));
                assert!(coded >= us && (coded <= us + us / 4 || us <= 4), "{us} became {coded}");
            }
            us *= 2;
        }
    }

    #[test]
    fn every_state_comes_out_as_it_went_in() {
        let entry = |time_us, units| Entry { time_us, units };
        let last = (1 << 52) - 1;
        let states = [
            ("7/s sliding", State::Log(Log::default())),
            (
                "7/s sliding",
                State::Log(Log::from_few(Few { len: 1, entries: [entry(last, 10_000_000), Entry::default()] })),
            ),
            (
                "7/400day",
                State::Log(Log::from_few(Few {
                    len: 2,
                    entries: [entry(last - WINDOW_US_MAX, 1), entry(last, 10_000_000)],
                })),
            ),
            (
                "7/400day fixed-window",
                State::Pair(Pair {
                    start_us: last,
                    window_us: WINDOW_US_MAX,
                    current: 10_000_000,
                    previous: 9_999_999,
                }),
            ),
            ("7/s token-bucket", State::Bucket(Bucket { time_us: last, level: SMALL_MASK, scale: WINDOW_US_MAX })),
        ];
        let name = CounterHash { table: 1, rest: 2, shard: 3 };
        for (limit, state) in states {
            let mut rings = Rings::default();
            let mut slot = Slot::new(name, &limit.parse().unwrap(), state.clone(), 5, &mut rings);
            assert!(slot.is(name));
            assert_eq!(slot.unpack(&mut rings), state);
        }
    }
}
