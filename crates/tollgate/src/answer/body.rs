//! The body of a refusal.
//!
//! | format | content type | for |
//! |---|---|---|
//! | `json` (default) | `application/json` | most clients; becomes `problem` for those that ask for it |
//! | `problem` | `application/problem+json` (RFC 9457) | clients that know problem types |
//! | `text` | `text/plain` | shield rules, where nobody reads it |
//! | the caller's own | whatever it says | pages, envelopes, translations |

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use serde::Serialize;

use super::accept::asks_for_problem;
use super::policy::Policy;
use super::refusal::Refusal;
use super::verdict::Verdict;

/// A body and its type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    /// Its `Content-Type`.
    pub content_type: HeaderValue,
    /// Its bytes.
    pub bytes: Bytes,
}

impl Body {
    /// A body of this type.
    pub fn new(content_type: &'static str, bytes: impl Into<Bytes>) -> Body {
        Body { content_type: HeaderValue::from_static(content_type), bytes: bytes.into() }
    }
}

/// What the body of a refusal is.
///
/// ```
/// use tollgate::answer::{Body, Format, Policy};
///
/// let page = Format::custom(|refusal| {
///     Body::new("text/html; charset=utf-8", format!("<p>{}</p>", refusal.message()))
/// });
/// let policy = Policy::of("10/min".parse()?).with_format(page);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Format {
    /// JSON, or a problem for a client that asks for one.
    #[default]
    Json,
    /// A problem of RFC 9457, asked for or not.
    Problem,
    /// Plain text.
    Text,
    /// The caller's own; see [`Format::custom`].
    Custom(CustomFormat),
}

/// A body written by the caller.
#[derive(Clone)]
pub struct CustomFormat(Arc<dyn Fn(&Refusal<'_>) -> Body + Send + Sync>);

impl Format {
    /// Bodies written by the caller. Status and headers stay as they are for the other formats.
    pub fn custom(body: impl Fn(&Refusal<'_>) -> Body + Send + Sync + 'static) -> Format {
        Format::Custom(CustomFormat(Arc::new(body)))
    }

    /// The name used in configuration.
    pub fn name(&self) -> &'static str {
        match self {
            Format::Json => "json",
            Format::Problem => "problem",
            Format::Text => "text",
            Format::Custom(_) => "custom",
        }
    }

    /// The body of this refusal for a client that sent these headers.
    pub(super) fn body(&self, refusal: &Refusal<'_>, request: &HeaderMap) -> Body {
        match self {
            Format::Json if asks_for_problem(request) => problem(refusal),
            Format::Json => json(refusal),
            Format::Problem => problem(refusal),
            Format::Text => Body::new("text/plain; charset=utf-8", refusal.message() + "\n"),
            Format::Custom(custom) => (custom.0)(refusal),
        }
    }
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for CustomFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("custom")
    }
}

#[derive(Serialize)]
struct Json<'a> {
    error: &'static str,
    message: String,
    #[serde(flatten)]
    facts: Facts<'a>,
}

/// RFC 9457, with the member that the RateLimit draft adds for its problem types.
#[derive(Serialize)]
struct Problem<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: String,
    #[serde(rename = "violated-policies", skip_serializing_if = "Vec::is_empty")]
    violated_policies: Vec<&'a str>,
    #[serde(flatten)]
    facts: Facts<'a>,
}

/// What both say.
#[derive(Serialize)]
struct Facts<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u32>,
    retry_after: Option<u64>,
    retry_after_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upgrade_url: Option<&'a str>,
}

impl<'a> Facts<'a> {
    fn of(refusal: &Refusal<'a>) -> Facts<'a> {
        let policy = refusal.policy();
        Facts {
            limit: policy.map(|policy| policy.limit().quota()),
            retry_after: refusal.retry_after_secs(),
            retry_after_ms: refusal.retry_after_ms(),
            policy: policy.map(Policy::name),
            plan: policy.and_then(Policy::plan),
            upgrade_url: policy.and_then(Policy::upgrade_url),
        }
    }
}

fn json(refusal: &Refusal<'_>) -> Body {
    let error = refusal.verdict().error();
    written("application/json", &Json { error, message: refusal.message(), facts: Facts::of(refusal) })
}

fn problem(refusal: &Refusal<'_>) -> Body {
    let (r#type, title) = match refusal.verdict() {
        Verdict::Unavailable => (
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
            "The rate limiter cannot decide at the moment",
        ),
        _ => ("https://iana.org/assignments/http-problem-types#quota-exceeded", "The quota is exceeded"),
    };
    let problem = Problem {
        r#type,
        title,
        status: refusal.verdict().http().as_u16(),
        detail: refusal.message(),
        violated_policies: refusal.violated().iter().map(|policy| policy.name()).collect(),
        facts: Facts::of(refusal),
    };
    written("application/problem+json", &problem)
}

fn written(content_type: &'static str, body: &impl Serialize) -> Body {
    // Strings and numbers into memory: there is nothing that could fail, and an empty body would still be an answer.
    Body::new(content_type, serde_json::to_vec(body).unwrap_or_default())
}
