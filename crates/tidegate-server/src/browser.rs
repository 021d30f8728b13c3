//! Detects requests that a web page makes a browser send.
//!
//! A page of any site can make a browser send requests to `http://127.0.0.1:8080`, or to any address that the browser
//! reaches and the page's author does not. The page cannot read the responses, but a check charges a counter all the
//! same. Browsers send headers that say where a request comes from, and a page cannot change them:
//!
//! | header | accepted | rejected |
//! |---|---|---|
//! | `Origin` | absent; the host of the request; an allowed origin | any other, including `null` |
//! | `Sec-Fetch-Site` | absent; `same-origin`, `none` | any other, unless `Origin` is allowed |
//!
//! **DNS rebinding.** A page of `http://attacker.example:9180`, whose name is later resolved to 127.0.0.1, sends
//! requests to its own origin, so these headers are accepted. The name in `Host` reveals it. An address cannot be
//! rebound, and neither can a name without a dot (`localhost`, a service in a container network), because it cannot be
//! registered. Other names are rejected unless they are configured.
//!
//! The admin listener rejects them in all requests. The HTTP listener does so only if it has no token, which a page
//! cannot know, and only in checks and refunds that a browser sends. Programs may reach it by any name, and a proxy may
//! pass on the name that its client used. A browser reveals itself, because the Fetch standard requires `Origin` in
//! every request other than GET and HEAD, and a page cannot remove it.

use std::net::IpAddr;
use std::str::FromStr;

use http::header::{HOST, HeaderName, ORIGIN};
use http::{HeaderMap, HeaderValue};

/// A header name that crate `http` does not define.
pub(crate) const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The origin of a web page that may send requests, such as `https://ops.example` or `http://10.0.0.5:3000`.
///
/// Parsed from text, without regard to case. A path is not accepted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WebOrigin(String);

/// The error of parsing a [`WebOrigin`]: the text is not of the form `scheme://host` or `scheme://host:port`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected an origin such as https://ops.example or http://10.0.0.5:3000, without a path")]
pub struct WebOriginError;

impl FromStr for WebOrigin {
    type Err = WebOriginError;

    fn from_str(text: &str) -> Result<WebOrigin, WebOriginError> {
        let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte);
        match text.split_once("://") {
            Some((scheme, host))
                if scheme.starts_with(|first: char| first.is_ascii_alphabetic())
                    && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
                    && !host.is_empty()
                    && host.bytes().all(is_host) =>
            {
                Ok(WebOrigin(text.to_ascii_lowercase()))
            }
            _ => Err(WebOriginError),
        }
    }
}

/// The origins whose web pages may send requests, and the domain names that `Host` may have.
#[derive(Clone, Debug, Default)]
pub(crate) struct BrowserPolicy {
    pub(crate) origins: Vec<WebOrigin>,
    pub(crate) admin_hosts: Vec<String>,
}

impl BrowserPolicy {
    /// Returns whether a browser sent the request for a web page of another site whose origin is not allowed.
    ///
    /// Decides by the headers `Origin`, `Sec-Fetch-Site` and `Host`. A request without the first two is not foreign. An
    /// `Origin` whose host is that of `Host` is not another site. `Sec-Fetch-Site: same-site` is, unless the origin is
    /// allowed.
    pub(crate) fn is_foreign(&self, headers: &HeaderMap) -> bool {
        let host = headers.get(HOST).map(HeaderValue::as_bytes).unwrap_or_default();
        let is_own = |origin: &[u8]| {
            let after_scheme = origin.windows(3).position(|part| part == b"://").map(|at| &origin[at + 3..]);
            after_scheme.is_some_and(|origin| origin.eq_ignore_ascii_case(host))
        };
        let has_other_origin = headers
            .get_all(ORIGIN)
            .iter()
            .any(|origin| !is_own(origin.as_bytes()) && !self.is_allowed(origin.as_bytes()));
        let is_same_site = |site: &HeaderValue| ["same-origin", "none"].contains(&site.to_str().unwrap_or_default());
        let crosses_sites = !headers.get_all(SEC_FETCH_SITE).iter().all(is_same_site);
        has_other_origin || crosses_sites && !self.has_allowed_origin(headers)
    }

    /// Returns whether a browser sent the request for a web page that is [foreign](Self::is_foreign), or whose name may
    /// have been pointed at this instance after the page was loaded.
    ///
    /// A request with `Origin` or `Sec-Fetch-Site` comes from a browser. Its `Host` must then be one that
    /// [`is_known_host`](Self::is_known_host) accepts, unless its origin is allowed.
    pub(crate) fn is_foreign_or_rebound(&self, headers: &HeaderMap) -> bool {
        let is_of_browser = headers.contains_key(ORIGIN) || headers.contains_key(SEC_FETCH_SITE);
        let may_be_rebound = is_of_browser && !self.is_known_host(headers) && !self.has_allowed_origin(headers);
        may_be_rebound || self.is_foreign(headers)
    }

    /// Returns whether there is an `Origin` header, and each one is allowed.
    fn has_allowed_origin(&self, headers: &HeaderMap) -> bool {
        headers.contains_key(ORIGIN) && headers.get_all(ORIGIN).iter().all(|origin| self.is_allowed(origin.as_bytes()))
    }

    fn is_allowed(&self, origin: &[u8]) -> bool {
        self.origins.iter().any(|WebOrigin(one)| one.as_bytes().eq_ignore_ascii_case(origin))
    }

    /// Returns whether the `Host` header of a request cannot be the name of a foreign web page.
    ///
    /// That is so for an IP address, a name without a dot, and the names in `admin_hosts`, each with or without a port.
    ///
    /// With several `Host` headers, each must be one of these. Also true without any: browsers always send it.
    pub(crate) fn is_known_host(&self, headers: &HeaderMap) -> bool {
        headers.get_all(HOST).iter().all(|host| {
            let Ok(host) = host.to_str() else { return false };
            let name = without_port(host);
            name.parse::<IpAddr>().is_ok()
                || !name.contains(['.', ':', '['])
                || self.admin_hosts.iter().any(|one| one.eq_ignore_ascii_case(name))
        })
    }
}

/// Returns the name or address in a `Host` header, without the port and without the brackets of an IPv6 address.
fn without_port(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) if rest.is_empty() || rest.starts_with(':') => address,
        _ => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_a_scheme_and_a_host_and_no_path() {
        for good in ["https://ops.example", "http://10.0.0.5:3000", "HTTP://[::1]:80", "chrome-extension://abcdef"] {
            assert_eq!(good.parse(), Ok(WebOrigin(good.to_ascii_lowercase())));
        }
        for bad in ["", "null", "*", "ops.example", "https://", "https://ops.example/", "https://a b", "://a", "1x://a"]
        {
            assert_eq!(bad.parse::<WebOrigin>(), Err(WebOriginError), "{bad}");
        }
    }

    #[test]
    fn known_hosts_are_addresses_names_without_a_dot_and_configured_names() {
        let policy = BrowserPolicy { admin_hosts: vec!["ops.example".to_owned()], ..BrowserPolicy::default() };
        let hosts = |hosts: &[&str]| hosts.iter().map(|host| (HOST, host.parse().unwrap())).collect::<HeaderMap>();
        for good in [
            "127.0.0.1:9180",
            "127.0.0.1",
            "localhost:9180",
            "LOCALHOST",
            "[::1]:9180",
            "[::1]",
            "10.1.2.3:9180",
            "203.0.113.9",
            "tidegate:9180",
            "ops.example",
            "OPS.example:9180",
            "",
        ] {
            assert!(policy.is_known_host(&hosts(&[good])), "{good}");
        }
        for bad in [
            "attacker.example:9180",
            "attacker.example",
            "localhost.attacker.example",
            "127.0.0.1.attacker.example",
            "ops.example.attacker.example",
            "localhost.",
            "user@ops.example",
            "[::1].attacker.example",
            "[::1",
            "1.2.3",
            "ops.example:80:80",
        ] {
            assert!(!policy.is_known_host(&hosts(&[bad])), "{bad}");
        }
        assert!(policy.is_known_host(&hosts(&[])));
        assert!(!policy.is_known_host(&hosts(&["localhost", "attacker.example"])), "every Host header is checked");
    }
}
