//! A server in use: a queue, and the worker task that serves it.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures_util::FutureExt;
use tidegate_core::{ShardId, StoreErrorKind as Kind};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::push_command;
use crate::url::Endpoint;
use crate::worker::{Job, Sharing, Waiter, Work, Worker, WorkerSettings};

/// The maximum number of [`Node::catch_up`] calls that are completed together.
const CATCH_UPS_MAX: usize = 1_024;

/// A server with a worker. When it is dropped, the worker completes the work in its queue and ends.
pub(crate) struct Node {
    pub(crate) id: ShardId,
    pub(crate) endpoint: Endpoint,
    worker: Arc<Worker>,
    queue: mpsc::Sender<Work>,
    /// Calls of [`Node::catch_up`] that wait for the worker.
    catch_ups: mpsc::UnboundedSender<oneshot::Sender<()>>,
    /// Whether a redirection has named this node since the topology was last read.
    pub(crate) was_named: AtomicBool,
}

impl Node {
    /// Spawns the worker, which connects now and reconnects whenever the connection is lost. Does not wait for it.
    pub(crate) fn spawn(id: ShardId, endpoint: Endpoint, settings: Arc<WorkerSettings>, runtime: &Handle) -> Arc<Node> {
        let (queue, mut works) = mpsc::channel(settings.queue_length);
        let (catch_ups, catch_ups_received) = mpsc::unbounded_channel();
        let worker = Arc::new(Worker::new(endpoint.clone(), settings));
        let node = Node { id, endpoint, worker: worker.clone(), queue, catch_ups, was_named: AtomicBool::new(false) };
        runtime.spawn(async move {
            let serve = async move {
                // After a panic, callers whose work the worker had taken from the queue get an error, because their
                // channels are dropped. Callers in the queue are served by the next run.
                while AssertUnwindSafe(worker.run(&mut works)).catch_unwind().await.is_err() {
                    worker.settings.count(|stats| stats.panics += 1);
                }
            };
            tokio::select! {
                // The worker is polled first: when a `catch_up` completes, the worker has delivered all replies that it
                // could read.
                biased;
                () = serve => {}
                () = complete_catch_ups(catch_ups_received) => {}
            }
        });
        Arc::new(node)
    }

    /// Returns for how long the oldest call has been waiting for its reply, or the worker has been trying to connect.
    /// `None` if neither is the case.
    pub(crate) fn unanswered_for(&self) -> Option<Duration> {
        self.worker.waiting.lock().map(|since| since.elapsed())
    }

    /// Marks the server as a former master: no further request is sent to it.
    ///
    /// Calls in flight get their replies. All other work, including work that is submitted later, fails with
    /// [`Fault::demoted`].
    pub(crate) fn demote(&self) {
        self.worker.demote();
    }

    /// Puts the job that `job` creates for a result channel into the worker's queue, and waits for the result.
    ///
    /// If the future is dropped, checks and commands that were not sent yet are not sent. A refund or redemption is
    /// sent anyway.
    ///
    /// # Errors
    /// Returns the worker's fault. The kind is `Unavailable` if the queue is full, `Unreachable` if the worker has ended,
    /// and `Interrupted` if it ends or panics before it sends the result.
    pub(crate) async fn submit<T>(&self, sharing: Sharing, job: impl FnOnce(Waiter<T>) -> Job) -> Result<T, Fault> {
        let (waiter, answer) = oneshot::channel();
        match self.queue.try_send(Work { sharing, job: job(waiter) }) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                return Err(Fault::new(Kind::Unavailable, "too many callers are waiting"));
            }
            Err(mpsc::error::TrySendError::Closed(_)) if self.worker.is_demoted() => {
                return Err(Fault::demoted());
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {
                return Err(Fault::new(Kind::Unreachable, "the tokio runtime of the store has shut down"));
            }
        }
        match answer.await {
            Ok(answer) => answer,
            Err(_) => Err(Fault::new(Kind::Interrupted, "the worker of the store ended during a call")),
        }
    }

    /// Runs a command on this server, regardless of the slots that it owns.
    ///
    /// # Errors
    /// Returns a fault if the command cannot be sent, there is no reply within the call timeout, or the reply is an
    /// error.
    pub(crate) async fn command(&self, parts: &[impl AsRef<[u8]>]) -> Result<Reply, Fault> {
        let mut request = Vec::new();
        push_command(&mut request, parts);
        self.submit(Sharing::Alone, |waiter| Job::Command(request, waiter)).await
    }

    /// Completes when the worker has delivered all replies that have already arrived.
    pub(crate) async fn catch_up(&self) {
        let (done, is_done) = oneshot::channel();
        // If the worker has ended, nothing is left to deliver.
        if self.catch_ups.send(done).is_ok() {
            let _ = is_done.await;
        }
    }
}

/// Completes calls of [`Node::catch_up`]. Never returns.
///
/// Sends `()` to each received channel after the worker, which is polled in the same task, has been polled once more.
async fn complete_catch_ups(mut catch_ups: mpsc::UnboundedReceiver<oneshot::Sender<()>>) {
    let mut pending = Vec::new();
    loop {
        if catch_ups.recv_many(&mut pending, CATCH_UPS_MAX).await == 0 {
            // The node was dropped. The worker ends by itself once it has served what is in its queue.
            std::future::pending::<()>().await;
        }
        // The runtime polls its sockets before this task runs again, and then the worker runs first.
        tokio::task::yield_now().await;
        for done in pending.drain(..) {
            let _ = done.send(());
        }
    }
}
