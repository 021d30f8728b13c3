//! Replies and callers are matched, however late a reply arrives.
//!
//! Every counter has a quota of its own size and is checked by one task alone. So `remaining` shows whose reply it is: a
//! reply that reached another caller would exceed that caller's quota, or be lower than its number of checks explains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use tidegate::{Check, Demand, Key, Limit, Limiter, Source, Store};
use tidegate_redis::RedisStore;
use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::poll::until;
use tidegate_testkit::server::Server;

const CALLERS: u32 = 16;
/// More than the checks of one caller, so that the ranges of their `remaining` do not overlap.
const QUOTA_STEP: u32 = 90_000;
/// Far longer than any of the calls takes, unless its reply never arrives.
const LONG: Duration = Duration::from_secs(30);

/// The decisions of all callers so far.
#[derive(Default, Debug)]
struct Counts {
    /// Decisions of the store.
    shared: AtomicU32,
    /// Decisions made locally, because the store's reply was late or its breaker was open.
    local: AtomicU32,
}

/// Checks one counter again and again, and verifies every reply of the store.
async fn check_repeatedly(limiter: Limiter, number: u32, counts: Arc<Counts>, is_over: Arc<AtomicBool>) {
    let quota = QUOTA_STEP * (number + 1);
    // The largest of these buckets returns one unit in 24 seconds.
    let limit: Limit = format!("{quota}/400day token-bucket").parse().unwrap();
    let subject = format!("caller-{number}");
    let demand = Demand::new(limit, Key::new(&subject).unwrap());
    let (mut checks, mut shared) = (0, 0);
    while !is_over.load(Ordering::Relaxed) {
        checks += 1;
        assert!(checks < QUOTA_STEP / 2, "caller {number}: too many checks to tell the callers apart");
        let decision = limiter.check(&Check::one(&demand)).await.unwrap();
        if decision.source != Source::Store {
            counts.local.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        shared += 1;
        counts.shared.fetch_add(1, Ordering::Relaxed);
        let remaining = decision.limits[0].remaining;
        let expected = quota - checks..quota;
        assert!(expected.contains(&remaining), "caller {number}: {remaining} of {quota} remain after {checks} checks");
    }
    assert!(shared > 0, "caller {number}: no reply of the store");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_replies_are_discarded_and_reach_no_other_caller() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::builder(proxy.url()).call_timeout(Duration::from_millis(30)).build().unwrap();
    let (counts, is_over) = (Arc::<Counts>::default(), Arc::<AtomicBool>::default());
    // A limiter for each caller, so that one open breaker does not silence all of them.
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            let limiter = Limiter::builder().store(Arc::new(store.clone())).deadline(Duration::from_millis(20)).build();
            tokio::spawn(check_repeatedly(limiter, number, counts.clone(), is_over.clone()))
        })
        .collect();
    for round in 0..24 {
        let shared = counts.shared.load(Ordering::Relaxed);
        until("callers are answered", || counts.shared.load(Ordering::Relaxed) >= shared + 2 * CALLERS).await;
        // Later than the deadline; later than the call timeout, too; not before the fault ends; and in pieces.
        let (fault, is_fatal) = match round % 4 {
            0 => (Fault::Delay(Duration::from_millis(11)), false),
            1 => (Fault::Delay(Duration::from_millis(25)), true),
            2 => (Fault::Hold, true),
            _ => (Fault::Slice(7), false),
        };
        let (local, connects) = (counts.local.load(Ordering::Relaxed), store.stats().connects);
        tokio::task::block_in_place(|| proxy.set(fault));
        if is_fatal {
            until("the late reply costs its connection", || store.stats().connects > connects).await;
        }
        if !matches!(fault, Fault::Slice(_)) {
            until("replies are late", || counts.local.load(Ordering::Relaxed) >= local + CALLERS).await;
        }
        tokio::task::block_in_place(|| proxy.set(Fault::Pass));
    }
    is_over.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    println!("{counts:?}, {:?}", store.stats());
    assert_eq!(store.stats().panics, 0);
}

/// Checks the counter with this quota. Returns what remains of it, or `None` if the store failed.
async fn remaining_of(store: RedisStore, quota: u32) -> Option<u32> {
    let subject = format!("of-{quota}");
    let demand = Demand::new(format!("{quota}/day").parse().unwrap(), Key::new(&subject).unwrap());
    let decided = store.decide(&[Check::one(&demand)]).await;
    decided.ok().map(|decisions| decisions[0].limits[0].remaining)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reply_to_an_abandoned_call_does_not_reach_the_next_caller() {
    const ROUNDS: u32 = 20;
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::builder(proxy.url()).call_timeout(LONG).build().unwrap();
    for round in 1..=ROUNDS {
        assert!(remaining_of(store.clone(), 100_000).await.is_some(), "the connection is open");
        tokio::task::block_in_place(|| proxy.set(Fault::Hold));
        let calls = store.stats().calls;
        let first = tokio::spawn(remaining_of(store.clone(), 900));
        until("the first call is sent", || store.stats().calls == calls + 1).await;
        first.abort();
        let second = tokio::spawn(remaining_of(store.clone(), 400));
        until("the second call is sent", || store.stats().calls == calls + 2).await;
        // Both replies arrive on the same connection, one behind the other.
        tokio::task::block_in_place(|| proxy.set(Fault::Pass));
        assert_eq!(second.await.unwrap(), Some(400 - round));
    }
    assert_eq!(remaining_of(store.clone(), 900).await, Some(900 - ROUNDS - 1), "the abandoned calls were executed");
    assert_eq!(store.stats().connects, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_after_the_call_timeout_reach_no_later_caller() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::builder(proxy.url()).call_timeout(Duration::from_millis(60)).build().unwrap();
    for round in 1..=5 {
        while remaining_of(store.clone(), 100_000).await.is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::task::block_in_place(|| proxy.set(Fault::Hold));
        let connects = store.stats().connects;
        let (first, second) = tokio::join!(remaining_of(store.clone(), 900), remaining_of(store.clone(), 400));
        assert_eq!((first, second), (None, None));
        until("the connection is replaced", || store.stats().connects > connects).await;
        tokio::task::block_in_place(|| proxy.set(Fault::Pass));
        // The held calls are executed now, unless the proxy noticed before that their connection was closed.
        let remaining = loop {
            match remaining_of(store.clone(), 400).await {
                Some(remaining) => break remaining,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        assert!(remaining < 400 && remaining > 300, "round {round}: {remaining} of 400 remain");
    }
}
