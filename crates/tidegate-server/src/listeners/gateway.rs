//! The gateway: a reverse proxy that refuses requests over the limit before they reach an upstream.
//!
//! **Problem.** A service that cannot be changed needs limits. A proxy in front of it must refuse requests cheaply, and
//! must not add weaknesses of its own: requests that the proxy and the upstream interpret differently (smuggling), slow
//! clients that use up the connections of the upstream, or retries that execute a request twice.
//!
//! **Idea.** The rules are decided by the same [`RateLimitLayer`] that Rust services use, so bans, shields, plans,
//! bodies, `charge` and shadow mode work as on every other endpoint. Behind the layer is a small service that forwards
//! the request. It runs only for admitted requests, so a refusal opens no connection and reads no body.
//!
//! ```text
//!   accept.rs ─▶ GatewayListener::serve        one connection: HTTP/1.1, or HTTP/2 by ALPN or by its preface
//!     connection.rs  client timeouts, lingering close, tunnels
//!     ─▶ validate.rs     400, 405, 414, 417, 431: requests that servers may interpret differently
//!     ─▶ RateLimitLayer  403, 414, 429, 503: bans, shields, rules
//!     ─▶ proxy.rs        finds the upstream, gets a connection, sends, retries
//!          upstream.rs   round robin over servers, ejection, limit on concurrent requests
//!          pool.rs       idle connections of a server
//!          connector.rs  TCP and TLS
//!          headers.rs    which headers are forwarded, in both directions
//!          body.rs       streams with timeouts, in both directions
//!          deadlines.rs ends responses whose time is over, whether or not the client accepts data
//!          tunnel.rs     upgraded connections (WebSocket)
//!     access_log.rs  one line per request, if enabled
//! ```
//!
//! **Never forwarded as received.** hyper parses each request, and another instance of hyper writes a new one. The body
//! gets new framing, by `Content-Length` or by chunks, never by both. So an upstream cannot see a request that was not
//! decided. hyper accepts some requests that other servers reject; `validate.rs` lists them.
//!
//! **Why not hyper-util's client.** It gets a connection and sends the request in one step, and a request that fails is
//! lost with its body. Here, getting a connection is a separate step. A request for which no connection could be
//! opened, or that hyper returned because its connection was already closed, is sent again, with its body untouched.
//!
//! **Back-pressure.** Bodies are passed on frame by frame. A frame is read only after the other side has accepted the
//! previous one, so even a large body needs memory for only a few frames.

mod access_log;
mod body;
mod connection;
mod connector;
mod deadlines;
mod headers;
mod pool;
mod proxy;
mod tunnel;
mod upstream;
mod validate;

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::header::CONNECTION;
use http::{HeaderValue, Request, Response, Version};
use hyper::body::Incoming;
use tidegate::engine::Engine;
use tidegate::gateway::{AccessLogFormat, GatewayBounds, GatewaySettings};
use tidegate::layer::{FromBytes, RateLimit, RateLimitLayer, ResponseFuture};
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use self::access_log::{AccessLog, LogEntry};
use self::body::GatewayBody;
use self::connection::{GatewayClient, InFlight};
use self::deadlines::Deadlines;
use self::proxy::Proxy;
pub(crate) use self::upstream::Upstreams;
pub use self::upstream::{UpstreamError, check_upstream};
use self::validate::Invalid;
use crate::decider::Decider;
use crate::listener::{
    AddressSetting, ConnectionContext, Listener, ListenerKind, PeerPolicy, Role, ServeFuture, ServerState,
};
use crate::listeners::http::connection::OVER_LIMIT_RESPONSE;
use crate::metrics::ListenerStats;
use crate::stream::ClientStream;
use crate::tls::Alpn;

/// The gateway's listener.
pub static GATEWAY: ListenerKind = ListenerKind {
    name: "gateway",
    help: "the gateway, which forwards admitted requests to `[[upstreams]]` in the configuration file",
    default_address: "off",
    address_setting: Some(AddressSetting {
        help: "`listen` of `[gateway]`",
        read: |settings| settings.listen.as_deref(),
    }),
    role: Role::Service,
    decides_for_others: false,
    secret: None,
    example: "curl -i {url}/",
    build: |state| Arc::new(GatewayListener::build(state)),
};

/// The statuses that the gateway counts by name: those that it sends itself, and those of its upstreams.
const ERRORS: &[&str] = &[
    "429", "400", "401", "403", "404", "405", "408", "409", "413", "414", "417", "421", "422", "431", "500", "502",
    "503", "504",
];

/// The upstreams of a gateway, and the limits of its listener. Passed to
/// [`ServerOptions::gateway`](crate::ServerOptions::gateway). By default, there are no upstreams.
#[derive(Clone, Debug, Default)]
pub struct Gateway {
    bounds: GatewayBounds,
    proxy_protocol: bool,
    access_log: Option<AccessLogFormat>,
    upstreams: Arc<Upstreams>,
}

impl Gateway {
    /// Prepares the upstreams of these settings. Opens no connection.
    ///
    /// Reads the certificate authorities of the operating system if a server has the scheme `https` and its upstream
    /// has no authorities of its own.
    ///
    /// # Errors
    /// If the certificate authorities of an upstream cannot be used.
    pub fn new(settings: &GatewaySettings) -> Result<Gateway, UpstreamError> {
        let upstreams = Arc::new(Upstreams::new(settings, None)?);
        let GatewaySettings { bounds, proxy_protocol, access_log, .. } = *settings;
        Ok(Gateway { bounds, proxy_protocol, access_log, upstreams })
    }
}

/// A listener that forwards the requests that the rules admit.
pub(crate) struct GatewayListener {
    service: RateLimit<Proxy>,
    engine: Engine,
    bounds: GatewayBounds,
    proxy_protocol: bool,
    idle: Duration,
    deadlines: Arc<Deadlines>,
    stats: Arc<ListenerStats>,
    log: Option<Arc<AccessLog>>,
}

impl GatewayListener {
    /// Creates the listener with the rules and the upstreams of `shared`. Without rules, all requests are admitted.
    ///
    /// Must be called in a tokio runtime with timers.
    pub(crate) fn build(shared: &ServerState) -> GatewayListener {
        let (gateway, engine) = (shared.options.gateway.clone(), shared.decider.engine().clone());
        engine.set_companion(gateway.upstreams);
        let of_metrics = engine.clone();
        let stats = move || Upstreams::of(&of_metrics).map(|upstreams| upstreams.stats()).unwrap_or_default();
        shared.metrics.set_upstreams(stats);
        let deadlines = Deadlines::start();
        let proxy = Proxy::new(engine.clone(), gateway.bounds, deadlines.clone());
        let log = gateway.access_log.map(|format| AccessLog::new(format, engine.clone()));
        GatewayListener {
            service: layer(engine.clone(), shared.decider.clone()).layer(proxy),
            engine,
            bounds: gateway.bounds,
            proxy_protocol: gateway.proxy_protocol,
            idle: shared.options.bounds.http_idle,
            deadlines,
            stats: ListenerStats::new(GATEWAY.name, ERRORS, &[], false),
            log,
        }
    }

    /// Answers a request: validates it, decides it by the rules, and forwards it if it is admitted.
    fn handle(self: Arc<Self>, mut request: Request<Incoming>, client: &Arc<GatewayClient>) -> RequestFuture {
        let began = Instant::now();
        let in_flight = client.begin(request.version() == Version::HTTP_2);
        let is_http1 = request.version() <= Version::HTTP_11;
        let log = self.log.as_ref().map(|log| log.begin(&request, client.peer().ip(), began));
        let source = match validate::validate(&request, &self.bounds) {
            Ok(()) => {
                request.extensions_mut().insert(client.clone());
                if let Some(log) = &log {
                    request.extensions_mut().insert(log.clone());
                }
                ResponseSource::Decided(self.service.clone().call(request))
            }
            Err(invalid) => ResponseSource::Invalid(invalid),
        };
        RequestFuture { listener: self, source, began, is_http1, in_flight: Some(in_flight), log }
    }
}

/// A future that handles one request and resolves to the response.
///
/// A named type instead of an `async fn`, so that hyper holds it without a box and the request is moved only once.
struct RequestFuture {
    listener: Arc<GatewayListener>,
    source: ResponseSource,
    began: Instant,
    is_http1: bool,
    /// Moved into the body of the response.
    in_flight: Option<InFlight>,
    log: Option<Arc<LogEntry>>,
}

/// Where the response to a request comes from.
enum ResponseSource {
    /// The rate-limit layer, and an upstream if it admits the request.
    Decided(ResponseFuture<GatewayBody, Infallible>),
    /// The request is rejected before it is decided.
    Invalid(Invalid),
}

impl Future for RequestFuture {
    type Output = Result<Response<GatewayBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut response = match &mut this.source {
            ResponseSource::Decided(decided) => ready!(Pin::new(decided).poll(cx))?,
            ResponseSource::Invalid(invalid) => invalid.response(),
        };
        let GatewayListener { stats, .. } = &*this.listener;
        stats.request_times.record(this.began.elapsed());
        stats.errors.count_http(response.status());
        let in_flight = this.in_flight.take();
        let is_last = this.is_http1 && in_flight.as_ref().is_some_and(InFlight::is_draining);
        if is_last && !response.headers().contains_key(CONNECTION) {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let log = this.log.take();
        if let Some(log) = &log {
            log.responded(response.status());
        }
        let mut response = response.map(|body| body.until_end(in_flight, log));
        if !this.is_http1 {
            response.body_mut().end_within(&this.listener.deadlines, this.listener.idle);
        }
        Poll::Ready(Ok(response))
    }
}

/// Returns the layer that decides requests by `engine`. The peer's address is that of the [`GatewayClient`] in the extensions
/// of a request. `decider` counts each outcome, and the access log records it.
fn layer(engine: Engine, decider: Decider) -> RateLimitLayer<FromBytes> {
    let peer = |extensions: &http::Extensions| extensions.get::<Arc<GatewayClient>>().map(|client| client.peer().ip());
    RateLimitLayer::new(engine, peer).on_outcome(move |extensions, outcome, took| {
        decider.record_by_rules(outcome, took);
        if let Some(log) = extensions.get::<Arc<LogEntry>>() {
            log.decided(outcome);
        }
    })
}

impl Listener for GatewayListener {
    fn stats(&self) -> &Arc<ListenerStats> {
        &self.stats
    }

    fn over_limit_reply(&self) -> &'static [u8] {
        OVER_LIMIT_RESPONSE
    }

    fn alpn(&self) -> Alpn {
        Alpn::Http
    }

    /// Trusted proxies send the address of the client if the PROXY protocol is enabled, and may have any number of
    /// connections. The connections of all other peers are limited.
    fn peer_policy(&self, peer: IpAddr) -> PeerPolicy {
        if self.engine.rules().identifier().proxies().trusts(peer.to_canonical()) {
            PeerPolicy { expects_proxy_header: self.proxy_protocol, connections_max: None }
        } else {
            let connections_max = Some(self.bounds.connections_per_address);
            PeerPolicy { expects_proxy_header: false, connections_max }
        }
    }

    fn serve(self: Arc<Self>, stream: ClientStream, peer: SocketAddr, context: ConnectionContext) -> ServeFuture {
        Box::pin(connection::serve(self, stream, peer, context))
    }
}
