//! The PROXY protocol, versions 1 and 2: the client's address, sent by a load balancer that forwards connections.
//!
//! A load balancer that forwards bytes (layer 4) cannot add a header to a request. It opens a connection of its own for
//! each client, so all clients would appear to have its address. To report the client's address, it writes a header
//! before the first byte from the client:
//!
//! ```text
//!   version 1   PROXY TCP4 203.0.113.9 198.51.100.7 56324 443\r\n           at most 107 bytes
//!
//!   version 2   \r\n\r\n\0\r\nQUIT\n  21        11       000c     addresses, ports, extensions
//!               signature (12 bytes)  version,  family,  length
//!                                     command   transport
//! ```
//!
//! **Only from trusted peers, and always from them.** A client could write such a header too, so no header is read from
//! a peer that is not trusted: all its bytes are treated as those of a client. A trusted peer must send one: if it were
//! optional, the clients of a balancer that does not send it could write their own.
//!
//! A header without an address (`UNKNOWN`, `LOCAL`) means that the balancer opened the connection for itself, for
//! example for a health check. The balancer is then the client. Extensions (TLVs) are skipped.
//!
//! Exactly the bytes of the header are read; version 1 is read byte by byte. The bytes after it belong to TLS or HTTP,
//! and stay in the socket.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use tokio::io::{AsyncRead, AsyncReadExt};

/// The signature of version 2.
const SIGNATURE_V2: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// The maximum length of a version 1 header in bytes, including its line break.
const V1_BYTES_MAX: usize = 107;
/// The maximum number of bytes after the first 16 of a version 2 header. The addresses take up to 36, and the
/// extensions that balancers send (names, a certificate's subject, an endpoint's id) a few hundred.
const V2_BYTES_MAX: usize = 4 * 1024;

/// The reason why the first bytes of a connection are not a PROXY protocol header.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProxyHeaderError {
    /// The connection begins with something else.
    #[error("expected a PROXY protocol header, version 1 or 2")]
    Missing,
    /// The header is malformed, or of an unknown version, command, family or transport.
    #[error("the PROXY protocol header is malformed: {0}")]
    Malformed(&'static str),
    /// The connection failed or ended within the header.
    #[error("cannot read the PROXY protocol header: {0}")]
    Read(#[from] io::Error),
}

/// Reads the header at the start of a connection, and nothing after it.
///
/// Returns the address of the client, or `None` if the balancer opened the connection for itself.
///
/// # Errors
/// If the connection does not start with a valid header of version 1 or 2, or ends within it. The connection must then
/// be closed.
pub(crate) async fn read_header<S>(stream: &mut S) -> Result<Option<SocketAddr>, ProxyHeaderError>
where
    S: AsyncRead + Unpin,
{
    // Headers of both versions are longer than this, so no byte after the header is read.
    let mut start = [0; SIGNATURE_V2.len()];
    for read in 0..start.len() {
        start[read] = stream.read_u8().await?;
        // A byte at a time, because a client that sends something else may wait for an answer after fewer bytes.
        if start[..=read] != SIGNATURE_V2[..=read] && !b"PROXY ".iter().zip(&start[..=read]).all(|(a, b)| a == b) {
            return Err(ProxyHeaderError::Missing);
        }
    }
    if start == SIGNATURE_V2 { read_v2(stream).await } else { read_v1(stream, &start).await }
}

/// Reads the rest of a header of version 1, which begins with `start`.
async fn read_v1<S>(stream: &mut S, start: &[u8]) -> Result<Option<SocketAddr>, ProxyHeaderError>
where
    S: AsyncRead + Unpin,
{
    let mut line = Vec::with_capacity(V1_BYTES_MAX);
    line.extend_from_slice(start);
    while !line.ends_with(b"\r\n") {
        if line.len() == V1_BYTES_MAX {
            return Err(ProxyHeaderError::Malformed("the line is longer than 107 bytes"));
        }
        line.push(stream.read_u8().await?);
    }
    let line = std::str::from_utf8(&line).map_err(|_| ProxyHeaderError::Malformed("the line is not ASCII"))?;
    parse_v1(line.trim_end_matches("\r\n"))
}

/// Parses a line of version 1, without its line break.
fn parse_v1(line: &str) -> Result<Option<SocketAddr>, ProxyHeaderError> {
    let mut words = line.split(' ').skip(1);
    let is_v4 = match words.next() {
        Some("TCP4") => true,
        Some("TCP6") => false,
        // The specification requires the rest of the line to be ignored.
        Some("UNKNOWN") => return Ok(None),
        _ => return Err(ProxyHeaderError::Malformed("expected TCP4, TCP6 or UNKNOWN")),
    };
    let address = |word: Option<&str>| {
        if is_v4 {
            word.and_then(|word| Ipv4Addr::from_str(word).ok()).map(IpAddr::V4)
        } else {
            word.and_then(|word| Ipv6Addr::from_str(word).ok()).map(IpAddr::V6)
        }
    };
    let [source, destination] = [address(words.next()), address(words.next())];
    let [source_port, destination_port] = [port(words.next()), port(words.next())];
    match (source, destination, source_port, destination_port, words.next()) {
        (Some(source), Some(_), Some(port), Some(_), None) => Ok(Some(SocketAddr::new(source, port))),
        _ => Err(ProxyHeaderError::Malformed("expected two addresses and two ports")),
    }
}

/// Parses a port: decimal digits, without a sign or leading zeros.
fn port(word: Option<&str>) -> Option<u16> {
    let port: u16 = word?.parse().ok()?;
    (itoa::Buffer::new().format(port) == word?).then_some(port)
}

/// Reads a header of version 2 after its signature.
async fn read_v2<S>(stream: &mut S) -> Result<Option<SocketAddr>, ProxyHeaderError>
where
    S: AsyncRead + Unpin,
{
    let [command, family] = [stream.read_u8().await?, stream.read_u8().await?];
    let length = usize::from(stream.read_u16().await?);
    if length > V2_BYTES_MAX {
        return Err(ProxyHeaderError::Malformed("it is longer than 4 KiB"));
    }
    let mut rest = vec![0; length];
    stream.read_exact(&mut rest).await?;
    parse_v2(command, family, &rest)
}

/// Interprets a header of version 2: the bytes for version and command, for family and transport, and what follows the
/// length.
fn parse_v2(command: u8, family: u8, rest: &[u8]) -> Result<Option<SocketAddr>, ProxyHeaderError> {
    let is_local = match command {
        0x20 => true,
        0x21 => false,
        _ => return Err(ProxyHeaderError::Malformed("unknown version or command")),
    };
    let short = ProxyHeaderError::Malformed("it is too short for its addresses");
    match family {
        // The addresses of a connection that the balancer opened for itself are to be ignored.
        _ if is_local => Ok(None),
        0x11 => {
            let block: &[u8; 12] = rest.first_chunk().ok_or(short)?;
            let [a, b, c, d, _, _, _, _, high, low, ..] = *block;
            Ok(Some(SocketAddr::new(Ipv4Addr::new(a, b, c, d).into(), u16::from_be_bytes([high, low]))))
        }
        0x21 => {
            let block: &[u8; 36] = rest.first_chunk().ok_or(short)?;
            let (source, port) = (block.first_chunk::<16>(), u16::from_be_bytes([block[32], block[33]]));
            Ok(source.map(|source| SocketAddr::new(Ipv6Addr::from(*source).into(), port)))
        }
        // An unspecified family, or a Unix socket: the client has no IP address.
        0x00 | 0x31 => Ok(None),
        _ => Err(ProxyHeaderError::Malformed("unknown family or transport")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads a header from `bytes`, one byte per read. Returns the client, and the bytes after the header.
    fn read(bytes: &[u8]) -> Result<(Option<SocketAddr>, &[u8]), ProxyHeaderError> {
        let mut stream = bytes;
        let client = ready(read_header(&mut stream))?;
        Ok((client, stream))
    }

    /// Runs a future that never waits: a slice is always ready.
    fn ready<T>(future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        match future.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
            std::task::Poll::Ready(output) => output,
            std::task::Poll::Pending => panic!("a slice is always ready"),
        }
    }

    /// A header of version 2, followed by the start of a request.
    fn v2(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let length = u16::try_from(rest.len()).unwrap().to_be_bytes();
        [&SIGNATURE_V2[..], &[command, family], &length, rest, b"GET /"].concat()
    }

    fn v4_block(source: [u8; 4], port: u16) -> Vec<u8> {
        [&source[..], &[198, 51, 100, 7], &port.to_be_bytes(), &443u16.to_be_bytes()].concat()
    }

    #[test]
    fn client_of_a_line_is_its_source_and_the_request_is_left() {
        let cases = [
            ("PROXY TCP4 203.0.113.9 198.51.100.7 56324 443\r\n", Some("203.0.113.9:56324")),
            ("PROXY TCP6 2001:db8::9 2001:db8::1 1 65535\r\n", Some("[2001:db8::9]:1")),
            ("PROXY TCP6 ::ffff:203.0.113.9 ::1 7 8\r\n", Some("[::ffff:203.0.113.9]:7")),
            ("PROXY UNKNOWN\r\n", None),
            ("PROXY UNKNOWN ffff:f...f:ffff ffff:f...f:ffff 65535 65535\r\n", None),
        ];
        for (line, client) in cases {
            let bytes = format!("{line}GET /");
            let (found, rest) = read(bytes.as_bytes()).unwrap();
            assert_eq!((found, rest), (client.map(|client| client.parse().unwrap()), &b"GET /"[..]), "{line}");
        }
    }

    #[test]
    fn client_of_a_binary_header_is_its_source_and_extensions_are_skipped() {
        let v6 = [&[0x20, 1, 0xd, 0xb8], &[0; 11][..], &[9], &[1; 16], &[0, 80, 1, 187]].concat();
        let with_extension = [v4_block([203, 0, 113, 9], 56324), vec![0xea, 0, 3, 1, 2, 3]].concat();
        let cases = [
            (v2(0x21, 0x11, &v4_block([203, 0, 113, 9], 56324)), Some("203.0.113.9:56324")),
            (v2(0x21, 0x11, &with_extension), Some("203.0.113.9:56324")),
            (v2(0x21, 0x21, &v6), Some("[2001:db8::9]:80")),
            (v2(0x20, 0x11, &v4_block([203, 0, 113, 9], 56324)), None),
            (v2(0x20, 0x00, &[]), None),
            (v2(0x21, 0x00, &[1, 2, 3]), None),
            (v2(0x21, 0x31, &[0; 216]), None),
        ];
        for (bytes, client) in cases {
            let (found, rest) = read(&bytes).unwrap();
            assert_eq!((found, rest), (client.map(|client| client.parse().unwrap()), &b"GET /"[..]), "{bytes:02x?}");
        }
    }

    #[test]
    fn connection_that_begins_otherwise_is_rejected_without_waiting_for_more() {
        for bytes in ["G", "GET / HTTP/1.1\r\n", "PROXX", "PROXYTCP4", "\r\nG", "\x16\x03\x01", "proxy TCP4"] {
            assert!(matches!(read(bytes.as_bytes()), Err(ProxyHeaderError::Missing)), "{bytes:?}");
        }
    }

    #[test]
    fn malformed_header_is_rejected() {
        let lines = [
            "PROXY TCP4 203.0.113.9 198.51.100.7 56324\r\n",
            "PROXY TCP4 203.0.113.9 198.51.100.7 56324 443 1\r\n",
            "PROXY TCP4 203.0.113.9  198.51.100.7 56324 443\r\n",
            "PROXY TCP4 203.0.113.009 198.51.100.7 56324 443\r\n",
            "PROXY TCP4 2001:db8::9 2001:db8::1 56324 443\r\n",
            "PROXY TCP6 203.0.113.9 198.51.100.7 56324 443\r\n",
            "PROXY TCP4 203.0.113.9 198.51.100.7 +5 443\r\n",
            "PROXY TCP4 203.0.113.9 198.51.100.7 05 443\r\n",
            "PROXY TCP4 203.0.113.9 198.51.100.7 65536 443\r\n",
            "PROXY UDP4 203.0.113.9 198.51.100.7 56324 443\r\n",
            "PROXY TCP4 \u{e4} 198.51.100.7 56324 443\r\n",
            "PROXY TCP4\r\n      ",
        ];
        let long = format!("PROXY UNKNOWN {}\r\n", "x".repeat(V1_BYTES_MAX));
        let binary = [
            v2(0x11, 0x11, &v4_block([203, 0, 113, 9], 1)),
            v2(0x22, 0x11, &v4_block([203, 0, 113, 9], 1)),
            v2(0x21, 0x12, &v4_block([203, 0, 113, 9], 1)),
            v2(0x21, 0x41, &v4_block([203, 0, 113, 9], 1)),
            v2(0x21, 0x11, &v4_block([203, 0, 113, 9], 1)[..11]),
            v2(0x21, 0x21, &[0; 35]),
            v2(0x21, 0x11, &[0; V2_BYTES_MAX + 1]),
        ];
        let all =
            lines.iter().copied().chain([long.as_str()]).map(str::as_bytes).chain(binary.iter().map(Vec::as_slice));
        for bytes in all {
            assert!(matches!(read(bytes), Err(ProxyHeaderError::Malformed(_))), "{bytes:02x?}");
        }
    }

    #[test]
    fn header_that_ends_early_is_an_error() {
        let headers =
            [b"PROXY TCP4 203.0.113.9 198.51.100.7 56324 443\r\n".to_vec(), v2(0x21, 0x11, &v4_block([1; 4], 1))];
        for header in headers {
            let complete = header.len() - if header.starts_with(b"\r") { b"GET /".len() } else { 0 };
            for length in 0..complete {
                assert!(matches!(read(&header[..length]), Err(ProxyHeaderError::Read(_))), "{length}");
            }
            assert!(read(&header[..complete]).is_ok());
        }
    }

    proptest! {
        #[test]
        fn no_input_panics_and_none_is_read_beyond_the_longest_header(
            start in prop_oneof![Just(&b""[..]), Just(&b"PROXY TCP4 "[..]), Just(&SIGNATURE_V2[..])],
            rest in proptest::collection::vec(any::<u8>(), 0..5_000),
        ) {
            let bytes = [start, &rest].concat();
            if let Ok((_, left)) = read(&bytes) {
                prop_assert!(bytes.len() - left.len() <= 16 + V2_BYTES_MAX);
            }
        }

        #[test]
        fn every_source_is_read_back(source in any::<[u8; 4]>(), port in any::<u16>()) {
            let client = SocketAddr::new(Ipv4Addr::from(source).into(), port);
            let line = format!("PROXY TCP4 {} 198.51.100.7 {port} 443\r\n", client.ip());
            prop_assert_eq!(read(line.as_bytes()).unwrap().0, Some(client));
            prop_assert_eq!(read(&v2(0x21, 0x11, &v4_block(source, port))).unwrap().0, Some(client));
        }
    }
}
