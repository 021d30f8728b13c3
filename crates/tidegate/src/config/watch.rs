//! Configuration files that are read again, and the rules of an engine that they replace.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
#[doc(hidden)] // for the server
pub use tidegate_config::watch::{FileSource, FileWatch, Stamp, Stamps, stamp};

use super::{Loaded, Loader, Part, Report};
use crate::engine::{Companion, Engine};

/// The maximum number of parts that a log line names.
const PARTS_MAX: usize = 100;

/// A configuration file that can be read again, its configuration in force, and the engine that uses it.
#[doc(hidden)] // for the server
pub struct RulesSource {
    file: PathBuf,
    loader: Loader,
    engine: Engine,
    loaded: ArcSwap<Loaded>,
    /// The files that a configuration names which is not in use. One of them may be the reason.
    rejected_files: Mutex<Vec<PathBuf>>,
}

impl RulesSource {
    /// Creates a source for the configuration file `file`. Reads nothing.
    ///
    /// `loaded` must be the configuration that `loader` has loaded from `file`, and `engine` must use its rules.
    pub fn new(file: &Path, loader: Loader, loaded: Loaded, engine: Engine) -> RulesSource {
        let loaded = ArcSwap::from_pointee(loaded);
        RulesSource { file: file.to_owned(), loader, engine, loaded, rejected_files: Mutex::default() }
    }

    /// Returns the path of the configuration file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the engine that uses the configuration.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the configuration in force.
    pub fn loaded(&self) -> Arc<Loaded> {
        self.loaded.load_full()
    }

    /// Returns the paths of the files of the configuration in force, and of those that a rejected one names. A path may
    /// occur twice.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut files = vec![self.file.clone()];
        files.extend_from_slice(&self.loaded.load().referenced_files);
        files.extend_from_slice(&self.rejected_files.lock());
        files
    }

    /// Returns the stamps that the files of the configuration in force had when they were read.
    pub fn stamps(&self) -> Stamps {
        self.loaded.load().files.iter().map(|(file, metadata)| (file.clone(), stamp(metadata))).collect()
    }

    /// Loads and checks the file. Changes nothing. Blocks while it reads files.
    ///
    /// # Errors
    /// Returns the report of [`Loader::reload`].
    pub fn prepare(&self) -> Result<Loaded, Report> {
        let loaded = self.loader.reload(&self.file, &self.loaded.load());
        *self.rejected_files.lock() = match &loaded {
            // Until it is put into use.
            Ok(loaded) => loaded.referenced_files.clone(),
            // A pipe is not opened, because that would wait for a writer.
            Err(_) if self.file.is_file() => self.loader.referenced_files(&self.file),
            Err(_) => Vec::new(),
        };
        loaded
    }

    /// Puts a configuration of [`prepare`](RulesSource::prepare) into use: replaces the rules of the engine and, if
    /// there is a `companion`, their companion.
    ///
    /// Logs findings, and changed settings that take effect only after a restart, as warnings.
    pub fn commit(&self, loaded: Loaded, companion: Option<Companion>) -> Arc<Loaded> {
        let loaded = Arc::new(loaded);
        for setting in &loaded.changes.restart {
            tracing::warn!(setting, "this setting has changed; it takes effect after a restart");
        }
        for finding in &loaded.findings {
            tracing::warn!(code = finding.code().as_str(), "{}", finding.message());
        }
        match companion {
            Some(companion) => self.engine.reload_with(loaded.rules.clone(), companion),
            None => self.engine.reload(loaded.rules.clone()),
        }
        self.loaded.store(loaded.clone());
        self.rejected_files.lock().clear();
        loaded
    }

    /// Logs that the configuration was read, and which of its parts have changed: the first 100, or none without
    /// `loaded`.
    pub fn log_success(loaded: Option<&Loaded>) {
        let changed = loaded.map(|loaded| names(&loaded.changes.changed)).unwrap_or_default();
        tracing::info!(changed, "the configuration was reloaded");
    }
}

/// Returns the kinds and names of the first 100 parts in one line, such as `rule login, setting deadline`.
fn names(parts: &[Part]) -> String {
    let names: Vec<String> =
        parts.iter().take(PARTS_MAX).map(|part| format!("{} {}", part.kind.as_str(), part.name)).collect();
    names.join(", ")
}

/// Watches a configuration file, and replaces the rules of an engine when the file changes.
///
/// ```no_run
/// use axum::Router;
/// use tidegate::config::RulesWatcher;
/// use tidegate::{Engine, Limiter, Loader, RateLimitLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let loaded = Loader::new().load("tidegate.toml")?;
/// let engine = Engine::new(Limiter::memory(), loaded.rules.clone());
/// let app: Router = Router::new().layer(RateLimitLayer::axum(engine.clone()));
///
/// tokio::spawn(RulesWatcher::new("tidegate.toml", Loader::new(), loaded, engine).watch());
/// # drop(app);
/// # Ok(())
/// # }
/// ```
///
/// The files that the configuration names (keys, secrets) are watched as well. Editors that rename a new file over the
/// old one, ConfigMap volumes of Kubernetes, and files that are missing for a moment are supported. A file is read when
/// it has been unchanged for 100 ms, or after five seconds.
///
/// A file that cannot be used, or that may be truncated (see [`Loader::reload`]), changes nothing: the rules in force
/// stay. The error is logged and passed to [`on_reload`](RulesWatcher::on_reload), once for each content of the files.
///
/// The files are checked every two seconds. With the feature `notify`, on Unix, they are also checked when the
/// operating system reports a change.
///
/// A reload replaces rules, plans, keys, exemptions and bans. The store and how it is called are set up at the start:
/// if one of these settings has changed, a warning is logged.
#[must_use = "the file is watched by the future that `watch` returns"]
pub struct RulesWatcher(FileWatch<Observed>);

/// A function that is called with the result of each reload.
type OnReload = Box<dyn Fn(Result<&Loaded, &Report>) + Send + Sync>;

/// A [`RulesSource`] whose reloads are logged and passed to the functions of the application.
struct Observed {
    rules: RulesSource,
    on_reload: Vec<OnReload>,
}

/// The reason why the rules were not replaced.
#[derive(Debug)]
enum RejectedRules {
    Invalid(Report),
    Panicked,
}

impl RulesWatcher {
    /// Creates a watcher for the configuration file `file`. [`watch`](RulesWatcher::watch) starts it.
    ///
    /// `loaded` must be the configuration that `loader` has loaded from `file`, and `engine` must use its rules.
    pub fn new(file: impl AsRef<Path>, loader: Loader, loaded: Loaded, engine: Engine) -> RulesWatcher {
        let rules = RulesSource::new(file.as_ref(), loader, loaded, engine);
        RulesWatcher(FileWatch::new(Observed { rules, on_reload: Vec::new() }))
    }

    /// Adds a function that is called after each reload: with the new configuration, whose rules are in force, or with
    /// the report about a file that was rejected.
    ///
    /// ```no_run
    /// # use tidegate::config::{Loaded, RulesWatcher};
    /// # use tidegate::{Engine, Loader};
    /// # fn example(loaded: Loaded, engine: Engine) {
    /// let watcher = RulesWatcher::new("tidegate.toml", Loader::new(), loaded, engine).on_reload(|result| match result {
    ///     Ok(loaded) => println!("{} parts have changed", loaded.changes.changed.len()),
    ///     Err(report) => eprintln!("{report:?}"), // with the place of each error
    /// });
    /// tokio::spawn(watcher.watch());
    /// # }
    /// ```
    ///
    /// Several functions are called in the order in which they were added. They are called by the task that polls
    /// [`watch`](RulesWatcher::watch) and must not block. A panic is caught and logged. A broken file is reported once
    /// for each content. Results are logged in any case.
    pub fn on_reload(self, on_reload: impl Fn(Result<&Loaded, &Report>) + Send + Sync + 'static) -> RulesWatcher {
        RulesWatcher(self.0.map(|mut observed| {
            observed.on_reload.push(Box::new(on_reload));
            observed
        }))
    }

    /// Sets the interval at which the files are checked. Defaults to 2 s. At least 100 ms pass between two checks.
    pub fn poll_every(self, interval: Duration) -> RulesWatcher {
        RulesWatcher(self.0.poll_every(interval))
    }

    /// Returns a future that reloads the rules whenever a file changes, and never completes.
    ///
    /// Changes since the configuration was loaded are noticed as well. Dropping the future ends the watch. If it is
    /// dropped during a reload, the rules may still be replaced, but the result is not reported.
    ///
    /// # Panics
    /// The future panics if it is polled outside a tokio runtime with a timer.
    pub fn watch(self) -> impl Future<Output = ()> + Send + 'static {
        self.0.watch()
    }
}

impl FileSource for Observed {
    type Loaded = Arc<Loaded>;
    type Error = RejectedRules;

    fn files(&self) -> Vec<PathBuf> {
        self.rules.files()
    }

    fn stamps(&self) -> Stamps {
        self.rules.stamps()
    }

    fn read(&self) -> (Result<Arc<Loaded>, RejectedRules>, Stamps) {
        match self.rules.prepare() {
            Ok(loaded) => (Ok(self.rules.commit(loaded, None)), self.rules.stamps()),
            Err(report) => (Err(RejectedRules::Invalid(report)), Stamps::new()),
        }
    }

    fn panicked() -> RejectedRules {
        RejectedRules::Panicked
    }

    fn report(&self, result: &Result<Arc<Loaded>, RejectedRules>) {
        let result = match result {
            Ok(loaded) => {
                RulesSource::log_success(Some(loaded));
                Ok(&**loaded)
            }
            Err(RejectedRules::Invalid(report)) => {
                tracing::error!(error = %report, "the configuration is invalid; the old rules stay in force");
                Err(report)
            }
            Err(RejectedRules::Panicked) => {
                tracing::error!("the reload failed because of a bug in Tidegate; the old rules stay in force");
                return;
            }
        };
        for on_reload in &self.on_reload {
            // A panic must not end the watch.
            if catch_unwind(AssertUnwindSafe(|| on_reload(result))).is_err() {
                tracing::error!("a function that was passed to `RulesWatcher::on_reload` panicked");
            }
        }
    }
}

impl std::fmt::Debug for RulesWatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RulesWatcher").field("file", &self.0.source().rules.file).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(all(feature = "notify", unix))]
mod tests;
