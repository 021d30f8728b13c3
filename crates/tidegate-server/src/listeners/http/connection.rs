//! One HTTP/1.1 connection with its bounds, for every listener that speaks HTTP.

use std::borrow::Cow;
use std::net::IpAddr;
use std::pin::pin;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Body;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};

use super::general::{RequestBody, ResponseBody};
use super::{HttpListener, fast_path, general};
use crate::listener::{BoxError, ConnectionContext};
use crate::listeners::io::within;

/// The response that is sent on a connection over the limit: 503, without a body.
pub(crate) const OVER_LIMIT_RESPONSE: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\nretry-after: 1\r\n\r\n";
/// The most bytes of a request line and all headers together.
pub(super) const HEADER_BYTES_MAX: usize = 64 * 1024;
/// The time that a client has to send a body.
pub(super) const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves one HTTP/1.1 connection until it ends. `handler` answers requests; its response bodies may be streams.
///
/// If `fast_path` is given, the listener answers [plain checks](super::fast_path) of the client at this address instead.
///
/// The connection ends when:
/// - the client ends it, is silent for `idle`, or takes longer than `idle` for a request header or 10 s for a body;
/// - a request asks for it (`connection: close`, HTTP/1.0), its body was not read by `handler`, or it is malformed or
///   of an unusual form; such a request is still answered, with 4xx if it is malformed;
/// - the instance drains or shuts down: once all requests that have arrived are answered, the last response has
///   `connection: close`; an idle connection ends half a second after its listener has begun to close;
/// - its slot is evicted, while it is idle or after its response has begun;
/// - the bytes of an incomplete request are evicted from the receive budget.
///
/// # Errors
/// If the connection breaks, the client accepts no bytes of a response for `idle`, or a request is malformed.
pub(crate) async fn serve<S, H, F>(
    mut stream: S,
    idle: Duration,
    mut context: ConnectionContext,
    fast_path: Option<(&HttpListener, IpAddr)>,
    handler: H,
) -> Result<(), BoxError>
where
    S: AsyncRead + AsyncWrite + Unpin,
    H: Fn(Request<RequestBody>) -> F,
    F: Future<Output = Response<ResponseBody>>,
{
    let Some(begin) = fast_path::serve(fast_path, &handler, &mut stream, idle, &mut context).await? else {
        return Ok(());
    };
    // A large future, for which a connection that never needs it has no room.
    Ok(Box::pin(general::serve_last(&mut stream, begin, idle, context, &handler)).await?)
}

/// Reads a whole body of at most `bytes_max` bytes, within 10 s.
///
/// `Err` is the response to a body that is too long (413), not complete in time (408), or ends early (400).
pub(crate) async fn read_body<B>(body: B, bytes_max: usize) -> Result<Bytes, Response<Bytes>>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    if body.size_hint().lower() > bytes_max as u64 {
        return Err(too_large(bytes_max));
    }
    let mut body = pin!(body);
    let reading = async {
        // Copied, so that the buffers in which the pieces were received can be freed.
        let mut whole = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let broken = |_| problem(StatusCode::BAD_REQUEST, "bad_request", "the body is incomplete");
            let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
            if whole.len() + data.len() > bytes_max {
                return Err(too_large(bytes_max));
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    };
    match within(BODY_TIMEOUT, reading).await {
        Ok(read) => read,
        Err(_) => Err(timed_out("the body did not arrive in time")),
    }
}

/// Returns the path without a slash at its end, if it is that of a page that needs no token.
///
/// Such a page is the same with and without the slash. All other paths are returned unchanged, because they must match
/// exactly.
pub(crate) fn page_path(path: &str) -> &str {
    const PAGES: [&str; 5] = ["/docs", "/openapi.json", "/healthz", "/readyz", "/metrics"];
    path.strip_suffix('/').filter(|page| PAGES.contains(page)).unwrap_or(path)
}

/// Returns a 408 response with this message.
pub(super) fn timed_out(message: &str) -> Response<Bytes> {
    problem(StatusCode::REQUEST_TIMEOUT, "timeout", message)
}

/// Returns the 503 response to a request that was dropped before it was complete, because its bytes were evicted.
pub(super) fn evicted() -> Response<Bytes> {
    let message = "too many bytes of incomplete requests are buffered; this request was dropped before it was complete";
    let mut response = problem(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

fn too_large(bytes_max: usize) -> Response<Bytes> {
    let message = format!("the body is larger than {bytes_max} bytes");
    problem(StatusCode::PAYLOAD_TOO_LARGE, "too_large", &message)
}

/// Returns a response with this status and `body` as JSON. The body is empty if it cannot be serialized.
pub(crate) fn json(status: StatusCode, body: &impl Serialize) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(serde_json::to_vec(body).unwrap_or_default()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The body of an error response.
#[derive(Serialize)]
struct ErrorBody<'a> {
    /// A code for programs.
    error: &'a str,
    /// What is wrong, and what would be accepted.
    message: &'a str,
}

/// Returns an error response whose body is JSON: `error` is a code for programs, `message` a sentence for people.
pub(crate) fn problem(status: StatusCode, error: &str, message: &str) -> Response<Bytes> {
    json(status, &ErrorBody { error, message: &shorten(message) })
}

/// The maximum length of an error message, and how much of the beginning and of the end of a longer one is kept, in
/// characters.
const MESSAGE_CHARS: [usize; 3] = [600, 120, 320];

/// Cuts a long part out of the middle of an error message. Messages quote what the client sent, which may be large.
fn shorten(message: &str) -> Cow<'_, str> {
    let [max, start, end] = MESSAGE_CHARS;
    let count = message.chars().count();
    if count <= max {
        return Cow::Borrowed(message);
    }
    let kept = message.chars().take(start).chain(['…']).chain(message.chars().skip(count - end));
    Cow::Owned(kept.collect())
}

/// Returns a 405 response with `allowed`, such as `GET, HEAD`, in its `Allow` header.
pub(crate) fn method_not_allowed(allowed: &'static str) -> Response<Bytes> {
    let message = format!("expected {allowed}");
    let mut response = problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", &message);
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

#[cfg(test)]
mod tests;
