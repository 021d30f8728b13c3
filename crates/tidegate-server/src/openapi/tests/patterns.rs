//! Compares the patterns of the document with what is accepted.
//!
//! The patterns of methods, paths and headers are exact: a text matches if and only if it is accepted. That of a limit
//! is short instead. It has the form of a limit but not its bounds, so every limit matches, and a text that matches may
//! still be rejected with 400 (`1/999day`, `5/min burst=3`).

use proptest::prelude::*;
use regex::Regex;
use serde_json::{Value, json};
use tidegate::{DEMANDS_MAX, Limit};

use super::HTTP_DOCUMENT;
use crate::listeners::http::request::CheckRequest;

/// Returns a schema of the document: the name of a component, and the keywords that lead to the schema in it.
fn schema(path: &str) -> &'static Value {
    let schema = HTTP_DOCUMENT.pointer(&format!("/components/schemas/{path}"));
    schema.unwrap_or_else(|| panic!("there is no {path}"))
}

/// Returns the pattern of a schema.
fn pattern(path: &str) -> Regex {
    regex(schema(path)["pattern"].as_str().unwrap())
}

/// Returns the bound of a schema.
fn bound(path: &str, keyword: &str) -> usize {
    schema(path)[keyword].as_u64().unwrap().try_into().unwrap()
}

/// Compiles a pattern of JSON Schema, in which a character is written by its number as `\u0020`.
pub(super) fn regex(pattern: &str) -> Regex {
    let mut translated = String::new();
    let mut rest = pattern;
    while let Some(at) = rest.find(r"\u") {
        translated += &rest[..at];
        translated += &format!("\\x{{{}}}", &rest[at + 2..at + 6]);
        rest = &rest[at + 6..];
    }
    Regex::new(&(translated + rest)).unwrap()
}

/// A limit that the parser accepts must match, or the document would forbid it.
fn assert_matches_if_accepted(pattern: &Regex, text: &str) {
    assert!(pattern.is_match(text) || text.parse::<Limit>().is_err(), "{text:?} is accepted and does not match");
}

#[test]
fn every_unit_and_algorithm_matches_the_pattern_of_a_limit() {
    let pattern = pattern("LimitText");
    let units = "us µs ms s sec secs second seconds m min mins minute minutes h hr hour hours d day days w week weeks";
    for unit in units.split(' ') {
        for text in [format!("1/{unit}"), format!("1/2000{unit}"), format!(" 010/1{unit}\t")] {
            assert_matches_if_accepted(&pattern, &text);
        }
        assert!(format!("1/2000{unit}").parse::<Limit>().is_ok() || format!("1/{unit}").parse::<Limit>().is_ok());
    }
    for rest in [
        "sliding",
        "sliding-log",
        "sliding-counter",
        "fixed-window",
        "token-bucket  burst=3 count_denied=true",
        "leaky-bucket\n\x0c\rcount_denied=false\tqueue=7",
    ] {
        let text = format!("1/min {rest}");
        assert!(text.parse::<Limit>().is_ok(), "{text:?}");
        assert_matches_if_accepted(&pattern, &text);
    }
}

#[test]
fn text_without_the_form_of_a_limit_does_not_match() {
    let pattern = pattern("LimitText");
    for text in [
        "",
        " ",
        "10",
        "10/",
        "/min",
        "10 /min",
        "10/MIN",
        "+1/min",
        "1.5/min",
        "1/-1s",
        "-1/s",
        "1/y",
        "10/min/h",
        "1/min Sliding",
        "1/min;",
        "ten/min",
    ] {
        assert!(!pattern.is_match(text) && text.parse::<Limit>().is_err(), "{text:?}");
    }
}

proptest! {
    #[test]
    fn every_accepted_limit_matches_the_pattern(
        quota in "0{0,2}[0-9]{1,8}",
        slash in prop_oneof![10 => Just("/"), 1 => Just(" /"), 1 => Just("")],
        count in "[0-9]{0,5}",
        unit in prop::sample::select(vec!["week", "w", "days", "d", "h", "hr", "min", "m", "s", "secs", "ms", "us", "µs", "y", "M"]),
        algorithm in prop::sample::select(vec!["", " sliding", " sliding-log", " sliding-counter", " fixed-window", " token-bucket", " leaky-bucket", " gcra"]),
        options in prop::collection::vec(prop::sample::select(vec![" burst=1", " burst=10000000", " burst=", "\tqueue=7", " count_denied=true", "  count_denied=false", " count_denied", " x=1", "\u{a0}", "\u{2003}"]), 0..3),
    ) {
        let text = format!("{quota}{slash}{count}{unit}{algorithm}{}", options.concat());
        assert_matches_if_accepted(&pattern("LimitText"), &text);
    }
}

fn is_accepted(method: &str, path: &str, name: &str, value: &str) -> bool {
    let body = json!({ "request": {
        "method": method, "path": path, "headers": { name: value }, "peer": "203.0.113.9",
    } });
    CheckRequest::parse(body.to_string().as_bytes()).is_ok()
}

#[test]
fn methods_paths_and_headers_match_exactly_if_they_are_accepted() {
    const FIELDS: &str = "Request/properties";
    let list = format!("{FIELDS}/headers/oneOf/1/items/prefixItems");
    let object = format!("{FIELDS}/headers/oneOf/0");
    let [method, path] = ["method", "path"].map(|field| pattern(&format!("{FIELDS}/{field}")));
    let [name, value] = [0, 1].map(|index| pattern(&format!("{list}/{index}")));
    assert_eq!(schema(&format!("{list}/0")), schema(&format!("{object}/propertyNames")));
    assert_eq!(schema(&format!("{list}/1")), schema(&format!("{object}/additionalProperties")));
    for (parameter, field) in [("X-Forwarded-Method", "method"), ("X-Forwarded-Uri", "path")] {
        let parameter = &HTTP_DOCUMENT["components"]["parameters"][parameter];
        assert_eq!(parameter["schema"]["pattern"], schema(&format!("{FIELDS}/{field}"))["pattern"]);
    }
    let characters = (0..=0x17f_u32).chain([0x20ac, 0x1f600, 0xfffd]).filter_map(char::from_u32);
    for character in characters {
        for text in [character.to_string(), format!("a{character}b"), format!("{character}/")] {
            assert_eq!(is_accepted(&text, "/", "a", "b"), method.is_match(&text), "method {text:?}");
            assert_eq!(is_accepted("GET", "/", &text, "b"), name.is_match(&text), "header {text:?}");
            assert_eq!(is_accepted("GET", "/", "a", &text), value.is_match(&text), "value {text:?}");
            for whole in [text.clone(), format!("/{text}"), format!("/x?{text}")] {
                assert_eq!(is_accepted("GET", &whole, "a", "b"), path.is_match(&whole), "path {whole:?}");
            }
        }
    }
    for whole in ["", "*", "http://host/x", "host:80", "//", "/?", "/??", "/a#b", "/\"x\"", "/{id}"] {
        assert_eq!(is_accepted("GET", whole, "a", "b"), path.is_match(whole), "path {whole:?}");
    }
    let long = |bytes: usize| "a".repeat(bytes);
    let (path_max, name_max) =
        (bound("Request/properties/path", "maxLength"), bound(&format!("{list}/0"), "maxLength"));
    assert!(is_accepted("GET", &format!("/{}", long(path_max - 1)), "a", "b"));
    assert!(!is_accepted("GET", &format!("/{}", long(path_max)), "a", "b"));
    assert!(is_accepted("GET", "/", &long(name_max), "b"));
    assert!(!is_accepted("GET", "/", &long(name_max + 1), "b"));
    assert!(!is_accepted("", "/", "a", "b") && !is_accepted("GET", "/", "", "b"));
    assert!(is_accepted("GET", "/", "a", ""));
}

/// The bounds of lists and of headers are those of the parser, and a key and a limit as long as documented are read.
#[test]
fn bounds_are_exact() {
    assert_eq!(bound("CheckRequest/oneOf/1/properties/checks", "maxItems"), DEMANDS_MAX);
    let headers = |count: usize| (0..count).map(|index| (format!("x-{index}"), json!("")));
    let accepts = |headers: Value| {
        let request = json!({ "method": "GET", "path": "/", "headers": headers, "peer": "203.0.113.9" });
        CheckRequest::parse(json!({ "request": request }).to_string().as_bytes()).is_ok()
    };
    let object_max = bound("Request/properties/headers/oneOf/0", "maxProperties");
    let list_max = bound("Request/properties/headers/oneOf/1", "maxItems");
    for (extra, is_accepted) in [(0, true), (1, false)] {
        assert_eq!(accepts(headers(object_max + extra).collect()), is_accepted);
        assert_eq!(accepts(headers(list_max + extra).map(|(name, value)| json!([name, value])).collect()), is_accepted);
    }
    let key_of = |bytes: usize| tidegate::Key::new("k".repeat(bytes).as_bytes()).is_ok();
    assert!(key_of(bound("Key", "maxLength")) && !key_of(bound("Key", "maxLength") + 1));
    let is_key = |key: &str| {
        let body = json!({ "key": key, "limit": "1/s" }).to_string();
        matches!(CheckRequest::parse(body.as_bytes()), Ok(CheckRequest::Explicit(check)) if check.demands().is_ok())
    };
    assert!(bound("Key", "minLength") == 1 && is_key("k") && !is_key(""));
}
