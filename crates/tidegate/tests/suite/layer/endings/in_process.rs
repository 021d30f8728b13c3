//! Counters in memory, with a manual clock: refunds are made at once.

use std::time::Duration;

use tidegate_testkit::conformance::Random;

use super::ledger::{Ledger, engine_in_process, seed};
use super::scripted::{Ending, ratelimit_header, silence_planned_panics, site};

const ENDINGS: usize = 10_000;

// Tokio's clock is paused, so timeouts occur when nothing else can run.
#[tokio::test(start_paused = true)]
async fn ten_thousand_random_endings_leave_exactly_their_charges() {
    silence_planned_panics();
    let engine = engine_in_process();
    let site = site(&engine);

    let seed = seed();
    let mut random = Random::new(seed);
    let mut ledger = Ledger::default();
    for n in 1..=ENDINGS {
        let ending = Ending::random(&mut random, Duration::from_millis(5));
        ledger.add(ending.run(site.clone()).await);
        if n % 100 == 0 {
            let context = format!("TIDEGATE_SEED={seed}, after {n} endings");
            ledger.expect_header(&ratelimit_header(site.clone()).await, &context);
            ledger.expect_counters(&engine, &context).await;
        }
    }
    let Ledger { succeeded, failed, unanswered } = ledger;
    assert!(succeeded.min(failed).min(unanswered) > 1_000, "every kind of ending: {ledger:?}");
}
