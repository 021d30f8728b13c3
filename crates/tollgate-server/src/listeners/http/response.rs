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
        "description": "What decided: the store, a denial of the store that was cached, the local share of this instance while \
            the store is unreachable, or nothing.",
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
