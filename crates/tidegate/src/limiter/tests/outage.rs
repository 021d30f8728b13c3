//! How the recovery of a store is detected.

use super::*;
use tokio::runtime::Runtime;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

/// Opens the breaker: the probe is a task of this runtime.
fn open_on(runtime: &Runtime, bench: &Bench) {
    bench.behaviour(FAILS);
    for _ in 0..3 {
        assert_eq!(runtime.block_on(bench.ask("10/min", "a")).unwrap().source, Source::Local);
    }
    assert!(bench.limiter.stats().breaker_open);
}

#[test]
fn probe_that_ends_with_its_runtime_closes_the_breaker() {
    let (bench, ends, stays) = (bench(|builder| builder), runtime(), runtime());
    open_on(&ends, &bench);
    drop(ends);
    assert!(!bench.limiter.stats().breaker_open);
    let before = bench.calls();
    for _ in 0..5 {
        stays.block_on(bench.ask("10/min", "a")).unwrap();
    }
    assert_eq!(bench.calls() - before, 1, "the first failure opens the breaker again");
    bench.behaviour(WORKS);
    stays.block_on(async { tokio::time::sleep(Duration::from_secs(1)).await });
    assert_eq!(
        stays.block_on(bench.ask("10/min", "a")).unwrap().source,
        Source::Store,
        "the caller of that failure has started a probe"
    );
    assert_eq!(bench.limiter.stats().breaker_opened, 2);
}

#[test]
fn caller_replaces_a_probe_whose_runtime_makes_no_progress() {
    let (bench, runtime) = (bench(|builder| builder), runtime());
    open_on(&runtime, &bench);
    let ask_after = |ms| {
        bench.clock.advance(Duration::from_millis(ms));
        let before = bench.calls();
        let source = runtime.block_on(bench.ask("10/min", "a")).unwrap().source;
        (source, bench.calls() - before)
    };
    assert_eq!(ask_after(1_000), (Source::Local, 0));
    assert_eq!(ask_after(3_000), (Source::Local, 1), "one caller replaces the probe");
    assert_eq!(ask_after(1_000), (Source::Local, 0), "the next callers do not");
    bench.behaviour(WORKS);
    assert_eq!(ask_after(2_000), (Source::Store, 1));
    assert_eq!(ask_after(0), (Source::Store, 1), "the breaker is closed");
    assert!(!bench.limiter.stats().breaker_open);
}

#[tokio::test(start_paused = true)]
async fn limiter_with_a_long_deadline_uses_a_recovered_store_within_two_seconds() {
    let bench = bench(|builder| builder.deadline(Duration::from_secs(30)));
    bench.behaviour(HANGS);
    for _ in 0..3 {
        bench.ask("10/min", "a").await.unwrap();
    }
    // Into the middle of a probe that hangs.
    tokio::time::sleep(Duration::from_millis(500)).await;
    bench.behaviour(WORKS);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!bench.limiter.stats().breaker_open);
}

/// Checks every ten milliseconds, for `duration`.
async fn ask_for(bench: &Bench, duration: Duration) {
    let pause = Duration::from_millis(10);
    for _ in 0..duration.as_millis() / pause.as_millis() {
        bench.ask("1000000/h", "a").await.unwrap();
        tokio::time::sleep(pause).await;
        bench.clock.advance(pause);
    }
}

#[tokio::test(start_paused = true)]
async fn store_that_answers_after_the_deadline_does_not_close_the_breaker() {
    let bench = bench(|builder| builder);
    bench.behaviour(LATE);
    ask_for(&bench, Duration::from_secs(3)).await;
    let stats = bench.limiter.stats();
    assert!(stats.breaker_open);
    assert_eq!((stats.breaker_opened, stats.store_failures), (1, 3), "no other caller has waited");
    bench.behaviour(WORKS);
    // Two slow probes in a row, and the longest pause.
    tokio::time::sleep(Duration::from_millis(2 * 100 + 800)).await;
    assert_eq!(bench.ask("10/min", "a").await.unwrap().source, Source::Store);
}

#[tokio::test(start_paused = true)]
async fn store_whose_first_probe_is_late_because_it_connects_is_used_after_the_second() {
    for behaviour in [FAILS, HANGS] {
        let bench = bench(|builder| builder);
        bench.behaviour(behaviour);
        ask_for(&bench, Duration::from_secs(5)).await;
        bench.behaviour(LATE_ONCE);
        // A probe that is hanging, and the longest pause; then it is asked, and answers late.
        let mut ms = 0;
        while bench.store.behaviour.load(Ordering::SeqCst) == LATE_ONCE {
            tokio::time::sleep(Duration::from_millis(1)).await;
            ms += 1;
            assert!(ms <= 250 + 800, "behaviour {behaviour}");
        }
        tokio::time::sleep(Duration::from_millis(200 + 1)).await;
        assert_eq!(bench.ask("10/min", "a").await.unwrap().source, Source::Store, "behaviour {behaviour}");
    }
}

#[tokio::test(start_paused = true)]
async fn foreign_data_under_the_key_of_the_probe_closes_the_breaker() {
    let bench = bench(|builder| builder);
    bench.behaviour(FAILS);
    ask_for(&bench, Duration::from_secs(1)).await;
    assert!(bench.limiter.stats().breaker_open);
    bench.behaviour(FOREIGN_PROBE);
    ask_for(&bench, Duration::from_secs(2)).await;
    assert_eq!(bench.ask("10/min", "a").await.unwrap().source, Source::Store);
}
