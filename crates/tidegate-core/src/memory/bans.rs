//! Bans in the memory store.
//!
//! Bans are rare, and most stores have none, so a check without bans costs one relaxed load. With bans, it costs a
//! shared lock and a lookup per subject. Bans are few (an operator sets them), so they are bounded in number and not
//! part of the budget for counters. Like counters they are found by a hash, so the length of a subject costs no memory.
//!
//! An expired ban is dropped by the next check, so that the store returns to the quick path by itself.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

use super::counter_hash::CounterHash;
use crate::ban_list::remaining;
use crate::decision::Wait;
use crate::store::{StoreError, StoreErrorKind};
use crate::time::Timestamp;

/// The maximum number of bans: some megabytes.
pub(super) const BANS_MAX: usize = 65_536;

/// The bans of a store, by the hash of the subject.
#[derive(Default)]
pub(super) struct Bans {
    /// The number of bans, readable without the lock.
    count: AtomicUsize,
    table: RwLock<BanTable>,
}

#[derive(Default)]
struct BanTable {
    /// The end of each ban; `None` for good.
    by_subject: HashMap<CounterHash, Option<Timestamp>>,
    /// The bans with an end, the next to end first.
    by_end: BTreeSet<(Timestamp, CounterHash)>,
}

impl Bans {
    /// Returns whether there is no ban. Takes no lock; a ban that another thread sets at this moment may be missed.
    ///
    /// `false` if there are only bans that have ended, until another method drops them.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Bans a subject until `end`, or for good if `None`. Replaces an earlier ban on the subject.
    ///
    /// Also drops all bans that have ended at `now`.
    ///
    /// # Errors
    /// Returns an error of the kind [`StoreErrorKind::Unavailable`] if there are [`BANS_MAX`] bans on other subjects.
    pub(super) fn add(&self, subject: CounterHash, end: Option<Timestamp>, now: Timestamp) -> Result<(), StoreError> {
        let mut table = self.table.write();
        table.drop_expired(now);
        table.remove(subject);
        if table.by_subject.len() >= BANS_MAX {
            let message = format!("the memory store holds {BANS_MAX} bans, its maximum; lift one, or use Redis");
            return Err(StoreError::new(StoreErrorKind::Unavailable, message));
        }
        table.by_subject.insert(subject, end);
        if let Some(end) = end {
            table.by_end.insert((end, subject));
        }
        self.count.store(table.by_subject.len(), Ordering::Relaxed);
        Ok(())
    }

    /// Lifts the ban on a subject. Returns whether there was one at `now`. Also drops all bans that have ended.
    pub(super) fn remove(&self, subject: CounterHash, now: Timestamp) -> bool {
        let mut table = self.table.write();
        table.drop_expired(now);
        let was_banned = table.remove(subject);
        self.count.store(table.by_subject.len(), Ordering::Relaxed);
        was_banned
    }

    /// Returns the time until the longest ban on these subjects ends, or `None` if none of them is banned at `now`.
    ///
    /// [`Wait::NEVER`] if one of them is banned permanently. Drops expired bans on all subjects.
    pub(super) fn longest(&self, subjects: impl Iterator<Item = CounterHash>, now: Timestamp) -> Option<Wait> {
        let table = self.table.read();
        let ends = subjects.filter_map(|subject| table.by_subject.get(&subject));
        let longest = ends.filter_map(|end| remaining(*end, now)).max();
        let has_expired = table.by_end.first().is_some_and(|(end, _)| *end <= now);
        drop(table);
        if has_expired {
            let mut table = self.table.write();
            table.drop_expired(now);
            self.count.store(table.by_subject.len(), Ordering::Relaxed);
        }
        longest
    }
}

impl BanTable {
    fn remove(&mut self, subject: CounterHash) -> bool {
        let removed = self.by_subject.remove(&subject);
        if let Some(Some(end)) = removed {
            self.by_end.remove(&(end, subject));
        }
        removed.is_some()
    }

    fn drop_expired(&mut self, now: Timestamp) {
        while let Some(&(end, subject)) = self.by_end.first()
            && end <= now
        {
            self.remove(subject);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::{Check, Clock, Decision, Demand, Key, ManualClock, MemoryStore, Source};

    const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    fn store() -> (MemoryStore, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::new(START));
        (MemoryStore::builder().clock(clock.clone()).build(), clock)
    }

    fn demand<'a>(limit: &str, subject: &'a str) -> Demand<'a> {
        Demand::new(limit.parse().unwrap(), Key::new(subject).unwrap())
    }

    #[test]
    fn ban_denies_every_limit_until_it_ends_and_charges_nothing() {
        let (store, clock) = store();
        let demands = [demand("5/min", "ann"), demand("9/h fixed-window", "ann"), demand("5/min", "bob")];
        let check = Check::new(&demands).unwrap();
        store.ban(b"ann", Some(Duration::from_secs(60))).unwrap();
        clock.advance(Duration::from_secs(10));
        let left = Wait::from_micros(50_000_000);
        let decision = store.check(&check);
        assert_eq!((decision.ban, decision.allowed(), decision.retry_after()), (Some(left), false, left));
        assert_eq!(decision, Decision::banned(Clock::now(&*clock), Source::Store, left, &check));
        assert!(decision.limits.iter().all(|status| !status.allowed && status.remaining == 0));
        assert_eq!(store.check(&Check::one(&demands[0])).retry_after(), left);
        assert_eq!(store.check_batch(&[Check::one(&demands[0])])[0].ban, Some(left));
        store.refund(&check, &decision);
        for demand in &demands {
            assert_eq!(store.inspect(demand).remaining, demand.limit.quota(), "a peek reads the counter");
        }
        assert!(store.check(&Check::one(&demands[2])).allowed(), "bob is not banned");
        assert_eq!(store.ban_of(b"ann"), Some(left));

        clock.advance(Duration::from_secs(50));
        let decision = store.check(&check);
        assert_eq!((decision.ban, decision.allowed()), (None, true));
        assert!(store.bans.is_empty(), "an expired ban is dropped");
        assert_eq!(store.ban_of(b"ann"), None);
    }

    #[test]
    fn permanent_ban_is_lifted_by_unban_alone_and_the_longest_ban_counts() {
        let (store, clock) = store();
        let demands = [demand("5/min", "ann"), demand("5/min", "bob")];
        let check = Check::new(&demands).unwrap();
        store.ban(b"ann", None).unwrap();
        store.ban(b"bob", Some(Duration::from_secs(1))).unwrap();
        assert_eq!(store.check(&check).ban, Some(Wait::NEVER));
        clock.advance(Duration::from_secs(1_000_000_000));
        assert_eq!(store.check(&check).ban, Some(Wait::NEVER));
        store.ban(b"ann", Some(Duration::from_secs(2))).unwrap();
        assert_eq!(store.ban_of(b"ann"), Some(Wait::from_micros(2_000_000)), "a new ban replaces the old one");
        assert!(store.unban(b"ann"));
        assert!(!store.unban(b"ann") && !store.unban(b"bob"), "bob's ban has ended");
        assert!(store.check(&check).allowed());
        store.ban(b"ann", Some(Duration::MAX)).unwrap();
        assert_eq!(store.ban_of(b"ann"), Some(Wait::NEVER));
    }

    /// A check looks for bans only if the store counts any.
    #[test]
    fn ban_holds_after_others_have_ended_or_were_lifted() {
        let (store, clock) = store();
        let demands = [demand("5/min", "ann"), demand("5/h", "ann")];
        let assert_banned = || {
            assert_eq!(store.check(&Check::one(&demands[0])).ban, Some(Wait::NEVER));
            assert_eq!(store.check(&Check::new(&demands).unwrap()).ban, Some(Wait::NEVER));
        };
        store.ban(b"ann", None).unwrap();
        store.ban(b"bob", None).unwrap();
        store.ban(b"cyd", Some(Duration::from_secs(1))).unwrap();
        assert!(store.unban(b"bob"));
        assert_banned();
        clock.advance(Duration::from_secs(1));
        // The first check drops the ban that has ended.
        assert_banned();
        assert_banned();
        assert_eq!(store.bans.count.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn number_of_bans_is_bounded_and_expired_ones_make_room() {
        let (store, clock) = store();
        let hour = Some(Duration::from_secs(3600));
        for number in 0..BANS_MAX {
            store.ban(&number.to_be_bytes(), hour).unwrap();
        }
        let refused = store.ban(b"one more", hour).unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Unavailable);
        assert_eq!(store.ban_of(b"one more"), None);
        store.ban(&0_usize.to_be_bytes(), None).unwrap();
        clock.advance(Duration::from_secs(3600));
        store.ban(b"one more", hour).unwrap();
        assert_eq!(store.bans.count.load(Ordering::Relaxed), 2);
    }
}
