//! One shard: a table of slots, the rings of its long logs, and its share of the memory.
//!
//! ```text
//!   is there a slot for this key? ── yes ──▶ that is its counter
//!        │ no
//!   does a live overflow counter stand for it? ── yes ──▶ is there room again?
//!        │ no                                                  │ no ──▶ that is its counter
//!        │                                                     │ yes ─▶ a slot of its own, with a copy of that state
//!   is there room? (spare place, else tombstones swept up, else a larger table within the budget)
//!        │ yes ──▶ a slot of its own        │ no ──▶ an overflow counter, shared by hash
//! ```
//!
//! A key that was sent to an overflow counter may have spent up to all that this counter holds. When there is room
//! again, it parts with a copy of that state: a fresh one would give it its quota twice. Nobody charges the
//! overflow counter meanwhile, so that it expires, and then everybody starts afresh.
//!
//! **Reclaiming.** Every insertion looks at a few slots further along the table, and so does every
//! sixty-fourth operation; whatever has expired goes. There is no sweep that pauses and no thread.

use hashbrown::HashTable;

use super::budget::Budget;
use super::rings::Rings;
use super::slot::{CounterHash, Slot};
use crate::algorithm::State;
use crate::limit::Limit;
use crate::time::{Clock, Timestamp};

/// How many slots one reclaiming step looks at: eight cache lines in a row.
const SWEEP_SLOTS: usize = 16;
/// How many more when there is no room for a newcomer.
const SWEEP_SLOTS_WHEN_FULL: usize = 64;
/// Every so many operations on known keys take a reclaiming step too.
const SWEEP_EVERY_OPS: u32 = 64;

/// What an overflow counter is shared by: the newcomers of one limit, or (when even those counters are too
/// many, because somebody invents limits too) all newcomers with one kind of state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OverflowScope {
    Limit,
    Machine,
}

/// In the order of how often a field is touched: what every check needs shares a cache line with the lock.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Shard {
    table: HashTable<Slot>,
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
    /// Newcomers that were promised room and have not come in yet.
    rooms_kept: usize,
    overflow: HashTable<Slot>,
}

/// Where a counter was found, so that it can be put back without another search. Valid until the
/// next insertion or reclaiming step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    Table(usize),
    Overflow(usize),
    /// Nowhere yet; there is room kept for it in the table.
    NewInTable,
    /// The same, but it holds a copy of an overflow counter's state: kept only if it is charged.
    Parting,
    /// Nowhere yet; it will be an overflow counter.
    NewInOverflow,
}

impl Place {
    /// Whether putting it there is an insertion.
    pub(super) fn is_new(self) -> bool {
        matches!(self, Place::NewInTable | Place::Parting | Place::NewInOverflow)
    }
}

impl Shard {
    /// The time to decide at: `read`, unless the shard has already seen later. Then the clock is
    /// asked again, under the shard's lock: either the caller was merely overtaken between reading the
    /// clock and getting here, or the clock really went back.
    #[inline]
    pub(super) fn arrive(&self, read: Timestamp, clock: &impl Clock) -> Timestamp {
        if read < self.latest { clock.now_at_least(self.latest) } else { read }
    }

    /// From here on the shard has seen `now`.
    #[inline]
    pub(super) fn set_time(&mut self, now: Timestamp) {
        self.latest = now;
    }

    /// The slot of a counter that has one of its own, and the entries of the long logs.
    #[inline]
    pub(super) fn slot_of(&mut self, name: CounterHash) -> Option<(&mut Slot, &mut Rings)> {
        let slot = self.table.find_mut(name.table, |slot| slot.is(name))?;
        Some((slot, &mut self.rings))
    }

    fn find(&self, name: CounterHash) -> Option<usize> {
        self.table.find_bucket_index(name.table, |slot| slot.is(name))
    }

    /// Takes the state of a counter that has a slot of its own. [`Shard::put`] must follow.
    #[inline]
    pub(super) fn take_known(&mut self, name: CounterHash) -> Option<(Place, State)> {
        let index = self.find(name)?;
        let slot = self.table.get_bucket_mut(index).expect("the index was just found");
        Some((Place::Table(index), slot.unpack(&mut self.rings)))
    }

    pub(super) fn knows(&self, name: CounterHash) -> bool {
        self.find(name).is_some()
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
    ) -> (Place, State, CounterHash) {
        if !self.overflow.is_empty() {
            for scope in [OverflowScope::Limit, OverflowScope::Machine] {
                let shared = overflow_name(scope);
                let Some((place, state)) = self.take_overflow(shared) else { continue };
                self.ops_to_sweep = 0;
                if !may_part || !self.has_room_again(budget) {
                    return (place, state, shared);
                }
                let own = state.condensed(limit, self.latest);
                self.put_back(place, state);
                self.rooms_kept += 1;
                return (Place::Parting, own, name);
            }
        }
        if self.make_room(budget) {
            self.rooms_kept += 1;
            return (Place::NewInTable, State::unused(limit), name);
        }
        let scope = if self.overflow.len() < budget.overflow_counters_max() {
            OverflowScope::Limit
        } else {
            OverflowScope::Machine
        };
        (Place::NewInOverflow, State::unused(limit), overflow_name(scope))
    }

    /// The overflow counter of that name, unless it has expired.
    fn take_overflow(&mut self, name: CounterHash) -> Option<(Place, State)> {
        let index = self.overflow.find_bucket_index(name.table, |slot| slot.is(name))?;
        let slot = self.overflow.get_bucket_mut(index).expect("the index was just found");
        if slot.expires_at_us() <= self.latest.as_micros() {
            remove(&mut self.overflow, index, &mut self.rings);
            return None;
        }
        Some((Place::Overflow(index), slot.unpack(&mut self.rings)))
    }

    /// Puts back a state that was only looked at; how long it lives is not for whoever looked to say.
    pub(super) fn put_back(&mut self, place: Place, state: State) {
        let slot = match place {
            Place::Table(index) => self.table.get_bucket_mut(index),
            Place::Overflow(index) => self.overflow.get_bucket_mut(index),
            Place::NewInTable | Place::Parting => {
                self.rooms_kept -= 1;
                None
            }
            Place::NewInOverflow => None,
        };
        if let (Some(slot), State::Log(log)) = (slot, state) {
            slot.put_back(log, &mut self.rings);
        }
    }

    /// Puts a state back, or in for the first time. A fresh one that stayed unused takes no place.
    #[inline]
    pub(super) fn put(&mut self, place: Place, name: CounterHash, limit: &Limit, state: State) {
        let table = match place {
            Place::Table(_) | Place::NewInTable | Place::Parting => &mut self.table,
            Place::Overflow(_) | Place::NewInOverflow => &mut self.overflow,
        };
        match place {
            Place::Table(index) | Place::Overflow(index) => {
                let slot = table.get_bucket_mut(index).expect("nothing was inserted or reclaimed since it was found");
                slot.pack(limit, state, &mut self.rings);
                return;
            }
            Place::NewInTable | Place::Parting => self.rooms_kept -= 1,
            Place::NewInOverflow => {}
        }
        if !state.is_unused() {
            let slot = Slot::new(name, limit, state, &mut self.rings);
            table.insert_unique(name.table, slot, Slot::table_hash);
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
        match self.ops_to_sweep.checked_sub(1) {
            Some(left) => self.ops_to_sweep = left,
            None => self.reclaim(budget),
        }
    }

    #[cold]
    fn reclaim(&mut self, budget: &Budget) {
        self.ops_to_sweep = SWEEP_EVERY_OPS - 1;
        self.sweep(SWEEP_SLOTS);
        self.measure_tables();
        self.report(budget);
    }

    /// Forgets a counter.
    pub(super) fn remove(&mut self, name: CounterHash, budget: &Budget) {
        if let Some(index) = self.find(name) {
            remove(&mut self.table, index, &mut self.rings);
            self.report(budget);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.table.len() + self.overflow.len()
    }

    /// Live overflow counters.
    pub(super) fn overflow_len(&self) -> usize {
        self.overflow.len()
    }

    fn has_room(&self) -> bool {
        self.table.len() + self.rooms_kept < self.table.capacity()
    }

    /// Whether those who share overflow counters may part: cheap to ask while there is no room.
    fn has_room_again(&mut self, budget: &Budget) -> bool {
        let is_far_from_full = self.table.len() + self.rooms_kept < full_capacity(self.table.num_buckets()) / 4 * 3;
        self.has_room() || ((is_far_from_full || self.may_grow(budget)) && self.make_room(budget))
    }

    /// Whether the table can take one more without breaking the budget; makes it so if possible.
    fn make_room(&mut self, budget: &Budget) -> bool {
        if self.has_room() {
            return true;
        }
        let buckets = self.table.num_buckets();
        let tombstones = full_capacity(buckets).saturating_sub(self.table.capacity());
        if tombstones > full_capacity(buckets) / 8 && budget.allows_for_a_moment(self.table.allocation_size()) {
            self.rebuild(full_capacity(buckets));
            return self.has_room();
        }
        if self.may_grow(budget) {
            self.rebuild(full_capacity(twice(buckets)));
            return self.has_room();
        }
        self.sweep(SWEEP_SLOTS_WHEN_FULL);
        self.has_room()
    }

    fn may_grow(&self, budget: &Budget) -> bool {
        budget.allows_table(self.table.allocation_size(), table_bytes(twice(self.table.num_buckets())))
    }

    /// Moves every slot into a table of its own making: a larger one, or one without tombstones.
    fn rebuild(&mut self, capacity: usize) {
        let mut table = HashTable::with_capacity(capacity);
        for slot in self.table.drain() {
            table.insert_unique(slot.table_hash(), slot, Slot::table_hash);
        }
        self.table = table;
        self.cursor = 0;
        self.measure_tables();
    }

    /// Drops what has expired among the next few slots; after a whole round of a table that has become
    /// far too large, gives memory back.
    fn sweep(&mut self, slots: usize) {
        let now_us = self.latest.as_micros();
        for _ in 0..slots {
            if self.cursor >= self.table.num_buckets() {
                self.cursor = 0;
                let buckets = self.table.num_buckets();
                if buckets > 64 && self.table.len() < full_capacity(buckets) / 8 {
                    self.rebuild(self.table.len() * 2);
                }
                break;
            }
            let slot = self.table.get_bucket(self.cursor);
            if slot.is_some_and(|slot| slot.expires_at_us() <= now_us) {
                remove(&mut self.table, self.cursor, &mut self.rings);
            }
            self.cursor += 1;
        }
    }

    fn measure_tables(&mut self) {
        self.tables_bytes = self.table.allocation_size() + self.overflow.allocation_size();
    }

    #[inline]
    fn report(&mut self, budget: &Budget) {
        let bytes = self.tables_bytes + self.rings.heap_bytes();
        if bytes != self.bytes_reported {
            budget.change(self.bytes_reported, bytes);
            self.bytes_reported = bytes;
        }
    }
}

fn remove(table: &mut HashTable<Slot>, index: usize, rings: &mut Rings) {
    if let Ok(entry) = table.get_bucket_entry(index)
        && let Some(ring) = entry.remove().0.ring()
    {
        rings.free(ring);
    }
}

/// How many slots a table of so many buckets takes before it must grow: seven eighths.
fn full_capacity(buckets: usize) -> usize {
    match buckets {
        0 | 1 => 0,
        2..=8 => buckets - 1,
        _ => buckets / 8 * 7,
    }
}

fn twice(buckets: usize) -> usize {
    (buckets * 2).max(4)
}

/// Slots, one control byte each, and the group that is repeated at the end.
fn table_bytes(buckets: usize) -> usize {
    buckets * (size_of::<Slot>() + 1) + 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arithmetic_of_tables_is_that_of_the_library() {
        for buckets in [4, 8, 16, 1024, 65_536] {
            let table: HashTable<Slot> = HashTable::with_capacity(full_capacity(buckets));
            assert_eq!(table.num_buckets(), buckets);
            assert_eq!(table.capacity(), full_capacity(buckets));
            assert_eq!(table.allocation_size(), table_bytes(buckets));
        }
    }
}
