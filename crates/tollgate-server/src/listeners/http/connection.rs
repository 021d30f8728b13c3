//! One HTTP connection, with its bounds; the same for every door that speaks HTTP.

use std::pin::pin;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Body;
use tokio::io::{AsyncRead, AsyncWrite};

use super::general::RequestBody;
use super::{HttpListener, fast_path, general};
use crate::accept::Context;
use crate::listeners::within;

/// The request line and all headers together.
pub(super) const HEADER_BYTES_MAX: usize = 64 * 1024;
/// A body that takes longer is not waited for.
pub(super) const BODY_WITHIN: Duration = Duration::from_secs(10);

/// Serves one connection until the client leaves, is silent for `idle`, reads no answer for as long, or the doors close; then the answer that is
/// being given is the last. Before that, a client that asks while they are about to close is told so with its answer: whoever
/// is cut off between two questions loses the second.
///
/// Usual requests are answered by `door`, if there is one, and all others by `answer`.
///
/// The connection ends when its place, while it is idle, or the bytes of its request, while it is not complete, are needed
/// for others.
pub(crate) async fn serve<S, A, F>(
    mut stream: S,
    idle: Duration,
    mut context: Context,
    door: Option<&HttpListener>,
    answer: A,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>>
where
    S: AsyncRead + AsyncWrite + Unpin,
    A: Fn(Request<RequestBody>) -> F,
    F: Future<Output = Response<Bytes>>,
{
    let Some(begun) = fast_path::serve(door, &answer, &mut stream, idle, &mut context).await? else { return Ok(()) };
    // A large future, for which a connection that stays with the usual needs no room.
    Ok(Box::pin(general::last(&mut stream, begun, idle, context, &answer)).await?)
}

/// The whole body, or the answer that it is too long or too late.
pub(crate) async fn read_body<B>(body: B, bytes_max: usize) -> Result<Bytes, Response<Bytes>>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    if body.size_hint().lower() > bytes_max as u64 {
        return Err(too_large(bytes_max));
    }
    let mut body = pin!(body);
    let reading = async {
        // Copied together, so that nothing keeps the buffers that they were received in.
        let mut whole = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let broken = |_| problem(StatusCode::BAD_REQUEST, "bad_request", "the body broke off");
            let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
            if whole.len() + data.len() > bytes_max {
                return Err(too_large(bytes_max));
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    };
    match within(BODY_WITHIN, reading).await {
        Ok(read) => read,
        Err(_) => Err(late("the body did not come in time")),
    }
}

/// 408.
pub(super) fn late(message: &str) -> Response<Bytes> {
    problem(StatusCode::REQUEST_TIMEOUT, "timeout", message)
}

/// 503: the request was dropped before it was complete, because others need the room.
pub(super) fn evicted() -> Response<Bytes> {
    let message = "too much is being received; the request was dropped before it was complete";
    let mut response = problem(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

fn too_large(bytes_max: usize) -> Response<Bytes> {
    let message = format!("a body has at most {bytes_max} bytes");
    problem(StatusCode::PAYLOAD_TOO_LARGE, "too_large", &message)
}

/// A JSON answer.
pub(crate) fn json(status: StatusCode, body: &impl serde::Serialize) -> Response<Bytes> {
    let body = serde_json::to_vec(body).unwrap_or_default();
    let mut response = Response::new(Bytes::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Why there is no other answer: a word for programs and a sentence for people.
pub(crate) fn problem(status: StatusCode, error: &str, message: &str) -> Response<Bytes> {
    json(status, &serde_json::json!({ "error": error, "message": message }))
}

/// 405, with what would have been accepted.
pub(crate) fn refused_method(allowed: &'static str) -> Response<Bytes> {
    let message = format!("expected {allowed}");
    let mut response = problem(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", &message);
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

#[cfg(test)]
mod tests;
