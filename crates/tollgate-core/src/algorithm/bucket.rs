//! A level that leaks: the token bucket and the leaky bucket.
//!
//! Both are one number that grows by what is admitted and leaks at `quota` per `window`. The **token
//! bucket** admits while the level stays within its burst. The **leaky bucket** admits while at most `queue` units
//! wait, and tells each admission how long to wait so that work leaves evenly spaced.
//!
//! ```text
//!   level ▲
//!    burst├ ─ ─ ─ ─ ─╮─ ─ ─ ─ ─ ─     a request that would pass this line is refused
//!         │   ╱│╲    │╲
//!         │  ╱ │  ╲ ╱│  ╲  ← leaks quota/window
//!         └─┴──┴────┴┴───────▶ time
//! ```
//!
//! **Why a level and not the theoretical arrival time?** GCRA stores the instant at which the bucket will be
//! empty. That instant is in units of the *old* rate: raise the limit, and the key still waits for the time that the
//! old rate promised. A level in units survives a change of the quota as it is.
//!
//! **Whole numbers.** A unit is `parts_per_unit` = window parts and a microsecond leaks `quota` parts, so nothing is ever
//! rounded: 10^7 a second and 1 a year are both exact. Only where capacity × window would pass 2^53 (what a
//! Lua double holds) is time counted in grains of a few microseconds, rounded towards refusal; 100,000 a day
//! is still exact, 10^7 in 400 days has grains of 40 ms while its units leak 3.5 s apart.
//!
//! **Refunds.** What was charged leaks like the rest, oldest first. A refund gives back what of the charge is
//! still in the bucket and no more; otherwise a late refund would be credit for units already drained.
//!
//! Twin: `tollgate-redis/lua/tollgate.lua`, section *bucket*. Change both or neither.

use super::Receipt;
use crate::decision::{Line, Wait};
use crate::limit::{BucketShape, Limit};
use crate::time::Timestamp;

/// Longer waits (10^7 units at one in 400 days) are told as this: 142 years, the largest time there is.
const WAIT_US_MAX: u64 = Timestamp::MAX.as_micros();

/// More parts than there are: they will never have leaked.
const NEVER: u64 = u64::MAX;

/// What was used as of an instant, in parts of a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bucket {
    pub(crate) time_us: u64,
    pub(crate) level: u64,
    /// The parts per unit that `level` is counted in; another one means that the limit has changed.
    pub(crate) scale: u64,
}

impl Bucket {
    #[inline]
    pub(super) fn fits(&self, limit: &Limit, shape: &BucketShape, now: Timestamp, cost: u32) -> bool {
        View::of(self, limit, shape, now).fits(cost)
    }

    pub(super) fn look(&self, limit: &Limit, shape: &BucketShape, now: Timestamp, cost: u32) -> Line {
        View::of(self, limit, shape, now).look(cost).line()
    }

    pub(super) fn charge(&mut self, limit: &Limit, shape: &BucketShape, now: Timestamp, cost: u32) -> Line {
        let view = View::of(self, limit, shape, now);
        self.charge_as_seen(view, cost).line()
    }

    pub(super) fn refuse(&mut self, limit: &Limit, shape: &BucketShape, now: Timestamp, cost: u32) -> Line {
        let view = View::of(self, limit, shape, now);
        self.refuse_as_seen(view, cost).line()
    }

    /// The whole decision of a check with this limit alone.
    pub(crate) fn decide_alone(&mut self, limit: &Limit, shape: &BucketShape, now: Timestamp, cost: u32) -> Line {
        let view = View::of(self, limit, shape, now);
        let answer = match (cost, view.fits(cost)) {
            (0, _) => view.look(0),
            (_, true) => self.charge_as_seen(view, cost),
            (_, false) => self.refuse_as_seen(view, cost),
        };
        answer.line()
    }

    /// The same for a bucket of this limit's scale, if there is nothing unusual about it: what nearly every check of a bucket is.
    /// `None` if there is more to it; then nothing was changed. An admission is kept by `keep`, as level and time. Only what must
    /// happen before the next check is done here; [`Answer::line_if_plain`] has the divisions.
    #[inline(always)]
    pub(crate) fn decide_in_place<'a>(
        (level, time_us): (u64, u64),
        limit: &'a Limit,
        shape: &'a BucketShape,
        now: Timestamp,
        cost: u32,
        keep: impl FnOnce(u64, u64),
    ) -> Option<Answer<'a>> {
        let now_us = now.as_micros();
        let passed_us = now_us.checked_sub(time_us)?;
        if cost == 0 || !shape.is_plain || level > shape.full {
            return None;
        }
        let leaked = passed_us.saturating_mul(shape.quota.get());
        let mut view = View { level: level.saturating_sub(leaked), now_us, limit, shape };
        if cost > limit.cost_max() {
            return Some(Answer { view, cost, allowed: false, retry: NEVER });
        }
        let after = view.level + shape.parts(cost.into());
        if after > shape.full {
            return Some(Answer { view, cost, allowed: false, retry: after - shape.full });
        }
        let retry = view.ahead();
        view.level = after;
        keep(after, now_us);
        Some(Answer { view, cost, allowed: true, retry })
    }

    /// The same use in the parts of another limit, as that limit counts it.
    #[cold]
    pub(crate) fn rescaled(&self, shape: &BucketShape) -> Bucket {
        // One that was never used has no scale.
        let units = self.level.div_ceil(self.scale.max(1)).min(shape.capacity);
        Bucket { time_us: self.time_us, level: shape.parts(units), scale: shape.parts_per_unit.get() }
    }

    fn charge_as_seen<'a>(&mut self, mut view: View<'a>, cost: u32) -> Answer<'a> {
        let retry = view.ahead();
        view.level += view.shape.parts(cost.into());
        *self = view.stored();
        Answer { view, cost, allowed: true, retry }
    }

    fn refuse_as_seen<'a>(&mut self, mut view: View<'a>, cost: u32) -> Answer<'a> {
        let allowed = view.fits(cost);
        let went_back = self.time_us > view.now_us;
        if view.limit.count_denied() {
            let charged = view.level + view.shape.parts(u64::from(cost).min(view.shape.capacity));
            view.level = charged.min(view.shape.full);
        }
        if went_back || view.limit.count_denied() {
            *self = view.stored();
        }
        Answer { view, cost, allowed, retry: view.retry(cost) }
    }

    pub(super) fn refund(&mut self, limit: &Limit, shape: &BucketShape, now: Timestamp, receipt: Receipt) {
        let mut view = View::of(self, limit, shape, now);
        let grain = |us: u64| us / shape.grain_us;
        let charged_at = receipt.at.as_micros();
        let lasted = grain(charged_at + receipt.reset_after_us) - grain(charged_at);
        let passed = grain(now.as_micros()).saturating_sub(grain(charged_at));
        let still_there = lasted.saturating_sub(passed).saturating_mul(u64::from(limit.quota()));
        let give_back = shape.parts(u64::from(receipt.units).min(shape.capacity)).min(still_there);
        view.level = view.level.saturating_sub(give_back);
        *self = view.stored();
    }
}

/// What was decided, before it is put into times.
pub(crate) struct Answer<'a> {
    view: View<'a>,
    cost: u32,
    allowed: bool,
    /// How many parts must leak before a retry (or an admission's turn), or [`NEVER`].
    retry: u64,
}

impl Answer<'_> {
    fn line(self) -> Line {
        let view = self.view;
        match view.shape.grain_us {
            1 => self.line_by(|parts| Wait::from_micros(view.grains_to_leak(parts).min(WAIT_US_MAX))),
            _ => self.line_by(|parts| view.until_leaked_in_grains(parts)),
        }
    }

    /// The same under a limit whose times are simple.
    #[inline(always)]
    pub(crate) fn line_if_plain(self) -> Line {
        let view = self.view;
        self.line_by(|parts| Wait::from_micros(view.grains_to_leak(parts)))
    }

    #[inline(always)]
    fn line_by(self, until_leaked: impl Fn(u64) -> Wait) -> Line {
        let Answer { view: View { level, limit, shape, .. }, cost, allowed, retry } = self;
        let free = shape.full - level;
        // Most denials find less than a unit.
        let (whole, part) = match free < shape.parts_per_unit.get() {
            true => (0, free),
            false => shape.parts_per_unit.div_rem(free),
        };
        // One more unit comes back when what its first part lacks has leaked.
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
        Line { allowed, cost, quota: limit.quota(), remaining, retry_after, next_after, reset_after }
    }
}

/// A bucket as it stands at one instant under one limit.
#[derive(Clone, Copy)]
struct View<'a> {
    level: u64,
    now_us: u64,
    limit: &'a Limit,
    shape: &'a BucketShape,
}

impl<'a> View<'a> {
    #[inline(always)]
    fn of(stored: &Bucket, limit: &'a Limit, shape: &'a BucketShape, now: Timestamp) -> View<'a> {
        let now_us = now.as_micros();
        let level = match stored.scale == shape.parts_per_unit.get() {
            true => stored.level.min(shape.full),
            false => stored.rescaled(shape).level,
        };
        let grains = grains(now_us, shape) - grains(stored.time_us.min(now_us), shape);
        let level = level.saturating_sub(grains.saturating_mul(shape.quota.get()));
        View { level, now_us, limit, shape }
    }

    #[inline(always)]
    fn stored(&self) -> Bucket {
        Bucket { time_us: self.now_us, level: self.level, scale: self.shape.parts_per_unit.get() }
    }

    #[inline(always)]
    fn fits(&self, cost: u32) -> bool {
        cost <= self.limit.cost_max() && self.excess(cost) == 0
    }

    /// How many parts must leak before `cost` units fit, which must not be above the largest cost.
    #[inline(always)]
    fn excess(&self, cost: u32) -> u64 {
        self.level.saturating_sub(self.shape.full - self.shape.parts(cost.into()))
    }

    /// How many parts must leak before an admission made now has its turn.
    #[inline(always)]
    fn ahead(&self) -> u64 {
        if self.shape.spaces { self.level } else { 0 }
    }

    /// How many parts must leak before `cost` units may come again, or have their turn if they fit.
    #[inline(always)]
    fn retry(&self, cost: u32) -> u64 {
        match (cost > self.limit.cost_max(), self.fits(cost)) {
            (true, _) => NEVER,
            (_, true) => self.ahead(),
            (_, false) => self.excess(cost),
        }
    }

    fn look(self, cost: u32) -> Answer<'a> {
        Answer { view: self, cost, allowed: cost == 0 || self.fits(cost), retry: self.retry(cost.max(1)) }
    }

    #[inline(always)]
    fn grains_to_leak(&self, parts: u64) -> u64 {
        self.shape.quota.div_ceil(parts)
    }

    fn until_leaked_in_grains(&self, parts: u64) -> Wait {
        let grains_needed = self.grains_to_leak(parts);
        if grains_needed == 0 {
            return Wait::ZERO;
        }
        let at_grain = grains(self.now_us, self.shape) + grains_needed;
        Wait::from_micros((at_grain.saturating_mul(self.shape.grain_us) - self.now_us).min(WAIT_US_MAX))
    }
}

impl BucketShape {
    /// So many units, in parts.
    #[inline(always)]
    fn parts(&self, units: u64) -> u64 {
        units * self.parts_per_unit.get()
    }
}

#[inline(always)]
fn grains(us: u64, shape: &BucketShape) -> u64 {
    if shape.grain_us == 1 { us } else { us / shape.grain_us }
}
