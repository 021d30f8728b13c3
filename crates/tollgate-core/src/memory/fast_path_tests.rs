//! Compares the fast paths of the memory store with its general path and with [`decide`] on plain states.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::algorithm::decide;
use crate::time::ManualClock;

/// Limits of every algorithm, with different windows, so that each has its own counter.
const LIMITS: [&str; 8] = [
    "9/100ms",
    "7/90ms fixed-window",
    "8/80ms token-bucket",
    "20/300ms sliding-log",
    "6/70ms sliding-counter",
    "5/60ms leaky-bucket queue=4",
    "7/110ms token-bucket burst=3 count_denied=true",
    "5000/120ms",
];
const SUBJECTS: [&str; 8] = ["user:42", "ip:10.0.0.1", "user:42", "global", "a", "b", "a", "c"];

/// A sequence of pseudorandom numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Random checks of some limits, on two stores of which one never uses a fast path.
#[derive(Clone, Copy)]
struct Run {
    /// The index of the first limit in [`LIMITS`], and how many there are.
    first: usize,
    count: usize,
    is_one_subject: bool,
    steps: usize,
    /// The maximum time between two checks.
    pause_us: u64,
    /// Whether the clock goes back now and then.
    goes_back: bool,
    seed: u64,
}

impl Run {
    fn new(first: usize, count: usize, is_one_subject: bool) -> Run {
        let seed = (8 * first + count) as u64;
        Run { first, count, is_one_subject, steps: 3_000, pause_us: 16_000, goes_back: false, seed }
    }
}

/// Compares every decision of a run. Returns how many decisions of several limits were made in place.
fn compare(run: Run) -> usize {
    let Run { first, count, is_one_subject, steps, pause_us, goes_back, seed } = run;
    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_000_000_000)));
    let store = || MemoryStore::builder().clock(clock.clone()).build();
    let (fast, general) = (store(), store());
    let limits: Vec<Limit> = (0..count).map(|index| LIMITS[(first + index) % LIMITS.len()].parse().unwrap()).collect();
    let mut states: Vec<State> = limits.iter().map(State::unused).collect();
    let (mut random, mut in_place) = (Random(seed), 0);
    for step in 0..steps {
        match goes_back && random.below(10) == 0 {
            true => clock.set(Timestamp::from_micros(Clock::now(&*clock).as_micros() - random.below(20_000))),
            false => clock.advance(Duration::from_micros(random.below(pause_us))),
        }
        let cost = Cost::new([0, 1, 1, 1, 2, 3, 9, 30][random.below(8) as usize]);
        let demand = |(index, limit): (usize, &Limit)| {
            let subject = SUBJECTS[if is_one_subject { 0 } else { index }];
            Demand::new(*limit, Key::new(subject).unwrap()).cost(cost)
        };
        let demands: Vec<Demand<'_>> = limits.iter().enumerate().map(demand).collect();
        let check = Check::new(&demands).unwrap();
        let now = Clock::now(&*clock);

        let expected = decide(now, &demands, &mut states);
        let mut by_general = Decision { limits: LimitStatuses::new(), ..expected };
        by_general.at = general.check_in_general(now, &demands, &mut by_general.limits);
        let mut by_fast = Decision { limits: LimitStatuses::new(), ..expected };
        match fast.admit_in_place(now, &demands, &mut by_fast.limits) {
            Some(at) => (by_fast.at, in_place) = (at, in_place + 1),
            None => by_fast = fast.check(&check),
        }
        assert_eq!(by_general, expected, "general path, step {step}: {limits:?}");
        assert_eq!(by_fast, expected, "fast path, step {step}: {limits:?}");

        if expected.allowed() && random.below(8) == 0 {
            fast.refund(&check, &expected);
            general.refund(&check, &expected);
            for ((demand, status), state) in demands.iter().zip(&expected.limits).zip(&mut states) {
                let receipt = Receipt::of(expected.at, status);
                receipt.into_iter().for_each(|receipt| state.refund(&demand.limit, now, receipt));
            }
        }
    }
    in_place
}

#[test]
fn one_limit_is_decided_like_on_the_general_path() {
    for first in 0..LIMITS.len() {
        assert_eq!(compare(Run::new(first, 1, true)), 0, "a single limit is decided by `decide_one`");
    }
}

#[test]
fn several_limits_are_decided_like_on_the_general_path() {
    for count in 2..=4 {
        for first in 0..LIMITS.len() {
            for is_one_subject in [true, false] {
                let in_place = compare(Run::new(first, count, is_one_subject));
                assert!((150..2_850).contains(&in_place), "both paths must run: {in_place} of 3000 in place");
            }
        }
    }
}

#[test]
fn more_limits_than_the_fast_path_takes_are_decided_in_general() {
    assert_eq!(compare(Run::new(0, 5, true)), 0);
    assert_eq!(compare(Run::new(0, LIMITS.len(), false)), 0);
}

/// In runs so short that no counter expires: a store drops an expired counter, and a clock that goes back far enough
/// would make a plain state count again.
#[test]
fn clock_that_goes_back_is_handled_like_on_the_general_path() {
    for first in 0..LIMITS.len() {
        for (count, seed) in (1..=4).flat_map(|count| (0..20).map(move |seed| (count, seed))) {
            let run = Run { steps: 50, pause_us: 600, goes_back: true, seed, ..Run::new(first, count, true) };
            compare(run);
        }
    }
}
