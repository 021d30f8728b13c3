//! The admin API reports for a caller what the caller's requests get.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::identity::KeyDigest;
use tidegate::{Check, Decision, Demand, LimitStatus, Limiter, MemoryStore, Store, StoreFuture};
use tidegate_redis::RedisStore;
use tidegate_testkit::program::PATIENCE;
use tidegate_testkit::server::Server;

use crate::site::Site;

/// Long enough for a busy machine. A killed server is noticed at once.
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

fn described(path: &str, key: &str) -> Value {
    json!({ "request": { "method": "GET", "path": path, "headers": { "x-api-key": key }, "peer": "203.0.113.9" } })
}

/// Returns the subject of an API key, percent-encoded.
fn subject(key: &str) -> String {
    let hex: String = KeyDigest::of(key).as_bytes()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("api_key:%23{hex}")
}

fn counters(site: &Site, query: &str) -> Value {
    let answer = site.operate("GET", &format!("/v1/keys?{query}"), "");
    let mut counters = answer.json()["counters"].take();
    let counters = counters.as_array_mut().unwrap_or_else(|| panic!("{query}")).drain(..);
    counters.map(|counter| json!([counter["name"], counter["limit"], counter["remaining"]])).collect()
}

#[test]
fn a_key_with_its_own_limits_is_inspected_and_reset_by_them() {
    let site = Site::start(RULES);
    let request = described("/", "planted-own");
    assert_eq!([site.check(&request).status, site.check(&request).status], [200, 429]);
    let of_key = format!("key={}&rule=api", subject("planted-own"));
    for query in [of_key.clone(), format!("{of_key}&plan=pro")] {
        assert_eq!(counters(&site, &query), json!([["api.per-day", "1/day", 0]]), "{query}");
    }
    let another = site.operate("GET", &format!("/v1/keys?{of_key}&plan=default"), "");
    assert_eq!(another.status, 400, "{another:?}");
    assert!(another.body.contains("this key has the plan pro"), "{another:?}");

    for query in [of_key.clone(), format!("{of_key}&plan=pro"), format!("{of_key}&limit=api.per-day")] {
        assert_eq!(site.operate("DELETE", &format!("/v1/keys?{query}"), "").status, 200, "{query}");
        assert_eq!([site.check(&request).status, site.check(&request).status], [200, 429], "{query}");
    }
}

#[test]
fn the_plan_is_required_unless_the_key_has_one() {
    let site = Site::start(RULES);
    assert_eq!(site.check(&described("/", "planted-pro")).status, 200);
    let of_key = format!("key={}&rule=api", subject("planted-pro"));
    assert_eq!(counters(&site, &of_key), json!([["api.per-hour", "3/h", 2]]));
    let unknown = site.operate("GET", &format!("/v1/keys?key={}&rule=api", subject("invented")), "");
    assert!(unknown.status == 400 && unknown.body.contains("add --plan NAME (in a request: plan=NAME)"), "{unknown:?}");
    assert_eq!(counters(&site, "key=ip:203.0.113.9&rule=api&plan=default"), json!([["api.per-hour", "2/h", 2]]));
}

/// A subject that is an address does not determine the plan, so the counters of all plans are deleted. Those that did
/// not exist are not reported.
#[test]
fn a_reset_by_address_deletes_the_counters_of_all_plans() {
    let site = Site::start(RULES);
    // By address, the last check of the first key is still counted per day when the second key is counted per hour.
    for (key, by_address) in [("planted-own", 1), ("planted-pro", 2)] {
        let request = described("/by-address", key);
        while site.check(&request).status == 200 {}
        let of_address = "key=ip:203.0.113.9&rule=by-address&plan=default".to_owned();
        for (rule, count) in [(format!("key={}&rule=api", subject(key)), 1), (of_address, by_address)] {
            let answer = site.operate("DELETE", &format!("/v1/keys?{rule}"), "");
            assert_eq!((answer.status, &answer.json()["counters"]), (200, &json!(count)), "{rule}");
        }
        assert_eq!(site.check(&request).status, 200, "{key}");
    }
}

#[test]
fn operator_bans_inspects_and_unbans_a_subject_in_memory() {
    let site = Site::start(RULES);
    let (of_key, request) = (subject("planted-pro"), described("/", "planted-pro"));
    let ban = |method: &str, query: &str| site.operate(method, &format!("/v1/bans?{query}"), "");
    let by_subject = format!("client={of_key}");
    assert_eq!(ban("GET", &by_subject).json()["banned"], false);
    let set = ban("PUT", &format!("{by_subject}&for=1h")).json();
    assert_eq!((&set["banned"], &set["retry_after_ms"]), (&json!(true), &json!(3_600_000)));
    let refused = site.check(&request);
    assert_eq!((refused.status, &refused.json()["error"]), (403, &json!("banned")), "{refused:?}");
    let left = ban("GET", &by_subject).json()["retry_after_ms"].as_u64().unwrap();
    assert!((3_500_000..=3_600_000).contains(&left), "{left}");
    let explained = site.operate("POST", "/v1/explain", &request.to_string()).json();
    let reason = explained["banned"].as_str().unwrap_or_default();
    assert!(reason.starts_with("api_key:*** is banned in the store for "), "{explained}");

    assert_eq!(ban("PUT", &by_subject).json()["retry_after_ms"], Value::Null, "for good");
    assert_eq!(site.check(&request).json()["retry_after"], Value::Null);
    assert_eq!(ban("DELETE", &by_subject).json()["was_banned"], true);
    assert_eq!(ban("DELETE", &by_subject).json()["was_banned"], false);
    assert_eq!(site.check(&request).status, 200);

    let explicit = json!({ "checks": [{ "key": "user:1", "limit": "5/h" }, { "key": "user:2", "limit": "5/h" }] });
    assert_eq!(ban("PUT", "key=user:2&for=1min").status, 200);
    let refused = site.check(&explicit);
    assert_eq!((refused.status, &refused.json()["error"]), (403, &json!("banned")), "{refused:?}");
    assert_eq!(counters(&site, "key=user:1&limit=5/h"), json!([["per-hour", "5/h", 5]]), "nothing was charged");
    assert_eq!(ban("DELETE", "key=user:2").status, 200);
    assert_eq!(site.check(&explicit).status, 200);

    for (method, query) in [("PUT", "for=1h"), ("PUT", "client=a&for=soon"), ("DELETE", "client=a&for=1h")] {
        assert_eq!(ban(method, query).status, 400, "{method} {query}");
    }
    assert_eq!(ban("POST", &by_subject).status, 405);
    assert_eq!(site.ask_admin("PUT", "/v1/bans?client=user:9", "host: localhost\r\n").status, 401);
}

#[test]
fn without_the_store_everything_is_explained_except_counters() {
    let redis = Server::redis();
    let site = Site::start_with(RULES, |setup| {
        let store = RedisStore::builder(redis.url()).build().unwrap();
        setup.limiter = Limiter::builder().store(Arc::new(store)).deadline(DEADLINE).build();
    });
    let request = described("/", "planted-pro").to_string();
    let explain = || site.operate("POST", "/v1/explain", &request);
    let reachable = explain().json();
    assert_eq!(reachable["counters_unknown"], Value::Null, "{reachable}");
    assert_eq!(reachable["rules"][0]["limits"][0]["remaining"], 3, "{reachable}");
    redis.kill9();
    let unreachable = explain();
    assert_eq!(unreachable.status, 200, "{unreachable:?}");
    let unreachable = unreachable.json();
    let reason = unreachable["counters_unknown"].as_str().unwrap_or_default();
    let address = redis.url().trim_end_matches('/').to_owned();
    assert!(reason.contains(&address) && !reason.contains("os error"), "{unreachable}");
    let inspected = site.operate("GET", "/v1/keys?key=user:42&limit=5/h", "");
    assert!(inspected.status == 503 && inspected.body.contains(&address), "{inspected:?}");
    assert_eq!(
        (&unreachable["plan"], &unreachable["caller"]),
        (&reachable["plan"], &reachable["caller"]),
        "{unreachable}"
    );
    let limit = &unreachable["rules"][0]["limits"][0];
    assert_eq!(
        [&limit["remaining"], &limit["would_allow"], &limit["retry_after_ms"]],
        [&Value::Null; 3],
        "{unreachable}"
    );
}

/// A store in memory that holds the thread of one preview until the test releases it.
struct HoldingStore {
    memory: MemoryStore,
    previews: AtomicUsize,
    /// The number of the preview that is held, counted from 0.
    held: usize,
    is_held: mpsc::Sender<()>,
    released: Mutex<mpsc::Receiver<()>>,
}

impl Store for HoldingStore {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        self.memory.decide(checks)
    }

    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Store::refund(&self.memory, check, decision)
    }

    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Store::reset(&self.memory, demand)
    }

    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Store::inspect(&self.memory, demand)
    }

    fn preview<'a>(&'a self, check: &'a Check<'a>) -> StoreFuture<'a, Decision> {
        Box::pin(async move {
            if self.previews.fetch_add(1, Ordering::Relaxed) == self.held {
                self.is_held.send(()).unwrap();
                let _ = self.released.lock().unwrap().recv_timeout(PATIENCE);
            }
            Store::preview(&self.memory, check).await
        })
    }
}

/// The thread of the explanation is held in the middle of it, as if that took seconds.
#[test]
fn checks_are_answered_while_three_thousand_rules_are_explained() {
    const RULES: usize = 3_000;
    let rule = |number| format!("[[rules]]\nname = \"rule-{number}\"\nmode = \"shadow\"\nlimits = [\"10/h\"]\n");
    let rules: String = (0..RULES).map(rule).collect();
    let ((is_held, holds), (release, released)) = (mpsc::channel(), mpsc::channel());
    let (memory, previews, released) = (MemoryStore::default(), AtomicUsize::new(0), Mutex::new(released));
    let store = HoldingStore { memory, previews, held: RULES / 2, is_held, released };
    let site = Site::start_with(&rules, |setup| {
        setup.limiter = Limiter::builder().store(Arc::new(store)).deadline(DEADLINE).build();
    });
    let explained = std::thread::scope(|scope| {
        let explaining = scope.spawn(|| site.operate("POST", "/v1/explain", &described("/", "").to_string()).json());
        holds.recv_timeout(PATIENCE).expect("the explanation has begun");
        // Each is on a new connection, so they are served by all threads.
        for number in 0..64 {
            let check = json!({ "key": format!("user:{number}"), "limit": "5/h" });
            assert_eq!(site.check(&check).status, 200);
        }
        assert!(!explaining.is_finished());
        release.send(()).unwrap();
        explaining.join().unwrap()
    });
    let rules = explained["rules"].as_array().unwrap();
    assert_eq!(rules.len(), RULES);
    assert!(rules.iter().all(|rule| rule["limits"][0]["remaining"] == 10), "{explained}");
}

#[test]
fn the_explanation_of_a_costly_request_matches_its_answer() {
    let site = Site::start("[[rules]]\nname = \"all\"\nby = [\"ip\"]\ncost = 5\nlimits = [\"8/h\"]\n");
    let request = described("/", "");
    assert_eq!(site.check(&request).status, 200);
    let explanation = site.operate("POST", "/v1/explain", &request.to_string()).json();
    let limit = &explanation["rules"][0]["limits"][0];
    assert_eq!((&limit["remaining"], &limit["would_allow"]), (&json!(3), &json!(false)), "{explanation}");
    let wait_ms = limit["retry_after_ms"].as_u64().unwrap();
    assert!(
        (3_500_000..=3_600_000).contains(&wait_ms),
        "the five units of the first request must leave: {explanation}"
    );
    assert_eq!(site.check(&request).status, 429);
}
