//! `/v1/bans`: the bans on subjects in the store.
//!
//! ```text
//!   PUT    ?subject=ip:203.0.113.9&for=1h     bans a subject for an hour; without `for`, for good
//!   GET    ?subject=ip:203.0.113.9            whether it is banned, and for how long
//!   DELETE ?subject=ip:203.0.113.9            lifts the ban
//! ```
//!
//! The subject is what a rule counts by, as `explain` shows it, or the key of explicit checks.

use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use percent_encoding::percent_decode_str;
use schemars::JsonSchema;
use serde::Serialize;
use tidegate::{Key, Wait};

use super::AdminListener;
use super::keys::unavailable;
use crate::listeners::http::connection::{json, problem};
use crate::openapi::schemas::not_null;

/// Whether a subject is banned in the store.
#[derive(Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Ban")]
pub(crate) struct BanBody {
    /// The subject of the query. Bytes that are not UTF-8 are replaced.
    subject: String,
    /// Whether the subject is banned.
    banned: bool,
    /// Milliseconds until the ban ends, rounded up; null without a ban, and for a permanent ban.
    retry_after_ms: Option<u64>,
    /// Whether the subject was banned before the ban was lifted. Absent if no ban was to be lifted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(transform = not_null)]
    was_banned: Option<bool>,
}

/// The parameters of a query to `/v1/bans`.
#[derive(Debug, PartialEq, Eq)]
struct BanQuery {
    subject: Vec<u8>,
    /// `None` if `for` is absent.
    duration: Option<Duration>,
}

/// Bans the subject of the query for the time in `for`, or without an end, and answers with the ban.
///
/// Replaces an earlier ban on the subject. Logs that a subject was banned, but not which.
///
/// The answer is 400 if the query is invalid, and 503 if the store fails.
pub(super) async fn set(listener: &AdminListener, query: &str) -> Response<Bytes> {
    let BanQuery { subject, duration } = match BanQuery::parse(query, true) {
        Ok(query) => query,
        Err(message) => return problem(StatusCode::BAD_REQUEST, "bad_request", &message),
    };
    if let Err(error) = listener.limiter.ban(&subject, duration).await {
        return unavailable(&error);
    }
    tracing::info!("the operator banned a subject");
    let ends_after = duration
        .map_or(Wait::NEVER, |duration| Wait::from_micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)));
    json(StatusCode::OK, &BanBody::new(&subject, Some(ends_after)))
}

/// Answers whether the subject of the query is banned in the store, and for how long.
///
/// The answer is 400 if the query is invalid, and 503 if the store fails.
pub(super) async fn inspect(listener: &AdminListener, query: &str) -> Response<Bytes> {
    let subject = match BanQuery::parse(query, false) {
        Ok(query) => query.subject,
        Err(message) => return problem(StatusCode::BAD_REQUEST, "bad_request", &message),
    };
    match listener.limiter.ban_of(&subject).await {
        Ok(ban) => json(StatusCode::OK, &BanBody::new(&subject, ban)),
        Err(error) => unavailable(&error),
    }
}

/// Lifts the ban on the subject of the query in the store, and answers whether there was one.
///
/// Logs that a ban was lifted, but not of which subject.
///
/// The answer is 400 if the query is invalid, and 503 if the store fails.
pub(super) async fn lift(listener: &AdminListener, query: &str) -> Response<Bytes> {
    let subject = match BanQuery::parse(query, false) {
        Ok(query) => query.subject,
        Err(message) => return problem(StatusCode::BAD_REQUEST, "bad_request", &message),
    };
    match listener.limiter.unban(&subject).await {
        Ok(was_banned) => {
            if was_banned {
                tracing::info!("the operator lifted a ban");
            }
            let body = BanBody { was_banned: Some(was_banned), ..BanBody::new(&subject, None) };
            json(StatusCode::OK, &body)
        }
        Err(error) => unavailable(&error),
    }
}

impl BanBody {
    /// Creates the body of a response. `ban` is the time until the ban on the subject ends, or `None` without a ban.
    fn new(subject: &[u8], ban: Option<Wait>) -> BanBody {
        BanBody {
            subject: String::from_utf8_lossy(subject).into_owned(),
            banned: ban.is_some(),
            retry_after_ms: ban.and_then(Wait::as_millis_ceil),
            was_banned: None,
        }
    }
}

impl BanQuery {
    /// Parses a percent-encoded query. `for` is accepted only if `accepts_duration`.
    ///
    /// `+` is a space, and the last of repeated parameters counts. `Err` is the message of the 400 response: a
    /// parameter is unknown, `subject` is missing or too long, or `for` is not a time of at least 1 ms.
    fn parse(text: &str, accepts_duration: bool) -> Result<BanQuery, String> {
        let (mut subject, mut duration) = (None, None);
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let plain = value.replace('+', " ");
            let bytes: Vec<u8> = percent_decode_str(&plain).collect();
            match name {
                "subject" => subject = Some(bytes),
                "for" if accepts_duration => duration = Some(parse_duration(&bytes)?),
                _ if accepts_duration => return Err("unknown parameter; expected subject or for".to_owned()),
                _ => return Err("unknown parameter; expected subject".to_owned()),
            }
        }
        let subject = subject.ok_or("expected ?subject=…")?;
        Key::new(&subject).map_err(|error| format!("subject: {error}"))?;
        Ok(BanQuery { subject, duration })
    }
}

fn parse_duration(text: &[u8]) -> Result<Duration, String> {
    let text = std::str::from_utf8(text).ok();
    let duration = text.and_then(|text| humantime::parse_duration(text).ok());
    duration
        .filter(|duration| *duration >= Duration::from_millis(1))
        .ok_or_else(|| "for: expected a time of at least 1ms, such as 30s, 10min or 1h".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_is_decoded_and_invalid_parameters_are_rejected() {
        let query = BanQuery::parse("subject=ip%3A203.0.113.9%26user%3A42&for=1h+30min", true).unwrap();
        let duration = Some(Duration::from_secs(5_400));
        assert_eq!(query, BanQuery { subject: b"ip:203.0.113.9&user:42".to_vec(), duration });
        assert_eq!(BanQuery::parse("subject=a", true).unwrap().duration, None);
        for (query, accepts_duration, phrase) in [
            ("", true, "subject="),
            ("for=1h", true, "subject="),
            ("subject=a&for=soon", true, "such as 30s"),
            ("subject=a&for=0s", true, "at least 1ms"),
            ("subject=a&for=", true, "such as 30s"),
            ("subject=a&until=tomorrow", true, "subject or for"),
            ("subject=a&for=1h", false, "expected subject"),
        ] {
            let refused = BanQuery::parse(query, accepts_duration);
            assert!(refused.is_err_and(|message| message.contains(phrase)), "{query}");
        }
        let long = format!("subject={}", "a".repeat(65_537));
        assert!(BanQuery::parse(&long, true).is_err_and(|message| message.starts_with("subject: ")));
    }
}
