//! Finds requests that match rules with more limits than can be decided together.
//!
//! Enforced rules are decided together, enforced shields together before them, and each shadow rule by itself. The
//! modes are those of the rules in the file, whether or not the file has `shadow = true`: that is temporary, and the
//! file must be usable without it.
//!
//! **Guarantees.** Every finding is true: it comes from an example request for which the matcher itself finds rules
//! with too many limits. If all limits of the file are few enough together, nothing is searched. Otherwise the search
//! may miss a combination of rules; a request that matches it is refused at run time.
//!
//! **Search.** The matcher is given an example request for each rule. This finds rules within each other, such as
//! `/api/*` and `/api/users`. Patterns that cross, such as `/{x}/b` and `/a/{y}`, have a request in common (`/a/b`)
//! that is the example of neither, so each pair of rules gives an example too. `/a/{x}/{y}`, `/{x}/b/{y}` and
//! `/{x}/{y}/c` meet only in `/a/b/c`, so each pair is extended by every further rule that is compatible, those with
//! the most limits first.
//!
//! **Why not a bound.** The number of limits of all rules rejects any file with 33 rules for 33 paths. The number of
//! limits of all rules that are pairwise compatible with a rule rejects 33 rules by path beside 33 rules by host, of
//! which a request matches one each. Trying all sets of rules takes exponential time.

use std::cmp::Reverse;

use tidegate_config::{Code, ConfigTable};
use tidegate_core::DEMANDS_MAX;

use super::Note;
use crate::config::compile::LintInput;
use crate::rules::matcher::Conditions;
use crate::rules::{CompiledRule, Mode, RuleLimits, SetParts};

/// The maximum number of pairs that are tried, those with the most limits first. All pairs of 200 patterns take tens of
/// milliseconds.
const PAIRS_MAX: usize = 20_000;
/// The maximum number of attempts to add a rule to a pair, over all pairs. They take about as long as the pairs.
const EXTENSIONS_MAX: usize = 200_000;

/// Rules that one request matches and that have too many limits to be decided together.
struct Overlap {
    /// The indices of the rules. The request may match further ones.
    rules: Vec<usize>,
    /// The number of limits that apply to the request.
    limit_count: usize,
}

/// Adds an error about the first rules found that one request matches and that have more than [`DEMANDS_MAX`] limits
/// together. Adds nothing if none are found.
pub(super) fn too_many_limits(config: &ConfigTable, parts: &SetParts, input: &LintInput, note: &mut Note<'_>) {
    let group = |is_in: &dyn Fn(&CompiledRule, Mode) -> bool| {
        let written = parts.rules.iter().zip(&config.rules);
        DecisionGroup { parts, input, members: written.map(|(rule, table)| is_in(rule, table.mode)).collect() }
    };
    let shadows = || group(&|_, mode| mode == Mode::Shadow).oversized_rule();
    let shields = || group(&|rule, mode| mode == Mode::Enforce && rule.is_shield).overlap();
    let enforced = || group(&|rule, mode| mode == Mode::Enforce && !rule.is_shield).overlap();
    let Some(Overlap { mut rules, limit_count }) = shadows().or_else(shields).or_else(enforced) else { return };
    rules.sort_unstable();
    let what = if parts.rules[rules[0]].is_shield { "limits of shields" } else { "limits" };
    let names: Vec<String> = rules.iter().map(|index| format!("`{}`", *config.rules[*index].name)).collect();
    let matches = match &names[..] {
        [one] => format!("{one} matches"),
        [others @ .., last] => format!("{} and {last} match", others.join(", ")),
        [] => return,
    };
    let message = format!("{limit_count} {what} apply to a request that {matches}");
    let help = format!("at most {DEMANDS_MAX} limits can be decided together; let fewer rules match the same request");
    note(Code::TooManyLimits, config.rules[rules[0]].name.span(), message, &help);
}

/// Returns the number of a rule's own limits; or the largest number of limits of a plan or key, if the rule takes its
/// limits from plans.
fn limit_count_max(rule: &CompiledRule) -> usize {
    match &rule.limits {
        RuleLimits::Own(own) => own.len(),
        RuleLimits::Plan(by_limit_set) => by_limit_set.iter().map(|policies| policies.len()).max().unwrap_or(0),
    }
}

/// The rules of a file that are decided in one step: the enforced rules, the enforced shields, or the shadow rules.
struct DecisionGroup<'p> {
    parts: &'p SetParts,
    input: &'p LintInput,
    /// Whether each rule of the file belongs to the group, by index.
    members: Vec<bool>,
}

impl DecisionGroup<'_> {
    /// Returns the number of limits of the rule with this index, or 0 if the rule does not belong to the group.
    ///
    /// For a rule that takes its limits from plans, the largest number that a plan or an API key has. Panics if there
    /// is no rule with this index.
    fn limit_count(&self, index: usize) -> usize {
        if self.members[index] { limit_count_max(&self.parts.rules[index]) } else { 0 }
    }

    /// Returns the indices of the group's rules that have limits, ascending.
    fn indices(&self) -> impl Iterator<Item = usize> {
        (0..self.members.len()).filter(|index| self.limit_count(*index) > 0)
    }

    /// Returns the first rule of the group that has more than [`DEMANDS_MAX`] limits by itself, or `None`.
    fn oversized_rule(&self) -> Option<Overlap> {
        let index = self.indices().find(|index| self.limit_count(*index) > DEMANDS_MAX)?;
        Some(Overlap { rules: vec![index], limit_count: self.limit_count(index) })
    }

    /// Searches for rules of the group that one request matches and that have more than [`DEMANDS_MAX`] limits
    /// together.
    ///
    /// Tries an example request for each rule, then for pairs of rules and their extensions. Returns the first rules
    /// found. `None` does not prove that there are none, see the module's documentation.
    fn overlap(&self) -> Option<Overlap> {
        if self.indices().map(|index| self.limit_count(index)).sum::<usize>() <= DEMANDS_MAX {
            return None;
        }
        let conditions = self.parts.matcher.conditions();
        let alternatives = |index: usize| conditions[index].alternatives().map(move |alternative| (index, alternative));
        let mut alone: Vec<(usize, Conditions)> = self.indices().flat_map(alternatives).collect();
        if let Some(found) = alone.iter().find_map(|(index, alternative)| self.try_example(&[*index], alternative)) {
            return Some(found);
        }
        alone.sort_by_key(|(index, _)| Reverse(self.limit_count(*index)));
        let mut extensions_left = EXTENSIONS_MAX;
        let pairs = alone.iter().enumerate().flat_map(|(at, one)| alone[..at].iter().map(move |other| (other, one)));
        let pairs = pairs.filter(|((one, _), (other, _))| one != other);
        pairs.take(PAIRS_MAX).find_map(|((one, mine), (other, theirs))| {
            let (pair, shared) = (vec![*one, *other], mine.intersection(theirs)?);
            self.try_example(&pair, &shared).or_else(|| self.extend(pair, shared, &alone, &mut extensions_left))
        })
    }

    /// Matches an example request that meets these conditions, and counts the limits of the group that apply to it.
    ///
    /// Returns `rules` with that number if it exceeds [`DEMANDS_MAX`]. Returns `None` if it does not, or if the path of
    /// the conditions is exempt.
    fn try_example(&self, rules: &[usize], conditions: &Conditions) -> Option<Overlap> {
        let matched = self.parts.matcher.find_for_example(conditions);
        let limit_count: usize = matched.into_iter().map(|index| self.limit_count(index as usize)).sum();
        let is_overlap = limit_count > DEMANDS_MAX && !self.is_exempt(conditions);
        is_overlap.then(|| Overlap { rules: rules.to_vec(), limit_count })
    }

    /// Adds rules of `further` to `rules`, one after another, until an example request for all of them has too many
    /// limits.
    ///
    /// `conditions` are those of requests that match all `rules`. A rule is skipped if no request meets its conditions
    /// as well, or only requests with an exempt path do. Each attempt takes one of `extensions_left`. Returns `None` if
    /// these or the further rules are used up.
    fn extend(
        &self,
        mut rules: Vec<usize>,
        mut conditions: Conditions,
        further: &[(usize, Conditions)],
        extensions_left: &mut usize,
    ) -> Option<Overlap> {
        for (index, alternative) in further {
            if rules.contains(index) {
                continue;
            }
            *extensions_left = extensions_left.checked_sub(1)?;
            if let Some(shared) = conditions.intersection(alternative).filter(|shared| !self.is_exempt(shared)) {
                conditions = shared;
                rules.push(*index);
            }
            let is_enough = rules.iter().map(|index| self.limit_count(*index)).sum::<usize>() > DEMANDS_MAX;
            if is_enough && let Some(found) = self.try_example(&rules, &conditions) {
                return Some(found);
            }
        }
        None
    }

    /// Returns whether all requests that meet these conditions, which have at most one path, have an exempt path.
    fn is_exempt(&self, conditions: &Conditions) -> bool {
        let is_exempt = |path| self.input.exempt_paths.iter().any(|exempt| exempt.covers(path));
        conditions.paths.iter().any(is_exempt)
    }
}
