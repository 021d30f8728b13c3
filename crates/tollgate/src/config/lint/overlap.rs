//! Finds requests that match rules with more limits than can be decided together.
//!
//! Enforced rules are decided together, shields together before them, and each shadow rule by itself. Modes are those of the
//! file: `shadow = true` is temporary, and the file must be usable without it.
//!
//! **Guarantees.** Every finding is true: it is a request that the matcher itself matches with all these rules. If all
//! limits together are few enough, no request can exceed the number. Otherwise the search may miss a combination; a request
//! that matches it is refused at run time.
//!
//! **Search.** The matcher is given an example request for each rule. This finds rules within each other, such as `/api/*` and
//! `/api/users`. Patterns that cross, such as `/{x}/b` and `/a/{y}`, have a request in common (`/a/b`) that is the example of
//! neither, so each pair of rules gives an example too. `/a/{x}/{y}`, `/{x}/b/{y}` and `/{x}/{y}/c` meet only in `/a/b/c`, so each
//! pair is extended by every further rule that is compatible, those with the most limits first.
//!
//! **Why not a bound.** The number of limits of all rules rejects any file with 33 rules for 33 paths. The number of limits of
//! all rules that are pairwise compatible with a rule rejects 33 rules by path beside 33 rules by host, of which a request
//! matches one each. Trying all sets of rules takes exponential time.

use std::cmp::Reverse;

use tollgate_core::DEMANDS_MAX;

use super::Note;
use crate::config::compile::Traits;
use crate::config::finding::Code;
use crate::config::types::Config;
use crate::rules::matcher::Conditions;
use crate::rules::{CompiledRule, Mode, RuleLimits, SetParts};

/// The maximum number of pairs, those with the most limits first: all pairs of 200 patterns take tens of milliseconds.
const PAIRS_MAX: usize = 20_000;
/// The maximum number of attempts to extend a pair, over all pairs. They take as long again.
const GROWTH_STEPS_MAX: usize = 200_000;

/// Rules, by index, and the number of limits of a request that matches all of them.
struct TooMany {
    rules: Vec<usize>,
    count: usize,
}

/// Notes the first combination of rules with too many limits.
pub(super) fn too_many_limits(config: &Config, parts: &SetParts, traits: &Traits, note: &mut Note<'_>) {
    let group = |is_in: &dyn Fn(&CompiledRule, Mode) -> bool| {
        let written = parts.rules.iter().zip(&config.rules);
        Group { parts, traits, members: written.map(|(rule, table)| is_in(rule, table.mode)).collect() }
    };
    let shadows = || group(&|_, mode| mode == Mode::Shadow).first_too_large();
    let shields = || group(&|rule, mode| mode == Mode::Enforce && rule.is_shield).first_too_many();
    let enforced = || group(&|rule, mode| mode == Mode::Enforce && !rule.is_shield).first_too_many();
    let Some(TooMany { mut rules, count }) = shadows().or_else(shields).or_else(enforced) else { return };
    rules.sort_unstable();
    let what = if parts.rules[rules[0]].is_shield { "limits of shields" } else { "limits" };
    let names: Vec<String> = rules.iter().map(|place| format!("`{}`", *config.rules[*place].name)).collect();
    let matches = match &names[..] {
        [one] => format!("{one} matches"),
        [others @ .., last] => format!("{} and {last} match", others.join(", ")),
        [] => return,
    };
    let message = format!("{count} {what} apply to a request that {matches}");
    let help = format!("at most {DEMANDS_MAX} limits can be decided together; let fewer rules match the same request");
    note(Code::TooManyLimits, config.rules[rules[0]].name.span(), message, &help);
}

/// Returns the number of limits of a rule, for the plan with the most.
fn limits_of(rule: &CompiledRule) -> usize {
    match &rule.limits {
        RuleLimits::Own(own) => own.len(),
        RuleLimits::Plan(by_limit_set) => by_limit_set.iter().map(|policies| policies.len()).max().unwrap_or(0),
    }
}

/// Rules that are decided together.
struct Group<'p> {
    parts: &'p SetParts,
    traits: &'p Traits,
    /// Whether each rule belongs to the group.
    members: Vec<bool>,
}

impl Group<'_> {
    /// Returns the number of limits of a rule, by index; 0 if it does not belong to the group.
    fn limits(&self, place: usize) -> usize {
        if self.members[place] { limits_of(&self.parts.rules[place]) } else { 0 }
    }

    fn places(&self) -> impl Iterator<Item = usize> {
        (0..self.members.len()).filter(|place| self.limits(*place) > 0)
    }

    /// Returns the first rule that has too many limits by itself.
    fn first_too_large(&self) -> Option<TooMany> {
        let place = self.places().find(|place| self.limits(*place) > DEMANDS_MAX)?;
        Some(TooMany { rules: vec![place], count: self.limits(place) })
    }

    /// Returns the first rules that a request matches together and that have too many limits.
    fn first_too_many(&self) -> Option<TooMany> {
        if self.places().map(|place| self.limits(place)).sum::<usize>() <= DEMANDS_MAX {
            return None;
        }
        let conditions = self.parts.matcher.conditions();
        let alternatives = |place: usize| conditions[place].alternatives().map(move |alternative| (place, alternative));
        let mut alone: Vec<(usize, Conditions)> = self.places().flat_map(alternatives).collect();
        if let Some(found) = alone.iter().find_map(|(place, alternative)| self.too_many(&[*place], alternative)) {
            return Some(found);
        }
        alone.sort_by_key(|(place, _)| Reverse(self.limits(*place)));
        let mut steps = GROWTH_STEPS_MAX;
        let pairs = alone.iter().enumerate().flat_map(|(at, one)| alone[..at].iter().map(move |other| (other, one)));
        let pairs = pairs.filter(|((one, _), (other, _))| one != other);
        pairs.take(PAIRS_MAX).find_map(|((one, mine), (other, theirs))| {
            let (pair, shared) = (vec![*one, *other], mine.intersection(theirs)?);
            self.too_many(&pair, &shared).or_else(|| self.grown(pair, shared, &alone, &mut steps))
        })
    }

    /// Returns these rules if an example request for these conditions matches rules with too many limits.
    fn too_many(&self, rules: &[usize], conditions: &Conditions) -> Option<TooMany> {
        let met = self.parts.matcher.find_for_example(conditions);
        let count: usize = met.into_iter().map(|place| self.limits(place as usize)).sum();
        (count > DEMANDS_MAX && !self.is_exempt(conditions)).then(|| TooMany { rules: rules.to_vec(), count })
    }

    /// Adds further rules that are compatible with the conditions, until they have too many limits.
    fn grown(
        &self,
        mut rules: Vec<usize>,
        mut conditions: Conditions,
        further: &[(usize, Conditions)],
        steps: &mut usize,
    ) -> Option<TooMany> {
        for (place, alternative) in further {
            if rules.contains(place) {
                continue;
            }
            *steps = steps.checked_sub(1)?;
            if let Some(shared) = conditions.intersection(alternative).filter(|shared| !self.is_exempt(shared)) {
                conditions = shared;
                rules.push(*place);
            }
            let is_enough = rules.iter().map(|place| self.limits(*place)).sum::<usize>() > DEMANDS_MAX;
            if is_enough && let Some(found) = self.too_many(&rules, &conditions) {
                return Some(found);
            }
        }
        None
    }

    fn is_exempt(&self, conditions: &Conditions) -> bool {
        let is_exempt = |path| self.traits.exempt_paths.iter().any(|exempt| exempt.covers(path));
        conditions.paths.iter().any(is_exempt)
    }
}
