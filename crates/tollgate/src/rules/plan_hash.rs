//! Plans from a Redis hash: an application writes a field, and every node uses the new plan within about a second.
//!
//! ```text
//!   HSET tollgate:plans  api_key:4e738ca5…  pro        by the key's SHA-256, so that the hash holds no key
//!   HSET tollgate:plans  user:ann           free       by the verified user
//! ```
//!
//! **Cached**, because lookups are on the request path. A reply, also *no such field*, is cached for a second. Requests in
//! the second half of that second start a lookup in the background, so a caller with two requests a second or more
//! never waits for one. At most 10,000 callers are cached. While the cache is full, the hash is read for every request
//! of a caller that is not in it.
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
//! A lookup that times out continues in the background, and its reply is cached. After a failure or a timeout no
//! request reads the hash for 250 ms, so that few requests wait for the timeout. Meanwhile the last reply for a
//! caller is used, even if it has expired. For a caller without a cached reply the lookup resolves to `None`. So callers
//! keep their plans during an outage, as long as they are in the cache. The first failure is logged as a warning.
//!
//! **Why not in the same call as the decision?** The plan determines which limits are decided.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::sleep;
use tollgate_core::{Clock, StoreError, SystemClock, Timestamp};
use tollgate_redis::{RedisStore, Reply};

use super::plan::{PlanFuture, PlanLookup, PlanQuestion};
use crate::deadline::answer_by;
use crate::ttl_cache::{Expire, Id, TtlCache};

/// Time for which a reply is cached, in microseconds.
const VALID_US: u64 = 1_000_000;
/// Age from which a request refreshes a cached reply, in microseconds.
const REFRESH_US: u64 = 500_000;
/// Time after a failure during which the hash is not read, in microseconds.
const PAUSE_US: u64 = 250_000;
/// Maximum number of cached replies, one per caller.
const CALLERS_MAX: usize = 10_000;
/// Maximum length of a plan's name. A longer value is treated like a missing field.
const NAME_BYTES_MAX: usize = 64;
/// The default deadline of a decision.
const DEADLINE_DEFAULT: Duration = Duration::from_millis(25);

/// A [`PlanLookup`] in a Redis hash that maps callers to the names of their plans.
///
/// The fields of the hash are those of [`PlanQuestion::field`]. Replies are cached for a second, missing fields included.
/// If Redis fails or does not reply within the [timeout](PlanHash::timeout), the caller's last cached plan is used; without
/// one the lookup resolves to `None`. The first failure is logged as a warning.
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
    reader: Arc<Reader>,
    timeout: Duration,
}

/// The hash and the cache of its replies. Shared by a [`PlanHash`] and the lookups that it runs in the background.
struct Reader {
    store: RedisStore,
    name: Box<str>,
    clock: Arc<dyn Clock>,
    /// Cached replies, by the name of the field.
    cache: TtlCache<CachedPlan>,
    /// Until when the hash is not read after a failure, in microseconds since the epoch.
    paused_until_us: AtomicU64,
    /// Whether the last lookup failed.
    is_failing: AtomicBool,
}

/// A cached reply of the hash for one caller.
#[derive(Clone)]
struct CachedPlan {
    /// The name of the plan; `None` if the hash has none for the caller.
    plan: Option<Arc<str>>,
    /// The time at which the command was sent.
    sent: Timestamp,
    /// Whether a lookup that replaces this reply has started.
    is_refreshing: bool,
}

impl CachedPlan {
    /// Returns whether, at `now`, less than `age_us` microseconds have passed since the command was sent.
    ///
    /// `false` if `now` is before that time.
    fn is_younger(&self, age_us: u64, now: Timestamp) -> bool {
        // A reply from the future means that the clock was set back. It must not stay valid for longer.
        self.sent <= now && now < self.sent.plus_micros(age_us)
    }
}

impl Expire for CachedPlan {
    fn is_expired(&self, now: Timestamp) -> bool {
        !self.is_younger(VALID_US, now)
    }
}

impl PlanHash {
    /// Creates a lookup in the Redis hash with the key `name`, on the server of `store`. Reads nothing yet.
    ///
    /// The store's key prefix is not added to `name`.
    pub fn new(store: RedisStore, name: impl Into<Box<str>>) -> PlanHash {
        let reader = Reader::new(store, name.into(), Arc::new(SystemClock::new()));
        PlanHash { reader: Arc::new(reader), timeout: PlanHash::timeout_for(DEADLINE_DEFAULT) }
    }

    /// Returns the timeout of a lookup that suits a limiter with this deadline: three quarters of it.
    ///
    /// A lookup and the check that follows it share the deadline of the decision. The last quarter is left to the check.
    pub fn timeout_for(deadline: Duration) -> Duration {
        deadline / 4 * 3
    }

    /// Sets the time after which a request no longer waits for Redis. Defaults to 18.75 ms.
    ///
    /// The default suits a limiter with the default deadline of 25 ms; [`PlanHash::timeout_for`] computes it for others.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> PlanHash {
        PlanHash { timeout, ..self }
    }

    /// Sets the clock by which cached replies expire. Defaults to [`SystemClock`]. Replies that are cached already are lost.
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> PlanHash {
        let reader = Reader::new(self.reader.store.clone(), self.reader.name.clone(), clock);
        PlanHash { reader: Arc::new(reader), ..self }
    }

    /// Returns the plan in a field: from the cache if its reply is younger than a second, else from Redis.
    ///
    /// If Redis fails, times out or is paused after a failure, returns the last cached plan, however old. `None` if the
    /// field is missing, or if there is no cached reply to fall back on.
    ///
    /// Spawns a lookup in the background if the cached reply is older than half a second, and lets a lookup that times
    /// out complete there.
    async fn look_up(&self, field: String) -> Option<Arc<str>> {
        let reader = &self.reader;
        let (id, now) = (reader.cache.id(&field), reader.clock.now());
        let cached = reader.cache.get_with(id, CachedPlan::clone);
        if let Some(cached) = &cached
            && cached.is_younger(VALID_US, now)
        {
            if !cached.is_younger(REFRESH_US, now) && !cached.is_refreshing && !reader.is_paused(now) {
                reader.cache.put(id, CachedPlan { is_refreshing: true, ..cached.clone() }, now);
                tokio::spawn(reader.clone().read(id, field));
            }
            return cached.plan.clone();
        }
        let last_plan = cached.and_then(|cached| cached.plan);
        if reader.is_paused(now) {
            return last_plan;
        }
        let mut reading = Box::pin(reader.clone().read(id, field));
        match answer_by(sleep(self.timeout), &reader.store, &mut reading).await {
            Some(Ok(plan)) => plan,
            Some(Err(_failed)) => last_plan,
            None => {
                reader.record_failure("no reply within the timeout");
                tokio::spawn(reading);
                last_plan
            }
        }
    }
}

impl Reader {
    fn new(store: RedisStore, name: Box<str>, clock: Arc<dyn Clock>) -> Reader {
        Reader {
            store,
            name,
            clock,
            cache: TtlCache::new(CALLERS_MAX),
            paused_until_us: AtomicU64::new(0),
            is_failing: AtomicBool::new(false),
        }
    }

    /// Reads a field from Redis, caches the reply under `id` if there is room, and returns the plan in it.
    ///
    /// Logs the first success after failures. On an error, calls [`record_failure`](Reader::record_failure).
    async fn read(self: Arc<Self>, id: Id, field: String) -> Result<Option<Arc<str>>, StoreError> {
        let sent = self.clock.now();
        match self.store.command(&["HGET", &self.name, &field]).await {
            Ok(reply) => {
                let plan = plan_name(&reply);
                let cached = CachedPlan { plan: plan.clone(), sent, is_refreshing: false };
                self.cache.put(id, cached, self.clock.now());
                if self.is_failing.swap(false, Ordering::Relaxed) {
                    tracing::info!("plans are read from Redis again");
                }
                Ok(plan)
            }
            Err(error) => {
                self.record_failure(&error);
                Err(error)
            }
        }
    }

    /// Returns whether a lookup has failed within the last [`PAUSE_US`], so that the hash is not to be read.
    fn is_paused(&self, now: Timestamp) -> bool {
        let until_us = self.paused_until_us.load(Ordering::Relaxed);
        // A later time means that the clock was set back.
        (now.as_micros()..=now.plus_micros(PAUSE_US).as_micros()).contains(&until_us)
    }

    /// Pauses reading for [`PAUSE_US`] from now. Logs a warning, unless the last lookup has failed, too.
    fn record_failure(&self, reason: impl std::fmt::Display) {
        let until = self.clock.now().plus_micros(PAUSE_US);
        self.paused_until_us.store(until.as_micros(), Ordering::Relaxed);
        if !self.is_failing.swap(true, Ordering::Relaxed) {
            tracing::warn!(%reason, "cannot read plans from Redis; callers keep their last plan, others get `default`");
        }
    }
}

/// Returns the name of the plan in a reply. `None` for nil, a reply that is no text, an empty name, and one of more than 64
/// bytes.
fn plan_name(reply: &Reply) -> Option<Arc<str>> {
    reply.as_text().filter(|name| !name.is_empty() && name.len() <= NAME_BYTES_MAX).map(Arc::from)
}

impl PlanLookup for PlanHash {
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a> {
        Box::pin(async move { self.look_up(question.field()?).await })
    }
}

impl std::fmt::Debug for PlanHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlanHash")
            .field("store", &self.reader.store)
            .field("name", &self.reader.name)
            .finish_non_exhaustive()
    }
}
