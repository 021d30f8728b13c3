//! The doors of the Tollgate decision service, and the loop that holds them open.
//!
//! ```no_run
//! use tollgate::Limiter;
//! use tollgate_server::{BoundListeners, Listeners, run};
//!
//! # async fn example() -> std::io::Result<()> {
//! let listeners = Listeners { http: Some(tokio::net::TcpListener::bind("127.0.0.1:8080").await?), ..Listeners::default() };
//! run(listeners, BoundListeners::new(Limiter::memory()), async { std::future::pending().await }).await;
//! # Ok(())
//! # }
//! ```

mod accept;
mod admin;
mod auth_guard;
mod browser;
mod budget;
mod explain;
pub mod listeners;
mod log_limit;
mod memory_watch;
mod metrics;
mod openapi;
mod readiness;
mod reload;
mod run;
mod stream;
mod tls;
mod worker_pool;

pub use admin::is_loopback;
pub use admin::token::{AdminTokenError, Token};
pub use browser::{Origin, OriginError};
pub use explain::{Explanation, LimitExplanation, PlanExplanation, RuleExplanation};
pub use memory_watch::watch_memory;
pub use metrics::StoreTimes;
pub use readiness::Readiness;
pub use reload::{ReloadError, Reloader, findings_json};
pub use run::{BoundListeners, Bounds, Listeners, run};
pub use tls::{Tls, TlsError};
