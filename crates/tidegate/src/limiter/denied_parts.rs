//! The order in which the parts of a check on several servers are asked.
//!
//! The parts of a check are charged at the same time, and refunded if one of them refuses; see `parts.rs`. Between the
//! two, its units are missing for others. A client that is over its own limit and keeps 128 requests in flight would
//! hold 128 units of a limit that it shares with all others, all the time.
//!
//! So parts that were denied in the last ten seconds are remembered, each with the units that its last answer left and
//! the number of checks in flight that charge it. A check that has more company on such a part than there are units will
//! probably be denied there. A remembered part is then asked first:
//!
//! ```text
//!   as usual       own ──▶ charge ─┐                            denied by own: refund shared
//!                  shared ▶ charge ┴▶ decision
//!
//!   own first      own ──▶ charge ──┐ denied: decision, and shared was not charged
//!                  shared ▶ preview ┴▶ admitted: shared ──▶ charge ──▶ decision
//! ```
//!
//! The other parts are only previewed meanwhile ([`Preview`](tidegate_core::Preview)): they report their statuses and
//! charge nothing. So a denial takes one round trip, as usual, and has the statuses of all limits. An admission takes
//! two, but only for a client that was denied in the last ten seconds and now has more requests in flight than units.
//! Asking every part in turn for every check would take two round trips for all clients. With the default deadline, that
//! is impossible above a round trip of 12 ms.
//!
//! A check does not charge its other parts, so it is no company there. Otherwise, the client above would make every check of
//! the shared limit take two round trips, although it holds none of its units.
//!
//! If a check has several such parts, the one with the fewest checks in flight is asked first, charged or not: it is the
//! one that the fewest clients share. Among equals, it is the one with the fewest units left. This holds also if only
//! another part has too much company: otherwise, the client above would charge a shared limit with few units left first,
//! with all its requests.
//!
//! **Late replies.** A check is in flight until its charges are refunded, although its caller gets a decision at the
//! deadline. A denial that arrives after the deadline is remembered like any other. Otherwise, a client whose replies
//! are all late would never be known to be over its limit, and each of its requests would charge all parts.
//!
//! **Bound.** A client still holds units of other limits with the requests that are in flight when it reaches its own
//! limit, once in ten seconds, and later with as many requests as its own limit had units left, but at least one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use smallvec::SmallVec;
use tidegate_core::{Decision, Timestamp};

use super::parts::Part;
use crate::ttl_cache::{Expire, Id, TtlCache};

/// Time for which a denied part is remembered, in microseconds.
const REMEMBERED_US: u64 = 10_000_000;
/// Maximum number of parts that are remembered.
const PARTS_MAX: usize = 65_536;

/// A bounded memory of the parts of checks that were denied in the last ten seconds. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct DeniedParts(Arc<TtlCache<DeniedPart>>);

/// The memory of one part: its counters, under exactly these limits.
#[derive(Debug, Default)]
struct DeniedPart {
    /// The time of its last denial.
    denied: Timestamp,
    /// The units that its last answer left.
    units_left: AtomicU32,
    /// The number of checks in flight that began after it was denied.
    in_flight: AtomicU32,
    /// The number of these that charge it without having asked another part first.
    charging: AtomicU32,
}

impl DeniedPart {
    /// Counts one check less. Zero stays zero: the entry may have been removed and created again since it was counted.
    fn leave(counter: &AtomicU32) {
        let _ = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
    }
}

impl Expire for DeniedPart {
    /// Returns whether the denial is ten seconds old, or the clock was set back by as much since.
    ///
    /// A denial that is a little later than `now` has not expired: another thread recorded it after `now` was read.
    fn is_expired(&self, now: Timestamp) -> bool {
        now.as_micros().abs_diff(self.denied.as_micros()) >= REMEMBERED_US
    }
}

/// The turn of a check: which of its parts is asked first. While it lives, the check counts as in flight: calls that have
/// missed their deadline hold it, too.
pub(super) struct Turn {
    /// The index of the part that is asked before the others. `None` if all are asked at the same time.
    pub(super) first: Option<usize>,
    /// The ids of the parts of the check, in order.
    ids: SmallVec<[Id; 2]>,
    counted: SmallVec<[Counted; 2]>,
    denied_parts: DeniedParts,
}

/// A part that is charged in the turn of its check.
#[derive(Clone)]
pub(super) struct PartTurn {
    pub(super) turn: Arc<Turn>,
    /// The index of the part in the check.
    pub(super) part: usize,
}

/// A denied part on which a check is counted.
struct Counted {
    id: Id,
    /// The index of the part in the check.
    index: usize,
}

impl Default for DeniedParts {
    fn default() -> Self {
        DeniedParts(Arc::new(TtlCache::new(PARTS_MAX)))
    }
}

impl DeniedParts {
    /// Decides which part of a check is asked first.
    ///
    /// None is if the check has one part, charges nothing, or has a limit with `count_denied`, which a denial must charge.
    pub(super) fn turn(&self, parts: &[Part<'_>], now: Timestamp) -> Turn {
        let ids = parts.iter().map(|part| self.id(part)).collect();
        let mut turn = Turn { first: None, ids, counted: SmallVec::new(), denied_parts: self.clone() };
        if parts.len() < 2 || !parts.iter().all(Part::can_be_previewed) || !parts.iter().any(Part::charges) {
            return turn;
        }
        let (mut fewest, mut will_be_denied) = (None, false);
        for (index, (part, &id)) in parts.iter().zip(&turn.ids).enumerate() {
            let join = |denied: &DeniedPart| {
                let others =
                    || [&denied.in_flight, &denied.charging].map(|count| count.fetch_add(1, Ordering::Relaxed));
                (!denied.is_expired(now)).then(|| (others(), denied.units_left.load(Ordering::Relaxed)))
            };
            let Some(([in_flight, charging], units_left)) = self.0.get_with(id, join).flatten() else { continue };
            turn.counted.push(Counted { id, index });
            will_be_denied |= charging >= (units_left / part.cost_max().max(1)).max(1);
            let company = (in_flight, units_left, index);
            fewest = Some(fewest.map_or(company, |fewest| company.min(fewest)));
        }
        turn.first = fewest.filter(|_| will_be_denied).map(|(.., index)| index);
        for counted in turn.counted.iter().filter(|counted| !turn.charges(counted)) {
            self.0.get_with(counted.id, |denied| DeniedPart::leave(&denied.charging));
        }
        turn
    }

    /// Records the answer to a part, charged or previewed: a denial is remembered.
    fn learn(&self, id: Id, decision: &Decision, now: Timestamp) {
        let units_left = decision.remaining().unwrap_or(0);
        if decision.allowed() {
            self.0.get_with(id, |denied| denied.units_left.store(units_left, Ordering::Relaxed));
        } else {
            self.0.update(id, now, |denied| {
                denied.denied = now;
                denied.units_left = AtomicU32::new(units_left);
            })
        }
    }

    fn id(&self, part: &Part<'_>) -> Id {
        let counters: SmallVec<[_; 2]> = part.demands.iter().map(|demand| (demand.key, demand.limit)).collect();
        self.0.id(&counters[..])
    }
}

impl Turn {
    /// Records the answer to a part of the check, charged or previewed: a denial is remembered.
    pub(super) fn learn(&self, part: usize, decision: &Decision, now: Timestamp) {
        self.denied_parts.learn(self.ids[part], decision, now);
    }

    /// Returns whether the check charges a part without having asked another one first.
    fn charges(&self, counted: &Counted) -> bool {
        self.first.is_none_or(|first| first == counted.index)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        for counted in &self.counted {
            self.denied_parts.0.get_with(counted.id, |denied| {
                DeniedPart::leave(&denied.in_flight);
                if self.charges(counted) {
                    DeniedPart::leave(&denied.charging);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::{Check, Demand, Key, Location, MemoryStore, ShardId};

    const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    /// Returns a part with one demand, on a server of its own.
    fn part(limit: &str, subject: &'static str, shard: u32) -> Part<'static> {
        let demand = Demand::new(limit.parse().unwrap(), Key::new(subject).unwrap());
        let location = Location::new(shard, ShardId::new(shard));
        Part { location, demands: SmallVec::from_iter([demand]), indices: SmallVec::from_iter([shard as usize]) }
    }

    fn decide(store: &MemoryStore, part: &Part<'_>) -> Decision {
        store.check(&Check::new(&part.demands).unwrap())
    }

    fn learn(denied: &DeniedParts, part: &Part<'_>, decision: &Decision, now: Timestamp) {
        denied.learn(denied.id(part), decision, now);
    }

    #[test]
    fn part_is_asked_first_after_a_denial_if_more_checks_are_in_flight_than_units() {
        let (denied, store) = (DeniedParts::default(), MemoryStore::new());
        let parts = [part("2/h", "own", 0), part("100/h", "shared", 1)];
        assert_eq!(denied.turn(&parts, NOW).first, None, "nothing is known");
        while decide(&store, &parts[0]).allowed() {}
        learn(&denied, &parts[0], &decide(&store, &parts[0]), NOW);
        let alone = denied.turn(&parts, NOW);
        assert_eq!(alone.first, None, "no other check is in flight");
        let second = denied.turn(&parts, NOW);
        assert_eq!(second.first, Some(0));
        drop((alone, second));
        assert_eq!(denied.turn(&parts, NOW).first, None, "both have ended");

        // Two units have become available.
        store.reset(&parts[0].demands[0]);
        learn(&denied, &parts[0], &store.check(&Check::one(&parts[0].demands[0].cost(0))), NOW);
        let turns = [(); 3].map(|()| denied.turn(&parts, NOW));
        assert_eq!(turns.each_ref().map(|turn| turn.first), [None, None, Some(0)]);
        let later = NOW.plus_micros(REMEMBERED_US);
        assert_eq!(denied.turn(&parts, later).first, None, "the denial is ten seconds old");
    }

    #[test]
    fn part_with_the_fewest_checks_in_flight_is_asked_first() {
        let (denied, store) = (DeniedParts::default(), MemoryStore::new());
        let shared = || part("1/h", "shared", 1);
        let [one, other] = ["one", "other"].map(|own| [shared(), part("1/h", own, 0)]);
        for part in [&one[0], &one[1], &other[1]] {
            decide(&store, part);
            learn(&denied, part, &decide(&store, part), NOW);
        }
        let _in_flight = [denied.turn(&one, NOW), denied.turn(&other, NOW)];
        assert_eq!(denied.turn(&one, NOW).first, Some(1), "two checks use the shared part, one this client's own");
    }

    #[test]
    fn among_parts_with_as_many_checks_in_flight_the_one_with_the_fewest_units_is_asked_first() {
        let (denied, store) = (DeniedParts::default(), MemoryStore::new());
        let parts = [part("9/h", "shared", 0), part("1/h", "own", 1)];
        for part in &parts {
            while decide(&store, part).allowed() {}
            learn(&denied, part, &decide(&store, part), NOW);
        }
        // One unit of the shared part has become available.
        store.reset(&parts[0].demands[0]);
        learn(&denied, &parts[0], &store.check(&Check::one(&parts[0].demands[0].cost(8))), NOW);
        let turns = [(); 3].map(|()| denied.turn(&parts, NOW));
        assert_eq!(turns.each_ref().map(|turn| turn.first), [None, Some(1), Some(1)]);
    }

    #[test]
    fn denial_that_was_recorded_after_the_check_began_counts() {
        let (denied, store) = (DeniedParts::default(), MemoryStore::new());
        let parts = [part("1/h", "own", 0), part("9/h", "shared", 1)];
        decide(&store, &parts[0]);
        learn(&denied, &parts[0], &decide(&store, &parts[0]), NOW.plus_micros(5));
        let turns = [(); 2].map(|()| denied.turn(&parts, NOW));
        assert_eq!(turns.each_ref().map(|turn| turn.first), [None, Some(0)]);
        let set_back = Timestamp::from_micros(NOW.as_micros() - REMEMBERED_US);
        assert_eq!(denied.turn(&parts, set_back).first, None, "the clock was set back");
    }

    /// A client that is over its own limit shares a limit that has few units left, of which others charge all.
    #[test]
    fn own_part_is_asked_first_although_only_the_shared_part_will_probably_be_denied() {
        let (denied, store) = (DeniedParts::default(), MemoryStore::new());
        let shared = || part("9/h", "shared", 0);
        let [over, other] = ["over", "other"].map(|own| [shared(), part("1/h", own, 1)]);
        decide(&store, &over[1]);
        for part in [&over[1], &over[0]] {
            while decide(&store, part).allowed() {}
            learn(&denied, part, &decide(&store, part), NOW);
        }
        let others = [(); 2].map(|()| denied.turn(&other, NOW));
        assert_eq!(others.each_ref().map(|turn| turn.first), [None, Some(0)]);
        assert_eq!(denied.turn(&over, NOW).first, Some(1), "no other check of this client is in flight");
    }

    /// A client that is over its own limit, beside others who share a limit with it that has denied a check.
    #[test]
    fn checks_that_ask_another_part_first_are_no_company() {
        let (denied, store) = (DeniedParts::default(), MemoryStore::new());
        let shared = || part("9/h", "shared", 0);
        let [over, other] = ["over", "other"].map(|own| [shared(), part("1/h", own, 1)]);
        decide(&store, &over[1]);
        learn(&denied, &over[1], &decide(&store, &over[1]), NOW);
        while decide(&store, &over[0]).allowed() {}
        learn(&denied, &over[0], &decide(&store, &over[0]), NOW);
        // Four units have become available.
        store.reset(&over[0].demands[0]);
        learn(&denied, &over[0], &store.check(&Check::one(&over[0].demands[0].cost(5))), NOW);

        let in_flight = [(); 20].map(|()| denied.turn(&over, NOW));
        let first = in_flight.each_ref().map(|turn| turn.first);
        assert_eq!((first[0], &first[1..]), (None, &[Some(1); 19][..]));
        let others = [(); 4].map(|()| denied.turn(&other, NOW));
        let first = others.each_ref().map(|turn| turn.first);
        assert_eq!(first, [None, None, None, Some(0)], "one of the first client and three others have the four units");
        drop((in_flight, others));
        assert_eq!(denied.turn(&over, NOW).first, None, "all have ended");
    }

    #[test]
    fn check_that_a_preview_must_charge_is_asked_at_once() {
        let (denied, store) = (DeniedParts::default(), MemoryStore::new());
        let parts = [part("1/h", "own", 0), part("9/h count_denied=true", "shared", 1)];
        decide(&store, &parts[0]);
        learn(&denied, &parts[0], &decide(&store, &parts[0]), NOW);
        let turns = [(); 3].map(|()| denied.turn(&parts, NOW).first);
        assert_eq!(turns, [None; 3]);
    }
}
