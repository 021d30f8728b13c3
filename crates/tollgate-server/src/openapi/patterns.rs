//! Regular expressions that say exactly what our parsers accept.
//!
//! They are for those who generate questions from the document, to test the door or to build a client: what matches is
//! accepted, what does not is refused. The bounds of numbers are written into the expressions, digit by digit.

use std::sync::OnceLock;

use schemars::{Schema, SchemaGenerator, json_schema};
use tollgate::DEMANDS_MAX;

use crate::listeners::http::request::headers::{HEADER_NAME_BYTES_MAX, HEADERS_MAX};

/// Space between the words of a limit.
const SPACE: &str = r"[ \t\n\f\r]";
const QUOTA_MAX: u64 = 10_000_000;
const SLIDING_LOG_QUOTA_MAX: u64 = 100_000;
const WINDOW_US_MIN: u64 = 1_000;
const WINDOW_US_MAX: u64 = 400 * 86_400_000_000;
const LIMIT_BYTES_MAX: u64 = 256;
const KEY_BYTES_MAX: u64 = 64 * 1024;
/// The longest that the types of crate `http` hold.
const PATH_BYTES_MAX: u64 = 65_534;

/// The units of a window: their names and their microseconds.
const UNITS: [(&str, u64); 7] = [
    ("week|weeks|w", 604_800_000_000),
    ("day|days|d", 86_400_000_000),
    ("h|hr|hour|hours", 3_600_000_000),
    ("min|mins|minute|minutes|m", 60_000_000),
    ("s|sec|secs|second|seconds", 1_000_000),
    ("ms", 1_000),
    ("us|µs", 1),
];

/// A method: the characters of a token.
const METHOD: &str = r"^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$";
/// A path, perhaps with a query.
const PATH: &str = r##"^/[^\u0000-\u0020#<>?`\u007f]*(\?[^\u0000-\u0020"#<>\u007f]*)?$"##;
const HEADER_NAME: &str = METHOD;
const HEADER_VALUE: &str = r"^[^\u0000-\u0008\u000a-\u001f\u007f]*$";

/// The numbers from `min` to `max` in digits, with zeros before them or not.
fn numbers(min: u64, max: u64) -> String {
    let mut alternatives = Vec::new();
    let mut start = min;
    while start <= max {
        // As many of the last digits as possible are free, and of the one before them a range.
        let mut free = 1;
        while start.is_multiple_of(free * 10) && start + (free * 10 - 1) <= max {
            free *= 10;
        }
        let digit = start / free % 10;
        let top = (digit..=9).take_while(|top| start + (top - digit + 1) * free - 1 <= max).last().unwrap_or(digit);
        let before = start / (free * 10);
        let prefix = if before == 0 { String::new() } else { before.to_string() };
        let choice = if digit == top { digit.to_string() } else { format!("[{digit}-{top}]") };
        let zeros = free.ilog10();
        let rest = if zeros == 0 { String::new() } else { format!("[0-9]{{{zeros}}}") };
        alternatives.push(format!("{prefix}{choice}{rest}"));
        start += (top - digit + 1) * free;
    }
    format!("0*({})", alternatives.join("|"))
}

/// A window: a unit, or a number of them.
fn windows() -> String {
    let unit = |(names, us): (&str, u64)| {
        let (min, max) = (WINDOW_US_MIN.div_ceil(us), WINDOW_US_MAX / us);
        let optional = if min <= 1 { "?" } else { "" };
        format!("({}){optional}({names})", numbers(min, max))
    };
    UNITS.map(unit).join("|")
}

/// A whole limit text.
pub(crate) fn limit() -> &'static str {
    static PATTERN: OnceLock<String> = OnceLock::new();
    PATTERN.get_or_init(|| {
        let windows = windows();
        let rate = |quota_max: u64| format!("({})/({windows})", numbers(1, quota_max));
        let flag = format!("({SPACE}+count_denied=(true|false))");
        let capacity = |option: &str| {
            let option = format!("({SPACE}+{option}={})", numbers(1, QUOTA_MAX));
            format!("(({option}?{flag}?)|({flag}{option}))")
        };
        let plain = format!("({SPACE}+(sliding|sliding-counter|fixed-window))?{flag}?");
        let any = rate(QUOTA_MAX);
        format!(
            "^{SPACE}*({any}({plain}|{SPACE}+token-bucket{}|{SPACE}+leaky-bucket{})|{}{SPACE}+sliding-log{flag}?){SPACE}*$",
            capacity("burst"),
            capacity("queue"),
            rate(SLIDING_LOG_QUOTA_MAX),
        )
    })
}

pub(crate) fn limit_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "QUOTA/WINDOW [ALGORITHM] [option=value …]",
        "examples": ["10/min", "600/10s", "5000/day sliding-log", "100/min token-bucket burst=20"],
        "pattern": limit(),
        "maxLength": LIMIT_BYTES_MAX,
    })
}

pub(crate) fn key_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "Who is counted. At most 65536 bytes of UTF-8.",
        "examples": ["user:42"],
        "maxLength": KEY_BYTES_MAX,
    })
}

pub(crate) fn cost_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "integer",
        "description": "The units that the request takes; 0 only looks.",
        "default": 1,
        "minimum": 0,
        "maximum": u32::MAX,
    })
}

pub(crate) fn method_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "description": "Its method.", "examples": ["POST"], "pattern": METHOD })
}

pub(crate) fn path_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "Its path, as it was sent, with or without the query. At most 65534 bytes of UTF-8.",
        "examples": ["/shorten"],
        "pattern": PATH,
        "maxLength": PATH_BYTES_MAX,
    })
}

pub(crate) fn headers_schema(_: &mut SchemaGenerator) -> Schema {
    let name = json_schema!({ "type": "string", "pattern": HEADER_NAME, "maxLength": HEADER_NAME_BYTES_MAX });
    let value = json_schema!({ "type": "string", "pattern": HEADER_VALUE });
    json_schema!({
        "description": "Its headers, if a rule looks at them or the caller shows a key. Names have no case. At most 65536 bytes in all.",
        "oneOf": [
            {
                "type": "object",
                "description": "A name stands there once.",
                "propertyNames": name,
                "additionalProperties": value,
                "maxProperties": HEADERS_MAX,
            },
            {
                "type": "array",
                "description": "Pairs of name and value. LimitStatuses of one name keep their order.",
                "items": { "type": "array", "prefixItems": [name, value], "minItems": 2, "maxItems": 2 },
                "maxItems": HEADERS_MAX,
            },
        ],
    })
}

pub(crate) fn peer_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "The address at the other end of the socket on which it came.",
        "examples": ["203.0.113.9"],
        "anyOf": [{ "format": "ipv4" }, { "format": "ipv6" }],
    })
}

/// How many checks may be decided together.
pub(crate) const CHECKS_MAX: usize = DEMANDS_MAX;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use regex::Regex;
    use tollgate::Limit;

    use super::*;
    use crate::listeners::http::request::CheckRequest;

    fn regex(pattern: &str) -> Regex {
        // Our expressions are written for JSON Schema; the crate writes a character by its number differently.
        let mut translated = String::new();
        let mut rest = pattern;
        while let Some(at) = rest.find(r"\u") {
            translated += &rest[..at];
            translated += &format!("\\x{{{}}}", &rest[at + 2..at + 6]);
            rest = &rest[at + 6..];
        }
        Regex::new(&(translated + rest)).unwrap()
    }

    fn is_limit(text: &str) -> bool {
        static REGEX: OnceLock<Regex> = OnceLock::new();
        REGEX.get_or_init(|| regex(limit())).is_match(text)
    }

    #[test]
    fn numbers_match_their_range_and_nothing_else() {
        for (min, max) in [(1, 9), (1, 10), (3, 1_000), (7, 4_321), (999, 1_001), (1, 57)] {
            let regex = Regex::new(&format!("^({})$", numbers(min, max))).unwrap();
            for number in 0..6_000 {
                assert_eq!(
                    regex.is_match(&number.to_string()),
                    (min..=max).contains(&number),
                    "{number} in {min}..={max}"
                );
                assert_eq!(regex.is_match(&format!("00{number}")), (min..=max).contains(&number));
            }
        }
    }

    #[test]
    fn limits_at_the_bounds_match_if_they_are_accepted() {
        for text in [
            "10/min",
            "10/1min",
            " 10/min ",
            "10/0min",
            "0/min",
            "10/",
            "/min",
            "10 /min",
            "10/min sliding",
            "10/min  fixed-window",
            "10000000/s",
            "10000001/s",
            "100000/s sliding-log",
            "100001/s sliding-log",
            "1/400day",
            "1/401day",
            "1/57week",
            "1/58week",
            "1/1ms",
            "1/999us",
            "1/1000us",
            "1/us",
            "1/ms",
            "1/9600h",
            "1/9601h",
            "1/34560000000ms",
            "1/34560000001ms",
            "00010/001min",
            "1/min token-bucket burst=3",
            "1/min burst=3",
            "1/min leaky-bucket burst=3",
            "1/min leaky-bucket queue=10000001",
            "1/min token-bucket burst=3 count_denied=true",
            "1/min token-bucket count_denied=false burst=3",
            "1/min count_denied=maybe",
            "1/min token-bucket burst=3 burst=4",
            "1/min token-bucket burst=0",
            "1/min sliding sliding",
            "",
            " ",
            "1/min\t\n\x0c\rcount_denied=true",
            "1/min\u{a0}sliding",
            "1/µs",
            "1/2000µs",
            "1/MIN",
            "+1/min",
            "1/-1s",
            "1.5/min",
            "99999999999999999999/s",
            "1/99999999999999999999999us",
        ] {
            assert_eq!(is_limit(text), text.parse::<Limit>().is_ok(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_put_together_from_the_parts_of_a_limit_matches_if_it_is_accepted(
            quota in prop_oneof![0_u64..20, 99_990_u64..100_010, 9_999_990_u64..10_000_010],
            slash in prop_oneof![10 => Just("/"), 1 => Just(" /"), 1 => Just("")],
            count in prop_oneof![Just(String::new()), (0_u64..70).prop_map(|n| n.to_string()), (9_590_u64..9_610).prop_map(|n| n.to_string()), (34_559_999_990_u64..34_560_000_010).prop_map(|n| n.to_string())],
            unit in prop::sample::select(vec!["week", "w", "days", "d", "h", "hr", "min", "m", "s", "secs", "ms", "us", "µs", "y", "M"]),
            algorithm in prop::sample::select(vec!["", " sliding", " sliding-log", " sliding-counter", " fixed-window", " token-bucket", " leaky-bucket", " gcra"]),
            options in prop::collection::vec(prop::sample::select(vec![" burst=1", " burst=10000000", " burst=10000001", " burst=", "\tqueue=7", " count_denied=true", "  count_denied=false", " count_denied", " x=1"]), 0..3),
        ) {
            let text = format!("{quota}{slash}{count}{unit}{algorithm}{}", options.concat());
            prop_assert_eq!(is_limit(&text), text.parse::<Limit>().is_ok(), "{:?}", text);
        }
    }

    fn is_read(method: &str, path: &str, name: &str, value: &str) -> bool {
        let body = serde_json::json!({ "request": {
            "method": method, "path": path, "headers": { name: value }, "peer": "203.0.113.9",
        } });
        CheckRequest::read(body.to_string().as_bytes()).is_ok()
    }

    #[test]
    fn methods_paths_and_headers_match_if_they_are_accepted() {
        let [method, path, name, value] = [METHOD, PATH, HEADER_NAME, HEADER_VALUE].map(regex);
        let characters = (0..=0x17f_u32).chain([0x20ac, 0x1f600, 0xfffd]).filter_map(char::from_u32);
        for character in characters {
            for text in [character.to_string(), format!("a{character}b"), format!("{character}/")] {
                assert_eq!(is_read(&text, "/", "a", "b"), method.is_match(&text), "method {text:?}");
                assert_eq!(is_read("GET", "/", &text, "b"), name.is_match(&text), "header {text:?}");
                assert_eq!(is_read("GET", "/", "a", &text), value.is_match(&text), "value {text:?}");
                for whole in [text.clone(), format!("/{text}"), format!("/x?{text}")] {
                    assert_eq!(is_read("GET", &whole, "a", "b"), path.is_match(&whole), "path {whole:?}");
                }
            }
        }
        for whole in ["", "*", "http://host/x", "host:80", "//", "/?", "/??", "/a#b", "/\"x\"", "/{id}"] {
            assert_eq!(is_read("GET", whole, "a", "b"), path.is_match(whole), "path {whole:?}");
        }
        let long = |bytes: u64| "a".repeat(bytes as usize);
        assert!(is_read("GET", &format!("/{}", long(PATH_BYTES_MAX - 1)), "a", "b"));
        assert!(!is_read("GET", &format!("/{}", long(PATH_BYTES_MAX)), "a", "b"));
        assert!(is_read("GET", "/", &long(HEADER_NAME_BYTES_MAX as u64), "b"));
        assert!(!is_read("GET", "/", &long(HEADER_NAME_BYTES_MAX as u64 + 1), "b"));
        assert!(!is_read("", "/", "a", "b") && !is_read("GET", "/", "", "b") && is_read("GET", "/", "a", ""));
    }
}
