//! A store that is milliseconds away, and a machine that has no time.
//!
//! The first scenario puts a real Redis behind the fault proxy, which delays every byte, and asks it with one to 64 callers. `store` should decide
//! nearly everything while the round trip is well below the deadline; the figures say how nearly, and how many decisions share a call. In virtual
//! time the same matrix is exact and asserted (`tests/suite/round_trips` of crate `tollgate`).
//!
//! The second scenario starves the process of CPU: four busy threads for each core. An answer that has arrived is used although the
//! deadline has passed, and a deadline that was noticed late does not open the breaker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tollgate::{Check, Clock, Demand, Key, Limit, Limiter, Source, SystemClock};
use tollgate_redis::RedisStore;
use tollgate_testkit::conformance::Random;
use tollgate_testkit::fault::{Fault, Proxy};
use tollgate_testkit::history::{Bounds, History, Report, Violation};
use tollgate_testkit::server::Server;

use crate::campaign::{random, record, scale};

const DEADLINE: Duration = Duration::from_millis(25);
const LIMIT: &str = "500/s";
/// Counters that the callers of a run share.
const COUNTERS: usize = 4;

/// What came of a run.
struct Outcome {
    decisions: u64,
    by_store: u64,
    calls: u64,
    breaker_opened: u64,
    report: Report,
}

impl Outcome {
    fn record(&self, scenario: &str, what: &str) {
        let share = 100.0 * self.by_store as f64 / self.decisions as f64;
        let per_call = self.by_store as f64 / self.calls as f64;
        let (decisions, opened) = (self.decisions, self.breaker_opened);
        let figure = format!(
            "{share:.2} % of {decisions} decisions by the store, {per_call:.1} per call, breaker opened {opened} times"
        );
        record(scenario, what, figure);
    }

    /// Whatever the machine does: every check is answered, and no counter admits more than it may.
    fn assert_holds(&self, what: &str) {
        assert_eq!(self.report.checks, self.decisions, "{what}");
        if self.by_store == self.decisions {
            self.report.expect_clean();
            return;
        }
        // What the store charged after its caller had given up is not in the history, so its counts need not add up; its bounds hold.
        let breaks_a_bound = |violation: &&Violation| {
            matches!(violation, Violation::Over { .. } | Violation::Witness { .. } | Violation::Local { .. })
        };
        let broken: Vec<&Violation> = self.report.violations.iter().filter(breaks_a_bound).collect();
        assert!(broken.is_empty(), "{what}: {broken:?}");
    }
}

/// Callers that ask for some rounds each, with random pauses in between.
struct Run<'a> {
    /// Also the name of its counters, so that runs do not share any.
    what: &'a str,
    callers: usize,
    rounds: u64,
    pause_us_max: u64,
}

impl Run<'_> {
    /// Runs all callers and judges what they were answered.
    fn outcome(&self, callers_on: &Runtime, store: &RedisStore, random: &mut Random) -> Outcome {
        let clock = Arc::new(SystemClock::new());
        let limiter = Limiter::builder().store(Arc::new(store.clone())).clock(clock.clone()).deadline(DEADLINE);
        let limiter = limiter.deny_cache(false).build();
        let limit: Limit = LIMIT.parse().unwrap();
        let calls_before = store.stats().calls;
        let &Run { what, callers, rounds, pause_us_max } = self;
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
        Outcome {
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

fn connected(runtime: &Runtime, url: String) -> RedisStore {
    let store = runtime.block_on(async { RedisStore::builder(url).build().unwrap() });
    while runtime.block_on(store.command(&["PING"])).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    store
}

#[test]
fn a_store_that_is_milliseconds_away_decides() {
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
                let run = Run { what: &what, callers, rounds, pause_us_max };
                let outcome = run.outcome(&runtime, &store, &mut random);
                outcome.record("latency", &what);
                outcome.assert_holds(&what);
            }
        }
    }
    assert_eq!(store.stats().panics, 0);
}

/// Threads that do nothing but take time, until this is dropped.
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
fn a_process_that_is_starved_of_cpu_still_asks_its_store() {
    let server = Server::redis();
    let mut random = random("starved");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // All on one runtime, as in a service of one's own; and the store on another than its callers, as in `tollgate serve`.
    let (stores, apart) = (runtime(), Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());
    for (shape, callers_on) in [("one runtime", &stores), ("the store on another thread", &apart)] {
        let store = connected(&stores, server.url());
        let what = format!("load {} on {cores} cores, {shape}", 4 * cores);
        let run = Run { what: &what, callers: 8, rounds: scale(20, 1_000), pause_us_max: 10_000 };
        let load = Load::start(4 * cores);
        let outcome = run.outcome(callers_on, &store, &mut random);
        drop(load);
        outcome.record("starved", &what);
        outcome.assert_holds(&what);
    }
}
