//! A store that cannot be reached.

use tidegate_core::{Check, Decision, Demand, LimitStatus, Store, StoreError, StoreErrorKind, StoreFuture};

/// A store whose every call fails at once with [`StoreErrorKind::Unreachable`].
#[derive(Clone, Copy, Debug)]
pub struct UnreachableStore;

fn unreachable<'a, T: Send + 'a>() -> StoreFuture<'a, T> {
    Box::pin(async { Err(StoreError::new(StoreErrorKind::Unreachable, "no server")) })
}

impl Store for UnreachableStore {
    fn decide<'a>(&'a self, _: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        unreachable()
    }

    fn refund<'a>(&'a self, _: &'a Check<'a>, _: &'a Decision) -> StoreFuture<'a, ()> {
        unreachable()
    }

    fn reset<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        unreachable()
    }

    fn inspect<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        unreachable()
    }
}
