//! The client that an operator names, and the subject under which a rule counts it.
//!
//! An operator knows a client by its address, by its API key or by the name of that key. Counters are stored under a
//! subject, which has the digest of a key or, with `anonymize`, pseudonyms that change at midnight. So all commands and
//! the admin API read the text of the operator as the first of these that it is:
//!
//! ```text
//!   planted-key-of-acme     an API key, listed or known to a lookup   ─┐
//!   acme                    the name of one                            │
//!   203.0.113.9             an address, also as ip:203.0.113.9         ├ an identity, whose subject the rule writes
//!   2001:db8::/48           a network, also as ip:2001:db8::/48        │
//!   user:42                 a user                                    ─┘
//!   user:42&path:/login     a subject, as `explain --reveal` shows it    stored as it is, or with pseudonyms
//!   anything else           an API key, with `api_keys = "any"`
//! ```

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use http::{HeaderMap, Method};
use percent_encoding::percent_decode_str;
use tidegate::answer::Policy;
use tidegate::config::Loaded;
use tidegate::identity::{
    API_KEY_BYTES_MAX, AddressPrefixes, ApiKeys, Identifier, KeyDigest, KeyTable, KnownKey, Networks, Subject,
    Subjects, User,
};
use tidegate::rules::{ClientBans, CompiledRule, Facts, Lookups, MatchedBan, RequestView, RuleSet};
use tidegate::{Limiter, MemoryStore, StoreError, Timestamp};

use crate::explain::{groups_text, is_masked_subject, subject_parts};

/// The rules by which the client of an operator, and its counters and bans, are found.
#[derive(Clone, Copy)]
pub struct OperatorRules<'r> {
    /// The configuration with the rules.
    pub loaded: &'r Loaded,
    /// The sources of plans and API keys that the configuration does not determine.
    pub lookups: &'r Lookups,
    /// The store with the counters of shield rules, in the process that decides the requests. `None` in other
    /// processes, which cannot read these counters.
    pub shield: Option<&'r MemoryStore>,
}

/// A client, as far as the text of the operator identifies it.
#[derive(Clone, Debug)]
pub(crate) enum Client {
    /// An address.
    Address(IpAddr),
    /// A network with more addresses than are counted together. The set has one element.
    Network(Networks),
    /// The digest of its API key, and what the configuration or a lookup knows about the key.
    Key(KeyDigest, KnownKey),
    /// The id of a user.
    User(String),
    /// A whole subject that is none of the others.
    Subject(String),
}

impl Client {
    /// Parses the text of an operator.
    ///
    /// A text of no other form is looked up as an API key, by its digest, and as the name of one, if `lookups` have a
    /// source of keys.
    ///
    /// # Errors
    /// If the text names no client. The message says what is accepted, and does not contain the text, which may be an
    /// API key.
    pub(crate) async fn parse(rules: &RuleSet, lookups: &Lookups, text: &[u8]) -> Result<Client, String> {
        let unknown = || {
            "unknown client; expected an address, a network, an API key or the name of one, user:ID, or a subject as \
             `tidegate explain --reveal` shows it"
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
        let listed = |digest: KeyDigest| Client::Key(digest, rules.key(&digest).cloned().unwrap_or_default());
        if let Some(digest) = key_named(rules, text)? {
            return Ok(listed(digest));
        }
        if let Some(client) = parse_without_rules(text, rules.identifier().prefixes()) {
            return Ok(client);
        }
        if is_subject(text) {
            return Ok(key_in_subject(rules, text).map_or(Client::Subject(text.to_owned()), listed));
        }
        match looked_up(lookups, text).await? {
            Some(client) => Ok(client),
            None if can_be_any_key(rules, text) => Ok(listed(KeyDigest::of(text))),
            None => Err(unknown()),
        }
    }

    /// Returns the facts about this client; `None` if only its subject or a network is known. `bans` are as for
    /// [`Facts::of_client`].
    pub(crate) fn facts<'r>(
        &self,
        rules: &'r RuleSet,
        bans: Option<Arc<ClientBans>>,
        now: Timestamp,
    ) -> Option<Facts<'r>> {
        let is_identified = !matches!(self, Client::Network(_) | Client::Subject(_));
        is_identified.then(|| self.identify(Facts::of_client(rules, self.address(), bans, now)))
    }

    /// Returns the address of this client, or 0.0.0.0 if it is unknown. Nothing that is derived from the identity of an
    /// API key or a user depends on the address.
    pub(crate) fn address(&self) -> IpAddr {
        if let Client::Address(address) = self { *address } else { Ipv4Addr::UNSPECIFIED.into() }
    }

    /// Sets the API key or the user of this client in `facts`, which must be those of its [address](Client::address).
    pub(crate) fn identify<'r>(&self, facts: Facts<'r>) -> Facts<'r> {
        match self {
            Client::Key(digest, known) => facts.with_api_key(*digest, known.clone()),
            Client::User(id) => facts.with_user(user(id)),
            Client::Address(_) | Client::Network(_) | Client::Subject(_) => facts,
        }
    }

    /// Returns `text` of the ban that refuses this client: one in the configuration, else one at run time in the store of
    /// `limiter`, which is read only if necessary. `None` if there is none, or if only a subject or a network is known.
    ///
    /// # Errors
    /// If the store fails.
    pub(crate) async fn ban(
        &self,
        rules: &RuleSet,
        limiter: &Limiter,
        now: Timestamp,
        text: impl Fn(MatchedBan<'_>) -> String,
    ) -> Result<Option<String>, StoreError> {
        let ban = |bans| self.facts(rules, bans, now)?.ban().map(&text);
        if let Some(configured) = ban(None) {
            return Ok(Some(configured));
        }
        Ok(ban(Some(Arc::new(ClientBans::new(&limiter.listed_bans().await?, now)))))
    }

    /// Returns the limits of `rule` for this client that a lookup assigns to its API key. Empty without such limits.
    pub(crate) fn own_policies(&self, rules: &RuleSet, rule: &CompiledRule, now: Timestamp) -> Vec<Arc<Policy>> {
        let plan = self.facts(rules, None, now).and_then(|facts| facts.assigned_plan());
        let own = plan.filter(|plan| plan.limit_set.own_limits().is_some());
        own.map(|plan| rule.policies(&plan.limit_set).into_owned()).unwrap_or_default()
    }

    /// Returns whether the plan of this client's requests to `rule` can be found without their other headers.
    ///
    /// An API key determines it. An address does so only in a rule by `caller`, which counts by address the clients
    /// without a key or a user. A rule by `ip` counts all clients of an address together, and their plans may differ.
    pub(crate) fn determines_plan(&self, rule: &CompiledRule) -> bool {
        match self {
            Client::Address(_) => rule.by().iter().all(|kind| *kind == Subject::Caller),
            Client::Key(..) => true,
            Client::Network(_) | Client::User(_) | Client::Subject(_) => false,
        }
    }

    /// Returns whether requests of this client can be from a caller in a group of `rule`. `true` for a rule without
    /// groups.
    ///
    /// Only a known key has groups. A rule by `caller` counts by address or user only the requests without one.
    fn may_be_in_groups_of(&self, rule: &CompiledRule) -> bool {
        match self {
            Client::Key(_, known) => rule.applies_to_groups(&known.groups),
            Client::Address(_) | Client::User(_) if rule.by().iter().all(|kind| *kind == Subject::Caller) => {
                rule.applies_to_groups(&[])
            }
            Client::Address(_) | Client::User(_) | Client::Network(_) | Client::Subject(_) => true,
        }
    }

    /// Returns the part of a subject that names this client, such as `ip:203.0.113.9`, before it is anonymized; or the
    /// whole subject. `None` for a network.
    pub(crate) fn part(&self, prefixes: AddressPrefixes) -> Option<String> {
        match self {
            Client::Address(address) => Some(format!("ip:{}", prefixes.key(*address))),
            Client::Key(digest, _) => Some(key_part(digest)),
            Client::User(id) => Some(user_part(id)),
            Client::Subject(text) => Some(text.clone()),
            Client::Network(_) => None,
        }
    }

    /// Returns the subject under which `rule` counts this client at `now`.
    ///
    /// # Errors
    /// If the rule counts by something that this client alone does not determine, or that it does not have.
    pub(crate) fn subject(&self, rules: &RuleSet, rule: &CompiledRule, now: Timestamp) -> Result<Vec<u8>, String> {
        if let Client::Network(_) = self {
            return Err("a network has no counter of its own; specify an address in it".to_owned());
        }
        if let Client::Subject(text) = self {
            return if has_kinds(text, rule.by()) {
                Ok(rules.identifier().stored_subject(text, now).into_bytes())
            } else {
                Err(format!("the rule counts by {}, not by this subject", by(rule)))
            };
        }
        if !self.may_be_in_groups_of(rule) {
            return Err(format!("the rule counts only callers in {}", groups_text(rule.groups())));
        }
        let mut kinds = rule.by().iter();
        let is_determined = match (kinds.next(), kinds.next(), self) {
            (Some(Subject::Caller | Subject::ApiKey), None, Client::Key(..)) => true,
            (Some(Subject::Caller | Subject::User), None, Client::User(_)) => true,
            // A request without an API key or a user is counted by its address.
            (Some(Subject::Caller | Subject::Ip | Subject::ApiKey | Subject::User), None, Client::Address(_)) => true,
            _ => false,
        };
        let facts = self.facts(rules, None, now).filter(|_| is_determined);
        facts.map(|facts| facts.identity().subject(rule.by()).as_bytes().to_vec()).ok_or_else(|| {
            format!(
                "the rule counts by {}; specify the whole subject, as `tidegate explain --reveal` shows it",
                by(rule)
            )
        })
    }
}

/// Returns the address, the network or the user that a text names without rules; `None` if it names none.
///
/// `prefixes` are those by which addresses are counted: a network that has no more addresses than are counted together
/// is the client that is counted. An IPv4-mapped address becomes IPv4.
pub(crate) fn parse_without_rules(text: &str, prefixes: AddressPrefixes) -> Option<Client> {
    if let Some(id) = text.strip_prefix("user:") {
        // A pseudonym, a digest and an address in place of a user are not ids.
        let is_id = !id.is_empty() && !id.contains('&') && !id.starts_with(['~', '#', '!']);
        return is_id.then(|| Client::User(percent_decode_str(id).decode_utf8_lossy().into_owned()));
    }
    let network = Networks::parse([text.strip_prefix("ip:").unwrap_or(text)]).ok()?;
    let (address, bits) = network.iter().next().map(|network| (network.addr(), network.prefix_len()))?;
    if bits >= prefixes.key(address).prefix() { Some(Client::Address(address)) } else { Some(Client::Network(network)) }
}

/// Returns the part of a subject for a user, with the escapes of subjects.
fn user_part(id: &str) -> String {
    let (identifier, keys, headers) = (Identifier::new(), KeyTable::new(), HeaderMap::new());
    let (request, peer) = (RequestView::new(&Method::GET, "", &headers), Ipv4Addr::UNSPECIFIED.into());
    let identity = identifier.identify(&request, peer, &keys, Timestamp::ZERO).with_user(user(id));
    Subjects::parse(["user"]).map(|by| identity.subject(&by).to_string()).unwrap_or_default()
}

/// Returns the part of a subject for an API key: `api_key:#` and half of its digest.
pub(crate) fn key_part(digest: &KeyDigest) -> String {
    let half = digest.as_bytes().first_chunk().map_or(0, |half| u128::from_be_bytes(*half));
    format!("api_key:#{half:032x}")
}

fn user(id: &str) -> User {
    User { subject: id.into(), plan: None }
}

fn by(rule: &CompiledRule) -> String {
    rule.by().iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

/// Returns whether the parts of a subject are of the kinds `by`, in this order.
pub(crate) fn has_kinds(subject: &str, by: &Subjects) -> bool {
    let parts: Vec<(&str, Option<&str>)> = subject_parts(subject).collect();
    parts.len() == by.iter().count()
        && by.iter().zip(parts).all(|(kind, (part, _))| match kind {
            Subject::Caller => matches!(part, "api_key" | "user" | "ip" | "caller"),
            kind => kind.to_string() == part,
        })
}

/// Returns the client with the API key `text`, or with a key of the name `text`, if a lookup knows that key.
///
/// # Errors
/// If several keys have this name, or the source of keys cannot be read.
async fn looked_up(lookups: &Lookups, text: &str) -> Result<Option<Client>, String> {
    if !lookups.has_keys() {
        return Ok(None);
    }
    if can_be_key(text) {
        let digest = KeyDigest::of(text);
        if let Some(known) = lookups.find_key(&digest).await {
            return Ok(Some(Client::Key(digest, known)));
        }
    }
    let named = lookups.key_named(text).await.map_err(|error| error.to_string())?;
    Ok(named.map(|(digest, known)| Client::Key(digest, known)))
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
    let mut named = rules.keys().filter(|(_, known)| known.name.as_deref() == Some(text)).map(|(digest, _)| *digest);
    match (named.next(), named.count()) {
        (found, 0) => Ok(found),
        (_, more) => Err(format!("{} API keys have this name; specify one of the keys, or its subject", more + 1)),
    }
}

/// Returns whether each part of `text` starts with a kind of subject, or `text` is `global`.
pub(crate) fn is_subject(text: &str) -> bool {
    let kinds = ["ip:", "api_key:", "user:", "caller:", "header:", "cookie:", "path:"];
    text == "global" || text.split('&').all(|part| kinds.iter().any(|kind| part.starts_with(kind)))
}

/// Returns the digest of the API key that is the whole subject, if the configuration has that key.
fn key_in_subject(rules: &RuleSet, subject: &str) -> Option<KeyDigest> {
    rules.keys().map(|(digest, _)| *digest).find(|digest| key_part(digest) == subject)
}

/// Returns whether `text` may be an API key that is not in the configuration and still identifies a caller.
fn can_be_any_key(rules: &RuleSet, text: &str) -> bool {
    can_be_key(text) && rules.identifier().api_keys() == ApiKeys::Any
}

fn can_be_key(text: &str) -> bool {
    (1..=API_KEY_BYTES_MAX).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}
