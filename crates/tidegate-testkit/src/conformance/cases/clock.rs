//! A clock that steps back: no key is denied for the length of the step.

use tidegate_core::Algorithm::{self, FixedWindow, LeakyBucket, SlidingCounter, TokenBucket};

use super::{HOUR, MINUTE, SECOND, per_algorithm, text};
use crate::conformance::Case;

/// The time after the end of a minute at which one of its ten units no longer counts.
///
/// It is a tenth of the 1,034,483 parts of 58 µs, rounded up to whole parts.
const TENTH_OF_A_MINUTE_IN_PARTS: u64 = 103_449 * 58;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(step_back("the clock steps back by a second", SECOND));
    cases.extend(step_back("the clock steps back by an hour", HOUR));
    cases.extend(peek_in_the_past());
    cases.extend(denial_in_the_past());
    cases.extend(expired_units_stay_expired());
    cases.push(future_entries_share_the_tick_of_now());
    cases
}

/// Adds a step that uses up a limit of `10/min` with this algorithm at this time, in microseconds.
fn exhausted(case: Case, algorithm: Algorithm, at: u64) -> Case {
    let case = case.on(&text("10/min", algorithm)).at(at).take(10).admitted();
    if algorithm == LeakyBucket { case.take(1).admitted() } else { case }
}

/// Returns a case per algorithm: after the clock steps back by `step` microseconds, no wait exceeds its usual bound.
fn step_back(name: &str, step: u64) -> Vec<Case> {
    per_algorithm(name, |case, algorithm| {
        let now = 2 * HOUR - step;
        let end_of_bucket = now - now % MINUTE + MINUTE;
        let (wait, bound) = match algorithm {
            FixedWindow => (end_of_bucket - now, MINUTE),
            SlidingCounter => (end_of_bucket + TENTH_OF_A_MINUTE_IN_PARTS - now, 2 * MINUTE),
            TokenBucket | LeakyBucket => (MINUTE / 10, MINUTE),
            // All units count as if they had been admitted at the time to which the clock was set.
            _ => (MINUTE, MINUTE),
        };
        let case = exhausted(case, algorithm, 2 * HOUR);
        let case = case.at(now).take(1).denied().remaining(0).retry(wait).retry_at_most(bound);
        let case = case.at(now + wait - 1).take(1).denied().retry(1);
        case.at(now + wait).take(1).admitted()
    })
}

/// Returns a case per algorithm: a peek while the clock is an hour behind does not change the counter.
fn peek_in_the_past() -> Vec<Case> {
    per_algorithm("a peek while the clock is wrong changes nothing", |case, algorithm| {
        let wait = match algorithm {
            SlidingCounter => MINUTE + TENTH_OF_A_MINUTE_IN_PARTS,
            TokenBucket | LeakyBucket => MINUTE / 10,
            _ => MINUTE,
        };
        let case = exhausted(case, algorithm, 2 * HOUR).at(HOUR).peek().remaining(0);
        case.at(2 * HOUR + SECOND).take(1).denied().retry(wait - SECOND)
    })
}

/// Returns a case per algorithm: a denial while the clock is an hour behind moves the counter's times to that hour.
///
/// When the clock is right again, an hour has passed since these times, so the whole quota is available.
fn denial_in_the_past() -> Vec<Case> {
    per_algorithm("a denial while the clock is wrong writes the corrected times", |case, algorithm| {
        let case = exhausted(case, algorithm, 2 * HOUR).at(HOUR).take(1).denied();
        case.at(2 * HOUR).peek().remaining(10).reset(0).take(10).admitted()
    })
}

/// Returns a case per algorithm: units that expired before the clock stepped back do not count again.
fn expired_units_stay_expired() -> Vec<Case> {
    per_algorithm("expired units do not count again after the clock steps back", |case, algorithm| {
        let remaining = if algorithm == LeakyBucket { 10 } else { 9 };
        let case = exhausted(case, algorithm, 0).at(2 * MINUTE).take(1).admitted();
        case.at(0).peek().remaining(remaining).take(9).admitted()
    })
}

/// Returns a case in which the clock steps back and `sliding` entries from the future are moved to the tick of now.
///
/// They then expire together, like units that are charged now.
fn future_entries_share_the_tick_of_now() -> Case {
    let case = Case::new("units moved to now share its tick").on("1000/s").at(100).take(1).admitted();
    let case = case.at(900).take(1).admitted().on("2000/s").at(500).peek().remaining(1_998).next(SECOND).reset(SECOND);
    case.take(1_999).denied().retry(SECOND).at(SECOND + 499).take(1_999).denied().retry(1)
}
