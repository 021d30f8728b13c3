//! A login endpoint that limits wrong passwords. The rules are in `tidegate.toml`.
//!
//! A limiter in front of the handler sees the headers of a request, not its body. So the user's name is in a header,
//! and the handler reads it only from there: a client that sends another name there also logs in as that other user.
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
use tidegate::config::Config;
use tidegate::engine::Engine;
use tidegate::layer::RateLimitLayer;
use tokio::net::TcpListener;

const CONFIGURATION: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tidegate.toml");

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let loaded = Config::load(CONFIGURATION)?;
    let app = app(loaded.engine()?);
    let listener = TcpListener::bind("127.0.0.1:3002").await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

fn app(engine: Engine) -> Router {
    Router::new().route("/login", post(login)).layer(RateLimitLayer::axum(engine))
}

/// Returns 204 if the password is right, else 401; 400 without a user. A status of 400 or above stays charged.
async fn login(headers: HeaderMap, password: String) -> StatusCode {
    let Some(user) = headers.get("x-user").and_then(|user| user.to_str().ok()) else {
        return StatusCode::BAD_REQUEST;
    };
    if is_right(user, &password) { StatusCode::NO_CONTENT } else { StatusCode::UNAUTHORIZED }
}

/// Returns whether the password is right. Replace it with your user database and its password hashes.
fn is_right(user: &str, password: &str) -> bool {
    matches!((user, password), ("ada", "engine") | ("grace", "compiler"))
}
