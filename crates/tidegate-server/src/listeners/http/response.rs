//! The response bodies of the HTTP listener as types, for the document at `/openapi.json`. The listener writes the same
//! JSON directly. A test of the document compares the two.
#![allow(dead_code)] // only the schema reads the fields

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::json;

use crate::metrics::SOURCES;
use crate::openapi::schemas::not_null;

/// The decision on an admitted check.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Decision")]
pub(crate) struct DecisionBody {
    /// Always true.
    pub(crate) allowed: bool,
    #[schemars(schema_with = "source_schema")]
    pub(crate) source: String,
    /// One entry per limit, in the order of the check. Empty if no limit applies to the request, or if the request was
    /// allowed without being counted.
    pub(crate) limits: Vec<LimitBody>,
    /// The headers to add to the response to the described request. Absent in checks of a key and a limit.
    #[serde(default)]
    #[schemars(transform = not_null)]
    pub(crate) response: Option<AddedHeaders>,
    /// The receipt, with which the charged units can be refunded. Absent if none was requested, or if nothing was charged;
    /// with rules, if the charge of no rule depends on the outcome of the request.
    #[serde(default)]
    #[schemars(transform = not_null)]
    pub(crate) receipt: Option<String>,
    /// The outcomes of the described request for which units are refunded. If the outcome is not in the list, no refund is
    /// needed. Absent without a receipt, and in checks of a key and a limit.
    #[serde(default)]
    #[schemars(transform = not_null)]
    pub(crate) refund_on: Option<Vec<RefundOn>>,
}

/// An outcome of a request: a status below 400 is a success, any other a failure.
#[derive(JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RefundOn {
    Success,
    Failure,
}

/// The headers to add to the response to an admitted request.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AddedHeaders {
    /// Values by lower-case name. Several values of one name are joined with a comma.
    pub(crate) headers: BTreeMap<String, String>,
}

/// The refusal of a check: a limit denied it, a ban applies, the store did not answer, or the path is too long.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Refusal")]
pub(crate) struct RefusalBody {
    /// Always false.
    pub(crate) allowed: bool,
    #[schemars(schema_with = "source_schema")]
    pub(crate) source: String,
    /// One entry per limit, in the order of the check. A cached denial of a described request leaves out limits whose
    /// status is not known. Empty if no limit denied the request.
    pub(crate) limits: Vec<LimitBody>,
    /// A code for programs: `rate_limited`, `banned`, `unavailable` or `path_too_long`.
    pub(crate) error: String,
    /// What refused the request, and when to retry.
    pub(crate) message: String,
    /// The quota of the limit that denied the request.
    #[serde(default)]
    #[schemars(transform = not_null)]
    pub(crate) limit: Option<u32>,
    /// Seconds until the request would pass, rounded up, at least 1; null if it never would.
    #[schemars(required, transform = or_null)]
    pub(crate) retry_after: Option<u64>,
    /// Milliseconds until the request would pass, rounded up; null if it never would.
    #[schemars(required, transform = or_null)]
    pub(crate) retry_after_ms: Option<u64>,
    /// The name of the limit that denied the request, as in the headers.
    #[serde(default)]
    #[schemars(transform = not_null)]
    pub(crate) policy: Option<String>,
    /// The rule of that limit. Absent in checks of a key and a limit.
    #[serde(default)]
    #[schemars(transform = not_null)]
    pub(crate) rule: Option<String>,
    /// The plan of the caller, if the limit belongs to one.
    #[serde(default)]
    #[schemars(transform = not_null)]
    pub(crate) plan: Option<String>,
    /// The URL at which the caller can upgrade, if the plan has one.
    #[serde(default)]
    #[schemars(transform = not_null)]
    pub(crate) upgrade_url: Option<String>,
    /// The response to the described request, to be relayed. Absent in checks of a key and a limit.
    #[serde(default)]
    #[schemars(transform = not_null)]
    pub(crate) response: Option<RefusedResponse>,
}

/// The response to a refused request, in the body format of its rule.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RefusedResponse {
    /// The HTTP status; 200 for a gRPC request, whose gRPC status is in the headers.
    pub(crate) status: u16,
    /// Values by lower-case name, including the content type. Several values of one name are joined with a comma.
    pub(crate) headers: BTreeMap<String, String>,
    /// The body; empty for a gRPC request.
    pub(crate) body: String,
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
    /// Milliseconds until this cost would be allowed; null if it exceeds the limit and never will be. After an
    /// admission 0, or for a leaky bucket the time to wait before the request proceeds.
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
    schema.insert("type".to_owned(), json!(["integer", "null"]));
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidegate::answer::{Policies, Policy};
    use tidegate::{Decision, Limit, LimitStatus, Source, Timestamp, Wait};

    use super::super::decision_body;

    fn status(allowed: bool, remaining: u32, waits_us: [u64; 3]) -> LimitStatus {
        let [retry_after, next_after, reset_after] =
            waits_us.map(|us| if us == u64::MAX { Wait::NEVER } else { Wait::from_micros(us) });
        LimitStatus {
            allowed,
            cost: 1,
            quota: 10_000_000,
            remaining,
            retry_after,
            next_after,
            reset_after,
            late_us: 0,
            refunded_before: 0,
        }
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
            let decision = Decision::new(Timestamp::ZERO, source, limits);
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
            let body = decision_body(&decision, Some(&policies), None, None);
            assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), expected);
        }
        let unlimited = decision_body(&Decision::uncounted(Timestamp::ZERO), None, None, None);
        assert_eq!(&*unlimited, br#"{"allowed":true,"source":"none","limits":[]}"#);
    }
}
