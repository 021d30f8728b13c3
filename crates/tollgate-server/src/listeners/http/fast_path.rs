//! The short way for the usual question.
//!
//! Nearly all requests of this door are alike: `POST /v1/check` with a few headers and a small body, all of it in one packet or two,
//! asked again and again on one connection. Of each of them a general HTTP server makes a map of headers, a stream of the
//! body, a timer and a few tasks in between, which together cost more than the decision. The short way reads such a request where it
//! lies in the buffer and writes the answer behind the last one.
//!
//! ```text
//!   read ─▶ is the first request whole? ─ yes ─▶ is it usual? ─ yes ─▶ decide ─▶ write ─▶ read …
//!             │ not yet ─▶ read …                    └ no ─▶ hyper answers it ─▶ write ─▶ read …
//!             └ cannot be told ─▶ hyper, which gets what was read, and the connection until it ends
//! ```
//!
//! **Usual** is what needs no judgement: HTTP/1.1, exactly this method and path, one plain `content-length`,
//! and no header that says how to go on, except to keep the connection. Whatever is not is not refused here but left to
//! [hyper](super::general), untouched: other paths and versions, chunks, nonsense. So there is one place that
//! understands HTTP, and this is not it; this one only knows a single form when it sees it, and where a request of a plain form ends.
//!
//! **Not yet whole.** hyper costs a connection some 16 KiB and as much time as several answers. A client that has
//! sent half a head, or a head and half of a body, has not earned that: its bytes wait here, in a buffer
//! that grows with what came, until the request is whole, late, or too long. From 4 KiB on they
//! count towards what the listener [may hold](crate::budget) of all unfinished requests.

use std::future::poll_fn;
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

use super::connection::{BODY_WITHIN, HEADER_BYTES_MAX, evicted, late};
use super::general::{GENERAL_BYTES, RequestBody, exchange};
use super::{BODY_BYTES_MAX, HttpListener};
use crate::accept::Context;
use crate::budget::Reservation;
use crate::listeners::{IdleTimeout, KEPT_BYTES_MAX, ReadOutcome, finish, read_waiting, send, shrink, until_end};

/// A request with more headers is left to hyper on its connection.
const HEADERS_MAX: usize = 64;
/// Answers are written out when there are this many bytes of them.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// Serves a connection for as long as it can be told where its requests end: usual ones by `door`, others by `answer`. What was read of
/// one whose end cannot be told goes to the caller, with the
/// connection; nothing if the client has left, was silent for too long, was told that the doors are about to close, or they close.
pub(super) async fn serve<S, A, F>(
    door: Option<&HttpListener>,
    answer: &A,
    stream: &mut S,
    idle: Duration,
    context: &mut Context,
) -> std::io::Result<Option<BytesMut>>
where
    S: AsyncRead + AsyncWrite + Unpin,
    A: Fn(Request<RequestBody>) -> F,
    F: Future<Output = Response<Bytes>>,
{
    let mut last_call = pin!(context.closing.clone().last_call());
    let mut patience = IdleTimeout::new(idle);
    let mut buffer = BytesMut::new();
    let mut answers = Answers::default();
    let mut unfinished: Option<Unfinished> = None;
    let mut is_last = false;
    while !is_last {
        patience.until(unfinished.as_ref().map(|unfinished| unfinished.deadline));
        let part = unfinished.as_ref().map(|unfinished| unfinished.part);
        let heard = match (part, &context.place) {
            (None, None) => patience.read(stream, &mut buffer, last_call.as_mut()).await?,
            (part, place) => {
                let (mut no_room, mut no_place) =
                    (pin!(context.receiving.evicted()), pin!(evicted_from(place.as_ref())));
                let interrupt = poll_fn(|cx| {
                    // Once a head is whole, its body is waited for though the doors close.
                    let is_over = part != Some(Part::Body) && last_call.as_mut().poll(cx).is_ready();
                    match is_over || no_room.as_mut().poll(cx).is_ready() {
                        true => Poll::Ready(()),
                        false => no_place.as_mut().poll(cx),
                    }
                });
                patience.read(stream, &mut buffer, pin!(interrupt)).await?
            }
        };
        let mut is_for_hyper = false;
        match (heard, part) {
            (ReadOutcome::Bytes, _) => {}
            // An end in the middle of a request is for hyper to judge.
            (ReadOutcome::End, Some(_)) => is_for_hyper = true,
            (ReadOutcome::Late, Some(part)) => {
                is_last = true;
                answers.add(&late(part.late()), is_last);
            }
            (ReadOutcome::Interrupted, Some(_)) if context.receiving.is_evicted() => {}
            // Another connection waits for the place.
            (ReadOutcome::Interrupted, _) if context.place.as_ref().is_some_and(Reservation::is_evicted) => {
                return Ok(None);
            }
            (ReadOutcome::Interrupted, Some(_))
            | (ReadOutcome::End | ReadOutcome::Late | ReadOutcome::Interrupted, None) => break,
        }
        let bytes_before = buffer.len();
        while heard == ReadOutcome::Bytes && !buffer.is_empty() {
            let request = match next(&buffer, unfinished.take(), idle) {
                Next::Usual(body) => body,
                Next::Plain(end) => 0..end,
                Next::Unfinished(now) => {
                    unfinished = Some(now);
                    break;
                }
                Next::Other => {
                    is_for_hyper = true;
                    break;
                }
            };
            if let Some(door) = door.filter(|_| request.start > 0) {
                let response = door.check(&buffer[request.clone()]).await;
                buffer.advance(request.end);
                is_last = is_leaving(context, stream, &mut buffer).await?;
                answers.add(&response, is_last);
            } else {
                let whole = buffer.split_to(request.end).freeze();
                let closes = is_leaving(context, stream, &mut buffer).await?;
                // A large future, for which a connection that stays with the usual needs no room.
                let exchanging = Box::pin(exchange(whole, closes, idle, context, answer));
                let (bytes, was_last) = tokio::select! {
                    biased;
                    exchanged = exchanging => exchanged,
                    () = until_end(stream, &mut buffer) => return Ok(None),
                };
                answers.bytes.extend_from_slice(&bytes);
                is_last = was_last;
            }
            if is_last {
                break;
            }
            if answers.bytes.len() > ANSWER_BYTES_MAX {
                send(stream, &answers.bytes, idle).await?;
                answers.clear();
            }
        }
        shrink(&mut buffer, bytes_before);
        let is_held = match (is_last, is_for_hyper) {
            (true, _) => true,
            (false, true) => context.receiving.hold(buffer.len() + GENERAL_BYTES).await,
            (false, false) => {
                let body_ends = unfinished.as_ref().filter(|unfinished| unfinished.part == Part::Body);
                let announced = body_ends.map_or(0, |unfinished| unfinished.look_at);
                context.receiving.hold_buffer(&mut buffer, announced).await
            }
        };
        if !is_held {
            is_last = true;
            answers.add(&evicted(), is_last);
        }
        if is_last {
            buffer = BytesMut::new();
            context.receiving.release();
        }
        if !answers.bytes.is_empty() {
            send(stream, &answers.bytes, idle).await?;
            answers.clear();
        }
        if is_for_hyper && !is_last {
            return Ok(Some(buffer));
        }
    }
    finish(stream, idle).await?;
    Ok(None)
}

/// Returns whether the next answer is to be the last, because the doors are about to close: what was asked together is answered whole.
async fn is_leaving<S>(context: &Context, stream: &mut S, buffer: &mut BytesMut) -> std::io::Result<bool>
where
    S: AsyncRead + Unpin,
{
    Ok(buffer.is_empty() && context.closing.is_leaving() && !read_waiting(stream, buffer).await?)
}

async fn evicted_from(place: Option<&Reservation>) {
    match place {
        Some(place) => place.evicted().await,
        None => std::future::pending().await,
    }
}

/// What is missing of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Head,
    Body,
}

impl Part {
    fn late(self) -> &'static str {
        match self {
            Part::Head => "the request's head did not come in time",
            Part::Body => "the body did not come in time",
        }
    }
}

/// What a buffer begins with.
#[derive(Debug)]
enum Next {
    /// A whole request that is usual, and where its body is. The request ends with it.
    Usual(Range<usize>),
    /// Another whole request, which ends there.
    Plain(usize),
    /// A part of a request that may become one of these.
    Unfinished(Unfinished),
    /// Anything else.
    Other,
}

#[derive(Debug)]
struct Unfinished {
    part: Part,
    deadline: Instant,
    /// How much there was.
    seen: usize,
    /// Once the head is there, what it says.
    head: Option<Head>,
    /// When there is so much, the part may be whole. To parse a long head again for each of its bytes would cost more than to answer it.
    look_at: usize,
    /// Where the first chunk begins that is not whole.
    chunk_at: usize,
}

/// Looks at what a buffer begins with, of which `before` is known.
fn next(buffer: &[u8], before: Option<Unfinished>, idle: Duration) -> Next {
    if let Some(before) = before.as_ref().filter(|before| !before.may_be_whole(buffer)) {
        return Next::Unfinished(Unfinished { seen: buffer.len(), ..*before });
    }
    let unfinished = |part: Part, head: Option<Head>, look_at: usize, chunk_at: usize| {
        let kept = before.as_ref().filter(|before| before.part == part).map(|before| before.deadline);
        let deadline = kept.unwrap_or_else(|| Instant::now() + if part == Part::Head { idle } else { BODY_WITHIN });
        Next::Unfinished(Unfinished { part, deadline, seen: buffer.len(), head, look_at, chunk_at })
    };
    let head = match before.as_ref().and_then(|before| before.head).map_or_else(|| Head::parse(buffer), Parsed::Head) {
        Parsed::Head(head) => head,
        Parsed::Partial if buffer.len() < HEADER_BYTES_MAX => {
            return unfinished(Part::Head, None, HEADER_BYTES_MAX.min(2 * buffer.len()), 0);
        }
        Parsed::Partial | Parsed::Other => return Next::Other,
    };
    match head.length {
        Length::Bytes(length) if length > BODY_BYTES_MAX => Next::Other,
        Length::Bytes(length) => match (head.body_at + length, head.is_usual) {
            (end, _) if end > buffer.len() => unfinished(Part::Body, Some(head), end, 0),
            (end, true) => Next::Usual(head.body_at..end),
            (end, false) => Next::Plain(end),
        },
        Length::Chunks => {
            let at = before.as_ref().map_or(head.body_at, |before| before.chunk_at.max(head.body_at));
            match Chunks::of(buffer, at) {
                Chunks::Whole(end) => Next::Plain(end),
                Chunks::Partial { at, until } if until - head.body_at <= BODY_BYTES_MAX => {
                    unfinished(Part::Body, Some(head), until, at)
                }
                Chunks::Partial { .. } | Chunks::Other => Next::Other,
            }
        }
    }
}

impl Unfinished {
    /// Returns false if what came since cannot have made the part whole.
    fn may_be_whole(&self, buffer: &[u8]) -> bool {
        buffer.len() >= self.look_at || self.part == Part::Head && ends_head(&buffer[self.seen.saturating_sub(3)..])
    }
}

/// Returns whether there is an empty line.
fn ends_head(bytes: &[u8]) -> bool {
    memchr::memchr_iter(b'\n', bytes).any(|at| matches!(bytes[at + 1..], [b'\n', ..] | [b'\r', b'\n', ..]))
}

/// Where the body of a request is.
#[derive(Clone, Copy, Debug)]
struct Head {
    body_at: usize,
    length: Length,
    is_usual: bool,
}

#[derive(Clone, Copy, Debug)]
enum Length {
    Bytes(usize),
    Chunks,
}

/// What came of parsing a head.
enum Parsed {
    Head(Head),
    Partial,
    Other,
}

impl Head {
    fn parse(buffer: &[u8]) -> Parsed {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut headers);
        let body_at = match request.parse(buffer) {
            Ok(httparse::Status::Complete(head)) => head,
            Ok(httparse::Status::Partial) => return Parsed::Partial,
            Err(_) => return Parsed::Other,
        };
        let is_latest = request.version == Some(1);
        let mut is_usual = is_latest && (request.method, request.path) == (Some("POST"), Some("/v1/check"));
        let (mut length, mut is_chunked) = (None, false);
        for header in request.headers {
            let is = |name: &str| header.name.eq_ignore_ascii_case(name);
            if is("content-length") {
                let Some(given) = plain_number(header.value) else { return Parsed::Other };
                if length.replace(given).is_some() {
                    return Parsed::Other;
                }
            } else if is("transfer-encoding") {
                if is_chunked || !is_latest || !header.value.eq_ignore_ascii_case(b"chunked") {
                    return Parsed::Other;
                }
                is_chunked = true;
            } else if is("expect") {
                return Parsed::Other;
            } else if is("origin") || is("sec-fetch-site") {
                // Whether a web page may send this request is decided in one place, on the general path.
                is_usual = false;
            } else if is("upgrade") || is("connection") && !header.value.eq_ignore_ascii_case(b"keep-alive") {
                is_usual = false;
            }
        }
        is_usual = is_usual && length.is_some();
        let length = match (length, is_chunked) {
            (Some(_), true) => return Parsed::Other,
            (None, true) => Length::Chunks,
            (length, false) => Length::Bytes(length.unwrap_or(0)),
        };
        Parsed::Head(Head { body_at, length, is_usual })
    }
}

/// Where the body of the first request is or will be, if that is usual. The request ends with it.
pub(super) fn usual(buffer: &[u8]) -> Option<Range<usize>> {
    match Head::parse(buffer) {
        Parsed::Head(Head { body_at, length: Length::Bytes(length), is_usual: true }) => {
            Some(body_at..body_at + length)
        }
        Parsed::Head(_) | Parsed::Partial | Parsed::Other => None,
    }
}

/// How far a body in chunks has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Chunks {
    /// It ends there.
    Whole(usize),
    /// The chunk that begins at `at` is not whole before `until`.
    Partial { at: usize, until: usize },
    /// It has extensions or trailers, or makes no sense: hyper knows.
    Other,
}

impl Chunks {
    /// Looks at the chunks from `at` on, where one begins.
    fn of(buffer: &[u8], mut at: usize) -> Chunks {
        loop {
            let rest = &buffer[at..];
            let digits = rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
            let size = std::str::from_utf8(&rest[..digits]).ok().and_then(|text| u32::from_str_radix(text, 16).ok());
            let more = Chunks::Partial { at, until: buffer.len() + 1 };
            let size = match (&rest[digits..], size) {
                ([] | [b'\r'], size) => {
                    let is_sound = size.is_some() || rest.is_empty();
                    return if is_sound && digits <= 8 { more } else { Chunks::Other };
                }
                ([b'\r', b'\n', ..], Some(size)) => size as usize,
                _ => return Chunks::Other,
            };
            let end = at + digits + 2 + size + 2;
            match buffer.get(end - 2..end) {
                None => return Chunks::Partial { at, until: end },
                Some(b"\r\n") if size == 0 => return Chunks::Whole(end),
                Some(b"\r\n") => at = end,
                Some(_) => return Chunks::Other,
            }
        }
    }
}

/// A few digits and nothing else.
fn plain_number(text: &[u8]) -> Option<usize> {
    let digit = |value: usize, byte: &u8| byte.is_ascii_digit().then(|| value * 10 + usize::from(byte - b'0'));
    (1..=6).contains(&text.len()).then(|| text.iter().try_fold(0, digit))?
}

/// Answers on their way to one client.
#[derive(Default)]
struct Answers {
    bytes: Vec<u8>,
    /// The second that `date` tells.
    second: u64,
    date: String,
}

impl Answers {
    fn add(&mut self, response: &Response<Bytes>, is_last: bool) {
        self.keep_date();
        let (status, body) = (response.status(), response.body());
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

    /// A date is a second old at most.
    #[allow(clippy::disallowed_methods)] // what the wall clock says is what is told, and nothing is decided by it
    fn keep_date(&mut self) {
        let now = SystemTime::now();
        let second = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if second != self.second || self.date.is_empty() {
            self.second = second;
            self.date = HttpDate::from(now).to_string();
        }
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_BYTES_MAX);
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.bytes.extend_from_slice(text.as_bytes());
        self
    }
}

#[cfg(test)]
mod tests;
