//! Which rules a request meets: by host, then path, then method, then headers.
//!
//! ```text
//!   host ─▶ tries: any host, this host, *.domain     a lookup each
//!   path ─▶ the readings walk each trie              a lookup per segment
//!   method ─▶ a bit                                  per rule whose path fits
//!   headers ─▶ compared                              per rule that is left
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

/// Rules by their places.
pub(crate) type Indices = SmallVec<[u32; 8]>;

/// What a request must be for a rule to apply. Empty lists of paths and hosts mean all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Conditions {
    pub(crate) methods: MethodSet,
    pub(crate) paths: Vec<Pattern>,
    pub(crate) hosts: Vec<HostPattern>,
    pub(crate) headers: BTreeMap<HeaderText, HeaderCondition>,
}

/// A header's name, ordered by its text.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct HeaderText(pub(crate) Box<str>);

/// What a header must be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum HeaderCondition {
    Present,
    Equals(HeaderValue),
}

impl Default for Conditions {
    fn default() -> Self {
        Conditions { methods: MethodSet::ALL, paths: Vec::new(), hosts: Vec::new(), headers: BTreeMap::new() }
    }
}

impl Conditions {
    /// These conditions for each path with each host alone: what meets one of them meets the rule.
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

    /// Conditions for requests that meet both of two alternatives, if there are any.
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

/// What two lists of one pattern, or of none for all, share.
fn shared<T: Clone>(one: &[T], other: &[T], shared: impl Fn(&T, &T) -> Option<T>) -> Option<Vec<T>> {
    match (one, other) {
        ([], list) | (list, []) => Some(list.to_vec()),
        ([one, ..], [other, ..]) => Some(vec![shared(one, other)?]),
    }
}

/// Rules by what their requests must be.
#[derive(Clone, Debug, Default)]
pub(crate) struct Matcher {
    by_host: ByHost<Trie>,
    conditions: Vec<Conditions>,
    methods: MethodNames,
    /// Headers whose value is another method that the request may be meant for.
    override_headers: Vec<HeaderName>,
    /// The methods of rules that look at paths.
    path_methods: MethodSet,
    /// The rules that every request meets.
    unconditional: Indices,
    /// Whether there are others that some requests meet.
    has_conditional: bool,
}

impl Matcher {
    /// Returns a matcher for rules whose methods were named by `methods`, which also reads methods from `override_headers`.
    pub(crate) fn new(methods: MethodNames, override_headers: Vec<HeaderName>) -> Matcher {
        Matcher { methods, override_headers, ..Matcher::default() }
    }

    /// Adds the next rule. One that no request is to meet is only counted.
    pub(crate) fn push(&mut self, conditions: Conditions, is_met: bool) {
        let rule = u32::try_from(self.conditions.len()).expect("fewer than 2^32 rules");
        if is_met {
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

    pub(crate) fn conditions(&self) -> &[Conditions] {
        &self.conditions
    }

    /// The rules that apply to every request, if no others apply to any: then nothing of a request has to be looked at.
    pub(crate) fn same_for_all(&self) -> Option<&[u32]> {
        (!self.has_conditional).then_some(&*self.unconditional)
    }

    /// The rules that apply, in their order.
    pub(crate) fn find(&self, request: &RequestView<'_>, readings: &LazyReadings<'_>) -> Indices {
        let overrides = self.override_headers.iter().flat_map(|name| request.headers().get_all(name));
        let overrides = overrides.filter_map(|value| value.to_str().ok());
        let method = self.methods.of(request.method());
        let methods = overrides.fold(method, |methods, name| methods.and(self.methods.of_name(name.trim())));
        self.search(methods, readings, request.hosts(), request.headers())
    }

    /// The rules that apply to a request that just meets these conditions: to ask what goes together.
    pub(crate) fn find_like(&self, conditions: &Conditions) -> Indices {
        let path = conditions.paths.first().map_or("/".to_owned(), Pattern::example);
        let host = conditions.hosts.first().map(HostPattern::example);
        let mut headers = HeaderMap::new();
        for (name, condition) in &conditions.headers {
            let value = match condition {
                HeaderCondition::Present => HeaderValue::from_static("x"),
                HeaderCondition::Equals(value) => value.clone(),
            };
            headers.insert(HeaderName::from_bytes(name.0.as_bytes()).expect("a name that was one"), value);
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
            // No rule for this method looks at the path.
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
        // One rule may be found by several readings, patterns or hosts.
        found.sort_unstable();
        found.dedup();
        found.retain(|rule| self.conditions[*rule as usize].headers_fit(headers));
        found
    }
}

impl HeaderText {
    pub(crate) fn of(name: &HeaderName) -> HeaderText {
        HeaderText(name.as_str().into())
    }
}
