//! Behaviour of buckets only: delays of admitted requests, and bursts above the rate.

use super::{HOUR, MINUTE, MS, SECOND};
use crate::conformance::Case;

pub(super) fn cases() -> Vec<Case> {
    vec![evenly_spaced(), costs_are_spaced_too(), peek_returns_the_delay(), idle_token_bucket(), steady_rate()]
}

fn evenly_spaced() -> Case {
    let case = Case::new("a leaky bucket spaces admitted requests evenly").on("10/s leaky-bucket queue=3");
    let case = case.take(1).admitted().retry(0).remaining(3).next(0).reset(100 * MS);
    let case = case.take(1).admitted().retry(100 * MS).remaining(2).next(100 * MS).reset(200 * MS);
    let case = case.take(1).admitted().retry(200 * MS).remaining(1);
    let case = case.take(1).admitted().retry(300 * MS).remaining(0).reset(400 * MS);
    let case = case.take(1).denied().retry(100 * MS).at(50 * MS).take(1).denied().retry(50 * MS);
    let case = case.at(100 * MS).take(1).admitted().retry(300 * MS).at(250 * MS).take(1).admitted().retry(250 * MS);
    case.at(HOUR).take(1).admitted().retry(0).take(1).admitted().retry(100 * MS)
}

fn costs_are_spaced_too() -> Case {
    let case = Case::new("a higher cost delays the next request for longer").on("60/min leaky-bucket queue=10");
    let case = case.take(7).admitted().retry(0).remaining(4).take(4).admitted().retry(7 * SECOND).remaining(0);
    let case = case.take(2).denied().retry(2 * SECOND);
    case.at(2 * SECOND).take(2).admitted().retry(9 * SECOND).at(10 * MINUTE).take(10).admitted().retry(0)
}

fn peek_returns_the_delay() -> Case {
    let case = Case::new("a peek of a leaky bucket returns the delay of one unit").on("10/s leaky-bucket queue=2");
    let case = case.peek().retry(0).take(1).admitted().peek().retry(100 * MS).take(2).admitted().retry(100 * MS);
    case.peek().remaining(0).retry(100 * MS).at(100 * MS).peek().remaining(1).retry(200 * MS)
}

fn idle_token_bucket() -> Case {
    let case = Case::new("a token bucket accumulates its burst and no more").on("10/s token-bucket burst=20");
    let case = case.burst(25, 20).at(100 * MS - 1).burst(1, 0).at(100 * MS).burst(5, 1);
    let case = case.at(HOUR).burst(100, 20).at(HOUR + SECOND).burst(100, 10).at(HOUR + 3 * SECOND).burst(100, 20);
    case.at(2 * HOUR).peek().remaining(20).next(0).reset(0)
}

/// Returns a case of a token bucket with an interval of 333⅓ µs: the fractions are kept, so 3/ms is exactly 3,000/s.
fn steady_rate() -> Case {
    let case = Case::new("an interval of fractional microseconds loses nothing").on("3/1ms token-bucket burst=2");
    let case = case.take(2).admitted().next(334).at(333).burst(1, 0).at(334).burst(2, 1);
    // Due at 333⅓ and 666⅔, rounded up. The thirds are kept, so the next unit is due at exactly 1,000.
    case.at(666).burst(1, 0).at(667).burst(1, 1).at(999).burst(1, 0).at(1_000).burst(2, 1)
}
