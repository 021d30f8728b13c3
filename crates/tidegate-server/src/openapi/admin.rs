//! The OpenAPI document of the admin listener.

use schemars::Schema;
use serde_json::{Value, json};

use super::{header, not_allowed, openapi, rejected, retry_after, schema_settings, unauthenticated};
use crate::explain::Explanation;
use crate::listeners::admin::api_keys::{KeyChangeRequest, KeyListReport, KeyReport};
use crate::listeners::admin::bans::{BanReport, BansReport};
use crate::listeners::admin::keys::{CounterReport, ResetReport};
use crate::listeners::admin::rules::RulesBody;
use crate::listeners::admin::{HealthBody, NotReloadedBody};
use crate::listeners::http::request::by_rules_schema;
use crate::listeners::http::response::ErrorBody;
use crate::metrics::MetricsFormat;
use crate::readiness::ReadinessBody;
use crate::reload::ReloadedBody;

/// The name of the security scheme.
const TOKEN: &str = "token";

/// Which requests to a path are accepted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    /// All requests.
    Everyone,
    /// Requests with or without a token, but not those of foreign web pages, or for an unknown host.
    NoToken,
    /// As `NoToken`, and only with the token.
    Token,
}

/// Returns the OpenAPI document of the admin listener.
pub(super) fn document() -> Value {
    let mut requests = schema_settings().into_generator();
    let described = by_rules_schema(&mut requests);
    let change = requests.subschema_for::<KeyChangeRequest>();
    let mut bodies = schema_settings().for_serialize().into_generator();
    let problem = bodies.subschema_for::<ErrorBody>();
    let [healthz, readyz] = [bodies.subschema_for::<HealthBody>(), bodies.subschema_for::<ReadinessBody>()];
    let [counters, reset] = [bodies.subschema_for::<CounterReport>(), bodies.subschema_for::<ResetReport>()];
    let [key, keys] = [bodies.subschema_for::<KeyReport>(), bodies.subschema_for::<KeyListReport>()];
    let [ban, bans] = [bodies.subschema_for::<BanReport>(), bodies.subschema_for::<BansReport>()];
    let rules = bodies.subschema_for::<RulesBody>();
    let [reloaded, not_reloaded] = [bodies.subschema_for::<ReloadedBody>(), bodies.subschema_for::<NotReloadedBody>()];
    let explanation = bodies.subschema_for::<Explanation>();

    let path = |access, methods: &str, operations: Value| complete(operations, access, methods, &problem);
    let rejected = |description: &str| rejected(&problem, description);
    let bad_query = || rejected("A parameter is unknown, missing or invalid. The message says what is expected.");
    let store_failed = || rejected("The store failed, or the listener is overloaded.");
    let client = || {
        let what = "The client: an address, a network, an API key or the name of one, `user:ID`, or a subject as `tidegate \
                    explain --reveal` shows it. Without rules, it is also the key that a check names.";
        parameter("client", false, what, "203.0.113.9", json!({ "type": "string" }))
    };
    let ban_key = || {
        let what = "The key that a check names, instead of a client. At most 65536 bytes.";
        parameter("key", false, what, "user:42", json!({ "type": "string" }))
    };
    let no_client = || {
        rejected(
            "A parameter is unknown, missing or invalid, or no rule counts this client. The message says what is expected.",
        )
    };
    let of_key = |id: &str, summary: &str, body: Option<(Value, Value)>| {
        let mut operation = json!({
            "operationId": id,
            "summary": summary,
            "parameters": [{
                "name": "name", "in": "path", "required": true, "description": "The name of the key's owner.",
                "example": "acme", "schema": { "type": "string" },
            }],
            "responses": {
                "200": response("The key, after the change if there is one.", &key),
                "400": rejected("The query, the name or the body is invalid. The message says what is accepted."),
                "404": rejected("No API key in the Redis hash has this name."),
                "409": rejected(
                    "The configuration has no Redis hash of API keys, lists the key itself, or the entry cannot be changed.",
                ),
                "503": store_failed(),
            },
        });
        if let Some((schema, example)) = body {
            operation["description"] = "In force on all instances within a second. Counters are kept.".into();
            operation["requestBody"] = json!({ "required": true, "content": { "application/json": {
                "schema": schema, "example": example,
            } } });
            operation["responses"]["408"] = rejected("The body did not arrive in time.");
            operation["responses"]["413"] = rejected("The body has more than 16 KiB.");
        }
        operation
    };
    let one_field = |field: &str, schema: Value| json!({ "type": "object", "properties": { field: schema }, "required": [field], "additionalProperties": false });
    let groups = || json!({ "type": "array", "items": { "type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$" } });
    let limits = || {
        let what = "The key's own limits, each a text or an object as in a keys file; or one of them.";
        json!({ "description": what, "type": ["array", "string", "object"] })
    };
    let paths = json!({
        "/healthz": path(Access::Everyone, "GET, HEAD", json!({ "get": {
            "operationId": "healthz",
            "summary": "Report that the process is alive",
            "responses": { "200": response("The process is alive.", &healthz) },
        } })),
        "/readyz": path(Access::NoToken, "GET, HEAD", json!({ "get": {
            "operationId": "readyz",
            "summary": "Report whether requests should be sent to this instance",
            "responses": {
                "200": response("The instance is ready.", &readyz),
                "503": response("The instance is not ready, or the listener is overloaded.", &json!({ "anyOf": [readyz, problem] })),
            },
        } })),
        "/metrics": path(Access::NoToken, "GET, HEAD", json!({ "get": {
            "operationId": "metrics",
            "summary": "Return the metrics for Prometheus",
            "description": "The header `Accept` chooses the format.",
            "responses": { "200": metrics() },
        } })),
        "/v1/rules": path(Access::Token, "GET, HEAD", json!({ "get": {
            "operationId": "listRules",
            "summary": "List the rules in force, and their decisions so far",
            "responses": { "200": response("The rules. Empty without a configuration.", &rules) },
        } })),
        "/v1/keys": path(Access::Token, "GET, HEAD, DELETE", json!({
            "get": {
                "operationId": "inspectCounters",
                "summary": "Return the counters of a key or of a client, or list the API keys of the Redis hash",
                "description": "`key` and `limit` select the counter of explicit checks; `key` alone, the counters of a client in all rules, \
                    and with `rule` in one rule. Nothing is charged. Without parameters, lists the API keys in the Redis hash of the \
                    configuration, at most 1,000.",
                "parameters": counter_parameters(false),
                "responses": {
                    "200": response("The selected counters, or the API keys.", &json!({ "anyOf": [counters, keys] })),
                    "400": bad_query(),
                    "409": rejected("The configuration has no Redis hash of API keys."),
                    "503": store_failed(),
                },
            },
            "delete": {
                "operationId": "resetCounters",
                "summary": "Delete the counters of a key, or of a client in one rule or all rules",
                "description": "The parameters are those of `GET`. In a rule with limits per plan, the counters of all plans are \
                    deleted. After a 503, some counters may be deleted.",
                "parameters": counter_parameters(true),
                "responses": {
                    "200": response("The number of counters that existed.", &reset), "400": bad_query(), "503": store_failed(),
                },
            },
        })),
        "/v1/keys/{name}": path(Access::Token, "GET, HEAD, PATCH", json!({
            "get": of_key("showKey", "Return an API key in the Redis hash of the configuration", None),
            "patch": of_key(
                "changeKey", "Change the plan, the own limits and the groups of an API key",
                Some((json!(change), json!({ "plan": "pro", "limits": ["5000/h"], "groups": ["partners"] }))),
            ),
        })),
        "/v1/keys/{name}/plan": path(Access::Token, "PUT, DELETE", json!({
            "put": of_key(
                "setKeyPlan", "Set the plan of an API key",
                Some((one_field("plan", json!({ "type": "string" })), json!({ "plan": "pro" }))),
            ),
            "delete": of_key("removeKeyPlan", "Remove the plan of an API key", None),
        })),
        "/v1/keys/{name}/limits": path(Access::Token, "PUT, DELETE", json!({
            "put": of_key(
                "setKeyLimits", "Set the own limits of an API key, which replace those of its plan",
                Some((one_field("limits", limits()), json!({ "limits": ["100/min", "5000/h"] }))),
            ),
            "delete": of_key("removeKeyLimits", "Remove the own limits of an API key", None),
        })),
        "/v1/keys/{name}/groups": path(Access::Token, "PUT, DELETE", json!({
            "put": of_key(
                "setKeyGroups", "Set the groups of an API key, to which rules can apply",
                Some((one_field("groups", groups()), json!({ "groups": ["partners"] }))),
            ),
            "delete": of_key("removeKeyGroups", "Remove the groups of an API key", None),
        })),
        "/v1/bans": path(Access::Token, "GET, HEAD, PUT, DELETE", json!({
            "get": {
                "operationId": "inspectBan",
                "summary": "Return whether a client is banned at run time, or all bans",
                "description": "Without a client or a key, returns all bans.",
                "parameters": [client(), ban_key()],
                "responses": {
                    "200": response("The ban, if there is one, or all bans.", &json!({ "anyOf": [ban, bans] })),
                    "400": no_client(), "503": store_failed(),
                },
            },
            "put": {
                "operationId": "ban",
                "summary": "Ban a client",
                "description": "Replaces an earlier ban on the client. Either `client` or `key` is required.",
                "parameters": [
                    client(),
                    ban_key(),
                    parameter(
                        "for", false, "How long the ban lasts, at least 1ms. Without it, the ban is permanent.", "1h 30min",
                        json!({ "type": "string" }),
                    ),
                ],
                "responses": {
                    "200": response("The client is banned.", &ban), "400": no_client(),
                    "409": rejected("There are 10,000 bans, the maximum."), "503": store_failed(),
                },
            },
            "delete": {
                "operationId": "unban",
                "summary": "Lift the ban on a client",
                "description": "Either `client` or `key` is required.",
                "parameters": [client(), ban_key()],
                "responses": { "200": response("The ban is lifted, if there was one.", &ban), "400": no_client(), "503": store_failed() },
            },
        })),
        "/v1/explain": path(Access::Token, "POST", json!({ "post": {
            "operationId": "explain",
            "summary": "Explain what the rules would do with a request",
            "description": "The body is that of `POST /v1/check` on the HTTP listener, in the form that describes a request. `receipt` has no \
                effect. Counters are read, and nothing is charged. If the store does not answer, `counters_unknown` says why.",
            "parameters": [
                parameter(
                    "reveal", false, "Whether the values of subjects are shown. They are masked by default.", "true",
                    json!({ "type": "string", "enum": ["true", "false"] }),
                ),
                parameter(
                    "client", false, "The client of the request, instead of its `peer` and API key: an address, an API key or the \
                    name of one, or `user:ID`.", "acme", json!({ "type": "string" }),
                ),
            ],
            "requestBody": { "required": true, "content": { "application/json": {
                "schema": described,
                "examples": { "request": { "summary": "A request", "value": { "request": {
                    "method": "POST", "path": "/shorten", "headers": { "x-api-key": "…" }, "peer": "203.0.113.9",
                } } } },
            } } },
            "responses": {
                "200": response("What each rule would do, and why.", &explanation),
                "400": rejected("The query or the body is invalid, or the instance has no rules. The message says what is expected."),
                "408": rejected("The body did not arrive in time."),
                "413": rejected("The body has more than 256 KiB."),
            },
        } })),
        "/v1/reload": path(Access::Token, "POST", json!({ "post": {
            "operationId": "reload",
            "summary": "Reload the configuration and the certificate",
            "responses": {
                "200": response("The new configuration and certificate are in use.", &reloaded),
                "409": rejected("The server was started with neither a configuration nor a certificate."),
                "422": response("The configuration or the certificate cannot be used. The old one stays in use.", &not_reloaded),
            },
        } })),
    });
    let mut schemas = requests.take_definitions(true);
    schemas.extend(bodies.take_definitions(true));
    schemas.values_mut().for_each(describe_as_json);
    let scheme = json!({
        "type": "http", "scheme": "bearer",
        "description": "The admin token. If none is configured, the server generates one and prints it once at startup.",
    });
    let components = json!({ "schemas": schemas, "securitySchemes": { TOKEN: scheme } });
    let description = "The API of the admin listener, for the operator of an instance.";
    openapi("Tidegate admin API", description, paths, components)
}

/// Adds what all operations of a path have in common: the security scheme, the responses to rejected requests, and the
/// header `Cache-Control`. `methods` are the allowed methods, as in the header `Allow`.
fn complete(mut operations: Value, access: Access, methods: &str, problem: &Schema) -> Value {
    for operation in operations.as_object_mut().into_iter().flat_map(|operations| operations.values_mut()) {
        let responses = &mut operation["responses"];
        responses["405"] = not_allowed(problem, methods);
        if access != Access::Everyone {
            responses["403"] =
                rejected(problem, "A browser sent the request on behalf of a web page whose origin is not allowed.");
            responses["421"] = rejected(
                problem,
                "The name in `Host` is neither an address, nor a name without a dot, nor configured.",
            );
        }
        if access == Access::Token {
            responses["401"] =
                unauthenticated(problem, "The request has no `Authorization: Bearer` header, or its token is wrong.");
            responses["429"] = rejected(problem, "Too many attempts from this address are waiting.");
            responses["429"]["headers"] = json!({ "Retry-After": retry_after() });
        }
        for response in responses.as_object_mut().into_iter().flat_map(|responses| responses.values_mut()) {
            response["headers"]["Cache-Control"] = header("`no-store`", json!({ "type": "string" }));
        }
        // The connection rejects these requests before the listener gets them, so they lack the header.
        responses["431"] = json!({ "description": "The headers are too large." });
        for (status, description) in
            [("408", "The request did not arrive in time."), ("503", "The listener is overloaded.")]
        {
            if responses[status].is_null() {
                responses[status] = rejected(problem, description);
            }
        }
        responses["503"]["headers"]["Retry-After"] = retry_after();
        if access == Access::Token {
            operation["security"] = json!([{ TOKEN: [] }]);
        }
    }
    operations
}

/// Changes the descriptions in a schema, which are those of Rust types, to name null instead of `None`.
fn describe_as_json(schema: &mut Value) {
    match schema {
        Value::Object(keywords) => {
            for (keyword, value) in keywords {
                match value {
                    Value::String(text) if keyword == "description" => *text = text.replace("`None`", "null"),
                    value => describe_as_json(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(describe_as_json),
        _ => {}
    }
}

/// Returns a response whose body is JSON.
fn response(description: &str, schema: &impl serde::Serialize) -> Value {
    json!({ "description": description, "content": { "application/json": { "schema": schema } } })
}

fn metrics() -> Value {
    let mut response = json!({ "description": "The metrics." });
    for format in [MetricsFormat::Text, MetricsFormat::OpenMetrics] {
        response["content"][format.content_type()] = json!({ "schema": { "type": "string" } });
    }
    response
}

/// Returns a parameter of the query.
fn parameter(name: &str, is_required: bool, description: &str, example: &str, schema: Value) -> Value {
    json!({
        "name": name, "in": "query", "required": is_required,
        "description": description, "example": example, "schema": schema,
    })
}

/// Returns the parameters that select counters. `key` is not required where there is another operation without it.
fn counter_parameters(is_key_required: bool) -> Value {
    let text = || json!({ "type": "string" });
    let key = "The key that a check names. With `rule`, or without `limit`, a client: an address, an API key, the name of a key, \
         `user:ID`, or a subject.";
    let limit = "The limit that a check names. With `rule`, the name of one of its limits; all of them by default.";
    let plan = "The plan of the client, in a rule with limits per plan. Required if nothing else determines it.";
    json!([
        parameter("key", is_key_required, key, "user:42", text()),
        parameter("limit", false, limit, "10/min", text()),
        parameter("rule", false, "The name of a rule.", "shorten", text()),
        parameter("plan", false, plan, "pro", text()),
    ])
}

#[cfg(test)]
mod tests;
