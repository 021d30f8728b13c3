//! Plans from a Redis hash: whoever sells plans writes a field, and every node knows it within a second.
//!
//! ```text
//!   HSET tollgate:plans  api_key:4e738ca5…  pro        by the key's SHA-256, so that the hash holds no key
//!   HSET tollgate:plans  user:ann           free       by the verified user
//! ```
//!
//! **On the request path, so remembered.** An answer, also *no such field*, holds for a second; then the next request of that caller
//! asks again. At most 10,000 callers are remembered; under a flood of others newcomers are asked for every time.
//!
//! **Never in the way.** The question goes over the store's own connection and is given up after a while of its own. When Redis does not answer,
//! nobody asks for a quarter of a second, so that one request in many pays for finding out; the last word that was heard of a caller
//! holds until there is another, and a caller of whom nothing was heard has no answer here: the `default` plan. A customer does not
//! lose its plan because a store is away.
//!
//! **Why not with the decision?** Which limits are decided depends on the plan, so the plan comes first.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::sleep;
use tollgate_core::{Clock, SystemClock, Timestamp};
use tollgate_redis::{RedisStore, Reply};

use super::plan::{PlanFuture, PlanLookup, PlanQuestion};
use crate::deadline::answer_by;
use crate::lately::{Fading, Lately};

/// An answer is not asked for again so soon.
const HOLDS_US: u64 = 1_000_000;
/// After a failure nobody asks for so long.
const REST_US: u64 = 250_000;
const CALLERS_MAX: usize = 10_000;
/// No plan has a longer name, so a longer value names none and need not be kept.
const NAME_BYTES_MAX: usize = 64;
/// Unless said otherwise: well within the deadline of a decision, which comes after it.
const TIMEOUT_DEFAULT: Duration = Duration::from_millis(10);

/// A Redis hash from callers to the names of their plans. Its fields are [`PlanQuestion::field`]'s.
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
    /// By the name of the field.
    heard: Lately<Heard>,
    /// In microseconds since the epoch: until then nobody asks.
    rests_until_us: AtomicU64,
}

/// What Redis said of a caller, and when it was asked.
#[derive(Clone)]
struct Heard {
    plan: Option<Arc<str>>,
    asked: Timestamp,
}

impl Heard {
    fn holds(&self, now: Timestamp) -> bool {
        // A clock that went back makes nothing hold longer.
        self.asked <= now && now < self.asked.plus_micros(HOLDS_US)
    }
}

impl Fading for Heard {
    fn may_go(&self, now: Timestamp) -> bool {
        !self.holds(now)
    }
}

impl PlanHash {
    /// The hash of that name, on the server of a store.
    pub fn new(store: RedisStore, name: impl Into<Box<str>>) -> PlanHash {
        PlanHash {
            store,
            name: name.into(),
            timeout: TIMEOUT_DEFAULT,
            clock: Arc::new(SystemClock::new()),
            heard: Lately::new(CALLERS_MAX),
            rests_until_us: AtomicU64::new(0),
        }
    }

    /// How long a request waits for the answer; 10 ms unless said. It comes before the decision, which has a deadline of its own.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> PlanHash {
        PlanHash { timeout, ..self }
    }

    /// The clock by which answers are forgotten; the system's unless said.
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> PlanHash {
        PlanHash { clock, ..self }
    }

    async fn look_up(&self, field: &str) -> Option<Arc<str>> {
        let (id, now) = (self.heard.id(field), self.clock.now());
        let heard = self.heard.look(id, Heard::clone);
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
                self.heard.put(id, Heard { plan: plan.clone(), asked: now }, now);
                plan
            }
            Some(Err(error)) => {
                tracing::debug!(kind = error.kind().name(), "the hash of plans was not read");
                self.rest();
                last_word()
            }
            None => {
                tracing::debug!("the hash of plans was not read in time");
                self.rest();
                last_word()
            }
        }
    }

    fn rest(&self) {
        let until = self.clock.now().plus_micros(REST_US);
        self.rests_until_us.store(until.as_micros(), Ordering::Relaxed);
    }
}

/// The plan that a reply names; nil and nonsense name none.
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
