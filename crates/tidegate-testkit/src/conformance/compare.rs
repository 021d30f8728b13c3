//! Runs a trace on an implementation and on the oracle, and compares their decisions.

use std::fmt;

use tidegate_core::{Check, Decision, Demand, LimitStatus, Source, Timestamp};

use super::Implementation;
use super::trace::{NEWEST, Operation, Slot, Trace, TraceDemand, demands};
use crate::oracle::Oracle;

/// The first decision in which an implementation differs from the oracle.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The index of the operation in the trace.
    pub operation: usize,
    /// The time of the check.
    pub now: Timestamp,
    /// The oracle's decision, converted by [`Implementation::as_seen`].
    pub expected: Decision,
    /// The implementation's decision.
    pub got: Decision,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "operation {} at {:?}:", self.operation, self.now)?;
        for (number, expected) in self.expected.limits.iter().enumerate() {
            let got = self.got.limits.get(number);
            let mark = if got == Some(expected) { ' ' } else { '!' };
            writeln!(f, "{mark} limit {number} expected {expected:?}")?;
            writeln!(f, "{mark}              got {got:?}")?;
        }
        if self.expected.at != self.got.at {
            writeln!(f, "! decided at {:?}", self.got.at)?;
        }
        Ok(())
    }
}

/// Runs a trace on an implementation and on a new oracle, and compares their decisions. The implementation must have no counters.
///
/// # Errors
/// If a decision differs in anything but its source. Contains the first one; the rest of the trace is not run.
pub fn compare(trace: &Trace, implementation: &mut dyn Implementation) -> Result<(), Box<Difference>> {
    let mut run = Run::new(trace);
    for (number, operation) in trace.operations.iter().enumerate() {
        run.step(number, operation, implementation)?;
    }
    Ok(())
}

/// The state of a trace while it runs on an implementation and the oracle.
struct Run<'t> {
    trace: &'t Trace,
    oracle: Oracle,
    now: Timestamp,
    retry_at: Timestamp,
    slots: Vec<Slot>,
    /// The admitted checks that are not refunded yet, with the limits then, the oracle's and the implementation's decision.
    receipts: Vec<(Vec<TraceDemand>, Vec<Slot>, Decision, Decision)>,
}

impl<'t> Run<'t> {
    fn new(trace: &'t Trace) -> Run<'t> {
        let (now, slots) = (trace.start, trace.slots.clone());
        Run { trace, oracle: Oracle::new(), now, retry_at: now, slots, receipts: Vec::new() }
    }

    fn step(
        &mut self,
        number: usize,
        operation: &Operation,
        implementation: &mut dyn Implementation,
    ) -> Result<(), Box<Difference>> {
        match operation {
            Operation::Move(step) => {
                self.now = step.from(self.now, self.retry_at, &self.slots);
                self.reset_expired_counters(implementation);
            }
            Operation::Check(asks) => self.check(number, asks, implementation)?,
            Operation::Fill { slot, count, step_us } => self.fill(number, *slot, (*count, *step_us), implementation)?,
            Operation::Refund { nth, with_present_limits } => self.refund(*nth, *with_present_limits, implementation),
            Operation::Reset(ask) => self.reset(ask, implementation),
            Operation::Change { slot, limit } => self.slots[*slot].limit = *limit,
        }
        Ok(())
    }

    fn check(
        &mut self,
        number: usize,
        asks: &[TraceDemand],
        implementation: &mut dyn Implementation,
    ) -> Result<(), Box<Difference>> {
        let demands = demands(asks, &self.slots);
        let check = Check::new(&demands).expect("no counter twice");
        let by_oracle = self.oracle.check(self.now, &check);
        let got = implementation.check(self.now, &check);
        let expected = Decision { source: got.source, ..implementation.as_seen(by_oracle.clone()) };
        if expected != got {
            return Err(Box::new(Difference { operation: number, now: self.now, expected, got }));
        }
        self.retry_at = self.now.plus_micros(by_oracle.retry_after().as_micros().unwrap_or(0));
        if by_oracle.allowed() {
            self.receipts.push((asks.to_vec(), self.slots.clone(), by_oracle, got));
        }
        Ok(())
    }

    /// Checks one unit of the slot's limit for the first key, then charges up to `count` single units, `step_us`
    /// microseconds apart.
    ///
    /// The check makes oracle and implementation drop expired entries. It charges its unit if it is admitted. After it, only
    /// as many units are charged as remain and fit before the next unit expires. Their decisions are not compared. Each
    /// can be refunded later. The time of the run moves to that of the last charge.
    ///
    /// # Errors
    /// If the decisions about the check differ. `number` is the index of the operation in the trace, for the error.
    fn fill(
        &mut self,
        number: usize,
        slot: usize,
        (count, step_us): (u64, u64),
        implementation: &mut dyn Implementation,
    ) -> Result<(), Box<Difference>> {
        let ask = TraceDemand { key: 0, slot, cost: 1 };
        self.check(number, &[ask], implementation)?;
        let demand = ask.demand(&self.slots);
        let line = self.oracle.check(self.now, &Check::one(&demand.cost(0))).limits[0];
        let stays_us = line.next_after.as_micros().unwrap_or(0).saturating_sub(1);
        let count = count.min(line.remaining.into()).min(stays_us / step_us.max(1));
        let start = self.now;
        let instants = || (1..=count).map(move |nth| start.plus_micros(nth * step_us));
        self.oracle.charge_at(&demand, instants());
        implementation.fill(&demand, &mut instants());
        for at in instants() {
            let line = LimitStatus { allowed: true, cost: 1, ..line };
            let decision = Decision::new(at, Source::Store, std::iter::once(line).collect());
            self.receipts.push((vec![ask], self.slots.clone(), decision.clone(), decision));
            self.now = at;
        }
        Ok(())
    }

    fn refund(&mut self, nth: usize, with_present_limits: bool, implementation: &mut dyn Implementation) {
        if self.receipts.is_empty() {
            return;
        }
        let (asks, then, by_oracle, by_implementation) =
            self.receipts.remove(if nth == NEWEST { self.receipts.len() - 1 } else { nth % self.receipts.len() });
        let slots = if with_present_limits { &self.slots } else { &then };
        let demands: Vec<Demand<'_>> = demands(&asks, slots);
        let check = Check::new(&demands).expect("no counter twice");
        self.oracle.refund(self.now, &check, &by_oracle);
        implementation.refund(self.now, &check, &by_implementation);
    }

    /// Resets all expired counters in a wandering trace. Does nothing in a forward trace.
    ///
    /// A store may or may not have deleted a counter that has expired under the limit it was written with. While time
    /// goes forward and limits do not change, that makes no difference. In a wandering trace it could, so there such
    /// counters are always deleted.
    fn reset_expired_counters(&mut self, implementation: &mut dyn Implementation) {
        if !self.trace.wandering {
            return;
        }
        for slot in 0..self.slots.len() {
            let demand = TraceDemand { key: 0, slot, cost: 0 }.demand(&self.slots);
            if self.oracle.is_expired(self.now, &demand) {
                self.oracle.reset(&demand);
                implementation.reset(self.now, &demand);
            }
        }
    }

    /// Resets the counter of `ask`. A wandering trace uses all its counters in every check, so there all are reset.
    fn reset(&mut self, ask: &TraceDemand, implementation: &mut dyn Implementation) {
        let every = (0..self.slots.len()).map(|slot| TraceDemand { slot, ..*ask });
        let asks: Vec<TraceDemand> = if self.trace.wandering { every.collect() } else { vec![*ask] };
        for ask in asks {
            let demand = ask.demand(&self.slots);
            self.oracle.reset(&demand);
            implementation.reset(self.now, &demand);
        }
    }
}
