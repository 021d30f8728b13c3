//! How long the shared store takes.

use std::sync::atomic::{AtomicU64, Ordering};

use tollgate::observe::{Observer, StoreCall, StoreCallKind};

/// Upper bounds of the buckets in microseconds: a store nearby answers in the first few, a decision's deadline is in the
/// middle, and a probe's patience at the end.
const BOUNDS_US: [u64; 12] = [100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000];
const KINDS: [StoreCallKind; 6] = [
    StoreCallKind::Decide,
    StoreCallKind::Refund,
    StoreCallKind::Settle,
    StoreCallKind::Reset,
    StoreCallKind::Inspect,
    StoreCallKind::Probe,
];

/// Watches a limiter: how long each call of its store took, by what it was for.
#[derive(Debug, Default)]
pub struct StoreTimes([Times; KINDS.len()]);

#[derive(Debug, Default)]
struct Times {
    /// The last one has no bound.
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

/// What was seen of one kind of call.
pub(super) struct Histogram {
    pub(super) call: &'static str,
    pub(super) sum_seconds: f64,
    pub(super) count: u64,
    /// Upper bound in seconds, and how many fell below it and above the one before.
    pub(super) buckets: Vec<(f64, u64)>,
}

impl StoreTimes {
    /// One for deciding, and one for whatever else was ever done.
    pub(super) fn read(&self) -> Vec<Histogram> {
        let histograms = KINDS.into_iter().zip(&self.0).map(|(kind, times)| times.read(kind.name()));
        histograms.filter(|histogram| histogram.count > 0 || histogram.call == StoreCallKind::Decide.name()).collect()
    }
}

impl Times {
    fn read(&self, call: &'static str) -> Histogram {
        let bounds = BOUNDS_US.iter().map(|us| *us as f64 / 1e6).chain([f64::MAX]);
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        Histogram { call, sum_seconds: self.sum_us.load(Ordering::Relaxed) as f64 / 1e6, count, buckets }
    }
}

impl Observer for StoreTimes {
    fn store_called(&self, call: &StoreCall) {
        let Some(kind) = KINDS.iter().position(|kind| *kind == call.kind) else { return };
        let us = u64::try_from(call.took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound < us);
        self.0[kind].buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.0[kind].sum_us.fetch_add(us, Ordering::Relaxed);
    }
}
