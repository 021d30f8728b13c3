//! The deadline of a call to a store, on a machine that may be too busy to keep time.
//!
//! A deadline that passes is meant to say that the store is slow. It also passes if this process got no CPU: the answer lies in the
//! socket, and neither the task that reads it nor the timer has run. Then both become ready at the same moment, and which of them runs first is
//! chance. So when the deadline passes, the store [catches up](Store::catch_up) once, and the call is looked at again before it is given up:
//!
//! ```text
//!   call ──────────────────▶ deadline ──▶ store catches up ──▶ answer there? ──▶ yes: it counts
//!                                                                            └─▶ no:  timed out
//! ```
//!
//! A store that is not starved catches up in microseconds, so a store that hangs still costs the deadline and no more. Where the
//! store's task is starved, this waits for it to be scheduled, but no longer than [`CATCH_UP_MAX`].

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, poll_immediate, select};
use tokio::time::{Sleep, timeout};
use tollgate_core::Store;

/// How long a call waits for the store's own task to be scheduled after the deadline has passed.
const CATCH_UP_MAX: Duration = Duration::from_millis(25);
/// If a deadline is noticed later than this, the process was starved of CPU. Timers tick every millisecond, and waking up
/// takes less than that on a machine with time to spare.
pub(crate) const LATENESS_MAX: Duration = Duration::from_millis(5);

/// Waits for a call to this store until `deadline`. Returns `None` if there is no answer by then.
pub(crate) async fn answer_by<T>(deadline: Sleep, store: &dyn Store, call: impl Future<Output = T>) -> Option<T> {
    let mut call = pin!(call);
    if let Either::Left((answer, _)) = select(call.as_mut(), pin!(deadline)).await {
        return Some(answer);
    }
    let catch_up = async {
        // For stores whose task runs in this runtime.
        tokio::task::yield_now().await;
        store.catch_up().await;
    };
    if let Either::Left((answer, _)) = select(call.as_mut(), pin!(timeout(CATCH_UP_MAX, catch_up))).await {
        return Some(answer);
    }
    // The answer may have come between the two looks of the last poll.
    poll_immediate(call).await
}
