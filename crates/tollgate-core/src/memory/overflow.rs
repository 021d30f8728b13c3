//! What newcomers share when there is no room for counters of their own.
//!
//! Whoever is sent to a shared counter must not get more than by one of its own. So whatever it has spent there must count for as
//! long as its own limit says, whoever else comes by. A log that is judged by a shorter window forgets, a bucket that
//! is judged by a quicker rate drains, and the penalty of a small quota takes the oldest units away. Hence two ways of sharing:
//!
//! | scope | shared by the newcomers of | judged by |
//! |---|---|---|
//! | limit | one limit: a log or a pair is kept as long as the window says, so another quota may share it; a bucket, or a limit that charges refusals, is shared by no other | that limit |
//! | class | all limits of a class: windows, or the rates of buckets, within a factor of four | the slowest of the class |
//!
//! The second is for when the first would take too many counters, because there are many limits or because somebody invents them. There are few
//! classes, so their counters are bounded. Under it a newcomer may wait up to four times as long as its own limit says,
//! besides for what the others have spent. Refusals are not charged there, and nothing is given back: a refund could be of what was charged elsewhere.

use std::hash::Hash;

use crate::limit::{Limit, Machine, WINDOW_US_MAX};

/// What an overflow counter is shared by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OverflowScope {
    /// The newcomers of one limit.
    Limit,
    /// The newcomers of all limits of a class.
    Class,
}

/// How many classes there are: of the windows of logs, of those of pairs, and of the rates of buckets.
pub(super) const CLASSES: usize = 2 * (LONGEST - SHORTEST + 1) as usize + (LONGEST - QUICKEST + 1) as usize;

/// The class of the shortest window, 1 ms: 4^5 µs.
const SHORTEST: i32 = 5;
/// That of the longest, 400 days, which is between 4^22 µs and 4^23 µs.
const LONGEST: i32 = 23;
/// That of the quickest bucket, 10,000 units a microsecond: 4^-6 µs each.
const QUICKEST: i32 = -6;

/// What tells one limit's overflow counters apart from those of another.
pub(super) fn of_one_limit(limit: &Limit) -> impl Hash {
    let is_shared = !limit.count_denied() && !matches!(limit.machine(), Machine::Bucket(_));
    (limit.window_us(), (!is_shared).then(|| (limit.quota(), limit.cost_max(), limit.count_denied())))
}

/// The number of a limit's class, among those of its state machine.
pub(super) fn class_number(limit: &Limit) -> u64 {
    u64::from((class(limit) - QUICKEST).unsigned_abs())
}

/// The limit by which the counters of a limit's class are judged: it has the limit's own quota and capacity, and the window of the class; or, as a
/// bucket, the rate of the class.
pub(super) fn slowest_of_class(limit: &Limit) -> Limit {
    let class = class(limit);
    let window_us = (1 << (2 * class.max(SHORTEST))).min(WINDOW_US_MAX);
    let quota = match limit.machine() {
        Machine::Bucket(_) => 1 << (2 * (SHORTEST - class).max(0)),
        _ => limit.quota(),
    };
    limit.at_rate(quota, window_us)
}

/// The least power of four, in microseconds, that is no shorter than the window; for a bucket, than the time in which a unit leaks.
fn class(limit: &Limit) -> i32 {
    let units = match limit.machine() {
        Machine::Bucket(_) => limit.quota(),
        _ => 1,
    };
    let (units, window_us) = (u128::from(units), u128::from(limit.window_us()));
    let is_enough = |class: &i32| match class {
        0.. => units << (2 * class) >= window_us,
        _ => units >= window_us << (-2 * class),
    };
    (QUICKEST..LONGEST).find(is_enough).unwrap_or(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Algorithm, QUOTA_MAX, SLIDING_LOG_QUOTA_MAX};
    use std::collections::HashSet;
    use std::time::Duration;

    /// Limits of all windows and quotas that there are, near enough.
    fn limits() -> impl Iterator<Item = Limit> {
        let windows = (0..200).map(|n| Duration::from_micros((1_000.0 * 1.13_f64.powi(n)) as u64).min(LAST));
        windows.flat_map(|window| {
            let quotas = [1, 2, 3, 10, 1_000, 99_999, QUOTA_MAX];
            quotas.into_iter().flat_map(move |quota| {
                let limit = Limit::new(quota.into(), window).unwrap();
                Algorithm::ALL.into_iter().filter_map(move |algorithm| limit.with_algorithm(algorithm).ok())
            })
        })
    }
    const LAST: Duration = Duration::from_micros(WINDOW_US_MAX);

    #[test]
    fn the_slowest_of_a_class_is_no_quicker_than_its_limit_and_at_most_four_times_slower() {
        for limit in limits() {
            let slowest = slowest_of_class(&limit);
            assert_eq!((slowest.algorithm(), slowest.cost_max()), (limit.algorithm(), limit.cost_max()));
            if let Machine::Bucket(_) = limit.machine() {
                let unit_us = |limit: &Limit| limit.window_us() as f64 / f64::from(limit.quota());
                let slower = unit_us(&slowest) / unit_us(&limit);
                assert!((1.0..4.0001).contains(&slower), "{slower}: {slowest} for {limit}");
            } else {
                let longer = slowest.window_us() as f64 / limit.window_us() as f64;
                assert!((1.0..4.0001).contains(&longer), "{longer}: {slowest} for {limit}");
                assert_eq!(slowest.quota(), limit.quota());
            }
        }
    }

    #[test]
    fn there_are_as_many_classes_as_are_reckoned_with() {
        assert_eq!(SLIDING_LOG_QUOTA_MAX, 100_000, "or take other quotas above");
        let class_of = |limit: Limit| {
            let machine = match limit.machine() {
                Machine::Log(_) => 0,
                Machine::Pair(_) => 1,
                Machine::Bucket(_) => 2,
            };
            (machine, class(&limit))
        };
        let classes: HashSet<(u8, i32)> = limits().map(class_of).collect();
        assert!(classes.len() <= CLASSES, "{} of {CLASSES}", classes.len());
        assert!(classes.len() + 4 >= CLASSES, "{} of {CLASSES}", classes.len());
    }
}
