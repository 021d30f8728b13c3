//! The worker behind the store: a queue in front, one connection behind.
//!
//! ```text
//!   callers ──▶ queue ──▶ [ everything that waits ] ──▶ call ──▶ call ──▶ call ──▶ server
//!      ▲                                                                            │
//!      └──────────────────────── answers, in the order of the calls ◀───────────────┘
//! ```
//!
//! **Batches.** A check that finds the connection idle leaves at once, alone. Checks that come while calls are in flight are collected and leave
//! together, after a millisecond at most, without waiting for a reply (`session.rs` says when). The busier the store, the larger the batches, and nothing
//! has to be tuned.
//!
//! **Order.** Within a lane, checks are decided in the order in which they came, except when the server makes us ask again.
//! Checks with one limit each may change places with checks of other counters, which nobody can see; so the same check
//! from many callers becomes one step with a repeat count (`batch.rs`).
//!
//! **Callers that gave up are not charged** if they did so before their call left. One that gives up during the call may have been charged.
//!
//! **The connection** is the lane's own. It is opened before it is needed, watched while idle, dropped when a
//! call fails in a way that leaves its state unknown, and opened again, at growing distances, for as long as
//! that fails. While there is none, callers are told at once. A server or a balancer that hangs up on who has been idle for a while has
//! not failed: it is called again without a pause.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};
use tollgate_core::{Clock, Decision, StoreErrorKind as Kind};

use self::session::Session;
use crate::connection::{Connection, Connector};
use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::Step;
use crate::tls::Tls;
use crate::url::Endpoint;

mod batch;
mod session;

/// The most checks in one call: past this a call takes so long that others wait for it, and gains nothing more.
pub(crate) const STEPS_MAX: usize = 128;
/// The first pause after a failed attempt to connect; it doubles up to the last. A healed server must be in use again within
/// two seconds: an attempt that hangs (250 ms), this pause with its jitter (300 ms) and what a breaker waits before it asks
/// again (800 ms) leave half a second for the greeting and the question.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_LAST: Duration = Duration::from_millis(200);

/// Something to be done, and who waits for it.
pub(crate) enum Work {
    /// At most [`STEPS_MAX`] checks, answered together, each with its own answer.
    Checks(Vec<Step>, oneshot::Sender<Result<Vec<Result<Decision, Fault>>, Fault>>),
    Refund(Step, oneshot::Sender<Result<(), Fault>>),
    /// A plain command, encoded.
    Command(Vec<u8>, oneshot::Sender<Result<Reply, Fault>>),
}

/// What a lane has done so far.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) calls: AtomicU64,
    pub(crate) decisions: AtomicU64,
    pub(crate) connects: AtomicU64,
    pub(crate) scripts_sent: AtomicU64,
}

pub(crate) struct Worker {
    pub(crate) endpoint: Endpoint,
    pub(crate) tls: Option<Tls>,
    pub(crate) connector: Option<Connector>,
    pub(crate) script: &'static str,
    pub(crate) call_timeout: Duration,
    pub(crate) clock: Option<Arc<dyn Clock>>,
    pub(crate) counters: Arc<Counters>,
}

impl Worker {
    /// Serves until the queue is closed.
    pub(crate) async fn run(&self, queue: &mut mpsc::Receiver<Work>) {
        let mut backlog = VecDeque::new();
        let mut pause = PAUSE_FIRST;
        loop {
            let fault = match self.connect().await {
                Ok(connection) => {
                    let (connected_at, calls_before) = (Instant::now(), self.counters.calls.load(Ordering::Relaxed));
                    if Session::new(self, connection).serve(queue, &mut backlog).await.is_closed() {
                        return;
                    }
                    // One that takes us in only to throw us out again is not called at the pace at which it does so.
                    let was_of_use = self.counters.calls.load(Ordering::Relaxed) > calls_before;
                    if was_of_use || connected_at.elapsed() > PAUSE_LAST {
                        pause = PAUSE_FIRST;
                        continue;
                    }
                    Fault::new(Kind::Unreachable, "the server hung up on us")
                }
                Err(fault) => fault,
            };
            backlog.drain(..).for_each(|work| refuse(work, &fault));
            // Up to half as long again, so that many nodes do not come back at the same instant.
            let jittered = pause.mul_f64(1.0 + fastrand::f64() / 2.0);
            if self.refuse_for(jittered, queue, &fault).await.is_closed() {
                return;
            }
            pause = (pause * 2).min(PAUSE_LAST);
        }
    }

    async fn connect(&self) -> Result<Connection, Fault> {
        self.counters.connects.fetch_add(1, Ordering::Relaxed);
        let until = Instant::now() + self.call_timeout;
        let open = Connection::open(&self.endpoint, self.tls.as_ref(), self.connector.as_ref(), self.script, until);
        timeout_at(until, open)
            .await
            .unwrap_or_else(|_| Err(Fault::new(Kind::Unreachable, "the server did not greet us in time")))
    }

    /// Tells everyone who comes within `pause` that there is no connection.
    async fn refuse_for(&self, pause: Duration, queue: &mut mpsc::Receiver<Work>, fault: &Fault) -> QueueState {
        let refuse_all = async {
            while let Some(work) = queue.recv().await {
                refuse(work, fault);
            }
        };
        match timeout(pause, refuse_all).await {
            Ok(()) => QueueState::Closed,
            Err(_) => QueueState::Open,
        }
    }
}

enum QueueState {
    Open,
    Closed,
}

impl QueueState {
    fn is_closed(&self) -> bool {
        matches!(self, QueueState::Closed)
    }
}

fn refuse(work: Work, fault: &Fault) {
    let fault = fault.clone();
    match work {
        Work::Checks(_, waiter) => drop(waiter.send(Err(fault))),
        Work::Refund(_, waiter) => drop(waiter.send(Err(fault))),
        Work::Command(_, waiter) => drop(waiter.send(Err(fault))),
    }
}
