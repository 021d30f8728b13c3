//! Plans, exemptions and bans: which apply to a request.

use http::HeaderMap;
use tidegate_core::Timestamp;

use crate::config::{Config, Format, Loaded};
use crate::rules::{Facts, LimitSet, Lookups, MatchedBan, PlanQuestion, RequestView, RuleSet};

const TEXT: &str = r#"
trusted_proxies = ["10.0.0.0/8"]
[plan_sources]
header = "x-plan"
addresses = [{ networks = ["192.0.2.0/24"], plan = "partner" }, { networks = "192.0.2.128/25", plan = "free" }]

[plans.default]
limits = ["60/min"]
[plans.anonymous]
limits = ["30/min"]
[plans.free]
limits = ["60/min", "10000/day"]
upgrade_url = "https://example.com/plans"
[plans.partner]
limits = ["6000/min"]

[[keys]]
key = "of-free"
plan = "free"
[[keys]]
key = "of-nothing"
[[keys]]
key = "of-its-own"
plan = "free"
limits = ["7/min"]
[[keys]]
key = "of-its-own-too"
plan = "free"
limits = ["7/min"]
[[keys]]
key = "let-through"
exempt = true

[exempt]
addresses = ["203.0.113.0/24"]
keys = ["let-through-too"]

[[bans]]
by = "ip"
value = "198.51.100.66"
until = 2001-09-09T01:46:40Z
reason = "scraping"
[[bans]]
by = "api_key"
value = "of-free"
until = 2001-09-09T01:46:40Z

[[rules]]
name = "api"
limits = "plan"
"#;

fn loaded() -> Loaded {
    Config::from_text(TEXT, Format::Toml).unwrap_or_else(|report| panic!("{report:?}"))
}

/// Calls `question` with the facts about a request from `peer` with these headers at this time.
fn with_facts<T>(
    rules: &RuleSet,
    peer: &str,
    lines: &[(&'static str, &str)],
    now_us: u64,
    question: impl FnOnce(Facts<'_>) -> T,
) -> T {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(*name, value.parse().unwrap());
    }
    let view = RequestView::new(&http::Method::GET, "/", &headers);
    question(Facts::of_request(rules, &view, peer.parse().unwrap(), None, Timestamp::from_micros(now_us)))
}

fn assigned(facts: &Facts<'_>) -> Option<LimitSet> {
    facts.assigned_plan().map(|plan| plan.limit_set)
}

fn limits(rules: &RuleSet, limit_set: LimitSet) -> String {
    let policies = rules.rules()[0].policies(&limit_set);
    policies
        .iter()
        .map(|policy| format!("{} {}", policy.plan().unwrap_or("-"), policy.limit()))
        .collect::<Vec<_>>()
        .join(", ")
}

#[test]
fn first_source_with_a_plan_for_the_client_decides() {
    let rules = loaded().rules;
    for (peer, lines, expected) in [
        ("198.51.100.1", &[][..], None),
        ("198.51.100.1", &[("x-api-key", "invented")], None),
        ("198.51.100.1", &[("x-api-key", "of-nothing")], None),
        ("198.51.100.1", &[("x-api-key", "of-free")], Some("free 60/min, free 10000/day")),
        ("198.51.100.1", &[("x-api-key", "of-its-own")], Some("free 7/min")),
        ("192.0.2.1", &[], Some("partner 6000/min")),
        ("192.0.2.200", &[], Some("partner 6000/min")),
        ("192.0.2.1", &[("x-api-key", "of-free")], Some("free 60/min, free 10000/day")),
        // The plan header counts only if a trusted proxy sends it.
        ("198.51.100.1", &[("x-plan", "partner")], None),
        ("10.0.0.1", &[("x-plan", "partner"), ("x-forwarded-for", "198.51.100.1")], Some("partner 6000/min")),
        ("10.0.0.1", &[("x-plan", "no-such-plan"), ("x-forwarded-for", "198.51.100.1")], None),
    ] {
        let limit_set = with_facts(&rules, peer, lines, 0, |facts| assigned(&facts));
        assert_eq!(limit_set.map(|limit_set| limits(&rules, limit_set)).as_deref(), expected, "{peer} {lines:?}");
    }
}

#[test]
fn identity_without_a_plan_gets_the_default_or_the_anonymous_plan() {
    let rules = loaded().rules;
    assert_eq!(limits(&rules, rules.default_limit_set(true)), "default 60/min");
    assert_eq!(limits(&rules, rules.default_limit_set(false)), "anonymous 30/min");
    let free = rules.limit_set_named("free").unwrap();
    assert_eq!(rules.plan(&free).unwrap().upgrade_url(), Some("https://example.com/plans"));
    assert_eq!(rules.limit_set_named("freee"), None);
}

#[tokio::test]
async fn lookups_are_called_in_order_and_an_unknown_plan_is_skipped() {
    let rules = loaded().rules;
    let question = |lines: &[(&'static str, &str)]| {
        with_facts(&rules, "198.51.100.1", lines, 0, |facts| PlanQuestion::about(facts.identity()))
    };
    let wrong = |_: PlanQuestion| async { Ok::<_, std::io::Error>(Some("no-such-plan")) };
    let right =
        |question: PlanQuestion| async move { Ok::<_, std::io::Error>(question.is_identified().then_some("partner")) };
    let (only_wrong, lookups) = (Lookups::new().plan(wrong), Lookups::new().plan(wrong).plan(right));

    let known = question(&[("x-api-key", "of-nothing")]);
    assert_eq!(limits(&rules, lookups.limit_set(&rules, &known).await), "partner 6000/min");
    assert_eq!(limits(&rules, only_wrong.limit_set(&rules, &known).await), "default 60/min");
    assert!(known.field().unwrap().starts_with("api_key:") && known.field().unwrap().len() == 8 + 64);
    let unknown = question(&[]);
    assert_eq!(limits(&rules, lookups.limit_set(&rules, &unknown).await), "anonymous 30/min");
    assert_eq!(unknown.field(), None);
}

#[test]
fn keys_with_equal_limits_share_a_limit_set() {
    let rules = loaded().rules;
    let limit_set = |key: &str| with_facts(&rules, "198.51.100.1", &[("x-api-key", key)], 0, |facts| assigned(&facts));
    assert_eq!(limit_set("of-its-own"), limit_set("of-its-own-too"));
    assert_eq!(rules.plan(&limit_set("of-its-own").unwrap()).unwrap().name().as_ref(), "free");
}

#[test]
fn only_listed_addresses_and_keys_are_exempt() {
    let rules = loaded().rules;
    let is_exempt = |peer: &str, lines: &[(&'static str, &str)]| {
        with_facts(&rules, peer, lines, 0, |facts| rules.is_exempt(facts.identity()))
    };
    assert!(is_exempt("203.0.113.7", &[]));
    assert!(is_exempt("198.51.100.1", &[("x-api-key", "let-through")]));
    assert!(is_exempt("198.51.100.1", &[("x-api-key", "let-through-too")]));
    assert!(!is_exempt("198.51.100.1", &[("x-api-key", "of-free")]));
    assert!(!is_exempt("198.51.100.1", &[("x-forwarded-for", "203.0.113.7")]));
}

#[test]
fn ban_ends_at_its_time_to_the_microsecond() {
    let rules = loaded().rules;
    let is_banned = |peer: &str, lines: &[(&'static str, &str)], now_us| {
        with_facts(&rules, peer, lines, now_us, |facts| facts.ban().is_some())
    };
    assert!(is_banned("198.51.100.66", &[], 999_999_999_999_999));
    assert!(!is_banned("198.51.100.66", &[], 1_000_000_000_000_000));
    assert!(!is_banned("198.51.100.67", &[], 0));
    assert!(is_banned("198.51.100.67", &[("x-api-key", "of-free")], 0));
    with_facts(&rules, "198.51.100.66", &[], 0, |facts| {
        assert!(matches!(facts.ban(), Some(MatchedBan::Configured(ban)) if ban.reason() == Some("scraping")));
    });
}

#[test]
fn banned_key_is_recognised_in_every_header_and_beside_valid_keys() {
    let text =
        "[[bans]]\nby = 'api_key'\nvalue = 'leaked'\n[[rules]]\nname = 'a'\nlimits = ['1/s']\n[[keys]]\nkey = 'good'";
    let rules = Config::from_text(text, Format::Toml).unwrap().rules;
    let is_banned =
        |lines: &[(&'static str, &str)]| with_facts(&rules, "198.51.100.1", lines, 0, |facts| facts.ban().is_some());
    for lines in [
        &[("x-api-key", "leaked")][..],
        &[("x-api-key", " leaked ")],
        &[("authorization", "bearer  leaked")],
        &[("authorization", "Bearer\tleaked")],
        &[("x-api-key", "good"), ("x-api-key", "leaked")],
        &[("x-api-key", "leaked"), ("x-api-key", "good")],
        &[("x-api-key", "junk"), ("authorization", "Bearer leaked")],
        &[("authorization", "Basic eDp5"), ("authorization", "Bearer leaked")],
    ] {
        assert!(is_banned(lines), "{lines:?}");
    }
    for lines in [&[][..], &[("x-api-key", "good")], &[("x-other", "leaked")], &[("authorization", "Basic leaked")]] {
        assert!(!is_banned(lines), "{lines:?}");
    }
}

#[test]
fn longer_of_two_bans_applies() {
    let ban = |by: &str, value: &str, until: &str| format!("[[bans]]\nby = '{by}'\nvalue = '{value}'\n{until}\n");
    let (short, long) = ("until = '2001-01-01T00:00:00Z'", "until = '2002-01-01T00:00:00Z'");
    for (first, second) in [(short, long), (long, short), (short, ""), ("", short)] {
        for (by, value) in [("api_key", "k"), ("ip", "198.51.100.1")] {
            let text = ban(by, value, first) + &ban(by, value, second) + "[[rules]]\nname = 'a'\nlimits = ['1/s']";
            let rules = Config::from_text(&text, Format::Toml).unwrap().rules;
            let lines = [("x-api-key", "k")];
            let july_2001_us = 994_000_000_000_000;
            let is_banned = with_facts(&rules, "198.51.100.1", &lines, july_2001_us, |facts| facts.ban().is_some());
            assert!(is_banned, "{text}");
        }
    }
    let mut bans = crate::rules::lists::BanList::default();
    for until in [Some(5), None, Some(7)] {
        bans.add_user("eve", crate::rules::CompiledBan { until: until.map(Timestamp::from_micros), reason: None });
    }
    assert_eq!(bans.of_user("eve", Timestamp::from_micros(9)).map(crate::rules::CompiledBan::until), Some(None));
}

#[test]
fn kill_switch_turns_limits_and_bans_off() {
    let text = format!("kill_switch = true\n{TEXT}");
    let rules = Config::from_text(&text, Format::Toml).unwrap().rules;
    assert!(rules.is_off());
    assert!(with_facts(&rules, "198.51.100.66", &[], 0, |facts| facts.ban().is_none()));
    let request = http::Request::get("/").body(()).unwrap();
    assert!(rules.matching(&crate::rules::RequestView::of(&request)).is_empty());
}
