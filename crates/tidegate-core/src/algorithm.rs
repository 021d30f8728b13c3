//! Three state machines that implement the six algorithms.
//!
//! | state machine | algorithms | the algorithms differ in |
//! |---|---|---|
//! | `log.rs` | `sliding`, `sliding-log` | the resolution |
//! | `pair.rs` | `sliding-counter`, `fixed-window` | the weight of the previous window |
//! | `bucket.rs` | `token-bucket`, `leaky-bucket` | whether an admission carries a wait |
//!
//! Each implements the trait `Machine`. Between decisions, a state is packed into 20 bytes; what does not fit is
//! `Beside` it. A `Counter` is both, borrowed from the memory store or from a plain [`State`]. It is read without a
//! change, and charged without being read first, so all limits of a check are read before any is charged:
//!
//! ```text
//!   packed state ── unpack ──▶ fits? (each limit) ──▶ decide ──▶ status
//!        ▲                                              │
//!        └──────────────────── pack ────────────────────┘
//! ```
//!
//! [`decide`] does so for plain states. The memory store runs the same functions on its slots. The integer arithmetic is
//! that of `docs/algorithms.md`. The Lua script uses the same, so both agree to the microsecond.
//!
//! **A new state machine** is a file that implements `Machine`, with its parameters as a variant of
//! `Shape` in `limit.rs`, a row in `by_machine`, and its tags in `packed.rs`.

mod bucket;
mod log;
mod packed;
mod pair;

use std::ops::RangeInclusive;

use bucket::Bucket;
pub(crate) use bucket::RefundedUnits;
use log::Log;
pub(crate) use log::Rings;
pub(crate) use packed::{Beside, Name, Packed};
use pair::Pair;

use crate::check::Demand;
use crate::decision::{Decision, LimitStatus, LimitStatuses, Source};
use crate::limit::{Limit, Shape};
use crate::time::{Lifetime, Timestamp};

/// Evaluates an expression for the state machine of a limit, which it may name as the type `M`.
///
/// The state machines, one row each.
macro_rules! by_machine {
    ($limit:expr, |$shape:ident| $call:expr) => {
        match $limit.shape() {
            Shape::Log($shape) => by_machine!(@ Log, $call),
            Shape::Pair($shape) => by_machine!(@ Pair, $call),
            Shape::Bucket($shape) => by_machine!(@ Bucket, $call),
        }
    };
    (@ $machine:ty, $call:expr) => {{
        type M = $machine;
        $call
    }};
}

/// The state of one counter, as one of the state machines sees it.
///
/// `rings` are those of the [`Beside`] from which the state was unpacked. No method
/// checks that the state belongs to the limit: it may have been written under another quota, window or algorithm of the
/// same state machine.
trait Machine: Copy {
    /// The parameters of a limit that has this state machine.
    type Shape: Copy;

    /// The tags of its packed states.
    const TAGS: RangeInclusive<u64>;

    /// Reads the state, which must be one of this state machine, or [`Packed::default`]: the state of an unused counter.
    fn unpack(packed: &Packed, name: Name, beside: &Beside) -> Self;

    /// Stores the state, except its lifetime ([`Machine::lifetime`]), which is left as it was.
    fn pack(&self, at: At<'_, Self::Shape>, packed: &mut Packed, name: Name, beside: &mut Beside);

    /// Returns how long the state matters under this limit after the time in `packed`. `status` is the present one.
    fn lifetime(at: At<'_, Self::Shape>, status: &LimitStatus, packed: &Packed) -> Lifetime;

    /// Returns whether the limit has room for `cost` units now. `false` if the cost can never fit.
    ///
    /// Not meant for a cost of 0, which is always allowed: `false` if more units are in use than the quota, which is
    /// possible after the quota was lowered.
    fn fits(&self, at: At<'_, Self::Shape>, cost: u32, rings: &Rings) -> bool;

    /// Returns the limit's status for `cost` units now, without charging them.
    ///
    /// `allowed` tells whether they fit. A cost of 0 is always allowed; its `retry_after` is that of one unit.
    fn look(&self, at: At<'_, Self::Shape>, cost: u32, rings: &Rings) -> LimitStatus;

    /// Decides `cost` units, which must not be 0. Returns the status after the decision, and what it has changed.
    ///
    /// Charges them if they fit ([`Machine::fits`]) and `others_fit`, the other limits of the check. `allowed` tells
    /// whether they fit, whatever the others say. If they are not admitted but the limit has `count_denied`, charges
    /// them up to the quota or the capacity of a bucket; a full log drops its oldest units for it. Otherwise only times
    /// in the future are corrected after the clock went back, counts are converted after the window has changed, and
    /// expired entries are dropped.
    ///
    /// If `may_grow` forbids it, a log allocates no memory. If it has no room for another entry, it adds the units to
    /// its newest entry, or joins all entries into one. These units then expire later, so the error is towards denial.
    fn decide(
        &mut self,
        at: At<'_, Self::Shape>,
        cost: u32,
        others_fit: bool,
        may_grow: MayGrow<'_>,
        rings: &mut Rings,
    ) -> (LimitStatus, Change);

    /// Returns the bytes that must be reallocated to remember a refund on the counter with this name.
    fn bytes_to_refund(_name: Name, _beside: &Beside) -> usize {
        0
    }

    /// Refunds the units of one charge, as far as they still count.
    ///
    /// `receipt` must be of a charge on this counter that was not refunded yet; this is not checked.
    fn refund(&mut self, at: At<'_, Self::Shape>, receipt: PastCharge, rings: &mut Rings);

    /// Returns a copy without memory beside it that counts at least as many units under this limit, now and later.
    fn condensed(&self, _at: At<'_, Self::Shape>, _rings: &Rings) -> Self {
        *self
    }
}

/// What a decision has changed in a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    /// Nothing.
    None,
    /// No units were charged, but times, counts or expired entries were corrected.
    Corrected,
    /// Units were charged.
    Charged,
}

impl Change {
    /// Returns the change of a decision that has charged nothing.
    fn corrected_if(is_corrected: bool) -> Change {
        if is_corrected { Change::Corrected } else { Change::None }
    }
}

/// Returns whether so many bytes may be reallocated.
type MayGrow<'a> = &'a dyn Fn(usize) -> bool;

/// A limit, its parameters, and the time of a decision.
#[derive(Clone, Copy)]
struct At<'a, S> {
    limit: &'a Limit,
    shape: &'a S,
    now_us: u64,
}

/// What a refund needs to know about the charge that it gives back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PastCharge {
    /// The time of the charge, by the store's clock.
    pub at: Timestamp,
    /// The charged units.
    pub units: u32,
    /// The `reset_after` of the admission, in microseconds: this long after `at`, the charge no longer counts.
    pub reset_after_us: u64,
    /// The [`refunded_before`](LimitStatus::refunded_before) of the admission.
    pub refunded_before: u64,
}

impl PastCharge {
    /// Returns the receipt for one limit of a decision: its `status`, and the time `at` of the decision.
    ///
    /// `None` if there is nothing to refund: the limit denied, the cost is 0, or its `reset_after` is *never*. The
    /// caller must also make sure that the whole decision is an admission, because a denial is never refunded.
    pub fn of(at: Timestamp, status: &LimitStatus) -> Option<PastCharge> {
        let reset_after_us = status.reset_after.as_micros()?;
        let at = at.plus_micros(status.late_us.into());
        let (units, refunded_before) = (status.cost, status.refunded_before);
        (status.allowed && units > 0).then_some(PastCharge { at, units, reset_after_us, refunded_before })
    }
}

/// A counter where it is stored: its packed state, its name, and what is stored beside.
///
/// If the state belongs to another state machine than a limit's, which only a collision of hashes causes, the limit
/// reads it as unused, and replaces it.
pub(crate) struct Counter<'a> {
    pub(crate) packed: &'a mut Packed,
    pub(crate) name: Name,
    pub(crate) beside: &'a mut Beside,
}

impl Counter<'_> {
    /// Returns whether `cost` units of `limit` fit at `now`. A cost of 0 always fits.
    #[inline(always)]
    pub(crate) fn fits(&mut self, now: Timestamp, limit: &Limit, cost: u32) -> bool {
        cost == 0
            || by_machine!(limit, |shape| {
                let at = At { limit, shape, now_us: now.as_micros() };
                self.unpack::<M>().fits(at, cost, &self.beside.rings)
            })
    }

    /// Decides `cost` units of `limit`, and appends the status of the limit to `limits`. Returns whether they fit.
    ///
    /// A cost of 0 changes nothing. For other costs see [`Machine::decide`].
    #[inline(always)]
    pub(crate) fn decide(
        &mut self,
        now: Timestamp,
        limit: &Limit,
        cost: u32,
        others_fit: bool,
        may_grow: MayGrow<'_>,
        limits: &mut LimitStatuses,
    ) -> bool {
        if cost == 0 {
            limits.push(self.peek(now, limit));
            return true;
        }
        by_machine!(limit, |shape| {
            let at = At { limit, shape, now_us: now.as_micros() };
            self.decide_as::<M>(at, cost, others_fit, may_grow, limits)
        })
    }

    #[cold]
    fn peek(&mut self, now: Timestamp, limit: &Limit) -> LimitStatus {
        by_machine!(limit, |shape| {
            let at = At { limit, shape, now_us: now.as_micros() };
            self.unpack::<M>().look(at, 0, &self.beside.rings)
        })
    }

    // The status is appended where it is built, because moving it takes longer than building it.
    #[inline(always)]
    fn decide_as<M: Machine>(
        &mut self,
        at: At<'_, M::Shape>,
        cost: u32,
        others_fit: bool,
        may_grow: MayGrow<'_>,
        limits: &mut LimitStatuses,
    ) -> bool {
        let mut state: M = self.unpack();
        let (status, change) = state.decide(at, cost, others_fit, may_grow, &mut self.beside.rings);
        if change != Change::None {
            state.pack(at, self.packed, self.name, self.beside);
        }
        self.packed.keep(M::lifetime(at, &status, self.packed), change == Change::Charged);
        limits.push(status);
        status.allowed
    }

    /// Refunds one charge, as far as it still counts.
    ///
    /// Does nothing if the refund must be remembered and there is no memory for that.
    pub(crate) fn refund(&mut self, now: Timestamp, limit: &Limit, receipt: PastCharge, may_grow: MayGrow<'_>) {
        by_machine!(limit, |shape| {
            let at = At { limit, shape, now_us: now.as_micros() };
            let bytes = M::bytes_to_refund(self.name, self.beside);
            if bytes == 0 || may_grow(bytes) {
                let mut state: M = self.unpack();
                state.refund(at, receipt, &mut self.beside.rings);
                state.pack(at, self.packed, self.name, self.beside);
                let status = state.look(at, 0, &self.beside.rings);
                self.packed.keep(M::lifetime(at, &status, self.packed), false);
            }
        })
    }

    /// Uses up all units, so that the counter denies every cost but 0. The counter must be unused.
    pub(crate) fn fill(&mut self, now: Timestamp, limit: &Limit) {
        let limits = &mut LimitStatuses::new();
        self.decide(now, limit, limit.cost_max(), true, &|_| true, limits);
        // A leaky bucket holds one unit besides those in its queue.
        if self.fits(now, limit, 1) {
            self.decide(now, limit, 1, true, &|_| true, limits);
        }
    }

    /// Returns a copy for a counter named `name`, which counts at least as many units under `limit`, at `now` and later.
    pub(crate) fn copy(&mut self, now: Timestamp, limit: &Limit, name: Name) -> Packed {
        by_machine!(limit, |shape| {
            let at = At { limit, shape, now_us: now.as_micros() };
            let state: M = self.unpack::<M>().condensed(at, &self.beside.rings);
            let mut packed = Packed::default();
            state.pack(at, &mut packed, name, self.beside);
            packed.keep(M::lifetime(at, &state.look(at, 0, &self.beside.rings), &packed), true);
            packed
        })
    }

    #[inline(always)]
    fn unpack<M: Machine>(&mut self) -> M {
        if !M::TAGS.contains(&self.packed.tag()) {
            self.clear();
        }
        M::unpack(self.packed, self.name, self.beside)
    }

    #[cold]
    fn clear(&mut self) {
        self.beside.free(*self.packed);
        *self.packed = Packed::default();
    }
}

/// The state of one counter, on its own: for a simulation or a test. The default is that of an unused counter.
///
/// The memory store keeps the same states in its table. A state must be used with limits of one state machine only:
/// under a limit of another one it counts as unused.
#[derive(Clone, Debug, Default)]
pub struct State {
    packed: Packed,
    beside: Beside,
}

impl State {
    /// Returns the limit's status for `cost` units at `now`, without charging them.
    ///
    /// `allowed` tells whether they fit. A cost of 0 is always allowed; its `retry_after` is that of one unit. The
    /// state is not changed.
    pub fn look(&self, limit: &Limit, now: Timestamp, cost: u32) -> LimitStatus {
        by_machine!(limit, |shape| {
            let at = At { limit, shape, now_us: now.as_micros() };
            let packed = if M::TAGS.contains(&self.packed.tag()) { self.packed } else { Packed::default() };
            M::unpack(&packed, (0, 0), &self.beside).look(at, cost, &self.beside.rings)
        })
    }

    /// Refunds the units of one charge, as far as they still count at `now`.
    ///
    /// `receipt` must be of a charge on this counter that was not refunded yet; this is not checked.
    pub fn refund(&mut self, limit: &Limit, now: Timestamp, receipt: PastCharge) {
        self.counter().refund(now, limit, receipt, &|_| true);
    }

    fn counter(&mut self) -> Counter<'_> {
        Counter { packed: &mut self.packed, name: (0, 0), beside: &mut self.beside }
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
/// let mut states = [State::default(), State::default()];
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
    let limits = decide_limits(now, demands, states, true);
    Decision::new(now, Source::Store, limits)
}

/// Implements [`decide`]. If `may_grow` is `false`, no state allocates memory for a charge; see [`Machine::charge`].
pub(crate) fn decide_limits(
    now: Timestamp,
    demands: &[Demand<'_>],
    states: &mut [State],
    may_grow: bool,
) -> LimitStatuses {
    assert!(states.len() >= demands.len(), "one state per demand");
    let mut limits = LimitStatuses::with_capacity(demands.len());
    let fits =
        |(demand, state): (&Demand<'_>, &mut State)| state.counter().fits(now, &demand.limit, demand.cost.units());
    // The first one tests itself whether its cost fits.
    let mut all_fit = demands.iter().zip(states.iter_mut()).skip(1).all(fits);
    for (Demand { limit, cost, .. }, state) in demands.iter().zip(states) {
        all_fit &= state.counter().decide(now, limit, cost.units(), all_fit, &|_| may_grow, &mut limits);
    }
    limits
}

#[cfg(test)]
mod tests;
