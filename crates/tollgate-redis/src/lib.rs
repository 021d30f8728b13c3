//! Counters on Redis and Valkey: one script, one round trip, one truth for many nodes.
//!
//! ```no_run
//! use tollgate_core::{Check, Demand, Key, Limit, Store};
//! use tollgate_redis::RedisStore;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let store = RedisStore::builder("redis://127.0.0.1").build()?;
//! println!("{:?}", store.check_server().await?);
//!
//! let limit: Limit = "100/min".parse()?;
//! let demand = Demand::new(limit, Key::new("user:42")?);
//! let decision = store.decide(&[Check::one(&demand)]).await?.remove(0);
//! println!("{} left", decision.lines[0].remaining);
//! # Ok(())
//! # }
//! ```
//!
//! # The way of a decision
//!
//! ```text
//!   RedisStore::decide ─▶ key, request   the check in the script's words        key.rs, request.rs
//!        │ queue
//!        ▼
//!   lane                  what waits becomes a call; connects and reconnects    lane.rs, lane/, connection.rs
//!        │ EVALSHA
//!        ▼
//!   lua/tollgate.lua      decides all of it by the server's clock
//!        │ integers
//!        ▼
//!   reply, answer         back to decisions, or to an error of a known kind     reply.rs, answer.rs, fault.rs
//! ```
//!
//! # What an error says
//!
//! An error that [`is_unexecuted`](tollgate_core::StoreError::is_unexecuted) certainly charged nothing. A
//! timeout or a broken connection after sending may have, and is never retried here. No error, log or `Debug` of this
//! crate shows a password, a key or an address of a client.
//!
//! # What is deliberately absent
//!
//! No deadline per caller, no breaker, no fallback: those wrap any store. No scan, no index, no key without a TTL but a
//! ban for good. No timer per check or per call. No check waits for another's reply. No call behind one that was given up: a late reply cannot be
//! taken for another's.

mod answer;
mod connection;
mod fault;
mod key;
mod lane;
mod reply;
mod request;
mod server_check;
mod store;
mod tls;
mod url;

pub use key::PrefixError;
pub use reply::Reply;
pub use server_check::{ServerCheckError, ServerReport};
pub use store::{BuildError, RedisStats, RedisStore, RedisStoreBuilder};
pub use tls::TlsError;
pub use url::UrlError;

/// The script that decides, for every language. Its opening comment is its contract.
pub const SCRIPT: &str = include_str!("../lua/tollgate.lua");
