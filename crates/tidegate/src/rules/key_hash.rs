//! API keys from a Redis hash: an application writes a field, and every instance knows the key within about a second.
//!
//! ```text
//!   HSET tidegate:keys  api_key:4e738ca5…  '{"name": "acme", "plan": "pro"}'    by the key's SHA-256
//!   HSET tidegate:keys  api_key:4e738ca5…  '{"name": "acme", "limits": ["5000/h"]}'
//!   HDEL tidegate:keys  api_key:4e738ca5…                                       unknown within about a second
//! ```
//!
//! **A field makes its key known**, whatever its value is. A value, or a part of one, that cannot be understood is
//! ignored and reported: the customer keeps its identity and gets the limits of its plan, or of `default`. If it became
//! anonymous instead, a typing error of an operator would put a paying customer under the limits of strangers.
//!
//! **An operator changes one entry at a time** ([`KeyHash::update`]). The value is read, changed here and written back
//! only if it is still the one that was read, in one script call on the server. So two writers never lose a change of
//! the other, and fields of the value that are not known here stay. Names are found by scanning the hash: only for
//! operators, never for a request.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};
use tidegate_core::{Store, StoreError};
use tidegate_redis::{RedisStore, Reply};

use super::key_lookup::{KeyFuture, KeyLookup};
use super::own_limits::OwnLimits;
use crate::answer::is_rule_name;
use crate::config::limits_from_json;
use crate::identity::{KeyDigest, KnownKey};

/// Maximum length of a field's value in bytes. Of a longer one, nothing is used: enough for eight limits as tables.
const VALUE_BYTES_MAX: usize = 4_096;
/// Maximum number of entries that are read to find a name.
const SCANNED_MAX: usize = 1_000_000;
/// The number of entries that the server is asked for at once. It replies in well below a millisecond.
const SCAN_COUNT: &str = "500";
/// Maximum number of attempts to change an entry that others change at the same time.
const ATTEMPTS_MAX: usize = 32;

/// A [`KeyLookup`] in a Redis hash that maps API keys to their attributes.
///
/// The field of a key is `api_key:` and its SHA-256 in lowercase hexadecimal. The value is a JSON object of at most
/// 4,096 bytes with the optional fields `name`, `plan`, `limits`, `groups` and `exempt`, such as
/// `{"name": "acme", "plan": "pro", "limits": ["100/min", {"name": "burst", "limit": "10/s"}], "groups": ["partners"]}`.
/// The forms of `limits` are those of a keys file. There are at most [`OwnLimits::MAX`]. A group has 1 to 64 letters,
/// digits, `-`, `_` and `.`.
///
/// A key without a field is unknown. A key with a field is known, even if its value is malformed. Then the part that
/// cannot be read is ignored: own limits or groups as a whole, a plan, an exemption. [`KnownKey::problem`] says which, and an
/// [`Engine`](crate::engine::Engine) logs it as a warning, at most every ten seconds.
///
/// ```no_run
/// use std::sync::Arc;
/// use tidegate::Limiter;
/// use tidegate::config::Loader;
/// use tidegate::engine::Engine;
/// use tidegate::rules::{KeyHash, Lookups};
/// use tidegate_redis::RedisStore;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::builder("redis://localhost").build()?;
/// let lookups = Lookups::new().key(KeyHash::new(store.clone(), "tidegate:keys"));
/// let limiter = Limiter::builder().store(Arc::new(store)).build();
/// let rules = Loader::new().load("tidegate.toml")?.rules;
/// let engine = Engine::with_lookups(limiter, rules, lookups);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct KeyHash {
    store: RedisStore,
    name: Arc<str>,
}

/// A change to the entry of an API key in a [`KeyHash`]. What is not set stays as it is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[must_use = "a change has no effect until it is passed to `KeyHash::update`"]
pub struct KeyChange {
    plan: Option<Option<Arc<str>>>,
    limits: Option<Option<OwnLimits>>,
    groups: Option<Arc<[Arc<str>]>>,
}

impl KeyChange {
    /// Creates a change that changes nothing.
    pub fn new() -> KeyChange {
        KeyChange::default()
    }

    /// Sets the plan, or removes it with `None`. Whether there is such a plan is not checked.
    pub fn plan(self, plan: Option<&str>) -> KeyChange {
        KeyChange { plan: Some(plan.map(Arc::from)), ..self }
    }

    /// Sets all own limits of the key, or removes them with `None`.
    pub fn limits(self, limits: Option<OwnLimits>) -> KeyChange {
        KeyChange { limits: Some(limits), ..self }
    }

    /// Sets all groups of the key's owner. Without any, removes them.
    ///
    /// # Errors
    /// If a name is not 1 to 64 letters, digits, `-`, `_` and `.`.
    pub fn groups<'g>(self, groups: impl IntoIterator<Item = &'g str>) -> Result<KeyChange, GroupNameError> {
        let group = |name: &str| if is_rule_name(name) { Ok(Arc::from(name)) } else { Err(GroupNameError) };
        Ok(KeyChange { groups: Some(groups.into_iter().map(group).collect::<Result<_, _>>()?), ..self })
    }

    fn apply(&self, fields: &mut Map<String, Value>) {
        let plan = self.plan.as_ref().map(|plan| plan.as_ref().map(|plan| Value::from(&**plan)));
        let limits = self.limits.as_ref().map(|limits| limits.as_ref().map(OwnLimits::to_json));
        let groups = self
            .groups
            .as_ref()
            .map(|groups| (!groups.is_empty()).then(|| groups.iter().map(|group| Value::from(&**group)).collect()));
        for (name, change) in [("plan", plan), ("limits", limits), ("groups", groups)] {
            match change {
                Some(Some(value)) => drop(fields.insert(name.to_owned(), value)),
                Some(None) => drop(fields.remove(name)),
                None => {}
            }
        }
    }
}

/// The error for the name of a group that is empty, has more than 64 bytes, or has characters other than letters, digits
/// and `-`, `_` and `.`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a group must be 1 to 64 letters, digits or - _ .")]
pub struct GroupNameError;

/// API keys of a [`KeyHash`], as [`KeyHash::list`] found them.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct KeyList {
    /// The keys, sorted by name, those without a name first.
    pub keys: Vec<(KeyDigest, KnownKey)>,
    /// Whether the hash has more keys.
    pub has_more: bool,
}

/// The error of an operator's call to a [`KeyHash`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyHashError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The hash has too many entries to search it for a name.
    #[error("the Redis hash has more than {SCANNED_MAX} entries, so it is not searched for a name")]
    TooManyEntries,
    /// The entry is not a JSON object, so it cannot be changed.
    #[error("the entry of the key is not a JSON object; write a new one with HSET")]
    Malformed,
    /// The entry would be longer than an entry may be.
    #[error("the entry of the key would have more than {VALUE_BYTES_MAX} bytes")]
    TooLong,
    /// Other writers changed the entry at every attempt.
    #[error("other writers change the entry of the key all the time; try again")]
    Conflict,
}

impl KeyHash {
    /// Creates a lookup in the Redis hash with the key `name`, on the server of `store`. Reads nothing yet.
    ///
    /// The store's key prefix is not added to `name`.
    pub fn new(store: RedisStore, name: impl Into<Box<str>>) -> KeyHash {
        KeyHash { store, name: Arc::from(name.into()) }
    }

    /// Returns the key of the Redis hash.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Finds the keys whose owner has this name, sorted by digest. Usually there is one.
    ///
    /// Scans the hash, in many commands if it is large. For operators only.
    ///
    /// # Errors
    /// If the store fails, or the hash has more than 1,000,000 entries.
    pub async fn find_named(&self, name: &str) -> Result<Vec<(KeyDigest, KnownKey)>, KeyHashError> {
        let mut found = BTreeMap::new();
        let is_named = |known: &KnownKey| known.name.as_deref() == Some(name);
        let mut scanned = 0;
        let is_complete = self
            .scan(|digest, known| {
                scanned += 1;
                if is_named(&known) {
                    found.insert(*digest.as_bytes(), (digest, known));
                }
                scanned <= SCANNED_MAX
            })
            .await?;
        if is_complete { Ok(found.into_values().collect()) } else { Err(KeyHashError::TooManyEntries) }
    }

    /// Returns at most `max` keys of the hash, sorted by name. If there are more, it is not determined which.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn list(&self, max: usize) -> Result<KeyList, KeyHashError> {
        let mut found = BTreeMap::new();
        // A scan may return an entry twice.
        let is_complete = self
            .scan(|digest, known| {
                found.insert(*digest.as_bytes(), (digest, known));
                found.len() <= max
            })
            .await?;
        let has_more = !is_complete || found.len() > max;
        let mut keys: Vec<(KeyDigest, KnownKey)> = found.into_values().take(max).collect();
        keys.sort_by(|(_, a), (_, b)| a.name.cmp(&b.name));
        Ok(KeyList { keys, has_more })
    }

    /// Changes the entry of a key, and returns its new attributes. Returns `None`, and writes nothing, if the hash has
    /// no such key.
    ///
    /// The entry is replaced only if nothing has changed it meanwhile; otherwise it is read again. So a change by
    /// another writer is not lost, and the change takes effect as a whole. Fields of the entry that are not known here
    /// are kept.
    ///
    /// # Errors
    /// If the store fails, the entry is not a JSON object or would be too long, or other writers change it at every
    /// attempt. The entry is then unchanged, unless the store failed after it had received the change.
    pub async fn update(&self, digest: &KeyDigest, change: &KeyChange) -> Result<Option<KnownKey>, KeyHashError> {
        let field = digest.field();
        for _ in 0..ATTEMPTS_MAX {
            let before = match self.store.command(&["HGET", &self.name, &field]).await? {
                Reply::Text(before) => before,
                _ => return Ok(None),
            };
            let mut fields: Map<String, Value> =
                serde_json::from_slice(&before).map_err(|_| KeyHashError::Malformed)?;
            change.apply(&mut fields);
            let after = Value::Object(fields).to_string();
            if after.len() > VALUE_BYTES_MAX {
                return Err(KeyHashError::TooLong);
            }
            if self.store.replace_hash_field(&self.name, &field, &before, after.as_bytes()).await? {
                return Ok(Some(known_key(after.as_bytes())));
            }
        }
        Err(KeyHashError::Conflict)
    }

    /// Reads all entries of keys, and calls `visit` with each until it returns `false`. Some may be visited twice.
    ///
    /// Returns whether all were visited. Fields that are not those of a key are skipped.
    ///
    /// # Errors
    /// If the store fails.
    async fn scan(&self, mut visit: impl FnMut(KeyDigest, KnownKey) -> bool) -> Result<bool, StoreError> {
        let mut cursor = "0".to_owned();
        loop {
            let reply = self.store.command(&["HSCAN", &*self.name, &cursor, "COUNT", SCAN_COUNT]).await?;
            let Reply::List(parts) = reply else { return Ok(true) };
            let (next, entries) = match &parts[..] {
                [next, Reply::List(entries)] => (next.as_text().unwrap_or("0").to_owned(), entries),
                _ => return Ok(true),
            };
            for pair in entries.chunks_exact(2) {
                let digest = pair[0].as_text().and_then(KeyDigest::from_field);
                let (Some(digest), Reply::Text(value)) = (digest, &pair[1]) else { continue };
                if !visit(digest, known_key(value)) {
                    return Ok(false);
                }
            }
            if next == "0" {
                return Ok(true);
            }
            cursor = next;
        }
    }
}

/// Reads the value of a field. Ignores what cannot be read, and notes the first such part as the key's problem.
fn known_key(value: &[u8]) -> KnownKey {
    let mut known = KnownKey::new();
    if value.len() > VALUE_BYTES_MAX {
        known.problem = Some(format!("the entry has more than {VALUE_BYTES_MAX} bytes").into());
        return known;
    }
    let Ok(fields) = serde_json::from_slice::<Map<String, Value>>(value) else {
        known.problem = Some("the entry is not a JSON object, such as {\"name\": \"acme\", \"plan\": \"pro\"}".into());
        return known;
    };
    for (field, value) in &fields {
        let problem = match (field.as_str(), value) {
            // As an absent field, so that a program may write every field.
            ("name" | "plan" | "limits" | "groups" | "exempt", Value::Null) => None,
            ("name", Value::String(name)) => {
                known.name = Some(name.as_str().into());
                None
            }
            ("plan", Value::String(plan)) => {
                known.plan = Some(plan.as_str().into());
                None
            }
            ("exempt", Value::Bool(exempt)) => {
                known.exempt = *exempt;
                None
            }
            ("limits", limits) => match limits_from_json(limits) {
                Ok(limits) => {
                    known.limits = Some(limits);
                    None
                }
                Err(error) => Some(format!("`limits`: {error}")),
            },
            ("groups", groups) => match groups_from_json(groups) {
                Ok(groups) => {
                    known.groups = groups;
                    None
                }
                Err(error) => Some(format!("`groups`: {error}")),
            },
            ("name" | "plan", _) => Some(format!("`{field}`: expected a string")),
            ("exempt", _) => Some("`exempt`: expected true or false".to_owned()),
            _ => Some("the entry has an unknown field; expected name, plan, limits, groups and exempt".to_owned()),
        };
        if let Some(problem) = problem {
            known.problem.get_or_insert_with(|| problem.into());
        }
    }
    known
}

/// Reads a list of groups, or one group.
///
/// # Errors
/// If an entry is not a text, or not the name of a group.
fn groups_from_json(json: &Value) -> Result<Arc<[Arc<str>]>, GroupNameError> {
    let groups = json.as_array().map_or(std::slice::from_ref(json), Vec::as_slice);
    let group = |group: &Value| group.as_str().filter(|name| is_rule_name(name)).map(Arc::from);
    groups.iter().map(group).collect::<Option<_>>().ok_or(GroupNameError)
}

impl KeyLookup for KeyHash {
    fn key<'a>(&'a self, digest: &'a KeyDigest) -> KeyFuture<'a> {
        Box::pin(async move {
            let reply = self.store.command(&["HGET", &self.name, &digest.field()]).await?;
            Ok(match reply {
                Reply::Text(value) => Some(known_key(&value)),
                _ => None,
            })
        })
    }

    fn store(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn hash(&self) -> Option<&KeyHash> {
        Some(self)
    }
}

impl std::fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyHash").field("store", &self.store).field("name", &self.name).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_that_cannot_be_read_keeps_the_rest_and_names_the_first_problem() {
        let long = format!(r#"{{"plan": "pro", "name": "{}"}}"#, "x".repeat(VALUE_BYTES_MAX));
        for (value, name, plan, limits, problem) in [
            (r#"{"name": "acme", "plan": "pro"}"#, Some("acme"), Some("pro"), None, None),
            (
                r#"{"limits": ["10/min", {"name": "b", "quota": 5, "window": "1s"}]}"#,
                None,
                None,
                Some("10/min, 5/s"),
                None,
            ),
            (r#"{"limits": "10/min", "plan": null}"#, None, None, Some("10/min"), None),
            (
                r#"{"name": "acme", "plan": "pro", "limits": ["10/min", "x"]}"#,
                Some("acme"),
                Some("pro"),
                None,
                Some("`limits`: "),
            ),
            (
                r#"{"plan": "pro", "limits": []}"#,
                None,
                Some("pro"),
                None,
                Some("`limits`: the key's own limits are empty"),
            ),
            (r#"{"plan": "pro", "limits": 5}"#, None, Some("pro"), None, Some("`limits`: expected a limit")),
            (r#"{"plan": "pro", "limits": [{"quota": 5}]}"#, None, Some("pro"), None, Some("quota and a window")),
            (r#"{"plan": "pro", "limits": [{"limit": "1/s", "lim": 1}]}"#, None, Some("pro"), None, Some("`limits`: ")),
            (r#"{"plan": ["pro"], "limits": ["1/s"]}"#, None, None, Some("1/s"), Some("`plan`: expected a string")),
            (r#"{"plan": "pro", "exempt": "yes"}"#, None, Some("pro"), None, Some("`exempt`: expected true or false")),
            (r#"{"plan": "pro", "plann": "max"}"#, None, Some("pro"), None, Some("unknown field")),
            ("pro", None, None, None, Some("not a JSON object")),
            ("[]", None, None, None, Some("not a JSON object")),
            (&long, None, None, None, Some("more than 4096 bytes")),
        ] {
            let known = known_key(value.as_bytes());
            assert_eq!((known.name.as_deref(), known.plan.as_deref()), (name, plan), "{value}");
            assert_eq!(known.limits.as_ref().map(ToString::to_string).as_deref(), limits, "{value}");
            assert!(!known.exempt);
            match (known.problem(), problem) {
                (Some(found), Some(phrase)) => assert!(found.contains(phrase), "{value}: {found}"),
                (found, expected) => assert_eq!(found, expected, "{value}"),
            }
        }
        let nine = format!(r#"{{"limits": {:?}}}"#, vec!["1/s"; 9]);
        assert!(known_key(nine.as_bytes()).problem().is_some_and(|problem| problem.contains("at most 8")));
    }

    #[test]
    fn change_keeps_the_other_fields() {
        let mut fields: Map<String, Value> =
            serde_json::from_str(r#"{"name": "acme", "plan": "pro", "since": 2019}"#).unwrap();
        KeyChange::new().limits(Some(OwnLimits::parse(["5/s"]).unwrap())).apply(&mut fields);
        assert_eq!(
            Value::Object(fields.clone()).to_string(),
            r#"{"limits":["5/s"],"name":"acme","plan":"pro","since":2019}"#
        );
        KeyChange::new().plan(None).limits(None).apply(&mut fields);
        assert_eq!(Value::Object(fields).to_string(), r#"{"name":"acme","since":2019}"#);
    }
}
