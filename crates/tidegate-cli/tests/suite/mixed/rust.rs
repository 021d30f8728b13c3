//! The participants of the mixed run that are threads of the test: the library, and the listeners of the service.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate::{Check, Decision, Demand, Key, Limit, Limiter, Source};
use tidegate_redis::RedisStore;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::history::Reported;

use super::worker::Event;
use super::{CHECKS, JOURNAL, JOURNAL_QUOTA, KEYS, PATIENCE, Participant, Record, key_of, limit_of, wall_us};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::Serving;

const LIBRARY_TASKS: u64 = 8;

/// Running threads, one for each participant.
pub(super) struct Threads {
    threads: Vec<(&'static str, JoinHandle<Vec<Record>>)>,
    is_over: Arc<AtomicBool>,
}

impl Threads {
    /// Starts the threads. Each sends `made` when it has made its checks.
    pub(super) fn start(redis_url: &str, service: &Serving, events: &Sender<Event>) -> Threads {
        let is_over = Arc::new(AtomicBool::new(false));
        let log = || Log { records: Vec::new(), is_over: is_over.clone(), events: events.clone() };
        let (url, http, resp) = (redis_url.to_owned(), service.http.clone(), service.connect());
        let (library, over_http, over_resp) = (log(), log(), log());
        let threads = vec![
            ("Rust, library", std::thread::spawn(move || run_library(&url, library))),
            ("HTTP, one connection", std::thread::spawn(move || run_http(HttpClient::open(&http), over_http))),
            ("RESP, one connection", std::thread::spawn(move || run_resp(resp, over_resp))),
        ];
        Threads { threads, is_over }
    }

    pub(super) fn participants(&self) -> usize {
        self.threads.len()
    }

    /// Ends the threads and returns their decisions.
    pub(super) fn end(mut self) -> Vec<Participant> {
        self.is_over.store(true, Ordering::Relaxed);
        let ended = self.threads.drain(..);
        ended.map(|(name, thread)| Participant { name: name.to_owned(), records: thread.join().unwrap() }).collect()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// The decisions of one thread.
struct Log {
    records: Vec<Record>,
    is_over: Arc<AtomicBool>,
    events: Sender<Event>,
}

impl Log {
    fn note(&mut self, counter: usize, reported: Reported) {
        self.records.push(Record { counter, reported });
        if self.records.len() as u64 == CHECKS {
            let _ = self.events.send(Ok("made".to_owned()));
        }
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.events.send(Err("a thread of the run has panicked".to_owned()));
        }
    }
}

fn random_check(random: &mut Random) -> (usize, u32) {
    (random.below(KEYS as u64) as usize, [1, 1, 1, 2, 3][random.below(5) as usize])
}

fn run_library(url: &str, log: Log) -> Vec<Record> {
    // One thread, so that no other task runs between a decision and the reading of its time.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let store = RedisStore::builder(url).call_timeout(PATIENCE).build().unwrap();
        let limiter = Limiter::builder().store(Arc::new(store)).deadline(PATIENCE).build();
        let log = Arc::new(std::sync::Mutex::new(log));
        let start = |task| tokio::spawn(run_task(limiter.clone(), Random::new(100 + task), log.clone()));
        let tasks: Vec<_> = (0..LIBRARY_TASKS).map(start).collect();
        for task in tasks {
            task.await.unwrap();
        }
        let mut log = log.lock().unwrap();
        std::mem::take(&mut log.records)
    })
}

async fn run_task(limiter: Limiter, mut random: Random, log: Arc<std::sync::Mutex<Log>>) {
    let journal: Limit = JOURNAL.parse().unwrap();
    while !log.lock().unwrap().is_over() {
        let (counter, cost) = random_check(&mut random);
        let (limit, key) = (limit_of(counter).parse().unwrap(), key_of(counter));
        let demands = [limit, journal].map(|limit| Demand::new(limit, Key::new(&key).unwrap()).cost(cost));
        let check = Check::new(&demands).unwrap();
        let sent_us = wall_us();
        let decision = limiter.check(&check).await.unwrap();
        let received_us = wall_us();
        log.lock().unwrap().note(counter, reported(&decision, sent_us, received_us));
        if decision.source == Source::DenyCache {
            // Cached denials cost next to nothing. Without a pause they would take the time of all others.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

fn reported(decision: &Decision, sent_us: u64, received_us: u64) -> Reported {
    let [status, journal] = decision.limits[..] else { panic!("{decision:?}") };
    Reported {
        sent_us,
        received_us,
        cost: status.cost,
        allowed: decision.allowed(),
        remaining: status.remaining,
        retry_after_us: status.retry_after.as_micros().unwrap(),
        rounded_up_to_us: 1,
        journal_units: JOURNAL_QUOTA - u64::from(journal.remaining),
        source: Some(decision.source),
    }
}

fn run_http(mut client: HttpClient, mut log: Log) -> Vec<Record> {
    let mut random = Random::new(200);
    while !log.is_over() {
        let (counter, cost) = random_check(&mut random);
        let check = |limit: &str| serde_json::json!({ "key": key_of(counter), "limit": limit, "cost": cost });
        let body = serde_json::json!({ "checks": [check(limit_of(counter)), check(JOURNAL)] }).to_string();
        let sent_us = wall_us();
        let answer = client.ask("POST", "/v1/check", &[], &body);
        let received_us = wall_us();
        let decision: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        let number = |limit: usize, field: &str| decision["limits"][limit][field].as_u64().expect(&answer.body);
        let source = match decision["source"].as_str() {
            Some("store") => Source::Store,
            Some("deny_cache") => Source::DenyCache,
            _ => continue,
        };
        let reported = Reported {
            sent_us,
            received_us,
            cost,
            allowed: decision["allowed"].as_bool().unwrap(),
            remaining: number(0, "remaining") as u32,
            retry_after_us: number(0, "retry_after_ms") * 1_000,
            rounded_up_to_us: 1_000,
            journal_units: JOURNAL_QUOTA - number(1, "remaining"),
            source: Some(source),
        };
        log.note(counter, reported);
    }
    std::mem::take(&mut log.records)
}

fn run_resp(mut connection: tidegate_testkit::server::Connection, mut log: Log) -> Vec<Record> {
    let mut random = Random::new(300);
    while !log.is_over() {
        let (counter, cost) = random_check(&mut random);
        let (key, cost_text) = (key_of(counter), cost.to_string());
        let command = ["TIDEGATE.CHECK", &key, limit_of(counter), &key, JOURNAL, "COST", &cost_text];
        let sent_us = wall_us();
        let reply = connection.call(&command).unwrap();
        let received_us = wall_us();
        let [allowed, status, journal] = reply.items() else { panic!("{reply:?}") };
        // Each: allowed, quota, remaining, retry_after_ms, reset_after_ms.
        let number = |number: &tidegate_testkit::server::Reply| u64::try_from(number.integer()).unwrap();
        let reported = Reported {
            sent_us,
            received_us,
            cost,
            allowed: allowed.integer() == 1,
            remaining: number(&status.items()[2]) as u32,
            retry_after_us: number(&status.items()[3]) * 1_000,
            rounded_up_to_us: 1_000,
            journal_units: JOURNAL_QUOTA - number(&journal.items()[2]),
            // The reply does not say whether it comes from the deny cache.
            source: None,
        };
        log.note(counter, reported);
    }
    std::mem::take(&mut log.records)
}
