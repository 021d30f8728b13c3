//! Violations found in a history, and the report.

use std::fmt;

/// Maximum number of violations kept in a report. Further ones are only counted.
const KEPT_MAX: usize = 100;

/// A violation of the limiter's guarantees.
///
/// `counter` is an index into the limits of [`History::new`](super::History::new). Times are in microseconds.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Violation {
    /// More units than the quota were admitted in the window that ends at `at_us`, by the store's clock.
    Over {
        /// The counter.
        counter: usize,
        /// The end of the window, by the store's clock.
        at_us: u64,
        /// The units admitted in the window.
        units: u64,
        /// The quota.
        quota: u64,
    },
    /// A limit denied a cost although there was room.
    UnjustifiedDenial {
        /// The counter.
        counter: usize,
        /// The time of the decision, by the store's clock. Of a reported denial: the time at which it was sent.
        at_us: u64,
        /// The denied cost.
        cost: u64,
        /// The most units that can have counted.
        counted: u64,
    },
    /// A reported denial differs from every answer that the store can have given during its call.
    InconsistentDenial {
        /// The counter.
        counter: usize,
        /// The time at which the check was sent.
        sent_us: u64,
        /// The `remaining` of the answer.
        remaining: u64,
    },
    /// The units of a reported admission are not in the journal, or belong to another admission.
    NotInJournal {
        /// The counter.
        counter: usize,
        /// The time at which the check was sent.
        sent_us: u64,
        /// The units of the check.
        units: u64,
    },
    /// The journal has units that no reported admission has received.
    NotReported {
        /// The counter.
        counter: usize,
        /// The time of the units, by the store's clock.
        at_us: u64,
        /// The number of units.
        units: u64,
    },
    /// The store's time of a reported admission is not between sending and receiving.
    OutsideOfCall {
        /// The counter.
        counter: usize,
        /// The time at which the check was sent.
        sent_us: u64,
        /// The time of the decision, by the store's clock.
        at_us: u64,
    },
    /// A limit allowed a cost although there was no room, in a check that another limit denied.
    UnjustifiedAllowance {
        /// The counter.
        counter: usize,
        /// The time of the decision, by the store's clock.
        at_us: u64,
    },
    /// The `retry_after` of an answer is not the time until its cost fits.
    RetryAfter {
        /// The counter.
        counter: usize,
        /// The time of the decision, by the store's clock.
        at_us: u64,
        /// The `retry_after` of the answer; `None` is *never*.
        reported_us: Option<u64>,
        /// The shortest correct value.
        least_us: u64,
        /// The longest correct value.
        most_us: u64,
    },
    /// The `remaining` of an answer does not follow from the admitted checks.
    Remaining {
        /// The counter.
        counter: usize,
        /// The time of the decision, by the store's clock.
        at_us: u64,
        /// The `remaining` of the answer.
        reported: u64,
        /// The smallest correct value.
        least: u64,
        /// The largest correct value.
        most: u64,
    },
    /// More units than allowed were sent and answered within less than a window of the callers' clock.
    Witness {
        /// The counter.
        counter: usize,
        /// The time at which the first of them was sent, by the callers' clock.
        from_us: u64,
        /// The units admitted.
        units: u64,
        /// The units allowed.
        bound: u64,
    },
    /// Local decisions admitted more units in one window than [`Bounds::local`](super::Bounds::local) allows.
    Local {
        /// The counter.
        counter: usize,
        /// The end of the window, by the clock of the local decisions.
        at_us: u64,
        /// The units admitted.
        units: u64,
        /// The units allowed.
        bound: u64,
    },
    /// A cached denial is not based on any valid decision of the store.
    InvalidCachedDenial {
        /// The counter.
        counter: usize,
        /// The time at which the check was sent, by the caller's clock.
        sent_us: u64,
    },
    /// An answer from the deny cache differs from the answer of the store that it repeats.
    AlteredCachedAnswer {
        /// The counter.
        counter: usize,
        /// The time at which the check was sent, by the caller's clock.
        sent_us: u64,
        /// The `remaining` of the answer.
        remaining: u64,
        /// The `retry_after` of a denied limit (`None` is *never*), or the `next_after` of an allowed one.
        reported_us: Option<u64>,
    },
    /// A check was admitted without counting, and [`Bounds::uncounted`](super::Bounds::uncounted) is not set.
    Uncounted {
        /// The time at which the check was sent, by the caller's clock.
        sent_us: u64,
    },
}

/// The result of [`History::verify`](super::History::verify): counts of what was verified, and the violations.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Number of recorded checks.
    pub checks: u64,
    /// Number of limit statuses of checks that the store admitted.
    pub admitted: u64,
    /// Number of limit statuses in which the store denied.
    pub refused: u64,
    /// Number of limit statuses denied from the deny cache.
    pub cached: u64,
    /// Number of limit statuses of local decisions.
    pub local: u64,
    /// Number of checks admitted without counting.
    pub uncounted: u64,
    /// The first 100 violations.
    pub violations: Vec<Violation>,
    /// Number of all violations.
    pub violations_total: u64,
}

impl Report {
    /// Adds a violation. It is counted, and kept if there are fewer than [`KEPT_MAX`].
    pub(super) fn add(&mut self, violation: Violation) {
        self.violations_total += 1;
        if self.violations.len() < KEPT_MAX {
            self.violations.push(violation);
        }
    }

    /// Asserts that there are no violations.
    ///
    /// # Panics
    /// If there are any. The message lists the first 20.
    pub fn expect_clean(&self) {
        assert!(self.violations_total == 0, "{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} checks, {} uncounted; limits: {} admitted, {} denied, {} from the deny cache, {} local; {} violations",
            self.checks, self.uncounted, self.admitted, self.refused, self.cached, self.local, self.violations_total
        )?;
        self.violations.iter().take(20).try_for_each(|violation| write!(f, "\n  {violation:?}"))
    }
}
