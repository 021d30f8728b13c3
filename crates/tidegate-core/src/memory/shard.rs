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
use super::slot::Slot;
use super::table::{self, LINE_BYTES, Table};
use crate::algorithm::{Beside, Counter, Packed, RefundedUnits, Rings};
use crate::limit::Limit;
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
pub(super) struct CounterShard {
    /// The counters of single keys.
    table: Table,
    /// The latest time of a decision in this shard.
    latest: Timestamp,
    /// The number of operations until the next reclaiming step.
    ops_to_sweep: u32,
    /// What the slots of both tables have no room for. A bucket with an entry in `refunded` keeps its slot.
    beside: Beside,
    /// The bytes of both tables when they were last measured.
    tables_bytes: usize,
    /// The bytes of this shard that were last reported to the budget.
    bytes_reported: usize,
    /// The place at which the next reclaiming step begins.
    cursor: usize,
    /// The place in the overflow table at which the next reclaiming step begins.
    overflow_cursor: usize,
    /// The overflow counters, which keys without a counter of their own share.
    overflow: Table,
}

/// Where the state of a counter is. Valid until the next insertion, removal, resize or reclaiming step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// In the slot of the key's own counter, with this index.
    Own(usize),
    /// In the slot of an overflow counter, with this index.
    Overflow(usize),
    /// Nowhere: there is no room of any kind, so the new key is denied.
    Nowhere,
}

impl CounterShard {
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

    /// Returns the index of the counter's own slot, or `None` if it has none. The counter may have expired.
    #[inline(always)]
    pub(super) fn find(&self, name: CounterHash) -> Option<usize> {
        self.table.find(name)
    }

    /// Returns the counter with this name in a slot of its own, and its place, or `None` if it has none. The counter may
    /// have expired.
    #[inline(always)]
    pub(super) fn own_counter(&mut self, name: CounterHash) -> Option<(Place, Counter<'_>)> {
        let place = self.table.find(name)?;
        let packed = &mut self.table.slot_mut(place).state;
        Some((Place::Own(place), Counter { packed, name: name.in_table(), beside: &mut self.beside }))
    }

    /// Returns the place of the counter with this name, which may be that of an overflow counter, or `None`.
    pub(super) fn find_anywhere(&self, name: CounterHash) -> Option<Place> {
        self.table.find(name).map(Place::Own).or_else(|| self.overflow.find(name).map(Place::Overflow))
    }

    /// Returns the counter at a place that is still valid, and has this name. `full` is used if the place is
    /// [`Place::Nowhere`]: it becomes a counter of which all units are used.
    #[inline(always)]
    pub(super) fn counter<'a>(
        &'a mut self,
        place: Place,
        name: CounterHash,
        limit: &Limit,
        full: &'a mut Packed,
    ) -> Counter<'a> {
        let packed = match place {
            Place::Own(index) => &mut self.table.slot_mut(index).state,
            Place::Overflow(index) => &mut self.overflow.slot_mut(index).state,
            Place::Nowhere => {
                *full = Packed::default();
                Counter { packed: full, name: name.in_table(), beside: &mut self.beside }.fill(self.latest, limit);
                full
            }
        };
        Counter { packed, name: name.in_table(), beside: &mut self.beside }
    }

    /// Returns the name of the overflow counter that stands for a counter without a slot; `None` if there is none, or
    /// if it has expired. `overflow_name` returns the name of the overflow counter in a scope.
    pub(super) fn overflow_of(&self, overflow_name: impl Fn(OverflowScope) -> CounterHash) -> Option<CounterHash> {
        let is_live = |name: &CounterHash| {
            let slot = self.overflow.find(*name).and_then(|place| self.overflow.get(place));
            slot.is_some_and(|slot| !is_expired(slot, &self.beside, self.latest))
        };
        if self.overflow.len() == 0 {
            return None;
        }
        [OverflowScope::Network, OverflowScope::Limit].into_iter().map(overflow_name).find(is_live)
    }

    /// Finds or adds the counter to use for a key without a slot of its own, and returns its name, and whether it was
    /// added. An added counter that is not charged must be removed again ([`CounterShard::remove_added`]).
    ///
    /// That is an overflow counter that has not expired, a copy of it in a slot of its own if there is room, or an
    /// unused counter. Without any room, there is no counter with the returned name. `overflow_name` returns the name of
    /// the overflow counter in a scope, and `is_used` whether another demand of the check uses it: then it is not used for
    /// this one. Another counter in its place would not have the units that the key has charged before, or charges later.
    ///
    /// The shard must have recorded the time of the decision ([`CounterShard::set_time`]). May grow the table or drop expired
    /// counters to make room, which moves slots.
    #[cold]
    pub(super) fn add(
        &mut self,
        limit: &Limit,
        budget: &Budget,
        name: CounterHash,
        overflow_name: impl Fn(OverflowScope) -> CounterHash,
        is_used: impl Fn(CounterHash) -> bool,
    ) -> (CounterHash, bool) {
        self.ops_to_sweep = 0;
        if let Some(shared) = self.overflow_of(&overflow_name) {
            let has_room = self.has_room_again(budget);
            let (true, Some(index)) = (has_room, self.overflow.find(shared)) else {
                return (if is_used(shared) { name } else { shared }, false);
            };
            let (packed, beside) = (&mut self.overflow.slot_mut(index).state, &mut self.beside);
            let own = Counter { packed, name: shared.in_table(), beside }.copy(self.latest, limit, name.in_table());
            self.table.insert(Slot::new(name, own));
            return (name, true);
        }
        // It must not be dropped as expired before the decision.
        let mut unused = Packed::default();
        unused.set(0, self.latest.as_micros(), 0, 0);
        if self.make_room(budget) {
            self.table.insert(Slot::new(name, unused));
            return (name, true);
        }
        let (taken, max) = (self.overflow.len(), budget.overflow_counters_max());
        let scope = if taken < max - max / 4 { OverflowScope::Network } else { OverflowScope::Limit };
        let shared = overflow_name(scope);
        if taken >= max || is_used(shared) {
            return (name, false);
        }
        // An expired one may still be stored.
        if let Some(place) = self.overflow.find(shared) {
            remove(&mut self.overflow, place, &mut self.beside);
        }
        self.overflow.insert(Slot::new(shared, unused));
        (shared, true)
    }

    /// Removes a counter that [`CounterShard::add`] has added, because it was not charged. Other slots may move.
    pub(super) fn remove_added(&mut self, name: CounterHash) {
        match self.find_anywhere(name) {
            Some(Place::Own(index)) => remove(&mut self.table, index, &mut self.beside),
            Some(Place::Overflow(index)) => remove(&mut self.overflow, index, &mut self.beside),
            _ => {}
        }
    }

    /// Completes a decision: reclaims expired slots if it is time to, and reports changed memory to the budget.
    ///
    /// It is time after every 64th decision, and after each one that added a counter or used an overflow counter.
    /// Reclaiming moves slots.
    #[inline(always)]
    pub(super) fn finish(&mut self, budget: &Budget) {
        let is_time = self.ops_to_sweep == 0;
        self.ops_to_sweep = self.ops_to_sweep.wrapping_sub(1);
        if is_time {
            self.reclaim();
        }
        self.report(budget);
    }

    #[cold]
    fn reclaim(&mut self) {
        self.ops_to_sweep = SWEEP_EVERY_OPS - 1;
        self.sweep(SWEEP_SLOTS);
        self.sweep_overflow(SWEEP_SLOTS);
        if let Some(refunded) = &mut self.beside.refunded {
            refunded.drop_expired(self.latest);
            if refunded.is_empty() {
                self.beside.refunded = None;
            }
        }
        if self.beside.rings.is_sparse(RINGS_WORTH_BYTES.max(self.tables_bytes / 8)) {
            self.gather_rings();
        }
        self.measure_tables();
    }

    /// Removes the counter with this name if it has a slot of its own, and reports the freed memory to the budget.
    ///
    /// Other slots may move. Overflow counters are not removed. The count of refunded units becomes 0.
    pub(super) fn remove(&mut self, name: CounterHash, budget: &Budget) {
        if let Some(refunded) = &mut self.beside.refunded {
            refunded.reset(name.in_table());
        }
        if let Some(place) = self.table.find(name) {
            remove(&mut self.table, place, &mut self.beside);
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
        self.beside.refunded.is_some()
    }

    #[cfg(test)]
    pub(super) fn rings_bytes(&self) -> usize {
        self.beside.rings.heap_bytes()
    }

    fn has_room(&self) -> bool {
        self.table.len() < self.table.capacity()
    }

    /// Returns whether there is room for one more counter, after growing the table if the budget allows it.
    ///
    /// Unlike [`CounterShard::make_room`], does not look for expired counters, so it is cheap while there is no room.
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
        self.cursor = drop_expired(&mut self.table, self.cursor, places, self.latest, &mut self.beside);
        if self.cursor >= self.table.places() {
            self.cursor = 0;
            if self.table.lines() > 32 && self.table.len() < self.table.capacity() / 8 {
                self.resize(table::lines_for(2 * self.table.len()));
            }
        }
    }

    /// Drops the overflow counters in the next `places` slots that have expired at `latest`. No [`Place`] may be in use.
    ///
    /// Begins where the last call ended, and stops at the end of the table; the next call then begins at its start.
    /// Frees the overflow table if it is empty, so the caller must call [`CounterShard::measure_tables`] afterwards.
    fn sweep_overflow(&mut self, places: usize) {
        let (overflow, cursor) = (&mut self.overflow, self.overflow_cursor);
        self.overflow_cursor = drop_expired(overflow, cursor, places, self.latest, &mut self.beside);
        if self.overflow_cursor >= overflow.places() {
            self.overflow_cursor = 0;
        }
        if overflow.len() == 0 {
            *overflow = Table::default();
        }
    }

    /// Moves all rings to new memory without gaps, and frees the old memory.
    #[cold]
    fn gather_rings(&mut self) {
        let mut gathered = Rings::default();
        for slot in self.table.slots_mut().chain(self.overflow.slots_mut()) {
            self.beside.move_rings(&mut slot.state, &mut gathered);
        }
        self.beside.rings = gathered;
    }

    /// Updates `tables_bytes` to the sizes of both tables. Must be called after one of them was replaced or resized.
    fn measure_tables(&mut self) {
        self.tables_bytes = self.table.heap_bytes() + self.overflow.heap_bytes();
    }

    /// Reports this shard's memory to the budget if it has changed since the last report.
    #[inline]
    pub(super) fn report(&mut self, budget: &Budget) {
        let bytes = self.tables_bytes + self.beside.heap_bytes();
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

fn remove(table: &mut Table, place: usize, beside: &mut Beside) {
    beside.free(table.remove(place).state);
}

/// Returns whether the counter in a slot affects no decision and no refund at `now`.
fn is_expired(slot: &Slot, beside: &Beside, now: Timestamp) -> bool {
    let is_counted = |refunded: &RefundedUnits| refunded.expires_at_us(slot.name_in_table()) > now.as_micros();
    slot.state.ends_at_us() <= now.as_micros() && !beside.refunded.as_deref().is_some_and(is_counted)
}

/// Drops the counters expired at `now` in the next `places` slots from index `cursor`.
///
/// Returns the index to continue from. The result is at least `table.places()` at the end of the table.
fn drop_expired(table: &mut Table, cursor: usize, places: usize, now: Timestamp, beside: &mut Beside) -> usize {
    let (mut place, end) = (cursor, (cursor + places).min(table.places()));
    // A slot that moves into a gap is inspected, too. The bound keeps the loop finite.
    for _ in 0..2 * places {
        if place >= end {
            break;
        }
        match table.get(place) {
            Some(slot) if is_expired(slot, beside, now) => remove(table, place, beside),
            _ => place += 1,
        }
    }
    place
}
