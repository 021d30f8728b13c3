//! Golden bodies of refusals.

use http::header::ACCEPT;

use super::*;

fn accept(value: &str) -> HeaderMap {
    HeaderMap::from_iter([(ACCEPT, value.parse().unwrap())])
}

fn free_minute() -> Policy {
    policy("per-minute", "60/min").with_plan("free").with_upgrade_url("https://example.com/plans?from=\"free\"")
}

fn denied() -> Decision {
    decision(&[refused(60, 0, secs(11.873))])
}

#[test]
fn a_denial_is_429_with_json_that_names_the_limit_and_the_wait() {
    let response = Policies::new([free_minute()]).refuse(&denied(), &HeaderMap::new());
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()["content-type"], "application/json");
    assert_eq!(response.headers()["retry-after"], "12");
    assert_eq!(response.headers()["cache-control"], "no-store");
    assert_eq!(response.headers()["ratelimit"], r#""per-minute";r=0;t=12"#);
    assert_eq!(
        body(&response),
        r#"{"error":"rate_limited","message":"the limit of 60 per minute has been reached; try again in 12 seconds","limit":60,"retry_after":12,"retry_after_ms":11873,"policy":"per-minute","plan":"free","upgrade_url":"https://example.com/plans?from=\"free\""}"#
    );
}

#[test]
fn an_unknown_plan_and_upgrade_url_are_left_out() {
    let response = Policies::new([policy("api", "60/10s")]).refuse(&denied(), &HeaderMap::new());
    assert_eq!(
        body(&response),
        r#"{"error":"rate_limited","message":"the limit of 60 per 10 seconds has been reached; try again in 12 seconds","limit":60,"retry_after":12,"retry_after_ms":11873,"policy":"api"}"#
    );
}

#[test]
fn never_is_null_and_the_message_names_the_largest_cost() {
    let policies = Policies::new([policy("burst", "60/min token-bucket burst=20")]);
    let line = LimitStatus { cost: 70, ..refused(60, 20, Wait::NEVER) };
    let response = policies.refuse(&decision(&[line]), &HeaderMap::new());
    assert_eq!((response.status().as_u16(), response.headers().get("retry-after")), (429, None));
    assert_eq!(
        body(&response),
        r#"{"error":"rate_limited","message":"a request that costs 70 can never pass: the limit is 60 per minute, at most 20 at once","limit":60,"retry_after":null,"retry_after_ms":null,"policy":"burst"}"#
    );
}

#[test]
fn a_problem_is_sent_on_request_or_by_format_and_names_every_violated_policy() {
    let policies = || [free_minute(), policy("per-day", "5000/day"), policy("per-hour", "9/h")];
    let day = decision(&[refused(60, 0, secs(2.0)), refused(5_000, 0, secs(90.0)), admitted(9, 3, secs(1.0))]);
    let asked = Policies::new(policies()).refuse(&day, &accept("application/problem+json"));
    assert_eq!(asked.status(), 429);
    assert_eq!(asked.headers()["content-type"], "application/problem+json");
    assert_eq!(
        body(&asked),
        r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota exceeded","status":429,"detail":"the limit of 5000 per day has been reached; try again in 90 seconds","violated-policies":["per-minute","per-day"],"limit":5000,"retry_after":90,"retry_after_ms":90000,"policy":"per-day"}"#
    );
    let by_rule = Policies::new(policies().map(|policy| policy.with_format(BodyFormat::Problem)));
    assert_eq!(by_rule.refuse(&day, &accept("application/json")).body(), asked.body());
}

#[test]
fn text_format_ignores_the_accept_header() {
    let shield = Policies::new([policy("shield", "50/s").with_format(BodyFormat::Text)]);
    let response = shield.refuse(&decision(&[refused(50, 0, secs(0.02))]), &accept("application/problem+json"));
    assert_eq!(response.headers()["content-type"], "text/plain; charset=utf-8");
    assert_eq!(body(&response), "the limit of 50 per second has been reached; try again in 1 second\n");
}

#[test]
fn a_custom_format_gets_the_details_and_keeps_status_and_headers() {
    let own = BodyFormat::custom(|refusal| {
        let (policy, line) = (refusal.policy().unwrap(), refusal.line().unwrap());
        let wait = refusal.retry_after();
        Body::new("text/html", format!("<b>{} {} {wait:?}</b>", policy.name(), line.remaining))
    });
    let response = Policies::new([free_minute().with_format(own)]).refuse(&denied(), &HeaderMap::new());
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &"12".parse().unwrap()));
    assert_eq!(response.headers()["content-type"], "text/html");
    assert_eq!(body(&response), "<b>per-minute 0 11.873s</b>");
}

#[test]
fn the_denying_policy_with_the_longest_wait_chooses_the_body() {
    let policies = Policies::new([
        policy("json", "60/min"),
        policy("text", "60/h").with_format(BodyFormat::Text),
        policy("problem", "60/day").with_format(BodyFormat::Problem),
    ]);
    let (yes, no, longer) = (admitted(60, 1, secs(1.0)), refused(60, 0, secs(1.0)), refused(60, 0, secs(2.0)));
    for (lines, content_type) in [
        ([no, yes, yes], "application/json"),
        ([yes, no, yes], "text/plain; charset=utf-8"),
        ([no, yes, longer], "application/problem+json"),
        ([no, no, no], "application/json"),
    ] {
        let response = policies.refuse(&decision(&lines), &HeaderMap::new());
        assert_eq!(response.headers()["content-type"], content_type, "{lines:?}");
    }
}

#[test]
fn an_unavailable_store_is_503_and_claims_no_quota() {
    let policies = Policies::new([free_minute()]).with_exposed_headers(true);
    let response = policies.unavailable(&HeaderMap::new());
    assert_eq!(response.status(), 503);
    assert_eq!(
        text(response.headers()),
        "access-control-expose-headers: Retry-After\n\
         cache-control: no-store\n\
         content-type: application/json\n\
         retry-after: 1\n"
    );
    assert_eq!(
        body(&response),
        r#"{"error":"unavailable","message":"the rate limiter is temporarily unavailable; try again shortly","retry_after":1,"retry_after_ms":1000}"#
    );
    let problem = policies.unavailable(&accept("application/problem+json"));
    assert_eq!(
        body(&problem),
        r#"{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","title":"The rate limiter is temporarily unavailable","status":503,"detail":"the rate limiter is temporarily unavailable; try again shortly","retry_after":1,"retry_after_ms":1000}"#
    );
}

#[test]
fn retry_after_is_never_zero() {
    let policies = Policies::new([free_minute()]);
    for (wait_us, told, told_ms) in [(0, "1", 1), (1, "1", 1), (1_000_000, "1", 1_000), (1_000_001, "2", 1_001)] {
        let response = policies.refuse(&decision(&[refused(60, 0, Wait::from_micros(wait_us))]), &HeaderMap::new());
        assert_eq!(response.headers()["retry-after"], told, "{wait_us}");
        let facts = format!(r#""retry_after":{told},"retry_after_ms":{told_ms},"#);
        assert!(body(&response).contains(&facts), "{wait_us}: {}", body(&response));
    }
}
