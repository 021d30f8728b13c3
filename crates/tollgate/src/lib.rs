//! A rate limiter whose windows really slide.
//!
//! [`Limiter`] decides checks in process memory or on a shared store, and keeps deciding when that
//! store is away. `tollgate-core` has the decision itself; this crate adds what a service needs around it.

mod breaker;
mod deny_cache;
mod failure;
mod limiter;

pub use failure::{OnFailure, Unavailable};
pub use limiter::{CheckOptions, Limiter, LimiterBuilder, LimiterStats};
pub use tollgate_core::{
    Algorithm, Check, CheckError, Cost, Decision, Demand, Key, KeyError, Limit, LimitError, LimitTextError, Line,
    MemoryStore, Scope, Source, Store, StoreError, StoreErrorKind, Wait,
};
