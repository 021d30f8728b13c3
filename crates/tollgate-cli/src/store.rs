//! Selection of the store.

use std::time::Duration;

use tollgate::config::Settings;
use tollgate::{Limiter, OnFailure};

use crate::arguments::{CountersChoice, StoreChoice};
use crate::{Failure, configuration};

/// The name of the memory store.
pub(crate) const MEMORY: &str = "memory";
/// Deadline of a call to the store: longer than in a service, since a person waits for it.
pub(crate) const COMMAND_DEADLINE: Duration = Duration::from_secs(5);

impl StoreChoice {
    /// Returns the store URL: `--store`, else `TOLLGATE_STORE`, else `REDIS_URL`, else `None`.
    ///
    /// Empty variables are ignored.
    pub(crate) fn url(&self) -> Option<String> {
        let from = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        self.store.clone().or_else(|| from("TOLLGATE_STORE")).or_else(|| from("REDIS_URL"))
    }
}

impl CountersChoice {
    /// Builds a limiter for a single command: if the store does not answer, the command fails.
    pub(crate) fn limiter(&self) -> Result<Limiter, Failure> {
        limiter(&self.settings()?)
    }

    /// Builds a limiter on a shared store, for counters of other processes.
    ///
    /// # Errors
    /// If the store is the memory store, which is empty in every new process.
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
