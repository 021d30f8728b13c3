//! The failure contract, with stores that fail in every possible way.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::*;
use tidegate_core::{Key, Limit, ManualClock, Source, StoreFuture, Timestamp};

mod degraded;
mod in_memory;
mod outage;
mod remembered;
mod starved;

/// A store that works, hangs or fails, as the test sets it.
struct TestStore {
    inner: MemoryStore,
    behaviour: AtomicU8,
    calls: AtomicU64,
    /// While it is locked, refunds and resets wait.
    refund_lock: tokio::sync::Mutex<()>,
}

const WORKS: u8 = 0;
const FAILS: u8 = 1;
const HANGS: u8 = 2;
const PANICS: u8 = 3;
const FOREIGN: u8 = 4;
const SHORT: u8 = 5;
const FOREIGN_IN_PART: u8 = 6;
const NO_STATUSES: u8 = 7;
/// Answers after the deadline.
const LATE: u8 = 8;
/// Answers late once, as a store that has to connect, and works from then on.
const LATE_ONCE: u8 = 9;
/// Works, except that the key of the probe holds foreign data.
const FOREIGN_PROBE: u8 = 10;

impl TestStore {
    fn decide_after<'a>(&'a self, late: Duration, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        Box::pin(async move {
            tokio::time::sleep(late).await;
            self.inner.decide(checks).await
        })
    }
}

impl Store for TestStore {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        match self.behaviour.load(Ordering::SeqCst) {
            FAILS => Box::pin(async { Err(StoreError::new(StoreErrorKind::Unreachable, "down")) }),
            FOREIGN => Box::pin(async { Err(StoreError::new(StoreErrorKind::Foreign, "foreign data")) }),
            FOREIGN_IN_PART => Box::pin(async { Err(StoreError::new(StoreErrorKind::ForeignInPart, "one of them")) }),
            HANGS => Box::pin(std::future::pending()),
            PANICS => Box::pin(async { panic!("a bug in a store") }),
            SHORT => Box::pin(async { Ok(Vec::new()) }),
            NO_STATUSES => Box::pin(async {
                let at = Timestamp::ZERO;
                let decided = |_: &Check<'_>| Decision::new(at, Source::Store, Default::default());
                Ok(checks.iter().map(decided).collect())
            }),
            LATE => self.decide_after(Duration::from_millis(100), checks),
            LATE_ONCE => {
                self.behaviour.store(WORKS, Ordering::SeqCst);
                self.decide_after(Duration::from_millis(200), checks)
            }
            FOREIGN_PROBE if checks[0].demands()[0].key.subject() == b"tidegate-probe" => {
                Box::pin(async { Err(StoreError::new(StoreErrorKind::Foreign, "foreign data")) })
            }
            _ => self.inner.decide(checks),
        }
    }
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let _lock = self.refund_lock.lock().await;
            Store::refund(&self.inner, check, decision).await
        })
    }
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let _lock = self.refund_lock.lock().await;
            Store::reset(&self.inner, demand).await
        })
    }
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Store::inspect(&self.inner, demand)
    }
}

struct Bench {
    limiter: Limiter,
    store: Arc<TestStore>,
    clock: Arc<ManualClock>,
}

fn bench(configure: impl FnOnce(LimiterBuilder) -> LimiterBuilder) -> Bench {
    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
    let memory = || MemoryStore::builder().clock(clock.clone()).build();
    let (behaviour, calls, refund_lock) = (AtomicU8::new(WORKS), AtomicU64::new(0), Default::default());
    let store = Arc::new(TestStore { inner: memory(), behaviour, calls, refund_lock });
    let builder = Limiter::builder().store(store.clone()).memory(memory()).clock(clock.clone());
    Bench { limiter: configure(builder).build(), store, clock }
}

impl Bench {
    fn behaviour(&self, behaviour: u8) {
        self.store.behaviour.store(behaviour, Ordering::SeqCst);
    }

    fn calls(&self) -> u64 {
        self.store.calls.load(Ordering::SeqCst)
    }

    async fn ask(&self, limit: &str, subject: &str) -> Result<Decision, Unavailable> {
        let demand = Demand::new(limit.parse::<Limit>().unwrap(), Key::new(subject).unwrap());
        self.limiter.check(&Check::one(&demand)).await
    }
}

#[tokio::test(start_paused = true)]
async fn every_kind_of_failure_is_decided_by_this_nodes_share() {
    for behaviour in [FAILS, HANGS, PANICS, SHORT, NO_STATUSES] {
        let bench = bench(|builder| builder.instances(4));
        bench.behaviour(behaviour);
        for n in 0..5 {
            let decision = bench.ask("10/min", "a").await.unwrap();
            assert_eq!(
                (decision.source, decision.allowed()),
                (Source::Local, n < 3),
                "behaviour {behaviour}, request {n}"
            );
        }
        assert_eq!(bench.limiter.stats().local, 5);
    }
}

#[tokio::test(start_paused = true)]
async fn policy_allow_admits_uncounted_and_policy_deny_refuses_as_unavailable() {
    let bench = bench(|builder| builder.on_failure(OnFailure::Allow));
    bench.behaviour(FAILS);
    let decision = bench.ask("1/min", "a").await.unwrap();
    assert!(decision.allowed() && decision.limits.is_empty() && decision.source == Source::None);
    let demand = Demand::new("1/min".parse::<Limit>().unwrap(), Key::new("a").unwrap());
    let options = CheckOptions { on_failure: Some(OnFailure::Deny), ..CheckOptions::default() };
    let refused = bench.limiter.check_with(&Check::one(&demand), options).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unreachable);
}

#[tokio::test(start_paused = true)]
async fn decision_ends_at_its_deadline_and_at_once_while_the_breaker_is_open() {
    let bench = bench(|builder| builder.deadline(Duration::from_millis(25)));
    bench.behaviour(HANGS);
    for waited_ms in [25, 25, 25, 0, 0] {
        let before = tokio::time::Instant::now();
        bench.ask("10/min", "a").await.unwrap();
        assert_eq!(before.elapsed(), Duration::from_millis(waited_ms));
    }
    assert!(bench.limiter.stats().breaker_open);
}

#[tokio::test(start_paused = true)]
async fn recovered_store_is_used_within_two_seconds_and_keeps_its_counters() {
    for behaviour in [FAILS, HANGS, PANICS, SHORT, NO_STATUSES] {
        let bench = bench(|builder| builder);
        assert_eq!(bench.ask("10/min", "a").await.unwrap().limits[0].remaining, 9);
        bench.behaviour(behaviour);
        for _ in 0..4 {
            bench.ask("10/min", "a").await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(bench.limiter.stats().breaker_open, "behaviour {behaviour}");
        bench.behaviour(WORKS);
        // A probe that is hanging, and the longest pause. The rest of the two seconds belongs to a store that must
        // connect.
        tokio::time::sleep(Duration::from_millis(250 + 800)).await;
        let decision = bench.ask("10/min", "a").await.unwrap();
        assert_eq!((decision.source, decision.limits[0].remaining), (Source::Store, 8), "behaviour {behaviour}");
    }
}

#[tokio::test(start_paused = true)]
async fn foreign_value_degrades_its_own_key_and_does_not_open_the_breaker() {
    for behaviour in [FOREIGN, FOREIGN_IN_PART] {
        let bench = bench(|builder| builder);
        bench.behaviour(behaviour);
        for _ in 0..10 {
            assert_eq!(bench.ask("10/min", "a").await.unwrap().source, Source::Local);
        }
        assert!(!bench.limiter.stats().breaker_open);
    }
}

#[tokio::test(start_paused = true)]
async fn denied_client_that_retries_without_pause_costs_one_call_a_second() {
    let bench = bench(|builder| builder);
    for _ in 0..3_000 {
        bench.ask("2/h", "a").await.unwrap();
        bench.clock.advance(Duration::from_millis(1));
    }
    // Two admissions, of which the second leaves nothing, and a denial whenever the last one is a second old.
    assert_eq!(bench.calls(), 2 + 2);
    assert_eq!(bench.limiter.stats().allowed, 2);
}

#[tokio::test(start_paused = true)]
async fn reset_and_refund_remove_a_cached_denial_on_this_node_at_once() {
    let bench = bench(|builder| builder);
    let demand = Demand::new("1/h".parse::<Limit>().unwrap(), Key::new("a").unwrap());
    let check = Check::one(&demand);
    let admitted = bench.limiter.check(&check).await.unwrap();
    assert!(!bench.limiter.check(&check).await.unwrap().allowed());
    bench.limiter.refund(&check, &admitted).await.unwrap();
    assert!(bench.limiter.check(&check).await.unwrap().allowed());
    assert!(!bench.limiter.check(&check).await.unwrap().allowed());
    bench.limiter.reset(&demand).await.unwrap();
    assert!(bench.limiter.check(&check).await.unwrap().allowed());
}

#[tokio::test(start_paused = true)]
async fn denial_that_is_cached_during_a_refund_is_removed_after_it() {
    let bench = bench(|builder| builder);
    let demand = Demand::new("1/h".parse::<Limit>().unwrap(), Key::new("a").unwrap());
    let check = Check::one(&demand);
    let admitted = bench.limiter.check(&check).await.unwrap();
    let denied_meanwhile = || async {
        let on_the_way = bench.store.refund_lock.lock().await;
        tokio::task::yield_now().await;
        assert!(!bench.limiter.check(&check).await.unwrap().allowed());
        drop(on_the_way);
    };
    let (_, refunded) = tokio::join!(denied_meanwhile(), bench.limiter.refund(&check, &admitted));
    refunded.unwrap();
    assert!(bench.limiter.check(&check).await.unwrap().allowed());
    let (_, reset) = tokio::join!(denied_meanwhile(), bench.limiter.reset(&demand));
    reset.unwrap();
    assert!(bench.limiter.check(&check).await.unwrap().allowed());
}

#[tokio::test(start_paused = true)]
async fn count_denied_and_refundable_checks_always_call_the_store() {
    let bench = bench(|builder| builder);
    for _ in 0..10 {
        bench.ask("1/h count_denied=true", "a").await.unwrap();
    }
    assert_eq!(bench.calls(), 10);
    let demand = Demand::new("1/h".parse::<Limit>().unwrap(), Key::new("b").unwrap());
    let options = CheckOptions { refundable: true, ..CheckOptions::default() };
    for _ in 0..10 {
        bench.limiter.check_with(&Check::one(&demand), options).await.unwrap();
    }
    assert_eq!(bench.calls(), 20);
}

#[tokio::test(start_paused = true)]
async fn batch_is_one_call_for_the_checks_that_are_not_cached() {
    let bench = bench(|builder| builder);
    bench.ask("1/h", "known").await.unwrap();
    let limit: Limit = "1/h".parse().unwrap();
    let demands = ["new", "known", "new"].map(|subject| Demand::new(limit, Key::new(subject).unwrap()));
    let checks: Vec<Check<'_>> = demands.iter().map(Check::one).collect();
    let answers = bench.limiter.check_batch(&checks, CheckOptions::default()).await;
    let sources: Vec<_> = answers
        .into_iter()
        .map(|answer| answer.map(|decision| (decision.allowed(), decision.source)).unwrap())
        .collect();
    assert_eq!(sources, [(true, Source::Store), (false, Source::DenyCache), (false, Source::Store)]);
    assert_eq!(bench.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn preview_is_not_a_decision_and_calls_the_store_even_while_the_breaker_is_open() {
    let bench = bench(|builder| builder);
    bench.ask("1/h", "a").await.unwrap();
    bench.ask("1/h", "a").await.unwrap();
    bench.behaviour(HANGS);
    for _ in 0..3 {
        bench.ask("9/h", "b").await.unwrap();
    }
    let demands = ["1/h", "5/min"].map(|limit| Demand::new(limit.parse().unwrap(), Key::new("a").unwrap()).cost(2));
    let check = Check::new(&demands).unwrap();
    assert_eq!(bench.limiter.preview(&check).await.unwrap_err().kind(), StoreErrorKind::TimedOut);
    bench.behaviour(WORKS);
    let before = bench.limiter.stats();
    assert!(before.breaker_open);
    for _ in 0..3 {
        let preview = bench.limiter.preview(&check).await.unwrap();
        let statuses: Vec<_> = preview.limits.iter().map(|status| (status.allowed, status.remaining)).collect();
        assert_eq!((preview.source, statuses), (Source::Store, vec![(false, 0), (true, 5)]));
    }
    assert_eq!(bench.limiter.stats(), before);
}

#[tokio::test(start_paused = true)]
async fn refund_and_settlement_fail_at_once_while_the_breaker_is_open() {
    let bench = bench(|builder| builder);
    let demand = Demand::new("10/min".parse::<Limit>().unwrap(), Key::new("a").unwrap()).cost(5);
    let check = Check::one(&demand);
    let admitted = bench.limiter.check(&check).await.unwrap();
    bench.behaviour(HANGS);
    for _ in 0..3 {
        bench.ask("10/min", "b").await.unwrap();
    }
    let before = tokio::time::Instant::now();
    assert_eq!(bench.limiter.refund(&check, &admitted).await.unwrap_err().kind(), StoreErrorKind::Unreachable);
    for actual in [1, 9] {
        let lost = bench.limiter.settle(&check, &admitted, actual.into()).await.unwrap_err();
        assert!(lost.is_unexecuted(), "{actual}");
    }
    let id = tidegate_core::ReceiptId::from_bytes([1; 16]);
    let lost = bench.limiter.redeem(id, &check, &admitted, &[1.into()]).await.unwrap_err();
    assert_eq!(lost.kind(), StoreErrorKind::Unreachable);
    assert_eq!(before.elapsed(), Duration::ZERO);
    assert_eq!(bench.limiter.inspect(&demand).await.unwrap().remaining, 5, "nothing was refunded or settled");
}
