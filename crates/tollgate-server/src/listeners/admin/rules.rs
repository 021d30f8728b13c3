//! `/v1/rules`: the rules in force, and their decisions so far.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::{Response, StatusCode};
use serde_json::{Value, json};
use tollgate::OutcomeCount;
use tollgate::engine::RuleStats;
use tollgate::rules::{CompiledRule, LimitSetId, RuleSet};

use crate::listeners::http::connection::json;
use crate::reload::Reloader;

/// Answers with the rules in force, in the order of the file, their decisions so far, the names of the plans, and
/// whether the kill switch is on.
///
/// If the server has no configuration, the lists are empty and `kill_switch` is left out.
pub(super) fn list(reloader: &Reloader) -> Response<Bytes> {
    let (loaded, stats) = match (reloader.loaded(), reloader.engine()) {
        (Some(loaded), Some(engine)) => (loaded, engine.rule_stats()),
        _ => return json(StatusCode::OK, &json!({ "rules": [], "plans": [] })),
    };
    let rules = &loaded.rules;
    let listed: Vec<Value> = rules.rules().iter().map(|rule| rule_json(rule, rules, &stats)).collect();
    let plans: Vec<&str> = rules.plans().iter().map(|plan| &**plan.name()).collect();
    json(StatusCode::OK, &json!({ "rules": listed, "plans": plans, "kill_switch": rules.is_off() }))
}

fn rule_json(rule: &CompiledRule, rules: &RuleSet, stats: &[RuleStats]) -> Value {
    let by: Vec<String> = rule.by().iter().map(ToString::to_string).collect();
    let limits = match rule.is_by_plan() {
        false => limits(rule, rules.default_limit_set(false)),
        true => {
            let of_plan = |name: &str| rules.limit_set_named(name).map(|limit_set| limits(rule, limit_set));
            let plans = rules.plans().iter().map(|plan| (plan.name().to_string(), of_plan(plan.name())));
            json!(plans.collect::<BTreeMap<_, _>>())
        }
    };
    let stats = stats.iter().filter(|stats| stats.rule == *rule.name());
    let decisions: Vec<Value> =
        stats.flat_map(|stats| stats.counts.iter().map(|cell| counted(stats.mode.as_str(), cell))).collect();
    json!({
        "name": &**rule.name(),
        "mode": rule.mode().as_str(),
        "by": by,
        "limits": limits,
        "by_plan": rule.is_by_plan(),
        "shield": rule.is_shield(),
        "on_failure": rule.on_failure().as_str(),
        "charge": rule.charge().as_str(),
        "cost": rule.cost().units(),
        "decisions": decisions,
    })
}

fn limits(rule: &CompiledRule, limit_set: LimitSetId) -> Value {
    let limit = |policy: &std::sync::Arc<tollgate::answer::Policy>| json!({ "name": policy.name(), "limit": policy.limit().to_string() });
    rule.policies(limit_set).iter().map(limit).collect()
}

fn counted(mode: &str, cell: &OutcomeCount) -> Value {
    json!({ "verdict": cell.outcome.as_str(), "source": cell.source.as_str(), "mode": mode, "times": cell.count })
}
