//! Exact sliding windows beside the design of most tutorials: a sorted set per key, one script call per request.
//!
//! All run on the same server with the same number of concurrent callers, each of whom asks, waits for the
//! answer and asks again. They take turns, several rounds of them, and the medians are shown. The sorted set is asked twice: by callers with a connection each, as with a pool, and by
//! callers whose requests are pipelined on one connection. What counts are the ratios: decisions per second, the
//! server's CPU time per decision, its memory per admitted request.
//!
//! Tollgate is asked as a service asks it, through the limiter, which remembers denials; and once through the store alone.
//!
//! ```text
//! cargo bench -p tollgate-bench --bench redis
//! ```
//!
//! The number of rounds by `TOLLGATE_BENCH_ROUNDS`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tollgate::{Limiter, OnFailure};
use tollgate_bench::measure::{median, setting};
use tollgate_core::{Check, Demand, Key, Limit, Store};
use tollgate_redis::RedisStore;
use tollgate_testkit::conformance::Random;
use tollgate_testkit::server::{Brand, Config, Server};

const CALLERS: usize = 64;
const KEYS: usize = 10_000;
const RUN: Duration = Duration::from_secs(1);
const SORTED_SET: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - tonumber(ARGV[2]))
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now, ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2] / 1000)
return 1";

type Waiting = (Vec<u8>, oneshot::Sender<bool>);

/// One EVALSHA per request, pipelined on as many connections.
#[derive(Clone)]
struct SortedSet {
    connections: Vec<mpsc::Sender<Waiting>>,
    sha: String,
}

impl SortedSet {
    async fn new(server: &Server, connection_count: usize) -> SortedSet {
        let sha = server.command(&["SCRIPT", "LOAD", SORTED_SET]).text();
        let mut connections = Vec::new();
        for _ in 0..connection_count {
            connections.push(pipelined(server).await);
        }
        SortedSet { connections, sha }
    }

    async fn check(&self, caller: usize, subject: &str, limit: &Limit, member: &str) -> bool {
        let (quota, window) = (limit.quota().to_string(), limit.window_us().to_string());
        let key = format!("sorted:{{{subject}}}:{window}");
        let mut request = b"*7\r\n".to_vec();
        for part in ["EVALSHA", &self.sha, "1", &key, &quota, &window, member] {
            request.extend(format!("${}\r\n{part}\r\n", part.len()).into_bytes());
        }
        let (waiter, answer) = oneshot::channel();
        let connection = &self.connections[caller % self.connections.len()];
        connection.send((request, waiter)).await.expect("the writer lives");
        answer.await.expect("an answer")
    }
}

async fn pipelined(server: &Server) -> mpsc::Sender<Waiting> {
    let stream = TcpStream::connect(server.addr()).await.expect("the server");
    stream.set_nodelay(true).expect("a socket");
    let (reader, mut writer) = stream.into_split();
    let (requests, mut waiting) = mpsc::channel::<Waiting>(1024);
    let (sent, mut unanswered) = mpsc::unbounded_channel::<oneshot::Sender<bool>>();
    tokio::spawn(async move {
        let mut works = Vec::new();
        while waiting.recv_many(&mut works, 512).await > 0 {
            let mut bytes = Vec::new();
            for (request, waiter) in works.drain(..) {
                bytes.extend(request);
                sent.send(waiter).expect("the reader lives");
            }
            writer.write_all(&bytes).await.expect("the server");
        }
    });
    tokio::spawn(async move {
        let mut lines = BufReader::with_capacity(64 << 10, reader).lines();
        while let Some(waiter) = unanswered.recv().await {
            let line = lines.next_line().await.expect("the server").expect("a reply");
            assert!(line.starts_with(':'), "{line}");
            let _ = waiter.send(line == ":1");
        }
    });
    requests
}

#[derive(Clone)]
enum Contestant {
    SortedSet(SortedSet),
    Store(RedisStore),
    Limiter(Limiter),
}

impl Contestant {
    async fn check(&self, caller: usize, subject: &str, limit: Limit, member: &str) -> bool {
        match self {
            Contestant::SortedSet(set) => set.check(caller, subject, &limit, member).await,
            Contestant::Store(store) => {
                let demand = Demand::new(limit, Key::new(subject).expect("a short key"));
                store.decide(&[Check::one(&demand)]).await.expect("a decision")[0].allowed()
            }
            Contestant::Limiter(limiter) => {
                let demand = Demand::new(limit, Key::new(subject).expect("a short key"));
                limiter.check(&Check::one(&demand)).await.expect("a decision").allowed()
            }
        }
    }
}

struct Measured {
    decisions: u64,
    admitted: u64,
    seconds: f64,
    cpu_seconds: f64,
}

/// When a caller stops.
#[derive(Clone, Copy)]
enum Until {
    RunIsOver,
    /// It has asked so often.
    Asked(u64),
}

impl Until {
    fn is_reached(self, start: Instant, asked: u64) -> bool {
        match self {
            Until::RunIsOver => start.elapsed() >= RUN,
            Until::Asked(asks_max) => asked >= asks_max,
        }
    }
}

/// All callers at once.
#[allow(clippy::disallowed_methods)] // a benchmark measures real time
async fn run(server: &Server, contestant: &Contestant, limit: Limit, keys: Keys, until: Until) -> Measured {
    let (cpu_before, start) = (cpu_seconds(server), Instant::now());
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (contestant, keys) = (contestant.clone(), keys.clone());
            tokio::spawn(async move {
                let mut random = Random::new(caller as u64);
                let (mut decisions, mut admitted) = (0, 0);
                while !until.is_reached(start, decisions) {
                    let subject = format!("user:{}", keys(&mut random));
                    let member = format!("{caller}-{:016x}", random.next_u64());
                    admitted += u64::from(contestant.check(caller, &subject, limit, &member).await);
                    decisions += 1;
                }
                (decisions, admitted)
            })
        })
        .collect();
    let (mut decisions, mut admitted) = (0, 0);
    for caller in callers {
        let (its_decisions, its_admitted) = caller.await.expect("a caller");
        decisions += its_decisions;
        admitted += its_admitted;
    }
    Measured {
        decisions,
        admitted,
        seconds: start.elapsed().as_secs_f64(),
        cpu_seconds: cpu_seconds(server) - cpu_before,
    }
}

fn info(server: &Server, section: &str, field: &str) -> f64 {
    let info = server.command(&["INFO", section]).text();
    let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).expect("the field");
    value.trim().parse().expect("a number")
}

fn cpu_seconds(server: &Server) -> f64 {
    info(server, "cpu", "used_cpu_user") + info(server, "cpu", "used_cpu_sys")
}

/// What all keys take, each with its value.
fn memory_bytes(server: &Server) -> f64 {
    let mut connection = server.connect().expect("the server");
    let keys = connection.call(&["KEYS", "*"]).expect("a reply");
    let mut usage = |key: &str| connection.call(&["MEMORY", "USAGE", key, "SAMPLES", "0"]).expect("a reply").integer();
    keys.items().iter().map(|key| usage(&key.text()) as f64).sum()
}

fn zipf() -> impl Fn(&mut Random) -> usize + Send + Sync {
    let mut sum = 0.0;
    let cumulated: Vec<f64> = (1..=KEYS)
        .map(|rank| {
            sum += 1.0 / rank as f64;
            sum
        })
        .collect();
    move |random| cumulated.partition_point(|&at| at < random.unit() * sum)
}

fn store(server: &Server) -> RedisStore {
    RedisStore::builder(server.url()).call_timeout(Duration::from_secs(5)).build().expect("a store")
}

/// As a service has it, but with a patience that a busy machine cannot exhaust: a local answer would be no measurement.
fn limiter(server: &Server) -> Limiter {
    let store = Arc::new(store(server));
    Limiter::builder().store(store).deadline(Duration::from_secs(5)).on_failure(OnFailure::Deny).build()
}

#[derive(Clone, Copy)]
enum Who {
    SortedSetEach,
    SortedSetPipelined,
    Store,
    Limiter,
}

impl Who {
    const ALL: [Who; 4] = [Who::SortedSetEach, Who::SortedSetPipelined, Who::Store, Who::Limiter];

    fn name(self) -> &'static str {
        match self {
            Who::SortedSetEach => "sorted set, a connection each",
            Who::SortedSetPipelined => "sorted set, pipelined",
            Who::Store => "tollgate, the store alone",
            Who::Limiter => "tollgate",
        }
    }

    /// One who remembers nothing, on a server that remembers nothing.
    async fn begins(self, server: &Server) -> Contestant {
        server.command(&["FLUSHALL", "SYNC"]);
        match self {
            Who::SortedSetEach => Contestant::SortedSet(SortedSet::new(server, CALLERS).await),
            Who::SortedSetPipelined => Contestant::SortedSet(SortedSet::new(server, 1).await),
            Who::Store => Contestant::Store(store(server)),
            Who::Limiter => Contestant::Limiter(limiter(server)),
        }
    }
}

type Keys = Arc<dyn Fn(&mut Random) -> usize + Send + Sync>;

/// What one contestant did in each round.
#[derive(Default)]
struct Rounds {
    rates: Vec<f64>,
    cpu_us: Vec<f64>,
    admitted: Vec<f64>,
    decisions_a_call: Vec<f64>,
}

/// The median over the rounds of how this compares with the first in the same round.
fn ratio(values: &[f64], first: &[f64]) -> f64 {
    median(values.iter().zip(first).map(|(value, first)| value / first).collect())
}

/// Each contestant has its turn in each round: what else the machine does meets all of them.
async fn speed(server: &Server, limit: Limit, keys: &Keys, rounds: usize) {
    let mut all: [Rounds; Who::ALL.len()] = Default::default();
    for _ in 0..rounds {
        for (who, rounds) in Who::ALL.into_iter().zip(&mut all) {
            let contestant = who.begins(server).await;
            let measured = run(server, &contestant, limit, keys.clone(), Until::RunIsOver).await;
            rounds.rates.push(measured.decisions as f64 / measured.seconds);
            rounds.cpu_us.push(measured.cpu_seconds * 1e6 / measured.decisions as f64);
            rounds.admitted.push(100.0 * measured.admitted as f64 / measured.decisions as f64);
            if let Contestant::Store(store) = contestant {
                let stats = store.stats();
                rounds.decisions_a_call.push(stats.decisions as f64 / stats.calls as f64);
            }
        }
    }
    for (who, rounds) in Who::ALL.into_iter().zip(&all) {
        print!(
            "  {:29}  {:9.0} decisions/s ({:5.2}x)   {:6.2} us of the server's CPU each ({:.2}x)   {:.0} % admitted",
            who.name(),
            median(rounds.rates.clone()),
            ratio(&rounds.rates, &all[0].rates),
            median(rounds.cpu_us.clone()),
            ratio(&rounds.cpu_us, &all[0].cpu_us),
            median(rounds.admitted.clone()),
        );
        match rounds.decisions_a_call.is_empty() {
            true => println!(),
            false => println!("   {:.1} decisions a call", median(rounds.decisions_a_call.clone())),
        }
    }
}

async fn memory(server: &Server, limit: Limit) {
    let mut first = None;
    for who in Who::ALL {
        let contestant = who.begins(server).await;
        let subjects = 200_000 / limit.quota() as usize;
        let next = std::sync::atomic::AtomicUsize::new(0);
        let one_by_one: Keys = Arc::new(move |_| next.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % subjects);
        let measured = run(server, &contestant, limit, one_by_one, Until::Asked(200_000 / CALLERS as u64)).await;
        let bytes = memory_bytes(server) / measured.admitted as f64;
        let first_bytes = *first.get_or_insert(bytes);
        println!("  {:29}  {bytes:6.1} bytes per admitted request ({:.3}x)", who.name(), bytes / first_bytes);
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let rounds = setting("TOLLGATE_BENCH_ROUNDS", 9);
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        let limit: Limit = "100/min".parse().expect("a limit");
        let uniform: Keys = Arc::new(|random| random.below(KEYS as u64) as usize);
        let skewed: Keys = Arc::new(zipf());
        for (name, keys) in [("uniform", uniform), ("zipf", skewed)] {
            println!("{brand}, {name} keys, {limit}, {CALLERS} callers, {rounds} rounds");
            speed(&server, limit, &keys, rounds).await;
        }
        for limit in ["100/h", "1000/h"] {
            println!("{brand}, memory at {limit}");
            memory(&server, limit.parse().expect("a limit")).await;
        }
    }
}
