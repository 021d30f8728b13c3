//! Overflow counters, which new keys share when there is no room for counters of their own.
//!
//! **Guarantee.** A key never gets more from a shared counter than from one of its own. So its units must count for as
//! long as its limit requires, whichever keys share the counter. Under a shorter window a log would drop entries early,
//! under a higher rate a bucket would leak faster, and with `count_denied` a smaller quota would displace the oldest
//! units. So only keys of one limit share a counter. Logs and pairs are also shared by limits with the same window and
//! another quota, except with `count_denied`.
//!
//! **A flood must not fill all of them.** A shard has up to 1,024 cells per limit, and a new key uses the cell of its
//! network:
//!
//! ```text
//!                  column: by the narrow network (/24, /48)
//!                   0    1    2    3
//!          row 0  [   ][   ][   ][   ]
//!   by the     1  [###][###][###][###]   ◀─ a flood of invented addresses from one /8 (or one /32 in IPv6)
//!   wide       2  [   ][   ][   ][   ]      fills a row, one from a single /24 (or /48) a cell
//!   network    …  [   ][   ][   ][   ]
//! ```
//!
//! The cells of other networks are not affected. The cell of a subject that is not an address is selected by its hash,
//! so a flood of invented subjects fills all cells: only its name distinguishes such a subject from others.
//!
//! **Never two in one check.** If two new keys of a check would share a counter, the check is denied. A further counter
//! for the second key would not have what it charges in other checks, so the key could get more than its quota.
//!
//! **Bounded.** Only cells in use take memory. When three quarters of a shard's overflow counters are in use, all new
//! keys of a limit that have no cell share one counter until it expires. When all are in use (there are many limits, or
//! a client invents limits), a new key is denied.
//!
//! | scope | shared by the new keys of one limit in a shard |
//! |---|---|
//! | [`OverflowScope::Network`] | that belong to one cell |
//! | [`OverflowScope::Limit`] | whose cell has no counter of its own |
//!
//! While a counter of the wider scope exists, no new cell is created, so no unit charged to it is lost.

use std::hash::Hash;
use std::net::IpAddr;

use crate::limit::{Limit, Shape};

/// The keys that share an overflow counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OverflowScope {
    /// The new keys of one limit, and of one network or hash.
    Network,
    /// The new keys of one limit.
    Limit,
}

/// The maximum number of cells of a limit in one shard.
pub(super) const CELLS_MAX: usize = 1_024;
/// The number of cells over which the narrow networks of one wide network are spread.
pub(super) const COLUMNS: usize = 4;

/// Returns a value that is equal for limits whose keys may share overflow counters.
///
/// They must have the same state machine, which is not part of the value, and the same window. Buckets, and limits with
/// `count_denied`, must also have the same quota and capacity.
pub(super) fn sharing_key(limit: &Limit) -> impl Hash {
    let is_shared = !limit.count_denied() && !matches!(limit.shape(), Shape::Bucket(_));
    (limit.window_us(), (!is_shared).then(|| (limit.quota(), limit.cost_max(), limit.count_denied())))
}

/// The wide and the narrow network of an address: /8 and /24 in IPv4, /32 and /48 in IPv6.
///
/// A client that can choose among many addresses usually has them in one network.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Network {
    /// Whether it is IPv4, and the first 8 bits (IPv6: 32) of the address.
    pub(super) wide: (bool, u32),
    /// The first 24 bits (IPv6: 48) of the address.
    narrow: u64,
}

impl Network {
    /// Returns the networks of the first address in a subject; `None` if it has no address.
    ///
    /// A subject is an address, such as `203.0.113.9`, or has parts of the form `kind:value`, separated by `&`, such as
    /// `user:!203.0.113.9&path:/`. Only the first four parts are read, and parts of more than 64 bytes are skipped.
    pub(super) fn of_subject(subject: &[u8]) -> Option<Network> {
        /// The length of the longest address. Longer parts are skipped.
        const PART_BYTES_MAX: usize = 64;
        let parts = subject.split(|byte| *byte == b'&').take(4).filter(|part| part.len() <= PART_BYTES_MAX);
        parts.filter_map(|part| std::str::from_utf8(part).ok()).find_map(|part| {
            let value = part.split_once(':').map_or(part, |(_kind, value)| value);
            [part, value].into_iter().find_map(Network::of_text)
        })
    }

    fn of_text(text: &str) -> Option<Network> {
        let text = text.strip_prefix('!').unwrap_or(text);
        let text = text.split_once('/').map_or(text, |(address, _prefix)| address);
        Some(match text.parse::<IpAddr>().ok()?.to_canonical() {
            IpAddr::V4(address) => {
                let bits = address.to_bits();
                Network { wide: (true, bits >> 24), narrow: u64::from(bits >> 8) }
            }
            IpAddr::V6(address) => {
                let bits = address.to_bits();
                Network { wide: (false, (bits >> 96) as u32), narrow: (bits >> 80) as u64 }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_of_a_subject_is_that_of_its_first_address() {
        let v4 = Network { wide: (true, 203), narrow: 0xCB_0071 };
        for subject in [
            "203.0.113.9",
            "ip:203.0.113.250",
            "ip:203.0.113.9&path:/",
            "user:~abc&ip:203.0.113.9",
            "user:!203.0.113.9",
            "ip:203.0.113.0/24",
            "::ffff:203.0.113.9",
            "ip:::ffff:203.0.113.9",
        ] {
            assert_eq!(Network::of_subject(subject.as_bytes()), Some(v4), "{subject}");
        }
        let v6 = Network { wide: (false, 0x2001_0DB8), narrow: 0x2001_0DB8_0001 };
        for subject in ["2001:db8:1:2::3", "ip:2001:db8:1:2::/64", "api_key:!2001:db8:1:ffff::/64"] {
            assert_eq!(Network::of_subject(subject.as_bytes()), Some(v6), "{subject}");
        }
        for subject in ["", "user:42", "ip:", "ip:~0123", "global", "header:x:y", "path:/203.0.113.9", "ip:203.0.113"] {
            assert_eq!(Network::of_subject(subject.as_bytes()), None, "{subject}");
        }
        assert_eq!(Network::of_subject(&[0xFF; 70_000]), None);
        assert_eq!(Network::of_subject(&b"&".repeat(65_536)), None);
    }
}
