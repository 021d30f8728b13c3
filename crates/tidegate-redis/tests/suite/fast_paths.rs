//! The fast paths of the script decide exactly what the general path decides.
//!
//! The same calls are run by the script as it is and by the script without its fast paths, each on keys of its own. The
//! replies and the bytes under the keys must be equal. To show that the traces reach every fast path, each is broken
//! on purpose in turn, and the comparison must find a difference.

use tidegate_redis::SCRIPT;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::server::{Brand, Config, Connection, Reply, Server};

/// In the year 2096, so that no key expires while the test runs.
const START_US: u64 = 4_000_000_000_000_000;
const SEED: u64 = 0x5eed_fa57;
const TRACES: u64 = 31;
/// From this trace on, half of the refunds are redemptions.
const REDEEMING_FROM: u64 = 23;
/// Enough for several closed chunks of 256 entries.
const CALLS: usize = 1_500;
const WINDOW_US: u64 = 300_000;
/// `LIFE_STEP` of the script.
const LIFE_STEP_US: u64 = 900_000;

/// One call of the script: its time, its keys and its arguments.
struct Call {
    now_us: u64,
    keys: Vec<String>,
    arguments: Vec<String>,
    /// Whether the subject is banned during the call. The key of the ban is `ban`.
    is_banned: bool,
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

/// Returns a limit line. A limit whose window is not fixed has another one now and then.
fn line(limit: &str, cost: u64, options: &str, random: &mut Random) -> String {
    let changes = !options.contains("window=fixed") && random.below(8) == 0;
    let window_us = if changes { 3 * WINDOW_US } else { WINDOW_US };
    format!("{} {cost}{options}", limit.replace('W', &window_us.to_string()))
}

/// Returns the limit with a third of its quota.
fn lowered(limit: &str) -> String {
    let [algorithm, quota, window]: [&str; 3] = limit.split(' ').collect::<Vec<_>>().try_into().unwrap();
    format!("{algorithm} {} {window}", quota.parse::<u64>().unwrap().div_ceil(3))
}

/// Creates the calls of a trace.
fn trace(number: u64) -> Vec<Call> {
    let mut random = Random::new(SEED + number);
    // With a fixed window most checks are quick. If every check costs one unit, a list stays plain up to 500 units.
    let (limits, options, costs_one): (&[&str], &[&str], bool) = match number as usize {
        number @ 0..8 => (LIMITS[number], &[" window=fixed"], false),
        number @ 8..16 => (LIMITS[number - 8], &["", "", " count_denied=1"], false),
        16 => (LIMITS[7], &[" window=fixed"], true),
        18 => (LIMITS[1], &[" window=fixed", " count_denied=1 window=fixed"], true),
        19 => (LIMITS[4], &[" window=fixed", " count_denied=1 window=fixed"], true),
        20 => (LIMITS[7], &[" window=fixed"], true),
        21 => (&LIMITS[3][..1], &[" window=fixed"], true),
        22 => (LIMITS[1], &[" window=fixed"], false),
        number @ 23..27 => (LIMITS[number - 23], &[" window=fixed"], false),
        number @ 27..31 => (LIMITS[number - 23], &["", "", " count_denied=1"], false),
        _ => (&LIMITS[7][..1], &[" window=fixed"], true),
    };
    let mut now_us = START_US;
    let mut charged: Vec<(usize, u64, u64)> = Vec::new();
    let mut calls = Vec::new();
    for _ in 0..CALLS {
        // The next microsecond at which an admission leaves the window.
        let next_edge_us = || {
            let edges_us = charged.iter().map(|(_, at_us, _)| at_us + WINDOW_US);
            edges_us.filter(|edge_us| (now_us + 1..now_us + 60_000).contains(edge_us)).min().unwrap_or(now_us + 1)
        };
        now_us = match (number, random.below(300)) {
            // All entries leave the window, so that the list is plain again.
            (19, 0..75) => now_us + WINDOW_US,
            // More units in one microsecond than a plain list may get at once.
            (20, 0..260) => now_us,
            // From the thousandth call on, every call is at the microsecond at which the next entry leaves. Some of these
            // entries are the last ones of their chunks.
            (21, _) if calls.len() == 1_000 => START_US + WINDOW_US,
            (21, _) if calls.len() > 1_000 => next_edge_us(),
            // The last microsecond of a step of the TTL, and the first one of the next step.
            (22, 0..100) => ((now_us + WINDOW_US) / LIFE_STEP_US + 1) * LIFE_STEP_US - WINDOW_US - 1,
            (22, 100..200) => now_us + 1,
            // So short that more than 500 units are in a window, and never five in one microsecond.
            (_, _) if costs_one => now_us + 1 + random.below(100),
            // The microsecond at which an admission leaves the window, or the one before.
            (_, 40..=47) => next_edge_us() - random.below(2),
            (_, 8..=17) => now_us,
            (_, 0) => now_us + random.below(WINDOW_US),
            (_, 1..=7) => now_us - random.below(3_000),
            (_, 18..=39) => now_us + random.below(4_000),
            (_, _) => now_us + 1 + random.below(600),
        };
        let mut call = Call { now_us, keys: Vec::new(), arguments: Vec::new(), is_banned: random.below(20) == 0 };
        if random.below(8) == 0 && !charged.is_empty() {
            for _ in 0..1 + random.below(2) {
                let newest = random.below(2) == 0;
                let nth = if newest { charged.len() - 1 } else { random.below(charged.len() as u64) as usize };
                let (key, at_us, cost) = charged.swap_remove(nth);
                call.keys.push(format!("k{key}"));
                let limit_line = line(limits[key], cost, options[0], &mut random);
                // A redemption may be one of a used receipt, or of an expired one, and may charge another counter.
                let is_redemption = number >= REDEEMING_FROM && random.below(2) == 0;
                let charges = is_redemption && limits.len() > 1 && random.below(4) == 0;
                let head = if is_redemption {
                    let (count, ends_us) = (1 + u8::from(charges), now_us + WINDOW_US * random.below(9));
                    format!("refund {count} {ends_us} {}", random.below(200))
                } else {
                    "refund 1".into()
                };
                if is_redemption {
                    call.keys.insert(call.keys.len() - 1, format!("receipts{}", random.below(2)));
                }
                let refunded = ["", " 0", " 2", " 25"][at_us as usize % 4];
                call.arguments.extend([head, limit_line, format!("{at_us} {WINDOW_US}{refunded}")]);
                if charges {
                    let other = 1 - key;
                    let limit = limits[other].replace('W', &WINDOW_US.to_string());
                    call.keys.push(format!("k{other}"));
                    let cost = 1 + random.below(4);
                    call.arguments.extend([format!("{limit} {cost} count_denied=1{}", options[0]), "charge".into()]);
                }
                if charged.is_empty() {
                    break;
                }
            }
            calls.push(call);
            continue;
        }
        let checks = if number == 17 || number == 21 { 1 } else { 1 + random.below(3) };
        for _ in 0..checks {
            let option = options[random.below(options.len() as u64) as usize];
            let key = random.below(limits.len() as u64) as usize;
            // A key with a fixed window may be used with another quota.
            let limit = if (number == 18 || number == 19) && random.below(2) == 0 {
                lowered(limits[key])
            } else {
                limits[key].to_owned()
            };
            // Mostly small, so that a log has many entries before its quota is spent.
            let cost = match random.below(40) {
                _ if costs_one => 1,
                0..=2 => 0,
                3..=5 => 2 + random.below(3),
                6..=8 => 5 + random.below(20),
                9 => random.below(100_000),
                _ => 1,
            };
            match random.below(6) {
                0 if limits.len() > 1 => {
                    let bans = random.below(2);
                    call.keys.extend((0..bans).map(|_| "ban".to_owned()));
                    call.keys.extend(["k0".into(), "k1".into()]);
                    call.arguments.push(format!("check 2 {bans}"));
                    call.arguments.extend(limits.iter().map(|limit| line(limit, cost, option, &mut random)));
                }
                // Five units in one call make a list chunked.
                1 if !costs_one => {
                    let bans = random.below(2);
                    call.keys.extend((0..bans).map(|_| "ban".to_owned()));
                    call.keys.push(format!("k{key}"));
                    call.arguments.push(format!("check 1 {bans} {}", 1 + random.below(6)));
                    call.arguments.push(line(&limit, cost, option, &mut random));
                }
                _ => {
                    call.keys.push(format!("k{key}"));
                    call.arguments.push(line(&limit, cost, option, &mut random));
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
    is_banned: bool,
}

impl Side {
    fn new(server: &Server, name: &'static str, source: &str) -> Side {
        let mut connection = server.connect().unwrap();
        let sha = connection.call(&["SCRIPT", "LOAD", source]).unwrap().text();
        Side { name, connection, sha, is_banned: false }
    }

    fn key(&self, key: &str) -> String {
        format!("{}:{key}", self.name)
    }

    fn run(&mut self, call: &Call) -> Reply {
        if self.is_banned != call.is_banned {
            let ban = self.key("ban");
            let command: &[&str] = if call.is_banned { &["SET", &ban, "1"] } else { &["DEL", &ban] };
            self.connection.call(command).unwrap();
            self.is_banned = call.is_banned;
        }
        let keys: Vec<String> = call.keys.iter().map(|key| self.key(key)).collect();
        let (count, now) = (keys.len().to_string(), call.now_us.to_string());
        let mut parts = vec!["EVALSHA", &self.sha, &count];
        parts.extend(keys.iter().map(String::as_str));
        parts.push(&now);
        parts.extend(call.arguments.iter().map(String::as_str));
        self.connection.call(&parts).unwrap()
    }

    /// Returns the value under a key as it is stored, and of a log the time at which it expires, in milliseconds. Other
    /// values expire a while after they were written by the real clock, which differs from script to script.
    fn value(&mut self, key: &str) -> (Reply, Option<i64>) {
        let key = self.key(key);
        match self.connection.call(&["TYPE", &key]).unwrap().text().as_str() {
            "list" => {
                let expires_ms = self.connection.call(&["PEXPIRETIME", &key]).unwrap().integer();
                (self.connection.call(&["LRANGE", &key, "0", "-1"]).unwrap(), Some(expires_ms))
            }
            _ => (self.connection.call(&["GET", &key]).unwrap(), None),
        }
    }
}

/// Runs all traces by a script and by its general path. Returns the first difference.
fn difference(server: &Server, script: &str) -> Option<String> {
    let (with, without) = (with_ttls(script), general_path());
    let (mut with, mut without) = (Side::new(server, "with", &with), Side::new(server, "without", &without));
    // Traces of different kinds first, so that a difference is found soon.
    let first = [17, 22, 8, 19, 21];
    let others = (0..TRACES).rev().filter(|number| !first.contains(number));
    for number in first.into_iter().chain(others) {
        server.command(&["FLUSHALL"]);
        (with.is_banned, without.is_banned) = (false, false);
        for (nth, call) in trace(number).iter().enumerate() {
            let at = || format!("trace {number}, call {nth}, {:?} {:?}", call.keys, call.arguments);
            let replies = (with.run(call), without.run(call));
            if replies.0 != replies.1 {
                return Some(format!("{}: {replies:?}", at()));
            }
            assert!(matches!(replies.0, Reply::Array(_)), "{}: {replies:?}", at());
            // A wrong value mostly shows in later calls as well, so not every one is read.
            for key in call.keys.iter().filter(|_| nth % 4 == 0 || (number == 21 && nth > 1_000)) {
                let (value, general) = (with.value(key), without.value(key));
                if value != general {
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

/// Returns the script with the TTLs that logs have on the server's clock. A script that is given the time sets long TTLs
/// instead, and sets them at every admission.
fn with_ttls(script: &str) -> String {
    let script = replaced(
        script,
        "if is_time_given then\n            command, ends =",
        "if false then\n            command, ends =",
    );
    replaced(&script, " and not is_time_given\n", "\n")
}

fn general_path() -> String {
    let script = replaced(SCRIPT, "local USES_FAST_PATHS = true", "local USES_FAST_PATHS = false");
    replaced(&with_ttls(&script), "local can_keep_ttl = limit.is_window_fixed\n", "local can_keep_ttl = false\n")
}

fn fast_paths_agree_with_the_general_path(brand: Brand) {
    let server = Config::new(brand).start();
    assert_eq!(difference(&server, SCRIPT), None);
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
const BROKEN: &[(&str, &str, &str)] = &[
    ("quick, admitted", "= 1, 1, room - 1, 0\n", "= 1, 1, room, 0\n"),
    ("quick, admitted, reset", "= next_after, limit.window, 0\n", "= next_after, limit.window - 1, 0\n"),
    ("quick, denied", "= 1, 0, 0, next_after\n", "= 1, 0, 0, next_after + 1\n"),
    ("quick, denied, reset", "= next_after, time - left_until, 0\n", "= next_after, oldest - left_until, 0\n"),
    ("quick, quota exceeded", "elseif room == 0 then", "elseif room <= 0 then"),
    ("quick, of now", "not (time < now and time", "not (time <= now and time"),
    ("quick, ticks", "limit.tick == 1 and limit.cost == 1 and", "limit.cost == 1 and"),
    ("quick, count_denied", "limit.is_window_fixed and not limit.count_denied then", "limit.is_window_fixed then"),
    (
        "quick, then with ticks",
        "            write(state)\n            return load(key, limit)",
        "            return load(key, limit)",
    ),
    ("quick, expired", "oldest <= left_until then return", "oldest < left_until then return"),
    ("quick, full", "total < PLAIN_UNITS_MAX then", "total <= PLAIN_UNITS_MAX then"),
    ("quick, twice", "#last_text == 0 or quick_limit_of[key] then", "#last_text == 0 then"),
    ("quick, then in general", "append(state, quick_limit, 1)", "append(state, quick_limit, 2)"),
    (
        "quick, write",
        "if quick_limit_of[quick_keys[i]] then call",
        "if i > 1 and quick_limit_of[quick_keys[i]] then call",
    ),
    (
        "quick, TTL",
        "if time < limit.ttl_set_from then\n                renewed",
        "if time < 0 then\n                renewed",
    ),
    (
        "check_one",
        "until not may_change or results >= repeats\n    reply[head], reply_count = results, at",
        "until true\n    reply[head], reply_count = results, at",
    ),
    ("check_one, count_denied", "may_change = 0, limit.count_denied\n", "may_change = 0, false\n"),
    (
        "check_one, ban",
        "local ban = head.bans > 0 and banned_for(head.bans)",
        "local ban = head.bans > 0 and banned_for(head.bans) and head.count > 1 and -1",
    ),
    ("known options", "options == ' window=fixed'", "options ~= ''"),
    ("known options, after others", "options == ' window=fixed'", "match(options, ' window=fixed$')"),
    ("oldest entry", "must_leave == 1 and state.oldest", "must_leave <= 2 and state.oldest"),
    ("tick of now", "state.cut_entry = tree.count - 1", "state.cut_entry = tree.count"),
    ("tick of now, clock back", "USES_FAST_PATHS and tree and state.time <= now then", "USES_FAST_PATHS and tree then"),
    ("first chunk, all of it", "time_of(chunk, chunk.count) <= time then", "time_of(chunk, chunk.count) < time then"),
    ("first chunk", "not USES_FAST_PATHS or time_of(chunk, chunk.count) <= time", "not USES_FAST_PATHS"),
    ("plain push", "call('RPUSH', key, now_text)", "call('RPUSH', key, now_text, now_text)"),
    ("plain push, of several", "now_text, now_text }, 1, units))", "now_text, now_text }, 1, 2))"),
    (
        "plain push, full",
        "state.has_ticks or state.total > PLAIN_UNITS_MAX then\n                slow()",
        "state.has_ticks then\n                slow()",
    ),
    ("open chunk", ".. struct.pack('>I7I3', now, units)", ".. struct.pack('>I7I3', now, units + 1)"),
    (
        "open chunk, header",
        "state.oldest, state.total, tree.left + tree.closed - low, low)",
        "state.oldest, state.total, tree.left + tree.closed, low)",
    ),
    (
        "open chunk, full",
        "are_closed_same and count < OPEN_ENTRIES_MAX then",
        "are_closed_same and count <= OPEN_ENTRIES_MAX then",
    ),
    ("quick, TTL, edge", "if time < limit.ttl_set_from then\n", "if time < limit.ttl_set_from - 1 then\n"),
    ("kept TTL, edge", "elseif time >= limit.ttl_set_from then", "elseif time >= limit.ttl_set_from - 1 then"),
    ("kept TTL", "local can_keep_ttl = limit.is_window_fixed and", "local can_keep_ttl = true and"),
    (
        "kept TTL, of an earlier step",
        "LIFE_STEP) * LIFE_STEP - limit.window or FOREVER",
        "LIFE_STEP) * LIFE_STEP - limit.window - LIFE_STEP or FOREVER",
    ),
];

#[test]
fn comparison_finds_a_mistake_in_every_fast_path() {
    let server = Server::redis();
    let missed =
        BROKEN.iter().filter(|(_, part, mistake)| difference(&server, &replaced(SCRIPT, part, mistake)).is_none());
    let missed: Vec<&str> = missed.map(|(name, ..)| *name).collect();
    assert!(missed.is_empty(), "the traces do not show these mistakes: {missed:?}");
}
