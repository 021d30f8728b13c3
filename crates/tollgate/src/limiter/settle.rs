//! Settlement: an estimated cost is charged before the work and corrected after it.
//!
//! The cost of a request is often known only when the work is done: the tokens of a completion, the rows of a query,
//! the bytes of an upload. Charging only afterwards would admit a burst before its first charge. So an estimate is
//! charged at the start and corrected at the end:
//!
//! ```text
//!   check, cost 500 ──▶ admitted, 500 are taken ──▶ the work ──▶ settle, 320:  180 go back
//!                                                            └─▶ settle, 650:  150 more are taken, fit or not
//! ```
//!
//! **Less than the estimate** is a partial refund: the unused units are removed from the entry, window or bucket level
//! to which the estimate was charged. The counter is then as if the actual cost had been charged at the start.
//!
//! **More than the estimate** has already been used, so it is too late to ask whether it fits. The difference is
//! charged at the time of the settlement. If it does not fit, the counter becomes full but does not exceed its quota,
//! like a denied request with `count_denied`. A client that underestimates waits longer afterwards.
//!
//! **Once.** The caller settles an admitted decision once. Settling a denial has no effect. A failed call is not
//! repeated, since it is unknown whether it was executed. A lost refund leaves too many units charged until their
//! window ends. A lost overrun leaves too few units charged, by the amount of that one underestimate.

use smallvec::SmallVec;
use tollgate_core::{Check, Cost, Decision, Demand, LimitStatus, LimitStatuses, StoreError};

use super::{Backend, Limiter, catch_panic, has_status_per_limit, panicked};

impl Limiter {
    /// Corrects the charge of an admitted decision to the cost actually used, on every limit of its check.
    ///
    /// Unused units are refunded. Units above the estimate are charged even if they do not fit; the counter is then
    /// full. Limits that were only peeked at (cost 0) are not charged. Call it once per decision, with the check of the
    /// decision; if their numbers of limits differ, nothing changes. A denial is left as it is.
    ///
    /// ```
    /// use tollgate::{Check, CheckOptions, Cost, Demand, Key, Limiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::memory();
    /// let tokens = Demand::new("1000/min".parse()?, Key::new("api-key:7")?).cost(500);
    /// let check = Check::one(&tokens);
    /// // Units may be refunded, so denials of this check must not be cached.
    /// let options = CheckOptions { refundable: true, ..CheckOptions::default() };
    ///
    /// let reserved = limiter.check_with(&check, options).await?;
    /// assert_eq!(reserved.limits[0].remaining, 500);
    /// // … the work turns out to be smaller …
    /// limiter.settle(&check, &reserved, Cost::new(320)).await?;
    /// assert_eq!(limiter.inspect(&tokens).await?.remaining, 680);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A decision of [`Source::Local`](crate::Source::Local) is settled on the local counters. A decision of
    /// [`Source::None`](crate::Source::None) was not counted, so there is nothing to settle.
    ///
    /// # Errors
    /// If the store does not answer, or at once while the circuit breaker is open. The correction is then lost; it is
    /// not repeated.
    pub async fn settle(&self, check: &Check<'_>, decision: &Decision, actual: Cost) -> Result<(), StoreError> {
        let actual_of = |demand: &Demand<'_>| if demand.cost == Cost::PEEK { Cost::PEEK } else { actual };
        let actual: SmallVec<[Cost; 4]> = check.demands().iter().map(actual_of).collect();
        self.settle_each(check, decision, &actual).await
    }

    /// Corrects the charge of an admitted decision to the costs in `actual`, one per limit.
    ///
    /// For checks whose limits count different things, such as requests and tokens. `actual` is in the order of the
    /// check. If it is shorter than the check, the charges of the remaining limits stay as they are; costs beyond the
    /// last limit are ignored. A limit that was only peeked at (cost 0) is charged its cost in `actual`. See
    /// [`settle`](Limiter::settle) for how a difference is corrected, and for what happens to denials.
    ///
    /// # Errors
    /// If the store does not answer. Refunds and charges are two calls; both are made, and the first error is returned.
    /// If both calls were needed, the error [`is_unexecuted`](StoreError::is_unexecuted) only if neither was executed.
    pub async fn settle_each(&self, check: &Check<'_>, decision: &Decision, actual: &[Cost]) -> Result<(), StoreError> {
        if !decision.allowed() || !has_status_per_limit(decision, check) {
            return Ok(());
        }
        let difference = Difference::between(check, decision, actual);
        let refunded = match Check::new(&difference.unused) {
            Ok(unused) => {
                let Decision { at, source, .. } = *decision;
                self.refund(&unused, &Decision { at, source, ban: None, limits: difference.unused_statuses }).await
            }
            Err(_nothing) => Ok(()),
        };
        let charged = match (Check::new(&difference.overrun), &self.0.backend) {
            (Ok(overrun), Backend::Memory(store)) => catch_panic(|| drop(store.check(&overrun))).ok_or_else(panicked),
            (Ok(overrun), Backend::Shared(shared)) => shared.charge(&overrun, decision.source).await,
            (Err(_nothing), _) => Ok(()),
        };
        match difference.unused.is_empty() || difference.overrun.is_empty() {
            true => refunded.and(charged),
            false => both(refunded, charged),
        }
    }
}

/// Combines the results of two calls of one request. Returns the first error; it is unexecuted only if neither call was
/// executed.
fn both(one: Result<(), StoreError>, other: Result<(), StoreError>) -> Result<(), StoreError> {
    match (one, other) {
        (Ok(()), Ok(())) => Ok(()),
        (Err(one), Err(other)) if other.is_unexecuted() => Err(one),
        (Err(error), _) | (Ok(()), Err(error)) => Err(error.in_part()),
    }
}

/// The differences between reserved and used units, by limit. Limits without a difference are left out.
#[derive(Default)]
struct Difference<'a> {
    /// Limits of which less was used than reserved.
    unused: SmallVec<[Demand<'a>; 2]>,
    /// The limit statuses of `unused`, in the same order, with the unused units as their cost.
    unused_statuses: LimitStatuses,
    /// Limits of which more was used than reserved, with the difference as their cost.
    overrun: SmallVec<[Demand<'a>; 2]>,
}

impl<'a> Difference<'a> {
    fn between(check: &Check<'a>, decision: &Decision, actual: &[Cost]) -> Difference<'a> {
        let mut difference = Difference::default();
        for ((demand, status), actual) in check.demands().iter().zip(&decision.limits).zip(actual) {
            let (reserved, used) = (status.cost, actual.units());
            if used < reserved {
                difference.unused.push(*demand);
                difference.unused_statuses.push(LimitStatus { cost: reserved - used, ..*status });
            } else if used > reserved {
                // `count_denied` does not change the counter. It makes a denial charge, too.
                let limit = demand.limit.with_count_denied(true);
                difference.overrun.push(Demand { limit, ..*demand }.cost(used - reserved));
            }
        }
        difference
    }
}

#[cfg(test)]
mod tests;
