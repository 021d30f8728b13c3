//! Guarantees of each algorithm, checked on random traces without the oracle.
//!
//! | property | holds for |
//! |---|---|
//! | no trailing window holds more than the stated bound | all, each with its bound |
//! | a denial changes nothing: the run without it is the same | all |
//! | denied at every instant before `retry_after`, admitted at it | all |
//! | `retry_after` is less than one tick later than that of an exact window, never earlier | `sliding` above its exact quota |
//! | admitted requests start at least their cost × window / quota apart | `leaky-bucket` |
//!
//! The traces are those of the comparison with the oracle, made [`quiet`]: time only goes forward, nothing is refunded,
//! reset or changed, and denials are not charged. A failing trace is shrunk.

use tidegate_core::{Algorithm, Check, Decision, Limit, SLIDING_EXACT_QUOTA_MAX, Timestamp};

use super::trace::{Operation, Step, Trace, TraceDemand, demands};
use super::{Implementation, Random, shrink};

/// The description of a violated property, with the shrunk trace.
pub type Violation = String;

/// Checks all properties of an algorithm, each on `count` random traces. `fresh` creates an implementation without counters.
///
/// # Errors
/// If a property is violated. Describes the first violation, on a shrunk trace.
pub fn all<S: Implementation>(
    algorithm: Algorithm,
    count: usize,
    seed: u64,
    mut fresh: impl FnMut() -> S,
) -> Result<(), Violation> {
    for_all(algorithm, count, seed, quiet, |trace| denial_changes_nothing(trace, &mut fresh))?;
    for_all(algorithm, count, seed, quiet, |trace| retry_after_is_exact(trace, &mut fresh(), seed))?;
    for_all(algorithm, count, seed, solo, |trace| stays_within_its_bound(trace, &mut fresh()))?;
    match algorithm {
        Algorithm::Sliding => {
            for_all(algorithm, count, seed, coarse, |trace| retry_after_is_less_than_a_tick_late(trace, &mut fresh()))
        }
        Algorithm::LeakyBucket => for_all(algorithm, count, seed, solo, |trace| starts_are_spaced(trace, &mut fresh())),
        _ => Ok(()),
    }
}

/// Returns the most units that a limit may admit within any trailing window, such as twice the quota of `fixed-window`.
pub fn bound(limit: &Limit) -> u64 {
    let (quota, cost_max) = (u64::from(limit.quota()), u64::from(limit.cost_max()));
    match limit.algorithm() {
        Algorithm::Sliding | Algorithm::SlidingLog => quota,
        // Only one part of the full previous window is still covered, which counts as one unit after rounding up.
        Algorithm::SlidingCounter => 2 * quota - 1,
        Algorithm::FixedWindow => 2 * quota,
        // A full burst, and the units that become available within the window.
        Algorithm::TokenBucket => cost_max + quota,
        _ => cost_max + 1 + quota,
    }
}

/// Removes all operations but checks and forward moves of the clock, and turns off `count_denied`. Never returns
/// `None`.
pub fn quiet(mut trace: Trace) -> Option<Trace> {
    trace.wandering = false;
    for slot in &mut trace.slots {
        slot.limit = slot.limit.with_count_denied(false);
    }
    trace.operations.retain(|operation| match operation {
        Operation::Move(step) => !matches!(step, Step::Back(_)),
        Operation::Check(_) => true,
        _ => false,
    });
    Some(trace)
}

/// Makes a trace [`quiet`] and reduces it to its first limit and a single counter. Never returns `None`.
pub fn solo(trace: Trace) -> Option<Trace> {
    let mut trace = quiet(trace)?;
    trace.slots.truncate(1);
    for operation in &mut trace.operations {
        match operation {
            Operation::Check(asks) => {
                asks.truncate(1);
                asks[0] = TraceDemand { key: 0, slot: 0, ..asks[0] };
            }
            Operation::Move(Step::ToEdge { slot, .. }) => *slot = 0,
            _ => {}
        }
    }
    Some(trace)
}

/// Makes a trace [`solo`]. Returns `None` if its quota is at most [`SLIDING_EXACT_QUOTA_MAX`], so that it has no ticks.
fn coarse(trace: Trace) -> Option<Trace> {
    solo(trace).filter(|trace| trace.slots[0].limit.quota() > SLIDING_EXACT_QUOTA_MAX)
}

/// Checks a property on `count` random traces, and shrinks the first one that violates it.
///
/// `prepare` adapts each random trace; one for which it returns `None` is skipped and not counted. The error contains
/// the violation on the shrunk trace, and that trace.
fn for_all(
    algorithm: Algorithm,
    count: usize,
    seed: u64,
    prepare: impl Fn(Trace) -> Option<Trace>,
    mut property: impl FnMut(&Trace) -> Result<(), Violation>,
) -> Result<(), Violation> {
    let mut random = Random::new(seed);
    let traces = std::iter::repeat_with(|| prepare(random.trace(algorithm))).flatten();
    for trace in traces.take(count) {
        if let Err(violation) = property(&trace) {
            let mut smallest = format!("{violation}\n{trace}");
            shrink::shrink(trace, |candidate| match property(candidate) {
                Ok(()) => false,
                Err(violation) => {
                    smallest = format!("{violation}\n{candidate}");
                    true
                }
            });
            return Err(smallest);
        }
    }
    Ok(())
}

/// A check of a trace, with its time and its decision.
struct Event {
    now: Timestamp,
    asks: Vec<TraceDemand>,
    decision: Decision,
}

/// Runs a quiet trace on `implementation` and calls `each` after every check.
///
/// `each` may make further checks on the implementation. It returns the time at which the trace continues, or an error, which
/// ends the run and is returned.
fn walk<S: Implementation>(
    trace: &Trace,
    implementation: &mut S,
    mut each: impl FnMut(&Event, &mut S) -> Result<Timestamp, Violation>,
) -> Result<(), Violation> {
    let (mut now, mut retry_at) = (trace.start, trace.start);
    for operation in &trace.operations {
        match operation {
            Operation::Move(step) => now = step.from(now, retry_at, &trace.slots),
            Operation::Check(asks) => {
                let decision = check(trace, implementation, now, asks);
                retry_at = now.plus_micros(decision.retry_after().as_micros().unwrap_or(0));
                now = each(&Event { now, asks: asks.clone(), decision }, implementation)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Makes a check at `now` with the limits of the trace.
fn check(trace: &Trace, implementation: &mut impl Implementation, now: Timestamp, asks: &[TraceDemand]) -> Decision {
    let demands = demands(asks, &trace.slots);
    implementation.check(now, &Check::new(&demands).expect("no counter twice"))
}

/// Checks that the admitted checks of a trace get the same decisions on an implementation that sees no denied checks.
fn denial_changes_nothing<S: Implementation>(trace: &Trace, fresh: &mut impl FnMut() -> S) -> Result<(), Violation> {
    let mut admitted = Vec::new();
    walk(trace, &mut fresh(), |event, _| {
        if event.decision.allowed() {
            admitted.push((event.now, event.asks.clone(), event.decision.clone()));
        }
        Ok(event.now)
    })?;
    let mut without_denials = fresh();
    for (now, asks, decision) in admitted {
        let without = check(trace, &mut without_denials, now, &asks);
        if without != decision {
            return Err(format!(
                "at {now:?} the decision depends on earlier denials:\n  with {decision:?}\n  without {without:?}"
            ));
        }
    }
    Ok(())
}

/// Checks that `retry_after` of each denial is exact: the check is denied at every earlier instant and admitted then.
///
/// Repeats the check at once, at two random instants in between, one microsecond early, and on time.
fn retry_after_is_exact<S: Implementation>(trace: &Trace, implementation: &mut S, seed: u64) -> Result<(), Violation> {
    let mut random = Random::new(seed);
    walk(trace, implementation, |event, implementation| {
        let wait = event.decision.retry_after().as_micros();
        let Some(wait_us) = wait.filter(|_| !event.decision.allowed()) else {
            return Ok(event.now);
        };
        if wait_us == 0 {
            return Err(format!("at {:?} denied with a retry_after of zero: {:?}", event.now, event.decision));
        }
        let retry_at = event.now.as_micros() + wait_us;
        // The longest wait only means "not before that", and no check is possible after the last timestamp.
        if wait_us == Timestamp::MAX.as_micros() || retry_at > Timestamp::MAX.as_micros() {
            return Ok(event.now);
        }
        let mut before_us = [0, random.below(wait_us), random.below(wait_us), wait_us - 1];
        before_us.sort_unstable();
        for passed_us in before_us {
            let now = event.now.plus_micros(passed_us);
            let again = check(trace, implementation, now, &event.asks);
            if again.allowed() || again.retry_after().as_micros() != Some(wait_us - passed_us) {
                return Err(format!(
                    "at {:?} retry_after was {wait_us}µs, but after {passed_us}µs: {again:?}",
                    event.now
                ));
            }
        }
        let then = Timestamp::from_micros(retry_at);
        let last = check(trace, implementation, then, &event.asks);
        if !last.allowed() {
            return Err(format!("at {:?} retry_after was {wait_us}µs, but denied then: {last:?}", event.now));
        }
        Ok(then)
    })
}

/// Checks that no trailing window that ends with a check holds more admitted units than [`bound`].
fn stays_within_its_bound<S: Implementation>(trace: &Trace, implementation: &mut S) -> Result<(), Violation> {
    let limit = &trace.slots[0].limit;
    let mut admitted = Admitted::default();
    walk(trace, implementation, |event, _| {
        admitted.note(event);
        let units = admitted.within(event.now, limit.window_us());
        if units > bound(limit) {
            return Err(format!(
                "{units} units in the window that ends at {:?}; the bound is {}",
                event.now,
                bound(limit)
            ));
        }
        Ok(event.now)
    })
}

/// Checks that `retry_after` of each denial ends at the time at which an exact window has room, or less than a tick
/// later.
fn retry_after_is_less_than_a_tick_late<S: Implementation>(
    trace: &Trace,
    implementation: &mut S,
) -> Result<(), Violation> {
    let limit = &trace.slots[0].limit;
    let tick_us = limit.window_us().div_ceil(u64::from(SLIDING_EXACT_QUOTA_MAX));
    let mut admitted = Admitted::default();
    walk(trace, implementation, |event, _| {
        let wait = event.decision.retry_after().as_micros().filter(|_| !event.decision.allowed());
        if let Some(wait_us) = wait {
            let exact = admitted.exact_retry_at(event.asks[0].cost, limit);
            let ends_at = event.now.as_micros() + wait_us;
            if ends_at < exact || ends_at >= exact + tick_us {
                return Err(format!(
                    "at {:?} retry_after ends at {ends_at}, the exact time is {exact}, a tick is {tick_us}",
                    event.now
                ));
            }
        }
        admitted.note(event);
        Ok(event.now)
    })
}

/// Checks that admitted requests start at least ⌊cost × window / quota⌋ apart, for the cost of the earlier one.
///
/// One grain of time less is accepted, since a start may have been rounded up by that.
fn starts_are_spaced<S: Implementation>(trace: &Trace, implementation: &mut S) -> Result<(), Violation> {
    let limit = &trace.slots[0].limit;
    let grain_us = (u128::from(limit.cost_max()) + 1) * u128::from(limit.window_us().div_ceil(1 << 20)) / 8_500_000_000;
    let mut next_start = 0_u128;
    walk(trace, implementation, |event, _| {
        let cost = event.asks[0].cost;
        // The longest wait only means that the start is not before that.
        let wait = event.decision.retry_after().as_micros().filter(|wait_us| *wait_us < (1 << 52) - 1);
        if let (true, 1.., Some(wait_us)) = (event.decision.allowed(), cost, wait) {
            let start = u128::from(event.now.as_micros() + wait_us);
            if start + grain_us < next_start {
                return Err(format!("admitted at {:?} to start at {start}, before {next_start}", event.now));
            }
            next_start = start + u128::from(cost) * u128::from(limit.window_us()) / u128::from(limit.quota());
        }
        Ok(event.now)
    })
}

/// Admissions, oldest first, as (time in microseconds, units).
#[derive(Default)]
struct Admitted(Vec<(u64, u64)>);

impl Admitted {
    fn note(&mut self, event: &Event) {
        if event.decision.allowed() {
            self.0.push((event.now.as_micros(), event.asks[0].cost.into()));
        }
    }

    /// Returns the units admitted in (now − window, now]. `now` must not be before the last admission.
    fn within(&self, now: Timestamp, window_us: u64) -> u64 {
        self.0.iter().filter(|(at, _)| at + window_us > now.as_micros()).map(|(_, units)| units).sum()
    }

    /// Returns the first time, in microseconds, at which an exact window has room for `cost`, which it must not have
    /// yet.
    ///
    /// # Panics
    /// If `cost` exceeds the quota.
    fn exact_retry_at(&self, cost: u32, limit: &Limit) -> u64 {
        let total: u64 = self.0.iter().map(|(_, units)| units).sum();
        let mut excess = (total + u64::from(cost)).saturating_sub(limit.quota().into());
        for (at, units) in &self.0 {
            if excess <= *units {
                return at + limit.window_us();
            }
            excess -= units;
        }
        unreachable!("a cost above the quota has the wait never")
    }
}
