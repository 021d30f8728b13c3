//! `clients/vectors.json`: what the clients in other languages must agree on, as data.
//!
//! Each client replays the whole file: keys, limits, traces with their answers, client addresses, responses, and `Accept`
//! headers. It is generated here, from the code that decides, so that it cannot say anything else than the Rust
//! implementation does.
//! `TIDEGATE_WRITE_VECTORS=1 cargo test --all-features --test suite vectors` writes it anew.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde_json::{Value, json};
use tidegate::answer::{Policies, Policy};
use tidegate::identity::{Identifier, KeyTable, Subjects};
use tidegate::rules::RequestView;
use tidegate::{
    Algorithm, Check, Decision, Demand, ForwardingHeader, Limit, LimitStatus, Networks, Source, Timestamp,
    TrustedProxies, Wait,
};
use tidegate_testkit::conformance::{self, Abilities, Implementation};
use tidegate_testkit::oracle::Oracle;

/// Random traces per algorithm.
const TRACES: usize = 4;
const SEED: u64 = 7;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn vectors_of_the_clients_are_those_of_this_implementation() {
    let file = root().join("clients/vectors.json");
    let text = document();
    if std::env::var_os("TIDEGATE_WRITE_VECTORS").is_some() {
        fs::write(&file, &text).unwrap();
    }
    let written = fs::read_to_string(&file).unwrap();
    assert!(
        written == text,
        "{} is out of date; run `TIDEGATE_WRITE_VECTORS=1 cargo test --all-features --test suite vectors`",
        file.display()
    );
}

#[test]
fn every_client_ships_the_script() {
    for copy in ["go/tidegate.lua", "node/lua/tidegate.lua", "php/src/tidegate.lua", "python/src/tidegate/tidegate.lua"]
    {
        let text = fs::read_to_string(root().join("clients").join(copy)).unwrap();
        assert!(text == tidegate::redis::SCRIPT, "clients/{copy} is not the script; run clients/sync-script.sh");
    }
}

/// Returns the file: one line for each vector, so that a change is readable in a review.
fn document() -> String {
    let sections = [
        ("keys", keys()),
        ("limits", limits()),
        ("traces", traces()),
        ("addresses", addresses()),
        ("answers", answers()),
        ("accepts", accepts()),
    ];
    let sections = sections.map(|(name, vectors)| {
        assert!(!vectors.is_empty(), "{name}");
        let lines: Vec<String> = vectors.iter().map(Value::to_string).collect();
        format!("\"{name}\":[\n{}\n]", lines.join(",\n"))
    });
    format!("{{\n\"script_sha1\":\"{}\",\n{}\n}}\n", script_sha1(), sections.join(",\n"))
}

/// Returns the SHA-1 of the script, by which Redis names it.
fn script_sha1() -> String {
    let digest = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, tidegate::redis::SCRIPT.as_bytes());
    hex(digest.as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the explicit keys of `key-vectors.tsv`, which the Redis store is tested with, and the ban key of each.
fn keys() -> Vec<Value> {
    let file = root().join("crates/tidegate-redis/tests/key-vectors.tsv");
    let text = fs::read_to_string(file).unwrap();
    let rows = text.lines().filter(|line| !line.starts_with('#')).map(|line| line.split('\t').collect::<Vec<_>>());
    let explicit = rows.filter(|row| row[2] == "explicit");
    let vector = |row: Vec<&str>| {
        let [prefix, subject_hex, _, _, _, limit, key] = row[..] else { panic!("{row:?}") };
        let ban_key = format!("{}}}:ban", &key[..key.rfind('}').unwrap()]);
        json!({"prefix": prefix, "subject_hex": subject_hex, "limit": limit, "key": key, "ban_key": ban_key})
    };
    explicit.map(vector).collect()
}

/// Returns texts of limits, each with its limit line for a cost of 1, or with the error and the limit that its message
/// suggests, if any.
fn limits() -> Vec<Value> {
    let valid = [
        "10/min",
        "1/s",
        "600/10s",
        "250/500ms",
        "7/1500us",
        "100/h",
        "5000/day",
        "5000/day sliding-log",
        "100000/400day sliding-log",
        "10/week sliding-counter",
        "3/2min fixed-window",
        "100/min token-bucket",
        "100/min token-bucket burst=20",
        "10000000/s token-bucket burst=10000000",
        "1/400day token-bucket",
        "60/min leaky-bucket",
        "600/h leaky-bucket queue=50",
        "10/min count_denied=true",
        "10/min count_denied=false",
        "5/s token-bucket burst=9 count_denied=true",
        "  10/min  ",
        "10/minutes",
        "10/2d",
        "10/3w",
        "10/1hour",
        "1/1ms",
        "10000000/min",
        "5/min sliding",
    ];
    let invalid = [
        "",
        " ",
        "10",
        "/min",
        "10/",
        "0/min",
        "-1/min",
        "1.5/min",
        "10000001/min",
        "100001/day sliding-log",
        "10/fortnight",
        "10/0s",
        "10/401day",
        "10/999us",
        "10/min sliding-window",
        "10/min burst=5",
        "10/min leaky-bucket burst=5",
        "10/min token-bucket burst=0",
        "10/min token-bucket burst=10000001",
        "10/min token-bucket burst=2 burst=2",
        "10/min token-bucket queue=5",
        "10/min count_denied=yes",
        "10/min x",
        "10 / min",
        "10 per minute",
        "10 per 5 minutes",
        "10/5 min token-bucket burst=3",
        "10/MIN",
        "10/1.5h",
        "10/.5min fixed-window",
        "10/24.0h",
        "10/1.h",
        "10/1.0005s",
        "10 per fortnight",
        "10 per minute quickly",
        "10/500d",
        "10 per",
        "１０/min",
        "10/min, 5/s",
        "99999999999999999999/min",
        "1/99999999999999999999s",
    ];
    let line = |text: &&str| {
        let limit: Limit = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        json!({"text": text, "line": limit_line(&limit)})
    };
    let error = |text: &&str| {
        let error = text.parse::<Limit>().err().unwrap_or_else(|| panic!("{text} is a limit"));
        match error.meant() {
            Some(meant) => json!({"text": text, "error": error.to_string(), "meant": meant}),
            None => json!({"text": text, "error": error.to_string()}),
        }
    };
    let long = format!("10/min{}", " ".repeat(300));
    valid.iter().map(line).chain(invalid.iter().map(error)).chain([error(&&*long)]).collect()
}

/// Returns the limit line of the script for a cost of 1 on an explicit key.
fn limit_line(limit: &Limit) -> String {
    let mut line = format!("{} {} {} 1", limit.algorithm().as_str(), limit.quota(), limit.window_us());
    let capacities = [("burst", limit.burst()), ("queue", limit.queue())];
    for (option, capacity) in capacities {
        if let Some(capacity) = capacity.filter(|capacity| *capacity != limit.quota()) {
            line += &format!(" {option}={capacity}");
        }
    }
    if limit.count_denied() {
        line += " count_denied=1";
    }
    line + " window=fixed"
}

/// An oracle that records what it is asked.
struct Recorder {
    oracle: Oracle,
    steps: Arc<Mutex<Vec<Value>>>,
    /// The admissions that were not refunded: the step, the limits, and the decision.
    admitted: Vec<(usize, Vec<Limit>, Decision)>,
}

fn limits_of(check: &Check<'_>) -> Vec<Limit> {
    check.demands().iter().map(|demand| demand.limit).collect()
}

impl Recorder {
    fn new(steps: Arc<Mutex<Vec<Value>>>) -> Recorder {
        steps.lock().unwrap().clear();
        Recorder { oracle: Oracle::new(), steps, admitted: Vec::new() }
    }
}

impl Implementation for Recorder {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        let decision = self.oracle.check(now, check);
        let demand = |demand: &Demand<'_>| json!({"key_hex": hex(demand.key.subject()), "limit": demand.limit.to_string(), "cost": demand.cost.units()});
        let mut steps = self.steps.lock().unwrap();
        if decision.allowed() {
            self.admitted.push((steps.len(), limits_of(check), decision.clone()));
        }
        steps.push(json!({
            "at_us": now.as_micros(),
            "check": check.demands().iter().map(demand).collect::<Vec<_>>(),
            "allowed": decision.allowed(),
            "limits": decision.limits.iter().map(status).collect::<Vec<_>>(),
        }));
        decision
    }

    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        self.oracle.refund(now, check, decision);
        // A client refunds a decision once, with the limits of its check. Other traces are left out.
        let at = self.admitted.iter().rposition(|(.., admitted)| admitted == decision);
        let refund = match at.map(|at| self.admitted.remove(at)) {
            Some((step, limits, _)) if limits == limits_of(check) => json!(step),
            _ => Value::Null,
        };
        self.steps.lock().unwrap().push(json!({"at_us": now.as_micros(), "refund": refund}));
    }

    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        self.oracle.reset(demand);
        let counter = json!({"key_hex": hex(demand.key.subject()), "limit": demand.limit.to_string()});
        let step = json!({"at_us": now.as_micros(), "reset": counter});
        self.steps.lock().unwrap().push(step);
    }

    fn abilities(&self) -> Abilities {
        Abilities { rules: false, fills: false, ..Abilities::default() }
    }
}

fn status(status: &LimitStatus) -> Value {
    let us = |wait: Wait| wait.as_micros().map_or(-1, |us| us as i64);
    json!({
        "allowed": status.allowed,
        "remaining": status.remaining,
        "retry_after_us": us(status.retry_after),
        "next_after_us": us(status.next_after),
        "reset_after_us": us(status.reset_after),
    })
}

/// Returns the named cases and some random traces of the conformance suite, with the answers of the oracle.
fn traces() -> Vec<Value> {
    let mut traces: Vec<Value> = Vec::new();
    let mut add = |name: String, steps: Vec<Value>| {
        let is_complete = !steps.is_empty() && steps.iter().all(|step| step.get("refund") != Some(&Value::Null));
        if is_complete {
            traces.push(json!({"name": name, "steps": steps}));
        }
    };
    for case in conformance::cases::all() {
        let steps: Arc<Mutex<Vec<Value>>> = Arc::default();
        let mut recorder = Recorder::new(steps.clone());
        if recorder.abilities().cover(case.needs()) {
            case.run(&mut recorder).unwrap_or_else(|failure| panic!("{failure}"));
            add(case.name().to_owned(), std::mem::take(&mut steps.lock().unwrap()));
        }
    }
    for algorithm in Algorithm::ALL {
        let mut recorded: Vec<Arc<Mutex<Vec<Value>>>> = Vec::new();
        let fresh = || {
            recorded.push(Arc::default());
            Recorder::new(recorded[recorded.len() - 1].clone())
        };
        conformance::random_traces_of(algorithm, TRACES, SEED, fresh).unwrap_or_else(|failure| panic!("{failure}"));
        for (number, steps) in recorded.iter().enumerate() {
            add(format!("random {} {number}", algorithm.as_str()), std::mem::take(&mut steps.lock().unwrap()));
        }
    }
    traces
}

/// Returns client addresses behind proxies: the peer, what it sent, the client's address, and the key of its counter.
fn addresses() -> Vec<Value> {
    const TRUSTED: [&str; 2] = ["10.0.0.0/8", "2001:db8:ffff::/48"];
    let forwarded_for: [(&str, &[&str]); 30] = [
        ("203.0.113.9", &[]),
        ("203.0.113.9", &["6.6.6.6"]),
        ("::ffff:203.0.113.9", &["6.6.6.6"]),
        ("2001:db8::9", &["6.6.6.6"]),
        ("10.0.0.1", &["203.0.113.9"]),
        ("::ffff:10.0.0.1", &["203.0.113.9"]),
        ("2001:db8:ffff::1", &["2001:db8::9"]),
        ("10.0.0.1", &["::ffff:203.0.113.9"]),
        ("10.0.0.1", &["::ffff:cb00:7109"]),
        ("10.0.0.1", &["6.6.6.6, 203.0.113.9"]),
        ("10.0.0.1", &["6.6.6.6,203.0.113.9:4711 , 10.0.0.2"]),
        ("10.0.0.1", &["6.6.6.6, 203.0.113.9, [2001:db8:ffff::7]:80, ::ffff:10.0.0.2"]),
        ("10.0.0.1", &["6.6.6.6", "203.0.113.9"]),
        ("10.0.0.1", &["203.0.113.9", "10.0.0.2"]),
        ("10.0.0.1", &["6.6.6.6, 203.0.113.9", "10.0.0.3, 10.0.0.2"]),
        ("10.0.0.1", &["6.6.6.6, unknown"]),
        ("10.0.0.1", &["6.6.6.6, unknown, 10.0.0.2"]),
        ("10.0.0.1", &["6.6.6.6, unknown, 203.0.113.9"]),
        ("10.0.0.1", &["6.6.6.6, "]),
        ("10.0.0.1", &["6.6.6.6,, 10.0.0.2"]),
        ("10.0.0.1", &["6.6.6.6", ""]),
        ("10.0.0.1", &["6.6.6.6 10.0.0.2"]),
        ("10.0.0.1", &["6.6.6.6; 10.0.0.2"]),
        ("10.0.0.1", &["for=203.0.113.9"]),
        ("10.0.0.1", &["10.0.0.3, 10.0.0.2"]),
        ("10.0.0.1", &["203.0.113.09"]),
        ("10.0.0.1", &["[2001:db8:1:2:3:4:5:6]:443"]),
        ("10.0.0.1", &["fe80::1%eth0"]),
        ("10.0.0.1", &["64:ff9b::203.0.113.9"]),
        ("10.0.0.1", &[]),
    ];
    let forwarded: [(&str, &[&str]); 6] = [
        ("10.0.0.1", &["for=203.0.113.9"]),
        ("10.0.0.1", &["For=\"203.0.113.9:4711\";proto=https;by=10.0.0.1"]),
        ("10.0.0.1", &["for=\"[2001:db8::9]:4711\""]),
        ("10.0.0.1", &["for=6.6.6.6, for=203.0.113.9, for=10.0.0.2;host=\"a,b\""]),
        ("10.0.0.1", &["for=6.6.6.6, for=_hidden"]),
        ("10.0.0.1", &["for=6.6.6.6, for=unknown, for=10.0.0.2"]),
    ];
    let single: [(&str, &[&str]); 2] = [("10.0.0.1", &["203.0.113.9"]), ("203.0.113.9", &["6.6.6.6"])];
    let headers =
        [("x-forwarded-for", &forwarded_for[..]), ("forwarded", &forwarded[..]), ("cf-connecting-ip", &single[..])];
    let rows = headers.iter().flat_map(|(header, rows)| rows.iter().map(move |row| (*header, row)));
    rows.map(|(header, (peer, lines))| address(&TRUSTED, header, peer, lines)).collect()
}

fn address(trusted: &[&str], header: &str, peer: &str, lines: &[&str]) -> Value {
    let networks = Networks::parse(trusted.iter().copied()).unwrap();
    let forwarding: ForwardingHeader = header.parse().unwrap();
    let identifier = Identifier::new().with_proxies(TrustedProxies::new(networks, forwarding));
    let mut headers = HeaderMap::new();
    for line in lines {
        headers.append(HeaderName::try_from(header).unwrap(), HeaderValue::from_str(line).unwrap());
    }
    let request = RequestView::new(&Method::GET, "/", &headers);
    let no_keys = KeyTable::default();
    let identity = identifier.identify(&request, peer.parse().unwrap(), &no_keys, Timestamp::ZERO);
    let by = Subjects::parse(["ip"]).unwrap();
    json!({
        "peer": peer,
        "trusted": trusted,
        "header": header,
        "lines": lines,
        "address": identity.address().to_string(),
        "subject": identity.subject(&by).to_string(),
    })
}

/// Returns decisions and the responses to them: status, headers and, for a denial, the body as JSON and as a problem.
fn answers() -> Vec<Value> {
    let at = Timestamp::from_micros(1_760_000_000_250_000);
    let status = |allowed, cost, quota, remaining, waits_us: [u64; 3]| {
        let [retry_after, next_after, reset_after] =
            waits_us.map(|us| if us == u64::MAX { Wait::NEVER } else { Wait::from_micros(us) });
        LimitStatus {
            allowed,
            cost,
            quota,
            remaining,
            retry_after,
            next_after,
            reset_after,
            late_us: 0,
            refunded_before: 0,
        }
    };
    let rows = [
        vec![("10/min", status(true, 1, 10, 9, [0, 60_000_000, 60_000_000]))],
        vec![("10/min", status(false, 1, 10, 0, [11_873_001, 11_873_001, 59_000_000]))],
        vec![("10/min", status(false, 1, 10, 0, [1, 1, 1]))],
        vec![("10/min", status(false, 11, 10, 10, [u64::MAX, 0, 0]))],
        vec![
            ("10/min", status(true, 1, 10, 4, [0, 12_000_000, 48_000_000])),
            ("1000/day", status(true, 1, 1_000, 17, [0, 31_000_000, 86_000_000_000])),
        ],
        vec![
            ("10/min", status(false, 1, 10, 0, [12_000_000, 12_000_000, 48_000_000])),
            ("1000/day", status(true, 1, 1_000, 17, [0, 31_000_000, 86_000_000_000])),
        ],
        vec![
            ("5/10s", status(false, 5, 5, 2, [7_000_000, 1_500_000, 9_000_000])),
            ("250/500ms", status(false, 5, 250, 0, [250_000, 2_000, 499_999])),
            ("100/min token-bucket burst=20", status(true, 5, 100, 20, [0, 0, 0])),
        ],
        // Equal windows have equal names, which are numbered.
        vec![
            ("10/min", status(true, 1, 10, 9, [0, 60_000_000, 60_000_000])),
            ("100/min token-bucket", status(false, 1, 100, 0, [600_000, 600_000, 60_000_000])),
            ("50/min fixed-window", status(true, 1, 50, 49, [0, 9_000_000, 9_000_000])),
        ],
        vec![("60/min leaky-bucket", status(true, 1, 60, 57, [3_000_000, 1_000_000, 3_000_000]))],
    ];
    rows.into_iter().map(|limits| answer(at, &limits)).collect()
}

fn answer(at: Timestamp, limits: &[(&str, LimitStatus)]) -> Value {
    let policies = Policies::new(limits.iter().map(|(text, _)| Policy::of(text.parse().unwrap())));
    let statuses = limits.iter().map(|(_, status)| *status).collect();
    let decision = Decision::new(at, Source::Store, statuses);
    let described = limits.iter().map(|(text, one)| {
        let mut value = status(one);
        value["limit"] = json!(text);
        value["cost"] = json!(one.cost);
        value
    });
    let mut vector = json!({"at_us": at.as_micros(), "limits": described.collect::<Vec<_>>()});
    let (code, headers, body, problem) = if decision.allowed() {
        let mut headers = HeaderMap::new();
        policies.write_headers(&decision, &mut headers);
        (200, headers, Value::Null, Value::Null)
    } else {
        let (head, body) = policies.refuse(&decision, &HeaderMap::new()).into_parts();
        let problem = policies.refuse(&decision, &accepting(&[PROBLEM])).into_body();
        let [body, problem] = [body, problem].map(|body| serde_json::from_slice(&body).unwrap());
        (head.status.as_u16(), head.headers, body, problem)
    };
    let headers = headers.iter().map(|(name, value)| (name.to_string(), json!(value.to_str().unwrap())));
    vector["status"] = json!(code);
    vector["headers"] = Value::Object(headers.collect());
    vector["body"] = body;
    vector["problem"] = problem;
    vector
}

const PROBLEM: &str = "application/problem+json";

fn accepting(lines: &[&str]) -> HeaderMap {
    lines.iter().map(|line| (http::header::ACCEPT, HeaderValue::from_str(line).unwrap())).collect()
}

/// Returns lines of `Accept`, and whether a refusal of a request with them is an RFC 9457 problem document.
fn accepts() -> Vec<Value> {
    let weighted = |weight: &str| format!("{PROBLEM};q={weight}");
    let weights = ["0", "0.0", "0.000", "2", "-1", "nan", "", ".5", "0.1234", "1e3", "0.5x", "1.000", "1.", "0.001"];
    let mut rows: Vec<Vec<String>> = weights.iter().map(|weight| vec![weighted(weight)]).collect();
    let others: [&[&str]; 14] = [
        &[],
        &[""],
        &["*/*"],
        &["application/*"],
        &["application/json"],
        &["application/problem+xml"],
        &[PROBLEM],
        &["Application/Problem+JSON ; Q=0.1"],
        &["text/html, application/problem+json;charset=utf-8;q=0.5, */*;q=0.1"],
        &["text/html", PROBLEM],
        &["application/json, application/problem+json"],
        &["application/json;q=0.8, application/problem+json;q=0.801"],
        &["application/json, application/problem+json;q=0.9"],
        &["application/problem+json;q=0.2", "application/json;q=0.3, application/problem+json;q=0.4"],
    ];
    rows.extend(others.iter().map(|lines| lines.iter().map(|line| (*line).to_owned()).collect()));
    let limit: Limit = "10/min".parse().unwrap();
    let policies = Policies::new([Policy::of(limit)]);
    let key = tidegate::Key::new("a").unwrap();
    let denied =
        Oracle::new().check(Timestamp::from_micros(1), &Check::new(&[Demand::new(limit, key).cost(11)]).unwrap());
    let vector = |lines: Vec<String>| {
        let headers = accepting(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        let refusal = policies.refuse(&denied, &headers);
        let is_problem = refusal.headers()[http::header::CONTENT_TYPE] == PROBLEM;
        json!({"lines": lines, "problem": is_problem})
    };
    rows.into_iter().map(vector).collect()
}
