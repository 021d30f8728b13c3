//! Finds the rules that apply to a request: by host, then path, then method, then headers.
//!
//! ```text
//!   host    ─▶ tries of any host, this host, *.domain    one lookup each
//!   path    ─▶ each reading is searched in these tries   one lookup per segment
//!   method  ─▶ a bit test                                per rule whose path matches
//!   headers ─▶ a comparison                              per rule that remains
//! ```

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderName, HeaderValue};
use smallvec::SmallVec;

use super::comparisons;
use super::host::{self, ByHost, HostPattern};
use super::method::{MethodNames, MethodSet};
use super::path::{LazyReadings, Readings};
use super::pattern::Pattern;
use super::request::RequestView;
use super::trie::{Candidate, Trie};

/// Indices of rules in their rule set.
pub(crate) type Indices = SmallVec<[u32; 8]>;

/// The conditions of a rule. An empty list of paths or hosts matches all of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Conditions {
    pub(crate) methods: MethodSet,
    pub(crate) paths: Vec<Pattern>,
    pub(crate) hosts: Vec<HostPattern>,
    pub(crate) headers: BTreeMap<HeaderText, HeaderCondition>,
}

/// A header name in lower case that can be ordered.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct HeaderText(pub(crate) Box<str>);

/// The condition on one header.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum HeaderCondition {
    /// The header is present, with any value.
    Present,
    /// At least one line of the header has this value.
    Equals(HeaderValue),
}

impl Default for Conditions {
    fn default() -> Self {
        Conditions { methods: MethodSet::ALL, paths: Vec::new(), hosts: Vec::new(), headers: BTreeMap::new() }
    }
}

impl Conditions {
    /// Returns one set of conditions for each combination of a path and a host. Together they equal these conditions.
    pub(crate) fn alternatives(&self) -> impl Iterator<Item = Conditions> + '_ {
        let or_all = |count: usize| 0..count.max(1);
        or_all(self.paths.len()).flat_map(move |path| {
            or_all(self.hosts.len()).map(move |host| Conditions {
                methods: self.methods,
                paths: self.paths.get(path).cloned().into_iter().collect(),
                hosts: self.hosts.get(host).cloned().into_iter().collect(),
                headers: self.headers.clone(),
            })
        })
    }

    /// Returns the conditions of requests that match both, or `None` if there are none.
    ///
    /// Both must be [alternatives](Conditions::alternatives): with several paths or hosts, only the first is
    /// considered.
    pub(crate) fn shared(&self, other: &Conditions) -> Option<Conditions> {
        let methods = self.methods.shared(other.methods);
        if methods == MethodSet::NONE {
            return None;
        }
        let paths = shared(&self.paths, &other.paths, Pattern::shared)?;
        let hosts = shared(&self.hosts, &other.hosts, HostPattern::shared)?;
        let mut headers = self.headers.clone();
        for (name, condition) in &other.headers {
            match headers.get(name) {
                Some(HeaderCondition::Equals(mine)) => match condition {
                    HeaderCondition::Equals(theirs) if mine != theirs => return None,
                    _ => {}
                },
                _ => drop(headers.insert(name.clone(), condition.clone())),
            }
        }
        Some(Conditions { methods, paths, hosts, headers })
    }

    /// Returns whether the headers meet all header conditions.
    fn headers_fit(&self, headers: &HeaderMap) -> bool {
        self.headers.iter().all(|(name, condition)| {
            comparisons::count();
            match condition {
                HeaderCondition::Present => headers.contains_key(&*name.0),
                HeaderCondition::Equals(value) => headers.get_all(&*name.0).iter().any(|line| line == value),
            }
        })
    }
}

/// Returns the intersection of two lists, each of one pattern or empty (which matches everything).
fn shared<T: Clone>(one: &[T], other: &[T], shared: impl Fn(&T, &T) -> Option<T>) -> Option<Vec<T>> {
    match (one, other) {
        ([], list) | (list, []) => Some(list.to_vec()),
        ([one, ..], [other, ..]) => Some(vec![shared(one, other)?]),
    }
}

/// An index of rules by their conditions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Matcher {
    by_host: ByHost<Trie>,
    conditions: Vec<Conditions>,
    methods: MethodNames,
    /// Headers that override the method, such as `X-HTTP-Method-Override`.
    override_headers: Vec<HeaderName>,
    /// All methods of rules with a path condition.
    path_methods: MethodSet,
    /// The rules without conditions.
    unconditional: Indices,
    /// Whether there are rules with conditions.
    has_conditional: bool,
}

impl Matcher {
    /// Creates a matcher without rules.
    ///
    /// `methods` must be the one that parsed the methods of the rules. The values of `override_headers` count as
    /// further methods of a request.
    pub(crate) fn new(methods: MethodNames, override_headers: Vec<HeaderName>) -> Matcher {
        Matcher { methods, override_headers, ..Matcher::default() }
    }

    /// Adds the next rule. If it is not active, it takes up an index but never matches.
    ///
    /// # Panics
    /// Panics at 2^32 rules.
    pub(crate) fn push(&mut self, conditions: Conditions, is_active: bool) {
        let rule = u32::try_from(self.conditions.len()).expect("fewer than 2^32 rules");
        if is_active {
            match conditions == Conditions::default() {
                true => self.unconditional.push(rule),
                false => self.has_conditional = true,
            }
            let candidate = Candidate { rule, methods: conditions.methods };
            if !conditions.paths.is_empty() {
                self.path_methods = self.path_methods.and(conditions.methods);
            }
            let everywhere = [Pattern { segments: Vec::new(), is_prefix: true }];
            let paths = if conditions.paths.is_empty() { &everywhere[..] } else { &conditions.paths };
            let hosts: SmallVec<[Option<&HostPattern>; 2]> = match conditions.hosts.is_empty() {
                true => SmallVec::from_slice(&[None]),
                false => conditions.hosts.iter().map(Some).collect(),
            };
            for host in hosts {
                paths.iter().for_each(|path| self.by_host.entry(host).insert(path, candidate));
            }
        }
        self.conditions.push(conditions);
    }

    /// Returns the conditions of all rules, in the order of their indices.
    pub(crate) fn conditions(&self) -> &[Conditions] {
        &self.conditions
    }

    /// Returns the active rules if none of them has conditions, so that they apply to every request. Otherwise `None`.
    pub(crate) fn same_for_all(&self) -> Option<&[u32]> {
        (!self.has_conditional).then_some(&*self.unconditional)
    }

    /// Returns the rules that apply to a request, in ascending order.
    ///
    /// A request with override headers matches the rules of each method that it names.
    pub(crate) fn find(&self, request: &RequestView<'_>, readings: &LazyReadings<'_>) -> Indices {
        let overrides = self.override_headers.iter().flat_map(|name| request.headers().get_all(name));
        let overrides = overrides.filter_map(|value| value.to_str().ok());
        let method = self.methods.of(request.method());
        let methods = overrides.fold(method, |methods, name| methods.and(self.methods.of_name(name.trim())));
        self.search(methods, readings, request.hosts(), request.headers())
    }

    /// Returns the rules that apply to an example request that meets these conditions and as little else as possible.
    pub(crate) fn find_like(&self, conditions: &Conditions) -> Indices {
        let path = conditions.paths.first().map_or("/".to_owned(), Pattern::example);
        let host = conditions.hosts.first().map(HostPattern::example);
        let mut headers = HeaderMap::new();
        for (name, condition) in &conditions.headers {
            let value = match condition {
                HeaderCondition::Present => HeaderValue::from_static("x"),
                HeaderCondition::Equals(value) => value.clone(),
            };
            headers.insert(HeaderName::from_bytes(name.0.as_bytes()).expect("a valid header name"), value);
        }
        self.search(conditions.methods.first(), &LazyReadings::of(&path), host.as_deref().into_iter(), &headers)
    }

    fn search<'r>(
        &self,
        method: MethodSet,
        readings: &LazyReadings<'_>,
        hosts: impl Iterator<Item = &'r str>,
        headers: &HeaderMap,
    ) -> Indices {
        let mut found = Indices::new();
        let readings = self.path_methods.overlaps(method).then(|| readings.get());
        let mut search = |trie: &Trie| match readings {
            // No rule for this method has a path condition.
            None => trie.find(b"", method, |rule| found.push(rule)),
            Some(Readings::Each(texts)) => {
                texts.iter().for_each(|text| trie.find(text, method, |rule| found.push(rule)));
            }
            Some(Readings::Any) => trie.all(method, |rule| found.push(rule)),
        };
        search(self.by_host.for_any());
        if self.by_host.tells_hosts_apart() {
            for name in hosts.flat_map(host::readings) {
                self.by_host.for_host(&name, &mut search);
            }
        }
        // A rule may be found several times, by several readings, patterns or hosts.
        found.sort_unstable();
        found.dedup();
        found.retain(|rule| self.conditions[*rule as usize].headers_fit(headers));
        found
    }
}

impl HeaderText {
    /// Creates the ordered form of a header name.
    pub(crate) fn of(name: &HeaderName) -> HeaderText {
        HeaderText(name.as_str().into())
    }
}
