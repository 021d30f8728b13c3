//! Whether any request meets more limits than can be decided together.
//!
//! Enforced rules are decided together, shields together before them, and each shadow rule alone. Which rules a
//! request can meet at once is asked of the matcher, with one example for each rule and one for what each two rules
//! share: `/{x}/b` and `/a/{y}` both match `/a/b`, which is nobody's own example. From there every further rule that shares
//! something with what is left is taken along, those with the most limits first: `/a/{x}/{y}`, `/{x}/b/{y}` and `/{x}/{y}/c`
//! meet only all at once. To try all sets of rules would take a time that doubles with each rule; what this misses is refused at
//! run time, request by request.
//!
//! Modes count as they are written: `shadow = true` is there to be taken away again, and the file must be usable then.

use std::cmp::Reverse;

use tollgate_core::DEMANDS_MAX;

use super::Note;
use crate::config::compile::Traits;
use crate::config::finding::Code;
use crate::config::types::Config;
use crate::rules::matcher::Conditions;
use crate::rules::{CompiledRule, Mode, RuleLimits, SetParts};

/// How many pairs are tried, those with the most limits first: all pairs of about 200 patterns, in tens of milliseconds.
const PAIRS_MAX: usize = 20_000;
/// How often a further rule is tried beside a pair, over all pairs. As long again.
const GROWTH_STEPS_MAX: usize = 200_000;

/// Rules, by their places, with the number of limits that a request that meets them must pass.
struct TooMany {
    rules: Vec<usize>,
    count: usize,
}

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
    let help = format!("{DEMANDS_MAX} limits can be decided together; match fewer rules at once");
    note(Code::TooManyLimits, config.rules[rules[0]].name.span(), message, &help);
}

/// The most limits that a rule holds anybody to.
fn limits_of(rule: &CompiledRule) -> usize {
    match &rule.limits {
        RuleLimits::Own(own) => own.len(),
        RuleLimits::Plan(by_limit_set) => by_limit_set.iter().map(|policies| policies.len()).max().unwrap_or(0),
    }
}

/// Rules that are decided in the same way.
struct Group<'p> {
    parts: &'p SetParts,
    traits: &'p Traits,
    /// Whether each rule is one of them.
    members: Vec<bool>,
}

impl Group<'_> {
    /// The limits of a rule, by its place; none if it is no member.
    fn limits(&self, place: usize) -> usize {
        if self.members[place] { limits_of(&self.parts.rules[place]) } else { 0 }
    }

    fn places(&self) -> impl Iterator<Item = usize> {
        (0..self.members.len()).filter(|place| self.limits(*place) > 0)
    }

    /// The first rule that has too many limits by itself.
    fn first_too_large(&self) -> Option<TooMany> {
        let place = self.places().find(|place| self.limits(*place) > DEMANDS_MAX)?;
        Some(TooMany { rules: vec![place], count: self.limits(place) })
    }

    /// The first rules whose requests meet too many limits of the group.
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
            let (pair, shared) = (vec![*one, *other], mine.shared(theirs)?);
            self.too_many(&pair, &shared).or_else(|| self.grown(pair, shared, &alone, &mut steps))
        })
    }

    /// These rules, if a request that meets these conditions meets too many limits.
    fn too_many(&self, rules: &[usize], conditions: &Conditions) -> Option<TooMany> {
        let met = self.parts.matcher.find_like(conditions);
        let count: usize = met.into_iter().map(|place| self.limits(place as usize)).sum();
        (count > DEMANDS_MAX && !self.is_exempt(conditions)).then(|| TooMany { rules: rules.to_vec(), count })
    }

    /// The same with every further rule that shares something with the conditions, until they are too many.
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
            if let Some(shared) = conditions.shared(alternative).filter(|shared| !self.is_exempt(shared)) {
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
