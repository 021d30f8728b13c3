//! The lookups of an engine: plans and API keys that its rules do not determine, with their deadline.
//!
//! ```text
//!   decision      ├──────────────────────── deadline ────────────────────────┤
//!   key lookups   ├─────────── at most 3/4 ───────────┤
//!   plan lookup             ├─────────── at most 3/4, and what is left ───────┤
//!   check                            ├──────── what is left of the deadline ──┤
//! ```
//!
//! A lookup that hangs never holds its request beyond the deadline. A key or plan without an answer by then is treated as
//! in its last cached answer, however old. This holds even if no time is left to ask: a slow source never makes the cached
//! answers of another one unreachable. Without a cached answer, the key is unknown, and the plan is `default` or
//! `anonymous`. A lookup that is ready at its first poll costs no timer.
//!
//! **Cached** (`lookup_cache.rs`), because lookups are on the request path. An answer, also that there is none, is cached
//! for a second. Requests in the second half of that second start a lookup in the background, so a caller with two
//! requests a second or more never waits for one.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::{Clock, SystemClock, Timestamp};
use tokio::time::Instant;

#[cfg(feature = "redis")]
use super::key_hash::KeyHash;
use super::key_lookup::KeyLookup;
use super::lookup_cache::{CacheOptions, Loading, LookupCache, LookupError, LookupStats, TTL_DEFAULT, WaitOptions};
use super::plan::{LimitSet, PlanLookup, PlanQuestion};
use super::set::RuleSet;
use crate::identity::{AddressKey, KeyDigest, KnownKey};
use crate::limiter::catch_panic;
use crate::ttl_cache::{Expire, TtlCache};

/// The default deadline of lookups without an engine: that of a limiter.
const DEADLINE_DEFAULT: Duration = Duration::from_millis(25);
/// The default maximum number of lookups of a source at once.
const LOOKUPS_MAX: usize = 64;
/// The maximum number of lookups per second and address that find no key.
const UNKNOWN_KEYS_MAX: u32 = 10;
/// The time in which [`UNKNOWN_KEYS_MAX`] lookups of an address may find no key, in microseconds.
const UNKNOWN_KEYS_US: u64 = 1_000_000;
/// The maximum number of addresses with unknown keys that are remembered. Further ones are not bounded.
const UNKNOWN_KEY_ADDRESSES_MAX: usize = 65_536;
/// The maximum number of plan lookups at once on the store's connection. They share it, and an instance that starts sees
/// many callers at once.
const STORE_LOOKUPS_MAX: usize = 1_024;

/// The sources of plans and API keys that an [`Engine`](crate::engine::Engine) asks about callers that its rules do not
/// determine.
///
/// Clones share the cached answers. A `Vec<Arc<dyn PlanLookup>>` converts into it.
///
/// **Keys** are looked up by their digest. Answers are cached for a second by default, for each source at most 10,000
/// known and 10,000 unknown keys. Requests with the same key share one lookup, and by default at most 64 lookups of a
/// source run at once. So a flood of invented keys neither grows the memory nor evicts known keys.
///
/// An engine looks up at most ten keys per second and address that turn out to be unknown, not counting lookups that are
/// running at the same time. After that, it uses the last cached answer about a key from this address, however old.
/// Without one, the key is unknown, until the second is over.
///
/// **Plans** are looked up by the caller ([`PlanQuestion`]). Answers are cached for a second, with the same bounds.
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
    plans: Vec<CachedPlans>,
    keys: Vec<CachedKeys>,
    /// `None` until it is set: the engine then uses the deadline of its limiter.
    deadline: Option<Duration>,
    /// The settings of the caches of keys.
    key_cache: CacheOptions,
    /// The keys that were not found, by address.
    unknown_keys: Arc<TtlCache<UnknownKeys>>,
}

/// The number of lookups of one address that found no key, since a time.
#[derive(Debug, Default)]
struct UnknownKeys {
    since: Timestamp,
    count: u32,
}

impl Expire for UnknownKeys {
    fn is_expired(&self, now: Timestamp) -> bool {
        now < self.since || now >= self.since.plus_micros(UNKNOWN_KEYS_US)
    }
}

/// A source of keys, with its cache.
#[derive(Clone)]
struct CachedKeys {
    lookup: Arc<dyn KeyLookup>,
    cache: LookupCache<KnownKey>,
}

/// A source of plans, with its cache.
#[derive(Clone)]
struct CachedPlans {
    lookup: Arc<dyn PlanLookup>,
    cache: LookupCache<Arc<str>>,
}

/// The error of [`Lookups::key_named`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyNameError {
    /// Several keys have this name. The field is their number.
    #[error("{0} API keys have this name")]
    Ambiguous(usize),
    /// The source of keys cannot be searched. The message has no key.
    #[error(transparent)]
    Source(LookupError),
}

impl Default for Lookups {
    fn default() -> Self {
        let key_cache = CacheOptions {
            clock: Arc::new(SystemClock::new()),
            ttl: TTL_DEFAULT,
            lookups_max: LOOKUPS_MAX,
            refreshes_missing: false,
            failing: "cannot look up API keys; cached keys stay valid, and all others are treated as unknown",
            recovered: "API keys can be looked up again",
        };
        let unknown_keys = Arc::new(TtlCache::new(UNKNOWN_KEY_ADDRESSES_MAX));
        Lookups { plans: Vec::new(), keys: Vec::new(), deadline: None, key_cache, unknown_keys }
    }
}

impl Lookups {
    /// Creates lookups without any source.
    pub fn new() -> Lookups {
        Lookups::default()
    }

    /// Adds a source of plans, for callers whose plan the rules do not determine: an asynchronous closure, a `PlanHash`,
    /// or another [`PlanLookup`].
    ///
    /// Sources are asked in the order in which they were added, until one returns a plan that exists. Each has a cache of
    /// its own.
    ///
    /// ```
    /// use tidegate::rules::{Lookups, PlanQuestion};
    ///
    /// // In a service, a query of its database.
    /// let plan_of = |question: PlanQuestion| async move {
    ///     Ok::<_, std::io::Error>(question.user.map(|_| "pro"))
    /// };
    /// let lookups = Lookups::new().plan(plan_of);
    /// assert!(lookups.has_plans());
    /// ```
    #[must_use]
    pub fn plan(mut self, lookup: impl PlanLookup + 'static) -> Lookups {
        self.plans.push(CachedPlans::new(Arc::new(lookup), &self.key_cache.clock));
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
    /// The key lookups get three quarters of it, and so does each plan lookup, within what is left, so that slow ones
    /// leave time for the check. After that the last cached answer is used, even if it has expired. Without one, the key
    /// is unknown, and the plan is `default` or `anonymous`.
    ///
    /// The time of lookups counts against the deadline of the check, too. If none of that is left, the failure policy
    /// decides.
    ///
    /// A lookup fails after five seconds, even if the deadline is longer. Outside a tokio runtime with a timer,
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

    /// Sets the clock by which cached answers expire. Defaults to [`SystemClock`].
    ///
    /// Answers cached so far are discarded, and earlier clones keep caches of their own.
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Lookups {
        let key_cache = CacheOptions { clock: clock.clone(), ..self.key_cache.clone() };
        let plans = self.plans.iter().map(|plans| CachedPlans::new(plans.lookup.clone(), &clock)).collect();
        Lookups { plans, ..self }.with_key_cache(key_cache)
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
    pub fn plan_stats(&self) -> LookupStats {
        self.plans.iter().map(|plans| plans.cache.stats()).fold(LookupStats::default(), LookupStats::plus)
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
        let (begun, full) = (Instant::now(), self.time_max());
        for keys in &self.keys {
            let timeout = full.saturating_sub(begun.elapsed());
            let wait = WaitOptions { timeout, is_shortened: timeout < full / 2, store: keys.lookup.store() };
            if let Some(known) = keys.cache.get(digest.as_bytes(), wait, || keys.load(*digest)).await {
                return Some(known);
            }
        }
        None
    }

    /// Looks up an API key for a client with this address, like [`find_key`](Lookups::find_key): `None` if it is unknown.
    ///
    /// If ten lookups of the address have found no key within a second, no source is asked: the last cached answer is
    /// used, however old. Otherwise a client that invents keys would cost a call for each of its requests.
    pub(crate) async fn find_key_from(&self, address: AddressKey, digest: &KeyDigest) -> Option<KnownKey> {
        let (id, now) = (self.unknown_keys.id(address), self.key_cache.clock.now());
        let is_exhausted = |unknown: &UnknownKeys| !unknown.is_expired(now) && unknown.count >= UNKNOWN_KEYS_MAX;
        if self.unknown_keys.get_with(id, is_exhausted).unwrap_or(false) {
            return self.last_key(digest);
        }
        let known = self.find_key(digest).await;
        if known.is_none() {
            self.unknown_keys.update(id, now, |unknown| {
                if unknown.is_expired(now) {
                    *unknown = UnknownKeys { since: now, count: 0 };
                }
                unknown.count = unknown.count.saturating_add(1);
            });
        }
        known
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

    /// Returns the last answer about an API key that a source knows, however old. `None` if there is none.
    pub(crate) fn last_key(&self, digest: &KeyDigest) -> Option<KnownKey> {
        self.keys.iter().find_map(|keys| keys.cache.last(digest.as_bytes()))
    }

    /// Returns the first source of API keys that is a Redis hash, or `None` if there is none.
    #[cfg(feature = "redis")]
    pub fn key_hash(&self) -> Option<&KeyHash> {
        self.keys.iter().find_map(|keys| keys.lookup.hash())
    }

    /// Finds the API key whose owner has this name, in the Redis hash of keys. Returns `None` if no key there has it, or
    /// if no source is a Redis hash. Other sources cannot be searched for a name.
    ///
    /// Scans the hash, so it is for operators, and never called for a request. Has no deadline of its own.
    ///
    /// # Errors
    /// If several keys have the name, the store fails, or the hash has more than 1,000,000 entries.
    #[cfg_attr(not(feature = "redis"), allow(clippy::unused_async))]
    pub async fn key_named(&self, name: &str) -> Result<Option<(KeyDigest, KnownKey)>, KeyNameError> {
        #[cfg(feature = "redis")]
        if let Some(hash) = self.key_hash() {
            let mut named = hash.find_named(name).await.map_err(|error| KeyNameError::Source(error.into()))?;
            return match named.len() {
                0 | 1 => Ok(named.pop()),
                several => Err(KeyNameError::Ambiguous(several)),
            };
        }
        let _ = name;
        Ok(None)
    }

    /// Looks up the limit set of a caller whose plan the rules do not determine, in the caches and the sources, within
    /// the deadline.
    ///
    /// If a source fails or does not answer in time, its last cached answer is used, even if it has expired. Returns the
    /// [`default_limit_set`](RuleSet::default_limit_set) of the caller if no source returns a plan that exists.
    pub(crate) async fn limit_set(&self, rules: &RuleSet, question: &PlanQuestion) -> LimitSet {
        self.limit_set_after(Duration::ZERO, rules, question).await
    }

    /// Looks up a limit set like [`limit_set`](Lookups::limit_set), for a request that has used the time `spent` of the
    /// deadline.
    pub(crate) async fn limit_set_after(&self, spent: Duration, rules: &RuleSet, question: &PlanQuestion) -> LimitSet {
        let (begun, full) = (Instant::now(), self.time_max());
        let deadline = self.deadline.unwrap_or(DEADLINE_DEFAULT);
        for plans in &self.plans {
            let Some(question) = catch_panic(|| plans.lookup.relevant(question)).flatten() else { continue };
            let timeout = deadline.saturating_sub(spent + begun.elapsed()).min(full);
            let wait = WaitOptions { timeout, is_shortened: timeout < full / 2, store: plans.lookup.store() };
            let plan = plans.cache.get(&*question, wait, || plans.load(&question)).await;
            if let Some(limit_set) = plan.and_then(|plan| rules.limit_set_named(&plan)) {
                return limit_set;
            }
        }
        rules.default_limit_set(question.is_identified())
    }

    /// Returns the time that the lookups of a key, or one of a plan, may take. The rest of the deadline is left to the
    /// check.
    fn time_max(&self) -> Duration {
        self.deadline.unwrap_or(DEADLINE_DEFAULT) / 4 * 3
    }
}

impl CachedPlans {
    fn new(lookup: Arc<dyn PlanLookup>, clock: &Arc<dyn Clock>) -> CachedPlans {
        let cache = LookupCache::new(CacheOptions {
            clock: clock.clone(),
            ttl: TTL_DEFAULT,
            lookups_max: if lookup.store().is_some() { STORE_LOOKUPS_MAX } else { LOOKUPS_MAX },
            refreshes_missing: true,
            failing: "cannot look up plans; cached callers keep their last plan, and others get `default`",
            recovered: "plans can be looked up again",
        });
        CachedPlans { lookup, cache }
    }

    fn load(&self, question: &PlanQuestion) -> Loading<Arc<str>> {
        let (lookup, question) = (self.lookup.clone(), question.clone());
        Box::pin(async move { lookup.plan(&question).await })
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
        let lookups = Lookups::default();
        let plans = plans.into_iter().map(|lookup| CachedPlans::new(lookup, &lookups.key_cache.clock)).collect();
        Lookups { plans, ..lookups }
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
