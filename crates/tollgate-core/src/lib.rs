//! The Tollgate decision.

pub mod algorithm;
mod check;
mod decision;
mod key;
mod limit;
pub mod memory;
mod store;
mod time;

pub use check::{Check, CheckError, Cost, DEMANDS_MAX, Demand};
pub use decision::{Decision, Line, Lines, Source, Wait};
pub use key::{Key, KeyError, SUBJECT_BYTES_MAX, Scope};
pub use limit::{
    Algorithm, Limit, LimitError, LimitTextError, QUOTA_MAX, SLIDING_EXACT_QUOTA_MAX, SLIDING_LOG_QUOTA_MAX,
    WINDOW_US_MAX, WINDOW_US_MIN,
};
pub use memory::MemoryStore;
pub use store::{Store, StoreError, StoreErrorKind, StoreFuture};
pub use time::{Clock, ManualClock, SystemClock, Timestamp};
