//! Refusals with the body that the service sets by `RateLimitLayer::body`.

use std::time::Duration;

use bytes::Bytes;
use http::Response;
use tidegate::answer::{Body, RefusalDetails, Verdict};

use super::site::{PEER, Site, UnreachableStore, rules};

fn page(refusal: &RefusalDetails<'_>) -> Body {
    let what = match refusal.verdict() {
        Verdict::Unavailable => "closed".to_owned(),
        _ => format!("{}:{:?}", refusal.policy().map_or("?", |policy| policy.name()), refusal.retry_after_secs()),
    };
    Body::new("text/html; charset=utf-8", format!("<p>{what}</p>"))
}

fn site(rules: &str) -> Site {
    Site::new(rules).layered(|layer| layer.body(page))
}

fn shown(response: &Response<Bytes>) -> (u16, &str, &[u8]) {
    (response.status().as_u16(), response.headers()["content-type"].to_str().unwrap(), response.body())
}

const HTML: &str = "text/html; charset=utf-8";

#[tokio::test]
async fn refusal_has_the_custom_body_its_content_type_and_all_usual_headers() {
    let site = site("[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['1/min']\nbody = 'problem'");
    let passed = site.send("/", &[], PEER).await;
    assert_eq!(
        (passed.status().as_u16(), &passed.body()[..]),
        (200, &b"Some(0)"[..]),
        "an admitted request keeps its response"
    );
    let refused = site.send("/", &[], PEER).await;
    assert_eq!(shown(&refused), (429, HTML, &b"<p>per-minute:Some(60)</p>"[..]));
    let headers = refused.headers();
    assert_eq!(
        (&headers["retry-after"], &headers["cache-control"]),
        (&"60".parse().unwrap(), &"no-store".parse().unwrap())
    );
    assert_eq!(headers["ratelimit"], r#""per-minute";r=0;t=60"#);
    assert_eq!(headers.get_all("content-type").iter().count(), 1);
}

/// A leaky bucket with too long a wait, a shield and a ban refuse in different places of the code.
#[tokio::test]
async fn custom_body_is_used_for_every_kind_of_refusal_except_a_ban() {
    let held = Site::new("[[rules]]\nname = 'slow'\nby = ['ip']\nlimits = ['1/min leaky-bucket']")
        .layered(|layer| layer.wait_at_most(Duration::ZERO).body(page));
    assert_eq!(held.status("/", &[], PEER).await, 200);
    let refused = held.send("/", &[], PEER).await;
    assert_eq!((refused.status().as_u16(), &refused.headers()["content-type"]), (429, &HTML.parse().unwrap()));

    let shield = site("[[rules]]\nname = 'flood'\nby = ['ip']\nlimits = ['1/h']\nstore = 'memory'");
    assert_eq!(shield.status("/", &[], PEER).await, 200);
    assert_eq!(shown(&shield.send("/", &[], PEER).await), (429, HTML, &b"<p>per-hour:Some(3600)</p>"[..]));

    let banned = site("[[bans]]\nby = 'ip'\nvalue = '203.0.113.9'\n[[rules]]\nname = 'all'\nlimits = ['1/h']");
    let refused = banned.send("/", &[], PEER).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["content-type"]),
        (403, &"application/json".parse().unwrap())
    );
}

#[tokio::test]
async fn ban_in_the_store_is_403_through_the_layer_until_it_ends() {
    let site = site("[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['1/h']");
    site.engine.limiter().ban(b"ip:203.0.113.9", Some(Duration::from_secs(60))).await.unwrap();
    let refused = site.send("/", &[], PEER).await;
    let told = (refused.status().as_u16(), refused.headers()["retry-after"].to_str().unwrap());
    assert_eq!(told, (403, "60"));
    let body: serde_json::Value = serde_json::from_slice(refused.body()).unwrap();
    assert_eq!((&body["error"], &body["retry_after_ms"]), (&"banned".into(), &60_000.into()));
    assert!(!refused.headers().contains_key("ratelimit"), "no limit decided");
    let grpc = site.send("/", &[("content-type", "application/grpc")], PEER).await;
    assert_eq!(grpc.headers()["grpc-status"], "7", "PERMISSION_DENIED");
    site.clock.advance(Duration::from_secs(60));
    assert_eq!(site.status("/", &[], PEER).await, 200);
}

#[tokio::test]
async fn grpc_refusal_has_a_status_and_no_custom_body() {
    let site = site("[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['1/min']");
    let grpc = [("content-type", "application/grpc")];
    assert_eq!(site.status("/", &grpc, PEER).await, 200);
    let refused = site.send("/", &grpc, PEER).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["content-type"]),
        (200, &"application/grpc".parse().unwrap())
    );
    assert_eq!((&refused.headers()["grpc-status"], refused.body().len()), (&"8".parse().unwrap(), 0));
}

#[tokio::test]
async fn custom_body_is_used_when_the_store_is_unreachable() {
    use std::sync::Arc;

    use tidegate::Limiter;
    use tidegate::engine::Engine;
    use tidegate::layer::RateLimitLayer;
    use tower::{Layer, ServiceExt, service_fn};

    let limiter = Limiter::builder().store(Arc::new(UnreachableStore)).build();
    let rules = rules("[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['1/min']\non_failure = 'deny'");
    let layer = RateLimitLayer::new(Engine::new(limiter, rules), |_| Some(PEER.into())).body(page);
    let inner =
        service_fn(|_: http::Request<()>| async { Ok::<_, std::convert::Infallible>(Response::new(Bytes::new())) });
    let refused = layer.layer(inner).oneshot(http::Request::new(())).await.unwrap();
    assert_eq!(shown(&refused), (503, HTML, &b"<p>closed</p>"[..]));
}
