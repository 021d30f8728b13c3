//! The headers of a described request: an object of texts, or a list of pairs.
//!
//! ```json
//! {"x-api-key": "…", "x-forwarded-for": "198.51.100.7"}
//! [["x-api-key", "…"], ["x-forwarded-for", "6.6.6.6"], ["X-Forwarded-For", "198.51.100.7"]]
//! ```
//!
//! Names are case-insensitive. A request may have several headers of one name, and their order matters: the last entry
//! of a forwarding header is the one that the nearest proxy wrote. A list has an order, which is kept. An object has
//! none, so two names that differ only by case are rejected: choosing one of them would choose the client's address.
//!
//! Reading stops at the first header beyond a bound, so the cost of a long list does not depend on its length.

use std::fmt;

use http::HeaderMap;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::listeners::described::{DescriptionError, HeaderLines};

/// The headers of a described request, deserialized from an object or a list of pairs.
#[derive(Default)]
pub(super) struct Headers(pub(super) HeaderMap);

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Headers, D::Error> {
        deserializer.deserialize_any(HeadersVisitor)
    }
}

struct HeadersVisitor;

impl<'de> Visitor<'de> for HeadersVisitor {
    type Value = Headers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings by header name, or a list of pairs [\"name\", \"value\"]")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Headers, A::Error> {
        let mut lines = HeaderLines::default();
        while let Some(name) = map.next_key::<JsonString<'_>>()? {
            let name = lines.name(name.as_bytes()).map_err(field_error)?;
            if lines.headers.contains_key(&name) {
                return Err(A::Error::custom(format_args!(
                    "request.headers: duplicate name `{name}` (names are case-insensitive); to send several headers \
                     with the same name, use a list of pairs [[\"name\", \"value\"], …]"
                )));
            }
            let value: JsonString<'_> = map.next_value()?;
            lines.add(name, value.as_bytes()).map_err(field_error)?;
        }
        Ok(Headers(lines.headers))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Headers, A::Error> {
        let mut lines = HeaderLines::default();
        while let Some((name, value)) = list.next_element::<(JsonString<'_>, JsonString<'_>)>()? {
            let name = lines.name(name.as_bytes()).map_err(field_error)?;
            lines.add(name, value.as_bytes()).map_err(field_error)?;
        }
        Ok(Headers(lines.headers))
    }
}

/// Returns the error of a field of `request`.
pub(super) fn field_error<E: Error>(error: DescriptionError) -> E {
    E::custom(format_args!("request.{error}"))
}

/// A JSON string, borrowed from the body if it contains no escapes.
#[derive(Deserialize)]
pub(super) struct JsonString<'b>(#[serde(borrow)] pub(super) std::borrow::Cow<'b, str>);

impl std::ops::Deref for JsonString<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listeners::described::{HEADERS_BYTES_MAX, HEADERS_MAX};

    fn read(text: &str) -> Result<HeaderMap, String> {
        serde_json::from_str::<Headers>(text).map(|Headers(headers)| headers).map_err(|error| error.to_string())
    }

    #[test]
    fn names_are_case_insensitive_and_headers_keep_their_order() {
        let headers = read(r#"[["X-Forwarded-For","6.6.6.6"],["x-a","b"],["x-forwarded-FOR","10.0.0.1"]]"#).unwrap();
        let lines: Vec<_> = headers.get_all("x-forwarded-for").iter().collect();
        assert_eq!(lines, ["6.6.6.6", "10.0.0.1"]);
        assert_eq!(read(r#"{"X-API-Key":"k"}"#).unwrap()["x-api-key"], "k");
        assert!(read("[]").unwrap().is_empty() && read("{}").unwrap().is_empty());
    }

    #[test]
    fn names_that_differ_only_by_case_are_rejected_in_an_object() {
        for text in [r#"{"x-a":"1","x-a":"1"}"#, r#"{"x-forwarded-for":"1","y":"","X-Forwarded-For":"2"}"#] {
            assert!(read(text).unwrap_err().contains("are case-insensitive"), "{text}");
        }
    }

    #[test]
    fn malformed_headers_are_rejected() {
        for (text, phrase) in [
            (r#"[["a"]]"#, "invalid length 1"),
            (r#"[["a","b","c"]]"#, "trailing characters"),
            (r#"["a","b"]"#, "invalid type: string"),
            (r#"[["a",1]]"#, "invalid type: integer"),
            (r#"{"a":null}"#, "invalid type: null"),
            (r#"{"a b":""}"#, "`a b` is not a header name"),
            (r#"{"a":"\n"}"#, "the value of `a` contains a control character"),
            ("3", "expected an object of strings"),
        ] {
            assert!(read(text).unwrap_err().contains(phrase), "{text}: {:?}", read(text));
        }
    }

    #[test]
    fn headers_are_accepted_up_to_the_bounds() {
        let pairs = |count: usize| {
            let pairs: Vec<_> = (0..count).map(|n| [format!("x-{n}"), String::new()]).collect();
            serde_json::to_string(&pairs).unwrap()
        };
        assert_eq!(read(&pairs(HEADERS_MAX)).unwrap().len(), HEADERS_MAX);
        assert!(read(&pairs(HEADERS_MAX + 1)).unwrap_err().contains("at most 256 entries"));
        let value = |bytes: usize| format!(r#"{{"x":"{}"}}"#, "a".repeat(bytes));
        assert!(read(&value(HEADERS_BYTES_MAX - 1)).is_ok());
        assert!(read(&value(HEADERS_BYTES_MAX)).unwrap_err().contains("at most 65536 bytes in total"));
    }
}
