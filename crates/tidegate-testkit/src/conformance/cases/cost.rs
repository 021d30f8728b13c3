//! Costs of zero, of the whole quota and above it; the smallest and the largest quotas.

use tidegate_core::Algorithm::{self, FixedWindow, LeakyBucket, Sliding, SlidingCounter, SlidingLog, TokenBucket};

use super::{MS, SECOND, per_algorithm, text};
use crate::conformance::Case;
use crate::conformance::script::EPOCH_US;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(peeks());
    cases.extend(whole_quota_and_more());
    cases.push(burst_and_queue_are_the_largest_cost());
    cases.extend(quota_of_one());
    cases.extend(larger_costs_wait_longer());
    cases.extend(extremes("1ms", "the largest quota in the shortest window"));
    cases.extend(extremes("400day", "the largest quota in the longest window"));
    cases.push(waits_beyond_a_century());
    cases.push(waits_just_within_the_longest());
    cases.extend(reset());
    cases
}

fn peeks() -> Vec<Case> {
    per_algorithm("a peek is admitted, changes nothing, and returns the wait of one unit", |case, algorithm| {
        let case = case.on(&text("10/s", algorithm)).peek().remaining(10).retry(0).next(0).reset(0);
        let case = case.take(10).admitted();
        let case = if algorithm == LeakyBucket { case.take(1).admitted() } else { case };
        let wait = match algorithm {
            Sliding | SlidingLog | FixedWindow => SECOND,
            SlidingCounter => SECOND + 100 * MS,
            _ => 100 * MS,
        };
        let case = case.peek().allowed(true).remaining(0).retry(wait).next(wait);
        let case = case.peek().remaining(0).retry(wait).at(wait - 1).peek().remaining(0).retry(1);
        case.at(wait).take(1).admitted()
    })
}

fn whole_quota_and_more() -> Vec<Case> {
    per_algorithm("the whole quota fits, one more never does", |case, algorithm| {
        let case = case.on(&text("10/s", algorithm));
        let case = case.take(11).never().remaining(10).next(0).reset(0).take(u32::MAX).never().remaining(10);
        let left = u32::from(algorithm == LeakyBucket);
        case.take(10).admitted().remaining(left).take(11).never().remaining(left).take(10).denied()
    })
}

fn burst_and_queue_are_the_largest_cost() -> Case {
    let case = Case::new("burst and queue are the largest cost").on("10/s token-bucket burst=20");
    let case =
        case.peek().remaining(20).take(21).never().take(20).admitted().remaining(0).next(100 * MS).reset(2 * SECOND);
    let case = case.on("10/s leaky-bucket queue=3").peek().remaining(3).take(4).never();
    case.take(3).admitted().retry(0).remaining(1).take(1).admitted().retry(300 * MS).remaining(0).take(1).denied()
}

fn quota_of_one() -> Vec<Case> {
    per_algorithm("a quota of one", |case, algorithm| {
        let case = case.on(&text("1/s", algorithm)).take(1).admitted();
        let case = match algorithm {
            // One unit is being served, and one waits.
            LeakyBucket => case.remaining(1).next(0).take(1).admitted().retry(SECOND).remaining(0),
            _ => case.remaining(0),
        };
        // A single unit of the previous window counts as one until that window is no longer covered at all.
        let wait = if algorithm == SlidingCounter { 2 * SECOND } else { SECOND };
        let case = case.take(1).denied().retry(wait).next(wait).take(2).never();
        case.at(wait - 1).take(1).denied().retry(1).at(wait).take(1).admitted().remaining(0)
    })
}

/// Returns a case per algorithm: ten units are charged 50 ms apart, and the wait of a cost is until that cost fits.
fn larger_costs_wait_longer() -> Vec<Case> {
    per_algorithm("the wait is for this cost, not for one unit", |case, algorithm| {
        let case = case.on(&text("10/s", algorithm));
        let case = (0..10).fold(case, |case, n| case.at(n * 50 * MS).take(1).admitted());
        let case = case.at(450 * MS);
        match algorithm {
            Sliding | SlidingLog => {
                let case = case.take(1).denied().retry(550 * MS).take(5).denied().retry(750 * MS);
                case.at(SECOND + 200 * MS - 1).take(5).denied().retry(1).at(SECOND + 200 * MS).take(5).admitted()
            }
            FixedWindow => case.take(1).denied().retry(550 * MS).take(5).denied().retry(550 * MS),
            SlidingCounter => {
                let case = case.take(1).denied().retry(650 * MS).take(5).denied().retry(1_050 * MS);
                case.at(1_500 * MS - 1).take(5).denied().retry(1).at(1_500 * MS).take(5).admitted()
            }
            // 4.5 units have leaked meanwhile, so 5.5 are used.
            TokenBucket => case.take(5).denied().retry(50 * MS).take(8).denied().retry(350 * MS),
            _ => case.take(6).denied().retry(50 * MS).take(8).denied().retry(250 * MS),
        }
    })
}

fn extremes(window: &str, name: &str) -> Vec<Case> {
    per_algorithm(name, |case, algorithm| {
        let quota = largest_quota(algorithm);
        let case = case.on(&text(&format!("{quota}/{window}"), algorithm)).peek().remaining(quota);
        let case = case.take(quota).admitted().take(quota + 1).never();
        let case = if algorithm == LeakyBucket { case.remaining(1).take(1).admitted() } else { case };
        // All units become available again at `retry_after`, and not a microsecond earlier.
        let case = case.take(1).denied().remaining(0).at_retry(-1).take(1).denied().retry(1);
        let case = case.at_retry(0).take(1).admitted().take(quota).denied();
        let case = case.at_retry(-1).take(quota).denied().retry(1);
        let case = case.at_retry(0).take(quota).admitted();
        if algorithm == LeakyBucket { case } else { case.remaining(0) }
    })
}

fn largest_quota(algorithm: Algorithm) -> u32 {
    match algorithm {
        SlidingLog => tidegate_core::SLIDING_LOG_QUOTA_MAX,
        _ => tidegate_core::QUOTA_MAX,
    }
}

/// Returns a case with a full bucket that would be empty in millions of years: the wait is the longest wait, 2⁵² − 1
/// µs.
fn waits_beyond_a_century() -> Case {
    let longest = (1 << 52) - 1;
    let case = Case::new("a wait beyond 142 years is the longest wait").on("1/400day token-bucket burst=10000000");
    let case = case.take(10_000_000).admitted().remaining(0).reset(longest);
    case.take(10_000_000).denied().retry(longest).take(1).denied().retry_at_most(401 * super::DAY)
}

/// Returns a case in which a wait that is just shorter than the longest wait is exact.
///
/// `1/400day token-bucket burst=10000000` counts in grains of 38,776 µs, and 891,272,953 parts are one unit. The
/// longest wait is 116,143,996,992 grains and a fraction. At the last microsecond of a grain, one more grain still fits
/// into it.
fn waits_just_within_the_longest() -> Case {
    let (grain_us, parts_per_unit, grains) = (38_776, 891_272_953, 116_143_996_992);
    // The last microsecond of the grain in which `grains` + 1 parts are left of 131 units.
    let end_of_grain_us =
        (EPOCH_US / grain_us + 131 * parts_per_unit - (grains + 1)) * grain_us + grain_us - 1 - EPOCH_US;
    let case = Case::new("a wait just below the longest wait is exact").on("1/400day token-bucket burst=10000000");
    let case = case.take(131).admitted().at(end_of_grain_us - grain_us + 1).peek().reset((1 << 52) - 1);
    let case = case.at(end_of_grain_us).peek().reset(grains * grain_us + 1);
    case.at(end_of_grain_us + 1).peek().reset(grains * grain_us)
}

fn reset() -> Vec<Case> {
    per_algorithm("a reset deletes the counter", |case, algorithm| {
        let case = case.on(&text("10/s", algorithm)).take(10).admitted().reset_counter();
        case.peek().remaining(10).retry(0).next(0).reset(0).take(10).admitted()
    })
}
