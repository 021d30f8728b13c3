//! One shard: a table of slots, the rings of its long logs, and its share of the memory.
//!
//! ```text
//!   is there a slot for this key? ── yes ──▶ that is its counter
//!        │ no
//!   does a live overflow counter stand for it? ── yes ──▶ is there room again?
//!        │ no                                                  │ no ──▶ that is its counter
//!        │                                                     │ yes ─▶ a slot of its own, with a copy of that state
//!   is there room? (spare place, else a larger table within the budget, else what has expired goes)
//!        │ yes ──▶ a slot of its own        │ no ──▶ an overflow counter, shared by network or hash, while there are any
//! ```
//!
//! A key that used an overflow counter may have charged all units in it. When there is room again, the key gets a slot
//! with a copy of that state: an empty one would give it its quota twice. The overflow counter is not charged by it any
//! more, so it expires.
//!
//! **Reclaiming.** Every insertion and every 64th operation inspects the next few slots of the table and drops expired
//! ones. There is no pause and no thread.

use super::budget::Budget;
use super::counter_hash::CounterHash;
use super::overflow::OverflowScope;
use super::refunded::RefundedUnits;
use super::rings::Rings;
use super::slot::Slot;
use super::table::{self, LINE_BYTES, Table};
use crate::algorithm::{Log, State};
use crate::limit::{Limit, Machine};
use crate::time::{Clock, Timestamp};

/// The number of slots that one reclaiming step inspects: eight consecutive cache lines.
const SWEEP_SLOTS: usize = 16;
/// The number of slots to inspect if there is no room for a new key.
const SWEEP_SLOTS_WHEN_FULL: usize = 64;
/// The number of operations on existing keys between two reclaiming steps.
const SWEEP_EVERY_OPS: u32 = 64;

/// The least that moving rings must free, in bytes; also at least an eighth of the tables, which are walked for it.
const RINGS_WORTH_BYTES: usize = 1_024;

/// A part of the store behind one lock: the counters of the subjects whose hash selects it.
///
/// The fields that every check needs come first, so that they share a cache line with the lock.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Shard {
    /// The counters of single keys.
    table: Table,
    /// The latest time of a decision in this shard.
    latest: Timestamp,
    /// The number of operations until the next reclaiming step.
    ops_to_sweep: u32,
    /// The refunded units of buckets; `None` while there are none. A bucket with an entry keeps its slot.
    refunded: Option<Box<RefundedUnits>>,
    /// The entries of the longer logs in both tables.
    rings: Rings,
    /// The bytes of both tables, and of `refunded`, when they were last measured.
    tables_bytes: usize,
    /// The bytes of this shard that were last reported to the budget.
    bytes_reported: usize,
    /// The place at which the next reclaiming step begins.
    cursor: usize,
    /// The place in the overflow table at which the next reclaiming step begins.
    overflow_cursor: usize,
    /// The number of new counters for which room is reserved and which are not inserted yet.
    rooms_reserved: usize,
    /// The overflow counters, which keys without a counter of their own share.
    overflow: Table,
}

/// Where the state of a counter was taken from, so that it can be put back without another search.
///
/// Valid until the next insertion, removal, resize or reclaiming step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SlotLocation {
    /// In the slot of the key's own counter, with this index.
    Table(usize),
    /// In the slot of an overflow counter, with this index.
    Overflow(usize),
    /// Not stored yet; room is reserved in the table.
    NewInTable,
    /// Not stored yet; room is reserved in the table. A copy of an overflow counter, stored only if it is charged.
    Promoted,
    /// Not stored yet; it will be an overflow counter.
    NewInOverflow,
    /// Never stored: there is no room of any kind, so the new key is denied.
    Nowhere,
}

impl SlotLocation {
    /// Returns whether the counter is not stored yet: not in [`SlotLocation::Table`] or [`SlotLocation::Overflow`].
    pub(super) fn is_new(self) -> bool {
        matches!(
            self,
            SlotLocation::NewInTable | SlotLocation::Promoted | SlotLocation::NewInOverflow | SlotLocation::Nowhere
        )
    }
}

impl Shard {
    /// Returns the time at which to decide a check whose caller has read `read` from the clock.
    ///
    /// That is `read`, unless the shard has decided at a later time: another check was faster to take the lock, or the
    /// clock went back. Then the clock is read again, by [`Clock::now_at_least`]. Does not record the time.
    #[inline]
    pub(super) fn decision_time(&self, read: Timestamp, clock: &impl Clock) -> Timestamp {
        if read < self.latest { read_again(clock, self.latest) } else { read }
    }

    /// Records `now` as the time of the latest decision.
    #[inline]
    pub(super) fn set_time(&mut self, now: Timestamp) {
        self.latest = now;
    }

    /// Returns the slot index of the counter with this name, or `None` if it has no slot of its own.
    ///
    /// The counter may have expired. The index is valid until the next insertion, removal, resize or reclaiming step.
    #[inline(always)]
    pub(super) fn find(&self, name: CounterHash) -> Option<usize> {
        self.table.find(name)
    }

    /// Returns the slot of the counter with this name, and the shard's rings; `None` if it has no slot of its own.
    ///
    /// The counter may have expired.
    #[inline(always)]
    pub(super) fn slot_of(&mut self, name: CounterHash) -> Option<(&mut Slot, &mut Rings)> {
        Some((self.table.find_mut(name)?, &mut self.rings))
    }

    /// Returns the slot with an index that [`Shard::find`] returned and that is still valid, and the shard's rings.
    #[inline(always)]
    pub(super) fn slot_at(&mut self, place: usize) -> (&mut Slot, &mut Rings) {
        (self.table.slot_mut(place), &mut self.rings)
    }

    /// Returns whether refunded units of the bucket with this name are counted, so that it cannot be decided in its slot.
    #[inline(always)]
    pub(super) fn counts_refunds_of(&self, name: CounterHash) -> bool {
        self.refunded.as_ref().is_some_and(|refunded| refunded.contains(name.in_table()))
    }

    /// Returns whether a refund on the bucket with this name can be counted: it is counted already, or there is memory.
    pub(super) fn may_count_refunds_of(&self, name: CounterHash, budget: &Budget) -> bool {
        let bytes = self.refunded.as_ref().map_or(0, |refunded| refunded.bytes_to_grow());
        self.counts_refunds_of(name) || budget.allows_growth(bytes.max(RefundedUnits::FIRST_BYTES))
    }

    /// Returns `state` with the count of refunded units of the counter with this name, if it is a bucket.
    #[inline]
    fn with_refunds(&self, name: CounterHash, mut state: State) -> State {
        if let (State::Bucket(bucket), Some(refunded)) = (&mut state, &self.refunded) {
            bucket.refunded = refunded.units(name.in_table());
        }
        state
    }

    /// Stores the count of refunded units of a bucket, whose state is about to be stored in a slot.
    #[inline]
    fn keep_refunds(&mut self, name: CounterHash, limit: &Limit, state: &State) {
        if let (State::Bucket(bucket), Machine::Bucket(shape)) = (state, limit.machine())
            && (bucket.refunded > 0 || self.counts_refunds_of(name))
        {
            let refunded = self.refunded.get_or_insert_default();
            match bucket.refunded {
                0 => refunded.reset(name.in_table()),
                units => refunded.set(name.in_table(), units, bucket.forgets_refunds_at_us(shape)),
            }
            self.measure_tables();
        }
    }

    /// Takes the state of the counter with this name out of its slot; `None` if it has no slot of its own.
    ///
    /// The counter may have expired. [`Shard::put`] or [`Shard::put_back`] must follow.
    #[inline]
    pub(super) fn take_known(&mut self, name: CounterHash) -> Option<(SlotLocation, State)> {
        let place = self.table.find(name)?;
        let state = self.table.slot_mut(place).unpack(&mut self.rings);
        Some((SlotLocation::Table(place), self.with_refunds(name, state)))
    }

    /// Returns the state to use for a counter without a slot of its own, with its location and its name there.
    ///
    /// That is an overflow counter that has not expired, a copy of it if `may_promote` and there is room for a slot, or
    /// a new state. Without any room the new state is full, so that it denies. `overflow_name` returns the name of the
    /// overflow counter in a scope.
    ///
    /// The shard must have recorded the time of the decision ([`Shard::set_time`]). May grow the table or drop expired
    /// counters to make room, which moves slots, and reserves that room. [`Shard::put`] or [`Shard::put_back`] must
    /// follow, with the returned location and name.
    #[cold]
    pub(super) fn take_unknown(
        &mut self,
        limit: &Limit,
        budget: &Budget,
        name: CounterHash,
        may_promote: bool,
        overflow_name: impl Fn(OverflowScope) -> CounterHash,
    ) -> (SlotLocation, State, CounterHash) {
        if self.overflow.len() > 0 {
            for scope in [OverflowScope::Network, OverflowScope::Limit] {
                let shared = overflow_name(scope);
                let Some((place, state)) = self.take_overflow(shared) else { continue };
                let place = SlotLocation::Overflow(place);
                self.ops_to_sweep = 0;
                if !may_promote || !self.has_room_again(budget) {
                    return (place, state, shared);
                }
                let own = state.condensed(limit, self.latest);
                self.put_back(place, state);
                self.rooms_reserved += 1;
                return (SlotLocation::Promoted, own, name);
            }
        }
        if self.make_room(budget) {
            self.rooms_reserved += 1;
            return (SlotLocation::NewInTable, State::unused(limit), name);
        }
        let (taken, max) = (self.overflow.len(), budget.overflow_counters_max());
        let scope = if taken < max - max / 4 { OverflowScope::Network } else { OverflowScope::Limit };
        match taken < max {
            true => (SlotLocation::NewInOverflow, State::unused(limit), overflow_name(scope)),
            false => (SlotLocation::Nowhere, State::full(limit, self.latest), name),
        }
    }

    /// Takes the state of the overflow counter with this name out of its slot, and returns it with the slot's index.
    ///
    /// Returns `None` if there is none, or if it has expired.
    fn take_overflow(&mut self, name: CounterHash) -> Option<(usize, State)> {
        let place = self.overflow.find(name)?;
        let slot = self.overflow.slot_mut(place);
        if is_expired(slot, self.refunded.as_deref(), self.latest) {
            return None;
        }
        let state = slot.unpack(&mut self.rings);
        Some((place, self.with_refunds(name, state)))
    }

    /// Puts back a state that was taken from `place` and not changed. Its lifetime stays as it is.
    ///
    /// A new state is dropped, and the room that was reserved for it is released.
    pub(super) fn put_back(&mut self, place: SlotLocation, state: State) {
        let slot = match place {
            SlotLocation::Table(place) => Some(self.table.slot_mut(place)),
            SlotLocation::Overflow(place) => Some(self.overflow.slot_mut(place)),
            SlotLocation::NewInTable | SlotLocation::Promoted => {
                self.rooms_reserved -= 1;
                None
            }
            SlotLocation::NewInOverflow | SlotLocation::Nowhere => None,
        };
        if let (Some(slot), State::Log(log)) = (slot, state) {
            slot.put_back(log, &mut self.rings);
        }
    }

    /// Stores a state after a change: in the slot from which it was taken, or in a new one.
    ///
    /// `place` and `name` must be those with which the state was taken, and the state must belong to the limit's state
    /// machine. A new state is not stored if it is unused, or if `place` is [`SlotLocation::Nowhere`]; the room that
    /// was reserved for it is released in any case. An insertion may move slots, so states that have one must be put
    /// first. The next [`Shard::finish`] then reclaims.
    ///
    /// # Panics
    /// Panics if the state belongs to another state machine.
    #[inline]
    pub(super) fn put(&mut self, place: SlotLocation, name: CounterHash, limit: &Limit, state: State) {
        if place != SlotLocation::Nowhere {
            self.keep_refunds(name, limit, &state);
        }
        let is_own = matches!(place, SlotLocation::Table(_) | SlotLocation::NewInTable | SlotLocation::Promoted);
        let table = if is_own { &mut self.table } else { &mut self.overflow };
        match place {
            SlotLocation::Table(place) | SlotLocation::Overflow(place) => {
                let slot = table.slot_mut(place);
                debug_assert!(slot.holds(name), "its place is still its own");
                slot.pack(limit, state, &mut self.rings);
                return;
            }
            SlotLocation::NewInTable | SlotLocation::Promoted => self.rooms_reserved -= 1,
            SlotLocation::Nowhere => return,
            SlotLocation::NewInOverflow => {
                // An expired one may still be stored.
                if let Some(place) = table.find(name) {
                    remove(table, place, &mut self.rings);
                }
            }
        }
        if !state.is_unused() {
            table.insert(Slot::new(name, limit, state, &mut self.rings));
            self.ops_to_sweep = 0;
        }
    }

    /// Completes a decision: reclaims expired slots if it is time to, and reports changed memory to the budget.
    ///
    /// Reclaiming moves slots and rings, so all states must have been put back.
    #[inline]
    pub(super) fn finish(&mut self, budget: &Budget) {
        self.finish_in_slot(budget);
        self.report(budget);
    }

    /// Completes a decision that allocated and freed no memory, or whose caller has called [`Shard::report`].
    ///
    /// Reclaims expired slots after every 64th decision, and after each one that inserted a counter or used an overflow
    /// counter. Reports the memory only then.
    /// Reclaiming moves slots and rings, so all states must have been put back.
    #[inline(always)]
    pub(super) fn finish_in_slot(&mut self, budget: &Budget) {
        let is_time = self.ops_to_sweep == 0;
        self.ops_to_sweep = self.ops_to_sweep.wrapping_sub(1);
        if is_time {
            self.reclaim(budget);
        }
    }

    #[cold]
    fn reclaim(&mut self, budget: &Budget) {
        self.ops_to_sweep = SWEEP_EVERY_OPS - 1;
        self.sweep(SWEEP_SLOTS);
        self.sweep_overflow(SWEEP_SLOTS);
        if let Some(refunded) = &mut self.refunded {
            refunded.drop_expired(self.latest);
            if refunded.is_empty() {
                self.refunded = None;
            }
        }
        if self.rings.is_sparse(RINGS_WORTH_BYTES.max(self.tables_bytes / 8)) {
            self.gather_rings();
        }
        self.measure_tables();
        self.report(budget);
    }

    /// Removes the counter with this name if it has a slot of its own, and reports the freed memory to the budget.
    ///
    /// Other slots may move. Overflow counters are not removed. The count of refunded units becomes 0.
    pub(super) fn remove(&mut self, name: CounterHash, budget: &Budget) {
        if let Some(refunded) = &mut self.refunded {
            refunded.reset(name.in_table());
        }
        if let Some(place) = self.table.find(name) {
            remove(&mut self.table, place, &mut self.rings);
            self.report(budget);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.table.len() + self.overflow.len()
    }

    /// Returns the number of overflow counters, including expired ones that were not reclaimed yet.
    pub(super) fn overflow_len(&self) -> usize {
        self.overflow.len()
    }

    /// Returns whether refunded units of any bucket are counted.
    #[cfg(test)]
    pub(super) fn counts_refunds(&self) -> bool {
        self.refunded.is_some()
    }

    #[cfg(test)]
    pub(super) fn rings_bytes(&self) -> usize {
        self.rings.heap_bytes()
    }

    fn has_room(&self) -> bool {
        self.table.len() + self.rooms_reserved < self.table.capacity()
    }

    /// Returns whether there is room for one more counter, after growing the table if the budget allows it.
    ///
    /// Unlike [`Shard::make_room`], does not look for expired counters, so it is cheap while there is no room.
    fn has_room_again(&mut self, budget: &Budget) -> bool {
        self.has_room() || self.grow(budget)
    }

    /// Makes room for one more counter: grows the table if the budget allows it, else drops some expired counters.
    ///
    /// Returns whether there is room.
    fn make_room(&mut self, budget: &Budget) -> bool {
        if self.has_room_again(budget) {
            return true;
        }
        self.sweep(SWEEP_SLOTS_WHEN_FULL);
        self.has_room()
    }

    /// Grows the table by half, or by what the budget allows if that is more than an eighth.
    ///
    /// Returns whether it has grown and now has room for one more counter.
    fn grow(&mut self, budget: &Budget) -> bool {
        let lines = self.table.lines();
        let allowed = budget.table_bytes_max(self.table.heap_bytes()) / LINE_BYTES;
        let larger = table::larger(lines).min(allowed);
        if larger <= lines + lines / 8 {
            return false;
        }
        self.resize(larger);
        self.report(budget);
        self.has_room()
    }

    fn resize(&mut self, lines: usize) {
        self.table.resize(lines);
        self.cursor = 0;
        self.measure_tables();
    }

    /// Drops the counters in the next `places` slots that have expired at `latest`. Begins where the last call ended.
    ///
    /// Other slots may move. Stops at the end of the table. The next call then begins at its start, and a table of more
    /// than 32 lines of which less than an eighth is in use shrinks.
    fn sweep(&mut self, places: usize) {
        let (table, refunded) = (&mut self.table, self.refunded.as_deref());
        self.cursor = drop_expired(table, self.cursor, places, self.latest, (&mut self.rings, refunded));
        if self.cursor >= self.table.places() {
            self.cursor = 0;
            if self.table.lines() > 32 && self.table.len() < self.table.capacity() / 8 {
                self.resize(table::lines_for(2 * self.table.len()));
            }
        }
    }

    /// Drops the overflow counters in the next `places` slots that have expired at `latest`. No [`SlotLocation`] may be
    /// in use.
    ///
    /// Begins where the last call ended, and stops at the end of the table; the next call then begins at its start.
    /// Frees the overflow table if it is empty, so the caller must call [`Shard::measure_tables`] afterwards.
    fn sweep_overflow(&mut self, places: usize) {
        let (overflow, cursor) = (&mut self.overflow, self.overflow_cursor);
        let others = (&mut self.rings, self.refunded.as_deref());
        self.overflow_cursor = drop_expired(overflow, cursor, places, self.latest, others);
        if self.overflow_cursor >= overflow.places() {
            self.overflow_cursor = 0;
        }
        if overflow.len() == 0 {
            *overflow = Table::default();
        }
    }

    /// Moves all rings to new memory without gaps, and frees the old memory. No ring may be taken out.
    #[cold]
    fn gather_rings(&mut self) {
        let mut scattered = std::mem::take(&mut self.rings);
        for slot in self.table.slots_mut().chain(self.overflow.slots_mut()) {
            slot.move_ring(&mut scattered, &mut self.rings);
        }
    }

    /// Returns whether the budget allows `log` to allocate memory for another entry.
    pub(super) fn log_may_grow(&self, log: &Log, budget: &Budget) -> bool {
        budget.allows_growth(log.moved_bytes() + self.rings.moving_bytes())
    }

    /// Updates `tables_bytes` to the sizes of both tables and of the counts of refunded units. Must be called after one
    /// of them was replaced or resized.
    fn measure_tables(&mut self) {
        let refunded = self.refunded.as_ref().map_or(0, |refunded| refunded.heap_bytes());
        self.tables_bytes = self.table.heap_bytes() + self.overflow.heap_bytes() + refunded;
    }

    /// Reports this shard's memory to the budget if it has changed since the last report.
    #[inline]
    pub(super) fn report(&mut self, budget: &Budget) {
        let bytes = self.tables_bytes + self.rings.heap_bytes();
        if bytes != self.bytes_reported {
            budget.change(self.bytes_reported, bytes);
            self.bytes_reported = bytes;
        }
    }
}

#[cold]
fn read_again(clock: &impl Clock, latest: Timestamp) -> Timestamp {
    clock.now_at_least(latest)
}

fn remove(table: &mut Table, place: usize, rings: &mut Rings) {
    if let Some(ring) = table.remove(place).ring_index() {
        rings.free(ring);
    }
}

/// Returns whether the counter in a slot affects no decision and no refund at `now`.
fn is_expired(slot: &Slot, refunded: Option<&RefundedUnits>, now: Timestamp) -> bool {
    let is_counted = |refunded: &RefundedUnits| refunded.expires_at_us(slot.name_in_table()) > now.as_micros();
    slot.expires_at_us() <= now.as_micros() && !refunded.is_some_and(is_counted)
}

/// Drops the counters expired at `now` in the next `places` slots from index `cursor`.
///
/// Returns the index to continue from. A dropped log's ring is freed in `rings`. The result is at least
/// `table.places()` at the end of the table.
fn drop_expired(
    table: &mut Table,
    cursor: usize,
    places: usize,
    now: Timestamp,
    (rings, refunded): (&mut Rings, Option<&RefundedUnits>),
) -> usize {
    let (mut place, end) = (cursor, (cursor + places).min(table.places()));
    // A slot that moves into a gap is inspected, too. The bound keeps the loop finite.
    for _ in 0..2 * places {
        if place >= end {
            break;
        }
        match table.get(place) {
            Some(slot) if is_expired(slot, refunded, now) => remove(table, place, rings),
            _ => place += 1,
        }
    }
    place
}
