//! What the listeners count and time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tollgate::{Decision, DecisionCounts, Source, Unavailable};

use super::histogram::{Histogram, Snapshot};
use crate::auth_guard::AuthFailures;
use crate::log_limit::LogLimit;

/// Why a request was rejected before anything was done for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rejection {
    /// An HTTP request on the RESP listener.
    Http,
    /// A request that a page of another site made a browser send.
    Origin,
    /// A request to the admin listener under a name that is not its own.
    Host,
}

impl Rejection {
    pub(super) const ALL: [Rejection; 3] = [Rejection::Http, Rejection::Origin, Rejection::Host];

    pub(super) fn name(self) -> &'static str {
        match self {
            Rejection::Http => "http",
            Rejection::Origin => "origin",
            Rejection::Host => "host",
        }
    }
}

/// Counts and times the requests of one listener.
#[derive(Debug, Default)]
pub(crate) struct ListenerStats {
    /// The time from a whole request to its answer, without the time that either takes on the wire.
    pub(crate) request_times: Histogram,
    pub(crate) auth_failures: AuthFailures,
    rejected: [AtomicU64; Rejection::ALL.len()],
    log: LogLimit,
}

impl ListenerStats {
    /// Counts a rejected request, and logs it if no other was logged lately. `what` tells the operator what to look for.
    pub(crate) fn reject(&self, listener: &'static str, reason: Rejection, what: &str) {
        self.rejected[reason as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(unlogged) = self.log.admit() {
            tracing::warn!(listener, reason = reason.name(), unlogged, "{what}");
        }
    }

    #[cfg(test)]
    pub(crate) fn rejected_for(&self, reason: Rejection) -> u64 {
        self.rejected[reason as usize].load(Ordering::Relaxed)
    }

    /// Returns the rejected requests of each reason.
    pub(super) fn rejected(&self) -> [(Rejection, u64); Rejection::ALL.len()] {
        Rejection::ALL.map(|reason| (reason, self.rejected[reason as usize].load(Ordering::Relaxed)))
    }
}

const SOURCES: [Source; 5] = [Source::Store, Source::DenyCache, Source::Ban, Source::Local, Source::None];

/// Counts the decisions on limits that the request named itself, and times all decisions.
#[derive(Debug, Default)]
pub(crate) struct DecisionStats {
    pub(crate) explicit: DecisionCounts,
    times: [Histogram; SOURCES.len()],
}

impl DecisionStats {
    /// Counts and times a decision on limits that the request named itself.
    pub(crate) fn record_explicit(&self, answer: &Result<Decision, Unavailable>, took: Duration) {
        self.explicit.count_answer(answer);
        self.record(answer.as_ref().map_or(Source::None, |decision| decision.source), took);
    }

    /// Times a decision.
    pub(crate) fn record(&self, source: Source, took: Duration) {
        if let Some(index) = SOURCES.iter().position(|one| *one == source) {
            self.times[index].record(took);
        }
    }

    /// Returns the times of the store, and those of every other source that ever decided.
    pub(super) fn times(&self) -> Vec<(&'static str, Snapshot)> {
        let read = SOURCES.iter().zip(&self.times).map(|(source, times)| (*source, times.read()));
        let read = read.filter(|(source, times)| times.count > 0 || *source == Source::Store);
        read.map(|(source, times)| (source.name(), times)).collect()
    }
}
