//! Metrics of decisions, bans and error responses, and the pages that need no token.

use std::sync::Arc;

use serde_json::{Value, json};
use tidegate::{Check, Decision, Demand, LimitStatus, Limiter, Store, StoreError, StoreErrorKind, StoreFuture};

use crate::site::Site;

const RULES: &str = r#"
[[bans]]
by = "ip"
value = "198.51.100.7"
[[rules]]
name = "first"
match = { path = "/both" }
by = ["ip"]
limits = ["2/h"]
[[rules]]
name = "second"
match = { path = "/both" }
by = ["ip"]
limits = ["100/h"]
[[rules]]
name = "allowing"
match = { path = "/allowing" }
by = ["ip"]
limits = ["1/h"]
on_failure = "allow"
[[rules]]
name = "part"
match = { path = "/part" }
by = ["ip"]
limits = ["100/h"]
[[rules]]
name = "left-out"
match = { path = "/part" }
by = ["ip"]
limits = ["1/h"]
on_failure = "allow"
[[rules]]
name = "strict"
match = { path = "/strict" }
by = ["ip"]
limits = ["100/h"]
on_failure = "deny"
[[rules]]
name = "beside-strict"
match = { path = "/strict" }
by = ["ip"]
limits = ["100/h"]
on_failure = "allow"
[[rules]]
name = "trial"
match = { path = "/trial" }
mode = "shadow"
by = ["ip"]
limits = ["1/h"]
"#;

/// A store that cannot be reached.
struct DownStore;

fn down<'a, T: Send + 'a>() -> StoreFuture<'a, T> {
    Box::pin(async { Err(StoreError::new(StoreErrorKind::Unreachable, "planted")) })
}

impl Store for DownStore {
    fn decide<'a>(&'a self, _: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        down()
    }

    fn refund<'a>(&'a self, _: &'a Check<'a>, _: &'a Decision) -> StoreFuture<'a, ()> {
        down()
    }

    fn reset<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        down()
    }

    fn inspect<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        down()
    }
}

fn request(path: &str, peer: &str) -> Value {
    json!({ "request": { "method": "GET", "path": path, "peer": peer } })
}

/// Returns the samples of one metric, each without the metric's name.
fn samples(site: &Site, metric: &str) -> Vec<String> {
    let page = site.operate("GET", "/metrics", "").body;
    page.lines().filter_map(|line| line.strip_prefix(metric)).map(str::to_owned).collect()
}

#[test]
fn each_request_without_the_store_is_one_degraded_decision() {
    let site = Site::start_with(RULES, |setup| {
        setup.limiter = Limiter::builder().store(Arc::new(DownStore)).build();
    });
    let peer = "203.0.113.9";
    for (path, status, times) in [
        ("/both", 200, 2),
        ("/both", 429, 1),
        ("/allowing", 200, 3),
        ("/part", 200, 1),
        ("/strict", 503, 4),
        ("/trial", 200, 1),
        ("/free", 200, 1),
    ] {
        for _ in 0..times {
            assert_eq!(site.check(&request(path, peer)).status, status, "{path}");
        }
    }
    assert_eq!(site.check(&request("/both", "198.51.100.7")).status, 403);
    assert_eq!(site.check(&json!({ "key": "user:42", "limit": "10/h" })).status, 200);
    // Two rules decided each request to /both. One of two was left out of the request to /part, so that it was admitted
    // uncounted by it. /strict was not refused by the rule beside it.
    let degraded = samples(&site, "tidegate_degraded_total");
    assert_eq!(degraded, [r#"{policy="local"} 4"#, r#"{policy="allow"} 4"#, r#"{policy="unavailable"} 4"#]);
    let decisions = samples(&site, "tidegate_decisions_total");
    let of_rule = |rule: &str| -> Vec<&String> {
        let name = format!("{{rule=\"{rule}\",");
        decisions.iter().filter(|sample| sample.starts_with(&name) && !sample.ends_with(" 0")).collect()
    };
    let sample = |rule: &str, verdict: &str, source: &str, count: u32| {
        format!("{{rule=\"{rule}\",verdict=\"{verdict}\",source=\"{source}\",mode=\"enforce\"}} {count}")
    };
    assert_eq!(of_rule("strict"), [&sample("strict", "unavailable", "none", 4)]);
    assert_eq!(of_rule("beside-strict"), [&sample("beside-strict", "allow", "none", 4)]);
    assert_eq!(of_rule("left-out"), [&sample("left-out", "allow", "none", 1)]);
}

#[test]
fn refusals_by_bans_are_counted_by_where_the_ban_is() {
    let site = Site::start(RULES);
    let banned = || samples(&site, "tidegate_banned_requests_total");
    assert_eq!(banned(), [r#"{ban="configuration"} 0"#, r#"{ban="store"} 0"#]);
    for target in ["client=203.0.113.10", "key=user:42"] {
        assert_eq!(site.operate("PUT", &format!("/v1/bans?{target}"), "").status, 200);
    }
    for (path, peer, status) in [
        ("/both", "198.51.100.7", 403),
        ("/free", "198.51.100.7", 403),
        ("/both", "203.0.113.10", 403),
        ("/both", "203.0.113.11", 200),
    ] {
        assert_eq!(site.check(&request(path, peer)).status, status, "{path} {peer}");
    }
    assert_eq!(site.check(&json!({ "key": "user:42", "limit": "10/h" })).status, 403);
    assert_eq!(site.check(&json!({ "key": "user:43", "limit": "10/h" })).status, 200);
    assert_eq!(banned(), [r#"{ban="configuration"} 2"#, r#"{ban="store"} 2"#]);
    let decisions = samples(&site, "tidegate_decisions_total{rule=\"\",");
    let made: Vec<&String> = decisions.iter().filter(|sample| !sample.ends_with(" 0")).collect();
    assert_eq!(made, [r#"verdict="allow",source="store",mode="enforce"} 1"#], "a ban is not a decision");
    assert_eq!(samples(&site, "tidegate_degraded_total{policy=\"allow\"}"), [" 0"]);
}

#[test]
fn error_responses_are_counted_by_listener_and_status() {
    let site = Site::start(RULES);
    let errors = || samples(&site, "tidegate_error_responses_total");
    assert_eq!(errors(), [r#"{listener="http",status="429"} 0"#, r#"{listener="admin",status="429"} 0"#]);
    assert_eq!(site.check(&json!({ "key": "k", "limit": "1/h", "cost": 2 })).status, 429);
    assert_eq!(site.check(&json!("nothing")).status, 400);
    assert_eq!(site.ask_http("GET", "/v1/check").status, 405);
    assert_eq!(site.ask_http("GET", "/docs").status, 200);
    assert_eq!(site.ask_admin("GET", "/v1/rules", "host: x\r\n").status, 401);
    let mut counted = errors();
    counted.retain(|sample| !sample.ends_with(" 0"));
    counted.sort_unstable();
    assert_eq!(
        counted,
        [
            r#"{listener="admin",status="401"} 1"#,
            r#"{listener="http",status="400"} 1"#,
            r#"{listener="http",status="405"} 1"#,
            r#"{listener="http",status="429"} 1"#,
        ]
    );
}

/// Commands keep their exact paths: only pages are the same with a slash.
#[test]
fn pages_are_the_same_with_a_slash_at_the_end() {
    let site = Site::start(RULES);
    for page in ["/docs", "/openapi.json"] {
        let (plain, slash) = (site.ask_http("GET", page), site.ask_http("GET", &format!("{page}/")));
        assert_eq!((plain.status, plain.body), (200, slash.body), "{page}");
        assert_eq!((slash.status, site.ask_http("PUT", &format!("{page}/")).status), (200, 405), "{page}");
        assert_eq!(site.ask_http("GET", &format!("{page}//")).status, 404, "{page}");
    }
    for page in ["/healthz/", "/readyz/", "/metrics/"] {
        assert_eq!(site.ask_admin("GET", page, "host: 127.0.0.1\r\n").status, 200, "{page}");
    }
    assert_eq!(site.ask_admin("GET", "/healthz/", "host: other.example\r\n").status, 200);
    assert_eq!(site.ask_admin("GET", "/readyz/", "host: other.example\r\n").status, 421);
    assert_eq!(site.ask_http("POST", "/v1/check/").status, 404);
    assert_eq!(site.operate("GET", "/v1/rules/", "").status, 404);
}
