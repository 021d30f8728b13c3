//! The routes: a completion, and the remaining tokens.

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Response, StatusCode};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::json;

use crate::budget::Budget;
use crate::model::Prompt;

/// API keys and their customers. A real service would have them in a database.
const CUSTOMERS: [(&str, &str); 2] = [("demo-key", "customer:demo"), ("other-key", "customer:other")];
/// Maximum length of a completion.
const MAX_TOKENS_MAX: u32 = 4_096;

pub(crate) fn app(budget: Budget) -> Router {
    Router::new().route("/v1/complete", post(complete)).route("/v1/budget", get(left)).with_state(budget)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    prompt: String,
    max_tokens: u32,
}

async fn complete(State(budget): State<Budget>, headers: HeaderMap, Json(asked): Json<Asked>) -> Response<Body> {
    let Some(customer) = customer(&headers) else { return unknown_key() };
    if !(1..=MAX_TOKENS_MAX).contains(&asked.max_tokens) {
        let message = format!("max_tokens must be from 1 to {MAX_TOKENS_MAX}, got {}", asked.max_tokens);
        return error(StatusCode::BAD_REQUEST, "invalid", &message);
    }
    let prompt = Prompt { text: asked.prompt, max_tokens: asked.max_tokens };
    let reserved = prompt.estimate();
    // A separate task, from the reservation to the settlement: if the client disconnects, the cost is still settled.
    let work = tokio::spawn({
        let budget = budget.clone();
        async move {
            let reservation = budget.reserve(customer, reserved, &headers).await?;
            let completion = prompt.complete().await;
            reservation.settle(completion.prompt_tokens.saturating_add(completion.completion_tokens)).await;
            Ok(completion)
        }
    });
    let completion = match work.await {
        Ok(Ok(completion)) => completion,
        Ok(Err(refusal)) => return refusal,
        // The cost of a failed completion is unknown, so the estimate stays charged.
        Err(_broken) => return error(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the completion failed"),
    };
    let usage = json!({
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "reserved_tokens": reserved,
    });
    let mut response = Json(json!({ "text": completion.text, "usage": usage })).into_response();
    budget.write_headers(customer, response.headers_mut()).await;
    response
}

async fn left(State(budget): State<Budget>, headers: HeaderMap) -> Response<Body> {
    let Some(customer) = customer(&headers) else { return unknown_key() };
    let mut response = StatusCode::NO_CONTENT.into_response();
    budget.write_headers(customer, response.headers_mut()).await;
    response
}

fn customer(headers: &HeaderMap) -> Option<&'static str> {
    let shown = headers.get("x-api-key")?;
    CUSTOMERS.iter().find(|(key, _)| shown == key).map(|(_, customer)| *customer)
}

fn unknown_key() -> Response<Body> {
    error(StatusCode::UNAUTHORIZED, "unauthenticated", "expected a known key in x-api-key")
}

fn error(status: StatusCode, error: &str, message: &str) -> Response<Body> {
    (status, Json(json!({ "error": error, "message": message }))).into_response()
}
