//! API keys that the configuration does not list: in a database, in a Redis hash, behind a service.

use std::future::Future;
use std::pin::Pin;

use tidegate_core::Store;

#[cfg(feature = "redis")]
use super::key_hash::KeyHash;
use super::lookup_cache::LookupError;
use crate::identity::{KeyDigest, KnownKey};

/// The future returned by [`KeyLookup::key`]: the attributes of the key, `None` if there is no such key, or an error.
pub type KeyFuture<'a> = Pin<Box<dyn Future<Output = Result<Option<KnownKey>, LookupError>> + Send + 'a>>;

/// An external source of API keys: a database, a Redis hash (`KeyHash`), an asynchronous closure.
///
/// An [`Engine`](crate::engine::Engine) asks it about a key that its rules do not list, if a rule applies to the
/// request. It passes the SHA-256 digest of the key, never the key. Answers are cached, including that a key is
/// unknown, so only a small part of the requests calls this; see [`Lookups`](super::Lookups) for the bounds.
///
/// If a lookup fails, panics or does not answer in time, the last cached answer about the key is used, even if it has
/// expired; without one, the key is unknown. The error is logged, at most every ten seconds.
///
/// After an error or a panic, the source is not asked about any key for 250 ms. So return `Ok(None)` for a malformed
/// record, which concerns one key only. After a timeout, it is not asked about this key for 250 ms. If a second key
/// times out and no lookup has answered in between, it is not asked about any key.
///
/// In a tokio runtime, a lookup whose request no longer waits continues in the background. It is dropped after five
/// seconds.
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::Arc;
/// use tidegate::identity::{KeyDigest, KnownKey};
/// use tidegate::rules::{KeyLookup, LookupError};
///
/// # let rows = HashMap::from([(*KeyDigest::of("s3cr3t").as_bytes(), ("acme".to_owned(), "pro".to_owned()))]);
/// # struct Database { rows: HashMap<[u8; 32], (String, String)> }
/// # impl Database {
/// #     async fn find(&self, digest: &[u8]) -> Result<Option<(String, String)>, std::io::Error> {
/// #         Ok(self.rows.get(digest).cloned())
/// #     }
/// # }
/// # let database = Database { rows };
/// let database = Arc::new(database);
/// let lookup = move |digest: KeyDigest| {
///     let database = database.clone();
///     async move {
///         let row = database.find(digest.as_bytes()).await?;
///         Ok::<_, std::io::Error>(row.map(|(name, plan)| KnownKey::new().name(name).plan(plan)))
///     }
/// };
/// fn accepts(_: &dyn KeyLookup) {}
/// accepts(&lookup);
/// ```
pub trait KeyLookup: Send + Sync {
    /// Looks up the API key with this digest.
    ///
    /// The future resolves to `Ok(None)` if there is no such key, and to an error if the source failed.
    fn key<'a>(&'a self, digest: &'a KeyDigest) -> KeyFuture<'a>;

    /// Returns the store whose connection the lookup uses, or `None` if it uses another one. Defaults to `None`.
    ///
    /// On a busy machine, a reply of this store may be received before the deadline and not yet be delivered when it
    /// passes. Such a reply is still used.
    fn store(&self) -> Option<&dyn Store> {
        None
    }

    /// Returns the Redis hash that this source is, so that operators can find keys by name and change them, or `None` if
    /// it is another source. Defaults to `None`.
    #[cfg(feature = "redis")]
    fn hash(&self) -> Option<&KeyHash> {
        None
    }
}

impl<F, Found, E> KeyLookup for F
where
    F: Fn(KeyDigest) -> Found + Send + Sync,
    Found: Future<Output = Result<Option<KnownKey>, E>> + Send + 'static,
    E: Into<LookupError>,
{
    fn key<'a>(&'a self, digest: &'a KeyDigest) -> KeyFuture<'a> {
        let found = self(*digest);
        Box::pin(async move { found.await.map_err(Into::into) })
    }
}
