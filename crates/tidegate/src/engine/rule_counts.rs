//! Counts of the decisions of each rule. They are kept by the rule's name, so they survive a reload.

use std::collections::HashMap;
use std::sync::Arc;

use tidegate_core::Source;

use crate::counts::{DecisionCounts, DecisionOutcome, OutcomeCount};
use crate::rules::{Mode, RuleSet};

/// The decisions of one rule in one mode. A denial of a shadow rule is a request that it would have refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleStats {
    /// The rule's name.
    pub rule: Arc<str>,
    /// The mode in which the rule was applied.
    pub mode: Mode,
    /// The number of decisions by outcome and source, as [`DecisionCounts::counts`] returns them.
    pub counts: Vec<OutcomeCount>,
}

impl RuleStats {
    /// Returns the number of requests that the rule admitted, whether or not another rule refused them. Requests that
    /// were admitted uncounted, because the store did not answer, are included.
    pub fn allowed(&self) -> u64 {
        self.sum(DecisionOutcome::Allow)
    }

    /// Returns the number of requests that the rule denied or, as a shadow rule, would have denied.
    pub fn denied(&self) -> u64 {
        self.sum(DecisionOutcome::Deny)
    }

    /// Returns the number of requests that were refused as unavailable, because the store did not answer.
    pub fn unavailable(&self) -> u64 {
        self.sum(DecisionOutcome::Unavailable)
    }

    fn sum(&self, outcome: DecisionOutcome) -> u64 {
        self.counts.iter().filter(|cell| cell.outcome == outcome).map(|cell| cell.count).sum()
    }
}

/// The counts of one rule in each mode, so that no count decreases when a rule changes its mode.
#[derive(Default)]
struct ByMode {
    enforce: DecisionCounts,
    shadow: DecisionCounts,
}

impl ByMode {
    fn of(&self, mode: Mode) -> &DecisionCounts {
        if mode == Mode::Shadow { &self.shadow } else { &self.enforce }
    }
}

/// The counts of all rules of a set, in the order of the set.
pub(super) struct RuleCounts(Vec<Arc<ByMode>>);

impl RuleCounts {
    /// Creates counts for these rules. A rule with the name of an earlier rule continues its counts.
    ///
    /// The counts of earlier rules that are not in the set any more are dropped.
    pub(super) fn new(rules: &RuleSet, before: Option<(&RuleSet, &RuleCounts)>) -> RuleCounts {
        let known: HashMap<&str, &Arc<ByMode>> = before
            .map(|(rules, counts)| rules.rules().iter().map(|rule| &**rule.name()).zip(&counts.0).collect())
            .unwrap_or_default();
        let counts = |name: &str| known.get(name).map_or_else(Arc::default, |counts| Arc::clone(counts));
        RuleCounts(rules.rules().iter().map(|rule| counts(rule.name())).collect())
    }

    /// Returns one entry per rule and mode, in the order of the rules: for the rule's mode, and for another mode if
    /// decisions were counted in it. A rule in the mode `off` has no entry of that mode.
    ///
    /// `rules` must be the set that these counts were created for.
    pub(super) fn stats(&self, rules: &RuleSet) -> Vec<RuleStats> {
        let mut stats = Vec::with_capacity(self.0.len());
        for (rule, counts) in rules.rules().iter().zip(&self.0) {
            for mode in [Mode::Enforce, Mode::Shadow] {
                let counts = counts.of(mode);
                if rule.mode() == mode || !counts.is_empty() {
                    stats.push(RuleStats { rule: rule.name().clone(), mode, counts: counts.counts() });
                }
            }
        }
        stats
    }

    /// Returns the counts of the rule at this index of the set, in this mode. Panics if there is no such rule.
    pub(super) fn of(&self, index: u32, mode: Mode) -> RuleCount {
        RuleCount { counts: self.0[index as usize].clone(), mode }
    }
}

/// The counts of one rule in one mode.
#[derive(Clone)]
pub(super) struct RuleCount {
    counts: Arc<ByMode>,
    mode: Mode,
}

impl RuleCount {
    /// Counts one decision.
    pub(super) fn count(&self, outcome: DecisionOutcome, source: Source) {
        self.counts.of(self.mode).count(outcome, source);
    }
}

#[cfg(test)]
mod tests;
