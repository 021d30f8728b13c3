//! A process that is short of CPU time: a late answer or a late timeout is not an outage of the store.

use std::pin::Pin;
use std::sync::Mutex;

use tokio::sync::oneshot;

use super::*;

/// A store whose answers arrive at once, but are delivered only when its own task runs.
struct Undelivered {
    inner: MemoryStore,
    arrived: Mutex<Vec<oneshot::Sender<()>>>,
    turns: AtomicU64,
}

impl Undelivered {
    fn limiter() -> (Limiter, Arc<Undelivered>) {
        let (arrived, turns) = (Mutex::default(), AtomicU64::new(0));
        let store = Arc::new(Undelivered { inner: MemoryStore::new(), arrived, turns });
        (Limiter::builder().store(store.clone()).deadline(Duration::from_millis(25)).build(), store)
    }

    /// Runs the store's own task: delivers all answers that have arrived.
    fn deliver(&self) {
        self.turns.fetch_add(1, Ordering::SeqCst);
        for waiter in self.arrived.lock().unwrap().drain(..) {
            let _ = waiter.send(());
        }
    }
}

impl Store for Undelivered {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        Box::pin(async {
            let (waiter, delivered) = oneshot::channel();
            self.arrived.lock().unwrap().push(waiter);
            delivered.await.unwrap();
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
    fn catch_up(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async { self.deliver() })
    }
}

#[tokio::test(start_paused = true)]
async fn answer_that_has_arrived_by_the_deadline_is_used() {
    let (limiter, store) = Undelivered::limiter();
    let demand = Demand::new("10/min".parse::<Limit>().unwrap(), Key::new("a").unwrap());
    for n in 1..=5 {
        let begun = tokio::time::Instant::now();
        let decision = limiter.check(&Check::one(&demand)).await.unwrap();
        assert_eq!((decision.source, decision.limits[0].remaining), (Source::Store, 10 - n));
        assert_eq!(begun.elapsed(), Duration::from_millis(25), "the call ends at its deadline");
        assert_eq!(store.turns.load(Ordering::SeqCst), u64::from(n));
    }
    assert_eq!((limiter.stats().store_failures, limiter.stats().breaker_opened), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn store_that_does_not_catch_up_times_out() {
    struct Stuck(Undelivered);
    impl Store for Stuck {
        fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
            self.0.decide(checks)
        }
        fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
            self.0.refund(check, decision)
        }
        fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
            self.0.reset(demand)
        }
        fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
            self.0.inspect(demand)
        }
        fn catch_up(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
            Box::pin(std::future::pending())
        }
    }
    let (arrived, turns) = (Mutex::default(), AtomicU64::new(0));
    let store = Stuck(Undelivered { inner: MemoryStore::new(), arrived, turns });
    let limiter = Limiter::builder().store(Arc::new(store)).deadline(Duration::from_millis(25)).build();
    let demand = Demand::new("10/min".parse::<Limit>().unwrap(), Key::new("a").unwrap());
    let begun = tokio::time::Instant::now();
    assert_eq!(limiter.check(&Check::one(&demand)).await.unwrap().source, Source::Local);
    assert_eq!(begun.elapsed(), Duration::from_millis(50));
}

/// Checks against a store that hangs, in a process that makes no progress for `stalls_for`.
async fn check_while_stalled(bench: &Bench, stalls_for: Duration) {
    let asked = bench.ask("10/min", "a");
    let stall = async {
        tokio::task::yield_now().await;
        // At once, so that timers which were due in between are noticed late.
        tokio::time::advance(stalls_for).await;
    };
    let (decision, ()) = tokio::join!(asked, stall);
    assert_eq!(decision.unwrap().source, Source::Local);
}

#[tokio::test(start_paused = true)]
async fn timeout_that_is_noticed_late_does_not_count_against_the_store() {
    let bench = bench(|builder| builder.deadline(Duration::from_millis(25)));
    bench.behaviour(HANGS);
    for _ in 0..10 {
        check_while_stalled(&bench, Duration::from_millis(60)).await;
    }
    let stats = bench.limiter.stats();
    assert_eq!((stats.local, stats.breaker_opened), (10, 0));
    // A timeout that is noticed in time counts as a failure.
    for _ in 0..3 {
        check_while_stalled(&bench, Duration::from_millis(20)).await;
    }
    assert!(bench.limiter.stats().breaker_open);
}

#[tokio::test(start_paused = true)]
async fn probe_whose_answer_has_arrived_in_time_closes_the_breaker() {
    let (limiter, store) = Undelivered::limiter();
    let demand = Demand::new("10/min".parse::<Limit>().unwrap(), Key::new("a").unwrap());
    let check = Check::one(&demand);
    // An answer that is lost makes this store panic, which is a failure.
    for _ in 0..3 {
        let (decision, ()) = tokio::join!(limiter.check(&check), async {
            tokio::task::yield_now().await;
            store.arrived.lock().unwrap().clear();
        });
        assert_eq!(decision.unwrap().source, Source::Local);
    }
    assert!(limiter.stats().breaker_open);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!limiter.stats().breaker_open, "the first probe was answered");
}
