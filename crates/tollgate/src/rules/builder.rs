//! Rules written in Rust instead of a configuration file.
//!
//! ```
//! use tollgate::{Rule, Rules, Subject};
//!
//! let rules = Rules::new()
//!     .trusted_proxies(["10.0.0.0/8"])
//!     .rule(Rule::new("shorten").post("/shorten").by(Subject::Ip).limit("10/min"))
//!     .rule(Rule::new("api").path("/v1/*").limit("600/min").limit("10000/day"))
//!     .build()?;
//! assert_eq!(rules.rules().len(), 2);
//! # Ok::<(), tollgate::config::Report>(())
//! ```
//!
//! Methods have the names of the file's fields, and a builder can express everything that a file can, except `expect`,
//! which protects against files that were cut off. Both are compiled by the same code: [`Rules`] only collects values,
//! and [`Rules::build`] checks all of them, reports all errors at once, and names the rule of each:
//!
//! ```
//! use tollgate::{Rule, Rules};
//!
//! let rules = Rules::new()
//!     .rule(Rule::new("shorten").path("shorten").limit("10/min"))
//!     .rule(Rule::new("login").limit("5/fortnight"));
//! let report = rules.build().unwrap_err();
//! assert_eq!(report.errors(), 2);
//! let path = &report.findings()[0];
//! assert_eq!(path.message(), "rule `shorten`, path `shorten`: a path begins with /");
//! assert_eq!(path.help_text(), Some("write `/shorten`"));
//! ```

mod callers;
mod lower;
mod rule;

#[cfg(test)]
mod tests;

use std::time::Duration;

pub use self::callers::{Ban, JwtSettings, ListedKey, Plan, SecretSource};
pub use self::rule::{LimitText, Rule};
use super::RuleSet;
use crate::answer::Style;
use crate::config::{Loaded, Loader, Report, Secret};
use crate::failure::OnFailure;
use crate::identity::{ApiKeys, Rotate};

/// A builder for a [`RuleSet`]: rules, plans, keys, bans, and how callers are identified.
///
/// See the [module documentation](crate::rules::builder) for examples.
#[derive(Clone, Debug, Default)]
#[must_use = "rules have no effect until they are built"]
pub struct Rules {
    rules: Vec<Rule>,
    plans: Vec<Plan>,
    keys: Vec<ListedKey>,
    keys_file: Option<String>,
    bans: Vec<Ban>,
    exempt_addresses: Vec<String>,
    exempt_keys: Vec<Secret>,
    exempt_paths: Vec<String>,

    trusted_proxies: Vec<String>,
    forwarding_header: Option<String>,
    ipv6_prefix: Option<u8>,
    api_key_header: Option<String>,
    api_keys: ApiKeys,
    anonymize: Option<(Rotate, Option<SecretSource>)>,
    jwt: Option<JwtSettings>,

    address_plans: Vec<(Vec<String>, String)>,
    plan_header: Option<String>,
    plan_hash: Option<String>,

    headers: Option<Vec<Style>>,
    expose_headers: bool,
    shadow: bool,
    kill_switch: bool,
    path_bytes_max: Option<u32>,
    method_override_headers: Vec<String>,

    store: Option<Secret>,
    prefix: Option<String>,
    instances: Option<u32>,
    deadline: Option<Duration>,
    on_failure: OnFailure,
}

impl Rules {
    /// Creates a set without rules, which limits nothing.
    pub fn new() -> Rules {
        Rules::default()
    }

    /// Adds a rule. All rules that match a request are decided together: it passes all of them or is charged by none.
    pub fn rule(mut self, rule: Rule) -> Rules {
        self.rules.push(rule);
        self
    }

    /// Adds a plan. A plan with the same name that was added before is replaced.
    ///
    /// Rules with [`Rule::limits_from_plan`] use it. Callers without another plan have `default`; those without an
    /// identity have `anonymous` if it exists, else `default`.
    pub fn plan(mut self, plan: Plan) -> Rules {
        self.plans.push(plan);
        self
    }

    /// Adds a known API key.
    pub fn key(mut self, key: ListedKey) -> Rules {
        self.keys.push(key);
        self
    }

    /// Reads more API keys from a TOML or YAML file with a list `keys`, when the rules are built.
    pub fn keys_file(mut self, path: impl Into<String>) -> Rules {
        self.keys_file = Some(path.into());
        self
    }

    /// Adds a ban. Requests of the banned network, key or user are refused with 403.
    pub fn ban(mut self, ban: Ban) -> Rules {
        self.bans.push(ban);
        self
    }

    /// Exempts networks, such as `10.9.0.0/16`, from all rules.
    pub fn exempt_addresses<T: Into<String>>(mut self, networks: impl IntoIterator<Item = T>) -> Rules {
        self.exempt_addresses.extend(networks.into_iter().map(T::into));
        self
    }

    /// Exempts API keys from all rules. A key is given as it is, or as `sha256:` and its digest in hexadecimal.
    pub fn exempt_keys<T: Into<String>>(mut self, keys: impl IntoIterator<Item = T>) -> Rules {
        self.exempt_keys.extend(keys.into_iter().map(Secret::new));
        self
    }

    /// Exempts path patterns, such as `/health` or `/static/*`, from all rules.
    pub fn exempt_paths<T: Into<String>>(mut self, patterns: impl IntoIterator<Item = T>) -> Rules {
        self.exempt_paths.extend(patterns.into_iter().map(T::into));
        self
    }

    /// Trusts proxies in these networks to report the client's address. Defaults to none.
    pub fn trusted_proxies<T: Into<String>>(mut self, networks: impl IntoIterator<Item = T>) -> Rules {
        self.trusted_proxies.extend(networks.into_iter().map(T::into));
        self
    }

    /// Sets the header in which trusted proxies report the client's address. Defaults to `x-forwarded-for`.
    pub fn forwarding_header(mut self, name: impl Into<String>) -> Rules {
        self.forwarding_header = Some(name.into());
        self
    }

    /// Sets how many bits of an IPv6 address identify one client. Defaults to 64.
    pub fn ipv6_prefix(mut self, bits: u8) -> Rules {
        self.ipv6_prefix = Some(bits);
        self
    }

    /// Sets the header that carries the API key. Defaults to `x-api-key`.
    ///
    /// A key in `Authorization: Bearer` is always read, too.
    pub fn api_key_header(mut self, name: impl Into<String>) -> Rules {
        self.api_key_header = Some(name.into());
        self
    }

    /// Sets which API keys identify a caller: those that are listed, or all. Defaults to [`ApiKeys::Known`].
    pub fn api_keys(mut self, api_keys: ApiKeys) -> Rules {
        self.api_keys = api_keys;
        self
    }

    /// Stores addresses and keys as pseudonyms, with a secret that is made up for this process.
    ///
    /// Only for counters in process memory. Nodes that share a store need one secret:
    /// [`anonymize_with`](Rules::anonymize_with). Building fails if [`store`](Rules::store) names a shared store.
    pub fn anonymize(mut self, rotate: Rotate) -> Rules {
        self.anonymize = Some((rotate, None));
        self
    }

    /// Stores addresses and keys as pseudonyms, with a secret of at least 16 bytes that all nodes share.
    pub fn anonymize_with(mut self, secret: SecretSource, rotate: Rotate) -> Rules {
        self.anonymize = Some((rotate, Some(secret)));
        self
    }

    /// Identifies users by JSON web tokens in `Authorization: Bearer`. Requires the feature `jwt`.
    pub fn jwt(mut self, jwt: JwtSettings) -> Rules {
        self.jwt = Some(jwt);
        self
    }

    /// Assigns a plan to all clients in these networks, unless their API key has one.
    pub fn address_plan<T: Into<String>>(
        mut self,
        networks: impl IntoIterator<Item = T>,
        plan: impl Into<String>,
    ) -> Rules {
        self.address_plans.push((networks.into_iter().map(T::into).collect(), plan.into()));
        self
    }

    /// Sets the header in which a trusted proxy names the caller's plan. Defaults to none.
    pub fn plan_header(mut self, name: impl Into<String>) -> Rules {
        self.plan_header = Some(name.into());
        self
    }

    /// Sets the Redis hash, on the store, that maps callers to plans (`redis_hash` in a file). Defaults to none.
    ///
    /// Used by [`Loaded::engine`](crate::config::Loaded::engine).
    pub fn plan_hash(mut self, name: impl Into<String>) -> Rules {
        self.plan_hash = Some(name.into());
        self
    }

    /// Sets the styles of rate-limit headers. Defaults to [`Style::X`] and [`Style::Ietf`].
    pub fn headers(mut self, styles: impl IntoIterator<Item = Style>) -> Rules {
        self.headers = Some(styles.into_iter().collect());
        self
    }

    /// Sets whether browsers may read the rate-limit headers (`Access-Control-Expose-Headers`). Defaults to `false`.
    pub fn expose_headers(mut self, expose: bool) -> Rules {
        self.expose_headers = expose;
        self
    }

    /// Sets whether all rules only count and never refuse. Defaults to `false`.
    pub fn shadow(mut self, shadow: bool) -> Rules {
        self.shadow = shadow;
        self
    }

    /// Sets whether limits and bans are switched off. Defaults to `false`.
    pub fn kill_switch(mut self, off: bool) -> Rules {
        self.kill_switch = off;
        self
    }

    /// Sets the most bytes of a path, without its query. A longer one is refused with 414. Defaults to 8192.
    pub fn path_bytes_max(mut self, bytes: u32) -> Rules {
        self.path_bytes_max = Some(bytes);
        self
    }

    /// Adds headers in which a request may name another method, such as `x-http-method-override`. Defaults to none.
    ///
    /// A rule then applies if it matches that method or the request's own.
    pub fn method_override_headers<T: Into<String>>(mut self, names: impl IntoIterator<Item = T>) -> Rules {
        self.method_override_headers.extend(names.into_iter().map(T::into));
        self
    }

    /// Sets the failure policy of rules without one of their own. Defaults to [`OnFailure::Local`].
    pub fn on_failure(mut self, on_failure: OnFailure) -> Rules {
        self.on_failure = on_failure;
        self
    }

    /// Sets the store: `memory`, `redis://…` or `rediss://…`. Defaults to memory.
    ///
    /// Used by [`Loaded::engine`](crate::config::Loaded::engine); [`Engine::new`](crate::engine::Engine::new) uses the
    /// limiter that it is given.
    pub fn store(mut self, url: impl Into<String>) -> Rules {
        self.store = Some(Secret::new(url));
        self
    }

    /// Sets the prefix of all keys in the store. Defaults to `tollgate`. Used like [`store`](Rules::store).
    pub fn prefix(mut self, prefix: impl Into<String>) -> Rules {
        self.prefix = Some(prefix.into());
        self
    }

    /// Sets how many nodes share the quotas while the store does not answer. Used like [`store`](Rules::store).
    pub fn instances(mut self, instances: u32) -> Rules {
        self.instances = Some(instances);
        self
    }

    /// Sets the deadline for a decision of the store. Defaults to 25 ms. Used like [`store`](Rules::store).
    pub fn deadline(mut self, deadline: Duration) -> Rules {
        self.deadline = Some(deadline);
        self
    }

    /// Checks and compiles the rules.
    ///
    /// Warnings, such as a rule that no request can reach, are dropped. [`Rules::compile`] returns them.
    ///
    /// # Errors
    /// Returns a report with all errors if there is any.
    pub fn build(self) -> Result<RuleSet, Report> {
        self.compile().map(|loaded| loaded.rules)
    }

    /// Checks and compiles the rules, and returns them with the settings of the store and all warnings.
    ///
    /// # Errors
    /// Returns a report with all errors and warnings if there is an error.
    pub fn compile(self) -> Result<Loaded, Report> {
        self.compile_with(&Loader::new())
    }

    /// Checks and compiles the rules, with the environment, the directory and the store of `loader`.
    ///
    /// # Errors
    /// Returns a report with all errors and warnings if there is an error.
    pub fn compile_with(self, loader: &Loader) -> Result<Loaded, Report> {
        let (config, places) = lower::lower(self);
        loader.compile(config, places)
    }
}
