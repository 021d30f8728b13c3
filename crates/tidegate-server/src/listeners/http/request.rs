//! The request body of `POST /v1/check`.
//!
//! ```json
//! {"key": "user:42", "limit": "10/min", "cost": 1}
//! {"key": "hooks.example.com", "limit": "10/s", "wait_ms": 5000}
//! {"key": "user:42", "limit": "1000/min", "cost": 500, "receipt": true}
//! {"checks": [{"key": "user:42", "limit": "10/min"}, {"key": "user:42", "limit": "1000/day"}]}
//! {"request": {"method": "POST", "path": "/shorten", "headers": {"x-api-key": "…"}, "peer": "203.0.113.9"}}
//! {"request": {"method": "GET", "path": "/", "headers": [["cookie", "a=1"], ["cookie", "b=2"]], "peer": "203.0.113.9"}}
//! ```
//!
//! Checks in `checks` are decided together: all limits pass, or none is charged. A described `request` is decided by the
//! rules. With `wait_ms`, the answer is held until there is room; that is for outgoing work, so a `request` must not have
//! it. With `receipt`, an admission has a receipt, with which its units can be refunded. Anything else is rejected with
//! a message that says what is expected; a misspelt field must never mean "no limit".

mod headers;
pub(super) mod whole_number;

use std::borrow::Cow;
use std::marker::PhantomData;
use std::time::Duration;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tidegate::{CheckError, Cost, DEMANDS_MAX, Demand, Key, Limit};

use self::headers::{Headers, JsonString, field_error};
use crate::listeners::described::{self, DescriptionError};
use crate::receipts::ReceiptUnavailable;

/// The maximum of `wait_ms`: as long as HTTP clients commonly wait for a response.
pub(crate) const WAIT_MS_MAX: u32 = 60_000;

/// The fields of a body, before it is clear which of the three forms it has. Unknown fields and null are errors.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckBody<'b> {
    #[serde(borrow, default, deserialize_with = "present_text")]
    key: Option<Cow<'b, str>>,
    #[serde(borrow, default, deserialize_with = "present_limit")]
    limit: Option<Cow<'b, str>>,
    #[serde(default, deserialize_with = "present_cost")]
    cost: Option<u64>,
    #[serde(borrow, default, deserialize_with = "present")]
    checks: Option<CheckList<'b>>,
    #[serde(borrow, default, deserialize_with = "present")]
    request: Option<Object<DescribedRequest<'b>>>,
    #[serde(default, deserialize_with = "present_wait")]
    wait_ms: Option<u64>,
    #[serde(default)]
    receipt: bool,
}

/// A request that another program received, to be decided by the rules.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DescribedRequest<'b> {
    #[serde(borrow)]
    method: Cow<'b, str>,
    #[serde(borrow)]
    path: Cow<'b, str>,
    #[serde(default)]
    headers: Headers,
    #[serde(deserialize_with = "peer_address")]
    peer: std::net::IpAddr,
}

/// Deserializes an IP address. The error names the field.
fn peer_address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<std::net::IpAddr, D::Error> {
    let text = Cow::<str>::deserialize(deserializer)?;
    described::peer_address(text.as_bytes()).map_err(field_error)
}

/// Deserializes a field that is present. Unlike for a plain `Option`, null is an error.
pub(super) fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Deserializes a string field that is present, borrowed from the body if it contains no escapes.
///
/// A plain `Cow` field would always be a copy. Null is an error.
fn present_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Cow<'de, str>>, D::Error> {
    JsonString::deserialize(deserializer).map(|JsonString(text)| Some(text))
}

/// Deserializes a `limit` that is present, as [`limit_text`] does.
fn present_limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Cow<'de, str>>, D::Error> {
    limit_text(deserializer).map(Some)
}

/// Deserializes the text of a limit, borrowed from the body if it contains no escapes. The error for a list says where
/// several limits belong.
fn limit_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Cow<'de, str>, D::Error> {
    struct LimitVisitor;
    impl<'de> Visitor<'de> for LimitVisitor {
        type Value = Cow<'de, str>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a limit as a string, such as \"10/min\"")
        }

        fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
            Ok(Cow::Borrowed(text))
        }

        fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
            Ok(Cow::Owned(text.to_owned()))
        }

        fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
            Err(A::Error::custom(
                "limit must be one limit, such as \"10/min\", found a list; several limits are entries of checks: \
                 {\"checks\": [{\"key\": …, \"limit\": …}, …]}",
            ))
        }
    }
    // `deserialize_str` would reject a list before the visitor sees it.
    deserializer.deserialize_any(LimitVisitor)
}

/// Deserializes a `cost` that is present. Null is an error.
fn present_cost<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    whole_number::deserialize(deserializer, "cost", u32::MAX).map(Some)
}

/// Deserializes a `wait_ms` that is present. Null is an error.
fn present_wait<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    whole_number::deserialize(deserializer, "wait_ms", WAIT_MS_MAX).map(Some)
}

/// A value that is read from a JSON object only. A plain struct would also accept an array of its fields.
pub(super) struct Object<T>(pub(super) T);

/// Describes an [`Object`] in the error message for other JSON values.
pub(super) trait Describe {
    const DESCRIPTION: &'static str;
}

impl Describe for CheckBody<'_> {
    const DESCRIPTION: &'static str = "an object with key and limit, with checks, or with request";
}

impl Describe for CheckEntry<'_> {
    const DESCRIPTION: &'static str = "an object with key and limit, and cost if it is not 1";
}

impl Describe for DescribedRequest<'_> {
    const DESCRIPTION: &'static str = "an object with method, path and peer, and headers if there are any";
}

impl<'de, T: Deserialize<'de> + Describe> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de> + Describe> Visitor<'de> for ObjectVisitor<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(T::DESCRIPTION)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// The entries of `checks`, at most 32. May be empty here; [`CheckRequest::parse`] rejects that.
///
/// Reading fails at the first entry beyond, so the cost of a long list does not depend on its length.
struct CheckList<'b>(Vec<Object<CheckEntry<'b>>>);

impl<'de: 'b, 'b> Deserialize<'de> for CheckList<'b> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CheckListVisitor<'b>(PhantomData<&'b ()>);
        impl<'de: 'b, 'b> Visitor<'de> for CheckListVisitor<'b> {
            type Value = CheckList<'b>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "a list of 1 to {DEMANDS_MAX} objects with key and limit")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut checks = Vec::new();
                while let Some(check) = list.next_element()? {
                    if checks.len() == DEMANDS_MAX {
                        return Err(A::Error::custom(format_args!(
                            "checks must have 1 to {DEMANDS_MAX} entries, found more"
                        )));
                    }
                    checks.push(check);
                }
                Ok(CheckList(checks))
            }
        }
        deserializer.deserialize_seq(CheckListVisitor(PhantomData))
    }
}

/// A check of one limit: whether `cost` units of it may be used by `key`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckEntry<'b> {
    #[serde(borrow)]
    key: Cow<'b, str>,
    #[serde(borrow, deserialize_with = "limit_text")]
    limit: Cow<'b, str>,
    #[serde(default, deserialize_with = "present_cost")]
    cost: Option<u64>,
}

/// A parsed body of `POST /v1/check`.
pub(crate) enum CheckRequest<'b> {
    /// One or several checks that name their limits.
    Explicit(ExplicitCheck<'b>),
    /// A described request, to be decided by the rules.
    ByRules(RequestCheck),
}

/// A described request, with the address of its peer.
pub(crate) struct RequestCheck {
    pub(crate) request: Box<http::Request<()>>,
    pub(crate) peer: std::net::IpAddr,
    /// Whether an admission gets a receipt.
    pub(crate) has_receipt: bool,
}

/// The checks of a body that names its limits, in the order of the body. They are decided together.
pub(crate) struct ExplicitCheck<'b> {
    entries: Vec<(Cow<'b, str>, Limit, Cost)>,
    /// Whether the body has the form with `checks`, whose errors name the entry.
    is_list: bool,
    /// The longest time to wait for room, or `None` if the checks are decided at once.
    wait_max: Option<Duration>,
    /// Whether an admission gets a receipt.
    has_receipt: bool,
}

/// The reason why a body is rejected. The message says what is expected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckRequestError {
    /// JSON with an unknown, missing or malformed field. The message names the field.
    #[error("{0}")]
    Shape(serde_json::Error),
    /// Not JSON.
    #[error("{0}; expected a JSON object such as {{\"key\": \"user:42\", \"limit\": \"10/min\"}}")]
    Json(serde_json::Error),
    #[error(
        "expected one of {{\"key\": …, \"limit\": …}}, {{\"checks\": [{{\"key\": …, \"limit\": …}}, …]}} and \
         {{\"request\": {{\"method\": …, \"path\": …, \"peer\": …}}}}"
    )]
    Form,
    #[error("request.{0}")]
    Request(#[from] DescriptionError),
    #[error("checks must have 1 to {DEMANDS_MAX} entries, found none")]
    NoChecks,
    #[error("{entry}limit: {error}")]
    Limit { entry: String, error: Box<tidegate::LimitTextError> },
    #[error("{entry}key must not be empty")]
    EmptyKey { entry: String },
    #[error("{entry}key: {error}")]
    Key { entry: String, error: tidegate::KeyError },
    #[error("{entry}cost must be a whole number from 0 to {}, found {found}", u32::MAX)]
    Cost { entry: String, found: u64 },
    #[error("wait_ms must be a whole number from 0 to {WAIT_MS_MAX}, found {0}")]
    Wait(u64),
    #[error(
        "wait_ms is for checks that name their key and limit; a request is decided at once, so omit wait_ms and wait \
         for retry_after_ms instead"
    )]
    WaitByRules,
    #[error("{0}")]
    Check(#[from] CheckError),
    #[error("receipt: {0}")]
    Receipt(#[from] ReceiptUnavailable),
    #[error("this instance has no rules; start it with --config FILE, or send key and limit")]
    NoRules,
}

impl From<serde_json::Error> for CheckRequestError {
    fn from(error: serde_json::Error) -> CheckRequestError {
        if error.is_data() { CheckRequestError::Shape(error) } else { CheckRequestError::Json(error) }
    }
}

impl<'b> CheckRequest<'b> {
    /// Returns whether the answer may be held until there is room.
    pub(crate) fn waits(&self) -> bool {
        matches!(self, CheckRequest::Explicit(explicit) if explicit.wait_max.is_some())
    }

    /// Parses a body. Does not check the lengths of keys, nor whether two checks use the same counter.
    ///
    /// # Errors
    /// If the body has none of the three forms, or a field is malformed.
    pub(crate) fn parse(body: &'b [u8]) -> Result<CheckRequest<'b>, CheckRequestError> {
        let Object(body): Object<CheckBody<'b>> = serde_json::from_slice(body)?;
        let CheckBody { key, limit, cost, checks, request, wait_ms, receipt: has_receipt } = body;
        let wait_max = wait_ms.map(parse_wait).transpose()?;
        match (key, limit, cost, checks, request) {
            (None, None, None, None, Some(Object(described))) => match wait_max {
                None => described.into_check_request(has_receipt),
                Some(_) => Err(CheckRequestError::WaitByRules),
            },
            (Some(key), Some(limit), cost, None, None) => {
                let entries = vec![CheckEntry { key, limit, cost }.parse(String::new)?];
                Ok(CheckRequest::Explicit(ExplicitCheck { entries, is_list: false, wait_max, has_receipt }))
            }
            (None, None, None, Some(CheckList(checks)), None) => {
                if checks.is_empty() {
                    return Err(CheckRequestError::NoChecks);
                }
                let parse =
                    |(index, Object(entry)): (usize, Object<CheckEntry<'b>>)| entry.parse(|| entry_prefix(index));
                let entries = checks.into_iter().enumerate().map(parse).collect::<Result<_, _>>()?;
                Ok(CheckRequest::Explicit(ExplicitCheck { entries, is_list: true, wait_max, has_receipt }))
            }
            _ => Err(CheckRequestError::Form),
        }
    }
}

fn parse_wait(wait_ms: u64) -> Result<Duration, CheckRequestError> {
    let is_allowed = wait_ms <= u64::from(WAIT_MS_MAX);
    is_allowed.then(|| Duration::from_millis(wait_ms)).ok_or(CheckRequestError::Wait(wait_ms))
}

/// Returns the prefix of error messages about an entry of `checks`, such as `checks[1].`.
fn entry_prefix(index: usize) -> String {
    format!("checks[{index}].")
}

impl DescribedRequest<'_> {
    fn into_check_request<'b>(self, has_receipt: bool) -> Result<CheckRequest<'b>, CheckRequestError> {
        let Headers(headers) = self.headers;
        let request = described::described_request(self.method.as_bytes(), self.path.as_bytes(), headers)?;
        Ok(CheckRequest::ByRules(RequestCheck { request: Box::new(request), peer: self.peer, has_receipt }))
    }
}

impl ExplicitCheck<'_> {
    /// Returns the longest time to wait for room, or `None` if the checks are decided at once.
    pub(crate) fn wait_max(&self) -> Option<Duration> {
        self.wait_max
    }

    /// Returns whether an admission gets a receipt.
    pub(crate) fn has_receipt(&self) -> bool {
        self.has_receipt
    }

    /// Returns one demand per check, in the same order.
    ///
    /// # Errors
    /// If a key is empty or has more than 64 KiB. The message begins with the entry, such as `checks[1].key`, if the body has a
    /// list `checks`, and with `key` otherwise.
    pub(crate) fn demands(&self) -> Result<Vec<Demand<'_>>, CheckRequestError> {
        let mut demands = Vec::with_capacity(self.entries.len());
        for (index, (key, limit, cost)) in self.entries.iter().enumerate() {
            let entry = || if self.is_list { entry_prefix(index) } else { String::new() };
            if key.is_empty() {
                return Err(CheckRequestError::EmptyKey { entry: entry() });
            }
            let key = Key::new(&**key).map_err(|error| CheckRequestError::Key { entry: entry(), error })?;
            demands.push(Demand::new(*limit, key).cost(*cost));
        }
        Ok(demands)
    }
}

impl<'b> CheckEntry<'b> {
    /// Parses the limit and the cost, and returns them with the key. The cost defaults to 1.
    ///
    /// `entry` returns the prefix of error messages: that of [`entry_prefix`], or an empty one. The length of the key
    /// is not checked.
    ///
    /// # Errors
    /// If the limit is malformed, or the cost exceeds `u32::MAX`.
    fn parse(self, entry: impl Fn() -> String) -> Result<(Cow<'b, str>, Limit, Cost), CheckRequestError> {
        let limit =
            self.limit.parse().map_err(|error| CheckRequestError::Limit { entry: entry(), error: Box::new(error) })?;
        let cost = self.cost.unwrap_or(1);
        let units = u32::try_from(cost).map_err(|_| CheckRequestError::Cost { entry: entry(), found: cost })?;
        Ok((self.key, limit, Cost::new(units)))
    }
}

#[cfg(test)]
mod tests {
    use tidegate::Check;

    use super::*;

    /// Returns the costs of the checks in a body.
    fn costs_of(body: &str) -> Result<Vec<u32>, CheckRequestError> {
        match CheckRequest::parse(body.as_bytes())? {
            CheckRequest::Explicit(explicit) => {
                let demands = explicit.demands()?;
                Check::new(&demands)?;
                Ok(demands.iter().map(|demand| demand.cost.units()).collect())
            }
            CheckRequest::ByRules(_) => Ok(Vec::new()),
        }
    }

    #[test]
    fn all_three_forms_are_parsed() {
        assert_eq!(costs_of(r#"{"key":"user:42","limit":"10/min","cost":3}"#).unwrap(), [3]);
        let together = r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"9/day","cost":0}]}"#;
        assert_eq!(costs_of(together).unwrap(), [1, 0]);
        assert_eq!(costs_of(r#"{"checks":[{"key":"a","limit":"9/s","cost":3.0}]}"#).unwrap(), [3]);
        let described =
            br#"{"request":{"method":"POST","path":"/shorten","headers":{"x-a":"b"},"peer":"203.0.113.9"}}"#;
        let CheckRequest::ByRules(RequestCheck { request, peer, .. }) = CheckRequest::parse(described).unwrap() else {
            panic!("by rules")
        };
        assert_eq!(
            (request.uri().path(), request.headers()["x-a"].as_bytes(), peer),
            ("/shorten", &b"b"[..], [203, 0, 113, 9].into())
        );
    }

    #[test]
    fn any_other_body_is_rejected_with_what_is_expected() {
        for (body, phrase) in [
            ("", "EOF"),
            ("[]", "expected an object with key and limit"),
            (r#"{"checks":[["a","1/s"]]}"#, "expected an object with key and limit"),
            (r#"{"request":["GET","/"]}"#, "expected an object with method, path and peer"),
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
                "unknown field `cots`, expected one of `key`, `limit`, `cost`, `checks`, `request`, `wait_ms`, `receipt`",
            ),
            (
                r#"{"key":"a","limit":["1/s","9/day"]}"#,
                r#"limit must be one limit, such as "10/min", found a list; several limits are entries of checks: {"checks": ["#,
            ),
            (r#"{"checks":[{"key":"a","limit":["1/s"]}]}"#, "several limits are entries of checks"),
            (
                r#"{"key":"a","limit":10}"#,
                "invalid type: integer `10`, expected a limit as a string, such as \"10/min\"",
            ),
            (r#"{"key":"a","limit":"10 per minute"}"#, "did you mean 10/min?"),
            (r#"{"key":"a","limit":"1/s","cost":-1}"#, "found -1"),
            (r#"{"key":"a","limit":"1/s","cost":4294967296}"#, "cost must be a whole number from 0 to 4294967295"),
            (r#"{"request":{"method":"GET","path":"/"}}"#, "missing field `peer`"),
            (r#"{"request":{"method":"G T","path":"/","peer":"::1"}}"#, "request.method: invalid HTTP method"),
            (
                r#"{"request":{"method":"GET","path":"/","peer":"somewhere"}}"#,
                "request.peer: expected an IP address such as 203.0.113.9",
            ),
            (r#"{"request":{"method":"GET","path":"http://x/","peer":"::1"}}"#, "request.path: expected a path"),
            (
                r#"{"request":{"method":"GET","path":"/","headers":{"x-a":"b","x-b":"","x-a":"c"},"peer":"::1"}}"#,
                "request.headers: duplicate name `x-a`",
            ),
            (
                r#"{"request":{"method":"GET","path":"/","headers":{"x-a":"b","X-A":"c"},"peer":"::1"}}"#,
                "request.headers: duplicate name `x-a` (names are case-insensitive)",
            ),
            (r#"{"request":{"method":"GET","path":"/","headers":[1],"peer":"::1"}}"#, "invalid type: integer"),
            (
                r#"{"key":"a","limit":"1/s","cost":1e-400}"#,
                "cost must be a whole number from 0 to 4294967295, found 1e-400",
            ),
            (r#"{"key":"a","limit":"1/s","cost":1.5}"#, "cost must be a whole number from 0 to 4294967295, found 1.5"),
            (r#"{"key":"a","limit":"1/s","cost":null}"#, "found null"),
            (
                r#"{"key":"a","limit":"1/s","wait_ms":60001}"#,
                "wait_ms must be a whole number from 0 to 60000, found 60001",
            ),
            (r#"{"key":"a","limit":"1/s","wait_ms":-1}"#, "wait_ms must be a whole number from 0 to 60000, found -1"),
            (r#"{"key":"a","limit":"1/s","wait_ms":"1s"}"#, r#"from 0 to 60000, found "1s""#),
            (r#"{"wait_ms":1}"#, "expected one of {\"key\""),
            (
                r#"{"request":{"method":"GET","path":"/","peer":"::1"},"wait_ms":0}"#,
                "wait_ms is for checks that name their key and limit; a request is decided at once",
            ),
            (r#"{"key":"a","limit":"1/s","receipt":"yes"}"#, "invalid type: string \"yes\", expected a boolean"),
            (r#"{"key":"a","limit":"1/s","request":null}"#, "invalid type: null"),
            (r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"2/s"}]}"#, "same counter"),
        ] {
            let error = costs_of(body).expect_err(body);
            assert!(error.to_string().contains(phrase), "{body}: {error}");
        }
        let long_key =
            format!(r#"{{"checks":[{{"key":"a","limit":"1/s"}},{{"key":"{}","limit":"1/s"}}]}}"#, "k".repeat(1 << 17));
        assert!(costs_of(&long_key).unwrap_err().to_string().starts_with("checks[1].key: "));
        let many = format!("{{\"checks\":[{}", r#"{"key":"a","limit":"1/s"},"#.repeat(33));
        assert!(costs_of(&many).unwrap_err().to_string().contains("1 to 32 entries, found more"));
        let deep = format!("{{\"key\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(CheckRequest::parse(deep.as_bytes()).is_err());
    }
}
