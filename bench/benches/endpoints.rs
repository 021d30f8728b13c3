//! The CPU time per response of `tidegate serve`, redis-server and throttlecrab-server.
//!
//! ```text
//! cargo bench -p tidegate-bench --bench endpoints [-- WORDS]
//! ```
//!
//! `TIDEGATE_BENCH_ROUNDS` sets the number of rounds. `TIDEGATE_BENCH_ANSWERS` sets the number of responses in a round of
//! RESP ×16; the other rounds have a quarter of them. `TIDEGATE_BENCH_BEFORE` is the path of another `tidegate` binary to
//! compare with.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use tidegate_bench::endpoint::{
    Load, Process, Protocol, RequestSource, binary_before, free_addr, install_peer, tidegate_binary,
};
use tidegate_bench::measure::{median, print_table, setting};

const CONNECTIONS: usize = 8;
const LIVE_KEYS: u64 = 1_000_000;
/// A limit that is never reached, and one that is reached at once.
const ADMITTED: &str = "10000000/s token-bucket";
const DENIED: &str = "1/day token-bucket";
/// A limit with the default algorithm, whose state is the largest.
const SLIDING: &str = "1000000/min";

/// The keys of a workload.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    /// A single key.
    Hot,
    /// [`LIVE_KEYS`] keys, which all have counters before the first round.
    Live,
    /// A different key for every request.
    New,
}

struct Contestant {
    name: &'static str,
    /// The index of its server among the processes.
    process: usize,
    /// The number of requests in flight on each connection.
    depth: usize,
    source: RequestSource,
}

/// The samples of one contestant, one for each round.
struct Row {
    name: &'static str,
    /// CPU time per response in microseconds.
    us: Vec<f64>,
    /// The CPU time of the first contestant divided by that of this one.
    ratios: Vec<f64>,
}

/// Returns the key of the request with the number `n`.
fn key(keys: Keys, n: u64) -> String {
    match keys {
        Keys::Hot => "user:42".to_owned(),
        // Visits all keys, because 611,953 is prime to their number, in an order that defeats caches.
        Keys::Live => format!("user:{}", n.wrapping_mul(611_953) % LIVE_KEYS),
        Keys::New => format!("visitor:{n}"),
    }
}

/// Appends a command in RESP.
fn resp(words: &[&str], out: &mut Vec<u8>) {
    out.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        out.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
}

fn incr(keys: Keys) -> RequestSource {
    let write = move |n, out: &mut Vec<u8>| resp(&["INCR", &key(keys, n)], out);
    RequestSource { protocol: Protocol::Resp { lines: 1 }, write: Box::new(write) }
}

fn check(keys: Keys, limit: &'static str) -> RequestSource {
    let write = move |n, out: &mut Vec<u8>| resp(&["TIDEGATE.CHECK", &key(keys, n), limit], out);
    RequestSource { protocol: Protocol::Resp { lines: 6 }, write: Box::new(write) }
}

fn throttle() -> RequestSource {
    let write = |n, out: &mut Vec<u8>| resp(&["CL.THROTTLE", &key(Keys::Hot, n), "999999", "1000000", "1"], out);
    RequestSource { protocol: Protocol::Resp { lines: 6 }, write: Box::new(write) }
}

fn post(path: &'static str, body: impl Fn(u64) -> String + 'static) -> RequestSource {
    let write = move |n, out: &mut Vec<u8>| {
        let body = body(n);
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(body.as_bytes());
    };
    RequestSource { protocol: Protocol::Http, write: Box::new(write) }
}

fn http(keys: Keys, limit: &'static str) -> RequestSource {
    post("/v1/check", move |n| format!(r#"{{"key":"{}","limit":"{limit}"}}"#, key(keys, n)))
}

fn throttlecrab(keys: Keys, burst: u64, count: u64) -> RequestSource {
    post("/throttle", move |n| {
        format!(r#"{{"key":"{}","max_burst":{burst},"count_per_period":{count},"period":60}}"#, key(keys, n))
    })
}

/// Measures the contestants, one after the other in each round, and prints a table. Does nothing if there are none.
///
/// Each sends at least `count` requests per round. Speeds are relative to the first contestant.
fn measure(title: &str, processes: &[Process], contestants: &mut [Contestant], count: usize) {
    if contestants.is_empty() {
        return;
    }
    let rounds = setting("TIDEGATE_BENCH_ROUNDS", 9);
    // The number of requests that each has sent, so that new keys stay new.
    let mut sent = vec![0; contestants.len()];
    let mut rows: Vec<Row> =
        contestants.iter().map(|one| Row { name: one.name, us: Vec::new(), ratios: Vec::new() }).collect();
    for round in 0..=rounds {
        let mut first = 0.0;
        for ((one, sent), row) in contestants.iter_mut().zip(&mut sent).zip(&mut rows) {
            let process = &processes[one.process];
            // Connections are opened for each round, so that idle ones do not disturb other measurements.
            let mut load = Load::new(process.addr, CONNECTIONS, *sent);
            if round == 0 && one.name.contains("live") {
                load.run(&mut one.source, one.depth, LIVE_KEYS as usize);
            }
            let before = process.cpu_seconds();
            let responses = load.run(&mut one.source, one.depth, count);
            *sent = load.sent();
            let us = (process.cpu_seconds() - before) * 1e6 / responses as f64;
            if first == 0.0 {
                first = us;
            }
            // Round 0 is for warming up.
            if round > 0 {
                row.us.push(us);
                row.ratios.push(first / us);
            }
        }
    }
    println!("\n{title}, median of {rounds} rounds");
    let rows: Vec<Vec<String>> = rows
        .into_iter()
        .map(|row| {
            vec![row.name.to_owned(), format!("{:.2} µs", median(row.us)), format!("{:.2}×", median(row.ratios))]
        })
        .collect();
    print_table(&["", "CPU per response", "speed"], &rows);
}

/// Starts `tidegate serve` on free ports. The address of the process is that of the RESP listener, the other that of HTTP.
fn serve(binary: &Path) -> (Process, SocketAddr) {
    let [http, resp, admin] = [free_addr(), free_addr(), free_addr()];
    let mut command = Command::new(binary);
    command.args(["serve", "--store", "memory", "--http", &http.to_string(), "--resp", &resp.to_string()]);
    command.args(["--admin", &admin.to_string()]);
    (Process::start(&mut command, resp), http)
}

/// Indexes of the processes. `PEER` is redis-server for RESP and throttlecrab-server for HTTP.
const TIDEGATE: usize = 0;
const PEER: usize = 1;
const BEFORE: usize = 2;

fn resp_contestants(depth: usize, has_before: bool) -> Vec<Contestant> {
    let one = |name, process, source| Contestant { name, process, depth, source };
    let mut contestants = vec![
        one("redis-server INCR, hot", PEER, incr(Keys::Hot)),
        one("TIDEGATE.CHECK, hot", TIDEGATE, check(Keys::Hot, ADMITTED)),
        one("TIDEGATE.CHECK, hot, sliding", TIDEGATE, check(Keys::Hot, SLIDING)),
        one("TIDEGATE.CHECK, hot, denied", TIDEGATE, check(Keys::Hot, DENIED)),
        one("CL.THROTTLE, hot", TIDEGATE, throttle()),
        one("redis-server INCR, 1 M live", PEER, incr(Keys::Live)),
        one("TIDEGATE.CHECK, 1 M live", TIDEGATE, check(Keys::Live, "1000/h token-bucket")),
        one("redis-server INCR, all new", PEER, incr(Keys::New)),
        one("TIDEGATE.CHECK, all new", TIDEGATE, check(Keys::New, "1000/h token-bucket")),
    ];
    if has_before {
        contestants.insert(2, one("TIDEGATE.CHECK, hot, before", BEFORE, check(Keys::Hot, ADMITTED)));
    }
    contestants
}

fn http_contestants(has_before: bool) -> Vec<Contestant> {
    let one = |name, process, source| Contestant { name, process, depth: 1, source };
    let mut contestants = vec![
        one("throttlecrab-server, hot", PEER, throttlecrab(Keys::Hot, 1_000_000, 10_000_000)),
        one("POST /v1/check, hot", TIDEGATE, http(Keys::Hot, ADMITTED)),
        one("POST /v1/check, hot, sliding", TIDEGATE, http(Keys::Hot, SLIDING)),
        one("throttlecrab-server, denied", PEER, throttlecrab(Keys::Hot, 1, 1)),
        one("POST /v1/check, denied", TIDEGATE, http(Keys::Hot, DENIED)),
        one("throttlecrab-server, 1 M live", PEER, throttlecrab(Keys::Live, 1_000, 1_000)),
        one("POST /v1/check, 1 M live", TIDEGATE, http(Keys::Live, "1000/h token-bucket")),
        one("throttlecrab-server, all new", PEER, throttlecrab(Keys::New, 1_000, 1_000)),
        one("POST /v1/check, all new", TIDEGATE, http(Keys::New, "1000/h token-bucket")),
    ];
    if has_before {
        contestants.insert(2, one("POST /v1/check, hot, before", BEFORE, http(Keys::Hot, ADMITTED)));
    }
    contestants
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    // `-- "RESP ×1:" hot` selects the contestants whose title and name contain all words, and the first one of their table,
    // because the others are compared with it.
    let select = |title: &str, contestants: Vec<Contestant>| {
        let is_selected = |one: &Contestant| {
            let name = format!("{title}: {}", one.name);
            words.iter().all(|word| name.contains(word.as_str()))
        };
        let first = contestants.first().map(|one| one.name);
        let any_selected = contestants.iter().any(is_selected);
        let selected =
            contestants.into_iter().filter(|one| any_selected && (is_selected(one) || Some(one.name) == first));
        selected.collect::<Vec<_>>()
    };
    let count = setting("TIDEGATE_BENCH_ANSWERS", 200_000);
    let binary_before = binary_before();
    let has_before = binary_before.is_some();
    let mut http_selected = select("HTTP", http_contestants(has_before));
    // Install first: if a tool is missing, this fails before the measurements.
    let install = || install_peer("throttlecrab-server", "protoc", "apt-get install protobuf-compiler");
    let peer = (!http_selected.is_empty()).then(install);

    let redis_addr = free_addr();
    let mut redis = Command::new("redis-server");
    redis.args(["--port", &redis_addr.port().to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
    let (tidegate, http_addr) = serve(&tidegate_binary());
    let mut processes = vec![tidegate, Process::start(&mut redis, redis_addr)];
    let before = binary_before.map(|binary| serve(&binary));
    let http_addr_before = before.as_ref().map(|(_, http_addr)| *http_addr);
    processes.extend(before.map(|(process, _)| process));

    for depth in [16, 1] {
        let title = format!("RESP ×{depth}");
        let mut resp_selected = select(&title, resp_contestants(depth, has_before));
        measure(&title, &processes, &mut resp_selected, if depth == 1 { count / 4 } else { count });
    }

    if let Some(peer) = peer {
        let peer_addr = free_addr();
        let mut peer = Command::new(peer);
        peer.args(["--http", "--http-host", "127.0.0.1", "--http-port", &peer_addr.port().to_string()]);
        processes[TIDEGATE].addr = http_addr;
        processes[PEER] = Process::start(&mut peer, peer_addr);
        if let Some(addr) = http_addr_before {
            processes[BEFORE].addr = addr;
        }
        measure("HTTP", &processes, &mut http_selected, count / 4);
    }
}
