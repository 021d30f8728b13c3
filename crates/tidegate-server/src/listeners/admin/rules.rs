//! `/v1/rules`: the rules in force, and their decisions so far.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode};
use serde::Serialize;
use tidegate::OutcomeCount;
use tidegate::answer::Policy;
use tidegate::engine::{Engine, RuleStats};
use tidegate::rules::{CompiledRule, LimitSet, RuleSet};

use crate::listeners::http::connection::json;

/// The rules in force.
#[derive(Default, Serialize)]
struct RulesBody {
    /// The rules, in the order of the file.
    rules: Vec<RuleBody>,
    /// The names of the plans.
    plans: Vec<String>,
    /// Whether the kill switch is on, so that no request is limited. Absent without a configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    kill_switch: Option<bool>,
}

/// A rule, and its decisions so far.
#[derive(Serialize)]
struct RuleBody {
    /// The name of the rule.
    name: String,
    /// The mode of the rule: `enforce`, `shadow` or `off`.
    mode: &'static str,
    /// The kinds of subjects that the rule counts by, as in the configuration.
    by: Vec<String>,
    /// The limits of the rule. If `by_plan` is true, the limits of each plan, by its name.
    limits: RuleLimits,
    /// Whether the limits depend on the plan of the caller.
    by_plan: bool,
    /// Whether this is a shield rule, which is decided in process memory before all others.
    shield: bool,
    /// What happens to a request while the store does not answer: `local`, `allow` or `deny`.
    on_failure: &'static str,
    /// The requests that are charged, as in the configuration.
    charge: &'static str,
    /// The units that a request costs.
    cost: u32,
    /// The number of decisions since startup, by outcome.
    decisions: Vec<DecisionCount>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum RuleLimits {
    Same(Vec<NamedLimit>),
    ByPlan(BTreeMap<String, Vec<NamedLimit>>),
}

/// A limit of a rule.
#[derive(Serialize)]
struct NamedLimit {
    /// The name of the limit, as clients see it in headers and bodies.
    name: String,
    /// The limit as text, such as `10/min`.
    limit: String,
}

/// The number of decisions of one kind.
#[derive(Serialize)]
struct DecisionCount {
    /// The outcome, as in the metrics.
    verdict: &'static str,
    /// What decided, as in the metrics.
    source: &'static str,
    /// The mode of the rule at the time.
    mode: &'static str,
    /// The number of such decisions.
    times: u64,
}

/// Answers with the rules in force, in the order of the file, their decisions so far, the names of the plans, and
/// whether the kill switch is on.
///
/// If the server has no configuration, the lists are empty and `kill_switch` is left out.
pub(super) fn list(engine: &Engine) -> Response<Bytes> {
    let (rules, stats) = (engine.rules(), engine.rule_stats());
    if !rules.is_configured() {
        return json(StatusCode::OK, &RulesBody::default());
    }
    let body = RulesBody {
        rules: rules.rules().iter().map(|rule| RuleBody::new(rule, &rules, &stats)).collect(),
        plans: rules.plans().iter().map(|plan| plan.name().to_string()).collect(),
        kill_switch: Some(rules.is_off()),
    };
    json(StatusCode::OK, &body)
}

impl RuleBody {
    fn new(rule: &CompiledRule, rules: &RuleSet, stats: &[RuleStats]) -> RuleBody {
        let limits = if rule.is_by_plan() {
            let names = rules.plans().iter().map(|plan| plan.name().to_string());
            let of_plan = |name: String| rules.limit_set_named(&name).map(|limit_set| (name, limits(rule, &limit_set)));
            RuleLimits::ByPlan(names.filter_map(of_plan).collect())
        } else {
            RuleLimits::Same(limits(rule, &rules.default_limit_set(false)))
        };
        let stats = stats.iter().filter(|stats| stats.rule == *rule.name());
        let decisions = stats.flat_map(|stats| stats.counts.iter().map(|cell| counted(stats.mode.as_str(), cell)));
        RuleBody {
            name: rule.name().to_string(),
            mode: rule.mode().as_str(),
            by: rule.by().iter().map(ToString::to_string).collect(),
            limits,
            by_plan: rule.is_by_plan(),
            shield: rule.is_shield(),
            on_failure: rule.on_failure().as_str(),
            charge: rule.charge().as_str(),
            cost: rule.cost().units(),
            decisions: decisions.collect(),
        }
    }
}

fn limits(rule: &CompiledRule, limit_set: &LimitSet) -> Vec<NamedLimit> {
    let limit = |policy: &Arc<Policy>| NamedLimit { name: policy.name().to_owned(), limit: policy.limit().to_string() };
    rule.policies(limit_set).iter().map(limit).collect()
}

fn counted(mode: &'static str, cell: &OutcomeCount) -> DecisionCount {
    DecisionCount { verdict: cell.outcome.as_str(), source: cell.source.as_str(), mode, times: cell.count }
}
