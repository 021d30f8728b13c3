//! Reloads the configuration and the certificate while the server runs.
//!
//! The trigger makes no difference: a changed file, a SIGHUP, or `POST /v1/reload`. The configuration file and all
//! files that it names are read once they have stopped changing. They are checked and compiled as a whole, and only
//! then are the rules replaced, in one step. A configuration that cannot be used changes nothing: the rules in force
//! stay, and the failure is reported in the log, on `/readyz` and as a metric until a later reload succeeds. The same
//! holds for a file that may be truncated (see `Loader::reload`). What a reload removes is named in a warning and
//! counted.
//!
//! Configuration and certificate are independent. A broken configuration does not keep a renewed certificate from being
//! used, which would end all connections when the old one expires; and half a pair of certificate and key does not keep
//! new rules from being used. If either fails, the reload counts as failed.
//!
//! Rules, plans, keys, exemptions and bans change with a reload. The store and how it is called are set up at the
//! start; a reload that finds them changed logs a warning.

mod watch;

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tollgate::config::{Finding, Loaded, Loader, Part, PartKind, Report, Settings, Severity};
use tollgate::engine::Engine;
use tollgate::{Clock, SystemClock, Timestamp};

use self::watch::Events;
pub(crate) use self::watch::{Stamps, stamp};
use crate::tls::{CertificateError, Tls};

/// The most parts that a response or a log line names.
const PARTS_MAX: usize = 100;
/// The kind under which removed certificates of a chain are counted.
const CERTIFICATE: &str = "certificate";

/// The configuration and the TLS certificate of a running server, which can be read again. Clones share their state.
#[derive(Clone)]
pub struct Reloader(Arc<Inner>);

struct Inner {
    rules: Option<RulesSource>,
    tls: Option<Tls>,
    clock: SystemClock,
    history: Mutex<ReloadHistory>,
    /// Held during a reload, so that there is one at a time.
    turn: tokio::sync::Mutex<()>,
    watch_ended: AtomicBool,
    /// The stamps of the files when they were last read.
    seen: Mutex<Stamps>,
    events: Arc<Events>,
    poll_every: Duration,
}

/// A configuration file, the configuration in force, and the engine that uses it.
struct RulesSource {
    file: PathBuf,
    loader: Loader,
    engine: Engine,
    loaded: ArcSwap<Loaded>,
    /// The files that a rejected configuration names. One of them may be the reason.
    rejected_files: Mutex<Vec<PathBuf>>,
}

/// The number and the results of the reloads since the start.
#[derive(Clone, Debug)]
pub(crate) struct ReloadHistory {
    pub(crate) succeeded: u64,
    pub(crate) failed: u64,
    /// The time of the last successful reload, or of the start.
    pub(crate) last_success: Timestamp,
    /// The number of parts that reloads have removed, by kind.
    pub(crate) removed: BTreeMap<&'static str, u64>,
    /// The time and the error of the last reload, if it failed.
    pub(crate) failure: Option<(Timestamp, Arc<ReloadError>)>,
}

/// The reason why a reload failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The configuration cannot be used. The old one stays in force; a new certificate is in use.
    #[error("{0}")]
    Configuration(Report),
    /// The certificate cannot be used. The old one stays in use; a new configuration is in force.
    #[error("{0}")]
    Tls(#[from] CertificateError),
    /// Neither the configuration nor the certificate can be used. Nothing has changed.
    #[error("{configuration}; {tls}")]
    ConfigurationAndTls {
        /// What is wrong with the configuration.
        configuration: Report,
        /// What is wrong with the certificate.
        tls: CertificateError,
    },
    /// The server was started with neither a configuration nor a certificate.
    #[error("nothing to reload: the server was started without --config and without --tls-cert")]
    Nothing,
    /// The reload panicked. Nothing has changed.
    #[error("the reload failed because of a defect in Tollgate; the old configuration stays in force")]
    Panicked,
}

impl Reloader {
    /// Creates a reloader without files. Its reloads fail with [`ReloadError::Nothing`].
    pub fn nothing() -> Reloader {
        Reloader::new(None, None)
    }

    /// Creates a reloader for a configuration file.
    ///
    /// `loaded` is the configuration that `loader` has loaded from `file`, and that `engine` uses. A reload loads the
    /// file again with `loader` and replaces the rules of `engine`.
    pub fn rules(file: &Path, loader: Loader, loaded: Loaded, engine: Engine) -> Reloader {
        let seen = stamps_of(&loaded.files);
        let (file, loaded) = (file.to_owned(), ArcSwap::from_pointee(loaded));
        let reloader =
            Reloader::new(Some(RulesSource { file, loader, engine, loaded, rejected_files: Mutex::default() }), None);
        reloader.0.seen.lock().extend(seen);
        reloader
    }

    /// Adds a certificate, which is read again by each reload. Has no effect while clones of this reloader exist.
    #[must_use]
    pub fn tls(self, tls: Tls) -> Reloader {
        self.0.seen.lock().extend(tls.stamps());
        self.with(|inner| Inner { tls: Some(tls), ..inner })
    }

    /// Sets the interval at which [`watch`](Self::watch) checks the files without an event. Defaults to 2 s.
    ///
    /// Network file systems report no events. Has no effect while clones of this reloader exist.
    #[must_use]
    pub fn poll_every(self, interval: Duration) -> Reloader {
        self.with(|inner| Inner { poll_every: interval, ..inner })
    }

    /// Applies `change` to the state. Returns the reloader unchanged if clones of it exist.
    fn with(self, change: impl FnOnce(Inner) -> Inner) -> Reloader {
        match Arc::try_unwrap(self.0) {
            Ok(inner) => Reloader(Arc::new(change(inner))),
            Err(shared) => Reloader(shared),
        }
    }

    fn new(rules: Option<RulesSource>, tls: Option<Tls>) -> Reloader {
        let clock = SystemClock::new();
        let kinds = PartKind::ALL.map(PartKind::as_str).into_iter().chain([CERTIFICATE]);
        let history = ReloadHistory {
            succeeded: 0,
            failed: 0,
            last_success: clock.now(),
            removed: kinds.map(|kind| (kind, 0)).collect(),
            failure: None,
        };
        Reloader(Arc::new(Inner {
            rules,
            tls,
            clock,
            history: Mutex::new(history),
            turn: Default::default(),
            watch_ended: AtomicBool::new(false),
            seen: Mutex::default(),
            events: Arc::default(),
            poll_every: watch::POLL_EVERY,
        }))
    }

    /// Reads the configuration and the certificate again, and uses each of them that is valid.
    ///
    /// Returns the new configuration, or an empty one if this reloader has none.
    ///
    /// Waits first until the files were unchanged for 100 ms, for five seconds at most. Reloads run one at a time. A
    /// reload that was started is completed even if the future is dropped. The result is logged and counted, except
    /// [`ReloadError::Nothing`], and the findings are logged. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// If the configuration, the certificate or both cannot be used; a valid one is in use all the same. Also if there
    /// is nothing to reload, or the reload panics.
    pub async fn reload(&self) -> Result<Arc<Loaded>, Arc<ReloadError>> {
        let reloading = tokio::spawn(self.0.clone().reload());
        let outcome = reloading.await.unwrap_or_else(|_| Err(Arc::new(ReloadError::Panicked)));
        outcome.map(|loaded| loaded.unwrap_or_else(|| Arc::new(empty())))
    }

    /// Returns a future that reloads whenever one of the files changes.
    ///
    /// Without files, it completes at once, else never.
    ///
    /// Changes are noticed from this call on, even before the future is polled. If the future is dropped after its
    /// first poll, `/readyz` reports that the file watch has ended.
    pub fn watch(self) -> impl Future<Output = ()> + Send + 'static {
        watch::watch(self)
    }

    /// Returns the configuration in force, or `None` if this reloader has none.
    pub(crate) fn loaded(&self) -> Option<Arc<Loaded>> {
        self.0.rules.as_ref().map(|rules| rules.loaded.load_full())
    }

    /// Returns the engine that uses the configuration, or `None` if this reloader has none.
    pub(crate) fn engine(&self) -> Option<&Engine> {
        self.0.rules.as_ref().map(|rules| &rules.engine)
    }

    /// Returns whether a task has watched the files and has ended. False if none was started.
    pub(crate) fn watch_ended(&self) -> bool {
        self.0.watch_ended.load(Ordering::Relaxed)
    }

    /// Returns a copy of the results of the reloads so far.
    pub(crate) fn history(&self) -> ReloadHistory {
        self.0.history.lock().clone()
    }
}

fn stamps_of(files: &[(PathBuf, Metadata)]) -> Stamps {
    files.iter().map(|(file, metadata)| (file.clone(), watch::stamp(metadata))).collect()
}

impl RulesSource {
    /// Loads and checks the file, without replacing the rules in force.
    ///
    /// If it is rejected, records the files that it names, so that they are watched; otherwise forgets those of an
    /// earlier rejection.
    fn load(&self) -> Result<Loaded, Report> {
        let loaded = self.loader.reload(&self.file, &self.loaded.load());
        let rejected_files = match &loaded {
            Ok(_) => Vec::new(),
            // A pipe is not opened, because that would wait for a writer.
            Err(_) if self.file.is_file() => self.loader.referenced_files(&self.file),
            Err(_) => Vec::new(),
        };
        *self.rejected_files.lock() = rejected_files;
        loaded
    }

    /// Replaces the rules in force. Logs a warning for each changed setting that takes effect only at the next start.
    fn apply(&self, loaded: &Arc<Loaded>) {
        for setting in changed_settings(&self.loaded.load().settings, &loaded.settings) {
            tracing::warn!(setting, "this setting has changed; it takes effect at the next start");
        }
        self.engine.reload(loaded.rules.clone());
        self.loaded.store(loaded.clone());
    }
}

fn empty() -> Loaded {
    tollgate::Rules::new().compile().expect("a configuration without rules is valid")
}

/// The result of a reload: the new configuration, if there is one.
type ReloadResult = Result<Option<Arc<Loaded>>, Arc<ReloadError>>;

/// The results of reloading the configuration and the certificate. `None` for the one that the server does not have.
struct BothParts {
    rules: Option<Result<Arc<Loaded>, Report>>,
    /// By how many certificates the chain is shorter than before.
    tls: Option<Result<usize, CertificateError>>,
}

impl BothParts {
    fn into_result(self) -> Result<Option<Arc<Loaded>>, ReloadError> {
        let (loaded, tls) = (self.rules.transpose(), self.tls.transpose());
        match (loaded, tls) {
            (Ok(loaded), Ok(_)) => Ok(loaded),
            (Err(report), Ok(_)) => Err(ReloadError::Configuration(report)),
            (Ok(_), Err(error)) => Err(ReloadError::Tls(error)),
            (Err(configuration), Err(tls)) => Err(ReloadError::ConfigurationAndTls { configuration, tls }),
        }
    }
}

impl Inner {
    async fn reload(self: Arc<Self>) -> ReloadResult {
        let _turn = self.turn.lock().await;
        self.reload_in_turn().await
    }

    /// Reloads if a file has changed since it was last read. Returns `None` if none has.
    ///
    /// If the future is dropped while the files are read, they are still put into use, but the result is neither
    /// counted nor logged.
    async fn reload_if_changed(self: Arc<Self>) -> Option<ReloadResult> {
        let _turn = self.turn.lock().await;
        match self.is_unchanged().await {
            true => None,
            false => Some(self.reload_in_turn().await),
        }
    }

    async fn reload_in_turn(self: &Arc<Self>) -> ReloadResult {
        let mut seen = self.wait_until_stable().await;
        let inner = self.clone();
        // Files are read on a thread where waiting for a disk delays no connection.
        let read = tokio::task::spawn_blocking(move || inner.read()).await;
        let result = match read.unwrap_or(Err(ReloadError::Panicked)) {
            Ok(parts) => {
                seen.extend(parts.rules.iter().flatten().flat_map(|loaded| stamps_of(&loaded.files)));
                seen.extend(self.tls.iter().filter(|_| matches!(parts.tls, Some(Ok(_)))).flat_map(Tls::stamps));
                self.record_parts(&parts);
                parts.into_result()
            }
            Err(error) => Err(error),
        };
        let result = result.map_err(Arc::new);
        if result.is_err() {
            // A file that is named for the first time and is missing has not changed until it exists.
            for (file, stamp) in self.stamps().await.into_iter().filter(|(_, stamp)| stamp.is_none()) {
                seen.entry(file).or_insert(stamp);
            }
        }
        *self.seen.lock() = seen;
        self.record_result(&result);
        result
    }

    /// Returns the paths of the files of the configuration in force, of a rejected one, and of the certificate. A path
    /// may occur twice.
    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = Vec::new();
        if let Some(rules) = &self.rules {
            files.push(rules.file.clone());
            files.extend_from_slice(&rules.loaded.load().referenced_files);
            files.extend_from_slice(&rules.rejected_files.lock());
        }
        files.extend(self.tls.iter().flat_map(Tls::files).map(Path::to_owned));
        files
    }

    /// Reads the configuration and the certificate, and uses each that is valid. Blocks.
    ///
    /// # Errors
    /// [`ReloadError::Nothing`] if there is neither. Invalid files are reported in the result.
    fn read(&self) -> Result<BothParts, ReloadError> {
        if self.rules.is_none() && self.tls.is_none() {
            return Err(ReloadError::Nothing);
        }
        let tls = self.tls.as_ref().map(Tls::read_again);
        let rules = self.rules.as_ref().map(|rules| {
            let loaded = Arc::new(rules.load()?);
            rules.apply(&loaded);
            Ok(loaded)
        });
        Ok(BothParts { rules, tls })
    }

    /// Counts the parts of the configuration and the certificates of the chain that a reload has removed, and logs the
    /// findings about the new configuration as warnings. Ignores a part that was rejected.
    fn record_parts(&self, parts: &BothParts) {
        let mut history = self.history.lock();
        if let Some(Ok(removed)) = &parts.tls {
            *history.removed.entry(CERTIFICATE).or_default() += *removed as u64;
        }
        if let Some(Ok(loaded)) = &parts.rules {
            for finding in &loaded.findings {
                tracing::warn!(code = finding.code().as_str(), "{}", finding.message());
            }
            for part in &loaded.changes.removed {
                *history.removed.entry(part.kind.as_str()).or_default() += 1;
            }
        }
    }

    /// Counts and logs the result of a reload, and remembers its failure until one succeeds.
    ///
    /// Ignores [`ReloadError::Nothing`].
    fn record_result(&self, result: &ReloadResult) {
        let now = self.clock.now();
        let mut history = self.history.lock();
        match result {
            Ok(loaded) => {
                history.succeeded += 1;
                history.last_success = now;
                history.failure = None;
                let changed = loaded.as_ref().map(|loaded| names(&loaded.changes.changed)).unwrap_or_default();
                tracing::info!(changed, "the configuration was read again");
            }
            Err(error) if matches!(**error, ReloadError::Nothing) => {}
            Err(error) => {
                history.failed += 1;
                history.failure = Some((now, error.clone()));
                let reason = error.first_error();
                tracing::error!(%error, reason, "{}", error.consequence());
            }
        }
    }
}

impl ReloadError {
    fn report(&self) -> Option<&Report> {
        match self {
            ReloadError::Configuration(configuration) | ReloadError::ConfigurationAndTls { configuration, .. } => {
                Some(configuration)
            }
            ReloadError::Tls(_) | ReloadError::Nothing | ReloadError::Panicked => None,
        }
    }

    /// Returns the first error in one line, for the log. Contains no secret.
    fn first_error(&self) -> String {
        match self.report() {
            Some(report) => report.findings().first().map(|finding| format!("{finding:?}")).unwrap_or_default(),
            None => self.to_string(),
        }
    }

    /// Returns a sentence for the log: which rules and which certificate the server uses after this failure.
    fn consequence(&self) -> &'static str {
        match self {
            ReloadError::Configuration(_) => "the configuration is broken; the old rules stay in force",
            ReloadError::Tls(_) => "the certificate cannot be used; the old one stays in use",
            ReloadError::ConfigurationAndTls { .. } | ReloadError::Nothing | ReloadError::Panicked => {
                "the reload failed; the old rules stay in force, and the old certificate stays in use"
            }
        }
    }

    /// Returns the error as JSON, for responses of the admin listener: `message`, and a list of `findings`.
    pub(crate) fn to_json(&self) -> Value {
        let findings = self.report().map_or_else(|| json!([]), |report| findings_json(report.findings()));
        json!({ "message": self.to_string(), "findings": findings })
    }
}

/// Returns the first 100 parts of a configuration as JSON, each with `kind` and `name`.
pub(crate) fn parts_json(parts: &[Part]) -> Value {
    parts.iter().take(PARTS_MAX).map(|part| json!({ "kind": part.kind.as_str(), "name": part.name })).collect()
}

/// Returns the kinds and names of the first 100 parts in one line, such as `rule login, setting deadline`.
fn names(parts: &[Part]) -> String {
    let names: Vec<String> =
        parts.iter().take(PARTS_MAX).map(|part| format!("{} {}", part.kind.as_str(), part.name)).collect();
    names.join(", ")
}

/// Returns findings as a JSON list of objects with `severity`, `code`, `message`, `help`, `file`, `line` and `column`.
///
/// The last three are null if the place is unknown.
pub fn findings_json(findings: &[Finding]) -> Value {
    let to_json = |finding: &Finding| {
        let place = finding.place();
        json!({
            "severity": match finding.severity() {
                Severity::Error => "error",
                Severity::Warning => "warning",
                _ => "advice",
            },
            "code": finding.code().as_str(),
            "message": finding.message(),
            "help": finding.help_text(),
            "file": place.map(|(file, ..)| file),
            "line": place.map(|(_, line, _)| line),
            "column": place.map(|(.., column)| column),
        })
    };
    findings.iter().map(to_json).collect()
}

/// Returns the names of the settings that differ and that take effect only at the next start.
fn changed_settings(before: &Settings, after: &Settings) -> impl Iterator<Item = &'static str> {
    let changes = [
        ("store", before.store != after.store),
        ("prefix", before.prefix != after.prefix),
        ("instances", before.instances != after.instances),
        ("deadline", before.deadline != after.deadline),
        ("plan_sources.redis_hash", before.plan_hash != after.plan_hash),
        ("key_sources.redis_hash", before.key_hash != after.key_hash),
    ];
    changes.into_iter().filter(|(_, has_changed)| *has_changed).map(|(name, _)| name)
}

impl std::fmt::Debug for Reloader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let file = self.0.rules.as_ref().map(|rules| &rules.file);
        f.debug_struct("Reloader").field("file", &file).finish_non_exhaustive()
    }
}
