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
//!         a probe is answered in time
//! ```
//!
//! While somebody probes, no real request is the guinea pig: probes run in the background and do what a
//! decision does (a store that answers PING but cannot run the script, or cannot write, is not healed; nor is one that
//! answers later than decisions wait).
//!
//! **Somebody must probe.** The probe is a task on the runtime of the caller whose failure opened the breaker. That runtime may
//! end, or stand still between the calls of a caller who drives it only to wait for an answer. If the probe ends without having
//! healed anything, the breaker is left ajar: closed, and opened again by the next failure, whose caller then probes. If it
//! is overdue, the caller who notices asks the store itself, one in two seconds.
//!
//! **In a row, not at once.** Calls overlap, and many callers share one call. If one answer is late, all of them fail, and that is one failure. So
//! a failure counts only if its call was sent after the failure before it was noticed.
//!
//! **Phases.** A success resets the count. An answer counts only if the breaker has not changed since its call was sent: a
//! burst of late answers can neither close nor reopen it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tollgate_core::Timestamp;

/// So many failures in a row open the breaker: one may be a blip and two a coincidence.
const FAILURES_TO_OPEN: u32 = 3;
/// The first probe comes this soon, later ones twice as late each, up to the longest.
const PROBE_AFTER_MIN: Duration = Duration::from_millis(100);
/// Of the two seconds within which a healed store must be used again, this leaves more than one to a store that has to
/// connect first, and to the probes themselves: one that hangs, one that pays for the connection, one that is in time.
const PROBE_AFTER_MAX: Duration = Duration::from_millis(800);
/// A probe that is so much later than it should be is not counted on.
const PROBE_OVERDUE_US: u64 = 2_000_000;

/// Whether the store is asked.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    /// How often it has opened or closed. Odd while it is open.
    changes: AtomicU64,
    failures_in_a_row: AtomicU32,
    /// When the latest of these was counted, in microseconds.
    failed_us: AtomicU64,
    /// By when the next probe should have been made, in microseconds. Of no meaning while it is closed.
    probe_due_us: AtomicU64,
}

/// The time between two changes of a breaker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Phase(u64);

impl Phase {
    const fn is_open(self) -> bool {
        self.0 % 2 == 1
    }
}

impl Breaker {
    pub(crate) fn phase(&self) -> Phase {
        Phase(self.changes.load(Ordering::Acquire))
    }

    pub(crate) fn is_open(&self) -> bool {
        self.phase().is_open()
    }

    /// How often it has opened.
    pub(crate) fn times_opened(&self) -> u64 {
        self.phase().0.div_ceil(2)
    }

    /// The phase in which this caller asks the store; `None` if it does not.
    pub(crate) fn lets_ask(&self, now: Timestamp) -> Option<Phase> {
        let phase = self.phase();
        if !phase.is_open() {
            return Some(phase);
        }
        let due_us = self.probe_due_us.load(Ordering::Acquire);
        let stands_in = now.as_micros() >= due_us.saturating_add(PROBE_OVERDUE_US)
            && self.probe_due_us.compare_exchange(due_us, now.as_micros(), Ordering::AcqRel, Ordering::Relaxed).is_ok();
        stands_in.then_some(phase)
    }

    /// Counts a success. True if it closed the breaker, because its caller stood in for the probe.
    #[must_use]
    pub(crate) fn succeeded(&self, sent_in: Phase) -> bool {
        if sent_in.is_open() {
            return self.close(sent_in);
        }
        // The common case only reads, so that callers on many cores share the line.
        if self.failures_in_a_row.load(Ordering::Relaxed) != 0 && sent_in == self.phase() {
            self.failures_in_a_row.store(0, Ordering::Relaxed);
        }
        false
    }

    /// Counts a failure of a call that was sent at `sent`. True for the one caller whose failure opened the breaker: it starts the probe.
    #[must_use]
    pub(crate) fn failed(&self, sent_in: Phase, sent: Timestamp, now: Timestamp) -> bool {
        if sent_in.is_open() || sent_in != self.phase() {
            return false;
        }
        let failed_us = self.failed_us.load(Ordering::Acquire);
        // One from after `now` is from before the clock was set back.
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
        // Before it opens, so that nobody finds a probe overdue that was never due.
        self.probe_is_due_at(now);
        self.change(sent_in)
    }

    /// Says by when the next probe will have been made.
    pub(crate) fn probe_is_due_at(&self, due: Timestamp) {
        self.probe_due_us.store(due.as_micros(), Ordering::Release);
    }

    /// A probe of this phase succeeded: the store is asked again. Whether that ended the phase.
    #[must_use]
    pub(crate) fn close(&self, phase: Phase) -> bool {
        self.close_after(0, phase)
    }

    /// Nobody probes in this phase any more: the store is asked again, until the next failure. Whether that ended the phase.
    #[must_use]
    pub(crate) fn leave_ajar(&self, phase: Phase) -> bool {
        self.close_after(FAILURES_TO_OPEN - 1, phase)
    }

    fn close_after(&self, failures: u32, phase: Phase) -> bool {
        if !phase.is_open() || phase != self.phase() {
            return false;
        }
        // While it is open nobody counts.
        self.failures_in_a_row.store(failures, Ordering::Release);
        self.change(phase)
    }

    fn change(&self, phase: Phase) -> bool {
        self.changes.compare_exchange(phase.0, phase.0 + 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
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

    const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    /// A failure of a call that was sent just before.
    fn fails(breaker: &Breaker) -> bool {
        breaker.failed(breaker.phase(), NOW, NOW)
    }

    fn opened() -> Breaker {
        let breaker = Breaker::default();
        assert_eq!([fails(&breaker), fails(&breaker), fails(&breaker)], [false, false, true]);
        breaker
    }

    #[test]
    fn three_failures_in_a_row_open_it_and_only_one_caller_learns_of_it() {
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
    fn calls_that_fail_together_are_one_failure() {
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
    fn a_late_success_does_not_close_it_but_a_probe_does() {
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
    fn failures_of_calls_that_were_sent_before_it_closed_do_not_open_it_again() {
        let breaker = Breaker::default();
        let sent_in = breaker.phase();
        let _ = (fails(&breaker), fails(&breaker), fails(&breaker));
        let sent_while_open = breaker.phase();
        assert!(breaker.close(sent_while_open));
        for phase in [sent_in, sent_while_open] {
            assert!((0..10).all(|_| !breaker.failed(phase, NOW, NOW)));
        }
        assert!(!fails(&breaker) && !fails(&breaker) && fails(&breaker), "those that are sent after it count");
        assert_eq!(breaker.times_opened(), 2);
    }

    #[test]
    fn a_breaker_that_is_left_ajar_lets_all_ask_and_opens_at_the_next_failure() {
        let breaker = opened();
        assert_eq!(breaker.lets_ask(NOW), None);
        let phase = breaker.phase();
        assert!(breaker.leave_ajar(phase));
        assert!(breaker.lets_ask(NOW).is_some());
        assert!(fails(&breaker), "and its caller probes");
        assert!(!breaker.leave_ajar(phase), "who probed in an earlier phase has no say in this one");
    }

    #[test]
    fn one_caller_in_two_seconds_stands_in_for_a_probe_that_does_not_come() {
        let breaker = opened();
        breaker.probe_is_due_at(NOW.plus_micros(300_000));
        let at_ms = |ms: u64| breaker.lets_ask(NOW.plus_micros(ms * 1_000));
        assert_eq!(at_ms(2_299), None);
        let phase = at_ms(2_300).expect("it is overdue");
        assert_eq!((at_ms(2_300), at_ms(4_299)), (None, None));
        assert!(!breaker.failed(phase, NOW, NOW) && breaker.is_open());
        let phase = at_ms(4_300).expect("it still is");
        assert!(breaker.succeeded(phase) && !breaker.is_open());
    }

    #[test]
    fn probes_come_after_a_tenth_of_a_second_and_never_a_second_apart() {
        assert_eq!(probe_after(0, 0.0), Duration::from_millis(100));
        assert_eq!(probe_after(2, 0.0), Duration::from_millis(400));
        assert_eq!(probe_after(99, 0.0), Duration::from_millis(800));
        assert_eq!(probe_after(99, 1.0), Duration::from_millis(600));
    }
}
