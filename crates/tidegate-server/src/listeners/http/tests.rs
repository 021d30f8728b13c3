//! Answers to checks: every field, the settings of the configuration, and waits in virtual time.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate::Limiter;
use tidegate::config::{Config, Format};
use tidegate::engine::Engine;
use tidegate_testkit::simulated::VirtualClock;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::test_support::{
    IDLE, PEER, RULES, UnreachableStore, clock, described, listener_with_config, listener_with_rules,
};
use super::*;

/// Returns the answer to a check: its status, headers and body.
async fn ask(listener: &HttpListener, body: &str) -> (u16, HeaderMap, Value) {
    let response = listener.check(body.as_bytes()).await;
    let body = serde_json::from_slice(response.body()).unwrap_or_else(|_| panic!("{response:?}"));
    (response.status().as_u16(), response.headers().clone(), body)
}

/// Returns the last of several answers to the same check.
async fn ask_times(listener: &HttpListener, times: u32, body: &str) -> (u16, HeaderMap, Value) {
    for _ in 1..times {
        ask(listener, body).await;
    }
    ask(listener, body).await
}

fn without(mut body: Value, field: &str) -> Value {
    body.as_object_mut().unwrap().remove(field);
    body
}

#[tokio::test]
async fn denial_of_an_explicit_check_has_the_fields_of_the_json_body() {
    let listener = listener_with_rules(None);
    let (status, headers, body) = ask_times(&listener, 2, r#"{"key":"a","limit":"1/min"}"#).await;
    assert_eq!((status, &headers["retry-after"]), (429, &HeaderValue::from_static("60")));
    let limits = json!([{
        "name": "per-minute", "quota": 1, "window_ms": 60_000, "remaining": 0, "retry_after_ms": 60_000,
        "next_after_ms": 60_000, "reset_after_ms": 60_000, "allowed": false,
    }]);
    let expected = json!({
        "allowed": false, "source": "store", "limits": limits, "error": "rate_limited",
        "message": "the limit of 1 per minute has been reached; try again in 60 seconds",
        "limit": 1, "retry_after": 60, "retry_after_ms": 60_000, "policy": "per-minute",
    });
    assert_eq!(body, expected);
}

#[tokio::test]
async fn cost_that_never_fits_has_no_time_to_retry() {
    let (status, headers, body) = ask(&listener_with_rules(None), r#"{"key":"a","limit":"1/min","cost":2}"#).await;
    assert_eq!((status, headers.get("retry-after")), (429, None));
    assert_eq!([&body["retry_after"], &body["retry_after_ms"]], [&Value::Null; 2], "{body}");
    assert!(body.as_object().unwrap().contains_key("retry_after_ms"));
}

#[tokio::test]
async fn denial_by_rules_names_rule_and_plan_and_has_the_response_to_relay() {
    let request = described("/plan", "203.0.113.9", r#"{"x-api-key":"planted-pro"}"#);
    let (status, headers, body) = ask_times(&listener_with_rules(None), 4, &request).await;
    assert_eq!(status, 429);
    assert_eq!(body["limits"][0]["rule"], "plan");
    let fields = json!({
        "error": "rate_limited", "message": "the limit of 3 per hour has been reached; try again in 3600 seconds",
        "limit": 3, "retry_after": 3600, "retry_after_ms": 3_600_000, "policy": "per-hour", "rule": "plan",
        "plan": "pro", "upgrade_url": "https://example.com/upgrade",
    });
    for (name, value) in fields.as_object().unwrap() {
        assert_eq!(&body[name], value, "{name}");
    }
    let response = &body["response"];
    assert_eq!(response["status"], 429);
    let relayed: Value = serde_json::from_str(response["body"].as_str().unwrap()).unwrap();
    assert_eq!(relayed, fields, "the body to relay has the same fields");
    let own: BTreeMap<&str, &str> =
        headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    assert_eq!(response["headers"], json!(own), "the headers to relay are those of the answer");
}

#[tokio::test]
async fn body_to_relay_has_the_format_of_the_rule_and_the_accept_header() {
    for (path, headers, content_type, begin) in [
        ("/json", "[]", "application/json", r#"{"error":"rate_limited","#),
        ("/json", r#"{"accept":"application/problem+json"}"#, "application/problem+json", r#"{"type":"https://"#),
        ("/problem", "{}", "application/problem+json", r#"{"type":"https://"#),
        ("/text", "{}", "text/plain; charset=utf-8", "the limit of 1 per hour has been reached; try again in 3600"),
        ("/shield", "{}", "text/plain; charset=utf-8", "the limit of 1 per hour has been reached"),
        ("/json", r#"[["content-type","application/grpc+proto"]]"#, "application/grpc+proto", ""),
    ] {
        let (status, own, body) =
            ask_times(&listener_with_rules(None), 2, &described(path, "203.0.113.9", headers)).await;
        let response = &body["response"];
        assert_eq!((status, &own["content-type"]), (429, &HeaderValue::from_static("application/json")));
        assert_eq!(response["headers"]["content-type"], content_type, "{body}");
        assert!(response["body"].as_str().unwrap().starts_with(begin), "{body}");
        let is_grpc = content_type.starts_with("application/grpc");
        assert_eq!(response["status"], if is_grpc { 200 } else { 429 }, "{body}");
        assert_eq!(response["headers"]["grpc-status"], if is_grpc { json!("8") } else { Value::Null }, "{body}");
    }
}

#[tokio::test]
async fn admission_by_rules_has_the_headers_to_add() {
    let listener = listener_with_rules(None);
    let (status, headers, body) = ask(&listener, &described("/json", "203.0.113.9", "{}")).await;
    assert_eq!((status, headers["x-ratelimit-remaining"].as_bytes()), (200, &b"0"[..]));
    let added = json!({
        "x-ratelimit-limit": "1", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "1700003600",
        "ratelimit": "\"per-hour\";r=0;t=3600", "ratelimit-policy": "\"per-hour\";q=1;w=3600",
    });
    assert_eq!(body["response"], json!({ "headers": added }));
    for path in ["/health", "/unmatched"] {
        let (_, _, body) = ask(&listener, &described(path, "203.0.113.9", "{}")).await;
        let unlimited = json!({ "allowed": true, "source": "none", "limits": [], "response": { "headers": {} } });
        assert_eq!(body, unlimited, "{path}");
    }
}

/// Bans, paths that are too long and an unavailable store, with the fields of the layer's body and no limits.
#[tokio::test]
async fn every_refusal_has_the_same_fields() {
    let listener = listener_with_rules(None);
    listener.decider.limiter().ban(b"banned", Some(Duration::from_secs(90))).await.unwrap();
    let without_store = listener_with_rules(Some(Arc::new(UnreachableStore)));
    let deny = listener_with_config("on_failure = \"deny\"", Some(Arc::new(UnreachableStore)));
    let here = "203.0.113.9";
    let explicit = r#"{"key":"banned","limit":"1/min"}"#.to_owned();
    let too_long = "the path of this request is too long; at most 64 bytes are accepted";
    let unavailable = "the rate limiter is temporarily unavailable; try again shortly";
    for (listener, request, status, fields) in [
        (&listener, explicit.clone(), 403, json!(["store", "banned", "this caller is banned", 90, 90_000])),
        (
            &listener,
            described("/json", "198.51.100.7", "{}"),
            403,
            json!(["none", "banned", "this caller is banned", null, null]),
        ),
        (
            &listener,
            described(&"/long".repeat(20), here, "{}"),
            414,
            json!(["none", "path_too_long", too_long, null, null]),
        ),
        (&without_store, described("/json", here, "{}"), 503, json!(["none", "unavailable", unavailable, 1, 1_000])),
        (&deny, explicit, 503, json!(["none", "unavailable", unavailable, 1, 1_000])),
    ] {
        let (found, headers, body) = ask(listener, &request).await;
        assert_eq!((found, headers["cache-control"].as_bytes()), (status, &b"no-store"[..]), "{body}");
        let expected = json!({
            "allowed": false, "source": fields[0], "limits": [], "error": fields[1], "message": fields[2],
            "retry_after": fields[3], "retry_after_ms": fields[4],
        });
        assert_eq!(without(body.clone(), "response"), expected);
        let is_by_rules = request.contains("request");
        assert_eq!(body["response"]["status"], if is_by_rules { json!(status) } else { Value::Null });
        let retry_after = headers.get("retry-after").map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(json!(retry_after), fields[3].as_u64().map_or(Value::Null, |secs| json!(secs.to_string())));
    }
}

const EXPLICIT: &str = r#"{"key":"user:42","limit":"1/min"}"#;

#[tokio::test]
async fn failure_policy_of_the_configuration_decides_explicit_checks() {
    for (config, first, second) in [
        ("on_failure = \"allow\"", (200, "none", 0), (200, "none", 0)),
        ("on_failure = \"local\"", (200, "local", 1), (429, "local", 1)),
        ("", (200, "local", 1), (429, "local", 1)),
        ("on_failure = \"deny\"", (503, "none", 0), (503, "none", 0)),
        ("kill_switch = true\non_failure = \"deny\"", (200, "none", 0), (200, "none", 0)),
    ] {
        let listener = listener_with_config(config, Some(Arc::new(UnreachableStore)));
        for expected in [first, second] {
            let (status, headers, body) = ask(&listener, EXPLICIT).await;
            let limits = body["limits"].as_array().unwrap().len();
            assert_eq!((status, body["source"].as_str().unwrap(), limits), expected, "{config}: {body}");
            let claims = headers.keys().any(|name| name.as_str().contains("ratelimit"));
            assert_eq!(claims, limits > 0, "no quota headers are claimed without a count: {config}: {headers:?}");
        }
    }
}

#[tokio::test]
async fn kill_switch_admits_explicit_checks_without_counting() {
    let listener = listener_with_config("kill_switch = true", None);
    listener.decider.limiter().ban(b"user:42", None).await.unwrap();
    for _ in 0..3 {
        let (status, _, body) = ask(&listener, EXPLICIT).await;
        assert_eq!((status, body), (200, json!({ "allowed": true, "source": "none", "limits": [] })));
    }
}

#[tokio::test]
async fn reload_changes_the_settings_of_explicit_checks() {
    let rules = |text: &str| Config::from_text(text, Format::Toml).unwrap().rules;
    let limiter = Limiter::builder().clock(clock()).build();
    let engine = Engine::on_clock(limiter, rules(""), Vec::new(), clock());
    let listener = HttpListener::new(engine.clone(), IDLE);
    let names = async || -> Vec<String> {
        let (_, headers, _) = ask(&listener, r#"{"key":"user:42","limit":"9/min"}"#).await;
        headers.keys().map(|name| name.as_str().to_owned()).filter(|name| name != "content-type").collect()
    };
    let x = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"];
    for (config, expected) in [
        ("", [&x[..], &["ratelimit", "ratelimit-policy"]].concat()),
        ("headers = [\"x\"]", x.to_vec()),
        ("headers = []", Vec::new()),
        (
            "headers = [\"draft-6\"]",
            vec!["ratelimit-limit", "ratelimit-remaining", "ratelimit-reset", "ratelimit-policy"],
        ),
        ("headers = [\"x\"]\nexpose_headers = true", [&x[..], &["access-control-expose-headers"]].concat()),
        ("kill_switch = true", Vec::new()),
    ] {
        engine.reload(rules(config));
        let (mut found, mut expected) = (names().await, expected);
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected, "{config}");
    }
}

/// Returns a listener whose clock follows tokio's.
fn listener_in_virtual_time(config: &str) -> Arc<HttpListener> {
    let clock = VirtualClock::start();
    let limiter = Limiter::builder().clock(clock.clone()).build();
    let rules = Config::from_text(config, Format::Toml).unwrap().rules;
    let engine = Engine::on_clock(limiter, rules, Vec::new(), clock);
    Arc::new(HttpListener::new(engine, IDLE))
}

/// Sends a check on a connection of its own, and returns the client's end once the listener has read the request.
async fn send(listener: &Arc<HttpListener>, body: &str) -> DuplexStream {
    send_with("", listener, body).await
}

/// Sends a check with these header lines, and returns the connection when the listener has received it.
async fn send_with(headers: &str, listener: &Arc<HttpListener>, body: &str) -> DuplexStream {
    let (_stage, context) = ConnectionContext::unshared();
    let (mut client, server) = tokio::io::duplex(1 << 16);
    let listener = listener.clone();
    tokio::spawn(async move { drop(listener.serve_stream(server, PEER, context).await) });
    let request =
        format!("POST /v1/check HTTP/1.1\r\nhost: x\r\n{headers}content-length: {}\r\n\r\n{body}", body.len());
    client.write_all(request.as_bytes()).await.unwrap();
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    client
}

/// Returns the status of the next response.
async fn status(client: &mut DuplexStream) -> u16 {
    let mut line = [0; "HTTP/1.1 200".len()];
    client.read_exact(&mut line).await.unwrap();
    std::str::from_utf8(&line["HTTP/1.1 ".len()..]).unwrap().parse().unwrap()
}

fn waiting(wait_ms: u32) -> String {
    format!(r#"{{"key":"hooks","limit":"1/s","wait_ms":{wait_ms}}}"#)
}

#[tokio::test(start_paused = true)]
async fn waiting_checks_are_admitted_in_the_order_of_their_arrival() {
    let listener = listener_in_virtual_time("");
    let (began, order) = (Instant::now(), Arc::new(parking_lot::Mutex::new(Vec::new())));
    let mut clients = tokio::task::JoinSet::new();
    for place in 0..20_u32 {
        let mut client = send(&listener, &waiting(60_000)).await;
        let order = order.clone();
        clients.spawn(async move {
            assert_eq!(status(&mut client).await, 200);
            order.lock().push((place, began.elapsed().as_secs()));
        });
    }
    let (other, _, body) = ask(&listener, r#"{"key":"other","limit":"1/s"}"#).await;
    assert_eq!((other, began.elapsed()), (200, Duration::ZERO), "other checks are answered meanwhile: {body}");
    clients.join_all().await;
    assert_eq!(*order.lock(), (0..20).map(|place| (place, u64::from(place))).collect::<Vec<_>>());
    assert_eq!(listener.stats.request_times.count(), 1, "a wait is not the time of an answer");
}

#[tokio::test(start_paused = true)]
async fn client_that_disconnects_while_it_waits_gives_its_turn_to_the_next() {
    // The second line keeps a check from being plain.
    for (leaves_from_the_front, headers) in
        [(true, ""), (false, ""), (true, "connection: keep-alive, te\r\n"), (false, "connection: keep-alive, te\r\n")]
    {
        let listener = listener_in_virtual_time("");
        let began = Instant::now();
        assert_eq!(ask(&listener, &waiting(0)).await.0, 200);
        let send = async || send_with(headers, &listener, &waiting(60_000)).await;
        let (first, second, mut third) = (send().await, send().await, send().await);
        let mut stays = if leaves_from_the_front {
            drop(first);
            second
        } else {
            drop(second);
            first
        };
        assert_eq!(status(&mut stays).await, 200);
        assert_eq!(began.elapsed(), Duration::from_secs(1));
        assert_eq!(status(&mut third).await, 200);
        assert_eq!(began.elapsed(), Duration::from_secs(2), "the client that left was not charged");
    }
}

#[tokio::test(start_paused = true)]
async fn wait_that_ends_without_room_is_a_denial_and_charges_nothing() {
    let listener = listener_in_virtual_time("");
    let began = Instant::now();
    assert_eq!(ask(&listener, &waiting(0)).await.0, 200);
    let (status, headers, body) = ask(&listener, &waiting(999)).await;
    assert_eq!((status, began.elapsed()), (429, Duration::ZERO), "known at once");
    assert_eq!((&body["retry_after_ms"], headers["retry-after"].as_bytes()), (&json!(1_000), &b"1"[..]));
    assert_eq!((&body["error"], &body["policy"]), (&json!("rate_limited"), &json!("per-second")));
    assert_eq!(ask(&listener, &waiting(1_000)).await.0, 200);
    assert_eq!(began.elapsed(), Duration::from_secs(1));
    let leaky = r#"{"key":"mail","limit":"1/s leaky-bucket","wait_ms":900}"#;
    assert_eq!(ask(&listener, leaky).await.0, 200);
    let (status, _, body) = ask(&listener, leaky).await;
    assert_eq!((status, &body["allowed"], &body["limits"][0]["allowed"]), (429, &json!(false), &json!(false)));
    let never = ask(&listener, r#"{"key":"a","limit":"1/s","cost":2,"wait_ms":60000}"#).await;
    assert_eq!((never.0, &never.2["retry_after_ms"]), (429, &Value::Null));
    assert_eq!(began.elapsed(), Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn checks_that_wait_follow_the_settings() {
    let listener = listener_in_virtual_time("kill_switch = true");
    for _ in 0..3 {
        let (status, _, body) = ask(&listener, &waiting(60_000)).await;
        assert_eq!((status, body), (200, json!({ "allowed": true, "source": "none", "limits": [] })));
    }
    for (config, status) in [("on_failure = \"deny\"", 503), ("on_failure = \"allow\"", 200)] {
        let listener = listener_with_config(config, Some(Arc::new(UnreachableStore)));
        assert_eq!(ask(&listener, &waiting(60_000)).await.0, status, "{config}");
    }
    let banned = listener_in_virtual_time("");
    banned.decider.limiter().ban(b"hooks", None).await.unwrap();
    assert_eq!(ask(&banned, &waiting(60_000)).await.0, 403);
}

#[tokio::test]
async fn wait_of_a_request_by_rules_is_rejected() {
    let body = described("/json", "203.0.113.9", "{}").replacen('{', r#"{"wait_ms":10,"#, 1);
    let (status, _, body) = ask(&listener_with_config(RULES, None), &body).await;
    assert_eq!((status, &body["error"]), (400, &json!("bad_request")));
    assert!(body["message"].as_str().unwrap().contains("omit wait_ms"), "{body}");
}
