//! The engine: applies rules to requests.
//!
//! ```text
//!   check ─▶ resolve ─▶ decide ─▶ Outcome
//!            resolve.rs  decide.rs
//! ```
//!
//! [`Engine::check`] first determines which limits apply to a request, or that it is refused without them (a ban, a path
//! that is too long, a shield without room). Then it decides them. Its caller (the Tower layer, the HTTP service) calls
//! [`Permit::finish`] after the work. With counters in memory and plans that need no lookup, the future is ready at its
//! first poll.
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
mod decide;
mod explicit;
mod observed;
mod permit;
mod refusal;
mod resolve;
mod rule_counts;
mod run_time_bans;

use std::any::Any;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tidegate_core::{Clock, MemoryStore, Redeemed, SystemClock};

use self::active_rules::ActiveRules;
pub use self::explicit::ExplicitResolver;
pub use self::permit::{Ending, Permit};
pub use self::refusal::Refusal;
pub use self::resolve::RequestOptions;
use self::resolve::Resolved;
pub use self::rule_counts::RuleStats;
use self::run_time_bans::RunTimeBans;
use crate::limiter::Limiter;
use crate::receipt::{Receipt, RedeemError, Settlement};
use crate::rules::{Lookups, RequestView, RuleSet, WarningGate};
use crate::run_to_completion::{PendingWork, RunToCompletion};

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

    /// Waits until all checks and refunds whose futures were dropped are complete, and then until the store has answered
    /// the calls that missed their deadlines and their charges are refunded. Call it before the process exits, when no
    /// more requests are accepted: it also waits for checks and refunds that are dropped in the meantime.
    ///
    /// Each call of the first kind ends at the limiter's deadline, those of the second within ten seconds. Checks and
    /// refunds whose futures still exist are not waited for.
    pub async fn wait_for_pending(&self) {
        self.0.pending.wait().await;
        self.0.limiter.wait_for_late_calls().await;
    }

    /// Corrects the charges of a receipt exactly once, no matter how often and by how many instances it is redeemed.
    ///
    /// # Errors
    /// Returns an error if the store does not answer, after which the receipt may be redeemed again, or if the receipt
    /// can be redeemed only by the process that issued it.
    pub async fn redeem(&self, receipt: &Receipt, settlement: Settlement) -> Result<Redeemed, RedeemError> {
        // Without a configuration, the receipts of shields are those of another engine.
        let shield = self.0.active.load().rules.is_configured().then_some(&self.0.shield);
        receipt.redeem(&self.0.limiter, shield, settlement).await
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
        let (plan, context) = match self.resolve(&active, request, peer, options).await {
            Resolved::Refused(refusal) => return Outcome::Refused(*refusal),
            Resolved::Unlimited => return Outcome::Admitted(Permit::unlimited(active.companion.clone())),
            Resolved::Limited(plan, context) => (plan, context),
        };
        let companion = active.companion.clone();
        drop(active);
        let mut outcome = if self.0.limiter.is_in_process() {
            self.decide(plan, context).await
        } else {
            self.follow_bans();
            let engine = self.clone();
            self.run_to_completion(async move { engine.decide(plan, context).await }).await
        };
        if let Outcome::Admitted(permit) = &mut outcome {
            permit.companion = companion;
        }
        outcome
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

/// Creates an engine without a configuration: it has no rules, and decides explicit checks by the limiter's settings.
impl From<Limiter> for Engine {
    fn from(limiter: Limiter) -> Engine {
        Engine::new(limiter, RuleSet::default())
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("limiter", &self.0.limiter).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
