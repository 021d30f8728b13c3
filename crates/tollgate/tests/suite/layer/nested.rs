//! Inside a router that is nested into another, axum takes the prefix off the path. Rules speak of the path that was sent.

use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use axum::extract::OriginalUri;
use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};
use axum::routing::{any, post};
use http::Request;
use tollgate::Limiter;
use tollgate::engine::Engine;
use tollgate::layer::RateLimitLayer;
use tower::{Layer, ServiceExt};

use super::site::{HERE, rules};

fn engine(text: &str) -> Engine {
    Engine::new(Limiter::memory(), rules(text))
}

/// The statuses of these paths, asked for in this order.
async fn statuses<'p>(app: Router, paths: impl IntoIterator<Item = &'p str>) -> Vec<u16> {
    let app = app.layer(MockConnectInfo(SocketAddr::from((HERE, 4711))));
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
async fn a_rule_for_the_whole_path_holds_inside_a_nested_router() {
    let api = Router::new().route("/login", post(|| async { "welcome" })).layer(RateLimitLayer::axum(engine(LOGIN)));
    let app = Router::new().nest("/api", api);
    assert_eq!(statuses(app, ["/api/login"; 6]).await, [200, 200, 200, 200, 200, 429]);
}

#[tokio::test]
async fn a_router_nested_twice_behind_a_parameter_is_known_by_its_whole_path() {
    let text = LOGIN.replace("/api/login", "/tenants/{name}/v1/login").replace("5/min", "1/min");
    let login = Router::new().route("/login", post(|| async { "welcome" }));
    let v1 = Router::new().nest("/v1", login.layer(RateLimitLayer::axum(engine(&text))));
    let app = Router::new().nest("/tenants/{tenant}", v1);
    assert_eq!(statuses(app, ["/tenants/a/v1/login", "/tenants/b/v1/login"]).await, [200, 429]);
}

#[tokio::test]
async fn what_is_exempt_outside_is_not_exempt_inside() {
    let text = "exempt.paths = ['/health']\n[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['1/min']";
    let layer = RateLimitLayer::axum(engine(text));
    let health = Router::new().route("/health", any(|| async { "well" }));
    let app = health.clone().layer(layer.clone()).nest("/admin", health.layer(layer));
    let paths = ["/health", "/health", "/admin/health", "/admin/health", "/health"];
    assert_eq!(statuses(app, paths).await, [200, 200, 200, 429, 200]);
}

#[tokio::test]
async fn the_same_path_in_two_nested_routers_is_counted_as_two() {
    let layer = RateLimitLayer::axum(engine("[[rules]]\nname = 'each'\nby = ['ip', 'path']\nlimits = ['1/min']"));
    let api = Router::new().route("/x", any(|| async { "x" })).layer(layer);
    let app = Router::new().nest("/v1", api.clone()).nest("/v2", api);
    assert_eq!(statuses(app, ["/v1/x", "/v2/x", "/v1/x", "/v2/x"]).await, [200, 200, 429, 429]);
}

#[tokio::test]
async fn a_layer_that_finds_peers_in_its_own_way_can_be_told_where_the_path_is() {
    let shortened = RateLimitLayer::new(engine(LOGIN), |_| Some(HERE.into()));
    let whole = RateLimitLayer::new(engine(LOGIN), |_| Some(HERE.into()))
        .sent_uri(|extensions| extensions.get::<OriginalUri>().map(|uri| &uri.0));
    for (layer, sixth) in [(shortened, 200), (whole, 429)] {
        let api = Router::new().route("/login", post(|| async { "welcome" })).layer(layer);
        let statuses = statuses(Router::new().nest("/api", api), ["/api/login"; 6]).await;
        assert_eq!(statuses, [200, 200, 200, 200, 200, sixth]);
    }
}

#[tokio::test]
async fn around_a_router_there_is_no_other_path_than_the_requests_own() {
    let layer = RateLimitLayer::axum(engine(&LOGIN.replace("5/min", "1/min")));
    let api = Router::new().route("/login", post(|| async { "welcome" }));
    let app = layer.layer(Router::new().nest("/api", api));
    for expected in [200, 429] {
        let request = Request::post("/api/login").extension(ConnectInfo(SocketAddr::from((HERE, 4711))));
        let response = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), expected);
    }
}
