//! Statistics of a limiter.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::{Decision, MemoryStore, Source, UsedReceiptStats};

use super::health::Health;
use super::shared::Shared;
use crate::failure::Unavailable;

/// Statistics of a limiter since it was built.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct LimiterStats {
    /// Decisions from all sources, including checks refused as unavailable.
    pub decisions: u64,
    /// Decisions that admitted the request, including uncounted ones.
    pub allowed: u64,
    /// Calls to the shared store for decisions. One call decides one or several checks of a batch. Refunds, resets,
    /// bans and probes are not included.
    pub store_calls: u64,
    /// Calls in `store_calls` that failed or missed the deadline.
    pub store_failures: u64,
    /// Calls in `store_calls` that the store answered within the deadline of a check.
    ///
    /// Calls without a result yet, and later answers to `until_ready`, are neither here nor in `store_failures`.
    pub store_answers: u64,
    /// Denials answered from the deny cache, without a call to the store.
    pub deny_cache_hits: u64,
    /// Decisions made with this instance's share of the quota.
    pub local: u64,
    /// Requests admitted without counting because the store did not answer.
    pub uncounted: u64,
    /// Requests refused because the store did not answer.
    pub unavailable: u64,
    /// Whether the circuit breaker is open, so that decisions do not call the store. With a store on several servers, each
    /// has a breaker, and this is whether any of them is open. Always `false` without a shared store.
    pub breaker_open: bool,
    /// Number of times the circuit breaker has opened; of several, all together.
    pub breaker_opened: u64,
    /// Checks of several subjects on several servers that were refused or failed after a part of them had been charged.
    ///
    /// The charge was refunded. Before the refund, it may have caused other checks to be denied.
    pub split_checks_refunded: u64,
    /// The number of instances among which a quota is divided while the store does not answer: as configured, else the
    /// number of those that share the store, when it was last known. 1 without a shared store.
    pub instances: u32,
    /// Counters in process memory, including expired ones that are not reclaimed yet.
    ///
    /// If there is a shared store, these are the counters of the local shares.
    pub memory_keys: u64,
    /// Counters in process memory that several keys share because there was no room for a new counter.
    pub memory_overflow_keys: u64,
    /// Bytes used by the counters in process memory.
    pub memory_bytes: u64,
    /// The maximum number of bytes for counters in process memory.
    pub memory_max_bytes: u64,
    /// The used receipts in process memory. If there is a shared store, these are the receipts of the local shares.
    pub used_receipts: UsedReceiptStats,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) store_calls: AtomicU64,
    pub(super) store_failures: AtomicU64,
    pub(super) store_answers: AtomicU64,
    pub(super) split_checks_refunded: AtomicU64,
    allowed: AtomicU64,
    denied: AtomicU64,
    deny_cache_hits: AtomicU64,
    local: AtomicU64,
    uncounted: AtomicU64,
    unavailable: AtomicU64,
}

impl Counters {
    /// Counts a decision by its outcome and source, or a check refused as unavailable.
    pub(super) fn count(&self, answer: Result<&Decision, &Unavailable>) {
        let Ok(decision) = answer else { return add(&self.unavailable) };
        add(if decision.allowed() { &self.allowed } else { &self.denied });
        match decision.source {
            Source::DenyCache => add(&self.deny_cache_hits),
            Source::Local => add(&self.local),
            Source::None => add(&self.uncounted),
            _ => {}
        }
    }

    /// Reads the counters, the size of `memory`, and the state of the breakers of a shared store.
    pub(super) fn stats(&self, memory: &MemoryStore, shared: Option<&Shared>) -> LimiterStats {
        let health = shared.map(|shared| &shared.health);
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (allowed, unavailable) = (get(&self.allowed), get(&self.unavailable));
        LimiterStats {
            decisions: allowed + get(&self.denied) + unavailable,
            allowed,
            store_calls: get(&self.store_calls),
            store_failures: get(&self.store_failures),
            store_answers: get(&self.store_answers),
            deny_cache_hits: get(&self.deny_cache_hits),
            local: get(&self.local),
            uncounted: get(&self.uncounted),
            unavailable,
            breaker_open: health.is_some_and(Health::is_any_open),
            breaker_opened: health.map_or(0, Health::times_opened),
            split_checks_refunded: get(&self.split_checks_refunded),
            instances: shared.map_or(1, Shared::instances),
            memory_keys: memory.len() as u64,
            memory_overflow_keys: memory.overflow_len() as u64,
            memory_bytes: memory.bytes_used() as u64,
            memory_max_bytes: memory.max_bytes() as u64,
            used_receipts: memory.used_receipts(),
        }
    }
}

/// Adds one to a counter.
pub(super) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
