//! Finds the values of all networks that contain an address.
//!
//! ```text
//!   10.0.0.0/8      ◀──────┐        sorted by first address, then by prefix length;
//!   10.1.0.0/16     ◀───┐  │        each entry refers to the smallest network that contains it
//!   10.1.2.0/24     ────┘  │
//!   10.9.0.0/16     ───────┘
//!   192.0.2.7/32
//! ```
//!
//! Two networks are nested or disjoint. So the networks that contain an address are found among the last network that
//! begins at or before the address and the networks around that one. A lookup is a binary search and one step per level
//! of nesting, however many networks there are.

use std::net::IpAddr;

use ipnet::IpNet;

use super::networks::search_addresses;
use crate::rules::comparisons;

/// A map from networks to values, in which an address finds the values of all networks that contain it.
#[derive(Clone, Debug)]
pub(crate) struct PrefixTable<T> {
    entries: Vec<PrefixEntry<T>>,
}

#[derive(Clone, Debug)]
struct PrefixEntry<T> {
    network: IpNet,
    value: T,
    /// Index of the smallest network that contains this one.
    parent: Option<usize>,
}

impl<T> Default for PrefixTable<T> {
    fn default() -> Self {
        PrefixTable { entries: Vec::new() }
    }
}

impl<T> PrefixTable<T> {
    /// Creates a table. If a network occurs again, `merge(first, next)` is called to combine the next value into the
    /// first, and the next value is not stored.
    ///
    /// Networks must be truncated (no bits set after the prefix). An IPv6 network of IPv4 addresses must be passed as
    /// the IPv4 network, because [`covering`](PrefixTable::covering) searches for the IPv4 address.
    pub(crate) fn new(values: impl IntoIterator<Item = (IpNet, T)>, merge: impl Fn(&mut T, T)) -> PrefixTable<T> {
        let mut values: Vec<(IpNet, T)> = values.into_iter().collect();
        values.sort_by_key(|(network, _)| *network);
        let mut entries: Vec<PrefixEntry<T>> = Vec::with_capacity(values.len());
        for (network, value) in values {
            // Networks that contain this one sort before it, so they are in the table already.
            let mut parent = entries.len().checked_sub(1);
            while let Some(index) = parent.filter(|index| !entries[*index].network.contains(&network)) {
                parent = entries[index].parent;
            }
            match parent.map(|index| &mut entries[index]) {
                Some(same) if same.network == network => merge(&mut same.value, value),
                _ => entries.push(PrefixEntry { network, value, parent }),
            }
        }
        PrefixTable { entries }
    }

    /// Returns whether the table has no networks.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the values of all networks that contain `address`, the smallest network first.
    ///
    /// For an IPv6 address that contains an IPv4 address, the values of its IPv4 networks come first, then those of its
    /// IPv6 networks.
    pub(crate) fn covering(&self, address: IpAddr) -> impl Iterator<Item = &T> {
        search_addresses(address).flat_map(|address| self.covering_exactly(address))
    }

    fn covering_exactly(&self, address: IpAddr) -> impl Iterator<Item = &T> {
        let after = self.entries.partition_point(|entry| {
            comparisons::count();
            entry.network.network() <= address
        });
        let outwards = std::iter::successors(after.checked_sub(1), |index| {
            comparisons::count();
            self.entries[*index].parent
        });
        let entries = outwards.map(|index| &self.entries[index]);
        entries.filter(move |entry| entry.network.contains(&address)).map(|entry| &entry.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table_of(networks: &[&str]) -> PrefixTable<String> {
        let networks = networks.iter().map(|text| (text.parse().unwrap(), text.to_string()));
        PrefixTable::new(networks, |kept, other| *kept = format!("{kept}, {other}"))
    }

    fn covering<'t>(table: &'t PrefixTable<String>, address: &str) -> Vec<&'t str> {
        table.covering(address.parse().unwrap()).map(String::as_str).collect()
    }

    #[test]
    fn address_finds_all_networks_that_contain_it_and_no_others() {
        let table = table_of(&[
            "10.0.0.0/8",
            "10.1.2.0/24",
            "192.0.2.7/32",
            "10.1.0.0/16",
            "2000::/3",
            "2001:db8::/32",
            "10.9.0.0/16",
        ]);
        for (address, expected) in [
            ("10.1.2.3", &["10.1.2.0/24", "10.1.0.0/16", "10.0.0.0/8"][..]),
            ("10.1.3.3", &["10.1.0.0/16", "10.0.0.0/8"]),
            ("10.200.0.1", &["10.0.0.0/8"]),
            ("11.0.0.0", &[]),
            ("9.255.255.255", &[]),
            ("192.0.2.7", &["192.0.2.7/32"]),
            ("192.0.2.8", &[]),
            ("2001:db8::1", &["2001:db8::/32", "2000::/3"]),
            ("::1", &[]),
            ("::ffff:10.9.1.1", &["10.9.0.0/16", "10.0.0.0/8"]),
            ("64:ff9b::10.9.1.1", &["10.9.0.0/16", "10.0.0.0/8"]),
            ("2002:a09:101::1", &["10.9.0.0/16", "10.0.0.0/8", "2000::/3"]),
        ] {
            assert_eq!(covering(&table, address), expected, "{address}");
        }
        assert_eq!(covering(&table_of(&["10.0.0.0/8", "10.0.0.0/8"]), "10.0.0.1"), ["10.0.0.0/8, 10.0.0.0/8"]);
        assert!(table_of(&[]).is_empty() && covering(&table_of(&[]), "::1").is_empty());
    }

    #[test]
    fn ten_thousand_networks_cost_a_few_lookups() {
        let networks =
            (0..10_000_u32).map(|n| (IpNet::new(std::net::Ipv4Addr::from_bits(n << 8).into(), 24).unwrap(), n));
        let table = PrefixTable::new(networks, |_, _| {});
        comparisons::take();
        assert_eq!(table.covering([0, 19, 136, 7].into()).collect::<Vec<_>>(), [&5_000]);
        assert!(comparisons::take() <= 16);
        assert_eq!(table.covering([203, 0, 113, 9].into()).next(), None);
        assert!(comparisons::take() <= 16);
    }

    #[test]
    fn lookup_agrees_with_a_search_of_each_network() {
        let mut state = 1_u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state
        };
        // In a small part of the address space, so that networks overlap.
        let networks: Vec<IpNet> = (0..2_000)
            .map(|_| {
                let bits = 8 + (next() >> 24) as u8 % 25;
                IpNet::new(std::net::Ipv4Addr::from_bits(next() & 0x03ff_ffff).into(), bits).unwrap().trunc()
            })
            .collect();
        let table = PrefixTable::new(networks.iter().map(|network| (*network, *network)), |_, _| {});
        for _ in 0..2_000 {
            let address: IpAddr = std::net::Ipv4Addr::from_bits(next() & 0x03ff_ffff).into();
            let mut expected: Vec<IpNet> =
                networks.iter().copied().filter(|network| network.contains(&address)).collect();
            expected.sort_by_key(|network| std::cmp::Reverse(network.prefix_len()));
            expected.dedup();
            assert_eq!(table.covering(address).copied().collect::<Vec<_>>(), expected, "{address}");
        }
    }
}
