//! Circuit breaker of the shared store.
//!
//! A call to a store that does not answer costs its caller the whole deadline. After a few consecutive failures the
//! breaker opens, and callers skip the store until a probe succeeds:
//!
//! ```text
//!              3 failures in a row
//!    ┌────────┐ ────────────────▶ ┌──────┐ ⟲ one probe at a time,
//!    │ closed │                   │ open │   0.1 s … 0.8 s apart, with jitter
//!    └────────┘ ◀──────────────── └──────┘
//!         a probe is answered in time
//! ```
//!
//! Probes run in a background task, so that no request has to test a failed store. A probe is a real decision: a store
//! that answers PING but cannot run the script or cannot write does not pass, nor does one that answers after the
//! deadline of decisions.
//!
//! **A probe task that stops.** The probe is a task on the runtime of the caller whose failure opened the breaker. That
//! runtime may end, or make no progress between two calls of a caller that drives it only while it waits for an answer.
//! If the task ends before the store has recovered, the breaker closes with the failure count one below the threshold:
//! the next failure opens it again, and that caller starts a new probe. If a probe is overdue, one caller every two
//! seconds calls the store itself.
//!
//! **Concurrent failures count once.** Calls overlap, and one batch carries the checks of many callers. If one reply is
//! late, all of these callers fail, which is one failure of the store. So a failure counts only if its call was sent
//! after the previous failure was counted.
//!
//! **Phases.** A success resets the failure count. A result counts only if the breaker has not opened or closed since
//! its call was sent, so a burst of late results can neither close nor reopen it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::Timestamp;

/// Consecutive failures that open the breaker. Fewer could be a short network disturbance.
const FAILURES_TO_OPEN: u32 = 3;
/// Delay before the first probe. It doubles with each probe, up to [`PROBE_AFTER_MAX`].
const PROBE_AFTER_MIN: Duration = Duration::from_millis(100);
/// Longest delay between two probes.
///
/// A store that has recovered must be in use within two seconds. This delay leaves 1.2 s of them for the probes: one
/// that times out, one that has to connect, and one that is answered in time.
const PROBE_AFTER_MAX: Duration = Duration::from_millis(800);
/// Time after its due time at which a probe is overdue and a caller replaces it, in microseconds.
const PROBE_OVERDUE_US: u64 = 2_000_000;

/// A circuit breaker: counts failed calls to the store, and decides which callers may call the store.
///
/// It starts closed. It makes no calls itself: callers report each result with [`succeeded`](Breaker::succeeded) or
/// [`failed`](Breaker::failed).
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    /// Number of times the breaker has opened or closed. Odd while it is open.
    changes: AtomicU64,
    failures_in_a_row: AtomicU32,
    /// Time of the latest counted failure, in microseconds.
    failed_us: AtomicU64,
    /// Time by which the next probe should be complete, in microseconds. Meaningless while the breaker is closed.
    probe_due_us: AtomicU64,
}

/// A period in which a breaker did not change: it was open throughout or closed throughout.
///
/// Each time the breaker opens or closes, a new phase begins, which is unequal to all earlier ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Phase(u64);

impl Phase {
    const fn is_open(self) -> bool {
        self.0 % 2 == 1
    }
}

impl Breaker {
    /// Returns the current phase. A caller reads it before its call to the store, and passes it back with the result.
    pub(crate) fn phase(&self) -> Phase {
        Phase(self.changes.load(Ordering::Acquire))
    }

    /// Returns whether the breaker is open, so that callers skip the store.
    pub(crate) fn is_open(&self) -> bool {
        self.phase().is_open()
    }

    /// Returns how many times the breaker has opened since it was created.
    pub(crate) fn times_opened(&self) -> u64 {
        self.phase().0.div_ceil(2)
    }

    /// Returns the current phase if this caller may call the store now, or `None` if it must skip the store.
    ///
    /// While the breaker is closed, every caller may call the store. While it is open, `None` is returned, except that
    /// one caller is admitted when the probe is two seconds past its due time, and then one every two seconds: this
    /// sets the due time to `now`. Its success closes the breaker, its failure changes nothing.
    pub(crate) fn admit_call(&self, now: Timestamp) -> Option<Phase> {
        let phase = self.phase();
        if !phase.is_open() {
            return Some(phase);
        }
        let due_us = self.probe_due_us.load(Ordering::Acquire);
        let replaces_probe = now.as_micros() >= due_us.saturating_add(PROBE_OVERDUE_US)
            && self.probe_due_us.compare_exchange(due_us, now.as_micros(), Ordering::AcqRel, Ordering::Relaxed).is_ok();
        replaces_probe.then_some(phase)
    }

    /// Reports a successful call that was sent in phase `sent_in`. Returns whether it closed the breaker.
    ///
    /// If `sent_in` is the current phase and open, the breaker closes. If it is current and closed, the count of
    /// consecutive failures is reset to 0. If the phase has ended, nothing changes.
    #[must_use]
    pub(crate) fn succeeded(&self, sent_in: Phase) -> bool {
        if sent_in.is_open() {
            return self.close(sent_in);
        }
        // The common case only reads, so that callers on many cores do not contend for the cache line.
        if self.failures_in_a_row.load(Ordering::Relaxed) != 0 && sent_in == self.phase() {
            self.failures_in_a_row.store(0, Ordering::Relaxed);
        }
        false
    }

    /// Reports a call that was sent at `sent` in phase `sent_in` and failed at `now`. Returns whether it opened the
    /// breaker.
    ///
    /// The third consecutive failure opens it. `true` is returned to exactly one caller, which must start the probe.
    /// The failure is not counted if `sent_in` is open or has ended, or if the call was sent before the previous
    /// counted failure.
    #[must_use]
    pub(crate) fn failed(&self, sent_in: Phase, sent: Timestamp, now: Timestamp) -> bool {
        if sent_in.is_open() || sent_in != self.phase() {
            return false;
        }
        let failed_us = self.failed_us.load(Ordering::Acquire);
        // A failure time later than `now` means that the clock was set back since; it is ignored.
        let is_same_failure = sent.as_micros() < failed_us && failed_us <= now.as_micros();
        let is_counted_by_another = || {
            self.failed_us.compare_exchange(failed_us, now.as_micros(), Ordering::AcqRel, Ordering::Relaxed).is_err()
        };
        if is_same_failure || is_counted_by_another() {
            return false;
        }
        let failures = self.failures_in_a_row.fetch_add(1, Ordering::AcqRel).saturating_add(1);
        if failures < FAILURES_TO_OPEN {
            return false;
        }
        // Set before the breaker opens, so that no caller finds the due time of an earlier phase and calls it overdue.
        self.set_probe_due(now);
        self.change(sent_in)
    }

    /// Sets the time by which the next probe should be complete. Two seconds later the probe is overdue, and
    /// [`admit_call`](Breaker::admit_call) lets a caller replace it.
    pub(crate) fn set_probe_due(&self, due: Timestamp) {
        self.probe_due_us.store(due.as_micros(), Ordering::Release);
    }

    /// Closes the breaker because the store has answered in the open phase `phase`. Resets the failure count to 0.
    ///
    /// Returns `true` if this call closed the breaker. Returns `false` and changes nothing if `phase` is closed or has
    /// ended.
    #[must_use]
    pub(crate) fn close(&self, phase: Phase) -> bool {
        self.close_with_failures(0, phase)
    }

    /// Closes the breaker because the probe task of the open phase `phase` has ended without success.
    ///
    /// The failure count is set one below the threshold, so the next counted failure opens the breaker again. Returns
    /// `true` if this call closed the breaker. Returns `false` and changes nothing if `phase` is closed or has ended.
    #[must_use]
    pub(crate) fn close_without_probe(&self, phase: Phase) -> bool {
        self.close_with_failures(FAILURES_TO_OPEN - 1, phase)
    }

    /// Closes the breaker and sets the failure count to `failures`.
    ///
    /// Returns `false` and changes nothing if `phase` is closed or has ended.
    fn close_with_failures(&self, failures: u32, phase: Phase) -> bool {
        if !phase.is_open() || phase != self.phase() {
            return false;
        }
        // No failure is counted while the breaker is open, so this store races with no addition.
        self.failures_in_a_row.store(failures, Ordering::Release);
        self.change(phase)
    }

    /// Ends `phase` and begins the next one: opens a closed breaker, or closes an open one.
    ///
    /// Returns `false` and changes nothing if `phase` has already ended.
    fn change(&self, phase: Phase) -> bool {
        self.changes.compare_exchange(phase.0, phase.0 + 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// Returns the delay before probe number `attempt`, counted from 0: 100 ms, doubled with each attempt up to 800 ms.
///
/// `jitter` is clamped to 0.0 ..= 1.0 and shortens the delay by up to a quarter, so that instances do not all
/// probe at the same moment.
pub(crate) fn probe_after(attempt: u32, jitter: f64) -> Duration {
    let doubled = PROBE_AFTER_MIN.saturating_mul(1 << attempt.min(10)).min(PROBE_AFTER_MAX);
    doubled.mul_f64(1.0 - jitter.clamp(0.0, 1.0) / 4.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    /// Reports a failure of a call sent in the current phase. Returns whether it opened the breaker.
    fn fails(breaker: &Breaker) -> bool {
        breaker.failed(breaker.phase(), NOW, NOW)
    }

    fn opened() -> Breaker {
        let breaker = Breaker::default();
        assert_eq!([fails(&breaker), fails(&breaker), fails(&breaker)], [false, false, true]);
        breaker
    }

    #[test]
    fn three_consecutive_failures_open_the_breaker_once() {
        let breaker = Breaker::default();
        let phase = breaker.phase();
        assert!(!fails(&breaker) && !fails(&breaker));
        assert!(!breaker.succeeded(phase));
        assert!(!fails(&breaker) && !fails(&breaker) && fails(&breaker));
        assert!(breaker.is_open());
        assert!(!fails(&breaker));
        assert_eq!(breaker.times_opened(), 1);
    }

    #[test]
    fn concurrent_failures_count_once() {
        let breaker = Breaker::default();
        let fails_at = |sent_ms: u64, failed_ms: u64| {
            let [sent, failed] = [sent_ms, failed_ms].map(|ms| NOW.plus_micros(1_000 * ms));
            breaker.failed(breaker.phase(), sent, failed)
        };
        assert!((0..64).all(|n| !fails_at(n / 10, 25 + n / 10)), "sent before the first of them failed");
        assert!(!fails_at(32, 57));
        assert!(!fails_at(56, 81), "sent before the second failed");
        assert!(fails_at(58, 83));
        let set_back = Breaker::default();
        let earlier = NOW.minus_micros(3_600_000_000);
        assert!(!set_back.failed(set_back.phase(), NOW, NOW) && !set_back.failed(set_back.phase(), earlier, earlier));
        assert!(set_back.failed(set_back.phase(), earlier, earlier));
    }

    #[test]
    fn success_of_an_earlier_phase_does_not_close_the_breaker() {
        let breaker = Breaker::default();
        let sent_in = breaker.phase();
        let _ = (fails(&breaker), fails(&breaker), fails(&breaker));
        assert!(!breaker.succeeded(sent_in) && breaker.is_open());
        let phase = breaker.phase();
        assert!(breaker.close(phase) && !breaker.is_open());
        assert!(!breaker.close(phase), "once");
        assert!(!fails(&breaker) && !fails(&breaker), "the count starts over");
    }

    #[test]
    fn failures_of_an_earlier_phase_do_not_reopen_the_breaker() {
        let breaker = Breaker::default();
        let sent_in = breaker.phase();
        let _ = (fails(&breaker), fails(&breaker), fails(&breaker));
        let sent_while_open = breaker.phase();
        assert!(breaker.close(sent_while_open));
        for phase in [sent_in, sent_while_open] {
            assert!((0..10).all(|_| !breaker.failed(phase, NOW, NOW)));
        }
        assert!(!fails(&breaker) && !fails(&breaker) && fails(&breaker), "failures of the current phase count");
        assert_eq!(breaker.times_opened(), 2);
    }

    #[test]
    fn breaker_closed_without_probe_admits_all_callers_and_opens_at_the_next_failure() {
        let breaker = opened();
        assert_eq!(breaker.admit_call(NOW), None);
        let phase = breaker.phase();
        assert!(breaker.close_without_probe(phase));
        assert!(breaker.admit_call(NOW).is_some());
        assert!(fails(&breaker), "one failure opens it, and its caller starts the probe");
        assert!(!breaker.close_without_probe(phase), "the probe task of an earlier phase cannot close this one");
    }

    #[test]
    fn one_caller_every_two_seconds_replaces_an_overdue_probe() {
        let breaker = opened();
        breaker.set_probe_due(NOW.plus_micros(300_000));
        let at_ms = |ms: u64| breaker.admit_call(NOW.plus_micros(ms * 1_000));
        assert_eq!(at_ms(2_299), None);
        let phase = at_ms(2_300).expect("the probe is overdue");
        assert_eq!((at_ms(2_300), at_ms(4_299)), (None, None));
        assert!(!breaker.failed(phase, NOW, NOW) && breaker.is_open());
        let phase = at_ms(4_300).expect("the probe is overdue again");
        assert!(breaker.succeeded(phase) && !breaker.is_open());
    }

    #[test]
    fn probe_delay_doubles_from_100_ms_up_to_800_ms() {
        assert_eq!(probe_after(0, 0.0), Duration::from_millis(100));
        assert_eq!(probe_after(2, 0.0), Duration::from_millis(400));
        assert_eq!(probe_after(99, 0.0), Duration::from_millis(800));
        assert_eq!(probe_after(99, 1.0), Duration::from_millis(600));
    }
}
