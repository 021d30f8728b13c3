//! The Tower layer: limits in front of any HTTP service.
//!
//! ```
//! use std::net::SocketAddr;
//!
//! use axum::Router;
//! use axum::routing::post;
//! use tidegate::RateLimitLayer;
//!
//! let app: Router = Router::new()
//!     .route("/shorten", post(|| async { "…" }))
//!     .layer(RateLimitLayer::per_ip("10/min")?);
//! // The layer needs the remote address of the connection:
//! let service = app.into_make_service_with_connect_info::<SocketAddr>();
//! # drop(service);
//! # Ok::<(), tidegate::config::Report>(())
//! ```
//!
//! [`RateLimitLayer::per_ip`] is one limit for all requests. [`Rules`] set limits by route, caller or plan:
//!
//! ```
//! use axum::Router;
//! use axum::routing::post;
//! use tidegate::engine::Engine;
//! use tidegate::{Limiter, RateLimitLayer, Rule, Rules, Subject};
//!
//! let rules = Rules::new()
//!     .trusted_proxies(["10.0.0.0/8"])
//!     .rule(Rule::new("shorten").post("/shorten").by(Subject::Ip).limit("10/min"))
//!     .build()?;
//! let app: Router = Router::new()
//!     .route("/shorten", post(|| async { "…" }))
//!     .layer(RateLimitLayer::axum(Engine::new(Limiter::memory(), rules)));
//! # drop(app);
//! # Ok::<(), tidegate::config::Report>(())
//! ```
//!
//! A refusal is a *response*; the error type of the inner service is unchanged. If an enforced rule applies to a
//! request, the layer inserts the [`Decision`](crate::Decision) into its extensions and writes the rate-limit headers
//! of its response. If a leaky bucket admits a request with a wait, the layer waits, up to
//! [`RateLimitLayer::wait_at_most`].
//!
//! The head of the response decides whether a rule refunds units (`charge`). An error from the inner service counts as
//! a failure. A response with [`KeepCharge`] in its extensions keeps the charge. If the request's future is dropped before that, because the client disconnected, an outer timeout expired
//! or the inner service panicked, the charge is kept.
//!
//! **An unknown remote address is an error.** If the extensions of a request do not contain the remote address of its
//! connection, the response is 500, and an error that says what to do is logged. Counting all such requests together
//! would let one client lock out all others.
//!
#![doc = include_str!("layer/recipes.md")]

mod body;
mod future;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{Extensions, HeaderMap, HeaderValue, Request, Response, Uri};
use tower_layer::Layer;
use tower_service::Service;

pub use self::body::{EmptyBody, FromBytes, MakeBody};
use self::future::respond;
pub use self::future::{KeepCharge, ResponseFuture};
use crate::answer::{Body, RefusalDetails, Verdict, grpc};
use crate::config::Report;
use crate::engine::{Engine, Outcome, Refusal};
use crate::identity::{NetworkError, Networks, TrustedProxies};
use crate::limiter::Limiter;
use crate::rules::{FindUri, LimitText, Rule, Rules};
use tidegate_core::Cost;

/// The default of [`RateLimitLayer::wait_at_most`].
const WAIT_MAX_DEFAULT: Duration = Duration::from_secs(30);

/// Returns the remote address of a connection from the extensions of a request, or `None` if it is not there.
type FindPeer = Arc<dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync>;
/// Returns the caller of a request, or `None` to count it by API key, user or address.
type FindSubject = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;
/// Returns the cost of a request, or `None` for the cost that each rule sets.
type FindCost = Arc<dyn Fn(&Parts) -> Option<Cost> + Send + Sync>;
/// Is called with the extensions of a request, the outcome, and the time that the decision took.
type OnOutcome = Arc<dyn Fn(&Extensions, &Outcome, Duration) + Send + Sync>;
/// Builds the body of a refusal.
type WriteBody = Arc<dyn Fn(&RefusalDetails<'_>) -> Body + Send + Sync>;

/// A [`Layer`] that limits the requests to an HTTP service.
///
/// `M` converts the bytes of a refusal to the body type of the service; see [`RateLimitLayer::bodies`]. Clones and all
/// services made by one layer share its engine, and so its counters.
#[derive(Clone)]
pub struct RateLimitLayer<M = FromBytes> {
    settings: Arc<LayerSettings>,
    make_body: M,
}

/// A service that limits the requests to its inner service. Made by [`RateLimitLayer`].
///
/// `S` is the inner service. `M` converts the bytes of a refusal to the body type of its responses: [`FromBytes`],
/// unless [`RateLimitLayer::bodies`] sets another. A refused request does not reach the inner service.
#[derive(Clone)]
pub struct RateLimit<S, M = FromBytes> {
    inner: S,
    settings: Arc<LayerSettings>,
    make_body: M,
}

/// The settings of a [`RateLimitLayer`], shared with its services.
#[derive(Clone)]
struct LayerSettings {
    engine: Engine,
    find_peer: FindPeer,
    /// Finds the URI that the client sent, if a router may have rewritten it.
    find_sent: Option<FindUri>,
    find_subject: Option<FindSubject>,
    find_cost: Option<FindCost>,
    /// The longest time for which a leaky bucket may delay a request.
    wait_max: Duration,
    /// Makes the bodies of refusals by limits, instead of the formats of the rules.
    write_body: Option<WriteBody>,
    /// Is called after each decision.
    on_outcome: Option<OnOutcome>,
}

impl RateLimitLayer {
    /// Creates a layer with one limit, such as `10/min`, for each client address, counted in process memory.
    ///
    /// The remote address of the connection is found where axum puts it (feature `axum`), else as a [`SocketAddr`] in
    /// the request's extensions; [`RateLimitLayer::peer`] replaces this. A request whose remote address is not found
    /// is answered with 500, and an error is logged: an axum application must be served with
    /// `into_make_service_with_connect_info::<SocketAddr>()`.
    ///
    /// IPv6 addresses are counted by /64. Behind a proxy, add [`RateLimitLayer::trusted_proxies`], or all clients share
    /// one limit.
    ///
    /// ```
    /// use tidegate::RateLimitLayer;
    ///
    /// let layer = RateLimitLayer::per_ip("10/min")?.trusted_proxies(["10.0.0.0/8"])?;
    /// # drop(layer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// For several limits, limits by route, or counters on Redis, build [`Rules`].
    ///
    /// # Errors
    /// If the text is not a limit.
    pub fn per_ip(limit: impl Into<LimitText>) -> Result<Self, Report> {
        // Counted by caller, which is the address: these rules know neither keys nor tokens. So `subject` can name it.
        let rules = Rules::new().rule(Rule::new("per-ip").limit(limit)).build()?;
        let engine = Engine::new(Limiter::memory(), rules);
        #[cfg(feature = "axum")]
        return Ok(RateLimitLayer::axum(engine));
        #[cfg(not(feature = "axum"))]
        Ok(RateLimitLayer::new(engine, |extensions| extensions.get::<SocketAddr>().map(SocketAddr::ip)))
    }

    /// Creates a layer that decides requests with `engine`.
    ///
    /// `find_peer` returns the remote address of the connection from the extensions of a request. A request for which
    /// it returns `None` is answered with 500, and an error is logged.
    pub fn new(engine: Engine, find_peer: impl Fn(&Extensions) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        let settings = LayerSettings {
            engine,
            find_peer: Arc::new(find_peer),
            find_sent: None,
            find_subject: None,
            find_cost: None,
            wait_max: WAIT_MAX_DEFAULT,
            write_body: None,
            on_outcome: None,
        };
        RateLimitLayer { settings: Arc::new(settings), make_body: FromBytes }
    }

    /// Creates a layer for axum that decides requests with `engine`.
    ///
    /// The application must be served with `into_make_service_with_connect_info::<SocketAddr>()`, which makes the
    /// remote address known. Tests that call the router without a socket add axum's `MockConnectInfo` around the layer.
    /// Without either, the address may be a [`SocketAddr`] in the request's extensions. A request whose remote address
    /// is not found is answered with 500, and an error is logged.
    ///
    /// Rules match the path that the client sent, inside a nested router too.
    #[cfg(feature = "axum")]
    pub fn axum(engine: Engine) -> Self {
        use axum::extract::OriginalUri;
        use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

        let layer = RateLimitLayer::new(engine, |extensions| {
            let connected = extensions.get().map(|ConnectInfo(address): &ConnectInfo<SocketAddr>| address);
            let mocked = || extensions.get().map(|MockConnectInfo(address): &MockConnectInfo<SocketAddr>| address);
            connected.or_else(mocked).or_else(|| extensions.get()).map(SocketAddr::ip)
        });
        layer.sent_uri(|extensions| extensions.get().map(|OriginalUri(uri)| uri))
    }
}

impl<M> RateLimitLayer<M> {
    /// Trusts proxies in these networks to report the client's address, and no other proxies.
    ///
    /// They report it in the header of the engine's rules: `X-Forwarded-For`, unless [`Rules::forwarding_header`] sets
    /// another. This method reloads the engine with a copy of its rules, so it affects everything that uses the engine,
    /// until the next reload.
    ///
    /// # Errors
    /// If a text is not a network such as `10.0.0.0/8` or an address.
    pub fn trusted_proxies<'t>(self, networks: impl IntoIterator<Item = &'t str>) -> Result<Self, NetworkError> {
        let networks = Networks::parse(networks)?;
        let rules = self.settings.engine.rules();
        let header = rules.identifier().proxies().header().clone();
        self.settings.engine.reload(rules.with_proxies(TrustedProxies::new(networks, header)));
        Ok(self)
    }

    /// Sets the function that returns the remote address of a connection from the extensions of a request.
    ///
    /// A request for which it returns `None` is answered with 500, and an error is logged.
    ///
    /// ```
    /// use tidegate::RateLimitLayer;
    /// use tonic::transport::server::TcpConnectInfo;
    ///
    /// let layer = RateLimitLayer::per_ip("600/min")?.peer(|extensions| {
    ///     extensions.get::<TcpConnectInfo>()?.remote_addr().map(|address| address.ip())
    /// });
    /// # drop(layer);
    /// # Ok::<(), tidegate::config::Report>(())
    /// ```
    #[must_use]
    pub fn peer(mut self, find_peer: impl Fn(&Extensions) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.settings).find_peer = Arc::new(find_peer);
        self
    }

    /// Sets the function that returns the caller of a request: a session, a tenant, a user of the application.
    ///
    /// Rules by [`Subject::Caller`](crate::Subject::Caller), which is the default and what [`RateLimitLayer::per_ip`]
    /// uses, count by the returned value. If it is `None`, they count by API key, user or address, as without this
    /// method. Rules by other subjects and shields are not affected. A caller that is set here has the plan `default`,
    /// unless its API key, address, trusted header, token or a [`PlanLookup`](crate::rules::PlanLookup) determines
    /// another.
    ///
    /// The value is stored in the counter's key (as a pseudonym under `anonymize`), so it should not be a secret.
    ///
    /// ```
    /// use tidegate::RateLimitLayer;
    ///
    /// #[derive(Clone)]
    /// struct Session {
    ///     user_id: u64,
    /// }
    ///
    /// // 10 requests a minute per logged-in user, and per address otherwise.
    /// let layer = RateLimitLayer::per_ip("10/min")?
    ///     .subject(|parts| parts.extensions.get::<Session>().map(|session| session.user_id.to_string()));
    /// # drop(layer);
    /// # Ok::<(), tidegate::config::Report>(())
    /// ```
    #[must_use]
    pub fn subject(mut self, find_subject: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.settings).find_subject = Some(Arc::new(find_subject));
        self
    }

    /// Sets the function that returns the URI that the client sent, for services behind a router that rewrites paths.
    ///
    /// Rules and exemptions match the path of that URI. If the function returns `None`, they match the path of the
    /// request. It may be called several times for a request. [`RateLimitLayer::axum`] sets it to find axum's
    /// `OriginalUri`.
    ///
    /// ```
    /// use axum::extract::OriginalUri;
    /// use tidegate::RateLimitLayer;
    /// # use tidegate::{Limiter, Rule, Rules, engine::Engine};
    /// # let engine = Engine::new(Limiter::memory(), Rules::new().rule(Rule::new("all").limit("60/min")).build()?);
    ///
    /// // axum on a Unix socket: all requests come from this machine.
    /// let layer = RateLimitLayer::new(engine, |_| Some([127, 0, 0, 1].into()))
    ///     .sent_uri(|extensions| extensions.get::<OriginalUri>().map(|uri| &uri.0));
    /// # drop(layer);
    /// # Ok::<(), tidegate::config::Report>(())
    /// ```
    #[must_use]
    pub fn sent_uri(mut self, find_sent: fn(&Extensions) -> Option<&Uri>) -> Self {
        Arc::make_mut(&mut self.settings).find_sent = Some(find_sent);
        self
    }

    /// Sets the function that returns the cost of a request, in units. It applies to all rules, including shields.
    ///
    /// If it returns `None`, the cost is the one that each rule sets. A cost of 0 is a peek: the request is charged
    /// nothing and never denied by a limit.
    ///
    /// ```
    /// use tidegate::{Cost, RateLimitLayer};
    ///
    /// // One unit for every 64 KiB of an upload, and at least one.
    /// let layer = RateLimitLayer::per_ip("1000/min")?.cost(|parts| {
    ///     let bytes: u64 = parts.headers.get("content-length")?.to_str().ok()?.parse().ok()?;
    ///     let units = bytes.div_ceil(64 * 1024).max(1);
    ///     Some(Cost::new(u32::try_from(units).unwrap_or(u32::MAX)))
    /// });
    /// # drop(layer);
    /// # Ok::<(), tidegate::config::Report>(())
    /// ```
    #[must_use]
    pub fn cost(mut self, find_cost: impl Fn(&Parts) -> Option<Cost> + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.settings).find_cost = Some(Arc::new(find_cost));
        self
    }

    /// Sets the longest time for which a leaky bucket may delay a request. Defaults to 30 s.
    ///
    /// A request that would have to wait longer is refused with 429, and its units are refunded. Its `Retry-After` is
    /// the time until the wait is short enough.
    #[must_use]
    pub fn wait_at_most(mut self, wait_max: Duration) -> Self {
        Arc::make_mut(&mut self.settings).wait_max = wait_max;
        self
    }

    /// Sets the function that makes the bodies of refusals. It replaces the formats that the rules set.
    ///
    /// It is called if a limit denies a request, and if the store does not answer and the failure policy is `deny`.
    /// Status and headers are unchanged, except for the content type. Refusals by a ban or because of a path that is
    /// too long, and the response to a request with an unknown remote address, keep their own body. Refusals of gRPC
    /// requests have none.
    ///
    /// ```
    /// use tidegate::RateLimitLayer;
    /// use tidegate::answer::Body;
    ///
    /// let layer = RateLimitLayer::per_ip("60/min")?.body(|refusal| {
    ///     let seconds = refusal.retry_after_secs().unwrap_or(3600);
    ///     Body::new("text/html; charset=utf-8", format!("<p>Please come back in {seconds} s.</p>"))
    /// });
    /// # drop(layer);
    /// # Ok::<(), tidegate::config::Report>(())
    /// ```
    #[must_use]
    pub fn body(mut self, write_body: impl Fn(&RefusalDetails<'_>) -> Body + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.settings).write_body = Some(Arc::new(write_body));
        self
    }

    /// Sets a function that is called after each decision, before the request reaches the inner service.
    ///
    /// It gets the extensions of the request, the outcome, and the time that the decision took. For logs and metrics of
    /// an application: it cannot change the outcome. It is called on the request's task and must not block.
    ///
    /// ```
    /// use tidegate::{Outcome, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::per_ip("60/min")?.on_outcome(|_, outcome, took| {
    ///     if let Outcome::Refused(refusal) = outcome {
    ///         println!("refused after {took:?}: {:?}", refusal.verdict());
    ///     }
    /// });
    /// # drop(layer);
    /// # Ok::<(), tidegate::config::Report>(())
    /// ```
    #[must_use]
    pub fn on_outcome(mut self, on_outcome: impl Fn(&Extensions, &Outcome, Duration) + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.settings).on_outcome = Some(Arc::new(on_outcome));
        self
    }

    /// Sets how the bytes of a refusal are converted to the body type of the service. Defaults to [`FromBytes`].
    ///
    /// For services whose body type does not implement `From<Bytes>`. For tonic, use [`EmptyBody`]: a refusal of a gRPC
    /// request has no body.
    ///
    /// ```
    /// use tidegate::RateLimitLayer;
    /// use tidegate::layer::EmptyBody;
    /// use tonic::transport::Server;
    /// use tonic::transport::server::TcpConnectInfo;
    ///
    /// let layer = RateLimitLayer::per_ip("600/min")?.peer(|extensions| {
    ///     extensions.get::<TcpConnectInfo>()?.remote_addr().map(|address| address.ip())
    /// });
    /// let (_, health) = tonic_health::server::health_reporter();
    /// let server = Server::builder().layer(layer.bodies(EmptyBody)).add_service(health);
    /// # drop(server);
    /// # Ok::<(), tidegate::config::Report>(())
    /// ```
    pub fn bodies<N>(self, make_body: N) -> RateLimitLayer<N> {
        RateLimitLayer { settings: self.settings, make_body }
    }
}

impl<S, M: Clone> Layer<S> for RateLimitLayer<M> {
    type Service = RateLimit<S, M>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit { inner, settings: self.settings.clone(), make_body: self.make_body.clone() }
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
        let Some(peer) = (self.settings.find_peer)(request.extensions()) else {
            let response = unknown_peer(request.headers()).map(|bytes| self.make_body.make(bytes));
            return Box::pin(std::future::ready(Ok(response)));
        };
        let (mut cost, mut caller) = (None, None);
        let LayerSettings { find_cost, find_subject, .. } = &*self.settings;
        if find_cost.is_some() || find_subject.is_some() {
            let (parts, body) = request.into_parts();
            cost = find_cost.as_ref().and_then(|find_cost| find_cost(&parts));
            caller = find_subject.as_ref().and_then(|find_subject| find_subject(&parts));
            request = Request::from_parts(parts, body);
        }
        // The service that was polled ready is the one to call; its clone takes its place.
        let clone = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(respond(inner, request, peer, cost, caller, self.settings.clone(), self.make_body.clone()))
    }
}

/// Builds the response to a refused request: gRPC if the request is gRPC, else HTTP.
///
/// `request` holds the request's headers. An HTTP body is made by `write_body`, if it is set, else in the format of the
/// rules. Refusals by a ban or because of a long path keep their own body.
fn refuse<B>(
    refusal: &Refusal,
    request: &HeaderMap,
    write_body: Option<&WriteBody>,
    make_body: &impl MakeBody<B>,
) -> Response<B> {
    let response = match write_body {
        Some(write_body) if grpc::content_type(request).is_none() => refusal.response_with_body(request, &**write_body),
        _ => refusal.response_to(request),
    };
    response.map(|bytes| make_body.make(bytes))
}

/// Builds the response to a request whose remote address is not found: 500, or INTERNAL in gRPC. Logs an error.
///
/// `request` holds the request's headers.
fn unknown_peer(request: &HeaderMap) -> Response<Bytes> {
    const MESSAGE: &str = "the remote address of this request is unknown; serve the application with \
                           into_make_service_with_connect_info::<SocketAddr>() (connect info), or set RateLimitLayer::peer";
    let verdict = Verdict::Internal;
    tracing::error!("{MESSAGE}");
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
        f.debug_struct("RateLimitLayer").field("engine", &self.settings.engine).finish_non_exhaustive()
    }
}

impl<S, M> std::fmt::Debug for RateLimit<S, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateLimit").field("engine", &self.settings.engine).finish_non_exhaustive()
    }
}
