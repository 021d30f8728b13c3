//! Real connections, some of which are closed before the response.
//!
//! Only the service knows whether a request was read before its connection was closed, and whether a response was ready. So a
//! service between layer and handler records how each future ended.

use std::future::Future;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};

use axum::Router;
use axum::extract::Path;
use axum::routing::get;
use http::{Request, Response, StatusCode};
use tidegate::engine::Engine;
use tidegate::layer::RateLimitLayer;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::poll::until;
use tokio::sync::oneshot;
use tower::{Service, layer::layer_fn};

use super::ledger::{Ledger, PEER, engine_in_process, seed};

const CONNECTIONS: usize = 400;

/// How the requests that reached the handler ended.
#[derive(Default)]
struct Seen {
    succeeded: AtomicU32,
    failed: AtomicU32,
    unanswered: AtomicU32,
    /// The requests that have not ended.
    in_flight: AtomicU32,
}

impl Seen {
    fn ledger(&self) -> Ledger {
        let [succeeded, failed, unanswered] =
            [&self.succeeded, &self.failed, &self.unanswered].map(|count| count.load(Ordering::SeqCst));
        Ledger { succeeded, failed, unanswered }
    }
}

#[derive(Clone)]
struct Witness<S> {
    inner: S,
    seen: Arc<Seen>,
}

/// Records on drop how a request ended: without a response unless `note` was called.
struct Watched {
    seen: Arc<Seen>,
    status: Option<StatusCode>,
}

impl Watched {
    // A method, since an assignment to the field would capture only the field in the future.
    fn note(&mut self, status: StatusCode) {
        self.status = Some(status);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let ended = match self.status {
            None => &self.seen.unanswered,
            Some(status) if status.as_u16() < 400 => &self.seen.succeeded,
            Some(_) => &self.seen.failed,
        };
        ended.fetch_add(1, Ordering::SeqCst);
        self.seen.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<S, B, C> Service<Request<B>> for Witness<S>
where
    S: Service<Request<B>, Response = Response<C>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        self.seen.in_flight.fetch_add(1, Ordering::SeqCst);
        let mut watched = Watched { seen: self.seen.clone(), status: None };
        let future = self.inner.call(request);
        Box::pin(async move {
            let response = future.await?;
            watched.note(response.status());
            Ok(response)
        })
    }
}

fn app(engine: &Engine, seen: &Arc<Seen>) -> Router {
    let seen = seen.clone();
    let status = |Path(status): Path<u16>| async move { StatusCode::from_u16(status).unwrap() };
    let hang = || async { std::future::pending::<()>().await };
    Router::new()
        .route("/status/{status}", get(status))
        .route("/hang", get(hang))
        // As one layer: axum would box them separately, and a request could be dropped between the two.
        .layer((
            RateLimitLayer::new(engine.clone(), |_| Some(PEER.into())),
            layer_fn(move |inner| Witness { inner, seen: seen.clone() }),
        ))
}

fn send(address: SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    stream
}

/// Opens all connections one after the other, and closes some early.
fn run_clients(address: SocketAddr, seed: u64) {
    let mut random = Random::new(seed);
    let statuses = [200, 204, 302, 400, 404, 500];
    let mut hanging = Vec::new();
    for _ in 0..CONNECTIONS {
        let status = statuses[random.below(statuses.len() as u64) as usize];
        match random.below(4) {
            0 => drop(send(address, &format!("/status/{status}"))),
            1 => drop(send(address, "/hang")),
            2 => hanging.push(send(address, "/hang")),
            _ => {
                let mut answer = String::new();
                send(address, &format!("/status/{status}")).read_to_string(&mut answer).unwrap();
                assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
            }
        }
        // Some stay open for a while, so that their handlers start.
        if random.below(8) == 0 {
            hanging.clear();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_closed_early_leave_exactly_their_charges() {
    let engine = engine_in_process();
    let seen = Arc::new(Seen::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = axum::serve(listener, app(&engine, &seen)).with_graceful_shutdown(async move {
        stopped.await.ok();
    });
    let serving = tokio::spawn(async move { serving.await });

    let seed = seed();
    tokio::task::spawn_blocking(move || run_clients(address, seed)).await.unwrap();
    // The server stops when every connection is closed.
    stop.send(()).unwrap();
    serving.await.unwrap().unwrap();
    // The server reports a connection as closed before it drops the futures of its requests.
    until("every request has ended", || seen.in_flight.load(Ordering::SeqCst) == 0).await;

    let ledger = seen.ledger();
    ledger.expect_counters(&engine, &format!("TIDEGATE_SEED={seed}")).await;
    let Ledger { succeeded, failed, unanswered } = ledger;
    assert!(succeeded.min(failed).min(unanswered) > 50, "every kind of ending: {ledger:?}");
}
