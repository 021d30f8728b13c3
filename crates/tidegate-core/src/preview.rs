//! Previews: decisions that charge nothing.

use std::time::Duration;

use smallvec::SmallVec;

use crate::check::{Check, Demand};
use crate::decision::{Decision, LimitStatuses, Source};
use crate::key::{Key, Scope, ScopeName};
use crate::limit::Limit;

/// Demands, and one more that no quota admits.
///
/// A store denies them as one check: it charges nothing, and each status tells whether its limit alone has room. For
/// stores that can only decide.
pub struct Preview<'a>(SmallVec<[Demand<'a>; 3]>);

impl<'a> Preview<'a> {
    /// Creates the preview of these demands, at least one and fewer than [`DEMANDS_MAX`](crate::DEMANDS_MAX), which must
    /// all count on different counters.
    ///
    /// The additional demand has a counter of its own, which is never charged, so it is never created. It is in the
    /// partition of the first demand.
    pub fn of(demands: &[Demand<'a>]) -> Preview<'a> {
        const VETO: Scope<'static> = Scope::Named(ScopeName::new("veto"));
        let veto = demands.first().map(|demand| {
            let limit = Limit::new(1, Duration::from_secs(1)).expect("a valid limit");
            Demand::new(limit, Key::scoped(demand.key.subject(), VETO).expect("the subject of a key")).cost(2)
        });
        // A denial would charge a limit with `count_denied`.
        let uncharged = |demand: &Demand<'a>| Demand { limit: demand.limit.with_count_denied(false), ..*demand };
        Preview(demands.iter().map(uncharged).chain(veto).collect())
    }

    /// Returns the check that a store denies.
    pub fn check(&self) -> Check<'_> {
        Check::of_distinct(&self.0)
    }

    /// Returns the decision on [`check`](Preview::check) without the status of the additional demand.
    pub fn conclude(&self, denied: &Decision) -> Decision {
        denied.with_limits(denied.limits.iter().take(self.0.len() - 1).copied().collect())
    }

    /// Combines the decisions on the previews of all demands of `check`, in order. Returns `None` if a decision or a
    /// status is missing.
    pub(crate) fn combine(check: &Check<'_>, previews: &[Preview<'_>], denied: &[Decision]) -> Option<Decision> {
        let at = denied.first()?.at;
        if let Some(ban) = denied.iter().filter_map(|decision| decision.ban).max() {
            return Some(Decision::banned(at, Source::Store, ban, check));
        }
        let mut limits = LimitStatuses::new();
        for (preview, denied) in previews.iter().zip(denied) {
            limits.extend(preview.conclude(denied).limits.iter().copied());
        }
        (limits.len() == check.demands().len()).then(|| Decision::new(at, Source::Store, limits))
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::check::DEMANDS_MAX;
    use crate::decision::LimitStatus;
    use crate::memory::MemoryStore;
    use crate::store::{Store, StoreFuture};
    use crate::time::{ManualClock, Timestamp};

    const LIMITS: [&str; 9] = [
        "5/s",
        "7/2s sliding-log",
        "4/s sliding-counter",
        "6/s fixed-window",
        "5/s token-bucket burst=8",
        "6/s leaky-bucket queue=4",
        "3/s count_denied=true",
        "5/3s sliding-counter count_denied=true",
        "4/s token-bucket count_denied=true",
    ];

    /// The counters of a memory store, behind a store that previews by denied checks.
    struct Denies<'s>(&'s MemoryStore);

    impl Store for Denies<'_> {
        fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
            Store::decide(self.0, checks)
        }
        fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
            Store::refund(self.0, check, decision)
        }
        fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
            Store::reset(self.0, demand)
        }
        fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
            Store::inspect(self.0, demand)
        }
    }

    fn by_denial(store: &MemoryStore, check: &Check<'_>) -> Decision {
        let store = Denies(store);
        let mut preview = pin!(store.preview(check));
        match preview.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(preview) => preview.unwrap(),
            Poll::Pending => panic!("a store in memory does not wait"),
        }
    }

    #[test]
    fn preview_equals_that_by_a_denied_check_predicts_the_decision_and_changes_nothing() {
        let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
        let store = MemoryStore::builder().clock(clock.clone()).build();
        let limits = LIMITS.map(|text| text.parse::<Limit>().unwrap());
        let (mut admitted, mut random) = (0, 12_345_u64);
        for step in 0..5_000 {
            let mut next = |below: u64| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (random >> 33) % below
            };
            let (first, count, subject) = (next(9) as usize, 1 + next(3) as usize, ["a", "b"][next(2) as usize]);
            let picked = (0..count).map(|index| (first + 4 * index) % LIMITS.len());
            let demands: Vec<Demand<'_>> = picked
                .map(|index| {
                    let scope = Scope::rule("rule", LIMITS[index]);
                    Demand::new(limits[index], Key::scoped(subject, scope).unwrap()).cost(next(5) as u32)
                })
                .collect();
            let check = Check::new(&demands).unwrap();
            let preview = store.preview(&check);
            assert_eq!(by_denial(&store, &check), preview, "step {step}");
            assert_eq!(store.preview(&check), preview, "step {step}: it has changed a counter");
            let peeks: Vec<u32> = demands.iter().map(|demand| store.inspect(demand).remaining).collect();
            assert_eq!(preview.limits.iter().map(|status| status.remaining).collect::<Vec<_>>(), peeks, "step {step}");
            let decision = store.check(&check);
            assert_eq!(decision.allowed(), preview.allowed(), "step {step}");
            for (demand, (preview, status)) in demands.iter().zip(preview.limits.iter().zip(&decision.limits)) {
                assert_eq!((status.cost, status.allowed), (preview.cost, preview.allowed), "step {step}");
                if !decision.allowed() && !demand.limit.count_denied() {
                    assert_eq!(status, preview, "step {step}");
                }
            }
            admitted += u32::from(decision.allowed());
            clock.advance(Duration::from_millis(next(300)));
        }
        assert!((500..4_500).contains(&admitted), "{admitted}");
    }

    #[test]
    fn check_with_the_most_limits_is_previewed_and_a_ban_refuses_it_unless_it_takes_no_units() {
        let store = MemoryStore::builder().clock(Arc::new(ManualClock::new(Timestamp::ZERO))).build();
        let subjects: Vec<String> = (0..DEMANDS_MAX).map(|n| n.to_string()).collect();
        let demand = |subject| Demand::new("5/min".parse().unwrap(), Key::new(subject).unwrap()).cost(2);
        let demands: Vec<Demand<'_>> = subjects.iter().map(demand).collect();
        let peeks: Vec<Demand<'_>> = demands.iter().map(|demand| demand.cost(0)).collect();
        let [check, peek] = [&demands, &peeks].map(|demands| Check::new(demands).unwrap());
        let preview = store.preview(&check);
        assert_eq!(preview.limits.iter().map(|status| status.remaining).collect::<Vec<_>>(), [5; DEMANDS_MAX]);
        assert_eq!(by_denial(&store, &check), preview);
        store.ban(subjects[DEMANDS_MAX - 1].as_bytes(), Some(Duration::from_secs(9))).unwrap();
        let banned = store.preview(&check);
        assert_eq!((banned.ban.is_some(), banned.limits.len(), banned.allowed()), (true, DEMANDS_MAX, false));
        assert_eq!(by_denial(&store, &check), banned);
        assert_eq!((store.preview(&peek).ban, by_denial(&store, &peek)), (None, store.preview(&peek)));
        assert!(store.is_empty(), "no counter was created");
    }
}
