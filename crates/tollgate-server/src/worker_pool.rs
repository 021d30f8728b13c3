//! Who serves the connections: a few threads, each with a runtime of its own.
//!
//! ```text
//!                     ┌─▶ thread 1: epoll, its connections, nobody else's
//!   accept ─▶ in turn ┼─▶ thread 2
//!                     └─▶ thread n
//! ```
//!
//! Most of an answer's cost is the system: a read, a write, and being woken. A runtime that moves tasks between threads adds to
//! it: a thread that finds two connections ready wakes another one to take the second, which then finds what it
//! needs in somebody else's cache. Here a connection stays on the thread that was given it, and whatever is ready when that
//! thread looks is served before it looks again.
//!
//! **How many.** One for every two cores unless said. An answer is mostly the kernel's work, which also runs beside these threads;
//! and a thread with more connections finds more of them ready at once and is woken less often. Measured on two cores with eight
//! connections, a second thread made each answer dearer by a third to a half.
//!
//! **Bursts.** A thread takes a few new connections at a time and serves what is ready in between, so thousands of newcomers
//! do not delay those that are being served.
//!
//! A connection that keeps its thread busy delays its neighbours, not everybody; a batch of commands is bounded, so not for
//! long either.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use tokio::runtime::Builder;
use tokio::sync::mpsc::{self, UnboundedSender};

/// Connections that a thread begins to serve at once. In a burst of thousands the others wait until those that are served
/// already have had a turn; a runtime looks for new events after 61 tasks.
const NEW_BATCH: usize = 16;

/// Run on a thread of the crew, inside its runtime.
type Job = Box<dyn FnOnce() + Send>;

/// Threads that serve connections, for as long as this value lives; what they then still serve is dropped.
#[derive(Debug)]
pub(crate) struct WorkerPool {
    threads: Vec<UnboundedSender<Job>>,
    next: AtomicUsize,
}

impl WorkerPool {
    /// So many threads; unless said, one for every two cores.
    pub(crate) fn new(threads: Option<NonZeroUsize>) -> WorkerPool {
        let cores = || thread::available_parallelism().map_or(1, usize::from);
        let count = threads.map_or_else(|| cores().div_ceil(2), usize::from);
        WorkerPool { threads: (0..count).filter_map(start).collect(), next: AtomicUsize::new(0) }
    }

    /// Serves on the thread whose turn it is. The future is made there, because sockets belong to the runtime they are made in.
    pub(crate) fn serve<F>(&self, make: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let job: Job = Box::new(move || drop(tokio::spawn(make())));
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        match turn.checked_rem(self.threads.len()).map(|n| &self.threads[n]) {
            Some(thread) => match thread.send(job) {
                Ok(()) => {}
                // It has ended, though it should not have before the crew.
                Err(mpsc::error::SendError(job)) => job(),
            },
            // No thread could be had: whoever lets connections in serves them too.
            None => job(),
        }
    }
}

fn start(number: usize) -> Option<UnboundedSender<Job>> {
    let (jobs, mut queue) = mpsc::unbounded_channel::<Job>();
    let mut serve = move |runtime: tokio::runtime::Runtime| {
        runtime.block_on(async {
            let mut batch = Vec::with_capacity(NEW_BATCH);
            while queue.recv_many(&mut batch, NEW_BATCH).await > 0 {
                batch.drain(..).for_each(|job| job());
                // Those that are being served have a turn before the next newcomers.
                tokio::task::yield_now().await;
            }
        });
    };
    let runtime = Builder::new_current_thread().enable_all().build();
    let started = runtime.and_then(|runtime| {
        thread::Builder::new().name(format!("tollgate-{number}")).spawn(move || serve(runtime)).map(drop)
    });
    match started {
        Ok(()) => Some(jobs),
        Err(error) => {
            tracing::warn!(%error, "a thread to serve connections could not be started");
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
    async fn connections_go_round_and_end_with_the_crew() {
        let crew = WorkerPool::new(NonZeroUsize::new(3));
        let mut threads = HashSet::new();
        for _ in 0..2 * crew.threads.len() {
            let (tell, told) = oneshot::channel();
            crew.serve(move || async move { tell.send(thread::current().id()).unwrap() });
            threads.insert(told.await.unwrap());
        }
        assert_eq!(threads.len(), 3);
        assert!(!threads.contains(&thread::current().id()));

        let (held, dropped) = oneshot::channel::<()>();
        crew.serve(move || async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        drop(crew);
        assert!(dropped.await.is_err(), "what is still served is dropped");
    }

    #[tokio::test]
    async fn without_threads_whoever_hands_over_serves() {
        let crew = WorkerPool { threads: Vec::new(), next: AtomicUsize::new(0) };
        let (tell, told) = oneshot::channel();
        crew.serve(move || async move { tell.send(thread::current().id()).unwrap() });
        assert_eq!(told.await.unwrap(), thread::current().id());
    }
}
