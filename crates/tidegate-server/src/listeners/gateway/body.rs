//! Bodies of requests and responses: streams that are forwarded frame by frame, with a timeout for each frame.
//!
//! A timer runs only while a body waits for its sender. If the receiver is slow instead, the body is not polled, and
//! the write timeout of the connection applies.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderName;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};

use super::access_log::LogEntry;
use super::connection::InFlight;
use super::headers;
use super::pool::Lease;
use crate::listener::BoxError;
use crate::metrics::InFlightGauge;

/// A timer that runs while a stream has no data. It is created when the stream first has to wait.
#[derive(Default)]
struct WaitTimer(Option<Pin<Box<Sleep>>>);

impl WaitTimer {
    /// Polls the timer after the stream returned `Pending`. Ready if it has waited for `limit`.
    fn poll_waiting(&mut self, cx: &mut Context<'_>, limit: Duration) -> Poll<()> {
        self.0.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit))).as_mut().poll(cx)
    }

    /// Ends the wait.
    fn reset(&mut self) {
        self.0 = None;
    }
}

/// The body of a request, as it is sent to the upstream.
pub(super) enum RequestBody {
    /// The request has no body.
    Empty,
    /// The client sends a body.
    Client(Box<ClientBody>),
}

/// A body that a client sends.
pub(super) struct ClientBody {
    incoming: Incoming,
    timeout: Duration,
    timer: WaitTimer,
    progress: Arc<Progress>,
    /// The header in which trusted proxies report the client's address.
    forwarding_header: HeaderName,
}

/// How far a request body has been sent. Shared with the task that waits for the response.
pub(super) struct Progress {
    began: Instant,
    /// The time at which the upstream last accepted a piece, in milliseconds since `began`.
    last_ms: AtomicU64,
    state: AtomicU8,
}

/// The state of a request body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum BodyState {
    /// More may follow.
    Streaming = 0,
    /// The whole body was sent.
    Complete = 1,
    /// The client did not send the next bytes in time.
    TimedOut = 2,
    /// The client sent a malformed body, or closed the connection before its end.
    Broken = 3,
}

impl Progress {
    /// Returns the state of the body.
    pub(super) fn state(&self) -> BodyState {
        match self.state.load(Ordering::Relaxed) {
            0 => BodyState::Streaming,
            1 => BodyState::Complete,
            2 => BodyState::TimedOut,
            _ => BodyState::Broken,
        }
    }

    /// Returns the time at which the upstream last accepted a piece of the body.
    pub(super) fn last(&self) -> Instant {
        self.began + Duration::from_millis(self.last_ms.load(Ordering::Relaxed))
    }

    fn set(&self, state: BodyState) {
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(now_ms, Ordering::Relaxed);
        self.state.store(state as u8, Ordering::Relaxed);
    }
}

impl RequestBody {
    /// Wraps the body of a request. The client may take up to `timeout` for each piece.
    ///
    /// `forwarding_header` is the header in which trusted proxies report the client's address. It is removed from trailers.
    ///
    /// Also returns its progress, or `None` if there is no body.
    pub(super) fn new(
        incoming: Incoming,
        timeout: Duration,
        forwarding_header: &HeaderName,
    ) -> (RequestBody, Option<Arc<Progress>>) {
        if incoming.is_end_stream() {
            return (RequestBody::Empty, None);
        }
        let state = AtomicU8::new(BodyState::Streaming as u8);
        let progress = Arc::new(Progress { began: Instant::now(), last_ms: AtomicU64::new(0), state });
        let (timer, forwarding_header) = (WaitTimer::default(), forwarding_header.clone());
        let body = ClientBody { incoming, timeout, timer, progress: progress.clone(), forwarding_header };
        (RequestBody::Client(Box::new(body)), Some(progress))
    }
}

impl ClientBody {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(cx) else {
            ready!(self.timer.poll_waiting(cx, self.timeout));
            self.progress.set(BodyState::TimedOut);
            return Poll::Ready(Some(Err("the client did not send the body in time".into())));
        };
        self.timer.reset();
        match frame {
            Some(Ok(frame)) => {
                let is_last = frame.is_trailers() || self.incoming.is_end_stream();
                self.progress.set(if is_last { BodyState::Complete } else { BodyState::Streaming });
                let frame = match frame.into_trailers() {
                    Ok(trailers) => Frame::trailers(headers::request_trailers(trailers, &self.forwarding_header)),
                    Err(frame) => frame,
                };
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => {
                self.progress.set(BodyState::Broken);
                Poll::Ready(Some(Err(error.into())))
            }
            None => {
                self.progress.set(BodyState::Complete);
                Poll::Ready(None)
            }
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut *self {
            RequestBody::Empty => Poll::Ready(None),
            RequestBody::Client(body) => body.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            RequestBody::Empty => true,
            RequestBody::Client(body) => body.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            RequestBody::Empty => SizeHint::with_exact(0),
            RequestBody::Client(body) => body.incoming.size_hint(),
        }
    }
}

/// The body of a response to a client, from the gateway itself or from an upstream.
pub(super) struct GatewayBody {
    content: Content,
    /// Counts the request as under way until the response has ended.
    _in_flight: Option<InFlight>,
    log: Option<Arc<LogEntry>>,
}

enum Content {
    Own(Option<Bytes>),
    Upstream(Box<UpstreamBody>),
}

/// The body of a response that an upstream sends.
pub(super) struct UpstreamBody {
    pub(super) incoming: Incoming,
    /// The connection, which is returned to the pool after the whole body has been received.
    pub(super) lease: Option<Lease>,
    /// The request's slot among the `max_concurrent` requests of the upstream.
    pub(super) permit: Option<OwnedSemaphorePermit>,
    pub(super) gauge: Option<InFlightGauge>,
    pub(super) idle: Duration,
    pub(super) total: Option<Pin<Box<Sleep>>>,
    timer: WaitTimer,
}

impl UpstreamBody {
    /// Creates a body that is aborted if the upstream sends nothing for `idle`, or when `total` completes.
    pub(super) fn new(
        incoming: Incoming,
        lease: Lease,
        permit: OwnedSemaphorePermit,
        gauge: InFlightGauge,
        idle: Duration,
        total: Option<Pin<Box<Sleep>>>,
    ) -> UpstreamBody {
        let mut body = UpstreamBody {
            incoming,
            lease: Some(lease),
            permit: Some(permit),
            gauge: Some(gauge),
            idle,
            total,
            timer: WaitTimer::default(),
        };
        if body.incoming.is_end_stream() {
            body.finish();
        }
        body
    }

    /// Returns the connection to the pool and ends the request at the upstream. Called when the body is complete.
    fn finish(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.give_back();
        }
        (self.permit, self.gauge, self.total) = (None, None, None);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(total) = &mut self.total
            && total.as_mut().poll(cx).is_ready()
        {
            self.lease = None;
            return Poll::Ready(Some(Err("the response took longer than the total timeout".into())));
        }
        let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(cx) else {
            ready!(self.timer.poll_waiting(cx, self.idle));
            self.lease = None;
            return Poll::Ready(Some(Err("the upstream did not send the next bytes of its response in time".into())));
        };
        self.timer.reset();
        match &frame {
            Some(Ok(_)) if !self.incoming.is_end_stream() => {}
            Some(Ok(_)) | None => self.finish(),
            Some(Err(_)) => self.lease = None,
        }
        Poll::Ready(frame.map(|frame| frame.map_err(BoxError::from)))
    }
}

impl GatewayBody {
    /// Attaches values that are dropped with the body: the guard of the request, and its entry in the access log.
    pub(super) fn until_end(self, in_flight: Option<InFlight>, log: Option<Arc<LogEntry>>) -> GatewayBody {
        GatewayBody { _in_flight: in_flight, log, ..self }
    }

    fn new(content: Content) -> GatewayBody {
        GatewayBody { content, _in_flight: None, log: None }
    }
}

impl From<Bytes> for GatewayBody {
    fn from(bytes: Bytes) -> GatewayBody {
        GatewayBody::new(Content::Own(Some(bytes).filter(|bytes| !bytes.is_empty())))
    }
}

impl From<UpstreamBody> for GatewayBody {
    fn from(body: UpstreamBody) -> GatewayBody {
        GatewayBody::new(Content::Upstream(Box::new(body)))
    }
}

impl Body for GatewayBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = match &mut self.content {
            Content::Own(bytes) => bytes.take().map(|bytes| Ok(Frame::data(bytes))),
            Content::Upstream(body) => ready!(body.poll(cx)),
        };
        if let (Some(log), Some(Ok(frame))) = (&self.log, &frame) {
            log.sent(frame.data_ref().map_or(0, Bytes::len));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Own(bytes) => bytes.is_none(),
            Content::Upstream(body) => body.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Own(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Content::Upstream(body) => body.incoming.size_hint(),
        }
    }
}
