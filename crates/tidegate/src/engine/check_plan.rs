//! Check plans: what a combination of rules demands, laid out once.
//!
//! Most requests meet one of a few combinations of rules. What a combination demands (which limits, on which counters,
//! in which order, with which headers) depends only on the rules and on the caller's limit set. A [`CheckPlan`] holds
//! it. Only the subjects and the cost come with the request, as a [`RequestContext`].

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tidegate_core::{
    Algorithm, Check, Cost, DEMANDS_MAX, Decision, Demand, Key, Limit, LimitStatus, RuleScopeBuf, Source, Wait,
};

use super::Refusal;
use super::resolve::{RequestContext, RequestOptions};
use super::rule_counts::{RuleCount, RuleCounts};
use crate::answer::{Policies, Policy};
use crate::counts::DecisionOutcome;
use crate::failure::OnFailure;
use crate::identity::SubjectKey;
use crate::limiter::{LimitOptions, refund_status};
use crate::rules::{Charge, CompiledRule, LimitSet, Mode, RuleSet};

/// The limits of a combination of rules, for callers with one limit set. The limits of each group are decided together.
pub(super) struct CheckPlan {
    /// The limits of the enforced shield rules, counted in this process. `None` if there are none.
    pub(super) shield: Option<LimitGroup>,
    /// The limits of all other enforced rules. `None` if there are none.
    pub(super) enforced: Option<LimitGroup>,
    /// The limits of each shadow rule, one group per rule.
    pub(super) shadow: Vec<LimitGroup>,
}

/// Limits of one or more rules that are decided together. There is at least one.
pub(super) struct LimitGroup {
    pub(super) limits: Vec<PlannedLimit>,
    /// The policies of `limits`, in the same order.
    pub(super) policies: Arc<Policies>,
    /// The options of `limits`, in the same order. All failure policies are `allow` in a shadow rule.
    pub(super) each: Box<[LimitOptions]>,
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

/// One limit of one rule, with everything that is needed to check it except the subject.
pub(super) struct PlannedLimit {
    limit: Limit,
    scope: RuleScopeBuf,
    /// The index of the rule's subject in the [`RequestContext`].
    subject: usize,
    pub(super) policy: Arc<Policy>,
    /// The cost that the rule sets. The options of a request may override it.
    cost: Cost,
    pub(super) charge: Charge,
}

/// The demands of a request on the limits of one group, in the order of the group.
pub(super) type Demands<'a> = SmallVec<[Demand<'a>; 2]>;

/// The reason why a group of limits could not be decided.
pub(super) enum Undecided {
    /// The store did not answer, and the failure policy of a rule is `deny`.
    NoAnswer,
    /// The limits do not form a valid [`Check`].
    InvalidCheck,
}

impl CheckPlan {
    /// Lays out the limits of the rules with these indices in `set`, for callers with this limit set.
    ///
    /// `counts` must be those of `set`. The subjects of a [`RequestContext`] for this plan must be in the order of
    /// `rules`. Rules in the mode `off` are left out. So are rules by plan if the limit set is not one of `set`.
    ///
    /// # Panics
    /// Panics if an index is not one of `set`.
    pub(super) fn new(set: &RuleSet, rules: &[u32], limit_set: &LimitSet, counts: &RuleCounts) -> CheckPlan {
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

    /// Returns whether a group has more limits than can be decided together.
    pub(super) fn is_oversized(&self) -> bool {
        self.shield.iter().chain(&self.enforced).chain(&self.shadow).any(|group| group.limits.len() > DEMANDS_MAX)
    }

    /// Returns the limits whose status the client is shown: the enforced ones or, if there are none, the shields.
    ///
    /// `None` if only shadow rules apply.
    pub(super) fn shown(&self) -> Option<&LimitGroup> {
        self.enforced.as_ref().or(self.shield.as_ref())
    }

    /// Returns whether a request with these options may be charged and then refused, because its wait exceeds
    /// `max_wait`.
    ///
    /// `false` without a `max_wait`, or if the queues cut by [`LimitGroup::demands`] exclude every longer wait. They do
    /// not if the counters may be `in_shares`: this instance's share of a leaky bucket leaks more slowly than the
    /// limit.
    pub(super) fn may_be_withdrawn(&self, options: &RequestOptions, in_shares: bool) -> bool {
        let Some(max_wait) = options.max_wait else { return false };
        let shown = self.shown().filter(|group| group.may_delay);
        shown.is_some_and(|group| in_shares || group.limits.iter().any(|limit| limit.may_exceed(max_wait, options)))
    }
}

/// A rule whose limits are to be put into a group.
struct PlannedRule<'a> {
    rule: &'a CompiledRule,
    subject: usize,
    limit_set: &'a LimitSet,
    count: RuleCount,
}

impl PlannedRule<'_> {
    fn limits(&self) -> Vec<PlannedLimit> {
        let limit = |policy: &Arc<Policy>| PlannedLimit {
            limit: *policy.limit(),
            scope: RuleScopeBuf::new(self.rule.name().clone(), policy.limit_name()),
            subject: self.subject,
            policy: policy.clone(),
            cost: self.rule.cost(),
            charge: self.rule.charge(),
        };
        self.rule.policies(self.limit_set).iter().map(limit).collect()
    }
}

impl LimitGroup {
    /// Groups the limits of these rules, in their order. Returns `None` if they have no limits.
    ///
    /// `is_shield` says whether the counters are in the shields' store.
    fn new(set: &RuleSet, rules: &[PlannedRule<'_>], is_shield: bool) -> Option<LimitGroup> {
        let limits: Vec<PlannedLimit> = rules.iter().flat_map(PlannedRule::limits).collect();
        let has_distinct_counters = has_distinct_counters(&limits, limits.last()?.subject);
        let policies = Policies::new(limits.iter().map(|limit| limit.policy.clone()));
        let options = |PlannedRule { rule, .. }: &PlannedRule<'_>| LimitOptions {
            on_failure: Some(rule.on_failure()),
            identifies_caller: rule.by().identify_caller(),
        };
        let of_rule = |rule: &PlannedRule<'_>| std::iter::repeat_n(options(rule), rule.limits().len());
        let counted = |rule: &PlannedRule<'_>| (rule.limits().len(), rule.count.clone());
        Some(LimitGroup {
            policies: Arc::new(policies.with_exposed_headers(set.exposes_headers())),
            each: rules.iter().flat_map(of_rule).collect(),
            rules: rules.iter().map(counted).filter(|(limits, _)| *limits > 0).collect(),
            is_shield,
            is_refundable: limits.iter().any(|limit| limit.charge.is_refundable()),
            may_delay: limits.iter().any(PlannedLimit::may_delay),
            has_distinct_counters,
            limits,
        })
    }

    /// Groups the limits of a shadow rule, with the failure policy `allow`. Returns `None` if it has no limits.
    fn shadow(set: &RuleSet, rule: PlannedRule<'_>, is_shield: bool) -> Option<LimitGroup> {
        let mut group = LimitGroup::new(set, &[rule], is_shield)?;
        group.each.iter_mut().for_each(|limit| limit.on_failure = Some(OnFailure::Allow));
        Some(group)
    }

    /// Returns the demands of a request on all limits, in their order. `context` must have a subject for each rule of
    /// the plan.
    ///
    /// If the request has a `max_wait` and costs at most 1, the queue of a leaky bucket is cut to the slots whose wait
    /// is within it, but to at least one. The store then denies the request, instead of charging units that have to be
    /// refunded. For a higher cost the queue is not cut, because such a request waits for the units before it and not
    /// for its own.
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

    /// Creates a check of `demands`, which must be the result of [`LimitGroup::demands`].
    ///
    /// # Errors
    /// Returns an error, and logs it, if two limits count on one counter, or if there are more limits than a check may
    /// have. The configuration prevents this for most combinations of rules.
    pub(super) fn check<'a>(&self, demands: &'a [Demand<'a>]) -> Result<Check<'a>, Undecided> {
        if self.has_distinct_counters {
            return Ok(Check::of_distinct(demands));
        }
        Check::new(demands).map_err(|error| {
            tracing::error!(%error, "the rules that match one request cannot be decided together");
            Undecided::InvalidCheck
        })
    }

    /// Returns whether the failure policy of at least one limit is `deny`.
    pub(super) fn denies_on_failure(&self) -> bool {
        self.each.iter().any(|limit| limit.on_failure == Some(OnFailure::Deny))
    }

    /// Counts the result of a check of this group, and returns the decision if it is an admission.
    ///
    /// `options` must be those of the request. An admission with a wait above `max_wait` is returned, although it is
    /// counted as a denial.
    ///
    /// # Errors
    /// Returns the refusal by a denial, by a ban in the store, or as unavailable if the group was not decided. A ban is
    /// not counted, because no rule decided.
    pub(super) fn conclude(
        &self,
        result: Result<Decision, Undecided>,
        options: &RequestOptions,
    ) -> Result<Decision, Box<Refusal>> {
        let decision = result.map_err(|reason| {
            self.count_undecided(&reason);
            Box::new(Refusal::Unavailable { policies: self.policies.clone() })
        })?;
        if let Some(banned) = Refusal::by_ban(&decision) {
            return Err(Box::new(banned));
        }
        self.count(&decision, options);
        if decision.allowed() { Ok(decision) } else { Err(Box::new(self.denial(decision, options))) }
    }

    /// Counts a request that was refused as unavailable, for each rule.
    ///
    /// If the store did not answer, a rule with the failure policy `allow` has allowed the request, with
    /// [`Source::None`]: another rule refused it.
    fn count_undecided(&self, reason: &Undecided) {
        let mut index = 0;
        for (limits, count) in &self.rules {
            let outcome = match (reason, self.each[index].on_failure) {
                (Undecided::NoAnswer, Some(OnFailure::Allow)) => DecisionOutcome::Allow,
                (Undecided::NoAnswer | Undecided::InvalidCheck, _) => DecisionOutcome::Unavailable,
            };
            count.count(outcome, Source::None);
            index += limits;
        }
    }

    /// Counts the decision of each rule. Must not be called for a ban.
    ///
    /// A rule has denied if one of its limits has, or delays the request beyond `max_wait`. A rule that was omitted
    /// because the store did not answer has allowed, with [`Source::None`]. A rule that is omitted from a cached denial,
    /// because none of its limits has a cached status, has not decided, and is not counted.
    pub(super) fn count(&self, decision: &Decision, options: &RequestOptions) {
        // A request that is admitted but will not wait so long is refused.
        let passes = |status: &LimitStatus| status.allowed && !(self.may_delay && options.exclude(delay(status)));
        let (mut statuses, source, mut index) = (decision.limits.iter(), decision.source, 0);
        for (limits, count) in &self.rules {
            let known = (index..index + limits).filter(|&index| !decision.omitted.contains(index)).count();
            let allowed = statuses.by_ref().take(known).fold(true, |all, status| all & passes(status));
            match (known, source) {
                (1.., _) => count.count(DecisionOutcome::of(allowed), source),
                (0, Source::DenyCache) => {}
                (0, _) => count.count(DecisionOutcome::Allow, Source::None),
            }
            index += limits;
        }
    }

    /// Converts a decision that denies to a refusal, with the policies of the limits that were decided.
    ///
    /// With a `max_wait`, the statuses of leaky buckets change: if a request could get a slot but its wait would exceed
    /// `max_wait`, the status denies, and its `retry_after` is the time until both the slot and the wait are available.
    fn denial(&self, mut decision: Decision, options: &RequestOptions) -> Refusal {
        let policies = self.policies_of(&decision);
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

    /// Converts an admission whose wait exceeds `max_wait` to a refusal. The caller must refund all its charges.
    ///
    /// The statuses are those after the refund. Only limits whose delay exceeds `max_wait` deny, and their
    /// `retry_after` is the excess.
    pub(super) fn withdrawal(&self, mut decision: Decision, max_wait: Duration) -> Refusal {
        let policies = self.policies_of(&decision);
        for (status, policy) in decision.limits.iter_mut().zip(policies.policies()) {
            let excess_us = delay(status).as_micros().and_then(|us| us.checked_sub(as_micros(max_wait)));
            status.allowed = excess_us.is_none_or(|us| us == 0);
            status.retry_after = Wait::from_micros(excess_us.unwrap_or(0));
            refund_status(status, policy.limit());
        }
        Refusal::Denied { decision, policies }
    }

    /// Returns the policies of the limits that were decided, in the order of the decision's statuses.
    fn policies_of(&self, decision: &Decision) -> Arc<Policies> {
        if decision.omitted.is_empty() {
            return self.policies.clone();
        }
        Arc::new(self.policies.subset(|index| !decision.omitted.contains(index)))
    }
}

impl PlannedLimit {
    /// Returns the demand of a request on this limit: the subject of its rule, and the cost of the request's options,
    /// else of the rule.
    ///
    /// The queue of a leaky bucket is not cut for `max_wait`; see [`LimitGroup::demands`].
    ///
    /// # Panics
    /// Panics if the context does not have a subject for each rule of the plan.
    fn demand<'a>(&'a self, context: &'a RequestContext) -> Demand<'a> {
        let subject = context.subjects[self.subject].as_bytes();
        // A subject has at most eight values of some hundred bytes each; longer values are replaced by their digest.
        let key = Key::scoped(subject, self.scope.scope()).expect("a subject is far shorter than a key may be");
        Demand { limit: self.limit, key, cost: context.options.cost.unwrap_or(self.cost) }
    }

    /// Returns whether the limit may admit a request and delay it: it is a leaky bucket.
    fn may_delay(&self) -> bool {
        self.limit.algorithm() == Algorithm::LeakyBucket
    }

    /// Returns whether the limit may admit a request with a wait above `max_wait`, although [`LimitGroup::demands`]
    /// cuts its queue: the cost is above 1, or `max_wait` is shorter than the wait of one slot.
    fn may_exceed(&self, max_wait: Duration, options: &RequestOptions) -> bool {
        let costs_more_than_one = options.cost.unwrap_or(self.cost).units() > 1;
        self.may_delay() && (costs_more_than_one || slots_within(&self.limit, max_wait) == 0)
    }
}

/// Returns whether no two limits count on one counter, and there are not too many for one check.
///
/// This is tested with one subject for all rules. If it holds then, it holds for all subjects. `last_subject` is the
/// highest index of a subject in `limits`.
fn has_distinct_counters(limits: &[PlannedLimit], last_subject: usize) -> bool {
    let subjects = smallvec::smallvec![SubjectKey::empty(); last_subject + 1];
    let one_subject = RequestContext { subjects, options: RequestOptions::default(), spent: Duration::ZERO };
    let demands: Demands<'_> = limits.iter().map(|limit| limit.demand(&one_subject)).collect();
    Check::new(&demands).is_ok()
}

/// Returns the time for which a limit delays a request that it admits: zero unless the limit is a leaky bucket, and
/// zero for a peek (cost 0).
///
/// The status must be `allowed`. For a denial, the result is the time until a retry, which is not a delay.
pub(super) fn delay(status: &LimitStatus) -> Wait {
    if status.cost == 0 { Wait::ZERO } else { status.retry_after }
}

/// Returns the number of slots of a leaky bucket that become free within `max_wait`, rounded down, whatever the size of its
/// queue.
fn slots_within(limit: &Limit, max_wait: Duration) -> u128 {
    max_wait.as_micros().saturating_mul(u128::from(limit.quota())) / u128::from(limit.window_us())
}

fn as_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
