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
    queues: parking_lot::Mutex<HashMap<u64, Arc<Queue>, RandomState>>,
    hasher: RandomState,
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
        let empty = || Arc::new(Queue { turnstile: Turnstile::new(()), asks_at: watch::Sender::new(None) });
        let queue = self.queues.lock().entry(id).or_insert_with(empty).clone();
        Place { turns: self, id, queue }
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
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut queues = self.turns.queues.lock();
        // One is the map's and one ours: nobody else stands here, and nobody can come while the map is locked.
        if Arc::strong_count(&self.queue) == 2 {
            queues.remove(&self.id);
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
