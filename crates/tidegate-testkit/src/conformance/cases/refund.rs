//! Refunds: exactly the charged units, and never more than still count.

use tidegate_core::Algorithm::{LeakyBucket, SlidingCounter, SlidingLog, TokenBucket};

use super::{MINUTE, MS, SECOND, per_algorithm, text};
use crate::conformance::Case;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(restores_exactly());
    cases.extend(too_late());
    cases.extend(never_negative());
    cases.extend(partly_leaked());
    cases.push(only_its_own_tick());
    cases.push(every_limit_of_the_check());
    cases.extend(of_a_larger_limit());
    cases.extend(never_above_the_burst());
    cases.extend(in_any_order());
    cases.push(of_a_charge_that_leaked_sooner());
    cases.push(before_the_charge());
    cases.push(of_a_deleted_counter());
    cases
}

fn restores_exactly() -> Vec<Case> {
    per_algorithm("a refund restores the counter exactly", |case, algorithm| {
        let case = case.on(&text("10/s", algorithm)).take(3).admitted();
        let case = case.at(10 * MS).take(4).admitted().refund(1).peek();
        match algorithm {
            TokenBucket => case.remaining(7).next(90 * MS).reset(290 * MS).retry(0),
            LeakyBucket => case.remaining(8).next(90 * MS).reset(290 * MS).retry(290 * MS),
            SlidingCounter => case.remaining(7).reset(2 * SECOND - 10 * MS),
            _ => case.remaining(7).next(SECOND - 10 * MS).reset(SECOND - 10 * MS),
        }
    })
}

/// Returns a case per algorithm: a refund of an expired charge does not return units of later charges.
fn too_late() -> Vec<Case> {
    per_algorithm("a refund after the charge has expired changes nothing", |case, algorithm| {
        let gone = if algorithm == SlidingCounter { 2 * SECOND } else { SECOND };
        let left = if algorithm == LeakyBucket { 8 } else { 7 };
        let case = case.on(&text("10/s", algorithm)).take(5).admitted();
        let case = case.at(gone).take(3).admitted().remaining(left).refund(0).peek().remaining(left);
        let case = case.take(left).admitted();
        if algorithm == LeakyBucket { case.remaining(0) } else { case.remaining(0).take(1).denied() }
    })
}

/// Returns a case per algorithm: a refund after a reset returns no more units than were charged since.
fn never_negative() -> Vec<Case> {
    per_algorithm("a refund never makes the use negative", |case, algorithm| {
        let case = case.on(&text("10/s", algorithm)).take(8).admitted().reset_counter().refund(0);
        let case = case.peek().remaining(10).reset(0).take(2).admitted().at(MS).refund(0);
        let case = case.peek().remaining(10);
        let burst = if algorithm == LeakyBucket { 11 } else { 10 };
        case.burst(20, burst)
    })
}

/// Returns a case per algorithm: a refund after a part of the units has leaked from a bucket returns only the rest.
fn partly_leaked() -> Vec<Case> {
    per_algorithm("a refund returns only the units that still count", |case, algorithm| {
        let case = case.on(&text("10/s", algorithm)).take(10).admitted().at(400 * MS);
        match algorithm {
            // Four units leaked, and four were charged again. The refund finds six of the first ten.
            TokenBucket => case.take(4).admitted().remaining(0).refund(0).peek().remaining(6).reset(400 * MS),
            LeakyBucket => case.take(4).admitted().remaining(1).refund(0).peek().remaining(7).reset(400 * MS),
            _ => case.refund(0).peek().remaining(10).reset(0),
        }
    })
}

fn only_its_own_tick() -> Case {
    let case = Case::new("a refund changes only its own tick").on("2000/s");
    let case = case.at(0).take(500).admitted().at(1_500).take(600).admitted().at(1_900).take(100).admitted();
    // The second and third charge share the tick from 1,000 to 1,999, which has the time of the third.
    let case = case.at(3_000).refund(1).peek().remaining(1_400).reset(SECOND - 1_100);
    let case = case.refund(2).peek().remaining(1_500).reset(SECOND - 3_000);
    case.refund(0).peek().remaining(2_000).reset(0)
}

fn every_limit_of_the_check() -> Case {
    let limits = ["10/min", "20/h fixed-window", "30/day token-bucket"];
    let case = Case::new("a refund covers every limit of its check").on_all(&limits).at(SECOND);
    let case = case.take_each(&[2, 3, 0]).admitted().take_each(&[5, 6, 7]).admitted().at(2 * SECOND).refund(1);
    let case = case.take(0).limit(0).remaining(8).reset(MINUTE - SECOND).limit(1).remaining(17);
    case.limit(2).remaining(30).reset(0)
}

/// Returns a case per algorithm: a refund of the largest charge, made when the quota is one, returns one unit.
fn of_a_larger_limit() -> Vec<Case> {
    per_algorithm("a refund of more than the limit holds now", |case, algorithm| {
        let quota = if algorithm == SlidingLog { 100_000 } else { 10_000_000 };
        let case = case.on(&text(&format!("{quota}/400day"), algorithm)).take(quota).admitted();
        let case = case.on(&text("1/400day", algorithm)).peek().remaining(0).refund_under_present_limits(0);
        let case = case.peek().remaining(1);
        // A leaky bucket of this limit holds two units, of which the refund returns one.
        if algorithm == LeakyBucket { case } else { case.reset(0) }
    })
}

/// Returns the limits with which [`never_above_the_burst`] and [`in_any_order`] hold 40 units and leak 20 a second.
fn buckets_of_forty(name: &str, script: impl Fn(Case) -> Case) -> Vec<Case> {
    let limits = ["20/s token-bucket burst=40", "20/s leaky-bucket queue=39"];
    let case = |limit: &str| script(Case::new(format!("{name}: {limit}")).on(limit));
    limits.into_iter().map(case).collect()
}

/// Returns cases with an attack in stages. A charge leaks sooner if an earlier one was refunded, so its own refund gives
/// back nothing a second later. Otherwise 19 more units would pass in the first stage, and 152 in the fourth.
fn never_above_the_burst() -> Vec<Case> {
    buckets_of_forty("refunds in stages never exceed the burst", |mut case| {
        for stage in 0..4 {
            // Each stage makes five checks, of which the last is denied, and begins with an empty bucket.
            let (first, second) = (5 * stage, 5 * stage + 1);
            let start = 4 * SECOND * stage as u64;
            case = case.at(start).take(20).admitted().take(20).admitted().refund(first);
            case = case.at(start + SECOND).take(20).admitted().take(20).admitted();
            case = case.refund(second).take(1).denied().retry(50 * MS);
        }
        case
    })
}

/// Returns cases in which all of four charges are refunded at once: the bucket is empty again, in whichever order.
fn in_any_order() -> Vec<Case> {
    let orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]];
    let cases = orders.map(|order| {
        buckets_of_forty(&format!("refunds at once restore a bucket in the order {order:?}"), |case| {
            let case = case.take(10).admitted().take(5).admitted().take(10).admitted().take(10).admitted();
            order.into_iter().fold(case, Case::refund).peek().reset(0)
        })
    });
    cases.into_iter().flatten().collect()
}

fn of_a_charge_that_leaked_sooner() -> Case {
    let case = Case::new("a refund finds what earlier refunds have left of its charge").on("10/s token-bucket");
    let case = case.take(4).admitted().take(6).admitted().refund(0).peek().remaining(4);
    // Two of the six units have leaked. The refund of the first charge does not leak, but it was before the second.
    let case = case.at(200 * MS).take(6).admitted().remaining(0).refund(1).peek().remaining(4).reset(600 * MS);
    // The refunds are forgotten a second after the last write, when a full bucket would be empty.
    case.at(1_200 * MS).take(10).admitted().refund(3).peek().remaining(0).refund(5).peek().remaining(10).reset(0)
}

fn before_the_charge() -> Case {
    let case = Case::new("a refund before its charge, after the clock went back, changes nothing");
    let case = case.on("10/s token-bucket").at(SECOND).take(6).admitted().at(SECOND - 1).refund(0);
    case.peek().remaining(4).at(SECOND).refund(0).peek().remaining(10)
}

fn of_a_deleted_counter() -> Case {
    let case = Case::new("a refund on a counter that was deleted after refunds changes nothing");
    let case = case.on("10/s token-bucket").take(3).admitted().refund(0).take(5).admitted().reset_counter();
    case.take(5).admitted().refund(1).peek().remaining(5)
}
