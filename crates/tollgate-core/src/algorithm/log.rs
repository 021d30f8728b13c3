//! The sliding window, exact.
//!
//! A fixed window forgets everything at its edge: 100 requests at 11:59:59 and 100 more at 12:00:00
//! are both "100 per minute". What people mean is the window that ends *now*:
//!
//! ```text
//!        ├──────────────── window ────────────────┤
//!   ··x··│·x··x·····xx···············x··x·········│ now
//!   gone │         these count                    │
//! ```
//!
//! **Idea.** Keep the admissions, oldest first, as (time, units) with their total. Before a decision,
//! whatever is a window old or older leaves. Admit if the total and the cost fit into the quota.
//!
//! **Never early.** Admissions in one tick share an entry, and the entry keeps the *latest* of their
//! times. It can leave late, so a request may be refused up to one tick too long; it can never leave
//! early, so no trailing window ever holds more than the quota. With a tick of 1 µs (`sliding-log`, and
//! `sliding` up to a quota of 1,000) this is exact. Above, a tick is a thousandth of the window, and
//! since the live ticks of a window number at most 1,001, so do the entries.
//!
//! **Cost.** Each admission enters once and leaves once: O(1) amortised. If even the newest entry has
//! left, all go at once, however many there are.
//!
//! **The clock going back.** Clamping time to the newest entry would freeze the key until the clock catches
//! up. Instead entries from the future become one entry at the present: they count, and leave a window from now.
//!
//! **Layout.** Up to two entries live inline, which is all that most keys of a flood ever need; more live in
//! a ring of eight bytes an entry; more than a thousand in several rings, so that no operation walks over all of them.
//!
//! **Why not two counters?** They assume that the previous window was evenly filled; a client that
//! is not even gets up to twice the quota (see [`Pair`](super::Pair)).
//!
//! Twin: `tollgate-redis/lua/tollgate.lua`, section *log*. Change both or neither.

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
        self.total() - self.gone(limit, now).units + u64::from(cost) <= u64::from(limit.quota())
    }

    pub(super) fn look(&self, limit: &Limit, shape: &LogShape, now: Timestamp, cost: u32) -> LimitStatus {
        if self.newest_us().is_some_and(|newest_us| newest_us > now.as_micros()) {
            return self.look_before_newest(limit, shape, now, cost);
        }
        let gone = self.gone(limit, now);
        let allowed = cost == 0 || self.total() - gone.units + u64::from(cost) <= u64::from(limit.quota());
        self.line(limit, now, gone, cost, allowed, self.wait(limit, now, gone, cost.max(1)))
    }

    /// Looks at a log with entries later than now. They would become one entry at now, together with the newest entry
    /// before them if that is in now's tick.
    #[cold]
    fn look_before_newest(&self, limit: &Limit, shape: &LogShape, now: Timestamp, cost: u32) -> LimitStatus {
        let (now_us, quota) = (now.as_micros(), u64::from(limit.quota()));
        let (gone, past) = (self.gone(limit, now), self.until(now_us));
        let newest_past_us = (past.entries > gone.entries).then(|| self.get(past.entries - 1).time_us);
        let moved_from_us = newest_past_us.filter(|&time_us| shape.is_same_tick(time_us, now_us)).unwrap_or(now_us + 1);
        let used = self.total() - gone.units;
        let wait = |cost: u32| match (used + u64::from(cost)).saturating_sub(quota) {
            _ if cost > limit.quota() => Wait::NEVER,
            0 => Wait::ZERO,
            must_leave => {
                let time_us = self.entry_with(gone.units + must_leave).time_us;
                leaves_after(if time_us < moved_from_us { time_us } else { now_us }, limit, now)
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
            reset_after: leaves_after(now_us, limit, now),
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

    /// The whole decision of a check with this limit alone: settled and looked at once.
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
            return self.look(limit, shape, now, 0);
        }
        self.settle(limit, shape, now, may_grow);
        if self.total() + u64::from(cost) <= u64::from(limit.quota()) {
            self.charge_settled(limit, shape, now, cost, may_grow)
        } else {
            self.refuse_settled(limit, shape, now, cost, may_grow)
        }
    }

    /// The same for a ring, in place, as long as it stays one of this size: what nearly every check of a long log is.
    /// `None` if there is more to it; then nothing was changed.
    #[inline(always)]
    pub(crate) fn decide_in_place(
        (head, words): (&mut RingHead, &mut [u64]),
        limit: &Limit,
        shape: &LogShape,
        now: Timestamp,
        cost: u32,
    ) -> Option<LimitStatus> {
        let (quota, now_us, mut settled) = (limit.quota(), now.as_micros(), *head);
        let left_until_us = now_us.checked_sub(limit.window_us())?;
        if cost == 0 || limit.count_denied() || settled.newest_us <= left_until_us || settled.newest_us > now_us {
            return None;
        }
        let mut oldest = settled.oldest(words);
        while oldest.time_us <= left_until_us {
            settled.drop_oldest(oldest, words);
            oldest = settled.oldest(words);
        }
        let after = u64::from(settled.total) + u64::from(cost);
        let allowed = after <= u64::from(quota);
        let is_simple = if allowed {
            let is_same_tick = shape.is_same_tick(settled.newest_us, now_us);
            settled.append_in_place(Entry { time_us: now_us, units: cost }, is_same_tick, words)
        } else {
            // The oldest entry alone must make room, and a ring must be left with memory that suits it.
            let is_freed_by_oldest = after <= u64::from(quota) + u64::from(oldest.units);
            let is_left_as_it_was = settled.first == head.first;
            cost <= quota
                && settled.total <= quota
                && is_freed_by_oldest
                && (is_left_as_it_was || settled.suits(0, words))
        };
        if !is_simple {
            return None;
        }
        let oldest_leaves = leaves_after(oldest.time_us, limit, now);
        *head = settled;
        Some(LimitStatus {
            allowed,
            cost,
            quota,
            remaining: quota - settled.total,
            retry_after: if allowed { Wait::ZERO } else { oldest_leaves },
            next_after: oldest_leaves,
            reset_after: leaves_after(settled.newest_us, limit, now),
        })
    }

    /// The same for up to two entries, if it is an admission that leaves no more: what nearly every check of a short log is.
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
        let left_until_us = now_us.checked_sub(limit.window_us())?;
        let used = u64::from(few.entries[0].units) + u64::from(few.entries[1].units) + u64::from(cost);
        let is_settled = oldest.time_us > left_until_us && newest.time_us <= now_us;
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
            next_after: leaves_after(few.entries[0].time_us, limit, now),
            reset_after: leaves_after(now_us, limit, now),
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
        self.line(limit, now, Expired::NOTHING, cost, true, Wait::ZERO)
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
            self.take_oldest(self.total().saturating_sub(u64::from(limit.quota())));
        }
        let retry_after = self.wait(limit, now, Expired::NOTHING, cost);
        self.line(limit, now, Expired::NOTHING, cost, allowed, retry_after)
    }

    pub(super) fn refund(&mut self, limit: &Limit, shape: &LogShape, now: Timestamp, receipt: Receipt) {
        self.settle(limit, shape, now, true);
        let charged_tick = shape.tick(receipt.at.as_micros());
        let tick_ends_us = (charged_tick + 1).saturating_mul(shape.tick.get()) - 1;
        if let Some(index) = self.until(tick_ends_us).entries.checked_sub(1) {
            let entry = self.get(index);
            if shape.tick(entry.time_us) == charged_tick {
                self.set_units(index, entry.units - entry.units.min(receipt.units));
            }
        }
    }

    /// What counts now as one entry at the latest of its times: it takes no memory, and leaves late, never early.
    pub(crate) fn condensed(&self, limit: &Limit, now: Timestamp) -> Log {
        let units = (self.total() - self.gone(limit, now).units) as u32;
        match self.newest_us() {
            Some(time_us) if units > 0 => Log::from_few(InlineEntries::one(Entry { time_us, units })),
            _ => Log::default(),
        }
    }

    /// Forgets what has left the window; moves what the clock says is yet to come to the present.
    #[inline(always)]
    fn settle(&mut self, limit: &Limit, shape: &LogShape, now: Timestamp, may_grow: bool) {
        self.drop_front(self.gone(limit, now).entries);
        let now_us = now.as_micros();
        if self.newest_us().is_some_and(|newest_us| newest_us > now_us) {
            let units = self.take_later_than(now_us);
            self.append(limit, shape, now, units, may_grow);
        }
    }

    #[inline(always)]
    fn append(&mut self, limit: &Limit, shape: &LogShape, now: Timestamp, units: u32, may_grow: bool) {
        let now_us = now.as_micros();
        match self.newest_us() {
            Some(newest_us) if shape.is_same_tick(newest_us, now_us) || !(may_grow || self.has_room_for(units)) => {
                self.stretch_newest(now_us, units, may_grow);
            }
            _ => self.push(Entry { time_us: now_us, units }, entries_max(limit)),
        }
    }

    /// What of the oldest has left the window.
    #[inline(always)]
    fn gone(&self, limit: &Limit, now: Timestamp) -> Expired {
        let (Some(left_until_us), Some(newest_us)) = (now.as_micros().checked_sub(limit.window_us()), self.newest_us())
        else {
            return Expired::NOTHING;
        };
        if newest_us <= left_until_us {
            return Expired { entries: self.len(), units: self.total() };
        }
        self.until(left_until_us)
    }

    /// When `cost` units would fit if nobody else spent any: the oldest leave until there is room.
    #[inline(always)]
    fn wait(&self, limit: &Limit, now: Timestamp, gone: Expired, cost: u32) -> Wait {
        if cost > limit.quota() {
            return Wait::NEVER;
        }
        let used = self.total() - gone.units;
        match (used + u64::from(cost)).saturating_sub(u64::from(limit.quota())) {
            0 => Wait::ZERO,
            must_leave => leaves_after(self.entry_with(gone.units + must_leave).time_us, limit, now),
        }
    }

    #[inline(always)]
    fn line(
        &self,
        limit: &Limit,
        now: Timestamp,
        gone: Expired,
        cost: u32,
        allowed: bool,
        retry_after: Wait,
    ) -> LimitStatus {
        let quota = limit.quota();
        let remaining = u64::from(quota).saturating_sub(self.total() - gone.units) as u32;
        let next_after = if remaining == quota { Wait::ZERO } else { self.wait(limit, now, gone, remaining + 1) };
        let reset_after = match self.newest_us() {
            Some(newest_us) if remaining < quota => leaves_after(newest_us, limit, now),
            _ => Wait::ZERO,
        };
        LimitStatus { allowed, cost, quota, remaining, retry_after, next_after, reset_after }
    }
}

/// The oldest entries that have left the window, and their units.
#[derive(Clone, Copy)]
struct Expired {
    entries: usize,
    units: u64,
}

impl Expired {
    const NOTHING: Expired = Expired { entries: 0, units: 0 };
}

impl LogShape {
    #[inline(always)]
    fn tick(&self, us: u64) -> u64 {
        if self.tick.get() == 1 { us } else { self.tick.div(us) }
    }

    /// Whether a tick had begun at `earlier_us`, which is not later, and goes on now.
    #[inline(always)]
    fn is_same_tick(&self, earlier_us: u64, now_us: u64) -> bool {
        let begun_us = if self.tick.get() == 1 { 0 } else { self.tick.div_rem(now_us).1 };
        now_us - earlier_us <= begun_us
    }
}

/// An entry from the future counts as one of the present.
#[inline(always)]
fn leaves_after(time_us: u64, limit: &Limit, now: Timestamp) -> Wait {
    let now_us = now.as_micros();
    Wait::from_micros(time_us.min(now_us) + limit.window_us() - now_us)
}

/// More entries than this never live at once under this limit, so a ring need not be larger.
fn entries_max(limit: &Limit) -> usize {
    match limit.machine() {
        crate::limit::Machine::Log(shape) if shape.tick.get() == 1 => limit.quota() as usize,
        _ => SLIDING_EXACT_QUOTA_MAX as usize + 1,
    }
}

#[cfg(test)]
mod tests;
