//! The general way: hyper answers a request.
//!
//! hyper takes some 16 KiB for a connection, whether anything is asked on it or not. So it does not get the connection but one whole request,
//! in memory, and is gone when that is answered; ten thousand silent connections cost ten thousand small buffers. What cannot be
//! told to be whole without judging it (`expect`, odd framing, nonsense) gets hyper on the connection itself, and is the last on it.
//!
//! Whether the connection goes on after a request is hyper's judgement in both cases: it goes on if hyper would read another one.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as TaskContext, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::header::CONNECTION;
use http::{HeaderValue, Request, Response};
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

use super::connection::HEADER_BYTES_MAX;
use crate::accept::Context;
use crate::budget::{Receiving, Reservation};
use crate::listeners::finish;
use crate::stream::WriteTimeout;

/// What hyper holds for a connection besides what it has read: two buffers of 8 KiB, and what belongs to a request.
pub(super) const GENERAL_BYTES: usize = 32 * 1024;

/// A request's body. It remembers whether it was read to its end.
pub(crate) struct RequestBody {
    body: Incoming,
    has_ended: Arc<AtomicBool>,
}

impl RequestBody {
    fn new(body: Incoming) -> (RequestBody, Arc<AtomicBool>) {
        let has_ended = Arc::new(AtomicBool::new(body.is_end_stream()));
        (RequestBody { body, has_ended: has_ended.clone() }, has_ended)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
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

/// Answers one whole request. Returns the bytes of the answer, and whether it is the last on its connection: because `closes` says
/// so, or hyper.
pub(super) async fn exchange<A, F>(
    request: Bytes,
    closes: bool,
    idle: Duration,
    context: &Context,
    answer: &A,
) -> (Vec<u8>, bool)
where
    A: Fn(Request<RequestBody>) -> F,
    F: Future<Output = Response<Bytes>>,
{
    let state = Arc::new(Mutex::new(Exchange { request, ..Exchange::default() }));
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let (request, has_ended) = watched(request);
        let (answer, state) = (answer(request), &state);
        async move {
            let _protected = Protected::new(context.place.as_ref());
            let mut response = answer.await.map(Full::new);
            // What is left of a body would be taken for a request.
            let is_last = closes || !has_ended.load(Ordering::Relaxed);
            if is_last {
                close_after(&mut response);
            }
            let mut state = state.lock();
            (state.is_answered, state.is_last) = (true, is_last);
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let connection = builder(idle).serve_connection(TokioIo::new(InMemory(state.clone())), service);
    let served = connection.await;
    let state = &mut *state.lock();
    (std::mem::take(&mut state.answer), served.is_err() || state.is_last || !state.would_go_on)
}

/// Answers on the connection itself, of which `begun` was read already, and ends it.
pub(super) async fn last<S, A, F>(
    stream: &mut S,
    begun: BytesMut,
    idle: Duration,
    context: Context,
    answer: &A,
) -> Result<(), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
    A: Fn(Request<RequestBody>) -> F,
    F: Future<Output = Response<Bytes>>,
{
    let Context { receiving, place, .. } = context;
    let evicted = receiving.notice();
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let answer = answer(watched(request).0);
        async {
            let _protected = Protected::new(place.as_ref());
            let mut response = answer.await.map(Full::new);
            close_after(&mut response);
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let served = {
        let bytes = GENERAL_BYTES + begun.len();
        let io = OnConnection { begun, stream: WriteTimeout::new(&mut *stream, idle), bytes, receiving };
        let mut connection = pin!(builder(idle).serve_connection(TokioIo::new(io), service));
        tokio::select! {
            biased;
            served = &mut connection => served,
            () = notified(evicted) => Ok(()),
        }
    };
    // What hyper has answered must not be destroyed by what it has not read.
    let _ = finish(stream, idle).await;
    served
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
        // A client that sends its end behind its request still gets the answer.
        .half_close(true)
        // Answers are short: copied behind their headers they go out for less than a list of two pieces.
        .writev(false);
    builder
}

fn watched(request: Request<Incoming>) -> (Request<RequestBody>, Arc<AtomicBool>) {
    let (head, body) = request.into_parts();
    let (body, has_ended) = RequestBody::new(body);
    (Request::from_parts(head, body), has_ended)
}

/// hyper goes by it, too.
fn close_after<B>(response: &mut Response<B>) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}

/// Keeps a connection from being evicted while a request is answered.
struct Protected<'p>(Option<&'p Reservation>);

impl<'p> Protected<'p> {
    fn new(place: Option<&'p Reservation>) -> Protected<'p> {
        place.iter().for_each(|place| place.protect());
        Protected(place)
    }
}

impl Drop for Protected<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|place| place.unprotect());
    }
}

/// One request and its answer, in memory.
#[derive(Default)]
struct Exchange {
    request: Bytes,
    answer: Vec<u8>,
    is_answered: bool,
    /// Whether the answer says that it is the last.
    is_last: bool,
    /// Whether hyper would read another request.
    would_go_on: bool,
    /// Waits for more than there is.
    reader: Option<Waker>,
}

/// What hyper takes for a connection: the request, and the end once its answer is written.
struct InMemory(Arc<Mutex<Exchange>>);

impl AsyncRead for InMemory {
    fn poll_read(self: Pin<&mut Self>, cx: &mut TaskContext<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let exchange = &mut *self.0.lock();
        let count = exchange.request.len().min(buf.remaining());
        if count > 0 {
            buf.put_slice(&exchange.request[..count]);
            exchange.request.advance(count);
        } else if exchange.is_answered && !exchange.answer.is_empty() {
            exchange.would_go_on = true;
        } else {
            exchange.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for InMemory {
    fn poll_write(self: Pin<&mut Self>, _: &mut TaskContext<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let exchange = &mut *self.0.lock();
        exchange.answer.extend_from_slice(buf);
        exchange.reader.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A connection of which something was read already. Everything that hyper reads is accounted for before it reads more.
struct OnConnection<S> {
    begun: BytesMut,
    stream: S,
    bytes: usize,
    receiving: Receiving,
}

impl<S: AsyncRead + Unpin> AsyncRead for OnConnection<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.begun.is_empty() {
            let count = this.begun.len().min(buf.remaining());
            buf.put_slice(&this.begun[..count]);
            this.begun.advance(count);
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

impl<S: AsyncWrite + Unpin> AsyncWrite for OnConnection<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
