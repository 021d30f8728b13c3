//! A rate limiter whose windows really slide.
//!
//! [`Limiter`] decides checks in process memory or on a shared store, and keeps deciding when that
//! store is away. `tollgate-core` has the decision itself; this crate adds what a service needs around it.
//!
//! # Features
//!
//! Without any, this is a small limiter in process memory, or on a [`Store`] of your own.
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `redis` | yes | counters on Redis and Valkey: `LimiterBuilder::url` |
//! | `rules` | yes | limits by rules from a TOML file: `config`, `rules`, `identity`, `engine`, `answer` |
//! | `jwt` | yes | users by verified JSON web tokens |
//! | `yaml` | yes | the file as YAML |
//! | `schema` | – | its JSON schema, for editors: `Config::schema` |
//! | `tower` | – | `layer::RateLimitLayer` for any HTTP service |
//! | `axum` | – | the same, finding the peer where axum puts it |

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
#[cfg(doctest)]
mod guide;
#[cfg(feature = "rules")]
pub mod identity;
#[cfg(feature = "tower")]
pub mod layer;
mod limiter;
pub mod observe;
#[cfg(feature = "rules")]
pub mod rules;
mod ttl_cache;

pub use counts::{Counted, DecisionCounts, DecisionOutcome};
pub use failure::{CheckKeyError, OnFailure, Unavailable};
#[cfg(feature = "rules")]
pub use identity::Subject;
#[cfg(feature = "tower")]
pub use layer::RateLimitLayer;
#[cfg(feature = "redis")]
pub use limiter::StoreUrlError;
pub use limiter::{CheckOptions, EachDecision, Limiter, LimiterBuilder, LimiterStats, NotReady, PartialDecision};
#[cfg(feature = "rules")]
pub use rules::{Rule, Rules};
pub use tollgate_core::{
    Algorithm, Atomicity, Check, CheckError, Clock, Cost, DEMANDS_MAX, Decision, Demand, Key, KeyError, Limit,
    LimitError, LimitStatus, LimitStatuses, LimitTextError, ManualClock, MemoryStore, RuleScope, RuleScopeBuf, Scope,
    ScopeName, Source, StateMachine, Store, StoreError, StoreErrorKind, StoreFuture, SystemClock, Timestamp, Wait,
};
#[cfg(feature = "redis")]
pub use tollgate_redis as redis;
