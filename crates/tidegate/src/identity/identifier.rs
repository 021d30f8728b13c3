//! Determines the identity behind a request, from its socket and headers to its subject.
//!
//! ```text
//!   peer, headers ──▶ Identity ──▶ address()   by the trusted-proxy walk
//!                        │         api_key()   sent, and known to the key source
//!                        │         user()      of the verified bearer token
//!                        │
//!                        ├───────▶ caller()    the first of: set by the application, api_key, user, address
//!                        └───────▶ subject(by) the bytes of the counter's key
//! ```
//!
//! Each part is computed on first use and kept. So a rule by address costs no signature check, and forged tokens cost
//! nothing if a shield rule by address refuses the requests first.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderMap, HeaderName};
use tidegate_config::{ApiKeys, KeyDigest};
use tidegate_core::{Timestamp, Wait};

use super::address::{AddressKey, AddressPrefixes};
use super::anonymize::{Anonymizer, Salt};
use super::api_key::{ApiKey, KeySource, KnownKey, bearer_token};
#[cfg(feature = "jwt")]
use super::jwt::TokenVerifier;
use super::proxies::TrustedProxies;
use super::single_value;
use super::subject::{PartLabel, PartValue, SubjectKey, SubjectWriter, anonymize_subject};
use super::subject_kind::{Subject, Subjects};
#[cfg(not(feature = "jwt"))]
use super::user::TokenVerifier;
use super::user::{TokenError, User, looks_like_token};
use crate::rules::RequestView;

/// Headers whose values are credentials. A subject contains only their digests.
const CREDENTIAL_HEADERS: [HeaderName; 3] =
    [http::header::AUTHORIZATION, http::header::PROXY_AUTHORIZATION, http::header::COOKIE];

/// The settings by which the identity of requests is determined. Created once and shared by all requests.
///
/// By default, no proxy is trusted, IPv6 clients are counted by /64, API keys are read from `X-API-Key` (else from
/// `Authorization: Bearer`) and must be known, tokens are not verified, and nothing is anonymized.
///
/// ```
/// use http::{HeaderMap, Method};
/// use tidegate::Timestamp;
/// use tidegate::identity::{Identifier, KeyDigest, KeyTable, KnownKey, Subjects};
/// use tidegate::rules::RequestView;
///
/// let mut keys = KeyTable::new();
/// keys.insert(KeyDigest::of("s3cr3t"), KnownKey::new().plan("pro"));
/// let identifier = Identifier::new();
/// let by = Subjects::parse(["caller"])?;
///
/// let subject = |headers: &HeaderMap| {
///     let request = RequestView::new(&Method::POST, "/shorten", headers);
///     identifier.identify(&request, [203, 0, 113, 9].into(), &keys, Timestamp::ZERO).subject(&by).to_string()
/// };
/// let mut headers = HeaderMap::new();
/// assert_eq!(subject(&headers), "ip:203.0.113.9");
/// headers.insert("x-api-key", "invented".parse().unwrap());
/// assert_eq!(subject(&headers), "ip:203.0.113.9");
/// headers.insert("x-api-key", "s3cr3t".parse().unwrap());
/// assert_eq!(subject(&headers), "api_key:#4e738ca5563c06cfd0018299933d58db");
/// # Ok::<(), tidegate::identity::SubjectError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Identifier {
    proxies: TrustedProxies,
    prefixes: AddressPrefixes,
    api_key_header: HeaderName,
    api_keys: ApiKeys,
    tokens: Option<TokenVerifier>,
    // Boxed to keep this struct small: most configurations have none, but every request checks for it.
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
    /// Creates an identifier with the default settings: a caller is a known API key, or else the peer address.
    pub fn new() -> Identifier {
        Identifier::default()
    }

    /// Sets the proxies that are trusted to report client addresses. Defaults to none.
    #[must_use]
    pub fn with_proxies(self, proxies: TrustedProxies) -> Identifier {
        Identifier { proxies, ..self }
    }

    /// Sets the network sizes by which clients are counted. Defaults to /32 for IPv4 and /64 for IPv6.
    #[must_use]
    pub fn with_prefixes(self, prefixes: AddressPrefixes) -> Identifier {
        Identifier { prefixes, ..self }
    }

    /// Sets the header that holds the API key. Defaults to `X-API-Key`.
    #[must_use]
    pub fn with_api_key_header(self, api_key_header: HeaderName) -> Identifier {
        Identifier { api_key_header, ..self }
    }

    /// Sets which API keys identify a caller. Defaults to [`ApiKeys::Known`].
    #[must_use]
    pub fn with_api_keys(self, api_keys: ApiKeys) -> Identifier {
        Identifier { api_keys, ..self }
    }

    /// Sets the verifier of bearer tokens, whose subjects are the users. By default tokens are ignored.
    #[cfg(feature = "jwt")]
    #[must_use]
    pub fn with_tokens(self, tokens: TokenVerifier) -> Identifier {
        Identifier { tokens: Some(tokens), ..self }
    }

    /// Sets the anonymizer, whose pseudonyms replace all values in subjects except paths. By default there is none.
    #[must_use]
    pub fn with_anonymizer(self, anonymizer: Anonymizer) -> Identifier {
        Identifier { anonymizer: Some(Box::new(anonymizer)), ..self }
    }

    /// Returns the trusted proxies.
    pub fn proxies(&self) -> &TrustedProxies {
        &self.proxies
    }

    /// Returns which API keys identify a caller.
    pub fn api_keys(&self) -> ApiKeys {
        self.api_keys
    }

    /// Returns the subject under which a request is counted at `now`, given its subject without an anonymizer.
    ///
    /// With an anonymizer, the value of each part becomes its pseudonym, except for paths. A value that is a pseudonym
    /// already stays as it is. Without an anonymizer, returns `plain`. For tools that look up the counters of a client.
    ///
    /// ```
    /// use tidegate::Timestamp;
    /// use tidegate::identity::{Anonymizer, Identifier, Rotate};
    ///
    /// let anonymizer = Anonymizer::new(b"0123456789abcdef0123456789abcdef", Rotate::Never)?;
    /// let identifier = Identifier::new().with_anonymizer(anonymizer);
    /// let stored = identifier.stored_subject("ip:203.0.113.9", Timestamp::ZERO);
    /// assert_eq!(stored, "ip:~3260c5bd2e5bb5859a41551ba1567fcc");
    /// # Ok::<(), tidegate::identity::SecretError>(())
    /// ```
    pub fn stored_subject(&self, plain: &str, now: Timestamp) -> String {
        match &self.anonymizer {
            Some(anonymizer) => anonymize_subject(plain, &anonymizer.salt(now)),
            None => plain.to_owned(),
        }
    }

    /// Returns whether bearer tokens are verified, so that requests can have users.
    pub fn verifies_tokens(&self) -> bool {
        self.tokens.is_some()
    }

    /// Returns the time from `now` until the pseudonyms in subjects change, or `None` if there are none or they never
    /// change.
    pub fn pseudonyms_change_after(&self, now: Timestamp) -> Option<Wait> {
        self.anonymizer.as_ref()?.rotates_after(now)
    }

    /// Returns the network sizes by which clients are counted.
    pub fn prefixes(&self) -> AddressPrefixes {
        self.prefixes
    }

    /// Returns the entry of the ban list for a client: one part of a subject, such as `ip:203.0.113.9`,
    /// `api_key:#4e738ca5563c06cfd0018299933d58db` or `user:42`.
    ///
    /// With an anonymizer, the value becomes a pseudonym that does not change with the date. Networks other than those
    /// by which a client is counted are not personal data, and stay as they are: do not pass them.
    pub fn ban_entry(&self, part: &str) -> String {
        match &self.anonymizer {
            Some(anonymizer) => anonymize_subject(part, anonymizer.ban_salt()),
            None => part.to_owned(),
        }
    }

    /// Returns whether identities depend on the time: tokens are verified or subjects are anonymized.
    pub(crate) fn depends_on_time(&self) -> bool {
        self.tokens.is_some() || self.anonymizer.is_some()
    }

    /// Reads the API key in these headers, known or not, from the configured header, else from `Authorization: Bearer`.
    /// `None` if there is none, or it cannot be a key: see [`ApiKey::from_headers`].
    ///
    /// For applications that have to look the key up before they call [`Identifier::identify`].
    pub fn read_api_key<'h>(&self, headers: &'h HeaderMap) -> Option<ApiKey<'h>> {
        ApiKey::from_headers(headers, &self.api_key_header)
    }

    /// Creates the identity of `request` at time `now`, with the known keys of `keys`. `peer` is the remote address of its
    /// connection.
    ///
    /// Headers are read, the [canonical path](RequestView::canonical_path) computed, keys looked up and tokens verified
    /// when a method of the identity first needs them.
    pub fn identify<'r>(
        &'r self,
        request: &'r RequestView<'r>,
        peer: IpAddr,
        keys: &'r dyn KeySource,
        now: Timestamp,
    ) -> Identity<'r> {
        // A peer that is not a trusted proxy is the client. Behind a proxy, the headers are read on first use.
        let address = if self.proxies.trusts(peer) { OnceCell::new() } else { OnceCell::from(peer.to_canonical()) };
        Identity {
            identifier: self,
            request,
            peer,
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

/// The identity of one request: its client address, API key, user and subjects. Each part is computed on first use and
/// kept.
///
/// Created by [`Identifier::identify`].
pub struct Identity<'r> {
    identifier: &'r Identifier,
    request: &'r RequestView<'r>,
    peer: IpAddr,
    keys: &'r dyn KeySource,
    now: Timestamp,
    address: OnceCell<IpAddr>,
    path: OnceCell<Cow<'r, str>>,
    api_key: OnceCell<Option<(KeyDigest, KnownKey)>>,
    token: OnceCell<Option<Result<User, TokenError>>>,
    salt: OnceCell<Salt>,
}

/// The caller of a request: the first identity that it has, in the order of the variants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Caller<'a> {
    /// The caller that the application has set: [`RequestView::with_caller`].
    Named(&'a str),
    /// The digest of an API key that identifies a caller, and the attributes of the key.
    ApiKey(KeyDigest, &'a KnownKey),
    /// A user with a verified token.
    User(&'a User),
    /// A caller without key or user, counted by its network under the `anonymous` plan.
    Address(AddressKey),
}

impl<'r> Identity<'r> {
    /// Returns the client's address: the peer, or the address that trusted proxies report.
    ///
    /// An IPv4-mapped address is returned as IPv4.
    #[inline]
    pub fn address(&self) -> IpAddr {
        *self.address.get_or_init(|| self.identifier.proxies.client_address(self.peer, self.request.headers()))
    }

    /// Returns the network by which the client is counted: its address, truncated to the configured prefix length.
    ///
    /// An IPv6 address that contains an IPv4 address (mapped, `64:ff9b::/96`, `2002::/16`) is counted as the IPv4
    /// address.
    #[inline]
    pub fn address_key(&self) -> AddressKey {
        self.identifier.prefixes.key(self.address())
    }

    /// Returns the digest and the attributes of the request's API key, or `None` if it has none that identifies a
    /// caller. The key source is called at most once, on first use.
    ///
    /// With [`ApiKeys::Known`] only keys in the key source do. With [`ApiKeys::Any`] every key does, except bearer
    /// tokens that look like a JWT while tokens are verified.
    pub fn api_key(&self) -> Option<(KeyDigest, &KnownKey)> {
        let found = self.api_key.get_or_init(|| {
            let sent = self.identifier.read_api_key(self.request.headers())?;
            let known = match self.keys.find(&sent) {
                Some(known) => known,
                None if self.is_any_key(&sent) => KnownKey::default(),
                None => return None,
            };
            Some((sent.digest(), known))
        });
        found.as_ref().map(|(digest, known)| (*digest, known))
    }

    /// Returns the groups of the caller: those of its API key. Empty without a known key.
    pub fn groups(&self) -> &[Arc<str>] {
        self.api_key().map_or(&[], |(_, known)| &known.groups)
    }

    /// Returns the digest of the request's API key if the key source does not know it, so that the caller can look it
    /// up elsewhere. Pass the result to [`with_api_key`](Identity::with_api_key).
    ///
    /// `None` if the request has no key or a known one, if the key was set by `with_api_key`, or if the key is a bearer
    /// token that looks like a JWT while tokens are verified.
    pub fn unknown_api_key(&self) -> Option<KeyDigest> {
        if self.api_key.get().is_some_and(Option::is_some) {
            return None;
        }
        let sent = self.identifier.read_api_key(self.request.headers())?;
        let known = self.keys.find(&sent);
        if known.is_none() {
            return (!self.may_be_token(&sent)).then(|| sent.digest());
        }
        // Kept, so that the key is not hashed again.
        let _ = self.api_key.set(known.map(|known| (sent.digest(), known)));
        None
    }

    /// Sets the API key of the request, which replaces the one in its headers. The key source is not asked.
    ///
    /// For keys that were looked up elsewhere, and for tools that know only the digest of a key.
    #[must_use]
    pub fn with_api_key(self, digest: KeyDigest, known: KnownKey) -> Identity<'r> {
        Identity { api_key: OnceCell::from(Some((digest, known))), ..self }
    }

    /// Returns the attributes of the API key, or `None` if it was neither set nor found before. Does not read the
    /// headers.
    pub(crate) fn determined_api_key(&self) -> Option<&KnownKey> {
        self.api_key.get().and_then(Option::as_ref).map(|(_, known)| known)
    }

    /// Returns the digests of all API keys in the request, known or not: one per line of the key header and per bearer
    /// token, and the one that [`with_api_key`](Identity::with_api_key) has set.
    pub(crate) fn sent_key_digests(&self) -> impl Iterator<Item = KeyDigest> + '_ {
        let set = self.api_key.get().and_then(Option::as_ref).map(|(digest, _)| *digest);
        let sent = ApiKey::all_from_headers(self.request.headers(), &self.identifier.api_key_header);
        sent.map(|key| key.digest()).chain(set)
    }

    /// Sets the verified user of the request, which replaces that of its token. For tools that know only the id.
    #[must_use]
    pub fn with_user(self, user: User) -> Identity<'r> {
        Identity { token: OnceCell::from(Some(Ok(user))), ..self }
    }

    /// Returns the entries of a ban list for the network by which the client is counted: as it is, and with an
    /// anonymizer also as a pseudonym.
    pub(crate) fn address_entries(&self) -> impl Iterator<Item = SubjectKey> + '_ {
        self.ban_entries(|writer| writer.address(self.address_key()))
    }

    /// Returns the entries of a ban list for each API key in the request; see
    /// [`sent_key_digests`](Identity::sent_key_digests).
    pub(crate) fn key_entries(&self) -> impl Iterator<Item = SubjectKey> + '_ {
        self.sent_key_digests().flat_map(|digest| {
            self.ban_entries(move |writer| writer.part(API_KEY, PartValue::Digest(digest.as_bytes())))
        })
    }

    /// Returns the entries of a ban list for the verified user. Empty if there is none.
    pub(crate) fn user_entries(&self) -> impl Iterator<Item = SubjectKey> + '_ {
        let user = self.user();
        user.into_iter()
            .flat_map(|user| self.ban_entries(|writer| writer.part(USER, PartValue::Plain(user.subject.as_bytes()))))
    }

    /// Returns the text that `write` writes, as it is and, with an anonymizer, also as a pseudonym with the salt of bans.
    fn ban_entries(&self, write: impl Fn(&mut SubjectWriter<'_>)) -> impl Iterator<Item = SubjectKey> {
        let salted = self.identifier.anonymizer.as_ref().map(|anonymizer| Some(anonymizer.ban_salt()));
        std::iter::once(None).chain(salted).map(move |salt| {
            let mut entry = SubjectKey::empty();
            write(&mut SubjectWriter::new(&mut entry, salt));
            entry
        })
    }

    /// Returns whether a key that the key source does not know identifies a caller: only with [`ApiKeys::Any`].
    ///
    /// While tokens are verified, a bearer token that may be a JWT does not: it changes with every login, whereas its
    /// user does not.
    fn is_any_key(&self, key: &ApiKey<'_>) -> bool {
        self.identifier.api_keys == ApiKeys::Any && !self.may_be_token(key)
    }

    /// Returns whether a key is a bearer token that may be a JWT, while tokens are verified.
    fn may_be_token(&self, key: &ApiKey<'_>) -> bool {
        self.identifier.tokens.is_some() && key.is_bearer() && looks_like_token(key.expose().as_bytes())
    }

    /// Returns the user of the bearer token, or `None` if there is no valid token or no verifier is set.
    pub fn user(&self) -> Option<&User> {
        self.token().and_then(|verified| verified.ok())
    }

    /// Returns the user of the bearer token, or the reason why the token was rejected.
    ///
    /// Returns `None` if no verifier is set, or if the request has no bearer token in three parts, as a JWT has.
    pub fn token(&self) -> Option<Result<&User, TokenError>> {
        let verified = self.token.get_or_init(|| {
            let verifier = self.identifier.tokens.as_ref()?;
            let token = bearer_token(self.request.headers()).filter(|token| looks_like_token(token))?;
            Some(verifier.verify(token, self.now))
        });
        verified.as_ref().map(|verified| verified.as_ref().map_err(|error| *error))
    }

    /// Returns the caller that the application has set with [`RequestView::with_caller`], or `None`.
    pub(crate) fn named_caller(&self) -> Option<&'r str> {
        self.request.caller()
    }

    /// Returns the caller: the one that the application has set, else the API key, the verified user or the client's
    /// network.
    pub fn caller(&self) -> Caller<'_> {
        if let Some(name) = self.named_caller() {
            Caller::Named(name)
        } else if let Some((digest, known)) = self.api_key() {
            Caller::ApiKey(digest, known)
        } else if let Some(user) = self.user() {
            Caller::User(user)
        } else {
            Caller::Address(self.address_key())
        }
    }

    /// Returns the value of a header if the peer is a trusted proxy.
    ///
    /// The proxy is responsible for the value: it has to set the header, or remove it from requests of clients. Returns
    /// `None` if the peer is not trusted, or if the header is absent, empty, or repeated with different values.
    pub fn trusted_header(&self, name: &HeaderName) -> Option<&'r [u8]> {
        if !self.identifier.proxies.trusts(self.peer) {
            return None;
        }
        single_value::header(self.request.headers(), name).one()
    }

    /// Returns the value of a header by which a rule counts, or `None` if it is absent, empty, or repeated with
    /// different values.
    ///
    /// If trusted proxies are configured, also returns `None` unless the peer is one of them: a client that connects
    /// directly could choose the value.
    fn countable_header(&self, name: &HeaderName) -> Option<&'r [u8]> {
        if self.identifier.proxies.networks().is_empty() {
            single_value::header(self.request.headers(), name).one()
        } else {
            self.trusted_header(name)
        }
    }

    /// Returns the subject of the request, which identifies its counter: one part for each kind of `by`, in order.
    ///
    /// The part for `caller` has the kind of identity that the caller has: `caller`, `api_key`, `user` or `ip`. Another
    /// part that the request does not have is replaced by the client's network, marked with `!`. Credentials and long
    /// values are replaced with digests. With an anonymizer, all values except paths are replaced with pseudonyms.
    pub fn subject(&self, by: &Subjects) -> SubjectKey {
        let mut subject = SubjectKey::empty();
        self.write_subject(by, &mut subject);
        subject
    }

    /// Writes the subject of the request into `subject`, which must be empty: otherwise the parts are appended to it.
    /// See [`Identity::subject`].
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
                Caller::Named(name) => writer.part(CALLER, PartValue::Plain(name.as_bytes())),
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
                let label = PartLabel { kind: "header", name: Some(name.as_str()) };
                match self.countable_header(name) {
                    Some(value) if self.is_credential(name) => writer.part(label, PartValue::Secret(value)),
                    Some(value) => writer.part(label, PartValue::Plain(value)),
                    None => self.write_missing(label, writer),
                }
            }
            Subject::Cookie(name) => {
                let label = PartLabel { kind: "cookie", name: Some(name) };
                match single_value::cookie(self.request.headers(), name).one() {
                    Some(value) => writer.part(label, PartValue::Secret(value)),
                    None => self.write_missing(label, writer),
                }
            }
            Subject::Path => match self.path() {
                "" => self.write_missing(PATH, writer),
                path => writer.part(PATH, PartValue::Public(path.as_bytes())),
            },
            Subject::Global => writer.part_without_value("global"),
        }
    }

    /// Returns the canonical path, or an empty string if it is ambiguous. Computes it once.
    fn path(&self) -> &str {
        self.path.get_or_init(|| self.request.canonical_path())
    }

    /// Writes the substitute for a part that the request does not have: the client's network, marked with `!`.
    fn write_missing(&self, label: PartLabel<'_>, writer: &mut SubjectWriter<'_>) {
        writer.part(label, PartValue::Missing(self.address_key()));
    }

    fn is_credential(&self, name: &HeaderName) -> bool {
        CREDENTIAL_HEADERS.contains(name) || *name == self.identifier.api_key_header
    }
}

const CALLER: PartLabel<'static> = PartLabel { kind: "caller", name: None };
const API_KEY: PartLabel<'static> = PartLabel { kind: "api_key", name: None };
const USER: PartLabel<'static> = PartLabel { kind: "user", name: None };
const PATH: PartLabel<'static> = PartLabel { kind: "path", name: None };

impl fmt::Debug for Identity<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("peer", &self.peer).field("now", &self.now).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
