//! Bodies of refusals that are written as a template, such as `{"error":"slow down","wait":{retry_after}}`.
//!
//! A placeholder is a lower-case name in braces. All other braces are text, so that JSON needs no escapes. How a value is
//! written depends on the content type:
//!
//! | content type | a value | a field without a value |
//! |---|---|---|
//! | JSON, inside a string | escaped | nothing |
//! | JSON, elsewhere | a JSON number or string | `null` |
//! | HTML, XML | escaped, for text and for attributes in quotes | nothing |
//! | other text | as it is | nothing |
//!
//! Whether a placeholder is inside a JSON string is decided when the template is parsed. A template of JSON is rendered
//! with and without values at that time, so that a body is never invalid.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use http::HeaderValue;
use serde::de::IgnoredAny;

use super::body::Body;
use super::policy::Policy;
use super::refusal::RefusalDetails;

/// The maximum length of a template in bytes.
const TEMPLATE_BYTES_MAX: usize = 16 * 1024;
/// The maximum number of placeholders in a template.
const PLACEHOLDERS_MAX: usize = 100;

/// A template for the bodies of refusals, with placeholders such as `{retry_after}`.
///
/// | placeholder | value |
/// |---|---|
/// | `{retry_after}` | the seconds until the request would be admitted, as in `Retry-After`; no value if it can never pass |
/// | `{retry_after_ms}` | the same in milliseconds |
/// | `{limit}` | the quota of the limit that denied the request; if there are several, of the one with the longest wait |
/// | `{remaining}` | the units that this limit has left |
/// | `{reset}` | the Unix time in seconds at which the request would be admitted, as in `X-RateLimit-Reset` |
/// | `{policy}` | the name of this limit |
/// | `{rule}` | the name of its rule |
/// | `{plan}` | the caller's plan |
/// | `{upgrade_url}` | the upgrade URL of that plan |
/// | `{message}` | the message in English that the built-in formats have |
///
/// Values are escaped for the content type: JSON, HTML or XML, or text. In JSON, a placeholder outside a string is
/// replaced by a JSON value with its quotes. A field without a value is `null` there, and empty elsewhere. If the store
/// did not answer, only the waits and the message have values.
///
/// ```
/// use tidegate::answer::{BodyFormat, BodyTemplate, Policy};
///
/// let template = BodyTemplate::new(r#"{"code":"rate_limited","retryAfterSec":{retry_after}}"#, "application/json")?;
/// let policy = Policy::of("10/min".parse()?).with_format(BodyFormat::Template(template));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BodyTemplate(Arc<Template>);

#[derive(PartialEq, Eq, Debug)]
struct Template {
    content_type: HeaderValue,
    pieces: Vec<Piece>,
}

/// A part of a template.
#[derive(PartialEq, Eq, Debug)]
enum Piece {
    Text(String),
    Placeholder(Field, Escape),
}

/// The reason why a [`BodyTemplate`] is rejected.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template has placeholders that do not exist. Contains their names.
    #[error("unknown placeholder {}; expected one of {}", in_braces(.0), Field::names())]
    Unknown(Vec<String>),
    /// The template is longer than 16 KiB.
    #[error("a template can have at most {TEMPLATE_BYTES_MAX} bytes")]
    TooLong,
    /// The template has more than 100 placeholders.
    #[error("a template can have at most {PLACEHOLDERS_MAX} placeholders")]
    TooManyPlaceholders,
    /// The content type is JSON, and the bodies would not be.
    #[error("the template is not valid JSON: {0}")]
    NotJson(String),
    /// The content type is malformed, or neither JSON, nor HTML, XML or text.
    #[error("expected a content type of JSON, HTML, XML or text, such as application/json or text/html; charset=utf-8")]
    ContentType,
}

impl BodyTemplate {
    /// Parses a template for bodies with this content type.
    ///
    /// # Errors
    /// If a placeholder does not exist, the template is too long or has too many placeholders, the content type is
    /// neither JSON, nor HTML, XML or text, or it is JSON and the bodies would not be.
    pub fn new(template: &str, content_type: &str) -> Result<BodyTemplate, TemplateError> {
        if template.len() > TEMPLATE_BYTES_MAX {
            return Err(TemplateError::TooLong);
        }
        let kind = ContentKind::of(content_type).ok_or(TemplateError::ContentType)?;
        let content_type = HeaderValue::from_str(content_type).map_err(|_| TemplateError::ContentType)?;
        let template = Template { content_type, pieces: parse(template, kind)? };
        if kind == ContentKind::Json {
            template.check_json()?;
        }
        Ok(BodyTemplate(Arc::new(template)))
    }

    /// Renders the body of a refusal.
    pub(super) fn body(&self, refusal: &RefusalDetails<'_>) -> Body {
        let text = self.0.render(|field| field.value(refusal));
        Body { content_type: self.0.content_type.clone(), bytes: Bytes::from(text) }
    }
}

impl Template {
    fn render<'v>(&self, value_of: impl Fn(Field) -> Value<'v>) -> String {
        let mut text = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(literal) => text.push_str(literal),
                Piece::Placeholder(field, escape) => value_of(*field).write(*escape, &mut text),
            }
        }
        text
    }

    /// Checks that bodies are JSON whether fields have values or not.
    ///
    /// # Errors
    /// Returns [`TemplateError::NotJson`] if they are not.
    fn check_json(&self) -> Result<(), TemplateError> {
        let without = self.render(|field| if field.is_number() { Value::Number(None) } else { Value::Text(None) });
        let with =
            self.render(|field| if field.is_number() { Value::Number(Some(1)) } else { Value::Text(Some("a".into())) });
        for text in [with, without] {
            serde_json::from_str::<IgnoredAny>(&text).map_err(|error| TemplateError::NotJson(error.to_string()))?;
        }
        Ok(())
    }
}

/// Splits a template into text and placeholders. A brace that begins no name in braces is text.
///
/// # Errors
/// If a placeholder does not exist, or there are too many.
fn parse(template: &str, kind: ContentKind) -> Result<Vec<Piece>, TemplateError> {
    let mut pieces = Vec::new();
    let mut unknown = Vec::new();
    let mut placeholders = 0;
    let mut text = String::new();
    let mut string = JsonString::default();
    let mut rest = template;
    while let Some(start) = rest.find('{') {
        let (before, from_brace) = rest.split_at(start);
        text.push_str(before);
        string.advance(before);
        let Some(name) = placeholder_name(from_brace) else {
            text.push('{');
            string.advance("{");
            rest = &from_brace[1..];
            continue;
        };
        placeholders += 1;
        if placeholders > PLACEHOLDERS_MAX {
            return Err(TemplateError::TooManyPlaceholders);
        }
        match Field::from_name(name) {
            Some(field) => {
                pieces.push(Piece::Text(std::mem::take(&mut text)));
                pieces.push(Piece::Placeholder(field, kind.escape(string.is_open)));
            }
            None => unknown.push(name.to_owned()),
        }
        rest = &from_brace[name.len() + "{}".len()..];
    }
    text.push_str(rest);
    pieces.push(Piece::Text(text));
    if unknown.is_empty() { Ok(pieces) } else { Err(TemplateError::Unknown(unknown)) }
}

/// Returns the name of the placeholder at the beginning of `text`, or `None` if the brace there is text.
fn placeholder_name(text: &str) -> Option<&str> {
    let (name, _) = text.strip_prefix('{')?.split_once('}')?;
    let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    is_name.then_some(name)
}

fn in_braces(names: &[String]) -> String {
    names.iter().map(|name| format!("{{{name}}}")).collect::<Vec<_>>().join(", ")
}

/// Whether the end of a JSON text is inside a string.
#[derive(Default)]
struct JsonString {
    is_open: bool,
    /// Whether the last character of the string is a backslash that escapes the next one.
    is_escaping: bool,
}

impl JsonString {
    fn advance(&mut self, text: &str) {
        for byte in text.bytes() {
            let is_escaped = std::mem::take(&mut self.is_escaping);
            match byte {
                b'"' if !is_escaped => self.is_open = !self.is_open,
                b'\\' if self.is_open && !is_escaped => self.is_escaping = true,
                _ => {}
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ContentKind {
    Json,
    Markup,
    Text,
}

impl ContentKind {
    /// Returns the kind of a content type by its media type, or `None` if values cannot be escaped for it.
    fn of(content_type: &str) -> Option<ContentKind> {
        let media_type = content_type.split(';').next()?.trim().to_ascii_lowercase();
        let (kind, subtype) = media_type.split_once('/')?;
        match (kind, subtype.rsplit('+').next()?) {
            (_, "json") => Some(ContentKind::Json),
            (_, "html" | "xhtml" | "xml") => Some(ContentKind::Markup),
            ("text", subtype) if !subtype.is_empty() => Some(ContentKind::Text),
            _ => None,
        }
    }

    fn escape(self, is_in_string: bool) -> Escape {
        match (self, is_in_string) {
            (ContentKind::Json, true) => Escape::JsonString,
            (ContentKind::Json, false) => Escape::JsonValue,
            (ContentKind::Markup, _) => Escape::Markup,
            (ContentKind::Text, _) => Escape::None,
        }
    }
}

/// How the value of a placeholder is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Escape {
    /// As a JSON value.
    JsonValue,
    /// As a part of a JSON string.
    JsonString,
    /// As text, or as an attribute in quotes, of HTML or XML.
    Markup,
    None,
}

/// The value of a field. `None` if the refusal has none.
enum Value<'v> {
    Number(Option<u64>),
    Text(Option<Cow<'v, str>>),
}

impl Value<'_> {
    fn write(self, escape: Escape, out: &mut String) {
        let (value, is_number) = match self {
            Value::Number(number) => (number.map(|number| Cow::from(number.to_string())), true),
            Value::Text(text) => (text, false),
        };
        match (value, escape) {
            (None, Escape::JsonValue) => out.push_str("null"),
            (None, _) => {}
            (Some(number), _) if is_number => out.push_str(&number),
            (Some(text), Escape::JsonValue) => out.push_str(&json_string(&text)),
            (Some(text), Escape::JsonString) => {
                let quoted = json_string(&text);
                out.push_str(&quoted[1..quoted.len() - 1]);
            }
            (Some(text), Escape::Markup) => text.chars().for_each(|letter| match letter {
                '&' => out.push_str("&amp;"),
                '<' => out.push_str("&lt;"),
                '>' => out.push_str("&gt;"),
                '"' => out.push_str("&quot;"),
                '\'' => out.push_str("&#39;"),
                letter => out.push(letter),
            }),
            (Some(text), Escape::None) => out.push_str(&text),
        }
    }
}

/// Returns a text as a JSON string with its quotes.
fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A field of a refusal that a placeholder names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Field {
    RetryAfter,
    RetryAfterMs,
    Limit,
    Remaining,
    Reset,
    Policy,
    Rule,
    Plan,
    UpgradeUrl,
    Message,
}

impl Field {
    const ALL: [(&'static str, Field); 10] = [
        ("retry_after", Field::RetryAfter),
        ("retry_after_ms", Field::RetryAfterMs),
        ("limit", Field::Limit),
        ("remaining", Field::Remaining),
        ("reset", Field::Reset),
        ("policy", Field::Policy),
        ("rule", Field::Rule),
        ("plan", Field::Plan),
        ("upgrade_url", Field::UpgradeUrl),
        ("message", Field::Message),
    ];

    fn from_name(name: &str) -> Option<Field> {
        Field::ALL.iter().find(|(known, _)| *known == name).map(|(_, field)| *field)
    }

    fn names() -> String {
        Field::ALL.map(|(name, _)| format!("{{{name}}}")).join(", ")
    }

    fn is_number(self) -> bool {
        match self {
            Field::RetryAfter | Field::RetryAfterMs | Field::Limit | Field::Remaining | Field::Reset => true,
            Field::Policy | Field::Rule | Field::Plan | Field::UpgradeUrl | Field::Message => false,
        }
    }

    fn value<'r>(self, refusal: &'r RefusalDetails<'_>) -> Value<'r> {
        let policy = refusal.policy();
        let text = |text: Option<&'r str>| Value::Text(text.map(Cow::from));
        match self {
            Field::RetryAfter => Value::Number(refusal.retry_after_secs()),
            Field::RetryAfterMs => Value::Number(refusal.retry_after_ms()),
            Field::Limit => Value::Number(policy.map(|policy| policy.limit().quota().into())),
            Field::Remaining => Value::Number(refusal.line().map(|status| status.remaining.into())),
            Field::Reset => Value::Number(refusal.reset_unix_secs()),
            Field::Policy => text(policy.map(Policy::name)),
            Field::Rule => text(policy.and_then(Policy::rule)),
            Field::Plan => text(policy.and_then(Policy::plan)),
            Field::UpgradeUrl => text(policy.and_then(Policy::upgrade_url)),
            Field::Message => Value::Text(Some(refusal.message().into())),
        }
    }
}

/// Returns the names of all placeholders, to suggest one for a misspelt name.
pub(crate) fn placeholder_names() -> impl Iterator<Item = &'static str> {
    Field::ALL.into_iter().map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;
    use proptest::prelude::*;
    use tidegate_core::{Check, Cost, Decision, Demand, Key, Limit, ManualClock, MemoryStore, Timestamp};

    use super::*;
    use crate::answer::{BodyFormat, Policies};

    const JSON: &str = "application/json";

    fn policies(template: &str, content_type: &str, (rule, plan, url): (&str, &str, &str)) -> Policies {
        let format = BodyFormat::Template(BodyTemplate::new(template, content_type).unwrap());
        let policy = Policy::of("60/min".parse().unwrap()).with_format(format);
        Policies::new([policy.with_rule(rule).unwrap().with_plan(plan).with_upgrade_url(url)])
    }

    /// Returns a denial by `60/min`, 30.2 s after all units were used.
    fn denial() -> Decision {
        let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
        let store = MemoryStore::builder().clock(clock.clone()).build();
        let limit: Limit = "60/min".parse().unwrap();
        let demand = Demand::new(limit, Key::new("user:42").unwrap());
        store.check(&Check::one(&demand.cost(Cost::new(60))));
        clock.advance(std::time::Duration::from_millis(30_200));
        let demand = Demand::new(limit, Key::new("user:42").unwrap());
        store.check(&Check::one(&demand))
    }

    fn body(template: &str, content_type: &str, names: (&str, &str, &str)) -> String {
        let response = policies(template, content_type, names).refuse(&denial(), &HeaderMap::new());
        assert_eq!(response.headers()["content-type"], content_type);
        String::from_utf8(response.body().to_vec()).unwrap()
    }

    #[test]
    fn every_placeholder_has_its_value() {
        let numbers = r#"[{retry_after},{retry_after_ms},{limit},{remaining},{reset}]"#;
        let names = ("api", "free", "https://example.com/plans");
        assert_eq!(body(numbers, JSON, names), "[30,29800,60,0,1700000060]");
        let texts = r#"[{policy},{rule},{plan},{upgrade_url},{message}]"#;
        let message = "the limit of 60 per minute has been reached; try again in 30 seconds";
        let expected = format!(r#"["per-minute","api","free","https://example.com/plans","{message}"]"#);
        assert_eq!(body(texts, JSON, names), expected);
        assert_eq!(placeholder_names().count(), 10, "a new placeholder is tested here");
    }

    #[test]
    fn field_without_a_value_is_null_in_json_and_empty_elsewhere() {
        for (template, content_type, expected) in [
            (
                r#"{"plan":{plan},"limit":{limit},"in":"<{plan}{limit}>"}"#,
                JSON,
                r#"{"plan":null,"limit":null,"in":"<>"}"#,
            ),
            ("<{plan}|{limit}|{retry_after}>", "text/plain", "<||1>"),
            ("<{plan}|{limit}|{retry_after}>", "text/html", "<||1>"),
        ] {
            let response = policies(template, content_type, ("a", "b", "c")).unavailable(&HeaderMap::new());
            assert_eq!(response.status(), 503);
            assert_eq!(response.body(), expected);
        }
    }

    #[test]
    fn braces_that_enclose_no_lower_case_name_are_text() {
        for text in ["{}", "{ plan }", "{Plan}", "{plan", "plan}", "{{", "p{color:red}", "{1}", "{é}", ""] {
            assert_eq!(body(text, "text/css", ("a", "b", "c")), text);
        }
        assert_eq!(body("{{plan}}{plan}{", "text/plain", ("a", "b", "c")), "{b}b{");
    }

    #[test]
    fn mistakes_are_rejected_with_what_is_expected() {
        let unknown = BodyTemplate::new("{plan} {paln} {limt}", "text/plain").unwrap_err();
        assert_eq!(unknown, TemplateError::Unknown(vec!["paln".into(), "limt".into()]));
        let message = unknown.to_string();
        assert!(
            message.starts_with("unknown placeholder {paln}, {limt}; expected one of {retry_after}, "),
            "{message}"
        );
        let long = "x".repeat(TEMPLATE_BYTES_MAX + 1);
        let many = "{plan}".repeat(PLACEHOLDERS_MAX + 1);
        for (template, content_type, expected) in [
            (&*long, "text/plain", TemplateError::TooLong),
            (&*many, "text/plain", TemplateError::TooManyPlaceholders),
            ("x", "image/png", TemplateError::ContentType),
            ("x", "application/x-www-form-urlencoded", TemplateError::ContentType),
            ("x", "text/plain\r\nset-cookie: a=b", TemplateError::ContentType),
            ("x", "text", TemplateError::ContentType),
            ("x", "", TemplateError::ContentType),
        ] {
            assert_eq!(BodyTemplate::new(template, content_type).unwrap_err(), expected, "{content_type}");
        }
        for template in ["Too many requests", r#"{"plan":{plan}"#, r#"{{plan}:1}"#, r#"{"a":1{limit}}"#, ""] {
            let error = BodyTemplate::new(template, JSON).unwrap_err();
            assert!(matches!(&error, TemplateError::NotJson(_)), "{template}: {error}");
        }
        assert!(BodyTemplate::new(&long[1..], "text/plain").is_ok());
        assert!(BodyTemplate::new(&many["{plan}".len()..], "text/plain").is_ok());
    }

    #[test]
    fn bodies_that_services_commonly_send_are_templates() {
        let names = ("api", "free", "https://example.com/plans");
        for (template, expected) in [
            (r#"{"error":"Too Many Requests"}"#, r#"{"error":"Too Many Requests"}"#),
            (
                r#"{"error":"Rate limit exceeded","plan":{plan},"upgradeUrl":{upgrade_url},"retryAfterMs":{retry_after_ms}}"#,
                r#"{"error":"Rate limit exceeded","plan":"free","upgradeUrl":"https://example.com/plans","retryAfterMs":29800}"#,
            ),
            (
                r#"{"error":"rate_limit_exceeded","retry_after":{retry_after}}"#,
                r#"{"error":"rate_limit_exceeded","retry_after":30}"#,
            ),
            (
                r#"{"code":"rate_limited","retryAfterSec":{retry_after}}"#,
                r#"{"code":"rate_limited","retryAfterSec":30}"#,
            ),
        ] {
            assert_eq!(body(template, JSON, names), expected);
        }
        let text = "Too many requests, please try again in {retry_after} seconds.";
        let expected = "Too many requests, please try again in 30 seconds.";
        assert_eq!(body(text, "text/plain; charset=utf-8", names), expected);
    }

    proptest! {
        /// Whatever names are, a body of JSON is JSON and contains them, as a value and inside a string.
        #[test]
        fn names_are_escaped_in_json(plan in any::<String>(), url in any::<String>()) {
            let template = r#"{"a":{plan},"b":"\"<{upgrade_url}|{plan}>\\"}"#;
            let text = body(template, JSON, ("a", &plan, &url));
            let read: serde_json::Value = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(read["a"].as_str().unwrap(), &plan);
            prop_assert_eq!(read["b"].as_str().unwrap(), format!("\"<{url}|{plan}>\\"));
        }

        /// No name ends the text or the attribute in which it stands.
        #[test]
        fn names_are_escaped_in_markup(plan in any::<String>()) {
            for content_type in ["text/html; charset=utf-8", "application/xhtml+xml", "Application/XML"] {
                let text = body("{plan}", content_type, ("a", &plan, ""));
                prop_assert!(!text.contains(['<', '>', '"', '\'']));
                let unescaped = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
                prop_assert_eq!(unescaped.replace("&#39;", "'").replace("&amp;", "&"), &*plan);
            }
        }
    }
}
