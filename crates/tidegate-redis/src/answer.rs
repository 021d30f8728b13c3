//! Converts the script's replies to decisions.

use tidegate_core::{
    Cost, Decision, LimitStatus, LimitStatuses, Redeemed, Source, StoreErrorKind as Kind, Timestamp, Wait,
};

use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::{QuotaAndCost, Step};

/// The decisions of one step of a call, or the fault of this step alone.
pub(crate) type StepDecisions = Result<Vec<Decision>, Fault>;

/// Converts the reply to a call of checks. Returns one result per step, in order.
///
/// `steps` are the steps of the call, each with its repeat count. The result of a step has one to `repeat` decisions;
/// if it has fewer than `repeat`, the last decision applies to all further repetitions. A ban gives a single decision.
/// An inner error concerns its own step alone.
///
/// # Errors
/// Returns a fault if the whole call failed or the reply is malformed.
pub(crate) fn parse_checks(reply: Reply, steps: &[(&Step, usize)]) -> Result<Vec<StepDecisions>, Fault> {
    let (at, mut numbers) = split_time(reply)?;
    let mut answers = Vec::with_capacity(steps.len());
    for (step, repeat) in steps {
        let answer = match numbers.next() {
            Some(Reply::Error(message)) => Err(Fault::of_reply(&message)),
            Some(Reply::Integer(0)) => Ok(vec![banned(at, &step.asked, ban_wait(&mut numbers)?)]),
            Some(Reply::Integer(results)) if (1..=*repeat as i64).contains(&results) => {
                let results = (0..results).map(|_| decision(at, &step.asked, &mut numbers));
                Ok(results.collect::<Result<Vec<Decision>, Fault>>()?)
            }
            _ => return Err(malformed_reply()),
        };
        answers.push(answer);
    }
    if numbers.next().is_some() { Err(malformed_reply()) } else { Ok(answers) }
}

/// Converts the reply to a call of refunds and redemptions.
///
/// Returns one result per step, in order; the repeat counts are ignored. A refund is always [`Redeemed::Done`]. An inner
/// error concerns its own step alone.
///
/// # Errors
/// Returns a fault if the whole call failed or the reply is malformed.
pub(crate) fn parse_refunds(reply: Reply, steps: &[(&Step, usize)]) -> Result<Vec<Result<Redeemed, Fault>>, Fault> {
    let (_, mut numbers) = split_time(reply)?;
    let mut answers = Vec::with_capacity(steps.len());
    for (step, _) in steps {
        answers.push(match numbers.next() {
            Some(Reply::Error(message)) => Err(Fault::of_reply(&message)),
            Some(Reply::Integer(1)) => Ok(Redeemed::Done),
            Some(Reply::Integer(0)) if step.is_redemption() => Ok(Redeemed::AlreadyUsed),
            Some(Reply::Integer(-1)) if step.is_redemption() => Ok(Redeemed::Expired),
            _ => return Err(malformed_reply()),
        });
    }
    if numbers.next().is_some() { Err(malformed_reply()) } else { Ok(answers) }
}

type Numbers = std::vec::IntoIter<Reply>;

/// Splits a reply into its first element, the time of the call, and the remaining elements.
///
/// # Errors
/// Returns the fault of an error reply, or of a reply that is not a list that starts with a time.
fn split_time(reply: Reply) -> Result<(Timestamp, Numbers), Fault> {
    match reply {
        Reply::Error(message) => Err(Fault::of_reply(&message)),
        Reply::List(list) => {
            let mut numbers = list.into_iter();
            Ok((Timestamp::from_micros(number(&mut numbers)?), numbers))
        }
        _ => Err(malformed_reply()),
    }
}

/// Reads six numbers for each element of `asked`, the limits of a step, and builds a decision at the time `at`.
///
/// They are `allowed` (0 or 1), `remaining`, `retry_after`, `next_after`, `reset_after` and `refunded_before`.
///
/// # Errors
/// Returns a fault if a number is missing or out of range.
fn decision(at: Timestamp, asked: &[QuotaAndCost], numbers: &mut Numbers) -> Result<Decision, Fault> {
    let mut limits = LimitStatuses::with_capacity(asked.len());
    for &QuotaAndCost { quota, cost } in asked {
        let allowed = match number::<u8>(numbers)? {
            0 => false,
            1 => true,
            _ => return Err(malformed_reply()),
        };
        let remaining = number(numbers)?;
        let (retry_after, next_after, reset_after) = (wait(numbers)?, wait(numbers)?, wait(numbers)?);
        let refunded_before = number(numbers)?;
        limits.push(LimitStatus {
            allowed,
            cost,
            quota,
            remaining,
            retry_after,
            next_after,
            reset_after,
            late_us: 0,
            refunded_before,
        });
    }
    Ok(Decision::new(at, Source::Store, limits))
}

/// Builds the decision of a step that was refused by a ban which ends after `ban`.
fn banned(at: Timestamp, asked: &[QuotaAndCost], ban: Wait) -> Decision {
    let status = |&QuotaAndCost { quota, cost }: &QuotaAndCost| LimitStatus::banned(quota, Cost::new(cost), ban);
    Decision { ban: Some(ban), ..Decision::new(at, Source::Store, asked.iter().map(status).collect()) }
}

/// Reads a wait in microseconds; -1 is `NEVER`. A missing number, or another negative one, is a fault.
fn wait(numbers: &mut Numbers) -> Result<Wait, Fault> {
    match number::<i64>(numbers)? {
        -1 => Ok(Wait::NEVER),
        us => u64::try_from(us).map(Wait::from_micros).map_err(|_| malformed_reply()),
    }
}

/// Reads the remaining time of a ban in microseconds.
///
/// Any negative number is `NEVER`: -1 is a ban without an end, and other values are an overflow of a very long one. A
/// missing number is a fault.
fn ban_wait(numbers: &mut Numbers) -> Result<Wait, Fault> {
    let us: i64 = number(numbers)?;
    Ok(u64::try_from(us).map_or(Wait::NEVER, Wait::from_micros))
}

/// Reads a number. One that is missing or out of the range of its type is a fault.
fn number<N: TryFrom<i64>>(numbers: &mut Numbers) -> Result<N, Fault> {
    match numbers.next() {
        Some(Reply::Integer(number)) => number.try_into().map_err(|_| malformed_reply()),
        _ => Err(malformed_reply()),
    }
}

/// Creates the fault, of the kind `Protocol`, of a reply that does not have the form that the script documents.
fn malformed_reply() -> Fault {
    Fault::new(Kind::Protocol, "the script's reply is malformed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Prefix;
    use tidegate_core::{Check, Demand, Key, ReceiptId, Redemption};

    fn step() -> Step {
        let demand = Demand::new("2/s".parse().unwrap(), Key::new("k").unwrap());
        Step::check(&Check::one(&demand), &Prefix::new("p").unwrap(), false)
    }

    fn list(numbers: &[i64]) -> Reply {
        Reply::List(numbers.iter().copied().map(Reply::Integer).collect())
    }

    #[test]
    fn ban_denies_every_limit_until_it_ends() {
        let step = step();
        let answers = parse_checks(list(&[9, 0, 5_000, 0, -1]), &[(&step, 1), (&step, 4)]).unwrap();
        let decisions: Vec<&Decision> = answers.iter().map(|answer| &answer.as_ref().unwrap()[0]).collect();
        assert!(decisions.iter().all(|decision| !decision.allowed() && decision.limits[0].remaining == 0));
        assert_eq!(decisions[0].retry_after(), Wait::from_micros(5_000));
        assert_eq!(decisions[1].retry_after(), Wait::NEVER);
        assert_eq!(decisions[0].ban, Some(Wait::from_micros(5_000)));
        assert_eq!(decisions[1].ban, Some(Wait::NEVER));
        let answers = parse_checks(list(&[9, 0, i64::MIN]), &[(&step, 1)]).unwrap();
        assert_eq!(answers[0].as_ref().unwrap()[0].ban, Some(Wait::NEVER));
        let answers = parse_checks(list(&[9, 1, 0, 0, 7, 7, 7, 0]), &[(&step, 1)]).unwrap();
        assert_eq!(answers[0].as_ref().unwrap()[0].ban, None, "a limit denied it");
    }

    #[test]
    fn foreign_key_fails_only_its_own_step() {
        let step = step();
        let mut reply = vec![Reply::Integer(9), Reply::Error("TIDEGATE_FOREIGN x".into()), Reply::Integer(1)];
        reply.extend([1, 1, 0, 7, 7, 0].map(Reply::Integer));
        let answers = parse_checks(Reply::List(reply), &[(&step, 1), (&step, 1)]).unwrap();
        assert_eq!(answers[0].as_ref().unwrap_err().kind, Kind::Foreign);
        assert!(answers[1].as_ref().unwrap()[0].allowed());
    }

    #[test]
    fn outcome_other_than_done_is_malformed_for_a_refund_and_not_for_a_redemption() {
        let redemption = Redemption::new(ReceiptId::from_bytes([1; 16]), b"k", Timestamp::MAX);
        let (redemption, refund) = (Step::redemption(&redemption, &Prefix::new("p").unwrap()), step());
        let outcomes = |numbers: &[i64], steps: &[(&Step, usize)]| {
            let answers = parse_refunds(list(numbers), steps).map_err(|fault| fault.kind)?;
            Ok::<_, Kind>(answers.into_iter().map(Result::unwrap).collect::<Vec<_>>())
        };
        let steps = [(&redemption, 1), (&refund, 1), (&redemption, 1), (&redemption, 1)];
        let expected = vec![Redeemed::Done, Redeemed::Done, Redeemed::AlreadyUsed, Redeemed::Expired];
        assert_eq!(outcomes(&[9, 1, 1, 0, -1], &steps), Ok(expected));
        for malformed in
            [&[9, 1, 0, 0, -1][..], &[9, 1, -1, 0, -1], &[9, 2, 1, 1, 1], &[9, 1, 1, 1], &[9, 1, 1, 1, 1, 1]]
        {
            assert_eq!(outcomes(malformed, &steps), Err(Kind::Protocol), "{malformed:?}");
        }
    }

    #[test]
    fn malformed_reply_is_an_error() {
        let step = step();
        let replies: [&[i64]; 9] = [
            &[],
            &[-9],
            &[9],
            &[9, 2, 1, 1, 0, 7, 7, 0, 1, 0, 0, 7, 7, 0],
            &[9, 1, 3, 1, 0, 7, 7, 0],
            &[9, 1, 1, -1, 0, 7, 7, 0],
            &[9, 1, 1, 1, 0, 7, 7],
            &[9, 1, 1, 1, 0, 7, 7, -1],
            &[9, 1, 1, 1, 0, 7, 7, 0, 8],
        ];
        for reply in replies {
            assert_eq!(parse_checks(list(reply), &[(&step, 1)]).unwrap_err().kind, Kind::Protocol, "{reply:?}");
        }
        assert_eq!(parse_checks(Reply::Nil, &[(&step, 1)]).unwrap_err().kind, Kind::Protocol);
    }
}
