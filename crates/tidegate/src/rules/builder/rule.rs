//! One rule.

use tidegate_config::{
    BodyEntry, BodyInCode, HeaderTest, LimitEntry, LimitTable, Limits, OneOrMany, RuleStore, RuleTable, Spanned,
};
use tidegate_core::{Cost, Limit, OnFailure};

use crate::answer::{BodyFormat, Style};
use crate::identity::Subject;
use crate::rules::{Charge, Mode};

/// The entry that stands for the limits of the caller's plan in a list of limits.
const PLAN: &str = "plan";

/// A builder for one rule: which requests it matches, by which subject it counts them, and against which limits.
///
/// ```
/// use tidegate::rules::{Charge, Rule, Rules};
/// use tidegate::{OnFailure, Subject};
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
pub struct Rule(pub(super) RuleTable);

/// The text of a limit for a [`Rule`], a [`Plan`](super::Plan) or a [`ListedKey`](super::ListedKey), such as `10/min`.
///
/// Made from a string, which is parsed when the rules are built, or from a [`Limit`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LimitText(pub(in crate::rules) String);

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
    /// Creates a rule that matches all requests, counts them by caller, and has no limits yet.
    ///
    /// At least one limit must be added, or building the rules fails. The name has 1 to 64 letters, digits, `-`, `_` and
    /// `.`. It appears in metrics and logs and is part of the counters' names, so a rule that is renamed starts with new
    /// counters.
    pub fn new(name: impl Into<String>) -> Rule {
        Rule(RuleTable { name: name.into().into(), ..RuleTable::default() })
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

    /// Adds a method that the rule matches. A rule without methods matches all of them.
    ///
    /// `GET` includes `HEAD`. Case is ignored.
    pub fn method(mut self, method: impl AsRef<str>) -> Rule {
        add_text(&mut self.0.matches.methods, method.as_ref());
        self
    }

    /// Adds a group: the rule applies only to callers in one of its groups. A rule without groups applies to all callers.
    ///
    /// A caller has the groups of its API key; see [`ListedKey::group`](super::ListedKey::group) and
    /// [`KnownKey::groups`](crate::identity::KnownKey::groups). Building the rules fails if the name is not 1 to 64
    /// letters, digits, `-`, `_` and `.`, or if the rule is a shield.
    pub fn group(mut self, group: impl Into<String>) -> Rule {
        add_text(&mut self.0.matches.groups, group);
        self
    }

    /// Adds a path pattern. A rule without patterns matches all paths.
    ///
    /// `/shorten` matches this path, `/users/{id}` any one segment in place of `{id}`, and `/api/*` the path `/api` and
    /// everything below it. Trailing slashes are ignored. Other spellings of a path that a server may take for it match,
    /// too. Upper and lower case differ.
    pub fn path(mut self, pattern: impl Into<String>) -> Rule {
        add_text(&mut self.0.matches.path, pattern);
        self
    }

    /// Adds a host pattern, without a port. A rule without patterns matches all hosts.
    ///
    /// `api.example.com` matches this host, `*.example.com` every host below `example.com`, but not that domain itself.
    pub fn host(mut self, host: impl Into<String>) -> Rule {
        add_text(&mut self.0.matches.host, host);
        self
    }

    /// Requires that the request has this header, with any value. All required headers must match.
    ///
    /// A later requirement on the same name replaces this one. Building fails if two names differ only in case.
    pub fn header(mut self, name: impl Into<String>) -> Rule {
        self.0.matches.headers.insert(name.into().into(), HeaderTest::Present);
        self
    }

    /// Requires that a header of the request with this name has exactly this value. All required headers must match.
    ///
    /// A later requirement on the same name replaces this one. Building fails if two names differ only in case.
    pub fn header_equals(mut self, name: impl Into<String>, value: impl Into<String>) -> Rule {
        self.0.matches.headers.insert(name.into().into(), HeaderTest::Equals(value.into()));
        self
    }

    /// Adds a subject to count by, up to eight. Requests share a counter if they agree in all subjects of the rule.
    ///
    /// Building fails if a subject is added twice, or if [`Subject::Global`] is combined with others.
    ///
    /// Without this method, a rule counts by [`Subject::Caller`], and a [`shield`](Rule::shield) by [`Subject::Ip`], the only
    /// subject that a shield accepts.
    pub fn by(mut self, subject: Subject) -> Rule {
        add_text(&mut self.0.by, subject.to_string());
        self
    }

    /// Adds a limit, such as `10/min`. Building the rules fails if the text is not a limit.
    ///
    /// Its name is derived from its window: `per-minute`, or `per-minute-2` if that name is taken. The name is part of
    /// the counter's name, so a limit whose window changes starts with a new counter. Clients see it in headers and in
    /// the bodies of refusals. [`named_limit`](Rule::named_limit) sets another.
    pub fn limit(self, limit: impl Into<LimitText>) -> Rule {
        self.add_limit(limit_entry(None, limit.into()))
    }

    /// Adds a limit with a name of 1 to 64 characters `a-z`, `0-9` and `-`, which no other limit of the rule has.
    ///
    /// Building the rules fails if the text is not a limit, or if the name is invalid or taken.
    ///
    /// The name is part of the counter's name, and clients see it in headers and in the bodies of refusals.
    pub fn named_limit(self, name: impl Into<String>, limit: impl Into<LimitText>) -> Rule {
        self.add_limit(limit_entry(Some(name.into()), limit.into()))
    }

    /// Makes the rule apply the limits of the caller's [plan](super::Rules::plan), or its API key's own limits.
    ///
    /// Building fails if the rule has limits of its own, too, or if there is no plan `default`.
    pub fn limits_from_plan(mut self) -> Rule {
        if matches!(&*self.0.limits, Limits::Own(list) if list.is_empty()) {
            self.0.limits = Limits::Plan.into();
            return self;
        }
        // The compiler reports it, as for a file with `plan` in a list of limits.
        self.add_limit(LimitEntry::Text(PLAN.to_owned()))
    }

    /// Sets whether the rule denies requests, only counts them, or is ignored. Defaults to [`Mode::Enforce`].
    pub fn mode(mut self, mode: Mode) -> Rule {
        self.0.mode = mode;
        self
    }

    /// Sets how the rule is decided when the store does not answer. Defaults to
    /// [`Rules::on_failure`](super::Rules::on_failure).
    pub fn on_failure(mut self, on_failure: OnFailure) -> Rule {
        self.0.on_failure = Some(on_failure);
        self
    }

    /// Sets which requests are charged, depending on their responses. Defaults to [`Charge::Always`].
    pub fn charge(mut self, charge: Charge) -> Rule {
        self.0.charge = charge.into();
        self
    }

    /// Sets the units that the rule charges for a request. Defaults to 1.
    ///
    /// A request with a cost of its own (`RateLimitLayer::cost`, or [`RequestOptions`](crate::engine::RequestOptions))
    /// is charged that instead.
    ///
    /// Building fails if the cost is 0, or if it is more than one of the limits can ever admit.
    pub fn cost(mut self, cost: impl Into<Cost>) -> Rule {
        self.0.cost = Some(cost.into().units().into());
        self
    }

    /// Sets the styles of the rate-limit headers that show this rule's limits. Defaults to
    /// [`Rules::headers`](super::Rules::headers). An empty list hides them.
    pub fn headers(mut self, styles: impl IntoIterator<Item = Style>) -> Rule {
        self.0.headers = Some(styles.into_iter().collect::<Vec<_>>().into());
        self
    }

    /// Sets the format of the body of a refusal by this rule. Defaults to [`Rules::body`](super::Rules::body).
    ///
    /// A [`BodyFormat::custom`], which a configuration file cannot name, is accepted, too.
    pub fn body(mut self, format: BodyFormat) -> Rule {
        self.0.body = Some(BodyEntry::InCode(BodyInCode::new(format)));
        self
    }

    /// Makes the rule a shield: counted by client address in process memory, and checked before all other rules.
    ///
    /// A request that it denies causes no call to the store. Building fails if the rule counts by another subject, has a
    /// leaky bucket, or takes its limits from plans.
    pub fn shield(mut self) -> Rule {
        self.0.store = Some(RuleStore::Memory.into());
        self
    }

    fn add_limit(mut self, entry: LimitEntry) -> Rule {
        match &mut *self.0.limits {
            Limits::Own(list) => list.0.push(entry.into()),
            Limits::Plan => {
                let plan = LimitEntry::Text(PLAN.to_owned());
                self.0.limits = Limits::Own(OneOrMany(vec![plan.into(), entry.into()])).into();
            }
        }
        self
    }
}

/// Adds a text to a list in a table.
pub(super) fn add_text(list: &mut Option<Spanned<OneOrMany<Spanned<String>>>>, text: impl Into<String>) {
    list.get_or_insert_default().0.push(text.into().into());
}

/// Returns the entry of a list of limits for a limit and its name, if it has one.
pub(super) fn limit_entry(name: Option<String>, LimitText(text): LimitText) -> LimitEntry {
    let Some(name) = name else { return LimitEntry::Text(text) };
    let (name, limit) = (Some(name.into()), Some(text.into()));
    LimitEntry::Table(Box::new(LimitTable { name, limit, ..LimitTable::default() }))
}
