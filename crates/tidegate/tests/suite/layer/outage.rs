//! An unreachable store, and rules that differ in `on_failure`.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use tidegate::engine::Engine;
use tidegate::layer::RateLimitLayer;
use tidegate::{Limiter, MemoryStore};
use tidegate_testkit::simulated::VirtualClock;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};

use super::site::{PEER, UnreachableStore, rules};

/// Creates a layer with an unreachable store. Its clock is tokio's.
fn layer(text: &str) -> RateLimitLayer {
    let clock = VirtualClock::start();
    let memory = MemoryStore::builder().clock(clock.clone()).build();
    let limiter = Limiter::builder().store(Arc::new(UnreachableStore)).memory(memory).clock(clock).build();
    RateLimitLayer::new(Engine::new(limiter, rules(text)), |extensions| extensions.get::<IpAddr>().copied())
}

/// Sends a request whose handler answers with this status.
async fn send(layer: &RateLimitLayer, path: &str, answer: StatusCode) -> Response<Bytes> {
    let handler = service_fn(move |_: Request<()>| async move {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = answer;
        Ok::<_, Infallible>(response)
    });
    let request = Request::post(path).extension(IpAddr::from(PEER)).body(()).unwrap();
    layer.layer(handler).oneshot(request).await.unwrap()
}

#[tokio::test]
async fn local_charge_is_refunded_although_another_rule_is_uncounted() {
    let layer = layer(
        r#"
        expose_headers = true
        [[rules]]
        name = "login"
        match = { path = "/login" }
        by = ["ip"]
        limits = ["3/h"]
        charge = "on_failure"
        on_failure = "local"
        [[rules]]
        name = "all"
        by = ["ip"]
        limits = ["1000/h"]
        on_failure = "allow"
        "#,
    );
    for _ in 0..10 {
        let answered = send(&layer, "/login", StatusCode::OK).await;
        assert_eq!(answered.status(), StatusCode::OK, "a success is not charged");
        assert!(!answered.headers().contains_key("ratelimit"), "one of the rules is not counted");
    }
    for _ in 0..3 {
        assert_eq!(send(&layer, "/login", StatusCode::UNAUTHORIZED).await.status(), StatusCode::UNAUTHORIZED);
    }
    let refused = send(&layer, "/login", StatusCode::UNAUTHORIZED).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let exposed = refused.headers()["access-control-expose-headers"].to_str().unwrap().to_lowercase();
    assert!(exposed.contains("retry-after"), "{exposed}");
}

#[tokio::test(start_paused = true)]
async fn local_leaky_bucket_delays_requests_although_another_rule_is_uncounted() {
    let layer = layer(
        r#"
        [[rules]]
        name = "jobs"
        by = ["ip"]
        limits = ["20/s leaky-bucket"]
        on_failure = "local"
        [[rules]]
        name = "all"
        by = ["ip"]
        limits = ["1000/h"]
        on_failure = "allow"
        "#,
    );
    assert_eq!(send(&layer, "/", StatusCode::OK).await.status(), StatusCode::OK);
    let begun = Instant::now();
    for _ in 0..2 {
        assert_eq!(send(&layer, "/", StatusCode::OK).await.status(), StatusCode::OK);
    }
    assert_eq!(begun.elapsed(), Duration::from_millis(100), "one twentieth of a second each");
}
