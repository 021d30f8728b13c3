//! The short way for the usual question.
//!
//! Nearly all requests of this door are alike: `POST /v1/check` with a few headers and a small body, all of it in one packet or two,
//! asked again and again on one connection. Of each of them a general HTTP server makes a map of headers, a stream of the
//! body, a timer and a few tasks in between, which together cost more than the decision. The short way reads such a request where it
//! lies in the buffer and writes the answer behind the last one.
//!
//! ```text
//!   read ─▶ is all that came usual? ── yes ──▶ decide ─▶ write ─▶ read …
//!                     │ no
//!                     ▼
//!                   hyper, which gets what was read, and the connection until it ends
//! ```
//!
//! **Usual** is what needs no judgement: HTTP/1.1, exactly this method and path, one plain `content-length`, the whole body there
//! already or right behind its head, and no header that says how to go on, except to keep the connection. Whatever is not is not refused here but left to
//! hyper, untouched: other paths and versions, chunks, a body that comes later, a half request, nonsense. So there is one place that
//! understands HTTP, and this is not it; this one only knows a single form when it sees it.

use std::ops::Range;
use std::pin::pin;
use std::time::{Duration, SystemTime};

use bytes::{Buf, Bytes, BytesMut};
use http::Response;
use http::header::CONTENT_LENGTH;
use httpdate::HttpDate;
use tokio::io::{AsyncRead, AsyncWrite};

use super::HttpDoor;
use crate::accept::Closing;
use crate::doors::{Patience, part, send, within};
use crate::stream::UntilClosing;

/// What is read at once; a longer request is not usual.
const READ_BYTES: usize = 8 * 1024;
/// How long a body may take that does not come with its head.
const BODY_SOON: Duration = Duration::from_secs(1);
/// A request with more headers is not usual.
const HEADERS_MAX: usize = 32;

/// Serves a connection for as long as its requests are usual. What was read of one that is not goes to the caller, with the
/// connection; nothing if the client has left, was silent for too long, was told that the doors are about to close, or they close.
pub(super) async fn serve<S>(
    door: &HttpDoor,
    stream: &mut S,
    idle: Duration,
    closing: &Closing,
) -> std::io::Result<Option<BytesMut>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let begun = pin!(closing.clone().begun());
    let mut stream = UntilClosing::new(stream, begun);
    let mut patience = Patience::new(idle);
    let mut buffer = BytesMut::with_capacity(READ_BYTES);
    let mut answers = Answers::default();
    let mut is_last = false;
    while patience.hear(&mut stream, &mut buffer).await? {
        if is_parted(&buffer) {
            buffer.reserve(READ_BYTES);
            // A body that did not come, because it takes longer or the doors close, is not usual.
            if let Ok(heard) = within(BODY_SOON, patience.hear(&mut stream, &mut buffer)).await {
                heard?;
            }
        }
        while let Some(body) = usual(&buffer).filter(|body| body.end <= buffer.len()) {
            let response = door.check(&buffer[body.clone()]).await;
            buffer.advance(body.end);
            // What was asked together is answered whole.
            is_last = buffer.is_empty() && closing.is_leaving();
            answers.add(&response, is_last);
        }
        if !answers.bytes.is_empty() {
            send(&mut stream, &answers.bytes, idle).await?;
            answers.bytes.clear();
        }
        if !buffer.is_empty() {
            return Ok(Some(buffer));
        }
        if is_last {
            break;
        }
        buffer.reserve(READ_BYTES);
    }
    part(&mut stream, idle).await?;
    Ok(None)
}

/// Whether this is the head of a usual request and nothing else: many clients send the body by itself, right behind it.
fn is_parted(buffer: &[u8]) -> bool {
    // Mostly a body ends it, and nothing has to be parsed to see that.
    let is_head = |body: Range<usize>| body.start == buffer.len() && (1..READ_BYTES).contains(&body.len());
    buffer.ends_with(b"\r\n\r\n") && usual(buffer).is_some_and(is_head)
}

/// Where the body of the first request is or will be, if that is usual. The request ends with it.
pub(super) fn usual(buffer: &[u8]) -> Option<Range<usize>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let Ok(httparse::Status::Complete(head)) = request.parse(buffer) else { return None };
    if (request.method, request.path, request.version) != (Some("POST"), Some("/v1/check"), Some(1)) {
        return None;
    }
    let mut length = None;
    for header in request.headers {
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        let is_kept = || header.value.eq_ignore_ascii_case(b"keep-alive");
        if is("content-length") {
            if length.replace(plain_number(header.value)?).is_some() {
                return None;
            }
        } else if is("origin") || is("sec-fetch-site") {
            // Whether a web page may ask is judged in one place.
            return None;
        } else if is("transfer-encoding") || is("expect") || is("upgrade") || is("connection") && !is_kept() {
            return None;
        }
    }
    Some(head..head + length?)
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

    fn text(&mut self, text: &str) -> &mut Self {
        self.bytes.extend_from_slice(text.as_bytes());
        self
    }
}

#[cfg(test)]
mod tests;
