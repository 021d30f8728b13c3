//! Plans from a Redis hash: an application writes a field, and every node uses the new plan within about a second.
//!
//! ```text
//!   HSET tollgate:plans  api_key:4e738ca5…  pro        by the key's SHA-256, so that the hash holds no key
//!   HSET tollgate:plans  user:ann           free       by the verified user
//! ```
//!
//! **Cached**, because lookups are on the request path. A reply, also *no such field*, is cached for a second; the next
//! request of that caller then reads the hash again. At most 10,000 callers are cached. While the cache is full, the
//! hash is read for every request of a caller that is not in it.
//!
//! **Does not block requests.** The command uses the store's connection and has a timeout of its own. After a failure
//! no request reads the hash for 250 ms, so that few requests pay for the timeout. Meanwhile the last reply for a
//! caller stays valid, even if it has expired. A caller without a cached reply has no plan from here and gets the
//! `default` plan unless another lookup knows its plan. So callers keep their plans during an outage, as long as they
//! are in the cache.
//!
//! **Why not in the same call as the decision?** The plan determines which limits are decided.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::sleep;
use tollgate_core::{Clock, SystemClock, Timestamp};
use tollgate_redis::{RedisStore, Reply};

use super::plan::{PlanFuture, PlanLookup, PlanQuestion};
use crate::deadline::answer_by;
use crate::ttl_cache::{Expire, TtlCache};

/// Time for which a reply is cached, in microseconds.
const HOLDS_US: u64 = 1_000_000;
/// Time after a failure during which the hash is not read, in microseconds.
const REST_US: u64 = 250_000;
const CALLERS_MAX: usize = 10_000;
/// Maximum length of a plan's name. A longer value names no plan and is not cached.
const NAME_BYTES_MAX: usize = 64;
/// Default timeout: shorter than the deadline of a decision, which follows the lookup.
const TIMEOUT_DEFAULT: Duration = Duration::from_millis(10);

/// A Redis hash that maps callers to the names of their plans. Its fields are those of [`PlanQuestion::field`].
///
/// ```no_run
/// use std::sync::Arc;
/// use tollgate::Limiter;
/// use tollgate::config::Loader;
/// use tollgate::engine::Engine;
/// use tollgate::rules::PlanHash;
/// use tollgate_redis::RedisStore;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::builder("redis://localhost").build()?;
/// let plans = PlanHash::new(store.clone(), "tollgate:plans");
/// let limiter = Limiter::builder().store(Arc::new(store)).build();
/// let rules = Loader::new().load("tollgate.toml")?.rules;
/// let engine = Engine::with_lookups(limiter, rules, vec![Arc::new(plans)]);
/// # Ok(())
/// # }
/// ```
pub struct PlanHash {
    store: RedisStore,
    name: Box<str>,
    timeout: Duration,
    clock: Arc<dyn Clock>,
    /// Cached replies, by the name of the field.
    heard: TtlCache<CachedPlan>,
    /// Until when the hash is not read after a failure, in microseconds since the epoch.
    rests_until_us: AtomicU64,
}

/// A cached reply.
#[derive(Clone)]
struct CachedPlan {
    plan: Option<Arc<str>>,
    /// The time at which the command was sent.
    asked: Timestamp,
}

impl CachedPlan {
    fn holds(&self, now: Timestamp) -> bool {
        // A reply from the future means that the clock was set back. It must not stay valid for longer.
        self.asked <= now && now < self.asked.plus_micros(HOLDS_US)
    }
}

impl Expire for CachedPlan {
    fn is_expired(&self, now: Timestamp) -> bool {
        !self.holds(now)
    }
}

impl PlanHash {
    /// Creates a lookup in the hash with the key `name`, on the server of `store`.
    ///
    /// The store's key prefix is not added to `name`.
    pub fn new(store: RedisStore, name: impl Into<Box<str>>) -> PlanHash {
        PlanHash {
            store,
            name: name.into(),
            timeout: TIMEOUT_DEFAULT,
            clock: Arc::new(SystemClock::new()),
            heard: TtlCache::new(CALLERS_MAX),
            rests_until_us: AtomicU64::new(0),
        }
    }

    /// Sets the timeout of a lookup. Defaults to 10 ms.
    ///
    /// The lookup precedes the decision, so it adds to the decision's own deadline.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> PlanHash {
        PlanHash { timeout, ..self }
    }

    /// Sets the clock by which cached replies expire. Defaults to [`SystemClock`].
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> PlanHash {
        PlanHash { clock, ..self }
    }

    /// Returns the plan in a field: from the cache if the reply is valid or Redis fails, else from Redis.
    async fn look_up(&self, field: &str) -> Option<Arc<str>> {
        let (id, now) = (self.heard.id(field), self.clock.now());
        let heard = self.heard.look(id, CachedPlan::clone);
        if let Some(heard) = &heard
            && heard.holds(now)
        {
            return heard.plan.clone();
        }
        let last_word = || heard.and_then(|heard| heard.plan);
        let rests_until_us = self.rests_until_us.load(Ordering::Relaxed);
        if (now.as_micros()..=now.plus_micros(REST_US).as_micros()).contains(&rests_until_us) {
            return last_word();
        }
        let answered =
            answer_by(sleep(self.timeout), &self.store, self.store.command(&["HGET", &self.name, field])).await;
        match answered {
            Some(Ok(reply)) => {
                let plan = name_in(&reply);
                self.heard.put(id, CachedPlan { plan: plan.clone(), asked: now }, now);
                plan
            }
            Some(Err(error)) => {
                tracing::debug!(
                    kind = error.kind().as_str(),
                    "cannot read the plan from Redis; using the cached plan, if any"
                );
                self.rest();
                last_word()
            }
            None => {
                tracing::debug!("reading the plan from Redis timed out; using the cached plan, if any");
                self.rest();
                last_word()
            }
        }
    }

    /// Suspends reading the hash for [`REST_US`].
    fn rest(&self) {
        let until = self.clock.now().plus_micros(REST_US);
        self.rests_until_us.store(until.as_micros(), Ordering::Relaxed);
    }
}

/// Returns the plan named by a reply. `None` for nil, non-text replies, empty names and names that are too long.
fn name_in(reply: &Reply) -> Option<Arc<str>> {
    reply.as_text().filter(|name| !name.is_empty() && name.len() <= NAME_BYTES_MAX).map(Arc::from)
}

impl PlanLookup for PlanHash {
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a> {
        Box::pin(async move { self.look_up(&question.field()?).await })
    }
}

impl std::fmt::Debug for PlanHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlanHash").field("store", &self.store).field("name", &self.name).finish_non_exhaustive()
    }
}
