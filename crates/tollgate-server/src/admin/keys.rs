//! `/v1/keys`: the counters of a key.
//!
//! ```text
//!   ?key=user:42&limit=10/min                      the counter of explicit checks
//!   ?key=ip:203.0.113.9&rule=shorten               all counters of a rule, for the subject that `explain` shows
//!   ?key=ip:203.0.113.9&rule=api&plan=pro          the same for a rule that goes by plans
//!   ?key=api_key:#5e88…&rule=api                   … whose plan or limits the keys say
//!   ?key=ip:203.0.113.9&rule=shorten&limit=main    one of them, by its name
//! ```
//!
//! **Which limits hold a caller** is said by the key that its subject names, if that has a plan or limits of its own, as it is for
//! a request; else by whoever asks. What is forgotten does not depend on it: every counter that the rule can have for the subject, by
//! whatever plan, so that nobody is told of a pardon that left the counter that matters.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tollgate::answer::Policy;
use tollgate::config::Loaded;
use tollgate::rules::{CompiledRule, LimitSetId, RuleSet};
use tollgate::{Demand, Key, Limit, LimitStatus, Scope};

use super::AdminListener;
use crate::listeners::http::connection::{json, problem};

/// What the query asks about.
#[derive(Default)]
struct Question {
    key: Vec<u8>,
    /// Of a rule, its name.
    limit: Option<String>,
    rule: Option<String>,
    plan: Option<String>,
}

/// One counter: the rule that it belongs to, its name and its limit.
struct Counter {
    rule: Option<String>,
    name: String,
    limit: Limit,
}

/// Which counters of a rule are meant.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    /// Those that hold the caller.
    Holding,
    /// All that it can have.
    Every,
}

pub(super) async fn inspect(door: &AdminListener, query: &str) -> Response<Bytes> {
    let (key, counters) = match understand(door, query, Which::Holding) {
        Ok(understood) => understood,
        Err(message) => return problem(StatusCode::BAD_REQUEST, "bad_request", &message),
    };
    let mut lines = Vec::with_capacity(counters.len());
    for counter in &counters {
        let line = match counter.demand(&key) {
            Ok(demand) => door.numbers.limiter().inspect(&demand).await,
            Err(error) => return problem(StatusCode::BAD_REQUEST, "bad_request", &error.to_string()),
        };
        match line {
            Ok(line) => lines.push(counter.to_json(&line)),
            Err(error) => return unavailable(&error),
        }
    }
    json(StatusCode::OK, &json!({ "key": String::from_utf8_lossy(&key), "counters": lines }))
}

pub(super) async fn reset(door: &AdminListener, query: &str) -> Response<Bytes> {
    let (key, counters) = match understand(door, query, Which::Every) {
        Ok(understood) => understood,
        Err(message) => return problem(StatusCode::BAD_REQUEST, "bad_request", &message),
    };
    for counter in &counters {
        let forgotten = match counter.demand(&key) {
            Ok(demand) => door.numbers.limiter().reset(&demand).await,
            Err(error) => return problem(StatusCode::BAD_REQUEST, "bad_request", &error.to_string()),
        };
        if let Err(error) = forgotten {
            return unavailable(&error);
        }
    }
    // Limits of one name share the counter; each was told, because a denial is remembered by its limit.
    let names: HashSet<&str> = counters.iter().map(|counter| &*counter.name).collect();
    tracing::info!(counters = names.len(), "counters were forgotten at the operator's word");
    json(StatusCode::OK, &json!({ "reset": true, "counters": names.len() }))
}

fn unavailable(error: &tollgate::StoreError) -> Response<Bytes> {
    let message = format!("the store did not answer ({})", error.kind().name());
    problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", &message)
}

impl Counter {
    fn demand<'a>(&'a self, key: &'a [u8]) -> Result<Demand<'a>, tollgate::KeyError> {
        let scope = match &self.rule {
            Some(rule) => Scope::rule(rule, &self.name),
            None => Scope::Explicit,
        };
        Ok(Demand::new(self.limit, Key::scoped(key, scope)?))
    }

    fn to_json(&self, line: &LimitStatus) -> Value {
        json!({
            "rule": self.rule,
            "name": self.name,
            "limit": self.limit.to_string(),
            "allowed": line.allowed,
            "quota": line.quota,
            "remaining": line.remaining,
            "retry_after_ms": line.retry_after.as_millis_ceil(),
            "next_after_ms": line.next_after.as_millis_ceil(),
            "reset_after_ms": line.reset_after.as_millis_ceil(),
        })
    }
}

fn understand(door: &AdminListener, query: &str, which: Which) -> Result<(Vec<u8>, Vec<Counter>), String> {
    let question = read(query)?;
    let counters = match (&question.rule, &question.limit) {
        (None, Some(limit)) => {
            let limit: Limit = limit.parse().map_err(|error| format!("limit: {error}"))?;
            vec![Counter { rule: None, name: Policy::of(limit).name().to_owned(), limit }]
        }
        (Some(rule), _) => {
            let loaded = door.reloader.loaded().ok_or("there are no rules; start with --config FILE")?;
            of_rule(&loaded, rule, &question, which)?
        }
        (None, None) => return Err("expected ?key=…&limit=10/min, or ?key=…&rule=NAME".to_owned()),
    };
    Ok((question.key, counters))
}

fn of_rule(loaded: &Loaded, rule: &str, question: &Question, which: Which) -> Result<Vec<Counter>, String> {
    let rules = &loaded.rules;
    let Some(rule) = rules.rules().iter().find(|known| &**known.name() == rule) else {
        let names: Vec<&str> = rules.rules().iter().map(|known| &**known.name()).collect();
        return Err(format!("there is no such rule; there are {}", names.join(", ")));
    };
    if rule.is_shield() {
        return Err("a shield's counters are in the process that saw the request, and cannot be looked at".to_owned());
    }
    let limit_set = limit_set(rules, rule, question, which)?;
    let policies: Vec<&Arc<Policy>> = match limit_set {
        Some(limit_set) => rule.policies(limit_set).iter().collect(),
        None => rule.policies_of_all().collect(),
    };
    let mut seen = HashSet::new();
    let mut counters = Vec::new();
    for policy in policies {
        let is_meant = question.limit.as_ref().is_none_or(|name| policy.name() == name);
        let limit = *policy.limit();
        if is_meant && seen.insert((policy.name(), limit)) {
            let name = policy.name().to_owned();
            counters.push(Counter { rule: Some(rule.name().to_string()), name, limit });
        }
    }
    match counters.is_empty() {
        true => Err("the rule has no limit of that name".to_owned()),
        false => Ok(counters),
    }
}

/// The limit_set by which the counters are meant; none if by every one.
fn limit_set(
    rules: &RuleSet,
    rule: &CompiledRule,
    question: &Question,
    which: Which,
) -> Result<Option<LimitSetId>, String> {
    if !rule.is_by_plan() {
        return Ok(Some(rules.default_limit_set(false)));
    }
    let asked = match &question.plan {
        Some(plan) => Some(rules.limit_set_named(plan).ok_or("there is no such plan")?),
        None => None,
    };
    if which == Which::Every {
        return Ok(None);
    }
    let Some(said) = limit_set_of_key(rules, &question.key) else {
        return asked.map(Some).ok_or_else(|| "this rule goes by plans: expected &plan=NAME too".to_owned());
    };
    let plan = rules.plan(said).map(|plan| &**plan.name()).unwrap_or_default();
    match &question.plan {
        Some(asked) if asked != plan => Err(format!("this key's plan is {plan}")),
        _ => Ok(Some(said)),
    }
}

/// What the keys say of the one that a subject names.
fn limit_set_of_key(rules: &RuleSet, subject: &[u8]) -> Option<LimitSetId> {
    let parts = std::str::from_utf8(subject).ok()?.split('&');
    let half = parts.filter_map(|part| part.strip_prefix("api_key:#")).next()?;
    // A subject has half of the digest.
    let half = (half.len() == 32).then(|| u128::from_str_radix(half, 16).ok())??.to_be_bytes();
    let (_, entry) = rules.keys().find(|(digest, _)| digest.as_bytes().starts_with(&half))?;
    entry.limit_set()
}

fn read(query: &str) -> Result<Question, String> {
    let mut question = Question::default();
    let mut has_key = false;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let plain = value.replace('+', " ");
        let bytes: Vec<u8> = percent_decode_str(&plain).collect();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|_| format!("{name}: expected UTF-8"));
        match name {
            "key" => {
                question.key = bytes;
                has_key = true;
            }
            "limit" => question.limit = Some(text(bytes)?),
            "rule" => question.rule = Some(text(bytes)?),
            "plan" => question.plan = Some(text(bytes)?),
            _ => return Err("unknown parameter; expected key, limit, rule or plan".to_owned()),
        }
    }
    if !has_key {
        return Err("expected ?key=…".to_owned());
    }
    Ok(question)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_decoded_and_anything_else_in_it_is_refused() {
        let question = read("key=user%3A42%00%ff&limit=10/min+token-bucket%20burst=3").unwrap();
        assert_eq!(question.key, b"user:42\0\xff");
        assert_eq!(question.limit.as_deref(), Some("10/min token-bucket burst=3"));
        for (query, phrase) in
            [("", "key="), ("limit=1/s", "key="), ("key=a&kye=b", "unknown parameter"), ("key=a&rule=%ff", "UTF-8")]
        {
            assert!(read(query).is_err_and(|message| message.contains(phrase)), "{query}");
        }
        assert!(read("key=").is_ok_and(|question| question.key.is_empty()), "a key may be empty");
    }
}
