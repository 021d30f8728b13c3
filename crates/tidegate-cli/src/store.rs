//! The choice of the store by options and environment, and limiters on it for single commands.

use std::path::Path;
use std::time::Duration;

use tidegate::config::{Loaded, Loader, Settings};
use tidegate::rules::Lookups;
use tidegate::{Limiter, OnFailure, StoreErrorKind};
use tidegate_redis::{BuildError, RedisStore, ServerCheckError, ServerReport};
use tidegate_server::OperatorRules;

use crate::arguments::{CountersChoice, StoreChoice};
use crate::{Failure, configuration, secrets};

/// The name of the memory store.
pub(crate) const MEMORY: &str = "memory";
/// Deadline of a call to the store. It is longer than that of a service, since a person waits for the result.
const COMMAND_DEADLINE: Duration = Duration::from_secs(5);

impl StoreChoice {
    /// Returns the store URL: `--store`, else the content of `--store-file`, else `TIDEGATE_STORE`, else `REDIS_URL`.
    ///
    /// `None` if there is none of them. Empty variables are ignored. The URL is not checked.
    ///
    /// # Errors
    /// If the file cannot be read or contains no URL.
    pub(crate) fn url(&self) -> Result<Option<String>, Failure> {
        if let Some(file) = &self.store_file {
            return secrets::store_url(file).map(Some);
        }
        let from = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Ok(self.store.clone().or_else(|| from("TIDEGATE_STORE")).or_else(|| from("REDIS_URL")))
    }

    /// Returns whether `--store` contains a password, which other users can see in the list of processes.
    pub(crate) fn shows_password(&self) -> bool {
        self.store.as_ref().is_some_and(|url| url.contains('@'))
    }
}

impl CountersChoice {
    /// Builds a limiter on the chosen store for one check, whose counters stay in the store.
    ///
    /// If the store does not answer within [`COMMAND_DEADLINE`], decisions of this limiter fail.
    ///
    /// # Errors
    /// If the URL of the store is invalid, the configuration file is invalid, or [`Failure::NothingKept`] if the
    /// store is the memory store and `--store memory` was not given.
    pub(crate) fn limiter(&self) -> Result<Limiter, Failure> {
        let settings = self.settings()?;
        let is_chosen = settings.is_shared() || self.store.store.as_deref() == Some(MEMORY);
        if is_chosen { Ok(limiter_and_lookups(&settings)?.0) } else { Err(Failure::NothingKept) }
    }

    /// Returns the settings of `--config` or the defaults, with the store of [`StoreChoice::url`] if there is one.
    ///
    /// # Errors
    /// If the configuration cannot be read or has errors, or the URL of the store is invalid.
    fn settings(&self) -> Result<Settings, Failure> {
        configuration::settings(self.config.as_deref(), &configuration::loader(&self.store)?)
    }
}

/// Builds a limiter on the store of the settings, and the lookups of plans and API keys in it.
///
/// # Errors
/// If the URL of the store is invalid.
fn limiter_and_lookups(settings: &Settings) -> Result<(Limiter, Lookups), Failure> {
    let settings = with_command_deadline(settings);
    let (builder, lookups) = settings.limiter_on(settings.redis()?);
    Ok((builder.on_failure(OnFailure::Deny).announce(false).build(), lookups))
}

/// Builds what [`limiter_and_lookups`] builds, for a command that uses counters of other processes.
///
/// # Errors
/// As that, and [`Failure::NothingCounted`] if the store is the memory store, which is empty in every new process.
fn shared_limiter_and_lookups(settings: &Settings) -> Result<(Limiter, Lookups), Failure> {
    if settings.is_shared() { limiter_and_lookups(settings) } else { Err(Failure::NothingCounted) }
}

/// The shared store of an operator's command, and the rules of `--config`.
pub(crate) struct OperatorStore {
    pub(crate) limiter: Limiter,
    /// `None` without a configuration, or if the command needs none.
    pub(crate) loaded: Option<Loaded>,
    /// The lookups of plans and API keys in the store. Empty without a configuration.
    pub(crate) lookups: Lookups,
}

impl OperatorStore {
    /// Loads a configuration, prints its warnings, and builds a limiter on its store, or on that of the options.
    ///
    /// # Errors
    /// If the configuration or the store cannot be used, or [`Failure::NothingCounted`] if it is the memory store.
    pub(crate) fn open(file: &Path, store: &StoreChoice) -> Result<OperatorStore, Failure> {
        OperatorStore::of(configuration::load(file, &configuration::loader(store)?)?)
    }

    /// Builds a limiter on the store of a configuration.
    ///
    /// # Errors
    /// If the store cannot be used, or [`Failure::NothingCounted`] if it is the memory store.
    pub(crate) fn of(loaded: Loaded) -> Result<OperatorStore, Failure> {
        let (limiter, lookups) = shared_limiter_and_lookups(&loaded.settings)?;
        Ok(OperatorStore { limiter, loaded: Some(loaded), lookups })
    }

    /// Builds a limiter on the store of the options, without rules.
    ///
    /// # Errors
    /// As [`open`](OperatorStore::open).
    pub(crate) fn without_rules(counters: &CountersChoice) -> Result<OperatorStore, Failure> {
        let (limiter, _) = shared_limiter_and_lookups(&counters.settings()?)?;
        Ok(OperatorStore { limiter, loaded: None, lookups: Lookups::new() })
    }

    /// Returns the rules, by which clients are found. `None` without a configuration.
    pub(crate) fn rules(&self) -> Option<OperatorRules<'_>> {
        let rules = |loaded| OperatorRules { loaded, lookups: &self.lookups, shield: None };
        self.loaded.as_ref().map(rules)
    }
}

/// Returns the Redis command that creates a user with the permissions that Tidegate needs.
///
/// The key prefix and the Redis hashes of plans and API keys are those of the configuration file, or the defaults. The
/// credentials of the store need not exist yet. The command replaces an existing user of this name: its earlier
/// passwords and permissions are removed.
///
/// # Errors
/// If the file cannot be read or has an error.
pub(crate) fn acl_command(config: Option<&Path>) -> Result<String, Failure> {
    let settings = configuration::settings(config, &Loader::new().check_store_access(false))?;
    let rules =
        tidegate_redis::acl_rules(&settings.prefix, settings.plan_hash.as_deref(), settings.key_hash.as_deref())
            .map_err(|error| tidegate::StoreUrlError::from(BuildError::from(error)))?;
    Ok(format!("ACL SETUSER tidegate reset on >PASSWORD {rules}"))
}

/// Asks the store's server for its version and settings.
///
/// A server that does not answer is not an error, because the service starts without it. The inner result has the
/// reason.
///
/// # Errors
/// If the server answers, and is one that the store can never use, such as a node of a cluster.
pub(crate) async fn check_server(store: &RedisStore) -> Result<Result<ServerReport, ServerCheckError>, Failure> {
    match store.check_server().await {
        Err(ServerCheckError::Store(error)) if error.kind() == StoreErrorKind::Unsupported => Err(error.into()),
        report => Ok(report),
    }
}

/// Returns the settings with [`COMMAND_DEADLINE`], which is then also the timeout of calls to the store.
pub(crate) fn with_command_deadline(settings: &Settings) -> Settings {
    let mut settings = settings.clone();
    settings.deadline = COMMAND_DEADLINE;
    settings
}
