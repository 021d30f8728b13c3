//! The engine: a request in, an answer out, by the rules.
//!
//! ```text
//!   address ─▶ banned? ─▶ path too long? ─▶ shields without room? ─▶ which rules match ─▶ key or user banned? ─▶ exempt? ─▶ which plan
//!                                                                                                                      │
//!        ┌─────────────────────────────────────────────────────────────────────────────────────────────────────────────┘
//!        ▼
//!   shield rules, in process ─▶ all enforced rules, one decision ─▶ shadow rules, each for itself
//!        │ denied                    │ denied                            (only if admitted; never a veto)
//!        ▼                           ▼
//!      refusal                     refusal
//! ```
//!
//! Whoever serves requests (the Tower layer, the decision service) calls [`Engine::decide`] before the work and
//! [`Passage::finish`] after it, and translates; there is no other way through.
//!
//! **What refuses cheaply comes first.** A request from a banned address, with a path beyond the bound, or for which a shield has no
//! room is refused before its path is normalised, its key hashed, its token verified or its plan looked up.
//!
//! **One decision.** All enforced rules that match are decided together: the request passes all their limits or is charged by none.
//!
//! **When the store does not answer**, each rule's own word counts: if one of them says `deny`, the request is unavailable; those that say
//! `local` are decided by this node's share, together; those that say `allow` are left out.
//!
//! **A client that leaves** before the response keeps its charge, whatever `charge` says: only a response earns a refund. A check of a
//! shared store that was begun is finished without the client ([`Engine::settled`] waits for these). So a client that resets its
//! requests as fast as it sends them is charged like any other.
//!
//! **In process nothing waits.** With counters in memory, and plans that need no lookup, a decision is made where it is asked for, without a task or
//! an await, and in the place from which it will be told: moving what was just written is a good part of what such a decision costs.
//!
//! **A reload** swaps the rules whole. Requests that are under way finish by the rules they began with; counters are named by rule
//! and limit, so they live on.

mod assured;
mod caller;
mod live;
mod passage;
mod refused;
mod rule_counts;
mod ruling;

use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::HeaderMap;
use tokio::time::Instant;
use tollgate_core::{Check, Clock, Cost, Decision, MemoryStore, StoreError, SystemClock};

use self::assured::{Assured, Pending};
use self::caller::Plan;
pub(crate) use self::live::Terms;
use self::live::{Asked, Group, Live};
pub use self::passage::{Ending, Passage};
pub use self::refused::Refused;
pub use self::rule_counts::RuleStats;
use self::ruling::Ruling;
use crate::limiter::{Limiter, catch_panic, panicked};
use crate::rules::{Indices, LimitSetId, PlanLookup, RequestView, RuleSet};

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
    pending: Arc<Pending>,
}

/// What became of a request.
#[derive(Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant)] // whoever asks takes it apart at once; a box would only be in the way
pub enum Outcome {
    /// It goes on.
    Pass(Passage),
    /// It does not.
    Refuse(Refused),
}

/// A request that was looked at. What is rare is boxed, so that what is common moves few bytes.
pub(crate) enum Begun {
    /// It goes on.
    Pass(Passage),
    /// It does not.
    Refuse(Box<Refused>),
    /// Somebody has to be asked.
    Asking(Box<Asking>),
}

/// A request whose plan or whose counters are not here.
pub(crate) struct Asking {
    engine: Engine,
    live: Arc<Live>,
    /// The rules that match.
    rules: Indices,
    plan: Plan,
    asked: Asked,
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
        Engine::of_parts(limiter, rules, lookups, clock, shield)
    }

    /// Builds an engine whose shield rules count in `shield`. Defaults to a store with the default cap.
    pub fn with_shield(
        limiter: Limiter,
        rules: RuleSet,
        lookups: Vec<Arc<dyn PlanLookup>>,
        shield: MemoryStore,
    ) -> Engine {
        Engine::of_parts(limiter, rules, lookups, Arc::new(SystemClock::new()), shield)
    }

    fn of_parts(
        limiter: Limiter,
        rules: RuleSet,
        lookups: Vec<Arc<dyn PlanLookup>>,
        clock: Arc<dyn Clock>,
        shield: MemoryStore,
    ) -> Engine {
        let live = ArcSwap::from_pointee(Live::new(rules, None));
        Engine(Arc::new(Inner { limiter, shield, live, lookups, clock, pending: Arc::default() }))
    }

    /// From here on these rules hold. Requests under way finish by the old ones; counters live on.
    pub fn reload(&self, rules: RuleSet) {
        self.0.live.rcu(|before| Live::new(rules.clone(), Some(before)));
    }

    /// The limiter that it asks.
    pub fn limiter(&self) -> &Limiter {
        &self.0.limiter
    }

    /// Who is asked for plans that the rules do not know.
    pub fn lookups(&self) -> &[Arc<dyn PlanLookup>] {
        &self.0.lookups
    }

    /// Where the counters of shield rules are: in this process, whatever the limiter's store.
    pub fn shield(&self) -> &MemoryStore {
        &self.0.shield
    }

    /// What each rule has said, over all reloads that kept its name.
    pub fn rule_stats(&self) -> Vec<RuleStats> {
        self.0.live.load().stats()
    }

    /// Waits until everything is given back that requests left behind which nobody waited for to their end. Before a
    /// process ends, it should; the wait is no longer than the limiter's deadline allows.
    pub async fn settled(&self) {
        self.0.pending.none().await;
    }

    /// Decides a request that came from `peer`, the other end of its socket.
    pub async fn decide(&self, request: &RequestView<'_>, peer: IpAddr) -> Outcome {
        self.decide_with_cost(request, peer, None).await
    }

    /// The same for a request that costs more or less than its rules say.
    pub async fn decide_with_cost(&self, request: &RequestView<'_>, peer: IpAddr, cost: Option<Cost>) -> Outcome {
        match self.begin(request, peer, Terms { cost, wait_max: None }) {
            Begun::Pass(passage) => Outcome::Pass(passage),
            Begun::Refuse(refused) => Outcome::Refuse(*refused),
            Begun::Asking(asking) => asking.outcome(request.headers()).await,
        }
    }

    /// Whether every counter is in this process, so that no decision waits for anybody.
    fn is_in_process(&self) -> bool {
        self.0.limiter.is_in_process()
    }

    fn pending(&self) -> Arc<Pending> {
        self.0.pending.clone()
    }

    async fn refund(&self, group: &Group, check: &Check<'_>, decision: &Decision) -> Result<(), StoreError> {
        if group.is_in_process {
            return catch_panic(|| self.0.shield.refund(check, decision)).ok_or_else(panicked);
        }
        self.0.limiter.refund(check, decision).await
    }
}

impl Asking {
    /// Asks whoever has to be asked. Once a store has been asked, its answer is waited for, by somebody else if need be.
    pub(crate) async fn outcome(self, request: &HeaderMap) -> Outcome {
        let Asking { engine, live, rules, plan, mut asked } = self;
        let limit_set: LimitSetId = match plan {
            Plan::Known(limit_set) => limit_set,
            Plan::Asked(question) => {
                let begun = Instant::now();
                let limit_set = live.rules.look_up_limit_set(&question, &engine.0.lookups).await;
                asked.spent = begun.elapsed();
                limit_set
            }
        };
        let bundle = live.bundle_of(rules, limit_set);
        let pending = engine.pending();
        let ruling: Ruling = Assured::new(pending, async move { engine.rule(&bundle, &mut asked).await }).await;
        match ruling {
            Ruling::Pass(passage) => Outcome::Pass(passage),
            Ruling::Refuse(refusal) => Outcome::Refuse(refusal.told(request)),
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("limiter", &self.0.limiter).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
