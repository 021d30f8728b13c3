//! `token-bucket` and `leaky-bucket`: a level that leaks.

use tidegate_core::{Algorithm, Limit};

use super::{OracleCharge, div_ceil};

/// The level of a bucket at a time. It is counted in parts of a unit, since a bucket leaks fractions of units.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    time: i128,
    level: i128,
    /// The number of parts of one unit under the limit with which this was written.
    parts_per_unit: i128,
    /// The units that each refund gave back, rounded up, oldest first.
    refunds: Vec<i128>,
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
        Bucket { time: 0, level: 0, parts_per_unit: Shape::of(limit).parts_per_unit, refunds: Vec::new() }
    }

    /// Returns the bucket at `now` under `limit`: converted to the limit's parts, cut to its capacity, and leaked until
    /// then. The refunds are forgotten once a full bucket would have leaked.
    pub(super) fn settled(&self, limit: &Limit, now: i128) -> Bucket {
        let shape = Shape::of(limit);
        let mut level = self.level;
        if self.parts_per_unit != shape.parts_per_unit {
            level = div_ceil(level, self.parts_per_unit).min(shape.capacity) * shape.parts_per_unit;
        }
        level = level.min(shape.capacity * shape.parts_per_unit);
        let since = self.time.min(now);
        let leaked = shape.grains(since, now) * shape.quota;
        let has_drained = leaked >= shape.capacity * shape.parts_per_unit;
        let refunds = if has_drained { Vec::new() } else { self.refunds.clone() };
        Bucket { time: now, level: (level - leaked).max(0), parts_per_unit: shape.parts_per_unit, refunds }
    }

    /// Returns the sum of all refunds, in units.
    pub(super) fn refunded(&self) -> i128 {
        self.refunds.iter().sum()
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

    /// Refunds the units of an admission that are certainly still in the bucket, which must be settled at `now`.
    ///
    /// Units leak oldest first. Those refunded since the admission are taken for older ones, except that the admission
    /// itself was above all older ones.
    pub(super) fn refund(&mut self, limit: &Limit, now: i128, receipt: &OracleCharge) {
        let shape = Shape::of(limit);
        let refunded_since = self.refunded() - receipt.refunded_before;
        if receipt.at > now || refunded_since < 0 {
            return;
        }
        let full = shape.capacity * shape.parts_per_unit;
        let leaked = shape.grains(receipt.at, now) * shape.quota;
        let leaks_until_gone = (shape.grains(receipt.at, receipt.at + receipt.reset_us) * shape.quota)
            .min(div_ceil(full, shape.quota) * shape.quota);
        if leaked >= leaks_until_gone {
            return;
        }
        let charged = receipt.units.min(shape.capacity) * shape.parts_per_unit;
        // With one part less, the level after the admission would have leaked a grain earlier.
        let least_level_then = leaks_until_gone - shape.quota + 1;
        let top_of_the_charge = charged.max(least_level_then - refunded_since * shape.parts_per_unit);
        let give = (top_of_the_charge - leaked).clamp(0, charged).min(self.level);
        let units = div_ceil(give, shape.parts_per_unit);
        if self.refunded() + units >= 1 << 53 {
            return;
        }
        self.level -= give;
        if units > 0 {
            self.refunds.push(units);
        }
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
