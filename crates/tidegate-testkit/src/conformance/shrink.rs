//! Shrinks a failing trace to a small one that still fails.
//!
//! The search is greedy: it removes runs of operations (halves, quarters, … single ones), then an unneeded limit, then
//! simplifies the remaining operations. It starts again with each smaller trace that fails, until no candidate fails.
//! Each candidate is run on a new implementation, so their number is bounded.

use super::trace::{Operation, Step, Trace, TraceDemand};

/// Maximum number of candidates that are tried.
const TRIES_MAX: usize = 4_000;

/// Calls `fails` with smaller and smaller traces, and continues from each one for which it returns `true`.
///
/// `trace` must be one that fails; `fails` is not called with it. Returns nothing: `fails` records the traces that
/// fail, and the last of them is the smallest. Ends after at most [`TRIES_MAX`] calls.
pub(super) fn shrink(trace: Trace, mut fails: impl FnMut(&Trace) -> bool) {
    let mut smallest = trace;
    let mut tries = 0;
    loop {
        let better = candidates(&smallest).find(|candidate| {
            tries += 1;
            tries <= TRIES_MAX && fails(candidate)
        });
        match better {
            Some(candidate) => smallest = candidate,
            None => return,
        }
    }
}

/// Returns traces that are a step smaller than this one: shorter ones first, then with fewer limits, then with simpler
/// operations.
fn candidates(trace: &Trace) -> impl Iterator<Item = Trace> + '_ {
    let halvings =
        std::iter::successors(Some(trace.operations.len().div_ceil(2)), |size| (*size > 1).then_some(size / 2));
    let shorter = halvings.flat_map(move |size| {
        (0..trace.operations.len().div_ceil(size.max(1))).map(move |n| without_operations(trace, n * size, size))
    });
    let narrower = (0..trace.slots.len()).rev().filter_map(|slot| without_slot(trace, slot));
    let simpler = (0..trace.operations.len()).flat_map(move |n| {
        simpler_operations(&trace.operations[n], trace.wandering).into_iter().map(move |operation| {
            let mut candidate = trace.clone();
            candidate.operations[n] = operation;
            candidate
        })
    });
    shorter.chain(narrower).chain(simpler)
}

fn without_operations(trace: &Trace, from: usize, count: usize) -> Trace {
    let mut candidate = trace.clone();
    let to = (from + count).min(candidate.operations.len());
    candidate.operations.drain(from..to);
    candidate
}

/// Returns the trace without its last limit and the operations on that. Returns `None` if `slot` is not the index of
/// the last limit, or there is only one.
fn without_slot(trace: &Trace, slot: usize) -> Option<Trace> {
    if trace.slots.len() == 1 || slot + 1 != trace.slots.len() {
        return None;
    }
    let mut candidate = trace.clone();
    candidate.slots.remove(slot);
    for operation in &mut candidate.operations {
        if let Operation::Check(asks) = operation {
            asks.retain(|ask| ask.slot != slot);
        }
    }
    candidate.operations.retain(|operation| match operation {
        Operation::Check(asks) => !asks.is_empty(),
        Operation::Change { slot: of, .. }
        | Operation::Fill { slot: of, .. }
        | Operation::Move(Step::ToEdge { slot: of, .. }) => *of != slot,
        Operation::Reset(ask) => ask.slot != slot,
        _ => true,
    });
    Some(candidate)
}

fn simpler_operations(operation: &Operation, wandering: bool) -> Vec<Operation> {
    match operation {
        Operation::Check(asks) => simpler_checks(asks, wandering),
        Operation::Move(Step::By(us)) if *us > 1 => {
            vec![Operation::Move(Step::By(1)), Operation::Move(Step::By(us / 2)), Operation::Move(Step::By(us - 1))]
        }
        Operation::Move(Step::Back(us)) if *us > 1 => {
            vec![Operation::Move(Step::Back(1)), Operation::Move(Step::Back(us / 2))]
        }
        Operation::Fill { slot, count, step_us } if *count > 1 => {
            [count / 2, count - 1].map(|count| Operation::Fill { slot: *slot, count, step_us: *step_us }).into()
        }
        Operation::Refund { nth, with_present_limits } if *nth > 0 => {
            vec![Operation::Refund { nth: nth / 2, with_present_limits: *with_present_limits }]
        }
        _ => Vec::new(),
    }
}

fn simpler_checks(asks: &[TraceDemand], wandering: bool) -> Vec<Operation> {
    let mut simpler = Vec::new();
    if asks.len() > 1 && !wandering {
        let without = |n: usize| asks.iter().enumerate().filter(|(i, _)| *i != n).map(|(_, ask)| *ask).collect();
        simpler.extend((0..asks.len()).map(|n| Operation::Check(without(n))));
    }
    let with = |n: usize, ask: TraceDemand| {
        let mut asks = asks.to_vec();
        asks[n] = ask;
        Operation::Check(asks)
    };
    for (n, ask) in asks.iter().enumerate() {
        for cost in [1, ask.cost / 2] {
            if cost < ask.cost {
                simpler.push(with(n, TraceDemand { cost, ..*ask }));
            }
        }
        if ask.key > 0 {
            simpler.push(with(n, TraceDemand { key: 0, ..*ask }));
        }
    }
    simpler
}
