//! Several limits in one check, and limits with `count_denied`.

use tidegate_core::Algorithm::{FixedWindow, LeakyBucket, Sliding, SlidingCounter, SlidingLog};

use super::{DAY, MINUTE, MS, SECOND, per_algorithm, text};
use crate::conformance::Case;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(day_refuses());
    cases.push(never_among_three());
    cases.push(peek_beside_a_charge());
    cases.push(two_subjects());
    cases.push(longest_wait_counts());
    cases.extend(refused_is_charged());
    cases.extend(penalty_is_capped());
    cases.push(penalty_though_another_refused());
    cases
}

/// Returns a case per algorithm: a request that the daily limit denies does not charge the limit per minute.
fn day_refuses() -> Vec<Case> {
    per_algorithm("a request denied per day is not charged per minute", |case, algorithm| {
        let minute = text("10/min", algorithm);
        let case = case.on_all(&[&minute, "12/day sliding-log"]).take(10).admitted();
        let case = case.at(2 * MINUTE).take(3).denied();
        let case = case.limit(0).allowed(true).remaining(10).retry(0).next(0).reset(0);
        let case = case.limit(1).allowed(false).remaining(2).retry(DAY - 2 * MINUTE);
        let case = case.take(2).admitted().limit(1).remaining(0).limit(0);
        case.remaining(if algorithm == LeakyBucket { 9 } else { 8 })
    })
}

fn never_among_three() -> Case {
    let case = Case::new("a cost that never fits into one limit charges none");
    let case = case.on_all(&["10/s", "10/min fixed-window", "5/min token-bucket"]).take(6).denied();
    let case = case.limit(0).allowed(true).remaining(10).limit(1).allowed(true).remaining(10);
    let case = case.limit(2).never().remaining(5);
    case.take(5).admitted().limit(0).remaining(5).limit(1).remaining(5).limit(2).remaining(0)
}

fn peek_beside_a_charge() -> Case {
    let case = Case::new("a limit with cost 0 neither denies nor is charged").on_all(&["1/s", "1/min"]);
    let case = case.take_each(&[1, 0]).admitted().limit(0).remaining(0).limit(1).remaining(1).reset(0);
    let case = case.at(SECOND).take(1).admitted().at(2 * SECOND);
    let case = case.take_each(&[1, 0]).admitted().limit(0).remaining(0);
    case.limit(1).allowed(true).remaining(0).retry(MINUTE - SECOND)
}

fn two_subjects() -> Case {
    let case = Case::new("two subjects in one check").on_all(&["5/s", "3/s"]).by(1, "elsewhere");
    let case = case.take(3).admitted().limit(0).remaining(2).limit(1).remaining(0);
    let case = case.take(1).denied().limit(0).allowed(true).remaining(2).limit(1).allowed(false).remaining(0);
    case.on("5/s").take(2).admitted().remaining(0)
}

fn longest_wait_counts() -> Case {
    let case =
        Case::new("denied by two limits, admitted when both have room").on_all(&["2/s", "2/min"]).take(2).admitted();
    let case = case.take(1).denied().limit(0).retry(SECOND).limit(1).retry(MINUTE);
    case.at_retry(-1).take(1).denied().limit(0).allowed(true).limit(1).retry(1).at_retry(0).take(1).admitted()
}

/// Returns a case per algorithm: with `count_denied`, a denied cost of four uses up the two of five units that are
/// left.
fn refused_is_charged() -> Vec<Case> {
    per_algorithm("count_denied charges denied requests", |case, algorithm| {
        let limit = format!("5/s {} count_denied=true", algorithm.as_str());
        let case = case.on(&limit).take(3).admitted().at(100 * MS).take(4).denied().remaining(0).allowed(false);
        match algorithm {
            // Two of the old units were removed for the four. Another four units fit when those four expire.
            Sliding | SlidingLog => {
                let case = case.retry(SECOND).next(900 * MS).reset(SECOND);
                case.at(SECOND).peek().remaining(1).at(SECOND + 100 * MS).peek().remaining(5)
            }
            FixedWindow => case.retry(900 * MS).reset(900 * MS).at(SECOND).peek().remaining(5),
            SlidingCounter => case.retry(1_700 * MS).reset(1_900 * MS),
            _ => case.retry(800 * MS).next(200 * MS),
        }
    })
}

fn penalty_is_capped() -> Vec<Case> {
    per_algorithm("count_denied stops at the quota", |case, algorithm| {
        let limit = format!("5/s {} count_denied=true", algorithm.as_str());
        let case = case.on(&limit).take(u32::MAX).never().remaining(0).take(u32::MAX).never();
        let (wait, whole) = match algorithm {
            SlidingCounter => (SECOND + 200 * MS, 2 * SECOND),
            Sliding | SlidingLog | FixedWindow => (SECOND, SECOND),
            LeakyBucket => (200 * MS, 1_200 * MS),
            _ => (200 * MS, SECOND),
        };
        case.peek().remaining(0).retry(wait).reset(whole).at(whole).peek().remaining(5).reset(0)
    })
}

fn penalty_though_another_refused() -> Case {
    let case = Case::new("count_denied charges its limit whichever limit denied");
    let case = case.on_all(&["10/min count_denied=true", "1/day", "10/h count_denied=true"]).take(1).admitted();
    let case = case.at(SECOND).take_each(&[2, 1, 0]).denied();
    let case = case.limit(0).allowed(true).remaining(7).retry(0).limit(1).allowed(false).remaining(0);
    let case = case.limit(2).allowed(true).remaining(9);
    // Ten more exceed the quota, so the oldest units are removed. Another ten would then have to wait a minute.
    let case = case.at(2 * SECOND).take_each(&[10, 1, 1]).denied();
    case.limit(0).allowed(false).remaining(0).retry(MINUTE).limit(2).allowed(true).remaining(8)
}
