//! API keys: how they are read from a request, and which of them identify a caller.
//!
//! Every client can invent keys. If an invented key identified a caller, ten thousand of them would have ten thousand
//! budgets. So a key counts only if a [`KeySource`] knows it, or if the configuration states that the upstream refuses
//! unknown keys itself ([`ApiKeys::Any`]).
//!
//! **Keys are not stored, compared or printed.** [`KeyTable`] holds SHA-256 digests and finds keys by digest. The time
//! of a lookup depends on the digest of the guess, which reveals nothing about similar keys. The subject contains the
//! digest, so keys do not reach the store either.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use http::{HeaderMap, HeaderName};
use tidegate_config::KeyDigest;

use super::single_value::{self, SingleValue};
use crate::rules::{LimitText, OwnLimits};

/// Maximum length of an API key in bytes. A longer value is not read as a key.
pub const API_KEY_BYTES_MAX: usize = 1024;

/// An API key that a request contains, whether or not it is known. Its `Debug` output shows a part of the digest, never
/// the key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ApiKey<'h> {
    text: &'h str,
    digest: KeyDigest,
    is_bearer: bool,
}

impl<'h> ApiKey<'h> {
    /// Reads the API key that a request contains: the value of the header `name`, else the token after
    /// `Authorization: Bearer`.
    ///
    /// If the header `name` has a value, `Authorization` is not read. Returns `None` if there is neither, if the value
    /// is longer than [`API_KEY_BYTES_MAX`] or contains anything but printable ASCII, or if lines of the same header
    /// differ.
    ///
    /// ```
    /// use http::{HeaderMap, HeaderName};
    /// use tidegate::identity::ApiKey;
    ///
    /// let mut headers = HeaderMap::new();
    /// headers.insert("authorization", "Bearer s3cr3t".parse().unwrap());
    /// let key = ApiKey::from_headers(&headers, &HeaderName::from_static("x-api-key")).unwrap();
    /// assert_eq!(key.expose(), "s3cr3t");
    /// assert!(!format!("{key:?}").contains("s3cr3t"));
    /// ```
    pub fn from_headers(headers: &'h HeaderMap, name: &HeaderName) -> Option<ApiKey<'h>> {
        match single_value::header(headers, name) {
            SingleValue::One(value) => ApiKey::new(value, false),
            SingleValue::Contradiction => None,
            SingleValue::Nothing => ApiKey::new(bearer_token(headers)?, true),
        }
    }

    /// Reads all API keys in a request: one for each line of the header `name`, and one for each bearer token.
    ///
    /// Values that are too long or not printable ASCII are left out, equal ones are repeated. Used to find banned keys,
    /// wherever the client has put them.
    pub(crate) fn all_from_headers(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = ApiKey<'h>> {
        let lines = headers.get_all(name).into_iter().map(|line| (line.as_bytes().trim_ascii(), false));
        let tokens = headers.get_all(http::header::AUTHORIZATION).into_iter();
        let tokens = tokens.filter_map(|line| Some((token_in(line.as_bytes().trim_ascii())?, true)));
        lines.chain(tokens).filter_map(|(value, is_bearer)| ApiKey::new(value, is_bearer))
    }

    /// Returns whether a request can contain this key: 1 to [`API_KEY_BYTES_MAX`] characters of printable ASCII,
    /// without white space at either end.
    pub(crate) fn can_be(key: &str) -> bool {
        let key = key.as_bytes();
        let is_spaced = key.trim_ascii().len() < key.len();
        !key.is_empty() && !is_spaced && ApiKey::new(key, false).is_some()
    }

    /// Creates a key from a header value. Returns `None` if it is too long or contains anything but printable ASCII. An
    /// empty value is a key.
    fn new(value: &'h [u8], is_bearer: bool) -> Option<ApiKey<'h>> {
        if value.len() > API_KEY_BYTES_MAX || !value.iter().all(|byte| (b' '..=b'~').contains(byte)) {
            return None;
        }
        let text = std::str::from_utf8(value).ok()?;
        Some(ApiKey { text, digest: KeyDigest::of(text), is_bearer })
    }

    /// Returns the key itself, for a lookup. The caller must neither log nor store it.
    pub const fn expose(&self) -> &'h str {
        self.text
    }

    /// Returns the digest of the key.
    pub const fn digest(&self) -> KeyDigest {
        self.digest
    }

    /// Returns whether the key was sent as a bearer token, so that it may also be a JWT.
    pub const fn is_bearer(&self) -> bool {
        self.is_bearer
    }
}

impl fmt::Debug for ApiKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKey").field("digest", &self.digest).field("is_bearer", &self.is_bearer).finish()
    }
}

/// Returns the token after `Authorization: Bearer`, or `None` if there is none, or if lines of `Authorization` differ.
pub(crate) fn bearer_token(headers: &HeaderMap) -> Option<&[u8]> {
    token_in(single_value::header(headers, &http::header::AUTHORIZATION).one()?)
}

/// Returns the bearer token in a value of `Authorization`, or `None` for another scheme or an empty token.
///
/// The RFC allows only a space after the scheme. Servers accept a tab as well, so it is accepted here too: otherwise a
/// client could hide its token from the limiter, but not from the upstream.
fn token_in(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(value.iter().position(u8::is_ascii_whitespace)?)?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer") && !token.is_empty()).then_some(token)
}

/// The attributes of a known API key: what a [`KeySource`] or a [`KeyLookup`](crate::rules::KeyLookup) knows about it.
///
/// ```
/// use tidegate::identity::KnownKey;
///
/// let known = KnownKey::new().name("acme").plan("pro").limit("5000/h");
/// assert_eq!(known.plan.as_deref(), Some("pro"));
/// assert_eq!(known.limits.unwrap().to_string(), "5000/h");
/// assert!(!known.exempt);
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub struct KnownKey {
    /// The name of the key's owner, for explanations. `None` if it has none.
    pub name: Option<Arc<str>>,
    /// The name of the plan of the key's owner, or `None` if the key source assigns none.
    pub plan: Option<Arc<str>>,
    /// The limits of this key, which replace those of its plan. `None` if the key source sets none.
    pub limits: Option<OwnLimits>,
    /// The groups of the key's owner, which rules can match. Empty if the key source sets none.
    pub groups: Arc<[Arc<str>]>,
    /// Whether requests with this key are never limited.
    pub exempt: bool,
    /// Why a part of what the key source says about the key is ignored.
    pub(crate) problem: Option<Arc<str>>,
}

impl KnownKey {
    /// Creates the attributes of a key without a name or a plan, which is not exempt.
    pub fn new() -> KnownKey {
        KnownKey::default()
    }

    /// Sets the name of the key's owner. Defaults to none.
    #[must_use]
    pub fn name(self, name: impl Into<Arc<str>>) -> KnownKey {
        KnownKey { name: Some(name.into()), ..self }
    }

    /// Sets the name of the plan. Defaults to none. A plan that the rules do not have is ignored.
    #[must_use]
    pub fn plan(self, plan: impl Into<Arc<str>>) -> KnownKey {
        KnownKey { plan: Some(plan.into()), ..self }
    }

    /// Adds a limit of the key's own, such as `5000/h`. All own limits together replace those of the key's plan.
    ///
    /// The limit is named after its window, such as `per-hour`, or `per-hour-2` if that name is taken. The name is part
    /// of the counter's name. Own limits apply only in rules that take their limits from plans.
    ///
    /// If the text is not a limit, or there are more than [`OwnLimits::MAX`], the key has no limits of its own, and
    /// [`problem`](KnownKey::problem) says why: the limits of its plan apply.
    #[must_use]
    pub fn limit(self, limit: impl Into<LimitText>) -> KnownKey {
        self.with_limit(None, limit.into())
    }

    /// Adds a limit of the key's own with a name of 1 to 64 characters `a-z`, `0-9` and `-`, unique among its own
    /// limits.
    ///
    /// If the name is invalid or taken, the key has no limits of its own, as for a text that is not a
    /// [`limit`](KnownKey::limit).
    #[must_use]
    pub fn named_limit(self, name: impl Into<String>, limit: impl Into<LimitText>) -> KnownKey {
        self.with_limit(Some(name.into()), limit.into())
    }

    fn with_limit(self, name: Option<String>, limit: LimitText) -> KnownKey {
        // Half of the limits must not apply instead of all.
        if self.problem.is_some() {
            return self;
        }
        match self.limits.clone().unwrap_or_default().with(name, &limit) {
            Ok(limits) => KnownKey { limits: Some(limits), ..self },
            Err(error) => KnownKey { limits: None, problem: Some(error.to_string().into()), ..self },
        }
    }

    /// Sets the groups of the key's owner, in place of earlier ones. Defaults to none.
    ///
    /// A rule with [`group`](crate::rules::Rule::group) applies only to callers in one of its groups.
    #[must_use]
    pub fn groups<G: Into<Arc<str>>>(self, groups: impl IntoIterator<Item = G>) -> KnownKey {
        KnownKey { groups: groups.into_iter().map(Into::into).collect(), ..self }
    }

    /// Sets whether requests with this key are never limited. Defaults to `false`.
    #[must_use]
    pub fn exempt(self, exempt: bool) -> KnownKey {
        KnownKey { exempt, ..self }
    }

    /// Returns why a part of what the key source says about the key is ignored, such as a limit that cannot be parsed.
    /// `None` if nothing is.
    ///
    /// A plan that the rules do not have is not reported here; see
    /// [`RuleSet::key_problem`](crate::rules::RuleSet::key_problem).
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }
}

/// A source of known API keys: a [`RuleSet`](crate::rules::RuleSet), a [`KeyTable`], or a closure.
///
/// An [`Engine`](crate::engine::Engine) uses its rule set. The other sources are for applications that call
/// [`Identifier::identify`](super::Identifier::identify).
///
/// The time of a lookup must not depend on how similar a key is to a known one. Look keys up by digest.
pub trait KeySource: Send + Sync {
    /// Returns the attributes of `key`, or `None` if the key is unknown. An [`Identity`](super::Identity) calls it at
    /// most once. It must not block: it runs while the request is decided.
    fn find(&self, key: &ApiKey<'_>) -> Option<KnownKey>;
}

impl<F: Fn(&ApiKey<'_>) -> Option<KnownKey> + Send + Sync> KeySource for F {
    fn find(&self, key: &ApiKey<'_>) -> Option<KnownKey> {
        self(key)
    }
}

/// A [`KeySource`] in memory, which stores the digests of its keys. For use with an [`Identifier`](super::Identifier)
/// without rules.
///
/// ```
/// use tidegate::identity::{KeyDigest, KeyTable, KnownKey};
///
/// let mut keys = KeyTable::new();
/// keys.insert(KeyDigest::of("s3cr3t"), KnownKey::new().plan("pro"));
/// assert_eq!(keys.len(), 1);
/// ```
#[derive(Clone, Default)]
pub struct KeyTable {
    keys: HashMap<KeyDigest, KnownKey>,
}

impl KeyTable {
    /// Creates an empty table.
    pub fn new() -> KeyTable {
        KeyTable::default()
    }

    /// Inserts the key with this digest, or replaces its attributes. Returns the previous ones, or `None` if the key is
    /// new.
    pub fn insert(&mut self, key: KeyDigest, known: KnownKey) -> Option<KnownKey> {
        self.keys.insert(key, known)
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns whether the table has no keys.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

impl KeySource for KeyTable {
    fn find(&self, key: &ApiKey<'_>) -> Option<KnownKey> {
        self.keys.get(&key.digest).cloned()
    }
}

impl fmt::Debug for KeyTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyTable").field("len", &self.keys.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: HeaderName = HeaderName::from_static("x-api-key");

    fn headers(lines: &[(&'static str, &[u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, http::HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    #[test]
    fn authorization_is_read_only_if_the_key_header_is_empty() {
        let long = [b'k'; API_KEY_BYTES_MAX + 1];
        for (lines, expected) in [
            (&[][..], None),
            (&[("x-api-key", &b"k1"[..])], Some(("k1", false))),
            (&[("x-api-key", b"k1"), ("x-api-key", b"k1")], Some(("k1", false))),
            (&[("x-api-key", b"k1"), ("x-api-key", b"k2")], None),
            (&[("x-api-key", b"k1"), ("x-api-key", b"k2"), ("authorization", b"Bearer k3")], None),
            (&[("x-api-key", b"k1"), ("authorization", b"Bearer k2")], Some(("k1", false))),
            (&[("x-api-key", b""), ("authorization", b"Bearer k2")], Some(("k2", true))),
            (&[("authorization", b"bEARER   k2 ")], Some(("k2", true))),
            (&[("authorization", b"Bearer\tk2")], Some(("k2", true))),
            (&[("authorization", b"Bearer \t k2")], Some(("k2", true))),
            (&[("authorization", b"Bearer\t")], None),
            (&[("authorization", b"Bearers k2")], None),
            (&[("authorization", b"Bearer k2"), ("authorization", b"Bearer k3")], None),
            (&[("authorization", b"Basic azI6")], None),
            (&[("authorization", b"Bearer")], None),
            (&[("authorization", b"Bearer ")], None),
            (&[("authorization", b"Bearerk2")], None),
            (&[("authorization", b"k2")], None),
            (&[("x-api-key", &long)], None),
            (&[("x-api-key", &long[1..])], Some((std::str::from_utf8(&long[1..]).unwrap(), false))),
            (&[("x-api-key", b"k\xff1")], None),
            (&[("x-api-key", b"k\t1")], None),
        ] {
            let headers = headers(lines);
            let key = ApiKey::from_headers(&headers, &NAME).map(|key| (key.expose(), key.is_bearer()));
            assert_eq!(key, expected, "{headers:?}");
        }
    }

    #[test]
    fn table_finds_its_keys_and_no_others() {
        let mut table = KeyTable::new();
        assert!(table.is_empty());
        table.insert(KeyDigest::of("k1"), KnownKey::new().plan("pro"));
        table.insert(KeyDigest::of("k2"), KnownKey::new());
        let find = |key: &str| {
            let headers = headers(&[("x-api-key", key.as_bytes())]);
            table.find(&ApiKey::from_headers(&headers, &NAME).unwrap())
        };
        assert_eq!(find("k1").unwrap().plan.as_deref(), Some("pro"));
        assert_eq!(find("k2").unwrap().plan, None);
        assert_eq!(find("K1"), None);
        assert_eq!(find("k"), None);
    }

    #[test]
    fn digest_is_parsed_from_the_output_of_sha256sum() {
        let printed = "4e738ca5563c06cfd0018299933d58db1dd8bf97f6973dc99bf6cdc64b5550bd";
        assert_eq!(printed.parse(), Ok(KeyDigest::of("s3cr3t")));
        assert_eq!(format!("sha256:{}", printed.to_uppercase()).parse(), Ok(KeyDigest::of("s3cr3t")));
        for text in ["", "s3cr3t", &printed[1..], &format!("{printed}0"), &printed.replace('4', "g")] {
            let message = text.parse::<KeyDigest>().unwrap_err().to_string();
            assert!(message.contains("64 hexadecimal digits"), "{message}");
            assert!(text.is_empty() || !message.contains(text), "the refused text may be a key: {message}");
        }
    }
}
