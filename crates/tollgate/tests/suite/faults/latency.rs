//! How long a decision takes when the store hangs.
//!
//! The contract is a time (the deadline and 25 ms; one more millisecond once the breaker is open), and this machine may be
//! busy with other things. So each measurement has its twin in the same run: a bare timer for the deadline, a decision in
//! memory for the open breaker. What the twin loses, the machine took. Quantiles are compared, and the slowest
//! tenth is left to the machine. That nothing else is waited for is shown without any machine in
//! the limiter's own tests, where time is paused.

#![allow(clippy::disallowed_methods)] // real time is what is measured here

use std::sync::Arc;
use std::time::{Duration, Instant};

use tollgate::{Check, Demand, Key, Limit, Limiter, Source};
use tollgate_redis::RedisStore;
use tollgate_testkit::server::Server;

const DEADLINE: Duration = Duration::from_millis(25);
const GRACE: Duration = Duration::from_millis(25);
const ADDED_MAX: Duration = Duration::from_millis(1);

fn quantile(times: &mut [Duration], part: f64) -> Duration {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * part) as usize]
}

async fn ask(limiter: &Limiter) -> (Duration, Source) {
    let limit: Limit = "1000000/h".parse().unwrap();
    let demand = Demand::new(limit, Key::new("hung").unwrap());
    let before = Instant::now();
    let decision = limiter.check(&Check::one(&demand)).await.unwrap();
    (before.elapsed(), decision.source)
}

async fn timer() -> Duration {
    let before = Instant::now();
    tokio::time::sleep(DEADLINE).await;
    before.elapsed()
}

#[tokio::test]
async fn no_decision_outlasts_its_deadline_while_the_server_hangs() {
    let server = Server::redis();
    let (mut waits, mut timers) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        // A breaker of its own each time: with one, only the first three requests would wait at all.
        let store = Arc::new(RedisStore::builder(server.url()).build().unwrap());
        let limiter = Limiter::builder().store(store).deadline(DEADLINE).build();
        while ask(&limiter).await.1 != Source::Store {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        server.stop();
        while !limiter.stats().breaker_open {
            let ((waited, source), timer) = tokio::join!(ask(&limiter), timer());
            assert_eq!(source, Source::Local);
            waits.push(waited);
            timers.push(timer);
        }
        server.cont();
    }
    let (slow, slow_timer) = (quantile(&mut waits, 0.9), quantile(&mut timers, 0.9));
    let noise = slow_timer.saturating_sub(DEADLINE);
    println!("{} waits: {slow:?} beside {slow_timer:?} of a timer (nine tenths are below)", waits.len());
    assert!(waits.len() >= 30);
    assert!(slow <= DEADLINE + GRACE + noise, "{waits:?} beside {timers:?}");
}

#[tokio::test]
async fn an_open_breaker_adds_less_than_a_millisecond() {
    let server = Server::redis();
    let store = Arc::new(RedisStore::builder(server.url()).build().unwrap());
    let limiter = Limiter::builder().store(store).deadline(DEADLINE).build();
    server.stop();
    while !limiter.stats().breaker_open {
        ask(&limiter).await;
    }
    let memory = Limiter::memory();
    let (mut open, mut in_memory) = (Vec::new(), Vec::new());
    for _ in 0..2_000 {
        let (took, source) = ask(&limiter).await;
        assert_eq!(source, Source::Local);
        open.push(took);
        in_memory.push(ask(&memory).await.0);
        // The probes run meanwhile, and fail.
        tokio::task::yield_now().await;
    }
    for part in [0.5, 0.9] {
        let (open, in_memory) = (quantile(&mut open, part), quantile(&mut in_memory, part));
        println!("quantile {part}: {open:?} with an open breaker, {in_memory:?} in memory");
        assert!(open <= in_memory + ADDED_MAX, "quantile {part}: {open:?} beside {in_memory:?}");
    }
}
