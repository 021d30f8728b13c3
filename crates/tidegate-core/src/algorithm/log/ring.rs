//! The entries of a long log: a ring buffer with eight bytes per entry.
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

use super::{Entry, Oldest};

const TIME_BITS: u32 = 45;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;
/// The number of units from which an entry takes two words.
const UNITS_WIDE: u32 = 1 << (u64::BITS - TIME_BITS);
/// The capacity, in entries, up to which a ring is not shrunk while it has more than one entry.
const CAPACITY_SMALL: usize = 8;
/// The capacities of short rings: steps of a third to a half.
pub(crate) const SHORT_CAPACITIES: [usize; 7] = [4, 6, 8, 12, 16, 24, 32];

#[derive(Clone, Debug, Default)]
pub(crate) struct Ring {
    head: RingHead,
    words: Box<[u64]>,
}

/// The fields of a ring besides its entries, which are in a slice of words. The memory store packs it into a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingHead {
    /// The time of the newest entry; 0 if there is none.
    pub(crate) newest_us: u64,
    /// The position of the oldest entry, counted in entries.
    pub(crate) first: u32,
    /// The number of entries.
    pub(crate) len: u32,
    /// The units of all entries.
    pub(crate) total: u32,
    /// Whether an entry takes two words.
    pub(crate) is_wide: bool,
}

impl RingHead {
    /// Returns the oldest entry. The ring must not be empty.
    #[inline]
    pub(super) fn oldest(&self, words: &[u64]) -> Entry {
        self.entry_at(self.first as usize, words)
    }

    /// Removes the oldest entry, which must be `oldest`. There must be a newer one, because `newest_us` stays.
    #[inline]
    pub(super) fn drop_oldest(&mut self, oldest: Entry, words: &[u64]) {
        self.first = self.position(1, words) as u32;
        self.len -= 1;
        self.total -= oldest.units;
    }

    /// Returns whether an entry of `units` units can be appended without allocating, and the ring is not due to shrink.
    #[inline]
    pub(super) fn can_append(&self, units: u32, words: &[u64]) -> bool {
        let capacity = self.capacity(words);
        (self.len as usize) < capacity && self.units_fit(units) && !self.is_sparse(capacity)
    }

    /// Appends an entry, or adds it to the newest if `joins_newest`. Returns whether that was done.
    ///
    /// The newest entry then has the time of `entry`, which must not be earlier. Returns `false` without changing
    /// anything if the ring would have to be allocated anew, or has at most one entry.
    #[inline]
    pub(super) fn append_in_place(&mut self, entry: Entry, joins_newest: bool, words: &mut [u64]) -> bool {
        match joins_newest {
            true if self.len > 1 && self.units_fit(entry.units) => self.add_to_newest(entry, words),
            false if self.can_append(entry.units, words) => self.push(entry, words),
            _ => return false,
        }
        true
    }

    #[inline]
    fn push(&mut self, entry: Entry, words: &mut [u64]) {
        self.newest_us = entry.time_us;
        self.len += 1;
        self.total += entry.units;
        self.write_at(self.position(self.len as usize - 1, words), entry, words);
    }

    #[inline]
    fn add_to_newest(&mut self, by: Entry, words: &mut [u64]) {
        let position = self.position(self.len as usize - 1, words);
        let units = self.entry_at(position, words).units + by.units;
        self.newest_us = by.time_us;
        self.total += by.units;
        self.write_at(position, Entry { units, ..by }, words);
    }

    #[inline]
    fn capacity(&self, words: &[u64]) -> usize {
        if self.is_wide { words.len() / 2 } else { words.len() }
    }

    /// Returns whether `units` units can certainly be added to any entry without making the ring wide.
    ///
    /// Also holds for a new entry of so many units. A wide ring has two words per entry. `true` if it is wide already.
    #[inline]
    fn units_fit(&self, units: u32) -> bool {
        self.is_wide || u64::from(self.total) + u64::from(units) < u64::from(UNITS_WIDE)
    }

    /// Returns whether the ring should shrink.
    ///
    /// It has at most one entry, or room for more than 8 of which at most a quarter is in use.
    #[inline]
    fn is_sparse(&self, capacity: usize) -> bool {
        self.len <= 1 || (capacity > CAPACITY_SMALL && self.len as usize <= capacity / 4)
    }

    /// Returns the position of the entry `index` places after the oldest.
    #[inline]
    fn position(&self, index: usize, words: &[u64]) -> usize {
        let (position, capacity) = (self.first as usize + index, self.capacity(words));
        if position >= capacity { position - capacity } else { position }
    }

    #[inline]
    fn entry_at(&self, position: usize, words: &[u64]) -> Entry {
        let (time, units) = match self.is_wide {
            false => (words[position], (words[position] >> TIME_BITS) as u32),
            true => (words[2 * position], words[2 * position + 1] as u32),
        };
        let earlier_us = self.newest_us.wrapping_sub(time) & TIME_MASK;
        Entry { time_us: self.newest_us - earlier_us, units }
    }

    #[inline]
    fn write_at(&self, position: usize, entry: Entry, words: &mut [u64]) {
        if self.is_wide {
            words[2 * position] = entry.time_us;
            words[2 * position + 1] = u64::from(entry.units);
        } else {
            words[position] = u64::from(entry.units) << TIME_BITS | entry.time_us & TIME_MASK;
        }
    }
}

impl Ring {
    #[inline]
    pub(crate) fn from_parts(head: RingHead, words: Box<[u64]>) -> Ring {
        Ring { head, words }
    }

    #[inline]
    pub(crate) fn into_parts(self) -> (RingHead, Box<[u64]>) {
        (self.head, self.words)
    }

    #[inline]
    pub(super) fn head(&self) -> RingHead {
        self.head
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.head.len as usize
    }

    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.head.capacity(&self.words)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// Returns whether `units` units can certainly be added to any entry without making the ring wide.
    ///
    /// Also holds for a new entry of so many units. A wide ring has two words per entry. `true` if it is wide already.
    #[inline]
    pub(super) fn units_fit(&self, units: u32) -> bool {
        self.head.units_fit(units)
    }

    /// Returns the entry `index` places after the oldest.
    #[inline]
    pub(super) fn get(&self, index: usize) -> Entry {
        self.head.entry_at(self.head.position(index, &self.words), &self.words)
    }

    /// Appends an entry, which must not be earlier than the newest.
    ///
    /// A full ring grows to the capacity that [`capacity_above`] returns. A ring becomes wide if the units require it.
    pub(super) fn push(&mut self, entry: Entry, entries_max: usize) {
        if self.len() == self.capacity() {
            self.rebuild(capacity_above(self.len(), entries_max), self.head.is_wide);
        }
        self.make_wide_for(entry.units);
        self.head.push(entry, &mut self.words);
    }

    /// Replaces the entry `index` places after the oldest. Only the newest may get another time.
    pub(super) fn set(&mut self, index: usize, entry: Entry) {
        self.head.total = self.head.total - self.get(index).units + entry.units;
        if index + 1 == self.len() {
            self.head.newest_us = entry.time_us;
        }
        self.make_wide_for(entry.units);
        self.write(index, entry);
    }

    /// Removes the `count` oldest entries; there must be more than that. Shrinks the ring if it is mostly unused.
    pub(super) fn drop_front(&mut self, count: usize) {
        for _ in 0..count {
            self.head.drop_oldest(self.head.oldest(&self.words), &self.words);
        }
        if self.head.is_sparse(self.capacity()) {
            self.rebuild(capacity_above(self.len(), usize::MAX), self.head.is_wide);
        }
    }

    /// Removes the entry `index` places after the oldest. The entries on its shorter side move.
    pub(super) fn remove(&mut self, index: usize) {
        let last = self.len() - 1;
        self.head.total -= self.get(index).units;
        if index < last / 2 {
            for later in (1..=index).rev() {
                self.write(later, self.get(later - 1));
            }
            self.head.first = self.head.position(1, &self.words) as u32;
        } else {
            for later in index + 1..=last {
                self.write(later - 1, self.get(later));
            }
        }
        if index == last {
            self.head.newest_us = index.checked_sub(1).map_or(0, |before| self.get(before).time_us);
        }
        self.head.len -= 1;
    }

    /// Counts the entries that are not later than `time_us`, and their units.
    pub(super) fn count_until(&self, time_us: u64) -> Oldest {
        let mut counted = Oldest::NONE;
        while counted.entries < self.len() {
            let entry = self.get(counted.entries);
            if entry.time_us > time_us {
                break;
            }
            counted = Oldest { entries: counted.entries + 1, units: counted.units + u64::from(entry.units) };
        }
        counted
    }

    /// Returns the entry of the unit with this number, counted from 1 for the oldest unit. There must be an entry.
    ///
    /// Returns the newest entry if there are fewer units.
    pub(super) fn entry_of_unit(&self, unit: u64) -> Entry {
        let mut units = 0;
        for index in 0..self.len() {
            let entry = self.get(index);
            units += u64::from(entry.units);
            if units >= unit {
                return entry;
            }
        }
        self.get(self.len() - 1)
    }

    /// Removes the entries later than `time_us`, and returns their units.
    pub(super) fn remove_later_than(&mut self, time_us: u64) -> u32 {
        let (before, kept) = (self.head.total, self.count_until(time_us));
        // Times are relative to the newest, so they are read before it changes.
        let newest_us = kept.entries.checked_sub(1).map_or(0, |newest| self.get(newest).time_us);
        let (len, total) = (kept.entries as u32, kept.units as u32);
        self.head = RingHead { newest_us, len, total, ..self.head };
        before - total
    }

    fn write(&mut self, index: usize, entry: Entry) {
        let position = self.head.position(index, &self.words);
        self.head.write_at(position, entry, &mut self.words);
    }

    fn make_wide_for(&mut self, units: u32) {
        if units >= UNITS_WIDE && !self.head.is_wide {
            self.rebuild(self.capacity(), true);
        }
    }

    /// Moves the entries to a new block for `capacity` entries, the oldest at position 0.
    ///
    /// `is_wide` selects two words per entry instead of one. `capacity` must be at least `len`. Without `is_wide`,
    /// every entry must have fewer than [`UNITS_WIDE`] units. Neither is checked.
    #[cold]
    fn rebuild(&mut self, capacity: usize, is_wide: bool) {
        let words = vec![0; if is_wide { 2 * capacity } else { capacity }].into_boxed_slice();
        let mut moved = Ring { head: RingHead { first: 0, is_wide, ..self.head }, words };
        for index in 0..self.len() {
            moved.write(index, self.get(index));
        }
        *self = moved;
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

impl PartialEq for Ring {
    /// Compares the entries, wherever in the ring they are.
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && (0..self.len()).all(|index| self.get(index) == other.get(index))
    }
}

impl Eq for Ring {}
