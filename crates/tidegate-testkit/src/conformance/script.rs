//! A named case: a list of steps, each with its time and its expected result.
//!
//! ```text
//!   Case::new("…").on("10/s").at(0).take(10).admitted().remaining(0).at(SECOND - 1).take(1).denied().retry(1)
//! ```
//!
//! Times count from [`EPOCH_US`], which is the edge of every window that the cases use. An expectation belongs to the
//! step before it. Fields without an expectation are not compared.

use std::fmt;

use tidegate_core::{Check, Cost, Decision, Demand, Key, Limit, LimitStatus, Scope, Timestamp, Wait};

use super::{Abilities, Implementation};

/// Fifty times the longest window after 1970: aligned to it, and to everything that divides 400 days.
pub(crate) const EPOCH_US: u64 = 50 * tidegate_core::WINDOW_US_MAX;

/// A named list of steps with expected results, which can run on any [`Implementation`].
#[derive(Clone, Debug)]
pub struct Case {
    name: String,
    steps: Vec<Step>,
    /// The demands of the next step.
    demands: Vec<CaseDemand>,
    in_rule: bool,
    when: When,
    focus: usize,
}

/// The step of a case in which an implementation did not meet the expectation, with a description. Steps are numbered from 0.
#[derive(Clone, Debug)]
pub struct CaseFailure {
    case: String,
    step: usize,
    what: String,
}

impl fmt::Display for CaseFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "case \"{}\", step {}: {}", self.case, self.step, self.what)
    }
}

#[derive(Clone, Debug)]
struct Step {
    when: When,
    action: Action,
    expected: Vec<Expected>,
    admitted: Option<bool>,
}

#[derive(Clone, Copy, Debug)]
enum When {
    At(Timestamp),
    /// This many microseconds after the end of the last `retry_after`.
    AtRetry(i64),
    /// The time of the previous step.
    Unchanged,
}

#[derive(Clone, Debug)]
enum Action {
    Check(Vec<CaseDemand>),
    /// A number of checks in a row, and how many of them are admitted.
    Burst(CaseDemand, u32, u32),
    /// One unit per microsecond, from the time of the step.
    Fill(CaseDemand, u64),
    /// A refund of the nth check, with the limits of that check or with these.
    Refund(usize, Option<Vec<CaseDemand>>),
    Reset(CaseDemand),
}

#[derive(Clone, Copy, Debug)]
struct CaseDemand {
    limit: Limit,
    subject: &'static str,
    rule: Option<&'static str>,
    cost: u32,
}

/// The expected fields of a limit status; `None` means that the field is not compared.
#[derive(Clone, Copy, Debug, Default)]
struct Expected {
    allowed: Option<bool>,
    remaining: Option<u32>,
    retry: Option<Wait>,
    retry_at_most: Option<u64>,
    next: Option<Wait>,
    reset: Option<Wait>,
}

/// Steps.
impl Case {
    pub(crate) fn new(name: impl Into<String>) -> Case {
        let when = When::At(Timestamp::from_micros(EPOCH_US));
        Case { name: name.into(), steps: Vec::new(), demands: Vec::new(), in_rule: false, when, focus: 0 }
    }

    /// Sets one limit for the following steps, such as `10/s`, on the subject `client`.
    ///
    /// # Panics
    /// If the text is not a limit.
    pub(crate) fn on(self, limit: &str) -> Case {
        self.on_all(&[limit])
    }

    /// Sets one to three limits for the following steps, all on the subject `client`. A check decides them together.
    ///
    /// # Panics
    /// If a text is not a limit, or if there are more than three limits of a rule.
    pub(crate) fn on_all(self, limits: &[&str]) -> Case {
        const NAMES: [&str; 3] = ["first", "second", "third"];
        let rule = |i: usize| self.in_rule.then_some(NAMES[i]);
        let wanted =
            |(i, text): (usize, &&str)| CaseDemand { limit: limit(text), subject: "client", rule: rule(i), cost: 1 };
        let demands = limits.iter().enumerate().map(wanted).collect();
        Case { demands, ..self }
    }

    /// Makes the limits that are set from now on those of a rule, whose counters are kept when the window changes.
    pub(crate) fn in_rule(self) -> Case {
        Case { in_rule: true, ..self }
    }

    /// Sets the subject of one of the current limits, by its index. Panics if there is no such limit.
    pub(crate) fn by(mut self, limit: usize, subject: &'static str) -> Case {
        self.demands[limit].subject = subject;
        self
    }

    /// Sets the time of the following steps, in microseconds after [`EPOCH_US`]. It may be earlier than before.
    pub(crate) fn at(self, offset_us: u64) -> Case {
        Case { when: When::At(Timestamp::from_micros(EPOCH_US + offset_us)), ..self }
    }

    /// Sets the time of the following steps to the end of the `retry_after` of the last check, plus this many
    /// microseconds.
    pub(crate) fn at_retry(self, offset_us: i64) -> Case {
        Case { when: When::AtRetry(offset_us), ..self }
    }

    /// Adds a check of all current limits, with `cost` units on each.
    pub(crate) fn take(self, cost: u32) -> Case {
        let costs = vec![cost; self.demands.len()];
        self.take_each(&costs)
    }

    /// Adds a check of all current limits, with one cost per limit. Limits beyond the last cost are left out.
    pub(crate) fn take_each(self, costs: &[u32]) -> Case {
        let demands = self.demands.iter().zip(costs).map(|(wanted, &cost)| CaseDemand { cost, ..*wanted }).collect();
        self.step(Action::Check(demands))
    }

    /// Adds a check of all current limits with cost 0, which must be admitted.
    pub(crate) fn peek(self) -> Case {
        self.take(0).admitted()
    }

    /// Adds `count` checks of one unit of the first limit at the same time. Exactly `admitted` of them must be
    /// admitted.
    pub(crate) fn burst(self, count: u32, admitted: u32) -> Case {
        let wanted = self.demands[0];
        self.step(Action::Burst(wanted, count, admitted))
    }

    /// Adds `count` admissions of one unit of the first limit, one per microsecond from the time of the step.
    ///
    /// The time of the case does not move.
    pub(crate) fn fill(self, count: u64) -> Case {
        let wanted = self.demands[0];
        self.step(Action::Fill(wanted, count))
    }

    /// Adds a refund of the nth check of the case, from 0, with the limits of that check. Bursts and fills do not
    /// count, peeks do.
    ///
    /// [`run`](Case::run) panics if there is no such check before this step.
    pub(crate) fn refund(self, nth: usize) -> Case {
        self.step(Action::Refund(nth, None))
    }

    /// Adds a refund of the nth check of the case, counted as in [`refund`](Case::refund), with the current limits in
    /// place of those of the check, in the same order. The subjects and costs are those of the check.
    pub(crate) fn refund_under_present_limits(self, nth: usize) -> Case {
        let present = self.demands.clone();
        self.step(Action::Refund(nth, Some(present)))
    }

    /// Adds a reset of the counter of the first current limit.
    pub(crate) fn reset_counter(self) -> Case {
        let wanted = self.demands[0];
        self.step(Action::Reset(wanted))
    }

    fn step(mut self, action: Action) -> Case {
        self.steps.push(Step { when: self.when, action, expected: vec![Expected::default(); 3], admitted: None });
        Case { focus: 0, when: When::Unchanged, ..self }
    }
}

/// Expectations of the last step.
impl Case {
    /// Expects that the whole check is admitted.
    pub(crate) fn admitted(mut self) -> Case {
        self.last().admitted = Some(true);
        self
    }

    /// Expects that the whole check is denied.
    pub(crate) fn denied(mut self) -> Case {
        self.last().admitted = Some(false);
        self
    }

    /// Selects the limit, by its index in the check, to which the following expectations apply. Each step starts with
    /// 0.
    pub(crate) fn limit(self, focus: usize) -> Case {
        Case { focus, ..self }
    }

    /// Expects this verdict of the selected limit.
    pub(crate) fn allowed(self, allowed: bool) -> Case {
        self.expect(|limit| limit.allowed = Some(allowed))
    }

    /// Expects this `remaining` of the selected limit.
    pub(crate) fn remaining(self, units: u32) -> Case {
        self.expect(|limit| limit.remaining = Some(units))
    }

    /// Expects this `retry_after` of the selected limit, in microseconds.
    pub(crate) fn retry(self, us: u64) -> Case {
        self.expect(|limit| limit.retry = Some(Wait::from_micros(us)))
    }

    /// Expects that the check is denied and the `retry_after` of the selected limit is [`Wait::NEVER`].
    pub(crate) fn never(self) -> Case {
        self.denied().expect(|limit| limit.retry = Some(Wait::NEVER))
    }

    /// Expects a `retry_after` of the selected limit of at most this many microseconds.
    pub(crate) fn retry_at_most(self, us: u64) -> Case {
        self.expect(|limit| limit.retry_at_most = Some(us))
    }

    /// Expects this `next_after` of the selected limit, in microseconds.
    pub(crate) fn next(self, us: u64) -> Case {
        self.expect(|limit| limit.next = Some(Wait::from_micros(us)))
    }

    /// Expects this `reset_after` of the selected limit, in microseconds.
    pub(crate) fn reset(self, us: u64) -> Case {
        self.expect(|limit| limit.reset = Some(Wait::from_micros(us)))
    }

    fn expect(mut self, set: impl FnOnce(&mut Expected)) -> Case {
        let focus = self.focus;
        set(&mut self.last().expected[focus]);
        self
    }

    fn last(&mut self) -> &mut Step {
        self.steps.last_mut().expect("an expectation must follow a step")
    }
}

/// Running a case.
impl Case {
    /// Returns the name of the case, which describes the behaviour.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the abilities that an implementation needs for this case. A fill of fewer than 10,000 units needs none.
    pub fn needs(&self) -> Abilities {
        let refunds = self.steps.iter().any(|step| matches!(step.action, Action::Refund(..)));
        let several = |wanted: &[CaseDemand]| wanted.iter().any(|one| one.subject != wanted[0].subject);
        let several_subjects =
            self.steps.iter().any(|step| matches!(&step.action, Action::Check(wanted) if several(wanted)));
        let several_limits =
            self.steps.iter().any(|step| matches!(&step.action, Action::Check(wanted) if wanted.len() > 1));
        let microseconds = self.steps.iter().any(|step| matches!(step.when, When::AtRetry(us) if us < 0));
        let fills = self.steps.iter().any(|step| matches!(step.action, Action::Fill(_, 10_000..)));
        Abilities { refunds, rules: self.in_rule, several_limits, several_subjects, microseconds, fills }
    }

    /// Runs all steps on an implementation, which must have no counters.
    ///
    /// # Errors
    /// If a result differs from its expectation. Describes the first one; the later steps are not run.
    pub fn run(&self, implementation: &mut dyn Implementation) -> Result<(), CaseFailure> {
        let mut now = Timestamp::from_micros(EPOCH_US);
        let mut checks: Vec<(&[CaseDemand], Decision)> = Vec::new();
        let mut retry_at = now;
        for (number, step) in self.steps.iter().enumerate() {
            let failed = |what: String| CaseFailure { case: self.name.clone(), step: number, what };
            now = step.when.instant(now, retry_at);
            match &step.action {
                Action::Check(wanted) => {
                    let decision = with_check(wanted, |check| implementation.check(now, check));
                    step.compare(implementation, &decision).map_err(failed)?;
                    retry_at = now.plus_micros(decision.retry_after().as_micros().unwrap_or(0));
                    checks.push((wanted, decision));
                }
                Action::Burst(wanted, count, expected) => {
                    let wanted = std::slice::from_ref(wanted);
                    let decide = |_| with_check(wanted, |check| implementation.check(now, check).allowed());
                    let admitted = (0..*count).map(decide).filter(|&admitted| admitted).count();
                    if admitted != *expected as usize {
                        return Err(failed(format!(
                            "{admitted} checks of a burst of {count} were admitted, expected {expected}"
                        )));
                    }
                }
                Action::Fill(wanted, count) => {
                    implementation.fill(&wanted.demand(), &mut (0..*count).map(|us| now.plus_micros(us)));
                }
                Action::Refund(nth, present) => {
                    let (then, decision) = &checks[*nth];
                    let limits = present.as_deref().unwrap_or(then).iter().map(|wanted| wanted.limit);
                    let wanted: Vec<CaseDemand> =
                        then.iter().zip(limits).map(|(then, limit)| CaseDemand { limit, ..*then }).collect();
                    with_check(&wanted, |check| implementation.refund(now, check, decision));
                }
                Action::Reset(wanted) => implementation.reset(now, &wanted.demand()),
            }
        }
        Ok(())
    }
}

impl When {
    fn instant(self, now: Timestamp, retry_at: Timestamp) -> Timestamp {
        match self {
            When::Unchanged => now,
            When::At(instant) => instant,
            When::AtRetry(us) if us < 0 => retry_at.minus_micros(us.unsigned_abs()),
            When::AtRetry(us) => retry_at.plus_micros(us.unsigned_abs()),
        }
    }
}

impl CaseDemand {
    fn demand(&self) -> Demand<'_> {
        let scope = self.rule.map_or(Scope::Explicit, |limit| Scope::rule("case", limit));
        let key = Key::scoped(self.subject, scope).expect("the subjects of cases are short");
        Demand::new(self.limit, key).cost(Cost::new(self.cost))
    }
}

fn with_check<R>(wanted: &[CaseDemand], run: impl FnOnce(&Check<'_>) -> R) -> R {
    let demands: Vec<Demand<'_>> = wanted.iter().map(CaseDemand::demand).collect();
    run(&Check::new(&demands).expect("a case names different counters"))
}

impl Step {
    fn compare(&self, implementation: &dyn Implementation, decision: &Decision) -> Result<(), String> {
        if self.admitted.is_some_and(|admitted| admitted != decision.allowed()) {
            let expected = if self.admitted == Some(true) { "admitted" } else { "denied" };
            return Err(format!("should be {expected}, got {decision:?}"));
        }
        for (number, (status, expected)) in decision.limits.iter().zip(&self.expected).enumerate() {
            let limits = std::iter::once(expected.applied_to(status)).collect();
            let seen = implementation.as_seen(decision.with_limits(limits));
            if seen.limits[0] != *status {
                return Err(format!("limit {number} should be {:?}, got {status:?}", seen.limits[0]));
            }
            if let Some(bound) = expected.retry_at_most
                && status.retry_after > Wait::from_micros(bound)
            {
                return Err(format!("limit {number}: retry_after should be at most {bound}µs, got {status:?}"));
            }
        }
        Ok(())
    }
}

impl Expected {
    /// Returns a copy of `status` in which the expected fields are replaced by their expected values.
    fn applied_to(&self, status: &LimitStatus) -> LimitStatus {
        LimitStatus {
            allowed: self.allowed.unwrap_or(status.allowed),
            remaining: self.remaining.unwrap_or(status.remaining),
            retry_after: self.retry.unwrap_or(status.retry_after),
            next_after: self.next.unwrap_or(status.next_after),
            reset_after: self.reset.unwrap_or(status.reset_after),
            late_us: 0,
            ..*status
        }
    }
}

fn limit(text: &str) -> Limit {
    text.parse().unwrap_or_else(|error| panic!("a case's limit: {error}"))
}
