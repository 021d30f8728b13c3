//! A store that is away, and rules that differ in what to do about it.
#![cfg(feature = "redis")]

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use tokio::time::Instant;
use tollgate::Limiter;
use tollgate::engine::Engine;
use tollgate::layer::RateLimitLayer;
use tower::{Layer, ServiceExt, service_fn};

use super::site::{HERE, rules};

/// A layer whose store is not there: nobody listens on port 1.
fn layer(text: &str) -> RateLimitLayer {
    let store = tollgate_redis::RedisStore::builder("redis://127.0.0.1:1").build().unwrap();
    let limiter = Limiter::builder().store(Arc::new(store)).build();
    RateLimitLayer::new(Engine::new(limiter, rules(text)), |extensions| extensions.get::<IpAddr>().copied())
}

/// What a request gets whose handler answers this.
async fn send(layer: &RateLimitLayer, path: &str, answer: StatusCode) -> Response<Bytes> {
    let handler = service_fn(move |_: Request<()>| async move {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = answer;
        Ok::<_, Infallible>(response)
    });
    let request = Request::post(path).extension(IpAddr::from(HERE)).body(()).unwrap();
    layer.layer(handler).oneshot(request).await.unwrap()
}

#[tokio::test]
async fn what_the_local_share_took_is_given_back_although_another_rule_is_not_decided() {
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
        assert_eq!(answered.status(), StatusCode::OK, "who succeeds is not charged");
        assert!(!answered.headers().contains_key("ratelimit"), "nothing is claimed of what nobody counts");
    }
    for _ in 0..3 {
        assert_eq!(send(&layer, "/login", StatusCode::UNAUTHORIZED).await.status(), StatusCode::UNAUTHORIZED);
    }
    let refused = send(&layer, "/login", StatusCode::UNAUTHORIZED).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let exposed = refused.headers()["access-control-expose-headers"].to_str().unwrap().to_lowercase();
    assert!(exposed.contains("retry-after"), "{exposed}");
}

#[tokio::test]
async fn a_local_leaky_bucket_still_holds_although_another_rule_is_not_decided() {
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
    assert!(begun.elapsed() > Duration::from_millis(40), "two places in the queue: {:?}", begun.elapsed());
}
