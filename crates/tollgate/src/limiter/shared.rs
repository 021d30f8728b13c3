//! A shared store, which may not answer: deadline, circuit breaker, deny cache, local share.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::Instant;
use tollgate_core::{
    Check, Clock, Cost, Decision, Demand, LimitStatus, MemoryStore, ReceiptId, Redeemed, Source, Store, StoreError,
    StoreErrorKind as Kind, Timestamp, Wait,
};

use super::settle::Difference;
use super::stats::{Counters, add};
use super::{EachDecision, catch_panic, has_status_per_limit, panicked, probing, redeem_in_memory};
use crate::breaker::{Breaker, Phase};
use crate::deadline::{LATENESS_MAX, answer_by, timer};
use crate::deny_cache::{CallSpan, DenyCache};
use crate::failure::{FailurePolicy, OnFailure, Unavailable, local_share, local_wait};
use crate::observe::{Observers, StoreCallKind as Call};

const NO_TIMER: &str = "the store can be used only inside a tokio runtime with time enabled";
const NOT_ASKED: &str = "the store is not called until a probe succeeds";

/// A shared store with its deadline, circuit breaker and deny cache, and this instance's shares of the limits.
pub(super) struct Shared {
    store: Arc<dyn Store>,
    local: MemoryStore,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) observers: Observers,
    deny_cache: Option<DenyCache>,
    breaker: Breaker,
    /// The failure that opened the breaker last.
    last_failure: Mutex<Option<Unavailable>>,
    pub(super) deadlines: Deadlines,
    instances: u32,
}

/// The parts of which [`Shared::new`] makes a [`Shared`].
pub(super) struct SharedParts {
    pub(super) store: Arc<dyn Store>,
    pub(super) local: MemoryStore,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) observers: Observers,
    pub(super) deadlines: Deadlines,
    pub(super) instances: u32,
    pub(super) has_deny_cache: bool,
}

/// The deadlines for an answer of the store.
#[derive(Clone, Copy)]
pub(super) struct Deadlines {
    /// For checks, and for all calls that are no decision.
    pub(super) check: Duration,
    /// For the checks of [`Limiter::until_ready`](super::Limiter::until_ready).
    pub(super) ready: Duration,
}

/// The time in which the store has to decide checks.
#[derive(Clone, Copy)]
pub(super) enum TimeBudget {
    /// The deadline of checks, less the part `spent` that the caller has used already.
    Check { spent: Duration },
    /// The deadline of [`Limiter::until_ready`](super::Limiter::until_ready).
    Ready,
}

impl TimeBudget {
    /// The whole deadline of checks.
    pub(super) const CHECK: TimeBudget = TimeBudget::Check { spent: Duration::ZERO };

    /// Returns the time that is left for the call to the store, or `None` if the caller has used all of it.
    fn left(self, deadlines: &Deadlines) -> Option<Duration> {
        match self {
            TimeBudget::Check { spent: Duration::ZERO } => Some(deadlines.check),
            TimeBudget::Check { spent } => deadlines.check.checked_sub(spent).filter(|left| !left.is_zero()),
            TimeBudget::Ready => Some(deadlines.ready),
        }
    }
}

impl Shared {
    pub(super) fn new(parts: SharedParts) -> Shared {
        let SharedParts { store, local, clock, observers, deadlines, instances, has_deny_cache } = parts;
        let deny_cache = has_deny_cache.then(DenyCache::default);
        let (breaker, last_failure) = (Breaker::default(), Mutex::default());
        Shared { store, local, clock, observers, deny_cache, breaker, last_failure, deadlines, instances }
    }

    /// Returns the memory store that holds this instance's shares.
    pub(super) fn local(&self) -> &MemoryStore {
        &self.local
    }

    pub(super) fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub(super) fn breaker(&self) -> &Breaker {
        &self.breaker
    }

    /// Decides the checks by the deny cache, else by one call to the store, else by the failure policy. Returns one
    /// result per check, in order.
    ///
    /// `refundable` checks, and those with `count_denied`, do not use the deny cache. `budget` is the time
    /// that a call to the store may take. Calls to the store are counted in `counters`, decisions are not.
    pub(super) async fn check_batch(
        self: &Arc<Self>,
        checks: &[Check<'_>],
        policy: FailurePolicy<'_>,
        refundable: bool,
        budget: TimeBudget,
        counters: &Counters,
    ) -> Vec<Result<EachDecision, Unavailable>> {
        let sent = self.clock.now();
        let cache_for = |check: &Check<'_>| {
            let lasts = !refundable && !check.demands().iter().any(|demand| demand.limit.count_denied());
            self.deny_cache.as_ref().filter(|_| lasts)
        };
        let recall = |check: &Check<'_>| cache_for(check).and_then(|cache| cache.recall(check, sent));
        let recalled = checks.iter().map(|check| recall(check).map(|decision| Ok(EachDecision::Complete(decision))));
        let mut answers: Vec<Option<Result<EachDecision, Unavailable>>> = recalled.collect();
        let unknown: SmallVec<[Check<'_>; 1]> =
            checks.iter().zip(&answers).filter(|(_, answer)| answer.is_none()).map(|(check, _)| *check).collect();
        if unknown.is_empty() {
            return answers.into_iter().flatten().collect();
        }

        let asked = match self.breaker.admit_call(sent) {
            Some(phase) => self.ask_store(&unknown, phase, sent, budget, counters).await,
            None => Err(self.last_failure()),
        };
        let asked = asked.unwrap_or_else(|failure| unknown.iter().map(|_| Err(failure.clone())).collect());
        let call = CallSpan { sent, received: self.clock.now().max(sent) };
        let mut fresh = unknown.iter().zip(asked).map(|(check, asked)| match asked {
            Ok(decision) => {
                if let Some(cache) = cache_for(check) {
                    cache.learn(check, &decision, call);
                }
                Ok(EachDecision::Complete(decision))
            }
            Err(failure) => self.degraded(check, policy, failure),
        });
        answers.iter_mut().filter(|answer| answer.is_none()).for_each(|answer| *answer = fresh.next());
        answers.into_iter().flatten().collect()
    }

    /// Refunds a decision in the store or, for [`Source::Local`], in the local share. Other sources refund nothing.
    ///
    /// A refund in the store removes the counters of the check from the deny cache, and fails at once while the breaker
    /// is open. One in the local share fails only if the memory store panics.
    pub(super) async fn refund(self: &Arc<Self>, check: &Check<'_>, decision: &Decision) -> Result<(), StoreError> {
        match decision.source {
            Source::Store => {
                self.forget(check);
                self.fail_if_open()?;
                let refunded = self.call(Call::Refund, 1, async { self.store.refund(check, decision).await }).await;
                // Forgets a denial that was cached during the refund.
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

    /// Charges `check`, which holds the units that were used beyond a decision of this source.
    ///
    /// Its limits must have `count_denied`, so that they are charged whether or not they fit. Does nothing for a source
    /// other than the store and the local share. A charge in the store fails at once while the breaker is open.
    pub(super) async fn charge(&self, check: &Check<'_>, source: Source) -> Result<(), StoreError> {
        match source {
            Source::Store => {
                self.fail_if_open()?;
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

    /// Corrects the charge of a decision in the store or, for [`Source::Local`], in the local share, once for all calls
    /// with this `id`. Other sources charged nothing.
    ///
    /// The deny cache and the breaker are used as in [`Shared::refund`].
    pub(super) async fn redeem(
        self: &Arc<Self>,
        id: ReceiptId,
        check: &Check<'_>,
        decision: &Decision,
        actual: &[Cost],
    ) -> Result<Redeemed, StoreError> {
        match decision.source {
            Source::Store => {
                let Some(difference) = Difference::between(check, decision, actual) else { return Ok(Redeemed::Done) };
                let redemption = difference.redemption(id);
                self.forget(check);
                self.fail_if_open()?;
                let redeemed = self.call(Call::Settle, 1, async { self.store.redeem(&redemption).await }).await;
                // Forgets a denial that was cached during the redemption.
                self.forget(check);
                redeemed
            }
            Source::Local => match Check::new(&self.local_demands(check)) {
                Ok(check) => redeem_in_memory(&self.local, id, &check, decision, actual),
                Err(_) => Ok(Redeemed::Done),
            },
            _ => Ok(Redeemed::Done),
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

    pub(super) async fn ban(&self, subject: &[u8], duration: Option<Duration>) -> Result<(), StoreError> {
        self.forget_ban(subject);
        let banned = self.call(Call::Ban, 0, async { self.store.ban(subject, duration).await }).await;
        self.forget_ban(subject);
        banned
    }

    pub(super) async fn unban(&self, subject: &[u8]) -> Result<bool, StoreError> {
        self.forget_ban(subject);
        let was_banned = self.call(Call::Ban, 0, async { self.store.unban(subject).await }).await;
        // Forgets a ban that was cached during the call.
        self.forget_ban(subject);
        was_banned
    }

    pub(super) async fn ban_of(&self, subject: &[u8]) -> Result<Option<Wait>, StoreError> {
        self.call(Call::Ban, 0, async { self.store.ban_of(subject).await }).await
    }

    /// Removes the ban on a subject from the deny cache.
    fn forget_ban(&self, subject: &[u8]) {
        self.deny_cache.iter().for_each(|cache| cache.forget_ban(subject));
    }

    /// Removes the counters of a check from the deny cache.
    fn forget(&self, check: &Check<'_>) {
        if let Some(cache) = &self.deny_cache {
            check.demands().iter().for_each(|demand| cache.forget(demand));
        }
    }

    pub(super) async fn inspect(self: &Arc<Self>, demand: &Demand<'_>) -> Result<LimitStatus, StoreError> {
        self.call(Call::Inspect, 1, async { self.store.inspect(demand).await }).await
    }

    /// Calls the store for decisions, within `budget`, and reports the result to the breaker.
    ///
    /// `phase` is the breaker's phase that admitted the call, `sent` the current time. Returns one result per check, in
    /// order. A failure that opens the breaker is logged, and starts the probe. Timeouts of a shortened deadline, or of
    /// a process that was short of CPU time, and foreign data under a key do not count against the store. If the future
    /// is dropped before it completes, nothing is reported to the breaker.
    ///
    /// # Errors
    /// Returns an error if the call failed for all checks, or was not made: nothing is left of the deadline, or there
    /// is no tokio timer.
    async fn ask_store(
        self: &Arc<Self>,
        checks: &[Check<'_>],
        phase: Phase,
        sent: Timestamp,
        budget: TimeBudget,
        counters: &Counters,
    ) -> Result<Vec<Result<Decision, Unavailable>>, Unavailable> {
        let Some(deadline) = budget.left(&self.deadlines) else {
            return Err(Unavailable::new(Kind::TimedOut, "the deadline passed before the store was called"));
        };
        let Some(call) = self.begin(Call::Decide, checks.len(), deadline, self.decide(checks)) else {
            // The store was not called, so this says nothing about it.
            return Err(Unavailable::new(Kind::Unreachable, NO_TIMER));
        };
        add(&counters.store_calls);
        let begun = Instant::now();
        let error = match call.await {
            Ok(answers) => {
                // An answer that only `until_ready` could wait for does not show that checks would get one in time.
                let is_in_time = deadline <= self.deadlines.check || begun.elapsed() <= self.deadlines.check;
                if is_in_time {
                    add(&counters.store_answers);
                }
                if is_in_time && self.breaker.succeeded(phase) {
                    self.report_recovery();
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
        // A deadline that this process noticed late says nothing about the store. If the store is down, the next error
        // of the connection opens the breaker.
        let was_starved = begun.elapsed() > deadline + LATENESS_MAX;
        // Nor does a store that did not answer in a part of the deadline.
        let was_shortened = deadline < self.deadlines.check;
        let is_inconclusive = error.kind() == Kind::TimedOut && (was_starved || was_shortened);
        if !is_foreign(&error) && !is_inconclusive && self.breaker.failed(phase, sent, self.clock.now()) {
            tracing::warn!(kind = error.kind().as_str(), %error, "the store is not called until a probe succeeds");
            *self.last_failure.lock() = Some(failure.clone());
            self.observers.breaker_changed(true);
            probing::start(self);
        }
        Err(failure)
    }

    /// Returns the failure that opened the circuit breaker last, or an error of the kind `Unreachable` if none is
    /// known.
    fn last_failure(&self) -> Unavailable {
        let known = self.last_failure.lock().clone();
        known.unwrap_or_else(|| Unavailable::new(Kind::Unreachable, NOT_ASKED))
    }

    /// Calls the store and validates its reply: one result per check, and one status per limit of each check.
    ///
    /// Without that, a limit that the store did not decide would pass.
    ///
    /// # Errors
    /// Returns the error of the call, or an error of the kind `Protocol` if the reply is not valid. If every result is
    /// an error, returns one of them.
    pub(super) async fn decide(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let mut answers = self.store.decide_each(checks).await?;
        let is_whole = |(check, answer): (&Check<'_>, &Result<Decision, StoreError>)| {
            answer.as_ref().map_or(true, |decision| has_status_per_limit(decision, check))
        };
        if answers.len() != checks.len() || !checks.iter().zip(&answers).all(is_whole) {
            return Err(StoreError::new(Kind::Protocol, "the store returned the wrong number of results"));
        }
        if answers.iter().all(Result::is_err)
            && let Some(Err(error)) = answers.pop()
        {
            return Err(error);
        }
        Ok(answers)
    }

    /// Awaits a call to the store, at most for the deadline of its kind and up to 25 ms more, and reports it to the
    /// observers.
    ///
    /// `checks` is the number of checks that is reported. The breaker is neither consulted nor changed. If the future
    /// is dropped before it completes, nothing is reported.
    ///
    /// # Errors
    /// Returns the error of the call; or one of the kind `TimedOut` after the deadline, `Protocol` for a panic, or
    /// `Unreachable` without a tokio timer.
    pub(super) async fn call<T>(
        &self,
        kind: Call,
        checks: usize,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let deadline = if kind == Call::Probe { probing::deadline(self.deadlines.check) } else { self.deadlines.check };
        match self.begin(kind, checks, deadline, call) {
            Some(call) => call.await,
            None => Err(StoreError::new(Kind::Unreachable, NO_TIMER)),
        }
    }

    /// Returns a future that awaits a call to the store, with a deadline from now on, and reports it to the observers.
    ///
    /// Returns `None`, and `call` is not polled, without a tokio timer. See [`Shared::within`] for the errors that it
    /// adds. If the future is dropped before it completes, nothing is reported.
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

    /// Returns a future that awaits `call`, with a deadline. Returns `None`, and `call` is not polled, without a tokio
    /// timer.
    ///
    /// The deadline counts from this call, not from the first poll. The future may exceed it by up to 25 ms to find a
    /// reply that has already arrived; see [`answer_by`]. It resolves to an error of the kind `TimedOut` at the
    /// deadline, and of the kind `Protocol` if `call` panics.
    fn within<T>(
        &self,
        deadline: Duration,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<impl Future<Output = Result<T, StoreError>>> {
        let timer = timer(deadline)?;
        let answer = AssertUnwindSafe(answer_by(timer, &*self.store, call)).catch_unwind();
        Some(async move {
            match answer.await {
                Ok(Some(answer)) => answer,
                Ok(None) => {
                    let store = self.store.address().map_or("the store".to_owned(), |url| format!("the store {url}"));
                    let message = format!("{store} did not answer within the deadline of {deadline:?}");
                    Err(StoreError::new(Kind::TimedOut, message))
                }
                Err(_panic) => Err(StoreError::new(Kind::Protocol, "the store panicked")),
            }
        })
    }

    /// Returns an error if the breaker is open, so that callers do not wait for a store that is down.
    fn fail_if_open(&self) -> Result<(), StoreError> {
        match self.breaker.is_open() {
            true => Err(StoreError::new(Kind::Unreachable, NOT_ASKED)),
            false => Ok(()),
        }
    }

    /// Logs that the store is responding again, and reports to the observers that the breaker has closed.
    pub(super) fn report_recovery(&self) {
        tracing::info!("the store is responding again");
        self.observers.breaker_changed(false);
    }

    /// Decides a check without the store, by the failure policy of each limit: limits with `local` by this instance's
    /// share, those with `allow` are left out.
    ///
    /// If no limit is `local`, or the memory store panics, the result is an uncounted admission.
    ///
    /// # Errors
    /// Returns `failure` if the policy of a limit is `deny`.
    fn degraded(
        &self,
        check: &Check<'_>,
        policy: FailurePolicy<'_>,
        failure: Unavailable,
    ) -> Result<EachDecision, Unavailable> {
        if policy.denies(check) {
            return Err(failure);
        }
        let is_local = |(_, policy): &(usize, OnFailure)| *policy == OnFailure::Local;
        let decided: Vec<usize> =
            policy.per_limit(check).enumerate().filter(is_local).map(|(index, _)| index).collect();
        let local: SmallVec<[Demand<'_>; 2]> = decided.iter().map(|&index| check.demands()[index]).collect();
        let Ok(local) = Check::new(&local) else { return Ok(EachDecision::uncounted(self.clock.now())) };
        let decision = self.check_local(&local);
        Ok(match decision.source {
            Source::Local if decided.len() == check.demands().len() => EachDecision::Complete(decision),
            Source::Local => EachDecision::partial(decision, decided),
            // The local share panicked.
            _ => EachDecision::partial(decision, Vec::new()),
        })
    }

    /// Decides a check by this instance's share of each limit, and charges the shares. If the memory store panics,
    /// admits the check uncounted.
    ///
    /// The decision has [`Source::Local`], and waits of [`local_wait`]. An uncounted admission has [`Source::None`].
    pub(super) fn check_local(&self, check: &Check<'_>) -> Decision {
        let demands = self.local_demands(check);
        let decided = Check::new(&demands).ok().and_then(|local| catch_panic(|| self.local.check(&local)));
        let Some(mut decision) = decided else { return Decision::uncounted(self.clock.now()) };
        decision.source = Source::Local;
        for (demand, status) in check.demands().iter().zip(&mut decision.limits) {
            status.retry_after = local_wait(status.retry_after, demand);
        }
        decision
    }

    /// Returns the demands of a check, with this instance's share of each limit.
    fn local_demands<'a>(&self, check: &Check<'a>) -> SmallVec<[Demand<'a>; 2]> {
        let share = |demand: &Demand<'a>| Demand { limit: local_share(&demand.limit, self.instances), ..*demand };
        check.demands().iter().map(share).collect()
    }
}

/// Logs `what` and the error of a store: at error level for [`Kind::Script`], a bug in Tollgate, and for
/// [`Kind::Unsupported`], which only another configuration ends, else at debug level.
fn log_failure(error: &StoreError, what: &'static str) {
    match error.kind() {
        Kind::Script | Kind::Unsupported => tracing::error!(kind = error.kind().as_str(), %error, "{what}"),
        _ => tracing::debug!(kind = error.kind().as_str(), %error, "{what}"),
    }
}

/// Returns whether the error is foreign data under a key, which does not count against the store.
pub(super) fn is_foreign(error: &StoreError) -> bool {
    matches!(error.kind(), Kind::Foreign | Kind::ForeignInPart)
}
