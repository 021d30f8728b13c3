//! The fast path for plain checks.
//!
//! Nearly all requests of the HTTP listener are alike: `POST /v1/check` with a few headers and a small body, all of it
//! in one packet or two, sent again and again on one connection. For each of them a general HTTP server builds a map of
//! headers, a stream for the body and a few tasks in between, which together cost more than the decision. The fast path
//! reads such a request where it lies in the buffer and appends the response to the previous one. An explicit check in
//! memory takes 30,000 instructions instead of 53,000, from its first byte to the last one of its response (callgrind,
//! profile `dev`), with and without a token.
//!
//! **Plain** is a request that needs no interpretation: HTTP/1.1, exactly this method and path, one plain
//! `content-length`, and no header about the connection except to keep it open. If the listener has a token, also one
//! `authorization` with the token, of an address that has not guessed wrongly too often. All others are not rejected here but
//! left to [hyper](super::general), unchanged: other paths and versions, chunked bodies, malformed requests. So one
//! place implements HTTP, and this is not it; the fast path only recognises a single form.
//!
//! **Waits.** A check with `wait_ms` may be answered a minute later. Meanwhile the stream is read, because a client that
//! disconnects must leave the queue at once: the check behind it is the next to be admitted.
//! hyper would hold its buffers for the whole wait: a plain check takes 3 KB while it waits, any other 25 KB.
//!
//! `tests.rs` compares the responses of both paths byte by byte, with and without rules and a token.

use std::future::poll_fn;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use http::Response;
use http::header::CONTENT_LENGTH;
use httpdate::HttpDate;
use tokio::io::{AsyncRead, AsyncWrite};

use super::general::Protected;
use super::{BODY_BYTES_MAX, HttpListener};
use crate::budget::Reservation;
use crate::listener::ConnectionContext;
use crate::listeners::io::{KEPT_BYTES_MAX, poll_end, send};

/// The most headers of a request. hyper rejects more.
const HEADERS_MAX: usize = 100;

/// The result of [`RequestHead::parse`].
pub(super) enum ParsedHead {
    Complete(RequestHead),
    Partial,
    /// Not the head of a request, or one with more than 100 headers.
    Malformed,
}

/// The facts about the request at the beginning of a buffer that are needed before hyper reads it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestHead {
    /// The position of the body in the buffer.
    pub(super) body_at: usize,
    /// The position at which the request ends, which may be beyond the buffer. Equal to `body_at` if hyper is to find the
    /// end of the body: of one that is chunked, has more than 512 KiB, or is sent only when it is expected.
    pub(super) end: usize,
    /// Whether this is a plain check.
    pub(super) is_plain: bool,
    /// The start and the end of the value of `authorization`, if there is one.
    authorization: Option<(usize, usize)>,
}

impl RequestHead {
    /// Parses the head at the beginning of `buffer`.
    pub(super) fn parse(buffer: &[u8]) -> ParsedHead {
        let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut []);
        let body_at = match request.parse_with_uninit_headers(buffer, &mut headers) {
            Ok(httparse::Status::Complete(head)) => head,
            Ok(httparse::Status::Partial) => return ParsedHead::Partial,
            Err(_) => return ParsedHead::Malformed,
        };
        let mut is_plain =
            (request.method, request.path, request.version) == (Some("POST"), Some("/v1/check"), Some(1));
        let (mut length, mut has_known_end, mut authorization) = (None, true, None);
        for header in request.headers.iter() {
            let is = |name: &str| header.name.eq_ignore_ascii_case(name);
            if is("content-length") {
                has_known_end &= length.replace(plain_number(header.value)).is_none();
            } else if is("transfer-encoding") || is("expect") {
                has_known_end = false;
            } else if is("authorization") {
                let start = header.value.as_ptr().addr() - buffer.as_ptr().addr();
                is_plain &= authorization.replace((start, start + header.value.len())).is_none();
            } else if is("connection") {
                is_plain &= header.value.eq_ignore_ascii_case(b"keep-alive");
            } else if is("origin") || is("sec-fetch-site") || is("upgrade") {
                // Whether a web page may send this request is decided on the general path.
                is_plain = false;
            }
        }
        let length = length.flatten().filter(|length| has_known_end && *length <= BODY_BYTES_MAX);
        let end = body_at + length.unwrap_or(0);
        ParsedHead::Complete(RequestHead { body_at, end, is_plain: is_plain && length.is_some(), authorization })
    }
}

/// Answers the plain checks of one client.
#[derive(Clone, Copy)]
pub(crate) struct PlainChecks<'l> {
    pub(super) listener: &'l HttpListener,
    /// The address of the client.
    pub(super) peer: IpAddr,
}

impl PlainChecks<'_> {
    /// Returns whether the check at the beginning of `buffer` may be answered here: it needs no rejection and no delay.
    pub(super) fn accept(self, head: &RequestHead, buffer: &[u8]) -> bool {
        let authorization = head.authorization.map(|(start, end)| &buffer[start..end]);
        self.listener.accepts_at_once(authorization, self.peer)
    }

    /// Answers the complete check at the beginning of `buffer`. Returns `None` if it has `wait_ms`.
    pub(super) async fn answer_at_once(self, head: &RequestHead, buffer: &[u8]) -> Option<Response<Bytes>> {
        self.listener.check_at_once(&buffer[head.body_at..head.end]).await
    }

    /// Answers a check with `wait_ms` when there is room, or it is too late. `body` is that of the request.
    ///
    /// Returns `None` if the client ends its direction of the connection before, or the connection breaks. The check is
    /// then no longer in the queue.
    ///
    /// Bytes that the client sends meanwhile are appended to `buffer`, up to about 32 KiB. `slot` is protected from
    /// eviction.
    pub(super) async fn wait<S>(
        self,
        body: Bytes,
        stream: &mut S,
        buffer: &mut BytesMut,
        slot: Option<&Reservation>,
    ) -> Option<Response<Bytes>>
    where
        S: AsyncRead + Unpin,
    {
        let _protected = Protected::new(slot);
        let mut response = pin!(self.listener.check(&body));
        poll_fn(|cx| match response.as_mut().poll(cx) {
            Poll::Ready(response) => Poll::Ready(Some(response)),
            Poll::Pending => poll_end(stream, cx, buffer).map(|_| None),
        })
        .await
    }
}

/// Parses a number of one to six decimal digits. Returns `None` for anything else, such as a sign or a space.
fn plain_number(text: &[u8]) -> Option<usize> {
    let digit = |value: usize, byte: &u8| byte.is_ascii_digit().then(|| value * 10 + usize::from(byte - b'0'));
    (1..=6).contains(&text.len()).then(|| text.iter().try_fold(0, digit))?
}

/// Responses that are collected to be written together, and the text of their `date` header.
#[derive(Default)]
pub(super) struct ResponseBuffer {
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
    pub(super) fn add(&mut self, response: &Response<Bytes>, is_last: bool, context: &ConnectionContext) {
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

    /// Returns the number of bytes that were collected.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
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
    pub(super) async fn send<S: AsyncWrite + Unpin>(&mut self, stream: &mut S, limit: Duration) -> std::io::Result<()> {
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
