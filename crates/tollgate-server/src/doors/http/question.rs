//! What a body of `POST /v1/check` asks.
//!
//! ```json
//! {"key": "user:42", "limit": "10/min", "cost": 1}
//! {"checks": [{"key": "user:42", "limit": "10/min"}, {"key": "user:42", "limit": "1000/day"}]}
//! ```
//!
//! The second form is decided together: all limits pass, or none is charged. Anything else in the body is refused with what was
//! expected; a misspelt field must never mean "no limit".

use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tollgate::{Check, CheckError, Cost, DEMANDS_MAX, Demand, Key, Limit};

/// The whole body, before it is known which form it has.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body<'b> {
    #[serde(borrow, default)]
    key: Option<std::borrow::Cow<'b, str>>,
    #[serde(borrow, default)]
    limit: Option<std::borrow::Cow<'b, str>>,
    #[serde(default)]
    cost: Option<u64>,
    #[serde(borrow, default)]
    checks: Option<Vec<Object<One<'b>>>>,
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

/// One (key, limit, cost).
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct One<'b> {
    #[serde(borrow)]
    key: std::borrow::Cow<'b, str>,
    #[serde(borrow)]
    limit: std::borrow::Cow<'b, str>,
    #[serde(default)]
    cost: Option<u64>,
}

/// What was asked: limits, whom they count, and how much.
#[derive(Debug)]
pub(crate) struct Question<'b> {
    parts: Vec<(std::borrow::Cow<'b, str>, Limit, Cost)>,
}

/// Why a body is no question. The text says what was expected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QuestionError {
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("expected {{\"key\": …, \"limit\": …}} or {{\"checks\": [{{\"key\": …, \"limit\": …}}, …]}}, not both")]
    Form,
    #[error("checks has 1 to {DEMANDS_MAX} entries, found {0}")]
    Count(usize),
    #[error("{place}limit: {error}")]
    Limit { place: String, error: tollgate::LimitTextError },
    #[error("{place}key: {error}")]
    Key { place: String, error: tollgate::KeyError },
    #[error("{place}cost is a whole number from 0 to {}, found {found}", u32::MAX)]
    Cost { place: String, found: u64 },
    #[error("{0}")]
    Check(#[from] CheckError),
}

impl<'b> Question<'b> {
    pub(crate) fn read(body: &'b [u8]) -> Result<Question<'b>, QuestionError> {
        let Object(body): Object<Body<'b>> = serde_json::from_slice(body)?;
        let parts = match body {
            Body { key: Some(key), limit: Some(limit), cost, checks: None } => {
                vec![part(One { key, limit, cost }, String::new)?]
            }
            Body { key: None, limit: None, cost: None, checks: Some(checks) } => {
                if !(1..=DEMANDS_MAX).contains(&checks.len()) {
                    return Err(QuestionError::Count(checks.len()));
                }
                let numbered = checks.into_iter().enumerate();
                numbered
                    .map(|(index, Object(one))| part(one, || format!("checks[{index}].")))
                    .collect::<Result<_, _>>()?
            }
            _ => return Err(QuestionError::Form),
        };
        Ok(Question { parts })
    }

    /// The demands, in the order asked.
    pub(crate) fn demands(&self) -> Result<Vec<Demand<'_>>, QuestionError> {
        let demands: Result<Vec<Demand<'_>>, QuestionError> = self
            .parts
            .iter()
            .map(|(key, limit, cost)| {
                let key = Key::new(&**key).map_err(|error| QuestionError::Key { place: String::new(), error })?;
                Ok(Demand::new(*limit, key).cost(*cost))
            })
            .collect();
        let demands = demands?;
        Check::new(&demands)?;
        Ok(demands)
    }
}

fn part<'b>(
    One { key, limit, cost }: One<'b>,
    place: impl Fn() -> String,
) -> Result<(std::borrow::Cow<'b, str>, Limit, Cost), QuestionError> {
    let limit = limit.parse().map_err(|error| QuestionError::Limit { place: place(), error })?;
    let cost = cost.unwrap_or(1);
    let units = u32::try_from(cost).map_err(|_| QuestionError::Cost { place: place(), found: cost })?;
    Key::new(&*key).map_err(|error| QuestionError::Key { place: place(), error })?;
    Ok((key, limit, Cost::new(units)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        let one = Question::read(br#"{"key":"user:42","limit":"10/min","cost":3}"#).unwrap();
        assert_eq!(one.demands().unwrap()[0].cost, Cost::new(3));
        let two =
            Question::read(br#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"9/day","cost":0}]}"#).unwrap();
        assert_eq!(two.demands().unwrap().len(), 2);
    }

    #[test]
    fn whatever_else_stands_there_is_refused_with_what_was_expected() {
        for (body, phrase) in [
            ("", "EOF"),
            ("[]", "expected an object with key and limit"),
            (r#"{"checks":[["a","1/s"]]}"#, "expected an object with key and limit"),
            ("{}", "expected {\"key\""),
            (r#"{"key":"a"}"#, "expected {\"key\""),
            (r#"{"key":"a","limit":"1/s","checks":[]}"#, "not both"),
            (r#"{"checks":[]}"#, "1 to 32 entries, found 0"),
            (r#"{"key":"a","limit":"1/fortnight"}"#, "limit: unknown unit of time"),
            (
                r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"0/s"}]}"#,
                "checks[1].limit: expected a quota",
            ),
            (
                r#"{"key":"a","limit":"1/s","cots":1}"#,
                "unknown field `cots`, expected one of `key`, `limit`, `cost`, `checks`",
            ),
            (r#"{"key":"a","limit":"1/s","cost":-1}"#, "invalid value"),
            (r#"{"key":"a","limit":"1/s","cost":4294967296}"#, "cost is a whole number from 0 to 4294967295"),
            (r#"{"key":"a","limit":"1/s","cost":1.5}"#, "invalid type"),
            (r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"2/s"}]}"#, "same counter"),
        ] {
            let error =
                Question::read(body.as_bytes()).and_then(|question| question.demands().map(|_| ())).expect_err(body);
            assert!(error.to_string().contains(phrase), "{body}: {error}");
        }
        let deep = format!("{{\"key\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(Question::read(deep.as_bytes()).is_err());
    }
}
