//! Counts decisions by outcome and source, for metrics.
//!
//! The number of counters is fixed, so their memory does not grow with the number of clients or requests.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::{Decision, Source};

use crate::failure::Unavailable;

/// The outcome of a decision: allowed, denied or unavailable. Its name (`allow`, `deny`, `unavailable`) is a metrics
/// label.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DecisionOutcome {
    /// The request was admitted.
    Allow,
    /// A limit denied the request, or a ban in the store refused it.
    Deny,
    /// The store did not answer, and the failure policy is [`OnFailure::Deny`](crate::OnFailure::Deny).
    Unavailable,
}

tidegate_core::__names! {
    "outcome" DecisionOutcome {
        Allow = "allow",
        Deny = "deny",
        Unavailable = "unavailable",
    }
}

impl DecisionOutcome {
    /// Returns [`Allow`](DecisionOutcome::Allow) if `allowed` is true, else [`Deny`](DecisionOutcome::Deny).
    pub const fn of(allowed: bool) -> DecisionOutcome {
        if allowed { DecisionOutcome::Allow } else { DecisionOutcome::Deny }
    }
}

/// The number of decisions with one outcome from one source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutcomeCount {
    /// The outcome.
    pub outcome: DecisionOutcome,
    /// The source of the decisions.
    pub source: Source,
    /// The number of such decisions since the counters were created.
    pub count: u64,
}

/// Every combination of outcome and source that occurs.
#[rustfmt::skip]
const CELLS: [(DecisionOutcome, Source); 8] = [
    (DecisionOutcome::Allow, Source::Store), (DecisionOutcome::Allow, Source::Local), (DecisionOutcome::Allow, Source::None),
    (DecisionOutcome::Deny, Source::Store), (DecisionOutcome::Deny, Source::DenyCache), (DecisionOutcome::Deny, Source::Local), (DecisionOutcome::Deny, Source::None),
    (DecisionOutcome::Unavailable, Source::None),
];

/// Counters of decisions by outcome and source.
///
/// Counting is one relaxed atomic addition. A read during concurrent counting may miss the latest decisions; the counts
/// never decrease.
#[derive(Debug, Default)]
pub struct DecisionCounts([AtomicU64; CELLS.len()]);

impl DecisionCounts {
    /// Counts one decision with this outcome from this source.
    ///
    /// A combination that cannot occur is counted as another: any unavailable one as [`Source::None`], and an admission
    /// from [`Source::DenyCache`] as [`Source::Store`].
    pub fn count(&self, outcome: DecisionOutcome, source: Source) {
        let cell = match (outcome, source) {
            (DecisionOutcome::Allow, Source::Local) => 1,
            (DecisionOutcome::Allow, Source::None) => 2,
            (DecisionOutcome::Allow, _) => 0,
            (DecisionOutcome::Deny, Source::DenyCache) => 4,
            (DecisionOutcome::Deny, Source::Local) => 5,
            (DecisionOutcome::Deny, Source::None) => 6,
            (DecisionOutcome::Deny, _) => 3,
            (DecisionOutcome::Unavailable, _) => 7,
        };
        self.0[cell].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the answer of a [`Limiter`](crate::Limiter) by its outcome and source. An error counts as
    /// [`DecisionOutcome::Unavailable`].
    pub fn count_answer(&self, answer: &Result<Decision, Unavailable>) {
        match answer {
            Ok(decision) => self.count(DecisionOutcome::of(decision.allowed()), decision.source),
            Err(_) => self.count(DecisionOutcome::Unavailable, Source::None),
        }
    }

    /// Returns the number of decisions for each combination of outcome and source, in a fixed order.
    ///
    /// Both counts of [`Source::Store`] (`Allow` and `Deny`) are always included, all others only if they are not zero.
    pub fn counts(&self) -> Vec<OutcomeCount> {
        let read = |((outcome, source), counter): (&(DecisionOutcome, Source), &AtomicU64)| OutcomeCount {
            outcome: *outcome,
            source: *source,
            count: counter.load(Ordering::Relaxed),
        };
        CELLS.iter().zip(&self.0).map(read).filter(|cell| cell.count > 0 || cell.source == Source::Store).collect()
    }

    /// Returns whether no decision was counted yet.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|cell| cell.load(Ordering::Relaxed) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_outcome_and_source_is_read_as_it_was_counted() {
        for (outcome, source) in CELLS {
            let counts = DecisionCounts::default();
            assert!(counts.is_empty());
            counts.count(outcome, source);
            let counted: Vec<OutcomeCount> = counts.counts().into_iter().filter(|cell| cell.count > 0).collect();
            assert_eq!(counted, [OutcomeCount { outcome, source, count: 1 }]);
        }
    }
}
