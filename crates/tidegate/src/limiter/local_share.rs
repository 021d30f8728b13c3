//! This instance's share of every limit, counted in process memory. It decides if the store does not answer.
//!
//! `failure.rs` describes the failure policies, and how much the instances admit together.

use smallvec::SmallVec;
use tidegate_core::{Check, Decision, Demand, MemoryStore, Source, Timestamp};

use super::{CheckOptions, catch_panic};
use crate::failure::{OnFailure, Unavailable, local_share, local_wait};

/// A share of every limit, which `memory` counts: quota / `instances`, rounded up.
///
/// With one instance, these are whole limits: those of a limiter without a shared store.
#[derive(Clone, Copy)]
pub(super) struct LocalShare<'a> {
    pub(super) memory: &'a MemoryStore,
    pub(super) instances: u32,
}

impl LocalShare<'_> {
    /// Decides a check without the store, by the failure policy of each limit: limits with `local` by the share, those
    /// with `allow` are omitted.
    ///
    /// If no limit is `local`, or the memory store panics, the result is an admission at `now` that is not counted.
    ///
    /// # Errors
    /// Returns `failure` if the policy of a limit is `deny`.
    pub(super) fn decide(
        self,
        check: &Check<'_>,
        options: &CheckOptions<'_>,
        failure: Unavailable,
        now: Timestamp,
    ) -> Result<Decision, Unavailable> {
        if options.denies_on_failure(check) {
            return Err(failure);
        }
        let policies = || options.policies(check).enumerate();
        let local = policies().filter(|(_, policy)| *policy == OnFailure::Local);
        let local: SmallVec<[Demand<'_>; 2]> = local.map(|(index, _)| check.demands()[index]).collect();
        let decided = Check::new(&local).ok().and_then(|local| self.check(&local));
        let Some(mut decision) = decided else { return Ok(Decision::uncounted(now)) };
        let omitted = policies().filter(|(_, policy)| *policy != OnFailure::Local);
        decision.omitted = omitted.map(|(index, _)| index).collect();
        Ok(decision)
    }

    /// Decides a check, and charges the share. Returns `None` if the memory store panics.
    ///
    /// The decision has [`Source::Local`], and waits of [`local_wait`].
    pub(super) fn check(self, check: &Check<'_>) -> Option<Decision> {
        let mut decision = catch_panic(|| self.memory.check(&Check::of_distinct(&self.demands(check))))?;
        decision.source = Source::Local;
        for (demand, status) in check.demands().iter().zip(&mut decision.limits) {
            status.retry_after = local_wait(status.retry_after, demand);
        }
        Some(decision)
    }

    /// Returns the demands of a check, with the share of each limit.
    pub(super) fn demands<'a>(self, check: &Check<'a>) -> SmallVec<[Demand<'a>; 2]> {
        let share = |demand: &Demand<'a>| Demand { limit: local_share(&demand.limit, self.instances), ..*demand };
        check.demands().iter().map(share).collect()
    }
}
