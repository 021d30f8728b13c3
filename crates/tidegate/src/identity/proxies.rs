//! Determines the client's address behind proxies.
//!
//! **Problem.** Behind a proxy the peer of every connection is the proxy, and the client's address is in a header. But
//! a client can send that header too. A service that uses the leftmost entry of `X-Forwarded-For`, or the first of
//! eight headers that is present, lets every client choose its own address.
//!
//! **Idea.** Each proxy *appends* the address of its own peer. So the entries on the right were written by trusted
//! machines, and the walk begins there:
//!
//! ```text
//!   X-Forwarded-For:  6.6.6.6,         198.51.100.7,      10.0.0.2          peer 10.0.0.1
//!                     sent by the      peer of 10.0.0.2:  peer of 10.0.0.1: of the socket:
//!                     client: ignored  not trusted,       trusted,          trusted
//!                                      so the client      continue          ◀── the walk begins here
//! ```
//!
//! 1. If the peer of the socket is not trusted, it is the client, and no header is read.
//! 2. Otherwise the entries of *one* header are read from the right, across all its lines. The first that is not trusted
//!    is the client. Entries further left come from the client and are not read.
//! 3. An entry that is not an address ends the walk, and the previous hop is the client. Skipping the entry would expose
//!    a forged entry to its left. An empty entry is not an address either: proxies write it when they do not know
//!    their peer.
//! 4. If all entries are trusted, the leftmost one is the client. If there are no entries, the peer is.
//!
//! So every mistake ends at an address that is *nearer* to this server. Clients may then share a budget, but no client
//! can escape its own.
//!
//! **Bounds.** At most [`ENTRIES_MAX`] entries and [`HEADER_BYTES_MAX`] bytes are read, from the right.
//!
//! Headers with a single address (`CF-Connecting-IP`, `X-Real-IP`) are read as lists of one entry.

use std::net::IpAddr;
use std::str::FromStr;

use http::{HeaderMap, HeaderName};

use super::address::parse_node;
use super::forwarded;
use super::networks::Networks;

/// Maximum number of entries that are read.
const ENTRIES_MAX: usize = 100;
/// Maximum number of bytes that are read of all lines of the header.
const HEADER_BYTES_MAX: usize = 16 * 1024;

/// The header in which trusted proxies report the client's address. Defaults to `X-Forwarded-For`.
///
/// ```
/// use tidegate::identity::ForwardingHeader;
///
/// assert_eq!("CF-Connecting-IP".parse::<ForwardingHeader>()?.name(), "cf-connecting-ip");
/// let error = "X-Forwared-For".parse::<ForwardingHeader>().unwrap_err();
/// assert!(error.to_string().contains("did you mean X-Forwarded-For?"));
/// # Ok::<(), tidegate::identity::ForwardingHeaderError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ForwardingHeader {
    name: HeaderName,
    syntax: Syntax,
}

/// The syntax of a forwarding header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Syntax {
    /// Addresses separated by commas.
    List,
    /// Elements as in RFC 7239.
    Forwarded,
}

/// The error for a text that is not the name of one forwarding header.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{problem} (found {found:?}); name exactly one header: X-Forwarded-For, Forwarded, or one that holds the client's address, such as CF-Connecting-IP"
)]
pub struct ForwardingHeaderError {
    problem: String,
    found: String,
}

impl ForwardingHeader {
    /// Returns `X-Forwarded-For`, to which each proxy appends an address.
    pub fn x_forwarded_for() -> ForwardingHeader {
        ForwardingHeader { name: HeaderName::from_static("x-forwarded-for"), syntax: Syntax::List }
    }

    /// Returns `Forwarded` (RFC 7239), to which each proxy appends an element with `for=ADDRESS`.
    pub fn forwarded() -> ForwardingHeader {
        ForwardingHeader { name: http::header::FORWARDED, syntax: Syntax::Forwarded }
    }

    /// Returns the name of the header, in lower case.
    pub fn name(&self) -> &HeaderName {
        &self.name
    }
}

impl Default for ForwardingHeader {
    fn default() -> Self {
        ForwardingHeader::x_forwarded_for()
    }
}

impl FromStr for ForwardingHeader {
    type Err = ForwardingHeaderError;

    fn from_str(text: &str) -> Result<ForwardingHeader, ForwardingHeaderError> {
        let error = |problem: String| ForwardingHeaderError { problem, found: text.chars().take(64).collect() };
        let name = HeaderName::from_str(text).map_err(|_| error("expected a header name".to_owned()))?;
        match name.as_str() {
            "x-forwarded-for" => Ok(ForwardingHeader::x_forwarded_for()),
            "forwarded" => Ok(ForwardingHeader::forwarded()),
            "x-forwarded-host" | "x-forwarded-port" | "x-forwarded-proto" => {
                Err(error("this header contains no address".to_owned()))
            }
            // A misspelt name would be a header that no proxy writes, so that all clients would share one quota.
            other => match tidegate_config::nearest(other, ["X-Forwarded-For", "Forwarded"]) {
                Some(meant) => Err(error(format!("unknown header; did you mean {meant}?"))),
                None => Ok(ForwardingHeader { name, syntax: Syntax::List }),
            },
        }
    }
}

/// The proxies that are trusted to report client addresses, and the header in which they do.
///
/// By default no proxy is trusted, and the client is always the peer of the socket.
///
/// ```
/// use http::HeaderMap;
/// use tidegate::identity::{ForwardingHeader, TrustedProxies};
///
/// let proxies = TrustedProxies::new("10.0.0.0/8".parse()?, ForwardingHeader::x_forwarded_for());
/// let mut headers = HeaderMap::new();
/// headers.insert("x-forwarded-for", "6.6.6.6, 198.51.100.7, 10.0.0.2".parse().unwrap());
///
/// let client = |peer: &str| proxies.client_address(peer.parse().unwrap(), &headers).to_string();
/// assert_eq!(client("10.0.0.1"), "198.51.100.7");
/// assert_eq!(client("203.0.113.9"), "203.0.113.9");
/// # Ok::<(), tidegate::identity::NetworkError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct TrustedProxies {
    networks: Networks,
    header: ForwardingHeader,
}

impl TrustedProxies {
    /// Creates a set of trusted proxies: those in `networks`, which report client addresses in `header`.
    pub fn new(networks: Networks, header: ForwardingHeader) -> TrustedProxies {
        TrustedProxies { networks, header }
    }

    /// Returns whether `address` is in the networks of the trusted proxies.
    pub fn trusts(&self, address: IpAddr) -> bool {
        self.networks.contains(address)
    }

    /// Returns the networks of the trusted proxies.
    pub fn networks(&self) -> &Networks {
        &self.networks
    }

    /// Returns the header in which the proxies report client addresses.
    pub fn header(&self) -> &ForwardingHeader {
        &self.header
    }

    /// Returns the client's address, given the peer of the socket and the request headers.
    ///
    /// If `peer` is a trusted proxy, the entries of the forwarding header are read from the right, up to the first that
    /// is not a trusted proxy: that is the client. If an entry is not an address, or all are trusted, the last address
    /// read is the client. Returns `peer` if it is not trusted, or if no entry was read. IPv4-mapped addresses are
    /// returned as IPv4.
    pub fn client_address(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut hop = peer.to_canonical();
        if !self.trusts(hop) {
            return hop;
        }
        for entry in HopsFromRight::new(&self.header, headers) {
            let Some(address) = entry else { break };
            hop = address;
            if !self.trusts(hop) {
                break;
            }
        }
        hop
    }
}

/// Iterates over the entries of a forwarding header from right to left, up to [`ENTRIES_MAX`].
///
/// Yields the address of an entry, or `None` if the entry is not an address or exceeds [`HEADER_BYTES_MAX`].
struct HopsFromRight<'h> {
    /// The lines that have not been read yet.
    lines: http::header::ValueIter<'h, http::HeaderValue>,
    /// The unread part of the current line.
    line: Option<&'h [u8]>,
    /// Whether the beginning of the current line exceeds the byte limit, so that its leftmost entry may be incomplete.
    is_cut: bool,
    syntax: Syntax,
    entries_left: usize,
    bytes_left: usize,
}

impl<'h> HopsFromRight<'h> {
    fn new(header: &ForwardingHeader, headers: &'h HeaderMap) -> HopsFromRight<'h> {
        HopsFromRight {
            lines: headers.get_all(&header.name).into_iter(),
            line: None,
            is_cut: false,
            syntax: header.syntax,
            entries_left: ENTRIES_MAX,
            bytes_left: HEADER_BYTES_MAX,
        }
    }

    /// Returns the next line from the end, without the bytes at its beginning that exceed the byte limit. `None` after the
    /// first line.
    fn next_line(&mut self) -> Option<&'h [u8]> {
        let line = self.lines.next_back()?.as_bytes();
        let kept = &line[line.len().saturating_sub(self.bytes_left)..];
        self.is_cut = kept.len() < line.len();
        self.bytes_left -= kept.len();
        Some(kept)
    }
}

impl Iterator for HopsFromRight<'_> {
    type Item = Option<IpAddr>;

    fn next(&mut self) -> Option<Option<IpAddr>> {
        self.entries_left = self.entries_left.checked_sub(1)?;
        let line = match self.line.take() {
            Some(line) => line,
            None => self.next_line()?,
        };
        let comma = match self.syntax {
            Syntax::List => line.iter().rposition(|&byte| byte == b','),
            Syntax::Forwarded => forwarded::last_comma(line),
        };
        let entry = match comma {
            Some(at) => {
                self.line = Some(&line[..at]);
                &line[at + 1..]
            }
            None if self.is_cut => return Some(None),
            None => line,
        };
        Some(match self.syntax {
            Syntax::List => parse_node(entry),
            Syntax::Forwarded => forwarded::parse_for(entry).and_then(|node| parse_node(&node)),
        })
    }
}

#[cfg(test)]
mod tests;
