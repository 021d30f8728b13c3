//! The admin listener: the HTTP API for the operator.
//!
//! | path | method | token | response |
//! |---|---|---|---|
//! | `/healthz` | GET | no | 200 while the process is alive |
//! | `/readyz` | GET | no | 200 or 503, and why |
//! | `/metrics` | GET | no | metrics for Prometheus |
//! | `/openapi.json`, `/docs` | GET | no | this API, for programs and for people |
//! | `/v1/rules` | GET | yes | the rules in force, and their decisions so far |
//! | `/v1/keys?key=…` | GET | yes | the counters of a key |
//! | `/v1/keys?key=…` | DELETE | yes | deletes them |
//! | `/v1/keys` | GET | yes | the API keys in the Redis hash of the configuration |
//! | `/v1/keys/{name}` | GET | yes | one of them |
//! | `/v1/keys/{name}` | PATCH | yes | changes its plan and its own limits |
//! | `/v1/keys/{name}/plan`, `/limits` | PUT, DELETE | yes | sets or removes one of them |
//! | `/v1/bans` | GET | yes | all bans at run time |
//! | `/v1/bans?client=…` | GET | yes | whether a client is banned |
//! | `/v1/bans?client=…&for=1h` | PUT | yes | bans it, without `for` for good |
//! | `/v1/bans?client=…` | DELETE | yes | lifts the ban |
//! | `/v1/explain` | POST | yes | what the rules would do with a request |
//! | `/v1/reload` | POST | yes | reloads the configuration and the certificate |
//!
//! Orchestrators, scrapers and browsers have no token, and the paths without one identify no caller: the document is the
//! same for every instance of a version. So these are open to every client that reaches the listener, which binds to
//! loopback by default. Everything else needs the token; without it,
//! an unknown path and a known one get the same response. Bodies and headers are bounded as on the HTTP listener.
//! Requests that a web page may have made a browser send are rejected first (`browser.rs`), and a client that guesses
//! tokens waits for its responses (`auth_guard.rs`).

pub(crate) mod api_keys;
pub(crate) mod bans;
pub(crate) mod keys;
pub(crate) mod rules;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Body;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use tidegate::config::Loaded;
use tidegate::engine::Engine;
use tidegate::rules::RequestView;
use tidegate::{Clock, Limiter, StoreError, SystemClock};
use tokio::time::Instant;

use crate::auth_guard::AuthGuard;
use crate::browser::BrowserPolicy;
use crate::client::OperatorRules;
use crate::explain::{ExplainQuery, Explanation};
use crate::listener::{
    BoxError, ConnectionContext, Listener, ListenerKind, Role, SecretKind, ServeFuture, ServerState,
};
use crate::listeners::http::connection::{
    self, OVER_LIMIT_RESPONSE, json, method_not_allowed, page_path, problem, read_body,
};
use crate::listeners::http::foreign_origin;
use crate::listeners::http::general::{ResponseBody, full_body};
use crate::listeners::http::request::{CheckRequest, CheckRequestError};
use crate::metrics::{HTTP_ERRORS, ListenerStats, Metrics, MetricsFormat, Rejection};
use crate::openapi;
use crate::readiness::Readiness;
use crate::reload::{ReloadError, ReloadErrorBody, ReloadedBody, Reloader};
use crate::secret::{self, AuthError, ListenerSecret, SecretForm};
use crate::stream::ClientStream;

/// The longest time that a client has to send a complete request header, even if `Bounds::http_idle` is longer.
const IDLE_MAX: Duration = Duration::from_secs(10);
/// The messages for a request without a token, with a wrong one, and from an address with too many attempts waiting.
pub(crate) const TOKEN_MISSING: &str = "this request needs a token: send the header Authorization: Bearer TOKEN";
pub(crate) const TOKEN_WRONG: &str = "the token in the header Authorization is wrong";
pub(crate) const TOO_MANY_ATTEMPTS: &str = "too many failed attempts from this address; try again later";
/// The most bytes of a body: enough for all headers of a request to explain.
const BODY_BYTES_MAX: usize = 256 * 1024;

/// That the process is alive.
#[derive(Serialize)]
struct HealthBody {
    /// Always true.
    alive: bool,
}

/// A reload that failed.
#[derive(Serialize)]
struct NotReloadedBody {
    /// A code for programs: `configuration_broken`.
    error: &'static str,
    /// Always false.
    reloaded: bool,
    #[serde(flatten)]
    failure: ReloadErrorBody,
}

/// The admin listener.
pub static ADMIN: ListenerKind = ListenerKind {
    name: "admin",
    help: "the admin listener (metrics, health, keys, rules, reload)",
    default_address: "127.0.0.1:9180",
    address_setting: None,
    role: Role::Operator,
    decides_for_others: false,
    secret: Some(SecretKind {
        form: SecretForm::Token,
        help: "requests to the admin API must send",
        variable: "TIDEGATE_ADMIN_TOKEN",
        option: "admin-token-file",
    }),
    example: "curl {auth}{url}/v1/rules",
    build: |state| Arc::new(AdminListener::build(state)),
};

/// The admin listener: serves health, readiness, metrics, and the API for operators.
pub(crate) struct AdminListener {
    engine: Engine,
    /// `None` rejects every request that needs a token.
    token: Option<ListenerSecret>,
    readiness: Readiness,
    reloader: Reloader,
    metrics: Arc<Metrics>,
    clock: SystemClock,
    stats: Arc<ListenerStats>,
    browsers: BrowserPolicy,
    auth_guard: Arc<AuthGuard>,
    idle: Duration,
}

impl Listener for AdminListener {
    fn stats(&self) -> &Arc<ListenerStats> {
        &self.stats
    }

    fn over_limit_reply(&self) -> &'static [u8] {
        OVER_LIMIT_RESPONSE
    }

    fn serve(self: Arc<Self>, stream: ClientStream, peer: SocketAddr, context: ConnectionContext) -> ServeFuture {
        Box::pin(async move {
            let handler = |request| self.answer(request, peer.ip());
            connection::serve(stream, self.idle, context, None, handler).await
        })
    }
}

impl AdminListener {
    /// Creates the admin listener of a server from the state that its listeners share. Its idle time is at most 10 s.
    pub(crate) fn build(shared: &ServerState) -> AdminListener {
        let options = &shared.options;
        AdminListener {
            engine: options.engine.clone(),
            token: options.secret_of(&ADMIN),
            readiness: shared.readiness.clone(),
            reloader: options.reloader.clone(),
            metrics: shared.metrics.clone(),
            clock: SystemClock::new(),
            stats: ListenerStats::new(ADMIN.name, HTTP_ERRORS, &[Rejection::Origin, Rejection::Host], true),
            browsers: options.browsers.clone(),
            auth_guard: shared.auth_guard.clone(),
            idle: options.bounds.http_idle.min(IDLE_MAX),
        }
    }

    fn limiter(&self) -> &Limiter {
        self.engine.limiter()
    }

    /// Returns the rules of the instance, given its configuration.
    fn rules<'r>(&'r self, loaded: Option<&'r Loaded>) -> Option<OperatorRules<'r>> {
        let (lookups, shield) = (self.engine.lookups(), Some(self.engine.shield()));
        loaded.map(|loaded| OperatorRules { loaded, lookups, shield })
    }

    /// Answers one request of the client at `peer` by the table of this module, or [rejects](Self::reject) it.
    ///
    /// An unknown path gets 404, but 401 without the token. Every response has `cache-control: no-store`.
    pub(crate) async fn answer<B>(&self, request: Request<B>, peer: IpAddr) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        let mut response = match self.reject(&request) {
            Some(rejection) => rejection,
            None => self.route(request, peer).await.unwrap_or_else(|ErrorResponse(error)| *error),
        };
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response.map(full_body)
    }

    /// Returns the rejection of a request that a browser may have sent for a web page, or `None` for other requests.
    ///
    /// It is 421 for an unknown `Host`, and 403 for a foreign origin. Counts and logs the rejection.
    ///
    /// `/healthz` discloses nothing and is never rejected.
    fn reject<B>(&self, request: &Request<B>) -> Option<Response<Bytes>> {
        if page_path(request.uri().path()) == "/healthz" {
            return None;
        }
        if !self.browsers.is_known_host(request.headers()) {
            let warning =
                "rejected a request to the admin listener with an unknown Host; use --admin-host NAME to allow a name";
            self.stats.reject(Rejection::Host, warning);
            let message = "unknown Host; use the address of the listener, or start the server with --admin-host NAME";
            return Some(problem(StatusCode::MISDIRECTED_REQUEST, "unknown_host", message));
        }
        self.browsers.is_foreign(request.headers()).then(|| foreign_origin(&self.stats))
    }

    async fn route<B>(&self, request: Request<B>, peer: IpAddr) -> Answer
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        let began = Instant::now();
        let (began, response) = match self.answer_public(&request) {
            Some(response) => (began, Ok(response)),
            None => {
                self.authenticate(request.headers(), peer).await?;
                // Timed from here on, without the delay after failed attempts.
                (Instant::now(), self.answer_authenticated(request).await)
            }
        };
        self.stats.request_times.record(began.elapsed());
        response
    }

    /// Answers a request to `/healthz`, `/readyz`, `/metrics`, `/openapi.json` or `/docs`, which need no token.
    ///
    /// The answer is 405 if the method is neither GET nor HEAD. Returns `None` for all other paths.
    fn answer_public<B>(&self, request: &Request<B>) -> Option<Response<Bytes>> {
        let is_get = matches!(*request.method(), Method::GET | Method::HEAD);
        let answer: fn(&AdminListener, &HeaderMap) -> Response<Bytes> = match page_path(request.uri().path()) {
            "/healthz" => |_, _| json(StatusCode::OK, &HealthBody { alive: true }),
            "/readyz" => |listener, _| listener.readyz(),
            "/metrics" => AdminListener::metrics,
            "/openapi.json" => |_, _| openapi::ADMIN.document_response(),
            "/docs" => |_, _| openapi::ADMIN.page_response(),
            _ => return None,
        };
        Some(if is_get { answer(self, request.headers()) } else { method_not_allowed("GET, HEAD") })
    }

    async fn answer_authenticated<B>(&self, request: Request<B>) -> Answer
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let allowed = match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, "/v1/rules") => return Ok(rules::list(&self.engine)),
            (_, "/v1/rules") => "GET, HEAD",
            (&Method::GET | &Method::HEAD, "/v1/keys") if query.is_empty() => return api_keys::list(self).await,
            (&Method::GET | &Method::HEAD, "/v1/keys") => return keys::inspect(self, &query).await,
            (&Method::DELETE, "/v1/keys") => return keys::reset(self, &query).await,
            (_, "/v1/keys") => "GET, HEAD, DELETE",
            (_, path) if path.starts_with("/v1/keys/") => return api_keys::answer(self, request).await,
            (&Method::GET | &Method::HEAD, "/v1/bans") => return bans::inspect(self, &query).await,
            (&Method::PUT, "/v1/bans") => return bans::set(self, &query).await,
            (&Method::DELETE, "/v1/bans") => return bans::lift(self, &query).await,
            (_, "/v1/bans") => "GET, HEAD, PUT, DELETE",
            (&Method::POST, "/v1/explain") => return self.explain(request, &query).await,
            (&Method::POST, "/v1/reload") => return self.reload().await,
            (_, "/v1/explain" | "/v1/reload") => "POST",
            _ => {
                let message = "expected /v1/rules, /v1/keys, /v1/keys/{name}, /v1/keys/{name}/plan, /v1/keys/{name}/limits, /v1/keys/{name}/groups, \
                               /v1/bans, /v1/explain, /v1/reload, /metrics, /healthz, /readyz, /openapi.json or /docs";
                return Err(problem(StatusCode::NOT_FOUND, "not_found", message).into());
            }
        };
        Err(method_not_allowed(allowed).into())
    }

    /// Checks the bearer token of a request; see [`secret::authenticate`].
    ///
    /// `Err` is the response: 401 if the token is missing or wrong or the server has none, 429 if 16 attempts of `peer`
    /// are waiting already.
    async fn authenticate(&self, headers: &HeaderMap, peer: IpAddr) -> Result<(), ErrorResponse> {
        let checked = secret::authenticate(self.token.as_ref(), headers, peer, &self.auth_guard, &self.stats).await;
        checked.map_err(|error| {
            ErrorResponse::from(match error {
                AuthError::Missing => unauthorized(TOKEN_MISSING, "admin"),
                AuthError::Wrong => unauthorized(TOKEN_WRONG, "admin"),
                AuthError::TooManyAttempts => {
                    let mut response = problem(StatusCode::TOO_MANY_REQUESTS, "too_many_attempts", TOO_MANY_ATTEMPTS);
                    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
                    response
                }
            })
        })
    }

    fn readyz(&self) -> Response<Bytes> {
        let status = if self.readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        json(status, &self.readiness.body())
    }

    fn metrics(&self, headers: &HeaderMap) -> Response<Bytes> {
        let format = MetricsFormat::negotiate(headers);
        let Some(text) = self.metrics.encode(format) else {
            return problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the metrics cannot be encoded");
        };
        let mut response = Response::new(Bytes::from(text));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
        response
    }

    /// Answers with what the rules would do with the request that the body describes: an [`Explanation`] as JSON.
    ///
    /// Reads the counters of the rules that apply, without charging them. Asks the lookups if necessary.
    ///
    /// The answer is 200 even if the store does not answer; then `counters_unknown` says why the counters are missing.
    /// It is 400 if the query or the body is invalid, or the server has no rules, 413 if the body has more than 256
    /// KiB, and 408 if it takes longer than 10 s. In the query, `reveal=true` shows the values of subjects, and `client`
    /// names the client of the request instead of its address and headers.
    async fn explain<B>(&self, request: Request<B>, query: &str) -> Answer
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        let bad = |message: &str| ErrorResponse::from(message.to_owned());
        let (mut is_revealing, mut client) = (false, None);
        for (name, value) in parameters(query) {
            match (name, &*value) {
                ("reveal", b"true") => is_revealing = true,
                ("reveal", b"false") => is_revealing = false,
                ("client", text) => client = Some(String::from_utf8_lossy(text).into_owned()),
                _ => return Err(bad("unknown parameter; expected reveal=true or client=CLIENT")),
            }
        }
        let body = read_body(request.into_body(), BODY_BYTES_MAX).await?;
        let (described, peer) = match CheckRequest::parse(&body) {
            Ok(CheckRequest::ByRules(check)) => (check.request, check.peer),
            Ok(_) | Err(CheckRequestError::Form) => {
                return Err(bad("expected {\"request\": {\"method\": …, \"path\": …, \"peer\": …}}"));
            }
            Err(error) => return Err(bad(&error.to_string())),
        };
        let loaded = self.reloader.loaded();
        let loaded = loaded.ok_or_else(|| bad("this instance has no rules to explain; start it with --config FILE"))?;
        let (engine, now) = (&self.engine, self.clock.now());
        // If the store does not answer, the bans that were read last are in force.
        let _ = engine.refresh_bans().await;
        let (view, bans) = (RequestView::of(&described), engine.client_bans());
        let query = ExplainQuery { request: &view, peer, client: client.as_deref(), bans, now, is_revealing };
        let mut explanation = Explanation::new(&loaded, engine.lookups(), query).await?;
        explanation.read_counters(engine.limiter()).await;
        explanation.read_shields(engine.shield());
        Ok(json(StatusCode::OK, &explanation))
    }

    async fn reload(&self) -> Answer {
        let error = match self.reloader.reload().await {
            Ok(loaded) => return Ok(json(StatusCode::OK, &ReloadedBody::new(&loaded))),
            Err(error) => error,
        };
        Err(match &*error {
            ReloadError::Nothing => problem(StatusCode::CONFLICT, "nothing_to_reload", &error.to_string()),
            ReloadError::Panicked => problem(StatusCode::INTERNAL_SERVER_ERROR, "internal", &error.to_string()),
            ReloadError::Rejected(_) => {
                let body = NotReloadedBody { error: "configuration_broken", reloaded: false, failure: error.body() };
                json(StatusCode::UNPROCESSABLE_ENTITY, &body)
            }
        }
        .into())
    }
}

/// The result of an endpoint: its response, or that to a request that has failed.
type Answer = Result<Response<Bytes>, ErrorResponse>;

/// The response to a request that has failed.
struct ErrorResponse(Box<Response<Bytes>>);

impl From<Response<Bytes>> for ErrorResponse {
    fn from(response: Response<Bytes>) -> ErrorResponse {
        ErrorResponse(Box::new(response))
    }
}

impl From<String> for ErrorResponse {
    /// Returns the 400 response with this message.
    fn from(message: String) -> ErrorResponse {
        problem(StatusCode::BAD_REQUEST, "bad_request", &message).into()
    }
}

impl From<StoreError> for ErrorResponse {
    /// Returns the 503 response to a request for which the store failed. Its message has the address of the store.
    fn from(error: StoreError) -> ErrorResponse {
        problem(StatusCode::SERVICE_UNAVAILABLE, "unavailable", &error.to_string()).into()
    }
}

/// Iterates over the parameters of a percent-encoded query. In values, `+` is a space.
fn parameters(query: &str) -> impl Iterator<Item = (&str, Vec<u8>)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (name, percent_decode_str(&value.replace('+', " ")).collect())
    })
}

/// Returns the 401 response to a request without the token of the listener with this name: a JSON body with `message`, and
/// `WWW-Authenticate` with the name.
pub(crate) fn unauthorized(message: &str, listener: &str) -> Response<Bytes> {
    let mut response = problem(StatusCode::UNAUTHORIZED, "unauthenticated", message);
    let realm = HeaderValue::try_from(format!("Bearer realm=\"tidegate {listener}\""));
    response.headers_mut().extend(realm.into_iter().map(|realm| (WWW_AUTHENTICATE, realm)));
    response
}
