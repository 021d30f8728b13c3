//! Failure policies: how a request is decided when the store does not answer.
//!
//! | `on_failure` | the request | the risk |
//! |---|---|---|
//! | `local` (default) | is decided in process memory, with this node's share of the quota | across an outage up to twice the quota |
//! | `allow` | is admitted and not counted | the upstream gets unlimited traffic |
//! | `deny` | is refused as unavailable (503, never 429) | the service is unavailable with the store |
//!
//! `local` is the default because a limiter that fails open adds load to the outage that it should contain, and one
//! that fails closed extends the outage to the service. A node's share is quota / instances, rounded up.
//!
//! A cost above the share but within the whole limit never fits into the share, but will fit when the store is back.
//! The time of that is unknown, so such a denial has the limit's window as its `retry_after`.

use tollgate_core::{Check, Demand, KeyError, Limit, StoreErrorKind, Wait};

/// The failure policy: how a check is decided when the store does not answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum OnFailure {
    /// Decides with this node's share of the quota, counted in process memory.
    #[default]
    Local,
    /// Admits the request. Nothing is counted, and the decision has no limit statuses.
    Allow,
    /// Refuses the request as unavailable.
    Deny,
}

tollgate_core::__names! {
    "failure policy" OnFailure {
        Local = "local",
        Allow = "allow",
        Deny = "deny",
    }
}

/// The failure policies of the limits of a check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailurePolicy<'a> {
    /// The policies of the first limits, in the order of the check.
    pub(crate) each: &'a [OnFailure],
    /// The policy of all further limits.
    pub(crate) rest: OnFailure,
}

impl<'a> FailurePolicy<'a> {
    /// Creates failure policies that are the same for all limits.
    pub(crate) fn whole(policy: OnFailure) -> FailurePolicy<'static> {
        FailurePolicy { each: &[], rest: policy }
    }

    /// Returns the policy of each limit of a check, in its order.
    pub(crate) fn of_each(self, check: &Check<'_>) -> impl Iterator<Item = OnFailure> + use<'a> {
        let rest = std::iter::repeat(self.rest);
        self.each.iter().copied().chain(rest).take(check.demands().len())
    }

    /// Returns whether the check is refused as unavailable: one limit with [`OnFailure::Deny`] is enough.
    pub(crate) fn denies(self, check: &Check<'_>) -> bool {
        self.of_each(check).any(|policy| policy == OnFailure::Deny)
    }
}

/// The error of a check whose store did not answer and whose failure policy is [`OnFailure::Deny`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the store did not answer ({kind})")]
pub struct Unavailable {
    kind: StoreErrorKind,
}

impl Unavailable {
    pub(crate) fn new(kind: StoreErrorKind) -> Unavailable {
        Unavailable { kind }
    }

    /// Returns the kind of the store's error.
    pub const fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}

/// The error of [`Limiter::check_key`](crate::Limiter::check_key).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckKeyError {
    /// The key is longer than 64 KiB. Nothing was charged.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The store did not answer, and the limiter's failure policy is [`OnFailure::Deny`].
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
}

/// Returns the share of a limit that one of `instances` nodes grants without the store.
///
/// Quota, burst and queue are divided by `instances` and rounded up. Zero instances count as one.
pub(crate) fn local_share(limit: &Limit, instances: u32) -> Limit {
    let share = |units: u32| u64::from(units.div_ceil(instances.max(1)));
    let mut local = limit.with_quota(share(limit.quota())).unwrap_or(*limit);
    if let Some(burst) = limit.burst() {
        local = local.with_burst(share(burst)).unwrap_or(local);
    }
    if let Some(queue) = limit.queue() {
        local = local.with_queue(share(queue)).unwrap_or(local);
    }
    local
}

/// Returns the wait of a local denial, given the wait by this node's share.
///
/// It is the limit's window if the cost never fits into the share but fits into the whole limit, else `by_share`.
pub(crate) fn local_wait(by_share: Wait, demand: &Demand<'_>) -> Wait {
    match by_share == Wait::NEVER && demand.cost.units() <= demand.limit.cost_max() {
        true => Wait::from_micros(demand.limit.window_us()),
        false => by_share,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_rounded_up_and_never_zero() {
        for (text, instances, share) in [
            ("10/min", 1, "10/min"),
            ("10/min", 3, "4/min"),
            ("1/min", 50, "1/min"),
            ("100/min token-bucket burst=20", 8, "13/min token-bucket burst=3"),
            ("100/min leaky-bucket queue=5 count_denied=true", 2, "50/min leaky-bucket queue=3 count_denied=true"),
        ] {
            let limit: Limit = text.parse().unwrap();
            assert_eq!(local_share(&limit, instances).to_string(), share, "{text} over {instances}");
        }
    }
}
