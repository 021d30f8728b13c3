//! Whether to send work here: `/healthz` and `/readyz`.
//!
//! *Alive* means that the process answers. *Ready* means that an answer is worth having from here:
//!
//! | | ready | why |
//! |---|---|---|
//! | the store answers, or counters are in memory | yes | |
//! | the store does not answer | no | decisions are this node's share until it does |
//! | a reload failed | yes | the old rules are in force; the body says what is wrong |
//! | the store forgets keys when its memory is full | yes | `degraded`: a counter that is forgotten starts afresh |
//! | the doors are about to close | no | so that nobody new is sent here while the others are served |
//! | a door, or a watch over the store or the files, has ended | no | it does not come back by itself; the body says which |
//!
//! The store is asked here and not only watched: an instance without traffic would otherwise not know. The question is
//! a decision like any other, on a counter of its own; a store that answers PING but cannot run the script, or cannot write,
//! is not one that answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tollgate::{Check, Demand, Key, Limit, Limiter, Store, Timestamp};

use crate::reload::Reloader;

/// Two of these and the breaker's longest pause are less than the two seconds after which a healed store must be known to be.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// Nobody waits for this answer, so it may take longer than a decision.
const ASK_WITHIN: Duration = Duration::from_millis(400);
/// One answer that did not come may be a blip.
const FAILURES_TO_BE_AWAY: u32 = 2;

/// A store that has evicted no key in so many looks is taken to have stopped.
const LOOKS_WITHOUT_EVICTION: u32 = 12;

/// Whether to send work here. Cloning it is cheap, and clones share everything.
#[derive(Clone)]
pub struct Readiness(Arc<Inner>);

struct Inner {
    limiter: Limiter,
    store: Option<Arc<dyn Store>>,
    reloader: Reloader,
    /// In a row; until the first answer it counts as away.
    failures: AtomicU32,
    is_leaving: AtomicBool,
    /// What should have gone on.
    ended: Mutex<Vec<&'static str>>,
    eviction: Mutex<Eviction>,
}

/// What the store's server says about forgetting keys.
#[derive(Clone, Default, Debug)]
struct Eviction {
    policy: Option<String>,
    evicted_keys: Option<u64>,
    /// How many more looks the last eviction counts for.
    looks_left: u32,
}

impl Eviction {
    fn look(&mut self, policy: Option<&str>, evicted_keys: Option<u64>) {
        let has_grown = self.evicted_keys.zip(evicted_keys).is_some_and(|(before, now)| now > before);
        self.looks_left = if has_grown { LOOKS_WITHOUT_EVICTION } else { self.looks_left.saturating_sub(1) };
        self.policy = policy.map(str::to_owned);
        self.evicted_keys = evicted_keys;
    }

    /// Why counters may be forgotten, if they may.
    fn reason(&self) -> Option<String> {
        match &self.policy {
            _ if self.looks_left > 0 => Some(
                "the store evicts keys, and with them counters: give it memory, and set maxmemory-policy to noeviction"
                    .into(),
            ),
            Some(policy) if policy != "noeviction" => Some(format!(
                "maxmemory-policy is {policy}: when memory is full, the store forgets counters; set it to noeviction"
            )),
            _ => None,
        }
    }
}

/// Something that goes on for as long as this instance serves. If it ends before, that is told.
pub(crate) struct TaskGuard {
    readiness: Readiness,
    what: &'static str,
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        if !self.readiness.is_leaving() {
            tracing::error!(what = self.what, "has ended and should not have; this instance is not ready any more");
            self.readiness.0.ended.lock().push(self.what);
        }
    }
}

impl Readiness {
    /// Of an instance whose limiter asks this store, if it is a shared one.
    pub fn new(limiter: Limiter, store: Option<Arc<dyn Store>>, reloader: Reloader) -> Readiness {
        let failures = AtomicU32::new(FAILURES_TO_BE_AWAY);
        let (is_leaving, ended, eviction) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        Readiness(Arc::new(Inner { limiter, store, reloader, failures, is_leaving, ended, eviction }))
    }

    /// Something goes on for as long as the value is there.
    pub(crate) fn attend(&self, what: &'static str) -> TaskGuard {
        TaskGuard { readiness: self.clone(), what }
    }

    /// Asks the store every now and then whether it answers, until the process ends.
    pub async fn watch_store(self) {
        let Some(store) = &self.0.store else { return };
        let _attended = self.attend("store watch");
        loop {
            let answers = matches!(tokio::time::timeout(ASK_WITHIN, ask(&**store)).await, Ok(true));
            match answers {
                true => self.0.failures.store(0, Ordering::Relaxed),
                false => {
                    let count = |failures: u32| Some(failures.saturating_add(1));
                    let _ = self.0.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
                }
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// Notes what the store's server said about forgetting keys: its `maxmemory-policy`, and how many keys it has evicted.
    /// Logs a warning when it begins to.
    pub fn note_eviction(&self, policy: Option<&str>, evicted_keys: Option<u64>) {
        let mut eviction = self.0.eviction.lock();
        // What holds from the beginning is logged by whoever looks at the server at the start.
        let is_first = eviction.policy.is_none() && eviction.evicted_keys.is_none();
        let before = eviction.reason();
        eviction.look(policy, evicted_keys);
        match eviction.reason() {
            Some(reason) if !is_first && before.as_ref() != Some(&reason) => tracing::warn!(evicted_keys, "{reason}"),
            None if before.is_some() => tracing::info!("the store does not forget keys any more"),
            _ => {}
        }
    }

    /// Returns whether the store may forget counters, and how many keys it has evicted if that is known.
    pub(crate) fn eviction(&self) -> (bool, Option<u64>) {
        let eviction = self.0.eviction.lock();
        (eviction.reason().is_some(), eviction.evicted_keys)
    }

    /// The doors are about to close.
    pub fn leave(&self) {
        self.0.is_leaving.store(true, Ordering::Relaxed);
    }

    /// Whether work should be sent here.
    pub fn is_ready(&self) -> bool {
        !self.is_leaving() && self.is_store_there() && self.ended().is_empty()
    }

    /// What has ended that should have gone on.
    fn ended(&self) -> Vec<&'static str> {
        let mut ended = self.0.ended.lock().clone();
        ended.extend(self.0.reloader.watch_ended().then_some("file watch"));
        ended
    }

    fn is_leaving(&self) -> bool {
        self.0.is_leaving.load(Ordering::Relaxed)
    }

    fn is_store_there(&self) -> bool {
        let answers = || self.0.failures.load(Ordering::Relaxed) < FAILURES_TO_BE_AWAY;
        self.0.store.is_none() || (answers() && !self.0.limiter.stats().breaker_open)
    }

    /// Everything behind that word.
    pub(crate) fn to_json(&self) -> Value {
        let store = match self.0.store {
            None => json!({ "kind": "memory", "reachable": true }),
            Some(_) => json!({
                "kind": "redis",
                "reachable": self.is_store_there(),
                "breaker": if self.0.limiter.stats().breaker_open { "open" } else { "closed" },
            }),
        };
        let history = self.0.reloader.history();
        let mut reload = json!({ "result": "ok", "last_success": seconds(history.last_success) });
        if let Some((at, error)) = &history.failure {
            reload["result"] = "failed".into();
            reload["failed_at"] = seconds(*at).into();
            reload["error"] = error.to_json();
        }
        json!({
            "ready": self.is_ready(),
            "degraded": self.0.eviction.lock().reason().into_iter().collect::<Vec<_>>(),
            "shutting_down": self.is_leaving(),
            "ended": self.ended(),
            "store": store,
            "reload": reload,
        })
    }
}

/// Unix seconds.
fn seconds(at: Timestamp) -> u64 {
    at.as_micros() / 1_000_000
}

async fn ask(store: &dyn Store) -> bool {
    // Nobody can exhaust it, so every answer is one.
    let Ok(limit) = "10000000/s fixed-window".parse::<Limit>() else { return false };
    let Ok(key) = Key::new("tollgate-readiness") else { return false };
    let demand = Demand::new(limit, key);
    store.decide(&[Check::one(&demand)]).await.is_ok()
}

impl std::fmt::Debug for Readiness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readiness").field("is_ready", &self.is_ready()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_evicts_is_degraded_until_it_has_stopped_for_a_while() {
        let readiness = Readiness::new(Limiter::memory(), None, Reloader::nothing());
        let degraded = || readiness.to_json()["degraded"].to_string();
        assert_eq!(degraded(), "[]");
        readiness.note_eviction(Some("noeviction"), Some(7));
        assert_eq!(degraded(), "[]", "what was evicted before this instance looked");
        readiness.note_eviction(Some("noeviction"), Some(8));
        assert!(degraded().contains("evicts keys"), "{}", degraded());
        assert!(readiness.is_ready());
        for _ in 0..LOOKS_WITHOUT_EVICTION {
            assert_eq!(readiness.eviction(), (true, Some(8)));
            readiness.note_eviction(Some("noeviction"), Some(8));
        }
        assert_eq!(degraded(), "[]");
        readiness.note_eviction(Some("noeviction"), Some(0));
        assert_eq!(degraded(), "[]", "the server was restarted");
        readiness.note_eviction(Some("volatile-ttl"), Some(0));
        assert!(degraded().contains("maxmemory-policy is volatile-ttl"), "{}", degraded());
        readiness.note_eviction(None, None);
        assert_eq!(readiness.eviction(), (false, None), "what is unknown is no alarm; the start warns of it");
    }
}
