//! The result of a check: one [`LimitStatus`] per limit, and the overall verdict.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use smallvec::SmallVec;

use crate::check::{Check, Cost, DEMANDS_MAX};
use crate::time::Timestamp;

/// A duration in whole microseconds, or *never*.
///
/// *Never* compares greater than every other wait. `Debug` prints a [`Duration`], or `never`:
///
/// ```
/// use tidegate_core::Wait;
///
/// assert_eq!(format!("{:?}, {:?}", Wait::from_micros(59_998_500), Wait::NEVER), "59.9985s, never");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Wait(u64);

impl Wait {
    /// No wait.
    pub const ZERO: Wait = Wait(0);
    /// An endless wait: the cost can never fit, or a ban is permanent. Greater than every other wait.
    pub const NEVER: Wait = Wait(u64::MAX);

    /// Creates a wait of `micros` microseconds.
    ///
    /// `u64::MAX` gives [`Wait::NEVER`].
    pub const fn from_micros(micros: u64) -> Wait {
        Wait(micros)
    }

    /// Returns the wait in microseconds, or `None` for [`Wait::NEVER`].
    pub const fn as_micros(self) -> Option<u64> {
        if self.0 == Wait::NEVER.0 { None } else { Some(self.0) }
    }

    /// Returns the wait as a [`Duration`], or `None` for [`Wait::NEVER`].
    pub fn as_duration(self) -> Option<Duration> {
        self.as_micros().map(Duration::from_micros)
    }

    /// Returns the wait in milliseconds, rounded up, or `None` for [`Wait::NEVER`].
    ///
    /// This is the form used in JSON and RESP replies.
    pub fn as_millis_ceil(self) -> Option<u64> {
        self.as_micros().map(|us| us.div_ceil(1_000))
    }

    /// Returns the wait in seconds, rounded up, or `None` for [`Wait::NEVER`].
    ///
    /// This is the form used in HTTP headers.
    pub fn as_secs_ceil(self) -> Option<u64> {
        self.as_micros().map(|us| us.div_ceil(1_000_000))
    }
}

impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.as_duration() {
            Some(wait) => fmt::Debug::fmt(&wait, f),
            None => f.write_str("never"),
        }
    }
}

/// The status of one limit after a decision.
///
/// The values describe the counter after the decision: an admission is already charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LimitStatus {
    /// Whether this limit alone allows the request. The request is admitted only if every limit allows it.
    pub allowed: bool,
    /// The requested cost, in units.
    pub cost: u32,
    /// The limit's quota, in units.
    pub quota: u32,
    /// The units left after the decision. Also set on a denial; 0 if a ban refused the request.
    pub remaining: u32,
    /// The time until `cost` units fit, if no other request takes them first.
    ///
    /// Zero if this limit allows the request, with three exceptions. In a leaky bucket it is the time to wait before
    /// proceeding. For a peek (cost 0) it is the value for one unit. If another limit denied the request and this
    /// one has `count_denied`, the units were charged, and it is the time until they fit again.
    ///
    /// After a ban, the time until it ends. [`Wait::NEVER`] if the cost can never fit, or the ban is permanent.
    pub retry_after: Wait,
    /// The time until one more unit becomes available; zero if none is missing. After a ban, the time until it ends.
    pub next_after: Wait,
    /// The time until the limit is unused again; zero if it is. After a ban, the time until it ends.
    pub reset_after: Wait,
    /// The time from [`Decision::at`] to the decision on this limit, in microseconds.
    ///
    /// Zero unless several servers decided the check, each by its own clock. A refund finds its charge by this time.
    pub late_us: u32,
    /// The units that had been refunded on this counter when a bucket admitted the request; below 2^53.
    ///
    /// Zero for a denial, a peek, and the algorithms other than `token-bucket` and `leaky-bucket`, and if no refund can
    /// matter any more. A refund of this admission needs it: refunds in between let the units leak sooner.
    pub refunded_before: u64,
}

impl LimitStatus {
    /// Creates the status of a limit whose check a ban has refused: denied, with no units left.
    ///
    /// `retry_after`, `next_after` and `reset_after` are `ban`, the time until the ban ends. The status says nothing
    /// about the counter, which was not read. [`Decision::ban`] distinguishes it from a denial by the limit.
    pub fn banned(quota: u32, cost: Cost, ban: Wait) -> LimitStatus {
        LimitStatus::new(quota, cost.units(), false, 0, [ban; 3])
    }

    /// Creates a status with these values, of which `waits` are `retry_after`, `next_after` and `reset_after`. The other
    /// fields are 0.
    #[inline(always)]
    pub(crate) fn new(quota: u32, cost: u32, allowed: bool, remaining: u32, waits: [Wait; 3]) -> LimitStatus {
        let [retry_after, next_after, reset_after] = waits;
        let (late_us, refunded_before) = (0, 0);
        LimitStatus { allowed, cost, quota, remaining, retry_after, next_after, reset_after, late_us, refunded_before }
    }
}

/// Where a decision came from: the store, a cache, a local counter, or no counter at all.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Source {
    /// The store decided.
    Store,
    /// An earlier denial by the store, which still holds, was repeated from a cache.
    DenyCache,
    /// A counter in this process, with this instance's share of the quota, decided instead of the store: the store did
    /// not answer, or the caller asked for a local decision.
    Local,
    /// No counter decided: usually the failure policy did, because the store did not answer.
    None,
}

crate::__names! {
    "source" Source {
        Store = "store",
        DenyCache = "deny_cache",
        Local = "local",
        None = "none",
    }
}

/// The statuses of all limits of a decision, in the order of the check. Dereferences to a slice.
///
/// ```
/// use tidegate_core::{LimitStatuses, MemoryStore};
///
/// let decision = MemoryStore::new().check_key(&"10/min".parse()?, "user:42")?;
/// let limits: &LimitStatuses = &decision.limits;
/// assert_eq!(limits.len(), 1);
/// assert_eq!(limits[0].remaining, 9);
/// assert!(limits.iter().all(|status| status.allowed));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
// Up to two statuses are stored inline, which covers most checks without an allocation.
#[derive(PartialEq, Eq, Default)]
pub struct LimitStatuses(SmallVec<[LimitStatus; 2]>);

impl LimitStatuses {
    /// Creates an empty list. Does not allocate.
    pub fn new() -> LimitStatuses {
        LimitStatuses::default()
    }

    /// Creates an empty list with room for `capacity` statuses. Allocates if that is more than 2.
    pub fn with_capacity(capacity: usize) -> LimitStatuses {
        LimitStatuses(SmallVec::with_capacity(capacity))
    }

    /// Appends a status.
    #[inline]
    pub fn push(&mut self, status: LimitStatus) {
        self.0.push(status);
    }

    /// Removes all statuses and keeps the capacity.
    #[inline]
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl Clone for LimitStatuses {
    fn clone(&self) -> LimitStatuses {
        // `LimitStatus` is `Copy`: `from_slice` copies the bytes at once, `SmallVec::clone` clones one element at a
        // time.
        LimitStatuses(SmallVec::from_slice(&self.0))
    }
}

impl Deref for LimitStatuses {
    type Target = [LimitStatus];

    #[inline]
    fn deref(&self) -> &[LimitStatus] {
        &self.0
    }
}

impl DerefMut for LimitStatuses {
    #[inline]
    fn deref_mut(&mut self) -> &mut [LimitStatus] {
        &mut self.0
    }
}

impl Extend<LimitStatus> for LimitStatuses {
    #[inline]
    fn extend<I: IntoIterator<Item = LimitStatus>>(&mut self, statuses: I) {
        self.0.extend(statuses);
    }
}

impl FromIterator<LimitStatus> for LimitStatuses {
    #[inline]
    fn from_iter<I: IntoIterator<Item = LimitStatus>>(statuses: I) -> LimitStatuses {
        LimitStatuses(statuses.into_iter().collect())
    }
}

impl<'a> IntoIterator for &'a LimitStatuses {
    type Item = &'a LimitStatus;
    type IntoIter = std::slice::Iter<'a, LimitStatus>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a> IntoIterator for &'a mut LimitStatuses {
    type Item = &'a mut LimitStatus;
    type IntoIter = std::slice::IterMut<'a, LimitStatus>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl fmt::Debug for LimitStatuses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Limits of a check that a decision omits, by their index in the check.
///
/// If the store did not answer, limits with the failure policy `allow` are omitted. If a cache denied the check, limits
/// whose status it does not have are omitted.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct OmittedLimits(u32);

// One bit per limit of a check.
const _: () = assert!(DEMANDS_MAX == u32::BITS as usize);

impl OmittedLimits {
    /// No limit.
    pub const NONE: OmittedLimits = OmittedLimits(0);
    /// All limits of a check, however many it has.
    pub const ALL: OmittedLimits = OmittedLimits(u32::MAX);

    /// Returns whether no limit is omitted.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns whether the limit at this index of the check is omitted. `false` if no check has so many limits.
    pub const fn contains(self, index: usize) -> bool {
        index < DEMANDS_MAX && self.0 & (1 << index) != 0
    }
}

/// Collects the indices of limits. Those that no check has are ignored.
impl FromIterator<usize> for OmittedLimits {
    fn from_iter<I: IntoIterator<Item = usize>>(indices: I) -> OmittedLimits {
        let bits = indices.into_iter().filter(|&index| index < DEMANDS_MAX).fold(0, |bits, index| bits | 1 << index);
        OmittedLimits(bits)
    }
}

impl fmt::Debug for OmittedLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            OmittedLimits::ALL => f.write_str("all"),
            _ => f.debug_list().entries((0..DEMANDS_MAX).filter(|&index| self.contains(index))).finish(),
        }
    }
}

/// The result of a check. A denial is a decision, not an error.
///
/// The caller must check [`allowed`](Decision::allowed): a decision that is dropped limits nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decision {
    /// The time of the decision, by the store's clock.
    pub at: Timestamp,
    /// Where the decision came from.
    pub source: Source,
    /// The time until the ban ends, if a ban on a subject of the check refused the request; [`Wait::NEVER`] if it is
    /// permanent.
    ///
    /// `None` if no ban applies: the limits alone decided. If a ban applies, no counter was read or charged, and each
    /// status in `limits` denies until the ban ends.
    pub ban: Option<Wait>,
    /// One status for each limit that was decided, in the order of the check.
    ///
    /// Empty if no counter decided, so that the source is [`Source::None`]: usually the store did not answer, and the
    /// failure policy admitted the request.
    pub limits: LimitStatuses,
    /// The limits of the check that were not decided, and have no status. A store decides all of them.
    pub omitted: OmittedLimits,
}

impl Decision {
    /// Creates a decision on all limits of a check, without a ban.
    pub fn new(at: Timestamp, source: Source, limits: LimitStatuses) -> Decision {
        Decision { at, source, ban: None, limits, omitted: OmittedLimits::NONE }
    }

    /// Creates an admission that no counter was read for: [`Source::None`], no ban, and no limit statuses.
    pub fn uncounted(at: Timestamp) -> Decision {
        Decision { omitted: OmittedLimits::ALL, ..Decision::new(at, Source::None, LimitStatuses::new()) }
    }

    /// Creates the decision of `check` that is refused by a ban which ends after `ban`.
    ///
    /// Every limit has the status [`LimitStatus::banned`]: denied, with no units left until the ban ends.
    pub fn banned(at: Timestamp, source: Source, ban: Wait, check: &Check<'_>) -> Decision {
        let limits = check.demands().iter().map(|demand| LimitStatus::banned(demand.limit.quota(), demand.cost, ban));
        Decision { ban: Some(ban), ..Decision::new(at, source, limits.collect()) }
    }

    /// Iterates over the statuses, each with the index of its limit in the check.
    pub fn statuses(&self) -> impl Iterator<Item = (usize, &LimitStatus)> {
        (0..DEMANDS_MAX).filter(|&index| !self.omitted.contains(index)).zip(&self.limits)
    }

    /// Returns the decision on a check of some of the limits, with their statuses. None of them is omitted.
    #[must_use]
    pub fn with_limits(&self, limits: LimitStatuses) -> Decision {
        Decision { limits, omitted: OmittedLimits::NONE, ..*self }
    }

    /// Returns whether the request is admitted: no ban applies, and every limit allows it.
    ///
    /// `true` if there is neither a ban nor a limit status.
    pub fn allowed(&self) -> bool {
        self.ban.is_none() && self.limits.iter().all(|status| status.allowed)
    }

    /// Returns the units left after this decision: the fewest of any limit.
    ///
    /// 0 if a ban refused the request. `None` if the decision has no limit statuses, because no counter decided.
    pub fn remaining(&self) -> Option<u32> {
        self.limits.iter().map(|status| status.remaining).min()
    }

    /// Returns how long the client should wait before it retries or proceeds.
    ///
    /// - Banned: the time until the ban ends; [`Wait::NEVER`] if it is permanent.
    /// - Denied: the longest `retry_after` of the limits that deny; [`Wait::NEVER`] if waiting does not help.
    /// - Admitted: the longest wait that a leaky bucket asks for, else zero. Peeks (cost 0) are ignored.
    pub fn retry_after(&self) -> Wait {
        if let Some(ban) = self.ban {
            return ban;
        }
        let allowed = self.allowed();
        let relevant = self.limits.iter().filter(|status| status.allowed == allowed && (status.cost > 0 || !allowed));
        relevant.map(|status| status.retry_after).max().unwrap_or(Wait::ZERO)
    }
}
