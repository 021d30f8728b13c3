//! The HTTP listener: `POST /v1/check`, `POST /v1/refund` and `/v1/forward-auth`.
//!
//! One JSON request, one JSON decision, with the headers that a limited service would send. The status is the verdict,
//! so that a caller needs nothing else: 200, 429 (a limit denies), 403 (a ban, in the configuration or in the store),
//! 503 (`on_failure = "deny"` without a store) or 414 (a path that is too long). A refusal has the fields of the JSON
//! body that the layer sends. If rules decide, the body also has the whole response to relay (`relayed.rs`).
//!
//! If the listener has a token, a check needs it as `Authorization: Bearer`. Without it, the response is 401, also for
//! a client that has guessed too often: 429 always means that a limit denies.
//!
//! `/v1/refund` (`refund.rs`) corrects the charge of a check. `/v1/forward-auth` (`forward_auth.rs`) decides requests
//! for a reverse proxy, by rules. It requires a trusted proxy instead of the token.

pub(crate) mod connection;
mod fast_path;
mod forward_auth;
#[doc(hidden)]
pub mod fuzz;
pub(crate) mod general;
pub(crate) mod refund;
mod relayed;
pub(crate) mod request;
mod response;
#[cfg(test)]
pub(crate) mod test_support;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Body;
use tidegate::answer::Policies;
use tidegate::engine::{Engine, Outcome, Refusal, RequestOptions};
use tidegate::{Check, Decision, Timestamp};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use self::connection::{OVER_LIMIT_RESPONSE, method_not_allowed, page_path, problem, read_body};
use self::fast_path::PlainChecks;
use self::forward_auth::ForwardAuth;
use self::general::{ResponseBody, full_body};
use self::relayed::RelayedResponse;
use self::request::{CheckRequest, CheckRequestError, ExplicitCheck, RequestCheck};
use self::response::{decision_body, refusal_body};
use crate::auth_guard::AuthGuard;
use crate::browser::BrowserPolicy;
use crate::decider::Decider;
use crate::listener::{
    BoxError, ConnectionContext, Listener, ListenerKind, Role, SecretKind, ServeFuture, ServerState,
};
use crate::listeners::admin::{TOKEN_MISSING, TOKEN_WRONG, TOO_MANY_ATTEMPTS, unauthorized};
use crate::log_limit::LogLimit;
use crate::metrics::{HTTP_ERRORS, ListenerStats, Rejection};
use crate::openapi;
use crate::receipts::IssuedReceipt;
use crate::secret::{AuthError, ListenerSecret, SecretForm, authenticate, is_accepted_at_once};
use crate::stream::ClientStream;

/// The most bytes of a body: a key of 64 KiB in which every byte is escaped, and the rest.
const BODY_BYTES_MAX: usize = 512 * 1024;

/// The HTTP listener.
pub static HTTP: ListenerKind = ListenerKind {
    name: "http",
    help: "the HTTP listener (/v1/check, /v1/refund, /v1/forward-auth)",
    default_address: "127.0.0.1:8080",
    address_setting: None,
    role: Role::Service,
    decides_for_others: true,
    secret: Some(SecretKind {
        form: SecretForm::Token,
        help: "HTTP clients must send as `Authorization: Bearer`",
        variable: "TIDEGATE_HTTP_TOKEN",
        option: "http-token-file",
    }),
    example: r#"curl {auth}-d '{"key":"user:42","limit":"10/min"}' {url}/v1/check"#,
    build: |state| Arc::new(HttpListener::build(state)),
};

/// The HTTP listener: answers `POST /v1/check`, `POST /v1/refund`, `/v1/forward-auth`, `/openapi.json` and `/docs`.
#[derive(Clone, Debug)]
pub(crate) struct HttpListener {
    decider: Decider,
    stats: Arc<ListenerStats>,
    browsers: BrowserPolicy,
    idle: Duration,
    /// The token that checks must have, and the guard against guesses. `None` accepts checks without a token.
    auth: Option<(ListenerSecret, Arc<AuthGuard>)>,
    /// Limits the warnings about forward-auth requests that the proxy's configuration makes invalid.
    forward_auth_log: Arc<LogLimit>,
}

impl Listener for HttpListener {
    fn stats(&self) -> &Arc<ListenerStats> {
        &self.stats
    }

    fn over_limit_reply(&self) -> &'static [u8] {
        OVER_LIMIT_RESPONSE
    }

    fn serve(self: Arc<Self>, stream: ClientStream, peer: SocketAddr, context: ConnectionContext) -> ServeFuture {
        Box::pin(async move { self.serve_stream(stream, peer.ip(), context).await })
    }
}

impl HttpListener {
    /// Creates a listener that decides by this engine, or by a limiter without rules.
    ///
    /// It has no token and no allowed origins, and closes a connection after `idle` without a request.
    pub(crate) fn new(engine: impl Into<Engine>, idle: Duration) -> HttpListener {
        HttpListener::of(Decider::new(engine, Arc::default()), idle)
    }

    fn of(decider: Decider, idle: Duration) -> HttpListener {
        HttpListener {
            decider,
            stats: ListenerStats::new(HTTP.name, HTTP_ERRORS, &[Rejection::Origin], false),
            browsers: BrowserPolicy::default(),
            idle,
            auth: None,
            forward_auth_log: Arc::default(),
        }
    }

    /// Creates the HTTP listener of a server from the state that its listeners share.
    pub(crate) fn build(shared: &ServerState) -> HttpListener {
        let (options, token) = (&shared.options, shared.options.secret_of(&HTTP));
        HttpListener {
            browsers: options.browsers.clone(),
            stats: ListenerStats::new(HTTP.name, HTTP_ERRORS, &[Rejection::Origin], token.is_some()),
            auth: token.map(|token| (token, shared.auth_guard.clone())),
            ..HttpListener::of(shared.decider.clone(), options.bounds.http_idle)
        }
    }

    /// Serves one connection until it ends; see [`connection::serve`].
    ///
    /// Plain checks take the fast path.
    pub(crate) async fn serve_stream<S>(
        &self,
        stream: S,
        peer: IpAddr,
        context: ConnectionContext,
    ) -> Result<(), BoxError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let handler = |request| self.answer_authenticated(request, peer);
        connection::serve(stream, self.idle, context, Some(PlainChecks { listener: self, peer }), handler).await
    }

    /// Returns whether a check of the client at `peer` with this `Authorization` header needs no rejection and no delay.
    ///
    /// Without a token, that is so for every check.
    fn accepts_at_once(&self, authorization: Option<&[u8]>, peer: IpAddr) -> bool {
        self.auth.as_ref().is_none_or(|(token, guard)| {
            authorization.is_some_and(|given| is_accepted_at_once(token, given, peer, guard))
        })
    }

    /// Answers one request as [`answer`](Self::answer) does, but a check or a refund only with the token.
    ///
    /// Without it, the response is 401. A request to `/v1/forward-auth` needs a trusted `peer` instead.
    async fn answer_authenticated<B>(&self, request: Request<B>, peer: IpAddr) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        if let Some(form) = ForwardAuth::at(request.uri().path()) {
            // A large future, which would otherwise be moved with every other request.
            return Box::pin(self.forward_auth(form, request.into_parts().0.headers, peer)).await.map(full_body);
        }
        // The other paths have the same response for every client.
        let needs_token = matches!(page_path(request.uri().path()), "/v1/check" | "/v1/refund");
        if let Some((token, guard)) = self.auth.as_ref().filter(|_| needs_token) {
            let message = match authenticate(Some(token), request.headers(), peer, guard, &self.stats).await {
                Ok(()) => return self.answer(request).await,
                Err(AuthError::Missing) => TOKEN_MISSING,
                Err(AuthError::Wrong) => TOKEN_WRONG,
                Err(AuthError::TooManyAttempts) => TOO_MANY_ATTEMPTS,
            };
            return unauthorized(message, "http").map(full_body);
        }
        self.answer(request).await
    }

    /// Answers one request: a check (`POST /v1/check`), a refund (`POST /v1/refund`), or GET or HEAD of `/openapi.json`
    /// or `/docs`.
    ///
    /// A check that a browser sends for a foreign web page gets 403, which is counted and logged. A body of more than 512
    /// KiB gets 413, one that takes longer than 10 s 408, and one that ends early or is invalid 400. Any other check gets
    /// the response to its decision: 200, 429, 403 (banned), 414 (path too long) or 503 (no decision).
    ///
    /// An unknown path gets 404, and a wrong method 405. `/docs/` and `/openapi.json/` are the same pages.
    pub(crate) async fn answer<B>(&self, request: Request<B>) -> Response<ResponseBody>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        let response = match (request.method(), page_path(request.uri().path())) {
            // A check charges counters, so a page of another site must not send one. The other routes change nothing.
            (&Method::POST, "/v1/check") if self.is_of_foreign_page(request.headers()) => foreign_origin(&self.stats),
            (&Method::POST, "/v1/check") => match read_body(request.into_body(), BODY_BYTES_MAX).await {
                Ok(body) => self.check(&body).await,
                Err(rejection) => rejection,
            },
            (&Method::POST, "/v1/refund") if self.is_of_foreign_page(request.headers()) => foreign_origin(&self.stats),
            (&Method::POST, "/v1/refund") => match read_body(request.into_body(), BODY_BYTES_MAX).await {
                Ok(body) => refund::answer(&self.decider, &body).await,
                Err(rejection) => rejection,
            },
            (_, "/v1/check" | "/v1/refund") => method_not_allowed("POST"),
            (&Method::GET | &Method::HEAD, "/openapi.json") => openapi::HTTP.document_response(),
            (&Method::GET | &Method::HEAD, "/docs") => openapi::HTTP.page_response(),
            (_, "/openapi.json" | "/docs") => method_not_allowed("GET, HEAD"),
            _ => {
                let message =
                    "expected POST /v1/check, POST /v1/refund, /v1/forward-auth, GET /openapi.json or GET /docs";
                problem(StatusCode::NOT_FOUND, "not_found", message)
            }
        };
        response.map(full_body)
    }

    /// Returns whether a browser sent a check or a refund for a web page that may not send it.
    ///
    /// Without a token, that includes pages whose names may have been pointed at this instance (DNS rebinding).
    fn is_of_foreign_page(&self, headers: &HeaderMap) -> bool {
        match self.auth {
            Some(_) => self.browsers.is_foreign(headers),
            None => self.browsers.is_foreign_or_rebound(headers),
        }
    }

    /// Answers `POST /v1/check` with this body. A check with `wait_ms` is answered when there is room, or it is too late.
    ///
    /// Dropping the future ends the wait. Records how long other checks took in `stats.request_times`.
    async fn check(&self, body: &[u8]) -> Response<Bytes> {
        let began = Instant::now();
        let request = CheckRequest::parse(body);
        let is_timed = !request.as_ref().is_ok_and(CheckRequest::waits);
        let response = self.check_parsed(request).await;
        if is_timed {
            self.stats.request_times.record(began.elapsed());
        }
        response
    }

    /// Answers `POST /v1/check` with this body as [`check`](Self::check) does. Returns `None` if the check has `wait_ms`.
    ///
    /// For callers that do not notice meanwhile that the client disconnects.
    async fn check_at_once(&self, body: &[u8]) -> Option<Response<Bytes>> {
        let began = Instant::now();
        let request = CheckRequest::parse(body);
        if request.as_ref().is_ok_and(CheckRequest::waits) {
            return None;
        }
        let response = self.check_parsed(request).await;
        self.stats.request_times.record(began.elapsed());
        Some(response)
    }

    async fn check_parsed(&self, request: Result<CheckRequest<'_>, CheckRequestError>) -> Response<Bytes> {
        match request {
            Ok(CheckRequest::Explicit(explicit)) => {
                self.check_explicit(&explicit).await.unwrap_or_else(|error| bad_request(&error))
            }
            // A large future, which would otherwise be moved with every explicit check.
            Ok(CheckRequest::ByRules(check)) => {
                Box::pin(self.check_by_rules(&check)).await.unwrap_or_else(|error| bad_request(&error))
            }
            Err(error) => bad_request(&error),
        }
    }

    async fn check_explicit(&self, explicit: &ExplicitCheck<'_>) -> Result<Response<Bytes>, CheckRequestError> {
        let demands = explicit.demands()?;
        let check = Check::new(&demands)?;
        let has_receipt = explicit.has_receipt();
        if has_receipt {
            self.decider.check_receipt(&demands)?;
        }
        let resolver = self.decider.engine().explicit();
        let answer = match explicit.wait_max() {
            None => self.decider.check(&resolver, &check, has_receipt).await,
            // A large future, which would otherwise be moved with every check that does not wait.
            Some(wait_max) => Box::pin(self.decider.wait(&resolver, &check, wait_max, has_receipt)).await,
        };
        let policies = resolver.policies(&demands);
        Ok(match answer {
            Ok(decision) if decision.allowed() => {
                let receipt = has_receipt.then(|| self.decider.receipt(&check, &decision)).flatten();
                admission_response(&decision, Some(&policies), None, receipt.as_ref())
            }
            Ok(decision) => refusal_response(&Refusal::by_decision(decision, policies), None),
            Err(_) => refusal_response(&Refusal::unavailable(policies), None),
        })
    }

    async fn check_by_rules(&self, check: &RequestCheck) -> Result<Response<Bytes>, CheckRequestError> {
        let RequestCheck { request, peer, has_receipt } = check;
        self.decider.rules().ok_or(CheckRequestError::NoRules)?;
        Ok(match self.decider.check_request(request, *peer, RequestOptions::default()).await {
            Outcome::Admitted(permit) => {
                let unlimited = Decision::uncounted(Timestamp::ZERO);
                let mut headers = HeaderMap::new();
                permit.write_headers(&mut headers);
                let relayed = RelayedResponse::headers(&headers);
                let receipt = has_receipt.then(|| self.decider.receipt_of(&permit)).flatten();
                let decision = permit.decision().unwrap_or(&unlimited);
                let response = admission_response(decision, permit.policies(), Some(&relayed), receipt.as_ref());
                // The caller reports how the request ends by its receipt, or not at all.
                permit.keep();
                response
            }
            Outcome::Refused(refusal) => {
                let response = refusal.response_to(request.headers());
                refusal_response(&refusal, Some(&RelayedResponse::of(&response)))
            }
        })
    }
}

#[cfg(test)]
impl HttpListener {
    /// Sets the secret under which receipts are encrypted.
    pub(crate) fn with_receipts(self, secret: crate::receipt_secret::ReceiptSecret) -> HttpListener {
        HttpListener { decider: self.decider.clone().with_receipts(Some(secret)), ..self }
    }

    /// Sets the token that checks must have.
    pub(crate) fn with_token(self, token: ListenerSecret) -> HttpListener {
        HttpListener { auth: Some((token, Arc::default())), ..self }
    }

    /// Sets the policy that decides which web pages may send requests.
    pub(crate) fn with_browsers(self, browsers: BrowserPolicy) -> HttpListener {
        HttpListener { browsers, ..self }
    }
}

/// Returns the 200 response to an admitted check. `relayed` has the headers to add to the response of a request.
fn admission_response(
    decision: &Decision,
    policies: Option<&Policies>,
    relayed: Option<&RelayedResponse<'_>>,
    receipt: Option<&IssuedReceipt>,
) -> Response<Bytes> {
    let mut response = Response::new(decision_body(decision, policies, relayed, receipt));
    let headers = response.headers_mut();
    // Room for all headers, so that the map does not grow while they are written.
    headers.reserve(8);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(policies) = policies {
        policies.write_headers(decision, headers);
    }
    response
}

/// Returns the response to a refused check, with the status of the refusal. `relayed` is the response to the request.
fn refusal_response(refusal: &Refusal, relayed: Option<&RelayedResponse<'_>>) -> Response<Bytes> {
    let mut response = Response::new(refusal_body(refusal, relayed));
    *response.status_mut() = refusal.verdict().http();
    let headers = response.headers_mut();
    headers.reserve(8);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    refusal.write_headers(headers);
    response
}

/// Counts and logs a request that a browser sent for a web page of another site, and returns the 403 response.
pub(crate) fn foreign_origin(stats: &ListenerStats) -> Response<Bytes> {
    let warning = "rejected a browser request from a web page on another site; use --allow-origin to allow its origin";
    stats.reject(Rejection::Origin, warning);
    let message =
        "requests from web pages on other sites are rejected; start the server with --allow-origin to allow an origin";
    problem(StatusCode::FORBIDDEN, "foreign_origin", message)
}

fn bad_request(error: &CheckRequestError) -> Response<Bytes> {
    problem(StatusCode::BAD_REQUEST, "bad_request", &error.to_string())
}

#[cfg(test)]
mod tests;
