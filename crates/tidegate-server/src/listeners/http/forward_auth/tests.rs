//! The endpoints of proxies, without a proxy. `forward_auth.rs` of the command's tests runs real ones.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use http_body_util::{BodyExt, Empty};
use serde_json::Value;
use tidegate::Limiter;

use super::super::test_support::{IDLE, UnreachableStore, listener_with_config};
use http::Method;

use super::*;

const PROXY: &str = "10.0.0.1";
const VISITOR: &str = "203.0.113.9";
const FORMS: [&str; 2] = ["/v1/forward-auth", "/v1/forward-auth/nginx"];

const RULES: &str = r#"
trusted_proxies = ["10.0.0.0/8"]
path_bytes_max = 64
[[bans]]
by = "ip"
value = "198.51.100.7"
until = "2099-01-01T00:00:00Z"
[[rules]]
name = "shorten"
match = { path = "/shorten", methods = ["POST"], host = "example.com" }
by = ["ip"]
limits = ["1/h"]
on_failure = "deny"
[[rules]]
name = "text"
match = { path = "/text" }
by = ["ip"]
limits = ["1/h"]
body = "text"
[[rules]]
name = "page"
match = { path = "/page" }
by = ["ip"]
limits = ["1/h"]
body = { template = "<h1>Slow\ndown</h1>\n<p>{limit}</p>", content_type = "text/html; charset=utf-8" }
"#;

/// The headers of a proxy that asks about a request.
fn asking(method: &str, uri: &str, visitor: &str) -> Vec<(String, String)> {
    let headers = [
        ("host", "tidegate:8080"),
        ("x-forwarded-method", method),
        ("x-forwarded-uri", uri),
        ("x-forwarded-host", "example.com"),
        ("x-forwarded-for", visitor),
    ];
    headers.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
}

fn shorten() -> Vec<(String, String)> {
    asking("POST", "/shorten?x=1", VISITOR)
}

fn with(mut headers: Vec<(String, String)>, name: &str, value: &str) -> Vec<(String, String)> {
    headers.push((name.to_owned(), value.to_owned()));
    headers
}

fn without(mut headers: Vec<(String, String)>, name: &str) -> Vec<(String, String)> {
    headers.retain(|(header, _)| header != name);
    headers
}

/// The status, headers and body of an answer.
#[derive(PartialEq, Debug)]
struct Answer {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

async fn send(listener: &HttpListener, method: &str, target: &str, headers: &[(String, String)], peer: &str) -> Answer {
    let mut request = Request::builder().method(method).uri(target);
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let request = request.body(Empty::<Bytes>::new()).unwrap();
    let response = listener.answer_authenticated(request, peer.parse().unwrap()).await;
    let (head, body) = response.into_parts();
    let text = |value: &HeaderValue| String::from_utf8(value.as_bytes().to_vec()).unwrap();
    Answer {
        status: head.status.as_u16(),
        headers: head.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect(),
        body: String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap(),
    }
}

async fn ask(listener: &HttpListener, target: &str, headers: &[(String, String)]) -> Answer {
    send(listener, "GET", target, headers, PROXY).await
}

fn listener() -> Arc<HttpListener> {
    listener_with_config(RULES, None)
}

#[tokio::test]
async fn the_plain_form_answers_200_or_the_refusal() {
    let listener = listener();
    let admitted = ask(&listener, FORMS[0], &shorten()).await;
    assert_eq!((admitted.status, &*admitted.body), (200, ""));
    assert_eq!(admitted.header("x-ratelimit-remaining"), Some("0"));
    assert_eq!(admitted.header("ratelimit-policy"), Some("\"per-hour\";q=1;w=3600"));
    let denied = ask(&listener, FORMS[0], &shorten()).await;
    assert_eq!(denied.status, 429);
    for (name, value) in [
        ("retry-after", "3600"),
        ("cache-control", "no-store"),
        ("content-type", "application/json"),
        ("x-ratelimit-limit", "1"),
        ("ratelimit", "\"per-hour\";r=0;t=3600"),
    ] {
        assert_eq!(denied.header(name), Some(value), "{name}");
    }
    let body: Value = serde_json::from_str(&denied.body).unwrap();
    assert_eq!((&body["error"], &body["rule"]), (&"rate_limited".into(), &"shorten".into()));
}

#[tokio::test]
async fn the_form_for_nginx_has_the_same_refusal_in_headers() {
    for (uri, method) in [("/shorten", "POST"), ("/text", "GET"), ("/page", "GET"), ("/unlimited", "GET")] {
        let headers = asking(method, uri, VISITOR);
        let (plain, nginx) = (listener(), listener());
        for _ in 0..2 {
            let (expected, mut answer) = (ask(&plain, FORMS[0], &headers).await, ask(&nginx, FORMS[1], &headers).await);
            assert_eq!(answer.body, "", "{uri}");
            if expected.status == 200 {
                assert_eq!(answer, Answer { status: 204, ..expected }, "{uri}");
                continue;
            }
            assert_eq!(answer.status, 403, "{uri}");
            let mut moved = |name: &str| answer.headers.remove(name).unwrap_or_else(|| panic!("no {name}"));
            let refusal = Answer {
                status: moved("x-tidegate-status").parse().unwrap(),
                body: moved("x-tidegate-body"),
                headers: BTreeMap::from([("content-type".to_owned(), moved("x-tidegate-content-type"))]),
            };
            let headers = answer.headers.into_iter().chain(refusal.headers).collect();
            let one_line = expected.body.replace('\n', " ").trim().to_owned();
            assert_eq!(Answer { headers, ..refusal }, Answer { body: one_line, ..expected }, "{uri}");
        }
    }
}

#[tokio::test]
async fn a_body_that_is_too_long_for_a_header_is_left_out() {
    let rules = |letters: usize| {
        let body = format!("body = {{ template = \"{}\", content_type = \"text/plain\" }}", "ü".repeat(letters));
        RULES.replace("body = \"text\"", &body)
    };
    for (letters, fits) in [(4 * 1024, true), (4 * 1024 + 1, false)] {
        let listener = listener_with_config(&rules(letters), None);
        let headers = asking("GET", "/text", VISITOR);
        ask(&listener, FORMS[1], &headers).await;
        let denied = ask(&listener, FORMS[1], &headers).await;
        assert_eq!((denied.status, denied.header("x-tidegate-status")), (403, Some("429")));
        assert_eq!(denied.header("x-tidegate-body").map(str::len), fits.then_some(8 * 1024));
        assert_eq!(denied.header("x-tidegate-content-type"), fits.then_some("text/plain"));
    }
}

#[tokio::test]
async fn bans_long_paths_and_a_store_that_is_down_have_their_own_status() {
    let down = listener_with_config(RULES, Some(Arc::new(UnreachableStore)));
    let long = format!("/{}", "x".repeat(64));
    for (listener, headers, status, error) in [
        (listener(), asking("GET", "/", "198.51.100.7"), 403, "banned"),
        (listener(), asking("GET", &long, VISITOR), 414, "path_too_long"),
        (down, shorten(), 503, "unavailable"),
    ] {
        let plain = ask(&listener, FORMS[0], &headers).await;
        let body: Value = serde_json::from_str(&plain.body).unwrap();
        assert_eq!((plain.status, body["error"].as_str()), (status, Some(error)));
        let nginx = ask(&listener, FORMS[1], &headers).await;
        assert_eq!((nginx.status, nginx.header("x-tidegate-status")), (403, Some(&*status.to_string())));
        assert_eq!(nginx.header("x-tidegate-body"), Some(&*plain.body));
    }
}

#[tokio::test]
async fn a_header_that_is_missing_empty_or_repeated_is_named_in_a_400() {
    let listener = listener();
    for form in FORMS {
        for name in ["X-Forwarded-Method", "X-Forwarded-Uri", "X-Forwarded-Host"] {
            let lower = name.to_ascii_lowercase();
            let missing = without(shorten(), &lower);
            for headers in [
                missing.clone(),
                with(missing.clone(), &lower, ""),
                with(shorten(), &lower, "/other"),
                with(shorten(), &lower, ""),
            ] {
                let answer = ask(&listener, form, &headers).await;
                assert_eq!(answer.status, 400, "{form} {name}");
                assert!(answer.body.contains(&format!("expected the header {name} exactly once")), "{}", answer.body);
            }
        }
        let missing = without(shorten(), "x-forwarded-for");
        for headers in [missing.clone(), with(missing, "x-forwarded-for", " ")] {
            let answer = ask(&listener, form, &headers).await;
            assert_eq!(answer.status, 400);
            assert!(answer.body.contains("client's address in the header x-forwarded-for"), "{}", answer.body);
        }
    }
    assert_eq!(ask(&listener, FORMS[0], &shorten()).await.status, 200, "none of them was charged");
}

#[tokio::test]
async fn the_forwarding_header_of_the_rules_is_required_instead_of_x_forwarded_for() {
    let listener = listener_with_config(&format!("forwarding_header = \"CF-Connecting-IP\"\n{RULES}"), None);
    let answer = ask(&listener, FORMS[0], &shorten()).await;
    assert_eq!(answer.status, 400);
    assert!(answer.body.contains("cf-connecting-ip"), "{}", answer.body);
    let headers = with(without(shorten(), "x-forwarded-for"), "cf-connecting-ip", "203.0.113.10");
    assert_eq!(ask(&listener, FORMS[0], &headers).await.status, 200);
    let forged = with(headers, "x-forwarded-for", "203.0.113.11");
    assert_eq!(ask(&listener, FORMS[0], &forged).await.status, 429, "the client is that of the configured header");
}

#[tokio::test]
async fn visitors_are_counted_by_the_address_that_the_proxy_reports() {
    let listener = listener();
    for visitor in ["203.0.113.1", "203.0.113.2", "6.6.6.6, 203.0.113.3", "6.6.6.6, 203.0.113.4, 10.0.0.2"] {
        assert_eq!(ask(&listener, FORMS[0], &asking("POST", "/shorten", visitor)).await.status, 200, "{visitor}");
    }
    for visitor in ["203.0.113.1", "203.0.113.2", "7.7.7.7, 203.0.113.3", "203.0.113.4"] {
        assert_eq!(ask(&listener, FORMS[0], &asking("POST", "/shorten", visitor)).await.status, 429, "{visitor}");
    }
}

#[tokio::test]
async fn a_caller_that_is_not_a_trusted_proxy_gets_400() {
    let listener = listener();
    for form in FORMS {
        let answer = send(&listener, "GET", form, &shorten(), "192.0.2.1").await;
        assert_eq!(answer.status, 400);
        assert!(answer.body.contains("trusted_proxies") && !answer.body.contains("192.0.2.1"), "{}", answer.body);
    }
    let mapped = send(&listener, "GET", FORMS[0], &shorten(), "::ffff:10.0.0.1").await;
    assert_eq!(mapped.status, 200, "a trusted proxy, as a dual-stack listener sees it");
}

#[tokio::test]
async fn an_instance_without_rules_says_so() {
    let listener = HttpListener::new(Limiter::memory(), IDLE);
    for form in FORMS {
        let answer = ask(&listener, form, &shorten()).await;
        assert_eq!(answer.status, 400);
        assert!(answer.body.contains("--config"), "{}", answer.body);
    }
}

#[tokio::test]
async fn the_method_and_the_query_of_the_asking_request_change_nothing() {
    let listener = listener();
    assert_eq!(send(&listener, "PUT", "/v1/forward-auth?deny=200&cost=0", &shorten(), PROXY).await.status, 200);
    assert_eq!(send(&listener, "OPTIONS", "/v1/forward-auth?status=200", &shorten(), PROXY).await.status, 429);
    for unknown in ["/v1/forward-auth/", "/v1/forward-auth/caddy", "/v1/forward-auth/nginx/"] {
        assert_eq!(ask(&listener, unknown, &shorten()).await.status, 404, "{unknown}");
    }
}

#[tokio::test]
async fn token_and_origin_are_those_of_the_visitor_and_are_not_checked() {
    let token = crate::secret::SecretForm::Token.parse("planted-token-of-the-listener").unwrap();
    let listener = (*listener()).clone().with_token(token);
    let headers = with(with(shorten(), "authorization", "Bearer visitor"), "origin", "https://elsewhere.example");
    let headers = with(headers, "sec-fetch-site", "cross-site");
    assert_eq!(ask(&listener, FORMS[0], &headers).await.status, 200);
    assert_eq!(ask(&listener, FORMS[1], &headers).await.header("x-tidegate-status"), Some("429"));
}

#[test]
fn the_described_request_has_only_what_the_visitor_sent() {
    let listener = listener();
    let mut headers = HeaderMap::new();
    let own = [("connection", "close"), ("content-length", "7"), ("te", "trailers"), ("upgrade", "websocket")];
    let kept = [("accept", "text/html"), ("cookie", "a=1"), ("cookie", "b=2"), ("x-forwarded-proto", "https")];
    for (name, value) in shorten().iter().map(|(name, value)| (&**name, &**value)).chain(own).chain(kept) {
        headers.append(HeaderName::try_from(name).unwrap(), value.parse().unwrap());
    }
    let rules = listener.decider.rules().unwrap();
    let request = visitor_request(rules.identifier().proxies(), headers, PROXY.parse().unwrap()).unwrap();
    assert_eq!((request.method(), request.uri().to_string()), (&Method::POST, "/shorten?x=1".to_owned()));
    let mut expected = vec![("host", "example.com"), ("x-forwarded-for", VISITOR)];
    expected.extend(kept);
    let seen = request.headers().iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap()));
    assert_eq!(seen.collect::<BTreeSet<_>>(), expected.into_iter().collect());
}

#[tokio::test]
async fn a_malformed_method_or_target_is_refused_as_the_visitors_error() {
    let listener = listener();
    for (method, uri) in
        [("PO ST", "/"), ("GET", "shorten"), ("GET", "*"), ("GET", "http://a/"), ("GET", "/a<b>"), ("GET", "/a#b")]
    {
        let headers = asking(method, uri, VISITOR);
        assert_eq!(ask(&listener, FORMS[0], &headers).await.status, 400, "{method} {uri}");
        let nginx = ask(&listener, FORMS[1], &headers).await;
        assert_eq!((nginx.status, nginx.header("x-tidegate-status")), (403, Some("400")), "{method} {uri}");
    }
    assert_eq!(ask(&listener, FORMS[0], &asking("GET", "//host/a/../%2e?x", VISITOR)).await.status, 200);
}

/// The layer refuses a gRPC request with status 200, which a proxy takes for an admission.
#[tokio::test]
async fn a_refused_grpc_request_is_not_answered_with_200() {
    let listener = listener();
    let headers = with(shorten(), "content-type", "application/grpc");
    assert_eq!(ask(&listener, FORMS[0], &headers).await.status, 200);
    assert_eq!(ask(&listener, FORMS[0], &headers).await.status, 429);
}

#[tokio::test(start_paused = true)]
async fn a_leaky_bucket_delays_the_answer() {
    let rules = "trusted_proxies = [\"10.0.0.0/8\"]\n[[rules]]\nname = \"slow\"\nby = [\"ip\"]\nlimits = [\"1/10s leaky-bucket queue=9\"]";
    let listener = listener_with_config(rules, None);
    let began = Instant::now();
    for (status, seconds) in [(200, 0), (200, 10), (200, 30), (429, 30)] {
        assert_eq!(ask(&listener, FORMS[0], &shorten()).await.status, status);
        assert_eq!(began.elapsed().as_secs(), seconds);
    }
}

#[tokio::test]
async fn every_answer_is_timed() {
    let listener = listener();
    ask(&listener, FORMS[0], &shorten()).await;
    ask(&listener, FORMS[1], &shorten()).await;
    ask(&listener, FORMS[1], &without(shorten(), "x-forwarded-uri")).await;
    assert_eq!(listener.stats.request_times.count(), 3);
}
