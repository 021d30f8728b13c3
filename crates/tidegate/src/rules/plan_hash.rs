//! Plans from a Redis hash: an application writes a field, and every instance uses the new plan within about a second.
//!
//! ```text
//!   HSET tidegate:plans  api_key:4e738ca5…  pro        by the key's SHA-256, so that the hash holds no key
//!   HSET tidegate:plans  user:ann           free       by the verified user
//! ```
//!
//! **Cached** (`lookup_cache.rs`), because lookups are on the request path. A reply, also *no such field*, is cached
//! for a second. Requests in the second half of that second start a lookup in the background, so a caller with two
//! requests a second or more never waits for one. At most 10,000 callers with a plan and 10,000 without one are cached.
//! While the cache is full, the hash is read for every request of a caller that is not in it.
//!
//! **Does not block requests.** The command uses the store's connection and has a timeout. The time it takes counts
//! against the deadline of the decision: the check that follows gets what is left. So a caller that is not cached is
//! decided by the store, under its plan, while two round trips fit into the deadline.
//!
//! ```text
//!   decision   ├────────────── deadline ──────────────┤
//!   lookup     ├─────── timeout: 3/4 ───────┤
//!   check              ├───── what is left ───────────┤
//! ```
//!
//! A lookup that times out continues in the background, and its reply is cached. After a failure, or after timeouts for
//! two callers, no request reads the hash for 250 ms, so that few requests wait for the timeout. Meanwhile the last
//! reply for a caller is used, even if it has expired. For a caller without a cached reply the lookup resolves to
//! `None`. So callers keep their plans during an outage, as long as they are in the cache. Failures are logged as a
//! warning, at most every ten seconds.
//!
//! **Why not in the same call as the decision?** The plan determines which limits are decided.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::{Clock, SystemClock};
use tidegate_redis::{RedisStore, Reply};

use super::lookup_cache::{CacheOptions, Loading, LookupCache, LookupStats, TTL_DEFAULT, WaitOptions};
use super::plan::{PlanFuture, PlanLookup, PlanQuestion};

/// Maximum number of commands at once. They share one connection, and an instance that starts sees many callers at
/// once.
const LOOKUPS_MAX: usize = 1_024;
/// Maximum length of a plan's name. A longer value is treated like a missing field.
const NAME_BYTES_MAX: usize = 64;
/// The default deadline of a decision.
const DEADLINE_DEFAULT: Duration = Duration::from_millis(25);

/// A [`PlanLookup`] in a Redis hash that maps callers to the names of their plans.
///
/// The fields of the hash are those of [`PlanQuestion::field`]. Replies are cached for a second, missing fields
/// included. If Redis fails or does not reply within the [timeout](PlanHash::timeout), the caller's last cached plan is
/// used; without one the lookup resolves to `None`. Failures are logged as a warning, at most every ten seconds.
///
/// ```no_run
/// use std::sync::Arc;
/// use tidegate::Limiter;
/// use tidegate::config::Loader;
/// use tidegate::engine::Engine;
/// use tidegate::rules::{Lookups, PlanHash};
/// use tidegate_redis::RedisStore;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::builder("redis://localhost").build()?;
/// let plans = PlanHash::new(store.clone(), "tidegate:plans");
/// let limiter = Limiter::builder().store(Arc::new(store)).build();
/// let rules = Loader::new().load("tidegate.toml")?.rules;
/// let engine = Engine::with_lookups(limiter, rules, Lookups::new().plan(plans));
/// # Ok(())
/// # }
/// ```
pub struct PlanHash {
    store: RedisStore,
    name: Arc<str>,
    timeout: Duration,
    cache: LookupCache<Arc<str>>,
}

impl PlanHash {
    /// Creates a lookup in the Redis hash with the key `name`, on the server of `store`. Reads nothing yet.
    ///
    /// The store's key prefix is not added to `name`.
    pub fn new(store: RedisStore, name: impl Into<Box<str>>) -> PlanHash {
        let (name, clock) = (Arc::from(name.into()), Arc::new(SystemClock::new()));
        PlanHash { store, name, timeout: PlanHash::timeout_for(DEADLINE_DEFAULT), cache: cache(clock) }
    }

    /// Returns the timeout of a lookup that suits a limiter with this deadline: three quarters of it.
    ///
    /// A lookup and the check that follows it share the deadline of the decision. The last quarter is left to the
    /// check.
    pub fn timeout_for(deadline: Duration) -> Duration {
        deadline / 4 * 3
    }

    /// Sets the time after which a request no longer waits for Redis. Defaults to 18.75 ms. A command
    /// fails after five seconds, even if the timeout is longer.
    ///
    /// The default suits a limiter with the default deadline of 25 ms; [`PlanHash::timeout_for`] computes it for
    /// others.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> PlanHash {
        PlanHash { timeout, ..self }
    }

    /// Sets the clock by which cached replies expire. Defaults to [`SystemClock`]. Replies cached so far are discarded.
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> PlanHash {
        PlanHash { cache: cache(clock), ..self }
    }

    /// Returns a future that reads a field of the hash.
    fn read(&self, field: &str) -> Loading<Arc<str>> {
        let (store, name, field) = (self.store.clone(), self.name.clone(), field.to_owned());
        Box::pin(async move { Ok(plan_name(&store.command(&["HGET", &name, &field]).await?)) })
    }
}

/// Creates the cache of the plans in a hash.
fn cache(clock: Arc<dyn Clock>) -> LookupCache<Arc<str>> {
    LookupCache::new(CacheOptions {
        clock,
        ttl: TTL_DEFAULT,
        lookups_max: LOOKUPS_MAX,
        failing: "cannot read plans from Redis; cached callers keep their last plan, and others get `default`",
        recovered: "plans can be read from Redis again",
    })
}

/// Returns the name of the plan in a reply.
///
/// `None` for nil, a reply that is not a text, an empty name, and a name of more than 64 bytes.
fn plan_name(reply: &Reply) -> Option<Arc<str>> {
    reply.as_text().filter(|name| !name.is_empty() && name.len() <= NAME_BYTES_MAX).map(Arc::from)
}

impl PlanLookup for PlanHash {
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a> {
        Box::pin(async move {
            let field = question.field()?;
            let wait = WaitOptions { timeout: self.timeout, store: Some(&self.store) };
            self.cache.get(&field, wait, || self.read(&field)).await
        })
    }

    fn stats(&self) -> LookupStats {
        self.cache.stats()
    }
}

impl std::fmt::Debug for PlanHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlanHash").field("store", &self.store).field("name", &self.name).finish_non_exhaustive()
    }
}
