//! Explains what the rules would do with a request, and why, for an operator who has to explain a rejection.
//!
//! Nothing is charged. An explanation reads the [`Facts`] that the engine decides by (identity, bans, exemptions, rules,
//! plan), and writes each of them. Counters are only read.
//!
//! **The status of a limit** is that of the whole cost, from a preview, which charges nothing. A peek would report the wait
//! for one unit, and the wait for five may be longer.
//!
//! **Why a rule does not match** is found by matching each of its conditions alone, with the matcher of the rules. So there
//! is no second matcher here that could disagree with it.
//!
//! The values of subjects are masked (`ip:***`) by default.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use http::HeaderMap;
use serde::Serialize;
use tidegate::answer::{Policies, Policy};
use tidegate::config::Loaded;
use tidegate::identity::{Caller, Identifier, Identity};
use tidegate::rules::{
    CallerPlan, ClientBans, CompiledRule, Exemption, Facts, LimitSet, Lookups, MatchedBan, Mode, PlanSource,
    RequestView,
};
use tidegate::{
    Check, CheckError, Decision, Demand, Key, KeyError, LimitStatus, Limiter, MemoryStore, Scope, Timestamp, Wait,
};

use crate::client::Client;
use crate::wait_text::format_wait;

/// A request to explain, as an operator describes it.
#[derive(Clone, Debug)]
pub struct ExplainQuery<'r> {
    /// The request.
    pub request: &'r RequestView<'r>,
    /// The remote address of its connection.
    pub peer: IpAddr,
    /// The client instead of `peer` and the API key of the request: an address, an API key or the name of one, or
    /// `user:ID`. `None` if the request identifies it.
    pub client: Option<&'r str>,
    /// The bans at run time.
    pub bans: Arc<ClientBans>,
    /// The time of the request.
    pub now: Timestamp,
    /// Whether subjects are shown in full, and not without their values (`ip:***`).
    pub is_revealing: bool,
}

/// What the rules would do with a request, and why. Its JSON is the response of `/v1/explain`.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The method of the request.
    pub method: String,
    /// The normalised path of the request, as rules match it.
    pub path: String,
    /// The kind of the caller's identity: `api_key`, `user` or `ip`.
    pub caller: &'static str,
    /// The name of the API key, from the configuration or a lookup. `None` without a known key, or if it has no name.
    pub key_name: Option<String>,
    /// The groups of the API key, from the configuration or a lookup. Empty without a known key, or if it has none.
    pub groups: Vec<String>,
    /// The result of the key lookup, such as `found in the Redis hash tidegate:keys`. `None` if the request has no key,
    /// if the configuration lists it, or if no key lookup is configured.
    pub key_lookup: Option<String>,
    /// The part of the key's entry in a lookup that is ignored, and why, such as `there is no plan gold`. `None` if
    /// nothing is ignored.
    pub key_problem: Option<String>,
    /// Why the JWT of the request is invalid. `None` if it is valid or there is none.
    pub token_refused: Option<String>,
    /// Whether the kill switch is on, so that no request is limited.
    pub kill_switch: bool,
    /// Why the request is refused regardless of limits: a ban, or a path that is too long. `None` if it is not. A ban
    /// on a subject that is not one client is known only after [`Explanation::read_counters`].
    pub banned: Option<String>,
    /// The part of the request that exempts it from all limits: `address`, `key` or `path`. `None` if it is not exempt.
    pub exempt: Option<&'static str>,
    /// The caller's plan and its source. `None` if no rule has limits per plan.
    pub plan: Option<PlanExplanation>,
    /// Why the counters are unknown: the store's error, with its address. `None` unless the store was asked and did not
    /// answer.
    pub counters_unknown: Option<String>,
    /// What would happen to the request as a whole, judged by the counters that were read.
    pub verdict: VerdictExplanation,
    /// All rules of the configuration, in the order of the file.
    pub rules: Vec<RuleExplanation>,
}

/// What would happen to a request as a whole, and why.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct VerdictExplanation {
    /// Whether the request would be admitted. `None` if that depends on counters that were not read.
    pub allowed: Option<bool>,
    /// The reason, such as `search.per-minute of rule search denies it for 2s`.
    pub because: String,
}

/// The plan of a caller, and where it is assigned.
#[derive(Debug, Serialize)]
pub struct PlanExplanation {
    /// The name of the plan.
    pub name: String,
    /// Where the plan is assigned to the caller, such as `the API key`.
    pub source: Cow<'static, str>,
}

impl PlanExplanation {
    /// Returns the name of a plan, and where it is assigned. The name is empty if there are no plans.
    pub(crate) fn new(loaded: &Loaded, plan: &CallerPlan) -> PlanExplanation {
        let name = loaded.rules.plan(&plan.limit_set).map(|plan| plan.name().to_string()).unwrap_or_default();
        let source = match (plan.source, &loaded.settings.plan_hash) {
            (PlanSource::OwnLimits, _) => "the API key's own limits".into(),
            (PlanSource::ApiKey, _) => "the API key".into(),
            (PlanSource::Address, _) => "the address".into(),
            (PlanSource::Header, _) => "the trusted proxy's header".into(),
            (PlanSource::Claim, _) => "the token's claim".into(),
            (PlanSource::Lookup, Some(hash)) => format!("the Redis hash {hash}").into(),
            (PlanSource::Lookup, None) => "a lookup".into(),
            // The hash is not asked about a caller without identity.
            (PlanSource::Default { is_identified: false, .. }, _) => "the caller has no known identity".into(),
            (PlanSource::Default { .. }, None) => "no source assigns a plan".into(),
            (PlanSource::Default { was_looked_up: true, .. }, Some(hash)) => {
                format!("the Redis hash {hash} assigns no plan").into()
            }
            (PlanSource::Default { was_looked_up: false, .. }, Some(hash)) => {
                format!("the Redis hash {hash} was not read, and no other source assigns a plan").into()
            }
        };
        PlanExplanation { name, source }
    }
}

/// What one rule would do with the request, and why.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct RuleExplanation {
    /// The name of the rule.
    pub name: String,
    /// Whether the rule applies to this request: it matches and is not off, the request is not exempt, and the kill
    /// switch is off. A rule in shadow mode applies, too.
    pub applies: bool,
    /// The mode of the rule: `enforce`, `shadow` or `off`.
    pub mode: &'static str,
    /// Why the rule does not apply. Empty if it does.
    pub because: Vec<String>,
    /// The kinds of subjects that the rule counts by, as in the configuration.
    pub by: Vec<String>,
    /// The subject by which the rule counts this request, masked unless values are revealed.
    pub counts: String,
    /// Why parts of the subject are absent, such as `the request has no header x-tenant`: one text per part with a `!`
    /// in `counts`. The client's address is counted in its place. Empty if no part is absent.
    pub absent: Vec<String>,
    /// The units that the request costs.
    pub cost: u32,
    /// Whether this is a shield rule, which is decided in process memory before all others.
    pub shield: bool,
    /// The limits of the rule for this caller and its plan, even if the rule does not apply.
    pub limits: Vec<LimitExplanation>,
    #[serde(skip)]
    subject: Vec<u8>,
}

/// One limit of a rule, and whether it would allow the request.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct LimitExplanation {
    /// The name of the limit, as clients see it in headers and bodies.
    pub name: String,
    /// The limit as text, such as `10/min`.
    pub limit: String,
    /// The remaining units. `None` if the counter was not read, by [`Explanation::read_counters`] or, for a shield, by
    /// [`Explanation::read_shields`].
    pub remaining: Option<u32>,
    /// Whether the limit would allow the request. `None` if the counter was not read.
    pub would_allow: Option<bool>,
    /// The milliseconds until the limit would allow the request: 0 if it would now. `None` if the counter was not read,
    /// or if the cost exceeds the limit.
    pub retry_after_ms: Option<u64>,
    #[serde(skip)]
    policy: Arc<Policy>,
}

impl Explanation {
    /// Explains what the configuration would do with a request. Does not read counters; see
    /// [`read_counters`](Self::read_counters).
    ///
    /// Asks `lookups`, within their deadline, about an API key that the configuration does not list, and about the plan
    /// of the caller if rules have limits per plan and the configuration does not determine it.
    ///
    /// # Errors
    /// If [`ExplainQuery::client`] names no client, or a network or a subject, whose requests are not known. The message
    /// says what is accepted.
    pub async fn new(loaded: &Loaded, lookups: &Lookups, query: ExplainQuery<'_>) -> Result<Explanation, String> {
        let ExplainQuery { request, peer, client, bans, now, is_revealing } = query;
        let client = match client {
            Some(text) => Some(Client::parse(&loaded.rules, lookups, text.as_bytes()).await?),
            None => None,
        };
        let peer = client.as_ref().map_or(peer, Client::address);
        let mut facts = Facts::of_request(&loaded.rules, request, peer, Some(bans), now);
        let mut key_lookup = None;
        match client {
            Some(Client::Network(_)) => return Err("a network is not one client; specify an address in it".to_owned()),
            Some(Client::Subject(_)) => {
                let message = "a subject is not a whole request; specify its address (--peer) and its headers (-H)";
                return Err(message.to_owned());
            }
            Some(client) => facts = client.identify(facts),
            None => {
                if let Some(digest) = facts.identity().unknown_api_key() {
                    let known = if lookups.has_keys() { Some(lookups.find_key(&digest).await) } else { None };
                    key_lookup = describe_lookup(known.as_ref().map(Option::is_some), loaded);
                    facts = match known.flatten() {
                        Some(known) => facts.with_api_key(digest, known),
                        None => facts,
                    };
                }
            }
        }
        let plan = facts.plan(lookups).await;
        Ok(Explanation::of_facts(loaded, &facts, key_lookup, &plan, peer, is_revealing))
    }

    /// Explains a request from `peer`. `key_lookup` describes the result of the key lookups, and `plan` is that of the
    /// plan lookups.
    fn of_facts(
        loaded: &Loaded,
        facts: &Facts<'_>,
        key_lookup: Option<String>,
        plan: &CallerPlan,
        peer: IpAddr,
        is_revealing: bool,
    ) -> Explanation {
        let (rules, view, identity) = (facts.rules(), facts.request(), facts.identity());
        let path = view.canonical_path();
        let exempt = facts.exemption().map(|exemption| match exemption {
            Exemption::Path => "path",
            Exemption::Key => "key",
            Exemption::Address => "address",
        });
        let matched = facts.match_rules().of_caller(identity);
        let known_key = identity.api_key().map(|(_, known)| known);
        let mut explained = Vec::with_capacity(rules.rules().len());
        for (index, rule) in rules.rules().iter().enumerate() {
            let is_matched = matched.indices().binary_search(&(index as u32)).is_ok();
            let mut because = if is_matched { Vec::new() } else { loaded.unmet_conditions(index, view) };
            let is_of_group = rule.applies_to_groups(identity.groups());
            because.extend((!is_of_group).then(|| format!("the caller is not in {}", groups_text(rule.groups()))));
            because.extend((rule.mode() == Mode::Off).then(|| "the rule is off".to_owned()));
            because.extend(rules.is_off().then(|| "the kill switch is on".to_owned()));
            because.extend(exempt.map(|what| format!("the {what} is exempt")));
            let absent = |kind: &str| absence(kind, rules.identifier(), view.headers(), peer);
            explained.push(explain_rule(rule, &plan.limit_set, identity, because, absent, is_revealing));
        }
        name_limits(&mut explained);
        let mut explanation = Explanation {
            method: view.method().to_string(),
            // A path that may mean several has no normal form.
            path: if path.is_empty() { view.path().to_owned() } else { path.to_string() },
            caller: match identity.caller() {
                Caller::ApiKey(..) => "api_key",
                Caller::User(_) => "user",
                _ => "ip",
            },
            key_name: known_key.and_then(|known| Some(known.name.as_ref()?.to_string())),
            groups: identity.groups().iter().map(ToString::to_string).collect(),
            key_lookup,
            key_problem: known_key.and_then(|known| rules.key_problem(known)).map(|problem| problem.to_string()),
            token_refused: identity.token().and_then(Result::err).map(|error| error.to_string()),
            kill_switch: rules.is_off(),
            banned: refused(facts, is_revealing),
            exempt,
            plan: rules.needs_limit_set().then(|| PlanExplanation::new(loaded, plan)),
            counters_unknown: None,
            verdict: VerdictExplanation { allowed: None, because: String::new() },
            rules: explained,
        };
        explanation.verdict = explanation.conclude();
        explanation
    }

    /// Reads the counters of the shield rules that apply, without charging them.
    ///
    /// Sets `remaining`, `would_allow` and `retry_after_ms` of their limits, and the verdict. `shield` is the store of
    /// the [engine](tidegate::engine::Engine::shield) that decides the requests: each process has its own.
    pub fn read_shields(&mut self, shield: &MemoryStore) {
        for rule in self.rules.iter_mut().filter(|rule| rule.applies && rule.shield) {
            let demands = rule.demands();
            let preview = Check::new(&demands).ok().map(|check| shield.preview(&check));
            if let Some(preview) = preview {
                rule.set_counters(&preview);
            }
        }
        self.verdict = self.conclude();
    }

    /// Reads the counters of the rules that apply, those in shadow mode included, without charging them.
    ///
    /// Sets `remaining`, `would_allow` and `retry_after_ms` of the limits of these rules, and the verdict.
    ///
    /// Shield rules are skipped: see [`read_shields`](Self::read_shields). If a subject is banned in
    /// the store, sets [`Explanation::banned`], unless it is set already, and leaves its counters unknown. If the store
    /// does not answer, sets [`Explanation::counters_unknown`] and stops.
    ///
    /// `limiter` must have the store that the rules count in. It is called once per rule.
    pub async fn read_counters(&mut self, limiter: &Limiter) {
        self.read_shared(limiter).await;
        self.verdict = self.conclude();
    }

    async fn read_shared(&mut self, limiter: &Limiter) {
        for rule in self.rules.iter_mut().filter(|rule| rule.applies && !rule.shield) {
            let preview = {
                let demands = rule.demands();
                match Check::new(&demands) {
                    Ok(check) => limiter.preview(&check).await.map_err(|error| error.to_string()),
                    Err(CheckError::Empty) => continue,
                    Err(error) => Err(error.to_string()),
                }
            };
            match preview {
                Ok(Decision { ban: Some(ban), .. }) => {
                    self.banned.get_or_insert_with(|| banned_in_store(&rule.counts, ban));
                }
                Ok(preview) => rule.set_counters(&preview),
                Err(reason) => {
                    self.counters_unknown = Some(reason);
                    return;
                }
            }
        }
    }

    /// Returns what would happen to the request, judged by the counters that were read.
    fn conclude(&self) -> VerdictExplanation {
        let verdict = |allowed, because: String| VerdictExplanation { allowed, because };
        if let Some(reason) = &self.banned {
            return verdict(Some(false), reason.clone());
        }
        if self.kill_switch {
            return verdict(Some(true), "the kill switch is on".to_owned());
        }
        if let Some(what) = self.exempt {
            return verdict(Some(true), format!("the {what} is exempt"));
        }
        let enforced = self.rules.iter().filter(|rule| rule.applies && rule.mode == Mode::Enforce.as_str());
        let limits = enforced.flat_map(|rule| rule.limits.iter().map(move |limit| (rule, limit)));
        // Shields are decided first. Of the others, the one with the longest wait decides when the request would pass.
        let wait_ms = |limit: &LimitExplanation| limit.retry_after_ms.unwrap_or(u64::MAX);
        let denying = limits.clone().filter(|(_, limit)| limit.would_allow == Some(false));
        if let Some((rule, limit)) = denying.max_by_key(|(rule, limit)| (rule.shield, wait_ms(limit))) {
            let wait = match limit.retry_after_ms {
                Some(ms) => format!("denies it for {}", format_wait(Wait::from_micros(ms.saturating_mul(1_000)))),
                None => "never has room for this cost".to_owned(),
            };
            return verdict(Some(false), format!("{} of rule {} {wait}", limit.name, rule.name));
        }
        let mut limits = limits.peekable();
        if limits.peek().is_none() {
            return verdict(Some(true), "no enforced rule applies".to_owned());
        }
        match (limits.find(|(_, limit)| limit.would_allow.is_none()), &self.counters_unknown) {
            (None, _) => verdict(Some(true), "every limit has room".to_owned()),
            (Some((rule, _)), _) if rule.shield => {
                let because =
                    "the counters of shield {} are in the memory of each instance; query an instance with --admin URL";
                verdict(None, because.replace("{}", &rule.name))
            }
            (Some(_), Some(unknown)) => verdict(None, unknown.clone()),
            (Some((rule, _)), None) => verdict(
                None,
                format!(
                    "the counters of rule {} were not read; specify --store URL (Redis) or --admin URL (a running instance)",
                    rule.name
                ),
            ),
        }
    }
}

/// Describes the result of the key lookups for an API key that the configuration does not list.
///
/// `is_known` says whether a lookup knows the key; `None` if none was asked. Returns `None` if none was asked, and the
/// configuration has no Redis hash of keys.
fn describe_lookup(is_known: Option<bool>, loaded: &Loaded) -> Option<String> {
    let hash = loaded.settings.key_hash.as_ref();
    let source = hash.map_or("the lookups".to_owned(), |hash| format!("the Redis hash {hash}"));
    match is_known {
        None => hash.map(|_| format!("not listed, and {source} was not read")),
        Some(false) => Some(format!("not listed, and either not found in {source} or not looked up in time")),
        Some(true) => Some(format!("found in {source}")),
    }
}

impl RuleExplanation {
    /// Returns the demands of the request on the limits of the rule, in their order.
    fn demands(&self) -> Vec<Demand<'_>> {
        let demands = self.limits.iter().filter_map(|limit| demand(&limit.policy, &self.subject).ok());
        demands.map(|demand| demand.cost(self.cost)).collect()
    }

    /// Sets the fields of the limits that depend on their counters, from the preview of [`demands`](Self::demands).
    fn set_counters(&mut self, preview: &Decision) {
        self.limits.iter_mut().zip(&preview.limits).for_each(|(limit, status)| limit.set(status));
    }
}

impl LimitExplanation {
    /// Sets the fields that depend on the counter, from its status for the request.
    fn set(&mut self, status: &LimitStatus) {
        self.remaining = Some(status.remaining);
        self.would_allow = Some(status.allowed);
        self.retry_after_ms = if status.allowed { Some(0) } else { status.retry_after.as_millis_ceil() };
    }
}

/// Returns the demand for one unit of a limit on the counter of `subject`: that of its rule or, without one, that of
/// explicit checks.
///
/// # Errors
/// If the subject is longer than a key may be.
pub(crate) fn demand<'a>(policy: &'a Policy, subject: &'a [u8]) -> Result<Demand<'a>, KeyError> {
    let scope = policy.rule().map_or(Scope::Explicit, |rule| Scope::rule(rule, policy.limit_name()));
    Key::scoped(subject, scope).map(|key| Demand::new(*policy.limit(), key))
}

/// Sets the names of limits, of the enforced rules that apply, to those in the response to this request.
///
/// They differ from the usual names only if the request matches rules that usually exclude each other.
fn name_limits(rules: &mut [RuleExplanation]) {
    for is_shield in [true, false] {
        let is_shown = |rule: &&mut RuleExplanation| {
            rule.applies && rule.shield == is_shield && rule.mode == Mode::Enforce.as_str()
        };
        let mut limits: Vec<&mut LimitExplanation> =
            rules.iter_mut().filter(is_shown).flat_map(|rule| &mut rule.limits).collect();
        let shown = Policies::new(limits.iter().map(|limit| limit.policy.clone()));
        for (limit, policy) in limits.iter_mut().zip(shown.policies()) {
            limit.name = policy.name().to_owned();
        }
    }
}

/// Returns a text such as `ip:*** is banned in the store for 1m`; `permanently` if the ban has no end.
pub(crate) fn banned_in_store(subject: &str, ban: Wait) -> String {
    match ban {
        Wait::NEVER => format!("{subject} is banned in the store permanently"),
        ban => format!("{subject} is banned in the store for {}", format_wait(ban)),
    }
}

/// Returns the groups of a rule in a phrase, such as `the group partners` or `one of the groups a, b`.
pub(crate) fn groups_text(groups: &[Arc<str>]) -> String {
    let names: Vec<&str> = groups.iter().map(|group| &**group).collect();
    let what = if names.len() == 1 { "the group" } else { "one of the groups" };
    format!("{what} {}", names.join(", "))
}

fn explain_rule(
    rule: &CompiledRule,
    limit_set: &LimitSet,
    identity: &Identity<'_>,
    because: Vec<String>,
    absent: impl Fn(&str) -> String,
    is_revealing: bool,
) -> RuleExplanation {
    let subject = identity.subject(rule.by()).to_string();
    let policies = rule.policies(limit_set);
    let limits = policies.iter().map(|policy| LimitExplanation {
        name: policy.name().to_owned(),
        limit: policy.limit().to_string(),
        remaining: None,
        would_allow: None,
        retry_after_ms: None,
        policy: policy.clone(),
    });
    RuleExplanation {
        name: rule.name().to_string(),
        applies: because.is_empty(),
        mode: rule.mode().as_str(),
        because,
        by: rule.by().iter().map(ToString::to_string).collect(),
        counts: shown(&subject, is_revealing).into_owned(),
        absent: absent_kinds(&subject).map(absent).collect(),
        cost: rule.cost().units(),
        shield: rule.is_shield(),
        limits: limits.collect(),
        subject: subject.into_bytes(),
    }
}

/// The text in place of a masked value.
const MASK: &str = "***";
/// The mark before the address that is counted in the place of an absent value.
const ABSENT: char = '!';

/// Returns the parts of a subject, each as its kind, such as `ip` or `header:x-a`, and its value. `global` has no
/// value.
pub(crate) fn subject_parts(subject: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    // `&` occurs only between parts, and a kind contains no `:` except the one before the name of a header or cookie.
    subject.split('&').map(|part| {
        let names = if part.starts_with("header:") || part.starts_with("cookie:") { 2 } else { 1 };
        match part.match_indices(':').nth(names - 1) {
            Some((at, _)) => (&part[..at], Some(&part[at + 1..])),
            None => (part, None),
        }
    })
}

/// Returns a subject with `***` in place of each value: `user:42&header:x-a:b` becomes `user:***&header:x-a:***`. In
/// place of an absent one it has `!***`.
fn masked(subject: &str) -> String {
    let part = |(kind, value): (&str, Option<&str>)| match value {
        Some(value) if value.starts_with(ABSENT) => format!("{kind}:{ABSENT}{MASK}"),
        Some(_) => format!("{kind}:{MASK}"),
        None => kind.to_owned(),
    };
    subject_parts(subject).map(part).collect::<Vec<_>>().join("&")
}

/// Returns a subject as it is shown to an operator: masked, unless `is_revealing`.
fn shown(subject: &str, is_revealing: bool) -> Cow<'_, str> {
    if is_revealing { subject.into() } else { masked(subject).into() }
}

/// Returns whether a subject has a masked value (`ip:***`), as `explain` shows it by default, so that it identifies no
/// client.
pub fn is_masked_subject(subject: &str) -> bool {
    subject_parts(subject).any(|(_, value)| value.is_some_and(|value| value.trim_start_matches(ABSENT) == MASK))
}

/// Returns the kinds of the parts of a subject that the request does not have, such as `header:x-tenant`.
fn absent_kinds(subject: &str) -> impl Iterator<Item = &str> {
    let absent = subject_parts(subject).filter(|(_, value)| value.is_some_and(|value| value.starts_with(ABSENT)));
    absent.map(|(kind, _)| kind)
}

/// Returns why a request from `peer` has no value of this kind: it lacks a header, say, or the header is ignored.
fn absence(kind: &str, identifier: &Identifier, headers: &HeaderMap, peer: IpAddr) -> String {
    let is_sent = |name: &str| headers.get_all(name).iter().any(|value| !value.as_bytes().trim_ascii().is_empty());
    let proxies = identifier.proxies();
    match kind.split_once(':') {
        Some(("header", name)) if is_sent(name) && !proxies.networks().is_empty() && !proxies.trusts(peer) => {
            format!("the header {name} is ignored, because the peer is not a trusted proxy")
        }
        Some(("header", name)) if is_sent(name) => format!("the header {name} has several different values"),
        Some(("cookie", name)) => format!("the request has no cookie {name}, or several with different values"),
        Some((kind, name)) => format!("the request has no {kind} {name}"),
        None if kind == "api_key" => "the request has no known API key".to_owned(),
        None if kind == "user" => "the request has no valid user token".to_owned(),
        None => format!("the {kind} of the request is ambiguous"),
    }
}

/// Returns a ban as text: with its reason if it is one in the configuration, else with the entry of the ban list, which
/// is masked unless `is_revealing`.
pub(crate) fn ban_text(ban: MatchedBan<'_>, now: Timestamp, is_revealing: bool) -> String {
    match ban {
        MatchedBan::Configured(ban) => match (ban.reason(), ban.until()) {
            (Some(reason), _) => format!("banned: {reason}"),
            (None, Some(_)) => "banned temporarily".to_owned(),
            (None, None) => "banned".to_owned(),
        },
        MatchedBan::Listed(listed) => banned_in_store(&shown(&listed.entry, is_revealing), ban.remaining(now)),
    }
}

/// Returns why the request is refused regardless of limits: a ban of the client, or a path that is too long.
///
/// `None` if it is not, and always while the kill switch is on. Bans on other subjects are not considered.
fn refused(facts: &Facts<'_>, is_revealing: bool) -> Option<String> {
    let banned = facts.ban().map(|ban| ban_text(ban, facts.now(), is_revealing));
    let too_long = || format!("the path has more than {} bytes", facts.rules().path_bytes_max());
    banned.or_else(|| facts.is_path_too_long().then(too_long))
}

#[cfg(test)]
mod tests;
