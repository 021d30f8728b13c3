//! Finds the conditions of a rule that a request does not meet, for an explanation.
//!
//! Each condition is compiled as a rule that has this condition alone. So it is decided by the matcher of the rules,
//! and there is no second implementation that could differ from it.

use super::forms::{HeaderTest, LimitEntry, Limits, OneOrMany, OptionalList};
use super::load::{Loaded, Loader};
use super::span::Spanned;
use super::types::{Config, Exempt, MatchTable, RuleTable};
use crate::rules::{Charge, Mode, RequestView, RuleSet};

/// The conditions of all rules of a configuration, which explain why a rule does not match a request.
#[derive(Debug)]
pub struct RuleConditions {
    of_rules: Vec<Vec<Condition>>,
    /// A rule for all requests, with the exempt paths of the configuration.
    not_exempt: Option<RuleSet>,
}

#[derive(Debug)]
struct Condition {
    /// A phrase for a request that does not meet the condition.
    unmet: String,
    /// A rule with this condition alone. `None` if it cannot be compiled, which counts as met.
    alone: Option<RuleSet>,
}

impl RuleConditions {
    /// Compiles each condition of each rule. Takes about as long as loading the configuration, so it is not for every
    /// request.
    pub fn new(loaded: &Loaded) -> RuleConditions {
        let exempt = Exempt { paths: loaded.config.exempt.paths.clone(), ..Exempt::default() };
        RuleConditions {
            of_rules: loaded.config.rules.iter().map(|rule| conditions(&rule.matches, &loaded.config)).collect(),
            not_exempt: compile(Config { exempt, ..Config::default() }, MatchTable::default()),
        }
    }

    /// Returns the conditions of a rule that a request does not meet, each as a phrase such as `the method is not
    /// GET`.
    ///
    /// `index` is that of the rule in [`RuleSet::rules`]. The list is empty if the request meets all conditions, or if
    /// there is no such rule. The mode of the rule, exemptions and the kill switch are not considered. No phrase
    /// contains the value that a header is compared with.
    pub fn unmet(&self, index: usize, request: &RequestView<'_>) -> Vec<String> {
        let conditions = self.of_rules.get(index).map_or(&[][..], |conditions| conditions);
        let is_unmet =
            |condition: &&Condition| condition.alone.as_ref().is_some_and(|rules| rules.matching(request).is_empty());
        conditions.iter().filter(is_unmet).map(|condition| condition.unmet.clone()).collect()
    }

    /// Returns whether the path of a request matches `exempt.paths`, so that the request is never limited.
    ///
    /// Unlike [`Matched::is_exempt_path`](crate::rules::Matched::is_exempt_path), it is `true` even if no rule matches.
    pub fn is_exempt_path(&self, request: &RequestView<'_>) -> bool {
        self.not_exempt.as_ref().is_some_and(|rules| rules.matching(request).is_empty())
    }
}

fn conditions(table: &MatchTable, config: &Config) -> Vec<Condition> {
    let mut conditions = Vec::new();
    let mut add = |unmet: String, table: MatchTable| {
        // A request may also meet the condition on methods by one of these headers.
        let method_override_headers = config.method_override_headers.clone();
        let config = Config { method_override_headers, ..Config::default() };
        conditions.push(Condition { unmet, alone: compile(config, table) });
    };
    if let Some(methods) = &table.methods {
        let unmet = format!("the method is not {}", list(methods));
        add(unmet, MatchTable { methods: Some(methods.clone()), ..MatchTable::default() });
    }
    if let Some(path) = &table.path {
        let unmet = format!("the path does not match {}", list(path));
        add(unmet, MatchTable { path: Some(path.clone()), ..MatchTable::default() });
    }
    if let Some(host) = &table.host {
        let unmet = format!("the host does not match {}", list(host));
        add(unmet, MatchTable { host: Some(host.clone()), ..MatchTable::default() });
    }
    for (name, test) in &table.headers {
        let unmet = match test {
            HeaderTest::Present => format!("there is no header {}", **name),
            HeaderTest::Equals(_) => format!("the header {} does not have the expected value", **name),
        };
        let headers = [(name.clone(), test.clone())].into();
        add(unmet, MatchTable { headers, ..MatchTable::default() });
    }
    conditions
}

/// Compiles `config` with one rule, which replaces its rules and has these conditions and some limit. Returns `None` if
/// a condition is invalid, or `config` has another error.
fn compile(config: Config, matches: MatchTable) -> Option<RuleSet> {
    let limit = LimitEntry::Text("1/s".to_owned());
    let rule = RuleTable {
        name: "alone".to_owned().into(),
        matches: matches.into(),
        by: None,
        limits: Limits::Own(OneOrMany(vec![limit.into()])).into(),
        mode: Mode::default(),
        on_failure: None,
        charge: Charge::default().into(),
        cost: None,
        headers: None,
        body: None,
        store: None,
    };
    let config = Config { rules: OptionalList(Some(vec![rule.into()])), ..config };
    let loader = Loader::new().environment(|_| None);
    loader.compile(config, Vec::new()).ok().map(|loaded| loaded.rules)
}

fn list(texts: &OneOrMany<Spanned<String>>) -> String {
    texts.iter().map(|text| text.as_str()).collect::<Vec<_>>().join(", ")
}
