//! Loads configuration files.

use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::changes::Changes;
use super::compile::{self, KeysFile, Settings};
use super::file;
use super::finding::{Code, Finding, Report};
use super::forms::{AnonymizeEntry, Secret};
use super::mask::mask;
use super::read::{FromNode, Reader};
use super::source::Source;
use super::span::Spanned;
use super::toml;
use super::tree::SyntaxError;
use super::types::Config;
#[cfg(feature = "yaml")]
use super::yaml;
#[cfg(feature = "redis")]
use crate::engine::Engine;
use crate::identity::{Identity, Networks};
#[cfg(feature = "redis")]
use crate::limiter::StoreUrlError;
use crate::rules::{LimitSetId, RuleSet};

/// The format of a configuration file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Format {
    /// TOML, for files that end in `.toml`.
    Toml,
    /// YAML, for files that end in `.yaml` or `.yml`.
    Yaml,
}

impl Format {
    /// Returns the format of a file by the extension of its name, or `None` if the extension is unknown.
    pub fn of(path: &Path) -> Option<Format> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "toml" => Some(Format::Toml),
            "yaml" | "yml" => Some(Format::Yaml),
            _ => None,
        }
    }
}

/// A configuration that was loaded and can be used.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The compiled rules.
    pub rules: RuleSet,
    /// The settings of the store. A reload does not change them.
    pub settings: Settings,
    /// Warnings and advice, in the order of the file.
    pub findings: Vec<Finding>,
    /// The configuration as it was written.
    pub(crate) config: Config,
    /// The differences to the configuration that it replaces; empty unless it was loaded by [`Loader::reload`].
    pub changes: Changes,
    /// The files that were read, each with its metadata at that time.
    pub files: Vec<(PathBuf, Metadata)>,
    /// The files that the configuration names: keys and secrets.
    pub referenced_files: Vec<PathBuf>,
    pub(crate) keys_file: KeysFile,
    /// The secrets that were read from files, by the names of the files.
    pub(crate) secret_files: Vec<(String, Secret)>,
    pub(crate) source: Arc<Source>,
}

impl Loaded {
    /// Returns where the caller's plan comes from, such as `the API key`.
    ///
    /// `limit_set` is what [`RuleSet::limit_set`] returned for this caller.
    pub fn plan_source(&self, identity: &Identity<'_>, limit_set: LimitSetId) -> &'static str {
        let rules = &self.rules;
        let is_own = !rules.plans().iter().any(|plan| rules.limit_set_named(plan.name()) == Some(limit_set));
        if is_own {
            return "the API key's own limits";
        }
        let entry = identity.api_key().and_then(|(digest, _)| rules.key(&digest));
        if entry.is_some_and(|entry| entry.plan().is_some()) {
            return "the API key";
        }
        let sources = &self.config.plan_sources;
        let holds = |networks: &[Spanned<String>]| {
            let networks = Networks::parse(networks.iter().map(|text| text.as_str()));
            networks.is_ok_and(|networks| networks.contains(identity.address()))
        };
        if sources.addresses.iter().any(|entry| holds(&entry.networks)) {
            return "the address";
        }
        let header = sources.header.as_ref().and_then(|name| name.parse::<http::HeaderName>().ok());
        let value = header.and_then(|name| identity.trusted_header(&name));
        if value.and_then(|plan| rules.limit_set_named(std::str::from_utf8(plan).ok()?)).is_some() {
            return "the trusted proxy's header";
        }
        "the token's claim"
    }
}

#[cfg(feature = "redis")]
impl Loaded {
    /// Creates an engine with these rules, on the store of the settings, with the plan lookups of the settings.
    ///
    /// ```
    /// use tollgate::config::{Config, Format};
    ///
    /// let file = "store = 'memory'\n[[rules]]\nname = 'all'\nlimits = ['100/min']";
    /// let engine = Config::from_text(file, Format::Toml)?.engine()?;
    /// # drop(engine);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the URL of the store is invalid, or the store is shared and there is no tokio runtime.
    pub fn engine(self) -> Result<Engine, StoreUrlError> {
        let (limiter, lookups) = self.settings.limiter_on(self.settings.redis()?);
        Ok(Engine::with_lookups(limiter.build(), self.rules, lookups))
    }
}

/// A source of environment variables.
type Environment = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Loads configurations, with overrides of the file's settings.
///
/// ```no_run
/// use tollgate::config::Loader;
///
/// let loaded = Loader::new().store("redis://localhost").load("tollgate.toml")?;
/// # Ok::<(), tollgate::config::Report>(())
/// ```
#[derive(Clone)]
pub struct Loader {
    store: Option<Secret>,
    instances: Option<u32>,
    directory: PathBuf,
    environment: Arc<Environment>,
    is_reload: bool,
}

impl Default for Loader {
    fn default() -> Self {
        Loader {
            store: None,
            instances: None,
            directory: PathBuf::new(),
            environment: Arc::new(|name| std::env::var(name).ok().filter(|value| !value.is_empty())),
            is_reload: false,
        }
    }
}

impl Loader {
    /// Creates a loader that takes everything from the file, and environment variables from the process.
    pub fn new() -> Loader {
        Loader::default()
    }

    /// Sets the store, which overrides that of the file: `memory`, `redis://…` or `rediss://…`.
    #[must_use]
    pub fn store(self, url: impl Into<String>) -> Loader {
        Loader { store: Some(Secret::new(url)), ..self }
    }

    /// Sets the number of instances, which overrides that of the file.
    #[must_use]
    pub fn instances(self, instances: u32) -> Loader {
        Loader { instances: Some(instances), ..self }
    }

    /// Sets the source of environment variables. Defaults to those of the process, except empty ones.
    #[must_use]
    pub fn environment(self, environment: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Loader {
        Loader { environment: Arc::new(environment), ..self }
    }

    /// Sets the directory of relative file names in a text. A configuration file uses its own directory. Defaults to the current one.
    #[must_use]
    pub fn directory(self, directory: impl Into<PathBuf>) -> Loader {
        Loader { directory: directory.into(), ..self }
    }

    /// Reads, checks and compiles a file.
    ///
    /// # Errors
    /// If it cannot be read or used. The report has all findings, each with its place.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Loaded, Report> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let (text, format, metadata) = self.read_file(path).map_err(|finding| Report::new(&name, vec![*finding]))?;
        let directory = path.parent().unwrap_or(Path::new("")).to_path_buf();
        let mut loaded = Loader { directory, ..self.clone() }.load_text(&name, &text, format)?;
        loaded.files.insert(0, (path.to_owned(), metadata));
        Ok(loaded)
    }

    /// Loads a file that is to replace the configuration `running`.
    ///
    /// [`Loaded::changes`] has the differences, and there is a warning for each kind of part that is removed.
    ///
    /// ```no_run
    /// # use tollgate::config::{Loaded, Loader, Report};
    /// # use tollgate::engine::Engine;
    /// # fn example(engine: &Engine, running: &mut Loaded) -> Result<(), Report> {
    /// let loaded = Loader::new().reload("tollgate.toml", running)?;
    /// engine.reload(loaded.rules.clone());
    /// *running = loaded;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If [`Loader::load`] fails; or if the file may be truncated: it is empty, has lost all rules (or keys) without
    /// `rules = []` (or `keys = []`), or has lost its `expect`; or if it is not a regular file.
    pub fn reload(&self, path: impl AsRef<Path>, running: &Loaded) -> Result<Loaded, Report> {
        Loader { is_reload: true, ..self.clone() }.load(path)?.replacing(running)
    }

    /// Returns the files that a configuration file names: keys and secrets. Relative names are relative to the file.
    ///
    /// The configuration need not be valid otherwise. Returns an empty list if it cannot be read.
    pub fn referenced_files(&self, path: impl AsRef<Path>) -> Vec<PathBuf> {
        let path = path.as_ref();
        let Ok((text, format, _)) = self.read_file(path) else { return Vec::new() };
        let directory = path.parent().unwrap_or(Path::new(""));
        let (config, ..) = read::<Config>("", &text, format);
        config.iter().flat_map(Config::named_files).map(|name| directory.join(name)).collect()
    }

    /// Checks and compiles a text, which reports call `name`.
    ///
    /// # Errors
    /// If it cannot be used. The report has all findings, each with its place.
    pub fn load_text(&self, name: &str, text: &str, format: Format) -> Result<Loaded, Report> {
        let (config, source, mut errors) = read::<Config>(name, text, format);
        let Some(config) = config else { return Err(Report::new(name, errors)) };
        let compiled = compile::compile(config, source, self);
        if errors.is_empty() {
            return compiled;
        }
        // The values that were read are checked too, so that one attempt reports all errors.
        let others = compiled.map_or_else(Report::into_findings, |loaded| loaded.findings);
        errors.extend(others.into_iter().filter(|finding| finding.code().holds_without_the_rest()));
        errors.sort_by_key(|finding| finding.span().unwrap_or_default());
        Err(Report::new(name, errors))
    }

    /// Compiles a configuration that was built in code. The spans of its values are indices in `values`, their names.
    pub(crate) fn compile(&self, config: Config, values: Vec<String>) -> Result<Loaded, Report> {
        compile::compile(config, Arc::new(Source::of_values("the rules", values)), self)
    }

    /// Returns the store that overrides that of the file.
    pub(crate) fn given_store(&self) -> Option<&Secret> {
        self.store.as_ref()
    }

    /// Returns the number of instances that overrides that of the file.
    pub(crate) fn given_instances(&self) -> Option<u32> {
        self.instances
    }

    /// Returns an environment variable.
    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        (self.environment)(name)
    }

    /// Reads the text of a file and its format.
    pub(crate) fn read_file(&self, path: &Path) -> Result<(String, Format, Metadata), Box<Finding>> {
        let Some(format) = Format::of(path) else {
            let message = format!("{}: expected a file whose name ends in .toml, .yaml or .yml", path.display());
            return Err(Box::new(Finding::new(Code::UnknownFormat, message)));
        };
        self.read_text(path).map(|(text, metadata)| (text, format, metadata))
    }

    /// Reads the text of a file.
    pub(crate) fn read_text(&self, path: &Path) -> Result<(String, Metadata), Box<Finding>> {
        let fail = |what: String| {
            let message = format!("cannot read {}: {what}", path.display());
            Box::new(Finding::new(Code::FileUnreadable, message).help("check the name and the permissions of the file"))
        };
        // A pipe was emptied by the first read, and opening it again waits for a writer.
        if self.is_reload && std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(fail("it is not a regular file, so it cannot be read again".to_owned()));
        }
        let (bytes, metadata) = file::read(path, file::BYTES_MAX).map_err(|error| fail(error.to_string()))?;
        let text = String::from_utf8(bytes).map_err(|_| fail("it is not UTF-8 text".to_owned()))?;
        Ok((text, metadata))
    }

    /// Returns the path of a file that the configuration names.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}

impl Config {
    /// Returns the names of the files that this configuration refers to.
    pub(crate) fn named_files(&self) -> impl Iterator<Item = &str> {
        let jwt = self.jwt.as_ref().and_then(|jwt| jwt.key_file.as_ref());
        let secret = match &*self.anonymize {
            AnonymizeEntry::On(anonymize) => anonymize.secret_file.as_ref(),
            AnonymizeEntry::Off => None,
        };
        self.keys_file.iter().chain(jwt).chain(secret).map(|name| name.as_str())
    }

    /// Reads, checks and compiles a file: TOML or YAML by its name.
    ///
    /// # Errors
    /// If it cannot be read or used. The report has all findings, each with its place.
    pub fn load(path: impl AsRef<Path>) -> Result<Loaded, Report> {
        Loader::new().load(path)
    }

    /// Checks and compiles a text.
    ///
    /// # Errors
    /// If it cannot be used. The report has all findings, each with its place.
    pub fn from_text(text: &str, format: Format) -> Result<Loaded, Report> {
        Loader::new().load_text("configuration", text, format)
    }
}

/// Parses a text and reads a value from it, with all errors in the order of the file.
///
/// The value is absent if the text cannot be parsed, or not even a part of the value can be read.
pub(crate) fn read<T: FromNode>(name: &str, text: &str, format: Format) -> (Option<T>, Arc<Source>, Vec<Finding>) {
    let parsed = match format {
        Format::Toml => toml::parse(text),
        #[cfg(feature = "yaml")]
        Format::Yaml => yaml::parse(text),
        #[cfg(not(feature = "yaml"))]
        Format::Yaml => {
            let finding = Finding::new(Code::UnknownFormat, format!("{name}: this program is built without YAML"));
            let finding = finding.help("write it as TOML, or build with the feature `yaml`");
            return (None, Arc::new(Source::unquoted(name, text)), vec![finding]);
        }
    };
    let (value, source, mut errors) = match parsed {
        Ok(root) => {
            let mut reader = Reader::new(text);
            let value = T::from_node(&root, &mut reader);
            let (errors, shown) = reader.finish();
            (value, Source::masked(name, text, mask(text, &root, &shown)), errors)
        }
        Err(errors) => {
            let finding = |error: SyntaxError| Finding::new(Code::Syntax, error.message).at(error.span);
            (None, Source::unquoted(name, text), errors.into_iter().map(finding).collect())
        }
    };
    let source = Arc::new(source);
    errors = errors.into_iter().map(|finding| finding.located(&source)).collect();
    errors.sort_by_key(|finding| finding.span().unwrap_or_default());
    (value, source, errors)
}
