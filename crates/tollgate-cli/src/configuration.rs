//! Loads configuration files and prints their findings.

use std::path::Path;

use tollgate::Rules;
use tollgate::config::{Loaded, Loader, Settings};
use tollgate_redis::{BuildError, RedisStore};

use crate::arguments::{StoreChoice, Validate};
use crate::store::MEMORY;
use crate::{Failure, output};

/// Creates a loader with the store given by `--store` or the environment.
///
/// # Errors
/// If the URL of the store is invalid.
pub(crate) fn loader(store: &StoreChoice) -> Result<Loader, Failure> {
    let Some(url) = store.url() else { return Ok(Loader::new()) };
    if url != MEMORY {
        RedisStore::check_url(&url).map_err(|error| tollgate::StoreUrlError::from(BuildError::from(error)))?;
    }
    Ok(Loader::new().store(url))
}

/// Loads the settings of a file, or the defaults without one. Warnings are not printed.
pub(crate) fn settings(file: Option<&Path>, loader: &Loader) -> Result<Settings, Failure> {
    let loaded = file.map_or_else(|| Rules::new().compile_with(loader), |file| loader.load(file));
    Ok(loaded.map_err(Failure::Configuration)?.settings)
}

/// Loads a configuration file, and prints its warnings to standard error.
pub(crate) fn load(file: &Path, loader: &Loader) -> Result<Loaded, Failure> {
    let mut loaded = loader.load(file).map_err(Failure::Configuration)?;
    for finding in loaded.findings.drain(..) {
        output::print_error(format_args!("{:?}", miette::Report::new(finding)));
    }
    Ok(loaded)
}

/// Runs `tollgate validate`. Returns whether the configuration can be used.
pub(crate) fn validate(arguments: &Validate) -> Result<bool, Failure> {
    let loader = loader(&arguments.store)?;
    if arguments.json {
        return validate_as_json(arguments, &loader);
    }
    let loaded = load(&arguments.file, &loader)?;
    let rules = counted(loaded.rules.rules().len(), "rule");
    let plans = counted(loaded.rules.plans().len(), "plan");
    output::print_line(format_args!("{} can be used: {rules}, {plans}", arguments.file.display()))?;
    Ok(true)
}

/// Formats a count, such as `1 rule` or `2 rules`.
fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn validate_as_json(arguments: &Validate, loader: &Loader) -> Result<bool, Failure> {
    let loaded = loader.load(&arguments.file);
    let (rules, plans) = loaded
        .as_ref()
        .map_or((None, None), |loaded| (Some(loaded.rules.rules().len()), Some(loaded.rules.plans().len())));
    let findings = match &loaded {
        Ok(loaded) => &loaded.findings[..],
        Err(report) => report.findings(),
    };
    let body = serde_json::json!({
        "file": arguments.file.display().to_string(),
        "usable": loaded.is_ok(),
        "rules": rules,
        "plans": plans,
        "findings": tollgate_server::findings_json(findings),
    });
    output::print_line(body)?;
    Ok(loaded.is_ok())
}
