//! Compiles the tables of a file, or of rules built in code, to a rule set: parses every string and resolves every
//! name.
//!
//! Each step notes its findings and continues with what is valid, so that one attempt reports everything. If any of the
//! findings is an error, the result is a report instead of a rule set.

mod bodies;
mod callers;
mod gateway;
mod keys;
mod limits;
mod matches;
mod policy_names;
mod rules;
mod settings;
pub(super) mod store;
mod tokens;

use std::fs::Metadata;
use std::path::PathBuf;
use std::sync::Arc;

use tidegate_config::{
    Changes, Code, ConfigSource, ConfigTable, Document, Finding, KeysFile, Report, Secret, Severity, Span, Spanned,
    complete,
};

pub(crate) use self::gateway::Setting;
#[cfg(feature = "redis")]
pub(crate) use self::limits::limits_from_json;
pub(crate) use self::limits::{NamedLimit, is_limit_name, limit_names};
pub use self::settings::Settings;
use super::lint;
use super::load::{Loaded, Loader};
use crate::rules::{CompiledRule, KeyEntry, RuleSet, SetParts};

/// Checks a configuration and compiles it to rules and settings. Reads the keys file and the secrets that it names.
///
/// `source` is the text to which the spans of the configuration refer.
///
/// # Errors
/// If the configuration has an error. The report has all findings, including warnings.
pub(crate) fn compile(config: ConfigTable, source: Arc<ConfigSource>, loader: &Loader) -> Result<Loaded, Report> {
    let name = source.name().to_owned();
    let mut compiler = Compiler { source, loader, findings: Vec::new(), files: Vec::new(), secret_files: Vec::new() };
    if config.expect.is_some() {
        compiler.findings.extend(complete::check_line_end(&compiler.source));
    }
    let settings = compiler.settings(&config);
    let gateway = compiler.gateway(&config);
    let (parts, traits, keys_file) = compiler.parts(&config, &settings);
    lint::lint(&config, &settings, &parts, &traits, &mut compiler);

    let source = compiler.source.clone();
    let (files, secret_files) = (std::mem::take(&mut compiler.files), std::mem::take(&mut compiler.secret_files));
    let findings = compiler.into_findings();
    if findings.iter().any(|finding| finding.severity() == Severity::Error) {
        return Err(Report::new(&name, findings));
    }
    Ok(Loaded {
        referenced_files: config.named_files().map(|name| loader.path(name)).collect(),
        rules: RuleSet::new(parts),
        settings,
        gateway,
        findings,
        changes: Changes::default(),
        files,
        document: Document { config, source, keys_file, secret_files },
    })
}

/// The state of a compilation: the findings so far, and the files that were read. Its methods compile the parts.
pub(crate) struct Compiler<'l> {
    source: Arc<ConfigSource>,
    loader: &'l Loader,
    findings: Vec<Finding>,
    /// The files that were read, besides the configuration itself, each with its metadata from before the read.
    files: Vec<(PathBuf, Metadata)>,
    /// The secrets that were read from files, each with the name of its file as written in the configuration.
    secret_files: Vec<(String, Secret)>,
}

/// Results of the compilation that are not part of the rules, for the lints.
pub(crate) struct LintInput {
    /// The patterns in `exempt.paths`, in their order, without invalid ones.
    pub(crate) exempt_paths: Vec<crate::rules::pattern::Pattern>,
    /// The names of the plans that keys or addresses have, some perhaps twice or of plans that do not exist.
    pub(crate) assigned_plans: Vec<Arc<str>>,
}

impl Compiler<'_> {
    /// Adds a finding whose span is in the configuration itself, not in its keys file.
    pub(crate) fn note(&mut self, finding: Finding) {
        let source = self.source.clone();
        self.note_in(&source, finding);
    }

    /// Adds a finding whose span is in `source`, such as the keys file. Ignores a finding that is not
    /// [certain](ConfigSource::is_certain).
    pub(crate) fn note_in(&mut self, source: &Arc<ConfigSource>, finding: Finding) {
        if source.is_certain(finding.span().unwrap_or_default()) {
            self.findings.push(finding.with_source(source));
        }
    }

    /// Adds a finding as [`note`](Self::note) does, if there is one.
    pub(crate) fn note_if(&mut self, finding: Option<Finding>) {
        finding.into_iter().for_each(|finding| self.note(finding));
    }

    /// Returns the value of `Ok`. For `Err`, adds an error with this code and span, and returns `None`.
    pub(crate) fn accept<T, E: std::fmt::Display>(
        &mut self,
        result: Result<T, E>,
        code: Code,
        span: Span,
    ) -> Option<T> {
        result.map_err(|error| self.note(Finding::new(code, error.to_string()).at(span))).ok()
    }

    /// Returns the span of a part of a string in the configuration. `part` is a range of bytes in the string.
    ///
    /// Returns the span of the whole string if it is empty or written with escapes.
    pub(crate) fn inside(&self, text: &Spanned<String>, part: std::ops::Range<usize>) -> Span {
        self.source.inside(text.span(), text, part)
    }

    fn parts(&mut self, config: &ConfigTable, settings: &Settings) -> (SetParts, LintInput, KeysFile) {
        let identifier = self.identifier(config, settings);
        let mut limit_sets = self.plans(config);
        let (keys, keys_file) = self.keys(config, &mut limit_sets);
        let address_plans = self.address_plans(config, &limit_sets);
        let (exempt, exempt_paths) = self.exempt(config);
        let bans = self.bans(config);
        let plan_header = config.plan_sources.header.as_ref().and_then(|name| self.header_name(name));
        let styles = self.styles(config.headers.as_ref()).unwrap_or_default();
        let (rules, matcher, shields) = self.rules(config, styles, &limit_sets);

        let assigned_plans = limit_sets.assigned_plans();
        let (default, anonymous) = limit_sets.fallbacks();
        let parts = SetParts {
            has_groups: rules.iter().any(|rule| !rule.groups.is_empty()),
            needs_limit_set: rules.iter().any(CompiledRule::uses_plans),
            plan_cost_max: rules.iter().filter(|rule| rule.uses_plans()).map(CompiledRule::cost).max(),
            rules,
            matcher,
            shields,
            identifier,
            plan_of_limit_set: limit_sets.plan_of_limit_set(),
            plans: limit_sets.into_plans(),
            default,
            anonymous,
            exempts_keys: keys.values().any(KeyEntry::is_exempt),
            keys,
            address_plans,
            plan_header,
            exempt,
            bans,
            path_bytes_max: self.path_bytes_max(config),
            is_off: *config.kill_switch,
            exposes_headers: config.expose_headers,
            styles,
            on_failure: config.on_failure,
            is_configured: true,
        };
        (parts, LintInput { exempt_paths, assigned_plans }, keys_file)
    }

    /// Returns the findings, sorted by the start of their spans. Those without a place come first.
    ///
    /// Findings about the keys file are sorted by their spans in that file, among the others.
    fn into_findings(self) -> Vec<Finding> {
        let mut findings = self.findings;
        findings.sort_by_key(|finding| finding.span().unwrap_or_default());
        findings
    }
}
