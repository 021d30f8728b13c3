//! The bans at run time that engines match with requests: the entries of a ban list, compiled.
//!
//! ```text
//!   ip:203.0.113.9      ip:2001:db8::/64      ip:198.51.100.0/24      networks, matched with the client's address
//!   ip:~d37d6c9c…       api_key:#4e738ca5…    user:42                 parts of subjects, matched as texts
//!   subject:…           key:…                                         not matched: the store refuses these subjects
//! ```
//!
//! With `anonymize`, the entry of a client has a pseudonym whose salt does not depend on the date. A network that
//! contains several clients is always written as it is.

use std::collections::HashMap;

use ipnet::IpNet;
use percent_encoding::{AsciiSet, CONTROLS, percent_encode};
use sha2::{Digest, Sha256};
use tidegate_core::{BAN_ENTRY_BYTES_MAX, BanListing, Timestamp};

use super::lists::is_in_force;
use crate::identity::{Identity, Networks, PrefixTable, SubjectKey};

/// What entries begin with that the store refuses by itself ([`Limiter::ban`](crate::Limiter::ban)): subjects that rules
/// count, and keys of explicit checks.
const SUBJECT: &str = "subject:";
const KEY: &str = "key:";

/// The bans of a ban list, by network, API key and user.
#[derive(Clone, Debug, Default)]
pub struct ClientBans {
    version: u64,
    networks: PrefixTable<ClientBan>,
    /// The bans on other parts of subjects: pseudonyms of addresses, API keys and users.
    parts: HashMap<Box<str>, ClientBan>,
    has_pseudonyms: bool,
    has_keys: bool,
    has_users: bool,
}

/// A ban at run time, temporary or permanent.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ClientBan {
    /// The entry of the ban list, such as `ip:203.0.113.0/24`.
    pub entry: Box<str>,
    /// When the ban ends; `None` if it is permanent.
    pub until: Option<Timestamp>,
}

impl ClientBans {
    /// Compiles a ban list that was read at `now`. Entries of another form are ignored.
    pub fn new(listing: &BanListing, now: Timestamp) -> ClientBans {
        let mut bans = ClientBans { version: listing.version, ..ClientBans::default() };
        let mut networks = Vec::new();
        for listed in &listing.bans {
            let until = listed.remaining.as_micros().map(|us| now.plus_micros(us));
            let ban = ClientBan { entry: listed.entry.clone(), until };
            match listed.entry.split_once(':') {
                Some(("ip", value)) if value.starts_with('~') => bans.has_pseudonyms = true,
                Some(("ip", value)) => {
                    let parsed = Networks::parse([value]).ok();
                    networks.extend(parsed.iter().flat_map(Networks::iter).map(|network| (network, ban.clone())));
                    continue;
                }
                Some(("api_key", _)) => bans.has_keys = true,
                Some(("user", _)) => bans.has_users = true,
                _ => continue,
            }
            bans.parts.insert(listed.entry.clone(), ban);
        }
        bans.networks = PrefixTable::new(networks, |_, _| ());
        bans
    }

    /// Returns the entry of the ban list for a network.
    ///
    /// A network of one address has the text of that address, as in subjects.
    pub fn network_entry(network: IpNet) -> String {
        if network.prefix_len() == network.max_prefix_len() {
            format!("ip:{}", network.addr())
        } else {
            format!("ip:{network}")
        }
    }

    /// Returns the entry of the ban list for a subject that rules count and [`Limiter::ban`](crate::Limiter::ban)
    /// refuses.
    ///
    /// Bytes other than visible ASCII, and `%`, are written as `%XX`. A subject that is then too long for an entry is
    /// written as `%h` and its SHA-256 in hexadecimal.
    pub fn subject_entry(subject: &[u8]) -> String {
        stored_entry(SUBJECT, subject)
    }

    /// Returns the entry of the ban list for the key of explicit checks, written like a
    /// [subject](ClientBans::subject_entry).
    pub fn key_entry(key: &[u8]) -> String {
        stored_entry(KEY, key)
    }

    /// Returns the version of the ban list.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns whether no ban can refuse a request.
    pub fn is_empty(&self) -> bool {
        self.networks.is_empty() && self.parts.is_empty()
    }

    /// Returns the ban on the client's address, or on a network that contains it, that is in force at `now`. `None` if there
    /// is none.
    ///
    /// If there are several on networks, returns that of the smallest.
    pub(crate) fn of_address(&self, identity: &Identity<'_>, now: Timestamp) -> Option<&ClientBan> {
        let in_force = |ban: &&ClientBan| is_in_force(ban.until, now);
        let of_network = self.networks.covering(identity.address()).find(in_force);
        of_network.or_else(|| if self.has_pseudonyms { self.of_parts(identity.address_entries(), now) } else { None })
    }

    /// Returns the ban on an API key in the request, else on its verified user, that is in force at `now`. `None` if there
    /// is none.
    ///
    /// The key may be in any API key header or bearer token, and need not be known.
    pub(crate) fn of_caller(&self, identity: &Identity<'_>, now: Timestamp) -> Option<&ClientBan> {
        let of_key = || self.of_parts(identity.key_entries(), now);
        let of_user = || self.of_parts(identity.user_entries(), now);
        let of_key = if self.has_keys { of_key() } else { None };
        of_key.or_else(|| if self.has_users { of_user() } else { None })
    }

    fn of_parts(&self, entries: impl Iterator<Item = SubjectKey>, now: Timestamp) -> Option<&ClientBan> {
        let mut entries = entries.filter_map(|entry| self.parts.get(entry.as_str()));
        entries.find(|ban| is_in_force(ban.until, now))
    }
}

/// Writes an entry for a subject or key after `kind`.
fn stored_entry(kind: &str, subject: &[u8]) -> String {
    const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'%');
    let mut entry = format!("{kind}{}", percent_encode(subject, ESCAPED));
    if entry.len() > BAN_ENTRY_BYTES_MAX {
        entry = format!("{kind}%h");
        Sha256::digest(subject).iter().for_each(|byte| entry.push_str(&format!("{byte:02x}")));
    }
    entry
}
