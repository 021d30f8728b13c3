//! Golden headers and bodies, compared to the byte.

mod fields;
mod refusals;
mod together;

use http::{HeaderMap, Response};
use tidegate_core::{Decision, Limit, LimitStatus, Source, Timestamp, Wait};

use super::*;

/// 2023-11-14, 250 ms past a full second.
const NOW_US: u64 = 1_700_000_000_250_000;

fn limit(text: &str) -> Limit {
    text.parse().unwrap()
}

fn policy(name: &str, text: &str) -> Policy {
    Policy::new(name, limit(text)).unwrap()
}

fn styles(names: &[&str]) -> Styles {
    let style = |name: &&str| Style::ALL.into_iter().find(|style| style.as_str() == *name).unwrap();
    Styles::new(names.iter().map(style)).unwrap()
}

fn secs(secs: f64) -> Wait {
    Wait::from_micros((secs * 1e6) as u64)
}

fn admitted(quota: u32, remaining: u32, next_after: Wait) -> LimitStatus {
    LimitStatus {
        allowed: true,
        cost: 1,
        quota,
        remaining,
        retry_after: Wait::ZERO,
        next_after,
        reset_after: next_after,
        late_us: 0,
        refunded_before: 0,
    }
}

fn refused(quota: u32, remaining: u32, retry_after: Wait) -> LimitStatus {
    let next_after = secs(3.5);
    LimitStatus {
        allowed: false,
        cost: 1,
        quota,
        remaining,
        retry_after,
        next_after,
        reset_after: next_after,
        late_us: 0,
        refunded_before: 0,
    }
}

fn decision(statuses: &[LimitStatus]) -> Decision {
    Decision::new(Timestamp::from_micros(NOW_US), Source::Store, statuses.iter().copied().collect())
}

/// Formats headers as sorted lines of `name: value`.
fn text(headers: &HeaderMap) -> String {
    let mut lines: Vec<_> =
        headers.iter().map(|(name, value)| format!("{name}: {}\n", value.to_str().unwrap())).collect();
    lines.sort();
    lines.concat()
}

fn headers(policies: &Policies, decision: &Decision) -> HeaderMap {
    let mut headers = HeaderMap::new();
    policies.write_headers(decision, &mut headers);
    headers
}

fn body(response: &Response<bytes::Bytes>) -> &str {
    std::str::from_utf8(response.body()).unwrap()
}

fn minute_and_day(names: &[&str]) -> Policies {
    let styles = styles(names);
    Policies::new([
        policy("per-minute", "100/min").with_styles(styles),
        policy("per-day", "5000/day").with_styles(styles),
    ])
}

fn both_admit() -> Decision {
    decision(&[admitted(100, 60, secs(12.1)), admitted(5_000, 1_211, secs(30.9))])
}

fn minute_refuses() -> Decision {
    decision(&[refused(100, 0, secs(11.873)), admitted(5_000, 4_211, secs(30.9))])
}

#[test]
fn one_limit_admits_in_the_default_styles() {
    let policies = Policies::new([policy("per-minute", "100/min")]);
    let told = headers(&policies, &decision(&[admitted(100, 99, secs(60.0))]));
    assert_eq!(
        text(&told),
        "ratelimit-policy: \"per-minute\";q=100;w=60\n\
         ratelimit: \"per-minute\";r=99;t=60\n\
         x-ratelimit-limit: 100\n\
         x-ratelimit-remaining: 99\n\
         x-ratelimit-reset: 1700000061\n"
    );
}

#[test]
fn one_limit_denies_in_the_default_styles() {
    let policies = Policies::new([policy("per-minute", "100/min")]);
    let told = headers(&policies, &decision(&[refused(100, 0, secs(11.873))]));
    assert_eq!(
        text(&told),
        "cache-control: no-store\n\
         ratelimit-policy: \"per-minute\";q=100;w=60\n\
         ratelimit: \"per-minute\";r=0;t=12\n\
         retry-after: 12\n\
         x-ratelimit-limit: 100\n\
         x-ratelimit-remaining: 0\n\
         x-ratelimit-reset: 1700000013\n"
    );
}

#[test]
fn ietf_lists_every_policy_with_its_own_numbers() {
    let policies = minute_and_day(&["ietf"]);
    assert_eq!(
        text(&headers(&policies, &both_admit())),
        "ratelimit-policy: \"per-minute\";q=100;w=60, \"per-day\";q=5000;w=86400\n\
         ratelimit: \"per-minute\";r=60;t=13, \"per-day\";r=1211;t=31\n"
    );
    assert_eq!(
        text(&headers(&policies, &minute_refuses())),
        "cache-control: no-store\n\
         ratelimit-policy: \"per-minute\";q=100;w=60, \"per-day\";q=5000;w=86400\n\
         ratelimit: \"per-minute\";r=0;t=12, \"per-day\";r=4211;t=31\n\
         retry-after: 12\n"
    );
}

#[test]
fn x_shows_the_smallest_fraction_left_and_on_a_denial_the_denying_limit() {
    let policies = minute_and_day(&["x"]);
    assert_eq!(
        text(&headers(&policies, &both_admit())),
        "x-ratelimit-limit: 5000\nx-ratelimit-remaining: 1211\nx-ratelimit-reset: 1700000032\n"
    );
    assert_eq!(
        text(&headers(&policies, &minute_refuses())),
        "cache-control: no-store\nretry-after: 12\n\
         x-ratelimit-limit: 100\nx-ratelimit-remaining: 0\nx-ratelimit-reset: 1700000013\n"
    );
}

#[test]
fn draft_6_shows_one_limit_and_all_policies() {
    let policies = minute_and_day(&["draft-6"]);
    assert_eq!(
        text(&headers(&policies, &both_admit())),
        "ratelimit-limit: 5000\n\
         ratelimit-policy: 100;w=60, 5000;w=86400\n\
         ratelimit-remaining: 1211\n\
         ratelimit-reset: 31\n"
    );
    assert_eq!(
        text(&headers(&policies, &minute_refuses())),
        "cache-control: no-store\n\
         ratelimit-limit: 100\n\
         ratelimit-policy: 100;w=60, 5000;w=86400\n\
         ratelimit-remaining: 0\n\
         ratelimit-reset: 12\n\
         retry-after: 12\n"
    );
}

#[test]
fn a_window_without_whole_seconds_has_no_w() {
    let policies = |style: &str| {
        let styles = styles(&[style]);
        let fast = policy("fast", "250/500ms").with_styles(styles);
        Policies::new([fast, policy("per-minute", "100/min").with_styles(styles)])
    };
    let both = decision(&[admitted(250, 1, secs(0.1)), admitted(100, 50, secs(1.0))]);
    assert_eq!(headers(&policies("ietf"), &both)["ratelimit-policy"], r#""fast";q=250, "per-minute";q=100;w=60"#);
    assert_eq!(headers(&policies("draft-6"), &both)["ratelimit-policy"], "100;w=60");
    let only = Policies::new([policy("fast", "250/500ms").with_styles(styles(&["draft-6"]))]);
    let told = headers(&only, &decision(&[admitted(250, 1, secs(0.1))]));
    assert_eq!(text(&told), "ratelimit-limit: 250\nratelimit-remaining: 1\nratelimit-reset: 1\n");
}

#[test]
fn the_longest_wait_is_shown_and_the_other_limits_keep_their_own_numbers() {
    let policies = minute_and_day(&["x", "ietf"]);
    let both = decision(&[refused(100, 0, secs(12.0)), refused(5_000, 2, secs(7_200.000_001))]);
    let told = headers(&policies, &both);
    assert_eq!(told["retry-after"], "7201");
    assert_eq!(told["ratelimit"], r#""per-minute";r=0;t=12, "per-day";r=2;t=7201"#);
    assert_eq!(
        (&told["x-ratelimit-limit"], &told["x-ratelimit-remaining"]),
        (&"5000".parse().unwrap(), &"2".parse().unwrap())
    );
}

#[test]
fn a_request_that_can_never_pass_has_no_retry_after_t_or_reset() {
    let never = decision(&[refused(100, 40, secs(9.0)), refused(5_000, 4_000, Wait::NEVER)]);
    assert_eq!(
        text(&headers(&minute_and_day(&["x", "ietf"]), &never)),
        "cache-control: no-store\n\
         ratelimit-policy: \"per-minute\";q=100;w=60, \"per-day\";q=5000;w=86400\n\
         ratelimit: \"per-minute\";r=40;t=9, \"per-day\";r=4000\n\
         x-ratelimit-limit: 5000\n\
         x-ratelimit-remaining: 4000\n"
    );
    let told = headers(&minute_and_day(&["draft-6"]), &never);
    assert_eq!((told["ratelimit-reset"].to_str().unwrap(), told.get("retry-after")), ("4", None));
}

#[test]
fn numbers_of_any_length_are_written_in_decimal() {
    let policies = Policies::new([policy("per-minute", "10000000/min")]);
    for remaining in [0, 9, 10, 99, 100, 999, 1_000, 99_999_999, 100_000_000, u32::MAX] {
        let headers = headers(&policies, &decision(&[admitted(u32::MAX, remaining, secs(60.0))]));
        assert_eq!(headers["x-ratelimit-remaining"], remaining.to_string().as_str());
        assert_eq!(headers["ratelimit"], format!("\"per-minute\";r={remaining};t=60").as_str());
    }
}

#[test]
fn the_reset_of_one_instant_is_the_same_in_every_response() {
    let policies = Policies::new([policy("per-minute", "10/min")]);
    let frees_at_us = NOW_US + 11_873_000;
    for early_us in [0, 1, 249_999, 250_000, 250_001, 749_999, 750_001, 1_000_000, 11_872_999] {
        let mut denied = decision(&[refused(10, 0, Wait::from_micros(11_873_000 - early_us))]);
        denied.at = Timestamp::from_micros(frees_at_us - (11_873_000 - early_us));
        assert_eq!(headers(&policies, &denied)["x-ratelimit-reset"], "1700000013", "{early_us}");
    }
}

/// A short value is built on the stack, a long one on the heap.
#[test]
fn ratelimit_lists_every_policy_whatever_its_length() {
    let mut lengths = Vec::new();
    for count in 1..=12 {
        let names: Vec<String> = (0..count).map(|index| format!("limit-{index}")).collect();
        let policies = Policies::new(names.iter().map(|name| policy(name, "100/min")));
        let statuses: Vec<LimitStatus> =
            (0..count).map(|index| admitted(100, 7 * index, secs(f64::from(index)))).collect();
        let told = headers(&policies, &decision(&statuses));
        let item = |(index, name): (usize, &String)| format!("\"{name}\";r={};t={index}", 7 * index);
        let expected: Vec<String> = names.iter().enumerate().map(item).collect();
        assert_eq!(told["ratelimit"], expected.join(", ").as_str());
        lengths.push(told["ratelimit"].len());
    }
    assert!(lengths[0] < 64 && lengths[11] > 192, "{lengths:?}");
}
