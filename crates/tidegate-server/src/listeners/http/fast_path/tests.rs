//! The fast path against the general one, and the ends of requests and connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::Request;
use tidegate::Limiter;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::watch;
use tokio::time::Instant;

use super::*;
use crate::browser::BrowserPolicy;
use crate::budget::{EvictingBudget, Receiving};
use crate::listeners::http::connection::serve;
use crate::listeners::http::general::RequestBody;
use crate::listeners::http::test_support::{
    IDLE, PEER, RULES, UnreachableStore, clock, described, listener_with_config, listener_with_rules,
};
use crate::secret::SecretForm;
use crate::shutdown::{Shutdown, ShutdownStage};

const GOOD: &str = r#"{"key":"user:42","limit":"10/min"}"#;
/// A header that is harmless, and keeps a request from being plain.
const BY_HYPER: &str = "connection: keep-alive, te\r\n";

fn post(headers: &str, body: &str) -> String {
    format!("POST /v1/check HTTP/1.1\r\nhost: x\r\n{headers}content-length: {}\r\n\r\n{body}", body.len())
}

/// Returns a listener whose clock stands still.
fn listener() -> Arc<HttpListener> {
    let browsers = BrowserPolicy { origins: vec!["https://ops.example".parse().unwrap()], ..BrowserPolicy::default() };
    Arc::new(HttpListener::new(Limiter::builder().clock(clock()).build(), IDLE).with_browsers(browsers))
}

/// Connects to a listener of its own. Returns the client's end, and the sender of the shutdown signal.
fn connect() -> (DuplexStream, watch::Sender<ShutdownStage>) {
    connect_to(listener())
}

fn connect_to(listener: Arc<HttpListener>) -> (DuplexStream, watch::Sender<ShutdownStage>) {
    let (stage, context) = ConnectionContext::unshared();
    let context = ConnectionContext { stats: listener.stats.clone(), ..context };
    let (client, server) = tokio::io::duplex(1 << 20);
    tokio::spawn(async move { drop(listener.serve_stream(server, PEER, context).await) });
    (client, stage)
}

/// Returns the responses to these pieces, each sent after the one before was read. Dates are removed.
async fn responses(pieces: &[&str]) -> String {
    responses_of(listener(), pieces).await
}

async fn responses_of(listener: Arc<HttpListener>, pieces: &[&str]) -> String {
    let (mut client, _stage) = connect_to(listener);
    for piece in pieces {
        client.write_all(piece.as_bytes()).await.unwrap();
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }
    client.shutdown().await.unwrap();
    let mut received = String::new();
    client.read_to_string(&mut received).await.unwrap();
    let (dates, lines): (Vec<&str>, Vec<&str>) = received.split("\r\n").partition(|line| line.starts_with("date: "));
    assert!(dates.iter().all(|date| date.ends_with(" GMT")), "{dates:?}");
    let count = received.matches("HTTP/1.").count() - received.matches("HTTP/1.1 100 ").count();
    assert_eq!(dates.len(), count, "every response has a date: {received}");
    lines.join("\r\n")
}

#[tokio::test]
async fn both_paths_give_the_same_response_to_explicit_checks() {
    for (body, status) in [
        (GOOD, "200 OK"),
        (r#"{"key":"a","limit":"1/h","cost":2}"#, "429 Too Many Requests"),
        (r#"{"key":"a","limit":"5/h leaky-bucket","cost":2}"#, "200 OK"),
        (r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"9/day"}]}"#, "200 OK"),
        (r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"2/s"}]}"#, "400 Bad Request"),
        (r#"{"request":{"method":"GET","path":"/","peer":"::1"}}"#, "400 Bad Request"),
        ("nonsense", "400 Bad Request"),
        ("", "400 Bad Request"),
    ] {
        let fast = responses(&[&post("", body)]).await;
        assert!(fast.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{fast}");
        assert_eq!(fast, responses(&[&post(BY_HYPER, body)]).await);
    }
}

/// Sends the same sequence of requests to one listener by the fast path and to an identical one by the general path, and
/// compares the responses byte by byte, and the numbers of recorded durations. Returns the statuses.
async fn assert_paths_agree([fast, general]: [Arc<HttpListener>; 2], bodies: &[String]) -> Vec<String> {
    let send = async |listener, headers| {
        let requests: Vec<String> = bodies.iter().map(|body| post(headers, body)).collect();
        responses_of(listener, &requests.iter().map(|request| &**request).collect::<Vec<_>>()).await
    };
    let recorded = [&fast, &general].map(|listener| listener.stats.clone());
    let (fast, general) = (send(fast, "").await, send(general, BY_HYPER).await);
    assert_eq!(fast, general);
    assert_eq!(recorded.map(|stats| stats.request_times.count()), [bodies.len() as u64; 2]);
    let statuses: Vec<String> = fast.split("HTTP/1.1 ").skip(1).map(|response| response[..3].to_owned()).collect();
    assert_eq!(statuses.len(), bodies.len(), "{fast}");
    statuses
}

#[tokio::test]
async fn both_paths_give_the_same_responses_by_rules() {
    let (here, banned, banned_for_a_time) = ("203.0.113.9", "198.51.100.7", "198.51.100.8");
    let twice = |path: &str| [described(path, here, "{}"), described(path, here, "{}")];
    let mut bodies: Vec<String> = ["/json", "/problem", "/text", "/local", "/allow", "/costly", "/shadow", "/shield"]
        .iter()
        .flat_map(|path| twice(path))
        .collect();
    bodies.extend([
        described("/json", banned, "{}"),
        described("/json", banned_for_a_time, "{}"),
        described("/health", here, "{}"),
        described("/unmatched", here, "{}"),
        described(&"/long".repeat(20), here, "{}"),
        described("/plan", here, r#"{"x-api-key":"planted-pro"}"#),
        described("/plan", here, r#"[["x-api-key","invented"]]"#),
        GOOD.to_owned(),
    ]);
    let statuses = assert_paths_agree([(); 2].map(|()| listener_with_rules(None)), &bodies).await;
    let denied_second = ["200", "429"].repeat(5);
    let rest = ["200", "429", "200", "200", "200", "429", "403", "403", "200", "200", "414", "200", "200", "200"];
    assert_eq!(statuses, [&denied_second[..], &rest].concat());
}

#[tokio::test]
async fn both_paths_give_the_same_responses_without_a_store() {
    let bodies: Vec<String> =
        ["/json", "/problem", "/text", "/local", "/local", "/allow", "/plan", "/shield", "/shield"]
            .iter()
            .map(|path| described(path, "203.0.113.9", "{}"))
            .chain([described("/json", "198.51.100.7", "{}"), GOOD.to_owned()])
            .collect();
    let listeners = [(); 2].map(|()| listener_with_rules(Some(Arc::new(UnreachableStore))));
    let statuses = assert_paths_agree(listeners, &bodies).await;
    assert_eq!(statuses, ["503", "503", "503", "200", "429", "200", "200", "200", "429", "403", "200"]);
}

/// The settings of the configuration, for checks that name their key and limit, with and without a store.
#[tokio::test]
async fn both_paths_follow_the_settings_for_explicit_checks() {
    let bodies = [r#"{"key":"a","limit":"1/h"}"#, r#"{"key":"a","limit":"1/h"}"#, GOOD].map(str::to_owned);
    for (config, with_store, without_store) in [
        ("", ["200", "429", "200"], ["200", "429", "200"]),
        ("on_failure = \"allow\"", ["200", "429", "200"], ["200"; 3]),
        ("on_failure = \"deny\"", ["200", "429", "200"], ["503"; 3]),
        ("on_failure = \"deny\"\nexpose_headers = true", ["200", "429", "200"], ["503"; 3]),
        ("kill_switch = true", ["200"; 3], ["200"; 3]),
        ("headers = [\"draft-6\"]\nexpose_headers = true", ["200", "429", "200"], ["200", "429", "200"]),
        ("headers = []", ["200", "429", "200"], ["200", "429", "200"]),
    ] {
        let listeners = [(); 2].map(|()| listener_with_config(config, None));
        assert_eq!(assert_paths_agree(listeners, &bodies).await, with_store, "{config}");
        let listeners = [(); 2].map(|()| listener_with_config(config, Some(Arc::new(UnreachableStore))));
        assert_eq!(assert_paths_agree(listeners, &bodies).await, without_store, "{config}");
    }
}

/// Scripts of other origins may read the rate-limit headers, of admissions and of every kind of refusal.
#[tokio::test]
async fn both_paths_expose_the_same_headers_to_other_origins() {
    let config = format!("expose_headers = true\n{RULES}");
    let bodies: Vec<String> =
        ["/json", "/json", "/local", "/local"].iter().map(|path| described(path, "203.0.113.9", "{}")).collect();
    let exposed = responses_of(listener_with_config(&config, None), &[&post("", &bodies[0])]).await;
    assert!(exposed.contains("\r\naccess-control-expose-headers: "), "{exposed}");
    for (is_reachable, expected) in [(true, ["200", "429", "200", "429"]), (false, ["503", "503", "200", "429"])] {
        let store = || (!is_reachable).then(|| Arc::new(UnreachableStore) as _);
        let listeners = [(); 2].map(|()| listener_with_config(&config, store()));
        assert_eq!(assert_paths_agree(listeners, &bodies).await, expected);
    }
}

/// Bans in the store, for the subject of a rule and for an explicit key, with and without an end.
#[tokio::test]
async fn both_paths_give_the_same_responses_to_callers_banned_in_the_store() {
    let explicit = |key: &str| format!(r#"{{"key":"{key}","limit":"10/min"}}"#);
    let together = r#"{"checks":[{"key":"free","limit":"1/s"},{"key":"forever","limit":"9/day"}]}"#;
    let bodies = [
        described("/json", "203.0.113.9", "{}"),
        described("/json", "203.0.113.10", "{}"),
        described("/shadow", "203.0.113.10", "{}"),
        described("/health", "203.0.113.10", "{}"),
        explicit("free"),
        explicit("forever"),
        explicit("a minute"),
        together.to_owned(),
        r#"{"key":"forever","limit":"10/min","cost":0}"#.to_owned(),
    ];
    let bans = [("ip:203.0.113.10", None), ("forever", None), ("a minute", Some(Duration::from_secs(60)))];
    let listeners = [(); 2].map(|()| listener_with_rules(None));
    for (listener, (subject, duration)) in listeners.iter().flat_map(|listener| bans.map(|ban| (listener, ban))) {
        listener.decider.limiter().ban(subject.as_bytes(), duration).await.unwrap();
    }
    let statuses = assert_paths_agree(listeners, &bodies).await;
    assert_eq!(statuses, ["200", "403", "403", "200", "200", "403", "403", "403", "200"]);
}

/// Each error response is counted once by its status, whether the fast path, a handler or hyper writes it.
#[tokio::test]
async fn error_responses_are_counted_by_status_on_every_path() {
    let listener = listener();
    let denied = r#"{"key":"k","limit":"1/h","cost":2}"#;
    let plain = [post("", denied), post("", GOOD), post("", "{"), post("connection: close\r\n", denied)].concat();
    let general = "GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\nGET /docs HTTP/1.1\r\nhost: x\r\n\r\n".to_owned();
    let expecting = post("expect: 100-continue\r\n", "{");
    let too_long = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(70_000));
    let mut statuses: Vec<String> = Vec::new();
    for requests in [plain, general, "no request\r\n\r\n".to_owned(), expecting, too_long] {
        let (mut client, _stage) = connect_to(listener.clone());
        client.write_all(requests.as_bytes()).await.unwrap();
        client.shutdown().await.unwrap();
        let mut received = String::new();
        client.read_to_string(&mut received).await.unwrap();
        // A status line follows the body before it without a line break.
        statuses.extend(received.split("HTTP/1.1 ").skip(1).map(|response| response[..3].to_owned()));
    }
    assert_eq!(statuses, ["429", "200", "400", "429", "404", "200", "400", "100", "400", "431"]);
    let mut counted: Vec<(&str, u64)> = listener.stats.errors.read().collect();
    counted.sort_unstable();
    assert_eq!(counted, [("400", 3), ("404", 1), ("429", 2), ("431", 1)]);
}

#[test]
fn a_date_is_formatted_again_when_the_second_has_changed() {
    let response = Response::new(Bytes::new());
    let mut responses = ResponseBuffer::default();
    let (_stage, context) = ConnectionContext::unshared();
    responses.add(&response, false, &context);
    let date = responses.date.clone();
    // As if it were of another second.
    (responses.second, responses.date) = (responses.second - 1_000, "stale".to_owned());
    responses.add(&response, false, &context);
    let text = String::from_utf8(responses.bytes).unwrap();
    assert!(date.ends_with(" GMT") && text.matches(&date[..16]).count() == 2 && !text.contains("stale"), "{text}");
}

/// The rule must hold on both paths.
#[tokio::test]
async fn a_page_of_another_site_is_rejected_on_both_paths() {
    for (headers, is_accepted) in [
        ("", true),
        ("origin: http://x\r\n", true),
        ("Origin: HTTPS://X\r\nSec-Fetch-Site: same-origin\r\n", true),
        ("sec-fetch-site: none\r\n", true),
        ("origin: https://ops.example\r\n", true),
        ("origin: https://OPS.example\r\nsec-fetch-site: cross-site\r\n", true),
        ("origin: http://ops.example\r\n", false),
        ("origin: https://ops.example:8443\r\n", false),
        ("origin: https://ops.example.attacker.example\r\n", false),
        ("origin: https://attacker.example\r\n", false),
        ("origin: http://x.attacker.example\r\n", false),
        ("origin: http://x:81\r\n", false),
        ("origin: x\r\n", false),
        ("origin: null\r\n", false),
        ("origin:\r\n", false),
        ("origin: \u{e9}\r\n", false),
        ("ORIGIN: http://x\r\norigin: https://attacker.example\r\n", false),
        ("origin: https://ops.example\r\norigin: https://attacker.example\r\n", false),
        ("origin: https://ops.example, https://attacker.example\r\n", false),
        ("origin: https://attacker.example\r\nsec-fetch-site: same-origin\r\n", false),
        ("SEC-FETCH-SITE: cross-site\r\n", false),
        ("sec-fetch-site: same-site\r\n", false),
        ("sec-fetch-site: CROSS-SITE\r\n", false),
        ("sec-fetch-site: none\r\nsec-fetch-site: cross-site\r\n", false),
        ("origin: http://x\r\nsec-fetch-site: cross-site\r\n", false),
        ("sec-fetch-site: a word of the future\r\n", false),
    ] {
        let fast = responses(&[&post(headers, GOOD)]).await;
        let by_hyper = format!("{headers}{BY_HYPER}");
        assert_eq!(fast, responses(&[&post(&by_hyper, GOOD)]).await, "{headers}");
        let expected = if is_accepted { "HTTP/1.1 200 OK\r\n" } else { "HTTP/1.1 403 Forbidden\r\n" };
        assert!(fast.starts_with(expected), "{headers}: {fast}");
        // A rejected request is not charged.
        let listener = listener();
        responses_of(listener.clone(), &[&post(headers, GOOD)]).await;
        let left = if is_accepted { "\"remaining\":8" } else { "\"remaining\":9" };
        assert!(responses_of(listener, &[&post("", GOOD)]).await.contains(left), "{headers}");
        // Routes that change nothing may be read, as a link on another site does.
        let page = format!("GET /openapi.json HTTP/1.1\r\nhost: x\r\n{headers}\r\n");
        assert!(responses(&[&page]).await.starts_with("HTTP/1.1 200 OK\r\n"), "{headers}");
    }
}

/// A page whose name was pointed at this machine after it was loaded sends requests to its own origin.
#[tokio::test]
async fn a_page_of_a_rebound_name_is_rejected_on_both_paths() {
    let origin = "origin: http://HOST\r\n";
    for (host, headers, is_accepted) in [
        // The pages of this listener, under its address or a name that cannot be registered.
        ("127.0.0.1:8080", origin, true),
        ("127.0.0.1", origin, true),
        ("[::1]:8080", origin, true),
        ("10.1.2.3:8080", origin, true),
        ("localhost:8080", "origin: http://HOST\r\nsec-fetch-site: same-origin\r\n", true),
        ("tidegate:8080", origin, true),
        // Names that the operator has given.
        ("gate.example:8080", origin, true),
        ("ops.example", "origin: https://HOST\r\n", true),
        ("other.example", "origin: https://ops.example\r\n", true),
        // A program sends neither header, and may use any name.
        ("tidegate.internal.example:8080", "", true),
        ("attacker.example:8080", "user-agent: curl/8.0\r\n", true),
        // Pages of any other name.
        ("attacker.example:8080", origin, false),
        ("ATTACKER.example", "Origin: http://attacker.EXAMPLE\r\n", false),
        ("attacker.example:8080", "origin: http://HOST\r\nsec-fetch-site: same-origin\r\n", false),
        ("attacker.example:8080", "sec-fetch-site: same-origin\r\n", false),
        ("attacker.example:8080", "sec-fetch-site: none\r\n", false),
        ("localhost.attacker.example", origin, false),
        ("127.0.0.1.attacker.example:8080", origin, false),
        ("localhost.:8080", origin, false),
        ("attacker.example", "origin: https://ops.example\r\norigin: http://HOST\r\n", false),
        ("localhost\r\nhost: attacker.example", "origin: http://localhost\r\n", false),
    ] {
        let case = format!("{host} {headers}");
        let headers = headers.replace("HOST", host);
        let send = async |listener: HttpListener, path: &str, more: &str| {
            let request = post(&format!("{headers}{more}"), GOOD).replace("host: x", &format!("host: {host}"));
            responses_of(Arc::new(listener), &[&request.replace("/v1/check", path)]).await
        };
        let listener = || {
            let origins = vec!["https://ops.example".parse().unwrap()];
            let browsers = BrowserPolicy { origins, admin_hosts: vec!["gate.example".to_owned()] };
            HttpListener::new(Limiter::builder().clock(clock()).build(), IDLE).with_browsers(browsers)
        };
        let fast = send(listener(), "/v1/check", "").await;
        assert_eq!(fast, send(listener(), "/v1/check", BY_HYPER).await, "{case}");
        let expected = if is_accepted { "HTTP/1.1 200 OK\r\n" } else { "HTTP/1.1 403 Forbidden\r\n" };
        assert!(fast.starts_with(expected), "{case}: {fast}");
        let refund = send(listener(), "/v1/refund", "").await;
        assert_eq!(refund.contains("foreign_origin"), !is_accepted, "{case}: {refund}");
        // A page cannot know the token.
        let token = SecretForm::Token.parse(TOKEN).unwrap();
        let authorized = format!("authorization: Bearer {}\r\n", token.reveal());
        let with_token = send(listener().with_token(token), "/v1/check", &authorized).await;
        assert!(with_token.starts_with("HTTP/1.1 200 OK\r\n"), "{case}: {with_token}");
    }
}

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Returns a listener with [`TOKEN`] whose clock stands still.
fn listener_with_token() -> Arc<HttpListener> {
    let listener = HttpListener::new(Limiter::builder().clock(clock()).build(), IDLE);
    Arc::new(listener.with_token(SecretForm::Token.parse(TOKEN).unwrap()))
}

fn bearer(token: &str) -> String {
    format!("authorization: Bearer {token}\r\n")
}

#[tokio::test(start_paused = true)]
async fn both_paths_require_the_token() {
    for (headers, status) in [
        (bearer(TOKEN), 200),
        (format!("AUTHORIZATION:bEARER {TOKEN}\r\n"), 200),
        (bearer(TOKEN) + &bearer("wrong"), 200),
        (bearer("wrong") + &bearer(TOKEN), 401),
        (String::new(), 401),
        (bearer(""), 401),
        (bearer(&TOKEN[1..]), 401),
        (bearer(&format!(" {TOKEN}")), 401),
        (format!("authorization: Basic {TOKEN}\r\n"), 401),
        ("authorization: Bearer\r\n".to_owned(), 401),
        ("authorization:\r\n".to_owned(), 401),
        (format!("x-authorization: Bearer {TOKEN}\r\n"), 401),
    ] {
        let fast = responses_of(listener_with_token(), &[&post(&headers, GOOD)]).await;
        assert!(fast.starts_with(&format!("HTTP/1.1 {status} ")), "{headers}: {fast}");
        let by_hyper = responses_of(listener_with_token(), &[&post(&format!("{headers}{BY_HYPER}"), GOOD)]).await;
        assert_eq!(fast, by_hyper, "{headers}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_correct_token_is_delayed_after_failures_of_its_address_on_both_paths() {
    for by_hyper in ["", BY_HYPER] {
        let listener = listener_with_token();
        let request = |token: &str| post(&format!("{}{by_hyper}", bearer(token)), GOOD);
        let began = Instant::now();
        for _ in 0..5 {
            assert!(responses_of(listener.clone(), &[&request("wrong")]).await.starts_with("HTTP/1.1 401 "));
            assert!(responses_of(listener.clone(), &[&request(TOKEN)]).await.starts_with("HTTP/1.1 200 "));
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        for (token, delay_ms) in [("wrong", 10..=11), (TOKEN, 10..=11), ("wrong", 20..=21), (TOKEN, 20..=21)] {
            let (mut client, _stage) = connect_to(listener.clone());
            let began = Instant::now();
            client.write_all(request(token).as_bytes()).await.unwrap();
            let mut status = [0; 12];
            client.read_exact(&mut status).await.unwrap();
            assert_eq!(status.ends_with(b"200"), token == TOKEN);
            assert!(delay_ms.contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
        }
        assert_eq!(listener.stats.auth_failures.read(), [7, 0]);
    }
}

#[tokio::test]
async fn a_plain_check_with_the_token_is_not_left_to_hyper() {
    let listener = listener_with_token();
    let (mut client, server) = tokio::io::duplex(1 << 20);
    client.write_all(post(&bearer(TOKEN), GOOD).repeat(2).as_bytes()).await.unwrap();
    client.shutdown().await.unwrap();
    serve_plain_checks(&listener, server).await;
    let mut received = String::new();
    client.read_to_string(&mut received).await.unwrap();
    assert_eq!(received.matches("HTTP/1.1 200 OK").count(), 2, "{received}");
}

#[tokio::test]
async fn a_request_in_two_packets_gets_the_same_response_wherever_it_is_cut() {
    let request = post("user-agent: test\r\n", GOOD);
    let whole = responses(&[&request]).await;
    for (at, _) in request.char_indices().skip(1) {
        let (one, other) = request.split_at(at);
        assert_eq!(responses(&[one, other]).await, whole, "cut at {at}");
    }
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let ask = post("", GOOD);
    let other = "GET /v1/check HTTP/1.1\r\nhost: x\r\n\r\n";
    let received = responses(&[&format!("{ask}{ask}{other}{ask}")]).await;
    let statuses: Vec<&str> = received
        .split("\r\n")
        .filter_map(|line| line.rsplit_once("HTTP/1.1 "))
        .map(|(_, status)| &status[..3])
        .collect();
    assert_eq!(statuses, ["200", "200", "405", "200"]);
    let remaining: Vec<&str> = received.split("\"remaining\":").skip(1).map(|rest| &rest[..1]).collect();
    assert_eq!(remaining, ["9", "8", "7"], "{received}");
}

fn plain_check(request: &str) -> Option<RequestHead> {
    match RequestHead::parse(request.as_bytes()) {
        ParsedHead::Complete(head) => head.is_plain.then_some(head),
        ParsedHead::Partial | ParsedHead::Malformed => None,
    }
}

#[test]
fn only_requests_without_anything_to_interpret_are_plain() {
    let plain = [
        post("", GOOD),
        post("", ""),
        post("Connection: Keep-Alive\r\nX-Other: yes\r\n", GOOD),
        post("", GOOD).replace("content-length", "CONTENT-Length"),
        post("", GOOD) + "the next request",
    ];
    for request in plain {
        let check = plain_check(&request).unwrap_or_else(|| panic!("{request}"));
        assert_eq!(check.body_at, request.find("\r\n\r\n").unwrap() + 4);
        assert!(["", GOOD].contains(&&request[check.body_at..check.end]), "{request}");
    }
    let good = post("", GOOD);
    for request in [
        good[..40].to_owned(),
        good.replace("POST", "PUT"),
        good.replace("/v1/check", "/v1/check?x"),
        good.replace("/v1/check", "http://x/v1/check"),
        good.replace("HTTP/1.1", "HTTP/1.0"),
        good.replace("content-length", "x-length"),
        good.replace("content-length: 34", "content-length: +34"),
        good.replace("content-length: 34", "content-length: 0x22"),
        good.replace("content-length: 34", "content-length: 34, 34"),
        good.replace("content-length: 34", "content-length: 00000000000000000000034"),
        good.replace("content-length: 34", "content-length:"),
        good.replace("content-length:", "content-length :"),
        post("content-length: 34\r\n", GOOD),
        post("content-length: 33\r\n", GOOD),
        good.replace("content-length: 34", "content-length: 524289"),
        post(&bearer("one"), GOOD).replace("host: x", "authorization: two"),
        post("transfer-encoding: chunked\r\n", GOOD),
        post("Transfer-Encoding: identity\r\n", GOOD),
        post("connection: close\r\n", GOOD),
        post("connection: keep-alive, upgrade\r\n", GOOD),
        post("upgrade: h2c\r\n", GOOD),
        post("expect: 100-continue\r\n", GOOD),
        post("Origin: http://x\r\n", GOOD),
        post("Sec-Fetch-Site: none\r\n", GOOD),
        post(" folded: line\r\n", GOOD),
        post("no colon\r\n", GOOD),
        post(&"x: y\r\n".repeat(HEADERS_MAX), GOOD),
        "nonsense\r\n\r\n".to_owned(),
        String::new(),
    ] {
        assert!(plain_check(&request).is_none(), "{request}");
    }
}

/// hyper is not used for an incomplete request, and never for a plain one.
#[tokio::test(start_paused = true)]
async fn a_plain_request_stays_on_the_fast_path_wherever_it_is_cut() {
    let request = post("", GOOD);
    let head = request.len() - GOOD.len();
    for cuts in [vec![], vec![head], vec![1], vec![head - 1], vec![head + 1], vec![head, head + 1], vec![2, head - 3]] {
        let listener = HttpListener::new(Limiter::memory(), IDLE);
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let serving = tokio::spawn(async move { serve_plain_checks(&listener, server).await });
        for _ in 0..2 {
            let mut from = 0;
            for &to in cuts.iter().chain([&request.len()]) {
                client.write_all(&request.as_bytes()[from..to]).await.unwrap();
                tokio::time::sleep(Duration::from_millis(500)).await;
                from = to;
            }
        }
        client.shutdown().await.unwrap();
        let mut received = String::new();
        client.read_to_string(&mut received).await.unwrap();
        assert_eq!(received.matches("HTTP/1.1 200 OK").count(), 2, "cut at {cuts:?}: {received}");
        serving.await.unwrap();
    }
}

/// Serves a connection until it ends. Panics if a request is left to hyper.
async fn serve_plain_checks(listener: &HttpListener, server: DuplexStream) {
    let (_stage, context) = ConnectionContext::unshared();
    let by_hyper = |_: Request<RequestBody>| async { panic!("a check was left to hyper") };
    serve(server, IDLE, context, Some(PlainChecks { listener, peer: PEER }), by_hyper).await.unwrap();
}

/// hyper would hold its buffers for as long as the check waits.
#[tokio::test]
async fn a_plain_check_that_waits_is_not_left_to_hyper() {
    let listener = HttpListener::new(Limiter::memory(), IDLE);
    let (mut client, server) = tokio::io::duplex(1 << 20);
    let waiting = post("", r#"{"key":"a","limit":"10/min","wait_ms":60000}"#);
    client.write_all((waiting.repeat(2) + &post("", GOOD)).as_bytes()).await.unwrap();
    client.shutdown().await.unwrap();
    serve_plain_checks(&listener, server).await;
    let mut received = String::new();
    client.read_to_string(&mut received).await.unwrap();
    assert_eq!(received.matches("HTTP/1.1 200 OK").count(), 3, "{received}");
}

/// Returns a chunked check, with `extension` behind the size of its first chunk and `trailers` at its end.
fn chunked(headers: &str, extension: &str, trailers: &str) -> String {
    let (first, rest) = GOOD.split_at(16);
    format!(
        "POST /v1/check HTTP/1.1\r\nhost: x\r\n{headers}transfer-encoding: chunked\r\n\r\n\
         10{extension}\r\n{first}\r\n{:X}\r\n{rest}\r\n0\r\n{trailers}\r\n",
        rest.len()
    )
}

/// Each request is followed by a plain check, which arrives in the same packet, and by another one.
#[tokio::test]
async fn hyper_reads_exactly_one_request() {
    let plain = post("", GOOD);
    let lines = GOOD.replace(',', ",\n\n");
    for request in [
        chunked("", "", ""),
        chunked("", ";x=y", "trailer: x\r\nother: y\r\n"),
        chunked("connection: keep-alive, te\r\n", "", ""),
        post(BY_HYPER, GOOD),
        post(BY_HYPER, &lines),
        post("content-length: 34\r\n", GOOD),
        post("expect: 100-continue\r\n", GOOD),
        post("connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n", GOOD),
        post(&"x: y\r\n".repeat(98), GOOD),
    ] {
        let (one, other) = request.split_at(request.len() - 40);
        let (whole, rest) = (format!("{request}{plain}"), format!("{other}{plain}{plain}"));
        for pieces in [[&whole[..], &plain], [one, &rest]] {
            let received = responses(&pieces).await;
            let remaining: Vec<&str> = received.split("\"remaining\":").skip(1).map(|rest| &rest[..1]).collect();
            assert_eq!(remaining, ["9", "8", "7"], "{request}: {received}");
        }
    }
}

#[tokio::test]
async fn a_request_whose_end_is_unknown_is_the_last_one() {
    let chunk = |body: &str| format!("POST /v1/check HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n{body}");
    for (request, status) in [
        (chunk("123456789123456789\r\n"), "400"),
        (chunk("\r\n"), "400"),
        (chunk("x"), "400"),
        (chunk("5\r\nabcdef\r\n"), "400"),
        ("POST /v1/check HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n".to_owned(), "400"),
        ("POST /v1/check HTTP/1.1\r\ncontent-length: 600000\r\n\r\n".to_owned(), "413"),
        ("GET /docs HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n".to_owned(), "400"),
        // hyper ignores the length, and trusts the client no further.
        (chunked("content-length: 5\r\n", "", ""), "200"),
        ("nonsense\r\n".to_owned(), "400"),
        (post(&"x: y\r\n".repeat(99), GOOD), "431"),
    ] {
        let received = responses(&[&request, &post("", GOOD)]).await;
        assert!(received.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {received}");
        assert_eq!(received.matches("HTTP/1.1 ").count(), 1, "{request}: {received}");
    }
}

/// The handler is dropped, and the connection does not count towards the limit any more.
#[tokio::test]
async fn a_connection_ends_when_its_client_disconnects_before_the_response() {
    for request in ["GET /slow HTTP/1.1\r\n\r\n", "GET /slow HTTP/1.1\r\n\r\nGET /slow HTTP/1.1\r\nhal"] {
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let (_stage, context) = ConnectionContext::unshared();
        client.write_all(request.as_bytes()).await.unwrap();
        let never = |_: Request<RequestBody>| std::future::pending();
        let serving = serve(server, IDLE, context, None, never);
        let leaving = async {
            tokio::task::yield_now().await;
            drop(client);
        };
        let (served, ()) = tokio::join!(serving, leaving);
        served.unwrap();
    }
}

#[tokio::test]
async fn a_connection_continues_after_hyper_has_answered_unless_hyper_would_close_it() {
    let ask = post("", GOOD);
    let get = "GET /v1/check HTTP/1.1\r\nhost: x\r\n\r\n";
    for (first, continues) in [
        (get.to_owned(), true),
        (ask.replace("/v1/check", "/v1/other"), false),
        (get.replace("host: x", "connection: close"), false),
        (get.replace("HTTP/1.1", "HTTP/1.0"), false),
        (get.replace("HTTP/1.1", "HTTP/1.0").replace("host: x", "connection: keep-alive"), true),
        ("HEAD /docs HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), true),
    ] {
        let received = responses(&[&first, &ask]).await;
        assert_eq!(received.matches("\"remaining\":9").count(), usize::from(continues), "{first}: {received}");
        let says_close = received.to_ascii_lowercase().contains("\r\nconnection: close\r\n");
        assert_eq!(says_close, !continues && !first.contains("HTTP/1.0"), "{first}: {received}");
    }
}

/// The oldest large unfinished request is dropped, and small ones are not affected.
#[tokio::test(start_paused = true)]
async fn unfinished_requests_are_bounded_in_bytes_for_all_connections_together() {
    const LARGE: usize = 50_000;
    let evictions = Arc::new(AtomicU64::new(0));
    // Five of them, and what hyper needs for two.
    let budget = EvictingBudget::new(5 * LARGE + 90_000, evictions.clone());
    let (_stage, shutdown) = Shutdown::channel();
    let connect = || {
        let (client, server) = tokio::io::duplex(1 << 20);
        let receiving = Receiving::new(budget.clone());
        let listener = Arc::new(HttpListener::new(Limiter::memory(), IDLE));
        let stats = listener.stats.clone();
        let context = ConnectionContext { shutdown: shutdown.clone(), receiving, slot: None, stats };
        tokio::spawn(async move { drop(listener.serve_stream(server, PEER, context).await) });
        client
    };
    let body = format!("{}{GOOD}", " ".repeat(LARGE));
    let large = |headers: &str| post(headers, &body);
    let half = |headers: &str| large(headers)[..LARGE].to_owned();
    let mut all = Vec::new();
    // On the fast path and on the general one.
    for headers in ["", "", "", "expect: 100-continue\r\n", "", "expect: 100-continue\r\n", ""] {
        let mut client = connect();
        client.write_all(half(headers).as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
        all.push(client);
        let mut small = connect();
        small.write_all(post("", GOOD).as_bytes()).await.unwrap();
        small.read_exact(&mut [0; 15]).await.unwrap();
    }
    assert_eq!(evictions.load(Ordering::Relaxed), 2);
    for (index, mut client) in all.into_iter().enumerate() {
        let _ = client.write_all(&large("").as_bytes()[LARGE..]).await;
        client.shutdown().await.unwrap();
        let mut received = String::new();
        client.read_to_string(&mut received).await.unwrap();
        match index {
            0 | 1 => assert!(
                received.starts_with("HTTP/1.1 503 ") && received.contains("\r\nconnection: close\r\n"),
                "{received}"
            ),
            2 | 4 | 6 => assert!(received.starts_with("HTTP/1.1 200 "), "{index}: {received}"),
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_evicted_request_that_hyper_reads_is_answered_with_503() {
    let budget = EvictingBudget::new(100_000, Arc::default());
    let (_stage, shutdown) = Shutdown::channel();
    let connect = || {
        let (client, server) = tokio::io::duplex(1 << 20);
        let listener = listener();
        let (receiving, stats) = (Receiving::new(budget.clone()), listener.stats.clone());
        let context = ConnectionContext { shutdown: shutdown.clone(), receiving, slot: None, stats };
        tokio::spawn(async move { drop(listener.serve_stream(server, PEER, context).await) });
        client
    };
    let mut clients = [(); 3].map(|()| connect());
    for (client, lines) in clients.iter_mut().zip([1_000, 5_000, 9_000]) {
        let body = "1\r\n\n\r\n".repeat(lines);
        let half = format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{body}");
        client.write_all(half.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let [mut first, mut second, mut third] = clients;
    let mut received = String::new();
    first.read_to_string(&mut received).await.unwrap();
    assert!(received.starts_with("HTTP/1.1 503 ") && received.contains("\r\nconnection: close\r\n"), "{received}");
    assert!(received.ends_with("this request was dropped before it was complete\"}"), "{received}");
    drop(third.write_all(b"0\r\n\r\n").await);
    for (client, status) in [(&mut third, "400"), (&mut second, "503")] {
        let mut begin = [0; 12];
        client.read_exact(&mut begin).await.unwrap();
        assert_eq!(&begin[9..], status.as_bytes());
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_is_awaited_during_a_shutdown_and_no_longer_than_its_deadline() {
    let request = post("", GOOD);
    let head = request.len() - GOOD.len();
    let (mut client, stage) = connect();
    client.write_all(&request.as_bytes()[..head]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    stage.send(ShutdownStage::Closing).unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    client.write_all(GOOD.as_bytes()).await.unwrap();
    let mut received = String::new();
    client.read_to_string(&mut received).await.unwrap();
    assert!(received.starts_with("HTTP/1.1 200 "), "{received}");

    let (mut client, _stage) = connect();
    client.write_all(&request.as_bytes()[..head]).await.unwrap();
    let asked = tokio::time::Instant::now();
    let mut received = String::new();
    client.read_to_string(&mut received).await.unwrap();
    assert!(received.starts_with("HTTP/1.1 408 "), "{received}");
    assert_eq!(asked.elapsed().as_secs(), 10);
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_ends_after_its_time_and_on_shutdown() {
    let mut begin = [0; 9];
    let (mut client, _stage) = connect();
    client.write_all(post("", GOOD).as_bytes()).await.unwrap();
    client.read_exact(&mut begin).await.unwrap();
    let mut rest = String::new();
    tokio::time::sleep(Duration::from_secs(50)).await;
    client.write_all(post("", GOOD).as_bytes()).await.unwrap();
    let asked = tokio::time::Instant::now();
    client.read_to_string(&mut rest).await.unwrap();
    assert!(rest.contains("\"remaining\":8"), "{rest}");
    assert_eq!(asked.elapsed().as_secs(), 60, "from the last request on");

    let (mut client, stage) = connect();
    client.write_all(post("", GOOD).as_bytes()).await.unwrap();
    client.read_exact(&mut begin).await.unwrap();
    stage.send(ShutdownStage::Closing).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(59), client.read_to_string(&mut rest)).await;
    ended.expect("the shutdown ends it").unwrap();
    assert_eq!(&begin, b"HTTP/1.1 ");
}

#[tokio::test(start_paused = true)]
async fn while_draining_pipelined_requests_are_all_answered_and_the_last_response_says_close() {
    let other = "GET /v1/check HTTP/1.1\r\nhost: x\r\n\r\n";
    for (sent, statuses) in
        [(post("", GOOD) + &post("", GOOD), ["200", "200"]), (post("", GOOD) + other, ["200", "405"])]
    {
        let (mut client, stage) = connect();
        stage.send(ShutdownStage::Draining).unwrap();
        tokio::time::sleep(IDLE / 2).await;
        client.write_all(sent.as_bytes()).await.unwrap();
        let mut received = String::new();
        let ended = tokio::time::timeout(IDLE / 4, client.read_to_string(&mut received)).await;
        ended.expect("the connection ends with the response").unwrap();
        let responses: Vec<&str> = received.split("HTTP/1.1 ").skip(1).collect();
        assert_eq!(responses.iter().map(|response| &response[..3]).collect::<Vec<_>>(), statuses, "{received}");
        let are_last: Vec<bool> =
            responses.iter().map(|response| response.contains("\r\nconnection: close\r\n")).collect();
        assert_eq!(are_last, [false, true], "{received}");
    }
}
