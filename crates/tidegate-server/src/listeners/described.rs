//! A request that another program received and describes, to be decided by the rules.
//!
//! HTTP clients describe it in JSON, RESP clients in the arguments of a command. This module validates both. Errors
//! begin with the name of the part, such as `path: …`.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};

/// The most headers of a described request. Servers accept 100 (Apache, Envoy) to some hundreds.
pub(crate) const HEADERS_MAX: usize = 256;
/// The most bytes of a header name.
pub(crate) const HEADER_NAME_BYTES_MAX: usize = 256;
/// The most bytes of all names and values together: as many as the HTTP listener reads of its own headers.
pub(crate) const HEADERS_BYTES_MAX: usize = 64 * 1024;

/// The reason why a description is rejected. The message says what is expected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DescriptionError {
    #[error("method: invalid HTTP method; expected one such as GET")]
    Method,
    #[error(
        "path: expected a path such as /shorten?x=1, which begins with / and contains no # and no control character"
    )]
    Path,
    #[error("path: {0}")]
    Uri(#[from] http::uri::InvalidUri),
    #[error("peer: expected an IP address such as 203.0.113.9")]
    Peer,
    #[error("headers can have at most {HEADERS_MAX} entries")]
    TooManyHeaders,
    #[error("headers can have at most {HEADERS_BYTES_MAX} bytes in total")]
    HeadersTooLong,
    #[error("headers: `{0}` is not a header name")]
    HeaderName(String),
    #[error("headers: the value of `{0}` contains a control character")]
    HeaderValue(HeaderName),
}

/// Creates a request with this method, path and headers.
///
/// # Errors
/// If the method is invalid, or the path does not begin with `/` or contains a character that no path may contain.
pub(crate) fn described_request(
    method: &[u8],
    path: &[u8],
    headers: HeaderMap,
) -> Result<Request<()>, DescriptionError> {
    if !path.starts_with(b"/") || path.iter().any(|byte| matches!(byte, b'#' | 0x7f)) {
        return Err(DescriptionError::Path);
    }
    let mut request = Request::new(());
    *request.method_mut() = Method::from_bytes(method).map_err(|_| DescriptionError::Method)?;
    *request.uri_mut() = Uri::try_from(path)?;
    *request.headers_mut() = headers;
    Ok(request)
}

/// Parses the address of the peer.
///
/// # Errors
/// If the text is not an IP address.
pub(crate) fn peer_address(text: &[u8]) -> Result<IpAddr, DescriptionError> {
    let text = std::str::from_utf8(text).map_err(|_| DescriptionError::Peer)?;
    text.parse().map_err(|_| DescriptionError::Peer)
}

/// The headers read so far. Adding one fails if it is invalid or exceeds a bound.
#[derive(Default)]
pub(crate) struct HeaderLines {
    pub(crate) headers: HeaderMap,
    bytes: usize,
}

impl HeaderLines {
    /// Parses the name of the next header.
    ///
    /// # Errors
    /// If it is invalid, or there are too many headers or bytes.
    pub(crate) fn name(&mut self, name: &[u8]) -> Result<HeaderName, DescriptionError> {
        if self.headers.len() == HEADERS_MAX {
            return Err(DescriptionError::TooManyHeaders);
        }
        self.count(name)?;
        let parsed = HeaderName::from_bytes(name).ok().filter(|_| name.len() <= HEADER_NAME_BYTES_MAX);
        parsed.ok_or_else(|| DescriptionError::HeaderName(shown(name)))
    }

    /// Appends a header whose name [`name`](Self::name) has returned.
    ///
    /// # Errors
    /// If the value is invalid, or there are too many bytes.
    pub(crate) fn add(&mut self, name: HeaderName, value: &[u8]) -> Result<(), DescriptionError> {
        self.count(value)?;
        match HeaderValue::from_bytes(value) {
            Ok(value) => {
                self.headers.append(name, value);
                Ok(())
            }
            Err(_) => Err(DescriptionError::HeaderValue(name)),
        }
    }

    fn count(&mut self, text: &[u8]) -> Result<(), DescriptionError> {
        self.bytes += text.len();
        if self.bytes <= HEADERS_BYTES_MAX { Ok(()) } else { Err(DescriptionError::HeadersTooLong) }
    }
}

/// Returns the beginning of a text, for an error message.
fn shown(text: &[u8]) -> String {
    String::from_utf8_lossy(text).chars().take(64).collect()
}
