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

/// Indices of rules in [`RuleSet::rules`](super::RuleSet::rules).
pub(crate) type Indices = SmallVec<[u32; 8]>;

/// The conditions of a rule on methods, paths, hosts and headers. All must hold. The default matches every request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Conditions {
    /// The methods, one of which the request must have.
    pub(crate) methods: MethodSet,
    /// The path patterns, one of which must match. If empty, every path matches.
    pub(crate) paths: Vec<Pattern>,
    /// The host patterns, one of which must match. If empty, every host matches.
    pub(crate) hosts: Vec<HostPattern>,
    /// The header conditions, all of which must hold.
    pub(crate) headers: BTreeMap<HeaderText, HeaderCondition>,
}

/// The name of a header in lower case. Unlike [`HeaderName`], it implements `Ord`, so that it can be the key of a map.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct HeaderText(pub(crate) Box<str>);

/// The condition of a rule on one header of a request: that it is present, or that it has a given value.
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
    /// Splits these conditions into alternatives that have at most one path and one host each.
    ///
    /// There is one alternative for each combination of a path and a host. A request meets these conditions if it meets
    /// one of the alternatives.
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

    /// Returns the conditions that hold for the requests that meet both, or `None` if no request does.
    ///
    /// Both must have at most one path and one host, as [alternatives](Conditions::alternatives) do. Further ones are
    /// ignored. Also `None` if both require different values of one header, which only a request with several lines of
    /// that header could meet.
    pub(crate) fn intersection(&self, other: &Conditions) -> Option<Conditions> {
        let methods = self.methods.intersection(other.methods);
        if methods == MethodSet::NONE {
            return None;
        }
        let paths = intersect_lists(&self.paths, &other.paths, Pattern::intersection)?;
        let hosts = intersect_lists(&self.hosts, &other.hosts, HostPattern::intersection)?;
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

    /// Returns whether one request can meet both sets of conditions, judged as in [`Conditions::intersection`].
    ///
    /// Compares every path with every path, and every host with every host; [`Conditions::comparisons_with`] returns
    /// the number of comparisons. `has_several_methods` means that a request may have several methods; methods are then
    /// ignored.
    pub(crate) fn overlaps(&self, other: &Conditions, has_several_methods: bool) -> bool {
        fn overlap<T>(one: &[T], other: &[T], intersect: impl Fn(&T, &T) -> bool) -> bool {
            one.is_empty() || other.is_empty() || one.iter().any(|one| other.iter().any(|other| intersect(one, other)))
        }
        let are_equal = |(name, mine): (&HeaderText, &HeaderCondition)| match (mine, other.headers.get(name)) {
            (HeaderCondition::Equals(mine), Some(HeaderCondition::Equals(theirs))) => mine == theirs,
            _ => true,
        };
        (has_several_methods || self.methods.intersection(other.methods) != MethodSet::NONE)
            && self.headers.iter().all(are_equal)
            && overlap(&self.hosts, &other.hosts, |one, other| one.intersection(other).is_some())
            && overlap(&self.paths, &other.paths, |one, other| one.intersection(other).is_some())
    }

    /// Returns the largest number of comparisons that [`Conditions::overlaps`] makes.
    pub(crate) fn comparisons_with(&self, other: &Conditions) -> usize {
        1 + self.paths.len() * other.paths.len() + self.hosts.len() * other.hosts.len()
    }

    /// Returns whether the headers of a request meet all header conditions. Other conditions are not considered.
    fn headers_match(&self, headers: &HeaderMap) -> bool {
        self.headers.iter().all(|(name, condition)| {
            comparisons::count();
            match condition {
                HeaderCondition::Present => headers.contains_key(&*name.0),
                HeaderCondition::Equals(value) => headers.get_all(&*name.0).iter().any(|line| line == value),
            }
        })
    }
}

/// Intersects two lists of at most one pattern each. An empty list matches everything.
///
/// Returns `None` if nothing matches both patterns, as determined by `intersect`.
fn intersect_lists<T: Clone>(one: &[T], other: &[T], intersect: impl Fn(&T, &T) -> Option<T>) -> Option<Vec<T>> {
    match (one, other) {
        ([], list) | (list, []) => Some(list.to_vec()),
        ([one, ..], [other, ..]) => Some(vec![intersect(one, other)?]),
    }
}

/// An index of rules by their conditions. A rule is represented by its index in the rule set.
#[derive(Clone, Debug, Default)]
pub(crate) struct Matcher {
    by_host: ByHost<Trie>,
    conditions: Vec<Conditions>,
    methods: MethodNames,
    /// Headers that override the method, such as `X-HTTP-Method-Override`.
    override_headers: Vec<HeaderName>,
    /// The methods of all active rules with a path condition.
    path_methods: MethodSet,
    /// The active rules without conditions.
    unconditional: Indices,
    /// Whether there are active rules with conditions.
    has_conditional: bool,
}

impl Matcher {
    /// Creates a matcher without rules.
    ///
    /// `methods` must be the one that [registered](MethodNames::register) the methods of the rules that are added
    /// later. A request matches the rules of its own method and of the methods that its `override_headers` name.
    pub(crate) fn new(methods: MethodNames, override_headers: Vec<HeaderName>) -> Matcher {
        Matcher { methods, override_headers, ..Matcher::default() }
    }

    /// Adds a rule with the next index, counted from 0. If it is not active, it never matches, but still has an index.
    ///
    /// # Panics
    /// Panics at 2^32 rules.
    pub(crate) fn push(&mut self, conditions: Conditions, is_active: bool) {
        let rule = u32::try_from(self.conditions.len()).expect("fewer than 2^32 rules");
        if is_active {
            if conditions == Conditions::default() {
                self.unconditional.push(rule)
            } else {
                self.has_conditional = true
            }
            let candidate = Candidate { rule, methods: conditions.methods };
            if !conditions.paths.is_empty() {
                self.path_methods = self.path_methods.union(conditions.methods);
            }
            let everywhere = [Pattern { segments: Vec::new(), is_prefix: true }];
            let paths = if conditions.paths.is_empty() { &everywhere[..] } else { &conditions.paths };
            let hosts: SmallVec<[Option<&HostPattern>; 2]> = if conditions.hosts.is_empty() {
                SmallVec::from_slice(&[None])
            } else {
                conditions.hosts.iter().map(Some).collect()
            };
            for host in hosts {
                paths.iter().for_each(|path| self.by_host.entry(host).insert(path, candidate));
            }
        }
        self.conditions.push(conditions);
    }

    /// Returns the conditions of all rules, active or not, in the order of their indices.
    pub(crate) fn conditions(&self) -> &[Conditions] {
        &self.conditions
    }

    /// Returns the indices of all active rules if these have no conditions and so apply to every request, else `None`.
    pub(crate) fn rules_for_every_request(&self) -> Option<&[u32]> {
        (!self.has_conditional).then_some(&*self.unconditional)
    }

    /// Returns the indices of the active rules that apply to a request, ascending, without duplicates.
    ///
    /// `readings` must be those of the request's path. A rule applies if all its conditions hold: on the path for any
    /// reading, on the host for any host that the request names, on the method for the request's own or one in an
    /// override header, and on every header. If there are too many readings ([`Readings::Any`]), every path condition
    /// holds.
    pub(crate) fn find(&self, request: &RequestView<'_>, readings: &LazyReadings<'_>) -> Indices {
        let overrides = self.override_headers.iter().flat_map(|name| request.headers().get_all(name));
        let overrides = overrides.filter_map(|value| value.to_str().ok());
        let method = self.methods.set_of(request.method());
        let methods = overrides.fold(method, |methods, name| methods.union(self.methods.set_of_name(name.trim())));
        self.search(methods, readings, request.hosts(), request.headers())
    }

    /// Returns whether a request meets these conditions, as it would those of a rule of this matcher.
    ///
    /// The methods of the conditions must be those of a rule of this matcher. `readings` must be those of the request's
    /// path.
    pub(crate) fn is_met(
        &self,
        conditions: Conditions,
        request: &RequestView<'_>,
        readings: &LazyReadings<'_>,
    ) -> bool {
        let mut alone = Matcher::new(self.methods.clone(), self.override_headers.clone());
        alone.push(conditions, true);
        !alone.find(request, readings).is_empty()
    }

    /// Returns the indices of the active rules that apply to an example request that meets these conditions.
    ///
    /// The example has one of the methods, the example of the first path (else `/`) and of the first host (else none),
    /// and no other headers than the conditions require. Further paths and hosts are ignored.
    pub(crate) fn find_for_example(&self, conditions: &Conditions) -> Indices {
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
        methods: MethodSet,
        readings: &LazyReadings<'_>,
        hosts: impl Iterator<Item = &'r str>,
        headers: &HeaderMap,
    ) -> Indices {
        let mut found = Indices::new();
        let readings = self.path_methods.overlaps(methods).then(|| readings.get());
        let mut search = |trie: &Trie| match readings {
            // No rule for this method has a path condition.
            None => trie.find(b"", methods, |rule| found.push(rule)),
            Some(Readings::Each(texts)) => {
                texts.iter().for_each(|text| trie.find(text, methods, |rule| found.push(rule)));
            }
            Some(Readings::Any) => trie.find_all(methods, |rule| found.push(rule)),
        };
        search(self.by_host.for_all_hosts());
        if self.by_host.has_host_patterns() {
            for name in hosts.flat_map(host::readings) {
                self.by_host.for_host(&name, &mut search);
            }
        }
        // A rule may be found several times, by several readings, patterns or hosts.
        found.sort_unstable();
        found.dedup();
        found.retain(|rule| self.conditions[*rule as usize].headers_match(headers));
        found
    }
}

impl HeaderText {
    /// Converts a header name.
    pub(crate) fn of(name: &HeaderName) -> HeaderText {
        HeaderText(name.as_str().into())
    }
}
