//! A server that misbehaves: what callers are told, and that it heals.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::{join_all, poll_immediate};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
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

/// What is left of a window of ten.
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
    let (decided, other) = tokio::join!(decide(&store, "hung"), decide(&store, "another"));
    assert_eq!(other.unwrap_err().kind(), Kind::TimedOut);
    let error = decided.unwrap_err();
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
async fn many_callers_go_in_two_calls_and_later_ones_leave_without_waiting_for_a_reply() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(Duration::from_secs(10)).build().unwrap();
    healed(&store).await;
    let calls_before = store.stats().calls;
    server.stop();
    let ask = |caller: usize| {
        let store = store.clone();
        tokio::spawn(async move { decide(&store, &format!("caller {caller}")).await })
    };
    let mut callers: Vec<_> = (0..64).map(ask).collect();
    while store.stats().calls < calls_before + 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(store.stats().decisions, 1 + 64, "all of them are in these two");
    // Too few to be worth a call, but nobody answers them otherwise.
    callers.extend((64..72).map(ask));
    while store.stats().calls < calls_before + 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    server.cont();
    for caller in callers {
        assert!(caller.await.unwrap().unwrap());
    }
    assert_eq!(store.stats().calls, calls_before + 3);
}

/// What each of so many callers with a counter of its own has left after asking, all at the same time.
async fn remaining(store: &RedisStore, name: &str) -> Vec<Result<u32, Kind>> {
    let limit: Limit = "100/h".parse().unwrap();
    let subjects: Vec<String> = (0..64).map(|caller| format!("{name} {caller}")).collect();
    let demands: Vec<Demand<'_>> =
        subjects.iter().map(|subject| Demand::new(limit, Key::new(subject.as_str()).unwrap())).collect();
    let checks: Vec<[Check<'_>; 1]> = demands.iter().map(|demand| [Check::one(demand)]).collect();
    let decided = join_all(checks.iter().map(|check| store.decide(check))).await;
    decided.into_iter().map(|it| it.map(|it| it[0].limits[0].remaining).map_err(|error| error.kind())).collect()
}

#[tokio::test]
async fn late_replies_to_two_calls_are_heard_by_nobody() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::builder(proxy.url()).call_timeout(Duration::from_millis(200)).build().unwrap();
    healed(&store).await;
    assert_eq!(remaining(&store, "early").await, [Ok(99); 64]);
    proxy.set(Fault::Hold);
    let before = store.stats();
    assert_eq!(remaining(&store, "early").await, [Err(Kind::TimedOut); 64]);
    assert_eq!(store.stats().calls, before.calls + 2);
    proxy.set(Fault::Pass);
    healed(&store).await;
    assert!(store.stats().connects > before.connects, "the connection on which they come is not used again");
    assert_eq!(remaining(&store, "other").await, [Ok(99); 64], "the answers of the others would be 98");
    assert_eq!(remaining(&store, "early").await, [Ok(97); 64], "they were run although nobody heard of it");
}

/// Each caller has a counter of its own, with a quota that no other has: a reply given to the wrong one would show.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_calls_behind_each_other_everybody_still_hears_the_answer_to_its_own_question() {
    const CALLERS: u32 = 64;
    let server = Server::redis();
    let proxy = Arc::new(Proxy::start(server.addr()));
    let store = RedisStore::builder(proxy.url()).call_timeout(Duration::from_millis(100)).build().unwrap();
    healed(&store).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (1..=CALLERS)
        .map(|caller| {
            let (store, is_over) = (store.clone(), is_over.clone());
            tokio::spawn(async move {
                let limit: Limit = format!("{}/h", caller * 100_000).parse().unwrap();
                let subject = format!("caller {caller}");
                let demand = Demand::new(limit, Key::new(subject.as_str()).unwrap());
                let (mut answered, mut charged_at_most) = (0_u32, 0);
                while !is_over.load(Ordering::Relaxed) {
                    charged_at_most += 1;
                    match store.decide(&[Check::one(&demand)]).await {
                        Ok(decisions) => {
                            answered += 1;
                            let spent = limit.quota() - decisions[0].limits[0].remaining;
                            assert!((answered..=charged_at_most).contains(&spent), "caller {caller}: {spent}");
                        }
                        Err(error) => {
                            charged_at_most -= u32::from(error.is_unexecuted());
                            // Some come back sooner than others: the next batch has other callers than the one that failed.
                            tokio::time::sleep(Duration::from_millis(1 + u64::from(caller % 8))).await;
                        }
                    }
                }
                answered
            })
        })
        .collect();
    let sliced = Fault::Slice(7);
    let faults = [sliced, Fault::Hold, Fault::Pass, Fault::Cut, sliced, Fault::Reset, Fault::Pass, Fault::Blackhole];
    for fault in faults.into_iter().cycle().take(3 * faults.len()) {
        proxy.set(fault);
        // The faults are what this test is made of, and each needs its time: past the patience of a call.
        tokio::time::sleep(Duration::from_millis(130)).await;
    }
    proxy.set(Fault::Pass);
    healed(&store).await;
    is_over.store(true, Ordering::Relaxed);
    for caller in callers {
        assert!(caller.await.unwrap() > 0);
    }
    let stats = store.stats();
    assert!(stats.decisions > 4 * stats.calls && stats.connects > 3, "{stats:?}");
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
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        _ = failing(&store, Kind::Protocol) => {}
        () = server => unreachable!("it accepts for ever"),
    }
}

/// A server of which only the greeting is as it should be: each call of the script is answered with these bytes.
async fn answering(bytes: &'static [u8]) -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut heard, mut chunk) = (Vec::new(), vec![0; 64 << 10]);
                while let Ok(count @ 1..) = stream.read(&mut chunk).await {
                    heard.extend_from_slice(&chunk[..count]);
                    // Every command is answered when its end has come: of the greeting the script, of a call its time and checks.
                    let is_greeting = heard.windows(4).any(|bytes| bytes == b"LOAD");
                    let end: &[u8] = if is_greeting { b"return reply\n\r\n" } else { b"window=fixed\r\n" };
                    if heard.ends_with(end) {
                        let greeting = format!("+OK\r\n*0\r\n$40\r\n{}\r\n", "a".repeat(40));
                        let answer = if is_greeting { greeting.as_bytes() } else { bytes };
                        stream.write_all(answer).await.unwrap();
                        heard.clear();
                    }
                }
            });
        }
    });
    addr
}

#[tokio::test]
async fn a_server_that_does_not_know_the_script_it_was_just_sent_is_not_asked_for_ever() {
    let addr = answering(b"-NOSCRIPT No matching script.\r\n").await;
    let store = RedisStore::builder(format!("redis://{addr}")).call_timeout(Duration::from_secs(10)).build().unwrap();
    assert_eq!(decide_sliding(&store).await.unwrap_err().kind(), Kind::Protocol);
    assert_eq!((store.stats().calls, store.stats().scripts_sent), (2, 1));
}

#[tokio::test]
async fn an_answer_that_nobody_asked_for_is_not_taken_for_the_next_one() {
    // Allowed with 9 left; and once more, with 7.
    let addr =
        answering(b"*7\r\n:9\r\n:1\r\n:1\r\n:9\r\n:0\r\n:5\r\n:5\r\n*7\r\n:9\r\n:1\r\n:1\r\n:7\r\n:0\r\n:5\r\n:5\r\n")
            .await;
    let store = RedisStore::builder(format!("redis://{addr}")).call_timeout(Duration::from_secs(10)).build().unwrap();
    for _ in 0..3 {
        assert_eq!(decide_sliding(&store).await.unwrap(), 9);
    }
    assert!(store.stats().connects >= 3, "{:?}", store.stats());
}

#[tokio::test]
async fn the_longest_patience_is_no_trouble() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(Duration::MAX).build().unwrap();
    assert!(decide(&store, "k").await.unwrap());
    assert_eq!(store.stats().panics, 0);
}

#[tokio::test]
async fn more_callers_than_may_wait_are_turned_away_at_once() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).queue_length(4).call_timeout(Duration::from_secs(5)).build().unwrap();
    healed(&store).await;
    // On this one thread the worker does not run before the first await that waits.
    let mut callers: Vec<_> = (0..32).map(|_| Box::pin(decide(&store, "k"))).collect();
    let mut turned_away = 0;
    for caller in &mut callers {
        if let Some(Err(error)) = poll_immediate(caller).await {
            assert_eq!(error.kind(), Kind::Unavailable);
            assert!(error.is_unexecuted());
            turned_away += 1;
        }
    }
    assert_eq!(turned_away, 28);
    for caller in callers.drain(..4) {
        assert!(caller.await.unwrap());
    }
}

/// Waits until the server has greeted somebody of ours who has asked for nothing yet.
async fn greeted(server: &Server) {
    for _ in 0..LOOKS_MAX {
        let clients = server.command(&["CLIENT", "LIST"]).text();
        if clients.lines().any(|client| client.contains("name=tollgate") && client.contains("cmd=script")) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("nobody of ours is greeted");
}

#[tokio::test]
async fn a_connection_that_was_cut_while_idle_is_replaced_at_once() {
    let server = Server::redis();
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::builder(proxy.url()).call_timeout(Duration::from_secs(10)).build().unwrap();
    // On this one thread nothing of ours runs in between; the yields are for the news to arrive.
    let cut = async || {
        proxy.set(Fault::Cut);
        proxy.set(Fault::Pass);
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    };
    for time in 0..3 {
        greeted(&server).await;
        // As a server or a balancer does to who has asked nothing for a while.
        tokio::time::sleep(Duration::from_millis(300)).await;
        cut().await;
        let decided = decide(&store, "idle").await;
        assert!(decided.is_ok(), "after time {time}: {decided:?}");
        // The next connection has not been asked anything.
        cut().await;
    }
}
