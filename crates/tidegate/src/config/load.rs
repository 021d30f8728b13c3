//! Loads configuration files.

use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidegate_config::{
    Changes, Code, ConfigTable, Document, Finding, Format, HeaderTest, MatchTable, Report, Secret, Severity, Spanned,
    complete,
};

use super::compile::{self, Settings};
use crate::__io_reason;
#[cfg(feature = "redis")]
use crate::engine::Engine;
use crate::gateway::{GatewaySettings, UpstreamSettings};
#[cfg(feature = "redis")]
use crate::limiter::StoreUrlError;
use crate::rules::matcher::{Conditions, HeaderText};
use crate::rules::path::LazyReadings;
use crate::rules::{RequestView, RuleSet};

/// A configuration without errors, compiled and ready for use.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The compiled rules.
    pub rules: RuleSet,
    /// The settings of the store and the limiter. `Loaded::engine` uses them;
    /// [`Engine::reload`](crate::engine::Engine::reload) does not apply those of another file.
    pub settings: Settings,
    /// The settings of the gateway, which only `tidegate gateway` and `tidegate serve` use.
    pub gateway: GatewaySettings,
    /// Warnings and advice. Never an error.
    pub findings: Vec<Finding>,
    /// The differences from the configuration that this one replaces. Empty unless it was loaded by [`Loader::reload`].
    pub changes: Changes,
    /// The files that were read, each with its metadata from before the read: the configuration file first, unless a
    /// text was loaded; then the files with secrets and keys.
    pub files: Vec<(PathBuf, Metadata)>,
    /// The paths of the files that the configuration names: the keys file, and the files with secrets.
    pub referenced_files: Vec<PathBuf>,
    /// The configuration as written.
    pub(crate) document: Document,
}

impl Loaded {
    /// Returns the conditions of a rule that a request does not meet, each as a phrase such as `the method is not
    /// GET`.
    ///
    /// `index` is that of the rule in [`RuleSet::rules`]. The list is empty if the request meets all conditions, or if
    /// there is no such rule. The mode of the rule, groups, exemptions and the kill switch are not considered. No phrase
    /// contains the value that a header is compared with.
    pub fn unmet_conditions(&self, index: usize, request: &RequestView<'_>) -> Vec<String> {
        let matcher = &self.rules.parts().matcher;
        let (Some(rule), Some(all)) = (self.document.config.rules.get(index), matcher.conditions().get(index)) else {
            return Vec::new();
        };
        let MatchTable { methods, path, host, groups: _, headers } = &*rule.matches;
        let readings = LazyReadings::of(request.path());
        let is_met = |conditions: Conditions| matcher.is_met(conditions, request, &readings);
        let mut unmet = Vec::new();
        // No request meets an empty list.
        if let Some(list) = methods
            && !is_met(Conditions { methods: all.methods, ..Conditions::default() })
        {
            unmet.push(format!("the method is not {}", joined_texts(list)));
        }
        if let Some(list) = path
            && (list.is_empty() || !is_met(Conditions { paths: all.paths.clone(), ..Conditions::default() }))
        {
            unmet.push(format!("the path does not match {}", joined_texts(list)));
        }
        if let Some(list) = host
            && (list.is_empty() || !is_met(Conditions { hosts: all.hosts.clone(), ..Conditions::default() }))
        {
            unmet.push(format!("the host does not match {}", joined_texts(list)));
        }
        for (name, test) in headers {
            let condition = all.headers.get_key_value(&HeaderText(name.to_ascii_lowercase().into()));
            let headers = condition.map(|(name, condition)| (name.clone(), condition.clone())).into_iter().collect();
            if !is_met(Conditions { headers, ..Conditions::default() }) {
                unmet.push(match test {
                    HeaderTest::Present => format!("there is no header {}", **name),
                    HeaderTest::Equals(_) => format!("the header {} does not have the expected value", **name),
                });
            }
        }
        unmet
    }

    /// Returns the names of the settings of the file that are set, but have no effect on a check that names its key and
    /// limit, in alphabetical order.
    ///
    /// Such a check has no address, API key or path that could be exempt, banned by the file, replaced by a pseudonym
    /// or too long. Its response body is the decision. No rule decides it, so shadow mode has no effect. Settings that
    /// identify callers, such as `plans` and `trusted_proxies`, are not listed, since such a check has no caller.
    pub fn settings_for_requests_only(&self) -> Vec<&'static str> {
        self.document.config.settings_for_requests_only()
    }

    /// Returns this configuration as one that may replace the active configuration `running`.
    ///
    /// Sets [`Loaded::changes`], and puts warnings about removed parts and a missing newline before the other findings.
    ///
    /// # Errors
    /// If the file, its keys file or a secret file may be truncated. The report has all findings.
    pub(crate) fn into_replacement_of(mut self, running: &Loaded) -> Result<Loaded, Report> {
        self.changes = Changes::between(&running.document, &self.document);
        let found = complete::check_replacement(&self.document, &running.document, &self.changes);
        let is_refused = found.iter().any(|finding| finding.severity() == Severity::Error);
        self.findings.splice(0..0, found);
        if is_refused { Err(Report::new(self.document.source.name(), self.findings)) } else { Ok(self) }
    }
}

#[cfg(feature = "redis")]
impl Loaded {
    /// Creates an engine with these rules, on the store of [`settings`](Loaded::settings).
    ///
    /// A shared store starts a task on the current tokio runtime, which connects in the background.
    ///
    /// If the store is Redis, the engine also looks up plans in the hash `plan_sources.redis_hash` and API keys in the
    /// hash `key_sources.redis_hash`, if these are configured.
    ///
    /// ```
    /// use tidegate::config::{Config, Format};
    ///
    /// let file = "store = 'memory'\n[[rules]]\nname = 'all'\nlimits = ['100/min']";
    /// let engine = Config::from_text(file, Format::Toml)?.engine()?;
    /// # drop(engine);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the store is shared and [`Settings::redis`] fails. Counters in memory never fail.
    pub fn engine(self) -> Result<Engine, StoreUrlError> {
        let (limiter, lookups) = self.settings.limiter_on(self.settings.redis()?);
        Ok(Engine::with_lookups(limiter.build(), self.rules, lookups))
    }
}

fn joined_texts(list: &[Spanned<String>]) -> String {
    list.iter().map(|text| text.as_str()).collect::<Vec<_>>().join(", ")
}

/// A function that returns the value of the environment variable with a name, or `None` if it is not set.
type Environment = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Loads configuration files and texts. Its own settings override those of the file.
///
/// ```no_run
/// use tidegate::config::Loader;
///
/// let loaded = Loader::new().store("redis://localhost").load("tidegate.toml")?;
/// # Ok::<(), tidegate::config::Report>(())
/// ```
#[derive(Clone)]
pub struct Loader {
    store: Option<Secret>,
    /// The names of the environment variables with the user and the password of the store.
    store_credentials: Option<(String, String)>,
    instances: Option<u32>,
    directory: PathBuf,
    environment: Arc<Environment>,
    checks_store_access: bool,
    upstream_check: Option<Arc<UpstreamCheck>>,
    is_reload: bool,
}

/// Checks whether an upstream can be used. The error says why not.
type UpstreamCheck = dyn Fn(&UpstreamSettings) -> Result<(), String> + Send + Sync;

impl Default for Loader {
    fn default() -> Self {
        Loader {
            store: None,
            store_credentials: None,
            instances: None,
            directory: PathBuf::new(),
            environment: Arc::new(|name| std::env::var(name).ok().filter(|value| !value.is_empty())),
            checks_store_access: true,
            upstream_check: None,
            is_reload: false,
        }
    }
}

impl Loader {
    /// Creates a loader without overrides, which reads environment variables of the process.
    pub fn new() -> Loader {
        Loader::default()
    }

    /// Sets the store: `memory`, or a `redis://`, `redis+cluster://` or `redis+sentinel://` URL, with `rediss` for TLS.
    /// Overrides the `store` of the file.
    ///
    /// If `store` is a table in the file, only its `urls`, `kind` and `master` are overridden, and its user and
    /// password if the URL has a password.
    ///
    /// The URL is not checked here: an invalid one is an error of `Loaded::engine`, `Settings::limiter` and
    /// `Settings::redis`.
    #[must_use]
    pub fn store(self, url: impl Into<String>) -> Loader {
        Loader { store: Some(Secret::new(url)), ..self }
    }

    /// Sets the names of the environment variables with the user and the password of the store. Defaults to none.
    ///
    /// They are used if neither the URL nor the file has a password. A variable that is not set is ignored. The store
    /// reads the variables again at each connect.
    #[must_use]
    pub fn store_credentials_env(self, username: impl Into<String>, password: impl Into<String>) -> Loader {
        Loader { store_credentials: Some((username.into(), password.into())), ..self }
    }

    /// Sets whether the user, the password and the certificates of the store must exist. Defaults to `true`.
    ///
    /// With `false`, their files and environment variables are not checked, and a missing password is no error. Intended
    /// for programs that do not connect to the store: building the store still fails if one of them is missing.
    #[must_use]
    pub fn check_store_access(self, is_required: bool) -> Loader {
        Loader { checks_store_access: is_required, ..self }
    }

    /// Sets the number of instances that share the quotas while the store is unavailable.
    ///
    /// Overrides the `instances` of the file; 0 counts as 1. Without either, it is the number of instances that share the
    /// store.
    #[must_use]
    pub fn instances(self, instances: u32) -> Loader {
        Loader { instances: Some(instances), ..self }
    }

    /// Sets the function that returns the value of an environment variable by its name, or `None` if it is not set.
    ///
    /// It is called for secrets whose variable the file names (`secret_env`, `key_env`). Defaults to the environment of
    /// the process, where an empty variable counts as not set.
    #[must_use]
    pub fn environment(self, environment: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Loader {
        Loader { environment: Arc::new(environment), ..self }
    }

    /// Sets the function that checks each upstream of the gateway, without connecting, such as its certificate
    /// authorities. Its message becomes an error of the file. Defaults to none.
    ///
    /// Only a program that forwards requests can use them, and this library does not.
    #[doc(hidden)] // for the command
    #[must_use]
    pub fn check_upstreams(
        self,
        check: impl Fn(&UpstreamSettings) -> Result<(), String> + Send + Sync + 'static,
    ) -> Loader {
        Loader { upstream_check: Some(Arc::new(check)), ..self }
    }

    /// Sets the directory of the keys and secret files that a text names by a relative path. Defaults to the current
    /// directory.
    ///
    /// Used by [`load_text`](Loader::load_text) and [`Rules::compile_with`](crate::rules::Rules::compile_with).
    /// [`load`](Loader::load) and [`reload`](Loader::reload) use the directory of the configuration file instead.
    #[must_use]
    pub fn directory(self, directory: impl Into<PathBuf>) -> Loader {
        Loader { directory: directory.into(), ..self }
    }

    /// Reads, checks and compiles a configuration file: TOML or YAML, by the extension of its name.
    ///
    /// Also reads the keys file, the secret files and the environment variables that it names.
    ///
    /// # Errors
    /// If a file or variable cannot be read, or the configuration has an error. The report has all errors, with file,
    /// line and column where they have a place.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Loaded, Report> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let (text, format, metadata) = self.read_file(path).map_err(|finding| Report::new(&name, vec![*finding]))?;
        let directory = path.parent().unwrap_or(Path::new("")).to_path_buf();
        let mut loaded = Loader { directory, ..self.clone() }.load_text(&name, &text, format)?;
        loaded.files.insert(0, (path.to_owned(), metadata));
        Ok(loaded)
    }

    /// Loads a configuration file that is to replace the active configuration `running`.
    ///
    /// The new configuration is not put into use yet: pass its rules to
    /// [`Engine::reload`](crate::engine::Engine::reload). [`Loaded::changes`] has the differences. [`Loaded::findings`]
    /// begins with one warning for each kind of part that is removed, and one if there are changes and the file or its
    /// keys file no longer ends with a newline.
    ///
    /// ```no_run
    /// # use tidegate::config::{Loaded, Loader, Report};
    /// # use tidegate::engine::Engine;
    /// # fn example(engine: &Engine, running: &mut Loaded) -> Result<(), Report> {
    /// let loaded = Loader::new().reload("tidegate.toml", running)?;
    /// engine.reload(loaded.rules.clone());
    /// *running = loaded;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If [`Loader::load`] fails, if one of the files is not a regular file, or if one may be truncated. A file may be
    /// truncated if
    /// - it has nothing but white space, and the one of `running` has more;
    /// - it has no rules although `running` has some, and does not contain `rules = []`;
    /// - it has no keys and names no keys file although `running` has keys, and does not contain `keys = []`;
    /// - it has no `expect.rules` (or `expect.keys`), and `running` has;
    /// - `running` has `expect`, there are changes, and the file, or its keys file, is only the beginning of the one of
    ///   `running`; or
    /// - a secret that is read from a file is only the beginning of the one of `running`.
    pub fn reload(&self, path: impl AsRef<Path>, running: &Loaded) -> Result<Loaded, Report> {
        let mut loaded = Loader { is_reload: true, ..self.clone() }.load(path)?.into_replacement_of(running)?;
        // What this loader overrides stays the same.
        let has_same_access = loaded.settings.access == running.settings.access;
        loaded.changes.restart.retain(|setting| match setting.as_str() {
            "store" => self.store.is_none() || !has_same_access,
            "instances" => self.instances.is_none(),
            _ => true,
        });
        Ok(loaded)
    }

    /// Returns the paths of the files that a configuration file names: its keys file, and the files with secrets.
    ///
    /// Reads only the configuration file, whose directory is that of relative names. Values that cannot be read are
    /// ignored. Returns an empty list if the file cannot be read or parsed.
    pub fn referenced_files(&self, path: impl AsRef<Path>) -> Vec<PathBuf> {
        let path = path.as_ref();
        let Ok((text, format, _)) = self.read_file(path) else { return Vec::new() };
        let directory = path.parent().unwrap_or(Path::new(""));
        let (config, ..) = ConfigTable::read("", &text, format);
        config.iter().flat_map(ConfigTable::named_files).map(|name| directory.join(name)).collect()
    }

    /// Checks and compiles the text of a configuration. Reports use `name` as the name of its file.
    ///
    /// Reads the keys file, the secret files and the environment variables that the text names.
    ///
    /// # Errors
    /// If the configuration has an error, or a file or variable that it names cannot be read. The report has all
    /// errors, with line and column where they have a place.
    pub fn load_text(&self, name: &str, text: &str, format: Format) -> Result<Loaded, Report> {
        let (config, source, mut errors) = ConfigTable::read(name, text, format);
        let Some(config) = config else { return Err(Report::new(name, errors)) };
        let compiled = compile::compile(config, source, self);
        if errors.is_empty() {
            return compiled;
        }
        // The values that were read are checked too, so that one attempt reports all errors.
        let others = compiled.map_or_else(Report::into_findings, |loaded| loaded.findings);
        errors.extend(others.into_iter().filter(|finding| finding.code().holds_in_partly_read_file()));
        errors.sort_by_key(|finding| finding.span().unwrap_or_default());
        Err(Report::new(name, errors))
    }

    /// Checks and compiles a configuration that was built in code.
    ///
    /// # Errors
    /// If the configuration has an error. The report has all findings, each with the name of its value in the message.
    pub(crate) fn compile(&self, config: ConfigTable) -> Result<Loaded, Report> {
        let (config, source) = config.with_names();
        compile::compile(config, source, self)
    }

    /// Returns the store that overrides the one of the file, or `None` if [`Loader::store`] was not called.
    pub(crate) fn store_override(&self) -> Option<&Secret> {
        self.store.as_ref()
    }

    /// Returns the names of the environment variables with the user and the password of the store.
    pub(crate) fn store_credentials(&self) -> Option<&(String, String)> {
        self.store_credentials.as_ref()
    }

    /// Returns whether the user and the password of the store must exist.
    pub(crate) fn checks_store_access(&self) -> bool {
        self.checks_store_access
    }

    /// Returns whether the files with the user, the password and the certificates of the store must exist.
    ///
    /// A reload does not depend on them, because the store reads them again at each connect.
    pub(crate) fn checks_store_files(&self) -> bool {
        self.checks_store_access && !self.is_reload
    }

    /// Checks an upstream with the function of [`check_upstreams`](Loader::check_upstreams), if there is one.
    pub(crate) fn check_upstream(&self, upstream: &UpstreamSettings) -> Result<(), String> {
        self.upstream_check.as_ref().map_or(Ok(()), |check| check(upstream))
    }

    /// Returns the number of instances that overrides the one of the file, or `None` if [`Loader::instances`] was not
    /// called.
    pub(crate) fn instances_override(&self) -> Option<u32> {
        self.instances
    }

    /// Returns the value of an environment variable, or `None` if it is not set.
    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        (self.environment)(name)
    }

    /// Reads a configuration file or a keys file. Returns its text, its format, and its metadata from before the read.
    ///
    /// # Errors
    /// If the extension of the name is unknown, or [`Loader::read_text`] fails. The finding has no span.
    pub(crate) fn read_file(&self, path: &Path) -> Result<(String, Format, Metadata), Box<Finding>> {
        let Some(format) = Format::of(path) else {
            let message = format!("{}: expected a file whose name ends in .toml, .yaml or .yml", path.display());
            return Err(Box::new(Finding::new(Code::UnknownFormat, message)));
        };
        self.read_text(path).map(|(text, metadata)| (text, format, metadata))
    }

    /// Reads the text of a file. Returns it with the file's metadata from before the read.
    ///
    /// # Errors
    /// If the file cannot be read, is too large or is not UTF-8; or, in a reload, if it is not a regular file. The
    /// finding has no span.
    pub(crate) fn read_text(&self, path: &Path) -> Result<(String, Metadata), Box<Finding>> {
        let fail = |what: String| {
            let message = format!("cannot read {}: {what}", path.display());
            Box::new(Finding::new(Code::FileUnreadable, message).help("check the file's name and permissions"))
        };
        // A pipe was emptied by the first read, and opening it again waits for a writer.
        if self.is_reload && std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(fail("it is not a regular file, so it cannot be read again".to_owned()));
        }
        let (bytes, metadata) = complete::read(path, complete::BYTES_MAX).map_err(|error| fail(__io_reason(&error)))?;
        let text = String::from_utf8(bytes).map_err(|_| fail("it is not UTF-8 text".to_owned()))?;
        Ok((text, metadata))
    }

    /// Returns the path of a file that the configuration names. A relative name is relative to the loader's directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}

/// Loads a configuration with the default settings of a [`Loader`].
///
/// The layer and the server use the same files.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Config;

impl Config {
    /// Reads, checks and compiles a configuration file: TOML or YAML, by the extension of its name.
    ///
    /// Also reads the keys file, the secret files and the environment variables that it names.
    ///
    /// # Errors
    /// If a file or variable cannot be read, or the configuration has an error. The report has all errors, with file,
    /// line and column where they have a place.
    pub fn load(path: impl AsRef<Path>) -> Result<Loaded, Report> {
        Loader::new().load(path)
    }

    /// Checks and compiles the text of a configuration. Reports name its file `configuration`.
    ///
    /// Reads the keys file, the secret files and the environment variables that the text names. Relative paths are
    /// relative to the current directory.
    ///
    /// # Errors
    /// If the configuration has an error, or a file or variable that it names cannot be read. The report has all
    /// errors, with line and column where they have a place.
    pub fn from_text(text: &str, format: Format) -> Result<Loaded, Report> {
        Loader::new().load_text("configuration", text, format)
    }

    /// Returns the JSON schema of a configuration file, with which editors can complete and check it.
    #[cfg(feature = "schema")]
    pub fn schema() -> tidegate_config::Schema {
        ConfigTable::schema()
    }
}
