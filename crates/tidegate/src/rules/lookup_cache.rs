//! A cache in front of a source that answers slowly: plans in a Redis hash, API keys in a database.
//!
//! Lookups are on the request path, and clients choose what is looked up: anyone can send invented keys. So a
//! flood of them must neither evict known keys, nor grow the memory, nor overload the source:
//!
//! ```text
//!   name ──▶ found?    ──▶ value                                10,000 names at most
//!       └──▶ missing?  ──▶ none                                 10,000 names at most, apart from those that were found
//!       └──▶ paused?   ──▶ the last value, however old          for 250 ms after a failure or a timeout
//!       └──▶ running?  ──▶ wait for that lookup                 one lookup per name
//!       └──▶ a permit  ──▶ the source ──▶ cached for the TTL    a bounded number of lookups at once
//! ```
//!
//! **Refreshed early.** A request in the second half of the TTL starts a lookup in the background and does not wait for
//! it. So an active caller waits for its first lookup only. An option turns this off for names that the source does not
//! have: a client that repeats invented keys would keep a lookup per second going for each of them.
//!
//! **Runs to completion.** A lookup that its request stops waiting for continues in the background, at most for five
//! seconds, and its answer is cached.
//!
//! **Pauses.** An error or a panic concerns the source, so no name is looked up for 250 ms. A timeout may concern one name:
//! the others are looked up as before, until a second name times out and no lookup has answered in between. So a client
//! whose key takes long to find does not make the keys of other clients unknown, and a source that hangs holds few
//! requests.
//!
//! **Full caches.** Entries that have not expired are never evicted (`ttl_cache.rs`). If there is no room, the source
//! is asked for each request, within the bound of lookups at once. A request that finds no permit waits for one within
//! its own timeout, and holds no memory here.

use std::collections::HashMap;
use std::fmt::Display;
use std::future::Future;
use std::hash::Hash;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{Shared, WeakShared, poll_immediate};
use parking_lot::Mutex;
use tidegate_core::{Clock, Store, Timestamp};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::deadline::{answer_by, timer, within};
use crate::ttl_cache::{Expire, Id, TtlCache};

/// Time for which an answer is cached by default.
pub(crate) const TTL_DEFAULT: Duration = Duration::from_secs(1);
/// Time after a failure during which the source is not asked, in microseconds.
const PAUSE_US: u64 = 250_000;
/// Maximum number of cached answers of each kind: found, and missing.
const ENTRIES_MAX: usize = 10_000;
/// Maximum time of a lookup in the background. Without it, sources that hang would keep all permits.
const LOOKUP_MAX: Duration = Duration::from_secs(5);
/// Minimum time between two warnings about the same source, in microseconds.
const WARN_EVERY_US: u64 = 10_000_000;

/// The error of a lookup whose source failed, so that the answer is unknown.
///
/// Its text is logged, so it must not contain a secret.
pub type LookupError = Box<dyn std::error::Error + Send + Sync>;

/// Statistics of the lookups of plans or API keys: calls to their sources, and failures.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct LookupStats {
    /// Lookups that were sent to a source. Answers from a cache are not included.
    pub calls: u64,
    /// Failures: a source returned an error, panicked or did not answer in time, or too many lookups were running.
    ///
    /// A slow lookup is counted for each request that stops waiting for it, so this may exceed `calls`.
    pub failures: u64,
}

impl LookupStats {
    /// Returns the sums of two statistics.
    pub(crate) fn plus(self, other: LookupStats) -> LookupStats {
        LookupStats { calls: self.calls + other.calls, failures: self.failures + other.failures }
    }
}

/// The future of one lookup: the value, `None` if the source has none under this name, or the source's failure.
pub(crate) type Loading<V> = Pin<Box<dyn Future<Output = Result<Option<V>, LookupError>> + Send>>;

/// The settings of a [`LookupCache`].
#[derive(Clone)]
pub(crate) struct CacheOptions {
    pub(crate) clock: Arc<dyn Clock>,
    /// Time for which an answer is cached.
    pub(crate) ttl: Duration,
    /// Maximum number of lookups at once.
    pub(crate) lookups_max: usize,
    /// Whether a cached answer that there is no value is refreshed early, too.
    pub(crate) refreshes_missing: bool,
    /// The warning that is logged on a failure, at most every ten seconds.
    pub(crate) failing: &'static str,
    /// The message that is logged at the first success after a warning.
    pub(crate) recovered: &'static str,
}

/// How long a request waits for a lookup, and on which connection.
#[derive(Clone, Copy)]
pub(crate) struct WaitOptions<'s> {
    pub(crate) timeout: Duration,
    /// Whether the timeout is much shorter than a lookup may usually take, because the request has spent the time
    /// elsewhere. Such a timeout says nothing about the source, so it pauses nothing.
    pub(crate) is_shortened: bool,
    /// The store whose connection the lookup uses, or `None` if it uses another one. A reply of this store that was
    /// received before the timeout is used even if its task has not run by then.
    pub(crate) store: Option<&'s dyn Store>,
}

/// A bounded cache of the answers of a source.
///
/// Also bounds the number of lookups at once, and joins lookups of the same name. Clones share their state.
pub(crate) struct LookupCache<V>(Arc<Inner<V>>);

struct Inner<V> {
    options: CacheOptions,
    found: TtlCache<Cached<V>>,
    missing: TtlCache<Cached<V>>,
    /// The lookups under way. At most as many as there are permits.
    running: Mutex<HashMap<Id, WeakShared<Running<V>>>>,
    permits: Arc<Semaphore>,
    /// Until when the source is not asked after a failure, in microseconds since the epoch.
    paused_until_us: AtomicU64,
    /// The last name whose lookup timed out, and until when it is not looked up, in microseconds since the epoch. `None`
    /// after an answer of the source.
    timed_out: Mutex<Option<(Id, u64)>>,
    warnings: WarningGate,
    has_warned: AtomicBool,
    calls: AtomicU64,
    failures: AtomicU64,
}

type Running<V> = Pin<Box<dyn Future<Output = Result<Option<V>, Failed>> + Send>>;

/// The failure of a lookup. It has been counted, and logged unless a warning was logged in the last ten seconds.
#[derive(Clone, Copy, Debug)]
struct Failed;

/// A cached answer of the source.
#[derive(Clone)]
struct Cached<V> {
    /// `None` if the source has no value under this name.
    value: Option<V>,
    /// The time at which the source was asked.
    sent: Timestamp,
    ttl_us: u64,
}

impl<V> Cached<V> {
    /// Returns whether, at `now`, less than `age_us` microseconds have passed since the source was asked.
    ///
    /// `false` if `now` is before that time.
    fn is_younger(&self, age_us: u64, now: Timestamp) -> bool {
        // An answer from the future means that the clock was set back. It must not stay valid for longer.
        self.sent <= now && now < self.sent.plus_micros(age_us)
    }
}

impl<V> Expire for Cached<V> {
    fn is_expired(&self, now: Timestamp) -> bool {
        !self.is_younger(self.ttl_us, now)
    }
}

/// The ids of a name, one in each of the two caches.
#[derive(Clone, Copy)]
struct Ids {
    found: Id,
    missing: Id,
}

/// A lookup under way. Dropping it removes it from the list and returns its permit.
struct LookupGuard<V> {
    cache: Arc<Inner<V>>,
    id: Id,
    _permit: OwnedSemaphorePermit,
}

impl<V> Drop for LookupGuard<V> {
    fn drop(&mut self) {
        self.cache.running.lock().remove(&self.id);
    }
}

impl<V> Clone for LookupCache<V> {
    fn clone(&self) -> Self {
        LookupCache(self.0.clone())
    }
}

impl<V: Clone + Send + Sync + 'static> LookupCache<V> {
    /// Creates an empty cache.
    pub(crate) fn new(options: CacheOptions) -> LookupCache<V> {
        LookupCache(Arc::new(Inner {
            found: TtlCache::new(ENTRIES_MAX),
            missing: TtlCache::new(ENTRIES_MAX),
            running: Mutex::default(),
            permits: Arc::new(Semaphore::new(options.lookups_max.clamp(1, Semaphore::MAX_PERMITS))),
            paused_until_us: AtomicU64::new(0),
            timed_out: Mutex::new(None),
            warnings: WarningGate::default(),
            has_warned: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            options,
        }))
    }

    /// Returns the statistics since the cache was created.
    pub(crate) fn stats(&self) -> LookupStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LookupStats { calls: get(&self.0.calls), failures: get(&self.0.failures) }
    }

    /// Returns the cached answer, `Some(None)` if the source has no value under this name, or `None` if no answer is
    /// cached or it has expired.
    ///
    /// In the second half of the TTL, starts a lookup (`load`) in the background, if there is a tokio runtime and a
    /// permit, and none is under way or has just failed. Without a value, only if the options say so.
    pub(crate) fn cached(&self, name: impl Hash, load: impl FnOnce() -> Loading<V>) -> Option<Option<V>> {
        let (ids, now) = (self.ids(name), self.0.options.clock.now());
        let cached = self.recall(ids).filter(|cached| !cached.is_expired(now))?;
        let is_refreshed = cached.value.is_some() || self.0.options.refreshes_missing;
        let is_due = is_refreshed && !cached.is_younger(cached.ttl_us / 2, now) && !self.is_paused(ids.found, now);
        if is_due
            && self.running(ids.found).is_none()
            && Handle::try_current().is_ok()
            && let Ok(permit) = self.0.permits.clone().try_acquire_owned()
        {
            tokio::spawn(self.start(ids, permit, load()));
        }
        Some(cached.value)
    }

    /// Returns the value under this name: from the cache, else from the source by `load`.
    ///
    /// If the source fails, does not answer in time, or lookups of this name are paused, returns the last cached value,
    /// however old. `None` if the source has no value under this name, or if there is no cached answer to fall back on.
    ///
    /// Ready at its first poll if `load` is. Outside a tokio runtime with a timer there is no timeout.
    pub(crate) async fn get(&self, name: impl Hash, wait: WaitOptions<'_>, load: impl Fn() -> Loading<V>) -> Option<V> {
        if let Some(value) = self.cached(&name, &load) {
            return value;
        }
        let ids = self.ids(&name);
        let last = self.last(&name);
        if self.is_paused(ids.found, self.0.options.clock.now()) {
            return last;
        }
        let has_permit = AtomicBool::new(false);
        let mut loading = pin!(self.load(ids, &has_permit, load));
        let loaded = match (poll_immediate(loading.as_mut()).await, wait.store) {
            (Some(loaded), _) => Some(loaded),
            (None, None) => within(wait.timeout, loading).await,
            (None, Some(store)) => match timer(wait.timeout) {
                Some(timer) => answer_by(timer, store, loading).await,
                None => Some(loading.await),
            },
        };
        match loaded {
            Some(Ok(value)) => value,
            Some(Err(Failed)) => last,
            None if wait.is_shortened => {
                self.0.count_failure("the request had too little time left");
                last
            }
            None if has_permit.load(Ordering::Relaxed) => {
                self.0.record_timeout(ids.found, "no answer within the timeout");
                last
            }
            None => {
                // The source may be well, so other names are looked up as before.
                self.0.count_failure("too many lookups at once");
                last
            }
        }
    }

    /// Returns the last value of the source under this name, however old. `None` if it had none, or nothing is cached.
    pub(crate) fn last(&self, name: impl Hash) -> Option<V> {
        self.recall(self.ids(name)).and_then(|cached| cached.value)
    }

    /// Joins the running lookup of this name, or else waits for a permit and starts one. `None` if the source has no value
    /// under this name.
    ///
    /// Sets `has_permit` when the lookup is running.
    ///
    /// # Errors
    /// If the source fails, panics or takes longer than [`LOOKUP_MAX`].
    async fn load(
        &self,
        ids: Ids,
        has_permit: &AtomicBool,
        load: impl Fn() -> Loading<V>,
    ) -> Result<Option<V>, Failed> {
        if let Some(running) = self.running(ids.found) {
            has_permit.store(true, Ordering::Relaxed);
            return running.await;
        }
        let permits = &self.0.permits;
        let permit = match permits.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                let permit = permits.clone().acquire_owned().await.map_err(|_closed| Failed)?;
                let now = self.0.options.clock.now();
                if let Some(cached) = self.recall(ids).filter(|cached| !cached.is_expired(now)) {
                    return Ok(cached.value);
                }
                permit
            }
        };
        has_permit.store(true, Ordering::Relaxed);
        let running = self.start(ids, permit, load());
        if let Some(loaded) = poll_immediate(running.clone()).await {
            return loaded;
        }
        // Completes without this request, which may time out or be dropped.
        if Handle::try_current().is_ok() {
            tokio::spawn(running.clone());
        }
        running.await
    }

    /// Returns the running lookup of this name, or else a future that asks the source and caches the answer.
    ///
    /// The future does nothing until it is polled. The permit is returned if there is a running lookup.
    fn start(&self, ids: Ids, permit: OwnedSemaphorePermit, loading: Loading<V>) -> Shared<Running<V>> {
        let mut running = self.0.running.lock();
        if let Some(joined) = running.get(&ids.found).and_then(WeakShared::upgrade) {
            return joined;
        }
        let guard = LookupGuard { cache: self.0.clone(), id: ids.found, _permit: permit };
        let lookup: Running<V> = Box::pin(async move { guard.cache.run(ids, loading).await });
        let lookup = lookup.shared();
        if let Some(weak) = lookup.downgrade() {
            running.insert(ids.found, weak);
        }
        lookup
    }

    fn ids(&self, name: impl Hash) -> Ids {
        Ids { found: self.0.found.id(&name), missing: self.0.missing.id(&name) }
    }

    /// Returns the cached answer, expired or not. `None` if none is cached.
    fn recall(&self, ids: Ids) -> Option<Cached<V>> {
        let found = self.0.found.get_with(ids.found, Cached::clone);
        found.or_else(|| self.0.missing.get_with(ids.missing, Cached::clone))
    }

    /// Returns the running lookup with this id, or `None` if there is none.
    fn running(&self, id: Id) -> Option<Shared<Running<V>>> {
        self.0.running.lock().get(&id).and_then(WeakShared::upgrade)
    }

    /// Returns whether the source is not to be asked about the name with this id, because a lookup has failed, or a
    /// lookup of this name has timed out, within the last [`PAUSE_US`].
    fn is_paused(&self, id: Id, now: Timestamp) -> bool {
        // A later time means that the clock was set back.
        let is_ahead = |until_us| (now.as_micros()..=now.plus_micros(PAUSE_US).as_micros()).contains(&until_us);
        is_ahead(self.0.paused_until_us.load(Ordering::Relaxed))
            || self.0.timed_out.lock().is_some_and(|(slow, until_us)| slow == id && is_ahead(until_us))
    }
}

impl<V: Clone + Send + Sync + 'static> Inner<V> {
    /// Asks the source, at most for [`LOOKUP_MAX`], and caches the answer if there is room. `None` if the source has no value
    /// under this name.
    ///
    /// # Errors
    /// If the source fails, panics or does not answer in time. The failure is counted, and pauses lookups.
    async fn run(&self, ids: Ids, loading: Loading<V>) -> Result<Option<V>, Failed> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let sent = self.options.clock.now();
        let value = match within(LOOKUP_MAX, AssertUnwindSafe(loading).catch_unwind()).await {
            Some(Ok(Ok(value))) => value,
            Some(Ok(Err(error))) => return Err(self.record_failure(error)),
            Some(Err(_panic)) => return Err(self.record_failure("the lookup panicked")),
            None => return Err(self.record_timeout(ids.found, format_args!("no answer within {LOOKUP_MAX:?}"))),
        };
        *self.timed_out.lock() = None;
        let ttl_us = u64::try_from(self.options.ttl.as_micros()).unwrap_or(u64::MAX);
        let (cached, now) = (Cached { value: value.clone(), sent, ttl_us }, self.options.clock.now());
        match value {
            Some(_) => {
                self.found.put(ids.found, cached, now);
                self.missing.forget(ids.missing);
            }
            None => {
                self.missing.put(ids.missing, cached, now);
                self.found.forget(ids.found);
            }
        }
        if self.has_warned.swap(false, Ordering::Relaxed) {
            tracing::info!("{}", self.options.recovered);
        }
        Ok(value)
    }

    /// Counts a failure of the source, and pauses lookups for [`PAUSE_US`] from now.
    fn record_failure(&self, reason: impl Display) -> Failed {
        let until = self.options.clock.now().plus_micros(PAUSE_US);
        self.paused_until_us.store(until.as_micros(), Ordering::Relaxed);
        self.count_failure(reason)
    }

    /// Counts a lookup of the name with this id that took too long, and pauses lookups of this name for [`PAUSE_US`].
    ///
    /// Pauses all lookups if the last timeout was that of another name and the source has not answered since.
    fn record_timeout(&self, id: Id, reason: impl Display) -> Failed {
        let until = self.options.clock.now().plus_micros(PAUSE_US);
        match self.timed_out.lock().replace((id, until.as_micros())) {
            Some((other, _)) if other != id => self.record_failure(reason),
            _ => self.count_failure(reason),
        }
    }

    /// Counts a failure, and logs a warning unless one was logged in the last ten seconds.
    fn count_failure(&self, reason: impl Display) -> Failed {
        self.failures.fetch_add(1, Ordering::Relaxed);
        if self.warnings.opens_at(self.options.clock.now()) {
            self.has_warned.store(true, Ordering::Relaxed);
            tracing::warn!(%reason, "{}", self.options.failing);
        }
        Failed
    }
}

/// Bounds the rate of a warning to one in ten seconds.
#[derive(Debug, Default)]
pub(crate) struct WarningGate {
    /// The time of the last warning in microseconds since the epoch. Zero if there was none.
    last_us: AtomicU64,
}

impl WarningGate {
    /// Returns whether a warning may be logged at `now`. If it returns `true`, it returns `false` for ten seconds.
    pub(crate) fn opens_at(&self, now: Timestamp) -> bool {
        let (last_us, now_us) = (self.last_us.load(Ordering::Relaxed), now.as_micros());
        // A last warning in the future means that the clock was set back.
        let is_recent = last_us != 0 && (last_us..last_us.saturating_add(WARN_EVERY_US)).contains(&now_us);
        let (exchange, relaxed) = (AtomicU64::compare_exchange, Ordering::Relaxed);
        !is_recent && exchange(&self.last_us, last_us, now_us.max(1), relaxed, relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests;
