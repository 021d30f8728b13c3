//! Fair queues for checks that wait for the same counters.
//!
//! Suppose that a hundred jobs wait for the same counter. All get the same `retry_after` and wake together; one is
//! admitted, and ninety-nine get the same wait again. The store is asked n² times, and chance picks the winner. A job
//! with a high cost among jobs with low costs would starve, because these take every unit as it becomes available.
//!
//! So the checks of this process that wait for the same counters form a first-in, first-out queue, and only the first
//! one asks the store:
//!
//! ```text
//!   until_ready ─▶ [ 4th  3rd  2nd ]  1st ──asks──▶ denied: 300 ms
//!                    │ wait for their turn, or give up at once if
//!                    ▼ their deadline is earlier than in 300 ms
//! ```
//!
//! **Bounded.** A queue exists only while a check waits in it. Checks that share only some counters (the same global
//! limit for many users) are in different queues and contend for the shared counters, as instances do. That contention
//! is between the first of each queue, not between all waiting checks.
//!
//! **Why not only jitter?** Jitter spreads the calls but does not reduce their number, and the order stays random.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::pin::pin;
use std::sync::Arc;

use foldhash::quality::RandomState;
use futures_util::future::{Either, select};
use tidegate_core::Check;
use tokio::sync::{Mutex as FairMutex, MutexGuard as FairMutexGuard, watch};
use tokio::time::{Instant, timeout_at};

/// The queues of a limiter, one for each combination of counters for which checks wait.
#[derive(Default)]
pub(super) struct FairQueues {
    queues: parking_lot::Mutex<HashMap<u64, CountedQueue, RandomState>>,
    hasher: RandomState,
}

/// A queue and the number of positions in it.
///
/// The count is not that of the `Arc`: a dropped position releases its reference only after it has released the lock.
struct CountedQueue {
    queue: Arc<Queue>,
    count: usize,
}

struct Queue {
    /// Held by the first in the queue. The lock is fair: waiters get it in the order of their arrival.
    front: FairMutex<()>,
    /// The time at which the first in the queue will ask again, if known. No check behind it is ready earlier.
    asks_at: watch::Sender<Option<Instant>>,
}

impl FairQueues {
    /// Appends a position to the queue for the counters of this check, and creates the queue if there is none.
    ///
    /// Checks with the same keys and limits in the same order share a queue, whatever their costs. Dropping the
    /// position removes it from the queue.
    pub(super) fn join(&self, check: &Check<'_>) -> QueuePosition<'_> {
        let mut hasher = self.hasher.build_hasher();
        for demand in check.demands() {
            // The cost is left out: checks with different costs compete for the same units.
            demand.key.hash(&mut hasher);
            demand.limit.hash(&mut hasher);
        }
        let id = hasher.finish();
        let empty = || CountedQueue {
            queue: Arc::new(Queue { front: FairMutex::new(()), asks_at: watch::Sender::new(None) }),
            count: 0,
        };
        let mut queues = self.queues.lock();
        let counted = queues.entry(id).or_insert_with(empty);
        counted.count += 1;
        QueuePosition { queues: self, id, queue: counted.queue.clone() }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.queues.lock().len()
    }
}

/// A position in a queue. Dropping it removes it.
pub(super) struct QueuePosition<'q> {
    queues: &'q FairQueues,
    id: u64,
    queue: Arc<Queue>,
}

impl QueuePosition<'_> {
    /// Waits until this position is the first in the queue. Positions get there in the order in which they first wait.
    ///
    /// Returns `None` at the deadline, or earlier once the first in the queue is known to check again only after the
    /// deadline. If the future is dropped, a later call waits behind all others. Panics outside a tokio runtime with a
    /// timer.
    pub(super) async fn turn(&self, deadline: Instant) -> Option<Turn<'_>> {
        let mut asks_at = self.queue.asks_at.subscribe();
        let too_late = async {
            // The sender lives as long as the queue, which this position keeps alive.
            let _ = asks_at.wait_for(|asks_at| asks_at.is_some_and(|at| at > deadline)).await;
        };
        let (front, too_late) = (pin!(self.queue.front.lock()), pin!(too_late));
        match timeout_at(deadline, select(front, too_late)).await {
            Ok(Either::Left((front, _))) => Some(Turn { queue: &self.queue, _front: front }),
            Ok(Either::Right(_)) | Err(_) => None,
        }
    }

    /// Returns when the first in the queue will check again, or `None` if that is not known.
    pub(super) fn front_asks_at(&self) -> Option<Instant> {
        *self.queue.asks_at.borrow()
    }
}

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        let mut queues = self.queues.queues.lock();
        if let Some(counted) = queues.get_mut(&self.id) {
            counted.count -= 1;
            if counted.count == 0 {
                queues.remove(&self.id);
            }
        }
    }
}

/// The turn of the first position in a queue.
///
/// Dropping it withdraws the time of [`Turn::asks_again_at`] and gives the turn to the next position.
pub(super) struct Turn<'q> {
    queue: &'q Queue,
    _front: FairMutexGuard<'q, ()>,
}

impl Turn<'_> {
    /// Announces to the positions behind when this one will check again. Those whose deadline is earlier stop waiting.
    pub(super) fn asks_again_at(&self, at: Instant) {
        self.queue.asks_at.send_replace(Some(at));
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.queue.asks_at.send_replace(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::{Demand, Key, Limit};

    #[test]
    fn last_position_removes_the_queue_even_while_another_reference_exists() {
        let queues = FairQueues::default();
        let limit: Limit = "1/s".parse().unwrap();
        let demand = Demand::new(limit, Key::new("a").unwrap());
        let check = Check::one(&demand);
        let (first, second) = (queues.join(&check), queues.join(&check));
        // Stands for a position that another thread is dropping: it has released the lock, but not its reference.
        let other_reference = first.queue.clone();
        drop(first);
        assert_eq!(queues.len(), 1, "one position is left");
        drop(second);
        assert_eq!(queues.len(), 0);
        drop(other_reference);
    }
}
