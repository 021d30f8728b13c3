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
        let view = View::of(self, limit, shape, now);
        let fits = view.fits(cost.max(1));
        let retry_after = if fits { view.turn() } else { view.wait(cost.max(1)) };
        view.line(cost, cost == 0 || fits, retry_after)
    }

    #[inline]
    pub(super) fn charge(&mut self, limit: &Limit, shape: BucketShape, now: Timestamp, cost: u32) -> Line {
        let mut view = View::of(self, limit, shape, now);
        let turn = view.turn();
        view.level += u64::from(cost) * shape.parts_per_unit;
        *self = view.stored();
        view.line(cost, true, turn)
    }

    pub(super) fn refuse(&mut self, limit: &Limit, shape: BucketShape, now: Timestamp, cost: u32) -> Line {
        let mut view = View::of(self, limit, shape, now);
        let allowed = view.fits(cost);
        let went_back = self.time_us > now.as_micros();
        if limit.count_denied() {
            let full = shape.capacity * shape.parts_per_unit;
            view.level = (view.level + u64::from(cost).min(shape.capacity) * shape.parts_per_unit).min(full);
        }
        if went_back || limit.count_denied() {
            *self = view.stored();
        }
        let retry_after = if view.fits(cost) { view.turn() } else { view.wait(cost) };
        view.line(cost, allowed, retry_after)
    }

    pub(super) fn refund(&mut self, limit: &Limit, shape: BucketShape, now: Timestamp, receipt: Receipt) {
        let mut view = View::of(self, limit, shape, now);
        let grain = |us: u64| us / shape.grain_us;
        let charged_at = receipt.at.as_micros();
        let lasted = grain(charged_at + receipt.reset_after_us) - grain(charged_at);
        let passed = grain(now.as_micros()).saturating_sub(grain(charged_at));
        let still_there = lasted.saturating_sub(passed).saturating_mul(u64::from(limit.quota()));
        let give_back = (u64::from(receipt.units) * shape.parts_per_unit).min(still_there);
        view.level = view.level.saturating_sub(give_back);
        *self = view.stored();
    }
}

/// A bucket as it stands at one instant under one limit.
struct View {
    level: u64,
    now_us: u64,
    quota: u32,
    cost_max: u32,
    shape: BucketShape,
}

impl View {
    #[inline]
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

    fn stored(&self) -> Bucket {
        Bucket { time_us: self.now_us, level: self.level, scale: self.shape.parts_per_unit }
    }

    #[inline]
    fn fits(&self, cost: u32) -> bool {
        cost <= self.cost_max && self.level <= (self.shape.capacity - u64::from(cost)) * self.shape.parts_per_unit
    }

    /// How long an admission made now waits for its turn.
    #[inline]
    fn turn(&self) -> Wait {
        if self.shape.spaces { self.until_leaked(self.level) } else { Wait::ZERO }
    }

    fn wait(&self, cost: u32) -> Wait {
        if cost > self.cost_max {
            return Wait::NEVER;
        }
        let allowed_level = (self.shape.capacity - u64::from(cost)) * self.shape.parts_per_unit;
        self.until_leaked(self.level.saturating_sub(allowed_level))
    }

    #[inline]
    fn until_leaked(&self, parts: u64) -> Wait {
        if parts == 0 {
            return Wait::ZERO;
        }
        // Below 2^53 parts / quota; as grains of 1 µs that cannot overflow, so larger ones are the rare case.
        let grains_needed = parts.div_ceil(u64::from(self.quota));
        let us = (grains(self.now_us, self.shape) + grains_needed).saturating_mul(self.shape.grain_us) - self.now_us;
        Wait::from_micros(us.min(WAIT_US_MAX))
    }

    #[inline]
    fn line(&self, cost: u32, allowed: bool, retry_after: Wait) -> Line {
        let full = self.shape.capacity * self.shape.parts_per_unit;
        let remaining = ((full - self.level) / self.shape.parts_per_unit).min(u64::from(self.cost_max)) as u32;
        let next_after = if remaining == self.cost_max { Wait::ZERO } else { self.wait(remaining + 1) };
        let reset_after = self.until_leaked(self.level);
        Line { allowed, cost, quota: self.quota, remaining, retry_after, next_after, reset_after }
    }
}

#[inline]
fn grains(us: u64, shape: BucketShape) -> u64 {
    if shape.grain_us == 1 { us } else { us / shape.grain_us }
}
