//! One HTTP connection, with its bounds; the same for every door that speaks HTTP.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body, Incoming};

use crate::accept::Closing;
use crate::doors::within;
use crate::stream::WrittenWithin;

/// The request line and all headers together.
const HEADER_BYTES_MAX: usize = 64 * 1024;
/// A body that takes longer is not waited for.
const BODY_WITHIN: Duration = Duration::from_secs(10);

/// Serves one connection until the client leaves, is silent for `idle`, reads no answer for as long, or the doors close; then the answer that is
/// being given is the last. Before that, a client that asks while they are about to close is told so with its answer: whoever
/// is cut off between two questions loses the second.
pub(crate) async fn serve<S, A, F>(stream: S, idle: Duration, closing: Closing, answer: A) -> Result<(), hyper::Error>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    A: Fn(Request<Incoming>) -> F,
    F: Future<Output = Response<Bytes>>,
{
    let (leaving, shutdown) = (&closing, closing.clone().begun());
    let service = hyper::service::service_fn(move |request| {
        let answer = answer(request);
        async move {
            let mut response = answer.await.map(Full::new);
            if leaving.is_leaving() {
                // hyper goes by it, too.
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(hyper_util::rt::TokioTimer::new())
        .header_read_timeout(idle)
        .max_buf_size(HEADER_BYTES_MAX)
        // Answers are short: copied behind their headers they go out for less than a list of two pieces.
        .writev(false)
        .serve_connection(hyper_util::rt::TokioIo::new(WrittenWithin::new(stream, idle)), service);
    tokio::pin!(connection);
    tokio::select! {
        // First: a request that was read already is one that is being answered.
        biased;
        served = &mut connection => return served,
        () = shutdown => connection.as_mut().graceful_shutdown(),
    }
    connection.await
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
    let collected = within(BODY_WITHIN, Limited::new(body, bytes_max).collect()).await;
    match collected {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large(bytes_max)),
        Ok(Err(_)) => Err(problem(StatusCode::BAD_REQUEST, "bad_request", "the body broke off")),
        Err(_) => Err(problem(StatusCode::REQUEST_TIMEOUT, "timeout", "the body did not come in time")),
    }
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
