//! An admitted request: what its response reports, and what is refunded when it ends.
//!
//! Units are charged at the start. A rule with `charge = "on_failure"` or `"on_success"` refunds them, exactly once,
//! depending on how the request ends: [`Permit::finish`] takes the ending. Only a response earns a refund. A permit
//! that is dropped without one (the client disconnected, the handler panicked, a timeout fired) keeps every charge,
//! because the work may have been done. If disconnecting refunded units, a client could run the handler for free.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Response, StatusCode};
use tidegate_core::{Check, Decision, Demand, LimitStatus};

use super::check_plan::{CheckPlan, Demands, LimitGroup, PlannedLimit};
use super::resolve::RequestContext;
use super::{Companion, Engine};
use crate::answer::{Policies, grpc};
#[cfg(feature = "tower")]
use crate::limiter::refund_status;
use crate::receipt::{Receipt, ReceiptPart};
use crate::rules::Charge;

/// How a request ended, by its response: with a success or a failure.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ending {
    /// The service responded with a success.
    Success,
    /// The service responded with a failure, or returned an error.
    Failure,
}

impl Ending {
    /// Returns the ending for a status: `Failure` for 400 to 599, else `Success`.
    pub fn of(status: StatusCode) -> Ending {
        if status.is_client_error() || status.is_server_error() { Ending::Failure } else { Ending::Success }
    }

    /// Returns the ending for the head of a response: `Failure` for a status of 400 to 599, or for a header
    /// `grpc-status` other than 0; else `Success`.
    ///
    /// The body is not read, so a gRPC stream that fails later, in its trailers, is a success.
    pub fn of_response<B>(response: &Response<B>) -> Ending {
        if grpc::has_failed(response.headers()) { Ending::Failure } else { Ending::of(response.status()) }
    }
}

/// The reason for a refund: the request has ended, or it was refused because of its wait.
#[derive(Clone, Copy)]
pub(super) enum RefundReason {
    /// The request ended.
    Ended(Ending),
    /// The request was refused after it had been charged, because its wait exceeds the bound.
    Withdrawn,
}

impl RefundReason {
    /// Returns whether units of a rule with this charge mode are refunded for this reason. Always `true` for
    /// `Withdrawn`.
    fn refunds(self, charge: Charge) -> bool {
        match self {
            RefundReason::Ended(ending) => charge.refunds(ending == Ending::Success),
            RefundReason::Withdrawn => true,
        }
    }
}

/// The permission to proceed with an admitted request, and the charges that its response may refund.
///
/// Wait for [`Permit::wait`] before the work, and call [`Permit::finish`] when the response is known. A permit that is
/// dropped keeps every charge.
#[must_use = "a permit that is dropped keeps every charge; call `finish` to refund what the response earned"]
pub struct Permit {
    /// Boxed, because a permit is moved several times. `None` if no limit applies.
    granted: Option<Box<Granted>>,
    /// The companion of the rules that have decided the request.
    pub(super) companion: Option<Companion>,
}

/// A permit under at least one rule.
struct Granted {
    plan: Arc<CheckPlan>,
    /// The decision that the client is shown, or `None` if only shadow rules apply.
    decision: Option<Decision>,
    wait: Duration,
    /// The charges that may be refunded, or `None` if there are none.
    charges: Option<Charges>,
}

impl Permit {
    /// Creates the permit of a request to which no limit applies.
    pub(super) fn unlimited(companion: Option<Companion>) -> Permit {
        Permit { granted: None, companion }
    }

    /// Creates the permit of a request that the limits of `plan` admitted.
    ///
    /// `decision` is that of [`CheckPlan::shown`], or `None` if only shadow rules apply. If it omits a limit, the permit
    /// has a decision without limit statuses.
    pub(super) fn new(plan: Arc<CheckPlan>, decision: Option<Decision>, charges: Option<Charges>) -> Permit {
        let wait = decision.as_ref().map_or(Duration::ZERO, |decision| plan.wait(decision));
        // Limits that were omitted may be used up, so the response then reports none.
        let decision = decision
            .map(|decision| if decision.omitted.is_empty() { decision } else { Decision::uncounted(decision.at) });
        Permit { granted: Some(Box::new(Granted { plan, decision, wait, charges })), companion: None }
    }

    /// Returns the decision on the enforced rules other than shields or, if there are none, on the shields.
    ///
    /// `None` if no enforced rule applies or the request is exempt. If the store did not answer and the failure policy
    /// of a limit is `allow`, the decision has no limit statuses and [`Source::None`](crate::Source::None).
    pub fn decision(&self) -> Option<&Decision> {
        self.granted.as_ref()?.decision.as_ref()
    }

    /// Returns the policies of the limits of [`Permit::decision`], in the same order. `None` if there is no decision.
    ///
    /// If the decision has no limit statuses, the policies are still those of all limits.
    pub fn policies(&self) -> Option<&Policies> {
        self.granted.as_ref()?.plan.shown().map(|group| &*group.policies)
    }

    /// Returns the companion of the rules that have decided the request, or `None` if they have none.
    #[cfg(feature = "tower")]
    pub(crate) fn companion(&self) -> Option<&Companion> {
        self.companion.as_ref()
    }

    /// Returns how long a leaky bucket delays the request: the caller should wait this long before it proceeds. Zero
    /// without a leaky bucket.
    pub fn wait(&self) -> Duration {
        self.granted.as_ref().map_or(Duration::ZERO, |granted| granted.wait)
    }

    /// Writes the rate-limit headers of the response, as [`Policies::write_headers`] does.
    ///
    /// Writes nothing if there is no decision or it has no limit statuses. Units that the response will refund are
    /// shown as charged.
    pub fn write_headers(&self, headers: &mut HeaderMap) {
        if let Some((decision, policies)) = self.decision().zip(self.policies()) {
            policies.write_headers(decision, headers);
        }
    }

    /// Writes the rate-limit headers of `response`, which ends the request. Units that [`Permit::finish`] will refund
    /// for it are shown as refunded.
    #[cfg(feature = "tower")]
    pub(crate) fn write_headers_of<B>(&self, response: &mut Response<B>) {
        let shown = self.granted.as_ref().and_then(|granted| granted.plan.shown());
        let Some((decision, group)) = self.decision().zip(shown).filter(|(_, group)| group.is_refundable) else {
            return self.write_headers(response.headers_mut());
        };
        let reason = RefundReason::Ended(Ending::of_response(response));
        let mut decision = decision.clone();
        for (planned, status) in group.limits.iter().zip(&mut decision.limits) {
            if reason.refunds(planned.charge) {
                refund_status(status, planned.policy.limit());
            }
        }
        group.policies.write_headers(&decision, response.headers_mut());
    }

    /// Returns a receipt of the charges that depend on how the request ends, for a caller that learns the outcome
    /// elsewhere. Each call creates a receipt with an id of its own, so call it once.
    ///
    /// It has the units of rules with a `charge` other than `always`. `None` if no such rule has charged the request.
    /// Then [keep](Permit::keep) the permit: units must be refunded by the permit or by its receipt, not by both.
    pub fn receipt(&self) -> Option<Receipt> {
        let charges = self.granted.as_ref()?.charges.as_ref()?;
        Receipt::new(charges.receipt_parts(), charges.engine.limiter())
    }

    /// Keeps every charge, as dropping the permit does. For callers that will not learn how the request ends.
    pub fn keep(self) {}

    /// Refunds the units of all rules that refund for this ending: `charge = "on_failure"` refunds a success,
    /// `"on_success"` a failure.
    ///
    /// A refund that fails, because the store does not answer, is logged and lost. If the returned future is dropped
    /// after its first poll, the refund still completes.
    pub async fn finish(self, ending: Ending) {
        if let Some(charges) = self.granted.and_then(|granted| granted.charges) {
            Box::pin(charges.refund(RefundReason::Ended(ending))).await;
        }
    }
}

impl CheckPlan {
    /// Returns how long a leaky bucket delays a request, given the decision of [`CheckPlan::shown`], which must be an
    /// admission. Zero without a leaky bucket.
    pub(super) fn wait(&self, decision: &Decision) -> Duration {
        if self.shown().is_some_and(|group| group.may_delay) {
            decision.retry_after().as_duration().unwrap_or(Duration::ZERO)
        } else {
            Duration::ZERO
        }
    }
}

/// Identifies one group of limits of a [`CheckPlan`]: the shields, the other enforced limits, or those of a shadow
/// rule.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupId {
    Shield,
    Enforced,
    /// The group at this index of [`CheckPlan::shadow`].
    Shadow(usize),
}

impl CheckPlan {
    fn group(&self, id: GroupId) -> Option<&LimitGroup> {
        match id {
            GroupId::Shield => self.shield.as_ref(),
            GroupId::Enforced => self.enforced.as_ref(),
            GroupId::Shadow(index) => self.shadow.get(index),
        }
    }
}

/// The charges of one request that may be refunded: groups of limits, each with the decision that charged it.
pub(super) type ChargeList = Vec<(GroupId, Decision)>;

/// The charges of one request that may be refunded, with everything that a refund needs.
pub(super) struct Charges {
    engine: Engine,
    plan: Arc<CheckPlan>,
    context: RequestContext,
    list: ChargeList,
}

impl Charges {
    /// Creates the charges in `list`, or returns `None` if it is empty.
    ///
    /// `plan` and `context` must be those of the check that charged them.
    pub(super) fn new(
        engine: &Engine,
        plan: &Arc<CheckPlan>,
        context: RequestContext,
        list: ChargeList,
    ) -> Option<Charges> {
        (!list.is_empty()).then(|| Charges { engine: engine.clone(), plan: plan.clone(), context, list })
    }

    /// Refunds the charges of all rules that refund for this reason. Once polled, it runs to completion even if its
    /// future is dropped. Refunds that fail are logged and lost.
    pub(super) async fn refund(self, reason: RefundReason) {
        let groups = self.list.iter().filter_map(|(id, _)| self.plan.group(*id));
        if !groups.flat_map(|group| &group.limits).any(|limit| reason.refunds(limit.charge)) {
            return;
        }
        if self.engine.limiter().is_in_process() {
            self.refund_each(reason).await
        } else {
            let engine = self.engine.clone();
            engine.run_to_completion(async move { self.refund_each(reason).await }).await;
        }
    }

    /// Returns the parts of a receipt: for each group, the limits that were charged and may be refunded.
    fn receipt_parts(&self) -> Vec<ReceiptPart> {
        let part = |(id, decision): &(GroupId, Decision)| {
            let group = self.plan.group(*id)?;
            let charged = group.charged(decision, &self.context);
            let refundable = charged.filter(|(limit, ..)| limit.charge.is_refundable());
            let refundable = refundable.map(|(limit, demand, status)| (demand, status, limit.charge));
            ReceiptPart::new(group.is_shield, decision, refundable)
        };
        self.list.iter().filter_map(part).collect()
    }

    async fn refund_each(&self, reason: RefundReason) {
        for (id, decision) in &self.list {
            let Some(group) = self.plan.group(*id) else { continue };
            let charged = group.charged(decision, &self.context);
            let due = charged.filter(|(limit, ..)| reason.refunds(limit.charge));
            let (demands, limits): (Demands<'_>, _) = due.map(|(_, demand, status)| (demand, *status)).unzip();
            // Nothing is due from this group if the check is empty.
            let Ok(check) = Check::new(&demands) else { continue };
            if let Err(error) = self.engine.refund(group, &check, &decision.with_limits(limits)).await {
                tracing::debug!(kind = error.kind().as_str(), "a refund failed; the request stays charged");
            }
        }
    }
}

impl LimitGroup {
    /// Iterates over the limits that were decided, each with the demand of the request and its status.
    ///
    /// `decision` must be that on the limits of this group for the request with this context.
    fn charged<'a>(
        &'a self,
        decision: &'a Decision,
        context: &'a RequestContext,
    ) -> impl Iterator<Item = (&'a PlannedLimit, Demand<'a>, &'a LimitStatus)> {
        let demands = self.demands(context);
        decision.statuses().map(move |(index, status)| (&self.limits[index], demands[index], status))
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Permit").field("decision", &self.decision()).finish_non_exhaustive()
    }
}
