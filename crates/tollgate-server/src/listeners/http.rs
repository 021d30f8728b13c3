//! The HTTP door: `POST /v1/check`.
//!
//! One JSON question, one JSON decision, with the same headers that a limited service would send. A denial is 429 with the
//! decision as its body, so that a caller may look at the status alone.

pub(crate) mod answer;
pub(crate) mod connection;
mod fast_path;
#[doc(hidden)]
pub mod fuzz;
mod general;
mod known_policies;
pub(crate) mod request;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Body;
use tokio::time::Instant;
use tollgate::answer::Policies;
use tollgate::engine::{Engine, Outcome, Refused};
use tollgate::rules::RequestView;
use tollgate::{Check, CheckOptions, Decision, Limiter, OnFailure, Source, Timestamp};

use self::connection::{problem, read_body, refused_method};
use self::known_policies::KnownPolicies;
use self::request::{CheckRequest, CheckRequestError, Explicit};
use crate::accept::Context;
use crate::browser::BrowserPolicy;
use crate::metrics::{DecisionStats, ListenerStats, Rejection};
use crate::openapi;

/// A key of 64 KiB, escaped at its worst, and the rest.
const BODY_BYTES_MAX: usize = 512 * 1024;

/// What the HTTP door needs.
#[derive(Clone, Debug)]
pub struct HttpListener {
    limiter: Limiter,
    engine: Option<Engine>,
    decisions: Arc<DecisionStats>,
    stats: Arc<ListenerStats>,
    browsers: BrowserPolicy,
    known: Arc<KnownPolicies>,
}

impl HttpListener {
    /// A door that asks this limiter.
    pub fn new(limiter: Limiter) -> HttpListener {
        HttpListener {
            limiter,
            engine: None,
            decisions: Arc::default(),
            stats: Arc::default(),
            browsers: BrowserPolicy::default(),
            known: Arc::default(),
        }
    }

    /// The same door, which also answers by rules.
    #[must_use]
    pub fn with_rules(self, engine: Engine) -> HttpListener {
        HttpListener { engine: Some(engine), ..self }
    }

    /// Counts and times decisions and requests here.
    #[must_use]
    pub(crate) fn with_stats(self, decisions: Arc<DecisionStats>, stats: Arc<ListenerStats>) -> HttpListener {
        HttpListener { decisions, stats, ..self }
    }

    /// Sets which web pages may send requests. Defaults to none.
    #[must_use]
    pub(crate) fn with_browsers(self, browsers: BrowserPolicy) -> HttpListener {
        HttpListener { browsers, ..self }
    }

    /// Serves one connection until the client leaves.
    pub(crate) async fn serve<S>(
        &self,
        stream: S,
        idle: Duration,
        context: Context,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    {
        connection::serve(stream, idle, context, Some(self), |request| self.answer(request)).await
    }

    /// Answers one request.
    pub async fn answer<B>(&self, request: Request<B>) -> Response<Bytes>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        match (request.method(), request.uri().path()) {
            // A check charges counters, so a page of another site must not send one. The other routes change nothing.
            (&Method::POST, "/v1/check") if self.browsers.is_foreign(request.headers()) => {
                foreign_origin("http", &self.stats)
            }
            (&Method::POST, "/v1/check") => match read_body(request.into_body(), BODY_BYTES_MAX).await {
                Ok(body) => self.check(&body).await,
                Err(refusal) => refusal,
            },
            (_, "/v1/check") => refused_method("POST"),
            (&Method::GET | &Method::HEAD, "/openapi.json") => openapi::document_response(),
            (&Method::GET | &Method::HEAD, "/docs") => openapi::page_response(),
            (_, "/openapi.json" | "/docs") => refused_method("GET, HEAD"),
            _ => problem(StatusCode::NOT_FOUND, "not_found", "expected POST /v1/check, GET /openapi.json or GET /docs"),
        }
    }

    /// Answers the body of a question.
    async fn check(&self, body: &[u8]) -> Response<Bytes> {
        let began = Instant::now();
        let response = self.check_body(body).await;
        self.stats.request_times.record(began.elapsed());
        response
    }

    async fn check_body(&self, body: &[u8]) -> Response<Bytes> {
        match CheckRequest::read(body) {
            Ok(CheckRequest::Explicit(explicit)) => {
                self.check_explicit(&explicit).await.unwrap_or_else(|error| refused(&error))
            }
            // A large future, which would otherwise be moved about with every question that needs no rules.
            Ok(CheckRequest::ByRules(request, peer)) => Box::pin(self.check_by_rules(&request, peer)).await,
            Err(error) => refused(&error),
        }
    }

    async fn check_explicit(&self, explicit: &Explicit<'_>) -> Result<Response<Bytes>, CheckRequestError> {
        let demands = explicit.demands()?;
        let check = Check::new(&demands)?;
        let options = CheckOptions { on_failure: Some(OnFailure::Local), ..CheckOptions::default() };
        let began = Instant::now();
        let answer = self.limiter.check_with(&check, options).await;
        self.decisions.record_explicit(&answer, began.elapsed());
        Ok(match answer {
            Ok(decision) => {
                let policies = self.known.policies(&demands);
                decided(&decision, Some(&policies))
            }
            Err(unavailable) => problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", &unavailable.client_message()),
        })
    }

    async fn check_by_rules(&self, request: &Request<()>, peer: IpAddr) -> Response<Bytes> {
        let Some(engine) = &self.engine else {
            let message =
                "there are no rules to decide a request by; start with --config FILE, or ask with key and limit";
            return problem(StatusCode::BAD_REQUEST, "bad_request", message);
        };
        let began = Instant::now();
        let outcome = engine.decide(&RequestView::of(request), peer).await;
        let decision = match &outcome {
            Outcome::Pass(passage) => passage.decision(),
            Outcome::Refuse(refused) => refused.decision.as_ref(),
            _ => None,
        };
        self.decisions.record(decision.map_or(Source::None, |decision| decision.source), began.elapsed());
        match outcome {
            Outcome::Pass(passage) => {
                let nobody = Decision { at: Timestamp::ZERO, source: Source::None, limits: Default::default() };
                let response = decided(passage.decision().unwrap_or(&nobody), passage.policies());
                // Whoever asked over HTTP has no ending to tell: the units stay taken.
                passage.keep();
                response
            }
            Outcome::Refuse(Refused { decision: Some(decision), policies, .. }) => {
                decided(&decision, policies.as_deref())
            }
            Outcome::Refuse(refused) => refused.response,
            _ => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", "an outcome that this door does not know"),
        }
    }
}

fn decided(decision: &Decision, policies: Option<&Policies>) -> Response<Bytes> {
    let mut response = Response::new(decision_body(decision, policies));
    let headers = response.headers_mut();
    // Room for all of a denial's, so that they are not moved while they are written.
    headers.reserve(8);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(policies) = policies {
        policies.write_headers(decision, headers);
    }
    if !decision.allowed() {
        *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    }
    response
}

/// The decision as JSON, written directly: this is the hot path of the door.
fn decision_body(decision: &Decision, policies: Option<&Policies>) -> Bytes {
    let mut json = JsonText(Vec::with_capacity(64 + 192 * decision.limits.len()));
    json.raw("{\"allowed\":").flag(decision.allowed());
    json.raw(",\"source\":\"").raw(decision.source.name()).raw("\",\"limits\":[");
    let told = policies.into_iter().flat_map(Policies::policies).zip(&decision.limits);
    for (index, (policy, line)) in told.enumerate() {
        json.raw(if index == 0 { "{\"name\":\"" } else { ",{\"name\":\"" }).raw(policy.name());
        json.raw("\",\"quota\":").number(Some(line.quota.into()));
        json.raw(",\"window_ms\":").number(Some(policy.limit().window_us().div_ceil(1_000)));
        json.raw(",\"remaining\":").number(Some(line.remaining.into()));
        json.raw(",\"retry_after_ms\":").number(line.retry_after.as_millis_ceil());
        json.raw(",\"next_after_ms\":").number(line.next_after.as_millis_ceil());
        json.raw(",\"reset_after_ms\":").number(line.reset_after.as_millis_ceil());
        json.raw(",\"allowed\":").flag(line.allowed).raw("}");
    }
    json.raw("]}");
    Bytes::from(json.0)
}

struct JsonText(Vec<u8>);

impl JsonText {
    fn raw(&mut self, text: &str) -> &mut Self {
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    fn flag(&mut self, value: bool) -> &mut Self {
        self.raw(if value { "true" } else { "false" })
    }

    fn number(&mut self, value: Option<u64>) -> &mut Self {
        match value {
            Some(value) => self.raw(itoa::Buffer::new().format(value)),
            None => self.raw("null"),
        }
    }
}

/// Rejects a request that a page of another site made a browser send.
pub(crate) fn foreign_origin(listener: &'static str, stats: &ListenerStats) -> Response<Bytes> {
    let what = "a browser sent a request for a web page of another site, which was refused; allow the page with --allow-origin";
    stats.reject(listener, Rejection::Origin, what);
    let message = "requests from web pages of other sites are refused; start with --allow-origin to allow one";
    problem(StatusCode::FORBIDDEN, "foreign_origin", message)
}

fn refused(error: &CheckRequestError) -> Response<Bytes> {
    problem(StatusCode::BAD_REQUEST, "bad_request", &error.to_string())
}
