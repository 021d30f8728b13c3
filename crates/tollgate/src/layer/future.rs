//! What happens to one request on its way through the layer.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response};
use tower_service::Service;

use super::Gate;
use crate::answer::Verdict;
use crate::engine::{Ending, Outcome};
use crate::rules::RequestView;

/// The response of a limited service, when it comes.
pub struct ResponseFuture<R, E>(Pin<Box<dyn Future<Output = Result<R, E>> + Send>>);

impl<R, E> ResponseFuture<R, E> {
    pub(super) fn new(future: impl Future<Output = Result<R, E>> + Send + 'static) -> Self {
        ResponseFuture(Box::pin(future))
    }
}

impl<R, E> Future for ResponseFuture<R, E> {
    type Output = Result<R, E>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(context)
    }
}

impl<R, E> std::fmt::Debug for ResponseFuture<R, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

/// Decides, waits if told to, asks the inner service, settles. If this future is dropped on the way, the passage is
/// dropped with it, and gives back what a failed request does not owe.
pub(super) async fn respond<S, ReqBody, ResBody>(
    gate: Gate,
    mut inner: S,
    request: Request<ReqBody>,
) -> Result<Response<ResBody>, S::Error>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: From<Bytes>,
{
    let (mut parts, body) = request.into_parts();
    let Some(peer) = (gate.find_peer)(&parts.extensions) else {
        return Ok(unknown_peer().map(ResBody::from));
    };
    let cost = gate.find_cost.as_ref().and_then(|find_cost| find_cost(&parts));
    let passage = match gate.engine.decide_with_cost(&RequestView::of_parts(&parts), peer, cost).await {
        Outcome::Refuse(refused) => return Ok(refused.response.map(ResBody::from)),
        Outcome::Pass(passage) => passage,
    };
    if let Some(decision) = passage.decision() {
        parts.extensions.insert(decision.clone());
    }
    let wait = passage.wait().min(gate.wait_max);
    if !wait.is_zero() {
        tokio::time::sleep(wait).await;
    }
    let mut response = inner.call(Request::from_parts(parts, body)).await?;
    passage.write_headers(response.headers_mut());
    passage.finish(Ending::of(response.status())).await;
    Ok(response)
}

/// 500, and what to do about it.
fn unknown_peer() -> Response<Bytes> {
    tracing::error!(
        "a request without the address of its peer; serve with connect info, or find the peer by a closure"
    );
    let body = serde_json::json!({
        "error": Verdict::Internal.error(),
        "message": "the service does not know where this request came from; it must be served with connect info",
    });
    let mut response = Response::new(Bytes::from(body.to_string()));
    *response.status_mut() = Verdict::Internal.http();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
