//! What each rule has said, kept by its name: a reload changes the rules and not what they have said so far.

use std::collections::HashMap;
use std::sync::Arc;

use tollgate_core::Source;

use crate::counts::{Counted, DecisionCounts, DecisionOutcome};
use crate::rules::{Mode, RuleSet};

/// What one rule has said in one mode. Of a shadow rule, a denial is what it would have refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleStats {
    /// The rule's name.
    pub rule: Arc<str>,
    /// How it was applied.
    pub mode: Mode,
    /// How often it said what.
    pub counts: Vec<Counted>,
}

impl RuleStats {
    /// Requests it let pass.
    pub fn allowed(&self) -> u64 {
        self.times(DecisionOutcome::Allow)
    }

    /// Requests it refused, or would have.
    pub fn denied(&self) -> u64 {
        self.times(DecisionOutcome::Deny)
    }

    /// Requests that it could not decide, and refused.
    pub fn unavailable(&self) -> u64 {
        self.times(DecisionOutcome::Unavailable)
    }

    fn times(&self, said: DecisionOutcome) -> u64 {
        self.counts.iter().filter(|cell| cell.said == said).map(|cell| cell.times).sum()
    }
}

/// The counts of one rule, apart by mode, so that none ever falls because a rule changed its mode.
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

/// The counts of all rules of a set, in its order.
pub(super) struct RuleCounts(Vec<Arc<ByMode>>);

impl RuleCounts {
    /// For these rules, going on with what those of the same name have counted. Bounded by the rules: who is gone is forgotten.
    pub(super) fn new(rules: &RuleSet, before: Option<(&RuleSet, &RuleCounts)>) -> RuleCounts {
        let known: HashMap<&str, &Arc<ByMode>> = before
            .map(|(rules, counts)| rules.rules().iter().map(|rule| &**rule.name()).zip(&counts.0).collect())
            .unwrap_or_default();
        let counts = |name: &str| known.get(name).map_or_else(Arc::default, |counts| Arc::clone(counts));
        RuleCounts(rules.rules().iter().map(|rule| counts(rule.name())).collect())
    }

    /// One entry per rule and mode: the mode it has, and the one it had if anything was counted then.
    pub(super) fn stats(&self, rules: &RuleSet) -> Vec<RuleStats> {
        let mut stats = Vec::with_capacity(self.0.len());
        for (rule, counts) in rules.rules().iter().zip(&self.0) {
            for mode in [Mode::Enforce, Mode::Shadow] {
                let counts = counts.of(mode);
                if rule.mode() == mode || !counts.is_empty() {
                    stats.push(RuleStats { rule: rule.name().clone(), mode, counts: counts.counted() });
                }
            }
        }
        stats
    }

    /// Those of the rule at this place, applied so.
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
    pub(super) fn count(&self, said: DecisionOutcome, source: Source) {
        self.counts.of(self.mode).count(said, source);
    }
}

#[cfg(test)]
mod tests;
