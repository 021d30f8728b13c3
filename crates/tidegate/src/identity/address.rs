//! Client addresses: the notations that proxies use, and the network by which a client is counted.
//!
//! **One address, many notations.** `203.0.113.9`, `203.0.113.9:4711`, `::ffff:203.0.113.9`,
//! `::ffff:cb00:7109` and `[::ffff:cb00:7109]:4711` are one client. So an address is first parsed into bits, and an
//! IPv4-mapped address is recognised by its bits. A test of the notation would give the same client several budgets. A
//! text that is not exactly one of the known forms is not an address. Nothing is guessed or repaired.
//!
//! **One IPv4 host, three IPv6 networks.** An IPv4 host also reaches an IPv6 server through a translator, as
//! `64:ff9b::203.0.113.9` (RFC 6052), or through a tunnel, as any address in `2002:cb00:7109::/48` (6to4, RFC 3056).
//! [`embedded_v4`] finds the IPv4 address in these bits. Limits, bans, exemptions and address ranges all use it, so a
//! client cannot evade its IPv4 budget or ban by such a route.
//!
//! **One client, many addresses.** An IPv6 host owns a whole network, usually a /64, and may use another address for
//! every request. Counting single addresses would give it 2^64 budgets. So the network is counted: [`AddressKey`].

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use smallvec::SmallVec;

/// Maximum length of an entry in a forwarding header: an address of up to 45 characters, brackets, zone and port.
const NODE_BYTES_MAX: usize = 128;

/// IPv6 networks whose addresses contain an IPv4 address, and the number of bits before it: IPv4-mapped
/// `::ffff:0:0/96`, translated `64:ff9b::/96`, and 6to4 `2002::/16`.
const EMBEDDING: [(u128, u8); 3] = [(0xffff << 32, 96), (0x0064_ff9b << 96, 96), (0x2002 << 112, 16)];

/// Returns the IPv4 network whose addresses an IPv6 network contains, as an address and a prefix length of at most 32.
///
/// Returns `None` unless the network is part of `::ffff:0:0/96`, `64:ff9b::/96` or `2002::/16`. Bits after the IPv4
/// address (the subnet and host of a 6to4 site) are dropped.
pub(crate) fn embedded_v4_network(network: Ipv6Addr, prefix: u8) -> Option<(Ipv4Addr, u8)> {
    let bits = network.to_bits();
    let is_in = |&&(embedding, before): &&(u128, u8)| prefix >= before && (bits ^ embedding) >> (128 - before) == 0;
    let (_, before) = *EMBEDDING.iter().find(is_in)?;
    Some((Ipv4Addr::from_bits((bits >> (96 - before)) as u32), (prefix - before).min(32)))
}

/// Returns the IPv4 address that an IPv6 address contains (mapped, translated or 6to4), or `address` itself if it
/// contains none.
#[inline]
pub(crate) fn embedded_v4(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => embedded_v4_network(v6, 128).map_or(address, |(v4, _)| v4.into()),
    }
}

/// The prefix lengths to which client addresses are truncated for counting. Defaults to 32 bits for IPv4 and 64 for
/// IPv6.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AddressPrefixes {
    v4: u8,
    v6: u8,
}

/// The error for a prefix length outside 1 to 32 (IPv4) or 1 to 128 (IPv6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("an {family} prefix must have 1 to {max} bits, not {bits}")]
pub struct PrefixError {
    family: &'static str,
    max: u8,
    bits: u8,
}

impl AddressPrefixes {
    /// Creates prefix lengths: `v4` bits for IPv4 addresses and `v6` bits for IPv6 addresses.
    ///
    /// # Errors
    /// Fails if a length is 0, which would count all clients as one, or above 32 (IPv4) or 128 (IPv6).
    pub const fn new(v4: u8, v6: u8) -> Result<AddressPrefixes, PrefixError> {
        if v4 == 0 || v4 > 32 {
            return Err(PrefixError { family: "IPv4", max: 32, bits: v4 });
        }
        if v6 == 0 || v6 > 128 {
            return Err(PrefixError { family: "IPv6", max: 128, bits: v6 });
        }
        Ok(AddressPrefixes { v4, v6 })
    }

    /// Returns the network by which a client at `address` is counted.
    ///
    /// An IPv6 address that contains an IPv4 address (mapped, `64:ff9b::/96`, `2002::/16`) is counted as the IPv4
    /// address.
    ///
    /// ```
    /// use tidegate::identity::AddressPrefixes;
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

/// The network by which a client is counted, created by [`AddressPrefixes::key`].
///
/// A client whose IPv6 address contains an IPv4 address has an IPv4 network.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AddressKey {
    network: IpAddr,
    prefix: u8,
}

/// Returns an octet in decimal followed by a dot, and the length of that text including the dot (2 to 4).
///
/// The digits are computed, because a lookup table would cause cache misses when other code has used the cache in
/// between.
#[inline]
fn octet_text(octet: u8) -> ([u8; 4], usize) {
    let zeros = usize::from(octet < 10) + usize::from(octet < 100);
    let digits = u32::from_le_bytes([octet / 100, octet / 10 % 10, octet % 10, 0]) + u32::from_le_bytes(*b"000.");
    ((digits >> (8 * zeros)).to_le_bytes(), 4 - zeros)
}

impl AddressKey {
    /// Returns the first address of the network.
    pub const fn network(&self) -> IpAddr {
        self.network
    }

    /// Returns the prefix length of the network in bits.
    pub const fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Appends the text that `Display` shows to `bytes`.
    ///
    /// Single IPv4 addresses, which are most clients, are written without `fmt`, because this runs on every request.
    pub(super) fn write(&self, bytes: &mut SmallVec<[u8; 64]>) {
        match self.single_v4_text() {
            Some((text, len)) => bytes.extend_from_slice(&text[..len]),
            None => bytes.extend(self.to_string().bytes()),
        }
    }

    /// Returns the text that `Display` shows, at the beginning of a buffer, and its length in bytes.
    ///
    /// Returns `None` if this is not a single IPv4 address. The bytes after the text are meaningless.
    #[inline]
    pub(super) fn single_v4_text(&self) -> Option<([u8; V4_TEXT_BYTES], usize)> {
        let (IpAddr::V4(v4), 32) = (self.network, self.prefix) else { return None };
        let (mut text, mut end) = ([0; V4_TEXT_BYTES], 0);
        for octet in v4.octets() {
            // Copies four bytes. The next octet overwrites those after the dot.
            let (digits, count) = octet_text(octet);
            text[end..end + 4].copy_from_slice(&digits);
            end += count;
        }
        Some((text, end - 1))
    }
}

/// Length of the longest IPv4 address and the dot that [`octet_text`] writes after it.
pub(super) const V4_TEXT_BYTES: usize = "255.255.255.255.".len();

/// Shows a single address as it is and a network with its size: `203.0.113.9`, `2001:db8::/64`.
impl fmt::Display for AddressKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match IpNet::new_assert(self.network, self.prefix) {
            net if net.prefix_len() == net.max_prefix_len() => write!(f, "{}", self.network),
            net => write!(f, "{net}"),
        }
    }
}

/// Parses an entry of a forwarding header: an IPv4 or IPv6 address, with or without port, brackets and zone.
///
/// IPv4-mapped addresses are returned as IPv4. Returns `None` for everything else, including host names and the
/// obscured identifiers of RFC 7239 (`unknown`, `_hidden`), and for more than [`NODE_BYTES_MAX`] bytes.
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

/// Parses an IPv6 address, and ignores a zone after it: that names an interface of the proxy, not of the client.
///
/// Returns `None` if the address or the zone is malformed.
fn parse_v6(text: &str) -> Option<Ipv6Addr> {
    match text.split_once('%') {
        Some((address, zone)) if is_zone(zone) => address.parse().ok(),
        Some(_) => None,
        None => text.parse().ok(),
    }
}

/// Returns whether this is a zone without its `%`: `eth0`, or `25eth0` if the percent sign was escaped (RFC 6874).
fn is_zone(zone: &str) -> bool {
    !zone.is_empty() && zone.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte))
}

/// Returns whether this is a port: a number up to 65535, or the obfuscated form of RFC 7239 (`_gazonk`).
fn is_port(port: &str) -> bool {
    match port.strip_prefix('_') {
        Some(hidden) => is_zone(hidden),
        None => port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok(),
    }
}

#[cfg(test)]
mod tests;
