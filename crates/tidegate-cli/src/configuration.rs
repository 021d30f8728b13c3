//! Loads configuration files and prints their findings: errors, warnings and advice.

use std::path::Path;

use tidegate::Rules;
use tidegate::config::{Finding, Loaded, Loader, Settings, Severity};
use tidegate_redis::{BuildError, RedisStore};

use crate::arguments::{StoreChoice, Validate};
use crate::store::MEMORY;
use crate::{Failure, output};

const USERNAME_VARIABLE: &str = "TIDEGATE_STORE_USERNAME";
const PASSWORD_VARIABLE: &str = "TIDEGATE_STORE_PASSWORD";

/// Creates a loader of configuration files. All commands use it, so `tidegate validate` finds the errors with which
/// `tidegate serve` and `tidegate gateway` would not start.
///
/// The store in `--store`, `--store-file`, `TIDEGATE_STORE` or `REDIS_URL` overrides that of every file that it loads.
/// If none of them is set, the store of the file is used. `TIDEGATE_STORE_USERNAME` and `TIDEGATE_STORE_PASSWORD` are
/// used if neither the URL nor the file has a password. Opens no connection. Prints a warning if `--store` contains a
/// password.
///
/// # Errors
/// If the file of `--store-file` cannot be read, or that store is neither `memory` nor a valid URL of a Redis store.
pub(crate) fn loader(store: &StoreChoice) -> Result<Loader, Failure> {
    if store.shows_password() {
        output::print_error(
            "warning: the password in --store is visible in the process list; use --store-file FILE or $TIDEGATE_STORE",
        );
    }
    let loader = Loader::new()
        .store_credentials_env(USERNAME_VARIABLE, PASSWORD_VARIABLE)
        .check_upstreams(|upstream| tidegate_server::check_upstream(upstream).map_err(|error| error.to_string()));
    let Some(url) = store.url()? else { return Ok(loader) };
    if url != MEMORY {
        RedisStore::check_url(&url).map_err(|error| tidegate::StoreUrlError::from(BuildError::from(error)))?;
    }
    Ok(loader.store(url))
}

/// Returns the settings of a configuration file (store, key prefix, deadline, …), or the default settings if `file` is
/// `None`.
///
/// A store or number of instances in `loader` overrides the file and the defaults. Warnings are discarded.
///
/// # Errors
/// If the file cannot be read or has an error.
pub(crate) fn settings(file: Option<&Path>, loader: &Loader) -> Result<Settings, Failure> {
    let loaded = file.map_or_else(|| Rules::new().compile_with(loader), |file| loader.load(file));
    Ok(loaded.map_err(Failure::Configuration)?.settings)
}

/// Loads a configuration file and prints its warnings and advice to standard error.
///
/// These are removed from [`Loaded::findings`], which is empty in the result.
///
/// # Errors
/// If the file cannot be read or has an error. Then nothing is printed; the error contains all findings.
pub(crate) fn load(file: &Path, loader: &Loader) -> Result<Loaded, Failure> {
    let mut loaded = loader.load(file).map_err(Failure::Configuration)?;
    for finding in loaded.findings.drain(..) {
        print_finding(finding);
    }
    Ok(loaded)
}

/// Prints a finding to standard error with its severity, in the form that findings have in an error report.
fn print_finding(finding: Finding) {
    let severity = match finding.severity() {
        Severity::Error => "Error",
        Severity::Warning => "Warning",
        _ => "Advice",
    };
    output::print_error(format_args!("{severity}: {:?}", miette::Report::new(finding)));
}

/// The result of `tidegate validate`, which determines its exit code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Validity {
    /// The file is valid.
    Valid,
    /// The file is valid, but has warnings, and `--deny-warnings` was given.
    WarningsDenied,
    /// The file has an error.
    Invalid,
}

impl Validity {
    /// Returns the result for a valid file with these findings.
    fn of_valid(findings: &[Finding], arguments: &Validate) -> Validity {
        if arguments.deny_warnings && warnings(findings) > 0 { Validity::WarningsDenied } else { Validity::Valid }
    }
}

/// Returns the number of warnings among the findings. Advice does not count.
fn warnings(findings: &[Finding]) -> usize {
    findings.iter().filter(|finding| finding.severity() == Severity::Warning).count()
}

/// Runs `tidegate validate`: loads the file and prints the result.
///
/// With `--json`, prints one JSON object to standard output. Otherwise prints warnings and advice to standard error and
/// a summary to standard output; it never returns [`Validity::Invalid`].
///
/// # Errors
/// If the store URL is invalid or the output cannot be written. Without `--json`, also if the file is invalid; the
/// error contains all findings.
pub(crate) fn validate(arguments: &Validate) -> Result<Validity, Failure> {
    let loader = loader(&arguments.store)?;
    if arguments.json {
        return validate_as_json(arguments, &loader);
    }
    let loaded = loader.load(&arguments.file).map_err(Failure::Configuration)?;
    let validity = Validity::of_valid(&loaded.findings, arguments);
    let mut summary = vec![counted(loaded.rules.rules().len(), "rule"), counted(loaded.rules.plans().len(), "plan")];
    match warnings(&loaded.findings) {
        0 => {}
        count => summary.push(counted(count, "warning")),
    }
    loaded.findings.into_iter().for_each(print_finding);
    output::print_line(format_args!("{} is valid: {}", arguments.file.display(), summary.join(", ")))?;
    Ok(validity)
}

/// Formats a number of things, such as `1 rule` or `2 rules`: appends an `s` to `noun` unless `count` is 1.
fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Loads the file and prints the result of [`validate`] as one line of JSON.
fn validate_as_json(arguments: &Validate, loader: &Loader) -> Result<Validity, Failure> {
    let loaded = loader.load(&arguments.file);
    let (rules, plans) = loaded
        .as_ref()
        .map_or((None, None), |loaded| (Some(loaded.rules.rules().len()), Some(loaded.rules.plans().len())));
    let (findings, validity) = match &loaded {
        Ok(loaded) => (&loaded.findings[..], Validity::of_valid(&loaded.findings, arguments)),
        Err(report) => (report.findings(), Validity::Invalid),
    };
    let body = serde_json::json!({
        "file": arguments.file.display().to_string(),
        "valid": loaded.is_ok(),
        "rules": rules,
        "plans": plans,
        "findings": tidegate_server::findings_json(findings),
    });
    output::print_line(body)?;
    Ok(validity)
}
