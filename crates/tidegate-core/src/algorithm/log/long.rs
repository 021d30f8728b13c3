//! The entries of a very long log: several rings, one after the other.
//!
//! ```text
//!   segments  │ ring, 1,024 entries │ ring, 1,024 entries │ ··· │ ring, 37 entries │
//!               newest time, units    newest time, units          newest time, units
//! ```
//!
//! **Problem.** A check asks a log of 100,000 entries when 50,000 units will have expired, or an entry in its middle is
//! refunded. With one ring, that takes hundreds of microseconds, during which all other checks of the shard wait for
//! its lock.
//!
//! **Idea.** Each segment stores its newest time and its units. An operation walks over the segments, of which there
//! are at most a few hundred, and then within one of them. The log grows by a segment, so no entry has to move.
//!
//! **Few segments.** When an entry is removed from the middle, two neighbours that together fill at most half a segment
//! are merged. So any two neighbours hold more than that, except for the first two and the last two.

use std::collections::VecDeque;

use super::ring::Ring;
use super::rings::Rings;
use super::{Entry, Oldest};

/// The maximum number of entries in a segment. Above what a limit with ticks can need, so only `sliding-log` has more.
pub(super) const SEGMENT_ENTRIES_MAX: usize = 1_024;
/// Two neighbouring segments that have at most this many entries together are merged when one of them loses an entry.
const JOINED_ENTRIES_MAX: usize = SEGMENT_ENTRIES_MAX / 2;

/// The entries of a log in at least two rings, none of them empty.
///
/// Fewer rings may be left after a removal. The caller must then convert it, as [`Log`](super::Log) does.
#[derive(Clone, Debug)]
pub(super) struct Long {
    /// The rings, the oldest entries first.
    pub(super) segments: VecDeque<Ring>,
    /// The number of entries in all rings.
    pub(super) len: usize,
    /// The units of all entries.
    pub(super) total: u32,
}

impl Long {
    /// Creates a log of the entries of `ring`, which must have [`SEGMENT_ENTRIES_MAX`], and a newer `entry`.
    pub(super) fn new(ring: Ring, entry: Entry, rings: &mut Rings) -> Long {
        let mut long = Long { segments: VecDeque::from([ring]), len: ring.len(), total: ring.total };
        long.push(entry, rings);
        long
    }

    pub(super) fn newest_us(&self) -> u64 {
        self.segments.back().map_or(0, |segment| segment.newest_us)
    }

    /// Returns the ring of the newest entries.
    ///
    /// # Panics
    /// Panics if there are no entries.
    pub(super) fn last(&self) -> &Ring {
        self.segments.back().expect("a very long log has rings")
    }

    /// Returns the bytes of the list of rings, without their entries.
    pub(super) fn list_bytes(&self) -> usize {
        self.segments.capacity() * size_of::<Ring>()
    }

    pub(super) fn get(&self, index: usize, rings: &Rings) -> Entry {
        let (segment, index) = self.segment_of(index);
        self.segments[segment].get(index, rings)
    }

    /// Replaces the entry `index` places after the oldest. Only the newest may get another time.
    pub(super) fn set(&mut self, index: usize, entry: Entry, rings: &mut Rings) {
        let (segment, index) = self.segment_of(index);
        let ring = &mut self.segments[segment];
        self.total -= ring.total;
        ring.set(index, entry, rings);
        self.total += ring.total;
    }

    pub(super) fn push(&mut self, entry: Entry, rings: &mut Rings) {
        self.len += 1;
        self.total += entry.units;
        match self.segments.back_mut() {
            Some(last) if last.len() < SEGMENT_ENTRIES_MAX => last.push(entry, SEGMENT_ENTRIES_MAX, rings),
            _ => {
                let mut segment = Ring::new(rings);
                segment.push(entry, SEGMENT_ENTRIES_MAX, rings);
                self.segments.push_back(segment);
            }
        }
    }

    /// Counts the entries earlier than `end_us`, and their units.
    pub(super) fn count_before(&self, end_us: u64, rings: &Rings) -> Oldest {
        let mut counted = Oldest::NONE;
        for segment in &self.segments {
            if segment.newest_us >= end_us {
                let within = segment.count_before(end_us, rings);
                return Oldest { entries: counted.entries + within.entries, units: counted.units + within.units };
            }
            counted =
                Oldest { entries: counted.entries + segment.len(), units: counted.units + u64::from(segment.total) };
        }
        counted
    }

    /// Returns the entry of the unit with this number, counted from 1 for the oldest unit. There must be an entry.
    ///
    /// Returns the newest entry if there are fewer units.
    pub(super) fn entry_of_unit(&self, unit: u64, rings: &Rings) -> Entry {
        let mut before = 0;
        for segment in &self.segments {
            let units = u64::from(segment.total);
            if before + units >= unit {
                return segment.entry_of_unit(unit - before, rings);
            }
            before += units;
        }
        self.get(self.len - 1, rings)
    }

    /// Removes the `count` oldest entries; there must be at least that many.
    pub(super) fn drop_front(&mut self, mut count: usize, rings: &mut Rings) {
        self.len -= count;
        while let Some(first) = self.segments.front_mut() {
            self.total -= first.total;
            if first.len() > count {
                first.drop_front(count, rings);
                self.total += first.total;
                return;
            }
            count -= first.len();
            self.remove_segment(0, rings);
        }
    }

    /// Removes the entries later than `time_us`, and returns their units.
    pub(super) fn remove_later_than(&mut self, time_us: u64, rings: &mut Rings) -> u32 {
        let before = self.total;
        // If the segment before the last one ends after `time_us`, so do all entries of the last one.
        while self.segments.len() > 1 && self.segments[self.segments.len() - 2].newest_us > time_us {
            if let Some(last) = self.remove_segment(self.segments.len() - 1, rings) {
                self.len -= last.len();
                self.total -= last.total;
            }
        }
        if let Some(last) = self.segments.back_mut() {
            let len = last.len();
            self.total -= last.remove_later_than(time_us, rings);
            self.len -= len - last.len();
            if last.len() == 0 {
                self.remove_segment(self.segments.len() - 1, rings);
            }
        }
        before - self.total
    }

    pub(super) fn remove(&mut self, index: usize, rings: &mut Rings) {
        let (segment, index) = self.segment_of(index);
        let ring = &mut self.segments[segment];
        self.len -= 1;
        self.total -= ring.get(index, rings).units;
        ring.remove(index, rings);
        if ring.len() == 0 {
            self.remove_segment(segment, rings);
            return;
        }
        for first in [segment, segment.saturating_sub(1)] {
            if first + 1 < self.segments.len()
                && self.segments[first].len() + self.segments[first + 1].len() <= JOINED_ENTRIES_MAX
            {
                self.join(first, rings);
            }
        }
    }

    /// Moves the entries of the segment after the one with the index `first` into that one, and removes the former.
    ///
    /// There must be a segment after it. Together they must have at most [`SEGMENT_ENTRIES_MAX`] entries.
    fn join(&mut self, first: usize, rings: &mut Rings) {
        let second = self.segments[first + 1];
        for index in 0..second.len() {
            self.segments[first].push(second.get(index, rings), SEGMENT_ENTRIES_MAX, rings);
        }
        self.remove_segment(first + 1, rings);
    }

    /// Removes the ring with this index from the list and frees it. `len` and `total` stay as they are.
    ///
    /// Returns the ring without its entries, or `None` if there is no such index.
    fn remove_segment(&mut self, index: usize, rings: &mut Rings) -> Option<Ring> {
        let removed = self.segments.remove(index)?;
        rings.free(removed.number);
        Some(removed)
    }

    /// Returns the index of the segment that holds the entry `index` places after the oldest, and its index in there.
    ///
    /// # Panics
    /// Panics if there is no such entry.
    fn segment_of(&self, mut index: usize) -> (usize, usize) {
        for (segment, ring) in self.segments.iter().enumerate() {
            if index < ring.len() {
                return (segment, index);
            }
            index -= ring.len();
        }
        unreachable!("an index is below the number of entries")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares random operations with the same ones on a plain list of entries.
    #[test]
    fn several_rings_agree_with_one_list() {
        let mut random = 7_u64;
        let mut below = |bound: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % bound
        };
        for _ in 0..40 {
            let mut now_us = 1_760_000_000_000_000;
            let first = Entry { time_us: now_us, units: 1 };
            let mut rings = Rings::default();
            let mut ring = Ring::new(&mut rings);
            ring.push(first, SEGMENT_ENTRIES_MAX, &mut rings);
            let mut list = vec![first];
            while list.len() < SEGMENT_ENTRIES_MAX {
                now_us += 1 + below(3) as u64;
                let entry = Entry { time_us: now_us, units: 1 + below(4) as u32 };
                ring.push(entry, SEGMENT_ENTRIES_MAX, &mut rings);
                list.push(entry);
            }
            now_us += 1;
            let entry = Entry { time_us: now_us, units: 2 };
            let mut long = Long::new(ring, entry, &mut rings);
            list.push(entry);
            for _ in 0..400 {
                match below(12) {
                    0..=2 => {
                        for _ in 0..below(700) {
                            now_us += 1 + below(3) as u64;
                            // A few entries need two words.
                            let units = if below(2_000) == 0 { 600_000 } else { 1 + below(4) as u32 };
                            list.push(Entry { time_us: now_us, units });
                            long.push(Entry { time_us: now_us, units }, &mut rings);
                        }
                    }
                    3 => {
                        let from = below(list.len());
                        for _ in 0..below(900).min(list.len() - from) {
                            let index = if from < list.len() { from } else { list.len() - 1 };
                            if list.len() > 1 {
                                list.remove(index);
                                long.remove(index, &mut rings);
                            }
                        }
                    }
                    4 => {
                        let count = below(list.len().min(3_000));
                        list.drain(..count);
                        long.drop_front(count, &mut rings);
                    }
                    5 => {
                        let after = list[list.len() - 1 - below(list.len().min(1_500))];
                        let later: Vec<Entry> =
                            list.iter().copied().filter(|entry| entry.time_us > after.time_us).collect();
                        list.truncate(list.len() - later.len());
                        let units: u32 = later.iter().map(|entry| entry.units).sum();
                        assert_eq!(long.remove_later_than(after.time_us, &mut rings), units);
                        now_us = after.time_us;
                    }
                    6 => {
                        let index = below(list.len());
                        list[index].units += 1;
                        long.set(index, list[index], &mut rings);
                    }
                    _ => {
                        let time_us = list[below(list.len())].time_us + below(2) as u64;
                        let entries = list.iter().take_while(|entry| entry.time_us <= time_us).count();
                        let units: u32 = list[..entries].iter().map(|entry| entry.units).sum();
                        let counted = long.count_before(time_us + 1, &rings);
                        assert_eq!((counted.entries, counted.units), (entries, u64::from(units)));
                        let holder = list[entries - 1];
                        assert_eq!(long.entry_of_unit(counted.units, &rings), holder);
                        assert_eq!(long.entry_of_unit(counted.units - u64::from(holder.units) + 1, &rings), holder);
                        assert_eq!(long.get(entries - 1, &rings), holder);
                    }
                }
                let total: u32 = list.iter().map(|entry| entry.units).sum();
                assert_eq!((long.len, long.total, long.newest_us()), (list.len(), total, list[list.len() - 1].time_us));
                assert!(long.segments.iter().all(|segment| (1..=SEGMENT_ENTRIES_MAX).contains(&segment.len())));
                assert!(
                    long.segments.len() <= 4 + 2 * long.len / JOINED_ENTRIES_MAX,
                    "{} of {}",
                    long.segments.len(),
                    long.len
                );
            }
            assert!(list.iter().enumerate().all(|(index, entry)| long.get(index, &rings) == *entry));
        }
    }
}
