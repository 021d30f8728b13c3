//! Traces on one long log.
//!
//! A store represents a long log differently from a short one: packed, in pieces, with sums of the pieces. Errors there
//! need hundreds or thousands of entries, and then refunds, costs and clock steps at the edges of the pieces. So these
//! traces fill a log first, and then choose operations that reach those edges.

use std::time::Duration;

use tidegate_core::{Algorithm, Limit, Timestamp};

use super::super::Random;
use super::{NEWEST, Operation, Slot, Step, Trace, TraceDemand};

const QUOTAS: [u64; 12] = [300, 1_000, 1_001, 1_500, 2_000, 3_000, 5_000, 5_000, 20_000, 20_000, 100_000, 100_000];
const WINDOWS_US: [u64; 3] = [1_000_000, 60_000_000, 3_600_000_000];
const FILLS: [u64; 12] = [1, 10, 63, 64, 65, 200, 255, 257, 320, 700, 1_100, 4_500];
const COSTS: [u32; 10] = [1, 1, 1, 2, 3, 4, 5, 17, 100, 400];

impl Trace {
    /// Returns a random wandering trace of one `sliding` or `sliding-log` limit, whose log gets up to thousands of
    /// entries.
    pub(in super::super) fn long_log(random: &mut Random) -> Trace {
        let start = Timestamp::from_micros(1_760_123_456_789_123);
        let window_us = pick(random, &WINDOWS_US);
        let limit = limit(random, window_us);
        let mut trace =
            Trace { start, wandering: true, slots: vec![Slot { limit, in_rule: true }], operations: Vec::new() };
        let mut limit = limit;
        for _ in 0..1 + random.below(3) {
            trace.operations.push(fill(random, &limit));
        }
        for _ in 0..20 + random.below(60) {
            match random.below(100) {
                0..=34 => trace.operations.push(check(random, &limit)),
                35..=49 => trace.operations.push(refund(random)),
                // So many refunds that whole pieces become empty.
                50..=56 => {
                    let one = refund(random);
                    trace.operations.extend((0..10 + random.below(300)).map(|_| one.clone()));
                }
                57..=64 => trace.operations.push(fill(random, &limit)),
                65..=84 => trace.operations.push(Operation::Move(step(random, &limit))),
                _ => {
                    limit = changed(random, &limit);
                    trace.operations.push(Operation::Change { slot: 0, limit });
                }
            }
        }
        trace
    }
}

fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

fn limit(random: &mut Random, window_us: u64) -> Limit {
    let algorithm = pick(random, &[Algorithm::SlidingLog, Algorithm::Sliding]);
    let limit = Limit::new(pick(random, &QUOTAS), Duration::from_micros(window_us));
    let limit = limit.and_then(|limit| limit.with_algorithm(algorithm)).expect("the lists hold what a limit accepts");
    limit.with_count_denied(random.below(4) == 0)
}

fn changed(random: &mut Random, old: &Limit) -> Limit {
    let window_us = if random.below(16) == 0 { pick(random, &WINDOWS_US) } else { old.window_us() };
    limit(random, window_us)
}

fn fill(random: &mut Random, limit: &Limit) -> Operation {
    let window_us = limit.window_us();
    let step_us = pick(random, &[1, 1, 7, window_us / 20_000, window_us / 5_000, window_us / 1_000 + 1]);
    Operation::Fill { slot: 0, count: pick(random, &FILLS), step_us: step_us.max(1) }
}

fn check(random: &mut Random, limit: &Limit) -> Operation {
    let quota = limit.quota();
    let cost = match random.below(10) {
        0..=5 => pick(random, &COSTS),
        6 => pick(random, &[0, quota / 3, quota / 2, quota - 1, quota, quota + 1]),
        _ => random.below(u64::from(quota)) as u32 + 1,
    };
    Operation::Check(vec![TraceDemand { key: 0, slot: 0, cost }])
}

fn refund(random: &mut Random) -> Operation {
    // The oldest, the newest, or any.
    let nth = match random.below(4) {
        0 => 0,
        1 => NEWEST,
        _ => random.below(10_000) as usize,
    };
    Operation::Refund { nth, with_present_limits: random.below(2) == 0 }
}

fn step(random: &mut Random, limit: &Limit) -> Step {
    let window_us = limit.window_us();
    match random.below(40) {
        0..=9 => Step::By(random.below(20)),
        10..=13 => Step::By(window_us / (1 + random.below(2_000))),
        14 => Step::By(pick(random, &[window_us - 1, window_us, 3 * window_us])),
        15..=20 => Step::ToRetry { offset_us: random.below(3) as i64 - 1 },
        21..=26 => Step::Back(1 + random.below(20)),
        27..=33 => Step::Back(random.below(2_000)),
        _ => Step::Back(window_us / (1 + random.below(20_000))),
    }
}
