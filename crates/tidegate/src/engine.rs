//! The engine: applies rules to requests.
//!
//! ```text
//!   identify ─▶ banned address? ─▶ path too long? ─▶ shield without room? ─▶ match_rules ─▶ banned key or user?
//!                                                                                                 │
//!   Outcome ◀─ decide ◀─ check_plan ◀─ limit_set ◀─ subjects, limits ◀─ groups, exempt? ◀─ unknown key: may call a
//!                                      may call a PlanLookup                               KeyLookup
//!
//!   decide:  shields, in process ─▶ all other enforced limits, one check ─▶ shadow rules (never refuse)
//! ```
//!
//! [`Engine::check`] runs these steps in order, in one function. Its caller (the Tower layer, the HTTP service) calls
//! [`Permit::finish`] after the work. With counters in memory and plans that need no lookup, the future is ready at its
//! first poll.
//!
//! **Cheap refusals come first.** A request from a banned address, with a path beyond the bound, or for which a shield
//! has no room is refused before its path is normalised, its key hashed, its token verified, or its key or plan looked
//! up. A shield without room admits a key that a lookup exempts only if the result of that lookup is cached.
//!
//! **One decision.** All enforced limits that apply, except those of shields, are decided together: the request passes
//! all of them, or none is charged (except limits with `count_denied`). Shields are decided first. A shield that has
//! admitted a request keeps its charge if another limit then refuses it, unless the shield charges `on_success`.
//!
//! **If the store does not answer**, the failure policy of each rule applies. One rule with `deny` refuses the request
//! as unavailable. The limits of rules with `local` are decided together by this instance's share. Those of rules
//! with `allow` are left out.
//!
//! **A client that disconnects** before the response stays charged, whatever `charge` says: only a response leads to a
//! refund. A check on a shared store that has started runs to completion without the client, so a client that resets
//! its requests as fast as it sends them is charged like any other. [`Engine::wait_for_pending`] waits for such checks.
//!
//! **A ban at run time** of an address, a network, an API key or a user is an entry of the store's ban list. The engine
//! has a copy of the list (`run_time_bans.rs`), and refuses such requests in the same steps as bans in the
//! configuration, whichever rules apply, also while the store does not answer.
//!
//! **A ban on another subject** ([`Store::ban`](crate::Store::ban)) refuses a request if a rule that applies counts the
//! banned subject in the store, even in shadow mode. It is read with the counters.
//!
//! **A reload** replaces the whole rule set, together with what else belongs to the configuration, such as the upstreams
//! of the gateway ([`Engine::reload_with`]). Requests in progress finish under the rules they started with. Counters are
//! identified by rule and limit, so they survive.

mod active_rules;
mod check_plan;
mod observed;
mod permit;
mod refusal;
mod request;
mod rule_counts;
mod run_time_bans;
mod run_to_completion;

use std::any::Any;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::future::join_all;
use tidegate_core::{Check, Clock, Decision, MemoryStore, Redeemed, StoreError, SystemClock, Timestamp};
use tokio::time::Instant;

use self::active_rules::{ActiveRules, Limits};
use self::check_plan::{CheckPlan, LimitGroup, Undecided};
use self::permit::{ChargeList, Charges, GroupId, RefundReason};
pub use self::permit::{Ending, Permit};
pub use self::refusal::Refusal;
use self::request::RequestContext;
pub use self::request::RequestOptions;
pub use self::rule_counts::RuleStats;
use self::run_time_bans::RunTimeBans;
use self::run_to_completion::{PendingWork, RunToCompletion};
use crate::identity::{AddressKey, Identity, KeyDigest, KnownKey};
use crate::limiter::{CheckOptions, Limiter, catch_panic, panicked};
use crate::observe::BannedBy;
use crate::receipt::{Receipt, RedeemError, Settlement};
use crate::rules::{CompiledRule, Indices, LazyReadings, Lookups, RequestView, RuleSet, WarningGate};

/// Applies rules to requests, and decides whether they are admitted.
///
/// Clones are cheap and share everything.
///
/// ```
/// use tidegate::Limiter;
/// use tidegate::config::{Config, Format};
/// use tidegate::engine::{Engine, Outcome, RequestOptions};
/// use tidegate::rules::RequestView;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let loaded = Config::from_text("[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"1/min\"]", Format::Toml)?;
/// let engine = Engine::new(Limiter::memory(), loaded.rules);
///
/// let request = http::Request::get("/").body(())?;
/// let (view, peer) = (RequestView::of(&request), [203, 0, 113, 9].into());
/// assert!(matches!(engine.check(&view, peer, RequestOptions::default()).await, Outcome::Admitted(_)));
/// let Outcome::Refused(refusal) = engine.check(&view, peer, RequestOptions::default()).await else { panic!() };
/// assert_eq!(refusal.response(request.headers()).status(), 429);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Engine(Arc<Inner>);

struct Inner {
    limiter: Limiter,
    shield: MemoryStore,
    active: ArcSwap<ActiveRules>,
    lookups: Lookups,
    clock: Arc<dyn Clock>,
    pending: Arc<PendingWork>,
    bans: RunTimeBans,
    key_warnings: WarningGate,
}

/// A value that is put into use together with the rules, in one step: a request that is decided by some rules gets the
/// companion of these rules. The gateway's upstreams are one.
#[doc(hidden)]
pub type Companion = Arc<dyn Any + Send + Sync>;

/// The result of [`Engine::check`]: a permit or a refusal.
#[derive(Debug)]
#[must_use]
#[allow(clippy::large_enum_variant)] // callers match on it at once; boxing the refusal would only be in their way
pub enum Outcome {
    /// The request may proceed, after the delay [`Permit::wait`].
    Admitted(Permit),
    /// The request must not proceed.
    Refused(Refusal),
}

/// A request before its limits are decided.
#[allow(clippy::large_enum_variant)] // matched at once; most requests are the large variant
enum Prepared {
    /// No rule applies, or the request is exempt.
    Unlimited,
    /// Rules apply.
    Limited(Limited),
    /// The API key with this digest, from a client with this address, has to be looked up first.
    UnknownKey(KeyDigest, AddressKey),
}

/// A request to which rules apply, before the limit set of its caller is looked up.
struct Limited {
    /// The rules that apply.
    rules: Indices,
    /// The limit set of the caller, or the question for the lookups.
    limits: Limits,
    /// The subject of each of `rules`, in the same order, and the request's options.
    context: RequestContext,
}

impl Engine {
    /// Creates an engine with these rules, the system's clock and no lookups. Shield rules count in a memory store of
    /// their own, with the default cap.
    pub fn new(limiter: Limiter, rules: RuleSet) -> Engine {
        Engine::with_lookups(limiter, rules, Lookups::new())
    }

    /// Creates an engine that calls `lookups` for API keys that the rules do not list, and for callers whose plan the
    /// rules do not determine.
    ///
    /// Sources are called one after the other, until one knows the key, or returns a plan that exists. If none knows
    /// the key, the key is unknown. If none returns a plan, the caller has the plan `default`, or `anonymous` if only
    /// its address identifies it. If `lookups` have no deadline of their own, they get that of `limiter`.
    pub fn with_lookups(limiter: Limiter, rules: RuleSet, lookups: impl Into<Lookups>) -> Engine {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        Engine::on_clock(limiter, rules, lookups, clock)
    }

    /// Creates an engine that uses `clock` to time bans in the configuration, identities (tokens, pseudonyms) and
    /// shield rules. For tests.
    ///
    /// The limiter keeps its own clock. See [`with_lookups`](Engine::with_lookups) for `lookups`.
    pub fn on_clock(limiter: Limiter, rules: RuleSet, lookups: impl Into<Lookups>, clock: Arc<dyn Clock>) -> Engine {
        let shield = MemoryStore::builder().clock(clock.clone()).build();
        Engine::of_parts(limiter, rules, lookups.into(), clock, shield)
    }

    /// Creates an engine whose shield rules count in `shield`, by the clock of that store. The other constructors
    /// create a store with the default cap.
    ///
    /// Bans in the configuration and identities use the system's clock. See [`with_lookups`](Engine::with_lookups) for
    /// `lookups`.
    pub fn with_shield(limiter: Limiter, rules: RuleSet, lookups: impl Into<Lookups>, shield: MemoryStore) -> Engine {
        Engine::of_parts(limiter, rules, lookups.into(), Arc::new(SystemClock::new()), shield)
    }

    fn of_parts(
        limiter: Limiter,
        rules: RuleSet,
        lookups: Lookups,
        clock: Arc<dyn Clock>,
        shield: MemoryStore,
    ) -> Engine {
        let active = ArcSwap::from_pointee(ActiveRules::new(rules, None));
        let lookups = lookups.or_deadline(limiter.deadline());
        let (pending, bans, key_warnings) = (Arc::default(), RunTimeBans::default(), WarningGate::default());
        let engine = Engine(Arc::new(Inner { limiter, shield, active, lookups, clock, pending, bans, key_warnings }));
        engine.follow_bans();
        engine
    }

    /// Replaces the rules, and reports this to the observers. Requests in progress finish under the old ones.
    ///
    /// Counters are kept. So are the [statistics](Engine::rule_stats) of rules whose name stays; those of removed rules
    /// are dropped.
    pub fn reload(&self, rules: RuleSet) {
        self.0.active.rcu(|before| ActiveRules::new(rules.clone(), Some(before)));
        self.observe_reload(&rules);
    }

    /// Replaces the rules and their [companion](Companion) in one step, and reports this to the observers, like
    /// [`reload`](Engine::reload).
    #[doc(hidden)] // for the gateway
    pub fn reload_with(&self, rules: RuleSet, companion: Companion) {
        self.0.active.rcu(|before| ActiveRules::new(rules.clone(), Some(before)).with_companion(companion.clone()));
        self.observe_reload(&rules);
    }

    /// Sets the [companion](Companion) of the rules in use. A [`reload`](Engine::reload) keeps it.
    #[doc(hidden)] // for the gateway
    pub fn set_companion(&self, companion: Companion) {
        let active = &self.0.active;
        active.rcu(|before| ActiveRules::new(before.rules.clone(), Some(before)).with_companion(companion.clone()));
    }

    /// Returns the [companion](Companion) of the rules in use, or `None` if none was set.
    #[doc(hidden)] // for the gateway
    pub fn companion(&self) -> Option<Companion> {
        self.0.active.load().companion.clone()
    }

    /// Returns the limiter.
    pub fn limiter(&self) -> &Limiter {
        &self.0.limiter
    }

    /// Returns the lookups of plans and API keys of this engine, whose statistics can be read. Empty if none were set.
    pub fn lookups(&self) -> &Lookups {
        &self.0.lookups
    }

    /// Returns the store of the shield rules' counters, which is in this process whatever the limiter's store is.
    pub fn shield(&self) -> &MemoryStore {
        &self.0.shield
    }

    /// Returns the statistics of the rules in use, in their order: one entry for the current mode of each rule, and one
    /// for another mode in which it has decided requests. A rule in the mode `off` has an entry only if it has decided
    /// requests in another mode.
    ///
    /// A rule that a reload keeps, by its name, continues its statistics.
    pub fn rule_stats(&self) -> Vec<RuleStats> {
        self.0.active.load().stats()
    }

    /// Waits until all checks and refunds whose futures were dropped are complete. Call it before the process exits,
    /// when no more requests are accepted: it also waits for those that are dropped in the meantime.
    ///
    /// Each call to the store that is waited for ends at the limiter's deadline. Checks and refunds whose futures still
    /// exist are not waited for.
    pub async fn wait_for_pending(&self) {
        self.0.pending.wait().await;
    }

    /// Corrects the charges of a receipt exactly once, no matter how often and by how many instances it is redeemed.
    ///
    /// # Errors
    /// Returns an error if the store does not answer, after which the receipt may be redeemed again, or if the receipt
    /// can be redeemed only by the process that issued it.
    pub async fn redeem(&self, receipt: &Receipt, settlement: Settlement) -> Result<Redeemed, RedeemError> {
        receipt.redeem(&self.0.limiter, Some(&self.0.shield), settlement).await
    }

    /// Returns the rules in use. A reload replaces them for later calls.
    pub fn rules(&self) -> RuleSet {
        self.0.active.load().rules.clone()
    }

    /// Decides a request from `peer`, the remote address of its connection, by the rules in use, and charges the limits
    /// that apply.
    ///
    /// Refuses a request that the configuration bans, or whose path is too long, even if no rule applies or it is
    /// exempt. Any other request to which no rule applies, or which is exempt, is admitted. Otherwise the decision of
    /// each rule is counted in [`rule_stats`](Engine::rule_stats). While the kill switch is on, every request is
    /// admitted.
    ///
    /// Observers are called before this returns. Call [`Permit::finish`] when the response is known.
    ///
    /// If the returned future is dropped while it waits for a shared store, the check runs to completion and its charge
    /// is kept. If it is dropped earlier, while a key or a plan is looked up, nothing is charged.
    pub async fn check(&self, request: &RequestView<'_>, peer: IpAddr, options: RequestOptions) -> Outcome {
        let active = self.0.active.load();
        let (mut looked_up, mut spent) = (None, Duration::ZERO);
        let Limited { rules, limits, mut context } = loop {
            match self.prepare(&active, request, peer, options, looked_up.take()) {
                Ok(Prepared::Limited(limited)) => break limited,
                Ok(Prepared::Unlimited) => return Outcome::Admitted(Permit::unlimited(active.companion.clone())),
                Ok(Prepared::UnknownKey(digest, address)) => {
                    let start = Instant::now();
                    let known = Box::pin(self.0.lookups.find_key_from(address, &digest)).await;
                    spent += start.elapsed();
                    looked_up = Some((digest, known));
                }
                Err(refusal) => return Outcome::Refused(*refusal),
            }
        };
        let (limit_set, spent) = active.limit_set(limits, &self.0.lookups, spent).await;
        context.spent = spent;
        let plan = active.check_plan(rules, limit_set);
        let companion = active.companion.clone();
        drop(active);
        let mut outcome = match self.0.limiter.is_in_process() {
            true => self.decide(plan, context).await,
            false => {
                self.follow_bans();
                let engine = self.clone();
                self.run_to_completion(async move { engine.decide(plan, context).await }).await
            }
        };
        if let Outcome::Admitted(permit) = &mut outcome {
            permit.companion = companion;
        }
        outcome
    }

    /// Runs the steps that need neither the limiter nor a lookup, and reports bans, refusals by shields and exemptions
    /// to the observers.
    ///
    /// Returns the rules and subjects of the request; [`Prepared::Unlimited`] if no rule applies to it (always while
    /// the kill switch is on) or it is exempt; or [`Prepared::UnknownKey`] if its key has to be looked up first, and
    /// the answer is not cached. `looked_up` is then the result, in a second call.
    ///
    /// # Errors
    /// Returns the refusal by a ban in the configuration, by the maximum length of paths, or by a shield.
    fn prepare(
        &self,
        active: &ActiveRules,
        request: &RequestView<'_>,
        peer: IpAddr,
        options: RequestOptions,
        looked_up: Option<(KeyDigest, Option<KnownKey>)>,
    ) -> Result<Prepared, Box<Refusal>> {
        let bans = self.run_time_bans().filter(|_| !active.rules.is_off());
        let now = active.now(&*self.0.clock, bans.is_some());
        let mut identity = active.identify(request, peer, now);
        let path = LazyReadings::of(request.path());
        if looked_up.is_none() {
            let banned = active.refuse_banned_address(&identity, now).and_then(|()| {
                run_time_bans::refuse_banned(bans.as_ref().and_then(|bans| bans.of_address(&identity, now)), now)
            });
            banned.inspect_err(|refusal| self.observe_ban(&identity, BannedBy::Address, refusal))?;
            active.refuse_long_path(request)?;
            self.refuse_by_shield(active, request, &path, &identity, options)?;
        }
        let rules = active.match_rules(request, &path);
        let banned = active.refuse_banned_caller(&identity, now).and_then(|()| {
            run_time_bans::refuse_banned(bans.as_ref().and_then(|bans| bans.of_caller(&identity, now)), now)
        });
        banned.inspect_err(|refusal| self.observe_ban(&identity, BannedBy::Caller, refusal))?;
        let found = match looked_up {
            Some((digest, known)) => known.map(|known| (digest, known)),
            None if rules.is_empty() || !self.0.lookups.has_keys() => None,
            None => match identity.unknown_api_key() {
                Some(digest) => match self.0.lookups.cached_key(&digest) {
                    Some(known) => known.map(|known| (digest, known)),
                    None => return Ok(Prepared::UnknownKey(digest, identity.address_key())),
                },
                None => None,
            },
        };
        if let Some((digest, known)) = found {
            self.warn_about_key(&active.rules, &digest, &known);
            identity = identity.with_api_key(digest, known);
        }
        let rules = rules.of_caller(&identity);
        if rules.is_empty() || active.is_exempt(&identity) {
            self.observe_exemption(&rules, &identity);
            return Ok(Prepared::Unlimited);
        }
        let limits = active.resolve_limits(&identity, &rules, self.0.lookups.has_plans());
        let context = RequestContext::new(rules.iter().map(CompiledRule::by), &identity, options);
        Ok(Prepared::Limited(Limited { rules: rules.into_indices(), limits, context }))
    }

    /// Logs a warning if a part of what a lookup found about an API key is ignored, at most every ten seconds.
    fn warn_about_key(&self, rules: &RuleSet, digest: &KeyDigest, known: &KnownKey) {
        if let Some(problem) = rules.key_problem(known)
            && self.0.key_warnings.opens_at(self.0.clock.now())
        {
            tracing::warn!(
                field = digest.field_pattern(),
                %problem,
                "a part of the entry of an API key is ignored; the key stays known, and its plan or `default` applies"
            );
        }
    }

    /// Refuses a request for which the shields have no room, unless its caller or path is exempt. `path` must hold the
    /// readings of the request's path.
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
        request: &RequestView<'_>,
        path: &LazyReadings<'_>,
        identity: &Identity<'_>,
        options: RequestOptions,
    ) -> Result<(), Box<Refusal>> {
        if !active.has_shields {
            return Ok(());
        }
        let rules = active.rules.matching_shields(request, path);
        if rules.is_empty() {
            return Ok(());
        }
        let context = RequestContext::new(rules.iter().map(CompiledRule::by), identity, options);
        let plan = active.check_plan(rules.into_indices(), active.rules.default_limit_set(false));
        let Some(shield) = plan.shield.as_ref().filter(|shield| !self.has_room(shield, &context)) else {
            return Ok(());
        };
        if active.is_exempt(identity) || self.is_exempt_in_cache(identity) || active.rules.is_exempt_path(path) {
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

    /// Decides all limits of a plan. `context` must have the subjects of the plan's rules.
    ///
    /// If a group of limits refuses after others were charged, these are refunded as after a failed response: only
    /// rules with `charge = "on_success"` get their units back. If the limits admit the request but its wait exceeds
    /// `max_wait`, all charges are refunded, and the request is refused.
    async fn decide(&self, plan: Arc<CheckPlan>, mut context: RequestContext) -> Outcome {
        let (options, mut charges) = (context.options, ChargeList::new());
        let decided = self.check_groups(&plan, &mut context, &mut charges).await;
        let charges = Charges::new(self, &plan, context, charges);
        let (reason, refusal) = match (decided, options.max_wait, plan.shown()) {
            (Ok(Some(decision)), Some(max_wait), Some(shown))
                if charges.is_some() && plan.wait(&decision) > max_wait =>
            {
                (RefundReason::Withdrawn, Box::new(shown.withdrawal(decision, max_wait)))
            }
            (Ok(decision), ..) => return Outcome::Admitted(Permit::new(plan, decision, charges)),
            (Err(refusal), ..) => (RefundReason::Ended(Ending::Failure), refusal),
        };
        if let Some(charges) = charges {
            Box::pin(charges.refund(reason)).await;
        }
        Outcome::Refused(*refusal)
    }

    /// Checks the shields, then all other enforced limits together, then the shadow rules. Stops at the first refusal.
    /// The limits of a shadow rule never refuse; a ban in the store does.
    ///
    /// Counts the decision of each rule, and reports refusals by shields to the observers. Returns the decision that
    /// the client is shown ([`CheckPlan::shown`]), or `None` if only shadow rules apply.
    ///
    /// Adds each charged group to `charges`, also before an error, if its units may have to be refunded: a rule refunds
    /// by the response, or the request may be withdrawn because of its wait.
    ///
    /// # Errors
    /// Returns the refusal of the first group that refuses, by a limit, a ban in the store or the failure policy
    /// `deny`.
    async fn check_groups(
        &self,
        plan: &CheckPlan,
        context: &mut RequestContext,
        charges: &mut ChargeList,
    ) -> Result<Option<Decision>, Box<Refusal>> {
        let (options, is_shared) = (context.options, !self.0.limiter.is_in_process());
        let began = is_shared.then(Instant::now);
        // A refund in this instance's share ends no denial that the store has made.
        let is_withdrawable = plan.may_be_withdrawn(&options, false);
        let may_be_withdrawn = plan.may_be_withdrawn(&options, is_shared);
        let mut charge = |id: GroupId, group: &LimitGroup, decision: &Decision| {
            if (group.is_refundable || may_be_withdrawn) && decision.allowed() {
                charges.push((id, decision.clone()));
            }
        };
        let mut shown = None;
        for (id, group) in [(GroupId::Shield, &plan.shield), (GroupId::Enforced, &plan.enforced)] {
            let Some(group) = group else { continue };
            let decision = group.conclude(self.check_group(group, context, is_withdrawable).await, &options);
            let decision = decision.inspect_err(|refusal| {
                if id == GroupId::Shield {
                    self.observe_shield(group, context, refusal);
                }
            })?;
            charge(id, group, &decision);
            shown = Some(decision);
        }
        if !plan.shadow.is_empty() {
            // All calls of a request share one deadline.
            context.spent += began.map_or(Duration::ZERO, |began| began.elapsed());
            Box::pin(self.check_shadow(plan, context, is_withdrawable, charge)).await?;
        }
        Ok(shown)
    }

    /// Checks the limits of all shadow rules at the same time, so that a request waits for them once, and counts their
    /// decisions.
    ///
    /// Calls `charge` for each group that was decided, admitted or not. `is_withdrawable` is as in
    /// [`Engine::check_group`].
    ///
    /// # Errors
    /// Returns the refusal by a ban in the store: shadow mode turns off limits, not bans.
    async fn check_shadow(
        &self,
        plan: &CheckPlan,
        context: &RequestContext,
        is_withdrawable: bool,
        mut charge: impl FnMut(GroupId, &LimitGroup, &Decision),
    ) -> Result<(), Box<Refusal>> {
        let checks = plan.shadow.iter().map(|shadow| self.check_group(shadow, context, is_withdrawable));
        let mut banned = None;
        for ((index, shadow), result) in plan.shadow.iter().enumerate().zip(join_all(checks).await) {
            let Ok(decision) = result else { continue };
            match Refusal::by_ban(&decision) {
                Some(refusal) => banned = Some(refusal),
                None => shadow.count(&decision, &context.options),
            }
            charge(GroupId::Shadow(index), shadow, &decision);
        }
        banned.map_or(Ok(()), |banned| Err(Box::new(banned)))
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

    /// Checks the limits of a group of shields, which charges them.
    ///
    /// If the shields' store panics, returns an uncounted admission, or an error if the failure policy of a limit is
    /// `deny`. Also returns an error if two limits count on one counter.
    fn check_shield(&self, group: &LimitGroup, context: &RequestContext) -> Result<Decision, Undecided> {
        let demands = group.demands(context);
        let check = group.check(&demands)?;
        match catch_panic(|| self.0.shield.check(&check)) {
            Some(decision) => Ok(decision),
            None if group.denies_on_failure() => Err(Undecided::NoAnswer),
            // Not the time: the clock may be what panicked.
            None => Ok(Decision::uncounted(Timestamp::ZERO)),
        }
    }

    /// Checks the limits of a group together, in the shields' store or by the limiter.
    ///
    /// `is_withdrawable` says that a charge in the store may be refunded because of the request's wait. Then denials are
    /// not cached, as for a group that refunds by the response.
    ///
    /// # Errors
    /// Returns an error if the store does not answer and the failure policy of a limit is `deny`, or if two limits
    /// count on one counter.
    async fn check_group(
        &self,
        group: &LimitGroup,
        context: &RequestContext,
        is_withdrawable: bool,
    ) -> Result<Decision, Undecided> {
        if group.is_shield {
            return self.check_shield(group, context);
        }
        let demands = group.demands(context);
        let check = group.check(&demands)?;
        let options = CheckOptions {
            on_failure: None,
            refundable: group.is_refundable || is_withdrawable,
            each: &group.each,
            may_omit: true,
            spent: context.spent,
        };
        self.0.limiter.check_with(&check, options).await.map_err(|_unavailable| Undecided::NoAnswer)
    }

    /// Refunds a decision on limits of a group, in the store in which they were charged: the shields' store, the
    /// limiter's store, or this instance's share.
    ///
    /// `check` must have exactly the limits of `decision`, in the same order; they may be a part of the group. A denial
    /// and an uncounted admission refund nothing. Call it at most once per decision.
    ///
    /// # Errors
    /// Returns an error if the store does not answer or panics. The refund is then lost.
    async fn refund(&self, group: &LimitGroup, check: &Check<'_>, decision: &Decision) -> Result<(), StoreError> {
        match group.is_shield {
            true => catch_panic(|| self.0.shield.refund(check, decision)).ok_or_else(panicked),
            false => self.0.limiter.refund(check, decision).await,
        }
    }

    /// Runs work on a shared store to completion, even if the returned future is dropped after its first poll.
    /// [`Engine::wait_for_pending`] waits for it.
    fn run_to_completion<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> RunToCompletion<T> {
        RunToCompletion::new(self.0.pending.clone(), work)
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("limiter", &self.0.limiter).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
