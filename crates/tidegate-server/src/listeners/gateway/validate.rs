//! Rejects requests that servers may interpret differently, and those that the gateway never forwards.
//!
//! hyper rejects most malformed requests itself, with 400: differing or malformed `Content-Length`, a folded header
//! line, `Transfer-Encoding` that does not end in `chunked` or is sent over HTTP/1.0, control characters, spaces before
//! the colon. If a request has both `Content-Length` and `Transfer-Encoding`, hyper drops the length, reads chunks and
//! closes the connection after the response, as RFC 9112 requires; the upstream gets only chunks.
//!
//! hyper accepts the following requests, which are rejected here:
//!
//! | request | why |
//! |---|---|
//! | no `Host`, more than one, or one that is not a valid host | servers choose different hosts for routing |
//! | `GET http://other/ HTTP/1.1` with another `Host` | as above; the gateway is not an open proxy |
//! | `GET *`, `GET host:80` | only `OPTIONS` may use an asterisk, only `CONNECT` an authority |
//! | `CONNECT` | it would open a tunnel to a target of the client's choice |
//! | `TRACE` | it would return headers that proxies have added |
//! | `Transfer-Encoding: gzip, chunked` | the body would be forwarded without its coding |
//! | `Connection: x-api-key` and the header that it names | the header would be removed after the rules have used it |
//! | `Expect` other than `100-continue` | the gateway does not support it |

use http::header::{EXPECT, HOST, HeaderValue, TRANSFER_ENCODING};
use http::{Method, Request, Response, StatusCode, Uri, Version};
use tidegate::gateway::GatewayBounds;

use super::body::GatewayBody;
use super::headers;
use crate::listeners::http::connection::problem;

/// The reason why a request is rejected before it is decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Invalid {
    Host,
    Target,
    Method,
    TransferEncoding,
    Connection,
    Expectation,
    UriTooLong,
    TooManyHeaders,
}

impl Invalid {
    /// Returns the response. An HTTP/1.1 connection is closed after it.
    pub(super) fn response(self) -> Response<GatewayBody> {
        let bad = |message| (StatusCode::BAD_REQUEST, "bad_request", message);
        let (status, error, message) = match self {
            Invalid::Host => bad("expected exactly one Host header with a valid host"),
            Invalid::Target => bad("expected a path as the request target"),
            Invalid::TransferEncoding => bad("the only supported transfer coding is chunked"),
            Invalid::Connection => bad("the Connection header names a header that must be forwarded"),
            Invalid::Method => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "this method is not supported"),
            Invalid::Expectation => {
                let message = "the only supported expectation is 100-continue";
                (StatusCode::EXPECTATION_FAILED, "expectation_failed", message)
            }
            Invalid::UriTooLong => (StatusCode::URI_TOO_LONG, "uri_too_long", "the URI of this request is too long"),
            Invalid::TooManyHeaders => {
                let message = "this request has too many headers";
                (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message)
            }
        };
        let mut response = problem(status, error, message);
        if self == Invalid::Method {
            let allowed = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
            response.headers_mut().insert(http::header::ALLOW, allowed);
        }
        response.headers_mut().insert(http::header::CONNECTION, HeaderValue::from_static("close"));
        response.map(GatewayBody::from)
    }
}

/// Checks the head of a request that hyper has parsed.
///
/// # Errors
/// Returns the first reason to reject the request.
pub(super) fn validate<B>(request: &Request<B>, bounds: &GatewayBounds) -> Result<(), Invalid> {
    let (uri, headers) = (request.uri(), request.headers());
    let authority_bytes = uri.authority().map_or(0, |authority| authority.as_str().len());
    if authority_bytes + uri.path_and_query().map_or(0, |path| path.as_str().len()) > bounds.uri_bytes_max {
        return Err(Invalid::UriTooLong);
    }
    if headers.len() > bounds.headers_max {
        return Err(Invalid::TooManyHeaders);
    }
    if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
        return Err(Invalid::Method);
    }
    validate_target(request.method(), uri)?;
    validate_host(request)?;
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let is_chunked = |value: &HeaderValue| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
    if codings.next().is_some_and(|value| !is_chunked(value)) || codings.next().is_some() {
        return Err(Invalid::TransferEncoding);
    }
    if headers::removes_headers(headers) {
        return Err(Invalid::Connection);
    }
    if headers.get_all(EXPECT).iter().all(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
        Ok(())
    } else {
        Err(Invalid::Expectation)
    }
}

/// Checks the form of the target: a path, a URI with a path, or an asterisk for `OPTIONS`.
fn validate_target(method: &Method, uri: &Uri) -> Result<(), Invalid> {
    let is_path = uri.path().starts_with('/') && (uri.authority().is_none() || uri.scheme().is_some());
    let has_web_scheme = uri.scheme_str().is_none_or(|scheme| matches!(scheme, "http" | "https"));
    let is_asterisk = method == Method::OPTIONS && uri.path() == "*" && uri.query().is_none();
    if (is_path && has_web_scheme) || is_asterisk { Ok(()) } else { Err(Invalid::Target) }
}

/// Checks that a request names exactly one host. HTTP/1.0 requests may name none.
fn validate_host<B>(request: &Request<B>) -> Result<(), Invalid> {
    let mut lines = request.headers().get_all(HOST).iter();
    let (first, second) = (lines.next(), lines.next());
    if second.is_some() {
        return Err(Invalid::Host);
    }
    let header = match first {
        Some(value) => Some(value.to_str().ok().filter(|host| is_host(host)).ok_or(Invalid::Host)?),
        None => None,
    };
    let authority = request.uri().authority().map(|authority| authority.as_str());
    match (authority, header) {
        (Some(authority), _) if !is_host(authority) => Err(Invalid::Host),
        (Some(authority), Some(header)) if !authority.eq_ignore_ascii_case(header) => Err(Invalid::Host),
        // An HTTP/1.1 client sends `Host` in addition to an absolute URI.
        (Some(_), None) if request.version() == Version::HTTP_11 => Err(Invalid::Host),
        (None, None) if request.version() != Version::HTTP_10 => Err(Invalid::Host),
        _ => Ok(()),
    }
}

/// Returns whether a text is a host: a name, an IPv4 address or an IPv6 address in brackets, optionally followed by a
/// port.
fn is_host(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, port)) if address.parse::<std::net::Ipv6Addr>().is_ok() => ("address", port),
            _ => return false,
        },
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let is_port = |port: &str| port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
    let has_valid_port = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
    let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    has_valid_port && !host.is_empty() && host.bytes().all(is_name_byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: &str, uri: &str, version: Version, headers: &[(&str, &str)]) -> Result<(), Invalid> {
        let mut request = Request::builder().method(method).uri(uri).version(version);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        validate(&request.body(()).unwrap(), &GatewayBounds::default())
    }

    #[test]
    fn requests_with_one_host_and_a_path_are_accepted() {
        for (method, uri, version, headers) in [
            ("GET", "/", Version::HTTP_11, &[("host", "example.com")][..]),
            ("GET", "/a?b", Version::HTTP_11, &[("host", "EXAMPLE.com:8080")]),
            ("GET", "/", Version::HTTP_11, &[("host", "[::1]:80")]),
            ("GET", "/", Version::HTTP_10, &[]),
            ("GET", "http://example.com/a", Version::HTTP_11, &[("host", "Example.com")]),
            ("OPTIONS", "*", Version::HTTP_11, &[("host", "a")]),
            ("POST", "/", Version::HTTP_11, &[("host", "a"), ("transfer-encoding", "Chunked")]),
            ("POST", "/", Version::HTTP_11, &[("host", "a"), ("expect", "100-Continue")]),
            ("GET", "https://example.com/", Version::HTTP_2, &[]),
            ("GET", "https://example.com/", Version::HTTP_2, &[("host", "example.com")]),
        ] {
            assert_eq!(check(method, uri, version, headers), Ok(()), "{method} {uri} {headers:?}");
        }
    }

    #[test]
    fn requests_that_servers_may_understand_differently_are_rejected() {
        let long = format!("/{}", "a".repeat(20_000));
        for (method, uri, version, headers, expected) in [
            ("GET", "/", Version::HTTP_11, &[][..], Invalid::Host),
            ("GET", "/", Version::HTTP_2, &[], Invalid::Host),
            ("GET", "/", Version::HTTP_11, &[("host", "")], Invalid::Host),
            ("GET", "/", Version::HTTP_11, &[("host", "a"), ("host", "a")], Invalid::Host),
            ("GET", "/", Version::HTTP_11, &[("host", "a, b")], Invalid::Host),
            ("GET", "/", Version::HTTP_11, &[("host", "user@a")], Invalid::Host),
            ("GET", "/", Version::HTTP_11, &[("host", "a/b")], Invalid::Host),
            ("GET", "/", Version::HTTP_11, &[("host", "a:b")], Invalid::Host),
            ("GET", "/", Version::HTTP_11, &[("host", "a:1:2")], Invalid::Host),
            ("GET", "/", Version::HTTP_11, &[("host", "[::1")], Invalid::Host),
            ("GET", "http://other/", Version::HTTP_11, &[("host", "a")], Invalid::Host),
            ("GET", "http://a/", Version::HTTP_11, &[], Invalid::Host),
            ("GET", "http://u@a/", Version::HTTP_11, &[("host", "a")], Invalid::Host),
            ("GET", "https://a/", Version::HTTP_2, &[("host", "b")], Invalid::Host),
            ("GET", "ftp://a/", Version::HTTP_11, &[("host", "a")], Invalid::Target),
            ("GET", "a:80", Version::HTTP_11, &[("host", "a")], Invalid::Target),
            ("GET", "*", Version::HTTP_11, &[("host", "a")], Invalid::Target),
            ("CONNECT", "a:80", Version::HTTP_11, &[("host", "a")], Invalid::Method),
            ("TRACE", "/", Version::HTTP_11, &[("host", "a")], Invalid::Method),
            (
                "POST",
                "/",
                Version::HTTP_11,
                &[("host", "a"), ("transfer-encoding", "gzip, chunked")],
                Invalid::TransferEncoding,
            ),
            (
                "POST",
                "/",
                Version::HTTP_11,
                &[("host", "a"), ("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")],
                Invalid::TransferEncoding,
            ),
            ("POST", "/", Version::HTTP_11, &[("host", "a"), ("expect", "magic")], Invalid::Expectation),
            ("GET", &long, Version::HTTP_11, &[("host", "a")], Invalid::UriTooLong),
        ] {
            assert_eq!(check(method, uri, version, headers), Err(expected), "{method} {uri:.60} {headers:?}");
        }
    }
}
