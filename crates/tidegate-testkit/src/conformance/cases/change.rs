//! Limits that change while they are in use: used units stay used.

use tidegate_core::Algorithm::{FixedWindow, LeakyBucket, Sliding, SlidingCounter, SlidingLog, TokenBucket};

use super::{HOUR, MINUTE, MS, SECOND, per_algorithm, text};
use crate::conformance::Case;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(quota_raised_then_lowered());
    cases.extend(window_lengthened());
    cases.extend(window_shortened());
    cases.push(ticks_begin_and_end_with_the_quota());
    cases.push(burst_lowered_and_raised());
    cases.push(algorithm_of_a_rule_changes());
    cases.extend(peeks_with_a_shorter_window());
    cases.extend(retry_after_after_a_window_change());
    cases
}

fn quota_raised_then_lowered() -> Vec<Case> {
    per_algorithm("the quota is raised, then lowered, mid-window", |case, algorithm| {
        let case = case.on(&text("10/s", algorithm)).take(10).admitted();
        let case = case.at(100 * MS).on(&text("20/s", algorithm)).peek();
        // At the doubled rate the buckets leak two units in 100 ms.
        let case = match algorithm {
            TokenBucket => case.remaining(12).take(12).admitted(),
            LeakyBucket => case.remaining(13).retry(400 * MS).take(13).admitted().retry(400 * MS),
            _ => case.remaining(10).take(10).admitted(),
        };
        let case = case.remaining(0).on(&text("5/s", algorithm)).peek().remaining(0).take(1).denied().remaining(0);
        let case = match algorithm {
            // Sixteen of the twenty must expire: only the expiry of the second ten makes room.
            Sliding | SlidingLog => case.retry(SECOND).next(SECOND).reset(SECOND),
            FixedWindow => case.retry(900 * MS),
            SlidingCounter => case.retry(SECOND + 700 * MS),
            // The level is cut to what the smaller bucket holds.
            _ => case.retry(200 * MS),
        };
        case.at_retry(-1).take(1).denied().retry(1).at_retry(0).take(1).admitted()
    })
}

fn window_lengthened() -> Vec<Case> {
    per_algorithm("a rule's window becomes longer", |case, algorithm| {
        let case = case.in_rule().on(&text("10/s", algorithm)).take(10).admitted();
        let case = case.at(500 * MS).on(&text("10/min", algorithm)).peek();
        match algorithm {
            Sliding | SlidingLog | FixedWindow => case.remaining(0).retry(MINUTE - 500 * MS),
            SlidingCounter => case.remaining(0).retry(MINUTE + 103_449 * 58 - 500 * MS),
            // Ten units are used, and a sixth of a unit is returned per second.
            TokenBucket => case.remaining(0).retry(6 * SECOND - 500 * MS),
            _ => case.remaining(1).retry(MINUTE - 500 * MS),
        }
    })
}

fn window_shortened() -> Vec<Case> {
    per_algorithm("a rule's window becomes shorter", |case, algorithm| {
        let case = case.in_rule().on(&text("10/min", algorithm)).take(10).admitted();
        let case = case.at(500 * MS).on(&text("10/100ms", algorithm)).peek();
        match algorithm {
            // The units are 500 ms old, which is outside the shorter window.
            Sliding | SlidingLog => case.remaining(10).retry(0).reset(0),
            // The units that counted under the longer window count from now on.
            FixedWindow => case.remaining(0).retry(100 * MS),
            SlidingCounter => case.remaining(0).retry(110 * MS),
            // Ten units leak in 100 ms, and 500 ms have passed.
            _ => case.remaining(10).retry(0).reset(0),
        }
    })
}

/// Returns a case in which the quota of a `sliding` limit crosses 1,000, above which it has ticks, and crosses it back.
///
/// The entries of the log keep their times, unless they share a tick with a charge.
fn ticks_begin_and_end_with_the_quota() -> Case {
    let case = Case::new("crossing the exact quota keeps every entry").on("1000/s");
    let case = case.at(100).take(300).admitted().at(200).take(300).admitted().remaining(400);
    let case = case.on("2000/s").at(300).take(300).admitted().remaining(1_100);
    // The entry at 200 and the charge at 300 share a tick and now expire together.
    let case = case.on("1000/s").peek().remaining(100).next(SECOND - 200).reset(SECOND);
    case.at(SECOND + 100)
        .peek()
        .remaining(400)
        .at(SECOND + 299)
        .peek()
        .remaining(400)
        .at(SECOND + 300)
        .peek()
        .remaining(1_000)
}

fn burst_lowered_and_raised() -> Case {
    let case = Case::new("a smaller burst cuts the level, a larger one makes room").on("10/s token-bucket burst=10");
    let case = case.take(8).admitted().on("10/s token-bucket burst=5").peek().remaining(0).retry(100 * MS);
    // Nothing was charged under the smaller burst, so the stored level was not cut.
    let case = case.on("10/s token-bucket burst=20").peek().remaining(12);
    let case = case.on("10/s token-bucket burst=5").at(100 * MS).take(1).admitted().remaining(0).next(100 * MS);
    case.on("10/s token-bucket burst=20").peek().remaining(15)
}

/// Returns a case in which a rule's limit changes its algorithm.
///
/// Algorithms with the same kind of state share it. An algorithm with another kind starts with an empty counter.
fn algorithm_of_a_rule_changes() -> Case {
    let case = Case::new("a rule changes its algorithm").in_rule().on("10/s").take(4).admitted();
    let case = case.on("10/s sliding-log").peek().remaining(6);
    let case = case.on("10/s token-bucket").peek().remaining(10).take(4).admitted().remaining(6);
    let case = case.on("10/s leaky-bucket").peek().remaining(7);
    let case = case.on("10/s fixed-window").peek().remaining(10).take(10).admitted().at(SECOND).peek().remaining(10);
    case.on("10/s sliding-counter").peek().remaining(0)
}

/// Returns a case per algorithm: after a hundred peeks with a shorter window, the longer window still counts all units.
fn peeks_with_a_shorter_window() -> Vec<Case> {
    per_algorithm("peeking with a shorter window deletes nothing", |case, algorithm| {
        let (long, short) = (text("10/h", algorithm), text("10/s", algorithm));
        let case = case.in_rule().on(&long).take(10).admitted();
        let case = case.on(&short).at(20 * SECOND);
        let case = (0..100).fold(case, |case, _| case.peek());
        let case = case.on(&long).peek();
        match algorithm {
            SlidingCounter => case.remaining(0).reset(2 * HOUR - 20 * SECOND),
            LeakyBucket => case.remaining(1).reset(HOUR - 20 * SECOND),
            _ => case.remaining(0).reset(HOUR - 20 * SECOND),
        }
    })
}

/// Returns a case per algorithm: a request denied after the window changed is admitted exactly after its `retry_after`.
fn retry_after_after_a_window_change() -> Vec<Case> {
    per_algorithm("retry_after is exact after a change of the window", |case, algorithm| {
        let case = case.in_rule().on(&text("10/h", algorithm)).take(10).admitted();
        let case = case.at(300 * MS).on(&text("2/s", algorithm)).take(2).denied().retry_at_most(2 * SECOND);
        case.at_retry(-1).take(2).denied().retry(1).at_retry(0).take(2).admitted()
    })
}
