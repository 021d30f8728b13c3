//! Reading the configuration again while the doors are open.
//!
//! Whoever asks (the file itself by changing, a SIGHUP, `POST /v1/reload`), the same happens: the file and all files that it
//! names are read once they have stood still, checked and compiled as a whole, and only then are the rules swapped, in one
//! step. A file that cannot be used changes nothing; the rules in force stay, and the failure is reported in the log, on
//! `/readyz` and as a metric, until a later reload succeeds. The same holds for one that may be half a file (see
//! `Loader::reload`). What a reload removes is named in a warning and counted.
//!
//! Rules, plans, keys, exemptions and bans change with a reload, and so does the certificate of the doors. The store
//! and how it is asked are set up once; a reload that finds them changed says so.

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

use self::watch::{Events, Stamps};
use crate::tls::{Tls, TlsError};

/// Answers and log lines name so many parts at most.
const PARTS_MAX: usize = 100;
/// The kind under which certificates are counted that are gone from the chain.
const CERTIFICATE: &str = "certificate";

/// Everything that can be read again. Cloning it is cheap, and clones share everything.
#[derive(Clone)]
pub struct Reloader(Arc<Inner>);

struct Inner {
    rules: Option<Rules>,
    tls: Option<Tls>,
    clock: SystemClock,
    history: Mutex<History>,
    /// One at a time, in the order asked.
    turn: tokio::sync::Mutex<()>,
    watch_ended: AtomicBool,
    /// The files as they were when they were last read.
    seen: Mutex<Stamps>,
    events: Arc<Events>,
    poll_every: Duration,
}

/// A configuration file, and the engine that goes by it.
struct Rules {
    file: PathBuf,
    loader: Loader,
    engine: Engine,
    loaded: ArcSwap<Loaded>,
    /// The files that a configuration names which could not be used: one of them may be why.
    wanted: Mutex<Vec<PathBuf>>,
}

/// What came of reloads so far.
#[derive(Clone, Debug)]
pub(crate) struct History {
    pub(crate) succeeded: u64,
    pub(crate) failed: u64,
    /// When what is in force was read.
    pub(crate) last_success: Timestamp,
    /// How many parts of each kind reloads have removed.
    pub(crate) removed: BTreeMap<&'static str, u64>,
    /// The last one, if it failed.
    pub(crate) failure: Option<(Timestamp, Arc<ReloadError>)>,
}

/// Why a reload changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The configuration cannot be used.
    #[error("{0}")]
    Configuration(Report),
    /// The certificate cannot be used.
    #[error("{0}")]
    Tls(#[from] TlsError),
    /// There is no file to read.
    #[error("there is nothing to read again: no configuration and no certificate was given at the start")]
    Nothing,
    /// Reading panicked.
    #[error("reading the configuration failed for a reason of our own, which is a defect; what was in force stays")]
    Panicked,
}

impl Reloader {
    /// With nothing to read again.
    pub fn nothing() -> Reloader {
        Reloader::new(None, None)
    }

    /// For a configuration that was `loaded` from `file` by `loader`, and that `engine` goes by.
    pub fn rules(file: &Path, loader: Loader, loaded: Loaded, engine: Engine) -> Reloader {
        let seen = stamps_of(&loaded.files);
        let (file, loaded) = (file.to_owned(), ArcSwap::from_pointee(loaded));
        let reloader = Reloader::new(Some(Rules { file, loader, engine, loaded, wanted: Mutex::default() }), None);
        reloader.0.seen.lock().extend(seen);
        reloader
    }

    /// The same, with the certificate of the doors.
    #[must_use]
    pub fn tls(self, tls: Tls) -> Reloader {
        self.0.seen.lock().extend(stamps_of(&tls.files_read()));
        self.with(|inner| Inner { tls: Some(tls), ..inner })
    }

    /// Sets how often files are looked at where the system reports no events (network file systems). Defaults to 2 s.
    #[must_use]
    pub fn poll_every(self, interval: Duration) -> Reloader {
        self.with(|inner| Inner { poll_every: interval, ..inner })
    }

    fn with(self, change: impl FnOnce(Inner) -> Inner) -> Reloader {
        match Arc::try_unwrap(self.0) {
            Ok(inner) => Reloader(Arc::new(change(inner))),
            Err(shared) => Reloader(shared),
        }
    }

    fn new(rules: Option<Rules>, tls: Option<Tls>) -> Reloader {
        let clock = SystemClock::new();
        let kinds = PartKind::ALL.map(PartKind::as_str).into_iter().chain([CERTIFICATE]);
        let history = History {
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

    /// Reads everything again. What was found odd about the configuration is logged and returned.
    ///
    /// Whoever asked may leave: what was begun is finished, counted and told all the same.
    ///
    /// # Errors
    /// When something cannot be used. Nothing has then changed.
    pub async fn reload(&self) -> Result<Arc<Loaded>, Arc<ReloadError>> {
        let reloading = tokio::spawn(self.0.clone().reload());
        let outcome = reloading.await.unwrap_or_else(|_| Err(Arc::new(ReloadError::Panicked)));
        outcome.map(|loaded| loaded.unwrap_or_else(|| Arc::new(empty())))
    }

    /// Reads again whenever one of the files changes, until the process ends. Changes are noticed from this call on, even if
    /// what it returns is not polled yet.
    pub fn watch(self) -> impl Future<Output = ()> + Send + 'static {
        watch::watch(self)
    }

    /// The configuration in force, if there is one.
    pub(crate) fn loaded(&self) -> Option<Arc<Loaded>> {
        self.0.rules.as_ref().map(|rules| rules.loaded.load_full())
    }

    /// The engine that goes by it.
    pub(crate) fn engine(&self) -> Option<&Engine> {
        self.0.rules.as_ref().map(|rules| &rules.engine)
    }

    /// Whether the files were watched and are not any more.
    pub(crate) fn watch_ended(&self) -> bool {
        self.0.watch_ended.load(Ordering::Relaxed)
    }

    pub(crate) fn history(&self) -> History {
        self.0.history.lock().clone()
    }
}

fn stamps_of(files: &[(PathBuf, Metadata)]) -> Stamps {
    files.iter().map(|(file, metadata)| (file.clone(), watch::stamp(metadata))).collect()
}

impl Rules {
    fn load(&self) -> Result<Loaded, ReloadError> {
        let loaded = self.loader.reload(&self.file, &self.loaded.load());
        let wanted = match &loaded {
            Ok(_) => Vec::new(),
            // One that cannot even be read has to change itself. A pipe is not opened: nobody may ever write to it.
            Err(_) if self.file.is_file() => self.loader.referenced_files(&self.file),
            Err(_) => Vec::new(),
        };
        *self.wanted.lock() = wanted;
        loaded.map_err(ReloadError::Configuration)
    }
}

fn empty() -> Loaded {
    tollgate::Rules::new().compile().expect("no rules are a valid configuration")
}

/// What came of a reload: the configuration, if there is one.
type Outcome = Result<Option<Arc<Loaded>>, Arc<ReloadError>>;

impl Inner {
    async fn reload(self: Arc<Self>) -> Outcome {
        let _turn = self.turn.lock().await;
        self.reload_in_turn().await
    }

    /// Reloads if the files differ from those that were last read; else returns `None`.
    async fn reload_if_changed(self: Arc<Self>) -> Option<Outcome> {
        let _turn = self.turn.lock().await;
        match self.is_unchanged().await {
            true => None,
            false => Some(self.reload_in_turn().await),
        }
    }

    async fn reload_in_turn(self: &Arc<Self>) -> Outcome {
        let mut seen = self.settle().await;
        let inner = self.clone();
        // Files are read where waiting for a disk keeps nobody waiting.
        let read = tokio::task::spawn_blocking(move || inner.read()).await;
        let outcome = read.unwrap_or(Err(ReloadError::Panicked)).map_err(Arc::new);
        if outcome.is_err() {
            // A file that is named for the first time and missing is known to be.
            for (file, stamp) in self.stamps().await.into_iter().filter(|(_, stamp)| stamp.is_none()) {
                seen.entry(file).or_insert(stamp);
            }
        }
        if let Ok(loaded) = &outcome {
            seen.extend(loaded.iter().flat_map(|loaded| stamps_of(&loaded.files)));
            seen.extend(self.tls.iter().flat_map(|tls| stamps_of(&tls.files_read())));
        }
        *self.seen.lock() = seen;
        self.remember(&outcome);
        outcome
    }

    /// All files that what is in force was read from, and those that something which could not be used would be read from.
    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = Vec::new();
        if let Some(rules) = &self.rules {
            files.push(rules.file.clone());
            files.extend_from_slice(&rules.loaded.load().referenced_files);
            files.extend_from_slice(&rules.wanted.lock());
        }
        files.extend(self.tls.iter().flat_map(Tls::files).map(Path::to_owned));
        files
    }

    /// Checks everything before anything is swapped.
    fn read(&self) -> Result<Option<Arc<Loaded>>, ReloadError> {
        if self.rules.is_none() && self.tls.is_none() {
            return Err(ReloadError::Nothing);
        }
        let loaded = match &self.rules {
            Some(rules) => Some(rules.load()?),
            None => None,
        };
        if let Some(tls) = &self.tls {
            let lost = tls.read_again()?;
            *self.history.lock().removed.entry(CERTIFICATE).or_default() += lost as u64;
        }
        let Some((rules, loaded)) = self.rules.as_ref().zip(loaded) else { return Ok(None) };
        for changed in changed_settings(&rules.loaded.load().settings, &loaded.settings) {
            tracing::warn!(setting = changed, "this setting changed; it takes effect at the next start");
        }
        let loaded = Arc::new(loaded);
        rules.engine.reload(loaded.rules.clone());
        rules.loaded.store(loaded.clone());
        Ok(Some(loaded))
    }

    fn remember(&self, outcome: &Outcome) {
        let now = self.clock.now();
        let mut history = self.history.lock();
        match outcome {
            Ok(loaded) => {
                history.succeeded += 1;
                history.last_success = now;
                history.failure = None;
                for finding in loaded.iter().flat_map(|loaded| &loaded.findings) {
                    tracing::warn!(code = finding.code().as_str(), "{}", finding.message());
                }
                for part in loaded.iter().flat_map(|loaded| &loaded.changes.removed) {
                    *history.removed.entry(part.kind.as_str()).or_default() += 1;
                }
                let changed = loaded.as_ref().map(|loaded| names(&loaded.changes.changed)).unwrap_or_default();
                tracing::info!(changed, "the configuration was read again");
            }
            Err(error) if matches!(**error, ReloadError::Nothing) => {}
            Err(error) => {
                history.failed += 1;
                history.failure = Some((now, error.clone()));
                let reason = error.first();
                tracing::error!(%error, reason, "the configuration is broken; the old rules stay in force");
            }
        }
    }
}

impl ReloadError {
    /// The first thing that is wrong, in one line without any secret.
    fn first(&self) -> String {
        match self {
            ReloadError::Configuration(report) => {
                report.findings().first().map(|finding| format!("{finding:?}")).unwrap_or_default()
            }
            other => other.to_string(),
        }
    }

    /// Everything that is wrong, for the answers of the admin door.
    pub(crate) fn to_json(&self) -> Value {
        let findings = match self {
            ReloadError::Configuration(report) => findings_json(report.findings()),
            _ => json!([]),
        };
        json!({ "message": self.to_string(), "findings": findings })
    }
}

/// Parts of a configuration, as programs read them. At most 100 are named.
pub(crate) fn parts_json(parts: &[Part]) -> Value {
    parts.iter().take(PARTS_MAX).map(|part| json!({ "kind": part.kind.as_str(), "name": part.name })).collect()
}

/// The parts in one line, such as `rule login, setting deadline`.
fn names(parts: &[Part]) -> String {
    let names: Vec<String> =
        parts.iter().take(PARTS_MAX).map(|part| format!("{} {}", part.kind.as_str(), part.name)).collect();
    names.join(", ")
}

/// Findings, as programs read them.
pub fn findings_json(findings: &[Finding]) -> Value {
    let one = |finding: &Finding| {
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
    findings.iter().map(one).collect()
}

/// The settings that a reload found changed and cannot change.
fn changed_settings(before: &Settings, after: &Settings) -> impl Iterator<Item = &'static str> {
    let changes = [
        ("store", before.store != after.store),
        ("prefix", before.prefix != after.prefix),
        ("instances", before.instances != after.instances),
        ("deadline", before.deadline != after.deadline),
        ("plan_sources.redis_hash", before.plan_hash != after.plan_hash),
    ];
    changes.into_iter().filter(|(_, has_changed)| *has_changed).map(|(name, _)| name)
}

impl std::fmt::Debug for Reloader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let file = self.0.rules.as_ref().map(|rules| &rules.file);
        f.debug_struct("Reloader").field("file", &file).finish_non_exhaustive()
    }
}
