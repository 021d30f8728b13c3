//! Compares explanations with the decisions of the engine.

use std::time::Duration;

use http::Request;
use tidegate::ManualClock;
use tidegate::config::{Config, Format};
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::identity::{KeyDigest, KnownKey};
use tidegate::rules::Lookups;

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
groups = ["partners"]
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
[[rules]]
name = "partners"
match = { path = "/partners", groups = ["partners", "staff"] }
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

async fn explain(request: &Request<()>, peer: [u8; 4]) -> Explanation {
    explain_by(&loaded(), &Lookups::new(), request, peer, false).await
}

async fn explain_by(
    loaded: &Loaded,
    lookups: &Lookups,
    request: &Request<()>,
    peer: [u8; 4],
    is_revealing: bool,
) -> Explanation {
    let (view, bans) = (RequestView::of(request), Arc::default());
    let query =
        ExplainQuery { request: &view, peer: peer.into(), client: None, bans, now: Timestamp::ZERO, is_revealing };
    Explanation::new(loaded, lookups, query).await.unwrap()
}

const HERE: [u8; 4] = [203, 0, 113, 9];

#[tokio::test]
async fn rule_for_groups_explains_that_the_caller_is_in_none_of_them() {
    let refused = explain(&request("GET", "/partners", &[("x-api-key", "planted-pro")]), HERE).await;
    assert_eq!(refused.rules[3].because, ["the caller is not in one of the groups partners, staff"]);
    assert!(refused.groups.is_empty());
    let partner = explain(&request("GET", "/partners", &[("x-api-key", "planted-own")]), HERE).await;
    assert!(partner.rules[3].applies && partner.groups == ["partners"]);
}

#[tokio::test]
async fn each_rule_explains_whether_it_applies_and_why_not() {
    let explanation = explain(&request("GET", "/shorten", &[("x-tenant", "a")]), HERE).await;
    let because: Vec<&[String]> = explanation.rules.iter().map(|rule| &rule.because[..]).collect();
    assert_eq!(because[0], ["the method is not POST", "the header x-kind does not have the expected value"]);
    assert_eq!(because[1], ["the path does not match /api/*", "the host does not match api.example.com"]);
    assert_eq!(because[2], ["the rule is off"]);
    let headers = [("x-tenant", "a"), ("x-kind", "planted-kind")];
    let explanation = explain(&request("POST", "//shorten/", &headers), HERE).await;
    assert!(explanation.rules[0].applies && explanation.rules[0].because.is_empty());
    assert_eq!(explanation.rules[0].counts, "ip:***&header:x-tenant:!***", "the tenant of another client is ignored");
    let text = serde_json::to_string(&explanation).unwrap();
    assert!(!text.contains("planted") && !text.contains("203.0.113"), "{text}");
    let request = request("POST", "/shorten", &headers);
    // The tenant is the value that a trusted proxy sends. That of another client is ignored.
    for (peer, counts) in
        [(HERE, "ip:203.0.113.9&header:x-tenant:!203.0.113.9"), ([10; 4], "ip:10.10.10.10&header:x-tenant:a")]
    {
        let revealed = explain_by(&loaded(), &Lookups::new(), &request, peer, true).await;
        assert_eq!(revealed.rules[0].counts, counts);
    }
}

#[tokio::test]
async fn absent_part_of_a_subject_is_marked_and_explained() {
    const BY_TENANT: &str = r#"
[[rules]]
name = "tenants"
by = ["header:x-tenant"]
limits = ["2/h"]
[[rules]]
name = "others"
by = ["ip", "cookie:device", "api_key", "user"]
limits = ["2/h"]
"#;
    let explain = async |config: &str, headers: &[(&str, &str)], peer: [u8; 4]| {
        let loaded = Config::from_text(config, Format::Toml).unwrap();
        let request = request("GET", "/", headers);
        explain_by(&loaded, &Lookups::new(), &request, peer, false).await.rules
    };
    let rules = explain(BY_TENANT, &[], HERE).await;
    assert_eq!(rules[0].counts, "header:x-tenant:!***");
    assert_eq!(rules[0].absent, ["the request has no header x-tenant"]);
    assert_eq!(rules[1].counts, "ip:***&cookie:device:!***&api_key:!***&user:!***");
    let absent = [
        "the request has no cookie device, or several with different values",
        "the request has no known API key",
        "the request has no valid user token",
    ];
    assert_eq!(rules[1].absent, absent);
    let rules = explain(BY_TENANT, &[("x-tenant", "planted")], HERE).await;
    assert_eq!((&*rules[0].counts, rules[0].absent.len()), ("header:x-tenant:***", 0));
    let rules = explain(BY_TENANT, &[("x-tenant", "a"), ("x-tenant", "b")], HERE).await;
    assert_eq!(rules[0].absent, ["the header x-tenant has several different values"]);
    let behind_proxies = format!("trusted_proxies = [\"10.0.0.0/8\"]\n{BY_TENANT}");
    let rules = explain(&behind_proxies, &[("x-tenant", "a")], HERE).await;
    assert_eq!(rules[0].absent, ["the header x-tenant is ignored, because the peer is not a trusted proxy"]);
}

#[test]
fn masked_subject_is_recognised_with_and_without_absent_parts() {
    for subject in ["ip:***", "header:x-tenant:!***", "user:42&ip:***", "cookie:device:***&user:42"] {
        assert!(is_masked_subject(subject), "{subject}");
    }
    for subject in ["global", "ip:203.0.113.9", "user:a***", "header:x-tenant:!203.0.113.9", "path:/***", "***"] {
        assert!(!is_masked_subject(subject), "{subject}");
    }
}

/// Returns the plan, its source, its limit, and the kind of the caller.
async fn api(headers: &[(&str, &str)], peer: [u8; 4]) -> (String, String, String, &'static str) {
    let headers: Vec<(&str, &str)> = [("host", "api.example.com")].iter().chain(headers).copied().collect();
    let explanation = explain(&request("GET", "/api/x", &headers), peer).await;
    let plan = explanation.plan.unwrap();
    (plan.name, plan.source.into_owned(), explanation.rules[1].limits[0].limit.clone(), explanation.caller)
}

#[tokio::test]
async fn the_plan_is_explained_with_its_source() {
    let own =
        |name: &str, source: &str, limit: &str, caller| (name.to_owned(), source.to_owned(), limit.to_owned(), caller);
    assert_eq!(api(&[], HERE).await, own("anonymous", "the caller has no known identity", "1/h", "ip"));
    assert_eq!(api(&[("x-api-key", "planted-pro")], HERE).await, own("pro", "the API key", "3/h", "api_key"));
    let of_its_own = own("default", "the API key's own limits", "9/h", "api_key");
    assert_eq!(api(&[("x-api-key", "planted-own")], HERE).await, of_its_own);
    assert_eq!(api(&[("x-api-key", "invented")], [203, 0, 113, 200]).await, own("pro", "the address", "3/h", "ip"));
    assert_eq!(api(&[("x-plan", "pro")], [10, 0, 0, 1]).await, own("pro", "the trusted proxy's header", "3/h", "ip"));
    assert_eq!(api(&[("x-plan", "pro")], HERE).await.1, "the caller has no known identity");
}

#[tokio::test]
async fn bans_and_exemptions_are_explained() {
    let banned = explain(&request("GET", "/", &[]), [198, 51, 100, 7]).await.banned;
    assert_eq!(banned.as_deref(), Some("banned: scraping"));
    assert_eq!(explain(&request("GET", "/health", &[]), HERE).await.exempt, Some("path"));
    assert_eq!(explain(&request("GET", "/", &[]), [192, 0, 2, 1]).await.exempt, Some("address"));
    let known = explain(&request("GET", "/", &[("x-api-key", "planted-pro")]), HERE).await;
    assert_eq!(known.key_name.as_deref(), Some("acme"));
}

#[tokio::test]
async fn key_that_a_lookup_knows_is_explained_like_a_listed_one() {
    let lookup = |digest: KeyDigest| async move {
        let known = [
            ("found-pro", KnownKey::new().name("initech").plan("pro")),
            ("found-exempt", KnownKey::new().exempt(true)),
        ];
        let found = known.into_iter().find(|(key, _)| digest == KeyDigest::of(key));
        Ok::<_, std::io::Error>(found.map(|(_, known)| known))
    };
    let (loaded, lookups) = (loaded(), Lookups::new().key(lookup));
    let explain = async |key: &str| {
        let request = request("GET", "/", &[("x-api-key", key)]);
        explain_by(&loaded, &lookups, &request, HERE, false).await
    };
    let found = explain("found-pro").await;
    assert_eq!((found.caller, found.key_name.as_deref()), ("api_key", Some("initech")));
    assert_eq!(found.key_lookup.as_deref(), Some("found in the lookups"));
    assert_eq!(found.plan.map(|plan| (plan.name, plan.source)), Some(("pro".to_owned(), "the API key".into())));
    assert_eq!(explain("found-exempt").await.exempt, Some("key"));
    let unknown = explain("invented").await;
    assert_eq!((unknown.caller, unknown.key_name), ("ip", None));
    assert_eq!(
        unknown.key_lookup.as_deref(),
        Some("not listed, and either not found in the lookups or not looked up in time")
    );
    assert_eq!(explain("planted-pro").await.key_lookup, None, "a listed key is not looked up");
}

#[tokio::test]
async fn remaining_units_match_the_engine_and_reading_them_charges_nothing() {
    let (loaded, limiter) = (loaded(), Limiter::memory());
    let engine = Engine::new(limiter.clone(), loaded.rules.clone());
    let request = request("POST", "/shorten", &[("x-tenant", "a"), ("x-kind", "planted-kind")]);
    for left in [2, 1, 0, 0] {
        let mut explanation = explain_by(&loaded, &Lookups::new(), &request, HERE, false).await;
        explanation.read_counters(&limiter).await;
        let limit = &explanation.rules[0].limits[0];
        assert_eq!((limit.remaining, limit.would_allow), (Some(left), Some(left > 0)));
        assert_eq!(limit.retry_after_ms == Some(0), left > 0);
        let outcome = engine.check(&RequestView::of(&request), HERE.into(), RequestOptions::default()).await;
        assert_eq!(matches!(outcome, Outcome::Admitted(_)), left > 0);
    }
}

/// The next request gets exactly the verdict and the wait that the explanation predicts, whatever its cost.
#[tokio::test]
async fn the_wait_is_that_of_the_whole_cost_in_every_algorithm() {
    for limit in [
        "8/h",
        "8/h sliding-log",
        "8/h sliding-counter",
        "8/h fixed-window",
        "8/h token-bucket",
        "8/h leaky-bucket queue=6",
        "8/h count_denied=true",
        "8/h token-bucket count_denied=true",
    ] {
        let text = format!("[[rules]]\nname = \"all\"\nby = [\"ip\"]\ncost = 5\nlimits = [\"{limit}\"]\n");
        let loaded = Config::from_text(&text, Format::Toml).unwrap_or_else(|report| panic!("{report:?}"));
        let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
        let limiter = Limiter::builder().clock(clock.clone()).build();
        let engine = Engine::new(limiter.clone(), loaded.rules.clone());
        let request = request("GET", "/", &[]);
        for _ in 0..3 {
            clock.advance(Duration::from_secs(1));
            let mut explanation = explain_by(&loaded, &Lookups::new(), &request, HERE, false).await;
            explanation.read_counters(&limiter).await;
            // The first reading has charged nothing, or the second would differ.
            let mut again = explain_by(&loaded, &Lookups::new(), &request, HERE, false).await;
            again.read_counters(&limiter).await;
            let [first, second] = [&explanation, &again]
                .map(|explanation| serde_json::to_value(&explanation.rules[0].limits[0]).unwrap());
            assert_eq!(first, second, "{limit}");
            let status = match engine.check(&RequestView::of(&request), HERE.into(), RequestOptions::default()).await {
                Outcome::Admitted(permit) => permit.decision().unwrap().limits[0],
                Outcome::Refused(refusal) => refusal.decision().unwrap().limits[0],
            };
            let explained = &explanation.rules[0].limits[0];
            assert_eq!(explained.would_allow, Some(status.allowed), "{limit}");
            let wait = if status.allowed { Some(0) } else { status.retry_after.as_millis_ceil() };
            // With `count_denied` the denied request itself lengthens the wait.
            if !limit.contains("count_denied") {
                assert_eq!(explained.retry_after_ms, wait, "{limit}");
            }
        }
        let read = async || {
            let mut explanation = explain_by(&loaded, &Lookups::new(), &request, HERE, false).await;
            explanation.read_counters(&limiter).await;
            (explanation.rules[0].limits[0].would_allow, explanation.rules[0].limits[0].retry_after_ms)
        };
        let (Some(false), Some(wait_ms @ 1..)) = read().await else { panic!("{limit} refuses nothing") };
        clock.advance(Duration::from_millis(wait_ms - 1));
        assert_eq!(read().await.0, Some(false), "{limit}");
        clock.advance(Duration::from_millis(1));
        assert_eq!(read().await, (Some(true), Some(0)), "{limit}");
    }
}

async fn verdict_of(text: &str, method: &str, engine: Option<&Engine>) -> (Option<bool>, String) {
    let loaded = Config::from_text(text, Format::Toml).unwrap_or_else(|report| panic!("{report:?}"));
    let request = request(method, "/", &[]);
    let mut explanation = explain_by(&loaded, &Lookups::new(), &request, HERE, false).await;
    if let Some(engine) = engine {
        explanation.read_counters(engine.limiter()).await;
        explanation.read_shields(engine.shield());
    }
    (explanation.verdict.allowed, explanation.verdict.because)
}

#[tokio::test]
async fn the_verdict_is_that_of_all_rules_together() {
    const TEXT: &str = "[[rules]]\nname = 'flood'\nstore = 'memory'\nlimits = ['3/h']\n\
                        [[rules]]\nname = 'post'\nmatch.methods = 'POST'\nby = ['ip']\nlimits = ['1/h']\n\
                        [[rules]]\nname = 'trial'\nmode = 'shadow'\nby = ['ip']\nlimits = ['1/h']\n";
    let loaded = Config::from_text(TEXT, Format::Toml).unwrap_or_else(|report| panic!("{report:?}"));
    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
    let limiter = Limiter::builder().clock(clock.clone()).build();
    let engine = Engine::on_clock(limiter, loaded.rules, Vec::new(), clock);
    let said = |allowed, because: &str| (allowed, because.to_owned());
    let send = async |method: &str| {
        let request = request(method, "/", &[]);
        matches!(
            engine.check(&RequestView::of(&request), HERE.into(), RequestOptions::default()).await,
            Outcome::Admitted(_)
        )
    };
    let elsewhere =
        "the counters of shield flood are in the memory of each instance; query an instance with --admin URL";
    assert_eq!(verdict_of(TEXT, "POST", None).await, said(None, elsewhere));
    assert_eq!(verdict_of(TEXT, "POST", Some(&engine)).await, said(Some(true), "every limit has room"));
    assert!(send("POST").await);
    let denied = said(Some(false), "post.per-hour of rule post denies it for 1h");
    assert_eq!(verdict_of(TEXT, "POST", Some(&engine)).await, denied);
    assert!(!send("POST").await);
    // The shadow rule has no room left, and the shield has.
    assert_eq!(verdict_of(TEXT, "GET", Some(&engine)).await, said(Some(true), "every limit has room"));
    while send("GET").await {}
    let shielded = said(Some(false), "flood.per-hour of rule flood denies it for 1h");
    assert_eq!(verdict_of(TEXT, "GET", Some(&engine)).await, shielded);
    assert_eq!(verdict_of(TEXT, "POST", Some(&engine)).await, shielded, "the shield is decided first");

    let one = "[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['1/h']\n";
    let unread = said(
        None,
        "the counters of rule all were not read; specify --store URL (Redis) or --admin URL (a running instance)",
    );
    assert_eq!(verdict_of(one, "GET", None).await, unread);
    for (text, expected) in [
        ("[[rules]]\nname = 'a'\nmode = 'shadow'\nlimits = ['1/h']\n", said(Some(true), "no enforced rule applies")),
        (&format!("kill_switch = true\n{one}"), said(Some(true), "the kill switch is on")),
        (&format!("exempt.paths = '/'\n{one}"), said(Some(true), "the path is exempt")),
        (&format!("bans = [{{ by = 'ip', value = '203.0.113.9' }}]\n{one}"), said(Some(false), "banned")),
    ] {
        assert_eq!(verdict_of(text, "GET", None).await, expected, "{text}");
    }
}

/// A rule that is added qualifies the names of another one, whose counters continue.
#[tokio::test]
async fn a_limit_that_gets_a_qualified_name_keeps_its_counter() {
    let old = "[[rules]]\nname = 'old'\nby = ['ip']\nlimits = ['9/h']\n";
    let text = format!("{old}[[rules]]\nname = 'new'\nby = ['ip']\nlimits = ['5/h']\n");
    let [old, both] = [old, &text].map(|text| Config::from_text(text, Format::Toml).unwrap().rules);
    let engine = Engine::new(Limiter::memory(), old);
    let request = request("GET", "/", &[]);
    let send = async || {
        let checked = engine.check(&RequestView::of(&request), HERE.into(), RequestOptions::default()).await;
        let Outcome::Admitted(permit) = checked else { panic!("refused") };
        let names = permit.policies().unwrap().policies().map(|policy| policy.name().to_owned());
        let left = permit.decision().unwrap().limits.iter().map(|status| status.remaining);
        names.zip(left).collect::<Vec<_>>()
    };
    assert_eq!(send().await, [("per-hour".to_owned(), 8)]);
    engine.reload(both);
    assert_eq!(send().await, [("old.per-hour".to_owned(), 7), ("new.per-hour".to_owned(), 4)]);
}
