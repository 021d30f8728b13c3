//! A server that misbehaves: what callers are told, and that it heals.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tollgate_core::{Check, Demand, Key, Limit, Store, StoreError, StoreErrorKind as Kind};
use tollgate_redis::RedisStore;
use tollgate_testkit::fault::{Fault, Proxy};
use tollgate_testkit::server::{Brand, Config, Server};

const PASSWORD: &str = "correct-horse-battery";
/// How often to look again before something is wrong: with the store's longest pause of about a second, many times over.
const LOOKS_MAX: usize = 2_000;

async fn decide(store: &RedisStore, subject: &str) -> Result<bool, StoreError> {
    let limit: Limit = "1000000/h token-bucket".parse().unwrap();
    let demand = Demand::new(limit, Key::new(subject).unwrap());
    Ok(store.decide(&[Check::one(&demand)]).await?[0].allowed())
}

/// Waits until decisions are made again. Returns the kinds of the errors on the way.
async fn healed(store: &RedisStore) -> Vec<Kind> {
    let mut kinds = Vec::new();
    for _ in 0..LOOKS_MAX {
        match decide(store, "probe").await {
            Ok(_) => return kinds,
            Err(error) => kinds.push(error.kind()),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it did not heal; the last error was {:?}", kinds.last());
}

/// Waits until decisions fail with this kind.
async fn failing(store: &RedisStore, kind: Kind) -> StoreError {
    for _ in 0..LOOKS_MAX {
        match decide(store, "probe").await {
            Err(error) if error.kind() == kind => return error,
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
    panic!("it did not fail as {kind:?}");
}

fn shows_no_secret(error: &(impl std::fmt::Display + std::fmt::Debug)) {
    let shown = format!("{error} {error:?} {error:#?}");
    assert!(!shown.contains(PASSWORD), "{shown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_flushed_under_load_are_not_noticed() {
    for brand in Brand::ALL {
        let server = Arc::new(Config::new(brand).start());
        let store = RedisStore::builder(server.url()).call_timeout(Duration::from_secs(10)).build().unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let flusher = {
            let (server, is_over) = (server.clone(), is_over.clone());
            std::thread::spawn(move || {
                let mut connection = server.connect().unwrap();
                let mut flushes = 0;
                while !is_over.load(Ordering::Relaxed) {
                    connection.call(&["SCRIPT", "FLUSH", "SYNC"]).unwrap();
                    flushes += 1;
                    // The pace of the fault itself: a server that loses its scripts a hundred times a second.
                    std::thread::sleep(Duration::from_millis(10));
                }
                flushes
            })
        };
        let limit: Limit = "5000/h".parse().unwrap();
        let callers = (0..8).map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let demand = Demand::new(limit, Key::new("k").unwrap());
                let mut granted = 0;
                // Until the script was lost a few times, and at least so often that the quota is spent.
                for round in 0..200_000 {
                    granted += usize::from(store.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());
                    if round >= 1_000 && store.stats().scripts_sent >= 5 {
                        break;
                    }
                }
                granted
            })
        });
        let mut granted = 0;
        for caller in callers.collect::<Vec<_>>() {
            granted += caller.await.unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(flusher.join().unwrap() > 0);
        assert!(store.stats().scripts_sent >= 5, "the script was lost under way: {:?}", store.stats());
        assert_eq!(granted, 5_000, "{brand}: charged once each");
        assert_eq!(store.stats().connects, 1);
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_found_when_it_comes() {
    let server = Server::redis();
    server.kill9();
    let store = RedisStore::builder(server.url()).build().unwrap();
    let error = failing(&store, Kind::Unreachable).await;
    assert!(error.is_unexecuted() && error.is_transient());
    server.restart();
    healed(&store).await;
    server.restart();
    let kinds = healed(&store).await;
    assert!(kinds.iter().all(|kind| matches!(kind, Kind::Unreachable | Kind::Interrupted)), "{kinds:?}");
}

#[tokio::test]
async fn a_hung_server_times_out_and_what_it_says_later_is_heard_by_nobody() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(Duration::from_millis(100)).build().unwrap();
    healed(&store).await;
    server.stop();
    let error = decide(&store, "hung").await.unwrap_err();
    assert_eq!(error.kind(), Kind::TimedOut);
    assert!(!error.is_unexecuted(), "nobody knows");
    // A stopped server accepts connections; the greeting finds it out, and nothing is sent.
    let error = failing(&store, Kind::Unreachable).await;
    assert!(error.is_unexecuted());
    server.cont();
    healed(&store).await;
}

#[tokio::test]
async fn a_connection_cut_during_a_call_is_never_retried() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::builder(proxy.url()).call_timeout(Duration::from_secs(5)).build().unwrap();
    healed(&store).await;
    proxy.set(Fault::Blackhole);
    let limit: Limit = "10/h".parse().unwrap();
    let demand = Demand::new(limit, Key::new("once").unwrap());
    let checks = [Check::one(&demand)];
    let (decided, ()) = tokio::join!(store.decide(&checks), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        proxy.set(Fault::Cut);
    });
    let error = decided.unwrap_err();
    assert!(matches!(error.kind(), Kind::Interrupted | Kind::TimedOut), "{error:?}");
    assert!(!error.is_unexecuted());
    proxy.set(Fault::Pass);
    healed(&store).await;
    assert!(store.inspect(&demand).await.unwrap().remaining >= 9, "charged at most once");
}

#[tokio::test]
async fn a_replica_is_refused_until_it_is_promoted() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).build().unwrap();
    healed(&store).await;
    // Of a master that nobody has, but it is a replica at once. Port 1 answers nothing here.
    server.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = failing(&store, Kind::Unavailable).await;
    assert!(error.is_unexecuted() && error.is_transient(), "{error}");
    server.command(&["REPLICAOF", "NO", "ONE"]);
    healed(&store).await;
}

#[tokio::test]
async fn who_is_not_let_in_is_told_so_without_the_password() {
    let server = Config::new(Brand::Redis)
        .set("user", &format!("ann on >{PASSWORD} ~other:* +@all"))
        .set("requirepass", "something-else")
        .start();
    let addr = server.addr();
    for url in [
        format!("redis://{addr}"),
        format!("redis://:{PASSWORD}@{addr}"),
        format!("redis://bob:{PASSWORD}@{addr}"),
        format!("redis://ann:{PASSWORD}@{addr}"),
        format!("redis://ann:{PASSWORD}@{addr}/9999"),
    ] {
        let builder = RedisStore::builder(&url);
        shows_no_secret(&format!("{builder:?}"));
        let store = builder.build().unwrap();
        shows_no_secret(&format!("{store:?}"));
        let error = failing(&store, Kind::Forbidden).await;
        assert!(error.is_unexecuted() && !error.is_transient());
        shows_no_secret(&error);
    }
    let let_in = RedisStore::builder(format!("redis://ann:{PASSWORD}@{addr}")).prefix("other").build().unwrap();
    healed(&let_in).await;
    for url in [format!("redis://ann:{PASSWORD}@{addr}/x"), format!("http://ann:{PASSWORD}@{addr}")] {
        shows_no_secret(&RedisStore::builder(url).build().unwrap_err());
    }
}

#[tokio::test]
async fn a_server_without_a_free_connection_is_used_when_it_has_one() {
    let server = Config::new(Brand::Redis).set("maxclients", "1").start();
    let guest = server.connect().unwrap();
    let store = RedisStore::builder(server.url()).build().unwrap();
    let error = failing(&store, Kind::Unavailable).await;
    assert!(error.to_string().contains("no connection left"), "{error}");
    drop(guest);
    healed(&store).await;
}

#[tokio::test]
async fn a_port_that_speaks_something_else_is_a_protocol_error() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let store = RedisStore::builder(format!("redis://{addr}")).build().unwrap();
    let server = async {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        _ = failing(&store, Kind::Protocol) => {}
        () = server => unreachable!("it accepts for ever"),
    }
}

#[tokio::test]
async fn more_callers_than_may_wait_are_turned_away_at_once() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).queue_length(4).call_timeout(Duration::from_secs(5)).build().unwrap();
    healed(&store).await;
    server.stop();
    let mut callers: Vec<_> = (0..32).map(|_| Box::pin(decide(&store, "k"))).collect();
    let mut turned_away = 0;
    for caller in &mut callers {
        if let Ok(Err(error)) = tokio::time::timeout(Duration::from_millis(1), caller).await {
            assert_eq!(error.kind(), Kind::Unavailable);
            assert!(error.is_unexecuted());
            turned_away += 1;
        }
    }
    assert!((20..32).contains(&turned_away), "{turned_away}");
    server.cont();
}
