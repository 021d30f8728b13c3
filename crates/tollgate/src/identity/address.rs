//! Addresses: the forms in which proxies write them, and the part of them that is counted.
//!
//! **One address, many notations.** `203.0.113.9`, `203.0.113.9:4711`, `::ffff:203.0.113.9`,
//! `::ffff:cb00:7109` and `[::ffff:cb00:7109]:4711` are one client. So an address is parsed into
//! bits first, and an IPv4-mapped one becomes IPv4 by looking at the bits: looking at the notation
//! would let the same client through under another spelling. What is not exactly one of the known forms is
//! not an address; nothing is guessed or repaired.
//!
//! **One IPv4 host, three IPv6 networks.** An IPv4 host also reaches an IPv6 server through a translator, as
//! `64:ff9b::203.0.113.9` (RFC 6052), or through a tunnel, as any address in `2002:cb00:7109::/48` (6to4, RFC 3056).
//! [`embedded_v4`] finds the IPv4 address in these bits. Limits, bans, exemptions and address ranges all use it, so a client
//! cannot leave its IPv4 budget or ban by taking such a route.
//!
//! **One client, many addresses.** An IPv6 host owns a whole network, usually a /64, and may use another address
//! for every request. Counting single addresses would give it 2^64 budgets. [`AddressKey`] is the network.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use smallvec::SmallVec;

/// Longer entries are no address: the longest has 45 characters, and brackets, zone and port besides.
const NODE_BYTES_MAX: usize = 128;

/// IPv6 networks whose addresses carry an IPv4 address, and how many bits stand before it: IPv4-mapped `::ffff:0:0/96`,
/// translated `64:ff9b::/96`, and 6to4 `2002::/16`.
const EMBEDDING: [(u128, u8); 3] = [(0xffff << 32, 96), (0x0064_ff9b << 96, 96), (0x2002 << 112, 16)];

/// Returns the IPv4 network that an IPv6 network carries, as an address and a prefix length, or `None` if it carries none.
///
/// What follows the IPv4 address (the inside of a 6to4 site) is dropped.
pub(crate) fn embedded_v4_network(network: Ipv6Addr, prefix: u8) -> Option<(Ipv4Addr, u8)> {
    let bits = network.to_bits();
    let is_in = |&&(embedding, before): &&(u128, u8)| prefix >= before && (bits ^ embedding) >> (128 - before) == 0;
    let (_, before) = *EMBEDDING.iter().find(is_in)?;
    Some((Ipv4Addr::from_bits((bits >> (96 - before)) as u32), (prefix - before).min(32)))
}

/// Returns the IPv4 address that an IPv6 address carries, or the address itself if it carries none.
#[inline]
pub(crate) fn embedded_v4(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => embedded_v4_network(v6, 128).map_or(address, |(v4, _)| v4.into()),
    }
}

/// How much of an address is counted: single IPv4 addresses and /64 networks of IPv6 unless said.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AddressPrefixes {
    v4: u8,
    v6: u8,
}

/// A prefix length that is not 1 to 32 (IPv4) or 1 to 128 (IPv6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("an {family} prefix has 1 to {max} bits, not {bits}")]
pub struct PrefixError {
    family: &'static str,
    max: u8,
    bits: u8,
}

impl AddressPrefixes {
    /// Counts networks of these sizes, given in bits.
    ///
    /// # Errors
    /// When a size is 0, which would count everybody as one, or more than the address has.
    pub const fn new(v4: u8, v6: u8) -> Result<AddressPrefixes, PrefixError> {
        if v4 == 0 || v4 > 32 {
            return Err(PrefixError { family: "IPv4", max: 32, bits: v4 });
        }
        if v6 == 0 || v6 > 128 {
            return Err(PrefixError { family: "IPv6", max: 128, bits: v6 });
        }
        Ok(AddressPrefixes { v4, v6 })
    }

    /// Returns the network of `address` that is counted. An address that carries an IPv4 address (mapped, `64:ff9b::/96`,
    /// `2002::/16`) is counted as that IPv4 address.
    ///
    /// ```
    /// use tollgate::identity::AddressPrefixes;
    ///
    /// let key = |text: &str| AddressPrefixes::default().key(text.parse().unwrap()).to_string();
    /// assert_eq!(key("203.0.113.9"), "203.0.113.9");
    /// assert_eq!(key("::ffff:203.0.113.9"), "203.0.113.9");
    /// assert_eq!(key("64:ff9b::203.0.113.9"), "203.0.113.9");
    /// assert_eq!(key("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
    /// ```
    #[inline]
    pub fn key(&self, address: IpAddr) -> AddressKey {
        match embedded_v4(address) {
            IpAddr::V4(v4) => {
                let network = v4.to_bits() & (u32::MAX << (32 - self.v4));
                AddressKey { network: Ipv4Addr::from_bits(network).into(), prefix: self.v4 }
            }
            IpAddr::V6(v6) => {
                let network = v6.to_bits() & (u128::MAX << (128 - self.v6));
                AddressKey { network: Ipv6Addr::from_bits(network).into(), prefix: self.v6 }
            }
        }
    }
}

impl Default for AddressPrefixes {
    fn default() -> Self {
        AddressPrefixes { v4: 32, v6: 64 }
    }
}

/// The network that stands for a client. Made by [`AddressPrefixes::key`], so it never carries an IPv4 address in IPv6 form.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AddressKey {
    network: IpAddr,
    prefix: u8,
}

/// An octet in decimal with a dot after it, and how long that is. By arithmetic: a table would have to be fetched from memory, piece by
/// piece, by everybody who comes after something else has used the cache.
#[inline]
fn octet_text(octet: u8) -> ([u8; 4], usize) {
    let zeros = usize::from(octet < 10) + usize::from(octet < 100);
    let digits = u32::from_le_bytes([octet / 100, octet / 10 % 10, octet % 10, 0]) + u32::from_le_bytes(*b"000.");
    ((digits >> (8 * zeros)).to_le_bytes(), 4 - zeros)
}

impl AddressKey {
    /// The first address of the network.
    pub const fn network(&self) -> IpAddr {
        self.network
    }

    /// The size of the network, in bits that are the same for all of it.
    pub const fn prefix(&self) -> u8 {
        self.prefix
    }

    /// What `Display` shows, as bytes. Most clients are single IPv4 addresses, and every request of theirs comes by here, so their
    /// digits are written without the machinery of formatting.
    pub(super) fn write(&self, bytes: &mut SmallVec<[u8; 64]>) {
        match self.single_v4_text() {
            Some((text, len)) => bytes.extend_from_slice(&text[..len]),
            None => bytes.extend(self.to_string().bytes()),
        }
    }

    /// What `Display` shows of a single IPv4 address, and how long that is.
    #[inline]
    pub(super) fn single_v4_text(&self) -> Option<([u8; V4_TEXT_BYTES], usize)> {
        let (IpAddr::V4(v4), 32) = (self.network, self.prefix) else { return None };
        let (mut text, mut end) = ([0; V4_TEXT_BYTES], 0);
        for octet in v4.octets() {
            // Four bytes each time, of which the next octet overwrites what is not this one's.
            let (digits, count) = octet_text(octet);
            text[end..end + 4].copy_from_slice(&digits);
            end += count;
        }
        Some((text, end - 1))
    }
}

/// The longest IPv4 address, and the dot that [`octet_text`] puts behind it.
pub(super) const V4_TEXT_BYTES: usize = "255.255.255.255.".len();

/// A single address as itself, a network with its size: `203.0.113.9`, `2001:db8::/64`.
impl fmt::Display for AddressKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match IpNet::new_assert(self.network, self.prefix) {
            net if net.prefix_len() == net.max_prefix_len() => write!(f, "{}", self.network),
            net => write!(f, "{net}"),
        }
    }
}

/// The address in an entry of a forwarding header: with or without port, brackets and zone.
///
/// `None` for everything else, host names and the deliberately unknown (`unknown`, `_hidden`) included.
pub(crate) fn parse_node(entry: &[u8]) -> Option<IpAddr> {
    if entry.len() > NODE_BYTES_MAX {
        return None;
    }
    let text = std::str::from_utf8(entry).ok()?.trim_matches([' ', '\t']);
    let address = if let Some(bracketed) = text.strip_prefix('[') {
        let (inside, after) = bracketed.split_once(']')?;
        if !after.is_empty() && !after.strip_prefix(':').is_some_and(is_port) {
            return None;
        }
        parse_v6(inside)?.into()
    } else {
        match text.bytes().filter(|&byte| byte == b':').count() {
            0 => text.parse::<Ipv4Addr>().ok()?.into(),
            1 => {
                let (v4, port) = text.split_once(':')?;
                is_port(port).then(|| v4.parse::<Ipv4Addr>().ok()).flatten()?.into()
            }
            _ => parse_v6(text)?.into(),
        }
    };
    Some(IpAddr::to_canonical(&address))
}

/// An IPv6 address, its zone dropped: which of our interfaces a packet came by is no property of the client.
fn parse_v6(text: &str) -> Option<Ipv6Addr> {
    match text.split_once('%') {
        Some((address, zone)) if is_zone(zone) => address.parse().ok(),
        Some(_) => None,
        None => text.parse().ok(),
    }
}

/// `eth0`, or `25eth0` where the percent sign was itself escaped (RFC 6874).
fn is_zone(zone: &str) -> bool {
    !zone.is_empty() && zone.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte))
}

/// A number, or the obfuscated form that RFC 7239 allows (`_gazonk`).
fn is_port(port: &str) -> bool {
    match port.strip_prefix('_') {
        Some(hidden) => is_zone(hidden),
        None => port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok(),
    }
}

#[cfg(test)]
mod tests;
