//! `GET /openapi.json`: what the HTTP door accepts and answers, for programs; `GET /docs`: the same for people.
//!
//! The document is made from the types that the door reads and writes, so that it cannot speak of a field that is not
//! there. What a type cannot say (which texts are a limit, which characters a path has) is said by patterns, which are tested
//! against the parsers that they describe: a text matches if and only if it is accepted.

mod page;
pub(crate) mod patterns;

use std::sync::OnceLock;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response};
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Value, json};

use crate::listeners::http::answer::{DecisionAnswer, Problem};
use crate::listeners::http::request::Body;

/// The document, as a response.
pub(crate) fn document_response() -> Response<Bytes> {
    static TEXT: OnceLock<Bytes> = OnceLock::new();
    let text = TEXT.get_or_init(|| Bytes::from(serde_json::to_vec(&document()).unwrap_or_default()));
    typed(text.clone(), "application/json")
}

/// The page, as a response.
pub(crate) fn page_response() -> Response<Bytes> {
    static PAGE: OnceLock<Bytes> = OnceLock::new();
    let page = PAGE.get_or_init(|| Bytes::from(page::render(&document())));
    typed(page.clone(), "text/html; charset=utf-8")
}

fn typed(body: Bytes, content_type: &'static str) -> Response<Bytes> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// The document.
pub(crate) fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.meta_schema = None;
        settings.definitions_path = "/components/schemas".into();
    });
    let mut schemas = settings.into_generator();
    let question = schemas.subschema_for::<Body<'_>>();
    let responses = responses(&mut schemas);
    let components = schemas.take_definitions(true);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Tollgate",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "A rate limiter whose windows really slide. One question, one decision.",
            "license": { "name": "Apache-2.0 OR MIT", "identifier": "Apache-2.0 OR MIT" },
        },
        "paths": { "/v1/check": { "post": {
            "operationId": "check",
            "summary": "Decide whether a request may go on",
            "description": "Asks in one of three forms: one limit; several limits, which all pass or none is charged; or a \
                request that somebody else received, decided by the rules of the configuration.",
            "requestBody": { "required": true, "content": { "application/json": {
                "schema": question,
                "examples": {
                    "one": { "summary": "One limit", "value": { "key": "user:42", "limit": "10/min", "cost": 1 } },
                    "together": { "summary": "Several limits, all or none", "value": { "checks": [
                        { "key": "user:42", "limit": "10/min" }, { "key": "user:42", "limit": "1000/day" },
                    ] } },
                    "by_rules": { "summary": "By rules", "value": { "request": {
                        "method": "POST", "path": "/shorten", "headers": { "x-api-key": "…" }, "peer": "203.0.113.9",
                    } } },
                },
            } } },
            "responses": responses,
        } } },
        "components": { "schemas": components },
    })
}

fn responses(schemas: &mut SchemaGenerator) -> Value {
    let decision = schemas.subschema_for::<DecisionAnswer>();
    let problem = schemas.subschema_for::<Problem>();
    let (told, retry) = (told_headers(), retry_after());
    let mut denied_headers = told.clone();
    denied_headers["Retry-After"] = retry.clone();
    denied_headers["Cache-Control"] = header("`no-store`", json!({ "type": "string" }));
    let refused = |description: &str| json!({ "description": description, "content": { "application/json": { "schema": problem } } });
    let mut forbidden = refused("The caller that was described is banned.");
    forbidden["headers"] = json!({ "Retry-After": retry });
    let mut not_allowed = refused("Another method than POST.");
    not_allowed["headers"] = json!({ "Allow": header("What would be accepted.", json!({ "type": "string" })) });
    json!({
        "200": {
            "description": "The request may go on.",
            "headers": told,
            "content": { "application/json": { "schema": decision } },
        },
        "400": refused("The question makes no sense; the message says what was expected."),
        "403": forbidden,
        "405": not_allowed,
        "408": refused("The body did not come in time."),
        "413": refused("The body is too large."),
        "414": refused("The path of the described request is longer than the rules accept (`path_bytes_max`)."),
        "429": {
            "description": "A limit refuses the request. The body is the decision, as for 200.",
            "headers": denied_headers,
            "content": { "application/json": { "schema": decision } },
        },
        "431": { "description": "The headers are too large." },
        "503": {
            "description": "The store is away and the rule says `deny`, or the door is full. Never a matter of the client's quota.",
            "headers": { "Retry-After": retry },
            "content": {
                "application/json": { "schema": { "type": "object" } },
                "application/problem+json": { "schema": { "type": "object" } },
                "text/plain": { "schema": { "type": "string" } },
            },
        },
    })
}

fn header(description: &str, schema: Value) -> Value {
    json!({ "description": description, "schema": schema })
}

fn retry_after() -> Value {
    header(
        "Whole seconds until it is worth asking again; absent if it never will be.",
        json!({ "type": "integer", "minimum": 1 }),
    )
}

/// The headers of a limited answer, by default; a rule may choose others.
fn told_headers() -> Value {
    let number = || json!({ "type": "integer", "minimum": 0 });
    let text = || json!({ "type": "string" });
    json!({
        "X-RateLimit-Limit": header("The quota of the most restrictive limit.", number()),
        "X-RateLimit-Remaining": header("What is left of it.", number()),
        "X-RateLimit-Reset": header("When more of it comes back, in Unix seconds.", number()),
        "RateLimit-Policy": header("Every limit: its name, quota (q) and window in seconds (w).", text()),
        "RateLimit": header("Of every limit what remains (r) and the seconds until more comes back (t).", text()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_names_every_form_field_and_status() {
        let document = document();
        let text = document.to_string();
        for name in ["\"checks\"", "\"request\"", "\"peer\"", "\"additionalProperties\":false", "\"retry_after_ms\""] {
            assert!(text.contains(name), "{name}: {text}");
        }
        let responses = document["paths"]["/v1/check"]["post"]["responses"].as_object().unwrap();
        assert_eq!(
            responses.keys().map(String::as_str).collect::<Vec<_>>(),
            ["200", "400", "403", "405", "408", "413", "414", "429", "431", "503"]
        );
        assert!(responses["429"]["headers"]["Retry-After"].is_object());
    }

    /// Every `$ref` leads somewhere.
    #[test]
    fn no_reference_in_the_document_dangles() {
        fn look(value: &Value, document: &Value) {
            if let Some(reference) = value.get("$ref").and_then(Value::as_str) {
                let pointer = reference.strip_prefix('#').expect("within the document");
                assert!(document.pointer(pointer).is_some(), "{reference}");
            }
            match value {
                Value::Object(map) => map.values().for_each(|value| look(value, document)),
                Value::Array(list) => list.iter().for_each(|value| look(value, document)),
                _ => {}
            }
        }
        let document = document();
        look(&document, &document);
    }

    #[test]
    fn the_page_shows_every_status_and_field_and_loads_nothing() {
        let page = page::render(&document());
        for phrase in ["/v1/check", "429", "503", "retry_after_ms", "remaining", "user:42", "RateLimit-Policy"] {
            assert!(page.contains(phrase), "{phrase}");
        }
        assert!(!page.contains("src=") && !page.contains("@import") && !page.contains("<script"));
    }
}
