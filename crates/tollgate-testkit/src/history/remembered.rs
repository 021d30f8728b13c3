//! Remembered denials: does each repeat what the store said, and for no longer than it said so?
//!
//! A word of the store ends at a moment: its own time and the wait that it told. The callers do not know the store's clock, but it
//! spoke between the asking and the answer, so the end lies in a span of theirs as long as that took:
//!
//! ```text
//!   word         sent ├──────┤ received                  sent + wait ├──────┤ received + wait
//!   remembered                         sent ├┤ received, and told + these is in there
//! ```
//!
//! **Never too early.** A client that waits as it was told must find its units. Where the offset between the callers' clock and the store's
//! is known, so is the moment of each decision, and a told end before the true one is wrong even if it lies in the span. Every answer of the store
//! bounds the offset: the store decided between the asking and the answer. The bound that all answers of a counter give together is as narrow as
//! the quickest of them. Two clocks may drift apart by a thousandth of the run. If no offset fits all answers, a clock was set, and only
//! the span is used.
//!
//! **A refused line** stands on a refusal of the very cost (for a larger one the wait would be longer by what only the store knows), or,
//! for one unit, on an answer that left nothing. That word was heard before and still holds. **The other lines** repeat what the
//! store said of them: as many units, and the next one at the same moment, or at once if that has passed.
//!
//! Words are kept by what they are found by, and then by when they end. Only those are looked at whose end can be the one that was
//! told: as many as the store says in the time of one answer.

use std::collections::BTreeMap;

use tollgate_core::Source;

use super::{Answer, Counter, Report, Violation};

/// Of a run, one in so many parts is the most by which two clocks drift apart in it.
const DRIFT_PARTS: u64 = 1_000;

/// Judges every line of a remembered denial.
pub(super) fn verify(number: usize, counter: &Counter, report: &mut Report) {
    let mut remembered: Vec<&Answer> = counter.answers.iter().filter(|a| a.source == Source::DenyCache).collect();
    if remembered.is_empty() {
        return;
    }
    remembered.sort_unstable_by_key(|answer| answer.received_us);
    let mut words: Vec<&Answer> = counter.answers.iter().filter(|answer| answer.source == Source::Store).collect();
    words.sort_unstable_by_key(|answer| answer.received_us);
    let offset_us_max = offset_us_max(&words);
    let mut words = words.into_iter().peekable();
    let (mut refusals, mut lines) = (Words::default(), Words::default());
    for answer in remembered {
        while let Some(word) = words.next_if(|word| word.received_us <= answer.received_us) {
            if let Some((cost, wait_us)) = refused_by(word) {
                refusals.hear(cost, wait_us, word, offset_us_max);
            }
            lines.hear(word.remaining, word.next_after_us, word, offset_us_max);
        }
        let (counter, sent_us) = (number, answer.sent_us);
        let told_us = match answer.allowed {
            true => Some(answer.next_after_us),
            false => answer.retry_after_us,
        };
        let is_true = match (answer.allowed, told_us) {
            (true, Some(0)) => lines.has_ended(answer.remaining, answer),
            (true, _) => lines.any_ends_in(answer.remaining, told_us, answer),
            (false, _) => refusals.any_ends_in(answer.cost, told_us, answer),
        };
        report.remembered += u64::from(!answer.allowed);
        if !answer.allowed && !refusals.any_holds(answer.cost, sent_us) {
            report.add(Violation::Remembered { counter, sent_us });
        } else if !is_true {
            report.add(Violation::Misremembered { counter, sent_us, remaining: answer.remaining.into(), told_us });
        }
    }
}

/// The most by which the store's clock can be ahead of the callers'. `None` if no offset explains all answers.
fn offset_us_max(words: &[&Answer]) -> Option<i64> {
    let offset_us = |at_us: u64, us: u64| at_us as i64 - us as i64;
    let most = words.iter().map(|word| offset_us(word.at_us, word.sent_us)).min()?;
    let least = words.iter().map(|word| offset_us(word.at_us, word.received_us)).max()?;
    let run_us = words.last()?.received_us - words.iter().map(|word| word.sent_us).min()?;
    (least <= most).then_some(most + (run_us / DRIFT_PARTS) as i64)
}

/// Which cost a word of the store refuses, and for how long.
fn refused_by(word: &Answer) -> Option<(u32, u64)> {
    match word.retry_after_us {
        None => Some((word.cost, u64::MAX)),
        Some(wait_us) if !word.allowed => Some((word.cost, wait_us)),
        Some(_) if word.remaining == 0 => Some((1, word.next_after_us)),
        Some(_) => None,
    }
}

/// What was heard of the store.
#[derive(Default)]
struct Words {
    /// By what they are found by, the earliest end, and their number.
    ends: BTreeMap<(u32, u64, usize), Word>,
    /// The most by which an earliest and a latest end differ.
    span_us_max: u64,
}

struct Word {
    /// No end before this one is true.
    true_end_us_min: u64,
    latest_end_us: u64,
    remaining: u32,
}

impl Words {
    fn hear(&mut self, by: u32, wait_us: u64, word: &Answer, offset_us_max: Option<i64>) {
        let [earliest_us, latest_us] = [word.sent_us, word.received_us].map(|us| us.saturating_add(wait_us));
        let decided_us_min =
            offset_us_max.map_or(word.sent_us, |offset_us| word.at_us.saturating_add_signed(-offset_us));
        let true_end_us_min = decided_us_min.saturating_add(wait_us);
        let heard = Word { true_end_us_min, latest_end_us: latest_us, remaining: word.remaining };
        self.ends.insert((by, earliest_us, self.ends.len()), heard);
        self.span_us_max = self.span_us_max.max(latest_us - earliest_us);
    }

    /// Whether some word has not ended at this moment.
    fn any_holds(&self, by: u32, at_us: u64) -> bool {
        self.ends.range((by, at_us, 0)..=(by, u64::MAX, usize::MAX)).next().is_some()
    }

    /// Whether some word said as much, and ends when this answer says.
    fn any_ends_in(&self, by: u32, told_us: Option<u64>, answer: &Answer) -> bool {
        let [from_us, to_us] =
            [answer.sent_us, answer.received_us].map(|us| us.saturating_add(told_us.unwrap_or(u64::MAX)));
        let range = (by, from_us.saturating_sub(self.span_us_max), 0)..=(by, to_us, usize::MAX);
        let fits = |word: &Word| {
            word.latest_end_us >= from_us && word.true_end_us_min <= to_us && word.remaining == answer.remaining
        };
        self.ends.range(range).any(|(_, word)| fits(word))
    }

    /// Whether some word said as much, and may be over.
    fn has_ended(&self, by: u32, answer: &Answer) -> bool {
        let mut words = self.ends.range((by, 0, 0)..=(by, answer.received_us, usize::MAX));
        words.any(|(_, word)| word.true_end_us_min <= answer.received_us)
    }
}
