//! Counting decisions by what was said and by whom, for metrics.
//!
//! The number of cells is fixed, so a counter costs what it costs on the first day, whoever asks and however often.

use std::sync::atomic::{AtomicU64, Ordering};

use tollgate_core::{Decision, Source};

use crate::failure::Unavailable;

/// What a decision said, in the words of metrics.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Said {
    /// The request may go on.
    Allow,
    /// A limit refuses it.
    Deny,
    /// The store did not answer, and the policy for that is to refuse.
    Unavailable,
}

impl Said {
    /// The word for it in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Said::Allow => "allow",
            Said::Deny => "deny",
            Said::Unavailable => "unavailable",
        }
    }

    /// What a verdict says.
    pub const fn of(allowed: bool) -> Said {
        if allowed { Said::Allow } else { Said::Deny }
    }
}

/// How often one thing was said by one source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counted {
    /// What was said.
    pub said: Said,
    /// Who said it.
    pub source: Source,
    /// How often.
    pub times: u64,
}

/// Everything that can be said, and by whom.
#[rustfmt::skip]
const CELLS: [(Said, Source); 8] = [
    (Said::Allow, Source::Store), (Said::Allow, Source::Local), (Said::Allow, Source::None),
    (Said::Deny, Source::Store), (Said::Deny, Source::DenyCache), (Said::Deny, Source::Local), (Said::Deny, Source::None),
    (Said::Unavailable, Source::None),
];

/// Counts decisions. Counting is one addition; reading is never exact while others count, and never goes back.
#[derive(Debug, Default)]
pub struct DecisionCounts([AtomicU64; CELLS.len()]);

impl DecisionCounts {
    /// Counts one.
    pub fn count(&self, said: Said, source: Source) {
        let cell = match (said, source) {
            (Said::Allow, Source::Local) => 1,
            (Said::Allow, Source::None) => 2,
            (Said::Allow, _) => 0,
            (Said::Deny, Source::DenyCache) => 4,
            (Said::Deny, Source::Local) => 5,
            (Said::Deny, Source::None) => 6,
            (Said::Deny, _) => 3,
            (Said::Unavailable, _) => 7,
        };
        self.0[cell].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the answer of a [`Limiter`](crate::Limiter).
    pub fn count_answer(&self, answer: &Result<Decision, Unavailable>) {
        match answer {
            Ok(decision) => self.count(Said::of(decision.allowed()), decision.source),
            Err(_) => self.count(Said::Unavailable, Source::None),
        }
    }

    /// What was counted: what the store said even if it was never said, the rest if it ever was.
    pub fn counted(&self) -> Vec<Counted> {
        let read = |((said, source), times): (&(Said, Source), &AtomicU64)| Counted {
            said: *said,
            source: *source,
            times: times.load(Ordering::Relaxed),
        };
        CELLS.iter().zip(&self.0).map(read).filter(|cell| cell.times > 0 || cell.source == Source::Store).collect()
    }

    /// Whether nothing was counted yet.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|cell| cell.load(Ordering::Relaxed) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_counted_where_it_is_read() {
        for (said, source) in CELLS {
            let counts = DecisionCounts::default();
            assert!(counts.is_empty());
            counts.count(said, source);
            let counted: Vec<Counted> = counts.counted().into_iter().filter(|cell| cell.times > 0).collect();
            assert_eq!(counted, [Counted { said, source, times: 1 }]);
        }
    }
}
