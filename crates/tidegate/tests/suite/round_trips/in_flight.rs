//! Many calls in flight: order, lost connections, late replies, flushed scripts.

use std::time::Duration;

use futures_util::future::{join_all, poll_immediate};
use tidegate::{Check, Demand, Key, Limit, Store, StoreErrorKind as Kind};
use tidegate_redis::RedisStore;
use tidegate_testkit::fault::Fault;
use tidegate_testkit::simulated::{SimulatedRedis, VirtualClock};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio::time::{Instant, sleep};

use super::{connected, ms};

/// The most calls in flight on a connection.
const CALLS_MAX: u64 = 32;
const QUOTA: u32 = 100_000;

fn demand(subject: &str) -> Demand<'_> {
    let limit: Limit = format!("{QUOTA}/h sliding-log").parse().unwrap();
    Demand::new(limit, Key::new(subject).unwrap())
}

/// Charges units to a subject's counter. Returns how many units are used then.
async fn spend(store: RedisStore, subject: String, units: u32) -> Result<u32, Kind> {
    let demand = demand(&subject).cost(units);
    let decided = store.decide(&[Check::one(&demand)]).await.map_err(|error| error.kind())?;
    Ok(QUOTA - decided[0].limits[0].remaining)
}

/// Returns how many units of a subject's counter are used.
async fn spent(store: &RedisStore, subject: &str) -> u32 {
    QUOTA - store.inspect(&demand(subject)).await.unwrap().remaining
}

/// Creates a server and a store that is connected to it.
async fn pair() -> (SimulatedRedis, RedisStore) {
    let server = SimulatedRedis::new(VirtualClock::start());
    let store = connected(&server, |builder| builder).await;
    (server, store)
}

/// Starts checks 2 ms apart, so that each is a call of its own. Each charges one unit to its subject.
async fn one_by_one(
    store: &RedisStore,
    count: usize,
    subject: impl Fn(usize) -> String,
) -> Vec<tokio::task::JoinHandle<Result<u32, Kind>>> {
    let mut started = Vec::new();
    for number in 0..count {
        started.push(tokio::spawn(spend(store.clone(), subject(number), 1)));
        sleep(ms(2.0)).await;
    }
    started
}

#[tokio::test(start_paused = true)]
async fn checks_of_one_key_are_decided_in_order_with_many_calls_in_flight() {
    let (server, store) = pair().await;
    server.set_round_trip(ms(60.0));
    let before = server.calls().len();
    let checks = one_by_one(&store, 100, |_| "one".into()).await;
    let spent: Vec<u32> = join_all(checks).await.into_iter().map(|it| it.unwrap().unwrap()).collect();
    assert_eq!(spent, (1..=100).collect::<Vec<u32>>());
    let calls = server.calls().len() - before;
    assert!(calls >= 90, "{calls} calls for 100 checks");
}

#[tokio::test(start_paused = true)]
async fn check_takes_at_most_two_milliseconds_more_than_its_round_trip() {
    let (server, store) = pair().await;
    let round_trip = ms(20.0);
    server.set_round_trip(round_trip);
    let callers = (0..200).map(|caller| {
        let store = store.clone();
        tokio::spawn(async move {
            sleep(Duration::from_micros(caller * 370)).await;
            let before = Instant::now();
            spend(store, format!("caller {caller}"), 1).await.unwrap();
            before.elapsed()
        })
    });
    let slowest = join_all(callers).await.into_iter().map(Result::unwrap).max().unwrap();
    assert!(slowest <= round_trip + ms(2.0), "{slowest:?}");
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_on_a_cut_connection_are_interrupted_and_not_sent_again() {
    let (server, store) = pair().await;
    server.set(Fault::Hold);
    let before = store.stats();
    let checks = one_by_one(&store, 40, |number| format!("caller {number}")).await;
    assert_eq!(store.stats().calls - before.calls, CALLS_MAX, "calls in flight");
    server.set(Fault::Cut);
    sleep(ms(10.0)).await;
    server.set(Fault::Pass);
    let outcomes: Vec<_> = join_all(checks).await.into_iter().map(Result::unwrap).collect();
    assert!(outcomes[..32].iter().all(|outcome| *outcome == Err(Kind::Interrupted)), "{outcomes:?}");
    assert!(outcomes[32..].iter().all(|outcome| *outcome == Err(Kind::Unreachable)), "not sent: {outcomes:?}");
    sleep(ms(1_000.0)).await;
    for number in 0..32 {
        assert_eq!(
            spent(&store, &format!("caller {number}")).await,
            0,
            "{number}: lost by the network and not sent again"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn late_replies_reach_no_other_caller() {
    let server = SimulatedRedis::new(VirtualClock::start());
    let store = connected(&server, |builder| builder.call_timeout(ms(200.0))).await;
    server.set_round_trip(ms(60.0));
    // Each has used another number of units, so a reply shows whose it is.
    for (subject, units) in (0..20).map(|number| (format!("caller {number}"), 100 * (number + 1))) {
        assert_eq!(spend(store.clone(), subject, units).await, Ok(units));
    }
    // Half of the callers give up while their calls are in flight.
    let mut checks = one_by_one(&store, 20, |number| format!("caller {number}")).await;
    checks.iter().step_by(2).for_each(|check| check.abort());
    for (number, check) in checks.drain(..).enumerate().skip(1).step_by(2) {
        assert_eq!(check.await.unwrap(), Ok(100 * (number as u32 + 1) + 1));
    }
    // Then all calls time out.
    let connects = store.stats().connects;
    server.set(Fault::Hold);
    let checks = one_by_one(&store, 20, |number| format!("caller {number}")).await;
    sleep(ms(200.0)).await;
    server.set(Fault::Pass);
    for check in checks {
        assert_eq!(check.await.unwrap(), Err(Kind::TimedOut));
    }
    sleep(ms(1_000.0)).await;
    assert_eq!(spend(store.clone(), "another".into(), 7).await, Ok(7));
    assert!(store.stats().connects > connects, "the connection of the late replies is not used again");
}

#[tokio::test(start_paused = true)]
async fn script_flush_with_many_calls_in_flight_fails_no_call_and_the_source_is_sent_once() {
    let (server, store) = pair().await;
    server.set_round_trip(ms(50.0));
    let half = one_by_one(&store, 12, |_| "one".into()).await;
    server.flush_scripts();
    let rest = one_by_one(&store, 60, |_| "one".into()).await;
    let spent: Vec<u32> =
        join_all(half.into_iter().chain(rest)).await.into_iter().map(|it| it.unwrap().unwrap()).collect();
    let mut sorted = spent.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (1..=72).collect::<Vec<u32>>(), "each check is charged once");
    let refused = server.noscripts();
    assert!(refused >= 20, "{refused}");
    assert_eq!(server.sources(), 1, "one source is enough for {refused} calls");
    assert_eq!(store.stats().connects, 1);
}

#[tokio::test(start_paused = true)]
async fn calls_refused_with_noscript_are_sent_again_in_order() {
    let (server, store) = pair().await;
    server.set_round_trip(ms(50.0));
    server.flush_scripts();
    // All calls are in flight before the first error arrives.
    let checks = one_by_one(&store, 20, |_| "one".into()).await;
    let spent: Vec<u32> = join_all(checks).await.into_iter().map(|it| it.unwrap().unwrap()).collect();
    assert_eq!((spent, server.noscripts()), ((1..=20).collect(), 20));
}

#[tokio::test(start_paused = true)]
async fn foreign_value_fails_only_its_own_checks_with_many_calls_in_flight() {
    let (server, store) = pair().await;
    server.set_round_trip(ms(30.0));
    server.plant_foreign("bad");
    let subject = |wave: usize, number: usize| match number {
        3 => "bad".to_owned(),
        _ => format!("caller {wave}/{number}"),
    };
    let mut waves = Vec::new();
    for wave in 0..10 {
        waves.push(
            (0..8).map(|number| tokio::spawn(spend(store.clone(), subject(wave, number), 1))).collect::<Vec<_>>(),
        );
        sleep(ms(2.0)).await;
    }
    for wave in waves {
        for (number, check) in wave.into_iter().enumerate() {
            let expected = if number == 3 { Err(Kind::Foreign) } else { Ok(1) };
            assert_eq!(check.await.unwrap(), expected, "{number}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refunds_and_commands_between_checks_keep_their_order() {
    let (server, store) = pair().await;
    server.set_round_trip(ms(40.0));
    let demand = demand("one");
    let checks = [Check::one(&demand)];
    let first = store.decide(&checks).await.unwrap().remove(0);
    let mut spent = Vec::new();
    for round in 0..10 {
        let refunded = first.clone();
        let store = &store;
        let (before, refund, command, after) = tokio::join!(
            store.decide(&checks),
            async { if round == 0 { store.refund(&checks[0], &refunded).await } else { Ok(()) } },
            store.command(&["PING"]),
            store.decide(&checks),
        );
        refund.unwrap();
        command.unwrap();
        spent.extend([before, after].map(|decided| QUOTA - decided.unwrap()[0].limits[0].remaining));
    }
    // The first unit and one more; then the refund of the first, and one unit for each check.
    assert_eq!(spent, [2].into_iter().chain(2..=20).collect::<Vec<u32>>());
}

#[tokio::test(start_paused = true)]
async fn check_abandoned_before_its_call_is_sent_is_not_charged() {
    let (server, store) = pair().await;
    server.set(Fault::Hold);
    let in_flight = one_by_one(&store, CALLS_MAX as usize, |number| format!("caller {number}")).await;
    let waiting = tokio::spawn(spend(store.clone(), "waits".into(), 1));
    sleep(ms(5.0)).await;
    waiting.abort();
    server.set(Fault::Pass);
    for check in in_flight {
        assert_eq!(check.await.unwrap(), Ok(1));
    }
    assert_eq!(spent(&store, "waits").await, 0);
}

#[tokio::test(start_paused = true)]
async fn replies_are_read_while_the_server_reads_nothing() {
    const REPLY: &[u8] = b"*8\r\n:9\r\n:1\r\n:1\r\n:9\r\n:0\r\n:5\r\n:5\r\n:0\r\n";
    let greeting = format!("-ERR unknown command\r\n+OK\r\n*0\r\n$40\r\n{}\r\n", "a".repeat(40));
    let (client, mut server) = duplex(1 << 10);
    let client = std::sync::Mutex::new(Some(client));
    let connector = move |_: &str, _| {
        let client = client.lock().unwrap().take();
        std::future::ready(client.ok_or_else(|| std::io::ErrorKind::ConnectionRefused.into()))
    };
    let store = RedisStore::builder("redis://simulated").connector(connector).call_timeout(ms(500.0)).build().unwrap();
    let serve = tokio::spawn(async move {
        let (mut received, mut chunk) = (Vec::new(), [0; 1 << 10]);
        for (end, reply) in [("return reply\n\r\n", greeting.as_bytes()), ("window=fixed\r\n", &[])] {
            while !received.ends_with(end.as_bytes()) {
                let count = server.read(&mut chunk).await.unwrap();
                received.extend_from_slice(&chunk[..count]);
            }
            server.write_all(reply).await.unwrap();
            received.clear();
        }
        // The next call does not fit into the pipe, and the server does not read it.
        sleep(ms(50.0)).await;
        server.write_all(REPLY).await.unwrap();
        sleep(ms(5_000.0)).await;
        drop(server);
    });
    let first = demand("first");
    let checks = [Check::one(&first)];
    let subjects: Vec<String> = (0..100).map(|number| format!("another {number}")).collect();
    let others: Vec<Demand<'_>> = subjects.iter().map(|subject| demand(subject)).collect();
    let others: Vec<Check<'_>> = others.iter().map(Check::one).collect();
    let mut decided = store.decide(&checks);
    assert!(poll_immediate(&mut decided).await.is_none());
    sleep(ms(10.0)).await;
    let begun = Instant::now();
    let (decided, others) = tokio::join!(async { (decided.await, begun.elapsed()) }, async {
        (store.decide(&others).await, begun.elapsed())
    },);
    assert!(decided.0.is_ok() && decided.1 <= ms(60.0), "{decided:?}");
    assert_eq!(others.0.unwrap_err().kind(), Kind::TimedOut);
    assert!(others.1 <= ms(510.0), "{:?}", others.1);
    serve.abort();
}
