//! Settings from environment variables. An invalid value is rejected at the start, with what would be accepted.

use std::time::Duration;

use tidegate::config::Report;
use tidegate::identity::Networks;
use tidegate::rules::RuleSet;
use tidegate::{Limit, OnFailure, Rule, Rules, Subject};

/// The settings of the service.
#[derive(PartialEq, Debug)]
pub(crate) struct Settings {
    /// `PORT`: the port to listen on; 0 is any free port. Defaults to 3000.
    pub(crate) port: u16,
    /// `PUBLIC_URL`: the prefix of short links. Defaults to the address of the listener.
    pub(crate) public_url: Option<String>,
    /// `REDIS_URL`: the Redis server that shares links and limits. Without it both are in process memory.
    pub(crate) redis_url: Option<String>,
    /// `REDIS_DEADLINE_MS`: the deadline of each decision and of each link command on Redis.
    pub(crate) redis_deadline: Duration,
    /// `RATE_LIMIT_MAX` links per `RATE_LIMIT_WINDOW_MS` and address.
    limit: Limit,
    /// `TRUSTED_PROXIES`: the proxies that may report a client's address.
    trusted_proxies: Networks,
}

/// The error for a variable with an invalid value.
#[derive(Debug, thiserror::Error)]
#[error("{variable}: {problem}")]
pub(crate) struct SettingError {
    variable: &'static str,
    problem: String,
}

impl Settings {
    /// Reads the settings from these variables. An empty variable counts as not set.
    pub(crate) fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Result<Settings, SettingError> {
        let said = |name: &'static str| variable(name).filter(|value| !value.is_empty());
        Ok(Settings {
            port: number("PORT", said("PORT"), 3000, "a port from 0 to 65535")?,
            public_url: said("PUBLIC_URL").map(|url| public_url(&url)).transpose()?,
            redis_url: said("REDIS_URL"),
            redis_deadline: deadline(said("REDIS_DEADLINE_MS"))?,
            limit: limit(said("RATE_LIMIT_MAX"), said("RATE_LIMIT_WINDOW_MS"))?,
            trusted_proxies: said("TRUSTED_PROXIES")
                .unwrap_or_default()
                .parse()
                .map_err(|error| wrong("TRUSTED_PROXIES", error))?,
        })
    }

    /// Builds the only rule: a limit per address, which is not applied while Redis is unavailable.
    pub(crate) fn rules(&self) -> Result<RuleSet, Report> {
        let rule = Rule::new("shorten").by(Subject::Ip).limit(self.limit).on_failure(OnFailure::Allow);
        let proxies = self.trusted_proxies.iter().map(|network| network.to_string());
        let loaded = Rules::new().trusted_proxies(proxies).rule(rule).compile()?;
        for finding in &loaded.findings {
            tracing::warn!("{finding}");
        }
        Ok(loaded.rules)
    }
}

fn wrong(variable: &'static str, problem: impl ToString) -> SettingError {
    SettingError { variable, problem: problem.to_string() }
}

fn number<N: std::str::FromStr>(
    variable: &'static str,
    value: Option<String>,
    otherwise: N,
    expected: &str,
) -> Result<N, SettingError> {
    let Some(value) = value else { return Ok(otherwise) };
    value.parse().map_err(|_| wrong(variable, format!("expected {expected}, got {value:?}")))
}

fn limit(max: Option<String>, window_ms: Option<String>) -> Result<Limit, SettingError> {
    const MAX: &str = "RATE_LIMIT_MAX";
    const WINDOW_MS: &str = "RATE_LIMIT_WINDOW_MS";
    let max = number(MAX, max, 10, "a whole number of links, for example 10")?;
    let window_ms = number(WINDOW_MS, window_ms, 60_000, "a whole number of milliseconds, for example 60000")?;
    // Validates each with a valid counterpart, so that the error names the wrong variable.
    Limit::new(max, Duration::from_secs(60)).map_err(|error| wrong(MAX, error))?;
    Limit::new(max, Duration::from_millis(window_ms)).map_err(|error| wrong(WINDOW_MS, error))
}

fn deadline(ms: Option<String>) -> Result<Duration, SettingError> {
    const EXPECTED: &str = "1 to 10000 milliseconds";
    match number("REDIS_DEADLINE_MS", ms, 25, EXPECTED)? {
        ms @ 1..=10_000 => Ok(Duration::from_millis(ms)),
        ms => Err(wrong("REDIS_DEADLINE_MS", format!("expected {EXPECTED}, got {ms}"))),
    }
}

fn public_url(text: &str) -> Result<String, SettingError> {
    let problem = || wrong("PUBLIC_URL", format!("expected an http or https URL, got {text:?}"));
    let url = url::Url::parse(text).map_err(|_| problem())?;
    let is_web = matches!(url.scheme(), "http" | "https") && url.query().is_none() && url.fragment().is_none();
    if is_web { Ok(url.as_str().trim_end_matches('/').to_owned()) } else { Err(problem()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings, String> {
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Settings::from_environment(variable).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_environment_is_ten_links_a_minute_in_memory() {
        let defaults = settings(&[]).unwrap();
        assert_eq!((defaults.port, &defaults.redis_url, &defaults.public_url), (3000, &None, &None));
        assert_eq!(defaults.limit.to_string(), "10/min");
        assert!(defaults.trusted_proxies.is_empty());
        assert_eq!(settings(&[("PORT", ""), ("REDIS_URL", ""), ("TRUSTED_PROXIES", "")]), Ok(defaults));
    }

    #[test]
    fn every_variable_is_read() {
        let said = settings(&[
            ("PORT", "0"),
            ("PUBLIC_URL", "https://sho.rt/"),
            ("REDIS_URL", "redis://127.0.0.1:7"),
            ("REDIS_DEADLINE_MS", "100"),
            ("RATE_LIMIT_MAX", "3"),
            ("RATE_LIMIT_WINDOW_MS", "1500"),
            ("TRUSTED_PROXIES", "10.0.0.0/8, ::1"),
        ])
        .unwrap();
        assert_eq!((said.port, said.public_url.as_deref()), (0, Some("https://sho.rt")));
        assert_eq!(said.redis_url.as_deref(), Some("redis://127.0.0.1:7"));
        assert_eq!(said.redis_deadline, Duration::from_millis(100));
        assert_eq!(said.limit.to_string(), "3/1500ms");
        assert!(said.trusted_proxies.contains([10, 1, 2, 3].into()));
        assert_eq!(said.rules().unwrap().rules().len(), 1);
    }

    #[test]
    fn an_invalid_value_is_rejected_with_what_is_accepted() {
        let cases = [
            ("PORT", "65536", "expected a port from 0 to 65535"),
            ("PORT", "http", "expected a port"),
            ("PUBLIC_URL", "sho.rt", "expected an http or https URL"),
            ("PUBLIC_URL", "ftp://sho.rt", "expected an http or https URL"),
            ("REDIS_DEADLINE_MS", "0", "expected 1 to 10000 milliseconds"),
            ("REDIS_DEADLINE_MS", "60000", "expected 1 to 10000 milliseconds"),
            ("REDIS_DEADLINE_MS", "25ms", "expected 1 to 10000 milliseconds"),
            ("RATE_LIMIT_MAX", "0", "a quota must be from 1 to"),
            ("RATE_LIMIT_MAX", "-1", "expected a whole number of links"),
            ("RATE_LIMIT_MAX", "ten", "expected a whole number of links"),
            ("RATE_LIMIT_MAX", "99999999999", "a quota must be from 1 to"),
            ("RATE_LIMIT_WINDOW_MS", "0", "a window must be from 1ms to 400day"),
            ("RATE_LIMIT_WINDOW_MS", "1min", "expected a whole number of milliseconds"),
            ("RATE_LIMIT_WINDOW_MS", "18446744073709551615", "a window must be from 1ms to 400day"),
            ("TRUSTED_PROXIES", "10.0.0.1/8", "networks and addresses have the form"),
            ("TRUSTED_PROXIES", "localhost", "networks and addresses have the form"),
        ];
        for (variable, value, expected) in cases {
            let error = settings(&[(variable, value)]).unwrap_err();
            assert!(error.starts_with(variable) && error.contains(expected), "{variable}={value}: {error}");
        }
    }
}
