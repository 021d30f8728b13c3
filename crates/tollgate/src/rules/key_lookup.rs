//! API keys that the configuration does not list: in a database, in a Redis hash, behind a service.

use std::future::Future;
use std::pin::Pin;

use tollgate_core::Store;

use super::lookup_cache::LookupError;
use crate::identity::{KeyDigest, KnownKey};

/// The future returned by [`KeyLookup::key`].
pub type KeyFuture<'a> = Pin<Box<dyn Future<Output = Result<Option<KnownKey>, LookupError>> + Send + 'a>>;

/// An external source of API keys: a database, a Redis hash (`KeyHash`), an asynchronous closure.
///
/// An [`Engine`](crate::engine::Engine) asks it about a key that its rules do not list, if a rule applies to the request.
/// It passes the SHA-256 digest of the key, never the key. Answers are cached, also that a key is unknown; see
/// [`Lookups`](super::Lookups) for the bounds. So this is called for a small part of the requests.
///
/// If it fails, panics or does not answer in time, the key counts as it did at its last answer, else as an unknown one.
/// The error is logged, at most every ten seconds, and no key is looked up for 250 ms. So return `Ok(None)` for a record
/// that cannot be read, which is the problem of one key only.
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::Arc;
/// use tollgate::identity::{KeyDigest, KnownKey};
/// use tollgate::rules::{KeyLookup, LookupError};
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
    /// The future resolves to `Ok(None)` if there is no such key, and to an error if that is not known.
    fn key<'a>(&'a self, digest: &'a KeyDigest) -> KeyFuture<'a>;

    /// Returns the store whose connection the lookup uses, or `None` if it uses another one. Defaults to `None`.
    ///
    /// On a machine that is short of CPU time, a reply of this store that has arrived at the deadline is still used.
    fn store(&self) -> Option<&dyn Store> {
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
