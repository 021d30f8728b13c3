//! Which conditions of a rule a request does not meet.

use tollgate::config::{Config, Exempt, HeaderTest, Loaded, Loader, MatchTable, OneOrMany, RuleTable, Spanned};
use tollgate::rules::{RequestView, RuleSet};

/// The conditions of all rules, each compiled by itself.
pub(super) struct Conditions {
    of_rules: Vec<Vec<Condition>>,
    /// A rule for everything, beside the exempt paths.
    not_exempt: Option<RuleSet>,
}

struct Condition {
    /// What is expected.
    expected: String,
    /// A rule with this condition alone.
    alone: Option<RuleSet>,
}

impl Conditions {
    pub(super) fn new(loaded: &Loaded) -> Conditions {
        let of_rule = |rule: &Spanned<RuleTable>| conditions(&rule.matches);
        let exempt = Exempt { paths: loaded.config.exempt.paths.clone(), ..Exempt::default() };
        Conditions {
            of_rules: loaded.config.rules.iter().map(of_rule).collect(),
            not_exempt: compile(Config { exempt, ..Config::default() }, MatchTable::default()),
        }
    }

    /// What the rule at this place in the file expects and the request does not have.
    pub(super) fn unmet(&self, index: usize, request: &RequestView<'_>) -> Vec<String> {
        let conditions = self.of_rules.get(index).map_or(&[][..], |conditions| conditions);
        let is_unmet =
            |condition: &&Condition| condition.alone.as_ref().is_some_and(|rules| rules.matching(request).is_empty());
        conditions.iter().filter(is_unmet).map(|condition| condition.expected.clone()).collect()
    }

    pub(super) fn is_exempt_path(&self, request: &RequestView<'_>) -> bool {
        self.not_exempt.as_ref().is_some_and(|rules| rules.matching(request).is_empty())
    }
}

fn conditions(table: &MatchTable) -> Vec<Condition> {
    let mut conditions = Vec::new();
    let mut add = |expected: String, table: MatchTable| {
        conditions.push(Condition { expected, alone: compile(Config::default(), table) });
    };
    if let Some(methods) = &table.methods {
        let expected = format!("the method is none of {}", list(methods));
        add(expected, MatchTable { methods: Some(methods.clone()), ..MatchTable::default() });
    }
    if let Some(path) = &table.path {
        let expected = format!("the path is none of {}", list(path));
        add(expected, MatchTable { path: Some(path.clone()), ..MatchTable::default() });
    }
    if let Some(host) = &table.host {
        let expected = format!("the host is none of {}", list(host));
        add(expected, MatchTable { host: Some(host.clone()), ..MatchTable::default() });
    }
    for (name, test) in &table.headers {
        // What a header is compared with may be a secret.
        let expected = match test {
            HeaderTest::Present => format!("there is no header {}", **name),
            _ => format!("the header {} does not say what is expected", **name),
        };
        let headers = [(name.clone(), test.clone())].into();
        add(expected, MatchTable { headers, ..MatchTable::default() });
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
