//! What the script says, turned back into decisions.

use tollgate_core::{Decision, Line, Lines, Source, StoreErrorKind as Kind, Timestamp, Wait};

use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::{Asked, Step};

/// What one step of a call was answered.
pub(crate) type Answer = Result<Vec<Decision>, Fault>;

/// The answers to a call of checks, one per step: its results in order. Where a step was to be repeated more often than
/// it has results, the last one stands for the rest.
pub(crate) fn of_checks(reply: Reply, steps: &[(&Step, usize)]) -> Result<Vec<Answer>, Fault> {
    let (at, mut numbers) = open(reply)?;
    let mut answers = Vec::with_capacity(steps.len());
    for (step, repeat) in steps {
        let answer = match numbers.next() {
            Some(Reply::Error(message)) => Err(Fault::of_reply(&message)),
            Some(Reply::Integer(0)) => Ok(vec![banned(at, &step.asked, ban_wait(&mut numbers)?)]),
            Some(Reply::Integer(results)) if (1..=*repeat as i64).contains(&results) => {
                let results = (0..results).map(|_| decision(at, &step.asked, &mut numbers));
                Ok(results.collect::<Result<Vec<Decision>, Fault>>()?)
            }
            _ => return Err(senseless()),
        };
        answers.push(answer);
    }
    if numbers.next().is_some() { Err(senseless()) } else { Ok(answers) }
}

/// The answers to a call of refunds, one per step.
pub(crate) fn of_refunds(reply: Reply, steps: &[(&Step, usize)]) -> Result<Vec<Result<(), Fault>>, Fault> {
    let (_, mut numbers) = open(reply)?;
    let mut answers = Vec::with_capacity(steps.len());
    for _ in steps {
        answers.push(match numbers.next() {
            Some(Reply::Error(message)) => Err(Fault::of_reply(&message)),
            Some(Reply::Integer(1)) => Ok(()),
            _ => return Err(senseless()),
        });
    }
    Ok(answers)
}

type Numbers = std::vec::IntoIter<Reply>;

/// The time of the call, and the rest of its reply. If an error stands for all of it, nothing was written, unless it says so.
fn open(reply: Reply) -> Result<(Timestamp, Numbers), Fault> {
    match reply {
        Reply::Error(message) => Err(Fault::of_reply(&message)),
        Reply::List(list) => {
            let mut numbers = list.into_iter();
            match numbers.next() {
                Some(Reply::Integer(now)) if now >= 0 => Ok((Timestamp::from_micros(now as u64), numbers)),
                _ => Err(senseless()),
            }
        }
        _ => Err(senseless()),
    }
}

fn decision(at: Timestamp, asked: &[Asked], numbers: &mut Numbers) -> Result<Decision, Fault> {
    let mut lines = Lines::with_capacity(asked.len());
    for asked in asked {
        let allowed = match numbers.next() {
            Some(Reply::Integer(0)) => false,
            Some(Reply::Integer(1)) => true,
            _ => return Err(senseless()),
        };
        let remaining = match numbers.next() {
            Some(Reply::Integer(remaining)) => u32::try_from(remaining).map_err(|_| senseless())?,
            _ => return Err(senseless()),
        };
        let (retry_after, next_after, reset_after) = (wait(numbers)?, wait(numbers)?, wait(numbers)?);
        let Asked { quota, cost } = *asked;
        lines.push(Line { allowed, cost, quota, remaining, retry_after, next_after, reset_after });
    }
    Ok(Decision { at, source: Source::Store, lines })
}

/// A banned subject has nothing left until the ban ends, whatever its counters say. No unit comes back by itself, which no limit
/// says of one: by that such a line is known.
fn banned(at: Timestamp, asked: &[Asked], ban: Wait) -> Decision {
    let line = |&Asked { quota, cost }: &Asked| Line {
        allowed: false,
        cost,
        quota,
        remaining: 0,
        retry_after: ban,
        next_after: Wait::NEVER,
        reset_after: ban,
    };
    Decision { at, source: Source::Store, lines: asked.iter().map(line).collect() }
}

fn wait(numbers: &mut Numbers) -> Result<Wait, Fault> {
    match numbers.next() {
        Some(Reply::Integer(-1)) => Ok(Wait::NEVER),
        Some(Reply::Integer(us)) => u64::try_from(us).map(Wait::from_micros).map_err(|_| senseless()),
        _ => Err(senseless()),
    }
}

/// How long a ban lasts. One that somebody set for longer than a number holds is for good.
fn ban_wait(numbers: &mut Numbers) -> Result<Wait, Fault> {
    match numbers.next() {
        Some(Reply::Integer(us)) => Ok(u64::try_from(us).map_or(Wait::NEVER, Wait::from_micros)),
        _ => Err(senseless()),
    }
}

fn senseless() -> Fault {
    Fault::new(Kind::Protocol, "the script's reply makes no sense")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Prefix;
    use tollgate_core::{Check, Demand, Key};

    fn step() -> Step {
        let demand = Demand::new("2/s".parse().unwrap(), Key::new("k").unwrap());
        Step::check(&Check::one(&demand), &Prefix::new("p").unwrap(), false)
    }

    fn list(numbers: &[i64]) -> Reply {
        Reply::List(numbers.iter().copied().map(Reply::Integer).collect())
    }

    #[test]
    fn a_ban_denies_every_line_for_as_long_as_it_lasts() {
        let step = step();
        let answers = of_checks(list(&[9, 0, 5_000, 0, -1]), &[(&step, 1), (&step, 4)]).unwrap();
        let decisions: Vec<&Decision> = answers.iter().map(|answer| &answer.as_ref().unwrap()[0]).collect();
        assert!(decisions.iter().all(|decision| !decision.allowed() && decision.lines[0].remaining == 0));
        assert_eq!(decisions[0].retry_after(), Wait::from_micros(5_000));
        assert_eq!(decisions[1].retry_after(), Wait::NEVER);
        assert!(decisions.iter().all(|decision| decision.lines[0].next_after == Wait::NEVER), "by this it is known");
        let answers = of_checks(list(&[9, 0, i64::MIN]), &[(&step, 1)]).unwrap();
        assert_eq!(answers[0].as_ref().unwrap()[0].retry_after(), Wait::NEVER);
    }

    #[test]
    fn a_foreign_key_fails_its_own_step_alone() {
        let step = step();
        let mut reply = vec![Reply::Integer(9), Reply::Error("TOLLGATE_FOREIGN x".into()), Reply::Integer(1)];
        reply.extend([1, 1, 0, 7, 7].map(Reply::Integer));
        let answers = of_checks(Reply::List(reply), &[(&step, 1), (&step, 1)]).unwrap();
        assert_eq!(answers[0].as_ref().unwrap_err().kind, Kind::Foreign);
        assert!(answers[1].as_ref().unwrap()[0].allowed());
    }

    #[test]
    fn a_reply_that_makes_no_sense_is_an_error_and_no_panic() {
        let step = step();
        let replies: [&[i64]; 7] = [
            &[],
            &[-9],
            &[9],
            &[9, 2, 1, 1, 0, 7, 7, 1, 0, 0, 7, 7],
            &[9, 1, 3, 1, 0, 7, 7],
            &[9, 1, 1, -1, 0, 7, 7],
            &[9, 1, 1, 1, 0, 7, 7, 8],
        ];
        for reply in replies {
            assert_eq!(of_checks(list(reply), &[(&step, 1)]).unwrap_err().kind, Kind::Protocol, "{reply:?}");
        }
        assert_eq!(of_checks(Reply::Nil, &[(&step, 1)]).unwrap_err().kind, Kind::Protocol);
    }
}
