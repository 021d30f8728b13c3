//! The choice of a store.

use std::time::Duration;

use tollgate::{Limiter, LimiterBuilder, OnFailure};

use crate::Failure;
use crate::arguments::StoreChoice;

/// A command waits longer than a service would: somebody is looking at it.
const COMMAND_DEADLINE: Duration = Duration::from_secs(5);

impl StoreChoice {
    /// What was said, else the environment's word, else memory.
    pub(crate) fn url(&self) -> String {
        let said = self.store.clone();
        let from = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        said.or_else(|| from("TOLLGATE_STORE")).or_else(|| from("REDIS_URL")).unwrap_or_else(|| "memory".to_owned())
    }

    pub(crate) fn builder(&self) -> Result<LimiterBuilder, Failure> {
        Ok(Limiter::builder().url(&self.url())?)
    }

    /// For a single question: a store that does not answer is an error, not a local guess.
    pub(crate) fn for_command(&self) -> Result<Limiter, Failure> {
        Ok(self.builder()?.deadline(COMMAND_DEADLINE).on_failure(OnFailure::Deny).build())
    }
}
