//! Deadline of a call to a store, on a machine whose CPU may be overloaded.
//!
//! A deadline should expire because the store is slow. It also expires if this process gets no CPU time: the reply is
//! already in the socket, but neither the task that reads it nor the timer has run. Then both become ready at the same
//! moment, and their order is random. So when the deadline expires, the store [catches up](Store::catch_up) once, and
//! the call is polled again before it is abandoned:
//!
//! ```text
//!   call ──────────────▶ deadline ──▶ store catches up ──▶ reply received? ──▶ yes: it counts
//!                                                                          └─▶ no:  timed out
//! ```
//!
//! A store whose task gets CPU time catches up in microseconds, so a call to a store that hangs ends at its deadline.
//! If the store's task has to wait for the CPU, the call waits for it too, but at most [`CATCH_UP_MAX`].

use std::future::Future;
use std::panic::catch_unwind;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, poll_immediate, select};
use tidegate_core::Store;
use tokio::runtime::Handle;
use tokio::time::{Sleep, sleep, timeout};

/// Longest time that a call waits, after its deadline, for the store's task to be scheduled.
const CATCH_UP_MAX: Duration = Duration::from_millis(25);
/// Delay of a timeout above which the process was short of CPU time, so that the timeout does not count against the
/// store.
///
/// Timers tick every millisecond, and a wake-up takes less than a millisecond on a machine that is not overloaded.
pub(crate) const LATENESS_MAX: Duration = Duration::from_millis(5);

/// Creates a timer that expires after `time`. Returns `None` outside a tokio runtime, and in one without timers.
pub(crate) fn timer(time: Duration) -> Option<Sleep> {
    Handle::try_current().ok()?;
    // In a runtime without timers, making one panics.
    catch_unwind(|| sleep(time)).ok()
}

/// Waits until `call` is complete, at most for `time`. Returns its result, or `None` if the time is over.
///
/// A call that is ready at its first poll costs no timer, whatever `time` is. Outside a tokio runtime with a timer,
/// `time` has no effect.
#[cfg(feature = "rules")]
pub(crate) async fn within<T>(time: Duration, call: impl Future<Output = T>) -> Option<T> {
    let mut call = pin!(call);
    if let Some(done) = poll_immediate(call.as_mut()).await {
        return Some(done);
    }
    let Some(timer) = timer(time) else { return Some(call.await) };
    match select(call, pin!(timer)).await {
        Either::Left((done, _)) => Some(done),
        Either::Right(((), call)) => poll_immediate(call).await,
    }
}

/// Waits until `call` is complete or `deadline` expires. Returns the reply, or `None` if the deadline expired first.
///
/// `store` is the store that `call` is waiting for. A reply that has reached this process when the deadline expires is
/// still returned. To find it, the wait may exceed the deadline by up to [`CATCH_UP_MAX`].
pub(crate) async fn answer_by<T>(deadline: Sleep, store: &dyn Store, call: impl Future<Output = T>) -> Option<T> {
    let mut call = pin!(call);
    if let Either::Left((answer, _)) = select(call.as_mut(), pin!(deadline)).await {
        return Some(answer);
    }
    let catch_up = async {
        // Lets a store whose task runs on this thread of the runtime read its socket.
        tokio::task::yield_now().await;
        store.catch_up().await;
    };
    if let Either::Left((answer, _)) = select(call.as_mut(), pin!(timeout(CATCH_UP_MAX, catch_up))).await {
        return Some(answer);
    }
    // The reply may have arrived after the last poll of the call and before the catch-up completed.
    poll_immediate(call).await
}
