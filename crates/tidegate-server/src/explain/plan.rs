//! Determines the plan of a caller, and where it is assigned.

use tidegate::config::Loaded;
use tidegate::identity::Identity;
use tidegate::rules::{LimitSet, PlanQuestion};

use super::PlanExplanation;

/// Returns the question about the caller that plan lookups are to answer.
///
/// `None` if no rule has limits per plan, or the configuration determines the caller's plan.
pub(super) fn question(loaded: &Loaded, identity: &Identity<'_>) -> Option<PlanQuestion> {
    let rules = &loaded.rules;
    let is_unknown = rules.needs_limit_set() && rules.limit_set(identity).is_none();
    is_unknown.then(|| PlanQuestion::about(identity))
}

/// Returns the set of limits that applies to the caller, and the caller's plan: its name and its source.
///
/// The plan is `None` if no rule has limits per plan.
///
/// `looked_up` is the result of the plan lookups; `None` if none was asked.
pub(crate) fn resolve(
    loaded: &Loaded,
    looked_up: Option<LimitSet>,
    identity: &Identity<'_>,
) -> (LimitSet, Option<PlanExplanation>) {
    let rules = &loaded.rules;
    let is_identified = identity.api_key().is_some() || identity.user().is_some();
    let default = rules.default_limit_set(is_identified);
    if !rules.needs_limit_set() {
        return (default, None);
    }
    let known = rules.limit_set(identity);
    let is_looked_up = looked_up.is_some();
    let limit_set = known.clone().or(looked_up).unwrap_or_else(|| default.clone());
    // The hash is not asked about a caller without identity.
    let hash = loaded.settings.plan_hash.as_ref().filter(|_| is_identified);
    let source = match (&known, hash) {
        (Some(limit_set), _) => loaded.plan_source(identity, limit_set).into(),
        (None, Some(hash)) if limit_set != default => format!("the Redis hash {hash}").into(),
        (None, Some(hash)) if !is_looked_up => {
            format!("the Redis hash {hash} was not read, and no other source assigns a plan").into()
        }
        (None, Some(hash)) => format!("the Redis hash {hash} assigns no plan").into(),
        (None, None) if limit_set != default => "a lookup".into(),
        (None, None) if is_identified => "no source assigns a plan".into(),
        (None, None) => "the caller has no known identity".into(),
    };
    let plan = rules.plan(&limit_set).map(|plan| PlanExplanation { name: plan.name().to_string(), source });
    (limit_set, plan)
}
