//! Several policies in one response: different styles, equal names, exposed headers, decisions without a quota.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::*;

#[test]
fn each_style_shows_the_policies_that_have_it() {
    let policies = Policies::new([
        policy("shown", "100/min").with_styles(styles(&["x"])),
        policy("listed", "5000/day").with_styles(styles(&["ietf"])),
        policy("hidden", "7/s").with_styles(Styles::NONE),
    ]);
    let told = headers(
        &policies,
        &decision(&[admitted(100, 60, secs(1.0)), admitted(5_000, 5, secs(2.0)), refused(7, 0, secs(0.2))]),
    );
    assert_eq!(
        text(&told),
        "cache-control: no-store\n\
         ratelimit-policy: \"listed\";q=5000;w=86400\n\
         ratelimit: \"listed\";r=5;t=2\n\
         retry-after: 1\n\
         x-ratelimit-limit: 100\n\
         x-ratelimit-remaining: 60\n\
         x-ratelimit-reset: 1700000002\n"
    );
}

#[test]
fn the_first_policy_chooses_between_ietf_and_draft_6_for_all() {
    let answer = |first: &str, second: &str| {
        let first = policy("per-minute", "100/min").with_styles(styles(&[first]));
        let second = policy("per-day", "5000/day").with_styles(styles(&[second]));
        headers(&Policies::new([first, second]), &both_admit())
    };
    assert_eq!(answer("ietf", "draft-6")["ratelimit"], r#""per-minute";r=60;t=13, "per-day";r=1211;t=31"#);
    let told = answer("draft-6", "ietf");
    assert_eq!(told["ratelimit-policy"], "100;w=60, 5000;w=86400");
    assert_eq!((told["ratelimit-remaining"].to_str().unwrap(), told.get("ratelimit")), ("1211", None));
}

#[test]
fn every_policy_is_listed_however_many_there_are() {
    for count in [1, 2, 6, 7, 8, 9, 32] {
        let names: Vec<String> = (0..count).map(|n| format!("a-policy-with-a-long-name-{n}")).collect();
        let policies = Policies::new(names.iter().map(|name| policy(name, "100/min")));
        let lines = vec![admitted(100, 60, secs(13.0)); count];
        let told = headers(&policies, &decision(&lines));
        let expected: Vec<String> = names.iter().map(|name| format!("\"{name}\";r=60;t=13")).collect();
        assert_eq!(told["ratelimit"], expected.join(", ").as_str());
    }
}

#[test]
fn a_duplicate_name_gets_a_number_in_headers_and_bodies() {
    let shared = Arc::new(Policy::of(limit("10/min")));
    let policies =
        Policies::new([shared.clone(), shared.clone(), Arc::new(policy("per-minute-2", "9/min")), shared.clone()]);
    let names: Vec<_> = policies.policies().map(Policy::name).collect();
    assert_eq!(names, ["per-minute", "per-minute-3", "per-minute-2", "per-minute-4"]);
    let line = refused(10, 0, secs(1.0));
    let denied = decision(&[admitted(10, 5, secs(1.0)), line, admitted(9, 5, secs(1.0)), line]);
    assert_eq!(
        headers(&policies, &denied)["ratelimit"],
        r#""per-minute";r=5;t=1, "per-minute-3";r=0;t=1, "per-minute-2";r=5;t=1, "per-minute-4";r=0;t=1"#
    );
    assert!(body(&policies.refuse(&denied, &HeaderMap::new())).contains(r#""policy":"per-minute-3""#));
}

#[test]
fn a_decision_of_source_none_writes_no_headers() {
    let policies = minute_and_day(&["x", "ietf"]).with_exposed_headers(true);
    let uncounted = Decision { source: Source::None, ..decision(&[]) };
    assert_eq!(text(&headers(&policies, &uncounted)), "");
    let uncounted = Decision { source: Source::None, ..both_admit() };
    assert_eq!(text(&headers(&policies, &uncounted)), "");
}

#[test]
fn a_local_decision_shows_the_policys_quota_and_the_local_remaining() {
    let policies = minute_and_day(&["x", "ietf"]);
    let local = Decision {
        source: Source::Local,
        ..decision(&[admitted(25, 24, secs(60.0)), admitted(1_250, 100, secs(9.0))])
    };
    let told = headers(&policies, &local);
    assert_eq!(told["ratelimit"], r#""per-minute";r=24;t=60, "per-day";r=100;t=9"#);
    assert_eq!(
        (&told["x-ratelimit-limit"], &told["x-ratelimit-remaining"]),
        (&"5000".parse().unwrap(), &"100".parse().unwrap())
    );
}

#[test]
fn headers_of_the_same_names_are_replaced_and_others_stay() {
    let policies = minute_and_day(&["x", "ietf"]);
    let mut told = HeaderMap::new();
    told.insert("x-ratelimit-remaining", "12345".parse().unwrap());
    told.insert("x-ratelimit-reset", "1".parse().unwrap());
    told.append("ratelimit", "\"stranger\";r=1".parse().unwrap());
    told.append("ratelimit", "\"stranger\";r=2".parse().unwrap());
    told.insert("etag", "\"e\"".parse().unwrap());
    policies.write_headers(&decision(&[refused(100, 1, Wait::NEVER), admitted(5_000, 1, secs(1.0))]), &mut told);
    assert_eq!(told["x-ratelimit-remaining"], "1");
    assert_eq!(told.get("x-ratelimit-reset"), None);
    assert_eq!(told.get_all("ratelimit").iter().count(), 1);
    assert_eq!(told["etag"], "\"e\"");
}

#[test]
fn exposed_headers_are_exactly_those_in_use() {
    let never = decision(&[refused(100, 0, Wait::NEVER), admitted(5_000, 1, secs(1.0))]);
    for names in [&["x", "ietf"][..], &["x"], &["ietf"], &["draft-6"], &["x", "draft-6"], &[]] {
        for decision in [both_admit(), minute_refuses(), never.clone()] {
            let told = headers(&minute_and_day(names).with_exposed_headers(true), &decision);
            let listed = told.get_all("access-control-expose-headers").iter();
            let listed: BTreeSet<String> =
                listed.flat_map(|value| value.to_str().unwrap().split(", ")).map(str::to_ascii_lowercase).collect();
            let own = |name: &&str| !matches!(*name, "cache-control" | "access-control-expose-headers");
            let in_use: BTreeSet<String> =
                told.keys().map(|name| name.as_str()).filter(own).map(str::to_owned).collect();
            assert_eq!(listed, in_use, "{names:?} {decision:?}");
        }
    }
    assert_eq!(headers(&minute_and_day(&["x"]), &both_admit()).get("access-control-expose-headers"), None);
}

#[test]
fn exposed_headers_are_appended_to_the_existing_list() {
    let mut told = HeaderMap::new();
    told.insert("access-control-expose-headers", "etag".parse().unwrap());
    minute_and_day(&["draft-6"]).with_exposed_headers(true).write_headers(&both_admit(), &mut told);
    let values: Vec<_> = told.get_all("access-control-expose-headers").iter().collect();
    assert_eq!(values, ["etag", "RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset, RateLimit-Policy"]);
}
