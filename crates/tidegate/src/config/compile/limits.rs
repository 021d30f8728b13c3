//! Compiles limits and their names.

use std::sync::Arc;
use std::time::Duration;

use tidegate_config::{Code, ConfigSource, Finding, LimitEntry, LimitTable, OneOrMany, Span, Spanned, TimeText};
use tidegate_core::{Limit, LimitError};

use super::Compiler;
use crate::answer::Policy;
#[cfg(feature = "redis")]
use crate::config::load::Loader;
#[cfg(feature = "redis")]
use crate::rules::{OwnLimits, OwnLimitsError};

/// A limit, its name, and its span in the file. The name is part of the counter's key, and clients see it in headers.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct NamedLimit {
    pub(crate) name: String,
    pub(crate) limit: Limit,
    pub(crate) span: Span,
}

/// Returns whether a limit may have this name: 1 to 64 of `a-z`, `0-9` and `-`.
pub(crate) fn is_limit_name(name: &str) -> bool {
    let is_name_byte = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=64).contains(&name.len()) && name.bytes().all(is_name_byte)
}

/// Returns the name of each limit of a list: the given one, else one that is derived from its window, such as
/// `per-minute`, or `per-minute-2` if that name is given to another limit or taken.
pub(crate) fn limit_names(limits: &[(Option<String>, Limit)]) -> Vec<String> {
    let mut names: Vec<String> = Vec::with_capacity(limits.len());
    for (name, limit) in limits {
        let is_taken = |candidate: &String| {
            names.contains(candidate) || limits.iter().any(|(other, _)| other.as_ref() == Some(candidate))
        };
        let name = name.clone().unwrap_or_else(|| {
            let base = Policy::of(*limit).name().to_owned();
            let numbered = (2_u32..).map(|number| format!("{base}-{number}"));
            std::iter::once(base.clone()).chain(numbered).find(|name| !is_taken(name)).unwrap_or(base)
        });
        names.push(name);
    }
    names
}

/// Reads the limits of a key from JSON, in the forms of a configuration file: a text or a table, or a list of them.
///
/// # Errors
/// The first error that loading a keys file with these limits would report.
#[cfg(feature = "redis")]
pub(crate) fn limits_from_json(json: &serde_json::Value) -> Result<OwnLimits, OwnLimitsError> {
    let (list, findings) = tidegate_config::limits_from_json(json);
    let loader = Loader::new();
    let source = Arc::new(ConfigSource::unquoted("", ""));
    let (files, secret_files) = (Vec::new(), Vec::new());
    let mut compiler = Compiler { source: source.clone(), loader: &loader, findings, files, secret_files };
    // The name of each limit is that of the compiled one, if the entry has a name at all.
    let limits = compiler.limits(&list, &source);
    if let Some(finding) = compiler.findings.first() {
        return Err(OwnLimitsError(finding.message().to_owned()));
    }
    if limits.is_empty() {
        return Err(OwnLimitsError("the key's own limits are empty".to_owned()));
    }
    let is_named = |entry: &LimitEntry| matches!(entry, LimitEntry::Table(table) if table.name.is_some());
    let named = limits.into_iter().zip(list.iter());
    OwnLimits::named(named.map(|(limit, entry)| (is_named(entry).then_some(limit.name), limit.limit)).collect())
}

impl Compiler<'_> {
    /// Compiles a list of limits and gives each a name. `source` is the file to which their spans refer.
    ///
    /// A limit without a name is named after its window, such as `per-minute`, or `per-minute-2` if that name is taken.
    /// Adds an error for each invalid limit, which is left out, and for each name that is invalid or given twice, whose
    /// limit is kept.
    pub(super) fn limits(
        &mut self,
        list: &OneOrMany<Spanned<LimitEntry>>,
        source: &Arc<ConfigSource>,
    ) -> Vec<NamedLimit> {
        let mut named: Vec<(Option<String>, Limit, Span)> = Vec::new();
        for entry in list.iter() {
            let name = self.limit_name(entry, source);
            let Some(limit) = self.limit(entry, source) else { continue };
            if let Some(name) = &name
                && named.iter().any(|(other, ..)| other.as_ref() == Some(&**name))
            {
                let finding = Finding::new(Code::DuplicateLimit, format!("two limits are named `{}`", ***name));
                self.note_in(source, finding.help("give each limit of a list a different name").at(name.span()));
            }
            named.push((name.map(|name| name.to_string()), limit, entry.span()));
        }
        let given: Vec<(Option<String>, Limit)> = named.iter().map(|(name, limit, _)| (name.clone(), *limit)).collect();
        let names = limit_names(&given).into_iter();
        names.zip(named).map(|(name, (_, limit, span))| NamedLimit { name, limit, span }).collect()
    }

    fn limit_name<'e>(
        &mut self,
        entry: &'e Spanned<LimitEntry>,
        source: &Arc<ConfigSource>,
    ) -> Option<&'e Spanned<String>> {
        let LimitEntry::Table(table) = &**entry else { return None };
        let name = table.name.as_ref()?;
        if !is_limit_name(name) {
            let message =
                "the name of a limit must be 1 to 64 of a-z, 0-9 and -, because it is sent to clients in a header";
            self.note_in(
                source,
                Finding::new(Code::InvalidName, message).help("for example per-minute").at(name.span()),
            );
        }
        Some(name)
    }

    fn limit(&mut self, entry: &Spanned<LimitEntry>, source: &Arc<ConfigSource>) -> Option<Limit> {
        match &**entry {
            LimitEntry::Text(text) => self.limit_text(text, entry.span(), source),
            LimitEntry::Table(table) => self.limit_table(table, entry.span(), source),
        }
    }

    fn limit_text(&mut self, text: &str, span: Span, source: &Arc<ConfigSource>) -> Option<Limit> {
        let parsed: Result<Limit, _> = text.parse();
        parsed
            .map_err(|error| {
                // The message ends with an example and the position, which the help and the underline show here.
                let message = error.to_string();
                let message = message.split(" (at byte").next().unwrap_or_default();
                let message = message.split("; for example").next().unwrap_or_default();
                let message = match (text, source.is_code()) {
                    ("plan", true) => "the limits of plans cannot be combined with other limits",
                    _ => message,
                };
                let finding = Finding::new(Code::InvalidLimit, message).at(source.inside(span, text, error.span()));
                let finding = match text {
                    "plan" => finding
                        .help("`limits = \"plan\"` cannot be combined with other limits, and is allowed only in a rule")
                        .help_in_code("call either `limits_from_plan` or `limit`"),
                    _ => finding.help("QUOTA/WINDOW [ALGORITHM] [option=value …], for example 10/min or 100/min token-bucket burst=20"),
                };
                self.note_in(source, finding);
            })
            .ok()
    }

    fn limit_table(&mut self, table: &LimitTable, span: Span, source: &Arc<ConfigSource>) -> Option<Limit> {
        let LimitTable { limit, quota, window, algorithm, burst, queue, count_denied, .. } = table;
        let is_spelled_out = quota.is_some()
            || window.is_some()
            || algorithm.is_some()
            || burst.is_some()
            || queue.is_some()
            || count_denied.is_some();
        let refuse = |compiler: &mut Self, message: &str, at: Span| {
            let help = "write either `limit = \"10/min\"`, or `quota` and `window` with their options";
            compiler.note_in(source, Finding::new(Code::InvalidLimit, message).help(help).at(at));
            None
        };
        match (limit, quota, window) {
            (Some(limit), ..) if is_spelled_out => refuse(self, "the limit is given twice", limit.span()),
            (Some(limit), ..) => self.limit_text(limit, limit.span(), source),
            (None, Some(quota), Some(window)) => self.spelled_out(table, quota, window, source),
            _ => refuse(self, "a limit needs a quota and a window", span),
        }
    }

    fn spelled_out(
        &mut self,
        table: &LimitTable,
        quota: &Spanned<u64>,
        window: &Spanned<TimeText>,
        source: &Arc<ConfigSource>,
    ) -> Option<Limit> {
        let time = self.time_in(window, source);
        // Without a valid window, the quota is still checked.
        let limit = Limit::new(**quota, time.unwrap_or(Duration::from_secs(1)));
        let mut limit = self.accept_limit(limit, quota.span(), window.span(), source)?;
        time?;
        if let Some(algorithm) = &table.algorithm {
            let by_algorithm = limit.with_algorithm(**algorithm);
            limit = self.accept_limit(by_algorithm, algorithm.span(), window.span(), source)?;
        }
        if let Some(burst) = &table.burst {
            limit = self.accept_limit(limit.with_burst(**burst), burst.span(), window.span(), source)?;
        }
        if let Some(queue) = &table.queue {
            limit = self.accept_limit(limit.with_queue(**queue), queue.span(), window.span(), source)?;
        }
        Some(limit.with_count_denied(table.count_denied.as_ref().is_some_and(|value| **value)))
    }

    fn accept_limit(
        &mut self,
        limit: Result<Limit, LimitError>,
        span: Span,
        window_span: Span,
        source: &Arc<ConfigSource>,
    ) -> Option<Limit> {
        limit
            .map_err(|error| {
                let span = if matches!(error, LimitError::Window { .. }) { window_span } else { span };
                self.note_in(source, Finding::new(Code::InvalidLimit, error.to_string()).at(span));
            })
            .ok()
    }
}
