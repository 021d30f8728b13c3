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
//! up to twice the quota (see [`Pair`](super::Pair)).
//!
//! Twin: `tidegate-redis/lua/tidegate.lua`, section *log*. Change both or neither.

mod entries;
mod long;
mod ring;

pub use entries::Log;
pub(crate) use entries::{Entry, InlineEntries, LogParts};
pub(crate) use long::Long;
pub(crate) use ring::{Ring, RingHead, SHORT_CAPACITIES};

use super::Receipt;
use crate::decision::{LimitStatus, Wait};
use crate::limit::{Limit, LogShape, SLIDING_EXACT_QUOTA_MAX};
use crate::time::Timestamp;

impl Log {
    pub(super) fn fits(&self, limit: &Limit, now: Timestamp, cost: u32) -> bool {
        self.total() - self.expired(limit, now).units + u64::from(cost) <= u64::from(limit.quota())
    }

    pub(super) fn status_for(&self, limit: &Limit, shape: &LogShape, now: Timestamp, cost: u32) -> LimitStatus {
        if self.newest_us().is_some_and(|newest_us| newest_us > now.as_micros()) {
            return self.status_before_newest(limit, shape, now, cost);
        }
        let expired = self.expired(limit, now);
        let allowed = cost == 0 || self.total() - expired.units + u64::from(cost) <= u64::from(limit.quota());
        self.build_status(limit, now, expired, cost, allowed, self.wait(limit, now, expired, cost.max(1)))
    }

    /// Returns the limit's status for `cost` units, without charging them, if the log has entries later than `now`.
    ///
    /// Those entries count as one entry at `now`, together with the newest entry before them if it is in the same tick.
    #[cold]
    fn status_before_newest(&self, limit: &Limit, shape: &LogShape, now: Timestamp, cost: u32) -> LimitStatus {
        let (now_us, quota) = (now.as_micros(), u64::from(limit.quota()));
        let (expired, past) = (self.expired(limit, now), self.count_until(now_us));
        let newest_past_us = (past.entries > expired.entries).then(|| self.get(past.entries - 1).time_us);
        let moved_from_us = newest_past_us.filter(|&time_us| shape.is_same_tick(time_us, now_us)).unwrap_or(now_us + 1);
        let used = self.total() - expired.units;
        let wait = |cost: u32| match (used + u64::from(cost)).saturating_sub(quota) {
            _ if cost > limit.quota() => Wait::NEVER,
            0 => Wait::ZERO,
            must_expire => {
                let time_us = self.entry_of_unit(expired.units + must_expire).time_us;
                expires_after(if time_us < moved_from_us { time_us } else { now_us }, limit, now)
            }
        };
        let remaining = quota.saturating_sub(used) as u32;
        LimitStatus {
            allowed: cost == 0 || used + u64::from(cost) <= quota,
            cost,
            quota: limit.quota(),
            remaining,
            retry_after: wait(cost.max(1)),
            next_after: wait(remaining + 1),
            reset_after: expires_after(now_us, limit, now),
            late_us: 0,
            refunded_before: 0,
        }
    }

    pub(super) fn charge(
        &mut self,
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
        may_grow: bool,
    ) -> LimitStatus {
        self.settle(limit, shape, now, may_grow);
        self.charge_settled(limit, shape, now, cost, may_grow)
    }

    pub(super) fn refuse(
        &mut self,
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
        may_grow: bool,
    ) -> LimitStatus {
        self.settle(limit, shape, now, may_grow);
        self.refuse_settled(limit, shape, now, cost, may_grow)
    }

    /// Decides a check that has only this limit: charges the cost if it fits, else denies. A cost of 0 changes nothing.
    ///
    /// A denial charges a limit with `count_denied`, and may correct the stored times; see
    /// [`State::refuse`](super::State::refuse).
    ///
    /// If `may_grow` is `false`, the log allocates no memory; see [`State::charge`](super::State::charge).
    #[inline(always)]
    pub(crate) fn decide_alone(
        &mut self,
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
        may_grow: bool,
    ) -> LimitStatus {
        if cost == 0 {
            return self.status_for(limit, shape, now, 0);
        }
        self.settle(limit, shape, now, may_grow);
        if self.total() + u64::from(cost) <= u64::from(limit.quota()) {
            self.charge_settled(limit, shape, now, cost, may_grow)
        } else {
            self.refuse_settled(limit, shape, now, cost, may_grow)
        }
    }

    /// Decides a check that has only this limit on the ring of a longer log, in place, in the frequent case.
    ///
    /// `head` and `words` are the two parts of the ring. Returns `None` without changing them in all other cases: a
    /// peek, `count_denied`, a clock that went back, a time in the first window after the epoch, a log whose entries
    /// have all expired, a ring that would have to be allocated anew, or a denial whose wait is not simply that of the
    /// oldest entry (also for a cost above the quota). Then [`Log::decide_alone`] must decide.
    #[inline(always)]
    pub(crate) fn decide_in_place(
        (head, words): (&mut RingHead, &mut [u64]),
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
    ) -> Option<LimitStatus> {
        let (quota, now_us, mut settled) = (limit.quota(), now.as_micros(), *head);
        let expired_until_us = now_us.checked_sub(limit.window_us())?;
        if cost == 0 || limit.count_denied() || settled.newest_us <= expired_until_us || settled.newest_us > now_us {
            return None;
        }
        let mut oldest = settled.oldest(words);
        while oldest.time_us <= expired_until_us {
            settled.drop_oldest(oldest, words);
            oldest = settled.oldest(words);
        }
        let after = u64::from(settled.total) + u64::from(cost);
        let allowed = after <= u64::from(quota);
        let is_simple = if allowed {
            let is_same_tick = shape.is_same_tick(settled.newest_us, now_us);
            settled.append_in_place(Entry { time_us: now_us, units: cost }, is_same_tick, words)
        } else {
            // The expiry of the oldest entry alone must make room, and the ring must have the right size.
            let is_freed_by_oldest = after <= u64::from(quota) + u64::from(oldest.units);
            let is_left_as_it_was = settled.first == head.first;
            cost <= quota
                && settled.total <= quota
                && is_freed_by_oldest
                && (is_left_as_it_was || settled.can_append(0, words))
        };
        if !is_simple {
            return None;
        }
        let oldest_expires_after = expires_after(oldest.time_us, limit, now);
        *head = settled;
        Some(LimitStatus {
            allowed,
            cost,
            quota,
            remaining: quota - settled.total,
            retry_after: if allowed { Wait::ZERO } else { oldest_expires_after },
            next_after: oldest_expires_after,
            reset_after: expires_after(settled.newest_us, limit, now),
            late_us: 0,
            refunded_before: 0,
        })
    }

    /// Admits a check that has only this limit, in place, if the log has one or two entries and keeps at most two.
    ///
    /// Returns `None` without changing anything in all other cases: the cost is 0 or does not fit, an entry has expired
    /// or is later than `now`, the log is empty or needs a third entry, or `now` is in the first window after the
    /// epoch. Then [`Log::decide_alone`] must decide.
    #[inline(always)]
    pub(crate) fn admit_in_place(
        few: &mut InlineEntries,
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
    ) -> Option<LimitStatus> {
        let now_us = now.as_micros();
        let (oldest, newest) = (few.entries[0], few.entries[usize::from(few.len).checked_sub(1)?]);
        let expired_until_us = now_us.checked_sub(limit.window_us())?;
        let used = u64::from(few.entries[0].units) + u64::from(few.entries[1].units) + u64::from(cost);
        let is_settled = oldest.time_us > expired_until_us && newest.time_us <= now_us;
        if cost == 0 || !is_settled || used > u64::from(limit.quota()) {
            return None;
        }
        if shape.is_same_tick(newest.time_us, now_us) {
            few.entries[usize::from(few.len) - 1] = Entry { time_us: now_us, units: newest.units + cost };
        } else if few.len == 1 {
            *few = InlineEntries { len: 2, entries: [oldest, Entry { time_us: now_us, units: cost }] };
        } else {
            return None;
        }
        Some(LimitStatus {
            allowed: true,
            cost,
            quota: limit.quota(),
            remaining: limit.quota() - used as u32,
            retry_after: Wait::ZERO,
            next_after: expires_after(few.entries[0].time_us, limit, now),
            reset_after: expires_after(now_us, limit, now),
            late_us: 0,
            refunded_before: 0,
        })
    }

    #[inline(always)]
    fn charge_settled(
        &mut self,
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
        may_grow: bool,
    ) -> LimitStatus {
        self.append(limit, shape, now, cost, may_grow);
        self.build_status(limit, now, Oldest::NONE, cost, true, Wait::ZERO)
    }

    #[inline(always)]
    fn refuse_settled(
        &mut self,
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
        may_grow: bool,
    ) -> LimitStatus {
        let allowed = self.total() + u64::from(cost) <= u64::from(limit.quota());
        if limit.count_denied() {
            self.append(limit, shape, now, cost.min(limit.quota()), may_grow);
            self.remove_oldest_units(self.total().saturating_sub(u64::from(limit.quota())));
        }
        let retry_after = self.wait(limit, now, Oldest::NONE, cost);
        self.build_status(limit, now, Oldest::NONE, cost, allowed, retry_after)
    }

    pub(super) fn refund(&mut self, limit: &Limit, shape: &LogShape, now: Timestamp, receipt: Receipt) {
        self.settle(limit, shape, now, true);
        let charged_tick = shape.tick(receipt.at.as_micros());
        let tick_ends_us = (charged_tick + 1).saturating_mul(shape.tick.get()) - 1;
        if let Some(index) = self.count_until(tick_ends_us).entries.checked_sub(1) {
            let entry = self.get(index);
            if shape.tick(entry.time_us) == charged_tick {
                self.set_units(index, entry.units - entry.units.min(receipt.units));
            }
        }
    }

    /// Returns a log with all units that have not expired at `now`, as one entry at the time of the newest.
    ///
    /// It takes no heap memory. Its units expire late, never early.
    pub(crate) fn condensed(&self, limit: &Limit, now: Timestamp) -> Log {
        let units = (self.total() - self.expired(limit, now).units) as u32;
        match self.newest_us() {
            Some(time_us) if units > 0 => Log::from_inline(InlineEntries::one(Entry { time_us, units })),
            _ => Log::default(),
        }
    }

    /// Drops expired entries, and joins the entries later than `now` into one entry at `now`.
    ///
    /// The newest entry before them joins as well if it is in the same tick, or if the log has no room for another
    /// entry and `may_grow` is `false`.
    #[inline(always)]
    fn settle(&mut self, limit: &Limit, shape: &LogShape, now: Timestamp, may_grow: bool) {
        self.drop_front(self.expired(limit, now).entries);
        let now_us = now.as_micros();
        if self.newest_us().is_some_and(|newest_us| newest_us > now_us) {
            let units = self.remove_later_than(now_us);
            self.append(limit, shape, now, units, may_grow);
        }
    }

    #[inline(always)]
    fn append(&mut self, limit: &Limit, shape: &LogShape, now: Timestamp, units: u32, may_grow: bool) {
        let now_us = now.as_micros();
        match self.newest_us() {
            Some(newest_us) if shape.is_same_tick(newest_us, now_us) || !(may_grow || self.has_room_for(units)) => {
                self.add_to_newest(now_us, units, may_grow);
            }
            _ => self.push(Entry { time_us: now_us, units }, entries_max(limit)),
        }
    }

    /// Counts the entries that have expired at `now`, and their units.
    #[inline(always)]
    fn expired(&self, limit: &Limit, now: Timestamp) -> Oldest {
        let (Some(expired_until_us), Some(newest_us)) =
            (now.as_micros().checked_sub(limit.window_us()), self.newest_us())
        else {
            return Oldest::NONE;
        };
        if newest_us <= expired_until_us {
            return Oldest { entries: self.len(), units: self.total() };
        }
        self.count_until(expired_until_us)
    }

    /// Returns the wait until `cost` units fit if no others are charged: `ZERO` if now, `NEVER` above the quota.
    ///
    /// `expired` are the oldest entries, which no longer count.
    #[inline(always)]
    fn wait(&self, limit: &Limit, now: Timestamp, expired: Oldest, cost: u32) -> Wait {
        if cost > limit.quota() {
            return Wait::NEVER;
        }
        let used = self.total() - expired.units;
        match (used + u64::from(cost)).saturating_sub(u64::from(limit.quota())) {
            0 => Wait::ZERO,
            must_expire => expires_after(self.entry_of_unit(expired.units + must_expire).time_us, limit, now),
        }
    }

    #[inline(always)]
    fn build_status(
        &self,
        limit: &Limit,
        now: Timestamp,
        expired: Oldest,
        cost: u32,
        allowed: bool,
        retry_after: Wait,
    ) -> LimitStatus {
        let quota = limit.quota();
        let remaining = u64::from(quota).saturating_sub(self.total() - expired.units) as u32;
        let next_after = if remaining == quota { Wait::ZERO } else { self.wait(limit, now, expired, remaining + 1) };
        let reset_after = match self.newest_us() {
            Some(newest_us) if remaining < quota => expires_after(newest_us, limit, now),
            _ => Wait::ZERO,
        };
        LimitStatus {
            allowed,
            cost,
            quota,
            remaining,
            retry_after,
            next_after,
            reset_after,
            late_us: 0,
            refunded_before: 0,
        }
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
}

impl LogShape {
    #[inline(always)]
    fn tick(&self, us: u64) -> u64 {
        if self.tick.get() == 1 { us } else { self.tick.div(us) }
    }

    /// Returns whether `earlier_us`, which must not be later than `now_us`, is in the same tick.
    #[inline(always)]
    fn is_same_tick(&self, earlier_us: u64, now_us: u64) -> bool {
        let begun_us = if self.tick.get() == 1 { 0 } else { self.tick.div_rem(now_us).1 };
        now_us - earlier_us <= begun_us
    }
}

/// Returns the wait until an entry at `time_us`, which has not expired, is a window old.
///
/// An entry later than `now` counts as one at `now`.
#[inline(always)]
fn expires_after(time_us: u64, limit: &Limit, now: Timestamp) -> Wait {
    let now_us = now.as_micros();
    Wait::from_micros(time_us.min(now_us) + limit.window_us() - now_us)
}

/// Returns the maximum number of entries in a log of this limit, which must keep one, to bound the size of its ring.
fn entries_max(limit: &Limit) -> usize {
    match limit.machine() {
        crate::limit::Machine::Log(shape) if shape.tick.get() == 1 => limit.quota() as usize,
        _ => SLIDING_EXACT_QUOTA_MAX as usize + 1,
    }
}

#[cfg(test)]
mod tests;
