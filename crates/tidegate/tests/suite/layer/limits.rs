//! Several limits in one request, shadow rules, shields, and plans from a closure.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use sfv::{BareItem, ListEntry, Parser};
use tidegate::engine::Engine;
use tidegate::layer::KeepCharge;
use tidegate::rules::{Charge, PlanQuestion};
use tidegate::{Limiter, RateLimitLayer, Rule, Rules, Subject};
use tower::{Layer, Service, ServiceExt};

use super::site::{PEER, PolicyStatus, Site, policies_of};

const DAY: Duration = Duration::from_secs(86_400);

fn policy(name: &str, remaining: i64, next_secs: i64) -> PolicyStatus {
    PolicyStatus { name: name.into(), remaining, next_secs: Some(next_secs) }
}

#[tokio::test]
async fn headers_list_every_policy_and_a_denial_per_day_is_not_charged_per_minute() {
    let site = Site::new("[[rules]]\nname = 'api'\nby = ['ip']\nlimits = ['100/min', '5/day']");
    for n in 1..=5 {
        let response = site.send("/", &[], PEER).await;
        assert_eq!(response.status(), 200);
        assert_eq!(policies_of(&response), [policy("per-minute", 100 - n, 60), policy("per-day", 5 - n, 86_400)]);
        assert_eq!(response.headers()["x-ratelimit-limit"], "5", "the strictest of them");
    }
    for _ in 0..50 {
        let denied = site.send("/", &[], PEER).await;
        assert_eq!(denied.status(), 429);
        assert_eq!(policies_of(&denied), [policy("per-minute", 95, 60), policy("per-day", 0, 86_400)]);
        assert_eq!(denied.headers()["retry-after"], "86400");
    }
    site.clock.advance(Duration::from_secs(60));
    let denied = site.send("/", &[], PEER).await;
    assert_eq!(
        policies_of(&denied),
        [policy("per-minute", 100, 0), policy("per-day", 0, 86_340)],
        "no unit of the minute is used"
    );
    site.clock.advance(DAY - Duration::from_secs(60));
    assert_eq!(
        policies_of(&site.send("/", &[], PEER).await),
        [policy("per-minute", 99, 60), policy("per-day", 4, 86_400)]
    );
}

#[tokio::test]
async fn ratelimit_policy_header_lists_the_limits_of_all_rules() {
    let site = Site::new(
        r#"
        [[rules]]
        name = "all"
        by = ["ip"]
        limits = ["100/min", "1000/h"]
        [[rules]]
        name = "login"
        match = { path = "/login" }
        by = ["ip"]
        limits = ["7/min", { name = "tries", limit = "250/500ms" }]
        "#,
    );
    let response = site.send("/login", &[], PEER).await;
    let header = response.headers()["ratelimit-policy"].to_str().unwrap();
    let parsed = Parser::new(header).parse::<sfv::List>().unwrap();
    let policies: Vec<(String, i64, Option<i64>)> = parsed
        .iter()
        .map(|entry| {
            let ListEntry::Item(item) = entry else { panic!("{header}") };
            let number = |value: &BareItem| i64::from(value.as_integer().unwrap());
            let name = item.bare_item.as_string().unwrap().as_str().to_owned();
            (name, number(&item.params["q"]), item.params.get("w").map(number))
        })
        .collect();
    let expected = [
        // Two rules have a limit per minute, so their policies are qualified by the rule.
        ("all.per-minute", 100, Some(60)),
        ("per-hour", 1_000, Some(3_600)),
        ("login.per-minute", 7, Some(60)),
        ("tries", 250, None),
    ];
    assert_eq!(policies, expected.map(|(name, q, w)| (name.to_owned(), q, w)));
    let names: Vec<String> = policies_of(&response).into_iter().map(|policy| policy.name).collect();
    assert_eq!(names, ["all.per-minute", "per-hour", "login.per-minute", "tries"]);
}

#[tokio::test]
async fn shadow_rule_denies_nothing_is_not_in_the_headers_and_counts_its_denials() {
    let site = Site::new(
        r#"
        [[rules]]
        name = "real"
        by = ["ip"]
        limits = ["20/min"]
        [[rules]]
        name = "planned"
        mode = "shadow"
        by = ["ip"]
        limits = ["3/min"]
        [[rules]]
        name = "login"
        mode = "shadow"
        charge = "on_failure"
        by = ["ip"]
        limits = ["2/min"]
        "#,
    );
    for n in 1..=30 {
        let response = site.send("/", &[], PEER).await;
        assert_eq!(response.status().as_u16(), if n <= 20 { 200 } else { 429 }, "request {n}");
        assert_eq!(policies_of(&response).len(), 1, "only the enforced rule is in the headers");
    }
    let stats = site.engine.rule_stats();
    let counted: Vec<(&str, u64, u64)> =
        stats.iter().map(|rule| (&*rule.rule, rule.allowed(), rule.denied())).collect();
    // Requests that the real rule denies do not reach the others. The login rule charges no success, in shadow mode
    // too.
    assert_eq!(counted, [("real", 20, 10), ("planned", 3, 17), ("login", 20, 0)]);
}

#[tokio::test]
async fn shields_count_in_process_memory_in_shadow_mode_and_with_refunds() {
    let site = Site::new(
        r#"
        [[rules]]
        name = "planned"
        store = "memory"
        mode = "shadow"
        limits = ["5/s"]
        [[rules]]
        name = "failures"
        store = "memory"
        charge = "on_failure"
        limits = ["2/s"]
        "#,
    );
    for _ in 0..20 {
        assert_eq!(site.status("/", &[], PEER).await, 200, "a success costs nothing");
    }
    let planned = &site.engine.rule_stats()[0];
    assert_eq!((planned.allowed(), planned.denied()), (5, 15));
    assert_eq!(site.engine.limiter().stats().decisions, 0, "shields do not use the shared limiter");
}

#[tokio::test]
async fn closure_can_look_up_plans() {
    let lookup = |question: PlanQuestion| async move {
        Ok::<_, std::io::Error>((question.address == IpAddr::from([192, 0, 2, 1])).then_some("pro"))
    };
    let site = Site::with_lookups(
        r#"
        [plans.anonymous]
        limits = ["2/min"]
        [plans.default]
        limits = ["3/min"]
        [plans.pro]
        limits = ["5/min"]
        [[rules]]
        name = "api"
        by = ["caller"]
        limits = "plan"
        "#,
        vec![Arc::new(lookup)],
    );
    for (peer, quota) in [(PEER, 2), ([192, 0, 2, 1], 5)] {
        for n in 0..10 {
            assert_eq!(site.status("/", &[], peer).await, if n < quota { 200 } else { 429 });
        }
    }
}

#[tokio::test]
async fn plan_lookup_is_not_called_for_requests_that_a_shield_refuses() {
    let lookups = Arc::new(AtomicU64::new(0));
    let counter = lookups.clone();
    let lookup = move |_: PlanQuestion| {
        counter.fetch_add(1, Ordering::Relaxed);
        async { Ok::<_, std::io::Error>(None::<&str>) }
    };
    let site = Site::with_lookups(
        r#"
        api_keys = "any"
        [plans.anonymous]
        limits = ["1000/min"]
        [plans.default]
        limits = ["1000/min"]
        [[rules]]
        name = "flood"
        store = "memory"
        by = ["ip"]
        limits = ["5/min"]
        [[rules]]
        name = "api"
        by = ["caller"]
        limits = "plan"
        "#,
        vec![Arc::new(lookup)],
    );
    for n in 0..50 {
        let key = format!("invented-{n}");
        let response = site.send("/", &[("x-api-key", &key)], PEER).await;
        assert_eq!(response.status().as_u16(), if n < 5 { 200 } else { 429 });
    }
    assert_eq!(lookups.load(Ordering::Relaxed), 5, "one for each request that passed the shield");
    let stats = site.engine.rule_stats();
    assert_eq!((stats[0].allowed(), stats[0].denied(), stats[1].allowed()), (5, 45, 5));
}

#[tokio::test]
async fn shield_is_in_the_headers_if_it_is_the_only_rule() {
    let site = Site::new("[[rules]]\nname = 'flood'\nstore = 'memory'\nby = ['ip']\nlimits = ['5/min']");
    let response = site.send("/", &[], PEER).await;
    assert_eq!((response.status().as_u16(), policies_of(&response)[0].remaining), (200, 4));
}

#[tokio::test]
async fn refunded_units_are_counted_as_remaining_in_the_headers() {
    let rules = "[[rules]]\nname = 'login'\nby = ['ip']\nlimits = ['1/h']\ncharge = '";
    let shield = Site::new(&format!("{rules}on_failure'\nstore = 'memory'"));
    for _ in 0..3 {
        let response = shield.send("/", &[], PEER).await;
        assert_eq!(
            (response.status().as_u16(), policies_of(&response)[0].remaining),
            (200, 1),
            "a shield refunds, too"
        );
    }
    let on_failure = Site::new(&format!("{rules}on_failure'"));
    let on_success = Site::new(&format!("{rules}on_success'"));
    for _ in 0..3 {
        let response = on_failure.send("/", &[], PEER).await;
        let policy = &policies_of(&response)[0];
        assert_eq!((response.status().as_u16(), policy.remaining, policy.next_secs), (200, 1, Some(0)));
        assert_eq!(response.headers()["x-ratelimit-remaining"], "1", "the next request is allowed at once");
    }
    assert_eq!(policies_of(&on_success.send("/", &[], PEER).await)[0].remaining, 0);
}

#[tokio::test]
async fn response_with_keep_charge_refunds_nothing() {
    let rule = Rule::new("r").by(Subject::Ip).limit("10/h").charge(Charge::OnSuccess);
    let engine = Engine::new(Limiter::memory(), Rules::new().rule(rule).build().unwrap());
    let layer = RateLimitLayer::new(engine, |_| Some(IpAddr::from(PEER)));
    let mut service = layer.layer(tower::service_fn(|request: http::Request<Body>| async move {
        let mut response = http::Response::new(Body::empty());
        *response.status_mut() = http::StatusCode::BAD_REQUEST;
        if request.uri().path() == "/aborted" {
            response.extensions_mut().insert(KeepCharge);
        }
        Ok::<_, std::convert::Infallible>(response)
    }));
    for (path, remaining) in [("/", "10"), ("/aborted", "9"), ("/aborted", "8"), ("/", "8")] {
        let request = http::Request::get(path).body(Body::empty()).unwrap();
        let response = service.ready().await.unwrap().call(request).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.headers()["x-ratelimit-remaining"].to_str().unwrap()),
            (400, &remaining),
            "{path}"
        );
    }
}
