//! Checks of several counters, decided in place.
//!
//! A check of several limits reads all counters before it charges any. In general, each counter is taken out of its
//! slot and put back later ([`MemoryStore::check_in_general`]), because inserting a new counter may move the others,
//! and a denial must leave all of them unchanged. Nearly every check needs none of that: its counters exist, and each
//! slot alone shows that there is room. Then each counter is charged in place, as in a check of a single limit.
//!
//! The test for room may fail although the cost fits, because it still counts expired entries of a log. It never
//! succeeds if the cost does not fit. If it fails for one counter, nothing is charged and the general path decides.

use parking_lot::MutexGuard;

use super::counter_hash::CounterHash;
use super::rings::Rings;
use super::shard::Shard;
use super::slot::Slot;
use super::{MemoryStore, Padded};
use crate::check::Demand;
use crate::decision::LimitStatuses;
use crate::limit::{Limit, Machine};
use crate::time::Timestamp;

/// A limit and the units to charge.
type LimitAndCost<'a> = (&'a Limit, u32);

impl MemoryStore {
    /// Admits a check if all its counters exist and have room, and returns the time of the decision.
    ///
    /// `read` is the time that the caller read from the clock. Appends one status per demand to `limits`. Returns
    /// `None` without changing a counter or `limits` in all other cases, also if the check does not have two to four
    /// demands. Then [`MemoryStore::check_in_general`] must decide. Bans are not considered.
    #[inline]
    pub(super) fn admit_in_place(
        &self,
        read: Timestamp,
        demands: &[Demand<'_>],
        limits: &mut LimitStatuses,
    ) -> Option<Timestamp> {
        match demands {
            [one, two] => self.admit_demands([one, two], read, limits),
            [one, two, three] => self.admit_demands([one, two, three], read, limits),
            [one, two, three, four] => self.admit_demands([one, two, three, four], read, limits),
            _ => None,
        }
    }

    /// Implements [`MemoryStore::admit_in_place`] for `N` demands.
    #[inline]
    fn admit_demands<const N: usize>(
        &self,
        demands: [&Demand<'_>; N],
        read: Timestamp,
        limits: &mut LimitStatuses,
    ) -> Option<Timestamp> {
        let names = self.hasher.names(&demands);
        let indices = names.map(|name| self.shard_index(name));
        if indices.iter().any(|index| *index != indices[0]) {
            return self.admit_in_shards(demands, (names, indices), read, limits);
        }
        self.admit_in_shard(names, demands.map(limit_and_cost), read, limits)
    }

    /// Implements [`MemoryStore::admit_in_place`] for counters that are all in one shard, as those of one subject are.
    ///
    /// `names` and `asked` are those of the demands, in the same order.
    #[inline(always)]
    fn admit_in_shard<const N: usize>(
        &self,
        names: [CounterHash; N],
        asked: [LimitAndCost<'_>; N],
        read: Timestamp,
        limits: &mut LimitStatuses,
    ) -> Option<Timestamp> {
        let mut shard = self.shard(names[0]).lock();
        let now = shard.decision_time(read, &self.clock);
        shard.set_time(now);
        let mut places = [0; N];
        for index in 0..N {
            places[index] = find_with_room(&mut shard, names[index], asked[index], now)?;
        }
        for index in 0..N {
            self.charge_in_place(shard.slot_at(places[index]), asked[index], now, limits);
        }
        // Reclaiming may move slots, so it must wait until every counter is charged.
        shard.finish(&self.budget);
        Some(now)
    }

    /// Implements [`MemoryStore::admit_in_place`] for counters in several shards.
    ///
    /// `names` and `indices` are the names and the shards of the demands' counters, in the same order.
    #[inline(never)]
    fn admit_in_shards<const N: usize>(
        &self,
        demands: [&Demand<'_>; N],
        (names, indices): ([CounterHash; N], [usize; N]),
        read: Timestamp,
        limits: &mut LimitStatuses,
    ) -> Option<Timestamp> {
        let (mut shards, shard_of) = self.lock_together(indices);
        let now = shards.iter().flatten().map(|shard| shard.decision_time(read, &self.clock)).max()?;
        shards.iter_mut().flatten().for_each(|shard| shard.set_time(now));

        let mut places = [0; N];
        for index in 0..N {
            let shard = shards[shard_of[index]].as_mut()?;
            places[index] = find_with_room(shard, names[index], limit_and_cost(demands[index]), now)?;
        }
        for index in 0..N {
            let slot = shards[shard_of[index]].as_mut()?.slot_at(places[index]);
            self.charge_in_place(slot, limit_and_cost(demands[index]), now, limits);
        }
        shards.iter_mut().flatten().for_each(|shard| shard.finish(&self.budget));
        Some(now)
    }

    /// Locks the shards with these indices, each once and in ascending order, so that two checks cannot deadlock.
    ///
    /// Returns the locks, and for each of `indices` the position of its lock. If an index occurs several times, its
    /// lock is at the position of one occurrence, and the others are `None`.
    #[inline(always)]
    fn lock_together<const N: usize>(&self, indices: [usize; N]) -> ([Option<MutexGuard<'_, Shard>>; N], [usize; N]) {
        let mut order: [usize; N] = std::array::from_fn(|place| place);
        for end in 1..N {
            let mut place = end;
            while place > 0 && indices[order[place - 1]] > indices[order[place]] {
                order.swap(place - 1, place);
                place -= 1;
            }
        }
        let mut shards = [const { None }; N];
        let mut shard_of = [0; N];
        let mut before = None;
        for place in order {
            let index = indices[place];
            shard_of[place] = match before {
                Some((locked, by)) if locked == index => by,
                _ => {
                    let Padded(shard) = &self.shards[index];
                    shards[place] = Some(shard.lock());
                    place
                }
            };
            before = Some((index, shard_of[place]));
        }
        (shards, shard_of)
    }

    /// Charges one counter, which must exist and have room, and appends its status to `limits`. Cost 0 is not charged.
    ///
    /// A log may grow, so the caller must call [`Shard::finish`] afterwards.
    ///
    /// # Panics
    /// Panics if the slot holds a state of another state machine than the limit's.
    #[inline(never)]
    fn charge_in_place(
        &self,
        (slot, rings): (&mut Slot, &mut Rings),
        (limit, units): LimitAndCost<'_>,
        now: Timestamp,
        limits: &mut LimitStatuses,
    ) {
        let status = match limit.machine() {
            Machine::Bucket(shape) => match slot.decide_bucket_in_place(limit, shape, now, units) {
                Some(answer) => return limits.push(answer.status_if_plain()),
                None => slot.decide_bucket(limit, shape, now, units),
            },
            Machine::Pair(shape) => slot.decide_pair(limit, shape, now, units),
            Machine::Log(shape) => {
                // The status is pushed where it is built, because moving it costs more than building it.
                if let Some(status) = slot.decide_inline_log_in_place(limit, shape, now, units) {
                    return limits.push(status);
                }
                if let Some(status) = slot.decide_ring_in_place(limit, shape, now, units, rings) {
                    return limits.push(status);
                }
                slot.decide_log(limit, shape, now, units, (rings, &self.budget))
            }
        };
        limits.push(status.expect("`has_room_for` has checked the kind of the state"));
    }
}

/// Returns the slot index of a counter, or `None` if it has no slot, may have no room for `units`, or is a bucket whose
/// refunded units are counted.
///
/// Expired entries of a log still count, so the result may be `None` although there is room; see
/// [`Slot::has_room_for`].
#[inline(always)]
fn find_with_room(
    shard: &mut Shard,
    name: CounterHash,
    (limit, units): LimitAndCost<'_>,
    now: Timestamp,
) -> Option<usize> {
    if shard.counts_refunds_of(name) {
        return None;
    }
    let place = shard.find(name)?;
    let (slot, _) = shard.slot_at(place);
    slot.has_room_for(limit, now, units).then_some(place)
}

fn limit_and_cost<'a>(demand: &'a Demand<'_>) -> LimitAndCost<'a> {
    (&demand.limit, demand.cost.units())
}
