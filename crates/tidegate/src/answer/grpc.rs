//! Refusals in gRPC: a status in the trailers, the rate-limit headers as metadata.
//!
//! gRPC runs over HTTP, but its clients expect the HTTP status 200. They take any other status for a failure of an
//! intermediary and report a 429 as UNKNOWN or UNAVAILABLE. They do understand a trailers-only response: HTTP 200, no
//! body, and `grpc-status` and `grpc-message` among the headers. All other headers become metadata, so a gRPC client
//! can read everything that an HTTP client can:
//!
//! ```text
//!   :status: 200
//!   content-type: application/grpc
//!   grpc-status: 8                                     RESOURCE_EXHAUSTED, by the table of verdicts
//!   grpc-message: the limit of 60 per minute has been reached; try again in 12 seconds
//!   retry-after: 12
//!   ratelimit-policy: "per-minute";q=60;w=60
//!   ratelimit: "per-minute";r=0;t=12
//! ```
//!
//! Only gRPC requests may be answered this way. To any other client a 200 is an admission.

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderName};
use http::{HeaderMap, HeaderValue, Response};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use super::verdict::Verdict;

static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
static GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Returns the `Content-Type` of a request if it is gRPC, else `None`. `request` holds the request's headers.
///
/// A request is gRPC if its content type starts with `application/grpc`, such as `application/grpc+proto` and
/// `application/grpc-web`. The case must match.
pub fn content_type(request: &HeaderMap) -> Option<&HeaderValue> {
    request.get(CONTENT_TYPE).filter(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// Returns whether the headers of a response have a `grpc-status` other than 0 (OK). `false` if they have none.
pub(crate) fn has_failed(headers: &HeaderMap) -> bool {
    headers.get(&GRPC_STATUS).is_some_and(|status| status.as_bytes() != b"0")
}

/// Builds a gRPC response without a body: HTTP status 200, with `grpc-status` and `grpc-message` among the headers.
///
/// `grpc-status` is the verdict's code, and `content_type` should be that of the request. All `headers` of the HTTP
/// response but `Content-Length` and `Content-Type` are kept and become metadata.
pub(crate) fn refusal(
    verdict: Verdict,
    message: &str,
    mut headers: HeaderMap,
    content_type: &HeaderValue,
) -> Response<Bytes> {
    headers.remove(CONTENT_LENGTH);
    headers.insert(CONTENT_TYPE, content_type.clone());
    headers.insert(&GRPC_STATUS, HeaderValue::from(verdict.grpc().number()));
    if let Ok(message) = HeaderValue::try_from(escaped(message)) {
        headers.insert(&GRPC_MESSAGE, message);
    }
    let mut response = Response::new(Bytes::new());
    *response.headers_mut() = headers;
    response
}

/// Percent-encodes a `grpc-message`: printable ASCII is kept, `%` and all other bytes become `%XX`.
fn escaped(message: &str) -> String {
    const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');
    utf8_percent_encode(message, ESCAPED).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::GrpcCode;

    fn headers(content_type: &str) -> HeaderMap {
        HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_str(content_type).unwrap())])
    }

    #[test]
    fn only_grpc_is_answered_as_grpc() {
        for grpc in ["application/grpc", "application/grpc+proto", "application/grpc-web+proto"] {
            assert_eq!(content_type(&headers(grpc)).unwrap(), grpc);
        }
        for other in ["application/json", "text/grpc", "application/x-grpc", ""] {
            assert_eq!(content_type(&headers(other)), None, "{other}");
        }
        assert_eq!(content_type(&HeaderMap::new()), None);
    }

    #[test]
    fn grpc_message_is_percent_encoded() {
        assert_eq!(escaped("100 % for é\n"), "100 %25 for %C3%A9%0A");
        let response = refusal(
            Verdict::Denied,
            "wait…",
            headers("application/json"),
            &HeaderValue::from_static("application/grpc+proto"),
        );
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/grpc+proto");
        assert_eq!(response.headers()["grpc-status"], GrpcCode::ResourceExhausted.number().to_string().as_str());
        assert_eq!(response.headers()["grpc-message"], "wait%E2%80%A6");
        assert!(has_failed(response.headers()) && !has_failed(&headers("application/grpc")));
    }
}
