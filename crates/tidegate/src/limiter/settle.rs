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
//!
//! **Exactly once.** [`Limiter::redeem`] makes the same correction under an id that the store marks as used. Any
//! instance may call it any number of times, so a failed call can be repeated.

use smallvec::SmallVec;
use tidegate_core::{
    Check, Cost, Decision, Demand, LimitStatus, LimitStatuses, MemoryStore, ReceiptId, Redeemed, Redemption,
    StoreError, Timestamp,
};

use super::{DecidedDemands, Limiter, catch_panic, decided_demands, panicked};

/// The time for which a receipt can be redeemed after the longest `reset_after` of its decision: 10 minutes.
const REDEEM_GRACE_US: u64 = 10 * 60 * 1_000_000;

impl Limiter {
    /// Corrects the charge of an admitted decision to the cost actually used, on every limit of its check.
    ///
    /// Unused units are refunded. Units above the estimate are charged even if they do not fit; the counter is then
    /// full. Limits that were only peeked at (cost 0) are not charged. Call it once per decision, with the check of the
    /// decision; if their numbers of limits differ, nothing changes. A denial is left as it is.
    ///
    /// ```
    /// use tidegate::{Check, CheckOptions, Cost, Demand, Key, Limiter};
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
        let Some((demands, actual)) = charged(check, decision, actual) else { return Ok(()) };
        let check = Check::of_distinct(&demands);
        let Some(difference) = Difference::between(&check, decision, &actual) else { return Ok(()) };
        let refunded = match Check::new(&difference.unused) {
            Ok(unused) => self.refund(&unused, &difference.refund).await,
            Err(_nothing) => Ok(()),
        };
        let charged = match Check::new(&difference.overrun) {
            Ok(overrun) => self.ledger(decision.source).charge(&overrun).await,
            Err(_nothing) => Ok(()),
        };
        if difference.unused.is_empty() || difference.overrun.is_empty() {
            refunded.and(charged)
        } else {
            both(refunded, charged)
        }
    }

    /// Corrects the charge of an admitted decision to the costs in `actual`, once for all calls with this `id`.
    ///
    /// The correction is that of [`settle_each`](Limiter::settle_each). Of any number of calls with one id, on all
    /// instances that share the store, even concurrent ones, exactly one corrects the charge and returns
    /// [`Redeemed::Done`]. The others return [`Redeemed::AlreadyUsed`] and change nothing, even if their `actual`
    /// differs. After an error the caller may call again with the same id.
    ///
    /// The id must belong to this decision alone: one of [`receipt_id`](Limiter::receipt_id), or any other unique bytes. It
    /// can be redeemed until 10 minutes after the longest `reset_after` of the decision, so that a late overrun still
    /// counts. From then on the result is [`Redeemed::Expired`], and nothing changes. The store remembers a used id until
    /// then. In process memory, it may be `Expired` earlier if the memory for used ids is full; see
    /// [`MemoryStore::redeem`].
    ///
    /// ```
    /// use tidegate::{Check, CheckOptions, Cost, Demand, Key, Limiter, Redeemed};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::memory();
    /// let tokens = Demand::new("1000/min".parse()?, Key::new("api-key:7")?).cost(500);
    /// let check = Check::one(&tokens);
    /// let options = CheckOptions { refundable: true, ..CheckOptions::default() };
    /// let reserved = limiter.check_with(&check, options).await?;
    ///
    /// let id = limiter.receipt_id(&check);
    /// assert_eq!(limiter.redeem(id, &check, &reserved, &[Cost::new(320)]).await?, Redeemed::Done);
    /// assert_eq!(limiter.redeem(id, &check, &reserved, &[Cost::new(320)]).await?, Redeemed::AlreadyUsed);
    /// assert_eq!(limiter.inspect(&tokens).await?.remaining, 680);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A decision of [`Source::Local`](crate::Source::Local) is corrected on the local counters, and its id is marked
    /// there, so it must be redeemed on the instance that made it. For a denial and for a decision of
    /// [`Source::None`](crate::Source::None), which charged nothing, each call returns `Done` and changes nothing. The
    /// same holds if the numbers of limits of `check` and `decision` differ.
    ///
    /// # Errors
    /// If the store does not answer, or at once while the circuit breaker is open.
    pub async fn redeem(
        &self,
        id: ReceiptId,
        check: &Check<'_>,
        decision: &Decision,
        actual: &[Cost],
    ) -> Result<Redeemed, StoreError> {
        let Some((demands, actual)) = charged(check, decision, actual) else { return Ok(Redeemed::Done) };
        let check = Check::of_distinct(&demands);
        self.ledger(decision.source).redeem(id, &check, decision, &actual).await
    }

    /// Returns a new id for the charge of this check, to be used with [`redeem`](Limiter::redeem). Allocates 512 KiB at the
    /// first call.
    ///
    /// No other call returns the same id, on this or another limiter. The ids of checks whose first limits have the same
    /// subject are consecutive numbers, of which a store keeps a used one in less than a byte. With random ids, it would
    /// need more than a hundred bytes for each.
    pub fn receipt_id(&self, check: &Check<'_>) -> ReceiptId {
        self.receipt_id_of(check.demands().first().map_or(&[], |demand| demand.key.subject()))
    }

    /// Returns a new id for a charge of this subject.
    pub(crate) fn receipt_id_of(&self, subject: &[u8]) -> ReceiptId {
        self.0.receipt_ids.next(subject)
    }
}

/// Returns the demands that an admission charged and, in the same order, the costs that they should have been charged.
///
/// `actual` is in the order of the check. A limit without a cost keeps its charge. Returns `None` if nothing was charged
/// or the decision is not that of the check: it is a denial, or has no status for a limit that it does not omit.
fn charged<'a>(
    check: &Check<'a>,
    decision: &Decision,
    actual: &[Cost],
) -> Option<(DecidedDemands<'a>, SmallVec<[Cost; 2]>)> {
    let demands = decided_demands(check, decision).filter(|_| decision.allowed())?;
    let cost = |(index, status): (usize, &LimitStatus)| actual.get(index).copied().unwrap_or(Cost::new(status.cost));
    Some((demands, decision.statuses().map(cost).collect()))
}

/// Corrects the charge of a decision of this store as [`Limiter::redeem`] does. The decision must have a status, and
/// `actual` a cost, for each limit of the check.
///
/// # Errors
/// Returns an error if the store panics.
pub(crate) fn redeem_in_memory(
    store: &MemoryStore,
    id: ReceiptId,
    check: &Check<'_>,
    decision: &Decision,
    actual: &[Cost],
) -> Result<Redeemed, StoreError> {
    match Difference::between(check, decision, actual) {
        Some(difference) => catch_panic(|| store.redeem(&difference.redemption(id))).ok_or_else(panicked),
        None => Ok(Redeemed::Done),
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

/// Returns the time until which the charge of a decision can be redeemed.
fn redeemable_until(decision: &Decision) -> Timestamp {
    let resets_us = decision.limits.iter().filter_map(|status| status.reset_after.as_micros());
    decision.at.plus_micros(resets_us.max().unwrap_or(0).saturating_add(REDEEM_GRACE_US))
}

/// The differences between the reserved and the used units of an admission, by limit. Limits without a difference are
/// left out.
pub(super) struct Difference<'a> {
    /// Limits of which less was used than reserved.
    unused: SmallVec<[Demand<'a>; 2]>,
    /// The decision about `unused`: a status for each limit, in the same order, with the unused units as its cost.
    refund: Decision,
    /// Limits of which more was used than reserved, with the difference as their cost.
    overrun: SmallVec<[Demand<'a>; 2]>,
    /// The subject of the first limit of the check.
    subject: &'a [u8],
    /// The time until which the difference can be redeemed.
    redeemable_until: Timestamp,
}

impl<'a> Difference<'a> {
    /// Compares the charge of `decision` with the costs in `actual`. Both must have one entry per limit of the check.
    ///
    /// Returns `None` if nothing was charged: the decision is a denial, or the check is empty.
    pub(super) fn between(check: &Check<'a>, decision: &Decision, actual: &[Cost]) -> Option<Difference<'a>> {
        if !decision.allowed() {
            return None;
        }
        let Decision { at, source, .. } = *decision;
        let mut difference = Difference {
            unused: SmallVec::new(),
            refund: Decision::new(at, source, LimitStatuses::new()),
            overrun: SmallVec::new(),
            subject: check.demands().first()?.key.subject(),
            redeemable_until: redeemable_until(decision),
        };
        for ((demand, status), actual) in check.demands().iter().zip(&decision.limits).zip(actual) {
            let (reserved, used) = (status.cost, actual.units());
            if used < reserved {
                difference.unused.push(*demand);
                difference.refund.limits.push(LimitStatus { cost: reserved - used, ..*status });
            } else if used > reserved {
                // `count_denied` does not change the counter. It makes a denial charge, too.
                let limit = demand.limit.with_count_denied(true);
                difference.overrun.push(Demand { limit, ..*demand }.cost(used - reserved));
            }
        }
        Some(difference)
    }

    /// Sets the time until which the difference can be redeemed to that of the decision `whole`, of which this is a part.
    pub(super) fn redeemable_as(self, whole: &Decision) -> Difference<'a> {
        Difference { redeemable_until: redeemable_until(whole), ..self }
    }

    /// Returns the redemption that corrects the difference. Without a difference, it only marks the id as used.
    pub(super) fn redemption(&self, id: ReceiptId) -> Redemption<'_> {
        let mut redemption = Redemption::new(id, self.subject, self.redeemable_until);
        if let Ok(unused) = Check::new(&self.unused) {
            redemption = redemption.refund(unused, &self.refund);
        }
        if let Ok(overrun) = Check::new(&self.overrun) {
            redemption = redemption.charge(overrun);
        }
        redemption
    }
}

#[cfg(test)]
mod tests;
