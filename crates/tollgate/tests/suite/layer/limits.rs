//! Several limits at once, shadow rules, plans by closure.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sfv::{BareItem, ListEntry, Parser};
use tollgate::rules::PlanQuestion;

use super::site::{HERE, Site, Told, told_by};

const DAY: Duration = Duration::from_secs(86_400);

fn one(name: &str, remaining: i64, next_secs: i64) -> Told {
    Told { name: name.into(), remaining, next_secs: Some(next_secs) }
}

#[tokio::test]
async fn headers_list_every_policy_and_a_denial_by_the_day_leaves_the_minute_as_it_was() {
    let site = Site::new("[[rules]]\nname = 'api'\nby = ['ip']\nlimits = ['100/min', '5/day']");
    for n in 1..=5 {
        let response = site.send("/", &[], HERE).await;
        assert_eq!(response.status(), 200);
        assert_eq!(told_by(&response), [one("per-minute", 100 - n, 60), one("per-day", 5 - n, 86_400)]);
        assert_eq!(response.headers()["x-ratelimit-limit"], "5", "the strictest of them");
    }
    for _ in 0..50 {
        let denied = site.send("/", &[], HERE).await;
        assert_eq!(denied.status(), 429);
        assert_eq!(told_by(&denied), [one("per-minute", 95, 60), one("per-day", 0, 86_400)]);
        assert_eq!(denied.headers()["retry-after"], "86400");
    }
    site.clock.advance(Duration::from_secs(60));
    let denied = site.send("/", &[], HERE).await;
    assert_eq!(told_by(&denied), [one("per-minute", 100, 0), one("per-day", 0, 86_340)], "the minute is whole");
    site.clock.advance(DAY - Duration::from_secs(60));
    assert_eq!(told_by(&site.send("/", &[], HERE).await), [one("per-minute", 99, 60), one("per-day", 4, 86_400)]);
}

#[tokio::test]
async fn the_policies_of_a_response_parse_back_to_the_limits_of_all_rules() {
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
    let response = site.send("/login", &[], HERE).await;
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
        ("per-minute", 100, Some(60)),
        ("per-hour", 1_000, Some(3_600)),
        // Two rules have a limit by the minute; nobody shall take one's numbers for the other's.
        ("per-minute-2", 7, Some(60)),
        ("tries", 250, None),
    ];
    assert_eq!(policies, expected.map(|(name, q, w)| (name.to_owned(), q, w)));
    let names: Vec<String> = told_by(&response).into_iter().map(|told| told.name).collect();
    assert_eq!(names, ["per-minute", "per-hour", "per-minute-2", "tries"]);
}

#[tokio::test]
async fn a_shadow_rule_never_blocks_is_not_told_and_counts_what_it_would_have_denied() {
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
        let response = site.send("/", &[], HERE).await;
        assert_eq!(response.status().as_u16(), if n <= 20 { 200 } else { 429 }, "request {n}");
        assert_eq!(told_by(&response).len(), 1, "only the rule that is enforced is told");
    }
    let stats = site.engine.rule_stats();
    let counted: Vec<(&str, u64, u64)> =
        stats.iter().map(|rule| (&*rule.rule, rule.allowed(), rule.denied())).collect();
    // What the real rule refused never reached the others. Successes cost the login rule nothing, in shadow too.
    assert_eq!(counted, [("real", 20, 10), ("planned", 3, 17), ("login", 20, 0)]);
}

#[tokio::test]
async fn a_shadow_shield_counts_in_process_and_a_shield_gives_back_like_any_rule() {
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
        assert_eq!(site.status("/", &[], HERE).await, 200, "a success costs nothing");
    }
    let planned = &site.engine.rule_stats()[0];
    assert_eq!((planned.allowed(), planned.denied()), (5, 15));
    assert_eq!(site.engine.limiter().stats().decisions, 0, "no shield asks the store that others share");
}

#[tokio::test]
async fn plans_can_come_from_a_closure() {
    let lookup = |question: &PlanQuestion| (question.address == IpAddr::from([192, 0, 2, 1])).then(|| Arc::from("pro"));
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
    for (peer, quota) in [(HERE, 2), ([192, 0, 2, 1], 5)] {
        for n in 0..10 {
            assert_eq!(site.status("/", &[], peer).await, if n < quota { 200 } else { 429 });
        }
    }
}

#[tokio::test]
async fn whom_a_shield_refuses_is_not_asked_about() {
    let questions = Arc::new(AtomicU64::new(0));
    let asked = questions.clone();
    let lookup = move |_: &PlanQuestion| -> Option<Arc<str>> {
        asked.fetch_add(1, Ordering::Relaxed);
        None
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
        let answered = site.send("/", &[("x-api-key", &key)], HERE).await;
        assert_eq!(answered.status().as_u16(), if n < 5 { 200 } else { 429 });
    }
    assert_eq!(questions.load(Ordering::Relaxed), 5, "the flood ends at the shield");
    let stats = site.engine.rule_stats();
    assert_eq!((stats[0].allowed(), stats[0].denied(), stats[1].allowed()), (5, 45, 5));
}

#[tokio::test]
async fn a_request_that_only_a_shield_limits_is_told_its_numbers() {
    let site = Site::new("[[rules]]\nname = 'flood'\nstore = 'memory'\nby = ['ip']\nlimits = ['5/min']");
    let answered = site.send("/", &[], HERE).await;
    assert_eq!((answered.status().as_u16(), told_by(&answered)[0].remaining), (200, 4));
}

#[tokio::test]
async fn what_a_request_does_not_owe_is_told_as_given_back() {
    let rules = "[[rules]]\nname = 'login'\nby = ['ip']\nlimits = ['1/h']\ncharge = '";
    let shield = Site::new(&format!("{rules}on_failure'\nstore = 'memory'"));
    for _ in 0..3 {
        let answered = shield.send("/", &[], HERE).await;
        assert_eq!((answered.status().as_u16(), told_by(&answered)[0].remaining), (200, 1), "by a shield too");
    }
    let on_failure = Site::new(&format!("{rules}on_failure'"));
    let on_success = Site::new(&format!("{rules}on_success'"));
    for _ in 0..3 {
        let answered = on_failure.send("/", &[], HERE).await;
        let told = &told_by(&answered)[0];
        assert_eq!((answered.status().as_u16(), told.remaining, told.next_secs), (200, 1, Some(0)));
        assert_eq!(answered.headers()["x-ratelimit-remaining"], "1", "the next one passes at once");
    }
    assert_eq!(told_by(&on_success.send("/", &[], HERE).await)[0].remaining, 0);
}
