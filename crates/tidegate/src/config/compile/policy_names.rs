//! Qualifies the names of limits where two rules that can apply to one request have a limit of the same name.
//!
//! Clients see the names in headers and bodies, operators in explanations and counters, so a limit has one name
//! whatever the request: `per-minute`, or `search.per-minute`. It is determined here, from the whole configuration.
//! Counters are not affected: their keys have the name of the rule and the name of the limit, separately.
//!
//! Only enforced rules count, because clients never see a shadow rule: a trial beside a rule in force does not change
//! the names that clients see. The modes are those of the file, whether or not it has `shadow = true`, which is
//! temporary.
//!
//! The own limits of API keys that a lookup finds are not known here. So each rule keeps which names its neighbours have
//! ([`Overlaps`]), and [`CompiledRule::policies`] names these limits by the same principle: the limits of this key are
//! qualified, and equal names beside them. Those of other callers stay as they are.
//!
//! A request may match rules whose conditions exclude each other, if its path can be read in several ways or it has two
//! lines of one header. Then [`Policies`](crate::answer::Policies) qualifies equal names in its response.

use std::collections::BTreeSet;
use std::sync::Arc;

use tidegate_config::{RuleTable, Spanned};

use crate::answer::Policy;
use crate::rules::matcher::Conditions;
use crate::rules::{CompiledRule, Mode, Overlaps, RuleLimits};

/// The maximum number of comparisons of paths and hosts, which together take tens of milliseconds.
///
/// Further rules are assumed to apply to the same requests.
const COMPARISONS_MAX: usize = 200_000;

/// Qualifies the names of limits that another enforced rule has too, if both rules can apply to one request.
///
/// `conditions` has the conditions of each rule, and whether any request can meet them. `tables` are the rules as
/// written in the file. `has_several_methods` means that a request may have several methods.
pub(super) fn qualify(
    rules: &mut [CompiledRule],
    conditions: &[(Conditions, bool)],
    tables: &[Spanned<RuleTable>],
    has_several_methods: bool,
) {
    let is_enforced = |index: &usize| tables[*index].mode == Mode::Enforce && conditions[*index].1;
    let enforced: Vec<usize> = (0..rules.len()).filter(is_enforced).collect();
    let names: Vec<BTreeSet<Box<str>>> =
        rules.iter().map(|rule| rule.policies_of_all().map(|policy| policy.limit_name().into()).collect()).collect();
    set_overlaps(rules, conditions, &enforced, &names, has_several_methods);
    let mut shared: Vec<BTreeSet<Box<str>>> = vec![BTreeSet::new(); rules.len()];
    let mut comparisons_left = COMPARISONS_MAX;
    for (at, &one) in enforced.iter().enumerate() {
        for &other in &enforced[..at] {
            let is_new = |name: &str| !shared[one].contains(name) || !shared[other].contains(name);
            let common = names[one].intersection(&names[other]).filter(|name| is_new(name));
            let common: Vec<Box<str>> = common.cloned().collect();
            let (mine, theirs) = (&conditions[one].0, &conditions[other].0);
            if common.is_empty() {
                continue;
            }
            let comparisons = mine.comparisons_with(theirs);
            let overlaps = comparisons > comparisons_left || mine.overlaps(theirs, has_several_methods);
            comparisons_left = comparisons_left.saturating_sub(comparisons);
            if overlaps {
                shared[one].extend(common.iter().cloned());
                shared[other].extend(common);
            }
        }
    }
    for (rule, names) in rules.iter_mut().zip(&shared) {
        let qualify = |policy: &mut Arc<Policy>| {
            if names.contains(policy.limit_name()) {
                *policy = Arc::new(policy.qualified());
            }
        };
        match &mut rule.limits {
            RuleLimits::Own(policies) => policies.iter_mut().for_each(qualify),
            RuleLimits::Plan(by_limit_set) => by_limit_set.iter_mut().flatten().for_each(qualify),
        }
    }
}

/// Sets the [`Overlaps`] of the rules at the indices `enforced`, as far as own limits of keys need them: those of rules
/// that take their limits from plans, and of the rules that may apply to the same requests as one of these.
///
/// `names` has the names of the limits of each rule. The other parameters are those of [`qualify`].
fn set_overlaps(
    rules: &mut [CompiledRule],
    conditions: &[(Conditions, bool)],
    enforced: &[usize],
    names: &[BTreeSet<Box<str>>],
    has_several_methods: bool,
) {
    let mut comparisons_left = COMPARISONS_MAX;
    let mut overlaps: Vec<Overlaps> = vec![Overlaps::default(); rules.len()];
    for &one in enforced.iter().filter(|one| rules[**one].is_by_plan()) {
        for &other in enforced.iter().filter(|other| **other != one) {
            let is_by_plan = rules[other].is_by_plan();
            // If `one` overlaps a rule by plan, all its own limits are qualified, whatever the names of others are.
            if overlaps[one].plan_rule && overlaps[other].plan_rule {
                continue;
            }
            let (mine, theirs) = (&conditions[one].0, &conditions[other].0);
            let comparisons = mine.comparisons_with(theirs);
            let overlap = comparisons > comparisons_left || mine.overlaps(theirs, has_several_methods);
            comparisons_left = comparisons_left.saturating_sub(comparisons);
            if overlap {
                overlaps[other].plan_rule = true;
                overlaps[one].plan_rule |= is_by_plan;
                overlaps[one].names.extend(names[other].iter().cloned());
            }
        }
    }
    for (rule, overlaps) in rules.iter_mut().zip(overlaps) {
        rule.overlaps = overlaps;
    }
}
