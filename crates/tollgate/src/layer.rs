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
//! numbers on every response. A leaky bucket's wait is waited, up to a bound. What a rule gives back it gives back when
//! the response is known, or when the future is dropped before that.
//!
//! **Whoever is not known is not guessed.** If nothing says where a request came from, it is answered with 500 and an error that says
//! what to do; counting all such requests together would let one client lock out all.

mod future;

use std::net::IpAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Extensions, Request, Response};
use tower_layer::Layer;
use tower_service::Service;

pub use self::future::ResponseFuture;
use crate::engine::Engine;
use tollgate_core::Cost;

/// No request is held longer for a leaky bucket, however long its queue.
const WAIT_MAX_DEFAULT: Duration = Duration::from_secs(30);

/// How to find the other end of a request's socket.
type FindPeer = Arc<dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync>;
/// How many units a request costs; `None` for what the rules say.
type FindCost = Arc<dyn Fn(&http::request::Parts) -> Option<Cost> + Send + Sync>;

/// Puts rules in front of a service.
#[derive(Clone)]
pub struct RateLimitLayer {
    gate: Gate,
}

/// A service with rules in front of it.
#[derive(Clone)]
pub struct RateLimit<S> {
    inner: S,
    gate: Gate,
}

#[derive(Clone)]
struct Gate {
    engine: Engine,
    find_peer: FindPeer,
    find_cost: Option<FindCost>,
    wait_max: Duration,
}

impl RateLimitLayer {
    /// A layer that finds the other end of the socket in a request's extensions by this closure.
    pub fn new(engine: Engine, find_peer: impl Fn(&Extensions) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        RateLimitLayer {
            gate: Gate { engine, find_peer: Arc::new(find_peer), find_cost: None, wait_max: WAIT_MAX_DEFAULT },
        }
    }

    /// A layer for axum, served with `into_make_service_with_connect_info::<SocketAddr>()`.
    #[cfg(feature = "axum")]
    pub fn axum(engine: Engine) -> Self {
        RateLimitLayer::new(engine, |extensions| {
            extensions.get::<axum::extract::ConnectInfo<std::net::SocketAddr>>().map(|info| info.0.ip())
        })
    }

    /// Requests cost what this says; where it says nothing, what their rules say.
    #[must_use]
    pub fn cost(mut self, find_cost: impl Fn(&http::request::Parts) -> Option<Cost> + Send + Sync + 'static) -> Self {
        self.gate.find_cost = Some(Arc::new(find_cost));
        self
    }

    /// The longest that a leaky bucket may hold a request; 30 s unless said.
    #[must_use]
    pub fn wait_at_most(mut self, wait_max: Duration) -> Self {
        self.gate.wait_max = wait_max;
        self
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit { inner, gate: self.gate.clone() }
    }
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for RateLimit<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: 'static,
    ReqBody: Send + 'static,
    ResBody: From<Bytes> + Send + 'static,
{
    type Response = Response<ResBody>;
    type Error = S::Error;
    type Future = ResponseFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        // The one that was polled ready is the one to call; its clone takes its place.
        let clone = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, clone);
        ResponseFuture::new(future::respond(self.gate.clone(), ready, request))
    }
}

impl std::fmt::Debug for RateLimitLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateLimitLayer").field("engine", &self.gate.engine).finish_non_exhaustive()
    }
}

impl<S> std::fmt::Debug for RateLimit<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateLimit").field("engine", &self.gate.engine).finish_non_exhaustive()
    }
}
