//! Waiting, on a clock that tokio advances as soon as all tasks sleep.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::join_all;
use parking_lot::Mutex;

use super::*;
use crate::limiter::LimiterBuilder;
use crate::{CheckOptions, OnFailure};
use tidegate_core::{
    Clock, Cost, Demand, Key, Limit, LimitStatus, MemoryStore, Store, StoreError, StoreErrorKind, StoreFuture,
    Timestamp,
};

/// Tokio's time, which does not advance while a task runs.
struct Paused(Instant);

impl Clock for Paused {
    fn now(&self) -> Timestamp {
        let passed_us = self.0.elapsed().as_micros() as u64;
        Timestamp::from_micros(1_700_000_000_000_000 + passed_us)
    }
}

fn clock() -> Arc<Paused> {
    Arc::new(Paused(Instant::now()))
}

fn limiter() -> Limiter {
    Limiter::builder().clock(clock()).build()
}

fn demand(limit: &str) -> Demand<'static> {
    Demand::new(limit.parse::<Limit>().unwrap(), Key::new("hooks.example.com").unwrap())
}

const SECOND: Duration = Duration::from_secs(1);

/// A store that counts the calls.
struct Counted {
    inner: MemoryStore,
    calls: AtomicU64,
}

impl Store for Counted {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.inner.decide(checks)
    }
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Store::refund(&self.inner, check, decision)
    }
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Store::reset(&self.inner, demand)
    }
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Store::inspect(&self.inner, demand)
    }
}

fn counted() -> Arc<Counted> {
    Arc::new(Counted { inner: MemoryStore::builder().clock(clock()).build(), calls: AtomicU64::new(0) })
}

#[tokio::test(start_paused = true)]
async fn until_ready_waits_exactly_for_retry_after() {
    for (algorithm, waited_ms) in [("", 1_000), ("sliding-log", 1_000), ("token-bucket", 500)] {
        let (limiter, demand) = (limiter(), demand(&format!("2/s {algorithm}")));
        let check = Check::one(&demand);
        let start = Instant::now();
        for _ in 0..2 {
            limiter.until_ready(&check, 10 * SECOND).await.unwrap();
        }
        assert_eq!(start.elapsed(), Duration::ZERO, "{algorithm}");
        assert!(limiter.until_ready(&check, 10 * SECOND).await.unwrap().allowed());
        assert_eq!(start.elapsed(), Duration::from_millis(waited_ms), "{algorithm}");
    }
}

#[tokio::test(start_paused = true)]
async fn wait_beyond_the_maximum_fails_at_once_and_charges_nothing() {
    let (limiter, demand) = (limiter(), demand("10/min"));
    let all = demand.cost(10);
    limiter.until_ready(&Check::one(&all), SECOND).await.unwrap();
    let start = Instant::now();
    let refused = limiter.until_ready(&Check::one(&demand), Duration::from_millis(59_999)).await.unwrap_err();
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert!(matches!(&refused, NotReady::TooLate(decision) if decision.retry_after().as_secs_ceil() == Some(60)));
    limiter.until_ready(&Check::one(&all), 60 * SECOND).await.unwrap();
    assert_eq!(start.elapsed(), 60 * SECOND, "a wait of exactly the maximum is allowed");
}

#[tokio::test(start_paused = true)]
async fn cost_that_never_fits_fails_at_once() {
    let (limiter, demand) = (limiter(), demand("10/min").cost(11));
    let start = Instant::now();
    let refused = limiter.until_ready(&Check::one(&demand), Duration::MAX).await.unwrap_err();
    assert!(matches!(refused, NotReady::Never(_)), "{refused:?}");
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn delay_of_a_leaky_bucket_is_waited_for() {
    let (limiter, demand) = (limiter(), demand("10/s leaky-bucket"));
    let check = Check::one(&demand);
    let start = Instant::now();
    for turn in 0..5 {
        limiter.until_ready(&check, SECOND).await.unwrap();
        assert_eq!(start.elapsed(), Duration::from_millis(100) * turn, "evenly spaced");
    }
}

#[tokio::test(start_paused = true)]
async fn leaky_bucket_slot_that_comes_too_late_is_refunded() {
    let (limiter, demand) = (limiter(), demand("10/s leaky-bucket"));
    let several = demand.cost(5);
    limiter.check(&Check::one(&several)).await.unwrap();
    let start = Instant::now();
    let refused = limiter.until_ready(&Check::one(&demand), Duration::from_millis(499)).await.unwrap_err();
    assert!(matches!(refused, NotReady::TooLate(_)), "{refused:?}");
    assert_eq!(start.elapsed(), Duration::ZERO);
    let wait = limiter.check(&Check::one(&demand)).await.unwrap().retry_after();
    assert_eq!(wait.as_duration(), Some(Duration::from_millis(500)), "the refused check left no charge");
}

#[tokio::test(start_paused = true)]
async fn denials_of_a_leaky_bucket_are_not_cached_while_a_slot_may_be_refunded() {
    let store = counted();
    let limiter = Limiter::builder().store(store.clone()).clock(clock()).build();
    let demand = demand("2/min leaky-bucket queue=1");
    let check = Check::one(&demand);
    // One proceeds and one waits: the queue of the bucket is full.
    for _ in 0..2 {
        limiter.check_with(&check, CheckOptions { refundable: true, ..CheckOptions::default() }).await.unwrap();
    }
    for _ in 0..3 {
        let refused = limiter.until_ready(&check, Duration::ZERO).await.unwrap_err();
        assert!(refused.decision().is_some_and(|decision| !decision.allowed()), "{refused:?}");
    }
    assert_eq!(store.calls.load(Ordering::SeqCst), 2 + 3);
}

#[tokio::test(start_paused = true)]
async fn check_that_is_too_late_for_a_leaky_bucket_fails_without_waiting_in_the_queue() {
    let (limiter, demand) = (limiter(), demand("10/s leaky-bucket"));
    let start = Instant::now();
    let waiting = (0..10).map(|_| async {
        let answer = limiter.until_ready(&Check::one(&demand), Duration::from_millis(300)).await;
        (answer.is_ok(), start.elapsed().as_millis())
    });
    let mut results: Vec<(bool, u128)> = join_all(waiting).await;
    results.sort();
    assert_eq!(results, [[(false, 0); 6].as_slice(), &[(true, 0), (true, 100), (true, 200), (true, 300)]].concat());
}

#[tokio::test(start_paused = true)]
async fn waiting_checks_are_admitted_in_order_with_about_two_calls_each() {
    const WAITING: u64 = 200;
    let store = counted();
    let limiter = Limiter::builder().store(store.clone()).clock(clock()).build();
    let demand = demand("10/s");
    let served = Mutex::new(Vec::new());
    let start = Instant::now();
    let waiting = (0..WAITING).map(|number| {
        let (limiter, served) = (&limiter, &served);
        async move {
            limiter.until_ready(&Check::one(&demand), 60 * SECOND).await.unwrap();
            served.lock().push(number);
        }
    });
    join_all(waiting).await;
    assert_eq!(*served.lock(), (0..WAITING).collect::<Vec<_>>());
    assert_eq!(start.elapsed(), 19 * SECOND, "ten a second, without a pause");
    let calls = store.calls.load(Ordering::SeqCst);
    assert!(calls <= 2 * WAITING, "{calls} calls for {WAITING} who waited");
    assert_eq!(limiter.0.queues.len(), 0, "a queue without positions is removed");
}

#[tokio::test(start_paused = true)]
async fn check_with_a_high_cost_is_not_overtaken_by_checks_with_low_costs() {
    let limiter = limiter();
    let (cheap, dear) = (demand("10/s token-bucket"), demand("10/s token-bucket").cost(10));
    limiter.check(&Check::one(&dear)).await.unwrap();
    let start = Instant::now();
    let dear_one = async {
        limiter.until_ready(&Check::one(&dear), 10 * SECOND).await.unwrap();
        start.elapsed()
    };
    let cheap_ones = (0..50).map(|_| async {
        limiter.until_ready(&Check::one(&cheap), 60 * SECOND).await.unwrap();
    });
    let (dear_waited, _) = tokio::join!(dear_one, join_all(cheap_ones));
    assert_eq!(dear_waited, SECOND);
    assert_eq!(start.elapsed(), 6 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn check_behind_fails_as_soon_as_the_first_has_to_wait_beyond_its_deadline() {
    let limiter = limiter();
    let demand = demand("1/10s");
    limiter.check(&Check::one(&demand)).await.unwrap();
    let start = Instant::now();
    let waiting = [(20, None), (5, Some(0)), (30, None), (12, Some(10))].map(|(bound_s, leaves_s)| {
        let limiter = &limiter;
        async move {
            let answer = limiter.until_ready(&Check::one(&demand), bound_s * SECOND).await;
            match leaves_s {
                None => assert!(answer.unwrap().allowed()),
                Some(leaves_s) => {
                    assert!(matches!(answer, Err(NotReady::TooLate(_))));
                    assert_eq!(start.elapsed(), leaves_s * SECOND, "bound {bound_s} s");
                }
            }
        }
    });
    join_all(waiting).await;
    assert_eq!(start.elapsed(), 20 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn dropped_check_lets_the_next_one_proceed() {
    let limiter = limiter();
    let demand = demand("1/s");
    limiter.check(&Check::one(&demand)).await.unwrap();
    let start = Instant::now();
    let impatient = async {
        let check = Check::one(&demand);
        let given_up = tokio::time::timeout(SECOND / 2, limiter.until_ready(&check, 10 * SECOND)).await;
        assert!(given_up.is_err());
    };
    let patient = async { limiter.until_ready(&Check::one(&demand), 10 * SECOND).await.unwrap() };
    tokio::join!(impatient, patient);
    assert_eq!(start.elapsed(), SECOND, "the units that the first did not take are there for the second");
}

#[tokio::test(start_paused = true)]
async fn contending_nodes_are_all_admitted_at_the_rate_of_the_limit() {
    const NODES: usize = 4;
    const EACH: u32 = 25;
    let store = counted();
    let clock = clock();
    let demand = demand("10/s token-bucket burst=1");
    let start = Instant::now();
    let nodes: Vec<Limiter> =
        (0..NODES).map(|_| Limiter::builder().store(store.clone()).clock(clock.clone()).build()).collect();
    let waiting = nodes.iter().flat_map(|node| (0..EACH).map(move |_| node)).map(|node| async move {
        node.until_ready(&Check::one(&demand), 60 * SECOND).await.unwrap();
    });
    join_all(waiting).await;
    let ideal = Duration::from_millis(100) * (NODES as u32 * EACH - 1);
    let elapsed = start.elapsed();
    assert!(elapsed >= ideal && elapsed < ideal.mul_f64(1.15), "{elapsed:?} of {ideal:?}");
    let calls = store.calls.load(Ordering::SeqCst);
    assert!(calls < 2 * NODES as u64 * NODES as u64 * u64::from(EACH), "{calls} calls");
}

#[tokio::test(start_paused = true)]
async fn failure_policy_decides_while_the_store_does_not_answer() {
    struct Down;
    impl Store for Down {
        fn decide<'a>(&'a self, _: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
            Box::pin(async { Err(StoreError::new(StoreErrorKind::Unreachable, "down")) })
        }
        fn refund<'a>(&'a self, _: &'a Check<'a>, _: &'a Decision) -> StoreFuture<'a, ()> {
            Box::pin(async { Ok(()) })
        }
        fn reset<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, ()> {
            Box::pin(async { Ok(()) })
        }
        fn inspect<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
            Box::pin(std::future::pending())
        }
    }
    let demand = demand("1/s");
    let check = Check::one(&demand);
    let node = |on_failure| Limiter::builder().store(Arc::new(Down)).clock(clock()).on_failure(on_failure).build();
    let refused = node(OnFailure::Deny).until_ready(&check, SECOND).await.unwrap_err();
    assert!(matches!(refused, NotReady::Unavailable(_)) && refused.decision().is_none());
    let (local, start) = (node(OnFailure::Local), Instant::now());
    for _ in 0..3 {
        local.until_ready(&check, SECOND).await.unwrap();
    }
    assert_eq!(start.elapsed(), 2 * SECOND, "the local share is waited for like any other");
    let allow = node(OnFailure::Allow);
    for _ in 0..3 {
        allow.until_ready(&check, SECOND).await.unwrap();
    }
    assert_eq!(start.elapsed(), 2 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn peek_is_ready_at_once() {
    let (limiter, demand) = (limiter(), demand("1/min"));
    limiter.check_with(&Check::one(&demand), CheckOptions::default()).await.unwrap();
    let peek = demand.cost(Cost::PEEK);
    assert!(limiter.until_ready(&Check::one(&peek), Duration::ZERO).await.unwrap().allowed());
}

#[tokio::test(start_paused = true)]
async fn check_whose_turn_does_not_come_in_time_charges_nothing() {
    let limiter = limiter();
    let (cheap, dear) = (demand("10/s token-bucket"), demand("10/s token-bucket").cost(10));
    limiter.check(&Check::one(&dear)).await.unwrap();
    let start = Instant::now();
    let in_front = async {
        limiter.until_ready(&Check::one(&dear), 10 * SECOND).await.unwrap();
        start.elapsed()
    };
    let behind = async {
        // Half of the units that the first needs are there. This check needs one.
        tokio::time::sleep(SECOND / 2).await;
        let refused = limiter.until_ready(&Check::one(&cheap), SECOND / 10).await.unwrap_err();
        assert_eq!(start.elapsed(), SECOND / 2, "returned at once");
        let NotReady::TooLate(decision) = refused else { panic!("{refused:?}") };
        assert_eq!((decision.allowed(), decision.limits[0].cost, decision.limits[0].remaining), (false, 1, 5));
        assert_eq!(decision.retry_after().as_duration(), Some(SECOND / 2), "when the first in the queue checks again");
        let too_dear = cheap.cost(11);
        let never = limiter.until_ready(&Check::one(&too_dear), SECOND / 10).await.unwrap_err();
        assert!(matches!(never, NotReady::Never(_)), "{never:?}");
        let peek = cheap.cost(Cost::PEEK);
        assert!(limiter.until_ready(&Check::one(&peek), Duration::ZERO).await.unwrap().allowed());
    };
    let (waited, ()) = tokio::join!(in_front, behind);
    assert_eq!(waited, SECOND);
}

/// A store that cannot be reached until the test restores it.
struct Away {
    inner: MemoryStore,
    back_at: Instant,
}

impl Away {
    fn or_away<'a, T>(&self, answer: impl FnOnce() -> StoreFuture<'a, T>) -> StoreFuture<'a, T> {
        if Instant::now() < self.back_at {
            Box::pin(async { Err(StoreError::new(StoreErrorKind::Unreachable, "away")) })
        } else {
            answer()
        }
    }
}

impl Store for Away {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        self.or_away(|| self.inner.decide(checks))
    }
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        self.or_away(|| Store::refund(&self.inner, check, decision))
    }
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        self.or_away(|| Store::reset(&self.inner, demand))
    }
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        self.or_away(|| Store::inspect(&self.inner, demand))
    }
}

#[tokio::test(start_paused = true)]
async fn denial_by_the_local_share_is_not_final_while_the_store_may_come_back() {
    // A share that is used up for long, one that is too small for the cost, and a queue whose wait is too long.
    for (limit, cost) in [("8/h", 2), ("8/h", 5), ("8/h leaky-bucket", 2)] {
        let back_at = Instant::now() + 3 * SECOND;
        let inner = MemoryStore::builder().clock(clock()).build();
        let store = Arc::new(Away { inner, back_at });
        let limiter = Limiter::builder().store(store).clock(clock()).instances(4).build();
        let (whole_share, demand) = (demand(limit).cost(2), demand(limit).cost(cost));
        limiter.check(&Check::one(&whole_share)).await.unwrap();

        let start = Instant::now();
        let refused = limiter.until_ready(&Check::one(&demand), SECOND * 3 / 2).await.unwrap_err();
        assert!(matches!(refused, NotReady::TooLate(_)), "{limit} {cost}: {refused:?}");
        assert_eq!(start.elapsed(), SECOND * 3 / 2, "{limit} {cost}: the store might have come back");

        let ready = limiter.until_ready(&Check::one(&demand), 10 * SECOND).await.unwrap();
        assert_eq!(ready.source, Source::Store, "{limit} {cost}");
        assert!(Instant::now() < back_at + 2 * SECOND, "{limit} {cost}");
    }
}

/// A store that answers after `delay`.
struct Slow {
    inner: MemoryStore,
    delay: Duration,
}

impl Store for Slow {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        Box::pin(async move {
            sleep(self.delay).await;
            self.inner.decide(checks).await
        })
    }
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Store::refund(&self.inner, check, decision)
    }
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Store::reset(&self.inner, demand)
    }
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Store::inspect(&self.inner, demand)
    }
}

fn slow(delay: Duration) -> LimiterBuilder {
    let inner = MemoryStore::builder().clock(clock()).build();
    let store = Slow { inner, delay };
    Limiter::builder().store(Arc::new(store)).clock(clock()).deadline(Duration::from_millis(25))
}

#[tokio::test(start_paused = true)]
async fn ready_deadline_lets_a_slow_store_decide_waiting_work_but_no_check() {
    let delay = Duration::from_millis(200);
    let demand = demand("5/s");
    let check = Check::one(&demand);
    let waiting = slow(delay).ready_deadline(SECOND).build();
    let start = Instant::now();
    let decision = waiting.until_ready(&check, SECOND).await.unwrap();
    assert_eq!((decision.source, start.elapsed()), (Source::Store, delay));
    let start = Instant::now();
    assert_eq!(waiting.check(&check).await.unwrap().source, Source::Local);
    assert_eq!(start.elapsed(), Duration::from_millis(25));

    let by_default = slow(delay).build();
    let start = Instant::now();
    assert_eq!(by_default.until_ready(&check, SECOND).await.unwrap().source, Source::Local);
    assert_eq!(start.elapsed(), Duration::from_millis(25), "the deadline of a check");
}

#[tokio::test(start_paused = true)]
async fn answers_that_only_waiting_work_can_use_do_not_keep_the_breaker_closed() {
    let demand = demand("100/s");
    let check = Check::one(&demand);
    let limiter = slow(Duration::from_millis(200)).ready_deadline(SECOND).build();
    for _ in 0..3 {
        limiter.until_ready(&check, SECOND).await.unwrap();
        assert!(!limiter.stats().breaker_open);
        limiter.check(&check).await.unwrap();
    }
    assert!(limiter.stats().breaker_open, "three checks in a row had no answer in time");
}

#[tokio::test(start_paused = true)]
async fn short_ready_deadline_ends_a_call_and_does_not_open_the_breaker() {
    let demand = demand("100/s");
    let limiter = slow(Duration::from_millis(20)).ready_deadline(Duration::from_millis(10)).build();
    let start = Instant::now();
    for _ in 0..5 {
        assert_eq!(limiter.until_ready(&Check::one(&demand), SECOND).await.unwrap().source, Source::Local);
    }
    assert_eq!(start.elapsed(), Duration::from_millis(50));
    assert!(!limiter.stats().breaker_open, "the store answers checks in time");
}

#[tokio::test(start_paused = true)]
async fn failure_policy_of_the_options_decides_while_the_store_is_unavailable() {
    let store = Away { inner: MemoryStore::builder().clock(clock()).build(), back_at: Instant::now() + 3_600 * SECOND };
    let limiter = Limiter::builder().store(Arc::new(store)).clock(clock()).build();
    let demand = demand("1/min");
    let check = Check::one(&demand);
    let wait = |on_failure| {
        let options = CheckOptions { on_failure: Some(on_failure), ..CheckOptions::default() };
        limiter.until_ready_with(&check, SECOND, options)
    };
    let admitted = wait(OnFailure::Allow).await.unwrap();
    assert_eq!((admitted.source, admitted.limits.len()), (Source::None, 0));
    let refused = wait(OnFailure::Deny).await.unwrap_err();
    assert!(matches!(&refused, NotReady::Unavailable(_)), "{refused:?}");
    assert!(refused.into_denial().is_err());
    assert_eq!(wait(OnFailure::Local).await.unwrap().source, Source::Local);
}

#[tokio::test(start_paused = true)]
async fn refunded_slot_of_a_leaky_bucket_is_a_denial_without_a_charge() {
    let (limiter, demand) = (limiter(), demand("10/s leaky-bucket"));
    let several = demand.cost(5);
    let before = limiter.check(&Check::one(&several)).await.unwrap();
    let refused = limiter.until_ready(&Check::one(&demand), Duration::from_millis(499)).await.unwrap_err();
    let denial = refused.into_denial().unwrap();
    assert!(!denial.allowed());
    assert_eq!(denial.retry_after().as_duration(), Some(Duration::from_millis(500)));
    assert_eq!(denial.limits[0].remaining, before.limits[0].remaining, "the units are refunded");
}
