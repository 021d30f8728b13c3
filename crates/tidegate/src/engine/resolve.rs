//! From a request to its demands: the first half of [`Engine::check`].
//!
//! ```text
//!   address banned? ─▶ path too long? ─▶ shield without room? ─▶ match rules ─▶ key or user banned?
//!                                                                                       │
//!   Resolved ◀─ check plan ◀─ limit set ◀──────────── groups, exempt? ◀───────── unknown key: may await a KeyLookup
//!                             may await a PlanLookup
//! ```
//!
//! **Cheap refusals come first.** A request from a banned address, with a path beyond the bound, or for which a shield
//! has no room is refused before its path is normalised, its key hashed, its token verified, or its key or plan looked
//! up. A shield without room admits a key that a lookup exempts only if the result of that lookup is cached.
//!
//! Each step reads [`Facts`], which explanations read as well. The result has nothing of HTTP: a [`CheckPlan`] with the
//! limits, their order, failure policies and labels, and a [`RequestContext`] with subjects and costs. Explicit checks
//! have a resolver of their own (`explicit.rs`).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tidegate_core::{Check, Cost, Timestamp, Wait};
use tokio::time::Instant;

use super::active_rules::ActiveRules;
use super::check_plan::{CheckPlan, LimitGroup};
use super::{Engine, Refusal};
use crate::identity::{Identity, KeyDigest, KnownKey, SubjectKey, Subjects};
use crate::limiter::catch_panic;
use crate::observe::BannedBy;
use crate::rules::{CompiledRule, Facts, Indices, LimitSet, Matched, MatchedBan, PlanQuestion, RequestView};

/// Options of a request: its cost and its longest wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RequestOptions {
    /// The units that the request costs under every rule. Defaults to the cost that each rule sets.
    pub cost: Option<Cost>,
    /// The longest time for which a leaky bucket may delay the request. Defaults to no bound.
    ///
    /// A request that would have to wait longer is refused like one that a limit denies, and its slot is not charged.
    pub max_wait: Option<Duration>,
}

impl RequestOptions {
    /// Returns whether `wait` exceeds `max_wait`. Always `false` without a `max_wait`.
    pub(super) fn exclude(&self, wait: Wait) -> bool {
        self.max_wait.is_some_and(|max_wait| wait.as_duration().is_none_or(|wait| wait > max_wait))
    }
}

/// The part of a request that varies within a [`CheckPlan`]: the subjects of its rules,
/// its options, and the time already used.
pub(super) struct RequestContext {
    /// The subject that each rule of the plan counts, in the order of the rules.
    pub(super) subjects: SmallVec<[SubjectKey; 1]>,
    pub(super) options: RequestOptions,
    /// The part of the decision's deadline that lookups and earlier checks of the request have used.
    pub(super) spent: Duration,
}

impl RequestContext {
    /// Creates the context of a request: the subject of `identity` for each item of `kinds`, in order.
    ///
    /// `kinds` must be what the rules of the plan count by, in the order of the plan. `spent` is zero.
    pub(super) fn new<'a>(
        kinds: impl Iterator<Item = &'a Subjects>,
        identity: &Identity<'_>,
        options: RequestOptions,
    ) -> RequestContext {
        RequestContext {
            subjects: kinds.map(|kinds| identity.subject(kinds)).collect(),
            options,
            spent: Duration::ZERO,
        }
    }
}

/// A request before its limits are decided.
pub(super) enum Resolved {
    /// A ban, the maximum length of a path, or a shield refuses the request.
    Refused(Box<Refusal>),
    /// No rule applies, or the request is exempt. Always so while the kill switch is on, unless it is refused.
    Unlimited,
    /// The limits of a plan apply to the subjects of a request.
    Limited(Arc<CheckPlan>, RequestContext),
}

/// A request up to its first lookup.
#[allow(clippy::large_enum_variant)] // matched at once; most requests are the large variant
enum Step<'r> {
    /// The limits of the request, or `None` if no rule applies or it is exempt.
    Complete(Option<Limited>),
    /// The API key has to be looked up first.
    UnknownKey(Box<UnknownKey<'r>>),
}

/// A request with an API key that neither the rules nor the caches of lookups know.
struct UnknownKey<'r> {
    facts: Facts<'r>,
    rules: Matched<'r>,
    digest: KeyDigest,
}

/// A request to which rules apply, before the limit set of its caller is looked up.
struct Limited {
    /// The rules that apply.
    rules: Indices,
    limits: CallerLimits,
    /// The subject of each of `rules`, in the same order, and the request's options.
    context: RequestContext,
}

/// The limit set of a caller, or the question that a [`PlanLookup`](crate::rules::PlanLookup) must answer first.
enum CallerLimits {
    Known(LimitSet),
    /// The default one, if there is no lookup.
    Lookup(PlanQuestion),
}

impl Engine {
    /// Determines which limits apply to a request, by these rules. Reports bans, refusals by shields and exemptions to
    /// the observers.
    pub(super) async fn resolve(
        &self,
        active: &ActiveRules,
        request: &RequestView<'_>,
        peer: IpAddr,
        options: RequestOptions,
    ) -> Resolved {
        let lookups = &self.0.lookups;
        let mut spent = Duration::ZERO;
        let limited = match self.first_step(active, request, peer, options) {
            Ok(Step::Complete(limited)) => limited,
            Ok(Step::UnknownKey(unknown)) => {
                let start = Instant::now();
                let address = unknown.facts.identity().address_key();
                let known = Box::pin(lookups.find_key_from(address, &unknown.digest)).await;
                spent = start.elapsed();
                self.limit_known(active, *unknown, known, options)
            }
            Err(refusal) => return Resolved::Refused(refusal),
        };
        let Some(Limited { rules, limits, mut context }) = limited else { return Resolved::Unlimited };
        let limit_set = match limits {
            CallerLimits::Known(limit_set) => limit_set,
            CallerLimits::Lookup(question) if !lookups.has_plans() => {
                active.rules.default_limit_set(question.is_identified())
            }
            CallerLimits::Lookup(question) => {
                let start = Instant::now();
                let limit_set = Box::pin(lookups.limit_set_after(spent, &active.rules, &question)).await;
                spent += start.elapsed();
                limit_set
            }
        };
        context.spent = spent;
        Resolved::Limited(active.check_plan(rules, limit_set), context)
    }

    /// Runs the steps up to the first lookup.
    ///
    /// # Errors
    /// Returns the refusal by a ban, by the maximum length of paths, or by a shield.
    fn first_step<'r>(
        &self,
        active: &'r ActiveRules,
        request: &'r RequestView<'r>,
        peer: IpAddr,
        options: RequestOptions,
    ) -> Result<Step<'r>, Box<Refusal>> {
        let bans = self.run_time_bans();
        // If nothing before the limits depends on the time, the clock is not read.
        let needs_time = bans.is_some() || active.rules.depends_on_time();
        let now = if needs_time { self.0.clock.now() } else { Timestamp::ZERO };
        let facts = Facts::of_request(&active.rules, request, peer, bans, now);
        if let Some(ban) = facts.ban_of_address() {
            return Err(self.refuse_banned(&facts, ban, BannedBy::Address));
        }
        if facts.is_path_too_long() {
            return Err(Box::new(Refusal::PathTooLong { max_bytes: active.rules.path_bytes_max() }));
        }
        self.refuse_by_shield(active, &facts, options)?;
        let rules = facts.match_rules();
        if let Some(ban) = facts.ban_of_caller() {
            return Err(self.refuse_banned(&facts, ban, BannedBy::Caller));
        }
        let may_be_unknown = !rules.is_empty() && self.0.lookups.has_keys();
        let Some(digest) = may_be_unknown.then(|| facts.identity().unknown_api_key()).flatten() else {
            return Ok(Step::Complete(self.limit(active, &facts, rules, options)));
        };
        let unknown = UnknownKey { facts, rules, digest };
        Ok(match self.0.lookups.cached_key(&digest) {
            Some(known) => Step::Complete(self.limit_known(active, unknown, known, options)),
            None => Step::UnknownKey(Box::new(unknown)),
        })
    }

    /// Determines the limits of a caller, given what the lookups know about its API key. Logs a warning if a part of
    /// that is ignored, at most every ten seconds.
    ///
    /// `None` if none of the rules applies to the caller, or if it is exempt.
    fn limit_known(
        &self,
        active: &ActiveRules,
        UnknownKey { mut facts, rules, digest }: UnknownKey<'_>,
        known: Option<KnownKey>,
        options: RequestOptions,
    ) -> Option<Limited> {
        if let Some(known) = known {
            if let Some(problem) = active.rules.key_problem(&known)
                && self.0.key_warnings.opens_at(self.0.clock.now())
            {
                tracing::warn!(
                    field = digest.field_pattern(),
                    %problem,
                    "a part of the entry of an API key is ignored; the key stays known, and its plan or `default` applies"
                );
            }
            facts = facts.with_api_key(digest, known);
        }
        self.limit(active, &facts, rules, options)
    }

    /// Determines the limits of a caller whose API key is as known as it will be. `rules` are those that match the
    /// request.
    ///
    /// `None` if none of the rules applies to the caller, or if it is exempt.
    fn limit(
        &self,
        active: &ActiveRules,
        facts: &Facts<'_>,
        rules: Matched<'_>,
        options: RequestOptions,
    ) -> Option<Limited> {
        let identity = facts.identity();
        let rules = rules.of_caller(identity);
        if rules.is_empty() || active.rules.is_exempt(identity) {
            self.observe_exemption(&rules, identity);
            return None;
        }
        // The limits of rules that are not by plan are the same in every limit set.
        let limits = if rules.iter().any(CompiledRule::is_by_plan) {
            match facts.assigned_plan() {
                Some(plan) => CallerLimits::Known(plan.limit_set),
                None => CallerLimits::Lookup(PlanQuestion::about(identity)),
            }
        } else {
            CallerLimits::Known(active.rules.default_limit_set(false))
        };
        let context = RequestContext::new(rules.iter().map(CompiledRule::by), identity, options);
        Some(Limited { rules: rules.into_indices(), limits, context })
    }

    /// Returns the refusal by a ban, and reports it to the observers.
    #[cold]
    fn refuse_banned(&self, facts: &Facts<'_>, ban: MatchedBan<'_>, by: BannedBy) -> Box<Refusal> {
        let remaining = ban.remaining(facts.now());
        self.observe_ban(facts.identity(), by, remaining);
        Box::new(Refusal::Banned { remaining, source: ban.source() })
    }

    /// Refuses a request for which the shields have no room, unless its caller or path is exempt.
    ///
    /// If there is room, nothing is charged here: [`Engine::decide`] charges the shields later. If there is none,
    /// exemptions are looked up, and then the shields are checked. A denial charges the shields with `count_denied`, is
    /// counted for each rule, and is reported to the observers.
    ///
    /// # Errors
    /// Returns the denial, or a ban in the shields' store. If that store panics, or two shields count on one counter,
    /// returns the refusal as unavailable; after a panic only if the failure policy of a shield is `deny`, else the
    /// request passes.
    fn refuse_by_shield(
        &self,
        active: &ActiveRules,
        facts: &Facts<'_>,
        options: RequestOptions,
    ) -> Result<(), Box<Refusal>> {
        let rules = facts.match_shields();
        if rules.is_empty() {
            return Ok(());
        }
        let identity = facts.identity();
        let context = RequestContext::new(rules.iter().map(CompiledRule::by), identity, options);
        let plan = active.check_plan(rules.into_indices(), active.rules.default_limit_set(false));
        let Some(shield) = plan.shield.as_ref().filter(|shield| !self.has_room(shield, &context)) else {
            return Ok(());
        };
        if active.rules.is_exempt(identity) || self.is_exempt_in_cache(identity) || facts.has_exempt_path() {
            return Ok(());
        }
        match self.check_shield(shield, &context) {
            Ok(decision) if decision.allowed() => {
                // A unit became available after the preview. It is charged with all other limits.
                if let Ok(check) = shield.check(&shield.demands(&context)) {
                    catch_panic(|| self.0.shield.refund(&check, &decision));
                }
                Ok(())
            }
            refused => {
                let refused = shield.conclude(refused, &options);
                refused.map(drop).inspect_err(|refusal| self.observe_shield(shield, &context, refusal))
            }
        }
    }

    /// Returns whether each limit of the shields has the units that a request costs, without charging them.
    ///
    /// Also returns `false` if two limits count on one counter, or if the shields' store panics.
    fn has_room(&self, shield: &LimitGroup, context: &RequestContext) -> bool {
        let demands = shield.demands(context);
        let Ok(check) = Check::new(&demands) else { return false };
        catch_panic(|| self.0.shield.preview(&check)).is_some_and(|preview| preview.allowed())
    }

    /// Returns whether the last answer of a key lookup exempts the request's API key. `false` if none is cached.
    fn is_exempt_in_cache(&self, identity: &Identity<'_>) -> bool {
        if !self.0.lookups.has_keys() {
            return false;
        }
        // However old: the request goes on to a lookup, which uses that answer only if the source does not answer.
        let last = identity.unknown_api_key().and_then(|digest| self.0.lookups.last_key(&digest));
        last.is_some_and(|known| known.exempt)
    }
}
