//! Requests that rules decide, on a manual clock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::*;
use crate::answer::Verdict;
use crate::config::{Config, Format};
use crate::rules::path::normalisations;
use http::{HeaderMap, Request};
use tidegate_core::{Check, Clock, Decision, ManualClock, Source, StoreError, Timestamp, Wait};

struct Site {
    engine: Engine,
    clock: Arc<ManualClock>,
}

fn rules(text: &str) -> RuleSet {
    Config::from_text(text, Format::Toml).unwrap_or_else(|report| panic!("{report:?}")).rules
}

fn site(text: &str) -> Site {
    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
    let memory = MemoryStore::builder().clock(clock.clone()).build();
    let limiter = Limiter::builder().memory(memory).clock(clock.clone()).build();
    Site { engine: Engine::on_clock(limiter, rules(text), Vec::new(), clock.clone()), clock }
}

impl Site {
    async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], peer: [u8; 4]) -> Outcome {
        self.send_from(method, path, headers, peer.into()).await
    }

    async fn send_from(&self, method: &str, path: &str, headers: &[(&str, &str)], peer: IpAddr) -> Outcome {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        self.engine.check(&RequestView::of(&request), peer, RequestOptions::default()).await
    }

    /// Returns the verdict, and how many paths were normalised for it.
    async fn verdict(&self, path: &str, headers: &[(&str, &str)], peer: [u8; 4]) -> (Verdict, u64) {
        normalisations::take();
        let verdict = match self.send("GET", path, headers, peer).await {
            Outcome::Admitted(_) => Verdict::Allowed,
            Outcome::Refused(refusal) => refusal.verdict(),
        };
        (verdict, normalisations::take())
    }

    async fn passes(&self, method: &str, path: &str, headers: &[(&str, &str)], peer: [u8; 4]) -> bool {
        match self.send(method, path, headers, peer).await {
            Outcome::Admitted(permit) => {
                permit.finish(Ending::Success).await;
                true
            }
            Outcome::Refused(_) => false,
        }
    }
}

const HERE: [u8; 4] = [203, 0, 113, 9];

#[tokio::test]
async fn request_that_no_rule_matches_is_not_limited() {
    let site = site(
        r#"
        [[rules]]
        name = "shorten"
        match = { methods = ["POST"], path = "/shorten" }
        by = ["ip"]
        limits = ["2/min"]
        "#,
    );
    for n in 0..4 {
        assert_eq!(site.passes("POST", "/shorten", &[], HERE).await, n < 2);
        assert!(site.passes("GET", "/abc", &[], HERE).await);
    }
    assert!(site.passes("POST", "/shorten", &[], [203, 0, 113, 10]).await, "another address has its own");
}

#[tokio::test]
async fn rule_with_groups_applies_only_to_callers_with_a_known_key_in_one_of_them() {
    let site = site(
        r#"
        [[keys]]
        key = "partner"
        groups = ["partners", "beta"]
        [[keys]]
        key = "customer"
        groups = "customers"
        [[keys]]
        key = "plain"
        [[rules]]
        name = "reports"
        match = { path = "/reports", groups = ["partners", "staff"] }
        by = ["global"]
        limits = ["1/h"]
        "#,
    );
    let reports = async |key| site.passes("GET", "/reports", &[("x-api-key", key)], HERE).await;
    for key in ["customer", "plain", "invented"] {
        assert!(reports(key).await && reports(key).await, "{key} is in none of the groups");
    }
    assert!(site.passes("GET", "/reports", &[], HERE).await);
    assert!(reports("partner").await);
    assert!(!reports("partner").await, "the rule counts only this caller's requests, and refuses the second");
    assert!(site.passes("GET", "/other", &[("x-api-key", "partner")], HERE).await);
}

#[tokio::test]
async fn all_matching_rules_are_decided_together_and_headers_list_every_policy() {
    let site = site(
        r#"
        [[rules]]
        name = "all"
        by = ["ip"]
        limits = ["100/min"]
        [[rules]]
        name = "login"
        match = { path = "/login" }
        by = ["ip"]
        limits = [{ name = "tries", limit = "1/h" }]
        "#,
    );
    let Outcome::Admitted(permit) = site.send("GET", "/login", &[], HERE).await else { panic!("the first") };
    let mut headers = HeaderMap::new();
    permit.write_headers(&mut headers);
    assert_eq!(headers["ratelimit-policy"], r#""per-minute";q=100;w=60, "tries";q=1;w=3600"#);
    assert_eq!(headers["ratelimit"], r#""per-minute";r=99;t=60, "tries";r=0;t=3600"#);
    let Outcome::Refused(refusal) = site.send("GET", "/login", &[], HERE).await else { panic!("the second") };
    assert_eq!(refusal.response(&HeaderMap::new()).headers()["retry-after"], "3600");
    let remaining = refusal.decision().unwrap().limits[0].remaining;
    assert_eq!(remaining, 99, "the limit per minute is not charged if the other one refuses");
}

#[tokio::test]
async fn shadow_rule_never_refuses_and_counts_the_requests_it_would_have_denied() {
    let site = site(
        r#"
        [[rules]]
        name = "strict"
        mode = "shadow"
        by = ["ip"]
        limits = ["3/min"]
        "#,
    );
    for _ in 0..10 {
        assert!(site.passes("GET", "/", &[], HERE).await);
    }
    let stats = site.engine.rule_stats();
    assert_eq!((stats[0].allowed(), stats[0].denied()), (3, 7));
}

#[tokio::test]
async fn limits_are_those_of_the_plan_of_the_key_or_of_the_anonymous_plan() {
    let site = site(
        r#"
        [plans.anonymous]
        limits = ["2/min"]
        [plans.default]
        limits = ["3/min"]
        [plans.pro]
        limits = ["5/min"]
        [[keys]]
        key = "pro-key-000000"
        plan = "pro"
        [[rules]]
        name = "api"
        by = ["caller"]
        limits = "plan"
        "#,
    );
    let mut admitted = 0;
    for n in 0..100 {
        let invented = format!("invented-{n}");
        admitted += u32::from(site.passes("GET", "/", &[("x-api-key", &invented)], HERE).await);
    }
    assert_eq!(admitted, 2, "invented keys share their address's anonymous budget");
    let mut admitted = 0;
    for _ in 0..10 {
        admitted += u32::from(site.passes("GET", "/", &[("x-api-key", "pro-key-000000")], HERE).await);
    }
    assert_eq!(admitted, 5);
}

#[tokio::test]
async fn units_are_refunded_by_the_ending_of_a_request_and_exactly_once() {
    let site = site(
        r#"
        [[rules]]
        name = "login"
        by = ["ip"]
        charge = "on_failure"
        limits = ["3/h"]
        "#,
    );
    for _ in 0..50 {
        assert!(site.passes("POST", "/login", &[], HERE).await, "a success costs nothing");
    }
    let Outcome::Admitted(failed) = site.send("POST", "/login", &[], HERE).await else { panic!("there is room") };
    failed.finish(Ending::of(http::StatusCode::UNAUTHORIZED)).await;
    let Outcome::Admitted(dropped) = site.send("POST", "/login", &[], HERE).await else { panic!("there is room") };
    drop(dropped);
    let Outcome::Admitted(last) = site.send("POST", "/login", &[], HERE).await else { panic!("there is room") };
    assert_eq!(last.decision().unwrap().limits[0].remaining, 0);
    last.finish(Ending::Success).await;
    assert!(site.passes("POST", "/login", &[], HERE).await);
}

#[tokio::test]
async fn request_without_a_response_keeps_its_charge_in_every_mode() {
    for charge in ["always", "on_failure", "on_success"] {
        let site = site(&format!("[[rules]]\nname = 'a'\nby = ['ip']\ncharge = '{charge}'\nlimits = ['3/h']"));
        for _ in 0..3 {
            let Outcome::Admitted(permit) = site.send("POST", "/", &[], HERE).await else { panic!("there is room") };
            drop(permit);
        }
        assert!(matches!(site.send("POST", "/", &[], HERE).await, Outcome::Refused(_)), "{charge}");
    }
}

#[tokio::test]
async fn shield_refuses_in_process_and_in_plain_text() {
    let site = site(
        r#"
        [[rules]]
        name = "shield"
        by = ["ip"]
        store = "memory"
        limits = ["5/s"]
        [[rules]]
        name = "api"
        by = ["ip"]
        limits = ["100/min"]
        "#,
    );
    for n in 0..8 {
        let outcome = site.send("GET", "/", &[], HERE).await;
        assert_eq!(matches!(outcome, Outcome::Admitted(_)), n < 5);
        if let Outcome::Refused(refusal) = outcome {
            assert_eq!(refusal.response(&HeaderMap::new()).headers()["content-type"], "text/plain; charset=utf-8");
        }
    }
    assert_eq!(site.engine.rule_stats()[1].allowed(), 5, "the flood never reached the other rule");
}

/// A clock whose every reading is `step_us` later than the one before; past `panics_at_us` it panics.
struct Hurried {
    now_us: AtomicU64,
    step_us: u64,
    panics_at_us: u64,
}

impl Clock for Hurried {
    fn now(&self) -> Timestamp {
        let now_us = self.now_us.fetch_add(self.step_us, Ordering::Relaxed);
        assert!(now_us < self.panics_at_us, "this clock panics at {} µs", self.panics_at_us);
        Timestamp::from_micros(now_us)
    }
}

/// Rules whose shield is timed by this clock.
fn hurried(text: &str, step_us: u64, panics_at_us: u64) -> Site {
    let Site { engine, clock } = site(text);
    let hurried = Hurried { now_us: AtomicU64::new(1_000_000), step_us, panics_at_us };
    let engine = Engine::on_clock(engine.limiter().clone(), rules(text), Vec::new(), Arc::new(hurried));
    Site { engine, clock }
}

const SHIELD: &str = "[[rules]]\nname = 'flood'\nby = ['ip']\nstore = 'memory'\n";

#[tokio::test]
async fn unit_that_becomes_free_between_peek_and_check_of_a_shield_is_charged_once() {
    // The first request peeks at 1.0 s and charges at 1.4 s. The second peeks at 1.8 s, checks at 2.2 s, is refunded
    // because there is room by then, and charges at 3.0 s.
    let site = hurried(&format!("{SHIELD}limits = ['1/800ms']"), 400_000, u64::MAX);
    assert!(site.passes("GET", "/", &[], HERE).await);
    assert!(site.passes("GET", "/", &[], HERE).await, "the first check of the second request was refunded");
    let stats = site.engine.rule_stats();
    assert_eq!((stats[0].allowed(), stats[0].denied()), (2, 0));
}

#[tokio::test]
async fn panic_of_the_shield_is_handled_by_the_failure_policy() {
    for (on_failure, passes) in [("local", true), ("allow", true), ("deny", false)] {
        let text = format!("{SHIELD}limits = ['1/h']\non_failure = '{on_failure}'\ncharge = 'on_failure'");
        let site = hurried(&text, 0, 0);
        for _ in 0..3 {
            let outcome = site.send("GET", "/", &[], HERE).await;
            assert_eq!(matches!(outcome, Outcome::Admitted(_)), passes, "{on_failure}");
            if let Outcome::Refused(refusal) = outcome {
                assert_eq!(refusal.verdict(), Verdict::Unavailable);
            }
        }
    }
}

#[tokio::test]
async fn reload_changes_the_rules_and_keeps_the_counters() {
    let text = |quota: u32| {
        format!("[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [{{ name = \"main\", limit = \"{quota}/h\" }}]")
    };
    let site = site(&text(5));
    for _ in 0..4 {
        assert!(site.passes("GET", "/", &[], HERE).await);
    }
    site.engine.reload(rules(&text(6)));
    let admitted = {
        let mut admitted = 0;
        for _ in 0..5 {
            admitted += u32::from(site.passes("GET", "/", &[], HERE).await);
        }
        admitted
    };
    assert_eq!(admitted, 2);
    site.clock.advance(Duration::from_secs(3_600));
    assert!(site.passes("GET", "/", &[], HERE).await);
}

#[tokio::test]
async fn ban_reports_its_end_and_exempt_callers_are_not_counted() {
    let site = site(
        r#"
        [[bans]]
        by = "ip"
        value = "198.51.100.7"
        [exempt]
        addresses = ["192.0.2.0/24"]
        [[rules]]
        name = "all"
        by = ["ip"]
        limits = ["1/h"]
        "#,
    );
    let Outcome::Refused(refusal) = site.send("GET", "/", &[], [198, 51, 100, 7]).await else { panic!("a ban") };
    assert_eq!((refusal.verdict(), refusal.response(&HeaderMap::new()).status().as_u16()), (Verdict::Banned, 403));
    for _ in 0..5 {
        let Outcome::Admitted(permit) = site.send("GET", "/", &[], [192, 0, 2, 77]).await else { panic!("exempt") };
        assert!(permit.decision().is_none());
    }
}

/// The fields of a response to a banned client: status, `Retry-After`, and the body.
fn shown(refusal: &Refusal) -> (u16, Option<String>, serde_json::Value) {
    let response = refusal.response(&HeaderMap::new());
    let retry_after = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
    (response.status().as_u16(), retry_after, serde_json::from_slice(response.body()).unwrap())
}

#[tokio::test]
async fn ban_in_the_store_is_refused_like_a_ban_of_the_configuration() {
    let site = site(
        r#"
        [[bans]]
        by = "ip"
        value = "198.51.100.7"
        [[bans]]
        by = "ip"
        value = "198.51.100.8"
        until = "2023-11-14T23:13:20Z"
        [[rules]]
        name = "all"
        by = ["ip"]
        limits = ["1/h"]
        "#,
    );
    let refused = async |peer: [u8; 4]| match site.send("GET", "/", &[], peer).await {
        Outcome::Refused(refusal) => Some(refusal),
        Outcome::Admitted(_) => None,
    };
    site.engine.limiter().ban(b"ip:203.0.113.9", Some(Duration::from_secs(3_600))).await.unwrap();
    let (by_store, configured) = (refused(HERE).await.unwrap(), refused([198, 51, 100, 8]).await.unwrap());
    assert_eq!(shown(&by_store), shown(&configured));
    let body = serde_json::json!({
        "error": "banned", "message": "this caller is banned", "retry_after": 3_600, "retry_after_ms": 3_600_000,
    });
    assert_eq!(shown(&by_store), (403, Some("3600".to_owned()), body));
    assert_eq!((by_store.source(), configured.source()), (Source::Store, Source::None));

    site.engine.limiter().ban(b"ip:203.0.113.9", None).await.unwrap();
    let (by_store, configured) = (refused(HERE).await.unwrap(), refused([198, 51, 100, 7]).await.unwrap());
    assert_eq!(shown(&by_store), shown(&configured));
    assert_eq!((shown(&by_store).1, &shown(&by_store).2["retry_after"]), (None, &serde_json::Value::Null));
    assert_eq!(
        (site.engine.rule_stats()[0].allowed(), site.engine.rule_stats()[0].denied()),
        (0, 0),
        "no rule decided"
    );

    assert!(site.engine.limiter().unban(b"ip:203.0.113.9").await.unwrap());
    assert!(refused(HERE).await.is_none(), "the ban charged nothing");
    assert_eq!(refused(HERE).await.unwrap().verdict(), Verdict::Denied);
}

#[tokio::test]
async fn ban_in_the_store_holds_in_shadow_mode_and_for_the_whole_subject_alone() {
    let site = site(
        r#"
        [[rules]]
        name = "watched"
        match = { path = "/watched" }
        by = ["ip"]
        limits = ["1/h"]
        mode = "shadow"
        [[rules]]
        name = "pairs"
        match = { path = "/pairs" }
        by = ["ip", "path"]
        limits = ["1/h"]
        "#,
    );
    let verdict = async |path: &str| site.verdict(path, &[], HERE).await.0;
    site.engine.limiter().ban(b"ip:203.0.113.9", Some(Duration::from_secs(60))).await.unwrap();
    assert_eq!(verdict("/watched").await, Verdict::Banned);
    assert_eq!(site.engine.rule_stats()[0].denied(), 0, "a shadow rule would not have denied it");
    assert_eq!(verdict("/pairs").await, Verdict::Allowed, "the rule counts another subject");
    assert_eq!(verdict("/").await, Verdict::Allowed, "no rule counts anything");
    site.engine.limiter().ban(b"ip:203.0.113.9&path:/pairs", None).await.unwrap();
    assert_eq!(verdict("/pairs").await, Verdict::Banned);
    site.clock.advance(Duration::from_secs(60));
    assert_eq!(verdict("/watched").await, Verdict::Allowed, "the ban has ended");
}

/// A path that costs much to normalise and is within the bound.
fn hostile() -> String {
    format!("/{}", "..;%2F/".repeat(1_100))
}

#[tokio::test]
async fn refusal_by_address_or_shield_normalises_no_path() {
    let site = site(
        r#"
        bans = [{ by = "ip", value = "198.51.100.7" }]
        exempt = { paths = ["/health"] }
        [[rules]]
        name = "shield"
        store = "memory"
        limits = ["2/h"]
        [[rules]]
        name = "login"
        match = { path = "/login" }
        by = ["ip", "path"]
        limits = ["1/h"]
        "#,
    );
    assert_eq!(site.verdict(&hostile(), &[], [198, 51, 100, 7]).await, (Verdict::Banned, 0), "banned");
    assert_eq!(site.verdict("/login;v=1", &[], HERE).await, (Verdict::Allowed, 2), "matched, and counted by path");
    assert_eq!(site.verdict("/login", &[], HERE).await, (Verdict::Denied, 0), "plain");
    assert_eq!(site.verdict("/login;v=1", &[], HERE).await.0, Verdict::Denied);
    assert_eq!(site.verdict(&hostile(), &[], HERE).await, (Verdict::Denied, 0), "by the shield");
}

#[tokio::test]
async fn path_is_normalised_only_if_a_rule_reads_it() {
    let site = site(
        r#"
        [[rules]]
        name = "host"
        match = { host = "api.example.com" }
        by = ["ip"]
        limits = ["100/h"]
        [[rules]]
        name = "login"
        match = { methods = ["POST"], path = "/login" }
        by = ["ip"]
        limits = ["100/h"]
        "#,
    );
    let host = [("host", "api.example.com")];
    assert_eq!(site.verdict(&hostile(), &host, HERE).await, (Verdict::Allowed, 0), "no rule for GET reads paths");
    assert_eq!(site.engine.rule_stats()[0].allowed(), 1);
    normalisations::take();
    assert!(site.passes("POST", "/x/../login", &host, HERE).await);
    assert_eq!((normalisations::take(), site.engine.rule_stats()[1].allowed()), (1, 1));
}

#[tokio::test]
async fn path_that_is_too_long_is_refused_before_it_is_normalised() {
    let rule = "[[rules]]\nname = 'login'\nmatch = { path = '/login' }\nby = ['ip']\nlimits = ['5/h']";
    for (setting, bytes_max) in [("", 8_192), ("path_bytes_max = 100", 100)] {
        let site = site(&format!("{setting}\n{rule}"));
        let path = |bytes: usize| format!("/{}", ";".repeat(bytes - 1));
        assert_eq!(site.verdict(&path(bytes_max), &[], HERE).await.0, Verdict::Allowed);
        let query = format!("/?{}", "x".repeat(bytes_max));
        assert_eq!(site.verdict(&query, &[], HERE).await.0, Verdict::Allowed, "a query is no part of the path");
        assert_eq!(site.verdict(&path(bytes_max + 1), &[], HERE).await, (Verdict::PathTooLong, 0));
        let Outcome::Refused(refusal) = site.send("GET", &path(bytes_max + 1), &[], HERE).await else { panic!("long") };
        assert_eq!(refusal.response(&HeaderMap::new()).status(), 414);
        let body = String::from_utf8_lossy(refusal.response(&HeaderMap::new()).body()).into_owned();
        assert!(body.contains("path_too_long") && body.contains(&format!("at most {bytes_max} bytes")), "{body}");
    }
    let off = site(&format!("kill_switch = true\n{rule}"));
    assert_eq!(off.verdict(&format!("/{}", "x".repeat(9_000)), &[], HERE).await.0, Verdict::Allowed);
}

#[tokio::test]
async fn shield_never_refuses_an_exempt_request() {
    let site = site(
        r#"
        [exempt]
        addresses = ["192.0.2.0/24"]
        keys = ["an-exempt-key-0001"]
        paths = ["/health", "/static/*"]
        [[rules]]
        name = "shield"
        store = "memory"
        limits = ["1/h"]
        "#,
    );
    assert_eq!(site.verdict("/", &[], HERE).await.0, Verdict::Allowed);
    for _ in 0..3 {
        assert_eq!(site.verdict("/", &[], HERE).await.0, Verdict::Denied);
        assert_eq!(site.verdict("/", &[], [192, 0, 2, 7]).await.0, Verdict::Allowed, "by address");
        assert_eq!(site.verdict("/", &[("x-api-key", "an-exempt-key-0001")], HERE).await.0, Verdict::Allowed, "by key");
        assert_eq!(site.verdict("/static/a%20b", &[], HERE).await.0, Verdict::Allowed, "by path");
        assert_eq!(site.verdict("/static/../x", &[], HERE).await.0, Verdict::Denied, "not by every reading");
    }
}

#[tokio::test]
async fn shield_by_path_reads_paths_as_other_rules_do() {
    let site = site(
        r#"
        [[rules]]
        name = "shield"
        match = { path = "/login" }
        store = "memory"
        limits = ["1/h"]
        "#,
    );
    assert_eq!(site.verdict("/login", &[], HERE).await.0, Verdict::Allowed);
    assert_eq!(site.verdict("/log%69n", &[], HERE).await.0, Verdict::Denied);
    assert_eq!(site.verdict("/other", &[], HERE).await, (Verdict::Allowed, 0));
}

#[tokio::test]
async fn banned_key_is_refused_despite_rules_and_exemptions() {
    let site = site(
        r#"
        bans = [{ by = "api_key", value = "a-banned-key-00001" }]
        exempt = { addresses = ["192.0.2.0/24"], paths = ["/health"] }
        [[rules]]
        name = "login"
        match = { path = "/login" }
        by = ["ip"]
        limits = ["100/h"]
        "#,
    );
    for (path, peer) in [("/login", HERE), ("/unlimited", HERE), ("/health", HERE), ("/", [192, 0, 2, 7])] {
        let key = [("x-api-key", "a-banned-key-00001")];
        assert_eq!(site.verdict(path, &key, peer).await.0, Verdict::Banned, "{path}");
        assert_eq!(site.verdict(path, &[], peer).await.0, Verdict::Allowed, "{path}");
    }
}

#[tokio::test]
async fn ipv4_client_is_recognised_behind_every_ipv6_route() {
    let site = site(
        r#"
        bans = [{ by = "ip", value = "198.51.100.0/24" }, { by = "ip", value = "2002:c000:280::/48" }]
        exempt = { addresses = ["192.0.2.0/25"] }
        [[rules]]
        name = "shield"
        store = "memory"
        limits = ["100/h"]
        [[rules]]
        name = "all"
        by = ["ip"]
        limits = ["3/h"]
        "#,
    );
    let verdict = async |peer: &str| match site.send_from("GET", "/", &[], peer.parse().unwrap()).await {
        Outcome::Admitted(permit) => permit.decision().map_or("exempt", |_| "counted"),
        Outcome::Refused(refusal) => refusal.verdict().error(),
    };
    for peer in ["198.51.100.7", "::ffff:198.51.100.7", "64:ff9b::198.51.100.7", "2002:c633:6407::1", "192.0.2.128"] {
        assert_eq!(verdict(peer).await, "banned", "{peer}");
    }
    for peer in ["192.0.2.7", "64:ff9b::192.0.2.7", "2002:c000:207:1::9"] {
        assert_eq!(verdict(peer).await, "exempt", "{peer}");
    }
    // One budget for all of them.
    for peer in ["203.0.113.9", "64:ff9b::203.0.113.9", "2002:cb00:7109:5::1"] {
        assert_eq!(verdict(peer).await, "counted", "{peer}");
    }
    for peer in ["203.0.113.9", "::ffff:203.0.113.9", "64:ff9b::cb00:7109", "2002:cb00:7109:ffff::"] {
        assert_eq!(verdict(peer).await, "rate_limited", "{peer}");
    }
}

const TOKENS: &str = "[jwt]\nalgorithm = 'HS256'\nkey = 'planted-token-secret-0123456789abcdef'\n";
/// A token of the user `eve`, signed with the key of [`TOKENS`]. Expires an hour after the start of the clock.
const EVE: (&str, &str) = (
    "authorization",
    "Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJldmUiLCJleHAiOjE3MDAwMDM2MDB9.uyzUX7i1Mqtcgs2qSbpc8VnVQDICT6PNbAOe5g7dNZY",
);

/// The engine skips lookups that cannot find anything, and does not read its clock if nothing depends on the time.
#[tokio::test]
async fn engine_bans_and_exempts_exactly_the_callers_that_the_rule_set_does() {
    let key = ("x-api-key", "a-planted-key-00001");
    let callers = [(HERE, None), ([198, 51, 100, 7], None), (HERE, Some(key)), (HERE, Some(EVE))];
    let mut seen = [0; 3];
    for only in [
        "",
        "bans = [{ by = 'ip', value = '203.0.113.9' }]",
        "bans = [{ by = 'ip', value = '203.0.113.9', until = '2023-11-14T22:33:20Z' }]",
        "bans = [{ by = 'api_key', value = 'a-planted-key-00001' }]",
        "bans = [{ by = 'user', value = 'eve', until = '2023-11-14T22:33:20Z' }]",
        "exempt = { addresses = ['203.0.113.0/24'] }",
        "exempt = { keys = ['a-planted-key-00001'] }",
    ] {
        for is_off in [false, true] {
            let rule = "[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['1000/h']";
            let text = format!("kill_switch = {is_off}\n{only}\n{TOKENS}{rule}");
            let (site, rules) = (site(&text), rules(&text));
            for (peer, header) in callers.into_iter().chain(callers) {
                let header: &[(&str, &str)] = header.as_slice();
                let mut request = Request::builder();
                for (name, value) in header {
                    request = request.header(*name, *value);
                }
                let (request, now) = (request.body(()).unwrap(), Clock::now(&*site.clock));
                let view = RequestView::of(&request);
                let identity = rules.identifier().identify(&view, peer.into(), &rules, now);
                let bans = &rules.parts().bans;
                let ban = bans.of_address(&identity, now).or_else(|| bans.of_caller(&identity, now));
                let is_counted = !is_off && !rules.is_exempt(&identity);
                let expected = match ban.filter(|_| !is_off) {
                    Some(ban) => {
                        Err(ban.until().map_or(Wait::NEVER, |end| Wait::from_micros(end.as_micros() - now.as_micros())))
                    }
                    None => Ok(is_counted),
                };
                let decided = match site.send("GET", "/", header, peer).await {
                    Outcome::Admitted(permit) => Ok(permit.decision().is_some()),
                    Outcome::Refused(Refusal::Banned { remaining, .. }) => Err(remaining),
                    Outcome::Refused(refusal) => panic!("{:?}", refusal.verdict()),
                };
                assert_eq!(decided, expected, "{text} {peer:?} {header:?}");
                seen[decided.map_or(0, |is_counted| 1 + usize::from(is_counted))] += 1;
                site.clock.advance(Duration::from_secs(300));
            }
        }
    }
    assert!(seen.iter().all(|count| *count >= 10), "banned, not counted, counted: {seen:?}");
}

#[tokio::test]
async fn user_of_a_token_is_counted_until_the_token_expires() {
    let site = site(&format!("{TOKENS}[[rules]]\nname = 'all'\nby = ['user']\nlimits = ['1/day']"));
    let verdict = async || site.verdict("/", &[EVE], HERE).await.0;
    assert_eq!((verdict().await, verdict().await), (Verdict::Allowed, Verdict::Denied));
    site.clock.advance(Duration::from_secs(7_200));
    assert_eq!((verdict().await, verdict().await), (Verdict::Allowed, Verdict::Denied), "counted by address");
}

/// The configuration cannot foresee that the rules of two paths match one request. Each of them has fewer limits than the
/// bound.
#[tokio::test]
async fn request_that_meets_more_limits_than_a_check_holds_is_unavailable_and_not_charged() {
    let rule = |path: &str, number: usize| {
        let name = format!("{}-{number}", path.trim_matches(['/', '*']));
        format!("[[rules]]\nname = \"{name}\"\nmatch = {{ path = \"{path}\" }}\nby = [\"ip\"]\nlimits = [\"2/h\"]\n")
    };
    let text: String = (0..17).flat_map(|number| [rule("/one/*", number), rule("/two", number)]).collect();
    let site = site(&text);
    // Which path this is depends on the server.
    let (verdict, _) = site.verdict("/one/../two", &[], HERE).await;
    assert_eq!(verdict, Verdict::Unavailable);
    for path in ["/one/x", "/two"] {
        let verdicts = [(); 3].map(|()| site.verdict(path, &[], HERE));
        let [first, second, third] = verdicts;
        assert_eq!(
            (first.await.0, second.await.0, third.await.0),
            (Verdict::Allowed, Verdict::Allowed, Verdict::Denied)
        );
    }
}

/// A ban of the list refuses every request of its client until it ends, before shields, and whichever rules apply.
#[tokio::test]
async fn listed_client_is_refused_until_its_ban_ends() {
    let text = r#"
        [exempt]
        addresses = ["198.51.100.0/24"]
        [[rules]]
        name = "shield"
        store = "memory"
        by = ["ip"]
        limits = ["1/h"]
        [[rules]]
        name = "shorten"
        match = { path = "/shorten" }
        by = ["ip"]
        limits = ["2/min"]
    "#;
    let site = site(text);
    let limiter = site.engine.limiter().clone();
    let hour = Some(Duration::from_secs(3_600));
    assert!(limiter.list_ban("ip:203.0.113.9", hour).await.unwrap());
    assert!(limiter.list_ban("ip:198.51.100.0/24", None).await.unwrap());
    assert!(limiter.list_ban("subject:ip:192.0.2.1", None).await.unwrap());
    for path in ["/shorten", "/free"] {
        assert_eq!(site.verdict(path, &[], HERE).await, (Verdict::Banned, 0), "{path}");
        assert_eq!(site.verdict(path, &[], [198, 51, 100, 7]).await.0, Verdict::Banned, "an exempt address");
    }
    assert_eq!(site.verdict("/free", &[], [192, 0, 2, 1]).await.0, Verdict::Allowed, "the store refuses subjects");
    site.clock.advance(Duration::from_secs(3_599));
    let Outcome::Refused(refusal) = site.send("GET", "/", &[], HERE).await else { panic!("a ban") };
    assert_eq!((refusal.fields().retry_after_ms(), refusal.source()), (Some(1_000), Source::Store));
    site.clock.advance(Duration::from_secs(1));
    assert_eq!(site.verdict("/free", &[], HERE).await.0, Verdict::Allowed, "the shield has not counted");
    assert_eq!(site.verdict("/free", &[], [198, 51, 100, 7]).await.0, Verdict::Banned);
    site.engine.reload(rules(&format!("kill_switch = true\n{text}")));
    assert_eq!(site.verdict("/free", &[], [198, 51, 100, 7]).await.0, Verdict::Allowed, "the kill switch is on");
    site.engine.reload(rules(text));
    assert!(limiter.unlist_ban("ip:198.51.100.0/24").await.unwrap());
    assert_eq!(site.verdict("/free", &[], [198, 51, 100, 7]).await.0, Verdict::Allowed);
}

/// Pseudonyms of subjects change at midnight; those of the ban list do not.
#[tokio::test]
async fn ban_of_a_pseudonym_outlives_midnight() {
    let site = site(
        r#"
        anonymize = { secret = "0123456789abcdef0123456789abcdef" }
        [[keys]]
        key = "planted-key"
        [[rules]]
        name = "all"
        by = ["caller"]
        limits = ["1000/day"]
        "#,
    );
    let (rules, limiter) = (site.engine.rules(), site.engine.limiter().clone());
    let of_key = "api_key:#7eed545bde4b42fea364f19d59123e65";
    for part in ["ip:203.0.113.9", "ip:2001:db8:1:2::/64", of_key] {
        let entry = rules.identifier().ban_entry(part);
        assert!(entry.contains(":~") && entry != rules.identifier().stored_subject(part, site.clock.now()), "{entry}");
        assert!(limiter.list_ban(&entry, None).await.unwrap());
    }
    let v6: IpAddr = "2001:db8:1:2::77".parse().unwrap();
    for _ in 0..3 {
        assert!(matches!(site.send("GET", "/", &[], HERE).await, Outcome::Refused(Refusal::Banned { .. })));
        assert!(matches!(site.send_from("GET", "/", &[], v6).await, Outcome::Refused(Refusal::Banned { .. })));
        let keyed = site.send("GET", "/", &[("x-api-key", "planted-key")], [192, 0, 2, 1]).await;
        assert!(matches!(keyed, Outcome::Refused(Refusal::Banned { .. })), "{keyed:?}");
        assert!(site.passes("GET", "/", &[], [192, 0, 2, 1]).await);
        site.clock.advance(Duration::from_secs(24 * 3_600));
    }
}

/// Without a call to the store by any request, an engine notices a changed list by itself, and keeps the last list
/// while the store does not answer.
#[tokio::test(start_paused = true)]
async fn list_of_a_shared_store_is_followed_and_held_while_the_store_is_down() {
    use std::sync::atomic::AtomicBool;
    use tidegate_core::{BanListing, Demand, LimitStatus, Store, StoreErrorKind, StoreFuture};

    #[derive(Default)]
    struct Switched {
        memory: MemoryStore,
        is_down: AtomicBool,
    }

    impl Store for Switched {
        fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
            Store::decide(&self.memory, checks)
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

        fn listed_bans(&self, known: Option<u64>) -> StoreFuture<'_, Option<BanListing>> {
            if self.is_down.load(Ordering::Relaxed) {
                Box::pin(async { Err(StoreError::new(StoreErrorKind::Unreachable, "the store is down")) })
            } else {
                Store::listed_bans(&self.memory, known)
            }
        }
    }

    let store = Arc::new(Switched::default());
    let limiter = Limiter::builder().store(store.clone()).build();
    let engine = Engine::new(limiter, rules(""));
    let clock = Arc::new(ManualClock::new(Timestamp::ZERO));
    let site = Site { engine, clock };
    let banned = || async { site.verdict("/", &[], HERE).await.0 == Verdict::Banned };
    assert!(!banned().await);
    assert!(store.memory.list_ban("ip:203.0.113.9", None).unwrap());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(banned().await, "within a second");
    store.is_down.store(true, Ordering::Relaxed);
    assert!(store.memory.unlist_ban("ip:203.0.113.9"));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(banned().await, "the last list is in force");
    assert!(site.engine.refresh_bans().await.is_err());
    store.is_down.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!banned().await);
    assert_eq!(Arc::strong_count(&store), 2, "the task holds neither the engine nor the store while it sleeps");
}
