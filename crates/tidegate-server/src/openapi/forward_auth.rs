//! The operations of `/v1/forward-auth` in the OpenAPI document.

use schemars::Schema;
use serde_json::{Value, json};

use super::{denial_headers, header, limit_headers, retry_after, schemas};

/// Returns the paths by name. `problem` is the schema of an error's body.
pub(super) fn paths(problem: &Schema) -> [(&'static str, Value); 2] {
    let plain = json!({ "get": {
        "operationId": "forwardAuth",
        "summary": "Decide whether a request is allowed, for Caddy or Traefik",
        "description": "The proxy describes a request in headers, and sends the visitor's other headers unchanged. The configured \
            rules decide. Any method is accepted; the body and the query are ignored. The address of the proxy must be in \
            `trusted_proxies` in the configuration. No token is required.",
        "parameters": parameters(),
        "responses": plain_responses(problem),
    } });
    let nginx = json!({ "get": {
        "operationId": "forwardAuthNginx",
        "summary": "Decide whether a request is allowed, for the auth_request module of nginx",
        "description": "Like `/v1/forward-auth`, but a refusal is always 403, because nginx turns other statuses into a 500. \
            The response for the visitor is in headers.",
        "parameters": parameters(),
        "responses": nginx_responses(problem),
    } });
    [("/v1/forward-auth", plain), ("/v1/forward-auth/nginx", nginx)]
}

fn parameters() -> Value {
    let parameter = |name: &str, description: &str, example: &str, schema: Value| {
        json!({
            "name": name, "in": "header", "required": true,
            "description": description, "example": example, "schema": schema,
        })
    };
    // Not empty, and more than white space, which is not part of a header's value.
    let text = || json!({ "type": "string", "pattern": "[^\\t ]" });
    json!([
        parameter("X-Forwarded-Method", "The method of the visitor's request.", "POST", schemas::method_text()),
        parameter(
            "X-Forwarded-Uri",
            "The path and query of the visitor's request.",
            "/shorten?x=1",
            schemas::path_text()
        ),
        parameter("X-Forwarded-Host", "The host of the visitor's request.", "example.com", text()),
        parameter(
            "X-Forwarded-For",
            "The visitor's address, as in any request through trusted proxies. If `forwarding_header` in the \
                configuration names another header, that one is required instead.",
            "203.0.113.9",
            text(),
        ),
    ])
}

fn plain_responses(problem: &Schema) -> Value {
    let no_store = || header("`no-store`", json!({ "type": "string" }));
    // The format is that of the rule. A template has the content type of the configuration, which is not listed here.
    let refusal_bodies = json!({
        "application/json": { "schema": { "type": "object" } },
        "application/problem+json": { "schema": { "type": "object" } },
        "text/plain; charset=utf-8": { "schema": { "type": "string" } },
    });
    json!({
        "200": { "description": "The request is allowed. The body is empty.", "headers": limit_headers() },
        "400": bad_request(problem),
        "403": {
            "description": "The visitor is banned.",
            "headers": { "Retry-After": retry_after(), "Cache-Control": no_store() },
            "content": { "application/json": { "schema": { "type": "object" } } },
        },
        "414": {
            "description": "The path is longer than the rules accept (`path_bytes_max`).",
            "headers": { "Cache-Control": no_store() },
            "content": { "application/json": { "schema": { "type": "object" } } },
        },
        "429": {
            "description": "A limit denies the request. The body has the format of the rule.",
            "headers": denial_headers(),
            "content": refusal_bodies,
        },
        "431": { "description": "The headers are too large." },
        "503": {
            "description": "The store is unreachable and the rule has `on_failure = \"deny\"`, or the listener is overloaded. The body has \
                the format of the rule.",
            "headers": { "Retry-After": retry_after(), "Cache-Control": no_store() },
            "content": refusal_bodies,
        },
    })
}

fn nginx_responses(problem: &Schema) -> Value {
    let mut refusal_headers = denial_headers();
    refusal_headers["X-Tidegate-Status"] =
        header("The status for the visitor: 429, 403, 503, 414 or 400.", json!({ "type": "integer" }));
    refusal_headers["X-Tidegate-Body"] = header(
        "The body for the visitor, in one line. Absent if it exceeds 8 KiB.",
        json!({ "type": "string", "maxLength": 8 * 1024 }),
    );
    refusal_headers["X-Tidegate-Content-Type"] = header("The content type of that body.", json!({ "type": "string" }));
    json!({
        "204": { "description": "The request is allowed.", "headers": limit_headers() },
        "400": bad_request(problem),
        "403": { "description": "The request is refused. The headers contain the response for the visitor.", "headers": refusal_headers },
        "431": { "description": "The headers are too large." },
        "503": {
            "description": "The listener is overloaded.",
            "headers": { "Retry-After": retry_after() },
            "content": { "application/json": { "schema": problem } },
        },
    })
}

fn bad_request(problem: &Schema) -> Value {
    json!({
        "description": "The proxy is not trusted, or a header is missing, malformed or repeated. The message says what is expected.",
        "content": { "application/json": { "schema": problem } },
    })
}

#[cfg(test)]
mod tests;
