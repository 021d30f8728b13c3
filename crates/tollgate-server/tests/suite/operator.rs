//! What the operator is told of a caller is what the caller meets.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tollgate::Limiter;
use tollgate_redis::RedisStore;
use tollgate_testkit::server::Server;

use crate::site::Site;

/// A machine may be busy; a server that is gone is noticed at once.
const DEADLINE: Duration = Duration::from_secs(10);

const RULES: &str = r#"
[plans.default]
limits = ["2/h"]
[plans.pro]
limits = ["3/h"]
[[keys]]
key = "planted-own"
plan = "pro"
limits = ["1/day"]
[[keys]]
key = "planted-pro"
plan = "pro"
[[rules]]
name = "api"
limits = "plan"
[[rules]]
name = "by-address"
match = { path = "/by-address" }
by = ["ip"]
limits = "plan"
"#;

fn question(path: &str, key: &str) -> Value {
    json!({ "request": { "method": "GET", "path": path, "headers": { "x-api-key": key }, "peer": "203.0.113.9" } })
}

#[test]
fn while_the_store_is_away_everything_is_explained_but_what_is_left() {
    let redis = Server::redis();
    let site = Site::start_with(RULES, |setup| {
        let store = RedisStore::builder(redis.url()).build().unwrap();
        setup.limiter = Limiter::builder().store(Arc::new(store)).deadline(DEADLINE).build();
    });
    let asked = question("/", "planted-pro").to_string();
    let explain = || site.operate("POST", "/v1/explain", &asked);
    let there = explain().json();
    assert_eq!(there["counters_unknown"], Value::Null, "{there}");
    assert_eq!(there["rules"][0]["limits"][0]["remaining"], 3, "{there}");
    redis.kill9();
    let away = explain();
    assert_eq!(away.status, 200, "{away:?}");
    let away = away.json();
    let why = away["counters_unknown"].as_str().unwrap_or_default();
    assert!(why.starts_with("the store did not answer ("), "{away}");
    assert_eq!((&away["plan"], &away["caller"]), (&there["plan"], &there["caller"]), "{away}");
    let limit = &away["rules"][0]["limits"][0];
    assert_eq!([&limit["remaining"], &limit["would_allow"], &limit["retry_after_ms"]], [&Value::Null; 3], "{away}");
}

#[test]
fn a_request_that_takes_several_units_is_explained_as_it_is_answered() {
    let site = Site::start("[[rules]]\nname = \"all\"\nby = [\"ip\"]\ncost = 5\nlimits = [\"8/h\"]\n");
    let asked = question("/", "");
    assert_eq!(site.check(&asked).status, 200);
    let said = site.operate("POST", "/v1/explain", &asked.to_string()).json();
    let limit = &said["rules"][0]["limits"][0];
    assert_eq!((&limit["remaining"], &limit["would_allow"]), (&json!(3), &json!(false)), "{said}");
    let wait_ms = limit["retry_after_ms"].as_u64().unwrap();
    assert!((3_500_000..=3_600_000).contains(&wait_ms), "the five units of the first request must leave: {said}");
    assert_eq!(site.check(&asked).status, 429);
}
