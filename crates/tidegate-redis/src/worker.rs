//! The worker of a server: a queue in front, one connection behind.
//!
//! ```text
//!   callers ──▶ queue ──▶ [ everything that waits ] ──▶ call ──▶ call ──▶ call ──▶ server
//!      ▲                                                                            │
//!      └──────────────────────── answers, in the order of the calls ◀───────────────┘
//! ```
//!
//! **Batches.** A check that finds the connection idle is sent at once, alone. Checks that arrive while calls are in
//! flight are collected and sent together, usually within a millisecond, without waiting for a reply (see
//! `session.rs`). The busier the store, the larger the batches. There is nothing to tune.
//!
//! **Order.** The checks of a worker are decided in the order in which they arrived, except when the server makes it
//! resend a call. Checks with one limit each may change places with checks of other counters, which has no visible
//! effect. So equal checks of many callers become one step with a repeat count (see `batch.rs`).
//!
//! **A caller that gives up** before its call is sent is not charged. One that gives up during the call may be charged.
//!
//! **The connection** belongs to the worker. It is opened before it is needed, watched while idle, dropped when a call
//! fails in a way that leaves its state unknown, and reopened with growing pauses for as long as that fails. Callers
//! wait during an attempt to connect, and get the error of the last attempt at once during a pause. A server or a load
//! balancer that closes an idle connection has not failed: the connection is reopened without a pause.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate_core::{Clock, Decision, Redeemed, StoreErrorKind as Kind};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use self::session::Session;
use crate::connection::{Connection, Connector};
use crate::credentials::Credentials;
use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::Step;
use crate::store::RedisStats;
use crate::tls::Tls;
use crate::url::Endpoint;

mod batch;
mod replicas;
mod session;

pub(crate) use replicas::Replicas;

/// The maximum number of checks, or of refunds, in one call. A larger call delays others and saves nothing more.
pub(crate) const STEPS_MAX: usize = 128;
/// The pause after the first failed attempt to connect. It doubles up to [`PAUSE_LAST`]. A recovered server must be in
/// use again within two seconds: an attempt that hangs (250 ms), the last pause with its jitter (300 ms) and the pause
/// of a circuit breaker (800 ms) leave half a second for connecting and the call.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_LAST: Duration = Duration::from_millis(200);

/// A request of a caller, and with which other work it may share a call.
pub(crate) struct Work {
    pub(crate) sharing: Sharing,
    pub(crate) job: Job,
}

/// What a caller requests, and the channel for its result.
pub(crate) enum Job {
    /// At most [`STEPS_MAX`] checks, answered together, each with its own result.
    Checks(Vec<Step>, ChecksWaiter),
    /// The refund of one decision, or a redemption.
    Refund(Step, Waiter<Redeemed>),
    /// A command other than a call of the script, encoded.
    Command(Vec<u8>, Waiter<Reply>),
}

/// The channel to the caller that waits for a result.
pub(crate) type Waiter<T> = oneshot::Sender<Result<T, Fault>>;

/// The channel to the caller that waits for the results of its checks.
pub(crate) type ChecksWaiter = Waiter<Vec<Result<Decision, Fault>>>;

/// With which other work some work may share a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sharing {
    /// With all checks for the same server. The call passes its keys as arguments, so they may be in any of its slots.
    Node,
    /// With all work of this hash slot, which is 0 if one call may have keys of several slots.
    Slot(u16),
    /// With none. For a slot that is being moved, where a call must name as few keys as possible.
    Alone,
    /// With none, and after `ASKING`: the node executes it although it does not own the slot yet.
    Asking,
}

impl Sharing {
    /// Returns whether work with this sharing may share a call with other work of the same sharing.
    pub(crate) fn is_shared(self) -> bool {
        match self {
            Sharing::Node | Sharing::Slot(_) => true,
            Sharing::Alone | Sharing::Asking => false,
        }
    }
}

/// The keys that one call of the script may name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum CallScope {
    /// Any keys: all of them are on one server.
    #[default]
    Server,
    /// The keys of one hash slot.
    Slot,
    /// The keys of all hash slots of one node of a cluster, in a call of checks. Other calls have keys of one slot.
    Node,
}

/// The background task of a node: sends the queued work over one connection, which it opens itself.
pub(crate) struct Worker {
    endpoint: Endpoint,
    pub(crate) settings: Arc<WorkerSettings>,
    /// The number of requests that this worker has sent.
    calls: AtomicU64,
    /// Whether another server is the master, so that nothing more may be sent to this one.
    is_demoted: AtomicBool,
    /// Since when the oldest call has been waiting for its reply, or the current attempt to connect has been under way.
    pub(crate) waiting: Mutex<Option<Instant>>,
}

/// What all workers of a store share.
pub(crate) struct WorkerSettings {
    /// The TLS configuration; `None` for connections without TLS.
    pub(crate) tls: Option<Arc<Tls>>,
    /// Where the user and the password are read from, if not from the URL.
    pub(crate) credentials: Arc<Credentials>,
    /// Where the user and the password for the Sentinels are read from.
    pub(crate) sentinel_credentials: Arc<Credentials>,
    /// Opens the stream to a server; `None` for TCP to the endpoint.
    pub(crate) connector: Option<Connector>,
    /// The source of the script.
    pub(crate) script: &'static str,
    /// The kind of server that is accepted.
    pub(crate) server_kind: ServerKind,
    /// The timeout of one call, and of one attempt to connect.
    pub(crate) call_timeout: Duration,
    /// The number of replicas that must acknowledge a call; `None` for none.
    pub(crate) replicas: Option<Replicas>,
    /// The length of the queue of each worker.
    pub(crate) queue_length: usize,
    /// The clock by which calls are decided; `None` for the server's.
    pub(crate) clock: Option<Arc<dyn Clock>>,
    /// The counts of all workers of the store since it was built.
    pub(crate) stats: Mutex<RedisStats>,
    /// Notified when the slot map of a cluster, or the master that Sentinels have named, may be outdated: a connection
    /// was lost, or a slot has moved.
    pub(crate) refresh_wanted: Notify,
}

impl WorkerSettings {
    /// Changes the counts of the store.
    pub(crate) fn count(&self, change: impl FnOnce(&mut RedisStats)) {
        change(&mut self.stats.lock());
    }
}

/// The kind of server that a connection may be used with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ServerKind {
    /// A master that is not a node of a cluster.
    Standalone,
    /// A master, in a cluster or not.
    Master,
    /// A node of a cluster, master or replica: a node that does not own a slot redirects its callers.
    ClusterNode,
    /// A Sentinel, which holds no keys.
    Sentinel,
}

impl Worker {
    pub(crate) fn new(endpoint: Endpoint, settings: Arc<WorkerSettings>) -> Worker {
        let (calls, is_demoted, waiting) = Default::default();
        Worker { endpoint, settings, calls, is_demoted, waiting }
    }

    /// Makes the worker send nothing more, because another server is the master.
    pub(crate) fn demote(&self) {
        self.is_demoted.store(true, Ordering::Release);
    }

    /// Returns whether nothing more may be sent, because another server is the master.
    pub(crate) fn is_demoted(&self) -> bool {
        self.is_demoted.load(Ordering::Acquire)
    }

    /// Counts a request that is sent.
    fn count_call(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.settings.count(|stats| stats.calls += 1);
    }

    /// Connects, sends the work in the queue to the server, and reconnects when the connection is lost.
    ///
    /// Returns when the queue is closed and its work is done: the store and all its clones were dropped. Also returns
    /// when the server is [demoted](crate::node::Node::demote), and then fails all work that was not sent. After a failed
    /// attempt to connect, or if the server closes a new connection within 200 ms and before a call, all work fails
    /// with that fault for a pause of 50 ms to 300 ms.
    pub(crate) async fn run(&self, queue: &mut mpsc::Receiver<Work>) {
        let mut backlog = VecDeque::new();
        let mut pause = PAUSE_FIRST;
        loop {
            if self.is_demoted() {
                queue.close();
                fail_unsent(queue, &mut backlog);
                return;
            }
            let fault = match self.connect().await {
                Ok(connection) => {
                    let (connected_at, calls_before) = (Instant::now(), self.calls.load(Ordering::Relaxed));
                    let state = Session::new(self, connection).serve(queue, &mut backlog).await;
                    *self.waiting.lock() = None;
                    if state.is_closed() {
                        return;
                    }
                    // A server that accepts connections only to close them is not reconnected without a pause.
                    let was_used = self.calls.load(Ordering::Relaxed) > calls_before;
                    if was_used || connected_at.elapsed() > PAUSE_LAST {
                        self.settings.refresh_wanted.notify_one();
                        pause = PAUSE_FIRST;
                        continue;
                    }
                    Fault::new(Kind::Unreachable, "the server closed the connection")
                }
                Err(fault) => fault,
            };
            self.settings.refresh_wanted.notify_one();
            if self.is_demoted() {
                continue;
            }
            backlog.drain(..).for_each(|work| fail(work, &fault));
            // Up to half as long again, so that many nodes do not reconnect at the same instant.
            let jittered = pause.mul_f64(1.0 + fastrand::f64() / 2.0);
            if self.fail_work_for(jittered, queue, &fault).await.is_closed() {
                return;
            }
            pause = (pause * 2).min(PAUSE_LAST);
        }
    }

    async fn connect(&self) -> Result<Connection, Fault> {
        self.settings.count(|stats| stats.connects += 1);
        let begun = Instant::now();
        *self.waiting.lock() = Some(begun);
        let until = begun + self.settings.call_timeout;
        let open = Connection::open(&self.endpoint, &self.settings, self.settings.server_kind, until);
        let connected = timeout_at(until, open).await.unwrap_or_else(|_| {
            let message = format!("no connection within {:?}", self.settings.call_timeout);
            Err(Fault::new(Kind::Unreachable, message))
        });
        *self.waiting.lock() = None;
        connected
    }

    /// Waits for `pause` and sends `fault` to the callers of all work that arrives meanwhile; [`Fault::demoted`] if the
    /// server is demoted.
    ///
    /// Returns `Open` after the pause, or `Closed` early if the queue is closed.
    async fn fail_work_for(&self, pause: Duration, queue: &mut mpsc::Receiver<Work>, fault: &Fault) -> QueueState {
        let fail_all = async {
            while let Some(work) = queue.recv().await {
                if self.is_demoted() { fail(work, &Fault::demoted()) } else { fail(work, fault) }
            }
        };
        match timeout(pause, fail_all).await {
            Ok(()) => QueueState::Closed,
            Err(_) => QueueState::Open,
        }
    }
}

/// Whether more work may arrive in the queue, or all its senders were dropped.
enum QueueState {
    Open,
    Closed,
}

impl QueueState {
    fn is_closed(&self) -> bool {
        matches!(self, QueueState::Closed)
    }
}

/// Fails the work of a demoted server, in `backlog` and in `queue`.
fn fail_unsent(queue: &mut mpsc::Receiver<Work>, backlog: &mut VecDeque<Work>) {
    backlog.drain(..).for_each(|work| fail(work, &Fault::demoted()));
    while let Ok(work) = queue.try_recv() {
        fail(work, &Fault::demoted());
    }
}

/// Sends `fault` to the caller that waits for `work`.
fn fail(work: Work, fault: &Fault) {
    let fault = fault.clone();
    match work.job {
        Job::Checks(_, waiter) => drop(waiter.send(Err(fault))),
        Job::Refund(_, waiter) => drop(waiter.send(Err(fault))),
        Job::Command(_, waiter) => drop(waiter.send(Err(fault))),
    }
}
