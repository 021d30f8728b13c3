//! Several processes on one Redis, and on a cluster: no trailing window holds more than its quota, and every denial is
//! justified.
//!
//! ```text
//!   parent ── starts ──▶ 4 workers (this binary again) ── 16 tasks each ──▶ one redis-server
//!      ▲                     │ every decision, as a record in a file
//!      └──── merges them into one history and verifies it ◀──┘
//! ```
//!
//! Each worker is a node with batches, a deny cache, and a clock that is wrong by up to a minute. Records have the time of
//! the monotonic clock that all processes of a machine share, so that the checker can compare them. A long campaign has many
//! rounds with counters of their own, so that the history of a round fits into memory.
//!
//! On the cluster, every slot is moved to another master during the run. There, a check has one subject, because the
//! checker requires that a check is decided as a whole.

use std::cell::Cell;
use std::fs::File;
use std::future::{Future, poll_fn};
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tidegate::{Check, Clock, Decision, Demand, Key, Limit, Limiter, Source, Timestamp};
use tidegate_redis::RedisStore;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::history::{Bounds, History, Report};
use tidegate_testkit::server::{Brand, Cluster, SLOTS, Server};

use record::Record;

mod record;

const TASKS: u64 = 16;
const KEYS: usize = 100;
const SKEWS_S: [i64; 4] = [-60, -13, 29, 60];
/// Limits the memory of a history.
const ROUND_DECISIONS_MAX: u64 = 1_000_000;
/// So long that a busy machine makes no decision local.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The test that a worker process runs.
const WORKER: &str = "distributed::worker";
const URL_VARIABLE: &str = "TIDEGATE_WORKER_URL";
const WORK_VARIABLE: &str = "TIDEGATE_WORKER_WORK";
const RECORDS_VARIABLE: &str = "TIDEGATE_WORKER_RECORDS";
/// A file that exists while the workers must not end, even if they have made their share of the decisions.
const BUSY_VARIABLE: &str = "TIDEGATE_WORKER_BUSY";
/// A worker ends at the latest after this many times its share of the decisions.
const SHARES_MAX: u64 = 20;
/// The number of decisions. Defaults to a million.
const DECISIONS_VARIABLE: &str = "TIDEGATE_SHARED_DECISIONS";

#[test]
fn four_processes_on_one_redis_exceed_no_quota_and_deny_no_check_without_reason() {
    let server = Server::redis();
    let (decided, by_store) = run_rounds(&server.url(), decisions_wanted(), |_| ());
    let calls = server.script_calls();
    println!("{decided} decisions, {by_store} limit statuses of the store, {calls} calls");
    assert!(calls < decided / 4, "{calls} calls for {decided} decisions");
}

fn decisions_wanted() -> u64 {
    std::env::var(DECISIONS_VARIABLE).map_or(1_000_000, |text| text.parse().expect("a number of decisions"))
}

fn four_processes_on_a_cluster_whose_slots_move(brand: Brand, wanted: u64) {
    let cluster = Cluster::start(brand);
    let (decided, by_store) = run_rounds(&cluster.url(), wanted, |round| move_every_slot(&cluster, round));
    println!("{brand}: {decided} decisions, {by_store} limit statuses of the store");
}

#[test]
fn four_processes_on_a_redis_cluster_whose_slots_move_exceed_no_quota_and_deny_no_check_without_reason() {
    four_processes_on_a_cluster_whose_slots_move(Brand::Redis, decisions_wanted());
}

#[test]
fn four_processes_on_a_valkey_cluster_whose_slots_move_exceed_no_quota_and_deny_no_check_without_reason() {
    four_processes_on_a_cluster_whose_slots_move(Brand::Valkey, decisions_wanted() / 4);
}

/// Moves the slots of each master to the next one: each slot once, a few at a time. Called once for each round.
///
/// On Redis each slot is moved key by key, on Valkey by `CLUSTER MIGRATESLOTS`.
fn move_every_slot(cluster: &Cluster, round: usize) {
    let shard = SLOTS.div_ceil(3);
    for (index, first) in (0..SLOTS).step_by(usize::from(shard)).enumerate() {
        let [source, target] = [round, round + 1].map(|moves| &cluster.nodes()[(index + moves) % 3]);
        let slots: Vec<u16> = (first..(first + shard).min(SLOTS)).collect();
        match source.brand() {
            Brand::Redis => slots.chunks(64).for_each(|slots| cluster.move_slots(slots, target)),
            Brand::Valkey => slots.chunks(512).for_each(|slots| {
                cluster.migrate_slots(slots[0]..=slots[slots.len() - 1], source, target);
            }),
        }
    }
}

/// Runs rounds, and calls `meanwhile` with the number of each, until `wanted` decisions have been made.
///
/// Returns the number of decisions, and the number of limit statuses that came from the store.
fn run_rounds(url: &str, wanted: u64, meanwhile: impl Fn(usize)) -> (u64, u64) {
    let (mut decided, mut by_store) = (0, 0);
    for round in 0.. {
        let report = run_round(url, round, (wanted - decided).min(ROUND_DECISIONS_MAX), || meanwhile(round));
        println!("round {round}: {report}");
        report.expect_clean();
        assert!(report.admitted > 0 && report.refused > 0 && report.cached > 0, "all kinds of decisions: {report}");
        assert_eq!((report.local, report.uncounted), (0, 0), "no decision was degraded: {report}");
        decided += report.checks;
        by_store += report.admitted + report.refused;
        if decided >= wanted {
            break;
        }
    }
    (decided, by_store)
}

/// Starts the workers, calls `meanwhile`, and verifies the history of their decisions.
///
/// The workers make `decisions` in all, or more if `meanwhile` takes longer.
fn run_round(url: &str, round: usize, decisions: u64, meanwhile: impl FnOnce()) -> Report {
    let dir = tempfile::tempdir().unwrap();
    let busy = dir.path().join("busy");
    File::create(&busy).unwrap();
    let share = decisions.div_ceil(SKEWS_S.len() as u64 * TASKS);
    let start = |(worker, skew_s): (usize, &i64)| {
        let records = dir.path().join(worker.to_string());
        let child = Command::new(std::env::current_exe().unwrap())
            .args([WORKER, "--exact", "--nocapture"])
            .env(URL_VARIABLE, url)
            .env(BUSY_VARIABLE, &busy)
            .env(WORK_VARIABLE, format!("{round} {worker} {skew_s} {share}"))
            .env(RECORDS_VARIABLE, &records)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this binary can be started again");
        (child, records)
    };
    let workers: Vec<_> = SKEWS_S.iter().enumerate().map(start).collect();
    meanwhile();
    std::fs::remove_file(&busy).unwrap();
    let mut history = History::new((0..KEYS).map(limit_of));
    // Wait for all workers before any assertion, so that a failure leaves no process behind.
    let ended: Vec<_> =
        workers.into_iter().map(|(child, records)| (child.wait_with_output().unwrap(), records)).collect();
    for (output, records) in ended {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "a worker failed\n{}\n{}", text(&output.stdout), text(&output.stderr));
        read_into(&mut history, &records);
    }
    // The masters of a cluster may have different clocks, and a counter moves from one to another.
    let skew_us = if url.starts_with("redis+cluster://") { 2_000 } else { 0 };
    history.verify(Bounds { skew_us, ..Bounds::default() })
}

fn read_into(history: &mut History, records: &Path) {
    let mut file = BufReader::new(File::open(records).unwrap());
    while let Some(record) = Record::read(&mut file, |counter| limit_of(counter).quota()).unwrap() {
        history.note(&record.counters, record.sent_us, record.received_us, &record.decision);
    }
}

/// Returns the limit of a counter: small windows, exact ones, a log, and one above the exact quota.
fn limit_of(counter: usize) -> Limit {
    let text = ["50/100ms", "200/s", "20/50ms sliding-log", "1500/300ms"][counter % 4];
    text.parse().unwrap()
}

/// The body of a worker process, which the test above starts. Does nothing if the variables are not set.
#[test]
fn worker() {
    let (Ok(url), Ok(work)) = (std::env::var(URL_VARIABLE), std::env::var(WORK_VARIABLE)) else {
        println!("nothing to do: {URL_VARIABLE} and {WORK_VARIABLE} are not set");
        return;
    };
    let numbers: Vec<i64> = work.split(' ').map(|number| number.parse().unwrap()).collect();
    let [round, worker, skew_s, share] = numbers[..] else { panic!("four numbers, not {work:?}") };
    let records = PathBuf::from(std::env::var_os(RECORDS_VARIABLE).unwrap());
    // One thread, so that no other task runs between a decision and the record of its time. The checker needs that time
    // for cached denials. The processes are concurrent enough.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let is_cluster = url.starts_with("redis+cluster://");
        // Bans are read by calls of their own where a slot is being moved.
        let builder = RedisStore::builder(url).prefix(format!("round-{round}")).call_timeout(TIMEOUT).bans(is_cluster);
        // Half of the workers send checks of different slots in one call.
        let builder = builder.calls_across_slots(worker % 2 == 1);
        let store = Arc::new(builder.build().unwrap());
        let clock = Arc::new(NodeClock { skew_us: skew_s * 1_000_000 });
        let limiter = Limiter::builder().store(store.clone()).clock(clock).deadline(TIMEOUT).build();
        let share = u64::try_from(share).unwrap() * TASKS;
        let left = Arc::new(AtomicU64::new(share * SHARES_MAX));
        let busy = std::env::var_os(BUSY_VARIABLE).map(PathBuf::from).unwrap();
        let until = Until { left, left_min: share * (SHARES_MAX - 1), busy };
        let start = |task: u64| {
            let path = records.with_extension(task.to_string());
            let subjects_max = if is_cluster { 1 } else { 2 };
            let caller = Caller { limiter: limiter.clone(), until: until.clone(), subjects_max, path };
            tokio::spawn(caller.run(Random::new(round as u64 * 1_000 + worker as u64 * 100 + task)))
        };
        let tasks: Vec<_> = (0..TASKS).map(start).collect();
        let mut all = BufWriter::new(File::create(&records).unwrap());
        for task in tasks {
            let path = task.await.unwrap();
            std::io::copy(&mut File::open(path).unwrap(), &mut all).unwrap();
        }
        all.flush().unwrap();
        println!("{:?} {:?}", limiter.stats(), store.stats());
    });
}

/// When the tasks of a worker end.
#[derive(Clone)]
struct Until {
    /// The number of decisions that the worker may still make.
    left: Arc<AtomicU64>,
    /// The worker has made its share if no more than these are left.
    left_min: u64,
    busy: PathBuf,
}

impl Until {
    /// Returns whether to make another decision.
    fn is_before(&self) -> bool {
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) {
            // Reading the directory for every decision would be slow.
            Ok(left) => left > self.left_min || left % 64 != 0 || self.busy.exists(),
            Err(_) => false,
        }
    }
}

/// One task of a worker.
struct Caller {
    limiter: Limiter,
    until: Until,
    subjects_max: usize,
    path: PathBuf,
}

impl Caller {
    async fn run(self, mut random: Random) -> PathBuf {
        let mut file = BufWriter::new(File::create(&self.path).unwrap());
        let subjects: Vec<String> = (0..KEYS).map(|counter| format!("client-{counter}")).collect();
        while self.until.is_before() {
            let (counters, demands) = random_demands(&mut random, &subjects, self.subjects_max);
            let (sent_us, decision) = check(&self.limiter, &Check::new(&demands).unwrap()).await;
            let received_us = monotonic_us();
            assert!(matches!(decision.source, Source::Store | Source::DenyCache), "{decision:?}");
            let is_cached = decision.source == Source::DenyCache;
            Record { counters, sent_us, received_us, decision }.write(&mut file).unwrap();
            if is_cached {
                // A cached denial does not await anything, so let other tasks run.
                tokio::task::yield_now().await;
            }
        }
        file.flush().unwrap();
        self.path
    }
}

/// Returns demands for one or, with `subjects_max` 2, two counters, mostly for one unit.
fn random_demands<'a>(
    random: &mut Random,
    subjects: &'a [String],
    subjects_max: usize,
) -> (Vec<usize>, Vec<Demand<'a>>) {
    let first = random.below(KEYS as u64) as usize;
    let second = (first + 1 + random.below(9) as usize) % KEYS;
    let has_two = random.below(4) == 0 && subjects_max > 1;
    let counters = if has_two { vec![first, second] } else { vec![first] };
    let cost = if random.below(5) == 0 { 1 + random.below(5) as u32 } else { 1 };
    let demand = |&counter: &usize| Demand::new(limit_of(counter), Key::new(&subjects[counter]).unwrap()).cost(cost);
    let demands = counters.iter().map(demand).collect();
    (counters, demands)
}

/// Returns the decision and the time that the limiter read at the start.
///
/// A time read outside the limiter could be later, if the process is interrupted in between. Then a valid cached denial
/// would look expired.
async fn check(limiter: &Limiter, check: &Check<'_>) -> (u64, Decision) {
    let mut future = pin!(limiter.check(check));
    let first = poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await;
    let sent_us = LAST_READ_US.get();
    let decision = match first {
        Poll::Ready(decision) => decision,
        Poll::Pending => future.await,
    };
    (sent_us, decision.unwrap())
}

thread_local! {
    /// The last time that this thread read from the clock, without the skew.
    static LAST_READ_US: Cell<u64> = const { Cell::new(0) };
}

/// The clock of a node, with a skew.
struct NodeClock {
    skew_us: i64,
}

impl Clock for NodeClock {
    fn now(&self) -> Timestamp {
        let now_us = monotonic_us();
        LAST_READ_US.set(now_us);
        // Far from the epoch, so that no skew leads before it.
        Timestamp::from_micros((1_700_000_000_000_000 + now_us).saturating_add_signed(self.skew_us))
    }
}

/// Returns the time of the monotonic clock, which all processes of a machine share.
fn monotonic_us() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000
}
