//! `/v1/keys/{name}`: the API keys in the Redis hash of the configuration, by the names of their owners.
//!
//! ```text
//!   GET    /v1/keys                    the keys of the hash, at most 1,000
//!   GET    /v1/keys/acme               one of them
//!   PATCH  /v1/keys/acme               {"plan": "pro", "limits": ["5000/h"], "groups": ["partners"]}; null removes, an
//!                                      absent field stays
//!   PUT    /v1/keys/acme/plan          {"plan": "pro"}
//!   PUT    /v1/keys/acme/limits        {"limits": ["5000/h"]}
//!   PUT    /v1/keys/acme/groups        {"groups": ["partners"]}
//!   DELETE /v1/keys/acme/plan, /limits, /groups
//! ```
//!
//! A change is checked as a keys file would be, and written as a whole. It is in force on all instances within a second,
//! when their cached answers about the key expire. Counters are kept: a limit of a rule counts on the names of the rule
//! and the limit.

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use hyper::body::Body;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tidegate::config::Loaded;
use tidegate::identity::{KeyDigest, KnownKey};
use tidegate::rules::{KeyChange, KeyHash, KeyHashError, Lookups, OwnLimits};

use super::{AdminListener, Answer, ErrorResponse};
use crate::listener::BoxError;
use crate::listeners::http::connection::{json, method_not_allowed, problem, read_body};

/// The maximum number of keys in a list.
const KEYS_MAX: usize = 1_000;
/// The most bytes of a change.
const BODY_BYTES_MAX: usize = 16 * 1024;

/// The Redis hash of API keys of a configuration, for an operator who reads and changes it.
#[derive(Clone, Copy)]
pub struct KeyEditor<'r> {
    /// The configuration, which has the plans and the rules.
    pub loaded: &'r Loaded,
    /// The lookups of the configuration, of which one is the hash.
    pub lookups: &'r Lookups,
}

/// A change to an API key. Its JSON is the body of `PATCH /v1/keys/{name}`.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct KeyChangeRequest {
    /// The name of the plan. `None` leaves it as it is, and `Some(None)` removes it.
    #[serde(deserialize_with = "present")]
    pub plan: Option<Option<String>>,
    /// The own limits of the key, each a text such as `5000/h` or a table, as in a keys file; or one of them. `None`
    /// leaves them as they are, and `Some(None)` removes them.
    #[serde(deserialize_with = "present")]
    pub limits: Option<Option<Value>>,
    /// All groups of the key's owner. `None` leaves them as they are, and `Some(None)` removes them.
    #[serde(deserialize_with = "present")]
    pub groups: Option<Option<Vec<String>>>,
}

/// Reads a field that is present: `Some(None)` for null.
fn present<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(field: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(field).map(Some)
}

/// An API key in the Redis hash of the configuration.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct KeyReport {
    /// The name of the key's owner. `None` if it has none.
    pub name: Option<String>,
    /// The plan. `None` if the entry assigns none.
    pub plan: Option<String>,
    /// The key's own limits, which replace those of its plan. `None` if it has none.
    pub limits: Option<Vec<OwnLimitReport>>,
    /// The groups of the key's owner, which rules can match. Empty if it has none.
    pub groups: Vec<String>,
    /// Whether requests with this key are never limited.
    pub exempt: bool,
    /// The part of the entry that is ignored, and why. `None` if nothing is.
    pub problem: Option<String>,
    /// A pattern for the field of the key in the hash, such as `api_key:4e738ca5*`.
    pub field: String,
}

/// A limit of an API key's own.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct OwnLimitReport {
    /// The name of the limit, which is part of the counter's key.
    pub name: String,
    /// The limit as text, such as `10/min`.
    pub limit: String,
}

/// The API keys of the Redis hash of the configuration.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct KeyListReport {
    /// The keys, sorted by name.
    pub keys: Vec<KeyReport>,
    /// Whether the hash has more keys.
    pub has_more: bool,
}

/// The error of a [`KeyEditor`]. Nothing was changed, unless the store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyEditError {
    /// The configuration has no Redis hash of API keys.
    #[error(
        "the configuration has no Redis hash of API keys; set `redis_hash` in `[key_sources]`, and a Redis store, or \
         change the keys file"
    )]
    NoHash,
    /// No key in the hash has this name.
    #[error("no API key in the Redis hash {hash} has the name {name}")]
    Unknown {
        /// The name.
        name: String,
        /// The key of the hash.
        hash: String,
    },
    /// No key in the hash has this name, but one in the configuration has.
    #[error(
        "the API key {0} is listed in the configuration or its keys file, not in the Redis hash; change it there: the file is \
         reloaded when it changes"
    )]
    Listed(String),
    /// Several keys in the hash have this name.
    #[error("{count} API keys in the Redis hash {hash} have the name {name}; give each its own")]
    Ambiguous {
        /// The name.
        name: String,
        /// The key of the hash.
        hash: String,
        /// The number of keys.
        count: usize,
    },
    /// The change is invalid. The message says what is accepted.
    #[error("{0}")]
    Invalid(String),
    /// The hash cannot be read or changed.
    #[error(transparent)]
    Hash(#[from] KeyHashError),
}

impl KeyEditor<'_> {
    /// Returns the keys of the hash, sorted by name, at most 1,000.
    ///
    /// # Errors
    /// If there is no hash, or the store fails.
    pub async fn list(&self) -> Result<KeyListReport, KeyEditError> {
        let list = self.hash()?.list(KEYS_MAX).await?;
        let keys = list.keys.iter().map(|(digest, known)| self.report(digest, known)).collect();
        Ok(KeyListReport { keys, has_more: list.has_more })
    }

    /// Returns the key with this name.
    ///
    /// # Errors
    /// If there is no hash, none or several of its keys have this name, or the store fails.
    pub async fn show(&self, name: &str) -> Result<KeyReport, KeyEditError> {
        let (digest, known) = self.find(name).await?;
        Ok(self.report(&digest, &known))
    }

    /// Changes the plan, the own limits and the groups of the key with this name, and returns the changed key.
    ///
    /// # Errors
    /// If the change is invalid, in the cases of [`show`](KeyEditor::show), or if the entry cannot be changed. Nothing is
    /// changed then, unless the store failed.
    pub async fn change(&self, name: &str, request: &KeyChangeRequest) -> Result<KeyReport, KeyEditError> {
        let change = self.check(request)?;
        let (digest, _) = self.find(name).await?;
        let hash = self.hash()?;
        let known = hash.update(&digest, &change).await?.ok_or_else(|| self.unknown(name, hash))?;
        Ok(self.report(&digest, &known))
    }

    /// Checks a change as loading a keys file would.
    fn check(&self, request: &KeyChangeRequest) -> Result<KeyChange, KeyEditError> {
        let rules = &self.loaded.rules;
        let mut change = KeyChange::new();
        if *request == KeyChangeRequest::default() {
            return Err(KeyEditError::Invalid("expected plan, limits or groups".to_owned()));
        }
        if let Some(plan) = &request.plan {
            if let Some(plan) = plan.as_ref().filter(|plan| rules.limit_set_named(plan).is_none()) {
                let names: Vec<&str> = rules.plans().iter().map(|plan| &**plan.name()).collect();
                let message = if names.is_empty() {
                    format!("there is no plan `{plan}`: the configuration has no plans")
                } else {
                    format!("there is no plan `{plan}`; expected one of {}", names.join(", "))
                };
                return Err(KeyEditError::Invalid(message));
            }
            change = change.plan(plan.as_deref());
        }
        if let Some(limits) = &request.limits {
            let limits = limits.as_ref().map(|limits| OwnLimits::from_json(&limits.to_string())).transpose();
            let limits = limits.map_err(|error| KeyEditError::Invalid(format!("limits: {error}")))?;
            let mut known = KnownKey::new();
            known.limits = limits.clone();
            if let Some(problem) = rules.key_problem(&known) {
                return Err(KeyEditError::Invalid(format!("limits: {problem}")));
            }
            change = change.limits(limits);
        }
        if let Some(groups) = &request.groups {
            let groups = groups.as_deref().unwrap_or_default();
            let changed = change.groups(groups.iter().map(String::as_str));
            change = changed.map_err(|error| KeyEditError::Invalid(format!("groups: {error}")))?;
        }
        Ok(change)
    }

    fn hash(&self) -> Result<&KeyHash, KeyEditError> {
        self.lookups.key_hash().ok_or(KeyEditError::NoHash)
    }

    async fn find(&self, name: &str) -> Result<(KeyDigest, KnownKey), KeyEditError> {
        let hash = self.hash()?;
        let mut named = hash.find_named(name).await?;
        match (named.len(), named.pop()) {
            (1, Some(found)) => Ok(found),
            (0, _) => Err(self.unknown(name, hash)),
            (count, _) => Err(KeyEditError::Ambiguous { name: name.to_owned(), hash: hash.name().to_owned(), count }),
        }
    }

    /// Returns the error for a name that no key in the hash has.
    fn unknown(&self, name: &str, hash: &KeyHash) -> KeyEditError {
        if self.loaded.rules.keys().any(|(_, known)| known.name.as_deref() == Some(name)) {
            KeyEditError::Listed(name.to_owned())
        } else {
            KeyEditError::Unknown { name: name.to_owned(), hash: hash.name().to_owned() }
        }
    }

    fn report(&self, digest: &KeyDigest, known: &KnownKey) -> KeyReport {
        let limit = |(name, limit): (&str, &tidegate::Limit)| OwnLimitReport {
            name: name.to_owned(),
            limit: limit.to_string(),
        };
        KeyReport {
            name: known.name.as_ref().map(ToString::to_string),
            plan: known.plan.as_ref().map(ToString::to_string),
            limits: known.limits.as_ref().map(|limits| limits.iter().map(limit).collect()),
            groups: known.groups.iter().map(ToString::to_string).collect(),
            exempt: known.exempt,
            problem: self.loaded.rules.key_problem(known).map(|problem| problem.to_string()),
            field: digest.field_pattern(),
        }
    }
}

/// The parts of a key that a path below its name can set or remove.
const PARTS: [&str; 3] = ["plan", "limits", "groups"];

/// Answers with the API keys of the hash. The answer is 409 if there is no hash, and 503 if the store fails.
pub(super) async fn list(listener: &AdminListener) -> Answer {
    let loaded = listener.reloader.loaded().ok_or(KeyEditError::NoHash)?;
    let editor = KeyEditor { loaded: &loaded, lookups: listener.engine.lookups() };
    Ok(json(StatusCode::OK, &editor.list().await?))
}

/// Answers a request to a path below `/v1/keys/`, by the table of this module.
///
/// The answer is 400 if the query or the body is invalid, 404 if no key has the name, 409 if there is no hash or the key
/// cannot be changed in it, and 503 if the store fails. Logs a change, with the name of the key.
pub(super) async fn answer<B>(listener: &AdminListener, request: Request<B>) -> Answer
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let path = request.uri().path();
    let path = path.strip_prefix("/v1/keys/").unwrap_or(path).to_owned();
    let (name, part) = path.split_once('/').map_or((&*path, None), |(name, part)| (name, Some(part)));
    if part.is_some_and(|part| !PARTS.contains(&part)) {
        let message = "expected /v1/keys/{name}, or plan, limits or groups below it";
        return Err(problem(StatusCode::NOT_FOUND, "not_found", message).into());
    }
    let method = request.method().clone();
    let is_change = match (&method, part) {
        (&Method::GET | &Method::HEAD, None) => false,
        (&Method::PATCH, None) | (&Method::PUT | &Method::DELETE, Some(_)) => true,
        (_, None) => return Err(method_not_allowed("GET, HEAD, PATCH").into()),
        (_, Some(_)) => return Err(method_not_allowed("PUT, DELETE").into()),
    };
    if request.uri().query().is_some_and(|query| !query.is_empty()) {
        return Err("unknown parameter; expected none".to_owned().into());
    }
    let name = percent_decode_str(name).decode_utf8().map_err(|_| "the name of a key must be UTF-8".to_owned())?;
    let change = match part.filter(|_| method == Method::DELETE) {
        Some(part) => Some(parse(serde_json::json!({ part: null }).to_string().as_bytes(), None)?),
        None if is_change => Some(parse(&read_body(request.into_body(), BODY_BYTES_MAX).await?, part)?),
        None => None,
    };
    let loaded = listener.reloader.loaded().ok_or(KeyEditError::NoHash)?;
    let editor = KeyEditor { loaded: &loaded, lookups: listener.engine.lookups() };
    let Some(change) = change else { return Ok(json(StatusCode::OK, &editor.show(&name).await?)) };
    let key = editor.change(&name, &change).await?;
    let limits = key.limits.iter().flatten().map(|own| own.limit.as_str()).collect::<Vec<_>>().join(", ");
    let groups = key.groups.join(", ");
    tracing::info!(key = %name, plan = key.plan, limits, groups, "the operator changed an API key");
    Ok(json(StatusCode::OK, &key))
}

/// Parses the body of a change. `part` is the one that it must set, or `None` if it may set or remove any.
pub(crate) fn parse(body: &[u8], part: Option<&str>) -> Result<KeyChangeRequest, String> {
    // A list would be read as the fields in their order.
    let fields: Option<Map<String, Value>> = serde_json::from_slice(body).ok();
    let sets_only = |part: &str, fields: &Map<String, Value>| {
        fields.iter().all(|(field, value)| field == part && !value.is_null()) && !fields.is_empty()
    };
    let fields = fields.filter(|fields| part.is_none_or(|part| sets_only(part, fields)));
    let change = fields.and_then(|fields| serde_json::from_value(Value::Object(fields)).ok());
    change.ok_or_else(|| {
        let expected = match part {
            None => {
                "{\"plan\": \"pro\", \"limits\": [\"5000/h\"], \"groups\": [\"partners\"]}, some of these, or null to \
                 remove one"
            }
            Some("plan") => "{\"plan\": \"pro\"}",
            Some("limits") => "{\"limits\": [\"5000/h\"]}",
            Some(_) => "{\"groups\": [\"partners\"]}",
        };
        format!("expected {expected}")
    })
}

impl From<KeyEditError> for ErrorResponse {
    fn from(error: KeyEditError) -> ErrorResponse {
        let message = error.to_string();
        let (status, code) = match error {
            KeyEditError::NoHash => (StatusCode::CONFLICT, "no_key_hash"),
            KeyEditError::Unknown { .. } => (StatusCode::NOT_FOUND, "unknown_key"),
            KeyEditError::Listed(_) => (StatusCode::CONFLICT, "listed_key"),
            KeyEditError::Ambiguous { .. } => (StatusCode::CONFLICT, "ambiguous_key"),
            KeyEditError::Invalid(_) => (StatusCode::BAD_REQUEST, "bad_request"),
            KeyEditError::Hash(KeyHashError::Store(error)) => return error.into(),
            KeyEditError::Hash(_) => (StatusCode::CONFLICT, "not_changed"),
        };
        problem(status, code, &message).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_sets_what_its_path_names_and_nothing_else() {
        let change = |body: &str, part| parse(body.as_bytes(), part);
        assert_eq!(change(r#"{"plan": "pro"}"#, Some("plan")).unwrap().plan, Some(Some("pro".to_owned())));
        let both = change(r#"{"plan": null, "limits": ["1/s"]}"#, None).unwrap();
        assert_eq!((both.plan, both.limits), (Some(None), Some(Some(serde_json::json!(["1/s"])))));
        assert_eq!(change("{}", None).unwrap(), KeyChangeRequest::default());
        let groups = change(r#"{"groups": ["a", "b"]}"#, Some("groups")).unwrap().groups;
        assert_eq!(groups, Some(Some(vec!["a".to_owned(), "b".to_owned()])));
        for (body, part) in [
            ("", None),
            ("[]", None),
            (r#"{"plann": "pro"}"#, None),
            (r#"{"plan": 5}"#, None),
            (r#"{"plan": null}"#, Some("plan")),
            (r#"{"limits": ["1/s"]}"#, Some("plan")),
            (r#"{"plan": "pro"}"#, Some("limits")),
            (r#"{"plan": "pro", "limits": ["1/s"]}"#, Some("limits")),
            (r#"{"groups": "a"}"#, Some("groups")),
            (r#"{"limits": ["1/s"]}"#, Some("groups")),
            (r#"{"groups": ["a"], "plan": "pro"}"#, Some("plan")),
        ] {
            assert!(change(body, part).is_err_and(|message| message.starts_with("expected {")), "{body}");
        }
    }
}
