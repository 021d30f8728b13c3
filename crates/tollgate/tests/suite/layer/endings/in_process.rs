//! Counters in memory, on a clock that stands still: refunds happen where the ending does.

use std::time::Duration;

use tollgate_testkit::conformance::Random;

use super::ledger::{Ledger, engine_in_process, seed};
use super::scripted::{Ending, silence_planned_panics, site, told};

const ENDINGS: usize = 10_000;

// Timeouts strike when nothing else is left to do: tokio's clock is a manual one, too.
#[tokio::test(start_paused = true)]
async fn after_ten_thousand_random_endings_the_remaining_quota_is_exactly_what_they_say() {
    silence_planned_panics();
    let engine = engine_in_process();
    let site = site(&engine);

    let seed = seed();
    let mut random = Random::new(seed);
    let mut ledger = Ledger::default();
    for n in 1..=ENDINGS {
        let ending = Ending::random(&mut random, Duration::from_millis(5));
        ledger.add(ending.happen(site.clone(), false).await);
        if n % 100 == 0 {
            let context = format!("TOLLGATE_SEED={seed}, after {n} endings");
            ledger.expect_told(&told(site.clone()).await, &context);
            ledger.expect_counted(&engine, &context).await;
        }
    }
    let Ledger { succeeded, failed, unanswered } = ledger;
    assert!(succeeded.min(failed).min(unanswered) > 1_000, "every kind of ending: {ledger:?}");
}
