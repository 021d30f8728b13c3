//! Compares the decisions of the memory store with those on plain states.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::*;
use crate::algorithm::{State, decide_limits};
use crate::key::Scope;
use crate::time::ManualClock;

/// Limits of every algorithm, with different windows, so that each has its own counter. The others of a row have the state
/// machine of the first: in the scope of a rule, they count on its counter.
const LIMITS: [[&str; 4]; 10] = [
    ["9/100ms", "4/100ms", "12/50ms", "9/100ms count_denied=true"],
    ["7/90ms fixed-window", "3/90ms sliding-counter", "9/45ms fixed-window", "7/90ms fixed-window count_denied=true"],
    // A bucket's window is its scale: 2 × 81920, and 83 ms, differ from 81920 only in its upper or only in its lower bits.
    ["8/81920us token-bucket", "8/81920us token-bucket burst=3", "8/163840us token-bucket", "8/83ms token-bucket"],
    ["20/300ms sliding-log", "10/300ms", "30/150ms sliding-log", "20/300ms sliding-log count_denied=true"],
    ["6/70ms sliding-counter", "4/70ms fixed-window", "9/140ms sliding-counter", "6/70ms sliding-counter"],
    ["5/60ms leaky-bucket queue=4", "5/60ms leaky-bucket queue=2", "10/120ms leaky-bucket", "9/60ms leaky-bucket"],
    [
        "20/110ms token-bucket burst=8 count_denied=true",
        "7/110ms token-bucket",
        "9/110ms token-bucket",
        "7/55ms token-bucket",
    ],
    ["5000/120ms", "4000/120ms", "900/120ms", "5000/60ms"],
    ["30/75ms count_denied=true", "11/75ms", "5/75ms count_denied=true", "11/150ms"],
    [
        "30/95ms sliding-counter count_denied=true",
        "6/95ms sliding-counter",
        "6/95ms fixed-window",
        "3/95ms fixed-window",
    ],
];
/// The subjects of a run are prefixes of this text, so that two of them may begin at one address in memory.
const SUBJECT: &str = "user:42";
const SUBJECT_BYTES: [usize; 10] = [7, 6, 7, 0, 3, 2, 3, 1, 5, 4];
const SCOPES: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];

/// A sequence of pseudorandom numbers.
pub(super) struct Random(pub(super) u64);

impl Random {
    /// Returns a number below `bound`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Random checks of some limits, on a store and on plain states.
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
    /// Whether the limit of a counter changes from check to check, as after a reload.
    changes_limits: bool,
    /// The step from which on no log may grow.
    full_from: usize,
    seed: u64,
}

impl Run {
    fn new(first: usize, count: usize, is_one_subject: bool) -> Run {
        let (seed, full_from) = ((8 * first + count) as u64, usize::MAX);
        let (goes_back, changes_limits) = (false, false);
        Run { first, count, is_one_subject, steps: 3_000, pause_us: 16_000, goes_back, changes_limits, full_from, seed }
    }

    /// Returns the time until the next check: often the edge that the last decision announced, or a microsecond before.
    fn pause(&self, random: &mut Random, edge_us: Option<u64>) -> u64 {
        let edge_us = edge_us.filter(|edge_us| (1..2 * self.pause_us).contains(edge_us));
        match (edge_us, random.below(6)) {
            (Some(edge_us), 0) => edge_us,
            (Some(edge_us), 1) => edge_us - 1,
            _ => random.below(self.pause_us),
        }
    }

    /// Returns the demands of one check.
    fn demands(&self, random: &mut Random) -> Vec<Demand<'static>> {
        let demand = |index: usize| {
            let row = LIMITS[(self.first + index) % LIMITS.len()];
            let limit: Limit = row[if self.changes_limits { random.below(4) as usize } else { 0 }].parse().unwrap();
            let subject = &SUBJECT[..SUBJECT_BYTES[if self.is_one_subject { 0 } else { index }]];
            let scope = if self.changes_limits { Scope::rule("rule", SCOPES[index]) } else { Scope::Explicit };
            let cost = match random.below(24) {
                0 => limit.quota(),
                1 => limit.quota() + 1,
                other => [0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 9][other as usize % 11],
            };
            Demand::new(limit, Key::scoped(subject, scope).unwrap()).cost(cost)
        };
        (0..self.count).map(demand).collect()
    }
}

/// Compares every decision of a run. Returns the highest count of refunded units on a bucket before a charge that was
/// refunded, too.
fn compare(run: Run) -> u64 {
    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_000_000_000)));
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let (mut random, mut edge_us, mut refunded_before) = (Random(run.seed), None, 0);
    let mut admitted: Vec<(Vec<Demand<'static>>, Decision)> = Vec::new();
    let mut states = vec![State::default(); run.count];
    for step in 0..run.steps {
        if run.goes_back && random.below(10) == 0 {
            clock.set(Timestamp::from_micros(Clock::now(&*clock).as_micros() - random.below(20_000)));
        } else {
            clock.advance(Duration::from_micros(run.pause(&mut random, edge_us)));
        }
        if step == run.full_from {
            store.budget.change(0, store.max_bytes());
        }
        let demands = run.demands(&mut random);
        let check = Check::new(&demands).unwrap();
        let now = Clock::now(&*clock);

        let expected = decide_limits(now, &demands, &mut states, step < run.full_from);
        let decision = if step % 3 == 1 { store.check_batch(&[check]).remove(0) } else { store.check(&check) };
        assert_eq!((decision.at, &decision.limits), (now, &expected), "step {step}: {demands:?}");
        assert_reported(&store);
        let status = expected[random.below(demands.len() as u64) as usize];
        edge_us = [status.retry_after, status.next_after, status.reset_after][random.below(3) as usize].as_micros();

        if decision.allowed() && random.below(2) == 0 {
            admitted.push((demands, decision));
        }
        // The newest admission or, as often, one of the ten before it, so that charges are refunded in any order.
        // Without memory, a refund on a bucket may do nothing.
        let refunds = step > run.steps / 2 && step < run.full_from;
        if refunds && !admitted.is_empty() && random.below(4) == 0 {
            let back = random.below(20).saturating_sub(10).min(admitted.len() as u64 - 1) as usize;
            let (demands, decision) = admitted.remove(admitted.len() - 1 - back);
            store.refund(&Check::new(&demands).unwrap(), &decision);
            for ((demand, status), state) in demands.iter().zip(&decision.limits).zip(&mut states) {
                let receipt = PastCharge::of(decision.at, status);
                receipt.into_iter().for_each(|receipt| state.refund(&demand.limit, now, receipt));
                refunded_before = refunded_before.max(status.refunded_before);
            }
        }
    }
    refunded_before
}

/// Checks that the budget knows of all memory in use after each decision.
fn assert_reported(store: &MemoryStore) {
    let used = store.budget.used();
    store.shards.iter().for_each(|Padded(shard)| shard.lock().report(&store.budget));
    assert_eq!(used, store.budget.used(), "bytes in use that were not reported");
}

#[test]
fn one_limit_is_decided_like_on_a_plain_state() {
    for (first, limits) in LIMITS.iter().enumerate() {
        let refunded_before = compare(Run::new(first, 1, true));
        assert_eq!(refunded_before > 0, limits[0].contains("bucket"), "refunds of a bucket are counted");
    }
}

#[test]
fn several_limits_are_decided_like_on_plain_states() {
    for count in [2, 3, 4, 5, LIMITS.len()] {
        for first in 0..LIMITS.len() {
            for is_one_subject in [true, false] {
                compare(Run::new(first, count, is_one_subject));
            }
        }
    }
}

/// In runs so short that no counter expires: a store drops an expired counter, and a clock that goes back far enough
/// would make a plain state count again.
#[test]
fn clock_that_goes_back_is_handled_like_on_plain_states() {
    for (first, count, seed) in short_runs() {
        compare(Run { steps: 50, pause_us: 600, goes_back: true, seed, ..Run::new(first, count, true) });
    }
}

/// In runs so short that no counter expires, because a limit with a longer window would still count it.
#[test]
fn counter_whose_limit_changes_is_decided_like_on_a_plain_state() {
    for (first, count, seed) in short_runs() {
        let run = Run { steps: 60, pause_us: 600, changes_limits: true, seed, ..Run::new(first, count, seed % 2 == 0) };
        compare(run);
        compare(Run { goes_back: true, ..run });
    }
}

#[test]
fn log_that_may_not_grow_is_decided_like_on_a_plain_state() {
    for (first, count, seed) in short_runs().filter(|(_, _, seed)| *seed < 5) {
        let run = Run { steps: 600, pause_us: 4_000, seed, ..Run::new(first, count, seed % 2 == 0) };
        compare(Run { full_from: 40, ..run });
    }
}

/// A clock that is read too early: another check is decided before this one gets the lock. A second reading is right.
struct EarlyClock {
    early_us: AtomicU64,
}

impl Clock for EarlyClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_000_000_000 - self.early_us.swap(0, Ordering::SeqCst))
    }
}

#[test]
fn check_that_was_overtaken_is_decided_at_the_time_of_a_second_reading() {
    let check = |store: &MemoryStore, demands: &[Demand<'_>]| store.check(&Check::new(demands).unwrap()).at;
    for subjects in [&["a"][..], &["a", "a"], &["a", "b"], &["a", "b", "c"], &["a", "b", "c", "d", "e"]] {
        let demand = |(index, subject): (usize, &&'static str)| {
            Demand::new(LIMITS[index][0].parse().unwrap(), Key::new(*subject).unwrap())
        };
        let demands: Vec<Demand<'_>> = subjects.iter().enumerate().map(demand).collect();
        // The overtaking check counts one of the subjects. The other shards have seen no later time.
        for overtaken in &demands {
            let clock = Arc::new(EarlyClock { early_us: AtomicU64::new(10) });
            let store = MemoryStore::builder().clock(clock.clone()).build();
            check(&store, &demands);
            let overtaking = check(&store, &[*overtaken]);
            clock.early_us.store(5, Ordering::SeqCst);
            assert_eq!(check(&store, &demands), overtaking, "{subjects:?} {overtaken:?}");
        }
    }
}

/// Returns the first limit, the number of limits and the seed of many runs.
fn short_runs() -> impl Iterator<Item = (usize, usize, u64)> {
    (0..LIMITS.len()).flat_map(|first| (1..=4).flat_map(move |count| (0..20).map(move |seed| (first, count, seed))))
}
