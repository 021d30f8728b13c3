//! The fast path for plain checks.
//!
//! Nearly all requests of the HTTP listener are alike: `POST /v1/check` with a few headers and a small body, all of it
//! in one packet or two, sent again and again on one connection. For each of them a general HTTP server builds a map of
//! headers, a stream for the body, a timer and a few tasks in between, which together cost more than the decision. The
//! fast path reads such a request where it lies in the buffer and appends the response to the previous one.
//!
//! ```text
//!   read ─▶ is the first request complete? ─ yes ─▶ is it plain? ─ yes ─▶ decide ─▶ write ─▶ read …
//!             │ not yet ─▶ read …                      └ no ─▶ hyper answers it ─▶ read …
//!             └ its end is unknown ─▶ hyper, which gets what was read, and the connection until it ends
//! ```
//!
//! **Plain** is a request that needs no interpretation: HTTP/1.1, exactly this method and path, one plain
//! `content-length`, and no header about the connection except to keep it open. If the listener has a token, also one
//! `authorization` with the token, of an address that has not guessed wrongly too often. All others are not rejected here but
//! left to [hyper](super::general), unchanged: other paths and versions, chunked bodies, malformed requests. So one
//! place implements HTTP, and this is not it; the fast path only recognises a single form, and finds the end of
//! requests whose framing is simple.
//!
//! **Waits.** A check with `wait_ms` may be answered a minute later. Meanwhile the stream is read, because a client that
//! disconnects must leave the queue at once: the check behind it is the next to be admitted.
//! hyper would hold its buffers for the whole wait: a plain check takes 3 KB while it waits, any other 25 KB.
//!
//! **Incomplete requests.** hyper costs a connection some 16 KiB and as much time as several responses. A client that
//! has sent half a head, or a head and half of a body, does not get that yet: its bytes wait here, in a buffer that
//! grows with what arrives, until the request is complete, late, or too long. From 4 KiB on they count towards the
//! bytes that the listener [may hold](crate::budget) of all unfinished requests.
//!
//! `tests.rs` compares the responses of both paths byte by byte, with and without rules.

use std::future::poll_fn;
use std::net::IpAddr;
use std::ops::Range;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use bytes::{Buf, Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use http::{Request, Response};
use httpdate::HttpDate;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::connection::{BODY_TIMEOUT, HEADER_BYTES_MAX, evicted, timed_out};
use super::general::{AfterExchange, GENERAL_BYTES, Protected, RequestBody, ResponseBody, exchange, slot_evicted};
use super::{BODY_BYTES_MAX, HttpListener};
use crate::budget::Reservation;
use crate::listener::ConnectionContext;
use crate::listeners::io::{IdleTimeout, KEPT_BYTES_MAX, ReadOutcome, close, poll_end, read_waiting, send, shrink};

/// The most headers that are parsed here. A connection whose request has more is handed to hyper.
const HEADERS_MAX: usize = 64;
/// The size at which collected responses are written although more requests have arrived.
const RESPONSE_BYTES_MAX: usize = 64 * 1024;

/// Serves a connection as long as the ends of its requests can be found.
///
/// Plain checks of the client at the given address are answered by `listener`, if there is one, and all other requests
/// by `handler` through hyper.
///
/// `idle` is the longest time without bytes from the client, from the first byte of a request to the end of its head,
/// and for the client to accept what is written. A body has 10 s from the end of its head.
///
/// Returns `Some` with the bytes read of a request that is not answered yet, if its end cannot be found, or the client
/// has ended the connection within it. The caller must serve that request, and end the connection.
///
/// Returns `None` if the connection has ended, which the caller must then drop. The reasons are:
/// - a request is late (answered with 408), or its bytes were evicted (answered with 503);
/// - the last response was sent: its request or its handler demanded that, or the instance drains or shuts down;
/// - between two requests, the client ended the connection or was silent for `idle`;
/// - the instance shuts down and no body is awaited; an incomplete head is not answered;
/// - the connection's slot was evicted, [`exchange`] was abandoned, or the client ended the connection while its check
///   waited. Nothing more is sent then.
///
/// # Errors
/// If the connection breaks, or the client accepts no response for as long as `idle`.
pub(super) async fn serve<S, H, F>(
    listener: Option<(&HttpListener, IpAddr)>,
    handler: &H,
    stream: &mut S,
    idle: Duration,
    context: &mut ConnectionContext,
) -> std::io::Result<Option<BytesMut>>
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
        let missing = partial.as_ref().map(|partial| partial.missing);
        let outcome = match (missing, &context.slot) {
            (None, None) => timeout.read(stream, &mut buffer, shutdown.as_mut()).await?,
            (missing, slot) => {
                let (mut no_room, mut no_slot) = (pin!(context.receiving.evicted()), pin!(slot_evicted(slot.as_ref())));
                let interrupt = poll_fn(|cx| {
                    // Once a head is complete, its body is awaited even during a shutdown.
                    let is_over = missing != Some(RequestPart::Body) && shutdown.as_mut().poll(cx).is_ready();
                    if is_over || no_room.as_mut().poll(cx).is_ready() {
                        Poll::Ready(())
                    } else {
                        no_slot.as_mut().poll(cx)
                    }
                });
                timeout.read(stream, &mut buffer, pin!(interrupt)).await?
            }
        };
        let mut is_for_hyper = false;
        match (outcome, missing) {
            (ReadOutcome::Bytes, _) => {}
            // How to answer half a request is hyper's decision.
            (ReadOutcome::End, Some(_)) => is_for_hyper = true,
            (ReadOutcome::TimedOut, Some(missing)) => {
                is_last = true;
                responses.add(&timed_out(missing.timeout_message()), is_last, context);
            }
            (ReadOutcome::Interrupted, Some(_)) if context.receiving.is_evicted() => {}
            // Another connection waits for the slot.
            (ReadOutcome::Interrupted, _) if context.slot.as_ref().is_some_and(Reservation::is_evicted) => {
                return Ok(None);
            }
            (ReadOutcome::Interrupted, Some(_))
            | (ReadOutcome::End | ReadOutcome::TimedOut | ReadOutcome::Interrupted, None) => break,
        }
        let bytes_before = buffer.len();
        while outcome == ReadOutcome::Bytes && !buffer.is_empty() {
            let (request, plain) = match next_request(&buffer, partial.take(), idle) {
                NextRequest::Plain { body, authorization } => {
                    let authorization = authorization.map(|value| &buffer[value]);
                    match listener.filter(|(listener, peer)| listener.accepts_at_once(authorization, *peer)) {
                        Some((listener, _)) => (body, Some(listener)),
                        None => (0..body.end, None),
                    }
                }
                NextRequest::Complete(end) => (0..end, None),
                NextRequest::Partial(now) => {
                    partial = Some(now);
                    break;
                }
                NextRequest::Unknown => {
                    is_for_hyper = true;
                    break;
                }
            };
            if let Some(listener) = plain {
                let response = match listener.check_at_once(&buffer[request.clone()]).await {
                    Some(response) => {
                        buffer.advance(request.end);
                        response
                    }
                    None => {
                        let body = buffer.split_to(request.end).freeze().slice(request);
                        responses.send(stream, idle).await?;
                        // A large future, for which a connection that never waits has no room.
                        let waiting = Box::pin(wait(listener, body, stream, &mut buffer, context.slot.as_ref()));
                        let Some(response) = waiting.await else { return Ok(None) };
                        response
                    }
                };
                is_last = closes_after(context, stream, &mut buffer).await?;
                responses.add(&response, is_last, context);
            } else {
                let whole = buffer.split_to(request.end).freeze();
                let closes = closes_after(context, stream, &mut buffer).await?;
                responses.send(stream, idle).await?;
                // A large future, for which a connection that never needs it has no room.
                let exchanging = Box::pin(exchange(whole, stream, &mut buffer, closes, idle, context, handler));
                match exchanging.await? {
                    AfterExchange::KeepAlive => {}
                    AfterExchange::Close => is_last = true,
                    AfterExchange::Abandoned => return Ok(None),
                }
            }
            if is_last {
                break;
            }
            if responses.bytes.len() > RESPONSE_BYTES_MAX {
                responses.send(stream, idle).await?;
            }
        }
        shrink(&mut buffer, bytes_before);
        let is_held = match (is_last, is_for_hyper) {
            (true, _) => true,
            (false, true) => context.receiving.hold(buffer.len() + GENERAL_BYTES).await,
            (false, false) => {
                let of_body = partial.as_ref().filter(|partial| partial.missing == RequestPart::Body);
                let announced = of_body.map_or(0, |partial| partial.parse_at);
                context.receiving.hold_buffer(&mut buffer, announced).await
            }
        };
        if !is_held {
            is_last = true;
            responses.add(&evicted(), is_last, context);
        }
        if is_last {
            buffer = BytesMut::new();
            context.receiving.release();
        }
        responses.send(stream, idle).await?;
        if is_for_hyper && !is_last {
            return Ok(Some(buffer));
        }
    }
    close(stream, idle).await?;
    Ok(None)
}

/// Answers a check with `wait_ms` when there is room, or it is too late. `body` is that of the request.
///
/// Returns `None` if the client ends its direction of the connection before, or the connection breaks. The check is
/// then no longer in the queue.
///
/// Bytes that the client sends meanwhile are appended to `buffer`, up to about 32 KiB. `slot` is protected from eviction.
async fn wait<S>(
    listener: &HttpListener,
    body: Bytes,
    stream: &mut S,
    buffer: &mut BytesMut,
    slot: Option<&Reservation>,
) -> Option<Response<Bytes>>
where
    S: AsyncRead + Unpin,
{
    let _protected = Protected::new(slot);
    let mut response = pin!(listener.check(&body));
    poll_fn(|cx| match response.as_mut().poll(cx) {
        Poll::Ready(response) => Poll::Ready(Some(response)),
        Poll::Pending => poll_end(stream, cx, buffer).map(|_| None),
    })
    .await
}

/// Returns whether the next response must be the last one of its connection.
///
/// That is so if the instance drains or shuts down, and no further request has arrived.
///
/// `buffer` holds the bytes that were read beyond the present request. If it is empty while the instance drains,
/// appends what has arrived on `stream` to find out, without waiting.
///
/// # Errors
/// If the connection breaks.
async fn closes_after<S>(context: &ConnectionContext, stream: &mut S, buffer: &mut BytesMut) -> std::io::Result<bool>
where
    S: AsyncRead + Unpin,
{
    Ok(buffer.is_empty() && context.shutdown.is_draining() && !read_waiting(stream, buffer).await?)
}

/// A part of a request: the request line with all headers, or the body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RequestPart {
    Head,
    Body,
}

impl RequestPart {
    fn timeout_message(self) -> &'static str {
        match self {
            RequestPart::Head => "the request header did not arrive in time",
            RequestPart::Body => "the body did not arrive in time",
        }
    }
}

/// The result of [`next_request`]: the request at the beginning of a buffer.
#[derive(Debug)]
enum NextRequest {
    /// A complete plain check, with the ranges of its body and of the value of `authorization` in the buffer. The
    /// request ends where its body ends.
    Plain { body: Range<usize>, authorization: Option<Range<usize>> },
    /// Another complete request, with its length in bytes.
    Complete(usize),
    /// The beginning of a request that is not complete.
    Partial(PartialRequest),
    /// A request whose end is not looked for here: malformed, with `expect`, more than 64 headers or unusual framing, a
    /// head that is still incomplete at 64 KiB, or a body of more than 512 KiB.
    Unknown,
}

/// The state of a request that is not complete, kept until more bytes arrive.
#[derive(Debug)]
struct PartialRequest {
    /// The part of which bytes are missing. While it is the head, nothing is known about a body.
    missing: RequestPart,
    /// The time at which that part must be complete.
    deadline: Instant,
    /// The length of the buffer at the last call of [`next_request`].
    seen: usize,
    /// The head, once it is complete.
    head: Option<RequestHead>,
    /// The length that the buffer must reach before it is parsed again. Parsing a long head again for each of its bytes
    /// would cost more than answering it.
    parse_at: usize,
    /// The position of the first incomplete chunk of a chunked body.
    chunk_at: usize,
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
    let partial = |missing: RequestPart, head: Option<RequestHead>, parse_at: usize, chunk_at: usize| {
        let limit = if missing == RequestPart::Head { idle } else { BODY_TIMEOUT };
        let kept = before.as_ref().filter(|before| before.missing == missing).map(|before| before.deadline);
        let deadline = kept.unwrap_or_else(|| Instant::now() + limit);
        NextRequest::Partial(PartialRequest { missing, deadline, seen: buffer.len(), head, parse_at, chunk_at })
    };
    let known = before.as_ref().and_then(|before| before.head);
    let head = match known.map_or_else(|| RequestHead::parse(buffer), ParsedHead::Complete) {
        ParsedHead::Complete(head) => head,
        ParsedHead::Partial if buffer.len() < HEADER_BYTES_MAX => {
            return partial(RequestPart::Head, None, HEADER_BYTES_MAX.min(2 * buffer.len()), 0);
        }
        ParsedHead::Partial | ParsedHead::Unknown => return NextRequest::Unknown,
    };
    match head.length {
        BodyLength::Bytes(length) if length > BODY_BYTES_MAX => NextRequest::Unknown,
        BodyLength::Bytes(length) => match (head.body_at + length, head.is_plain) {
            (end, _) if end > buffer.len() => partial(RequestPart::Body, Some(head), end, 0),
            (end, true) => {
                let authorization = head.authorization.map(|(start, end)| start..end);
                NextRequest::Plain { body: head.body_at..end, authorization }
            }
            (end, false) => NextRequest::Complete(end),
        },
        BodyLength::Chunked => {
            let at = before.as_ref().map_or(head.body_at, |before| before.chunk_at.max(head.body_at));
            match ChunkedBody::find_end(buffer, at) {
                ChunkedBody::Complete(end) => NextRequest::Complete(end),
                ChunkedBody::Partial { at, until } if until - head.body_at <= BODY_BYTES_MAX => {
                    partial(RequestPart::Body, Some(head), until, at)
                }
                ChunkedBody::Partial { .. } | ChunkedBody::Unknown => NextRequest::Unknown,
            }
        }
    }
}

impl PartialRequest {
    /// Returns whether the missing part may be complete now, so that `buffer` has to be parsed.
    ///
    /// False means that it cannot be complete yet.
    fn may_be_complete(&self, buffer: &[u8]) -> bool {
        let has_head = || self.missing == RequestPart::Head && ends_head(&buffer[self.seen.saturating_sub(3)..]);
        buffer.len() >= self.parse_at || has_head()
    }
}

/// Returns whether the bytes contain an empty line, which ends a head.
fn ends_head(bytes: &[u8]) -> bool {
    memchr::memchr_iter(b'\n', bytes).any(|at| matches!(bytes[at + 1..], [b'\n', ..] | [b'\r', b'\n', ..]))
}

/// The facts about a request's head that the fast path needs.
#[derive(Clone, Copy, Debug)]
struct RequestHead {
    /// The position of the body in the buffer.
    body_at: usize,
    length: BodyLength,
    /// Whether this is a plain check.
    is_plain: bool,
    /// The start and the end of the value of `authorization`, if there is one.
    authorization: Option<(usize, usize)>,
}

#[derive(Clone, Copy, Debug)]
enum BodyLength {
    Bytes(usize),
    Chunked,
}

/// The result of [`RequestHead::parse`].
enum ParsedHead {
    Complete(RequestHead),
    Partial,
    /// Malformed, or with framing that is left to hyper.
    Unknown,
}

impl RequestHead {
    fn parse(buffer: &[u8]) -> ParsedHead {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut headers);
        let body_at = match request.parse(buffer) {
            Ok(httparse::Status::Complete(head)) => head,
            Ok(httparse::Status::Partial) => return ParsedHead::Partial,
            Err(_) => return ParsedHead::Unknown,
        };
        let is_latest = request.version == Some(1);
        let mut is_plain = is_latest && (request.method, request.path) == (Some("POST"), Some("/v1/check"));
        let (mut length, mut is_chunked, mut authorization) = (None, false, None);
        for header in request.headers {
            let is = |name: &str| header.name.eq_ignore_ascii_case(name);
            if is("content-length") {
                let Some(given) = plain_number(header.value) else { return ParsedHead::Unknown };
                if length.replace(given).is_some() {
                    return ParsedHead::Unknown;
                }
            } else if is("transfer-encoding") {
                if is_chunked || !is_latest || !header.value.eq_ignore_ascii_case(b"chunked") {
                    return ParsedHead::Unknown;
                }
                is_chunked = true;
            } else if is("expect") {
                return ParsedHead::Unknown;
            } else if is("authorization") {
                let start = header.value.as_ptr().addr() - buffer.as_ptr().addr();
                is_plain &= authorization.replace((start, start + header.value.len())).is_none();
            } else if is("origin") || is("sec-fetch-site") {
                // Whether a web page may send this request is decided on the general path.
                is_plain = false;
            } else if is("upgrade") || is("connection") && !header.value.eq_ignore_ascii_case(b"keep-alive") {
                is_plain = false;
            }
        }
        is_plain = is_plain && length.is_some();
        let length = match (length, is_chunked) {
            (Some(_), true) => return ParsedHead::Unknown,
            (None, true) => BodyLength::Chunked,
            (length, false) => BodyLength::Bytes(length.unwrap_or(0)),
        };
        ParsedHead::Complete(RequestHead { body_at, length, is_plain, authorization })
    }
}

/// Returns the range of the body of the first request in `buffer`, or `None` if it is not a plain check.
///
/// The head must be complete, else the result is `None`.
///
/// The body need not be complete, so the range may end beyond the buffer. The request ends where its body ends.
pub(super) fn plain_check(buffer: &[u8]) -> Option<Range<usize>> {
    match RequestHead::parse(buffer) {
        ParsedHead::Complete(RequestHead { body_at, length: BodyLength::Bytes(length), is_plain: true, .. }) => {
            Some(body_at..body_at + length)
        }
        ParsedHead::Complete(_) | ParsedHead::Partial | ParsedHead::Unknown => None,
    }
}

/// The result of [`ChunkedBody::find_end`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ChunkedBody {
    /// The body ends at this position.
    Complete(usize),
    /// The chunk that begins at position `at` is incomplete while the buffer is shorter than `until`.
    Partial { at: usize, until: usize },
    /// The body has extensions or trailers, or is malformed: left to hyper.
    Unknown,
}

impl ChunkedBody {
    /// Finds the end of a chunked body. `at` is the position in `buffer` of its first chunk, or of a later one.
    ///
    /// Chunks before `at` are not examined again. Panics if `at` is beyond the buffer.
    fn find_end(buffer: &[u8], mut at: usize) -> ChunkedBody {
        loop {
            let rest = &buffer[at..];
            let digits = rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
            let size = std::str::from_utf8(&rest[..digits]).ok().and_then(|text| u32::from_str_radix(text, 16).ok());
            let more = ChunkedBody::Partial { at, until: buffer.len() + 1 };
            let size = match (&rest[digits..], size) {
                ([] | [b'\r'], size) => {
                    let is_valid = size.is_some() || rest.is_empty();
                    return if is_valid && digits <= 8 { more } else { ChunkedBody::Unknown };
                }
                ([b'\r', b'\n', ..], Some(size)) => size as usize,
                _ => return ChunkedBody::Unknown,
            };
            let end = at + digits + 2 + size + 2;
            match buffer.get(end - 2..end) {
                None => return ChunkedBody::Partial { at, until: end },
                Some(b"\r\n") if size == 0 => return ChunkedBody::Complete(end),
                Some(b"\r\n") => at = end,
                Some(_) => return ChunkedBody::Unknown,
            }
        }
    }
}

/// Parses a number of one to six decimal digits. Returns `None` for anything else, such as a sign or a space.
fn plain_number(text: &[u8]) -> Option<usize> {
    let digit = |value: usize, byte: &u8| byte.is_ascii_digit().then(|| value * 10 + usize::from(byte - b'0'));
    (1..=6).contains(&text.len()).then(|| text.iter().try_fold(0, digit))?
}

/// Responses that are collected to be written together, and the text of their `date` header.
#[derive(Default)]
struct ResponseBuffer {
    bytes: Vec<u8>,
    /// The Unix second of `date`.
    second: u64,
    date: String,
}

impl ResponseBuffer {
    /// Appends a response, with `content-length` of its body and the current `date`. `is_last` adds
    /// `connection: close`.
    ///
    /// Counts an error response for the listener of `context`. Nothing is sent before [`send`](Self::send).
    fn add(&mut self, response: &Response<Bytes>, is_last: bool, context: &ConnectionContext) {
        self.update_date();
        let (status, body) = (response.status(), response.body());
        context.stats.errors.count_http(status);
        self.text("HTTP/1.1 ").text(status.as_str());
        self.text(" ").text(status.canonical_reason().unwrap_or_default()).text("\r\n");
        for (name, value) in response.headers().iter().filter(|(name, _)| *name != CONTENT_LENGTH) {
            self.text(name.as_str()).text(": ");
            self.bytes.extend_from_slice(value.as_bytes());
            self.text("\r\n");
        }
        if is_last {
            self.text("connection: close\r\n");
        }
        self.text("content-length: ").text(itoa::Buffer::new().format(body.len()));
        self.text("\r\ndate: ");
        self.bytes.extend_from_slice(self.date.as_bytes());
        self.text("\r\n\r\n");
        self.bytes.extend_from_slice(body);
    }

    /// Formats `date` again if the wall clock has reached another second.
    #[allow(clippy::disallowed_methods)] // the header shows the wall clock, and nothing is decided by it
    fn update_date(&mut self) {
        let now = SystemTime::now();
        let second = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if second != self.second || self.date.is_empty() {
            self.second = second;
            self.date = HttpDate::from(now).to_string();
        }
    }

    /// Writes the collected responses, if there are any, and empties the buffer.
    ///
    /// Fails with `TimedOut` if the client does not accept them within `limit`, or with the error of the stream. The
    /// connection must not be used afterwards: some bytes may have been sent, and the buffer is not emptied.
    async fn send<S: AsyncWrite + Unpin>(&mut self, stream: &mut S, limit: Duration) -> std::io::Result<()> {
        if !self.bytes.is_empty() {
            send(stream, &self.bytes, limit).await?;
            self.bytes.clear();
            self.bytes.shrink_to(KEPT_BYTES_MAX);
        }
        Ok(())
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.bytes.extend_from_slice(text.as_bytes());
        self
    }
}

#[cfg(test)]
mod tests;
