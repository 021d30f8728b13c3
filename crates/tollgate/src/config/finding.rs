//! What is wrong, or odd, about a configuration: each finding with a stable code, the place, and a remedy.
//!
//! Errors keep a file from being used; warnings and advice do not. `docs/findings.md` explains every code with an
//! example. A finding carries its own (masked) source, so each can be printed as a report by itself.

use std::fmt;
use std::sync::Arc;

use miette::{Diagnostic, LabeledSpan, SourceCode};

use super::source::Source;
use super::span::Span;

/// How much a finding matters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Severity {
    /// It works, and one should know.
    Advice,
    /// It works, but probably not as meant.
    Warning,
    /// The file is not used.
    Error,
}

macro_rules! codes {
    ($($variant:ident $name:literal $severity:ident $doc:literal,)*) => {
        /// What kind of finding it is. The names are stable: scripts may rely on them.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum Code {
            $(#[doc = $doc] $variant,)*
        }

        impl Code {
            /// All of them.
            pub const ALL: &[Code] = &[$(Code::$variant,)*];

            /// The name in reports and in the documentation.
            pub const fn name(self) -> &'static str {
                match self { $(Code::$variant => $name,)* }
            }

            /// How much it matters.
            pub const fn severity(self) -> Severity {
                match self { $(Code::$variant => Severity::$severity,)* }
            }

            /// Returns whether an error with this code holds even if other parts of the file could not be read.
            pub(crate) fn holds_without_the_rest(self) -> bool {
                use Code::{DefaultPlanMissing, ExpectationUnmet, PlansMissing, SecretMissing, UnknownPlan};
                let is_absence =
                    matches!(self, DefaultPlanMissing | ExpectationUnmet | PlansMissing | SecretMissing | UnknownPlan);
                self.severity() == Severity::Error && !is_absence
            }
        }
    };
}

codes! {
    // Reading the file.
    FileUnreadable "file-unreadable" Error "A file cannot be read.",
    UnknownFormat "unknown-format" Error "The file's name ends neither in `.toml` nor in `.yaml` or `.yml`.",
    Syntax "syntax" Error "The text is no TOML or YAML.",
    UnknownField "unknown-field" Error "There is no such field.",
    MissingField "missing-field" Error "A field is required here.",
    WrongType "wrong-type" Error "The value is of another kind than expected.",
    InvalidValue "invalid-value" Error "The value is none of those accepted.",
    // Single values.
    InvalidLimit "invalid-limit" Error "A limit cannot be read or is out of range, such as a quota of 0.",
    InvalidTime "invalid-time" Error "A time cannot be read or is out of range.",
    InvalidNetwork "invalid-network" Error "An address or a network cannot be read.",
    InvalidHeader "invalid-header" Error "A header's name cannot be one.",
    InvalidMethod "invalid-method" Error "A method's name cannot be one.",
    InvalidPath "invalid-path" Error "A path pattern that no path can match, or that says more than a pattern can.",
    InvalidHost "invalid-host" Error "A host pattern that no host can match.",
    InvalidName "invalid-name" Error "The name of a rule, a limit or a plan has characters that a name cannot have.",
    InvalidSubject "invalid-subject" Error "`by` names a subject that does not exist.",
    InvalidKey "invalid-key" Error "An entry for an API key does not say which key, says it twice, or says one that no request can show.",
    InvalidJwt "invalid-jwt" Error "The settings for verifying JWTs contradict each other or the key cannot be used.",
    InvalidStore "invalid-store" Error "The store is none of those there are.",
    SecretMissing "secret-missing" Error "A secret is required and not given, or given in several ways.",
    // What does not fit together.
    ConflictingHeaders "conflicting-headers" Error "`ietf` and `draft-6` exclude each other.",
    DuplicateRule "duplicate-rule" Error "Two rules have the same name, so they would share counters.",
    DuplicateLimit "duplicate-limit" Error "Two limits of a rule have the same name, so they would share a counter.",
    DuplicateKey "duplicate-key" Error "An API key is listed twice.",
    UnknownPlan "unknown-plan" Error "A plan is named that does not exist.",
    PlansMissing "plans-missing" Error "A rule takes its limits from plans, and there are none.",
    DefaultPlanMissing "default-plan-missing" Error "Plans are used, and `default` is not among them.",
    LimitsMissing "limits-missing" Error "A rule, a plan or a key has an empty list of limits.",
    TooManyLimits "too-many-limits" Error "More limits apply to one request than can be decided together.",
    CostNeverFits "cost-never-fits" Error "A rule's cost is more than one of its limits can ever hold.",
    ShieldNotByAddress "shield-not-by-address" Error "A shield rule counts by something else than the address.",
    ShieldNotSpaced "shield-not-spaced" Error "A shield rule has a leaky bucket, and a shield never holds a request.",
    // What may be half a file.
    ExpectationUnmet "expectation-unmet" Error "The number of rules or keys is another one than `expect` says.",
    FileCutOff "file-cut-off" Error "The file has `expect` and does not end with a line end; or, at a reload, it is empty or only the beginning of the one in force.",
    RulesGone "rules-gone" Error "A reload has no rules where there were some, and does not say `rules = []`.",
    KeysGone "keys-gone" Error "A reload has no keys where there were some, and does not say `keys = []`.",
    ExpectationGone "expectation-gone" Error "A reload has no `expect` any more.",
    Removed "removed" Warning "A reload removes parts of the configuration.",
    LineEndGone "line-end-gone" Warning "A reload changes the file, which does not end with a line end any more.",
    // What is allowed, and probably not meant.
    ProxiesUntrusted "proxies-untrusted" Warning "A forwarding header is named, and no proxy is trusted.",
    ProxiesEverybody "proxies-everybody" Warning "Everybody is trusted as a proxy, so everybody chooses their address.",
    PlanHeaderUntrusted "plan-header-untrusted" Warning "A plan header is named and no proxy is trusted to set it.",
    PlanHashUnread "plan-hash-unread" Warning "A Redis hash of plans is named and the store is no Redis.",
    RuleUnreachable "rule-unreachable" Warning "No request can reach the rule.",
    RuleTwice "rule-twice" Warning "Two rules match the same requests and count them by the same subject.",
    RedundantLimit "redundant-limit" Warning "A limit never decides, because another one always refuses first.",
    PlanUnused "plan-unused" Warning "A plan that nothing in the file gives to anybody, or that no rule asks for.",
    KeyLimitsUnused "key-limits-unused" Warning "A key has limits of its own, and no rule takes its limits from plans.",
    AnonymousPlanMissing "anonymous-plan-missing" Warning "Callers without identity get the `default` plan.",
    SubjectUnknowable "subject-unknowable" Warning "A rule counts by something that no request can prove.",
    SubjectChosenByClient "subject-chosen-by-client" Warning "A rule counts only by what the client itself may choose.",
    CountDeniedRefunded "count-denied-refunded" Warning "`count_denied` with a refund: a refused request has no outcome to be refunded by.",
    InstancesUnset "instances-unset" Warning "On a shared store, and the number of instances is not said.",
    MemoryNotShared "memory-not-shared" Warning "Several instances, and the counters are in the memory of each.",
    ExemptEverybody "exempt-everybody" Warning "The exempt lists let everybody pass.",
    DeadlineLong "deadline-long" Warning "The deadline is so long that a store that hangs will be felt.",
    NoRules "no-rules" Warning "There is no rule, so nothing is limited.",
    KillSwitchOn "kill-switch-on" Warning "The kill switch is on, so nothing is limited.",
    ShadowOn "shadow-on" Advice "All rules are in shadow mode, so no limit refuses anybody.",
}

/// One thing that is wrong or odd, where it is, and what to do about it. It is a [`miette::Diagnostic`].
#[derive(Clone)]
pub struct Finding {
    code: Code,
    message: String,
    help: Option<String>,
    span: Span,
    label: String,
    source: Option<Arc<Source>>,
}

impl Finding {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Finding {
        Finding {
            code,
            message: message.into(),
            help: None,
            span: Span::default(),
            label: "here".to_owned(),
            source: None,
        }
    }

    pub(crate) fn help(self, help: impl Into<String>) -> Finding {
        Finding { help: Some(help.into()), ..self }
    }

    pub(crate) fn label(self, label: impl Into<String>) -> Finding {
        Finding { label: label.into(), ..self }
    }

    pub(crate) fn at(self, span: Span) -> Finding {
        Finding { span, ..self }
    }

    /// Sets the source. Without a file to point into, the message begins with the name of the value.
    pub(crate) fn of(self, source: &Arc<Source>) -> Finding {
        match source.value(self.span) {
            Some(value) => Finding { message: format!("{value}: {}", self.message), span: Span::default(), ..self },
            None => Finding { source: Some(source.clone()), ..self },
        }
    }

    /// Sets the file of the finding, and moves an empty span to a character of the file.
    pub(crate) fn located(self, source: &Arc<Source>) -> Finding {
        let span = source.visible(self.span);
        self.at(span).of(source)
    }

    /// What kind of finding it is.
    pub const fn code(&self) -> Code {
        self.code
    }

    /// How much it matters.
    pub const fn severity(&self) -> Severity {
        self.code.severity()
    }

    /// What is wrong, in one line.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What to do about it.
    pub fn help_text(&self) -> Option<&str> {
        self.help.as_deref()
    }

    /// The bytes of the file that it is about, if known.
    pub fn span(&self) -> Option<Span> {
        (!self.span.is_unknown()).then_some(self.span)
    }

    /// The file, and the line and column (from 1) where it begins, if known.
    pub fn place(&self) -> Option<(&str, usize, usize)> {
        let source = self.source.as_ref()?;
        let (line, column) = source.line_and_column(self.span()?.start);
        Some((source.name(), line, column))
    }

    /// The file, if reports may quote it.
    fn quoted_source(&self) -> Option<&Source> {
        self.source.as_deref().filter(|source| source.is_quoted())
    }
}

/// The message; and the place, if the file is not quoted because it cannot be parsed.
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
        write!(f, "{}: {}", self.code.name(), self.message)?;
        match self.place() {
            Some((name, line, column)) => write!(f, " ({name}:{line}:{column})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Finding {}

impl Diagnostic for Finding {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(self.code.name()))
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

/// Why a configuration is not used: at least one error, and whatever else was found.
#[derive(Clone)]
pub struct Report {
    name: String,
    findings: Vec<Finding>,
}

impl Report {
    pub(crate) fn new(name: &str, findings: Vec<Finding>) -> Report {
        debug_assert!(findings.iter().any(|finding| finding.severity() == Severity::Error));
        Report { name: name.to_owned(), findings }
    }

    /// Everything that was found, in the order of the file.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Returns all findings, in the order of the file.
    pub(crate) fn into_findings(self) -> Vec<Finding> {
        self.findings
    }

    /// How many of the findings are errors.
    pub fn errors(&self) -> usize {
        self.findings.iter().filter(|finding| finding.severity() == Severity::Error).count()
    }
}

/// One line with the first error; a renderer of [`miette`] shows all of them, and the places.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.errors() {
            1 => write!(f, "{} cannot be used: 1 error", self.name)?,
            count => write!(f, "{} cannot be used: {count} errors, the first", self.name)?,
        }
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
    fn related<'a>(&'a self) -> Option<Box<dyn Iterator<Item = &'a dyn Diagnostic> + 'a>> {
        Some(Box::new(self.findings.iter().map(|finding| finding as &dyn Diagnostic)))
    }
}
