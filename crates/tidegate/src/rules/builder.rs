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
//! Most methods have the name of a field of the file: [`Rules`] holds the tables of a file, and its methods set their
//! fields. [`Rules::build`] checks and compiles them as if they came from a file, reports all errors at once, and names
//! the rule of each:
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

#[cfg(test)]
mod tests;

use std::time::Duration;

use tidegate_config::{
    AddressPlan, Anonymize, AnonymizeEntry, BodyEntry, BodyInCode, ConfigTable, IntoField, OneOrMany, Secret, Spanned,
    StoreEntry, StoreUrl, TimeText,
};
use tidegate_core::OnFailure;

pub use self::callers::{Ban, JwtSettings, ListedKey, Plan, SecretSource};
pub use self::rule::{LimitText, Rule};
use super::RuleSet;
use crate::answer::{BodyFormat, Style};
use crate::config::{Loaded, Loader, Report};
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
pub struct Rules(ConfigTable);

/// Declares a method for each field of the configuration with the option `set`.
macro_rules! setters {
    ($($field:ident [$($about:tt)*] { $($options:tt)* })*) => {$(
        setters!(@method $field [$($about)*] $($options)*);
    )*};
    (@method $field:ident [$($about:tt)*] set: $set:ty $(, $more:literal)?) => {
        impl Rules {
            #[doc = concat!("Sets `", stringify!($field), "`, as in a configuration file.")]
            #[doc = ""]
            $($about)*
            $(
                #[doc = ""]
                #[doc = $more]
            )?
            pub fn $field(mut self, value: $set) -> Rules {
                self.0.$field = IntoField::into_field(value);
                self
            }
        }
    };
    (@method $field:ident [$($about:tt)*] $($other:tt)*) => {};
}

tidegate_config::__setters!();

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
        self.0.rules.0.get_or_insert_default().push(rule.0.into());
        self
    }

    /// Adds a plan, or replaces the plan that was added with the same name.
    ///
    /// Rules with [`Rule::limits_from_plan`] apply the limits of the caller's plan. They require a plan `default`,
    /// which callers without another plan have. Callers that are identified only by their address have `anonymous`
    /// instead, if that plan exists.
    pub fn plan(mut self, plan: Plan) -> Rules {
        self.0.plans.insert(plan.name.into(), plan.table);
        self
    }

    /// Adds a known API key. Building fails if a key is added twice.
    pub fn key(mut self, key: ListedKey) -> Rules {
        self.0.keys.0.get_or_insert_default().push(key.0.into());
        self
    }

    /// Sets a TOML or YAML file with a list `keys`, from which more API keys are read when the rules are built.
    ///
    /// Its format follows from its extension: `.toml`, `.yaml` or `.yml`. A relative path is relative to the current
    /// directory, or to [`Loader::directory`]. Building fails if the file cannot be read or has an error.
    pub fn keys_file(mut self, path: impl Into<String>) -> Rules {
        self.0.keys_file = Some(path.into().into());
        self
    }

    /// Adds a ban. Requests from the banned network, API key or user are refused with 403.
    ///
    /// If a network, key or user is banned twice, the ban that ends later applies.
    pub fn ban(mut self, ban: Ban) -> Rules {
        self.0.bans.push(ban.0.into());
        self
    }

    /// Exempts clients in these networks or with these addresses, such as `10.9.0.0/16`, from all rules.
    ///
    /// Bans that are added by [`ban`](Rules::ban) still apply.
    pub fn exempt_addresses<T: Into<String>>(mut self, networks: impl IntoIterator<Item = T>) -> Rules {
        self.0.exempt.addresses.0.extend(texts(networks));
        self
    }

    /// Exempts API keys from all rules. They do not have to be added by [`key`](Rules::key).
    ///
    /// A key is given in plain text, or as `sha256:` and its SHA-256 in hexadecimal. Bans that are added by
    /// [`ban`](Rules::ban) still apply.
    pub fn exempt_keys<T: Into<String>>(mut self, keys: impl IntoIterator<Item = T>) -> Rules {
        self.0.exempt.keys.extend(keys.into_iter().map(|key| Secret::new(key).into()));
        self
    }

    /// Exempts the paths that match these patterns, such as `/health` or `/static/*`, from all rules.
    ///
    /// Bans that are added by [`ban`](Rules::ban) still apply.
    pub fn exempt_paths<T: Into<String>>(mut self, patterns: impl IntoIterator<Item = T>) -> Rules {
        self.0.exempt.paths.0.extend(texts(patterns));
        self
    }

    /// Adds networks, such as `10.0.0.0/8`, whose proxies are trusted to report the client's address. Defaults to none.
    ///
    /// The client's address is the remote address of the connection. If that is a trusted proxy, it is the rightmost
    /// address in the [`forwarding_header`](Rules::forwarding_header) that is not a trusted proxy.
    pub fn trusted_proxies<T: Into<String>>(mut self, networks: impl IntoIterator<Item = T>) -> Rules {
        self.0.trusted_proxies.0.extend(texts(networks));
        self
    }

    /// Sets the header in which trusted proxies report the client's address. Defaults to `x-forwarded-for`.
    pub fn forwarding_header(mut self, name: impl Into<String>) -> Rules {
        self.0.forwarding_header = Some(name.into().into());
        self
    }

    /// Sets the header that carries the API key. Defaults to `x-api-key`.
    ///
    /// If a request does not have the header, its key is the token in `Authorization: Bearer`.
    pub fn api_key_header(mut self, name: impl Into<String>) -> Rules {
        self.0.api_key_header = Some(name.into().into());
        self
    }

    /// Counts by pseudonyms instead of addresses, keys and other values of callers, under a random secret of this
    /// process.
    ///
    /// Paths are not replaced. `rotate` sets when the pseudonyms change. Only for counters in process memory: building
    /// fails if the store is shared. Instances that share a store need a common secret:
    /// [`anonymize_with`](Rules::anonymize_with).
    pub fn anonymize(mut self, rotate: Rotate) -> Rules {
        let table = Anonymize { rotate, ..Anonymize::default() };
        self.0.anonymize = AnonymizeEntry::On(Box::new(table)).into();
        self
    }

    /// Counts by pseudonyms instead of addresses, keys and other values of callers, under this secret.
    ///
    /// Paths are not replaced. `rotate` sets when the pseudonyms change. The secret has at least 16 bytes, and must be
    /// the same on all instances that share a store.
    pub fn anonymize_with(mut self, secret: SecretSource, rotate: Rotate) -> Rules {
        let (secret, secret_env, secret_file) = secret.into_fields();
        let table = Anonymize { secret, secret_env, secret_file, rotate };
        self.0.anonymize = AnonymizeEntry::On(Box::new(table)).into();
        self
    }

    /// Sets the secret under which `tidegate serve` encrypts receipts, of at least 16 bytes. Defaults to none.
    ///
    /// The layer does not need it: it refunds by the response itself.
    pub fn receipt_secret(mut self, secret: SecretSource) -> Rules {
        let (text, variable, file) = secret.into_fields();
        self.0.receipt_secret = text;
        self.0.receipt_secret_env = variable;
        self.0.receipt_secret_file = file;
        self
    }

    /// Sets how users are identified by JSON web tokens in `Authorization: Bearer`. By default tokens are not verified.
    ///
    /// Building fails without the feature `jwt`.
    pub fn jwt(mut self, jwt: JwtSettings) -> Rules {
        self.0.jwt = Some(jwt.0.into());
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
        let networks = OneOrMany(texts(networks).collect());
        self.0.plan_sources.addresses.push(AddressPlan { networks, plan: plan.into().into() });
        self
    }

    /// Sets the header in which a [trusted proxy](Rules::trusted_proxies) names the caller's plan. Defaults to none.
    ///
    /// It applies if neither the caller's API key nor its address determines the plan.
    pub fn plan_header(mut self, name: impl Into<String>) -> Rules {
        self.0.plan_sources.header = Some(name.into().into());
        self
    }

    /// Sets the key of a Redis hash on the store that maps callers to plans (`redis_hash` in a file). Defaults to none.
    ///
    /// Its fields are those of [`PlanQuestion::field`](super::PlanQuestion::field). It is read if neither API key,
    /// address, header nor token determines the plan. Used only by [`Loaded::engine`](crate::config::Loaded::engine),
    /// and only with a shared store.
    pub fn plan_hash(mut self, name: impl Into<String>) -> Rules {
        self.0.plan_sources.redis_hash = Some(name.into().into());
        self
    }

    /// Sets the key of a Redis hash on the store with API keys (`key_sources.redis_hash` in a file). Defaults to none.
    ///
    /// Its fields are `api_key:` and the key's SHA-256, its values JSON objects; see `KeyHash`. It is read for keys
    /// that are not listed. Used only by [`Loaded::engine`](crate::config::Loaded::engine), and only with a shared
    /// store.
    pub fn key_hash(mut self, name: impl Into<String>) -> Rules {
        self.0.key_sources.redis_hash = Some(name.into().into());
        self
    }

    /// Sets the styles of rate-limit headers for rules without their own. Defaults to [`Style::X`] and [`Style::Ietf`].
    ///
    /// An empty list turns these headers off. Building fails if both [`Style::Ietf`] and [`Style::Draft6`] are given.
    pub fn headers(mut self, styles: impl IntoIterator<Item = Style>) -> Rules {
        self.0.headers = Some(styles.into_iter().collect::<Vec<_>>().into());
        self
    }

    /// Sets the format of the bodies of refusals by rules without their own. Defaults to JSON, or to text
    /// for [shields](Rule::shield).
    pub fn body(mut self, format: BodyFormat) -> Rules {
        self.0.body = Some(BodyEntry::InCode(BodyInCode::new(format)));
        self
    }

    /// Adds headers in which a request may name another method, such as `x-http-method-override`. Defaults to none.
    ///
    /// A rule applies if it matches the method in such a header or the request's own.
    pub fn method_override_headers<T: Into<String>>(mut self, names: impl IntoIterator<Item = T>) -> Rules {
        self.0.method_override_headers.0.extend(texts(names));
        self
    }

    /// Sets where counters are kept: `memory`, or the URL of a Redis server. Defaults to `memory`.
    ///
    /// Used by [`Loaded::engine`](crate::config::Loaded::engine). Ignored by
    /// [`Engine::new`](crate::engine::Engine::new), which uses the limiter that it is given.
    pub fn store(mut self, url: impl Into<String>) -> Rules {
        self.0.store = Some(StoreEntry::Url(StoreUrl(Secret::new(url))).into());
        self
    }

    /// Sets the prefix of all keys in a shared store: 1 to 64 letters, digits, `-`, `_`, `.` and `:`. Defaults to
    /// `tidegate`.
    ///
    /// Ignored by [`Engine::new`](crate::engine::Engine::new), like [`store`](Rules::store).
    pub fn prefix(mut self, prefix: impl Into<String>) -> Rules {
        self.0.prefix = Some(prefix.into().into());
        self
    }

    /// Sets the time after which a decision no longer waits for the store, from 1 ms to 400 days. Defaults to 25 ms.
    ///
    /// The failure policy then applies. Ignored by [`Engine::new`](crate::engine::Engine::new), like
    /// [`store`](Rules::store).
    pub fn deadline(mut self, deadline: Duration) -> Rules {
        self.0.deadline = Some(TimeText(format!("{}us", deadline.as_micros())).into());
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
        loader.compile(self.0)
    }
}

/// Converts texts to the entries of a list in a table.
fn texts<T: Into<String>>(texts: impl IntoIterator<Item = T>) -> impl Iterator<Item = Spanned<String>> {
    texts.into_iter().map(|text| text.into().into())
}
