//! A limiter on a master that Sentinels watch: what a failover costs, and how soon it heals.
//!
//! `make failover` repeats each failover [`ROUNDS_VARIABLE`] times, prints the figures, and asserts their bounds. A
//! plain run makes one of each, and asserts no times.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tidegate::{Check, Demand, Key, Limit, Limiter, Source, Store};
use tidegate_redis::{RedisStore, RedisStoreBuilder};
use tidegate_testkit::fake_sentinel::{FakeSentinel, SentinelAnswer};
use tidegate_testkit::history::{Bounds, History, Report};
use tidegate_testkit::poll;
use tidegate_testkit::server::{Brand, Config, Connection, SentinelGroup, Server};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// The number of failovers of each kind, for figures.
const ROUNDS_VARIABLE: &str = "TIDEGATE_FAILOVERS";
const CALLERS: usize = 8;
/// The pause of a caller between two checks. The machine must not be busy with the callers alone.
const PAUSE: Duration = Duration::from_millis(1);
const QUOTA: u64 = 100;
/// Limits of [`QUOTA`] units. The windows are so short that counters are often at their limits, and a window ends
/// several times during a failover.
const LIMITS: [&str; 4] = ["100/200ms", "100/s", "100/500ms sliding-log", "100/300ms"];

/// Callers that make checks until they are stopped, and the record of their decisions.
struct Load {
    limiter: Limiter,
    is_over: Arc<AtomicBool>,
    recorded: Arc<Mutex<Recorded>>,
    callers: Vec<JoinHandle<()>>,
}

struct Recorded {
    history: History,
    /// When each decision was received, and what made it.
    decided: Vec<(Instant, Source)>,
}

impl Load {
    async fn start(store: RedisStore, deadline: Duration) -> Load {
        let limiter = Limiter::builder().store(Arc::new(store)).deadline(deadline).announce(false).build();
        let started = Instant::now();
        let history = History::new(LIMITS.iter().map(|limit| limit.parse::<Limit>().unwrap()));
        let recorded = Arc::new(Mutex::new(Recorded { history, decided: Vec::new() }));
        let is_over = Arc::new(AtomicBool::new(false));
        let caller = |caller: usize| {
            let (limiter, recorded, is_over) = (limiter.clone(), recorded.clone(), is_over.clone());
            tokio::spawn(async move {
                while !is_over.load(Ordering::Relaxed) {
                    let counter = caller % LIMITS.len();
                    let subject = format!("client-{counter}");
                    let demand = Demand::new(LIMITS[counter].parse().unwrap(), Key::new(&subject).unwrap());
                    let sent_us = started.elapsed().as_micros() as u64;
                    let decision = limiter.check(&Check::one(&demand)).await.unwrap();
                    let received_us = started.elapsed().as_micros() as u64;
                    {
                        let mut recorded = recorded.lock().unwrap();
                        recorded.decided.push((Instant::now(), decision.source));
                        // Cached denials of the old master are no decisions of the new one.
                        if decision.source != Source::DenyCache {
                            recorded.history.note(&[counter], sent_us, received_us, &decision);
                        }
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            })
        };
        let callers = (0..CALLERS).map(caller).collect();
        let load = Load { limiter, is_over, recorded, callers };
        load.until_decided_by_store(started).await;
        load
    }

    /// Waits for a decision of the store after this time, and returns its time.
    async fn until_decided_by_store(&self, since: Instant) -> Instant {
        let mut found = None;
        poll::until("a decision of the store", || {
            let recorded = self.recorded.lock().unwrap();
            let later = recorded.decided.iter().rev().take_while(|(at, _)| *at > since);
            found = later.filter(|(_, source)| *source == Source::Store).map(|(at, _)| *at).min();
            found.is_some()
        })
        .await;
        found.unwrap()
    }

    /// Ends the callers. Returns the history, the number of decisions, and that of degraded ones.
    async fn stop(self) -> (History, usize, usize) {
        self.is_over.store(true, Ordering::Relaxed);
        for caller in self.callers {
            caller.await.unwrap();
        }
        let recorded = self.recorded.lock().unwrap();
        let degraded = recorded.decided.iter().filter(|(_, source)| *source == Source::Local).count();
        (recorded.history.clone(), recorded.decided.len(), degraded)
    }
}

/// Subscribes to all Sentinels, and returns a thread that returns when the first of them announced another master.
fn announced(group: &SentinelGroup) -> thread::JoinHandle<Instant> {
    let (sender, receiver) = std::sync::mpsc::channel();
    for sentinel in group.sentinels() {
        let mut connection: Connection = sentinel.connect().unwrap();
        connection.call(&["SUBSCRIBE", "+switch-master"]).unwrap();
        let sender = sender.clone();
        thread::spawn(move || {
            while connection.receive().is_ok_and(|message| message.items().len() == 3) {
                if sender.send(Instant::now()).is_err() {
                    return;
                }
            }
        });
    }
    thread::spawn(move || receiver.recv_timeout(Duration::from_secs(60)).expect("an announcement"))
}

/// Watches a server: the number of script calls that it has executed, and when it last executed one.
struct CallsOf {
    last: Arc<Mutex<Option<Instant>>>,
    is_over: Arc<AtomicBool>,
    calls: Arc<AtomicU64>,
}

impl CallsOf {
    fn watch(server: &Server) -> CallsOf {
        let (last, is_over, calls) = (Arc::default(), Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let watch = CallsOf { last, is_over, calls };
        let (last, is_over, calls) = (watch.last.clone(), watch.is_over.clone(), watch.calls.clone());
        let addr = server.addr();
        thread::spawn(move || {
            let mut connection = Connection::open(addr);
            while !is_over.load(Ordering::Relaxed) {
                // A master that is demoted closes its connections.
                let Some(count) = connection.as_mut().ok().and_then(|open| open.script_calls().ok()) else {
                    connection = Connection::open(addr);
                    continue;
                };
                if count > calls.swap(count, Ordering::Relaxed) {
                    *last.lock().unwrap() = Some(Instant::now());
                }
                // There is no message for a call, so this polls.
                thread::sleep(Duration::from_millis(2));
            }
        });
        watch
    }
}

impl Drop for CallsOf {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

fn rounds() -> Option<usize> {
    std::env::var(ROUNDS_VARIABLE).ok().map(|rounds| rounds.parse().expect("a number of failovers"))
}

/// Prints the smallest, the middle and the largest of some times.
fn print_figures(what: &str, mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    let (least, most) = (times[0], times[times.len() - 1]);
    println!("{what}: {least:.1?} to {most:.1?}, median {:.1?}, {} runs", times[times.len() / 2], times.len());
    most
}

/// Verifies that the store has admitted no more than the quota and what the failover may have lost.
///
/// Between the promotion of the replica and the announcement, the old master decides. What it admits within a window is
/// at most the quota, and the new master does not know of it.
fn verify(history: History) -> Report {
    let verify = |lost: u64| {
        let bounds = Bounds { lost: Some(lost), local: Some(QUOTA), ..Bounds::default() };
        history.clone().verify(bounds)
    };
    let report = verify(QUOTA);
    report.expect_clean();
    let lost = (0..=QUOTA).find(|&lost| verify(lost).violations_total == 0).unwrap();
    println!("lost units that explain all decisions: {lost} of a quota of {QUOTA}");
    report
}

fn brands() -> &'static [Brand] {
    // One brand in a plain run: `tidegate-redis` tests both.
    if rounds().is_some() { &Brand::ALL } else { &Brand::ALL[..1] }
}

/// Deadline of the checks: the default for figures, else so long that a busy machine makes no decision local.
fn deadline() -> Duration {
    Duration::from_millis(if rounds().is_some() { 25 } else { 10_000 })
}

/// Creates a store whose calls do not time out before the deadline.
fn store_at(url: String) -> RedisStore {
    let call_timeout = RedisStoreBuilder::CALL_TIMEOUT_DEFAULT.max(deadline());
    RedisStore::builder(url).call_timeout(call_timeout).build().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planned_failover_leaves_the_old_master_and_loses_at_most_a_quota() {
    for &brand in brands() {
        let (mut late, mut gaps) = (Vec::new(), Vec::new());
        for round in 0..rounds().unwrap_or(1) {
            let group = SentinelGroup::start(brand);
            if round % 2 == 1 {
                group.slow_down();
            }
            let store = store_at(group.url());
            let load = Load::start(store.clone(), deadline()).await;
            let (old, new) = (group.master().addr(), group.replicas()[0]);
            let calls = CallsOf::watch(group.master());
            poll::until("the old master decides", || calls.calls.load(Ordering::Relaxed) > 100).await;
            let announced = announced(&group);
            tokio::task::block_in_place(|| group.fail_over());
            let address = Some(new.url());
            poll::until("the limiter uses the new master", || {
                load.limiter.servers().iter().any(|server| server.address == address)
            })
            .await;
            let announced = tokio::task::block_in_place(|| announced.join().unwrap());
            let healed = load.until_decided_by_store(announced).await;
            let wait = if rounds().is_some() { 3_000 } else { 100 };
            tokio::time::sleep(Duration::from_millis(wait)).await;
            assert!(load.limiter.servers().iter().all(|server| !server.breaker_open), "{brand}");
            let last = calls.last.lock().unwrap().unwrap();
            late.push(last.saturating_duration_since(announced));
            gaps.push(healed.saturating_duration_since(announced));
            let (history, decisions, degraded) = load.stop().await;
            let report = verify(history);
            println!("{brand}: {old} to {}: {degraded} of {decisions} degraded; {report}", new.addr());
            assert_eq!((store.stats().failovers, store.stats().panics), (1, 0), "{brand}");
        }
        let late = print_figures(&format!("{brand}: last call on the old master after +switch-master"), late);
        print_figures(&format!("{brand}: next decision of the store after +switch-master"), gaps);
        if rounds().is_some() {
            assert!(late < Duration::from_millis(500), "{late:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_master_degrades_checks_until_another_is_elected() {
    for &brand in brands() {
        let mut healing = Vec::new();
        for _ in 0..rounds().unwrap_or(1) {
            let group = SentinelGroup::start(brand);
            let store = store_at(group.url());
            let load = Load::start(store.clone(), deadline()).await;
            let new = group.replicas()[0];
            let announced = announced(&group);
            group.detect_failures();
            group.master().kill9();
            let killed = Instant::now();
            let announced = tokio::task::block_in_place(|| announced.join().unwrap());
            let healed = load.until_decided_by_store(announced).await;
            let servers = load.limiter.servers();
            assert_eq!((servers.len(), servers[0].address.clone()), (1, Some(new.url())), "{brand}");
            assert!(!servers[0].breaker_open, "{brand}");
            healing.push(healed.saturating_duration_since(announced));
            let election = announced.saturating_duration_since(killed);
            let (history, decisions, degraded) = load.stop().await;
            assert!(degraded > 0, "{brand}");
            let report = verify(history);
            println!("{brand}: elected after {election:.1?}: {degraded} of {decisions} degraded; {report}");
        }
        let most = print_figures(&format!("{brand}: healed after the election"), healing);
        if rounds().is_some() {
            assert!(most < Duration::from_secs(2), "{most:?}");
        }
    }
}

/// The Sentinel announces nothing, so the store learns of the new master from the `READONLY` reply of the old one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demoted_master_is_not_used_after_its_first_read_only_reply() {
    for &brand in brands() {
        let mut healing = Vec::new();
        for _ in 0..rounds().unwrap_or(1) {
            let [old, new] = [(); 2].map(|()| Config::new(brand).start());
            let answer =
                |server: &Server, epoch| SentinelAnswer::Master { port: server.port(), epoch, announces: false };
            let sentinel = FakeSentinel::start(answer(&old, 1)).await;
            let store = store_at(format!("redis+sentinel://{}/main", sentinel.addr()));
            let load = Load::start(store.clone(), deadline()).await;
            sentinel.set_answer(answer(&new, 2));
            let demoted = Instant::now();
            old.command(&["REPLICAOF", "127.0.0.1", &new.port().to_string()]);
            let address = Some(new.url());
            poll::until("the store uses the new master", || store.shards()[0].address == address).await;
            let healed = load.until_decided_by_store(Instant::now()).await;
            healing.push(healed.saturating_duration_since(demoted));
            let (_, decisions, degraded) = load.stop().await;
            println!("{brand}: {degraded} of {decisions} degraded");
        }
        let most = print_figures(&format!("{brand}: healed after READONLY"), healing);
        if rounds().is_some() {
            assert!(most < Duration::from_millis(500), "{most:?}");
        }
    }
}

/// Compares decisions with and without waiting for a replica: rate, CPU time of the master, and latency.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_for_a_replica_decides_the_same_and_its_cost_is_printed() {
    let decisions = if rounds().is_some() { 40_000 } else { 400 };
    for &brand in brands() {
        let group = SentinelGroup::start(brand);
        let mut figures = Vec::new();
        for replicas in [0, 1] {
            let builder = RedisStore::builder(group.url()).call_timeout(Duration::from_secs(30));
            let builder = builder.prefix(format!("replicas-{replicas}")).replicas(replicas, Duration::from_secs(20));
            let store = Arc::new(builder.build().unwrap());
            let check = |subject: usize| {
                let store = store.clone();
                async move {
                    let subject = format!("client-{subject}");
                    let demand = Demand::new("1000000/h".parse().unwrap(), Key::new(&subject).unwrap());
                    assert!(store.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());
                }
            };
            check(0).await;
            let mut latencies = Vec::new();
            for _ in 0..decisions / 40 {
                let sent = Instant::now();
                check(1).await;
                latencies.push(sent.elapsed());
            }
            latencies.sort_unstable();
            let (began, cpu_before) = (Instant::now(), cpu_of(group.master()));
            let callers = (0..64).map(|caller| async move {
                for round in 0..decisions / 64 {
                    check(caller * 100 + round % 100).await;
                }
            });
            futures_util::future::join_all(callers).await;
            let per_second = decisions as f64 / began.elapsed().as_secs_f64();
            let cpu_us = (cpu_of(group.master()) - cpu_before) * 1e6 / decisions as f64;
            let median = latencies[latencies.len() / 2];
            println!(
                "{brand}: replicas = {replicas}: {per_second:.0} decisions/s by 64 callers, {cpu_us:.1} µs of the master each, \
                 median latency of one caller {median:.0?}"
            );
            figures.push((per_second, cpu_us, median.as_secs_f64()));
        }
        let ratio = |read: fn(&(f64, f64, f64)) -> f64| read(&figures[1]) / read(&figures[0]);
        println!(
            "{brand}: waiting for a replica: {:.2} times the decisions/s, {:.2} times the processor time, {:.2} times the latency",
            ratio(|figures| figures.0),
            ratio(|figures| figures.1),
            ratio(|figures| figures.2)
        );
    }
}

/// Returns the CPU time that a server has used, in seconds.
fn cpu_of(server: &Server) -> f64 {
    let info = server.command(&["INFO", "cpu"]).text();
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.parse::<f64>().ok()).unwrap();
    field("used_cpu_sys:") + field("used_cpu_user:")
}
