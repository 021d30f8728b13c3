//! Cache of recent denials of the shared store.
//!
//! A denied client usually retries at once. The store has already reported when a retry can succeed: not before
//! `retry_after`. Until then, every further check of the same cost on the same counter is denied too, so the limiter
//! answers it without a call to the store.
//!
//! **Exact.** The store decides at some moment between sending the call and receiving its reply, and its waits count
//! from that moment. A denial is cached until *send time* + `retry_after`, so it never outlasts the real one. The wait
//! reported for a cached denial ends at *receive time* + `retry_after`, so a client that waits that long is admitted.
//! `next_after` and `reset_after` are counted from the receive time as well.
//!
//! ```text
//!   sent ├───────── decided ────┤ received
//!        │                      │
//!        └─ the cached denial expires at sent + retry_after
//!                               └─ the reported wait ends at received + retry_after
//! ```
//!
//! An admission that left no units is cached as a denial of one unit until `next_after`. A cached denial is used only
//! for exactly the cost that the store denied. A larger cost has to wait longer, and only the store knows how long.
//!
//! **At most one second.** A reset or a lifted ban on another instance ends a denial early. So a denial is cached for
//! at most a second, even if its wait is an hour. A client that retries without pause costs one store call per second
//! and key.
//!
//! **Exceptions.** If a refund can free units early, or denials are charged (`count_denied`), the limiter does not use
//! this cache. A changed limit is a different entry.
//!
//! **Bans** are cached by subject, apart from denials: a ban refuses every check of its subject, whatever the limit and
//! the cost, except a peek. If the demands of a check have different subjects, the decision does not tell which of them
//! is banned. The limiter then asks the store for the ban of each, at most one check at a time.
//!
//! **Checks of several limits.** One denial is enough to deny a check. The statuses of the other limits are repeated
//! from the last decision of the store, which is cached for each counter separately:
//!
//! ```text
//!   denials:   global 1000/min ─▶ cost 1, until 12:00:05         if there is none, the store is called
//!   statuses:  user:1 100/min ─▶ 93 left │ user:2 100/min ─▶ 100 left │ …
//! ```
//!
//! So an exhausted limit that many subjects share costs one call per second, not one per second and subject. The price
//! is that a repeated status misses what other checks have taken from the counter since. It is repeated for at most ten
//! seconds. A repeated status that denies follows the rules of denials. A limit without a cached status is omitted
//! from the decision: a client that invents a new path for each request has no status to repeat, and
//! must not cost a call for each. If the caller needs a status for every limit, the store is called instead.
//!
//! **Checks on several servers.** A part of such a check may have been denied by units that another check has charged
//! and is about to refund. So only a denial by the caller's own limit is cached ([`DenyCache::learn_own`]). If it was due
//! to such units, they were taken by requests of the same caller. A denial by a limit that many callers share is not: one
//! caller could then keep it in force against the others.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use tidegate_core::{Check, Decision, Demand, LimitStatus, OmittedLimits, Source, Timestamp, Wait};

use crate::limiter::LimitOptions;
use crate::ttl_cache::{Expire, Id, TtlCache};

/// Longest time that a denial is cached, in microseconds.
const DENIED_US_MAX: u64 = 1_000_000;
/// Longest time that the status of a limit is repeated beside a denial, in microseconds.
const REPEATED_US_MAX: u64 = 10_000_000;
/// Maximum number of counters with cached denials, and of counters with a cached status: some tens of megabytes.
const COUNTERS_MAX: usize = 65_536;
/// Maximum number of costs with a cached denial per counter.
const DENIALS_MAX: usize = 4;

/// A bounded cache of recent denials and bans, and of the last status that the store reported for the counters of
/// denied checks.
#[derive(Debug)]
pub(crate) struct DenyCache {
    denials: TtlCache<Denials>,
    statuses: TtlCache<CachedStatus>,
    bans: TtlCache<CachedBan>,
    /// Whether a ban was ever cached. Until then, the lookup of bans is skipped.
    has_bans: AtomicBool,
}

impl Default for DenyCache {
    fn default() -> Self {
        DenyCache {
            denials: TtlCache::new(COUNTERS_MAX),
            statuses: TtlCache::new(COUNTERS_MAX),
            bans: TtlCache::new(COUNTERS_MAX),
            has_bans: AtomicBool::new(false),
        }
    }
}

/// The remaining time of a subject's ban as the store reported it, and when the store was called.
#[derive(Clone, Copy, Debug)]
struct CachedBan {
    ban: Wait,
    call: CallSpan,
}

/// The cached denials of one counter under one limit: at most one per cost, and at most four.
#[derive(Debug, Default)]
struct Denials(SmallVec<[Denial; 1]>);

/// A status that denies, with the time at which it must not be repeated any more.
#[derive(Clone, Copy, Debug)]
struct Denial {
    expires_at: Timestamp,
    cached: CachedStatus,
}

/// The status of a counter as the store reported it, and when the store was called.
#[derive(Clone, Copy, Debug)]
struct CachedStatus {
    status: LimitStatus,
    call: CallSpan,
}

/// The send and receive time of a call to the store, by the limiter's clock. `received` must not be before `sent`. The
/// store decided in between.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallSpan {
    pub(crate) sent: Timestamp,
    pub(crate) received: Timestamp,
}

impl DenyCache {
    /// Returns the denial of a check if the cache implies one, or `None` if the store has to be called.
    ///
    /// The decision is made at `now` and has source [`Source::DenyCache`]. It is a ban if one of the check's subjects
    /// has a cached ban. Otherwise a denial is cached for at least one demand. The decision has the statuses of these
    /// demands, and of the others if they are cached. If one is not, the decision omits it if `may_omit`, else the
    /// result is `None`. Never returns an admission.
    pub(crate) fn recall(&self, check: &Check<'_>, now: Timestamp, may_omit: bool) -> Option<Decision> {
        if let Some(ban) = self.ban_of(check, now) {
            return Some(Decision::banned(now, Source::DenyCache, ban, check));
        }
        let demands = check.demands();
        let ids: SmallVec<[Id; 4]> = demands.iter().map(|demand| self.id(demand)).collect();
        let denied = |(demand, &id): (&Demand<'_>, &Id)| {
            self.denials.get_with(id, |denials| denials.status_of(demand.cost.units(), now)).flatten()
        };
        let denied: SmallVec<[Option<LimitStatus>; 4]> = demands.iter().zip(&ids).map(denied).collect();
        if denied.iter().all(Option::is_none) {
            return None;
        }
        let repeated = |demand, id| self.statuses.get_with(id, |cached| cached.status_for(demand, now)).flatten();
        let statuses = demands.iter().zip(&ids).zip(&denied);
        let statuses: SmallVec<[Option<LimitStatus>; 4]> =
            statuses.map(|((demand, &id), denied)| denied.or_else(|| repeated(demand, id))).collect();
        let unknown = statuses.iter().enumerate().filter(|(_, status)| status.is_none()).map(|(index, _)| index);
        let omitted: OmittedLimits = unknown.collect();
        let limits = statuses.into_iter().flatten().collect();
        (may_omit || omitted.is_empty()).then(|| Decision { omitted, ..Decision::new(now, Source::DenyCache, limits) })
    }

    /// Caches the consequences of a decision that the store has made for `check` during `call`.
    ///
    /// The decision must have one status per demand, and must not be refundable; the caller also leaves out checks with
    /// `count_denied`. A cache without room for a new entry does not store it.
    ///
    /// A denial is cached for each limit that denied the check, and for each limit that its admission left without
    /// units. If there is such a limit, the statuses of all limits are cached too. A ban is cached for the subject of
    /// the check. Nothing is cached if the decision neither denies nor exhausts a limit, or if it is a ban and the
    /// demands have different subjects.
    pub(crate) fn learn(&self, check: &Check<'_>, decision: &Decision, call: CallSpan) {
        self.learn_if(check, decision, |_| true, call);
    }

    /// Caches the denials of a check that several servers decided during `call`, as far as they are certain enough.
    ///
    /// `each` holds the options of the limits, in the order of the check. A denial is cached for each limit that
    /// [identifies the caller](LimitOptions::identifies_caller) and denied the check, or that its admission left without
    /// units. The statuses of limits that allow the check are cached beside a denial.
    pub(crate) fn learn_own(&self, check: &Check<'_>, decision: &Decision, each: &[LimitOptions], call: CallSpan) {
        self.learn_if(check, decision, |index| each.get(index).is_some_and(|limit| limit.identifies_caller), call);
    }

    /// Implements [`DenyCache::learn`] for the limits whose denial holds, by their index in the check.
    fn learn_if(&self, check: &Check<'_>, decision: &Decision, holds: impl Fn(usize) -> bool, call: CallSpan) {
        if let Some(ban) = decision.ban {
            return self.learn_ban(check, ban, call);
        }
        let allowed = decision.allowed();
        let denied = |index, status| denied_by(status, allowed).filter(|_| holds(index));
        let mut statuses = decision.limits.iter().enumerate();
        if !statuses.any(|(index, status)| denied(index, status).is_some()) {
            return;
        }
        for (index, (demand, status)) in check.demands().iter().zip(&decision.limits).enumerate() {
            let (id, denied) = (self.id(demand), denied(index, status));
            if let Some(status) = denied {
                self.denials.update(id, call.sent, |denials| denials.add(CachedStatus { status, call }));
            }
            if denied.is_some() || status.allowed {
                self.statuses.put(id, CachedStatus { status: *status, call }, call.sent);
            }
        }
    }

    /// Removes the cached denials and the cached status of a demand's counter under exactly this limit.
    pub(crate) fn forget(&self, demand: &Demand<'_>) {
        let id = self.id(demand);
        self.denials.forget(id);
        self.statuses.forget(id);
    }

    /// Caches that the subject of the check is banned for the time `ban`. Does nothing if the demands have different
    /// subjects.
    fn learn_ban(&self, check: &Check<'_>, ban: Wait, call: CallSpan) {
        if !has_several_subjects(check) {
            self.learn_ban_of(check.demands()[0].key.subject(), ban, call);
        }
    }

    /// Caches that a subject is banned for the time `ban`, as the store reported during `call`.
    pub(crate) fn learn_ban_of(&self, subject: &[u8], ban: Wait, call: CallSpan) {
        self.bans.put(self.bans.id(subject), CachedBan { ban, call }, call.sent);
        self.has_bans.store(true, Ordering::Relaxed);
    }

    /// Returns the longest remaining time of the cached bans of the check's subjects, or `None` if there is no ban.
    ///
    /// Returns `None` for a peek, which bans do not refuse.
    fn ban_of(&self, check: &Check<'_>, now: Timestamp) -> Option<Wait> {
        if !self.has_bans.load(Ordering::Relaxed) || !check.charges() {
            return None;
        }
        let of_subject = |demand: &Demand<'_>| {
            let id = self.bans.id(demand.key.subject());
            self.bans.get_with(id, |cached| cached.at(now)).flatten()
        };
        check.demands().iter().filter_map(of_subject).max()
    }

    /// Removes the cached ban on a subject, if there is one. The store is not changed.
    pub(crate) fn forget_ban(&self, subject: &[u8]) {
        self.bans.forget(self.bans.id(subject));
    }

    fn id(&self, demand: &Demand<'_>) -> Id {
        self.denials.id((&demand.key, &demand.limit))
    }
}

/// Returns the denial to cache for a limit with this status, or `None` if there is none to cache.
///
/// `allowed` is whether the whole check was admitted. A status that denies is returned as it is. If the check was
/// admitted and left no units, the result denies one unit until `next_after`. Returns `None` for a peek.
fn denied_by(status: &LimitStatus, allowed: bool) -> Option<LimitStatus> {
    match status.allowed {
        // A limit never denies a peek.
        _ if status.cost == 0 => None,
        false => Some(*status),
        true if allowed && status.remaining == 0 => {
            Some(LimitStatus { allowed: false, cost: 1, retry_after: status.next_after, ..*status })
        }
        true => None,
    }
}

/// Returns whether the demands of a check have different subjects.
pub(crate) fn has_several_subjects(check: &Check<'_>) -> bool {
    check.demands().windows(2).any(|pair| pair[0].key.subject() != pair[1].key.subject())
}

/// Returns how long a denial with this wait is cached after its call was sent, in microseconds: the wait, at most a
/// second.
fn denied_for_us(wait: Wait) -> u64 {
    wait.as_micros().map_or(DENIED_US_MAX, |us| us.min(DENIED_US_MAX))
}

impl Denials {
    /// Adds a denial, and removes that of the same cost and those that have expired when its call was sent. If four are
    /// left, also removes the newest of them.
    fn add(&mut self, cached: CachedStatus) {
        let sent = cached.call.sent;
        let expires_at = sent.plus_micros(denied_for_us(cached.status.retry_after));
        self.0.retain(|other| other.cached.status.cost != cached.status.cost && other.expires_at > sent);
        self.0.truncate(DENIALS_MAX - 1);
        self.0.push(Denial { expires_at, cached });
    }

    /// Returns the status that denies exactly this cost, with its waits as of `now`.
    ///
    /// Returns `None` if no such denial is cached, or if it has expired or was sent after `now` (the clock was set
    /// back).
    fn status_of(&self, cost: u32, now: Timestamp) -> Option<LimitStatus> {
        let is_live = |denial: &&Denial| denial.cached.age_us(now).is_some() && now < denial.expires_at;
        let denial = self.0.iter().filter(is_live).find(|denial| denial.cached.status.cost == cost)?;
        Some(denial.cached.at(now))
    }
}

impl Expire for Denials {
    fn is_expired(&self, now: Timestamp) -> bool {
        self.0.iter().all(|denial| denial.expires_at <= now)
    }
}

impl Expire for CachedStatus {
    /// Returns whether the status is at least a second old. It is still repeated until it is ten seconds old, unless it
    /// was removed to make room.
    fn is_expired(&self, now: Timestamp) -> bool {
        self.age_us(now).is_none_or(|age_us| age_us >= DENIED_US_MAX)
    }
}

impl Expire for CachedBan {
    fn is_expired(&self, now: Timestamp) -> bool {
        self.at(now).is_none()
    }
}

impl CachedBan {
    /// Returns the time from `now` until the ban ends, or `None` if the entry is a second old, the ban has ended, or
    /// the call was sent after `now`.
    fn at(&self, now: Timestamp) -> Option<Wait> {
        let age_us = now.as_micros().checked_sub(self.call.sent.as_micros())?;
        (age_us < denied_for_us(self.ban)).then(|| self.call.left(self.ban, now))
    }
}

impl CallSpan {
    /// Returns the rest of a wait at `now`, counted from when the reply was received. [`Wait::NEVER`] stays as it is.
    fn left(&self, wait: Wait, now: Timestamp) -> Wait {
        let passed_us = now.as_micros().saturating_sub(self.received.as_micros());
        wait.as_micros().map_or(wait, |us| Wait::from_micros(us.saturating_sub(passed_us)))
    }
}

impl CachedStatus {
    /// Returns the microseconds since the call was sent, or `None` if that is after `now` (the clock was set back).
    fn age_us(&self, now: Timestamp) -> Option<u64> {
        now.as_micros().checked_sub(self.call.sent.as_micros())
    }

    /// Returns the status as of `now`: each wait is shorter by the time since the reply was received.
    fn at(&self, now: Timestamp) -> LimitStatus {
        let shorter = |wait: Wait| self.call.left(wait, now);
        LimitStatus {
            retry_after: shorter(self.status.retry_after),
            next_after: shorter(self.status.next_after),
            reset_after: shorter(self.status.reset_after),
            late_us: 0,
            refunded_before: 0,
            ..self.status
        }
    }

    /// Returns the status as of `now` for a demand on this counter, whose cost may differ from the cached one.
    ///
    /// The demand is allowed if its cost is at most the cached `remaining`. Returns `None` if the status is too old
    /// (ten seconds if it allows; if it denies, a second or its wait), or if it denies a cost whose wait is unknown.
    fn status_for(&self, demand: &Demand<'_>, now: Timestamp) -> Option<LimitStatus> {
        let cost = demand.cost.units();
        let status = LimitStatus { cost, allowed: cost <= self.status.remaining, ..self.at(now) };
        let age_us = self.age_us(now)?;
        let (age_us_max, retry_after) = match (status.allowed, self.status.allowed) {
            (true, _) if cost == 0 && status.remaining == 0 => (REPEATED_US_MAX, status.next_after),
            (true, true) => (REPEATED_US_MAX, status.retry_after),
            (true, false) => (REPEATED_US_MAX, Wait::ZERO),
            (false, false) if self.status.cost == cost => (denied_for_us(self.status.retry_after), status.retry_after),
            (false, true) if cost == 1 => (denied_for_us(self.status.next_after), status.next_after),
            (false, _) => return None,
        };
        (age_us < age_us_max).then_some(LimitStatus { retry_after, ..status })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;
    use tidegate_core::{Clock, Key, Limit, ManualClock, MemoryStore};

    const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    fn demand<'a>(limit: &str, subject: &'a str) -> Demand<'a> {
        Demand::new(limit.parse::<Limit>().unwrap(), Key::new(subject).unwrap())
    }

    /// Returns the span of a call that was sent and answered at `now`.
    fn at(now: Timestamp) -> CallSpan {
        CallSpan { sent: now, received: now }
    }

    /// Returns the denial of a check from the cache, with a status for each limit. `None` if one is not cached.
    fn recall(cache: &DenyCache, check: &Check<'_>, now: Timestamp) -> Option<Decision> {
        cache.recall(check, now, false)
    }

    fn store() -> (MemoryStore, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::new(START));
        (MemoryStore::builder().clock(clock.clone()).build(), clock)
    }

    #[test]
    fn denial_is_cached_until_its_retry_after_and_reports_the_remaining_wait() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let demand = demand("1/500ms", "a");
        let check = Check::one(&demand);
        assert!(recall(&cache, &check, START).is_none());
        cache.learn(&check, &store.check(&check), at(START));
        let recalled = recall(&cache, &check, START.plus_micros(499_999)).expect("an admission that left nothing");
        assert_eq!((recalled.allowed(), recalled.source), (false, Source::DenyCache));
        assert_eq!(recalled.retry_after(), Wait::from_micros(1));
        assert!(recall(&cache, &check, START.plus_micros(500_000)).is_none());
    }

    #[test]
    fn denial_expires_by_the_send_time_and_its_wait_ends_by_the_receive_time() {
        let (store, clock) = store();
        let cache = DenyCache::default();
        let both = [demand("1/500ms", "a"), demand("1/300ms", "b"), demand("9/500ms", "c")];
        let check = Check::new(&both).unwrap();
        let (decided, received) = (START.plus_micros(20_000), START.plus_micros(30_000));
        clock.set(decided);
        cache.learn(&check, &store.check(&check), CallSpan { sent: START, received });
        let now = START.plus_micros(100_000);
        let recalled = recall(&cache, &check, now).unwrap();
        let waits = |wait: fn(&LimitStatus) -> Wait| recalled.limits.iter().map(wait).collect::<Vec<_>>();
        let until = |us: u64| Wait::from_micros(30_000 + us - 100_000);
        assert_eq!(waits(|status| status.retry_after), [until(500_000), until(300_000), Wait::ZERO]);
        assert_eq!(waits(|status| status.next_after), [until(500_000), until(300_000), until(500_000)]);
        assert_eq!(waits(|status| status.reset_after), [until(500_000), until(300_000), until(500_000)]);
        for (status, demand) in recalled.limits.iter().zip(&both).filter(|(status, _)| !status.allowed) {
            clock.set(now.plus_micros(status.retry_after.as_micros().unwrap()));
            assert!(store.check(&Check::one(demand)).allowed(), "admitted after the reported wait: {demand:?}");
        }
        assert!(recall(&cache, &check, START.plus_micros(299_999)).is_some());
        assert!(recall(&cache, &check, START.plus_micros(300_000)).is_none(), "b may be free again");
        assert!(recall(&cache, &Check::one(&both[0]), START.plus_micros(499_999)).is_some());
        assert!(recall(&cache, &Check::one(&both[0]), START.plus_micros(500_000)).is_none(), "a may be free again");
    }

    #[test]
    fn denial_is_cached_for_at_most_one_second() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let demand = demand("1/h", "a");
        let check = Check::one(&demand);
        store.check(&check);
        cache.learn(&check, &store.check(&check), at(START));
        let recalled = recall(&cache, &check, START.plus_micros(999_999)).unwrap();
        assert_eq!(recalled.retry_after(), Wait::from_micros(3_600_000_000 - 999_999));
        assert!(recall(&cache, &check, START.plus_micros(1_000_000)).is_none());
    }

    #[test]
    fn ban_is_cached_for_at_most_one_second_against_its_own_subject_alone() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let (ann, other_limit, bob) = (demand("5/min", "ann"), demand("9/h", "ann").cost(3), demand("5/min", "bob"));
        store.ban(b"ann", Some(Duration::from_secs(60))).unwrap();
        let both = [ann, bob];
        let check = Check::new(&both).unwrap();
        cache.learn(&check, &store.check(&check), at(START));
        assert!(recall(&cache, &check, START).is_none(), "not known whose ban it is");
        cache.learn(&Check::one(&ann), &store.check(&Check::one(&ann)), at(START));
        let now = START.plus_micros(999_999);
        for check in [Check::one(&ann), Check::one(&other_limit), check] {
            let recalled = recall(&cache, &check, now).expect("a check of a banned subject");
            let left = Wait::from_micros(60_000_000 - 999_999);
            assert_eq!(recalled, Decision::banned(now, Source::DenyCache, left, &check));
        }
        for check in [Check::one(&bob), Check::one(&ann.cost(0))] {
            assert!(recall(&cache, &check, now).is_none(), "another subject, and a peek");
        }
        assert!(recall(&cache, &Check::one(&ann), START.plus_micros(1_000_000)).is_none());
        cache.forget_ban(b"ann");
        assert!(recall(&cache, &Check::one(&ann), now).is_none(), "the ban was lifted here");
        store.ban(b"ann", Some(Duration::from_millis(200))).unwrap();
        cache.learn(&Check::one(&ann), &store.check(&Check::one(&ann)), at(START));
        assert!(recall(&cache, &Check::one(&ann), START.plus_micros(199_999)).is_some());
        assert!(recall(&cache, &Check::one(&ann), START.plus_micros(200_000)).is_none(), "the ban has ended");
    }

    #[test]
    fn clock_that_is_set_back_does_not_prolong_a_denial() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let demand = demand("1/h", "a");
        let check = Check::one(&demand);
        store.check(&check);
        cache.learn(&check, &store.check(&check), at(START));
        assert!(recall(&cache, &check, START).is_some());
        assert!(recall(&cache, &check, Timestamp::from_micros(START.as_micros() - 1)).is_none());
    }

    #[test]
    fn denial_is_recalled_only_for_the_cost_that_was_denied() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let (five, six, one) = (demand("10/min", "a").cost(5), demand("10/min", "a").cost(6), demand("10/min", "a"));
        store.check(&Check::one(&six));
        cache.learn(&Check::one(&five), &store.check(&Check::one(&five)), at(START));
        assert!(recall(&cache, &Check::one(&five), START).is_some());
        assert!(recall(&cache, &Check::one(&six), START).is_none());
        assert!(recall(&cache, &Check::one(&one), START).is_none());
    }

    #[test]
    fn changed_limit_or_reset_is_not_answered_from_the_cache() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let (old, new) = (demand("1/min", "a"), demand("2/min", "a"));
        cache.learn(&Check::one(&old), &store.check(&Check::one(&old)), at(START));
        assert!(recall(&cache, &Check::one(&new), START).is_none());
        assert!(recall(&cache, &Check::one(&old), START).is_some());
        cache.forget(&old);
        assert!(recall(&cache, &Check::one(&old), START).is_none());
    }

    #[test]
    fn other_limits_repeat_their_last_status_or_the_store_is_called() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let (minute, day) = (demand("1/min", "a"), demand("9/day", "a"));
        let both = [minute, day];
        let check = Check::new(&both).unwrap();
        cache.learn(&check, &store.check(&check), at(START));
        let recalled = recall(&cache, &check, START).unwrap();
        assert_eq!((recalled.limits[0].allowed, recalled.limits[1].allowed), (false, true));
        assert_eq!(recalled.limits[1].remaining, 8);
        let other = [minute, demand("9/day", "b")];
        assert!(recall(&cache, &Check::new(&other).unwrap(), START).is_none());
    }

    #[test]
    fn limit_without_a_cached_status_is_omitted_from_the_denial() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let (own, day) = (demand("1/min", "a"), demand("9/day", "a"));
        let both = [own, day];
        let check = Check::new(&both).unwrap();
        cache.learn(&check, &store.check(&check), at(START));
        let with_invented = [demand("5/min", "path:/x1"), own, day];
        let recalled = cache.recall(&Check::new(&with_invented).unwrap(), START, true).unwrap();
        assert_eq!(recalled.omitted, OmittedLimits::from_iter([0]));
        let statuses: Vec<_> = recalled.limits.iter().map(|status| (status.allowed, status.quota)).collect();
        assert_eq!(statuses, [(false, 1), (true, 9)]);
        assert_eq!(recalled.retry_after(), Wait::from_micros(60_000_000));
        let other = [demand("5/min", "path:/x1"), day];
        assert!(cache.recall(&Check::new(&other).unwrap(), START, true).is_none(), "no limit denies");
    }

    #[test]
    fn only_the_callers_own_denial_is_cached_if_several_servers_decided() {
        let (store, _clock) = store();
        let demands = [demand("1/min", "ip:1"), demand("2/min", "global")];
        let check = Check::new(&demands).unwrap();
        let own = LimitOptions { identifies_caller: true, ..LimitOptions::default() };
        let [first, second] = [[own, LimitOptions::default()], [LimitOptions::default(), own]];
        for (own, is_cached) in [(&first[..], true), (&second, false), (&[], false)] {
            let cache = DenyCache::default();
            store.reset(&demands[0]);
            store.reset(&demands[1]);
            cache.learn_own(&check, &store.check(&check), own, at(START));
            assert_eq!(recall(&cache, &check, START).is_some(), is_cached, "an admission that left nothing: {own:?}");
            cache.learn_own(&check, &store.check(&check), own, at(START));
            assert_eq!(recall(&cache, &check, START).is_some(), is_cached, "{own:?}");
            let shared = Check::one(&demands[1]);
            assert!(recall(&cache, &shared, START).is_none());
        }
    }

    #[test]
    fn another_limit_is_denied_only_until_its_own_retry_after() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let both = [demand("1/h", "a"), demand("1/100ms", "b")];
        let check = Check::new(&both).unwrap();
        cache.learn(&check, &store.check(&check), at(START));
        let recalled = recall(&cache, &check, START.plus_micros(99_999)).unwrap();
        assert_eq!((recalled.limits[1].allowed, recalled.limits[1].retry_after), (false, Wait::from_micros(1)));
        assert!(recall(&cache, &check, START.plus_micros(100_000)).is_none(), "b may be free again");
        let dearer = [both[0], both[1].cost(2)];
        assert!(
            recall(&cache, &Check::new(&dearer).unwrap(), START).is_none(),
            "the wait of two units of b is unknown"
        );
    }

    #[test]
    fn denial_of_another_limit_is_cached_for_at_most_one_second() {
        let (store, clock) = store();
        let cache = DenyCache::default();
        let ask = |check: &Check<'_>| {
            let now = clock.now();
            let recalled = recall(&cache, check, now);
            recalled.unwrap_or_else(|| {
                let decision = store.check(check);
                cache.learn(check, &decision, at(now));
                decision
            })
        };
        let (often, daily) = (demand("1/10s", "a"), demand("5/day", "b"));
        let both = [often, daily];
        store.check(&Check::one(&daily.cost(5)));
        assert!(ask(&Check::one(&often)).allowed());
        assert!(!ask(&Check::new(&both).unwrap()).allowed());
        clock.advance(Duration::from_secs(5));
        // On another instance, so that this cache is not updated.
        store.reset(&daily);
        clock.advance(Duration::from_secs(5));
        assert!(ask(&Check::one(&often)).allowed());
        clock.advance(Duration::from_millis(100));
        let denied = ask(&Check::new(&both).unwrap());
        assert_eq!((denied.allowed(), denied.limits[1].allowed), (false, true));
        assert_eq!(denied.retry_after(), Wait::from_micros(9_900_000));
    }

    #[test]
    fn status_of_another_limit_is_repeated_for_ten_seconds() {
        let cache = DenyCache::default();
        let (store, clock) = store();
        let both = [demand("1/min", "shared"), demand("9/day", "a")];
        let check = Check::new(&both).unwrap();
        cache.learn(&check, &store.check(&check), at(clock.now()));
        // Checks of the shared limit alone keep its denial in the cache.
        for (seconds, is_cached) in [(5, true), (9, true), (10, false)] {
            let now = START.plus_micros(seconds * 1_000_000);
            clock.set(now);
            cache.learn(&Check::one(&both[0]), &store.check(&Check::one(&both[0])), at(now));
            assert_eq!(recall(&cache, &check, now).is_some(), is_cached, "{seconds}");
        }
    }

    #[test]
    fn flood_of_denied_keys_stays_within_the_bound() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        for n in 0..200_000 {
            let subject = n.to_string();
            let demand = demand("1/h", &subject);
            cache.learn(&Check::one(&demand), &store.check(&Check::one(&demand)), at(START));
        }
        assert_eq!((cache.denials.len(), cache.statuses.len()), (COUNTERS_MAX, COUNTERS_MAX));
        let (subject, later) = ("late".to_owned(), START.plus_micros(DENIED_US_MAX));
        let demand = demand("1/h", &subject);
        cache.learn(&Check::one(&demand), &store.check(&Check::one(&demand)), at(later));
        assert!(recall(&cache, &Check::one(&demand), later).is_some(), "expired entries make room");
    }
}
