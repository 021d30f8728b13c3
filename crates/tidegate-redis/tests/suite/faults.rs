//! Failures of a real server: the errors of callers, and recovery. Those that depend on time are in `virtual_time.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::poll_immediate;
use tidegate_core::{Check, Demand, Key, Limit, Store, StoreError, StoreErrorKind as Kind};
use tidegate_redis::RedisStore;
use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::server::{Brand, Config, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const PASSWORD: &str = "correct-horse-battery";
/// How many times to retry before a test fails: many times the store's longest pause.
const LOOKS_MAX: usize = 2_000;

async fn decide(store: &RedisStore, subject: &str) -> Result<bool, StoreError> {
    let limit: Limit = "1000000/h token-bucket".parse().unwrap();
    let demand = Demand::new(limit, Key::new(subject).unwrap());
    Ok(store.decide(&[Check::one(&demand)]).await?[0].allowed())
}

/// Decides a check of one unit under `10/h`. Returns the remaining units.
async fn decide_sliding(store: &RedisStore) -> Result<u32, StoreError> {
    let demand = Demand::new("10/h".parse().unwrap(), Key::new("k").unwrap());
    Ok(store.decide(&[Check::one(&demand)]).await?[0].limits[0].remaining)
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
async fn flushed_scripts_under_load_fail_no_caller() {
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
        // Enough of them that several calls are in flight when the script is lost.
        let callers = (0..64).map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let demand = Demand::new(limit, Key::new("k").unwrap());
                let mut granted = 0;
                // Until the script was lost a few times, and at least so often that the quota is spent.
                for round in 0..25_000 {
                    granted += usize::from(store.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());
                    if round >= 125 && store.stats().scripts_sent >= 5 {
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
async fn store_connects_when_the_server_starts() {
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
async fn hung_server_times_out_and_is_used_again_when_it_continues() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(Duration::from_millis(100)).build().unwrap();
    healed(&store).await;
    server.stop();
    let (decided, other) = tokio::join!(decide(&store, "hung"), decide(&store, "another"));
    assert_eq!(other.unwrap_err().kind(), Kind::TimedOut);
    let error = decided.unwrap_err();
    assert_eq!(error.kind(), Kind::TimedOut);
    assert!(!error.is_unexecuted(), "it may have been executed");
    // A stopped server accepts connections, but the commands that prepare the connection are not answered.
    let error = failing(&store, Kind::Unreachable).await;
    assert!(error.is_unexecuted());
    server.cont();
    healed(&store).await;
}

#[tokio::test]
async fn call_on_a_cut_connection_is_not_resent() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::builder(proxy.url()).call_timeout(Duration::from_secs(5)).build().unwrap();
    healed(&store).await;
    proxy.set(Fault::Blackhole);
    let limit: Limit = "10/h".parse().unwrap();
    let demand = Demand::new(limit, Key::new("once").unwrap());
    let checks = [Check::one(&demand)];
    let calls_before = store.stats().calls;
    let (decided, ()) = tokio::join!(store.decide(&checks), async {
        while store.stats().calls == calls_before {
            tokio::task::yield_now().await;
        }
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
async fn many_callers_share_two_calls_and_later_ones_do_not_wait_for_a_reply() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(Duration::from_secs(10)).build().unwrap();
    healed(&store).await;
    let before = store.stats();
    server.stop();
    let ask = |caller: usize| {
        let store = store.clone();
        tokio::spawn(async move { decide(&store, &format!("caller {caller}")).await })
    };
    let mut callers: Vec<_> = (0..64).map(ask).collect();
    while store.stats().calls < before.calls + 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(store.stats().decisions, before.decisions + 64, "all of them are in these two");
    // Too few to be worth an eager call; they leave after a millisecond.
    callers.extend((64..72).map(ask));
    while store.stats().calls < before.calls + 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    server.cont();
    for caller in callers {
        assert!(caller.await.unwrap().unwrap());
    }
    assert_eq!(store.stats().calls, before.calls + 3);
}

#[tokio::test]
async fn replica_is_not_used_until_it_is_promoted() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).build().unwrap();
    healed(&store).await;
    // It becomes a replica at once, although no server listens on port 1.
    server.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = failing(&store, Kind::Unavailable).await;
    assert!(error.is_unexecuted() && error.is_transient(), "{error}");
    server.command(&["REPLICAOF", "NO", "ONE"]);
    healed(&store).await;
}

/// After a failover the old master answers READONLY to every call that writes. Calls that were sent before the first
/// such answer arrived have answers of their own, so it is known of each whether it was executed.
#[tokio::test]
async fn calls_in_flight_when_the_server_becomes_a_replica_get_their_own_replies() {
    const READONLY: &[u8] = b"-READONLY You can't write against a read only replica.\r\n";
    const ADMITTED: &[u8] = b"*8\r\n:9\r\n:1\r\n:1\r\n:9\r\n:0\r\n:5\r\n:5\r\n:0\r\n";
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let store = RedisStore::builder(format!("redis://{addr}")).call_timeout(Duration::from_secs(30)).build().unwrap();
    let mut callers = Vec::new();
    for number in 1..=3 {
        let caller = store.clone();
        callers.push(tokio::spawn(async move { decide_sliding(&caller).await.map_err(|error| error.kind()) }));
        if number == 1 {
            // The server answers nothing before it has received three calls.
            tokio::spawn(answer_after_three_calls(listener.accept().await.unwrap().0, [READONLY, ADMITTED, READONLY]));
        }
        while store.stats().calls < number {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    let mut outcomes = Vec::new();
    for caller in callers {
        outcomes.push(caller.await.unwrap());
    }
    assert_eq!(outcomes, [Err(Kind::Unavailable), Ok(9), Err(Kind::Unavailable)]);
    // The connection to the replica is dropped: the store connects again.
    let (_second, _) = listener.accept().await.unwrap();
    assert_eq!(store.stats().calls, 3);
}

async fn answer_after_three_calls(mut stream: tokio::net::TcpStream, replies: [&'static [u8]; 3]) {
    let (mut received, mut chunk) = (Vec::new(), vec![0; 64 << 10]);
    let mut is_prepared = false;
    while let Ok(count @ 1..) = stream.read(&mut chunk).await {
        received.extend_from_slice(&chunk[..count]);
        if !is_prepared && received.ends_with(b"return reply\n\r\n") {
            let greeting = format!("*0\r\n+OK\r\n*0\r\n$40\r\n{}\r\n", "a".repeat(40));
            stream.write_all(greeting.as_bytes()).await.unwrap();
            is_prepared = true;
            received.clear();
        }
        let calls = received.windows(7).filter(|bytes| bytes == b"EVALSHA").count();
        if is_prepared && calls == 3 && received.ends_with(b"window=fixed\r\n") {
            stream.write_all(&replies.concat()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn error_names_the_server_and_the_reason() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    let store = RedisStore::builder(format!("redis://ann:{PASSWORD}@{addr}")).build().unwrap();
    let error = failing(&store, Kind::Unreachable).await;
    assert_eq!(error.to_string(), format!("cannot reach the store redis://{addr}: connection refused"));
    let store = RedisStore::builder("redis://host.invalid").call_timeout(Duration::from_secs(30)).build().unwrap();
    let error = failing(&store, Kind::Unreachable).await.to_string();
    assert!(error.starts_with("cannot reach the store redis://host.invalid:6379: failed to lookup address"), "{error}");
}

#[tokio::test]
async fn rejected_login_is_forbidden_and_the_error_hides_the_password() {
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
async fn server_without_a_free_connection_is_used_once_it_has_one() {
    let server = Config::new(Brand::Redis).set("maxclients", "1").start();
    let guest = server.connect().unwrap();
    let store = RedisStore::builder(server.url()).build().unwrap();
    let error = failing(&store, Kind::Unavailable).await;
    assert!(error.to_string().contains("connection limit (maxclients)"), "{error}");
    drop(guest);
    healed(&store).await;
}

#[tokio::test]
async fn server_of_another_protocol_is_a_protocol_error() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let store = RedisStore::builder(format!("redis://{addr}")).build().unwrap();
    let server = async {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        _ = failing(&store, Kind::Protocol) => {}
        () = server => unreachable!("the loop does not end"),
    }
}

/// Starts a server that prepares connections like Redis, and answers each call of the script with `bytes`.
async fn answering(bytes: &'static [u8]) -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut received, mut chunk) = (Vec::new(), vec![0; 64 << 10]);
                while let Ok(count @ 1..) = stream.read(&mut chunk).await {
                    received.extend_from_slice(&chunk[..count]);
                    // A command is answered once its last argument is complete.
                    let is_greeting = received.windows(4).any(|bytes| bytes == b"LOAD");
                    let end: &[u8] = if is_greeting { b"return reply\n\r\n" } else { b"window=fixed\r\n" };
                    if received.ends_with(end) {
                        let greeting = format!("*0\r\n+OK\r\n*0\r\n$40\r\n{}\r\n", "a".repeat(40));
                        let answer = if is_greeting { greeting.as_bytes() } else { bytes };
                        stream.write_all(answer).await.unwrap();
                        received.clear();
                    }
                }
            });
        }
    });
    addr
}

#[tokio::test]
async fn server_that_does_not_cache_the_script_gets_its_source_once() {
    let addr = answering(b"-NOSCRIPT No matching script.\r\n").await;
    let store = RedisStore::builder(format!("redis://{addr}")).call_timeout(Duration::from_secs(10)).build().unwrap();
    assert_eq!(decide_sliding(&store).await.unwrap_err().kind(), Kind::Protocol);
    assert_eq!((store.stats().calls, store.stats().scripts_sent), (2, 1));
}

#[tokio::test]
async fn reply_without_a_request_is_not_taken_for_the_next_reply() {
    // Allowed with 9 left; and once more, with 7.
    let addr = answering(
        b"*8\r\n:9\r\n:1\r\n:1\r\n:9\r\n:0\r\n:5\r\n:5\r\n:0\r\n*8\r\n:9\r\n:1\r\n:1\r\n:7\r\n:0\r\n:5\r\n:5\r\n:0\r\n",
    )
    .await;
    let store = RedisStore::builder(format!("redis://{addr}")).call_timeout(Duration::from_secs(10)).build().unwrap();
    for _ in 0..3 {
        assert_eq!(decide_sliding(&store).await.unwrap(), 9);
    }
    assert!(store.stats().connects >= 3, "{:?}", store.stats());
}

#[tokio::test]
async fn internal_error_of_the_script_has_a_kind_of_its_own() {
    let addr = answering(b"-TIDEGATE_INTERNAL user_script:417: attempt to index a nil value\r\n").await;
    let store = RedisStore::builder(format!("redis://{addr}")).call_timeout(Duration::from_secs(10)).build().unwrap();
    for _ in 0..2 {
        let error = decide_sliding(&store).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Script, "{error}");
        assert!(!error.is_unexecuted() && !error.is_transient());
        assert!(error.to_string().contains("line 417"), "{error}");
    }
    assert_eq!(store.stats().connects, 1, "the connection is in order");
}

#[tokio::test]
async fn longest_call_timeout_does_not_overflow() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(Duration::MAX).build().unwrap();
    assert!(decide(&store, "k").await.unwrap());
    assert_eq!(store.stats().panics, 0);
}

#[tokio::test]
async fn callers_beyond_the_queue_length_are_rejected_at_once() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).queue_length(4).call_timeout(Duration::from_secs(5)).build().unwrap();
    healed(&store).await;
    // On this one thread the worker does not run before the first await that waits.
    let mut callers: Vec<_> = (0..32).map(|_| Box::pin(decide(&store, "k"))).collect();
    let mut rejected = 0;
    for caller in &mut callers {
        if let Some(Err(error)) = poll_immediate(caller).await {
            assert_eq!(error.kind(), Kind::Unavailable);
            assert!(error.is_unexecuted());
            rejected += 1;
        }
    }
    assert_eq!(rejected, 28);
    for caller in callers.drain(..4) {
        assert!(caller.await.unwrap());
    }
}
