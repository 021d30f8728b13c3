//! What happens to one request on its way through the layer.
//!
//! ```text
//!   call ──▶ decided at once ──▶ Refused ─────────────────────────▶ response
//!     │             └──────────▶ Called: the inner future ─▶ settle ▶ response
//!     └────▶ somebody must be asked, or waited for ──▶ Asking, in a box ──▶ response
//! ```
//!
//! Wherever one of these futures is dropped, its passage is dropped with it and keeps what it was charged. What comes back is decided
//! by the head of the response, or by an error of the inner service, which is a failure.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::MakeBody;
use super::{WriteBody, refuse};
use crate::engine::{Asking, Ending, Outcome, Passage, Refused};

type Boxed<B, E> = Pin<Box<dyn Future<Output = Result<Response<B>, E>> + Send>>;

pin_project! {
    /// The response of a limited service, when it comes. `F` is the inner service's future.
    pub struct ResponseFuture<F, B, E> {
        #[pin]
        state: State<F, B, E>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<F, B, E> {
        /// The inner service is at work.
        Called { #[pin] inner: F, passage: Option<Passage> },
        /// It is not asked.
        Refused { response: Option<Response<B>> },
        /// The rest of the way, if it is longer.
        Asking { rest: Boxed<B, E> },
    }
}

impl<F, B, E> ResponseFuture<F, B, E> {
    pub(super) fn called(inner: F, passage: Passage) -> Self {
        ResponseFuture { state: State::Called { inner, passage: Some(passage) } }
    }

    pub(super) fn refused(response: Response<B>) -> Self {
        ResponseFuture { state: State::Refused { response: Some(response) } }
    }

    pub(super) fn asking(rest: impl Future<Output = Result<Response<B>, E>> + Send + 'static) -> Self {
        ResponseFuture { state: State::Asking { rest: Box::pin(rest) } }
    }
}

impl<F: Future<Output = Result<Response<B>, E>>, B, E> Future for ResponseFuture<F, B, E> {
    type Output = Result<Response<B>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProjection::Called { inner, passage } => {
                let result = ready!(inner.poll(context));
                let passage = passage.take().expect("a future is not polled after its end");
                Poll::Ready(match result {
                    Ok(mut response) => {
                        passage.write_onto(&mut response);
                        passage.finish_at_once(|| Ending::of_response(&response));
                        Ok(response)
                    }
                    Err(error) => {
                        passage.finish_at_once(|| Ending::Failure);
                        Err(error)
                    }
                })
            }
            StateProjection::Refused { response } => {
                Poll::Ready(Ok(response.take().expect("a future is not polled after its end")))
            }
            StateProjection::Asking { rest } => rest.as_mut().poll(context),
        }
    }
}

impl<F, B, E> std::fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

/// A request that is on its way to a service which is ready for it.
pub(super) struct Bound<S, ReqBody, M> {
    pub(super) inner: S,
    pub(super) request: Request<ReqBody>,
    pub(super) make_body: M,
    pub(super) wait_max: Duration,
    pub(super) write_body: Option<WriteBody>,
}

impl<S, ReqBody, ResBody, M> Bound<S, ReqBody, M>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    M: MakeBody<ResBody>,
{
    /// Asks whoever must be asked, then goes on.
    pub(super) async fn ask(self, asking: Asking) -> Result<Response<ResBody>, S::Error> {
        match asking.outcome(self.request.headers()).await {
            Outcome::Pass(passage) => self.pass(passage).await,
            Outcome::Refuse(refused) => Ok(self.refuse(refused)),
        }
    }

    fn refuse(&self, refused: Refused) -> Response<ResBody> {
        refuse(refused, self.request.headers(), self.write_body.as_ref(), &self.make_body)
    }

    /// Waits if told to, asks the inner service, settles.
    pub(super) async fn pass(mut self, passage: Passage) -> Result<Response<ResBody>, S::Error> {
        let passage = match passage.wait_at_most(self.wait_max, self.request.headers()).await {
            Outcome::Pass(passage) => passage,
            Outcome::Refuse(refused) => return Ok(self.refuse(refused)),
        };
        tell(&mut self.request, &passage);
        if !passage.wait().is_zero() {
            // That it was ready may be a place for which others wait: it is not taken along to sleep.
            self.inner = self.inner.clone();
            tokio::time::sleep(passage.wait()).await;
            if let Err(error) = poll_fn(|context| self.inner.poll_ready(context)).await {
                passage.finish(Ending::Failure).await;
                return Err(error);
            }
        }
        let result = self.inner.call(self.request).await;
        let Ok(mut response) = result else {
            passage.finish(Ending::Failure).await;
            return result;
        };
        passage.write_onto(&mut response);
        passage.finish(Ending::of_response(&response)).await;
        Ok(response)
    }
}

/// Puts the decision where the handler finds it.
pub(super) fn tell<B>(request: &mut Request<B>, passage: &Passage) {
    if let Some(decision) = passage.decision() {
        request.extensions_mut().insert(decision.clone());
    }
}
