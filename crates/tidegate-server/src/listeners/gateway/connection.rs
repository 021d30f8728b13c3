//! A connection of a client: its limits, its shutdown, and the tunnel that it may become.
//!
//! hyper limits the size of the head of a request. Everything else is limited here: a connection without a request in
//! progress is closed after the idle time, even if it has received a part of a head, and so is the connection of a client
//! that does not read its responses.
//!
//! The total size of incomplete heads is bounded over all connections, as on the other listeners: when the receive
//! budget is used up, the connection with the oldest incomplete head is closed. Bodies need no budget, because they are
//! passed on frame by frame.
//!
//! A refused request may have a body that is never read. A socket that is closed with unread bytes sends a reset, which
//! can destroy the response before the client has read it. So the write side is closed first, and whatever the client
//! still sends is read and discarded, for at most a second ([`ClientIo`]).
//!
//! A client that closes its write side may still want the response (`nc -N`), or may be gone: both look the same until
//! something is written. So the end of an HTTP/1.1 connection is reported to hyper, which then drops the request, only
//! when no byte of the response was written for a second ([`HalfClose`]). That answers the former, and frees what the
//! latter occupy soon. nginx, Caddy and Traefik drop the request at once.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use parking_lot::Mutex;
use tidegate::gateway::GatewayBounds;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{Instant, Sleep};

use super::body::GatewayBody;
use super::deadlines::EndResponse;
use super::tunnel::Tunnel;
use super::{GatewayListener, RequestFuture};
use crate::budget::Receiving;
use crate::listener::{BoxError, ConnectionContext};
use crate::listeners::http::general::count_malformed;
use crate::listeners::io::{LINGER, poll_read};
use crate::shutdown::Shutdown;
use crate::stream::{ClientStream, WriteTimeout};

/// How long a request continues without a byte of its response after the client has closed its write side.
const HALF_CLOSED_MAX: Duration = Duration::from_secs(1);
/// The maximum number of streams of an HTTP/2 connection that were reset by the client before they were accepted. With
/// more, the connection is closed, so that a client cannot overload the server with resets.
const PENDING_RESETS_MAX: usize = 20;
/// The bytes of a response that are buffered for each stream of an HTTP/2 connection.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// The bytes of request bodies that an HTTP/2 client may send before the upstream has accepted them: per stream, and
/// per connection.
const WINDOW_BYTES: [u32; 2] = [256 * 1024, 1024 * 1024];

/// The client of a connection, shared by its requests.
pub(super) struct GatewayClient {
    peer: SocketAddr,
    /// The address of the peer as text, in canonical form.
    address: HeaderValue,
    is_tls: bool,
    /// The port on which the connection was accepted.
    port: HeaderValue,
    shutdown: Shutdown,
    signals: mpsc::UnboundedSender<Signal>,
    in_flight: AtomicUsize,
    /// The number of requests so far.
    requests: AtomicU64,
    is_http2: AtomicBool,
    began: Instant,
    /// The time at which the last request ended, in milliseconds since `began`.
    last_active_ms: AtomicU64,
    /// The tunnel that the connection becomes after its last response.
    tunnel: Mutex<Option<Tunnel>>,
}

impl GatewayClient {
    fn new(
        peer: SocketAddr,
        is_tls: bool,
        port: u16,
        shutdown: Shutdown,
        signals: mpsc::UnboundedSender<Signal>,
    ) -> GatewayClient {
        let address = peer.ip().to_canonical().to_string();
        GatewayClient {
            peer,
            address: HeaderValue::try_from(address).expect("the text of an address is visible ASCII"),
            is_tls,
            port: HeaderValue::from(port),
            shutdown,
            signals,
            in_flight: AtomicUsize::new(0),
            requests: AtomicU64::new(0),
            is_http2: AtomicBool::new(false),
            began: Instant::now(),
            last_active_ms: AtomicU64::new(0),
            tunnel: Mutex::new(None),
        }
    }

    /// Creates a client that is connected to port 8000 without TLS.
    #[cfg(test)]
    pub(super) fn of_test(peer: SocketAddr) -> GatewayClient {
        GatewayClient::new(peer, false, 8000, Shutdown::channel().1, mpsc::unbounded_channel().0)
    }

    /// Returns the address of the client, or of the proxy in front of the gateway.
    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns the address of the client or proxy as text, in canonical form.
    pub(super) fn address(&self) -> &HeaderValue {
        &self.address
    }

    /// Returns [`GatewayClient::address`] as a string.
    pub(super) fn address_text(&self) -> &str {
        self.address.to_str().unwrap_or_default()
    }

    /// Returns the scheme that the client used: `http` or `https`.
    pub(super) fn scheme(&self) -> &'static str {
        if self.is_tls { "https" } else { "http" }
    }

    /// Returns the port on which the connection was accepted.
    pub(super) fn port(&self) -> &HeaderValue {
        &self.port
    }

    /// Sets the tunnel that runs when hyper has written the current response.
    pub(super) fn set_tunnel(&self, tunnel: Tunnel) {
        *self.tunnel.lock() = Some(tunnel);
    }

    /// Returns how to end the response to the current request. Called while that request is handled.
    pub(super) fn end_response(&self) -> EndResponse {
        match STREAM.try_with(Arc::clone) {
            Ok(task) => EndResponse::Stream(task),
            Err(_) => EndResponse::Connection(self.signals.clone(), self.requests.load(Ordering::Relaxed)),
        }
    }

    /// Counts a request as under way until the returned guard is dropped.
    pub(super) fn begin(self: &Arc<Self>, is_http2: bool) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        if is_http2 {
            self.is_http2.store(true, Ordering::Relaxed);
        }
        InFlight(self.clone())
    }

    /// Returns whether `request` is the number of the last request, and it has not ended. For HTTP/1.1.
    fn is_current(&self, request: u64) -> bool {
        self.requests.load(Ordering::Relaxed) == request && self.in_flight.load(Ordering::Relaxed) > 0
    }

    /// Returns how long the connection has been without a request, or zero if there is one.
    fn idle_time(&self) -> Duration {
        if self.in_flight.load(Ordering::Relaxed) > 0 {
            return Duration::ZERO;
        }
        let last_active = Duration::from_millis(self.last_active_ms.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(last_active)
    }

    /// Completes when no request has been in progress for `limit`.
    async fn idle_for(&self, limit: Duration) {
        loop {
            let idle = self.idle_time();
            if idle >= limit {
                return;
            }
            tokio::time::sleep(limit - idle).await;
        }
    }
}

/// A guard that counts a request of a connection as under way.
pub(super) struct InFlight(Arc<GatewayClient>);

impl InFlight {
    /// Returns the client of the request.
    pub(super) fn client(&self) -> &GatewayClient {
        &self.0
    }

    /// Returns whether the instance is shutting down, so that the response should be the last of its connection.
    pub(super) fn is_draining(&self) -> bool {
        self.0.shutdown.is_draining()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let now_ms = u64::try_from(self.0.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.last_active_ms.store(now_ms, Ordering::Relaxed);
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The service of one connection, which hyper calls.
struct ConnectionService {
    listener: Arc<GatewayListener>,
    client: Arc<GatewayClient>,
}

impl hyper::service::Service<Request<Incoming>> for ConnectionService {
    type Response = Response<GatewayBody>;
    type Error = std::convert::Infallible;
    type Future = RequestFuture;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.listener.clone().handle(request, &self.client)
    }
}

/// Serves a connection until it ends, then the tunnel that it has become, if any.
///
/// # Errors
/// If the connection breaks or a request is malformed.
pub(super) async fn serve(
    listener: Arc<GatewayListener>,
    stream: ClientStream,
    peer: SocketAddr,
    context: ConnectionContext,
) -> Result<(), BoxError> {
    let ConnectionContext { shutdown, receiving, stats, .. } = context;
    let is_tls = matches!(stream, ClientStream::Tls(_));
    let (sender, mut signals) = mpsc::unbounded_channel();
    let client = Arc::new(GatewayClient::new(peer, is_tls, stream.local_port(), shutdown.clone(), sender));
    let (idle, builder) = (listener.idle, builder(&listener.bounds, listener.idle));
    let head = HeadBudget {
        client: client.clone(),
        receiving,
        requests: 0,
        bytes: 0,
        bytes_max: listener.bounds.header_bytes_max,
    };
    let service = ConnectionService { listener, client: client.clone() };
    let io = TokioIo::new(ClientIo::new(stream, idle, head));
    {
        let mut connection = pin!(builder.serve_connection_with_upgrades(io, service));
        let _watch = AbortOnDrop(tokio::spawn(watch(client.clone(), shutdown, idle)));
        loop {
            tokio::select! {
                biased;
                served = connection.as_mut() => {
                    if let Err(error) = served {
                        error.downcast_ref().into_iter().for_each(|error| count_malformed(&stats, error));
                        return Err(error);
                    }
                    break;
                }
                Some(signal) = signals.recv() => match signal {
                    // HTTP/2 tells the client which of its requests will still be answered, so none is lost.
                    Signal::Closing if client.is_http2.load(Ordering::Relaxed) => connection.as_mut().graceful_shutdown(),
                    Signal::Closing => {}
                    Signal::End => connection.as_mut().graceful_shutdown(),
                    Signal::Drop => return Ok(()),
                    Signal::Expired(request) if client.is_current(request) => return Ok(()),
                    Signal::Expired(_) => {}
                },
            }
        }
    }
    let tunnel = client.tunnel.lock().take();
    match tunnel {
        Some(tunnel) => tunnel.run().await,
        None => Ok(()),
    }
}

/// A message to the task of a connection.
pub(super) enum Signal {
    /// The listener is closing.
    Closing,
    /// The connection must end after the requests in progress.
    End,
    /// The connection must be dropped: it was asked to end, and has been idle since.
    Drop,
    /// The time of the response to the request with this number is over.
    Expired(u64),
}

/// Watches a connection: signals when the instance shuts down, and when no request was in progress for `idle`.
///
/// A task of its own, so that a request does not poll these timers.
async fn watch(client: Arc<GatewayClient>, shutdown: Shutdown, idle: Duration) {
    let signals = &client.signals;
    let closing = async {
        shutdown.clone().closing().await;
        let _ = signals.send(Signal::Closing);
        shutdown.idle_grace_over().await;
        let _ = signals.send(Signal::End);
    };
    let idling = async {
        client.idle_for(idle).await;
        let _ = signals.send(Signal::End);
        // hyper closes an HTTP/1.1 connection at once, unless it has received a part of a head.
        let grace = if client.is_http2.load(Ordering::Relaxed) { idle } else { LINGER };
        client.idle_for(idle.saturating_add(grace)).await;
        let _ = signals.send(Signal::Drop);
    };
    tokio::join!(closing, idling);
}

/// A task that is aborted when this value is dropped.
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

tokio::task_local! {
    /// The task of the HTTP/2 stream whose request is being handled.
    static STREAM: Arc<OnceLock<AbortHandle>>;
}

/// Spawns the tasks of HTTP/2 streams, so that each of them can be aborted.
#[derive(Clone)]
struct StreamExecutor;

impl<F> hyper::rt::Executor<F> for StreamExecutor
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, stream: F) {
        let handle = Arc::new(OnceLock::new());
        let task = tokio::spawn(STREAM.scope(handle.clone(), stream));
        let _ = handle.set(task.abort_handle());
    }
}

fn builder(bounds: &GatewayBounds, idle: Duration) -> auto::Builder<StreamExecutor> {
    let mut builder = auto::Builder::new(StreamExecutor);
    builder
        .http1()
        // `watch` closes connections with incomplete heads, without a timer for each request.
        .header_read_timeout(None)
        .max_buf_size(bounds.header_bytes_max)
        .max_headers(bounds.headers_max);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(idle)
        .max_concurrent_streams(bounds.streams_max)
        .initial_stream_window_size(WINDOW_BYTES[0])
        .initial_connection_window_size(WINDOW_BYTES[1])
        .max_header_list_size(u32::try_from(bounds.header_bytes_max).unwrap_or(u32::MAX))
        .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
        .max_send_buf_size(SEND_BUFFER_BYTES);
    builder
}

/// The bytes received since the last request began, as a reservation in the receive budget of the listener.
///
/// There is no reservation while a request is in progress, because its body is forwarded as it arrives.
struct HeadBudget {
    client: Arc<GatewayClient>,
    receiving: Receiving,
    /// The number of requests when `bytes` was last zero.
    requests: u64,
    bytes: usize,
    /// hyper buffers at most this many bytes of a head.
    bytes_max: usize,
}

impl HeadBudget {
    /// Returns the number of bytes to reserve.
    fn bytes(&mut self) -> usize {
        let requests = self.client.requests.load(Ordering::Relaxed);
        if requests != self.requests || self.client.in_flight.load(Ordering::Relaxed) > 0 {
            (self.requests, self.bytes) = (requests, 0);
        }
        self.bytes.min(self.bytes_max)
    }
}

/// The end of what the client sends, while the response to its request is awaited or written.
#[derive(Default)]
struct HalfClose {
    /// Runs since the client has closed its write side, and starts again with every write. `None` before that.
    timer: Option<Pin<Box<Sleep>>>,
    /// Whether the client does not accept the bytes that are being written.
    is_blocked: bool,
    /// Whether the task of the connection was woken after the end of the response, so that hyper reads the end of the
    /// stream.
    is_announced: bool,
}

impl HalfClose {
    /// Begins when the client has closed its write side.
    fn begin(&mut self) {
        self.timer = Some(Box::pin(tokio::time::sleep(HALF_CLOSED_MAX)));
    }

    /// Ready when nothing was written for [`HALF_CLOSED_MAX`]. The time during which the client accepts no bytes does
    /// not count, because it has a timeout of its own. Never ready before [`begin`](Self::begin).
    fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(timer) = &mut self.timer else { return Poll::Pending };
        ready!(timer.as_mut().poll(cx));
        if !self.is_blocked {
            return Poll::Ready(());
        }
        timer.as_mut().reset(Instant::now() + HALF_CLOSED_MAX);
        timer.as_mut().poll(cx)
    }

    /// Records the result of a write.
    fn wrote<T>(&mut self, written: &Poll<T>) {
        self.is_blocked = written.is_pending();
        if let Some(timer) = &mut self.timer {
            timer.as_mut().reset(Instant::now() + HALF_CLOSED_MAX);
        }
    }
}

/// The stream of a client, with a write timeout. Its shutdown waits for the client to close the connection too.
struct ClientIo<S> {
    stream: WriteTimeout<S>,
    head: HeadBudget,
    half_close: HalfClose,
    linger: Option<Pin<Box<Sleep>>>,
}

impl<S> ClientIo<S> {
    fn new(stream: S, write_timeout: Duration, head: HeadBudget) -> ClientIo<S> {
        let stream = WriteTimeout::new(stream, write_timeout);
        ClientIo { stream, head, half_close: HalfClose::default(), linger: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientIo<S> {
    /// Reads from the client. Fails with `QuotaExceeded` if the bytes of an incomplete head were evicted.
    ///
    /// While an HTTP/1.1 request is in progress, the end of the stream is reported only when [`HalfClose`] is over.
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.half_close.timer.is_some() {
            return this.poll_end(cx);
        }
        let (before, bytes, stream) = (buf.filled().len(), this.head.bytes(), &mut this.stream);
        ready!(this.head.receiving.poll_receive(cx, bytes, |cx| Pin::new(stream).poll_read(cx, buf)))?;
        if buf.filled().len() == before && buf.remaining() > 0 {
            this.half_close.begin();
            return this.poll_end(cx);
        }
        this.head.bytes = this.head.bytes.saturating_add(buf.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl<S> ClientIo<S> {
    /// Returns whether an HTTP/1.1 request is in progress.
    fn is_answering(&self) -> bool {
        let client = &self.head.client;
        client.in_flight.load(Ordering::Relaxed) > 0 && !client.is_http2.load(Ordering::Relaxed)
    }

    /// Reports the end of what the client sends, unless the response to an HTTP/1.1 request is in progress.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_answering() {
            self.half_close.is_announced = false;
            ready!(self.half_close.poll_over(cx));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ClientIo<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.half_close.wrote(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.half_close.wrote(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper does not read again by itself, because its last read is still pending.
        if self.half_close.timer.is_some() && !self.half_close.is_announced && !self.is_answering() {
            self.half_close.is_announced = true;
            cx.waker().wake_by_ref();
        }
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Closes the write side, then reads and discards what the client sends until it closes too, for at most a second.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.linger.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        }
        let linger = this.linger.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
        if linger.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        match ready!(poll_read(&mut this.stream, cx, &mut |_| {})) {
            Ok(1..) => {
                // Yields, so that other connections of this thread are polled before the next bytes are read.
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Ok(0) | Err(_) => Poll::Ready(Ok(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::time::timeout;

    use super::*;

    const IDLE: Duration = Duration::from_mins(1);

    /// Returns the client's end of a connection with room for `capacity` bytes, the gateway's end, and its client.
    fn connection(capacity: usize) -> (DuplexStream, ClientIo<DuplexStream>, Arc<GatewayClient>) {
        let (client_end, stream) = tokio::io::duplex(capacity);
        let client = Arc::new(GatewayClient::of_test("192.0.2.1:1234".parse().unwrap()));
        let receiving = ConnectionContext::unshared().1.receiving;
        let head = HeadBudget { client: client.clone(), receiving, requests: 0, bytes: 0, bytes_max: 1 << 16 };
        (client_end, ClientIo::new(stream, IDLE, head), client)
    }

    /// Returns how long reading waits for the end of what the client sends.
    async fn time_to_end(io: &mut ClientIo<DuplexStream>) -> Duration {
        let began = Instant::now();
        assert_eq!(io.read(&mut [0; 16]).await.unwrap(), 0);
        began.elapsed()
    }

    /// Returns whether the end is not reported within `time`.
    async fn is_open_for(time: Duration, io: &mut ClientIo<DuplexStream>) -> bool {
        timeout(time, io.read(&mut [0; 16])).await.is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_is_reported_at_once_without_a_request_in_progress() {
        for is_http2 in [None, Some(true)] {
            let (mut client_end, mut io, client) = connection(1024);
            let _request = is_http2.map(|is_http2| client.begin(is_http2));
            client_end.write_all(b"bytes").await.unwrap();
            client_end.shutdown().await.unwrap();
            assert_eq!(io.read(&mut [0; 16]).await.unwrap(), 5);
            assert_eq!(time_to_end(&mut io).await, Duration::ZERO);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn during_a_request_the_end_is_reported_a_second_after_the_last_write() {
        let (mut client_end, mut io, client) = connection(1024);
        let request = client.begin(false);
        client_end.shutdown().await.unwrap();
        for _ in 0..5 {
            assert!(is_open_for(HALF_CLOSED_MAX - Duration::from_millis(10), &mut io).await);
            io.write_all(b"a part of the response").await.unwrap();
        }
        assert_eq!(time_to_end(&mut io).await, HALF_CLOSED_MAX);
        drop(request);

        let (mut client_end, mut io, client) = connection(1024);
        let request = client.begin(false);
        client_end.shutdown().await.unwrap();
        assert!(is_open_for(Duration::from_millis(10), &mut io).await);
        drop(request);
        assert_eq!(time_to_end(&mut io).await, Duration::ZERO, "the response is complete");
    }

    /// Counts how often a task was woken.
    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl std::task::Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_is_woken_once_to_read_the_end_after_a_complete_response() {
        let (mut client_end, mut io, client) = connection(1024);
        let request = client.begin(false);
        client_end.shutdown().await.unwrap();
        let wakes = Arc::new(Wakes::default());
        let waker = wakes.clone().into();
        let mut cx = Context::from_waker(&waker);
        assert!(Pin::new(&mut io).poll_read(&mut cx, &mut ReadBuf::new(&mut [0; 16])).is_pending());
        let mut flush = |io: &mut ClientIo<DuplexStream>| {
            assert!(Pin::new(io).poll_flush(&mut cx).is_ready());
            wakes.0.load(Ordering::Relaxed)
        };
        assert_eq!(flush(&mut io), 0);
        drop(request);
        assert_eq!([flush(&mut io), flush(&mut io)], [1, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_slowly_still_gets_the_response_after_it_has_closed_its_side() {
        let (mut client_end, mut io, client) = connection(4);
        let _request = client.begin(false);
        client_end.shutdown().await.unwrap();
        assert!(is_open_for(Duration::from_millis(10), &mut io).await);
        assert!(timeout(Duration::ZERO, io.write_all(b"response")).await.is_err(), "there is room for half of it");
        assert!(is_open_for(IDLE / 2, &mut io).await);
        client_end.read_exact(&mut [0; 4]).await.unwrap();
        io.write_all(b"onse").await.unwrap();
        assert_eq!(time_to_end(&mut io).await, HALF_CLOSED_MAX);
    }
}
