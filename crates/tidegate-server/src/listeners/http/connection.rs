//! One HTTP/1.1 connection with its bounds, for every listener that speaks HTTP.

use std::borrow::Cow;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Body;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::fast_path::{ParsedHead, PlainChecks, RequestHead, ResponseBuffer};
use super::general::{AfterExchange, RequestBody, ResponseBody, Supply, exchange, slot_evicted};
use crate::budget::Reservation;
use crate::listener::{BoxError, ConnectionContext};
use crate::listeners::io::{IdleTimeout, ReadOutcome, close, read_waiting, shrink, within};

/// The response that is sent on a connection over the limit: 503, without a body.
pub(crate) const OVER_LIMIT_RESPONSE: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\nretry-after: 1\r\n\r\n";
/// The most bytes of a request line and all headers together.
pub(super) const HEADER_BYTES_MAX: usize = 64 * 1024;
/// The time that a client has to send a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
const BODY_LATE: &str = "the body did not arrive in time";

/// The size at which collected responses are written although more requests have arrived.
const RESPONSE_BYTES_MAX: usize = 64 * 1024;

/// Serves one HTTP/1.1 connection until it ends. `handler` answers requests; its response bodies may be streams.
///
/// If `plain_checks` is given, it answers [plain checks](super::fast_path) instead.
///
/// ```text
///   read ─▶ is the request complete? ─ yes ─▶ is it a plain check? ─ yes ─▶ decide ─▶ write ─▶ read …
///             └ not yet ─▶ read …                                   └ no ─▶ hyper answers it ─▶ read …
/// ```
///
/// hyper costs a connection some 16 KiB and as much time as several responses. A client that has sent half a head, or a
/// head and half of a body, does not get that yet: its bytes wait in a buffer that grows with what arrives, until the
/// request is complete, late, or too long. From 4 KiB on they count towards the bytes that the listener
/// [may hold](crate::budget) of all unfinished requests. Only a body without a simple length is awaited by hyper.
///
/// The connection ends when:
/// - the client ends it, is silent for `idle`, or takes longer than `idle` for a request header (408) or 10 s for a body;
/// - a request asks for it (`connection: close`, HTTP/1.0), its body was not read by `handler`, or it is malformed, which
///   is answered with 4xx;
/// - the instance drains or shuts down: once all requests that have arrived are answered, the last response has
///   `connection: close`; an idle connection, or one with half a head, ends half a second after its listener has begun to
///   close;
/// - its slot is evicted, while it is idle or after its response has begun;
/// - the bytes of an incomplete request are evicted from the receive budget, which is answered with 503.
///
/// # Errors
/// If the connection breaks, or the client accepts no bytes of a response for `idle`.
pub(crate) async fn serve<S, H, F>(
    mut stream: S,
    idle: Duration,
    mut context: ConnectionContext,
    plain_checks: Option<PlainChecks<'_>>,
    handler: H,
) -> Result<(), BoxError>
where
    S: AsyncRead + AsyncWrite + Unpin,
    H: Fn(Request<RequestBody>) -> F,
    F: Future<Output = Response<ResponseBody>>,
{
    let mut shutdown = pin!(context.shutdown.clone().idle_grace_over());
    let mut timeout = IdleTimeout::new(idle);
    let mut buffer = BytesMut::new();
    let mut responses = ResponseBuffer::default();
    let mut partial: Option<PartialRequest> = None;
    let mut is_last = false;
    while !is_last {
        timeout.set_deadline(partial.as_ref().map(|partial| partial.deadline));
        let outcome = match (&partial, &context.slot) {
            (None, None) => timeout.read(&mut stream, &mut buffer, shutdown.as_mut()).await?,
            (partial, slot) => {
                let awaits_body = partial.as_ref().is_some_and(|partial| partial.head.is_some());
                let (mut no_room, mut no_slot) = (pin!(context.receiving.evicted()), pin!(slot_evicted(slot.as_ref())));
                let interrupt = poll_fn(|cx| {
                    // Once a head is complete, its body is awaited even during a shutdown.
                    let is_over = !awaits_body && shutdown.as_mut().poll(cx).is_ready();
                    if is_over || no_room.as_mut().poll(cx).is_ready() {
                        Poll::Ready(())
                    } else {
                        no_slot.as_mut().poll(cx)
                    }
                });
                timeout.read(&mut stream, &mut buffer, pin!(interrupt)).await?
            }
        };
        match (outcome, &partial) {
            // A body that ends early is answered by hyper.
            (ReadOutcome::Bytes, _) | (ReadOutcome::End, Some(PartialRequest { head: Some(_), .. })) => {}
            (ReadOutcome::TimedOut, Some(partial)) => {
                is_last = true;
                responses.add(&timed_out(partial.timeout_message()), is_last, &context);
            }
            (ReadOutcome::Interrupted, Some(_)) if context.receiving.is_evicted() => {}
            // Another connection waits for the slot.
            (ReadOutcome::Interrupted, _) if context.slot.as_ref().is_some_and(Reservation::is_evicted) => {
                return Ok(());
            }
            (ReadOutcome::End | ReadOutcome::Interrupted, _) | (ReadOutcome::TimedOut, None) => break,
        }
        let (bytes_before, has_ended) = (buffer.len(), outcome == ReadOutcome::End);
        while !is_last && !buffer.is_empty() {
            let supply = match next_request(&buffer, partial.take(), idle) {
                NextRequest::Complete(head) => {
                    if let Some(plain_checks) =
                        plain_checks.filter(|checks| head.is_plain && checks.accept(&head, &buffer))
                    {
                        let response = match plain_checks.answer_at_once(&head, &buffer).await {
                            Some(response) => {
                                buffer.advance(head.end);
                                response
                            }
                            None => {
                                let body = buffer.split_to(head.end).freeze().slice(head.body_at..);
                                responses.send(&mut stream, idle).await?;
                                // Boxed to keep the connection's future small.
                                let waiting = plain_checks.wait(body, &mut stream, &mut buffer, context.slot.as_ref());
                                let Some(response) = Box::pin(waiting).await else { return Ok(()) };
                                response
                            }
                        };
                        is_last = context.shutdown.is_draining()
                            && buffer.is_empty()
                            && !read_waiting(&mut stream, &mut buffer).await?;
                        responses.add(&response, is_last, &context);
                        if responses.len() > RESPONSE_BYTES_MAX {
                            responses.send(&mut stream, idle).await?;
                        }
                        continue;
                    }
                    Supply::Head(head.body_at)
                }
                NextRequest::Partial(PartialRequest { head: Some(head), .. }) if has_ended => {
                    Supply::Head(head.body_at)
                }
                NextRequest::Partial(now) => {
                    partial = Some(now);
                    break;
                }
                NextRequest::Malformed => Supply::All,
            };
            responses.send(&mut stream, idle).await?;
            // Boxed to keep the connection's future small.
            match Box::pin(exchange(supply, &mut stream, &mut buffer, idle, &mut context, &handler)).await? {
                AfterExchange::KeepAlive => timeout.restart(),
                AfterExchange::Close => is_last = true,
                AfterExchange::Abandoned => return Ok(()),
            }
        }
        shrink(&mut buffer, bytes_before);
        let announced = partial.as_ref().map_or(0, PartialRequest::announced);
        if !is_last && !context.receiving.hold_buffer(&mut buffer, announced).await {
            is_last = true;
            responses.add(&evicted(), is_last, &context);
        }
        if is_last {
            buffer = BytesMut::new();
            context.receiving.release();
        }
        responses.send(&mut stream, idle).await?;
    }
    Ok(close(&mut stream, idle).await?)
}

/// The result of [`next_request`].
#[derive(Debug)]
enum NextRequest {
    /// A request that is complete, or has a body whose end hyper is to find.
    Complete(RequestHead),
    /// The beginning of a request that is not complete.
    Partial(PartialRequest),
    /// A malformed request, or one whose head is still incomplete at 64 KiB.
    Malformed,
}

/// The state of a request that is not complete, kept until more bytes arrive.
#[derive(Debug)]
struct PartialRequest {
    /// The head, if a part of the body is missing. `None` if a part of the head is missing.
    head: Option<RequestHead>,
    /// The time at which that part must be complete.
    deadline: Instant,
    /// The length of the buffer at the last call of [`next_request`].
    seen: usize,
    /// The length that the buffer must reach before it is parsed again. Parsing a long head again for each of its bytes
    /// would cost more than answering it.
    parse_at: usize,
}

/// Finds the request at the beginning of `buffer`.
///
/// `before` is the state that the last call returned for the same request, with fewer bytes in `buffer`. It is `None`
/// for a new request.
///
/// An incomplete head gets a deadline of `idle` from the first call with it, an incomplete body one of 10 s. Later
/// calls keep the deadline.
fn next_request(buffer: &[u8], before: Option<PartialRequest>, idle: Duration) -> NextRequest {
    if let Some(before) = before.as_ref().filter(|before| !before.may_be_complete(buffer)) {
        return NextRequest::Partial(PartialRequest { seen: buffer.len(), ..*before });
    }
    let partial = |head: Option<RequestHead>, parse_at: usize| {
        let limit = if head.is_some() { BODY_TIMEOUT } else { idle };
        let kept = before.as_ref().filter(|before| before.head.is_some() == head.is_some());
        let deadline = kept.map_or_else(|| Instant::now() + limit, |before| before.deadline);
        NextRequest::Partial(PartialRequest { head, deadline, seen: buffer.len(), parse_at })
    };
    let known = before.as_ref().and_then(|before| before.head);
    let head = match known.map_or_else(|| RequestHead::parse(buffer), ParsedHead::Complete) {
        ParsedHead::Complete(head) => head,
        ParsedHead::Partial if buffer.len() < HEADER_BYTES_MAX => {
            return partial(None, HEADER_BYTES_MAX.min(2 * buffer.len()));
        }
        ParsedHead::Partial | ParsedHead::Malformed => return NextRequest::Malformed,
    };
    if head.end > buffer.len() { partial(Some(head), head.end) } else { NextRequest::Complete(head) }
}

impl PartialRequest {
    /// Returns whether the missing part may be complete now, so that `buffer` has to be parsed.
    ///
    /// False means that it cannot be complete yet.
    fn may_be_complete(&self, buffer: &[u8]) -> bool {
        let has_head = || self.head.is_none() && ends_head(&buffer[self.seen.saturating_sub(3)..]);
        buffer.len() >= self.parse_at || has_head()
    }

    /// Returns the length of the whole request, or 0 if it is unknown.
    fn announced(&self) -> usize {
        self.head.map_or(0, |head| head.end)
    }

    fn timeout_message(&self) -> &'static str {
        if self.head.is_some() { BODY_LATE } else { "the request header did not arrive in time" }
    }
}

/// Returns whether the bytes contain an empty line, which ends a head.
fn ends_head(bytes: &[u8]) -> bool {
    memchr::memchr_iter(b'\n', bytes).any(|at| matches!(bytes[at + 1..], [b'\n', ..] | [b'\r', b'\n', ..]))
}

/// Reads a whole body of at most `bytes_max` bytes, within 10 s.
///
/// `Err` is the response to a body that is too long (413), not complete in time (408), ends early (400), or whose bytes
/// were evicted (503).
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
            let broken = |error: B::Error| {
                let error: BoxError = error.into();
                broken(&*error)
            };
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
        Err(_) => Err(timed_out(BODY_LATE)),
    }
}

/// Returns the response to a body whose reading failed: 503 if its bytes were evicted, else 400.
fn broken(error: &(dyn std::error::Error + 'static)) -> Response<Bytes> {
    let is_evicted = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref().is_some_and(|error: &io::Error| error.kind() == io::ErrorKind::QuotaExceeded)
    };
    if std::iter::successors(Some(error), |error| error.source()).any(is_evicted) {
        return evicted();
    }
    problem(StatusCode::BAD_REQUEST, "bad_request", "the body is incomplete")
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
fn timed_out(message: &str) -> Response<Bytes> {
    problem(StatusCode::REQUEST_TIMEOUT, "timeout", message)
}

/// Returns the 503 response to a request that was dropped before it was complete, because its bytes were evicted.
fn evicted() -> Response<Bytes> {
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
