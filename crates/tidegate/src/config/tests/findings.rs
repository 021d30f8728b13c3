//! Every finding is documented, found where it applies, and not found where it does not.

use super::{codes, findings, load, underlined};
use crate::config::{Code, Severity};

/// Returns the sections of the documentation: code, severity, and a file; or an active file and the one of a reload.
fn documented() -> Vec<(String, String, Vec<String>)> {
    let text = include_str!("../../../../../docs/findings.md");
    let mut sections = Vec::new();
    for section in text.split("\n### ").skip(1) {
        let (heading, body) = section.split_once('\n').unwrap();
        let (code, severity) = heading.trim_end_matches(')').split_once(" (").unwrap();
        let examples: Vec<String> =
            body.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect();
        assert!(matches!(examples.len(), 1 | 2), "{code} has an example, or an active file and its reload");
        let mut examples = examples;
        if code == Code::LineEndGone.as_str() {
            // A block in a document always ends with a newline.
            examples[1].pop();
        }
        sections.push((code.to_owned(), severity.to_owned(), examples));
    }
    sections
}

#[test]
fn the_documentation_has_each_code_once_and_no_others() {
    let mut documented: Vec<String> = documented().into_iter().map(|(code, ..)| code).collect();
    let mut known: Vec<&str> = Code::ALL.iter().map(|code| code.as_str()).collect();
    documented.sort();
    known.sort();
    assert_eq!(documented, known);
}

#[test]
fn every_documented_example_has_its_finding_and_no_other_error() {
    for (name, severity, examples) in documented() {
        let outcome = match &examples[..] {
            [example] => load(example),
            [running, example] => load(example).and_then(|loaded| loaded.into_replacement_of(&load(running).unwrap())),
            _ => panic!("{name} has {} examples; expected one, or a running and a new file", examples.len()),
        };
        let is_err = outcome.is_err();
        let found = outcome.map_or_else(|report| report.findings().to_vec(), |loaded| loaded.findings);
        let finding = found.iter().find(|finding| finding.code().as_str() == name);
        let finding = finding.unwrap_or_else(|| panic!("{name} is not found in {found:?}"));
        assert_eq!(format!("{:?}", finding.severity()).to_lowercase(), severity, "{name}");
        let is_noise = |code: Code| code == Code::NoRules || (examples.len() == 2 && code == Code::Removed);
        let is_stray = |code: Code| code.as_str() != name && !is_noise(code);
        let is_stray = |code: Code| is_stray(code) && (code.severity() == Severity::Error || severity != "error");
        assert!(!found.iter().any(|finding| is_stray(finding.code())), "{name}: {found:?}");
        assert_eq!(is_err, severity == "error", "{name}");
    }
}

#[test]
fn a_finding_underlines_the_exact_part_of_the_file() {
    let rule = "[[rules]]\nname = 'a'\nlimits = ['10/min']\n";
    for (code, text, expected) in [
        (Code::UnknownField, "on_failur = 'deny'", "on_failur"),
        (Code::UnknownField, "[plans.free]\nlimit = ['1/s']", "limit"),
        (Code::UnknownField, "rules = [{ name = 'a', limits = [{ quotta = 1 }] }]", "quotta"),
        (Code::MissingField, "[[rules]]\nlimits = ['1/s']", "[[rules]]"),
        (Code::WrongType, "instances = 'three'", "'three'"),
        (Code::WrongType, "prefix = 7", "7"),
        (Code::InvalidValue, "api_keys = 'some'", "'some'"),
        (Code::InvalidName, "store = 'redis://r'\ninstances = 1\nplan_sources = { redis_hash = '' }", "''"),
        (Code::InvalidName, "store = 'redis://r'\ninstances = 1\nkey_sources = { redis_hash = '' }", "''"),
        (Code::InvalidValue, "instances = 0", "0"),
        (Code::InvalidValue, "instances = -1", "-1"),
        (Code::InvalidValue, "[[rules]]\nname = 'a'\ncost = 0\nlimits = ['1/s']", "0"),
        (Code::ExpectationUnmet, &format!("expect = {{ rules = 12, keys = 0 }}\n{rule}"), "12"),
        (Code::ExpectationUnmet, &format!("expect.keys = 1\n{rule}"), "1"),
        (Code::FileCutOff, "expect.rules = 1\n[[rules]]\nname = 'a'\nlimits = ['10/min']\ncost = 7", "7"),
        (Code::InvalidLimit, "[[rules]]\nname = 'a'\nlimits = ['10/min', '0/min']", "0"),
        (Code::InvalidLimit, "[[rules]]\nname = 'a'\nlimits = ['10/fortnight']", "fortnight"),
        (Code::InvalidLimit, "[[rules]]\nname = 'a'\nlimits = '10/min slidding'", "slidding"),
        (Code::InvalidLimit, "[[rules]]\nname = 'a'\nlimits = [{ quota = 0, window = '1min' }]", "0"),
        (Code::InvalidLimit, "[[rules]]\nname = 'a'\nlimits = [{ quota = 1, window = '1min', burst = 5 }]", "5"),
        (Code::InvalidLimit, "[[rules]]\nname = 'a'\nlimits = [{ limit = '1/s', quota = 5 }]", "'1/s'"),
        (Code::InvalidTime, "[[rules]]\nname = 'a'\nlimits = [{ quota = 1, window = 'min' }]", "'min'"),
        (Code::InvalidTime, "[[bans]]\nby = 'ip'\nvalue = '10.0.0.1'\nuntil = 'tomorrow'", "'tomorrow'"),
        (Code::InvalidPath, "[[rules]]\nname = 'a'\nmatch = { path = ['/a', '/b/*/c'] }\nlimits = ['1/s']", "*"),
        (Code::InvalidPath, "exempt = { paths = 'health' }", "health"),
        (Code::InvalidHost, "[[rules]]\nname = 'a'\nmatch.host = 'a.b:80'\nlimits = ['1/s']", "'a.b:80'"),
        (Code::InvalidNetwork, "trusted_proxies = ['10.0.0.0/8', '10.1.2.3/8']", "'10.1.2.3/8'"),
        (Code::InvalidNetwork, "ipv6_prefix = 0", "0"),
        (Code::InvalidSubject, "[[rules]]\nname = 'a'\nby = ['ip', 'usre']\nlimits = ['1/s']", "'usre'"),
        (Code::InvalidSubject, "[[rules]]\nname = 'a'\nby = []\nlimits = ['1/s']", "[]"),
        (Code::InvalidHeader, "forwarding_header = 'X-Forwared-For'", "'X-Forwared-For'"),
        (Code::InvalidName, "[[rules]]\nname = 'two words'\nlimits = ['1/s']", "'two words'"),
        (Code::InvalidName, "prefix = 'a{b'", "'a{b'"),
        (Code::InvalidName, "[plans.'a b']\nlimits = ['1/s']", "'a b'"),
        (Code::UnknownPlan, "plan_sources.addresses = [{ networks = '10.0.0.0/8', plan = 'x' }]", "'x'"),
        (Code::DuplicateRule, &format!("{rule}{rule}"), "'a'"),
        (Code::LimitsMissing, "[plans.default]\nlimits = []", "[]"),
        (Code::LimitsMissing, "[[keys]]\nkey = 'k'\nlimits = []", "[]"),
        (Code::KeyLimitsUnused, &format!("[[keys]]\nkey = 'k'\nlimits = ['9/s']\n{rule}"), "['9/s']"),
        (
            Code::ShieldNotSpaced,
            "[[rules]]\nname = 'a'\nstore = 'memory'\nlimits = ['1/s', '1/h leaky-bucket']",
            "'1/h leaky-bucket'",
        ),
        (Code::InvalidKey, "[[keys]]\nkey = ' k'", "' k'"),
        (Code::InvalidKey, "exempt.keys = ['k', 'ké']", "'ké'"),
        (Code::InvalidKey, "[[bans]]\nby = 'api_key'\nvalue = \"k\\t\"", "\"k\\t\""),
        (Code::InvalidKey, "[[bans]]\nby = 'api_key'\nvalue = ''", "''"),
        (
            Code::InvalidHost,
            "[[rules]]\nname = 'a'\nmatch.host = 'münchen.example'\nlimits = ['1/s']",
            "'münchen.example'",
        ),
        (
            Code::InvalidHeader,
            "[[rules]]\nname = 'a'\nmatch.headers = { X-A = '1', x-a = '2' }\nlimits = ['1/s']",
            "x-a",
        ),
        (Code::CostNeverFits, "[[rules]]\nname = 'a'\ncost = 11\nlimits = ['10/min']", "11"),
        (Code::SecretMissing, "[anonymize]\nsecret_env = 'NO_SUCH'", "'NO_SUCH'"),
        (Code::SecretMissing, "[jwt]\nalgorithm = 'HS256'", "[jwt]"),
        (Code::ConflictingHeaders, "headers = ['draft-6', 'x', 'ietf']", "['draft-6', 'x', 'ietf']"),
        (
            Code::ConflictingHeaders,
            "[[rules]]\nname = 'a'\nheaders = ['draft-6', 'ietf']\nlimits = ['1/s']",
            "['draft-6', 'ietf']",
        ),
        (Code::AllProxiesTrusted, &format!("trusted_proxies = ['10.0.0.0/8', '::/0']\n{rule}"), "'10.0.0.0/8'"),
        (Code::RuleUnreachable, "[[rules]]\nname = 'a'\nmatch.methods = []\nlimits = ['1/s']", "[]"),
        (Code::RuleTwice, "[[rules]]\nname = 'a'\nlimits = ['1/s']\n[[rules]]\nname = 'b'\nlimits = ['1/s']", "'b'"),
        (Code::RuleUnreachable, "[[rules]]\nname = 'a'\nmatch.groups = []\nlimits = ['1/s']", "[]"),
        (Code::GroupUnknown, "[[rules]]\nname = 'a'\nmatch.groups = 'vip'\nlimits = ['1/s']", "'vip'"),
        (Code::InvalidName, "[[keys]]\nkey = 'k'\ngroups = ['a b']\n", "'a b'"),
        (Code::InvalidName, "[[rules]]\nname = 'a'\nmatch.groups = ''\nlimits = ['1/s']", "''"),
        (
            Code::ShieldNotByAddress,
            "[[rules]]\nname = 'a'\nmatch.groups = ['vip']\nstore = 'memory'\nlimits = ['1/s']",
            "['vip']",
        ),
        (Code::PlanUnused, &format!("[plans.default]\nlimits = ['1/s']\n{rule}"), "default"),
        (Code::AllRequestsExempt, &format!("exempt.addresses = ['0.0.0.0/1', '128.0.0.0/1']\n{rule}"), "'0.0.0.0/1'"),
        (Code::SubjectUnknowable, "[[rules]]\nname = 'a'\nby = 'api_key'\nlimits = ['1/s']", "'api_key'"),
        (Code::SubjectChosenByClient, "[[rules]]\nname = 'a'\nby = 'header:x-t'\nlimits = ['1/s']", "'header:x-t'"),
        (
            Code::SubjectChosenByClient,
            "trusted_proxies = '0.0.0.0/0'\n[[rules]]\nname = 'a'\nby = 'header:x-t'\nlimits = ['1/s']",
            "'header:x-t'",
        ),
        (
            Code::SubjectChosenByClient,
            "trusted_proxies = '10.0.0.0/8'\n[[rules]]\nname = 'a'\nby = ['header:x-t', 'cookie:c']\nlimits = ['1/s']",
            "['header:x-t', 'cookie:c']",
        ),
    ] {
        let found = findings(text);
        let finding = found.iter().find(|finding| finding.code() == code);
        let finding = finding.unwrap_or_else(|| panic!("{}: {found:?} in {text}", code.as_str()));
        assert_eq!(underlined(text, finding), expected, "{finding:?} in {text}");
    }
}

#[test]
fn a_sensible_configuration_has_no_findings() {
    let quiet = [
        // The API keys are in a Redis hash.
        "store = 'redis://h'\ninstances = 1\nkey_sources.redis_hash = 'keys'\n[[rules]]\nname = 'a'\nby = 'api_key'\nlimits = ['1/s']",
        // A shadow rule beside an enforced one.
        "[[rules]]\nname = 'a'\nlimits = ['1/s']\n[[rules]]\nname = 'b'\nmode = 'shadow'\nlimits = ['2/s']",
        // Rules that cannot be merged, because their settings differ.
        "[[rules]]\nname = 'a'\nlimits = ['1/s']\n[[rules]]\nname = 'b'\ncharge = 'on_failure'\nlimits = ['1/s']\n\
         [[rules]]\nname = 'c'\ncost = 2\nlimits = ['9/s']\n[[rules]]\nname = 'd'\non_failure = 'deny'\nlimits = ['1/s']",
        "[plans]\ndefault.limits = '1/s'\nanonymous.limits = '1/s'\n[[rules]]\nname = 'a'\nlimits = 'plan'\n\
         [[rules]]\nname = 'b'\nlimits = ['9/s']",
        "[[rules]]\nname = 'a'\nlimits = ['1/s']\n[[rules]]\nname = 'b'\nheaders = []\nlimits = ['9/s']\n\
         [[rules]]\nname = 'c'\nbody = 'problem'\nlimits = ['9/s']",
        // None of these limits always denies first.
        "[[rules]]\nname = 'a'\nlimits = ['10/min', '1000/day', '3/s']",
        // A bucket denies by spacing, so a larger window of the same rate is not redundant.
        "[[rules]]\nname = 'a'\nlimits = ['10/min token-bucket', '10/h', '600/h leaky-bucket']",
        // The header is read from the trusted proxy only.
        "trusted_proxies = '10.0.0.0/8'\n[[rules]]\nname = 'a'\nby = 'header:x-tenant'\nlimits = ['1/s']",
        "[[rules]]\nname = 'a'\nby = ['cookie:device', 'ip']\nlimits = ['1/s']",
        "[[rules]]\nname = 'a'\nby = 'path'\nlimits = ['1/s']",
        // With `any`, unlisted keys identify callers.
        "api_keys = 'any'\n[[rules]]\nname = 'a'\nby = 'api_key'\nlimits = ['1/s']",
        // The header may name any plan.
        "trusted_proxies = '10.0.0.0/8'\nplan_sources.header = 'x-plan'\n[plans]\ndefault.limits = '1/s'\n\
         anonymous.limits = '1/s'\ngold.limits = '9/s'\n[[rules]]\nname = 'a'\nlimits = 'plan'",
        // With counters in memory, the secret is optional.
        "anonymize = true\n[[rules]]\nname = 'a'\nlimits = ['1/s']",
        "store = 'redis://h'\ninstances = 1\n[[rules]]\nname = 'a'\nlimits = ['1/s']",
        // A shield counts by address by default.
        "[[rules]]\nname = 'a'\nstore = 'memory'\nlimits = ['50/s']",
        // Thirty-four limits, of which at most seventeen apply to one request.
        "[[rules]]\nname = 'a'\nmatch.path = '/a'\nlimits = ['1/s', '2/2s', '3/3s', '4/4s', '5/5s', '6/6s', '7/7s', \
         '8/8s', '9/9s', '10/10s', '11/11s', '12/12s', '13/13s', '14/14s', '15/15s', '16/16s', '17/17s']\n\
         [[rules]]\nname = 'b'\nmatch.path = '/b'\nlimits = ['1/s', '2/2s', '3/3s', '4/4s', '5/5s', '6/6s', '7/7s', \
         '8/8s', '9/9s', '10/10s', '11/11s', '12/12s', '13/13s', '14/14s', '15/15s', '16/16s', '17/17s']",
    ];
    for text in quiet {
        let stray: Vec<Code> =
            codes(text).into_iter().filter(|code| *code != Code::RedundantLimit || !text.contains("2s")).collect();
        assert_eq!(stray, [], "{text}");
    }
}

#[test]
fn a_redundant_limit_is_found_in_rules_plans_and_keys() {
    let text = "[plans.default]\nlimits = ['10/min', '1000/min']\n[plans.anonymous]\nlimits = ['1/min']\n\
                [[keys]]\nkey = 'k'\nlimits = ['5/s', '500/min']\n\
                [[rules]]\nname = 'by-plan'\nlimits = 'plan'\n\
                [[rules]]\nname = 'own'\nlimits = ['10/min', '20000/day']\n";
    let found: Vec<String> = findings(text)
        .iter()
        .filter(|finding| finding.code() == Code::RedundantLimit)
        .map(|finding| format!("{} {}", underlined(text, finding), finding.message()))
        .collect();
    assert_eq!(
        found,
        [
            "['10/min', '1000/min'] `per-minute-2` (1000/min) of plan `default` never denies, because `per-minute` \
             (10/min) always denies first",
            "['5/s', '500/min'] `per-minute` (500/min) of this key never denies, because `per-second` (5/s) always \
             denies first",
            "['10/min', '20000/day'] `per-day` (20000/day) of `own` never denies, because `per-minute` (10/min) \
             always denies first",
        ]
    );
}

/// Returns a rule with this many limits.
fn rule_of(name: &str, count: usize, more: &str) -> String {
    let limits: Vec<String> = (1..=count).map(|number| format!("'{number}/{number}s token-bucket'")).collect();
    format!("[[rules]]\nname = '{name}'\n{more}\nlimits = [{}]\n", limits.join(", "))
}

#[test]
fn limits_of_two_rules_that_match_a_common_request_are_added() {
    let pair = |one: &str, other: &str| rule_of("a", 17, one) + &rule_of("b", 16, other);
    for (one, other) in [
        ("match.path = '/{x}/b'", "match.path = '/a/{y}'"),
        ("match.path = ['/x', '/a']", "match.path = '/{y}'"),
        ("match.path = '/a/*'", "match.host = '*.example.com'"),
        ("match.methods = ['GET', 'POST']", "match.methods = ['PUT', 'POST']"),
        ("match.headers = { x-a = true }", "match.headers = { x-a = '1', x-b = '2' }"),
        ("store = 'memory'", "store = 'memory'\nmatch.path = '/a'"),
    ] {
        let text = pair(one, other);
        let found = findings(&text);
        let finding = found.iter().find(|finding| finding.code() == Code::TooManyLimits);
        let finding = finding.unwrap_or_else(|| panic!("{one} {other}: {found:?}"));
        assert!(finding.message().starts_with("33 limits"), "{finding:?}");
    }
    for (one, other) in [
        ("match.path = '/{x}/b'", "match.path = '/a/{y}/c'"),
        ("match.host = 'a.example'", "match.host = 'b.example'"),
        ("match.methods = 'GET'", "match.methods = 'POST'"),
        // These are not decided together.
        ("store = 'memory'", "by = ['ip']"),
        ("mode = 'shadow'", "by = ['ip']"),
        ("mode = 'shadow'", "mode = 'shadow'\nby = ['ip']"),
        ("mode = 'off'", "by = ['ip']"),
    ] {
        assert!(!codes(&pair(one, other)).contains(&Code::TooManyLimits), "{one} {other}");
    }
    let exempt = format!("exempt.paths = '/a/b'\n{}", pair("match.path = '/{x}/b'", "match.path = '/a/{y}'"));
    assert!(!codes(&exempt).contains(&Code::TooManyLimits));
    assert!(codes(&rule_of("a", 33, "mode = 'shadow'")).contains(&Code::TooManyLimits));
}

#[test]
fn limits_of_many_rules_that_match_a_common_request_are_added() {
    let file = |matches: &[&str], count: usize| -> String {
        matches.iter().enumerate().map(|(at, matches)| rule_of(&format!("r{at}"), count, matches)).collect()
    };
    let paths = ["match.path = '/a/{x}/{y}'", "match.path = '/{x}/b/{y}'", "match.path = '/{x}/{y}/c'"];
    let headers = [
        "match.headers = { a = true }",
        "match.headers = { b = true }",
        "match.headers = { c = true }",
        "match.headers = { d = '1' }",
        "match.headers = { e = true }",
    ];
    // A request can match the first and the last, or all but the first.
    let turns = [
        "match.headers = { a = '1' }",
        "match.headers = { a = '2' }",
        "match.headers = { a = '2', b = '1' }",
        "match.headers = { a = '2', c = '1' }",
        "match.headers = { d = '1' }",
    ];
    for (text, expected) in [
        (file(&paths, 12), "36 limits apply to a request that `r0`, `r1` and `r2` match"),
        (file(&headers, 8), "40 limits apply to a request that `r0`, `r1`, `r2`, `r3` and `r4` match"),
        (file(&turns, 9), "36 limits apply to a request that `r1`, `r2`, `r3` and `r4` match"),
        (format!("shadow = true\n{}", file(&paths, 12)), "36 limits apply to a request that `r0`, `r1` and `r2` match"),
        (format!("shadow = true\n{}", file(&["by = ['ip']", "by = ['global']"], 17)), "34 limits apply"),
    ] {
        let found = findings(&text);
        let finding = found.iter().find(|finding| finding.code() == Code::TooManyLimits);
        let message = finding.unwrap_or_else(|| panic!("{expected}: {found:?}")).message();
        assert!(message.starts_with(expected), "{message}");
    }
    // A request can match any two of them, but not all three.
    let apart =
        ["match = { path = ['/a', '/b'] }", "match = { path = ['/b', '/c'] }", "match = { path = ['/c', '/a'] }"];
    for text in [file(&apart, 12), file(&paths, 10), file(&headers, 6)] {
        assert!(!codes(&text).contains(&Code::TooManyLimits), "{text}");
    }
}

#[test]
fn a_rule_that_overlaps_with_all_others_is_checked_in_bounded_work() {
    // A request can match `all` and one of the others.
    let rules: String = (0..400)
        .map(|number| rule_of(&format!("r{number}"), 1, &format!("match.headers = {{ a = '{number}' }}")))
        .collect();
    let text = format!("{}{rules}", rule_of("all", 30, "by = ['ip']"));
    assert!(!codes(&text).contains(&Code::TooManyLimits));
}

#[test]
fn advice_about_shadow_mode_says_that_bans_hold() {
    let found = findings("shadow = true\n[[rules]]\nname = 'a'\nlimits = ['1/s']");
    assert_eq!(found[0].code(), Code::ShadowOn);
    assert!(found[0].message().contains("bans still apply"), "{:?}", found[0]);
}

#[test]
fn a_plan_without_assignment_is_a_warning_that_mentions_lookups() {
    let text = "[plans]\ndefault.limits = '1/s'\nanonymous.limits = '1/s'\noffice.limits = '9/s'\n\
                [[rules]]\nname = 'a'\nlimits = 'plan'";
    let found = findings(text);
    let [finding] = &found[..] else { panic!("{found:?}") };
    assert_eq!((finding.code(), underlined(text, finding)), (Code::PlanUnused, "office"));
    assert!(finding.help_text().is_some_and(|help| help.contains("PlanLookup")), "{finding:?}");
}

#[test]
fn overlaps_of_a_thousand_rules_are_checked_in_bounded_work() {
    let rules: String =
        (0..1_000).map(|number| rule_of(&format!("r{number}"), 1, &format!("match.path = '/{number}/*'"))).collect();
    assert!(!codes(&rules).contains(&Code::TooManyLimits));
}

#[test]
fn a_key_that_no_request_can_carry_is_an_error() {
    let is_refused = |key: &str| codes(&format!("[[keys]]\nkey = {key:?}")).contains(&Code::InvalidKey);
    for key in ["k", "two words", &"k".repeat(1024), "~!$"] {
        assert!(!is_refused(key), "{key}");
    }
    for key in [" k", "k ", "k\n", "ké", &"k".repeat(1025)] {
        assert!(is_refused(key), "{key}");
    }
}

#[test]
fn all_errors_are_reported_in_the_order_of_the_file() {
    let text = "deadline = 'soon'\n[[rules]]\nname = 'a b'\nmatch.path = 'x'\nlimits = ['0/s', '1/x']\n[[bans]]\nby = 'ip'\nvalue = 'y'";
    use Code::{InvalidLimit, InvalidName, InvalidNetwork, InvalidPath, InvalidTime};
    assert_eq!(codes(text), [InvalidTime, InvalidName, InvalidPath, InvalidLimit, InvalidLimit, InvalidNetwork]);
}

#[test]
#[cfg(feature = "redis")]
fn an_invalid_store_is_an_error_and_its_password_is_not_shown() {
    for url in [
        "mysql://planted@h",
        "redis+cluster://:planted@h/3",
        "redis+sentinel://:planted@h",
        "redis://u:planted@h:xx",
        "redis://:planted@",
        "redis://:planted@h/nine",
        "redis://u:planted%zz@h",
    ] {
        let text = format!("store = '{url}'\ninstances = 1");
        let found = findings(&text);
        let finding = found.iter().find(|finding| finding.code() == Code::InvalidStore).expect(url);
        assert!(load(&text).is_err() && underlined(&text, finding) == format!("'{url}'"), "{finding:?}");
        let accepted = ["redis://[user:password@]host[:port][/database]", "did you mean redis+sentinel://h/NAME?"];
        assert!(accepted.iter().any(|text| finding.message().contains(text)), "{finding:?}");
        assert!(finding.help_text().is_some_and(|help| help.contains("`memory`")), "{finding:?}");
        let report = format!("{:?}", miette::Report::new(finding.clone()));
        assert!(!report.contains("planted"), "{report}");
    }
    let clusters = ["redis+cluster://h", "rediss+cluster://u:p%40ss@h:7000,[::1]:7001"];
    let sentinels = ["redis+sentinel://h/main", "rediss+sentinel://u:p%40ss@h:7000,[::1]:7001/main/3"];
    let servers = ["memory", "redis://h", "rediss://u:p%40ss@h:7000/3", "redis://[::1]"];
    for url in servers.into_iter().chain(clusters).chain(sentinels) {
        assert!(!codes(&format!("store = '{url}'")).contains(&Code::InvalidStore), "{url}");
    }
}

#[test]
fn instances_of_the_loader_override_the_file() {
    let load = |text: &str| {
        let text = format!("{text}\n[[rules]]\nname = 'a'\nlimits = ['1/s']");
        let loaded = super::loader().instances(3).load_text("t", &text, crate::config::Format::Toml).unwrap();
        (loaded.settings.instances, loaded.findings.iter().map(|finding| finding.code()).collect::<Vec<_>>())
    };
    assert_eq!(load("store = 'redis://h'"), (Some(3), vec![]));
    assert_eq!(load("store = 'redis://h'\ninstances = 2"), (Some(3), vec![]));
    assert_eq!(load(""), (Some(3), vec![Code::MemoryNotShared]));
}

#[test]
fn the_store_of_the_loader_overrides_the_file() {
    let text = "[[rules]]\nname = 'a'\nlimits = ['1/s']";
    let loaded = super::loader().store("redis://:pw@h").load_text("t", text, crate::config::Format::Toml).unwrap();
    assert!(loaded.findings.is_empty(), "{:?}", loaded.findings);
    assert!(loaded.settings.is_shared() && !format!("{loaded:?}").contains("pw"));
}
