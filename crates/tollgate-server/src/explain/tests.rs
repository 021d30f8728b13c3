//! Explanations, against what the engine does.

use tollgate::config::{Config, Format};
use tollgate::engine::{Engine, Outcome};

use super::*;

const RULES: &str = r#"
trusted_proxies = ["10.0.0.0/8"]
[exempt]
paths = ["/health"]
addresses = ["192.0.2.0/24"]
[[bans]]
by = "ip"
value = "198.51.100.7"
reason = "scraping"
[plans.anonymous]
limits = ["1/h"]
[plans.default]
limits = ["2/h"]
[plans.pro]
limits = ["3/h"]
[plan_sources]
addresses = [{ networks = ["203.0.113.128/25"], plan = "pro" }]
header = "x-plan"
[[keys]]
key = "planted-pro"
name = "acme"
plan = "pro"
[[keys]]
key = "planted-own"
limits = ["9/h"]
[[rules]]
name = "shorten"
match = { methods = ["POST"], path = "/shorten", headers = { x-kind = "planted-kind", x-tenant = true } }
by = ["ip", "header:x-tenant"]
limits = ["2/h"]
[[rules]]
name = "api"
match = { path = "/api/*", host = "api.example.com" }
limits = "plan"
[[rules]]
name = "idle"
mode = "off"
limits = ["1/h"]
"#;

fn loaded() -> Loaded {
    Config::from_text(RULES, Format::Toml).unwrap_or_else(|report| panic!("{report:?}"))
}

fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap()
}

fn explain(request: &Request<()>, peer: [u8; 4]) -> Explanation {
    Explanation::new(&loaded(), request, peer.into(), Timestamp::ZERO, false)
}

const HERE: [u8; 4] = [203, 0, 113, 9];

#[test]
fn each_rule_says_whether_it_applies_and_what_keeps_it_from_it() {
    let said = explain(&request("GET", "/shorten", &[("x-tenant", "a")]), HERE);
    let because: Vec<&[String]> = said.rules.iter().map(|rule| &rule.because[..]).collect();
    assert_eq!(because[0], ["the method is none of POST", "the header x-kind does not say what is expected"]);
    assert_eq!(because[1], ["the path is none of /api/*", "the host is none of api.example.com"]);
    assert_eq!(because[2], ["it is off"]);
    let headers = [("x-tenant", "a"), ("x-kind", "planted-kind")];
    let said = explain(&request("POST", "//shorten/", &headers), HERE);
    assert!(said.rules[0].applies && said.rules[0].because.is_empty());
    assert_eq!(said.rules[0].counts, "ip:***&header:x-tenant:***");
    let text = serde_json::to_string(&said).unwrap();
    assert!(!text.contains("planted") && !text.contains("203.0.113"), "{text}");
    let revealed =
        Explanation::new(&loaded(), &request("POST", "/shorten", &headers), HERE.into(), Timestamp::ZERO, true);
    assert_eq!(revealed.rules[0].counts, "ip:203.0.113.9&header:x-tenant:a");
}

#[test]
fn the_plan_comes_with_where_it_is_said() {
    let api = |headers: &[(&str, &str)], peer| {
        let headers: Vec<(&str, &str)> = [("host", "api.example.com")].iter().chain(headers).copied().collect();
        let said = explain(&request("GET", "/api/x", &headers), peer);
        let plan = said.plan.unwrap();
        (plan.name, plan.source, said.rules[1].limits[0].limit.clone(), said.caller)
    };
    let own = |name: &str, source, limit: &str, caller| (name.to_owned(), source, limit.to_owned(), caller);
    assert_eq!(api(&[], HERE), own("anonymous", "anonymous, since nobody knows the caller", "1/h", "ip"));
    assert_eq!(api(&[("x-api-key", "planted-pro")], HERE), own("pro", "the API key", "3/h", "api_key"));
    assert_eq!(api(&[("x-api-key", "planted-own")], HERE), own("default", "limits of the key's own", "9/h", "api_key"));
    assert_eq!(api(&[("x-api-key", "invented")], [203, 0, 113, 200]), own("pro", "the address", "3/h", "ip"));
    assert_eq!(api(&[("x-plan", "pro")], [10, 0, 0, 1]), own("pro", "the trusted proxy's header", "3/h", "ip"));
    assert_eq!(api(&[("x-plan", "pro")], HERE).1, "anonymous, since nobody knows the caller");
}

#[test]
fn bans_and_exemptions_are_told() {
    assert_eq!(explain(&request("GET", "/", &[]), [198, 51, 100, 7]).banned.as_deref(), Some("banned: scraping"));
    assert_eq!(explain(&request("GET", "/health", &[]), HERE).exempt, Some("path"));
    assert_eq!(explain(&request("GET", "/", &[]), [192, 0, 2, 1]).exempt, Some("address"));
    assert_eq!(explain(&request("GET", "/", &[("x-api-key", "planted-pro")]), HERE).key_name.as_deref(), Some("acme"));
}

#[tokio::test]
async fn what_remains_is_what_the_engine_has_left_and_looking_takes_nothing() {
    let (loaded, limiter) = (loaded(), Limiter::memory());
    let engine = Engine::new(limiter.clone(), loaded.rules.clone());
    let request = request("POST", "/shorten", &[("x-tenant", "a"), ("x-kind", "planted-kind")]);
    for left in [2, 1, 0, 0] {
        let mut said = Explanation::new(&loaded, &request, HERE.into(), Timestamp::ZERO, false);
        said.look(&limiter).await.unwrap();
        let limit = &said.rules[0].limits[0];
        assert_eq!((limit.remaining, limit.would_allow), (Some(left), Some(left > 0)));
        assert_eq!(limit.retry_after_ms == Some(0), left > 0);
        let outcome = engine.decide(&RequestView::of(&request), HERE.into()).await;
        assert_eq!(matches!(outcome, Outcome::Pass(_)), left > 0);
    }
}
