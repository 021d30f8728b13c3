//! The matcher compared with a naive one, and its number of comparisons.

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use proptest::prelude::*;
use proptest::sample::select;

use crate::rules::comparisons;
use crate::rules::host::HostPattern;
use crate::rules::matcher::{Conditions, HeaderCondition, HeaderText, Matcher};
use crate::rules::method::{MethodNames, MethodSet};
use crate::rules::path::{LazyReadings, Readings, readings, segments};
use crate::rules::pattern::Pattern;
use crate::rules::request::RequestView;

#[derive(Clone, Debug, Default)]
struct WrittenRule {
    methods: Vec<&'static str>,
    paths: Vec<String>,
    hosts: Vec<&'static str>,
    headers: Vec<(&'static str, Option<&'static str>)>,
}

#[derive(Clone, Debug)]
struct WrittenRequest {
    method: &'static str,
    path: String,
    host: Option<&'static str>,
    headers: Vec<(&'static str, &'static str)>,
}

fn compiled(rules: &[WrittenRule]) -> Matcher {
    let mut names = MethodNames::default();
    let mut conditions = Vec::new();
    for rule in rules {
        let mut condition = Conditions::default();
        if !rule.methods.is_empty() {
            let sets = rule.methods.iter().map(|name| names.register(name).unwrap());
            condition.methods = sets.fold(MethodSet::NONE, MethodSet::union);
        }
        condition.paths = rule.paths.iter().map(|text| Pattern::parse(text).unwrap()).collect();
        condition.hosts = rule.hosts.iter().map(|text| HostPattern::parse(text).unwrap()).collect();
        for (name, value) in &rule.headers {
            let test = value
                .map_or(HeaderCondition::Present, |value| HeaderCondition::Equals(HeaderValue::from_static(value)));
            condition.headers.insert(HeaderText::of(&HeaderName::from_static(name)), test);
        }
        conditions.push(condition);
    }
    let mut matcher = Matcher::new(names, Vec::new());
    conditions.into_iter().for_each(|condition| matcher.push(condition, true));
    matcher
}

fn found(matcher: &Matcher, request: &WrittenRequest) -> Vec<u32> {
    let mut headers = HeaderMap::new();
    for (name, value) in &request.headers {
        headers.append(*name, HeaderValue::from_static(value));
    }
    if let Some(host) = request.host {
        headers.insert("host", HeaderValue::from_static(host));
    }
    let method = Method::from_bytes(request.method.as_bytes()).unwrap();
    matcher.find(&RequestView::new(&method, &request.path, &headers), &LazyReadings::of(&request.path)).to_vec()
}

/// Returns the indices of the rules that match, by testing each rule and each segment in turn.
fn naive(rules: &[WrittenRule], request: &WrittenRequest) -> Vec<u32> {
    let applies = |rule: &WrittenRule| {
        let method = rule.methods.is_empty()
            || rule.methods.iter().any(|name| *name == request.method || (*name == "GET" && request.method == "HEAD"));
        let path = rule.paths.is_empty() || rule.paths.iter().any(|pattern| naive_path(pattern, &request.path));
        let host = rule.hosts.is_empty()
            || request.host.is_some_and(|host| {
                let host = host.to_lowercase();
                let host = host.trim_end_matches(":8080");
                rule.hosts.iter().any(|pattern| match pattern.strip_prefix('*') {
                    Some(suffix) => host.ends_with(suffix) && host.len() > suffix.len(),
                    None => host == *pattern,
                })
            });
        let headers = rule.headers.iter().all(|(name, value)| {
            request.headers.iter().any(|(other, sent)| name == other && value.is_none_or(|value| value == *sent))
        });
        method && path && host && headers
    };
    (0..).zip(rules).filter(|(_, rule)| applies(rule)).map(|(index, _)| index).collect()
}

fn naive_path(pattern: &str, path: &str) -> bool {
    let Readings::Each(readings) = readings(path) else { return true };
    readings.iter().any(|reading| {
        let path: Vec<String> =
            segments(reading).map(|segment| String::from_utf8_lossy(segment).into_owned()).collect();
        let pattern: Vec<&str> =
            pattern.trim_start_matches('/').split('/').filter(|segment| !segment.is_empty()).collect();
        let (pattern, is_prefix) = match pattern.split_last() {
            Some((&"*", before)) => (before.to_vec(), true),
            _ => (pattern, false),
        };
        let is_long_enough = if is_prefix { path.len() >= pattern.len() } else { path.len() == pattern.len() };
        let fits = |(pattern, path): (&&str, &String)| {
            if pattern.starts_with('{') { !path.is_empty() } else { pattern == path }
        };
        is_long_enough && pattern.iter().zip(&path).all(fits)
    })
}

fn pattern() -> impl Strategy<Value = String> {
    let segment = select(vec!["a", "b", "c", "api", "{x}", "{y}"]);
    (prop::collection::vec(segment, 0..4), any::<bool>()).prop_map(|(segments, is_prefix)| {
        format!(
            "/{}{}",
            segments.join("/"),
            match (is_prefix, segments.is_empty()) {
                (false, _) => "",
                (true, true) => "*",
                (true, false) => "/*",
            }
        )
    })
}

fn rule() -> impl Strategy<Value = WrittenRule> {
    let methods = prop::collection::vec(select(vec!["GET", "POST", "HEAD", "PURGE"]), 0..3);
    let hosts = prop::collection::vec(select(vec!["example.com", "api.example.com", "*.example.com", "*.com"]), 0..2);
    let headers = prop::collection::vec(select(vec![("x-a", None), ("x-a", Some("1")), ("x-b", Some("2"))]), 0..2)
        .prop_map(|mut headers| {
            headers.dedup_by_key(|(name, _)| *name);
            headers
        });
    (methods, prop::collection::vec(pattern(), 0..3), hosts, headers)
        .prop_map(|(methods, paths, hosts, headers)| WrittenRule { methods, paths, hosts, headers })
}

fn request() -> impl Strategy<Value = WrittenRequest> {
    let segment = select(vec!["a", "b", "c", "api", "z", "", ".", "..", "%61", "a%2Fb", "b;v=1", "%2e%2e", "%2561"]);
    let path = prop::collection::vec(segment, 0..6).prop_map(|segments| format!("/{}", segments.join("/")));
    let method = select(vec!["GET", "POST", "HEAD", "PURGE", "DELETE", "BREW"]);
    let host =
        select(vec![None, Some("example.com"), Some("API.example.com:8080"), Some("a.b.example.com"), Some("com")]);
    let headers = prop::collection::vec(select(vec![("x-a", "1"), ("x-a", "3"), ("x-b", "2")]), 0..3);
    (method, path, host, headers).prop_map(|(method, path, host, headers)| WrittenRequest {
        method,
        path,
        host,
        headers,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn matcher_agrees_with_a_naive_one(
        rules in prop::collection::vec(rule(), 0..12),
        requests in prop::collection::vec(request(), 1..8),
    ) {
        let matcher = compiled(&rules);
        for request in &requests {
            prop_assert_eq!(found(&matcher, request), naive(&rules, request), "{:?}", request);
            if let Some(same) = matcher.rules_for_every_request() {
                prop_assert_eq!(same, naive(&rules, request), "{:?}", request);
            }
        }
    }
}

#[test]
fn rules_are_the_same_for_all_requests_only_if_none_has_a_condition() {
    let rules = vec![WrittenRule::default(); 3];
    assert_eq!(compiled(&rules).rules_for_every_request(), Some(&[0, 1, 2][..]));
    for conditional in [
        WrittenRule { methods: vec!["GET"], ..WrittenRule::default() },
        WrittenRule { paths: vec!["/*".to_owned()], ..WrittenRule::default() },
        WrittenRule { hosts: vec!["example.com"], ..WrittenRule::default() },
        WrittenRule { headers: vec![("x-a", None)], ..WrittenRule::default() },
    ] {
        let rules = [&rules[..], &[conditional]].concat();
        assert_eq!(compiled(&rules).rules_for_every_request(), None, "{rules:?}");
    }
}

fn get(path: &str) -> WrittenRequest {
    WrittenRequest { method: "GET", path: path.to_owned(), host: Some("t7.example.com"), headers: Vec::new() }
}

#[test]
fn matching_rules_are_found_in_the_order_of_the_file() {
    let path = |text: &str| WrittenRule { paths: vec![text.to_owned()], ..WrittenRule::default() };
    let rules = [
        path("/users/{id}"),
        WrittenRule::default(),
        path("/users/*"),
        path("/users/me"),
        path("/{x}/me"),
        path("/users"),
    ];
    let matcher = compiled(&rules);
    assert_eq!(found(&matcher, &get("/users/me")), [0, 1, 2, 3, 4]);
    assert_eq!(found(&matcher, &get("/users/7")), [0, 1, 2]);
    assert_eq!(found(&matcher, &get("/users/")), [1, 2, 5]);
    assert_eq!(found(&matcher, &get("/")), [1]);
    assert_eq!(found(&matcher, &get("/usersX")), [1]);
}

#[test]
fn few_comparisons_find_one_of_a_thousand_paths() {
    let of_path = |number: usize| WrittenRule {
        methods: vec!["GET"],
        paths: vec![format!("/api/v{}/things{number}/{{id}}", number % 10)],
        ..WrittenRule::default()
    };
    let mut rules: Vec<WrittenRule> = (0..1_000).map(of_path).collect();
    rules.push(WrittenRule { paths: vec!["/api/*".to_owned()], ..WrittenRule::default() });
    let matcher = compiled(&rules);
    comparisons::take();
    assert_eq!(found(&matcher, &get("/api/v7/things427/42")), [427, 1_000]);
    let (hit, miss) = (comparisons::take(), {
        assert_eq!(found(&matcher, &get("/nowhere/at/all")), [] as [u32; 0]);
        comparisons::take()
    });
    assert!(hit <= 8, "{hit} comparisons for one of a thousand paths");
    assert!(miss <= 2, "{miss} comparisons for none of a thousand paths");
}

#[test]
fn few_comparisons_find_one_of_a_thousand_hosts_or_paths_under_a_variable() {
    let hosts: Vec<&'static str> = (0..1_000).map(|number| &*format!("t{number}.example.com").leak()).collect();
    let rules: Vec<WrittenRule> =
        hosts.iter().map(|host| WrittenRule { hosts: vec![host], ..WrittenRule::default() }).collect();
    let matcher = compiled(&rules);
    comparisons::take();
    assert_eq!(found(&matcher, &get("/x")), [7]);
    let count = comparisons::take();
    assert!(count <= 6, "{count} comparisons for one of a thousand hosts");

    let of_variable =
        |number: usize| WrittenRule { paths: vec![format!("/{{tenant}}/p{number}")], ..WrittenRule::default() };
    let matcher = compiled(&(0..1_000).map(of_variable).collect::<Vec<_>>());
    comparisons::take();
    assert_eq!(found(&matcher, &get("/acme/p500")), [500]);
    let count = comparisons::take();
    assert!(count <= 4, "{count} comparisons under a variable");
}
