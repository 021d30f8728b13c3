//! Who makes a request: from socket and headers to a subject.
//!
//! ```text
//!   peer, headers ──▶ Identity ──▶ address()   the trusted-proxy walk
//!                        │         api_key()   shown, and known to the key source
//!                        │         user()      the bearer token, verified
//!                        │
//!                        ├───────▶ caller()    the first of: api_key, user, address
//!                        └───────▶ subject(by) bytes to count on
//! ```
//!
//! Each answer is worked out when it is first asked for, and kept. A rule by address then costs no signature
//! check, and a flood of forged tokens costs nothing where a shield rule by address has refused it before.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt;
use std::net::IpAddr;

use http::{HeaderMap, HeaderName};
use tollgate_core::Timestamp;

use super::address::{AddressKey, AddressPrefixes};
use super::anonymize::{Anonymizer, Salt};
use super::api_key::{ApiKey, ApiKeys, KeyDigest, KeySource, KnownKey, bearer_token};
#[cfg(feature = "jwt")]
use super::jwt::TokenVerifier;
use super::proxies::TrustedProxies;
use super::single_value;
use super::subject::{PartKind, PartValue, SubjectKey, SubjectWriter};
use super::subject_kind::{Subject, Subjects};
#[cfg(not(feature = "jwt"))]
use super::user::TokenVerifier;
use super::user::{TokenError, User, looks_like_token};
use crate::rules::RequestView;

/// Headers whose values are credentials, and so are never written into a subject.
const CREDENTIAL_HEADERS: [HeaderName; 3] =
    [http::header::AUTHORIZATION, http::header::PROXY_AUTHORIZATION, http::header::COOKIE];

/// How requests are identified. Made once, from configuration; shared by all requests.
///
/// Unless said: no proxy is trusted, IPv6 is counted by /64, API keys are read from `X-API-Key` and must be
/// known, tokens are nobody's, and nothing is anonymized.
///
/// ```
/// use http::HeaderMap;
/// use tollgate::Timestamp;
/// use tollgate::identity::{Identifier, KeyDigest, KeyTable, KnownKey, Origin, Subjects};
///
/// let mut keys = KeyTable::new();
/// keys.insert(KeyDigest::of("s3cr3t"), KnownKey { plan: Some("pro".into()) });
/// let identifier = Identifier::new();
/// let by = Subjects::parse(["caller"])?;
///
/// let subject = |headers: &HeaderMap| {
///     let origin = Origin { peer: "203.0.113.9".parse().unwrap(), headers, path: "/shorten" };
///     identifier.identify(origin, &keys, Timestamp::ZERO).subject(&by).to_string()
/// };
/// let mut headers = HeaderMap::new();
/// assert_eq!(subject(&headers), "ip:203.0.113.9");
/// headers.insert("x-api-key", "invented".parse().unwrap());
/// assert_eq!(subject(&headers), "ip:203.0.113.9");
/// headers.insert("x-api-key", "s3cr3t".parse().unwrap());
/// assert_eq!(subject(&headers), "api_key:#4e738ca5563c06cfd0018299933d58db");
/// # Ok::<(), tollgate::identity::SubjectError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Identifier {
    proxies: TrustedProxies,
    prefixes: AddressPrefixes,
    api_key_header: HeaderName,
    api_keys: ApiKeys,
    tokens: Option<TokenVerifier>,
    // Boxed, so that the rest stands together: most do without, and everybody looks whether it is there.
    anonymizer: Option<Box<Anonymizer>>,
}

impl Default for Identifier {
    fn default() -> Self {
        Identifier {
            proxies: TrustedProxies::default(),
            prefixes: AddressPrefixes::default(),
            api_key_header: HeaderName::from_static("x-api-key"),
            api_keys: ApiKeys::default(),
            tokens: None,
            anonymizer: None,
        }
    }
}

impl Identifier {
    /// Identifies by peer address and known API keys alone.
    pub fn new() -> Identifier {
        Identifier::default()
    }

    /// Believes these proxies about addresses.
    #[must_use]
    pub fn with_proxies(self, proxies: TrustedProxies) -> Identifier {
        Identifier { proxies, ..self }
    }

    /// Counts networks of these sizes.
    #[must_use]
    pub fn with_prefixes(self, prefixes: AddressPrefixes) -> Identifier {
        Identifier { prefixes, ..self }
    }

    /// Reads the API key from this header.
    #[must_use]
    pub fn with_api_key_header(self, api_key_header: HeaderName) -> Identifier {
        Identifier { api_key_header, ..self }
    }

    /// Says which API keys are an identity.
    #[must_use]
    pub fn with_api_keys(self, api_keys: ApiKeys) -> Identifier {
        Identifier { api_keys, ..self }
    }

    /// Recognises users by tokens.
    #[cfg(feature = "jwt")]
    #[must_use]
    pub fn with_tokens(self, tokens: TokenVerifier) -> Identifier {
        Identifier { tokens: Some(tokens), ..self }
    }

    /// Writes pseudonyms into subjects.
    #[must_use]
    pub fn with_anonymizer(self, anonymizer: Anonymizer) -> Identifier {
        Identifier { anonymizer: Some(Box::new(anonymizer)), ..self }
    }

    /// The proxies that are believed.
    pub fn proxies(&self) -> &TrustedProxies {
        &self.proxies
    }

    /// Whether an identity depends on the time: tokens end, and pseudonyms change.
    pub(crate) fn tells_time(&self) -> bool {
        self.tokens.is_some() || self.anonymizer.is_some()
    }

    /// The API key that a request shows, known or not. For key sources that must be asked beforehand.
    pub fn shown_key<'h>(&self, headers: &'h HeaderMap) -> Option<ApiKey<'h>> {
        ApiKey::shown(headers, &self.api_key_header)
    }

    /// Who makes the request that came from `origin` at `now`.
    pub fn identify<'r>(&'r self, origin: Origin<'r>, keys: &'r dyn KeySource, now: Timestamp) -> Identity<'r> {
        let path = OnceCell::from(Cow::Borrowed(origin.path));
        Identity { path, ..self.identify_request(None, origin, keys, now) }
    }

    /// Identifies a request whose [canonical path](RequestView::canonical_path) is worked out when a subject first needs it.
    pub(crate) fn identify_request<'r>(
        &'r self,
        request: Option<&'r RequestView<'r>>,
        origin: Origin<'r>,
        keys: &'r dyn KeySource,
        now: Timestamp,
    ) -> Identity<'r> {
        // Whoever is not believed about addresses is the client itself; else there are headers to be read, if anybody asks.
        let address = match self.proxies.trusts(origin.peer) {
            false => OnceCell::from(origin.peer.to_canonical()),
            true => OnceCell::new(),
        };
        Identity {
            identifier: self,
            origin,
            request,
            keys,
            now,
            address,
            path: OnceCell::new(),
            api_key: OnceCell::new(),
            token: OnceCell::new(),
            salt: OnceCell::new(),
        }
    }
}

/// What a request tells about where it comes from.
#[derive(Clone, Copy)]
pub struct Origin<'r> {
    /// The other end of the socket.
    pub peer: IpAddr,
    /// All headers.
    pub headers: &'r HeaderMap,
    /// The path, in the one spelling under which it is counted:
    /// [`canonical_path`](crate::rules::RequestView::canonical_path). Empty if nobody can say which it is; the address
    /// stands in then.
    pub path: &'r str,
}

/// Headers hold credentials, and so are not printed.
impl fmt::Debug for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Origin").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Who makes a request. Each part is worked out when it is first asked for.
pub struct Identity<'r> {
    identifier: &'r Identifier,
    origin: Origin<'r>,
    /// Where the path comes from that is not worked out yet.
    request: Option<&'r RequestView<'r>>,
    keys: &'r dyn KeySource,
    now: Timestamp,
    address: OnceCell<IpAddr>,
    path: OnceCell<Cow<'r, str>>,
    api_key: OnceCell<Option<(KeyDigest, KnownKey)>>,
    token: OnceCell<Option<Result<User, TokenError>>>,
    salt: OnceCell<Salt>,
}

/// The identity that stands for a request as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Caller<'a> {
    /// A known API key.
    ApiKey(KeyDigest, &'a KnownKey),
    /// A verified user.
    User(&'a User),
    /// Nobody we know: counted by address, under the anonymous plan.
    Address(AddressKey),
}

impl<'r> Identity<'r> {
    /// The client's address.
    #[inline]
    pub fn address(&self) -> IpAddr {
        *self.address.get_or_init(|| self.identifier.proxies.client_address(self.origin.peer, self.origin.headers))
    }

    /// The network of the client's address that is counted.
    #[inline]
    pub fn address_key(&self) -> AddressKey {
        self.identifier.prefixes.key(self.address())
    }

    /// The API key, if it is an identity.
    pub fn api_key(&self) -> Option<(KeyDigest, &KnownKey)> {
        let found = self.api_key.get_or_init(|| {
            let shown = self.identifier.shown_key(self.origin.headers)?;
            let known = match self.keys.find(&shown) {
                Some(known) => known,
                None if self.is_any_key(&shown) => KnownKey::default(),
                None => return None,
            };
            Some((shown.digest(), known))
        });
        found.as_ref().map(|(digest, known)| (*digest, known))
    }

    /// The digest of every key that the request shows, known or not, in whichever place.
    pub(crate) fn shown_keys(&self) -> impl Iterator<Item = KeyDigest> + '_ {
        ApiKey::all_shown(self.origin.headers, &self.identifier.api_key_header).map(|key| key.digest())
    }

    /// Whether a key that nobody knows is an identity. A bearer token that may be a JWT is not, where tokens are
    /// verified: it changes with every login, and the user in it does not.
    fn is_any_key(&self, key: &ApiKey<'_>) -> bool {
        let may_be_token = || key.is_bearer() && looks_like_token(key.expose().as_bytes());
        self.identifier.api_keys == ApiKeys::Any && !(self.identifier.tokens.is_some() && may_be_token())
    }

    /// The verified user.
    pub fn user(&self) -> Option<&User> {
        self.token().and_then(|verified| verified.ok())
    }

    /// What came of the bearer token, if tokens are verified and there is one that may be a JWT.
    pub fn token(&self) -> Option<Result<&User, TokenError>> {
        let verified = self.token.get_or_init(|| {
            let verifier = self.identifier.tokens.as_ref()?;
            let token = bearer_token(self.origin.headers).filter(|token| looks_like_token(token))?;
            Some(verifier.verify(token, self.now))
        });
        verified.as_ref().map(|verified| verified.as_ref().map_err(|error| *error))
    }

    /// The known API key, else the verified user, else the address.
    pub fn caller(&self) -> Caller<'_> {
        if let Some((digest, known)) = self.api_key() {
            Caller::ApiKey(digest, known)
        } else if let Some(user) = self.user() {
            Caller::User(user)
        } else {
            Caller::Address(self.address_key())
        }
    }

    /// What a header says, if the peer is a trusted proxy, which is then responsible for what stands in it.
    pub fn trusted_header(&self, name: &HeaderName) -> Option<&'r [u8]> {
        if !self.identifier.proxies.trusts(self.origin.peer) {
            return None;
        }
        single_value::header(self.origin.headers, name).one()
    }

    /// What a header says to be counted by. Where proxies are trusted, a request that none of them sent says what it likes.
    fn believed_header(&self, name: &HeaderName) -> Option<&'r [u8]> {
        match self.identifier.proxies.networks().is_empty() {
            true => single_value::header(self.origin.headers, name).one(),
            false => self.trusted_header(name),
        }
    }

    /// The bytes to count on.
    pub fn subject(&self, by: &Subjects) -> SubjectKey {
        let mut subject = SubjectKey::unwritten();
        self.write_subject(by, &mut subject);
        subject
    }

    /// The same, written where it is to be.
    pub(crate) fn write_subject(&self, by: &Subjects, subject: &mut SubjectKey) {
        let salt = self.identifier.anonymizer.as_ref().map(|a| self.salt.get_or_init(|| a.salt(self.now)));
        let mut writer = SubjectWriter::new(subject, salt);
        for kind in by.iter() {
            self.write_part(kind, &mut writer);
        }
    }

    fn write_part(&self, kind: &Subject, writer: &mut SubjectWriter<'_>) {
        match kind {
            Subject::Caller => match self.caller() {
                Caller::ApiKey(digest, _) => writer.part(API_KEY, PartValue::Digest(digest.as_bytes())),
                Caller::User(user) => writer.part(USER, PartValue::Plain(user.subject.as_bytes())),
                Caller::Address(address) => writer.address(address),
            },
            Subject::Ip => writer.address(self.address_key()),
            Subject::ApiKey => match self.api_key() {
                Some((digest, _)) => writer.part(API_KEY, PartValue::Digest(digest.as_bytes())),
                None => self.write_missing(API_KEY, writer),
            },
            Subject::User => match self.user() {
                Some(user) => writer.part(USER, PartValue::Plain(user.subject.as_bytes())),
                None => self.write_missing(USER, writer),
            },
            Subject::Header(name) => {
                let kind = PartKind { word: "header", name: Some(name.as_str()) };
                match self.believed_header(name) {
                    Some(value) if self.is_credential(name) => writer.part(kind, PartValue::Secret(value)),
                    Some(value) => writer.part(kind, PartValue::Plain(value)),
                    None => self.write_missing(kind, writer),
                }
            }
            Subject::Cookie(name) => {
                let kind = PartKind { word: "cookie", name: Some(name) };
                match single_value::cookie(self.origin.headers, name).one() {
                    Some(value) => writer.part(kind, PartValue::Secret(value)),
                    None => self.write_missing(kind, writer),
                }
            }
            Subject::Path => match self.path() {
                "" => self.write_missing(PATH, writer),
                path => writer.part(PATH, PartValue::Public(path.as_bytes())),
            },
            Subject::Global => writer.word("global"),
        }
    }

    fn path(&self) -> &str {
        self.path.get_or_init(|| self.request.map(RequestView::canonical_path).unwrap_or_default())
    }

    fn write_missing(&self, kind: PartKind<'_>, writer: &mut SubjectWriter<'_>) {
        writer.part(kind, PartValue::Missing(self.address_key()));
    }

    fn is_credential(&self, name: &HeaderName) -> bool {
        CREDENTIAL_HEADERS.contains(name) || *name == self.identifier.api_key_header
    }
}

const API_KEY: PartKind<'static> = PartKind { word: "api_key", name: None };
const USER: PartKind<'static> = PartKind { word: "user", name: None };
const PATH: PartKind<'static> = PartKind { word: "path", name: None };

impl fmt::Debug for Identity<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("origin", &self.origin).field("now", &self.now).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
