//! A bounded cache of values that expire.
//!
//! Denials, plans and similar facts are cached for about a second per client. A flood of clients must make the cache
//! neither large nor slow. So its size is fixed, and a new entry that finds no room is not cached. A full shard is
//! swept for expired entries at most ten times a second. New entries never evict entries that have not expired.
//!
//! Entries are found by a seeded 128-bit hash. Names are not stored, and a client that does not know the seed cannot
//! construct two names with the same hash.
//!
//! **One lock at a time.** While a shard is locked, the only foreign code that runs is the caller's closure on one
//! value.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

use foldhash::quality::RandomState;
use parking_lot::Mutex;
use tidegate_core::Timestamp;

/// Number of shards, each with a lock of its own.
const SHARDS: usize = 16;
/// Minimum time between two sweeps of a full shard, in microseconds.
const SWEEP_EVERY_US: u64 = 100_000;

/// A cached value that can tell whether it has expired.
pub(crate) trait Expire {
    /// Returns whether the value has expired at `now`. A full cache removes expired values to make room.
    fn is_expired(&self, now: Timestamp) -> bool;
}

/// A cache of bounded size, keyed by the hash of a name.
///
/// Expired entries stay, and reads return them, until their shard is full and a new entry needs their room. A full
/// shard is swept for expired entries at most ten times a second. If there is still no room, the new entry is not
/// cached: entries that have not expired are never evicted.
#[derive(Debug)]
pub(crate) struct TtlCache<V> {
    shards: [Mutex<CacheShard<V>>; SHARDS],
    hashers: [RandomState; 2],
    shard_len_max: usize,
}

/// The key of an entry: the 128-bit hash of its name, made by [`TtlCache::id`]. Valid in that cache only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Id(u64, u64);

/// One of the 16 parts of the cache, each with its own lock.
#[derive(Debug)]
struct CacheShard<V> {
    entries: HashMap<Id, V, RandomState>,
    /// The time of the last sweep for expired entries.
    swept: Timestamp,
}

impl<V: Expire> TtlCache<V> {
    /// Creates an empty cache of at most `len_max` entries, rounded up to a multiple of 16.
    ///
    /// Each of the 16 shards holds a sixteenth of them, so one shard may be full while others have room.
    pub(crate) fn new(len_max: usize) -> TtlCache<V> {
        let shard = |_| Mutex::new(CacheShard { entries: HashMap::default(), swept: Timestamp::ZERO });
        let shards = std::array::from_fn(shard);
        TtlCache { shards, hashers: Default::default(), shard_len_max: len_max.div_ceil(SHARDS) }
    }

    /// Returns the key of the entry with this name: its hash, seeded at random for each cache.
    pub(crate) fn id(&self, name: impl Hash) -> Id {
        let [first, second] = self.hashers.each_ref().map(|hasher| hasher.hash_one(&name));
        Id(first, second)
    }

    /// Returns `read(value)` for the entry with this id, or `None` if there is no entry.
    ///
    /// The value may have expired: `read` has to check that. The shard is locked while `read` runs.
    pub(crate) fn get_with<T>(&self, id: Id, read: impl FnOnce(&V) -> T) -> Option<T> {
        self.shard(id).lock().entries.get(&id).map(read)
    }

    /// Inserts or replaces the entry with this id.
    ///
    /// If the entry is new and its shard is full, the entries that have expired at `now` are removed first, but at most
    /// ten times a second. If there is still no room, nothing is inserted.
    pub(crate) fn put(&self, id: Id, value: V, now: Timestamp) {
        let mut shard = self.shard(id).lock();
        if shard.has_room_for(id, self.shard_len_max, now) {
            shard.entries.insert(id, value);
        }
    }

    /// Applies `change` to the value with this id, which is created with its default if there is no entry.
    ///
    /// `change` is not called if the entry is new and finds no room, as in [`put`](TtlCache::put). The shard is locked
    /// while `change` runs.
    pub(crate) fn update(&self, id: Id, now: Timestamp, change: impl FnOnce(&mut V))
    where
        V: Default,
    {
        let mut shard = self.shard(id).lock();
        if shard.has_room_for(id, self.shard_len_max, now) {
            change(shard.entries.entry(id).or_default());
        }
    }

    /// Removes the entry with this id, expired or not, if there is one.
    pub(crate) fn forget(&self, id: Id) {
        self.shard(id).lock().entries.remove(&id);
    }

    fn shard(&self, id: Id) -> &Mutex<CacheShard<V>> {
        &self.shards[id.1 as usize % SHARDS]
    }

    /// Returns the number of entries, expired ones included.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().entries.len()).sum()
    }
}

impl<V: Expire> CacheShard<V> {
    /// Returns whether the entry with this id exists, or a new one fits below `len_max`.
    ///
    /// Removes the expired entries of a full shard first, unless that was done less than 100 ms ago.
    fn has_room_for(&mut self, id: Id, len_max: usize, now: Timestamp) -> bool {
        if self.entries.len() < len_max || self.entries.contains_key(&id) {
            return true;
        }
        // If the clock was set back, the last sweep is in the future. Sweep now instead of waiting for that time.
        if now < self.swept || now >= self.swept.plus_micros(SWEEP_EVERY_US) {
            self.swept = now;
            self.entries.retain(|_, value| !value.is_expired(now));
        }
        self.entries.len() < len_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    /// A value that expires one second after its timestamp.
    #[derive(Default)]
    struct Stamped(Timestamp);

    impl Expire for Stamped {
        fn is_expired(&self, now: Timestamp) -> bool {
            now >= self.0.plus_micros(1_000_000)
        }
    }

    fn contains(cache: &TtlCache<Stamped>, id: Id) -> bool {
        cache.get_with(id, |_| ()).is_some()
    }

    #[test]
    fn new_entries_find_no_room_until_old_ones_have_expired() {
        let cache = TtlCache::new(1_600);
        for n in 0..100_000 {
            cache.put(cache.id(n), Stamped(START), START);
        }
        assert_eq!(cache.len(), 1_600);
        let (early, later) = (START.plus_micros(999_999), START.plus_micros(1_100_000));
        let late = cache.id("late");
        cache.put(late, Stamped(early), early);
        assert!(!contains(&cache, late));
        cache.put(late, Stamped(later), later);
        assert!(contains(&cache, late));
    }

    #[test]
    fn existing_entries_can_change_while_there_is_no_room() {
        let cache = TtlCache::new(1);
        let ids: Vec<Id> = (0..10_000).map(|n| cache.id(n)).collect();
        ids.iter().for_each(|&id| cache.put(id, Stamped(START), START));
        assert_eq!(cache.len(), SHARDS, "one entry in each shard");
        let cached = *ids.iter().find(|&&id| contains(&cache, id)).unwrap();
        let later = START.plus_micros(5);
        cache.update(cached, later, |value| value.0 = later);
        assert_eq!(cache.get_with(cached, |value| value.0), Some(later));
        cache.forget(cached);
        assert!(!contains(&cache, cached));
    }
}
