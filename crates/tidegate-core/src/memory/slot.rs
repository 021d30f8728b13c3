//! A counter in 32 bytes: half a cache line, never across two.
//!
//! ```text
//!   bytes  0 ─ 8    8 ─ 12   12 ─ 16   16 ─ 24    24 ─ 32
//!          hash     hash     wide      small      time
//! ```
//!
//! Twelve bytes of the key's hash identify the counter within its shard. The rest is the state. The key itself is not
//! stored.
//!
//! | kind | time (52 bits) | wide (45 bits) | small (53 bits) |
//! |---|---|---|---|
//! | log of ≤ 2 entries | time of the first entry | time of the second − first | units, units, number of entries |
//! | longer log | time of the newest entry | number of entries, total units | index of its ring, place of the oldest |
//! | pair | start | window | current, previous |
//! | bucket | time | scale | level |
//!
//! A bucket's count of refunded units does not fit; `refunded.rs` keeps it.
//!
//! Two more bits hold the kind, and eight hold a small float (`lifetime.rs`). It lets a sweep drop expired states
//! without knowing their limits, and never early. For a log or a pair it is the **lifetime**: how long the state
//! matters after its time, rounded up by at most a quarter. For a bucket it is the **rate** at which it leaks, rounded
//! down by at most a quarter. The lifetime of a bucket is its level divided by its rate; one division per sweep is
//! cheaper than one per check.
//!
//! Everything of the state but time and small is the slot's **header**. All buckets of a limit have the same header. A
//! slot with this header holds a bucket of the same rate and scale, so a check reads and writes only two numbers.

use super::budget::Budget;
use super::counter_hash::CounterHash;
use super::lifetime;
use super::rings::{Block, Rings};
use crate::algorithm::{Bucket, BucketDecision, Entry, InlineEntries, Log, LogParts, Pair, Ring, RingHead, State};
use crate::decision::LimitStatus;
use crate::limit::{BucketShape, Limit, LogShape, Machine, PairShape};
use crate::time::Timestamp;

/// One counter in 32 bytes: its name (a [`CounterHash`]) and its packed state; or empty.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Slot {
    /// The table part of the name; 0 in an empty slot.
    hash: u64,
    /// The second part of the name.
    rest: u32,
    // The bits of the state, as in the layout above.
    wide: u32,
    small: u64,
    time: u64,
}

/// The kind, the lifetime code and the wide number of a packed state. Equal for all buckets of a limit.
///
/// They are at their positions in a slot; all other bits are 0.
#[derive(Clone, Copy)]
struct SlotHeader {
    small: u64,
    time: u64,
    wide: u32,
}

impl SlotHeader {
    #[inline(always)]
    fn new(kind: u64, code: u8, wide: u64) -> SlotHeader {
        debug_assert!(wide < 1 << 45);
        SlotHeader {
            small: kind << KIND_SHIFT | u64::from(code) << CODE_SHIFT | (wide >> 44) << WIDE_TOP_SHIFT,
            time: wide << 52,
            wide: (wide >> 12) as u32,
        }
    }

    /// Returns the header of the buckets of a limit, given by its `shape`, that counts time in microseconds.
    #[inline(always)]
    fn of_plain_bucket(shape: &BucketShape) -> SlotHeader {
        SlotHeader::new(BUCKET, lifetime::rate_code(shape.quota.get(), 1), shape.parts_per_unit.get())
    }
}

/// Returns the eight-bit code (`lifetime.rs`) of the rate at which the buckets of a limit leak.
fn rate_code(shape: &BucketShape) -> u8 {
    lifetime::rate_code(shape.quota.get(), shape.grain_us())
}

// The kinds of state.
const INLINE: u64 = 0;
const RING: u64 = 1;
const PAIR: u64 = 2;
const BUCKET: u64 = 3;

const KIND_SHIFT: u32 = 62;
const CODE_SHIFT: u32 = 54;
const WIDE_TOP_SHIFT: u32 = 53;
const SMALL_MASK: u64 = (1 << 53) - 1;
const TIME_MASK: u64 = (1 << 52) - 1;
const UNITS_BITS: u32 = 24;
const UNITS_MASK: u64 = (1 << UNITS_BITS) - 1;
// The fields of a longer log. `small`: index of the ring, position of the oldest entry, whether entries are wide.
// `wide`: number of entries, total units. A log has at most 100,000 entries, which is below 2^17.
const RING_INDEX_BITS: u32 = 32;
const RING_FIRST_BITS: u32 = 17;
const RING_LEN_BITS: u32 = 17;

impl Slot {
    /// Creates the slot of the counter with this name.
    ///
    /// The entries of a log that do not fit into the slot move into `rings`.
    ///
    /// # Panics
    /// Panics if the state does not belong to the limit's state machine.
    pub(super) fn new(name: CounterHash, limit: &Limit, state: State, rings: &mut Rings) -> Slot {
        let mut slot = Slot { hash: name.table(), rest: name.rest(), wide: 0, small: 0, time: 0 };
        slot.pack(limit, state, rings);
        slot
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
    pub(super) fn name_in_table(&self) -> (u64, u32) {
        (self.hash, self.rest)
    }

    /// Returns the part of the name that determines the position in the table; 0 for an empty slot.
    #[inline]
    pub(super) fn table_hash(&self) -> u64 {
        self.hash
    }

    #[inline]
    fn is_bucket(&self) -> bool {
        self.kind() == BUCKET
    }

    #[inline]
    fn is_pair(&self) -> bool {
        self.kind() == PAIR
    }

    #[inline]
    fn is_log(&self) -> bool {
        matches!(self.kind(), INLINE | RING)
    }

    /// Decides a check of this bucket alone, in the slot, in the frequent case.
    ///
    /// No refunded units of the bucket must be counted ([`Shard::counts_refunds_of`](super::shard::Shard)).
    /// Returns `None` without changing anything if the limit is not [plain](BucketShape::is_plain), if the slot does
    /// not have the header of its buckets, or if [`Bucket::decide_in_place`] returns `None`. Then
    /// [`Slot::decide_bucket`] must decide.
    #[inline(always)]
    pub(super) fn decide_bucket_in_place<'a>(
        &mut self,
        limit: &'a Limit,
        shape: &'a BucketShape,
        now: Timestamp,
        cost: u32,
    ) -> Option<BucketDecision<'a>> {
        let header = SlotHeader::of_plain_bucket(shape);
        // If the headers are equal, the XOR leaves only the two numbers.
        let (level, time_us) = (self.small ^ header.small, self.time ^ header.time);
        if !shape.is_plain || level > SMALL_MASK || time_us > TIME_MASK || self.wide != header.wide {
            return None;
        }
        Bucket::decide_in_place((level, time_us), limit, shape, now, cost, |level, time_us| {
            (self.small, self.time) = (level | header.small, time_us | header.time);
        })
    }

    /// Decides a check of this bucket alone, in the slot: charges the cost if it fits, else denies.
    ///
    /// No refunded units of the bucket must be counted ([`Shard::counts_refunds_of`](super::shard::Shard)).
    /// A cost of 0 is not charged. A denial charges a limit with `count_denied`. Any decision may extend the lifetime
    /// of the slot. Returns `None` without changing anything if the slot holds another kind of state. Only a hash
    /// collision causes this.
    #[cold]
    pub(super) fn decide_bucket(
        &mut self,
        limit: &Limit,
        shape: &BucketShape,
        now: Timestamp,
        cost: u32,
    ) -> Option<LimitStatus> {
        let mut bucket = self.is_bucket().then(|| self.bucket())?;
        let status = bucket.decide_alone(limit, shape, now, cost);
        self.set_bucket(bucket, shape);
        Some(status)
    }

    /// Decides a check of this pair alone, in the slot: charges the cost if it fits, else denies.
    ///
    /// A cost of 0 is not charged. A denial charges a limit with `count_denied`. Any decision may extend the lifetime
    /// of the slot. Returns `None` without changing anything if the slot holds another kind of state. Only a hash
    /// collision causes this.
    #[inline(never)]
    pub(super) fn decide_pair(
        &mut self,
        limit: &Limit,
        shape: &PairShape,
        now: Timestamp,
        cost: u32,
    ) -> Option<LimitStatus> {
        let mut pair = self.is_pair().then(|| self.pair())?;
        let status = pair.decide_alone(limit, shape, now, cost);
        self.set_pair(pair, limit);
        Some(status)
    }

    /// Decides a check of this log alone, in the slot and its ring, in the frequent cases.
    ///
    /// They are an admission by a log of at most two entries ([`Log::admit_in_place`]), and a decision on a ring that
    /// keeps its size ([`Log::decide_in_place`]). Returns `None` without changing anything in all other cases, also if
    /// the slot holds another kind of state. Then [`Slot::decide_log`] must decide.
    #[inline(never)]
    pub(super) fn decide_log_in_place(
        &mut self,
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
        rings: &mut Rings,
    ) -> Option<LimitStatus> {
        match self.kind() {
            INLINE => self.decide_inline_log_in_place(limit, shape, now, cost),
            _ => self.decide_ring_in_place(limit, shape, now, cost, rings),
        }
    }

    /// Admits a check of this log alone, in the slot, if the log has at most two entries before and after.
    ///
    /// Returns `None` without changing anything in all other cases: those of [`Log::admit_in_place`], or if the slot
    /// holds a longer log or another kind of state.
    #[inline(always)]
    pub(super) fn decide_inline_log_in_place(
        &mut self,
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
    ) -> Option<LimitStatus> {
        let mut few = (self.kind() == INLINE).then(|| self.inline_entries())?;
        let status = Log::admit_in_place(&mut few, limit, shape, now, cost)?;
        self.set_inline_entries(few, limit);
        Some(status)
    }

    /// Decides a check of this log alone, in the slot and its ring, if the log has a ring that keeps its size.
    ///
    /// Returns `None` without changing anything in all other cases: those of [`Log::decide_in_place`], or if the slot
    /// holds a log without a ring or with several, or another kind of state.
    #[inline(always)]
    pub(super) fn decide_ring_in_place(
        &mut self,
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
        rings: &mut Rings,
    ) -> Option<LimitStatus> {
        let index = self.ring_index()?;
        let mut head = self.ring_head();
        let first_before = head.first;
        let status = Log::decide_in_place((&mut head, rings.get_mut(index)?), limit, shape, now, cost)?;
        // A denial that dropped no entry is written only if the limit's window is longer than the lifetime.
        if status.allowed {
            self.set_ring(index, head, limit);
        } else if head.first != first_before || lifetime::decode(self.code()) < limit.window_us() {
            let ends_us = self.expires_at_us();
            self.set_ring(index, head, limit);
            self.extend_lifetime_to(ends_us);
        }
        Some(status)
    }

    /// Decides a check of this log alone: charges the cost if it fits, else denies.
    ///
    /// A cost of 0 is not charged. A denial charges a limit with `count_denied`. The log grows if the budget allows it;
    /// otherwise its newest entry takes the units. The caller must then report the memory to the budget
    /// ([`Shard::report`](super::shard::Shard::report)). Returns `None` without changing anything if the slot holds
    /// another kind of state.
    #[inline(never)]
    pub(super) fn decide_log(
        &mut self,
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
        (rings, budget): (&mut Rings, &Budget),
    ) -> Option<LimitStatus> {
        if !self.is_log() {
            return None;
        }
        let mut log = self.take_log(rings);
        if cost == 0 {
            let status = log.decide_alone(limit, shape, now, 0, true);
            self.put_back(log, rings);
            return Some(status);
        }
        let may_grow = log.has_room_for(cost) || budget.allows_growth(log.moved_bytes() + rings.moving_bytes());
        let status = log.decide_alone(limit, shape, now, cost, may_grow);
        self.put_log(log, limit, rings);
        Some(status)
    }

    /// Returns whether the slot certainly has room for `cost` units at `now`.
    ///
    /// `false` if the slot holds a state of another state machine; else always `true` for cost 0. Expired entries of a
    /// log are still counted, so the result may be `false` although the cost fits.
    #[inline]
    pub(super) fn has_room_for(&self, limit: &Limit, now: Timestamp, cost: u32) -> bool {
        match (limit.machine(), self.kind()) {
            (Machine::Log(_), INLINE | RING) => {
                let units = match self.kind() {
                    RING => self.wide() >> RING_LEN_BITS,
                    _ => (self.small() & UNITS_MASK) + (self.small() >> UNITS_BITS & UNITS_MASK),
                };
                cost == 0 || units + u64::from(cost) <= u64::from(limit.quota())
            }
            (Machine::Pair(_), PAIR) => cost == 0 || State::Pair(self.pair()).fits(limit, now, cost),
            (Machine::Bucket(_), BUCKET) => cost == 0 || State::Bucket(self.bucket()).fits(limit, now, cost),
            _ => false,
        }
    }

    /// Returns the state in the slot. The entries of a longer log are moved out of `rings`. The count of refunded units
    /// of a bucket is 0.
    ///
    /// For a log, [`Slot::pack`] or [`Slot::put_back`] must follow before the slot is used again.
    #[inline]
    pub(super) fn unpack(&mut self, rings: &mut Rings) -> State {
        match self.kind() {
            BUCKET => State::Bucket(self.bucket()),
            PAIR => State::Pair(self.pair()),
            _ => State::Log(self.take_log(rings)),
        }
    }

    /// Stores a state in the slot. The entries of a log that do not fit into it move into `rings`.
    ///
    /// A log must have been taken out of this slot by [`Slot::unpack`], or the slot must be new. Frees the ring of a
    /// log that another kind of state replaces.
    ///
    /// # Panics
    /// Panics if the state does not belong to the limit's state machine.
    pub(super) fn pack(&mut self, limit: &Limit, state: State, rings: &mut Rings) {
        if let (false, Some(index)) = (matches!(state, State::Log(_)), self.ring_index()) {
            rings.free(index);
        }
        match (state, limit.machine()) {
            (State::Log(log), Machine::Log(_)) => self.put_log(log, limit, rings),
            (State::Bucket(bucket), Machine::Bucket(shape)) => self.set_bucket(bucket, shape),
            (State::Pair(pair), Machine::Pair(_)) => self.set_pair(pair, limit),
            (state, _) => unreachable!("the state belongs to another state machine: {state:?}"),
        }
    }

    /// Puts back a log that [`Slot::unpack`] returned and that was not changed. The slot itself stays as it is.
    pub(super) fn put_back(&mut self, log: Log, rings: &mut Rings) {
        let block = match log.into_parts() {
            LogParts::InlineEntries(_) => return,
            LogParts::Ring(ring) => Block::Ring(ring.into_parts().1),
            LogParts::Long(long) => Block::Long(long),
        };
        if let Some(index) = self.ring_index() {
            rings.put(Some(index), block);
        }
    }

    /// Returns the bucket in the slot, which must hold one. Its count of refunded units is 0.
    #[inline]
    fn bucket(&self) -> Bucket {
        Bucket { time_us: self.time_us(), level: self.small(), scale: self.wide(), refunded: 0 }
    }

    /// Stores a bucket in the slot, without its count of refunded units. If the level and its time are unchanged, the
    /// lifetime is not shortened.
    fn set_bucket(&mut self, bucket: Bucket, shape: &BucketShape) {
        let bucket = Bucket { refunded: 0, ..bucket };
        if self.is_bucket() && bucket == self.bucket() {
            return self.extend_bucket_lifetime(bucket, shape);
        }
        self.set(BUCKET, rate_code(shape), bucket.time_us, bucket.scale, bucket.level);
    }

    /// Extends the lifetime of the stored `bucket` if it leaks more slowly under this limit. Never shortens it.
    #[inline(never)]
    fn extend_bucket_lifetime(&mut self, bucket: Bucket, shape: &BucketShape) {
        if bucket.scale == shape.parts_per_unit.get() {
            if rate_code(shape) < self.code() {
                self.set_code(rate_code(shape));
            }
            return;
        }
        // The limit has another scale than the bucket, so the rates are not comparable. The times are.
        let rescaled = bucket.rescaled(shape);
        let leaks_us = shape.quota.div_ceil(rescaled.level).saturating_mul(shape.grain_us());
        if lifetime::time_to_leak_us(bucket.level, self.code()) >= leaks_us.saturating_add(lifetime::GRAIN_US_MAX) {
            return;
        }
        self.set_code(lifetime::rate_code_to_leak(bucket.level, leaks_us));
    }

    /// Returns the pair in the slot, which must hold one.
    #[inline]
    fn pair(&self) -> Pair {
        let counts = self.small();
        Pair {
            start_us: self.time_us(),
            window_us: self.wide(),
            current: (counts & UNITS_MASK) as u32,
            previous: (counts >> UNITS_BITS & UNITS_MASK) as u32,
        }
    }

    /// Stores a pair in the slot. If the pair is unchanged, its lifetime is not shortened.
    #[inline]
    fn set_pair(&mut self, pair: Pair, limit: &Limit) {
        // Two windows also for `fixed-window`: a rule may change to `sliding-counter`, which needs the previous count.
        let life = lifetime::code_up(2 * limit.window_us());
        if self.is_pair() && life <= self.code() && pair == self.pair() {
            return;
        }
        let counts = u64::from(pair.current) | u64::from(pair.previous) << UNITS_BITS;
        self.set(PAIR, life, pair.start_us, pair.window_us, counts);
    }

    /// Returns the log in the slot, which must hold one. The entries of a longer log are moved out of `rings`.
    #[inline]
    fn take_log(&mut self, rings: &mut Rings) -> Log {
        if let Some(index) = self.ring_index() {
            return match rings.take(index) {
                Block::Ring(words) => Log::from_ring(Ring::from_parts(self.ring_head(), words)),
                Block::Long(long) => Log::from_long(long),
            };
        }
        Log::from_inline(self.inline_entries())
    }

    /// Returns the entries of a log of at most two, which the slot must hold.
    #[inline]
    fn inline_entries(&self) -> InlineEntries {
        let (small, time_us) = (self.small(), self.time_us());
        let first = Entry { time_us, units: (small & UNITS_MASK) as u32 };
        let len = (small >> (2 * UNITS_BITS)) as u8;
        let second = match len {
            2 => Entry { time_us: time_us + self.wide(), units: (small >> UNITS_BITS & UNITS_MASK) as u32 },
            _ => Entry::default(),
        };
        InlineEntries { len, entries: [first, second] }
    }

    /// Stores a log of at most two entries in the slot, with a lifetime of the limit's window after the newest.
    #[inline]
    fn set_inline_entries(&mut self, InlineEntries { len, entries: [first, second] }: InlineEntries, limit: &Limit) {
        let small = u64::from(first.units) | u64::from(second.units) << UNITS_BITS | u64::from(len) << (2 * UNITS_BITS);
        let apart_us = second.time_us.saturating_sub(first.time_us);
        // The lifetime starts at the newest entry, but the slot's time is that of the first.
        self.set(INLINE, lifetime::code_up(limit.window_us() + apart_us), first.time_us, apart_us, small);
    }

    /// Returns the head of the ring of a longer log, which the slot must hold.
    #[inline]
    fn ring_head(&self) -> RingHead {
        let (small, wide) = (self.small(), self.wide());
        RingHead {
            newest_us: self.time_us(),
            first: (small >> RING_INDEX_BITS) as u32 & ((1 << RING_FIRST_BITS) - 1),
            len: wide as u32 & ((1 << RING_LEN_BITS) - 1),
            total: (wide >> RING_LEN_BITS) as u32,
            is_wide: small >> (RING_INDEX_BITS + RING_FIRST_BITS) & 1 == 1,
        }
    }

    /// Stores a log in the slot. The entries of a longer log move into `rings`.
    ///
    /// Entries that stay never expire earlier than before: a denial under a shorter window does not shorten their
    /// lifetime.
    #[inline]
    fn put_log(&mut self, log: Log, limit: &Limit, rings: &mut Rings) {
        let (place, newest_us) = (self.ring_index(), log.newest_us().unwrap_or(0));
        // The lifetime after the newest entry. If a refund or a clock that went back removes the newest entry, the end
        // moves back by as much. Otherwise the lifetime, which is rounded up, would grow with each such change.
        let lasts_us = self.expires_at_us().saturating_sub(self.newest_us());
        let ends_us = self.expires_at_us().min(newest_us + lasts_us);
        match log.into_parts() {
            LogParts::InlineEntries(few) => {
                self.set_inline_entries(few, limit);
                if let Some(index) = place {
                    rings.free(index);
                }
                // An empty log need not be kept.
                if few.len == 0 {
                    return;
                }
            }
            LogParts::Ring(ring) => {
                let (head, words) = ring.into_parts();
                let index = rings.put(place, Block::Ring(words));
                self.set_ring(index, head, limit);
            }
            LogParts::Long(long) => {
                let head = RingHead {
                    newest_us: long.newest_us(),
                    len: long.len() as u32,
                    total: long.total(),
                    ..RingHead::default()
                };
                let index = rings.put(place, Block::Long(long));
                self.set_ring(index, head, limit);
            }
        }
        self.extend_lifetime_to(ends_us);
    }

    /// Returns the time of the newest entry of the log in the slot.
    fn newest_us(&self) -> u64 {
        match self.kind() {
            INLINE => self.time_us() + self.wide(),
            _ => self.time_us(),
        }
    }

    /// Extends the lifetime of a log or a pair so that it expires no earlier than `ends_us`.
    fn extend_lifetime_to(&mut self, ends_us: u64) {
        if self.expires_at_us() < ends_us {
            self.set_code(lifetime::code_up(ends_us - self.time_us()));
        }
    }

    /// Stores a longer log, whose entries are in the ring with the number `index`.
    ///
    /// Its lifetime is the limit's window after the newest entry.
    #[inline]
    fn set_ring(&mut self, index: u32, head: RingHead, limit: &Limit) {
        let small = u64::from(index)
            | u64::from(head.first) << RING_INDEX_BITS
            | u64::from(head.is_wide) << (RING_INDEX_BITS + RING_FIRST_BITS);
        let wide = u64::from(head.len) | u64::from(head.total) << RING_LEN_BITS;
        self.set(RING, lifetime::code_up(limit.window_us()), head.newest_us, wide, small);
    }

    /// Returns the time from which the slot may be dropped, in microseconds since the epoch.
    ///
    /// From then on the state affects no decision of the limits that used it. That may already be so earlier.
    #[inline]
    pub(super) fn expires_at_us(&self) -> u64 {
        let lifetime_us = match self.kind() {
            BUCKET => lifetime::time_to_leak_us(self.small(), self.code()),
            _ => lifetime::decode(self.code()),
        };
        self.time_us() + lifetime_us
    }

    /// Moves the entries of a longer log from `from` to `to`. Does nothing for other states.
    pub(super) fn move_ring(&mut self, from: &mut Rings, to: &mut Rings) {
        if let Some(ring) = self.ring_index() {
            let moved = to.put(None, from.take(ring));
            self.small = self.small >> RING_INDEX_BITS << RING_INDEX_BITS | u64::from(moved);
        }
    }

    /// Returns the number in [`Rings`] of the ring of a longer log; `None` for other states.
    #[inline]
    pub(super) fn ring_index(&self) -> Option<u32> {
        (self.kind() == RING).then_some(self.small as u32)
    }

    #[inline]
    fn kind(&self) -> u64 {
        self.small >> KIND_SHIFT
    }

    #[inline]
    fn code(&self) -> u8 {
        (self.small >> CODE_SHIFT) as u8
    }

    fn set_code(&mut self, code: u8) {
        self.small = self.small & !(0xff << CODE_SHIFT) | u64::from(code) << CODE_SHIFT;
    }

    #[inline]
    fn small(&self) -> u64 {
        self.small & SMALL_MASK
    }

    #[inline]
    fn time_us(&self) -> u64 {
        self.time & TIME_MASK
    }

    #[inline]
    fn set(&mut self, kind: u64, code: u8, time_us: u64, wide: u64, small: u64) {
        debug_assert!(small <= SMALL_MASK && time_us <= TIME_MASK);
        let header = SlotHeader::new(kind, code, wide);
        (self.small, self.time, self.wide) = (header.small | small, header.time | time_us, header.wide);
    }

    #[inline]
    fn wide(&self) -> u64 {
        (self.small >> WIDE_TOP_SHIFT & 1) << 44 | u64::from(self.wide) << 12 | self.time >> 52
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::WINDOW_US_MAX;

    #[test]
    fn slot_is_half_a_cache_line() {
        assert_eq!(size_of::<Slot>(), 32);
    }

    #[test]
    fn bucket_expires_when_it_is_empty_or_up_to_a_third_later() {
        let now = Timestamp::from_micros(1_700_000_000_123_456);
        for text in ["1/400day", "10000000/400day", "100/min", "3/7ms", "10000000/1ms", "100000/day", "10000000/day"] {
            for algorithm in ["token-bucket", "leaky-bucket"] {
                let limit: Limit = format!("{text} {algorithm}").parse().unwrap();
                for cost in [1, 2, limit.cost_max() / 3, limit.cost_max()] {
                    let mut state = State::unused(&limit);
                    let status = state.charge(&limit, now, cost.clamp(1, limit.cost_max()), true);
                    let slot = Slot::new(CounterHash::new(1, 2, 3), &limit, state, &mut Rings::default());
                    let whole_us = status.reset_after.as_micros().unwrap();
                    let kept_us = slot.expires_at_us() - now.as_micros();
                    assert!(kept_us >= whole_us, "{limit} {cost}: {kept_us} for {whole_us}");
                    assert!(
                        kept_us <= whole_us / 3 * 4 + 2 * lifetime::GRAIN_US_MAX,
                        "{limit} {cost}: {kept_us} for {whole_us}"
                    );
                }
            }
        }
    }

    #[test]
    fn unchanged_bucket_lives_as_long_as_the_slower_limit_requires() {
        let now = Timestamp::from_micros(1_700_000_000_000_000);
        for (quick, slow) in [
            ("7/10s token-bucket", "1/10s token-bucket"),
            ("10/s token-bucket", "10/min token-bucket"),
            ("10/min token-bucket", "9/min token-bucket burst=10000000"),
            // So slow that no coded rate expresses it in the scale of the stored bucket.
            ("10/ms token-bucket", "2/400day token-bucket"),
        ] {
            let [quick, slow]: [Limit; 2] = [quick, slow].map(|text| text.parse().unwrap());
            let mut rings = Rings::default();
            let mut state = State::unused(&quick);
            state.charge(&quick, now, 1, true);
            let mut slot = Slot::new(CounterHash::new(1, 2, 3), &quick, state.clone(), &mut rings);
            let until_us = slot.expires_at_us();
            slot.pack(&slow, state.clone(), &mut rings);
            let longer_us = slot.expires_at_us();
            assert!(longer_us > until_us, "{slow}");
            let leaks_us = state.look(&slow, now, 0).reset_after.as_micros().unwrap();
            assert!(longer_us >= now.as_micros() + leaks_us, "{slow}");
            slot.pack(&quick, state.clone(), &mut rings);
            assert_eq!(slot.expires_at_us(), longer_us, "{quick}");
            assert_eq!(slot.unpack(&mut rings), state, "an unchanged bucket keeps its scale");
        }
    }

    #[test]
    fn every_state_survives_packing() {
        let entry = |time_us, units| Entry { time_us, units };
        let last = (1 << 52) - 1;
        let states = [
            ("7/s sliding", State::Log(Log::default())),
            (
                "7/s sliding",
                State::Log(Log::from_inline(InlineEntries {
                    len: 1,
                    entries: [entry(last, 10_000_000), Entry::default()],
                })),
            ),
            (
                "7/400day",
                State::Log(Log::from_inline(InlineEntries {
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
            (
                "7/s token-bucket",
                State::Bucket(Bucket { time_us: last, level: SMALL_MASK, scale: WINDOW_US_MAX, refunded: 0 }),
            ),
        ];
        let name = CounterHash::new(1, 2, 3);
        for (limit, state) in states {
            let mut rings = Rings::default();
            let mut slot = Slot::new(name, &limit.parse().unwrap(), state.clone(), &mut rings);
            assert!(slot.holds(name));
            assert_eq!(slot.unpack(&mut rings), state);
        }
    }
}
