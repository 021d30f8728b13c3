//! Check plans: what a combination of rules demands, laid out once.
//!
//! Most requests meet one of a few combinations of rules. What a combination demands (which limits, on which counters,
//! in which order, with which headers) depends only on the rules and on the caller's limit set. A [`CheckPlan`] holds
//! it. Only the subjects and the cost come with the request, as a [`RequestContext`].

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tollgate_core::{Algorithm, Check, Cost, Demand, Key, Limit, LimitStatus, RuleScopeBuf, Source, Wait};

use super::Refusal;
use super::request::{RequestContext, RequestOptions};
use super::rule_counts::{RuleCount, RuleCounts};
use crate::answer::{Policies, Policy};
use crate::counts::DecisionOutcome;
use crate::failure::OnFailure;
use crate::identity::SubjectKey;
use crate::limiter::EachDecision;
use crate::rules::{Charge, CompiledRule, LimitSetId, Mode, RuleSet};

/// The limits of a combination of rules, for callers with one limit set.
pub(super) struct CheckPlan {
    /// The limits of the enforced shield rules, counted in this process.
    pub(super) shield: Option<LimitGroup>,
    /// The limits of all other enforced rules.
    pub(super) enforced: Option<LimitGroup>,
    /// The limits of each shadow rule.
    pub(super) shadow: Vec<LimitGroup>,
}

/// Limits that are decided together.
pub(super) struct LimitGroup {
    pub(super) limits: Vec<PlannedLimit>,
    pub(super) policies: Arc<Policies>,
    /// The failure policy of each limit; `allow` in a shadow rule.
    pub(super) on_failure: Box<[OnFailure]>,
    /// The number of limits of each rule, in their order, and its counts.
    rules: SmallVec<[(usize, RuleCount); 1]>,
    /// Whether the counters are in the shield's memory store.
    pub(super) is_shield: bool,
    /// Whether a rule refunds by how the request ends.
    pub(super) is_refundable: bool,
    /// Whether a limit is a leaky bucket, which may admit a request and delay it.
    pub(super) may_delay: bool,
    /// Whether no two limits count on one counter, whatever the subjects are.
    has_distinct_counters: bool,
}

/// One limit of one rule.
pub(super) struct PlannedLimit {
    limit: Limit,
    scope: RuleScopeBuf,
    /// The index of the rule's subject in the [`RequestContext`].
    subject: usize,
    pub(super) policy: Arc<Policy>,
    cost: Cost,
    pub(super) charge: Charge,
}

/// The demands of one group of limits.
pub(super) type Demands<'a> = SmallVec<[Demand<'a>; 2]>;

/// The error of limits that could not be decided, where a rule's failure policy is `deny`.
pub(super) struct Undecided;

impl CheckPlan {
    /// Lays out what the rules with these indices demand of callers with this limit set.
    pub(super) fn new(set: &RuleSet, rules: &[u32], limit_set: LimitSetId, counts: &RuleCounts) -> CheckPlan {
        let (mut shield, mut enforced, mut shadow) = (Vec::new(), Vec::new(), Vec::new());
        for (subject, &index) in rules.iter().enumerate() {
            let rule = &set.rules()[index as usize];
            let planned = PlannedRule { rule, subject, limit_set, count: counts.of(index, rule.mode()) };
            match (rule.mode(), rule.is_shield()) {
                (Mode::Off, _) => {}
                (Mode::Shadow, is_shield) => shadow.extend(LimitGroup::shadow(set, planned, is_shield)),
                (Mode::Enforce, true) => shield.push(planned),
                (Mode::Enforce, false) => enforced.push(planned),
            }
        }
        CheckPlan {
            shield: LimitGroup::new(set, &shield, true),
            enforced: LimitGroup::new(set, &enforced, false),
            shadow,
        }
    }

    /// Returns the limits whose status the client is shown: the enforced ones or, if there are none, the shields.
    pub(super) fn shown(&self) -> Option<&LimitGroup> {
        self.enforced.as_ref().or(self.shield.as_ref())
    }

    /// Returns whether a request may be admitted and then refused, because its wait exceeds the bound.
    pub(super) fn may_be_withdrawn(&self, options: &RequestOptions) -> bool {
        let Some(max_wait) = options.max_wait else { return false };
        let shown = self.shown().filter(|group| group.may_delay);
        shown.is_some_and(|group| group.limits.iter().any(|limit| limit.may_exceed(max_wait, options)))
    }
}

/// A rule on its way into a group.
struct PlannedRule<'a> {
    rule: &'a CompiledRule,
    subject: usize,
    limit_set: LimitSetId,
    count: RuleCount,
}

impl PlannedRule<'_> {
    fn limits(&self) -> impl ExactSizeIterator<Item = PlannedLimit> {
        self.rule.policies(self.limit_set).iter().map(|policy| PlannedLimit {
            limit: *policy.limit(),
            scope: RuleScopeBuf::new(self.rule.name().clone(), policy.limit_name()),
            subject: self.subject,
            policy: policy.clone(),
            cost: self.rule.cost(),
            charge: self.rule.charge(),
        })
    }
}

impl LimitGroup {
    /// Groups the limits of these rules. Returns `None` if there are none.
    fn new(set: &RuleSet, rules: &[PlannedRule<'_>], is_shield: bool) -> Option<LimitGroup> {
        let limits: Vec<PlannedLimit> = rules.iter().flat_map(PlannedRule::limits).collect();
        let has_distinct_counters = has_distinct_counters(&limits, limits.last()?.subject);
        let policies = Policies::new(limits.iter().map(|limit| limit.policy.clone()));
        let of_rule = |rule: &PlannedRule<'_>| std::iter::repeat_n(rule.rule.on_failure(), rule.limits().len());
        let counted = |rule: &PlannedRule<'_>| (rule.limits().len(), rule.count.clone());
        Some(LimitGroup {
            policies: Arc::new(policies.with_exposed_headers(set.exposes_headers())),
            on_failure: rules.iter().flat_map(of_rule).collect(),
            rules: rules.iter().map(counted).filter(|(limits, _)| *limits > 0).collect(),
            is_shield,
            is_refundable: limits.iter().any(|limit| limit.charge.is_refundable()),
            may_delay: limits.iter().any(PlannedLimit::may_delay),
            has_distinct_counters,
            limits,
        })
    }

    /// Groups the limits of a shadow rule. If the store does not answer, they are left out.
    fn shadow(set: &RuleSet, rule: PlannedRule<'_>, is_shield: bool) -> Option<LimitGroup> {
        let group = LimitGroup::new(set, &[rule], is_shield)?;
        let on_failure = group.limits.iter().map(|_| OnFailure::Allow).collect();
        Some(LimitGroup { on_failure, ..group })
    }

    /// Returns the demands of a request on all limits.
    ///
    /// With a bound on the wait, the queue of a leaky bucket is cut to the slots whose wait is within the bound. The
    /// store then denies the request with the right `retry_after`, and nothing has to be charged and refunded. This
    /// holds for a cost of 1 only: a higher cost waits for the units before it and not for its own.
    pub(super) fn demands<'a>(&'a self, context: &'a RequestContext) -> Demands<'a> {
        let mut demands: Demands<'a> = self.limits.iter().map(|limit| limit.demand(context)).collect();
        if self.may_delay
            && let Some(max_wait) = context.options.max_wait
        {
            for Demand { limit, cost, .. } in &mut demands {
                let slots = slots_within(limit, max_wait);
                if cost.units() <= 1 && limit.queue().is_some_and(|queue| slots < u128::from(queue)) {
                    *limit = limit.with_queue((slots as u64).max(1)).unwrap_or(*limit);
                }
            }
        }
        demands
    }

    /// Creates a check of this group's demands.
    ///
    /// # Errors
    /// Returns an error if two limits count on one counter. The configuration prevents this for most combinations.
    pub(super) fn check<'a>(&self, demands: &'a [Demand<'a>]) -> Result<Check<'a>, Undecided> {
        if self.has_distinct_counters {
            return Ok(Check::of_distinct(demands));
        }
        Check::new(demands).map_err(|error| {
            tracing::error!(%error, "the rules that match one request cannot be decided together");
            Undecided
        })
    }

    /// Returns whether the failure policy of a limit is `deny`.
    pub(super) fn denies_on_failure(&self) -> bool {
        self.on_failure.contains(&OnFailure::Deny)
    }

    /// Counts the result of a check, and converts a denial, a ban or a failure to a refusal. A ban is not counted: it is
    /// no decision of a rule.
    pub(super) fn conclude(
        &self,
        result: Result<EachDecision, Undecided>,
        options: &RequestOptions,
    ) -> Result<EachDecision, Box<Refusal>> {
        let Ok(decided) = result else {
            self.rules.iter().for_each(|(_, count)| count.count(DecisionOutcome::Unavailable, Source::None));
            return Err(Box::new(Refusal::Unavailable { policies: self.policies.clone() }));
        };
        if let Some(banned) = Refusal::by_ban(decided.decision()) {
            return Err(Box::new(banned));
        }
        self.count(&decided, options);
        match decided.decision().allowed() {
            true => Ok(decided),
            false => Err(Box::new(self.denial(decided, options))),
        }
    }

    /// Counts the decision of each rule. A rule that was left out because the store did not answer has allowed.
    pub(super) fn count(&self, decided: &EachDecision, options: &RequestOptions) {
        // A request that is admitted but will not wait so long is refused.
        let passes = |status: &LimitStatus| status.allowed && !(self.may_delay && options.exclude(delay(status)));
        let (mut statuses, mut index) = (decided.decision().limits.iter(), 0);
        for (limits, count) in &self.rules {
            match decided.covers(index) {
                true => {
                    let allowed = statuses.by_ref().take(*limits).fold(true, |all, status| all & passes(status));
                    count.count(DecisionOutcome::of(allowed), decided.decision().source);
                }
                false => count.count(DecisionOutcome::Allow, Source::None),
            }
            index += limits;
        }
    }

    /// Converts a denial to a refusal.
    ///
    /// A request that comes back to a leaky bucket as soon as there is a slot may find that the slot's wait exceeds the
    /// bound. So the refusal reports when both the slot and the wait are within reach.
    fn denial(&self, decided: EachDecision, options: &RequestOptions) -> Refusal {
        let policies = self.policies_of(&decided);
        let mut decision = decided.into_decision();
        if let Some(max_wait) = options.max_wait.filter(|_| self.may_delay) {
            let leaky = |policy: &Policy| policy.limit().algorithm() == Algorithm::LeakyBucket;
            let statuses = policies.policies().zip(&mut decision.limits);
            for (_, status) in statuses.filter(|(policy, _)| leaky(policy)) {
                // All units in the bucket leak before the request proceeds.
                let excess_us = status.reset_after.as_micros().map_or(0, |us| us.saturating_sub(as_micros(max_wait)));
                let retry_after = if status.allowed { Wait::ZERO } else { status.retry_after };
                status.allowed &= excess_us == 0;
                status.retry_after = retry_after.max(Wait::from_micros(excess_us));
            }
        }
        Refusal::Denied { decision, policies }
    }

    /// Converts an admission whose wait exceeds `max_wait`, and which was refunded, to a refusal.
    pub(super) fn withdrawal(&self, decided: EachDecision, max_wait: Duration) -> Refusal {
        let policies = self.policies_of(&decided);
        let mut decision = decided.into_decision();
        for (status, policy) in decision.limits.iter_mut().zip(policies.policies()) {
            let excess_us = delay(status).as_micros().and_then(|us| us.checked_sub(as_micros(max_wait)));
            status.allowed = excess_us.is_none_or(|us| us == 0);
            status.retry_after = Wait::from_micros(excess_us.unwrap_or(0));
            refund_status(status, policy.limit());
        }
        Refusal::Denied { decision, policies }
    }

    /// Returns the policies of the limits that were decided.
    fn policies_of(&self, decided: &EachDecision) -> Arc<Policies> {
        match decided {
            EachDecision::Complete(_) => self.policies.clone(),
            EachDecision::Partial(_) => Arc::new(self.policies.subset(|index| decided.covers(index))),
        }
    }
}

impl PlannedLimit {
    /// Returns the demand of a request on this limit.
    fn demand<'a>(&'a self, context: &'a RequestContext) -> Demand<'a> {
        let subject = context.subjects[self.subject].as_bytes();
        // A subject has at most eight values of some hundred bytes each; longer values are replaced by their digest.
        let key = Key::scoped(subject, self.scope.scope()).expect("a subject is far shorter than a key may be");
        Demand { limit: self.limit, key, cost: context.options.cost.unwrap_or(self.cost) }
    }

    /// Returns whether the limit may admit a request and delay it.
    fn may_delay(&self) -> bool {
        self.limit.algorithm() == Algorithm::LeakyBucket
    }

    /// Returns whether the limit may admit a request with a wait above `max_wait`, although its queue was cut.
    fn may_exceed(&self, max_wait: Duration, options: &RequestOptions) -> bool {
        let costs_more_than_one = options.cost.unwrap_or(self.cost).units() > 1;
        self.may_delay() && (costs_more_than_one || slots_within(&self.limit, max_wait) == 0)
    }
}

/// Returns whether no two limits count on one counter. If that holds for one subject, it does for all.
fn has_distinct_counters(limits: &[PlannedLimit], last_subject: usize) -> bool {
    let subjects = smallvec::smallvec![SubjectKey::empty(); last_subject + 1];
    let one_subject = RequestContext { subjects, options: RequestOptions::default(), spent: Duration::ZERO };
    let demands: Demands<'_> = limits.iter().map(|limit| limit.demand(&one_subject)).collect();
    Check::new(&demands).is_ok()
}

/// Returns the time for which a leaky bucket delays a request that it admits. Zero for a peek (cost 0).
pub(super) fn delay(status: &LimitStatus) -> Wait {
    if status.cost == 0 { Wait::ZERO } else { status.retry_after }
}

/// Changes the status of a limit to what it is after the request's units are refunded.
pub(super) fn refund_status(status: &mut LimitStatus, limit: &Limit) {
    let full = limit.cost_max();
    status.remaining = status.remaining.saturating_add(status.cost).min(full);
    if status.remaining == full {
        (status.next_after, status.reset_after) = (Wait::ZERO, Wait::ZERO);
    }
}

/// Returns the number of slots in a leaky bucket's queue whose wait is at most `max_wait`.
fn slots_within(limit: &Limit, max_wait: Duration) -> u128 {
    max_wait.as_micros().saturating_mul(u128::from(limit.quota())) / u128::from(limit.window_us())
}

fn as_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
