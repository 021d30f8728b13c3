//! The response bodies of the HTTP listener as types, for the document at `/openapi.json`. The listener writes the same
//! JSON directly. A test of the document compares the two.
#![allow(dead_code)] // only the schema reads the fields

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::metrics::SOURCES;

/// The decision on a check.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Decision")]
pub(crate) struct DecisionBody {
    /// Whether every limit allows the request.
    pub(crate) allowed: bool,
    #[schemars(schema_with = "source_schema")]
    pub(crate) source: String,
    /// One entry per limit, in the order of the check. Empty if no limit applies to the request, or the request was
    /// allowed without a store.
    pub(crate) limits: Vec<LimitBody>,
}

fn source_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "description": "What decided: the store, a cached denial of the store, this instance's local share while the store is \
            unreachable, or nothing.",
        "enum": SOURCES.map(|source| source.as_str()),
    })
}

/// The status of one limit.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "LimitStatus")]
pub(crate) struct LimitBody {
    /// The name of the rule's limit, as in the headers, or a name derived from the window.
    pub(crate) name: String,
    /// The rule to which the limit belongs. Absent in checks of a key and a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = not_null)]
    pub(crate) rule: Option<String>,
    /// The units per window.
    pub(crate) quota: u32,
    /// The window in milliseconds, rounded up.
    pub(crate) window_ms: u64,
    /// The units left, also on a denial.
    pub(crate) remaining: u32,
    /// Milliseconds until this cost would be allowed; null if it exceeds the limit and never is. After an admission 0,
    /// except in a leaky bucket: the time to wait before the request proceeds.
    #[schemars(required, transform = or_null)]
    pub(crate) retry_after_ms: Option<u64>,
    /// Milliseconds until one more unit is available.
    #[schemars(required)]
    pub(crate) next_after_ms: Option<u64>,
    /// Milliseconds until all units are available.
    #[schemars(required)]
    pub(crate) reset_after_ms: Option<u64>,
    /// Whether this limit allows the request.
    pub(crate) allowed: bool,
}

/// Changes the schema of an integer to allow null, for a field that is always present.
///
/// `required` alone would exclude null.
fn or_null(schema: &mut Schema) {
    schema.insert("type".to_owned(), serde_json::json!(["integer", "null"]));
}

/// Changes the schema of an optional string to exclude null, for a field that is absent without a value.
fn not_null(schema: &mut Schema) {
    schema.insert("type".to_owned(), serde_json::json!("string"));
}

/// The reason why there is no decision.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Problem")]
pub(crate) struct ErrorBody {
    /// A code for programs.
    pub(crate) error: String,
    /// What is wrong, and what would be accepted.
    pub(crate) message: String,
}

/// The refusal of a banned caller.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Ban")]
pub(crate) struct BanBody {
    /// Always `banned`.
    pub(crate) error: String,
    /// What is wrong.
    pub(crate) message: String,
    /// Seconds until the ban ends, rounded up; null if it has no end.
    #[schemars(required, transform = or_null)]
    pub(crate) retry_after: Option<u64>,
    /// Milliseconds until the ban ends; null if it has no end.
    #[schemars(required, transform = or_null)]
    pub(crate) retry_after_ms: Option<u64>,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tollgate::answer::{Policies, Policy};
    use tollgate::{Decision, Limit, LimitStatus, Source, Timestamp, Wait};

    use super::super::decision_body;

    fn status(allowed: bool, remaining: u32, waits_us: [u64; 3]) -> LimitStatus {
        let [retry_after, next_after, reset_after] =
            waits_us.map(|us| if us == u64::MAX { Wait::NEVER } else { Wait::from_micros(us) });
        LimitStatus { allowed, cost: 1, quota: 10_000_000, remaining, retry_after, next_after, reset_after }
    }

    /// The body is written without serde.
    #[test]
    fn decision_is_written_as_its_fields() {
        let limits: [Limit; 3] = ["10/min", "5/1500us", "7/day"].map(|text| text.parse().unwrap());
        let policies = Policies::new(limits.map(Policy::of));
        let statuses = [
            status(true, 9, [0, 1, 60_000_000]),
            status(false, 0, [u64::MAX, 999, 1_001]),
            status(true, u32::MAX, [1_000, 123_456_789_012, 4_503_599_627_370_495]),
        ];
        let ms = |wait: Wait| wait.as_micros().map(|us| us.div_ceil(1_000));
        for (count, source) in [(0, Source::None), (1, Source::Store), (2, Source::DenyCache), (3, Source::Local)] {
            let limits = statuses[..count].iter().copied().collect();
            let decision = Decision { at: Timestamp::ZERO, source, ban: None, limits };
            let entry = |(policy, status): (&Policy, &LimitStatus)| {
                json!({
                    "name": policy.name(),
                    "quota": status.quota,
                    "window_ms": policy.limit().window_us().div_ceil(1_000),
                    "remaining": status.remaining,
                    "retry_after_ms": ms(status.retry_after),
                    "next_after_ms": ms(status.next_after),
                    "reset_after_ms": ms(status.reset_after),
                    "allowed": status.allowed,
                })
            };
            let limits: Vec<Value> = policies.policies().zip(&decision.limits).map(entry).collect();
            let expected = json!({"allowed": decision.allowed(), "source": source.as_str(), "limits": limits});
            let body = decision_body(&decision, Some(&policies));
            assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), expected);
        }
        let unlimited = decision_body(&Decision::uncounted(Timestamp::ZERO), None);
        assert_eq!(&*unlimited, br#"{"allowed":true,"source":"none","limits":[]}"#);
    }
}
