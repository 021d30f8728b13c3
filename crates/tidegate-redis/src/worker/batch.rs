//! The work of one call, and the callers that wait for its results.

use std::collections::VecDeque;

use tidegate_core::{Decision, Redeemed, Timestamp};

use super::{STEPS_MAX, Sharing, Waiter, Work};
use crate::answer::{self, StepDecisions};
use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::{KeyPlace, Script, Step, encode_call};

/// Work that is sent together: checks, refunds, or one command.
pub(super) enum Batch {
    /// Checks of one or more callers.
    Checks(Checks),
    /// Refunds and redemptions of one or more callers.
    Refunds(Refunds),
    /// One command of one caller, encoded.
    Command(Vec<u8>, Sharing, Waiter<Reply>),
}

/// The checks of a batch, and the callers that wait for their results.
pub(super) struct Checks {
    /// The checks of all callers, one caller after the other.
    steps: Vec<Step>,
    /// The callers in the same order, each with the number of steps that belong to it.
    waiters: Vec<ChecksWaiter>,
    /// The groups of equal steps that are sent as one.
    grouping: Grouping,
}

/// A caller that waits for the results of its checks.
struct ChecksWaiter {
    /// The number of its steps.
    steps: usize,
    sharing: Sharing,
    waiter: Waiter<Vec<Result<Decision, Fault>>>,
}

/// The refunds and redemptions of a batch, each with the caller that waits for its result.
pub(super) struct Refunds(Vec<(Step, Sharing, Waiter<Redeemed>)>);

impl Batch {
    /// Takes work of one kind from the front of the backlog. Returns `None` if no work is left.
    ///
    /// That is checks of at most `callers_max` callers (at least one), or refunds, or one command. A batch has at most
    /// [`STEPS_MAX`] checks or refunds. Checks and commands that come first, or join the batch, are dropped if their
    /// callers have given up.
    pub(super) fn next(backlog: &mut VecDeque<Work>, callers_max: usize) -> Option<Batch> {
        while backlog.pop_front_if(|work| is_abandoned(work)).is_some() {}
        Some(match backlog.pop_front()? {
            Work::Checks(mut steps, sharing, waiter) => {
                let mut waiters = vec![ChecksWaiter { steps: steps.len(), sharing, waiter }];
                while waiters.len() < callers_max
                    && let Some(work) = backlog.pop_front_if(|work| fits_into_call(&steps, work))
                {
                    if let Work::Checks(more, sharing, waiter) = work
                        && !waiter.is_closed()
                    {
                        waiters.push(ChecksWaiter { steps: more.len(), sharing, waiter });
                        steps.extend(more);
                    }
                }
                Batch::Checks(Checks::new(steps, waiters))
            }
            Work::Refund(step, sharing, waiter) => {
                let mut refunds = vec![(step, sharing, waiter)];
                while refunds.len() < STEPS_MAX
                    && let Some(Work::Refund(step, sharing, waiter)) =
                        backlog.pop_front_if(|work| matches!(work, Work::Refund(..)))
                {
                    refunds.push((step, sharing, waiter));
                }
                Batch::Refunds(Refunds(refunds))
            }
            Work::Command(request, sharing, waiter) => Batch::Command(request, sharing, waiter),
        })
    }

    /// Returns the number of callers that wait for this batch.
    pub(super) fn callers(&self) -> usize {
        match self {
            Batch::Checks(checks) => checks.callers(),
            Batch::Refunds(refunds) => refunds.0.len(),
            Batch::Command(..) => 1,
        }
    }

    /// Returns the number of checks of all callers, equal ones included; zero for refunds and commands.
    pub(super) fn checks(&self) -> usize {
        match self {
            Batch::Checks(checks) => checks.steps.len(),
            Batch::Refunds(_) | Batch::Command(..) => 0,
        }
    }

    /// Encodes the batch as one request to the server.
    ///
    /// Checks and refunds become a call of `script` that decides at `now`, or by the server's clock if `None`. For a
    /// command, both arguments are ignored.
    pub(super) fn request(&self, script: Script<'_>, now: Option<Timestamp>) -> Vec<u8> {
        match self {
            Batch::Checks(checks) => encode_call(script, now, "check", &checks.distinct(), checks.key_place()),
            Batch::Refunds(refunds) => encode_call(script, now, "refund", &refunds.steps(), KeyPlace::Keys),
            Batch::Command(request, ..) => request.clone(),
        }
    }

    /// Splits the batch into the calls in which it is sent. Returns each with whether it must follow `ASKING`.
    ///
    /// There is one call for all work that may [share](Sharing) the call of its node or slot, and one for each other
    /// caller, in the order in which they first occur. Work of one slot keeps its order. A command is a call of its
    /// own.
    pub(super) fn into_calls(self) -> Vec<(Batch, bool)> {
        match self {
            Batch::Command(request, sharing, waiter) => {
                vec![(Batch::Command(request, sharing, waiter), sharing == Sharing::Asking)]
            }
            Batch::Checks(checks) => {
                if is_one_call(&checks.waiters) {
                    let is_asking = checks.waiters.iter().any(|caller| caller.sharing == Sharing::Asking);
                    return vec![(Batch::Checks(checks), is_asking)];
                }
                let mut steps = checks.steps.into_iter();
                let callers = checks.waiters.into_iter().map(|waiter| {
                    let own: Vec<Step> = steps.by_ref().take(waiter.steps).collect();
                    (waiter.sharing, (own, waiter))
                });
                let call = |(callers, is_asking): (Vec<(Vec<Step>, ChecksWaiter)>, bool)| {
                    let (steps, waiters): (Vec<_>, Vec<_>) = callers.into_iter().unzip();
                    (Batch::Checks(Checks::new(steps.into_iter().flatten().collect(), waiters)), is_asking)
                };
                group_by_call(callers).into_iter().map(call).collect()
            }
            Batch::Refunds(Refunds(refunds)) => {
                let refunds = refunds.into_iter().map(|refund| (refund.1, refund));
                let call = |(refunds, is_asking)| (Batch::Refunds(Refunds(refunds)), is_asking);
                group_by_call(refunds).into_iter().map(call).collect()
            }
        }
    }

    /// Returns whether the batch is sent as a call of the script: `true` for checks and refunds, `false` for a command.
    pub(super) fn calls_script(&self) -> bool {
        !matches!(self, Batch::Command(..))
    }

    /// Returns whether [`Batch::halves`] can split the batch into two, neither of them empty.
    ///
    /// `true` for several callers with at least two different checks among them, and for several refunds. `false` for a
    /// command.
    pub(super) fn is_divisible(&self) -> bool {
        match self {
            Batch::Checks(checks) => checks.callers() > 1 && checks.grouping.groups.len() > 1,
            Batch::Refunds(refunds) => refunds.0.len() > 1,
            Batch::Command(..) => false,
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
            Batch::Command(..) => unreachable!("a command has one caller"),
        }
    }

    /// Sends the results in `reply` to the callers.
    ///
    /// # Errors
    /// Returns the fault if the whole call of the script failed or the reply is malformed. The callers have received
    /// it, too. An error reply to a command is sent to its caller and is not returned.
    pub(super) fn answer(self, reply: Reply) -> Result<(), Fault> {
        match self {
            Batch::Checks(checks) => {
                let answers = answer::parse_checks(reply, &checks.distinct());
                checks.send_results(&answers);
                answers.map(drop)
            }
            Batch::Refunds(refunds) => {
                let answers = answer::parse_refunds(reply, &refunds.steps());
                refunds.send_results(&answers);
                answers.map(drop)
            }
            Batch::Command(_, _, waiter) => {
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
        match self {
            Batch::Checks(checks) => checks.send_results(&Err(fault.clone())),
            Batch::Refunds(refunds) => refunds.send_results(&Err(fault.clone())),
            Batch::Command(_, _, waiter) => drop(waiter.send(Err(fault.clone()))),
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

    /// Returns how the call passes its keys to the script. All its callers share it in the same way.
    fn key_place(&self) -> KeyPlace {
        match self.waiters.iter().any(|caller| caller.sharing == Sharing::Node) {
            true => KeyPlace::Arguments,
            false => KeyPlace::Keys,
        }
    }

    /// Splits the callers, sorted by their checks, in the middle or as near to it as possible.
    ///
    /// Callers with equal checks stay together, so that a check that the server cannot decide is alone after a few
    /// halvings, however many callers have sent it. If all callers have equal checks, they are split in the middle.
    /// With one caller, the first half is empty.
    fn halves(self) -> (Checks, Checks) {
        let Checks { steps, waiters, grouping } = self;
        let (mut steps, mut groups) = (steps.into_iter(), grouping.group_of.into_iter());
        let mut callers: Vec<_> = waiters
            .into_iter()
            .map(|waiter| {
                let own_groups: Vec<usize> = groups.by_ref().take(waiter.steps).collect();
                (own_groups, steps.by_ref().take(waiter.steps).collect::<Vec<Step>>(), waiter)
            })
            .collect();
        callers.sort_by(|(one, ..), (other, ..)| one.cmp(other));
        let middle = callers.len() / 2;
        let differs_at = |&at: &usize| callers[at - 1].0 != callers[at].0;
        let cut = (1..callers.len()).filter(differs_at).min_by_key(|at| at.abs_diff(middle)).unwrap_or(middle);
        let second = callers.split_off(cut);
        let [first, second] = [callers, second].map(|callers| {
            let (steps, waiters): (Vec<_>, Vec<_>) =
                callers.into_iter().map(|(_, steps, waiter)| (steps, waiter)).unzip();
            Checks::new(steps.into_iter().flatten().collect(), waiters)
        });
        (first, second)
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
                return self.waiters.into_iter().for_each(|caller| drop(caller.waiter.send(Err(fault.clone()))));
            }
        };
        let mut given = vec![0; self.grouping.groups.len()];
        let mut next_answer = self.grouping.group_of.into_iter().map(|group| {
            let results = answers[group].as_ref().map_err(Fault::clone)?;
            given[group] += 1;
            Ok(results[given[group].min(results.len()) - 1].clone())
        });
        for caller in self.waiters {
            let _ = caller.waiter.send(Ok(next_answer.by_ref().take(caller.steps).collect()));
        }
    }
}

impl Refunds {
    fn steps(&self) -> Vec<(&Step, usize)> {
        self.0.iter().map(|(step, ..)| (step, 1)).collect()
    }

    fn send_results(self, answers: &Result<Vec<Result<Redeemed, Fault>>, Fault>) {
        for (index, (_, _, waiter)) in self.0.into_iter().enumerate() {
            let answer = answers.as_ref().map_err(Fault::clone).and_then(|answers| answers[index].clone());
            let _ = waiter.send(answer);
        }
    }
}

/// Returns whether to drop the work because its caller has given up.
///
/// Always `false` for a refund, which is executed even then.
fn is_abandoned(work: &Work) -> bool {
    match work {
        Work::Checks(_, _, waiter) => waiter.is_closed(),
        Work::Command(_, _, waiter) => waiter.is_closed(),
        Work::Refund(..) => false,
    }
}

/// Returns whether `work` can be added to a call with these checks: it is checks, and at most [`STEPS_MAX`] in all.
fn fits_into_call(steps: &[Step], work: &Work) -> bool {
    match work {
        Work::Checks(more, ..) => steps.len() + more.len() <= STEPS_MAX,
        Work::Refund(..) | Work::Command(..) => false,
    }
}

/// Returns whether the checks of these callers are sent in one call: there is one caller, or all share a call.
fn is_one_call(callers: &[ChecksWaiter]) -> bool {
    let [first, others @ ..] = callers else { return true };
    others.is_empty() || first.sharing.is_shared() && others.iter().all(|other| other.sharing == first.sharing)
}

/// Groups values that are sent in one call. Returns each group with whether it must follow `ASKING`.
///
/// The groups are in the order in which their first values occur, the values in theirs.
fn group_by_call<V>(values: impl Iterator<Item = (Sharing, V)>) -> Vec<(Vec<V>, bool)> {
    let mut calls: Vec<(Sharing, Vec<V>)> = Vec::new();
    for (sharing, value) in values {
        match calls.iter_mut().find(|(call, _)| sharing.is_shared() && *call == sharing) {
            Some((_, values)) => values.push(value),
            None => calls.push((sharing, vec![value])),
        }
    }
    calls.into_iter().map(|(call, values)| (values, call == Sharing::Asking)).collect()
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
