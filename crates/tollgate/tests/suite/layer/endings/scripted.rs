//! A service whose requests say how they end, and the ways in which one may wait for them.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use tollgate::engine::Engine;
use tollgate::layer::{RateLimit, RateLimitLayer};
use tollgate_testkit::conformance::Random;
use tower::{Layer, Service, ServiceExt};

use super::ledger::{Ledger, PEER, QUOTA};

/// How a request ends, as far as the service has a say. It is the request's body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Script {
    /// How often the handler gives way before it ends.
    yields: u64,
    end: End,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Status(u16),
    Error,
    Panic,
    /// Not even a future.
    PanicInCall,
    Never,
}

/// What the client does meanwhile.
#[derive(Clone, Copy, Debug)]
enum Client {
    Waits,
    /// Leaves after so many polls of its future.
    Leaves(u64),
    /// A timeout around the layer cuts it off.
    TimesOut(Duration),
}

/// The status that the handler has answered, 0 before. A client may leave after that and before it hears of it: while its units are given back.
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

const PLANNED: &str = "a panic that the test wanted";
const COST: &str = "x-cost";

/// The service behind the layer.
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

/// What a request that costs nothing is told about the quotas.
pub(crate) async fn told(site: Site) -> String {
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
    /// `patience` is how long a timeout around the layer waits.
    pub(crate) fn random(random: &mut Random, patience: Duration) -> Ending {
        let statuses = [200, 201, 204, 302, 304, 400, 401, 404, 429, 500, 503];
        let status = End::Status(statuses[random.below(statuses.len() as u64) as usize]);
        let (end, client) = match random.below(10) {
            0..=2 => (status, Client::Waits),
            3 => (End::Error, Client::Waits),
            4 => (End::Panic, Client::Waits),
            5 => (End::PanicInCall, Client::Waits),
            // It may be over before the client leaves.
            6 | 7 => (status, Client::Leaves(random.below(8))),
            8 => (End::Never, Client::Leaves(random.below(8))),
            _ => (End::Never, Client::TimesOut(patience)),
        };
        // Now and then more than the quota can ever hold: refused, and nobody is charged.
        let cost = if random.below(20) == 0 { QUOTA + 1 } else { 1 + random.below(3) as u32 };
        Ending { cost, script: Script { yields: random.below(4), end }, client }
    }

    /// Lets it happen, and notes what it must have cost. Where a request is charged when its future is first polled rather than when it
    /// is made, one that nobody ever polls costs nothing.
    pub(crate) async fn happen(self, mut site: Site, charged_when_polled: bool) -> Ledger {
        let mut ledger = Ledger::default();
        let Ending { cost, script, client } = self;
        let (mut request, answered) = (request(cost, script), Answered::default());
        request.extensions_mut().insert(answered.clone());
        // A task of its own, because it may panic.
        let response = tokio::spawn(async move {
            let future = site.ready().await.unwrap().call(request);
            match client {
                Client::Waits => Some(future.await),
                Client::Leaves(polls) => polled_at_most(polls, future).await,
                Client::TimesOut(patience) => tokio::time::timeout(patience, future).await.ok(),
            }
        });
        let response = response.await;
        if let Err(ended) = &response {
            let panicked = matches!(script.end, End::Panic | End::PanicInCall);
            assert!(ended.is_panic() && panicked, "{script:?}: {ended}");
        }
        let is_charged = cost <= QUOTA && !(charged_when_polled && matches!(client, Client::Leaves(0)));
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

/// The future's output, if it has one after so many polls.
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
            // Leaving is what is waited for: somebody has to come back for it.
            Poll::Pending => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
        }
    })
    .await
}

/// Keeps the panics that a test wanted out of its output.
pub(crate) fn silence_planned_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let message = info.payload_as_str().unwrap_or_default();
        if !message.contains(PLANNED) {
            print(info);
        }
    }));
}
