//! The Tower layer: rules in front of any HTTP service.
//!
//! ```
//! use std::net::SocketAddr;
//!
//! use axum::Router;
//! use axum::routing::post;
//! use tollgate::Limiter;
//! use tollgate::config::{Config, Format};
//! use tollgate::engine::Engine;
//! use tollgate::layer::RateLimitLayer;
//!
//! let rules = Config::from_text(
//!     r#"
//!     [[rules]]
//!     name = "shorten"
//!     match = { methods = ["POST"], path = "/shorten" }
//!     by = ["ip"]
//!     limits = ["10/min"]
//!     "#,
//!     Format::Toml,
//! )?
//! .rules;
//! let app: Router = Router::new()
//!     .route("/shorten", post(|| async { "…" }))
//!     .layer(RateLimitLayer::axum(Engine::new(Limiter::memory(), rules)));
//! // The layer needs to know the other end of the socket:
//! let service = app.into_make_service_with_connect_info::<SocketAddr>();
//! # drop(service);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A refusal is a *response*; the inner service's error type stays as it is. The decision stands in the request's extensions, and its
//! numbers on every response. A leaky bucket's wait is waited; who would wait longer than a bound is refused. What a rule gives
//! back it gives back when the head of the response is known, or when the inner service returns an error, which is a failure. A request
//! whose future is dropped before that (the client left, an outer timeout fired, the inner service panicked) keeps its charge.
//!
//! **Whoever is not known is not guessed.** If nothing says where a request came from, it is answered with 500 and an error that says
//! what to do; counting all such requests together would let one client lock out all.
//!
#![doc = include_str!("layer/recipes.md")]

mod body;
mod future;

use std::net::IpAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Extensions, HeaderMap, HeaderValue, Request, Response, Uri};
use tower_layer::Layer;
use tower_service::Service;

pub use self::body::{EmptyBody, FromBytes, MakeBody};
pub use self::future::ResponseFuture;
use self::future::respond;
use crate::answer::{Body, RefusalDetails, Verdict, grpc};
use crate::engine::{Engine, Refusal};
use crate::rules::FindUri;
use tollgate_core::Cost;

/// No request is held longer for a leaky bucket, however long its queue.
const WAIT_MAX_DEFAULT: Duration = Duration::from_secs(30);

/// How to find the other end of a request's socket.
type FindPeer = Arc<dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync>;
/// How many units a request costs; `None` for what the rules say.
type FindCost = Arc<dyn Fn(&http::request::Parts) -> Option<Cost> + Send + Sync>;

/// What the body of a refusal is.
type WriteBody = Arc<dyn Fn(&RefusalDetails<'_>) -> Body + Send + Sync>;

/// Puts rules in front of a service. `M` makes the bodies of refusals; see [`RateLimitLayer::bodies`].
#[derive(Clone)]
pub struct RateLimitLayer<M = FromBytes> {
    gate: Arc<LayerSettings>,
    make_body: M,
}

/// A service with rules in front of it.
#[derive(Clone)]
pub struct RateLimit<S, M = FromBytes> {
    inner: S,
    gate: Arc<LayerSettings>,
    make_body: M,
}

#[derive(Clone)]
struct LayerSettings {
    engine: Engine,
    find_peer: FindPeer,
    find_sent: Option<FindUri>,
    find_cost: Option<FindCost>,
    wait_max: Duration,
    write_body: Option<WriteBody>,
}

impl RateLimitLayer {
    /// A layer that finds the other end of the socket in a request's extensions by this closure.
    pub fn new(engine: Engine, find_peer: impl Fn(&Extensions) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        let find_peer: FindPeer = Arc::new(find_peer);
        let (find_sent, find_cost, write_body) = (None, None, None);
        let gate = LayerSettings { engine, find_peer, find_sent, find_cost, wait_max: WAIT_MAX_DEFAULT, write_body };
        RateLimitLayer { gate: Arc::new(gate), make_body: FromBytes }
    }

    /// A layer for axum, served with `into_make_service_with_connect_info::<SocketAddr>()`. In tests that call the router without
    /// a socket, axum's `MockConnectInfo` around the layer says where requests come from. Rules see the path that the client sent,
    /// inside a nested router too.
    #[cfg(feature = "axum")]
    pub fn axum(engine: Engine) -> Self {
        use std::net::SocketAddr;

        use axum::extract::OriginalUri;
        use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

        let layer = RateLimitLayer::new(engine, |extensions| match extensions.get::<ConnectInfo<SocketAddr>>() {
            Some(ConnectInfo(address)) => Some(address.ip()),
            None => extensions.get::<MockConnectInfo<SocketAddr>>().map(|MockConnectInfo(address)| address.ip()),
        });
        layer.sent_uri(|extensions| extensions.get().map(|OriginalUri(uri)| uri))
    }
}

impl<M> RateLimitLayer<M> {
    /// Rules see the path of the URI that this finds in a request's extensions, instead of the request's own; where it finds none,
    /// the request's own. For services behind something that shortens or rewrites paths: a rule or an exemption means the path
    /// that the client sent. It is asked only if a rule looks at the path. [`RateLimitLayer::axum`] finds axum's `OriginalUri`.
    ///
    /// ```
    /// use axum::extract::OriginalUri;
    /// use tollgate::layer::RateLimitLayer;
    /// # use tollgate::{Limiter, config::{Config, Format}, engine::Engine};
    /// # let text = "[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['60/min']";
    /// # let engine = Engine::new(Limiter::memory(), Config::from_text(text, Format::Toml)?.rules);
    ///
    /// // In axum, with peers that are found in another way: all that comes by a Unix socket is this machine.
    /// let layer = RateLimitLayer::new(engine, |_| Some([127, 0, 0, 1].into()))
    ///     .sent_uri(|extensions| extensions.get::<OriginalUri>().map(|uri| &uri.0));
    /// # drop(layer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn sent_uri(mut self, find_sent: fn(&Extensions) -> Option<&Uri>) -> Self {
        Arc::make_mut(&mut self.gate).find_sent = Some(find_sent);
        self
    }

    /// Requests cost what this says; where it says nothing, what their rules say. What costs 0 only looks, and always passes.
    ///
    /// ```
    /// use tollgate::Cost;
    /// use tollgate::layer::RateLimitLayer;
    /// # use tollgate::{Limiter, config::{Config, Format}, engine::Engine};
    /// # let text = "[[rules]]\nname = 'upload'\nby = ['ip']\nlimits = ['1000/min']";
    /// # let engine = Engine::new(Limiter::memory(), Config::from_text(text, Format::Toml)?.rules);
    ///
    /// // One unit for every 64 KiB of an upload.
    /// let layer = RateLimitLayer::axum(engine).cost(|parts| {
    ///     let bytes: u64 = parts.headers.get("content-length")?.to_str().ok()?.parse().ok()?;
    ///     // At least one: what costs nothing only looks, and is never refused.
    ///     let units = bytes.div_ceil(64 * 1024).max(1);
    ///     Some(Cost::new(u32::try_from(units).unwrap_or(u32::MAX)))
    /// });
    /// # drop(layer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn cost(mut self, find_cost: impl Fn(&http::request::Parts) -> Option<Cost> + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.gate).find_cost = Some(Arc::new(find_cost));
        self
    }

    /// The longest that a leaky bucket may hold a request; 30 s unless said. Who would have to wait longer is refused, and told
    /// when the wait will be short enough.
    #[must_use]
    pub fn wait_at_most(mut self, wait_max: Duration) -> Self {
        Arc::make_mut(&mut self.gate).wait_max = wait_max;
        self
    }

    /// Refuses with bodies of your own, whatever format the rules name. Status and headers stay as they are, except for the body's
    /// type. It is asked when a limit refuses, and when the store is away and a rule says `deny`; a ban is told as ever, and what a gRPC client is
    /// told has no body.
    ///
    /// ```
    /// use tollgate::answer::Body;
    /// use tollgate::layer::RateLimitLayer;
    /// # use tollgate::{Limiter, config::{Config, Format}, engine::Engine};
    /// # let text = "[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['60/min']";
    /// # let engine = Engine::new(Limiter::memory(), Config::from_text(text, Format::Toml)?.rules);
    ///
    /// let layer = RateLimitLayer::axum(engine).body(|refusal| {
    ///     let seconds = refusal.retry_after_secs().unwrap_or(3600);
    ///     Body::new("text/html; charset=utf-8", format!("<p>Please come back in {seconds} s.</p>"))
    /// });
    /// # drop(layer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn body(mut self, write_body: impl Fn(&RefusalDetails<'_>) -> Body + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.gate).write_body = Some(Arc::new(write_body));
        self
    }

    /// Makes the bodies of refusals so: for services whose bodies cannot be made from bytes. tonic's can be empty, and need not be more:
    /// what a gRPC client is told stands in headers.
    ///
    /// ```
    /// use tollgate::layer::{EmptyBody, RateLimitLayer};
    /// use tonic::transport::Server;
    /// use tonic::transport::server::TcpConnectInfo;
    /// # use tollgate::{Limiter, config::{Config, Format}, engine::Engine};
    /// # let text = "[[rules]]\nname = 'rpc'\nby = ['ip']\nlimits = ['600/min']";
    /// # let engine = Engine::new(Limiter::memory(), Config::from_text(text, Format::Toml)?.rules);
    ///
    /// let layer = RateLimitLayer::new(engine, |extensions| {
    ///     extensions.get::<TcpConnectInfo>()?.remote_addr().map(|address| address.ip())
    /// });
    /// let (_, health) = tonic_health::server::health_reporter();
    /// let server = Server::builder().layer(layer.bodies(EmptyBody)).add_service(health);
    /// # drop(server);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn bodies<N>(self, make_body: N) -> RateLimitLayer<N> {
        RateLimitLayer { gate: self.gate, make_body }
    }
}

impl<S, M: Clone> Layer<S> for RateLimitLayer<M> {
    type Service = RateLimit<S, M>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit { inner, gate: self.gate.clone(), make_body: self.make_body.clone() }
    }
}

impl<S, M, ReqBody, ResBody> Service<Request<ReqBody>> for RateLimit<S, M>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    M: MakeBody<ResBody> + Send + 'static,
    ReqBody: Send + 'static,
    ResBody: Send + 'static,
{
    type Response = Response<ResBody>;
    type Error = S::Error;
    type Future = ResponseFuture<ResBody, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<ReqBody>) -> Self::Future {
        let Some(peer) = (self.gate.find_peer)(request.extensions()) else {
            let response = unknown_peer(request.headers()).map(|bytes| self.make_body.make(bytes));
            return ResponseFuture::new(std::future::ready(Ok(response)));
        };
        let mut cost = None;
        if let Some(find_cost) = &self.gate.find_cost {
            let (parts, body) = request.into_parts();
            cost = find_cost(&parts);
            request = Request::from_parts(parts, body);
        }
        // The service that was polled ready is the one to call; its clone takes its place.
        let clone = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, clone);
        ResponseFuture::new(respond(inner, request, peer, cost, self.gate.clone(), self.make_body.clone()))
    }
}

/// Builds the response to a refused request, in its own protocol.
fn refuse<B>(
    refusal: &Refusal,
    request: &HeaderMap,
    write_body: Option<&WriteBody>,
    make_body: &impl MakeBody<B>,
) -> Response<B> {
    let response = match (grpc::content_type(request), write_body) {
        (Some(content_type), _) => refusal.grpc_response(content_type),
        (None, Some(write_body)) => refusal.response_with_body(request, &**write_body),
        (None, None) => refusal.response(request),
    };
    response.map(|bytes| make_body.make(bytes))
}

/// 500, and what to do about it.
fn unknown_peer(request: &HeaderMap) -> Response<Bytes> {
    const MESSAGE: &str = "the service does not know where this request came from; it must be served with connect info";
    let verdict = Verdict::Internal;
    tracing::error!(
        "a request without the address of its peer; serve with connect info, or find the peer by a closure"
    );
    if let Some(content_type) = grpc::content_type(request) {
        return grpc::refusal(verdict, MESSAGE, HeaderMap::new(), content_type);
    }
    let body = serde_json::json!({ "error": verdict.error(), "message": MESSAGE });
    let mut response = Response::new(Bytes::from(body.to_string()));
    *response.status_mut() = verdict.http();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

impl<M> std::fmt::Debug for RateLimitLayer<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateLimitLayer").field("engine", &self.gate.engine).finish_non_exhaustive()
    }
}

impl<S, M> std::fmt::Debug for RateLimit<S, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateLimit").field("engine", &self.gate.engine).finish_non_exhaustive()
    }
}
