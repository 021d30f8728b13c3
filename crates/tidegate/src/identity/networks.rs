//! Sets of networks, for trusted proxies, exempt addresses and the address ranges of plans.

use std::net::IpAddr;
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net};

use super::address::{embedded_v4, embedded_v4_network};

/// Maximum length of the text of one network.
const TEXT_BYTES_MAX: usize = 64;

/// A set of IPv4 and IPv6 networks.
///
/// ```
/// use tidegate::identity::Networks;
///
/// let networks = Networks::parse(["10.0.0.0/8", "2001:db8::/32", "192.0.2.7"])?;
/// assert!(networks.contains("10.1.2.3".parse().unwrap()));
/// assert!(networks.contains("::ffff:192.0.2.7".parse().unwrap()));
/// assert!(!networks.contains("192.0.2.8".parse().unwrap()));
/// # Ok::<(), tidegate::identity::NetworkError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Networks {
    /// Disjoint and sorted, IPv4 first. An IPv6 network that contains an IPv4 network is stored as the IPv4 network.
    networks: Vec<IpNet>,
}

/// The error for a text that is not a network.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{problem} (found {found:?}); networks and addresses have the form 10.0.0.0/8, 203.0.113.7, 2001:db8::/32 or ::1"
)]
pub struct NetworkError {
    problem: String,
    found: String,
}

impl Networks {
    /// Parses a set of networks. Each text is `ADDRESS/BITS` or a single address.
    ///
    /// # Errors
    /// Fails if a text is not a network, or if its address has bits after the prefix. In `10.1.2.3/8` either the
    /// address or the size is wrong, and the choice decides which machines are trusted.
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Networks, NetworkError> {
        let networks: Vec<IpNet> = texts.into_iter().map(parse_network).collect::<Result<_, _>>()?;
        Ok(networks.into_iter().collect())
    }

    /// Returns whether `address` is in one of the networks.
    ///
    /// An IPv4-mapped address is treated as IPv4. An address in `64:ff9b::/96` or `2002::/16` matches networks of the
    /// IPv4 address that it contains, and also wider IPv6 networks such as `2000::/3`.
    #[inline]
    pub fn contains(&self, address: IpAddr) -> bool {
        !self.networks.is_empty() && search_addresses(address).any(|address| self.find(address))
    }

    fn find(&self, address: IpAddr) -> bool {
        let after = self.networks.partition_point(|network| network.network() <= address);
        after.checked_sub(1).is_some_and(|before| self.networks[before].contains(&address))
    }

    /// Returns whether the set has no networks.
    pub fn is_empty(&self) -> bool {
        self.networks.is_empty()
    }

    /// Returns whether the set contains all IPv4 addresses, or all IPv6 addresses, or both.
    pub fn contains_all_v4_or_v6(&self) -> bool {
        self.networks.iter().any(|network| network.prefix_len() == 0)
    }

    /// Returns the networks, sorted, IPv4 first.
    ///
    /// They may differ from those that were parsed: overlapping networks, and adjacent ones that form a larger network,
    /// are merged, and an IPv6 network of IPv4 addresses is an IPv4 network.
    pub fn iter(&self) -> impl Iterator<Item = IpNet> + '_ {
        self.networks.iter().copied()
    }
}

impl FromIterator<IpNet> for Networks {
    fn from_iter<I: IntoIterator<Item = IpNet>>(networks: I) -> Networks {
        let networks: Vec<IpNet> = networks.into_iter().map(|network| unmap(network.trunc())).collect();
        let mut networks = IpNet::aggregate(&networks);
        networks.sort_unstable();
        Networks { networks }
    }
}

impl FromStr for Networks {
    type Err = NetworkError;

    /// Parses networks separated by commas or spaces, as in an environment variable. An empty text is an empty set.
    ///
    /// # Errors
    /// As [`Networks::parse`].
    fn from_str(text: &str) -> Result<Networks, NetworkError> {
        Networks::parse(text.split([',', ' ']).filter(|word| !word.is_empty()))
    }
}

fn parse_network(text: &str) -> Result<IpNet, NetworkError> {
    let error = |problem: &str| NetworkError {
        problem: problem.to_owned(),
        found: text.chars().take(TEXT_BYTES_MAX).collect(),
    };
    if text.len() > TEXT_BYTES_MAX {
        return Err(error("too long for a network"));
    }
    let Some((address, bits)) = text.split_once('/') else {
        return text.parse::<IpAddr>().map(|address| unmap(address.into())).map_err(|_| error("expected a network"));
    };
    let address: IpAddr = address.parse().map_err(|_| error("expected an address before the /"))?;
    let bits_max = if address.is_ipv4() { 32 } else { 128 };
    let network = (!bits.is_empty() && bits.bytes().all(|byte| byte.is_ascii_digit()))
        .then(|| bits.parse().ok().and_then(|bits| IpNet::new(address, bits).ok()))
        .flatten()
        .ok_or_else(|| error(&format!("expected a prefix length from 0 to {bits_max} after the /")))?;
    if network.trunc() != network {
        return Err(error(&format!("the address has host bits set; write {}", network.trunc())));
    }
    Ok(unmap(network))
}

/// Returns the IPv4 network inside an IPv6 network, or the network itself if there is none.
fn unmap(network: IpNet) -> IpNet {
    let IpNet::V6(v6) = network else { return network };
    match embedded_v4_network(v6.network(), v6.prefix_len()) {
        Some((v4, bits)) => Ipv4Net::new_assert(v4, bits).into(),
        None => network,
    }
}

/// Returns the addresses to search for in networks: the IPv4 address that `address` contains, if any, then `address`
/// itself unless it is IPv4-mapped.
pub(crate) fn search_addresses(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let embedded = embedded_v4(address);
    let itself = Some(address.to_canonical()).filter(|address| *address != embedded);
    std::iter::once(embedded).chain(itself)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks(text: &str) -> Networks {
        text.parse().unwrap()
    }

    #[test]
    fn membership_agrees_with_a_search_of_each_network() {
        let texts = ["10.0.0.0/8", "10.1.0.0/16", "11.0.0.0/8", "192.0.2.7", "::1", "2001:db8::/32", "fe80::/10"];
        let set = Networks::parse(texts).unwrap();
        let single: Vec<IpNet> = texts.iter().map(|text| parse_network(text).unwrap()).collect();
        for text in [
            "9.255.255.255",
            "10.0.0.0",
            "10.255.255.255",
            "11.255.255.255",
            "12.0.0.0",
            "192.0.2.6",
            "192.0.2.7",
            "192.0.2.8",
            "255.255.255.255",
            "0.0.0.0",
            "::",
            "::1",
            "::2",
            "2001:db7:ffff::",
            "2001:db8::",
            "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff",
            "2001:db9::",
            "fe80::1",
            "febf::",
            "fec0::",
        ] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(set.contains(address), single.iter().any(|net| net.contains(&address)), "{text}");
        }
    }

    #[test]
    fn mapped_networks_and_mapped_addresses_are_ipv4() {
        assert_eq!(networks("::ffff:10.0.0.0/104"), networks("10.0.0.0/8"));
        assert_eq!(networks("::ffff:a00:1"), networks("10.0.0.1"));
        assert!(networks("10.0.0.0/8").contains("::ffff:10.9.9.9".parse().unwrap()));
        assert!(!networks("::/0").contains("10.9.9.9".parse().unwrap()), "an IPv6 network contains no IPv4 address");
    }

    #[test]
    fn ipv6_networks_that_contain_ipv4_are_stored_as_ipv4() {
        for (text, same) in [
            ("64:ff9b::10.0.0.0/104", "10.0.0.0/8"),
            ("64:ff9b::10.0.0.1", "10.0.0.1"),
            ("64:ff9b::/96", "0.0.0.0/0"),
            ("2002:a00::/24", "10.0.0.0/8"),
            ("2002:a00:1::/48", "10.0.0.1"),
            ("2002:a00:1:2::/64", "10.0.0.1"),
            ("2002:a00:1::5", "10.0.0.1"),
        ] {
            assert_eq!(networks(text), networks(same), "{text}");
        }
        let ten = networks("10.0.0.0/8");
        for text in ["64:ff9b::10.9.9.9", "64:ff9b::a09:909", "2002:a09:909::1", "2002:a09:909:ffff:1:2:3:4"] {
            assert!(ten.contains(text.parse().unwrap()), "{text}");
        }
        for text in ["64:ff9b:1::10.9.9.9", "::10.9.9.9", "2003:a09:909::1", "64:ff9a::10.9.9.9"] {
            assert!(!ten.contains(text.parse().unwrap()), "{text} contains no IPv4 address");
        }
        // A wider IPv6 network contains no IPv4 address, but it contains the IPv6 addresses with an IPv4 address
        // inside.
        let wide = networks("2000::/3, 64::/16");
        assert!(!wide.contains("10.9.9.9".parse().unwrap()));
        assert!(
            wide.contains("2002:a09:909::1".parse().unwrap()) && wide.contains("64:ff9b::a09:909".parse().unwrap())
        );
    }

    #[test]
    fn set_of_all_addresses_is_recognised_even_in_two_halves() {
        for text in ["0.0.0.0/0", "::/0", "0.0.0.0/1 128.0.0.0/1", "10.0.0.0/8,::ffff:0:0/96"] {
            assert!(networks(text).contains_all_v4_or_v6(), "{text}");
        }
        assert!(!networks("0.0.0.0/1").contains_all_v4_or_v6());
        assert!(networks("").is_empty() && !networks("").contains("::1".parse().unwrap()));
    }

    #[test]
    fn error_says_what_a_network_looks_like() {
        for (text, expected) in [
            ("10.0.0.0/33", "prefix length from 0 to 32"),
            ("::/129", "prefix length from 0 to 128"),
            ("10.0.0.0/", "prefix length from 0 to 32"),
            ("10.0.0.0/+8", "prefix length from 0 to 32"),
            ("10.0.0.0/255.0.0.0", "prefix length from 0 to 32"),
            ("10.1.2.3/8", "write 10.0.0.0/8"),
            ("2001:db8::1/32", "write 2001:db8::/32"),
            ("10.0.0", "expected a network"),
            ("localhost", "expected a network"),
            ("localhost/8", "before the /"),
            ("*", "expected a network"),
        ] {
            let message = Networks::parse([text]).unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains(text), "{text}: {message}");
            assert!(message.contains("networks and addresses have the form"), "{message}");
        }
        let message = Networks::parse(["9".repeat(10_000).as_str()]).unwrap_err().to_string();
        assert!(message.len() < 300, "{}", message.len());
        assert!(Networks::parse([""]).is_err());
    }
}
