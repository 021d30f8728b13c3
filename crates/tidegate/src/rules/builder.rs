//! Rules written in Rust instead of a configuration file.
//!
//! ```
//! use tidegate::{Rule, Rules, Subject};
//!
//! let rules = Rules::new()
//!     .trusted_proxies(["10.0.0.0/8"])
//!     .rule(Rule::new("shorten").post("/shorten").by(Subject::Ip).limit("10/min"))
//!     .rule(Rule::new("api").path("/v1/*").limit("600/min").limit("10000/day"))
//!     .build()?;
//! assert_eq!(rules.rules().len(), 2);
//! # Ok::<(), tidegate::config::Report>(())
//! ```
//!
//! The builder can express everything that a configuration file can, except `expect`, which detects truncated files.
//! Most methods have the name of a field of the file. Both are compiled by the same code: [`Rules`] only collects
//! values, and [`Rules::build`] checks all of them, reports all errors at once, and names the rule of each:
//!
//! ```
//! use tidegate::{Rule, Rules};
//!
//! let rules = Rules::new()
//!     .rule(Rule::new("shorten").path("shorten").limit("10/min"))
//!     .rule(Rule::new("login").limit("5/fortnight"));
//! let report = rules.build().unwrap_err();
//! assert_eq!(report.errors(), 2);
//! let path = &report.findings()[0];
//! assert_eq!(path.message(), "rule `shorten`, path `shorten`: a path must begin with /");
//! assert_eq!(path.help_text(), Some("write `/shorten`"));
//! ```

mod callers;
mod rule;
mod to_config;

#[cfg(test)]
mod tests;

use std::time::Duration;

pub use self::callers::{Ban, JwtSettings, ListedKey, Plan, SecretSource};
pub use self::rule::{LimitText, Rule};
use super::RuleSet;
use crate::answer::{BodyFormat, Style};
use crate::config::{Loaded, Loader, Report, Secret};
use crate::failure::OnFailure;
use crate::identity::{ApiKeys, Rotate};

/// A builder for a [`RuleSet`]: rules, plans, API keys, bans, exemptions, and how callers are identified.
///
/// Methods only collect values. [`build`](Rules::build) and [`compile`](Rules::compile) check them, and report all
/// errors at once.
///
/// ```
/// use tidegate::{Rule, Rules, Subject};
///
/// let rules = Rules::new()
///     .rule(Rule::new("shorten").post("/shorten").by(Subject::Ip).limit("10/min"))
///     .rule(Rule::new("api").path("/v1/*").limit("600/min").limit("10000/day"))
///     .build()?;
/// assert_eq!(rules.rules().len(), 2);
/// # Ok::<(), tidegate::config::Report>(())
/// ```
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
    receipt_secret: Option<SecretSource>,
    jwt: Option<JwtSettings>,

    address_plans: Vec<(Vec<String>, String)>,
    plan_header: Option<String>,
    plan_hash: Option<String>,
    key_hash: Option<String>,

    headers: Option<Vec<Style>>,
    body: Option<BodyFormat>,
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
    /// Creates a builder without rules and with the default settings.
    pub fn new() -> Rules {
        Rules::default()
    }

    /// Adds a rule. Its name must differ from those of all other rules.
    ///
    /// All enforced rules that match a request, except shields, are decided together: the request is admitted and
    /// charged by all of them, or denied and charged by none, except by limits with `count_denied`.
    pub fn rule(mut self, rule: Rule) -> Rules {
        self.rules.push(rule);
        self
    }

    /// Adds a plan, or replaces the plan that was added with the same name.
    ///
    /// Rules with [`Rule::limits_from_plan`] apply the limits of the caller's plan. They require a plan `default`,
    /// which callers without another plan have. Callers that are identified only by their address have `anonymous`
    /// instead, if that plan exists.
    pub fn plan(mut self, plan: Plan) -> Rules {
        self.plans.push(plan);
        self
    }

    /// Adds a known API key. Building fails if a key is added twice.
    pub fn key(mut self, key: ListedKey) -> Rules {
        self.keys.push(key);
        self
    }

    /// Sets a TOML or YAML file with a list `keys`, from which more API keys are read when the rules are built.
    ///
    /// Its format follows from its extension: `.toml`, `.yaml` or `.yml`. A relative path is relative to the current
    /// directory, or to [`Loader::directory`]. Building fails if the file cannot be read or has an error.
    pub fn keys_file(mut self, path: impl Into<String>) -> Rules {
        self.keys_file = Some(path.into());
        self
    }

    /// Adds a ban. Requests from the banned network, API key or user are refused with 403.
    ///
    /// If a network, key or user is banned twice, the ban that ends later applies.
    pub fn ban(mut self, ban: Ban) -> Rules {
        self.bans.push(ban);
        self
    }

    /// Exempts clients in these networks or with these addresses, such as `10.9.0.0/16`, from all rules.
    ///
    /// Bans that are added by [`ban`](Rules::ban) still apply.
    pub fn exempt_addresses<T: Into<String>>(mut self, networks: impl IntoIterator<Item = T>) -> Rules {
        self.exempt_addresses.extend(networks.into_iter().map(T::into));
        self
    }

    /// Exempts API keys from all rules. They do not have to be added by [`key`](Rules::key).
    ///
    /// A key is given in plain text, or as `sha256:` and its SHA-256 in hexadecimal. Bans that are added by
    /// [`ban`](Rules::ban) still apply.
    pub fn exempt_keys<T: Into<String>>(mut self, keys: impl IntoIterator<Item = T>) -> Rules {
        self.exempt_keys.extend(keys.into_iter().map(Secret::new));
        self
    }

    /// Exempts the paths that match these patterns, such as `/health` or `/static/*`, from all rules.
    ///
    /// Bans that are added by [`ban`](Rules::ban) still apply.
    pub fn exempt_paths<T: Into<String>>(mut self, patterns: impl IntoIterator<Item = T>) -> Rules {
        self.exempt_paths.extend(patterns.into_iter().map(T::into));
        self
    }

    /// Adds networks, such as `10.0.0.0/8`, whose proxies are trusted to report the client's address. Defaults to none.
    ///
    /// The client's address is the remote address of the connection. If that is a trusted proxy, it is the rightmost
    /// address in the [`forwarding_header`](Rules::forwarding_header) that is not a trusted proxy.
    pub fn trusted_proxies<T: Into<String>>(mut self, networks: impl IntoIterator<Item = T>) -> Rules {
        self.trusted_proxies.extend(networks.into_iter().map(T::into));
        self
    }

    /// Sets the header in which trusted proxies report the client's address. Defaults to `x-forwarded-for`.
    pub fn forwarding_header(mut self, name: impl Into<String>) -> Rules {
        self.forwarding_header = Some(name.into());
        self
    }

    /// Sets the length of the IPv6 prefix, in bits from 1 to 128, by which clients are counted. Defaults to 64.
    ///
    /// IPv6 clients whose addresses agree in these bits share their counters.
    pub fn ipv6_prefix(mut self, bits: u8) -> Rules {
        self.ipv6_prefix = Some(bits);
        self
    }

    /// Sets the header that carries the API key. Defaults to `x-api-key`.
    ///
    /// If a request does not have the header, its key is the token in `Authorization: Bearer`.
    pub fn api_key_header(mut self, name: impl Into<String>) -> Rules {
        self.api_key_header = Some(name.into());
        self
    }

    /// Sets which API keys identify a caller: only those that are listed here or in the keys file, or all. Defaults to
    /// [`ApiKeys::Known`].
    ///
    /// A caller with a key that does not identify it is counted by user or address.
    pub fn api_keys(mut self, api_keys: ApiKeys) -> Rules {
        self.api_keys = api_keys;
        self
    }

    /// Counts by pseudonyms instead of addresses, keys and other values of callers, under a random secret of this
    /// process.
    ///
    /// Paths are not replaced. `rotate` sets when the pseudonyms change. Only for counters in process memory: building
    /// fails if the store is shared. Instances that share a store need a common secret:
    /// [`anonymize_with`](Rules::anonymize_with).
    pub fn anonymize(mut self, rotate: Rotate) -> Rules {
        self.anonymize = Some((rotate, None));
        self
    }

    /// Counts by pseudonyms instead of addresses, keys and other values of callers, under this secret.
    ///
    /// Paths are not replaced. `rotate` sets when the pseudonyms change. The secret has at least 16 bytes, and must be
    /// the same on all instances that share a store.
    pub fn anonymize_with(mut self, secret: SecretSource, rotate: Rotate) -> Rules {
        self.anonymize = Some((rotate, Some(secret)));
        self
    }

    /// Sets the secret under which `tidegate serve` encrypts receipts, of at least 16 bytes. Defaults to none.
    ///
    /// The layer does not need it: it refunds by the response itself.
    pub fn receipt_secret(mut self, secret: SecretSource) -> Rules {
        self.receipt_secret = Some(secret);
        self
    }

    /// Sets how users are identified by JSON web tokens in `Authorization: Bearer`. By default tokens are not verified.
    ///
    /// Building fails without the feature `jwt`.
    pub fn jwt(mut self, jwt: JwtSettings) -> Rules {
        self.jwt = Some(jwt);
        self
    }

    /// Assigns a plan to all clients in these networks, unless their API key has a plan or limits of its own.
    ///
    /// If a client is in the networks of several calls, the first call applies. Building fails if there is no such
    /// plan.
    pub fn address_plan<T: Into<String>>(
        mut self,
        networks: impl IntoIterator<Item = T>,
        plan: impl Into<String>,
    ) -> Rules {
        self.address_plans.push((networks.into_iter().map(T::into).collect(), plan.into()));
        self
    }

    /// Sets the header in which a [trusted proxy](Rules::trusted_proxies) names the caller's plan. Defaults to none.
    ///
    /// It applies if neither the caller's API key nor its address determines the plan.
    pub fn plan_header(mut self, name: impl Into<String>) -> Rules {
        self.plan_header = Some(name.into());
        self
    }

    /// Sets the key of a Redis hash on the store that maps callers to plans (`redis_hash` in a file). Defaults to none.
    ///
    /// Its fields are those of [`PlanQuestion::field`](super::PlanQuestion::field). It is read if neither API key,
    /// address, header nor token determines the plan. Used only by [`Loaded::engine`](crate::config::Loaded::engine),
    /// and only with a shared store.
    pub fn plan_hash(mut self, name: impl Into<String>) -> Rules {
        self.plan_hash = Some(name.into());
        self
    }

    /// Sets the key of a Redis hash on the store with API keys (`key_sources.redis_hash` in a file). Defaults to none.
    ///
    /// Its fields are `api_key:` and the key's SHA-256, its values JSON objects; see `KeyHash`. It is read for keys
    /// that are not listed. Used only by [`Loaded::engine`](crate::config::Loaded::engine), and only with a shared
    /// store.
    pub fn key_hash(mut self, name: impl Into<String>) -> Rules {
        self.key_hash = Some(name.into());
        self
    }

    /// Sets the styles of rate-limit headers for rules without their own. Defaults to [`Style::X`] and [`Style::Ietf`].
    ///
    /// An empty list turns these headers off. Building fails if both [`Style::Ietf`] and [`Style::Draft6`] are given.
    pub fn headers(mut self, styles: impl IntoIterator<Item = Style>) -> Rules {
        self.headers = Some(styles.into_iter().collect());
        self
    }

    /// Sets the format of the bodies of refusals by rules without their own. Defaults to JSON, or to text
    /// for [shields](Rule::shield).
    pub fn body(mut self, format: BodyFormat) -> Rules {
        self.body = Some(format);
        self
    }

    /// Sets whether scripts from other origins may read the rate-limit headers. Defaults to `false`.
    ///
    /// If `true`, responses list these headers in `Access-Control-Expose-Headers`.
    pub fn expose_headers(mut self, expose: bool) -> Rules {
        self.expose_headers = expose;
        self
    }

    /// Sets whether all enforced rules are in shadow mode: they count requests but deny none. Defaults to `false`.
    ///
    /// Bans and the maximum length of a path still apply.
    pub fn shadow(mut self, shadow: bool) -> Rules {
        self.shadow = shadow;
        self
    }

    /// Sets whether everything is switched off: limits, bans and the maximum length of a path. Defaults to `false`.
    ///
    /// An engine then admits every request, and does not consider bans in the store either. Nothing is charged or
    /// counted.
    pub fn kill_switch(mut self, off: bool) -> Rules {
        self.kill_switch = off;
        self
    }

    /// Sets the maximum length of a path in bytes, without its query, from 1 to 65,534. Defaults to 8,192.
    ///
    /// A request with a longer path is refused with 414.
    pub fn path_bytes_max(mut self, bytes: u32) -> Rules {
        self.path_bytes_max = Some(bytes);
        self
    }

    /// Adds headers in which a request may name another method, such as `x-http-method-override`. Defaults to none.
    ///
    /// A rule applies if it matches the method in such a header or the request's own.
    pub fn method_override_headers<T: Into<String>>(mut self, names: impl IntoIterator<Item = T>) -> Rules {
        self.method_override_headers.extend(names.into_iter().map(T::into));
        self
    }

    /// Sets how rules without a failure policy of their own are decided when the store does not answer. Defaults to
    /// [`OnFailure::Local`].
    pub fn on_failure(mut self, on_failure: OnFailure) -> Rules {
        self.on_failure = on_failure;
        self
    }

    /// Sets where counters are kept: `memory`, or the URL of a Redis server. Defaults to `memory`.
    ///
    /// Used by [`Loaded::engine`](crate::config::Loaded::engine). Ignored by
    /// [`Engine::new`](crate::engine::Engine::new), which uses the limiter that it is given.
    pub fn store(mut self, url: impl Into<String>) -> Rules {
        self.store = Some(Secret::new(url));
        self
    }

    /// Sets the prefix of all keys in a shared store: 1 to 64 letters, digits, `-`, `_`, `.` and `:`. Defaults to
    /// `tidegate`.
    ///
    /// Ignored by [`Engine::new`](crate::engine::Engine::new), like [`store`](Rules::store).
    pub fn prefix(mut self, prefix: impl Into<String>) -> Rules {
        self.prefix = Some(prefix.into());
        self
    }

    /// Sets the number of instances that share a store, at least 1. Defaults to the number of those that announce
    /// themselves in the store; see [`LimiterBuilder::instances`](crate::LimiterBuilder::instances).
    ///
    /// While the store does not answer, each instance grants quota / `instances`, rounded up, under
    /// [`OnFailure::Local`]. Ignored by [`Engine::new`](crate::engine::Engine::new), like [`store`](Rules::store).
    pub fn instances(mut self, instances: u32) -> Rules {
        self.instances = Some(instances);
        self
    }

    /// Sets the time after which a decision no longer waits for the store, from 1 ms to 400 days. Defaults to 25 ms.
    ///
    /// The failure policy then applies. Ignored by [`Engine::new`](crate::engine::Engine::new), like
    /// [`store`](Rules::store).
    pub fn deadline(mut self, deadline: Duration) -> Rules {
        self.deadline = Some(deadline);
        self
    }

    /// Checks and compiles the rules. Reads the files and environment variables that they name.
    ///
    /// Warnings, such as a rule that no request can match, and the settings of the store are dropped;
    /// [`Rules::compile`] returns them.
    ///
    /// # Errors
    /// If a value is invalid, or a file or variable cannot be read. The report has all errors and warnings.
    pub fn build(self) -> Result<RuleSet, Report> {
        self.compile().map(|loaded| loaded.rules)
    }

    /// Checks and compiles the rules, and returns them with the settings of the store and all warnings.
    ///
    /// Reads the files and environment variables that they name.
    ///
    /// # Errors
    /// If a value is invalid, or a file or variable cannot be read. The report has all errors and warnings.
    pub fn compile(self) -> Result<Loaded, Report> {
        self.compile_with(&Loader::new())
    }

    /// Checks and compiles the rules like [`compile`](Rules::compile), with the settings of `loader`.
    ///
    /// Its store and number of instances, if they are set, override those of the rules, and are not checked. Its
    /// environment and directory are used to read variables and files.
    ///
    /// # Errors
    /// If a value is invalid, or a file or variable cannot be read. The report has all errors and warnings.
    pub fn compile_with(self, loader: &Loader) -> Result<Loaded, Report> {
        let (config, value_names) = to_config::to_config(self);
        loader.compile(config, value_names)
    }
}
