//! Duration of one operation of the memory store on the longest log, with the worst arguments.
//!
//! A shard is locked during an operation. Each operation runs on a short log and on a long one, as in `script_time`.
//! The times in nanoseconds are recorded.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::{Check, Decision, Demand, Key, Limit, ManualClock, MemoryStore, Timestamp};

use super::campaign::{random, record};

const START_US: u64 = 1_760_000_000_000_000;
const STEP_US: u64 = 7;
/// Maximum ratio of the times on a long and on a short log. The largest real one comes from freeing a hundred segments.
/// A walk over all entries would take hundreds of times as long.
const RATIO_MAX: u32 = 100;

/// A memory store with one full log, and the decisions that filled it.
struct FilledLog {
    clock: Arc<ManualClock>,
    store: MemoryStore,
    entries: u64,
    receipts: Vec<Decision>,
}

fn limit(quota: u64, count_denied: bool) -> Limit {
    let limit: Limit = format!("{}/h sliding-log", quota.clamp(1, 100_000)).parse().unwrap();
    limit.with_count_denied(count_denied)
}

fn demand(limit: Limit, cost: u64) -> Demand<'static> {
    Demand::new(limit, Key::new("k").unwrap()).cost(u32::try_from(cost).unwrap())
}

impl FilledLog {
    fn new(entries: u64) -> FilledLog {
        let clock = Arc::new(ManualClock::default());
        let store = MemoryStore::builder().clock(clock.clone()).build();
        let mut log = FilledLog { clock, store, entries, receipts: Vec::new() };
        log.fill();
        log
    }

    fn fill(&mut self) {
        self.store.reset(&demand(limit(100_000, false), 1));
        self.receipts.clear();
        for entry in 0..self.entries {
            self.at(START_US + entry * STEP_US);
            let decision = self.store.check(&Check::one(&demand(limit(100_000, false), 1)));
            assert!(decision.allowed());
            self.receipts.push(decision);
        }
        self.at(self.now_us());
    }

    fn now_us(&self) -> u64 {
        START_US + self.entries * STEP_US
    }

    fn at(&self, us: u64) {
        self.clock.set(Timestamp::from_micros(us));
    }

    #[allow(clippy::disallowed_methods)] // real time is what is measured
    fn check(&self, limit: Limit, cost: u64) -> Duration {
        let demand = demand(limit, cost);
        let start = Instant::now();
        std::hint::black_box(self.store.check(&Check::one(&demand)));
        start.elapsed()
    }

    #[allow(clippy::disallowed_methods)] // real time is what is measured
    fn refund(&self, entry: u64) -> Duration {
        let demand = demand(limit(100_000, false), 1);
        let start = Instant::now();
        self.store.refund(&Check::one(&demand), &self.receipts[entry as usize]);
        start.elapsed()
    }

    /// Returns the shortest of several runs of each operation, because other processes may interrupt a run.
    ///
    /// Operations that change much of the log run last, each on a log that is filled again.
    fn costs(&mut self, random: &mut tidegate_testkit::conformance::Random) -> Vec<(&'static str, Duration)> {
        let (n, full) = (self.entries, limit(self.entries, false));
        let mut costs: Vec<(&'static str, Duration)> = Vec::new();
        let mut add = |name, runs: &mut dyn Iterator<Item = Duration>| costs.push((name, runs.min().unwrap()));
        add("peek", &mut (0..9).map(|_| self.check(full, 0)));
        add("deny one", &mut (0..9).map(|_| self.check(full, 1)));
        add("deny half", &mut (0..9).map(|_| self.check(full, n / 2)));
        add("deny all", &mut (0..9).map(|_| self.check(full, n)));
        add("deny any cost", &mut (0..9).map(|_| self.check(full, n - random.below(n / 10))));
        add("deny under half the quota", &mut (0..9).map(|_| self.check(limit(n / 2, false), 1)));
        add("refund of the oldest", &mut (0..9).map(|nth| self.refund(nth)));
        add("refund near the oldest", &mut (0..9).map(|nth| self.refund(30 + nth)));
        add("refund in the middle", &mut (0..9).map(|nth| self.refund(n / 2 + nth)));
        add("refund of the newest", &mut (0..9).map(|nth| self.refund(n - 1 - nth)));
        let mut again = |name, run: &mut dyn FnMut(&FilledLog) -> Duration| {
            let runs = (0..3).map(|_| {
                self.fill();
                run(self)
            });
            costs.push((name, runs.min().unwrap()));
        };
        let half_us = n * STEP_US / 2;
        again("peek, clock back by half", &mut |log| {
            log.at(log.now_us() - half_us);
            log.check(full, 0)
        });
        again("clock back by half", &mut |log| {
            log.at(log.now_us() - half_us);
            log.check(full, 1)
        });
        again("expire half", &mut |log| {
            log.at(log.now_us() - half_us + full.window_us());
            log.check(full, 1)
        });
        again("expire all but one", &mut |log| {
            log.at(log.now_us() - STEP_US - 1 + full.window_us());
            log.check(full, 1)
        });
        again("count denied, half", &mut |log| log.check(limit(n, true), n / 2));
        again("count denied under half the quota", &mut |log| log.check(limit(n / 2, true), 1));
        costs
    }
}

#[test]
fn time_of_an_operation_on_the_longest_log_in_memory_is_bounded() {
    let mut random = random("memory time");
    let short = FilledLog::new(100).costs(&mut random);
    let long = FilledLog::new(99_900).costs(&mut random);
    let mut unbounded = Vec::new();
    for ((name, short), (_, long)) in short.into_iter().zip(long) {
        let figure = format!("{} ns (100 entries: {} ns)", long.as_nanos(), short.as_nanos());
        record("memory time", name, &figure);
        if long > RATIO_MAX * short.max(Duration::from_micros(1)) {
            unbounded.push(format!("{name}: {figure}"));
        }
    }
    assert!(unbounded.is_empty(), "{unbounded:#?}");
}
