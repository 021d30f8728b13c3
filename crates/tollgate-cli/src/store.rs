//! The choice of a store.

use std::time::Duration;

use tollgate::config::Settings;
use tollgate::{Limiter, OnFailure};

use crate::arguments::{CountersChoice, StoreChoice};
use crate::{Failure, configuration};

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
}

impl CountersChoice {
    /// For a single question: a store that does not answer is an error, not a local guess.
    pub(crate) fn limiter(&self) -> Result<Limiter, Failure> {
        limiter(&self.settings()?)
    }

    /// The same, for a question about what others counted.
    pub(crate) fn shared_limiter(&self) -> Result<Limiter, Failure> {
        let settings = self.settings()?;
        if settings.is_shared() { limiter(&settings) } else { Err(Failure::NothingCounted) }
    }

    fn settings(&self) -> Result<Settings, Failure> {
        configuration::settings(self.config.as_deref(), &configuration::loader(&self.store)?)
    }
}

fn limiter(settings: &Settings) -> Result<Limiter, Failure> {
    Ok(settings.limiter()?.deadline(COMMAND_DEADLINE).on_failure(OnFailure::Deny).build())
}
