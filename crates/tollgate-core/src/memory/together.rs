//! Several counters, decided where they stand.
//!
//! A check of several limits looks at all of them before it charges any. In general that takes each counter out of its place and puts it
//! back ([`MemoryStore::check_in_general`]), because a newcomer's place may move the others', and a denial must leave all as they were.
//! Nearly every check needs none of that: its counters exist, and each has room by a look at its slot alone. Then
//! each is charged like a counter that is alone, in place.
//!
//! The look may be too careful (it does not see what has left a log's window meanwhile), never too generous. Whoever does not pass it is
//! decided in general, from the start.

use parking_lot::MutexGuard;

use super::naming::CounterHash;
use super::rings::Rings;
use super::shard::Shard;
use super::slot::Slot;
use super::{MemoryStore, Padded};
use crate::check::{Demand, StandingDemand};
use crate::decision::Lines;
use crate::limit::{Limit, Machine};
use crate::time::{Clock, Timestamp};

/// What a counter is asked for: how much of which limit.
type Asked<'a> = (&'a Limit, u32);

impl MemoryStore {
    /// Admits a request of `subject` by all these limits, one to four, if each has a counter for it with room: adds a line of each,
    /// and says when. `None` if there is more to it: then nothing was changed, and a check decides.
    ///
    /// Their counters must be different ones. A rule that asks the same of everybody lays its demands out once, and a request
    /// that passes, as most do, brings nothing but its subject.
    ///
    /// ```
    /// use tollgate_core::{Check, Cost, Demand, Key, Lines, MemoryStore, Scope, StandingDemand};
    ///
    /// let (store, limit, scope) = (MemoryStore::new(), "2/min".parse()?, Scope::rule("login", "per-minute"));
    /// let standing = [StandingDemand::new(limit, scope, Cost::ONE)];
    /// let admitted = || store.admit(b"user:42", &standing, &mut Lines::new()).is_some();
    ///
    /// assert!(!admitted(), "who comes for the first time has no counter");
    /// let demand = Demand::new(limit, Key::scoped("user:42", scope)?);
    /// assert!(store.check(&Check::one(&demand)).allowed());
    /// assert!(admitted());
    /// assert!(!admitted(), "there is no room");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn admit(&self, subject: &[u8], demands: &[StandingDemand], lines: &mut Lines) -> Option<Timestamp> {
        match demands {
            [one] => self.admit_subject(subject, [one], lines),
            [one, two] => self.admit_subject(subject, [one, two], lines),
            [one, two, three] => self.admit_subject(subject, [one, two, three], lines),
            [one, two, three, four] => self.admit_subject(subject, [one, two, three, four], lines),
            _ => None,
        }
    }

    #[inline(never)]
    fn admit_subject<const N: usize>(
        &self,
        subject: &[u8],
        demands: [&StandingDemand; N],
        lines: &mut Lines,
    ) -> Option<Timestamp> {
        let subject = self.naming.subject(subject);
        let names = demands.map(|demand| self.naming.counter(subject, demand.scope));
        let asked = demands.map(|demand| (&demand.limit, demand.cost.units()));
        self.admit_in_shard(names, asked, self.clock.now(), lines)
    }

    /// Decides, if all counters exist and have room. `None` if there is more to it; then nothing was changed. More than four limits
    /// (a caller's own two or three, and one for its address) are always decided in general.
    #[inline]
    pub(super) fn admit_in_place(
        &self,
        read: Timestamp,
        demands: &[Demand<'_>],
        lines: &mut Lines,
    ) -> Option<Timestamp> {
        match demands {
            [one, two] => self.admit_demands([one, two], read, lines),
            [one, two, three] => self.admit_demands([one, two, three], read, lines),
            [one, two, three, four] => self.admit_demands([one, two, three, four], read, lines),
            _ => None,
        }
    }

    #[inline]
    fn admit_demands<const N: usize>(
        &self,
        demands: [&Demand<'_>; N],
        read: Timestamp,
        lines: &mut Lines,
    ) -> Option<Timestamp> {
        let names = self.naming.names(&demands);
        let indices = names.map(|name| self.shard_index(name));
        if indices.iter().any(|index| *index != indices[0]) {
            return self.admit_apart(demands, (names, indices), read, lines);
        }
        self.admit_in_shard(names, demands.map(asked_of), read, lines)
    }

    /// Of one subject, as most are.
    #[inline(always)]
    fn admit_in_shard<const N: usize>(
        &self,
        names: [CounterHash; N],
        asked: [Asked<'_>; N],
        read: Timestamp,
        lines: &mut Lines,
    ) -> Option<Timestamp> {
        let mut shard = self.shard(names[0]).lock();
        let now = shard.arrive(read, &self.clock);
        shard.set_time(now);
        let mut places = [0; N];
        for index in 0..N {
            places[index] = place_with_room(&mut shard, names[index], asked[index], now)?;
        }
        for index in 0..N {
            self.charge_in_place(shard.slot_at(places[index]), asked[index], now, lines);
        }
        // Only now: reclaiming may move what has not been decided yet.
        shard.finish(&self.budget);
        Some(now)
    }

    /// The same for several subjects, whose counters are behind several locks.
    #[inline(never)]
    fn admit_apart<const N: usize>(
        &self,
        demands: [&Demand<'_>; N],
        (names, indices): ([CounterHash; N], [usize; N]),
        read: Timestamp,
        lines: &mut Lines,
    ) -> Option<Timestamp> {
        let (mut shards, shard_of) = self.lock_together(indices);
        let now = shards.iter().flatten().map(|shard| shard.arrive(read, &self.clock)).max()?;
        shards.iter_mut().flatten().for_each(|shard| shard.set_time(now));

        let mut places = [0; N];
        for index in 0..N {
            let shard = shards[shard_of[index]].as_mut()?;
            places[index] = place_with_room(shard, names[index], asked_of(demands[index]), now)?;
        }
        for index in 0..N {
            let slot = shards[shard_of[index]].as_mut()?.slot_at(places[index]);
            self.charge_in_place(slot, asked_of(demands[index]), now, lines);
        }
        shards.iter_mut().flatten().for_each(|shard| shard.finish(&self.budget));
        Some(now)
    }

    /// Locks the shards in ascending order, each once; and tells which of the locks is whose.
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

    #[inline(never)]
    fn charge_in_place(
        &self,
        (slot, rings): (&mut Slot, &mut Rings),
        (limit, units): Asked<'_>,
        now: Timestamp,
        lines: &mut Lines,
    ) {
        let line = match limit.machine() {
            Machine::Bucket(shape) => match slot.decide_bucket_in_place(limit, shape, now, units) {
                Some(answer) => return lines.push(answer.line_if_plain()),
                None => slot.decide_bucket(limit, shape, now, units),
            },
            Machine::Pair(shape) => slot.decide_pair(limit, shape, now, units),
            Machine::Log(shape) => {
                // Each where it is made: to move a line costs more than to make it.
                if let Some(line) = slot.decide_few_in_place(limit, shape, now, units) {
                    return lines.push(line);
                }
                if let Some(line) = slot.decide_ring_in_place(limit, shape, now, units, rings) {
                    return lines.push(line);
                }
                slot.decide_log(limit, shape, now, units, (rings, &self.budget))
            }
        };
        lines.push(line.expect("its kind was looked at"));
    }
}

/// Where the counter is, if it has one of its own with room for the demand.
#[inline(always)]
fn place_with_room(shard: &mut Shard, name: CounterHash, (limit, units): Asked<'_>, now: Timestamp) -> Option<usize> {
    let place = shard.find(name)?;
    let (slot, _) = shard.slot_at(place);
    slot.has_room_for(limit, now, units).then_some(place)
}

fn asked_of<'a>(demand: &'a Demand<'_>) -> Asked<'a> {
    (&demand.limit, demand.cost.units())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::algorithm::{State, decide};
    use crate::check::{Check, Cost};
    use crate::key::{Key, Scope};
    use crate::time::ManualClock;

    /// Whether it was decided in place or in general, a decision is the one that the algorithms make of the plain states.
    #[test]
    fn several_limits_are_decided_as_the_algorithms_say() {
        let limits = ["9/100ms", "7/90ms fixed-window", "8/80ms token-bucket", "20/300ms sliding-log"];
        let limits: Vec<Limit> = limits.iter().map(|text| text.parse().unwrap()).collect();
        let cases = [&["user:42"; 4], &["user:42", "ip:10.0.0.1", "user:42", "global"]];
        let cases = (1..=limits.len()).flat_map(|count| cases.map(|subjects| (count, subjects)));
        for (count, subjects) in cases {
            let is_one_subject = subjects[..count].iter().all(|subject| *subject == subjects[0]);
            let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_000_000)));
            let store = MemoryStore::builder().clock(clock.clone()).build();
            let mut states: Vec<State> = limits.iter().map(State::unused).collect();
            let (mut random, mut in_place) = (count as u64, 0);
            for step in 0..20_000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                clock.advance(Duration::from_millis(random >> 60));
                let cost = Cost::new((random >> 40) as u32 % 3);
                let demand = |(limit, subject): (&Limit, &&'static str)| {
                    Demand::new(*limit, Key::new(*subject).unwrap()).cost(cost)
                };
                let demands: Vec<Demand<'_>> = limits[..count].iter().zip(subjects).map(demand).collect();
                let now = crate::time::Clock::now(&*clock);
                let expected = decide(now, &demands, &mut states);
                let mut lines = Lines::new();
                let standing = |limit: &Limit| StandingDemand::new(*limit, Scope::Explicit, cost);
                let admitted = if is_one_subject && step % 2 == 0 {
                    let standing: Vec<StandingDemand> = limits[..count].iter().map(standing).collect();
                    store.admit(subjects[0].as_bytes(), &standing, &mut lines)
                } else {
                    store.admit_in_place(now, &demands, &mut lines)
                };
                match admitted {
                    Some(_) => in_place += 1,
                    None => lines = store.check(&Check::new(&demands).unwrap()).lines,
                }
                assert_eq!(lines, expected.lines, "step {step} of {count} limits");
            }
            assert!((1_000..19_000).contains(&in_place), "both ways were gone: {in_place}");
        }
    }
}
