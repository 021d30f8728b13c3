//! Duration of one call of the script on the largest states, with the worst arguments.
//!
//! A server runs one script at a time, so all other clients wait for the longest call of one client. Each operation
//! runs on a small state and on a large one in the same run. The large one may take a few times as long, because
//! searches take some more steps, but not in proportion to its entries. The number of commands per call is bounded as
//! well. Times are in microseconds, as the server counts them (`INFO commandstats`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tidegate::redis::RedisStore;
use tidegate::{Check, Clock, Demand, Key, Limit, Limiter, Source, SystemClock};
use tidegate_testkit::conformance::Random;
use tidegate_testkit::history::{Bounds, History};
use tidegate_testkit::server::{Brand, Config, Connection, Reply, Server};

use super::campaign::{assert_history, is_long, random, record, scale};

const START_US: u64 = 1_760_000_000_000_000;
const WINDOW_US: u64 = 3_600_000_000;
const STEP_US: u64 = 7;
/// Units of the first entry: more than a plain list stores at one time, so that the entries of the list have units.
const FIRST_UNITS: u64 = 5;
/// Maximum number of commands for one check or refund: reads, writes, and the binary search in a plain list.
const COMMANDS_MAX: f64 = 24.0;
/// Maximum ratio of the times on a large and a small state. A walk over all entries takes hundreds of times as long.
const RATIO_MAX: f64 = 20.0;

/// One call of the script on one key.
struct Call {
    key: String,
    at_us: u64,
    arguments: Vec<String>,
    /// Number of checks or refunds in the call.
    steps: usize,
}

/// Time and number of commands per check or refund.
#[derive(Clone, Copy)]
struct CallCost {
    us: f64,
    commands: f64,
}

/// A server with the script loaded.
struct ScriptServer {
    server: Server,
    connection: Connection,
    sha: String,
}

impl ScriptServer {
    fn new(brand: Brand) -> ScriptServer {
        let server = Config::new(brand).start();
        let mut connection = server.connect().unwrap();
        let sha = connection.call(&["SCRIPT", "LOAD", tidegate_redis::SCRIPT]).unwrap().text();
        ScriptServer { server, connection, sha }
    }

    /// Runs calls, up to 500 in one pipeline.
    fn run(&mut self, calls: &[Call]) {
        for calls in calls.chunks(500) {
            for call in calls {
                let keys = vec![call.key.as_str(); call.steps];
                let (count, at) = (keys.len().to_string(), call.at_us.to_string());
                let mut parts = vec!["EVALSHA", &self.sha, &count];
                parts.extend(keys);
                parts.push(&at);
                parts.extend(call.arguments.iter().map(String::as_str));
                self.connection.send(&parts).unwrap();
            }
            for _ in calls {
                match self.connection.receive().unwrap() {
                    Reply::Array(_) => {}
                    reply => panic!("{reply:?}"),
                }
            }
        }
    }

    /// Runs calls and returns their average cost.
    fn measure(&mut self, calls: &[Call]) -> CallCost {
        self.connection.call(&["CONFIG", "RESETSTAT"]).unwrap();
        self.run(calls);
        let (mut us, mut commands) = (0.0, 0.0);
        for line in self.server.command(&["INFO", "commandstats"]).text().lines() {
            let Some((name, fields)) = line.strip_prefix("cmdstat_").and_then(|line| line.split_once(':')) else {
                continue;
            };
            let field = |name: &str| -> f64 {
                let value = fields.split(',').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
                value.unwrap().parse().unwrap()
            };
            match name {
                "evalsha" => us += field("usec"),
                "info" | "config|resetstat" => {}
                _ => commands += field("calls"),
            }
        }
        let steps: usize = calls.iter().map(|call| call.steps * repeats(call)).sum();
        CallCost { us: us / steps as f64, commands: commands / steps as f64 }
    }

    /// Empties the server and creates this state.
    fn fill(&mut self, state: &LogState) {
        self.connection.call(&["FLUSHALL"]).unwrap();
        let line = |cost| state.line(state.quota_max(), cost, "");
        let check = |entry| state.check(state.at_us(entry), line(if entry == 0 { FIRST_UNITS } else { 1 }));
        let calls: Vec<Call> = (0..state.entries).map(check).collect();
        self.run(&calls);
        if state.is_sparse {
            let refunds: Vec<Call> =
                (0..state.entries).filter(|entry| entry % 256 < 127).map(|entry| state.refund(entry)).collect();
            self.run(&refunds);
        }
    }

    /// Returns the cost of the fastest of three runs, because other processes may interrupt a run.
    ///
    /// Each run works on copies of the state.
    fn cost(&mut self, state: &LogState, operation: &LogOperation, random: &mut Random) -> CallCost {
        let runs = (0..3).map(|_| {
            let mut calls = operation.calls(state, random);
            for (nth, call) in calls.iter_mut().enumerate() {
                call.key = if operation.changes() { format!("copy {nth}") } else { "copy".into() };
                self.connection.call(&["COPY", "k", &call.key, "REPLACE"]).unwrap();
            }
            self.measure(&calls)
        });
        let runs: Vec<CallCost> = runs.collect();
        runs.into_iter().min_by(|a, b| a.us.total_cmp(&b.us)).unwrap()
    }
}

/// Returns how often the script repeats the check of this call.
fn repeats(call: &Call) -> usize {
    call.arguments[0].strip_prefix("check 1 0 ").map_or(1, |repeats| repeats.parse().unwrap())
}

/// A log of entries with one unit each, except the first, which has [`FIRST_UNITS`].
#[derive(Clone, Copy)]
struct LogState {
    algorithm: &'static str,
    entries: u64,
    step_us: u64,
    /// Whether half of the entries are refunded, so that the log has the maximum number of chunks.
    is_sparse: bool,
}

impl LogState {
    fn at_us(&self, entry: u64) -> u64 {
        START_US + entry * self.step_us
    }

    fn now_us(&self) -> u64 {
        self.at_us(self.entries)
    }

    /// Returns the first entry from this one on that was not refunded.
    fn alive(&self, entry: u64) -> u64 {
        if self.is_sparse { entry.max(entry / 256 * 256 + 127) } else { entry }
    }

    /// Returns the number of units in the log.
    fn used(&self) -> u64 {
        let entries = if self.is_sparse {
            (0..self.entries).filter(|&entry| self.alive(entry) == entry).count() as u64 + 1
        } else {
            self.entries
        };
        entries + FIRST_UNITS - 1
    }

    fn quota_max(&self) -> u64 {
        if self.algorithm == "sliding-log" { 100_000 } else { 10_000_000 }
    }

    fn line(&self, quota: u64, cost: u64, options: &str) -> String {
        format!("{} {} {WINDOW_US} {cost}{options}", self.algorithm, quota.max(1))
    }

    fn check(&self, at_us: u64, line: String) -> Call {
        Call { key: "k".into(), at_us, arguments: vec![line], steps: 1 }
    }

    fn refund(&self, entry: u64) -> Call {
        let receipt = format!("{} {WINDOW_US}", self.at_us(entry));
        let arguments = vec!["refund 1".into(), self.line(self.quota_max(), 1, ""), receipt];
        Call { key: "k".into(), at_us: self.now_us(), arguments, steps: 1 }
    }
}

/// An operation of the script whose cost is measured.
#[derive(Clone, Copy, Debug)]
enum LogOperation {
    Peek,
    DenyOne,
    DenyAnyCost,
    DenyAll,
    DenyUnderHalfTheQuota,
    DenyUnderOne,
    BatchOfCosts,
    Admit,
    AdmitMany,
    CountDenied,
    RepeatCountDenied,
    RefundOldest,
    RefundMiddle,
    RefundNewest,
    ClockBackALittle,
    ClockBackByHalf,
    ExpireHalf,
    ExpireAll,
    HalfTheWindow,
}

impl LogOperation {
    const ALL: [LogOperation; 19] = [
        LogOperation::Peek,
        LogOperation::DenyOne,
        LogOperation::DenyAnyCost,
        LogOperation::DenyAll,
        LogOperation::DenyUnderHalfTheQuota,
        LogOperation::DenyUnderOne,
        LogOperation::BatchOfCosts,
        LogOperation::Admit,
        LogOperation::AdmitMany,
        LogOperation::CountDenied,
        LogOperation::RepeatCountDenied,
        LogOperation::RefundOldest,
        LogOperation::RefundMiddle,
        LogOperation::RefundNewest,
        LogOperation::ClockBackALittle,
        LogOperation::ClockBackByHalf,
        LogOperation::ExpireHalf,
        LogOperation::ExpireAll,
        LogOperation::HalfTheWindow,
    ];

    /// Returns whether the operation changes the state, so that each call needs its own copy.
    fn changes(self) -> bool {
        !matches!(
            self,
            LogOperation::Peek
                | LogOperation::DenyOne
                | LogOperation::DenyAnyCost
                | LogOperation::DenyAll
                | LogOperation::BatchOfCosts
        )
    }

    /// Returns the calls of this operation on a state.
    fn calls(self, state: &LogState, random: &mut Random) -> Vec<Call> {
        let (now_us, used, max) = (state.now_us(), state.used(), state.quota_max());
        let span_us = now_us - START_US;
        let any_cost = |random: &mut Random| 1 + random.below(used);
        let check =
            |at_us: u64, quota: u64, cost: u64, options: &str| state.check(at_us, state.line(quota, cost, options));
        let call = |nth: u64, random: &mut Random| match self {
            LogOperation::Peek => check(now_us, used, 0, ""),
            LogOperation::DenyOne => check(now_us, used, 1, ""),
            LogOperation::DenyAnyCost => check(now_us, used, any_cost(random), ""),
            LogOperation::DenyAll => check(now_us, used, used, ""),
            LogOperation::DenyUnderHalfTheQuota => check(now_us, used / 2, 1, ""),
            LogOperation::DenyUnderOne => check(now_us, 1, 1, ""),
            LogOperation::BatchOfCosts => {
                let arguments: Vec<String> = (0..128).map(|_| state.line(used, any_cost(random), "")).collect();
                Call { key: "k".into(), at_us: now_us, steps: arguments.len(), arguments }
            }
            LogOperation::Admit => check(now_us + nth, max, 1, ""),
            LogOperation::AdmitMany => check(now_us + nth, max, max - used, ""),
            LogOperation::CountDenied => check(now_us, used, any_cost(random), " count_denied=1"),
            LogOperation::RepeatCountDenied => {
                let line = state.line(used, used / 100 + 1, " count_denied=1");
                Call { key: "k".into(), at_us: now_us, arguments: vec!["check 1 0 1000".into(), line], steps: 1 }
            }
            LogOperation::RefundOldest => state.refund(state.alive(nth)),
            LogOperation::RefundMiddle => state.refund(state.alive(state.entries / 2 + nth)),
            LogOperation::RefundNewest => state.refund(state.entries - 1 - nth),
            LogOperation::ClockBackALittle => check(now_us - 3 * state.step_us, max, 1, ""),
            LogOperation::ClockBackByHalf => check(now_us - span_us / 2, max, 1, ""),
            LogOperation::ExpireHalf => check(START_US + WINDOW_US + span_us / 2, max, 1, ""),
            LogOperation::ExpireAll => check(now_us + WINDOW_US, max, 1, ""),
            LogOperation::HalfTheWindow => {
                let line = format!("{} {max} {} 1", state.algorithm, WINDOW_US / 2);
                state.check(START_US + WINDOW_US / 2 + span_us / 2, line)
            }
        };
        let count = if self.changes() { 12 } else { 64 };
        (0..count).map(|nth| call(nth, random)).collect()
    }
}

/// Measures all operations on all states, and panics if one is not bounded.
fn stays_bounded(brand: Brand) {
    let mut random = random("script time");
    let mut script = ScriptServer::new(brand);
    let log = LogState { algorithm: "sliding-log", entries: 100, step_us: STEP_US, is_sparse: false };
    let mut states = vec![
        ("sliding-log, 1,000 entries", LogState { entries: 1_000, ..log }),
        ("sliding-log, full", LogState { entries: scale(20_000, 99_900), ..log }),
        ("sliding, 1,000 ticks", LogState { algorithm: "sliding", entries: 1_000, step_us: WINDOW_US / 1_000, ..log }),
    ];
    if is_long() {
        states.push(("sliding-log, chunks half empty", LogState { entries: 99_900, is_sparse: true, ..log }));
    }
    let mut unbounded = Vec::new();
    script.fill(&log);
    let small = LogOperation::ALL.map(|operation| script.cost(&log, &operation, &mut random));
    for (name, state) in states {
        script.fill(&state);
        let bytes = script.server.command(&["MEMORY", "USAGE", "k", "SAMPLES", "0"]).integer();
        record(
            "script time",
            &format!("{brand}, {name}: bytes per entry"),
            format!("{:.1}", bytes as f64 / state.used() as f64),
        );
        for (operation, small) in LogOperation::ALL.into_iter().zip(small) {
            let cost = script.cost(&state, &operation, &mut random);
            let figure = format!("{:.0} µs, {:.1} commands (100 entries: {:.0} µs)", cost.us, cost.commands, small.us);
            record("script time", &format!("{brand}, {name}: {operation:?}"), &figure);
            if cost.commands > COMMANDS_MAX || cost.us > RATIO_MAX * small.us.max(20.0) {
                unbounded.push(format!("{name}: {operation:?}: {figure}"));
            }
        }
    }
    assert!(unbounded.is_empty(), "{brand}: {unbounded:#?}");
}

#[test]
fn time_of_a_call_on_the_largest_states_is_bounded_on_redis() {
    stays_bounded(Brand::Redis);
}

#[test]
fn time_of_a_call_on_the_largest_states_is_bounded_on_valkey() {
    stays_bounded(Brand::Valkey);
}

/// One connection checks a full log with changing costs, as fast as it can, with many calls in flight.
///
/// Other clients must still get decisions from the store. A call that walked over all entries would take milliseconds,
/// and other clients would wait for all calls before theirs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_with_changing_costs_does_not_block_the_store_for_others() {
    const CALLS_IN_FLIGHT: usize = 64;
    let mut script = ScriptServer::new(Brand::Redis);
    let log = LogState { algorithm: "sliding-log", entries: scale(30_000, 99_900), step_us: STEP_US, is_sparse: false };
    script.fill(&log);
    let url = script.server.url();
    let is_over = Arc::new(AtomicBool::new(false));
    let hostile = thread::spawn({
        let (is_over, mut random) = (is_over.clone(), random("changing costs"));
        move || {
            let mut calls = 0;
            while !is_over.load(Ordering::Relaxed) {
                let many = |_| log.check(log.now_us(), log.line(log.used(), 1 + random.below(log.used()), ""));
                script.run(&(0..CALLS_IN_FLIGHT).map(many).collect::<Vec<_>>());
                calls += CALLS_IN_FLIGHT;
            }
            (script, calls)
        }
    });
    // Long enough for a busy machine, and far shorter than the time of that many walks over the log.
    let deadline = scale(Duration::from_millis(250), Duration::from_millis(25));
    let store = RedisStore::builder(url).call_timeout(Duration::from_secs(5)).build().unwrap();
    let clock = Arc::new(SystemClock::new());
    let limiter = Limiter::builder().store(Arc::new(store)).clock(clock.clone()).deadline(deadline).build();
    let (mut by_store, decisions) = (0, scale(100, 2_000));
    let limit: Limit = "10/min".parse().unwrap();
    // Ten checks fit into each counter's quota. Some more are denied.
    let subjects: Vec<String> = (0..decisions / 12).map(|n| format!("neighbour {n}")).collect();
    let mut history = History::new(vec![limit; subjects.len()]);
    for n in 0..decisions {
        let counter = n % subjects.len();
        let demand = Demand::new(limit, Key::new(&subjects[counter]).unwrap());
        let sent_us = clock.now().as_micros();
        let decision = limiter.check(&Check::one(&demand)).await.unwrap();
        by_store += usize::from(matches!(decision.source, Source::Store | Source::DenyCache));
        history.note(&[counter], sent_us, clock.now().as_micros(), &decision);
    }
    is_over.store(true, Ordering::Relaxed);
    let (_script, calls) = hostile.join().unwrap();
    let report = history.verify(Bounds { local: Some(limit.quota().into()), ..Bounds::default() });
    assert_history("changing costs", &report, by_store == decisions);
    record(
        "changing costs",
        "decisions of neighbours by the store",
        format!("{by_store} of {decisions}, beside {calls} calls"),
    );
    assert!(
        is_long() || by_store * 10 >= decisions * 9,
        "{by_store} of {decisions} by the store, beside {calls} calls"
    );
}
