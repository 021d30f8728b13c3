//! Compares the documents with the listeners: every documented status, header, content type, schema and field with real
//! responses.

mod admin;
mod forward_auth;
mod patterns;
mod schema;

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use http::{Method, Request};
use http_body_util::{BodyExt, Empty};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use tidegate::{Limiter, Source};

use self::schema::{Fields, validate};
use super::*;
use crate::budget::{EvictingBudget, Receiving};
use crate::listener::ConnectionContext;
use crate::listeners::http::HttpListener;
use crate::listeners::http::refund;
use crate::listeners::http::request::CheckRequest;
use crate::listeners::http::test_support::{IDLE, PEER, UnreachableStore, clock, described, listener_with_rules};
use crate::receipt_secret::ReceiptSecret;
use crate::secret::SecretForm;

/// The document of the HTTP listener.
static HTTP_DOCUMENT: LazyLock<Value> = LazyLock::new(|| HTTP.parsed());
/// The page about the HTTP API.
const HTTP_PAGE: &str = include_str!("../../../../docs/http-api.md");
/// The document of the admin listener.
static ADMIN_DOCUMENT: LazyLock<Value> = LazyLock::new(|| ADMIN.parsed());

/// A response as it was sent.
#[derive(Debug)]
struct Received {
    status: String,
    headers: Vec<(String, String)>,
    body: String,
}

/// Sends bytes to the HTTP listener on a connection of their own, and returns the last response.
async fn send(listener: Arc<HttpListener>, receive_bytes: usize, request: &str) -> Received {
    let serve = |server, context| async move { drop(listener.serve_stream(server, PEER, context).await) };
    exchange(receive_bytes, request, serve).await
}

/// Sends bytes on a connection of their own, which `serve` serves, and returns the last response.
async fn exchange<F>(
    receive_bytes: usize,
    request: &str,
    serve: impl FnOnce(DuplexStream, ConnectionContext) -> F,
) -> Received
where
    F: Future<Output = ()> + Send + 'static,
{
    let (mut client, server) = tokio::io::duplex(1 << 20);
    let (_stage, context) = ConnectionContext::unshared();
    let receiving = Receiving::new(EvictingBudget::new(receive_bytes, Arc::default()));
    tokio::spawn(serve(server, ConnectionContext { receiving, ..context }));
    client.write_all(request.as_bytes()).await.unwrap();
    let mut received = String::new();
    // Every connection ends after its idle timeout, in virtual time.
    tokio::time::timeout(Duration::from_secs(600), client.read_to_string(&mut received)).await.unwrap().unwrap();
    let (_, last) = received.rsplit_once("HTTP/1.1 ").unwrap_or_else(|| panic!("no response to {request:.200}"));
    let (head, body) = last.split_once("\r\n\r\n").unwrap();
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap()[..3].to_owned();
    let header = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned())).unwrap();
    Received { status, headers: lines.map(header).collect(), body: body.to_owned() }
}

fn post(headers: &str, body: &str) -> String {
    format!("POST /v1/check HTTP/1.1\r\nhost: x\r\n{headers}content-length: {}\r\n\r\n{body}", body.len())
}

/// Provokes every response that the listener can give to a check.
async fn all_responses() -> Vec<Received> {
    const ENOUGH: usize = 1 << 20;
    const HERE: &str = "203.0.113.9";
    let by_rules = |path: &str, peer: &str| post("", &described(path, peer, "{}"));
    let one = r#"{"key":"user:42","limit":"1/min"}"#;
    let together =
        r#"{"checks":[{"key":"a","limit":"2/h leaky-bucket"},{"key":"a","limit":"9/day token-bucket burst=3"}]}"#;
    let requests = [
        ("200", post("", one)),
        ("200", post("", r#"{"key":"user:42","limit":"1/min","cost":0}"#)),
        ("200", post("", together)),
        ("200", by_rules("/json", HERE)),
        ("200", by_rules("/health", HERE)),
        ("400", post("", "{}")),
        ("400", post("", r#"{"key":"a","limit":"1/999day"}"#)),
        ("403", by_rules("/json", "198.51.100.7")),
        ("403", by_rules("/json", "198.51.100.8")),
        ("403", post("origin: https://attacker.example\r\n", one)),
        ("405", "GET /v1/check HTTP/1.1\r\nhost: x\r\n\r\n".to_owned()),
        ("408", post("", &format!("{one}  ")).trim_end().to_owned()),
        ("413", "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: 600000\r\n\r\n".to_owned()),
        ("414", by_rules(&"/long".repeat(20), HERE)),
        ("429", post("", one).repeat(2)),
        ("429", post("", r#"{"key":"a","limit":"1/min","cost":2}"#)),
        ("429", by_rules("/json", HERE).repeat(2)),
        ("429", by_rules("/local", HERE).repeat(2)),
        ("429", post("", &described("/plan", HERE, r#"{"x-api-key":"planted-pro"}"#)).repeat(4)),
        ("429", post("", &described("/json", HERE, r#"{"content-type":"application/grpc"}"#)).repeat(2)),
        ("429", post("", r#"{"key":"a","limit":"1/min","cost":2,"wait_ms":1}"#)),
        ("431", format!("GET / HTTP/1.1\r\nhost: x\r\nlarge: {}\r\n\r\n", "x".repeat(100_000))),
    ];
    let mut all = Vec::new();
    for (status, request) in requests {
        let response = send(listener_with_rules(None), ENOUGH, &request).await;
        assert_eq!(response.status, status, "{request:.200}: {response:?}");
        all.push(response);
    }
    for path in ["/json", "/problem", "/text", "/local", "/allow"] {
        let response = send(listener_with_rules(Some(Arc::new(UnreachableStore))), ENOUGH, &by_rules(path, HERE)).await;
        let status = if ["/local", "/allow"].contains(&path) { "200" } else { "503" };
        assert_eq!(response.status, status, "{path}: {response:?}");
        all.push(response);
    }
    let with_receipts =
        Arc::new(HttpListener::clone(&listener_with_rules(None)).with_receipts(ReceiptSecret::new(b"a-secret")));
    for check in [one.to_owned(), described("/shield", HERE, "{}")] {
        let mut check: Value = serde_json::from_str(&check).unwrap();
        check["receipt"] = json!(true);
        all.push(send(with_receipts.clone(), ENOUGH, &post("", &check.to_string())).await);
    }
    let token = SecretForm::Token.parse("a-token-for-tests-only").unwrap();
    let listener = Arc::new(HttpListener::new(Limiter::memory(), IDLE).with_token(token));
    let unauthenticated = send(listener, ENOUGH, &post("", one)).await;
    assert_eq!(unauthenticated.status, "401", "{unauthenticated:?}");
    all.push(unauthenticated);
    let unfinished = post("", &" ".repeat(50_000));
    let overloaded = send(listener_with_rules(None), 1, &unfinished[..20_000]).await;
    assert_eq!(overloaded.status, "503", "{overloaded:?}");
    all.push(overloaded);
    all
}

/// Collects what the document says about responses, as (status, header or content type).
fn documented(document: &Value, responses: &Value, field: &str) -> BTreeSet<(String, String)> {
    let responses = responses.as_object().unwrap().iter();
    responses
        .flat_map(|(status, response)| {
            let entries = resolve(document, response)[field].as_object().into_iter().flatten();
            entries.map(move |(name, _)| (status.clone(), name.to_ascii_lowercase()))
        })
        .collect()
}

/// Each response is documented, and everything that is documented occurs in a response.
#[tokio::test(start_paused = true)]
async fn responses_match_the_document() {
    let responses = &HTTP_DOCUMENT["paths"]["/v1/check"]["post"]["responses"];
    let mut fields = Fields::default();
    assert_documented(&HTTP_DOCUMENT, responses, all_responses().await, &mut fields);
    fields.assert_complete(&HTTP_DOCUMENT);
}

/// Asserts that each of the received responses is one of `responses` of the document, and that every status, header and
/// content type in `responses` occurs in one that was received. Adds the fields of the bodies to `fields`.
fn assert_documented(document: &Value, responses: &Value, received: Vec<Received>, fields: &mut Fields) {
    /// Headers of HTTP itself, which OpenAPI does not list.
    const OF_HTTP: [&str; 4] = ["content-type", "content-length", "connection", "date"];
    let (mut statuses, mut headers, mut types) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for response in received {
        let Received { status, body, .. } = &response;
        statuses.insert(status.clone());
        let described = resolve(document, &responses[status]);
        assert!(described.is_object(), "{status} is not documented: {response:?}");
        for (name, value) in response.headers.iter().filter(|(name, _)| !OF_HTTP.contains(&&**name)) {
            let mut known = described["headers"].as_object().into_iter().flatten();
            let header = known.find(|(known, _)| known.eq_ignore_ascii_case(name));
            let (_, header) = header.unwrap_or_else(|| panic!("{name} is not documented: {response:?}"));
            let value = value.parse::<u64>().map_or_else(|_| json!(value), |number| json!(number));
            let valid = validate(document, &resolve(document, header)["schema"], &value);
            valid.unwrap_or_else(|error| panic!("{name}: {error}"));
            headers.insert((status.clone(), name.clone()));
        }
        let Some((_, content_type)) = response.headers.iter().find(|(name, _)| name == "content-type") else {
            assert!(body.is_empty(), "a body without a content type: {response:?}");
            continue;
        };
        types.insert((status.clone(), content_type.clone()));
        let schema = &described["content"][content_type]["schema"];
        assert!(schema.is_object(), "{content_type} is not documented: {response:?}");
        let value = if content_type.contains("json") { serde_json::from_str(body).unwrap() } else { json!(body) };
        fields.extend(validate(document, schema, &value).unwrap_or_else(|error| panic!("{response:?}: {error}")));
    }
    let all = |responses: &Value| responses.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(statuses, all(responses), "documented statuses that no response has");
    assert_eq!(headers, documented(document, responses, "headers"), "documented headers that no response has");
    assert_eq!(types, documented(document, responses, "content"), "documented content types that no response has");
}

/// The document lists exactly the methods that the router accepts on its paths, except for proxies: they may ask with any
/// method.
#[tokio::test]
async fn the_router_accepts_the_documented_methods_and_no_others() {
    let listener = listener_with_rules(None);
    let answer = |method: &Method, path: &str| {
        let request = Request::builder().method(method).uri(path).body(Empty::<Bytes>::new()).unwrap();
        listener.answer(request)
    };
    let mut paths = HTTP_DOCUMENT["paths"].as_object().unwrap().clone();
    paths.retain(|path, _| !path.starts_with("/v1/forward-auth"));
    let (mut known, mut allow) = (Vec::new(), Vec::new());
    for (path, operations) in &paths {
        let documented: Vec<String> = operations.as_object().unwrap().keys().map(|name| name.to_uppercase()).collect();
        for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
            let response = answer(&method.parse().unwrap(), path).await;
            let is_allowed = response.status() != 405;
            assert_eq!(is_allowed, documented.contains(&method.to_owned()), "{method} {path}");
            allow.extend(response.headers().get("allow").map(|allow| allow.to_str().unwrap().to_owned()));
        }
        assert!(allow.iter().all(|allow| *allow == documented.join(", ")), "{allow:?}");
        known.extend(documented.iter().map(|method| format!("{method} {path}")));
    }
    assert_eq!(known, ["POST /v1/check", "POST /v1/refund"]);
    let unknown = answer(&Method::GET, "/v1/other").await;
    assert_eq!(unknown.status(), 404);
    let message = unknown.into_body().collect().await.unwrap().to_bytes();
    let message = String::from_utf8_lossy(&message).into_owned();
    assert!(known.iter().all(|operation| message.contains(operation)), "{message}");
}

/// Adds the names of all properties in a schema, and in the schemas that it contains.
fn add_properties(schema: &Value, names: &mut BTreeSet<String>) {
    match schema {
        Value::Object(keywords) => {
            let properties = keywords.get("properties").and_then(Value::as_object);
            names.extend(properties.into_iter().flat_map(|properties| properties.keys().cloned()));
            keywords.values().for_each(|value| add_properties(value, names));
        }
        Value::Array(values) => values.iter().for_each(|value| add_properties(value, names)),
        _ => {}
    }
}

/// The tables of `docs/http-api.md` have a row for each field, and for no other.
#[test]
fn every_field_is_in_the_tables_of_the_page() {
    let mut fields = BTreeSet::new();
    add_properties(&HTTP_DOCUMENT["components"]["schemas"], &mut fields);
    let (_, section) = HTTP_PAGE.split_once("\n## Fields\n").expect("the section exists");
    let (section, _) = section.split_once("\n## ").expect("another section follows");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    assert_eq!(rows.map(str::to_owned).collect::<BTreeSet<_>>(), fields);
}

/// A body is accepted exactly if it is valid by the document, apart from the bounds that the document leaves to a 400.
#[test]
fn bodies_are_accepted_exactly_if_they_are_valid() {
    let content = &HTTP_DOCUMENT["paths"]["/v1/check"]["post"]["requestBody"]["content"]["application/json"];
    let mut fields = Fields::default();
    let mut check = |body: &Value, is_valid: bool| {
        let validated = validate(&HTTP_DOCUMENT, &content["schema"], body);
        assert_eq!(validated.is_ok(), is_valid, "{body}: {validated:?}");
        fields.extend(validated.unwrap_or_default());
        assert_eq!(CheckRequest::parse(body.to_string().as_bytes()).is_ok(), is_valid, "{body}");
    };
    let examples = content["examples"].as_object().unwrap();
    assert_eq!(examples.len(), 5, "one example for each form, one that waits, and one with a receipt");
    for example in examples.values() {
        check(&example["value"], true);
    }
    let (entry, request) = (json!({ "key": "a", "limit": "1/s" }), examples["by_rules"]["value"].clone());
    let with = |mut body: Value, pointer: &str, name: &str, value: Value| {
        body.pointer_mut(pointer).unwrap()[name] = value;
        body
    };
    let without = |mut body: Value, pointer: &str, name: &str| {
        body.pointer_mut(pointer).unwrap().as_object_mut().unwrap().remove(name).unwrap();
        body
    };
    for (body, is_valid) in [
        (with(entry.clone(), "", "cost", json!(0)), true),
        (with(entry.clone(), "", "cost", json!(u32::MAX)), true),
        (with(entry.clone(), "", "cost", json!(u64::from(u32::MAX) + 1)), false),
        (with(entry.clone(), "", "cost", json!(-1)), false),
        (with(entry.clone(), "", "cost", json!(1.5)), false),
        (with(entry.clone(), "", "cost", json!(null)), false),
        (with(entry.clone(), "", "wait_ms", json!(0)), true),
        (with(entry.clone(), "", "wait_ms", json!(60_000)), true),
        (with(entry.clone(), "", "wait_ms", json!(60_001)), false),
        (with(entry.clone(), "", "wait_ms", json!(-1)), false),
        (with(entry.clone(), "", "wait_ms", json!(null)), false),
        (with(entry.clone(), "", "receipt", json!(false)), true),
        (with(entry.clone(), "", "receipt", json!("yes")), false),
        (with(entry.clone(), "", "receipt", json!(null)), false),
        (with(entry.clone(), "", "limit", json!("1")), false),
        (with(entry.clone(), "", "limit", json!(10)), false),
        (with(entry.clone(), "", "cots", json!(1)), false),
        (with(entry.clone(), "", "checks", json!([entry])), false),
        (without(entry.clone(), "", "key"), false),
        (without(entry.clone(), "", "limit"), false),
        (json!({ "checks": [entry] }), true),
        (json!({ "checks": [entry], "wait_ms": 10 }), true),
        (json!({ "checks": [with(entry.clone(), "", "cost", json!(2))] }), true),
        (json!({ "checks": [with(entry.clone(), "", "wait_ms", json!(0))] }), false),
        (json!({ "checks": [entry], "receipt": true }), true),
        (json!({ "checks": [with(entry.clone(), "", "receipt", json!(true))] }), false),
        (with(request.clone(), "", "receipt", json!(true)), true),
        (with(request.clone(), "", "wait_ms", json!(0)), false),
        (json!({ "checks": [] }), false),
        (json!({ "checks": vec![&entry; 33] }), false),
        (json!({ "checks": entry }), false),
        (json!({ "checks": [{ "key": "a" }] }), false),
        (json!([entry]), false),
        (json!({}), false),
        (without(request.clone(), "/request", "headers"), true),
        (with(request.clone(), "/request", "headers", json!([["x-a", "b"]])), true),
        (with(request.clone(), "/request", "headers", json!([])), true),
        (with(request.clone(), "/request", "headers", json!([["x-a"]])), false),
        (with(request.clone(), "/request", "headers", json!({ "x a": "" })), false),
        (with(request.clone(), "/request", "headers", json!({ "x": 1 })), false),
        (with(request.clone(), "/request", "peer", json!("::1")), true),
        (with(request.clone(), "/request", "peer", json!("here")), false),
        (with(request.clone(), "/request", "path", json!("shorten")), false),
        (with(request.clone(), "/request", "method", json!("G T")), false),
        (with(request.clone(), "/request", "body", json!("")), false),
        (without(request.clone(), "/request", "method"), false),
        (without(request.clone(), "/request", "path"), false),
        (without(request, "/request", "peer"), false),
    ] {
        check(&body, is_valid);
    }
    fields.assert_complete(&HTTP_DOCUMENT);
}

/// Returns the responses to refunds, one of each kind.
async fn all_refund_responses() -> Vec<Received> {
    const ENOUGH: usize = 1 << 20;
    let post = |headers: &str, body: &Value| post(headers, &body.to_string()).replace("/v1/check", "/v1/refund");
    let secret = || ReceiptSecret::new(b"a-secret-for-tests-only");
    let clock = clock();
    let limiter = Limiter::builder().clock(clock.clone()).build();
    let listener = Arc::new(HttpListener::new(limiter, IDLE).with_receipts(secret()));
    let check = json!({ "key": "user:42", "limit": "10/min", "cost": 5, "receipt": true });
    let issue = || receipt(&listener, check.to_string());
    let (first, second, expiring) = (issue().await, issue().await, issue());
    let refund = |receipt: &str| post("", &json!({ "receipt": receipt }));

    let mut all = Vec::new();
    for (request, expected) in [
        (refund(&first), json!({ "applied": true })),
        (refund(&first), json!({ "applied": false, "reason": "already_used" })),
        (post("", &json!({ "receipt": second, "used": 2 })), json!({ "applied": true })),
    ] {
        let response = send(listener.clone(), ENOUGH, &request).await;
        assert_eq!(serde_json::from_str::<Value>(&response.body).unwrap(), expected, "{response:?}");
        all.push(response);
    }
    let expiring = expiring.await;
    clock.advance(Duration::from_secs(3_600));
    let expired = send(listener.clone(), ENOUGH, &refund(&expiring)).await;
    assert!(expired.body.contains("expired"), "{expired:?}");
    all.push(expired);
    let unfinished = refund(&" ".repeat(50_000));
    for (status, receive_bytes, request) in [
        ("400", ENOUGH, refund("no receipt")),
        ("400", ENOUGH, post("", &json!({ "receipt": first, "used": 1, "status": 200 }))),
        ("403", ENOUGH, post("origin: https://attacker.example\r\n", &json!({ "receipt": first }))),
        ("405", ENOUGH, refund(&first).replacen("POST", "PUT", 1)),
        ("408", ENOUGH, refund(&first).trim_end_matches('}').to_owned()),
        ("413", ENOUGH, "POST /v1/refund HTTP/1.1\r\nhost: x\r\ncontent-length: 600000\r\n\r\n".to_owned()),
        ("431", ENOUGH, format!("POST /v1/refund HTTP/1.1\r\nhost: x\r\nlarge: {}\r\n\r\n", "x".repeat(100_000))),
        ("503", 1, unfinished[..20_000].to_owned()),
    ] {
        let response = send(listener.clone(), receive_bytes, &request).await;
        assert_eq!(response.status, status, "{request:.200}: {response:?}");
        all.push(response);
    }

    // The counters of a shield are in the memory of its engine, which another listener does not have.
    let with_rules = Arc::new(HttpListener::clone(&listener_with_rules(None)).with_receipts(secret()));
    let mut shielded: Value = serde_json::from_str(&described("/shield", "203.0.113.9", "{}")).unwrap();
    shielded["receipt"] = json!(true);
    let shielded = receipt(&with_rules, shielded.to_string()).await;
    let unreachable = Limiter::builder().store(Arc::new(UnreachableStore)).build();
    let unreachable = HttpListener::new(unreachable, IDLE).with_receipts(secret());
    let token = SecretForm::Token.parse("a-token-for-tests-only").unwrap();
    for (status, listener, receipt) in [
        ("409", HttpListener::clone(&listener), shielded),
        ("503", unreachable, second),
        ("400", HttpListener::new(Limiter::memory(), IDLE), first.clone()),
        ("401", HttpListener::clone(&listener).with_token(token), first),
    ] {
        let response = send(Arc::new(listener), ENOUGH, &refund(&receipt)).await;
        assert_eq!(response.status, status, "{response:?}");
        all.push(response);
    }
    all
}

/// Sends a check, and returns its receipt.
async fn receipt(listener: &Arc<HttpListener>, check: String) -> String {
    let response = send(listener.clone(), 1 << 20, &post("", &check)).await;
    let body: Value = serde_json::from_str(&response.body).unwrap();
    body["receipt"].as_str().unwrap_or_else(|| panic!("{response:?}")).to_owned()
}

#[tokio::test(start_paused = true)]
async fn responses_to_refunds_match_the_document() {
    let responses = &HTTP_DOCUMENT["paths"]["/v1/refund"]["post"]["responses"];
    let mut fields = Fields::default();
    assert_documented(&HTTP_DOCUMENT, responses, all_refund_responses().await, &mut fields);
    fields.assert_complete(&HTTP_DOCUMENT);
}

#[test]
fn refunds_are_accepted_exactly_if_they_are_valid() {
    let content = &HTTP_DOCUMENT["paths"]["/v1/refund"]["post"]["requestBody"]["content"]["application/json"];
    let examples = content["examples"].as_object().unwrap().values().map(|example| (example["value"].clone(), true));
    let bodies = [
        (json!({ "receipt": "a", "used": 0 }), true),
        (json!({ "receipt": "a", "used": u32::MAX }), true),
        (json!({ "receipt": "a", "used": u64::from(u32::MAX) + 1 }), false),
        (json!({ "receipt": "a", "used": -1 }), false),
        (json!({ "receipt": "a", "used": null }), false),
        (json!({ "receipt": "a", "status": 100 }), true),
        (json!({ "receipt": "a", "status": 599 }), true),
        (json!({ "receipt": "a", "status": 99 }), false),
        (json!({ "receipt": "a", "status": 600 }), false),
        (json!({ "receipt": "a", "status": null }), false),
        (json!({ "receipt": "a", "status": 200, "used": 1 }), false),
        (json!({ "receipt": "a", "cost": 1 }), false),
        (json!({ "receipt": null }), false),
        (json!({ "used": 1 }), false),
        (json!(["a"]), false),
    ];
    let mut fields = Fields::default();
    for (body, is_valid) in examples.chain(bodies) {
        let validated = validate(&HTTP_DOCUMENT, &content["schema"], &body);
        assert_eq!(validated.is_ok(), is_valid, "{body}: {validated:?}");
        fields.extend(validated.unwrap_or_default());
        assert_eq!(refund::parse(body.to_string().as_bytes()).is_ok(), is_valid, "{body}");
    }
    fields.assert_complete(&HTTP_DOCUMENT);
}

/// The page and the document describe the fields of receipts and responses in the same words.
#[test]
fn fields_are_described_as_on_the_page() {
    let plain = |text: &str| {
        let text = text.replace('`', "");
        let (first, rest) = text.split_at(1);
        first.to_lowercase() + rest.trim_end_matches('.')
    };
    let schemas = &HTTP_DOCUMENT["components"]["schemas"];
    for (heading, names) in [
        ("| field | type | in | meaning |\n", &["Decision", "Refusal"][..]),
        ("| field of an object in `limits` | type | meaning |\n", &["LimitStatus"]),
        ("| field of `response` | type | in | meaning |\n", &["AddedHeaders", "RefusedResponse"]),
        ("| field of the request | type | meaning |\n", &["Refund"]),
        ("| field of the response | type | meaning |\n", &["Refunded"]),
        ("| field | type | meaning |\n", &["Problem"]),
    ] {
        let (_, rows) = HTTP_PAGE.split_once(heading).expect("the table exists");
        for row in rows.lines().skip(1).take_while(|row| row.starts_with('|')) {
            let field = row.split('`').nth(1).unwrap();
            let meaning = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
            let properties = names.iter().map(|name| &schemas[name]["properties"][field]);
            let descriptions = properties.filter_map(|property| property["description"].as_str());
            assert!(descriptions.clone().count() > 0, "{names:?} have no description of {field}");
            descriptions.for_each(|description| assert_eq!(plain(description), plain(meaning), "{names:?} {field}"));
        }
    }
}

#[test]
fn the_documents_agree_with_the_program_and_with_each_other() {
    let [http, admin] = [&HTTP_DOCUMENT, &ADMIN_DOCUMENT].map(|document| {
        assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
        assert_every_component_is_used(document);
        &document["components"]["schemas"]
    });
    for (name, schema) in http.as_object().unwrap() {
        assert!(admin[name].is_null() || admin[name] == *schema, "{name} differs in the two documents");
    }
    let sources = [Source::Store, Source::DenyCache, Source::Local, Source::None].map(|source| source.as_str());
    for schema in ["Decision", "Refusal"] {
        assert_eq!(http[schema]["properties"]["source"]["enum"], json!(sources));
    }
}

fn assert_every_component_is_used(document: &Value) {
    let text = document.to_string();
    for kind in ["schemas", "parameters", "headers", "responses"] {
        for name in document["components"][kind].as_object().unwrap().keys() {
            assert!(text.contains(&format!("\"#/components/{kind}/{name}\"")), "{kind}/{name} is not used");
        }
    }
}

#[test]
fn the_pages_show_every_operation_status_and_field_and_load_nothing() {
    let phrases = ["user:42", "RateLimit-Policy", "X-Forwarded-Uri", "already_used"];
    assert_page_is_complete(&HTTP_DOCUMENT, &phrases);
    assert_page_is_complete(&ADMIN_DOCUMENT, &["Authorization: Bearer", "reveal", "ip:203.0.113.9"]);
}

fn assert_page_is_complete(document: &Value, phrases: &[&str]) {
    let page = page::render(document);
    let paths = document["paths"].as_object().unwrap();
    let operations = paths.values().flat_map(|operations| operations.as_object().unwrap().values());
    let statuses = operations.flat_map(|operation| operation["responses"].as_object().unwrap().keys());
    let statuses = statuses.map(|status| format!("<code>{status}</code>"));
    let schemas = document["components"]["schemas"].as_object().unwrap();
    let fields = schemas.values().flat_map(|schema| schema["properties"].as_object().into_iter().flatten());
    let fields: Vec<String> = fields.map(|(name, _)| format!("<code>{name}</code>")).collect();
    assert!(fields.len() > 15, "{fields:?}");
    for phrase in
        statuses.chain(fields).chain(paths.keys().cloned()).chain(phrases.iter().map(|phrase| (*phrase).to_owned()))
    {
        assert!(page.contains(&phrase), "{phrase}");
    }
    for loading in ["src=", "@import", "url(", "<script", "<link", "<img", "<iframe"] {
        assert!(!page.contains(loading), "{loading}");
    }
}
