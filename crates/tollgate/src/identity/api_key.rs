//! API keys: where a request shows one, and who knows it.
//!
//! Anybody can invent a key. If an invented key were an identity, ten thousand of them would be ten thousand
//! budgets. So a key counts only when a [`KeySource`] knows it (or when the service says that its
//! upstream refuses unknown keys by itself: [`ApiKeys::Any`]).
//!
//! **Nothing here keeps, compares or prints a key.** [`KeyTable`] holds SHA-256 digests and looks keys up
//! by digest: how long that takes depends on the digest of the guess, which tells a guesser nothing about a key that
//! is near. The digest, not the key, becomes the subject, so credentials do not reach the
//! store either.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use http::{HeaderMap, HeaderName};
use sha2::{Digest, Sha256};

use super::single_value::{self, SingleValue};

/// A longer value is no API key.
pub const API_KEY_BYTES_MAX: usize = 1024;

/// Which API keys are an identity.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum ApiKeys {
    /// Those that a [`KeySource`] knows.
    #[default]
    Known,
    /// All. For services whose upstream refuses the unknown ones itself.
    Any,
}

impl ApiKeys {
    /// The name used in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            ApiKeys::Known => "known",
            ApiKeys::Any => "any",
        }
    }
}

/// The SHA-256 digest of an API key.
///
/// Its text form is 64 hexadecimal digits, with or without `sha256:` before them: what
/// `printf %s KEY | sha256sum` prints, so that a keys file needs to hold no key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyDigest([u8; 32]);

/// A text that is no digest of a key. It does not repeat the text, which may be a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "expected the SHA-256 digest of a key: 64 hexadecimal digits, optionally after sha256:, not {bytes} bytes of something else"
)]
pub struct KeyDigestError {
    bytes: usize,
}

impl KeyDigest {
    /// The digest of `key`.
    pub fn of(key: &str) -> KeyDigest {
        KeyDigest(Sha256::digest(key.as_bytes()).into())
    }

    /// The digest's bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl FromStr for KeyDigest {
    type Err = KeyDigestError;

    fn from_str(text: &str) -> Result<KeyDigest, KeyDigestError> {
        let error = KeyDigestError { bytes: text.len() };
        let digits = text.strip_prefix("sha256:").unwrap_or(text).as_bytes();
        let mut digest = [0; 32];
        if digits.len() != 64 {
            return Err(error);
        }
        for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |at: usize| char::from(pair[at]).to_digit(16).ok_or(error);
            *byte = (digit(0)? << 4 | digit(1)?) as u8;
        }
        Ok(KeyDigest(digest))
    }
}

/// The first eight digits: enough to recognise a key by, far too few to find one.
impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "KeyDigest({a:02x}{b:02x}{c:02x}{d:02x}…)")
    }
}

/// The API key that a request shows. Whether anybody knows it is another question.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ApiKey<'h> {
    text: &'h str,
    digest: KeyDigest,
    is_bearer: bool,
}

impl<'h> ApiKey<'h> {
    /// The key in the header `name`, else the token after `Authorization: Bearer`.
    ///
    /// The first of the two that is there is the only one considered. A key that is too long, not visible ASCII, or
    /// contradicted by a second line of the same header is no key.
    ///
    /// ```
    /// use http::{HeaderMap, HeaderName};
    /// use tollgate::identity::ApiKey;
    ///
    /// let mut headers = HeaderMap::new();
    /// headers.insert("authorization", "Bearer s3cr3t".parse().unwrap());
    /// let key = ApiKey::shown(&headers, &HeaderName::from_static("x-api-key")).unwrap();
    /// assert_eq!(key.expose(), "s3cr3t");
    /// assert!(!format!("{key:?}").contains("s3cr3t"));
    /// ```
    pub fn shown(headers: &'h HeaderMap, name: &HeaderName) -> Option<ApiKey<'h>> {
        match single_value::header(headers, name) {
            SingleValue::One(value) => ApiKey::new(value, false),
            SingleValue::Contradiction => None,
            SingleValue::Nothing => ApiKey::new(bearer_token(headers)?, true),
        }
    }

    /// Every key that a request shows in any place, whoever reads only one of them: each line of the header `name`, and
    /// each bearer token.
    pub(crate) fn all_shown(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = ApiKey<'h>> {
        let lines = headers.get_all(name).into_iter().map(|line| (line.as_bytes().trim_ascii(), false));
        let tokens = headers.get_all(http::header::AUTHORIZATION).into_iter();
        let tokens = tokens.filter_map(|line| Some((token_in(line.as_bytes().trim_ascii())?, true)));
        lines.chain(tokens).filter_map(|(value, is_bearer)| ApiKey::new(value, is_bearer))
    }

    /// Whether a request can show this key.
    pub(crate) fn can_be(key: &str) -> bool {
        let key = key.as_bytes();
        let is_spaced = key.trim_ascii().len() < key.len();
        !key.is_empty() && !is_spaced && ApiKey::new(key, false).is_some()
    }

    fn new(value: &'h [u8], is_bearer: bool) -> Option<ApiKey<'h>> {
        if value.len() > API_KEY_BYTES_MAX || !value.iter().all(|byte| (b' '..=b'~').contains(byte)) {
            return None;
        }
        let text = std::str::from_utf8(value).ok()?;
        Some(ApiKey { text, digest: KeyDigest::of(text), is_bearer })
    }

    /// The key itself, for a lookup. Nothing that comes from here may be logged or stored.
    pub const fn expose(&self) -> &'h str {
        self.text
    }

    /// The key's digest.
    pub const fn digest(&self) -> KeyDigest {
        self.digest
    }

    /// Whether it came as a bearer token, which may be a JWT as well.
    pub const fn is_bearer(&self) -> bool {
        self.is_bearer
    }
}

impl fmt::Debug for ApiKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKey").field("digest", &self.digest).field("is_bearer", &self.is_bearer).finish()
    }
}

/// The token after `Authorization: Bearer`.
pub(crate) fn bearer_token(headers: &HeaderMap) -> Option<&[u8]> {
    token_in(single_value::header(headers, &http::header::AUTHORIZATION).one()?)
}

/// The token in a line of `Authorization`. Behind the scheme there is a space by the book; but servers take a tab as well, and what
/// they read must not escape us.
fn token_in(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(value.iter().position(u8::is_ascii_whitespace)?)?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer") && !token.is_empty()).then_some(token)
}

/// What is known of a key.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct KnownKey {
    /// The plan it belongs to; `None` for the default plan.
    pub plan: Option<Arc<str>>,
}

/// Who knows which API keys there are: a [`RuleSet`](crate::rules::RuleSet), a [`KeyTable`], a closure, or the answer that was fetched beforehand.
///
/// An [`Engine`](crate::engine::Engine) asks its rules alone. The others are for who calls [`Identifier::identify`](super::Identifier::identify).
///
/// Implementations must not let the time they take depend on how nearly a key matches another: look up by digest.
pub trait KeySource: Send + Sync {
    /// What is known of `key`; `None` if it is a stranger.
    fn find(&self, key: &ApiKey<'_>) -> Option<KnownKey>;
}

impl<F: Fn(&ApiKey<'_>) -> Option<KnownKey> + Send + Sync> KeySource for F {
    fn find(&self, key: &ApiKey<'_>) -> Option<KnownKey> {
        self(key)
    }
}

/// API keys in memory, as digests: for an [`Identifier`](super::Identifier) without rules.
///
/// ```
/// use tollgate::identity::{KeyDigest, KeyTable, KnownKey};
///
/// let mut keys = KeyTable::new();
/// keys.insert(KeyDigest::of("s3cr3t"), KnownKey { plan: Some("pro".into()) });
/// assert_eq!(keys.len(), 1);
/// ```
#[derive(Clone, Default)]
pub struct KeyTable {
    keys: HashMap<KeyDigest, KnownKey>,
}

impl KeyTable {
    /// A table that knows no key.
    pub fn new() -> KeyTable {
        KeyTable::default()
    }

    /// Adds a key; returns what was known of it before.
    pub fn insert(&mut self, key: KeyDigest, known: KnownKey) -> Option<KnownKey> {
        self.keys.insert(key, known)
    }

    /// How many keys it knows.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether it knows none.
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
    fn the_first_place_that_holds_a_key_is_the_only_one_asked() {
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
            let shown = ApiKey::shown(&headers, &NAME).map(|key| (key.expose(), key.is_bearer()));
            assert_eq!(shown, expected, "{headers:?}");
        }
    }

    #[test]
    fn a_table_knows_its_keys_and_no_others() {
        let mut table = KeyTable::new();
        assert!(table.is_empty());
        table.insert(KeyDigest::of("k1"), KnownKey { plan: Some("pro".into()) });
        table.insert(KeyDigest::of("k2"), KnownKey { plan: None });
        let find = |key: &str| {
            let headers = headers(&[("x-api-key", key.as_bytes())]);
            table.find(&ApiKey::shown(&headers, &NAME).unwrap())
        };
        assert_eq!(find("k1").unwrap().plan.as_deref(), Some("pro"));
        assert_eq!(find("k2").unwrap().plan, None);
        assert_eq!(find("K1"), None);
        assert_eq!(find("k"), None);
    }

    #[test]
    fn a_digest_is_what_sha256sum_prints() {
        let printed = "4e738ca5563c06cfd0018299933d58db1dd8bf97f6973dc99bf6cdc64b5550bd";
        assert_eq!(printed.parse(), Ok(KeyDigest::of("s3cr3t")));
        assert_eq!(format!("sha256:{}", printed.to_uppercase()).parse(), Ok(KeyDigest::of("s3cr3t")));
        for text in ["", "s3cr3t", &printed[1..], &format!("{printed}0"), &printed.replace('4', "g")] {
            let message = text.parse::<KeyDigest>().unwrap_err().to_string();
            assert!(message.contains("64 hexadecimal digits"), "{message}");
            assert!(text.is_empty() || !message.contains(text), "a refused text may be a key: {message}");
        }
    }
}
