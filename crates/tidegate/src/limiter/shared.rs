//! A shared store, which may not answer, and the chain of links that decides a check with it.
//!
//! ```text
//!   check ─▶ deny cache ─▶ store ─▶ local share ─▶ decision
//!               │ recall     │ ask      if the store did not decide, by the failure policies
//!               ▼            ▼
//!            denial       answer ─▶ learn: deny cache
//! ```
//!
//! `ask.rs` and `store_calls.rs` ask the store, `local_share.rs` decides without it.
//!
//! | link | recall, without a call | learn, from the store's answer | forget | refund |
//! |---|---|---|---|---|
//! | deny cache | a denial or a ban that holds | denials, exhausted limits, bans | a counter that is corrected or reset, a lifted ban | – |
//! | store | – | – | – | its own decisions (`ledger.rs`) |
//! | local share | – | – | a counter that is reset | its own decisions (`ledger.rs`) |
//!
//! A further link that decides in process is called in [`Shared::recall`], [`Shared::learn`] and [`Shared::forget`], and is
//! a variant of `Ledger` if it charges units.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use smallvec::SmallVec;
use tidegate_core::{Check, Clock, Decision, MemoryStore, Store, Timestamp};

use super::announcing::{self, Announcing};
use super::denied_parts::DeniedParts;
use super::health::Health;
use super::late_calls::LateCalls;
use super::local_share::LocalShare;
use super::parts::CheckAnswer;
use super::stats::Counters;
use super::{CheckOptions, LimiterBuilder};
use crate::deny_cache::{CallSpan, DenyCache, has_several_subjects};
use crate::failure::Unavailable;
use crate::observe::Observers;
use crate::run_to_completion::PendingWork;

/// A shared store with its deadline, circuit breaker and deny cache, and this instance's shares of the limits.
pub(super) struct Shared {
    pub(super) store: Arc<dyn Store>,
    /// The counters of this instance's shares.
    pub(super) local: MemoryStore,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) observers: Observers,
    pub(super) deny_cache: Option<DenyCache>,
    pub(super) denied_parts: DeniedParts,
    pub(super) late_calls: LateCalls,
    /// The checks on several servers whose callers are gone.
    pub(super) pending: Arc<PendingWork>,
    /// Whether a task is asking the store for the bans of the subjects of a check.
    pub(super) is_finding_ban: AtomicBool,
    pub(super) health: Health,
    pub(super) deadlines: Deadlines,
    /// The configured number of instances, which overrides the counted one.
    instances: Option<u32>,
    pub(super) announcing: Announcing,
}

/// The deadlines for an answer from the store.
#[derive(Clone, Copy)]
pub(super) struct Deadlines {
    /// For checks, and for all calls that are not decisions.
    pub(super) check: Duration,
    /// For the checks of [`Limiter::until_ready`](super::Limiter::until_ready).
    pub(super) ready: Duration,
}

impl Shared {
    /// Creates the parts of a limiter with this store. `local` holds the counters of this instance's shares.
    pub(super) fn new(
        store: Arc<dyn Store>,
        local: MemoryStore,
        observers: Observers,
        builder: &LimiterBuilder,
    ) -> Shared {
        Shared {
            store,
            local,
            clock: builder.clock.clone(),
            observers,
            deny_cache: builder.deny_cache.then(DenyCache::default),
            denied_parts: DeniedParts::default(),
            late_calls: LateCalls::default(),
            pending: Arc::default(),
            is_finding_ban: AtomicBool::new(false),
            health: Health::default(),
            deadlines: builder.deadlines(),
            instances: builder.instances,
            announcing: Announcing::new(builder.announces),
        }
    }

    /// Decides the checks by the first link of the chain that can. Returns one result per check, in order.
    ///
    /// The store has the time `deadline` to answer, less [`CheckOptions::spent`]. Calls to the store are counted in
    /// `counters`, decisions are not.
    pub(super) async fn check_batch(
        self: &Arc<Self>,
        checks: &[Check<'_>],
        options: &CheckOptions<'_>,
        deadline: Duration,
        counters: &Arc<Counters>,
    ) -> Vec<Result<Decision, Unavailable>> {
        announcing::start(self);
        let (budget, sent) = (time_left(deadline, options.spent), self.clock.now());
        let recalled = checks.iter().map(|check| self.recall(check, options, sent).map(Ok));
        let mut decided: Vec<Option<Result<Decision, Unavailable>>> = recalled.collect();
        let open = checks.iter().zip(&decided).filter(|(_, decided)| decided.is_none());
        let open: SmallVec<[Check<'_>; 1]> = open.map(|(check, _)| *check).collect();
        if !open.is_empty() {
            let answers = self.ask(&open, sent, budget, counters).await;
            let call = CallSpan { sent, received: self.clock.now().max(sent) };
            let mut rest = open.iter().zip(answers).map(|(check, answer)| match answer {
                Ok(answer) => {
                    self.learn(check, &answer, options, call);
                    let (CheckAnswer::Whole(decision) | CheckAnswer::Combined(decision)) = answer;
                    Ok(decision)
                }
                Err(failure) => self.local_share().decide(check, options, failure, self.clock.now()),
            });
            decided.iter_mut().filter(|decided| decided.is_none()).for_each(|decided| *decided = rest.next());
        }
        decided.into_iter().flatten().collect()
    }

    /// Returns the decision on a check that can be made without a call to the store.
    fn recall(&self, check: &Check<'_>, options: &CheckOptions<'_>, now: Timestamp) -> Option<Decision> {
        self.deny_cache_for(check, options)?.recall(check, now, options.may_omit)
    }

    /// Learns from the store's answer to a check.
    fn learn(self: &Arc<Self>, check: &Check<'_>, answer: &CheckAnswer, options: &CheckOptions<'_>, call: CallSpan) {
        let Some(cache) = self.deny_cache_for(check, options) else { return };
        match answer {
            CheckAnswer::Whole(decision) => {
                cache.learn(check, decision, call);
                if decision.ban.is_some() && has_several_subjects(check) {
                    self.find_banned_subjects(check);
                }
            }
            CheckAnswer::Combined(decision) => cache.learn_own(check, decision, options.each, call),
        }
    }

    /// Forgets what was learnt about the counters of a check.
    pub(super) fn forget(&self, check: &Check<'_>) {
        if let Some(cache) = &self.deny_cache {
            check.demands().iter().for_each(|demand| cache.forget(demand));
        }
    }

    /// Awaits a call that changes the counters of a check, and forgets what was learnt about them before and during it.
    pub(super) async fn forgetting<T>(&self, check: &Check<'_>, call: impl Future<Output = T>) -> T {
        self.forget(check);
        let result = call.await;
        self.forget(check);
        result
    }

    /// Returns the deny cache, unless the check must not use it: denials of refundable checks, and of those with
    /// `count_denied`, may end early.
    fn deny_cache_for(&self, check: &Check<'_>, options: &CheckOptions<'_>) -> Option<&DenyCache> {
        let lasts = !options.refundable && !check.demands().iter().any(|demand| demand.limit.count_denied());
        self.deny_cache.as_ref().filter(|_| lasts)
    }

    /// Returns this instance's shares of the limits.
    pub(super) fn local_share(&self) -> LocalShare<'_> {
        LocalShare { memory: &self.local, instances: self.instances() }
    }

    /// Returns the number of instances among which a quota is divided while the store does not answer: the configured
    /// one, else the last known number of those that share the store, else 1.
    pub(super) fn instances(&self) -> u32 {
        self.instances.unwrap_or_else(|| self.announcing.live_instances())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.announcing.withdraw_in_background(&self.store);
    }
}

/// Returns what is left of `time` after `spent`. `None` if all of it is spent.
pub(super) fn time_left(time: Duration, spent: Duration) -> Option<Duration> {
    if spent.is_zero() {
        return Some(time);
    }
    time.checked_sub(spent).filter(|left| !left.is_zero())
}
