//! From a file to a rule set.

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

/// The language of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Format {
    /// TOML, for files that end in `.toml`.
    Toml,
    /// YAML, for files that end in `.yaml` or `.yml`.
    Yaml,
}

impl Format {
    /// The format of a file by its name.
    pub fn of(path: &Path) -> Option<Format> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "toml" => Some(Format::Toml),
            "yaml" | "yml" => Some(Format::Yaml),
            _ => None,
        }
    }
}

/// A configuration that can be used.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The rules, to be swapped in whole.
    pub rules: RuleSet,
    /// What is set up once: the store and how it is asked.
    pub settings: Settings,
    /// What is odd about it: warnings and advice, in the order of the file.
    pub findings: Vec<Finding>,
    /// The configuration as it was written.
    pub(crate) config: Config,
    /// What differs from the configuration that it was loaded in place of, by [`Loader::reload`].
    pub changes: Changes,
    /// The files that were read, each with its metadata at that time.
    pub files: Vec<(PathBuf, Metadata)>,
    /// The files that the configuration names: keys and secrets.
    pub referenced_files: Vec<PathBuf>,
    /// The file's text, which the next one is compared with.
    pub(crate) text: Secret,
    pub(crate) keys_file: KeysFile,
    /// The secrets that were read from files, by the names of these.
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
            return "limits of the key's own";
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
    /// The engine that a configuration describes: its rules, on its store, asking for plans where it says.
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
    /// When the URL names no store, with what would be accepted; or for a shared store outside a tokio runtime.
    pub fn engine(self) -> Result<Engine, StoreUrlError> {
        let (limiter, lookups) = self.settings.limiter_on(self.settings.redis()?);
        Ok(Engine::with_lookups(limiter.build(), self.rules, lookups))
    }
}

/// Where environment variables come from.
type Environment = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Where a configuration is read from, and what surrounds it.
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
    /// Reads secrets from the process's environment, and the store from the file.
    pub fn new() -> Loader {
        Loader::default()
    }

    /// The store that is used whatever the file says: from the command line, say.
    #[must_use]
    pub fn store(self, url: impl Into<String>) -> Loader {
        Loader { store: Some(Secret::new(url)), ..self }
    }

    /// How many nodes there are, whatever the file says.
    #[must_use]
    pub fn instances(self, instances: u32) -> Loader {
        Loader { instances: Some(instances), ..self }
    }

    /// Where environment variables come from.
    #[must_use]
    pub fn environment(self, environment: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Loader {
        Loader { environment: Arc::new(environment), ..self }
    }

    /// Where relative file names begin, for texts that are in no file.
    #[must_use]
    pub fn directory(self, directory: impl Into<PathBuf>) -> Loader {
        Loader { directory: directory.into(), ..self }
    }

    /// Reads, checks and compiles a file.
    ///
    /// # Errors
    /// When it cannot be read or used. The report has everything that was found, each with its place.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Loaded, Report> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let (text, format, metadata) = self.read_file(path).map_err(|finding| Report::new(&name, vec![*finding]))?;
        let directory = path.parent().unwrap_or(Path::new("")).to_path_buf();
        let mut loaded = Loader { directory, ..self.clone() }.load_text(&name, &text, format)?;
        loaded.files.insert(0, (path.to_owned(), metadata));
        Ok(loaded)
    }

    /// Loads a file that takes the place of the configuration in force. [`Loaded::changes`] says what differs, and each
    /// kind of part that is gone is a warning among the findings.
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
    /// Fails like [`Loader::load`]; and if the file may be half a file: if it is empty, has no rules (or keys) any more and
    /// does not say `rules = []` (or `keys = []`), has lost its `expect`, or is no regular file.
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
        let compiled = compile::compile(config, source, text, self);
        if errors.is_empty() {
            return compiled;
        }
        // The values that were read are checked too, so that one attempt reports all errors.
        let others = compiled.map_or_else(Report::into_findings, |loaded| loaded.findings);
        errors.extend(others.into_iter().filter(|finding| finding.code().holds_without_the_rest()));
        errors.sort_by_key(|finding| finding.span().unwrap_or_default());
        Err(Report::new(name, errors))
    }

    /// Compiles a configuration that was built in code, whose spans are indices in `values`, the names of its values.
    pub(crate) fn compile_built(&self, config: Config, values: Vec<String>) -> Result<Loaded, Report> {
        compile::compile(config, Arc::new(Source::of_values("the rules", values)), "", self)
    }

    /// The store from outside the file.
    pub(crate) fn given_store(&self) -> Option<&Secret> {
        self.store.as_ref()
    }

    /// The number of nodes from outside the file.
    pub(crate) fn given_instances(&self) -> Option<u32> {
        self.instances
    }

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
            let message = format!("{} cannot be read: {what}", path.display());
            Box::new(Finding::new(Code::FileUnreadable, message).help("check the name, and who may read it"))
        };
        // A pipe was emptied by the first read, and opening it again waits for somebody who writes.
        if self.is_reload && std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(fail("it is no regular file, so it cannot be read again".to_owned()));
        }
        let (bytes, metadata) = file::read(path, file::BYTES_MAX).map_err(|error| fail(error.to_string()))?;
        let text = String::from_utf8(bytes).map_err(|_| fail("it is not UTF-8 text".to_owned()))?;
        Ok((text, metadata))
    }

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
    /// When it cannot be read or used. The report has everything that was found, each with its place.
    pub fn load(path: impl AsRef<Path>) -> Result<Loaded, Report> {
        Loader::new().load(path)
    }

    /// Checks and compiles a text.
    ///
    /// # Errors
    /// When it cannot be used. The report has everything that was found, each with its place.
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
