//! A Tidegate store on Redis and Valkey: counters that instances share, decided by one Lua script in one round trip.
//!
//! ```no_run
//! use tidegate_core::{Check, Demand, Key, Limit, Store};
//! use tidegate_redis::RedisStore;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let store = RedisStore::builder("redis://127.0.0.1").build()?;
//! println!("{:?}", store.check_server().await?);
//!
//! let limit: Limit = "100/min".parse()?;
//! let demand = Demand::new(limit, Key::new("user:42")?);
//! let decision = store.decide(&[Check::one(&demand)]).await?.remove(0);
//! println!("{} left", decision.limits[0].remaining);
//! # Ok(())
//! # }
//! ```
//!
//! # The path of a decision
//!
//! ```text
//!   RedisStore::decide ─▶ key, request   encodes the check for the script       store.rs, key.rs, request.rs
//!        │                cluster         finds the node; follows redirections   cluster.rs
//!        │ queue                                                                 node.rs
//!        ▼
//!   worker                batches waiting checks into calls; (re)connects       worker.rs, worker/, connection.rs
//!        │                with credentials and certificates as they are now     credentials.rs, tls.rs
//!        │ EVALSHA
//!        ▼
//!   lua/tidegate.lua      decides the whole batch by the server's clock
//!        │ integers
//!        ▼
//!   reply, answer         decodes decisions, or an error of a known kind        reply.rs, answer.rs, fault.rs
//! ```
//!
//! # Errors
//!
//! If [`is_unexecuted`](tidegate_core::StoreError::is_unexecuted) is true for an error, nothing was charged. After a
//! timeout or a connection that broke during a call, the check may have been charged, and the store never retries it.
//! No error, log or `Debug` output of this crate contains a password, a key or a client's address.
//!
//! # What is deliberately absent
//!
//! - No deadline per caller, no circuit breaker, no fallback: a wrapper around any store provides them.
//! - No scan, no index of counters, and no key without a TTL except a permanent ban.
//! - No timer per check or per call, and no check that waits for the reply to another one.
//! - No further call on a connection on which a call was abandoned, so a late reply cannot be taken for another one.

mod acl;
mod answer;
mod builder;
mod cluster;
mod connection;
mod credentials;
mod fault;
mod key;
mod node;
mod reply;
mod request;
mod router;
mod sentinel;
mod server_check;
mod store;
mod tls;
mod url;
mod worker;

pub use acl::acl_rules;
pub use builder::{BuildError, RedisStoreBuilder};
pub use credentials::{CredentialSource, CredentialsError};
pub use key::PrefixError;
pub use reply::Reply;
pub use server_check::{Eviction, ServerCheckError, ServerReport};
pub use store::{RedisStats, RedisStore};
pub use tls::{TlsError, TlsOptions, TlsVersion};
pub use url::{StoreAddress, StoreKind, UrlError};

/// The source of the Lua script that decides. Its opening comment documents keys, arguments and replies.
pub const SCRIPT: &str = include_str!("../lua/tidegate.lua");
/// The source of the Lua script that announces an instance and counts the live ones.
pub(crate) const INSTANCES_SCRIPT: &str = include_str!("../lua/instances.lua");
