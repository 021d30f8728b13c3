//! `sliding-counter` and `fixed-window`: a list of the units charged in each aligned window.

use tidegate_core::{Algorithm, Limit};

use super::{OracleCharge, div_ceil};

/// All charges of a counter, as pairs of the start of the aligned window ("bucket") and units. Refunds have negative
/// units.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    /// The window of the limit with which this was written.
    window_us: i128,
    /// The start of the bucket that was current at the last write.
    start: i128,
    bookings: Vec<(i128, i128)>,
}

impl Pair {
    pub(super) fn empty(limit: &Limit) -> Pair {
        Pair { window_us: i128::from(limit.window_us()), start: 0, bookings: Vec::new() }
    }

    /// Returns the record at `now` under `limit`.
    ///
    /// If it was written with another window, it becomes a single charge of the units that count under that window, in
    /// the current bucket of the new one.
    pub(super) fn settled(&self, limit: &Limit, now: i128) -> Pair {
        let window_us = i128::from(limit.window_us());
        let moved = self.moved_to(limit, now);
        if self.window_us == window_us {
            return moved;
        }
        let used = moved.estimate(limit, now).min(i128::from(limit.quota()));
        let start = now - now % window_us;
        Pair { window_us, start, bookings: vec![(start, used)] }
    }

    /// Returns the record with the bucket of `now` as the current one. If the clock was set back, all counted units
    /// move to that bucket, at most the quota.
    fn moved_to(&self, limit: &Limit, now: i128) -> Pair {
        let start = now - now % self.window_us;
        if self.start <= start {
            return Pair { start, ..self.clone() };
        }
        let used = (self.current() + self.previous()).min(i128::from(limit.quota()));
        Pair { start, bookings: vec![(start, used)], ..self.clone() }
    }

    pub(super) fn is_from_the_future(&self, now: i128) -> bool {
        self.start > now
    }

    pub(super) fn is_of_another_window(&self, limit: &Limit) -> bool {
        self.window_us != i128::from(limit.window_us())
    }

    pub(super) fn has_room(&self, limit: &Limit, now: i128, cost: i128) -> bool {
        self.estimate(limit, now) + cost <= i128::from(limit.quota())
    }

    pub(super) fn is_whole(&self, limit: &Limit) -> bool {
        self.current() == 0 && (limit.algorithm() == Algorithm::FixedWindow || self.previous() == 0)
    }

    pub(super) fn charge(&mut self, cost: i128) {
        self.bookings.push((self.start, cost));
    }

    /// Charges a denied request (`count_denied`). The units of the current bucket rise at most to the quota.
    ///
    /// The record must be settled.
    pub(super) fn penalty(&mut self, limit: &Limit, cost: i128) {
        let room = (i128::from(limit.quota()) - self.current()).max(0);
        self.bookings.push((self.start, cost.min(room)));
    }

    pub(super) fn refund(&mut self, receipt: &OracleCharge) {
        let bucket = receipt.at - receipt.at % self.window_us;
        let booked = self.booked_in(bucket);
        self.bookings.push((bucket, -receipt.units.min(booked)));
    }

    /// Returns the units that count at `now`: those of the current bucket, and of the previous one the share that the
    /// trailing window still covers, rounded up.
    ///
    /// A fixed window counts the current bucket only. `now` must be in the current bucket.
    fn estimate(&self, limit: &Limit, now: i128) -> i128 {
        if limit.algorithm() == Algorithm::FixedWindow {
            return self.current();
        }
        let part_us = div_ceil(self.window_us, 1 << 20);
        let parts = div_ceil(self.window_us, part_us);
        let parts_covered = parts - (now - self.start) / part_us;
        self.current() + div_ceil(self.previous() * parts_covered, parts)
    }

    fn current(&self) -> i128 {
        self.booked_in(self.start)
    }

    fn previous(&self) -> i128 {
        self.booked_in(self.start - self.window_us)
    }

    fn booked_in(&self, bucket: i128) -> i128 {
        self.bookings.iter().filter(|(start, _)| *start == bucket).map(|(_, units)| units).sum()
    }
}
