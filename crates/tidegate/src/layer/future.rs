//! The handling of one request by the layer.
//!
//! ```text
//!   Engine::check ─▶ refused ─────────────────────────────────────────────▶ response
//!        └─────────▶ admitted ─▶ wait (leaky bucket) ─▶ inner service ─▶ finish ▶ response
//! ```
//!
//! If this future is dropped, its permit is dropped with it, and every charge is kept. The head of the response
//! determines the refunds; an error from the inner service is a failure. [`KeepCharge`] in the response's extensions keeps
//! every charge.

use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use http::{Request, Response};
use tidegate_core::Cost;
use tokio::time::Instant;
use tower_service::Service;

use super::body::MakeBody;
use super::{LayerSettings, refuse};
use crate::engine::{Ending, Outcome, RequestOptions};
use crate::rules::RequestView;

/// A marker in the extensions of a response: the layer refunds nothing, whatever the status and the `charge` of the
/// rules.
///
/// For a response that the client has caused by aborting its request, such as 400 because the body ended early, or 408
/// because it was too slow. If such a response earned a refund, a client could use the service for nothing by
/// disconnecting in the middle of its body.
///
/// ```
/// use http::{Response, StatusCode};
/// use tidegate::layer::KeepCharge;
///
/// # fn too_slow() -> Response<String> {
/// let mut response = Response::new("the body did not arrive in time".to_owned());
/// *response.status_mut() = StatusCode::REQUEST_TIMEOUT;
/// response.extensions_mut().insert(KeepCharge);
/// # response
/// # }
/// # drop(too_slow());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeepCharge;

/// The future of a [`RateLimit`](super::RateLimit) service. Resolves to a refusal, or to the result of the inner
/// service.
///
/// Resolves to a response with status 500 if the remote address of the request is unknown. If the future is dropped,
/// the charge is kept.
pub type ResponseFuture<B, E> = Pin<Box<dyn Future<Output = Result<Response<B>, E>> + Send>>;

/// Decides a request and, if it is admitted, calls `inner`, which must have been polled ready.
///
/// Returns the response or error of `inner`, or the refusal as a response. Inserts the decision, if there is one, into
/// the request's extensions. Waits before the call if a leaky bucket delays the request. Writes the rate-limit headers
/// of the response, and refunds units by it.
///
/// `cost` and `caller` are those that the functions of the layer returned. A `cost` overrides that of every rule.
#[expect(clippy::manual_async_fn, reason = "an `async fn` would hold its arguments twice, in a future that is moved")]
pub(super) fn respond<S, ReqBody, ResBody, M>(
    mut inner: S,
    mut request: Request<ReqBody>,
    peer: IpAddr,
    cost: Option<Cost>,
    caller: Option<String>,
    settings: Arc<LayerSettings>,
    make_body: M,
) -> impl Future<Output = Result<Response<ResBody>, S::Error>>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    M: MakeBody<ResBody>,
{
    async move {
        let options = RequestOptions { cost, max_wait: Some(settings.wait_max) };
        let view = RequestView::of_rewritten(&request, settings.find_sent).with_caller(caller.as_deref());
        let began = settings.on_outcome.as_ref().map(|_| Instant::now());
        let outcome = settings.engine.check(&view, peer, options).await;
        if let Some((on_outcome, began)) = settings.on_outcome.as_ref().zip(began) {
            on_outcome(request.extensions(), &outcome, began.elapsed());
        }
        let permit = match outcome {
            Outcome::Admitted(permit) => permit,
            Outcome::Refused(refusal) => {
                return Ok(refuse(&refusal, request.headers(), settings.write_body.as_ref(), &make_body));
            }
        };
        if let Some(decision) = permit.decision() {
            request.extensions_mut().insert(decision.clone());
        }
        if let Some(companion) = permit.companion() {
            request.extensions_mut().insert(companion.clone());
        }
        if !permit.wait().is_zero() {
            // A ready service may hold a slot for which other requests wait, so it is replaced by one that is not ready.
            inner = inner.clone();
            tokio::time::sleep(permit.wait()).await;
            if let Err(error) = poll_fn(|context| inner.poll_ready(context)).await {
                permit.finish(Ending::Failure).await;
                return Err(error);
            }
        }
        match inner.call(request).await {
            Ok(mut response) if response.extensions().get::<KeepCharge>().is_some() => {
                permit.write_headers(response.headers_mut());
                permit.keep();
                Ok(response)
            }
            Ok(mut response) => {
                permit.write_headers_of(&mut response);
                permit.finish(Ending::of_response(&response)).await;
                Ok(response)
            }
            Err(error) => {
                permit.finish(Ending::Failure).await;
                Err(error)
            }
        }
    }
}
