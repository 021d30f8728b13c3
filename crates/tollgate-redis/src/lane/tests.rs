use super::*;
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
    let (groups, group_of) = grouped(&steps.iter().collect::<Vec<_>>());
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

#[test]
fn who_has_left_is_left_out_and_kinds_do_not_mix() {
    let checks = |count: usize| {
        let (waiter, answer) = oneshot::channel();
        (Work::Checks((0..count).map(|_| step(&[("a", "5/s")])).collect(), waiter), answer)
    };
    let (left, answer) = checks(1);
    drop(answer);
    let (first, _first) = checks(100);
    let (second, _second) = checks(28);
    let (third, _third) = checks(1);
    let (refund_waiter, refund_answer) = oneshot::channel();
    drop(refund_answer);
    let refund = Work::Refund(step(&[("a", "5/s")]), refund_waiter);
    let (fourth, _fourth) = checks(1);
    let mut backlog: VecDeque<Work> = [left, first, second, third, refund, fourth].into();

    let sizes = |batch: Batch| match batch {
        Batch::Checks(works) => works.into_iter().map(|(steps, _)| steps.len()).collect::<Vec<_>>(),
        Batch::Refunds(works) => vec![0; works.len()],
        Batch::Empty | Batch::Command(..) => Vec::new(),
    };
    assert_eq!(sizes(next_batch(&mut backlog)), [100, 28], "no more than {STEPS_MAX} in one call");
    assert_eq!(sizes(next_batch(&mut backlog)), [1]);
    assert_eq!(sizes(next_batch(&mut backlog)), [0], "a refund is owed although nobody waits");
    assert_eq!(sizes(next_batch(&mut backlog)), [1]);
    assert!(matches!(next_batch(&mut backlog), Batch::Empty));
}

#[test]
fn a_batch_that_failed_in_part_does_not_claim_that_nothing_was_executed() {
    let foreign = || Err(Fault::of_reply("TOLLGATE_FOREIGN x"));
    let decision = Decision { at: Default::default(), source: tollgate_core::Source::Store, lines: Default::default() };
    assert_eq!(joined(vec![foreign(), foreign()]).unwrap_err().kind, Kind::Foreign);
    assert_eq!(joined(vec![Ok(decision), foreign()]).unwrap_err().kind, Kind::Protocol);
}
