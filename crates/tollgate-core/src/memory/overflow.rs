//! Counters that newcomers share when there is no room for counters of their own.
//!
//! **Guarantee.** A newcomer never gets more from a shared counter than from one of its own. So whatever it has spent there must
//! count for as long as its limit says, whoever else uses the counter. A log that is judged by a shorter window forgets, a bucket
//! that is judged by a quicker rate drains, and the penalty of a small quota takes the oldest units away. Hence only newcomers of one
//! limit share a counter; of logs and pairs, also those of another quota with the same window, except where refusals are charged.
//!
//! **A flood must not fill all of them.** A shard has up to 1,024 cells for each limit, and a newcomer uses the cell of its network:
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
//! Newcomers from other networks find their cells as they left them. A subject that is not an address has the cell that its hash
//! chooses, so that there a flood of invented subjects fills all cells. Nothing but its name tells such a flood from other newcomers.
//!
//! **Bounded.** Only cells in use take memory. When three quarters of a shard's overflow counters are taken, a limit that has no
//! cell for a newcomer has one counter for all of them, which is used until it has expired; when all are taken (there are many
//! limits, or somebody invents them), the newcomer is refused.
//!
//! | scope | shared by the newcomers of a shard, of one limit |
//! |---|---|
//! | [`OverflowScope::Network`] | in one cell |
//! | [`OverflowScope::Limit`] | in all cells that have no counter of their own |
//!
//! The wider counter covers the cells. As long as it lives, no new cell is begun, so that nothing that was spent on it is forgotten.

use std::hash::Hash;
use std::net::IpAddr;

use crate::limit::{Limit, Machine};

/// What an overflow counter is shared by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OverflowScope {
    /// The newcomers of one limit, of one network or hash.
    Network,
    /// The newcomers of one limit.
    Limit,
}

/// The most cells of a limit in one shard.
pub(super) const CELLS_MAX: usize = 1_024;
/// Of the cells of a wide network, how many its narrow networks are spread over.
pub(super) const COLUMNS: usize = 4;

/// Tells the overflow counters of one limit apart from those of another.
pub(super) fn of_one_limit(limit: &Limit) -> impl Hash {
    let is_shared = !limit.count_denied() && !matches!(limit.machine(), Machine::Bucket(_));
    (limit.window_us(), (!is_shared).then(|| (limit.quota(), limit.cost_max(), limit.count_denied())))
}

/// The networks of an address: what addresses that one sender can choose from have in common.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Network {
    /// 8 bits of an IPv4 address, 32 of an IPv6 address.
    pub(super) wide: (bool, u32),
    /// 24 bits, or 48.
    narrow: u64,
}

impl Network {
    /// Returns the network of the first address in a subject such as `203.0.113.9`, `ip:2001:db8::/64` or `user:!203.0.113.9&path:/`;
    /// `None` if there is no address.
    pub(super) fn of_subject(subject: &[u8]) -> Option<Network> {
        /// Longer parts are not looked at: the longest address has 45 characters.
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
    fn the_network_of_a_subject_is_that_of_its_first_address() {
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
