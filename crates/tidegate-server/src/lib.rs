//! The listeners of Tidegate (HTTP, RESP, gateway, admin), and the loop that serves them.
//!
//! ```no_run
//! use tidegate::Limiter;
//! use tidegate_server::listeners::http::HTTP;
//! use tidegate_server::{ServerOptions, run};
//!
//! # async fn example() -> std::io::Result<()> {
//! let socket = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
//! let shutdown = std::future::pending();
//! run([(&HTTP, socket)], ServerOptions::new(Limiter::memory()), shutdown).await;
//! # Ok(())
//! # }
//! ```

mod accept;
mod address_slots;
mod auth_guard;
mod browser;
mod budget;
mod client;
mod decider;
mod explain;
mod listener;
pub mod listeners;
mod log_limit;
mod memory_watch;
mod metrics;
mod openapi;
mod proxy_protocol;
mod readiness;
mod receipt_secret;
mod receipts;
mod reload;
mod run;
mod secret;
mod shutdown;
mod stream;
mod tls;
mod wait_text;
mod worker_pool;

pub use browser::{WebOrigin, WebOriginError};
pub use client::OperatorRules;
pub use explain::{ExplainQuery, Explanation, LimitExplanation, PlanExplanation, RuleExplanation, is_masked_subject};
pub use listener::{AddressSetting, ListenerKind, Role, SecretKind, is_loopback};
pub use listeners::LISTENERS;
pub use listeners::admin::api_keys::{
    KeyChangeRequest, KeyEditError, KeyEditor, KeyListReport, KeyReport, OwnLimitReport,
};
pub use listeners::admin::bans::{BanQuery, BanReport, BansReport, ListedBanReport, list_bans};
pub use listeners::admin::keys::{CounterError, CounterQuery, CounterReport, CounterStatus, ResetReport, SkippedRule};
pub use listeners::gateway::{Gateway, UpstreamError, check_upstream};
pub use memory_watch::watch_memory;
pub use metrics::StoreTimes;
pub use readiness::Readiness;
pub use receipt_secret::ReceiptSecret;
pub use reload::{RejectedParts, ReloadError, Reloader, findings_json};
pub use run::{Bounds, ServerOptions, run};
pub use secret::{ListenerSecret, SecretError, SecretForm};
pub use tls::{CertificateError, Tls};
pub use wait_text::format_wait;
