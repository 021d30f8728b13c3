//! The entries of a log: two inline, more in a ring.

use super::ring::Ring;

/// Units admitted at one time (or within one tick that ended at this time).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Entry {
    pub(crate) time_us: u64,
    pub(crate) units: u32,
}

/// Admissions as (time, units), oldest first, with their total.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Log(Entries);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Entries {
    Few(Few),
    Many(Ring),
}

/// Up to two entries, kept where the log itself is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Few {
    pub(crate) len: u8,
    pub(crate) entries: [Entry; 2],
}

impl Default for Log {
    fn default() -> Self {
        Log(Entries::Few(Few::default()))
    }
}

impl Log {
    #[inline]
    pub(crate) fn from_few(few: Few) -> Log {
        Log(Entries::Few(few))
    }

    #[inline]
    pub(crate) fn from_ring(ring: Ring) -> Log {
        Log(Entries::Many(ring))
    }

    #[inline]
    pub(crate) fn into_parts(self) -> Result<Few, Ring> {
        match self.0 {
            Entries::Few(few) => Ok(few),
            Entries::Many(ring) => Err(ring),
        }
    }

    /// How many entries there are, those that have left but were not yet dropped included.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.0 {
            Entries::Few(few) => usize::from(few.len),
            Entries::Many(ring) => ring.len(),
        }
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The units of all entries together.
    #[inline]
    pub(super) fn total(&self) -> u64 {
        match &self.0 {
            Entries::Few(few) => few.live().iter().map(|entry| u64::from(entry.units)).sum(),
            Entries::Many(ring) => u64::from(ring.head().total),
        }
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Entry {
        match &self.0 {
            Entries::Few(few) => few.live()[index],
            Entries::Many(ring) => ring.get(index),
        }
    }

    /// The time of the newest entry.
    #[inline]
    pub(super) fn newest_us(&self) -> Option<u64> {
        match &self.0 {
            Entries::Few(few) => few.live().last().map(|entry| entry.time_us),
            Entries::Many(ring) => Some(ring.head().newest_us),
        }
    }

    /// Whether one more entry of so many units needs no more memory.
    #[inline]
    pub(crate) fn has_room_for(&self, units: u32) -> bool {
        match &self.0 {
            Entries::Few(few) => few.len < 2,
            Entries::Many(ring) => ring.len() < ring.capacity() && ring.takes(units),
        }
    }

    #[inline]
    pub(super) fn push(&mut self, entry: Entry, entries_max: usize) {
        match &mut self.0 {
            Entries::Few(few) if few.len < 2 => {
                few.entries[usize::from(few.len)] = entry;
                few.len += 1;
            }
            Entries::Few(few) => {
                let mut ring = Ring::default();
                for &older in few.live() {
                    ring.push(older, entries_max);
                }
                ring.push(entry, entries_max);
                self.0 = Entries::Many(ring);
            }
            Entries::Many(ring) => ring.push(entry, entries_max),
        }
    }

    /// Adds units to the newest entry and moves it to `time_us`. If that takes more memory and there is none,
    /// everything becomes one entry.
    pub(super) fn stretch_newest(&mut self, time_us: u64, units: u32, may_grow: bool) {
        let Some(last) = self.len().checked_sub(1) else { return };
        match &self.0 {
            Entries::Many(ring) if !may_grow && !ring.takes(units) => {
                let units = ring.head().total + units;
                self.0 = Entries::Few(Few::one(Entry { time_us, units }));
            }
            _ => self.set(last, Entry { time_us, units: self.get(last).units + units }),
        }
    }

    /// Changes the units of an entry; one without units goes.
    pub(super) fn set_units(&mut self, index: usize, units: u32) {
        let entry = self.get(index);
        self.set(index, Entry { units, ..entry });
        if units == 0 {
            self.remove(index);
        }
    }

    /// Forgets the `count` oldest entries. A ring of which at most one is left gives its memory back.
    #[inline]
    pub(super) fn drop_front(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let left = self.len().saturating_sub(count);
        match &mut self.0 {
            _ if left == 0 => *self = Log::default(),
            Entries::Few(few) => *few = Few::one(few.entries[1]),
            Entries::Many(ring) if left == 1 => *self = Log::from_few(Few::one(ring.get(count))),
            Entries::Many(ring) => ring.drop_front(count),
        }
    }

    /// Takes units from the oldest entries.
    pub(super) fn take_oldest(&mut self, mut units: u64) {
        while units > 0 && !self.is_empty() {
            let oldest = self.get(0);
            let taken = units.min(u64::from(oldest.units));
            units -= taken;
            if taken == u64::from(oldest.units) {
                self.drop_front(1);
            } else {
                self.set(0, Entry { units: oldest.units - taken as u32, ..oldest });
            }
        }
    }

    /// Removes the entries after `time_us` and says how many units they held.
    pub(super) fn take_later_than(&mut self, time_us: u64) -> u32 {
        let mut units = 0;
        while self.newest_us().is_some_and(|newest_us| newest_us > time_us) {
            let newest = self.len() - 1;
            units += self.get(newest).units;
            self.remove(newest);
        }
        units
    }

    /// Bytes on the heap.
    pub(crate) fn heap_bytes(&self) -> usize {
        match &self.0 {
            Entries::Few(_) => 0,
            Entries::Many(ring) => ring.heap_bytes(),
        }
    }

    #[inline]
    fn set(&mut self, index: usize, entry: Entry) {
        match &mut self.0 {
            Entries::Few(few) => few.entries[index] = entry,
            Entries::Many(ring) => ring.set(index, entry),
        }
    }

    fn remove(&mut self, index: usize) {
        match &mut self.0 {
            Entries::Few(few) => {
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
        }
    }
}

impl Few {
    pub(super) fn one(entry: Entry) -> Few {
        Few { len: 1, entries: [entry, Entry::default()] }
    }

    #[inline]
    fn live(&self) -> &[Entry] {
        &self.entries[..usize::from(self.len)]
    }
}
