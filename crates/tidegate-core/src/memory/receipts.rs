//! The used receipts of the memory store.
//!
//! An id is kept from its redemption until it expires. Checks do not look here, so a store without redemptions pays
//! nothing, and one with them pays only for those. All ids are behind one lock, which is held while the counters are
//! corrected: a second caller with the same id returns only when the correction of the first is complete. Code that
//! holds the lock of a shard never takes this one.
//!
//! **Bounded.** Dropping an id early would allow a second refund. So at the bound nothing is dropped, and redemptions
//! fail until ids expire.
//!
//! **A clock that goes back** does not revive an id whose mark was dropped: every id that expires no later than a
//! dropped one stays expired.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BinaryHeap, HashSet};

use parking_lot::Mutex;

use crate::redemption::{ReceiptId, Redeemed};
use crate::store::{StoreError, StoreErrorKind};
use crate::time::Timestamp;

/// The maximum number of used ids. With them, the hash set has 2^21 places of 17 bytes, and the heap 2^20 places of 24
/// bytes: 61 MB in all.
pub(super) const USED_MAX: usize = 1_000_000;

/// Below this capacity, memory that is no longer needed is not freed.
const CAPACITY_MIN: usize = 1_024;

/// The ids that were redeemed and are not expired.
#[derive(Default)]
pub(super) struct UsedReceipts(Mutex<UsedTable>);

#[derive(Default)]
struct UsedTable {
    used: HashSet<ReceiptId>,
    /// The ids of `used` with the times at which they expire, the next to expire first.
    by_expiry: BinaryHeap<Reverse<(Timestamp, ReceiptId)>>,
    /// The latest time at which a dropped id has expired.
    dropped_until: Timestamp,
}

impl UsedReceipts {
    /// Marks `id` as used until `until` and calls `apply`, unless the id is expired at `now` or was used before.
    ///
    /// Also drops all ids that have expired. If `apply` panics, the id stays marked.
    ///
    /// # Errors
    /// Returns an error of the kind [`StoreErrorKind::Unavailable`], and does not call `apply`, if there are
    /// [`USED_MAX`] other ids.
    pub(super) fn redeem(
        &self,
        id: ReceiptId,
        until: Timestamp,
        now: Timestamp,
        apply: impl FnOnce(),
    ) -> Result<Redeemed, StoreError> {
        let mut table = self.0.lock();
        table.drop_expired(now);
        if until <= now.max(table.dropped_until) {
            return Ok(Redeemed::Expired);
        }
        if table.used.contains(&id) {
            return Ok(Redeemed::AlreadyUsed);
        }
        if table.used.len() >= USED_MAX {
            let message =
                format!("the memory store already remembers the maximum of {USED_MAX} used receipts; use Redis");
            return Err(StoreError::new(StoreErrorKind::Unavailable, message));
        }
        table.used.insert(id);
        table.by_expiry.push(Reverse((until, id)));
        apply();
        Ok(Redeemed::Done)
    }
}

impl UsedTable {
    /// Drops all ids that have expired at `now`, and frees memory if most of it is unused then.
    fn drop_expired(&mut self, now: Timestamp) {
        let count_before = self.used.len();
        while let Some(next) = self.by_expiry.peek_mut()
            && next.0.0 <= now
        {
            let Reverse((until, id)) = PeekMut::pop(next);
            self.used.remove(&id);
            self.dropped_until = self.dropped_until.max(until);
        }
        let needed = (2 * self.used.len()).max(CAPACITY_MIN);
        if self.used.len() < count_before && self.used.capacity() > 2 * needed {
            self.used.shrink_to(needed);
            self.by_expiry.shrink_to(needed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::{Check, Demand, Key, ManualClock, MemoryStore, Redemption};

    const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
    const SECOND_US: u64 = 1_000_000;

    fn store() -> (MemoryStore, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::new(START));
        (MemoryStore::builder().clock(clock.clone()).build(), clock)
    }

    fn demand<'a>(limit: &str, subject: &'a str) -> Demand<'a> {
        Demand::new(limit.parse().unwrap(), Key::new(subject).unwrap())
    }

    fn id(number: u128) -> ReceiptId {
        ReceiptId::from_bytes(number.to_be_bytes())
    }

    fn in_seconds(seconds: u64) -> Timestamp {
        START.plus_micros(seconds * SECOND_US)
    }

    #[test]
    fn redemption_gives_back_and_charges_once() {
        let (store, _) = store();
        let (refunded, charged) = (demand("10/min", "ann").cost(4), demand("20/h token-bucket", "ann").cost(5));
        let (refunds, charges) = (Check::one(&refunded), Check::one(&charged));
        let decision = store.check(&refunds);
        let redemption = Redemption::new(id(1), b"ann", in_seconds(60)).refund(refunds, &decision).charge(charges);
        for expected in [Redeemed::Done, Redeemed::AlreadyUsed, Redeemed::AlreadyUsed] {
            assert_eq!(store.redeem(&redemption).unwrap(), expected);
            assert_eq!((store.inspect(&refunded).remaining, store.inspect(&charged).remaining), (10, 15));
        }
    }

    #[test]
    fn charge_that_does_not_fit_fills_the_counter_even_if_the_subject_is_banned() {
        let (store, _) = store();
        let over = [demand("10/min", "ann").cost(11), demand("20/h", "ann").cost(5)];
        store.ban(b"ann", None).unwrap();
        let redemption = Redemption::new(id(1), b"ann", in_seconds(60)).charge(Check::new(&over).unwrap());
        assert_eq!(store.redeem(&redemption).unwrap(), Redeemed::Done);
        assert_eq!(over.each_ref().map(|demand| store.inspect(demand).remaining), [0, 15]);
    }

    #[test]
    fn redemption_without_a_correction_marks_its_id() {
        let (store, _) = store();
        let marks = Redemption::new(id(1), b"ann", in_seconds(60));
        assert_eq!(store.redeem(&marks).unwrap(), Redeemed::Done);
        assert_eq!(store.redeem(&marks).unwrap(), Redeemed::AlreadyUsed);
        assert_eq!(store.redeem(&Redemption::new(id(2), b"ann", in_seconds(60))).unwrap(), Redeemed::Done);
        assert!(store.is_empty());
    }

    #[test]
    fn id_is_expired_from_its_end_on_and_stays_so_if_the_clock_goes_back() {
        let (store, clock) = store();
        let demand = demand("10/h", "ann").cost(4);
        let check = Check::one(&demand);
        let decision = store.check(&check);
        let used = Redemption::new(id(1), b"ann", in_seconds(60)).refund(check, &decision);
        let unused = Redemption::new(id(2), b"ann", in_seconds(60)).refund(check, &decision);
        let later = Redemption::new(id(3), b"ann", in_seconds(61)).refund(check, &decision);
        clock.set(in_seconds(60).minus_micros(1));
        assert_eq!(store.redeem(&used).unwrap(), Redeemed::Done);
        assert!(store.check(&check).allowed());
        clock.set(in_seconds(60));
        assert_eq!(store.redeem(&used).unwrap(), Redeemed::Expired);
        assert_eq!(store.redeem(&unused).unwrap(), Redeemed::Expired);
        assert!(store.receipts.0.lock().used.is_empty(), "an expired id is dropped");
        clock.set(START);
        assert_eq!(store.redeem(&used).unwrap(), Redeemed::Expired, "its mark was dropped");
        assert_eq!(store.redeem(&unused).unwrap(), Redeemed::Expired);
        assert_eq!(store.inspect(&demand).remaining, 6);
        assert_eq!(store.redeem(&later).unwrap(), Redeemed::Done);
    }

    #[test]
    fn number_of_used_ids_is_bounded_and_expired_ones_make_room() {
        let receipts = UsedReceipts::default();
        let redeem = |number: usize, until: Timestamp, now: Timestamp| {
            let mut is_applied = false;
            let redeemed = receipts.redeem(id(number as u128), until, now, || is_applied = true);
            assert_eq!(is_applied, matches!(redeemed, Ok(Redeemed::Done)));
            redeemed.map_err(|error| error.kind())
        };
        for number in 0..USED_MAX {
            // One id expires early.
            let until = in_seconds(if number == 5 { 1 } else { 3_600 });
            assert_eq!(redeem(number, until, START), Ok(Redeemed::Done));
        }
        let full = Err(StoreErrorKind::Unavailable);
        assert_eq!(redeem(USED_MAX, in_seconds(3_600), START), full);
        assert_eq!(redeem(7, in_seconds(3_600), START), Ok(Redeemed::AlreadyUsed));
        assert_eq!(redeem(USED_MAX, START, START), Ok(Redeemed::Expired));
        assert_eq!(redeem(USED_MAX, in_seconds(3_600), in_seconds(1)), Ok(Redeemed::Done));
        assert_eq!(redeem(USED_MAX + 1, in_seconds(3_600), in_seconds(1)), full);
        {
            let table = receipts.0.lock();
            let bytes = table.used.capacity() * 8 / 7 * 17 + table.by_expiry.capacity() * 24;
            assert_eq!(size_of::<(Timestamp, ReceiptId)>(), 24);
            assert!(bytes < 62_000_000, "{bytes}");
        }
        assert_eq!(redeem(1, in_seconds(7_200), in_seconds(3_600)), Ok(Redeemed::Done));
        let table = receipts.0.lock();
        assert_eq!((table.used.len(), table.by_expiry.len()), (1, 1));
        assert!(table.used.capacity() < 4 * CAPACITY_MIN && table.by_expiry.capacity() < 4 * CAPACITY_MIN);
    }

    #[test]
    fn one_of_many_threads_redeems_an_id() {
        const THREADS: usize = 16;
        let store = MemoryStore::new();
        let demand = demand("100/h", "ann").cost(40);
        let check = Check::one(&demand);
        for round in 0..50 {
            store.reset(&demand);
            assert!(store.check(&check).allowed());
            let decision = store.check(&check);
            let until = decision.at.plus_micros(Duration::from_secs(600).as_micros() as u64);
            let redemption = Redemption::new(id(round), b"ann", until).refund(check, &decision);
            let done = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| match store.redeem(&redemption).unwrap() {
                        Redeemed::Done => assert_eq!(done.fetch_add(1, Ordering::Relaxed), 0),
                        redeemed => {
                            assert_eq!(redeemed, Redeemed::AlreadyUsed);
                            assert_eq!(store.inspect(&demand).remaining, 60, "the other thread is done");
                        }
                    });
                }
            });
            assert_eq!(done.into_inner(), 1);
            assert_eq!(store.inspect(&demand).remaining, 60);
        }
    }
}
