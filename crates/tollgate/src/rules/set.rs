//! The rule set: the compiled form of rules, plans, keys, exemptions and bans.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use http::HeaderName;
use tollgate_core::Timestamp;

use super::lists::{BanList, CompiledBan, ExemptList};
use super::matcher::{Indices, Matcher};
use super::path::LazyReadings;
use super::plan::{CompiledPlan, KeyEntry, LimitSetId, PlanLookup, PlanQuestion};
use super::request::RequestView;
use super::rule::CompiledRule;
#[cfg(feature = "tower")]
use crate::identity::TrustedProxies;
use crate::identity::{ApiKey, Identifier, Identity, KeyDigest, KeySource, KnownKey, Networks};

/// Rules, plans, keys, exemptions and bans, compiled and immutable.
///
/// Clones share the data and are cheap.
#[derive(Clone)]
pub struct RuleSet(Arc<SetParts>);

/// The parts of a [`RuleSet`].
#[derive(Clone)]
pub(crate) struct SetParts {
    pub(crate) rules: Vec<CompiledRule>,
    pub(crate) matcher: Matcher,
    /// The shields that refuse, and no other rule.
    pub(crate) shields: Matcher,
    pub(crate) identifier: Identifier,
    /// Plans, sorted by name. The first limit_sets are those of the plans, in this order.
    pub(crate) plans: Vec<CompiledPlan>,
    /// The index in `plans` of each limit_set's plan.
    pub(crate) plan_of_limit_set: Vec<u32>,
    pub(crate) default: LimitSetId,
    pub(crate) anonymous: LimitSetId,
    pub(crate) keys: HashMap<KeyDigest, KeyEntry>,
    /// Whether any key is exempt. If not, requests need not be searched for a key to find out.
    pub(crate) exempts_keys: bool,
    pub(crate) address_plans: Vec<(Networks, LimitSetId)>,
    pub(crate) plan_header: Option<HeaderName>,
    pub(crate) exempt: ExemptList,
    pub(crate) bans: BanList,
    /// Whether any rule takes its limits from plans.
    pub(crate) needs_limit_set: bool,
    pub(crate) path_bytes_max: usize,
    pub(crate) is_off: bool,
    pub(crate) exposes_headers: bool,
}

/// The rules that apply to a request, in the order of the configuration.
#[derive(Clone)]
pub struct Matched<'s> {
    set: &'s SetParts,
    places: MatchedIndices<'s>,
    is_exempt_path: bool,
}

#[derive(Clone)]
enum MatchedIndices<'s> {
    /// The same rules apply to all requests.
    Same(&'s [u32]),
    /// The rules were found for this request.
    Found(Indices),
}

impl<'s> Matched<'s> {
    /// Iterates over the rules.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'s CompiledRule> + '_ {
        self.indices().iter().map(|index| &self.set.rules[*index as usize])
    }

    /// Returns the indices of the rules in [`RuleSet::rules`], ascending. They identify this combination of rules.
    pub fn indices(&self) -> &[u32] {
        match &self.places {
            MatchedIndices::Same(same) => same,
            MatchedIndices::Found(found) => found,
        }
    }

    /// Converts into the indices of the rules in [`RuleSet::rules`], ascending.
    pub(crate) fn into_indices(self) -> Indices {
        match self.places {
            MatchedIndices::Same(same) => Indices::from_slice(same),
            MatchedIndices::Found(found) => found,
        }
    }

    /// Returns whether rules match the request and none applies, because its path is exempt.
    pub fn is_exempt_path(&self) -> bool {
        self.is_exempt_path
    }

    /// Returns whether no rule applies to the request.
    pub fn is_empty(&self) -> bool {
        self.indices().is_empty()
    }
}

impl RuleSet {
    pub(crate) fn new(parts: SetParts) -> RuleSet {
        RuleSet(Arc::new(parts))
    }

    /// Returns the parts, so that tests can compare them.
    #[cfg(test)]
    pub(crate) fn parts(&self) -> &SetParts {
        &self.0
    }

    /// Returns these rules with other trusted proxies.
    #[cfg(feature = "tower")]
    pub(crate) fn with_proxies(&self, proxies: TrustedProxies) -> RuleSet {
        let mut parts = SetParts::clone(&self.0);
        parts.identifier = parts.identifier.with_proxies(proxies);
        RuleSet::new(parts)
    }

    /// Returns all rules in the order of the configuration, including those with the mode `off`.
    pub fn rules(&self) -> &[CompiledRule] {
        &self.0.rules
    }

    /// Returns the rules that apply to a request. Empty if its path is exempt or the kill switch is on.
    pub fn matching(&self, request: &RequestView<'_>) -> Matched<'_> {
        self.matching_read(request, &LazyReadings::of(request.path()))
    }

    /// Returns the rules that apply to a request with these readings of its path.
    pub(crate) fn matching_read(&self, request: &RequestView<'_>, readings: &LazyReadings<'_>) -> Matched<'_> {
        let set = &*self.0;
        if let Some(same) = self.same_for_all() {
            return Matched { set, places: MatchedIndices::Same(same), is_exempt_path: false };
        }
        let found = set.matcher.find(request, readings);
        let is_exempt_path = !found.is_empty() && set.exempt.has_path(readings);
        let places = MatchedIndices::Found(if is_exempt_path { Indices::new() } else { found });
        Matched { set, places, is_exempt_path }
    }

    /// Returns the shields that apply to a request, whether or not it is exempt.
    pub(crate) fn matching_shields(&self, request: &RequestView<'_>, readings: &LazyReadings<'_>) -> Matched<'_> {
        let set = &*self.0;
        let places = match set.shields.same_for_all() {
            _ if set.is_off => MatchedIndices::Same(&[]),
            Some(same) => MatchedIndices::Same(same),
            None => MatchedIndices::Found(set.shields.find(request, readings)),
        };
        Matched { set, places, is_exempt_path: false }
    }

    /// Returns whether requests with this path are never limited.
    pub(crate) fn is_exempt_path(&self, readings: &LazyReadings<'_>) -> bool {
        self.0.exempt.has_path(readings)
    }

    /// Returns the maximum length of a path in bytes, without the query.
    ///
    /// A longer path is refused with 414, unless the kill switch is on ([`is_off`](Self::is_off)).
    pub fn path_bytes_max(&self) -> usize {
        self.0.path_bytes_max
    }

    /// Returns the indices of the active rules if the same rules apply to every request, else `None`.
    ///
    /// Empty if the kill switch is on or there are no rules. Otherwise `None` if a rule has conditions or a path is exempt.
    pub(crate) fn same_for_all(&self) -> Option<&[u32]> {
        let set = &*self.0;
        if set.is_off || set.rules.is_empty() {
            return Some(&[]);
        }
        set.matcher.same_for_all().filter(|_| set.exempt.paths.is_empty())
    }

    /// Returns whether the kill switch is on: no rule applies and no ban of the configuration is enforced.
    pub fn is_off(&self) -> bool {
        self.0.is_off
    }

    /// Returns whether a network is banned.
    pub(crate) fn bans_addresses(&self) -> bool {
        !self.0.is_off && !self.0.bans.networks.is_empty()
    }

    /// Returns whether a key or a user is banned.
    pub(crate) fn bans_callers(&self) -> bool {
        !self.0.is_off && self.0.bans.name_callers()
    }

    /// Returns whether any address or key is exempt.
    pub(crate) fn has_exemptions(&self) -> bool {
        self.0.exempts_keys || !self.0.exempt.addresses.is_empty()
    }

    /// Returns whether bans or the identification of callers depend on the time.
    pub(crate) fn tells_time(&self) -> bool {
        !self.0.bans.is_empty() || self.0.identifier.depends_on_time()
    }

    /// Returns the identifier of callers.
    pub fn identifier(&self) -> &Identifier {
        &self.0.identifier
    }

    /// Returns whether browsers may read the rate-limit headers (`Access-Control-Expose-Headers`).
    pub fn exposes_headers(&self) -> bool {
        self.0.exposes_headers
    }

    /// Returns the ban of the configuration that applies to this caller at `now`: by address, else key, else user.
    ///
    /// `None` if no ban applies or the kill switch is on.
    pub fn ban(&self, identity: &Identity<'_>, now: Timestamp) -> Option<&CompiledBan> {
        let of_address = || self.ban_of_address(identity, now).filter(|_| self.bans_addresses());
        of_address().or_else(|| self.ban_of_caller(identity, now).filter(|_| self.bans_callers()))
    }

    /// Returns the ban of the client's address that holds at `now`.
    pub(crate) fn ban_of_address(&self, identity: &Identity<'_>, now: Timestamp) -> Option<&CompiledBan> {
        self.0.bans.of_address(identity.address(), now)
    }

    /// Returns the ban of a key or the user of the request that holds at `now`.
    pub(crate) fn ban_of_caller(&self, identity: &Identity<'_>, now: Timestamp) -> Option<&CompiledBan> {
        let bans = &self.0.bans;
        // Finding the user may cost a signature check, so keys and users are only determined if any are banned. A
        // banned key is refused in whatever header it is sent: the upstream may read another header, and know more
        // keys.
        let of_shown = || identity.shown_keys().find_map(|key| bans.of_key(&key, now));
        let of_key = || (!bans.keys.is_empty()).then(of_shown).flatten();
        let of_user = || (!bans.users.is_empty()).then(|| bans.of_user(&identity.user()?.subject, now)).flatten();
        of_key().or_else(of_user)
    }

    /// Returns whether this caller is exempt from all limits, by its address or its API key.
    pub fn is_exempt(&self, identity: &Identity<'_>) -> bool {
        if self.0.exempt.addresses.contains(identity.address()) {
            return true;
        }
        if !self.0.exempts_keys {
            return false;
        }
        let Some((digest, _)) = identity.api_key() else { return false };
        self.0.keys.get(&digest).is_some_and(|entry| entry.is_exempt)
    }

    /// Returns the key of the configuration with this digest, if there is one.
    pub fn key(&self, digest: &KeyDigest) -> Option<&KeyEntry> {
        self.0.keys.get(digest)
    }

    /// Iterates over all keys of the configuration and their digests, in no particular order.
    pub fn keys(&self) -> impl Iterator<Item = (&KeyDigest, &KeyEntry)> {
        self.0.keys.iter()
    }

    /// Returns all plans, sorted by name.
    pub fn plans(&self) -> &[CompiledPlan] {
        &self.0.plans
    }

    /// Returns the plan of a limit_set. For the limit_set of a key with limits of its own, it is the plan that they replace.
    ///
    /// `None` if there are no plans.
    pub fn plan(&self, limit_set: LimitSetId) -> Option<&CompiledPlan> {
        self.0.plans.get(*self.0.plan_of_limit_set.get(limit_set.0 as usize)? as usize)
    }

    /// Returns whether any rule takes its limits from plans. If not, limit_sets have no effect.
    pub fn needs_limit_set(&self) -> bool {
        self.0.needs_limit_set
    }

    /// Returns the caller's limit_set by its key, address, trusted header or token, in this order.
    ///
    /// `None` if none of them determines it; use [`look_up_limit_set`](RuleSet::look_up_limit_set) then.
    pub fn limit_set(&self, identity: &Identity<'_>) -> Option<LimitSetId> {
        let known = identity.api_key();
        if let Some((digest, _)) = known
            && let Some(entry) = self.0.keys.get(&digest)
            && let Some(limit_set) = entry.limit_set
        {
            return Some(limit_set);
        }
        // The key may come from another key source than this rule set. An engine has no such source.
        let by_key = || self.limit_set_named(known?.1.plan.as_deref()?);
        let by_address = || {
            let holds = |(networks, _): &&(Networks, LimitSetId)| networks.contains(identity.address());
            self.0.address_plans.iter().find(holds).map(|(_, limit_set)| *limit_set)
        };
        let by_header = || {
            let name = identity.trusted_header(self.0.plan_header.as_ref()?)?;
            self.limit_set_named(std::str::from_utf8(name).ok()?)
        };
        let by_claim = || self.limit_set_named(identity.user()?.plan.as_deref()?);
        by_key().or_else(by_address).or_else(by_header).or_else(by_claim)
    }

    /// Returns the limit_set of the plan with this name, or `None` if there is no such plan.
    pub fn limit_set_named(&self, plan: &str) -> Option<LimitSetId> {
        let place = self.0.plans.binary_search_by(|known| (*known.name).cmp(plan)).ok()?;
        u32::try_from(place).ok().map(LimitSetId)
    }

    /// Returns the limit_set of a caller without a known plan: `default` if it is identified, else `anonymous`.
    pub fn default_limit_set(&self, is_identified: bool) -> LimitSetId {
        if is_identified { self.0.default } else { self.0.anonymous }
    }

    /// Calls the lookups in order until one names an existing plan, and returns the limit_set of that plan.
    ///
    /// If none does, returns that of [`default_limit_set`](RuleSet::default_limit_set). Intended for callers for whom
    /// [`limit_set`](RuleSet::limit_set) returns `None`.
    pub async fn look_up_limit_set(&self, question: &PlanQuestion, lookups: &[Arc<dyn PlanLookup>]) -> LimitSetId {
        for lookup in lookups {
            if let Some(plan) = lookup.plan(question).await
                && let Some(limit_set) = self.limit_set_named(&plan)
            {
                return limit_set;
            }
        }
        self.default_limit_set(question.is_identified())
    }
}

/// Finds the API keys of the configuration.
impl KeySource for RuleSet {
    fn find(&self, key: &ApiKey<'_>) -> Option<KnownKey> {
        let entry = self.0.keys.get(&key.digest())?;
        Some(KnownKey { plan: entry.plan.clone() })
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
