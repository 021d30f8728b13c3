//! The rules in use, with the check plans that were laid out for them.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use foldhash::quality::RandomState;
use parking_lot::RwLock;
use tidegate_core::{Demand, Limit};

use super::Companion;
use super::check_plan::CheckPlan;
use super::rule_counts::{RuleCounts, RuleStats};
use crate::answer::{Policies, Policy};
use crate::rules::{Indices, LimitSet, RuleSet};

/// The maximum number of entries of a [`LayoutCache`].
pub(super) const LAYOUTS_MAX: usize = 4_096;

/// A rule set in use, with what is derived from it once: the counts of its rules, and cached check plans.
pub(super) struct ActiveRules {
    pub(super) rules: RuleSet,
    pub(super) companion: Option<Companion>,
    counts: RuleCounts,
    /// The check plans, by the indices of their rules and the limit set.
    plans: LayoutCache<(Indices, LimitSet), CheckPlan>,
    /// The policies of explicit checks with one limit.
    explicit: LayoutCache<Limit, Policies>,
}

/// A cache of values that are laid out on demand. At most [`LAYOUTS_MAX`]: then all are dropped, and laid out again.
struct LayoutCache<K, V>(RwLock<HashMap<K, Arc<V>, RandomState>>);

impl<K, V> Default for LayoutCache<K, V> {
    fn default() -> LayoutCache<K, V> {
        LayoutCache(RwLock::default())
    }
}

impl<K: Eq + Hash, V> LayoutCache<K, V> {
    /// Returns the value of a key: the cached one, else the result of `lay_out`, which is then cached.
    fn get(&self, key: K, lay_out: impl FnOnce(&K) -> V) -> Arc<V> {
        if let Some(value) = self.0.read().get(&key) {
            return value.clone();
        }
        let value = Arc::new(lay_out(&key));
        let mut cache = self.0.write();
        if cache.len() >= LAYOUTS_MAX {
            cache.clear();
        }
        cache.insert(key, value.clone());
        value
    }
}

impl ActiveRules {
    /// Puts rules into use. A rule with the name of a rule in `before` continues its counts. No plan is cached yet. The
    /// companion is that of `before`.
    pub(super) fn new(rules: RuleSet, before: Option<&ActiveRules>) -> ActiveRules {
        ActiveRules {
            counts: RuleCounts::new(&rules, before.map(|before| (&before.rules, &before.counts))),
            plans: LayoutCache::default(),
            explicit: LayoutCache::default(),
            companion: before.and_then(|before| before.companion.clone()),
            rules,
        }
    }

    /// Sets the companion of the rules.
    pub(super) fn with_companion(self, companion: Companion) -> ActiveRules {
        ActiveRules { companion: Some(companion), ..self }
    }

    /// Returns the statistics of the rules, by rule and mode: see [`RuleCounts::stats`].
    pub(super) fn stats(&self) -> Vec<RuleStats> {
        self.counts.stats(&self.rules)
    }

    /// Returns the check plan of the rules with these indices for callers with this limit set: a cached one, else a new
    /// one, which is then cached.
    ///
    /// The limit set must be one of this rule set; otherwise rules by plan have no limits. If own limits of a key that a
    /// lookup found are too many to be decided together with the others, the limits of its plan are laid out, and a
    /// warning is logged.
    ///
    /// # Panics
    /// Panics if an index is not one of this rule set.
    pub(super) fn check_plan(&self, rules: Indices, limit_set: LimitSet) -> Arc<CheckPlan> {
        self.plans.get((rules, limit_set), |(rules, limit_set)| self.lay_out(rules, limit_set))
    }

    /// Returns the policies of an explicit check with these demands, in the same order. Those of a single demand are
    /// cached.
    pub(super) fn explicit_policies(&self, demands: &[Demand<'_>]) -> Arc<Policies> {
        let lay_out = |limits: &mut dyn Iterator<Item = Limit>| {
            let policies = limits.map(|limit| Policy::of(limit).with_styles(self.rules.styles()));
            Policies::new(policies).with_exposed_headers(self.rules.exposes_headers())
        };
        match demands {
            [only] => self.explicit.get(only.limit, |limit| lay_out(&mut std::iter::once(*limit))),
            several => Arc::new(lay_out(&mut several.iter().map(|demand| demand.limit))),
        }
    }

    /// Returns the number of cached policies of explicit checks.
    #[cfg(test)]
    pub(super) fn cached_policies(&self) -> usize {
        self.explicit.0.read().len()
    }

    /// Lays out the check plan of the rules with these indices; see [`ActiveRules::check_plan`].
    fn lay_out(&self, rules: &[u32], limit_set: &LimitSet) -> CheckPlan {
        let plan = CheckPlan::new(&self.rules, rules, limit_set, &self.counts);
        if limit_set.own.is_none() || !plan.is_oversized() {
            return plan;
        }
        // The rules alone are within the bound: the configuration was checked.
        tracing::warn!(
            "the own limits of an API key are too many for the rules that match one request; its plan applies"
        );
        CheckPlan::new(&self.rules, rules, &limit_set.id.into(), &self.counts)
    }
}
