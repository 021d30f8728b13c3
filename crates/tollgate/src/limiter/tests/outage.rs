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
