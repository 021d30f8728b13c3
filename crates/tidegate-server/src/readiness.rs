//! The state that `/healthz` and `/readyz` report.
//!
//! *Alive* means that the process answers. *Ready* means that a load balancer should send requests to this instance:
//!
//! | state | ready | because |
//! |---|---|---|
//! | the store answers, or counters are in memory | yes | |
//! | the store does not answer | no | until it does, decisions are made from this instance's local share |
//! | some masters of a cluster do not answer | yes | reported as `degraded`: the counters on the others are decided as usual |
//! | a reload failed | yes | the old rules are in force; the response says what is wrong |
//! | the store evicts keys when its memory is full | yes | reported as `degraded`: an evicted counter starts from zero |
//! | the instance shuts down | no | new requests should go elsewhere while open connections are served |
//! | a listener, or the watch on the store or the files, has ended | no | it does not restart; the response says which |
//!
//! The store is probed, not only observed: without traffic there would be nothing to observe. The probe is a decision
//! like any other, on a counter of its own ([`Demand::probe`]). So a store that answers PING but cannot run the script,
//! or cannot write, counts as one that does not answer. While the store answers the decisions of clients, there is no
//! probe, because it would find nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use serde::Serialize;
use tidegate::{Limiter, ShardId, Store, Timestamp};

use crate::reload::{ReloadErrorBody, Reloader};

/// The number of reports without an eviction after which the store counts as not evicting any more.
const REPORTS_WITHOUT_EVICTION: u32 = 12;

/// The readiness of an instance: whether a load balancer should send requests to it, and why not.
///
/// Clones share their state.
#[derive(Clone)]
pub struct Readiness(Arc<Inner>);

struct Inner {
    limiter: Limiter,
    store: Option<Arc<dyn Store>>,
    reloader: Reloader,
    is_shutting_down: AtomicBool,
    /// The tasks that have ended before the shutdown.
    ended: Mutex<Vec<&'static str>>,
    eviction: Mutex<EvictionState>,
}

/// The last report of the store's server about evicting keys.
#[derive(Clone, Default, Debug)]
struct EvictionState {
    policy: Option<String>,
    evicted_keys: Option<u64>,
    /// The number of further reports for which the last eviction still counts.
    reports_left: u32,
}

impl EvictionState {
    fn update(&mut self, policy: Option<&str>, evicted_keys: Option<u64>) {
        let has_grown = self.evicted_keys.zip(evicted_keys).is_some_and(|(before, now)| now > before);
        self.reports_left = if has_grown { REPORTS_WITHOUT_EVICTION } else { self.reports_left.saturating_sub(1) };
        self.policy = policy.map(str::to_owned);
        self.evicted_keys = evicted_keys;
    }

    /// Returns why the store may lose counters, and what to do about it.
    ///
    /// `Some` if the number of evicted keys has grown in one of the last 12 reports, else if the policy of the last
    /// report is other than `noeviction`. `None` if neither holds, or nothing is known.
    fn reason(&self) -> Option<String> {
        match &self.policy {
            _ if self.reports_left > 0 => Some(
                "the store evicts keys, including counters: give it more memory, and set maxmemory-policy to noeviction"
                    .into(),
            ),
            Some(policy) if policy != "noeviction" => Some(format!(
                "maxmemory-policy is {policy}: when its memory is full, the store evicts counters; set it to noeviction"
            )),
            _ => None,
        }
    }
}

/// Whether requests should be sent to this instance, and why not.
///
/// `shutting_down`, `ended` and `store` decide about `ready`; the other fields do not.
#[derive(Serialize)]
pub(crate) struct ReadinessBody {
    /// Whether requests should be sent to this instance.
    ready: bool,
    /// The reasons why the store may lose counters, and the masters of a cluster that do not answer. Empty if there are
    /// none.
    degraded: Vec<String>,
    /// Whether the instance is shutting down.
    shutting_down: bool,
    /// The tasks that have ended unexpectedly.
    ended: Vec<&'static str>,
    /// The store of the counters.
    pub(crate) store: StoreBody,
    /// The last reloads of the configuration and the certificate.
    reload: LastReloadBody,
}

/// The state of the store.
#[derive(Serialize)]
pub(crate) struct StoreBody {
    /// `memory`, or `redis` for a shared store.
    kind: &'static str,
    /// Whether the store answers; of a cluster, at least one master.
    reachable: bool,
    /// The circuit breaker of a shared store: `open` or `closed`; of a cluster, `open` if that of any master is. Absent
    /// for counters in memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    breaker: Option<&'static str>,
    /// The number of instances among which a quota is divided while the shared store does not answer: as configured, else
    /// of those that share the store, when it was last known. Absent for counters in memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    instances: Option<u32>,
    /// The masters of a cluster, or the master that Sentinels name. Absent for other stores.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) nodes: Vec<NodeBody>,
}

/// A master of a cluster.
#[derive(Clone, Serialize)]
pub(crate) struct NodeBody {
    /// The address of the node.
    pub(crate) address: String,
    /// Whether the node answers.
    pub(crate) reachable: bool,
    /// The circuit breaker of the node: `open` or `closed`.
    pub(crate) breaker: &'static str,
}

/// The result and the times of the last reloads.
#[derive(Serialize)]
struct LastReloadBody {
    /// The result of the last reload: `ok` or `failed`. `ok` before the first one.
    result: &'static str,
    /// The time of the last successful reload, or of the start, in Unix seconds.
    last_success: u64,
    /// The time of the last reload in Unix seconds, if it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed_at: Option<u64>,
    /// The reason, if the last reload failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ReloadErrorBody>,
}

/// A guard held by a task that should run until the shutdown.
///
/// If it is dropped earlier, an error is logged, and the instance is not ready any more.
pub(crate) struct TaskGuard {
    readiness: Readiness,
    task: &'static str,
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        if !self.readiness.is_shutting_down() {
            tracing::error!(task = self.task, "a task ended unexpectedly; this instance is no longer ready");
            self.readiness.0.ended.lock().push(self.task);
        }
    }
}

impl Readiness {
    /// Creates the readiness of an instance. `store` is the shared store of `limiter`, or `None` if counters are
    /// in memory.
    ///
    /// With a shared store, the instance is not ready until [`watch_store`](Self::watch_store) has had a first answer.
    pub fn new(limiter: Limiter, store: Option<Arc<dyn Store>>, reloader: Reloader) -> Readiness {
        let (is_shutting_down, ended, eviction) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        Readiness(Arc::new(Inner { limiter, store, reloader, is_shutting_down, ended, eviction }))
    }

    /// Returns a guard for a task that should run until the shutdown.
    ///
    /// If the guard is dropped earlier, the instance is not ready any more, and `/readyz` lists `task` as ended.
    pub(crate) fn guard(&self, task: &'static str) -> TaskGuard {
        TaskGuard { readiness: self.clone(), task }
    }

    /// Looks every 500 ms whether the shared store answers ([`Limiter::watch_store`]). Never returns, except at once if
    /// there is no shared store.
    ///
    /// After two looks in a row without an answer the instance is not ready, until the store answers.
    ///
    /// If the future is dropped after its first poll and before [`leave`](Self::leave), an error is logged, and the
    /// instance is never ready again.
    pub async fn watch_store(self) {
        if self.0.store.is_some() {
            let _guard = self.guard("store watch");
            self.0.limiter.watch_store().await;
        }
    }

    /// Records the `maxmemory-policy` of the store's server, and how many keys it has evicted since it started.
    ///
    /// `None` means unknown. To be called at regular intervals.
    ///
    /// `/readyz` reports the instance as degraded while the policy is other than `noeviction`, and when the number has
    /// grown, until 12 calls in a row find that it has not. Logs a warning when that begins or its reason changes,
    /// except if nothing was known before the call, and a message when it ends.
    pub fn note_eviction(&self, policy: Option<&str>, evicted_keys: Option<u64>) {
        let mut eviction = self.0.eviction.lock();
        // The state at the start is logged by the check of the server at the start.
        let is_first = eviction.policy.is_none() && eviction.evicted_keys.is_none();
        let before = eviction.reason();
        eviction.update(policy, evicted_keys);
        match eviction.reason() {
            Some(reason) if !is_first && before.as_ref() != Some(&reason) => tracing::warn!(evicted_keys, "{reason}"),
            None if before.is_some() => tracing::info!("the store no longer evicts keys"),
            _ => {}
        }
    }

    /// Returns whether the store may evict counters, so that the instance is degraded, and how many keys it has evicted
    /// (`None` if unknown).
    pub(crate) fn eviction(&self) -> (bool, Option<u64>) {
        let eviction = self.0.eviction.lock();
        (eviction.reason().is_some(), eviction.evicted_keys)
    }

    /// Returns the number of times that the shared store has changed to another master; 0 if counters are in memory.
    pub(crate) fn failovers(&self) -> u64 {
        self.0.store.as_ref().map_or(0, |store| store.failovers())
    }

    /// Marks the instance as shutting down: from now on it is not ready, and tasks that end are not reported, except
    /// the file watch. Does not stop anything.
    pub fn leave(&self) {
        self.0.is_shutting_down.store(true, Ordering::Relaxed);
    }

    /// Returns whether requests should be sent to this instance.
    ///
    /// True if it does not shut down, no task has ended unexpectedly, and the shared store, if any, answers: fewer than
    /// two probes in a row have failed, and the circuit breaker is closed. Of a cluster, one master is enough: the counters
    /// of the others are degraded on every instance.
    pub fn is_ready(&self) -> bool {
        !self.is_shutting_down() && self.is_store_reachable() && self.ended().is_empty()
    }

    /// Returns the names of the tasks that have ended before the shutdown. The file watch is listed even if it has
    /// ended later.
    fn ended(&self) -> Vec<&'static str> {
        let mut ended = self.0.ended.lock().clone();
        ended.extend(self.0.reloader.watch_ended().then_some("file watch"));
        ended
    }

    fn is_shutting_down(&self) -> bool {
        self.0.is_shutting_down.load(Ordering::Relaxed)
    }

    /// Returns whether counters are in memory, or at least one server of the store answers.
    fn is_store_reachable(&self) -> bool {
        self.0.store.is_none() || self.0.limiter.servers().iter().any(|server| server.reachable)
    }

    /// Returns the masters of a cluster, or the master that Sentinels name. Empty for other stores, and while none is
    /// known.
    pub(crate) fn nodes(&self) -> Vec<NodeBody> {
        let servers = self.0.limiter.servers();
        // The only server of a store has the id 0.
        if servers.iter().all(|server| server.id == ShardId::default()) {
            return Vec::new();
        }
        let node = |server: tidegate::StoreServer| NodeBody {
            address: server.address.unwrap_or_default(),
            reachable: server.reachable,
            breaker: if server.breaker_open { "open" } else { "closed" },
        };
        servers.into_iter().map(node).collect()
    }

    /// Returns what is degraded: reasons why the store may lose counters, and masters of a cluster that do not answer.
    fn degraded(&self, nodes: &[NodeBody]) -> Vec<String> {
        let unreachable = nodes.iter().filter(|node| !node.reachable);
        let unreachable = unreachable.map(|node| {
            format!("{} does not answer: its counters are decided by the failure policy of each rule", node.address)
        });
        self.0.eviction.lock().reason().into_iter().chain(unreachable).collect()
    }

    /// Returns the body of `/readyz`.
    pub(crate) fn body(&self) -> ReadinessBody {
        let is_shared = self.0.store.is_some();
        let stats = self.0.limiter.stats();
        let breaker = if stats.breaker_open { "open" } else { "closed" };
        let history = self.0.reloader.history();
        let nodes = self.nodes();
        ReadinessBody {
            ready: self.is_ready(),
            degraded: self.degraded(&nodes),
            shutting_down: self.is_shutting_down(),
            ended: self.ended(),
            store: StoreBody {
                kind: if is_shared { "redis" } else { "memory" },
                reachable: self.is_store_reachable(),
                breaker: is_shared.then_some(breaker),
                instances: is_shared.then_some(stats.instances),
                nodes,
            },
            reload: LastReloadBody {
                result: if history.failure.is_some() { "failed" } else { "ok" },
                last_success: seconds(history.last_success),
                failed_at: history.failure.as_ref().map(|(at, _)| seconds(*at)),
                error: history.failure.as_ref().map(|(_, error)| error.body()),
            },
        }
    }
}

/// Returns a time in Unix seconds, rounded down.
fn seconds(at: Timestamp) -> u64 {
    at.as_micros() / 1_000_000
}

impl std::fmt::Debug for Readiness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readiness").field("is_ready", &self.is_ready()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use tidegate::{Check, Decision, Demand, Key, LimitStatus, StoreError, StoreErrorKind, StoreFuture};

    use super::*;

    /// The interval between two looks at the store.
    const PROBE_INTERVAL: Duration = Duration::from_millis(500);

    /// A store that counts probes and other calls, and fails with a kind while it is set.
    #[derive(Default)]
    struct CountingStore {
        probes: AtomicU32,
        decisions: AtomicU32,
        failure: Mutex<Option<StoreErrorKind>>,
    }

    fn unused<'a, T: Send + 'a>() -> StoreFuture<'a, T> {
        Box::pin(async { Err(StoreError::new(StoreErrorKind::Forbidden, "this test only decides")) })
    }

    impl Store for CountingStore {
        fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
            let is_probe = checks[0].demands()[0].key == Demand::probe().key;
            let count = if is_probe { &self.probes } else { &self.decisions };
            count.fetch_add(1, Ordering::Relaxed);
            let failure = *self.failure.lock();
            Box::pin(async move {
                match failure {
                    Some(kind) => Err(StoreError::new(kind, "planted")),
                    None => {
                        let memory = tidegate::MemoryStore::builder().build();
                        Ok(checks.iter().map(|check| memory.check(check)).collect())
                    }
                }
            })
        }

        fn refund<'a>(&'a self, _: &'a Check<'a>, _: &'a Decision) -> StoreFuture<'a, ()> {
            unused()
        }

        fn reset<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, ()> {
            unused()
        }

        fn inspect<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
            unused()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn store_is_probed_only_while_no_decision_shows_that_it_answers() {
        let store = Arc::new(CountingStore::default());
        let limiter = Limiter::builder().store(store.clone()).build();
        let readiness = Readiness::new(limiter.clone(), Some(store.clone()), Reloader::nothing());
        let _watch = tokio::spawn(readiness.clone().watch_store());
        let probes = || store.probes.load(Ordering::Relaxed);
        let check = async || {
            let demand = Demand::new("1000000/h".parse().unwrap(), Key::new("user:42").unwrap());
            drop(limiter.check(&Check::one(&demand)).await);
        };
        // Between two looks at the store.
        tokio::time::sleep(PROBE_INTERVAL / 2).await;
        assert_eq!((probes(), readiness.is_ready()), (1, true));
        for _ in 0..10 {
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
        assert_eq!(probes(), 11, "an idle instance probes at every interval");
        for _ in 0..10 {
            check().await;
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
        assert_eq!((probes(), store.decisions.load(Ordering::Relaxed)), (11, 10), "traffic replaces probes");
        *store.failure.lock() = Some(StoreErrorKind::Unreachable);
        for _ in 0..2 {
            check().await;
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
        assert_eq!((probes(), readiness.is_ready()), (13, false), "a failed decision is no answer");
        *store.failure.lock() = Some(StoreErrorKind::Foreign);
        tokio::time::sleep(PROBE_INTERVAL).await;
        assert!(readiness.is_ready(), "foreign data under the key of probes is an answer");
    }

    #[test]
    fn a_store_that_evicts_is_degraded_until_twelve_reports_without_an_eviction() {
        let readiness = Readiness::new(Limiter::memory(), None, Reloader::nothing());
        let degraded = || serde_json::json!(readiness.body().degraded).to_string();
        assert_eq!(degraded(), "[]");
        readiness.note_eviction(Some("noeviction"), Some(7));
        assert_eq!(degraded(), "[]", "evicted before the first report");
        readiness.note_eviction(Some("noeviction"), Some(8));
        assert!(degraded().contains("evicts keys"), "{}", degraded());
        assert!(readiness.is_ready());
        for _ in 0..REPORTS_WITHOUT_EVICTION {
            assert_eq!(readiness.eviction(), (true, Some(8)));
            readiness.note_eviction(Some("noeviction"), Some(8));
        }
        assert_eq!(degraded(), "[]");
        readiness.note_eviction(Some("noeviction"), Some(0));
        assert_eq!(degraded(), "[]", "the server was restarted");
        readiness.note_eviction(Some("volatile-ttl"), Some(0));
        assert!(degraded().contains("maxmemory-policy is volatile-ttl"), "{}", degraded());
        readiness.note_eviction(None, None);
        assert_eq!(readiness.eviction(), (false, None), "unknown is not reported; the check at the start warns of it");
    }
}
