//! Keys and plans by lookup, as the limits and the subject that apply to a request.

use std::net::IpAddr;

use parking_lot::Mutex;
use tidegate_core::ManualClock;

use super::*;
use crate::Limiter;
use crate::config::{Config, Format};
use crate::engine::{Engine, Outcome, RequestOptions};
use crate::rules::{LookupError, RequestView};

const RULES: &str = r#"
keys = [{ key = "listed", name = "config", plan = "pro" }]

[plans]
anonymous = { limits = ["5/h"] }
default = { limits = ["10/h"] }
pro = { limits = ["100/h"] }

[[rules]]
name = "api"
limits = "plan"
"#;
const DEADLINE: Duration = Duration::from_millis(25);

/// A source of keys that records the digests it is asked for.
#[derive(Clone, Default)]
struct Source {
    asked: Arc<Mutex<Vec<KeyDigest>>>,
}

impl Source {
    /// Returns a lookup in this source: `db-*` are known keys, `fail-*` fail, `hang-*` hang, and others are unknown.
    fn lookup(&self) -> impl KeyLookup + 'static {
        let asked = self.asked.clone();
        move |digest: KeyDigest| {
            asked.lock().push(digest);
            let is = |key: &str| digest == KeyDigest::of(key);
            let found = match () {
                () if is("db-pro") => Ok(Some(KnownKey::new().name("acme").plan("pro"))),
                () if is("db-plain") => Ok(Some(KnownKey::new())),
                () if is("db-gone-plan") => Ok(Some(KnownKey::new().plan("gone"))),
                () if is("db-exempt") => Ok(Some(KnownKey::new().exempt(true))),
                () if is("listed") => Ok(Some(KnownKey::new().plan("default").exempt(true))),
                () if is("fail-1") => Err(std::io::Error::other("the database is down")),
                () => Ok(None),
            };
            let hangs = is("hang-1");
            async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                found
            }
        }
    }

    fn asked(&self) -> usize {
        self.asked.lock().len()
    }
}

fn engine_of(text: &str, lookups: Lookups) -> Engine {
    Engine::with_lookups(Limiter::memory(), Config::from_text(text, Format::Toml).unwrap().rules, lookups)
}

fn engine(source: &Source) -> Engine {
    engine_of(RULES, Lookups::new().key(source.lookup()))
}

/// Returns the quota and the units left for a request with this key, or `None` if it is exempt.
async fn ask(engine: &Engine, key: &str) -> Option<(u32, u32)> {
    let request = http::Request::get("/").header("x-api-key", key).body(()).unwrap();
    let peer: IpAddr = [203, 0, 113, 9].into();
    match engine.check(&RequestView::of(&request), peer, RequestOptions::default()).await {
        Outcome::Admitted(permit) => {
            permit.decision().map(|decision| (decision.limits[0].quota, decision.limits[0].remaining))
        }
        refused @ Outcome::Refused(_) => panic!("{refused:?}"),
    }
}

#[tokio::test]
async fn key_that_a_lookup_knows_identifies_its_caller_and_determines_the_plan() {
    let source = Source::default();
    let engine = engine(&source);
    assert_eq!(ask(&engine, "db-pro").await, Some((100, 99)));
    assert_eq!(ask(&engine, "db-plain").await, Some((10, 9)), "no plan: the default one");
    assert_eq!(ask(&engine, "db-gone-plan").await, Some((10, 9)), "a plan that does not exist is ignored");
    assert_eq!(ask(&engine, "db-exempt").await, None);
    assert_eq!(ask(&engine, "invented-1").await, Some((5, 4)));
    assert_eq!(ask(&engine, "invented-2").await, Some((5, 3)), "unknown keys are counted by address");
    assert_eq!(source.asked(), 6);
    for _ in 0..3 {
        ask(&engine, "db-pro").await;
        ask(&engine, "db-exempt").await;
    }
    assert_eq!(source.asked(), 6, "the answers are cached");
    assert_eq!(engine.lookups().key_stats(), LookupStats { calls: 6, failures: 0 });
}

#[tokio::test]
async fn key_of_the_configuration_wins_and_is_not_looked_up() {
    let source = Source::default();
    let engine = engine(&source);
    assert_eq!(ask(&engine, "listed").await, Some((100, 99)));
    assert_eq!(source.asked(), 0);
}

#[tokio::test]
async fn request_without_a_matching_rule_is_not_looked_up() {
    let source = Source::default();
    let text = RULES.replace("name = \"api\"", "name = \"api\"\nmatch = { path = \"/v1/*\" }");
    let engine = engine_of(&text, Lookups::new().key(source.lookup()));
    assert_eq!(ask(&engine, "db-pro").await, None);
    assert_eq!(source.asked(), 0);
}

#[tokio::test]
async fn flood_that_a_shield_refuses_is_not_looked_up_but_a_cached_exempt_key_passes() {
    let source = Source::default();
    let text = format!("{RULES}\n[[rules]]\nname = \"shield\"\nstore = \"memory\"\nby = [\"ip\"]\nlimits = [\"3/h\"]");
    let engine = engine_of(&text, Lookups::new().key(source.lookup()));
    assert_eq!(ask(&engine, "db-exempt").await, None);
    let mut admitted = 0;
    for number in 0..50 {
        let request = http::Request::get("/").header("x-api-key", format!("invented-{number}")).body(()).unwrap();
        let outcome =
            engine.check(&RequestView::of(&request), [203, 0, 113, 9].into(), RequestOptions::default()).await;
        admitted += u32::from(matches!(outcome, Outcome::Admitted(_)));
    }
    assert_eq!((admitted, source.asked()), (3, 1 + 3));
    assert_eq!(ask(&engine, "db-exempt").await, None, "the shield has no room, but the key is cached as exempt");
}

#[tokio::test]
async fn failing_lookup_makes_the_key_unknown_for_this_request() {
    let source = Source::default();
    let clock = Arc::new(ManualClock::new(tidegate_core::Timestamp::from_micros(1_700_000_000_000_000)));
    let engine = engine_of(RULES, Lookups::new().key(source.lookup()).clock(clock.clone()));
    assert_eq!(ask(&engine, "db-pro").await, Some((100, 99)));
    assert_eq!(ask(&engine, "fail-1").await, Some((5, 4)));
    assert_eq!(ask(&engine, "db-plain").await, Some((5, 3)), "no lookup just after a failure");
    clock.advance(Duration::from_secs(10));
    assert_eq!(ask(&engine, "fail-1").await, Some((5, 2)), "asked again: a failure is not cached");
    assert_eq!(ask(&engine, "db-pro").await, Some((100, 98)), "a known key stays known");
    assert_eq!(engine.lookups().key_stats(), LookupStats { calls: 3, failures: 2 });
}

#[tokio::test(start_paused = true)]
async fn key_lookup_that_hangs_leaves_time_for_the_check() {
    let source = Source::default();
    let engine = engine(&source);
    let start = Instant::now();
    assert_eq!(ask(&engine, "hang-1").await, Some((5, 4)));
    assert_eq!(start.elapsed(), Duration::from_millis(19), "three quarters of the deadline, in whole milliseconds");
    assert_eq!(engine.lookups().key_stats().failures, 1);
}

/// A plan lookup that never answers.
struct Hanging;

impl PlanLookup for Hanging {
    fn plan<'a>(&'a self, _: &'a PlanQuestion) -> crate::rules::PlanFuture<'a> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn plan_lookup_that_hangs_ends_within_the_deadline_with_the_default_plan() {
    for (lookups, deadline, builder) in [
        (Lookups::new(), DEADLINE, Limiter::builder()),
        (Lookups::new(), Duration::from_millis(70), Limiter::builder().deadline(Duration::from_millis(70))),
        (Lookups::new().deadline(Duration::from_millis(40)), Duration::from_millis(40), Limiter::builder()),
    ] {
        let source = Source::default();
        let rules = Config::from_text(RULES, Format::Toml).unwrap().rules;
        let engine = Engine::with_lookups(builder.build(), rules, lookups.plan(Hanging).key(source.lookup()));
        let start = Instant::now();
        assert_eq!(ask(&engine, "db-plain").await, Some((10, 9)));
        let three_quarters = Duration::from_millis((deadline.as_millis() as u64 * 3).div_ceil(4));
        assert_eq!(start.elapsed(), three_quarters, "a quarter is left to the check");
        assert_eq!(engine.lookups().plan_stats(), LookupStats { calls: 1, failures: 1 });
        let start = Instant::now();
        assert_eq!(ask(&engine, "hang-1").await, Some((5, 4)));
        assert_eq!(start.elapsed(), deadline, "key and plan lookups share the deadline");
    }
}

/// A plan lookup that panics: in the call, or when its future is polled.
enum Panicking {
    InCall,
    InFuture,
}

impl PlanLookup for Panicking {
    fn plan<'a>(&'a self, _: &'a PlanQuestion) -> crate::rules::PlanFuture<'a> {
        match self {
            Panicking::InCall => panic!("a bug in a lookup"),
            Panicking::InFuture => Box::pin(std::future::poll_fn(|_| panic!("a bug in a lookup"))),
        }
    }
}

#[tokio::test]
async fn plan_lookup_that_panics_is_a_failure_and_the_next_one_is_asked() {
    for panicking in [Panicking::InCall, Panicking::InFuture] {
        let pro = |_: PlanQuestion| async { Ok::<_, LookupError>(Some("pro")) };
        let engine = engine_of(RULES, Lookups::new().plan(panicking).plan(pro));
        assert_eq!(ask(&engine, "invented-1").await, Some((100, 99)));
        assert_eq!(engine.lookups().plan_stats(), LookupStats { calls: 2, failures: 1 });
    }
    let engine = engine_of(RULES, Lookups::new().plan(Panicking::InFuture));
    assert_eq!(ask(&engine, "invented-1").await, Some((5, 4)), "without another lookup, the default applies");
}

#[tokio::test]
async fn key_lookup_that_panics_makes_the_key_unknown() {
    let panicking = |_: KeyDigest| -> std::future::Ready<Result<Option<KnownKey>, LookupError>> { panic!("a bug") };
    let engine = engine_of(RULES, Lookups::new().key(panicking));
    assert_eq!(ask(&engine, "db-pro").await, Some((5, 4)));
    assert_eq!(engine.lookups().key_stats(), LookupStats { calls: 1, failures: 1 });
}

#[test]
fn lookups_that_are_ready_need_no_runtime() {
    let office =
        |question: PlanQuestion| async move { Ok::<_, LookupError>(question.address.is_ipv4().then_some("pro")) };
    let lookups = Lookups::new().plan(office).key(Source::default().lookup());
    let engine = engine_of(RULES, lookups);
    for key in ["db-plain", "invented-1"] {
        let asked = futures_util::FutureExt::now_or_never(ask(&engine, key));
        assert_eq!(asked, Some(Some((100, 99))), "{key}");
    }
}

#[tokio::test]
async fn reload_keeps_the_lookups_and_their_cached_keys() {
    let source = Source::default();
    let engine = engine(&source);
    assert_eq!(ask(&engine, "db-pro").await, Some((100, 99)));
    let text = RULES.replace("100/h", "200/h").replace("key = \"listed\"", "key = \"other\"");
    engine.reload(Config::from_text(&text, Format::Toml).unwrap().rules);
    assert_eq!(ask(&engine, "db-pro").await, Some((200, 198)), "the plan of the new rules, and the same counter");
    assert_eq!(source.asked(), 1);
    assert_eq!(ask(&engine, "listed").await, None, "no longer listed, so it is looked up");
}

#[tokio::test]
async fn sources_are_asked_in_order_until_one_knows_the_key() {
    let (first, second) = (Source::default(), Source::default());
    let never = |_: KeyDigest| async { Ok::<_, std::io::Error>(None) };
    let engine = engine_of(RULES, Lookups::new().key(never).key(first.lookup()).key(second.lookup()));
    assert_eq!(ask(&engine, "db-pro").await, Some((100, 99)));
    assert_eq!((first.asked(), second.asked()), (1, 0));
    assert_eq!(ask(&engine, "invented").await, Some((5, 4)));
    assert_eq!((first.asked(), second.asked()), (2, 1));
}

#[tokio::test]
async fn every_key_identifies_a_caller_under_any_and_a_lookup_adds_its_plan() {
    let source = Source::default();
    let engine = engine_of(&format!("api_keys = \"any\"\n{RULES}"), Lookups::new().key(source.lookup()));
    assert_eq!(ask(&engine, "db-pro").await, Some((100, 99)));
    assert_eq!(ask(&engine, "invented-1").await, Some((10, 9)));
    assert_eq!(ask(&engine, "invented-2").await, Some((10, 9)), "each has a counter of its own, as without lookups");
}

#[cfg(feature = "jwt")]
#[tokio::test]
async fn bearer_token_that_may_be_a_jwt_is_not_looked_up() {
    let source = Source::default();
    let text = format!("{RULES}\n[jwt]\nalgorithm = \"HS256\"\nkey = \"0123456789abcdef0123456789abcdef\"");
    let engine = engine_of(&text, Lookups::new().key(source.lookup()));
    for (value, asked) in [("Bearer aaa.bbb.ccc", 0), ("Bearer opaque", 1)] {
        let request = http::Request::get("/").header("authorization", value).body(()).unwrap();
        let peer: IpAddr = [203, 0, 113, 9].into();
        let _ = engine.check(&RequestView::of(&request), peer, RequestOptions::default()).await;
        assert_eq!(source.asked(), asked, "{value}");
    }
}

#[tokio::test]
async fn own_limits_of_a_looked_up_key_replace_those_of_its_plan() {
    let limits = |digest: KeyDigest| async move {
        let is = |key: &str| digest == KeyDigest::of(key);
        Ok::<_, std::io::Error>(match () {
            () if is("own") => Some(KnownKey::new().plan("pro").limit("7/h")),
            () if is("other-window") => Some(KnownKey::new().limit("8/min").named_limit("burst", "9/s")),
            () if is("wrong") => Some(KnownKey::new().plan("pro").limit("7/h").limit("7").limit("9/h")),
            () if is("gone-plan") => Some(KnownKey::new().plan("gone").limit("6/h")),
            () => None,
        })
    };
    let engine = engine_of(RULES, Lookups::new().key(limits));
    assert_eq!(ask(&engine, "own").await, Some((7, 6)));
    assert_eq!(ask(&engine, "other-window").await, Some((8, 7)));
    assert_eq!(ask(&engine, "wrong").await, Some((100, 99)), "all own limits, or those of the plan");
    assert_eq!(ask(&engine, "gone-plan").await, Some((6, 5)));
    assert_eq!(ask(&engine, "invented").await, Some((5, 4)));
    let problem = |known: &KnownKey| engine.rules().key_problem(known).map(|problem| problem.to_string());
    assert_eq!(problem(&KnownKey::new().plan("pro").limit("7/h")), None);
    assert_eq!(problem(&KnownKey::new().plan("gone")).as_deref(), Some("there is no plan `gone`"));
    assert!(problem(&KnownKey::new().limit("7")).is_some_and(|text| text.starts_with("the limit `7` is invalid: ")));
}

#[tokio::test]
async fn own_limit_below_the_cost_of_a_rule_is_ignored() {
    let limits = |_: KeyDigest| async { Ok::<_, std::io::Error>(Some(KnownKey::new().plan("pro").limit("7/h"))) };
    let engine = engine_of(
        &RULES.replace("name = \"api\"", "name = \"api\"\ncost = 8").replace("\"5/h\"", "\"9/h\""),
        Lookups::new().key(limits),
    );
    assert_eq!(ask(&engine, "any").await, Some((100, 92)), "the limits of the plan");
    let problem = engine.rules().key_problem(&KnownKey::new().limit("7/h")).map(|problem| problem.to_string());
    let expected = "a cost of 8 never fits within the limit 7/h, which allows at most 7 at once";
    assert_eq!(problem.as_deref(), Some(expected));
}

#[tokio::test(start_paused = true)]
async fn plans_of_a_closure_are_cached_and_used_however_little_time_is_left() {
    let clock = Arc::new(ManualClock::new(tidegate_core::Timestamp::from_micros(1_700_000_000_000_000)));
    let hangs = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let wait = move |hangs: bool| async move {
        if hangs {
            std::future::pending::<()>().await;
        }
    };
    let is_hanging = hangs.clone();
    let key = move |_: KeyDigest| {
        let hangs = is_hanging.load(std::sync::atomic::Ordering::SeqCst);
        async move {
            wait(hangs).await;
            Ok::<_, std::io::Error>(Some(KnownKey::new()))
        }
    };
    let (is_hanging, counter) = (hangs.clone(), calls.clone());
    let plan = move |_: PlanQuestion| {
        counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let hangs = is_hanging.load(std::sync::atomic::Ordering::SeqCst);
        async move {
            wait(hangs).await;
            Ok::<_, std::io::Error>(Some("pro"))
        }
    };
    let engine = engine_of(RULES, Lookups::new().key(key).plan(plan).clock(clock.clone()));
    for left in [99, 98, 97] {
        assert_eq!(ask(&engine, "k").await, Some((100, left)));
    }
    assert_eq!(calls.load(std::sync::atomic::Ordering::SeqCst), 1, "the plan is cached");
    hangs.store(true, std::sync::atomic::Ordering::SeqCst);
    for left in (57..=96).rev() {
        clock.advance(Duration::from_millis(300));
        tokio::time::advance(Duration::from_millis(300)).await;
        assert_eq!(ask(&engine, "k").await, Some((100, left)), "the last answers, although both sources hang");
    }
}
