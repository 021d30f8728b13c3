//! What was heard lately, of more things than there may be room for.
//!
//! Denials, plans and the like are remembered for a second or so, of whoever happens to ask. A flood of callers must neither make
//! that grow nor make it dear. So there is room for so many; whoever finds none is not remembered; and a shard that is full is searched
//! for what may go, at most ten times a second. Nothing that still means something is pushed out by newcomers.
//!
//! Things go by a seeded hash of 128 bits. No name is kept, and nobody outside can find two names that meet.
//!
//! **One lock at a time.** Nothing in here calls back while a shard is locked but the caller's own look at one value.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

use foldhash::quality::RandomState;
use parking_lot::Mutex;
use tollgate_core::Timestamp;

const SHARDS: usize = 16;
/// A full shard is searched for what may go no more often than this.
const SWEEP_EVERY_US: u64 = 100_000;

/// Something that means less as time goes by.
pub(crate) trait Fading {
    /// Whether it may go when somebody else needs the room.
    fn may_go(&self, now: Timestamp) -> bool;
}

/// What was heard of each thing.
#[derive(Debug)]
pub(crate) struct Lately<V> {
    shards: [Mutex<Shard<V>>; SHARDS],
    hashers: [RandomState; 2],
    shard_len_max: usize,
}

/// A thing, by the hash of its name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Id(u64, u64);

#[derive(Debug)]
struct Shard<V> {
    entries: HashMap<Id, V, RandomState>,
    /// When it was last searched for what may go.
    swept: Timestamp,
}

impl<V: Fading> Lately<V> {
    /// Room for about so many things.
    pub(crate) fn new(len_max: usize) -> Lately<V> {
        let shard = |_| Mutex::new(Shard { entries: HashMap::default(), swept: Timestamp::ZERO });
        let shards = std::array::from_fn(shard);
        Lately { shards, hashers: Default::default(), shard_len_max: len_max.div_ceil(SHARDS) }
    }

    pub(crate) fn id(&self, name: impl Hash) -> Id {
        let [first, second] = self.hashers.each_ref().map(|hasher| hasher.hash_one(&name));
        Id(first, second)
    }

    /// What somebody sees who looks at what was heard of a thing, if anything was.
    pub(crate) fn look<T>(&self, id: Id, look: impl FnOnce(&V) -> T) -> Option<T> {
        self.shard(id).lock().entries.get(&id).map(look)
    }

    /// Remembers this of a thing, and nothing else, if there is room.
    pub(crate) fn put(&self, id: Id, value: V, now: Timestamp) {
        let mut shard = self.shard(id).lock();
        if shard.has_room_for(id, self.shard_len_max, now) {
            shard.entries.insert(id, value);
        }
    }

    /// Adds to what is remembered of a thing, if there is room.
    pub(crate) fn add(&self, id: Id, now: Timestamp, add: impl FnOnce(&mut V))
    where
        V: Default,
    {
        let mut shard = self.shard(id).lock();
        if shard.has_room_for(id, self.shard_len_max, now) {
            add(shard.entries.entry(id).or_default());
        }
    }

    pub(crate) fn forget(&self, id: Id) {
        self.shard(id).lock().entries.remove(&id);
    }

    fn shard(&self, id: Id) -> &Mutex<Shard<V>> {
        &self.shards[id.1 as usize % SHARDS]
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().entries.len()).sum()
    }
}

impl<V: Fading> Shard<V> {
    fn has_room_for(&mut self, id: Id, len_max: usize, now: Timestamp) -> bool {
        if self.entries.len() < len_max || self.entries.contains_key(&id) {
            return true;
        }
        // By a clock that was set back, the last search is yet to come: it is not waited for.
        if now < self.swept || now >= self.swept.plus_micros(SWEEP_EVERY_US) {
            self.swept = now;
            self.entries.retain(|_, value| !value.may_go(now));
        }
        self.entries.len() < len_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    /// Means something for a second.
    #[derive(Default)]
    struct Word(Timestamp);

    impl Fading for Word {
        fn may_go(&self, now: Timestamp) -> bool {
            now >= self.0.plus_micros(1_000_000)
        }
    }

    fn knows(lately: &Lately<Word>, id: Id) -> bool {
        lately.look(id, |_| ()).is_some()
    }

    #[test]
    fn a_flood_finds_no_room_until_what_is_there_has_faded() {
        let lately = Lately::new(1_600);
        for n in 0..100_000 {
            lately.put(lately.id(n), Word(START), START);
        }
        assert_eq!(lately.len(), 1_600);
        let (early, later) = (START.plus_micros(999_999), START.plus_micros(1_100_000));
        let late = lately.id("late");
        lately.put(late, Word(early), early);
        assert!(!knows(&lately, late));
        lately.put(late, Word(later), later);
        assert!(knows(&lately, late));
    }

    #[test]
    fn who_is_known_may_change_while_there_is_no_room() {
        let lately = Lately::new(1);
        let ids: Vec<Id> = (0..10_000).map(|n| lately.id(n)).collect();
        ids.iter().for_each(|&id| lately.put(id, Word(START), START));
        assert_eq!(lately.len(), SHARDS, "one in each shard");
        let known = *ids.iter().find(|&&id| knows(&lately, id)).unwrap();
        let later = START.plus_micros(5);
        lately.add(known, later, |word| word.0 = later);
        assert_eq!(lately.look(known, |word| word.0), Some(later));
        lately.forget(known);
        assert!(!knows(&lately, known));
    }
}
