//! A store that may be away: deadline, breaker, remembered denials, local share.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};
use tollgate_core::{
    Check, Clock, Decision, Demand, LimitStatus, MemoryStore, Source, Store, StoreError, StoreErrorKind as Kind,
    Timestamp,
};

use super::stats::{Counters, add};
use super::{catch_panic, is_of, panicked, probing, uncounted};
use crate::breaker::{Breaker, Phase};
use crate::deadline::{LATENESS_MAX, answer_by};
use crate::deny_cache::{CallSpan, DenyCache};
use crate::failure::{FailurePolicy, OnFailure, Unavailable, local_share, local_wait};
use crate::observe::{Observers, StoreCallKind as Call};

const NO_TIMER: &str = "the store can be used only inside a tokio runtime that has a timer";
const NOT_ASKED: &str = "the store is not asked until a probe succeeds";

pub(super) struct Shared {
    store: Arc<dyn Store>,
    local: MemoryStore,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) observers: Observers,
    deny_cache: Option<DenyCache>,
    breaker: Breaker,
    /// The failure that opened the breaker last.
    last_failure: Mutex<Option<Unavailable>>,
    pub(super) deadline: Duration,
    instances: u32,
}

/// What a [`Shared`] is made of.
pub(super) struct SharedParts {
    pub(super) store: Arc<dyn Store>,
    pub(super) local: MemoryStore,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) observers: Observers,
    pub(super) deadline: Duration,
    pub(super) instances: u32,
    pub(super) has_deny_cache: bool,
}

impl Shared {
    pub(super) fn new(parts: SharedParts) -> Shared {
        let SharedParts { store, local, clock, observers, deadline, instances, has_deny_cache } = parts;
        let deny_cache = has_deny_cache.then(DenyCache::default);
        let (breaker, last_failure) = (Breaker::default(), Mutex::default());
        Shared { store, local, clock, observers, deny_cache, breaker, last_failure, deadline, instances }
    }

    /// The memory store that holds this node's shares.
    pub(super) fn local(&self) -> &MemoryStore {
        &self.local
    }

    pub(super) fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub(super) fn breaker(&self) -> &Breaker {
        &self.breaker
    }

    /// Answers what is remembered, asks the store for the rest in one call, and answers what it does not by policy.
    pub(super) async fn check_batch(
        self: &Arc<Self>,
        checks: &[Check<'_>],
        otherwise: FailurePolicy<'_>,
        refundable: bool,
        spent: Duration,
        counters: &Counters,
    ) -> Vec<Result<Decision, Unavailable>> {
        let sent = self.clock.now();
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

        let asked = match self.breaker.lets_ask(sent) {
            Some(phase) => self.ask(&unknown, phase, sent, spent, counters).await,
            None => Err(self.last_failure()),
        };
        let asked = asked.unwrap_or_else(|failure| unknown.iter().map(|_| Err(failure.clone())).collect());
        let call = CallSpan { sent, received: self.clock.now().max(sent) };
        let mut fresh = unknown.iter().zip(asked).map(|(check, asked)| match asked {
            Ok(decision) => {
                if let Some(cache) = cache_for(check) {
                    cache.learn(check, &decision, call);
                }
                Ok(decision)
            }
            Err(failure) => self.degraded(check, otherwise, failure),
        });
        answers.iter_mut().filter(|answer| answer.is_none()).for_each(|answer| *answer = fresh.next());
        answers.into_iter().flatten().collect()
    }

    pub(super) async fn refund(self: &Arc<Self>, check: &Check<'_>, decision: &Decision) -> Result<(), StoreError> {
        match decision.source {
            Source::Store => {
                self.forget(check);
                self.not_open()?;
                let refunded = self.call(Call::Refund, 1, async { self.store.refund(check, decision).await }).await;
                // A denial that was learned while the units were on their way back.
                self.forget(check);
                refunded
            }
            Source::Local => {
                let demands = self.local_demands(check);
                match Check::new(&demands) {
                    Ok(check) => catch_panic(|| self.local.refund(&check, decision)).ok_or_else(panicked),
                    Err(_) => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Charges what was used beyond a decision of that source. The answer is of no interest: it is used already.
    pub(super) async fn charge(&self, check: &Check<'_>, source: Source) -> Result<(), StoreError> {
        match source {
            Source::Store => {
                self.not_open()?;
                let asked = async { self.store.decide(std::slice::from_ref(check)).await };
                self.call(Call::Settle, 1, asked).await.map(drop)
            }
            Source::Local => match self.check_local(check).source {
                Source::Local => Ok(()),
                _ => Err(panicked()),
            },
            _ => Ok(()),
        }
    }

    pub(super) async fn reset(self: &Arc<Self>, demand: &Demand<'_>) -> Result<(), StoreError> {
        let local = Demand { limit: local_share(&demand.limit, self.instances), ..*demand };
        catch_panic(|| self.local.reset(&local));
        let check = Check::one(demand);
        self.forget(&check);
        let reset = self.call(Call::Reset, 0, async { self.store.reset(demand).await }).await;
        self.forget(&check);
        reset
    }

    /// Forgets the denials of these counters.
    fn forget(&self, check: &Check<'_>) {
        if let Some(cache) = &self.deny_cache {
            check.demands().iter().for_each(|demand| cache.forget(demand));
        }
    }

    pub(super) async fn inspect(self: &Arc<Self>, demand: &Demand<'_>) -> Result<LimitStatus, StoreError> {
        self.call(Call::Inspect, 1, async { self.store.inspect(demand).await }).await
    }

    async fn ask(
        self: &Arc<Self>,
        checks: &[Check<'_>],
        phase: Phase,
        sent: Timestamp,
        spent: Duration,
        counters: &Counters,
    ) -> Result<Vec<Result<Decision, Unavailable>>, Unavailable> {
        let deadline = self.deadline.saturating_sub(spent);
        if deadline.is_zero() && !spent.is_zero() {
            return Err(Unavailable::new(Kind::TimedOut, "the deadline passed before the store was called"));
        }
        let Some(call) = self.begin(Call::Decide, checks.len(), deadline, self.decide(checks)) else {
            // The store was not called, so this says nothing about it.
            return Err(Unavailable::new(Kind::Unreachable, NO_TIMER));
        };
        add(&counters.store_calls);
        let begun = Instant::now();
        let error = match call.await {
            Ok(answers) => {
                if self.breaker.succeeded(phase) {
                    self.tell_of_healing();
                }
                let undecided = |error: StoreError| {
                    log_failure(&error, "the store did not decide one of several checks");
                    Unavailable::from(&error)
                };
                return Ok(answers.into_iter().map(|answer| answer.map_err(undecided)).collect());
            }
            Err(error) => error,
        };
        add(&counters.store_failures);
        log_failure(&error, "the store did not decide");
        let failure = Unavailable::from(&error);
        // A deadline that we noticed late says nothing about the store. One that is away is found out all the same: the next error of
        // its connection is not ours.
        let was_starved = begun.elapsed() > deadline + LATENESS_MAX;
        // Nor does a store that did not answer in a part of the deadline.
        let is_inconclusive = error.kind() == Kind::TimedOut && (was_starved || !spent.is_zero());
        if !is_foreign(&error) && !is_inconclusive && self.breaker.failed(phase, sent, self.clock.now()) {
            tracing::warn!(kind = error.kind().name(), %error, "the store is not asked until a probe succeeds");
            *self.last_failure.lock() = Some(failure.clone());
            self.observers.breaker_changed(true);
            probing::start(self);
        }
        Err(failure)
    }

    /// Returns the failure that opened the circuit breaker.
    fn last_failure(&self) -> Unavailable {
        let known = self.last_failure.lock().clone();
        known.unwrap_or_else(|| Unavailable::new(Kind::Unreachable, NOT_ASKED))
    }

    /// The store's answers: one for each check, and in a decision a line for each of its limits. Anything else would let pass what nobody
    /// decided. Where it decided none of them, it has failed.
    pub(super) async fn decide(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let mut answers = self.store.decide_each(checks).await?;
        let is_whole = |(check, answer): (&Check<'_>, &Result<Decision, StoreError>)| {
            answer.as_ref().map_or(true, |decision| is_of(decision, check))
        };
        if answers.len() != checks.len() || !checks.iter().zip(&answers).all(is_whole) {
            return Err(StoreError::new(Kind::Protocol, "the store answered another number of checks or limits"));
        }
        if answers.iter().all(Result::is_err)
            && let Some(Err(error)) = answers.pop()
        {
            return Err(error);
        }
        Ok(answers)
    }

    /// Calls the store, within the deadline and before the eyes of the observers.
    pub(super) async fn call<T>(
        &self,
        kind: Call,
        checks: usize,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let deadline = if kind == Call::Probe { probing::deadline(self.deadline) } else { self.deadline };
        match self.begin(kind, checks, deadline, call) {
            Some(call) => call.await,
            None => Err(StoreError::new(Kind::Unreachable, NO_TIMER)),
        }
    }

    /// The same for who must know whether there was a call at all. `None` where nothing could end it.
    fn begin<T>(
        &self,
        kind: Call,
        checks: usize,
        deadline: Duration,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<impl Future<Output = Result<T, StoreError>>> {
        let call = self.within(deadline, call)?;
        Some(async move {
            let begun = self.observers.begin(&*self.clock);
            let answered = call.await;
            let result = answered.as_ref().map(drop).map_err(StoreError::kind);
            self.observers.store_called(begun, &*self.clock, (kind, checks), result);
            answered
        })
    }

    /// Waits for the store no longer than the deadline; a panic in it is a failure like any other. `None` where nothing could end the wait:
    /// it does not begin.
    fn within<T>(
        &self,
        deadline: Duration,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<impl Future<Output = Result<T, StoreError>>> {
        Handle::try_current().ok()?;
        // In a runtime without timers, making one panics.
        let timer = catch_unwind(|| sleep(deadline)).ok()?;
        let answer = AssertUnwindSafe(answer_by(timer, &*self.store, call)).catch_unwind();
        Some(async {
            match answer.await {
                Ok(Some(answer)) => answer,
                Ok(None) => Err(StoreError::new(Kind::TimedOut, "the store did not answer within the deadline")),
                Err(_panic) => Err(StoreError::new(Kind::Protocol, "the store panicked")),
            }
        })
    }

    /// A store that is known to be away is not asked: its callers would wait for nothing.
    fn not_open(&self) -> Result<(), StoreError> {
        match self.breaker.is_open() {
            true => Err(StoreError::new(Kind::Unreachable, NOT_ASKED)),
            false => Ok(()),
        }
    }

    pub(super) fn tell_of_healing(&self) {
        tracing::info!("the store answers again");
        self.observers.breaker_changed(false);
    }

    /// By this node's share of those limits that say so; those that allow are left out.
    fn degraded(
        &self,
        check: &Check<'_>,
        otherwise: FailurePolicy<'_>,
        failure: Unavailable,
    ) -> Result<Decision, Unavailable> {
        if otherwise.denies(check) {
            return Err(failure);
        }
        let is_local = |(_, word): &(&Demand<'_>, OnFailure)| *word == OnFailure::Local;
        let words = check.demands().iter().zip(otherwise.of_each(check));
        let local: SmallVec<[Demand<'_>; 2]> = words.filter(is_local).map(|(demand, _)| *demand).collect();
        Ok(match Check::new(&local) {
            Ok(local) => self.check_local(&local),
            Err(_none) => uncounted(&*self.clock),
        })
    }

    /// By this node's share of each limit.
    pub(super) fn check_local(&self, check: &Check<'_>) -> Decision {
        let demands = self.local_demands(check);
        let Ok(local) = Check::new(&demands) else { return uncounted(&*self.clock) };
        let Some(mut decision) = catch_panic(|| self.local.check(&local)) else { return uncounted(&*self.clock) };
        decision.source = Source::Local;
        for (demand, line) in check.demands().iter().zip(&mut decision.limits) {
            line.retry_after = local_wait(line.retry_after, demand);
        }
        decision
    }

    /// The demands of a check against this node's share of each limit.
    fn local_demands<'a>(&self, check: &Check<'a>) -> SmallVec<[Demand<'a>; 2]> {
        let share = |demand: &Demand<'a>| Demand { limit: local_share(&demand.limit, self.instances), ..*demand };
        check.demands().iter().map(share).collect()
    }
}

/// Logs the error of a store: a bug in Tollgate as an error, any other failure for debugging.
fn log_failure(error: &StoreError, what: &'static str) {
    match error.kind() {
        Kind::Script => tracing::error!(kind = error.kind().name(), %error, "{what}"),
        _ => tracing::debug!(kind = error.kind().name(), %error, "{what}"),
    }
}

/// A stranger under one key says nothing about the store.
pub(super) fn is_foreign(error: &StoreError) -> bool {
    matches!(error.kind(), Kind::Foreign | Kind::ForeignInPart)
}
