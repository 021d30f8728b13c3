//! Findings about a configuration: errors, warnings and advice, each with a stable code, a place and a remedy.
//!
//! A file with an error is not used; warnings and advice do not prevent that. `docs/findings.md` explains every code
//! with an example. A finding has its own (masked) source, so each can be printed as a report by itself.

use std::fmt;
use std::sync::Arc;

use miette::{Diagnostic, LabeledSpan, SourceCode};

use super::source::ConfigSource;
use super::span::Span;

/// The severity of a finding. Ordered: advice is the least severe, an error the most.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Severity {
    /// Information. The configuration works as written.
    Advice,
    /// The configuration works, but probably not as intended.
    Warning,
    /// The configuration is invalid and not used.
    Error,
}

/// Shows the name: `advice`, `warning` or `error`.
impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Advice => "advice",
            Severity::Warning => "warning",
            Severity::Error => "error",
        })
    }
}

macro_rules! codes {
    ($($variant:ident $name:literal $severity:ident $doc:literal,)*) => {
        /// The code of a finding: the kind of problem. Its name, such as `unknown-field`, is stable, so scripts may
        /// rely on it.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum Code {
            $(#[doc = $doc] $variant,)*
        }

        impl Code {
            /// All codes.
            pub const ALL: &[Code] = &[$(Code::$variant,)*];

            /// Returns the name of the code, such as `unknown-field`, as in reports and in `docs/findings.md`.
            pub const fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $name,)* }
            }

            /// Returns the severity of findings with this code.
            pub const fn severity(self) -> Severity {
                match self { $(Code::$variant => Severity::$severity,)* }
            }

            /// Returns whether findings with this code are certain even if parts of the file could not be read.
            ///
            /// `false` for warnings and advice. `false` also for errors about something that is missing, such as an
            /// unknown plan, because it may be in a part that could not be read, and for too many limits, because rules
            /// match more requests without the conditions that could not be read.
            #[doc(hidden)] // for crate tidegate
            pub fn holds_in_partly_read_file(self) -> bool {
                use Code::{DefaultPlanMissing, ExpectationUnmet, NoUpstream, PlansMissing, TooManyLimits, UnknownPlan};
                let may_change =
                    matches!(self, DefaultPlanMissing | ExpectationUnmet | NoUpstream | PlansMissing | TooManyLimits | UnknownPlan);
                self.severity() == Severity::Error && !may_change
            }
        }
    };
}

codes! {
    // Reading the file.
    FileUnreadable "file-unreadable" Error "A file cannot be read.",
    UnknownFormat "unknown-format" Error "The file's name does not end in `.toml`, `.yaml` or `.yml`, or the program was built without YAML support.",
    Syntax "syntax" Error "The text is not valid TOML or YAML.",
    UnknownField "unknown-field" Error "A field is unknown.",
    MissingField "missing-field" Error "A required field is missing.",
    WrongType "wrong-type" Error "A value has the wrong type.",
    InvalidValue "invalid-value" Error "A value is not among those accepted, or out of range.",
    // Single values.
    InvalidLimit "invalid-limit" Error "A limit cannot be parsed or is out of range, such as a quota of 0.",
    InvalidTime "invalid-time" Error "A time cannot be parsed or is out of range.",
    InvalidNetwork "invalid-network" Error "An address or a network cannot be parsed, or `ipv6_prefix` is out of range.",
    InvalidHeader "invalid-header" Error "The name or the required value of a header is invalid, or a rule tests a header twice.",
    InvalidMethod "invalid-method" Error "The name of a method is invalid, or there are too many non-standard methods.",
    InvalidPath "invalid-path" Error "A path pattern cannot be parsed, or no path can match it.",
    InvalidHost "invalid-host" Error "A host pattern cannot be parsed, or no host can match it.",
    InvalidName "invalid-name" Error "The name of a rule, a limit, a plan or a Redis hash, or the prefix of keys, is empty, too long, or has characters that are not allowed.",
    InvalidSubject "invalid-subject" Error "`by` is empty, has an unknown kind of subject, lists a kind twice, has more than 8 kinds, or combines `global` with others.",
    InvalidKey "invalid-key" Error "An entry for an API key has no key, has both `key` and `sha256`, or has a key that no request can carry.",
    InvalidJwt "invalid-jwt" Error "The key for verifying JWTs is invalid, or the program was built without JWT support.",
    InvalidStore "invalid-store" Error "The URL of the store is invalid, its scheme is unknown, or the settings of the table `store` do not fit together or cannot be used.",
    InvalidUpstream "invalid-upstream" Error "The URL of an upstream's server is invalid, an upstream has no server, or its certificate authorities cannot be used.",
    SecretMissing "secret-missing" Error "A required secret is missing or given in several ways, or its environment variable is not set.",
    // Values that do not fit together.
    ConflictingHeaders "conflicting-headers" Error "`ietf` and `draft-6` cannot be combined.",
    DuplicateRule "duplicate-rule" Error "Two rules have the same name, so they would share counters.",
    DuplicateLimit "duplicate-limit" Error "Two limits of a list have the same name, so they would share a counter.",
    DuplicateUpstream "duplicate-upstream" Error "Two upstreams have the same name.",
    DuplicateRoute "duplicate-route" Error "Two upstreams match the same requests.",
    NoUpstream "no-upstream" Error "The gateway has an address to listen on, but no upstream.",
    DuplicateKey "duplicate-key" Error "An API key is listed twice.",
    UnknownPlan "unknown-plan" Error "A plan does not exist.",
    PlansMissing "plans-missing" Error "A rule takes its limits from plans, but there are none.",
    DefaultPlanMissing "default-plan-missing" Error "Plans are used, but `default` is not among them.",
    LimitsMissing "limits-missing" Error "A rule, a plan or a key has an empty list of limits.",
    TooManyLimits "too-many-limits" Error "More limits apply to one request than can be decided together.",
    CostNeverFits "cost-never-fits" Error "The cost of a rule exceeds what one of its limits can ever allow.",
    ShieldNotByAddress "shield-not-by-address" Error "A shield counts by something other than the address, takes its limits from plans, or is for groups of callers.",
    ShieldNotSpaced "shield-not-spaced" Error "A shield has a leaky bucket, but a shield never delays a request.",
    // Files that may be truncated.
    ExpectationUnmet "expectation-unmet" Error "The number of rules or keys differs from `expect`.",
    FileCutOff "file-cut-off" Error "The file has `expect`, or is the keys file of a file with `expect.keys`, and does not end with a newline; or, in a reload, the file is empty, or it, its keys file or a secret file is only the beginning of the active one.",
    RulesGone "rules-gone" Error "A reload has no rules, although the active configuration has some, and the file does not contain `rules = []`.",
    KeysGone "keys-gone" Error "A reload has no keys, although the active configuration has some, and the file does not contain `keys = []`.",
    UpstreamsGone "upstreams-gone" Error "A reload has no upstreams, although the active configuration has some, and the file does not contain `upstreams = []`.",
    ExpectationGone "expectation-gone" Error "A reload has no `expect.rules` or `expect.keys`, but the active configuration does.",
    Removed "removed" Warning "A reload removes parts of the configuration.",
    LineEndGone "line-end-gone" Warning "A reload has changes, and the file or its keys file no longer ends with a newline.",
    // What is valid, and probably not intended.
    ProxiesUntrusted "proxies-untrusted" Warning "A forwarding header is configured, but no proxy is trusted.",
    AllProxiesTrusted "all-proxies-trusted" Warning "Every address is trusted as a proxy, so every client can choose its address.",
    PlanHeaderUntrusted "plan-header-untrusted" Warning "A plan header is configured, but no proxy is trusted to set it.",
    PlanHashUnread "plan-hash-unread" Warning "A Redis hash of plans is configured, but the store is not Redis.",
    KeyHashUnread "key-hash-unread" Warning "A Redis hash of API keys is configured, but the store is not Redis.",
    RuleUnreachable "rule-unreachable" Warning "No request can match the rule.",
    RuleTwice "rule-twice" Warning "Two rules match the same requests and count them by the same subject.",
    RedundantLimit "redundant-limit" Warning "A limit never denies, because another one always denies first.",
    PlanUnused "plan-unused" Warning "Nothing in the file assigns the plan to a caller, or no rule uses plans.",
    GroupUnknown "group-unknown" Warning "No listed key is in a group of the rule, so the rule applies to no caller of that group.",
    KeyLimitsUnused "key-limits-unused" Warning "A key has its own limits, but no rule takes its limits from plans.",
    AnonymousPlanMissing "anonymous-plan-missing" Warning "Callers without an identity get the `default` plan.",
    SubjectUnknowable "subject-unknowable" Warning "A rule counts by an identity that no request can have.",
    SubjectChosenByClient "subject-chosen-by-client" Warning "A rule counts only by values that the client chooses.",
    CountDeniedRefunded "count-denied-refunded" Warning "`count_denied` with a refund: a denied request has no outcome, so it is never refunded.",
    MemoryNotShared "memory-not-shared" Warning "There are several instances, and each has its counters in its own memory.",
    AllRequestsExempt "all-requests-exempt" Warning "The exempt lists cover every request.",
    DeadlineLong "deadline-long" Warning "The deadline is so long that clients notice a store that hangs.",
    NoRules "no-rules" Warning "There is no rule, so nothing is limited.",
    KillSwitchOn "kill-switch-on" Warning "The kill switch is on, so nothing is limited and no ban applies.",
    ShadowOn "shadow-on" Advice "All rules are in shadow mode, so no limit denies a request.",
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The error for a text that is not the name of a [`Code`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown finding code")]
pub struct CodeError;

impl std::str::FromStr for Code {
    type Err = CodeError;

    fn from_str(name: &str) -> Result<Code, CodeError> {
        Code::ALL.iter().copied().find(|code| code.as_str() == name).ok_or(CodeError)
    }
}

/// An error, a warning or advice about a configuration, with its place in the file and a suggested remedy.
///
/// Implements [`miette::Diagnostic`], so that a report can show the line of the file.
#[derive(Clone)]
pub struct Finding {
    code: Code,
    message: String,
    help: Option<String>,
    /// The remedy for rules that were built in code.
    help_in_code: Option<String>,
    span: Span,
    label: String,
    source: Option<Arc<ConfigSource>>,
}

impl Finding {
    /// Creates a finding without a remedy and a place, with the label `here`.
    #[doc(hidden)] // for crate tidegate
    pub fn new(code: Code, message: impl Into<String>) -> Finding {
        Finding {
            code,
            message: message.into(),
            help: None,
            help_in_code: None,
            span: Span::default(),
            label: "here".to_owned(),
            source: None,
        }
    }

    /// Sets the remedy.
    #[doc(hidden)] // for crate tidegate
    pub fn help(self, help: impl Into<String>) -> Finding {
        Finding { help: Some(help.into()), ..self }
    }

    /// Sets the remedy for rules that were built in code, where fields of a file would be the wrong words. Defaults to that
    /// of [`help`](Finding::help).
    #[doc(hidden)] // for crate tidegate
    pub fn help_in_code(self, help: impl Into<String>) -> Finding {
        Finding { help_in_code: Some(help.into()), ..self }
    }

    /// Sets the text at the underlined place.
    #[doc(hidden)] // for crate tidegate
    pub fn label(self, label: impl Into<String>) -> Finding {
        Finding { label: label.into(), ..self }
    }

    /// Sets the range of bytes that the finding is about.
    #[doc(hidden)] // for crate tidegate
    pub fn at(self, span: Span) -> Finding {
        Finding { span, ..self }
    }

    /// Sets the source to which the span refers.
    ///
    /// If the configuration was built in code and the span is known, the name of the value is put before the message
    /// instead, and the span is removed.
    ///
    /// The remedy is then that of [`help_in_code`](Finding::help_in_code).
    #[doc(hidden)] // for crate tidegate
    pub fn with_source(mut self, source: &Arc<ConfigSource>) -> Finding {
        if source.is_code() && self.help_in_code.is_some() {
            self.help = self.help_in_code.take();
        }
        match source.value(self.span) {
            Some(value) => Finding { message: format!("{value}: {}", self.message), span: Span::default(), ..self },
            None => Finding { source: Some(source.clone()), ..self },
        }
    }

    /// Sets the file to which the span refers. An empty span is replaced by the nearest character that can be
    /// underlined.
    pub(crate) fn located(self, source: &Arc<ConfigSource>) -> Finding {
        let span = source.visible(self.span);
        self.at(span).with_source(source)
    }

    /// Returns the code, which names the kind of problem.
    pub const fn code(&self) -> Code {
        self.code
    }

    /// Returns the severity, which depends on the code alone.
    pub const fn severity(&self) -> Severity {
        self.code.severity()
    }

    /// Returns the message: one line, without the place in the file. It contains no secret.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the suggested remedy, or `None` if there is none.
    pub fn help_text(&self) -> Option<&str> {
        self.help.as_deref()
    }

    /// Returns the range of bytes that the finding is about, in the configuration file or in its keys file.
    ///
    /// [`place`](Finding::place) names the file. Returns `None` if the finding is about no single place, or about a
    /// configuration built in code. Findings in the keys file of such a configuration have a span.
    pub fn span(&self) -> Option<Span> {
        (!self.span.is_unknown()).then_some(self.span)
    }

    /// Returns the name of the file, and the line and the column of the finding, both counted from 1.
    ///
    /// The file is the configuration file or its keys file. Returns `None` if the finding has no
    /// [`span`](Finding::span). Columns count characters.
    pub fn place(&self) -> Option<(&str, usize, usize)> {
        let source = self.source.as_ref()?;
        let (line, column) = source.line_and_column(self.span()?.start);
        Some((source.name(), line, column))
    }

    /// Returns the file of the finding, or `None` if it has none or the file could not be parsed and so is not quoted.
    fn quoted_source(&self) -> Option<&ConfigSource> {
        self.source.as_deref().filter(|source| source.is_quoted())
    }
}

/// Shows the message. Appends file, line and column if reports do not quote the file because it cannot be parsed.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match (self.quoted_source(), self.place()) {
            (None, Some((name, line, column))) => write!(f, ", in {name}, line {line}, column {column}"),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.as_str(), self.message)?;
        match self.place() {
            Some((name, line, column)) => write!(f, " ({name}:{line}:{column})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Finding {}

impl Diagnostic for Finding {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(self.code.as_str()))
    }

    fn severity(&self) -> Option<miette::Severity> {
        Some(match self.code.severity() {
            Severity::Error => miette::Severity::Error,
            Severity::Warning => miette::Severity::Warning,
            Severity::Advice => miette::Severity::Advice,
        })
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.help.as_ref().map(|help| Box::new(help) as Box<dyn fmt::Display + 'a>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.quoted_source().map(|source| source as &dyn SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let span = self.span()?;
        self.quoted_source()?;
        Some(Box::new(std::iter::once(LabeledSpan::new_with_span(Some(self.label.clone()), span))))
    }
}

/// The error of an invalid configuration: its findings, at least one of which is an error.
///
/// `Display` shows the first error. Warnings are included if the whole file could be read.
#[derive(Clone)]
pub struct Report {
    name: String,
    findings: Vec<Finding>,
}

impl Report {
    /// Creates a report about the configuration `name`. At least one of the findings must be an error.
    #[doc(hidden)] // for crate tidegate
    pub fn new(name: &str, findings: Vec<Finding>) -> Report {
        debug_assert!(findings.iter().any(|finding| finding.severity() == Severity::Error));
        Report { name: name.to_owned(), findings }
    }

    /// Returns all findings. Those without a place come first, the others are sorted by their byte offset in their
    /// file.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Returns all findings, in the order of [`Report::findings`].
    #[doc(hidden)] // for crate tidegate
    pub fn into_findings(self) -> Vec<Finding> {
        self.findings
    }

    /// Returns one line with the name of the configuration and the number of errors, such as `tidegate.toml is invalid: 2
    /// errors`.
    ///
    /// Only the message of the error if the file cannot be read, because then it is not known to be invalid.
    pub fn summary(&self) -> String {
        if let Some(unread) = self.unread() {
            return unread.message.clone();
        }
        let count = self.errors();
        format!("{} is invalid: {count} error{}", self.name, if count == 1 { "" } else { "s" })
    }

    /// Returns the only finding, if it is that the configuration file itself cannot be read. A finding about another file
    /// has a place.
    fn unread(&self) -> Option<&Finding> {
        match &self.findings[..] {
            [finding] if finding.span().is_none() => {
                Some(finding).filter(|finding| matches!(finding.code, Code::FileUnreadable | Code::UnknownFormat))
            }
            _ => None,
        }
    }

    /// Returns the number of errors among the findings, which is at least 1.
    pub fn errors(&self) -> usize {
        self.findings.iter().filter(|finding| finding.severity() == Severity::Error).count()
    }
}

/// Shows one line with the number of errors and the first of them. A [`miette`] handler shows all findings with their
/// places after that line; [`summary`](Report::summary) is the line without the first error.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary())?;
        if self.unread().is_some() {
            return Ok(());
        }
        f.write_str(if self.errors() == 1 { "" } else { ", the first" })?;
        match self.findings.iter().find(|finding| finding.severity() == Severity::Error) {
            Some(first) => write!(f, ": {first:?}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{self}")?;
        f.debug_list().entries(&self.findings).finish()
    }
}

impl std::error::Error for Report {}

impl Diagnostic for Report {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.unread().and_then(Diagnostic::code)
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.unread().and_then(Diagnostic::help)
    }

    fn related<'a>(&'a self) -> Option<Box<dyn Iterator<Item = &'a dyn Diagnostic> + 'a>> {
        if self.unread().is_some() {
            return None;
        }
        Some(Box::new(self.findings.iter().map(|finding| finding as &dyn Diagnostic)))
    }
}
