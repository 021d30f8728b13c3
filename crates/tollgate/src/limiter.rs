//! The limiter: a store, and everything that keeps a service alive when the store is not.
//!
//! ```text
//!   check ─▶ deny cache ─▶ breaker ─▶ store, within the deadline ─▶ decision
//!               │ hit         │ open        │ failed
//!               ▼             └─────────────┴──▶ local share / allow / deny
//!            denial
//! ```
//!
//! In process memory none of this is needed and none of it is there: the decision is a function call.
//!
//! **One deadline for the whole decision**, the connection included. An answer that comes later is thrown away by
//! whoever made the call; it can never be taken for the answer to another request, because each call owns
//! its own future. Whether a call that timed out was executed is unknown, so it is never repeated.
//!
//! **Nothing panics through.** A panic in a store, shared or in process, is a failure like any other. So is a call outside a tokio
//! runtime: nothing there could end a wait for the store, so it is not asked.

mod fair_queue;
mod probing;
mod ready;
mod settle;
mod shared;
mod stats;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use tollgate_core::{
    Check, Clock, Decision, Demand, Key, Limit, LimitStatus, MemoryStore, Source, Store, StoreError, StoreErrorKind,
    SystemClock, Timestamp,
};

use self::fair_queue::FairQueues;
pub use self::ready::NotReady;
use self::shared::{Shared, SharedParts};
use self::stats::Counters;
pub use self::stats::LimiterStats;
use crate::failure::{CheckKeyError, FailurePolicy, OnFailure, Unavailable};
use crate::observe::{Observer, Observers};

/// No decision waits longer, unless said otherwise.
const DEADLINE_DEFAULT: Duration = Duration::from_millis(25);

/// Decides requests, in memory or on a shared store. Cloning it is cheap, and clones share everything.
///
/// ```
/// use tollgate::{Check, Demand, Key, Limit, Limiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::memory();
/// let limit: Limit = "2/min".parse()?;
/// let demand = Demand::new(limit, Key::new("user:42")?);
///
/// assert!(limiter.check(&Check::one(&demand)).await?.allowed());
/// assert!(limiter.check(&Check::one(&demand)).await?.allowed());
/// assert!(!limiter.check(&Check::one(&demand)).await?.allowed());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Limiter(Arc<Inner>);

struct Inner {
    backend: Backend,
    clock: Arc<dyn Clock>,
    counters: Counters,
    observers: Observers,
    turns: FairQueues,
    on_failure: OnFailure,
}

enum Backend {
    Memory(MemoryStore),
    Shared(Arc<Shared>),
}

/// What a check says beyond its demands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CheckOptions {
    /// What happens when the store does not answer; the limiter's own choice unless said.
    pub on_failure: Option<OnFailure>,
    /// Whether units may be given back later. Denials of such checks are not remembered, since a refund ends them early.
    pub refundable: bool,
}

/// Why a URL names no store.
#[cfg(feature = "redis")]
#[derive(Debug, thiserror::Error)]
#[error("{0} (or `memory`)")]
pub struct StoreUrlError(#[from] tollgate_redis::BuildError);

/// How a [`Limiter`] is made.
pub struct LimiterBuilder {
    store: Option<Arc<dyn Store>>,
    memory: Option<MemoryStore>,
    clock: Arc<dyn Clock>,
    deadline: Duration,
    instances: u32,
    on_failure: OnFailure,
    deny_cache: bool,
    observers: Vec<Box<dyn Observer>>,
}

impl LimiterBuilder {
    /// A shared store, such as Redis. Without one, counters live in process memory.
    #[must_use]
    pub fn store(self, store: Arc<dyn Store>) -> Self {
        LimiterBuilder { store: Some(store), ..self }
    }

    /// The store that this URL names: `memory`, `redis://[user:password@]host[:port][/database]` or `rediss://…`. It need not be up.
    ///
    /// # Errors
    /// When the URL names no store, with what would be accepted; or outside a tokio runtime.
    #[cfg(feature = "redis")]
    pub fn url(self, url: &str) -> Result<Self, StoreUrlError> {
        if url == "memory" {
            return Ok(LimiterBuilder { store: None, ..self });
        }
        let store = tollgate_redis::RedisStore::builder(url).build()?;
        Ok(self.store(Arc::new(store)))
    }

    /// The memory store to use: for everything without a shared store, for local shares beside one.
    #[must_use]
    pub fn memory(self, memory: MemoryStore) -> Self {
        LimiterBuilder { memory: Some(memory), ..self }
    }

    /// The clock by which remembered denials end; the system's unless said.
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        LimiterBuilder { clock, ..self }
    }

    /// Sets the deadline for an answer of the shared store, connecting included. Defaults to 25 ms.
    ///
    /// If this process is short of CPU when the deadline passes, an answer that has already arrived is still used.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        LimiterBuilder { deadline, ..self }
    }

    /// How many nodes share the quota while the store is away; 1 unless said (and at least).
    #[must_use]
    pub fn instances(self, instances: u32) -> Self {
        LimiterBuilder { instances: instances.max(1), ..self }
    }

    /// What happens when the store does not answer; `local` unless said.
    #[must_use]
    pub fn on_failure(self, on_failure: OnFailure) -> Self {
        LimiterBuilder { on_failure, ..self }
    }

    /// Whether denials are remembered while they are certainly true; they are unless said.
    #[must_use]
    pub fn deny_cache(self, deny_cache: bool) -> Self {
        LimiterBuilder { deny_cache, ..self }
    }

    /// Somebody who is told of every answer. Several may be added; see [`observe`](crate::observe).
    #[must_use]
    pub fn observer(mut self, observer: impl Observer) -> Self {
        self.observers.push(Box::new(observer));
        self
    }

    /// The limiter.
    pub fn build(self) -> Limiter {
        let LimiterBuilder { clock, deadline, instances, on_failure, .. } = self;
        let local = self.memory.unwrap_or_else(|| MemoryStore::builder().clock(clock.clone()).build());
        let observers = Observers::new(self.observers);
        let backend = match self.store {
            None => Backend::Memory(local),
            Some(store) => {
                let (clock, observers, has_deny_cache) = (clock.clone(), observers.clone(), self.deny_cache);
                let parts = SharedParts { store, local, clock, observers, deadline, instances, has_deny_cache };
                Backend::Shared(Arc::new(Shared::new(parts)))
            }
        };
        let (counters, turns) = (Counters::default(), FairQueues::default());
        let inner = Inner { backend, clock, counters, observers, turns, on_failure };
        Limiter(Arc::new(inner))
    }
}

impl Limiter {
    /// A limiter in process memory.
    pub fn memory() -> Limiter {
        Limiter::builder().build()
    }

    /// A limiter with a shared store, or other choices.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder {
            store: None,
            memory: None,
            clock: Arc::new(SystemClock::new()),
            deadline: DEADLINE_DEFAULT,
            instances: 1,
            on_failure: OnFailure::default(),
            deny_cache: true,
            observers: Vec::new(),
        }
    }

    /// Decides a check. A denial is an `Ok`.
    ///
    /// # Errors
    /// Only when the store does not answer and the policy is [`OnFailure::Deny`].
    pub async fn check(&self, check: &Check<'_>) -> Result<Decision, Unavailable> {
        self.check_with(check, CheckOptions::default()).await
    }

    /// Decides a check that says more than its demands.
    ///
    /// # Errors
    /// Only when the store does not answer and the policy is [`OnFailure::Deny`].
    pub async fn check_with(&self, check: &Check<'_>, options: CheckOptions) -> Result<Decision, Unavailable> {
        self.check_one(check, self.otherwise(options), options.refundable).await
    }

    /// Decides a check whose limits each have a word of their own, in their order, for a store that does not answer: if one
    /// says [`OnFailure::Deny`], nobody decides; those that say [`OnFailure::Local`] are decided by this node's share, together; those that
    /// say [`OnFailure::Allow`] are left out. A limit without a word has the limiter's.
    ///
    /// With some left out, the decision is [`Source::Local`] and has the lines of those that were decided, in their order. To give
    /// it back or to settle it, ask with a check of these alone; with none decided it has no line, and nothing goes back.
    ///
    /// # Errors
    /// Only when the store does not answer and one of the limits says [`OnFailure::Deny`].
    pub async fn check_each(
        &self,
        check: &Check<'_>,
        on_failure: &[OnFailure],
        refundable: bool,
    ) -> Result<Decision, Unavailable> {
        let otherwise = FailurePolicy { each: on_failure, rest: self.0.on_failure };
        self.check_one(check, otherwise, refundable).await
    }

    /// The same where all counters are in this process, so that nothing is waited for: writes the decision where it is to be. `None` where
    /// they are not.
    #[cfg(feature = "rules")]
    #[inline]
    pub(crate) fn check_each_at_once(
        &self,
        check: &Check<'_>,
        on_failure: &[OnFailure],
        decision: &mut Decision,
    ) -> Option<Result<(), Unavailable>> {
        let Backend::Memory(store) = &self.0.backend else { return None };
        let otherwise = FailurePolicy { each: on_failure, rest: self.0.on_failure };
        Some(self.check_one_in_memory(store, check, otherwise, decision))
    }

    /// Admits where all counters are in this process, exist and have room, and nobody observes: see [`MemoryStore::admit`]. `false` if there
    /// is more to it; then nothing has happened.
    #[cfg(feature = "rules")]
    #[inline]
    pub(crate) fn admit_at_once(
        &self,
        subject: &[u8],
        demands: &[tollgate_core::StandingDemand],
        decision: &mut Decision,
    ) -> bool {
        let Inner { backend: Backend::Memory(store), counters, observers, .. } = &*self.0 else { return false };
        if !observers.is_empty() {
            return false;
        }
        decision.limits.clear();
        let Some(at) = catch_panic(|| store.admit(subject, demands, &mut decision.limits)).flatten() else {
            return false;
        };
        (decision.at, decision.source) = (at, Source::Store);
        counters.count_allowed();
        true
    }

    /// Decides many checks, in order, as one call to the store where it is asked at all.
    pub async fn check_batch(&self, checks: &[Check<'_>], options: CheckOptions) -> Vec<Result<Decision, Unavailable>> {
        self.check_all(checks, self.otherwise(options), options.refundable).await
    }

    async fn check_one(
        &self,
        check: &Check<'_>,
        otherwise: FailurePolicy<'_>,
        refundable: bool,
    ) -> Result<Decision, Unavailable> {
        if let Backend::Memory(store) = &self.0.backend {
            let mut decision = empty_decision();
            return self.check_one_in_memory(store, check, otherwise, &mut decision).map(|()| decision);
        }
        let mut answers = self.check_all(std::slice::from_ref(check), otherwise, refundable).await;
        answers.pop().unwrap_or(Err(Unavailable::new(StoreErrorKind::Protocol)))
    }

    async fn check_all(
        &self,
        checks: &[Check<'_>],
        otherwise: FailurePolicy<'_>,
        refundable: bool,
    ) -> Vec<Result<Decision, Unavailable>> {
        let Inner { clock, counters, observers, .. } = &*self.0;
        let begun = observers.begin(&**clock);
        let answers = match &self.0.backend {
            Backend::Memory(store) => self.check_in_memory(store, checks, otherwise),
            Backend::Shared(shared) => shared.check_batch(checks, otherwise, refundable, counters).await,
        };
        answers.iter().for_each(|answer| counters.count(answer.as_ref()));
        let told = answers.iter().map(|answer| answer.as_ref().map_err(Unavailable::kind));
        observers.decided(begun, &**clock, checks, told);
        answers
    }

    fn otherwise(&self, options: CheckOptions) -> FailurePolicy<'static> {
        FailurePolicy::whole(options.on_failure.unwrap_or(self.0.on_failure))
    }

    /// Decides by this node's share alone, without asking a shared store: for callers with a failure policy of their own.
    pub fn check_local(&self, check: &Check<'_>) -> Decision {
        let Inner { clock, counters, observers, .. } = &*self.0;
        let begun = observers.begin(&**clock);
        let decision = match &self.0.backend {
            Backend::Memory(store) => catch_panic(|| Decision { source: Source::Local, ..store.check(check) }),
            Backend::Shared(shared) => Some(shared.check_local(check)),
        };
        let decision = decision.unwrap_or_else(|| uncounted(&**clock));
        counters.count(Ok(&decision));
        observers.decided(begun, &**clock, std::slice::from_ref(check), [Ok(&decision)]);
        decision
    }

    /// Gives back what an admitted decision charged. Once per decision; what the store did not
    /// charge (a local answer, a remembered denial) is given back where it was charged, or not at all. The check is the one of the
    /// decision: where the numbers of limits and lines differ, nothing is given back.
    ///
    /// # Errors
    /// When the store does not answer. The refund is then lost, never repeated: the error is on the side of refusal.
    pub async fn refund(&self, check: &Check<'_>, decision: &Decision) -> Result<(), StoreError> {
        if !is_of(decision, check) {
            return Ok(());
        }
        match &self.0.backend {
            Backend::Memory(store) => catch_panic(|| store.refund(check, decision)).ok_or_else(panicked),
            Backend::Shared(shared) => shared.refund(check, decision).await,
        }
    }

    /// Forgets a counter: the key is as if never seen.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn reset(&self, demand: &Demand<'_>) -> Result<(), StoreError> {
        match &self.0.backend {
            Backend::Memory(store) => catch_panic(|| store.reset(demand)).ok_or_else(panicked),
            Backend::Shared(shared) => shared.reset(demand).await,
        }
    }

    /// Looks at a counter without changing it.
    ///
    /// # Errors
    /// When the store does not answer: there is no local guess at what a shared counter holds.
    pub async fn inspect(&self, demand: &Demand<'_>) -> Result<LimitStatus, StoreError> {
        match &self.0.backend {
            Backend::Memory(store) => catch_panic(|| store.inspect(demand)).ok_or_else(panicked),
            Backend::Shared(shared) => shared.inspect(demand).await,
        }
    }

    /// What has happened so far.
    pub fn stats(&self) -> LimiterStats {
        match &self.0.backend {
            Backend::Memory(store) => self.0.counters.stats(store, None),
            Backend::Shared(shared) => self.0.counters.stats(shared.local(), Some(shared.breaker())),
        }
    }

    /// Whether every counter is in this process, so that no decision waits for anybody.
    #[cfg(feature = "rules")]
    pub(crate) fn is_in_process(&self) -> bool {
        matches!(self.0.backend, Backend::Memory(_))
    }

    /// The same as a batch of one, without an allocation.
    fn check_one_in_memory(
        &self,
        store: &MemoryStore,
        check: &Check<'_>,
        otherwise: FailurePolicy<'_>,
        decision: &mut Decision,
    ) -> Result<(), Unavailable> {
        let Inner { clock, counters, observers, .. } = &*self.0;
        let begun = observers.begin(&**clock);
        decision.limits.clear();
        let answer = match catch_panic(|| store.check_onto(check, &mut decision.limits)) {
            Some(at) => {
                (decision.at, decision.source) = (at, Source::Store);
                Ok(())
            }
            None => self.undecided(check, otherwise).map(|undecided| *decision = undecided),
        };
        let told = answer.as_ref().map(|()| &*decision);
        counters.count(told);
        observers.decided(begun, &**clock, std::slice::from_ref(check), [told.map_err(Unavailable::kind)]);
        answer
    }

    fn check_in_memory(
        &self,
        store: &MemoryStore,
        checks: &[Check<'_>],
        otherwise: FailurePolicy<'_>,
    ) -> Vec<Result<Decision, Unavailable>> {
        match catch_panic(|| store.check_batch(checks)) {
            Some(decisions) => decisions.into_iter().map(Ok).collect(),
            None => checks.iter().map(|check| self.undecided(check, otherwise)).collect(),
        }
    }

    /// The answer when the in-process store panicked.
    fn undecided(&self, check: &Check<'_>, otherwise: FailurePolicy<'_>) -> Result<Decision, Unavailable> {
        match otherwise.denies(check) {
            true => Err(Unavailable::new(StoreErrorKind::Protocol)),
            false => Ok(uncounted(&*self.0.clock)),
        }
    }
}

/// What the in-process store says; nothing if it panicked.
pub(crate) fn catch_panic<T>(ask: impl FnOnce() -> T) -> Option<T> {
    let said = catch_unwind(AssertUnwindSafe(ask)).ok();
    if said.is_none() {
        tracing::error!("the in-process store panicked; answering by the failure policy");
    }
    said
}

pub(crate) fn panicked() -> StoreError {
    StoreError::new(StoreErrorKind::Protocol, "the in-process store panicked")
}

/// Whether a decision has a line for each limit of a check. One that was made without some of them must not be taken for the others.
fn is_of(decision: &Decision, check: &Check<'_>) -> bool {
    decision.limits.len() == check.demands().len()
}

/// A decision of the store that is yet to be made.
pub(crate) fn empty_decision() -> Decision {
    Decision { at: Timestamp::ZERO, source: Source::Store, limits: Default::default() }
}

/// An admission that nobody counted: no line, so nothing is claimed of any quota.
fn uncounted(clock: &dyn Clock) -> Decision {
    Decision { at: clock.now(), source: Source::None, limits: Default::default() }
}

/// The shortest way to a decision: one limit, one key, one unit.
impl Limiter {
    /// Charges `key` one unit of `limit`, if the limit has one left, and returns the decision.
    ///
    /// Two keys with the same bytes and limits with the same algorithm and window share a counter. For other costs, or
    /// several limits at once, use [`Limiter::check`].
    ///
    /// ```
    /// use tollgate::{Limit, Limiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::memory();
    /// let limit: Limit = "2/min".parse()?;
    ///
    /// let decision = limiter.check_key(&limit, "user:42").await?;
    /// assert!(decision.allowed());
    /// assert_eq!(decision.remaining(), Some(1));
    ///
    /// assert!(limiter.check_key(&limit, "user:42").await?.allowed());
    /// let denied = limiter.check_key(&limit, "user:42").await?;
    /// assert!(!denied.allowed());
    /// println!("try again in {:?}", denied.retry_after());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - If the key is longer than 64 KiB.
    /// - If the store does not answer and the limiter's failure policy is [`OnFailure::Deny`].
    pub async fn check_key<K: AsRef<[u8]> + ?Sized>(&self, limit: &Limit, key: &K) -> Result<Decision, CheckKeyError> {
        let demand = Demand::new(*limit, Key::new(key)?);
        Ok(self.check(&Check::one(&demand)).await?)
    }
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Limiter").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
