//! Exemptions and bans.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;

use ipnet::IpNet;
use tollgate_core::Timestamp;

use super::path::{LazyReadings, Readings};
use super::trie::Trie;
use crate::identity::{KeyDigest, Networks, PrefixTable};

/// Addresses and paths that are never limited. The exemption of a key is in its [`KeyEntry`](super::KeyEntry).
#[derive(Clone, Debug, Default)]
pub(crate) struct ExemptList {
    pub(crate) addresses: Networks,
    pub(crate) paths: Trie,
}

impl ExemptList {
    /// Returns whether every reading of the path is exempt: `/health/../admin` is not `/health`.
    pub(crate) fn has_path(&self, readings: &LazyReadings<'_>) -> bool {
        // Most paths are not exempt as they are written. Then the other readings are not needed.
        !self.paths.is_empty()
            && self.paths.contains(&readings.written())
            && match readings.get() {
                Readings::Each(texts) => texts.iter().all(|text| self.paths.contains(text)),
                Readings::Any => false,
            }
    }
}

/// A ban from the configuration, temporary or permanent.
#[derive(Clone, Debug)]
pub struct CompiledBan {
    pub(crate) until: Option<Timestamp>,
    pub(crate) reason: Option<Box<str>>,
}

impl CompiledBan {
    /// Returns when the ban ends, or `None` if it is permanent.
    pub fn until(&self) -> Option<Timestamp> {
        self.until
    }

    /// Returns the configured reason, if any. It is meant for people.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    fn holds_at(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }

    /// When it ends, in an order in which never is last.
    fn end(&self) -> (bool, Option<Timestamp>) {
        (self.until.is_none(), self.until)
    }
}

/// The bans of the configuration, by network, key and user.
#[derive(Clone, Debug, Default)]
pub(crate) struct BanList {
    pub(crate) networks: PrefixTable<CompiledBan>,
    pub(crate) keys: HashMap<KeyDigest, CompiledBan>,
    pub(crate) users: HashMap<Box<str>, CompiledBan>,
}

impl BanList {
    /// Sets the bans of networks. Of two bans of one network the longer one is kept.
    pub(crate) fn set_networks(&mut self, bans: Vec<(IpNet, CompiledBan)>) {
        self.networks = PrefixTable::new(bans, |kept, ban| {
            if kept.end() < ban.end() {
                *kept = ban;
            }
        });
    }

    /// Adds the ban of a key. Of two bans of one key the longer one is kept.
    pub(crate) fn add_key(&mut self, key: KeyDigest, ban: CompiledBan) {
        keep_longer(self.keys.entry(key), ban);
    }

    /// Adds the ban of a user. Of two bans of one user the longer one is kept.
    pub(crate) fn add_user(&mut self, user: &str, ban: CompiledBan) {
        keep_longer(self.users.entry(user.into()), ban);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.networks.is_empty() && self.keys.is_empty() && self.users.is_empty()
    }

    /// Returns whether any key or user is banned, so that the address alone does not decide.
    pub(crate) fn name_callers(&self) -> bool {
        !self.keys.is_empty() || !self.users.is_empty()
    }

    /// Returns the first ban that applies to an address at `now`.
    pub(crate) fn of_address(&self, address: IpAddr, now: Timestamp) -> Option<&CompiledBan> {
        self.networks.covering(address).find(|ban| ban.holds_at(now))
    }

    /// Returns the ban that applies to a key at `now`.
    pub(crate) fn of_key(&self, key: &KeyDigest, now: Timestamp) -> Option<&CompiledBan> {
        self.keys.get(key).filter(|ban| ban.holds_at(now))
    }

    /// Returns the ban that applies to a user at `now`.
    pub(crate) fn of_user(&self, user: &str, now: Timestamp) -> Option<&CompiledBan> {
        self.users.get(user).filter(|ban| ban.holds_at(now))
    }
}

fn keep_longer<K>(entry: Entry<'_, K, CompiledBan>, ban: CompiledBan) {
    match entry {
        Entry::Occupied(mut kept) if kept.get().end() < ban.end() => drop(kept.insert(ban)),
        Entry::Occupied(_) => {}
        Entry::Vacant(vacant) => drop(vacant.insert(ban)),
    }
}
