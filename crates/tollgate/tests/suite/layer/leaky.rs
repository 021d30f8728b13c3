//! Whom a leaky bucket holds, and for how long.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::IpAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tollgate::Cost;
use tollgate::layer::RateLimitLayer;
use tower::{Service, ServiceExt};

use super::site::{HERE, Site, told_by};

const RULES: &str = r#"
[[rules]]
name = "jobs"
by = ["ip"]
limits = ["60/min leaky-bucket queue=60", "1000/day"]
"#;

// The limiter's clock stands still, tokio's jumps to whoever waits next.
#[tokio::test(start_paused = true)]
async fn requests_wait_as_they_are_told_and_who_would_wait_too_long_is_refused_and_not_charged() {
    let site = Site::new(RULES).layered(|layer| layer.wait_at_most(Duration::from_secs(3)));
    for seconds in 0..=3 {
        let begun = Instant::now();
        assert_eq!(site.status("/", &[], HERE).await, 200);
        assert_eq!(begun.elapsed().as_secs(), seconds);
    }
    for _ in 0..10 {
        let begun = Instant::now();
        let refused = site.send("/", &[], HERE).await;
        assert_eq!((refused.status().as_u16(), begun.elapsed()), (429, Duration::ZERO));
        assert_eq!(refused.headers()["retry-after"], "1", "then the wait is three seconds again");
        assert_eq!(told_by(&refused)[1].remaining, 996, "nobody was charged");
    }
    site.clock.advance(Duration::from_secs(1));
    assert_eq!(site.status("/", &[], HERE).await, 200, "as it was told");
}

/// Costs what its `units` header says.
fn priced(layer: RateLimitLayer) -> RateLimitLayer {
    layer.cost(|parts| Some(Cost::new(parts.headers.get("units")?.to_str().ok()?.parse().ok()?)))
}

#[tokio::test(start_paused = true)]
async fn who_only_looks_at_a_full_bucket_passes_at_once_and_is_counted_so() {
    let site = Site::new(RULES).layered(|layer| priced(layer).wait_at_most(Duration::from_millis(500)));
    assert_eq!(site.status("/", &[], HERE).await, 200);
    let begun = Instant::now();
    assert_eq!((site.status("/", &[("units", "0")], HERE).await, begun.elapsed()), (200, Duration::ZERO));
    assert_eq!(site.status("/", &[], HERE).await, 429, "it would wait");
    let stats = site.engine.rule_stats();
    assert_eq!((stats[0].allowed(), stats[0].denied()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn who_would_not_wait_is_refused_by_the_store_and_counted_as_refused() {
    let site = Site::new(RULES).layered(|layer| layer.wait_at_most(Duration::from_secs(3)));
    for _ in 0..14 {
        let _ = site.status("/", &[], HERE).await;
    }
    let stats = site.engine.rule_stats();
    assert_eq!((stats[0].allowed(), stats[0].denied()), (4, 10));
}

#[tokio::test(start_paused = true)]
async fn a_dear_request_that_would_not_wait_leaves_everything_as_it_was_and_is_told_so() {
    let site = Site::new(
        r#"
        [[rules]]
        name = "flood"
        store = "memory"
        by = ["ip"]
        limits = ["100/min"]
        [[rules]]
        name = "jobs"
        by = ["ip"]
        limits = ["60/min leaky-bucket queue=600", "10/min token-bucket burst=100", "1000/day"]
        [[rules]]
        name = "tried"
        mode = "shadow"
        by = ["ip"]
        limits = ["50/min"]
        "#,
    )
    .layered(|layer| priced(layer.wait_at_most(Duration::from_secs(30))));
    assert_eq!(site.status("/", &[("units", "40")], HERE).await, 200);
    for _ in 0..20 {
        let refused = site.send("/", &[("units", "5")], HERE).await;
        assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"10".parse().unwrap()));
        let remaining: Vec<i64> = told_by(&refused).iter().map(|told| told.remaining).collect();
        assert_eq!(remaining, [561, 60, 960], "what the others have left is as it was");
    }
    let stats = site.engine.rule_stats();
    let said: Vec<(u64, u64)> = stats.iter().map(|rule| (rule.allowed(), rule.denied())).collect();
    assert_eq!(said[1], (1, 20), "they were refused, whoever found out");
    assert_eq!(said[2].1, 0, "a shadow is not charged for requests that did not go on");
    site.clock.advance(Duration::from_secs(10));
    assert_eq!(site.status("/", &[("units", "5")], HERE).await, 200, "as it was told");
}

#[tokio::test(start_paused = true)]
async fn a_dear_request_is_told_when_there_is_a_place_and_the_wait_is_short_enough() {
    let rules = "[[rules]]\nname = 'jobs'\nby = ['ip']\nlimits = ['60/min leaky-bucket']";
    let site = Site::new(rules).layered(priced);
    assert_eq!(site.status("/", &[("units", "50")], HERE).await, 200);
    let refused = site.send("/", &[("units", "20")], HERE).await;
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"20".parse().unwrap()));
    site.clock.advance(Duration::from_secs(19));
    assert_eq!(site.status("/", &[("units", "20")], HERE).await, 429);
    site.clock.advance(Duration::from_secs(1));
    assert_eq!(site.status("/", &[("units", "20")], HERE).await, 200, "as it was told");
}

/// Serves one at a time: to be ready is to have the only place.
struct OnePlace {
    places: Arc<Semaphore>,
    place: Option<OwnedSemaphorePermit>,
}

impl Clone for OnePlace {
    fn clone(&self) -> OnePlace {
        OnePlace { places: self.places.clone(), place: None }
    }
}

impl Service<Request<()>> for OnePlace {
    type Response = Response<Bytes>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Bytes>, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.place.is_none() {
            self.place = self.places.clone().try_acquire_owned().ok();
        }
        if self.place.is_some() {
            return Poll::Ready(Ok(()));
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        drop(self.place.take().expect("it was ready"));
        ready(Ok(Response::new(Bytes::new())))
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_is_held_does_not_hold_a_place_that_others_need() {
    let site = Site::new(RULES);
    let service = site.layered_over(OnePlace { places: Arc::new(Semaphore::new(1)), place: None });
    let ask = |peer: [u8; 4]| {
        let request = Request::post("/").extension(IpAddr::from(peer)).body(()).unwrap();
        Box::pin(service.clone().oneshot(request))
    };
    assert!(ask(HERE).await.is_ok());
    let mut held = ask(HERE);
    assert!((&mut held).now_or_never().is_none(), "it waits for a second");
    let begun = Instant::now();
    assert!(ask([203, 0, 113, 10]).await.is_ok());
    assert_eq!(begun.elapsed(), Duration::ZERO, "somebody else does not");
    assert!(held.await.is_ok());
    assert_eq!(begun.elapsed(), Duration::from_secs(1));
}
