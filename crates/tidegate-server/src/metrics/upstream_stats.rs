//! Counters and histograms of the gateway's upstreams.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::histogram::{Histogram, Snapshot};

/// The reason why an upstream did not answer a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UpstreamFailure {
    /// No server can be reached.
    Unreachable,
    /// The connection ended without a response.
    Closed,
    /// The response is malformed or contradicts itself.
    BadResponse,
    /// A timeout.
    Timeout,
    /// The upstream has as many requests as it may have.
    Overloaded,
    /// The client address has as many requests at the upstream as it may have.
    AddressLimit,
    /// The client did not accept the response in time, which was cut off.
    SlowClient,
}

impl UpstreamFailure {
    const ALL: [(UpstreamFailure, &'static str); 7] = [
        (UpstreamFailure::Unreachable, "unreachable"),
        (UpstreamFailure::Closed, "closed"),
        (UpstreamFailure::BadResponse, "bad_response"),
        (UpstreamFailure::Timeout, "timeout"),
        (UpstreamFailure::Overloaded, "overloaded"),
        (UpstreamFailure::AddressLimit, "address_limit"),
        (UpstreamFailure::SlowClient, "slow_client"),
    ];
}

/// The counters of one upstream.
#[derive(Debug, Default)]
pub(crate) struct UpstreamStats {
    in_flight: AtomicU64,
    ejections: AtomicU64,
    retries: AtomicU64,
    errors: [AtomicU64; UpstreamFailure::ALL.len()],
    /// The time from a request's arrival at the upstream to the head of its response.
    times: Histogram,
}

impl UpstreamStats {
    /// Counts a request as in progress until the returned guard is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> InFlightGauge {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlightGauge(self.clone())
    }

    /// Counts a request that is sent again, because it reached no server.
    pub(crate) fn count_retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a server that is ejected.
    pub(crate) fn count_ejection(&self) {
        self.ejections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that the upstream did not answer.
    pub(crate) fn count_error(&self, failure: UpstreamFailure) {
        self.errors[failure as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Records the time until the head of a response.
    pub(crate) fn record(&self, took: Duration) {
        self.times.record(took);
    }

    /// Returns the number of ejections.
    #[cfg(test)]
    pub(crate) fn ejections(&self) -> u64 {
        self.ejections.load(Ordering::Relaxed)
    }

    /// Returns the number of requests under way, of ejections and of retries.
    pub(super) fn read(&self) -> [u64; 3] {
        [&self.in_flight, &self.ejections, &self.retries].map(|count| count.load(Ordering::Relaxed))
    }

    /// Returns the number of unanswered requests by reason.
    pub(super) fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        UpstreamFailure::ALL
            .iter()
            .map(|(failure, name)| (*name, self.errors[*failure as usize].load(Ordering::Relaxed)))
    }

    /// Returns the times until the heads of responses.
    pub(super) fn times(&self) -> Snapshot {
        self.times.read()
    }
}

/// A guard that counts a request as under way at its upstream until it is dropped.
pub(crate) struct InFlightGauge(Arc<UpstreamStats>);

impl Drop for InFlightGauge {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
