//! What the operator is told of a caller is what the caller meets.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tollgate::Limiter;
use tollgate::identity::KeyDigest;
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

/// The subject of a key, as a query has it.
fn subject(key: &str) -> String {
    let hex: String = KeyDigest::of(key).as_bytes()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("api_key:%23{hex}")
}

fn counters(site: &Site, query: &str) -> Value {
    let told = site.operate("GET", &format!("/v1/keys?{query}"), "");
    let mut told = told.json()["counters"].take();
    let counters = told.as_array_mut().unwrap_or_else(|| panic!("{query}")).drain(..);
    counters.map(|one| json!([one["name"], one["limit"], one["remaining"]])).collect()
}

#[test]
fn a_key_with_limits_of_its_own_is_inspected_by_them_and_given_back_what_it_used() {
    let site = Site::start(RULES);
    let asked = question("/", "planted-own");
    assert_eq!([site.check(&asked).status, site.check(&asked).status], [200, 429]);
    let of_key = format!("key={}&rule=api", subject("planted-own"));
    for query in [of_key.clone(), format!("{of_key}&plan=pro")] {
        assert_eq!(counters(&site, &query), json!([["per-day", "1/day", 0]]), "{query}");
    }
    let another = site.operate("GET", &format!("/v1/keys?{of_key}&plan=default"), "");
    assert_eq!(another.status, 400, "{another:?}");
    assert!(another.body.contains("this key's plan is pro"), "{another:?}");

    for query in [of_key.clone(), format!("{of_key}&plan=pro"), format!("{of_key}&limit=per-day")] {
        assert_eq!(site.operate("DELETE", &format!("/v1/keys?{query}"), "").status, 200, "{query}");
        assert_eq!([site.check(&asked).status, site.check(&asked).status], [200, 429], "{query}");
    }
}

#[test]
fn a_key_with_a_plan_needs_no_word_of_it_and_others_do() {
    let site = Site::start(RULES);
    assert_eq!(site.check(&question("/", "planted-pro")).status, 200);
    let of_key = format!("key={}&rule=api", subject("planted-pro"));
    assert_eq!(counters(&site, &of_key), json!([["per-hour", "3/h", 2]]));
    let unknown = site.operate("GET", &format!("/v1/keys?key={}&rule=api", subject("invented")), "");
    assert!(unknown.status == 400 && unknown.body.contains("&plan=NAME"), "{unknown:?}");
    assert_eq!(counters(&site, "key=ip:203.0.113.9&rule=api&plan=default"), json!([["per-hour", "2/h", 2]]));
}

/// Where a subject does not say whose plan it was, all that it can be is forgotten.
#[test]
fn a_caller_counted_by_address_is_given_back_what_it_used_by_whatever_plan() {
    let site = Site::start(RULES);
    for key in ["planted-own", "planted-pro"] {
        let asked = question("/by-address", key);
        while site.check(&asked).status == 200 {}
        for rule in
            [format!("key={}&rule=api", subject(key)), "key=ip:203.0.113.9&rule=by-address&plan=default".to_owned()]
        {
            let told = site.operate("DELETE", &format!("/v1/keys?{rule}"), "");
            assert_eq!((told.status, &told.json()["counters"]), (200, &json!(2)), "{rule}");
        }
        assert_eq!(site.check(&asked).status, 200, "{key}");
    }
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
