//! The entries of a log: two inline, more in a ring, very many in several rings.

use super::Oldest;
use super::long::{Long, SEGMENT_ENTRIES_MAX};
use super::ring::Ring;

/// Units that were charged at one time or within one tick, or that were joined because the log could not grow or the
/// clock went back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Entry {
    /// The time of the latest of these charges; after the clock went back, the time at which they were joined.
    pub(crate) time_us: u64,
    /// The units of all of them; 0 only in an unused entry.
    pub(crate) units: u32,
}

/// The state of `sliding` and `sliding-log`: admissions as (time, units), oldest first, with their total.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Log(Entries);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Entries {
    InlineEntries(InlineEntries),
    Many(Ring),
    Long(Box<Long>),
}

/// The entries of a log in the form in which the memory store keeps them.
pub(crate) enum LogParts {
    /// At most two entries, which fit into a slot.
    InlineEntries(InlineEntries),
    /// More entries, in one ring.
    Ring(Ring),
    /// More entries than one ring takes.
    Long(Box<Long>),
}

/// Up to two entries, stored inline.
///
/// An unused entry must be [`Entry::default`], because its units are added and compared as well.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct InlineEntries {
    /// The number of entries in use, from the front: 0, 1 or 2.
    pub(crate) len: u8,
    /// The entries, oldest first.
    pub(crate) entries: [Entry; 2],
}

impl Default for Log {
    fn default() -> Self {
        Log(Entries::InlineEntries(InlineEntries::default()))
    }
}

impl Log {
    #[inline]
    pub(crate) fn from_inline(few: InlineEntries) -> Log {
        Log(Entries::InlineEntries(few))
    }

    #[inline]
    pub(crate) fn from_ring(ring: Ring) -> Log {
        Log(Entries::Many(ring))
    }

    #[inline]
    pub(crate) fn from_long(long: Box<Long>) -> Log {
        Log(Entries::Long(long))
    }

    #[inline]
    pub(crate) fn into_parts(self) -> LogParts {
        match self.0 {
            Entries::InlineEntries(few) => LogParts::InlineEntries(few),
            Entries::Many(ring) => LogParts::Ring(ring),
            Entries::Long(long) => LogParts::Long(long),
        }
    }

    /// Returns the number of entries, including expired ones that were not dropped yet.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.0 {
            Entries::InlineEntries(few) => usize::from(few.len),
            Entries::Many(ring) => ring.len(),
            Entries::Long(long) => long.len(),
        }
    }

    /// Returns whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the units of all entries, including expired ones that were not dropped yet.
    #[inline]
    pub(super) fn total(&self) -> u64 {
        match &self.0 {
            Entries::InlineEntries(few) => few.live().iter().map(|entry| u64::from(entry.units)).sum(),
            Entries::Many(ring) => u64::from(ring.head().total),
            Entries::Long(long) => u64::from(long.total()),
        }
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Entry {
        match &self.0 {
            Entries::InlineEntries(few) => few.live()[index],
            Entries::Many(ring) => ring.get(index),
            Entries::Long(long) => long.get(index),
        }
    }

    /// Returns the time of the newest entry, or `None` if there are no entries.
    #[inline]
    pub(crate) fn newest_us(&self) -> Option<u64> {
        match &self.0 {
            Entries::InlineEntries(few) => few.live().last().map(|entry| entry.time_us),
            Entries::Many(ring) => Some(ring.head().newest_us),
            Entries::Long(long) => Some(long.newest_us()),
        }
    }

    /// Returns whether an entry of `units` units can be appended without allocating memory.
    #[inline]
    pub(crate) fn has_room_for(&self, units: u32) -> bool {
        match &self.0 {
            Entries::InlineEntries(few) => few.len < 2,
            Entries::Many(ring) => ring.len() < ring.capacity() && ring.units_fit(units),
            Entries::Long(long) => long.has_room_for(units),
        }
    }

    #[inline]
    pub(super) fn push(&mut self, entry: Entry, entries_max: usize) {
        match &mut self.0 {
            Entries::InlineEntries(few) if few.len < 2 => {
                few.entries[usize::from(few.len)] = entry;
                few.len += 1;
            }
            Entries::InlineEntries(few) => {
                let mut ring = Ring::default();
                for &older in few.live() {
                    ring.push(older, entries_max);
                }
                ring.push(entry, entries_max);
                self.0 = Entries::Many(ring);
            }
            Entries::Many(ring) if ring.len() >= SEGMENT_ENTRIES_MAX && ring.len() == ring.capacity() => {
                self.0 = Entries::Long(Box::new(Long::new(std::mem::take(ring), entry)));
            }
            Entries::Many(ring) => ring.push(entry, entries_max.min(SEGMENT_ENTRIES_MAX)),
            Entries::Long(long) => long.push(entry),
        }
    }

    /// Adds units to the newest entry and moves it to `time_us`, which must not be earlier than its time.
    ///
    /// Does nothing if there are no entries. If so many units would need more memory per entry and `may_grow` is
    /// `false`, all entries become one at `time_us`.
    pub(super) fn add_to_newest(&mut self, time_us: u64, units: u32, may_grow: bool) {
        let Some(last) = self.len().checked_sub(1) else { return };
        match &self.0 {
            Entries::Many(_) | Entries::Long(_) if !may_grow && !self.units_fit(units) => {
                let units = self.total() as u32 + units;
                self.0 = Entries::InlineEntries(InlineEntries::one(Entry { time_us, units }));
            }
            _ => self.set(last, Entry { time_us, units: self.get(last).units + units }),
        }
    }

    /// Sets the units of the entry `index` places after the oldest. An entry without units is removed.
    pub(super) fn set_units(&mut self, index: usize, units: u32) {
        let entry = self.get(index);
        self.set(index, Entry { units, ..entry });
        if units == 0 {
            self.remove(index);
        }
    }

    /// Removes the `count` oldest entries; all of them if there are not more. A single one that is left becomes inline.
    #[inline]
    pub(super) fn drop_front(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let left = self.len().saturating_sub(count);
        match &mut self.0 {
            _ if left == 0 => *self = Log::default(),
            Entries::InlineEntries(few) => *few = InlineEntries::one(few.entries[1]),
            Entries::Many(ring) if left == 1 => *self = Log::from_inline(InlineEntries::one(ring.get(count))),
            Entries::Many(ring) => ring.drop_front(count),
            Entries::Long(_) if left == 1 => *self = Log::from_inline(InlineEntries::one(self.get(count))),
            Entries::Long(long) => {
                long.drop_front(count);
                self.shorten();
            }
        }
    }

    /// Removes `units` units, the oldest first; all entries if there are not more.
    pub(super) fn remove_oldest_units(&mut self, units: u64) {
        if units >= self.total() {
            *self = Log::default();
        } else if units > 0 {
            let cut = self.entry_of_unit(units);
            let kept = self.count_until(cut.time_us);
            // A part of the last of these entries may be left.
            let left = (kept.units - units) as u32;
            self.drop_front(if left > 0 { kept.entries - 1 } else { kept.entries });
            if left > 0 {
                self.set(0, Entry { units: left, ..cut });
            }
        }
    }

    /// Removes the entries later than `time_us`, and returns their units.
    pub(super) fn remove_later_than(&mut self, time_us: u64) -> u32 {
        let units = match &mut self.0 {
            Entries::InlineEntries(_) => {
                let mut units = 0;
                while self.newest_us().is_some_and(|newest_us| newest_us > time_us) {
                    let newest = self.len() - 1;
                    units += self.get(newest).units;
                    self.remove(newest);
                }
                units
            }
            Entries::Many(ring) => ring.remove_later_than(time_us),
            Entries::Long(long) => long.remove_later_than(time_us),
        };
        match &self.0 {
            Entries::Many(ring) if ring.len() == 0 => *self = Log::default(),
            Entries::Long(_) => self.shorten(),
            _ => {}
        }
        units
    }

    /// Counts the entries that are not later than `time_us`, and their units.
    #[inline]
    pub(super) fn count_until(&self, time_us: u64) -> Oldest {
        match &self.0 {
            Entries::InlineEntries(few) => {
                let entries = few.live().iter().take_while(|entry| entry.time_us <= time_us);
                entries.fold(Oldest::NONE, |counted, entry| Oldest {
                    entries: counted.entries + 1,
                    units: counted.units + u64::from(entry.units),
                })
            }
            Entries::Many(ring) => ring.count_until(time_us),
            Entries::Long(long) => long.count_until(time_us),
        }
    }

    /// Returns the entry of the unit with this number, counted from 1 for the oldest unit. There must be an entry.
    ///
    /// Returns the newest entry if there are fewer units.
    #[inline]
    pub(super) fn entry_of_unit(&self, unit: u64) -> Entry {
        match &self.0 {
            Entries::InlineEntries(few) => {
                let [first, second] = few.entries;
                if few.len < 2 || u64::from(first.units) >= unit { first } else { second }
            }
            Entries::Many(ring) => ring.entry_of_unit(unit),
            Entries::Long(long) => long.entry_of_unit(unit),
        }
    }

    /// Returns the bytes that the entries take on the heap; 0 for up to two entries.
    pub(crate) fn heap_bytes(&self) -> usize {
        match &self.0 {
            Entries::InlineEntries(_) => 0,
            Entries::Many(ring) => ring.heap_bytes(),
            Entries::Long(long) => size_of::<Long>() + long.heap_bytes(),
        }
    }

    /// Returns the bytes on the heap that must be reallocated if the log grows by an entry.
    pub(crate) fn moved_bytes(&self) -> usize {
        match &self.0 {
            Entries::Long(long) => long.moved_bytes(),
            _ => self.heap_bytes(),
        }
    }

    /// Returns whether `units` units can certainly be added to the newest entry without making its ring wide.
    ///
    /// A wide ring has two words per entry. `true` for inline entries and for a ring that is already wide.
    fn units_fit(&self, units: u32) -> bool {
        match &self.0 {
            Entries::InlineEntries(_) => true,
            Entries::Many(ring) => ring.units_fit(units),
            Entries::Long(long) => long.units_fit(units),
        }
    }

    /// Converts a log of several rings of which one or none is left to the shorter form. Does nothing for other logs.
    fn shorten(&mut self) {
        if let Entries::Long(long) = &mut self.0 {
            if long.len() == 0 {
                *self = Log::default();
            } else if let Some(ring) = long.take_only_ring() {
                self.0 = Entries::Many(ring);
            }
        }
    }

    #[inline]
    fn set(&mut self, index: usize, entry: Entry) {
        match &mut self.0 {
            Entries::InlineEntries(few) => few.entries[index] = entry,
            Entries::Many(ring) => ring.set(index, entry),
            Entries::Long(long) => long.set(index, entry),
        }
    }

    fn remove(&mut self, index: usize) {
        match &mut self.0 {
            Entries::InlineEntries(few) => {
                if index == 0 {
                    few.entries[0] = few.entries[1];
                }
                few.len -= 1;
                few.entries[usize::from(few.len)] = Entry::default();
            }
            Entries::Many(ring) => {
                ring.remove(index);
                if ring.len() == 0 {
                    *self = Log::default();
                }
            }
            Entries::Long(long) => {
                long.remove(index);
                self.shorten();
            }
        }
    }
}

impl InlineEntries {
    pub(super) fn one(entry: Entry) -> InlineEntries {
        InlineEntries { len: 1, entries: [entry, Entry::default()] }
    }

    #[inline]
    fn live(&self) -> &[Entry] {
        &self.entries[..usize::from(self.len)]
    }
}
