//! Forwards an admitted request to its upstream.
//!
//! ```text
//!   route ─▶ slot at the upstream ─▶ server ─▶ connection ─▶ send ─▶ head of the response ─▶ body or tunnel
//!              503 if all are            ▲          │           │
//!              taken                     │          ▼           ▼
//!                                        ├── cannot connect     connection was closed before the request was written
//!                                        └────── another server, or a new connection: the request reached no upstream
//! ```
//!
//! **Retries.** A request is sent again only if it reached no upstream: no connection could be opened, or hyper returned
//! it because the connection was closed before anything was written. There is one exception: a reused connection that
//! ends after the request was written and before any byte of a response. Most likely the server closed it because it was
//! idle. A request with a safe method and without a body, such as GET, is then sent once more, on a new connection.
//!
//! | response of the gateway | reason |
//! |---|---|
//! | 400 | the client's body is malformed or incomplete |
//! | 408 | the client did not send its body in time |
//! | 404 | no upstream has a route for the request |
//! | 502 | no server can be reached, the connection ended without a response, or the response contradicts itself |
//! | 429 | the client address has `max_concurrent_per_address` requests at the upstream |
//! | 503 | the upstream has `max_concurrent` requests, and the queue is full or the wait in it was too long |
//! | 504 | a timeout of the upstream expired |

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, HOST, RETRY_AFTER, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderValue, Request, Response, StatusCode, Uri, Version};
use hyper::body::{Body, Incoming};
use smallvec::SmallVec;
use tidegate::engine::{Companion, Engine};
use tidegate::gateway::GatewayBounds;
use tidegate::layer::KeepCharge;
use tidegate::rules::RequestView;
use tidegate::{Decision, Source};
use tokio::time::Instant;
use tower_service::Service;

use super::access_log::LogEntry;
use super::body::{BodyState, GatewayBody, Progress, RequestBody, UpstreamBody};
use super::connection::GatewayClient;
use super::connector::ConnectError;
use super::deadlines::{Allowance, Deadlines, ResponseLimits};
use super::headers;
use super::pool::Lease;
use super::tunnel::Tunnel;
use super::upstream::{Server, Upstream, Upstreams};
use crate::listeners::http::connection::problem;
use crate::metrics::UpstreamFailure;

/// The service that forwards requests. Clones share everything.
#[derive(Clone)]
pub(super) struct Proxy(Arc<Inner>);

struct Inner {
    /// Its rules contain the trusted proxies.
    engine: Engine,
    bounds: GatewayBounds,
    deadlines: Arc<Deadlines>,
}

/// The reason why a request got no response from an upstream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ProxyError {
    NoRoute,
    /// The upstream has as many requests as it can handle, and its queue is full or too slow.
    Overloaded,
    /// The client address has its share of the slots.
    AddressLimit,
    /// No server can be reached. Nothing was sent.
    Unreachable,
    /// The connection ended without a response.
    Closed,
    /// The response is malformed or contradicts itself.
    BadResponse,
    Timeout,
    /// The client did not send its body in time.
    ClientTimeout,
    /// The body of the client is malformed or incomplete.
    ClientBody,
}

impl ProxyError {
    /// Returns the status, a code for programs, a sentence for people, and the reason for metrics: `None` if the failure
    /// was not caused by an upstream.
    fn describe(self) -> (StatusCode, &'static str, &'static str, Option<UpstreamFailure>) {
        let bad_gateway = |message, failure| (StatusCode::BAD_GATEWAY, "bad_gateway", message, Some(failure));
        match self {
            ProxyError::NoRoute => {
                (StatusCode::NOT_FOUND, "no_upstream", "no upstream has a route for this host and path", None)
            }
            ProxyError::Overloaded => {
                let message = "the upstream has too many concurrent requests";
                (StatusCode::SERVICE_UNAVAILABLE, "overloaded", message, Some(UpstreamFailure::Overloaded))
            }
            ProxyError::AddressLimit => {
                let (error, failure) = ("too_many_concurrent_requests", Some(UpstreamFailure::AddressLimit));
                let message = "this client address has too many concurrent requests";
                (StatusCode::TOO_MANY_REQUESTS, error, message, failure)
            }
            ProxyError::Unreachable => bad_gateway("the upstream cannot be reached", UpstreamFailure::Unreachable),
            ProxyError::Closed => {
                bad_gateway("the upstream closed the connection without a response", UpstreamFailure::Closed)
            }
            ProxyError::BadResponse => {
                bad_gateway("the response of the upstream is malformed", UpstreamFailure::BadResponse)
            }
            ProxyError::Timeout => {
                let message = "the upstream did not respond in time";
                (StatusCode::GATEWAY_TIMEOUT, "gateway_timeout", message, Some(UpstreamFailure::Timeout))
            }
            ProxyError::ClientTimeout => {
                (StatusCode::REQUEST_TIMEOUT, "timeout", "the body did not arrive in time", None)
            }
            ProxyError::ClientBody => {
                (StatusCode::BAD_REQUEST, "bad_request", "the body is malformed or incomplete", None)
            }
        }
    }

    fn response(self) -> Response<GatewayBody> {
        let (status, error, message, _) = self.describe();
        let mut response = problem(status, error, message);
        match self {
            ProxyError::Overloaded | ProxyError::AddressLimit => {
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            ProxyError::ClientTimeout | ProxyError::ClientBody => {
                response.extensions_mut().insert(KeepCharge);
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response.map(GatewayBody::from)
    }
}

impl Proxy {
    /// Creates a service that forwards a request to the upstreams of the rules that have admitted it. The rules of
    /// `engine` contain the trusted proxies.
    pub(super) fn new(engine: Engine, bounds: GatewayBounds, deadlines: Arc<Deadlines>) -> Proxy {
        Proxy(Arc::new(Inner { engine, bounds, deadlines }))
    }
}

impl Service<Request<Incoming>> for Proxy {
    type Response = Response<GatewayBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<GatewayBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let inner = self.0.clone();
        Box::pin(async move { Ok(inner.forward(request).await.unwrap_or_else(|error| error.response())) })
    }
}

impl Inner {
    /// Finds the upstream of a request, forwards it, and counts the result.
    async fn forward(&self, request: Request<Incoming>) -> Result<Response<GatewayBody>, ProxyError> {
        let upstreams = request.extensions().get::<Companion>().and_then(|rules| rules.downcast_ref::<Upstreams>());
        let upstream = upstreams.and_then(|upstreams| upstreams.find(&RequestView::of(&request)));
        let upstream = upstream.ok_or(ProxyError::NoRoute)?.clone();
        let log = request.extensions().get::<Arc<LogEntry>>().cloned();
        let began = Instant::now();
        let forwarded = self.forward_to(&upstream, request).await;
        let took = began.elapsed();
        match &forwarded {
            Ok(_) => upstream.stats.record(took),
            Err(error) => {
                let (.., failure) = error.describe();
                failure.into_iter().for_each(|failure| upstream.stats.count_error(failure));
            }
        }
        if let Some(log) = log {
            log.forwarded(&upstream.settings.name, forwarded.is_ok().then_some(took));
        }
        forwarded
    }

    /// Forwards a request to an upstream and returns the head of the response; its body is streamed.
    async fn forward_to(
        &self,
        upstream: &Upstream,
        mut request: Request<Incoming>,
    ) -> Result<Response<GatewayBody>, ProxyError> {
        let timeouts = upstream.settings.timeouts;
        let total = Instant::now() + timeouts.total;
        let client = request.extensions().get::<Arc<GatewayClient>>().cloned().expect("the listener sets the client");
        let slot = upstream.admit(self.address_of(&client, &request)).await?;
        let gauge = upstream.stats.begin();

        let upgrade = headers::upgrade_of(request.version(), request.headers());
        let asked = upgrade.clone();
        let on_upgrade = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
        let replaces_limits = request.extensions().get::<Decision>().is_some_and(writes_headers);
        let (request, progress) = self.outgoing(request, &client, upgrade);

        let exchanged = pin!(exchange(upstream, request, progress.as_deref()));
        let exchanged = tokio::time::timeout_at(total, exchanged).await;
        let (mut response, lease) = exchanged.unwrap_or(Err(ProxyError::Timeout))?;

        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let is_asked_for = asked.is_some_and(|asked| headers::names_protocol(&asked, response.headers()));
            let on_upgrade = on_upgrade.filter(|_| is_asked_for).ok_or(ProxyError::BadResponse)?;
            // The slot is dropped: tunnels are long-lived and mostly idle, and the listener's connection limit bounds
            // them.
            let tunnel =
                Tunnel { client: on_upgrade, upstream: hyper::upgrade::on(&mut response), idle: timeouts.idle, gauge };
            client.set_tunnel(tunnel);
            return Ok(switching(response, replaces_limits));
        }
        if headers::is_contradictory(response.headers()) {
            return Err(ProxyError::BadResponse);
        }
        let (head, incoming) = response.into_parts();
        let limits = ResponseLimits { total: Some(total), idle: timeouts.idle, rate_min: self.bounds.body_rate_min };
        let deadline = self.deadlines.add(limits, client.end_response(), Some(upstream.stats.clone()));
        let mut response = Response::new(UpstreamBody::new(incoming, lease, slot, gauge, deadline).into());
        (*response.status_mut(), *response.headers_mut()) = (head.status, head.headers);
        headers::to_client(response.headers_mut(), replaces_limits);
        if is_aborted(response.status(), progress.as_deref()) {
            response.extensions_mut().insert(KeepCharge);
        }
        Ok(response)
    }

    /// Returns the address whose share of the slots a request takes, or `None` if it is that of a trusted proxy.
    fn address_of<B>(&self, client: &GatewayClient, request: &Request<B>) -> Option<IpAddr> {
        let rules = self.engine.rules();
        let proxies = rules.identifier().proxies();
        let address = proxies.client_address(client.peer().ip(), request.headers());
        (!proxies.trusts(address)).then_some(address)
    }

    /// Builds the request to the upstream. Its `Host` is that of the client.
    ///
    /// Also returns the progress of its body, or `None` if it has none.
    fn outgoing(
        &self,
        request: Request<Incoming>,
        client: &GatewayClient,
        upgrade: Option<HeaderValue>,
    ) -> (Request<RequestBody>, Option<Arc<Progress>>) {
        let (mut head, incoming) = request.into_parts();
        let rules = self.engine.rules();
        let keeps_underscores = self.bounds.underscores_in_headers;
        headers::to_upstream(&mut head, client, rules.identifier().proxies(), keeps_underscores, upgrade);
        if head.uri.authority().is_some() {
            head.uri = head.uri.path_and_query().cloned().map_or_else(Uri::default, Uri::from);
        }
        head.version = Version::HTTP_11;
        head.extensions.clear();
        let length = incoming.size_hint().exact();
        let forwarding_header = rules.identifier().proxies().header().name();
        let allowance = Allowance::new(self.bounds.body_timeout, self.bounds.body_rate_min);
        let (body, progress) = RequestBody::new(incoming, allowance, forwarding_header, keeps_underscores);
        match (&body, length) {
            // Rewritten, because servers interpret a number such as `010` differently.
            (_, Some(length)) if head.headers.contains_key(CONTENT_LENGTH) => {
                head.headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
            }
            // For GET, hyper sends a body of unknown length only if this header is set.
            (RequestBody::Client(_), None) => {
                head.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
            }
            _ => {}
        }
        (Request::from_parts(head, body), progress)
    }
}

/// Returns whether the client aborted its request, or the upstream answers that the client is too slow.
fn is_aborted(status: StatusCode, progress: Option<&Progress>) -> bool {
    match progress.map(Progress::state) {
        Some(BodyState::TimedOut | BodyState::Broken) => true,
        Some(BodyState::Streaming) => status == StatusCode::REQUEST_TIMEOUT,
        Some(BodyState::Complete) | None => false,
    }
}

/// Returns whether the layer writes rate-limit headers for a decision.
fn writes_headers(decision: &Decision) -> bool {
    decision.source != Source::None && !decision.limits.is_empty()
}

/// Returns the response that lets the client switch to the protocol of an upgrade.
fn switching(response: Response<Incoming>, replaces_limits: bool) -> Response<GatewayBody> {
    let mut head = response.into_parts().0;
    let protocol = head.headers.get(UPGRADE).cloned();
    headers::to_client(&mut head.headers, replaces_limits);
    let mut response = Response::new(GatewayBody::from(Bytes::new()));
    (*response.status_mut(), *response.headers_mut()) = (StatusCode::SWITCHING_PROTOCOLS, head.headers);
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = protocol {
        response.headers_mut().insert(UPGRADE, protocol);
    }
    response
}

/// Sends a request to one of the servers and returns the head of the response, with its connection.
async fn exchange(
    upstream: &Upstream,
    mut request: Request<RequestBody>,
    progress: Option<&Progress>,
) -> Result<(Response<Incoming>, Lease), ProxyError> {
    let settings = &upstream.settings;
    let is_repeatable = progress.is_none() && request.method().is_safe();
    // An HTTP/1.0 client may send no `Host`.
    let sets_host = !settings.preserve_host || !request.headers().contains_key(HOST);
    let mut tried: SmallVec<[usize; 4]> = SmallVec::new();
    let (mut last_error, mut times_sent) = (ProxyError::Unreachable, 0);
    'servers: while let Some((index, server)) = upstream.pick(&tried) {
        if sets_host {
            request.headers_mut().insert(HOST, server.authority.clone());
        }
        let mut may_reuse = true;
        loop {
            let reused = if may_reuse { server.reuse(is_repeatable) } else { None };
            let mut lease = match reused {
                Some(lease) => lease,
                None => match server.connect(settings.timeouts.connect).await {
                    Ok(lease) => lease,
                    Err(error) => {
                        upstream.record_failure(server, &error);
                        last_error = match error {
                            ConnectError::Timeout(_) => ProxyError::Timeout,
                            ConnectError::Io(_) | ConnectError::Handshake(_) => ProxyError::Unreachable,
                        };
                        tried.push(index);
                        continue 'servers;
                    }
                },
            };
            let copy = (is_repeatable && lease.is_reused).then(|| copy_of(&request));
            if times_sent > 0 {
                upstream.stats.count_retry();
            }
            times_sent += 1;
            match send(&mut lease, request, progress, settings.timeouts.header).await {
                Ok(response) => {
                    server.record_success();
                    return Ok((response, lease));
                }
                Err(SendError::NotSent(returned)) => {
                    request = *returned;
                    if !lease.is_reused {
                        upstream.record_failure(server, &"it closed a new connection before the request was sent");
                        last_error = ProxyError::Closed;
                        tried.push(index);
                        continue 'servers;
                    }
                }
                Err(SendError::Closed(error)) => {
                    // A malformed response is an answer: the server has seen the request.
                    let Some(copy) = copy.filter(|_| !error.is_parse()) else {
                        return Err(closed(upstream, server, error, progress));
                    };
                    request = copy;
                    may_reuse = false;
                }
                Err(SendError::Timeout) => {
                    upstream.record_failure(server, &"it did not respond in time");
                    return Err(ProxyError::Timeout);
                }
            }
        }
    }
    Err(last_error)
}

/// Returns the reason why a connection ended without a response, and records a failure if the server caused it.
fn closed(upstream: &Upstream, server: &Server, error: hyper::Error, progress: Option<&Progress>) -> ProxyError {
    match progress.map(Progress::state) {
        Some(BodyState::TimedOut) => ProxyError::ClientTimeout,
        Some(BodyState::Broken) => ProxyError::ClientBody,
        Some(BodyState::Streaming | BodyState::Complete) | None => {
            upstream.record_failure(server, &error);
            if error.is_parse() { ProxyError::BadResponse } else { ProxyError::Closed }
        }
    }
}

/// Returns a copy of a request without a body.
fn copy_of(request: &Request<RequestBody>) -> Request<RequestBody> {
    let mut copy = Request::new(RequestBody::Empty);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    copy
}

/// The reason why a connection returned no response.
enum SendError {
    /// Nothing was written.
    NotSent(Box<Request<RequestBody>>),
    /// The request was written, at least in part.
    Closed(hyper::Error),
    Timeout,
}

/// Sends a request on a connection and returns the head of the response.
///
/// The head must arrive within `timeout` after the upstream has accepted the last piece of the body.
async fn send(
    lease: &mut Lease,
    request: Request<RequestBody>,
    progress: Option<&Progress>,
    timeout: Duration,
) -> Result<Response<Incoming>, SendError> {
    let mut sending = pin!(lease.sender.try_send_request(request));
    let mut since = Instant::now();
    loop {
        match tokio::time::timeout_at(since + timeout, sending.as_mut()).await {
            Ok(Ok(response)) => return Ok(response),
            Ok(Err(mut error)) => {
                return Err(match error.take_message() {
                    Some(request) => SendError::NotSent(Box::new(request)),
                    None => SendError::Closed(error.into_error()),
                });
            }
            Err(_) => match progress.map(Progress::last).filter(|last| *last > since) {
                Some(last) => since = last,
                None => return Err(SendError::Timeout),
            },
        }
    }
}
