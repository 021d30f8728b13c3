//! The entries of a longer log: a ring buffer with eight bytes per entry.
//!
//! ```text
//!   words  │ e4 │ e5 │ ·· │ ·· │ e1 │ e2 │ e3 │        an entry: │ units: 19 bits │ time: 45 bits │
//!                               └ first, len = 5
//! ```
//!
//! **Times in 45 bits.** Only the newest time is stored in full. When it moves, entries that are a window older have
//! expired, and the longest window is below 2^45 µs. So the low 45 bits of a time determine how much earlier than the
//! newest it is.
//!
//! **Units in 19 bits** are enough unless half a million are admitted in one tick. A ring with such an entry becomes
//! wide: two words per entry, until it is empty.
//!
//! **Sizes.** A short ring has one of a few sizes, so that a store can put rings of one size together. A longer one
//! grows by a quarter, so at most about a fifth of it is unused. Its capacity is odd, because an allocator's header
//! takes the room of one more entry. A ring shrinks when three quarters of it are unused.

use super::rings::Rings;
use super::{Entry, Oldest};

const TIME_BITS: u32 = 45;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;
/// The number of units from which an entry takes two words.
const UNITS_WIDE: u32 = 1 << (u64::BITS - TIME_BITS);
/// The capacity, in entries, up to which a ring is not shrunk.
const CAPACITY_SMALL: usize = 8;
/// The capacities of short rings: steps of a third to a half.
pub(super) const SHORT_CAPACITIES: [usize; 7] = [4, 6, 8, 12, 16, 24, 32];

/// A ring without its entries, which are in [`Rings`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ring {
    /// The number of the ring in [`Rings`].
    pub(super) number: u32,
    /// The time of the newest entry; 0 if there is none.
    pub(super) newest_us: u64,
    /// The position of the oldest entry, counted in entries.
    pub(super) first: u32,
    /// The number of entries.
    pub(super) len: u32,
    /// The units of all entries.
    pub(super) total: u32,
    /// Whether an entry takes two words.
    pub(super) is_wide: bool,
}

impl Ring {
    /// Allocates a ring without entries.
    pub(super) fn new(rings: &mut Rings) -> Ring {
        let number = rings.allocate(SHORT_CAPACITIES[0]);
        Ring { number, newest_us: 0, first: 0, len: 0, total: 0, is_wide: false }
    }

    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns whether `units` units can certainly be added to any entry without making the ring wide.
    ///
    /// Also holds for a new entry of so many units. A wide ring has two words per entry. `true` if it is wide already.
    #[inline(always)]
    pub(super) fn units_fit(&self, units: u32) -> bool {
        self.is_wide || u64::from(self.total) + u64::from(units) < u64::from(UNITS_WIDE)
    }

    /// Returns whether an entry of `units` units can be appended without allocating memory.
    #[inline(always)]
    pub(super) fn has_room_for(&self, units: u32, rings: &Rings) -> bool {
        !self.is_full(rings) && self.units_fit(units)
    }

    #[inline(always)]
    pub(super) fn is_full(&self, rings: &Rings) -> bool {
        self.len() == self.capacity(rings.words(self.number))
    }

    /// Returns the bytes of the entries, including the room for further ones.
    pub(super) fn bytes(&self, rings: &Rings) -> usize {
        size_of_val(rings.words(self.number))
    }

    /// Returns the entry `index` places after the oldest.
    #[inline(always)]
    pub(super) fn get(&self, index: usize, rings: &Rings) -> Entry {
        self.entry(index, rings.words(self.number))
    }

    /// Appends an entry, which must not be earlier than the newest.
    ///
    /// A full ring grows to the capacity that [`capacity_above`] returns. A ring becomes wide if the units require it.
    pub(super) fn push(&mut self, entry: Entry, entries_max: usize, rings: &mut Rings) {
        if self.is_full(rings) {
            *self = self.rebuilt(capacity_above(self.len(), entries_max), self.is_wide, rings);
        }
        self.make_wide_for(entry.units, rings);
        self.push_in_place(entry, rings);
    }

    /// Appends an entry, which must not be earlier than the newest, if there is room for it. Returns whether there was.
    #[inline(always)]
    pub(super) fn push_in_place(&mut self, entry: Entry, rings: &mut Rings) -> bool {
        let words = rings.words_mut(self.number);
        let has_room = self.len() < self.capacity(words) && (self.is_wide || entry.units < UNITS_WIDE);
        if has_room {
            self.newest_us = entry.time_us;
            self.len += 1;
            self.total += entry.units;
            self.write(self.len() - 1, entry, words);
        }
        has_room
    }

    /// Adds units to the newest entry and moves it to `time_us`, which must not be earlier than its time.
    #[inline(always)]
    pub(super) fn add_to_newest(&mut self, time_us: u64, units: u32, rings: &mut Rings) {
        let units_after = self.get(self.len() - 1, rings).units + units;
        self.make_wide_for(units_after, rings);
        (self.newest_us, self.total) = (time_us, self.total + units);
        self.write(self.len() - 1, Entry { time_us, units: units_after }, rings.words_mut(self.number));
    }

    /// Replaces the entry `index` places after the oldest. Only the newest may get another time.
    pub(super) fn set(&mut self, index: usize, entry: Entry, rings: &mut Rings) {
        self.total = self.total - self.get(index, rings).units + entry.units;
        if index + 1 == self.len() {
            self.newest_us = entry.time_us;
        }
        self.make_wide_for(entry.units, rings);
        self.write(index, entry, rings.words_mut(self.number));
    }

    /// Removes the entries earlier than `begin_us`. There must be a later one. Returns the time of the oldest one left.
    /// Shrinks the ring if it is mostly unused.
    #[inline(always)]
    pub(super) fn drop_before(&mut self, begin_us: u64, rings: &mut Rings) -> u64 {
        let words = rings.words(self.number);
        let mut oldest = self.entry(0, words);
        if oldest.time_us >= begin_us {
            return oldest.time_us;
        }
        while oldest.time_us < begin_us {
            self.total -= oldest.units;
            self.first = self.position(1, words) as u32;
            self.len -= 1;
            oldest = self.entry(0, words);
        }
        self.shrink(rings);
        oldest.time_us
    }

    /// Removes the `count` oldest entries; there must be more than that. Shrinks the ring if it is mostly unused.
    pub(super) fn drop_front(&mut self, count: usize, rings: &mut Rings) {
        let words = rings.words(self.number);
        for _ in 0..count {
            self.total -= self.entry(0, words).units;
            self.first = self.position(1, words) as u32;
            self.len -= 1;
        }
        self.shrink(rings);
    }

    /// Moves the entries of a ring that is mostly unused to a smaller one.
    #[inline(always)]
    fn shrink(&mut self, rings: &mut Rings) {
        let capacity = self.capacity(rings.words(self.number));
        if capacity > CAPACITY_SMALL && self.len() <= capacity / 4 {
            *self = self.rebuilt(capacity_above(self.len(), usize::MAX), self.is_wide, rings);
        }
    }

    /// Removes the entry `index` places after the oldest. The entries on its shorter side move.
    pub(super) fn remove(&mut self, index: usize, rings: &mut Rings) {
        let last = self.len() - 1;
        self.total -= self.get(index, rings).units;
        if index < last / 2 {
            for later in (1..=index).rev() {
                self.write(later, self.get(later - 1, rings), rings.words_mut(self.number));
            }
            self.first = self.position(1, rings.words(self.number)) as u32;
        } else {
            for later in index + 1..=last {
                self.write(later - 1, self.get(later, rings), rings.words_mut(self.number));
            }
        }
        if index == last {
            self.newest_us = index.checked_sub(1).map_or(0, |before| self.get(before, rings).time_us);
        }
        self.len -= 1;
    }

    /// Counts the entries earlier than `end_us`, and their units.
    #[inline(always)]
    pub(super) fn count_before(&self, end_us: u64, rings: &Rings) -> Oldest {
        let words = rings.words(self.number);
        if self.entry(0, words).time_us >= end_us { Oldest::NONE } else { self.count_from_oldest(end_us, words) }
    }

    #[inline(never)]
    fn count_from_oldest(self, end_us: u64, words: &[u64]) -> Oldest {
        let entries = (0..self.len()).map(|index| self.entry(index, words));
        entries.take_while(|entry| entry.time_us < end_us).fold(Oldest::NONE, Oldest::with)
    }

    /// Returns the entry of the unit with this number, counted from 1 for the oldest unit. There must be an entry.
    ///
    /// Returns the newest entry if there are fewer units.
    #[inline(always)]
    pub(super) fn entry_of_unit(&self, unit: u64, rings: &Rings) -> Entry {
        let words = rings.words(self.number);
        let oldest = self.entry(0, words);
        if u64::from(oldest.units) >= unit { oldest } else { self.later_entry_of_unit(unit, words) }
    }

    #[inline(never)]
    fn later_entry_of_unit(self, unit: u64, words: &[u64]) -> Entry {
        let mut units = 0;
        let is_it = |entry: &Entry| {
            units += u64::from(entry.units);
            units >= unit
        };
        let mut entries = (0..self.len()).map(|index| self.entry(index, words));
        entries.find(is_it).unwrap_or_else(|| self.entry(self.len() - 1, words))
    }

    /// Removes the entries later than `time_us`, and returns their units.
    pub(super) fn remove_later_than(&mut self, time_us: u64, rings: &Rings) -> u32 {
        let (before, kept) = (self.total, self.count_before(time_us + 1, rings));
        // Times are relative to the newest, so they are read before it changes.
        let newest_us = kept.entries.checked_sub(1).map_or(0, |newest| self.get(newest, rings).time_us);
        (self.newest_us, self.len, self.total) = (newest_us, kept.entries as u32, kept.units as u32);
        before - self.total
    }

    #[inline(always)]
    fn capacity(&self, words: &[u64]) -> usize {
        if self.is_wide { words.len() / 2 } else { words.len() }
    }

    /// Returns the position of the entry `index` places after the oldest.
    #[inline(always)]
    fn position(&self, index: usize, words: &[u64]) -> usize {
        let (position, capacity) = (self.first as usize + index, self.capacity(words));
        if position >= capacity { position - capacity } else { position }
    }

    #[inline(always)]
    fn entry(&self, index: usize, words: &[u64]) -> Entry {
        let position = self.position(index, words);
        let (time, units) = if self.is_wide {
            (words[2 * position], words[2 * position + 1] as u32)
        } else {
            (words[position], (words[position] >> TIME_BITS) as u32)
        };
        let earlier_us = self.newest_us.wrapping_sub(time) & TIME_MASK;
        Entry { time_us: self.newest_us - earlier_us, units }
    }

    #[inline(always)]
    fn write(&self, index: usize, entry: Entry, words: &mut [u64]) {
        let position = self.position(index, words);
        if self.is_wide {
            words[2 * position] = entry.time_us;
            words[2 * position + 1] = u64::from(entry.units);
        } else {
            words[position] = u64::from(entry.units) << TIME_BITS | entry.time_us & TIME_MASK;
        }
    }

    #[inline(always)]
    fn make_wide_for(&mut self, units: u32, rings: &mut Rings) {
        if units >= UNITS_WIDE && !self.is_wide {
            *self = self.rebuilt(self.capacity(rings.words(self.number)), true, rings);
        }
    }

    /// Moves the entries to new memory for `capacity` entries, the oldest at position 0, and returns the new ring.
    ///
    /// `is_wide` selects two words per entry instead of one, and must be set if it was before. `capacity` must be at least
    /// `len`. Neither is checked.
    #[cold]
    #[inline(never)]
    fn rebuilt(self, capacity: usize, is_wide: bool, rings: &mut Rings) -> Ring {
        let words = rings.words(self.number);
        let mut moved = Vec::with_capacity(words.len());
        if is_wide == self.is_wide {
            let (newer, older) = words.split_at(self.first as usize * (1 + usize::from(is_wide)));
            moved.extend_from_slice(older);
            moved.extend_from_slice(newer);
            moved.truncate(self.len() * (1 + usize::from(is_wide)));
        } else {
            let entries = (0..self.len()).map(|index| self.entry(index, words));
            moved.extend(entries.flat_map(|entry| [entry.time_us, entry.units.into()]));
        }
        rings.free(self.number);
        let number = rings.allocate(if is_wide { 2 * capacity } else { capacity });
        rings.words_mut(number)[..moved.len()].copy_from_slice(&moved);
        Ring { number, first: 0, is_wide, ..self }
    }
}

/// Returns the capacity of a ring that holds `len` entries and must have room for one more.
///
/// The next of [`SHORT_CAPACITIES`], whatever `entries_max` is. Above them, about a quarter more than `len`, but at
/// most `entries_max`, unless `len` + 1 is more.
fn capacity_above(len: usize, entries_max: usize) -> usize {
    let short = SHORT_CAPACITIES.into_iter().find(|&capacity| capacity > len);
    short.unwrap_or_else(|| ((len + len / 4 + 1) | 1).min(entries_max.max(len + 1)))
}
