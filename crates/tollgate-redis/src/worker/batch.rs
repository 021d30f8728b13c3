//! What goes in one call, and who is told what came of it.

use std::collections::VecDeque;

use tokio::sync::oneshot::Sender;
use tollgate_core::{Decision, Timestamp};

use super::{STEPS_MAX, Work};
use crate::answer::{self, StepDecisions};
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

type ChecksWaiter = (usize, Sender<Result<Vec<Result<Decision, Fault>>, Fault>>);

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

    /// Whether the script is called, or a command of somebody's own.
    pub(super) fn calls_script(&self) -> bool {
        !matches!(self, Batch::Command(..))
    }

    /// Whether it holds different questions of different callers.
    pub(super) fn is_divisible(&self) -> bool {
        match self {
            Batch::Checks(checks) => checks.callers() > 1 && checks.grouping.groups.len() > 1,
            Batch::Refunds(refunds) => refunds.0.len() > 1,
            Batch::Command(..) => false,
        }
    }

    /// One half of the callers, and the other.
    pub(super) fn halves(self) -> (Batch, Batch) {
        match self {
            Batch::Checks(checks) => {
                let (first, second) = checks.halves();
                (Batch::Checks(first), Batch::Checks(second))
            }
            Batch::Refunds(Refunds(mut first)) => {
                let second = first.split_off(first.len() / 2);
                (Batch::Refunds(Refunds(first)), Batch::Refunds(Refunds(second)))
            }
            Batch::Command(..) => unreachable!("a command is one caller's"),
        }
    }

    /// Tells all who wait what the reply says. The fault, if that is all it says.
    pub(super) fn answer(self, reply: Reply) -> Result<(), Fault> {
        match self {
            Batch::Checks(checks) => {
                let answers = answer::of_checks(reply, &checks.distinct());
                checks.hand_out(&answers);
                answers.map(drop)
            }
            Batch::Refunds(refunds) => {
                let answers = answer::of_refunds(reply, &refunds.steps());
                refunds.hand_out(&answers);
                answers.map(drop)
            }
            Batch::Command(_, waiter) => {
                let _ = waiter.send(match reply {
                    Reply::Error(message) => Err(Fault::of_reply(&message)),
                    reply => Ok(reply),
                });
                Ok(())
            }
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

    fn callers(&self) -> usize {
        self.waiters.len()
    }

    /// One half of the callers, and the other. Who asks the same stays together, so that the one question that cannot be answered is
    /// alone after a few halvings, however many ask it.
    fn halves(self) -> (Checks, Checks) {
        let Checks { steps, waiters, grouping } = self;
        let (mut steps, mut groups) = (steps.into_iter(), grouping.group_of.into_iter());
        let mut callers: Vec<_> = waiters
            .into_iter()
            .map(|waiter| {
                let its_groups: Vec<usize> = groups.by_ref().take(waiter.0).collect();
                (its_groups, steps.by_ref().take(waiter.0).collect::<Vec<Step>>(), waiter)
            })
            .collect();
        callers.sort_by(|(one, ..), (other, ..)| one.cmp(other));
        let middle = callers.len() / 2;
        let parts_at = |&at: &usize| callers[at - 1].0 != callers[at].0;
        let cut = (1..callers.len()).filter(parts_at).min_by_key(|at| at.abs_diff(middle)).unwrap_or(middle);
        let second = callers.split_off(cut);
        let [first, second] = [callers, second].map(|callers| {
            let (steps, waiters): (Vec<_>, Vec<_>) =
                callers.into_iter().map(|(_, steps, waiter)| (steps, waiter)).unzip();
            Checks::new(steps.into_iter().flatten().collect(), waiters)
        });
        (first, second)
    }

    /// Each check once, in the order of the call, and how often it was asked.
    fn distinct(&self) -> Vec<(&Step, usize)> {
        self.grouping.groups.iter().map(|&(index, count)| (&self.steps[index], count)).collect()
    }

    /// Gives each caller its part of the answers to the distinct checks.
    fn hand_out(self, answers: &Result<Vec<StepDecisions>, Fault>) {
        let answers = match answers {
            Ok(answers) => answers,
            Err(fault) => {
                return self.waiters.into_iter().for_each(|(_, waiter)| drop(waiter.send(Err(fault.clone()))));
            }
        };
        let mut given = vec![0; self.grouping.groups.len()];
        let mut next_answer = self.grouping.group_of.into_iter().map(|group| {
            let results = answers[group].as_ref().map_err(Fault::clone)?;
            given[group] += 1;
            Ok(results[given[group].min(results.len()) - 1].clone())
        });
        for (step_count, waiter) in self.waiters {
            let _ = waiter.send(Ok(next_answer.by_ref().take(step_count).collect()));
        }
    }
}

impl Refunds {
    fn steps(&self) -> Vec<(&Step, usize)> {
        self.0.iter().map(|(step, _)| (step, 1)).collect()
    }

    fn hand_out(self, answers: &Result<Vec<Result<(), Fault>>, Fault>) {
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

#[cfg(test)]
mod tests;
