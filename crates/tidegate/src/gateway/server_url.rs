//! The URL of an upstream's server.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// The URL of a server: `http://HOST[:PORT]` or `https://HOST[:PORT]`, and nothing else.
///
/// ```
/// use tidegate::gateway::ServerUrl;
///
/// let url: ServerUrl = "https://api.internal".parse()?;
/// assert_eq!((url.host(), url.port(), url.is_tls()), ("api.internal", 443, true));
/// let error = "localhost:3000".parse::<ServerUrl>().unwrap_err();
/// assert!(error.to_string().contains("did you mean http://localhost:3000?"));
/// # Ok::<(), tidegate::gateway::ServerUrlError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ServerUrl {
    is_tls: bool,
    /// A name or an address; an IPv6 address has no brackets.
    host: Box<str>,
    port: u16,
    /// The host, with its brackets, and the port if the URL has one.
    authority: Box<str>,
}

/// The reason why a text is not the URL of a server. The message says what is accepted, and contains no user or
/// password.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem}; expected http://HOST:PORT or https://HOST:PORT, such as http://127.0.0.1:3000")]
pub struct ServerUrlError {
    problem: String,
}

impl ServerUrl {
    /// Returns whether the scheme is `https`.
    pub fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// Returns the name or the address of the server. An IPv6 address has no brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the port of the URL. Defaults to 80 for `http` and 443 for `https`.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the host and, if the URL has one, the port, as in a `Host` header.
    pub fn authority(&self) -> &str {
        &self.authority
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.is_tls { "https" } else { "http" }, self.authority)
    }
}

impl FromStr for ServerUrl {
    type Err = ServerUrlError;

    fn from_str(text: &str) -> Result<ServerUrl, ServerUrlError> {
        let error = |problem: &str| ServerUrlError { problem: problem.to_owned() };
        let Some((scheme, rest)) = text.split_once("://") else {
            // The text may contain a password. It is repeated only if it has neither a user nor anything odd.
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte);
            let problem = if !text.is_empty() && text.bytes().all(is_plain) {
                format!("the scheme is missing; did you mean http://{text}?")
            } else {
                "the scheme is missing".to_owned()
            };
            return Err(ServerUrlError { problem });
        };
        let is_tls = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err(error("the scheme must be http or https")),
        };
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, more) = rest.split_at(end);
        if authority.contains('@') {
            return Err(error("the URL must not contain a user or password"));
        }
        if more.contains(['?', '#']) {
            return Err(error("the URL must not contain a query or fragment"));
        }
        if !matches!(more, "" | "/") {
            return Err(error("the URL must not contain a path: requests keep their own"));
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => {
                let (address, port) = rest.split_once(']').ok_or_else(|| error("the bracket `]` is missing"))?;
                address.parse::<Ipv6Addr>().map_err(|_| error("the text in brackets is not an IPv6 address"))?;
                (address, port)
            }
            None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
        };
        let port = match port.strip_prefix(':') {
            Some(digits) => {
                let port = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
                port.filter(|port| *port > 0).ok_or_else(|| error("the port must be a number from 1 to 65535"))?
            }
            None if port.is_empty() => 80 + 363 * u16::from(is_tls),
            None => return Err(error("the host is invalid")),
        };
        let is_host_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
        if host.is_empty() || !host.bytes().all(is_host_byte) {
            return Err(error("the host is missing or invalid"));
        }
        Ok(ServerUrl { is_tls, host: host.into(), port, authority: authority.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_urls_are_split_into_host_and_port() {
        for (text, is_tls, host, port, authority) in [
            ("http://127.0.0.1:3000", false, "127.0.0.1", 3000, "127.0.0.1:3000"),
            ("http://localhost", false, "localhost", 80, "localhost"),
            ("HTTPS://api.internal/", true, "api.internal", 443, "api.internal"),
            ("https://[::1]:8443", true, "::1", 8443, "[::1]:8443"),
            ("http://[2001:db8::1]", false, "2001:db8::1", 80, "[2001:db8::1]"),
        ] {
            let url: ServerUrl = text.parse().unwrap();
            assert_eq!((url.is_tls(), url.host(), url.port(), url.authority()), (is_tls, host, port, authority));
            assert_eq!(url.to_string().parse::<ServerUrl>().unwrap(), url, "{url}");
        }
    }

    #[test]
    fn other_urls_are_refused_with_what_is_accepted_and_without_their_password() {
        for (text, phrase) in [
            ("", "the scheme is missing;"),
            ("localhost:3000", "did you mean http://localhost:3000?"),
            ("user:planted@host", "the scheme is missing;"),
            ("ftp://host", "http or https"),
            ("unix:///run/app.sock", "http or https"),
            ("http://", "the host is missing"),
            ("http://:80", "the host is missing"),
            ("http://user:planted@host", "not contain a user or password"),
            ("http://host/api", "not contain a path"),
            ("http://host//", "not contain a path"),
            ("http://host?x=1", "not contain a query"),
            ("http://host/#x", "a query or fragment"),
            ("http://host:0", "from 1 to 65535"),
            ("http://host:65536", "from 1 to 65535"),
            ("http://host:+1", "from 1 to 65535"),
            ("http://host:", "from 1 to 65535"),
            ("http://::1:80", "from 1 to 65535"),
            ("http://[::1", "`]` is missing"),
            ("http://[::x]", "not an IPv6 address"),
            ("http://[::1]80", "the host is invalid"),
            ("http://ho st", "invalid"),
            ("http://höst", "invalid"),
        ] {
            let message = text.parse::<ServerUrl>().unwrap_err().to_string();
            assert!(message.contains(phrase) && message.contains("expected http://HOST:PORT"), "{text}: {message}");
            assert!(!message.contains("planted"), "{text}: {message}");
        }
    }
}
