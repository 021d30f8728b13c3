use std::sync::Arc;

use serde_json::Value;

use super::{Fields, HTTP_DOCUMENT, Received, assert_documented, resolve, send};
use crate::listeners::http::test_support::{RULES, UnreachableStore, listener_with_config};

const ENOUGH: usize = 1 << 20;

/// Returns a request of a proxy about a visitor at this address.
fn ask(target: &str, uri: &str, visitor: &str, headers: &str) -> String {
    let example = |name: &str| parameter(name)["example"].as_str().unwrap().to_owned();
    format!(
        "GET {target} HTTP/1.1\r\nhost: x\r\nX-Forwarded-Method: {}\r\nX-Forwarded-Uri: {uri}\r\nX-Forwarded-Host: {}\r\n\
         X-Forwarded-For: {visitor}\r\n{headers}\r\n",
        example("X-Forwarded-Method"),
        example("X-Forwarded-Host"),
    )
}

/// Returns the parameters of the document.
fn parameters() -> impl Iterator<Item = &'static Value> {
    let parameters = HTTP_DOCUMENT["paths"]["/v1/forward-auth"]["get"]["parameters"].as_array().unwrap();
    assert_eq!(parameters.len(), 4);
    parameters.iter().map(|parameter| resolve(&HTTP_DOCUMENT, parameter))
}

/// Returns a parameter of the document.
fn parameter(name: &str) -> Value {
    parameters().find(|parameter| parameter["name"] == name).unwrap().clone()
}

/// Sends requests until every kind of response was received.
async fn all_responses(target: &str) -> Vec<Received> {
    // The address of the test's client is that of the proxy.
    let rules = format!("trusted_proxies = [\"203.0.113.9\"]\n{RULES}");
    let ask = |uri: &str, visitor: &str| ask(target, uri, visitor, "");
    let visitor = "198.51.100.1";
    let problem = self::ask(target, "/json", visitor, "accept: application/problem+json\r\n");
    let mut all = Vec::new();
    for request in [
        ask("/json", visitor),
        ask("/json", visitor).repeat(2),
        problem.repeat(2),
        ask("/text", visitor).repeat(2),
        ask("/problem", visitor).repeat(2),
        ask("/local", visitor),
        ask("/local", visitor).repeat(2),
        ask("/json", "198.51.100.7"),
        ask("/json", "198.51.100.8"),
        ask(&"/long".repeat(20), visitor),
        ask("malformed", visitor),
        format!("GET {target} HTTP/1.1\r\nhost: x\r\n\r\n"),
        format!("GET {target} HTTP/1.1\r\nhost: x\r\nlarge: {}\r\n\r\n", "x".repeat(100_000)),
    ] {
        all.push(send(listener_with_config(&rules, None), ENOUGH, &request).await);
    }
    for uri in ["/json", "/problem", "/text"] {
        let listener = listener_with_config(&rules, Some(Arc::new(UnreachableStore)));
        all.push(send(listener, ENOUGH, &ask(uri, visitor)).await);
    }
    let unfinished = format!("GET {target} HTTP/1.1\r\nhost: x\r\nlarge: {}", "x".repeat(20_000));
    all.push(send(listener_with_config(&rules, None), 1, &unfinished).await);
    all
}

#[tokio::test(start_paused = true)]
async fn responses_match_the_document() {
    let mut fields = Fields::default();
    for path in ["/v1/forward-auth", "/v1/forward-auth/nginx"] {
        let responses = &HTTP_DOCUMENT["paths"][path]["get"]["responses"];
        assert_documented(&HTTP_DOCUMENT, responses, all_responses(path).await, &mut fields);
    }
    fields.assert_complete(&HTTP_DOCUMENT);
}

/// Each required header of the document is required by the listener.
#[tokio::test(start_paused = true)]
async fn a_request_needs_every_documented_header() {
    let rules = format!("trusted_proxies = [\"203.0.113.9\"]\n{RULES}");
    let request = ask("/v1/forward-auth", "/free", "198.51.100.1", "");
    for parameter in parameters() {
        assert_eq!(parameter["required"], true);
        let name = parameter["name"].as_str().unwrap();
        let lines: Vec<&str> = request.split_inclusive("\r\n").filter(|line| !line.starts_with(name)).collect();
        let response = send(listener_with_config(&rules, None), ENOUGH, &lines.concat()).await;
        assert_eq!(response.status, "400", "{name}");
    }
    assert_eq!(send(listener_with_config(&rules, None), ENOUGH, &request).await.status, "200");
}
