//! The cache in front of sources that are slow, fail, hang or panic, with a flood of names.

use std::sync::atomic::AtomicUsize;

use futures_util::FutureExt;
use futures_util::future::join_all;
use tidegate_core::ManualClock;
use tokio::time::{Instant, sleep};

use super::*;

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
const TIMEOUT: Duration = Duration::from_millis(20);
const WAIT: WaitOptions<'static> = WaitOptions { timeout: TIMEOUT, is_shortened: false, store: None };

struct Bench {
    cache: LookupCache<u32>,
    clock: Arc<ManualClock>,
    calls: Arc<AtomicUsize>,
    at_once: Arc<AtomicUsize>,
    at_once_max: Arc<AtomicUsize>,
}

fn bench(lookups_max: usize) -> Bench {
    let clock = Arc::new(ManualClock::new(START));
    let options = CacheOptions {
        refreshes_missing: true,
        clock: clock.clone(),
        ttl: TTL_DEFAULT,
        lookups_max,
        failing: "the source fails",
        recovered: "the source works again",
    };
    let counter = || Arc::new(AtomicUsize::new(0));
    let (calls, at_once, at_once_max) = (counter(), counter(), counter());
    Bench { cache: LookupCache::new(options), clock, calls, at_once, at_once_max }
}

impl Bench {
    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Returns a lookup that counts its calls, takes `delay` and has this result.
    fn load(&self, delay: Duration, result: Result<Option<u32>, &'static str>) -> Loading<u32> {
        let (calls, at_once, at_once_max) = (self.calls.clone(), self.at_once.clone(), self.at_once_max.clone());
        Box::pin(async move {
            calls.fetch_add(1, Ordering::SeqCst);
            at_once_max.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            if !delay.is_zero() {
                sleep(delay).await;
            }
            at_once.fetch_sub(1, Ordering::SeqCst);
            result.map_err(Into::into)
        })
    }

    async fn get(&self, name: &str, delay: Duration, result: Result<Option<u32>, &'static str>) -> Option<u32> {
        self.cache.get(name, WAIT, || self.load(delay, result)).await
    }
}

#[test]
fn lookup_that_is_ready_needs_no_runtime_and_no_second_poll() {
    let bench = bench(1);
    for _ in 0..3 {
        assert_eq!(bench.get("a", Duration::ZERO, Ok(Some(7))).now_or_never(), Some(Some(7)));
        assert_eq!(bench.get("b", Duration::ZERO, Ok(None)).now_or_never(), Some(None));
    }
    assert_eq!(bench.calls(), 2, "found and missing names are both cached");
    bench.clock.advance(Duration::from_secs(1));
    assert_eq!(bench.get("a", Duration::ZERO, Ok(None)).now_or_never(), Some(None), "the value was removed");
    assert_eq!(bench.get("b", Duration::ZERO, Ok(Some(8))).now_or_never(), Some(Some(8)), "the value was added");
}

#[tokio::test(start_paused = true)]
async fn requests_for_the_same_name_share_one_lookup() {
    let bench = bench(8);
    let found = join_all((0..50).map(|_| bench.get("a", Duration::from_millis(10), Ok(Some(7))))).await;
    assert_eq!((found, bench.calls()), (vec![Some(7); 50], 1));
}

#[tokio::test(start_paused = true)]
async fn lookups_at_once_are_bounded_and_the_others_wait_for_a_permit() {
    let bench = bench(4);
    let names: Vec<String> = (0..12).map(|number| number.to_string()).collect();
    let found = join_all(names.iter().map(|name| bench.get(name, Duration::from_millis(5), Ok(Some(7))))).await;
    assert_eq!(found, vec![Some(7); 12], "three rounds of 5 ms are within the timeout");
    assert_eq!((bench.calls(), bench.at_once_max.load(Ordering::SeqCst)), (12, 4));

    let names: Vec<String> = (100..200).map(|number| number.to_string()).collect();
    let found = join_all(names.iter().map(|name| bench.get(name, Duration::from_millis(15), Ok(Some(7))))).await;
    assert_eq!(found.iter().flatten().count(), 4, "the second round would take until 30 ms");
    assert_eq!(bench.at_once_max.load(Ordering::SeqCst), 4);
    assert!(bench.cache.stats().failures >= 92, "{:?}", bench.cache.stats());
}

#[tokio::test]
async fn flood_of_missing_names_is_bounded_and_evicts_no_found_name() {
    let bench = bench(64);
    for number in 0..100 {
        bench.get(&format!("known {number}"), Duration::ZERO, Ok(Some(number))).await;
    }
    for number in 0..30_000 {
        assert_eq!(bench.get(&format!("invented {number}"), Duration::ZERO, Ok(None)).await, None);
    }
    let inner = &bench.cache.0;
    assert!(inner.missing.len() <= ENTRIES_MAX, "{}", inner.missing.len());
    assert_eq!((inner.found.len(), inner.running.lock().len()), (100, 0));
    let before = bench.calls();
    for number in 0..100 {
        assert_eq!(bench.get(&format!("known {number}"), Duration::ZERO, Ok(None)).await, Some(number));
    }
    assert_eq!(bench.calls(), before, "known names are still cached");
}

#[tokio::test]
async fn failure_is_not_cached_and_the_last_value_is_used_meanwhile() {
    let bench = bench(4);
    assert_eq!(bench.get("a", Duration::ZERO, Ok(Some(7))).await, Some(7));
    bench.clock.advance(Duration::from_secs(3_600));
    assert_eq!(bench.get("a", Duration::ZERO, Err("down")).await, Some(7));
    assert_eq!(bench.calls(), 2);
    assert_eq!(bench.get("b", Duration::ZERO, Ok(Some(8))).await, None, "paused after the failure");
    assert_eq!(bench.calls(), 2);
    bench.clock.advance(Duration::from_micros(PAUSE_US + 1));
    assert_eq!(bench.get("b", Duration::ZERO, Ok(Some(8))).await, Some(8));
    assert_eq!(bench.get("a", Duration::ZERO, Ok(Some(9))).await, Some(9));
    assert_eq!(bench.cache.stats(), LookupStats { calls: 4, failures: 1 });
}

#[tokio::test]
async fn lookup_that_panics_is_a_failure() {
    let bench = bench(1);
    for _ in 0..3 {
        let panicking = || -> Loading<u32> { Box::pin(std::future::poll_fn(|_| panic!("a bug in a lookup"))) };
        assert_eq!(bench.cache.get("a", WAIT, panicking).await, None);
        bench.clock.advance(Duration::from_secs(1));
    }
    assert_eq!(bench.cache.stats(), LookupStats { calls: 3, failures: 3 });
    assert_eq!(bench.get("a", Duration::ZERO, Ok(Some(7))).await, Some(7), "the permit was returned");
}

#[tokio::test(start_paused = true)]
async fn lookup_that_is_late_for_its_request_is_cached_for_the_next() {
    let bench = bench(1);
    let start = Instant::now();
    assert_eq!(bench.get("a", Duration::from_millis(300), Ok(Some(7))).await, None);
    assert_eq!(start.elapsed(), TIMEOUT);
    sleep(Duration::from_millis(300)).await;
    assert_eq!(bench.get("a", Duration::ZERO, Ok(Some(8))).await, Some(7));
    assert_eq!(bench.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn lookup_that_is_dropped_by_its_request_completes() {
    let bench = bench(1);
    let dropped = bench.get("a", Duration::from_millis(10), Ok(Some(7)));
    assert!(within(Duration::from_millis(1), dropped).await.is_none());
    sleep(Duration::from_millis(10)).await;
    assert_eq!(bench.get("a", Duration::ZERO, Ok(None)).await, Some(7));
}

#[tokio::test(start_paused = true)]
async fn lookups_that_hang_return_their_permits_after_five_seconds() {
    let bench = bench(2);
    let hanging = || Box::pin(std::future::pending()) as Loading<u32>;
    for name in ["a", "b", "c", "d"] {
        let start = Instant::now();
        assert_eq!(bench.cache.get(name, WAIT, hanging).await, None);
        assert_eq!(start.elapsed(), TIMEOUT, "{name}");
        bench.clock.advance(Duration::from_secs(1));
    }
    assert_eq!(bench.cache.0.running.lock().len(), 2, "the others found no permit");
    sleep(LOOKUP_MAX).await;
    bench.clock.advance(Duration::from_secs(1));
    assert_eq!(bench.cache.0.running.lock().len(), 0);
    assert_eq!(bench.get("e", Duration::from_millis(1), Ok(Some(7))).await, Some(7));
}

#[tokio::test(start_paused = true)]
async fn slow_lookup_of_one_name_does_not_pause_the_others() {
    let bench = bench(8);
    let slow = Duration::from_secs(4);
    let start = Instant::now();
    assert_eq!(bench.get("slow", slow, Ok(Some(7))).await, None);
    assert_eq!(bench.get("a", Duration::ZERO, Ok(Some(8))).await, Some(8));
    assert_eq!(bench.get("b", Duration::from_millis(1), Ok(Some(9))).await, Some(9));
    assert_eq!(start.elapsed(), TIMEOUT + Duration::from_millis(1));
    assert_eq!(bench.get("slow", slow, Ok(Some(7))).await, None);
    assert_eq!(bench.calls(), 3, "the slow lookup is still running");
    assert_eq!(bench.get("c", Duration::ZERO, Ok(Some(10))).await, Some(10), "other names were answered in between");
}

#[tokio::test(start_paused = true)]
async fn name_whose_lookup_timed_out_is_paused() {
    let bench = bench(8);
    let slow = Duration::from_secs(4);
    let start = Instant::now();
    for _ in 0..3 {
        assert_eq!(bench.get("slow", slow, Ok(Some(7))).await, None);
    }
    assert_eq!(start.elapsed(), TIMEOUT, "only the first request waits");
    bench.clock.advance(Duration::from_micros(PAUSE_US + 1));
    assert_eq!(bench.get("slow", slow, Ok(Some(7))).await, None);
    assert_eq!(start.elapsed(), 2 * TIMEOUT);
    assert_eq!(bench.get("a", Duration::ZERO, Ok(Some(8))).await, Some(8), "the same name timed out twice");
}

#[tokio::test(start_paused = true)]
async fn second_name_that_times_out_without_an_answer_in_between_pauses_all_lookups() {
    let bench = bench(8);
    let slow = Duration::from_secs(4);
    let start = Instant::now();
    for (name, waited) in [("a", 1), ("b", 2), ("c", 2), ("d", 2)] {
        assert_eq!(bench.get(name, slow, Ok(Some(7))).await, None);
        assert_eq!(start.elapsed(), waited * TIMEOUT, "{name}");
    }
    bench.clock.advance(Duration::from_micros(PAUSE_US + 1));
    for (name, waited) in [("e", 3), ("f", 3)] {
        assert_eq!(bench.get(name, slow, Ok(Some(7))).await, None);
        assert_eq!(start.elapsed(), waited * TIMEOUT, "{name}");
    }
}

#[test]
fn lookup_whose_runtime_ended_is_started_again() {
    let bench = bench(1);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let hanging = || Box::pin(std::future::pending()) as Loading<u32>;
    runtime().block_on(async { assert_eq!(bench.cache.get("a", WAIT, hanging).await, None) });
    bench.clock.advance(Duration::from_secs(1));
    runtime().block_on(async { assert_eq!(bench.get("a", Duration::ZERO, Ok(Some(7))).await, Some(7)) });
}

#[test]
fn warnings_are_ten_seconds_apart() {
    let gate = WarningGate::default();
    let opens = |seconds: u64| gate.opens_at(START.plus_micros(seconds * 1_000_000));
    assert_eq!([0, 1, 9, 10, 11, 25].map(opens), [true, false, false, true, false, true]);
    assert!(opens(3), "the clock was set back");
}
