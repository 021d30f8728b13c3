//! Whether to send work here: `/healthz` and `/readyz`.
//!
//! *Alive* means that the process answers. *Ready* means that an answer is worth having from here:
//!
//! | | ready | why |
//! |---|---|---|
//! | the store answers, or counters are in memory | yes | |
//! | the store does not answer | no | decisions are this node's share until it does |
//! | a reload failed | yes | the old rules are in force; the body says what is wrong |
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
}

/// Something that goes on for as long as this instance serves. If it ends before, that is told.
pub(crate) struct Attended {
    readiness: Readiness,
    what: &'static str,
}

impl Drop for Attended {
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
        let (is_leaving, ended) = (AtomicBool::new(false), Mutex::default());
        Readiness(Arc::new(Inner { limiter, store, reloader, failures, is_leaving, ended }))
    }

    /// Something goes on for as long as the value is there.
    pub(crate) fn attend(&self, what: &'static str) -> Attended {
        Attended { readiness: self.clone(), what }
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
        ended.extend(self.0.reloader.is_deaf().then_some("file watch"));
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
