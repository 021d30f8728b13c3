//! The circuit breaker: who asks a broken store, and how often.
//!
//! Every caller that waits for a dead store pays its deadline. After a few failures in a row it is known
//! to be dead, and callers stop asking:
//!
//! ```text
//!              3 failures in a row
//!    ┌────────┐ ────────────────▶ ┌──────┐ ⟲ one probe at a time,
//!    │ closed │                   │ open │   0.1 s … 0.8 s apart, with jitter
//!    └────────┘ ◀──────────────── └──────┘
//!               a probe succeeds
//! ```
//!
//! There is no half-open state in which a real request is the guinea pig: probes run in the background and do what a
//! decision does (a store that answers PING but cannot run the script, or cannot write, is not healed).
//!
//! A success resets the count. Answers that arrive after the breaker opened change nothing: only the probe
//! closes it, so a burst of late answers cannot make it flap.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// So many failures in a row open the breaker: one may be a blip and two a coincidence.
const FAILURES_TO_OPEN: u32 = 3;
/// The first probe comes this soon, later ones twice as late each, up to the longest.
const PROBE_AFTER_MIN: Duration = Duration::from_millis(100);
/// Of the two seconds within which a healed store must be used again, this leaves more than one to a store that has to
/// connect first, and to the probe itself.
const PROBE_AFTER_MAX: Duration = Duration::from_millis(800);

const CLOSED: u8 = 0;
const OPEN: u8 = 1;

/// Whether the store is asked.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    state: AtomicU8,
    failures_in_a_row: AtomicU32,
    times_opened: AtomicU64,
}

impl Breaker {
    pub(crate) fn is_open(&self) -> bool {
        self.state.load(Ordering::Acquire) == OPEN
    }

    /// How often it has opened.
    pub(crate) fn times_opened(&self) -> u64 {
        self.times_opened.load(Ordering::Relaxed)
    }

    pub(crate) fn succeeded(&self) {
        // The common case only reads, so that callers on many cores share the line.
        if self.failures_in_a_row.load(Ordering::Relaxed) != 0 && !self.is_open() {
            self.failures_in_a_row.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a failure. True for the one caller whose failure opened the breaker: it starts the probe.
    #[must_use]
    pub(crate) fn failed(&self) -> bool {
        let failures = self.failures_in_a_row.fetch_add(1, Ordering::AcqRel).saturating_add(1);
        let opens = failures >= FAILURES_TO_OPEN
            && self.state.compare_exchange(CLOSED, OPEN, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if opens {
            self.times_opened.fetch_add(1, Ordering::Relaxed);
        }
        opens
    }

    /// A probe succeeded: the store is asked again.
    pub(crate) fn close(&self) {
        self.failures_in_a_row.store(0, Ordering::Release);
        self.state.store(CLOSED, Ordering::Release);
    }
}

/// How long to wait before the `attempt`th probe (from 0); `jitter` is in 0.0 ..= 1.0 and takes up to a
/// quarter off, so that the nodes of a fleet do not knock all at once.
pub(crate) fn probe_after(attempt: u32, jitter: f64) -> Duration {
    let doubled = PROBE_AFTER_MIN.saturating_mul(1 << attempt.min(10)).min(PROBE_AFTER_MAX);
    doubled.mul_f64(1.0 - jitter.clamp(0.0, 1.0) / 4.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_failures_in_a_row_open_it_and_only_one_caller_learns_of_it() {
        let breaker = Breaker::default();
        assert!(!breaker.failed());
        assert!(!breaker.failed());
        breaker.succeeded();
        assert!(!breaker.failed());
        assert!(!breaker.failed());
        assert!(breaker.failed());
        assert!(breaker.is_open());
        assert!(!breaker.failed());
        assert_eq!(breaker.times_opened(), 1);
    }

    #[test]
    fn a_late_success_does_not_close_it_but_a_probe_does() {
        let breaker = Breaker::default();
        let _ = (breaker.failed(), breaker.failed(), breaker.failed());
        breaker.succeeded();
        assert!(breaker.is_open());
        breaker.close();
        assert!(!breaker.is_open());
        assert!(!breaker.failed(), "the count starts over");
    }

    #[test]
    fn probes_come_after_a_tenth_of_a_second_and_never_a_second_apart() {
        assert_eq!(probe_after(0, 0.0), Duration::from_millis(100));
        assert_eq!(probe_after(2, 0.0), Duration::from_millis(400));
        assert_eq!(probe_after(99, 0.0), Duration::from_millis(800));
        assert_eq!(probe_after(99, 1.0), Duration::from_millis(600));
    }
}
