//! The result of a check: one [`LimitStatus`] per limit, and the overall verdict.

use std::fmt;
use std::time::Duration;

use smallvec::SmallVec;

use crate::time::Timestamp;

/// A duration in whole microseconds, or *never*.
///
/// *Never* compares greater than every other wait.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Wait(u64);

impl Wait {
    /// No wait.
    pub const ZERO: Wait = Wait(0);
    /// An endless wait: the cost can never fit, or a ban has no end. Greater than every other wait.
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
        match self.as_micros() {
            Some(us) => write!(f, "{us}µs"),
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
    /// The units left. Also set on a denial.
    pub remaining: u32,
    /// The time until `cost` units fit, if no other request takes them first.
    ///
    /// Zero for an admission, except in a leaky bucket, where it is the time to wait before proceeding. For a peek
    /// (cost 0), the time until one unit fits. [`Wait::NEVER`] if the cost can never fit, or a ban has no end.
    pub retry_after: Wait,
    /// The time until one more unit becomes available; zero if none is missing.
    pub next_after: Wait,
    /// The time until the limit is unused again; zero if it is.
    pub reset_after: Wait,
}

/// The component that made a decision.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Source {
    /// The store.
    Store,
    /// The cache of denials that the store returned earlier and that still hold.
    DenyCache,
    /// A ban of one of the subjects, read by the store or cached. No counter was read and nothing was charged: the limit
    /// statuses describe the ban.
    Ban,
    /// A local counter with this instance's share of the quota, because the store did not answer.
    Local,
    /// No counter: the failure policy alone decided.
    None,
}

impl Source {
    /// Returns the name used in replies, metrics and logs, such as `deny_cache`.
    pub const fn name(self) -> &'static str {
        match self {
            Source::Store => "store",
            Source::DenyCache => "deny_cache",
            Source::Ban => "ban",
            Source::Local => "local",
            Source::None => "none",
        }
    }
}

/// A list of [`LimitStatus`]s. Up to two are stored inline, without an allocation, which covers most checks.
pub type LimitStatuses = SmallVec<[LimitStatus; 2]>;

/// The result of a check. A denial is a decision, not an error.
#[derive(PartialEq, Eq, Debug)]
pub struct Decision {
    /// The time of the decision, by the store's clock.
    pub at: Timestamp,
    /// The component that decided.
    pub source: Source,
    /// One line per demand, in the order of the check.
    pub limits: LimitStatuses,
}

impl Clone for Decision {
    fn clone(&self) -> Decision {
        // `LimitStatus` is `Copy`: `from_slice` copies the bytes at once, `SmallVec::clone` clones one element at a time.
        Decision { limits: LimitStatuses::from_slice(&self.limits), ..*self }
    }
}

impl Decision {
    /// Returns how long the ban lasts that denied the request, or `None` if no ban did.
    ///
    /// [`Wait::NEVER`] if the ban has no end.
    pub fn banned_for(&self) -> Option<Wait> {
        (self.source == Source::Ban).then(|| self.retry_after())
    }

    /// Creates an admission by the failure policy alone: [`Source::None`], without limits.
    pub fn uncounted(at: Timestamp) -> Decision {
        Decision { at, source: Source::None, limits: LimitStatuses::new() }
    }

    /// Returns whether the request is admitted: every limit allows it.
    ///
    /// `true` if the decision has no lines.
    pub fn allowed(&self) -> bool {
        self.limits.iter().all(|line| line.allowed)
    }

    /// Returns how long the client should wait before it retries or proceeds.
    ///
    /// - Denied: the longest `retry_after` of the limits that deny; [`Wait::NEVER`] if waiting does not help.
    /// - Admitted: the longest wait that a leaky bucket asks for, else zero. Peeks (cost 0) are ignored.
    pub fn retry_after(&self) -> Wait {
        let allowed = self.allowed();
        let relevant = self.limits.iter().filter(|line| line.allowed == allowed && (line.cost > 0 || !allowed));
        relevant.map(|line| line.retry_after).max().unwrap_or(Wait::ZERO)
    }
}
