//! Where counters live: the trait that every store implements.
//!
//! **Contract.** `decide` answers each check of a batch in order, each all or nothing, by the store's own clock.
//! A denial is an `Ok`. An `Err` means that nobody knows what happened: the caller must not ask again
//! for the same request unless the error says that nothing was executed, and only a failure policy may
//! turn it into an answer. Dropping the future gives up the answer, not necessarily the charge.
//!
//! **One for all, or each for itself.** `decide` fails as a whole if it cannot answer one of the checks, and what it decided of the others is
//! lost. `decide_each` loses nothing where a store can tell which it was; whoever asks for several requests at once wants that.

use std::future::Future;
use std::pin::Pin;

use crate::check::{Check, Demand};
use crate::decision::{Decision, Line};

/// A boxed future, so that stores can be chosen at run time.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A place where counters live.
pub trait Store: Send + Sync {
    /// Decides each check, in order.
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>>;

    /// Decides each check, in order, with an answer for each: an error among them is of that check alone. Unless a store knows better,
    /// all are decided or none.
    fn decide_each<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Result<Decision, StoreError>>> {
        Box::pin(async move { Ok(self.decide(checks).await?.into_iter().map(Ok).collect()) })
    }

    /// Gives back what an admitted decision charged. A decision is refunded at most once by its owner.
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()>;

    /// Forgets a counter: the key is as if never seen.
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()>;

    /// Looks at a counter without changing it.
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, Line>;

    /// Completes once the answers that have already arrived are handed to their callers. A caller whose deadline has passed awaits this before it
    /// falls back: on a busy machine an answer may be there, and the task that would deliver it has not run yet.
    ///
    /// Does not wait for answers that are still under way. Does nothing by default, which is right for a store without a task of its own.
    fn catch_up(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }
}

/// Why a store did not answer.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// What kind of failure it was, which decides what may be done about it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// It could not be reached; nothing was executed.
    Unreachable,
    /// It did not answer in time; whether it executed is unknown.
    TimedOut,
    /// The connection broke after sending; whether it executed is unknown.
    Interrupted,
    /// It is there but refuses to serve for now (loading, read-only, out of memory, too many clients); nothing was executed.
    Unavailable,
    /// It does not let us in, or not do this; nothing was executed.
    Forbidden,
    /// Something that is not ours stands under our key; nothing was executed.
    Foreign,
    /// Something that is not ours stands under one of the keys; other checks of the call were decided, or other calls of the same
    /// request were made.
    ForeignInPart,
    /// It answered something that makes no sense.
    Protocol,
}

impl StoreErrorKind {
    /// The name used in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            StoreErrorKind::Unreachable => "unreachable",
            StoreErrorKind::TimedOut => "timed_out",
            StoreErrorKind::Interrupted => "interrupted",
            StoreErrorKind::Unavailable => "unavailable",
            StoreErrorKind::Forbidden => "forbidden",
            StoreErrorKind::Foreign => "foreign",
            StoreErrorKind::ForeignInPart => "foreign_in_part",
            StoreErrorKind::Protocol => "protocol",
        }
    }
}

impl StoreError {
    /// An error of a kind, in words that name no key, address or secret.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> StoreError {
        StoreError { kind, message: message.into(), source: None }
    }

    /// The same, with what caused it.
    #[must_use]
    pub fn with_source(self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
        StoreError { source: Some(source.into()), ..self }
    }

    /// What kind of failure it was.
    pub const fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Whether it is certain that nothing was executed, so that asking again cannot charge twice.
    pub const fn is_unexecuted(&self) -> bool {
        use StoreErrorKind as Kind;
        matches!(self.kind, Kind::Unreachable | Kind::Unavailable | Kind::Forbidden | Kind::Foreign)
    }

    /// The same error where this was one call of several and another of them may have been executed: what would promise that
    /// nothing was executed promises it no more.
    #[must_use]
    pub fn in_part(self) -> StoreError {
        use StoreErrorKind as Kind;
        let kind = match self.kind {
            Kind::Foreign => Kind::ForeignInPart,
            _ if self.is_unexecuted() => Kind::Interrupted,
            _ => return self,
        };
        StoreError::new(kind, format!("not all of it was done: {self}")).with_source(self)
    }

    /// Whether it may pass by itself.
    pub const fn is_transient(&self) -> bool {
        use StoreErrorKind as Kind;
        matches!(self.kind, Kind::Unreachable | Kind::TimedOut | Kind::Interrupted | Kind::Unavailable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_one_call_among_others_promises_nothing_and_keeps_what_it_said() {
        use StoreErrorKind as Kind;
        for (kind, in_part) in [
            (Kind::Unreachable, Kind::Interrupted),
            (Kind::TimedOut, Kind::TimedOut),
            (Kind::Interrupted, Kind::Interrupted),
            (Kind::Unavailable, Kind::Interrupted),
            (Kind::Forbidden, Kind::Interrupted),
            (Kind::Foreign, Kind::ForeignInPart),
            (Kind::ForeignInPart, Kind::ForeignInPart),
            (Kind::Protocol, Kind::Protocol),
        ] {
            let error = StoreError::new(kind, "so it was").in_part();
            assert_eq!(error.kind(), in_part, "{kind:?}");
            assert!(!error.is_unexecuted() && error.to_string().ends_with("so it was"), "{error}");
        }
    }
}
