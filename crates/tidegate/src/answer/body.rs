//! Bodies of refusals.
//!
//! | format | content type | for |
//! |---|---|---|
//! | `json` (default) | `application/json` | most clients; becomes `problem` if the `Accept` header names it |
//! | `problem` | `application/problem+json` (RFC 9457) | clients that know problem types |
//! | `text` | `text/plain` | shield rules, whose responses are rarely read |
//! | `template` | chosen in the configuration | bodies that clients expect already |
//! | `custom` | chosen by the application | pages, envelopes, translations |

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use tidegate_config::BodyName;
use tidegate_core::{NameError, Wait};

use super::accept::asks_for_problem;
use super::policy::Policy;
use super::refusal::{RefusalDetails, retry_after_secs};
use super::template::BodyTemplate;
use super::verdict::Verdict;

/// A response body and its content type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    /// The value of `Content-Type`.
    pub content_type: HeaderValue,
    /// The bytes of the body.
    pub bytes: Bytes,
}

impl Body {
    /// Creates a body of these bytes with this content type.
    ///
    /// # Panics
    /// If `content_type` is not a valid header value.
    pub fn new(content_type: &'static str, bytes: impl Into<Bytes>) -> Body {
        Body { content_type: HeaderValue::from_static(content_type), bytes: bytes.into() }
    }
}

/// The format of the body of a refusal: JSON (the default), an RFC 9457 problem document, plain text, a template, or
/// a custom function.
///
/// ```
/// use tidegate::answer::{Body, BodyFormat, Policy};
///
/// let page = BodyFormat::custom(|refusal| {
///     Body::new("text/html; charset=utf-8", format!("<p>{}</p>", refusal.message()))
/// });
/// let policy = Policy::of("10/min".parse()?).with_format(page);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Default)]
#[non_exhaustive]
pub enum BodyFormat {
    /// JSON; an RFC 9457 problem document if the request's `Accept` header names `application/problem+json` and does
    /// not prefer `application/json`.
    #[default]
    Json,
    /// An RFC 9457 problem document, whatever the request accepts.
    Problem,
    /// Plain text: the message and a newline.
    Text,
    /// A text with placeholders.
    Template(BodyTemplate),
    /// A body made by the application; see [`BodyFormat::custom`].
    Custom(CustomFormat),
}

/// A function of the application that makes the body of a refusal. Created by [`BodyFormat::custom`].
///
/// Two of them are equal if they are clones of one.
#[derive(Clone)]
pub struct CustomFormat(Arc<dyn Fn(&RefusalDetails<'_>) -> Body + Send + Sync>);

impl BodyFormat {
    /// Creates a format that calls `body` for each refusal by a limit or because the store is unavailable.
    ///
    /// It returns the content type and the bytes. Status and all other headers are those of the built-in formats. It is
    /// not called for bans and for paths that are too long. In a response to a gRPC request, which has no body, its
    /// result is not used.
    pub fn custom(body: impl Fn(&RefusalDetails<'_>) -> Body + Send + Sync + 'static) -> BodyFormat {
        BodyFormat::Custom(CustomFormat(Arc::new(body)))
    }

    /// Returns the format with this name.
    pub(crate) const fn named(name: BodyName) -> BodyFormat {
        match name {
            BodyName::Json => BodyFormat::Json,
            BodyName::Problem => BodyFormat::Problem,
            BodyName::Text => BodyFormat::Text,
        }
    }

    /// Returns the name of the format: `json`, `problem`, `text`, `template` or `custom`.
    ///
    /// [`FromStr`](std::str::FromStr) parses the first three.
    pub fn as_str(&self) -> &'static str {
        match self {
            BodyFormat::Json => BodyName::Json.as_str(),
            BodyFormat::Problem => BodyName::Problem.as_str(),
            BodyFormat::Text => BodyName::Text.as_str(),
            BodyFormat::Template(_) => "template",
            BodyFormat::Custom(_) => "custom",
        }
    }

    /// Renders the body of a refusal. `request` holds the request's headers, of which [`BodyFormat::Json`] reads
    /// `Accept`.
    pub(super) fn body(&self, refusal: &RefusalDetails<'_>, request: &HeaderMap) -> Body {
        match self {
            BodyFormat::Json if asks_for_problem(request) => problem(refusal),
            BodyFormat::Json => refusal.fields().body(),
            BodyFormat::Problem => problem(refusal),
            BodyFormat::Text => Body::new("text/plain; charset=utf-8", refusal.message() + "\n"),
            BodyFormat::Template(template) => template.body(refusal),
            BodyFormat::Custom(custom) => (custom.0)(refusal),
        }
    }
}

impl PartialEq for CustomFormat {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Display for BodyFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl std::str::FromStr for BodyFormat {
    type Err = NameError;

    fn from_str(text: &str) -> Result<BodyFormat, NameError> {
        text.parse().map(BodyFormat::named)
    }
}

impl fmt::Debug for BodyFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BodyFormat::Template(template) => template.fmt(f),
            format => f.write_str(format.as_str()),
        }
    }
}

impl fmt::Debug for CustomFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("custom")
    }
}

/// The fields of a refusal's body in the format `json`. [`write_json`](RefusalFields::write_json) writes them.
///
/// `error`, `message`, `retry_after` (seconds, at least 1) and `retry_after_ms` are always there; the two waits are
/// `null` if the request can never pass. `limit`, `policy`, `rule`, `plan` and `upgrade_url` are those of the limit that
/// denied the request, and left out without a value.
///
/// [`RefusalDetails::fields`] and [`Refusal::fields`](crate::engine::Refusal::fields) return them.
#[derive(Clone, Debug, Default)]
pub struct RefusalFields<'a> {
    error: &'static str,
    message: String,
    limit: Option<u32>,
    retry_after: Option<u64>,
    retry_after_ms: Option<u64>,
    policy: Option<&'a str>,
    rule: Option<&'a str>,
    plan: Option<&'a str>,
    upgrade_url: Option<&'a str>,
}

impl<'a> RefusalFields<'a> {
    /// Creates the fields of a refusal that no limit caused: `retry_after` is the time until it ends.
    pub(crate) fn without_limit(verdict: Verdict, message: String, retry_after: Wait) -> RefusalFields<'a> {
        RefusalFields {
            error: verdict.error(),
            message,
            retry_after: retry_after_secs(retry_after),
            retry_after_ms: retry_after.as_millis_ceil().map(|ms| ms.max(1)),
            ..RefusalFields::default()
        }
    }

    /// Creates the fields of a refusal by a limit or because the store did not answer.
    pub(super) fn of(refusal: &RefusalDetails<'a>) -> RefusalFields<'a> {
        let policy = refusal.policy();
        RefusalFields {
            error: refusal.verdict().error(),
            message: refusal.message(),
            limit: policy.map(|policy| policy.limit().quota()),
            retry_after: refusal.retry_after_secs(),
            retry_after_ms: refusal.retry_after_ms(),
            policy: policy.map(Policy::name),
            rule: policy.and_then(Policy::rule),
            plan: policy.and_then(Policy::plan),
            upgrade_url: policy.and_then(Policy::upgrade_url),
        }
    }

    /// Returns the milliseconds until the request would be admitted, rounded up, at least 1. `None` if it can never pass.
    pub fn retry_after_ms(&self) -> Option<u64> {
        self.retry_after_ms
    }

    /// Returns the rule whose limit denied the request, or `None` if no limit of a rule did.
    pub fn rule(&self) -> Option<&'a str> {
        self.rule
    }

    /// Returns the plan whose limit denied the request, or `None` if no limit of a plan did.
    pub fn plan(&self) -> Option<&'a str> {
        self.plan
    }

    /// Appends the fields to the text of a JSON object, without its braces.
    ///
    /// Written without serde, which needs four times the instructions: under attack, nearly all responses are refusals.
    pub fn write_json(&self, json: &mut Vec<u8>) {
        json.extend_from_slice(b"\"error\":");
        write_string(json, self.error);
        json.extend_from_slice(b",\"message\":");
        write_string(json, &self.message);
        self.write_limit(json);
    }

    /// Appends the fields that the formats `json` and `problem` have in common to the text of a JSON object that has other
    /// fields before.
    fn write_limit(&self, json: &mut Vec<u8>) {
        if let Some(limit) = self.limit {
            json.extend_from_slice(b",\"limit\":");
            write_number(json, Some(limit.into()));
        }
        json.extend_from_slice(b",\"retry_after\":");
        write_number(json, self.retry_after);
        json.extend_from_slice(b",\"retry_after_ms\":");
        write_number(json, self.retry_after_ms);
        for (name, text) in [
            (",\"policy\":", self.policy),
            (",\"rule\":", self.rule),
            (",\"plan\":", self.plan),
            (",\"upgrade_url\":", self.upgrade_url),
        ] {
            if let Some(text) = text {
                json.extend_from_slice(name.as_bytes());
                write_string(json, text);
            }
        }
    }

    /// Returns the body in the format `json`.
    pub(crate) fn body(&self) -> Body {
        let mut json = Vec::with_capacity(320);
        json.push(b'{');
        self.write_json(&mut json);
        json.push(b'}');
        Body::new("application/json", json)
    }
}

/// Appends a JSON string.
fn write_string(json: &mut Vec<u8>, text: &str) {
    let needs_escape = |byte| byte < b' ' || byte == b'"' || byte == b'\\';
    // Without an early exit, the compiler tests many bytes at once.
    if text.bytes().fold(false, |found, byte| found | needs_escape(byte)) {
        // Writing into memory cannot fail.
        let _ = serde_json::to_writer(json, text);
        return;
    }
    json.push(b'"');
    json.extend_from_slice(text.as_bytes());
    json.push(b'"');
}

/// Appends a JSON number, or `null`.
fn write_number(json: &mut Vec<u8>, number: Option<u64>) {
    match number {
        Some(number) => json.extend_from_slice(itoa::Buffer::new().format(number).as_bytes()),
        None => json.extend_from_slice(b"null"),
    }
}

/// Returns the body in the format `problem`: an RFC 9457 problem document, with the member `violated-policies` of the
/// IETF draft.
fn problem(refusal: &RefusalDetails<'_>) -> Body {
    let (r#type, title) = match refusal.verdict() {
        Verdict::Unavailable => (
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
            "The rate limiter is temporarily unavailable",
        ),
        _ => ("https://iana.org/assignments/http-problem-types#quota-exceeded", "Quota exceeded"),
    };
    let mut json = Vec::with_capacity(512);
    json.extend_from_slice(b"{\"type\":");
    write_string(&mut json, r#type);
    json.extend_from_slice(b",\"title\":");
    write_string(&mut json, title);
    json.extend_from_slice(b",\"status\":");
    write_number(&mut json, Some(refusal.verdict().http().as_u16().into()));
    json.extend_from_slice(b",\"detail\":");
    let fields = refusal.fields();
    write_string(&mut json, &fields.message);
    for (index, policy) in refusal.violated().iter().enumerate() {
        json.extend_from_slice(if index == 0 { b",\"violated-policies\":[" } else { b"," });
        write_string(&mut json, policy.name());
    }
    if !refusal.violated().is_empty() {
        json.push(b']');
    }
    fields.write_limit(&mut json);
    json.push(b'}');
    Body::new("application/problem+json", json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn texts_are_escaped_and_fields_without_a_value_are_left_out() {
        let text = "a \"quoted\" \\ name\nin two lines \u{1} ünïcode";
        let refused = || RefusalFields { error: "rate_limited", message: text.to_owned(), ..RefusalFields::default() };
        let written = |fields: RefusalFields<'_>| serde_json::from_slice::<Value>(&fields.body().bytes).unwrap();
        let none = json!({ "error": "rate_limited", "message": text, "retry_after": null, "retry_after_ms": null });
        assert_eq!(written(refused()), none);
        let all = RefusalFields {
            limit: Some(u32::MAX),
            retry_after: Some(0),
            retry_after_ms: Some(u64::MAX),
            policy: Some(text),
            rule: Some("rule"),
            plan: Some("plan"),
            upgrade_url: Some("url"),
            ..refused()
        };
        let expected = json!({
            "error": "rate_limited", "message": text, "limit": u32::MAX, "retry_after": 0, "retry_after_ms": u64::MAX,
            "policy": text, "rule": "rule", "plan": "plan", "upgrade_url": "url",
        });
        assert_eq!(written(all), expected);
    }
}
