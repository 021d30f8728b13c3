//! Matches hosts against patterns: `api.example.com`, `*.example.com`.
//!
//! Hosts are compared as in DNS: without case, port and trailing dots. A request may name several hosts (in its URI and
//! in one or more `Host` headers). The upstream may use any of them, so a rule applies if any matches. `a:b@host` is
//! `host` for a server that parses an authority, and `a` for a server that cuts at the first colon. Both are matched.

use std::borrow::Cow;
use std::collections::HashMap;

use foldhash::fast::RandomState;

use super::comparisons;

/// A host pattern of a rule, in lower case: one host, or all hosts below a domain.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum HostPattern {
    /// Matches this host: a name, or an IPv6 address in brackets.
    Exact(Box<str>),
    /// `*.example.com`, kept as `example.com`: matches every host below this domain at any depth, but not the domain
    /// itself.
    Below(Box<str>),
}

impl HostPattern {
    /// Parses a pattern: a host name, an address, or `*.` and a host name. Case is ignored.
    ///
    /// An IPv6 address is in brackets. The text between them is not checked.
    ///
    /// # Errors
    /// Returns what to write instead if the text is empty, has a port, a scheme, a path, an empty label (also by a
    /// trailing dot) or non-ASCII characters, or has a `*` elsewhere than in `*.` at its beginning.
    pub(crate) fn parse(text: &str) -> Result<HostPattern, &'static str> {
        let expected = "write only a host: `api.example.com`, or `*.example.com` for all hosts below it";
        if !text.is_ascii() {
            // Clients send such names in this form only, so another form would never match.
            return Err("write the name as `xn--…`, the form in which clients send it");
        }
        let lower = text.to_ascii_lowercase();
        let name = lower.strip_prefix("*.").unwrap_or(&lower);
        let is_address = name.starts_with('[') && name.ends_with(']') && !lower.starts_with('*');
        let is_host_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_name = !name.is_empty() && name.bytes().all(is_host_byte) && !name.starts_with('.');
        if !is_address && (!is_name || name.split('.').any(str::is_empty)) {
            return Err(expected);
        }
        Ok(if name.len() == lower.len() { HostPattern::Exact(name.into()) } else { HostPattern::Below(name.into()) })
    }

    /// Returns the pattern that matches the hosts that both patterns match, or `None` if no host matches both.
    pub(crate) fn intersection(&self, other: &HostPattern) -> Option<HostPattern> {
        use HostPattern::{Below, Exact};
        let is_below = |name: &str, top: &str| name.strip_suffix(top).is_some_and(|rest| rest.ends_with('.'));
        let narrow = match (self, other) {
            (one, another) if one == another => one,
            (Exact(name) | Below(name), Below(top)) if is_below(name, top) => self,
            (Below(top), Exact(name) | Below(name)) if is_below(name, top) => other,
            _ => return None,
        };
        Some(narrow.clone())
    }

    /// Returns a host that the pattern matches: `x.example.com` for `*.example.com`.
    pub(crate) fn example(&self) -> String {
        match self {
            HostPattern::Exact(name) => name.to_string(),
            HostPattern::Below(name) => format!("x.{name}"),
        }
    }
}

/// Returns the hosts that servers may take the value of a `Host` header for: one, or two if it contains an `@`.
///
/// The first is the whole value, the second the text after the last `@`. Both are in lower case and without surrounding
/// spaces, the first colon and what follows it, and trailing dots. The brackets of an IPv6 address are kept.
pub(crate) fn readings(host: &str) -> impl Iterator<Item = Cow<'_, str>> {
    let behind_user = host.rsplit_once('@').map(|(_, host)| normal(host));
    std::iter::once(normal(host)).chain(behind_user)
}

/// Returns a host in lower case, without surrounding spaces, without port (the first colon and what follows it, outside
/// of brackets) and without trailing dots.
fn normal(host: &str) -> Cow<'_, str> {
    let host = host.trim();
    // An IPv6 address has colons of its own, within brackets.
    let end = if host.starts_with('[') { host.find(']').map(|end| end + 1) } else { host.find(':') };
    let name = host[..end.unwrap_or(host.len())].trim_end_matches('.');
    if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(name.to_ascii_lowercase())
    } else {
        Cow::Borrowed(name)
    }
}

/// A map from host patterns to values, searched by host, with one further value for all hosts.
#[derive(Clone, Debug, Default)]
pub(crate) struct ByHost<T> {
    any: T,
    exact: HashMap<Box<str>, T, RandomState>,
    below: HashMap<Box<str>, T, RandomState>,
    /// Maximum number of labels of a name in `below`. No more labels of a host are tried.
    labels_max: usize,
}

impl<T: Default> ByHost<T> {
    /// Returns the value of a pattern, or the value for all hosts if `pattern` is `None`.
    ///
    /// Inserts the default value if the pattern has none yet.
    pub(crate) fn entry(&mut self, pattern: Option<&HostPattern>) -> &mut T {
        match pattern {
            None => &mut self.any,
            Some(HostPattern::Exact(name)) => self.exact.entry(name.clone()).or_default(),
            Some(HostPattern::Below(name)) => {
                self.labels_max = self.labels_max.max(name.split('.').count());
                self.below.entry(name.clone()).or_default()
            }
        }
    }

    /// Returns whether the map has a pattern. If not, only the value for all hosts applies, whatever the host.
    pub(crate) fn has_host_patterns(&self) -> bool {
        !self.exact.is_empty() || !self.below.is_empty()
    }

    /// Returns the value for all hosts.
    pub(crate) fn for_all_hosts(&self) -> &T {
        &self.any
    }

    /// Returns the value of the pattern that is exactly `host`, which must be normalized. `None` if there is no such pattern.
    pub(crate) fn exact(&self, host: &str) -> Option<&T> {
        self.exact.get(host)
    }

    /// Calls `found` for the value of each pattern that matches `host`, but not for the value for all hosts.
    ///
    /// `host` must be normalized, as [`readings`] returns it.
    pub(crate) fn for_host<'s>(&'s self, host: &str, mut found: impl FnMut(&'s T)) {
        if !self.exact.is_empty() {
            comparisons::count();
            self.exact.get(host).into_iter().for_each(&mut found);
        }
        if self.below.is_empty() {
            return;
        }
        for (dot, _) in host.rmatch_indices('.').take(self.labels_max) {
            comparisons::count();
            if dot > 0 {
                self.below.get(&host[dot + 1..]).into_iter().for_each(&mut found);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_a_host_have_one_normal_form() {
        for (host, expected) in [
            ("api.example.com", "api.example.com"),
            ("API.Example.COM:8080", "api.example.com"),
            ("api.example.com.", "api.example.com"),
            ("api.example.com.:443", "api.example.com"),
            (" api.example.com ", "api.example.com"),
            ("api.example.com:", "api.example.com"),
            ("[2001:DB8::1]:80", "[2001:db8::1]"),
            ("[::1]", "[::1]"),
            ("[::1", "[::1"),
            ("", ""),
            ("api.example.com..:80", "api.example.com"),
            ("api.example.com:80:90", "api.example.com"),
            ("api.example.com:http", "api.example.com"),
        ] {
            assert_eq!(readings(host).collect::<Vec<_>>(), [expected], "{host}");
        }
    }

    #[test]
    fn host_with_a_user_has_two_readings() {
        for (host, expected) in [
            ("user@api.example.com", ["user@api.example.com", "api.example.com"]),
            ("user:secret@API.example.com.:80", ["user", "api.example.com"]),
            ("api.example.com:80@other", ["api.example.com", "other"]),
            ("a@b@api.example.com", ["a@b@api.example.com", "api.example.com"]),
        ] {
            assert_eq!(readings(host).collect::<Vec<_>>(), expected, "{host}");
        }
    }

    #[test]
    fn invalid_host_pattern_is_refused() {
        for text in [
            "münchen.example",
            "",
            "*",
            "*.",
            "a.*.b",
            "https://a.b",
            "a.b/c",
            "a.b:80",
            ".a.b",
            "a..b",
            "a b",
            "*.[::1]",
        ] {
            assert!(HostPattern::parse(text).is_err(), "{text}");
        }
        assert_eq!(HostPattern::parse("*.Example.com"), Ok(HostPattern::Below("example.com".into())));
        assert_eq!(HostPattern::parse("[::1]"), Ok(HostPattern::Exact("[::1]".into())));
    }

    #[test]
    fn intersection_matches_what_both_patterns_match() {
        for (one, other, expected) in [
            ("*.example.com", "api.example.com", Some("api.example.com")),
            ("*.example.com", "*.eu.example.com", Some("*.eu.example.com")),
            ("a.b", "a.b", Some("a.b")),
            ("*.example.com", "example.com", None),
            ("*.example.com", "badexample.com", None),
            ("a.b", "c.b", None),
        ] {
            let [one, other] = [one, other].map(|text| HostPattern::parse(text).unwrap());
            let expected = expected.map(|text| HostPattern::parse(text).unwrap());
            assert_eq!(one.intersection(&other), expected, "{one:?} {other:?}");
            assert_eq!(other.intersection(&one), expected, "{other:?} {one:?}");
        }
    }

    #[test]
    fn wildcard_matches_any_depth_but_not_the_domain_itself() {
        let mut hosts: ByHost<Vec<u8>> = ByHost::default();
        for (number, text) in ["*.example.com", "api.example.com", "*.eu.example.com", "*.com"].into_iter().enumerate()
        {
            hosts.entry(Some(&HostPattern::parse(text).unwrap())).push(number as u8);
        }
        for (host, expected) in [
            ("example.com", &[3][..]),
            ("api.example.com", &[1, 3, 0]),
            ("a.b.eu.example.com", &[3, 0, 2]),
            ("badexample.com", &[3]),
            (".com", &[]),
            ("com", &[]),
        ] {
            let mut found = Vec::new();
            hosts.for_host(host, |numbers| found.extend_from_slice(numbers));
            assert_eq!(found, expected, "{host}");
        }
    }

    #[test]
    fn host_of_a_thousand_labels_costs_two_lookups() {
        let mut hosts: ByHost<Vec<u8>> = ByHost::default();
        hosts.entry(Some(&HostPattern::parse("*.example.com").unwrap())).push(0);
        let mut found = 0;
        comparisons::take();
        hosts.for_host(&format!("{}example.com", "a.".repeat(1_000)), |_| found += 1);
        assert_eq!((found, comparisons::take()), (1, 2));
    }
}
