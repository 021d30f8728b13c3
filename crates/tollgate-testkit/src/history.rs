//! The history checker: was a concurrent run right? Judged afterwards, from what the callers saw.
//!
//! Threads and processes that hammer one store cannot be compared with an oracle step by step: nobody
//! knows the order. But each answer carries the store's time of the decision, and by that time the rules of an
//! exact window can be checked, all of them:
//!
//! ```text
//!   over          units admitted in (t − window, t] above the quota, for any t
//!   unjustified   a denial although there was room
//!   retry_after   not the moment at which enough of the oldest units leave
//!   remaining     not the quota less what counts: something was charged that was not admitted, or not charged that was
//! ```
//!
//! The last is what shows a check of several limits to be all or nothing: a denied check that charged one of its keys, or an
//! admitted one that missed one, leaves a count that no sum of whole checks explains.
//!
//! **Ties.** Decisions of the same microsecond have no known order, so each may have seen any part of the others: the
//! answer must lie between what none and what all of them give. Nothing is skipped.
//!
//! **Ticks.** `sliding` above its exact quota may keep a unit up to one tick longer; its answers may lie that much later.
//!
//! **Without any clock but the caller's.** A store whose clock is wrong could pass all that. So there is a witness that does not
//! believe it: quota + 1 units, all sent after one moment and all answered less than a window later, were admitted within a
//! window whatever any clock says ([`Violation::Witness`]).
//!
//! **Degraded answers** ([`Source::Local`]) are no part of the store's history. They are
//! checked against the bound that was stated for them ([`Bounds`]). Answers that nobody counted ([`Source::None`]) have no bound:
//! each is a violation unless the run is said to allow them.
//!
//! **Remembered denials** ([`Source::DenyCache`]) repeat the store. So each needs a word of the store that was heard before and still
//! holds, for the very cost, with the same remaining and a wait that ends when that word does.

mod counter;
mod remembered;
mod violation;
mod witness;

pub use violation::{Report, Violation};

use tollgate_core::{Algorithm, Decision, Limit, SLIDING_EXACT_QUOTA_MAX, Source, Timestamp};

/// What counters were asked and what they answered. One per thread can be filled and then [merged](History::merge).
#[derive(Clone, Debug)]
pub struct History {
    counters: Vec<Counter>,
    checks: u64,
    /// When the checks were sent that nobody counted.
    uncounted: Vec<u64>,
}

/// What is allowed outside the store's own promise.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bounds {
    /// The most units that local answers may admit on one counter within any window. `None`: there may be no local answers.
    pub local: Option<u64>,
    /// The most units that store and local answers together may admit within any window, by the callers' clock.
    /// `None`: the sum of quota and `local`.
    pub together: Option<u64>,
    /// Whether checks may be admitted that nobody counts, as `on_failure = "allow"` does.
    pub uncounted: bool,
}

#[derive(Clone, Debug)]
struct Counter {
    limit: Limit,
    answers: Vec<Answer>,
    refunds: Vec<Refund>,
}

/// One line of one decision, as its caller saw it.
#[derive(Clone, Copy, Debug)]
struct Answer {
    /// The caller's clock, before asking and after being answered.
    sent_us: u64,
    received_us: u64,
    /// The store's clock.
    at_us: u64,
    cost: u32,
    remaining: u32,
    retry_after_us: Option<u64>,
    /// Until one more unit comes back.
    next_after_us: u64,
    /// This line's own verdict.
    allowed: bool,
    /// The verdict on the whole check: only then is anything charged.
    admitted: bool,
    source: Source,
}

/// Units given back, at some moment between two times of the store's clock.
#[derive(Clone, Copy, Debug)]
struct Refund {
    charged_at_us: u64,
    units: u32,
    earliest_us: u64,
    latest_us: u64,
}

impl History {
    /// An empty history of these counters. Only exact windows can be judged.
    ///
    /// # Panics
    /// When one is neither `sliding` nor `sliding-log`.
    pub fn new(limits: impl IntoIterator<Item = Limit>) -> History {
        let counter = |limit: Limit| {
            assert!(
                matches!(limit.algorithm(), Algorithm::Sliding | Algorithm::SlidingLog) && !limit.count_denied(),
                "a history is of exact windows without penalties, not of {limit}"
            );
            Counter { limit, answers: Vec::new(), refunds: Vec::new() }
        };
        History { counters: limits.into_iter().map(counter).collect(), checks: 0, uncounted: Vec::new() }
    }

    /// Notes a decision: `counters` names the counter of each of its lines, by its place in [`History::new`]. `sent_us` and
    /// `received_us` are the caller's (monotonic) clock before asking and after the answer.
    ///
    /// # Panics
    /// When the decision has not as many lines as counters were asked, unless nobody counted it.
    pub fn note(&mut self, counters: &[usize], sent_us: u64, received_us: u64, decision: &Decision) {
        let admitted = decision.allowed();
        self.checks += 1;
        if decision.source == Source::None {
            self.uncounted.push(sent_us);
            return;
        }
        assert_eq!(decision.lines.len(), counters.len(), "a line for each counter of {counters:?}: {decision:?}");
        for (&counter, line) in counters.iter().zip(&decision.lines) {
            self.counters[counter].answers.push(Answer {
                sent_us,
                received_us,
                at_us: decision.at.as_micros(),
                cost: line.cost,
                remaining: line.remaining,
                retry_after_us: line.retry_after.as_micros(),
                next_after_us: line.next_after.as_micros().unwrap_or(0),
                allowed: line.allowed,
                admitted,
                source: decision.source,
            });
        }
    }

    /// Notes that `decision` was refunded, between these two times of the store's clock.
    ///
    /// # Panics
    /// When the decision has not as many lines as counters were asked.
    pub fn note_refund(&mut self, counters: &[usize], decision: &Decision, earliest: Timestamp, latest: Timestamp) {
        assert_eq!(decision.lines.len(), counters.len(), "a line for each counter of {counters:?}: {decision:?}");
        for (&counter, line) in counters.iter().zip(&decision.lines) {
            self.counters[counter].refunds.push(Refund {
                charged_at_us: decision.at.as_micros(),
                units: line.cost,
                earliest_us: earliest.as_micros(),
                latest_us: latest.as_micros(),
            });
        }
    }

    /// Adds what another caller saw of the same counters.
    ///
    /// # Panics
    /// When the other's counters are not these.
    pub fn merge(&mut self, other: History) {
        assert_eq!(self.counters.len(), other.counters.len(), "both histories are of the same counters");
        self.checks += other.checks;
        self.uncounted.extend(other.uncounted);
        for (mine, theirs) in self.counters.iter_mut().zip(other.counters) {
            assert_eq!(mine.limit, theirs.limit, "both histories are of the same counters");
            mine.answers.extend(theirs.answers);
            mine.refunds.extend(theirs.refunds);
        }
    }

    /// Judges everything.
    pub fn verify(mut self, bounds: Bounds) -> Report {
        let mut report = Report { checks: self.checks, uncounted: self.uncounted.len() as u64, ..Report::default() };
        if !bounds.uncounted {
            self.uncounted.iter().for_each(|&sent_us| report.add(Violation::Uncounted { sent_us }));
        }
        for (number, counter) in self.counters.iter_mut().enumerate() {
            counter::verify(number, counter, &mut report);
            witness::verify(number, counter, bounds, &mut report);
            remembered::verify(number, counter, &mut report);
        }
        report
    }
}

/// How long an entry may outlive its admission's window: up to (and not including) one tick.
fn tick_us(limit: &Limit) -> u64 {
    let is_coarse = limit.algorithm() == Algorithm::Sliding && limit.quota() > SLIDING_EXACT_QUOTA_MAX;
    if is_coarse { limit.window_us().div_ceil(u64::from(SLIDING_EXACT_QUOTA_MAX)) } else { 1 }
}
