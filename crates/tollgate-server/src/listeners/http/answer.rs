//! What the door answers, as types: for the document at `/openapi.json`. The hot path writes the same text directly.
#![allow(dead_code)] // only the schema reads the fields

use schemars::JsonSchema;

/// The answer to a question.
#[derive(JsonSchema)]
#[cfg_attr(test, derive(serde::Deserialize))]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Decision")]
pub(crate) struct DecisionAnswer {
    /// Whether the request may go on: every limit allows it.
    pub(crate) allowed: bool,
    /// Who decided.
    pub(crate) source: SourceName,
    /// What each limit says, in the order asked. Empty if nothing limits the request, or nobody could count it.
    pub(crate) limits: Vec<LimitAnswer>,
}

/// Who decided: the store, a denial remembered from it, this node's share while the store is away, or nobody.
#[derive(JsonSchema)]
#[cfg_attr(test, derive(serde::Deserialize))]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "Source", inline)]
pub(crate) enum SourceName {
    Store,
    DenyCache,
    Local,
    None,
}

/// What one limit says.
#[derive(JsonSchema)]
#[cfg_attr(test, derive(serde::Deserialize))]
#[serde(deny_unknown_fields)]
#[schemars(rename = "LimitDecision")]
pub(crate) struct LimitAnswer {
    /// Its name: of the rule's limit, or after its window.
    pub(crate) name: String,
    /// The units per window.
    pub(crate) quota: u32,
    /// The window in milliseconds, rounded up.
    pub(crate) window_ms: u64,
    /// What is left, also on a denial.
    pub(crate) remaining: u32,
    /// Denied until then; null if this cost can never fit. After an admission 0, except in a leaky bucket: the time to wait before going on.
    #[schemars(required, transform = or_null)]
    pub(crate) retry_after_ms: Option<u64>,
    /// Until one more unit comes back.
    #[schemars(required)]
    pub(crate) next_after_ms: Option<u64>,
    /// Until the limit is whole again.
    #[schemars(required)]
    pub(crate) reset_after_ms: Option<u64>,
    /// Whether this limit allows the request.
    pub(crate) allowed: bool,
}

/// A field that is always there and may be null; `required` alone would say that it never is.
fn or_null(schema: &mut schemars::Schema) {
    schema.insert("type".to_owned(), serde_json::json!(["integer", "null"]));
}

/// Why there is no decision.
#[derive(JsonSchema)]
#[cfg_attr(test, derive(serde::Deserialize))]
#[serde(deny_unknown_fields)]
pub(crate) struct Problem {
    /// A word for programs.
    pub(crate) error: String,
    /// What was wrong, and what would be accepted.
    pub(crate) message: String,
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{Request, StatusCode};
    use http_body_util::Full;
    use tollgate::Limiter;
    use tollgate::config::{Config, Format};
    use tollgate::engine::Engine;

    use super::*;
    use crate::listeners::http::HttpListener;

    const RULES: &str = "[[bans]]\nby = \"ip\"\nvalue = \"198.51.100.7\"\n[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"1/h\"]\nbody = \"text\"\n";

    #[tokio::test]
    async fn whatever_is_answered_has_the_documented_form() {
        let limiter = Limiter::memory();
        let rules = Config::from_text(RULES, Format::Toml).unwrap().rules;
        let door = HttpListener::new(limiter.clone()).with_rules(Engine::new(limiter, rules));
        let by_rules = |peer: &str| format!(r#"{{"request":{{"method":"GET","path":"/","peer":"{peer}"}}}}"#);
        for (body, status) in [
            (r#"{"key":"a","limit":"1/h"}"#.to_owned(), 200),
            (r#"{"key":"a","limit":"1/h"}"#.to_owned(), 429),
            (r#"{"key":"a","limit":"1/h","cost":2}"#.to_owned(), 429),
            (r#"{"checks":[{"key":"b","limit":"5/h leaky-bucket"},{"key":"b","limit":"1/s"}]}"#.to_owned(), 200),
            (by_rules("203.0.113.9"), 200),
            (by_rules("203.0.113.9"), 429),
            (by_rules("198.51.100.7"), 403),
            ("{}".to_owned(), 400),
        ] {
            let request = Request::post("/v1/check").body(Full::new(Bytes::from(body.clone()))).unwrap();
            let answer = door.answer(request).await;
            assert_eq!(answer.status().as_u16(), status, "{body}");
            let text = std::str::from_utf8(answer.body()).unwrap();
            match answer.status() {
                StatusCode::OK | StatusCode::TOO_MANY_REQUESTS => {
                    drop(serde_json::from_str::<DecisionAnswer>(text).expect(text))
                }
                _ => drop(serde_json::from_str::<Problem>(text).expect(text)),
            }
        }
    }
}
