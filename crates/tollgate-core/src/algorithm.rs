//! Three state machines behind six names.
//!
//! | state machine | algorithms | the knob |
//! |---|---|---|
//! | [`Log`] | `sliding`, `sliding-log` | the resolution |
//! | [`Pair`] | `sliding-counter`, `fixed-window` | the weight of the previous window |
//! | [`Bucket`] | `token-bucket`, `leaky-bucket` | whether an admission is told to wait |
//!
//! Each can look without touching and charge without asking, so that several limits are looked at
//! before any is charged. [`decide`] is that order of steps; whoever keeps plain states (a
//! simulation, a test) needs nothing else. The memory store keeps them packed, so it takes the same steps by the same
//! functions for itself, and for the usual check by shorter ones; its tests hold it to what `decide` says. The integers are those of
//! `docs/algorithms.md`, shared with the Lua script to the last microsecond.

mod bucket;
mod log;
mod pair;

pub(crate) use bucket::Answer as BucketAnswer;
pub use bucket::Bucket;
pub use log::Log;
pub(crate) use log::{Entry, Few, LogParts, Long, Ring, RingHead, SHORT_CAPACITIES};
pub use pair::Pair;

use crate::check::Demand;
use crate::decision::{Decision, Line, Source};
use crate::limit::{Limit, Machine};
use crate::time::Timestamp;

/// What is remembered of a counter.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum State {
    /// Admissions, oldest first.
    Log(Log),
    /// Two windows' counts.
    Pair(Pair),
    /// A level that leaks.
    Bucket(Bucket),
}

/// What was charged and may be given back: the part of an admission that a refund needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Receipt {
    /// When it was charged, by the store's clock.
    pub at: Timestamp,
    /// How many units.
    pub units: u32,
    /// The `reset_after` that the admission answered: how long the charge can possibly matter.
    pub reset_after_us: u64,
}

impl Receipt {
    /// The receipt of an admitted line; `None` if nothing was charged.
    pub fn of(at: Timestamp, line: &Line) -> Option<Receipt> {
        let reset_after_us = line.reset_after.as_micros()?;
        (line.allowed && line.cost > 0).then_some(Receipt { at, units: line.cost, reset_after_us })
    }
}

impl State {
    /// A counter that was never used.
    pub fn unused(limit: &Limit) -> State {
        match limit.machine() {
            Machine::Log(_) => State::Log(Log::default()),
            Machine::Pair(_) => State::Pair(Pair::default()),
            Machine::Bucket(_) => State::Bucket(Bucket::default()),
        }
    }

    /// Whether this state belongs to the limit's state machine.
    pub fn belongs_to(&self, limit: &Limit) -> bool {
        matches!(
            (self, limit.machine()),
            (State::Log(_), Machine::Log(_))
                | (State::Pair(_), Machine::Pair(_))
                | (State::Bucket(_), Machine::Bucket(_))
        )
    }

    /// Whether forgetting this state would change nothing.
    pub fn is_unused(&self) -> bool {
        match self {
            State::Log(log) => log.is_empty(),
            State::Pair(pair) => pair.current == 0 && pair.previous == 0,
            State::Bucket(bucket) => bucket.level == 0,
        }
    }

    /// A copy that needs no memory of its own and says no less is used, now or later.
    pub(crate) fn condensed(&self, limit: &Limit, now: Timestamp) -> State {
        match self {
            State::Log(log) => State::Log(log.condensed(limit, now)),
            state => state.clone(),
        }
    }

    /// Whether `cost` units would be admitted now.
    pub fn fits(&self, limit: &Limit, now: Timestamp, cost: u32) -> bool {
        match (self, limit.machine()) {
            (State::Log(log), Machine::Log(_)) => log.fits(limit, now, cost),
            (State::Pair(pair), Machine::Pair(shape)) => pair.fits(limit, shape, now, cost),
            (State::Bucket(bucket), Machine::Bucket(shape)) => bucket.fits(limit, shape, now, cost),
            _ => State::unused(limit).fits(limit, now, cost),
        }
    }

    /// What the limit says of `cost` units now. Cannot fail, changes nothing.
    pub fn look(&self, limit: &Limit, now: Timestamp, cost: u32) -> Line {
        match (self, limit.machine()) {
            (State::Log(log), Machine::Log(shape)) => log.look(limit, shape, now, cost),
            (State::Pair(pair), Machine::Pair(shape)) => pair.look(limit, shape, now, cost),
            (State::Bucket(bucket), Machine::Bucket(shape)) => bucket.look(limit, shape, now, cost),
            _ => State::unused(limit).look(limit, now, cost),
        }
    }

    /// Takes `cost` units, which must fit, and answers for the state after. `may_grow` is false where
    /// there is no memory for another entry: a log then stretches its newest one, which leaves
    /// later, so the answer errs towards refusal.
    pub(crate) fn charge(&mut self, limit: &Limit, now: Timestamp, cost: u32, may_grow: bool) -> Line {
        match (&mut *self, limit.machine()) {
            (State::Log(log), Machine::Log(shape)) => log.charge(limit, shape, now, cost, may_grow),
            (State::Pair(pair), Machine::Pair(shape)) => pair.charge(limit, shape, now, cost),
            (State::Bucket(bucket), Machine::Bucket(shape)) => bucket.charge(limit, shape, now, cost),
            _ => {
                *self = State::unused(limit);
                self.charge(limit, now, cost, may_grow)
            }
        }
    }

    /// Answers for a check that was refused, here or by another line; keeps what a refusal must
    /// (a clock that went back, entries that have left, the penalty of `count_denied`).
    pub(crate) fn refuse(&mut self, limit: &Limit, now: Timestamp, cost: u32, may_grow: bool) -> Line {
        match (&mut *self, limit.machine()) {
            (State::Log(log), Machine::Log(shape)) => log.refuse(limit, shape, now, cost, may_grow),
            (State::Pair(pair), Machine::Pair(shape)) => pair.refuse(limit, shape, now, cost),
            (State::Bucket(bucket), Machine::Bucket(shape)) => bucket.refuse(limit, shape, now, cost),
            _ => {
                *self = State::unused(limit);
                self.refuse(limit, now, cost, may_grow)
            }
        }
    }

    /// Gives back what one admission took, as far as it still counts.
    pub fn refund(&mut self, limit: &Limit, now: Timestamp, receipt: Receipt) {
        match (self, limit.machine()) {
            (State::Log(log), Machine::Log(shape)) => log.refund(limit, shape, now, receipt),
            (State::Pair(pair), Machine::Pair(shape)) => pair.refund(limit, shape, now, receipt),
            (State::Bucket(bucket), Machine::Bucket(shape)) => bucket.refund(limit, shape, now, receipt),
            _ => {}
        }
    }
}

/// Decides one check: every demand is looked at, then all are charged or none is.
///
/// `states` holds the counter of each demand, in the same order. This is the whole decision; whoever calls it adds
/// only where the states live and what time it is.
///
/// ```
/// use tollgate_core::algorithm::{State, decide};
/// use tollgate_core::{Demand, Key, Limit, Timestamp};
///
/// let (minute, day): (Limit, Limit) = ("2/min".parse()?, "3/day".parse()?);
/// let key = Key::new("user:42")?;
/// let demands = [Demand::new(minute, key), Demand::new(day, key)];
/// let mut states = [State::unused(&minute), State::unused(&day)];
///
/// let now = Timestamp::from_micros(1_000_000);
/// assert!(decide(now, &demands, &mut states).allowed());
/// assert!(decide(now, &demands, &mut states).allowed());
/// let denied = decide(now, &demands, &mut states);
/// assert!(!denied.allowed());
/// assert_eq!(denied.lines[1].remaining, 1, "the day was not charged for what the minute refused");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
/// If `states` is shorter than `demands`.
pub fn decide(now: Timestamp, demands: &[Demand<'_>], states: &mut [State]) -> Decision {
    assert!(states.len() >= demands.len(), "one state per demand");
    let fits = |(demand, state): (&Demand<'_>, &State)| {
        demand.cost.units() == 0 || state.fits(&demand.limit, now, demand.cost.units())
    };
    let allowed = demands.iter().zip(states.iter()).all(fits);
    let lines = demands.iter().zip(states).map(|(demand, state)| settle(allowed, now, demand, state, true)).collect();
    Decision { at: now, source: Source::Store, lines }
}

/// The second half of a decision for one demand, once the verdict on the whole check is known.
#[inline]
pub(crate) fn settle(allowed: bool, now: Timestamp, demand: &Demand<'_>, state: &mut State, may_grow: bool) -> Line {
    let cost = demand.cost.units();
    match (cost, allowed) {
        (0, _) => state.look(&demand.limit, now, 0),
        (_, true) => state.charge(&demand.limit, now, cost, may_grow),
        (_, false) => state.refuse(&demand.limit, now, cost, may_grow),
    }
}
