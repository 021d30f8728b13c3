use super::*;
use tidegate_core::{Key, ScopeName};

fn key_of(prefix: &str, subject: &[u8], scope: Scope<'_>, limit: &str) -> String {
    let limit: Limit = limit.parse().unwrap();
    Prefix::new(prefix).unwrap().counter(&Demand::new(limit, Key::scoped(subject, scope).unwrap()))
}

/// The columns: prefix, subject (hex), scope, rule or receipt id (hex), limit name, limit or number of the receipt in its
/// block, key.
#[test]
fn key_vectors_match() {
    let vectors = include_str!("../../tests/key-vectors.tsv");
    let mut count = 0;
    for line in vectors.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let columns: Vec<&str> = line.split('\t').collect();
        let [prefix, subject_hex, scope, rule, name, limit, expected] = columns[..] else {
            panic!("seven columns: {line}");
        };
        let bytes = |hex: &str| -> Vec<u8> {
            (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect()
        };
        let subject = bytes(subject_hex);
        let key = match scope {
            "ban" => Prefix::new(prefix).unwrap().ban(&subject),
            "receipt" => {
                let id = ReceiptId::from_bytes(bytes(rule).try_into().unwrap());
                let (key, number) = Prefix::new(prefix).unwrap().receipt(&subject, id);
                assert_eq!(number.to_string(), limit, "{line}");
                key
            }
            "explicit" => key_of(prefix, &subject, Scope::Explicit, limit),
            "probe" => key_of(prefix, &subject, Scope::Named(ScopeName::new("probe")), limit),
            "throttle" => key_of(prefix, &subject, Scope::Named(ScopeName::new("throttle")), limit),
            "rule" => key_of(prefix, &subject, Scope::rule(rule, name), limit),
            other => panic!("no such scope: {other}"),
        };
        assert_eq!(key, expected, "{line}");
        count += 1;
    }
    assert!(count >= 20, "the file is read");
}

#[test]
fn probe_has_the_key_of_the_vectors() {
    assert_eq!(Prefix::new("tidegate").unwrap().counter(&Demand::probe()), "tidegate:tg2:{tidegate}:probe:bucket");
}

#[test]
fn different_parts_give_different_keys() {
    let rule = |rule, limit| key_of("p", b"s", Scope::rule(rule, limit), "1/s");
    assert_ne!(rule("a", "b:c"), rule("a:b", "c"));
    assert_ne!(rule("a", "b_c"), rule("a_b", "c"));
    assert_ne!(rule("a", ""), rule("", "a"));
    let explicit = |subject: &str| key_of("p", subject.as_bytes(), Scope::Explicit, "1/s");
    assert_ne!(explicit("a}:rule:x:y:log"), key_of("p", b"a", Scope::rule("x", "y"), "1/s"));
    assert_ne!(explicit("%7B"), explicit("{"));
}

#[test]
fn hashed_part_cannot_be_written_as_a_literal() {
    let long = vec![b'x'; 129];
    let hashed = key_of("p", &long, Scope::Explicit, "1/s");
    let tag = hashed.split_once('{').unwrap().1.split_once('}').unwrap().0;
    assert!(tag.starts_with("%h"), "{hashed}");
    assert_ne!(key_of("p", tag.as_bytes(), Scope::Explicit, "1/s"), hashed);
    assert_ne!(key_of("p", b"%e", Scope::Explicit, "1/s"), key_of("p", b"", Scope::Explicit, "1/s"));
}

#[test]
fn braces_in_a_subject_cannot_choose_the_slot() {
    for subject in ["}", "{", "}{x}", "a}:b", "{}"] {
        let key = key_of("p", subject.as_bytes(), Scope::rule("{r}", "}"), "1/s");
        assert_eq!(key.matches('{').count(), 1, "{key}");
        assert_eq!(key.matches('}').count(), 1, "{key}");
        let (_, tag) = key.split_once('{').unwrap();
        assert!(!tag.starts_with('}'), "the tag is not empty: {key}");
    }
}

#[test]
fn invalid_prefix_is_an_error_that_says_what_is_accepted() {
    for prefix in ["", "a{b", "a b", "ü", &"x".repeat(65)] {
        let error = Prefix::new(prefix).unwrap_err().to_string();
        assert!(error.contains("without braces"), "{error}");
    }
}

#[test]
fn every_scope_has_a_key_of_its_own() {
    let names = ["rule", "ban", "sliding", "throttle"].map(|name| Scope::Named(ScopeName::new(name)));
    let scopes = [Scope::Explicit, Scope::rule("rule", "log"), Scope::rule("throttle", "log")];
    let mut keys: Vec<String> = scopes.into_iter().chain(names).map(|scope| key_of("p", b"s", scope, "1/s")).collect();
    keys.push(Prefix::new("p").unwrap().ban(b"s"));
    let count = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), count, "{keys:?}");
}

#[test]
fn slot_of_a_subject_is_that_of_its_keys() {
    let prefix = Prefix::new("p").unwrap();
    let long = "x".repeat(300);
    for subject in ["user:42", "a}b{c", "", " ", long.as_str()] {
        let demand = Demand::new("2/s".parse().unwrap(), tidegate_core::Key::new(subject).unwrap());
        let slot = crate::cluster::slot::slot_of_key(prefix.counter(&demand).as_bytes());
        assert_eq!(Prefix::slot(subject.as_bytes()), slot, "{subject:?}");
        assert_eq!(crate::cluster::slot::slot_of_key(prefix.ban(subject.as_bytes()).as_bytes()), slot, "{subject:?}");
    }
}
