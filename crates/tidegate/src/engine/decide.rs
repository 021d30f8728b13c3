//! Decides the limits of a resolved request: the second half of [`Engine::check`].
//!
//! ```text
//!   shields, in process ─▶ all other enforced limits, one check ─▶ shadow rules (never refuse)
//! ```
//!
//! **One decision.** All enforced limits that apply, except those of shields, are decided together: the request passes
//! all of them, or none is charged (except limits with `count_denied`). Shields are decided first. A shield that has
//! admitted a request keeps its charge if another limit then refuses it, unless the shield charges `on_success`.
//!
//! **If the store does not answer**, the failure policy of each rule applies. One rule with `deny` refuses the request
//! as unavailable. The limits of rules with `local` are decided together by this instance's share. Those of rules
//! with `allow` are left out.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tidegate_core::{Check, Decision, StoreError, Timestamp};
use tokio::time::Instant;

use super::check_plan::{CheckPlan, LimitGroup, Undecided};
use super::permit::{ChargeList, Charges, Ending, GroupId, Permit, RefundReason};
use super::resolve::RequestContext;
use super::{Engine, Outcome, Refusal};
use crate::limiter::{CheckOptions, catch_panic, panicked};

impl Engine {
    /// Decides all limits of a plan. `context` must have the subjects of the plan's rules.
    ///
    /// If a group of limits refuses after others were charged, these are refunded as after a failed response: only
    /// rules with `charge = "on_success"` get their units back. If the limits admit the request but its wait exceeds
    /// `max_wait`, all charges are refunded, and the request is refused.
    pub(super) async fn decide(&self, plan: Arc<CheckPlan>, mut context: RequestContext) -> Outcome {
        let (options, mut charges) = (context.options, ChargeList::new());
        let decided = self.check_groups(&plan, &mut context, &mut charges).await;
        let charges = Charges::new(self, &plan, context, charges);
        let (reason, refusal) = match (decided, options.max_wait, plan.shown()) {
            (Ok(Some(decision)), Some(max_wait), Some(shown))
                if charges.is_some() && plan.wait(&decision) > max_wait =>
            {
                (RefundReason::Withdrawn, Box::new(shown.withdrawal(decision, max_wait)))
            }
            (Ok(decision), ..) => return Outcome::Admitted(Permit::new(plan, decision, charges)),
            (Err(refusal), ..) => (RefundReason::Ended(Ending::Failure), refusal),
        };
        if let Some(charges) = charges {
            Box::pin(charges.refund(reason)).await;
        }
        Outcome::Refused(*refusal)
    }

    /// Checks the shields, then all other enforced limits together, then the shadow rules. Stops at the first refusal.
    /// The limits of a shadow rule never refuse; a ban in the store does.
    ///
    /// Counts the decision of each rule, and reports refusals by shields to the observers. Returns the decision that
    /// the client is shown ([`CheckPlan::shown`]), or `None` if only shadow rules apply.
    ///
    /// Adds each charged group to `charges`, also before an error, if its units may have to be refunded: a rule refunds
    /// by the response, or the request may be withdrawn because of its wait.
    ///
    /// # Errors
    /// Returns the refusal of the first group that refuses, by a limit, a ban in the store or the failure policy
    /// `deny`.
    async fn check_groups(
        &self,
        plan: &CheckPlan,
        context: &mut RequestContext,
        charges: &mut ChargeList,
    ) -> Result<Option<Decision>, Box<Refusal>> {
        let (options, is_shared) = (context.options, !self.0.limiter.is_in_process());
        let began = is_shared.then(Instant::now);
        // A refund in this instance's share ends no denial that the store has made.
        let is_withdrawable = plan.may_be_withdrawn(&options, false);
        let may_be_withdrawn = plan.may_be_withdrawn(&options, is_shared);
        let mut charge = |id: GroupId, group: &LimitGroup, decision: &Decision| {
            if (group.is_refundable || may_be_withdrawn) && decision.allowed() {
                charges.push((id, decision.clone()));
            }
        };
        let mut shown = None;
        for (id, group) in [(GroupId::Shield, &plan.shield), (GroupId::Enforced, &plan.enforced)] {
            let Some(group) = group else { continue };
            let decision = group.conclude(self.check_group(group, context, is_withdrawable).await, &options);
            let decision = decision.inspect_err(|refusal| {
                if id == GroupId::Shield {
                    self.observe_shield(group, context, refusal);
                }
            })?;
            charge(id, group, &decision);
            shown = Some(decision);
        }
        if !plan.shadow.is_empty() {
            // All calls of a request share one deadline.
            context.spent += began.map_or(Duration::ZERO, |began| began.elapsed());
            Box::pin(self.check_shadow(plan, context, is_withdrawable, charge)).await?;
        }
        Ok(shown)
    }

    /// Checks the limits of all shadow rules at the same time, so that a request waits for them once, and counts their
    /// decisions.
    ///
    /// Calls `charge` for each group that was decided, admitted or not. `is_withdrawable` is as in
    /// [`Engine::check_group`].
    ///
    /// # Errors
    /// Returns the refusal by a ban in the store: shadow mode turns off limits, not bans.
    async fn check_shadow(
        &self,
        plan: &CheckPlan,
        context: &RequestContext,
        is_withdrawable: bool,
        mut charge: impl FnMut(GroupId, &LimitGroup, &Decision),
    ) -> Result<(), Box<Refusal>> {
        let checks = plan.shadow.iter().map(|shadow| self.check_group(shadow, context, is_withdrawable));
        let mut banned = None;
        for ((index, shadow), result) in plan.shadow.iter().enumerate().zip(join_all(checks).await) {
            let Ok(decision) = result else { continue };
            match Refusal::by_ban(&decision) {
                Some(refusal) => banned = Some(refusal),
                None => shadow.count(&decision, &context.options),
            }
            charge(GroupId::Shadow(index), shadow, &decision);
        }
        banned.map_or(Ok(()), |banned| Err(Box::new(banned)))
    }

    /// Checks the limits of a group of shields, which charges them.
    ///
    /// If the shields' store panics, returns an uncounted admission, or an error if the failure policy of a limit is
    /// `deny`. Also returns an error if two limits count on one counter.
    pub(super) fn check_shield(&self, group: &LimitGroup, context: &RequestContext) -> Result<Decision, Undecided> {
        let demands = group.demands(context);
        let check = group.check(&demands)?;
        match catch_panic(|| self.0.shield.check(&check)) {
            Some(decision) => Ok(decision),
            None if group.denies_on_failure() => Err(Undecided::NoAnswer),
            // Not the time: the clock may be what panicked.
            None => Ok(Decision::uncounted(Timestamp::ZERO)),
        }
    }

    /// Checks the limits of a group together, in the shields' store or by the limiter.
    ///
    /// `is_withdrawable` says that a charge in the store may be refunded because of the request's wait. Then denials are
    /// not cached, as for a group that refunds by the response.
    ///
    /// # Errors
    /// Returns an error if the store does not answer and the failure policy of a limit is `deny`, or if two limits
    /// count on one counter.
    async fn check_group(
        &self,
        group: &LimitGroup,
        context: &RequestContext,
        is_withdrawable: bool,
    ) -> Result<Decision, Undecided> {
        if group.is_shield {
            return self.check_shield(group, context);
        }
        let demands = group.demands(context);
        let check = group.check(&demands)?;
        let options = CheckOptions {
            on_failure: None,
            refundable: group.is_refundable || is_withdrawable,
            each: &group.each,
            may_omit: true,
            spent: context.spent,
        };
        self.0.limiter.check_with(&check, options).await.map_err(|_unavailable| Undecided::NoAnswer)
    }

    /// Refunds a decision on limits of a group, in the store in which they were charged: the shields' store, the
    /// limiter's store, or this instance's share.
    ///
    /// `check` must have exactly the limits of `decision`, in the same order; they may be a part of the group. A denial
    /// and an uncounted admission refund nothing. Call it at most once per decision.
    ///
    /// # Errors
    /// Returns an error if the store does not answer or panics. The refund is then lost.
    pub(super) async fn refund(
        &self,
        group: &LimitGroup,
        check: &Check<'_>,
        decision: &Decision,
    ) -> Result<(), StoreError> {
        if group.is_shield {
            catch_panic(|| self.0.shield.refund(check, decision)).ok_or_else(panicked)
        } else {
            self.0.limiter.refund(check, decision).await
        }
    }
}
