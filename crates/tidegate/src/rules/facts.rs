//! The facts about a request: who sent it, which bans, exemptions and rules match, and which plan applies.
//!
//! ```text
//!   request, peer ──▶ Facts ──▶ identity()                   address, API key, user
//!                       │  ──▶ ban_of_address(), ban_of_caller()
//!                       │  ──▶ match_rules() ──▶ of_caller() rules, without those for other groups
//!                       │  ──▶ exemption()
//!                       └─ ──▶ plan()                       may await a PlanLookup
//! ```
//!
//! Each fact is determined when it is first read, so that the engine can refuse a request before it pays for the
//! others, in the order that `engine/resolve.rs` describes. Explanations and the pages of the admin API read the same
//! facts, all of them. So there is one derivation of each.
//!
//! A client that an operator names, without a request, has facts as well: those of a request without path and headers.

use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

use http::{HeaderMap, Method};
use tidegate_core::{Source, Timestamp, Wait};

use super::client_bans::{ClientBan, ClientBans};
use super::lists::CompiledBan;
use super::lookups::Lookups;
use super::path::LazyReadings;
use super::plan::{LimitSet, PlanQuestion};
use super::request::RequestView;
use super::set::{Matched, RuleSet};
use crate::identity::{Identity, KeyDigest, KnownKey, User};

/// The view of a client without a request.
static NO_REQUEST: LazyLock<RequestView<'static>> = LazyLock::new(|| {
    static METHOD: Method = Method::GET;
    static HEADERS: LazyLock<HeaderMap> = LazyLock::new(HeaderMap::new);
    RequestView::new(&METHOD, "", &HEADERS)
});

/// What is known about a request, or about a client that an operator names. Each fact is determined when it is first
/// read.
pub struct Facts<'r> {
    rules: &'r RuleSet,
    request: &'r RequestView<'r>,
    identity: Identity<'r>,
    path: LazyReadings<'r>,
    bans: Option<Arc<ClientBans>>,
    now: Timestamp,
}

/// A ban that refuses a client.
#[derive(Clone, Copy, Debug)]
pub enum MatchedBan<'f> {
    /// A ban in the configuration.
    Configured(&'f CompiledBan),
    /// A ban at run time: an entry of the ban list.
    Listed(&'f ClientBan),
}

impl MatchedBan<'_> {
    /// Returns the time from `now` until the ban ends: [`Wait::NEVER`] if it is permanent, and zero if it has ended.
    pub fn remaining(&self, now: Timestamp) -> Wait {
        let until = match self {
            MatchedBan::Configured(ban) => ban.until(),
            MatchedBan::Listed(ban) => ban.until,
        };
        until.map_or(Wait::NEVER, |end| Wait::from_micros(end.as_micros().saturating_sub(now.as_micros())))
    }

    /// Returns the component that reported the ban. [`Source::None`] for a ban in the configuration.
    pub(crate) fn source(&self) -> Source {
        match self {
            MatchedBan::Configured(_) => Source::None,
            MatchedBan::Listed(_) => Source::Store,
        }
    }
}

/// The part of a request that exempts it from all limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exemption {
    /// Its path.
    Path,
    /// Its API key.
    Key,
    /// The client's address.
    Address,
}

/// The limits that apply to a caller, and where its plan is assigned. Returned by [`Facts::plan`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CallerPlan {
    /// The limits of the plan, or the API key's own.
    pub limit_set: LimitSet,
    /// Where the plan is assigned.
    pub source: PlanSource,
}

/// Where the plan of a caller is assigned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlanSource {
    /// The limits are the API key's own.
    OwnLimits,
    /// The API key.
    ApiKey,
    /// The client's address.
    Address,
    /// The header that a trusted proxy sets.
    Header,
    /// The claim in a verified token.
    Claim,
    /// A lookup, which has found another plan than the default one.
    Lookup,
    /// Nowhere: the caller has the default plan.
    Default {
        /// Whether the caller is identified by more than its address.
        is_identified: bool,
        /// Whether lookups were asked.
        was_looked_up: bool,
    },
}

impl PlanSource {
    /// Returns whether the configuration or the request assigns the plan, and not a lookup or the default.
    pub fn is_assigned(self) -> bool {
        !matches!(self, PlanSource::Lookup | PlanSource::Default { .. })
    }
}

impl<'r> Facts<'r> {
    /// Returns the facts about a request from `peer`, the remote address of its connection, at time `now`.
    ///
    /// `bans` are the bans at run time. They have no effect while the kill switch is on.
    #[inline]
    pub fn of_request(
        rules: &'r RuleSet,
        request: &'r RequestView<'r>,
        peer: IpAddr,
        bans: Option<Arc<ClientBans>>,
        now: Timestamp,
    ) -> Facts<'r> {
        let identity = rules.identifier().identify(request, peer, rules, now);
        let (path, bans) = (LazyReadings::of(request.path()), bans.filter(|_| !rules.is_off()));
        Facts { rules, request, identity, path, bans, now }
    }

    /// Returns the facts about a client with this address, of which no request is known.
    ///
    /// `bans` and `now` are as for [`of_request`](Facts::of_request). No rule with conditions matches.
    pub fn of_client(rules: &'r RuleSet, address: IpAddr, bans: Option<Arc<ClientBans>>, now: Timestamp) -> Facts<'r> {
        Facts::of_request(rules, &NO_REQUEST, address, bans, now)
    }

    /// Sets the API key, which replaces the one in the request.
    #[must_use]
    pub fn with_api_key(self, digest: KeyDigest, known: KnownKey) -> Facts<'r> {
        Facts { identity: self.identity.with_api_key(digest, known), ..self }
    }

    /// Sets the verified user, which replaces that of the request's token.
    #[must_use]
    pub fn with_user(self, user: User) -> Facts<'r> {
        Facts { identity: self.identity.with_user(user), ..self }
    }

    /// Returns the rules from which the facts follow.
    pub fn rules(&self) -> &'r RuleSet {
        self.rules
    }

    /// Returns the request.
    pub fn request(&self) -> &'r RequestView<'r> {
        self.request
    }

    /// Returns the identity: address, API key, user, and the subjects that rules count.
    #[inline]
    pub fn identity(&self) -> &Identity<'r> {
        &self.identity
    }

    /// Returns the time at which the facts hold.
    pub fn now(&self) -> Timestamp {
        self.now
    }

    /// Returns the ban on the client's address, else on its API key, else on its user; `None` if there is none, or if
    /// the kill switch is on. Bans on other subjects are not considered.
    ///
    /// Of two bans on the same part, the one in the configuration is returned. Verifies the request's token only if
    /// there are bans on users.
    pub fn ban(&self) -> Option<MatchedBan<'_>> {
        self.ban_of_address().or_else(|| self.ban_of_caller())
    }

    /// Returns the ban on the client's address, or on the smallest network that contains it. `None` as for
    /// [`ban`](Facts::ban).
    #[inline]
    pub(crate) fn ban_of_address(&self) -> Option<MatchedBan<'_>> {
        let (identity, now, set) = (&self.identity, self.now, self.rules.parts());
        let configured = if set.is_off { None } else { set.bans.of_address(identity, now) };
        let listed = || self.bans.as_ref()?.of_address(identity, now).map(MatchedBan::Listed);
        configured.map(MatchedBan::Configured).or_else(listed)
    }

    /// Returns the ban on an API key of the request, else on its user. `None` as for [`ban`](Facts::ban).
    #[inline]
    pub(crate) fn ban_of_caller(&self) -> Option<MatchedBan<'_>> {
        let (identity, now, set) = (&self.identity, self.now, self.rules.parts());
        let configured = if set.is_off { None } else { set.bans.of_caller(identity, now) };
        let listed = || self.bans.as_ref()?.of_caller(identity, now).map(MatchedBan::Listed);
        configured.map(MatchedBan::Configured).or_else(listed)
    }

    /// Returns whether the path has more bytes, without its query, than the rules accept. `false` while the kill switch
    /// is on.
    ///
    /// Both the path in the request's URI and the one that the client sent are checked; they differ if a router has
    /// rewritten the URI.
    #[inline]
    pub fn is_path_too_long(&self) -> bool {
        self.request.is_path_longer_than(self.rules.path_bytes_max()) && !self.rules.is_off()
    }

    /// Returns the rules that apply by method, path, hosts and headers; see [`RuleSet::matching`]. Those for other
    /// groups are included: see [`Matched::of_caller`].
    #[inline]
    pub fn match_rules(&self) -> Matched<'r> {
        self.rules.matching_with_readings(self.request, &self.path)
    }

    /// Returns the enforced shields that match the request, even if its path is exempt. Empty while the kill switch is on.
    #[inline]
    pub(crate) fn match_shields(&self) -> Matched<'r> {
        self.rules.matching_shields(self.request, &self.path)
    }

    /// Returns whether the path is exempt from all rules. The kill switch is not considered.
    pub(crate) fn has_exempt_path(&self) -> bool {
        self.rules.parts().exempt.has_path(&self.path)
    }

    /// Returns the part of the request that exempts it from all limits: its path, else its API key, else its address.
    ///
    /// `None` if none does. The kill switch is not considered. A path is exempt even if no rule matches.
    pub fn exemption(&self) -> Option<Exemption> {
        let is_exempt_key = || self.identity.api_key().is_some_and(|(_, known)| known.exempt);
        if self.has_exempt_path() {
            Some(Exemption::Path)
        } else if is_exempt_key() {
            Some(Exemption::Key)
        } else {
            self.rules.is_exempt(&self.identity).then_some(Exemption::Address)
        }
    }

    /// Returns the plan that the configuration or the request assigns to the caller, or `None` if they assign none: the
    /// lookups then determine it.
    pub fn assigned_plan(&self) -> Option<CallerPlan> {
        let (limit_set, source) = self.rules.assigned_limits(&self.identity)?;
        Some(CallerPlan { limit_set, source })
    }

    /// Returns the limits that apply to the caller in rules with limits by plan. Asks `lookups`, within their deadline,
    /// if neither the configuration nor the request assigns a plan.
    // `&mut`, so that the future is `Send` although the facts are not `Sync`.
    pub async fn plan(&mut self, lookups: &Lookups) -> CallerPlan {
        if let Some(plan) = self.assigned_plan() {
            return plan;
        }
        let question = PlanQuestion::about(&self.identity);
        let (is_identified, was_looked_up) = (question.is_identified(), lookups.has_plans());
        let default = self.rules.default_limit_set(is_identified);
        match lookups.limit_set(self.rules, &question).await {
            limit_set if limit_set == default => {
                CallerPlan { limit_set, source: PlanSource::Default { is_identified, was_looked_up } }
            }
            limit_set => CallerPlan { limit_set, source: PlanSource::Lookup },
        }
    }
}
