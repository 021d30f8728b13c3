//! The doors of the Tollgate decision service, and the loop that holds them open.
//!
//! ```no_run
//! use tollgate::Limiter;
//! use tollgate_server::{Doors, Listeners, run};
//!
//! # async fn example() -> std::io::Result<()> {
//! let listeners = Listeners { http: Some(tokio::net::TcpListener::bind("127.0.0.1:8080").await?), ..Listeners::default() };
//! run(listeners, Doors::new(Limiter::memory()), async { std::future::pending().await }).await;
//! # Ok(())
//! # }
//! ```

mod accept;
mod admin;
mod auth_guard;
mod browser;
mod budget;
mod crew;
pub mod doors;
mod explain;
mod log_limit;
mod memory_watch;
mod metrics;
mod openapi;
mod readiness;
mod reload;
mod run;
mod stream;
mod tls;

pub use admin::is_loopback;
pub use admin::token::{Token, TokenError};
pub use browser::{Origin, OriginError};
pub use explain::{Explanation, LimitSaid, PlanSaid, RuleSaid};
pub use memory_watch::watch_memory;
pub use metrics::StoreTimes;
pub use readiness::Readiness;
pub use reload::{ReloadError, Reloader, findings_json};
pub use run::{Bounds, Doors, Listeners, run};
pub use tls::{Tls, TlsError};
