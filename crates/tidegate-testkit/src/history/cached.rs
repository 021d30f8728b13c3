//! Verification of cached denials: each must repeat a decision of the store, and no longer than that decision is valid.
//!
//! An answer of the store is valid until its time plus its wait. The callers do not know the store's clock, but the
//! store decided between sending and receiving. So the end of its validity lies in an interval of the caller's clock
//! that is as long as the call took:
//!
//! ```text
//!   store answer   sent ├──────┤ received                  sent + wait ├──────┤ received + wait
//!   cached answer                        sent ├┤ received, and these + its wait must overlap that interval
//! ```
//!
//! **Never too early.** A client that waits for its `retry_after` must find its units. If the offset between the
//! callers' clock and the store's is known, so is the time of each decision, and a reported end before the true one is
//! a violation even if it lies in the interval. Every answer of the store bounds the offset, because the store decided
//! between sending and receiving. The bound that all answers of a counter give together is as narrow as the quickest of
//! them. Two clocks may drift apart by a thousandth of the run. If no offset fits all answers, a clock was set, and
//! only the interval is used.
//!
//! **A denied limit** needs a denial by the store of the same cost (the wait of a larger cost would be longer by an
//! amount that only the store knows), or, for one unit, an answer that left no unit. Its check must have been sent
//! before, and it must still be valid. **The other limits** of the check repeat what the store answered for them: the
//! same `remaining`, and `next_after` ending at the same time, or zero if that time has passed.
//!
//! Answers of the store are indexed by cost or `remaining`, and then by the end of their validity. Only those whose
//! end can match are searched: as many as the store gives during one call.

use std::collections::BTreeMap;

use tidegate_core::Source;

use super::{Answer, Counter, Report, Violation};

/// Two clocks drift apart in a run by at most this fraction of it.
const DRIFT_PARTS: u64 = 1_000;

/// Verifies all answers from the deny cache for this counter, and adds violations and the number of denials to
/// `report`.
///
/// `number` is the index of the counter.
pub(super) fn verify(number: usize, counter: &Counter, report: &mut Report) {
    let mut cached: Vec<&Answer> = counter.answers.iter().filter(|a| a.source == Source::DenyCache).collect();
    if cached.is_empty() {
        return;
    }
    cached.sort_unstable_by_key(|answer| answer.received_us);
    let mut by_store: Vec<&Answer> = counter.answers.iter().filter(|answer| answer.source == Source::Store).collect();
    by_store.sort_unstable_by_key(|answer| answer.sent_us);
    let offset_us_max = offset_us_max(&by_store);
    let mut by_store = by_store.into_iter().peekable();
    let (mut denials, mut statuses) = (StoreAnswers::default(), StoreAnswers::default());
    for answer in cached {
        // The limiter caches an answer before its caller has read the clock: that caller may be preempted in between.
        // So any answer counts whose check was sent before.
        while let Some(own) = by_store.next_if(|own| own.sent_us <= answer.received_us) {
            if let Some((cost, wait_us)) = denied_by(own) {
                denials.add(cost, wait_us, own, offset_us_max);
            }
            statuses.add(own.remaining, own.next_after_us, own, offset_us_max);
        }
        let (counter, sent_us) = (number, answer.sent_us);
        let reported_us = if answer.allowed { Some(answer.next_after_us) } else { answer.retry_after_us };
        let is_repeated = match (answer.allowed, reported_us) {
            (true, Some(0)) => statuses.any_has_ended(answer.remaining, answer),
            (true, _) => statuses.any_ends_in(answer.remaining, reported_us, answer),
            (false, _) => denials.any_ends_in(answer.cost, reported_us, answer),
        };
        report.cached += u64::from(!answer.allowed);
        if !answer.allowed && !denials.any_is_valid(answer.cost, sent_us) {
            report.add(Violation::InvalidCachedDenial { counter, sent_us });
        } else if !is_repeated {
            report.add(Violation::AlteredCachedAnswer {
                counter,
                sent_us,
                remaining: answer.remaining.into(),
                reported_us,
            });
        }
    }
}

/// Returns the most microseconds by which the store's clock can be ahead of the callers' clock (negative: behind it).
///
/// Includes a drift of a thousandth of the run. Returns `None` if there are no answers, or no offset fits all of them.
/// `by_store` must be sorted by `sent_us`.
fn offset_us_max(by_store: &[&Answer]) -> Option<i64> {
    let offset_us = |at_us: u64, us: u64| at_us as i64 - us as i64;
    let most = by_store.iter().map(|answer| offset_us(answer.at_us, answer.sent_us)).min()?;
    let least = by_store.iter().map(|answer| offset_us(answer.at_us, answer.received_us)).max()?;
    let last_us = by_store.iter().map(|answer| answer.received_us).max()?;
    let run_us = last_us - by_store.first()?.sent_us;
    (least <= most).then_some(most + (run_us / DRIFT_PARTS) as i64)
}

/// Returns the cost that a cache may deny after this answer of the store, and for how many microseconds after it.
///
/// That is a denied cost and its wait ([`u64::MAX`] for *never*), or one unit if the answer left none. Else `None`.
fn denied_by(answer: &Answer) -> Option<(u32, u64)> {
    match answer.retry_after_us {
        None => Some((answer.cost, u64::MAX)),
        Some(wait_us) if !answer.allowed => Some((answer.cost, wait_us)),
        Some(_) if answer.remaining == 0 => Some((1, answer.next_after_us)),
        Some(_) => None,
    }
}

/// Answers of the store for one counter, indexed by a number (`by`) and then by the end of their validity.
///
/// The number is the denied cost in an index of denials, and `remaining` in an index of limit statuses.
#[derive(Default)]
struct StoreAnswers {
    /// The key is (`by`, earliest end in microseconds, number of the answer).
    ends: BTreeMap<(u32, u64, usize), Validity>,
    /// The largest difference between an earliest and a latest end.
    span_us_max: u64,
}

/// The end of the validity of an answer of the store, in microseconds of the callers' clock, and its `remaining`.
struct Validity {
    /// The earliest end that the offset of the clocks allows.
    true_end_us_min: u64,
    latest_end_us: u64,
    remaining: u32,
}

impl StoreAnswers {
    /// Adds an answer that is valid for `wait_us` after its decision. `offset_us_max` is that of [`offset_us_max`].
    fn add(&mut self, by: u32, wait_us: u64, answer: &Answer, offset_us_max: Option<i64>) {
        let [earliest_us, latest_us] = [answer.sent_us, answer.received_us].map(|us| us.saturating_add(wait_us));
        let decided_us_min =
            offset_us_max.map_or(answer.sent_us, |offset_us| answer.at_us.saturating_add_signed(-offset_us));
        let true_end_us_min = decided_us_min.saturating_add(wait_us);
        let validity = Validity { true_end_us_min, latest_end_us: latest_us, remaining: answer.remaining };
        self.ends.insert((by, earliest_us, self.ends.len()), validity);
        self.span_us_max = self.span_us_max.max(latest_us - earliest_us);
    }

    /// Returns whether any answer with the number `by` (see [`StoreAnswers`]) is certainly valid at `at_us`, in microseconds of
    /// the callers' clock.
    fn any_is_valid(&self, by: u32, at_us: u64) -> bool {
        self.ends.range((by, at_us, 0)..=(by, u64::MAX, usize::MAX)).next().is_some()
    }

    /// Returns whether any answer with this `by` has the `remaining` of the cached `answer` and can end when that one
    /// ends.
    ///
    /// The cached answer ends `reported_us` after an instant between its `sent_us` and `received_us`; `None` is *never*.
    fn any_ends_in(&self, by: u32, reported_us: Option<u64>, answer: &Answer) -> bool {
        let [from_us, to_us] =
            [answer.sent_us, answer.received_us].map(|us| us.saturating_add(reported_us.unwrap_or(u64::MAX)));
        let range = (by, from_us.saturating_sub(self.span_us_max), 0)..=(by, to_us, usize::MAX);
        let fits = |validity: &Validity| {
            validity.latest_end_us >= from_us
                && validity.true_end_us_min <= to_us
                && validity.remaining == answer.remaining
        };
        self.ends.range(range).any(|(_, validity)| fits(validity))
    }

    /// Returns whether any answer with this `by` can have ended before the cached `answer` was received.
    fn any_has_ended(&self, by: u32, answer: &Answer) -> bool {
        let mut ended = self.ends.range((by, 0, 0)..=(by, answer.received_us, usize::MAX));
        ended.any(|(_, validity)| validity.true_end_us_min <= answer.received_us)
    }
}
