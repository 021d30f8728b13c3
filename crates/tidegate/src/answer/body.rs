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
use serde::Serialize;
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

    /// Returns the name of the format: `json`, `problem`, `text`, `template` or `custom`.
    ///
    /// [`FromStr`](std::str::FromStr) parses the first three.
    pub fn as_str(&self) -> &'static str {
        match self {
            BodyFormat::Json => "json",
            BodyFormat::Problem => "problem",
            BodyFormat::Text => "text",
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
        match text {
            "json" => Ok(BodyFormat::Json),
            "problem" => Ok(BodyFormat::Problem),
            "text" => Ok(BodyFormat::Text),
            _ => Err(NameError::new("body format", text, &["json", "problem", "text"])),
        }
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

/// The fields of a refusal's body in the format `json`. `Serialize` writes them in this order.
///
/// `error`, `message`, `retry_after` (seconds, at least 1) and `retry_after_ms` are always there; the two waits are
/// `null` if the request can never pass. `limit`, `policy`, `rule`, `plan` and `upgrade_url` are those of the limit that
/// denied the request, and left out without a value.
///
/// [`RefusalDetails::fields`] and [`Refusal::fields`](crate::engine::Refusal::fields) return them.
#[derive(Clone, Debug, Serialize)]
pub struct RefusalFields<'a> {
    error: &'static str,
    message: String,
    #[serde(flatten)]
    limit: LimitFields<'a>,
}

impl<'a> RefusalFields<'a> {
    /// Creates the fields of a refusal that no limit caused: `retry_after` is the time until it ends.
    pub(crate) fn without_limit(verdict: Verdict, message: String, retry_after: Wait) -> RefusalFields<'a> {
        let limit = LimitFields {
            retry_after: retry_after_secs(retry_after),
            retry_after_ms: retry_after.as_millis_ceil().map(|ms| ms.max(1)),
            ..LimitFields::default()
        };
        RefusalFields { error: verdict.error(), message, limit }
    }

    /// Creates the fields of a refusal by a limit or because the store did not answer.
    pub(super) fn of(refusal: &RefusalDetails<'a>) -> RefusalFields<'a> {
        RefusalFields { error: refusal.verdict().error(), message: refusal.message(), limit: LimitFields::of(refusal) }
    }

    /// Returns the milliseconds until the request would be admitted, rounded up, at least 1. `None` if it can never pass.
    pub fn retry_after_ms(&self) -> Option<u64> {
        self.limit.retry_after_ms
    }

    /// Returns the rule whose limit denied the request, or `None` if no limit of a rule did.
    pub fn rule(&self) -> Option<&'a str> {
        self.limit.rule
    }

    /// Returns the plan whose limit denied the request, or `None` if no limit of a plan did.
    pub fn plan(&self) -> Option<&'a str> {
        self.limit.plan
    }

    /// Appends the fields to the text of a JSON object, without its braces.
    ///
    /// Writes the same bytes as `serde_json`, in less time: under attack, nearly all responses are refusals.
    pub fn write_json(&self, json: &mut Vec<u8>) {
        let LimitFields { limit, retry_after, retry_after_ms, policy, rule, plan, upgrade_url } = self.limit;
        json.extend_from_slice(b"\"error\":");
        write_string(json, self.error);
        json.extend_from_slice(b",\"message\":");
        write_string(json, &self.message);
        if let Some(limit) = limit {
            json.extend_from_slice(b",\"limit\":");
            write_number(json, Some(limit.into()));
        }
        json.extend_from_slice(b",\"retry_after\":");
        write_number(json, retry_after);
        json.extend_from_slice(b",\"retry_after_ms\":");
        write_number(json, retry_after_ms);
        let texts =
            [(",\"policy\":", policy), (",\"rule\":", rule), (",\"plan\":", plan), (",\"upgrade_url\":", upgrade_url)];
        for (name, text) in texts {
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

/// The body of a refusal in the format `problem`: an RFC 9457 problem document, with the member `violated-policies` of
/// the IETF draft.
#[derive(Serialize)]
struct ProblemBody<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: String,
    #[serde(rename = "violated-policies", skip_serializing_if = "Vec::is_empty")]
    violated_policies: Vec<&'a str>,
    #[serde(flatten)]
    limit: LimitFields<'a>,
}

/// The fields that [`RefusalFields`] and [`ProblemBody`] have in common. A wait is `null` if the request can never pass;
/// other fields without a value are left out.
#[derive(Clone, Debug, Default, Serialize)]
struct LimitFields<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u32>,
    retry_after: Option<u64>,
    retry_after_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upgrade_url: Option<&'a str>,
}

impl<'a> LimitFields<'a> {
    fn of(refusal: &RefusalDetails<'a>) -> LimitFields<'a> {
        let policy = refusal.policy();
        LimitFields {
            limit: policy.map(|policy| policy.limit().quota()),
            retry_after: refusal.retry_after_secs(),
            retry_after_ms: refusal.retry_after_ms(),
            policy: policy.map(Policy::name),
            rule: policy.and_then(Policy::rule),
            plan: policy.and_then(Policy::plan),
            upgrade_url: policy.and_then(Policy::upgrade_url),
        }
    }
}

fn problem(refusal: &RefusalDetails<'_>) -> Body {
    let (r#type, title) = match refusal.verdict() {
        Verdict::Unavailable => (
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
            "The rate limiter is temporarily unavailable",
        ),
        _ => ("https://iana.org/assignments/http-problem-types#quota-exceeded", "Quota exceeded"),
    };
    let problem = ProblemBody {
        r#type,
        title,
        status: refusal.verdict().http().as_u16(),
        detail: refusal.message(),
        violated_policies: refusal.violated().iter().map(|policy| policy.name()).collect(),
        limit: LimitFields::of(refusal),
    };
    // Serializing strings and numbers into memory cannot fail. If it did, the body would be empty.
    Body::new("application/problem+json", serde_json::to_vec(&problem).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_in_json_is_what_serde_writes() {
        let names = [None, Some("per-minute"), Some("a \"quoted\" \\ name\nin two lines \u{1}"), Some("ünïcode")];
        let numbers = [None, Some(0), Some(u64::MAX)];
        for (index, name) in names.into_iter().enumerate() {
            for number in numbers {
                let fields = RefusalFields {
                    error: "rate_limited",
                    message: name.unwrap_or("a message").to_owned(),
                    limit: LimitFields {
                        limit: number.map(|_| u32::MAX),
                        retry_after: number,
                        retry_after_ms: numbers[index % 3],
                        policy: names[(index + 1) % 4],
                        rule: name,
                        plan: names[(index + 2) % 4],
                        upgrade_url: names[(index + 3) % 4],
                    },
                };
                assert_eq!(fields.body().bytes, serde_json::to_vec(&fields).unwrap(), "{fields:?}");
            }
        }
    }
}
