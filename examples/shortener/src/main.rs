//! A URL shortener whose `POST /shorten` is limited by address, and whose `GET /{slug}` never is.
//!
//! ```text
//!   POST /shorten ──▶ tidegate ──▶ routes.rs ──▶ slugs.rs ──┐
//!                        │ the limit                        │ the links
//!                        └────────▶ one connection ◀────────┘
//!                                   to Redis, or none
//! ```
//!
//! `settings.rs` reads the environment; everything else is in `README.md`.

mod routes;
mod settings;
mod slugs;

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;

use tidegate::Limiter;
use tidegate::engine::Engine;
use tidegate::layer::RateLimitLayer;
use tidegate::redis::RedisStore;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::settings::Settings;
use crate::slugs::Slugs;

#[tokio::main]
async fn main() -> ExitCode {
    // Tidegate logs when Redis becomes unavailable and when it is available again.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("shortener: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Box<dyn Error>> {
    let settings = Settings::from_environment(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))?;
    let (limiter, slugs) = match &settings.redis_url {
        Some(url) => {
            let redis = RedisStore::builder(url).build().map_err(|error| format!("REDIS_URL: {error}"))?;
            let limiter = Limiter::builder().store(Arc::new(redis.clone())).deadline(settings.redis_deadline).build();
            (limiter, Slugs::on_redis(redis, settings.redis_deadline))
        }
        None => (Limiter::memory(), Slugs::in_memory()),
    };
    let rules = settings.rules()?;

    let stop = asked_to_stop()?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, settings.port))
        .await
        .map_err(|error| format!("PORT: cannot listen on 127.0.0.1:{}: {error}", settings.port))?;
    let address = listener.local_addr()?;
    let public_url = settings.public_url.unwrap_or_else(|| format!("http://{address}"));
    let app = routes::app(slugs.clone(), &public_url, RateLimitLayer::axum(Engine::new(limiter, rules)));

    println!("listening on http://{address}, documentation at http://{address}/docs/");
    // The limit is by address, so the service needs the peer address of each request.
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).with_graceful_shutdown(stop).await?;
    match slugs.unsaved() {
        0 => {}
        lost => tracing::error!(lost, "links that were created while Redis was unavailable are lost"),
    }
    Ok(())
}

/// Returns a future that waits for Ctrl-C or SIGTERM. Both are handled from now on, also before the future is polled.
/// Requests in progress are still answered.
///
/// # Errors
/// If the process cannot handle signals.
fn asked_to_stop() -> std::io::Result<impl Future<Output = ()>> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}
