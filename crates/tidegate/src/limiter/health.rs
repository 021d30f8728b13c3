//! The health of each server of a store: a circuit breaker, the failure that opened it, and whether probes are answered.
//!
//! A store on one server has one breaker. A store on several servers has one for each, so that checks on a server that
//! is down are degraded at once, and all others are unaffected. [`Store::locate`] returns the server of a subject.
//!
//! Breakers are created when a server is first used. Those of servers that have left are dropped when a new one joins.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use tidegate_core::{ShardId, Store, StoreError, StoreErrorKind};

use super::store_calls::NOT_ASKED;
use crate::breaker::Breaker;
use crate::failure::Unavailable;

/// The number of probes in a row without an answer after which a server counts as unreachable. A single one may be a
/// blip.
const UNREACHABLE_AFTER: u32 = 2;

/// The health of one server.
#[derive(Debug, Default)]
pub(super) struct ShardHealth {
    pub(super) id: ShardId,
    pub(super) breaker: Breaker,
    /// The failure that last opened the breaker.
    pub(super) last_failure: Mutex<Option<Unavailable>>,
    /// The number of further probes without an answer until the server counts as unreachable. 0 before its first answer.
    misses_left: AtomicU32,
    /// Whether the last probe has shown that the server cannot be used as the store.
    is_unsupported: AtomicBool,
}

impl ShardHealth {
    /// Returns the failure that last opened the circuit breaker, or an error of the kind `Unreachable` if none is
    /// known.
    pub(super) fn last_failure(&self) -> Unavailable {
        let known = self.last_failure.lock().clone();
        known.unwrap_or_else(|| Unavailable::new(StoreErrorKind::Unreachable, NOT_ASKED))
    }

    /// Records the failure that has opened the breaker. The server counts as unreachable until it answers a probe.
    pub(super) fn opened(&self, failure: &Unavailable) {
        *self.last_failure.lock() = Some(failure.clone());
        self.misses_left.store(0, Ordering::Relaxed);
    }

    /// Records the result of a probe. Logs an error if it is the first that shows that the server cannot be used.
    pub(super) fn probed(&self, result: &Result<(), StoreError>) {
        let misses_left = match result {
            Ok(()) => UNREACHABLE_AFTER,
            Err(_) => self.misses_left.load(Ordering::Relaxed).saturating_sub(1),
        };
        self.misses_left.store(misses_left, Ordering::Relaxed);
        let unsupported = result.as_ref().err().filter(|error| error.kind() == StoreErrorKind::Unsupported);
        let was_unsupported = self.is_unsupported.swap(unsupported.is_some(), Ordering::Relaxed);
        if let Some(error) = unsupported.filter(|_| !was_unsupported) {
            tracing::error!(%error, "the store cannot be used");
        }
    }

    /// Returns whether the server answers: its breaker is closed, and one of the last two probes was answered.
    pub(super) fn is_reachable(&self) -> bool {
        !self.breaker.is_open() && self.misses_left.load(Ordering::Relaxed) > 0
    }
}

/// The health of all servers of a store.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// The health of shard 0: the only server of a store, or the unknown owner of some counters.
    first: Arc<ShardHealth>,
    others: RwLock<HashMap<ShardId, Arc<ShardHealth>>>,
    /// How many times breakers that have since been dropped had opened.
    opened_before: AtomicU64,
}

impl Health {
    /// Returns the health of a server of `store`. A new server has a closed breaker.
    pub(super) fn of(&self, id: ShardId, store: &dyn Store) -> Arc<ShardHealth> {
        if id == self.first.id {
            return self.first.clone();
        }
        if let Some(known) = self.others.read().get(&id) {
            return known.clone();
        }
        let shards = store.shards();
        let mut others = self.others.write();
        others.retain(|known, health| {
            let is_kept = shards.iter().any(|shard| shard.id == *known);
            if !is_kept {
                self.opened_before.fetch_add(health.breaker.times_opened(), Ordering::Relaxed);
            }
            is_kept
        });
        others.entry(id).or_insert_with(|| Arc::new(ShardHealth { id, ..ShardHealth::default() })).clone()
    }

    /// Returns whether the breaker of any server is open.
    pub(super) fn is_any_open(&self) -> bool {
        self.first.breaker.is_open() || self.others.read().values().any(|health| health.breaker.is_open())
    }

    /// Returns the health of all servers of `store`; that of the server 0 while none is known.
    pub(super) fn of_all(&self, store: &dyn Store) -> Vec<Arc<ShardHealth>> {
        let shards = store.shards();
        if shards.is_empty() {
            return vec![self.first.clone()];
        }
        shards.into_iter().map(|shard| self.of(shard.id, store)).collect()
    }

    /// Returns how many times the breakers have opened, in total.
    pub(super) fn times_opened(&self) -> u64 {
        let others: u64 = self.others.read().values().map(|health| health.breaker.times_opened()).sum();
        self.opened_before.load(Ordering::Relaxed) + self.first.breaker.times_opened() + others
    }
}
