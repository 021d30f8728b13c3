//! `GET /openapi.json`: a description of a listener's HTTP API for programs. `GET /docs`: the same for people.
//!
//! The HTTP listener and the admin listener have a document each, because their addresses and their tokens differ. A
//! document is generated from the types that the listener parses and writes, so that it cannot describe a field that
//! does not exist. The tests compare it with the listener: every documented status is provoked, and every response is
//! validated against its schema. A 500, which only a bug in Tidegate causes, is not documented.

mod admin;
mod forward_auth;
mod page;
pub(crate) mod schemas;

use std::sync::OnceLock;

use bytes::Bytes;
use http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use http::{HeaderValue, Response};
use schemars::Schema;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Value, json};

use crate::listeners::http::refund::{RefundBody, RefundedBody};
use crate::listeners::http::request::CheckBody;
use crate::listeners::http::response::{DecisionBody, ErrorBody, RefusalBody};

const TOKEN_REQUIRED: &str = "The listener requires a token, and the request has no `Authorization: Bearer` header \
    or a wrong token; or too many attempts from this address are waiting.";

/// The API of a listener: an OpenAPI document, and its page.
pub(crate) struct Api {
    document: fn() -> Value,
    text: OnceLock<Bytes>,
    page: OnceLock<Bytes>,
}

/// The API of the HTTP listener.
pub(crate) static HTTP: Api = Api::new(document);
/// The API of the admin listener.
pub(crate) static ADMIN: Api = Api::new(admin::document);

/// What a browser may load and do on the page: only its own inline style.
const PAGE_POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

impl Api {
    const fn new(document: fn() -> Value) -> Api {
        Api { document, text: OnceLock::new(), page: OnceLock::new() }
    }

    /// Returns the response of `/openapi.json`: the OpenAPI document as JSON, which is created once.
    pub(crate) fn document_response(&self) -> Response<Bytes> {
        let text = || Bytes::from(serde_json::to_vec(&(self.document)()).unwrap_or_default());
        with_type(self.text.get_or_init(text).clone(), "application/json")
    }

    /// Returns the response of `/docs`: the OpenAPI document as an HTML page, which is created once.
    pub(crate) fn page_response(&self) -> Response<Bytes> {
        let page = || Bytes::from(page::render(&(self.document)()));
        let mut response = with_type(self.page.get_or_init(page).clone(), "text/html; charset=utf-8");
        response.headers_mut().insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_POLICY));
        response
    }
}

fn with_type(body: Bytes, content_type: &'static str) -> Response<Bytes> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Returns the settings for schemas in the components of a document.
fn schema_settings() -> SchemaSettings {
    SchemaSettings::draft2020_12().with(|settings| {
        settings.meta_schema = None;
        settings.definitions_path = "/components/schemas".into();
    })
}

/// Returns an OpenAPI document with these paths and components.
fn openapi(title: &str, description: &str, paths: Value, components: Value) -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": env!("CARGO_PKG_VERSION"),
            "description": description,
            "license": { "name": "Apache-2.0 OR MIT", "identifier": "Apache-2.0 OR MIT" },
        },
        "paths": paths,
        "components": components,
    })
}

/// Returns the OpenAPI document of the endpoints under `/v1` of the HTTP listener.
fn document() -> Value {
    let mut schemas = schema_settings().into_generator();
    let request = schemas.subschema_for::<CheckBody<'_>>();
    let responses = responses(&mut schemas);
    let forward_auth = forward_auth::paths(&schemas.subschema_for::<ErrorBody>());
    let refund = refund(&mut schemas);
    let components = schemas.take_definitions(true);
    let mut paths = json!({ "/v1/check": { "post": {
            "operationId": "check",
            "summary": "Decide whether a request is allowed",
            "description": "The body has one of three forms: one limit; several limits, of which none is charged unless all pass; or the \
                description of a request that another program received, to be decided by the configured rules. In the last \
                form, the field `response` is what a service behind the Tower layer would send.",
            "requestBody": { "required": true, "content": { "application/json": {
                "schema": request,
                "examples": {
                    "one": { "summary": "One limit", "value": { "key": "user:42", "limit": "10/min", "cost": 1 } },
                    "wait": { "summary": "One limit, waiting for room", "value": { "key": "hooks.example.com", "limit": "10/s", "wait_ms": 5000 } },
                    "receipt": { "summary": "An estimate, to be corrected later", "value": { "key": "user:42", "limit": "1000/min", "cost": 500, "receipt": true } },
                    "together": { "summary": "Several limits, all or none", "value": { "checks": [
                        { "key": "user:42", "limit": "10/min" }, { "key": "user:42", "limit": "1000/day" },
                    ] } },
                    "by_rules": { "summary": "By rules", "value": { "request": {
                        "method": "POST", "path": "/shorten", "headers": { "x-api-key": "…" }, "peer": "203.0.113.9",
                    } } },
                },
            } } },
            "responses": responses,
    } } });
    paths["/v1/refund"] = refund;
    for (path, operations) in forward_auth {
        paths[path] = operations;
    }
    openapi(
        "Tidegate",
        "A distributed rate limiter with true sliding windows.",
        paths,
        json!({ "schemas": components }),
    )
}

fn responses(schemas: &mut SchemaGenerator) -> Value {
    let decision = schemas.subschema_for::<DecisionBody>();
    let refusal = schemas.subschema_for::<RefusalBody>();
    let problem = schemas.subschema_for::<ErrorBody>();
    let (limits, retry) = (limit_headers(), retry_after());
    let rejected = |description: &str| rejected(&problem, description);
    let mut forbidden = rejected(
        "The key or the described caller is banned, or a browser sent the request on behalf of a web page whose origin is not allowed.",
    );
    forbidden["content"]["application/json"]["schema"] = json!({ "anyOf": [refusal, problem] });
    forbidden["headers"] = json!({
        "Retry-After": retry,
        "Cache-Control": header("`no-store`, if the caller is banned.", json!({ "type": "string" })),
    });
    let mut path_too_long =
        rejected("The path of the described request is longer than the rules accept (`path_bytes_max`).");
    path_too_long["content"]["application/json"]["schema"] = json!(refusal);
    path_too_long["headers"] = json!({ "Cache-Control": header("`no-store`", json!({ "type": "string" })) });
    json!({
        "200": {
            "description": "The request is allowed.",
            "headers": limits,
            "content": { "application/json": { "schema": decision } },
        },
        "400": rejected("The body is invalid. The message says what is expected. This includes limits that are out of range."),
        "401": unauthenticated(&problem, TOKEN_REQUIRED),
        "403": forbidden,
        "405": not_allowed(&problem, "POST"),
        "408": rejected("The body did not arrive in time."),
        "413": rejected("The body is too large."),
        "414": path_too_long,
        "429": {
            "description": "A limit denies the request; with `wait_ms`, there was no room in time. The body has the decision, as for \
                200, and the fields of the refusal.",
            "headers": denial_headers(),
            "content": { "application/json": { "schema": refusal } },
        },
        "431": { "description": "The headers are too large." },
        "503": {
            "description": "The store is unreachable and `on_failure` is `deny`, or the listener is overloaded. Never sent because of a \
                quota.",
            "headers": { "Retry-After": retry, "Cache-Control": header("`no-store`, if the store is unreachable.", json!({ "type": "string" })) },
            "content": { "application/json": { "schema": { "anyOf": [refusal, problem] } } },
        },
    })
}

/// Returns the operations of `/v1/refund`.
fn refund(schemas: &mut SchemaGenerator) -> Value {
    let (request, refunded) = (schemas.subschema_for::<RefundBody>(), schemas.subschema_for::<RefundedBody>());
    let problem = schemas.subschema_for::<ErrorBody>();
    let rejected = |description: &str| rejected(&problem, description);
    let mut unavailable =
        rejected("The store did not answer, or the listener is overloaded. The refund may be sent again.");
    unavailable["headers"] = json!({ "Retry-After": retry_after() });
    json!({ "post": {
        "operationId": "refund",
        "summary": "Correct the charge of an admitted check, with its receipt",
        "description": "A receipt is applied once, no matter how often and to which instances it is sent. A client that gets no response may \
            send it again.",
        "requestBody": { "required": true, "content": { "application/json": {
            "schema": request,
            "examples": {
                "all": { "summary": "Refund all units", "value": { "receipt": "AQ…" } },
                "used": { "summary": "Correct an estimate", "value": { "receipt": "AQ…", "used": 320 } },
                "status": { "summary": "Report the outcome of a request", "value": { "receipt": "AQ…", "status": 200 } },
            },
        } } },
        "responses": {
            "200": {
                "description": "The receipt is valid. `applied` says whether this refund was applied.",
                "content": { "application/json": { "schema": refunded } },
            },
            "400": rejected("The body is invalid, or the receipt was not issued by this deployment (`invalid_receipt`)."),
            "401": unauthenticated(&problem, TOKEN_REQUIRED),
            "403": rejected("A browser sent the request on behalf of a web page whose origin is not allowed."),
            "405": not_allowed(&problem, "POST"),
            "408": rejected("The body did not arrive in time."),
            "409": rejected("The units were counted in the memory of another instance. Only that instance can refund them."),
            "413": rejected("The body is too large."),
            "431": { "description": "The headers are too large." },
            "503": unavailable,
        },
    } })
}

/// Returns a response without a decision. `problem` is the schema of its body.
fn rejected(problem: &Schema, description: &str) -> Value {
    json!({ "description": description, "content": { "application/json": { "schema": problem } } })
}

/// Returns a 401 response.
fn unauthenticated(problem: &Schema, description: &str) -> Value {
    let mut response = rejected(problem, description);
    response["headers"] = json!({ "WWW-Authenticate": header("The scheme: `Bearer`.", json!({ "type": "string" })) });
    response
}

/// Returns the 405 response of a path that accepts these methods.
fn not_allowed(problem: &Schema, methods: &str) -> Value {
    let mut response = rejected(problem, &format!("The method is not {methods}."));
    response["headers"] = json!({ "Allow": header("The allowed methods.", json!({ "type": "string" })) });
    response
}

fn header(description: &str, schema: Value) -> Value {
    json!({ "description": description, "schema": schema })
}

fn retry_after() -> Value {
    header(
        "Seconds until the request may be sent again; absent if it would never be allowed.",
        json!({ "type": "integer", "minimum": 1 }),
    )
}

/// Returns the OpenAPI objects of the headers of a denial, by name.
fn denial_headers() -> Value {
    let mut headers = limit_headers();
    headers["Retry-After"] = retry_after();
    headers["Cache-Control"] = header("`no-store`", json!({ "type": "string" }));
    headers
}

/// Returns the OpenAPI objects of all headers that describe limits, by name. A rule chooses which of them are sent.
fn limit_headers() -> Value {
    let number = || json!({ "type": "integer", "minimum": 0 });
    let text = || json!({ "type": "string" });
    json!({
        "X-RateLimit-Limit": header("The quota of the most restrictive limit.", number()),
        "X-RateLimit-Remaining": header("The remaining units of that limit.", number()),
        "X-RateLimit-Reset": header("When more units of that limit are available, in Unix seconds.", number()),
        "RateLimit-Policy": header("The name, quota (q) and window in seconds (w) of every limit.", text()),
        "RateLimit": header("The remaining units (r) of every limit, and the seconds until more are available (t).", text()),
        "RateLimit-Limit": header("For rules with `draft-6`: the quota of the most restrictive limit.", number()),
        "RateLimit-Remaining": header("For rules with `draft-6`: the remaining units of that limit.", number()),
        "RateLimit-Reset": header("For rules with `draft-6`: the seconds until more units of that limit are available.", number()),
    })
}

#[cfg(test)]
mod tests;
