//! What can be wrong with a history.

use std::fmt;

/// Violations beyond this many are counted, not kept.
const KEPT_MAX: usize = 100;

/// One thing that should not have been.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Violation {
    /// More than the quota in the window that ends here, by the store's clock.
    Over {
        /// Which counter.
        counter: usize,
        /// When.
        at_us: u64,
        /// How much.
        units: u64,
        /// What is allowed.
        quota: u64,
    },
    /// Refused although there was room.
    Unjustified {
        /// Which counter.
        counter: usize,
        /// When.
        at_us: u64,
        /// What was asked.
        cost: u64,
        /// The most that can have counted.
        counted: u64,
    },
    /// A line said yes (in a check that others refused) although there was no room.
    Unfounded {
        /// Which counter.
        counter: usize,
        /// When.
        at_us: u64,
    },
    /// The moment told is not the one at which it fits. Both ends of what would have been right.
    RetryAfter {
        /// Which counter.
        counter: usize,
        /// When.
        at_us: u64,
        /// What was said (`None`: never).
        told_us: Option<u64>,
        /// The shortest that would have been right.
        least_us: u64,
        /// The longest.
        most_us: u64,
    },
    /// What remains is not explained by the admitted checks. Both ends of what would have been right.
    Remaining {
        /// Which counter.
        counter: usize,
        /// When.
        at_us: u64,
        /// What was said.
        told: u64,
        /// The least that would have been right.
        least: u64,
        /// The most.
        most: u64,
    },
    /// More than allowed, all sent and all answered within less than a window of the callers' clock.
    Witness {
        /// Which counter.
        counter: usize,
        /// The first was sent then.
        from_us: u64,
        /// How much.
        units: u64,
        /// What is allowed.
        bound: u64,
    },
    /// Local answers admitted more than their share, or there should have been none.
    Local {
        /// Which counter.
        counter: usize,
        /// When.
        at_us: u64,
        /// How much.
        units: u64,
        /// What is allowed.
        bound: u64,
    },
    /// A remembered denial that no answer of the store stands behind (any more).
    Remembered {
        /// Which counter.
        counter: usize,
        /// When it was asked, by the caller's clock.
        sent_us: u64,
    },
    /// A remembered line that says something else than the word of the store that it stands on.
    Misremembered {
        /// Which counter.
        counter: usize,
        /// When it was asked, by the caller's clock.
        sent_us: u64,
        /// What was said to remain.
        remaining: u64,
        /// The wait that was told (`None`: never): until the cost fits, or until one more unit comes back where it does.
        told_us: Option<u64>,
    },
    /// Admitted without being counted by anybody, where that is not allowed.
    Uncounted {
        /// When it was asked, by the caller's clock.
        sent_us: u64,
    },
}

/// What the checker saw.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Checks noted.
    pub checks: u64,
    /// Lines admitted by the store.
    pub admitted: u64,
    /// Lines refused by the store (their own verdict).
    pub refused: u64,
    /// Lines refused from memory of the store's word.
    pub remembered: u64,
    /// Lines answered locally.
    pub local: u64,
    /// Checks that nobody counted.
    pub uncounted: u64,
    /// What is wrong; the first of them.
    pub violations: Vec<Violation>,
    /// How much is wrong in all.
    pub violations_total: u64,
}

impl Report {
    pub(super) fn add(&mut self, violation: Violation) {
        self.violations_total += 1;
        if self.violations.len() < KEPT_MAX {
            self.violations.push(violation);
        }
    }

    /// Panics unless there is nothing wrong, for use in a test.
    pub fn expect_clean(&self) {
        assert!(self.violations_total == 0, "{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} checks, {} uncounted; lines: {} admitted, {} refused, {} remembered, {} local; {} violations",
            self.checks,
            self.uncounted,
            self.admitted,
            self.refused,
            self.remembered,
            self.local,
            self.violations_total
        )?;
        self.violations.iter().take(20).try_for_each(|violation| write!(f, "\n  {violation:?}"))
    }
}
