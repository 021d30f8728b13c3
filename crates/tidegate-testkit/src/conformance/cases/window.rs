//! Edges of windows, bursts across them, and idle times.

use tidegate_core::Algorithm::{FixedWindow, LeakyBucket, Sliding, SlidingCounter, SlidingLog, TokenBucket};

use super::{DAY, HOUR, MINUTE, MS, SECOND, per_algorithm, text};
use crate::conformance::Case;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(to_the_microsecond());
    cases.extend(boundary_burst());
    cases.extend(half_a_window());
    cases.extend(idle_then_burst());
    cases.extend(hammering());
    cases.push(a_tick_expires_with_its_last_admission());
    cases.extend(stale_entries());
    cases
}

fn to_the_microsecond() -> Vec<Case> {
    per_algorithm("a unit becomes available again to the microsecond", |case, algorithm| {
        let case = case.on(&text("10/s", algorithm)).take(10).admitted();
        match algorithm {
            // The whole burst expires at once, one window later.
            Sliding | SlidingLog | FixedWindow => {
                let case = case.remaining(0).next(SECOND).reset(SECOND);
                let case = case.at(SECOND - 1).take(1).denied().remaining(0).retry(1).next(1).reset(1);
                case.at(SECOND).peek().remaining(10).retry(0).next(0).reset(0).take(10).admitted().remaining(0)
            }
            // Of ten units, one no longer counts after each tenth of the next window.
            SlidingCounter => {
                let case = case.remaining(0).next(SECOND + 100 * MS).reset(2 * SECOND);
                let case = case.at(SECOND + 100 * MS - 1).take(1).denied().remaining(0).retry(1).next(1);
                let case = case.at(SECOND + 100 * MS).take(1).admitted().remaining(0).next(100 * MS);
                case.at(SECOND + 200 * MS - 1).take(1).denied().retry(1).at(SECOND + 200 * MS).take(1).admitted()
            }
            // One unit is returned every 100 ms.
            TokenBucket => {
                let case = case.remaining(0).next(100 * MS).reset(SECOND);
                let case = case.at(100 * MS - 1).take(1).denied().remaining(0).retry(1);
                case.at(100 * MS).take(1).admitted().remaining(0).next(100 * MS).reset(SECOND)
            }
            // One unit is served and ten wait. Then one slot becomes free every 100 ms.
            _ => {
                let case = case.remaining(1).retry(0).next(100 * MS).take(1).admitted().retry(SECOND).remaining(0);
                let case = case.at(100 * MS - 1).take(1).denied().retry(1);
                case.at(100 * MS).take(1).admitted().retry(SECOND).remaining(0)
            }
        }
    })
}

/// Returns a case per algorithm of `100/min` with a hundred requests at the end of one minute and a hundred at the
/// start of the next.
fn boundary_burst() -> Vec<Case> {
    per_algorithm("the boundary burst", |case, algorithm| {
        let case = case.on(&text("100/min", algorithm)).at(MINUTE - 500 * MS).burst(100, 100).at(MINUTE + 500 * MS);
        match algorithm {
            Sliding | SlidingLog => {
                let case = case.burst(100, 0).take(1).denied().remaining(0).retry(MINUTE - SECOND);
                case.at(2 * MINUTE - 500 * MS - 1).burst(1, 0).at(2 * MINUTE - 500 * MS).burst(101, 100)
            }
            // Of a hundred units, 99.2 still count, which is rounded up.
            SlidingCounter => case.burst(100, 0).at(MINUTE + 30 * SECOND).burst(100, 49),
            // Twice the quota within one second, as documented for this algorithm.
            FixedWindow => case.burst(101, 100),
            // 1.67 units were returned in that second.
            TokenBucket => case.burst(100, 1),
            _ => case.burst(100, 2),
        }
    })
}

/// Returns a case per algorithm: 60 % of the quota arrive, and half a window later the whole quota.
fn half_a_window() -> Vec<Case> {
    per_algorithm("a burst half a window after another", |case, algorithm| {
        let case = case.on(&text("100/min", algorithm)).burst(60, 60).at(MINUTE / 2);
        match algorithm {
            Sliding | SlidingLog => {
                let case = case.burst(100, 40).take(1).denied().retry(MINUTE / 2);
                let case = case.at(MINUTE - 1).burst(100, 0).at(MINUTE).burst(100, 60);
                case.at(MINUTE + MINUTE / 2 - 1).burst(100, 0).at(MINUTE + MINUTE / 2).burst(100, 40)
            }
            FixedWindow => case.burst(100, 40).at(MINUTE - 1).burst(100, 0).at(MINUTE).burst(101, 100),
            SlidingCounter => case.burst(100, 40).at(MINUTE).burst(100, 0).at(MINUTE + MINUTE / 2).burst(100, 49),
            TokenBucket => case.burst(100, 90),
            _ => case.burst(100, 91),
        }
    })
}

/// Returns a case per algorithm: a client that was idle for long gets one burst, not the sum of all unused quotas.
fn idle_then_burst() -> Vec<Case> {
    per_algorithm("idle, then one burst and no more", |case, algorithm| {
        let burst = if algorithm == LeakyBucket { 11 } else { 10 };
        let case = case.on(&text("10/s", algorithm)).at(300 * MS).burst(20, burst);
        let case = case.at(2 * SECOND + 300 * MS).peek().remaining(10).retry(0).next(0).reset(0).burst(30, burst);
        let case = case.at(HOUR).burst(30, burst);
        case.at(399 * DAY).peek().remaining(10).retry(0).next(0).reset(0).burst(30, burst)
    })
}

/// Returns a case per algorithm: a hundred denials do not move the time at which the request is admitted.
fn hammering() -> Vec<Case> {
    per_algorithm("repeated denials change nothing", |case, algorithm| {
        let wait = match algorithm {
            SlidingCounter => SECOND + 100 * MS,
            TokenBucket => 100 * MS,
            LeakyBucket => 200 * MS,
            _ => SECOND,
        };
        let first = if algorithm == LeakyBucket { 9 } else { 10 };
        let case = case.on(&text("10/s", algorithm)).take(first).admitted();
        let case = if algorithm == LeakyBucket { case.take(3).denied() } else { case };
        let cost = if algorithm == LeakyBucket { 4 } else { 1 };
        let case = case.take(cost).denied().retry(wait);
        let case = (1..=50).fold(case, |case, _| case.take(cost).denied().retry(wait));
        let case = (1..50)
            .fold(case, |case, tick| case.at(tick * wait / 50).take(cost).denied().retry(wait - tick * wait / 50));
        case.at(wait).take(cost).admitted()
    })
}

/// Returns a case of `sliding` above a quota of 1,000: the admissions of one tick (here 1 ms) expire with the last of
/// them.
fn a_tick_expires_with_its_last_admission() -> Case {
    let case = Case::new("above a quota of 1,000 a tick expires with its last admission").on("2000/s");
    let case = case.at(0).take(1_000).admitted().at(999).take(1_000).admitted().remaining(0);
    let case = case.at(SECOND).take(1).denied().retry(999).at(SECOND + 998).take(1).denied().retry(1);
    let case = case.at(SECOND + 999).take(1_000).admitted().remaining(1_000);
    case.at(SECOND + 1_000).take(1_000).admitted().at(2 * SECOND + 998).take(1).denied().retry(1)
}

/// Returns three cases in which hundreds or thousands of entries expire between two checks.
fn stale_entries() -> Vec<Case> {
    let log = |name: &str| Case::new(name).on("100000/s sliding-log").at(0).fill(100_000);
    let full = |case: Case| case.at(99_999).peek().remaining(0).take(1).denied().retry(SECOND - 99_999);
    let partly = full(log("half of 100,000 entries expire at once"))
        .at(SECOND + 49_999)
        .take(1)
        .admitted()
        .remaining(49_999)
        .next(1)
        .reset(SECOND);
    let partly = partly.at(10 * SECOND).take(1).admitted().remaining(99_999).reset(SECOND);
    let wholly = full(log("100,000 entries expire at once"))
        .at(10 * SECOND)
        .take(1)
        .admitted()
        .remaining(99_999)
        .next(SECOND)
        .reset(SECOND);
    let small = Case::new("1,000 entries expire at once").on("1000/s").at(0).fill(1_000);
    let small = small.at(999).take(1).denied().retry(SECOND - 999);
    let small = small.at(SECOND + 499).take(500).admitted().remaining(0).next(1).at(9 * SECOND).take(1).remaining(999);
    vec![partly, wholly, small]
}
