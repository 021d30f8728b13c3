//! The threads that serve connections, each with a runtime of its own.
//!
//! ```text
//!                     ┌─▶ thread 1: epoll, its own connections and no others
//!   accept ─▶ in turn ┼─▶ thread 2
//!                     └─▶ thread n
//! ```
//!
//! Most of the cost of a response is the system: a read, a write, and a wake-up. A runtime that moves tasks between
//! threads adds to it: a thread that finds two connections ready wakes another thread to take the second, whose data is
//! then in the wrong cache. Here a connection stays on the thread that it was given to, and all connections that are
//! ready at one poll are served before the next poll.
//!
//! **How many.** One thread for every two cores by default. A response is mostly the kernel's work, which also runs
//! beside these threads. A thread with more connections finds more of them ready at once and is woken less often.
//! Measured on two cores with eight connections, a second thread made each response a third to a half more expensive.
//!
//! **Bursts.** A thread starts to serve a few new connections at a time and serves the ready ones in between, so
//! thousands of new connections do not delay those that are being served.
//!
//! A connection that keeps its thread busy delays the other connections of that thread. A batch of commands is bounded,
//! so the delay is short. Answers to the operator are not, so the admin listener has a pool of its own, with one thread.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use tokio::runtime::Builder;
use tokio::sync::mpsc::{self, UnboundedSender};

/// The number of new connections that a thread starts to serve before the others run. A runtime polls for new events
/// after 61 tasks.
const NEW_BATCH: usize = 16;

/// A function that runs on a worker thread, inside its runtime.
type Job = Box<dyn FnOnce() + Send>;

/// A pool of threads that serve connections, each with a single-threaded runtime.
///
/// Dropping the pool makes the threads end and drop the connections that are still open. It does not wait for that.
#[derive(Debug)]
pub(crate) struct WorkerPool {
    threads: Vec<UnboundedSender<Job>>,
    next: AtomicUsize,
}

impl WorkerPool {
    /// Starts this many threads, named `NAME-0`, `NAME-1` and so on; `None` starts one for every two cores, rounded up.
    ///
    /// A thread that cannot be started is logged and left out.
    pub(crate) fn new(name: &str, threads: Option<NonZeroUsize>) -> WorkerPool {
        let cores = || thread::available_parallelism().map_or(1, usize::from);
        let count = threads.map_or_else(|| cores().div_ceil(2), usize::from);
        let start = |number| start(format!("{name}-{number}"));
        WorkerPool { threads: (0..count).filter_map(start).collect(), next: AtomicUsize::new(0) }
    }

    /// Spawns a future on the next thread in turn, and does not wait for it.
    ///
    /// `make` creates the future on that thread, because a socket belongs to the runtime in which it is registered.
    ///
    /// If there are no threads, or the thread has ended, spawns it on the caller's runtime, and panics if there is
    /// none.
    pub(crate) fn serve<F>(&self, make: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let job: Job = Box::new(move || drop(tokio::spawn(make())));
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        match turn.checked_rem(self.threads.len()).map(|n| &self.threads[n]) {
            Some(thread) => match thread.send(job) {
                Ok(()) => {}
                // The thread has ended, which it should not before the pool is dropped.
                Err(mpsc::error::SendError(job)) => job(),
            },
            None => job(),
        }
    }
}

fn start(name: String) -> Option<UnboundedSender<Job>> {
    let (jobs, mut queue) = mpsc::unbounded_channel::<Job>();
    let mut serve = move |runtime: tokio::runtime::Runtime| {
        runtime.block_on(async {
            let mut batch = Vec::with_capacity(NEW_BATCH);
            while queue.recv_many(&mut batch, NEW_BATCH).await > 0 {
                batch.drain(..).for_each(|job| job());
                // The connections that are being served run before the next new ones.
                tokio::task::yield_now().await;
            }
        });
    };
    let runtime = Builder::new_current_thread().enable_all().build();
    let started = runtime.and_then(|runtime| thread::Builder::new().name(name).spawn(move || serve(runtime)).map(drop));
    match started {
        Ok(()) => Some(jobs),
        Err(error) => {
            tracing::warn!(%error, "cannot start a worker thread");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn connections_are_spread_over_all_threads_and_dropped_with_the_pool() {
        let pool = WorkerPool::new("test", NonZeroUsize::new(3));
        let mut threads = HashSet::new();
        for _ in 0..2 * pool.threads.len() {
            let (sender, receiver) = oneshot::channel();
            pool.serve(move || async move { sender.send(thread::current().id()).unwrap() });
            threads.insert(receiver.await.unwrap());
        }
        assert_eq!(threads.len(), 3);
        assert!(!threads.contains(&thread::current().id()));

        let (held, dropped) = oneshot::channel::<()>();
        pool.serve(move || async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        drop(pool);
        assert!(dropped.await.is_err(), "an open connection is dropped");
    }

    #[tokio::test]
    async fn a_pool_without_threads_serves_on_the_runtime_of_the_caller() {
        let pool = WorkerPool { threads: Vec::new(), next: AtomicUsize::new(0) };
        let (sender, receiver) = oneshot::channel();
        pool.serve(move || async move { sender.send(thread::current().id()).unwrap() });
        assert_eq!(receiver.await.unwrap(), thread::current().id());
    }
}
