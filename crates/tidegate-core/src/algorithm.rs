//! Three state machines that implement the six algorithms.
//!
//! | state machine | algorithms | the algorithms differ in |
//! |---|---|---|
//! | [`Log`] | `sliding`, `sliding-log` | the resolution |
//! | [`Pair`] | `sliding-counter`, `fixed-window` | the weight of the previous window |
//! | [`Bucket`] | `token-bucket`, `leaky-bucket` | whether an admission carries a wait |
//!
//! Each state machine can be read without changing it, and charged without being read first, so all limits of a check
//! are read before any is charged. [`decide`] performs these steps in order. A simulation or a test, which keeps plain
//! states, needs nothing else. The memory store keeps its states packed, so it runs the same steps with the same
//! functions itself, and the most frequent checks with shorter ones; its tests compare it with `decide`. The integer
//! arithmetic is that of `docs/algorithms.md`. The Lua script uses the same, so both agree to the microsecond.

mod bucket;
mod log;
mod pair;

pub use bucket::Bucket;
pub(crate) use bucket::BucketDecision;
pub use log::Log;
pub(crate) use log::{Entry, InlineEntries, LogParts, Long, Ring, RingHead, SHORT_CAPACITIES};
pub use pair::Pair;

use crate::check::Demand;
use crate::decision::{Decision, LimitStatus, Source};
use crate::limit::{Limit, Machine};
use crate::time::Timestamp;

/// The state of one counter, with a variant for each of the three state machines.
///
/// Methods that take a [`Limit`] treat a state that belongs to another state machine as unused.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum State {
    /// For `sliding` and `sliding-log`: the admissions, oldest first.
    Log(Log),
    /// For `sliding-counter` and `fixed-window`: the counts of the current and the previous window.
    Pair(Pair),
    /// For `token-bucket` and `leaky-bucket`: a level that leaks.
    Bucket(Bucket),
}

/// What [`State::refund`] needs to know about the charge that it refunds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Receipt {
    /// The time of the charge, by the store's clock.
    pub at: Timestamp,
    /// The charged units.
    pub units: u32,
    /// The `reset_after` of the admission, in microseconds: this long after `at`, the charge no longer counts.
    pub reset_after_us: u64,
    /// The [`refunded_before`](LimitStatus::refunded_before) of the admission.
    pub refunded_before: u64,
}

impl Receipt {
    /// Returns the receipt for one limit of a decision: its `status`, and the time `at` of the decision.
    ///
    /// `None` if there is nothing to refund: the limit denied, the cost is 0, or its `reset_after` is *never*. The
    /// caller must also make sure that the whole decision is an admission, because a denial is never refunded.
    pub fn of(at: Timestamp, status: &LimitStatus) -> Option<Receipt> {
        let reset_after_us = status.reset_after.as_micros()?;
        let at = at.plus_micros(status.late_us.into());
        let (units, refunded_before) = (status.cost, status.refunded_before);
        (status.allowed && units > 0).then_some(Receipt { at, units, reset_after_us, refunded_before })
    }
}

impl State {
    /// Creates the state of an unused counter for the limit's state machine.
    pub fn unused(limit: &Limit) -> State {
        match limit.machine() {
            Machine::Log(_) => State::Log(Log::default()),
            Machine::Pair(_) => State::Pair(Pair::default()),
            Machine::Bucket(_) => State::Bucket(Bucket::default()),
        }
    }

    /// Creates the state of a counter of which all units were used at `now`, so that it denies every cost but 0.
    pub(crate) fn full(limit: &Limit, now: Timestamp) -> State {
        let mut state = State::unused(limit);
        state.charge(limit, now, limit.cost_max(), true);
        if state.fits(limit, now, 1) {
            // A leaky bucket holds one unit besides those in its queue.
            state.charge(limit, now, 1, true);
        }
        state
    }

    /// Returns whether this state belongs to the limit's state machine: log, pair or bucket.
    ///
    /// Only that is compared. The state may be one of another algorithm with the same state machine, or of another
    /// quota or window.
    pub fn belongs_to(&self, limit: &Limit) -> bool {
        matches!(
            (self, limit.machine()),
            (State::Log(_), Machine::Log(_))
                | (State::Pair(_), Machine::Pair(_))
                | (State::Bucket(_), Machine::Bucket(_))
        )
    }

    /// Returns whether the state holds no units, so that dropping it changes no later decision or refund.
    ///
    /// `false` for a state whose units have all expired but were not dropped yet, because the time is not known here.
    pub fn is_unused(&self) -> bool {
        match self {
            State::Log(log) => log.is_empty(),
            State::Pair(pair) => pair.current == 0 && pair.previous == 0,
            State::Bucket(bucket) => bucket.level == 0 && bucket.refunded == 0,
        }
    }

    /// Returns a copy without heap memory that counts at least as many units under `limit`, at `now` and later.
    ///
    /// The entries of a log that have not expired at `now` become a single one at the time of the newest; other states
    /// are copied as they are.
    pub(crate) fn condensed(&self, limit: &Limit, now: Timestamp) -> State {
        match self {
            State::Log(log) => State::Log(log.condensed(limit, now)),
            state => state.clone(),
        }
    }

    /// Returns whether the limit has room for `cost` units at `now`. `false` if the cost can never fit.
    ///
    /// Not meant for a cost of 0, which [`decide`] always allows: `false` if more units are in use than the quota,
    /// which is possible after the quota was lowered.
    pub fn fits(&self, limit: &Limit, now: Timestamp, cost: u32) -> bool {
        match (self, limit.machine()) {
            (State::Log(log), Machine::Log(_)) => log.fits(limit, now, cost),
            (State::Pair(pair), Machine::Pair(shape)) => pair.fits(limit, shape, now, cost),
            (State::Bucket(bucket), Machine::Bucket(shape)) => bucket.fits(limit, shape, now, cost),
            _ => State::unused(limit).fits(limit, now, cost),
        }
    }

    /// Returns the limit's status for `cost` units at `now`, without charging them.
    ///
    /// `allowed` tells whether they fit. A cost of 0 is always allowed; its `retry_after` is that of one unit. The
    /// state is not changed.
    pub fn look(&self, limit: &Limit, now: Timestamp, cost: u32) -> LimitStatus {
        match (self, limit.machine()) {
            (State::Log(log), Machine::Log(shape)) => log.status_for(limit, shape, now, cost),
            (State::Pair(pair), Machine::Pair(shape)) => pair.status_for(limit, shape, now, cost),
            (State::Bucket(bucket), Machine::Bucket(shape)) => bucket.status_for(limit, shape, now, cost),
            _ => State::unused(limit).look(limit, now, cost),
        }
    }

    /// Charges `cost` units and returns the status after the charge.
    ///
    /// The cost must fit ([`State::fits`]); this is not checked. If `may_grow` is `false`, a log allocates no memory.
    /// If it has no room for another entry, it adds the units to its newest entry, or joins all entries into one. These
    /// units then expire later, so the error is towards denial.
    pub(crate) fn charge(&mut self, limit: &Limit, now: Timestamp, cost: u32, may_grow: bool) -> LimitStatus {
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

    /// Returns the status of this limit after a check that was denied, by this limit or by another one.
    ///
    /// `allowed` tells whether this limit alone would have allowed the cost, which must not be 0. If the limit has
    /// `count_denied`, charges the cost, up to the quota or the capacity of a bucket; a full log drops its oldest units
    /// for it. Otherwise only times in the future are corrected after the clock went back, counts are converted after
    /// the window has changed, and expired entries are dropped. `may_grow` is as in [`State::charge`].
    pub(crate) fn refuse(&mut self, limit: &Limit, now: Timestamp, cost: u32, may_grow: bool) -> LimitStatus {
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

    /// Refunds the units of one charge, as far as they still count at `now`.
    ///
    /// `receipt` must be of a charge on this counter that was not refunded yet; this is not checked. Does nothing if
    /// the state belongs to another state machine.
    pub fn refund(&mut self, limit: &Limit, now: Timestamp, receipt: Receipt) {
        match (self, limit.machine()) {
            (State::Log(log), Machine::Log(shape)) => log.refund(limit, shape, now, receipt),
            (State::Pair(pair), Machine::Pair(shape)) => pair.refund(limit, shape, now, receipt),
            (State::Bucket(bucket), Machine::Bucket(shape)) => bucket.refund(limit, shape, now, receipt),
            _ => {}
        }
    }
}

/// Decides one check: reads the state of every demand, then charges all of them or none.
///
/// A denial charges only limits with `count_denied`. A cost of 0 changes nothing and is always allowed. `states` holds
/// the state of each demand's counter, in the same order, and is changed in place; further states are ignored. The
/// caller provides the time, and ensures that no two demands have the same counter. Bans are not considered.
///
/// ```
/// use tidegate_core::algorithm::{State, decide};
/// use tidegate_core::{Demand, Key, Limit, Timestamp};
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
/// assert_eq!(denied.limits[1].remaining, 1, "a denial by the minute does not charge the day");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
/// Panics if `states` is shorter than `demands`.
pub fn decide(now: Timestamp, demands: &[Demand<'_>], states: &mut [State]) -> Decision {
    assert!(states.len() >= demands.len(), "one state per demand");
    let fits = |(demand, state): (&Demand<'_>, &State)| {
        demand.cost.units() == 0 || state.fits(&demand.limit, now, demand.cost.units())
    };
    let allowed = demands.iter().zip(states.iter()).all(fits);
    let limits = demands.iter().zip(states).map(|(demand, state)| apply(allowed, now, demand, state, true)).collect();
    Decision::new(now, Source::Store, limits)
}

/// Applies the verdict on the whole check to the state of one demand, and returns the status of its limit.
///
/// If the check is `allowed`, charges the demand's cost, which must fit. If not, calls [`State::refuse`]. A cost of 0
/// changes nothing. `may_grow` tells whether a log may allocate memory; see [`State::charge`].
#[inline]
pub(crate) fn apply(
    allowed: bool,
    now: Timestamp,
    demand: &Demand<'_>,
    state: &mut State,
    may_grow: bool,
) -> LimitStatus {
    let cost = demand.cost.units();
    match (cost, allowed) {
        (0, _) => state.look(&demand.limit, now, 0),
        (_, true) => state.charge(&demand.limit, now, cost, may_grow),
        (_, false) => state.refuse(&demand.limit, now, cost, may_grow),
    }
}
