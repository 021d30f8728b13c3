//! Work that runs to completion although its caller is gone.
//!
//! **Problem.** When a client disconnects, a timeout fires or a handler panics, the future of the request is dropped at
//! whatever point it has reached. If that point is between a call to a shared store and its reply, units are charged
//! and no one can refund them. If it is in the middle of a refund, no one knows whether the refund happened.
//!
//! **Idea.** A future that has been polled owns everything it needs. When it is dropped before it is ready, it is moved
//! into a task of its own. A decision that completes this way keeps its charge. The limiter's deadline bounds the time
//! that such a task takes. [`PendingWork::wait`] completes when no such task is left.
//!
//! **Why not a task for every request?** Because every request would pay for it; this way only dropped ones do.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::Notify;

/// Counts the tasks that complete dropped futures.
#[derive(Debug, Default)]
pub(crate) struct PendingWork {
    tasks: AtomicUsize,
    none_left: Notify,
}

impl PendingWork {
    /// Waits until no task is left, including tasks that start in the meantime.
    #[cfg(any(test, feature = "rules"))]
    pub(crate) async fn wait(&self) {
        loop {
            // Registered before the count is read, so that no notification is missed in between.
            let none_left = self.none_left.notified();
            if self.tasks.load(Ordering::SeqCst) == 0 {
                return;
            }
            none_left.await;
        }
    }
}

/// Counts one task for as long as this value exists. When the last one is dropped, wakes all [`PendingWork::wait`].
struct TaskCount(Arc<PendingWork>);

impl TaskCount {
    fn new(pending: Arc<PendingWork>) -> TaskCount {
        pending.tasks.fetch_add(1, Ordering::SeqCst);
        TaskCount(pending)
    }
}

impl Drop for TaskCount {
    fn drop(&mut self) {
        if self.0.tasks.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.none_left.notify_waiters();
        }
    }
}

/// A future that runs to completion once it has been polled, even if it is dropped.
///
/// If it is dropped before it is ready, a task on the current tokio runtime completes it. Outside a runtime, or if it
/// was never polled, the work is abandoned. Panics if it is polled after it was ready.
pub(crate) struct RunToCompletion<T: Send + 'static> {
    future: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    was_polled: bool,
    pending: Arc<PendingWork>,
}

impl<T: Send + 'static> RunToCompletion<T> {
    pub(crate) fn new(pending: Arc<PendingWork>, future: impl Future<Output = T> + Send + 'static) -> Self {
        RunToCompletion { future: Some(Box::pin(future)), was_polled: false, pending }
    }
}

impl<T: Send + 'static> Future for RunToCompletion<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.was_polled = true;
        let future = self.future.as_mut().expect("a future is not polled after its end");
        let output = std::task::ready!(future.as_mut().poll(context));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static> Drop for RunToCompletion<T> {
    fn drop(&mut self) {
        let Some(future) = self.future.take().filter(|_| self.was_polled) else { return };
        // Outside a runtime the future cannot be driven, and its store cannot answer.
        let Ok(runtime) = Handle::try_current() else { return };
        let count = TaskCount::new(self.pending.clone());
        runtime.spawn(async move {
            // The output is dropped before the count, since dropping it may start more work.
            drop(future.await);
            drop(count);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn dropped_future_completes_only_if_it_was_polled() {
        let pending = Arc::new(PendingWork::default());
        let polled_and_dropped = |polls: usize| {
            let (start, started) = oneshot::channel::<()>();
            let (complete, completed) = oneshot::channel();
            let mut work = RunToCompletion::new(pending.clone(), async move {
                started.await.ok();
                complete.send(()).ok();
            });
            let mut context = Context::from_waker(std::task::Waker::noop());
            for _ in 0..polls {
                assert!(Pin::new(&mut work).poll(&mut context).is_pending());
            }
            drop(work);
            (start, completed)
        };
        let (start, completed) = polled_and_dropped(1);
        start.send(()).unwrap();
        pending.wait().await;
        completed.await.expect("it ran to completion");

        let (_start, completed) = polled_and_dropped(0);
        pending.wait().await;
        completed.await.expect_err("it was never polled");
    }
}
