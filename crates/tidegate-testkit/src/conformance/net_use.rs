//! The guarantee that no refund may break: what was charged and not refunded keeps the limit.
//!
//! Other tests compare a subject with the oracle, so an error in the definition of a refund would be in both. This
//! checker knows only what a limit promises. Call the *net units* of a charge those that were not refunded:
//!
//! | algorithm | promise |
//! |---|---|
//! | `token-bucket`, `leaky-bucket` | net units within any closed interval of length t ≤ capacity + quota / window × t |
//! | `sliding`, `sliding-log` | net units within any trailing window ≤ quota |
//! | `fixed-window` | net units within each aligned window ≤ quota |
//! | `sliding-counter` | the same, and net units within any trailing window ≤ its stated [`bound`] |
//!
//! A charge that was refunded has no net units, even if some of its units had already leaked and were not given back. A
//! charge of which a part was refunded keeps the other units. So the checker never counts a unit that a limit need not
//! count, and each violation is an error of the subject.
//!
//! The sequences have one limit and one key. They charge, wait and refund in any order, several times at one instant,
//! and often take all that is left. Each charge is refunded at most once. Some sequences are directed: they are attacks
//! on buckets that forget in which order units leak.

use std::fmt;

use tidegate_core::{Algorithm, Check, Cost, Decision, Demand, Key, Limit, Timestamp};

use super::properties::{Violation, bound};
use super::{Random, Subject};

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);

/// One step of a sequence.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Step {
    /// Moves the clock forward by microseconds.
    Wait(u64),
    /// Charges units, if they fit.
    Charge(u32),
    /// Charges all units that are left.
    ChargeRest,
    /// Refunds a charge that was not refunded before: the nth in the order of the charges, modulo their number. Refunds
    /// all of its units, or at most this many.
    Refund { nth: usize, units: Option<u32> },
}

/// A charge of a sequence, and the units of it that were not refunded.
struct Charge {
    at: Timestamp,
    net_units: u32,
    decision: Decision,
}

/// Checks the guarantee of an algorithm on directed sequences, and on `count` random ones, for each of a few limits.
///
/// `fresh` creates a subject without counters, one for each sequence. It must support refunds.
///
/// # Errors
/// If the guarantee is violated. Describes the first violation, on a shrunk sequence.
pub fn keeps_the_limit<S: Subject>(
    algorithm: Algorithm,
    count: usize,
    seed: u64,
    mut fresh: impl FnMut() -> S,
) -> Result<(), Violation> {
    let mut random = Random::new(seed);
    for text in limits(algorithm) {
        let limit: Limit = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        let sequences = directed(&limit).into_iter().chain((0..count).map(|_| random_steps(&mut random, &limit)));
        for steps in sequences {
            if run(&limit, &steps, &mut fresh()).is_err() {
                return Err(shrunk(&limit, steps, &mut fresh));
            }
        }
    }
    Ok(())
}

/// Returns the limits of an algorithm to test: slow and fast ones, with small and large capacities.
///
/// Those of buckets count time in microseconds. In the last ones, several units leak per microsecond.
fn limits(algorithm: Algorithm) -> &'static [&'static str] {
    match algorithm {
        Algorithm::TokenBucket => &[
            "20/s token-bucket burst=40",
            "10/s token-bucket",
            "7/s token-bucket burst=3",
            "3/10ms token-bucket burst=50",
            "30000/s token-bucket burst=100",
            "10000000/s token-bucket burst=64",
        ],
        Algorithm::LeakyBucket => &[
            "20/s leaky-bucket queue=39",
            "7/s leaky-bucket queue=3",
            "30000/s leaky-bucket queue=99",
            "10000000/s leaky-bucket queue=63",
        ],
        Algorithm::Sliding => &["10/s", "40/100ms", "1500/100ms"],
        Algorithm::SlidingLog => &["10/s sliding-log", "600/100ms sliding-log"],
        Algorithm::SlidingCounter => &["10/s sliding-counter", "100/100ms sliding-counter"],
        Algorithm::FixedWindow => &["10/s fixed-window", "100/100ms fixed-window"],
        other => panic!("no limits of {other:?}"),
    }
}

/// Returns the units that a limit holds at once, and the time in microseconds until all of them are available again.
fn capacity_and_recovery(limit: &Limit) -> (u64, u64) {
    let (quota, window_us, cost_max) = (u64::from(limit.quota()), limit.window_us(), u64::from(limit.cost_max()));
    match limit.algorithm() {
        Algorithm::TokenBucket => (cost_max, (cost_max * window_us).div_ceil(quota)),
        // The unit that a leaky bucket is serving is not in the queue.
        Algorithm::LeakyBucket => (cost_max + 1, ((cost_max + 1) * window_us).div_ceil(quota)),
        _ => (quota, window_us),
    }
}

/// Returns the attacks: each of them exceeds the burst of a bucket that gives back too much.
fn directed(limit: &Limit) -> Vec<Vec<Step>> {
    use Step::{ChargeRest, Refund, Wait};
    let (capacity, recovery_us) = capacity_and_recovery(limit);
    let oldest = Refund { nth: 0, units: None };
    let newest = Refund { nth: usize::MAX, units: None };
    let half_time = Wait(recovery_us / 2);
    // Two charges, of which the first is refunded, so that the second leaks sooner than it seems; in several stages.
    let charge = |parts: u64| Step::Charge((capacity / parts).max(1) as u32);
    let stage = [charge(2), ChargeRest, oldest, half_time, ChargeRest, oldest, ChargeRest];
    let in_two = stage.repeat(6);
    // The same with many charges, of which half are refunded at once and the others after a while.
    let many = |from: Step| {
        let mut steps = vec![charge(8); 8];
        for _ in 0..4 {
            steps.extend([from; 4]);
            steps.push(half_time);
            steps.extend([charge(8); 16]);
            steps.extend([from; 4]);
            steps.extend([charge(8); 16]);
            steps.push(ChargeRest);
        }
        steps
    };
    // Parts of charges, as receipts that are redeemed with the used units.
    let part = Refund { nth: 0, units: Some((capacity / 4).max(1) as u32) };
    let in_parts = [charge(2), charge(2), part, half_time, ChargeRest, part, ChargeRest, part, ChargeRest].repeat(4);
    vec![in_two, many(oldest), many(newest), in_parts]
}

fn random_steps(random: &mut Random, limit: &Limit) -> Vec<Step> {
    let (capacity, recovery_us) = capacity_and_recovery(limit);
    let count = 10 + random.below(90);
    // Some sequences wait rarely, so that much happens at one instant.
    let (waits, refunds) = (1 + random.below(4), 1 + random.below(5));
    let step = |_| match random.below(12) {
        kind if kind < waits => Step::Wait(match random.below(6) {
            0 => 1 + random.below(3),
            1 => recovery_us.div_ceil(capacity),
            2 => recovery_us / 2,
            3 => recovery_us,
            4 => random.below(recovery_us + 1),
            _ => random.below(recovery_us / 8 + 2),
        }),
        kind if kind < waits + refunds => Step::Refund {
            nth: [0, usize::MAX, random.below(64) as usize][random.below(3) as usize],
            units: (random.below(4) == 0).then(|| 1 + random.below(capacity) as u32),
        },
        11 => Step::ChargeRest,
        _ => Step::Charge(match random.below(4) {
            0 => capacity.div_ceil(2),
            1 => 1,
            _ => 1 + random.below(capacity),
        } as u32),
    };
    (0..count).map(step).collect()
}

/// Runs a sequence on a subject without counters. Returns an error after the first charge that violates the guarantee.
fn run(limit: &Limit, steps: &[Step], subject: &mut dyn Subject) -> Result<(), Violation> {
    let demand = Demand::new(*limit, Key::new("client").expect("a short subject"));
    let mut charges: Vec<Charge> = Vec::new();
    let mut refundable: Vec<usize> = Vec::new();
    let mut now = START;
    for (number, step) in steps.iter().enumerate() {
        let cost = match *step {
            Step::Wait(us) => {
                now = now.plus_micros(us);
                continue;
            }
            Step::Refund { .. } if refundable.is_empty() => continue,
            Step::Refund { nth, units } => {
                let nth = if nth == usize::MAX { refundable.len() - 1 } else { nth % refundable.len() };
                let charge = &mut charges[refundable.remove(nth)];
                let mut decision = charge.decision.clone();
                let units = units.unwrap_or(u32::MAX).min(charge.net_units);
                decision.limits[0].cost = units;
                charge.net_units -= units;
                subject.refund(now, &Check::one(&demand.cost(units)), &decision);
                continue;
            }
            Step::Charge(cost) => cost,
            Step::ChargeRest => subject.check(now, &Check::one(&demand.cost(Cost::PEEK))).limits[0].remaining,
        };
        let decision = subject.check(now, &Check::one(&demand.cost(cost)));
        if cost > 0 && decision.allowed() {
            refundable.push(charges.len());
            charges.push(Charge { at: now, net_units: cost, decision });
            promise(limit, &charges).map_err(|violation| format!("step {number}: {violation}"))?;
        }
    }
    Ok(())
}

/// Checks the promise of a limit on all intervals that end with the last charge.
fn promise(limit: &Limit, charges: &[Charge]) -> Result<(), Violation> {
    let Some(last) = charges.last() else { return Ok(()) };
    let (quota, window_us, now_us) = (u128::from(limit.quota()), limit.window_us(), last.at.as_micros());
    let (capacity, _) = capacity_and_recovery(limit);
    let (mut within, mut in_trailing, mut in_aligned) = (0, 0, 0);
    for charge in charges.iter().rev() {
        let (at_us, units) = (charge.at.as_micros(), u128::from(charge.net_units));
        let passed_us = now_us - at_us;
        within += units;
        in_trailing += if passed_us < window_us { units } else { 0 };
        in_aligned += if at_us / window_us == now_us / window_us { units } else { 0 };
        let is_kept = match limit.algorithm() {
            Algorithm::Sliding | Algorithm::SlidingLog => in_trailing <= quota,
            Algorithm::FixedWindow => in_aligned <= quota,
            Algorithm::SlidingCounter => in_aligned <= quota && in_trailing <= bound(limit).into(),
            _ => {
                within * u128::from(window_us)
                    <= u128::from(capacity) * u128::from(window_us) + quota * u128::from(passed_us)
            }
        };
        if !is_kept {
            return Err(format!("{within} units that were not refunded within {passed_us}µs, under {limit}"));
        }
    }
    Ok(())
}

/// Removes steps from a sequence as long as it violates the guarantee. Describes the violation and the steps.
fn shrunk<S: Subject>(limit: &Limit, mut steps: Vec<Step>, fresh: &mut impl FnMut() -> S) -> Violation {
    let mut index = steps.len();
    while index > 0 {
        index -= 1;
        let removed = steps.remove(index);
        if run(limit, &steps, &mut fresh()).is_ok() {
            steps.insert(index, removed);
        } else {
            index = index.min(steps.len());
        }
    }
    let violation = run(limit, &steps, &mut fresh()).err().unwrap_or_else(|| "not again on a fresh subject".to_owned());
    let lines: Vec<String> = steps.iter().enumerate().map(|(number, step)| format!("  {number:3}. {step}")).collect();
    format!("{violation}\n{}", lines.join("\n"))
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Wait(us) => write!(f, "+{us}µs"),
            Step::Charge(units) => write!(f, "charge {units}"),
            Step::ChargeRest => f.write_str("charge all that is left"),
            Step::Refund { nth: usize::MAX, units: None } => f.write_str("refund the newest"),
            Step::Refund { nth, units: None } => write!(f, "refund #{nth}"),
            Step::Refund { nth, units: Some(units) } => write!(f, "refund {units} of #{nth}"),
        }
    }
}
