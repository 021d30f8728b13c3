//! An answer belongs to its question, however late it comes.
//!
//! Every counter has a quota of its own size, and each is asked by one task alone, so that what remains tells whose answer it is:
//! a reply taken for another's would claim more than that counter ever had, or less than was asked of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tollgate::{Check, Demand, Key, Limit, Limiter, Source};
use tollgate_redis::RedisStore;
use tollgate_testkit::fault::{Fault, Proxy};
use tollgate_testkit::server::Server;

const ASKERS: u32 = 16;
/// More than any of them asks, so that their ranges do not meet.
const QUOTA_STEP: u32 = 90_000;

/// How often the store answered, and how often it did not in time.
#[derive(Default, Debug)]
struct Seen {
    shared: u32,
    late: u32,
}

async fn ask_one_counter(limiter: Limiter, number: u32, is_over: Arc<AtomicBool>) -> Seen {
    let quota = QUOTA_STEP * (number + 1);
    let limit: Limit = format!("{quota}/day token-bucket").parse().unwrap();
    let subject = format!("asker-{number}");
    let demand = Demand::new(limit, Key::new(&subject).unwrap());
    let mut seen = Seen::default();
    // What leaks back: up to a unit in each of so many microseconds.
    let mut least_charged = 0;
    while !is_over.load(Ordering::Relaxed) && seen.shared + seen.late < QUOTA_STEP / 2 {
        let decision = limiter.check(&Check::one(&demand)).await.unwrap();
        if decision.source != Source::Store {
            seen.late += 1;
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        seen.shared += 1;
        let remaining = decision.limits[0].remaining;
        let asked = seen.shared + seen.late;
        assert!(remaining < quota, "asker {number}: its own unit is charged, {remaining} of {quota} remain");
        assert!(remaining >= quota - asked, "asker {number}: {remaining} of {quota} remain after {asked} requests");
        least_charged = least_charged.max(quota - remaining);
    }
    assert!(least_charged > 0, "asker {number} was never answered");
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_reply_is_thrown_away_and_never_taken_for_anothers() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::builder(proxy.url()).call_timeout(Duration::from_millis(30)).build().unwrap();
    // A limiter for each, so that one breaker does not silence all of them.
    let is_over = Arc::new(AtomicBool::new(false));
    let askers: Vec<_> = (0..ASKERS)
        .map(|number| {
            let limiter = Limiter::builder().store(Arc::new(store.clone())).deadline(Duration::from_millis(20)).build();
            tokio::spawn(ask_one_counter(limiter, number, is_over.clone()))
        })
        .collect();
    for round in 0_u64..40 {
        // Later than the deadline but not than the call; later than both; and held until after all have given up.
        let fault = match round % 4 {
            0 => Fault::Delay(Duration::from_millis(11)),
            1 => Fault::Delay(Duration::from_millis(25)),
            2 => Fault::Hold,
            _ => Fault::Slice(7),
        };
        tokio::task::block_in_place(|| proxy.set(fault));
        tokio::time::sleep(Duration::from_millis(45)).await;
        tokio::task::block_in_place(|| proxy.set(Fault::Pass));
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    is_over.store(true, Ordering::Relaxed);
    let mut total = Seen::default();
    for asker in askers {
        let seen = asker.await.unwrap();
        total = Seen { shared: total.shared + seen.shared, late: total.late + seen.late };
    }
    println!("{total:?}, {:?}", store.stats());
    assert!(total.shared > 100 && total.late > 100, "{total:?}");
    assert!(store.stats().connects > 5, "late replies cost their connection: {:?}", store.stats());
    assert_eq!(store.stats().panics, 0);
}

/// One question on a counter of this quota, with this much patience and a breaker of its own: whether the store answered, and
/// what remains.
async fn ask_once(store: &RedisStore, quota: u32, patience: Duration) -> Option<u32> {
    let limit: Limit = format!("{quota}/day").parse().unwrap();
    let subject = format!("of-{quota}");
    let demand = Demand::new(limit, Key::new(&subject).unwrap());
    let limiter = Limiter::builder().store(Arc::new(store.clone())).deadline(patience).build();
    let decision = limiter.check(&Check::one(&demand)).await.unwrap();
    (decision.source == Source::Store).then(|| decision.limits[0].remaining)
}

/// The first question is on its way and is given up; the second is on its way behind it. Then all that was held arrives at once: before
/// the connection is given up, too, or after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_reply_to_a_question_given_up_is_not_the_next_ones() {
    const CALL_TIMEOUT: Duration = Duration::from_millis(60);
    const LONG: Duration = Duration::from_secs(10);
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::builder(proxy.url()).call_timeout(CALL_TIMEOUT).build().unwrap();
    let (mut given_up, mut answered) = (0, 0);
    for round in 1_u32..=20 {
        while ask_once(&store, 7, LONG).await.is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::task::block_in_place(|| proxy.set(Fault::Hold));
        let first = ask_once(&store, 900, CALL_TIMEOUT / 3);
        let second = async {
            tokio::time::sleep(CALL_TIMEOUT / 6).await;
            ask_once(&store, 400, LONG).await
        };
        let release = async {
            tokio::time::sleep(if round % 2 == 0 { CALL_TIMEOUT / 2 } else { CALL_TIMEOUT + CALL_TIMEOUT / 3 }).await;
            tokio::task::block_in_place(|| proxy.set(Fault::Pass));
        };
        let (first, second, ()) = tokio::join!(first, second, release);
        given_up += u32::from(first.is_none());
        if let Some(remaining) = second {
            answered += 1;
            assert!((400 - round..400).contains(&remaining), "round {round}: {remaining} of 400 remain");
        }
    }
    println!("{given_up} given up, {answered} of those behind them answered");
    assert!(given_up >= 15 && answered > 0, "{given_up} given up, {answered} answered");
}
