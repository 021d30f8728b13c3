//! The Tower layer over real sockets, in front of an axum service.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use axum::Router;
use axum::routing::{get, post};
use http::StatusCode;
use tidegate::config::{Config, Format};
use tidegate::engine::Engine;
use tidegate::layer::RateLimitLayer;
use tidegate::{Decision, Limiter};

const RULES: &str = r#"
[[rules]]
name = "shorten"
match = { methods = ["POST"], path = "/shorten" }
by = ["ip"]
limits = ["10/h", "1000/day"]

[[rules]]
name = "login"
match = { path = "/login" }
by = ["ip"]
charge = "on_failure"
limits = ["3/h"]
"#;

fn layer() -> RateLimitLayer {
    let rules = Config::from_text(RULES, Format::Toml).unwrap().rules;
    RateLimitLayer::axum(Engine::new(Limiter::memory(), rules))
}

fn app() -> Router {
    Router::new()
        .route(
            "/shorten",
            post(|axum::Extension(decision): axum::Extension<Decision>| async move {
                decision.limits.first().map_or_else(String::new, |line| format!("{} left", line.remaining))
            }),
        )
        .route(
            "/login",
            post(|body: String| async move { if body == "right" { StatusCode::OK } else { StatusCode::UNAUTHORIZED } }),
        )
        .route("/free", get(|| async { "never limited" }))
        .layer(layer())
}

/// Serves on a free port until the runtime ends.
async fn serve(app: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    address
}

async fn send(address: SocketAddr, head: &str, body: &str) -> String {
    let request = format!("{head}\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let exchange = move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    tokio::task::spawn_blocking(exchange).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_requests_pass_and_the_rest_get_429_with_retry_after() {
    let address = serve(app()).await;
    for n in 0..15 {
        let forged = format!("POST /shorten HTTP/1.1\r\nx-forwarded-for: 198.51.100.{n}");
        let answer = send(address, &forged, "").await;
        assert!(
            answer.contains("ratelimit-policy: \"per-hour\";q=10;w=3600, \"per-day\";q=1000;w=86400\r\n"),
            "{answer}"
        );
        if n < 10 {
            assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with(&format!("{} left", 9 - n)), "{answer}");
        } else {
            assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains("\r\nretry-after: 3"), "{answer}");
            assert!(answer.contains("\"per-day\";r=990;"), "the day is charged for admitted requests only: {answer}");
        }
    }
    let free = send(address, "GET /free HTTP/1.1", "").await;
    assert!(free.ends_with("never limited") && !free.contains("ratelimit"), "{free}");
}

#[tokio::test(flavor = "multi_thread")]
async fn successful_login_is_not_charged() {
    let address = serve(app()).await;
    for _ in 0..20 {
        assert!(send(address, "POST /login HTTP/1.1", "right").await.starts_with("HTTP/1.1 200"));
    }
    for n in 0..5 {
        let answer = send(address, "POST /login HTTP/1.1", "wrong").await;
        let expected = if n < 3 { "HTTP/1.1 401" } else { "HTTP/1.1 429" };
        assert!(answer.starts_with(expected), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_connect_info_is_a_500_that_names_it() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app()).await });
    let answer = send(address, "POST /shorten HTTP/1.1", "").await;
    assert!(
        answer.starts_with("HTTP/1.1 500 ") && answer.contains("into_make_service_with_connect_info::<SocketAddr>()"),
        "{answer}"
    );
}

#[tokio::test]
async fn mocked_address_is_used_only_without_a_real_one() {
    use axum::body::Body;
    use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};
    use tower::ServiceExt;

    let mocked = SocketAddr::from(([203, 0, 113, 9], 1));
    let service = app().layer(MockConnectInfo(mocked));
    let mut statuses = Vec::new();
    for real in [None, None, Some([198, 51, 100, 7]), None, Some([198, 51, 100, 7]), None] {
        let mut request = http::Request::post("/login").body(Body::from("wrong")).unwrap();
        if let Some(real) = real {
            request.extensions_mut().insert(ConnectInfo(SocketAddr::from((real, 1))));
        }
        statuses.push(service.clone().oneshot(request).await.unwrap().status().as_u16());
    }
    assert_eq!(statuses, [401, 401, 401, 401, 401, 429], "three failures of each address");
}
