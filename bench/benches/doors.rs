//! The doors of `tollgate serve`, beside servers that people use for the same.
//!
//! ```text
//! cargo bench -p tollgate-bench --bench doors
//! ```

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use tollgate_bench::door::{Load, Process, Protocol, Questions, binary_before, free_addr, published, tollgate_binary};
use tollgate_bench::measure::{median, print_table, setting};

const CONNECTIONS: usize = 8;
const LIVE_KEYS: u64 = 1_000_000;
/// Beyond what anybody reaches, or reached at once.
const ADMITTED: &str = "10000000/s token-bucket";
const DENIED: &str = "1/day token-bucket";
/// The limit that is asked by default, and the one whose state is largest.
const SLIDING: &str = "1000000/min";

/// Which keys are asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    Hot,
    Live,
    New,
}

struct Contestant {
    name: &'static str,
    process: usize,
    depth: usize,
    questions: Questions,
}

/// One row of a table: what it costs, and against whom it is held.
struct Row {
    name: &'static str,
    us: Vec<f64>,
    ratios: Vec<f64>,
}

fn key(keys: Keys, n: u64) -> String {
    match keys {
        Keys::Hot => "user:42".to_owned(),
        // All of them, in an order that no cache can follow: 611,953 is prime.
        Keys::Live => format!("user:{}", n.wrapping_mul(611_953) % LIVE_KEYS),
        Keys::New => format!("visitor:{n}"),
    }
}

fn resp(words: &[&str], out: &mut Vec<u8>) {
    out.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        out.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
}

fn incr(keys: Keys) -> Questions {
    let write = move |n, out: &mut Vec<u8>| resp(&["INCR", &key(keys, n)], out);
    Questions { protocol: Protocol::Resp { lines: 1 }, write: Box::new(write) }
}

fn check(keys: Keys, limit: &'static str) -> Questions {
    let write = move |n, out: &mut Vec<u8>| resp(&["TOLLGATE.CHECK", &key(keys, n), limit], out);
    Questions { protocol: Protocol::Resp { lines: 6 }, write: Box::new(write) }
}

fn throttle() -> Questions {
    let write = |n, out: &mut Vec<u8>| resp(&["CL.THROTTLE", &key(Keys::Hot, n), "999999", "1000000", "1"], out);
    Questions { protocol: Protocol::Resp { lines: 6 }, write: Box::new(write) }
}

fn post(path: &'static str, body: impl Fn(u64) -> String + 'static) -> Questions {
    let write = move |n, out: &mut Vec<u8>| {
        let body = body(n);
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(body.as_bytes());
    };
    Questions { protocol: Protocol::Http, write: Box::new(write) }
}

fn http(keys: Keys, limit: &'static str) -> Questions {
    post("/v1/check", move |n| format!(r#"{{"key":"{}","limit":"{limit}"}}"#, key(keys, n)))
}

fn throttlecrab(keys: Keys, burst: u64, count: u64) -> Questions {
    post("/throttle", move |n| {
        format!(r#"{{"key":"{}","max_burst":{burst},"count_per_period":{count},"period":60}}"#, key(keys, n))
    })
}

/// Rounds in turn; the first contestant is the one the others are held against.
fn measure(title: &str, processes: &[Process], contestants: &mut [Contestant], count: usize) {
    if contestants.is_empty() {
        return;
    }
    let rounds = setting("TOLLGATE_BENCH_ROUNDS", 9);
    // How many questions each has asked, so that new keys stay new.
    let mut asked = vec![0; contestants.len()];
    let mut rows: Vec<Row> =
        contestants.iter().map(|one| Row { name: one.name, us: Vec::new(), ratios: Vec::new() }).collect();
    for round in 0..=rounds {
        let mut first = 0.0;
        for ((one, asked), row) in contestants.iter_mut().zip(&mut asked).zip(&mut rows) {
            let process = &processes[one.process];
            // Nobody's connection waits while others are measured.
            let mut load = Load::new(process.addr, CONNECTIONS, *asked);
            if round == 0 && one.name.contains("live") {
                load.run(&mut one.questions, one.depth, LIVE_KEYS as usize);
            }
            let before = process.cpu_seconds();
            let answered = load.run(&mut one.questions, one.depth, count);
            *asked = load.asked();
            let us = (process.cpu_seconds() - before) * 1e6 / answered as f64;
            if first == 0.0 {
                first = us;
            }
            // The first round warms up.
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
    print_table(&["", "CPU per answer", "speed"], &rows);
}

/// An instance on free ports; its RESP door is the process's address, its HTTP door the other one.
fn serve(binary: &Path) -> (Process, SocketAddr) {
    let [http, resp, admin] = [free_addr(), free_addr(), free_addr()];
    let mut command = Command::new(binary);
    command.args(["serve", "--store", "memory", "--http", &http.to_string(), "--resp", &resp.to_string()]);
    command.args(["--admin", &admin.to_string()]);
    (Process::start(&mut command, resp), http)
}

/// Their places among the processes.
const OURS: usize = 0;
const THEIRS: usize = 1;
const BEFORE: usize = 2;

fn resp_contestants(depth: usize, has_before: bool) -> Vec<Contestant> {
    let one = |name, process, questions| Contestant { name, process, depth, questions };
    let mut contestants = vec![
        one("redis-server INCR, hot", THEIRS, incr(Keys::Hot)),
        one("TOLLGATE.CHECK, hot", OURS, check(Keys::Hot, ADMITTED)),
        one("TOLLGATE.CHECK, hot, sliding", OURS, check(Keys::Hot, SLIDING)),
        one("TOLLGATE.CHECK, hot, denied", OURS, check(Keys::Hot, DENIED)),
        one("CL.THROTTLE, hot", OURS, throttle()),
        one("redis-server INCR, 1 M live", THEIRS, incr(Keys::Live)),
        one("TOLLGATE.CHECK, 1 M live", OURS, check(Keys::Live, "1000/h token-bucket")),
        one("redis-server INCR, all new", THEIRS, incr(Keys::New)),
        one("TOLLGATE.CHECK, all new", OURS, check(Keys::New, "1000/h token-bucket")),
    ];
    if has_before {
        contestants.insert(2, one("TOLLGATE.CHECK, hot, before", BEFORE, check(Keys::Hot, ADMITTED)));
    }
    contestants
}

fn http_contestants(has_before: bool) -> Vec<Contestant> {
    let one = |name, process, questions| Contestant { name, process, depth: 1, questions };
    let mut contestants = vec![
        one("throttlecrab-server, hot", THEIRS, throttlecrab(Keys::Hot, 1_000_000, 10_000_000)),
        one("POST /v1/check, hot", OURS, http(Keys::Hot, ADMITTED)),
        one("POST /v1/check, hot, sliding", OURS, http(Keys::Hot, SLIDING)),
        one("throttlecrab-server, denied", THEIRS, throttlecrab(Keys::Hot, 1, 1)),
        one("POST /v1/check, denied", OURS, http(Keys::Hot, DENIED)),
        one("throttlecrab-server, 1 M live", THEIRS, throttlecrab(Keys::Live, 1_000, 1_000)),
        one("POST /v1/check, 1 M live", OURS, http(Keys::Live, "1000/h token-bucket")),
        one("throttlecrab-server, all new", THEIRS, throttlecrab(Keys::New, 1_000, 1_000)),
        one("POST /v1/check, all new", OURS, http(Keys::New, "1000/h token-bucket")),
    ];
    if has_before {
        contestants.insert(2, one("POST /v1/check, hot, before", BEFORE, http(Keys::Hot, ADMITTED)));
    }
    contestants
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    // `-- "RESP ×1:" hot`: what holds all the words; the first of a table always, because the others are held against it.
    let chosen_of = |title: &str, contestants: Vec<Contestant>| {
        let is_chosen = |one: &Contestant| {
            let name = format!("{title}: {}", one.name);
            words.iter().all(|word| name.contains(word.as_str()))
        };
        let first = contestants.first().map(|one| one.name);
        let any = contestants.iter().any(is_chosen);
        let kept = contestants.into_iter().filter(|one| any && (is_chosen(one) || Some(one.name) == first));
        kept.collect::<Vec<_>>()
    };
    let count = setting("TOLLGATE_BENCH_ANSWERS", 200_000);
    let binary_before = binary_before();
    let has_before = binary_before.is_some();
    let mut of_http = chosen_of("HTTP", http_contestants(has_before));
    // What is missing is told before anything is measured.
    let install = || published("throttlecrab-server", "protoc", "apt-get install protobuf-compiler");
    let peer = (!of_http.is_empty()).then(install);

    let redis_addr = free_addr();
    let mut redis = Command::new("redis-server");
    redis.args(["--port", &redis_addr.port().to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
    let (tollgate, http_addr) = serve(&tollgate_binary());
    let mut processes = vec![tollgate, Process::start(&mut redis, redis_addr)];
    let before = binary_before.map(|binary| serve(&binary));
    let http_addr_before = before.as_ref().map(|(_, http_addr)| *http_addr);
    processes.extend(before.map(|(process, _)| process));

    for depth in [16, 1] {
        let title = format!("RESP ×{depth}");
        let mut of_resp = chosen_of(&title, resp_contestants(depth, has_before));
        measure(&title, &processes, &mut of_resp, if depth == 1 { count / 4 } else { count });
    }

    if let Some(peer) = peer {
        let peer_addr = free_addr();
        let mut peer = Command::new(peer);
        peer.args(["--http", "--http-host", "127.0.0.1", "--http-port", &peer_addr.port().to_string()]);
        processes[OURS].addr = http_addr;
        processes[THEIRS] = Process::start(&mut peer, peer_addr);
        if let Some(addr) = http_addr_before {
            processes[BEFORE].addr = addr;
        }
        measure("HTTP", &processes, &mut of_http, count / 4);
    }
}
