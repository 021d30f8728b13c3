//! hyper answers one request of a connection.
//!
//! hyper takes some 16 KiB for a connection, whether a request is under way or not. So it gets the connection when the
//! head of a request is complete, and is dropped when that request is answered: ten thousand silent connections cost ten
//! thousand small buffers.
//!
//! **The end of a request.** hyper reads from its connection as much as there is, also of the next request, and does not
//! give that back. So it gets the bytes of one request only ([`Supply`]): the head, which has been found already, and
//! of the body as many bytes as hyper itself says that the body has. A chunked body is passed on line by line: hyper
//! reads more only when it has consumed a line, and the body ends with one. So no second parser decides where a body
//! ends.
//!
//! Whether the connection continues after a request is hyper's decision: it does if hyper would read another request.
//!
//! Response bodies are streams. hyper writes to the connection directly, so a body is sent as it is produced, and a
//! client that reads slowly slows down its producer. A connection whose slot is needed by another can be evicted once
//! its response has begun, so that long streams cannot use up the slots of the admin listener.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::header::CONNECTION;
use http::{HeaderValue, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::connection::HEADER_BYTES_MAX;
use crate::budget::{Receiving, Reservation};
use crate::listener::{BoxError, ConnectionContext};
use crate::listeners::io::{poll_end, poll_read, read_waiting};
use crate::metrics::ListenerStats;
use crate::stream::WriteTimeout;

/// What hyper holds for a connection besides what it has read: two buffers of 8 KiB, and the state of a request.
const GENERAL_BYTES: usize = 32 * 1024;

/// The body of a response: complete, or a stream of frames.
pub(crate) type ResponseBody = UnsyncBoxBody<Bytes, BoxError>;

/// Returns a response body that consists of `bytes`.
pub(crate) fn full_body(bytes: Bytes) -> ResponseBody {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// Counts the response that hyper itself sends to a malformed request. Does nothing for any other error.
pub(crate) fn count_malformed(stats: &ListenerStats, error: &hyper::Error) {
    if error.is_parse() && !error.is_parse_version_h2() {
        stats.errors.count(if error.is_parse_too_large() { "431" } else { "400" });
    }
}

/// The body of a request that hyper receives. Records when the handler has read it to its end.
pub(crate) struct RequestBody {
    body: Incoming,
    is_received: Arc<AtomicBool>,
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() || self.body.is_end_stream() {
            self.is_received.store(true, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The bytes that belong to a request, of those that follow on its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Supply {
    /// The rest of the head, which has this length.
    Head(usize),
    /// The rest of a body, which has this length.
    Body(usize),
    /// A chunked body. Ends at the end of a line.
    ChunkedBody,
    /// All bytes, of a request that is malformed or whose head is too long.
    All,
}

impl Supply {
    fn of(body: &Incoming) -> Supply {
        body.size_hint().exact().map_or(Supply::ChunkedBody, |length| {
            // A longer body is rejected before it is read.
            Supply::Body(usize::try_from(length).unwrap_or(usize::MAX))
        })
    }

    /// Returns how many of `bytes` to pass on next, at most `max`, and subtracts them.
    fn take(&mut self, bytes: &[u8], max: usize) -> usize {
        let max = max.min(bytes.len());
        match self {
            Supply::Head(rest) | Supply::Body(rest) => {
                let count = max.min(*rest);
                *rest -= count;
                count
            }
            Supply::ChunkedBody => memchr::memchr(b'\n', &bytes[..max]).map_or(max, |end| end + 1),
            Supply::All => max,
        }
    }
}

/// The state of the connection after [`exchange`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AfterExchange {
    /// Another request may follow on the connection.
    KeepAlive,
    /// The response was the last one, or its body failed. The connection must be closed.
    Close,
    /// The response was not sent completely: the client ended the connection before it began, the connection broke, or
    /// its slot was evicted. The connection must be dropped.
    Abandoned,
}

/// Answers one request by calling `handler`, and writes the response to `stream`.
///
/// `buffer` begins with the request. If `supply` is [`Supply::Head`], it must contain the whole head. The rest of the
/// request is read from `stream`; while it is incomplete, its bytes are reserved in the receive budget. hyper answers a
/// malformed request itself, with 4xx.
///
/// Returns one of three states of the connection:
/// - [`KeepAlive`](AfterExchange::KeepAlive): another request may follow.
/// - [`Close`](AfterExchange::Close): the response was the last one, because of the request (HTTP/1.0,
///   `connection: close`, malformed) or of the response, because the handler did not read the body to its end, or because
///   the instance drains and no further request has arrived.
/// - [`Abandoned`](AfterExchange::Abandoned): the response was not sent, or not completely. The client ended the
///   connection between its request and the response, which cancels the handler; the connection broke; or its slot was
///   evicted. The slot is protected from the end of the request until the response begins.
///
/// If the bytes of the request are evicted, reading its body fails with `QuotaExceeded`. Afterwards, `buffer` contains
/// bytes that follow the request, up to about 32 KiB.
///
/// # Errors
/// If the response cannot be written, or the client accepts no bytes of it for `idle`.
pub(super) async fn exchange<S, H, F>(
    supply: Supply,
    stream: &mut S,
    buffer: &mut BytesMut,
    idle: Duration,
    context: &mut ConnectionContext,
    handler: &H,
) -> io::Result<AfterExchange>
where
    S: AsyncRead + AsyncWrite + Unpin,
    H: Fn(Request<RequestBody>) -> F,
    F: Future<Output = Response<ResponseBody>>,
{
    let ConnectionContext { shutdown, receiving, slot, stats } = context;
    let (shutdown, slot, stats) = (&*shutdown, slot.as_ref(), &**stats);
    // Whether the handler has the whole request.
    let is_received = Arc::new(AtomicBool::new(false));
    let state = Mutex::new(ExchangeState {
        supply,
        buffer,
        receiving,
        held: GENERAL_BYTES,
        stream: WriteTimeout::new(stream, idle),
        is_answered: false,
        is_last: false,
        has_written: false,
        reads_next: false,
        reader: None,
        error: None,
    });
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        is_received.store(request.body().is_end_stream(), Ordering::Relaxed);
        state.lock().supply = Supply::of(request.body());
        let response = handler(request.map(|body| RequestBody { body, is_received: is_received.clone() }));
        let (state, is_received) = (&state, &is_received);
        async move {
            let mut response = response.await;
            stats.errors.count_http(response.status());
            // The rest of an unread body would be taken for a request.
            let is_last = !is_received.load(Ordering::Relaxed)
                || shutdown.is_draining() && poll_fn(|cx| state.lock().poll_is_last(cx)).await;
            if is_last {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            let mut state = state.lock();
            (state.is_answered, state.is_last) = (true, is_last);
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let mut builder = http1::Builder::new();
    builder
        // The head is complete.
        .header_read_timeout(None)
        .max_buf_size(HEADER_BYTES_MAX)
        // A client that ends its direction behind its request still gets the response.
        .half_close(true)
        // Bodies are short: copied behind their headers they cost less to write than a list of two slices.
        .writev(false);
    let io = ExchangeIo { state: &state, is_received: &is_received };
    let mut serving = pin!(builder.serve_connection(TokioIo::new(io), service));
    let mut evicted = pin!(slot_evicted(slot));
    let (mut protected, mut watches_client) = (None, true);
    let served = poll_fn(|cx| {
        if let Poll::Ready(served) = serving.as_mut().poll(cx) {
            return Poll::Ready(Some(served));
        }
        let (is_received, state) = (is_received.load(Ordering::Relaxed), &mut *state.lock());
        let is_handled = is_received && !state.is_answered;
        if is_handled != protected.is_some() {
            protected = is_handled.then(|| Protected::new(slot));
        }
        if (state.has_written || !is_received) && evicted.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        if is_received {
            state.receiving.release();
        }
        if is_received
            && watches_client
            && let Poll::Ready(end) = poll_end(&mut **state.stream.get_mut(), cx, state.buffer)
        {
            watches_client = false;
            // A client that only ended its own direction still reads a response that has begun.
            if end.is_err() || !state.has_written {
                return Poll::Ready(None);
            }
        }
        Poll::Pending
    });
    let served = served.await;
    // The slot becomes the youngest, even if the response was ready at once.
    drop(protected.unwrap_or_else(|| Protected::new(slot)));
    let Some(served) = served else { return Ok(AfterExchange::Abandoned) };
    if let Err(error) = &served {
        count_malformed(stats, error);
    }
    let state = state.lock();
    match state.error {
        Some(kind) => Err(kind.into()),
        None if served.is_err() || state.is_last || !state.reads_next => Ok(AfterExchange::Close),
        None => Ok(AfterExchange::KeepAlive),
    }
}

/// Completes when the connection's slot is evicted. Never completes if `slot` is `None`.
pub(super) async fn slot_evicted(slot: Option<&Reservation>) {
    match slot {
        Some(slot) => slot.evicted().await,
        None => std::future::pending().await,
    }
}

/// A guard that protects a connection's slot from eviction until it is dropped, and then makes it the youngest.
///
/// Has no effect without a slot.
pub(super) struct Protected<'p>(Option<&'p Reservation>);

impl<'p> Protected<'p> {
    pub(super) fn new(slot: Option<&'p Reservation>) -> Protected<'p> {
        slot.iter().for_each(|slot| slot.protect());
        Protected(slot)
    }
}

impl Drop for Protected<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|slot| slot.unprotect());
    }
}

/// The state of one [`exchange`], shared with the stream that hyper reads and writes.
struct ExchangeState<'s, S> {
    supply: Supply,
    /// The bytes that were received and not passed to hyper.
    buffer: &'s mut BytesMut,
    receiving: &'s mut Receiving,
    /// The bytes to reserve before more are read: those passed to hyper, and what it holds itself.
    held: usize,
    stream: WriteTimeout<&'s mut S>,
    /// Whether the handler has returned a response.
    is_answered: bool,
    /// Whether the response says that it is the last one.
    is_last: bool,
    /// Whether bytes of the response were written.
    has_written: bool,
    /// Whether hyper tried to read another request.
    reads_next: bool,
    /// The task that wants to read beyond the request.
    reader: Option<Waker>,
    /// The last error of writing to the connection.
    error: Option<io::ErrorKind>,
}

impl<S: AsyncRead + Unpin> ExchangeState<'_, S> {
    /// Reads more of the request into the buffer. Ready with the number of bytes, which is 0 at the end of the stream, and
    /// with `QuotaExceeded` if the request is evicted.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let ExchangeState { stream, buffer, .. } = self;
        let mut take = |bytes: &[u8]| buffer.extend_from_slice(bytes);
        self.receiving.poll_receive(cx, self.held, |cx| poll_read(&mut **stream.get_mut(), cx, &mut take))
    }

    /// Returns whether no byte of a further request has arrived. Always ready.
    fn poll_is_last(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        if self.buffer.is_empty() {
            let reading = pin!(read_waiting(&mut **self.stream.get_mut(), self.buffer));
            let _ = ready!(reading.poll(cx));
        }
        Poll::Ready(self.buffer.is_empty())
    }
}

/// The stream that hyper serves during one [`exchange`].
///
/// It reads the request, and then, once the response has begun to be written, the end of the stream. It writes to the
/// connection.
struct ExchangeIo<'e, 's, S> {
    state: &'e Mutex<ExchangeState<'s, S>>,
    is_received: &'e AtomicBool,
}

impl<S: AsyncRead + Unpin> AsyncRead for ExchangeIo<'_, '_, S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let state = &mut *self.state.lock();
        if self.is_received.load(Ordering::Relaxed) {
            if !(state.is_answered && state.has_written) {
                state.reader = Some(cx.waker().clone());
                return Poll::Pending;
            }
            state.reads_next = true;
        } else if !state.buffer.is_empty() || ready!(state.poll_receive(cx))? > 0 {
            let count = state.supply.take(state.buffer, buf.remaining());
            buf.put_slice(&state.buffer[..count]);
            state.buffer.advance(count);
            state.held += count;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ExchangeIo<'_, '_, S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let state = &mut *self.state.lock();
        let written = ready!(Pin::new(&mut state.stream).poll_write(cx, buf));
        match &written {
            // An interim response (100) is not the response.
            Ok(_) if state.is_answered => {
                state.has_written = true;
                state.reader.take().into_iter().for_each(Waker::wake);
            }
            Ok(_) => {}
            Err(error) => state.error = Some(error.kind()),
        }
        Poll::Ready(written)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let state = &mut *self.state.lock();
        let flushed = ready!(Pin::new(&mut state.stream).poll_flush(cx));
        flushed.inspect_err(|error| state.error = Some(error.kind())).into()
    }

    /// Does nothing, because another request may follow on the connection.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
