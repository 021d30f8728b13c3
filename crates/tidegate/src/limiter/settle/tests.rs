//! A settled counter is compared with one that was charged the actual cost from the start.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;
use crate::CheckOptions;
use tidegate_core::{
    Algorithm, Clock, Key, Limit, ManualClock, MemoryStore, Source, Store, StoreErrorKind, StoreFuture, Timestamp,
};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
const REFUNDABLE: CheckOptions<'_> =
    CheckOptions { on_failure: None, refundable: true, each: &[], may_omit: false, spent: Duration::ZERO };

struct Bench {
    limiter: Limiter,
    clock: Arc<ManualClock>,
}

fn bench() -> Bench {
    let clock = Arc::new(ManualClock::new(START));
    Bench { limiter: Limiter::builder().clock(clock.clone()).build(), clock }
}

impl Bench {
    fn pass(&self, ms: u64) {
        self.clock.advance(Duration::from_millis(ms));
    }

    async fn take(&self, demand: &Demand<'_>, units: u32) -> Decision {
        let demand = demand.cost(units);
        self.limiter.check_with(&Check::one(&demand), REFUNDABLE).await.unwrap()
    }

    async fn settle(&self, demand: &Demand<'_>, decision: &Decision, units: u32) {
        let demand = demand.cost(decision.limits[0].cost);
        self.limiter.settle(&Check::one(&demand), decision, Cost::new(units)).await.unwrap();
    }

    async fn line(&self, demand: &Demand<'_>) -> LimitStatus {
        self.limiter.inspect(demand).await.unwrap()
    }
}

/// Two counters of one limit: one that is settled, and one that is charged the actual cost.
fn pair(algorithm: Algorithm) -> [Demand<'static>; 2] {
    let limit: Limit = format!("100/s {}", algorithm.as_str()).parse().unwrap();
    ["settled", "foreseen"].map(|subject| Demand::new(limit, Key::new(subject).unwrap()))
}

#[tokio::test]
async fn settling_less_than_reserved_equals_charging_the_actual_cost_at_the_start() {
    for algorithm in Algorithm::ALL {
        // At once; while the charge still counts; in the next aligned window; and when nothing of it counts any more.
        for wait_ms in [0, 1, 150, 500, 999, 1_200, 2_500] {
            let (bench, [settled, foreseen]) = (bench(), pair(algorithm));
            for demand in [&settled, &foreseen] {
                bench.take(demand, 10).await;
            }
            bench.pass(30);
            let reserved = bench.take(&settled, 50).await;
            bench.take(&foreseen, 20).await;
            bench.pass(wait_ms);
            for demand in [&settled, &foreseen] {
                bench.take(demand, 5).await;
            }
            bench.settle(&settled, &reserved, 20).await;
            let [settled, foreseen] = [bench.line(&settled).await, bench.line(&foreseen).await];
            let is_bucket = matches!(algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket);
            // The wait that a refund of a bucket starts from is rounded up to a microsecond, so up to that much of the leak
            // is not given back.
            let waits = settled.reset_after.as_micros().zip(foreseen.reset_after.as_micros());
            if is_bucket && waits.is_some_and(|(settled, foreseen)| settled == foreseen + 1) {
                assert!(foreseen.remaining - settled.remaining <= 1, "{} after {wait_ms} ms", algorithm.as_str());
                continue;
            }
            assert_eq!(settled, foreseen, "{} after {wait_ms} ms", algorithm.as_str());
        }
    }
}

#[tokio::test]
async fn settling_more_than_reserved_charges_the_difference_now() {
    for algorithm in Algorithm::ALL {
        let (bench, [settled, foreseen]) = (bench(), pair(algorithm));
        let reserved = bench.take(&settled, 10).await;
        bench.take(&foreseen, 10).await;
        bench.pass(150);
        bench.settle(&settled, &reserved, 45).await;
        bench.take(&foreseen, 35).await;
        assert_eq!(bench.line(&settled).await, bench.line(&foreseen).await, "{}", algorithm.as_str());
    }
}

#[tokio::test]
async fn overrun_that_does_not_fit_fills_the_limit_without_exceeding_it() {
    for algorithm in Algorithm::ALL {
        for actual in [101, 150, 1_000_000_000] {
            let (bench, [settled, _]) = (bench(), pair(algorithm));
            let reserved = bench.take(&settled, 60).await;
            bench.settle(&settled, &reserved, actual).await;
            let line = bench.line(&settled).await;
            // A leaky bucket holds one in service beside its queue.
            let is_full = line.remaining == 0;
            assert!(is_full, "{} by {actual}: {line:?}", algorithm.as_str());
            assert!(!bench.take(&settled, 1).await.allowed(), "{} by {actual}", algorithm.as_str());
            bench.pass(2_010);
            assert!(
                bench.take(&settled, 50).await.allowed(),
                "{} by {actual}: not locked for long",
                algorithm.as_str()
            );
        }
    }
}

#[tokio::test]
async fn settling_exactly_what_was_reserved_changes_nothing() {
    for algorithm in Algorithm::ALL {
        let (bench, [settled, _]) = (bench(), pair(algorithm));
        let reserved = bench.take(&settled, 60).await;
        let before = bench.line(&settled).await;
        bench.settle(&settled, &reserved, 60).await;
        assert_eq!(bench.line(&settled).await, before, "{}", algorithm.as_str());
    }
}

#[tokio::test]
async fn settling_a_denial_changes_nothing() {
    let (bench, [settled, _]) = (bench(), pair(Algorithm::Sliding));
    bench.take(&settled, 90).await;
    let denied = bench.take(&settled, 20).await;
    assert!(!denied.allowed());
    bench.settle(&settled, &denied, 0).await;
    bench.settle(&settled, &denied, 1_000).await;
    assert_eq!(bench.line(&settled).await.remaining, 10);
}

#[tokio::test]
async fn limits_of_one_check_are_settled_with_different_costs() {
    let bench = bench();
    let demand = |limit: &str| Demand::new(limit.parse::<Limit>().unwrap(), Key::new("api-key:7").unwrap());
    let (requests, minute, day) = (demand("60/min fixed-window"), demand("1000/min"), demand("9000/day token-bucket"));
    let demands = [requests, minute.cost(500), day.cost(500), demand("5/s").cost(Cost::PEEK)];
    let check = Check::new(&demands).unwrap();
    let reserved = bench.limiter.check_with(&check, REFUNDABLE).await.unwrap();
    let used = [Cost::ONE, Cost::new(320), Cost::new(650)];
    bench.limiter.settle_each(&check, &reserved, &used).await.unwrap();
    let mut left = Vec::new();
    for demand in &demands {
        left.push(bench.line(demand).await.remaining);
    }
    assert_eq!(left, [59, 680, 8_350, 5]);
    // One cost for all limits that were charged. A limit that was only peeked at is not charged.
    bench.limiter.settle(&check, &reserved, Cost::new(2)).await.unwrap();
    assert_eq!(bench.line(&demands[3]).await.remaining, 5);
}

/// A shared store that may be unreachable.
struct Shared {
    inner: MemoryStore,
    is_down: AtomicBool,
}

impl Shared {
    fn or_down<'a, T>(&self, answer: impl FnOnce() -> StoreFuture<'a, T>) -> StoreFuture<'a, T> {
        if self.is_down.load(Ordering::SeqCst) {
            Box::pin(async { Err(StoreError::new(StoreErrorKind::Unreachable, "down")) })
        } else {
            answer()
        }
    }
}

impl Store for Shared {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        self.or_down(|| self.inner.decide(checks))
    }
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        self.or_down(|| Store::refund(&self.inner, check, decision))
    }
    fn redeem<'a>(&'a self, redemption: &'a Redemption<'a>) -> StoreFuture<'a, Redeemed> {
        self.or_down(|| Store::redeem(&self.inner, redemption))
    }
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        self.or_down(|| Store::reset(&self.inner, demand))
    }
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        self.or_down(|| Store::inspect(&self.inner, demand))
    }
}

/// Creates a shared store, and one of two nodes that use it.
fn one_of_two_nodes() -> (Arc<Shared>, Limiter) {
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new(START));
    let memory = || MemoryStore::builder().clock(clock.clone()).build();
    let store = Arc::new(Shared { inner: memory(), is_down: AtomicBool::new(false) });
    let limiter = Limiter::builder().store(store.clone()).memory(memory()).clock(clock.clone()).instances(2).build();
    (store, limiter)
}

#[tokio::test(start_paused = true)]
async fn settlement_while_the_store_does_not_answer_is_lost_and_returns_an_error() {
    let (store, limiter) = one_of_two_nodes();
    let demand = Demand::new("100/min".parse::<Limit>().unwrap(), Key::new("a").unwrap()).cost(40);
    let check = Check::one(&demand);
    let by_store = limiter.check_with(&check, REFUNDABLE).await.unwrap();

    store.is_down.store(true, Ordering::SeqCst);
    let lost = limiter.settle(&check, &by_store, Cost::new(10)).await.unwrap_err();
    assert_eq!(lost.kind(), StoreErrorKind::Unreachable);
    assert!(limiter.settle(&check, &by_store, Cost::new(90)).await.is_err());

    // A decision by the local share is settled on the local share: half of 100 less 30, then less 45.
    let by_node = limiter.check_with(&check, REFUNDABLE).await.unwrap();
    assert_eq!((by_node.source, by_node.limits[0].remaining), (Source::Local, 10));
    limiter.settle(&check, &by_node, Cost::new(30)).await.unwrap();
    let peek = demand.cost(Cost::PEEK);
    assert_eq!(limiter.check(&Check::one(&peek)).await.unwrap().limits[0].remaining, 20);
    let once_more = demand.cost(5);
    let by_node = limiter.check_with(&Check::one(&once_more), REFUNDABLE).await.unwrap();
    limiter.settle(&Check::one(&once_more), &by_node, Cost::new(15)).await.unwrap();
    assert_eq!(limiter.check(&Check::one(&peek)).await.unwrap().limits[0].remaining, 5);

    store.is_down.store(false, Ordering::SeqCst);
    assert_eq!(limiter.inspect(&demand).await.unwrap().remaining, 60, "the store was not called");
}

/// A store whose refunds or charges may fail.
struct Halves {
    inner: MemoryStore,
    refund_fails: Option<StoreErrorKind>,
    charge_fails: Option<StoreErrorKind>,
}

impl Store for Halves {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        // An overrun is charged fit or not.
        match self.charge_fails.filter(|_| checks[0].demands()[0].limit.count_denied()) {
            Some(kind) => Box::pin(async move { Err(StoreError::new(kind, "no charge")) }),
            None => self.inner.decide(checks),
        }
    }
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        match self.refund_fails {
            Some(kind) => Box::pin(async move { Err(StoreError::new(kind, "no refund")) }),
            None => Store::refund(&self.inner, check, decision),
        }
    }
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Store::reset(&self.inner, demand)
    }
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Store::inspect(&self.inner, demand)
    }
}

#[tokio::test(start_paused = true)]
async fn error_of_a_half_executed_settlement_is_not_unexecuted() {
    use StoreErrorKind as Kind;
    let both_ways = [Cost::new(1), Cost::new(9)];
    let one_way = [Cost::new(9), Cost::new(9)];
    for (refund_fails, charge_fails, used, expected) in [
        (None, None, both_ways, None),
        (Some(Kind::Unreachable), None, both_ways, Some(Kind::Interrupted)),
        (None, Some(Kind::Unreachable), both_ways, Some(Kind::Interrupted)),
        (Some(Kind::Unavailable), Some(Kind::TimedOut), both_ways, Some(Kind::Interrupted)),
        (Some(Kind::TimedOut), Some(Kind::Unavailable), both_ways, Some(Kind::TimedOut)),
        (Some(Kind::Unavailable), Some(Kind::Unreachable), both_ways, Some(Kind::Unavailable)),
        (None, Some(Kind::Unreachable), one_way, Some(Kind::Unreachable)),
    ] {
        let inner = MemoryStore::builder().clock(Arc::new(ManualClock::new(START))).build();
        let limiter = Limiter::builder().store(Arc::new(Halves { inner, refund_fails, charge_fails })).build();
        let demands = ["a", "b"]
            .map(|subject| Demand::new("100/min".parse::<Limit>().unwrap(), Key::new(subject).unwrap()).cost(5));
        let check = Check::new(&demands).unwrap();
        let reserved = limiter.check_with(&check, REFUNDABLE).await.unwrap();
        let settled = limiter.settle_each(&check, &reserved, &used).await;
        assert_eq!(settled.err().map(|error| error.kind()), expected, "{refund_fails:?}, {charge_fails:?}");
    }
}

fn id(number: u8) -> ReceiptId {
    ReceiptId::from_bytes([number; 16])
}

#[tokio::test]
async fn redemption_corrects_once_and_marks_its_id_even_without_a_difference() {
    for algorithm in Algorithm::ALL {
        for actual in [0, 20, 50, 70, 1_000_000] {
            let (bench, [redeemed, settled]) = (bench(), pair(algorithm));
            let [redeemed, settled] = [redeemed.cost(50), settled.cost(50)];
            let reserved = bench.take(&redeemed, 50).await;
            let reserved_too = bench.take(&settled, 50).await;
            bench.pass(150);
            bench.settle(&settled, &reserved_too, actual).await;
            let check = Check::one(&redeemed);
            for (actual, expected) in
                [(actual, Redeemed::Done), (actual, Redeemed::AlreadyUsed), (7, Redeemed::AlreadyUsed)]
            {
                let got = bench.limiter.redeem(id(1), &check, &reserved, &[Cost::new(actual)]).await.unwrap();
                assert_eq!(got, expected, "{}", algorithm.as_str());
                let [redeemed, settled] = [bench.line(&redeemed).await, bench.line(&settled).await];
                assert_eq!(redeemed, settled, "{}, {actual} used", algorithm.as_str());
            }
        }
    }
}

#[tokio::test]
async fn receipt_expires_ten_minutes_after_the_longest_reset() {
    let bench = bench();
    let demand = |limit: &str| Demand::new(limit.parse::<Limit>().unwrap(), Key::new("a").unwrap());
    let demands = [demand("100/min"), demand("100/h")];
    let check = Check::new(&demands).unwrap();
    let reserved = bench.limiter.check_with(&check, REFUNDABLE).await.unwrap();
    let redeem = async |number, used| {
        let actual = [Cost::ONE, Cost::new(used)];
        bench.limiter.redeem(id(number), &check, &reserved, &actual).await.unwrap()
    };
    let until = START.plus_micros((3_600 + 600) * 1_000_000);
    bench.clock.set(until.minus_micros(1));
    assert_eq!(redeem(1, 31).await, Redeemed::Done);
    assert_eq!(bench.line(&demands[1]).await.remaining, 70, "a late overrun still counts");
    bench.clock.set(until);
    assert_eq!((redeem(1, 31).await, redeem(2, 31).await), (Redeemed::Expired, Redeemed::Expired));
    assert_eq!(bench.line(&demands[1]).await.remaining, 70);
}

#[tokio::test]
async fn redemption_of_what_was_not_charged_changes_nothing() {
    let (bench, [demand, _]) = (bench(), pair(Algorithm::Sliding));
    bench.take(&demand, 90).await;
    let denied = bench.take(&demand, 20).await;
    let uncounted = Decision::uncounted(START);
    for decision in [&denied, &uncounted] {
        for _ in 0..2 {
            let redeemed = bench.limiter.redeem(id(1), &Check::one(&demand), decision, &[Cost::new(50)]).await;
            assert_eq!(redeemed.unwrap(), Redeemed::Done);
        }
    }
    assert_eq!(bench.line(&demand).await.remaining, 10);
}

#[tokio::test(start_paused = true)]
async fn redemption_that_failed_is_repeated_and_a_local_decision_is_redeemed_in_the_local_share() {
    let (store, limiter) = one_of_two_nodes();
    let demand = Demand::new("100/min".parse::<Limit>().unwrap(), Key::new("a").unwrap()).cost(40);
    let check = Check::one(&demand);
    let by_store = limiter.check_with(&check, REFUNDABLE).await.unwrap();
    let redeem = async |decision, used| limiter.redeem(id(1), &check, decision, &[Cost::new(used)]).await;

    store.is_down.store(true, Ordering::SeqCst);
    assert_eq!(redeem(&by_store, 10).await.unwrap_err().kind(), StoreErrorKind::Unreachable);

    // The same id, in the local share: half of 100 less 30.
    let by_node = limiter.check_with(&check, REFUNDABLE).await.unwrap();
    assert_eq!((by_node.source, by_node.limits[0].remaining), (Source::Local, 10));
    let peek = demand.cost(Cost::PEEK);
    for expected in [Redeemed::Done, Redeemed::AlreadyUsed] {
        assert_eq!(redeem(&by_node, 30).await.unwrap(), expected);
        assert_eq!(limiter.check(&Check::one(&peek)).await.unwrap().limits[0].remaining, 20);
    }

    store.is_down.store(false, Ordering::SeqCst);
    for expected in [Redeemed::Done, Redeemed::AlreadyUsed] {
        let redeemed = Store::redeem(
            &*store,
            &Difference::between(&check, &by_store, &[Cost::new(10)]).unwrap().redemption(id(1)),
        )
        .await;
        assert_eq!(redeemed.unwrap(), expected);
        assert_eq!(limiter.inspect(&demand).await.unwrap().remaining, 90);
    }
}

#[tokio::test(start_paused = true)]
async fn redemption_ends_a_cached_denial_and_a_store_without_receipts_refuses_it() {
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new(START));
    let memory = || MemoryStore::builder().clock(clock.clone()).build();
    let demand = Demand::new("100/min".parse::<Limit>().unwrap(), Key::new("a").unwrap()).cost(60);
    let check = Check::one(&demand);
    let store = Arc::new(Shared { inner: memory(), is_down: AtomicBool::new(false) });
    let limiter = Limiter::builder().store(store).clock(clock.clone()).build();
    let reserved = limiter.check(&check).await.unwrap();
    assert!(!limiter.check(&check).await.unwrap().allowed(), "this denial is cached");
    assert_eq!(limiter.redeem(id(1), &check, &reserved, &[Cost::new(10)]).await.unwrap(), Redeemed::Done);
    assert!(limiter.check(&check).await.unwrap().allowed());

    let store = Arc::new(Halves { inner: memory(), refund_fails: None, charge_fails: None });
    let limiter = Limiter::builder().store(store).clock(clock.clone()).build();
    let reserved = limiter.check(&check).await.unwrap();
    let refused = limiter.redeem(id(1), &check, &reserved, &[Cost::new(10)]).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Forbidden);
    assert_eq!(limiter.inspect(&demand).await.unwrap().remaining, 40);
}
