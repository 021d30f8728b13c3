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
//! A key that was sent to an overflow counter may have spent up to all that this counter holds. When there is room
//! again, it parts with a copy of that state: a fresh one would give it its quota twice. Nobody charges the
//! overflow counter meanwhile, so that it expires, and then everybody starts afresh.
//!
//! **Reclaiming.** Every insertion looks at a few slots further along the table, and so does every
//! sixty-fourth operation; whatever has expired goes. There is no sweep that pauses and no thread.

use super::budget::Budget;
use super::counter_hash::CounterHash;
use super::overflow::OverflowScope;
use super::rings::Rings;
use super::slot::Slot;
use super::table::{self, LINE_BYTES, Table};
use crate::algorithm::{Log, State};
use crate::limit::Limit;
use crate::time::{Clock, Timestamp};

/// How many slots one reclaiming step looks at: eight cache lines in a row.
const SWEEP_SLOTS: usize = 16;
/// How many more when there is no room for a newcomer.
const SWEEP_SLOTS_WHEN_FULL: usize = 64;
/// Every so many operations on known keys take a reclaiming step too.
const SWEEP_EVERY_OPS: u32 = 64;

/// Less is not worth moving rings for, nor is less than an eighth of what must be walked over.
const RINGS_WORTH_BYTES: usize = 1_024;

/// In the order of how often a field is touched: what every check needs shares a cache line with the lock.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Shard {
    table: Table,
    /// The latest time this shard has decided at.
    latest: Timestamp,
    /// So many operations until the next reclaiming step.
    ops_to_sweep: u32,
    rings: Rings,
    /// What the tables took when they were last changed.
    tables_bytes: usize,
    /// What the budget was last told about this shard.
    bytes_reported: usize,
    /// Where the next reclaiming step begins.
    cursor: usize,
    /// The same for the overflow counters.
    overflow_cursor: usize,
    /// Newcomers that were promised room and have not come in yet.
    rooms_kept: usize,
    overflow: Table,
}

/// Where a counter was found, so that it can be put back without another search. Valid until the
/// next insertion or reclaiming step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SlotLocation {
    Table(usize),
    Overflow(usize),
    /// Nowhere yet; there is room kept for it in the table.
    NewInTable,
    /// The same, but it holds a copy of an overflow counter's state: kept only if it is charged.
    Promoted,
    /// Nowhere yet; it will be an overflow counter.
    NewInOverflow,
    /// Nowhere: there is no room of any kind, so the newcomer is refused.
    Nowhere,
}

impl SlotLocation {
    /// Whether putting it there is an insertion.
    pub(super) fn is_new(self) -> bool {
        matches!(
            self,
            SlotLocation::NewInTable | SlotLocation::Promoted | SlotLocation::NewInOverflow | SlotLocation::Nowhere
        )
    }
}

impl Shard {
    /// The time to decide at: `read`, unless the shard has already seen later. Then the clock is
    /// asked again, under the shard's lock: either the caller was merely overtaken between reading the
    /// clock and getting here, or the clock really went back.
    #[inline]
    pub(super) fn arrive(&self, read: Timestamp, clock: &impl Clock) -> Timestamp {
        if read < self.latest { ask_again(clock, self.latest) } else { read }
    }

    /// From here on the shard has seen `now`.
    #[inline]
    pub(super) fn set_time(&mut self, now: Timestamp) {
        self.latest = now;
    }

    /// Where the counter of that name is, if it has a slot of its own.
    #[inline(always)]
    pub(super) fn find(&self, name: CounterHash) -> Option<usize> {
        self.table.find(name)
    }

    /// The slot of a counter that has one of its own, and the entries of the long logs.
    #[inline(always)]
    pub(super) fn slot_of(&mut self, name: CounterHash) -> Option<(&mut Slot, &mut Rings)> {
        Some((self.table.find_mut(name)?, &mut self.rings))
    }

    /// The slot at a place that [`Shard::find`] told, and the entries of the long logs.
    #[inline(always)]
    pub(super) fn slot_at(&mut self, place: usize) -> (&mut Slot, &mut Rings) {
        (self.table.slot_mut(place), &mut self.rings)
    }

    /// Takes the state of a counter that has a slot of its own. [`Shard::put`] must follow.
    #[inline]
    pub(super) fn take_known(&mut self, name: CounterHash) -> Option<(SlotLocation, State)> {
        let place = self.table.find(name)?;
        Some((SlotLocation::Table(place), self.table.slot_mut(place).unpack(&mut self.rings)))
    }

    /// Takes the state of a counter without a slot of its own: its overflow counter if that is live, else a
    /// fresh one. [`Shard::put`] must follow, for a fresh one under the name answered here.
    #[cold]
    pub(super) fn take_unknown(
        &mut self,
        limit: &Limit,
        budget: &Budget,
        name: CounterHash,
        may_part: bool,
        overflow_name: impl Fn(OverflowScope) -> CounterHash,
    ) -> (SlotLocation, State, CounterHash) {
        if self.overflow.len() > 0 {
            for scope in [OverflowScope::Network, OverflowScope::Limit] {
                let shared = overflow_name(scope);
                let Some((place, state)) = self.take_overflow(shared) else { continue };
                let place = SlotLocation::Overflow(place);
                self.ops_to_sweep = 0;
                if !may_part || !self.has_room_again(budget) {
                    return (place, state, shared);
                }
                let own = state.condensed(limit, self.latest);
                self.put_back(place, state);
                self.rooms_kept += 1;
                return (SlotLocation::Promoted, own, name);
            }
        }
        if self.make_room(budget) {
            self.rooms_kept += 1;
            return (SlotLocation::NewInTable, State::unused(limit), name);
        }
        let (taken, max) = (self.overflow.len(), budget.overflow_counters_max());
        let scope = if taken < max - max / 4 { OverflowScope::Network } else { OverflowScope::Limit };
        match taken < max {
            true => (SlotLocation::NewInOverflow, State::unused(limit), overflow_name(scope)),
            false => (SlotLocation::Nowhere, State::full(limit, self.latest), name),
        }
    }

    /// The overflow counter of that name, unless it has expired.
    fn take_overflow(&mut self, name: CounterHash) -> Option<(usize, State)> {
        let place = self.overflow.find(name)?;
        let slot = self.overflow.slot_mut(place);
        let is_live = slot.expires_at_us() > self.latest.as_micros();
        is_live.then(|| (place, slot.unpack(&mut self.rings)))
    }

    /// Puts back a state that was only looked at; how long it lives is not for whoever looked to say.
    pub(super) fn put_back(&mut self, place: SlotLocation, state: State) {
        let slot = match place {
            SlotLocation::Table(place) => Some(self.table.slot_mut(place)),
            SlotLocation::Overflow(place) => Some(self.overflow.slot_mut(place)),
            SlotLocation::NewInTable | SlotLocation::Promoted => {
                self.rooms_kept -= 1;
                None
            }
            SlotLocation::NewInOverflow | SlotLocation::Nowhere => None,
        };
        if let (Some(slot), State::Log(log)) = (slot, state) {
            slot.put_back(log, &mut self.rings);
        }
    }

    /// Puts a state back, or in for the first time. A fresh one that stayed unused takes no place.
    #[inline]
    pub(super) fn put(&mut self, place: SlotLocation, name: CounterHash, limit: &Limit, state: State) {
        let is_own = matches!(place, SlotLocation::Table(_) | SlotLocation::NewInTable | SlotLocation::Promoted);
        let table = if is_own { &mut self.table } else { &mut self.overflow };
        match place {
            SlotLocation::Table(place) | SlotLocation::Overflow(place) => {
                let slot = table.slot_mut(place);
                debug_assert!(slot.is(name), "its place is still its own");
                slot.pack(limit, state, &mut self.rings);
                return;
            }
            SlotLocation::NewInTable | SlotLocation::Promoted => self.rooms_kept -= 1,
            SlotLocation::Nowhere => return,
            SlotLocation::NewInOverflow => {
                // One that has expired may still stand there.
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

    /// After a decision: reclaims a little, and tells the budget what has changed.
    #[inline]
    pub(super) fn finish(&mut self, budget: &Budget) {
        self.finish_in_slot(budget);
        self.report(budget);
    }

    /// After a decision that changed nothing but a slot.
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
        if self.rings.is_sparse(RINGS_WORTH_BYTES.max(self.tables_bytes / 8)) {
            self.gather_rings();
        }
        self.measure_tables();
        self.report(budget);
    }

    /// Forgets a counter.
    pub(super) fn remove(&mut self, name: CounterHash, budget: &Budget) {
        if let Some(place) = self.table.find(name) {
            remove(&mut self.table, place, &mut self.rings);
            self.report(budget);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.table.len() + self.overflow.len()
    }

    /// Overflow counters, expired ones that were not reclaimed yet included.
    pub(super) fn overflow_len(&self) -> usize {
        self.overflow.len()
    }

    #[cfg(test)]
    pub(super) fn rings_bytes(&self) -> usize {
        self.rings.heap_bytes()
    }

    fn has_room(&self) -> bool {
        self.table.len() + self.rooms_kept < self.table.capacity()
    }

    /// Whether those who share overflow counters may part: cheap to ask while there is no room.
    fn has_room_again(&mut self, budget: &Budget) -> bool {
        self.has_room() || self.grow(budget)
    }

    /// Whether the table can take one more without breaking the budget; makes it so if possible.
    fn make_room(&mut self, budget: &Budget) -> bool {
        if self.has_room_again(budget) {
            return true;
        }
        self.sweep(SWEEP_SLOTS_WHEN_FULL);
        self.has_room()
    }

    /// Moves to a table that is larger by half, or by what the budget allows if that is worth the move.
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

    /// Drops what has expired among the next few places; after a whole round of a table that has become
    /// far too large, gives memory back.
    fn sweep(&mut self, places: usize) {
        self.cursor = drop_expired(&mut self.table, self.cursor, places, self.latest, &mut self.rings);
        if self.cursor >= self.table.places() {
            self.cursor = 0;
            if self.table.lines() > 32 && self.table.len() < self.table.capacity() / 8 {
                self.resize(table::lines_for(2 * self.table.len()));
            }
        }
    }

    /// The same for overflow counters. Only after a decision: no place of theirs is in use.
    fn sweep_overflow(&mut self, places: usize) {
        let (overflow, cursor) = (&mut self.overflow, self.overflow_cursor);
        self.overflow_cursor = drop_expired(overflow, cursor, places, self.latest, &mut self.rings);
        if self.overflow_cursor >= overflow.places() {
            self.overflow_cursor = 0;
        }
        if overflow.len() == 0 {
            *overflow = Table::default();
        }
    }

    /// Moves what is left of the rings together.
    #[cold]
    fn gather_rings(&mut self) {
        let mut scattered = std::mem::take(&mut self.rings);
        for slot in self.table.slots_mut().chain(self.overflow.slots_mut()) {
            slot.move_ring(&mut scattered, &mut self.rings);
        }
    }

    /// Whether a log may take another entry's memory.
    pub(super) fn log_may_grow(&self, log: &Log, budget: &Budget) -> bool {
        budget.allows_log(log.moved_bytes() + self.rings.moving_bytes())
    }

    fn measure_tables(&mut self) {
        self.tables_bytes = self.table.heap_bytes() + self.overflow.heap_bytes();
    }

    /// Tells the budget what has changed.
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
fn ask_again(clock: &impl Clock, latest: Timestamp) -> Timestamp {
    clock.now_at_least(latest)
}

fn remove(table: &mut Table, place: usize, rings: &mut Rings) {
    if let Some(ring) = table.remove(place).ring() {
        rings.free(ring);
    }
}

/// Drops what has expired in the next few places from `cursor`, and says where to go on.
fn drop_expired(table: &mut Table, cursor: usize, places: usize, now: Timestamp, rings: &mut Rings) -> usize {
    let (mut place, end) = (cursor, (cursor + places).min(table.places()));
    // Whoever moves up into a gap is looked at too, but not without end.
    for _ in 0..2 * places {
        if place >= end {
            break;
        }
        match table.get(place) {
            Some(slot) if slot.expires_at_us() <= now.as_micros() => remove(table, place, rings),
            _ => place += 1,
        }
    }
    place
}
