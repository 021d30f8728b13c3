//! Tests of each plan's limits with a manual clock.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, Response};
use http_body_util::BodyExt;
use serde_json::Value;
use tidegate::config::Config;
use tidegate::engine::Engine;
use tidegate::{Limiter, ManualClock, Timestamp};
use tower::ServiceExt;

use tidegate_testkit::server::Server;

use super::{CONFIGURATION, app, engine};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
const MINUTE: Duration = Duration::from_secs(60);

struct Service {
    app: Router,
    clock: Arc<ManualClock>,
}

impl Service {
    fn new() -> Service {
        let loaded = Config::load(CONFIGURATION).unwrap();
        assert!(loaded.findings.is_empty(), "{:?}", loaded.findings);
        let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000)));
        let limiter = Limiter::builder().clock(clock.clone()).build();
        let engine = Engine::on_clock(limiter, loaded.rules, Vec::new(), clock.clone());
        Service { app: app(engine), clock }
    }

    async fn ask(&self, address: Ipv4Addr, key: Option<&str>) -> Response<Body> {
        ask(&self.app, address, key).await
    }

    /// Sends requests until one is denied. Returns the number of admitted requests, and the denial.
    async fn exhaust(&self, key: Option<&str>, at_most: u32) -> (u32, Response<Body>) {
        for served in 0..=at_most {
            let response = self.ask(ADDRESS, key).await;
            if response.status() != 200 {
                return (served, response);
            }
        }
        panic!("served more than {at_most} times");
    }
}

async fn ask(app: &Router, address: Ipv4Addr, key: Option<&str>) -> Response<Body> {
    let mut request = Request::get("/v1/hello");
    if let Some(key) = key {
        request = request.header("x-api-key", key);
    }
    let mut request = request.body(Body::empty()).unwrap();
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from((address, 50_000))));
    app.clone().oneshot(request).await.unwrap()
}

fn header<'r>(response: &'r Response<Body>, name: &str) -> &'r str {
    response.headers().get(name).unwrap_or_else(|| panic!("no {name} in {response:?}")).to_str().unwrap()
}

async fn body(response: Response<Body>) -> Value {
    serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
}

#[tokio::test]
async fn each_plan_has_its_own_limits_and_headers() {
    let day = |plan: &str, per_minute: u32, per_day: u32| {
        let policy = format!(r#""per-minute";q={per_minute};w=60, "per-day";q={per_day};w=86400"#);
        let left = format!(r#""per-minute";r=0;t=60, "per-day";r={};t=86400"#, per_day - per_minute);
        (plan.to_owned(), per_minute, policy, left)
    };
    let anonymous =
        ("anonymous".to_owned(), 30, r#""per-minute";q=30;w=60"#.to_owned(), r#""per-minute";r=0;t=60"#.to_owned());
    let cases = [
        (None, anonymous),
        (Some("demo-free-key"), day("free", 60, 10_000)),
        (Some("demo-pro-key"), day("pro", 600, 100_000)),
        (Some("demo-enterprise-key"), day("enterprise", 6_000, 1_000_000)),
    ];
    for (key, (plan, per_minute, policy, left)) in cases {
        let service = Service::new();
        let (served, refusal) = service.exhaust(key, per_minute).await;
        assert_eq!((served, refusal.status().as_u16()), (per_minute, 429), "{plan}");
        assert_eq!(header(&refusal, "ratelimit-policy"), policy);
        assert_eq!(header(&refusal, "ratelimit"), left);
        assert_eq!(header(&refusal, "x-ratelimit-limit"), per_minute.to_string());
        assert_eq!(header(&refusal, "retry-after"), "60");
        let body = body(refusal).await;
        assert_eq!(
            (&body["plan"], &body["policy"], &body["limit"]),
            (&plan.into(), &"per-minute".into(), &per_minute.into())
        );

        service.clock.advance(MINUTE);
        assert_eq!(service.ask(ADDRESS, key).await.status(), 200, "a minute later");
    }
}

#[tokio::test]
async fn only_the_free_plan_has_an_upgrade_url() {
    let upgrade_url =
        async |key, at_most| body(Service::new().exhaust(key, at_most).await.1).await.get("upgrade_url").cloned();
    assert_eq!(upgrade_url(Some("demo-free-key"), 60).await, Some("https://example.com/plans".into()));
    assert_eq!(upgrade_url(None, 30).await, None);
    assert_eq!(upgrade_url(Some("demo-pro-key"), 600).await, None);
}

#[tokio::test]
async fn a_request_denied_per_day_is_not_charged_per_minute() {
    let service = Service::new();
    let key = Some("demo-free-key");
    for _ in 0..10_000 / 60 {
        assert_eq!(service.exhaust(key, 60).await.0, 60);
        service.clock.advance(MINUTE);
    }
    let (served, refusal) = service.exhaust(key, 60).await;
    assert_eq!(served, 10_000 % 60, "the rest of the day's quota");
    let minutes = 10_000 / 60;
    let wait = 86_400 - minutes * 60;
    assert_eq!(header(&refusal, "retry-after"), wait.to_string(), "until the first request is a day old");
    assert_eq!(header(&refusal, "ratelimit"), format!(r#""per-minute";r=20;t=60, "per-day";r=0;t={wait}"#));
    assert_eq!(body(refusal).await["policy"], "per-day");
    let again = service.ask(ADDRESS, key).await;
    assert!(header(&again, "ratelimit").starts_with(r#""per-minute";r=20;"#), "a denial is not charged: {again:?}");

    service.clock.advance(Duration::from_secs(wait - 1));
    assert_eq!(service.ask(ADDRESS, key).await.status(), 429);
    service.clock.advance(Duration::from_secs(1));
    assert_eq!(service.ask(ADDRESS, key).await.status(), 200);
}

#[tokio::test]
async fn callers_are_distinguished_by_key_and_by_address() {
    let service = Service::new();
    let (served, _) = service.exhaust(None, 30).await;
    assert_eq!(served, 30);
    assert_eq!(service.ask(Ipv4Addr::new(203, 0, 113, 10), None).await.status(), 200, "another address");
    assert_eq!(service.ask(ADDRESS, Some("demo-free-key")).await.status(), 200, "the same address with a key");
    let (served, _) = service.exhaust(Some("demo-free-key"), 60).await;
    assert_eq!(served, 59);
    assert_eq!(
        service.ask(Ipv4Addr::LOCALHOST, Some("demo-free-key")).await.status(),
        429,
        "a key is the same caller from any address"
    );
}

#[tokio::test]
async fn an_unknown_key_is_counted_by_address() {
    let service = Service::new();
    for n in 0..200 {
        let status = service.ask(ADDRESS, Some(&format!("invented-{n}"))).await.status();
        assert_eq!(status, if n < 30 { 200 } else { 429 }, "all are counted by their common address");
    }
}

#[tokio::test]
async fn a_key_may_have_limits_of_its_own() {
    let (served, refusal) = Service::new().exhaust(Some("demo-special-key"), 900).await;
    assert_eq!((served, header(&refusal, "ratelimit-policy")), (900, r#""per-minute";q=900;w=60"#));
}

/// Two instances of the service whose file has a store share their counters.
#[tokio::test]
async fn the_store_of_the_file_is_used() {
    let redis = Server::redis();
    let directory = std::path::Path::new(CONFIGURATION).parent().unwrap();
    let text = std::fs::read_to_string(CONFIGURATION).unwrap();
    let keys_file = format!("keys_file = {:?}", directory.join("keys.toml").display().to_string());
    let text = text.replace("keys_file = \"keys.toml\"", &keys_file);
    // The deadline is long, so that a slow machine does not decide by the local share.
    let text = format!("store = {:?}\ninstances = 2\ndeadline = \"10s\"\n{text}", redis.url());
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let instance = || app(engine(file.path().to_str().unwrap()).unwrap());
    let (one, other) = (instance(), instance());
    for served in 0..30 {
        let app = if served % 2 == 0 { &one } else { &other };
        assert_eq!(ask(app, ADDRESS, None).await.status(), 200, "{served}");
    }
    for app in [&one, &other] {
        assert_eq!(ask(app, ADDRESS, None).await.status(), 429, "the quota is shared");
    }
}
