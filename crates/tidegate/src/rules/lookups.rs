//! The lookups of an engine: plans and API keys that its rules do not determine, with their deadline.
//!
//! ```text
//!   decision      ├──────────────────────── deadline ────────────────────────┤
//!   key lookup    ├─────────── at most 3/4 ───────────┤
//!   plan lookups            ├────────── what is left of the deadline ─────────┤
//!   check                            ├──────── what is left of the deadline ──┤
//! ```
//!
//! A lookup that hangs never holds its request beyond the deadline. A key without an answer by then is treated as in
//! its last cached answer, or as unknown if there is none. A caller whose plan is not found has the plan `default` or
//! `anonymous`. A lookup that is ready at its first poll costs no timer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::{Clock, SystemClock};
use tokio::time::Instant;

use super::key_lookup::KeyLookup;
use super::lookup_cache::{CacheOptions, Loading, LookupCache, LookupStats, TTL_DEFAULT, WaitOptions, WarningGate};
use super::plan::{LimitSetId, PlanLookup, PlanQuestion};
use super::set::RuleSet;
use crate::deadline::within;
use crate::identity::{KeyDigest, KnownKey};

/// The default deadline of lookups without an engine: that of a limiter.
const DEADLINE_DEFAULT: Duration = Duration::from_millis(25);
/// The default maximum number of key lookups at once.
const KEY_LOOKUPS_MAX: usize = 64;

/// The sources of plans and API keys that an [`Engine`](crate::engine::Engine) asks about callers that its rules do not
/// determine.
///
/// Clones share the cached keys. A `Vec<Arc<dyn PlanLookup>>` converts into it.
///
/// **Keys** are looked up by their digest. Answers are cached for a second by default, for each source at most 10,000
/// known and 10,000 unknown keys. Requests with the same key share one lookup, and by default at most 64 lookups of a
/// source run at once. So a flood of invented keys neither grows the memory nor evicts known keys.
///
/// **Plans** are not cached here; `PlanHash` has a cache of its own.
///
/// **Deadline.** All lookups of a request together take at most the deadline of a check, unless
/// [`deadline`](Lookups::deadline) sets another one.
///
/// ```
/// use tidegate::Limiter;
/// use tidegate::engine::{Engine, Outcome, RequestOptions};
/// use tidegate::identity::{KeyDigest, KnownKey};
/// use tidegate::rules::{Lookups, Plan, RequestView};
/// use tidegate::{Rule, Rules};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let rules = Rules::new()
///     .plan(Plan::new("default").limit("1/min"))
///     .plan(Plan::new("pro").limit("1000/min"))
///     .rule(Rule::new("api").limits_from_plan())
///     .build()?;
/// // In a service, a query of its database.
/// let known = |digest: KeyDigest| async move {
///     let is_known = digest == KeyDigest::of("s3cr3t");
///     Ok::<_, std::io::Error>(is_known.then(|| KnownKey::new().name("acme").plan("pro")))
/// };
/// let engine = Engine::with_lookups(Limiter::memory(), rules, Lookups::new().key(known));
///
/// let request = http::Request::get("/").header("x-api-key", "s3cr3t").body(())?;
/// let outcome = engine.check(&RequestView::of(&request), [203, 0, 113, 9].into(), RequestOptions::default()).await;
/// let Outcome::Admitted(permit) = outcome else { panic!("refused") };
/// assert_eq!(permit.decision().unwrap().limits[0].quota, 1_000);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Lookups {
    plans: Vec<Arc<dyn PlanLookup>>,
    keys: Vec<CachedKeys>,
    /// `None` until it is set: the engine then uses the deadline of its limiter.
    deadline: Option<Duration>,
    /// The settings of the caches of keys.
    key_cache: CacheOptions,
    plan_failures: Arc<PlanFailures>,
}

/// A source of keys, with its cache.
#[derive(Clone)]
struct CachedKeys {
    lookup: Arc<dyn KeyLookup>,
    cache: LookupCache<KnownKey>,
}

/// Plan lookups that panicked or did not answer within the deadline.
#[derive(Default)]
struct PlanFailures {
    count: AtomicU64,
    warnings: WarningGate,
}

impl Default for Lookups {
    fn default() -> Self {
        let key_cache = CacheOptions {
            clock: Arc::new(SystemClock::new()),
            ttl: TTL_DEFAULT,
            lookups_max: KEY_LOOKUPS_MAX,
            failing: "cannot look up API keys; cached keys stay valid, and all others are treated as unknown",
            recovered: "API keys can be looked up again",
        };
        let plan_failures = Arc::default();
        Lookups { plans: Vec::new(), keys: Vec::new(), deadline: None, key_cache, plan_failures }
    }
}

impl Lookups {
    /// Creates lookups without any source.
    pub fn new() -> Lookups {
        Lookups::default()
    }

    /// Adds a source of plans, for callers whose plan the rules do not determine.
    ///
    /// Sources are asked in the order in which they were added, until one returns a plan that exists.
    #[must_use]
    pub fn plan(mut self, lookup: impl PlanLookup + 'static) -> Lookups {
        self.plans.push(Arc::new(lookup));
        self
    }

    /// Adds a source of API keys, for keys that the rules do not list.
    ///
    /// Sources are asked in the order in which they were added, until one knows the key. Each has a cache of its own.
    #[must_use]
    pub fn key(mut self, lookup: impl KeyLookup + 'static) -> Lookups {
        self.keys.push(CachedKeys::new(Arc::new(lookup), &self.key_cache));
        self
    }

    /// Sets the time that the lookups of one request may take together. Defaults to the deadline of the engine's
    /// limiter, and to 25 ms without an engine.
    ///
    /// Key lookups get three quarters of it, so that slow ones leave time for the check. After that the last cached
    /// answer about the key is used, even if it has expired; without one, the key is unknown. If the deadline passes
    /// before a plan is found, the plan is `default` or `anonymous`.
    ///
    /// The time of lookups counts against the deadline of the check, too. If none of that is left, the failure policy
    /// decides.
    ///
    /// A key lookup fails after five seconds, even if the deadline is longer. Outside a tokio runtime with a timer,
    /// neither bound applies.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Lookups {
        Lookups { deadline: Some(deadline), ..self }
    }

    /// Sets the time for which an answer about a key is cached, including that the key is unknown. Defaults to a
    /// second. With zero, no answer is reused, except if a lookup fails.
    ///
    /// A change in the source takes effect within this time, or later while its lookups fail. A request in the second
    /// half of this time refreshes the answer in the background. Answers cached so far are discarded, and earlier
    /// clones keep caches of their own.
    #[must_use]
    pub fn key_ttl(self, ttl: Duration) -> Lookups {
        let key_cache = CacheOptions { ttl, ..self.key_cache.clone() };
        self.with_key_cache(key_cache)
    }

    /// Sets the maximum number of lookups that each source of keys runs at once. Defaults to 64; 0 counts as 1.
    ///
    /// Further requests wait until a lookup has ended, within the deadline. Answers cached so far are discarded, and
    /// earlier clones keep caches of their own.
    #[must_use]
    pub fn key_lookups_max(self, lookups_max: usize) -> Lookups {
        let key_cache = CacheOptions { lookups_max, ..self.key_cache.clone() };
        self.with_key_cache(key_cache)
    }

    /// Sets the clock by which cached keys expire. Defaults to [`SystemClock`].
    ///
    /// Answers cached so far are discarded, and earlier clones keep caches of their own.
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Lookups {
        let key_cache = CacheOptions { clock, ..self.key_cache.clone() };
        self.with_key_cache(key_cache)
    }

    /// Replaces the settings of the key caches, and every cache by an empty one.
    fn with_key_cache(self, key_cache: CacheOptions) -> Lookups {
        let keys = self.keys.into_iter().map(|keys| CachedKeys::new(keys.lookup, &key_cache)).collect();
        Lookups { keys, key_cache, ..self }
    }

    /// Sets the deadline, unless one was set.
    pub(crate) fn or_deadline(self, deadline: Duration) -> Lookups {
        Lookups { deadline: self.deadline.or(Some(deadline)), ..self }
    }

    /// Returns whether there is a source of plans.
    pub fn has_plans(&self) -> bool {
        !self.plans.is_empty()
    }

    /// Returns whether there is a source of API keys.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Returns the sum of the statistics of all sources of plans.
    ///
    /// Includes a failure for each lookup that panicked, and for each request whose deadline passed before its plan was
    /// found. A source without statistics of its own (see [`PlanLookup::stats`]) adds nothing else.
    pub fn plan_stats(&self) -> LookupStats {
        let failures = LookupStats { calls: 0, failures: self.plan_failures.count.load(Ordering::Relaxed) };
        self.plans.iter().map(|lookup| lookup.stats()).fold(failures, LookupStats::plus)
    }

    /// Returns the sum of the statistics of all sources of API keys.
    pub fn key_stats(&self) -> LookupStats {
        self.keys.iter().map(|keys| keys.cache.stats()).fold(LookupStats::default(), LookupStats::plus)
    }

    /// Looks up an API key that the rules do not list, in the caches and the sources, within three quarters of the
    /// deadline.
    ///
    /// If a source fails or does not answer in time, its last cached answer is used, even if it has expired. Returns
    /// `None` if no source knows the key, or if there is no such answer. In a tokio runtime, a lookup continues in the
    /// background if the returned future is dropped.
    pub async fn find_key(&self, digest: &KeyDigest) -> Option<KnownKey> {
        let (begun, time_max) = (Instant::now(), self.key_time_max());
        for keys in &self.keys {
            let wait = WaitOptions { timeout: time_max.saturating_sub(begun.elapsed()), store: keys.lookup.store() };
            if let Some(known) = keys.cache.get(digest.as_bytes(), wait, || keys.load(*digest)).await {
                return Some(known);
            }
        }
        None
    }

    /// Returns the cached answer about an API key: `Some(None)` if it is unknown to all sources, or `None` if
    /// [`find_key`](Lookups::find_key) has to ask one of them.
    pub(crate) fn cached_key(&self, digest: &KeyDigest) -> Option<Option<KnownKey>> {
        for keys in &self.keys {
            if let Some(known) = keys.cache.cached(digest.as_bytes(), || keys.load(*digest))? {
                return Some(Some(known));
            }
        }
        Some(None)
    }

    /// Looks up the limit set of a caller whose plan the rules do not determine, within the deadline.
    ///
    /// Returns the [`default_limit_set`](RuleSet::default_limit_set) of the caller if no source returns a plan that
    /// exists before the deadline.
    pub async fn limit_set(&self, rules: &RuleSet, question: &PlanQuestion) -> LimitSetId {
        self.limit_set_after(Duration::ZERO, rules, question).await
    }

    /// Looks up a limit set like [`limit_set`](Lookups::limit_set), for a request that has used the time `spent` of the
    /// deadline.
    pub(crate) async fn limit_set_after(
        &self,
        spent: Duration,
        rules: &RuleSet,
        question: &PlanQuestion,
    ) -> LimitSetId {
        let deadline = self.deadline.unwrap_or(DEADLINE_DEFAULT);
        let on_panic = || self.record_plan_failure("the lookup panicked");
        let lookup = rules.look_up_limit_set_with(question, &self.plans, on_panic);
        within(deadline.saturating_sub(spent), lookup).await.unwrap_or_else(|| {
            self.record_plan_failure("no answer within the deadline");
            rules.default_limit_set(question.is_identified())
        })
    }

    /// Counts a failed plan lookup, and logs a warning unless one was logged in the last ten seconds.
    fn record_plan_failure(&self, reason: &str) {
        self.plan_failures.count.fetch_add(1, Ordering::Relaxed);
        if self.plan_failures.warnings.opens_at(self.key_cache.clock.now()) {
            tracing::warn!(reason, "a plan lookup failed; the caller gets the plan of the next source, or default");
        }
    }

    /// Returns the time that key lookups may take. The rest of the deadline is left to the check.
    fn key_time_max(&self) -> Duration {
        self.deadline.unwrap_or(DEADLINE_DEFAULT) / 4 * 3
    }
}

impl CachedKeys {
    fn new(lookup: Arc<dyn KeyLookup>, options: &CacheOptions) -> CachedKeys {
        CachedKeys { lookup, cache: LookupCache::new(options.clone()) }
    }

    fn load(&self, digest: KeyDigest) -> Loading<KnownKey> {
        let lookup = self.lookup.clone();
        Box::pin(async move { lookup.key(&digest).await })
    }
}

impl From<Vec<Arc<dyn PlanLookup>>> for Lookups {
    fn from(plans: Vec<Arc<dyn PlanLookup>>) -> Lookups {
        Lookups { plans, ..Lookups::default() }
    }
}

impl std::fmt::Debug for Lookups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lookups")
            .field("plans", &self.plans.len())
            .field("keys", &self.keys.len())
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
