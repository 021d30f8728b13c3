//! Rules in use, and what is worked out once for each combination of them.
//!
//! Which rules match differs from request to request, but the same few combinations come again and again. What a
//! combination asks of a caller (whose counters, which limits, in what order, with which headers) depends only on the rules and
//! on the caller's plan. So it is laid out once, as a [`Bundle`], and a request brings only its subjects and its cost.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState;
use parking_lot::RwLock;
use smallvec::{SmallVec, smallvec};
use tollgate_core::{
    Algorithm, Check, CheckError, Cost, Decision, Demand, Key, Limit, LimitStatus, RuleScopeBuf, Source,
    StandingDemand, Wait,
};

use super::rule_counts::{RuleCount, RuleCounts, RuleStats};
use crate::answer::{Policies, Policy};
use crate::counts::DecisionOutcome;
use crate::failure::OnFailure;
use crate::identity::{Identity, SubjectKey, Subjects};
use crate::rules::{Charge, CompiledRule, Indices, LimitSetId, Mode, RuleSet};

/// How many combinations of rules and plan are kept. When there are more, all are forgotten and laid out again as
/// they come.
const BUNDLES_KEPT_MAX: usize = 4_096;

/// A set of rules in use.
// In this order: what every request looks at stands together.
#[repr(C)]
pub(super) struct Live {
    pub(super) rules: RuleSet,
    /// Whether who a caller is depends on the time: else the clock is read once, by the store.
    pub(super) tells_time: bool,
    /// Whether any rule is a shield.
    pub(super) has_shields: bool,
    /// Whether a network is banned, whether a key or a user is, and whether anybody is exempt.
    pub(super) bans_addresses: bool,
    pub(super) bans_callers: bool,
    has_exemptions: bool,
    /// The longest path that is looked at.
    pub(super) path_bytes_max: usize,
    uniform: Option<Uniform>,
    counts: RuleCounts,
    bundles: RwLock<HashMap<(Indices, LimitSetId), Arc<Bundle>, RandomState>>,
}

/// What all requests meet, where rules and plans make no difference between them.
pub(super) struct Uniform {
    pub(super) bundle: Arc<Bundle>,
    /// Whom each rule counts.
    pub(super) by: SmallVec<[Subjects; 1]>,
}

/// What a combination of rules asks of a caller with a certain plan.
pub(super) struct Bundle {
    pub(super) shield: Option<Group>,
    pub(super) enforced: Option<Group>,
    pub(super) shadow: Vec<Group>,
    /// What the enforced limits demand of the first subject, if that is all there is to it: nobody else is asked, nobody waits, and nothing
    /// comes back.
    pub(super) plain: Option<Box<[StandingDemand]>>,
}

/// Limits that are decided together.
pub(super) struct Group {
    pub(super) parts: Vec<Part>,
    pub(super) policies: Arc<Policies>,
    /// Where each of its rules counts what it says.
    rule_counts: SmallVec<[RuleCount; 1]>,
    /// What each part says for a store that does not answer.
    pub(super) on_failure: Box<[OnFailure]>,
    /// Whether its counters are this process's own: those of shield rules.
    pub(super) is_in_process: bool,
    pub(super) is_refundable: bool,
    /// Whether one of its limits may let pass and tell to wait.
    pub(super) may_hold: bool,
    /// Whether its limits can be decided together, whoever asks.
    is_one_check: bool,
}

/// One limit of one rule.
pub(super) struct Part {
    /// The policy's, where a request finds it without a detour.
    limit: Limit,
    scope: RuleScopeBuf,
    pub(super) counts: RuleCount,
    /// Which of the request's subjects it counts.
    subject: usize,
    pub(super) policy: Arc<Policy>,
    cost: Cost,
    pub(super) charge: Charge,
    pub(super) on_failure: OnFailure,
}

/// A request as its rules see it.
pub(super) struct Asked {
    /// Whom the first of the matching rules counts, and whom the others. The first, which mostly is the only one, is written where it
    /// is kept: to move what was just written is slow.
    first: SubjectKey,
    others: Vec<SubjectKey>,
    pub(super) terms: Terms,
}

impl Asked {
    /// By nobody yet.
    pub(super) fn new(terms: Terms) -> Asked {
        Asked { first: SubjectKey::unwritten(), others: Vec::new(), terms }
    }

    /// By whom, for rules that count so.
    #[inline]
    pub(super) fn by<'a>(&mut self, mut by: impl Iterator<Item = &'a Subjects>, identity: &Identity<'_>) {
        if let Some(first) = by.next() {
            identity.write_subject(first, &mut self.first);
        }
        self.others.extend(by.map(|by| identity.subject(by)));
    }

    #[inline]
    fn subject(&self, place: usize) -> &SubjectKey {
        match place.checked_sub(1) {
            None => &self.first,
            Some(place) => &self.others[place],
        }
    }

    /// Whom the first rule counts.
    #[inline]
    pub(super) fn first(&self) -> &SubjectKey {
        &self.first
    }
}

/// What whoever asks says about a request.
#[derive(Clone, Copy, Default)]
pub(crate) struct Terms {
    /// What it costs, if it is not for the rules to say.
    pub(crate) cost: Option<Cost>,
    /// The longest that it can be held, if that is known beforehand.
    pub(crate) wait_max: Option<Duration>,
}

impl Terms {
    /// Whether nobody will wait so long.
    pub(super) fn exclude(self, wait: Wait) -> bool {
        self.wait_max.is_some_and(|wait_max| wait.as_duration().is_none_or(|wait| wait > wait_max))
    }
}

impl Bundle {
    fn new(shield: Option<Group>, enforced: Option<Group>, shadow: Vec<Group>) -> Bundle {
        let is_alone = shield.is_none() && shadow.is_empty();
        let plain = enforced.as_ref().filter(|enforced| is_alone && enforced.is_plain());
        let plain = plain.map(|enforced| enforced.parts.iter().map(Part::standing).collect());
        Bundle { shield, enforced, shadow, plain }
    }

    /// Whether a request may be let in and not go on, because it would have to wait for too long.
    #[inline]
    pub(super) fn may_be_withdrawn(&self, terms: Terms) -> bool {
        let told = self.enforced.as_ref().or(self.shield.as_ref());
        told.is_some_and(|told| told.may_hold && told.may_hold_too_long(terms))
    }
}

pub(super) type Demands<'a> = SmallVec<[Demand<'a>; 2]>;

impl Live {
    pub(super) fn new(rules: RuleSet, before: Option<&Live>) -> Live {
        let mut live = Live {
            tells_time: rules.tells_time(),
            has_shields: rules.rules().iter().any(CompiledRule::is_shield),
            bans_addresses: rules.bans_addresses(),
            bans_callers: rules.bans_callers(),
            path_bytes_max: if rules.is_off() { usize::MAX } else { rules.path_bytes_max() },
            has_exemptions: rules.has_exemptions(),
            counts: RuleCounts::new(&rules, before.map(|before| (&before.rules, &before.counts))),
            uniform: None,
            bundles: RwLock::default(),
            rules,
        };
        if !live.rules.needs_limit_set()
            && !live.has_shields
            && let Some(all) = live.rules.same_for_all()
        {
            let bundle = Arc::new(live.lay_out(all, live.rules.default_limit_set(false)));
            let by = all.iter().map(|index| live.rules.rules()[*index as usize].by().clone()).collect();
            live.uniform = Some(Uniform { bundle, by });
        }
        live
    }

    /// What there is to know of all requests, if they meet the same rules, no plan matters and nothing is to be asked before.
    #[inline]
    pub(super) fn uniform(&self) -> Option<&Uniform> {
        self.uniform.as_ref()
    }

    /// Whether the caller is never limited.
    #[inline]
    pub(super) fn exempts(&self, identity: &Identity<'_>) -> bool {
        self.has_exemptions && self.rules.is_exempt(identity)
    }

    /// What these rules ask of a caller with this plan.
    pub(super) fn bundle_of(&self, rules: Indices, limit_set: LimitSetId) -> Arc<Bundle> {
        let key = (rules, limit_set);
        if let Some(bundle) = self.bundles.read().get(&key) {
            return bundle.clone();
        }
        let bundle = Arc::new(self.lay_out(&key.0, limit_set));
        let mut kept = self.bundles.write();
        if kept.len() >= BUNDLES_KEPT_MAX {
            kept.clear();
        }
        kept.insert(key, bundle.clone());
        bundle
    }

    fn lay_out(&self, rules: &[u32], limit_set: LimitSetId) -> Bundle {
        let (mut shield, mut enforced, mut shadow) = (Vec::new(), Vec::new(), Vec::new());
        for (subject, &rule_index) in rules.iter().enumerate() {
            let rule = &self.rules.rules()[rule_index as usize];
            let parts = rule.policies(limit_set).iter().map(|policy| Part {
                limit: *policy.limit(),
                scope: RuleScopeBuf::new(rule.name().clone(), policy.name()),
                counts: self.counts.of(rule_index, rule.mode()),
                subject,
                policy: policy.clone(),
                cost: rule.cost(),
                charge: rule.charge(),
                on_failure: rule.on_failure(),
            });
            match (rule.mode(), rule.is_shield()) {
                (Mode::Off, _) => {}
                (Mode::Shadow, is_shield) => shadow.extend(self.group(parts.collect(), is_shield)),
                (Mode::Enforce, true) => shield.extend(parts),
                (Mode::Enforce, false) => enforced.extend(parts),
            }
        }
        Bundle::new(self.group(shield, true), self.group(enforced, false), shadow)
    }

    fn group(&self, parts: Vec<Part>, is_in_process: bool) -> Option<Group> {
        let policies = Policies::new(parts.iter().map(|part| part.policy.clone()));
        let policies = Arc::new(policies.with_exposed_headers(self.rules.exposes_headers()));
        let is_refundable = parts.iter().any(|part| part.charge.is_refundable());
        let may_hold = parts.iter().any(Part::may_hold);
        let on_failure = parts.iter().map(|part| part.on_failure).collect();
        // If they count on different counters for one subject, then for any.
        let mut asked = Asked::new(Terms::default());
        asked.others =
            parts.iter().map(|part| part.subject).max().map_or(vec![], |last| vec![SubjectKey::unwritten(); last]);
        let is_one_check = Check::new(&parts.iter().map(|part| part.demand(&asked)).collect::<Demands<'_>>()).is_ok();
        let rule_counts = by_rule(&parts).map(|rule| rule[0].counts.clone()).collect();
        (!parts.is_empty()).then_some(Group {
            parts,
            policies,
            rule_counts,
            on_failure,
            is_in_process,
            is_refundable,
            may_hold,
            is_one_check,
        })
    }

    /// What each rule has said.
    pub(super) fn stats(&self) -> Vec<RuleStats> {
        self.counts.stats(&self.rules)
    }
}

impl Group {
    /// Whether all its limits count the first subject, and none of them asks for anything afterwards.
    fn is_plain(&self) -> bool {
        self.is_one_check && !self.is_refundable && !self.may_hold && self.parts.iter().all(|part| part.subject == 0)
    }

    /// Counts a request that every rule let pass.
    #[inline]
    pub(super) fn count_allowed(&self, source: Source) {
        self.rule_counts.iter().for_each(|counts| counts.count(DecisionOutcome::Allow, source));
    }

    /// Counts what each rule said. A rule that was left out because the store is away let the request pass.
    #[inline]
    pub(super) fn count(&self, decision: &Decision, terms: Terms) {
        let is_plain = !self.may_hold && decision.limits.len() == self.parts.len() && decision.allowed();
        match is_plain {
            true => self.count_allowed(decision.source),
            false => self.count_apart(decision, terms),
        }
    }

    fn count_apart(&self, decision: &Decision, terms: Terms) {
        let is_complete = decision.limits.len() == self.parts.len();
        let mut lines = decision.limits.iter();
        // Who is let in but will not wait for it is refused.
        let goes_on = |line: &LimitStatus| line.allowed && !(self.may_hold && terms.exclude(held_for(line)));
        for rule in by_rule(&self.parts) {
            let has_lines = is_complete || (!decision.limits.is_empty() && rule[0].is_local());
            let (allowed, source) = match has_lines {
                true => (lines.by_ref().take(rule.len()).fold(true, |all, line| all & goes_on(line)), decision.source),
                false => (true, Source::None),
            };
            rule[0].counts.count(DecisionOutcome::of(allowed), source);
        }
    }

    /// Whoever comes back to a leaky bucket when there is a place may find that it would wait there for too long. So a refusal tells when both is
    /// over.
    pub(super) fn count_the_wait(&self, decision: &mut Decision, terms: Terms) {
        let Some(wait_max) = terms.wait_max.filter(|_| self.may_hold) else { return };
        let wait_max_us = u64::try_from(wait_max.as_micros()).unwrap_or(u64::MAX);
        let line_count = decision.limits.len();
        for (_, line) in self.parts_of_lines(line_count).zip(&mut decision.limits).filter(|(part, _)| part.may_hold()) {
            // All that is in the bucket goes before.
            let too_long_us = line.reset_after.as_micros().map_or(0, |us| us.saturating_sub(wait_max_us));
            let told = if line.allowed { Wait::ZERO } else { line.retry_after };
            line.allowed &= too_long_us == 0;
            line.retry_after = told.max(Wait::from_micros(too_long_us));
        }
    }

    /// Counts a request that was refused because the store is away.
    pub(super) fn count_unavailable(&self) {
        self.rule_counts.iter().for_each(|counts| counts.count(DecisionOutcome::Unavailable, Source::None));
    }

    #[cold]
    fn may_hold_too_long(&self, terms: Terms) -> bool {
        self.parts.iter().any(|part| part.may_hold_too_long(terms))
    }

    /// The parts that so many lines are about: all, or those that this node decided by itself while the store was away.
    pub(super) fn parts_of_lines(&self, line_count: usize) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(move |part| self.has_line(part, line_count))
    }

    /// Whether one of so many lines is about this part.
    pub(super) fn has_line(&self, part: &Part, line_count: usize) -> bool {
        line_count == self.parts.len() || part.is_local()
    }

    /// What was demanded, as one check.
    ///
    /// # Errors
    /// When these limits cannot be decided together.
    #[inline]
    pub(super) fn check<'a>(&self, demands: &'a [Demand<'a>]) -> Result<Check<'a>, CheckError> {
        if self.is_one_check { Ok(Check::of_distinct(demands)) } else { Check::new(demands) }
    }

    /// What the request demands of all its limits.
    pub(super) fn demands<'a>(&'a self, asked: &'a Asked) -> Demands<'a> {
        let mut demands = match &self.parts[..] {
            [one] => smallvec![one.demand(asked)],
            [one, two] => Demands::from_buf([one.demand(asked), two.demand(asked)]),
            parts => parts.iter().map(|part| part.demand(asked)).collect(),
        };
        if self.may_hold
            && let Some(wait_max) = asked.terms.wait_max
        {
            hold_at_most(&mut demands, wait_max);
        }
        demands
    }
}

fn by_rule(parts: &[Part]) -> impl Iterator<Item = &[Part]> {
    parts.chunk_by(|one, other| one.subject == other.subject)
}

impl Part {
    /// What the request demands of this limit.
    fn demand<'a>(&'a self, asked: &'a Asked) -> Demand<'a> {
        let subject = asked.subject(self.subject).as_bytes();
        // At most eight values of some hundred bytes each; a longer one is replaced by its digest.
        let key = Key::scoped(subject, self.scope.scope()).expect("a subject is far shorter than a key may be");
        let cost = asked.terms.cost.unwrap_or(self.cost);
        Demand { limit: self.limit, key, cost }
    }

    /// What every request that costs what the rule says demands of this limit.
    fn standing(&self) -> StandingDemand {
        StandingDemand::new(self.limit, self.scope.scope(), self.cost)
    }

    /// Whether it may let in somebody who will not wait so long: [`hold_at_most`] cannot prevent it.
    fn may_hold_too_long(&self, terms: Terms) -> bool {
        let Some(wait_max) = terms.wait_max else { return self.may_hold() };
        let is_dear = terms.cost.unwrap_or(self.cost).units() > 1;
        self.may_hold() && (is_dear || places_within(self.policy.limit(), wait_max) == 0)
    }

    /// Whether this node decides it by itself while the store is away.
    pub(super) fn is_local(&self) -> bool {
        self.on_failure == OnFailure::Local
    }

    /// Whether it may let pass and tell to wait.
    fn may_hold(&self) -> bool {
        self.policy.limit().algorithm() == Algorithm::LeakyBucket
    }
}

/// How long a leaky bucket that lets a request pass holds it. Who only looks is told when there would be room, and need not wait for it.
pub(super) fn held_for(line: &LimitStatus) -> Wait {
    if line.cost == 0 { Wait::ZERO } else { line.retry_after }
}

/// Takes from leaky buckets the places at which a single unit would wait longer than that. The store then refuses it, and knows
/// until when: nothing has to be taken and given back. Dearer requests wait for those before them and not for themselves, so for them the
/// place in the queue says too little.
#[cold]
fn hold_at_most(demands: &mut [Demand<'_>], wait_max: Duration) {
    for Demand { limit, cost, .. } in demands {
        let places = places_within(limit, wait_max);
        if cost.units() <= 1 && limit.queue().is_some_and(|queue| places < u128::from(queue)) {
            *limit = limit.with_queue((places as u64).max(1)).unwrap_or(*limit);
        }
    }
}

/// At how many places of a leaky bucket's queue nobody waits longer than that.
fn places_within(limit: &Limit, wait_max: Duration) -> u128 {
    wait_max.as_micros().saturating_mul(u128::from(limit.quota())) / u128::from(limit.window_us())
}
