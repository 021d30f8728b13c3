//! The answer: one line per limit, and what they add up to.

use std::fmt;
use std::time::Duration;

use smallvec::SmallVec;

use crate::time::Timestamp;

/// A time to wait in whole microseconds, or *never*.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Wait(u64);

impl Wait {
    /// Not at all.
    pub const ZERO: Wait = Wait(0);
    /// However long you wait, this cost will not fit. Later than every other wait.
    pub const NEVER: Wait = Wait(u64::MAX);

    /// So many microseconds.
    pub const fn from_micros(micros: u64) -> Wait {
        Wait(micros)
    }

    /// The microseconds, or `None` for *never*.
    pub const fn as_micros(self) -> Option<u64> {
        if self.0 == Wait::NEVER.0 { None } else { Some(self.0) }
    }

    /// The duration, or `None` for *never*.
    pub fn as_duration(self) -> Option<Duration> {
        self.as_micros().map(Duration::from_micros)
    }

    /// Whole milliseconds, rounded up, as the doors show them.
    pub fn as_millis_ceil(self) -> Option<u64> {
        self.as_micros().map(|us| us.div_ceil(1_000))
    }

    /// Whole seconds, rounded up, as headers show them.
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

/// What one limit says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Line {
    /// This limit's own verdict. The request was admitted only if every line allowed it.
    pub allowed: bool,
    /// The cost that was asked for.
    pub cost: u32,
    /// The limit's quota.
    pub quota: u32,
    /// What is left, also on a denial.
    pub remaining: u32,
    /// Denied until then, admitted then if nobody else spends it. After an admission zero, except for a
    /// leaky bucket: there it is the time to wait before going on. A peek's speaks of one unit.
    pub retry_after: Wait,
    /// Until one more unit comes back; zero if nothing is missing. *Never* where it is not the limit but a ban that refuses: what the
    /// counter holds is then not told.
    pub next_after: Wait,
    /// Until the limit is whole again; zero if it is.
    pub reset_after: Wait,
}

/// Who gave the answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Source {
    /// The store.
    Store,
    /// A denial remembered from the store, still true.
    DenyCache,
    /// The bounded local share, because the store did not answer.
    Local,
    /// Nobody: the failure policy alone.
    None,
}

impl Source {
    /// The name used in answers, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Source::Store => "store",
            Source::DenyCache => "deny_cache",
            Source::Local => "local",
            Source::None => "none",
        }
    }
}

/// The lines of a decision. Two fit without an allocation, which covers most checks.
pub type Lines = SmallVec<[Line; 2]>;

/// The answer to a check. A denial is an answer, not an error.
#[derive(PartialEq, Eq, Debug)]
pub struct Decision {
    /// The store's time of the decision.
    pub at: Timestamp,
    /// Who decided.
    pub source: Source,
    /// One line per demand, in the order of the check.
    pub lines: Lines,
}

impl Clone for Decision {
    fn clone(&self) -> Decision {
        // Lines are plain bytes, which the vector's own `clone` does not know.
        Decision { lines: Lines::from_slice(&self.lines), ..*self }
    }
}

impl Decision {
    /// Whether the request may go on: every line allowed it.
    pub fn allowed(&self) -> bool {
        self.lines.iter().all(|line| line.allowed)
    }

    /// How long until the request could pass (denied), or must wait before going on (admitted by a
    /// leaky bucket): the longest of the lines that matter.
    pub fn retry_after(&self) -> Wait {
        let allowed = self.allowed();
        let relevant = self.lines.iter().filter(|line| line.allowed == allowed && (line.cost > 0 || !allowed));
        relevant.map(|line| line.retry_after).max().unwrap_or(Wait::ZERO)
    }
}
