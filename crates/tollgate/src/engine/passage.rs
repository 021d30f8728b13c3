//! A request that goes on: what to tell its client, and what to give back when it ends.
//!
//! Units are taken at the start. A rule with `charge = "on_failure"` or `"on_success"` gives them back by how the request ends, exactly
//! once, wherever that is: [`Passage::finish`] says how it ended, and a passage that is dropped without it (the client
//! left, the handler panicked, a timeout cut it off) has failed.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use http::HeaderMap;
use tokio::runtime::Handle;
use tollgate_core::{Check, Decision, Demand};

use super::Part;
use crate::answer::Policies;
use crate::limiter::Limiter;

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ending {
    /// It did what it was asked to.
    Success,
    /// It did not, or nobody knows.
    Failure,
}

impl Ending {
    /// By its status: below 400 it succeeded.
    pub fn of(status: http::StatusCode) -> Ending {
        if status.is_client_error() || status.is_server_error() { Ending::Failure } else { Ending::Success }
    }
}

/// A request that goes on.
#[derive(Debug)]
pub struct Passage(Option<Limited>);

#[derive(Debug)]
struct Limited {
    limiter: Limiter,
    policies: Arc<Policies>,
    parts: Vec<Part>,
    decision: Decision,
}

impl Passage {
    /// No rule had anything to say.
    pub(super) fn unlimited() -> Passage {
        Passage(None)
    }

    pub(super) fn limited(limiter: Limiter, policies: Arc<Policies>, parts: Vec<Part>, decision: Decision) -> Passage {
        Passage(Some(Limited { limiter, policies, parts, decision }))
    }

    /// The decision, if a rule had anything to say.
    pub fn decision(&self) -> Option<&Decision> {
        self.0.as_ref().map(|limited| &limited.decision)
    }

    /// Whose limits the lines of the decision are, in its order.
    pub fn policies(&self) -> Option<&Policies> {
        self.0.as_ref().map(|limited| &*limited.policies)
    }

    /// How long to wait before going on: what a leaky bucket told, zero otherwise.
    pub fn wait(&self) -> Duration {
        self.decision().and_then(|decision| decision.retry_after().as_duration()).unwrap_or(Duration::ZERO)
    }

    /// Writes what belongs on the response.
    pub fn write_headers(&self, headers: &mut HeaderMap) {
        if let Some(limited) = &self.0 {
            limited.policies.write_headers(&limited.decision, headers);
        }
    }

    /// Nobody will tell how the request ends: the units stay taken.
    pub fn keep(mut self) {
        self.0 = None;
    }

    /// The request has ended: gives back what its rules say.
    pub async fn finish(mut self, ending: Ending) {
        if let Some(limited) = self.0.take() {
            limited.settle(ending).await;
        }
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        let Some(limited) = self.0.take().filter(|limited| limited.owes(Ending::Failure)) else { return };
        let mut settling = Box::pin(limited.settle(Ending::Failure));
        // In memory this is done at once; on a shared store somebody has to wait for the answer.
        if settling.as_mut().now_or_never().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(settling);
        }
    }
}

impl Limited {
    fn owes(&self, ending: Ending) -> bool {
        self.parts.iter().any(|part| part.charge.refunds(ending == Ending::Success))
    }

    async fn settle(self, ending: Ending) {
        if self.decision.lines.len() != self.parts.len() || !self.owes(ending) {
            return;
        }
        let owed = self
            .parts
            .iter()
            .zip(&self.decision.lines)
            .filter(|(part, _)| part.charge.refunds(ending == Ending::Success));
        let (mut demands, mut lines): (Vec<Demand<'_>>, Vec<_>) = (Vec::new(), Vec::new());
        for (part, line) in owed {
            if let Ok(demand) = part.demand() {
                demands.push(demand);
                lines.push(*line);
            }
        }
        let decision = Decision { lines: lines.into(), ..self.decision };
        if let Ok(check) = Check::new(&demands)
            && let Err(error) = self.limiter.refund(&check, &decision).await
        {
            tracing::debug!(kind = error.kind().name(), "a refund was lost");
        }
    }
}
