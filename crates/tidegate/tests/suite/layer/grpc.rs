//! A tonic service behind the layer, called by a tonic client over a socket.

use std::sync::Arc;

use http::HeaderMap;
use tidegate::Limiter;
use tidegate::engine::Engine;
use tidegate::layer::{EmptyBody, RateLimitLayer};
use tokio::net::TcpListener;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Channel, Server};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tower::{Layer, ServiceExt, service_fn};

use super::site::{UnreachableStore, parse_ratelimit, rules};

/// Serves the health service with this engine in front of it, until the runtime ends.
async fn serve(engine: Engine) -> HealthClient<Channel> {
    let layer = RateLimitLayer::new(engine, |extensions| {
        extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr).map(|address| address.ip())
    });
    serve_behind(layer.bodies(EmptyBody)).await
}

async fn serve_behind(layer: RateLimitLayer<EmptyBody>) -> HealthClient<Channel> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (_, health) = tonic_health::server::health_reporter();
    let serving = Server::builder().layer(layer).add_service(health).serve_with_incoming(TcpIncoming::from(listener));
    tokio::spawn(serving);
    HealthClient::new(Channel::from_shared(url).unwrap().connect().await.unwrap())
}

/// Requests the health of a service. The one without a name is known, others are NOT_FOUND.
async fn check(client: &mut HealthClient<Channel>, service: &str) -> Result<HeaderMap, Status> {
    let answer = client.check(HealthCheckRequest { service: service.into() }).await?;
    Ok(answer.into_parts().0.into_headers())
}

#[tokio::test]
async fn denial_is_resource_exhausted_with_the_rate_limit_headers_as_metadata() {
    let rules = rules("[[rules]]\nname = 'rpc'\nby = ['ip']\nlimits = ['2/h', '100/day']");
    let mut client = serve(Engine::new(Limiter::memory(), rules)).await;
    for n in 1..=2 {
        let metadata = check(&mut client, "").await.unwrap();
        assert_eq!(parse_ratelimit(metadata["ratelimit"].to_str().unwrap())[0].remaining, 2 - n);
    }
    for _ in 0..3 {
        let status = check(&mut client, "").await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().starts_with("the limit of 2 per hour has been reached; try again in 3"), "{status}");
        let metadata = status.metadata().clone().into_headers();
        assert_eq!(metadata["ratelimit-policy"], r#""per-hour";q=2;w=3600, "per-day";q=100;w=86400"#);
        let policies = parse_ratelimit(metadata["ratelimit"].to_str().unwrap());
        let remaining: Vec<i64> = policies.iter().map(|policy| policy.remaining).collect();
        assert_eq!(remaining, [0, 98], "a denial per hour is not charged per day");
        let retry_after: u64 = metadata["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=3_600).contains(&retry_after));
        assert_eq!(metadata["x-ratelimit-remaining"], "0");
    }
}

#[tokio::test]
async fn failed_rpc_counts_as_a_failure_although_its_http_status_is_200() {
    let rules = rules("[[rules]]\nname = 'rpc'\nby = ['ip']\ncharge = 'on_failure'\nlimits = ['3/h']");
    let mut client = serve(Engine::new(Limiter::memory(), rules)).await;
    for _ in 0..10 {
        check(&mut client, "").await.expect("a success costs nothing");
    }
    for _ in 0..3 {
        assert_eq!(check(&mut client, "unknown").await.unwrap_err().code(), Code::NotFound);
    }
    assert_eq!(check(&mut client, "").await.unwrap_err().code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn banned_client_gets_permission_denied_and_a_missing_peer_address_gets_internal() {
    let text = "[[bans]]\nby = 'ip'\nvalue = '127.0.0.1'\n[[rules]]\nname = 'rpc'\nby = ['ip']\nlimits = ['3/h']";
    let engine = Engine::new(Limiter::memory(), rules(text));
    let status = check(&mut serve(engine.clone()).await, "").await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::PermissionDenied, "this caller is banned"));

    let without_peer = RateLimitLayer::new(engine, |_| None).bodies(EmptyBody);
    let status = check(&mut serve_behind(without_peer).await, "").await.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    assert!(status.message().contains("into_make_service_with_connect_info::<SocketAddr>()"), "{status}");
}

#[tokio::test]
async fn unreachable_store_is_unavailable_under_on_failure_deny() {
    let rules = rules("[[rules]]\nname = 'rpc'\nby = ['ip']\non_failure = 'deny'\nlimits = ['3/h']");
    let engine = Engine::new(Limiter::builder().store(Arc::new(UnreachableStore)).build(), rules);
    let status = check(&mut serve(engine).await, "").await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let metadata = status.metadata().clone().into_headers();
    assert!(metadata.contains_key("retry-after") && !metadata.contains_key("ratelimit"), "{metadata:?}");
}

#[tokio::test]
async fn refusal_is_trailers_only_for_grpc_and_429_for_other_clients() {
    let rules = rules("[[rules]]\nname = 'rpc'\nby = ['global']\nlimits = [{ name = 'none', limit = '1/h' }]");
    let layer = RateLimitLayer::new(Engine::new(Limiter::memory(), rules), |_| Some([127, 0, 0, 1].into()));
    let service = layer.bodies(EmptyBody).layer(service_fn(|_: http::Request<()>| async {
        Ok::<_, std::convert::Infallible>(http::Response::new(tonic::body::Body::empty()))
    }));
    let send = |content_type: &'static str| {
        let request = http::Request::post("/").header("content-type", content_type).body(()).unwrap();
        let service = service.clone();
        async { service.oneshot(request).await.unwrap().into_parts().0 }
    };
    assert_eq!(send("application/json").await.status, 200);
    let plain = send("application/json").await;
    assert_eq!((plain.status.as_u16(), plain.headers.get("grpc-status")), (429, None));
    for content_type in ["application/grpc", "application/grpc+proto"] {
        let head = send(content_type).await;
        assert_eq!((head.status.as_u16(), &head.headers["grpc-status"]), (200, &"8".parse().unwrap()));
        assert_eq!(head.headers["content-type"], content_type);
        assert!(head.headers.contains_key("retry-after") && head.headers.contains_key("grpc-message"));
    }
}
