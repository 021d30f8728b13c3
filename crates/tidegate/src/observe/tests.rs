use std::future::pending;

use parking_lot::Mutex;

use super::*;
use crate::{CheckOptions, Limiter, OnFailure};
use tidegate_core::{
    Demand, Key, Limit, LimitStatus, ManualClock, MemoryStore, Source, Store, StoreError, StoreFuture,
};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

/// Records each call as a line of text.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Notes {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock())
    }
}

impl Observer for Notes {
    fn decided(&self, decided: &DecidedCheck<'_>) {
        let by = decided.result.map_or_else(StoreErrorKind::as_str, |decision| Source::as_str(decision.source));
        self.0.lock().push(format!("{} {by} {:?}", decided.outcome().as_str(), decided.took));
    }
    fn store_called(&self, call: &StoreCall) {
        let result = call.result.map_or_else(StoreErrorKind::as_str, |()| "ok");
        self.0.lock().push(format!("{} of {} {result} {:?}", call.kind.as_str(), call.checks, call.took));
    }
    fn breaker_changed(&self, is_open: bool) {
        self.0.lock().push(format!("breaker open: {is_open}"));
    }
}

/// A store that advances the clock by 2 ms per decision and by 3 ms per refund, never answers `inspect`, and fails
/// decisions while it is down.
struct Slow {
    inner: MemoryStore,
    clock: Arc<ManualClock>,
    is_down: AtomicBool,
}

impl Store for Slow {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        self.clock.advance(Duration::from_millis(2));
        if self.is_down.load(Ordering::Relaxed) {
            Box::pin(async { Err(StoreError::new(StoreErrorKind::Unreachable, "down")) })
        } else {
            self.inner.decide(checks)
        }
    }
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        self.clock.advance(Duration::from_millis(3));
        Store::refund(&self.inner, check, decision)
    }
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Store::reset(&self.inner, demand)
    }
    fn inspect<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Box::pin(pending())
    }
}

fn slow_limiter(notes: &Arc<Notes>) -> (Limiter, Arc<Slow>) {
    let clock = Arc::new(ManualClock::new(START));
    let memory = || MemoryStore::builder().clock(clock.clone()).build();
    let store = Arc::new(Slow { inner: memory(), clock: clock.clone(), is_down: AtomicBool::new(false) });
    let builder = Limiter::builder().store(store.clone()).memory(memory()).clock(clock.clone());
    (builder.observer(notes.clone()).build(), store)
}

fn demand(limit: &str) -> Demand<'static> {
    Demand::new(limit.parse::<Limit>().unwrap(), Key::new("planted-key").unwrap())
}

#[tokio::test(start_paused = true)]
async fn every_decision_and_every_store_call_is_reported_with_its_duration() {
    let notes = Arc::new(Notes::default());
    let (limiter, _store) = slow_limiter(&notes);
    let demand = demand("1/h");
    let check = Check::one(&demand);
    let admitted = limiter.check(&check).await.unwrap();
    assert_eq!(notes.take(), ["decide of 1 ok 2ms", "allow store 2ms"]);
    limiter.check(&check).await.unwrap();
    assert_eq!(notes.take(), ["deny deny_cache 0ns"], "a cached denial does not call the store");
    limiter.refund(&check, &admitted).await.unwrap();
    limiter.reset(&demand).await.unwrap();
    assert_eq!(notes.take(), ["refund of 1 ok 3ms", "reset of 0 ok 0ns"]);
    assert!(limiter.inspect(&demand).await.is_err());
    assert_eq!(notes.take(), ["inspect of 1 timed_out 0ns"]);
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_reported_as_one_store_call_and_one_decision_per_check() {
    let notes = Arc::new(Notes::default());
    let (limiter, _store) = slow_limiter(&notes);
    let demands = [demand("1/h"), demand("1/h"), demand("5/min")];
    let checks: Vec<Check<'_>> = demands.iter().map(Check::one).collect();
    limiter.check_batch(&checks, CheckOptions::default()).await;
    assert_eq!(notes.take(), ["decide of 3 ok 2ms", "allow store 2ms", "deny store 2ms", "allow store 2ms"]);
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_reported_from_its_first_failure_to_the_probe_that_ends_it() {
    let notes = Arc::new(Notes::default());
    let (limiter, store) = slow_limiter(&notes);
    let demand = demand("10/min");
    let check = Check::one(&demand);
    store.is_down.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        limiter.check(&check).await.unwrap();
    }
    let failed = ["decide of 1 unreachable 2ms", "allow local 2ms"];
    let opened = ["decide of 1 unreachable 2ms", "breaker open: true", "allow local 2ms"];
    assert_eq!(notes.take(), [&failed[..], &failed, &opened].concat());
    let options = CheckOptions { on_failure: Some(OnFailure::Deny), ..CheckOptions::default() };
    assert!(limiter.check_with(&check, options).await.is_err());
    limiter.check(&check).await.unwrap();
    assert_eq!(notes.take(), ["unavailable unreachable 0ns", "allow local 0ns"]);
    tokio::time::sleep(Duration::from_millis(110)).await;
    store.is_down.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(notes.take(), ["probe of 1 unreachable 2ms", "probe of 1 ok 2ms", "breaker open: false"]);
}

#[tokio::test]
async fn an_observer_that_panics_breaks_neither_a_decision_nor_another_observer() {
    struct Panics;
    impl Observer for Panics {
        fn decided(&self, _: &DecidedCheck<'_>) {
            panic!("a bug in an observer");
        }
    }
    let (before, after) = (Arc::new(Notes::default()), Arc::new(Notes::default()));
    let builder = Limiter::builder().clock(Arc::new(ManualClock::new(START)));
    let limiter = builder.observer(before.clone()).observer(Arc::new(Panics)).observer(after.clone()).build();
    let demand = demand("1/min");
    for allowed in [true, false] {
        assert_eq!(limiter.check(&Check::one(&demand)).await.unwrap().allowed(), allowed);
    }
    for notes in [before, after] {
        assert_eq!(notes.take(), ["allow store 0ns", "deny store 0ns"]);
    }
}

#[tokio::test]
async fn a_limiter_without_observers_does_not_read_the_clock_for_durations() {
    struct Never;
    impl Clock for Never {
        fn now(&self) -> Timestamp {
            panic!("the clock was read");
        }
    }
    let limiter = Limiter::builder().memory(MemoryStore::new()).clock(Arc::new(Never)).build();
    assert!(limiter.check(&Check::one(&demand("1/min"))).await.unwrap().allowed());
}

#[tokio::test]
async fn stats_report_the_keys_and_bytes_in_memory() {
    let limiter = Limiter::memory();
    let empty = limiter.stats();
    assert_eq!((empty.memory_keys, empty.memory_overflow_keys), (0, 0));
    for subject in 0..1_000 {
        let subject = subject.to_string();
        let demand = Demand::new("5/min".parse().unwrap(), Key::new(&subject).unwrap());
        limiter.check(&Check::one(&demand)).await.unwrap();
    }
    let full = limiter.stats();
    assert_eq!(full.memory_keys, 1_000);
    assert!(full.memory_bytes > empty.memory_bytes + 1_000 * 16, "{full:?}");
}

/// A writer that collects the log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn traced_events_contain_no_key() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false);
    // The subscriber is set for this thread, on which the whole test runs.
    let _guard = tracing::subscriber::set_default(subscriber.with_writer(move || writer.clone()).finish());
    let clock = Arc::new(ManualClock::new(START));
    let memory = MemoryStore::builder().clock(clock.clone()).build();
    let store = Arc::new(Slow { inner: memory, clock: clock.clone(), is_down: AtomicBool::new(false) });
    let limiter = Limiter::builder().store(store.clone()).clock(clock).observer(Arc::new(TracingObserver)).build();
    let demands = [demand("5/min"), demand("9/day token-bucket")];
    let check = Check::new(&demands).unwrap();
    limiter.check(&check).await.unwrap();
    store.is_down.store(true, Ordering::Relaxed);
    let options = CheckOptions { on_failure: Some(OnFailure::Deny), ..CheckOptions::default() };
    for _ in 0..3 {
        limiter.check_with(&check, options).await.unwrap_err();
    }
    store.is_down.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let text = log.text();
    for expected in [
        r#"store called call="decide" checks=1 took_us=2000"#,
        r#"decided limits=5/min, 9/day token-bucket verdict="allow" source="store" took_us=2000"#,
        r#"store called call="decide" checks=1 took_us=2000 kind="unreachable""#,
        r#"decided limits=5/min, 9/day token-bucket verdict="unavailable" kind="unreachable" took_us=2000"#,
        "WARN tidegate::limiter::store_calls: the store is not called until a probe succeeds",
        " INFO tidegate::limiter::store_calls: the store is responding again",
    ] {
        assert!(text.contains(expected), "{expected} is not in\n{text}");
    }
    assert!(!text.contains("planted"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn without_the_store_a_request_is_one_decision_whatever_the_failure_policies_of_its_rules() {
    for (policies, decisions, counts) in [
        (["local", "local"], ["allow local 2ms", "deny local 2ms"], (2, 0, 0)),
        (["local", "allow"], ["allow local 2ms", "deny local 2ms"], (2, 0, 0)),
        (["allow", "allow"], ["allow none 2ms", "allow none 2ms"], (0, 2, 0)),
        (["local", "deny"], ["unavailable unreachable 2ms", "unavailable unreachable 2ms"], (0, 0, 2)),
    ] {
        let rule = |(name, policy)| {
            format!("[[rules]]\nname = '{name}'\nby = ['ip']\nlimits = ['1/h']\non_failure = '{policy}'\n")
        };
        let text: String = ["first", "second"].into_iter().zip(policies).map(rule).collect();
        let rules = crate::config::Config::from_text(&text, crate::config::Format::Toml).unwrap().rules;
        let notes = Arc::new(Notes::default());
        let (limiter, store) = slow_limiter(&notes);
        store.is_down.store(true, Ordering::Relaxed);
        let engine = crate::engine::Engine::new(limiter.clone(), rules);
        let request = http::Request::get("/").body(()).unwrap();
        for expected in decisions {
            let options = crate::engine::RequestOptions::default();
            let _ = engine.check(&crate::rules::RequestView::of(&request), [203, 0, 113, 9].into(), options).await;
            assert_eq!(notes.take(), ["decide of 1 unreachable 2ms", expected], "{policies:?}");
        }
        let stats = limiter.stats();
        let (local, uncounted, unavailable) = counts;
        assert_eq!(
            (stats.local, stats.uncounted, stats.unavailable, stats.decisions),
            (local, uncounted, unavailable, 2)
        );
    }
}
