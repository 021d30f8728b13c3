//! The guarantee that no refund may break: what was charged and not refunded keeps the limit.
//!
//! Other tests compare an implementation with the oracle, so an error in the definition of a refund would be in both. This
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
//! count, and each violation is an error of the implementation.
//!
//! The sequences have one limit and one key. They charge, wait and refund in any order, several times at one instant,
//! and often take all that is left. Each charge is refunded at most once. Some sequences are directed: they are attacks
//! on buckets that forget in which order units leak.
//!
//! **Real time.** A client that does not set the clock knows only that a charge was made after it sent the check and before
//! it received the decision. So an interval contains only the charges that were certainly made in it, and is as long as it can
//! be: it begins when the first of them was sent and ends when the last of them was received. Units that are to be refunded
//! are no net units from before the refund is sent. So delays hide violations but cause none, whatever number of clients
//! send checks and refunds at the same time.

use std::fmt;
use std::panic::resume_unwind;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tidegate_core::{Algorithm, Check, Clock, Cost, Decision, Demand, Key, Limit, SystemClock, Timestamp};

use super::properties::{Violation, bound};
use super::{Implementation, Random};

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
/// The most by which the clocks of processes on one machine differ during a run, in microseconds.
const SKEW_US: u64 = 20_000;

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

/// An implementation whose charges can be refunded as a whole or in part.
pub trait RefundImplementation {
    /// The data of a charge that its refund needs, such as a receipt.
    type Charge;

    /// Returns the units that are left. The cost of `demand` is ignored.
    fn remaining(&mut self, now: Timestamp, demand: &Demand<'_>) -> u32;

    /// Charges the cost of `demand`. Returns `None` if it is denied.
    fn charge(&mut self, now: Timestamp, demand: &Demand<'_>) -> Option<Self::Charge>;

    /// Refunds units of a charge: at least 1, and at most the cost of `demand`, which is that of the charge.
    fn refund(&mut self, now: Timestamp, demand: &Demand<'_>, charge: Self::Charge, units: u32);
}

impl<S: Implementation> RefundImplementation for S {
    type Charge = Decision;

    fn remaining(&mut self, now: Timestamp, demand: &Demand<'_>) -> u32 {
        self.check(now, &Check::one(&demand.cost(Cost::PEEK))).limits[0].remaining
    }

    fn charge(&mut self, now: Timestamp, demand: &Demand<'_>) -> Option<Decision> {
        Some(self.check(now, &Check::one(demand))).filter(Decision::allowed)
    }

    fn refund(&mut self, now: Timestamp, demand: &Demand<'_>, mut charge: Decision, units: u32) {
        charge.limits[0].cost = units;
        Implementation::refund(self, now, &Check::one(&demand.cost(units)), &charge);
    }
}

/// Checks the guarantee of an algorithm on directed sequences, and on `count` random ones, for each of a few limits.
///
/// `fresh` creates an implementation without counters, one for each sequence. It must support refunds.
///
/// # Errors
/// If the guarantee is violated. Describes the first violation, on a shrunk sequence.
pub fn keeps_the_limit<S: RefundImplementation>(
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
            if run_alone(&limit, &steps, &mut fresh()).is_err() {
                return Err(shrunk(&limit, steps, &mut fresh));
            }
        }
    }
    Ok(())
}

/// Checks the guarantee of a limit in real time, on the directed sequences and on `count` random ones.
///
/// Each implementation runs all of them, at the same time as the others, with the same `key`, which must have no counter before.
/// The random sequences are determined by `seed`. Returns the net use, whose `Display` is a summary.
///
/// # Errors
/// If the guarantee is violated. Describes the first violation, without the sequence.
pub fn keeps_the_limit_in_real_time<S: RefundImplementation + Send>(
    limit: &Limit,
    key: &str,
    count: usize,
    seed: u64,
    implementations: Vec<S>,
) -> Result<NetUse, Violation> {
    let demand = Demand::new(*limit, Key::new(key).expect("a short subject"));
    let (net_use, time) = (Mutex::new(NetUse::new(limit, SKEW_US)), SystemClock::new());
    let run_all = |mut implementation: S, seed: u64| {
        let mut random = Random::new(seed);
        let random = (0..count).map(|_| random_steps(&mut random, limit));
        let mut sequences = directed(limit).into_iter().chain(random);
        sequences.try_for_each(|steps| run(&demand, &steps, &mut implementation, &net_use, &mut Time::Real(&time)))
    };
    thread::scope(|scope| {
        let run_all = &run_all;
        let runs: Vec<_> = (seed..)
            .zip(implementations)
            .map(|(seed, implementation)| scope.spawn(move || run_all(implementation, seed)))
            .collect();
        runs.into_iter().try_for_each(|run| run.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })?;
    Ok(net_use.into_inner().unwrap_or_else(PoisonError::into_inner))
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

/// The time of a run.
enum Time<'c> {
    /// The time that the run sets.
    Set(Timestamp),
    /// The time of this clock, which the run observes.
    Real(&'c SystemClock),
}

impl Time<'_> {
    fn now(&self) -> Timestamp {
        match self {
            Time::Set(now) => *now,
            Time::Real(clock) => clock.now(),
        }
    }

    /// Lets this time pass.
    fn wait(&mut self, us: u64) {
        match self {
            Time::Set(now) => *now = now.plus_micros(us),
            // The clock of a gateway or a cluster cannot be set.
            Time::Real(_) => thread::sleep(Duration::from_micros(us)),
        }
    }
}

/// Runs a sequence on an implementation without counters. Returns an error after the first charge that violates the guarantee.
fn run_alone<S: RefundImplementation>(limit: &Limit, steps: &[Step], implementation: &mut S) -> Result<(), Violation> {
    let demand = Demand::new(*limit, Key::new("client").expect("a short subject"));
    run(&demand, steps, implementation, &Mutex::new(NetUse::new(limit, 0)), &mut Time::Set(START))
}

/// Runs a sequence on an implementation. Returns an error after the first charge that violates the guarantee.
fn run<S: RefundImplementation>(
    demand: &Demand<'_>,
    steps: &[Step],
    implementation: &mut S,
    net_use: &Mutex<NetUse>,
    time: &mut Time<'_>,
) -> Result<(), Violation> {
    let mut refundable: Vec<(usize, u32, S::Charge)> = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        let cost = match *step {
            Step::Wait(us) => {
                time.wait(us);
                continue;
            }
            Step::Refund { .. } if refundable.is_empty() => continue,
            Step::Refund { nth, units } => {
                let nth = if nth == usize::MAX { refundable.len() - 1 } else { nth % refundable.len() };
                let (id, cost, charge) = refundable.remove(nth);
                let units = units.unwrap_or(u32::MAX).min(cost);
                locked(net_use).refund(id, units);
                implementation.refund(time.now(), &demand.cost(cost), charge, units);
                continue;
            }
            Step::Charge(cost) => cost,
            Step::ChargeRest => implementation.remaining(time.now(), demand),
        };
        let sent = time.now();
        if cost > 0
            && let Some(charge) = implementation.charge(sent, &demand.cost(cost))
        {
            let received = time.now();
            let id = locked(net_use).charge(sent, received, cost);
            refundable.push((id.map_err(|violation| format!("step {number}: {violation}"))?, cost, charge));
        }
    }
    Ok(())
}

fn locked(net_use: &Mutex<NetUse>) -> MutexGuard<'_, NetUse> {
    net_use.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The charges of a counter as clients observe them, and the units of each that were not refunded.
///
/// Checks the guarantee after each charge. Displays as the numbers of charges and refunds.
#[derive(Debug)]
pub struct NetUse {
    limit: Limit,
    /// The most by which the clients' clock differs from the implementation's.
    skew_us: u64,
    /// In the order of their earliest times.
    charges: Vec<Charge>,
    refunds: usize,
}

/// A charge between two times, which are equal if the client set the clock.
#[derive(Debug)]
struct Charge {
    id: usize,
    earliest_us: u64,
    latest_us: u64,
    net_units: u32,
}

impl NetUse {
    fn new(limit: &Limit, skew_us: u64) -> NetUse {
        NetUse { limit: *limit, skew_us, charges: Vec::new(), refunds: 0 }
    }

    /// Adds a charge and returns its id, if the guarantee is kept.
    fn charge(&mut self, earliest: Timestamp, latest: Timestamp, units: u32) -> Result<usize, Violation> {
        let (id, earliest_us, latest_us) = (self.charges.len(), earliest.as_micros(), latest.as_micros());
        let at = self.charges.partition_point(|charge| charge.earliest_us <= earliest_us);
        self.charges.insert(at, Charge { id, earliest_us, latest_us, net_units: units });
        self.verify(at).map(|()| id)
    }

    /// Removes units of a charge, before their refund is sent.
    fn refund(&mut self, id: usize, units: u32) {
        let charge = self.charges.iter_mut().rev().find(|charge| charge.id == id).expect("a charge with this id");
        charge.net_units -= units;
        self.refunds += 1;
    }

    /// Checks the guarantee on all intervals after the charge at this index was added.
    fn verify(&self, added: usize) -> Result<(), Violation> {
        let (limit, added) = (&self.limit, &self.charges[added]);
        let (quota, window_us) = (u128::from(limit.quota()), limit.window_us());
        let (capacity, _) = capacity_and_recovery(limit);
        let window = self.aligned_window(added);
        let (mut within, mut in_aligned, mut latest_us) = (0, 0, 0);
        for charge in self.charges.iter().rev().filter(|charge| charge.net_units > 0) {
            let units = u128::from(charge.net_units);
            within += units;
            latest_us = charge.latest_us.max(latest_us);
            let passed_us = latest_us - charge.earliest_us;
            in_aligned += if window.is_some() && self.aligned_window(charge) == window { units } else { 0 };
            let is_trailing_kept = |units_max| passed_us >= window_us || within <= units_max;
            let is_kept = match limit.algorithm() {
                Algorithm::Sliding | Algorithm::SlidingLog => is_trailing_kept(quota),
                Algorithm::FixedWindow => in_aligned <= quota,
                Algorithm::SlidingCounter => in_aligned <= quota && is_trailing_kept(bound(limit).into()),
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

    /// Returns the number of the aligned window in which a charge was made, or `None` if it may be one of several.
    fn aligned_window(&self, charge: &Charge) -> Option<u64> {
        let window = |us: u64| us / self.limit.window_us();
        let earliest = window(charge.earliest_us - self.skew_us);
        (earliest == window(charge.latest_us + self.skew_us)).then_some(earliest)
    }
}

impl fmt::Display for NetUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} charges, {} of them refunded", self.charges.len(), self.refunds)
    }
}

/// Removes steps from a sequence as long as it violates the guarantee. Describes the violation and the steps.
fn shrunk<S: RefundImplementation>(limit: &Limit, mut steps: Vec<Step>, fresh: &mut impl FnMut() -> S) -> Violation {
    let mut index = steps.len();
    while index > 0 {
        index -= 1;
        let removed = steps.remove(index);
        if run_alone(limit, &steps, &mut fresh()).is_ok() {
            steps.insert(index, removed);
        } else {
            index = index.min(steps.len());
        }
    }
    let violation = run_alone(limit, &steps, &mut fresh())
        .err()
        .unwrap_or_else(|| "not again on a fresh implementation".to_owned());
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
