//! Counters and histograms of the listeners.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::StatusCode;
use tidegate::engine::{Outcome, Refusal};
use tidegate::{Decision, DecisionCounts, DecisionOutcome, OutcomeCount, Source, Unavailable};

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

/// The error statuses that an HTTP listener counts by name. The most frequent one is first.
pub(crate) const HTTP_ERRORS: &[&str] =
    &["429", "400", "401", "403", "404", "405", "408", "409", "413", "414", "417", "421", "422", "431", "500", "503"];
/// The codes of error replies that the RESP listener counts by name.
pub(crate) const RESP_ERRORS: &[&str] = &["ERR", "NOAUTH", "WRONGPASS", "NOPROTO", "UNAVAILABLE", "OTHERINSTANCE"];
/// The status under which all others are counted.
const OTHER: &str = "other";

/// Counters of the error responses of one listener, by status. Their number is fixed.
#[derive(Debug)]
pub(crate) struct ErrorResponses {
    statuses: &'static [&'static str],
    /// One counter per status, and one for all others.
    counts: Box<[AtomicU64]>,
}

impl ErrorResponses {
    /// Creates counters of zero for these statuses, and one for all others.
    fn new(statuses: &'static [&'static str]) -> ErrorResponses {
        ErrorResponses { statuses, counts: (0..=statuses.len()).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Counts one response with this status: an HTTP status of 400 or above, or the code of a RESP error.
    pub(crate) fn count(&self, status: &str) {
        let index = self.statuses.iter().position(|known| *known == status).unwrap_or(self.statuses.len());
        self.counts[index].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the response if its HTTP status is 400 or above.
    pub(crate) fn count_http(&self, status: StatusCode) {
        if status.as_u16() >= 400 {
            self.count(status.as_str());
        }
    }

    /// Returns the number of responses by status. Numbers of zero are left out, except that of the first status.
    pub(crate) fn read(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let statuses = self.statuses.iter().copied().chain([OTHER]);
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed));
        let is_shown = |index: usize, count: u64| count > 0 || index == 0 && !self.statuses.is_empty();
        let read = statuses.zip(counts).enumerate().filter(move |(index, (_, count))| is_shown(*index, *count));
        read.map(|(_, counted)| counted)
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
    /// Error responses, including those that hyper writes itself.
    pub(crate) errors: ErrorResponses,
    pub(crate) auth_failures: AuthFailures,
    authenticates: bool,
    rejections: &'static [Rejection],
    rejected: [AtomicU64; Rejection::COUNT],
    log: LogLimit,
}

impl ListenerStats {
    /// Creates counters of zero for the listener with this name.
    ///
    /// Metrics report error responses with these statuses (all others together), the rejections for these reasons, and
    /// failed authentications if `authenticates`.
    pub(crate) fn new(
        name: &'static str,
        errors: &'static [&'static str],
        rejections: &'static [Rejection],
        authenticates: bool,
    ) -> Arc<ListenerStats> {
        Arc::new(ListenerStats {
            name,
            connections: ConnectionCounts::default(),
            request_times: Histogram::default(),
            errors: ErrorResponses::new(errors),
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
        if let Some(suppressed) = self.log.admit() {
            tracing::warn!(listener = self.name, reason = reason.name(), suppressed, "{message}");
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
const SOURCES: [Source; 4] = [Source::Store, Source::DenyCache, Source::Local, Source::None];

/// The counters of decisions, each of which is the answer to one check or request, and their durations by source.
#[derive(Debug, Default)]
pub(crate) struct DecisionStats {
    /// Explicit checks, which name their keys and limits.
    pub(super) explicit: DecisionCounts,
    /// Requests that enforced rules decided. Each is counted once, however many rules apply.
    by_rules: DecisionCounts,
    times: [Histogram; SOURCES.len()],
    /// Refusals by bans in the configuration, and by bans in the store.
    banned: [AtomicU64; 2],
}

impl DecisionStats {
    /// Counts the decision on an explicit check by outcome and source, and records how long it took.
    ///
    /// It is counted as by [`count_explicit`](Self::count_explicit).
    pub(crate) fn record_explicit(&self, answer: &Result<Decision, Unavailable>, took: Duration) {
        self.count_explicit(answer);
        self.record(answer.as_ref().map_or(Source::None, |decision| decision.source), took);
    }

    /// Counts the decision on an explicit check by outcome and source.
    ///
    /// An error counts as unavailable, with the source `none`. A refusal by a ban is counted as a ban, and not as a
    /// decision.
    pub(crate) fn count_explicit(&self, answer: &Result<Decision, Unavailable>) {
        match answer {
            Ok(decision) if decision.ban.is_some() => {
                self.banned[1].fetch_add(1, Ordering::Relaxed);
            }
            _ => self.explicit.count_answer(answer),
        }
    }

    /// Counts the decision on a request by rules, and records how long it took.
    ///
    /// Of a request that no enforced rule limits, or whose path is too long, only the time is recorded. A refusal by a
    /// ban is counted as a ban, and not as a decision.
    pub(crate) fn record_by_rules(&self, outcome: &Outcome, took: Duration) {
        let source = match outcome {
            Outcome::Admitted(permit) => permit.decision().map(|decision| {
                self.by_rules.count(DecisionOutcome::Allow, decision.source);
                decision.source
            }),
            Outcome::Refused(refusal) => {
                match refusal {
                    Refusal::Denied { decision, .. } => self.by_rules.count(DecisionOutcome::Deny, decision.source),
                    Refusal::Unavailable { .. } => self.by_rules.count(DecisionOutcome::Unavailable, Source::None),
                    Refusal::Banned { source, .. } => {
                        let is_in_store = *source != Source::None;
                        self.banned[usize::from(is_in_store)].fetch_add(1, Ordering::Relaxed);
                    }
                    // A path that is too long is refused before a decision.
                    _ => {}
                }
                Some(refusal.source())
            }
        };
        self.record(source.unwrap_or(Source::None), took);
    }

    /// Returns the number of decisions by outcome and source: of explicit checks, then of requests by rules.
    pub(super) fn answers(&self) -> impl Iterator<Item = OutcomeCount> {
        self.explicit.counts().into_iter().chain(self.by_rules.counts())
    }

    /// Returns the number of refusals by bans: of the `configuration`, and in the `store`.
    pub(super) fn banned(&self) -> [(&'static str, u64); 2] {
        let [configuration, store] = &self.banned;
        [("configuration", configuration), ("store", store)].map(|(ban, count)| (ban, count.load(Ordering::Relaxed)))
    }

    /// Records how long a decision by `source` took.
    fn record(&self, source: Source, took: Duration) {
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
