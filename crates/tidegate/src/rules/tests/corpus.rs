//! Paths that reached the handler of a protected path on real servers. The rule for that path must match each.

use std::collections::HashMap;

use crate::config::{Config, Format};
use crate::rules::{RequestView, RuleSet};

const CORPUS: &str = include_str!("corpus.tsv");

#[test]
fn rule_matches_every_path_that_reached_its_handler_on_a_real_server() {
    let rows: Vec<Vec<&str>> =
        CORPUS.lines().filter(|line| !line.starts_with('#')).map(|line| line.split('\t').collect()).collect();
    let mut rules: HashMap<&str, RuleSet> = HashMap::new();
    let mut escaped = Vec::new();
    for row in &rows {
        let [protected, path, server] = row[..] else { panic!("{row:?}") };
        let rules = rules.entry(protected).or_insert_with(|| {
            let rule =
                format!("[[rules]]\nname = 'a'\nmatch = {{ path = '{protected}' }}\nby = ['ip']\nlimits = ['5/min']");
            Config::from_text(&rule, Format::Toml).unwrap().rules
        });
        let headers = http::HeaderMap::new();
        if rules.matching(&RequestView::new(&http::Method::GET, path, &headers)).is_empty() {
            escaped.push(format!("{path} on {server}"));
        }
    }
    assert!(rows.len() > 500, "{}", rows.len());
    assert!(escaped.is_empty(), "{} of {} escape: {escaped:#?}", escaped.len(), rows.len());
}
