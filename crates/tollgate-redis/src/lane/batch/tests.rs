use super::*;
use tokio::sync::oneshot;

use crate::key::Prefix;
use tollgate_core::{Check, Demand, Key, Limit};

fn step(parts: &[(&str, &str)]) -> Step {
    let demands: Vec<Demand<'_>> = parts
        .iter()
        .map(|(subject, limit)| Demand::new(limit.parse::<Limit>().unwrap(), Key::new(*subject).unwrap()))
        .collect();
    Step::check(&Check::new(&demands).unwrap(), &Prefix::new("p").unwrap(), true)
}

fn counts(steps: &[Step]) -> (Vec<usize>, Vec<usize>) {
    let Grouping { groups, group_of } = Grouping::of(steps);
    (groups.into_iter().map(|(_, count)| count).collect(), group_of)
}

#[test]
fn the_same_check_from_many_callers_is_one_step() {
    let steps: Vec<Step> = ["b", "a", "b", "c", "a", "b"].map(|subject| step(&[(subject, "5/s")])).into();
    let (counts, group_of) = counts(&steps);
    assert_eq!(counts, [2, 3, 1]);
    assert_eq!(group_of, [1, 0, 1, 2, 0, 1]);
}

#[test]
fn different_checks_of_one_counter_keep_their_order() {
    let steps: Vec<Step> = ["9/s", "5/s", "9/s", "9/s"].map(|limit| step(&[("a", limit)])).into();
    assert_eq!(counts(&steps), (vec![1, 1, 2], vec![0, 1, 2, 2]));
}

#[test]
fn a_check_of_several_limits_stays_where_it_is() {
    let several = || step(&[("a", "5/s"), ("b", "5/s")]);
    let steps = [step(&[("b", "5/s")]), several(), step(&[("a", "5/s")]), several(), several()];
    assert_eq!(counts(&steps), (vec![1, 1, 1, 2], vec![0, 1, 2, 3, 3]));
}

type Answered = oneshot::Receiver<Result<Vec<Decision>, Fault>>;

fn checks(count: usize) -> (Work, Answered) {
    let (waiter, answer) = oneshot::channel();
    (Work::Checks((0..count).map(|_| step(&[("a", "5/s")])).collect(), waiter), answer)
}

/// How many checks each caller of the next batch has; none for a refund.
fn next_sizes(backlog: &mut VecDeque<Work>, callers_max: usize) -> Vec<usize> {
    match Batch::next(backlog, callers_max) {
        Some(Batch::Checks(checks)) => checks.waiters.iter().map(|(step_count, _)| *step_count).collect(),
        Some(Batch::Refunds(refunds)) => vec![0; refunds.0.len()],
        Some(Batch::Command(..)) | None => Vec::new(),
    }
}

#[test]
fn who_has_left_is_left_out_and_kinds_do_not_mix() {
    let (left, answer) = checks(1);
    let (left_later, answer_later) = checks(1);
    drop((answer, answer_later));
    let (first, _first) = checks(100);
    let (second, _second) = checks(28);
    let (third, _third) = checks(1);
    let (refund_waiter, refund_answer) = oneshot::channel();
    drop(refund_answer);
    let refund = Work::Refund(step(&[("a", "5/s")]), refund_waiter);
    let (fourth, _fourth) = checks(1);
    let mut backlog: VecDeque<Work> = [left, first, left_later, second, third, refund, fourth].into();

    assert_eq!(next_sizes(&mut backlog, STEPS_MAX), [100, 28], "no more than {STEPS_MAX} in one call");
    assert_eq!(next_sizes(&mut backlog, STEPS_MAX), [1]);
    assert_eq!(next_sizes(&mut backlog, STEPS_MAX), [0], "a refund is owed although nobody waits");
    assert_eq!(next_sizes(&mut backlog, STEPS_MAX), [1]);
    assert!(Batch::next(&mut backlog, STEPS_MAX).is_none());
}

#[test]
fn a_batch_is_for_no_more_callers_than_it_may() {
    let (mut backlog, _answers): (VecDeque<Work>, Vec<Answered>) = [3, 1, 2, 1, 1].map(checks).into_iter().unzip();
    assert_eq!(next_sizes(&mut backlog, 2), [3, 1]);
    assert_eq!(next_sizes(&mut backlog, 2), [2, 1]);
    assert_eq!(next_sizes(&mut backlog, 2), [1]);
}

#[test]
fn halves_keep_each_callers_checks_together() {
    let (mut backlog, _answers): (VecDeque<Work>, Vec<Answered>) = [3, 1, 2, 1, 1].map(checks).into_iter().unzip();
    let Some(Batch::Checks(all)) = Batch::next(&mut backlog, STEPS_MAX) else { panic!("there are checks") };
    let (first, second) = all.halves();
    let sizes = |checks: &Checks| checks.waiters.iter().map(|(step_count, _)| *step_count).collect::<Vec<_>>();
    assert_eq!((sizes(&first), first.steps.len()), (vec![3, 1], 4));
    assert_eq!((sizes(&second), second.steps.len()), (vec![2, 1, 1], 4));
}

#[test]
fn a_batch_that_failed_in_part_does_not_claim_that_nothing_was_executed() {
    let foreign = || Err(Fault::of_reply("TOLLGATE_FOREIGN x"));
    let decision = Decision { at: Default::default(), source: tollgate_core::Source::Store, lines: Default::default() };
    assert_eq!(joined(vec![foreign(), foreign()]).unwrap_err().kind, Kind::Foreign);
    assert_eq!(joined(vec![Ok(decision), foreign()]).unwrap_err().kind, Kind::Protocol);
}
