//! The sliding window, exact.
//!
//! A fixed window drops its count at its boundary: 100 requests at 11:59:59 and 100 more at 12:00:00 are both
//! "100 per minute". The window that users mean is the one that ends *now*:
//!
//! ```text
//!        ├──────────────── window ────────────────┤
//!   ··x··│·x··x·····xx···············x··x·········│ now
//! expired│         these count                    │
//! ```
//!
//! **Idea.** Keep the admissions, oldest first, as (time, units) with their total. Before a decision, drop the entries
//! that are a window old or older. Admit if the total and the cost fit into the quota.
//!
//! **Never early.** Admissions in one tick share an entry, and the entry keeps the *latest* of their times. It can
//! expire late, so a request may be denied for up to one tick too long. It can never expire early, so no trailing
//! window ever holds more than the quota. With a tick of 1 µs (`sliding-log`, and `sliding` up to a quota of 1,000)
//! this is exact. Above, a tick is a thousandth of the window. A window has at most 1,001 ticks, so a log has at most
//! 1,001 entries.
//!
//! **Cost.** Each admission is added once and dropped once: O(1) amortised. If even the newest entry has expired, all
//! are dropped at once, however many there are.
//!
//! **The clock going back.** Clamping time to the newest entry would freeze the key until the clock catches up.
//! Instead, entries in the future become one entry at the present. They count, and expire a window from now.
//!
//! **Layout.** Up to two entries are stored inline, which is all that most keys of a flood need. More are in a ring of
//! eight bytes per entry, and more than a thousand in several rings, so that no operation walks over all of them.
//!
//! **Why not two counters?** They assume that the previous window was evenly filled. A client that sends unevenly gets
//! up to twice the quota (see `pair.rs`).
//!
//! Twin: `tidegate-redis/lua/tidegate.lua`, section *log*. Change both or neither.

mod entries;
mod long;
mod ring;
mod rings;

use std::ops::RangeInclusive;

use entries::Entry;
pub(crate) use entries::Log;
pub(crate) use rings::Rings;

use super::packed::{Beside, Name, Packed, tag};
use super::{At, Change, Machine, MayGrow, PastCharge};
use crate::decision::{LimitStatus, Wait};
use crate::limit::{LogShape, SLIDING_EXACT_QUOTA_MAX};
use crate::time::Lifetime;

type LogAt<'a> = At<'a, LogShape>;

impl Machine for Log {
    type Shape = LogShape;

    const TAGS: RangeInclusive<u64> = tag::LOG_FEW..=tag::LOG_LONG;

    #[inline(always)]
    fn unpack(packed: &Packed, _: Name, _: &Beside) -> Log {
        Log::unpacked(packed)
    }

    #[inline(always)]
    fn pack(&self, _: LogAt<'_>, packed: &mut Packed, _: Name, _: &mut Beside) {
        self.packed_into(packed);
    }

    #[inline(always)]
    fn lifetime(at: LogAt<'_>, _: &LimitStatus, _: &Packed) -> Lifetime {
        at.shape.lifetime
    }

    #[inline(always)]
    fn fits(&self, at: LogAt<'_>, cost: u32, rings: &Rings) -> bool {
        let (total, quota) = (self.total() + u64::from(cost), u64::from(at.limit.quota()));
        // Usually there is room even with the expired entries, which then need not be found.
        total <= quota || total - self.expired(at, rings).units <= quota
    }

    fn look(&self, at: LogAt<'_>, cost: u32, rings: &Rings) -> LimitStatus {
        if self.newest_us().is_some_and(|newest_us| newest_us > at.now_us) {
            return self.look_before_newest(at, cost, rings);
        }
        let expired = self.expired(at, rings);
        let allowed = cost == 0 || self.fits(at, cost, rings);
        self.status(at, expired, cost, allowed, self.wait(at, expired, cost.max(1), rings), rings)
    }

    #[inline(always)]
    fn decide(
        &mut self,
        at: LogAt<'_>,
        cost: u32,
        others_fit: bool,
        may_grow: MayGrow<'_>,
        rings: &mut Rings,
    ) -> (LimitStatus, Change) {
        let (before, newest_us) = (self.len(), self.newest_us());
        let oldest_us = self.settle(at, may_grow, rings);
        let quota = at.limit.quota();
        let total = self.total() + u64::from(cost);
        let fits = total <= u64::from(quota);
        if fits && others_fit {
            self.append(at, cost, may_grow, rings);
            let next_after = expires_after(if self.len() == 1 { at.now_us } else { oldest_us }, at);
            let (remaining, reset_after) = (quota - total as u32, Wait::from_micros(at.limit.window_us()));
            let waits = [Wait::ZERO, next_after, reset_after];
            return (LimitStatus::new(quota, cost, true, remaining, waits), Change::Charged);
        }
        let change = if at.limit.count_denied() {
            self.append(at, cost.min(quota), may_grow, rings);
            *self = self.without_oldest_units(self.total().saturating_sub(quota.into()), rings);
            Change::Charged
        } else if self.len() == 0 {
            *self = Log::empty_since(at.now_us);
            Change::Corrected
        } else {
            Change::corrected_if(self.len() != before || self.newest_us() != newest_us)
        };
        let retry_after = self.wait(at, Oldest::NONE, cost, rings);
        (self.status(at, Oldest::NONE, cost, fits, retry_after, rings), change)
    }

    fn refund(&mut self, at: LogAt<'_>, receipt: PastCharge, rings: &mut Rings) {
        self.settle(at, &|_| true, rings);
        let charged_tick = at.shape.tick(receipt.at.as_micros());
        let next_tick_us = (charged_tick + 1).saturating_mul(at.shape.tick_us);
        if let Some(index) = self.count_before(next_tick_us, rings).entries.checked_sub(1) {
            let entry = self.get(index, rings);
            if at.shape.tick(entry.time_us) == charged_tick {
                *self = self.with_units(index, entry.units - entry.units.min(receipt.units), rings);
            }
        }
    }

    /// One entry at the time of the newest, with all units that have not expired. They expire late, never early.
    fn condensed(&self, at: LogAt<'_>, rings: &Rings) -> Log {
        let units = (self.total() - self.expired(at, rings).units) as u32;
        match self.newest_us() {
            Some(time_us) if units > 0 => Log::one(Entry { time_us, units }),
            _ => Log::empty_since(at.now_us),
        }
    }
}

impl Log {
    /// Returns the limit's status for `cost` units, without charging them, if the log has entries later than now.
    ///
    /// Those entries count as one entry at the present, together with the newest entry before them if it is in the same
    /// tick.
    #[cold]
    fn look_before_newest(self, at: LogAt<'_>, cost: u32, rings: &Rings) -> LimitStatus {
        let (now_us, quota) = (at.now_us, u64::from(at.limit.quota()));
        let (expired, past) = (self.expired(at, rings), self.count_before(now_us + 1, rings));
        let newest_past_us = (past.entries > expired.entries).then(|| self.get(past.entries - 1, rings).time_us);
        let is_moved = |time_us: &u64| at.shape.is_same_tick(*time_us, now_us);
        let moved_from_us = newest_past_us.filter(is_moved).unwrap_or(now_us + 1);
        let used = self.total() - expired.units;
        let wait = |cost: u32| match (used + u64::from(cost)).saturating_sub(quota) {
            _ if cost > at.limit.quota() => Wait::NEVER,
            0 => Wait::ZERO,
            must_expire => {
                let time_us = self.entry_of_unit(expired.units + must_expire, rings).time_us;
                expires_after(if time_us < moved_from_us { time_us } else { now_us }, at)
            }
        };
        let remaining = quota.saturating_sub(used) as u32;
        let allowed = cost == 0 || used + u64::from(cost) <= quota;
        let waits = [wait(cost.max(1)), wait(remaining + 1), expires_after(now_us, at)];
        LimitStatus::new(at.limit.quota(), cost, allowed, remaining, waits)
    }

    /// Drops expired entries, and joins the entries later than now into one entry at the present. Returns the time of the
    /// oldest entry, which is meaningless if none is left.
    ///
    /// The newest entry before them joins as well if it is in the same tick, or if the log has no room for another
    /// entry and `may_grow` forbids it to grow.
    #[inline(always)]
    fn settle(&mut self, at: LogAt<'_>, may_grow: MayGrow<'_>, rings: &mut Rings) -> u64 {
        let oldest_us = self.drop_before(at.begin_us(), rings);
        if self.newest_us().is_some_and(|newest_us| newest_us > at.now_us) {
            // A copy of `at`, because the address of the copy is passed on, which would keep `at` out of the registers.
            *self = self.moved_back(At { ..at }, may_grow, rings);
            return self.oldest_us(rings);
        }
        oldest_us
    }

    /// Joins the entries later than now into one entry at the present.
    #[cold]
    fn moved_back(self, at: LogAt<'_>, may_grow: MayGrow<'_>, rings: &mut Rings) -> Log {
        let (mut log, units) = self.without_later_than(at.now_us, rings);
        log.append(at, units, may_grow, rings);
        log
    }

    #[inline(always)]
    fn append(&mut self, at: LogAt<'_>, units: u32, may_grow: MayGrow<'_>, rings: &mut Rings) {
        let now_us = at.now_us;
        let newest_us = self.newest_us();
        let is_same_tick = newest_us.is_some_and(|newest_us| at.shape.is_same_tick(newest_us, now_us));
        let entry = Entry { time_us: now_us, units };
        if !is_same_tick && self.push_in_place(entry, rings) {
            return;
        }
        if !is_same_tick && may_grow(self.bytes_to_grow(rings)) {
            *self = self.pushed(entry, entries_max(at), rings);
        } else if self.units_fit(units, rings) || may_grow(self.bytes_to_grow(rings)) {
            self.add_to_newest(now_us, units, rings);
        } else {
            *self = self.joined(now_us, units, rings);
        }
    }

    /// Counts the entries that have expired now, and their units.
    #[inline(always)]
    fn expired(&self, at: LogAt<'_>, rings: &Rings) -> Oldest {
        self.count_before(at.begin_us(), rings)
    }

    /// Returns the wait until `cost` units fit if no others are charged: `ZERO` if now, `NEVER` above the quota.
    ///
    /// `expired` are the oldest entries, which no longer count.
    #[inline(always)]
    fn wait(&self, at: LogAt<'_>, expired: Oldest, cost: u32, rings: &Rings) -> Wait {
        if cost > at.limit.quota() {
            return Wait::NEVER;
        }
        let used = self.total() - expired.units;
        match (used + u64::from(cost)).saturating_sub(u64::from(at.limit.quota())) {
            0 => Wait::ZERO,
            must_expire => expires_after(self.entry_of_unit(expired.units + must_expire, rings).time_us, at),
        }
    }

    #[inline(always)]
    fn status(
        &self,
        at: LogAt<'_>,
        expired: Oldest,
        cost: u32,
        allowed: bool,
        retry_after: Wait,
        rings: &Rings,
    ) -> LimitStatus {
        let quota = at.limit.quota();
        let remaining = u64::from(quota).saturating_sub(self.total() - expired.units) as u32;
        let next_after = match quota - remaining {
            0 => Wait::ZERO,
            // The next unit is the one that the denied request needs: its wait is already known.
            _ if !allowed && cost == remaining + 1 => retry_after,
            _ => self.wait(at, expired, remaining + 1, rings),
        };
        let reset_after = match self.newest_us() {
            Some(newest_us) if remaining < quota => expires_after(newest_us, at),
            _ => Wait::ZERO,
        };
        LimitStatus::new(quota, cost, allowed, remaining, [retry_after, next_after, reset_after])
    }
}

impl LogAt<'_> {
    /// Returns the beginning of the window that ends now. Entries earlier than that have expired.
    #[inline(always)]
    fn begin_us(self) -> u64 {
        (self.now_us + 1).saturating_sub(self.limit.window_us())
    }
}

/// A number of entries from the oldest on, and the sum of their units.
#[derive(Clone, Copy)]
struct Oldest {
    entries: usize,
    units: u64,
}

impl Oldest {
    const NONE: Oldest = Oldest { entries: 0, units: 0 };

    #[inline(always)]
    fn with(self, next: Entry) -> Oldest {
        Oldest { entries: self.entries + 1, units: self.units + u64::from(next.units) }
    }
}

impl LogShape {
    #[inline(always)]
    fn tick(&self, us: u64) -> u64 {
        if self.tick_us == 1 { us } else { us / self.tick_us }
    }

    /// Returns whether `earlier_us`, which must not be later than `now_us`, is in the same tick.
    #[inline(always)]
    fn is_same_tick(&self, earlier_us: u64, now_us: u64) -> bool {
        let begun_us = if self.tick_us == 1 { 0 } else { now_us % self.tick_us };
        now_us - earlier_us <= begun_us
    }
}

/// Returns the wait until an entry at `time_us`, which has not expired, is a window old.
///
/// An entry later than now counts as one at the present.
#[inline(always)]
fn expires_after(time_us: u64, at: LogAt<'_>) -> Wait {
    Wait::from_micros(time_us.min(at.now_us) + at.limit.window_us() - at.now_us)
}

/// Returns the maximum number of entries in a log of this limit, which bounds the size of its ring.
fn entries_max(at: LogAt<'_>) -> usize {
    if at.shape.tick_us == 1 { at.limit.quota() as usize } else { SLIDING_EXACT_QUOTA_MAX as usize + 1 }
}

#[cfg(test)]
mod tests;
