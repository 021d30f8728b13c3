//! Whether any request meets more limits than can be decided together.
//!
//! Enforced rules are decided together, shields together before them, and each shadow rule alone. Which rules a
//! request can meet at once is asked of the matcher, with one example for each rule and one for what each two rules
//! share: `/{x}/b` and `/a/{y}` both match `/a/b`, which is nobody's own example.

use std::cmp::Reverse;

use tollgate_core::DEMANDS_MAX;

use super::Note;
use crate::config::compile::Traits;
use crate::config::finding::Code;
use crate::config::types::Config;
use crate::rules::matcher::Conditions;
use crate::rules::{Mode, Rule, RuleLimits, SetParts};

/// How many pairs are tried, those with the most limits first: all pairs of about 200 patterns, in tens of milliseconds.
const PAIRS_MAX: usize = 20_000;

/// Rules, by their places, with the number of limits that a request that meets them must pass.
struct TooMany {
    rules: (usize, usize),
    count: usize,
}

pub(super) fn too_many_limits(config: &Config, parts: &SetParts, traits: &Traits, note: &mut Note<'_>) {
    let name = |place: usize| &config.rules[place].name;
    let is_too_large = |rule: &&Rule| rule.mode == Mode::Shadow && limits_of(rule) > DEMANDS_MAX;
    let alone = parts.rules.iter().position(|rule| is_too_large(&rule));
    let alone = alone.map(|place| TooMany { rules: (place, place), count: limits_of(&parts.rules[place]) });
    let in_group = |is_shield: bool| {
        move |rule: &Rule| rule.mode == Mode::Enforce && rule.is_shield == is_shield && limits_of(rule) > 0
    };
    let shields = || first_too_many(parts, traits, in_group(true));
    let enforced = || first_too_many(parts, traits, in_group(false));
    let Some(TooMany { rules: (one, other), count }) = alone.or_else(shields).or_else(enforced) else { return };
    let what = if parts.rules[one].is_shield { "limits of shields" } else { "limits" };
    let matches = match one == other {
        true => format!("`{}` matches", **name(one)),
        false => format!("`{}` and `{}` match", **name(one), **name(other)),
    };
    let message = format!("{count} {what} apply to a request that {matches}");
    let help = format!("{DEMANDS_MAX} limits can be decided together; match fewer rules at once");
    note(Code::TooManyLimits, name(one).span(), message, &help);
}

/// The most limits that a rule holds anybody to.
fn limits_of(rule: &Rule) -> usize {
    match &rule.limits {
        RuleLimits::Own(own) => own.len(),
        RuleLimits::Plan(by_tariff) => by_tariff.iter().map(|policies| policies.len()).max().unwrap_or(0),
    }
}

/// The first rule, or two rules, of a group whose requests meet too many of its limits.
fn first_too_many(parts: &SetParts, traits: &Traits, in_group: impl Fn(&Rule) -> bool) -> Option<TooMany> {
    let rules = || parts.rules.iter().enumerate().filter(|(_, rule)| in_group(rule));
    if rules().map(|(_, rule)| limits_of(rule)).sum::<usize>() <= DEMANDS_MAX {
        return None;
    }
    let too_many = |one: usize, other: usize, conditions: &Conditions| {
        let is_exempt = |path| traits.exempt_paths.iter().any(|exempt| exempt.covers(path));
        let met = parts.matcher.find_like(conditions).into_iter().map(|place| &parts.rules[place as usize]);
        let count: usize = met.filter(|rule| in_group(rule)).map(limits_of).sum();
        let is_found = count > DEMANDS_MAX && !conditions.paths.iter().any(is_exempt);
        is_found.then_some(TooMany { rules: (one, other), count })
    };
    let conditions = parts.matcher.conditions();
    let alternatives =
        |(place, _): (usize, &Rule)| conditions[place].alternatives().map(move |alternative| (place, alternative));
    let mut alone: Vec<(usize, Conditions)> = rules().flat_map(alternatives).collect();
    if let Some(found) = alone.iter().find_map(|(place, alternative)| too_many(*place, *place, alternative)) {
        return Some(found);
    }
    alone.sort_by_key(|(place, _)| Reverse(limits_of(&parts.rules[*place])));
    let pairs = alone.iter().enumerate().flat_map(|(at, one)| alone[..at].iter().map(move |other| (other, one)));
    pairs.filter(|((one, _), (other, _))| one != other).take(PAIRS_MAX).find_map(|((one, mine), (other, theirs))| {
        too_many((*one).min(*other), (*one).max(*other), &mine.shared(theirs)?)
    })
}
