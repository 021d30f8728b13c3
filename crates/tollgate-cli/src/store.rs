//! The choice of a store.

use std::time::Duration;

use tollgate::{Limiter, LimiterBuilder, OnFailure};

use crate::Failure;
use crate::arguments::StoreChoice;

/// The name of the store in this process.
pub(crate) const MEMORY: &str = "memory";
/// A command waits longer than a service would: somebody is looking at it.
pub(crate) const COMMAND_DEADLINE: Duration = Duration::from_secs(5);

impl StoreChoice {
    /// What was said, else the environment's word.
    pub(crate) fn said(&self) -> Option<String> {
        let from = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        self.store.clone().or_else(|| from("TOLLGATE_STORE")).or_else(|| from("REDIS_URL"))
    }

    /// What was said, else memory.
    pub(crate) fn url(&self) -> String {
        self.said().unwrap_or_else(|| MEMORY.to_owned())
    }

    pub(crate) fn builder(&self) -> Result<LimiterBuilder, Failure> {
        Ok(Limiter::builder().url(&self.url())?)
    }

    /// For a single question: a store that does not answer is an error, not a local guess.
    pub(crate) fn for_command(&self) -> Result<Limiter, Failure> {
        Ok(self.builder()?.deadline(COMMAND_DEADLINE).on_failure(OnFailure::Deny).build())
    }
}
