//! The decision core of the Tidegate rate limiter: limits, checks, algorithms and an in-memory store.
//!
//! ```
//! use tidegate_core::{Limit, MemoryStore};
//!
//! let store = MemoryStore::new();
//! let limit: Limit = "10/min".parse()?;
//!
//! let decision = store.check_key(&limit, "user:42")?;
//! assert!(decision.allowed());
//! assert_eq!(decision.remaining(), Some(9));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A **limit** is at most `quota` units per `window`, by an algorithm. A **check** is every (limit, key, cost) that
//! one request must pass; it passes all of them, or none is charged except limits with `count_denied`. The **decision**
//! has one status per limit:
//!
//! ```
//! use tidegate_core::{Check, Demand, Key, MemoryStore};
//!
//! let store = MemoryStore::new();
//! let key = Key::new("user:42")?;
//! let demands = [Demand::new("10/min".parse()?, key), Demand::new("1000/day".parse()?, key).cost(5)];
//!
//! let decision = store.check(&Check::new(&demands)?);
//! assert!(decision.allowed());
//! assert_eq!((decision.limits[0].remaining, decision.limits[1].remaining), (9, 995));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! One pure function, [`algorithm::decide`], defines the result of a check. The memory store performs the same steps on
//! packed states:
//!
//! ```text
//! fn decide(now: Timestamp, demands: &[Demand], states: &mut [State]) -> Decision
//! ```
//!
//! # What each algorithm guarantees
//!
//! *Most in any window* is the largest number of units that can be admitted within any trailing window, however the
//! client times its requests ([`Limit::most_in_any_window`]). *Denies what fits* says when a request is denied although
//! the exact count would admit it. *Longest retry* bounds `retry_after`. The conformance suite of the testkit asserts
//! every cell.
//!
//! | algorithm | most in any window | denies what fits | longest retry | state |
//! |---|---|---|---|---|
//! | `sliding`, quota ≤ 1,000 | quota | never | window | ≤ quota entries |
//! | `sliding`, quota > 1,000 | quota | ≤ one tick early (window / 1,000, rounded up) | window | ≤ 1,001 entries |
//! | `sliding-log` | quota | never | window | one entry per admission |
//! | `sliding-counter` | below 2 × quota | when the previous window was uneven | two windows | two counts |
//! | `fixed-window` | 2 × quota | never, by its own window | window | one count |
//! | `token-bucket` | burst + quota | never, by its own bucket | the missing units / rate | one level |
//! | `leaky-bucket` | queue + 1 + quota | never, by its own queue | the missing units / rate | one level |
//!
//! Times are in microseconds, by the store's clock. `retry_after`, `next_after` and `reset_after` are exact to the
//! microsecond.
//!
//! # Overview
//!
//! - [`Limit`], [`Algorithm`]: a validated limit, and its text form.
//! - [`Key`], [`Demand`], [`Check`]: the input of a decision.
//! - [`Decision`], [`LimitStatus`], [`Wait`]: the result.
//! - [`algorithm`]: the three state machines and [`algorithm::decide`].
//! - [`MemoryStore`]: counters in process memory. [`Store`]: the trait of all stores.
//! - [`Redemption`]: a refund or a later charge that takes effect exactly once.
//! - [`Clock`], [`SystemClock`], [`ManualClock`], [`Timestamp`]: time as an argument.
//!
//! # What is deliberately absent
//!
//! No I/O, no async runtime, no thread, no clock but [`SystemClock`], no unsafe code, no panic on any input that
//! the constructors accept.

pub mod algorithm;
mod ban_list;
mod check;
mod decision;
mod io_reason;
mod key;
mod limit;
mod memory;
mod names;
mod preview;
mod redemption;
mod store;
mod time;

pub use ban_list::{BAN_ENTRY_BYTES_MAX, BAN_LIST_MAX, BanListing, ListedBan};
pub use check::{Check, CheckError, Cost, DEMANDS_MAX, Demand};
pub use decision::{Decision, LimitStatus, LimitStatuses, OmittedLimits, Source, Wait};
#[doc(hidden)]
pub use io_reason::__io_reason;
pub use key::{Key, KeyError, RuleScope, RuleScopeBuf, SUBJECT_BYTES_MAX, Scope, ScopeName, StateMachine};
pub use limit::{
    Algorithm, Limit, LimitError, LimitTextError, QUOTA_MAX, SLIDING_EXACT_QUOTA_MAX, SLIDING_LOG_QUOTA_MAX,
    WINDOW_US_MAX, WINDOW_US_MIN,
};
pub use memory::{MemoryStore, MemoryStoreBuilder, UsedReceiptStats};
pub use names::NameError;
pub use preview::Preview;
pub use redemption::{ReceiptId, Redeemed, Redemption};
pub use store::{
    Atomicity, InstanceId, LiveInstances, Location, OnFailure, Shard, ShardId, Store, StoreError, StoreErrorKind,
    StoreFuture,
};
pub use time::{Clock, ManualClock, SystemClock, Timestamp};
