//! One rule.

use tollgate_core::{Cost, Limit};

use crate::answer::{BodyFormat, Style};
use crate::config::Secret;
use crate::failure::OnFailure;
use crate::identity::Subject;
use crate::rules::{Charge, Mode};

/// A rule of the builder: which requests, counted by which subject, against which limits.
///
/// ```
/// use tollgate::rules::{Charge, Rule, Rules};
/// use tollgate::{OnFailure, Subject};
///
/// // At most 5 failed logins a minute from one address and device. Without the store, no logins.
/// let login = Rule::new("login")
///     .post("/account/{tenant}/login")
///     .by(Subject::Ip)
///     .by(Subject::Cookie("device".into()))
///     .limit("5/min")
///     .charge(Charge::OnFailure)
///     .on_failure(OnFailure::Deny);
/// assert!(Rules::new().rule(login).build().is_ok());
/// ```
#[derive(Clone, Debug)]
#[must_use = "a rule has no effect until it is added to `Rules`"]
pub struct Rule {
    pub(super) name: String,
    pub(super) methods: Vec<String>,
    pub(super) paths: Vec<String>,
    pub(super) hosts: Vec<String>,
    pub(super) headers_required: Vec<(String, Option<Secret>)>,
    pub(super) by: Vec<Subject>,
    pub(super) limits: Vec<(Option<String>, LimitText)>,
    pub(super) is_by_plan: bool,
    pub(super) mode: Mode,
    pub(super) on_failure: Option<OnFailure>,
    pub(super) charge: Charge,
    pub(super) cost: Option<Cost>,
    pub(super) headers: Option<Vec<Style>>,
    pub(super) body: Option<BodyFormat>,
    pub(super) is_shield: bool,
}

/// A limit for a [`Rule`] or a [`Plan`](super::Plan): a text such as `10/min`, or a [`Limit`].
///
/// A text is parsed when the rules are built.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LimitText(pub(super) String);

impl From<&str> for LimitText {
    fn from(text: &str) -> LimitText {
        LimitText(text.to_owned())
    }
}

impl From<String> for LimitText {
    fn from(text: String) -> LimitText {
        LimitText(text)
    }
}

impl From<Limit> for LimitText {
    fn from(limit: Limit) -> LimitText {
        LimitText(limit.to_string())
    }
}

impl Rule {
    /// Creates a rule for all requests, counted by caller, without limits.
    ///
    /// At least one limit must be added. The name appears in metrics and logs and is part of the counters' names, so a
    /// rule that is renamed starts with new counters. It is 1 to 64 letters, digits, `-`, `_` and `.`.
    pub fn new(name: impl Into<String>) -> Rule {
        Rule {
            name: name.into(),
            methods: Vec::new(),
            paths: Vec::new(),
            hosts: Vec::new(),
            headers_required: Vec::new(),
            by: Vec::new(),
            limits: Vec::new(),
            is_by_plan: false,
            mode: Mode::default(),
            on_failure: None,
            charge: Charge::default(),
            cost: None,
            headers: None,
            body: None,
            is_shield: false,
        }
    }

    /// Adds the method `GET`, which includes `HEAD`, and a path pattern.
    ///
    /// A rule with several methods and paths matches each of its methods on each of its paths.
    pub fn get(self, path: impl Into<String>) -> Rule {
        self.method("GET").path(path)
    }

    /// Adds the method `POST` and a path pattern.
    ///
    /// A rule with several methods and paths matches each of its methods on each of its paths.
    pub fn post(self, path: impl Into<String>) -> Rule {
        self.method("POST").path(path)
    }

    /// Adds the method `PUT` and a path pattern.
    ///
    /// A rule with several methods and paths matches each of its methods on each of its paths.
    pub fn put(self, path: impl Into<String>) -> Rule {
        self.method("PUT").path(path)
    }

    /// Adds the method `PATCH` and a path pattern.
    ///
    /// A rule with several methods and paths matches each of its methods on each of its paths.
    pub fn patch(self, path: impl Into<String>) -> Rule {
        self.method("PATCH").path(path)
    }

    /// Adds the method `DELETE` and a path pattern.
    ///
    /// A rule with several methods and paths matches each of its methods on each of its paths.
    pub fn delete(self, path: impl Into<String>) -> Rule {
        self.method("DELETE").path(path)
    }

    /// Adds a method. A rule without methods matches all of them; `GET` includes `HEAD`.
    pub fn method(mut self, method: impl AsRef<str>) -> Rule {
        self.methods.push(method.as_ref().to_owned());
        self
    }

    /// Adds a path pattern: `/shorten`, `/users/{id}`, `/api/*`. A rule without patterns matches all paths.
    pub fn path(mut self, pattern: impl Into<String>) -> Rule {
        self.paths.push(pattern.into());
        self
    }

    /// Adds a host: `api.example.com`, `*.example.com`. A rule without hosts matches all of them.
    pub fn host(mut self, host: impl Into<String>) -> Rule {
        self.hosts.push(host.into());
        self
    }

    /// Requires that the request has this header, with any value. All required headers must match.
    pub fn header(mut self, name: impl Into<String>) -> Rule {
        self.headers_required.push((name.into(), None));
        self
    }

    /// Requires that the request has this header with this value. All required headers must match.
    pub fn header_equals(mut self, name: impl Into<String>, value: impl Into<String>) -> Rule {
        self.headers_required.push((name.into(), Some(Secret::new(value))));
        self
    }

    /// Adds a subject to count by. Requests share a counter if all subjects of the rule agree.
    ///
    /// Defaults to [`Subject::Caller`] alone; a [`shield`](Rule::shield) always counts by [`Subject::Ip`].
    pub fn by(mut self, subject: Subject) -> Rule {
        self.by.push(subject);
        self
    }

    /// Adds a limit, named after its window, such as `per-minute`.
    pub fn limit(mut self, limit: impl Into<LimitText>) -> Rule {
        self.limits.push((None, limit.into()));
        self
    }

    /// Adds a limit with a name, which is part of the counter's name and appears in headers: 1 to 64 of `a-z0-9-`.
    pub fn named_limit(mut self, name: impl Into<String>, limit: impl Into<LimitText>) -> Rule {
        self.limits.push((Some(name.into()), limit.into()));
        self
    }

    /// Uses the limits of the caller's plan. The rule must not have limits of its own then.
    pub fn limits_from_plan(mut self) -> Rule {
        self.is_by_plan = true;
        self
    }

    /// Sets whether the rule refuses requests, only counts them, or is ignored. Defaults to [`Mode::Enforce`].
    pub fn mode(mut self, mode: Mode) -> Rule {
        self.mode = mode;
        self
    }

    /// Sets what happens when the store does not answer. Defaults to that of [`Rules`](super::Rules::on_failure).
    pub fn on_failure(mut self, on_failure: OnFailure) -> Rule {
        self.on_failure = Some(on_failure);
        self
    }

    /// Sets which requests are charged, by their response. Defaults to [`Charge::Always`].
    pub fn charge(mut self, charge: Charge) -> Rule {
        self.charge = charge;
        self
    }

    /// Sets the units that a request takes, at least 1. Defaults to 1.
    pub fn cost(mut self, cost: impl Into<Cost>) -> Rule {
        self.cost = Some(cost.into());
        self
    }

    /// Sets the styles of rate-limit headers for this rule. Defaults to those of [`Rules`](super::Rules::headers).
    pub fn headers(mut self, styles: impl IntoIterator<Item = Style>) -> Rule {
        self.headers = Some(styles.into_iter().collect());
        self
    }

    /// Sets the format of the body of refusals. Defaults to JSON, and to text for a [`shield`](Rule::shield).
    ///
    /// Unlike a file, code may pass a [`BodyFormat::custom`].
    pub fn body(mut self, format: BodyFormat) -> Rule {
        self.body = Some(format);
        self
    }

    /// Makes the rule a shield: counted by address in process memory, and checked before all other rules.
    pub fn shield(mut self) -> Rule {
        self.is_shield = true;
        self
    }
}
