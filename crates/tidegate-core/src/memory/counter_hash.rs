//! The names of counters: a seeded hash of everything that identifies a counter.
//!
//! ```text
//!   subject ──▶ two words ──× seeds──▶ 128 bits ──× seeds, scope, length──▶ 128 bits ──▶ table, rest
//!                                          └──▶ shard
//! ```
//!
//! The key itself is not stored, so its name must distinguish it from all other keys. 64 bits are too few for that. A
//! product of two words has 128: the first multiplication takes in the whole subject, and after the second every bit
//! depends on every bit of subject, scope and length. A client that does not know the seeds cannot find two keys with
//! the same name.
//!
//! The subject alone selects the shard. All counters of a subject are then behind one lock, and most checks need only
//! the counters of one subject.
//!
//! A subject of up to 16 bytes, as most are, is packed into the two words as it is. A longer one is hashed twice.

use std::hash::{BuildHasher, Hasher};

use foldhash::fast::RandomState;

use super::overflow::{self, COLUMNS, Network, OverflowScope};
use crate::check::Demand;
use crate::key::{Key, machine_tag, short_subject};
use crate::limit::Limit;

/// The name of a counter: 95 bits of a seeded hash, and 32 bits that select its shard.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct CounterHash {
    /// Determines the position in the table. Always odd, because a hash of zero marks an empty slot.
    table: u64,
    rest: u32,
    shard: u32,
}

impl CounterHash {
    /// Creates a name from its parts. Sets the lowest bit of `table`.
    #[inline(always)]
    pub(super) fn new(table: u64, rest: u32, shard: u32) -> CounterHash {
        CounterHash { table: table | 1, rest, shard }
    }

    /// Returns the part of the hash that determines the position in the table. Never zero.
    #[inline(always)]
    pub(super) fn table(self) -> u64 {
        self.table
    }

    /// Returns the second part of the hash, which a slot stores besides [`CounterHash::table`].
    #[inline(always)]
    pub(super) fn rest(self) -> u32 {
        self.rest
    }

    /// Returns the two parts that a slot stores. They identify the counter within its shard.
    #[inline(always)]
    pub(super) fn in_table(self) -> (u64, u32) {
        (self.table, self.rest)
    }

    /// Returns the part of the hash that selects the shard.
    ///
    /// Equal for all counters of a subject. Not stored in the slot.
    #[inline(always)]
    pub(super) fn shard(self) -> u32 {
        self.shard
    }

    /// Returns this name, moved to the shard of `other`.
    fn in_shard_of(self, other: CounterHash) -> CounterHash {
        CounterHash { shard: other.shard, ..self }
    }
}

/// The hash of a subject, from which the names of its counters are derived.
#[derive(Clone, Copy)]
pub(super) struct SubjectHash {
    low: u64,
    high: u64,
    shard: u32,
}

/// An odd multiplier without a bit pattern: 2^64 divided by the golden ratio.
const MIX: u64 = 0x9E37_79B9_7F4A_7C15;

/// The seeded hash function that names counters.
pub(super) struct CounterHasher {
    seeds: [u64; 4],
    hashers: [RandomState; 2],
}

impl CounterHasher {
    /// Creates a hash function with random seeds.
    pub(super) fn new() -> CounterHasher {
        // The standard library's hasher is slow, but it is seeded from the operating system's randomness.
        let random = std::hash::RandomState::new();
        CounterHasher {
            seeds: std::array::from_fn(|index| random.hash_one(index)),
            hashers: [RandomState::default(), RandomState::default()],
        }
    }

    /// Returns the name of the counter of `key` under `limit`.
    #[inline(always)]
    pub(super) fn name(&self, limit: &Limit, key: &Key<'_>) -> CounterHash {
        self.counter(self.subject(key.subject()), key.scope().number(limit))
    }

    /// Returns the names of the demands' counters, in order. There must be one to `N` demands; further names are unused.
    ///
    /// A subject that is the same slice as the first demand's is hashed only once.
    #[inline(always)]
    pub(super) fn names<const N: usize>(&self, demands: &[Demand<'_>]) -> [CounterHash; N] {
        let first = demands[0].key.subject();
        let hash = self.subject(first);
        let mut names = [CounterHash::new(0, 0, 0); N];
        for (name, Demand { limit, key, .. }) in names.iter_mut().zip(demands) {
            let hash = if std::ptr::eq(key.subject(), first) { hash } else { self.subject(key.subject()) };
            *name = self.counter(hash, key.scope().number(limit));
        }
        names
    }

    /// Returns the seeded hash of a subject, from which [`CounterHasher::counter`] derives the names of its counters.
    #[inline(always)]
    pub(super) fn subject(&self, subject: &[u8]) -> SubjectHash {
        let words = short_subject(subject).unwrap_or_else(|| self.long_subject(subject));
        self.subject_of(words, subject.len())
    }

    /// Returns the hash of a subject of `len` bytes that was packed or hashed into two words.
    #[inline(always)]
    fn subject_of(&self, (head, tail): (u64, u64), len: usize) -> SubjectHash {
        let (low, high) = product(head ^ self.seeds[0], tail ^ self.seeds[1]);
        // After one product, similar subjects still have similar bits. The second product mixes them.
        let shard = ((low ^ high).wrapping_mul(MIX) >> 32) as u32;
        SubjectHash { low, high: high ^ len as u64, shard }
    }

    /// Returns the name of the subject's counter in the scope with this [number](crate::key::Scope::number).
    #[inline(always)]
    pub(super) fn counter(&self, SubjectHash { low, high, shard }: SubjectHash, scope: u64) -> CounterHash {
        let (low, high) = product(low ^ scope ^ self.seeds[2], high ^ self.seeds[3]);
        CounterHash::new(low ^ high, (high >> 32) as u32, shard)
    }

    /// Returns the name under which the ban on a subject is stored. Bans have a table of their own.
    pub(super) fn ban(&self, subject: &[u8]) -> CounterHash {
        self.counter(self.subject(subject), 0)
    }

    /// Returns the name of the overflow counter that `demand` shares in `scope`.
    ///
    /// It is in the shard of `new_key`, the name that a counter of the demand's own would have. `cell` returns the
    /// [cell](CounterHasher::cell); it is called only for [`OverflowScope::Network`].
    pub(super) fn overflow_name(
        &self,
        new_key: CounterHash,
        demand: &Demand<'_>,
        scope: OverflowScope,
        cell: impl FnOnce() -> usize,
    ) -> CounterHash {
        let which = match scope {
            OverflowScope::Network => cell(),
            OverflowScope::Limit => usize::MAX,
        };
        let limit = &demand.limit;
        let shared = self.hashers[0].hash_one(overflow::sharing_key(limit));
        // No real subject has this length, so an overflow counter never has the name of a subject's counter.
        let subject = self.subject_of((which as u64, shared << 2 | u64::from(machine_tag(limit))), usize::MAX);
        self.counter(subject, demand.key.scope().number(limit)).in_shard_of(new_key)
    }

    /// Returns the cell of a new key: which of `cells` overflow counters of its limit in its shard it shares.
    ///
    /// Selected by the network of the address in `subject`, or by the hash `new_key` if there is none. A network has
    /// another row of cells in every shard, so two networks do not share a row in all of them. The result is below
    /// `cells`, which must not be 0. `shard` is the index of the key's shard.
    pub(super) fn cell(&self, new_key: CounterHash, shard: usize, subject: &[u8], cells: usize) -> usize {
        let Some(network) = Network::of_subject(subject) else { return new_key.rest() as usize % cells };
        let columns = COLUMNS.min(cells);
        let row = self.hashers[0].hash_one((shard, network.wide)) as usize % (cells / columns);
        row * columns + self.hashers[1].hash_one((shard, network)) as usize % columns
    }

    /// Hashes a subject of more than 16 bytes into two words.
    #[cold]
    #[inline(never)]
    fn long_subject(&self, subject: &[u8]) -> (u64, u64) {
        let [head, tail] = self.hashers.each_ref().map(|hasher| {
            let mut hasher = hasher.build_hasher();
            hasher.write(subject);
            hasher.finish()
        });
        (head, tail)
    }
}

/// Returns the low and the high word of the 128-bit product of two words.
#[inline(always)]
fn product(one: u64, other: u64) -> (u64, u64) {
    let product = u128::from(one) * u128::from(other);
    (product as u64, (product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Scope, ScopeName};
    use std::collections::HashSet;

    #[test]
    fn different_counters_have_different_names() {
        let hasher = CounterHasher::new();
        let limits: Vec<Limit> =
            ["5/min", "5/h", "5/min token-bucket", "5/min sliding-log"].map(|text| text.parse().unwrap()).into();
        let subjects: Vec<Vec<u8>> = (0..40)
            .flat_map(|len| [vec![0; len], vec![b'a'; len], (0..len as u8).collect(), (0..len as u8).rev().collect()])
            .collect();
        let subjects: HashSet<Vec<u8>> = subjects.into_iter().collect();
        let named = ["named", "other"].map(|name| Scope::Named(ScopeName::new(name)));
        let scopes = [Scope::Explicit, named[0], named[1], Scope::rule("a", "b_c"), Scope::rule("a_b", "c")];
        let mut names = HashSet::new();
        let mut counters = 0;
        for scope in scopes {
            // In the other scopes, limits of one state machine share a counter, whatever the window.
            let limits = if scope == Scope::Explicit { &limits[..] } else { &limits[1..3] };
            for limit in limits {
                for subject in &subjects {
                    let name = hasher.name(limit, &Key::scoped(subject, scope).unwrap());
                    names.insert((name.table(), name.rest()));
                    counters += 1;
                }
            }
        }
        assert_eq!(names.len(), counters);
    }

    #[test]
    fn names_of_similar_keys_spread_over_shards_and_tables() {
        let hasher = CounterHasher::new();
        let limit: Limit = "5/min".parse().unwrap();
        for part in [
            |name: CounterHash| name.shard() % 64,
            |name: CounterHash| (name.table() >> 58) as u32,
            |name: CounterHash| name.rest() % 64,
        ] {
            let subjects: [fn(u32) -> String; 3] = [
                |number| format!("user:{number:06}"),
                |number| number.to_string(),
                |number| format!("ip:10.0.{}.{}", number >> 8, number & 255),
            ];
            for subject in subjects {
                let mut counts = [0_u32; 64];
                for number in 0..64_000 {
                    counts[part(hasher.name(&limit, &Key::new(&subject(number)).unwrap())) as usize] += 1;
                }
                // 1,000 on average, with a tolerance of six standard deviations (6 × √1000).
                assert!(counts.iter().all(|count| (810..1_190).contains(count)), "{}: {counts:?}", subject(1));
            }
        }
    }
}
