//! `/v1/keys`: the counters of a key.
//!
//! ```text
//!   ?key=user:42&limit=10/min                      the counter of explicit checks
//!   ?key=ip:203.0.113.9&rule=shorten               all counters of a rule, for the subject that `explain` shows
//!   ?key=ip:203.0.113.9&rule=api&plan=pro          those of a rule with limits per plan
//!   ?key=api_key:#5e88…&rule=api                   the same for an API key with a plan or limits of its own
//!   ?key=ip:203.0.113.9&rule=shorten&limit=main    one of them, by the name of the limit
//! ```
//!
//! **Which limits apply to a caller** is decided as for a request: by the API key in the subject, if that has a plan or
//! limits of its own, else by the `plan` parameter. A reset does not depend on it. It deletes every counter that the
//! rule can have for the subject under any plan, so that it never reports success and leaves the counter that denies.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tollgate::answer::Policy;
use tollgate::config::Loaded;
use tollgate::engine::Engine;
use tollgate::rules::{CompiledRule, LimitSetId, RuleSet};
use tollgate::{Demand, Key, Limit, LimitStatus, MemoryStore, Scope};

use super::AdminListener;
use crate::listeners::http::connection::{json, problem};

/// The parameters of a query to `/v1/keys`.
#[derive(Default)]
struct KeyQuery {
    key: Vec<u8>,
    /// The text of a limit such as `10/min`, or with `rule` the name of one of its limits.
    limit: Option<String>,
    rule: Option<String>,
    plan: Option<String>,
}

/// One counter of a key: of a rule's limit, or of explicit checks.
struct CounterRef {
    /// `None` for explicit checks.
    rule: Option<String>,
    /// The name that clients see, such as `per-minute`, or `search.per-minute`.
    name: String,
    /// The name of the limit within its rule, which selects the counter.
    limit_name: String,
    limit: Limit,
    /// Whether the counter is of a shield rule, in the memory of this process.
    is_shield: bool,
}

/// The counters that a query selects of a rule with limits per plan.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Selection {
    /// The counters of the limits that apply to the caller.
    Applying,
    /// The counters of the limits of all plans.
    All,
}

/// Answers with the status of the counters that the query selects, without changing them.
///
/// The answer is 400 if the query is invalid, and 503 if the store fails.
pub(super) async fn inspect(listener: &AdminListener, query: &str) -> Response<Bytes> {
    let (key, counters) = match select(listener, query, Selection::Applying) {
        Ok(selected) => selected,
        Err(message) => return problem(StatusCode::BAD_REQUEST, "bad_request", &message),
    };
    let mut statuses = Vec::with_capacity(counters.len());
    for counter in &counters {
        let status = match counter.demand(&key) {
            Ok(demand) => match listener.shield_of(counter) {
                Some(shield) => Ok(shield.inspect(&demand)),
                None => listener.limiter.inspect(&demand).await,
            },
            Err(error) => return problem(StatusCode::BAD_REQUEST, "bad_request", &error.to_string()),
        };
        match status {
            Ok(status) => statuses.push(counter.to_json(&status)),
            Err(error) => return unavailable(&error),
        }
    }
    json(StatusCode::OK, &json!({ "key": String::from_utf8_lossy(&key), "counters": statuses }))
}

/// Deletes the counters that the query selects, of all plans, and answers with their number: 1 for a limit without a
/// rule. Counters that do not exist count, too.
///
/// Limits with the same name share a counter. Logs the number.
///
/// The answer is 400 if the query is invalid, and 503 if the store fails; some counters may then be deleted already.
pub(super) async fn reset(listener: &AdminListener, query: &str) -> Response<Bytes> {
    let (key, counters) = match select(listener, query, Selection::All) {
        Ok(selected) => selected,
        Err(message) => return problem(StatusCode::BAD_REQUEST, "bad_request", &message),
    };
    for counter in &counters {
        let deleted = match counter.demand(&key) {
            Ok(demand) => match listener.shield_of(counter) {
                Some(shield) => {
                    shield.reset(&demand);
                    Ok(())
                }
                None => listener.limiter.reset(&demand).await,
            },
            Err(error) => return problem(StatusCode::BAD_REQUEST, "bad_request", &error.to_string()),
        };
        if let Err(error) = deleted {
            return unavailable(&error);
        }
    }
    // Limits of one name share the counter. Each was reset, because the deny cache is keyed by the limit.
    let names: HashSet<&str> = counters.iter().map(|counter| &*counter.limit_name).collect();
    tracing::info!(counters = names.len(), "the operator reset counters");
    json(StatusCode::OK, &json!({ "reset": true, "counters": names.len() }))
}

/// Returns the 503 response to a request for which the store failed.
pub(super) fn unavailable(error: &tollgate::StoreError) -> Response<Bytes> {
    let message = format!("the store did not answer ({})", error.kind().as_str());
    problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", &message)
}

impl AdminListener {
    /// Returns the store of shield rules if the counter is in it. `None` if it is in the limiter's store.
    fn shield_of(&self, counter: &CounterRef) -> Option<&MemoryStore> {
        self.reloader.engine().filter(|_| counter.is_shield).map(Engine::shield)
    }
}

impl CounterRef {
    fn demand<'a>(&'a self, key: &'a [u8]) -> Result<Demand<'a>, tollgate::KeyError> {
        let scope = match &self.rule {
            Some(rule) => Scope::rule(rule, &self.limit_name),
            None => Scope::Explicit,
        };
        Ok(Demand::new(self.limit, Key::scoped(key, scope)?))
    }

    fn to_json(&self, status: &LimitStatus) -> Value {
        json!({
            "rule": self.rule,
            "name": self.name,
            "limit": self.limit.to_string(),
            "allowed": status.allowed,
            "quota": status.quota,
            "remaining": status.remaining,
            "retry_after_ms": status.retry_after.as_millis_ceil(),
            "next_after_ms": status.next_after.as_millis_ceil(),
            "reset_after_ms": status.reset_after.as_millis_ceil(),
        })
    }
}

/// Returns the key of a query, and the counters that it selects, at least one.
///
/// `Err` is the message of the 400 response.
fn select(listener: &AdminListener, query: &str, selection: Selection) -> Result<(Vec<u8>, Vec<CounterRef>), String> {
    let query = KeyQuery::parse(query)?;
    let counters = match (&query.rule, &query.limit) {
        (None, Some(limit)) => {
            let limit: Limit = limit.parse().map_err(|error| format!("limit: {error}"))?;
            let name = Policy::of(limit).name().to_owned();
            vec![CounterRef { rule: None, limit_name: name.clone(), name, limit, is_shield: false }]
        }
        (Some(rule), _) => {
            let loaded = listener.reloader.loaded().ok_or("this instance has no rules; start with --config FILE")?;
            counters_of_rule(&loaded, rule, &query, selection)?
        }
        (None, None) => return Err("expected ?key=…&limit=10/min, or ?key=…&rule=NAME".to_owned()),
    };
    Ok((query.key, counters))
}

/// Returns the counters of the rule named `rule` that a query selects. `Err` is the message of the 400 response.
fn counters_of_rule(
    loaded: &Loaded,
    rule: &str,
    query: &KeyQuery,
    selection: Selection,
) -> Result<Vec<CounterRef>, String> {
    let rules = &loaded.rules;
    let Some(rule) = rules.rules().iter().find(|known| &**known.name() == rule) else {
        let names: Vec<&str> = rules.rules().iter().map(|known| &**known.name()).collect();
        return Err(format!("unknown rule; expected one of {}", names.join(", ")));
    };
    let limit_set = limit_set(rules, rule, query, selection)?;
    let policies: Vec<&Arc<Policy>> = match limit_set {
        Some(limit_set) => rule.policies(limit_set).iter().collect(),
        None => rule.policies_of_all().collect(),
    };
    let mut seen = HashSet::new();
    let mut counters = Vec::new();
    for policy in policies {
        let is_selected = query.limit.as_ref().is_none_or(|name| policy.name() == name || policy.limit_name() == name);
        let limit = *policy.limit();
        if is_selected && seen.insert((policy.limit_name(), limit)) {
            let (name, limit_name) = (policy.name().to_owned(), policy.limit_name().to_owned());
            let is_shield = rule.is_shield();
            counters.push(CounterRef { rule: Some(rule.name().to_string()), name, limit_name, limit, is_shield });
        }
    }
    match counters.is_empty() {
        true => Err("the rule has no limit with this name".to_owned()),
        false => Ok(counters),
    }
}

/// Returns the set of limits of `rule` whose counters are selected, or `None` if those of all sets are.
///
/// `Err` is the message of the 400 response: the plan of the query is unknown, is missing, or is not the plan of the
/// API key.
fn limit_set(
    rules: &RuleSet,
    rule: &CompiledRule,
    query: &KeyQuery,
    selection: Selection,
) -> Result<Option<LimitSetId>, String> {
    if !rule.is_by_plan() {
        return Ok(Some(rules.default_limit_set(false)));
    }
    let named = match &query.plan {
        Some(plan) => Some(rules.limit_set_named(plan).ok_or("unknown plan")?),
        None => None,
    };
    if selection == Selection::All {
        return Ok(None);
    }
    let Some(of_key) = limit_set_of_key(rules, &query.key) else {
        let missing = "this rule has limits per plan: add --plan NAME (in a request: plan=NAME)";
        return named.map(Some).ok_or_else(|| missing.to_owned());
    };
    let plan = rules.plan(of_key).map(|plan| &**plan.name()).unwrap_or_default();
    match &query.plan {
        Some(named) if named != plan => Err(format!("this key's plan is {plan}")),
        _ => Ok(Some(of_key)),
    }
}

/// Returns the set of limits of the API key in `subject`.
///
/// `None` if the subject contains no known key, or the key has neither a plan nor limits of its own.
fn limit_set_of_key(rules: &RuleSet, subject: &[u8]) -> Option<LimitSetId> {
    let parts = std::str::from_utf8(subject).ok()?.split('&');
    let half = parts.filter_map(|part| part.strip_prefix("api_key:#")).next()?;
    // A subject contains half of the digest.
    let half = (half.len() == 32).then(|| u128::from_str_radix(half, 16).ok())??.to_be_bytes();
    let (_, entry) = rules.keys().find(|(digest, _)| digest.as_bytes().starts_with(&half))?;
    entry.limit_set()
}

impl KeyQuery {
    /// Parses a percent-encoded query. `Err` is the message of the 400 response.
    fn parse(text: &str) -> Result<KeyQuery, String> {
        let mut query = KeyQuery::default();
        let mut has_key = false;
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let plain = value.replace('+', " ");
            let bytes: Vec<u8> = percent_decode_str(&plain).collect();
            let utf8 = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|_| format!("{name}: expected UTF-8"));
            match name {
                "key" => {
                    query.key = bytes;
                    has_key = true;
                }
                "limit" => query.limit = Some(utf8(bytes)?),
                "rule" => query.rule = Some(utf8(bytes)?),
                "plan" => query.plan = Some(utf8(bytes)?),
                _ => return Err("unknown parameter; expected key, limit, rule or plan".to_owned()),
            }
        }
        if !has_key {
            return Err("expected ?key=…".to_owned());
        }
        Ok(query)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_decoded_and_unknown_parameters_are_rejected() {
        let query = KeyQuery::parse("key=user%3A42%00%ff&limit=10/min+token-bucket%20burst=3").unwrap();
        assert_eq!(query.key, b"user:42\0\xff");
        assert_eq!(query.limit.as_deref(), Some("10/min token-bucket burst=3"));
        for (query, phrase) in
            [("", "key="), ("limit=1/s", "key="), ("key=a&kye=b", "unknown parameter"), ("key=a&rule=%ff", "UTF-8")]
        {
            assert!(KeyQuery::parse(query).is_err_and(|message| message.contains(phrase)), "{query}");
        }
        assert!(KeyQuery::parse("key=").is_ok_and(|query| query.key.is_empty()), "a key may be empty");
    }
}
