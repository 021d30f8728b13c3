//! Waiting until a check is admitted, for outgoing work (webhooks, mails, jobs, calls to external APIs).
//!
//! An incoming request is denied with a `retry_after`. Outgoing work can wait instead. `retry_after` is exact, so there
//! is no polling: check, sleep for that time, check again.
//!
//! **Waiting in order.** Checks of this process that wait for the same counters are queued (`fair_queue.rs`). Only the
//! first one asks the store, and they are admitted in the order of their arrival.
//!
//! **Remaining contention** is between instances, and between checks that share some counters but not all. A check that
//! is denied again after its wait adds a random part of up to a tenth of the next wait, at most 20 ms. Without that,
//! the instance nearest to the store would win every time.
//!
//! **Never longer than `wait_max`.** If the required wait exceeds the deadline, the denial is returned at once and
//! nothing is charged. If a leaky bucket charged a slot that comes too late, it is refunded. A check that does not
//! become the first in its queue in time only peeks: the units belong to the checks before it.
//!
//! **Two bounds.** `wait_max` bounds the wait for units. `LimiterBuilder::ready_deadline` bounds the wait for one
//! answer of the store; it is apart from the deadline of a check, because outgoing work can wait longer than a client.
//!
//! **While the store is unavailable**, the answer of the local share is not final, since the store may be back long
//! before the local share has enough units. So a local denial is checked again within a second, until the deadline. It
//! never leads to [`NotReady::TooLate`] or [`NotReady::Never`] before the deadline.

use std::time::Duration;

use smallvec::SmallVec;
use tidegate_core::{Algorithm, Check, Cost, Decision, Demand, LimitStatus, Source, Wait};
use tokio::time::{Instant, sleep, sleep_until};

use super::fair_queue::QueuePosition;
use super::{CheckOptions, Limiter};
use crate::failure::Unavailable;

/// Upper bound of a wait: the longest window.
const WAIT_MAX: Duration = Duration::from_secs(400 * 24 * 60 * 60);
/// Minimum pause between two checks, so that a clock that stands still does not cause a busy loop.
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// Maximum random part of a pause after the check was denied again.
const JITTER_MAX: Duration = Duration::from_millis(20);
/// Maximum pause after a local denial, since the store may be back earlier than the local share says.
const LOCAL_PAUSE_MAX: Duration = Duration::from_secs(1);

/// The reason why [`Limiter::until_ready`] did not admit a check: it never fits, not in time, or the store is
/// unavailable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotReady {
    /// A cost exceeds what its limit can ever hold, or a subject is banned permanently, so waiting does not help.
    #[error(
        "the request can never be admitted: its cost exceeds what the limit can ever hold, or it is banned permanently"
    )]
    Never(Decision),
    /// The check would be admitted only after `wait_max`, and not before the decision's `retry_after`.
    ///
    /// The decision is a denial. In a leaky bucket it may be an admission whose delay is too long; it was refunded.
    #[error("the request would have to wait longer than the maximum wait")]
    TooLate(Decision),
    /// The store does not answer, and the failure policy is [`OnFailure::Deny`](crate::OnFailure::Deny).
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
}

impl NotReady {
    /// Returns the last decision, or `None` if the store did not answer. It no longer has any effect, even if it is an
    /// admission: see [`NotReady::TooLate`].
    pub fn decision(&self) -> Option<&Decision> {
        match self {
            NotReady::Never(decision) | NotReady::TooLate(decision) => Some(decision),
            NotReady::Unavailable(_) => None,
        }
    }

    /// Returns the last decision as a denial, or the error if the store did not answer.
    ///
    /// A denial is returned unchanged. An admission whose delay in a leaky bucket is too long becomes a denial by the
    /// limits that require the delay, with the refunded units in `remaining`.
    ///
    /// # Errors
    /// Returns the error of [`NotReady::Unavailable`].
    pub fn into_denial(self) -> Result<Decision, Unavailable> {
        let mut decision = match self {
            NotReady::Never(decision) | NotReady::TooLate(decision) => decision,
            NotReady::Unavailable(error) => return Err(error),
        };
        if decision.allowed() {
            for status in &mut decision.limits {
                status.remaining = status.remaining.saturating_add(status.cost);
                status.allowed = status.retry_after == Wait::ZERO;
            }
        }
        Ok(decision)
    }
}

impl Limiter {
    /// Waits until a check is admitted and charged, at most `wait_max`.
    ///
    /// The time of the store's last answer is not counted: with a store that is 5 ms away, this may return 5 ms after
    /// `wait_max`. One answer may take until [`LimiterBuilder::ready_deadline`](super::LimiterBuilder::ready_deadline);
    /// then the failure policy decides.
    ///
    /// The delay of a leaky bucket is waited for, too: when this returns `Ok`, the work may begin. Checks that wait for
    /// the same counters in this process are admitted in the order of their arrival.
    ///
    /// If the required wait exceeds `wait_max`, [`NotReady::TooLate`] is returned at once, with two exceptions. A check
    /// behind others in the queue does not know how long these take, so it may wait for up to `wait_max` before it
    /// fails. So may a check that the local share denies, since the store may come back.
    ///
    /// Dropping the future removes it from the queue. Nothing is charged while it waits, except that a leaky bucket has
    /// charged once its delay is being waited for, and that a call to a shared store that is under way may still
    /// charge. A check that only peeks (all costs are 0) returns at once.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::{Check, Demand, Key, Limiter, NotReady};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::memory();
    /// let webhook = Demand::new("2/100ms".parse()?, Key::new("hooks.example.com")?);
    /// for _ in 0..4 {
    ///     limiter.until_ready(&Check::one(&webhook), Duration::from_secs(1)).await?;
    ///     // send it: two at once, and two a tenth of a second later
    /// }
    /// let refused = limiter.until_ready(&Check::one(&webhook), Duration::from_millis(5)).await;
    /// assert!(matches!(refused, Err(NotReady::TooLate(_))), "returned at once");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the check can never be admitted or not within `wait_max`, or if the store does not answer and the limiter's
    /// failure policy is [`OnFailure::Deny`](crate::OnFailure::Deny).
    ///
    /// # Panics
    /// Panics outside a tokio runtime with a timer, unless the check only peeks.
    pub async fn until_ready(&self, check: &Check<'_>, wait_max: Duration) -> Result<Decision, NotReady> {
        self.until_ready_with(check, wait_max, CheckOptions::default()).await
    }

    /// Waits like [`Limiter::until_ready`], with options. Each answer of the store may take the whole deadline, less
    /// [`CheckOptions::spent`].
    ///
    /// # Errors
    /// If the check can never be admitted or not within `wait_max`, or if the store does not answer and the failure
    /// policy of a limit is [`OnFailure::Deny`](crate::OnFailure::Deny).
    ///
    /// # Panics
    /// Panics outside a tokio runtime with a timer, unless the check only peeks.
    pub async fn until_ready_with(
        &self,
        check: &Check<'_>,
        wait_max: Duration,
        options: CheckOptions<'_>,
    ) -> Result<Decision, NotReady> {
        if check.demands().iter().all(|demand| demand.cost == Cost::PEEK) {
            return Ok(self.check_within(self.0.deadlines.ready, check, options).await?);
        }
        let deadline = Instant::now() + wait_max.min(WAIT_MAX);
        let position = self.0.queues.join(check);
        let Some(turn) = position.turn(deadline).await else {
            return self.peek_without_turn(check, &position, options).await;
        };
        // The slot of a leaky bucket may be refunded, so its denials must not be cached.
        let is_leaky = |demand: &Demand<'_>| demand.limit.algorithm() == Algorithm::LeakyBucket;
        let refundable = options.refundable || check.demands().iter().any(is_leaky);
        let options = CheckOptions { refundable, ..options };
        let mut is_contended = false;
        loop {
            let decision = self.check_within(self.0.deadlines.ready, check, options).await?;
            let is_local = decision.source == Source::Local;
            let wait = match decision.retry_after().as_duration() {
                Some(wait) => wait,
                None if is_local => LOCAL_PAUSE_MAX,
                None => return Err(NotReady::Never(decision)),
            };
            let now = Instant::now();
            let ready_at = now + wait;
            if decision.allowed() {
                // Work that needs no delay is not refused because the store's answer took longer than the deadline.
                if wait == Duration::ZERO || ready_at <= deadline {
                    drop(turn);
                    return Ok(after(wait, decision).await);
                }
                self.refund_late_slot(check, &decision).await;
            }
            let is_too_late = if is_local { now >= deadline } else { ready_at > deadline };
            if is_too_late {
                return Err(NotReady::TooLate(decision));
            }
            let pause = if is_local { wait.min(LOCAL_PAUSE_MAX) } else { wait };
            // The wait is exact. Jitter is added only after another instance or queue has taken the units.
            let jitter =
                if is_contended { (pause / 10).min(JITTER_MAX).mul_f64(fastrand::f64()) } else { Duration::ZERO };
            let asks_at = (now + pause.max(PAUSE_MIN) + jitter).min(deadline);
            turn.asks_again_at(asks_at);
            sleep_until(asks_at).await;
            is_contended = true;
        }
    }

    /// Decides a check that did not become the first in its queue in time: peeks, since the units belong to the checks
    /// before it.
    ///
    /// Returns `Ok` only if the store does not answer and the failure policy admits the check uncounted. Otherwise
    /// returns [`NotReady::Never`] if a cost can never fit, else [`NotReady::TooLate`] with a denial, whose
    /// `retry_after` is at least the time until the first in the queue checks again.
    async fn peek_without_turn(
        &self,
        check: &Check<'_>,
        position: &QueuePosition<'_>,
        options: CheckOptions<'_>,
    ) -> Result<Decision, NotReady> {
        let until_front_asks =
            position.front_asks_at().map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
        let peeks: SmallVec<[Demand<'_>; 2]> = check.demands().iter().map(|demand| demand.cost(Cost::PEEK)).collect();
        let Ok(peek) = Check::new(&peeks) else {
            return Ok(self.check_within(self.0.deadlines.ready, check, options).await?);
        };
        let mut decision = self.check_within(self.0.deadlines.ready, &peek, options).await?;
        if decision.limits.is_empty() {
            // The request is admitted without counting, so the checks before it do not matter.
            return Ok(decision);
        }
        let never_fits = |demand: &Demand<'_>| demand.cost.units() > demand.limit.cost_max();
        let decided: SmallVec<[Demand<'_>; 2]> = decision.statuses().map(|(index, _)| check.demands()[index]).collect();
        let front_us = until_front_asks.max(PAUSE_MIN).as_micros() as u64;
        let taking = |(demand, _): &(&Demand<'_>, &mut LimitStatus)| demand.cost != Cost::PEEK;
        for (demand, status) in decided.iter().zip(&mut decision.limits).filter(taking) {
            let retry_after =
                if never_fits(demand) { Wait::NEVER } else { status.retry_after.max(Wait::from_micros(front_us)) };
            *status = LimitStatus { allowed: false, cost: demand.cost.units(), retry_after, ..*status };
        }
        Err(if decided.iter().any(never_fits) { NotReady::Never(decision) } else { NotReady::TooLate(decision) })
    }

    /// Refunds the slot of a leaky bucket that comes too late. A failure is only logged.
    async fn refund_late_slot(&self, check: &Check<'_>, decision: &Decision) {
        if let Err(error) = self.refund(check, decision).await {
            tracing::debug!(
                kind = error.kind().as_str(),
                "cannot refund a leaky-bucket slot beyond the maximum wait; it stays charged"
            );
        }
    }
}

/// Sleeps for `wait`, the delay of a leaky bucket, and returns the decision. Returns at once if `wait` is zero.
async fn after(wait: Duration, decision: Decision) -> Decision {
    if wait > Duration::ZERO {
        sleep(wait).await;
    }
    decision
}

#[cfg(test)]
mod tests;
