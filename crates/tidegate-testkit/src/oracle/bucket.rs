//! `token-bucket` and `leaky-bucket`: a level that leaks.

use tidegate_core::{Algorithm, Limit};

use super::{Receipt, div_ceil};

/// The level of a bucket at a time. It is counted in parts of a unit, since a bucket leaks fractions of units.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    time: i128,
    level: i128,
    /// The number of parts of one unit under the limit with which this was written.
    parts_per_unit: i128,
}

/// The parameters of a bucket, derived from its limit: in each grain of time, `quota` parts leak.
struct Shape {
    capacity: i128,
    grain_us: i128,
    parts_per_unit: i128,
    quota: i128,
}

impl Bucket {
    pub(super) fn empty(limit: &Limit) -> Bucket {
        Bucket { time: 0, level: 0, parts_per_unit: Shape::of(limit).parts_per_unit }
    }

    /// Returns the bucket at `now` under `limit`: converted to the limit's parts, cut to its capacity, and leaked until
    /// then.
    pub(super) fn settled(&self, limit: &Limit, now: i128) -> Bucket {
        let shape = Shape::of(limit);
        let mut level = self.level;
        if self.parts_per_unit != shape.parts_per_unit {
            level = div_ceil(level, self.parts_per_unit).min(shape.capacity) * shape.parts_per_unit;
        }
        level = level.min(shape.capacity * shape.parts_per_unit);
        let since = self.time.min(now);
        let leaked = shape.grains(since, now) * shape.quota;
        Bucket { time: now, level: (level - leaked).max(0), parts_per_unit: shape.parts_per_unit }
    }

    pub(super) fn is_from_the_future(&self, now: i128) -> bool {
        self.time > now
    }

    pub(super) fn has_room(&self, limit: &Limit, cost: i128) -> bool {
        let shape = Shape::of(limit);
        self.level + cost * shape.parts_per_unit <= shape.capacity * shape.parts_per_unit
    }

    pub(super) fn is_whole(&self) -> bool {
        self.level == 0
    }

    pub(super) fn charge(&mut self, limit: &Limit, now: i128, cost: i128) {
        *self = self.settled(limit, now);
        self.level += cost * self.parts_per_unit;
    }

    /// Charges a denied request (`count_denied`). The level rises at most to the capacity. The bucket must be settled.
    pub(super) fn penalty(&mut self, limit: &Limit, cost: i128) {
        let brim = Shape::of(limit).capacity * self.parts_per_unit;
        self.level = (self.level + cost * self.parts_per_unit).min(brim);
    }

    /// Refunds the units of an admission that have not leaked yet.
    ///
    /// Units leak oldest first. The level after the admission has leaked completely after `reset_us`. Until then, at
    /// most what leaks in the rest of that time belongs to the admission. The bucket must be settled at `now`.
    pub(super) fn refund(&mut self, limit: &Limit, now: i128, receipt: &Receipt) {
        let shape = Shape::of(limit);
        let grains_until_gone = shape.grains(receipt.at, receipt.at + receipt.reset_us);
        let grains_passed = shape.grains(receipt.at, now.max(receipt.at));
        let still_there = (grains_until_gone - grains_passed).max(0) * shape.quota;
        let give = still_there.min(receipt.units * shape.parts_per_unit);
        self.level = (self.level - give).max(0);
    }
}

impl Shape {
    fn of(limit: &Limit) -> Shape {
        let cost_max = i128::from(limit.cost_max());
        // The unit that a leaky bucket is serving is not in the queue.
        let capacity = if limit.algorithm() == Algorithm::LeakyBucket { cost_max + 1 } else { cost_max };
        let window_us = i128::from(limit.window_us());
        let grain_us = capacity * div_ceil(window_us, 1 << 20) / 8_500_000_000 + 1;
        let parts_per_unit = div_ceil(window_us, grain_us);
        Shape { capacity, grain_us, parts_per_unit, quota: i128::from(limit.quota()) }
    }

    /// Returns the number of grains of time that end after `from` and not after `to`.
    fn grains(&self, from: i128, to: i128) -> i128 {
        to / self.grain_us - from / self.grain_us
    }
}
