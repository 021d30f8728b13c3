//! Counters in process memory: sharded, bounded, without a thread of its own.
//!
//! ```text
//!   key bytes ──seeded hash──▶ shard of the subject (Mutex) ──▶ table of 32-byte slots
//!                                                           └▶ rings of the long logs
//! ```
//!
//! **Counters are decided in place.** The key is hashed, never copied, and an existing counter is decided in its slot:
//! no allocation, and one or two cache lines to load (the slot, the entries of a long log). Several counters are
//! decided in place if all of them have room (`memory/multi_limit.rs`). Only a check that may be denied takes its
//! states out of their slots while it is decided. Only hashes are stored: two subjects share a counter with a
//! probability of about 2^-95 per pair, and two limits of one subject with 2^-64, under random seeds.
//!
//! **Fast paths.** Two paths are shorter than the general one, [`MemoryStore::check_in_general`]:
//! [`MemoryStore::decide_one`] for a check of one limit, and `memory/multi_limit.rs` for two to four limits that all
//! have room. `memory/fast_path_tests.rs` compares their decisions with those of the general path, and the benchmark
//! `instructions` counts what they cost.
//!
//! **One decision, several limits.** All counters of a subject are behind one lock. If a check has several subjects,
//! their shards are locked in ascending order, so two checks cannot deadlock. All counters are read before any is
//! charged.
//!
//! **Time** is read before the lock is taken, and again under the lock only if the shard has seen a later time. So a
//! race never makes a counter run backwards, and a clock that really went back is handled by the algorithms.
//!
//! **A hard cap in bytes.** At the cap, only expired counters make room. Further new keys share overflow counters,
//! chosen by the network of an address or else by hash, so a flood of invented keys competes mostly with itself, and no
//! counter at its limit is dropped (`memory/overflow.rs`). As soon as there is room, new keys get counters of their own
//! again. A log that may not grow adds to its newest entry instead, which errs towards denial.
//!
//! **Refunds of buckets** are counted beside the slots (`memory/refunded.rs`). A bucket with a count is decided on the
//! general path. A shard without such buckets, which is the usual case, pays for it with one comparison per check.
//!
//! **Bans** are looked up before the counters, and only if there are any (`memory/bans.rs`).
//!
//! **Receipts** that were redeemed are remembered until they expire, in at most 65 MB (`memory/receipts.rs`). Checks do
//! not read them.

mod bans;
mod budget;
mod builder;
mod counter_hash;
mod lifetime;
mod multi_limit;
mod overflow;
mod receipts;
mod refunded;
mod rings;
mod shard;
mod slot;
mod table;

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use self::bans::Bans;
use self::budget::Budget;
pub use self::builder::MemoryStoreBuilder;
use self::builder::StoreClock;
use self::counter_hash::{CounterHash, CounterHasher};
use self::overflow::{CELLS_MAX, OverflowScope};
pub use self::receipts::UsedReceiptStats;
use self::receipts::UsedReceipts;
use self::shard::{Shard, SlotLocation};
use crate::algorithm::{self, Receipt, State};
use crate::ban_list::{BanListing, BanTexts, end_after};
use crate::check::{Check, Cost, Demand};
use crate::decision::{Decision, LimitStatus, LimitStatuses, Source, Wait};
use crate::key::{Key, KeyError};
use crate::limit::{Limit, Machine};
use crate::redemption::{Redeemed, Redemption};
use crate::store::{Store, StoreError, StoreFuture};
use crate::time::{Clock, Timestamp};

/// A store of counters in process memory, with a cap on its size. Several threads may use it at the same time.
///
/// At the cap, keys without a counter share overflow counters; see [`MemoryStoreBuilder::max_bytes`].
///
/// ```
/// use tidegate_core::{Check, Demand, Key, Limit, MemoryStore};
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
    hasher: CounterHasher,
    clock: StoreClock,
    budget: Budget,
    bans: Bans,
    ban_list: BanTexts,
    receipts: UsedReceipts,
}

/// A shard, aligned to two cache lines, so that two shards never share one.
#[repr(align(128))]
#[derive(Default)]
struct Padded(Mutex<Shard>);

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// Creates a store with the default settings: the system's clock and a cap of 256 MiB.
    pub fn new() -> MemoryStore {
        MemoryStore::builder().build()
    }

    /// Creates a builder with the default settings: the system's clock and a cap of 256 MiB.
    pub fn builder() -> MemoryStoreBuilder {
        MemoryStoreBuilder::new()
    }

    /// Decides a check at the current time of the store's clock.
    ///
    /// Charges all demands if each of them fits and no subject is banned. Otherwise it denies, and charges only limits
    /// with `count_denied`, or nothing if a subject is banned.
    pub fn check(&self, check: &Check<'_>) -> Decision {
        self.check_at(self.clock.now(), check)
    }

    /// Decides a check of one limit and returns its status. The request is admitted if the status is `allowed`.
    ///
    /// The status of a banned subject is [`LimitStatus::banned`]; to distinguish a ban from a denial, use
    /// [`MemoryStore::check`].
    ///
    /// ```
    /// use tidegate_core::{Cost, Key, Limit, MemoryStore};
    ///
    /// let store = MemoryStore::new();
    /// let limit: Limit = "1/min token-bucket".parse()?;
    /// assert!(store.check_one(&limit, Key::new("user:42")?, Cost::ONE).allowed);
    /// assert!(!store.check_one(&limit, Key::new("user:42")?, Cost::ONE).allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check_one(&self, limit: &Limit, key: Key<'_>, cost: Cost) -> LimitStatus {
        let mut now = self.clock.now();
        if !self.bans.is_empty()
            && let Some(ban) = self.ban_of_check(now, &Check::one(&Demand { limit: *limit, key, cost }))
        {
            return LimitStatus::banned(limit.quota(), cost, ban);
        }
        self.decide_one(&mut now, limit, &key, cost)
    }

    /// Decides checks one after the other, and returns one decision per check, in the same order.
    ///
    /// Other checks may be decided in between. Reads the clock once for all of them, and again for a check only if
    /// another thread has meanwhile decided at a later time.
    pub fn check_batch(&self, checks: &[Check<'_>]) -> Vec<Decision> {
        let read = self.clock.now();
        checks.iter().map(|check| self.check_at(read, check)).collect()
    }

    /// Refunds the units that `decision` charged, as far as they still count.
    ///
    /// `check` must be the check that was decided, and `decision` the result of this store. A denied decision, or one
    /// without limit statuses, refunds nothing. The store does not detect a second refund of the same decision; the
    /// caller must refund at most once, or use [`MemoryStore::redeem`].
    ///
    /// The store counts the units that were refunded on a bucket. That takes memory under the cap, up to 125 bytes per
    /// bucket with a refund. If there is none, a refund on a further bucket gives back nothing.
    pub fn refund(&self, check: &Check<'_>, decision: &Decision) {
        if !decision.allowed() {
            return;
        }
        for (demand, status) in check.demands().iter().zip(&decision.limits) {
            if let Some(receipt) = Receipt::of(decision.at, status) {
                self.refund_one(demand, receipt);
            }
        }
    }

    /// Refunds and charges units as `redemption` says, unless its id was used before or is expired.
    ///
    /// Of any number of calls with one id, exactly one returns [`Redeemed::Done`], and the others wait until it has
    /// taken effect. A concurrent check may see the counter of one limit corrected, but not yet that of another. The
    /// charge ignores bans.
    ///
    /// The used ids take at most 65 MB, in 16 parts; all ids of a stream are in one part. When a part is full, the oldest ids
    /// of the stream, or those that expire next, are [`Redeemed::Expired`] early. See [`MemoryStore::used_receipts`].
    pub fn redeem(&self, redemption: &Redemption<'_>) -> Redeemed {
        self.receipts.redeem(redemption.id, redemption.until, self.clock.now(), || {
            if let Some((check, decision)) = &redemption.refund {
                self.refund(check, decision);
            }
            let demands: SmallVec<[Demand<'_>; 4]> = redemption.charged_demands().collect();
            if !demands.is_empty() {
                self.decide_at(self.clock.now(), &Check::of_distinct(&demands));
            }
        })
    }

    /// Deletes the counter of `demand`, as if its key had never been used. The cost is ignored.
    ///
    /// A ban on the subject stays. Units that the key charged to an overflow counter stay charged, since other keys
    /// share that counter. A later refund of a charge before the reset may give back units that were charged since, but
    /// no more than its own.
    pub fn reset(&self, demand: &Demand<'_>) {
        let name = self.hasher.name(&demand.limit, &demand.key);
        self.shard(name).lock().remove(name, &self.budget);
    }

    /// Returns the status of the counter of `demand` without changing it.
    ///
    /// The cost is ignored: the status is that of a peek (cost 0), which is always allowed, even if the subject is
    /// banned.
    pub fn inspect(&self, demand: &Demand<'_>) -> LimitStatus {
        let demand = Demand { cost: Cost::PEEK, ..*demand };
        self.check(&Check::one(&demand)).limits[0]
    }

    /// Returns the decision that a check would get at the moment, and charges nothing. See [`Store::preview`].
    ///
    /// The statuses are read one after the other; other checks may be decided in between.
    pub fn preview(&self, check: &Check<'_>) -> Decision {
        let read = self.clock.now();
        if !self.bans.is_empty()
            && let Some(ban) = self.ban_of_check(read, check)
        {
            return Decision::banned(read, Source::Store, ban, check);
        }
        let limits = check.demands().iter().map(|demand| self.look(read, demand)).collect();
        Decision::new(read, Source::Store, limits)
    }

    /// Returns the status of one limit for the demand's cost, without charging it.
    fn look(&self, read: Timestamp, demand: &Demand<'_>) -> LimitStatus {
        let name = self.hasher.name(&demand.limit, &demand.key);
        let mut shard = self.shard(name).lock();
        let now = shard.decision_time(read, &self.clock);
        shard.set_time(now);
        let taken = self.take(&mut shard, name, demand, false, &[]);
        let status = taken.state.look(&demand.limit, now, demand.cost.units());
        shard.put_back(taken.place, taken.state);
        shard.finish(&self.budget);
        status
    }

    /// Bans `subject` for `duration`, or permanently if `None`.
    ///
    /// Until the ban ends, every check that counts the subject is refused with [`Decision::ban`] set, and nothing is
    /// charged. Checks that only peek (all costs 0) are not refused. A new ban replaces an earlier one of the subject.
    /// A duration of zero ends at once. A ban that would end at [`Timestamp::MAX`] or later has no end.
    ///
    /// # Errors
    /// Returns an error of the kind `Unavailable` if 65,536 other subjects are banned.
    pub fn ban(&self, subject: &[u8], duration: Option<Duration>) -> Result<(), StoreError> {
        let now = self.clock.now();
        self.bans.add(self.hasher.ban(subject), end_after(duration, now), now)
    }

    /// Lifts the ban on `subject`. Returns whether it was banned.
    pub fn unban(&self, subject: &[u8]) -> bool {
        self.bans.remove(self.hasher.ban(subject), self.clock.now())
    }

    /// Returns the time until the ban on `subject` ends, [`Wait::NEVER`] if it is permanent, or `None` if there is
    /// none.
    pub fn ban_of(&self, subject: &[u8]) -> Option<Wait> {
        self.bans.longest(std::iter::once(self.hasher.ban(subject)), self.clock.now())
    }

    /// Adds an entry to the ban list for `duration`, or permanently if `None`. Replaces an earlier entry with this text.
    ///
    /// See [`Store::list_ban`]. Returns `false`, and changes nothing, if the list already has 10,000 other entries.
    ///
    /// # Errors
    /// Returns an error of the kind `Forbidden` if the entry has more than 256 bytes.
    pub fn list_ban(&self, entry: &str, duration: Option<Duration>) -> Result<bool, StoreError> {
        StoreError::check_ban_entry(entry)?;
        Ok(self.ban_list.add(entry, duration, self.clock.now()))
    }

    /// Removes an entry from the ban list. Returns whether the list had it and it had not ended.
    pub fn unlist_ban(&self, entry: &str) -> bool {
        self.ban_list.remove(entry, self.clock.now())
    }

    /// Returns the [version](BanListing::version) of the ban list. Takes no lock.
    #[inline]
    pub fn ban_list_version(&self) -> u64 {
        self.ban_list.version()
    }

    /// Returns the ban list, or `None` if its version is `known`. See [`Store::listed_bans`].
    pub fn listed_bans(&self, known: Option<u64>) -> Option<BanListing> {
        self.ban_list.listing(known, self.clock.now())
    }

    /// Returns the time until the longest ban on the check's subjects ends, or `None` if no ban refuses the check.
    ///
    /// A check whose costs are all 0 is never refused.
    #[cold]
    fn ban_of_check(&self, now: Timestamp, check: &Check<'_>) -> Option<Wait> {
        if !check.charges() {
            return None;
        }
        let subjects = check.demands().iter().map(|demand| self.hasher.ban(demand.key.subject()));
        self.bans.longest(subjects, now)
    }

    /// Returns the number of counters, including overflow counters and expired ones that were not reclaimed yet.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.0.lock().len()).sum()
    }

    /// Returns whether the store holds no counter, not even an expired one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of overflow counters, including expired ones that were not reclaimed yet.
    ///
    /// New keys share them while there is no room for counters of their own.
    pub fn overflow_len(&self) -> usize {
        self.shards.iter().map(|shard| shard.0.lock().overflow_len()).sum()
    }

    /// Returns the cap on the memory of counters, in bytes, as set by [`MemoryStoreBuilder::max_bytes`].
    pub fn max_bytes(&self) -> usize {
        self.budget.cap()
    }

    /// Returns the bytes of memory that are allocated for counters, including empty slots and expired counters.
    ///
    /// Includes the fixed size of the shards, which is not under the cap. Bans and used receipts are not included; for the
    /// latter, see [`MemoryStore::used_receipts`].
    pub fn bytes_used(&self) -> usize {
        self.budget.used() + self.shards.len() * size_of::<Padded>()
    }

    /// Returns the memory that the used receipts take, and how often its bound had an effect.
    pub fn used_receipts(&self) -> UsedReceiptStats {
        self.receipts.stats()
    }

    /// Decides a check, unless a ban refuses it. `read` is the time that the caller read from the clock.
    #[inline]
    fn check_at(&self, read: Timestamp, check: &Check<'_>) -> Decision {
        if !self.bans.is_empty()
            && let Some(ban) = self.ban_of_check(read, check)
        {
            return Decision::banned(read, Source::Store, ban, check);
        }
        self.decide_at(read, check)
    }

    /// Decides a check. `read` is the time that the caller read from the clock. Bans are not considered.
    #[inline]
    fn decide_at(&self, read: Timestamp, check: &Check<'_>) -> Decision {
        let mut decision = Decision::new(read, Source::Store, LimitStatuses::new());
        match check.demands() {
            [demand] => {
                let status = self.decide_one(&mut decision.at, &demand.limit, &demand.key, demand.cost);
                decision.limits.push(status);
            }
            demands => decision.at = self.check_several(read, demands, &mut decision.limits),
        }
        decision
    }

    /// Decides a check of one counter, in its slot if it has one. Bans are not considered.
    ///
    /// `at` must be the time that was read from the clock, and is set to the time of the decision. The lock is released
    /// before the waits of a bucket are computed.
    #[inline(always)]
    fn decide_one(&self, at: &mut Timestamp, limit: &Limit, key: &Key<'_>, cost: Cost) -> LimitStatus {
        let name = self.hasher.name(limit, key);
        let mut shard = self.shard(name).lock();
        let now = shard.decision_time(*at, &self.clock);
        shard.set_time(now);
        *at = now;
        if shard.counts_refunds_of(name) {
            return self.decide_one_in_general(shard, name, now, (limit, key, cost));
        }
        let Some((slot, rings)) = shard.slot_of(name) else {
            return self.decide_one_in_general(shard, name, now, (limit, key, cost));
        };
        let units = cost.units();
        let status = match limit.machine() {
            Machine::Bucket(shape) => match slot.decide_bucket_in_place(limit, shape, now, units) {
                Some(answer) => {
                    shard.finish_in_slot(&self.budget);
                    drop(shard);
                    return answer.status_if_plain();
                }
                None => slot.decide_bucket(limit, shape, now, units),
            },
            Machine::Pair(shape) => slot.decide_pair(limit, shape, now, units),
            Machine::Log(shape) => match slot.decide_log_in_place(limit, shape, now, units, rings) {
                None => {
                    let status = slot.decide_log(limit, shape, now, units, (rings, &self.budget));
                    shard.report(&self.budget);
                    status
                }
                in_place => in_place,
            },
        };
        let Some(status) = status else {
            return self.decide_one_in_general(shard, name, now, (limit, key, cost));
        };
        shard.finish_in_slot(&self.budget);
        status
    }

    /// Decides a check of one counter that has no slot of its own, or whose refunded units are counted.
    ///
    /// Also used if its slot holds another kind of state after a hash collision. `shard` must be the counter's shard,
    /// and `now` the time of the decision, which the shard has recorded. Releases the lock.
    #[cold]
    fn decide_one_in_general(
        &self,
        mut shard: MutexGuard<'_, Shard>,
        name: CounterHash,
        now: Timestamp,
        (limit, key, cost): (&Limit, &Key<'_>, Cost),
    ) -> LimitStatus {
        let demand = Demand { limit: *limit, key: *key, cost };
        let taken = self.take(&mut shard, name, &demand, true, &[]);
        let allowed = taken.fits(now, &demand);
        let status = taken.apply(&mut shard, now, &demand, allowed);
        shard.finish(&self.budget);
        status
    }

    /// Decides a check of several counters: in place if possible, else on the general path. Bans are not considered.
    ///
    /// Appends one status per demand to `limits`, and returns the time of the decision. `read` is the time that the
    /// caller read from the clock.
    #[inline(never)]
    fn check_several(&self, read: Timestamp, demands: &[Demand<'_>], limits: &mut LimitStatuses) -> Timestamp {
        match self.admit_in_place(read, demands, limits) {
            Some(at) => at,
            None => self.check_in_general(read, demands, limits),
        }
    }

    /// Decides a check of any number of counters: takes their states out of their slots, decides, and puts them back.
    /// Bans are not considered.
    ///
    /// Appends one status per demand to `limits`, and returns the time of the decision. `read` is the time that the
    /// caller read from the clock.
    #[inline(never)]
    fn check_in_general(&self, read: Timestamp, demands: &[Demand<'_>], limits: &mut LimitStatuses) -> Timestamp {
        let names: SmallVec<[CounterHash; 4]> =
            demands.iter().map(|demand| self.hasher.name(&demand.limit, &demand.key)).collect();
        let mut locked: SmallVec<[usize; 4]> = names.iter().map(|name| self.shard_index(*name)).collect();
        locked.sort_unstable();
        locked.dedup();
        let mut shards: SmallVec<[MutexGuard<'_, Shard>; 4]> =
            locked.iter().map(|&index| self.shards[index].0.lock()).collect();
        let shard_of = |name: CounterHash| {
            locked.binary_search(&self.shard_index(name)).expect("the shard of every demand was locked")
        };

        let now = shards.iter().map(|shard| shard.decision_time(read, &self.clock)).max().unwrap_or(read);
        shards.iter_mut().for_each(|shard| shard.set_time(now));

        let mut taken = self.take_all(&mut shards, shard_of, &names, demands);
        let allowed = taken.iter().all(|(index, taken)| taken.fits(now, &demands[*index]));
        let mut statuses: SmallVec<[Option<LimitStatus>; 4]> = smallvec::smallvec![None; demands.len()];
        // States that have a slot go back first, because an insertion may move slots.
        taken.sort_by_key(|(_, taken)| taken.place.is_new());
        for (index, taken) in taken {
            let shard = &mut shards[shard_of(names[index])];
            statuses[index] = Some(taken.apply(shard, now, &demands[index], allowed));
        }
        shards.iter_mut().for_each(|shard| shard.finish(&self.budget));
        limits.extend(statuses.into_iter().flatten());
        now
    }

    /// Takes the states of all demands' counters out of their shards. Returns each with the index of its demand.
    ///
    /// New counters come first: making room for one may move the slots of the others, or drop one that has expired,
    /// which is then new, too. `names` are those of the demands' counters, in the same order. `shard_of` returns the
    /// index in `shards` of a counter's shard.
    fn take_all(
        &self,
        shards: &mut [MutexGuard<'_, Shard>],
        shard_of: impl Fn(CounterHash) -> usize,
        names: &[CounterHash],
        demands: &[Demand<'_>],
    ) -> SmallVec<[(usize, CheckedOut); 4]> {
        let mut all: SmallVec<[(usize, CheckedOut); 4]> = SmallVec::new();
        let mut known: SmallVec<[usize; 4]> = (0..demands.len()).collect();
        let mut count_before = None;
        while count_before != Some(all.len()) {
            count_before = Some(all.len());
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

    /// Refunds one charge on the demand's counter, as far as it still counts.
    ///
    /// A counter that has no slot is its overflow counter, or else a new one, which is not stored. Does nothing on a
    /// bucket if there is no memory to count the refunded units.
    fn refund_one(&self, demand: &Demand<'_>, receipt: Receipt) {
        let name = self.hasher.name(&demand.limit, &demand.key);
        let mut shard = self.shard(name).lock();
        let now = shard.decision_time(self.clock.now(), &self.clock);
        shard.set_time(now);
        let mut taken = self.take(&mut shard, name, demand, false, &[]);
        let is_bucket = matches!(taken.state, State::Bucket(_));
        if is_bucket && !shard.may_count_refunds_of(taken.name, &self.budget) {
            shard.put_back(taken.place, taken.state);
        } else {
            taken.state.refund(&demand.limit, now, receipt);
            shard.put(taken.place, taken.name, &demand.limit, taken.state);
        }
        shard.finish(&self.budget);
    }

    /// Takes the state of the demand's counter out of its slot, or out of an overflow counter, or creates it.
    ///
    /// `may_promote` tells whether a key that uses an overflow counter may get a counter of its own. `others` are the
    /// counters that the check has already taken: it uses no overflow counter twice. The caller must put the result
    /// back ([`CheckedOut::apply`], or [`Shard::put`]). For a new counter, slots of the shard may move.
    #[inline]
    fn take(
        &self,
        shard: &mut Shard,
        name: CounterHash,
        demand: &Demand<'_>,
        may_promote: bool,
        others: &[(usize, CheckedOut)],
    ) -> CheckedOut {
        let (place, state, name) = match shard.take_known(name) {
            Some((place, state)) => (place, state, name),
            None => shard.take_unknown(&demand.limit, &self.budget, name, may_promote, |scope| {
                let candidates = (0..=others.len()).map(|step| self.overflow_name(name, demand, scope, step));
                let mut free = candidates.filter(|name| others.iter().all(|(_, other)| other.name != *name));
                free.next().expect("one more candidate than there are others")
            }),
        };
        // Only a hash collision gives a state of another kind.
        let state = if state.belongs_to(&demand.limit) { state } else { State::unused(&demand.limit) };
        let may_grow = match &state {
            State::Log(log) => log.has_room_for(demand.cost.units()) || shard.log_may_grow(log, &self.budget),
            _ => true,
        };
        CheckedOut { place, state, name, may_grow }
    }

    fn overflow_name(&self, name: CounterHash, demand: &Demand<'_>, scope: OverflowScope, step: usize) -> CounterHash {
        let cells = CELLS_MAX.min(self.budget.overflow_counters_max() / 4).max(1);
        let cell = || self.hasher.cell(name, self.shard_index(name), demand.key.subject(), cells);
        self.hasher.overflow_name(name, demand, scope, cell, step)
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

/// A counter whose state was taken out of its slot, or that has none yet.
struct CheckedOut {
    /// The slot to which the state returns, or where a new one will be.
    place: SlotLocation,
    /// The state. It belongs to the state machine of the demand's limit.
    state: State,
    /// The name in that slot: the demand's own, or that of an overflow counter.
    name: CounterHash,
    /// Whether the state, if it is a log, may allocate memory for the demand's cost.
    may_grow: bool,
}

impl CheckedOut {
    /// Returns whether the demand's cost fits at `now`. Cost 0 always fits.
    #[inline]
    fn fits(&self, now: Timestamp, demand: &Demand<'_>) -> bool {
        let cost = demand.cost.units();
        cost == 0 || self.state.fits(&demand.limit, now, cost)
    }

    /// Applies the verdict on the whole check to the state, puts it back, and returns the status of the limit.
    ///
    /// If `allowed`, charges the demand's cost, which must fit; otherwise calls [`State::refuse`]. `shard` must be the
    /// one from which the state was taken. Inserting a new counter may move slots, so those that have one come first.
    #[inline]
    fn apply(mut self, shard: &mut Shard, now: Timestamp, demand: &Demand<'_>, allowed: bool) -> LimitStatus {
        let status = algorithm::apply(allowed, now, demand, &mut self.state, self.may_grow);
        self.put(shard, demand, allowed);
        status
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

    fn redeem<'a>(&'a self, redemption: &'a Redemption<'a>) -> StoreFuture<'a, Redeemed> {
        Box::pin(std::future::ready(Ok(MemoryStore::redeem(self, redemption))))
    }

    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        MemoryStore::reset(self, demand);
        Box::pin(std::future::ready(Ok(())))
    }

    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Box::pin(std::future::ready(Ok(MemoryStore::inspect(self, demand))))
    }

    fn preview<'a>(&'a self, check: &'a Check<'a>) -> StoreFuture<'a, Decision> {
        Box::pin(std::future::ready(Ok(MemoryStore::preview(self, check))))
    }

    fn ban<'a>(&'a self, subject: &'a [u8], duration: Option<Duration>) -> StoreFuture<'a, ()> {
        Box::pin(std::future::ready(MemoryStore::ban(self, subject, duration)))
    }

    fn unban<'a>(&'a self, subject: &'a [u8]) -> StoreFuture<'a, bool> {
        Box::pin(std::future::ready(Ok(MemoryStore::unban(self, subject))))
    }

    fn ban_of<'a>(&'a self, subject: &'a [u8]) -> StoreFuture<'a, Option<Wait>> {
        Box::pin(std::future::ready(Ok(MemoryStore::ban_of(self, subject))))
    }

    fn list_ban<'a>(&'a self, entry: &'a str, duration: Option<Duration>) -> StoreFuture<'a, bool> {
        Box::pin(std::future::ready(MemoryStore::list_ban(self, entry, duration)))
    }

    fn unlist_ban<'a>(&'a self, entry: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(std::future::ready(Ok(MemoryStore::unlist_ban(self, entry))))
    }

    fn listed_bans(&self, known: Option<u64>) -> StoreFuture<'_, Option<BanListing>> {
        Box::pin(std::future::ready(Ok(MemoryStore::listed_bans(self, known))))
    }
}

/// The shortest way to a decision: one limit, one key, one unit.
impl MemoryStore {
    /// Charges `key` one unit of `limit` if one is left and the key is not banned, and returns the decision.
    ///
    /// The counter is that of the key's bytes, the limit's algorithm and its window; another quota uses the same
    /// counter. For other costs, or several limits at once, use [`MemoryStore::check`].
    ///
    /// ```
    /// use tidegate_core::{Limit, MemoryStore};
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
mod fast_path_tests;
#[cfg(test)]
mod tests;
