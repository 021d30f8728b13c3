//! The layer without a configuration file: `per_ip`, trusted proxies, and callers that the application names.

use std::net::{IpAddr, SocketAddr};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::get;
use http::Request;
use tidegate::engine::Engine;
use tidegate::rules::{Lookups, Plan, PlanQuestion};
use tidegate::{Limiter, RateLimitLayer, Rule, Rules, Subject};
use tower::ServiceExt;

#[derive(Clone, Copy)]
struct Session(u64);

struct Sent {
    peer: [u8; 4],
    forwarded_for: Option<&'static str>,
    session: Option<u64>,
}

const HERE: Sent = Sent { peer: [203, 0, 113, 9], forwarded_for: None, session: None };
const PROXY: Sent = Sent { peer: [10, 0, 0, 1], ..HERE };

/// Sends requests through one layer and returns their statuses.
async fn statuses(layer: RateLimitLayer, sent: impl IntoIterator<Item = Sent>) -> Vec<u16> {
    let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
    let mut statuses = Vec::new();
    for Sent { peer, forwarded_for, session } in sent {
        let mut request = Request::get("/").extension(ConnectInfo(SocketAddr::from((peer, 50_000))));
        if let Some(client) = forwarded_for {
            request = request.header("x-forwarded-for", client);
        }
        if let Some(id) = session {
            request = request.extension(Session(id));
        }
        statuses.push(app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap().status().as_u16());
    }
    statuses
}

fn by_session(layer: RateLimitLayer) -> RateLimitLayer {
    layer.subject(|parts| parts.extensions.get::<Session>().map(|Session(id)| id.to_string()))
}

fn layer(rules: Rules) -> RateLimitLayer {
    RateLimitLayer::axum(Engine::new(Limiter::memory(), rules.build().unwrap()))
}

#[tokio::test]
async fn per_ip_limits_each_address_by_itself() {
    let layer = RateLimitLayer::per_ip("2/min").unwrap();
    let there = || Sent { peer: [203, 0, 113, 10], ..HERE };
    assert_eq!(statuses(layer, [HERE, HERE, HERE, there(), there(), there()]).await, [200, 200, 429, 200, 200, 429]);
}

#[tokio::test]
async fn per_ip_believes_no_proxy_unless_it_is_trusted() {
    let behind = |client| Sent { forwarded_for: Some(client), ..PROXY };
    let sent = || [behind("198.51.100.1"), behind("198.51.100.2"), behind("198.51.100.1"), behind("198.51.100.2")];
    let untrusting = RateLimitLayer::per_ip("1/min").unwrap();
    assert_eq!(statuses(untrusting, sent()).await, [200, 429, 429, 429]);
    let trusting = RateLimitLayer::per_ip("1/min").unwrap().trusted_proxies(["10.0.0.0/8"]).unwrap();
    assert_eq!(statuses(trusting.clone(), sent()).await, [200, 200, 429, 429]);
    let spoofed = |client| Sent { forwarded_for: Some(client), ..HERE };
    assert_eq!(statuses(trusting, [spoofed("192.0.2.1"), spoofed("192.0.2.2")]).await, [200, 429], "not by the proxy");
}

#[test]
fn a_slip_is_an_error_that_says_what_is_accepted() {
    let error = RateLimitLayer::per_ip("10/mni").unwrap_err();
    assert!(format!("{error}").contains("limit `10/mni`"), "{error}");
    let error = RateLimitLayer::per_ip("10/min").unwrap().trusted_proxies(["10.0.0.0/8", "proxy"]).unwrap_err();
    assert!(error.to_string().contains("networks and addresses have the form"), "{error}");
}

#[tokio::test]
async fn trusted_proxies_keep_the_header_of_the_rules() {
    let rules = Rules::new()
        .trusted_proxies(["192.0.2.1"])
        .forwarding_header("cf-connecting-ip")
        .rule(Rule::new("all").by(Subject::Ip).limit("1/min"));
    let layer = layer(rules).trusted_proxies(["10.0.0.0/8"]).unwrap();
    let behind = |client| Sent { forwarded_for: Some(client), ..PROXY };
    // X-Forwarded-For is not the header of these rules, so both requests come from the proxy.
    assert_eq!(statuses(layer, [behind("198.51.100.1"), behind("198.51.100.2")]).await, [200, 429]);
}

#[tokio::test]
async fn a_subject_in_code_is_counted_instead_of_the_address() {
    let layer = by_session(RateLimitLayer::per_ip("1/min").unwrap());
    let of = |session| Sent { session: Some(session), ..HERE };
    let elsewhere = Sent { session: Some(1), peer: [192, 0, 2, 1], ..HERE };
    // Without a session, the address is counted.
    assert_eq!(statuses(layer, [of(1), of(1), of(2), elsewhere, HERE, HERE]).await, [200, 429, 200, 429, 200, 429]);
}

#[tokio::test]
async fn a_subject_in_code_leaves_rules_by_address_and_global_rules_alone() {
    let by_address = Rules::new().rule(Rule::new("all").by(Subject::Ip).limit("1/min"));
    let global = Rules::new().rule(Rule::new("all").by(Subject::Global).limit("1/min"));
    let shield = Rules::new().rule(Rule::new("all").shield().limit("1/min"));
    for rules in [by_address, global, shield] {
        let of = |session| Sent { session: Some(session), ..HERE };
        assert_eq!(statuses(by_session(layer(rules)), [of(1), of(2)]).await, [200, 429]);
    }
}

#[tokio::test]
async fn a_subject_that_reads_like_an_address_is_not_that_address() {
    let layer = RateLimitLayer::per_ip("1/min").unwrap();
    let layer = layer.subject(|parts| parts.extensions.get::<Session>().map(|_| "203.0.113.9".to_owned()));
    assert_eq!(statuses(layer, [HERE, Sent { session: Some(1), ..HERE }]).await, [200, 200]);
}

#[tokio::test]
async fn a_subject_in_code_has_the_default_plan_or_that_of_a_lookup() {
    let rules = || {
        Rules::new()
            .plan(Plan::new("anonymous").limit("1/min"))
            .plan(Plan::new("default").limit("2/min"))
            .plan(Plan::new("pro").limit("3/min"))
            .rule(Rule::new("all").limits_from_plan())
    };
    let sent = |session| [0; 4].map(|_| Sent { session, ..HERE });
    assert_eq!(statuses(by_session(layer(rules())), sent(None)).await, [200, 429, 429, 429]);
    assert_eq!(statuses(by_session(layer(rules())), sent(Some(1))).await, [200, 200, 429, 429]);
    let lookup = |question: PlanQuestion| async move {
        Ok::<_, std::io::Error>((question.caller.as_deref() == Some("1")).then_some("pro"))
    };
    let engine = Engine::with_lookups(Limiter::memory(), rules().build().unwrap(), Lookups::new().plan(lookup));
    assert_eq!(statuses(by_session(RateLimitLayer::axum(engine)), sent(Some(1))).await, [200, 200, 200, 429]);
}

#[tokio::test]
async fn the_peer_may_be_found_by_a_closure() {
    let layer = RateLimitLayer::per_ip("1/min").unwrap().peer(|extensions| {
        let Session(id) = extensions.get()?;
        Some(IpAddr::from([192, 0, 2, u8::try_from(*id).ok()?]))
    });
    let of = |session| Sent { session: Some(session), ..HERE };
    assert_eq!(statuses(layer, [of(1), of(2), of(1), HERE]).await, [200, 200, 429, 500]);
}
