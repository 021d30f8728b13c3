//! Warnings about configurations that are valid and probably not intended.

mod overlap;

use std::collections::HashMap;
use std::sync::Arc;

use tidegate_config::{Code, ConfigSource, ConfigTable, Finding, Limits, MatchTable, RuleTable, Span};
use tidegate_core::Limit;

use super::compile::{Compiler, LintInput, NamedLimit, Settings};
use crate::identity::{ApiKeys, Subject};
use crate::rules::matcher::Conditions;
use crate::rules::pattern::Pattern;
use crate::rules::{CompiledRule, RuleLimits, SetParts};

/// The longest deadline without a warning, in milliseconds.
const DEADLINE_MS_MAX: u128 = 1_000;

/// Adds warnings and advice about a compiled configuration to the findings of `compiler`.
///
/// Also adds an error if rules take their limits from plans and `default` is not among these, and if a request can
/// match rules with too many limits. `parts` must be compiled from `config`: rules have the same indices in both.
pub(crate) fn lint(
    config: &ConfigTable,
    settings: &Settings,
    parts: &SetParts,
    input: &LintInput,
    compiler: &mut Compiler<'_>,
) {
    let mut note = |code: Code, span: Span, message: String, help: &str| {
        compiler.note(Finding::new(code, message).help(help).at(span));
    };
    switches(config, &mut note);
    proxies(config, parts, &mut note);
    store(config, settings, &mut note);
    exemptions(config, parts, input, &mut note);
    plans(config, parts, input, &mut note);
    rules(config, parts, input, &mut note);
    overlap::too_many_limits(config, parts, input, &mut note);
}

/// Adds a finding, given its code, span, message and help.
type Note<'n> = dyn FnMut(Code, Span, String, &str) + 'n;

fn switches(config: &ConfigTable, note: &mut Note<'_>) {
    if *config.kill_switch {
        let message = "the kill switch is on: nothing is limited and no ban applies".to_owned();
        note(
            Code::KillSwitchOn,
            config.kill_switch.span(),
            message,
            "set `kill_switch = false` to enforce limits again",
        );
    }
    if *config.shadow {
        let message = "all rules are in shadow mode: no limit denies a request; bans still apply".to_owned();
        note(Code::ShadowOn, config.shadow.span(), message, "set `shadow = false` to enforce the rules");
    }
    if config.rules.is_empty() {
        let help = "add a rule, for example `[[rules]]` with `name = \"all\"` and `limits = [\"100/min\"]`";
        note(Code::NoRules, Span::default(), "there are no rules: nothing is limited".to_owned(), help);
    }
}

fn proxies(config: &ConfigTable, parts: &SetParts, note: &mut Note<'_>) {
    let networks = parts.identifier.proxies().networks();
    let are_written = !config.trusted_proxies.is_empty();
    if let Some(header) = &config.forwarding_header
        && !are_written
    {
        let message = format!("`{}` is never read, because no proxy is trusted to set it", **header);
        let help = "list your proxies in `trusted_proxies`, for example [\"10.0.0.0/8\"]; \
                    otherwise all clients behind a proxy share one quota";
        note(Code::ProxiesUntrusted, header.span(), message, help);
    }
    if networks.contains_all_v4_or_v6() {
        let span = config.trusted_proxies.first().map(|text| text.span()).unwrap_or_default();
        let message = "every address is trusted as a proxy, so every client can choose its own address".to_owned();
        note(Code::AllProxiesTrusted, span, message, "list only the networks of your own proxies");
    }
    if let Some(header) = &config.plan_sources.header
        && !are_written
    {
        let message = format!("`{}` is never read, because no proxy is trusted to set it", **header);
        note(Code::PlanHeaderUntrusted, header.span(), message, "list the proxy that sets it in `trusted_proxies`");
    }
}

fn store(config: &ConfigTable, settings: &Settings, note: &mut Note<'_>) {
    if let Some(instances) = settings.instances.filter(|&instances| instances > 1 && !settings.is_shared()) {
        let span = config.instances.as_ref().map(|instances| instances.span()).unwrap_or_default();
        let message = format!("there are {instances} instances, each with counters in its own memory");
        let help = "use a shared store (`store = \"redis://…\"`), or expect each instance to grant the whole quota";
        note(Code::MemoryNotShared, span, message, help);
    }
    let hashes = [
        (Code::PlanHashUnread, &config.plan_sources.redis_hash),
        (Code::KeyHashUnread, &config.key_sources.redis_hash),
    ];
    for (code, hash) in hashes {
        let Some(hash) = hash.as_ref().filter(|_| !settings.is_shared()) else { continue };
        let message = format!("`{}` is never read, because the counters are in memory", **hash);
        note(code, hash.span(), message, "the hash is read from the store: add `store = \"redis://…\"`");
    }
    if let Some(deadline) = &config.deadline
        && settings.deadline.as_millis() > DEADLINE_MS_MAX
    {
        let message = "each request waits this long for a store that hangs".to_owned();
        note(Code::DeadlineLong, deadline.span(), message, "lower it: a store on the same network answers within 25ms");
    }
}

fn exemptions(config: &ConfigTable, parts: &SetParts, input: &LintInput, note: &mut Note<'_>) {
    if parts.exempt.addresses.contains_all_v4_or_v6() {
        let span = config.exempt.addresses.first().map(|text| text.span()).unwrap_or_default();
        let message = "every address is exempt: nothing is limited".to_owned();
        note(Code::AllRequestsExempt, span, message, "list only the intended networks, or use `kill_switch`");
    }
    let everything = Pattern { segments: Vec::new(), is_prefix: true };
    if let Some(place) = input.exempt_paths.iter().position(|pattern| pattern.covers(&everything)) {
        let span = config.exempt.paths.get(place).map(|text| text.span()).unwrap_or_default();
        let message = "every path is exempt: nothing is limited".to_owned();
        note(Code::AllRequestsExempt, span, message, "list only the intended paths, or use `kill_switch`");
    }
}

fn plans(config: &ConfigTable, parts: &SetParts, input: &LintInput, note: &mut Note<'_>) {
    let Some((first, _)) = config.plans.first_key_value() else { return };
    let Some(user) = config.rules.iter().find(|rule| matches!(*rule.limits, Limits::Plan)) else {
        let message = "no rule takes its limits from plans".to_owned();
        note(Code::PlanUnused, first.span(), message, "write `limits = \"plan\"` in the rules that should use them");
        return;
    };
    let has = |name: &str| parts.plans.iter().any(|plan| &**plan.name() == name);
    if !has("default") {
        let message = "there is no plan `default`, for callers without another plan".to_owned();
        note(Code::DefaultPlanMissing, user.limits.span(), message, "add `[plans.default]` with limits");
    } else if !has("anonymous") {
        let message = "there is no plan `anonymous`: callers without an identity get the `default` plan".to_owned();
        note(
            Code::AnonymousPlanMissing,
            user.limits.span(),
            message,
            "add `[plans.anonymous]`, usually with lower limits",
        );
    }
    let is_named_elsewhere = config.plan_sources.header.is_some()
        || config.plan_sources.redis_hash.is_some()
        || config.key_sources.redis_hash.is_some()
        || config.jwt.as_ref().is_some_and(|jwt| jwt.plan_claim.is_some());
    if is_named_elsewhere {
        return;
    }
    for name in config.plans.keys() {
        let is_fallback = matches!(name.as_str(), "default" | "anonymous");
        if !is_fallback && !input.assigned_plans.iter().any(|given| **given == ***name) {
            let message = format!("nothing in this file assigns the plan `{}`", **name);
            let help = "assign it to a key or a network, or configure a header, a claim or a hash with plans; \
                        ignore this if a `PlanLookup` or `KeyLookup` in your code assigns it";
            note(Code::PlanUnused, name.span(), message, help);
        }
    }
}

fn rules(config: &ConfigTable, parts: &SetParts, input: &LintInput, note: &mut Note<'_>) {
    let conditions = parts.matcher.conditions();
    let mut same: HashMap<String, &str> = HashMap::new();
    for ((table, rule), conditions) in config.rules.iter().zip(&parts.rules).zip(conditions) {
        unreachable_rule(table, conditions, input, note);
        groups(config, table, parts, note);
        subjects(config, table, rule, parts, note);
        // Rules that differ in one of these cannot be merged into one.
        let settings = (rule.mode, rule.is_shield, rule.charge, rule.cost, rule.on_failure, rule.is_by_plan());
        let answer = (table.headers.as_deref(), &table.body);
        let key = format!("{conditions:?} {:?} {:?} {settings:?} {answer:?}", rule.groups, rule.by);
        if let Some(other) = same.insert(key, &table.name) {
            let message =
                format!("`{}` matches the same requests as `{other}` and counts them by the same subject", *table.name);
            let help = "merge their limits into one rule; for a trial, set one of them to `mode = \"shadow\"`";
            note(Code::RuleTwice, table.name.span(), message, help);
        }
        if rule.charge.is_refundable() && policies(rule).any(|limit| limit.count_denied()) {
            let message = format!("`count_denied` is combined with `charge = \"{}\"`", rule.charge.as_str());
            let help = "a denied request has no outcome, so its charge is never refunded; remove one of the two";
            note(Code::CountDeniedRefunded, table.charge.span(), message, help);
        }
    }
}

/// Warns about a group of a rule that no listed key has, unless keys come from elsewhere too.
fn groups(config: &ConfigTable, table: &RuleTable, parts: &SetParts, note: &mut Note<'_>) {
    let Some(groups) = table.matches.groups.as_ref().filter(|_| config.key_sources.redis_hash.is_none()) else {
        return;
    };
    let is_known = |group: &str| parts.keys.values().any(|key| key.groups().iter().any(|known| &**known == group));
    for group in groups.iter().filter(|group| !is_known(group)) {
        let message = format!("no key in this file is in the group `{}`", **group);
        let help = "add the group to `groups` of a key; ignore this if a `KeyLookup` in your code assigns it";
        note(Code::GroupUnknown, group.span(), message, help);
    }
}

fn unreachable_rule(table: &RuleTable, conditions: &Conditions, input: &LintInput, note: &mut Note<'_>) {
    let MatchTable { methods, path, host, groups, .. } = &*table.matches;
    for (name, list) in [("methods", methods), ("path", path), ("host", host), ("groups", groups)] {
        if let Some(list) = list
            && list.is_empty()
        {
            let message = format!("no request can match `{}`: `{name}` is an empty list", *table.name);
            note(Code::RuleUnreachable, list.span(), message, "omit the field to match every request");
        }
    }
    let is_exempt = |pattern: &Pattern| input.exempt_paths.iter().any(|exempt| exempt.covers(pattern));
    if !conditions.paths.is_empty() && conditions.paths.iter().all(is_exempt) {
        let span = path.as_ref().map(|path| path.span()).unwrap_or_default();
        let message = format!("no request can match `{}`: its path is exempt", *table.name);
        note(Code::RuleUnreachable, span, message, "remove the path from `exempt.paths`, or remove the rule");
    }
}

fn subjects(config: &ConfigTable, table: &RuleTable, rule: &CompiledRule, parts: &SetParts, note: &mut Note<'_>) {
    let Some(by) = &table.by else { return };
    let knows_keys =
        !parts.keys.is_empty() || config.api_keys == ApiKeys::Any || config.key_sources.redis_hash.is_some();
    for kind in rule.by.iter() {
        let missing = match kind {
            Subject::ApiKey if !knows_keys => "no API key is listed",
            Subject::User if config.jwt.is_none() => "no tokens are verified",
            _ => continue,
        };
        let message = format!("`{}` counts by {kind}, but {missing}: all requests are counted by address", *table.name);
        let help =
            "for API keys, list `keys`, set `key_sources.redis_hash` or `api_keys = \"any\"`; for users, add `[jwt]`";
        note(Code::SubjectUnknowable, by.span(), message, help);
    }
    let proxies = parts.identifier.proxies().networks();
    let is_free = |kind: &Subject| match kind {
        // Behind trusted proxies the header is read only if one of them sent the request, and it is responsible for the
        // value.
        Subject::Header(_) => proxies.is_empty() || proxies.contains_all_v4_or_v6(),
        kind => matches!(kind, Subject::Cookie(_)),
    };
    if rule.by.is_chosen_by_client() && rule.by.iter().any(is_free) {
        let message = format!("`{}` counts only by values that the client chooses", *table.name);
        let help = "a client that sends a different value each time is never denied: add a rule that counts by `ip`; \
                    if a proxy sets the header, list it in `trusted_proxies`";
        note(Code::SubjectChosenByClient, by.span(), message, help);
    }
}

/// Returns all limits of a rule: its own, or those of every limit set if the rule takes them from plans.
fn policies(rule: &CompiledRule) -> impl Iterator<Item = Limit> + '_ {
    let lists: &[_] = match &rule.limits {
        RuleLimits::Own(own) => std::slice::from_ref(own),
        RuleLimits::Plan(by_limit_set) => by_limit_set,
    };
    lists.iter().flatten().map(|policy| *policy.limit())
}

impl Compiler<'_> {
    /// Adds a warning for each limit of a list that never denies, because another limit of the list always denies
    /// first.
    ///
    /// `owner` names the rule, plan or key to which the list belongs. `span` is that of the list in `source`.
    pub(super) fn check_redundancy(
        &mut self,
        limits: &[NamedLimit],
        owner: &str,
        span: Span,
        source: &Arc<ConfigSource>,
    ) {
        for (place, limit) in limits.iter().enumerate() {
            let never_decides = |(other_place, other): &(usize, &NamedLimit)| {
                *other_place != place
                    && always_denies_first(&other.limit, &limit.limit)
                    // Of two equal limits the second is redundant.
                    && !(*other_place > place && always_denies_first(&limit.limit, &other.limit))
            };
            let Some((_, other)) = limits.iter().enumerate().find(never_decides) else { continue };
            let message = format!(
                "`{}` ({}) of {owner} never denies, because `{}` ({}) always denies first",
                limit.name, limit.limit, other.name, other.limit
            );
            let finding = Finding::new(Code::RedundantLimit, message);
            self.note_in(source, finding.help("remove it, or check which one is intended").at(span));
        }
    }
}

/// Returns whether `loose` can never deny a request that `strict` admits, so that `loose` is redundant.
///
/// That is so if the windows of `strict` that cover a window of `loose` allow no more, together, than the quota of
/// `loose`. Always `false` unless both limits are sliding windows without `count_denied`.
fn always_denies_first(strict: &Limit, loose: &Limit) -> bool {
    use tidegate_core::Algorithm::{Sliding, SlidingLog};
    // Only these deny by the count in a window alone; the others also deny by spacing or weight.
    let is_plain = |limit: &Limit| matches!(limit.algorithm(), Sliding | SlidingLog) && !limit.count_denied();
    let windows = loose.window_us().div_ceil(strict.window_us());
    is_plain(strict)
        && is_plain(loose)
        && windows.saturating_mul(strict.most_in_any_window()) <= u64::from(loose.quota())
}
