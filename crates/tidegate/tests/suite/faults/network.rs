//! A server that is down, hangs, or closes its connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::{Check, Clock, Demand, Key, Limit, Limiter, Source, StoreErrorKind as Kind, SystemClock};
use tidegate_redis::RedisStore;
use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::history::{Bounds, History};
use tidegate_testkit::server::{Brand, Config, Server};

use super::node::Node;

#[tokio::test]
async fn decisions_are_local_while_the_server_is_killed() {
    let server = Config::new(Brand::Redis).persistent().start();
    let node = Node::new(server.url()).await;
    node.outlive("killed", Kind::Unreachable, || server.kill9(), || server.restart()).await;
}

#[tokio::test]
async fn server_that_starts_after_the_limiter_is_used() {
    let server = Server::redis();
    server.kill9();
    let node = Node::with_deadline(server.url(), Duration::from_millis(200));
    node.wait_until_failing(Kind::Unreachable).await;
    server.restart();
    node.wait_until_shared("once there is a server").await;
}

#[tokio::test]
async fn decisions_are_local_while_the_server_is_stopped() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    node.outlive("stopped", Kind::TimedOut, || server.stop(), || server.cont()).await;
}

#[tokio::test]
async fn decisions_are_local_while_the_network_loses_all_bytes() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let node = Node::new(proxy.url()).await;
    let (blackhole, pass) = (|| proxy.set(Fault::Blackhole), || proxy.set(Fault::Pass));
    node.outlive("blackhole", Kind::TimedOut, blackhole, pass).await;
}

#[tokio::test]
async fn decisions_are_local_while_connections_are_cut_or_reset() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let node = Node::new(proxy.url()).await;
    node.outlive("cut", Kind::Unreachable, || proxy.set(Fault::Cut), || proxy.set(Fault::Pass)).await;
    node.outlive("reset", Kind::Unreachable, || proxy.set(Fault::Reset), || proxy.set(Fault::Pass)).await;
}

#[tokio::test]
async fn replies_that_arrive_in_pieces_are_decoded() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let limiter = patient_limiter(proxy.url());
    for left in (0..20).rev() {
        // The script, which is sent on connecting, would take long in pieces.
        if left == 18 {
            proxy.set(Fault::Slice(3));
        }
        let demand = Demand::new("20/h".parse().unwrap(), Key::new("pieces").unwrap());
        let decision = limiter.check(&Check::one(&demand)).await.unwrap();
        assert_eq!((decision.source, decision.limits[0].remaining), (Source::Store, left));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_under_load_fails_no_decision_and_keeps_the_counters() {
    let server = Config::new(Brand::Redis).persistent().start();
    let node = Arc::new(Node::new(server.url()).await);
    let before = node.ledger().await;
    let is_over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let (node, is_over) = (node.clone(), is_over.clone());
            tokio::spawn(async move {
                let mut degraded = 0;
                while !is_over.load(Ordering::Relaxed) {
                    degraded += u64::from(node.traffic().await != Source::Store);
                    tokio::task::yield_now().await;
                }
                degraded
            })
        })
        .collect();
    tokio::task::block_in_place(|| server.restart());
    node.wait_until_shared("after a restart under load").await;
    is_over.store(true, Ordering::Relaxed);
    let mut degraded = 0;
    for caller in callers {
        degraded += caller.await.expect("no caller panics");
    }
    assert!(degraded > 0, "the restart was noticed");
    assert_eq!(node.ledger().await, before - 1);
    assert_eq!(node.store.stats().panics, 0);
}

/// Creates a limiter that waits for the store for up to 30 seconds.
fn patient_limiter(url: String) -> Limiter {
    let timeout = Duration::from_secs(30);
    let store = RedisStore::builder(url).call_timeout(timeout).build().unwrap();
    Limiter::builder().store(Arc::new(store)).deadline(timeout).build()
}

/// Deletes the server's scripts every ten milliseconds until `is_over` is set.
fn flush_scripts(server: Arc<Server>, is_over: Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut connection = server.connect().unwrap();
        while !is_over.load(Ordering::Relaxed) {
            connection.call(&["SCRIPT", "FLUSH", "SYNC"]).unwrap();
            // The pace of the fault; nothing is asserted about it.
            std::thread::sleep(Duration::from_millis(10));
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn script_flushes_under_load_degrade_no_decision() {
    let server = Arc::new(Server::redis());
    let timeout = Duration::from_secs(30);
    let store = RedisStore::builder(server.url()).call_timeout(timeout).build().unwrap();
    let clock = Arc::new(SystemClock::new());
    let builder = Limiter::builder().store(Arc::new(store.clone())).clock(clock.clone()).deny_cache(false);
    let limiter = builder.deadline(timeout).build();
    let is_over = Arc::new(AtomicBool::new(false));
    let flusher = flush_scripts(server.clone(), is_over.clone());
    let limit: Limit = "300/100ms".parse().unwrap();
    let start_caller = |_| {
        let (limiter, store, clock) = (limiter.clone(), store.clone(), clock.clone());
        tokio::spawn(async move {
            let mut history = History::new([limit]);
            let demand = Demand::new(limit, Key::new("flushed").unwrap());
            // For some windows at least, and until calls have met a flushed script ten times.
            for round in 0..500_000 {
                let sent_us = clock.now().as_micros();
                let decision = limiter.check(&Check::one(&demand)).await.unwrap();
                assert_eq!(decision.source, Source::Store);
                history.note(&[0], sent_us, clock.now().as_micros(), &decision);
                if round >= 2_000 && store.stats().scripts_sent >= 10 {
                    break;
                }
            }
            history
        })
    };
    let callers: Vec<_> = (0..16).map(start_caller).collect();
    let mut history = History::new([limit]);
    for caller in callers {
        history.merge(caller.await.unwrap());
    }
    is_over.store(true, Ordering::Relaxed);
    flusher.join().unwrap();
    let report = history.verify(Bounds::default());
    println!("{report}; the script was sent {} times", store.stats().scripts_sent);
    report.expect_clean();
    let stats = limiter.stats();
    assert!(store.stats().scripts_sent >= 10);
    assert_eq!((stats.store_failures, stats.local, stats.uncounted, stats.unavailable), (0, 0, 0, 0));
}
