//! An API whose callers have plans: the rules are in `tidegate.toml`, the keys in `keys.toml`.
//!
//! ```console
//! $ cargo run -p plans
//! $ curl -i http://127.0.0.1:3001/v1/hello                                  # anonymous, by address
//! $ curl -i -H 'x-api-key: demo-free-key' http://127.0.0.1:3001/v1/hello    # by key, under its plan
//! ```

#[cfg(test)]
mod tests;

use std::error::Error;
use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tidegate::config::Config;
use tidegate::engine::Engine;
use tidegate::layer::RateLimitLayer;
use tokio::net::TcpListener;

/// The default configuration file. The first command-line argument overrides it.
const CONFIGURATION: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tidegate.toml");

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let file = std::env::args().nth(1).unwrap_or_else(|| CONFIGURATION.to_owned());
    let app = app(engine(&file)?);
    let port = match std::env::var("PORT") {
        Ok(port) => port.parse().map_err(|_| format!("PORT is {port:?}; expected a port from 0 to 65535"))?,
        Err(_) => 3001,
    };
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

/// Creates an engine with the rules and the store of a configuration file. Without `store`, the counters are in memory.
fn engine(file: &str) -> Result<Engine, Box<dyn Error>> {
    let loaded = Config::load(file)?;
    for finding in &loaded.findings {
        eprintln!("{}: {finding}", finding.severity());
    }
    Ok(loaded.engine()?)
}

/// Builds the service. Handlers need not know about plans: requests over a limit do not reach them.
fn app(engine: Engine) -> Router {
    Router::new().route("/v1/hello", get(|| async { "hello" })).layer(RateLimitLayer::axum(engine))
}
