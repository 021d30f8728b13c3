//! Finds the conditions of a rule that a request does not meet.

use tollgate::config::{Config, Exempt, HeaderTest, Loaded, Loader, MatchTable, OneOrMany, RuleTable, Spanned};
use tollgate::rules::{RequestView, RuleSet};

/// The conditions of all rules, each compiled by itself.
pub(super) struct RuleConditions {
    of_rules: Vec<Vec<Condition>>,
    /// A rule without conditions, in a configuration with the exempt paths.
    not_exempt: Option<RuleSet>,
}

struct Condition {
    /// The explanation if the condition is not met.
    unmet: String,
    /// A rule with this condition alone.
    alone: Option<RuleSet>,
}

impl RuleConditions {
    /// Compiles the conditions of all rules.
    pub(super) fn new(loaded: &Loaded) -> RuleConditions {
        let of_rule = |rule: &Spanned<RuleTable>| conditions(&rule.matches);
        let exempt = Exempt { paths: loaded.config.exempt.paths.clone(), ..Exempt::default() };
        RuleConditions {
            of_rules: loaded.config.rules.iter().map(of_rule).collect(),
            not_exempt: compile(Config { exempt, ..Config::default() }, MatchTable::default()),
        }
    }

    /// Returns explanations for the conditions of the rule at `index` in the file that the request does not meet.
    pub(super) fn unmet(&self, index: usize, request: &RequestView<'_>) -> Vec<String> {
        let conditions = self.of_rules.get(index).map_or(&[][..], |conditions| conditions);
        let is_unmet =
            |condition: &&Condition| condition.alone.as_ref().is_some_and(|rules| rules.matching(request).is_empty());
        conditions.iter().filter(is_unmet).map(|condition| condition.unmet.clone()).collect()
    }

    /// Returns whether the path of the request is exempt.
    pub(super) fn is_exempt_path(&self, request: &RequestView<'_>) -> bool {
        self.not_exempt.as_ref().is_some_and(|rules| rules.matching(request).is_empty())
    }
}

fn conditions(table: &MatchTable) -> Vec<Condition> {
    let mut conditions = Vec::new();
    let mut add = |unmet: String, table: MatchTable| {
        conditions.push(Condition { unmet, alone: compile(Config::default(), table) });
    };
    if let Some(methods) = &table.methods {
        let unmet = format!("the method is none of {}", list(methods));
        add(unmet, MatchTable { methods: Some(methods.clone()), ..MatchTable::default() });
    }
    if let Some(path) = &table.path {
        let unmet = format!("the path is none of {}", list(path));
        add(unmet, MatchTable { path: Some(path.clone()), ..MatchTable::default() });
    }
    if let Some(host) = &table.host {
        let unmet = format!("the host is none of {}", list(host));
        add(unmet, MatchTable { host: Some(host.clone()), ..MatchTable::default() });
    }
    for (name, test) in &table.headers {
        // The expected value of a header may be a secret.
        let unmet = match test {
            HeaderTest::Present => format!("there is no header {}", **name),
            _ => format!("the header {} does not have the expected value", **name),
        };
        let headers = [(name.clone(), test.clone())].into();
        add(unmet, MatchTable { headers, ..MatchTable::default() });
    }
    conditions
}

fn compile(config: Config, matches: MatchTable) -> Option<RuleSet> {
    let mut rule = RuleTable::new("alone", ["1/s"]).with_by(["ip"]);
    rule.matches = matches.into();
    let loader = Loader::new().environment(|_| None);
    loader.compile(config.with_rule(rule)).ok().map(|loaded| loaded.rules)
}

fn list(texts: &OneOrMany<Spanned<String>>) -> String {
    texts.iter().map(|text| text.as_str()).collect::<Vec<_>>().join(", ")
}
