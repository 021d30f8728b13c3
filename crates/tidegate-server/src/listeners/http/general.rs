//! The general path: hyper answers a request.
//!
//! hyper takes some 16 KiB for a connection, whether a request is under way or not. So it does not get the connection
//! but one complete request, and is dropped when that is answered: ten thousand silent connections cost ten thousand
//! small buffers. A request whose end cannot be found without interpreting it (`expect`, unusual framing, malformed
//! input) gets hyper on the connection itself, and is the last request on it.
//!
//! Whether the connection continues after a request is hyper's decision in both cases: it does if hyper would read
//! another request.
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
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

use super::connection::HEADER_BYTES_MAX;
use crate::budget::{Receiving, Reservation};
use crate::listener::{BoxError, ConnectionContext};
use crate::listeners::io::{close, poll_end};
use crate::metrics::ListenerStats;
use crate::stream::WriteTimeout;

/// What hyper holds for a connection besides what it has read: two buffers of 8 KiB, and the state of a request.
pub(super) const GENERAL_BYTES: usize = 32 * 1024;

/// The body of a response: complete, or a stream of frames.
pub(crate) type ResponseBody = UnsyncBoxBody<Bytes, BoxError>;

/// Returns a response body that consists of `bytes`.
pub(crate) fn full_body(bytes: Bytes) -> ResponseBody {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// The body of a request that hyper receives. Records whether the handler has read it to its end.
pub(crate) struct RequestBody {
    body: Incoming,
    has_ended: Arc<AtomicBool>,
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() || self.body.is_end_stream() {
            self.has_ended.store(true, Ordering::Relaxed);
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

/// Answers one complete request by calling `handler`, and writes the response to `stream`.
///
/// `request` must be one whole request, with its body. hyper answers a malformed one itself, with 4xx.
///
/// Returns one of three states of the connection:
/// - [`KeepAlive`](AfterExchange::KeepAlive): another request may follow.
/// - [`Close`](AfterExchange::Close): the response was the last one, because of `closes`, of the request (HTTP/1.0,
///   `connection: close`, malformed) or of the response, or because the handler did not read the body to its end.
/// - [`Abandoned`](AfterExchange::Abandoned): the response was not sent, or not completely. The client ended the
///   connection before the response began, which cancels the handler; the connection broke; or its slot was evicted
///   after the response had begun. While the handler runs, the slot is protected.
///
/// Bytes that the client sends meanwhile are appended to `buffer`, up to about 32 KiB.
///
/// # Errors
/// If the response cannot be written, or the client accepts no bytes of it for `idle`.
pub(super) async fn exchange<S, H, F>(
    request: Bytes,
    stream: &mut S,
    buffer: &mut BytesMut,
    closes: bool,
    idle: Duration,
    context: &ConnectionContext,
    handler: &H,
) -> io::Result<AfterExchange>
where
    S: AsyncRead + AsyncWrite + Unpin,
    H: Fn(Request<RequestBody>) -> F,
    F: Future<Output = Response<ResponseBody>>,
{
    let state = Mutex::new(ExchangeState {
        request,
        stream: WriteTimeout::new(CountedResponse::new(stream, &context.stats), idle),
        is_answered: false,
        is_last: false,
        has_written: false,
        reads_next: false,
        reader: None,
        error: None,
    });
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let (request, has_ended) = with_request_body(request);
        let (response, state) = (handler(request), &state);
        async move {
            let _protected = Protected::new(context.slot.as_ref());
            let mut response = response.await;
            // The rest of an unread body would be taken for a request.
            let is_last = closes || !has_ended.load(Ordering::Relaxed);
            if is_last {
                set_connection_close(&mut response);
            }
            let mut state = state.lock();
            (state.is_answered, state.is_last) = (true, is_last);
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let io = TokioIo::new(ExchangeIo(&state));
    let mut serving = pin!(builder(idle).serve_connection(io, service));
    let mut evicted = pin!(slot_evicted(context.slot.as_ref()));
    let mut watches_client = true;
    let served = poll_fn(|cx| {
        if let Poll::Ready(served) = serving.as_mut().poll(cx) {
            return Poll::Ready(Some(served));
        }
        let state = &mut *state.lock();
        if state.has_written && evicted.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        if watches_client && let Poll::Ready(end) = poll_end(&mut *state.stream.get_mut().stream, cx, buffer) {
            watches_client = false;
            // A client that only ended its own direction still reads a response that has begun.
            if end.is_err() || !state.has_written {
                return Poll::Ready(None);
            }
        }
        Poll::Pending
    });
    let Some(served) = served.await else { return Ok(AfterExchange::Abandoned) };
    let state = state.lock();
    match state.error {
        Some(kind) => Err(kind.into()),
        None if served.is_err() || state.is_last || !state.reads_next => Ok(AfterExchange::Close),
        None => Ok(AfterExchange::KeepAlive),
    }
}

/// Lets hyper read one more request from the connection, answers it by calling `handler`, and ends the connection.
///
/// `begin` is the part of the request that was read already. Its head must be complete `idle` after this call.
///
/// hyper answers a malformed request itself, with 4xx. If the connection's slot or the bytes of the request are
/// evicted, ends the connection at once, even within a response; the slot is protected while the handler runs. A client
/// that disconnects does not cancel the handler, unlike in [`exchange`].
///
/// # Errors
/// If the request is malformed or late, the receive budget has no room for it, the connection breaks, or the client
/// accepts no bytes of the response for `idle`. The connection has ended in these cases, too.
pub(super) async fn serve_last<S, H, F>(
    stream: &mut S,
    begin: BytesMut,
    idle: Duration,
    context: ConnectionContext,
    handler: &H,
) -> Result<(), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
    H: Fn(Request<RequestBody>) -> F,
    F: Future<Output = Response<ResponseBody>>,
{
    let ConnectionContext { receiving, slot, stats, .. } = context;
    let evicted = receiving.notice();
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let response = handler(with_request_body(request).0);
        async {
            let _protected = Protected::new(slot.as_ref());
            let mut response = response.await;
            set_connection_close(&mut response);
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let served = {
        let bytes = GENERAL_BYTES + begin.len();
        let counted = CountedResponse::new(&mut *stream, &stats);
        let io = Rewind { begin, stream: WriteTimeout::new(counted, idle), bytes, receiving };
        let mut serving = pin!(builder(idle).serve_connection(TokioIo::new(io), service));
        tokio::select! {
            biased;
            served = &mut serving => served,
            () = notified(evicted) => Ok(()),
            () = slot_evicted(slot.as_ref()) => Ok(()),
        }
    };
    // Unread bytes would reset the connection and destroy the response.
    let _ = close(stream, idle).await;
    served
}

/// Completes when the connection's slot is evicted. Never completes if `slot` is `None`.
pub(super) async fn slot_evicted(slot: Option<&Reservation>) {
    match slot {
        Some(slot) => slot.evicted().await,
        None => std::future::pending().await,
    }
}

async fn notified(notice: Option<Arc<Notify>>) {
    match notice {
        Some(notice) => notice.notified().await,
        None => std::future::pending().await,
    }
}

fn builder(idle: Duration) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(idle)
        .max_buf_size(HEADER_BYTES_MAX)
        // A client that ends its direction behind its request still gets the response.
        .half_close(true)
        // Bodies are short: copied behind their headers they cost less to write than a list of two slices.
        .writev(false);
    builder
}

fn with_request_body(request: Request<Incoming>) -> (Request<RequestBody>, Arc<AtomicBool>) {
    let (head, body) = request.into_parts();
    let has_ended = Arc::new(AtomicBool::new(body.is_end_stream()));
    (Request::from_parts(head, RequestBody { body, has_ended: has_ended.clone() }), has_ended)
}

/// Adds `connection: close` to a response, which makes it the last one of its connection; hyper obeys it too.
fn set_connection_close<B>(response: &mut Response<B>) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
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

/// A connection on which hyper writes one response, which is counted for the listener if its status is an error.
///
/// The status is read from the bytes that are written, because hyper answers malformed requests itself.
struct CountedResponse<'s, S> {
    stream: &'s mut S,
    stats: &'s ListenerStats,
    /// Whether the status line of the final response was written.
    is_counted: bool,
}

impl<'s, S> CountedResponse<'s, S> {
    fn new(stream: &'s mut S, stats: &'s ListenerStats) -> CountedResponse<'s, S> {
        CountedResponse { stream, stats, is_counted: false }
    }

    /// Counts the response whose status line is in the bytes that were written, if it is there.
    ///
    /// An interim response (1xx), which has only a head, is skipped. hyper may write it together with the response.
    fn count(&mut self, mut written: &[u8]) {
        while let Some(status) = written.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..5)) {
            let Ok(status) = StatusCode::from_bytes(status) else { return };
            if !status.is_informational() {
                self.is_counted = true;
                return self.stats.errors.count_http(status);
            }
            let Some(end) = memchr::memmem::find(written, b"\r\n\r\n") else { return };
            written = &written[end + 4..];
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CountedResponse<'_, S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for CountedResponse<'_, S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut *self.stream).poll_write(cx, buf));
        if !self.is_counted && written.is_ok() {
            self.count(buf);
        }
        Poll::Ready(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_shutdown(cx)
    }
}

/// The state of one [`exchange`], shared with the stream that hyper reads and writes.
struct ExchangeState<'s, S> {
    /// The part of the request that hyper has not read yet.
    request: Bytes,
    stream: WriteTimeout<CountedResponse<'s, S>>,
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

impl<S> ExchangeState<'_, S> {
    /// Records the result of a write, and returns it. A success wakes the task that wants to read beyond the request.
    fn record_write<T>(&mut self, written: io::Result<T>) -> io::Result<T> {
        match &written {
            Ok(_) => {
                self.has_written = true;
                self.reader.take().into_iter().for_each(Waker::wake);
            }
            Err(error) => self.error = Some(error.kind()),
        }
        written
    }
}

/// The stream that hyper serves during one [`exchange`].
///
/// It reads the request, and then, once the response has begun to be written, the end of the stream. It writes to the
/// connection.
struct ExchangeIo<'e, 's, S>(&'e Mutex<ExchangeState<'s, S>>);

impl<S> AsyncRead for ExchangeIo<'_, '_, S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let state = &mut *self.0.lock();
        let count = state.request.len().min(buf.remaining());
        if count > 0 {
            buf.put_slice(&state.request[..count]);
            state.request.advance(count);
        } else if state.is_answered && state.has_written {
            state.reads_next = true;
        } else {
            state.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ExchangeIo<'_, '_, S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let state = &mut *self.0.lock();
        let written = ready!(Pin::new(&mut state.stream).poll_write(cx, buf));
        Poll::Ready(state.record_write(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let state = &mut *self.0.lock();
        let flushed = ready!(Pin::new(&mut state.stream).poll_flush(cx));
        flushed.inspect_err(|error| state.error = Some(error.kind())).into()
    }

    /// Does nothing, because another request may follow on the connection.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A connection that first reads `begin`, which was received already, and then from `stream`.
///
/// All bytes received so far are reserved in the receive budget before more are read. If there is no room for them,
/// reading fails with `QuotaExceeded`.
struct Rewind<S> {
    begin: BytesMut,
    stream: S,
    /// The bytes to reserve: those received so far, and what hyper holds itself.
    bytes: usize,
    receiving: Receiving,
}

impl<S: AsyncRead + Unpin> AsyncRead for Rewind<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.begin.is_empty() {
            let count = this.begin.len().min(buf.remaining());
            buf.put_slice(&this.begin[..count]);
            this.begin.advance(count);
            return Poll::Ready(Ok(()));
        }
        if !ready!(this.receiving.poll_hold(cx, this.bytes)) {
            return Poll::Ready(Err(io::ErrorKind::QuotaExceeded.into()));
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        this.bytes += buf.filled().len() - before;
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Rewind<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
