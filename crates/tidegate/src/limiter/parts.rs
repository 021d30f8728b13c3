//! Checks whose counters are not all on one server.
//!
//! A store on several servers decides the demands of one partition together: those of one hash slot of a Redis Cluster,
//! for example ([`Atomicity::Subject`](tidegate_core::Atomicity)). A check of one subject is always in one partition. A
//! check of several subjects, such as an address *and* a user, may span several. It is split into one part per
//! partition:
//!
//! ```text
//!   check ──┬──▶ part on server A ──▶ admitted ──┐
//!           │                                    ├──▶ all admitted: the check is admitted
//!           └──▶ part on server B ──▶ denied ────┘    otherwise: the charges of the admitted parts are refunded
//! ```
//!
//! The parts are charged at the same time, unless one of them will probably be denied: `denied_parts.rs` describes when
//! it is asked first. So no quota is ever exceeded, and a denied check keeps no charge. But until its units are refunded,
//! other checks may be denied because of them. Such a denial holds only briefly. So neither a denial nor an exhausted limit
//! of a split check enters the deny cache, except those of the caller's own limits (`DenyCache::learn_own`).
//!
//! If a server does not answer in time, the check fails as a whole, and the other parts are refunded too. If its reply
//! arrives later, its part is refunded then (`late_calls.rs`). If a refund fails, or no reply arrives, the units stay
//! charged until they expire.
//!
//! **Times.** Each server decides by its own clock. [`Decision::at`] is the earliest of these times, and each status
//! has [`LimitStatus::late_us`], by which the time of its own server is later. A refund uses it to find its charge.

use smallvec::SmallVec;
use tidegate_core::{
    Check, DEMANDS_MAX, Decision, Demand, Limit, LimitStatus, LimitStatuses, Location, Source, Store, Wait,
};

use super::denied_parts::PartTurn;
use super::late_calls::OwnedCheck;
use crate::failure::Unavailable;

/// The answer of the store to a check.
#[derive(Debug)]
pub(super) enum CheckAnswer {
    /// The store decided the whole check at once.
    Whole(Decision),
    /// Several servers each decided a part. A denial may be due to units that are refunded soon, so it must not be
    /// cached.
    Combined(Decision),
}

/// The answer to a part of a check.
#[derive(Debug)]
pub(super) struct PartAnswer {
    pub(super) asked: Asked,
    pub(super) result: Result<Decision, Unavailable>,
}

/// How a part of a check was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asked {
    /// It was charged if its limits allowed it.
    Charged,
    /// It reported its statuses, and charged nothing.
    Previewed,
}

impl PartAnswer {
    /// Returns whether the limits of the part allow the check.
    pub(super) fn allows(&self) -> bool {
        self.result.as_ref().is_ok_and(Decision::allowed)
    }

    /// Returns the decision if it has charged the part.
    fn charge(&self) -> Option<&Decision> {
        self.result.as_ref().ok().filter(|decision| self.asked == Asked::Charged && decision.allowed())
    }
}

/// A charge to refund, because another part of the check was refused or failed: what was charged, and the decision.
pub(super) type PartRefund = (OwnedCheck, Decision);

/// A part of a check that is about to be asked.
pub(super) struct PartToAsk<'p, 'a> {
    pub(super) part: &'p Part<'a>,
    pub(super) asked: Asked,
    /// The turn in which it is charged. `None` if it is previewed, or is the only part of its check.
    pub(super) turn: Option<PartTurn>,
}

/// The demands of a check that are in one partition of a store.
pub(super) struct Part<'a> {
    pub(super) location: Location,
    pub(super) demands: SmallVec<[Demand<'a>; 2]>,
    /// The index of each demand in the check.
    pub(super) indices: SmallVec<[usize; 2]>,
}

impl<'a> Part<'a> {
    /// Returns all demands of a check as one part, for a store that decides whole checks.
    pub(super) fn whole(check: &Check<'a>, store: &dyn Store) -> Part<'a> {
        let indices = (0..check.demands().len()).collect();
        let location = location_of(check, store);
        Part { location, demands: check.demands().iter().copied().collect(), indices }
    }

    /// Returns the demands as a check in their partition.
    pub(super) fn check(&self) -> Check<'_> {
        Check::of_distinct(&self.demands).in_partition(self.location.partition)
    }

    /// Returns whether the part has a cost.
    pub(super) fn charges(&self) -> bool {
        self.check().charges()
    }

    /// Returns the largest cost of its demands.
    pub(super) fn cost_max(&self) -> u32 {
        self.demands.iter().map(|demand| demand.cost.units()).max().unwrap_or(0)
    }

    /// Returns whether the part can be previewed: there is no limit with `count_denied`, which a denial would have to
    /// charge, and room for one more demand.
    pub(super) fn can_be_previewed(&self) -> bool {
        self.demands.len() < DEMANDS_MAX && !self.demands.iter().any(|demand| demand.limit.count_denied())
    }

    /// Returns the statuses of this part in a decision on the whole check.
    pub(super) fn decision(&self, whole: &Decision) -> Decision {
        whole.with_limits(self.indices.iter().filter_map(|&index| whole.limits.get(index).copied()).collect())
    }

    /// Returns the part of a refused check that must be refunded: all but limits with `count_denied`, which are charged
    /// for denials too. Returns `None` if there is nothing to refund.
    fn to_refund(&self, decision: &Decision) -> Option<PartRefund> {
        let kept = self.demands.iter().zip(&decision.limits).filter(|(demand, _)| !demand.limit.count_denied());
        let (demands, limits): (SmallVec<[Demand<'a>; 2]>, LimitStatuses) =
            kept.map(|(demand, status)| (*demand, *status)).unzip();
        let check = || OwnedCheck::of(&Check::of_distinct(&demands).in_partition(self.location.partition));
        (!demands.is_empty()).then(|| (check(), decision.with_limits(limits)))
    }
}

/// Returns where a check is decided, for a store that decides whole checks on one server.
pub(super) fn location_of(check: &Check<'_>, store: &dyn Store) -> Location {
    check.demands().first().map_or(Location::default(), |demand| store.locate(demand.key.subject()))
}

/// Splits a check into parts, in the order in which their partitions first occur. Each part carries its location to the
/// store, which does not determine it again.
pub(super) fn split<'a>(check: &Check<'a>, store: &dyn Store) -> SmallVec<[Part<'a>; 1]> {
    let mut parts: SmallVec<[Part<'a>; 1]> = SmallVec::new();
    for (index, demand) in check.demands().iter().enumerate() {
        let subject = demand.key.subject();
        let known = parts.iter().find(|part| part.demands[0].key.subject() == subject);
        let location = known.map_or_else(|| store.locate(subject), |part| part.location);
        match parts.iter_mut().find(|part| part.location.partition == location.partition) {
            Some(part) => {
                part.demands.push(*demand);
                part.indices.push(index);
            }
            None => {
                let (demands, indices) = (SmallVec::from_iter([*demand]), SmallVec::from_iter([index]));
                parts.push(Part { location, demands, indices });
            }
        }
    }
    parts
}

/// Combines the answers to all parts of a check, in order, and returns which charges must be refunded.
///
/// The result is the first failure if any part has failed.
pub(super) fn conclude(
    check: &Check<'_>,
    parts: &[Part<'_>],
    mut answers: SmallVec<[PartAnswer; 1]>,
) -> (Result<CheckAnswer, Unavailable>, SmallVec<[PartRefund; 1]>) {
    if answers.len() == 1 {
        return (answers.remove(0).result.map(CheckAnswer::Whole), SmallVec::new());
    }
    let refunds = if answers.iter().all(PartAnswer::allows) {
        SmallVec::new()
    } else {
        let charged = parts.iter().zip(&answers).filter_map(|(part, answer)| Some((part, answer.charge()?)));
        charged.filter_map(|(part, decision)| part.to_refund(decision)).collect()
    };
    let decisions: Result<Vec<(Asked, Decision)>, Unavailable> =
        answers.into_iter().map(|answer| answer.result.map(|decision| (answer.asked, decision))).collect();
    (decisions.map(|decisions| CheckAnswer::Combined(combine(check, parts, &decisions))), refunds)
}

/// Combines the decisions on all parts of a check into one. There must be as many decisions as parts, and at least one.
///
/// If any part is refused, the statuses of the admitted ones are those after their units are refunded.
pub(super) fn combine(check: &Check<'_>, parts: &[Part<'_>], decisions: &[(Asked, Decision)]) -> Decision {
    let at = decisions.iter().map(|(_, decision)| decision.at).min().unwrap_or_default();
    if let Some(ban) = decisions.iter().filter_map(|(_, decision)| decision.ban).max() {
        return Decision::banned(at, Source::Store, ban, check);
    }
    let is_admitted = decisions.iter().all(|(_, decision)| decision.allowed());
    let mut limits: SmallVec<[_; 4]> = SmallVec::from_elem(None, check.demands().len());
    for (part, (asked, decision)) in parts.iter().zip(decisions) {
        let late_us = decision.at.as_micros().saturating_sub(at.as_micros());
        let is_refunded = !is_admitted && *asked == Asked::Charged && decision.allowed();
        for ((&index, demand), status) in part.indices.iter().zip(&part.demands).zip(&decision.limits) {
            let mut status = *status;
            status.late_us = u32::try_from(late_us).unwrap_or(u32::MAX);
            if is_refunded && !demand.limit.count_denied() {
                refund_status(&mut status, &demand.limit);
            }
            limits[index] = Some(status);
        }
    }
    Decision::new(at, Source::Store, limits.into_iter().flatten().collect())
}

/// Changes the status of `limit`, which the request was charged, to the one after its units are refunded.
///
/// Adds the cost to `remaining`, up to the most units that the limit holds. If that is reached, `next_after` and
/// `reset_after` become zero, else they stay as they are.
pub(crate) fn refund_status(status: &mut LimitStatus, limit: &Limit) {
    let full = limit.cost_max();
    status.remaining = status.remaining.saturating_add(status.cost).min(full);
    if status.remaining == full {
        (status.next_after, status.reset_after) = (Wait::ZERO, Wait::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use tidegate_core::{Key, MemoryStore, Preview, ShardId, StoreErrorKind, Timestamp};

    /// A store whose partitions are the first bytes of the subjects. It counts how many subjects were located.
    #[derive(Default)]
    struct ByFirstByte(MemoryStore, AtomicU32);

    impl Store for ByFirstByte {
        fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> tidegate_core::StoreFuture<'a, Vec<Decision>> {
            Box::pin(async { Ok(self.0.check_batch(checks)) })
        }
        fn refund<'a>(&'a self, _: &'a Check<'a>, _: &'a Decision) -> tidegate_core::StoreFuture<'a, ()> {
            Box::pin(async { Ok(()) })
        }
        fn reset<'a>(&'a self, _: &'a Demand<'a>) -> tidegate_core::StoreFuture<'a, ()> {
            Box::pin(async { Ok(()) })
        }
        fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> tidegate_core::StoreFuture<'a, tidegate_core::LimitStatus> {
            Box::pin(async { Ok(self.0.inspect(demand)) })
        }
        fn locate(&self, subject: &[u8]) -> Location {
            self.1.fetch_add(1, Ordering::Relaxed);
            Location::new(subject[0].into(), ShardId::new(subject[0].into()))
        }
    }

    const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    fn demands() -> [Demand<'static>; 4] {
        [("a1", "5/s"), ("b1", "6/s"), ("a2", "7/s"), ("b2", "8/s count_denied=true")]
            .map(|(subject, limit)| Demand::new(limit.parse().unwrap(), Key::new(subject).unwrap()).cost(2))
    }

    /// Returns answers that charged their parts.
    fn charged(results: impl IntoIterator<Item = Result<Decision, Unavailable>>) -> SmallVec<[PartAnswer; 1]> {
        results.into_iter().map(|result| PartAnswer { asked: Asked::Charged, result }).collect()
    }

    /// Splits the demands and decides each part in memory. Part number n is decided n × 700 µs later.
    fn decided<'a>(demands: &'a [Demand<'a>], store: &ByFirstByte) -> (SmallVec<[Part<'a>; 1]>, Vec<Decision>) {
        let parts = split(&Check::new(demands).unwrap(), store);
        let decide = |(index, part): (usize, &Part<'_>)| Decision {
            at: NOW.plus_micros(700 * index as u64),
            ..store.0.check(&part.check())
        };
        let decisions = parts.iter().enumerate().map(decide).collect();
        (parts, decisions)
    }

    #[test]
    fn demands_are_split_by_partition_and_combined_in_their_order() {
        let (store, demands) = (ByFirstByte::default(), demands());
        let (parts, decisions) = decided(&demands, &store);
        assert_eq!(parts.iter().map(|part| part.indices.to_vec()).collect::<Vec<_>>(), [[0, 2], [1, 3]]);
        let check = Check::new(&demands).unwrap();
        let (answer, refunds) = conclude(&check, &parts, charged(decisions.into_iter().map(Ok)));
        let Ok(CheckAnswer::Combined(decision)) = answer else { panic!("{answer:?}") };
        assert!(decision.allowed() && refunds.is_empty());
        let statuses: Vec<_> = decision.limits.iter().map(|status| (status.remaining, status.late_us)).collect();
        assert_eq!((decision.at, statuses), (NOW, vec![(3, 0), (4, 700), (5, 0), (6, 700)]));
        // Each part finds its own statuses again.
        assert_eq!(parts[1].decision(&decision).limits[1].quota, 8);
    }

    #[test]
    fn subject_of_several_limits_is_located_once_and_its_part_carries_the_partition() {
        let limits: [Limit; 3] = ["5/s", "6/min", "7/h"].map(|limit| limit.parse().unwrap());
        let of = |subject| limits.map(|limit| Demand::new(limit, Key::new(subject).unwrap()));
        let (store, demands) = (ByFirstByte::default(), [of("a1"), of("b1")].concat());
        let parts = split(&Check::new(&demands).unwrap(), &store);
        assert_eq!(store.1.into_inner(), 2);
        assert_eq!(parts.iter().map(|part| part.check().partition()).collect::<Vec<_>>(), [Some(97), Some(98)]);
        let kept = OwnedCheck::of(&parts[1].check());
        assert_eq!(kept.borrow(&kept.demands()).partition(), Some(98));
    }

    #[test]
    fn admitted_part_of_a_refused_check_is_refunded_except_for_count_denied() {
        let (store, demands) = (ByFirstByte::default(), demands());
        let used_up = Demand { cost: tidegate_core::Cost::new(5), ..demands[0] };
        assert!(store.0.check(&Check::one(&used_up)).allowed());
        let (parts, decisions) = decided(&demands, &store);
        let check = Check::new(&demands).unwrap();
        let (answer, refunds) = conclude(&check, &parts, charged(decisions.into_iter().map(Ok)));
        let Ok(CheckAnswer::Combined(decision)) = answer else { panic!("{answer:?}") };
        let statuses: Vec<_> = decision.limits.iter().map(|status| (status.allowed, status.remaining)).collect();
        assert_eq!(statuses, [(false, 0), (true, 6), (true, 7), (true, 6)], "the fourth stays charged");
        assert_eq!(refunds.len(), 1);
        let (given, of) = &refunds[0];
        let given = given.demands();
        assert_eq!((given.len(), given[0].limit.quota(), of.at), (1, 6, NOW.plus_micros(700)));
    }

    #[test]
    fn failed_part_fails_the_check_and_gives_the_others_back() {
        let (store, demands) = (ByFirstByte::default(), demands());
        let (parts, mut decisions) = decided(&demands, &store);
        let failure = Unavailable::new(StoreErrorKind::TimedOut, "no answer");
        let answers = charged([Ok(decisions.remove(0)), Err(failure.clone())]);
        let (answer, refunds) = conclude(&Check::new(&demands).unwrap(), &parts, answers);
        assert_eq!(answer.unwrap_err(), failure);
        assert_eq!(refunds.iter().map(|(check, _)| check.demands().len()).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn previewed_part_reports_its_statuses_and_charges_nothing() {
        let store = ByFirstByte::default();
        let demands = demands().map(|demand| Demand { limit: demand.limit.with_count_denied(false), ..demand });
        let check = Check::new(&demands).unwrap();
        let parts = split(&check, &store);
        assert!(parts.iter().all(Part::can_be_previewed));
        let used_up = Demand { cost: tidegate_core::Cost::new(5), ..demands[0] };
        assert!(store.0.check(&Check::one(&used_up)).allowed());
        let preview = Preview::of(&parts[1].demands);
        let other = preview.conclude(&store.0.check(&preview.check()));
        let expected = [1, 3].map(|index| (true, demands[index].limit.quota()));
        let statuses: Vec<_> = other.limits.iter().map(|status| (status.allowed, status.remaining)).collect();
        assert_eq!(statuses, expected, "uncharged, and without the status of the additional demand");
        let answers = SmallVec::from_iter([
            PartAnswer { asked: Asked::Charged, result: Ok(store.0.check(&parts[0].check())) },
            PartAnswer { asked: Asked::Previewed, result: Ok(other) },
        ]);
        let (answer, refunds) = conclude(&check, &parts, answers);
        let Ok(CheckAnswer::Combined(decision)) = answer else { panic!("{answer:?}") };
        let statuses: Vec<_> = decision.limits.iter().map(|status| (status.allowed, status.remaining)).collect();
        assert_eq!(statuses, [(false, 0), (true, 6), (true, 7), (true, 8)]);
        assert!(refunds.is_empty(), "nothing was charged");
        let counting = [demands[1], Demand { limit: demands[3].limit.with_count_denied(true), ..demands[3] }];
        assert!(!Part::whole(&Check::new(&counting).unwrap(), &store).can_be_previewed());
    }

    #[test]
    fn longest_ban_refuses_the_whole_check() {
        let (store, demands) = (ByFirstByte::default(), demands());
        let check = Check::new(&demands).unwrap();
        let (parts, mut decisions) = decided(&demands, &store);
        decisions[1] = Decision::banned(NOW, Source::Store, Wait::from_micros(9), &parts[1].check());
        let (answer, refunds) = conclude(&check, &parts, charged(decisions.into_iter().map(Ok)));
        let Ok(CheckAnswer::Combined(decision)) = answer else { panic!("{answer:?}") };
        assert_eq!((decision.ban, decision.limits.len(), refunds.len()), (Some(Wait::from_micros(9)), 4, 1));
    }
}
