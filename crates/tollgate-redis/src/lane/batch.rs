//! What goes in one call, and who is told what came of it.

use std::collections::VecDeque;

use tokio::sync::oneshot::Sender;
use tollgate_core::{Decision, StoreErrorKind as Kind, Timestamp};

use super::{STEPS_MAX, Work};
use crate::answer::{self, Answer};
use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::{Script, Step, encode_call};

/// One call's worth of work.
pub(super) enum Batch {
    Checks(Checks),
    Refunds(Refunds),
    Command(Vec<u8>, Sender<Result<Reply, Fault>>),
}

/// Checks, and who waits for them.
pub(super) struct Checks {
    steps: Vec<Step>,
    /// Of the steps, in order, so many are this one's.
    waiters: Vec<ChecksWaiter>,
    grouping: Grouping,
}

type ChecksWaiter = (usize, Sender<Result<Vec<Decision>, Fault>>);

/// Refunds, and who waits for them.
pub(super) struct Refunds(Vec<(Step, Sender<Result<(), Fault>>)>);

impl Batch {
    /// Takes from the front what can go in one call, at most so many callers' checks, leaving out whoever does not wait
    /// any more.
    pub(super) fn next(backlog: &mut VecDeque<Work>, callers_max: usize) -> Option<Batch> {
        while backlog.pop_front_if(|work| has_left(work)).is_some() {}
        Some(match backlog.pop_front()? {
            Work::Checks(mut steps, waiter) => {
                let mut waiters = vec![(steps.len(), waiter)];
                while waiters.len() < callers_max
                    && let Some(work) = backlog.pop_front_if(|work| fits_behind(&steps, work))
                {
                    if let Work::Checks(more, waiter) = work
                        && !waiter.is_closed()
                    {
                        waiters.push((more.len(), waiter));
                        steps.extend(more);
                    }
                }
                Batch::Checks(Checks::new(steps, waiters))
            }
            Work::Refund(step, waiter) => {
                let mut refunds = vec![(step, waiter)];
                while refunds.len() < STEPS_MAX
                    && let Some(Work::Refund(step, waiter)) =
                        backlog.pop_front_if(|work| matches!(work, Work::Refund(..)))
                {
                    refunds.push((step, waiter));
                }
                Batch::Refunds(Refunds(refunds))
            }
            Work::Command(request, waiter) => Batch::Command(request, waiter),
        })
    }

    /// How many wait for it.
    pub(super) fn callers(&self) -> usize {
        match self {
            Batch::Checks(checks) => checks.callers(),
            Batch::Refunds(refunds) => refunds.0.len(),
            Batch::Command(..) => 1,
        }
    }

    /// How many checks it holds.
    pub(super) fn checks(&self) -> usize {
        match self {
            Batch::Checks(checks) => checks.steps.len(),
            Batch::Refunds(_) | Batch::Command(..) => 0,
        }
    }

    /// The bytes of the call.
    pub(super) fn request(&self, script: Script<'_>, now: Option<Timestamp>) -> Vec<u8> {
        match self {
            Batch::Checks(checks) => encode_call(script, now, "check", &checks.distinct()),
            Batch::Refunds(refunds) => encode_call(script, now, "refund", &refunds.steps()),
            Batch::Command(request, _) => request.clone(),
        }
    }

    /// Tells all who wait that there is no answer.
    pub(super) fn refuse(self, fault: &Fault) {
        match self {
            Batch::Checks(checks) => checks.hand_out(&Err(fault.clone())),
            Batch::Refunds(refunds) => refunds.hand_out(&Err(fault.clone())),
            Batch::Command(_, waiter) => drop(waiter.send(Err(fault.clone()))),
        }
    }
}

impl Checks {
    fn new(steps: Vec<Step>, waiters: Vec<ChecksWaiter>) -> Checks {
        let grouping = Grouping::of(&steps);
        Checks { steps, waiters, grouping }
    }

    pub(super) fn callers(&self) -> usize {
        self.waiters.len()
    }

    /// One half of the callers, and the other.
    pub(super) fn halves(mut self) -> (Checks, Checks) {
        let waiters = self.waiters.split_off(self.waiters.len() / 2);
        let steps = self.steps.split_off(self.waiters.iter().map(|(step_count, _)| step_count).sum());
        (Checks::new(self.steps, self.waiters), Checks::new(steps, waiters))
    }

    /// Each check once, in the order of the call, and how often it was asked.
    fn distinct(&self) -> Vec<(&Step, usize)> {
        self.grouping.groups.iter().map(|&(index, count)| (&self.steps[index], count)).collect()
    }

    /// What a reply says, for each of the distinct checks.
    pub(super) fn answers(&self, reply: Reply) -> Result<Vec<Answer>, Fault> {
        answer::of_checks(reply, &self.distinct())
    }

    /// Gives each caller its part of the answers to the distinct checks.
    pub(super) fn hand_out(self, answers: &Result<Vec<Answer>, Fault>) {
        let mut given = vec![0; self.grouping.groups.len()];
        let mut next_answer = self.grouping.group_of.into_iter().map(|group| {
            let answers = answers.as_ref().map_err(Fault::clone)?;
            let results = answers[group].as_ref().map_err(Fault::clone)?;
            given[group] += 1;
            Ok(results[given[group].min(results.len()) - 1].clone())
        });
        for (step_count, waiter) in self.waiters {
            let decisions: Vec<Result<Decision, Fault>> = next_answer.by_ref().take(step_count).collect();
            let _ = waiter.send(joined(decisions));
        }
    }
}

impl Refunds {
    fn steps(&self) -> Vec<(&Step, usize)> {
        self.0.iter().map(|(step, _)| (step, 1)).collect()
    }

    /// What a reply says of each.
    pub(super) fn answers(&self, reply: Reply) -> Result<Vec<Result<(), Fault>>, Fault> {
        answer::of_refunds(reply, &self.steps())
    }

    pub(super) fn hand_out(self, answers: &Result<Vec<Result<(), Fault>>, Fault>) {
        for (index, (_, waiter)) in self.0.into_iter().enumerate() {
            let answer = answers.as_ref().map_err(Fault::clone).and_then(|answers| answers[index].clone());
            let _ = waiter.send(answer);
        }
    }
}

/// Whether nobody waits for this any more. A refund is owed even then.
fn has_left(work: &Work) -> bool {
    match work {
        Work::Checks(_, waiter) => waiter.is_closed(),
        Work::Command(_, waiter) => waiter.is_closed(),
        Work::Refund(..) => false,
    }
}

fn fits_behind(steps: &[Step], work: &Work) -> bool {
    match work {
        Work::Checks(more, _) => steps.len() + more.len() <= STEPS_MAX,
        Work::Refund(..) | Work::Command(..) => false,
    }
}

/// Equal steps put together.
struct Grouping {
    /// For each distinct step, the first of its kind and how many there are.
    groups: Vec<(usize, usize)>,
    /// To which of the groups each step belongs.
    group_of: Vec<usize>,
}

impl Grouping {
    fn of(steps: &[Step]) -> Grouping {
        let mut order: Vec<usize> = (0..steps.len()).collect();
        if steps.iter().all(Step::has_one_limit) {
            order.sort_by_key(|&index| steps[index].order());
        }
        let mut groups: Vec<(usize, usize)> = Vec::with_capacity(steps.len());
        let mut group_of = vec![0; steps.len()];
        for index in order {
            match groups.last_mut() {
                Some((first, count)) if steps[*first] == steps[index] => *count += 1,
                _ => groups.push((index, 1)),
            }
            group_of[index] = groups.len() - 1;
        }
        Grouping { groups, group_of }
    }
}

/// One caller's decisions, or why there are none.
fn joined(decisions: Vec<Result<Decision, Fault>>) -> Result<Vec<Decision>, Fault> {
    let failed = decisions.iter().filter(|decision| decision.is_err()).count();
    if failed > 0 && failed < decisions.len() {
        // "Foreign" promises that nothing was executed, which is not so for the others.
        return Err(Fault::new(
            Kind::Protocol,
            "a key of ours holds something else; the batch's other checks were decided",
        ));
    }
    decisions.into_iter().collect()
}

#[cfg(test)]
mod tests;
