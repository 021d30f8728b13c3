//! A process that gets no CPU while the server replies: the reply is used as soon as the process runs again.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use tidegate::{Check, Decision, Demand, Key, Limit, LimitStatus, Limiter, Source, Store, StoreFuture};
use tidegate_redis::RedisStore;
use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::Server;
use tokio::runtime::{Builder, Runtime};

/// Longer than a busy machine takes to send a call.
const DEADLINE: Duration = Duration::from_millis(100);

fn demand() -> Demand<'static> {
    let limit: Limit = "1000/h".parse().unwrap();
    Demand::new(limit, Key::new("starved").unwrap())
}

/// Creates a runtime with one thread of its own.
fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Creates a store whose worker runs on that thread, and connects it. Its calls do not time out.
fn store_on(runtime: &Runtime, server: &Server) -> RedisStore {
    let build = async { RedisStore::builder(server.url()).call_timeout(Duration::from_secs(60)).build().unwrap() };
    let store = runtime.block_on(build);
    runtime.block_on(store.command(&["PING"])).unwrap();
    store
}

fn wait_until_executed(server: &Server, count: u64) {
    eventually("the script to be called", || server.script_calls(), |calls| *calls >= count);
}

/// Runs `block` on the thread of this runtime as soon as the next call was sent.
fn starve(runtime: &Runtime, store: &RedisStore, block: impl FnOnce() + Send + 'static) {
    let (store, calls) = (store.clone(), store.stats().calls);
    runtime.spawn(async move {
        while store.stats().calls == calls {
            tokio::task::yield_now().await;
        }
        block();
    });
}

/// Store and limiter share one thread, which is blocked beyond the deadline.
#[test]
fn reply_received_while_the_only_thread_was_blocked_is_used() {
    let server = Arc::new(Server::redis());
    let runtime = runtime();
    let store = store_on(&runtime, &server);
    let limiter = Limiter::builder().store(Arc::new(store.clone())).deadline(DEADLINE).announce(false).build();
    for round in 1..=5 {
        let starving = server.clone();
        starve(&runtime, &store, move || {
            wait_until_executed(&starving, round);
            // The fault itself: beyond the deadline.
            std::thread::sleep(DEADLINE + Duration::from_millis(5));
        });
        let limiter = limiter.clone();
        let decided = runtime.spawn(async move { limiter.check(&Check::one(&demand())).await.unwrap() });
        let decision: Decision = runtime.block_on(decided).unwrap();
        assert_eq!((decision.source, decision.limits[0].remaining), (Source::Store, 1_000 - round as u32));
    }
    assert_eq!((limiter.stats().store_failures, limiter.stats().breaker_opened), (0, 0));
}

/// A Redis store that sends a message when the limiter calls `catch_up`.
struct Watched {
    inner: RedisStore,
    catches_up: Mutex<mpsc::Sender<()>>,
}

impl Store for Watched {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        self.inner.decide(checks)
    }
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        self.inner.refund(check, decision)
    }
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        self.inner.reset(demand)
    }
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        self.inner.inspect(demand)
    }
    fn catch_up(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.catches_up.lock().unwrap().send(()).unwrap();
        // On a thread of its own, so that it does not depend on when the store's thread is scheduled.
        let inner = self.inner.clone();
        let caught_up = std::thread::spawn(move || {
            Builder::new_current_thread().build().unwrap().block_on(inner.catch_up());
        });
        caught_up.join().unwrap();
        Box::pin(std::future::ready(()))
    }
}

/// The store runs on a thread of its own, as in the service, and only that thread is blocked.
#[test]
fn reply_received_while_the_thread_of_the_store_was_blocked_is_used() {
    let server = Arc::new(Server::redis());
    let (stores, callers) = (runtime(), runtime());
    let store = store_on(&stores, &server);
    let (catches_up, deadline_passed) = mpsc::channel();
    let deadline_passed = Arc::new(Mutex::new(deadline_passed));
    let watched = Watched { inner: store.clone(), catches_up: Mutex::new(catches_up) };
    let limiter = Limiter::builder().store(Arc::new(watched)).deadline(DEADLINE).build();
    for round in 1..=5 {
        let (starving, deadline_passed) = (server.clone(), deadline_passed.clone());
        starve(&stores, &store, move || {
            deadline_passed.lock().unwrap().recv_timeout(Duration::from_secs(30)).expect("the limiter calls catch_up");
            wait_until_executed(&starving, round);
        });
        let decision = callers.block_on(limiter.check(&Check::one(&demand()))).unwrap();
        assert_eq!((decision.source, decision.limits[0].remaining), (Source::Store, 1_000 - round as u32));
    }
    assert_eq!((limiter.stats().store_failures, limiter.stats().breaker_opened), (0, 0));
}
