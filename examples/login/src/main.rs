//! A login whose wrong passwords are counted; `tollgate.toml` says how.
//!
//! A limiter that stands before the handler sees the head of a request, not its body. So the name of the user comes in a
//! header, and the handler takes it from there and nowhere else: a client that lies in it logs in as somebody else.
//!
//! ```console
//! $ cargo run -p login
//! $ curl -i -H 'x-user: ada' -H 'cookie: device=laptop' -d wrong http://127.0.0.1:3002/login
//! ```

#[cfg(test)]
mod tests;

use std::error::Error;
use std::net::SocketAddr;

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use tokio::net::TcpListener;
use tollgate::Limiter;
use tollgate::config::Config;
use tollgate::engine::Engine;
use tollgate::layer::RateLimitLayer;

const CONFIGURATION: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tollgate.toml");

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let loaded = Config::load(CONFIGURATION)?;
    let app = app(Engine::new(Limiter::memory(), loaded.rules));
    let listener = TcpListener::bind("127.0.0.1:3002").await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

fn app(engine: Engine) -> Router {
    Router::new().route("/login", post(login)).layer(RateLimitLayer::axum(engine))
}

/// 204 if the password is right. Everything from 400 up is a failure, and stays charged.
async fn login(headers: HeaderMap, password: String) -> StatusCode {
    let Some(user) = headers.get("x-user").and_then(|user| user.to_str().ok()) else {
        return StatusCode::BAD_REQUEST;
    };
    if is_right(user, &password) { StatusCode::NO_CONTENT } else { StatusCode::UNAUTHORIZED }
}

/// Stands for your users and their password hashes.
fn is_right(user: &str, password: &str) -> bool {
    matches!((user, password), ("ada", "engine") | ("grace", "compiler"))
}
