//! Work that is finished although nobody waits for it any more.
//!
//! **Problem.** A client leaves, a timeout strikes, a handler panics: the future of its request is dropped wherever it
//! stands. If it stood between asking a shared store and the answer, the units are taken and nobody knows it, so nobody
//! gives them back. If it stood in the middle of giving back, nobody knows whether it happened.
//!
//! **Idea.** What has begun to talk to the store owns everything it needs, and goes on as a task of its own when whoever
//! waited for it is gone. A decision that comes too late keeps its charge. It never takes long:
//! the limiter's deadline bounds it. [`Pending::none`] tells when all such work is done.
//!
//! **Why not a task from the start?** Because then every request would pay for one; here only those that leave do.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::Notify;

/// How much work goes on by itself.
#[derive(Debug, Default)]
pub(super) struct Pending {
    count: AtomicUsize,
    none_left: Notify,
}

impl Pending {
    /// Waits until there is none.
    pub(super) async fn none(&self) {
        loop {
            // Registered before the count is read, so that no end is missed in between.
            let none_left = self.none_left.notified();
            if self.count.load(Ordering::SeqCst) == 0 {
                return;
            }
            none_left.await;
        }
    }
}

/// One piece of it.
struct Piece(Arc<Pending>);

impl Piece {
    fn of(pending: Arc<Pending>) -> Piece {
        pending.count.fetch_add(1, Ordering::SeqCst);
        Piece(pending)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.none_left.notify_waiters();
        }
    }
}

/// A future that, once it has begun, is driven to its end.
pub(super) struct Assured<T: Send + 'static> {
    future: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    has_begun: bool,
    pending: Arc<Pending>,
}

impl<T: Send + 'static> Assured<T> {
    pub(super) fn new(pending: Arc<Pending>, future: impl Future<Output = T> + Send + 'static) -> Assured<T> {
        Assured { future: Some(Box::pin(future)), has_begun: false, pending }
    }

    /// Nobody waits for it from the start.
    pub(super) fn detach(mut self) {
        self.has_begun = true;
    }
}

impl<T: Send + 'static> Future for Assured<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.has_begun = true;
        let future = self.future.as_mut().expect("a future is not polled after its end");
        let output = std::task::ready!(future.as_mut().poll(context));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static> Drop for Assured<T> {
    fn drop(&mut self) {
        let Some(future) = self.future.take().filter(|_| self.has_begun) else { return };
        // Without a runtime there is nobody left to do it, nor a store that would answer.
        let Ok(runtime) = Handle::try_current() else { return };
        let piece = Piece::of(self.pending.clone());
        runtime.spawn(async move {
            // What comes of it is dropped before the piece is, since that may leave more to do.
            drop(future.await);
            drop(piece);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn what_has_begun_is_finished_and_what_has_not_is_not() {
        let pending = Arc::new(Pending::default());
        let begun_and_dropped = |polls: usize| {
            let (go, gone) = oneshot::channel::<()>();
            let (ended, end) = oneshot::channel();
            let mut work = Assured::new(pending.clone(), async move {
                gone.await.ok();
                ended.send(()).ok();
            });
            let mut context = Context::from_waker(std::task::Waker::noop());
            for _ in 0..polls {
                assert!(Pin::new(&mut work).poll(&mut context).is_pending());
            }
            drop(work);
            (go, end)
        };
        let (go, end) = begun_and_dropped(1);
        go.send(()).unwrap();
        pending.none().await;
        end.await.expect("it was finished");

        let (_go, end) = begun_and_dropped(0);
        pending.none().await;
        end.await.expect_err("it had not begun");
    }
}
