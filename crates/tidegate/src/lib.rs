//! A rate limiter with true sliding windows.
//!
//! [`Limiter`] decides whether a key may take units of a limit. It counts in process memory or on a shared store, and
//! still decides while that store does not answer:
//!
//! ```
//! use tidegate::{Limit, Limiter};
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let limiter = Limiter::memory(); // or shared: Limiter::builder().url("redis://localhost")?.build()
//!     let limit: Limit = "10/min".parse()?;
//!
//!     let decision = limiter.check_key(&limit, "user:42").await?;
//!     assert!(decision.allowed());
//!     assert_eq!(decision.remaining(), Some(9));
//!     Ok(())
//! }
//! ```
//!
//! The example needs `tokio` with the features `macros` and `rt-multi-thread`.
//!
//! `RateLimitLayer::per_ip("10/min")?` is a Tower layer that limits an HTTP service. `Rules` set limits by route,
//! caller or plan, in code; `Config` and `Loader` read the same rules from a file. An `Engine` applies them to
//! requests.
//!
//! The most frequently used types are at the root. The modules hold the rest. The limits, the algorithms and the memory
//! store are those of `tidegate-core`, re-exported here.
//!
//! # Features
//!
//! Without any feature, the crate is a limiter in process memory or on your own implementation of [`Store`].
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `redis` | yes | counters on Redis and Valkey: `LimiterBuilder::url` |
//! | `rules` | yes | limits by rules, in code or from a TOML file: `rules`, `config`, `identity`, `engine`, `answer` |
//! | `jwt` | – | users by verified JSON web tokens: `[jwt]` in a file, `Rules::jwt`, `identity::TokenVerifier` |
//! | `yaml` | – | configuration files in YAML, in addition to TOML |
//! | `notify` | – | operating-system file events for `RulesWatcher`, which reloads a changed file; without them it polls |
//! | `schema` | – | the JSON schema of the configuration file, for editors: `Config::schema` |
//! | `tower` | – | `RateLimitLayer` for any HTTP service |
//! | `axum` | – | `RateLimitLayer::axum`, which finds the remote address of a connection where axum puts it |

#[cfg(feature = "rules")]
pub mod answer;
mod breaker;
#[cfg(feature = "rules")]
pub mod config;
mod counts;
mod deadline;
mod deny_cache;
#[cfg(feature = "rules")]
pub mod engine;
mod failure;
#[cfg(all(any(fuzzing, test), feature = "rules", feature = "jwt", feature = "yaml"))]
pub mod fuzz;
#[cfg(feature = "rules")]
pub mod gateway;
#[cfg(doctest)]
mod guide;
#[cfg(feature = "rules")]
pub mod identity;
#[cfg(feature = "tower")]
pub mod layer;
mod limiter;
pub mod observe;
#[cfg(feature = "rules")]
pub mod receipt;
#[cfg(feature = "rules")]
pub mod rules;
mod run_to_completion;
mod ttl_cache;

#[cfg(feature = "rules")]
pub use config::{Config, Format, Loader, RulesWatcher};
pub use counts::{DecisionCounts, DecisionOutcome, OutcomeCount};
#[cfg(feature = "rules")]
pub use engine::{Engine, Outcome, RequestOptions};
pub use failure::{CheckKeyError, OnFailure, Unavailable};
#[cfg(feature = "rules")]
pub use identity::{ForwardingHeader, KeyDigest, KnownKey, Networks, Subject, TrustedProxies};
#[cfg(feature = "tower")]
pub use layer::RateLimitLayer;
#[cfg(feature = "redis")]
pub use limiter::StoreUrlError;
pub use limiter::{
    CheckOptions, ClusterLocation, LimitOptions, Limiter, LimiterBuilder, LimiterStats, NotReady, StoreServer,
};
pub use observe::Observer;
#[cfg(feature = "rules")]
pub use rules::{KeyLookup, Lookups, Plan, PlanLookup, PlanQuestion, RequestView, Rule, Rules};
#[doc(hidden)]
pub use tidegate_core::__io_reason;
pub use tidegate_core::{
    Algorithm, Atomicity, BAN_ENTRY_BYTES_MAX, BAN_LIST_MAX, BanListing, Check, CheckError, Clock, Cost, DEMANDS_MAX,
    Decision, Demand, InstanceId, Key, KeyError, Limit, LimitError, LimitStatus, LimitStatuses, LimitTextError,
    ListedBan, LiveInstances, Location, ManualClock, MemoryStore, MemoryStoreBuilder, NameError, OmittedLimits,
    ReceiptId, Redeemed, Redemption, RuleScope, RuleScopeBuf, Scope, ScopeName, Shard, ShardId, Source, StateMachine,
    Store, StoreError, StoreErrorKind, StoreFuture, SystemClock, Timestamp, UsedReceiptStats, Wait,
};
#[cfg(feature = "redis")]
pub use tidegate_redis as redis;
#[cfg(feature = "redis")]
pub use tidegate_redis::RedisStore;
