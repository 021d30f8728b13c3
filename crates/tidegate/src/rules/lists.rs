//! Exemptions and bans.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use ipnet::IpNet;
use tidegate_core::Timestamp;

use super::path::{LazyReadings, Readings};
use super::trie::Trie;
use crate::identity::{Identity, KeyDigest, Networks, PrefixTable};

/// Client addresses and paths whose requests are never limited.
///
/// Exempt API keys are not in this list; see [`KnownKey::exempt`](field@crate::identity::KnownKey::exempt).
#[derive(Clone, Debug, Default)]
pub(crate) struct ExemptList {
    pub(crate) addresses: Networks,
    pub(crate) paths: Trie,
}

impl ExemptList {
    /// Returns whether the path is exempt under each of its [readings](Readings), the paths that servers may take it
    /// for.
    ///
    /// If only `/health` is exempt, `/health/../admin` is not. `false` if the path has too many readings to compute.
    pub(crate) fn has_path(&self, readings: &LazyReadings<'_>) -> bool {
        // Most paths are not exempt after one decoding. Then the other readings are not needed.
        !self.paths.is_empty()
            && self.paths.contains(&readings.decoded_once())
            && match readings.get() {
                Readings::Each(texts) => texts.iter().all(|text| self.paths.contains(text)),
                Readings::Any => false,
            }
    }
}

/// A ban from the configuration file or [`Rules::ban`](super::Rules::ban), temporary or permanent.
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

    /// Returns the configured reason, or `None` if none is configured. It is for operators; clients do not see it.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// Returns a sort key: bans that end later compare greater, and a permanent ban compares greatest.
    fn end_order(&self) -> (bool, Option<Timestamp>) {
        (self.until.is_none(), self.until)
    }
}

/// The bans in the configuration, by network, API key and user.
#[derive(Clone, Debug, Default)]
pub(crate) struct BanList {
    pub(crate) networks: PrefixTable<CompiledBan>,
    pub(crate) keys: HashMap<KeyDigest, CompiledBan>,
    pub(crate) users: HashMap<Box<str>, CompiledBan>,
}

impl BanList {
    /// Replaces all bans on networks. If a network has two bans, the one that ends later is kept.
    pub(crate) fn set_networks(&mut self, bans: Vec<(IpNet, CompiledBan)>) {
        self.networks = PrefixTable::new(bans, |kept, ban| {
            if kept.end_order() < ban.end_order() {
                *kept = ban;
            }
        });
    }

    /// Adds the ban on an API key. If the key is already banned, the ban that ends later is kept.
    pub(crate) fn add_key(&mut self, key: KeyDigest, ban: CompiledBan) {
        keep_longer(self.keys.entry(key), ban);
    }

    /// Adds the ban on a user. If the user is already banned, the ban that ends later is kept.
    pub(crate) fn add_user(&mut self, user: &str, ban: CompiledBan) {
        keep_longer(self.users.entry(user.into()), ban);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.networks.is_empty() && self.keys.is_empty() && self.users.is_empty()
    }

    /// Returns the ban on a network that contains the client's address and that is in force at `now`. `None` if there is
    /// none.
    ///
    /// If there are several, returns that of the smallest network. Determines the address only if there are bans on
    /// networks.
    #[inline]
    pub(crate) fn of_address(&self, identity: &Identity<'_>, now: Timestamp) -> Option<&CompiledBan> {
        if self.networks.is_empty() {
            return None;
        }
        self.networks.covering(identity.address()).find(|ban| is_in_force(ban.until, now))
    }

    /// Returns the ban on an API key in the request, else on its verified user, that is in force at `now`. `None` if there
    /// is none.
    ///
    /// The key may be in any API key header or bearer token, and need not be known: the upstream may read another
    /// header, and know more keys. Hashes the keys only if there are bans on keys, and verifies the token only if there
    /// are bans on users.
    #[inline]
    pub(crate) fn of_caller(&self, identity: &Identity<'_>, now: Timestamp) -> Option<&CompiledBan> {
        let of_sent_keys = || identity.sent_key_digests().find_map(|key| self.of_key(&key, now));
        let of_key = if self.keys.is_empty() { None } else { of_sent_keys() };
        of_key.or_else(|| if self.users.is_empty() { None } else { self.of_user(&identity.user()?.subject, now) })
    }

    /// Returns the ban on an API key if it has one that is in force at `now`, else `None`.
    pub(crate) fn of_key(&self, key: &KeyDigest, now: Timestamp) -> Option<&CompiledBan> {
        self.keys.get(key).filter(|ban| is_in_force(ban.until, now))
    }

    /// Returns the ban on a user if it has one that is in force at `now`, else `None`.
    pub(crate) fn of_user(&self, user: &str, now: Timestamp) -> Option<&CompiledBan> {
        self.users.get(user).filter(|ban| is_in_force(ban.until, now))
    }
}

/// Returns whether a ban is in force at `now`: it is permanent (`until` is `None`), or `now` is before its end.
pub(super) fn is_in_force(until: Option<Timestamp>, now: Timestamp) -> bool {
    until.is_none_or(|until| now < until)
}

fn keep_longer<K>(entry: Entry<'_, K, CompiledBan>, ban: CompiledBan) {
    match entry {
        Entry::Occupied(mut kept) if kept.get().end_order() < ban.end_order() => drop(kept.insert(ban)),
        Entry::Occupied(_) => {}
        Entry::Vacant(vacant) => drop(vacant.insert(ban)),
    }
}
