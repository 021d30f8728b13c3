//! The client whose counters an operator asks for, and the subject under which a rule counts it.
//!
//! An operator knows a client by its address, by its API key or by the name of that key. Counters are stored under a
//! subject, which has the digest of a key or, with `anonymize`, pseudonyms that change at midnight. So the text of the
//! operator is read as the first of these that it is:
//!
//! ```text
//!   planted-key-of-acme     an API key, listed or known to a lookup   ─┐
//!   acme                    the name of a listed one                   │ an identity, whose subject the rule writes
//!   203.0.113.9             an address, also as ip:203.0.113.9        ─┘
//!   user:42&path:/login     a subject, as `explain --reveal` shows it    stored as it is, or with pseudonyms
//!   anything else           an API key, with `api_keys = "any"`
//! ```

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, LazyLock};

use http::HeaderMap;
use tidegate::Timestamp;
use tidegate::answer::Policy;
use tidegate::identity::{API_KEY_BYTES_MAX, ApiKeys, Identity, KeyDigest, KnownKey, Origin, Subject, SubjectKey};
use tidegate::rules::{CompiledRule, Lookups, RuleSet};

use crate::explain::is_masked_subject;

static NO_HEADERS: LazyLock<HeaderMap> = LazyLock::new(HeaderMap::new);

/// The identity of a client, as far as the text of the operator reveals it.
#[derive(Clone, Debug)]
pub(super) enum Client {
    /// An address.
    Address(IpAddr),
    /// The digest of its API key, and what the configuration or a lookup knows about the key.
    Key(KeyDigest, KnownKey),
    /// A subject that names neither an address nor a known API key alone.
    Other,
}

impl Client {
    /// Parses the text of an operator. Returns the client, and the subject under which `rule` stores it at `now`.
    ///
    /// A text of no other form is looked up as an API key, by its digest, if `lookups` have a source of keys.
    ///
    /// # Errors
    /// If the text names no client that `rule` counts. The message says what is accepted, and does not contain the
    /// text, which may be an API key.
    pub(super) async fn read(
        rules: &RuleSet,
        rule: &CompiledRule,
        lookups: Option<&Lookups>,
        text: &[u8],
        now: Timestamp,
    ) -> Result<(Client, Vec<u8>), String> {
        let unknown = || {
            "unknown client; expected an address, an API key or the name of one in the configuration, or a subject as \
             `tidegate explain --reveal` shows it, such as user:42"
                .to_owned()
        };
        let text = std::str::from_utf8(text).map_err(|_| unknown())?;
        if is_masked_subject(text) {
            return Err(
                "the subject is masked (***), so it does not identify a client; `tidegate explain --reveal` shows it \
                        in full"
                    .to_owned(),
            );
        }
        let listed =
            |digest: KeyDigest| Client::Key(digest, rules.key(&digest).map(KnownKey::from).unwrap_or_default());
        let client = match (key_named(rules, text)?, address(text)) {
            (Some(digest), _) => listed(digest),
            (None, Some(address)) => Client::Address(address),
            (None, None) if is_subject(text) => {
                let client = key_in_subject(rules, text).map_or(Client::Other, listed);
                return Ok((client, rules.identifier().stored_subject(text, now).into_bytes()));
            }
            (None, None) => match looked_up(lookups, text).await {
                Some(client) => client,
                None if can_be_any_key(rules, text) => listed(KeyDigest::of(text)),
                None => return Err(unknown()),
            },
        };
        let subject = client.subject(rules, rule, now)?.as_bytes().to_vec();
        Ok((client, subject))
    }

    /// Returns the identity of a request of this client; `None` if only its subject is known.
    pub(super) fn identity<'r>(&self, rules: &'r RuleSet, now: Timestamp) -> Option<Identity<'r>> {
        let identify = |peer| {
            let origin = Origin { peer, headers: &NO_HEADERS, path: "" };
            rules.identifier().identify(origin, rules, now)
        };
        match self {
            Client::Address(address) => Some(identify(*address)),
            Client::Key(digest, known) => {
                // The address is unknown. Nothing that is derived from this identity depends on it.
                Some(identify(Ipv4Addr::UNSPECIFIED.into()).with_api_key(*digest, known.clone()))
            }
            Client::Other => None,
        }
    }

    /// Returns the limits of `rule` for this client that a lookup assigns to its API key. Empty without such limits.
    pub(super) fn own_policies(&self, rules: &RuleSet, rule: &CompiledRule, now: Timestamp) -> Vec<Arc<Policy>> {
        let limit_set = self.identity(rules, now).and_then(|identity| rules.limit_set(&identity));
        let own = limit_set.filter(|limit_set| limit_set.own_limits().is_some());
        own.map(|limit_set| rule.policies(&limit_set).into_owned()).unwrap_or_default()
    }

    /// Returns whether the plan of this client's requests to `rule` can be found without their other headers.
    ///
    /// An API key determines it. An address does so only in a rule by `caller`, which counts by address the clients
    /// without a key or a user. A rule by `ip` counts all clients of an address together, and their plans may differ.
    pub(super) fn determines_plan(&self, rule: &CompiledRule) -> bool {
        match self {
            Client::Address(_) => rule.by().iter().all(|kind| *kind == Subject::Caller),
            Client::Key(..) => true,
            Client::Other => false,
        }
    }

    /// Returns the subject under which `rule` counts this client.
    ///
    /// # Errors
    /// If the rule counts by something that an address or an API key alone does not determine.
    fn subject(&self, rules: &RuleSet, rule: &CompiledRule, now: Timestamp) -> Result<SubjectKey, String> {
        let mut kinds = rule.by().iter();
        let is_determined = match (kinds.next(), kinds.next(), self) {
            (Some(Subject::Caller | Subject::ApiKey), None, Client::Key(..)) => true,
            // A request without an API key or a user is counted by its address.
            (Some(Subject::Caller | Subject::Ip | Subject::ApiKey | Subject::User), None, Client::Address(_)) => true,
            _ => false,
        };
        let identity = self.identity(rules, now).filter(|_| is_determined);
        identity.map(|identity| identity.subject(rule.by())).ok_or_else(|| {
            let by: Vec<String> = rule.by().iter().map(ToString::to_string).collect();
            format!(
                "the rule counts by {}; specify the whole subject, as `tidegate explain --reveal` shows it",
                by.join(" and ")
            )
        })
    }
}

/// Returns the client with the API key `text`, if a lookup knows that key.
async fn looked_up(lookups: Option<&Lookups>, text: &str) -> Option<Client> {
    let lookups = lookups.filter(|lookups| lookups.has_keys() && can_be_key(text))?;
    let digest = KeyDigest::of(text);
    lookups.find_key(&digest).await.map(|known| Client::Key(digest, known))
}

/// Returns the digest of the API key in the configuration that is `text` or has the name `text`, or `None`.
///
/// # Errors
/// If several keys have this name.
fn key_named(rules: &RuleSet, text: &str) -> Result<Option<KeyDigest>, String> {
    let digest = KeyDigest::of(text);
    if rules.key(&digest).is_some() {
        return Ok(Some(digest));
    }
    let mut named = rules.keys().filter(|(_, entry)| entry.name() == Some(text)).map(|(digest, _)| *digest);
    match (named.next(), named.count()) {
        (found, 0) => Ok(found),
        (_, more) => Err(format!("{} API keys have this name; specify one of the keys, or its subject", more + 1)),
    }
}

/// Parses an address, with or without `ip:` before it. An IPv4-mapped address becomes IPv4.
fn address(text: &str) -> Option<IpAddr> {
    text.strip_prefix("ip:").unwrap_or(text).parse::<IpAddr>().ok().map(|address| address.to_canonical())
}

/// Returns whether each part of `text` starts with a kind of subject, or `text` is `global`.
fn is_subject(text: &str) -> bool {
    let kinds = ["ip:", "api_key:", "user:", "caller:", "header:", "cookie:", "path:"];
    text == "global" || text.split('&').all(|part| kinds.iter().any(|kind| part.starts_with(kind)))
}

/// Returns the digest of the API key in a subject, if the configuration has that key.
fn key_in_subject(rules: &RuleSet, subject: &str) -> Option<KeyDigest> {
    let half = subject.split('&').find_map(|part| part.strip_prefix("api_key:#"))?;
    // A subject contains half of the digest.
    let half = (half.len() == 32).then(|| u128::from_str_radix(half, 16).ok())??.to_be_bytes();
    rules.keys().map(|(digest, _)| *digest).find(|digest| digest.as_bytes().starts_with(&half))
}

/// Returns whether `text` may be an API key that is not in the configuration and still identifies a caller.
fn can_be_any_key(rules: &RuleSet, text: &str) -> bool {
    can_be_key(text) && rules.identifier().api_keys() == ApiKeys::Any
}

fn can_be_key(text: &str) -> bool {
    (1..=API_KEY_BYTES_MAX).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}
