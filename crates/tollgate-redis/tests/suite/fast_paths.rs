//! The fast paths of the script decide exactly what the general path decides.
//!
//! The same calls are run by the script as it is and by the script without its fast paths, each on keys of its own. The
//! replies and the bytes under the keys must be equal. To show that the traces reach every fast path, each is broken
//! on purpose in turn, and the comparison must find a difference.

use tollgate_redis::SCRIPT;
use tollgate_testkit::conformance::Random;
use tollgate_testkit::server::{Brand, Config, Connection, Reply, Server};

const START_US: u64 = 1_760_000_000_000_000;
const SEED: u64 = 0x5eed_fa57;
const TRACES: u64 = 16;
/// Enough for several closed chunks of 256 entries.
const CALLS: usize = 1_500;
const WINDOW_US: u64 = 300_000;
/// The maximum difference between the TTLs of two equal keys, which are set by two commands, one after the other.
const TTL_TOLERANCE_MS: i64 = 60_000;

/// One call of the script: its time, its keys and its arguments.
struct Call {
    now_us: u64,
    keys: Vec<String>,
    arguments: Vec<String>,
}

/// The limits of a trace. Key `k0` has the first, `k1` the second, and so on; an option may differ from check to check.
const LIMITS: [&[&str]; 8] = [
    &["sliding 5 W"],
    &["sliding 60 W", "sliding-log 40 W"],
    &["sliding 700 W", "token-bucket 9 W"],
    &["sliding-log 3000 W", "sliding-counter 50 W"],
    &["sliding 3000 W", "sliding 8 W"],
    &["sliding 1500 W", "leaky-bucket 5 W"],
    &["sliding-log 90000 W", "fixed-window 30 W"],
    &["sliding 900 W", "sliding-log 900 W"],
];

fn line(limit: &str, cost: u64, options: &str) -> String {
    format!("{} {cost}{options}", limit.replace('W', &WINDOW_US.to_string()))
}

/// Creates the calls of a trace.
fn trace(number: u64) -> Vec<Call> {
    let mut random = Random::new(SEED + number);
    let limits = LIMITS[number as usize % LIMITS.len()];
    // With a fixed window most checks are quick.
    let options: &[&str] = match number / LIMITS.len() as u64 % 2 {
        0 => &[" window=fixed"],
        _ => &["", "", " count_denied=1"],
    };
    let mut now_us = START_US;
    let mut charged: Vec<(usize, u64, u64)> = Vec::new();
    let mut calls = Vec::new();
    for _ in 0..CALLS {
        now_us = match random.below(300) {
            0 => now_us + random.below(WINDOW_US),
            1..=7 => now_us - random.below(3_000),
            8..=17 => now_us,
            18..=39 => now_us + random.below(4_000),
            _ => now_us + 1 + random.below(600),
        };
        let mut call = Call { now_us, keys: Vec::new(), arguments: Vec::new() };
        if random.below(8) == 0 && !charged.is_empty() {
            for _ in 0..1 + random.below(2) {
                let newest = random.below(2) == 0;
                let nth = if newest { charged.len() - 1 } else { random.below(charged.len() as u64) as usize };
                let (key, at_us, cost) = charged.swap_remove(nth);
                call.keys.push(format!("k{key}"));
                let receipt = format!("{at_us} {WINDOW_US}");
                call.arguments.extend(["refund 1".into(), line(limits[key], cost, options[0]), receipt]);
                if charged.is_empty() {
                    break;
                }
            }
            calls.push(call);
            continue;
        }
        for _ in 0..1 + random.below(3) {
            let option = options[random.below(options.len() as u64) as usize];
            let key = random.below(limits.len() as u64) as usize;
            // Mostly small, so that a log has many entries before its quota is spent.
            let cost = match random.below(40) {
                0..=2 => 0,
                3..=5 => 2 + random.below(3),
                6..=8 => 5 + random.below(20),
                9 => random.below(100_000),
                _ => 1,
            };
            match random.below(6) {
                0 if limits.len() > 1 => {
                    call.keys.extend(["k0".into(), "k1".into()]);
                    call.arguments.push("check 2".into());
                    call.arguments.extend(limits.iter().map(|limit| line(limit, cost, option)));
                }
                1 => {
                    call.keys.push(format!("k{key}"));
                    call.arguments.push(format!("check 1 0 {}", 1 + random.below(6)));
                    call.arguments.push(line(limits[key], cost, option));
                }
                _ => {
                    call.keys.push(format!("k{key}"));
                    call.arguments.push(line(limits[key], cost, option));
                    charged.push((key, now_us, cost));
                }
            }
        }
        calls.push(call);
    }
    calls
}

/// One of the two scripts that are compared.
struct Side {
    name: &'static str,
    connection: Connection,
    sha: String,
}

impl Side {
    fn new(server: &Server, name: &'static str, source: &str) -> Side {
        let mut connection = server.connect().unwrap();
        let sha = connection.call(&["SCRIPT", "LOAD", source]).unwrap().text();
        Side { name, connection, sha }
    }

    fn key(&self, key: &str) -> String {
        format!("{}:{key}", self.name)
    }

    fn run(&mut self, call: &Call) -> Reply {
        let keys: Vec<String> = call.keys.iter().map(|key| self.key(key)).collect();
        let (count, now) = (keys.len().to_string(), call.now_us.to_string());
        let mut parts = vec!["EVALSHA", &self.sha, &count];
        parts.extend(keys.iter().map(String::as_str));
        parts.push(&now);
        parts.extend(call.arguments.iter().map(String::as_str));
        self.connection.call(&parts).unwrap()
    }

    /// Returns the value under a key as it is stored, and its TTL in milliseconds.
    fn value(&mut self, key: &str) -> (Reply, i64) {
        let key = self.key(key);
        let value = match self.connection.call(&["TYPE", &key]).unwrap().text().as_str() {
            "list" => self.connection.call(&["LRANGE", &key, "0", "-1"]).unwrap(),
            _ => self.connection.call(&["GET", &key]).unwrap(),
        };
        (value, self.connection.call(&["PTTL", &key]).unwrap().integer())
    }
}

/// Runs all traces by both scripts. Returns the first difference.
fn difference(server: &Server, with: &str, without: &str) -> Option<String> {
    let (mut with, mut without) = (Side::new(server, "with", with), Side::new(server, "without", without));
    for number in 0..TRACES {
        server.command(&["FLUSHALL"]);
        for (nth, call) in trace(number).iter().enumerate() {
            let at = || format!("trace {number}, call {nth}, {:?} {:?}", call.keys, call.arguments);
            let replies = (with.run(call), without.run(call));
            if replies.0 != replies.1 {
                return Some(format!("{}: {replies:?}", at()));
            }
            assert!(matches!(replies.0, Reply::Array(_)), "{}: {replies:?}", at());
            // A wrong value shows in later calls as well, so not every one is read.
            for key in call.keys.iter().filter(|_| nth % 4 == 0) {
                let (value, general) = (with.value(key), without.value(key));
                if value.0 != general.0 || value.1.abs_diff(general.1) > TTL_TOLERANCE_MS.unsigned_abs() {
                    return Some(format!("{}, {key}: {value:?} {general:?}", at()));
                }
            }
        }
    }
    None
}

/// Replaces text that occurs exactly once in the script.
fn replaced(source: &str, text: &str, by: &str) -> String {
    assert_eq!(source.matches(text).count(), 1, "{text}");
    source.replace(text, by)
}

fn general_path() -> String {
    replaced(SCRIPT, "local USES_FAST_PATHS = true", "local USES_FAST_PATHS = false")
}

fn fast_paths_agree_with_the_general_path(brand: Brand) {
    let server = Config::new(brand).start();
    assert_eq!(difference(&server, SCRIPT, &general_path()), None);
}

#[test]
fn fast_paths_agree_with_the_general_path_on_redis() {
    fast_paths_agree_with_the_general_path(Brand::Redis);
}

#[test]
fn fast_paths_agree_with_the_general_path_on_valkey() {
    fast_paths_agree_with_the_general_path(Brand::Valkey);
}

/// A fast path, a part of it, and the same part with a mistake.
const BROKEN: [(&str, &str, &str); 9] = [
    ("quick, admitted", "= 1, 1, room - 1, 0\n", "= 1, 1, room, 0\n"),
    ("quick, denied", "= 1, 0, 0, next_after\n", "= 1, 0, 0, next_after + 1\n"),
    (
        "check_one",
        "until not may_change or results >= repeats\n    reply[head], reply_count = results, at",
        "until true\n    reply[head], reply_count = results, at",
    ),
    ("known options", "options == ' window=fixed'", "options ~= ''"),
    ("oldest entry", "must_leave == 1 and state.oldest", "must_leave <= 2 and state.oldest"),
    ("tick of now", "state.cut_entry = tree.count - 1", "state.cut_entry = tree.count"),
    ("first chunk", "not USES_FAST_PATHS or time_of(chunk, chunk.count) <= time", "not USES_FAST_PATHS"),
    ("plain push", "call('RPUSH', key, now_text)", "call('RPUSH', key, now_text, now_text)"),
    ("open chunk", ".. struct.pack('>I7I3', now, units)", ".. struct.pack('>I7I3', now, units + 1)"),
];

#[test]
fn comparison_finds_a_mistake_in_every_fast_path() {
    let server = Server::redis();
    for (name, part, mistake) in BROKEN {
        let broken = replaced(SCRIPT, part, mistake);
        assert!(difference(&server, &broken, &general_path()).is_some(), "{name}: the traces do not reach it");
    }
}
