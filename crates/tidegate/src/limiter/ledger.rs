//! Corrections of charges: where the units of a decision were charged, they are refunded, charged or redeemed.

use std::sync::Arc;

use smallvec::SmallVec;
use tidegate_core::{Check, Cost, Decision, ReceiptId, Redeemed, Source, StoreError};

use super::local_share::LocalShare;
use super::settle::Difference;
use super::shared::Shared;
use super::{Backend, Limiter, catch_panic, panicked, redeem_in_memory};
use crate::observe::StoreCallKind as Call;

/// Where the units of a decision were charged.
pub(super) enum Ledger<'a> {
    /// In process memory.
    Local(LocalShare<'a>),
    /// In the shared store. Calls to it fail at once while the breaker is open.
    Store(&'a Arc<Shared>),
    /// Nowhere: the decision has charged nothing, so there is nothing to correct.
    None,
}

impl Limiter {
    /// Returns where a decision of this source was charged.
    pub(super) fn ledger(&self, source: Source) -> Ledger<'_> {
        match (&self.0.backend, source) {
            (Backend::Memory(memory), _) => Ledger::Local(LocalShare { memory, instances: 1 }),
            (Backend::Shared(shared), Source::Store) => Ledger::Store(shared),
            (Backend::Shared(shared), Source::Local) => Ledger::Local(shared.local_share()),
            (Backend::Shared(_), _) => Ledger::None,
        }
    }
}

impl Ledger<'_> {
    /// Refunds a decision, which must have a status for each limit of the check.
    pub(super) async fn refund(self, check: &Check<'_>, decision: &Decision) -> Result<(), StoreError> {
        match self {
            Ledger::Local(share) => {
                let demands = share.demands(check);
                catch_panic(|| share.memory.refund(&Check::of_distinct(&demands), decision)).ok_or_else(panicked)
            }
            Ledger::Store(shared) => {
                let refunds = shared.for_each_part(check, |part| async move {
                    let decision = part.decision(decision);
                    shared.call(Call::Refund, 1, async { shared.store.refund(&part.check(), &decision).await }).await
                });
                Box::pin(shared.forgetting(check, refunds)).await.map(drop)
            }
            Ledger::None => Ok(()),
        }
    }

    /// Charges `check`, which holds the units that were used beyond a decision.
    ///
    /// Its limits must have `count_denied`, so that they are charged whether or not they fit.
    pub(super) async fn charge(self, check: &Check<'_>) -> Result<(), StoreError> {
        match self {
            Ledger::Local(share) => share.check(check).map(drop).ok_or_else(panicked),
            Ledger::Store(shared) => {
                let charges = shared.for_each_part(check, |part| async move {
                    shared.call(Call::Settle, 1, async { shared.store.decide(&[part.check()]).await }).await
                });
                Box::pin(charges).await.map(drop)
            }
            Ledger::None => Ok(()),
        }
    }

    /// Corrects the charge of a decision, once for all calls with this `id`. `decision` must have a status, and `actual` a
    /// cost, for each limit of the check.
    pub(super) async fn redeem(
        self,
        id: ReceiptId,
        check: &Check<'_>,
        decision: &Decision,
        actual: &[Cost],
    ) -> Result<Redeemed, StoreError> {
        match self {
            Ledger::Local(share) => {
                redeem_in_memory(share.memory, id, &Check::of_distinct(&share.demands(check)), decision, actual)
            }
            Ledger::Store(shared) => {
                // Each partition marks the id, also one without a difference, so that it takes effect once in each.
                let redemptions = shared.for_each_part(check, |part| async move {
                    let actual: SmallVec<[Cost; 2]> = part.indices.iter().map(|&index| actual[index]).collect();
                    let (check, own) = (part.check(), part.decision(decision));
                    let Some(difference) = Difference::between(&check, &own, &actual) else {
                        return Ok(Redeemed::Done);
                    };
                    let difference = difference.redeemable_as(decision);
                    let redemption = difference.redemption(id);
                    shared.call(Call::Settle, 1, async { shared.store.redeem(&redemption).await }).await
                });
                let outcomes = Box::pin(shared.forgetting(check, redemptions)).await?;
                // The partition of the first limit decides which of several calls has used the id.
                Ok(outcomes.first().copied().unwrap_or(Redeemed::Done))
            }
            Ledger::None => Ok(Redeemed::Done),
        }
    }
}
