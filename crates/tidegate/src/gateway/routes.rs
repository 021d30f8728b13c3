//! Routes from requests to upstreams, by host and by a prefix of the path.
//!
//! A route may name hosts, a path prefix, both or neither. The most specific one wins: first by host (a name before
//! `*.example.com`, a longer domain before a shorter one, any of them before a route for all hosts), then by the
//! longest prefix. If no route of a host has a prefix that matches the path, those of the next less specific host are
//! searched.
//!
//! A prefix ends where a segment ends: `/api` matches `/api` and `/api/users`, but not `/apiary`. The path is compared
//! in its canonical form, as rules count it, so that `/api//./x` is routed as `/api/x`; the upstream receives it as it
//! was sent. A path that servers may interpret differently is compared as it was sent.

use smallvec::SmallVec;

use crate::rules::RequestView;
use crate::rules::host::{ByHost, HostPattern, readings};

/// A path prefix that ends at the end of a segment, without a trailing slash. The empty prefix matches all paths.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct PathPrefix(Box<str>);

impl PathPrefix {
    /// Parses a prefix such as `/api` or `/api/`.
    ///
    /// # Errors
    /// Returns what to write instead if the text does not begin with a slash, or has a wildcard, a query, an escape or
    /// an empty or dot segment.
    pub(crate) fn parse(text: &str) -> Result<PathPrefix, &'static str> {
        let Some(rest) = text.strip_prefix('/') else { return Err("begin the prefix with a slash, such as `/api`") };
        if text.contains('*') || text.contains(['{', '}']) {
            return Err("write the prefix alone: `/api` matches `/api` and everything below it");
        }
        let is_path_byte = |byte: u8| byte.is_ascii_graphic() && !b"?#%\\\"<>^`|".contains(&byte);
        let segments = rest.strip_suffix('/').unwrap_or(rest);
        let is_segment = |segment: &str| !matches!(segment, "" | "." | "..");
        if !text.bytes().all(is_path_byte) || !(text == "/" || segments.split('/').all(is_segment)) {
            return Err("write a plain path, such as `/api/v1`, without a query, escapes, `//` or dot segments");
        }
        Ok(PathPrefix(text.trim_end_matches('/').into()))
    }

    fn matches(&self, path: &str) -> bool {
        path.strip_prefix(&*self.0).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) || self.0.is_empty()
    }
}

/// The hosts and the path prefix of an upstream. Without hosts, all hosts match.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Route {
    pub(crate) hosts: Vec<HostPattern>,
    pub(crate) prefix: PathPrefix,
}

/// Two upstreams with the same host and the same prefix. `first` and `second` are their indices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RouteConflict {
    pub(crate) first: usize,
    pub(crate) second: usize,
}

/// The prefixes of a host, the longest first, each with the index of its upstream.
type Prefixes = Vec<(PathPrefix, usize)>;

/// The routes from requests to upstreams, by host and path prefix. Empty by default: no request has an upstream.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    by_host: ByHost<Prefixes>,
    /// The routes from which `by_host` was built.
    routes: Vec<Route>,
}

impl Routes {
    /// Creates routes to upstreams. An upstream's index is that of its route.
    ///
    /// Also returns each pair of routes that match the same requests; the first of them is used.
    pub(crate) fn new(routes: Vec<Route>) -> (Routes, Vec<RouteConflict>) {
        let (mut by_host, mut conflicts) = (ByHost::<Prefixes>::default(), Vec::new());
        for (index, route) in routes.iter().enumerate() {
            let any = route.hosts.is_empty().then_some(None);
            for host in any.into_iter().chain(route.hosts.iter().map(Some)) {
                let prefixes = by_host.entry(host);
                match prefixes.iter().find(|(prefix, _)| *prefix == route.prefix) {
                    Some((_, first)) => conflicts.push(RouteConflict { first: *first, second: index }),
                    None => {
                        let at = prefixes.partition_point(|(prefix, _)| prefix.0.len() >= route.prefix.0.len());
                        prefixes.insert(at, (route.prefix.clone(), index));
                    }
                }
            }
        }
        (Routes { by_host, routes }, conflicts)
    }

    /// Creates the routes of a single upstream, which receives all requests.
    pub fn to_one() -> Routes {
        Routes::new(vec![Route::default()]).0
    }

    /// Returns the index of the upstream for a request, or `None` if no route matches.
    ///
    /// If the request names several hosts, the first is used.
    pub fn find(&self, request: &RequestView<'_>) -> Option<usize> {
        if let [route] = &*self.routes
            && *route == Route::default()
        {
            return Some(0);
        }
        let canonical = request.canonical_path();
        let path = if canonical.is_empty() { request.path() } else { &canonical };
        let in_prefixes =
            |prefixes: &Prefixes| prefixes.iter().find(|(prefix, _)| prefix.matches(path)).map(|(_, index)| *index);
        if self.by_host.has_host_patterns()
            && let Some(host) = request.hosts().next().and_then(|host| readings(host).next())
        {
            // A name, then domains from short to long.
            let mut matching: SmallVec<[&Prefixes; 4]> = SmallVec::new();
            self.by_host.for_host(&host, |prefixes| matching.push(prefixes));
            let exact = self.by_host.exact(&host);
            let domains =
                matching.iter().copied().filter(|found| !exact.is_some_and(|exact| std::ptr::eq(*found, exact)));
            let domains: SmallVec<[&Prefixes; 4]> = domains.collect();
            if let Some(index) = exact.into_iter().chain(domains.into_iter().rev()).find_map(in_prefixes) {
                return Some(index);
            }
        }
        in_prefixes(self.by_host.for_all_hosts())
    }
}

impl PartialEq for Routes {
    fn eq(&self, other: &Routes) -> bool {
        self.routes == other.routes
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn routes(texts: &[(&[&str], &str)]) -> (Routes, Vec<RouteConflict>) {
        let route = |(hosts, prefix): &(&[&str], &str)| Route {
            hosts: hosts.iter().map(|text| HostPattern::parse(text).unwrap()).collect(),
            prefix: PathPrefix::parse(prefix).unwrap(),
        };
        Routes::new(texts.iter().map(route).collect())
    }

    fn find(routes: &Routes, host: &str, path: &str) -> Option<usize> {
        let request = Request::get(path).header("host", host).body(()).unwrap();
        routes.find(&RequestView::of(&request))
    }

    #[test]
    fn the_longest_prefix_wins_and_ends_with_a_segment() {
        let (routes, conflicts) = routes(&[(&[], "/"), (&[], "/api"), (&[], "/api/v2/"), (&[], "/static")]);
        assert_eq!(conflicts, []);
        for (path, expected) in [
            ("/", 0),
            ("/apiary", 0),
            ("/api", 1),
            ("/api/", 1),
            ("/api/v1", 1),
            ("/api/v2", 2),
            ("/api/v2/x?y=/static", 2),
            ("/api/v22", 1),
            ("/static/../api/v2/x", 2),
            ("/api//./v2", 2),
            ("/%61pi", 1),
            ("/API", 0),
        ] {
            assert_eq!(find(&routes, "x", path), Some(expected), "{path}");
        }
    }

    #[test]
    fn the_most_specific_host_with_a_prefix_of_the_path_wins() {
        let (routes, _) = routes(&[
            (&[], "/api"),
            (&["*.example.com"], "/"),
            (&["api.example.com"], "/v1"),
            (&["*.eu.example.com", "eu.example.com"], "/"),
        ]);
        for (host, path, expected) in [
            ("api.example.com", "/v1/x", Some(2)),
            ("API.example.com:8080", "/v1", Some(2)),
            ("api.example.com", "/other", Some(1)),
            ("a.eu.example.com", "/api", Some(3)),
            ("eu.example.com", "/", Some(3)),
            ("other.test", "/api/x", Some(0)),
            ("other.test", "/", None),
            ("example.com", "/", None),
        ] {
            assert_eq!(find(&routes, host, path), expected, "{host}{path}");
        }
    }

    #[test]
    fn two_routes_for_the_same_requests_are_a_conflict() {
        let (_, conflicts) = routes(&[(&["a.b", "c.d"], "/x"), (&["c.d"], "/x/"), (&[], "/"), (&[], "/")]);
        let pair = |first, second| RouteConflict { first, second };
        assert_eq!(conflicts, [pair(0, 1), pair(2, 3)]);
        assert_eq!(Routes::default().find(&RequestView::of(&Request::get("/").body(()).unwrap())), None);
    }

    #[test]
    fn a_prefix_that_is_not_a_plain_path_is_refused() {
        for text in ["", "api", "/api/*", "/a?b", "/a%20b", "/a//b", "/a/../b", "/ä", "//", "/{id}"] {
            assert!(PathPrefix::parse(text).is_err(), "{text}");
        }
        assert_eq!(PathPrefix::parse("/"), Ok(PathPrefix::default()));
    }
}
