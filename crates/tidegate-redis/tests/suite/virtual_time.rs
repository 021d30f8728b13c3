//! Failures that depend on time, on a simulated server in virtual time: the same on a busy machine as on an idle one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tidegate_core::{Check, Demand, Key, Limit, Store, StoreErrorKind as Kind};
use tidegate_redis::RedisStore;
use tidegate_testkit::fault::Fault;
use tidegate_testkit::simulated::{SimulatedRedis, VirtualClock};
use tokio::time::sleep;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A server and a store that is connected to it.
async fn pair(call_timeout: Duration) -> (SimulatedRedis, RedisStore) {
    let server = SimulatedRedis::new(VirtualClock::start());
    let dial = server.clone();
    let connector = move |_: &str, _| std::future::ready(Ok(dial.connect()));
    let builder = RedisStore::builder("redis://simulated").connector(connector);
    let store = builder.call_timeout(call_timeout).build().unwrap();
    store.command(&["PING"]).await.unwrap();
    (server, store)
}

/// Decides one check for each of 64 counters at once. Returns the remaining units.
async fn remaining(store: &RedisStore, name: &str) -> Vec<Result<u32, Kind>> {
    let limit: Limit = "100/h".parse().unwrap();
    let subjects: Vec<String> = (0..64).map(|caller| format!("{name} {caller}")).collect();
    let demands: Vec<Demand<'_>> =
        subjects.iter().map(|subject| Demand::new(limit, Key::new(subject.as_str()).unwrap())).collect();
    let checks: Vec<[Check<'_>; 1]> = demands.iter().map(|demand| [Check::one(demand)]).collect();
    let decided = join_all(checks.iter().map(|check| store.decide(check))).await;
    decided.into_iter().map(|it| it.map(|it| it[0].limits[0].remaining).map_err(|error| error.kind())).collect()
}

#[tokio::test(start_paused = true)]
async fn late_replies_to_two_calls_reach_no_caller() {
    let (server, store) = pair(ms(200)).await;
    assert_eq!(remaining(&store, "early").await, [Ok(99); 64]);
    server.set(Fault::Hold);
    let before = store.stats();
    assert_eq!(remaining(&store, "early").await, [Err(Kind::TimedOut); 64]);
    assert_eq!(store.stats().calls, before.calls + 2);
    server.set(Fault::Pass);
    sleep(ms(1_000)).await;
    assert!(store.stats().connects > before.connects, "the connection with the late replies is not used again");
    assert_eq!(remaining(&store, "other").await, [Ok(99); 64], "the late replies would say 98");
    assert_eq!(remaining(&store, "early").await, [Ok(97); 64], "the calls that timed out were executed");
}

/// Each caller has a counter with a quota that no other has, so a reply that is delivered to the wrong caller shows.
#[tokio::test(start_paused = true)]
async fn every_caller_gets_its_own_reply_under_all_faults() {
    const CALLERS: u32 = 64;
    let (server, store) = pair(ms(100)).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (1..=CALLERS)
        .map(|caller| {
            let (store, is_over) = (store.clone(), is_over.clone());
            tokio::spawn(async move {
                let limit: Limit = format!("{}/h", caller * 100_000).parse().unwrap();
                let subject = format!("caller {caller}");
                let demand = Demand::new(limit, Key::new(subject.as_str()).unwrap());
                let (mut answered, mut charged_max) = (0_u32, 0);
                while !is_over.load(Ordering::Relaxed) {
                    charged_max += 1;
                    match store.decide(&[Check::one(&demand)]).await {
                        Ok(decisions) => {
                            answered += 1;
                            let spent = limit.quota() - decisions[0].limits[0].remaining;
                            assert!((answered..=charged_max).contains(&spent), "caller {caller}: {spent}");
                        }
                        Err(error) => charged_max -= u32::from(error.is_unexecuted()),
                    }
                    // Some come back sooner than others, so that batches have changing callers.
                    sleep(ms(1 + u64::from(caller % 8))).await;
                }
                answered
            })
        })
        .collect();
    let (sliced, slow) = (Fault::Slice(7), Fault::Delay(ms(3)));
    let faults = [sliced, Fault::Hold, Fault::Pass, Fault::Cut, slow, Fault::Reset, sliced, Fault::Blackhole];
    for fault in faults.into_iter().cycle().take(3 * faults.len()) {
        server.set(fault);
        sleep(ms(130)).await;
    }
    server.set(Fault::Pass);
    sleep(ms(1_000)).await;
    is_over.store(true, Ordering::Relaxed);
    for caller in callers {
        assert!(caller.await.unwrap() > 0);
    }
    let stats = store.stats();
    assert!(stats.decisions > 4 * stats.calls && stats.connects > 3, "{stats:?}");
}

#[tokio::test(start_paused = true)]
async fn connection_that_was_closed_while_idle_is_replaced_before_the_next_check() {
    let (server, store) = pair(ms(10_000)).await;
    let cut = async || {
        server.set(Fault::Cut);
        sleep(ms(1)).await;
        server.set(Fault::Pass);
        // Longer than the longest pause between two attempts to connect.
        sleep(ms(400)).await;
    };
    for time in 1..=3 {
        // Longer than the pause after which a closed connection counts as idle.
        sleep(ms(300)).await;
        let connects = store.stats().connects;
        cut().await;
        assert_eq!(remaining(&store, &format!("time {time}")).await, [Ok(99); 64]);
        assert!(store.stats().connects > connects);
    }
}
