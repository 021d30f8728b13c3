//! The facts of a refusal, from which every body is made.

use smallvec::SmallVec;
use tollgate_core::{Decision, Line, Wait};

use super::policy::Policy;
use super::strictest::strictest;
use super::verdict::Verdict;

/// How long a client is asked to wait when the store does not answer: about as long as it takes to be used again.
const UNAVAILABLE_RETRY_AFTER: Wait = Wait::from_micros(1_000_000);

/// Why a request does not go on, for whoever writes the body.
#[derive(Clone, Debug)]
pub struct Refusal<'a> {
    verdict: Verdict,
    retry_after: Wait,
    strictest: Option<(&'a Policy, &'a Line)>,
    violated: SmallVec<[&'a Policy; 2]>,
}

impl<'a> Refusal<'a> {
    pub(super) fn denied(
        decision: &Decision,
        told: impl Iterator<Item = (&'a Policy, &'a Line)> + Clone,
    ) -> Refusal<'a> {
        let refusing = told.filter(|(_, line)| !line.allowed);
        Refusal {
            verdict: Verdict::Denied,
            retry_after: decision.retry_after(),
            strictest: strictest(refusing.clone()),
            violated: refusing.map(|(policy, _)| policy).collect(),
        }
    }

    pub(crate) fn unavailable() -> Refusal<'a> {
        Refusal {
            verdict: Verdict::Unavailable,
            retry_after: UNAVAILABLE_RETRY_AFTER,
            strictest: None,
            violated: SmallVec::new(),
        }
    }

    /// [`Verdict::Denied`], or [`Verdict::Unavailable`] when the store did not answer.
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// How long to wait, exactly: the longest of the limits that refused.
    pub fn retry_after(&self) -> Wait {
        self.retry_after
    }

    /// The same as `Retry-After` has it: whole seconds, rounded up, at least 1; none if it can never pass.
    pub fn retry_after_secs(&self) -> Option<u64> {
        retry_after_secs(self.retry_after)
    }

    /// The same in whole milliseconds, rounded up, at least 1; none if it can never pass.
    pub fn retry_after_ms(&self) -> Option<u64> {
        self.retry_after.as_millis_ceil().map(|ms| ms.max(1))
    }

    /// The policy with the longest wait of those that refused; none when nobody decided.
    pub fn policy(&self) -> Option<&'a Policy> {
        self.strictest.map(|(policy, _)| policy)
    }

    /// What that policy's limit said.
    pub fn line(&self) -> Option<&'a Line> {
        self.strictest.map(|(_, line)| line)
    }

    /// All policies that refused, in the order of the check.
    pub fn violated(&self) -> &[&'a Policy] {
        &self.violated
    }

    /// What to tell a person.
    pub fn message(&self) -> String {
        if self.verdict == Verdict::Unavailable {
            return "the rate limiter cannot decide at the moment; try again shortly".to_owned();
        }
        let Some((policy, line)) = self.strictest else {
            return "too many requests".to_owned();
        };
        match self.retry_after_secs() {
            None => {
                let cost_max = policy.limit().cost_max();
                let (cost, limit) = (line.cost, policy.in_words());
                format!("a request that costs {cost} can never pass: the limit is {limit}, at most {cost_max} at once")
            }
            Some(1) => format!("the limit of {} is reached; try again in 1 second", policy.in_words()),
            Some(secs) => format!("the limit of {} is reached; try again in {secs} seconds", policy.in_words()),
        }
    }
}

/// The value of `Retry-After`. A wait of no seconds would be an invitation to hammer.
pub(super) fn retry_after_secs(wait: Wait) -> Option<u64> {
    wait.as_secs_ceil().map(|secs| secs.max(1))
}
