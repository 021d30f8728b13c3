//! `sliding` and `sliding-log`: a list of the admissions in order.

use tidegate_core::{Algorithm, Limit, SLIDING_EXACT_QUOTA_MAX};

use super::{OracleCharge, div_ceil};

/// The log of admissions, oldest first. Those of one tick share an entry, which has the time of the latest.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    time: i128,
    units: i128,
}

impl Log {
    /// Returns the log with only the entries inside the window that ends at `now`. Entries later than `now` are moved
    /// to it.
    pub(super) fn settled(&self, limit: &Limit, now: i128) -> Log {
        let is_counted = |entry: &&Entry| entry.time > now - i128::from(limit.window_us());
        let (past, future): (Vec<Entry>, Vec<Entry>) =
            self.entries.iter().filter(is_counted).partition(|entry| entry.time <= now);
        let mut log = Log { entries: past };
        let from_the_future: i128 = future.iter().map(|entry| entry.units).sum();
        if from_the_future > 0 {
            log.charge(limit, now, from_the_future);
        }
        log
    }

    pub(super) fn has_room(&self, limit: &Limit, cost: i128) -> bool {
        self.total() + cost <= i128::from(limit.quota())
    }

    pub(super) fn is_whole(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn charge(&mut self, limit: &Limit, now: i128, units: i128) {
        let tick = tick_us(limit);
        match self.entries.last_mut() {
            Some(newest) if newest.time / tick == now / tick => {
                newest.time = now;
                newest.units += units;
            }
            _ => self.entries.push(Entry { time: now, units }),
        }
    }

    /// Charges a denied request (`count_denied`), at most the quota. Units above the quota are then removed, oldest
    /// first. The log must be settled.
    pub(super) fn penalty(&mut self, limit: &Limit, now: i128, cost: i128) {
        let quota = i128::from(limit.quota());
        self.charge(limit, now, cost.min(quota));
        let mut too_much = (self.total() - quota).max(0);
        for entry in &mut self.entries {
            let cut = entry.units.min(too_much);
            entry.units -= cut;
            too_much -= cut;
        }
        self.entries.retain(|entry| entry.units > 0);
    }

    pub(super) fn refund(&mut self, limit: &Limit, receipt: &OracleCharge) {
        let tick = tick_us(limit);
        let charged = self.entries.iter_mut().rev().find(|entry| entry.time / tick == receipt.at / tick);
        if let Some(entry) = charged {
            entry.units -= receipt.units.min(entry.units);
        }
        self.entries.retain(|entry| entry.units > 0);
    }

    fn total(&self) -> i128 {
        self.entries.iter().map(|entry| entry.units).sum()
    }
}

fn tick_us(limit: &Limit) -> i128 {
    let is_coarse = limit.algorithm() == Algorithm::Sliding && limit.quota() > SLIDING_EXACT_QUOTA_MAX;
    if is_coarse { div_ceil(i128::from(limit.window_us()), 1_000) } else { 1 }
}
