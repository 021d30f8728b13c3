//! `/v1/bans`: bans at run time.
//!
//! ```text
//!   GET                                       all bans
//!   PUT    ?client=203.0.113.9&for=1h         bans a client for an hour; without `for`, for good
//!   GET    ?client=203.0.113.9                whether it is banned, and for how long
//!   DELETE ?client=203.0.113.9                lifts the ban
//!   …      ?key=user:42                       the key of explicit checks instead of a client
//! ```
//!
//! There are two kinds of bans. A **client** (an address, a network, an API key, a user) is an entry of the ban list of
//! the store, which every engine matches with its requests, whichever rules apply. Any other **subject** that rules
//! count, and the **key** of explicit checks, have a key of their own in the store, which is read with the counters of
//! that subject; the ban list has an entry for them, too, so that all bans can be listed.
//!
//! Without rules, it is not known how clients are identified. The text is then the key of explicit checks, and also the
//! client, if it is an address, a network or a user.

use std::collections::HashMap;
use std::time::Duration;

use http::StatusCode;
use serde::Serialize;
use tidegate::identity::Identifier;
use tidegate::rules::{ClientBans, MatchedBan, Mode, RuleSet};
use tidegate::{BAN_LIST_MAX, Clock, Key, Limiter, SystemClock, Timestamp, Wait};

use super::keys::CounterError;
use super::{AdminListener, Answer, parameters};
use crate::client::{Client, OperatorRules, has_kinds, key_part, parse_without_rules};
use crate::explain::ban_text;
use crate::listeners::http::connection::json;
use crate::wait_text::format_wait;

/// A client or a key that an operator bans: the parameters of a query to `/v1/bans`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BanQuery {
    /// A client, in any form that [`CounterQuery::key`](super::keys::CounterQuery::key) accepts, and networks.
    Client(Vec<u8>),
    /// The key of explicit checks.
    Key(Vec<u8>),
}

/// A ban, as a [`BanQuery`] has set, found or lifted it. Its JSON is the response of `/v1/bans`.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct BanReport {
    /// The client: an address, a network, the name of an API key or its subject, a user, a subject or a key. Bytes that
    /// are not UTF-8 are replaced.
    pub client: String,
    /// What is banned: `address`, `network`, `api_key`, `user`, `subject` or `key`.
    pub kind: &'static str,
    /// The subjects whose checks the store refuses. Empty if the ban refuses all requests of a client instead.
    pub subjects: Vec<String>,
    /// The rules whose requests the ban refuses. Empty without rules, and for the key of explicit checks.
    pub rules: Vec<String>,
    /// Which requests the ban refuses, and where.
    pub effect: String,
    /// Whether the client is banned.
    pub banned: bool,
    /// Milliseconds until the ban ends, rounded up; null without a ban, and for a permanent ban.
    pub retry_after_ms: Option<u64>,
    /// Whether the client was banned before the ban was lifted. Absent if no ban was to be lifted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub was_banned: Option<bool>,
    /// Another ban that refuses the client, such as one on a network that contains its address, or in the
    /// configuration. Absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other_ban: Option<String>,
}

/// All bans at run time, as [`list_bans`] found them. Its JSON is the response of `GET /v1/bans` without parameters.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct BansReport {
    /// The bans, sorted by their entries in the ban list.
    pub bans: Vec<ListedBanReport>,
    /// The maximum number of bans.
    pub max: usize,
}

/// One ban of a [`BansReport`].
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct ListedBanReport {
    /// The client, in a form that lifts the ban: an address, a network, the name of an API key, a user or a subject; a
    /// pseudonym if it cannot be resolved.
    pub client: String,
    /// What is banned: `address`, `network`, `api_key`, `user`, `subject`, or `key` of explicit checks.
    pub kind: &'static str,
    /// Milliseconds until the ban ends, rounded up; null for a permanent ban.
    pub retry_after_ms: Option<u64>,
}

/// What a ban consists of in the store.
#[derive(Default)]
struct Target {
    client: String,
    kind: &'static str,
    /// The entry of the ban list.
    entry: String,
    /// The subjects with a key of their own.
    subjects: Vec<Vec<u8>>,
    /// Subjects that are lifted with the ban, although it does not set them: earlier bans on the same client.
    related: Vec<Vec<u8>>,
    rules: Vec<String>,
    /// Which requests are refused.
    effect: String,
    /// `None` for a key.
    known: Option<Client>,
}

impl BanQuery {
    /// Bans the client for `duration`, or permanently if `None`, and reports the ban. Replaces an earlier one.
    ///
    /// # Errors
    /// Returns [`CounterError::Invalid`] if the query names no client, no rule counts the subject, or the ban would
    /// outlive the pseudonym that it names; [`CounterError::BanListFull`] if there are 10,000 other bans. Then nothing
    /// has changed. Returns [`CounterError::Store`] if the store fails.
    pub async fn ban(
        &self,
        duration: Option<Duration>,
        limiter: &Limiter,
        rules: Option<OperatorRules<'_>>,
    ) -> Result<BanReport, CounterError> {
        let now = SystemClock::new().now();
        let target = self.target(rules, now).await?;
        if let Some(rules) = rules {
            target.check_rotation(&rules.loaded.rules, duration, now)?;
        }
        if !limiter.list_ban(&target.entry, duration).await? {
            return Err(CounterError::BanListFull);
        }
        for subject in &target.subjects {
            limiter.ban(subject, duration).await?;
        }
        let us = |duration: Duration| Wait::from_micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX));
        Ok(target.report(limiter, Some(duration.map_or(Wait::NEVER, us))))
    }

    /// Lifts the ban on the client, and reports whether there was one.
    ///
    /// # Errors
    /// Returns [`CounterError::Invalid`] if the query names no client, and [`CounterError::Store`] if the store fails.
    pub async fn unban(&self, limiter: &Limiter, rules: Option<OperatorRules<'_>>) -> Result<BanReport, CounterError> {
        let now = SystemClock::new().now();
        if let Some(report) = self.unlist_pseudonym(limiter).await? {
            return Ok(report);
        }
        let target = self.target(rules, now).await?;
        let mut was_banned = limiter.unlist_ban(&target.entry).await?;
        for subject in target.subjects.iter().chain(&target.related) {
            was_banned |= limiter.unban(subject).await?;
        }
        let other_ban = target.other_ban(limiter, rules, now).await?;
        Ok(BanReport { was_banned: Some(was_banned), other_ban, ..target.report(limiter, None) })
    }

    /// Lifts the ban whose entry of the ban list is the text of the query, such as `ip:~d37d…`, the pseudonym of a
    /// banned client as [`list_bans`] shows it. Returns `None` if the text is no such entry.
    async fn unlist_pseudonym(&self, limiter: &Limiter) -> Result<Option<BanReport>, CounterError> {
        let BanQuery::Client(text) = self else { return Ok(None) };
        let Some(entry) = std::str::from_utf8(text).ok().filter(|text| text.contains(":~")) else { return Ok(None) };
        if !limiter.unlist_ban(entry).await? {
            return Ok(None);
        }
        let (client, kind) = client_of(entry, &HashMap::new());
        let target = Target { client, kind, effect: "all requests of this client".to_owned(), ..Target::default() };
        Ok(Some(BanReport { was_banned: Some(true), ..target.report(limiter, None) }))
    }

    /// Reports whether the client is banned, and for how long.
    ///
    /// # Errors
    /// Returns [`CounterError::Invalid`] if the query names no client, and [`CounterError::Store`] if the store fails.
    pub async fn inspect(
        &self,
        limiter: &Limiter,
        rules: Option<OperatorRules<'_>>,
    ) -> Result<BanReport, CounterError> {
        let now = SystemClock::new().now();
        let target = self.target(rules, now).await?;
        let listed = limiter.listed_bans().await?.bans;
        let mut longest = listed.iter().find(|ban| *ban.entry == *target.entry).map(|ban| ban.remaining);
        for subject in target.subjects.iter().chain(&target.related) {
            longest = longest.max(limiter.ban_of(subject).await?);
        }
        let other_ban = match longest {
            Some(_) => None,
            None => target.other_ban(limiter, rules, now).await?,
        };
        Ok(BanReport { other_ban, ..target.report(limiter, longest) })
    }

    /// Returns what the ban consists of in the store.
    async fn target(&self, rules: Option<OperatorRules<'_>>, now: Timestamp) -> Result<Target, CounterError> {
        let (BanQuery::Client(text) | BanQuery::Key(text)) = self;
        Key::new(text).map_err(|error| CounterError::Invalid(error.to_string()))?;
        if text.is_empty() {
            return Err(CounterError::Invalid("expected a client or a key; it is empty".to_owned()));
        }
        match (self, rules) {
            (BanQuery::Client(text), Some(rules)) => {
                let client = Client::parse(&rules.loaded.rules, rules.lookups, text).await.map_err(|message| {
                    CounterError::Invalid(format!(
                        "{message}; for the key of explicit checks, use --key KEY (in a request: key=KEY)"
                    ))
                })?;
                Target::by_rules(&client, &rules.loaded.rules, now).map_err(CounterError::Invalid)
            }
            (BanQuery::Client(text), None) => Ok(Target::without_rules(text, now)),
            (BanQuery::Key(text), _) => Ok(Target::of_key(text)),
        }
    }
}

impl Target {
    /// Returns the ban on a client, or on a subject that rules count.
    ///
    /// # Errors
    /// If no request can have this identity, or no rule counts the subject. The message says what rules count.
    fn by_rules(client: &Client, rules: &RuleSet, now: Timestamp) -> Result<Target, String> {
        let identifier = rules.identifier();
        if matches!(client, Client::User(_)) && !identifier.verifies_tokens() {
            let counted = counted_kinds(rules);
            let message = "no request has a user, because the configuration verifies no tokens (jwt)";
            return Err(format!("{message}; {counted}"));
        }
        if let Some(target) = Target::of_client(client, identifier, now) {
            return Ok(Target { rules: rules.rules().iter().map(|rule| rule.name().to_string()).collect(), ..target });
        }
        let subject = client.part(identifier.prefixes()).unwrap_or_default();
        let counting = rules.rules().iter().filter(|rule| rule.mode() != Mode::Off && !rule.is_shield());
        let counting = counting.filter(|rule| has_kinds(&subject, rule.by()));
        let names: Vec<String> = counting.map(|rule| rule.name().to_string()).collect();
        if names.is_empty() {
            return Err(format!("no rule counts this subject in the store; {}", counted_kinds(rules)));
        }
        let stored = identifier.stored_subject(&subject, now);
        Ok(Target {
            client: subject,
            kind: "subject",
            entry: ClientBans::subject_entry(stored.as_bytes()),
            subjects: vec![stored.into_bytes()],
            effect: format!("all requests that rule {} counts by this subject", names.join(", ")),
            rules: names,
            known: Some(client.clone()),
            ..Target::default()
        })
    }

    /// Returns the ban on all requests of a client, whatever the rules. `None` for a subject that is not a client.
    fn of_client(client: &Client, identifier: &Identifier, now: Timestamp) -> Option<Target> {
        let prefixes = identifier.prefixes();
        let (name, kind, effect) = match client {
            Client::Network(networks) => {
                let network = networks.iter().next()?;
                return Some(Target {
                    client: network.to_string(),
                    kind: "network",
                    entry: ClientBans::network_entry(network),
                    effect: "all requests from this network".to_owned(),
                    known: Some(client.clone()),
                    ..Target::default()
                });
            }
            Client::Address(address) => {
                let counted = prefixes.key(*address).to_string();
                let effect = if counted.contains('/') {
                    format!("all requests from this network, by which the address {address} is counted")
                } else {
                    "all requests from this address".to_owned()
                };
                (Some(counted), "address", effect)
            }
            Client::Key(_, known) => {
                (known.name.as_deref().map(str::to_owned), "api_key", "all requests with this API key".to_owned())
            }
            // A key or a user whose digest is all that is known.
            Client::Subject(text) if is_digest(text, "api_key:") => {
                (None, "api_key", "all requests with this API key".to_owned())
            }
            Client::Subject(text) if !is_digest(text, "user:") => return None,
            Client::User(_) | Client::Subject(_) => (None, "user", "all requests of this user".to_owned()),
        };
        let part = client.part(prefixes)?;
        Some(Target {
            kind,
            entry: identifier.ban_entry(&part),
            related: vec![identifier.stored_subject(&part, now).into_bytes()],
            effect,
            client: name.unwrap_or(part),
            known: Some(client.clone()),
            ..Target::default()
        })
    }

    /// Returns the ban on a text without rules: the key of explicit checks, and the client that it names, if any.
    fn without_rules(text: &[u8], now: Timestamp) -> Target {
        let (of_key, identifier) = (Target::of_key(text), Identifier::new());
        let client = std::str::from_utf8(text).ok().and_then(|text| parse_without_rules(text, identifier.prefixes()));
        match client.and_then(|client| Target::of_client(&client, &identifier, now)) {
            Some(target) => Target {
                effect: format!("{}, and {}", target.effect, of_key.effect),
                subjects: of_key.subjects,
                related: Vec::new(),
                ..target
            },
            None => of_key,
        }
    }

    /// Returns the ban on the key of explicit checks.
    fn of_key(key: &[u8]) -> Target {
        let text = String::from_utf8_lossy(key).into_owned();
        Target {
            effect: format!("explicit checks on the key {text}"),
            client: text,
            kind: "key",
            entry: ClientBans::key_entry(key),
            subjects: vec![key.to_vec()],
            ..Target::default()
        }
    }

    /// Checks that a ban on a subject with pseudonyms ends before they change.
    ///
    /// # Errors
    /// If it does not, so that the ban would end earlier than it says.
    fn check_rotation(&self, rules: &RuleSet, duration: Option<Duration>, now: Timestamp) -> Result<(), CounterError> {
        let has_pseudonym = |subject: &Vec<u8>| subject.contains(&b'~');
        let Some(left) = rules.identifier().pseudonyms_change_after(now) else { return Ok(()) };
        if self.known.is_none() || !self.subjects.iter().any(has_pseudonym) {
            return Ok(());
        }
        let ends_in_time = duration.is_some_and(|duration| left.as_duration().is_some_and(|left| duration <= left));
        if ends_in_time {
            Ok(())
        } else {
            Err(CounterError::Invalid(format!(
                "with `anonymize`, this subject changes at midnight UTC, and the ban would no longer apply; ban it for at \
                 most {} (--for), or ban the address, API key or user itself",
                format_wait(left)
            )))
        }
    }

    /// Returns another ban that refuses the client's requests: in the configuration, or of a network that contains its
    /// address.
    async fn other_ban(
        &self,
        limiter: &Limiter,
        rules: Option<OperatorRules<'_>>,
        now: Timestamp,
    ) -> Result<Option<String>, CounterError> {
        let (Some(OperatorRules { loaded, .. }), Some(client)) = (rules, &self.known) else { return Ok(None) };
        let names = || key_names(Some(&loaded.rules));
        let ban = client.ban(&loaded.rules, limiter, now, |ban| match ban {
            MatchedBan::Configured(_) => format!("{} (in the configuration)", ban_text(ban, now, true)),
            MatchedBan::Listed(ban) => format!("{} is banned", client_of(&ban.entry, &names()).0),
        });
        Ok(ban.await?)
    }

    /// Returns the report of the ban. `ban` is the time until it ends, or `None` without a ban.
    fn report(self, limiter: &Limiter, ban: Option<Wait>) -> BanReport {
        let place = if limiter.is_in_process() { "on this instance" } else { "on all instances within a second" };
        let text = |subject: &Vec<u8>| String::from_utf8_lossy(subject).into_owned();
        BanReport {
            subjects: self.subjects.iter().map(text).collect(),
            client: self.client,
            kind: self.kind,
            rules: self.rules,
            effect: format!("{} (403), {place}", self.effect),
            banned: ban.is_some(),
            retry_after_ms: ban.and_then(Wait::as_millis_ceil),
            was_banned: None,
            other_ban: None,
        }
    }
}

/// Returns all bans at run time: the entries of the ban list of the limiter's store.
///
/// `rules` name the API keys and pseudonyms that they know.
///
/// # Errors
/// Returns [`CounterError::Store`] if the store fails.
pub async fn list_bans(limiter: &Limiter, rules: Option<&RuleSet>) -> Result<BansReport, CounterError> {
    let (listed, names) = (limiter.listed_bans().await?.bans, key_names(rules));
    let report = |ban: &tidegate::ListedBan| {
        let (client, kind) = client_of(&ban.entry, &names);
        ListedBanReport { client, kind, retry_after_ms: ban.remaining.as_millis_ceil() }
    };
    Ok(BansReport { bans: listed.iter().map(report).collect(), max: BAN_LIST_MAX })
}

/// Returns the names of the API keys in the configuration, by their entries in the ban list. Empty without rules.
fn key_names(rules: Option<&RuleSet>) -> HashMap<String, &str> {
    let Some(rules) = rules else { return HashMap::new() };
    let entry = |digest| rules.identifier().ban_entry(&key_part(digest));
    rules.keys().filter_map(|(digest, key)| Some((entry(digest), key.name.as_deref()?))).collect()
}

/// Returns the client of an entry of the ban list, and its kind. `names` are those of API keys, by their entries.
fn client_of(entry: &str, names: &HashMap<String, &str>) -> (String, &'static str) {
    let (client, kind) = match entry.split_once(':') {
        Some(("subject", value)) => (value, "subject"),
        Some(("key", value)) => (value, "key"),
        Some(("ip", value)) if value.starts_with('~') => (entry, "address"),
        Some(("ip", value)) => (value, if value.contains('/') { "network" } else { "address" }),
        Some(("api_key", _)) => (names.get(entry).copied().unwrap_or(entry), "api_key"),
        Some(("user", _)) => (entry, "user"),
        _ => (entry, "subject"),
    };
    (client.to_owned(), kind)
}

/// Returns whether a subject is one part with this label whose value is a digest.
fn is_digest(subject: &str, label: &str) -> bool {
    let digest = subject.strip_prefix(label).and_then(|value| value.strip_prefix('#'));
    digest.is_some_and(|digest| digest.len() == 32 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Returns a text with the kinds of subjects that rules count.
fn counted_kinds(rules: &RuleSet) -> String {
    let by = |rule: &tidegate::rules::CompiledRule| {
        let kinds: Vec<String> = rule.by().iter().map(ToString::to_string).collect();
        format!("rule {} counts by {}", rule.name(), kinds.join(" and "))
    };
    match rules.rules() {
        [] => "there are no rules".to_owned(),
        rules => rules.iter().map(by).collect::<Vec<_>>().join(", "),
    }
}

/// The parameters of a query to `/v1/bans`.
#[derive(Debug, PartialEq, Eq)]
struct BanParameters {
    /// `None` without a client and a key.
    query: Option<BanQuery>,
    /// `None` if `for` is absent.
    duration: Option<Duration>,
}

/// Bans the client of the query for the time in `for`, or without an end, and answers with the ban.
///
/// Replaces an earlier ban on the client. Logs that a client was banned, but not which.
///
/// The answer is 400 if the query is invalid or names no client, 409 if there are too many bans, and 503 if the store
/// fails.
pub(super) async fn set(listener: &AdminListener, query: &str) -> Answer {
    let BanParameters { query, duration } = BanParameters::parse(query, true)?;
    let (query, loaded) = (query.ok_or_else(|| EXPECTED.to_owned())?, listener.reloader.loaded());
    let banned = query.ban(duration, listener.limiter(), listener.rules(loaded.as_deref())).await;
    listener.apply_bans().await;
    let report = banned?;
    tracing::info!(kind = report.kind, "the operator banned a client");
    Ok(json(StatusCode::OK, &report))
}

/// Answers whether the client of the query is banned at run time, and for how long; without a client, with all bans.
///
/// The answer is 400 if the query is invalid, and 503 if the store fails.
pub(super) async fn inspect(listener: &AdminListener, query: &str) -> Answer {
    let (BanParameters { query, .. }, loaded) = (BanParameters::parse(query, false)?, listener.reloader.loaded());
    let (limiter, loaded) = (listener.limiter(), loaded.as_deref());
    Ok(match query {
        Some(query) => json(StatusCode::OK, &query.inspect(limiter, listener.rules(loaded)).await?),
        None => json(StatusCode::OK, &list_bans(limiter, loaded.map(|loaded| &loaded.rules)).await?),
    })
}

/// Lifts the ban on the client of the query, and answers whether there was one.
///
/// Logs that a ban was lifted, but not of which client.
///
/// The answer is 400 if the query is invalid, and 503 if the store fails.
pub(super) async fn lift(listener: &AdminListener, query: &str) -> Answer {
    let query = BanParameters::parse(query, false)?.query.ok_or_else(|| EXPECTED.to_owned())?;
    let loaded = listener.reloader.loaded();
    let lifted = query.unban(listener.limiter(), listener.rules(loaded.as_deref())).await;
    listener.apply_bans().await;
    let report = lifted?;
    if report.was_banned == Some(true) {
        tracing::info!(kind = report.kind, "the operator lifted a ban");
    }
    Ok(json(StatusCode::OK, &report))
}

const EXPECTED: &str = "expected ?client=…, or ?key=… for the key of explicit checks";

impl AdminListener {
    /// Applies the ban list to the following requests of this instance. Other instances read it within a second.
    async fn apply_bans(&self) {
        // If this fails, the engine reads the list later, as on the other instances.
        let _ = self.engine.refresh_bans().await;
    }
}

impl BanParameters {
    /// Parses a percent-encoded query. `for` is accepted only if `accepts_duration`.
    ///
    /// `+` is a space, and the last of repeated parameters counts. `Err` is the message of the 400 response: a
    /// parameter is unknown, there are a client and a key, or `for` is not a time of at least 1 ms.
    fn parse(text: &str, accepts_duration: bool) -> Result<BanParameters, String> {
        let (mut client, mut key, mut duration) = (None, None, None);
        for (name, value) in parameters(text) {
            match name {
                "client" => client = Some(value),
                "key" => key = Some(value),
                "for" if accepts_duration => duration = Some(parse_duration(&value)?),
                _ if accepts_duration => return Err("unknown parameter; expected client, key or for".to_owned()),
                _ => return Err("unknown parameter; expected client or key".to_owned()),
            }
        }
        let query = match (client, key) {
            (Some(_), Some(_)) => return Err("expected either client or key".to_owned()),
            (Some(client), None) => Some(BanQuery::Client(client)),
            (None, Some(key)) => Some(BanQuery::Key(key)),
            (None, None) => None,
        };
        Ok(BanParameters { query, duration })
    }
}

fn parse_duration(text: &[u8]) -> Result<Duration, String> {
    let text = std::str::from_utf8(text).ok();
    let duration = text.and_then(|text| humantime::parse_duration(text).ok());
    duration
        .filter(|duration| *duration >= Duration::from_millis(1))
        .ok_or_else(|| "for: expected a time of at least 1ms, such as 30s, 10min or 1h".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_is_decoded_and_invalid_parameters_are_rejected() {
        let query = BanParameters::parse("client=ip%3A203.0.113.9%26user%3A42&for=1h+30min", true).unwrap();
        let duration = Some(Duration::from_secs(5_400));
        let client = Some(BanQuery::Client(b"ip:203.0.113.9&user:42".to_vec()));
        assert_eq!(query, BanParameters { query: client, duration });
        assert_eq!(BanParameters::parse("key=a", true).unwrap().query, Some(BanQuery::Key(b"a".to_vec())));
        assert_eq!(BanParameters::parse("", false).unwrap().query, None);
        for (query, accepts_duration, phrase) in [
            ("client=a&for=soon", true, "such as 30s"),
            ("client=a&for=0s", true, "at least 1ms"),
            ("client=a&for=", true, "such as 30s"),
            ("client=a&until=tomorrow", true, "client, key or for"),
            ("client=a&for=1h", false, "expected client or key"),
            ("client=a&key=b", false, "either client or key"),
        ] {
            let refused = BanParameters::parse(query, accepts_duration);
            assert!(refused.is_err_and(|message| message.contains(phrase)), "{query}");
        }
    }
}
