//! Compiles the settings of the store.

use std::sync::Arc;
use std::time::Duration;

use tidegate_config::{Code, ConfigSource, ConfigTable, Finding, Secret, Span, Spanned, TimeText};
use tidegate_core::{Limit, OnFailure};

use super::Compiler;
use super::callers::SecretFields;
use super::store::{StoreAccess, StorePlace};
use crate::answer::{Style, Styles};
#[cfg(feature = "redis")]
use crate::limiter::{Limiter, LimiterBuilder, StoreUrlError};
#[cfg(feature = "redis")]
use crate::rules::{KeyHash, Lookups, PlanHash};
#[cfg(feature = "redis")]
use tidegate_redis::{RedisStore, RedisStoreBuilder};

pub(super) const MEMORY: &str = "memory";
const PREFIX_BYTES_MAX: usize = 64;
const HASH_NAME_BYTES_MAX: usize = 512;
/// Minimum length of the receipt secret in bytes. 16 random bytes cannot be guessed.
const RECEIPT_SECRET_BYTES_MIN: usize = 16;

/// The settings of the store and the limiter. They are used once, at startup.
///
/// A reload returns those of the new file, but only the rules of that file take effect.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// Where the counters are. `None` if no store is configured; they are then in memory.
    pub(crate) store: Option<StorePlace>,
    /// The settings of the store other than its URLs.
    pub(crate) access: StoreAccess,
    /// The prefix of every key in the store.
    pub prefix: String,
    /// The number of instances that share the quotas while the store is unavailable. `None` means the number of those
    /// that share the store; see [`LimiterBuilder::instances`].
    pub instances: Option<u32>,
    /// The deadline for a decision of the store.
    pub deadline: Duration,
    /// The failure policy of rules without their own.
    pub on_failure: OnFailure,
    /// The name of the Redis hash with the plans of callers, or `None` if there is none.
    pub plan_hash: Option<String>,
    /// The name of the Redis hash with API keys, or `None` if there is none.
    pub key_hash: Option<String>,
    /// The secret with which `tidegate serve` encrypts receipts, or `None` if there is none.
    pub receipt_secret: Option<Secret>,
}

impl Settings {
    /// Returns whether the counters are in a shared store. `false` if the store is `memory` or not configured.
    pub fn is_shared(&self) -> bool {
        self.store.as_ref().is_some_and(|store| *store != StorePlace::Memory)
    }

    /// Returns a builder for a limiter with these settings: store, deadline, failure policy and number of instances.
    ///
    /// The limiter decides explicit checks only. To decide by rules, use
    /// [`Loaded::engine`](crate::config::Loaded::engine). A shared store is created as by [`redis`](Settings::redis),
    /// which starts a task.
    ///
    /// # Errors
    /// If the store is shared and [`redis`](Settings::redis) fails. Counters in memory never fail.
    #[cfg(feature = "redis")]
    pub fn limiter(&self) -> Result<LimiterBuilder, StoreUrlError> {
        Ok(self.limiter_on(self.redis()?).0)
    }

    /// Creates the shared store of these settings, with their key prefix. Returns `None` if the counters are in memory.
    ///
    /// Its checks read the bans in the store. If the file has no password for Sentinels, their credentials are read
    /// from the environment variables `TIDEGATE_SENTINEL_USERNAME` and `TIDEGATE_SENTINEL_PASSWORD`, if they are set.
    /// Starts tasks on the current tokio runtime, which connect in the background: a store that cannot be reached is no
    /// error.
    ///
    /// # Errors
    /// Only if the store is shared: if its URL or the prefix is invalid, if the URL is `rediss://` and `tidegate-redis`
    /// is built without its feature `tls`, if a file with a certificate or a password cannot be used, or if there is no
    /// tokio runtime.
    #[cfg(feature = "redis")]
    pub fn redis(&self) -> Result<Option<RedisStore>, StoreUrlError> {
        Ok(self.redis_builder().map(RedisStoreBuilder::build).transpose()?)
    }

    /// Returns a builder for the shared store, with which [`redis`](Settings::redis) creates it. Returns `None` if the
    /// counters are in memory. The URL is checked by [`RedisStoreBuilder::build`].
    #[cfg(feature = "redis")]
    pub fn redis_builder(&self) -> Option<RedisStoreBuilder> {
        let builder = match self.store.as_ref()? {
            StorePlace::Memory => return None,
            StorePlace::Url(url) => RedisStore::builder(url.reveal()),
            StorePlace::Address(address) => RedisStore::builder_for(address.clone()),
        };
        // A call that is given up before the deadline would not be waited for as long as the deadline says.
        let call_timeout = self.deadline.max(RedisStoreBuilder::CALL_TIMEOUT_DEFAULT);
        let builder = builder.prefix(self.prefix.clone()).bans(true);
        Some(self.access.apply(builder, self.deadline).call_timeout(call_timeout))
    }

    /// Returns a builder for a limiter on this store, or in memory if it is `None`, with the other settings.
    ///
    /// Whether the store is the one of these settings, as [`redis`](Settings::redis) returns it, is not checked.
    ///
    /// Also returns the [`lookups`](Settings::lookups) for an [`Engine`](crate::engine::Engine) on this limiter, with
    /// the deadline of a check. They are empty without a store.
    #[cfg(feature = "redis")]
    pub fn limiter_on(&self, store: Option<RedisStore>) -> (LimiterBuilder, Lookups) {
        let mut builder = Limiter::builder().deadline(self.deadline).on_failure(self.on_failure);
        if let Some(instances) = self.instances {
            builder = builder.instances(instances);
        }
        let Some(store) = store else { return (builder, Lookups::new()) };
        let lookups = self.lookups(&store, self.deadline);
        (builder.store(Arc::new(store)), lookups)
    }

    /// Returns lookups of plans and API keys in the configured Redis hashes, on this store and within `deadline`.
    ///
    /// They are empty if no hash is configured.
    #[cfg(feature = "redis")]
    pub fn lookups(&self, store: &RedisStore, deadline: Duration) -> Lookups {
        let mut lookups = Lookups::new().deadline(deadline);
        if let Some(name) = &self.plan_hash {
            lookups = lookups.plan(PlanHash::new(store.clone(), name.as_str()));
        }
        match &self.key_hash {
            Some(name) => lookups.key(KeyHash::new(store.clone(), name.as_str())),
            None => lookups,
        }
    }
}

/// Checks the URL of a store, or `memory`, without connecting. The error is a message that does not contain the
/// password.
#[cfg(feature = "redis")]
pub(super) fn check_url(url: &str) -> Result<(), String> {
    if url == MEMORY { Ok(()) } else { RedisStore::check_url(url).map_err(|error| error.to_string()) }
}

/// Checks that a store is `memory` or begins with a known scheme. A program without Redis cannot check the rest of the
/// URL.
#[cfg(not(feature = "redis"))]
pub(super) fn check_url(url: &str) -> Result<(), String> {
    let is_url = |scheme: &String| url.strip_prefix(scheme.as_str()).is_some_and(|rest| !rest.is_empty());
    let kinds = ["", "+cluster", "+sentinel"];
    let schemes = kinds.map(|kind| [format!("redis{kind}://"), format!("rediss{kind}://")]).concat();
    let is_known = url == MEMORY || schemes.iter().any(is_url);
    if is_known { Ok(()) } else { Err(format!("expected a URL that begins with {}", schemes.join(", "))) }
}

impl Compiler<'_> {
    /// Compiles the settings of the store. Those of the loader override those of the file.
    ///
    /// Adds an error for each invalid value of the file, even if it is overridden. The loader's values are not checked.
    pub(super) fn settings(&mut self, config: &ConfigTable) -> Settings {
        let (store, access) = self.store(config.store.as_ref());
        let deadline = config.deadline.as_ref().and_then(|text| self.time(text));
        let instances = config.instances.as_ref().and_then(|instances| self.instances(instances));
        Settings {
            store,
            access,
            prefix: config.prefix.as_ref().map_or("tidegate".to_owned(), |prefix| self.prefix(prefix)),
            instances: self.loader.instances_override().or(instances),
            deadline: deadline.unwrap_or(Duration::from_millis(25)),
            on_failure: config.on_failure,
            plan_hash: config.plan_sources.redis_hash.as_ref().map(|name| self.hash_name(name)),
            key_hash: config.key_sources.redis_hash.as_ref().map(|name| self.hash_name(name)),
            receipt_secret: self.receipt_secret(config),
        }
    }

    /// Returns the receipt secret, or `None` if the configuration has none.
    ///
    /// Adds an error and returns `None` if it is given twice, cannot be read, or is shorter than 16 bytes.
    fn receipt_secret(&mut self, config: &ConfigTable) -> Option<Secret> {
        let fields = SecretFields {
            text: &config.receipt_secret,
            variable: &config.receipt_secret_env,
            file: &config.receipt_secret_file,
        };
        if fields.are_all_absent() {
            return None;
        }
        let names = ["receipt_secret", "receipt_secret_env", "receipt_secret_file"];
        let (secret, span) = self.secret("a receipt secret", names, fields, Span::default())?;
        let bytes = secret.reveal().len();
        if bytes < RECEIPT_SECRET_BYTES_MIN {
            let message = format!(
                "the receipt secret must be at least {RECEIPT_SECRET_BYTES_MIN} bytes long; this one has {bytes}"
            );
            self.note(Finding::new(Code::InvalidValue, message).help("for example `openssl rand -hex 32`").at(span));
            return None;
        }
        Some(secret)
    }

    fn prefix(&mut self, prefix: &Spanned<String>) -> String {
        let is_prefix_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
        if prefix.is_empty() || prefix.len() > PREFIX_BYTES_MAX || !prefix.bytes().all(is_prefix_byte) {
            let message = format!("a prefix must be 1 to {PREFIX_BYTES_MAX} letters, digits or - _ . :");
            self.note(Finding::new(Code::InvalidName, message).at(prefix.span()));
        }
        prefix.to_string()
    }

    fn hash_name(&mut self, name: &Spanned<String>) -> String {
        if name.is_empty() || name.len() > HASH_NAME_BYTES_MAX {
            let message = format!("the name of a Redis hash must be 1 to {HASH_NAME_BYTES_MAX} bytes");
            self.note(Finding::new(Code::InvalidName, message).at(name.span()));
        }
        name.to_string()
    }

    fn instances(&mut self, instances: &Spanned<u32>) -> Option<u32> {
        if **instances == 0 {
            let finding = Finding::new(Code::InvalidValue, "the number of instances must be at least 1");
            self.note(finding.help("set it to the number of instances that share the quotas").at(instances.span()));
        }
        Some(**instances)
    }

    /// Parses a time of the configuration itself, as [`time_in`](Self::time_in) does.
    pub(super) fn time(&mut self, text: &Spanned<TimeText>) -> Option<Duration> {
        let source = self.source.clone();
        self.time_in(text, &source)
    }

    /// Parses a time, such as `25ms` or `1h`: a whole number and a unit, from 1 ms to 400 days.
    ///
    /// Adds an error and returns `None` if it is invalid. `source` is the file to which its span refers.
    pub(super) fn time_in(&mut self, text: &Spanned<TimeText>, source: &Arc<ConfigSource>) -> Option<Duration> {
        // A time has the grammar of a window, and the parser of limits has the only parser of windows.
        let has_digit = text.starts_with(|first: char| first.is_ascii_digit()) && !text.contains(char::is_whitespace);
        let limit: Option<Limit> = has_digit.then(|| format!("1/{}", &***text).parse().ok()).flatten();
        if limit.is_none() {
            let finding = match text.parse::<u64>() {
                Ok(number) => TimeText::without_unit(number),
                Err(_) => {
                    let message = "expected a time: a whole number and a unit, from 1ms to 400day";
                    let help = "for example 25ms, 10s, 1h; units are us, ms, s, min, h, day, week";
                    Finding::new(Code::InvalidTime, message).help(help)
                }
            };
            self.note_in(source, finding.at(text.span()));
        }
        limit.map(|limit| limit.window())
    }

    /// Compiles a list of header styles. Returns `None` if it is absent.
    ///
    /// Adds an error and returns `None` if two styles exclude each other.
    pub(super) fn styles(&mut self, styles: Option<&Spanned<Vec<Style>>>) -> Option<Styles> {
        let list = styles?;
        self.accept(Styles::new(list.iter().copied()), Code::ConflictingHeaders, list.span())
    }
}

#[cfg(test)]
mod tests {
    use tidegate_config::Changes;

    use crate::config::{Format, Loaded, Loader};

    fn load(text: &str) -> Loaded {
        let loader = Loader::new().check_store_access(false);
        loader.load_text("tidegate.toml", text, Format::Toml).unwrap()
    }

    /// Returns the names of the settings that take effect after a restart, if the second text replaces the first.
    fn restart(before: &str, after: &str) -> Vec<String> {
        Changes::between(&load(before).document, &load(after).document).restart
    }

    #[test]
    fn change_of_any_field_of_the_store_takes_effect_after_a_restart() {
        let table = "[store]\nkind = 'sentinel'\nurls = ['rediss://a', 'rediss://b']\nmaster = 'main'\n";
        assert_eq!(restart(table, table), [""; 0]);
        for field in [
            "username = 'u'",
            "username_env = 'U'",
            "password_file = 'p'",
            "sentinel_username = 'u'",
            "sentinel_password_env = 'P'",
            "sentinel_password_file = 'p'",
            "replicas = 1",
            "tls = { server_name = 'redis' }",
            "tls = { ca_file = 'ca.pem' }",
        ] {
            assert_eq!(restart(table, &format!("{table}{field}\n")), ["store"], "{field}");
        }
        let cluster =
            |across: bool| format!("[store]\nkind = 'cluster'\nurls = ['redis://a']\ncalls_across_slots = {across}\n");
        assert_eq!(restart(&cluster(false), &cluster(true)), ["store"]);
        assert_eq!(restart(table, &cluster(false)), ["store"]);
    }

    #[test]
    fn settings_that_are_read_at_startup_are_named_and_others_are_not() {
        let before = "instances = 2\n[plan_sources]\nredis_hash = 'plans'\n[gateway]\nheaders_max = 50\n";
        let after = "instances = 3\ndeadline = '30ms'\nprefix = 'p'\nkill_switch = true\nreceipt_secret = '0123456789abcdef'\n\
                     [plan_sources]\nheader = 'x-plan'\n[gateway]\nheaders_max = 60\naccess_log = 'json'\n";
        let expected = [
            "plan_sources.redis_hash",
            "prefix",
            "instances",
            "deadline",
            "receipt_secret",
            "gateway.access_log",
            "gateway.headers_max",
        ];
        assert_eq!(restart(before, after), expected);
        assert_eq!(restart("kill_switch = true", "[[rules]]\nname = 'a'\nlimits = '1/s'"), [""; 0]);
    }

    #[test]
    fn an_overridden_setting_does_not_need_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tidegate.toml");
        let write = |text: &str| std::fs::write(&file, text).unwrap();
        let secret = |text: &str| std::fs::write(dir.path().join("secret"), text).unwrap();
        let rest = "receipt_secret_file = 'secret'";
        secret("0123456789abcdef");
        write(&format!("store = 'redis://a'\ninstances = 1\n{rest}"));
        let loader = Loader::new().store("redis://b").instances(2).check_store_access(false);
        let running = loader.load(&file).unwrap();
        let restart = || loader.reload(&file, &running).unwrap().changes.restart;
        write(&format!("store = 'redis://c'\ninstances = 3\n{rest}"));
        assert_eq!(restart(), [""; 0]);
        write(&format!("instances = 1\n{rest}\n[store]\nreplicas = 1"));
        assert_eq!(restart(), ["store"]);
        secret("0123456789abcdefg");
        assert_eq!(restart(), ["store", "receipt_secret_file"]);
    }
}
