//! Schemas of fields, where the Rust type alone says too little.
//!
//! The patterns of methods, paths and headers are exact: a text matches if and only if it is accepted. That of a limit
//! is short instead. It has the form of a limit but not its bounds, so every limit matches, and a text that matches may
//! still be rejected with 400 (`1/999day`, `5/min burst=3`).

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use crate::listeners::described::{HEADER_NAME_BYTES_MAX, HEADERS_MAX};
use crate::listeners::http::request::WAIT_MS_MAX;

/// `QUOTA/WINDOW [ALGORITHM] [option=value …]`.
const LIMIT: &str =
    r"^\s*[0-9]+/[0-9]*(us|µs|ms|s|secs?|seconds?|m|mins?|minutes?|h|hr|hours?|d|days?|w|weeks?)(\s+[a-z_=0-9-]+)*\s*$";
const LIMIT_BYTES_MAX: usize = 256;
const KEY_BYTES_MAX: usize = 64 * 1024;
/// The longest path that the types of crate `http` hold.
const PATH_BYTES_MAX: usize = 65_534;

/// The characters of a token in HTTP.
const METHOD: &str = r"^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$";
/// A path with an optional query.
const PATH: &str = r##"^/[^\u0000-\u0020#<>?`\u007f]*(\?[^\u0000-\u0020"#<>\u007f]*)?$"##;
const HEADER_NAME: &str = METHOD;
const HEADER_VALUE: &str = r"^[^\u0000-\u0008\u000a-\u001f\u007f]*$";

pub(crate) fn limit(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "The limit: QUOTA/WINDOW [ALGORITHM] [option=value …]. Bounds that the pattern does not express are \
            checked too; a limit beyond them is rejected with 400.",
        "examples": ["10/min", "600/10s", "5000/day sliding-log", "100/min token-bucket burst=20"],
        "pattern": LIMIT,
        "maxLength": LIMIT_BYTES_MAX,
    })
}

pub(crate) fn key(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "What is counted, such as a user or an address. At most 65536 bytes of UTF-8.",
        "examples": ["user:42"],
        "maxLength": KEY_BYTES_MAX,
    })
}

pub(crate) fn cost(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "integer",
        "description": "The units that the request costs. 0 is a peek, which charges nothing and is never denied.",
        "default": 1,
        "minimum": 0,
        "maximum": u32::MAX,
    })
}

/// Returns the schema of the text of a method, without a description.
pub(super) fn method_text() -> Value {
    json!({ "type": "string", "pattern": METHOD })
}

/// Returns the schema of the text of a path with an optional query, without a description or a length.
pub(super) fn path_text() -> Value {
    json!({ "type": "string", "pattern": PATH })
}

pub(crate) fn wait_ms(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "integer",
        "description": "Holds the response until every limit has room, for at most this many milliseconds. Checks that wait for \
            the same counters on this instance are admitted in order of arrival. If there is no room in time, the response \
            is 429, and nothing is charged. If this is known earlier, the response is sent at once.",
        "minimum": 0,
        "maximum": WAIT_MS_MAX,
    })
}

pub(crate) fn receipt(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "boolean",
        "description": "Whether the response to an admission contains a receipt, with which POST /v1/refund can refund the units.",
        "default": false,
    })
}

pub(crate) fn method(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "description": "The method of the request.", "examples": ["POST"], "pattern": METHOD })
}

pub(crate) fn path(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "The path of the request as it was received, with or without the query. At most 65534 bytes of UTF-8.",
        "examples": ["/shorten"],
        "pattern": PATH,
        "maxLength": PATH_BYTES_MAX,
    })
}

pub(crate) fn headers(_: &mut SchemaGenerator) -> Schema {
    let name = json_schema!({ "type": "string", "pattern": HEADER_NAME, "maxLength": HEADER_NAME_BYTES_MAX });
    let value = json_schema!({ "type": "string", "pattern": HEADER_VALUE });
    json_schema!({
        "description": "The headers of the request that the rules need, or that identify the caller. Names are \
            case-insensitive. At most 65536 bytes in total.",
        "oneOf": [
            {
                "type": "object",
                "description": "Values by name. No two names may differ only by case.",
                "propertyNames": name,
                "additionalProperties": value,
                "maxProperties": HEADERS_MAX,
            },
            {
                "type": "array",
                "description": "Pairs of name and value. Headers with the same name keep their order.",
                "items": { "type": "array", "prefixItems": [name, value], "minItems": 2, "maxItems": 2 },
                "maxItems": HEADERS_MAX,
            },
        ],
    })
}

pub(crate) fn peer(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "The remote address of the socket on which the request was received.",
        "examples": ["203.0.113.9"],
        "anyOf": [{ "format": "ipv4" }, { "format": "ipv6" }],
    })
}

/// Changes the schema of an optional field to exclude null, for a field that is absent without a value.
pub(crate) fn not_null(schema: &mut Schema) {
    let is_null = |alternative: &Value| *alternative == json!("null") || *alternative == json!({ "type": "null" });
    for keyword in ["type", "anyOf"] {
        let Some(Value::Array(alternatives)) = schema.get_mut(keyword) else { continue };
        alternatives.retain(|alternative| !is_null(alternative));
        if let ("type", [only]) = (keyword, &alternatives[..]) {
            let only = only.clone();
            schema.insert(keyword.to_owned(), only);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use regex::Regex;
    use tidegate::Limit;

    use super::*;
    use crate::listeners::http::request::CheckRequest;

    /// Compiles a pattern of JSON Schema, in which a character is written by its number as `\u0020`.
    pub(crate) fn regex(pattern: &str) -> Regex {
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
        let pattern = regex(LIMIT);
        let units =
            "us µs ms s sec secs second seconds m min mins minute minutes h hr hour hours d day days w week weeks";
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
        let pattern = regex(LIMIT);
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
            assert_matches_if_accepted(&regex(LIMIT), &text);
        }
    }

    fn is_accepted(method: &str, path: &str, name: &str, value: &str) -> bool {
        let body = serde_json::json!({ "request": {
            "method": method, "path": path, "headers": { name: value }, "peer": "203.0.113.9",
        } });
        CheckRequest::parse(body.to_string().as_bytes()).is_ok()
    }

    #[test]
    fn methods_paths_and_headers_match_exactly_if_they_are_accepted() {
        let [method, path, name, value] = [METHOD, PATH, HEADER_NAME, HEADER_VALUE].map(regex);
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
        assert!(is_accepted("GET", &format!("/{}", long(PATH_BYTES_MAX - 1)), "a", "b"));
        assert!(!is_accepted("GET", &format!("/{}", long(PATH_BYTES_MAX)), "a", "b"));
        assert!(is_accepted("GET", "/", &long(HEADER_NAME_BYTES_MAX), "b"));
        assert!(!is_accepted("GET", "/", &long(HEADER_NAME_BYTES_MAX + 1), "b"));
        assert!(!is_accepted("", "/", "a", "b") && !is_accepted("GET", "/", "", "b"));
        assert!(is_accepted("GET", "/", "a", ""));
    }
}
