//! What a body of `POST /v1/check` asks.
//!
//! ```json
//! {"key": "user:42", "limit": "10/min", "cost": 1}
//! {"checks": [{"key": "user:42", "limit": "10/min"}, {"key": "user:42", "limit": "1000/day"}]}
//! {"request": {"method": "POST", "path": "/shorten", "headers": {"x-api-key": "…"}, "peer": "203.0.113.9"}}
//! {"request": {"method": "GET", "path": "/", "headers": [["cookie", "a=1"], ["cookie", "b=2"]], "peer": "203.0.113.9"}}
//! ```
//!
//! The second form is decided together: all limits pass, or none is charged. The third is decided by the rules. Anything else in the body is refused with what was
//! expected; a misspelt field must never mean "no limit".

pub(crate) mod headers;
mod whole;

use std::borrow::Cow;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tollgate::{CheckError, Cost, DEMANDS_MAX, Demand, Key, Limit};

use self::headers::Headers;
use self::whole::Whole;
use crate::openapi::patterns;

/// The whole body, before it is known which form it has. A field that is there is never null.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Body<'b> {
    #[serde(borrow, default, deserialize_with = "present_text")]
    key: Option<Cow<'b, str>>,
    #[serde(borrow, default, deserialize_with = "present_text")]
    limit: Option<Cow<'b, str>>,
    #[serde(default, deserialize_with = "present")]
    cost: Option<Whole>,
    #[serde(borrow, default, deserialize_with = "present")]
    checks: Option<Checks<'b>>,
    #[serde(borrow, default, deserialize_with = "present")]
    request: Option<Object<Described<'b>>>,
}

/// The three forms, of which a body has one.
impl JsonSchema for Body<'_> {
    fn schema_name() -> Cow<'static, str> {
        "CheckRequest".into()
    }

    fn json_schema(schemas: &mut SchemaGenerator) -> Schema {
        let one = schemas.subschema_for::<One<'_>>();
        let request = schemas.subschema_for::<Described<'_>>();
        let checks = json_schema!({
            "type": "array",
            "description": "All limits pass, or none is charged. No two of them may count on the same counter.",
            "items": one,
            "minItems": 1,
            "maxItems": patterns::CHECKS_MAX,
        });
        let form = |field: &str, schema: Schema| {
            json_schema!({
                "type": "object",
                "properties": { field: schema },
                "required": [field],
                "additionalProperties": false,
            })
        };
        json_schema!({ "oneOf": [one, form("checks", checks), form("request", request)] })
    }
}

/// A request that somebody else received.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Request")]
struct Described<'b> {
    #[serde(borrow)]
    #[schemars(schema_with = "patterns::method_schema")]
    method: Cow<'b, str>,
    #[serde(borrow)]
    #[schemars(schema_with = "patterns::path_schema")]
    path: Cow<'b, str>,
    #[serde(default)]
    #[schemars(schema_with = "patterns::headers_schema")]
    headers: Headers,
    #[schemars(schema_with = "patterns::peer_schema")]
    peer: std::net::IpAddr,
}

/// A value that is there, and not null.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Text that is there, borrowed from the body if nothing in it is escaped. By itself a `Cow` would be a copy.
fn present_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Cow<'de, str>>, D::Error> {
    #[derive(Deserialize)]
    struct Text<'b>(#[serde(borrow)] Cow<'b, str>);
    Text::deserialize(deserializer).map(|Text(text)| Some(text))
}

/// A JSON object and nothing else; by itself a struct would also be read from an array of its fields.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object with key and limit, and cost if it is not 1")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// The entries of `checks`. Reading stops at the first one too many, so what a long list costs does not depend on its length.
struct Checks<'b>(Vec<Object<One<'b>>>);

impl<'de: 'b, 'b> Deserialize<'de> for Checks<'b> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ChecksVisitor<'b>(PhantomData<&'b ()>);
        impl<'de: 'b, 'b> Visitor<'de> for ChecksVisitor<'b> {
            type Value = Checks<'b>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "a list of 1 to {DEMANDS_MAX} objects with key and limit")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut checks = Vec::new();
                while let Some(check) = list.next_element()? {
                    if checks.len() == DEMANDS_MAX {
                        return Err(A::Error::custom(format_args!(
                            "checks has 1 to {DEMANDS_MAX} entries, found more"
                        )));
                    }
                    checks.push(check);
                }
                Ok(Checks(checks))
            }
        }
        deserializer.deserialize_seq(ChecksVisitor(PhantomData))
    }
}

/// Whether somebody may take so many units of one limit.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Check")]
struct One<'b> {
    #[serde(borrow)]
    #[schemars(schema_with = "patterns::key_schema")]
    key: Cow<'b, str>,
    #[serde(borrow)]
    #[schemars(schema_with = "patterns::limit_schema")]
    limit: Cow<'b, str>,
    #[serde(default, deserialize_with = "present")]
    #[schemars(schema_with = "patterns::cost_schema")]
    cost: Option<Whole>,
}

/// What was asked.
pub(crate) enum CheckRequest<'b> {
    /// Limits, whom they count, and how much.
    Explicit(Explicit<'b>),
    /// What the rules say of a request that came from somewhere.
    ByRules(Box<http::Request<()>>, std::net::IpAddr),
}

/// A list of keys, limits and costs.
pub(crate) struct Explicit<'b> {
    parts: Vec<(Cow<'b, str>, Limit, Cost)>,
    /// Whether the body has the form `checks`, so that errors name the index.
    is_list: bool,
}

/// Why a body is no question. The text says what was expected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckRequestError {
    /// JSON, but not of this shape: the text says which field, and what it should be.
    #[error("{0}")]
    Shape(serde_json::Error),
    /// No JSON at all.
    #[error("{0}; expected a JSON object such as {{\"key\": \"user:42\", \"limit\": \"10/min\"}}")]
    Json(serde_json::Error),
    #[error(
        "expected one of {{\"key\": …, \"limit\": …}}, {{\"checks\": [{{\"key\": …, \"limit\": …}}, …]}} and \
         {{\"request\": {{\"method\": …, \"path\": …, \"peer\": …}}}}"
    )]
    Form,
    #[error("request: {0}")]
    Request(#[from] http::Error),
    #[error(
        "request.path: expected a path such as /shorten?x=1, which begins with / and has no # and no control character"
    )]
    Path,
    #[error("checks has 1 to {DEMANDS_MAX} entries, found none")]
    NoChecks,
    #[error("{place}limit: {error}")]
    Limit { place: String, error: tollgate::LimitTextError },
    #[error("{place}key: {error}")]
    Key { place: String, error: tollgate::KeyError },
    #[error("{place}cost is a whole number from 0 to {}, found {found}", u32::MAX)]
    Cost { place: String, found: u64 },
    #[error("{0}")]
    Check(#[from] CheckError),
}

impl From<serde_json::Error> for CheckRequestError {
    fn from(error: serde_json::Error) -> CheckRequestError {
        match error.is_data() {
            true => CheckRequestError::Shape(error),
            false => CheckRequestError::Json(error),
        }
    }
}

impl<'b> CheckRequest<'b> {
    pub(crate) fn read(body: &'b [u8]) -> Result<CheckRequest<'b>, CheckRequestError> {
        let Object(body): Object<Body<'b>> = serde_json::from_slice(body)?;
        let is_list = body.checks.is_some();
        let parts = match body {
            Body { key: None, limit: None, cost: None, checks: None, request: Some(Object(described)) } => {
                return described.into_question();
            }
            Body { key: Some(key), limit: Some(limit), cost, checks: None, request: None } => {
                vec![part(One { key, limit, cost }, String::new)?]
            }
            Body { key: None, limit: None, cost: None, checks: Some(checks), request: None } => {
                let Checks(checks) = checks;
                if checks.is_empty() {
                    return Err(CheckRequestError::NoChecks);
                }
                let numbered = checks.into_iter().enumerate();
                numbered.map(|(index, Object(one))| part(one, || place(index))).collect::<Result<_, _>>()?
            }
            _ => return Err(CheckRequestError::Form),
        };
        Ok(CheckRequest::Explicit(Explicit { parts, is_list }))
    }
}

impl Described<'_> {
    fn into_question<'b>(self) -> Result<CheckRequest<'b>, CheckRequestError> {
        if !self.path.starts_with('/') || self.path.bytes().any(|byte| byte == b'#' || byte == 0x7f) {
            return Err(CheckRequestError::Path);
        }
        let mut request = http::Request::builder().method(&*self.method).uri(&*self.path).body(())?;
        let Headers(headers) = self.headers;
        *request.headers_mut() = headers;
        Ok(CheckRequest::ByRules(Box::new(request), self.peer))
    }
}

impl Explicit<'_> {
    /// Returns the demands, in the order of the body.
    ///
    /// # Errors
    /// Returns an error if a key is too long.
    pub(crate) fn demands(&self) -> Result<Vec<Demand<'_>>, CheckRequestError> {
        let place = |index| if self.is_list { place(index) } else { String::new() };
        let parts = self.parts.iter().enumerate().map(|(index, (key, limit, cost))| {
            let key = Key::new(&**key).map_err(|error| CheckRequestError::Key { place: place(index), error })?;
            Ok(Demand::new(*limit, key).cost(*cost))
        });
        parts.collect()
    }
}

/// Returns the prefix of errors about an entry of `checks`.
fn place(index: usize) -> String {
    format!("checks[{index}].")
}

fn part<'b>(
    One { key, limit, cost }: One<'b>,
    place: impl Fn() -> String,
) -> Result<(Cow<'b, str>, Limit, Cost), CheckRequestError> {
    let limit = limit.parse().map_err(|error| CheckRequestError::Limit { place: place(), error })?;
    let cost = cost.map_or(1, |Whole(units)| units);
    let units = u32::try_from(cost).map_err(|_| CheckRequestError::Cost { place: place(), found: cost })?;
    Ok((key, limit, Cost::new(units)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate::Check;

    fn demands_of(body: &str) -> Result<Vec<u32>, CheckRequestError> {
        match CheckRequest::read(body.as_bytes())? {
            CheckRequest::Explicit(explicit) => {
                let demands = explicit.demands()?;
                Check::new(&demands)?;
                Ok(demands.iter().map(|demand| demand.cost.units()).collect())
            }
            CheckRequest::ByRules(..) => Ok(Vec::new()),
        }
    }

    #[test]
    fn all_three_forms_are_read() {
        assert_eq!(demands_of(r#"{"key":"user:42","limit":"10/min","cost":3}"#).unwrap(), [3]);
        let together = r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"9/day","cost":0}]}"#;
        assert_eq!(demands_of(together).unwrap(), [1, 0]);
        assert_eq!(demands_of(r#"{"checks":[{"key":"a","limit":"9/s","cost":3.0}]}"#).unwrap(), [3]);
        let described =
            br#"{"request":{"method":"POST","path":"/shorten","headers":{"x-a":"b"},"peer":"203.0.113.9"}}"#;
        let CheckRequest::ByRules(request, peer) = CheckRequest::read(described).unwrap() else { panic!("by rules") };
        assert_eq!(
            (request.uri().path(), request.headers()["x-a"].as_bytes(), peer),
            ("/shorten", &b"b"[..], [203, 0, 113, 9].into())
        );
    }

    #[test]
    fn whatever_else_stands_there_is_refused_with_what_was_expected() {
        for (body, phrase) in [
            ("", "EOF"),
            ("[]", "expected an object with key and limit"),
            (r#"{"checks":[["a","1/s"]]}"#, "expected an object with key and limit"),
            ("{}", "expected one of {\"key\""),
            (r#"{"key":"a"}"#, "expected one of {\"key\""),
            (r#"{"key":"a","limit":"1/s","checks":[]}"#, "expected one of"),
            (r#"{"checks":[]}"#, "1 to 32 entries, found none"),
            (r#"{"key":"a","limit":"1/fortnight"}"#, "limit: unknown unit of time"),
            (
                r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"0/s"}]}"#,
                "checks[1].limit: expected a quota",
            ),
            (
                r#"{"key":"a","limit":"1/s","cots":1}"#,
                "unknown field `cots`, expected one of `key`, `limit`, `cost`, `checks`, `request`",
            ),
            (r#"{"key":"a","limit":"1/s","cost":-1}"#, "invalid value"),
            (r#"{"key":"a","limit":"1/s","cost":4294967296}"#, "cost is a whole number from 0 to 4294967295"),
            (r#"{"request":{"method":"GET","path":"/"}}"#, "missing field `peer`"),
            (r#"{"request":{"method":"G T","path":"/","peer":"::1"}}"#, "request: invalid HTTP method"),
            (r#"{"request":{"method":"GET","path":"/","peer":"somewhere"}}"#, "invalid IP address syntax"),
            (r#"{"request":{"method":"GET","path":"http://x/","peer":"::1"}}"#, "request.path: expected a path"),
            (
                r#"{"request":{"method":"GET","path":"/","headers":{"x-a":"b","x-b":"","x-a":"c"},"peer":"::1"}}"#,
                "request.headers: `x-a` stands there twice",
            ),
            (
                r#"{"request":{"method":"GET","path":"/","headers":{"x-a":"b","X-A":"c"},"peer":"::1"}}"#,
                "request.headers: `x-a` stands there twice; names have no case",
            ),
            (r#"{"request":{"method":"GET","path":"/","headers":[1],"peer":"::1"}}"#, "invalid type: integer"),
            (r#"{"key":"a","limit":"1/s","cost":1e-400}"#, "invalid value: 1e-400, expected a whole number"),
            (r#"{"key":"a","limit":"1/s","cost":1.5}"#, "expected a whole number from 0 to 4294967295"),
            (r#"{"key":"a","limit":"1/s","cost":null}"#, "invalid value: null"),
            (r#"{"key":"a","limit":"1/s","request":null}"#, "invalid type: null"),
            (r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"2/s"}]}"#, "same counter"),
        ] {
            let error = demands_of(body).expect_err(body);
            assert!(error.to_string().contains(phrase), "{body}: {error}");
        }
        let long = "x".repeat(64 * 1024 + 1);
        for (body, phrase) in [
            (format!(r#"{{"key":"{long}","limit":"1/s"}}"#), "key: a key has at most 65536 bytes"),
            (
                format!(r#"{{"checks":[{{"key":"a","limit":"1/s"}},{{"key":"{long}","limit":"1/s"}}]}}"#),
                "checks[1].key: ",
            ),
        ] {
            let error = demands_of(&body).unwrap_err().to_string();
            assert!(error.starts_with(phrase), "{error}");
        }
        let many = format!("{{\"checks\":[{}", r#"{"key":"a","limit":"1/s"},"#.repeat(33));
        assert!(demands_of(&many).unwrap_err().to_string().contains("1 to 32 entries, found more"));
        let deep = format!("{{\"key\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(CheckRequest::read(deep.as_bytes()).is_err());
    }
}
