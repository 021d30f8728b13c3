//! Calls to the store that are not answered within the deadline.
//!
//! At the deadline, the failure policy decides a request without the store. But the store may have executed the call, or
//! may still do so, and then has charged units for a request that was decided elsewhere. So the call is not dropped: a
//! task waits for its reply, and refunds what it has charged.
//!
//! ```text
//!   call ─────────┬─ deadline ──▶ the failure policy decides
//!                 └────────────────────▶ late reply ──▶ refund of its charge
//! ```
//!
//! **Which charge stays?** If the local share decided the request, both the share and the store may have charged it. The
//! charge of the share stays, and that of the store is refunded, also if both admitted the request. So the units are
//! charged where [`Decision::source`] says, and nowhere else: a refund, a settlement or a receipt of the decision finds
//! all of them. The bound of an outage holds, because it is the sum of what the store and the shares admit, each by
//! itself: the store never holds less than the units of the requests that it has admitted in time.
//!
//! **Bounds.** At most [`LATE_CHECKS_MAX`] checks are waited for, each for at most [`LATE_MAX`]. A call beyond that is
//! dropped at its deadline. Such a call keeps its charge, if it was executed, and so does one whose reply never arrives.
//! It is unknown whether it was executed, so it is neither repeated nor refunded.
//!
//! **Copies.** A task may outlive the request. So every call owns a copy of its checks.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tidegate_core::{Check, Cost, Decision, Demand, Key, Limit, RuleScopeBuf, Scope, ScopeName, ShardId, StoreError};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::denied_parts::PartTurn;
use super::shared::Shared;
#[cfg(feature = "rules")]
use super::{Backend, Limiter};
use crate::observe::StoreCallKind as Call;

/// The maximum number of checks in calls that are waited for after their deadline: some ten megabytes.
const LATE_CHECKS_MAX: u32 = 4_096;
/// The longest time after a deadline for which a late reply and the refund of its charge are waited for.
///
/// Far longer than any reply takes, unless the store hangs or the process gets no CPU time for seconds.
pub(super) const LATE_MAX: Duration = Duration::from_secs(10);

/// The tasks that wait for late replies.
#[derive(Debug)]
pub(super) struct LateCalls {
    /// A permit for each check that may be waited for.
    room: Arc<Semaphore>,
}

impl Default for LateCalls {
    fn default() -> Self {
        LateCalls { room: Arc::new(Semaphore::new(LATE_CHECKS_MAX as usize)) }
    }
}

/// For the engine.
#[cfg(feature = "rules")]
impl Limiter {
    /// Waits until all checks on several servers whose futures were dropped are complete, and then until no call is left
    /// whose deadline has passed and whose reply, or the refund of its charge, is awaited.
    ///
    /// Takes at most ten seconds, and no time with counters in memory. Calls that miss their deadline in this time
    /// may be dropped instead.
    pub(crate) async fn wait_for_late_calls(&self) {
        if let Backend::Shared(shared) = &self.0.backend {
            shared.pending.wait().await;
            shared.late_calls.wait().await;
        }
    }
}

impl LateCalls {
    /// Spawns a task that completes `work`, a part of the calls for this number of checks, within [`LATE_MAX`].
    ///
    /// Drops `work` if the tasks have [`LATE_CHECKS_MAX`] checks, and outside a tokio runtime.
    pub(super) fn spawn(&self, checks: usize, work: impl Future<Output = ()> + Send + 'static) {
        let checks = u32::try_from(checks).unwrap_or(u32::MAX).min(LATE_CHECKS_MAX);
        let (Ok(room), Ok(runtime)) = (self.room.clone().try_acquire_many_owned(checks), Handle::try_current()) else {
            return;
        };
        runtime.spawn(async move {
            let _ = timeout(LATE_MAX, work).await;
            drop(room);
        });
    }

    /// Waits until no task is left. Calls that miss their deadline meanwhile are dropped.
    #[cfg(feature = "rules")]
    pub(super) async fn wait(&self) {
        let _ = self.room.acquire_many(LATE_CHECKS_MAX).await;
    }
}

impl Shared {
    /// Refunds charges for checks that were decided otherwise. A refund that fails is not repeated.
    pub(super) async fn refund_charges<'a>(&self, charges: impl Iterator<Item = (&'a OwnedCheck, &'a Decision)>) {
        let refund = |(check, decision): (&'a OwnedCheck, &'a Decision)| async move {
            let demands = check.demands();
            let check = check.borrow(&demands);
            let refund = async { self.store.refund(&check, decision).await };
            if let Some(call) = self.begin(Call::Refund, 1, (LATE_MAX, ShardId::default()), refund) {
                let _ = call.await;
            }
            // A denial that was cached in the meantime may be due to the refunded units.
            self.forget(&check);
        };
        join_all(charges.map(refund)).await;
    }

    /// Awaits the reply to a call that has missed its deadline, and refunds what it has charged, because its checks were
    /// decided by the failure policy. If the call fails, does nothing: it is unknown whether it was executed.
    pub(super) async fn refund_late(
        self: Arc<Self>,
        call: impl Future<Output = Result<Vec<Result<Decision, StoreError>>, StoreError>>,
        checks: Arc<[OwnedCheck]>,
        turns: SmallVec<[Option<PartTurn>; 1]>,
    ) {
        let Ok(answers) = call.await else { return };
        let now = self.clock.now();
        for (turn, answer) in turns.iter().zip(&answers) {
            if let (Some(turn), Ok(decision)) = (turn, answer)
                && !decision.allowed()
            {
                turn.turn.learn(turn.part, decision, now);
            }
        }
        let decided = checks.iter().zip(&answers).filter_map(|(check, answer)| Some((check, answer.as_ref().ok()?)));
        self.refund_charges(decided.filter(|(check, decision)| decision.allowed() && check.charges())).await;
    }

    /// Decides checks by a call that does not borrow from its caller. See [`Shared::decide`].
    pub(super) async fn decide_owned(
        self: Arc<Self>,
        checks: Arc<[OwnedCheck]>,
    ) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let demands: SmallVec<[_; 1]> = checks.iter().map(OwnedCheck::demands).collect();
        let checks: SmallVec<[Check<'_>; 1]> =
            checks.iter().zip(&demands).map(|(check, demands)| check.borrow(demands)).collect();
        self.decide(&checks).await
    }
}

/// A check that owns its subjects.
pub(super) struct OwnedCheck {
    demands: SmallVec<[OwnedDemand; 2]>,
    partition: Option<u32>,
}

/// A demand that owns its subject.
struct OwnedDemand {
    limit: Limit,
    cost: Cost,
    subject: Box<[u8]>,
    scope: OwnedScope,
}

/// A [`Scope`] that owns its names.
enum OwnedScope {
    Explicit,
    Rule(RuleScopeBuf),
    Named(ScopeName),
}

impl OwnedCheck {
    pub(super) fn of(check: &Check<'_>) -> OwnedCheck {
        let owned = |demand: &Demand<'_>| OwnedDemand {
            limit: demand.limit,
            cost: demand.cost,
            subject: demand.key.subject().into(),
            scope: match demand.key.scope() {
                Scope::Explicit => OwnedScope::Explicit,
                Scope::Rule(scope) => OwnedScope::Rule(RuleScopeBuf::new(scope.rule(), scope.limit())),
                Scope::Named(name) => OwnedScope::Named(name),
            },
        };
        OwnedCheck { demands: check.demands().iter().map(owned).collect(), partition: check.partition() }
    }

    /// Returns whether any demand has a cost.
    pub(super) fn charges(&self) -> bool {
        self.demands.iter().any(|demand| demand.cost != Cost::PEEK)
    }

    /// Returns the demands of the check, in order.
    pub(super) fn demands(&self) -> SmallVec<[Demand<'_>; 2]> {
        self.demands.iter().map(OwnedDemand::borrow).collect()
    }

    /// Returns the check, given its [demands](OwnedCheck::demands).
    pub(super) fn borrow<'a>(&self, demands: &'a [Demand<'a>]) -> Check<'a> {
        let check = Check::of_distinct(demands);
        self.partition.map_or(check, |partition| check.in_partition(partition))
    }
}

impl OwnedDemand {
    fn borrow(&self) -> Demand<'_> {
        let scope = match &self.scope {
            OwnedScope::Explicit => Scope::Explicit,
            OwnedScope::Rule(scope) => scope.scope(),
            OwnedScope::Named(name) => Scope::Named(*name),
        };
        let key = Key::scoped(&self.subject, scope).expect("the subject of a key is not too long");
        Demand::new(self.limit, key).cost(self.cost)
    }
}
