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

mod refunded;

pub(crate) use refunded::RefundedUnits;

use std::ops::RangeInclusive;

use super::log::Rings;
use super::packed::{Beside, Name, Packed, SMALL_BITS, tag};
use super::{At, Change, Machine, MayGrow, PastCharge};
use crate::decision::{LimitStatus, Wait};
use crate::limit::BucketShape;
use crate::time::{Lifetime, Timestamp};

/// The longest wait that is reported: 142 years, the latest [`Timestamp`]. Longer waits (10^7 units at one in 400 days)
/// are cut to it.
const WAIT_US_MAX: u64 = Timestamp::MAX.as_micros();

/// In place of a number of parts: the cost can never fit.
const NEVER: u64 = u64::MAX;

/// The upper bound, exclusive, on the count of refunded units: the range of exact integers in a Lua double.
const REFUNDED_END: u64 = 1 << 53;

/// The state of a bucket: its level at a point in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Bucket {
    /// The time at which `level` was computed.
    time_us: u64,
    /// The used units, in parts.
    level: u64,
    /// The number of parts per unit in `level`; 0 if the bucket was never used. If it differs from the limit's, the
    /// limit has changed.
    scale: u64,
    /// The units that were refunded on this counter. Each refund is rounded up. Counts as 0 when a full bucket of the
    /// limit would have leaked since `time_us`.
    refunded: u64,
}

type BucketAt<'a> = At<'a, BucketShape>;

impl Machine for Bucket {
    type Shape = BucketShape;

    const TAGS: RangeInclusive<u64> = tag::BUCKET..=tag::LAST;

    #[inline(always)]
    fn unpack(packed: &Packed, name: Name, beside: &Beside) -> Bucket {
        let refunded = beside.refunded.as_ref().map_or(0, |refunded| refunded.units(name));
        let level = packed.small() | (packed.tag() & 3) << SMALL_BITS;
        Bucket { time_us: packed.time_us(), level, scale: packed.wide(), refunded }
    }

    #[inline(always)]
    fn pack(&self, at: BucketAt<'_>, packed: &mut Packed, name: Name, beside: &mut Beside) {
        let tag = tag::BUCKET + (self.level >> SMALL_BITS);
        packed.set(tag, self.time_us, self.scale, self.level & ((1 << SMALL_BITS) - 1));
        if self.refunded > 0 || beside.refunded.is_some() {
            self.keep_refunded(at, name, beside);
        }
    }

    #[inline(always)]
    fn lifetime(at: BucketAt<'_>, status: &LimitStatus, packed: &Packed) -> Lifetime {
        let empty_at_us = at.now_us + status.reset_after.as_micros().unwrap_or(0);
        Lifetime::of_us(empty_at_us.saturating_sub(packed.time_us()))
    }

    #[inline(always)]
    fn fits(&self, at: BucketAt<'_>, cost: u32, _: &Rings) -> bool {
        View::new(self, at).fits(cost)
    }

    fn look(&self, at: BucketAt<'_>, cost: u32, _: &Rings) -> LimitStatus {
        let view = View::new(self, at);
        view.status(cost, cost == 0 || view.fits(cost), view.retry(cost.max(1)), 0)
    }

    #[inline(always)]
    fn decide(
        &mut self,
        at: BucketAt<'_>,
        cost: u32,
        others_fit: bool,
        _: MayGrow<'_>,
        _: &mut Rings,
    ) -> (LimitStatus, Change) {
        let mut view = View::new(self, at);
        let (fits, ahead) = (view.fits(cost), view.ahead());
        let is_admitted = fits && others_fit;
        let is_charged = is_admitted || at.limit.count_denied();
        if is_charged {
            // One unit more than `cost_max` fills any bucket.
            let units = u64::from(cost).min(u64::from(at.limit.cost_max()) + 1);
            view.level = (view.level + at.shape.parts(units)).min(at.shape.full);
        }
        let change = if is_charged { Change::Charged } else { Change::corrected_if(self.time_us > at.now_us) };
        if change != Change::None {
            *self = view.bucket();
        }
        let (retry, refunded_before) = if is_admitted { (ahead, view.refunded) } else { (view.retry(cost), 0) };
        (view.status(cost, fits, retry, refunded_before), change)
    }

    fn bytes_to_refund(name: Name, beside: &Beside) -> usize {
        match &beside.refunded {
            Some(refunded) if refunded.contains(name) => 0,
            Some(refunded) => refunded.bytes_to_grow().max(RefundedUnits::FIRST_BYTES),
            None => RefundedUnits::FIRST_BYTES,
        }
    }

    /// Removes the units of one charge from the bucket, except those that have leaked by now.
    ///
    /// The module documentation has the formula. Counts the removed units as refunded, rounded up, and stores the level
    /// now. Removes nothing if the count would exceed 2^53 − 1.
    fn refund(&mut self, at: BucketAt<'_>, receipt: PastCharge, _: &mut Rings) {
        let mut view = View::new(self, at);
        let given = view.refundable(receipt);
        let refunded = view.refunded + given.div_ceil(at.shape.parts_per_unit);
        if refunded < REFUNDED_END {
            (view.level, view.refunded) = (view.level - given, refunded);
        }
        *self = view.bucket();
    }
}

impl Bucket {
    /// Stores the count of refunded units beside the packed bucket.
    #[cold]
    fn keep_refunded(self, at: BucketAt<'_>, name: Name, beside: &mut Beside) {
        if self.refunded == 0 {
            beside.refunded.iter_mut().for_each(|refunded| refunded.reset(name));
        } else {
            // A bucket that was full at the last write would be empty then.
            let forgotten_at = grains(self.time_us, at.shape) + grains_of_full(at.shape);
            let forgotten_at_us = forgotten_at.saturating_mul(at.shape.grain_us());
            beside.refunded.get_or_insert_default().set(name, self.refunded, forgotten_at_us);
        }
    }

    /// Returns the level in the parts of another limit, given by its `shape`.
    ///
    /// It is rounded up to whole units, and at most the limit's capacity.
    #[cold]
    fn rescaled(self, shape: &BucketShape) -> u64 {
        // The scale of a bucket that was never used is 0.
        shape.parts(self.level.div_ceil(self.scale.max(1)).min(shape.capacity()))
    }
}

/// A stored bucket as it is at one point in time under one limit: with what has leaked, and in the limit's parts.
#[derive(Clone, Copy)]
struct View<'a> {
    /// The used units now, in parts of the limit.
    level: u64,
    /// The count of refunded units now.
    refunded: u64,
    at: BucketAt<'a>,
}

impl<'a> View<'a> {
    /// Computes the present level of a stored bucket in the limit's parts.
    ///
    /// That is the stored level, converted to these parts and cut to the capacity, less what has leaked since. A stored
    /// time in the future counts as the present.
    #[inline(always)]
    fn new(stored: &Bucket, at: BucketAt<'a>) -> View<'a> {
        let level = if stored.scale == at.shape.parts_per_unit {
            stored.level.min(at.shape.full)
        } else {
            stored.rescaled(at.shape)
        };
        let grains = grains(at.now_us, at.shape) - grains(stored.time_us.min(at.now_us), at.shape);
        let level = level.saturating_sub(grains.saturating_mul(at.shape.quota));
        let is_counted = stored.refunded > 0 && grains < grains_of_full(at.shape);
        View { level, refunded: if is_counted { stored.refunded } else { 0 }, at }
    }

    /// Returns the bucket to store: the present level and count of refunded units, in the limit's parts.
    #[inline(always)]
    fn bucket(&self) -> Bucket {
        let View { level, refunded, at } = *self;
        Bucket { time_us: at.now_us, level, scale: at.shape.parts_per_unit, refunded }
    }

    /// Returns the parts of a charge that are certainly still in the bucket.
    ///
    /// Zero if the charge is later than now, or if its count of refunded units is greater than the bucket's.
    fn refundable(&self, receipt: PastCharge) -> u64 {
        let (shape, now_us, charged_at) = (self.at.shape, self.at.now_us, receipt.at.as_micros());
        let Some(refunded_since) = self.refunded.checked_sub(receipt.refunded_before) else { return 0 };
        let lasted = grains(charged_at.saturating_add(receipt.reset_after_us), shape) - grains(charged_at, shape);
        let lasted = lasted.min(grains_of_full(shape));
        let passed = grains(now_us, shape).saturating_sub(grains(charged_at, shape));
        if charged_at > now_us || passed >= lasted {
            return 0;
        }
        // The level after the charge took `lasted` grains to leak, and more than one grain less.
        let level_then = (lasted - 1) * shape.quota + 1;
        let charged = shape.parts(u64::from(receipt.units).min(shape.capacity()));
        let not_refunded = level_then.saturating_sub(shape.parts(refunded_since.min(shape.capacity())));
        let still_there = charged.max(not_refunded).saturating_sub(passed * shape.quota);
        charged.min(still_there).min(self.level)
    }

    #[inline(always)]
    fn fits(&self, cost: u32) -> bool {
        cost <= self.at.limit.cost_max() && self.excess(cost) == 0
    }

    /// Returns the parts that must leak before `cost` units fit; 0 if they fit.
    ///
    /// The cost must not exceed [`Limit::cost_max`](crate::limit::Limit::cost_max).
    #[inline(always)]
    fn excess(&self, cost: u32) -> u64 {
        self.level.saturating_sub(self.at.shape.full - self.at.shape.parts(cost.into()))
    }

    /// Returns the parts that must leak before a request admitted now may proceed.
    ///
    /// The level of a leaky bucket; 0 for a token bucket.
    #[inline(always)]
    fn ahead(&self) -> u64 {
        if self.at.shape.is_leaky { self.level } else { 0 }
    }

    /// Returns the parts that must leak before `cost` units fit or, if they fit, before they may proceed; or [`NEVER`].
    #[inline(always)]
    fn retry(&self, cost: u32) -> u64 {
        match (cost > self.at.limit.cost_max(), self.fits(cost)) {
            (true, _) => NEVER,
            (_, true) => self.ahead(),
            (_, false) => self.excess(cost),
        }
    }

    /// Builds the limit's status: the verdict as given, and the waits and `remaining` of this bucket.
    ///
    /// `retry` are the parts of units that must leak before a denied request can retry, or an admitted one may proceed; or
    /// [`NEVER`]. `refunded_before` becomes that field of the status.
    #[inline(always)]
    fn status(&self, cost: u32, allowed: bool, retry: u64, refunded_before: u64) -> LimitStatus {
        let BucketAt { limit, shape, .. } = self.at;
        let free = shape.full - self.level;
        // On most denials less than one unit is free; then no division is needed.
        let (whole, part) = if free < shape.parts_per_unit {
            (0, free)
        } else {
            (free / shape.parts_per_unit, free % shape.parts_per_unit)
        };
        // The next unit becomes available when the part that it lacks has leaked.
        let (remaining, next) = if whole >= u64::from(limit.cost_max()) {
            (limit.cost_max(), 0)
        } else {
            (whole as u32, shape.parts_per_unit - part)
        };
        let next_after = self.until_leaked(next);
        let retry_after = match retry {
            0 => Wait::ZERO,
            NEVER => Wait::NEVER,
            parts if parts == next => next_after,
            parts => self.until_leaked(parts),
        };
        let waits = [retry_after, next_after, self.until_leaked(self.level)];
        LimitStatus { refunded_before, ..LimitStatus::new(limit.quota(), cost, allowed, remaining, waits) }
    }

    /// Returns the time from now until `parts` have leaked: zero for 0 parts, and at most [`WAIT_US_MAX`].
    ///
    /// It ends at the end of a grain.
    #[inline(always)]
    fn until_leaked(&self, parts: u64) -> Wait {
        let (shape, now_us) = (self.at.shape, self.at.now_us);
        let grains_needed = parts.div_ceil(shape.quota);
        let us = if shape.grain_us() == 1 || grains_needed == 0 {
            grains_needed
        } else {
            (grains(now_us, shape) + grains_needed).saturating_mul(shape.grain_us()) - now_us
        };
        Wait::from_micros(us.min(WAIT_US_MAX))
    }
}

impl BucketShape {
    /// Converts units to parts, the fractions of a unit in which a level is counted.
    #[inline(always)]
    fn parts(&self, units: u64) -> u64 {
        units * self.parts_per_unit
    }
}

/// Returns the number of grains (steps of the bucket's time) in which a full bucket of the limit leaks, rounded up.
fn grains_of_full(shape: &BucketShape) -> u64 {
    shape.full.div_ceil(shape.quota)
}

/// Converts microseconds to grains, the steps in which the limit's bucket counts time, rounded down.
#[inline(always)]
fn grains(us: u64, shape: &BucketShape) -> u64 {
    if shape.grain_us() == 1 { us } else { us / shape.grain_us() }
}
