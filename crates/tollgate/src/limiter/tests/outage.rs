//! Who finds out that a store is back.

use super::*;
use tokio::runtime::Runtime;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

/// Opens the breaker: the probe is a task of this runtime.
fn open_on(runtime: &Runtime, bench: &Bench) {
    bench.mood(FAILS);
    for _ in 0..3 {
        assert_eq!(runtime.block_on(bench.ask("10/min", "a")).unwrap().source, Source::Local);
    }
    assert!(bench.limiter.stats().breaker_open);
}

#[test]
fn a_probe_that_ends_with_its_runtime_leaves_the_store_to_the_next_caller() {
    let (bench, ends, stays) = (bench(|builder| builder), runtime(), runtime());
    open_on(&ends, &bench);
    drop(ends);
    assert!(!bench.limiter.stats().breaker_open);
    let before = bench.calls();
    for _ in 0..5 {
        stays.block_on(bench.ask("10/min", "a")).unwrap();
    }
    assert_eq!(bench.calls() - before, 1, "one failure is enough then");
    bench.mood(FINE);
    stays.block_on(async { tokio::time::sleep(Duration::from_secs(1)).await });
    assert_eq!(stays.block_on(bench.ask("10/min", "a")).unwrap().source, Source::Store, "whose caller has probed");
    assert_eq!(bench.limiter.stats().breaker_opened, 2);
}

#[test]
fn a_probe_that_nobody_drives_is_stood_in_for() {
    let (bench, runtime) = (bench(|builder| builder), runtime());
    open_on(&runtime, &bench);
    let ask_after = |ms| {
        bench.clock.advance(Duration::from_millis(ms));
        let before = bench.calls();
        let source = runtime.block_on(bench.ask("10/min", "a")).unwrap().source;
        (source, bench.calls() - before)
    };
    assert_eq!(ask_after(1_000), (Source::Local, 0));
    assert_eq!(ask_after(3_000), (Source::Local, 1), "somebody looks");
    assert_eq!(ask_after(1_000), (Source::Local, 0), "and not everybody");
    bench.mood(FINE);
    assert_eq!(ask_after(2_000), (Source::Store, 1));
    assert_eq!(ask_after(0), (Source::Store, 1), "and is believed");
    assert!(!bench.limiter.stats().breaker_open);
}

#[tokio::test(start_paused = true)]
async fn a_patient_limiter_finds_a_store_that_hung_healed_within_two_seconds() {
    let bench = bench(|builder| builder.deadline(Duration::from_secs(30)));
    bench.mood(HANGS);
    for _ in 0..3 {
        bench.ask("10/min", "a").await.unwrap();
    }
    // Into the middle of a probe that hangs.
    tokio::time::sleep(Duration::from_millis(500)).await;
    bench.mood(FINE);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!bench.limiter.stats().breaker_open);
}

/// Asks every ten milliseconds, for so long.
async fn ask_for(bench: &Bench, duration: Duration) {
    let pause = Duration::from_millis(10);
    for _ in 0..duration.as_millis() / pause.as_millis() {
        bench.ask("1000000/h", "a").await.unwrap();
        tokio::time::sleep(pause).await;
        bench.clock.advance(pause);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_answers_too_late_for_decisions_is_not_taken_for_healed() {
    let bench = bench(|builder| builder);
    bench.mood(SLOW);
    ask_for(&bench, Duration::from_secs(3)).await;
    let stats = bench.limiter.stats();
    assert!(stats.breaker_open);
    assert_eq!((stats.breaker_opened, stats.store_failures), (1, 3), "nobody else has waited");
    bench.mood(FINE);
    // Two slow probes in a row, and the longest pause.
    tokio::time::sleep(Duration::from_millis(2 * 100 + 800)).await;
    assert_eq!(bench.ask("10/min", "a").await.unwrap().source, Source::Store);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_slow_once_because_it_connects_is_used_as_soon_as_it_has() {
    for mood in [FAILS, HANGS] {
        let bench = bench(|builder| builder);
        bench.mood(mood);
        ask_for(&bench, Duration::from_secs(5)).await;
        bench.mood(WAKES);
        // A probe that is hanging, and the longest pause; then it is asked, and answers late.
        let mut ms = 0;
        while bench.store.mood.load(Ordering::SeqCst) == WAKES {
            tokio::time::sleep(Duration::from_millis(1)).await;
            ms += 1;
            assert!(ms <= 250 + 800, "mood {mood}");
        }
        tokio::time::sleep(Duration::from_millis(200 + 1)).await;
        assert_eq!(bench.ask("10/min", "a").await.unwrap().source, Source::Store, "mood {mood}");
    }
}

#[tokio::test(start_paused = true)]
async fn something_else_under_the_key_of_the_probe_does_not_keep_a_healed_store_away() {
    let bench = bench(|builder| builder);
    bench.mood(FAILS);
    ask_for(&bench, Duration::from_secs(1)).await;
    assert!(bench.limiter.stats().breaker_open);
    bench.mood(FOREIGN_PROBE);
    ask_for(&bench, Duration::from_secs(2)).await;
    assert_eq!(bench.ask("10/min", "a").await.unwrap().source, Source::Store);
}
