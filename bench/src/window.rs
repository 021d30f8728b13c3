//! How many requests a limit of 100 a minute admits in any minute. The comparison in the README shows these numbers.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use governor::clock::FakeRelativeClock;
use governor::{Quota, RateLimiter};
use throttlecrab::PeriodicStore;
use tidegate_core::{Limit, ManualClock, MemoryStore, Timestamp};

const MINUTE_MS: u64 = 60_000;
/// Time between two requests of the client.
const STEP_MS: u64 = 20;

/// Returns the most requests that were admitted in any trailing minute, by a client that is silent until `first_ms` and
/// then sends a request every 20 ms for three minutes. `admits` is called with the time of each request.
fn most_in_a_minute(first_ms: u64, mut admits: impl FnMut(u64) -> bool) -> usize {
    let times = (0..3 * MINUTE_MS / STEP_MS).map(|step| first_ms + step * STEP_MS);
    let admitted: Vec<u64> = times.filter(|now_ms| admits(*now_ms)).collect();
    let in_minute_before =
        |end: usize| admitted[..=end].iter().filter(|time| *time + MINUTE_MS > admitted[end]).count();
    (0..admitted.len()).map(in_minute_before).max().unwrap_or_default()
}

fn tidegate(limit: &str) -> usize {
    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(0)));
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limit: Limit = limit.parse().expect("a limit");
    // Half a quota before the boundary of a minute, and more after it.
    let first_ms = MINUTE_MS - 100 * STEP_MS;
    let mut last_ms = 0;
    most_in_a_minute(first_ms, |now_ms| {
        clock.advance(Duration::from_millis(now_ms - last_ms));
        last_ms = now_ms;
        store.check_key(&limit, "user:42").expect("a short key").allowed()
    })
}

#[test]
fn tidegate_admits_the_quota() {
    assert_eq!(tidegate("100/min"), 100);
    assert_eq!(tidegate("100/min sliding-log"), 100);
    assert_eq!(tidegate("100/min fixed-window"), 200);
}

#[test]
fn governor_admits_nearly_twice_its_quota() {
    let clock = FakeRelativeClock::default();
    let quota = Quota::per_minute(100.try_into().expect("not zero"));
    let limiter = RateLimiter::direct_with_clock(quota, clock.clone());
    let most = most_in_a_minute(0, |_| {
        let admits = limiter.check().is_ok();
        clock.advance(Duration::from_millis(STEP_MS));
        admits
    });
    assert_eq!(most, 199);
}

#[test]
fn throttlecrab_admits_nearly_twice_its_quota() {
    let mut limiter = throttlecrab::RateLimiter::new(PeriodicStore::new());
    let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    let most = most_in_a_minute(0, |now_ms| {
        let now = start + Duration::from_millis(now_ms);
        limiter.rate_limit("user:42", 100, 100, 60, 1, now).expect("a decision").0
    });
    assert_eq!(most, 199);
}
