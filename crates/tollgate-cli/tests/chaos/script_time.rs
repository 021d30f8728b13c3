//! How long one call of the script takes with the largest states and the worst arguments.
//!
//! A server runs one script at a time, so all clients wait for the longest call of one. Each operation runs on a small and on a
//! large state in the same run. The large one may take a few times as long, because a search takes more steps, but not in
//! proportion to its entries. The number of commands in a call is bounded as well.
//! The long form records microseconds by the server's own count (`INFO commandstats`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tollgate::redis::RedisStore;
use tollgate::{Check, Demand, Key, Limiter, Source};
use tollgate_testkit::conformance::Random;
use tollgate_testkit::server::{Brand, Config, Connection, Reply, Server};

use super::campaign::{is_long, random, record, scale};

const START_US: u64 = 1_760_000_000_000_000;
const WINDOW_US: u64 = 3_600_000_000;
const STEP_US: u64 = 7;
/// More entries than a plain list has: the entries of the list then have units.
const FIRST_UNITS: u64 = 5;
/// Maximum number of commands for one check or refund: reads, writes, and the binary search in a plain list.
const COMMANDS_MAX: f64 = 24.0;
/// Maximum ratio of the times on a large and a small state. A walk over all entries would take hundreds of times as long.
const RATIO_MAX: f64 = 20.0;

/// One call of the script on one key.
struct Call {
    key: String,
    at_us: u64,
    arguments: Vec<String>,
    /// The number of checks or refunds in the call.
    steps: usize,
}

/// The cost of calls, per check or refund.
#[derive(Clone, Copy)]
struct Cost {
    us: f64,
    commands: f64,
}

struct Script {
    server: Server,
    connection: Connection,
    sha: String,
}

impl Script {
    fn new(brand: Brand) -> Script {
        let server = Config::new(brand).start();
        let mut connection = server.connect().unwrap();
        let sha = connection.call(&["SCRIPT", "LOAD", tollgate_redis::SCRIPT]).unwrap().text();
        Script { server, connection, sha }
    }

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

    fn measure(&mut self, calls: &[Call]) -> Cost {
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
        Cost { us: us / steps as f64, commands: commands / steps as f64 }
    }

    fn fill(&mut self, state: &State) {
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

    /// Returns the lowest cost of three runs, each on copies of the state, since other processes may interrupt a run.
    fn cost(&mut self, state: &State, operation: &Operation, random: &mut Random) -> Cost {
        let runs = (0..3).map(|_| {
            let mut calls = operation.calls(state, random);
            for (nth, call) in calls.iter_mut().enumerate() {
                call.key = if operation.changes() { format!("copy {nth}") } else { "copy".into() };
                self.connection.call(&["COPY", "k", &call.key, "REPLACE"]).unwrap();
            }
            self.measure(&calls)
        });
        let runs: Vec<Cost> = runs.collect();
        runs.into_iter().min_by(|a, b| a.us.total_cmp(&b.us)).unwrap()
    }
}

fn repeats(call: &Call) -> usize {
    call.arguments[0].strip_prefix("check 1 0 ").map_or(1, |repeats| repeats.parse().unwrap())
}

/// A log with entries of one unit each, except for the first, which has more.
#[derive(Clone, Copy)]
struct State {
    algorithm: &'static str,
    entries: u64,
    step_us: u64,
    /// Whether half of the entries are refunded, which gives the most chunks.
    is_sparse: bool,
}

impl State {
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

#[derive(Clone, Copy, Debug)]
enum Operation {
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

impl Operation {
    const ALL: [Operation; 19] = [
        Operation::Peek,
        Operation::DenyOne,
        Operation::DenyAnyCost,
        Operation::DenyAll,
        Operation::DenyUnderHalfTheQuota,
        Operation::DenyUnderOne,
        Operation::BatchOfCosts,
        Operation::Admit,
        Operation::AdmitMany,
        Operation::CountDenied,
        Operation::RepeatCountDenied,
        Operation::RefundOldest,
        Operation::RefundMiddle,
        Operation::RefundNewest,
        Operation::ClockBackALittle,
        Operation::ClockBackByHalf,
        Operation::ExpireHalf,
        Operation::ExpireAll,
        Operation::HalfTheWindow,
    ];

    /// Returns whether each call needs its own copy of the state.
    fn changes(self) -> bool {
        !matches!(
            self,
            Operation::Peek
                | Operation::DenyOne
                | Operation::DenyAnyCost
                | Operation::DenyAll
                | Operation::BatchOfCosts
        )
    }

    fn calls(self, state: &State, random: &mut Random) -> Vec<Call> {
        let (now_us, used, max) = (state.now_us(), state.used(), state.quota_max());
        let span_us = now_us - START_US;
        let any_cost = |random: &mut Random| 1 + random.below(used);
        let check =
            |at_us: u64, quota: u64, cost: u64, options: &str| state.check(at_us, state.line(quota, cost, options));
        let call = |nth: u64, random: &mut Random| match self {
            Operation::Peek => check(now_us, used, 0, ""),
            Operation::DenyOne => check(now_us, used, 1, ""),
            Operation::DenyAnyCost => check(now_us, used, any_cost(random), ""),
            Operation::DenyAll => check(now_us, used, used, ""),
            Operation::DenyUnderHalfTheQuota => check(now_us, used / 2, 1, ""),
            Operation::DenyUnderOne => check(now_us, 1, 1, ""),
            Operation::BatchOfCosts => {
                let arguments: Vec<String> = (0..128).map(|_| state.line(used, any_cost(random), "")).collect();
                Call { key: "k".into(), at_us: now_us, steps: arguments.len(), arguments }
            }
            Operation::Admit => check(now_us + nth, max, 1, ""),
            Operation::AdmitMany => check(now_us + nth, max, max - used, ""),
            Operation::CountDenied => check(now_us, used, any_cost(random), " count_denied=1"),
            Operation::RepeatCountDenied => {
                let line = state.line(used, used / 100 + 1, " count_denied=1");
                Call { key: "k".into(), at_us: now_us, arguments: vec!["check 1 0 1000".into(), line], steps: 1 }
            }
            Operation::RefundOldest => state.refund(state.alive(nth)),
            Operation::RefundMiddle => state.refund(state.alive(state.entries / 2 + nth)),
            Operation::RefundNewest => state.refund(state.entries - 1 - nth),
            Operation::ClockBackALittle => check(now_us - 3 * state.step_us, max, 1, ""),
            Operation::ClockBackByHalf => check(now_us - span_us / 2, max, 1, ""),
            Operation::ExpireHalf => check(START_US + WINDOW_US + span_us / 2, max, 1, ""),
            Operation::ExpireAll => check(now_us + WINDOW_US, max, 1, ""),
            Operation::HalfTheWindow => {
                let line = format!("{} {max} {} 1", state.algorithm, WINDOW_US / 2);
                state.check(START_US + WINDOW_US / 2 + span_us / 2, line)
            }
        };
        let count = if self.changes() { 12 } else { 64 };
        (0..count).map(|nth| call(nth, random)).collect()
    }
}

fn stays_bounded(brand: Brand) {
    let mut random = random("script time");
    let mut script = Script::new(brand);
    let log = State { algorithm: "sliding-log", entries: 100, step_us: STEP_US, is_sparse: false };
    let mut states = vec![
        ("sliding-log, 1,000 entries", State { entries: 1_000, ..log }),
        ("sliding-log, full", State { entries: scale(20_000, 99_900), ..log }),
        ("sliding, 1,000 ticks", State { algorithm: "sliding", entries: 1_000, step_us: WINDOW_US / 1_000, ..log }),
    ];
    if is_long() {
        states.push(("sliding-log, chunks half empty", State { entries: 99_900, is_sparse: true, ..log }));
    }
    let mut unbounded = Vec::new();
    script.fill(&log);
    let small = Operation::ALL.map(|operation| script.cost(&log, &operation, &mut random));
    for (name, state) in states {
        script.fill(&state);
        let bytes = script.server.command(&["MEMORY", "USAGE", "k", "SAMPLES", "0"]).integer();
        record(
            "script time",
            &format!("{brand}, {name}: bytes per entry"),
            format!("{:.1}", bytes as f64 / state.used() as f64),
        );
        for (operation, small) in Operation::ALL.into_iter().zip(small) {
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
fn script_time_is_bounded_with_the_largest_states_on_redis() {
    stays_bounded(Brand::Redis);
}

#[test]
fn script_time_is_bounded_with_the_largest_states_on_valkey() {
    stays_bounded(Brand::Valkey);
}

/// One connection checks a full log with changing costs, as fast as it can and with many calls in flight. The store still makes the
/// decisions of the other clients. If each call walked over all entries, it would take milliseconds, and the others would wait
/// for all of those calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_with_changing_costs_does_not_keep_others_from_the_store() {
    const CALLS_IN_FLIGHT: usize = 64;
    let mut script = Script::new(Brand::Redis);
    let log = State { algorithm: "sliding-log", entries: scale(30_000, 99_900), step_us: STEP_US, is_sparse: false };
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
    // So long that a busy machine does not exceed it, and far less than that many walks over the log.
    let deadline = scale(Duration::from_millis(250), Duration::from_millis(25));
    let store = RedisStore::builder(url).call_timeout(Duration::from_secs(5)).build().unwrap();
    let limiter = Limiter::builder().store(Arc::new(store)).deadline(deadline).build();
    let (mut by_store, decisions) = (0, scale(100, 2_000));
    for n in 0..decisions {
        let subject = format!("neighbour {n}");
        let demand = Demand::new("10/min".parse().unwrap(), Key::new(&subject).unwrap());
        let decision = limiter.check(&Check::one(&demand)).await.unwrap();
        by_store += usize::from(decision.source == Source::Store);
    }
    is_over.store(true, Ordering::Relaxed);
    let (_script, calls) = hostile.join().unwrap();
    record(
        "changing costs",
        "decisions of other clients by the store",
        format!("{by_store} of {decisions}, beside {calls} calls"),
    );
    assert!(
        is_long() || by_store * 10 >= decisions * 9,
        "{by_store} of {decisions} by the store, beside {calls} calls"
    );
}
