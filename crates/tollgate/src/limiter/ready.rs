//! Waiting until a check passes: for work that goes out (webhooks, mails, jobs, calls of somebody else's API).
//!
//! A request that comes in is refused and told when to come again. Work that goes out has nobody to refuse: it waits.
//! `retry_after` is true, so there is nothing to poll: ask, sleep exactly so long, ask again.
//!
//! **Who waits together** stands in a queue (`turns.rs`), so that one of them asks and the first come is the first served.
//!
//! **Contention that remains** is between nodes, and between checks that share a counter but not all of them. Whoever finds
//! its units taken by such a stranger waits up to a tenth longer than told the next time (at most 20 ms): without that, the node
//! that is nearest to the store would win every time.
//!
//! **Never longer than asked.** A wait that would pass the bound is not begun: the denial comes back at once. Nothing is charged
//! for it; what a leaky bucket has charged for a turn that comes too late is given back. Whoever gets no turn in time only looks:
//! the units belong to those in front.
//!
//! **While the store is away** its word is missing, and the local share's is not final: the store may be back long before
//! this node has enough to give. So a local denial is asked about again within a second, up to the bound, and is never the reason
//! to say "too late" or "never" before it.

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::{Instant, sleep, sleep_until};
use tollgate_core::{Algorithm, Check, Cost, Decision, Demand, Line, Source, Wait};

use super::turns::Place;
use super::{CheckOptions, Limiter};
use crate::failure::Unavailable;

/// A longer wait than any limit can tell: the longest window.
const WAIT_MAX: Duration = Duration::from_secs(400 * 24 * 60 * 60);
/// However short the told wait is, nobody asks more often: a clock that stands still must not make this a busy loop.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const JITTER_MAX: Duration = Duration::from_millis(20);
/// However long this node's share says to wait, the store may be back by then.
const LOCAL_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Why a check was not ready in time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotReady {
    /// However long one waits, this cost will not fit.
    #[error("the cost is more than its limit can ever hold")]
    Never(Decision),
    /// It would be ready only after the longest wait that was asked for. The decision says when.
    #[error("it would be ready only after the longest wait that was asked for")]
    TooLate(Decision),
    /// The store does not answer, and the policy for that is [`OnFailure::Deny`](crate::OnFailure::Deny).
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
}

impl NotReady {
    /// The last decision, if there is one.
    pub fn decision(&self) -> Option<&Decision> {
        match self {
            NotReady::Never(decision) | NotReady::TooLate(decision) => Some(decision),
            NotReady::Unavailable(_) => None,
        }
    }
}

impl Limiter {
    /// Waits until a check is admitted, at most so long, and takes its units then. A leaky bucket's told wait is waited, too: when
    /// this returns `Ok`, the work may begin. The time of the store's last answer is not counted: with a store that is 5 ms away this may return
    /// 5 ms after `wait_max`.
    ///
    /// Those who wait for the same counters in this process are served in the order in which they came. One that stands behind
    /// others does not know how long these will take, so it may wait for as long as it was willing to and then be told
    /// that it is too late. So may one that is answered by the local share, since the store may come back; in every
    /// other case that is told at once. Dropping the future leaves the queue. While it waits nothing is charged, unless by a
    /// leaky bucket that has already told a turn; a call to a shared store that is on its way may still charge.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Check, Demand, Key, Limiter, NotReady};
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
    /// assert!(matches!(refused, Err(NotReady::TooLate(_))), "told at once");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it can never pass, not within `wait_max`, or when the store does not answer and the policy is
    /// [`OnFailure::Deny`](crate::OnFailure::Deny).
    pub async fn until_ready(&self, check: &Check<'_>, wait_max: Duration) -> Result<Decision, NotReady> {
        if check.demands().iter().all(|demand| demand.cost == Cost::PEEK) {
            return Ok(self.check(check).await?);
        }
        let deadline = Instant::now() + wait_max.min(WAIT_MAX);
        let place = self.0.turns.join(check);
        let Some(turn) = place.turn(deadline).await else { return self.without_a_turn(check, &place).await };
        // A place in a leaky bucket's queue may be given back.
        let is_leaky = |demand: &Demand<'_>| demand.limit.algorithm() == Algorithm::LeakyBucket;
        let options = CheckOptions { refundable: check.demands().iter().any(is_leaky), ..CheckOptions::default() };
        let mut is_contended = false;
        loop {
            let decision = self.check_with(check, options).await?;
            let is_local = decision.source == Source::Local;
            let wait = match decision.retry_after().as_duration() {
                Some(wait) => wait,
                None if is_local => LOCAL_PAUSE_MAX,
                None => return Err(NotReady::Never(decision)),
            };
            let now = Instant::now();
            let ready_at = now + wait;
            if decision.allowed() {
                // What may begin now is not given back because the store's answer took its time.
                if wait == Duration::ZERO || ready_at <= deadline {
                    drop(turn);
                    return Ok(after(wait, decision).await);
                }
                self.give_back(check, &decision).await;
            }
            let is_too_late = if is_local { now >= deadline } else { ready_at > deadline };
            if is_too_late {
                return Err(NotReady::TooLate(decision));
            }
            let pause = if is_local { wait.min(LOCAL_PAUSE_MAX) } else { wait };
            // The told wait is exact, and needs nothing added unless a stranger was faster.
            let jitter =
                if is_contended { (pause / 10).min(JITTER_MAX).mul_f64(fastrand::f64()) } else { Duration::ZERO };
            let asks_at = (now + pause.max(PAUSE_MIN) + jitter).min(deadline);
            turn.asks_again_at(asks_at);
            sleep_until(asks_at).await;
            is_contended = true;
        }
    }

    /// The answer to one whose turn did not come in time: what is left for those in front is only looked at.
    async fn without_a_turn(&self, check: &Check<'_>, place: &Place<'_>) -> Result<Decision, NotReady> {
        let until_front_asks =
            place.front_asks_at().map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
        let peeks: SmallVec<[Demand<'_>; 2]> = check.demands().iter().map(|demand| demand.cost(Cost::PEEK)).collect();
        let Ok(peek) = Check::new(&peeks) else { return Ok(self.check(check).await?) };
        let mut decision = self.check(&peek).await?;
        if decision.lines.is_empty() {
            // Nobody counts, so nobody is in front.
            return Ok(decision);
        }
        let never_fits = |demand: &Demand<'_>| demand.cost.units() > demand.limit.cost_max();
        let front_us = until_front_asks.max(PAUSE_MIN).as_micros() as u64;
        let taking = |(demand, _): &(&Demand<'_>, &mut Line)| demand.cost != Cost::PEEK;
        for (demand, line) in check.demands().iter().zip(&mut decision.lines).filter(taking) {
            let retry_after = match never_fits(demand) {
                true => Wait::NEVER,
                false => line.retry_after.max(Wait::from_micros(front_us)),
            };
            *line = Line { allowed: false, cost: demand.cost.units(), retry_after, ..*line };
        }
        Err(match check.demands().iter().any(never_fits) {
            true => NotReady::Never(decision),
            false => NotReady::TooLate(decision),
        })
    }

    /// A place in a leaky bucket's queue that nobody will wait for.
    async fn give_back(&self, check: &Check<'_>, decision: &Decision) {
        if let Err(error) = self.refund(check, decision).await {
            tracing::debug!(kind = error.kind().name(), "a place in a queue that was too long stays taken");
        }
    }
}

/// An admitted check goes on when it was told to: at once, except after a leaky bucket.
async fn after(wait: Duration, decision: Decision) -> Decision {
    if wait > Duration::ZERO {
        sleep(wait).await;
    }
    decision
}

#[cfg(test)]
mod tests;
