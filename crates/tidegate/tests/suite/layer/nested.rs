//! In a nested router, axum removes the prefix from the path. Rules match the path that the client sent.

use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use axum::extract::OriginalUri;
use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};
use axum::routing::{any, post};
use http::Request;
use tidegate::Limiter;
use tidegate::engine::Engine;
use tidegate::layer::RateLimitLayer;
use tower::{Layer, ServiceExt};

use super::site::{PEER, rules};

fn engine(text: &str) -> Engine {
    Engine::new(Limiter::memory(), rules(text))
}

/// Requests these paths in order and returns the statuses.
async fn statuses<'p>(app: Router, paths: impl IntoIterator<Item = &'p str>) -> Vec<u16> {
    let app = app.layer(MockConnectInfo(SocketAddr::from((PEER, 4711))));
    let mut statuses = Vec::new();
    for path in paths {
        let request = Request::post(path).body(Body::empty()).unwrap();
        statuses.push(app.clone().oneshot(request).await.unwrap().status().as_u16());
    }
    statuses
}

const LOGIN: &str = r#"
[[rules]]
name = "login"
match = { methods = ["POST"], path = "/api/login" }
by = ["ip"]
limits = ["5/min"]
"#;

#[tokio::test]
async fn rule_matches_the_full_path_in_a_nested_router() {
    let api = Router::new().route("/login", post(|| async { "welcome" })).layer(RateLimitLayer::axum(engine(LOGIN)));
    let app = Router::new().nest("/api", api);
    assert_eq!(statuses(app, ["/api/login"; 6]).await, [200, 200, 200, 200, 200, 429]);
}

#[tokio::test]
async fn rule_matches_the_full_path_in_a_router_nested_twice() {
    let text = LOGIN.replace("/api/login", "/tenants/{name}/v1/login").replace("5/min", "1/min");
    let login = Router::new().route("/login", post(|| async { "welcome" }));
    let v1 = Router::new().nest("/v1", login.layer(RateLimitLayer::axum(engine(&text))));
    let app = Router::new().nest("/tenants/{tenant}", v1);
    assert_eq!(statuses(app, ["/tenants/a/v1/login", "/tenants/b/v1/login"]).await, [200, 429]);
}

#[tokio::test]
async fn exempt_path_is_not_exempt_under_the_prefix_of_a_nested_router() {
    let text = "exempt.paths = ['/health']\n[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['1/min']";
    let layer = RateLimitLayer::axum(engine(text));
    let health = Router::new().route("/health", any(|| async { "well" }));
    let app = health.clone().layer(layer.clone()).nest("/admin", health.layer(layer));
    let paths = ["/health", "/health", "/admin/health", "/admin/health", "/health"];
    assert_eq!(statuses(app, paths).await, [200, 200, 200, 429, 200]);
}

#[tokio::test]
async fn equal_paths_in_two_nested_routers_have_two_counters() {
    let layer = RateLimitLayer::axum(engine("[[rules]]\nname = 'each'\nby = ['ip', 'path']\nlimits = ['1/min']"));
    let api = Router::new().route("/x", any(|| async { "x" })).layer(layer);
    let app = Router::new().nest("/v1", api.clone()).nest("/v2", api);
    assert_eq!(statuses(app, ["/v1/x", "/v2/x", "/v1/x", "/v2/x"]).await, [200, 200, 429, 429]);
}

#[tokio::test]
async fn sent_uri_gives_a_layer_the_full_path() {
    let shortened = RateLimitLayer::new(engine(LOGIN), |_| Some(PEER.into()));
    let whole = RateLimitLayer::new(engine(LOGIN), |_| Some(PEER.into()))
        .sent_uri(|extensions| extensions.get::<OriginalUri>().map(|uri| &uri.0));
    for (layer, sixth) in [(shortened, 200), (whole, 429)] {
        let api = Router::new().route("/login", post(|| async { "welcome" })).layer(layer);
        let statuses = statuses(Router::new().nest("/api", api), ["/api/login"; 6]).await;
        assert_eq!(statuses, [200, 200, 200, 200, 200, sixth]);
    }
}

#[tokio::test]
async fn layer_around_the_router_uses_the_path_of_the_request() {
    let layer = RateLimitLayer::axum(engine(&LOGIN.replace("5/min", "1/min")));
    let api = Router::new().route("/login", post(|| async { "welcome" }));
    let app = layer.layer(Router::new().nest("/api", api));
    for expected in [200, 429] {
        let request = Request::post("/api/login").extension(ConnectInfo(SocketAddr::from((PEER, 4711))));
        let response = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), expected);
    }
}
