use super::*;
use tokio::sync::oneshot;

use crate::key::Prefix;
use tidegate_core::{Check, Decision, Demand, Key, Limit, StoreErrorKind as Kind};

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
fn equal_checks_of_many_callers_become_one_step() {
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
fn peek_without_a_ban_key_keeps_its_place_among_charges_of_its_counter() {
    let step_of = |cost: u32| {
        let demand = Demand::new("5/s".parse().unwrap(), Key::new("a").unwrap()).cost(cost);
        Step::check(&Check::one(&demand), &Prefix::new("p").unwrap(), true)
    };
    let steps = [0, 1, 0].map(step_of);
    assert_eq!(counts(&steps), (vec![1, 1, 1], vec![0, 1, 2]));
}

#[test]
fn check_of_several_limits_keeps_its_place() {
    let several = || step(&[("a", "5/s"), ("b", "5/s")]);
    let steps = [step(&[("b", "5/s")]), several(), step(&[("a", "5/s")]), several(), several()];
    assert_eq!(counts(&steps), (vec![1, 1, 1, 2], vec![0, 1, 2, 3, 3]));
}

type Answered = oneshot::Receiver<Result<Vec<Result<Decision, Fault>>, Fault>>;

const SHARED: Sharing = Sharing::Slot(0);

/// Creates the work of a caller who checks one limit of each of these subjects.
fn work(subjects: &[&str], sharing: Sharing) -> (Work, Answered) {
    let (waiter, answer) = oneshot::channel();
    let steps = subjects.iter().map(|subject| step(&[(subject, "5/s")])).collect();
    (Work { sharing, job: Job::Checks(steps, waiter) }, answer)
}

fn checks(count: usize) -> (Work, Answered) {
    work(&vec!["a"; count], SHARED)
}

/// Returns the number of checks of each caller of the next batch; zero for a refund.
fn next_sizes(backlog: &mut VecDeque<Work>, callers_max: usize) -> Vec<usize> {
    match Batch::next(backlog, callers_max).pop().map(|batch| batch.work) {
        Some(BatchWork::Checks(checks)) => checks.waiters.iter().map(|(count, _)| *count).collect(),
        Some(BatchWork::Refunds(refunds)) => vec![0; refunds.len()],
        Some(BatchWork::Command(..)) | None => Vec::new(),
    }
}

#[test]
fn abandoned_checks_are_dropped_and_kinds_do_not_mix() {
    let (left, answer) = checks(1);
    let (left_later, answer_later) = checks(1);
    drop((answer, answer_later));
    let (first, _first) = checks(100);
    let (second, _second) = checks(28);
    let (third, _third) = checks(1);
    let (refund_waiter, refund_answer) = oneshot::channel();
    drop(refund_answer);
    let refund = Work { sharing: SHARED, job: Job::Refund(step(&[("a", "5/s")]), refund_waiter) };
    let (fourth, _fourth) = checks(1);
    let mut backlog: VecDeque<Work> = [left, first, left_later, second, third, refund, fourth].into();

    assert_eq!(next_sizes(&mut backlog, STEPS_MAX), [100, 28], "no more than {STEPS_MAX} in one call");
    assert_eq!(next_sizes(&mut backlog, STEPS_MAX), [1]);
    assert_eq!(next_sizes(&mut backlog, STEPS_MAX), [0], "a refund is executed although its caller has given up");
    assert_eq!(next_sizes(&mut backlog, STEPS_MAX), [1]);
    assert!(Batch::next(&mut backlog, STEPS_MAX).is_empty());
}

#[test]
fn batch_has_at_most_callers_max_callers() {
    let (mut backlog, _answers): (VecDeque<Work>, Vec<Answered>) = [3, 1, 2, 1, 1].map(checks).into_iter().unzip();
    assert_eq!(next_sizes(&mut backlog, 2), [3, 1]);
    assert_eq!(next_sizes(&mut backlog, 2), [2, 1]);
    assert_eq!(next_sizes(&mut backlog, 2), [1]);
}

/// Creates a batch of checks: for each caller the subjects of its checks.
fn batch_of(callers: &[&[&str]]) -> (Batch, Vec<Answered>) {
    let (mut calls, answers) = calls_of(callers, |_| SHARED);
    assert_eq!(calls.len(), 1);
    (calls.remove(0), answers)
}

/// Creates the calls of checks: for each caller the subjects of its checks, which share calls as `sharing` says.
fn calls_of(callers: &[&[&str]], sharing: impl Fn(&[&str]) -> Sharing) -> (Vec<Batch>, Vec<Answered>) {
    let (mut backlog, answers): (VecDeque<Work>, Vec<Answered>) =
        callers.iter().map(|subjects| work(subjects, sharing(subjects))).unzip();
    (Batch::next(&mut backlog, STEPS_MAX), answers)
}

fn sizes(batch: &Batch) -> (Vec<usize>, usize) {
    let BatchWork::Checks(checks) = &batch.work else { panic!("these are checks") };
    (checks.waiters.iter().map(|(count, _)| *count).collect(), checks.grouping.groups.len())
}

#[test]
fn halves_keep_the_checks_of_a_caller_and_equal_checks_together() {
    let (batch, _answers) = batch_of(&[&["a", "b", "c"], &["d"], &["e", "f"], &["g"], &["h"]]);
    let [first, second] = batch.halves();
    assert_eq!((sizes(&first), sizes(&second)), ((vec![3, 1], 4), (vec![2, 1, 1], 4)));

    let (batch, _answers) = batch_of(&[&["m"], &["a"], &["m"], &["m"], &["m"], &["z"]]);
    let [first, second] = batch.halves();
    assert_eq!((sizes(&first), sizes(&second)), ((vec![1], 1), (vec![1; 5], 2)));
    assert!(!first.is_divisible() && second.is_divisible());
    let [first, second] = second.halves();
    assert_eq!((sizes(&first), sizes(&second)), ((vec![1; 4], 1), (vec![1], 1)));
    assert!(!first.is_divisible(), "four callers, one check");

    let (batch, _answers) = batch_of(&[&["a", "b"], &["a", "b"], &[]]);
    let [first, second] = batch.halves();
    assert_eq!((sizes(&first), sizes(&second)), ((vec![0], 0), (vec![2, 2], 2)));
}

#[test]
fn fault_of_the_whole_call_reaches_every_caller() {
    let (batch, answers) = batch_of(&[&[], &["a"], &["a", "b"]]);
    batch.fail(&Fault::of_reply("BUSY"));
    for mut answer in answers {
        assert_eq!(answer.try_recv().unwrap().unwrap_err().kind, Kind::Unavailable);
    }
}

#[test]
fn batch_is_one_call_per_slot_and_one_for_each_caller_that_shares_none() {
    let callers: &[&[&str]] = &[&["a", "a"], &["b"], &["a"], &["c"], &["b"]];
    let sizes_of = |sharing: fn(&[&str]) -> Sharing| {
        let (calls, _answers) = calls_of(callers, sharing);
        calls.iter().map(|call| (sizes(call), call.sharing == Sharing::Asking)).collect::<Vec<_>>()
    };
    assert_eq!(sizes_of(|_| SHARED), [((vec![2, 1, 1, 1, 1], 3), false)]);
    let expected = [((vec![2, 1], 1), false), ((vec![1, 1], 1), false), ((vec![1], 1), false)];
    assert_eq!(sizes_of(|subjects| Sharing::Slot(u16::from(subjects[0].as_bytes()[0]))), expected);
    let calls = sizes_of(|subjects| match subjects[0] {
        "a" => Sharing::Asking,
        "b" => Sharing::Alone,
        _ => SHARED,
    });
    let expected = [
        ((vec![2], 1), true),
        ((vec![1], 1), false),
        ((vec![1], 1), true),
        ((vec![1], 1), false),
        ((vec![1], 1), false),
    ];
    assert_eq!(calls, expected);
}
