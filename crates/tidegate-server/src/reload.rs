//! Reloads the configuration and the certificate while the server runs.
//!
//! The trigger makes no difference: a changed file, a SIGHUP, or `POST /v1/reload`. The configuration file and all
//! files that it names are read once they have stopped changing; `tidegate::config::watch` notices changes and waits.
//! A failure is reported in the log, on `/readyz` and as a metric until a later reload succeeds. A file that may be
//! truncated cannot be used (see `Loader::reload`). What a reload removes is named in a warning and counted.
//!
//! **All or nothing.** A reload prepares everything first: the rules with their keys and secrets, the upstreams of the
//! gateway, the certificate. If one of them cannot be used, nothing changes. Then it puts everything into use, which
//! cannot fail. Rules and upstreams are replaced in one step, so no request is decided by new rules and forwarded to an
//! old upstream.
//!
//! Rules, plans, keys, exemptions and bans change with a reload. The store and how it is called are set up at the
//! start; a reload that finds them changed logs a warning.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};
use tidegate::config::watch::{FileSource, FileWatch, RulesSource, Stamps};
use tidegate::config::{Finding, Loaded, Loader, Part, PartKind, Report, Severity};
use tidegate::engine::{Companion, Engine};
use tidegate::{Clock, SystemClock, Timestamp};

use crate::listeners::gateway::{UpstreamError, Upstreams};
use crate::tls::{CertificateError, CertificatePair, Tls};

/// The maximum number of parts that a response names.
const PARTS_MAX: usize = 100;
/// The kind under which removed certificates of a chain are counted.
const CERTIFICATE: &str = "certificate";

/// The configuration and the TLS certificate of a running server, which can be read again. Clones share their state.
#[derive(Clone)]
pub struct Reloader(FileWatch<Parts>);

/// The configuration and the certificate, each if the server has one, and the results of the reloads.
struct Parts {
    rules: Option<RulesSource>,
    /// Rules that were not read from a file, and the engine that uses them.
    fixed: Option<(Arc<Loaded>, Engine)>,
    /// Whether the upstreams of the configuration are those of a gateway.
    has_gateway: AtomicBool,
    tls: Option<Tls>,
    clock: SystemClock,
    history: Mutex<ReloadHistory>,
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

/// The reason why a reload failed. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// At least one part cannot be used.
    #[error("{0}")]
    Rejected(Box<RejectedParts>),
    /// The server was started with neither a configuration nor a certificate.
    #[error("nothing to reload: the server was started without --config and without --tls-cert")]
    Nothing,
    /// The reload panicked.
    #[error("the reload failed because of a bug in Tidegate; nothing has changed")]
    Panicked,
}

/// What is wrong with each part that a reload cannot use. At least one of them is not `None`.
///
/// `Display` joins the messages with semicolons.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct RejectedParts {
    /// The configuration: the rules, or a file that they name.
    pub configuration: Option<Report>,
    /// The upstreams of the gateway. `None` if the configuration cannot be used.
    pub upstreams: Option<UpstreamError>,
    /// The certificate of the listeners.
    pub certificate: Option<CertificateError>,
}

impl std::fmt::Display for RejectedParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: [Option<&dyn std::fmt::Display>; 3] = [
            self.configuration.as_ref().map(|report| report as _),
            self.upstreams.as_ref().map(|error| error as _),
            self.certificate.as_ref().map(|error| error as _),
        ];
        for (index, part) in parts.into_iter().flatten().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{part}")?;
        }
        Ok(())
    }
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
        Reloader::new(Some(RulesSource::new(file, loader, loaded, engine)), None)
    }

    /// Creates a reloader for a configuration that was not read from a file. Its rules are shown, but never replaced.
    ///
    /// `engine` must use the rules of `loaded`.
    pub fn without_file(loaded: Loaded, engine: Engine) -> Reloader {
        Reloader(Reloader::nothing().0.map(|parts| Parts { fixed: Some((Arc::new(loaded), engine)), ..parts }))
    }

    /// Makes each reload replace the upstreams of the gateway by those of the configuration, together with its rules.
    pub fn follow_upstreams(&self) {
        self.0.source().has_gateway.store(true, Ordering::Relaxed);
    }

    /// Adds a certificate, which is read again by each reload. Does nothing if there are clones of this reloader.
    #[must_use]
    pub fn tls(self, tls: Tls) -> Reloader {
        Reloader(self.0.map(|parts| Parts { tls: Some(tls), ..parts }))
    }

    /// Sets the interval at which [`watch`](Self::watch) checks the files without an event. Defaults to 2 s.
    ///
    /// Network file systems report no events. At least 100 ms pass between two checks. Does nothing if there are clones
    /// of this reloader.
    #[must_use]
    pub fn poll_every(self, interval: Duration) -> Reloader {
        Reloader(self.0.poll_every(interval))
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
        Reloader(FileWatch::new(Parts {
            rules,
            fixed: None,
            has_gateway: AtomicBool::new(false),
            tls,
            clock,
            history: Mutex::new(history),
        }))
    }

    /// Reads the configuration and the certificate again, and uses them if both are valid.
    ///
    /// Returns the new configuration, or an empty one if this reloader has none.
    ///
    /// Waits first until the files have been unchanged for 100 ms, for five seconds at most. Reloads run one at a time.
    /// If the future is dropped after its first poll, the reload still completes. The result is logged and counted,
    /// except [`ReloadError::Nothing`], and the findings are logged.
    ///
    /// # Errors
    /// If the configuration, its upstreams or the certificate cannot be used, there is nothing to reload, or the reload
    /// panics. Nothing has changed then.
    ///
    /// # Panics
    /// Panics outside a tokio runtime.
    pub async fn reload(&self) -> Result<Arc<Loaded>, Arc<ReloadError>> {
        self.0.reload().await.map(|loaded| loaded.unwrap_or_else(|| Arc::new(empty())))
    }

    /// Returns a future that reloads whenever one of the files changes.
    ///
    /// The future never completes, except if there are no files: then it completes at once.
    ///
    /// Changes since the files were last read are noticed, also those before the first poll. If the future is dropped
    /// after its first poll, `/readyz` reports that the file watch has ended.
    ///
    /// # Panics
    /// The future panics if it is polled outside a tokio runtime with a timer.
    pub fn watch(self) -> impl Future<Output = ()> + Send + 'static {
        self.0.watch()
    }

    /// Returns the configuration in force, or `None` if this reloader has none.
    pub(crate) fn loaded(&self) -> Option<Arc<Loaded>> {
        let parts = self.0.source();
        let fixed = || parts.fixed.as_ref().map(|(loaded, _)| loaded.clone());
        parts.rules.as_ref().map(RulesSource::loaded).or_else(fixed)
    }

    /// Returns the engine that uses the configuration, or `None` if this reloader has none.
    pub(crate) fn engine(&self) -> Option<&Engine> {
        let parts = self.0.source();
        parts.rules.as_ref().map(RulesSource::engine).or_else(|| parts.fixed.as_ref().map(|(_, engine)| engine))
    }

    /// Returns whether a task has watched the files and has ended. False if none was started.
    pub(crate) fn watch_ended(&self) -> bool {
        self.0.watch_ended()
    }

    /// Returns a copy of the results of the reloads so far.
    pub(crate) fn history(&self) -> ReloadHistory {
        self.0.source().history.lock().clone()
    }
}

fn empty() -> Loaded {
    tidegate::Rules::new().compile().expect("a configuration without rules is valid")
}

/// The result of a reload: the new configuration, if there is one.
type ReloadResult = Result<Option<Arc<Loaded>>, Arc<ReloadError>>;

/// What a reload puts into use. `None` for a part that the server does not have.
struct Prepared {
    rules: Option<Loaded>,
    /// The upstreams of the gateway.
    upstreams: Option<Upstreams>,
    certificate: Option<CertificatePair>,
}

impl FileSource for Parts {
    type Loaded = Option<Arc<Loaded>>;
    type Error = Arc<ReloadError>;

    fn files(&self) -> Vec<PathBuf> {
        let certificate = self.tls.iter().flat_map(Tls::files).map(Path::to_owned);
        self.rules.iter().flat_map(RulesSource::files).chain(certificate).collect()
    }

    fn stamps(&self) -> Stamps {
        let mut stamps: Stamps = self.rules.iter().flat_map(RulesSource::stamps).collect();
        stamps.extend(self.tls.iter().flat_map(Tls::stamps));
        stamps
    }

    /// Prepares all parts, and puts them into use if all are valid.
    ///
    /// Returns [`ReloadError::Nothing`] if there is no part.
    fn read(&self) -> (ReloadResult, Stamps) {
        if self.rules.is_none() && self.tls.is_none() {
            return (Err(Arc::new(ReloadError::Nothing)), Stamps::new());
        }
        match self.prepare() {
            Ok(prepared) => (Ok(self.commit(prepared)), self.stamps()),
            Err(rejected) => (Err(Arc::new(ReloadError::Rejected(rejected))), Stamps::new()),
        }
    }

    fn panicked() -> Arc<ReloadError> {
        Arc::new(ReloadError::Panicked)
    }

    /// Counts and logs the result of a reload, and remembers its failure until one succeeds.
    ///
    /// Ignores [`ReloadError::Nothing`].
    fn report(&self, result: &ReloadResult) {
        let now = self.clock.now();
        let mut history = self.history.lock();
        match result {
            Ok(loaded) => {
                history.succeeded += 1;
                history.last_success = now;
                history.failure = None;
                RulesSource::log_success(loaded.as_deref());
            }
            Err(error) if matches!(**error, ReloadError::Nothing) => {}
            Err(error) => {
                history.failed += 1;
                history.failure = Some((now, error.clone()));
                let reason = error.first_error();
                tracing::error!(%error, reason, "the reload failed; the old rules stay in force");
            }
        }
    }
}

impl Parts {
    /// Reads all parts. Changes nothing.
    ///
    /// # Errors
    /// If at least one cannot be used, with what is wrong with each of them.
    fn prepare(&self) -> Result<Prepared, Box<RejectedParts>> {
        let mut rejected = Box::<RejectedParts>::default();
        let rules = self.rules.as_ref().map(RulesSource::prepare).transpose();
        let rules = rules.unwrap_or_else(|report| {
            rejected.configuration = Some(report);
            None
        });
        let upstreams = rules.as_ref().and_then(|loaded| self.prepare_upstreams(loaded)).transpose();
        let upstreams = upstreams.unwrap_or_else(|error| {
            rejected.upstreams = Some(error);
            None
        });
        let certificate = self.tls.as_ref().map(Tls::prepare).transpose();
        let certificate = certificate.unwrap_or_else(|error| {
            rejected.certificate = Some(error);
            None
        });
        match *rejected {
            RejectedParts { configuration: None, upstreams: None, certificate: None } => {
                Ok(Prepared { rules, upstreams, certificate })
            }
            _ => Err(rejected),
        }
    }

    /// Prepares the upstreams of a configuration. `None` without a gateway that follows it.
    fn prepare_upstreams(&self, loaded: &Loaded) -> Option<Result<Upstreams, UpstreamError>> {
        let engine = self.rules.as_ref().filter(|_| self.has_gateway.load(Ordering::Relaxed))?.engine();
        Some(Upstreams::new(&loaded.gateway, Upstreams::of(engine).as_deref()))
    }

    /// Puts all parts into use, and counts the parts of the configuration and the certificates of the chain that are
    /// removed.
    fn commit(&self, prepared: Prepared) -> Option<Arc<Loaded>> {
        let Prepared { rules, upstreams, certificate } = prepared;
        let upstreams = upstreams.map(|upstreams| Arc::new(upstreams) as Companion);
        let loaded = self.rules.as_ref().zip(rules).map(|(source, loaded)| source.commit(loaded, upstreams));
        let shorter_by = self.tls.as_ref().zip(certificate).map_or(0, |(tls, pair)| tls.commit(pair));
        let mut history = self.history.lock();
        *history.removed.entry(CERTIFICATE).or_default() += shorter_by as u64;
        for part in loaded.iter().flat_map(|loaded| &loaded.changes.removed) {
            *history.removed.entry(part.kind.as_str()).or_default() += 1;
        }
        loaded
    }
}

impl ReloadError {
    fn report(&self) -> Option<&Report> {
        match self {
            ReloadError::Rejected(parts) => parts.configuration.as_ref(),
            ReloadError::Nothing | ReloadError::Panicked => None,
        }
    }

    /// Returns the first error in one line, for the log. Contains no secret.
    fn first_error(&self) -> String {
        match self.report() {
            Some(report) => report.findings().first().map(|finding| format!("{finding:?}")).unwrap_or_default(),
            None => self.to_string(),
        }
    }

    /// Returns the error for responses of the admin listener.
    pub(crate) fn body(&self) -> ReloadErrorBody {
        let findings = self.report().map(Report::findings).unwrap_or_default();
        ReloadErrorBody { message: self.to_string(), findings: findings.iter().map(FindingBody::new).collect() }
    }
}

/// The reason why a reload failed.
#[derive(Serialize)]
pub(crate) struct ReloadErrorBody {
    /// What failed.
    message: String,
    /// What is wrong with the configuration. Empty if only the certificate cannot be used.
    findings: Vec<FindingBody>,
}

/// The result of a reload.
#[derive(Serialize)]
pub(crate) struct ReloadedBody {
    /// Always true.
    reloaded: bool,
    /// The number of rules in force.
    rules: usize,
    /// The parts that the reload has removed from the configuration: the first 100.
    removed: Vec<PartBody>,
    /// The parts that the reload has changed: the first 100.
    changed: Vec<PartBody>,
    /// Warnings and advice about the configuration.
    findings: Vec<FindingBody>,
}

impl ReloadedBody {
    pub(crate) fn new(loaded: &Loaded) -> ReloadedBody {
        let parts = |parts: &[Part]| {
            let body = |part: &Part| PartBody { kind: part.kind.as_str(), name: part.name.to_string() };
            parts.iter().take(PARTS_MAX).map(body).collect()
        };
        ReloadedBody {
            reloaded: true,
            rules: loaded.rules.rules().len(),
            removed: parts(&loaded.changes.removed),
            changed: parts(&loaded.changes.changed),
            findings: loaded.findings.iter().map(FindingBody::new).collect(),
        }
    }
}

/// A part of a configuration.
#[derive(Serialize)]
struct PartBody {
    /// The kind of the part, such as `rule`.
    kind: &'static str,
    /// The name of the part.
    name: String,
}

/// A finding about a configuration: an error, a warning, or advice.
#[derive(Serialize)]
struct FindingBody {
    /// `error`, `warning` or `advice`.
    severity: &'static str,
    /// A code for programs.
    code: &'static str,
    /// What is wrong.
    message: String,
    /// What to do about it; null if the message says it.
    help: Option<String>,
    /// The file; null if the place is unknown.
    file: Option<String>,
    /// The line, from 1; null if the place is unknown.
    line: Option<usize>,
    /// The column, from 1; null if the place is unknown.
    column: Option<usize>,
}

impl FindingBody {
    fn new(finding: &Finding) -> FindingBody {
        let place = finding.place();
        FindingBody {
            severity: match finding.severity() {
                Severity::Error => "error",
                Severity::Warning => "warning",
                _ => "advice",
            },
            code: finding.code().as_str(),
            message: finding.message().to_owned(),
            help: finding.help_text().map(str::to_owned),
            file: place.map(|(file, ..)| file.to_string()),
            line: place.map(|(_, line, _)| line),
            column: place.map(|(.., column)| column),
        }
    }
}

/// Returns findings as a JSON list of objects with `severity`, `code`, `message`, `help`, `file`, `line` and `column`.
///
/// The last three are null if the place is unknown.
pub fn findings_json(findings: &[Finding]) -> Value {
    json!(findings.iter().map(FindingBody::new).collect::<Vec<_>>())
}

impl std::fmt::Debug for Reloader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let file = self.0.source().rules.as_ref().map(RulesSource::file);
        f.debug_struct("Reloader").field("file", &file).finish_non_exhaustive()
    }
}
