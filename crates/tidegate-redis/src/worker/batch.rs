//! The work of one call, and the callers that wait for its results.

use std::collections::VecDeque;

use tidegate_core::{Redeemed, Timestamp};

use super::{ChecksWaiter, Job, STEPS_MAX, Sharing, Waiter, Work};
use crate::answer::{self, StepDecisions};
use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::{Script, Step, encode_call};

/// Work that is sent in one call: checks, refunds, or one command.
pub(super) struct Batch {
    /// With which other work its callers share calls.
    pub(super) sharing: Sharing,
    work: BatchWork,
}

enum BatchWork {
    /// Checks of one or more callers.
    Checks(Checks),
    /// Refunds and redemptions, each with the caller that waits for its result.
    Refunds(Vec<(Step, Waiter<Redeemed>)>),
    /// One command of one caller, encoded.
    Command(Vec<u8>, Waiter<Reply>),
}

/// The checks of a batch, and the callers that wait for their results.
struct Checks {
    /// The checks of all callers, one caller after the other.
    steps: Vec<Step>,
    /// The callers in the same order, each with the number of its steps.
    waiters: Vec<(usize, ChecksWaiter)>,
    /// The groups of equal steps that are sent as one.
    grouping: Grouping,
}

impl Batch {
    /// Takes work of one kind from the front of the backlog, and divides it into the calls in which it is sent. Returns no
    /// calls if no work is left.
    ///
    /// That is checks of at most `callers_max` callers (at least one), or refunds, or one command, with at most
    /// [`STEPS_MAX`] checks or refunds in all. Checks and commands that come first, or join the batch, are dropped if their
    /// callers have given up.
    ///
    /// There is one call for all work that may [share](Sharing) the call of its node or slot, and one for each other
    /// caller, in the order in which they first occur. Work of one slot keeps its order.
    pub(super) fn next(backlog: &mut VecDeque<Work>, callers_max: usize) -> Vec<Batch> {
        while backlog.pop_front_if(|work| is_abandoned(work)).is_some() {}
        let (mut calls, mut callers, mut steps): (Vec<(Sharing, Vec<Job>)>, usize, usize) = (Vec::new(), 0, 0);
        while let Some(Work { sharing, job }) = backlog.pop_front_if(|work| match (&work.job, calls.first()) {
            (Job::Checks(more, _), Some((_, jobs))) => {
                matches!(jobs[0], Job::Checks(..)) && callers < callers_max && steps + more.len() <= STEPS_MAX
            }
            (Job::Refund(..), Some((_, jobs))) => matches!(jobs[0], Job::Refund(..)) && callers < STEPS_MAX,
            (Job::Command(..), Some(_)) => false,
            (_, None) => true,
        }) {
            let work = Work { sharing, job };
            if is_abandoned(&work) {
                continue;
            }
            callers += 1;
            steps += if let Job::Checks(more, _) = &work.job { more.len() } else { 0 };
            match calls.iter_mut().find(|(call, _)| sharing.is_shared() && *call == sharing) {
                Some((_, jobs)) => jobs.push(work.job),
                None => calls.push((sharing, vec![work.job])),
            }
        }
        calls.into_iter().map(|(sharing, jobs)| Batch { sharing, work: BatchWork::of(jobs) }).collect()
    }

    /// Returns the number of callers that wait for this batch.
    pub(super) fn callers(&self) -> usize {
        match &self.work {
            BatchWork::Checks(checks) => checks.waiters.len(),
            BatchWork::Refunds(refunds) => refunds.len(),
            BatchWork::Command(..) => 1,
        }
    }

    /// Returns the number of checks of all callers, equal ones included; zero for refunds and commands.
    pub(super) fn checks(&self) -> usize {
        match &self.work {
            BatchWork::Checks(checks) => checks.steps.len(),
            BatchWork::Refunds(_) | BatchWork::Command(..) => 0,
        }
    }

    /// Encodes the batch as one request to the server.
    ///
    /// Checks and refunds become a call of `script` that decides at `now`, or by the server's clock if `None`. For a
    /// command, both arguments are ignored.
    pub(super) fn request(&self, script: Script<'_>, now: Option<Timestamp>) -> Vec<u8> {
        match &self.work {
            BatchWork::Checks(checks) => encode_call(script, now, "check", &checks.distinct(), self.sharing),
            BatchWork::Refunds(refunds) => encode_call(script, now, "refund", &each_once(refunds), self.sharing),
            BatchWork::Command(request, _) => request.clone(),
        }
    }

    /// Returns whether the batch is sent as a call of the script: `true` for checks and refunds, `false` for a command.
    pub(super) fn calls_script(&self) -> bool {
        !matches!(self.work, BatchWork::Command(..))
    }

    /// Returns whether [`Batch::halves`] can split the batch into two, neither of them empty.
    ///
    /// `true` for several callers with at least two different checks among them, and for several refunds. `false` for a
    /// command.
    pub(super) fn is_divisible(&self) -> bool {
        match &self.work {
            BatchWork::Checks(checks) => checks.waiters.len() > 1 && checks.grouping.groups.len() > 1,
            BatchWork::Refunds(refunds) => refunds.len() > 1,
            BatchWork::Command(..) => false,
        }
    }

    /// Splits the callers, each with its checks or its refund, into two batches.
    ///
    /// The batch must be [divisible](Batch::is_divisible); otherwise one of the two may be empty. Refunds are split in
    /// the middle, in their order. Callers of checks are sorted by their checks, which changes their order, and split
    /// as near to the middle as possible so that callers with equal checks stay together. If all callers have equal
    /// checks, they are split in the middle.
    ///
    /// # Panics
    /// Panics if this is a command, which has one caller.
    pub(super) fn halves(self) -> [Batch; 2] {
        let halves = match self.work {
            BatchWork::Checks(checks) => checks.halves().map(BatchWork::Checks),
            BatchWork::Refunds(mut first) => {
                let second = first.split_off(first.len() / 2);
                [first, second].map(BatchWork::Refunds)
            }
            BatchWork::Command(..) => unreachable!("a command has one caller"),
        };
        halves.map(|work| Batch { sharing: self.sharing, work })
    }

    /// Sends the results in `reply` to the callers.
    ///
    /// # Errors
    /// Returns the fault if the whole call of the script failed or the reply is malformed. The callers have received
    /// it, too. An error reply to a command is sent to its caller and is not returned.
    pub(super) fn answer(self, reply: Reply) -> Result<(), Fault> {
        match self.work {
            BatchWork::Checks(checks) => {
                let answers = answer::parse_checks(reply, &checks.distinct());
                checks.send_results(&answers);
                answers.map(drop)
            }
            BatchWork::Refunds(refunds) => {
                let answers = answer::parse_refunds(reply, &each_once(&refunds));
                send_redeemed(refunds, &answers);
                answers.map(drop)
            }
            BatchWork::Command(_, waiter) => {
                let _ = waiter.send(match reply {
                    Reply::Error(message) => Err(Fault::of_reply(&message)),
                    reply => Ok(reply),
                });
                Ok(())
            }
        }
    }

    /// Sends `fault` to all callers.
    pub(super) fn fail(self, fault: &Fault) {
        match self.work {
            BatchWork::Checks(checks) => checks.send_results(&Err(fault.clone())),
            BatchWork::Refunds(refunds) => send_redeemed(refunds, &Err(fault.clone())),
            BatchWork::Command(_, waiter) => drop(waiter.send(Err(fault.clone()))),
        }
    }
}

impl BatchWork {
    /// Combines the jobs of one call, at least one, which must be of one kind. Of several commands, the last is kept.
    fn of(jobs: Vec<Job>) -> BatchWork {
        let (mut checks, mut refunds) = (Vec::new(), Vec::new());
        for job in jobs {
            match job {
                Job::Checks(steps, waiter) => checks.push((steps, waiter)),
                Job::Refund(step, waiter) => refunds.push((step, waiter)),
                Job::Command(request, waiter) => return BatchWork::Command(request, waiter),
            }
        }
        if refunds.is_empty() { BatchWork::Checks(Checks::new(checks)) } else { BatchWork::Refunds(refunds) }
    }
}

impl Checks {
    /// Creates the checks of these callers, in order.
    fn new(callers: Vec<(Vec<Step>, ChecksWaiter)>) -> Checks {
        let mut steps = Vec::new();
        let join = |(own, waiter): (Vec<Step>, _)| {
            let count = own.len();
            steps.extend(own);
            (count, waiter)
        };
        let waiters = callers.into_iter().map(join).collect();
        let grouping = Grouping::of(&steps);
        Checks { steps, waiters, grouping }
    }

    /// Splits the callers, sorted by their checks, in the middle or as near to it as possible.
    ///
    /// Callers with equal checks stay together, so that a check that the server cannot decide is alone after a few
    /// halvings, however many callers have sent it. If all callers have equal checks, they are split in the middle.
    /// With one caller, the first half is empty.
    fn halves(self) -> [Checks; 2] {
        let Checks { steps, waiters, grouping } = self;
        let (mut steps, mut groups) = (steps.into_iter(), grouping.group_of.into_iter());
        let mut callers: Vec<_> = waiters
            .into_iter()
            .map(|(count, waiter)| {
                let own_groups: Vec<usize> = groups.by_ref().take(count).collect();
                (own_groups, (steps.by_ref().take(count).collect::<Vec<Step>>(), waiter))
            })
            .collect();
        callers.sort_by(|(one, _), (other, _)| one.cmp(other));
        let middle = callers.len() / 2;
        let differs_at = |&at: &usize| callers[at - 1].0 != callers[at].0;
        let cut = (1..callers.len()).filter(differs_at).min_by_key(|at| at.abs_diff(middle)).unwrap_or(middle);
        let second = callers.split_off(cut);
        [callers, second].map(|callers| Checks::new(callers.into_iter().map(|(_, caller)| caller).collect()))
    }

    /// Returns one check of each group of equal ones with their number, in the order in which the call decides them.
    fn distinct(&self) -> Vec<(&Step, usize)> {
        self.grouping.groups.iter().map(|&(index, count)| (&self.steps[index], count)).collect()
    }

    /// Sends each caller the results of its checks, or to all callers the fault of the whole call.
    ///
    /// `answers` must have an element for each of [`Checks::distinct`], in that order, with at least one decision or a
    /// fault. The nth check of a group gets its nth decision, or the last one if there are fewer.
    fn send_results(self, answers: &Result<Vec<StepDecisions>, Fault>) {
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
        for (count, waiter) in self.waiters {
            let _ = waiter.send(Ok(next_answer.by_ref().take(count).collect()));
        }
    }
}

/// Returns the steps of refunds, each with the repeat count 1.
fn each_once(refunds: &[(Step, Waiter<Redeemed>)]) -> Vec<(&Step, usize)> {
    refunds.iter().map(|(step, _)| (step, 1)).collect()
}

/// Sends each caller of a refund its result, or the fault of the whole call.
fn send_redeemed(refunds: Vec<(Step, Waiter<Redeemed>)>, answers: &Result<Vec<Result<Redeemed, Fault>>, Fault>) {
    for (index, (_, waiter)) in refunds.into_iter().enumerate() {
        let answer = answers.as_ref().map_err(Fault::clone).and_then(|answers| answers[index].clone());
        let _ = waiter.send(answer);
    }
}

/// Returns whether to drop the work because its caller has given up.
///
/// Always `false` for a refund, which is executed even then.
fn is_abandoned(work: &Work) -> bool {
    match &work.job {
        Job::Checks(_, waiter) => waiter.is_closed(),
        Job::Command(_, waiter) => waiter.is_closed(),
        Job::Refund(..) => false,
    }
}

/// The steps of a batch, divided into groups of equal ones. A group is sent as one step with a repeat count.
///
/// Only equal neighbours form a group, because the order of steps on a counter matters. If all steps have one limit,
/// they are first sorted by their counters.
struct Grouping {
    /// For each group, in the order of sending, the index of its first step and the number of its steps.
    groups: Vec<(usize, usize)>,
    /// For each step, the index of its group in `groups`.
    group_of: Vec<usize>,
}

impl Grouping {
    fn of(steps: &[Step]) -> Grouping {
        let mut order: Vec<usize> = (0..steps.len()).collect();
        if steps.iter().all(Step::has_one_limit) {
            order.sort_by_key(|&index| steps[index].counter_keys());
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
