//! `/v1/forward-auth`: a reverse proxy asks about each request before it forwards it.
//!
//! nginx (`auth_request`), Caddy (`forward_auth`) and Traefik (`forwardAuth`) send a request without a body for each
//! request of a visitor. It has the visitor's headers, and headers that describe the visitor's request. If the answer is
//! 2xx, they forward the visitor's request, else they refuse it:
//!
//! ```text
//!   visitor ── POST /shorten ─▶ proxy ── GET /v1/forward-auth ──────────────────────────▶ this listener
//!                                 │        X-Forwarded-Method: POST                            │
//!                                 │        X-Forwarded-Uri: /shorten                           │ Engine::check
//!                                 │        X-Forwarded-Host: example.com                       │
//!                                 │        X-Forwarded-For: 203.0.113.9                        │
//!                                 │        Authorization, Cookie, … of the visitor             │
//!                                 │◀── 200 and rate-limit headers, or the refusal ─────────────┘
//!                                 └── POST /shorten ─▶ upstream
//! ```
//!
//! The visitor's request is rebuilt from these headers and decided by the rules, as the layer would decide it.
//!
//! **Two forms of the answer.** Caddy and Traefik relay a refusal to the visitor with its status, headers and body. So
//! they get it as the layer would send it. nginx accepts only 2xx, 401 and 403: any other status becomes a 500, and
//! the body of a 403 is lost. So `/v1/forward-auth/nginx` answers 204 or 403, and sends the response for the visitor in
//! headers, which the configuration of nginx can read:
//!
//! | header | content |
//! |---|---|
//! | `X-Tidegate-Status` | the status for the visitor: 429, 403, 503, 414 or 400 |
//! | `X-Tidegate-Body` | the body in one line: control characters become spaces. Absent if it exceeds 8 KiB |
//! | `X-Tidegate-Content-Type` | the content type of that body |
//! | `Retry-After`, `RateLimit`, … | as in the other form |
//!
//! **gRPC.** The layer refuses a gRPC request with HTTP status 200 and the error in `grpc-status`. A proxy would treat
//! that as an admission. So a refusal has its HTTP status here. gRPC clients map 429 and 503 to `UNAVAILABLE`, and 403
//! to `PERMISSION_DENIED`.
//!
//! **What is trusted.** The peer of the connection must be in `trusted_proxies` of the rules, because the headers that
//! describe the request are trusted. This replaces two checks of `/v1/check`, which cannot work here:
//!
//! - The token of the listener: the `Authorization` header is the visitor's.
//! - The check for foreign web pages (`browser.rs`): `Origin` and `Sec-Fetch-Site` are the visitor's, and a page of
//!   another site may well call the upstream. A page that makes a browser on a trusted machine send requests here gains
//!   nothing: it must send `X-Forwarded-Method`, which browsers allow for another site only if that site agrees (CORS
//!   preflight), and this listener never does. A rebound DNS name evades that, as the name in `Host` may be the
//!   visitor's and is not checked. So a machine in `trusted_proxies` should be a proxy and not a desktop.
//!
//! The query is ignored. Caddy appends the visitor's query to that of the configured URL, so an option in the query would
//! be the visitor's to choose.
//!
//! **Errors.** If the proxy is not trusted, or does not send what is expected, the answer is 400 in both forms, and a
//! warning is logged, because nginx shows the visitor only a 500. It is never 403, which nginx would treat as a
//! refusal. A header that describes the request must occur exactly once: of two values, one may be the visitor's. The
//! header that holds the client's address (`forwarding_header`) must be present, because all visitors would otherwise
//! be counted together, by the address of the proxy. If it is not `X-Forwarded-For`, then `X-Forwarded-For` is not
//! required. The content of the header is parsed as in the layer.
//!
//! A method or URI that HTTP does not allow is the visitor's error. It is refused with 400, in the form of a refusal.
//!
//! **Charges.** The proxy does not report how the request ends, so units stay charged, whatever `charge` says. A leaky
//! bucket delays the answer, as the layer delays the request.

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderName, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use tidegate::engine::{Outcome, RequestOptions};
use tidegate::identity::TrustedProxies;
use tokio::time::Instant;

use super::HttpListener;
use super::connection::problem;
use crate::listeners::described::{DescriptionError, described_request};

/// The longest time for which a leaky bucket may delay an answer. Traefik waits 30 s for it, and nginx 60 s.
const WAIT_MAX: Duration = Duration::from_secs(25);
/// The most bytes of `X-Tidegate-Body`. With the other headers it fits into `proxy_buffer_size 16k`.
const BODY_BYTES_MAX: usize = 8 * 1024;

const X_FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const X_FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_TIDEGATE_STATUS: HeaderName = HeaderName::from_static("x-tidegate-status");
const X_TIDEGATE_BODY: HeaderName = HeaderName::from_static("x-tidegate-body");
const X_TIDEGATE_CONTENT_TYPE: HeaderName = HeaderName::from_static("x-tidegate-content-type");

/// The headers that belong to the connection between the proxy and this listener, and not to the visitor's request.
const CONNECTION_HEADERS: [HeaderName; 9] = [
    CONNECTION,
    CONTENT_LENGTH,
    EXPECT,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// The form of an answer, which the path of the request determines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ForwardAuth {
    /// `/v1/forward-auth`, for Caddy and Traefik: 200, or the refusal.
    Plain,
    /// `/v1/forward-auth/nginx`, for `auth_request`: 204, or 403 with the refusal in headers.
    Nginx,
}

impl ForwardAuth {
    /// Returns the form of the endpoint at `path`, or `None` if it is another endpoint.
    pub(super) fn at(path: &str) -> Option<ForwardAuth> {
        match path {
            "/v1/forward-auth" => Some(ForwardAuth::Plain),
            "/v1/forward-auth/nginx" => Some(ForwardAuth::Nginx),
            _ => None,
        }
    }

    /// Returns the answer that makes the proxy forward the request. `headers` are the rate-limit headers.
    fn admission(self, headers: HeaderMap) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        *response.headers_mut() = headers;
        if self == ForwardAuth::Nginx {
            *response.status_mut() = StatusCode::NO_CONTENT;
        }
        response
    }

    /// Returns the answer that makes the proxy refuse the request with this response.
    fn refusal(self, response: Response<Bytes>) -> Response<Bytes> {
        if self == ForwardAuth::Plain {
            return response;
        }
        let (mut head, body) = response.into_parts();
        head.headers.insert(X_TIDEGATE_STATUS, HeaderValue::from(head.status.as_u16()));
        head.status = StatusCode::FORBIDDEN;
        let content_type = head.headers.remove(CONTENT_TYPE);
        if let Some(line) = header_line(&body) {
            head.headers.insert(X_TIDEGATE_BODY, line);
            head.headers.extend(content_type.map(|content_type| (X_TIDEGATE_CONTENT_TYPE, content_type)));
        }
        Response::from_parts(head, Bytes::new())
    }
}

/// The reason why a request of a proxy is not decided. The message says what is expected.
#[derive(Debug, thiserror::Error)]
enum ForwardAuthError {
    #[error("this instance has no rules; start it with --config FILE")]
    NoRules,
    #[error("the address of the proxy is not in trusted_proxies of the configuration")]
    UntrustedProxy,
    #[error(
        "expected the header {0} exactly once, set by the proxy; a proxy must send X-Forwarded-Method, \
         X-Forwarded-Uri, X-Forwarded-Host and the client's address"
    )]
    Header(&'static str),
    #[error(
        "expected the client's address in the header {0}, set by the proxy (forwarding_header in the configuration)"
    )]
    NoAddress(HeaderName),
    #[error("{0}")]
    Malformed(#[from] DescriptionError),
}

impl HttpListener {
    /// Answers a proxy at `peer` that asks about a request of a visitor, which these headers describe.
    ///
    /// Returns the admission or the refusal in the form of the endpoint, or 400 if the proxy is not trusted or does not
    /// describe the request. An admission by a leaky bucket is returned after its delay.
    pub(super) async fn forward_auth(&self, form: ForwardAuth, headers: HeaderMap, peer: IpAddr) -> Response<Bytes> {
        let began = Instant::now();
        let outcome = self.decide_described(headers, peer).await;
        self.stats.request_times.record(began.elapsed());
        match outcome {
            Ok((Outcome::Admitted(permit), _)) => {
                if !permit.wait().is_zero() {
                    tokio::time::sleep(permit.wait()).await;
                }
                let mut headers = HeaderMap::new();
                permit.write_headers(&mut headers);
                permit.keep();
                form.admission(headers)
            }
            Ok((Outcome::Refused(refusal), request)) => form.refusal(refusal.response(request.headers())),
            Err(error @ ForwardAuthError::Malformed(_)) => form.refusal(bad_request(&error)),
            Err(error) => {
                if let Some(suppressed) = self.forward_auth_log.admit() {
                    tracing::warn!(suppressed, reason = %error, "rejected a forward-auth request");
                }
                bad_request(&error)
            }
        }
    }

    /// Decides the request that these headers describe by the rules, and returns it with the outcome.
    ///
    /// # Errors
    /// If there are no rules, `peer` is not a trusted proxy, or the headers do not describe a request.
    async fn decide_described(
        &self,
        headers: HeaderMap,
        peer: IpAddr,
    ) -> Result<(Outcome, Request<()>), ForwardAuthError> {
        let rules = self.decider.rules().ok_or(ForwardAuthError::NoRules)?;
        let request = visitor_request(rules.identifier().proxies(), headers, peer)?;
        let options = RequestOptions { max_wait: Some(WAIT_MAX), ..RequestOptions::default() };
        let outcome = self.decider.check_request(&request, peer, options).await;
        Ok((outcome, request))
    }
}

/// Returns the request that the headers of a proxy at `peer` describe.
///
/// It has the visitor's headers, with `X-Forwarded-Host` as its `Host`. Headers about the proxy's connection, and those
/// from which method and URI were read, are removed: rules must match only what the visitor sent.
///
/// # Errors
/// If `peer` is not one of `proxies`, a header is missing, empty or repeated, or the method or URI is malformed.
fn visitor_request(
    proxies: &TrustedProxies,
    mut headers: HeaderMap,
    peer: IpAddr,
) -> Result<Request<()>, ForwardAuthError> {
    if !proxies.trusts(peer.to_canonical()) {
        return Err(ForwardAuthError::UntrustedProxy);
    }
    let address_header = proxies.header().name();
    if headers.get_all(address_header).iter().all(|line| line.as_bytes().trim_ascii().is_empty()) {
        return Err(ForwardAuthError::NoAddress(address_header.clone()));
    }
    let method = take_single(&mut headers, &X_FORWARDED_METHOD, "X-Forwarded-Method")?;
    let uri = take_single(&mut headers, &X_FORWARDED_URI, "X-Forwarded-Uri")?;
    let host = take_single(&mut headers, &X_FORWARDED_HOST, "X-Forwarded-Host")?;
    for name in CONNECTION_HEADERS {
        headers.remove(name);
    }
    headers.insert(HOST, host);
    Ok(described_request(method.as_bytes(), uri.as_bytes(), headers)?)
}

/// Removes the header `name`, which must occur once and not be empty, and returns its value.
fn take_single(
    headers: &mut HeaderMap,
    name: &HeaderName,
    spelling: &'static str,
) -> Result<HeaderValue, ForwardAuthError> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (Some(value), None) if !value.is_empty() => {}
        _ => return Err(ForwardAuthError::Header(spelling)),
    }
    headers.remove(name).ok_or(ForwardAuthError::Header(spelling))
}

/// Returns a body as the value of a header. Control characters become spaces, and white space at both ends is removed.
///
/// `None` if nothing remains, or more than 8 KiB do.
fn header_line(body: &[u8]) -> Option<HeaderValue> {
    let line: Vec<u8> = body.iter().map(|byte| if byte.is_ascii_control() { b' ' } else { *byte }).collect();
    let line = line.trim_ascii();
    if line.is_empty() || line.len() > BODY_BYTES_MAX {
        return None;
    }
    HeaderValue::from_bytes(line).ok()
}

fn bad_request(error: &ForwardAuthError) -> Response<Bytes> {
    problem(StatusCode::BAD_REQUEST, "bad_request", &error.to_string())
}

#[cfg(test)]
mod tests;
