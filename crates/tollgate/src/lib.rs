//! A rate limiter whose windows really slide.
//!
//! [`Limiter`] decides checks in process memory or on a shared store, and keeps deciding when that
//! store is away. `tollgate-core` has the decision itself; this crate adds what a service needs around it.

pub mod answer;
mod breaker;
pub mod config;
mod counts;
mod deny_cache;
pub mod engine;
mod failure;
pub mod identity;
#[cfg(feature = "tower")]
pub mod layer;
mod limiter;
pub mod observe;
pub mod rules;

pub use counts::{Counted, DecisionCounts, Said};
pub use failure::{OnFailure, Unavailable};
#[cfg(feature = "redis")]
pub use limiter::StoreUrlError;
pub use limiter::{CheckOptions, Limiter, LimiterBuilder, LimiterStats, NotReady};
pub use tollgate_core::{
    Algorithm, Check, CheckError, Clock, Cost, DEMANDS_MAX, Decision, Demand, Key, KeyError, Limit, LimitError,
    LimitTextError, Line, ManualClock, MemoryStore, Scope, Source, Store, StoreError, StoreErrorKind, SystemClock,
    Timestamp, Wait,
};
#[cfg(feature = "redis")]
pub use tollgate_redis as redis;
