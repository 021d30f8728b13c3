use super::*;
use tollgate_core::{Key, Limit};

fn key_of(prefix: &str, subject: &[u8], scope: Scope<'_>, limit: &str) -> String {
    let limit: Limit = limit.parse().unwrap();
    Prefix::new(prefix).unwrap().counter(&Demand::new(limit, Key::scoped(subject, scope).unwrap()))
}

/// The columns: prefix, subject (hex), scope, rule, limit name, limit, key.
#[test]
fn every_vector_gives_its_key() {
    let vectors = include_str!("../../tests/key-vectors.tsv");
    let mut count = 0;
    for line in vectors.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let columns: Vec<&str> = line.split('\t').collect();
        let [prefix, subject_hex, scope, rule, name, limit, expected] = columns[..] else {
            panic!("seven columns: {line}");
        };
        let subject: Vec<u8> = (0..subject_hex.len() / 2)
            .map(|i| u8::from_str_radix(&subject_hex[2 * i..2 * i + 2], 16).unwrap())
            .collect();
        let key = match scope {
            "ban" => Prefix::new(prefix).unwrap().ban(&subject),
            "explicit" => key_of(prefix, &subject, Scope::Explicit, limit),
            "throttle" => key_of(prefix, &subject, Scope::Throttle, limit),
            "rule" => key_of(prefix, &subject, Scope::rule(rule, name), limit),
            other => panic!("no such scope: {other}"),
        };
        assert_eq!(key, expected, "{line}");
        count += 1;
    }
    assert!(count >= 20, "the file is read");
}

#[test]
fn parts_cannot_be_shifted_into_each_other() {
    let rule = |rule, limit| key_of("p", b"s", Scope::rule(rule, limit), "1/s");
    assert_ne!(rule("a", "b:c"), rule("a:b", "c"));
    assert_ne!(rule("a", "b_c"), rule("a_b", "c"));
    assert_ne!(rule("a", ""), rule("", "a"));
    let explicit = |subject: &str| key_of("p", subject.as_bytes(), Scope::Explicit, "1/s");
    assert_ne!(explicit("a}:rule:x:y:log"), key_of("p", b"a", Scope::rule("x", "y"), "1/s"));
    assert_ne!(explicit("%7B"), explicit("{"));
}

#[test]
fn a_hash_cannot_be_written_as_a_literal() {
    let long = vec![b'x'; 129];
    let hashed = key_of("p", &long, Scope::Explicit, "1/s");
    let tag = hashed.split_once('{').unwrap().1.split_once('}').unwrap().0;
    assert!(tag.starts_with("%h"), "{hashed}");
    assert_ne!(key_of("p", tag.as_bytes(), Scope::Explicit, "1/s"), hashed);
    assert_ne!(key_of("p", b"%e", Scope::Explicit, "1/s"), key_of("p", b"", Scope::Explicit, "1/s"));
}

#[test]
fn braces_from_outside_cannot_choose_the_slot() {
    for subject in ["}", "{", "}{x}", "a}:b", "{}"] {
        let key = key_of("p", subject.as_bytes(), Scope::rule("{r}", "}"), "1/s");
        assert_eq!(key.matches('{').count(), 1, "{key}");
        assert_eq!(key.matches('}').count(), 1, "{key}");
        let (_, tag) = key.split_once('{').unwrap();
        assert!(!tag.starts_with('}'), "an empty tag is no tag: {key}");
    }
}

#[test]
fn a_prefix_with_a_brace_is_refused_and_says_what_is_accepted() {
    for prefix in ["", "a{b", "a b", "ü", &"x".repeat(65)] {
        let error = Prefix::new(prefix).unwrap_err().to_string();
        assert!(error.contains("without braces"), "{error}");
    }
}
