//! A service whose requests choose how they end, and clients that wait, leave or time out.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use tidegate::engine::Engine;
use tidegate::layer::{RateLimit, RateLimitLayer};
use tidegate_testkit::conformance::Random;
use tower::{Layer, Service, ServiceExt};

use super::ledger::{Ledger, PEER, QUOTA};

/// How the service ends a request. It is the body of the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Script {
    /// How often the handler yields before it ends.
    yields: u64,
    end: End,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Status(u16),
    Error,
    Panic,
    /// Panics in `call`, before there is a future.
    PanicInCall,
    Never,
}

/// How the client waits.
#[derive(Clone, Copy, Debug)]
enum Client {
    Waits,
    /// Drops the future after this many polls.
    Leaves(u64),
    /// A timeout around the layer drops the future.
    TimesOut(Duration),
}

/// The status with which the handler responded; 0 before.
///
/// A client may leave between the response of the handler and that of the layer, during a refund.
#[derive(Clone, Default)]
struct Answered(Arc<AtomicU16>);

#[derive(Clone, Debug)]
pub(crate) struct Handler;

#[derive(Debug, PartialEq)]
pub(crate) struct Broken;

impl Service<Request<Script>> for Handler {
    type Response = Response<Bytes>;
    type Error = Broken;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Bytes>, Broken>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Script>) -> Self::Future {
        let Script { yields, end } = *request.body();
        let answered = request.extensions().get::<Answered>().cloned().unwrap_or_default();
        assert!(!matches!(end, End::PanicInCall), "{PLANNED}");
        Box::pin(async move {
            for _ in 0..yields {
                tokio::task::yield_now().await;
            }
            match end {
                End::Status(status) => {
                    let mut response = Response::new(Bytes::new());
                    *response.status_mut() = StatusCode::from_u16(status).unwrap();
                    answered.0.store(status, Ordering::Relaxed);
                    Ok(response)
                }
                End::Error => Err(Broken),
                End::Panic | End::PanicInCall => panic!("{PLANNED}"),
                End::Never => std::future::pending().await,
            }
        })
    }
}

const PLANNED: &str = "a panic planned by the test";
const COST: &str = "x-cost";

/// The handler behind the layer.
pub(crate) type Site = RateLimit<Handler>;

pub(crate) fn site(engine: &Engine) -> Site {
    let layer = RateLimitLayer::new(engine.clone(), |_| Some(PEER.into())).cost(|parts| {
        let cost = parts.headers.get(COST)?.to_str().ok()?.parse::<u32>().ok()?;
        Some(cost.into())
    });
    layer.layer(Handler)
}

fn request(cost: u32, script: Script) -> Request<Script> {
    Request::post("/").header(COST, cost).body(script).unwrap()
}

/// Sends a request with cost 0 and returns its `RateLimit` header.
pub(crate) async fn ratelimit_header(site: Site) -> String {
    let script = Script { yields: 0, end: End::Status(200) };
    let response = site.oneshot(request(0, script)).await.unwrap();
    response.headers()["ratelimit"].to_str().unwrap().to_owned()
}

/// One request with a random ending.
pub(crate) struct Ending {
    cost: u32,
    script: Script,
    client: Client,
}

impl Ending {
    /// Returns a random ending. `timeout` is that of a client that times out.
    pub(crate) fn random(random: &mut Random, timeout: Duration) -> Ending {
        let statuses = [200, 201, 204, 302, 304, 400, 401, 404, 429, 500, 503];
        let status = End::Status(statuses[random.below(statuses.len() as u64) as usize]);
        let (end, client) = match random.below(10) {
            0..=2 => (status, Client::Waits),
            3 => (End::Error, Client::Waits),
            4 => (End::Panic, Client::Waits),
            5 => (End::PanicInCall, Client::Waits),
            // The response may come before the client leaves.
            6 | 7 => (status, Client::Leaves(random.below(8))),
            8 => (End::Never, Client::Leaves(random.below(8))),
            _ => (End::Never, Client::TimesOut(timeout)),
        };
        // Sometimes more than the quota: refused, and not charged.
        let cost = if random.below(20) == 0 { QUOTA + 1 } else { 1 + random.below(3) as u32 };
        Ending { cost, script: Script { yields: random.below(4), end }, client }
    }

    /// Sends the request and returns what it must have cost.
    ///
    /// A request is charged at the first poll of its future, so an unpolled one costs nothing.
    pub(crate) async fn run(self, mut site: Site) -> Ledger {
        let mut ledger = Ledger::default();
        let Ending { cost, script, client } = self;
        let (mut request, answered) = (request(cost, script), Answered::default());
        request.extensions_mut().insert(answered.clone());
        // In a task of its own, since it may panic.
        let response = tokio::spawn(async move {
            let future = site.ready().await.unwrap().call(request);
            match client {
                Client::Waits => Some(future.await),
                Client::Leaves(polls) => polled_at_most(polls, future).await,
                Client::TimesOut(timeout) => tokio::time::timeout(timeout, future).await.ok(),
            }
        });
        let response = response.await;
        if let Err(ended) = &response {
            let panicked = matches!(script.end, End::Panic | End::PanicInCall);
            assert!(ended.is_panic() && panicked, "{script:?}: {ended}");
        }
        let is_charged = cost <= QUOTA && !matches!(client, Client::Leaves(0));
        match response {
            Ok(Some(Ok(response))) if cost > QUOTA => assert_eq!(response.status(), 429),
            Ok(Some(Ok(response))) => {
                assert!(matches!(script.end, End::Status(status) if response.status() == status), "{script:?}");
                ledger.note(cost, response.status().as_u16() < 400);
            }
            Ok(Some(Err(error))) => {
                assert!(error == Broken && matches!(script.end, End::Error));
                ledger.note(cost, false);
            }
            Ok(None) | Err(_) if is_charged => match answered.0.load(Ordering::Relaxed) {
                0 => ledger.unanswered += cost,
                status => ledger.note(cost, status < 400),
            },
            Ok(None) | Err(_) => {}
        }
        ledger
    }
}

/// Returns the output of the future, or `None` if it is not ready after this many polls.
async fn polled_at_most<F: Future>(polls: u64, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(move |context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            // Wake at once, so that the polls are counted even if the future is never woken.
            Poll::Pending => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
        }
    })
    .await
}

/// Keeps planned panics out of the test output.
pub(crate) fn silence_planned_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let message = info.payload_as_str().unwrap_or_default();
        if !message.contains(PLANNED) {
            print(info);
        }
    }));
}
