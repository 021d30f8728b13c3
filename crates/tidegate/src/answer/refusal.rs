//! The details of a refusal, from which every body is rendered.

use smallvec::SmallVec;
use tidegate_core::{Decision, LimitStatus, Timestamp, Wait};

use super::body::RefusalFields;
use super::policy::Policy;
use super::strictest::strictest;
use super::verdict::Verdict;

/// The `Retry-After` of a refusal because the store did not answer. A store that recovers is used again after about as
/// long.
const UNAVAILABLE_RETRY_AFTER: Wait = Wait::from_micros(1_000_000);

/// The details of a refusal that its body may show: the policies that denied the request, the wait, a message.
///
/// Describes a denial by limits, or a refusal because the store did not answer, which has no policies. There are no
/// details of refusals by bans and because of paths that are too long.
///
/// Passed to the functions of [`BodyFormat::custom`](super::BodyFormat::custom) and, with the feature `tower`,
/// `RateLimitLayer::body`. [`Policies::refusal`](super::Policies::refusal) returns those of a denial.
#[derive(Clone, Debug)]
pub struct RefusalDetails<'a> {
    verdict: Verdict,
    /// The time of the decision; `None` if the store did not answer.
    at: Option<Timestamp>,
    retry_after: Wait,
    strictest: Option<(&'a Policy, &'a LimitStatus)>,
    violated: SmallVec<[&'a Policy; 2]>,
}

impl<'a> RefusalDetails<'a> {
    /// Creates the details of a denial from its decision, and each policy with its limit status, in the order of the check.
    pub(super) fn denied(
        decision: &Decision,
        limits: impl Iterator<Item = (&'a Policy, &'a LimitStatus)> + Clone,
    ) -> RefusalDetails<'a> {
        let refusing = limits.filter(|(_, status)| !status.allowed);
        RefusalDetails {
            verdict: Verdict::Denied,
            at: Some(decision.at),
            retry_after: decision.retry_after(),
            strictest: strictest(refusing.clone()),
            violated: refusing.map(|(policy, _)| policy).collect(),
        }
    }

    /// Creates the details of a refusal because the store did not answer: one second to wait, and no policies.
    pub(crate) fn unavailable() -> RefusalDetails<'a> {
        RefusalDetails {
            verdict: Verdict::Unavailable,
            at: None,
            retry_after: UNAVAILABLE_RETRY_AFTER,
            strictest: None,
            violated: SmallVec::new(),
        }
    }

    /// Returns [`Verdict::Denied`], or [`Verdict::Unavailable`] if the store did not answer.
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Returns the time until the request would be admitted: the longest wait of the limits that denied it.
    ///
    /// [`Wait::NEVER`] if the request can never pass. One second if the store did not answer.
    pub fn retry_after(&self) -> Wait {
        self.retry_after
    }

    /// Returns the value of the header `Retry-After`: the wait in whole seconds, rounded up, at least 1.
    ///
    /// `None` if the request can never pass.
    pub fn retry_after_secs(&self) -> Option<u64> {
        retry_after_secs(self.retry_after)
    }

    /// Returns the wait in whole milliseconds, rounded up, at least 1.
    ///
    /// `None` if the request can never pass.
    pub fn retry_after_ms(&self) -> Option<u64> {
        self.retry_after.as_millis_ceil().map(|ms| ms.max(1))
    }

    /// Returns the Unix time in seconds at which the request would be admitted, rounded up, as in `X-RateLimit-Reset`.
    ///
    /// `None` if the request can never pass, or if the store did not answer.
    pub fn reset_unix_secs(&self) -> Option<u64> {
        let reset_us = self.at?.as_micros().saturating_add(self.retry_after.as_micros()?);
        Some(reset_us.div_ceil(1_000_000))
    }

    /// Returns the policy that denied the request; if there are several, the one with the longest wait.
    ///
    /// `None` if the store did not answer, or if no limit status of the decision is a denial.
    pub fn policy(&self) -> Option<&'a Policy> {
        self.strictest.map(|(policy, _)| policy)
    }

    /// Returns the limit status of [`policy`](RefusalDetails::policy), or `None` if there is no such policy.
    pub fn line(&self) -> Option<&'a LimitStatus> {
        self.strictest.map(|(_, status)| status)
    }

    /// Returns all policies that denied the request, in the order of the check. Empty if the store did not answer.
    pub fn violated(&self) -> &[&'a Policy] {
        &self.violated
    }

    /// Returns the fields of the body in the format `json`.
    pub fn fields(&self) -> RefusalFields<'a> {
        RefusalFields::of(self)
    }

    /// Returns a message in English: the limit that denied the request, and when to retry.
    ///
    /// For example ``the limit of 60 per minute has been reached; try again in 12 seconds``. If the request can never pass,
    /// its cost and the most that the limit can hold; if the store did not answer, that the limiter cannot decide.
    pub fn message(&self) -> String {
        if self.verdict == Verdict::Unavailable {
            return "the rate limiter is temporarily unavailable; try again shortly".to_owned();
        }
        let Some((policy, status)) = self.strictest else {
            return "too many requests".to_owned();
        };
        match self.retry_after_secs() {
            None => {
                let cost_max = policy.limit().cost_max();
                let (cost, limit) = (status.cost, policy.in_words());
                format!("a request that costs {cost} can never pass: the limit is {limit}, at most {cost_max} at once")
            }
            Some(secs) => {
                let (mut number, plural) = (itoa::Buffer::new(), if secs == 1 { "" } else { "s" });
                let secs = number.format(secs);
                ["the limit of ", policy.in_words(), " has been reached; try again in ", secs, " second", plural]
                    .concat()
            }
        }
    }
}

/// Returns a wait in whole seconds for `Retry-After`, rounded up, at least 1. `None` for [`Wait::NEVER`].
///
/// A value of 0 would invite the client to retry at once.
pub(super) fn retry_after_secs(wait: Wait) -> Option<u64> {
    wait.as_secs_ceil().map(|secs| secs.max(1))
}
