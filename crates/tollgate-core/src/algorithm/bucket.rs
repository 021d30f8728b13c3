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
    pub(super) fn fits(&self, limit: &Limit, shape: BucketShape, now: Timestamp, cost: u32) -> bool {
        View::of(self, limit, shape, now).fits(cost)
    }

    pub(super) fn look(&self, limit: &Limit, shape: BucketShape, now: Timestamp, cost: u32) -> Line {
        View::of(self, limit, shape, now).look(cost).line()
    }

    pub(super) fn charge(&mut self, limit: &Limit, shape: BucketShape, now: Timestamp, cost: u32) -> Line {
        let view = View::of(self, limit, shape, now);
        self.charge_as_seen(view, cost).line()
    }

    pub(super) fn refuse(&mut self, limit: &Limit, shape: BucketShape, now: Timestamp, cost: u32) -> Line {
        let view = View::of(self, limit, shape, now);
        self.refuse_as_seen(view, limit, cost).line()
    }

    /// The whole decision of a check with this limit alone. Only what must happen before the next
    /// check is done here; [`Answer::line`] has the divisions.
    #[inline(always)]
    pub(crate) fn decide_alone(&mut self, limit: &Limit, shape: BucketShape, now: Timestamp, cost: u32) -> Answer {
        let view = View::of(self, limit, shape, now);
        match (cost, view.fits(cost)) {
            (0, _) => view.look(0),
            (_, true) => self.charge_as_seen(view, cost),
            (_, false) => self.refuse_as_seen(view, limit, cost),
        }
    }

    #[inline(always)]
    fn charge_as_seen(&mut self, mut view: View, cost: u32) -> Answer {
        let retry = Some(view.ahead());
        view.level += u64::from(cost) * view.shape.parts_per_unit;
        *self = view.stored();
        Answer { view, cost, allowed: true, retry }
    }

    #[inline(always)]
    fn refuse_as_seen(&mut self, mut view: View, limit: &Limit, cost: u32) -> Answer {
        let allowed = view.fits(cost);
        let went_back = self.time_us > view.now_us;
        if limit.count_denied() {
            let charged = view.level + u64::from(cost).min(view.shape.capacity) * view.shape.parts_per_unit;
            view.level = charged.min(view.full());
        }
        if went_back || limit.count_denied() {
            *self = view.stored();
        }
        Answer { view, cost, allowed, retry: view.retry(cost) }
    }

    pub(super) fn refund(&mut self, limit: &Limit, shape: BucketShape, now: Timestamp, receipt: Receipt) {
        let mut view = View::of(self, limit, shape, now);
        let grain = |us: u64| us / shape.grain_us;
        let charged_at = receipt.at.as_micros();
        let lasted = grain(charged_at + receipt.reset_after_us) - grain(charged_at);
        let passed = grain(now.as_micros()).saturating_sub(grain(charged_at));
        let still_there = lasted.saturating_sub(passed).saturating_mul(u64::from(limit.quota()));
        let give_back = (u64::from(receipt.units).min(shape.capacity) * shape.parts_per_unit).min(still_there);
        view.level = view.level.saturating_sub(give_back);
        *self = view.stored();
    }
}

/// What was decided, before it is put into times.
pub(crate) struct Answer {
    view: View,
    cost: u32,
    allowed: bool,
    /// How many parts must leak before a retry (or an admission's turn); `None` is never.
    retry: Option<u64>,
}

impl Answer {
    #[inline(always)]
    pub(crate) fn line(&self) -> Line {
        let Answer { view, cost, allowed, retry } = self;
        let free = view.full() - view.level;
        let (whole, part) = (free / view.shape.parts_per_unit, free % view.shape.parts_per_unit);
        // One more unit comes back when what its first part lacks has leaked.
        let (remaining, next) = match whole >= u64::from(view.cost_max) {
            true => (view.cost_max, 0),
            false => (whole as u32, view.shape.parts_per_unit - part),
        };
        let next_after = view.until_leaked(next);
        let retry_after = match *retry {
            None => Wait::NEVER,
            Some(0) => Wait::ZERO,
            Some(parts) if parts == next => next_after,
            Some(parts) => view.until_leaked(parts),
        };
        let reset_after = view.until_leaked(view.level);
        Line { allowed: *allowed, cost: *cost, quota: view.quota, remaining, retry_after, next_after, reset_after }
    }
}

/// A bucket as it stands at one instant under one limit.
#[derive(Clone, Copy)]
struct View {
    level: u64,
    now_us: u64,
    quota: u32,
    cost_max: u32,
    shape: BucketShape,
}

impl View {
    #[inline(always)]
    fn of(stored: &Bucket, limit: &Limit, shape: BucketShape, now: Timestamp) -> View {
        let now_us = now.as_micros();
        let mut level = stored.level;
        if stored.scale != shape.parts_per_unit && stored.scale != 0 {
            level = level.div_ceil(stored.scale).min(shape.capacity) * shape.parts_per_unit;
        }
        level = level.min(shape.capacity * shape.parts_per_unit);
        let grains = grains(now_us, shape) - grains(stored.time_us.min(now_us), shape);
        let level = level.saturating_sub(grains.saturating_mul(u64::from(limit.quota())));
        View { level, now_us, quota: limit.quota(), cost_max: limit.cost_max(), shape }
    }

    #[inline(always)]
    fn stored(&self) -> Bucket {
        Bucket { time_us: self.now_us, level: self.level, scale: self.shape.parts_per_unit }
    }

    #[inline(always)]
    fn full(&self) -> u64 {
        self.shape.capacity * self.shape.parts_per_unit
    }

    #[inline(always)]
    fn fits(&self, cost: u32) -> bool {
        cost <= self.cost_max && self.excess(cost) == 0
    }

    /// How many parts must leak before `cost` units fit, which must not be above the largest cost.
    #[inline(always)]
    fn excess(&self, cost: u32) -> u64 {
        self.level.saturating_sub((self.shape.capacity - u64::from(cost)) * self.shape.parts_per_unit)
    }

    /// How many parts must leak before an admission made now has its turn.
    #[inline(always)]
    fn ahead(&self) -> u64 {
        if self.shape.spaces { self.level } else { 0 }
    }

    /// How many parts must leak before `cost` units may come again, or have their turn if they fit.
    #[inline(always)]
    fn retry(&self, cost: u32) -> Option<u64> {
        match (cost > self.cost_max, self.fits(cost)) {
            (true, _) => None,
            (_, true) => Some(self.ahead()),
            (_, false) => Some(self.excess(cost)),
        }
    }

    fn look(self, cost: u32) -> Answer {
        Answer { view: self, cost, allowed: cost == 0 || self.fits(cost), retry: self.retry(cost.max(1)) }
    }

    #[inline(always)]
    fn until_leaked(&self, parts: u64) -> Wait {
        let grains_needed = parts.div_ceil(u64::from(self.quota));
        if self.shape.grain_us == 1 {
            return Wait::from_micros(grains_needed.min(WAIT_US_MAX));
        }
        self.until_grains_passed(grains_needed)
    }

    #[cold]
    fn until_grains_passed(&self, needed: u64) -> Wait {
        if needed == 0 {
            return Wait::ZERO;
        }
        let us = (grains(self.now_us, self.shape) + needed).saturating_mul(self.shape.grain_us) - self.now_us;
        Wait::from_micros(us.min(WAIT_US_MAX))
    }
}

#[inline(always)]
fn grains(us: u64, shape: BucketShape) -> u64 {
    if shape.grain_us == 1 { us } else { us / shape.grain_us }
}
