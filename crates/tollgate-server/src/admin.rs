//! The admin door: for the operator, on a listener of its own.
//!
//! | path | method | token | answers |
//! |---|---|---|---|
//! | `/healthz` | GET | no | 200 while the process is alive |
//! | `/readyz` | GET | no | 200 or 503, and why |
//! | `/metrics` | GET | no | Prometheus' text |
//! | `/v1/rules` | GET | yes | the rules in force, and what they have said |
//! | `/v1/keys?key=…` | GET | yes | the counters of a key |
//! | `/v1/keys?key=…` | DELETE | yes | forgets them |
//! | `/v1/explain` | POST | yes | what the rules would do with a request |
//! | `/v1/reload` | POST | yes | reads the configuration again |
//!
//! Orchestrators and scrapers ask the first three, and none of them names a caller; so they are open to whoever reaches the
//! listener, which is loopback unless said. Everything else needs the token, and without it not even the existence
//! of a path is told. Bodies and headers are bounded as on the HTTP door. What a web page may have made a browser send is refused
//! before that (`browser.rs`), and a client that guesses tokens waits for its answers (`auth_guard.rs`).

mod keys;
mod rules;
pub(crate) mod token;

use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Body;
use tollgate::engine::Engine;
use tollgate::{Clock, SystemClock};

use tokio::time::Instant;

use self::token::Token;
use crate::auth_guard::{Attempt, AuthGuard};
use crate::browser::BrowserPolicy;
use crate::explain::Explanation;
use crate::listeners::http::connection::{json, problem, read_body, refused_method};
use crate::listeners::http::foreign_origin;
use crate::listeners::http::request::CheckRequest;
use crate::metrics::{self, ListenerStats, Numbers, Rejection};
use crate::readiness::Readiness;
use crate::reload::{ReloadError, Reloader, findings_json, parts_json};

/// Whether an address can be reached from this machine alone.
pub fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// What the admin door needs.
pub(crate) struct AdminListener {
    /// Without one nothing opens but what everybody may ask.
    pub(crate) token: Option<Token>,
    pub(crate) readiness: Readiness,
    pub(crate) reloader: Reloader,
    pub(crate) numbers: Arc<Numbers>,
    pub(crate) clock: SystemClock,
    pub(crate) stats: Arc<ListenerStats>,
    pub(crate) browsers: BrowserPolicy,
    pub(crate) auth_guard: Arc<AuthGuard>,
}

/// The listener's name in logs.
const LISTENER: &str = "admin";

/// Room for the headers of any request that somebody wants explained.
const BODY_BYTES_MAX: usize = 256 * 1024;

impl AdminListener {
    /// Answers one request of a client at `peer`.
    pub(crate) async fn answer<B>(&self, request: Request<B>, peer: IpAddr) -> Response<Bytes>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let mut response = match self.reject(&request) {
            Some(rejection) => rejection,
            None => self.answer_expected(request, peer).await,
        };
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }

    /// The answer to a request that a web page may have made a browser send. `/healthz` tells nothing and stays open.
    fn reject<B>(&self, request: &Request<B>) -> Option<Response<Bytes>> {
        if request.uri().path() == "/healthz" {
            return None;
        }
        if !self.browsers.is_admin_host(request.headers()) {
            let what = "a request named the admin listener by an unknown Host, which was refused; allow the name with --admin-host";
            self.stats.reject(LISTENER, Rejection::Host, what);
            let message = "this Host is not known here; ask by address, or start with --admin-host NAME";
            return Some(problem(StatusCode::MISDIRECTED_REQUEST, "unknown_host", message));
        }
        self.browsers.is_foreign(request.headers()).then(|| foreign_origin(LISTENER, &self.stats))
    }

    async fn answer_expected<B>(&self, request: Request<B>, peer: IpAddr) -> Response<Bytes>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let began = Instant::now();
        let (began, response) = match self.answer_open(&request) {
            Some(response) => (began, response),
            None => match self.authenticate(request.headers(), peer).await {
                // From here on: what a guess is made to wait is not the time that an answer takes.
                Ok(()) => (Instant::now(), self.answer_closed(request).await),
                Err(refusal) => return refusal,
            },
        };
        self.stats.request_times.record(began.elapsed());
        response
    }

    /// What everybody may ask.
    fn answer_open<B>(&self, request: &Request<B>) -> Option<Response<Bytes>> {
        let is_reading = matches!(*request.method(), Method::GET | Method::HEAD);
        let answer: fn(&AdminListener) -> Response<Bytes> = match request.uri().path() {
            "/healthz" => |_| json(StatusCode::OK, &serde_json::json!({ "alive": true })),
            "/readyz" => AdminListener::readyz,
            "/metrics" => AdminListener::metrics,
            _ => return None,
        };
        Some(if is_reading { answer(self) } else { refused_method("GET, HEAD") })
    }

    async fn answer_closed<B>(&self, request: Request<B>) -> Response<Bytes>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let query = request.uri().query().unwrap_or_default().to_owned();
        match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, "/v1/rules") => rules::list(&self.reloader),
            (_, "/v1/rules") => refused_method("GET, HEAD"),
            (&Method::GET | &Method::HEAD, "/v1/keys") => keys::inspect(self, &query).await,
            (&Method::DELETE, "/v1/keys") => keys::reset(self, &query).await,
            (_, "/v1/keys") => refused_method("GET, HEAD, DELETE"),
            (&Method::POST, "/v1/explain") => self.explain(request, &query).await,
            (_, "/v1/explain") => refused_method("POST"),
            (&Method::POST, "/v1/reload") => self.reload().await,
            (_, "/v1/reload") => refused_method("POST"),
            _ => {
                let message = "expected /v1/rules, /v1/keys, /v1/explain, /v1/reload, /metrics, /healthz or /readyz";
                problem(StatusCode::NOT_FOUND, "not_found", message)
            }
        }
    }

    /// Looks at the token; `Err` is the answer to a client that has none, or not the right one.
    async fn authenticate(&self, headers: &HeaderMap, peer: IpAddr) -> Result<(), Response<Bytes>> {
        let said = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
        let bearer = said
            .and_then(|said| said.split_at_checked(7))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "));
        // Nothing was guessed by a client that gave no token.
        let Some(((_, given), token)) = bearer.zip(self.token.as_ref()) else { return Err(unauthorized()) };
        let attempt = self.auth_guard.attempt(LISTENER, peer, &self.stats.auth_failures, || token.is(given));
        match attempt.await {
            Attempt::Right => Ok(()),
            Attempt::Wrong => Err(unauthorized()),
            Attempt::Refused => {
                let message = "too many failed attempts from this address, try again later";
                let mut response = problem(StatusCode::TOO_MANY_REQUESTS, "too_many_attempts", message);
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
                Err(response)
            }
        }
    }

    fn readyz(&self) -> Response<Bytes> {
        let status = if self.readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        json(status, &self.readiness.to_json())
    }

    fn metrics(&self) -> Response<Bytes> {
        let Some(text) = self.numbers.text() else {
            return problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the metrics could not be written");
        };
        let mut response = Response::new(Bytes::from(text));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE));
        response
    }

    /// The body is that of a question by rules; `?reveal=true` shows whom a rule counts.
    async fn explain<B>(&self, request: Request<B>, query: &str) -> Response<Bytes>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let bad = |message: &str| problem(StatusCode::BAD_REQUEST, "bad_request", message);
        let is_revealing = match query {
            "" | "reveal=false" => false,
            "reveal=true" => true,
            _ => return bad("unknown parameter; expected reveal=true or nothing"),
        };
        let body = match read_body(request.into_body(), BODY_BYTES_MAX).await {
            Ok(body) => body,
            Err(refusal) => return refusal,
        };
        let (described, peer) = match CheckRequest::read(&body) {
            Ok(CheckRequest::ByRules(described, peer)) => (described, peer),
            Ok(_) => return bad("expected {\"request\": {\"method\": …, \"path\": …, \"peer\": …}}"),
            Err(error) => return bad(&error.to_string()),
        };
        let Some(loaded) = self.reloader.loaded() else {
            return bad("there are no rules to explain; start with --config FILE");
        };
        let lookups = self.reloader.engine().map(Engine::lookups).unwrap_or_default();
        let mut said = Explanation::new(&loaded, lookups, &described, peer, self.clock.now(), is_revealing).await;
        said.look(self.numbers.limiter()).await;
        json(StatusCode::OK, &said)
    }

    async fn reload(&self) -> Response<Bytes> {
        match self.reloader.reload().await {
            Ok(loaded) => {
                let body = serde_json::json!({
                    "reloaded": true,
                    "rules": loaded.rules.rules().len(),
                    "removed": parts_json(&loaded.changes.removed),
                    "changed": parts_json(&loaded.changes.changed),
                    "findings": findings_json(&loaded.findings),
                });
                json(StatusCode::OK, &body)
            }
            Err(error) if matches!(*error, ReloadError::Nothing) => {
                problem(StatusCode::CONFLICT, "nothing_to_reload", &error.to_string())
            }
            Err(error) if matches!(*error, ReloadError::Panicked) => {
                problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", &error.to_string())
            }
            Err(error) => {
                let mut body = error.to_json();
                body["error"] = "configuration_broken".into();
                body["reloaded"] = false.into();
                json(StatusCode::UNPROCESSABLE_ENTITY, &body)
            }
        }
    }
}

fn unauthorized() -> Response<Bytes> {
    let message = "expected Authorization: Bearer and the admin token";
    let mut response = problem(StatusCode::UNAUTHORIZED, "unauthenticated", message);
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"tollgate admin\""));
    response
}
