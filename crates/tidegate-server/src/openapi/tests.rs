//! Compares the document with the listener: every documented status, header, content type and schema with real
//! responses.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request};
use http_body_util::{BodyExt, Empty};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use tidegate::Limiter;

use super::schemas::tests::regex;
use super::*;
use crate::budget::{EvictingBudget, Receiving};
use crate::listener::ConnectionContext;
use crate::listeners::admin::token::Token;
use crate::listeners::http::HttpListener;
use crate::listeners::http::refund;
use crate::listeners::http::request::CheckRequest;
use crate::listeners::http::test_support::{IDLE, PEER, UnreachableStore, clock, described, listener_with_rules};
use crate::receipt_secret::ReceiptSecret;

/// Validates a value against a schema of the document.
///
/// # Panics
/// On a keyword that it does not know, so that no part of a schema is ignored.
fn validate(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let valid = |schema: &Value, value: &Value| validate(document, schema, value);
    let wrong = |what: &str| Err(format!("{what}: {value} against {schema}"));
    for (keyword, expected) in schema.as_object().expect("a schema is an object") {
        let number = || expected.as_u64().expect("a bound is a number");
        let list = || expected.as_array().expect("a list");
        let is_met = match keyword.as_str() {
            "$ref" => {
                let pointer = expected.as_str().and_then(|text| text.strip_prefix('#')).expect("a local reference");
                valid(document.pointer(pointer).unwrap_or_else(|| panic!("{pointer} does not exist")), value)?;
                true
            }
            "type" => match expected {
                Value::Array(types) => types.iter().any(|kind| has_type(value, kind)),
                kind => has_type(value, kind),
            },
            "const" => value == expected,
            "enum" => list().contains(value),
            "properties" => {
                for (name, schema) in expected.as_object().unwrap() {
                    value.get(name).map_or(Ok(()), |value| valid(schema, value))?;
                }
                true
            }
            "required" => list().iter().all(|name| value.get(name.as_str().unwrap()).is_some()),
            "additionalProperties" => {
                let known = |name: &str| schema["properties"].get(name).is_some();
                let mut others = value.as_object().into_iter().flatten().filter(|(name, _)| !known(name));
                match expected {
                    Value::Bool(false) => others.next().is_none(),
                    schema => others.try_for_each(|(_, value)| valid(schema, value)).map(|()| true)?,
                }
            }
            "propertyNames" => {
                let mut names = value.as_object().into_iter().flatten().map(|(name, _)| json!(name));
                names.try_for_each(|name| valid(expected, &name)).map(|()| true)?
            }
            "maxProperties" => value.as_object().is_none_or(|map| map.len() as u64 <= number()),
            "items" => {
                let mut items = value.as_array().into_iter().flatten();
                items.try_for_each(|item| valid(expected, item)).map(|()| true)?
            }
            "prefixItems" => {
                let mut items = value.as_array().into_iter().flatten().zip(list());
                items.try_for_each(|(item, schema)| valid(schema, item)).map(|()| true)?
            }
            "minItems" => value.as_array().is_none_or(|items| items.len() as u64 >= number()),
            "maxItems" => value.as_array().is_none_or(|items| items.len() as u64 <= number()),
            "minimum" => value.as_f64().is_none_or(|value| value >= number() as f64),
            "maximum" => value.as_f64().is_none_or(|value| value <= number() as f64),
            "maxLength" => value.as_str().is_none_or(|text| text.chars().count() as u64 <= number()),
            "pattern" => value.as_str().is_none_or(|text| regex(expected.as_str().unwrap()).is_match(text)),
            "format" => match (expected.as_str().unwrap(), value.as_str()) {
                ("ipv4", Some(text)) => text.parse::<std::net::Ipv4Addr>().is_ok(),
                ("ipv6", Some(text)) => text.parse::<std::net::Ipv6Addr>().is_ok(),
                ("uint16", None) => value.as_u64().is_some_and(|value| u16::try_from(value).is_ok()),
                ("uint", None) => value.is_null() || value.is_u64(),
                ("uint32", None) => value.is_null() || value.as_u64().is_some_and(|value| u32::try_from(value).is_ok()),
                ("uint64", None) => value.is_null() || value.is_u64(),
                (format, _) => panic!("unknown format {format} of {value}"),
            },
            "oneOf" => list().iter().filter(|schema| valid(schema, value).is_ok()).count() == 1,
            "anyOf" => list().iter().any(|schema| valid(schema, value).is_ok()),
            "not" => valid(expected, value).is_err(),
            "description" | "examples" | "default" | "title" => true,
            other => panic!("unknown keyword {other}"),
        };
        if !is_met {
            return wrong(keyword);
        }
    }
    Ok(())
}

fn has_type(value: &Value, kind: &Value) -> bool {
    match kind.as_str().expect("the name of a type") {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "integer" => value.as_f64().is_some_and(|value| value.fract() == 0.0),
        other => panic!("unknown type {other}"),
    }
}

/// A response as it was sent.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) status: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: String,
}

/// Sends bytes to the HTTP listener on a connection of their own, and returns the last response.
pub(super) async fn send(listener: Arc<HttpListener>, receive_bytes: usize, request: &str) -> Received {
    let serve = |server, context| async move { drop(listener.serve_stream(server, PEER, context).await) };
    exchange(receive_bytes, request, serve).await
}

/// Sends bytes on a connection of their own, which `serve` serves, and returns the last response.
pub(super) async fn exchange<F>(
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
    let token = Token::given("a-token-for-tests-only").unwrap();
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
fn documented(responses: &Value, field: &str) -> BTreeSet<(String, String)> {
    let entries = |response: &Value| response[field].as_object().cloned().unwrap_or_default();
    let responses = responses.as_object().unwrap().iter();
    responses
        .flat_map(|(status, response)| {
            let names = entries(response).into_iter().map(|(name, _)| name.to_ascii_lowercase());
            names.map(move |name| (status.clone(), name)).collect::<Vec<_>>()
        })
        .collect()
}

/// Each response is documented, and everything that is documented occurs in a response.
#[tokio::test(start_paused = true)]
async fn responses_match_the_document() {
    let document = document();
    assert_documented(&document, &document["paths"]["/v1/check"]["post"]["responses"], all_responses().await);
}

/// Asserts that each of the received responses is one of `responses` of the document, and that every status, header and
/// content type in `responses` occurs in one that was received.
pub(super) fn assert_documented(document: &Value, responses: &Value, received: Vec<Received>) {
    /// Headers of HTTP itself, which OpenAPI does not list.
    const OF_HTTP: [&str; 4] = ["content-type", "content-length", "connection", "date"];
    let header_schema = |status: &str, name: &str| {
        let headers = responses[status]["headers"].as_object().into_iter().flatten();
        headers.clone().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, header)| &header["schema"])
    };
    let (mut statuses, mut headers, mut types) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for response in received {
        let Received { status, body, .. } = &response;
        statuses.insert(status.clone());
        assert!(responses[status].is_object(), "{status} is not documented: {response:?}");
        for (name, value) in response.headers.iter().filter(|(name, _)| !OF_HTTP.contains(&&**name)) {
            let schema =
                header_schema(status, name).unwrap_or_else(|| panic!("{name} is not documented: {response:?}"));
            let value = value.parse::<u64>().map_or_else(|_| json!(value), |number| json!(number));
            validate(document, schema, &value).unwrap_or_else(|error| panic!("{name}: {error}"));
            headers.insert((status.clone(), name.clone()));
        }
        let Some((_, content_type)) = response.headers.iter().find(|(name, _)| name == "content-type") else {
            assert!(body.is_empty(), "a body without a content type: {response:?}");
            continue;
        };
        types.insert((status.clone(), content_type.clone()));
        let schema = &responses[status]["content"][content_type]["schema"];
        assert!(schema.is_object(), "{content_type} is not documented: {response:?}");
        let value = if content_type.contains("json") { serde_json::from_str(body).unwrap() } else { json!(body) };
        validate(document, schema, &value).unwrap_or_else(|error| panic!("{response:?}: {error}"));
    }
    let all = |responses: &Value| responses.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(statuses, all(responses), "documented statuses that no response has");
    assert_eq!(headers, documented(responses, "headers"), "documented headers that no response has");
    assert_eq!(types, documented(responses, "content"), "documented content types that no response has");
}

/// The document lists exactly the methods that the router accepts on its paths, except for proxies: they may ask with any
/// method.
#[tokio::test]
async fn the_router_accepts_the_documented_methods_and_no_others() {
    let (document, listener) = (document(), listener_with_rules(None));
    let answer = |method: &Method, path: &str| {
        let request = Request::builder().method(method).uri(path).body(Empty::<Bytes>::new()).unwrap();
        listener.answer(request)
    };
    let mut paths = document["paths"].as_object().unwrap().clone();
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

/// A body is accepted exactly if it is valid by the document, apart from the bounds that the document leaves to a 400.
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
    add_properties(&document()["components"]["schemas"], &mut fields);
    let page = include_str!("../../../../docs/http-api.md");
    let (_, section) = page.split_once("\n## Fields\n").expect("the section exists");
    let (section, _) = section.split_once("\n## ").expect("another section follows");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    assert_eq!(rows.map(str::to_owned).collect::<BTreeSet<_>>(), fields);
}

#[test]
fn bodies_are_accepted_exactly_if_they_are_valid() {
    let document = document();
    let content = &document["paths"]["/v1/check"]["post"]["requestBody"]["content"]["application/json"];
    let check = |body: &Value, is_valid: bool| {
        let validated = validate(&document, &content["schema"], body);
        assert_eq!(validated.is_ok(), is_valid, "{body}: {validated:?}");
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
    let token = Token::given("a-token-for-tests-only").unwrap();
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
    let document = document();
    let received = all_refund_responses().await;
    assert_documented(&document, &document["paths"]["/v1/refund"]["post"]["responses"], received);
}

#[test]
fn refunds_are_accepted_exactly_if_they_are_valid() {
    let document = document();
    let content = &document["paths"]["/v1/refund"]["post"]["requestBody"]["content"]["application/json"];
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
    for (body, is_valid) in examples.chain(bodies) {
        let validated = validate(&document, &content["schema"], &body);
        assert_eq!(validated.is_ok(), is_valid, "{body}: {validated:?}");
        assert_eq!(refund::parse(body.to_string().as_bytes()).is_ok(), is_valid, "{body}");
    }
}

#[test]
fn descriptions_have_no_terms_and_links_of_rust() {
    for document in [document(), admin::document()] {
        let text = document.to_string();
        for term in ["None", "[`", "::"] {
            assert!(!text.contains(term), "{term}: {:.300}", text.split_once(term).unwrap().1);
        }
    }
}

#[test]
fn the_pages_show_every_operation_status_and_field_and_load_nothing() {
    let phrases = ["user:42", "RateLimit-Policy", "X-Forwarded-Uri", "already_used"];
    assert_page_is_complete(&document(), &phrases);
    assert_page_is_complete(&admin::document(), &["Authorization: Bearer", "reveal", "ip:203.0.113.9"]);
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
