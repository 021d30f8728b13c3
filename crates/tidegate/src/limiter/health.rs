//! The health of each server of a store: a circuit breaker, and the failure that opened it.
//!
//! A store on one server has one breaker. A store on several servers has one for each, so that checks on a server that
//! is down are degraded at once, and all others are unaffected. [`Store::locate`] returns the server of a subject.
//!
//! Breakers are created when a server is first used. Those of servers that have left are dropped when a new one joins.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use tidegate_core::{ShardId, Store, StoreErrorKind};

use super::shared::NOT_ASKED;
use crate::breaker::Breaker;
use crate::failure::Unavailable;

/// The breaker of one server, and the failure that last opened it.
#[derive(Debug, Default)]
pub(super) struct ShardHealth {
    pub(super) id: ShardId,
    pub(super) breaker: Breaker,
    pub(super) last_failure: Mutex<Option<Unavailable>>,
}

impl ShardHealth {
    /// Returns the failure that last opened the circuit breaker, or an error of the kind `Unreachable` if none is
    /// known.
    pub(super) fn last_failure(&self) -> Unavailable {
        let known = self.last_failure.lock().clone();
        known.unwrap_or_else(|| Unavailable::new(StoreErrorKind::Unreachable, NOT_ASKED))
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

    /// Returns the servers whose breakers are open.
    pub(super) fn open_shards(&self) -> Vec<ShardId> {
        let others = self.others.read();
        let all = std::iter::once(&self.first).chain(others.values());
        all.filter(|health| health.breaker.is_open()).map(|health| health.id).collect()
    }

    /// Returns how many times the breakers have opened, in total.
    pub(super) fn times_opened(&self) -> u64 {
        let others: u64 = self.others.read().values().map(|health| health.breaker.times_opened()).sum();
        self.opened_before.load(Ordering::Relaxed) + self.first.breaker.times_opened() + others
    }
}
