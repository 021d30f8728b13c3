//! Plans from a Redis hash: an application writes a field, and every instance uses the new plan within about a second.
//!
//! ```text
//!   HSET tidegate:plans  api_key:4e738ca5…  pro        by the key's SHA-256, so that the hash holds no key
//!   HSET tidegate:plans  user:ann           free       by the verified user
//! ```
//!
//! The replies are cached, and the time of a lookup is bounded, as for every source of plans: see `lookups.rs`.
//!
//! **Why not in the same call as the decision?** The plan determines which limits are decided.

use std::borrow::Cow;
use std::sync::Arc;

use tidegate_core::Store;
use tidegate_redis::{RedisStore, Reply};

use super::plan::{PlanFuture, PlanLookup, PlanQuestion};

/// Maximum length of a plan's name. A longer value is treated like a missing field.
const NAME_BYTES_MAX: usize = 64;

/// A [`PlanLookup`] in a Redis hash that maps callers to the names of their plans.
///
/// The fields of the hash are those of [`PlanQuestion::field`]. It is not read for a caller without one.
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
    name: Box<str>,
}

impl PlanHash {
    /// Creates a lookup in the Redis hash with the key `name`, on the server of `store`. Reads nothing yet.
    ///
    /// The store's key prefix is not added to `name`.
    pub fn new(store: RedisStore, name: impl Into<Box<str>>) -> PlanHash {
        PlanHash { store, name: name.into() }
    }
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
            let Some(field) = question.field() else { return Ok(None) };
            Ok(plan_name(&self.store.command(&["HGET", &*self.name, &field]).await?))
        })
    }

    fn relevant<'q>(&self, question: &'q PlanQuestion) -> Option<Cow<'q, PlanQuestion>> {
        question.of_field().map(Cow::Owned)
    }

    fn store(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }
}

impl std::fmt::Debug for PlanHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlanHash").field("store", &self.store).field("name", &self.name).finish()
    }
}
