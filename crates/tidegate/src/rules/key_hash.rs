//! API keys from a Redis hash: an application writes a field, and every instance knows the key within about a second.
//!
//! ```text
//!   HSET tidegate:keys  api_key:4e738ca5…  '{"name": "acme", "plan": "pro"}'    by the key's SHA-256
//!   HDEL tidegate:keys  api_key:4e738ca5…                                       unknown within about a second
//! ```

use serde::Deserialize;
use tidegate_core::{Clock, Store, SystemClock};
use tidegate_redis::{RedisStore, Reply};

use super::key_lookup::{KeyFuture, KeyLookup};
use super::lookup_cache::WarningGate;
use crate::identity::{KeyDigest, KnownKey};

/// Maximum length of a field's value in bytes. The key of a longer one is unknown.
const VALUE_BYTES_MAX: usize = 1_024;

/// A [`KeyLookup`] in a Redis hash that maps API keys to their attributes.
///
/// The field of a key is `api_key:` and its SHA-256 in lowercase hexadecimal. The value is a JSON object of at most
/// 1,024 bytes with the optional fields `name`, `plan` and `exempt`, such as `{"name": "acme", "plan": "pro"}`.
///
/// A key without a field is unknown. So is a key whose value is malformed, is too long or has another field; that is
/// logged as a warning, at most every ten seconds.
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
pub struct KeyHash {
    store: RedisStore,
    name: Box<str>,
    warnings: WarningGate,
}

/// The value of a field.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyRecord {
    name: Option<String>,
    plan: Option<String>,
    #[serde(default)]
    exempt: bool,
}

impl KeyHash {
    /// Creates a lookup in the Redis hash with the key `name`, on the server of `store`. Reads nothing yet.
    ///
    /// The store's key prefix is not added to `name`.
    pub fn new(store: RedisStore, name: impl Into<Box<str>>) -> KeyHash {
        KeyHash { store, name: name.into(), warnings: WarningGate::default() }
    }

    /// Returns the attributes of the key in a reply. `None` for nil, and for a malformed value, which is logged.
    fn known_key(&self, reply: &Reply) -> Option<KnownKey> {
        let text = reply.as_text()?;
        let record: Option<KeyRecord> =
            Some(text).filter(|text| text.len() <= VALUE_BYTES_MAX).and_then(|text| serde_json::from_str(text).ok());
        if record.is_none() && self.warnings.opens_at(SystemClock::new().now()) {
            tracing::warn!(
                hash = %self.name,
                "the hash entry of an API key is invalid, so the key is treated as unknown: expected JSON of at most \
                 {VALUE_BYTES_MAX} bytes, such as {{\"name\": \"acme\", \"plan\": \"pro\", \"exempt\": false}}"
            );
        }
        let KeyRecord { name, plan, exempt } = record?;
        Some(KnownKey { name: name.map(Into::into), plan: plan.map(Into::into), exempt })
    }
}

impl KeyLookup for KeyHash {
    fn key<'a>(&'a self, digest: &'a KeyDigest) -> KeyFuture<'a> {
        Box::pin(async move {
            let reply = self.store.command(&["HGET", &self.name, &digest.field()]).await?;
            Ok(self.known_key(&reply))
        })
    }

    fn store(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }
}

impl std::fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyHash").field("store", &self.store).field("name", &self.name).finish_non_exhaustive()
    }
}
