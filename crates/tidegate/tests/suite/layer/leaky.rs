//! Leaky buckets: which requests are delayed, and for how long.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::IpAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use tidegate::Cost;
use tidegate::layer::RateLimitLayer;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tower::{Service, ServiceExt};

use super::site::{PEER, Site, policies_of};

const RULES: &str = r#"
[[rules]]
name = "jobs"
by = ["ip"]
limits = ["60/min leaky-bucket queue=60", "1000/day"]
"#;

// The limiter's clock is manual. Tokio's clock is paused and advances to the next timer.
#[tokio::test(start_paused = true)]
async fn requests_are_delayed_and_too_long_a_delay_is_refused_without_a_charge() {
    let site = Site::new(RULES).layered(|layer| layer.wait_at_most(Duration::from_secs(3)));
    for seconds in 0..=3 {
        let begun = Instant::now();
        assert_eq!(site.status("/", &[], PEER).await, 200);
        assert_eq!(begun.elapsed().as_secs(), seconds);
    }
    for _ in 0..10 {
        let begun = Instant::now();
        let refused = site.send("/", &[], PEER).await;
        assert_eq!((refused.status().as_u16(), begun.elapsed()), (429, Duration::ZERO));
        assert_eq!(refused.headers()["retry-after"], "1", "after a second the wait is three seconds");
        assert_eq!(policies_of(&refused)[1].remaining, 996, "refusals are not charged");
    }
    site.clock.advance(Duration::from_secs(1));
    assert_eq!(site.status("/", &[], PEER).await, 200, "after its retry-after");
}

/// Sets the cost to the value of the `units` header.
fn priced(layer: RateLimitLayer) -> RateLimitLayer {
    layer.cost(|parts| Some(Cost::new(parts.headers.get("units")?.to_str().ok()?.parse().ok()?)))
}

#[tokio::test(start_paused = true)]
async fn request_with_cost_zero_is_not_delayed_and_counts_as_allowed() {
    let site = Site::new(RULES).layered(|layer| priced(layer).wait_at_most(Duration::from_millis(500)));
    assert_eq!(site.status("/", &[], PEER).await, 200);
    let begun = Instant::now();
    assert_eq!((site.status("/", &[("units", "0")], PEER).await, begun.elapsed()), (200, Duration::ZERO));
    assert_eq!(site.status("/", &[], PEER).await, 429, "it would wait");
    let stats = site.engine.rule_stats();
    assert_eq!((stats[0].allowed(), stats[0].denied()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn request_with_too_long_a_delay_counts_as_denied() {
    let site = Site::new(RULES).layered(|layer| layer.wait_at_most(Duration::from_secs(3)));
    for _ in 0..14 {
        let _ = site.status("/", &[], PEER).await;
    }
    let stats = site.engine.rule_stats();
    assert_eq!((stats[0].allowed(), stats[0].denied()), (4, 10));
}

#[tokio::test(start_paused = true)]
async fn refused_request_with_a_high_cost_changes_no_limit() {
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
    assert_eq!(site.status("/", &[("units", "40")], PEER).await, 200);
    for _ in 0..20 {
        let refused = site.send("/", &[("units", "5")], PEER).await;
        assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"10".parse().unwrap()));
        let remaining: Vec<i64> = policies_of(&refused).iter().map(|policy| policy.remaining).collect();
        assert_eq!(remaining, [561, 60, 960], "no limit is charged");
    }
    let stats = site.engine.rule_stats();
    let counts: Vec<(u64, u64)> = stats.iter().map(|rule| (rule.allowed(), rule.denied())).collect();
    assert_eq!(counts[1], (1, 20));
    assert_eq!(counts[2].1, 0, "refused requests do not reach the shadow rule");
    site.clock.advance(Duration::from_secs(10));
    assert_eq!(site.status("/", &[("units", "5")], PEER).await, 200, "after its retry-after");
}

#[tokio::test(start_paused = true)]
async fn retry_after_of_a_high_cost_is_when_the_queue_has_room() {
    let rules = "[[rules]]\nname = 'jobs'\nby = ['ip']\nlimits = ['60/min leaky-bucket']";
    let site = Site::new(rules).layered(priced);
    assert_eq!(site.status("/", &[("units", "50")], PEER).await, 200);
    let refused = site.send("/", &[("units", "20")], PEER).await;
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"20".parse().unwrap()));
    site.clock.advance(Duration::from_secs(19));
    assert_eq!(site.status("/", &[("units", "20")], PEER).await, 429);
    site.clock.advance(Duration::from_secs(1));
    assert_eq!(site.status("/", &[("units", "20")], PEER).await, 200, "after its retry-after");
}

/// A service for one request at a time: it is ready when it holds the only permit.
struct OneAtATime {
    permits: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Clone for OneAtATime {
    fn clone(&self) -> OneAtATime {
        OneAtATime { permits: self.permits.clone(), permit: None }
    }
}

impl Service<Request<()>> for OneAtATime {
    type Response = Response<Bytes>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Bytes>, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.permit.is_none() {
            self.permit = self.permits.clone().try_acquire_owned().ok();
        }
        if self.permit.is_some() {
            return Poll::Ready(Ok(()));
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        drop(self.permit.take().expect("it was ready"));
        ready(Ok(Response::new(Bytes::new())))
    }
}

#[tokio::test(start_paused = true)]
async fn delayed_request_does_not_keep_the_service_from_others() {
    let site = Site::new(RULES);
    let service = site.layered_over(OneAtATime { permits: Arc::new(Semaphore::new(1)), permit: None });
    let send = |peer: [u8; 4]| {
        let request = Request::post("/").extension(IpAddr::from(peer)).body(()).unwrap();
        Box::pin(service.clone().oneshot(request))
    };
    assert!(send(PEER).await.is_ok());
    let mut delayed = send(PEER);
    assert!((&mut delayed).now_or_never().is_none(), "it is delayed for a second");
    let begun = Instant::now();
    assert!(send([203, 0, 113, 10]).await.is_ok());
    assert_eq!(begun.elapsed(), Duration::ZERO, "another client is not delayed");
    assert!(delayed.await.is_ok());
    assert_eq!(begun.elapsed(), Duration::from_secs(1));
}
