//! The entries of a log: two inline, more in a ring.

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

/// A queue in a circle. It grows by a quarter, so at most a fifth of it is ever spare.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ring {
    slots: Box<[PackedEntry]>,
    head: u32,
    len: u32,
    total: u32,
}

/// A time (52 bits) and units (24 bits) in twelve bytes instead of the sixteen that alignment would take.
#[derive(Clone, Copy, Debug, Default)]
struct PackedEntry([u32; 3]);

impl PackedEntry {
    fn pack(Entry { time_us, units }: Entry) -> PackedEntry {
        PackedEntry([time_us as u32, (time_us >> 32) as u32, units])
    }

    fn unpack(self) -> Entry {
        let [low, high, units] = self.0;
        Entry { time_us: u64::from(high) << 32 | u64::from(low), units }
    }
}

impl Default for Log {
    fn default() -> Self {
        Log(Entries::Few(Few::default()))
    }
}

impl Log {
    pub(crate) fn from_few(few: Few) -> Log {
        Log(Entries::Few(few))
    }

    pub(crate) fn from_ring(ring: Ring) -> Log {
        Log(Entries::Many(ring))
    }

    pub(crate) fn into_parts(self) -> Result<Few, Ring> {
        match self.0 {
            Entries::Few(few) => Ok(few),
            Entries::Many(ring) => Err(ring),
        }
    }

    /// How many entries there are, those that have left but were not yet dropped included.
    pub fn len(&self) -> usize {
        match &self.0 {
            Entries::Few(few) => usize::from(few.len),
            Entries::Many(ring) => ring.len as usize,
        }
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The units of all entries together.
    pub(super) fn total(&self) -> u64 {
        match &self.0 {
            Entries::Few(few) => few.live().iter().map(|entry| u64::from(entry.units)).sum(),
            Entries::Many(ring) => u64::from(ring.total),
        }
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Entry {
        match &self.0 {
            Entries::Few(few) => few.live()[index],
            Entries::Many(ring) => ring.slots[ring.slot(index)].unpack(),
        }
    }

    #[inline]
    pub(super) fn newest(&self) -> Option<Entry> {
        self.len().checked_sub(1).map(|last| self.get(last))
    }

    /// Whether one more entry needs no more memory.
    pub(super) fn has_room(&self) -> bool {
        match &self.0 {
            Entries::Few(few) => few.len < 2,
            Entries::Many(ring) => (ring.len as usize) < ring.slots.len(),
        }
    }

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

    pub(super) fn set_newest(&mut self, entry: Entry) {
        if let Some(last) = self.len().checked_sub(1) {
            self.set(last, entry);
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

    /// Forgets the `count` oldest entries. A ring that ran empty gives its memory back.
    pub(super) fn drop_front(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        if count >= self.len() {
            *self = Log::default();
            return;
        }
        match &mut self.0 {
            Entries::Few(few) => *few = Few { len: 1, entries: [few.entries[1], Entry::default()] },
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
        while let Some(newest) = self.newest().filter(|newest| newest.time_us > time_us) {
            units += newest.units;
            self.remove(self.len() - 1);
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
                if ring.len == 0 {
                    *self = Log::default();
                }
            }
        }
    }
}

impl Few {
    fn live(&self) -> &[Entry] {
        &self.entries[..usize::from(self.len)]
    }
}

impl Ring {
    pub(crate) fn newest_us(&self) -> u64 {
        self.len.checked_sub(1).map_or(0, |last| self.slots[self.slot(last as usize)].unpack().time_us)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.slots.len() * size_of::<PackedEntry>()
    }

    /// Where the entry `index` places after the oldest one is.
    #[inline]
    fn slot(&self, index: usize) -> usize {
        let slot = self.head as usize + index;
        if slot >= self.slots.len() { slot - self.slots.len() } else { slot }
    }

    fn push(&mut self, entry: Entry, entries_max: usize) {
        if self.len as usize == self.slots.len() {
            self.grow(entries_max);
        }
        let slot = self.slot(self.len as usize);
        self.slots[slot] = PackedEntry::pack(entry);
        self.len += 1;
        self.total += entry.units;
    }

    /// By a quarter; not past `entries_max`, except for an entry left over from a larger limit.
    fn grow(&mut self, entries_max: usize) {
        let len = self.len as usize;
        let capacity = (len + len / 4 + 1).max(4).min(entries_max.max(len + 1));
        let slots =
            (0..capacity).map(|index| if index < len { self.slots[self.slot(index)] } else { PackedEntry::default() });
        *self = Ring { slots: slots.collect(), head: 0, ..*self };
    }

    fn set(&mut self, index: usize, entry: Entry) {
        let slot = self.slot(index);
        self.total = self.total - self.slots[slot].unpack().units + entry.units;
        self.slots[slot] = PackedEntry::pack(entry);
    }

    fn drop_front(&mut self, count: usize) {
        for index in 0..count {
            self.total -= self.slots[self.slot(index)].unpack().units;
        }
        self.head = self.slot(count) as u32;
        self.len -= count as u32;
    }

    fn remove(&mut self, index: usize) {
        self.total -= self.slots[self.slot(index)].unpack().units;
        for later in index + 1..self.len as usize {
            let (from, to) = (self.slot(later), self.slot(later - 1));
            self.slots[to] = self.slots[from];
        }
        self.len -= 1;
    }
}

impl PartialEq for Ring {
    /// The same entries, wherever in the circle they stand.
    fn eq(&self, other: &Self) -> bool {
        let entries = |ring: &Ring| -> Vec<Entry> {
            (0..ring.len as usize).map(|index| ring.slots[ring.slot(index)].unpack()).collect()
        };
        entries(self) == entries(other)
    }
}

impl Eq for Ring {}
