//! What the rules say to a request whose limits are known.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::join_all;
use http::HeaderMap;
use tollgate_core::{Check, Cost, Decision, Demand, Source};

use super::live::{Asked, Bundle, Demands, Group, Terms};
use super::passage::{Charged, ChargedBy, Told};
use super::{Ending, Engine, Passage, Refused};
use crate::answer::Policies;
use crate::failure::OnFailure;
use crate::limiter::{CheckOptions, catch_panic, empty_decision};

/// An [`Outcome`](super::Outcome) that is not yet an answer to anybody.
pub(super) enum Ruling {
    Pass(Passage),
    Refuse(Box<Refusal>),
}

/// Why a request does not go on.
pub(super) enum Refusal {
    Denied(Decision, Arc<Policies>),
    Unavailable(Arc<Policies>),
}

impl Refusal {
    /// The answer to the client that sent these headers.
    pub(super) fn told(self, request: &HeaderMap) -> Refused {
        match self {
            Refusal::Denied(decision, policies) => Refused::denied(policies, decision, request),
            Refusal::Unavailable(policies) => Refused::unavailable(&policies, request),
        }
    }
}

/// The store did not answer, and a rule says to refuse then.
struct Undecided;

/// A ruling in the making: what was said so far.
pub(super) struct Hearing {
    passage: Passage,
    charged: Vec<Charged>,
    // What is rare is in a box, so that what is common moves few bytes.
    refusal: Option<Box<Refusal>>,
}

impl Engine {
    /// What the rules say, where all counters are in process.
    #[inline]
    pub(super) fn rule_at_once(&self, bundle: &Arc<Bundle>, asked: &mut Asked) -> Ruling {
        match self.admit_at_once(bundle, asked) {
            Some(passage) => Ruling::Pass(passage),
            None => self.rule_in_process(bundle, asked),
        }
    }

    /// Lets a request pass for which there is room and nothing else to do, as is the case for most.
    #[inline]
    fn admit_at_once(&self, bundle: &Bundle, asked: &Asked) -> Option<Passage> {
        let (Some(plain), Some(enforced), None) = (&bundle.plain, &bundle.enforced, asked.terms.cost) else {
            return None;
        };
        // The decision is made where it is told from, and moved nowhere.
        let mut told = Told::by(enforced, empty_decision());
        if !self.0.limiter.admit_at_once(asked.first().as_bytes(), plain, &mut told.decision) {
            return None;
        }
        enforced.count_allowed(told.decision.source);
        Some(Passage::told(told))
    }

    /// The same as [`Engine::rule`], without a future that is moved about.
    #[inline(never)]
    fn rule_in_process(&self, bundle: &Arc<Bundle>, asked: &mut Asked) -> Ruling {
        const IN_PROCESS: &str = "nothing waits for counters in process";
        let mut hearing = self.hear_shield(bundle, asked);
        if let Some(enforced) = bundle.enforced.as_ref().filter(|_| hearing.goes_on()) {
            let (demands, mut told) = (enforced.demands(asked), Told::by(enforced, empty_decision()));
            let decided = checked(enforced, &demands).and_then(|check| {
                let decided = self.0.limiter.check_each_at_once(&check, &enforced.on_failure, &mut told.decision);
                decided.expect(IN_PROCESS).map_err(|_unavailable| Undecided)
            });
            hearing.enforced(bundle, enforced, asked, decided.map(|()| told));
        }
        if hearing.goes_on() {
            for (index, shadow) in bundle.shadow.iter().enumerate() {
                let tried = self.try_shadow(bundle, shadow, asked).now_or_never();
                hearing.shadow(bundle, index, asked, tried.expect(IN_PROCESS));
            }
        }
        hearing.close(self, bundle, asked)
    }

    /// What the rules say. Whatever comes of it, units that were taken on the way are accounted for.
    pub(super) async fn rule(&self, bundle: &Arc<Bundle>, asked: &mut Asked) -> Ruling {
        let mut hearing = self.hear_shield(bundle, asked);
        if let Some(enforced) = bundle.enforced.as_ref().filter(|_| hearing.goes_on()) {
            let decided = self.decide_enforced(bundle, enforced, asked).await;
            hearing.enforced(bundle, enforced, asked, decided.map(|decision| Told::by(enforced, decision)));
        }
        if hearing.goes_on() {
            // Together: however many there are, a request waits for them once.
            let tried = join_all(bundle.shadow.iter().map(|shadow| self.try_shadow(bundle, shadow, asked))).await;
            for (index, tried) in tried.into_iter().enumerate() {
                hearing.shadow(bundle, index, asked, tried);
            }
        }
        hearing.close(self, bundle, asked)
    }

    /// What the shields refuse a request with for which they have no room. Whoever has room there pays for it only with
    /// everything else.
    pub(super) fn refused_without_room(
        &self,
        bundle: &Bundle,
        asked: &Asked,
        is_exempt: impl FnOnce() -> bool,
    ) -> Option<Box<Refusal>> {
        let shield = bundle.shield.as_ref().filter(|shield| !self.has_room(shield, asked))?;
        if is_exempt() {
            return None;
        }
        let demands = shield.demands(asked);
        match self.ask_shield(shield, &demands, asked.terms) {
            Err(refusal) => Some(refusal),
            Ok(decision) => {
                // A unit came free after the look. It is asked for again.
                if let Ok(check) = Check::new(&demands) {
                    catch_panic(|| self.0.shield.refund(&check, &decision));
                }
                None
            }
        }
    }

    /// Whether the shields have room for the request, by a look at them.
    fn has_room(&self, shield: &Group, asked: &Asked) -> bool {
        let demands = shield.demands(asked);
        let looks: Demands<'_> = demands.iter().map(|demand| demand.cost(Cost::PEEK)).collect();
        let Ok(look) = Check::new(&looks) else { return false };
        let Some(seen) = catch_panic(|| self.0.shield.check(&look)) else { return false };
        seen.limits.iter().zip(&demands).all(|(line, demand)| demand.cost.units() <= line.remaining)
    }

    #[inline]
    fn hear_shield(&self, bundle: &Bundle, asked: &Asked) -> Hearing {
        let mut hearing = Hearing { passage: Passage::unlimited(), charged: Vec::new(), refusal: None };
        if let Some(shield) = &bundle.shield {
            match self.ask_shield(shield, &shield.demands(asked), asked.terms) {
                Ok(decision) => hearing.shield(bundle, shield, asked, decision),
                Err(refusal) => hearing.refusal = Some(refusal),
            }
        }
        hearing
    }

    /// Asks the shields to let a request pass. A refusal is counted here.
    fn ask_shield(&self, shield: &Group, demands: &[Demand<'_>], terms: Terms) -> Result<Decision, Box<Refusal>> {
        let decided = checked(shield, demands).and_then(|check| {
            // A store that panics is one that does not answer.
            let denies = || shield.on_failure.contains(&OnFailure::Deny);
            let undecided =
                || if denies() { Err(Undecided) } else { Ok(Decision { source: Source::None, ..empty_decision() }) };
            catch_panic(|| self.0.shield.check(&check)).map_or_else(undecided, Ok)
        });
        match decided {
            Ok(decision) if decision.allowed() => Ok(decision),
            Ok(decision) => {
                shield.count(&decision, terms);
                Err(Box::new(Refusal::Denied(decision, shield.policies.clone())))
            }
            Err(Undecided) => {
                shield.count_unavailable();
                Err(Box::new(Refusal::Unavailable(shield.policies.clone())))
            }
        }
    }

    /// All enforced rules together, by the store or by each rule's word for its absence.
    async fn decide_enforced(&self, bundle: &Bundle, group: &Group, asked: &Asked) -> Result<Decision, Undecided> {
        let demands = group.demands(asked);
        let check = checked(group, &demands)?;
        let is_refundable = group.is_refundable || bundle.may_be_withdrawn(asked.terms);
        let decided = self.0.limiter.check_each_after(asked.spent, &check, &group.on_failure, is_refundable).await;
        decided.map_err(|_unavailable| Undecided)
    }

    async fn try_shadow(&self, bundle: &Bundle, group: &Group, asked: &Asked) -> Option<Decision> {
        let demands = group.demands(asked);
        let check = Check::new(&demands).ok()?;
        if group.is_in_process {
            return catch_panic(|| self.0.shield.check(&check));
        }
        let refundable = group.is_refundable || bundle.may_be_withdrawn(asked.terms);
        let options = CheckOptions { on_failure: Some(OnFailure::Allow), refundable };
        self.0.limiter.check_with(&check, options).await.ok()
    }
}

impl Hearing {
    /// Whether nobody has refused yet.
    fn goes_on(&self) -> bool {
        self.refusal.is_none()
    }

    #[inline]
    fn enforced(&mut self, bundle: &Bundle, enforced: &Group, asked: &Asked, decided: Result<Box<Told>, Undecided>) {
        let Ok(told) = decided else {
            enforced.count_unavailable();
            self.refusal = Some(Box::new(Refusal::Unavailable(enforced.policies.clone())));
            return;
        };
        enforced.count(&told.decision, asked.terms);
        if told.decision.allowed() {
            self.charged.extend(Charged::of(ChargedBy::Enforced, bundle, asked, &told.decision));
            self.passage.tell(enforced, told);
        } else {
            let mut decision = told.decision;
            enforced.count_the_wait(&mut decision, asked.terms);
            let told = told_of(enforced, &decision);
            self.refusal = Some(Box::new(Refusal::Denied(decision, told)));
        }
    }

    /// The shields let it pass.
    fn shield(&mut self, bundle: &Bundle, shield: &Group, asked: &Asked, decision: Decision) {
        shield.count(&decision, asked.terms);
        self.charged.extend(Charged::of(ChargedBy::Shield, bundle, asked, &decision));
        if bundle.enforced.is_none() {
            self.passage.tell(shield, Told::by(shield, decision));
        }
    }

    /// Charged if it would itself have let pass; what it would have refused is counted.
    fn shadow(&mut self, bundle: &Bundle, index: usize, asked: &Asked, tried: Option<Decision>) {
        let Some(decision) = tried else { return };
        bundle.shadow[index].count(&decision, asked.terms);
        self.charged.extend(Charged::of(ChargedBy::Shadow(index), bundle, asked, &decision));
    }

    #[inline]
    fn close(mut self, engine: &Engine, bundle: &Arc<Bundle>, asked: &mut Asked) -> Ruling {
        if !self.charged.is_empty() {
            let asked = std::mem::replace(asked, Asked::new(asked.terms));
            self.passage.owe(engine.clone(), bundle.clone(), asked, self.charged);
        }
        match self.refusal {
            Some(refusal) => {
                // The response is a refusal, and so a failure.
                self.passage.finish_at_once(|| Ending::Failure);
                Ruling::Refuse(refusal)
            }
            None => Ruling::Pass(self.passage),
        }
    }
}

impl Charged {
    /// What may have to be given back of a decision, if anything.
    fn of(by: ChargedBy, bundle: &Bundle, asked: &Asked, decision: &Decision) -> Option<Charged> {
        let group = bundle.group(by);
        // Whoever is told to wait may refuse to, and then has asked nobody for anything.
        let may_come_back = (group.is_refundable || bundle.may_be_withdrawn(asked.terms)) && decision.allowed();
        may_come_back.then(|| Charged { by, decision: decision.clone() })
    }
}

/// What is demanded, as one check.
#[inline]
fn checked<'a>(group: &Group, demands: &'a [Demand<'a>]) -> Result<Check<'a>, Undecided> {
    group.check(demands).map_err(|error| {
        tracing::error!(%error, "the rules that match one request cannot be decided together");
        Undecided
    })
}

/// Whose lines the decision has: all of the group's, or of those rules that are decided without a store.
pub(super) fn told_of(group: &Group, decision: &Decision) -> Arc<Policies> {
    match decision.limits.len() == group.parts.len() {
        true => group.policies.clone(),
        false => Arc::new(group.policies.subset(|index| group.parts[index].is_local())),
    }
}
