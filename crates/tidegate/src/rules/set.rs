//! The rule set: the compiled form of rules, plans, API keys, exemptions and bans.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use http::HeaderName;
use tidegate_core::{Cost, Limit};

use super::facts::PlanSource;
use super::lists::{BanList, ExemptList};
use super::matcher::{Indices, Matcher};
use super::own_limits::OwnLimits;
use super::path::LazyReadings;
use super::plan::{CompiledKey, CompiledPlan, LimitSet, LimitSetId};
use super::request::RequestView;
use super::rule::CompiledRule;
use crate::answer::Styles;
use crate::failure::OnFailure;
#[cfg(feature = "tower")]
use crate::identity::TrustedProxies;
use crate::identity::{ApiKey, Identifier, Identity, KeyDigest, KeySource, KnownKey, Networks};

/// A compiled, immutable configuration: rules, plans, API keys, exemptions, bans, and how callers are identified.
///
/// Built by [`Rules::build`](super::Rules::build) or loaded by [`Config::load`](crate::config::Config::load). An
/// [`Engine`](crate::engine::Engine) decides requests by it. Clones are cheap and share the data.
#[derive(Clone)]
pub struct RuleSet(Arc<SetParts>);

/// The contents of a [`RuleSet`], as the compiler of configurations produces them.
#[derive(Clone)]
pub(crate) struct SetParts {
    pub(crate) rules: Vec<CompiledRule>,
    /// Matches all rules that are not off.
    pub(crate) matcher: Matcher,
    /// Matches only the shields in the mode `enforce`. Indices are those of `rules`.
    pub(crate) shields: Matcher,
    pub(crate) identifier: Identifier,
    /// Plans, sorted by name. The limit set of the plan at an index has the same index.
    pub(crate) plans: Vec<CompiledPlan>,
    /// The index in `plans` of the plan of each limit set. Those of keys with limits of their own come last.
    pub(crate) plan_of_limit_set: Vec<u32>,
    /// The limit set of the plan `default`, or 0 if there is no such plan.
    pub(crate) default: LimitSetId,
    /// The limit set of the plan `anonymous`, or `default` if there is no such plan.
    pub(crate) anonymous: LimitSetId,
    /// The API keys of the configuration and of its keys file, and the exempt keys.
    pub(crate) keys: HashMap<KeyDigest, CompiledKey>,
    /// Whether any key is exempt. If not, the key of a request need not be read to find out whether it is exempt.
    pub(crate) exempts_keys: bool,
    /// Limit sets by client address. The first entry whose networks contain the address applies.
    pub(crate) address_plans: Vec<(Networks, LimitSetId)>,
    /// The header in which a trusted proxy names the caller's plan.
    pub(crate) plan_header: Option<HeaderName>,
    pub(crate) exempt: ExemptList,
    pub(crate) bans: BanList,
    /// Whether any rule applies only to callers in certain groups.
    pub(crate) has_groups: bool,
    /// Whether any rule that is not off takes its limits from plans.
    pub(crate) needs_limit_set: bool,
    /// The largest cost of a request in a rule that is not off and takes its limits from plans. `None` without one.
    pub(crate) plan_cost_max: Option<Cost>,
    /// The maximum length of a path in bytes, without its query.
    pub(crate) path_bytes_max: usize,
    /// Whether the kill switch is on.
    pub(crate) is_off: bool,
    /// Whether responses list their rate-limit headers in `Access-Control-Expose-Headers`.
    pub(crate) exposes_headers: bool,
    /// The header styles of rules and checks without their own.
    pub(crate) styles: Styles,
    /// The failure policy of rules and checks without their own.
    pub(crate) on_failure: OnFailure,
    /// Whether there is a configuration. `false` only in the default rule set.
    pub(crate) is_configured: bool,
}

/// The rules that apply to a request, in the order of the configuration. Returned by [`RuleSet::matching`].
#[derive(Clone)]
pub struct Matched<'s> {
    set: &'s SetParts,
    indices: Indices,
    is_exempt_path: bool,
}

impl<'s> Matched<'s> {
    /// Iterates over the rules, in the order of the configuration.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'s CompiledRule> + '_ {
        self.indices().iter().map(|index| &self.set.rules[*index as usize])
    }

    /// Returns the indices of the rules in [`RuleSet::rules`], ascending.
    pub fn indices(&self) -> &[u32] {
        &self.indices
    }

    /// Returns the indices of the rules in [`RuleSet::rules`], ascending, without a borrow of the rule set.
    pub(crate) fn into_indices(self) -> Indices {
        self.indices
    }

    /// Keeps the rules that apply to the groups of a caller, and drops the others.
    ///
    /// A caller has the groups of its known API key. Reads the key only if a rule of the configuration has groups.
    #[must_use]
    pub fn of_caller(self, identity: &Identity<'_>) -> Matched<'s> {
        if !self.set.has_groups {
            return self;
        }
        let groups = identity.groups();
        let mut indices = self.indices;
        indices.retain(|index| self.set.rules[*index as usize].applies_to_groups(groups));
        Matched { indices, ..self }
    }

    /// Returns whether rules match the request but none applies, because its path is exempt.
    ///
    /// `false` if no rule matches the request, exempt or not, and if the kill switch is on.
    pub fn is_exempt_path(&self) -> bool {
        self.is_exempt_path
    }

    /// Returns whether no rule applies to the request: none matches, its path is exempt, or the kill switch is on.
    pub fn is_empty(&self) -> bool {
        self.indices().is_empty()
    }
}

/// The rule set of a server without a configuration: no rules, and the default settings.
impl Default for RuleSet {
    fn default() -> RuleSet {
        let empty = super::Rules::new().build().expect("a configuration without rules is valid");
        RuleSet::new(SetParts { is_configured: false, ..SetParts::clone(&empty.0) })
    }
}

impl RuleSet {
    pub(crate) fn new(parts: SetParts) -> RuleSet {
        RuleSet(Arc::new(parts))
    }

    /// Returns the contents of the rule set.
    #[inline]
    pub(crate) fn parts(&self) -> &SetParts {
        &self.0
    }

    /// Returns a copy of this rule set with other trusted proxies.
    #[cfg(feature = "tower")]
    pub(crate) fn with_proxies(&self, proxies: TrustedProxies) -> RuleSet {
        let mut parts = SetParts::clone(&self.0);
        parts.identifier = parts.identifier.with_proxies(proxies);
        RuleSet::new(parts)
    }

    /// Returns all rules in the order of the configuration, including those in the mode `off`.
    pub fn rules(&self) -> &[CompiledRule] {
        &self.0.rules
    }

    /// Returns the rules that apply to a request, by its method, path, hosts and headers.
    ///
    /// Shields and rules in shadow mode are included. Rules in the mode `off` never apply. No rule applies if the path
    /// of the request is exempt or the kill switch is on. Exempt addresses and keys are not considered;
    /// [`Facts::exemption`](super::Facts::exemption) has them.
    pub fn matching(&self, request: &RequestView<'_>) -> Matched<'_> {
        self.matching_with_readings(request, &LazyReadings::of(request.path()))
    }

    /// Returns the rules that apply to a request, like [`matching`](RuleSet::matching), given the readings of its path.
    ///
    /// `readings` must be those of the request's path. They are computed only if a rule or an exemption needs them, and
    /// the caller can reuse them.
    pub(crate) fn matching_with_readings(&self, request: &RequestView<'_>, readings: &LazyReadings<'_>) -> Matched<'_> {
        let set = &*self.0;
        if let Some(same) = self.rules_for_every_request() {
            return Matched { set, indices: Indices::from_slice(same), is_exempt_path: false };
        }
        let found = set.matcher.find(request, readings);
        let is_exempt_path = !found.is_empty() && set.exempt.has_path(readings);
        let indices = if is_exempt_path { Indices::new() } else { found };
        Matched { set, indices, is_exempt_path }
    }

    /// Returns the shields in the mode `enforce` that match a request, even if its path is exempt.
    ///
    /// Empty if the kill switch is on. `readings` must be those of the request's path.
    pub(crate) fn matching_shields(&self, request: &RequestView<'_>, readings: &LazyReadings<'_>) -> Matched<'_> {
        let set = &*self.0;
        let indices = match set.shields.rules_for_every_request() {
            _ if set.is_off => Indices::new(),
            Some(same) => Indices::from_slice(same),
            None => set.shields.find(request, readings),
        };
        Matched { set, indices, is_exempt_path: false }
    }

    /// Returns the maximum length of a path in bytes, without its query.
    ///
    /// An engine refuses a longer path with 414, unless the kill switch is on ([`is_off`](Self::is_off)).
    pub fn path_bytes_max(&self) -> usize {
        self.0.path_bytes_max
    }

    /// Returns the indices of the rules that apply, if the same rules apply to every request, else `None`.
    ///
    /// `None` if a rule that is not off has conditions, or if a path is exempt. `Some` of an empty slice if the kill
    /// switch is on or there are no rules.
    pub(crate) fn rules_for_every_request(&self) -> Option<&[u32]> {
        let set = &*self.0;
        if set.is_off || set.rules.is_empty() {
            return Some(&[]);
        }
        set.matcher.rules_for_every_request().filter(|_| set.exempt.paths.is_empty())
    }

    /// Returns whether the rule set comes from a configuration, even one without rules. `false` only for
    /// [`RuleSet::default`].
    pub fn is_configured(&self) -> bool {
        self.0.is_configured
    }

    /// Returns whether the kill switch is on: no rule applies, and no ban and no maximum length of a path is enforced.
    pub fn is_off(&self) -> bool {
        self.0.is_off
    }

    /// Returns whether an engine has to read its clock before it checks limits.
    ///
    /// That is so if there are bans, ended or not, if tokens are verified or if subjects are anonymized. The kill
    /// switch is not considered.
    pub(crate) fn depends_on_time(&self) -> bool {
        !self.0.bans.is_empty() || self.0.identifier.depends_on_time()
    }

    /// Returns the settings by which the callers of requests are identified.
    pub fn identifier(&self) -> &Identifier {
        &self.0.identifier
    }

    /// Returns whether responses let scripts of other origins read the rate-limit headers, by
    /// `Access-Control-Expose-Headers`.
    pub fn exposes_headers(&self) -> bool {
        self.0.exposes_headers
    }

    /// Returns the header styles of the configuration. They apply to rules without their own, and to explicit checks.
    pub fn styles(&self) -> Styles {
        self.0.styles
    }

    /// Returns the failure policy of the configuration. It applies to rules without their own, and to explicit checks.
    pub fn on_failure(&self) -> OnFailure {
        self.0.on_failure
    }

    /// Returns whether the caller is exempt from all rules, including shields, by its client address or its API key.
    ///
    /// Neither exempt paths (see [`Matched::is_exempt_path`]) nor the kill switch are considered.
    pub(crate) fn is_exempt(&self, identity: &Identity<'_>) -> bool {
        let addresses = &self.0.exempt.addresses;
        if !addresses.is_empty() && addresses.contains(identity.address()) {
            return true;
        }
        // Reading a key from the headers costs a hash, which is saved if no listed key is exempt.
        let known = if self.0.exempts_keys {
            identity.api_key().map(|(_, known)| known)
        } else {
            identity.determined_api_key()
        };
        known.is_some_and(|known| known.exempt)
    }

    /// Returns the attributes of the API key with this digest, or `None` if the configuration does not list the key.
    ///
    /// Keys of the keys file and keys that are only exempt are listed, too. Limits of the key's own are left out.
    pub fn key(&self, digest: &KeyDigest) -> Option<&KnownKey> {
        self.0.keys.get(digest).map(|key| &key.known)
    }

    /// Iterates over the API keys that the configuration lists, by their digests, in no particular order, each with the
    /// attributes that [`key`](RuleSet::key) returns.
    pub fn keys(&self) -> impl Iterator<Item = (&KeyDigest, &KnownKey)> {
        self.0.keys.iter().map(|(digest, key)| (digest, &key.known))
    }

    /// Returns all plans, sorted by name.
    pub fn plans(&self) -> &[CompiledPlan] {
        &self.0.plans
    }

    /// Returns the plan that a limit set belongs to.
    ///
    /// If the limits are an API key's own, returns the plan whose limits they replace: that of the key, else `default`.
    /// `None` if there are no plans.
    pub fn plan(&self, limit_set: &LimitSet) -> Option<&CompiledPlan> {
        self.0.plans.get(*self.0.plan_of_limit_set.get(limit_set.id.0 as usize)? as usize)
    }

    /// Returns whether any rule that is not off takes its limits from plans. If not, the caller's limit set has no
    /// effect.
    pub fn needs_limit_set(&self) -> bool {
        self.0.needs_limit_set
    }

    /// Returns the limit set of a caller, the limits of its plan or its API key's own, and the source of the plan.
    ///
    /// The first of these that determines it wins: the caller's API key, the client's address, the plan header of a
    /// trusted proxy, the plan claim of a verified token. `None` if none does, for example because the plan that they
    /// name does not exist; a lookup then determines it. The token is verified only if none of the others determines it.
    ///
    /// A key that a lookup found may have limits of its own, too. They are ignored if they [do not
    /// fit](RuleSet::key_problem) the rules.
    pub(crate) fn assigned_limits(&self, identity: &Identity<'_>) -> Option<(LimitSet, PlanSource)> {
        let known = identity.api_key();
        if let Some((digest, _)) = known
            && let Some(entry) = self.0.keys.get(&digest)
            && let Some(limit_set) = entry.limit_set
        {
            let is_own = limit_set.0 as usize >= self.0.plans.len();
            return Some((limit_set.into(), if is_own { PlanSource::OwnLimits } else { PlanSource::ApiKey }));
        }
        // The key may come from another source than this rule set: a key lookup.
        let by_key = || {
            let (_, known) = known?;
            let of_plan = || self.limit_set_named(known.plan.as_deref()?);
            match known
                .limits
                .as_ref()
                .filter(|own| !self.0.plans.is_empty() && self.cost_that_never_fits(own).is_none())
            {
                Some(own) => {
                    let id = of_plan().map_or(self.0.default, |plan| plan.id);
                    Some((LimitSet { id, own: Some(own.clone()) }, PlanSource::OwnLimits))
                }
                None => Some((of_plan()?, PlanSource::ApiKey)),
            }
        };
        let by_address = || {
            let holds = |(networks, _): &&(Networks, LimitSetId)| networks.contains(identity.address());
            let (_, limit_set) = self.0.address_plans.iter().find(holds)?;
            Some((LimitSet::from(*limit_set), PlanSource::Address))
        };
        let by_header = || {
            let name = identity.trusted_header(self.0.plan_header.as_ref()?)?;
            Some((self.limit_set_named(std::str::from_utf8(name).ok()?)?, PlanSource::Header))
        };
        let by_claim = || Some((self.limit_set_named(identity.user()?.plan.as_deref()?)?, PlanSource::Claim));
        by_key().or_else(by_address).or_else(by_header).or_else(by_claim)
    }

    /// Returns the limit set of the plan with this name, or `None` if there is no such plan.
    pub fn limit_set_named(&self, plan: &str) -> Option<LimitSet> {
        let place = self.0.plans.binary_search_by(|known| (*known.name).cmp(plan)).ok()?;
        u32::try_from(place).ok().map(|place| LimitSetId(place).into())
    }

    /// Returns the part of what a lookup found about an API key that is ignored, and why. `None` if nothing is.
    ///
    /// The key stays known. If its own limits are ignored, those of its plan apply. If its plan is ignored, it has the
    /// plan that another source assigns, else `default`.
    pub fn key_problem<'k>(&self, known: &'k KnownKey) -> Option<KeyProblem<'k>> {
        let unknown = known.plan.as_deref().filter(|plan| self.limit_set_named(plan).is_none());
        let too_small = || known.limits.as_ref().and_then(|own| self.cost_that_never_fits(own));
        let of_entry = known.problem().map(KeyProblem::Entry);
        let of_plan = || unknown.map(KeyProblem::UnknownPlan);
        of_entry.or_else(of_plan).or_else(|| too_small().map(|(cost, limit)| KeyProblem::CostNeverFits { cost, limit }))
    }

    /// Returns the cost of a request to a rule with limits per plan that exceeds one of `own`, and that limit.
    ///
    /// Such a limit would deny every request to the rule. `None` if there is none.
    fn cost_that_never_fits(&self, own: &OwnLimits) -> Option<(Cost, Limit)> {
        let cost = self.0.plan_cost_max?;
        own.iter().map(|(_, limit)| *limit).find(|limit| cost.units() > limit.cost_max()).map(|limit| (cost, limit))
    }

    /// Returns the limit set of a caller whose plan is not known: that of the plan `default`, or, if the caller is not
    /// identified by more than its address, of `anonymous`.
    ///
    /// `is_identified` is [`PlanQuestion::is_identified`](super::PlanQuestion::is_identified). If there is no plan `anonymous`, it is always that of
    /// `default`. Without a plan `default`, no rule takes its limits from plans, and the result has no effect.
    pub fn default_limit_set(&self, is_identified: bool) -> LimitSet {
        if is_identified { self.0.default.into() } else { self.0.anonymous.into() }
    }
}

/// Why a part of what a lookup found about an API key is ignored. Returned by [`RuleSet::key_problem`].
///
/// Its text names no key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum KeyProblem<'k> {
    /// The entry of the key is malformed, as a whole or in part; see [`KnownKey::problem`].
    Entry(&'k str),
    /// The rules have no plan with this name.
    UnknownPlan(&'k str),
    /// A limit of the key's own would deny every request to a rule, because a request costs more than the limit allows
    /// at once.
    CostNeverFits {
        /// The cost of a request to the rule.
        cost: Cost,
        /// The limit.
        limit: Limit,
    },
}

impl fmt::Display for KeyProblem<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyProblem::Entry(reason) => f.write_str(reason),
            KeyProblem::UnknownPlan(plan) => write!(f, "there is no plan `{plan}`"),
            KeyProblem::CostNeverFits { cost, limit } => {
                write!(
                    f,
                    "a cost of {cost} never fits within the limit {limit}, which allows at most {} at once",
                    limit.cost_max()
                )
            }
        }
    }
}

/// Knows the API keys that the configuration lists, including those that are only exempt.
impl KeySource for RuleSet {
    fn find(&self, key: &ApiKey<'_>) -> Option<KnownKey> {
        self.key(&key.digest()).cloned()
    }
}

impl fmt::Debug for RuleSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuleSet")
            .field("rules", &self.0.rules.len())
            .field("plans", &self.0.plans.len())
            .field("keys", &self.0.keys.len())
            .finish_non_exhaustive()
    }
}
