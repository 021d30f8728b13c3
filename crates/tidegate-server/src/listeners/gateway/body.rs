//! Bodies of requests and responses: streams that are forwarded frame by frame, with a timeout for each frame.
//!
//! The timer of a request body runs only while the body waits for the client. While the upstream accepts nothing, the
//! body is not polled, and the `header` timeout applies. A response body has no timer, because hyper polls it only when
//! the client accepts data: its deadline is in the table of `deadlines.rs`.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderName;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep};

use super::access_log::LogEntry;
use super::connection::InFlight;
use super::deadlines::{Allowance, Deadline, Deadlines, ResponseLimits};
use super::headers;
use super::pool::Lease;
use super::upstream::Slot;
use crate::listener::BoxError;
use crate::metrics::InFlightGauge;

/// The maximum size of a piece in which a response body is passed on. A client that accepts a piece within its
/// [`Allowance`] is fast enough, so the size must not exceed what the minimum rate transfers in the idle time.
const PIECE_BYTES: usize = 16 * 1024;

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
    allowance: Allowance,
    /// Runs while the client sends nothing.
    timer: Option<Pin<Box<Sleep>>>,
    progress: Arc<Progress>,
    /// The header in which trusted proxies report the client's address.
    forwarding_header: HeaderName,
    /// Whether trailers with underscores in their names are forwarded.
    keeps_underscores: bool,
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
    /// Wraps the body of a request. The client may take as long as `allowance`.
    ///
    /// `forwarding_header` is the header in which trusted proxies report the client's address. It is removed from
    /// trailers, and so are names with underscores, unless `keeps_underscores`.
    ///
    /// Also returns its progress, or `None` if there is no body.
    pub(super) fn new(
        incoming: Incoming,
        allowance: Allowance,
        forwarding_header: &HeaderName,
        keeps_underscores: bool,
    ) -> (RequestBody, Option<Arc<Progress>>) {
        if incoming.is_end_stream() {
            return (RequestBody::Empty, None);
        }
        let state = AtomicU8::new(BodyState::Streaming as u8);
        let progress = Arc::new(Progress { began: Instant::now(), last_ms: AtomicU64::new(0), state });
        let (timer, forwarding_header) = (None, forwarding_header.clone());
        let progress_of_body = progress.clone();
        let body =
            ClientBody { incoming, allowance, timer, progress: progress_of_body, forwarding_header, keeps_underscores };
        (RequestBody::Client(Box::new(body)), Some(progress))
    }
}

impl ClientBody {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(cx) else {
            let left = self.allowance.left();
            ready!(self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(left))).as_mut().poll(cx));
            self.progress.set(BodyState::TimedOut);
            return Poll::Ready(Some(Err("the client did not send the body in time".into())));
        };
        if let Some(timer) = self.timer.take() {
            self.allowance.set_left(timer.deadline().saturating_duration_since(Instant::now()));
        }
        match frame {
            Some(Ok(frame)) => {
                self.allowance.transferred(frame.data_ref().map_or(0, Bytes::len));
                let is_last = frame.is_trailers() || self.incoming.is_end_stream();
                self.progress.set(if is_last { BodyState::Complete } else { BodyState::Streaming });
                let frame = match frame.into_trailers() {
                    Ok(trailers) => Frame::trailers(headers::request_trailers(
                        trailers,
                        &self.forwarding_header,
                        self.keeps_underscores,
                    )),
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
    in_flight: Option<InFlight>,
    log: Option<Arc<LogEntry>>,
    /// The deadline of a response of the gateway itself, if it has one.
    deadline: Option<Deadline>,
}

enum Content {
    Own(Option<Bytes>),
    Upstream(Box<UpstreamBody>),
}

/// The body of a response that an upstream sends.
pub(super) struct UpstreamBody {
    incoming: Incoming,
    /// The rest of the last frame, which is passed on in pieces.
    rest: Bytes,
    /// The connection, which is returned to the pool after the whole body has been received.
    lease: Option<Lease>,
    /// The request's slot among the `max_concurrent` requests of the upstream.
    slot: Option<Slot>,
    gauge: Option<InFlightGauge>,
    /// The time at which the response is ended. It applies until the client has accepted everything.
    deadline: Deadline,
}

impl UpstreamBody {
    /// Creates a body that is ended when `deadline` passes.
    pub(super) fn new(
        incoming: Incoming,
        lease: Lease,
        slot: Slot,
        gauge: InFlightGauge,
        deadline: Deadline,
    ) -> UpstreamBody {
        let (lease, slot, gauge) = (Some(lease), Some(slot), Some(gauge));
        let mut body = UpstreamBody { incoming, rest: Bytes::new(), lease, slot, gauge, deadline };
        if body.incoming.is_end_stream() {
            body.finish();
        }
        body
    }

    /// Returns the connection to the pool and ends the request at the upstream. Called when the body was received.
    fn finish(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.give_back();
        }
        (self.slot, self.gauge) = (None, None);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.deadline.client_is_ready();
        if self.rest.is_empty() {
            let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(cx) else {
                self.deadline.wait_for_upstream();
                return Poll::Pending;
            };
            match &frame {
                Some(Ok(_)) if !self.incoming.is_end_stream() => {}
                Some(Ok(_)) | None => self.finish(),
                Some(Err(_)) => self.lease = None,
            }
            match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => self.rest = data,
                Some(Ok(Err(trailers))) => {
                    self.deadline.wait_for_client(0);
                    return Poll::Ready(Some(Ok(trailers)));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None => return Poll::Ready(None),
            }
        }
        let piece = self.rest.split_to(self.rest.len().min(PIECE_BYTES));
        self.deadline.wait_for_client(piece.len());
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, mut hint) = (self.rest.len() as u64, self.incoming.size_hint());
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(rest));
        }
        hint.set_lower(hint.lower().saturating_add(rest));
        hint
    }
}

impl GatewayBody {
    /// Attaches values that are dropped with the body: the guard of the request, and its entry in the access log.
    pub(super) fn until_end(self, in_flight: Option<InFlight>, log: Option<Arc<LogEntry>>) -> GatewayBody {
        GatewayBody { in_flight, log, ..self }
    }

    /// Ends a response of the gateway itself after `time` if the client has not accepted it by then. Does nothing if the
    /// body is empty or comes from an upstream, which has its own deadline.
    pub(super) fn end_within(&mut self, deadlines: &Arc<Deadlines>, time: Duration) {
        if let (Content::Own(Some(_)), Some(in_flight)) = (&self.content, &self.in_flight) {
            let limits = ResponseLimits { total: None, idle: time, rate_min: 0 };
            self.deadline = Some(deadlines.add(limits, in_flight.client().end_response(), None));
        }
    }

    fn new(content: Content) -> GatewayBody {
        GatewayBody { content, in_flight: None, log: None, deadline: None }
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
            Content::Upstream(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Own(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Content::Upstream(body) => body.size_hint(),
        }
    }
}
