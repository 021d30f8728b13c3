//! The history checker: verifies the decisions of a concurrent run afterwards.
//!
//! The decisions of concurrent threads and processes cannot be compared with an oracle step by step, since their order
//! is not known. But each decision carries the store's time, and by that time all rules of an exact window can be
//! checked:
//!
//! ```text
//!   over          units admitted in (t − window, t] above the quota, for any t
//!   unjustified   a denial although there was room
//!   retry_after   not the time at which enough of the oldest units expire
//!   remaining     not the quota minus the counted units: a denied check was charged, or an admitted one was not
//! ```
//!
//! The last rule shows that a check of several limits is all or nothing: a denied check that charged one of its keys,
//! or an admitted check that missed one, leaves a count that no sum of whole checks explains.
//!
//! **Ties.** Decisions of the same microsecond have no known order, so each may have been made before or after any of
//! the others. An answer must lie between what none and what all of them give. No decision is skipped.
//!
//! **Several servers.** On a cluster, a counter has the time of the master that owns its slot. When the slot moves, the
//! clock of the next master may be behind, and a counter with entries in its future counts them, as after a clock that was
//! set back. By their times alone, such decisions are in the wrong order: units seem to count before they were charged.
//! With [`Bounds::skew_us`], decisions whose times differ by no more than that have no known order, like ties.
//!
//! **Ticks.** `sliding` above its exact quota may keep a unit for up to one tick longer, so its waits may be that much
//! longer.
//!
//! **The callers' clock.** A store whose clock is wrong could pass all these checks. So there is one that uses only the
//! callers' clock: quota + 1 units that were all sent after some instant and all answered less than a window later were
//! admitted within one window, whatever the store's clock says ([`Violation::Witness`]).
//!
//! **Local decisions** ([`Source::Local`]) are not part of the store's history. They are checked against [`Bounds`].
//! Uncounted admissions ([`Source::None`]) have no bound: each is a violation unless [`Bounds::uncounted`] is set.
//!
//! **Cached denials** ([`Source::DenyCache`]) repeat a decision of the store. Each needs a decision of the store that
//! was received before and is still valid, for the same cost, with the same `remaining` and a wait that ends at the
//! same time.
//!
//! **Decisions without the store's time**, as other processes and languages report them, are verified with the help of a
//! second limit that records all admissions: see `history/reported.rs`.

mod cached;
mod counter;
mod reported;
mod violation;
mod witness;

pub use reported::{JournalEntry, Reported};
pub use violation::{Report, Violation};

use tidegate_core::{Algorithm, Decision, Limit, SLIDING_EXACT_QUOTA_MAX, Source, Timestamp};

/// A record of the decisions of a run, by counter, to be [verified](History::verify) afterwards.
///
/// Each thread can record into its own history; these are [merged](History::merge) afterwards.
#[derive(Clone, Debug)]
pub struct History {
    counters: Vec<Counter>,
    checks: u64,
    /// The send times of the checks that were admitted without counting.
    uncounted: Vec<u64>,
}

/// The admissions that a run may have besides those of the store.
///
/// By default neither local decisions nor uncounted admissions are allowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bounds {
    /// The most units that local decisions may admit on one counter within any window. `None` is 0.
    pub local: Option<u64>,
    /// The most units that store and local decisions together may admit on one counter within any window.
    ///
    /// By the callers' clock. `None` is the quota plus `local`. Checked only if there are local admissions.
    pub together: Option<u64>,
    /// Whether checks may be admitted without counting, as `on_failure = "allow"` does.
    pub uncounted: bool,
    /// The most units of one counter that the store may have lost in a failover, or charged without an answer.
    ///
    /// The store may then have admitted that much above the quota, and its counts may differ by that much from the
    /// history. Waits are not verified. `None` is 0.
    pub lost: Option<u64>,
    /// The most microseconds by which the clocks of the servers that decide on one counter differ, one after the other.
    ///
    /// 0 if one server decides on it, whose clock is not set back.
    pub skew_us: u64,
}

#[derive(Clone, Debug)]
struct Counter {
    limit: Limit,
    answers: Vec<Answer>,
    refunds: Vec<Refund>,
    reported: Vec<Reported>,
    /// The journal of the reported admissions, in the order of time.
    journal: Vec<JournalEntry>,
}

/// One limit status of a decision, with the times at which the caller sent the check and received the decision.
#[derive(Clone, Copy, Debug)]
struct Answer {
    /// The caller's clock when it sent the check.
    sent_us: u64,
    /// The caller's clock when it received the decision.
    received_us: u64,
    /// The store's clock at the decision.
    at_us: u64,
    cost: u32,
    remaining: u32,
    /// `None` is *never*.
    retry_after_us: Option<u64>,
    /// The time until one more unit is available.
    next_after_us: u64,
    /// The verdict of this limit.
    allowed: bool,
    /// The verdict of the whole check. Units are charged only if it is `true`.
    admitted: bool,
    source: Source,
}

/// A refund of one counter, made at an unknown instant between two times of the store's clock.
#[derive(Clone, Copy, Debug)]
struct Refund {
    /// The store's clock at the refunded decision.
    charged_at_us: u64,
    units: u32,
    /// The store's clock before and after the refund.
    earliest_us: u64,
    latest_us: u64,
}

impl History {
    /// Creates an empty history, with one counter for each of these limits, in this order.
    ///
    /// # Panics
    /// If a limit is neither `sliding` nor `sliding-log`, or has `count_denied`: only exact windows can be verified.
    pub fn new(limits: impl IntoIterator<Item = Limit>) -> History {
        let counter = |limit: Limit| {
            assert!(
                matches!(limit.algorithm(), Algorithm::Sliding | Algorithm::SlidingLog) && !limit.count_denied(),
                "only sliding and sliding-log without count_denied can be verified, not {limit}"
            );
            let (answers, refunds, reported, journal) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            Counter { limit, answers, refunds, reported, journal }
        };
        History { counters: limits.into_iter().map(counter).collect(), checks: 0, uncounted: Vec::new() }
    }

    /// Records a decision.
    ///
    /// `counters` has the counter of each limit status, as an index into the limits of [`History::new`]. `sent_us` and
    /// `received_us` are the caller's monotonic clock before the check and after the decision, in microseconds.
    ///
    /// # Panics
    /// If the decision does not have as many limit statuses as `counters`, unless its source is [`Source::None`], or an
    /// index is out of range.
    pub fn note(&mut self, counters: &[usize], sent_us: u64, received_us: u64, decision: &Decision) {
        let admitted = decision.allowed();
        self.checks += 1;
        if decision.source == Source::None {
            self.uncounted.push(sent_us);
            return;
        }
        assert_eq!(
            decision.limits.len(),
            counters.len(),
            "a limit status for each counter of {counters:?}: {decision:?}"
        );
        for (&counter, status) in counters.iter().zip(&decision.limits) {
            self.counters[counter].answers.push(Answer {
                sent_us,
                received_us,
                at_us: decision.at.as_micros() + u64::from(status.late_us),
                cost: status.cost,
                remaining: status.remaining,
                retry_after_us: status.retry_after.as_micros(),
                next_after_us: status.next_after.as_micros().unwrap_or(0),
                allowed: status.allowed,
                admitted,
                source: decision.source,
            });
        }
    }

    /// Records that all units of `decision` were refunded, between these two times of the store's clock.
    ///
    /// `decision` must be an admission by the store that was [recorded](History::note), and `counters` the same as
    /// there. Each decision must be refunded only once.
    ///
    /// # Panics
    /// If the decision does not have as many limit statuses as `counters`, or an index is out of range.
    pub fn note_refund(&mut self, counters: &[usize], decision: &Decision, earliest: Timestamp, latest: Timestamp) {
        assert_eq!(
            decision.limits.len(),
            counters.len(),
            "a limit status for each counter of {counters:?}: {decision:?}"
        );
        for (&counter, status) in counters.iter().zip(&decision.limits) {
            self.counters[counter].refunds.push(Refund {
                charged_at_us: decision.at.as_micros() + u64::from(status.late_us),
                units: status.cost,
                earliest_us: earliest.as_micros(),
                latest_us: latest.as_micros(),
            });
        }
    }

    /// Records a decision whose store time the caller does not know. The history then also needs the
    /// [journal](History::note_journal) of the counter.
    ///
    /// # Panics
    /// If the limit is not exact, the decision is neither one of the store nor from the deny cache, or the index is out
    /// of range.
    pub fn note_reported(&mut self, counter: usize, reported: Reported) {
        let counter = &mut self.counters[counter];
        assert_eq!(tick_us(&counter.limit), 1, "a limit that groups admissions is not exact: {}", counter.limit);
        let is_counted = matches!(reported.source, None | Some(Source::Store | Source::DenyCache));
        assert!(is_counted, "a decision that the journal does not include: {reported:?}");
        self.checks += 1;
        counter.reported.push(reported);
    }

    /// Records the journal of a counter: all units that its reported decisions have charged, in the order of time.
    ///
    /// The units of one time may be in one entry or in several.
    ///
    /// # Panics
    /// If the journal of the counter was recorded before, the entries are not in the order of time, or the index is out
    /// of range.
    pub fn note_journal(&mut self, counter: usize, journal: Vec<JournalEntry>) {
        assert!(journal.is_sorted_by_key(|entry| entry.at_us), "a journal is in the order of time");
        let entries = &mut self.counters[counter].journal;
        assert!(entries.is_empty(), "a counter has one journal");
        for entry in journal {
            match entries.last_mut().filter(|last| last.at_us == entry.at_us) {
                Some(last) => last.units += entry.units,
                None => entries.push(entry),
            }
        }
    }

    /// Adds the decisions and refunds of another history of the same counters.
    ///
    /// # Panics
    /// If the other history has other limits.
    pub fn merge(&mut self, other: History) {
        assert_eq!(self.counters.len(), other.counters.len(), "both histories must have the same counters");
        self.checks += other.checks;
        self.uncounted.extend(other.uncounted);
        for (mine, theirs) in self.counters.iter_mut().zip(other.counters) {
            assert_eq!(mine.limit, theirs.limit, "both histories must have the same counters");
            mine.answers.extend(theirs.answers);
            mine.refunds.extend(theirs.refunds);
            mine.reported.extend(theirs.reported);
            assert!(mine.journal.is_empty() || theirs.journal.is_empty(), "a counter has one journal");
            mine.journal.extend(theirs.journal);
        }
    }

    /// Verifies all recorded decisions and returns a report. It counts all violations and contains the first 100.
    ///
    /// Decisions may have been recorded in any order. `bounds` allow admissions besides those of the store.
    pub fn verify(mut self, bounds: Bounds) -> Report {
        let mut report = Report { checks: self.checks, uncounted: self.uncounted.len() as u64, ..Report::default() };
        if !bounds.uncounted {
            self.uncounted.iter().for_each(|&sent_us| report.add(Violation::Uncounted { sent_us }));
        }
        for (number, counter) in self.counters.iter_mut().enumerate() {
            reported::verify(number, counter, &mut report);
            counter::verify(number, counter, bounds, &mut report);
            witness::verify(number, counter, bounds, &mut report);
            cached::verify(number, counter, &mut report);
        }
        report
    }
}

/// Returns the tick of a limit in microseconds: a thousandth of the window, rounded up, or 1 if the limit is exact.
///
/// A unit counts for its window and up to one tick minus a microsecond longer.
fn tick_us(limit: &Limit) -> u64 {
    let is_coarse = limit.algorithm() == Algorithm::Sliding && limit.quota() > SLIDING_EXACT_QUOTA_MAX;
    if is_coarse { limit.window_us().div_ceil(u64::from(SLIDING_EXACT_QUOTA_MAX)) } else { 1 }
}
