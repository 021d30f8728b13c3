//! The entries of a log: two inline, more in a ring, very many in several rings.

use super::Oldest;
use super::long::{Long, SEGMENT_ENTRIES_MAX};
use super::ring::Ring;
use super::rings::Rings;
use crate::algorithm::packed::{Packed, tag};

/// Units that were charged at one time or within one tick, or that were joined because the log could not grow or the
/// clock went back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Entry {
    /// The time of the latest of these charges; after the clock went back, the time at which they were joined.
    pub(super) time_us: u64,
    /// The units of all of them; 0 only in an unused entry.
    pub(super) units: u32,
}

/// The state of `sliding` and `sliding-log`: admissions as (time, units), oldest first, with their total.
///
/// The entries of a longer log are in [`Rings`], which every operation on them takes as its last argument. A copy of a
/// longer log has the same entries, so it must not be used after a change of the original.
// Plain fields, which the compiler keeps in registers. The rare changes of form are functions from one log to another,
// so that they need no address of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Log {
    form: Form,
    /// The newest time, the number of entries and the total, in every form. The number is that of the ring or of the
    /// list of rings. The other fields are those of a single ring.
    ring: Ring,
    /// The older of two inline entries; else [`Entry::default`].
    older: Entry,
}

/// Where the entries of a log are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    /// At most two entries, inline.
    Few,
    /// In one ring.
    Ring,
    /// In several rings: a [`Long`].
    Long,
}

impl Default for Log {
    fn default() -> Self {
        let ring = Ring { number: 0, newest_us: 0, first: 0, len: 0, total: 0, is_wide: false };
        Log { form: Form::Few, ring, older: Entry::default() }
    }
}

// The fields of the small number. Of at most two entries: the units of the older and of the newest one, the number of
// entries. Of a longer log: the number of the ring, the position of the oldest entry, whether entries are wide. Its wide
// number: the number of entries, the total. A log has at most 100,000 entries, which is below 2^17.
const UNITS_BITS: u32 = 24;
const UNITS_MASK: u64 = (1 << UNITS_BITS) - 1;
const RING_NUMBER_BITS: u32 = 32;
const RING_FIRST_BITS: u32 = 17;
const RING_LEN_BITS: u32 = 17;

impl Log {
    /// Creates a log with a single entry.
    pub(super) fn one(entry: Entry) -> Log {
        let mut log = Log::default();
        (log.ring.newest_us, log.ring.len, log.ring.total) = (entry.time_us, 1, entry.units);
        log
    }

    /// Creates a log without entries. Its packed state is kept for a lifetime after `time_us`, so that the counter of a
    /// client that is denied by other limits is not dropped and added again between any two checks.
    pub(super) fn empty_since(time_us: u64) -> Log {
        let mut log = Log::default();
        log.ring.newest_us = time_us;
        log
    }

    fn of_ring(ring: Ring) -> Log {
        Log { form: Form::Ring, ring, older: Entry::default() }
    }

    /// Reads a log, or an unused state.
    #[inline(always)]
    pub(in crate::algorithm) fn unpacked(packed: &Packed) -> Log {
        let (newest_us, small, wide) = (packed.time_us(), packed.small(), packed.wide());
        let mut log = Log::default();
        if packed.tag() > tag::LOG_FEW {
            log.form = if packed.tag() == tag::LOG_RING { Form::Ring } else { Form::Long };
            log.ring = Ring {
                number: small as u32,
                newest_us,
                first: (small >> RING_NUMBER_BITS) as u32 & ((1 << RING_FIRST_BITS) - 1),
                len: wide as u32 & ((1 << RING_LEN_BITS) - 1),
                total: (wide >> RING_LEN_BITS) as u32,
                is_wide: small >> (RING_NUMBER_BITS + RING_FIRST_BITS) & 1 == 1,
            };
        } else {
            let units = [small & UNITS_MASK, small >> UNITS_BITS & UNITS_MASK].map(|units| units as u32);
            log.ring.newest_us = newest_us;
            (log.ring.len, log.ring.total) = ((small >> (2 * UNITS_BITS)) as u32, units[0] + units[1]);
            if log.ring.len == 2 {
                log.older = Entry { time_us: newest_us - wide, units: units[0] };
            }
        }
        log
    }

    #[inline(always)]
    pub(in crate::algorithm) fn packed_into(&self, packed: &mut Packed) {
        let Log { form, ring, older } = *self;
        if form == Form::Few {
            let apart_us = if ring.len == 2 { ring.newest_us - older.time_us } else { 0 };
            let units = u64::from(older.units) | u64::from(ring.total - older.units) << UNITS_BITS;
            let small = units | u64::from(ring.len) << (2 * UNITS_BITS);
            packed.set(tag::LOG_FEW, ring.newest_us, apart_us, small);
        } else {
            let small = u64::from(ring.number)
                | u64::from(ring.first) << RING_NUMBER_BITS
                | u64::from(ring.is_wide) << (RING_NUMBER_BITS + RING_FIRST_BITS);
            let wide = u64::from(ring.len) | u64::from(ring.total) << RING_LEN_BITS;
            let tag = if form == Form::Ring { tag::LOG_RING } else { tag::LOG_LONG };
            packed.set(tag, ring.newest_us, wide, small);
        }
    }

    /// Returns the number of entries, including expired ones that were not dropped yet.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.ring.len()
    }

    /// Returns the units of all entries, including expired ones that were not dropped yet.
    #[inline(always)]
    pub(super) fn total(&self) -> u64 {
        self.ring.total.into()
    }

    /// Returns the time of the newest entry, or `None` if there are no entries.
    #[inline(always)]
    pub(super) fn newest_us(&self) -> Option<u64> {
        (self.ring.len > 0).then_some(self.ring.newest_us)
    }

    /// Returns the newer of two inline entries, or the only one.
    #[inline(always)]
    fn newer(&self) -> Entry {
        Entry { time_us: self.ring.newest_us, units: self.ring.total - self.older.units }
    }

    #[inline(always)]
    pub(super) fn get(&self, index: usize, rings: &Rings) -> Entry {
        match self.form {
            Form::Few if index + 1 == self.len() => self.newer(),
            Form::Few => self.older,
            Form::Ring => self.ring.get(index, rings),
            Form::Long => rings.long(self.ring.number).get(index, rings),
        }
    }

    /// Returns whether so many units can certainly be added to the newest entry without allocating memory.
    #[inline(always)]
    pub(super) fn units_fit(&self, units: u32, rings: &Rings) -> bool {
        match self.form {
            Form::Few => true,
            Form::Ring => self.ring.units_fit(units),
            Form::Long => rings.long(self.ring.number).last().units_fit(units),
        }
    }

    /// Returns the bytes that must be reallocated if the log grows by an entry.
    #[cold]
    pub(super) fn bytes_to_grow(self, rings: &Rings) -> usize {
        let moved = match self.form {
            Form::Few => 0,
            Form::Ring => self.ring.bytes(rings),
            Form::Long => rings.long(self.ring.number).last().bytes(rings),
        };
        moved + rings.moving_bytes()
    }

    /// Appends an entry, which must not be earlier than the newest, if that needs no memory. Returns whether it did.
    #[inline(always)]
    pub(super) fn push_in_place(&mut self, entry: Entry, rings: &mut Rings) -> bool {
        match self.form {
            Form::Few if self.ring.len < 2 => {
                self.older = if self.ring.len == 1 { self.newer() } else { Entry::default() };
                (self.ring.newest_us, self.ring.len) = (entry.time_us, self.ring.len + 1);
                self.ring.total += entry.units;
                true
            }
            Form::Few => false,
            Form::Ring => self.ring.push_in_place(entry, rings),
            Form::Long => {
                let has_room = rings.long(self.ring.number).last().has_room_for(entry.units, rings);
                if has_room {
                    *self = self.with_changed_long(rings, |long, rings| long.push(entry, rings));
                }
                has_room
            }
        }
    }

    /// Appends an entry, which must not be earlier than the newest, to a log that has no room for it.
    #[cold]
    pub(super) fn pushed(self, entry: Entry, entries_max: usize, rings: &mut Rings) -> Log {
        match self.form {
            Form::Few => {
                let mut ring = Ring::new(rings);
                [self.older, self.newer(), entry].into_iter().for_each(|entry| ring.push(entry, entries_max, rings));
                Log::of_ring(ring)
            }
            Form::Ring if self.len() >= SEGMENT_ENTRIES_MAX && self.ring.is_full(rings) => {
                let long = Long::new(self.ring, entry, rings);
                Log::of_long(rings.put_long(long), rings)
            }
            Form::Ring => {
                let mut ring = self.ring;
                ring.push(entry, entries_max.min(SEGMENT_ENTRIES_MAX), rings);
                Log::of_ring(ring)
            }
            Form::Long => self.with_changed_long(rings, |long, rings| long.push(entry, rings)),
        }
    }

    /// Adds units to the newest entry and moves it to `time_us`, which must not be earlier than its time.
    ///
    /// There must be an entry. May allocate memory if [`Log::units_fit`] is `false`.
    #[inline(always)]
    pub(super) fn add_to_newest(&mut self, time_us: u64, units: u32, rings: &mut Rings) {
        match self.form {
            Form::Few => (self.ring.newest_us, self.ring.total) = (time_us, self.ring.total + units),
            Form::Ring => self.ring.add_to_newest(time_us, units, rings),
            Form::Long => {
                let change = |long: &mut Long, rings: &mut Rings| {
                    let newest = long.get(long.len - 1, rings);
                    long.set(long.len - 1, Entry { time_us, units: newest.units + units }, rings);
                };
                *self = self.with_changed_long(rings, change);
            }
        }
    }

    /// Joins all entries into one at `time_us`, which must not be earlier than the newest, and adds units to it.
    #[cold]
    pub(super) fn joined(self, time_us: u64, units: u32, rings: &mut Rings) -> Log {
        self.free(rings);
        Log::one(Entry { time_us, units: self.ring.total + units })
    }

    /// Returns the time of the oldest entry, which is meaningless if there are no entries.
    #[inline(always)]
    pub(super) fn oldest_us(&self, rings: &Rings) -> u64 {
        match self.form {
            Form::Few => {
                if self.ring.len == 2 {
                    self.older.time_us
                } else {
                    self.ring.newest_us
                }
            }
            Form::Ring | Form::Long => self.get(0, rings).time_us,
        }
    }

    /// Removes the entries earlier than `begin_us`. Returns the time of the oldest entry, which is meaningless if none is left.
    #[inline(always)]
    pub(super) fn drop_before(&mut self, begin_us: u64, rings: &mut Rings) -> u64 {
        if self.ring.newest_us < begin_us || self.form == Form::Long {
            *self = self.without_oldest(self.count_before(begin_us, rings).entries, rings);
        } else if self.form == Form::Ring {
            let before = self.ring.len;
            let oldest_us = self.ring.drop_before(begin_us, rings);
            if self.ring.len == 1 && before > 1 {
                *self = self.without_oldest(0, rings);
            }
            return oldest_us;
        } else if self.ring.len == 2 && self.older.time_us < begin_us {
            self.ring.len = 1;
            self.ring.total -= self.older.units;
            self.older = Entry::default();
        }
        self.oldest_us(rings)
    }

    /// Removes the `count` oldest entries; all of them if there are not more. A single one that is left becomes inline.
    #[inline(never)]
    fn without_oldest(self, count: usize, rings: &mut Rings) -> Log {
        let left = self.len().saturating_sub(count);
        if left <= 1 {
            let newest = self.get(self.len().saturating_sub(1), rings);
            self.free(rings);
            return if left == 1 { Log::one(newest) } else { Log::default() };
        }
        match self.form {
            Form::Few => self,
            Form::Ring => {
                let mut ring = self.ring;
                ring.drop_front(count, rings);
                Log::of_ring(ring)
            }
            Form::Long => self.with_changed_long(rings, |long, rings| long.drop_front(count, rings)),
        }
    }

    /// Removes `units` units, the oldest first; all entries if there are not more.
    #[cold]
    pub(super) fn without_oldest_units(self, units: u64, rings: &mut Rings) -> Log {
        if units == 0 || units >= self.total() {
            return if units == 0 { self } else { self.without_oldest(usize::MAX, rings) };
        }
        let cut = self.entry_of_unit(units, rings);
        let kept = self.count_before(cut.time_us + 1, rings);
        // A part of the last of these entries may be left.
        let left = (kept.units - units) as u32;
        let log = self.without_oldest(if left > 0 { kept.entries - 1 } else { kept.entries }, rings);
        if left > 0 { log.with(0, Entry { units: left, ..cut }, rings) } else { log }
    }

    /// Removes the entries later than `time_us`. Returns the log and their units.
    #[cold]
    pub(super) fn without_later_than(self, time_us: u64, rings: &mut Rings) -> (Log, u32) {
        let mut log = self;
        match self.form {
            Form::Few if self.ring.len == 2 && self.older.time_us <= time_us => log = Log::one(self.older),
            Form::Few => log = Log::default(),
            Form::Ring => {
                log.ring.remove_later_than(time_us, rings);
            }
            Form::Long => {
                log = self.with_changed_long(rings, |long, rings| {
                    long.remove_later_than(time_us, rings);
                });
            }
        }
        (log.shortened(rings), self.ring.total - log.ring.total)
    }

    /// Counts the entries earlier than `end_us`, and their units.
    #[inline(always)]
    pub(super) fn count_before(&self, end_us: u64, rings: &Rings) -> Oldest {
        if self.ring.newest_us < end_us {
            return Oldest { entries: self.len(), units: self.total() };
        }
        match self.form {
            Form::Few if self.ring.len == 2 && self.older.time_us < end_us => Oldest::NONE.with(self.older),
            Form::Few => Oldest::NONE,
            Form::Ring => self.ring.count_before(end_us, rings),
            Form::Long => rings.long(self.ring.number).count_before(end_us, rings),
        }
    }

    /// Returns the entry of the unit with this number, counted from 1 for the oldest unit. There must be an entry.
    ///
    /// Returns the newest entry if there are fewer units.
    #[inline(always)]
    pub(super) fn entry_of_unit(&self, unit: u64, rings: &Rings) -> Entry {
        match self.form {
            Form::Few if u64::from(self.older.units) >= unit => self.older,
            Form::Few => self.newer(),
            Form::Ring => self.ring.entry_of_unit(unit, rings),
            Form::Long => rings.long(self.ring.number).entry_of_unit(unit, rings),
        }
    }

    /// Returns the log with other units in the entry `index` places after the oldest. An entry without units is removed.
    pub(super) fn with_units(self, index: usize, units: u32, rings: &mut Rings) -> Log {
        let log = self.with(index, Entry { units, ..self.get(index, rings) }, rings);
        if units > 0 {
            return log;
        }
        let mut shorter = log;
        match log.form {
            Form::Few if log.ring.len == 2 => shorter = Log::one(log.get(1 - index, rings)),
            Form::Few => shorter = Log::default(),
            Form::Ring => shorter.ring.remove(index, rings),
            Form::Long => shorter = log.with_changed_long(rings, |long, rings| long.remove(index, rings)),
        }
        shorter.shortened(rings)
    }

    /// Frees the memory of the entries. The log must not be used again.
    pub(in crate::algorithm) fn free(self, rings: &mut Rings) {
        if self.form == Form::Long {
            rings.long(self.ring.number).segments.clone().iter().for_each(|ring| rings.free(ring.number));
        }
        if self.form != Form::Few {
            rings.free(self.ring.number);
        }
    }

    /// Moves the entries from `from` to `to`, and returns the moved log. This one must not be used again.
    pub(in crate::algorithm) fn moved(self, from: &mut Rings, to: &mut Rings) -> Log {
        let moved =
            |ring: &Ring, from: &mut Rings, to: &mut Rings| Ring { number: from.move_ring(ring.number, to), ..*ring };
        match self.form {
            Form::Few => self,
            Form::Ring => Log::of_ring(moved(&self.ring, from, to)),
            Form::Long => {
                let mut long = from.long(self.ring.number).clone();
                long.segments.iter_mut().for_each(|ring| *ring = moved(ring, from, to));
                Log::of_long(to.put_long(long), to)
            }
        }
    }

    /// Returns the log with another entry `index` places after the oldest. Only the newest may get another time.
    fn with(self, index: usize, entry: Entry, rings: &mut Rings) -> Log {
        let mut log = self;
        match self.form {
            Form::Few if index + 1 == self.len() => {
                (log.ring.newest_us, log.ring.total) = (entry.time_us, self.older.units + entry.units);
            }
            Form::Few => (log.older, log.ring.total) = (entry, self.newer().units + entry.units),
            Form::Ring => log.ring.set(index, entry, rings),
            Form::Long => log = self.with_changed_long(rings, |long, rings| long.set(index, entry, rings)),
        }
        log
    }

    /// Changes the list of rings, and returns the log in its present form.
    #[cold]
    #[inline(never)]
    fn with_changed_long(self, rings: &mut Rings, change: impl FnOnce(&mut Long, &mut Rings)) -> Log {
        rings.change_long(self.ring.number, change);
        Log::of_long(self.ring.number, rings).shortened(rings)
    }

    /// Returns the log whose entries are in the list of rings with this number.
    fn of_long(number: u32, rings: &Rings) -> Log {
        let long = rings.long(number);
        let (newest_us, len, total) = (long.newest_us(), long.len as u32, long.total);
        let ring = Ring { number, newest_us, len, total, first: 0, is_wide: false };
        Log { form: Form::Long, ring, older: Entry::default() }
    }

    /// Converts a ring without entries, and a list of rings of which one or none is left, to the shorter form. Returns
    /// other logs unchanged.
    fn shortened(self, rings: &mut Rings) -> Log {
        if self.ring.len == 0 {
            self.free(rings);
            return Log::default();
        }
        match self.form {
            Form::Long if rings.long(self.ring.number).segments.len() == 1 => {
                let only = *rings.long(self.ring.number).last();
                rings.free(self.ring.number);
                Log::of_ring(only)
            }
            _ => self,
        }
    }
}
