//! Counters in process memory: sharded, bounded, without a thread of its own.
//!
//! ```text
//!   key bytes ──seeded hash──▶ shard of the subject (Mutex) ──▶ table of 32-byte slots
//!                                                           └▶ rings of the long logs
//! ```
//!
//! **Counters are decided in place.** The key is hashed, never copied, and a counter is decided in its slot: no
//! allocation, and one or two cache lines to load (the slot, the entries of a long log). Only hashes are stored: two
//! subjects share a counter with a probability of about 2^-95 per pair, and two limits of one subject with 2^-64, under
//! random seeds.
//!
//! **One path.** Every check takes the same steps ([`MemoryStore::decide`]): name the counters, lock their shards, find
//! their slots and add those that are missing, ask each whether the cost fits, decide each in its slot, remove added
//! counters that were not charged, and reclaim.
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
//! **Refunds of buckets** are counted beside the slots (`algorithm/bucket/refunded.rs`).
//!
//! **Bans** are looked up before the counters, and only if there are any (`memory/bans.rs`).
//!
//! **Receipts** that were redeemed are remembered until they expire, in at most 65 MB (`memory/receipts.rs`). Checks do
//! not read them.

mod bans;
mod budget;
mod builder;
mod counter_hash;
mod overflow;
mod receipts;
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
use self::shard::{CounterShard, Place};
use crate::algorithm::{Packed, PastCharge};
use crate::ban_list::{BanListing, BanTexts, end_after};
use crate::check::{Check, Cost, DEMANDS_MAX, Demand};
use crate::decision::{Decision, LimitStatus, LimitStatuses, Source, Wait};
use crate::key::{Key, KeyError};
use crate::limit::Limit;
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
struct Padded(Mutex<CounterShard>);

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
            if let Some(receipt) = PastCharge::of(decision.at, status) {
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
                self.decide_all(self.clock.now(), &Check::of_distinct(&demands), true);
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
    pub fn preview(&self, check: &Check<'_>) -> Decision {
        let read = self.clock.now();
        if !self.bans.is_empty()
            && let Some(ban) = self.ban_of_check(read, check)
        {
            return Decision::banned(read, Source::Store, ban, check);
        }
        // A denial would charge a limit with `count_denied`.
        let mut uncharged: SmallVec<[Demand<'_>; 4]> = check.demands().iter().copied().collect();
        uncharged.iter_mut().for_each(|demand| demand.limit = demand.limit.with_count_denied(false));
        self.decide_all(read, &Check::of_distinct(&uncharged), false)
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
        self.decide_all(read, check, true)
    }

    /// Decides a check. Bans are not considered.
    ///
    /// `read` is the time that the caller read from the clock. If `may_charge` is `false`, the check is denied, and each
    /// status tells whether its limit alone has room.
    #[inline]
    fn decide_all(&self, read: Timestamp, check: &Check<'_>, may_charge: bool) -> Decision {
        // One function, compiled for several sizes of its arrays.
        let demands = check.demands();
        match demands.len() {
            1 => self.decide::<1>(read, demands, may_charge),
            2 => self.decide::<2>(read, demands, may_charge),
            3 => self.decide::<3>(read, demands, may_charge),
            4 => self.decide::<4>(read, demands, may_charge),
            _ => self.decide::<DEMANDS_MAX>(read, demands, may_charge),
        }
    }

    /// Implements [`MemoryStore::decide_all`] for exactly `N` demands, or at most `N` if that is [`DEMANDS_MAX`].
    #[inline(never)]
    fn decide<const N: usize>(&self, read: Timestamp, demands: &[Demand<'_>], may_charge: bool) -> Decision {
        let demands = if N < DEMANDS_MAX { &demands[..N] } else { demands };
        let mut decision = Decision::new(read, Source::Store, LimitStatuses::with_capacity(demands.len()));
        let mut names: [CounterHash; N] = self.hasher.names(demands);
        let mut shards = self.lock(&names, demands.len());
        let now = shards.set_time(read, &self.clock);

        let mut places = [Place::Nowhere; N];
        let (mut added, mut all_fit, mut full) = (None, may_charge, Packed::default());
        for (index, Demand { limit, cost, .. }) in demands.iter().enumerate() {
            let mut counter = match shards.of(index).own_counter(names[index]) {
                Some((place, counter)) => {
                    places[index] = place;
                    counter
                }
                None => {
                    added.get_or_insert_with(|| self.add_counters(&mut shards, demands, &mut names, &mut places));
                    shards.of(index).counter(places[index], names[index], limit, &mut full)
                }
            };
            // The first counter tests itself whether its cost fits.
            all_fit = all_fit && (index == 0 || counter.fits(now, limit, cost.units()));
        }
        for (index, demand) in demands.iter().enumerate() {
            let (name, place) = (names[index], places[index]);
            let mut counter = shards.of(index).counter(place, name, &demand.limit, &mut full);
            let may_grow = |bytes| self.budget.allows_growth(bytes);
            all_fit &=
                counter.decide(now, &demand.limit, demand.cost.units(), all_fit, &may_grow, &mut decision.limits);
        }
        if let Some(added) = added {
            remove_unused(&mut shards, added, &names, demands, all_fit);
        }
        // Reclaiming moves slots, so it must wait until every counter is decided.
        shards.finish(&self.budget);
        decision.at = now;
        decision
    }

    /// Adds the counters of a check that have no slot of their own, and finds the places of all.
    ///
    /// If a demand uses an overflow counter, its name becomes that of this counter. Returns the demands whose counters
    /// were added, as a bit each.
    #[cold]
    #[inline(never)]
    fn add_counters<const N: usize>(
        &self,
        shards: &mut Locked<'_, N>,
        demands: &[Demand<'_>],
        names: &mut [CounterHash; N],
        places: &mut [Place; N],
    ) -> u32 {
        let (mut added, mut without_room) = (0_u32, 0_u32);
        // Making room for a counter may drop another one that has expired, which is then missing, too.
        while let Some(index) = (0..demands.len())
            .find(|&index| without_room >> index & 1 == 0 && shards.of(index).find_anywhere(names[index]).is_none())
        {
            let (demand, name) = (&demands[index], names[index]);
            // The names of two subjects may select the same shard by different hashes.
            let place_of = |name: CounterHash| (self.shard_index(name), name.in_table());
            let is_used = |shared| names[..demands.len()].iter().any(|name| place_of(*name) == place_of(shared));
            let overflow_name = |scope| self.overflow_name(name, demand, scope);
            let (used, is_added) = shards.of(index).add(&demand.limit, &self.budget, name, overflow_name, is_used);
            names[index] = used;
            added |= u32::from(is_added) << index;
            without_room |= u32::from(shards.of(index).find_anywhere(used).is_none()) << index;
        }
        for index in 0..demands.len() {
            places[index] = shards.of(index).find_anywhere(names[index]).unwrap_or(Place::Nowhere);
        }
        added
    }

    /// Locks the shards of the first `len` names, each once and in ascending order, so that two checks cannot deadlock.
    #[inline(always)]
    fn lock<const N: usize>(&self, names: &[CounterHash; N], len: usize) -> Locked<'_, N> {
        let mut locked = Locked { shards: [const { None }; N], of: [0; N] };
        let indices = names.map(|name| self.shard_index(name));
        let mut count = 0;
        let mut next = indices[..len].iter().copied().min();
        while let Some(index) = next {
            locked.shards[count] = Some(self.shards[index].0.lock());
            next = None;
            for (of, &other) in locked.of.iter_mut().zip(&indices[..len]) {
                if other == index {
                    *of = count;
                } else if other > index && next.is_none_or(|next| other < next) {
                    next = Some(other);
                }
            }
            count += 1;
        }
        locked
    }

    /// Refunds one charge on the demand's counter, as far as it still counts.
    ///
    /// Uses the overflow counter of a counter that has no slot. Does nothing if there is none either, or on a bucket if
    /// there is no memory to count the refunded units.
    fn refund_one(&self, demand: &Demand<'_>, receipt: PastCharge) {
        let name = self.hasher.name(&demand.limit, &demand.key);
        let mut shard = self.shard(name).lock();
        let now = shard.decision_time(self.clock.now(), &self.clock);
        shard.set_time(now);
        let found = match shard.find(name) {
            Some(_) => Some(name),
            None => shard.overflow_of(|scope| self.overflow_name(name, demand, scope)),
        };
        if let Some((name, place)) = found.and_then(|name| Some((name, shard.find_anywhere(name)?))) {
            let mut full = Packed::default();
            let mut counter = shard.counter(place, name, &demand.limit, &mut full);
            counter.refund(now, &demand.limit, receipt, &|bytes| self.budget.allows_growth(bytes));
        }
        shard.finish(&self.budget);
    }

    fn overflow_name(&self, name: CounterHash, demand: &Demand<'_>, scope: OverflowScope) -> CounterHash {
        let cells = CELLS_MAX.min(self.budget.overflow_counters_max() / 4).max(1);
        let cell = || self.hasher.cell(name, self.shard_index(name), demand.key.subject(), cells);
        self.hasher.overflow_name(name, demand, scope, cell)
    }

    #[inline]
    fn shard_index(&self, name: CounterHash) -> usize {
        name.shard() as usize & (self.shards.len() - 1)
    }

    #[inline]
    fn shard(&self, name: CounterHash) -> &Mutex<CounterShard> {
        &self.shards[self.shard_index(name)].0
    }
}

/// The locked shards of the counters of a check with at most `N` demands.
struct Locked<'a, const N: usize> {
    /// Each shard once, from the front.
    shards: [Option<MutexGuard<'a, CounterShard>>; N],
    /// For each demand the position of its shard in `shards`.
    of: [usize; N],
}

impl<const N: usize> Locked<'_, N> {
    /// Returns the shard of the demand with this index.
    #[inline(always)]
    fn of(&mut self, index: usize) -> &mut CounterShard {
        self.shards[self.of[index]].as_mut().expect("the shard of every demand is locked")
    }

    /// Returns the time at which to decide, and records it in all shards. `read` is the time that was read before.
    #[inline(always)]
    fn set_time(&mut self, read: Timestamp, clock: &StoreClock) -> Timestamp {
        let times = self.shards.iter().map_while(Option::as_ref).map(|shard| shard.decision_time(read, clock));
        let now = times.max().unwrap_or(read);
        self.shards.iter_mut().map_while(Option::as_mut).for_each(|shard| shard.set_time(now));
        now
    }

    #[inline(always)]
    fn finish(&mut self, budget: &Budget) {
        self.shards.iter_mut().map_while(Option::as_mut).for_each(|shard| shard.finish(budget));
    }
}

/// Removes the counters that a check has added and not charged. `added` has a bit for each demand with a new counter.
#[cold]
fn remove_unused<const N: usize>(
    shards: &mut Locked<'_, N>,
    added: u32,
    names: &[CounterHash; N],
    demands: &[Demand<'_>],
    is_admitted: bool,
) {
    for (index, demand) in demands.iter().enumerate().filter(|(index, _)| added >> index & 1 == 1) {
        if demand.cost.units() == 0 || !(is_admitted || demand.limit.count_denied()) {
            shards.of(index).remove_added(names[index]);
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
mod plain_state_tests;
#[cfg(test)]
mod tests;
