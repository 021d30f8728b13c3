//! The rules in use, with the check plans that were laid out for them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState;
use parking_lot::RwLock;
use tidegate_core::{Clock, Source, Timestamp, Wait};
use tokio::time::Instant;

use super::check_plan::CheckPlan;
use super::rule_counts::{RuleCounts, RuleStats};
use super::{Companion, Refusal};
use crate::identity::{Identity, Origin};
use crate::rules::{
    CompiledBan, CompiledRule, Indices, LazyReadings, LimitSet, Lookups, Matched, PlanQuestion, RequestView, RuleSet,
};

/// The maximum number of cached plans. When it is reached, all are dropped and laid out again on demand.
const PLANS_MAX: usize = 4_096;

/// A rule set in use, with what is derived from it once: flags, the counts of its rules, and cached check plans.
pub(super) struct ActiveRules {
    pub(super) rules: RuleSet,
    pub(super) companion: Option<Companion>,
    /// Whether bans or identities depend on the time. If not, the engine does not read its clock.
    needs_time: bool,
    /// Whether a rule is a shield, in any mode.
    pub(super) has_shields: bool,
    bans_addresses: bool,
    bans_callers: bool,
    /// Whether a client address or an API key is exempt. Exempt paths are not considered.
    has_exemptions: bool,
    /// `usize::MAX` if the kill switch is on.
    path_bytes_max: usize,
    counts: RuleCounts,
    /// The check plans, by the indices of their rules and the limit set.
    plans: RwLock<HashMap<(Indices, LimitSet), Arc<CheckPlan>, RandomState>>,
}

/// The limit set of a caller, or the question that a [`PlanLookup`](crate::rules::PlanLookup) must answer first.
pub(super) enum Limits {
    Known(LimitSet),
    Lookup(PlanQuestion),
}

impl ActiveRules {
    /// Puts rules into use. A rule with the name of a rule in `before` continues its counts. No plan is cached yet. The
    /// companion is that of `before`.
    pub(super) fn new(rules: RuleSet, before: Option<&ActiveRules>) -> ActiveRules {
        ActiveRules {
            needs_time: rules.depends_on_time(),
            has_shields: rules.rules().iter().any(CompiledRule::is_shield),
            bans_addresses: rules.bans_addresses(),
            bans_callers: rules.bans_callers(),
            has_exemptions: rules.has_exemptions(),
            path_bytes_max: if rules.is_off() { usize::MAX } else { rules.path_bytes_max() },
            counts: RuleCounts::new(&rules, before.map(|before| (&before.rules, &before.counts))),
            plans: RwLock::default(),
            companion: before.and_then(|before| before.companion.clone()),
            rules,
        }
    }

    /// Sets the companion of the rules.
    pub(super) fn with_companion(self, companion: Companion) -> ActiveRules {
        ActiveRules { companion: Some(companion), ..self }
    }

    /// Returns the statistics of the rules, by rule and mode: see [`RuleCounts::stats`].
    pub(super) fn stats(&self) -> Vec<RuleStats> {
        self.counts.stats(&self.rules)
    }

    /// Reads the clock, or returns zero if nothing before the limits depends on the time. `has_bans` says whether there
    /// are bans at run time, which do.
    pub(super) fn now(&self, clock: &dyn Clock, has_bans: bool) -> Timestamp {
        if self.needs_time || has_bans { clock.now() } else { Timestamp::ZERO }
    }

    /// Creates the identity of a request at `now`, the result of [`ActiveRules::now`].
    ///
    /// Its parts are computed on first use: the address (behind a trusted proxy), API key, user and path.
    pub(super) fn identify<'r>(&'r self, request: &'r RequestView<'r>, peer: IpAddr, now: Timestamp) -> Identity<'r> {
        let origin = Origin { peer, headers: request.headers(), path: "" };
        self.rules.identifier().identify_request(Some(request), origin, &self.rules, now)
    }

    /// Returns a refusal as the error if the configuration bans a network of the client's address at `now`.
    ///
    /// Nothing is refused while the kill switch is on. Bans in the store are not considered. The refusal has the time
    /// until the ban ends; if several networks are banned, that of the smallest.
    pub(super) fn refuse_banned_address(&self, identity: &Identity<'_>, now: Timestamp) -> Result<(), Box<Refusal>> {
        match self.bans_addresses {
            true => refuse_banned(self.rules.ban_of_address(identity, now), now),
            false => Ok(()),
        }
    }

    /// Returns a refusal as the error if the configuration bans an API key in the request, or its verified user, at
    /// `now`.
    ///
    /// Nothing is refused while the kill switch is on. Bans in the store are not considered. Verifies the request's
    /// token only if users are banned and no ban on a key applies.
    pub(super) fn refuse_banned_caller(&self, identity: &Identity<'_>, now: Timestamp) -> Result<(), Box<Refusal>> {
        match self.bans_callers {
            true => refuse_banned(self.rules.ban_of_caller(identity, now), now),
            false => Ok(()),
        }
    }

    /// Returns a refusal as the error if the path has more bytes than the rules accept, without its query.
    ///
    /// Both the path in the request's URI and the one that the client sent are checked; they differ if a router has
    /// rewritten the URI. Nothing is refused while the kill switch is on.
    pub(super) fn refuse_long_path(&self, request: &RequestView<'_>) -> Result<(), Box<Refusal>> {
        let max_bytes = self.path_bytes_max;
        match request.is_received_path_longer_than(max_bytes) || request.is_path_longer_than(max_bytes) {
            true => Err(Box::new(Refusal::PathTooLong { max_bytes })),
            false => Ok(()),
        }
    }

    /// Returns the rules that apply to a request. Empty if none matches, if its path is exempt, or if the kill switch
    /// is on.
    ///
    /// `path` must hold the readings of the request's path.
    pub(super) fn match_rules(&self, request: &RequestView<'_>, path: &LazyReadings<'_>) -> Matched<'_> {
        self.rules.matching_with_readings(request, path)
    }

    /// Returns whether the caller is exempt from all limits, by its address or its API key. Exempt paths are not
    /// considered.
    pub(super) fn is_exempt(&self, identity: &Identity<'_>) -> bool {
        // A key lookup may exempt a key although the rules exempt nothing.
        let is_exempt_key = identity.determined_api_key().is_some_and(|known| known.exempt);
        is_exempt_key || (self.has_exemptions && self.rules.is_exempt(identity))
    }

    /// Returns the caller's limit set, or the question that a lookup must answer to determine it.
    ///
    /// `has_lookups` says whether there are lookups. Without them, a caller whose plan the rules do not determine has
    /// the default limit set, and [`Limits::Lookup`] is never returned. If none of `rules` has limits by plan, the
    /// limit set does not matter, and any is returned.
    pub(super) fn resolve_limits(&self, identity: &Identity<'_>, rules: &Matched<'_>, has_lookups: bool) -> Limits {
        if !rules.iter().any(CompiledRule::is_by_plan) {
            // The limits of rules that are not by plan are the same in every limit set.
            return Limits::Known(self.rules.default_limit_set(false));
        }
        if let Some(limit_set) = self.rules.limit_set(identity) {
            return Limits::Known(limit_set);
        }
        let question = PlanQuestion::about(identity);
        match has_lookups {
            true => Limits::Lookup(question),
            false => Limits::Known(self.rules.default_limit_set(question.is_identified())),
        }
    }

    /// Returns the caller's limit set, and the time that lookups of this request took: `spent`, for its key, and that
    /// of its plan.
    ///
    /// If no lookup returns an existing plan within the deadline of lookups, it is the default limit set.
    pub(super) async fn limit_set(&self, limits: Limits, lookups: &Lookups, spent: Duration) -> (LimitSet, Duration) {
        match limits {
            Limits::Known(limit_set) => (limit_set, spent),
            Limits::Lookup(question) => {
                let start = Instant::now();
                let limit_set = Box::pin(lookups.limit_set_after(spent, &self.rules, &question)).await;
                (limit_set, spent + start.elapsed())
            }
        }
    }

    /// Returns the check plan of the rules with these indices for callers with this limit set: a cached one, else a new
    /// one, which is then cached. If [`PLANS_MAX`] plans are cached, all are dropped first.
    ///
    /// The limit set must be one of this rule set; otherwise rules by plan have no limits. If own limits of a key that a
    /// lookup found are too many to be decided together with the others, the limits of its plan are laid out, and a
    /// warning is logged.
    ///
    /// # Panics
    /// Panics if an index is not one of this rule set.
    pub(super) fn check_plan(&self, rules: Indices, limit_set: LimitSet) -> Arc<CheckPlan> {
        let key = (rules, limit_set);
        if let Some(plan) = self.plans.read().get(&key) {
            return plan.clone();
        }
        let plan = Arc::new(self.lay_out(&key.0, &key.1));
        let mut plans = self.plans.write();
        if plans.len() >= PLANS_MAX {
            plans.clear();
        }
        plans.insert(key, plan.clone());
        plan
    }

    /// Lays out the check plan of the rules with these indices; see [`ActiveRules::check_plan`].
    fn lay_out(&self, rules: &[u32], limit_set: &LimitSet) -> CheckPlan {
        let plan = CheckPlan::new(&self.rules, rules, limit_set, &self.counts);
        if limit_set.own.is_none() || !plan.is_oversized() {
            return plan;
        }
        // The rules alone are within the bound: the configuration was checked.
        tracing::warn!(
            "the own limits of an API key are too many for the rules that match one request; its plan applies"
        );
        CheckPlan::new(&self.rules, rules, &limit_set.id.into(), &self.counts)
    }
}

fn refuse_banned(ban: Option<&CompiledBan>, now: Timestamp) -> Result<(), Box<Refusal>> {
    let Some(ban) = ban else { return Ok(()) };
    let until = |end: Timestamp| Wait::from_micros(end.as_micros().saturating_sub(now.as_micros()));
    Err(Box::new(Refusal::Banned { remaining: ban.until().map_or(Wait::NEVER, until), source: Source::None }))
}
