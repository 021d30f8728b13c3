//! Compares the fast paths of the memory store with its general path and with [`decide`] on plain states.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::*;
use crate::algorithm::decide;
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

/// Decides by plain states, of which a log grows only if it may.
fn decide_by(states: &mut [State], now: Timestamp, demands: &[Demand<'_>], may_grow: bool) -> Decision {
    if may_grow {
        return decide(now, demands, states);
    }
    let fits = |(demand, state): (&Demand<'_>, &State)| {
        demand.cost.units() == 0 || state.fits(&demand.limit, now, demand.cost.units())
    };
    let allowed = demands.iter().zip(states.iter()).all(fits);
    let apply = |(demand, state)| algorithm::apply(allowed, now, demand, state, false);
    let limits = demands.iter().zip(states).map(apply).collect();
    Decision::new(now, Source::Store, limits)
}

/// What a run has shown.
struct Outcome {
    /// How many decisions of several limits were made in place.
    in_place: usize,
    /// The highest count of refunded units on a bucket before a charge that was refunded, too.
    refunded_before: u64,
}

/// Compares every decision of a run.
fn compare(run: Run) -> Outcome {
    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_000_000_000)));
    let store = || MemoryStore::builder().clock(clock.clone()).build();
    let (fast, general) = (store(), store());
    let (mut random, mut in_place, mut edge_us, mut refunded_before) = (Random(run.seed), 0, None, 0);
    let mut admitted: Vec<(Vec<Demand<'static>>, Decision)> = Vec::new();
    let mut states: Vec<State> = run.demands(&mut random).iter().map(|demand| State::unused(&demand.limit)).collect();
    for step in 0..run.steps {
        match run.goes_back && random.below(10) == 0 {
            true => clock.set(Timestamp::from_micros(Clock::now(&*clock).as_micros() - random.below(20_000))),
            false => clock.advance(Duration::from_micros(run.pause(&mut random, edge_us))),
        }
        if step == run.full_from {
            [&fast, &general].iter().for_each(|store| store.budget.change(0, store.max_bytes()));
        }
        let demands = run.demands(&mut random);
        let check = Check::new(&demands).unwrap();
        let now = Clock::now(&*clock);

        let expected = decide_by(&mut states, now, &demands, step < run.full_from);
        let mut by_general = Decision { limits: LimitStatuses::new(), ..expected };
        by_general.at = general.check_in_general(now, &demands, &mut by_general.limits);
        let mut by_fast = Decision { limits: LimitStatuses::new(), ..expected };
        match (fast.admit_in_place(now, &demands, &mut by_fast.limits), &demands[..], step % 3) {
            (Some(at), ..) => (by_fast.at, in_place) = (at, in_place + 1),
            (None, [one], 0) => by_fast.limits.push(fast.check_one(&one.limit, one.key, one.cost)),
            (None, _, 1) => by_fast = fast.check_batch(&[check]).remove(0),
            (None, ..) => by_fast = fast.check(&check),
        }
        let status = expected.limits[random.below(demands.len() as u64) as usize];
        edge_us = [status.retry_after, status.next_after, status.reset_after][random.below(3) as usize].as_micros();
        assert_eq!(by_general, expected, "general path, step {step}: {demands:?}");
        assert_eq!(by_fast, expected, "fast path, step {step}: {demands:?}");
        assert_reported(&fast);

        if expected.allowed() && random.below(2) == 0 {
            admitted.push((demands, expected));
        }
        // The newest admission or, as often, one of the ten before it, so that charges are refunded in any order. A bucket
        // with refunds is decided on the general path, so they begin late. Without memory, a refund on a bucket may do
        // nothing.
        let refunds = step > run.steps / 2 && step < run.full_from;
        if refunds && !admitted.is_empty() && random.below(4) == 0 {
            let back = random.below(20).saturating_sub(10).min(admitted.len() as u64 - 1) as usize;
            let (demands, decision) = admitted.remove(admitted.len() - 1 - back);
            let check = Check::new(&demands).unwrap();
            fast.refund(&check, &decision);
            general.refund(&check, &decision);
            for ((demand, status), state) in demands.iter().zip(&decision.limits).zip(&mut states) {
                let receipt = Receipt::of(decision.at, status);
                receipt.into_iter().for_each(|receipt| state.refund(&demand.limit, now, receipt));
                refunded_before = refunded_before.max(status.refunded_before);
            }
        }
    }
    Outcome { in_place, refunded_before }
}

/// Checks that the budget knows of all memory in use after each decision.
fn assert_reported(store: &MemoryStore) {
    let used = store.budget.used();
    store.shards.iter().for_each(|Padded(shard)| shard.lock().report(&store.budget));
    assert_eq!(used, store.budget.used(), "bytes in use that were not reported");
}

#[test]
fn one_limit_is_decided_like_on_the_general_path() {
    for (first, limits) in LIMITS.iter().enumerate() {
        let outcome = compare(Run::new(first, 1, true));
        assert_eq!(outcome.in_place, 0, "a single limit is decided by `decide_one`");
        let is_bucket = limits[0].contains("bucket");
        assert_eq!(outcome.refunded_before > 0, is_bucket, "refunds of a bucket are counted");
    }
}

#[test]
fn several_limits_are_decided_like_on_the_general_path() {
    for count in 2..=4 {
        for first in 0..LIMITS.len() {
            for is_one_subject in [true, false] {
                let Outcome { in_place, .. } = compare(Run::new(first, count, is_one_subject));
                assert!((75..2_850).contains(&in_place), "both paths must run: {in_place} of 3000 in place");
            }
        }
    }
}

#[test]
fn more_limits_than_the_fast_path_takes_are_decided_in_general() {
    assert_eq!(compare(Run::new(0, 5, true)).in_place, 0);
    assert_eq!(compare(Run::new(0, LIMITS.len(), false)).in_place, 0);
}

/// In runs so short that no counter expires: a store drops an expired counter, and a clock that goes back far enough
/// would make a plain state count again.
#[test]
fn clock_that_goes_back_is_handled_like_on_the_general_path() {
    for (first, count, seed) in short_runs() {
        compare(Run { steps: 50, pause_us: 600, goes_back: true, seed, ..Run::new(first, count, true) });
    }
}

/// In runs so short that no counter expires, because a limit with a longer window would still count it.
#[test]
fn counter_whose_limit_changes_is_decided_like_on_the_general_path() {
    for (first, count, seed) in short_runs() {
        let run = Run { steps: 60, pause_us: 600, changes_limits: true, seed, ..Run::new(first, count, seed % 2 == 0) };
        compare(run);
        compare(Run { goes_back: true, ..run });
    }
}

#[test]
fn log_that_may_not_grow_is_decided_like_on_the_general_path() {
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
    type Decide = fn(&MemoryStore, &[Demand<'_>]) -> Timestamp;
    let by_check: Decide = |store, demands| store.check(&Check::new(demands).unwrap()).at;
    let in_general: Decide =
        |store, demands| store.check_in_general(store.clock.now(), demands, &mut LimitStatuses::new());
    let in_place: Decide =
        |store, demands| store.admit_in_place(store.clock.now(), demands, &mut LimitStatuses::new()).unwrap();
    for (subjects, decide) in [
        (&["a"][..], by_check),
        (&["a"], in_general),
        (&["a", "a"], in_place),
        (&["a", "a"], in_general),
        (&["a", "b"], in_place),
        (&["a", "b", "c"], in_place),
        (&["a", "b"], in_general),
    ] {
        let demand = |(index, subject): (usize, &&'static str)| {
            Demand::new(LIMITS[index][0].parse().unwrap(), Key::new(*subject).unwrap())
        };
        let demands: Vec<Demand<'_>> = subjects.iter().enumerate().map(demand).collect();
        // The overtaking check counts one of the subjects. The other shards have seen no later time.
        for overtaken in &demands {
            let clock = Arc::new(EarlyClock { early_us: AtomicU64::new(10) });
            let store = MemoryStore::builder().clock(clock.clone()).build();
            by_check(&store, &demands);
            let overtaking = by_check(&store, &[*overtaken]);
            clock.early_us.store(5, Ordering::SeqCst);
            assert_eq!(decide(&store, &demands), overtaking, "{subjects:?} {overtaken:?}");
        }
    }
}

/// Returns the first limit, the number of limits and the seed of many runs.
fn short_runs() -> impl Iterator<Item = (usize, usize, u64)> {
    (0..LIMITS.len()).flat_map(|first| (1..=4).flat_map(move |count| (0..20).map(move |seed| (first, count, seed))))
}
