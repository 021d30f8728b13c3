//! `TIDEGATE.WAIT`, on a clock that tokio advances as soon as all tasks sleep.

use parking_lot::Mutex;
use serde_json::json;
use tidegate::{Clock, LimitStatus, StoreFuture};
use tidegate_testkit::history::{Bounds, History};
use tidegate_testkit::simulated::VirtualClock;
use tokio::io::DuplexStream;

use super::*;
use crate::budget::{EvictingBudget, Receiving};

/// Returns a listener with counters in `store`, or in memory. The clock is tokio's.
fn listener(store: Option<Arc<dyn Store>>, options: RespOptions) -> Arc<RespListener> {
    let builder = Limiter::builder().clock(VirtualClock::start());
    let limiter = match store {
        Some(store) => builder.store(store),
        None => builder,
    };
    Arc::new(RespListener::new(Decider::new(limiter.build(), Arc::default()), options))
}

/// A connection to a listener in virtual time.
struct Waiter {
    client: DuplexStream,
    stage: watch::Sender<ShutdownStage>,
}

impl Waiter {
    fn connect(listener: &Arc<RespListener>) -> Waiter {
        let (client, stage) = connect(listener, "203.0.113.9");
        Waiter { client, stage }
    }

    /// Sends bytes, and lets the listener read and handle them.
    async fn send(&mut self, bytes: &str) {
        self.client.write_all(bytes.as_bytes()).await.unwrap();
        tokio::task::yield_now().await;
    }

    async fn receive(&mut self) -> Value {
        receive(&mut self.client).await
    }

    async fn call(&mut self, command: &str) -> Value {
        self.send(&format!("{command}\r\n")).await;
        self.receive().await
    }

    /// Ends the connection. Returns the sender of the shutdown signal, which would also end the wait when it is dropped.
    fn disconnect(self) -> watch::Sender<ShutdownStage> {
        self.stage
    }

    async fn ends(mut self) -> bool {
        self.client.read(&mut [0]).await.unwrap() == 0
    }
}

#[tokio::test(start_paused = true)]
async fn earlier_commands_are_answered_before_the_wait_and_later_ones_after_it() {
    let mut waiter = Waiter::connect(&listener(None, RespOptions::default()));
    let start = Instant::now();
    let pipeline = "TIDEGATE.CHECK k 1/s\r\nPING\r\nTIDEGATE.WAIT k 1/s TIMEOUT 5000\r\nPING\r\nTIDEGATE.WAIT k 1/s TIMEOUT 5000\r\n";
    waiter.send(pipeline).await;
    assert_eq!(waiter.receive().await, json!([1, 1, 0, 0, 1_000]));
    assert_eq!(waiter.receive().await, "+PONG");
    assert_eq!(start.elapsed(), Duration::ZERO);
    // These bytes arrive during the wait.
    waiter.send("ECHO x\r\nECHO ").await;
    assert_eq!(waiter.receive().await, json!([1, 1, 0, 0, 1_000]));
    assert_eq!(start.elapsed().as_secs(), 1);
    assert_eq!(waiter.receive().await, "+PONG");
    assert_eq!(start.elapsed().as_secs(), 1);
    assert_eq!(waiter.receive().await, json!([1, 1, 0, 0, 1_000]));
    assert_eq!(waiter.receive().await, "x");
    assert_eq!(start.elapsed().as_secs(), 2);
    assert_eq!(waiter.call("y").await, "y");
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_too_long_is_denied_at_once_and_charges_nothing() {
    let listener = listener(None, RespOptions::default());
    let mut waiter = Waiter::connect(&listener);
    assert_eq!(waiter.call("TIDEGATE.WAIT k 2/min TIMEOUT 0").await, json!([1, 2, 1, 0, 60_000]));
    let start = Instant::now();
    let denied = waiter.call("TIDEGATE.WAIT k 2/min other 5/min TIMEOUT 59999 COST 2").await;
    assert_eq!(denied, json!([0, [0, 2, 1, 60_000, 60_000], [1, 5, 5, 0, 0]]));
    assert_eq!(waiter.call("TIDEGATE.WAIT k 2/min TIMEOUT 60000 COST 3").await, json!([0, 2, 1, -1, 60_000]));
    assert_eq!(waiter.call("TIDEGATE.WAIT k 2/min TIMEOUT 60000 COST 0").await, json!([1, 2, 1, 0, 60_000]));
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(waiter.call("TIDEGATE.PEEK k 2/min").await[2], 1);
    // Behind another one, the time passes.
    let mut first = Waiter::connect(&listener);
    first.send("TIDEGATE.WAIT k 2/min TIMEOUT 60000 COST 2\r\n").await;
    let mut second = Waiter::connect(&listener);
    let denied = second.call("TIDEGATE.WAIT k 2/min TIMEOUT 500").await;
    assert_eq!(json!([denied[0], denied[1], denied[3]]), json!([0, 2, 60_000]), "{denied}");
}

#[tokio::test(start_paused = true)]
async fn the_delay_of_a_leaky_bucket_is_waited_for_and_not_reported_again() {
    let mut waiter = Waiter::connect(&listener(None, RespOptions::default()));
    let start = Instant::now();
    for second in 0..3 {
        let reply = waiter.call("TIDEGATE.WAIT k 1/s TIMEOUT 9000").await;
        assert_eq!(reply[0], 1);
        assert_eq!(start.elapsed().as_secs(), second);
    }
    let start = Instant::now();
    for second in 0..3 {
        waiter
            .client
            .write_all(&array(&["TIDEGATE.WAIT", "l", "1/s leaky-bucket queue=9", "TIMEOUT", "9000"]))
            .await
            .unwrap();
        let reply = waiter.receive().await;
        assert_eq!(json!([reply[0], reply[3]]), json!([1, 0]), "{reply}");
        assert_eq!(start.elapsed().as_secs(), second);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_disconnects_leaves_the_queue_at_once() {
    let listener = listener(None, RespOptions::default());
    let mut waiters: Vec<Waiter> = (0..3).map(|_| Waiter::connect(&listener)).collect();
    assert_eq!(waiters[0].call("TIDEGATE.CHECK k 10/min COST 6").await[2], 4);
    tokio::time::sleep(Duration::from_secs(30)).await;
    // The first one needs units that are available only after a minute, and the others wait behind it.
    waiters[0].send("TIDEGATE.WAIT k 10/min TIMEOUT 60000 COST 10\r\n").await;
    waiters[1].send("TIDEGATE.WAIT k 10/min TIMEOUT 60000 COST 9\r\n").await;
    waiters[2].send("TIDEGATE.WAIT k 10/min TIMEOUT 60000 COST 4\r\n").await;
    let start = Instant::now();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let _first = waiters.remove(0).disconnect();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let _second = waiters.remove(0).disconnect();
    assert_eq!(waiters[0].receive().await, json!([1, 10, 0, 0, 60_000]));
    assert_eq!(start.elapsed().as_millis(), 10_000);
}

#[tokio::test(start_paused = true)]
async fn on_shutdown_a_wait_ends_with_an_error_after_half_a_second() {
    let listener = listener(None, RespOptions::default());
    let mut waiter = Waiter::connect(&listener);
    assert_eq!(waiter.call("TIDEGATE.CHECK k 1/s").await[0], 1);
    waiter.send("TIDEGATE.WAIT k 1/s TIMEOUT 60000\r\nPING\r\n").await;
    waiter.stage.send(ShutdownStage::Draining).unwrap();
    assert_eq!(waiter.receive().await[0], 1, "while the instance drains, the wait goes on");
    assert_eq!(waiter.receive().await, "+PONG");

    waiter.send("TIDEGATE.WAIT k 1/s TIMEOUT 60000\r\nTIDEGATE.CHECK l 1/s\r\n").await;
    waiter.stage.send(ShutdownStage::Closing).unwrap();
    let start = Instant::now();
    let reply = waiter.receive().await;
    assert_eq!(reply, "-UNAVAILABLE this instance is shutting down; send the command to another instance");
    assert_eq!(start.elapsed().as_millis(), 500);
    assert!(waiter.ends().await);
    let demand = Demand::new("1/s".parse().unwrap(), tidegate::Key::new("l").unwrap());
    let status = listener.decider.limiter().inspect(&demand).await.unwrap();
    assert_eq!(status.remaining, 1, "the command behind it is not executed");
}

#[tokio::test(start_paused = true)]
async fn a_wait_does_not_count_as_idle_time() {
    let options = RespOptions { idle: Duration::from_secs(2), ..RespOptions::default() };
    let mut waiter = Waiter::connect(&listener(None, options));
    assert_eq!(waiter.call("TIDEGATE.CHECK k 1/5s").await[0], 1);
    // Half a command is in the buffer during the wait, and has its time after it.
    waiter.send("TIDEGATE.WAIT k 1/5s TIMEOUT 60000\r\nPI").await;
    assert_eq!(waiter.receive().await[0], 1);
    tokio::time::sleep(Duration::from_millis(1_900)).await;
    assert_eq!(waiter.call("NG").await, "+PONG");
    let start = Instant::now();
    assert!(waiter.ends().await);
    assert_eq!(start.elapsed().as_secs(), 2);
}

#[tokio::test(start_paused = true)]
async fn commands_behind_a_wait_are_kept_up_to_a_bound() {
    let mut waiter = Waiter::connect(&listener(None, RespOptions::default()));
    assert_eq!(waiter.call("TIDEGATE.CHECK k 1/s").await[0], 1);
    waiter.send("TIDEGATE.WAIT k 1/s TIMEOUT 60000\r\n").await;
    let (mut reader, mut writer) = tokio::io::split(waiter.client);
    // More than the pipe between client and listener holds.
    let pings = 2 * (1 << 20) / 6;
    let sending = tokio::spawn(async move { writer.write_all(&b"PING\r\n".repeat(pings)).await });
    tokio::time::sleep(Duration::from_millis(900)).await;
    assert!(!sending.is_finished(), "the listener reads 16 KiB at most");
    let mut replies = vec![0; numbers([1, 1, 0, 0, 1_000]).len() + pings * 7];
    reader.read_exact(&mut replies).await.unwrap();
    assert!(replies.starts_with(b"*5\r\n:1\r\n") && replies.ends_with(b"+PONG\r\n"));
}

#[tokio::test(start_paused = true)]
async fn a_wait_whose_bytes_have_no_room_is_dropped_with_an_error() {
    let listener = listener(None, RespOptions::default());
    for (budget, expected) in [(8 * 1024, "+PONG"), (5 * 1024, "")] {
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let (_stage, mut context) = ConnectionContext::unshared();
        context.receiving = Receiving::new(EvictingBudget::new(budget, Arc::default()));
        tokio::spawn(listener.clone().serve_stream(server, [203, 0, 113, 9].into(), context));
        let key = "k".repeat(6 * 1024);
        client.write_all(&array(&["TIDEGATE.WAIT", &key, "9/s", "TIMEOUT", "100"])).await.unwrap();
        let reply = receive(&mut client).await;
        assert_eq!(reply[0] == 1, !expected.is_empty(), "{reply}");
        if expected.is_empty() {
            assert_eq!(reply, format!("-{EVICTED}"));
            assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        } else {
            client.write_all(b"PING\r\n").await.unwrap();
            assert_eq!(receive(&mut client).await, expected);
        }
    }
}

#[tokio::test]
async fn a_wait_needs_the_password() {
    let mut connection = open(with_password());
    connection.exchange(b"TIDEGATE.WAIT k 1/s TIMEOUT 1\r\n", "-NOAUTH Authentication required\r\n").await;
}

/// A store in memory that records its decisions.
struct RecordingStore {
    inner: MemoryStore,
    history: Mutex<History>,
}

impl Store for RecordingStore {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        let decisions = self.inner.check_batch(checks);
        let mut history = self.history.lock();
        for decision in &decisions {
            history.note(&[0, 1], decision.at.as_micros(), decision.at.as_micros(), decision);
        }
        Box::pin(async { Ok(decisions) })
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

/// The second limit of each check numbers the admissions.
#[tokio::test(start_paused = true)]
async fn two_hundred_clients_on_two_instances_are_admitted_in_order_and_never_over_the_limit() {
    const LIMITS: [&str; 2] = ["10/s", "1000/h"];
    let clock = VirtualClock::start();
    let began = clock.now();
    let store = Arc::new(RecordingStore {
        inner: MemoryStore::builder().clock(clock.clone()).build(),
        history: Mutex::new(History::new(LIMITS.map(|limit| limit.parse().unwrap()))),
    });
    let listeners = [(); 2].map(|()| listener(Some(store.clone()), RespOptions::default()));
    let mut clients = Vec::new();
    for n in 0..240_u64 {
        let mut waiter = Waiter::connect(&listeners[n as usize % 2]);
        waiter.send("TIDEGATE.WAIT hooks 10/s journal 1000/h TIMEOUT 60000\r\n").await;
        // Every sixth client leaves while it waits, some of them as the first in the queue.
        let per_place_us = if n % 12 == 5 { 50_000 } else { 75_000 };
        let leaves_after = (n % 6 == 5).then(|| Duration::from_micros(300 + n * per_place_us));
        clients.push(tokio::spawn(async move {
            let reply = match leaves_after {
                Some(after) => tokio::time::timeout(after, waiter.receive()).await.ok(),
                None => Some(waiter.receive().await),
            };
            (reply, waiter.disconnect())
        }));
    }
    let (mut places, mut left, mut stages) = ([Vec::new(), Vec::new()], 0, Vec::new());
    for (n, client) in clients.into_iter().enumerate() {
        let (reply, stage) = client.await.unwrap();
        stages.push(stage);
        match reply {
            Some(reply) => {
                assert_eq!(json!([reply[0], reply[1][0], reply[2][0]]), json!([1, 1, 1]), "client {n}: {reply}");
                places[n % 2].push(999 - reply[2][2].as_i64().unwrap());
            }
            None => left += 1,
        }
    }
    assert!(left >= 20, "{left} clients left while they waited");
    for places in &places {
        assert!(places.is_sorted(), "first come, first served: {places:?}");
    }
    let mut all = places.concat();
    all.sort_unstable();
    assert_eq!(
        all,
        (0..240 - left).collect::<Vec<_>>(),
        "each admission has its client, and those who left are not charged"
    );
    // Ten at once, and ten a second later: never slower than the limit, apart from the jitter of two instances.
    let took = clock.now().as_micros() - began.as_micros();
    assert!((all.len() as u64 / 10 - 1..=all.len() as u64 / 10 + 3).contains(&(took / 1_000_000)), "{took} us");
    store.history.lock().clone().verify(Bounds::default()).expect_clean();
}
