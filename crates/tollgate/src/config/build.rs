//! Configurations made in code: the same types, without a file.

use super::finding::Report;
use super::forms::{LimitEntry, Limits, OneOrMany};
use super::load::{Loaded, Loader};
use super::span::Spanned;
use super::types::{Config, MatchTable, PlanTable, RuleTable};
use crate::failure::OnFailure;
use crate::rules::{Charge, Mode};

/// ```
/// use tollgate::config::{Config, RuleTable};
///
/// let loaded = Config::default()
///     .with_trusted_proxies(["10.0.0.0/8"])
///     .with_plan("default", ["60/min"])
///     .with_plan("anonymous", ["30/min"])
///     .with_rule(RuleTable::by_plan("api").with_path(["/v1/*"]))
///     .with_rule(RuleTable::new("shorten", ["10/min"]).with_methods(["POST"]).with_path(["/shorten"]).with_by(["ip"]))
///     .compile()?;
/// assert_eq!(loaded.rules.rules().len(), 2);
/// # Ok::<(), tollgate::config::Report>(())
/// ```
impl Config {
    /// With one rule more.
    #[must_use]
    pub fn with_rule(mut self, rule: RuleTable) -> Config {
        self.rules.push(rule.into());
        self
    }

    /// With one plan more, or another one by this name.
    #[must_use]
    pub fn with_plan<'t>(mut self, name: &str, limits: impl IntoIterator<Item = &'t str>) -> Config {
        let table = PlanTable { limits: limit_list(limits).into(), upgrade_url: None };
        self.plans.insert(name.to_owned().into(), table);
        self
    }

    /// Trusting these proxies about the client's address.
    #[must_use]
    pub fn with_trusted_proxies<'t>(self, networks: impl IntoIterator<Item = &'t str>) -> Config {
        Config { trusted_proxies: texts(networks), ..self }
    }

    /// Checks and compiles what was made in code.
    ///
    /// # Errors
    /// When it cannot be used. The report has everything that was found.
    pub fn compile(self) -> Result<Loaded, Report> {
        Loader::new().compile(self)
    }
}

impl RuleTable {
    /// A rule for all requests, by caller, with limits of its own.
    pub fn new<'t>(name: &str, limits: impl IntoIterator<Item = &'t str>) -> RuleTable {
        RuleTable::with_limits(name, Limits::Own(limit_list(limits)))
    }

    /// A rule for all requests, by caller, with the limits of the caller's plan.
    pub fn by_plan(name: &str) -> RuleTable {
        RuleTable::with_limits(name, Limits::Plan)
    }

    fn with_limits(name: &str, limits: Limits) -> RuleTable {
        RuleTable {
            name: name.to_owned().into(),
            matches: MatchTable::default().into(),
            by: None,
            limits: limits.into(),
            mode: Mode::default(),
            on_failure: None,
            charge: Charge::default().into(),
            cost: None,
            headers: None,
            body: None,
            store: None,
        }
    }

    /// Only for these methods.
    #[must_use]
    pub fn with_methods<'t>(self, methods: impl IntoIterator<Item = &'t str>) -> RuleTable {
        let methods = Some(texts(methods).into());
        self.with_match(|table| MatchTable { methods, ..table })
    }

    /// Only for these paths.
    #[must_use]
    pub fn with_path<'t>(self, paths: impl IntoIterator<Item = &'t str>) -> RuleTable {
        let path = Some(texts(paths).into());
        self.with_match(|table| MatchTable { path, ..table })
    }

    /// Only for these hosts.
    #[must_use]
    pub fn with_host<'t>(self, hosts: impl IntoIterator<Item = &'t str>) -> RuleTable {
        let host = Some(texts(hosts).into());
        self.with_match(|table| MatchTable { host, ..table })
    }

    /// Counted by these, all together.
    #[must_use]
    pub fn with_by<'t>(self, kinds: impl IntoIterator<Item = &'t str>) -> RuleTable {
        RuleTable { by: Some(texts(kinds).into()), ..self }
    }

    /// Refusing, only counting, or off.
    #[must_use]
    pub fn with_mode(self, mode: Mode) -> RuleTable {
        RuleTable { mode, ..self }
    }

    /// Giving units back by how a request ends.
    #[must_use]
    pub fn with_charge(self, charge: Charge) -> RuleTable {
        RuleTable { charge: charge.into(), ..self }
    }

    /// With this answer when the store gives none.
    #[must_use]
    pub fn with_on_failure(self, on_failure: OnFailure) -> RuleTable {
        RuleTable { on_failure: Some(on_failure), ..self }
    }

    fn with_match(self, change: impl FnOnce(MatchTable) -> MatchTable) -> RuleTable {
        RuleTable { matches: change(self.matches.into_value()).into(), ..self }
    }
}

fn texts<'t>(list: impl IntoIterator<Item = &'t str>) -> OneOrMany<Spanned<String>> {
    OneOrMany(list.into_iter().map(|text| text.to_owned().into()).collect())
}

fn limit_list<'t>(list: impl IntoIterator<Item = &'t str>) -> OneOrMany<Spanned<LimitEntry>> {
    OneOrMany(list.into_iter().map(|text| LimitEntry::Text(text.to_owned()).into()).collect())
}
