//! Exact sliding windows on Redis and Valkey, and on a Cluster of three masters: Tidegate, and a common design with a
//! sorted set per key and one script call per request.
//!
//! All contestants use the same servers with the same number of concurrent callers, each of which waits for its
//! decision before it makes the next check. They run one after the other in each of several rounds, and medians are
//! printed. The sorted set is measured twice: with a connection for each caller, as with a pool, and with the requests
//! of all callers pipelined on one connection (to each master). The important results are the ratios of decisions per
//! second, of the CPU time of the server or the masters per decision, and of the memory per admitted request.
//!
//! Tidegate is measured as a service uses it, through the limiter, which caches denials; and through the store alone.
//!
//! ```text
//! cargo bench -p tidegate-bench --bench redis
//! ```
//!
//! `TIDEGATE_BENCH_ROUNDS` sets the number of rounds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::{Limiter, OnFailure};
use tidegate_bench::measure::{median, setting};
use tidegate_core::{Check, Demand, Key, Limit, Store};
use tidegate_redis::RedisStore;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::server::{Brand, Cluster, Config, Server};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

const CALLERS: usize = 64;
const KEYS: usize = 10_000;
/// How long a contestant runs in one round.
const RUN: Duration = Duration::from_secs(1);
const SORTED_SET: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - tonumber(ARGV[2]))
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now, ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2] / 1000)
return 1";

/// One server, or the masters of a Cluster.
struct Servers<'s> {
    url: String,
    all: Vec<&'s Server>,
    /// The index in `all` of the server that has a key, by the number of the key.
    owners: Arc<[usize]>,
    /// Whether the calls of Tidegate have keys of several slots.
    across_slots: bool,
}

impl<'s> Servers<'s> {
    fn one(server: &'s Server) -> Servers<'s> {
        Servers { url: server.url(), all: vec![server], owners: vec![0; KEYS].into(), across_slots: false }
    }

    fn cluster(cluster: &'s Cluster, across_slots: bool) -> Servers<'s> {
        let all = cluster.masters();
        let owner = |key: usize| {
            let owner = cluster.owner_of(cluster.slot_of(&format!("{{{}}}", subject(key))));
            all.iter().position(|server| server.port() == owner.port()).expect("a master")
        };
        let owners = (0..KEYS).map(owner).collect();
        Servers { url: cluster.url(), all, owners, across_slots }
    }

    fn cpu_seconds(&self) -> f64 {
        self.all.iter().map(|server| info(server, "cpu", "used_cpu_user") + info(server, "cpu", "used_cpu_sys")).sum()
    }
}

/// Returns the subject of the key with this number.
fn subject(key: usize) -> String {
    format!("user:{key}")
}

/// An encoded request, and the channel for its verdict.
type PendingRequest = (Vec<u8>, oneshot::Sender<bool>);

/// A sorted set per key and one EVALSHA per request, pipelined on each connection.
#[derive(Clone)]
struct SortedSet {
    /// The connections to each server.
    connections: Vec<Vec<mpsc::Sender<PendingRequest>>>,
    owners: Arc<[usize]>,
    sha: String,
}

impl SortedSet {
    async fn new(servers: &Servers<'_>, connection_count: usize) -> SortedSet {
        let (mut connections, mut sha) = (Vec::new(), String::new());
        for server in &servers.all {
            sha = server.command(&["SCRIPT", "LOAD", SORTED_SET]).text();
            let mut of_server = Vec::new();
            for _ in 0..connection_count {
                of_server.push(pipelined(server).await);
            }
            connections.push(of_server);
        }
        SortedSet { connections, owners: servers.owners.clone(), sha }
    }

    async fn check(&self, caller: usize, key: usize, limit: &Limit, member: &str) -> bool {
        let (quota, window) = (limit.quota().to_string(), limit.window_us().to_string());
        let connections = &self.connections[self.owners[key]];
        let key = format!("sorted:{{{}}}:{window}", subject(key));
        let mut request = b"*7\r\n".to_vec();
        for part in ["EVALSHA", &self.sha, "1", &key, &quota, &window, member] {
            request.extend(format!("${}\r\n{part}\r\n", part.len()).into_bytes());
        }
        let (sender, verdict) = oneshot::channel();
        let connection = &connections[caller % connections.len()];
        connection.send((request, sender)).await.expect("a running writer");
        verdict.await.expect("a verdict")
    }
}

/// Opens a connection and spawns a writer and a reader for it. Requests sent to the channel are pipelined.
async fn pipelined(server: &Server) -> mpsc::Sender<PendingRequest> {
    let stream = TcpStream::connect(server.addr()).await.expect("the server");
    stream.set_nodelay(true).expect("a socket");
    let (reader, mut writer) = stream.into_split();
    let (requests, mut pending) = mpsc::channel::<PendingRequest>(1024);
    let (sent, mut unanswered) = mpsc::unbounded_channel::<oneshot::Sender<bool>>();
    tokio::spawn(async move {
        let mut batch = Vec::new();
        while pending.recv_many(&mut batch, 512).await > 0 {
            let mut bytes = Vec::new();
            for (request, sender) in batch.drain(..) {
                bytes.extend(request);
                sent.send(sender).expect("a running reader");
            }
            writer.write_all(&bytes).await.expect("the server");
        }
    });
    tokio::spawn(async move {
        let mut lines = BufReader::with_capacity(64 << 10, reader).lines();
        while let Some(sender) = unanswered.recv().await {
            let line = lines.next_line().await.expect("the server").expect("a reply");
            assert!(line.starts_with(':'), "{line}");
            let _ = sender.send(line == ":1");
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
    async fn check(&self, caller: usize, key: usize, limit: Limit, member: &str) -> bool {
        match self {
            Contestant::SortedSet(set) => set.check(caller, key, &limit, member).await,
            Contestant::Store(store) => {
                let subject = subject(key);
                let demand = Demand::new(limit, Key::new(&subject).expect("a valid key"));
                store.decide(&[Check::one(&demand)]).await.expect("a decision")[0].allowed()
            }
            Contestant::Limiter(limiter) => {
                let subject = subject(key);
                let demand = Demand::new(limit, Key::new(&subject).expect("a valid key"));
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

/// The condition on which a caller stops.
#[derive(Clone, Copy)]
enum StopCondition {
    /// When [`RUN`] has elapsed.
    RunElapsed,
    /// After this number of decisions.
    Decisions(u64),
}

impl StopCondition {
    fn is_reached(self, start: Instant, decisions: u64) -> bool {
        match self {
            StopCondition::RunElapsed => start.elapsed() >= RUN,
            StopCondition::Decisions(decisions_max) => decisions >= decisions_max,
        }
    }
}

/// Runs all callers concurrently until each of them has reached the stop condition.
#[allow(clippy::disallowed_methods)] // a benchmark measures real time
async fn run(
    servers: &Servers<'_>,
    contestant: &Contestant,
    limit: Limit,
    keys: Keys,
    stop: StopCondition,
) -> Measured {
    let (cpu_before, start) = (servers.cpu_seconds(), Instant::now());
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (contestant, keys) = (contestant.clone(), keys.clone());
            tokio::spawn(async move {
                let mut random = Random::new(caller as u64);
                let (mut decisions, mut admitted) = (0, 0);
                while !stop.is_reached(start, decisions) {
                    let key = keys(&mut random);
                    let member = format!("{caller}-{:016x}", random.next_u64());
                    admitted += u64::from(contestant.check(caller, key, limit, &member).await);
                    decisions += 1;
                }
                (decisions, admitted)
            })
        })
        .collect();
    let (mut decisions, mut admitted) = (0, 0);
    for caller in callers {
        let (caller_decisions, caller_admitted) = caller.await.expect("a caller");
        decisions += caller_decisions;
        admitted += caller_admitted;
    }
    Measured {
        decisions,
        admitted,
        seconds: start.elapsed().as_secs_f64(),
        cpu_seconds: servers.cpu_seconds() - cpu_before,
    }
}

/// Returns the value of a field of `INFO`.
fn info(server: &Server, section: &str, field: &str) -> f64 {
    let info = server.command(&["INFO", section]).text();
    let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).expect("the field");
    value.trim().parse().expect("a number")
}

/// Returns the memory of all keys and their values in bytes, by `MEMORY USAGE`.
fn memory_bytes(server: &Server) -> f64 {
    let mut connection = server.connect().expect("the server");
    let keys = connection.call(&["KEYS", "*"]).expect("a reply");
    let mut usage = |key: &str| connection.call(&["MEMORY", "USAGE", key, "SAMPLES", "0"]).expect("a reply").integer();
    keys.items().iter().map(|key| usage(&key.text()) as f64).sum()
}

/// Returns a generator of key numbers by Zipf's law: the n-th most frequent key is 1/n times as frequent as the first.
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

fn store(servers: &Servers<'_>) -> RedisStore {
    let builder = RedisStore::builder(&*servers.url).call_timeout(Duration::from_secs(5));
    builder.calls_across_slots(servers.across_slots).build().expect("a store")
}

/// Returns a limiter with a deadline that is not reached even on a busy machine, so that no decision is made locally.
fn limiter(servers: &Servers<'_>) -> Limiter {
    let store = Arc::new(store(servers));
    Limiter::builder().store(store).deadline(Duration::from_secs(5)).on_failure(OnFailure::Deny).build()
}

#[derive(Clone, Copy)]
enum ContestantKind {
    SortedSetPerCaller,
    SortedSetPipelined,
    Store,
    Limiter,
}

impl ContestantKind {
    const ALL: [ContestantKind; 4] = [
        ContestantKind::SortedSetPerCaller,
        ContestantKind::SortedSetPipelined,
        ContestantKind::Store,
        ContestantKind::Limiter,
    ];

    fn name(self) -> &'static str {
        match self {
            ContestantKind::SortedSetPerCaller => "sorted set, connection pool",
            ContestantKind::SortedSetPipelined => "sorted set, pipelined",
            ContestantKind::Store => "tidegate, store only",
            ContestantKind::Limiter => "tidegate",
        }
    }

    /// Deletes all keys and returns a new contestant, with an empty cache.
    async fn start(self, servers: &Servers<'_>) -> Contestant {
        for server in &servers.all {
            server.command(&["FLUSHALL", "SYNC"]);
        }
        match self {
            ContestantKind::SortedSetPerCaller => Contestant::SortedSet(SortedSet::new(servers, CALLERS).await),
            ContestantKind::SortedSetPipelined => Contestant::SortedSet(SortedSet::new(servers, 1).await),
            ContestantKind::Store => Contestant::Store(store(servers)),
            ContestantKind::Limiter => Contestant::Limiter(limiter(servers)),
        }
    }
}

/// Returns the number of the next key.
type Keys = Arc<dyn Fn(&mut Random) -> usize + Send + Sync>;

/// The samples of one contestant, one for each round.
#[derive(Default)]
struct Rounds {
    rates: Vec<f64>,
    cpu_us: Vec<f64>,
    admitted: Vec<f64>,
    /// Only for the store alone; empty for the others.
    decisions_per_call: Vec<f64>,
}

/// Returns the median over the rounds of `value / first` in the same round.
fn ratio(values: &[f64], first: &[f64]) -> f64 {
    median(values.iter().zip(first).map(|(value, first)| value / first).collect())
}

/// Measures all contestants in each round and prints rates, CPU time and the share of admitted requests.
async fn speed(servers: &Servers<'_>, limit: Limit, keys: &Keys, rounds: usize) {
    let mut all: [Rounds; ContestantKind::ALL.len()] = Default::default();
    for _ in 0..rounds {
        for (kind, rounds) in ContestantKind::ALL.into_iter().zip(&mut all) {
            let contestant = kind.start(servers).await;
            let measured = run(servers, &contestant, limit, keys.clone(), StopCondition::RunElapsed).await;
            rounds.rates.push(measured.decisions as f64 / measured.seconds);
            rounds.cpu_us.push(measured.cpu_seconds * 1e6 / measured.decisions as f64);
            rounds.admitted.push(100.0 * measured.admitted as f64 / measured.decisions as f64);
            if let Contestant::Store(store) = contestant {
                let stats = store.stats();
                rounds.decisions_per_call.push(stats.decisions as f64 / stats.calls as f64);
            }
        }
    }
    for (kind, rounds) in ContestantKind::ALL.into_iter().zip(&all) {
        print!(
            "  {:29}  {:9.0} decisions/s ({:5.2}x)   {:6.2} us server CPU per decision ({:.2}x)   {:.0} % admitted",
            kind.name(),
            median(rounds.rates.clone()),
            ratio(&rounds.rates, &all[0].rates),
            median(rounds.cpu_us.clone()),
            ratio(&rounds.cpu_us, &all[0].cpu_us),
            median(rounds.admitted.clone()),
        );
        if rounds.decisions_per_call.is_empty() {
            println!()
        } else {
            println!("   {:.1} decisions per call", median(rounds.decisions_per_call.clone()))
        }
    }
}

/// Measures the memory per admitted request and prints it. Keys are visited in turn, so that all reach the quota.
async fn memory(server: &Server, limit: Limit) {
    let (servers, mut first) = (Servers::one(server), None);
    for kind in ContestantKind::ALL {
        let contestant = kind.start(&servers).await;
        let subjects = 200_000 / limit.quota() as usize;
        let next = std::sync::atomic::AtomicUsize::new(0);
        let keys_in_turn: Keys = Arc::new(move |_| next.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % subjects);
        let measured =
            run(&servers, &contestant, limit, keys_in_turn, StopCondition::Decisions(200_000 / CALLERS as u64)).await;
        let bytes = memory_bytes(server) / measured.admitted as f64;
        let first_bytes = *first.get_or_insert(bytes);
        println!("  {:29}  {bytes:6.1} bytes per admitted request ({:.3}x)", kind.name(), bytes / first_bytes);
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let rounds = setting("TIDEGATE_BENCH_ROUNDS", 9);
    for brand in Brand::ALL {
        let (server, cluster) = (Config::new(brand).start(), Cluster::start(brand));
        let limit: Limit = "100/min".parse().expect("a limit");
        let uniform: Keys = Arc::new(|random| random.below(KEYS as u64) as usize);
        let skewed: Keys = Arc::new(zipf());
        let places = [
            ("one server", Servers::one(&server)),
            ("Cluster", Servers::cluster(&cluster, false)),
            ("Cluster with calls across slots", Servers::cluster(&cluster, true)),
        ];
        for (name, keys) in [("uniform", uniform), ("zipf", skewed)] {
            for (place, servers) in &places {
                println!("{brand}, {place}, {name} keys, {limit}, {CALLERS} callers, {rounds} rounds");
                speed(servers, limit, &keys, rounds).await;
            }
        }
        drop(cluster);
        for limit in ["100/h", "1000/h"] {
            println!("{brand}, memory at {limit}");
            memory(&server, limit.parse().expect("a limit")).await;
        }
    }
}
