//! A request as the engine sees it: its options, and the subjects that its rules count.

use std::time::Duration;

use smallvec::SmallVec;
use tidegate_core::{Cost, Wait};

use crate::identity::{Identity, SubjectKey, Subjects};

/// Options of a request: its cost and its longest wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RequestOptions {
    /// The units that the request costs under every rule. Defaults to the cost that each rule sets.
    pub cost: Option<Cost>,
    /// The longest time for which a leaky bucket may delay the request. Defaults to no bound.
    ///
    /// A request that would have to wait longer is refused like one that a limit denies, and its slot is not charged.
    pub max_wait: Option<Duration>,
}

impl RequestOptions {
    /// Returns whether `wait` exceeds `max_wait`. Always `false` without a `max_wait`.
    pub(super) fn exclude(&self, wait: Wait) -> bool {
        self.max_wait.is_some_and(|max_wait| wait.as_duration().is_none_or(|wait| wait > max_wait))
    }
}

/// The part of a request that varies within a [`CheckPlan`](super::check_plan::CheckPlan): the subjects of its rules,
/// its options, and the time already used.
pub(super) struct RequestContext {
    /// The subject that each rule of the plan counts, in the order of the rules.
    pub(super) subjects: SmallVec<[SubjectKey; 1]>,
    pub(super) options: RequestOptions,
    /// The part of the decision's deadline that lookups and earlier checks of the request have used.
    pub(super) spent: Duration,
}

impl RequestContext {
    /// Creates the context of a request: the subject of `identity` for each item of `kinds`, in order.
    ///
    /// `kinds` must be what the rules of the plan count by, in the order of the plan. `spent` is zero.
    pub(super) fn new<'a>(
        kinds: impl Iterator<Item = &'a Subjects>,
        identity: &Identity<'_>,
        options: RequestOptions,
    ) -> RequestContext {
        RequestContext {
            subjects: kinds.map(|kinds| identity.subject(kinds)).collect(),
            options,
            spent: Duration::ZERO,
        }
    }
}
