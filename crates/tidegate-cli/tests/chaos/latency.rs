//! A store behind a slow network, and a machine without spare CPU time.
//!
//! The first scenario puts a real Redis behind the fault proxy, which delays every byte, and calls it from one to 64
//! callers. While the round trip is well below the deadline, the store should decide nearly all checks. The report
//! shows the share, and how many decisions share a call. `tests/suite/round_trips` of crate `tidegate` asserts exact
//! values for the same matrix in virtual time.
//!
//! The second scenario runs four busy threads for each core. A reply that has arrived is used even if the deadline has
//! expired, and a timeout that was noticed late does not open the breaker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::{Check, Clock, Demand, Key, Limit, Limiter, Source, SystemClock};
use tidegate_redis::RedisStore;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::history::{Bounds, History, Report};
use tidegate_testkit::server::Server;
use tokio::runtime::{Builder, Runtime};

use crate::campaign::{assert_history, random, record, scale};

const DEADLINE: Duration = Duration::from_millis(25);
const LIMIT: &str = "500/s";
/// Number of counters that the callers of a run share.
const COUNTERS: usize = 4;

/// The result of a run.
struct RunResult {
    decisions: u64,
    by_store: u64,
    calls: u64,
    breaker_opened: u64,
    report: Report,
}

impl RunResult {
    fn record(&self, scenario: &str, what: &str) {
        let share = 100.0 * self.by_store as f64 / self.decisions as f64;
        let per_call = self.by_store as f64 / self.calls as f64;
        let (decisions, opened) = (self.decisions, self.breaker_opened);
        let figure = format!(
            "{share:.2} % of {decisions} decisions by the store, {per_call:.1} per call, breaker opened {opened} times"
        );
        record(scenario, what, figure);
    }

    /// Asserts what holds on every machine: each check has a decision, and no counter admits more than its limit.
    fn assert_holds(&self, what: &str) {
        assert_eq!(self.report.checks, self.decisions, "{what}");
        assert_history(what, &self.report, self.by_store == self.decisions);
    }
}

/// A number of callers, each of which makes `rounds` checks with random pauses.
struct LoadRun<'a> {
    /// The description, also used in the names of the counters, so that runs share none.
    what: &'a str,
    callers: usize,
    rounds: u64,
    pause_us_max: u64,
}

impl LoadRun<'_> {
    /// Runs all callers and verifies the history of their decisions.
    fn result(&self, callers_on: &Runtime, store: &RedisStore, random: &mut Random) -> RunResult {
        let clock = Arc::new(SystemClock::new());
        let limiter = Limiter::builder().store(Arc::new(store.clone())).clock(clock.clone()).deadline(DEADLINE);
        let limiter = limiter.deny_cache(false).build();
        let limit: Limit = LIMIT.parse().unwrap();
        let calls_before = store.stats().calls;
        let &LoadRun { what, callers, rounds, pause_us_max } = self;
        let mut caller = |number: usize| {
            let (limiter, clock, mut random) = (limiter.clone(), clock.clone(), Random::new(random.below(u64::MAX)));
            let subjects: Vec<String> = (0..COUNTERS).map(|counter| format!("{what} {counter}")).collect();
            async move {
                let (mut history, mut by_store) = (History::new([limit; COUNTERS]), 0);
                for round in 0..rounds {
                    tokio::time::sleep(Duration::from_micros(random.below(pause_us_max + 1))).await;
                    let counter = (number + round as usize) % COUNTERS;
                    let demand = Demand::new(limit, Key::new(subjects[counter].as_str()).unwrap());
                    let sent_us = clock.now().as_micros();
                    let decision = limiter.check(&Check::one(&demand)).await.unwrap();
                    by_store += u64::from(decision.source == Source::Store);
                    history.note(&[counter], sent_us, clock.now().as_micros(), &decision);
                }
                (history, by_store)
            }
        };
        let running: Vec<_> = (0..callers).map(|number| callers_on.spawn(caller(number))).collect();
        let (mut history, mut by_store) = (History::new([limit; COUNTERS]), 0);
        for caller in running {
            let (theirs, theirs_by_store) = callers_on.block_on(caller).unwrap();
            history.merge(theirs);
            by_store += theirs_by_store;
        }
        let local = Some(limit.quota().into());
        RunResult {
            decisions: callers as u64 * rounds,
            by_store,
            calls: store.stats().calls - calls_before,
            breaker_opened: limiter.stats().breaker_opened,
            report: history.verify(Bounds { local, ..Bounds::default() }),
        }
    }
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Creates a store and waits until it is connected.
fn connected(runtime: &Runtime, url: String) -> RedisStore {
    let store = runtime.block_on(async { RedisStore::builder(url).build().unwrap() });
    while runtime.block_on(store.command(&["PING"])).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    store
}

#[test]
fn store_behind_a_slow_network_stays_within_the_limits() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let runtime = runtime();
    let store = connected(&runtime, proxy.url());
    let mut random = random("latency");
    for round_trip_ms in [1, 5, 14] {
        proxy.set(Fault::Delay(Duration::from_millis(round_trip_ms) / 2));
        for callers in [1, 4, 16, 64] {
            for (pace, pause_us_max) in [("at once", 0), ("with pauses", 1_000 * round_trip_ms)] {
                let what = format!("round trip {round_trip_ms} ms, {callers} callers, {pace}");
                let rounds = scale(10, 5_000 / (round_trip_ms + 5));
                let run = LoadRun { what: &what, callers, rounds, pause_us_max };
                let result = run.result(&runtime, &store, &mut random);
                result.record("latency", &what);
                result.assert_holds(&what);
            }
        }
    }
    assert_eq!(store.stats().panics, 0);
}

/// Busy threads, which end when this is dropped.
struct Load {
    is_over: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Load {
    fn start(threads: usize) -> Load {
        let is_over = Arc::new(AtomicBool::new(false));
        let spin = |_| {
            let is_over = is_over.clone();
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop()
                }
            })
        };
        let threads = (0..threads).map(spin).collect();
        Load { is_over, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn process_without_spare_cpu_time_stays_within_the_limits() {
    let server = Server::redis();
    let mut random = random("starved");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Store and callers on one runtime, as in an application; and on separate ones, as in `tidegate serve`.
    let (stores, apart) = (runtime(), Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());
    for (shape, callers_on) in [("one runtime", &stores), ("the store on another thread", &apart)] {
        let store = connected(&stores, server.url());
        let what = format!("load {} on {cores} cores, {shape}", 4 * cores);
        let run = LoadRun { what: &what, callers: 8, rounds: scale(20, 1_000), pause_us_max: 10_000 };
        let load = Load::start(4 * cores);
        let result = run.result(callers_on, &store, &mut random);
        drop(load);
        result.record("starved", &what);
        result.assert_holds(&what);
    }
}
