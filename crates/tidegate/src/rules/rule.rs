//! The compiled form of a rule.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use tidegate_config::{Charge, Mode};
use tidegate_core::{Cost, Limit, OnFailure};

use super::plan::LimitSet;
use crate::answer::Policy;
use crate::identity::Subjects;

/// A compiled rule: the subject by which it counts requests, its limits, and how it charges and refuses.
///
/// Does not contain the conditions of the rule on requests; [`RuleSet::matching`](super::RuleSet::matching) finds the
/// rules that match a request.
#[derive(Clone, Debug)]
pub struct CompiledRule {
    pub(crate) name: Arc<str>,
    pub(crate) groups: Box<[Arc<str>]>,
    pub(crate) by: Subjects,
    pub(crate) limits: RuleLimits,
    pub(crate) mode: Mode,
    pub(crate) on_failure: OnFailure,
    pub(crate) charge: Charge,
    pub(crate) cost: Cost,
    pub(crate) is_shield: bool,
    pub(crate) overlaps: Overlaps,
}

/// The limits of other enforced rules that may apply to the same requests as an enforced rule.
///
/// The own limits of keys that lookups find are named by it, as `config/compile/policy_names.rs` names those of the
/// configuration. Empty for a rule that is not enforced.
#[derive(Clone, Debug, Default)]
pub(crate) struct Overlaps {
    /// Whether one of the other rules takes its limits from plans, so that it applies the same own limits.
    pub(crate) plan_rule: bool,
    /// The names of the limits of the other rules.
    pub(crate) names: BTreeSet<Box<str>>,
}

/// The limits of a rule: its own, or those of the caller's plan or API key.
#[derive(Clone, Debug)]
pub(crate) enum RuleLimits {
    /// The rule has limits of its own, the same for all callers.
    Own(Box<[Arc<Policy>]>),
    /// The limits are those of the caller's plan or API key: one list for each [`LimitSetId`], which is its index.
    Plan(Box<[Box<[Arc<Policy>]>]>),
}

impl CompiledRule {
    /// Returns the name of the rule. It appears in metrics and logs and is part of the names of its counters.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the groups of callers to which the rule applies. Empty if it applies to all callers.
    pub fn groups(&self) -> &[Arc<str>] {
        &self.groups
    }

    /// Returns whether the rule applies to callers in these groups: it has none itself, or one of them.
    pub fn applies_to_groups(&self, groups: &[Arc<str>]) -> bool {
        self.groups.is_empty() || self.groups.iter().any(|group| groups.contains(group))
    }

    /// Returns the subjects by which the rule counts. Requests share a counter if they agree in all of them.
    pub fn by(&self) -> &Subjects {
        &self.by
    }

    /// Returns the limits, with their names and formats, that the rule applies to a caller with this limit set.
    ///
    /// If the rule has limits of its own, `limit_set` is ignored. If its limits are those of the caller's plan
    /// ([`is_by_plan`](CompiledRule::is_by_plan)), an id that the rule set did not return has none. Each limit counts on
    /// the rule's name and its own name: see [`Scope::Rule`](crate::Scope::Rule).
    ///
    /// The limits of a key that a lookup found have the names that they would have if the configuration listed the key.
    pub fn policies(&self, limit_set: &LimitSet) -> Cow<'_, [Arc<Policy>]> {
        match (&self.limits, &limit_set.own) {
            (RuleLimits::Own(policies), None) => Cow::Borrowed(policies),
            (RuleLimits::Own(policies), Some(own)) => {
                let is_shared = |policy: &Policy| self.overlaps.plan_rule && own.has(policy.limit_name());
                let qualify = |policy: &Arc<Policy>| {
                    if is_shared(policy) { Arc::new(policy.qualified()) } else { policy.clone() }
                };
                policies.iter().map(qualify).collect()
            }
            (RuleLimits::Plan(by_limit_set), own) => {
                let of_plan = by_limit_set.get(limit_set.id.0 as usize).map_or(&[][..], |policies| policies);
                // A plan has at least one limit.
                let (Some(own), Some(like)) = (own, of_plan.first()) else { return Cow::Borrowed(of_plan) };
                let policy = |(name, limit): (&str, &Limit)| {
                    let policy = like.with_limit(name, *limit);
                    let is_shared = self.overlaps.plan_rule || self.overlaps.names.contains(name);
                    Arc::new(if is_shared { policy.qualified() } else { policy })
                };
                own.iter().map(policy).collect()
            }
        }
    }

    /// Iterates over all limits that the rule applies to any caller: its own, or those of all plans and of all API keys
    /// with limits of their own.
    ///
    /// Equal ones may occur several times.
    pub fn policies_of_all(&self) -> impl Iterator<Item = &Arc<Policy>> {
        let (own, by_limit_set) = match &self.limits {
            RuleLimits::Own(policies) => (&policies[..], &[][..]),
            RuleLimits::Plan(by_limit_set) => (&[][..], &by_limit_set[..]),
        };
        own.iter().chain(by_limit_set.iter().flatten())
    }

    /// Returns whether the limits are those of the caller's plan or API key, and not the rule's own.
    pub fn is_by_plan(&self) -> bool {
        matches!(self.limits, RuleLimits::Plan(_))
    }

    /// Returns whether the rule is not off and its limits are those of the caller's plan or API key.
    pub(crate) fn uses_plans(&self) -> bool {
        self.mode != Mode::Off && self.is_by_plan()
    }

    /// Returns the mode. If all rules are in shadow mode ([`Rules::shadow`](super::Rules::shadow)), `Shadow` instead of
    /// `Enforce`.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns how the limits of the rule are decided when the store does not answer. Not used in shadow mode.
    pub fn on_failure(&self) -> OnFailure {
        self.on_failure
    }

    /// Returns which requests are charged, depending on their responses.
    pub fn charge(&self) -> Charge {
        self.charge
    }

    /// Returns the units that the rule charges for a request, unless its
    /// [`RequestOptions`](crate::engine::RequestOptions) set another cost.
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// Returns whether the rule is a shield: counted by client address in process memory, and decided before all other
    /// rules.
    pub fn is_shield(&self) -> bool {
        self.is_shield
    }
}
