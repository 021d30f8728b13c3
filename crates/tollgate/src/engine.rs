//! The engine: a request in, an answer out, by the rules.
//!
//! ```text
//!   request ─▶ which rules match ─▶ who asks ─▶ banned? exempt? ─▶ which plan
//!                                                                      │
//!        ┌─────────────────────────────────────────────────────────────┘
//!        ▼
//!   shield rules, in process ─▶ all enforced rules, one decision ─▶ shadow rules, each for itself
//!        │ denied                    │ denied                            (only if admitted; never a veto)
//!        ▼                           ▼
//!      refusal                     refusal
//! ```
//!
//! Whoever serves requests (the Tower layer, the decision service, the gateway) calls [`Engine::decide`] before the work and
//! [`Passage::finish`] after it, and translates; there is no other way through.
//!
//! **One decision.** All enforced rules that match are decided together: the request passes all their limits or is charged by none.
//!
//! **When the store does not answer**, each rule's own word counts: if one of them says `deny`, the request is unavailable; those that say
//! `local` are decided by this node's share, together; those that say `allow` are left out.
//!
//! **A reload** swaps the rules whole. Requests that are under way finish by the rules they began with; counters are named by rule
//! and limit, so they live on.

mod passage;
mod rule_counts;

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};
use parking_lot::RwLock;
use smallvec::SmallVec;
use tollgate_core::{
    Check, Clock, Cost, Decision, Demand, Key, KeyError, MemoryStore, Scope, Source, StoreErrorKind, SystemClock,
    Timestamp,
};

pub use self::passage::{Ending, Passage};
use self::rule_counts::RuleCounts;
pub use self::rule_counts::RuleStats;
use crate::answer::{Policies, Policy, Verdict};
use crate::failure::OnFailure;
use crate::identity::{Identity, Origin, Subject};
use crate::limiter::{CheckOptions, Limiter};
use crate::rules::{Charge, Matched, Mode, PlanLookup, PlanQuestion, RequestView, Rule, RuleSet, Tariff};

/// How many combinations of rules and plan keep their rendered headers.
const POLICIES_KEPT_MAX: usize = 4_096;

/// Decides requests by rules. Cloning it is cheap, and clones share everything.
///
/// ```
/// use tollgate::Limiter;
/// use tollgate::config::{Config, Format};
/// use tollgate::engine::{Engine, Outcome};
/// use tollgate::rules::RequestView;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let loaded = Config::from_text("[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"1/min\"]", Format::Toml)?;
/// let engine = Engine::new(Limiter::memory(), loaded.rules);
///
/// let request = http::Request::get("/").body(())?;
/// let peer = [203, 0, 113, 9].into();
/// assert!(matches!(engine.decide(&RequestView::of(&request), peer).await, Outcome::Pass(_)));
/// let Outcome::Refuse(refusal) = engine.decide(&RequestView::of(&request), peer).await else { panic!("a second one") };
/// assert_eq!(refusal.response.status(), 429);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    limiter: Limiter,
    shield: MemoryStore,
    live: ArcSwap<Live>,
    lookups: Vec<Arc<dyn PlanLookup>>,
    clock: Arc<dyn Clock>,
}

/// A set of rules in use, with what was rendered and counted for it.
struct Live {
    rules: RuleSet,
    policies: RwLock<HashMap<PoliciesKey, Arc<Policies>>>,
    counts: RuleCounts,
}

type PoliciesKey = (SmallVec<[u32; 4]>, Option<Tariff>);

/// What became of a request.
#[derive(Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// It goes on.
    Pass(Passage),
    /// It does not.
    Refuse(Refused),
}

/// A request that does not go on, and why.
#[derive(Debug)]
pub struct Refused {
    /// Which of the reasons.
    pub verdict: Verdict,
    /// What to answer.
    pub response: Response<Bytes>,
    /// The decision, if limits refused it.
    pub decision: Option<Decision>,
    /// Whose limits the lines of the decision are.
    pub policies: Option<Arc<Policies>>,
}

/// One limit of one rule for this request: everything that a demand borrows.
#[derive(Clone, Debug)]
struct Part {
    rule: Arc<str>,
    rule_index: u32,
    policy: Arc<Policy>,
    subject: Arc<Subject>,
    cost: Cost,
    charge: Charge,
    on_failure: OnFailure,
}

impl Part {
    fn demand(&self) -> Result<Demand<'_>, KeyError> {
        let scope = Scope::Rule { rule: &self.rule, limit: self.policy.name() };
        let key = Key::scoped(self.subject.as_bytes(), scope)?;
        Ok(Demand { limit: *self.policy.limit(), key, cost: self.cost })
    }
}

/// The parts of a request, by how their rules are applied.
#[derive(Default)]
struct Parts {
    shield: Vec<Part>,
    enforced: Vec<Part>,
    shadow: Vec<Part>,
}

impl Engine {
    /// An engine for these rules.
    pub fn new(limiter: Limiter, rules: RuleSet) -> Engine {
        Engine::with_lookups(limiter, rules, Vec::new())
    }

    /// An engine that asks these for plans that the rules do not know, in turn.
    pub fn with_lookups(limiter: Limiter, rules: RuleSet, lookups: Vec<Arc<dyn PlanLookup>>) -> Engine {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        Engine::on_clock(limiter, rules, lookups, clock)
    }

    /// The same, on a clock of the caller's, which also times the shield rules. For tests.
    pub fn on_clock(
        limiter: Limiter,
        rules: RuleSet,
        lookups: Vec<Arc<dyn PlanLookup>>,
        clock: Arc<dyn Clock>,
    ) -> Engine {
        let shield = MemoryStore::builder().clock(clock.clone()).build();
        Engine(Arc::new(Inner { limiter, shield, live: ArcSwap::from_pointee(Live::new(rules, None)), lookups, clock }))
    }

    /// From here on these rules hold. Requests under way finish by the old ones; counters live on.
    pub fn reload(&self, rules: RuleSet) {
        self.0.live.rcu(|before| Live::new(rules.clone(), Some(before)));
    }

    /// The limiter that it asks.
    pub fn limiter(&self) -> &Limiter {
        &self.0.limiter
    }

    /// What each rule has said, over all reloads that kept its name.
    pub fn rule_stats(&self) -> Vec<RuleStats> {
        let live = self.0.live.load();
        live.counts.stats(&live.rules)
    }

    /// Decides a request that came from `peer`, the other end of its socket.
    pub async fn decide(&self, request: &RequestView<'_>, peer: IpAddr) -> Outcome {
        self.decide_with_cost(request, peer, None).await
    }

    /// The same for a request that costs more or less than its rules say.
    pub async fn decide_with_cost(&self, request: &RequestView<'_>, peer: IpAddr, cost: Option<Cost>) -> Outcome {
        let live = self.0.live.load_full();
        let now = self.0.clock.now();
        let matched = live.rules.matching(request);
        let known = match self.identify(&live, request, peer, now, &matched) {
            Known::Nothing => return Outcome::Pass(Passage::unlimited()),
            Known::Banned(response) => {
                return Outcome::Refuse(Refused {
                    verdict: Verdict::Forbidden,
                    response,
                    decision: None,
                    policies: None,
                });
            }
            Known::Caller(known) => known,
        };
        let tariff = match (known.tariff, known.question) {
            (Some(tariff), _) => Some(tariff),
            (None, Some(question)) => Some(live.rules.look_up_tariff(&question, &self.0.lookups).await),
            (None, None) => None,
        };
        // Rules that are not by plan have the same limits under every tariff.
        let any_tariff = tariff.unwrap_or_else(|| live.rules.tariff_otherwise(false));
        let parts = parts(&matched, &known.subjects, any_tariff, cost);
        let rules: SmallVec<[u32; 4]> = matched.indices().iter().copied().collect();
        self.pass_all(&live, request.headers(), parts, (rules, tariff)).await
    }

    /// Everything that depends on who asks, worked out before anything is waited for.
    fn identify(
        &self,
        live: &Live,
        request: &RequestView<'_>,
        peer: IpAddr,
        now: Timestamp,
        matched: &Matched<'_>,
    ) -> Known {
        let path = request.canonical_path();
        let origin = Origin { peer, headers: request.headers(), path: &path };
        let identity: Identity<'_> = live.rules.identifier().identify(origin, &live.rules, now);
        if let Some(ban) = live.rules.ban(&identity, now) {
            return Known::Banned(banned(ban.until(), now));
        }
        if matched.is_empty() || live.rules.is_exempt(&identity) {
            return Known::Nothing;
        }
        let by_plan = matched.iter().any(Rule::is_by_plan);
        let tariff = by_plan.then(|| live.rules.tariff(&identity)).flatten();
        Known::Caller(KnownCaller {
            subjects: matched.iter().map(|rule| Arc::new(identity.subject(rule.by()))).collect(),
            tariff,
            question: (by_plan && tariff.is_none()).then(|| PlanQuestion::about(&identity)),
        })
    }

    async fn pass_all(&self, live: &Arc<Live>, request: &HeaderMap, parts: Parts, key: PoliciesKey) -> Outcome {
        if let Some(refused) = self.pass_shield(live, request, &parts.shield) {
            return Outcome::Refuse(refused);
        }
        let policies = live.policies(&parts.enforced, key);
        let decided = self.decide_enforced(&parts.enforced).await;
        let decision = match decided {
            Ok(decision) => decision,
            Err(Undecided) => {
                live.counts.count_unavailable(&live.rules, &parts.enforced);
                let response = policies.unavailable(request);
                return Outcome::Refuse(Refused {
                    verdict: Verdict::Unavailable,
                    response,
                    decision: None,
                    policies: None,
                });
            }
        };
        live.count(&parts.enforced, &decision);
        if !decision.allowed() {
            let policies = match decision.lines.len() == parts.enforced.len() {
                true => policies,
                false => Arc::new(Policies::new(local(&parts.enforced).map(|part| part.policy.clone()))),
            };
            return Outcome::Refuse(denied(policies, decision, request));
        }
        self.try_shadow(live, &parts.shadow).await;
        Outcome::Pass(Passage::limited(self.0.limiter.clone(), policies, parts.enforced, decision))
    }

    fn pass_shield(&self, live: &Live, request: &HeaderMap, parts: &[Part]) -> Option<Refused> {
        let demands: Vec<Demand<'_>> = parts.iter().filter_map(|part| part.demand().ok()).collect();
        let decision = self.0.shield.check(&Check::new(&demands).ok()?);
        live.count(parts, &decision);
        if decision.allowed() {
            return None;
        }
        let policies = Arc::new(Policies::new(parts.iter().map(|part| part.policy.clone())));
        Some(denied(policies, decision, request))
    }

    /// All enforced rules together, by the store or by each rule's word for its absence.
    async fn decide_enforced(&self, parts: &[Part]) -> Result<Decision, Undecided> {
        if parts.is_empty() {
            return Ok(Decision { at: self.0.clock.now(), source: Source::Store, lines: Default::default() });
        }
        let demands: Vec<Demand<'_>> =
            parts.iter().map(Part::demand).collect::<Result<_, _>>().map_err(|_| Undecided)?;
        let check = Check::new(&demands).map_err(|error| {
            tracing::error!(%error, "the rules that match one request cannot be decided together");
            Undecided
        })?;
        let refundable = parts.iter().any(|part| part.charge.is_refundable());
        let options = CheckOptions { on_failure: Some(OnFailure::Deny), refundable };
        match self.0.limiter.check_with(&check, options).await {
            Ok(decision) => Ok(decision),
            Err(unavailable) => self.decide_without_store(parts, unavailable.kind()),
        }
    }

    fn decide_without_store(&self, parts: &[Part], kind: StoreErrorKind) -> Result<Decision, Undecided> {
        if parts.iter().any(|part| part.on_failure == OnFailure::Deny) {
            tracing::debug!(kind = kind.name(), "refused, since a rule says so while the store is away");
            return Err(Undecided);
        }
        let demands: Vec<Demand<'_>> = local(parts).filter_map(|part| part.demand().ok()).collect();
        match Check::new(&demands) {
            Ok(check) if demands.len() == parts.len() => Ok(self.0.limiter.check_local(&check)),
            // Some rules are left out: their lines are unknown, so nothing is claimed; but a share that is used up still refuses.
            Ok(check) => {
                let decision = self.0.limiter.check_local(&check);
                match decision.allowed() {
                    true => Ok(Decision { lines: Default::default(), source: Source::None, ..decision }),
                    false => Ok(decision),
                }
            }
            Err(_) => Ok(Decision { at: self.0.clock.now(), source: Source::None, lines: Default::default() }),
        }
    }

    /// Shadow rules are charged if they would themselves have passed; what they would have refused is counted.
    async fn try_shadow(&self, live: &Live, parts: &[Part]) {
        for rule in parts.chunk_by(|one, other| one.rule_index == other.rule_index) {
            let Ok(demands) = rule.iter().map(Part::demand).collect::<Result<Vec<_>, _>>() else { continue };
            let Ok(check) = Check::new(&demands) else { continue };
            let options = CheckOptions { on_failure: Some(OnFailure::Allow), refundable: false };
            if let Ok(decision) = self.0.limiter.check_with(&check, options).await {
                live.count(rule, &decision);
            }
        }
    }
}

fn denied(policies: Arc<Policies>, decision: Decision, request: &HeaderMap) -> Refused {
    let response = policies.refuse(&decision, request);
    Refused { verdict: Verdict::Denied, response, decision: Some(decision), policies: Some(policies) }
}

/// The store did not answer, and a rule says to refuse then.
struct Undecided;

enum Known {
    /// No rule matches, or the caller is exempt.
    Nothing,
    Banned(Response<Bytes>),
    Caller(KnownCaller),
}

struct KnownCaller {
    /// Whom each matching rule counts.
    subjects: Vec<Arc<Subject>>,
    tariff: Option<Tariff>,
    /// To be asked, if the tariff is not known and matters.
    question: Option<PlanQuestion>,
}

fn parts(matched: &Matched<'_>, subjects: &[Arc<Subject>], tariff: Tariff, cost: Option<Cost>) -> Parts {
    let mut parts = Parts::default();
    for ((rule, &rule_index), subject) in matched.iter().zip(matched.indices()).zip(subjects) {
        let to = match (rule.is_shield(), rule.mode()) {
            (_, Mode::Off) => continue,
            (true, Mode::Enforce) => &mut parts.shield,
            (_, Mode::Shadow) => &mut parts.shadow,
            _ => &mut parts.enforced,
        };
        let policies = rule.policies(tariff);
        to.extend(policies.iter().map(|policy| Part {
            rule: rule.name().clone(),
            rule_index,
            policy: policy.clone(),
            subject: subject.clone(),
            cost: cost.unwrap_or(rule.cost()),
            charge: rule.charge(),
            on_failure: rule.on_failure(),
        }));
    }
    parts
}

/// The parts that this node decides by itself while the store is away.
fn local(parts: &[Part]) -> impl Iterator<Item = &Part> {
    parts.iter().filter(|part| part.on_failure == OnFailure::Local)
}

/// 403, and until when.
fn banned(until: Option<Timestamp>, now: Timestamp) -> Response<Bytes> {
    let body = serde_json::json!({ "error": Verdict::Forbidden.error(), "message": "this caller is banned" });
    let mut response = Response::new(Bytes::from(body.to_string()));
    *response.status_mut() = Verdict::Forbidden.http();
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(http::header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Some(until) = until {
        let seconds = until.as_micros().saturating_sub(now.as_micros()).div_ceil(1_000_000).max(1);
        headers.insert(http::header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

impl Live {
    fn new(rules: RuleSet, before: Option<&Live>) -> Live {
        let counts = RuleCounts::new(&rules, before.map(|before| (&before.rules, &before.counts)));
        Live { rules, policies: RwLock::default(), counts }
    }

    /// What tells the numbers of these rules under this plan, rendered once.
    fn policies(&self, parts: &[Part], key: PoliciesKey) -> Arc<Policies> {
        if let Some(policies) = self.policies.read().get(&key) {
            return policies.clone();
        }
        let policies = Policies::new(parts.iter().map(|part| part.policy.clone()));
        let policies = Arc::new(policies.with_exposed_headers(self.rules.exposes_headers()));
        let mut kept = self.policies.write();
        if kept.len() < POLICIES_KEPT_MAX {
            kept.insert(key, policies.clone());
        }
        policies
    }

    /// Counts what each rule said.
    fn count(&self, parts: &[Part], decision: &Decision) {
        self.counts.count(&self.rules, parts, decision);
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("limiter", &self.0.limiter).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
