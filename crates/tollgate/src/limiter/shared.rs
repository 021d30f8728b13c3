//! A store that may be away: deadline, breaker, remembered denials, local share.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use foldhash::quality::RandomState;
use futures_util::FutureExt;
use smallvec::SmallVec;
use std::hash::BuildHasher;
use tokio::runtime::Handle;
use tollgate_core::{
    Check, Clock, Decision, Demand, Key, Limit, Line, MemoryStore, Source, Store, StoreError, StoreErrorKind,
    StoreFuture,
};

use super::stats::{Counters, add};
use super::uncounted;
use crate::breaker::{Breaker, probe_after};
use crate::deny_cache::DenyCache;
use crate::failure::{OnFailure, Unavailable, local_share};

/// A probe may take longer than a decision: nobody waits for it.
const PROBE_DEADLINE_MIN: Duration = Duration::from_millis(250);
/// What a probe spends: one unit of a limit that nobody can exhaust, so that it writes like a decision does.
const PROBE_SUBJECT: &str = "tollgate-probe";
const PROBE_LIMIT: &str = "10000000/s token-bucket";

pub(super) struct Shared {
    store: Arc<dyn Store>,
    local: MemoryStore,
    deny_cache: Option<DenyCache>,
    breaker: Breaker,
    deadline: Duration,
    instances: u32,
}

impl Shared {
    pub(super) fn new(
        store: Arc<dyn Store>,
        local: MemoryStore,
        deadline: Duration,
        instances: u32,
        deny_cache: bool,
    ) -> Shared {
        let deny_cache = deny_cache.then(DenyCache::default);
        Shared { store, local, deny_cache, breaker: Breaker::default(), deadline, instances }
    }

    pub(super) fn breaker(&self) -> &Breaker {
        &self.breaker
    }

    /// Answers what is remembered, asks the store for the rest in one call, and answers what it does not by policy.
    pub(super) async fn check_batch(
        self: &Arc<Self>,
        checks: &[Check<'_>],
        on_failure: OnFailure,
        refundable: bool,
        clock: &dyn Clock,
        counters: &Counters,
    ) -> Vec<Result<Decision, Unavailable>> {
        let sent = clock.now();
        let cache_for = |check: &Check<'_>| {
            let lasts = !refundable && !check.demands().iter().any(|demand| demand.limit.count_denied());
            self.deny_cache.as_ref().filter(|_| lasts)
        };
        let recall = |check: &Check<'_>| cache_for(check).and_then(|cache| cache.recall(check, sent)).map(Ok);
        let mut answers: Vec<Option<Result<Decision, Unavailable>>> = checks.iter().map(recall).collect();
        let unknown: SmallVec<[Check<'_>; 1]> =
            checks.iter().zip(&answers).filter(|(_, answer)| answer.is_none()).map(|(check, _)| *check).collect();
        if unknown.is_empty() {
            return answers.into_iter().flatten().collect();
        }

        let asked = match self.breaker.is_open() {
            true => Err(StoreErrorKind::Unreachable),
            false => self.ask(&unknown, counters).await,
        };
        let fresh: Vec<Result<Decision, Unavailable>> = match asked {
            Ok(decisions) => {
                for (check, decision) in unknown.iter().zip(&decisions) {
                    if let Some(cache) = cache_for(check) {
                        cache.learn(check, decision, sent);
                    }
                }
                decisions.into_iter().map(Ok).collect()
            }
            Err(kind) => unknown.iter().map(|check| self.degraded(check, on_failure, kind, clock)).collect(),
        };
        let mut fresh = fresh.into_iter();
        answers.iter_mut().filter(|answer| answer.is_none()).for_each(|answer| *answer = fresh.next());
        answers.into_iter().flatten().collect()
    }

    pub(super) async fn refund(self: &Arc<Self>, check: &Check<'_>, decision: &Decision) -> Result<(), StoreError> {
        match decision.source {
            Source::Store => {
                if let Some(cache) = &self.deny_cache {
                    check.demands().iter().for_each(|demand| cache.forget(demand));
                }
                self.within_deadline(self.store.refund(check, decision)).await
            }
            Source::Local => {
                let demands = self.local_demands(check);
                if let Ok(check) = Check::new(&demands) {
                    self.local.refund(&check, decision);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn reset(self: &Arc<Self>, demand: &Demand<'_>) -> Result<(), StoreError> {
        self.local.reset(&Demand { limit: local_share(&demand.limit, self.instances), ..*demand });
        if let Some(cache) = &self.deny_cache {
            cache.forget(demand);
        }
        self.within_deadline(self.store.reset(demand)).await
    }

    pub(super) async fn inspect(self: &Arc<Self>, demand: &Demand<'_>) -> Result<Line, StoreError> {
        self.within_deadline(self.store.inspect(demand)).await
    }

    async fn ask(self: &Arc<Self>, checks: &[Check<'_>], counters: &Counters) -> Result<Vec<Decision>, StoreErrorKind> {
        add(&counters.store_calls);
        let answered = self.within_deadline(self.store.decide(checks)).await;
        let error = match answered {
            Ok(decisions) if decisions.len() == checks.len() => {
                self.breaker.succeeded();
                return Ok(decisions);
            }
            Ok(_) => StoreError::new(StoreErrorKind::Protocol, "the store answered another number of checks"),
            Err(error) => error,
        };
        add(&counters.store_failures);
        tracing::debug!(kind = error.kind().name(), %error, "the store did not answer");
        // A stranger under one key says nothing about the store.
        if error.kind() != StoreErrorKind::Foreign && self.breaker.failed() {
            tracing::warn!(kind = error.kind().name(), "the store is not asked until a probe succeeds");
            self.start_probing();
        }
        Err(error.kind())
    }

    async fn within_deadline<T>(&self, call: StoreFuture<'_, T>) -> Result<T, StoreError> {
        within(self.deadline, call).await
    }

    fn degraded(
        &self,
        check: &Check<'_>,
        on_failure: OnFailure,
        kind: StoreErrorKind,
        clock: &dyn Clock,
    ) -> Result<Decision, Unavailable> {
        match on_failure {
            OnFailure::Deny => Err(Unavailable::new(kind)),
            OnFailure::Allow => Ok(uncounted(clock)),
            OnFailure::Local => Ok(self.check_local(check, clock)),
        }
    }

    /// By this node's share of each limit.
    pub(super) fn check_local(&self, check: &Check<'_>, clock: &dyn Clock) -> Decision {
        let demands = self.local_demands(check);
        let decided = Check::new(&demands).map(|check| self.local.check(&check));
        decided.map_or_else(|_| uncounted(clock), |decision| Decision { source: Source::Local, ..decision })
    }

    /// The demands of a check against this node's share of each limit.
    fn local_demands<'a>(&self, check: &Check<'a>) -> SmallVec<[Demand<'a>; 2]> {
        let share = |demand: &Demand<'a>| Demand { limit: local_share(&demand.limit, self.instances), ..*demand };
        check.demands().iter().map(share).collect()
    }

    fn start_probing(self: &Arc<Self>) {
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(probe_until_healed(Arc::downgrade(self)))),
            // Without a runtime there is nobody to probe: the next caller is the probe.
            Err(_) => self.breaker.close(),
        }
    }
}

/// Asks the store every now and then until it answers, then closes the breaker. Ends with the limiter.
async fn probe_until_healed(shared: Weak<Shared>) {
    let jitter = RandomState::default();
    for attempt in 0_u32.. {
        let jitter = jitter.hash_one(attempt) as f64 / u64::MAX as f64;
        tokio::time::sleep(probe_after(attempt, jitter)).await;
        let Some(shared) = shared.upgrade() else { return };
        if probe(&shared).await.is_ok() {
            shared.breaker.close();
            tracing::info!("the store answers again");
            return;
        }
    }
}

async fn probe(shared: &Shared) -> Result<(), StoreError> {
    let limit: Limit = PROBE_LIMIT.parse().expect("a valid limit");
    let demand = Demand::new(limit, Key::new(PROBE_SUBJECT).expect("a short key"));
    let check = Check::one(&demand);
    let deadline = shared.deadline.max(PROBE_DEADLINE_MIN);
    within(deadline, shared.store.decide(std::slice::from_ref(&check))).await.map(drop)
}

/// Waits for a store no longer than the deadline; a panic in it is a failure like any other.
async fn within<T>(deadline: Duration, call: StoreFuture<'_, T>) -> Result<T, StoreError> {
    match tokio::time::timeout(deadline, AssertUnwindSafe(call).catch_unwind()).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_panic)) => Err(StoreError::new(StoreErrorKind::Protocol, "the store panicked")),
        Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, "the store did not answer within the deadline")),
    }
}
