//! Who waits behind whom.
//!
//! A hundred jobs wait for the same counter. All were told the same wait; all wake together, one is admitted, and
//! ninety-nine are told the same wait again: a herd that asks n² times and whose winner is chance. A dear job among
//! cheap ones would never be ready, because whatever comes free is taken before there is enough for it.
//!
//! So those who wait in this process for the same counters stand in a queue, first come, first served, and only the
//! first of them asks:
//!
//! ```text
//!   until_ready ─▶ [ 4th  3rd  2nd ]  1st ──asks──▶ denied: 300 ms
//!                    │ wait for the turn, or leave at once if
//!                    ▼ 300 ms is already longer than they would wait
//! ```
//!
//! **Bounded.** A queue exists while somebody stands in it. What is shared by checks that differ (the same global limit under
//! many users) is contended between their queues, as it is between nodes: by a few, not by all.
//!
//! **Why not only jitter?** It spreads the herd but does not thin it, and it lets the luckiest go first.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::pin::pin;
use std::sync::Arc;

use foldhash::quality::RandomState;
use futures_util::future::{Either, select};
use tokio::sync::{Mutex as Turnstile, MutexGuard as Passing, watch};
use tokio::time::{Instant, timeout_at};
use tollgate_core::Check;

/// The queues of one limiter.
#[derive(Default)]
pub(super) struct Turns {
    queues: parking_lot::Mutex<HashMap<u64, Standing, RandomState>>,
    hasher: RandomState,
}

/// A queue, and how many stand in it. Not the count of its references: one that leaves lets go of its own only after the lock.
struct Standing {
    queue: Arc<Queue>,
    count: usize,
}

struct Queue {
    /// Fair: it is passed in the order in which it was reached.
    turnstile: Turnstile<()>,
    /// When the first in the queue will ask again. Nobody behind it is ready earlier.
    asks_at: watch::Sender<Option<Instant>>,
}

impl Turns {
    /// Goes to the end of the queue for the counters of this check.
    pub(super) fn join(&self, check: &Check<'_>) -> Place<'_> {
        let mut hasher = self.hasher.build_hasher();
        for demand in check.demands() {
            // Not the cost: a dear one and a cheap one want the same units.
            demand.key.hash(&mut hasher);
            demand.limit.hash(&mut hasher);
        }
        let id = hasher.finish();
        let empty = || Standing {
            queue: Arc::new(Queue { turnstile: Turnstile::new(()), asks_at: watch::Sender::new(None) }),
            count: 0,
        };
        let mut queues = self.queues.lock();
        let standing = queues.entry(id).or_insert_with(empty);
        standing.count += 1;
        Place { turns: self, id, queue: standing.queue.clone() }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.queues.lock().len()
    }
}

/// A place in a queue.
pub(super) struct Place<'t> {
    turns: &'t Turns,
    id: u64,
    queue: Arc<Queue>,
}

impl Place<'_> {
    /// Waits until nobody stands in front; `None` if that would be later than the deadline.
    pub(super) async fn turn(&self, deadline: Instant) -> Option<Turn<'_>> {
        let mut asks_at = self.queue.asks_at.subscribe();
        let too_late = async {
            // The sender lives as long as the queue that we stand in.
            let _ = asks_at.wait_for(|asks_at| asks_at.is_some_and(|at| at > deadline)).await;
        };
        let (passing, too_late) = (pin!(self.queue.turnstile.lock()), pin!(too_late));
        match timeout_at(deadline, select(passing, too_late)).await {
            Ok(Either::Left((passing, _))) => Some(Turn { queue: &self.queue, _passing: passing }),
            Ok(Either::Right(_)) | Err(_) => None,
        }
    }

    /// When whoever stands in front asks again, if that is known.
    pub(super) fn front_asks_at(&self) -> Option<Instant> {
        *self.queue.asks_at.borrow()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut queues = self.turns.queues.lock();
        if let Some(standing) = queues.get_mut(&self.id) {
            standing.count -= 1;
            if standing.count == 0 {
                queues.remove(&self.id);
            }
        }
    }
}

/// The first place of a queue, until it is dropped.
pub(super) struct Turn<'q> {
    queue: &'q Queue,
    _passing: Passing<'q, ()>,
}

impl Turn<'_> {
    /// Tells those behind when it will ask again.
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
    use tollgate_core::{Demand, Key, Limit};

    #[test]
    fn the_last_who_leaves_takes_the_queue_along_even_if_another_has_not_quite_let_go() {
        let turns = Turns::default();
        let limit: Limit = "1/s".parse().unwrap();
        let demand = Demand::new(limit, Key::new("a").unwrap());
        let check = Check::one(&demand);
        let (first, second) = (turns.join(&check), turns.join(&check));
        // As one does that has left on another thread, a moment ago.
        let not_quite_let_go = first.queue.clone();
        drop(first);
        assert_eq!(turns.len(), 1, "somebody stands in it");
        drop(second);
        assert_eq!(turns.len(), 0);
        drop(not_quite_let_go);
    }
}
