//! Which plan a caller has, and where that is said.

use std::net::IpAddr;

use http::Request;
use tollgate::Timestamp;
use tollgate::config::Loaded;
use tollgate::identity::{Identity, Origin};
use tollgate::rules::{LimitSetId, PlanQuestion};

use super::PlanExplanation;

/// Whom the lookups are asked about: nobody, unless a rule goes by plans and nothing else says which.
pub(super) fn question<B>(loaded: &Loaded, request: &Request<B>, peer: IpAddr, now: Timestamp) -> Option<PlanQuestion> {
    let rules = &loaded.rules;
    let origin = Origin { peer, headers: request.headers(), path: "" };
    let identity = rules.identifier().identify(origin, rules, now);
    let is_unknown = rules.needs_limit_set() && rules.limit_set(&identity).is_none();
    is_unknown.then(|| PlanQuestion::about(&identity))
}

/// The limit_set by which the caller is held, and the plan in words; `asked` is what the lookups said. The plan is none if no rule goes
/// by plans.
pub(super) fn of(
    loaded: &Loaded,
    asked: Option<LimitSetId>,
    identity: &Identity<'_>,
) -> (LimitSetId, Option<PlanExplanation>) {
    let rules = &loaded.rules;
    let is_identified = identity.api_key().is_some() || identity.user().is_some();
    let otherwise = rules.default_limit_set(is_identified);
    if !rules.needs_limit_set() {
        return (otherwise, None);
    }
    let known = rules.limit_set(identity);
    let limit_set = known.or(asked).unwrap_or(otherwise);
    // Nobody is asked about a caller without identity.
    let hash = loaded.settings.plan_hash.as_ref().filter(|_| is_identified);
    let source = match (known, hash) {
        (Some(limit_set), _) => loaded.plan_source(identity, limit_set).into(),
        (None, Some(hash)) if limit_set != otherwise => format!("the Redis hash {hash}").into(),
        (None, Some(hash)) if asked.is_none() => format!("default, unless the Redis hash {hash} says another").into(),
        (None, Some(hash)) => format!("default, since the Redis hash {hash} says no other").into(),
        (None, None) if limit_set != otherwise => "a lookup".into(),
        (None, None) if is_identified => "default, since nothing says another".into(),
        (None, None) => "anonymous, since nobody knows the caller".into(),
    };
    (limit_set, rules.plan(limit_set).map(|plan| PlanExplanation { name: plan.name().to_string(), source }))
}
