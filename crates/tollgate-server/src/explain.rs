//! What the rules would do with a request, and why: for the operator who has to explain a rejection.
//!
//! Nothing is decided and nothing charged. The answer goes through the same steps as a request does (who asks, banned, exempt, which
//! rules, which plan), by the same code, and writes down what came of each; counters are only looked at.
//!
//! **What a limit would say to this cost.** A peek speaks of one unit, and five of them may have to be waited for longer. So the whole
//! cost is asked for, together with something that is always refused: two units of a quota of one. A request passes all its limits or
//! is charged by none, so each limit says what it would have said, and none is charged.
//!
//! Why a rule does not match is found by asking its conditions one by one: for each of them a rule is compiled that has this
//! condition alone. So there is one matcher, and no second one here that could disagree with it.
//!
//! Whom a rule counts is shown without the value (`ip:***`) unless it is asked for.

mod plan;

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use http::Request;
use serde::Serialize;
use tollgate::answer::Policy;
use tollgate::config::{Loaded, RuleConditions};
use tollgate::identity::{Caller, Identity, Origin};
use tollgate::rules::{CompiledRule, LimitSetId, Mode, PlanLookup, RequestView};
use tollgate::{
    Check, CheckOptions, Cost, Demand, Key, Limit, LimitStatus, Limiter, OnFailure, Scope, StoreErrorKind, Timestamp,
};

/// What the rules would do with a request.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// Its method.
    pub method: String,
    /// Its path, as rules read it.
    pub path: String,
    /// Who asks, by kind: `api_key`, `user` or `ip`.
    pub caller: &'static str,
    /// Whose API key it is, if that is written down.
    pub key_name: Option<String>,
    /// Why the token that it shows is not believed.
    pub token_refused: Option<String>,
    /// Whether the kill switch is on, so that nothing is limited.
    pub kill_switch: bool,
    /// Why it is refused whatever the limits say.
    pub banned: Option<String>,
    /// Why no limit applies: `address`, `key` or `path`.
    pub exempt: Option<&'static str>,
    /// The caller's plan, and where that is said. None if no rule goes by plans.
    pub plan: Option<PlanExplanation>,
    /// Why nothing is said of what is left, if a store was asked and did not answer.
    pub counters_unknown: Option<String>,
    /// All rules, in the order of the file.
    pub rules: Vec<RuleExplanation>,
}

/// A plan, and where it is said that the caller has it.
#[derive(Debug, Serialize)]
pub struct PlanExplanation {
    /// Its name.
    pub name: String,
    /// Where that is said.
    pub source: Cow<'static, str>,
}

/// What one rule would do.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct RuleExplanation {
    /// Its name.
    pub name: String,
    /// Whether it applies to this request.
    pub applies: bool,
    /// `enforce`, `shadow` or `off`.
    pub mode: &'static str,
    /// What keeps it from applying.
    pub because: Vec<String>,
    /// What it counts by.
    pub by: Vec<String>,
    /// Whom it counts here.
    pub counts: String,
    /// The units that the request takes.
    pub cost: u32,
    /// Whether it is decided in process memory, before everything else.
    pub shield: bool,
    /// What it holds this caller to.
    pub limits: Vec<LimitExplanation>,
    #[serde(skip)]
    subject: Vec<u8>,
}

/// One limit of a rule.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct LimitExplanation {
    /// Its name.
    pub name: String,
    /// The limit as a text.
    pub limit: String,
    /// What is left of it, if a store was asked and answered.
    pub remaining: Option<u32>,
    /// Whether the request would pass it; none like `remaining`.
    pub would_allow: Option<bool>,
    /// For how long it would not, in milliseconds; none if the request takes more than ever fits, and like `remaining`.
    pub retry_after_ms: Option<u64>,
    #[serde(skip)]
    policy: Arc<Policy>,
}

impl Explanation {
    /// What `loaded` says of a request that came from `peer`. Who knows plans that the rules do not know is asked among
    /// `lookups`. Values of subjects are shown only if `is_revealing`.
    pub async fn new<B>(
        loaded: &Loaded,
        lookups: &[Arc<dyn PlanLookup>],
        request: &Request<B>,
        peer: IpAddr,
        now: Timestamp,
        is_revealing: bool,
    ) -> Explanation {
        let asked = match plan::question(loaded, request, peer, now) {
            Some(question) if !lookups.is_empty() => Some(loaded.rules.look_up_limit_set(&question, lookups).await),
            _ => None,
        };
        Explanation::with_plan(loaded, asked, request, peer, now, is_revealing)
    }

    /// The same, once whoever knows plans was asked, if there is anybody.
    fn with_plan<B>(
        loaded: &Loaded,
        asked: Option<LimitSetId>,
        request: &Request<B>,
        peer: IpAddr,
        now: Timestamp,
        is_revealing: bool,
    ) -> Explanation {
        let rules = &loaded.rules;
        let view = RequestView::of(request);
        let path = view.canonical_path();
        let origin = Origin { peer, headers: request.headers(), path: &path };
        let identity = rules.identifier().identify(origin, rules, now);
        let conditions = RuleConditions::new(loaded);
        let (limit_set, plan) = plan::of(loaded, asked, &identity);
        let exempt = exempt(loaded, &identity, conditions.is_exempt_path(&view));
        let matched: Vec<u32> = rules.matching(&view).indices().to_vec();
        let mut said = Vec::with_capacity(rules.rules().len());
        for (index, rule) in rules.rules().iter().enumerate() {
            let is_matched = matched.iter().any(|matched| *matched as usize == index);
            let mut because = if is_matched { Vec::new() } else { conditions.unmet(index, &view) };
            because.extend((rule.mode() == Mode::Off).then(|| "it is off".to_owned()));
            because.extend(rules.is_off().then(|| "the kill switch is on".to_owned()));
            because.extend(exempt.map(|what| format!("the {what} is exempt")));
            said.push(rule_said(rule, limit_set, &identity, because, is_revealing));
        }
        Explanation {
            method: view.method().to_string(),
            // One that may be several has no single spelling.
            path: if path.is_empty() { view.path().to_owned() } else { path.to_string() },
            caller: match identity.caller() {
                Caller::ApiKey(..) => "api_key",
                Caller::User(_) => "user",
                _ => "ip",
            },
            key_name: identity.api_key().and_then(|(digest, _)| Some(rules.key(&digest)?.name()?.to_owned())),
            token_refused: identity.token().and_then(Result::err).map(|error| error.to_string()),
            kill_switch: rules.is_off(),
            banned: refused(loaded, &view, &identity, now),
            exempt,
            plan,
            counters_unknown: None,
            rules: said,
        }
    }

    /// Looks at the counters of the rules that apply. A shield's are in another process, and are left out. If the store does not
    /// answer, that is said, and nothing of them.
    pub async fn look(&mut self, limiter: &Limiter) {
        for rule in self.rules.iter_mut().filter(|rule| rule.applies && !rule.shield) {
            for limit in &mut rule.limits {
                let scope = Scope::rule(&rule.name, &limit.name);
                let Ok(key) = Key::scoped(&rule.subject, scope) else { continue };
                let line = match would_say(limiter, *limit.policy.limit(), key, Cost::new(rule.cost)).await {
                    Ok(line) => line,
                    Err(kind) => {
                        self.counters_unknown = Some(format!("the store did not answer ({})", kind.name()));
                        return;
                    }
                };
                limit.remaining = Some(line.remaining);
                limit.would_allow = Some(line.allowed);
                limit.retry_after_ms = if line.allowed { Some(0) } else { line.retry_after.as_millis_ceil() };
            }
        }
    }
}

/// What a limit would say to this cost, if it were asked for.
async fn would_say(limiter: &Limiter, limit: Limit, key: Key<'_>, cost: Cost) -> Result<LimitStatus, StoreErrorKind> {
    let broken = StoreErrorKind::Protocol;
    let one: Limit = "1/s".parse().map_err(|_| broken)?;
    // The same subject, so that in a cluster both are asked in one place.
    let refused = Demand::new(one, Key::new(key.subject()).map_err(|_| broken)?).cost(Cost::new(2));
    // One that charges what is refused would charge this, too. Which counter it is does not depend on it.
    let demands = [Demand::new(limit.with_count_denied(false), key).cost(cost), refused];
    let check = Check::new(&demands).map_err(|_| broken)?;
    // As if the units could come back: then neither is a remembered denial told, nor this one remembered.
    let options = CheckOptions { on_failure: Some(OnFailure::Deny), refundable: true };
    let decision = limiter.check_with(&check, options).await.map_err(|unavailable| unavailable.kind())?;
    decision.limits.first().copied().ok_or(broken)
}

fn rule_said(
    rule: &CompiledRule,
    limit_set: LimitSetId,
    identity: &Identity<'_>,
    because: Vec<String>,
    is_revealing: bool,
) -> RuleExplanation {
    let subject = identity.subject(rule.by());
    let limits = rule.policies(limit_set).iter().map(|policy| LimitExplanation {
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
        mode: rule.mode().name(),
        because,
        by: rule.by().iter().map(ToString::to_string).collect(),
        counts: if is_revealing { subject.to_string() } else { masked(&subject.to_string()) },
        cost: rule.cost().units(),
        shield: rule.is_shield(),
        limits: limits.collect(),
        subject: subject.as_bytes().to_vec(),
    }
}

/// A subject without its values. `&` separates parts and nothing else, and a kind has no `:` but the one before a name.
fn masked(subject: &str) -> String {
    let part = |part: &str| {
        let names = if part.starts_with("header:") || part.starts_with("cookie:") { 2 } else { 1 };
        match part.match_indices(':').nth(names - 1) {
            Some((at, _)) => format!("{}:***", &part[..at]),
            None => part.to_owned(),
        }
    };
    subject.split('&').map(part).collect::<Vec<_>>().join("&")
}

/// Why the request is refused whatever the limits say.
fn refused(loaded: &Loaded, request: &RequestView<'_>, identity: &Identity<'_>, now: Timestamp) -> Option<String> {
    let rules = &loaded.rules;
    if let Some(ban) = rules.ban(identity, now) {
        return Some(match (ban.reason(), ban.until()) {
            (Some(reason), _) => format!("banned: {reason}"),
            (None, Some(_)) => "banned for a time".to_owned(),
            (None, None) => "banned".to_owned(),
        });
    }
    let is_too_long = request.path().len() > rules.path_bytes_max() && !rules.is_off();
    is_too_long.then(|| format!("its path has more than {} bytes", rules.path_bytes_max()))
}

fn exempt(loaded: &Loaded, identity: &Identity<'_>, is_exempt_path: bool) -> Option<&'static str> {
    let is_exempt_key = || {
        let entry = identity.api_key().and_then(|(digest, _)| loaded.rules.key(&digest));
        entry.is_some_and(|entry| entry.is_exempt())
    };
    match () {
        () if is_exempt_path => Some("path"),
        () if is_exempt_key() => Some("key"),
        () if loaded.rules.is_exempt(identity) => Some("address"),
        () => None,
    }
}

#[cfg(test)]
mod tests;
