//! The result of a check whose limits each have their own failure policy.

use tidegate_core::{Decision, Timestamp};

/// The result of [`Limiter::check_each`](super::Limiter::check_each): a decision on all limits of a check, or only on some
/// of them. If the store did not answer, limits with [`OnFailure::Allow`](crate::OnFailure::Allow) are left out. If the
/// deny cache denied the check, limits whose status it does not have are left out.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub enum EachDecision {
    /// All limits were decided: the decision has one status per limit of the check, in its order.
    Complete(Decision),
    /// Some limits were left out: the store did not answer, and their policy is
    /// [`OnFailure::Allow`](crate::OnFailure::Allow); or the deny cache denied the check, and has no status for them.
    Partial(Box<PartialDecision>),
}

/// A decision on some of the limits of a check.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PartialDecision {
    /// The decision on the limits in `decided`, in their order. If there are none, an uncounted admission.
    ///
    /// To refund it or to settle it, pass a check of these limits alone.
    pub decision: Decision,
    /// The indices within the check of the limits that were decided, ascending.
    pub decided: Vec<usize>,
}

impl EachDecision {
    /// Creates the admission at `at` of a check none of whose limits was decided.
    pub(crate) fn uncounted(at: Timestamp) -> EachDecision {
        EachDecision::partial(Decision::uncounted(at), Vec::new())
    }

    /// Creates a decision on the limits with the indices `decided` of a check. They must be ascending, and `decision`
    /// must have one status for each.
    pub(crate) fn partial(decision: Decision, decided: Vec<usize>) -> EachDecision {
        EachDecision::Partial(Box::new(PartialDecision { decision, decided }))
    }

    /// Returns the decision on the limits that were decided, in the order of the check.
    ///
    /// If it is partial, it has fewer statuses than the check has limits; [`covers`](EachDecision::covers) tells which.
    /// If no limit was decided, it is an admission without statuses ([`Decision::uncounted`]).
    pub fn decision(&self) -> &Decision {
        match self {
            EachDecision::Complete(decision) => decision,
            EachDecision::Partial(partial) => &partial.decision,
        }
    }

    /// Converts into the decision on the limits that were decided, in the order of the check.
    ///
    /// If it is partial, it has fewer statuses than the check has limits, and which limits they belong to is lost. If
    /// no limit was decided, it is an admission without statuses ([`Decision::uncounted`]).
    pub fn into_decision(self) -> Decision {
        match self {
            EachDecision::Complete(decision) => decision,
            EachDecision::Partial(partial) => partial.decision,
        }
    }

    /// Returns whether the limit at this index of the check was decided. `true` for any index if the decision is
    /// complete.
    pub fn covers(&self, index: usize) -> bool {
        match self {
            EachDecision::Complete(_) => true,
            EachDecision::Partial(partial) => partial.decided.contains(&index),
        }
    }
}
