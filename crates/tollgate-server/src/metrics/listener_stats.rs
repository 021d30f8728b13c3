//! Counters and histograms of the listeners.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tollgate::{Decision, DecisionCounts, Source, Unavailable};

use super::histogram::{Histogram, Snapshot};
use crate::auth_guard::AuthFailures;
use crate::log_limit::LogLimit;

/// The reason why a request was rejected before it was processed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rejection {
    /// An HTTP request on the RESP listener.
    Http,
    /// A request that a browser sent for a web page of another site.
    Origin,
    /// A request to the admin listener with an unknown name in `Host`.
    Host,
}

impl Rejection {
    const COUNT: usize = 3;

    /// Returns the name of the reason in metrics and logs.
    pub(super) fn name(self) -> &'static str {
        match self {
            Rejection::Http => "http",
            Rejection::Origin => "origin",
            Rejection::Host => "host",
        }
    }
}

/// Counters and histograms of one listener.
#[derive(Debug)]
pub(crate) struct ListenerStats {
    /// The listener's name in logs, metrics and `/readyz`.
    pub(crate) name: &'static str,
    pub(crate) connections: ConnectionCounts,
    /// The time from a complete request to its response, without the time that either takes on the wire.
    pub(crate) request_times: Histogram,
    pub(crate) auth_failures: AuthFailures,
    authenticates: bool,
    rejections: &'static [Rejection],
    rejected: [AtomicU64; Rejection::COUNT],
    log: LogLimit,
}

impl ListenerStats {
    /// Creates counters of zero for the listener with this name.
    ///
    /// Metrics report the rejections for these reasons, and failed authentications if `authenticates`.
    pub(crate) fn new(name: &'static str, rejections: &'static [Rejection], authenticates: bool) -> Arc<ListenerStats> {
        Arc::new(ListenerStats {
            name,
            connections: ConnectionCounts::default(),
            request_times: Histogram::default(),
            auth_failures: AuthFailures::default(),
            authenticates,
            rejections,
            rejected: Default::default(),
            log: LogLimit::default(),
        })
    }

    /// Counts a rejected request. Logs `message` unless this listener has logged a rejection in the last ten seconds.
    ///
    /// Metrics report only the reasons given to [`new`](Self::new).
    pub(crate) fn reject(&self, reason: Rejection, message: &str) {
        self.rejected[reason as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(unlogged) = self.log.admit() {
            tracing::warn!(listener = self.name, reason = reason.name(), unlogged, "{message}");
        }
    }

    /// Returns the number of requests rejected for this reason.
    #[cfg(test)]
    pub(crate) fn rejected_for(&self, reason: Rejection) -> u64 {
        self.rejected[reason as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of rejected requests for each reason for which this listener can reject.
    pub(super) fn rejected(&self) -> impl Iterator<Item = (Rejection, u64)> {
        self.rejections.iter().map(|reason| (*reason, self.rejected[*reason as usize].load(Ordering::Relaxed)))
    }

    /// Returns the number of failed authentication attempts by result, `wrong` or `refused`.
    ///
    /// Empty if clients of this listener do not authenticate.
    pub(super) fn auth_failures(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let results = ["wrong", "refused"].into_iter().zip(self.auth_failures.read());
        results.filter(|_| self.authenticates)
    }
}

/// The counters of one listener's connections.
#[derive(Debug, Default)]
pub(crate) struct ConnectionCounts {
    open: Arc<AtomicU64>,
    accepted: AtomicU64,
    refused: AtomicU64,
    /// Connections closed to make room for others: idle ones, and ones with an incomplete request.
    pub(crate) evicted: Arc<AtomicU64>,
}

impl ConnectionCounts {
    /// Counts an accepted connection. It counts as open until the returned value is dropped.
    pub(crate) fn open(&self) -> OpenConnection {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
        OpenConnection(self.open.clone())
    }

    /// Counts a connection that was closed at once because the listener has too many.
    pub(crate) fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of connections: open now, accepted so far, refused because of the limit, and evicted.
    pub(super) fn read(&self) -> [u64; 4] {
        [&*self.open, &self.accepted, &self.refused, &*self.evicted].map(|count| count.load(Ordering::Relaxed))
    }
}

/// A guard that counts a connection as open until it is dropped.
pub(crate) struct OpenConnection(Arc<AtomicU64>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// All sources of a decision.
pub(crate) const SOURCES: [Source; 4] = [Source::Store, Source::DenyCache, Source::Local, Source::None];

/// The counters of explicit checks, which name their keys and limits, and the durations of all decisions by source.
#[derive(Debug, Default)]
pub(crate) struct DecisionStats {
    pub(super) explicit: DecisionCounts,
    times: [Histogram; SOURCES.len()],
}

impl DecisionStats {
    /// Counts the decision on an explicit check by outcome and source, and records how long it took.
    ///
    /// An error counts as unavailable, with the source `none`.
    pub(crate) fn record_explicit(&self, answer: &Result<Decision, Unavailable>, took: Duration) {
        self.explicit.count_answer(answer);
        self.record(answer.as_ref().map_or(Source::None, |decision| decision.source), took);
    }

    /// Records how long a decision by `source` took.
    pub(crate) fn record(&self, source: Source, took: Duration) {
        if let Some(index) = SOURCES.iter().position(|known| *known == source) {
            self.times[index].record(took);
        }
    }

    /// Returns the durations of decisions by source: those of the store always, those of others if there were any.
    pub(super) fn times(&self) -> Vec<(&'static str, Snapshot)> {
        let read = SOURCES.iter().zip(&self.times).map(|(source, times)| (*source, times.read()));
        let read = read.filter(|(source, times)| times.count > 0 || *source == Source::Store);
        read.map(|(source, times)| (source.as_str(), times)).collect()
    }
}
