//! A histogram of durations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets in microseconds. A decision in process memory falls into the first bucket, and a nearby
/// store answers within the next few. The default deadline of a decision, 25 ms, is a bound. A probe ends within the
/// last one.
const BOUNDS_US: [u64; 16] =
    [10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000];

/// A histogram of durations with buckets from 10 µs to 1 s and one above. Recording costs two atomic additions.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    /// The last bucket has no bound.
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
}

/// The values of a histogram at one moment, in the form that the metrics encoder takes.
pub(super) struct Snapshot {
    pub(super) sum_seconds: f64,
    pub(super) count: u64,
    /// For each bucket its upper bound in seconds, and the number of durations in it (not cumulative).
    pub(super) buckets: Vec<(f64, u64)>,
}

impl Histogram {
    /// Records a duration.
    pub(crate) fn record(&self, took: Duration) {
        self.record_many(took, 1);
    }

    /// Records the same duration `times` times.
    pub(crate) fn record_many(&self, took: Duration, times: u64) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound * 1_000 < ns);
        self.buckets[bucket].fetch_add(times, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns.saturating_mul(times), Ordering::Relaxed);
    }

    /// Returns the current values. A duration that is recorded concurrently may be in only one of count and sum.
    pub(super) fn read(&self) -> Snapshot {
        let bounds = BOUNDS_US.iter().map(|us| *us as f64 / 1e6).chain([f64::MAX]);
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        Snapshot { sum_seconds: self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9, count, buckets }
    }

    /// Returns the number of recorded durations.
    #[cfg(test)]
    pub(crate) fn count(&self) -> u64 {
        self.read().count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_falls_into_the_bucket_whose_bound_it_does_not_exceed() {
        let histogram = Histogram::default();
        for us in [0, 10, 11, 25_000, 25_001, 1_000_000, 1_000_001] {
            histogram.record(Duration::from_micros(us));
        }
        histogram.record_many(Duration::from_micros(20), 100);
        let read = histogram.read();
        let counted: Vec<(f64, u64)> = read.buckets.into_iter().filter(|(_, count)| *count > 0).collect();
        let expected = [(10e-6, 2), (25e-6, 101), (0.025, 1), (0.05, 1), (1.0, 1), (f64::MAX, 1)];
        assert_eq!(counted, expected);
        assert_eq!(read.count, 107);
        assert!((read.sum_seconds - 2.052_023).abs() < 1e-9, "{}", read.sum_seconds);
    }
}
