//! A level that leaks: the token bucket and the leaky bucket.
//!
//! Both keep one number, the level. It grows by every admission and leaks at `quota` per `window`. The **token bucket**
//! admits while the level stays within its burst. The **leaky bucket** admits while at most `queue` units wait; each
//! admission carries the time to wait, so that requests proceed evenly spaced.
//!
//! ```text
//!   level ▲
//!    burst├ ─ ─ ─ ─ ─╮─ ─ ─ ─ ─ ─     a request that would exceed this level is denied
//!         │   ╱│╲    │╲
//!         │  ╱ │  ╲ ╱│  ╲  ← leaks quota/window
//!         └─┴──┴────┴┴───────▶ time
//! ```
//!
//! **Why a level and not the theoretical arrival time?** GCRA stores the time at which the bucket will be empty. That
//! time was computed with the *old* rate: after the limit is raised, the key still waits as long as the old rate
//! required. A level in units stays valid when the quota changes.
//!
//! **Integers.** A unit has as many parts as the window has microseconds (`parts_per_unit`), and `quota` parts leak per
//! microsecond, so nothing is ever rounded: 10^7 a second and 1 a year are both exact. Only where capacity × window
//! would exceed 2^53, the range of exact integers in a Lua double, time is counted in grains of several microseconds,
//! rounded towards denial. 100,000 a day is still exact; 10^7 in 400 days has grains of 40 ms while its units leak
//! 3.5 s apart.
//!
//! **Refunds.** Charges leak in the order in which they were made. A refund gives back the part of its charge that is
//! still in the bucket, and no more. Otherwise a late refund would return units that have already leaked.
//!
//! A charge leaks sooner if an earlier charge was refunded in the meantime. Without any memory of that, a refund would
//! give back units of other charges, and repeated refunds would raise the burst without a bound. A list of all charges
//! would solve it, but its size has no bound. So the bucket counts the units that were ever refunded on it, and each
//! charge remembers the count that it found. With the difference `D` of the two counts at the refund, the charge `c`,
//! the level `p` right after it, and the units `l` that have leaked since, the refund gives back
//!
//! ```text
//!   min(c, max(c, p − D) − l), at least 0, and at most the level
//! ```
//!
//! *Why this is safe.* Call a charge older than another if it was made before it. Let `E` be the units of older charges
//! that were refunded since the charge. The last unit of the charge is then `p − l − E` units from the end that leaks, so
//! as much of the charge as that is still in the bucket. `E` is unknown, but at most `D`, which also counts refunds of
//! younger charges. And `E` is at most `p − c`, because older charges had no more units than that in the bucket. So a
//! refund never gives back a unit that has leaked or that belongs to another charge, and the refunds after any time, of
//! charges before it, are at most the level at that time. Therefore the level is always at least what the charges
//! without the refunded units alone would give: within any time `t`, they are at most burst + rate × `t`, no matter what
//! is refunded and in which order. The counts are compared, not the times of refunds, so the order of several charges
//! and refunds within one microsecond is known. All roundings are to the same side: a refund is counted in whole units,
//! rounded up, and `p`, which is known from `reset_after`, is rounded down.
//!
//! The count matters as long as a charge that is older than the last refund can be in the bucket. So it expires, and
//! begins at 0 again, when a full bucket would be empty if nothing was written since the last write. A refund gives back
//! nothing if the bucket's count is lower than that of the charge (the counter was deleted in between), or if the charge
//! is later than the refund (the clock went back). If the limit was changed in between, the arithmetic uses the present
//! limit, and no more is given back than was charged.
//!
//! Twin: `tidegate-redis/lua/tidegate.lua`, section *bucket*. Change both or neither.

use super::Receipt;
use crate::decision::{LimitStatus, Wait};
use crate::limit::{BucketShape, Limit};
use crate::time::Timestamp;

/// The longest wait that is reported: 142 years, the latest [`Timestamp`]. Longer waits (10^7 units at one in 400 days)
/// are cut to it.
const WAIT_US_MAX: u64 = Timestamp::MAX.as_micros();

/// In place of a number of parts: the cost can never fit.
const NEVER: u64 = u64::MAX;

/// The upper bound, exclusive, on the count of refunded units: the range of exact integers in a Lua double.
const REFUNDED_END: u64 = 1 << 53;

/// The state of a bucket: its level at a point in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bucket {
    /// The time at which `level` was computed.
    pub(crate) time_us: u64,
    /// The used units, in parts.
    pub(crate) level: u64,
    /// The number of parts per unit in `level`; 0 if the bucket was never used. If it differs from the limit's, the
    /// limit has changed.
    pub(crate) scale: u64,
    /// The units that were refunded on this counter. Each refund is rounded up. Counts as 0 from
    /// [`Bucket::forgets_refunds_at_us`] on.
    pub(crate) refunded: u64,
}

impl Bucket {
    /// Returns whether `cost` units fit at `now`. `false` if the cost can never fit.
    #[inline]
    pub(super) fn fits(&self, limit: &Limit, shape: &BucketShape, now: Timestamp, cost: u32) -> bool {
        View::new(self, limit, shape, now).fits(cost)
    }

    /// Returns the limit's status for `cost` units at `now`, without charging them.
    ///
    /// A cost of 0 is always allowed; its `retry_after` is that of one unit.
    pub(super) fn status_for(&self, limit: &Limit, shape: &BucketShape, now: Timestamp, cost: u32) -> LimitStatus {
        View::new(self, limit, shape, now).without_charge(cost).status()
    }

    /// Charges `cost` units, which must fit (not checked), and returns the status after the charge.
    pub(super) fn charge(&mut self, limit: &Limit, shape: &BucketShape, now: Timestamp, cost: u32) -> LimitStatus {
        let view = View::new(self, limit, shape, now);
        self.charge_view(view, cost).status()
    }

    /// Returns the limit's status after a check that was denied, by this limit or by another one.
    ///
    /// The cost must not be 0. With `count_denied`, charges it, up to the capacity. Writes the state only then, or if
    /// the clock went back.
    pub(super) fn refuse(&mut self, limit: &Limit, shape: &BucketShape, now: Timestamp, cost: u32) -> LimitStatus {
        let view = View::new(self, limit, shape, now);
        self.refuse_view(view, cost).status()
    }

    /// Decides a check that has only this limit: charges the cost if it fits, else denies. A cost of 0 changes nothing.
    ///
    /// A denial charges a limit with `count_denied`, and may correct the stored times; see
    /// [`State::refuse`](super::State::refuse).
    pub(crate) fn decide_alone(
        &mut self,
        limit: &Limit,
        shape: &BucketShape,
        now: Timestamp,
        cost: u32,
    ) -> LimitStatus {
        let view = View::new(self, limit, shape, now);
        let answer = match (cost, view.fits(cost)) {
            (0, _) => view.without_charge(0),
            (_, true) => self.charge_view(view, cost),
            (_, false) => self.refuse_view(view, cost),
        };
        answer.status()
    }

    /// Decides a check that has only this limit from a level and its time, without a [`Bucket`], in the frequent case.
    ///
    /// `level` is the level at `time_us`, and must be in parts of this limit (`shape.parts_per_unit`). Nothing must have
    /// been refunded on the bucket, as far as [`Bucket::forgets_refunds_at_us`] remembers it. On an admission,
    /// calls `keep(level, time_us)` with the new state; a denial changes nothing. Returns `None` without deciding if
    /// the case is not the frequent one: the cost is 0, the limit is not [plain](BucketShape::is_plain), the level
    /// exceeds the capacity, or `time_us` is later than `now`. Then [`Bucket::decide_alone`] must decide.
    ///
    /// Does only what must happen before the next check; the divisions are in [`BucketDecision::status_if_plain`],
    /// which can run after the lock is released.
    #[inline(always)]
    pub(crate) fn decide_in_place<'a>(
        (level, time_us): (u64, u64),
        limit: &'a Limit,
        shape: &'a BucketShape,
        now: Timestamp,
        cost: u32,
        keep: impl FnOnce(u64, u64),
    ) -> Option<BucketDecision<'a>> {
        let now_us = now.as_micros();
        let passed_us = now_us.checked_sub(time_us)?;
        if cost == 0 || !shape.is_plain || level > shape.full {
            return None;
        }
        let leaked = passed_us.saturating_mul(shape.quota.get());
        let mut view = View { level: level.saturating_sub(leaked), refunded: 0, now_us, limit, shape };
        if cost > limit.cost_max() {
            return Some(BucketDecision { view, cost, allowed: false, retry: NEVER, refunded_before: 0 });
        }
        let after = view.level + shape.parts(cost.into());
        if after > shape.full {
            return Some(BucketDecision { view, cost, allowed: false, retry: after - shape.full, refunded_before: 0 });
        }
        let retry = view.ahead();
        view.level = after;
        keep(after, now_us);
        Some(BucketDecision { view, cost, allowed: true, retry, refunded_before: 0 })
    }

    /// Returns this bucket with its level in the parts of another limit, given by its `shape`.
    ///
    /// The level is rounded up to whole units and is at most the limit's capacity. The time stays.
    #[cold]
    pub(crate) fn rescaled(&self, shape: &BucketShape) -> Bucket {
        // The scale of a bucket that was never used is 0.
        let units = self.level.div_ceil(self.scale.max(1)).min(shape.capacity());
        let (time_us, refunded) = (self.time_us, self.refunded);
        Bucket { time_us, level: shape.parts(units), scale: shape.parts_per_unit.get(), refunded }
    }

    /// Returns the time from which the count of refunded units no longer matters, in microseconds since the epoch.
    ///
    /// That is when a bucket of this limit, given by its `shape`, would be empty if it had been full at the last write.
    pub(crate) fn forgets_refunds_at_us(&self, shape: &BucketShape) -> u64 {
        (grains(self.time_us, shape) + grains_of_full(shape)).saturating_mul(shape.grain_us())
    }

    fn charge_view<'a>(&mut self, mut view: View<'a>, cost: u32) -> BucketDecision<'a> {
        let retry = view.ahead();
        view.level += view.shape.parts(cost.into());
        *self = view.bucket();
        BucketDecision { view, cost, allowed: true, retry, refunded_before: view.refunded }
    }

    fn refuse_view<'a>(&mut self, mut view: View<'a>, cost: u32) -> BucketDecision<'a> {
        let allowed = view.fits(cost);
        let went_back = self.time_us > view.now_us;
        if view.limit.count_denied() {
            let charged = view.level + view.shape.parts(u64::from(cost).min(view.shape.capacity()));
            view.level = charged.min(view.shape.full);
        }
        if went_back || view.limit.count_denied() {
            *self = view.bucket();
        }
        BucketDecision { view, cost, allowed, retry: view.retry(cost), refunded_before: 0 }
    }

    /// Removes the units of one charge from the bucket, except those that have leaked by `now`.
    ///
    /// The module documentation has the formula. Counts the removed units as refunded, rounded up, and stores the level
    /// at `now`. Removes nothing if the count would exceed 2^53 − 1.
    pub(super) fn refund(&mut self, limit: &Limit, shape: &BucketShape, now: Timestamp, receipt: Receipt) {
        let mut view = View::new(self, limit, shape, now);
        let given = view.refundable(receipt);
        let refunded = view.refunded + given.div_ceil(shape.parts_per_unit.get());
        if refunded < REFUNDED_END {
            (view.level, view.refunded) = (view.level - given, refunded);
        }
        *self = view.bucket();
    }
}

/// A decision of a bucket whose waits are not computed yet: they are still parts that must leak.
///
/// What the decision charges is already stored in the bucket. [`BucketDecision::status`] computes the waits; for a
/// [plain](BucketShape::is_plain) limit, [`BucketDecision::status_if_plain`] does so faster.
pub(crate) struct BucketDecision<'a> {
    view: View<'a>,
    cost: u32,
    allowed: bool,
    /// The parts that must leak before a denied request can retry, or an admitted one may proceed; or [`NEVER`].
    retry: u64,
    /// The count of refunded units, if the decision has charged the cost; else 0.
    refunded_before: u64,
}

impl BucketDecision<'_> {
    /// Computes the waits, and returns the limit's status.
    fn status(self) -> LimitStatus {
        let view = self.view;
        match view.shape.grain_us() {
            1 => self.status_with(|parts| Wait::from_micros(view.grains_to_leak(parts).min(WAIT_US_MAX))),
            _ => self.status_with(|parts| view.until_leaked_in_grains(parts)),
        }
    }

    /// Computes the waits, and returns the limit's status.
    ///
    /// The limit must be [plain](BucketShape::is_plain); otherwise the waits are wrong.
    #[inline(always)]
    pub(crate) fn status_if_plain(self) -> LimitStatus {
        let view = self.view;
        self.status_with(|parts| Wait::from_micros(view.grains_to_leak(parts)))
    }

    /// Returns the limit's status. `until_leaked(parts)` computes the time in which so many parts leak.
    #[inline(always)]
    fn status_with(self, until_leaked: impl Fn(u64) -> Wait) -> LimitStatus {
        let BucketDecision { view: View { level, limit, shape, .. }, cost, allowed, retry, refunded_before } = self;
        let free = shape.full - level;
        // On most denials less than one unit is free; then no division is needed.
        let (whole, part) = match free < shape.parts_per_unit.get() {
            true => (0, free),
            false => shape.parts_per_unit.div_rem(free),
        };
        // The next unit becomes available when the part that it lacks has leaked.
        let (remaining, next) = match whole >= u64::from(limit.cost_max()) {
            true => (limit.cost_max(), 0),
            false => (whole as u32, shape.parts_per_unit.get() - part),
        };
        let next_after = until_leaked(next);
        let retry_after = match retry {
            0 => Wait::ZERO,
            NEVER => Wait::NEVER,
            parts if parts == next => next_after,
            parts => until_leaked(parts),
        };
        let reset_after = until_leaked(level);
        LimitStatus {
            allowed,
            cost,
            quota: limit.quota(),
            remaining,
            retry_after,
            next_after,
            reset_after,
            late_us: 0,
            refunded_before,
        }
    }
}

/// A stored bucket as it is at one point in time under one limit: with what has leaked, and in the limit's parts.
#[derive(Clone, Copy)]
struct View<'a> {
    /// The used units at `now_us`, in parts of the limit.
    level: u64,
    /// The count of refunded units at `now_us`.
    refunded: u64,
    now_us: u64,
    limit: &'a Limit,
    shape: &'a BucketShape,
}

impl<'a> View<'a> {
    /// Computes the level of a stored bucket at `now`, in the limit's parts.
    ///
    /// That is the stored level, converted to these parts and cut to the capacity, less what has leaked since. A stored
    /// time in the future counts as `now`.
    #[inline(always)]
    fn new(stored: &Bucket, limit: &'a Limit, shape: &'a BucketShape, now: Timestamp) -> View<'a> {
        let now_us = now.as_micros();
        let level = match stored.scale == shape.parts_per_unit.get() {
            true => stored.level.min(shape.full),
            false => stored.rescaled(shape).level,
        };
        let grains = grains(now_us, shape) - grains(stored.time_us.min(now_us), shape);
        let level = level.saturating_sub(grains.saturating_mul(shape.quota.get()));
        let is_counted = stored.refunded > 0 && grains < grains_of_full(shape);
        View { level, refunded: if is_counted { stored.refunded } else { 0 }, now_us, limit, shape }
    }

    /// Returns the bucket to store: this level and count of refunded units, at `now_us`, in the limit's parts.
    #[inline(always)]
    fn bucket(&self) -> Bucket {
        let (time_us, level, refunded) = (self.now_us, self.level, self.refunded);
        Bucket { time_us, level, scale: self.shape.parts_per_unit.get(), refunded }
    }

    /// Returns the parts of a charge that are certainly still in the bucket.
    ///
    /// Zero if the charge is later than `now_us`, or if its count of refunded units is greater than the bucket's.
    fn refundable(&self, receipt: Receipt) -> u64 {
        let (shape, charged_at) = (self.shape, receipt.at.as_micros());
        let Some(refunded_since) = self.refunded.checked_sub(receipt.refunded_before) else { return 0 };
        let lasted = grains(charged_at.saturating_add(receipt.reset_after_us), shape) - grains(charged_at, shape);
        let lasted = lasted.min(grains_of_full(shape));
        let passed = grains(self.now_us, shape).saturating_sub(grains(charged_at, shape));
        if charged_at > self.now_us || passed >= lasted {
            return 0;
        }
        // The level after the charge took `lasted` grains to leak, and more than one grain less.
        let level_then = (lasted - 1) * shape.quota.get() + 1;
        let charged = shape.parts(u64::from(receipt.units).min(shape.capacity()));
        let not_refunded = level_then.saturating_sub(shape.parts(refunded_since.min(shape.capacity())));
        let still_there = charged.max(not_refunded).saturating_sub(passed * shape.quota.get());
        charged.min(still_there).min(self.level)
    }

    #[inline(always)]
    fn fits(&self, cost: u32) -> bool {
        cost <= self.limit.cost_max() && self.excess(cost) == 0
    }

    /// Returns the parts that must leak before `cost` units fit; 0 if they fit.
    ///
    /// The cost must not exceed [`Limit::cost_max`].
    #[inline(always)]
    fn excess(&self, cost: u32) -> u64 {
        self.level.saturating_sub(self.shape.full - self.shape.parts(cost.into()))
    }

    /// Returns the parts that must leak before a request admitted now may proceed.
    ///
    /// The level of a leaky bucket; 0 for a token bucket.
    #[inline(always)]
    fn ahead(&self) -> u64 {
        if self.shape.is_leaky { self.level } else { 0 }
    }

    /// Returns the parts that must leak before `cost` units fit or, if they fit, before they may proceed; or [`NEVER`].
    #[inline(always)]
    fn retry(&self, cost: u32) -> u64 {
        match (cost > self.limit.cost_max(), self.fits(cost)) {
            (true, _) => NEVER,
            (_, true) => self.ahead(),
            (_, false) => self.excess(cost),
        }
    }

    /// Returns the decision for `cost` units without charging them. Cost 0 is allowed, with the wait of one unit.
    fn without_charge(self, cost: u32) -> BucketDecision<'a> {
        let (allowed, retry) = (cost == 0 || self.fits(cost), self.retry(cost.max(1)));
        BucketDecision { view: self, cost, allowed, retry, refunded_before: 0 }
    }

    /// Returns the number of grains (steps of the bucket's time) in which `parts` leak, rounded up.
    #[inline(always)]
    fn grains_to_leak(&self, parts: u64) -> u64 {
        self.shape.quota.div_ceil(parts)
    }

    /// Returns the time from now until `parts` have leaked, for a limit whose grain (step of time) is longer than 1 µs.
    ///
    /// Zero for 0 parts, and at most [`WAIT_US_MAX`]. It ends at the end of a grain.
    fn until_leaked_in_grains(&self, parts: u64) -> Wait {
        let grains_needed = self.grains_to_leak(parts);
        if grains_needed == 0 {
            return Wait::ZERO;
        }
        let at_grain = grains(self.now_us, self.shape) + grains_needed;
        Wait::from_micros((at_grain.saturating_mul(self.shape.grain_us()) - self.now_us).min(WAIT_US_MAX))
    }
}

impl BucketShape {
    /// Converts units to parts, the fractions of a unit in which a level is counted.
    #[inline(always)]
    fn parts(&self, units: u64) -> u64 {
        units * self.parts_per_unit.get()
    }
}

/// Returns the number of grains (steps of the bucket's time) in which a full bucket of the limit leaks, rounded up.
fn grains_of_full(shape: &BucketShape) -> u64 {
    shape.quota.div_ceil(shape.full)
}

/// Converts microseconds to grains, the steps in which the limit's bucket counts time, rounded down.
#[inline(always)]
fn grains(us: u64, shape: &BucketShape) -> u64 {
    if shape.grain_us() == 1 { us } else { us / shape.grain_us() }
}
