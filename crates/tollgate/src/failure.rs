//! What happens when the store does not answer.
//!
//! | `on_failure` | the request | what it risks |
//! |---|---|---|
//! | `local` (default) | is decided in process memory, with this node's share of the quota | across an outage up to twice the quota |
//! | `allow` | goes on, uncounted | whatever the upstream can bear |
//! | `deny` | is refused as unavailable (503, never 429) | the service |
//!
//! A share is quota / instances, rounded up: a limiter that fails open feeds the outage it should
//! contain, one that fails closed is the outage.
//!
//! A cost that is more than the share but no more than the whole limit never fits here, and will fit when the store is back. Nobody knows
//! when that is, so such a denial says to wait for the limit's window.

use tollgate_core::{Check, Demand, Limit, StoreErrorKind, Wait};

/// What a decision becomes when the store does not give one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum OnFailure {
    /// This node's share of the quota, counted in memory.
    #[default]
    Local,
    /// The request goes on; nothing is counted and nothing claimed.
    Allow,
    /// The request is refused as unavailable.
    Deny,
}

impl OnFailure {
    /// The name used in configuration and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            OnFailure::Local => "local",
            OnFailure::Allow => "allow",
            OnFailure::Deny => "deny",
        }
    }
}

/// What a check says of a store that does not answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Otherwise<'a> {
    /// A word for each of its limits, in their order.
    pub(crate) each: &'a [OnFailure],
    /// The word for those that have none.
    pub(crate) rest: OnFailure,
}

impl<'a> Otherwise<'a> {
    /// One word for the whole of it.
    pub(crate) fn whole(word: OnFailure) -> Otherwise<'static> {
        Otherwise { each: &[], rest: word }
    }

    /// The words for the limits of a check, in their order.
    pub(crate) fn words(self, check: &Check<'_>) -> impl Iterator<Item = OnFailure> + use<'a> {
        let rest = std::iter::repeat(self.rest);
        self.each.iter().copied().chain(rest).take(check.demands().len())
    }

    /// Whether nobody decides then: one limit that says so is enough.
    pub(crate) fn denies(self, check: &Check<'_>) -> bool {
        self.words(check).any(|word| word == OnFailure::Deny)
    }
}

/// The store did not answer, and the policy for that was [`OnFailure::Deny`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the rate limiter's store is unavailable ({})", .kind.name())]
pub struct Unavailable {
    kind: StoreErrorKind,
}

impl Unavailable {
    pub(crate) fn new(kind: StoreErrorKind) -> Unavailable {
        Unavailable { kind }
    }

    /// What was wrong with the store.
    pub const fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}

/// The part of a limit that one of `instances` nodes may grant by itself.
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

/// The wait that a local denial tells of a demand, where this node's share alone would say another.
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
    fn a_share_is_rounded_up_and_never_nothing() {
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
