//! Requests through rules, on a clock that stands still.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::*;
use crate::answer::Verdict;
use crate::config::{Config, Format};
use http::Request;
use tollgate_core::{ManualClock, Timestamp};

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
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        self.engine.decide(&RequestView::of(&request), peer.into()).await
    }

    async fn passes(&self, method: &str, path: &str, headers: &[(&str, &str)], peer: [u8; 4]) -> bool {
        match self.send(method, path, headers, peer).await {
            Outcome::Pass(passage) => {
                passage.finish(Ending::Success).await;
                true
            }
            Outcome::Refuse(_) => false,
        }
    }
}

const HERE: [u8; 4] = [203, 0, 113, 9];

#[tokio::test]
async fn only_what_a_rule_matches_is_limited() {
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
    let Outcome::Pass(passage) = site.send("GET", "/login", &[], HERE).await else { panic!("the first") };
    let mut headers = HeaderMap::new();
    passage.write_headers(&mut headers);
    assert_eq!(headers["ratelimit-policy"], r#""per-minute";q=100;w=60, "tries";q=1;w=3600"#);
    assert_eq!(headers["ratelimit"], r#""per-minute";r=99;t=60, "tries";r=0;t=3600"#);
    let Outcome::Refuse(refused) = site.send("GET", "/login", &[], HERE).await else { panic!("the second") };
    assert_eq!(refused.response.headers()["retry-after"], "3600");
    let remaining = refused.decision.unwrap().lines[0].remaining;
    assert_eq!(remaining, 99, "the minute was not charged for what the hour refused");
}

#[tokio::test]
async fn a_shadow_rule_never_blocks_and_counts_what_it_would_have_denied() {
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
async fn plans_keys_and_strangers() {
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
async fn units_come_back_by_how_a_request_ends_and_exactly_once() {
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
    let Outcome::Pass(failed) = site.send("POST", "/login", &[], HERE).await else { panic!("there is room") };
    failed.finish(Ending::of(http::StatusCode::UNAUTHORIZED)).await;
    let Outcome::Pass(dropped) = site.send("POST", "/login", &[], HERE).await else { panic!("there is room") };
    drop(dropped);
    let Outcome::Pass(last) = site.send("POST", "/login", &[], HERE).await else { panic!("there is room") };
    assert_eq!(last.decision().unwrap().lines[0].remaining, 0);
    last.finish(Ending::Success).await;
    assert!(site.passes("POST", "/login", &[], HERE).await);
}

#[tokio::test]
async fn a_shield_refuses_in_process_and_in_plain_text() {
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
        assert_eq!(matches!(outcome, Outcome::Pass(_)), n < 5);
        if let Outcome::Refuse(refused) = outcome {
            assert_eq!(refused.response.headers()["content-type"], "text/plain; charset=utf-8");
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
        assert!(now_us < self.panics_at_us, "no clock goes on for ever");
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
async fn a_unit_that_comes_free_between_the_look_and_the_question_is_taken_once() {
    // Looked at and taken at 1.0 and 1.4 s; the second looks at 1.8 s, asks at 2.2 s and, since that leaves room, again at 3.0 s.
    let site = hurried(&format!("{SHIELD}limits = ['1/800ms']"), 400_000, u64::MAX);
    assert!(site.passes("GET", "/", &[], HERE).await);
    assert!(site.passes("GET", "/", &[], HERE).await, "it was not refused by its own first question");
    let stats = site.engine.rule_stats();
    assert_eq!((stats[0].allowed(), stats[0].denied()), (2, 0));
}

#[tokio::test]
async fn a_shield_that_panics_is_one_that_does_not_answer() {
    for (on_failure, passes) in [("local", true), ("allow", true), ("deny", false)] {
        let text = format!("{SHIELD}limits = ['1/h']\non_failure = '{on_failure}'\ncharge = 'on_failure'");
        let site = hurried(&text, 0, 0);
        for _ in 0..3 {
            let outcome = site.send("GET", "/", &[], HERE).await;
            assert_eq!(matches!(outcome, Outcome::Pass(_)), passes, "{on_failure}");
            if let Outcome::Refuse(refused) = outcome {
                assert_eq!(refused.verdict, Verdict::Unavailable);
            }
        }
    }
}

#[tokio::test]
async fn a_reload_changes_the_rules_and_keeps_the_counters() {
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
async fn the_banned_are_told_until_when_and_the_exempt_are_not_counted() {
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
    let Outcome::Refuse(refused) = site.send("GET", "/", &[], [198, 51, 100, 7]).await else { panic!("a ban") };
    assert_eq!((refused.verdict, refused.response.status().as_u16()), (Verdict::Forbidden, 403));
    for _ in 0..5 {
        let Outcome::Pass(passage) = site.send("GET", "/", &[], [192, 0, 2, 77]).await else { panic!("exempt") };
        assert!(passage.decision().is_none());
    }
}
