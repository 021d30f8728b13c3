//! The ban list: the bans at run time that engines match with their requests.
//!
//! A store keeps the entries as texts, with their ends, and does not interpret them. The list is short, because
//! operators write it, so each instance reads it as a whole when its version has changed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::decision::Wait;
use crate::time::Timestamp;

/// The maximum number of entries of a ban list.
pub const BAN_LIST_MAX: usize = 10_000;
/// The maximum length of an entry of a ban list in bytes.
pub const BAN_ENTRY_BYTES_MAX: usize = 256;

/// The ban list of a store at one moment, returned by [`Store::listed_bans`](crate::Store::listed_bans).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct BanListing {
    /// The version, which changes with every change of the list by a caller. 0 if the list was never changed or has
    /// expired as a whole.
    pub version: u64,
    /// The entries that have not ended, sorted by their texts.
    pub bans: Vec<ListedBan>,
}

impl BanListing {
    /// Creates a listing. Sorts the entries.
    pub fn new(version: u64, mut bans: Vec<ListedBan>) -> BanListing {
        bans.sort_by(|one, other| one.entry.cmp(&other.entry));
        BanListing { version, bans }
    }
}

/// An entry of a ban list.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ListedBan {
    /// The text of the entry.
    pub entry: Box<str>,
    /// The time until the ban ends, counted from the moment of the listing; [`Wait::NEVER`] if it is permanent.
    pub remaining: Wait,
}

impl ListedBan {
    /// Creates an entry.
    pub fn new(entry: impl Into<Box<str>>, remaining: Wait) -> ListedBan {
        ListedBan { entry: entry.into(), remaining }
    }
}

/// The ban list of the memory store.
#[derive(Default)]
pub(crate) struct BanTexts {
    /// The version, readable without the lock. Changed only while the lock is held.
    version: AtomicU64,
    /// The end of each entry; `None` if it is permanent.
    ends: Mutex<BTreeMap<Box<str>, Option<Timestamp>>>,
}

impl BanTexts {
    /// Adds or replaces an entry that ends after `duration`. Drops the entries that have ended at `now`.
    ///
    /// Returns `false`, and adds nothing, if there are [`BAN_LIST_MAX`] other entries.
    pub(crate) fn add(&self, entry: &str, duration: Option<Duration>, now: Timestamp) -> bool {
        let mut ends = self.ends.lock();
        drop_ended(&mut ends, now);
        if ends.len() >= BAN_LIST_MAX && !ends.contains_key(entry) {
            return false;
        }
        ends.insert(entry.into(), end_after(duration, now));
        self.version.fetch_add(1, Ordering::Release);
        true
    }

    /// Removes an entry, and drops those that have ended at `now`. Returns whether there was one that had not.
    pub(crate) fn remove(&self, entry: &str, now: Timestamp) -> bool {
        let mut ends = self.ends.lock();
        drop_ended(&mut ends, now);
        let was_listed = ends.remove(entry).is_some();
        self.version.fetch_add(u64::from(was_listed), Ordering::Release);
        was_listed
    }

    /// Returns the version of the list. Takes no lock.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Returns the entries at `now`, or `None` if the version is `known`.
    pub(crate) fn listing(&self, known: Option<u64>, now: Timestamp) -> Option<BanListing> {
        let ends = self.ends.lock();
        let version = self.version();
        if known == Some(version) {
            return None;
        }
        let bans = ends.iter().filter_map(|(entry, end)| Some(ListedBan::new(entry.clone(), remaining(*end, now)?)));
        Some(BanListing::new(version, bans.collect()))
    }
}

/// Returns the time from `now` until a ban with this `end` ends, or `None` if it has ended.
///
/// No `end` is [`Wait::NEVER`].
pub(crate) fn remaining(end: Option<Timestamp>, now: Timestamp) -> Option<Wait> {
    match end {
        None => Some(Wait::NEVER),
        Some(end) if end > now => Some(Wait::from_micros(end.as_micros() - now.as_micros())),
        Some(_) => None,
    }
}

fn drop_ended(ends: &mut BTreeMap<Box<str>, Option<Timestamp>>, now: Timestamp) {
    ends.retain(|_, end| end.is_none_or(|end| end > now));
}

/// Returns the end of a ban that starts at `now`; `None` if it is permanent or would end at [`Timestamp::MAX`] or later.
pub(crate) fn end_after(duration: Option<Duration>, now: Timestamp) -> Option<Timestamp> {
    let us = duration.and_then(|duration| u64::try_from(duration.as_micros()).ok());
    let end = us.and_then(|us| now.as_micros().checked_add(us)).filter(|&us| us < Timestamp::MAX.as_micros());
    end.map(Timestamp::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
    const MINUTE: Option<Duration> = Some(Duration::from_secs(60));

    fn texts(list: &BanTexts, now: Timestamp) -> Vec<String> {
        list.listing(None, now).unwrap().bans.iter().map(|ban| ban.entry.to_string()).collect()
    }

    #[test]
    fn listing_has_the_entries_that_have_not_ended_and_is_omitted_for_a_known_version() {
        let list = BanTexts::default();
        assert_eq!(list.listing(Some(0), START), None);
        assert!(list.add("b", MINUTE, START) && list.add("a", None, START));
        let later = START.plus_micros(59_000_000);
        let listing = list.listing(Some(0), later).unwrap();
        let expected = vec![ListedBan::new("a", Wait::NEVER), ListedBan::new("b", Wait::from_micros(1_000_000))];
        assert_eq!(listing.bans, expected);
        assert_eq!(list.listing(Some(listing.version), later), None);
        assert_eq!(texts(&list, START.plus_micros(60_000_000)), ["a"]);
        assert!(!list.remove("b", START.plus_micros(60_000_000)), "it has ended");
        assert!(list.remove("a", later) && !list.remove("a", later));
        assert_ne!(list.listing(None, later).unwrap().version, listing.version);
    }

    #[test]
    fn full_list_takes_no_more_entries_until_one_has_ended() {
        let list = BanTexts::default();
        for number in 0..BAN_LIST_MAX {
            assert!(list.add(&number.to_string(), MINUTE, START));
        }
        assert!(!list.add("one more", MINUTE, START));
        assert!(list.add("7", None, START), "an entry can be replaced");
        assert!(list.add("one more", None, START.plus_micros(60_000_000)));
        assert_eq!(texts(&list, START.plus_micros(60_000_000)), ["7", "one more"]);
    }
}
