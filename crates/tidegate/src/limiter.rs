//! The limiter: a store, with a deadline, a circuit breaker, a deny cache and a fallback for when the store does not
//! answer.
//!
//! ```text
//!   check ─▶ deny cache ─▶ breaker ─▶ store, within the deadline ─▶ decision
//!               │ hit         │ open        │ failed
//!               ▼             └─────────────┴──▶ local share / allow / deny
//!            denial
//! ```
//!
//! With counters in process memory there is none of this: the decision is a function call, and a future that is ready
//! at its first poll.
//!
//! **One deadline for the whole decision**, including the connection. A reply that arrives later decides nothing, and
//! what its call has charged is refunded (`late_calls.rs`). It can never be taken for the reply to another request,
//! because each call owns its own future. Whether a call that timed out was executed is unknown, so it is never repeated.
//!
//! **Panics do not propagate.** A panic in a store, shared or in process, is handled like any other failure. So is a
//! call outside a tokio runtime: without a timer there is no deadline, so the store is not called.

mod announcing;
mod ask;
mod bans;
mod denied_parts;
mod fair_queue;
mod health;
mod late_calls;
mod ledger;
mod local_share;
mod parts;
mod probing;
mod ready;
mod receipt_ids;
mod settle;
mod shared;
mod stats;
mod store_calls;

use std::borrow::Cow;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tidegate_core::{
    Atomicity, Check, Clock, Decision, Demand, Key, Limit, LimitStatus, MemoryStore, Shard, ShardId, Store, StoreError,
    StoreErrorKind, SystemClock, Timestamp,
};

use self::fair_queue::FairQueues;
#[cfg(feature = "rules")]
pub(crate) use self::parts::refund_status;
pub use self::ready::NotReady;
use self::receipt_ids::ReceiptIds;
pub(crate) use self::settle::redeem_in_memory;
use self::shared::{Deadlines, Shared};
use self::stats::Counters;
pub use self::stats::LimiterStats;
use crate::failure::{CheckKeyError, OnFailure, Unavailable};
use crate::observe::{Observer, Observers, StoreCallKind as Call};

/// The default deadline for an answer from the shared store.
const DEADLINE_DEFAULT: Duration = Duration::from_millis(25);

/// Decides checks, in process memory or on a shared store.
///
/// Clones are cheap and share everything.
///
/// ```
/// use tidegate::{Check, Demand, Key, Limit, Limiter};
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
    counters: Arc<Counters>,
    observers: Observers,
    /// Counters in process memory need no deadline, but the lookups of an engine do.
    deadlines: Deadlines,
    /// The queues of [`Limiter::until_ready`].
    queues: FairQueues,
    /// The ids of the receipts that were issued.
    receipt_ids: ReceiptIds,
    on_failure: OnFailure,
}

#[allow(clippy::large_enum_variant)] // one per limiter, in an Arc
enum Backend {
    Memory(MemoryStore),
    Shared(Arc<Shared>),
}

/// Options of [`Limiter::check_with`] and [`Limiter::check_batch`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CheckOptions<'a> {
    /// How the check is decided if the store does not answer. Defaults to the limiter's own policy.
    pub on_failure: Option<OnFailure>,
    /// Whether units of the check, or of other checks on its counters, may be refunded later. Defaults to `false`.
    ///
    /// Denials of such checks are neither cached nor answered from the deny cache, since a refund ends them early.
    pub refundable: bool,
    /// The options of single limits, in the order of the check. Limits beyond its end have the default options. Defaults
    /// to an empty list.
    pub each: &'a [LimitOptions],
    /// Whether a denial from the deny cache may [omit](Decision::omitted) limits whose status is not cached. Defaults to
    /// `false`: the store is called instead.
    pub may_omit: bool,
    /// The time that the caller has already used of the decision's deadline. Defaults to zero.
    ///
    /// The store gets the rest of the deadline; if nothing is left, it is not called. If it does not answer in less than
    /// half of the deadline, the failure policies decide, but the circuit breaker counts a failure only if another call
    /// has been waiting for the store for the whole deadline.
    pub spent: Duration,
}

/// Options of one limit of a check. See [`CheckOptions::each`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LimitOptions {
    /// The failure policy of this limit. Defaults to that of the check.
    ///
    /// If the store does not answer, one limit with [`OnFailure::Deny`] refuses the check as unavailable. Otherwise the
    /// limits with [`OnFailure::Local`] are decided together by this instance's share, and those with
    /// [`OnFailure::Allow`] are [omitted](Decision::omitted).
    pub on_failure: Option<OnFailure>,
    /// Whether the limit counts something that identifies the caller, such as its address. Defaults to `false`.
    ///
    /// Denials by such limits are cached even if several servers decide the check.
    pub identifies_caller: bool,
}

impl CheckOptions<'_> {
    /// Returns the failure policy of each limit of a check, in its order.
    fn policies(&self, check: &Check<'_>) -> impl Iterator<Item = OnFailure> {
        let of_check = self.on_failure.unwrap_or_default();
        let own = |index: usize| self.each.get(index).and_then(|limit| limit.on_failure);
        (0..check.demands().len()).map(move |index| own(index).unwrap_or(of_check))
    }

    /// Returns whether a check whose store did not answer is refused: at least one limit has [`OnFailure::Deny`].
    fn denies_on_failure(&self, check: &Check<'_>) -> bool {
        self.policies(check).any(|policy| policy == OnFailure::Deny)
    }
}

/// A server of the shared store, as [`Limiter::servers`] returns it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StoreServer {
    /// The id of the server, unique while the store lives. 0 for the only server of a store.
    pub id: ShardId,
    /// The address for operators, such as `redis://127.0.0.1:6379`, without user and password. `None` if it has none.
    pub address: Option<String>,
    /// Whether the circuit breaker of the server is open, so that decisions on its counters do not call it.
    pub breaker_open: bool,
    /// Whether the server answers: its circuit breaker is closed, and it answered one of the last two times that
    /// [`Limiter::watch_store`] looked at it. `false` before the first.
    pub reachable: bool,
}

/// Where a cluster holds the counters of a subject, as [`Limiter::locate`] returns it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ClusterLocation {
    /// The address of the node, such as `redis://127.0.0.1:6379`, without user and password. `None` if no node is known
    /// to own the slot.
    pub node: Option<String>,
    /// The hash slot.
    pub slot: u32,
}

/// The error returned if a URL names no store, or if a Redis store cannot be built.
#[cfg(feature = "redis")]
#[derive(Debug, thiserror::Error)]
#[error("{0}{or_memory}", or_memory = match .0 {
    tidegate_redis::BuildError::Url(error) if error.meant().is_none() => ", or `memory`",
    _ => "",
})]
pub struct StoreUrlError(tidegate_redis::BuildError);

#[cfg(feature = "redis")]
impl From<tidegate_redis::BuildError> for StoreUrlError {
    fn from(error: tidegate_redis::BuildError) -> StoreUrlError {
        StoreUrlError(error)
    }
}

/// Builds a [`Limiter`]. See [`Limiter::builder`].
pub struct LimiterBuilder {
    store: Option<Arc<dyn Store>>,
    memory: Option<MemoryStore>,
    clock: Arc<dyn Clock>,
    deadline: Duration,
    ready_deadline: Option<Duration>,
    instances: Option<u32>,
    announces: bool,
    on_failure: OnFailure,
    deny_cache: bool,
    observers: Vec<Arc<dyn Observer>>,
}

impl LimiterBuilder {
    /// Sets a shared store, such as Redis, which then holds all counters. Defaults to counters in process memory.
    #[must_use]
    pub fn store(self, store: Arc<dyn Store>) -> Self {
        LimiterBuilder { store: Some(store), ..self }
    }

    /// Sets the store that `url` names: `memory`, `redis://[user:password@]host[:port][/database]` for one server,
    /// `redis+cluster://[user:password@]host[:port],…` for a cluster, or
    /// `redis+sentinel://[user:password@]host[:port],…/NAME[/database]` for the master that Sentinels name; with
    /// `rediss` for TLS.
    ///
    /// A Redis store connects in a background task on the current tokio runtime. This does not wait for it, and the
    /// server may be down. Checks read the bans on their subjects. `memory` removes a shared store that was set before.
    ///
    /// # Errors
    /// Returns an error if the URL names no store, or if it names Redis and no tokio runtime is running.
    #[cfg(feature = "redis")]
    pub fn url(self, url: &str) -> Result<Self, StoreUrlError> {
        if url == "memory" {
            return Ok(LimiterBuilder { store: None, ..self });
        }
        let store = tidegate_redis::RedisStore::builder(url).bans(true).build()?;
        Ok(self.store(Arc::new(store)))
    }

    /// Sets the memory store. It holds all counters or, with a shared store, only those of this instance's shares,
    /// which are used while the shared store does not answer.
    ///
    /// Defaults to a store with the default cap that runs on the limiter's clock.
    #[must_use]
    pub fn memory(self, memory: MemoryStore) -> Self {
        LimiterBuilder { memory: Some(memory), ..self }
    }

    /// Sets the clock. Defaults to [`SystemClock`].
    ///
    /// It times the deny cache, the circuit breaker and the observers, and drives the default memory store. It does not
    /// affect a store passed to [`memory`](Self::memory) or [`store`](Self::store).
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        LimiterBuilder { clock, ..self }
    }

    /// Sets the deadline for an answer from the shared store, including connecting. Defaults to 25 ms. It has no effect
    /// on counters in process memory.
    ///
    /// It is also the default deadline for the lookups of an engine that uses this limiter (`Lookups::deadline`).
    ///
    /// If this process is short of CPU when the deadline passes, an answer that has already arrived is still used. A later
    /// answer is not, and the units that it has charged are refunded.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        LimiterBuilder { deadline, ..self }
    }

    /// Sets the deadline for an answer from the shared store to [`Limiter::until_ready`]. Defaults to
    /// [`deadline`](Self::deadline), which still applies to all other calls.
    ///
    /// An incoming request must not wait long for the store, but outgoing work can. With a longer deadline here, a slow
    /// store can still make the decision, and the failure policy does not apply. The deadline is for one answer from
    /// the store; `wait_max` of `until_ready` bounds the time that it waits for units.
    #[must_use]
    pub fn ready_deadline(self, deadline: Duration) -> Self {
        LimiterBuilder { ready_deadline: Some(deadline), ..self }
    }

    /// Sets the number of instances among which a quota is divided while the store does not answer. 0 counts as 1.
    ///
    /// Defaults to the number of instances that share the store: limiters on it with the same key prefix, in any
    /// process. Each announces itself in the store every two seconds, and the last known number holds while the store
    /// does not answer. A limiter that never reached the store knows only itself. With `n` the number in use, and `q` a
    /// quota:
    ///
    /// - While the store does not answer, `n` instances admit at most `n` × ⌈q/n⌉ ≤ `q` + `n` − 1 units in a window;
    ///   with those that the store admitted before, at most 2 × `q` + `n` − 1.
    /// - An instance that first reached the store less than about two seconds before it failed may be unknown to the
    ///   others: it adds up to ⌈q/n⌉.
    /// - An instance that is started while the store does not answer adds up to `q`.
    /// - An instance that alone cannot reach the store admits up to ⌈q/n⌉, in addition to the `q` of the store.
    /// - After an instance has been killed, the number is too high for less than ten seconds, so that the others admit
    ///   less.
    ///
    /// With this setting, the instance uses the given number, and still announces itself, so that others count it.
    #[must_use]
    pub fn instances(self, instances: u32) -> Self {
        LimiterBuilder { instances: Some(instances.max(1)), ..self }
    }

    /// Sets whether the limiter announces itself in the shared store, so that the instances that share it count it.
    /// Defaults to `true`.
    ///
    /// For short-lived programs that admit nothing on their own, such as a command that reads or resets a counter. With
    /// `false`, the limiter does not know how many instances there are: while the store does not answer, it divides
    /// quotas by [`instances`](Self::instances), or by 1.
    #[must_use]
    pub fn announce(self, announces: bool) -> Self {
        LimiterBuilder { announces, ..self }
    }

    /// Sets how checks without a failure policy of their own are decided if the store does not answer. Defaults to
    /// [`OnFailure::Local`].
    #[must_use]
    pub fn on_failure(self, on_failure: OnFailure) -> Self {
        LimiterBuilder { on_failure, ..self }
    }

    /// Sets whether denials from a shared store are cached while they are certain to hold, for at most one second.
    /// Defaults to `true`.
    #[must_use]
    pub fn deny_cache(self, deny_cache: bool) -> Self {
        LimiterBuilder { deny_cache, ..self }
    }

    /// Adds an observer, which is called after every decision, among other events. See [`observe`](crate::observe).
    #[must_use]
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.push(observer);
        self
    }

    /// Creates the limiter. Does not wait for the store.
    ///
    /// With a shared store, spawns the task that [announces](Self::announce) this instance, if there is a tokio runtime;
    /// otherwise the first check in one does.
    pub fn build(mut self) -> Limiter {
        let memory = || MemoryStore::builder().clock(self.clock.clone()).build();
        let memory = self.memory.take().unwrap_or_else(memory);
        let observers = Observers::new(std::mem::take(&mut self.observers));
        let backend = match self.store.take() {
            None => Backend::Memory(memory),
            Some(store) => {
                let shared = Arc::new(Shared::new(store, memory, observers.clone(), &self));
                announcing::start(&shared);
                Backend::Shared(shared)
            }
        };
        Limiter(Arc::new(Inner {
            backend,
            deadlines: self.deadlines(),
            clock: self.clock,
            counters: Arc::default(),
            observers,
            queues: FairQueues::default(),
            receipt_ids: ReceiptIds::default(),
            on_failure: self.on_failure,
        }))
    }

    fn deadlines(&self) -> Deadlines {
        Deadlines { check: self.deadline, ready: self.ready_deadline.unwrap_or(self.deadline) }
    }
}

impl Limiter {
    /// Creates a limiter with counters in process memory and the default settings.
    pub fn memory() -> Limiter {
        Limiter::builder().build()
    }

    /// Returns a builder with the default settings.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder {
            store: None,
            memory: None,
            clock: Arc::new(SystemClock::new()),
            deadline: DEADLINE_DEFAULT,
            ready_deadline: None,
            instances: None,
            announces: true,
            on_failure: OnFailure::default(),
            deny_cache: true,
            observers: Vec::new(),
        }
    }

    /// Decides a check, and charges all its limits if each of them allows it. A denial is an `Ok`, even if a ban caused
    /// it.
    ///
    /// If the store does not answer, the limiter's failure policy decides. If the future is dropped while it waits for
    /// a shared store, the units may still be charged, but the decision is neither counted nor reported to the
    /// observers.
    ///
    /// # Errors
    /// Returns an error only if the store does not answer and the failure policy is [`OnFailure::Deny`].
    pub async fn check(&self, check: &Check<'_>) -> Result<Decision, Unavailable> {
        self.check_with(check, CheckOptions::default()).await
    }

    /// Decides a check like [`Limiter::check`], with options: failure policies, units that may be refunded, and others.
    ///
    /// If the future is dropped while it waits for a shared store, the units may still be charged.
    ///
    /// # Errors
    /// Returns an error only if the store does not answer and the failure policy of a limit is [`OnFailure::Deny`].
    pub async fn check_with(&self, check: &Check<'_>, options: CheckOptions<'_>) -> Result<Decision, Unavailable> {
        self.check_within(self.0.deadlines.check, check, options).await
    }

    /// Decides many checks, one after the other, with at most one call to the store. Returns one result per check, in
    /// order.
    ///
    /// Each result is as from [`Limiter::check_with`]. Checks in the deny cache are not sent to the store.
    pub async fn check_batch(
        &self,
        checks: &[Check<'_>],
        options: CheckOptions<'_>,
    ) -> Vec<Result<Decision, Unavailable>> {
        let Inner { backend, deadlines, counters, .. } = &*self.0;
        let (options, begun) = (self.with_policy(options), self.begin());
        let decided = match backend {
            Backend::Memory(store) => match catch_panic(|| store.check_batch(checks)) {
                Some(decisions) => decisions.into_iter().map(Ok).collect(),
                None => checks.iter().map(|check| self.undecided(check, &options)).collect(),
            },
            Backend::Shared(shared) => shared.check_batch(checks, &options, deadlines.check, counters).await,
        };
        self.report(begun, checks, &decided);
        decided
    }

    /// Decides one check, within this deadline for an answer from a shared store, counts the decision and calls the
    /// observers.
    async fn check_within(
        &self,
        deadline: Duration,
        check: &Check<'_>,
        options: CheckOptions<'_>,
    ) -> Result<Decision, Unavailable> {
        let (options, begun) = (self.with_policy(options), self.begin());
        let decided = match &self.0.backend {
            Backend::Memory(store) => match catch_panic(|| store.check(check)) {
                Some(decision) => Ok(decision),
                None => self.undecided(check, &options),
            },
            Backend::Shared(shared) => {
                let checks = std::slice::from_ref(check);
                // Boxed, so that the futures of callers with counters in memory stay small enough to be moved.
                let decided = Box::pin(shared.check_batch(checks, &options, deadline, &self.0.counters));
                decided.await.pop().unwrap_or_else(|| Err(Unavailable::from(&panicked())))
            }
        };
        self.report(begun, std::slice::from_ref(check), std::slice::from_ref(&decided));
        decided
    }

    /// Returns the time at which a decision begins, for the observers. `None` without observers.
    fn begin(&self) -> Option<Timestamp> {
        self.0.observers.begin(&*self.0.clock)
    }

    /// Counts decisions, which are in the order of `checks`, and calls the observers.
    fn report(&self, begun: Option<Timestamp>, checks: &[Check<'_>], decided: &[Result<Decision, Unavailable>]) {
        let Inner { clock, counters, observers, .. } = &*self.0;
        decided.iter().for_each(|decided| counters.count(decided.as_ref()));
        let decisions = decided.iter().map(|decided| decided.as_ref().map_err(Unavailable::kind));
        observers.decided(begun, &**clock, checks, decisions);
    }

    /// Returns the result of a check if the in-process store panicked: an error if the policy of a limit is
    /// [`OnFailure::Deny`], else an uncounted admission.
    fn undecided(&self, check: &Check<'_>, options: &CheckOptions<'_>) -> Result<Decision, Unavailable> {
        if options.denies_on_failure(check) {
            Err(Unavailable::from(&panicked()))
        } else {
            Ok(Decision::uncounted(self.0.clock.now()))
        }
    }

    /// Returns the options with the limiter's failure policy, if they have none.
    fn with_policy<'a>(&self, options: CheckOptions<'a>) -> CheckOptions<'a> {
        CheckOptions { on_failure: options.on_failure.or(Some(self.0.on_failure)), ..options }
    }

    /// Refunds the units that an admitted decision charged. Call it at most once per decision.
    ///
    /// `check` must be the check of the decision; if their numbers of limits differ, nothing is refunded. Limits that
    /// the decision [omits](Decision::omitted) charged nothing. Units are refunded where they were charged: in the store,
    /// or in this instance's share for [`Source::Local`](crate::Source::Local). For a denial or an uncounted admission,
    /// nothing is refunded, and the result is `Ok`. If the future is dropped before it completes, the units may or may
    /// not be refunded.
    ///
    /// # Errors
    /// Returns an error if the store does not answer, or at once while the circuit breaker is open. The refund is then
    /// lost; it is not repeated. A refund in this instance's share fails only if the memory store panics.
    pub async fn refund(&self, check: &Check<'_>, decision: &Decision) -> Result<(), StoreError> {
        let Some(demands) = decided_demands(check, decision) else { return Ok(()) };
        let check = Check::of_distinct(&demands);
        self.ledger(decision.source).refund(&check, decision).await
    }

    /// Deletes the counter of `demand`, as if its key had never been used. The cost is ignored.
    ///
    /// With a shared store, also deletes the counter of this instance's share and removes the counter from this
    /// instance's deny cache, even if the store fails. Other instances may repeat a cached denial for up to a second.
    ///
    /// # Errors
    /// Returns an error if the store does not answer within the deadline. The store is called even while the circuit
    /// breaker is open.
    pub async fn reset(&self, demand: &Demand<'_>) -> Result<(), StoreError> {
        let reset = self.call(Call::Reset, 0, async { self.store().reset(demand).await });
        match &self.0.backend {
            Backend::Memory(_) => reset.await,
            Backend::Shared(shared) => {
                let check = Check::one(demand);
                catch_panic(|| shared.local.reset(&shared.local_share().demands(&check)[0]));
                shared.forgetting(&check, reset).await
            }
        }
    }

    /// Returns the status of the counter of `demand` without changing it. The cost is ignored: the status is that of a
    /// peek, which is always allowed.
    ///
    /// # Errors
    /// Returns an error if the store does not answer within the deadline. The store is called even while the circuit
    /// breaker is open, and the local share is not consulted.
    pub async fn inspect(&self, demand: &Demand<'_>) -> Result<LimitStatus, StoreError> {
        self.call(Call::Inspect, 1, async { self.store().inspect(demand).await }).await
    }

    /// Returns the decision that a check would get from the store at the moment, and charges nothing. See
    /// [`Store::preview`].
    ///
    /// It is not a decision on a request: it is neither counted in the statistics nor reported to the observers, and
    /// uses no deny cache.
    ///
    /// # Errors
    /// Returns an error if the store does not answer within the deadline. The store is called even while the circuit
    /// breaker is open, and the local share is not consulted.
    pub async fn preview(&self, check: &Check<'_>) -> Result<Decision, StoreError> {
        match &self.0.backend {
            Backend::Memory(store) => catch_panic(|| store.preview(check)).ok_or_else(panicked),
            Backend::Shared(shared) => Box::pin(shared.preview(check)).await,
        }
    }

    /// Awaits a call to the [store](Limiter::store). If it is shared, the call has a deadline and is reported to the
    /// observers; the circuit breaker is neither consulted nor changed.
    ///
    /// # Errors
    /// Returns the error of the call, or an error if the store panics, or does not answer within the deadline.
    async fn call<T>(
        &self,
        kind: Call,
        checks: usize,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        match &self.0.backend {
            Backend::Memory(_) => {
                let result = AssertUnwindSafe(call).catch_unwind().await;
                unless_panicked(result).unwrap_or_else(|| Err(panicked()))
            }
            Backend::Shared(shared) => shared.call(kind, checks, call).await,
        }
    }

    /// Returns the store that holds the counters.
    fn store(&self) -> &dyn Store {
        match &self.0.backend {
            Backend::Memory(memory) => memory,
            Backend::Shared(shared) => &*shared.store,
        }
    }

    /// Returns the limiter's statistics since it was created.
    pub fn stats(&self) -> LimiterStats {
        match &self.0.backend {
            Backend::Memory(store) => self.0.counters.stats(store, None),
            Backend::Shared(shared) => self.0.counters.stats(&shared.local, Some(shared)),
        }
    }

    /// Removes this instance from those that share the store, at the end of a process.
    ///
    /// The others then stop counting it at once, instead of within ten seconds. Call it after the last decision: the
    /// instance is not announced again. Takes at most a second, also if the store does not answer. Dropping the last
    /// clone of the limiter does the same in the background, as long as its tokio runtime runs.
    ///
    /// Does nothing without a shared store.
    pub async fn withdraw(&self) {
        if let Backend::Shared(shared) = &self.0.backend {
            shared.announcing.withdraw(&shared.store).await;
        }
    }

    /// Returns the servers that hold the counters of the shared store: one, the masters of a cluster, or the master
    /// that Sentinels name.
    ///
    /// Empty without a shared store, and while the nodes of a cluster, or the master, are not known.
    pub fn servers(&self) -> Vec<StoreServer> {
        match &self.0.backend {
            Backend::Memory(_) => Vec::new(),
            Backend::Shared(shared) => {
                let server = |Shard { id, address, .. }| {
                    let health = shared.health.of(id, &*shared.store);
                    let (breaker_open, reachable) = (health.breaker.is_open(), health.is_reachable());
                    StoreServer { id, address, breaker_open, reachable }
                };
                shared.store.shards().into_iter().map(server).collect()
            }
        }
    }

    /// Looks every 500 ms whether the servers of the shared store answer, for [`StoreServer::reachable`]. Never returns,
    /// except at once if there is no shared store.
    ///
    /// Nothing is called if the store has answered decisions since the last look, and none has failed. Otherwise a probe
    /// charges a counter that is used for nothing else, and fails after 400 ms. Probes of a server whose circuit breaker
    /// is open are made by the task that closes it. An error is logged when a probe first finds a server that cannot be
    /// used as the store, and again each time that this recurs.
    ///
    /// # Panics
    /// Panics outside a tokio runtime with a timer, if there is a shared store.
    pub async fn watch_store(&self) {
        if let Backend::Shared(shared) = &self.0.backend {
            probing::watch(shared, &self.0.counters).await;
        }
    }

    /// Returns where the shared store holds the counters of a subject. `None` if the store is not a cluster.
    ///
    /// Does no I/O. The node is not known before the first call to the store.
    pub fn locate(&self, subject: &[u8]) -> Option<ClusterLocation> {
        let Backend::Shared(shared) = &self.0.backend else { return None };
        let store = &shared.store;
        let location = store.locate(subject);
        let servers = store.shards();
        // The only server of a store has the id 0.
        if store.atomicity() == Atomicity::Check || servers.iter().any(|server| server.id == ShardId::default()) {
            return None;
        }
        let node = servers.into_iter().find(|server| server.id == location.shard).and_then(|server| server.address);
        Some(ClusterLocation { node, slot: location.partition })
    }

    /// Returns whether all counters are in this process, so that every decision is ready at its first poll.
    pub fn is_in_process(&self) -> bool {
        matches!(self.0.backend, Backend::Memory(_))
    }
}

/// Returns the result of `call`, a call to the in-process store. Returns `None`, and logs an error, if it panicked.
pub(crate) fn catch_panic<T>(call: impl FnOnce() -> T) -> Option<T> {
    unless_panicked(catch_unwind(AssertUnwindSafe(call)))
}

/// Returns the result of a call to the in-process store. Returns `None`, and logs an error, if it panicked.
fn unless_panicked<T>(result: std::thread::Result<T>) -> Option<T> {
    if result.is_err() {
        tracing::error!("the in-process store panicked; the failure policy applies");
    }
    result.ok()
}

/// Creates the error of a panic in the in-process store.
pub(crate) fn panicked() -> StoreError {
    StoreError::new(StoreErrorKind::Protocol, "the in-process store panicked")
}

/// The demands of a check that were decided: borrowed if none is omitted.
type DecidedDemands<'a> = Cow<'a, [Demand<'a>]>;

/// Returns the demands of a check that were decided, in the order of the decision's statuses.
///
/// `None` if there are none, or not as many as statuses: then the decision is not that of the check.
fn decided_demands<'a>(check: &Check<'a>, decision: &Decision) -> Option<DecidedDemands<'a>> {
    let demands = if decision.omitted.is_empty() {
        Cow::Borrowed(check.demands())
    } else {
        let all = check.demands().iter().enumerate();
        all.filter(|(index, _)| !decision.omitted.contains(*index)).map(|(_, demand)| *demand).collect()
    };
    (!demands.is_empty() && demands.len() == decision.limits.len()).then_some(demands)
}

/// For the engine.
#[cfg(feature = "rules")]
impl Limiter {
    /// Returns the deadline of a check.
    pub(crate) fn deadline(&self) -> Duration {
        self.0.deadlines.check
    }

    /// Returns the observers.
    pub(crate) fn observers(&self) -> &Observers {
        &self.0.observers
    }
}

/// The shortest way to a decision: one limit, one key, one unit.
impl Limiter {
    /// Charges `key` one unit of `limit`, if the limit has one left, and returns the decision.
    ///
    /// Two keys with the same bytes and limits with the same algorithm and window share a counter. For other costs, or
    /// several limits at once, use [`Limiter::check`].
    ///
    /// ```
    /// use tidegate::{Limit, Limiter};
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
    /// - If the key is longer than 64 KiB. Nothing is charged.
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
