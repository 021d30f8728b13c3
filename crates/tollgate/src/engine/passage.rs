//! A request that goes on: what to tell its client, and what to give back when it ends.
//!
//! Units are taken at the start. A rule with `charge = "on_failure"` or `"on_success"` gives them back by how the request ends, exactly
//! once: [`Passage::finish`] says how it ended. Only a response earns a refund. A passage that is dropped without one (the client
//! left, the handler panicked, a timeout cut it off) keeps every charge, because the work may have been done: if hanging up gave units
//! back, a client that hangs up would run the handler for free.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use http::{HeaderMap, Response, StatusCode};
use tollgate_core::{Check, Decision, Limit, LimitStatus, Source, Wait};

use super::assured::Assured;
use super::live::{Asked, Bundle, Demands, Group, held_for};
use super::ruling::told_of;
use super::{Engine, Outcome, Refused};
use crate::answer::{Policies, grpc};
use crate::rules::Charge;

/// How a request ended: what the service responded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ending {
    /// The service did what it was asked to.
    Success,
    /// The service responded with a failure, or failed itself.
    Failure,
}

impl Ending {
    /// By its status: below 400 it succeeded.
    pub fn of(status: StatusCode) -> Ending {
        if status.is_client_error() || status.is_server_error() { Ending::Failure } else { Ending::Success }
    }

    /// By its head: the status, and for gRPC, whose every answer is 200, the `grpc-status` if it is already there. A stream
    /// that fails later, in its trailers, has begun well and counts as a success.
    pub fn of_response<B>(response: &Response<B>) -> Ending {
        if grpc::has_failed(response.headers()) { Ending::Failure } else { Ending::of(response.status()) }
    }
}

/// The end of a passage.
#[derive(Clone, Copy)]
enum End {
    Ended(Ending),
    /// The request did not go on after all.
    Withdrawn,
}

impl End {
    fn refunds(self, charge: Charge) -> bool {
        match self {
            End::Ended(ending) => charge.refunds(ending == Ending::Success),
            End::Withdrawn => true,
        }
    }
}

/// A request that goes on.
#[must_use = "a passage that is dropped keeps what it was charged; finish it to refund what the response earned"]
pub struct Passage {
    // In a box, because a passage moves from hand to hand: into an outcome, a future, the box of that future.
    told: Option<Box<Told>>,
    owed: Option<Box<Owed>>,
}

/// What the client is told.
pub(super) struct Told {
    policies: Arc<Policies>,
    pub(super) decision: Decision,
    wait: Duration,
}

impl Told {
    /// What these limits are about to say.
    pub(super) fn by(group: &Group, decision: Decision) -> Box<Told> {
        Box::new(Told { policies: group.policies.clone(), decision, wait: Duration::ZERO })
    }
}

/// What may have to be given back.
pub(super) struct Owed {
    engine: Engine,
    bundle: Arc<Bundle>,
    asked: Asked,
    charged: Vec<Charged>,
}

/// A decision that took units which may come back.
pub(super) struct Charged {
    pub(super) by: ChargedBy,
    pub(super) decision: Decision,
}

/// Which group of a bundle.
#[derive(Clone, Copy)]
pub(super) enum ChargedBy {
    Shield,
    Enforced,
    Shadow(usize),
}

impl Passage {
    /// No rule had anything to say.
    pub(super) fn unlimited() -> Passage {
        Passage { told: None, owed: None }
    }

    /// Rules that ask for nothing afterwards said this.
    #[inline]
    pub(super) fn told(told: Box<Told>) -> Passage {
        Passage { told: Some(told), owed: None }
    }

    /// These rules said this.
    pub(super) fn tell(&mut self, group: &Group, mut told: Box<Told>) {
        if group.may_hold {
            told.wait = told.decision.retry_after().as_duration().unwrap_or(Duration::ZERO);
        }
        if told.decision.limits.len() != group.parts.len() {
            // Of those that were left out nothing is known, so nothing is claimed.
            (told.decision.limits, told.decision.source) = (Default::default(), Source::None);
        }
        self.told = Some(told);
    }

    /// These units may come back.
    pub(super) fn owe(&mut self, engine: Engine, bundle: Arc<Bundle>, asked: Asked, charged: Vec<Charged>) {
        self.owed = Some(Box::new(Owed { engine, bundle, asked, charged }));
    }

    /// The decision, if a rule had anything to say.
    pub fn decision(&self) -> Option<&Decision> {
        self.told.as_deref().map(|told| &told.decision)
    }

    /// Whose limits the lines of the decision are, in its order.
    pub fn policies(&self) -> Option<&Policies> {
        self.told.as_deref().map(|told| &*told.policies)
    }

    /// How long to wait before going on: what a leaky bucket told, zero otherwise.
    pub fn wait(&self) -> Duration {
        self.told.as_deref().map_or(Duration::ZERO, |told| told.wait)
    }

    /// Writes what belongs on the response.
    pub fn write_headers(&self, headers: &mut HeaderMap) {
        if let Some(told) = &self.told {
            told.policies.write_headers(&told.decision, headers);
        }
    }

    /// Writes what belongs on this response, which is how the request ended: what it does not owe is told as given back.
    #[cfg(feature = "tower")]
    pub(crate) fn write_onto<B>(&self, response: &mut Response<B>) {
        let Some((told, owed)) = self.told.as_deref().zip(self.owed.as_deref()) else {
            return self.write_headers(response.headers_mut());
        };
        let end = End::Ended(Ending::of_response(response));
        let mut decision = told.decision.clone();
        if let Some((group, _)) = owed.told() {
            let decided = group.parts_of_lines(decision.limits.len()).zip(&mut decision.limits);
            for (part, line) in decided.filter(|(part, _)| end.refunds(part.charge)) {
                given_back(line, part.policy.limit());
            }
        }
        told.policies.write_headers(&decision, response.headers_mut());
    }

    /// Keeps every charge, as dropping the passage does. For callers that will not learn how the request ends.
    pub fn keep(self) {}

    /// The request has ended: gives back what its rules say. If this future is dropped after its first poll, that happens all the same.
    pub async fn finish(mut self, ending: Ending) {
        if let Some(rest) = self.settle(End::Ended(ending)) {
            rest.await;
        }
    }

    /// Goes on if the wait is no longer than `wait_max`. Else everything is given back, and the client is told when the wait
    /// will be short enough.
    pub async fn wait_at_most(mut self, wait_max: Duration, request: &HeaderMap) -> Outcome {
        // Who cannot leave has a place that was chosen for this patience.
        let Some(held) = self.owed.as_deref().and_then(Owed::told).filter(|_| self.wait() > wait_max) else {
            return Outcome::Pass(self);
        };
        let (policies, decision) = (told_of(held.0, held.1), held.1.clone());
        if let Some(rest) = self.settle(End::Withdrawn) {
            rest.await;
        }
        let decision = withdrawn(decision, &policies, wait_max);
        Outcome::Refuse(Refused::denied(policies, decision, request))
    }

    /// Finishes as [`Passage::finish`] does, without waiting for a shared store. `ending` is called only if it matters.
    pub(crate) fn finish_at_once(mut self, ending: impl FnOnce() -> Ending) {
        if self.owed.is_some()
            && let Some(rest) = self.settle(End::Ended(ending()))
        {
            rest.detach();
        }
    }

    /// The request has ended: gives back at once what is counted in process, and tells what else there is to do.
    fn settle(&mut self, end: End) -> Option<Assured<()>> {
        let owed = self.owed.take().filter(|owed| owed.owes(end))?;
        let (is_in_process, pending) = (owed.engine.is_in_process(), owed.engine.pending());
        let mut giving_back = Assured::new(pending, async move { owed.give_back(end).await });
        match is_in_process && (&mut giving_back).now_or_never().is_some() {
            true => None,
            false => Some(giving_back),
        }
    }
}

impl Bundle {
    pub(super) fn group(&self, by: ChargedBy) -> &Group {
        let group = match by {
            ChargedBy::Shield => self.shield.as_ref(),
            ChargedBy::Enforced => self.enforced.as_ref(),
            ChargedBy::Shadow(index) => self.shadow.get(index),
        };
        group.expect("a group that decided is there")
    }
}

impl Owed {
    fn owes(&self, end: End) -> bool {
        let mut parts = self.charged.iter().flat_map(|charged| &self.bundle.group(charged.by).parts);
        parts.any(|part| end.refunds(part.charge))
    }

    /// The group of which the client is told, and what it said: the limits that are enforced, or the shields if there are no others.
    fn told(&self) -> Option<(&Group, &Decision)> {
        let is_told = |by| match by {
            ChargedBy::Enforced => true,
            ChargedBy::Shield => self.bundle.enforced.is_none(),
            ChargedBy::Shadow(_) => false,
        };
        let charged = self.charged.iter().find(|charged| is_told(charged.by))?;
        Some((self.bundle.group(charged.by), &charged.decision))
    }

    async fn give_back(&self, end: End) {
        for Charged { by, decision } in &self.charged {
            let group = self.bundle.group(*by);
            let line_count = decision.limits.len();
            let demanded = group.parts.iter().zip(group.demands(&self.asked));
            let decided = demanded.filter(|(part, _)| group.has_line(part, line_count)).zip(&decision.limits);
            let owed = decided.filter(|((part, _), _)| end.refunds(part.charge));
            let (demands, lines): (Demands<'_>, _) = owed.map(|((_, demand), line)| (demand, *line)).unzip();
            let Ok(check) = Check::new(&demands) else { continue };
            let decision = Decision { limits: lines, ..*decision };
            if let Err(error) = self.engine.refund(group, &check, &decision).await {
                tracing::debug!(kind = error.kind().name(), "a refund was lost");
            }
        }
    }
}

/// The decision of a request that was admitted but will not wait so long: refused by the limits that said so, until
/// they would say `wait_max`.
fn withdrawn(mut decision: Decision, policies: &Policies, wait_max: Duration) -> Decision {
    let wait_max_us = u64::try_from(wait_max.as_micros()).unwrap_or(u64::MAX);
    for (line, policy) in decision.limits.iter_mut().zip(policies.policies()) {
        let too_long_us = held_for(line).as_micros().and_then(|wait_us| wait_us.checked_sub(wait_max_us));
        line.allowed = too_long_us.is_none_or(|us| us == 0);
        line.retry_after = Wait::from_micros(too_long_us.unwrap_or(0));
        given_back(line, policy.limit());
    }
    decision
}

/// What a limit has left when a request's units have come back.
fn given_back(line: &mut LimitStatus, limit: &Limit) {
    let whole = limit.cost_max();
    line.remaining = line.remaining.saturating_add(line.cost).min(whole);
    if line.remaining == whole {
        (line.next_after, line.reset_after) = (Wait::ZERO, Wait::ZERO);
    }
}

impl std::fmt::Debug for Passage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Passage").field("decision", &self.decision()).finish_non_exhaustive()
    }
}
