//! Calls to the shared store: each with a deadline, a circuit breaker per server, and a report to the observers.
//!
//! ```text
//!   checks ─▶ breaker of their server ─▶ call, within the deadline ─▶ answers
//!                  │ open                     │ failed
//!                  ▼                          ▼
//!             last failure          breaker, which may open and start a probe
//! ```

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::FusedFuture;
use smallvec::SmallVec;
use tidegate_core::{Check, Decision, ShardId, StoreError, StoreErrorKind as Kind, Timestamp};
use tokio::time::Instant;

use super::denied_parts::PartTurn;
use super::health::ShardHealth;
use super::late_calls::OwnedCheck;
use super::probing;
use super::shared::Shared;
use super::stats::{Counters, add};
use crate::breaker::Phase;
use crate::deadline::{LATENESS_MAX, answer_by, timer};
use crate::failure::Unavailable;
use crate::observe::StoreCallKind as Call;

pub(super) const NO_TIMER: &str = "the store can be used only inside a tokio runtime with time enabled";
pub(super) const NOT_ASKED: &str = "the store is not called until a probe succeeds";

/// A call that asks one server to decide checks.
pub(super) struct ServerCall<'a> {
    pub(super) shard: Arc<ShardHealth>,
    pub(super) checks: SmallVec<[Check<'a>; 1]>,
    /// For each check, the turn in which it charges a part of a check on several servers. `None` for a whole check, and
    /// for the preview of a part.
    pub(super) turns: SmallVec<[Option<PartTurn>; 1]>,
}

impl Shared {
    /// Asks one server to decide checks, unless its breaker is open. Returns one result per check, in order.
    ///
    /// If the call fails as a whole, or is not made, the result of every check is that failure.
    pub(super) async fn ask_shard(
        self: &Arc<Self>,
        call: &ServerCall<'_>,
        sent: Timestamp,
        budget: Option<Duration>,
        counters: &Counters,
    ) -> Vec<Result<Decision, Unavailable>> {
        let asked = match call.shard.breaker.admit_call(sent) {
            Some(phase) => self.ask_store(call, phase, sent, budget, counters).await,
            None => Err(call.shard.last_failure()),
        };
        asked.unwrap_or_else(|failure| call.checks.iter().map(|_| Err(failure.clone())).collect())
    }

    /// Calls the store for decisions, within `budget`, and reports the result to the breaker. Without a budget, the
    /// caller has used up the deadline, and the store is not called.
    ///
    /// `phase` is the breaker's phase that admitted the call, `sent` the current time. Returns one result per check, in
    /// order. If the call is not answered within `budget`, a task waits for its reply and refunds what it has charged; see
    /// `late_calls.rs`.
    ///
    /// A failure that opens the breaker is logged, and starts the probe. Timeouts of a process that was short of
    /// CPU time, those that are not [conclusive](Shared::is_conclusive), and foreign data under a key do not count
    /// against the store. If the future is dropped before it completes, nothing is reported to the breaker.
    ///
    /// # Errors
    /// Returns an error if the call failed for all checks, or was not made: nothing is left of the deadline, or there
    /// is no tokio timer.
    async fn ask_store(
        self: &Arc<Self>,
        ServerCall { shard, checks, turns }: &ServerCall<'_>,
        phase: Phase,
        sent: Timestamp,
        budget: Option<Duration>,
        counters: &Counters,
    ) -> Result<Vec<Result<Decision, Unavailable>>, Unavailable> {
        let Some(deadline) = budget else {
            let failure = Unavailable::new(Kind::TimedOut, "the deadline passed before the store was called");
            if self.is_conclusive(Duration::ZERO, shard.id) {
                self.report_failure(shard, phase, sent, &failure);
            }
            return Err(failure);
        };
        let owned: Arc<[OwnedCheck]> = checks.iter().map(OwnedCheck::of).collect();
        let mut decide = Box::pin(self.clone().decide_owned(owned.clone())).fuse();
        let Some(call) = self.begin(Call::Decide, checks.len(), (deadline, shard.id), &mut decide) else {
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
                if is_in_time && shard.breaker.succeeded(phase) {
                    self.report_recovery(shard);
                }
                let undecided = |error: StoreError| {
                    log_failure(&error, "the store did not decide one of several checks");
                    Unavailable::from(&error)
                };
                return Ok(answers.into_iter().map(|answer| answer.map_err(undecided)).collect());
            }
            Err(error) => error,
        };
        if error.kind() == Kind::TimedOut && !decide.is_terminated() {
            self.late_calls.spawn(checks.len(), self.clone().refund_late(decide, owned, turns.clone()));
        }
        add(&counters.store_failures);
        log_failure(&error, "the store did not decide");
        let failure = Unavailable::from(&error);
        // A deadline that this process noticed late says nothing about the store. If the store is down, the next error
        // of the connection opens the breaker.
        let was_starved = begun.elapsed() > deadline + LATENESS_MAX;
        let is_inconclusive =
            error.kind() == Kind::TimedOut && (was_starved || !self.is_conclusive(deadline, shard.id));
        if !is_of_its_counters(&error) && !is_inconclusive {
            self.report_failure(shard, phase, sent, &failure);
        }
        Err(failure)
    }

    /// Returns whether a check that got no answer from a server in the time `waited` shows that the server does not
    /// answer within the deadline of checks.
    ///
    /// A lookup of a plan or a key leaves a check only a part of the deadline. Half of it is enough: a lookup in the
    /// same store that was answered within the other half shows that an answer takes no longer. With less, it depends on
    /// the other calls to the server, such as that lookup: one of them must have been waiting for the whole deadline. An
    /// eighth is left for the time between the start of a lookup and its call.
    fn is_conclusive(&self, waited: Duration, shard: ShardId) -> bool {
        let deadline = self.deadlines.check;
        waited >= deadline / 2 || self.store.unanswered_for(shard).is_some_and(|time| time >= deadline / 8 * 7)
    }

    /// Reports a failed call to the breaker of its server. If that opens it, logs it and starts the probe.
    ///
    /// `phase` is the breaker's phase that admitted the call, `sent` the time at which it was sent.
    fn report_failure(
        self: &Arc<Self>,
        shard: &Arc<ShardHealth>,
        phase: Phase,
        sent: Timestamp,
        failure: &Unavailable,
    ) {
        if shard.breaker.failed(phase, sent, self.clock.now()) {
            let kind = failure.kind().as_str();
            tracing::warn!(kind, error = %failure, "the store is not called until a probe succeeds");
            shard.opened(failure);
            self.observers.breaker_changed(true);
            probing::start(self, shard);
        }
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
            answer.as_ref().map_or(true, |decision| decision.limits.len() == check.demands().len())
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
        match self.begin(kind, checks, (deadline, ShardId::default()), call) {
            Some(call) => call.await,
            None => Err(StoreError::new(Kind::Unreachable, NO_TIMER)),
        }
    }

    /// Returns a future that awaits a call to the store, with a deadline from now on, and reports it to the observers.
    /// The message of a timeout names the server, unless it is 0.
    ///
    /// Returns `None`, and `call` is not polled, without a tokio timer. See [`Shared::within`] for the errors that it
    /// adds. If the future is dropped before it completes, nothing is reported.
    pub(super) fn begin<T>(
        &self,
        kind: Call,
        checks: usize,
        (deadline, shard): (Duration, ShardId),
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<impl Future<Output = Result<T, StoreError>>> {
        let call = self.within(deadline, shard, call)?;
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
    pub(super) fn within<T>(
        &self,
        deadline: Duration,
        shard: ShardId,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<impl Future<Output = Result<T, StoreError>>> {
        let timer = timer(deadline)?;
        let answer = AssertUnwindSafe(answer_by(timer, &*self.store, call)).catch_unwind();
        Some(async move {
            match answer.await {
                Ok(Some(answer)) => answer,
                Ok(None) => {
                    let address = self.address_of(shard).or_else(|| self.store.address());
                    let store = address.map_or("the store".to_owned(), |url| format!("the store {url}"));
                    let message = format!("{store} did not answer within the deadline of {deadline:?}");
                    Err(StoreError::new(Kind::TimedOut, message))
                }
                Err(_panic) => Err(StoreError::new(Kind::Protocol, "the store panicked")),
            }
        })
    }

    /// Returns the address of a server of the store, or `None` if it is not known.
    fn address_of(&self, id: ShardId) -> Option<String> {
        self.store.shards().into_iter().find(|shard| shard.id == id).and_then(|shard| shard.address)
    }

    /// Returns an error if the breaker of a server is open, so that callers do not wait for a server that is down.
    pub(super) fn fail_if_open(&self, shard: ShardId) -> Result<(), StoreError> {
        if self.health.of(shard, &*self.store).breaker.is_open() {
            Err(StoreError::new(Kind::Unreachable, NOT_ASKED))
        } else {
            Ok(())
        }
    }

    /// Logs that a server of the store is responding again, and reports to the observers whether a breaker is still open.
    pub(super) fn report_recovery(&self, shard: &ShardHealth) {
        shard.probed(&Ok(()));
        match self.address_of(shard.id) {
            Some(address) => tracing::info!(address, "the store is responding again"),
            None => tracing::info!("the store is responding again"),
        }
        self.observers.breaker_changed(self.health.is_any_open());
    }
}

/// Logs `what` and the error of a store: at error level for [`Kind::Script`], a bug in Tidegate, and for
/// [`Kind::Unsupported`], which only a change of the configuration fixes; otherwise at debug level.
fn log_failure(error: &StoreError, what: &'static str) {
    match error.kind() {
        Kind::Script | Kind::Unsupported => tracing::error!(kind = error.kind().as_str(), %error, "{what}"),
        _ => tracing::debug!(kind = error.kind().as_str(), %error, "{what}"),
    }
}

/// Returns whether the error concerns the check's counters and does not count against the server: there is foreign data
/// under a key, or the counters are being moved to another server.
pub(super) fn is_of_its_counters(error: &StoreError) -> bool {
    matches!(error.kind(), Kind::Foreign | Kind::ForeignInPart | Kind::Relocating)
}
