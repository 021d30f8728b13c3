//! A hash table of slots that finds a counter with one cache line.
//!
//! With a million keys, a check spends most of its time waiting for memory, so the number of cache misses matters most.
//! A table that keeps tags beside its slots is compact, but a lookup misses twice: for the tag, then for the slot. Here
//! a slot contains its own hash, and a line of the table is a line of the cache.
//!
//! ```text
//!            home of k                       a search for k ends at the first line
//!               ▼                            that holds it or is not full
//!   ··│ a · │ b  c │ d  k │ e · │ f  g │··
//!           └ line ┘
//! ```
//!
//! **Order.** The home line of a hash is hash × lines / 2^64. If the home is full, the slot goes to the next line that
//! is not; the first line follows the last. The number of lines is arbitrary, so a table grows by half and not to twice
//! its size. Homes are in the order of the hashes, so a resize reads and writes memory in order.
//!
//! **Removal without tombstones.** A removal moves later slots forward into the gap where their home allows it, so a
//! table never fills with tombstones that only a rebuild could clear. A line fills from the left: its second place is
//! in use only if its first is.

use super::counter_hash::CounterHash;
use super::slot::Slot;

/// A hash table of slots. A *place* is the index of a slot, from 0 to [`Table::places`] − 1.
#[derive(Debug, Default)]
pub(super) struct Table {
    lines: Box<[CacheLine]>,
    len: usize,
}

/// Two slots in one cache line.
#[repr(align(64))]
#[derive(Debug, Default)]
struct CacheLine([Slot; 2]);

/// The size of a line, in bytes.
pub(super) const LINE_BYTES: usize = size_of::<CacheLine>();
const LINES_MIN: usize = 2;

impl Table {
    /// Creates an empty table of `lines` cache lines, with two slots each.
    pub(super) fn with_lines(lines: usize) -> Table {
        Table { lines: (0..lines).map(|_| CacheLine::default()).collect(), len: 0 }
    }

    /// Returns the number of counters.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of cache lines. Each holds two slots.
    #[inline]
    pub(super) fn lines(&self) -> usize {
        self.lines.len()
    }

    /// Returns the number of slots, including empty ones.
    #[inline]
    pub(super) fn places(&self) -> usize {
        2 * self.lines.len()
    }

    /// Returns how many counters the table takes before [`Table::insert`] grows it: five sixths of its slots.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        capacity(self.lines.len())
    }

    /// Returns the bytes that the table uses on the heap.
    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// Returns the index of the slot that holds the counter with this name, expired or not, or `None` if there is none.
    ///
    /// The index is valid until the next insertion, removal or resize.
    #[inline(always)]
    pub(super) fn find(&self, name: CounterHash) -> Option<usize> {
        let home = self.home(name.table());
        let CacheLine(line) = self.lines.get(home)?;
        // Most counters are in their home line.
        if line[0].holds(name) {
            Some(2 * home)
        } else if line[1].holds(name) {
            Some(2 * home + 1)
        } else if line[1].is_empty() {
            None
        } else {
            self.find_after(home, name)
        }
    }

    /// Continues [`Table::find`] in the lines after `home`. Returns `None` at once if `home` is not full.
    #[inline(never)]
    fn find_after(&self, home: usize, name: CounterHash) -> Option<usize> {
        let mut at = home;
        for _ in 1..self.lines.len() {
            let CacheLine(line) = &self.lines[at];
            if line[1].is_empty() {
                return None;
            }
            at = self.after(at);
            let CacheLine(line) = &self.lines[at];
            if let Some(second) = line.iter().position(|slot| slot.holds(name)) {
                return Some(2 * at + second);
            }
        }
        None
    }

    /// Returns the slot with the index `place`, which may be empty.
    ///
    /// # Panics
    /// Panics if `place` is not below [`Table::places`].
    #[inline(always)]
    pub(super) fn slot_mut(&mut self, place: usize) -> &mut Slot {
        &mut self.lines[place / 2].0[place % 2]
    }

    /// Returns the slot with the index `place`, or `None` if it is empty or out of range.
    #[inline]
    pub(super) fn get(&self, place: usize) -> Option<&Slot> {
        let slot = &self.lines.get(place / 2)?.0[place % 2];
        (!slot.is_empty()).then_some(slot)
    }

    /// Returns an iterator over the slots of all counters.
    pub(super) fn slots_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.lines.iter_mut().flat_map(|line| &mut line.0).filter(|slot| !slot.is_empty())
    }

    /// Inserts a slot, whose name must not be in the table yet, and returns its index.
    ///
    /// The slot must not be empty. Grows the table first if it is at its [capacity](Table::capacity), which moves other
    /// slots.
    pub(super) fn insert(&mut self, slot: Slot) -> usize {
        if self.len >= self.capacity() {
            self.resize(larger(self.lines.len()));
        }
        self.len += 1;
        let mut at = self.home(slot.table_hash());
        while !self.lines[at].0[1].is_empty() {
            at = self.after(at);
        }
        let second = usize::from(!self.lines[at].0[0].is_empty());
        self.lines[at].0[second] = slot;
        2 * at + second
    }

    /// Removes and returns the slot with the index `place`, which must not be empty.
    ///
    /// Other slots may move: one into its place, and others into the gaps that follow from that.
    pub(super) fn remove(&mut self, place: usize) -> Slot {
        let (mut gap, second) = (place / 2, place % 2);
        let mut was_full = self.is_full(gap);
        let removed = self.take(gap, second);
        self.len -= 1;
        let mut at = gap;
        // No slot was ever inserted past a line that was not full.
        while was_full {
            at = self.after(at);
            if at == gap {
                break;
            }
            was_full = self.is_full(at);
            if let Some(which) = self.slot_to_move(at, gap) {
                self.lines[gap].0[1] = self.take(at, which);
                gap = at;
            }
        }
        removed
    }

    /// Replaces the table by one of `lines` cache lines, and moves all counters there.
    ///
    /// If they exceed its [capacity](Table::capacity), the new table grows further.
    pub(super) fn resize(&mut self, lines: usize) {
        let old = std::mem::replace(self, Table::with_lines(lines));
        for CacheLine(slots) in old.lines {
            for slot in slots {
                if !slot.is_empty() {
                    self.insert(slot);
                }
            }
        }
    }

    /// Takes the slot with the index `second` (0 or 1) out of line `at`. The other slot of the line moves to index 0.
    fn take(&mut self, at: usize, second: usize) -> Slot {
        let line = &mut self.lines[at].0;
        line.swap(second, 1);
        std::mem::take(&mut line[1])
    }

    /// Returns the index (0 or 1) of a slot in line `at` that may move to the line `gap` before it; `None` if none may.
    ///
    /// A slot may move if its home line is not after `gap`.
    fn slot_to_move(&self, at: usize, gap: usize) -> Option<usize> {
        let apart = self.steps(gap, at);
        let moves_up = |slot: &Slot| !slot.is_empty() && self.steps(self.home(slot.table_hash()), at) >= apart;
        self.lines[at].0.iter().position(moves_up)
    }

    /// Returns the index of the line at which a search for this hash begins.
    #[inline(always)]
    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.lines.len() as u128) >> 64) as usize
    }

    /// Returns the index of the line after `at`; 0 after the last one.
    #[inline(always)]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.lines.len() { 0 } else { at + 1 }
    }

    /// Returns how many lines `to` is after `from`. The first line follows the last.
    fn steps(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.lines.len() - from }
    }

    fn is_full(&self, at: usize) -> bool {
        !self.lines[at].0[1].is_empty()
    }
}

/// Returns how many counters a table of `lines` cache lines takes before it grows: five sixths of its slots.
///
/// A search then reads 1.3 lines on average halfway between two resizes, and two just before the next one.
#[inline]
pub(super) fn capacity(lines: usize) -> usize {
    2 * lines - (2 * lines).div_ceil(6)
}

/// Returns how many cache lines a table needs for `counters` counters; at least 2.
pub(super) fn lines_for(counters: usize) -> usize {
    (counters * 3).div_ceil(5).max(LINES_MIN)
}

/// Returns the number of cache lines to which a table of `lines` grows: half as many more, at least 2.
#[inline]
pub(super) fn larger(lines: usize) -> usize {
    (lines + lines / 2).max(LINES_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::Packed;
    use std::collections::HashMap;

    fn slot(name: CounterHash, number: u32) -> Slot {
        let mut state = Packed::default();
        state.set(0, 0, 0, number.into());
        Slot::new(name, state)
    }

    fn number_in(slot: &Slot) -> u32 {
        slot.state.small() as u32
    }

    /// Returns crowded hashes: many share a home, including the last line, so that searches wrap around.
    fn name(number: u64) -> CounterHash {
        let table = match number % 4 {
            0 => u64::MAX - number,
            1 => number.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            2 => 0x8000_0000_0000_0000 + number,
            _ => 0,
        };
        CounterHash::new(table, number as u32, 0)
    }

    #[test]
    fn line_of_the_table_is_one_cache_line() {
        assert_eq!((LINE_BYTES, align_of::<CacheLine>()), (64, 64));
    }

    #[test]
    fn table_agrees_with_a_hash_map_under_random_operations() {
        let mut random = 0x1234_5678_u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            random >> 33
        };
        let (mut table, mut map) = (Table::default(), HashMap::new());
        for step in 0..200_000_u32 {
            // Long phases in which the table grows, shrinks, and is nearly empty.
            let names = [400, 40, 4][step as usize / 10_000 % 3];
            let number = next() % names;
            match (table.find(name(number)), next() % 8) {
                (Some(place), 0..4) => {
                    assert_eq!(Some(number_in(&table.remove(place))), map.remove(&number));
                }
                (Some(place), _) => assert_eq!(Some(&number_in(table.slot_mut(place))), map.get(&number)),
                (None, 0..4) => {
                    assert_eq!(map.insert(number, step), None);
                    let place = table.insert(slot(name(number), step));
                    assert_eq!(table.find(name(number)), Some(place));
                }
                (None, 7) if step % 64 == 0 => table.resize(lines_for(table.len())),
                (None, _) => assert!(!map.contains_key(&number)),
            }
            assert_eq!(table.len(), map.len());
            if step % 1_000 == 0 {
                let found = (0..table.places()).filter(|&place| table.get(place).is_some()).count();
                assert_eq!(found, map.len());
                assert!(map.keys().all(|&number| table.find(name(number)).is_some()));
            }
        }
    }

    #[test]
    fn lines_for_gives_enough_capacity() {
        for counters in 0..10_000 {
            assert!(capacity(lines_for(counters)) >= counters, "{counters}");
        }
    }
}
