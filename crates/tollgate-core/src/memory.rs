//! Counters in process memory: sharded, bounded, without a thread of its own.
//!
//! ```text
//!   key bytes ──seeded hash──▶ shard of the subject (Mutex) ──▶ table of 32-byte slots
//!                                                           └▶ rings of the long logs
//! ```
//!
//! **A check in place.** The key is hashed, never copied, and a known counter is decided where it stands: no allocation, and
//! one or two cache lines (the slot, the entries of a long log) to wait for. So are several, where all of them have room; only a check
//! that may be refused takes its states out for its duration, short rings as copies. Only hashes are kept; two subjects share a counter with a probability of about
//! 2^-95 per pair, and two rules' limits one of a subject's with 2^-64, under seeds that nobody outside knows.
//!
//! **The usual is short.** Whatever can be worked out with a limit (reciprocals to divide by, how its slots are marked) is,
//! and each state machine has a path for the check that has nothing unusual about it: a few hundred instructions are most of
//! what a hot key costs. Times are put into words after the lock is given back.
//!
//! **One decision, several limits.** All counters of a subject are behind one lock. Where a check names several subjects, their shards are
//! locked together, in ascending order, so that two checks never wait for each other in a circle. All or none is then a matter of looking before charging.
//!
//! **Time** is read before the lock and read again under it only if the shard has meanwhile seen
//! a later one. So no counter ever runs backwards because of a race, and a clock that really went back is
//! repaired as the algorithms say.
//!
//! **A hard cap in bytes.** At the cap only keys whose state has expired make room. Other newcomers
//! share overflow counters, chosen by the network of an address or else by hash: a flood of invented keys then
//! competes mostly with itself, and no key at its limit is forgotten (`memory/overflow.rs`). As soon as there is room, newcomers have
//! counters of their own again. A log that may not grow stretches
//! its newest entry instead, which errs towards refusal.

mod budget;
mod builder;
mod counter_hash;
mod lifetime;
mod multi_limit;
mod overflow;
mod rings;
mod shard;
mod slot;
mod table;

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use self::budget::Budget;
pub use self::builder::MemoryStoreBuilder;
use self::builder::StoreClock;
use self::counter_hash::{CounterHash, CounterHasher};
use self::overflow::{CELLS_MAX, OverflowScope};
use self::shard::{Shard, SlotLocation};
pub(crate) use self::slot::SlotHeader;
use crate::algorithm::{self, Receipt, State};
use crate::check::{Check, Cost, Demand};
use crate::decision::{Decision, LimitStatus, LimitStatuses, Source};
use crate::key::{Key, KeyError};
use crate::limit::{Limit, Machine};
use crate::store::{Store, StoreFuture};
use crate::time::{Clock, Timestamp};

/// A store in process memory.
///
/// ```
/// use tollgate_core::{Check, Demand, Key, Limit, MemoryStore};
///
/// let store = MemoryStore::new();
/// let limit: Limit = "10/min".parse()?;
/// let demand = Demand::new(limit, Key::new("user:42")?);
/// for _ in 0..10 {
///     assert!(store.check(&Check::one(&demand)).allowed());
/// }
/// let denied = store.check(&Check::one(&demand));
/// assert!(!denied.allowed());
/// assert!(denied.retry_after().as_secs_ceil() <= Some(60));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct MemoryStore {
    shards: Box<[Padded]>,
    naming: CounterHasher,
    clock: StoreClock,
    budget: Budget,
}

/// One shard per cache line pair, so that two cores on two shards do not fight over one line.
#[repr(align(128))]
#[derive(Default)]
struct Padded(Mutex<Shard>);

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// A store on the system's clock with the default cap.
    pub fn new() -> MemoryStore {
        MemoryStore::builder().build()
    }

    /// A store with another clock or cap.
    pub fn builder() -> MemoryStoreBuilder {
        MemoryStoreBuilder::new()
    }

    /// Decides one check, now.
    pub fn check(&self, check: &Check<'_>) -> Decision {
        let mut lines = LimitStatuses::new();
        let at = self.check_onto(check, &mut lines);
        Decision { at, source: Source::Store, limits: lines }
    }

    /// The same for whoever has a place for the lines: adds them there, and says when it was decided.
    ///
    /// ```
    /// use tollgate_core::{Check, Demand, Key, LimitStatuses, MemoryStore};
    ///
    /// let (store, mut lines) = (MemoryStore::new(), LimitStatuses::new());
    /// let demand = Demand::new("1/min".parse()?, Key::new("user:42")?);
    /// store.check_onto(&Check::one(&demand), &mut lines);
    /// store.check_onto(&Check::one(&demand), &mut lines);
    /// assert_eq!([lines[0].allowed, lines[1].allowed], [true, false]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn check_onto(&self, check: &Check<'_>, lines: &mut LimitStatuses) -> Timestamp {
        self.check_at(self.clock.now(), check, lines)
    }

    /// Decides for one key by one limit, now: the same as [`MemoryStore::check`] with a single demand, without the
    /// wrapping of a check and of a decision.
    ///
    /// ```
    /// use tollgate_core::{Cost, Key, Limit, MemoryStore};
    ///
    /// let store = MemoryStore::new();
    /// let limit: Limit = "1/min token-bucket".parse()?;
    /// assert!(store.check_one(&limit, Key::new("user:42")?, Cost::ONE).allowed);
    /// assert!(!store.check_one(&limit, Key::new("user:42")?, Cost::ONE).allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check_one(&self, limit: &Limit, key: Key<'_>, cost: Cost) -> LimitStatus {
        self.decide_one(&mut self.clock.now(), limit, &key, cost)
    }

    /// Decides many checks, in order, with one reading of the clock.
    pub fn check_batch(&self, checks: &[Check<'_>]) -> Vec<Decision> {
        let read = self.clock.now();
        let decide = |check| {
            let mut lines = LimitStatuses::new();
            let at = self.check_at(read, check, &mut lines);
            Decision { at, source: Source::Store, limits: lines }
        };
        checks.iter().map(decide).collect()
    }

    /// Gives back what an admitted decision charged, as far as it still counts. Once per decision.
    pub fn refund(&self, check: &Check<'_>, decision: &Decision) {
        if !decision.allowed() {
            return;
        }
        for (demand, line) in check.demands().iter().zip(&decision.limits) {
            if let Some(receipt) = Receipt::of(decision.at, line) {
                self.change(demand, |state, now| state.refund(&demand.limit, now, receipt));
            }
        }
    }

    /// Forgets a counter: the key is as if never seen. What it has spent on a counter that it shares with others, because there was no room for one of
    /// its own, stays spent: to forget that would be to forget what the others have spent.
    pub fn reset(&self, demand: &Demand<'_>) {
        let name = self.naming.name(&demand.limit, &demand.key);
        self.shard(name).lock().remove(name, &self.budget);
    }

    /// Looks at a counter without changing it.
    pub fn inspect(&self, demand: &Demand<'_>) -> LimitStatus {
        let demand = Demand { cost: Cost::PEEK, ..*demand };
        self.check(&Check::one(&demand)).limits[0]
    }

    /// How many counters are kept, expired ones that were not reclaimed yet included.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.0.lock().len()).sum()
    }

    /// Whether no counter is kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many of the counters are shared ones, because there was no room for newcomers.
    pub fn overflow_len(&self) -> usize {
        self.shards.iter().map(|shard| shard.0.lock().overflow_len()).sum()
    }

    /// Returns the cap on [`MemoryStore::bytes_used`], as set by [`MemoryStoreBuilder::max_bytes`].
    pub fn max_bytes(&self) -> usize {
        self.budget.cap()
    }

    /// Bytes on the heap that hold counters.
    pub fn bytes_used(&self) -> usize {
        self.budget.used() + self.shards.len() * size_of::<Padded>()
    }

    #[inline]
    fn check_at(&self, read: Timestamp, check: &Check<'_>, lines: &mut LimitStatuses) -> Timestamp {
        match check.demands() {
            [demand] => {
                let mut at = read;
                lines.push(self.decide_one(&mut at, &demand.limit, &demand.key, demand.cost));
                at
            }
            demands => self.check_several(read, demands, lines),
        }
    }

    /// A check of one counter, decided where it stands if it exists. What need not happen under the lock happens after it.
    /// `at` comes as the clock was read, and goes as the time of the decision.
    #[inline(always)]
    fn decide_one(&self, at: &mut Timestamp, limit: &Limit, key: &Key<'_>, cost: Cost) -> LimitStatus {
        let name = self.naming.name(limit, key);
        let mut shard = self.shard(name).lock();
        let now = shard.arrive(*at, &self.clock);
        shard.set_time(now);
        *at = now;
        let Some((slot, rings)) = shard.slot_of(name) else {
            return self.decide_newcomer(shard, name, now, (limit, key, cost));
        };
        let units = cost.units();
        let line = match limit.machine() {
            Machine::Bucket(shape) => match slot.decide_bucket_in_place(limit, shape, now, units) {
                Some(answer) => {
                    shard.finish_in_slot(&self.budget);
                    drop(shard);
                    return answer.line_if_plain();
                }
                None => slot.decide_bucket(limit, shape, now, units),
            },
            Machine::Pair(shape) => slot.decide_pair(limit, shape, now, units),
            Machine::Log(shape) => match slot.decide_log_in_place(limit, shape, now, units, rings) {
                None => {
                    let line = slot.decide_log(limit, shape, now, units, (rings, &self.budget));
                    shard.report(&self.budget);
                    line
                }
                in_place => in_place,
            },
        };
        let Some(line) = line else {
            return self.decide_newcomer(shard, name, now, (limit, key, cost));
        };
        shard.finish_in_slot(&self.budget);
        line
    }

    #[cold]
    fn decide_newcomer(
        &self,
        mut shard: MutexGuard<'_, Shard>,
        name: CounterHash,
        now: Timestamp,
        (limit, key, cost): (&Limit, &Key<'_>, Cost),
    ) -> LimitStatus {
        let demand = Demand { limit: *limit, key: *key, cost };
        let taken = self.take(&mut shard, name, &demand, true, &[]);
        let allowed = taken.fits(now, &demand);
        let line = taken.settle(&mut shard, now, &demand, allowed);
        shard.finish(&self.budget);
        line
    }

    #[inline(never)]
    fn check_several(&self, read: Timestamp, demands: &[Demand<'_>], lines: &mut LimitStatuses) -> Timestamp {
        match self.admit_in_place(read, demands, lines) {
            Some(at) => at,
            None => self.check_in_general(read, demands, lines),
        }
    }

    #[inline(never)]
    fn check_in_general(&self, read: Timestamp, demands: &[Demand<'_>], lines: &mut LimitStatuses) -> Timestamp {
        let names: SmallVec<[CounterHash; 4]> =
            demands.iter().map(|demand| self.naming.name(&demand.limit, &demand.key)).collect();
        let mut locked: SmallVec<[usize; 4]> = names.iter().map(|name| self.shard_index(*name)).collect();
        locked.sort_unstable();
        locked.dedup();
        let mut shards: SmallVec<[MutexGuard<'_, Shard>; 4]> =
            locked.iter().map(|&index| self.shards[index].0.lock()).collect();
        let shard_of = |name: CounterHash| {
            locked.binary_search(&self.shard_index(name)).expect("the shard of every demand was locked")
        };

        let now = shards.iter().map(|shard| shard.arrive(read, &self.clock)).max().unwrap_or(read);
        shards.iter_mut().for_each(|shard| shard.set_time(now));

        let mut taken = self.take_all(&mut shards, shard_of, &names, demands);
        let allowed = taken.iter().all(|(index, taken)| taken.fits(now, &demands[*index]));
        let mut said: SmallVec<[Option<LimitStatus>; 4]> = smallvec::smallvec![None; demands.len()];
        // Those that have a place go back first: an insertion may move it.
        taken.sort_by_key(|(_, taken)| taken.place.is_new());
        for (index, taken) in taken {
            let shard = &mut shards[shard_of(names[index])];
            said[index] = Some(taken.settle(shard, now, &demands[index], allowed));
        }
        shards.iter_mut().for_each(|shard| shard.finish(&self.budget));
        lines.extend(said.into_iter().flatten());
        now
    }

    /// Takes the counters of all demands out of their shards, newcomers first: making room for one may move the places of the others, or
    /// sweep one away that has expired. That one is then a newcomer too.
    fn take_all(
        &self,
        shards: &mut [MutexGuard<'_, Shard>],
        shard_of: impl Fn(CounterHash) -> usize,
        names: &[CounterHash],
        demands: &[Demand<'_>],
    ) -> SmallVec<[(usize, CheckedOut); 4]> {
        let mut all: SmallVec<[(usize, CheckedOut); 4]> = SmallVec::new();
        let mut known: SmallVec<[usize; 4]> = (0..demands.len()).collect();
        let mut newcomers_before = None;
        while newcomers_before != Some(all.len()) {
            newcomers_before = Some(all.len());
            known.retain(|&mut index| {
                let shard = &mut shards[shard_of(names[index])];
                let is_known = shard.find(names[index]).is_some();
                if !is_known {
                    all.push((index, self.take(shard, names[index], &demands[index], true, &all)));
                }
                is_known
            });
        }
        for index in known {
            let shard = &mut shards[shard_of(names[index])];
            all.push((index, self.take(shard, names[index], &demands[index], true, &all)));
        }
        all
    }

    fn change(&self, demand: &Demand<'_>, change: impl FnOnce(&mut State, Timestamp)) {
        let name = self.naming.name(&demand.limit, &demand.key);
        let mut shard = self.shard(name).lock();
        let now = shard.arrive(self.clock.now(), &self.clock);
        shard.set_time(now);
        let mut taken = self.take(&mut shard, name, demand, false, &[]);
        change(&mut taken.state, now);
        shard.put(taken.place, taken.name, &demand.limit, taken.state);
        shard.finish(&self.budget);
    }

    /// Takes the demand's counter out of its shard. Two demands of one check never share an
    /// overflow counter: the later one moves on to another.
    #[inline]
    fn take(
        &self,
        shard: &mut Shard,
        name: CounterHash,
        demand: &Demand<'_>,
        may_part: bool,
        others: &[(usize, CheckedOut)],
    ) -> CheckedOut {
        let (place, state, name) = match shard.take_known(name) {
            Some((place, state)) => (place, state, name),
            None => shard.take_unknown(&demand.limit, &self.budget, name, may_part, |scope| {
                let candidates = (0..=others.len()).map(|step| self.overflow_name(name, demand, scope, step));
                let mut free = candidates.filter(|name| others.iter().all(|(_, other)| other.name != *name));
                free.next().expect("one more candidate than there are others")
            }),
        };
        // Only a collision of hashes gives another kind of state.
        let state = if state.belongs_to(&demand.limit) { state } else { State::unused(&demand.limit) };
        let may_grow = match &state {
            State::Log(log) => log.has_room_for(demand.cost.units()) || shard.log_may_grow(log, &self.budget),
            _ => true,
        };
        CheckedOut { place, state, name, may_grow }
    }

    fn overflow_name(&self, name: CounterHash, demand: &Demand<'_>, scope: OverflowScope, step: usize) -> CounterHash {
        let cells = CELLS_MAX.min(self.budget.overflow_counters_max() / 4).max(1);
        let cell = || self.naming.cell(name, self.shard_index(name), demand.key.subject(), cells);
        self.naming.overflow_name(name, demand, scope, cell, step)
    }

    #[inline]
    fn shard_index(&self, name: CounterHash) -> usize {
        name.shard() as usize & (self.shards.len() - 1)
    }

    #[inline]
    fn shard(&self, name: CounterHash) -> &Mutex<Shard> {
        &self.shards[self.shard_index(name)].0
    }
}

/// A counter out of its place, between looking and putting it back.
struct CheckedOut {
    place: SlotLocation,
    state: State,
    name: CounterHash,
    may_grow: bool,
}

impl CheckedOut {
    /// Whether there is room for the demand.
    #[inline]
    fn fits(&self, now: Timestamp, demand: &Demand<'_>) -> bool {
        let cost = demand.cost.units();
        cost == 0 || self.state.fits(&demand.limit, now, cost)
    }

    /// Answers, and goes back into its place, after the whole check was allowed or not.
    #[inline]
    fn settle(mut self, shard: &mut Shard, now: Timestamp, demand: &Demand<'_>, allowed: bool) -> LimitStatus {
        let line = algorithm::settle(allowed, now, demand, &mut self.state, self.may_grow);
        self.put(shard, demand, allowed);
        line
    }

    fn put(self, shard: &mut Shard, demand: &Demand<'_>, allowed: bool) {
        let is_charged = allowed || demand.limit.count_denied();
        if demand.cost.units() > 0 && (is_charged || self.place != SlotLocation::Promoted) {
            shard.put(self.place, self.name, &demand.limit, self.state);
        } else {
            shard.put_back(self.place, self.state);
        }
    }
}

impl Store for MemoryStore {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        Box::pin(std::future::ready(Ok(self.check_batch(checks))))
    }

    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        MemoryStore::refund(self, check, decision);
        Box::pin(std::future::ready(Ok(())))
    }

    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        MemoryStore::reset(self, demand);
        Box::pin(std::future::ready(Ok(())))
    }

    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Box::pin(std::future::ready(Ok(MemoryStore::inspect(self, demand))))
    }
}

/// The shortest way to a decision: one limit, one key, one unit.
impl MemoryStore {
    /// Charges `key` one unit of `limit`, if the limit has one left, and returns the decision.
    ///
    /// Two keys with the same bytes and limits with the same algorithm and window share a counter. For other costs, or
    /// several limits at once, use [`MemoryStore::check`].
    ///
    /// ```
    /// use tollgate_core::{Limit, MemoryStore};
    ///
    /// let store = MemoryStore::new();
    /// let limit: Limit = "2/min".parse()?;
    ///
    /// let decision = store.check_key(&limit, "user:42")?;
    /// assert!(decision.allowed());
    /// assert_eq!(decision.remaining(), Some(1));
    ///
    /// assert!(store.check_key(&limit, "user:42")?.allowed());
    /// let denied = store.check_key(&limit, "user:42")?;
    /// assert!(!denied.allowed());
    /// println!("try again in {:?}", denied.retry_after());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the key is longer than 64 KiB. Nothing is charged then.
    pub fn check_key<K: AsRef<[u8]> + ?Sized>(&self, limit: &Limit, key: &K) -> Result<Decision, KeyError> {
        let demand = Demand::new(*limit, Key::new(key)?);
        Ok(self.check(&Check::one(&demand)))
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").field("shards", &self.shards.len()).field("budget", &self.budget).finish()
    }
}

#[cfg(test)]
mod tests;
