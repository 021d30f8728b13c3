//! Which address is the client's, when proxies stand in between.
//!
//! **Problem.** Behind a proxy every request comes from the proxy, and the client's address is in a header. But
//! a header is text that anybody can send. Who believes the leftmost entry of `X-Forwarded-For`, or the first of
//! eight headers that happens to be there, lets every client choose its own identity.
//!
//! **Idea.** Each proxy *appends* the address it was talked to from. So the entries on the right
//! were written by machines we know, and the walk begins there:
//!
//! ```text
//!   X-Forwarded-For:  6.6.6.6,    198.51.100.7,     10.0.0.2         peer 10.0.0.1
//!                     whatever    what 10.0.0.2     what 10.0.0.1    the socket
//!                     was sent    was talked to     was talked to
//!                                 from: not ours,   from: one of
//!                                 the client        ours, go on    ◀── the walk
//! ```
//!
//! 1. The peer of the socket is not trusted: it is the client, and no header is read.
//! 2. Else the entries of *one* header, all its lines in order, from the right: the first that is not trusted
//!    is the client. What stands further left was sent by it and is never looked at.
//! 3. An entry that is no address stops the walk, and the hop before it counts. Skipping it would expose the
//!    forged entry to its left. An empty entry is no address either: it is what a proxy
//!    writes that does not know whom it talked to.
//! 4. If all entries are trusted, the leftmost of them counts; if there are none, the peer.
//!
//! Every wrong turn therefore ends at an address *nearer* to us: too many clients may share a
//! budget, none can leave its own.
//!
//! **Bounds.** No more than [`ENTRIES_MAX`] entries and [`HEADER_BYTES_MAX`] bytes are looked at, from the right.
//!
//! Headers that hold a single address (`CF-Connecting-IP`, `X-Real-IP`) are lists of one.

use std::net::IpAddr;
use std::str::FromStr;

use http::{HeaderMap, HeaderName};

use super::address::parse_node;
use super::networks::Networks;
use super::{forwarded, suggest};

/// A longer chain of trusted proxies is not followed further.
const ENTRIES_MAX: usize = 100;
/// A longer forwarding header is not read further.
const HEADER_BYTES_MAX: usize = 16 * 1024;

/// The one header in which trusted proxies tell the client's address: `X-Forwarded-For` unless said.
///
/// ```
/// use tollgate::identity::ForwardingHeader;
///
/// assert_eq!("CF-Connecting-IP".parse::<ForwardingHeader>()?.name(), "cf-connecting-ip");
/// let error = "X-Forwared-For".parse::<ForwardingHeader>().unwrap_err();
/// assert!(error.to_string().contains("did you mean X-Forwarded-For?"));
/// # Ok::<(), tollgate::identity::ForwardingHeaderError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ForwardingHeader {
    name: HeaderName,
    syntax: Syntax,
}

/// How the entries are written.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Syntax {
    /// Addresses, separated by commas.
    List,
    /// RFC 7239.
    Forwarded,
}

/// A text that does not name one forwarding header.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{problem} (found {found:?}); accepted is exactly one header: X-Forwarded-For, Forwarded, or one that holds the client's address, such as CF-Connecting-IP"
)]
pub struct ForwardingHeaderError {
    problem: String,
    found: String,
}

impl ForwardingHeader {
    /// `X-Forwarded-For`, to which each proxy appends an address.
    pub fn x_forwarded_for() -> ForwardingHeader {
        ForwardingHeader { name: HeaderName::from_static("x-forwarded-for"), syntax: Syntax::List }
    }

    /// `Forwarded` (RFC 7239), to which each proxy appends `for=ADDRESS` and more.
    pub fn forwarded() -> ForwardingHeader {
        ForwardingHeader { name: http::header::FORWARDED, syntax: Syntax::Forwarded }
    }

    /// The header's name, in lower case.
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
        let name = HeaderName::from_str(text).map_err(|_| error("expected a header's name".to_owned()))?;
        match name.as_str() {
            "x-forwarded-for" => Ok(ForwardingHeader::x_forwarded_for()),
            "forwarded" => Ok(ForwardingHeader::forwarded()),
            "x-forwarded-host" | "x-forwarded-port" | "x-forwarded-proto" => {
                Err(error("this header holds no address".to_owned()))
            }
            // A slip would silently name a header that no proxy writes, and all clients would share one budget.
            other => match suggest::nearest(other, ["X-Forwarded-For", "Forwarded"]) {
                Some(meant) => Err(error(format!("unknown header; did you mean {meant}?"))),
                None => Ok(ForwardingHeader { name, syntax: Syntax::List }),
            },
        }
    }
}

/// The proxies whose word about the client's address is taken, and the header in which they give it.
///
/// Nobody is trusted unless said.
///
/// ```
/// use http::HeaderMap;
/// use tollgate::identity::{ForwardingHeader, TrustedProxies};
///
/// let proxies = TrustedProxies::new("10.0.0.0/8".parse()?, ForwardingHeader::x_forwarded_for());
/// let mut headers = HeaderMap::new();
/// headers.insert("x-forwarded-for", "6.6.6.6, 198.51.100.7, 10.0.0.2".parse().unwrap());
///
/// let client = |peer: &str| proxies.client_address(peer.parse().unwrap(), &headers).to_string();
/// assert_eq!(client("10.0.0.1"), "198.51.100.7");
/// assert_eq!(client("203.0.113.9"), "203.0.113.9");
/// # Ok::<(), tollgate::identity::NetworkError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct TrustedProxies {
    networks: Networks,
    header: ForwardingHeader,
}

impl TrustedProxies {
    /// Trusts the machines in `networks` about what they write into `header`.
    pub fn new(networks: Networks, header: ForwardingHeader) -> TrustedProxies {
        TrustedProxies { networks, header }
    }

    /// Whether the machine at `address` is one of the proxies.
    pub fn trusts(&self, address: IpAddr) -> bool {
        self.networks.contains(address)
    }

    /// The networks of the proxies.
    pub fn networks(&self) -> &Networks {
        &self.networks
    }

    /// The header that is read.
    pub fn header(&self) -> &ForwardingHeader {
        &self.header
    }

    /// The client's address, given the socket's peer and the request's headers. Never IPv4-mapped.
    pub fn client_address(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut hop = peer.to_canonical();
        if !self.trusts(hop) {
            return hop;
        }
        for entry in Entries::new(&self.header, headers) {
            let Some(address) = entry else { break };
            hop = address;
            if !self.trusts(hop) {
                break;
            }
        }
        hop
    }
}

/// The entries of a forwarding header from right to left: addresses, or `None` for what is none.
struct Entries<'h> {
    /// The lines not yet begun.
    lines: http::header::ValueIter<'h, http::HeaderValue>,
    /// What is left of the line at hand.
    line: Option<&'h [u8]>,
    /// Whether the line's beginning was cut off, so that its leftmost entry may be half an entry.
    is_cut: bool,
    syntax: Syntax,
    entries_left: usize,
    bytes_left: usize,
}

impl<'h> Entries<'h> {
    fn new(header: &ForwardingHeader, headers: &'h HeaderMap) -> Entries<'h> {
        Entries {
            lines: headers.get_all(&header.name).into_iter(),
            line: None,
            is_cut: false,
            syntax: header.syntax,
            entries_left: ENTRIES_MAX,
            bytes_left: HEADER_BYTES_MAX,
        }
    }

    fn next_line(&mut self) -> Option<&'h [u8]> {
        let line = self.lines.next_back()?.as_bytes();
        let seen = &line[line.len().saturating_sub(self.bytes_left)..];
        self.is_cut = seen.len() < line.len();
        self.bytes_left -= seen.len();
        Some(seen)
    }
}

impl Iterator for Entries<'_> {
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
