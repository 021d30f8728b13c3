//! Verification by the callers' clock, and of local decisions.

use tidegate_core::Source;

use super::{Answer, Bounds, Counter, Report, Violation};

/// Verifies the bounds that do not depend on the store's clock, and adds violations and the number of local limit
/// statuses to `report`.
///
/// `number` is the index of the counter, whose answers must be sorted by `at_us`.
pub(super) fn verify(number: usize, counter: &Counter, bounds: Bounds, report: &mut Report) {
    let quota = u64::from(counter.limit.quota()) + bounds.lost.unwrap_or(0);
    // Clocks that differ shorten a window; see `counter.rs`.
    let window_us = counter.limit.window_us().saturating_sub(2 * bounds.skew_us);
    let refunded = !counter.refunds.is_empty();
    let charged = |answer: &&Answer| answer.admitted && answer.cost > 0;
    let by_store: Vec<&Answer> = counter.answers.iter().filter(charged).filter(|a| a.source == Source::Store).collect();
    let local: Vec<&Answer> = counter.answers.iter().filter(charged).filter(|a| a.source == Source::Local).collect();
    // A refund makes room within the window, and its time is only known by the store's clock.
    if !refunded && let Some((from_us, units)) = crowd(&by_store, window_us, quota) {
        report.add(Violation::Witness { counter: number, from_us, units, bound: quota });
    }
    report.local += counter.answers.iter().filter(|answer| answer.source == Source::Local).count() as u64;
    if !local.is_empty() {
        let bound = bounds.local.unwrap_or(0);
        verify_local(number, &local, window_us, bound, report);
        let together: Vec<&Answer> = by_store.into_iter().chain(local).collect();
        let bound = bounds.together.unwrap_or(quota + bound);
        if let Some((from_us, units)) = crowd(&together, window_us, bound) {
            report.add(Violation::Witness { counter: number, from_us, units, bound });
        }
    }
}

/// Finds more than `bound` units, all sent at or after one instant and all answered less than a window after it.
///
/// Returns that instant, in microseconds, and the number of units; `None` if there is none. Uses two pointers: one over
/// the answers by the time of sending, one over the answers by the time of receiving.
fn crowd(answers: &[&Answer], window_us: u64, bound: u64) -> Option<(u64, u64)> {
    let mut by_sent: Vec<usize> = (0..answers.len()).collect();
    by_sent.sort_unstable_by_key(|&index| answers[index].sent_us);
    let mut by_received: Vec<usize> = (0..answers.len()).collect();
    by_received.sort_unstable_by_key(|&index| answers[index].received_us);
    let mut is_inside = vec![false; answers.len()];
    let (mut next, mut units) = (0, 0);
    for &first in &by_sent {
        let from_us = answers[first].sent_us;
        while let Some(&index) =
            by_received.get(next).filter(|&&index| answers[index].received_us < from_us + window_us)
        {
            if answers[index].sent_us >= from_us {
                is_inside[index] = true;
                units += u64::from(answers[index].cost);
            }
            next += 1;
        }
        if units > bound {
            return Some((from_us, units));
        }
        if is_inside[first] {
            units -= u64::from(answers[first].cost);
        }
    }
    None
}

/// Verifies that at most `bound` units were admitted locally within any window. Adds a violation to `report` for each
/// answer that exceeds it.
///
/// `local` must contain only admissions, sorted by `at_us`. `number` is the index of the counter.
fn verify_local(number: usize, local: &[&Answer], window_us: u64, bound: u64, report: &mut Report) {
    let (mut first, mut units) = (0, 0);
    for answer in local {
        units += u64::from(answer.cost);
        while local[first].at_us + window_us <= answer.at_us {
            units -= u64::from(local[first].cost);
            first += 1;
        }
        if units > bound {
            report.add(Violation::Local { counter: number, at_us: answer.at_us, units, bound });
        }
    }
}
