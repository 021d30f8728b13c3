//! Nobody there, nobody who answers, nobody who stays.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tollgate::{Check, Clock, Demand, Key, Limit, Limiter, Source, StoreErrorKind as Kind, SystemClock};
use tollgate_redis::RedisStore;
use tollgate_testkit::fault::{Fault, Proxy};
use tollgate_testkit::history::{Bounds, History};
use tollgate_testkit::server::{Brand, Config, Server};

use super::node::Node;

#[tokio::test]
async fn a_killed_server_is_answered_for_and_used_again() {
    let server = Config::new(Brand::Redis).persistent().start();
    let node = Node::new(server.url()).await;
    node.outlive("killed", Kind::Unreachable, || server.kill9(), || server.restart()).await;
}

#[tokio::test]
async fn a_long_outage_heals_as_soon_as_a_short_one() {
    let server = Config::new(Brand::Redis).persistent().start();
    let node = Node::new(server.url()).await;
    let before = node.ledger().await;
    for way in ["long killed", "long stopped"] {
        if way == "long killed" {
            server.kill9()
        } else {
            server.stop()
        }
        while !node.limiter.stats().breaker_open {
            node.traffic().await;
        }
        // Probes and attempts to connect are as far apart as they get.
        tokio::time::sleep(Duration::from_secs(5)).await;
        if way == "long killed" {
            server.restart()
        } else {
            server.cont()
        }
        node.wait_until_shared(way).await;
    }
    assert_eq!(node.ledger().await, before - 1);
}

#[tokio::test]
async fn a_server_that_comes_later_than_we_do_is_used() {
    let server = Server::redis();
    server.kill9();
    let node = Node::with_deadline(server.url(), Duration::from_millis(200));
    node.wait_until_failing(Kind::Unreachable).await;
    server.restart();
    node.wait_until_shared("once there is a server").await;
}

#[tokio::test]
async fn a_stopped_server_is_answered_for_and_used_again() {
    let server = Server::redis();
    let node = Node::new(server.url()).await;
    node.outlive("stopped", Kind::TimedOut, || server.stop(), || server.cont()).await;
}

#[tokio::test]
async fn a_network_that_swallows_everything_is_outlived() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let node = Node::new(proxy.url()).await;
    let (blackhole, pass) = (|| proxy.set(Fault::Blackhole), || proxy.set(Fault::Pass));
    node.outlive("blackhole", Kind::TimedOut, blackhole, pass).await;
}

#[tokio::test]
async fn connections_that_are_cut_or_reset_are_outlived() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let node = Node::new(proxy.url()).await;
    node.outlive("cut", Kind::Unreachable, || proxy.set(Fault::Cut), || proxy.set(Fault::Pass)).await;
    node.outlive("reset", Kind::Unreachable, || proxy.set(Fault::Reset), || proxy.set(Fault::Pass)).await;
}

#[tokio::test]
async fn replies_in_crumbs_are_put_together() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let limiter = limiter_with_patience(proxy.url());
    for left in (0..20).rev() {
        // The script itself, which the greeting sends, would take long in crumbs.
        if left == 18 {
            proxy.set(Fault::Slice(3));
        }
        let demand = Demand::new("20/h".parse().unwrap(), Key::new("crumbs").unwrap());
        let decision = limiter.check(&Check::one(&demand)).await.unwrap();
        assert_eq!((decision.source, decision.limits[0].remaining), (Source::Store, left));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_restarted_under_load_is_outlived_and_counts_on() {
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

fn limiter_with_patience(url: String) -> Limiter {
    let patience = Duration::from_secs(30);
    let store = RedisStore::builder(url).call_timeout(patience).build().unwrap();
    Limiter::builder().store(Arc::new(store)).deadline(patience).build()
}

/// Loses its scripts every ten milliseconds until told to end.
fn forget_scripts(server: Arc<Server>, is_over: Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut connection = server.connect().unwrap();
        while !is_over.load(Ordering::Relaxed) {
            connection.call(&["SCRIPT", "FLUSH", "SYNC"]).unwrap();
            // The pace of the fault itself.
            std::thread::sleep(Duration::from_millis(10));
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_lost_under_load_fail_nobody_and_degrade_nobody() {
    let server = Arc::new(Server::redis());
    let patience = Duration::from_secs(30);
    let store = RedisStore::builder(server.url()).call_timeout(patience).build().unwrap();
    let clock = Arc::new(SystemClock::new());
    let builder = Limiter::builder().store(Arc::new(store.clone())).clock(clock.clone()).deny_cache(false);
    let limiter = builder.deadline(patience).build();
    let is_over = Arc::new(AtomicBool::new(false));
    let flusher = forget_scripts(server.clone(), is_over.clone());
    let limit: Limit = "300/100ms".parse().unwrap();
    let ask = |_| {
        let (limiter, store, clock) = (limiter.clone(), store.clone(), clock.clone());
        tokio::spawn(async move {
            let mut history = History::new([limit]);
            let demand = Demand::new(limit, Key::new("flushed").unwrap());
            // Until the script was lost a few times under way, and for some windows at least.
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
    let callers: Vec<_> = (0..16).map(ask).collect();
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
