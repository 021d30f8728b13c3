//! Instances on one store, in virtual time, with the intervals of production.

use std::collections::HashMap;
use std::sync::atomic::AtomicU8;

use tidegate_core::{Check, Decision, Demand, Key, LimitStatus, MemoryStore, Source, StoreFuture};
use tokio::time::Instant;

use super::*;
use crate::limiter::{Backend, Limiter};

/// A server that decides by one memory store and keeps the live instances.
#[derive(Default)]
struct Server {
    counters: MemoryStore,
    /// The time until which each instance is live.
    instances: Mutex<HashMap<InstanceId, Instant>>,
}

/// The connection of one instance to the server.
struct Connection {
    server: Arc<Server>,
    state: AtomicU8,
    /// The times of all announcements, including those that failed.
    announcements: Mutex<Vec<Instant>>,
}

const CONNECTED: u8 = 0;
const CUT: u8 = 1;
const PANICS: u8 = 2;

impl Connection {
    fn answer<T: Send + 'static>(&self, answer: impl FnOnce() -> T) -> StoreFuture<'_, T> {
        match self.state.load(Ordering::SeqCst) {
            CONNECTED => Box::pin(std::future::ready(Ok(answer()))),
            PANICS => panic!("a bug in a store"),
            _ => Box::pin(std::future::ready(Err(StoreError::new(Kind::Unreachable, "down")))),
        }
    }

    fn set(&self, state: u8) {
        self.state.store(state, Ordering::SeqCst);
    }
}

impl Store for Connection {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        self.answer(|| self.server.counters.check_batch(checks))
    }
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        self.answer(|| self.server.counters.refund(check, decision))
    }
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        self.answer(|| self.server.counters.reset(demand))
    }
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        self.answer(|| self.server.counters.inspect(demand))
    }
    fn announce(&self, id: InstanceId, lifetime: Duration) -> StoreFuture<'_, Option<LiveInstances>> {
        let now = Instant::now();
        self.announcements.lock().push(now);
        self.answer(|| {
            let mut instances = self.server.instances.lock();
            instances.retain(|_, until| *until > now);
            let was_live = instances.insert(id, now + lifetime).is_some();
            Some(LiveInstances::new(instances.len() as u32, was_live))
        })
    }
    fn withdraw(&self, id: InstanceId) -> StoreFuture<'_, ()> {
        self.answer(|| {
            self.server.instances.lock().remove(&id);
        })
    }
}

struct Instance {
    connection: Arc<Connection>,
    limiter: Limiter,
}

impl Instance {
    fn start(server: &Arc<Server>) -> Instance {
        Instance::with(server, |builder| builder)
    }

    fn with(server: &Arc<Server>, configure: impl FnOnce(crate::LimiterBuilder) -> crate::LimiterBuilder) -> Instance {
        let (state, announcements) = (AtomicU8::new(CONNECTED), Mutex::default());
        let connection = Arc::new(Connection { server: server.clone(), state, announcements });
        let limiter = configure(Limiter::builder().store(connection.clone()).deny_cache(false)).build();
        Instance { connection, limiter }
    }

    fn number(&self) -> u32 {
        self.limiter.stats().instances
    }

    /// Returns the number of 100 checks at 10/min that are admitted, and the source of the last decision.
    async fn admitted(&self) -> (usize, Source) {
        let demand = Demand::new("10/min".parse().unwrap(), Key::new("k").unwrap());
        let (mut admitted, mut source) = (0, Source::None);
        for _ in 0..100 {
            let decision = self.limiter.check(&Check::one(&demand)).await.unwrap();
            (admitted, source) = (admitted + usize::from(decision.allowed()), decision.source);
        }
        (admitted, source)
    }
}

fn started(server: &Arc<Server>, count: usize) -> Vec<Instance> {
    (0..count).map(|_| Instance::start(server)).collect()
}

fn numbers(instances: &[Instance]) -> Vec<u32> {
    instances.iter().map(Instance::number).collect()
}

/// Waits for an interval with its jitter.
async fn interval() {
    sleep(INTERVAL.mul_f64(1.0 + JITTER) + Duration::from_millis(10)).await;
}

/// Returns the units that all instances admit at 10/min while the server does not answer.
async fn admitted_in_an_outage(instances: &[Instance]) -> usize {
    instances.iter().for_each(|instance| instance.connection.set(CUT));
    let mut sum = 0;
    for instance in instances {
        let (admitted, source) = instance.admitted().await;
        assert_eq!(source, Source::Local);
        sum += admitted;
    }
    sum
}

#[tokio::test(start_paused = true)]
async fn outage_admits_the_rounded_share_of_every_instance() {
    for (count, in_outage) in [(1, 10), (3, 12), (8, 16)] {
        let server = Arc::default();
        let instances = started(&server, count);
        interval().await;
        assert_eq!(numbers(&instances), vec![count as u32; count]);
        let mut before = 0;
        for instance in &instances {
            before += instance.admitted().await.0;
        }
        assert_eq!(before, 10, "by the store");
        assert_eq!(admitted_in_an_outage(&instances).await, in_outage, "{count} instances");
        let bound = 2 * 10 + count - 1;
        assert!(before + in_outage <= bound);
    }
}

#[tokio::test(start_paused = true)]
async fn number_follows_instances_that_join_leave_and_are_killed_within_ten_seconds() {
    let server = Arc::default();
    let mut instances = started(&server, 3);
    interval().await;
    assert_eq!(numbers(&instances), [3; 3]);
    instances.push(Instance::start(&server));
    interval().await;
    assert_eq!(numbers(&instances), [4; 4], "one has joined");
    drop(instances.pop());
    interval().await;
    assert_eq!(numbers(&instances), [3; 3], "one was dropped");
    instances[2].limiter.withdraw().await;
    interval().await;
    assert_eq!(numbers(&instances[..2]), [2; 2], "one was withdrawn");
    interval().await;
    assert_eq!(numbers(&instances[..2]), [2; 2], "and is not announced again");
    // As if it were killed: its announcements stop.
    instances[1].connection.set(CUT);
    sleep(Duration::from_secs(6)).await;
    assert_eq!(instances[0].number(), 2, "two announcements may be lost");
    sleep(Duration::from_secs(4)).await;
    assert_eq!(instances[0].number(), 1);
    assert_eq!(instances[1].number(), 2, "the last known number holds without the store");
}

#[tokio::test(start_paused = true)]
async fn partitioned_instance_enforces_its_share_of_the_last_known_number() {
    let server = Arc::default();
    let instances = started(&server, 3);
    interval().await;
    instances[0].connection.set(CUT);
    sleep(Duration::from_secs(20)).await;
    assert_eq!(numbers(&instances), [3, 2, 2]);
    let mut admitted = Vec::new();
    for instance in &instances {
        admitted.push(instance.admitted().await.0);
    }
    assert_eq!(admitted, [4, 10, 0], "⌈10 / 3⌉ by itself, and 10 by the store");
    instances[0].connection.set(CONNECTED);
    interval().await;
    interval().await;
    assert_eq!(numbers(&instances), [3; 3], "it is counted again");
}

#[tokio::test(start_paused = true)]
async fn instance_started_in_an_outage_knows_only_itself() {
    let server = Arc::default();
    let mut instances = started(&server, 2);
    interval().await;
    instances.iter().for_each(|instance| instance.connection.set(CUT));
    let late = Instance::start(&server);
    late.connection.set(CUT);
    interval().await;
    assert_eq!(late.number(), 1);
    instances.push(late);
    assert_eq!(admitted_in_an_outage(&instances).await, 5 + 5 + 10);
}

#[tokio::test(start_paused = true)]
async fn instance_announces_itself_at_once_and_at_most_every_two_seconds() {
    let server = Arc::default();
    let instance = Instance::start(&server);
    tokio::task::yield_now().await;
    assert_eq!(instance.number(), 1);
    for state in [CONNECTED, CUT, PANICS, CONNECTED] {
        instance.connection.set(state);
        sleep(Duration::from_secs(60)).await;
    }
    let announcements = instance.connection.announcements.lock().clone();
    let gaps: Vec<Duration> = announcements.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.len() > 4 * 60 / 3, "no failure stops it: {}", gaps.len());
    assert!(gaps.iter().all(|gap| (2_000..=2_202).contains(&gap.as_millis())), "{gaps:?}");
    assert!(gaps.iter().any(|gap| *gap != gaps[0]), "there is a jitter");
}

#[tokio::test(start_paused = true)]
async fn server_that_has_lost_its_instances_does_not_lower_the_number() {
    let server: Arc<Server> = Arc::default();
    let mut instances = started(&server, 3);
    interval().await;
    for _ in 0..5 {
        server.instances.lock().clear();
        for _ in 0..60 {
            sleep(Duration::from_millis(100)).await;
            assert_eq!(numbers(&instances), [3; 3]);
        }
    }
    // One of them does not come back.
    server.instances.lock().clear();
    instances.remove(0).connection.set(CUT);
    for _ in 0..3 {
        interval().await;
    }
    assert_eq!(numbers(&instances), [2; 2]);
}

#[tokio::test(start_paused = true)]
async fn configured_number_overrides_the_counted_one_of_its_instance_only() {
    let server = Arc::default();
    let configured = Instance::with(&server, |builder| builder.instances(5));
    let others = started(&server, 2);
    interval().await;
    assert_eq!((configured.number(), numbers(&others)), (5, vec![3; 2]));
    assert_eq!(admitted_in_an_outage(&[configured]).await, 2);
}

#[tokio::test(start_paused = true)]
async fn instance_that_does_not_announce_itself_is_not_counted() {
    let server = Arc::default();
    let unannounced = Instance::with(&server, |builder| builder.announce(false));
    let other = Instance::start(&server);
    unannounced.admitted().await;
    interval().await;
    assert_eq!((unannounced.number(), other.number()), (1, 1));
    assert!(unannounced.connection.announcements.lock().is_empty());
    unannounced.limiter.withdraw().await;
    assert_eq!(server.instances.lock().len(), 1);
}

#[test]
fn limiter_built_without_a_runtime_announces_itself_with_its_first_check_in_one() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let server = Arc::default();
    let instance = Instance::start(&server);
    assert!(instance.connection.announcements.lock().is_empty());
    for round in 1..=3 {
        let runtime = runtime();
        runtime.block_on(instance.admitted());
        runtime.block_on(tokio::task::yield_now());
        assert_eq!(instance.connection.announcements.lock().len(), round, "the task of the last runtime has ended");
    }
    // Neither a runtime without a timer nor one that has ended is a problem.
    let without_timer = tokio::runtime::Builder::new_current_thread().build().unwrap();
    without_timer.block_on(instance.admitted());
    without_timer.block_on(instance.limiter.withdraw());
}

#[tokio::test(start_paused = true)]
async fn store_that_does_not_count_instances_is_asked_once() {
    let store = Arc::new(MemoryStore::new());
    let limiter = Limiter::builder().store(store).build();
    tokio::task::yield_now().await;
    let Backend::Shared(shared) = &limiter.0.backend else { panic!("a shared store") };
    assert!(matches!(*shared.announcing.task.lock(), Task::Disabled));
    assert_eq!(limiter.stats().instances, 1);
}
