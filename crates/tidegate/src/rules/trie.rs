//! Matches a path against all patterns at once, in a trie of path segments.
//!
//! ```text
//!   rule 0  /api/*              root ── api ┬─▶ 0 below
//!   rule 1  /api/users/{id}                 └── users ── {} ─▶ 1
//!   rule 2  /{tenant}/users     root ── {} ── users ─▶ 2
//! ```
//!
//! The search keeps the set of nodes that match the path so far. Each node has at most one exact child (a hash lookup)
//! and one `{}` child for the next segment. The *below* rules of every node on the way match, and the *there* rules of
//! the nodes at the end of the path. So the cost grows with the length of the path and the number of rules that match,
//! not with the number of all rules.
//!
//! **Why not a regex set?** It would compile a thousand patterns into an automaton of several megabytes, for a grammar
//! with a literal and two wildcards. **Why not a router crate?** A router returns one route; here *all* rules that
//! match apply.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use smallvec::SmallVec;

use super::comparisons;
use super::method::MethodSet;
use super::path::segments;
use super::pattern::{Pattern, Segment};

/// A search tree of path patterns, each with the index of its rule and the methods that the rule matches.
#[derive(Clone, Debug)]
pub(crate) struct Trie {
    nodes: Vec<Node>,
}

#[derive(Clone, Debug, Default)]
struct Node {
    /// Children by literal segment.
    exact: HashMap<Box<[u8]>, u32, RandomState>,
    /// The child for `{}`.
    any: Option<u32>,
    /// Rules whose pattern ends at this node.
    there: Vec<Candidate>,
    /// Rules whose pattern ends at this node with `*`.
    below: Vec<Candidate>,
}

/// A rule in a [`Trie`]: its index, and the methods that it matches.
///
/// A trie of exempt paths has no rules: there the index is 0, and the methods are all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Candidate {
    pub(crate) rule: u32,
    pub(crate) methods: MethodSet,
}

impl Default for Trie {
    fn default() -> Self {
        Trie { nodes: vec![Node::default()] }
    }
}

impl Trie {
    /// Adds a pattern of a rule. A rule may have several patterns.
    pub(crate) fn insert(&mut self, pattern: &Pattern, candidate: Candidate) {
        let mut at = 0;
        for segment in &pattern.segments {
            at = self.child(at, segment);
        }
        let node = &mut self.nodes[at as usize];
        if pattern.is_prefix { node.below.push(candidate) } else { node.there.push(candidate) }
    }

    /// Returns the index of the child of node `at` for a segment. Creates the child if it does not exist.
    fn child(&mut self, at: u32, segment: &Segment) -> u32 {
        let next = u32::try_from(self.nodes.len()).expect("fewer than 2^32 segments in a configuration");
        let node = &mut self.nodes[at as usize];
        let child = match segment {
            Segment::Exact(bytes) => *node.exact.entry(bytes.clone()).or_insert(next),
            Segment::Any => *node.any.get_or_insert(next),
        };
        if child == next {
            self.nodes.push(Node::default());
        }
        child
    }

    /// Calls `found` with the index of every rule that has a pattern that matches `text` and one of these methods.
    ///
    /// `text` is a path without its leading slash, such as one of the [readings](super::path::Readings) of a request's
    /// path. A rule is reported once for each of its patterns that match. A variable such as `{id}` does not match an
    /// empty segment.
    pub(crate) fn find(&self, text: &[u8], methods: MethodSet, mut found: impl FnMut(u32)) {
        let mut report = |candidates: &[Candidate]| {
            for candidate in candidates {
                comparisons::count();
                if candidate.methods.overlaps(methods) {
                    found(candidate.rule);
                }
            }
        };
        let mut here: SmallVec<[u32; 8]> = SmallVec::from_slice(&[0]);
        let mut next = SmallVec::new();
        report(&self.nodes[0].below);
        for segment in segments(text) {
            next.clear();
            for &at in &here {
                let node = &self.nodes[at as usize];
                comparisons::count();
                next.extend(node.exact.get(segment).copied());
                // `{id}` does not match an empty segment.
                next.extend(node.any.filter(|_| !segment.is_empty()));
            }
            std::mem::swap(&mut here, &mut next);
            if here.is_empty() {
                return;
            }
            here.iter().for_each(|&at| report(&self.nodes[at as usize].below));
        }
        here.iter().for_each(|&at| report(&self.nodes[at as usize].there));
    }

    /// Calls `found` with the index of every rule that has one of these methods, whatever its patterns are.
    ///
    /// A rule is reported once for each of its patterns.
    pub(crate) fn find_all(&self, methods: MethodSet, mut found: impl FnMut(u32)) {
        for candidate in self.nodes.iter().flat_map(|node| node.there.iter().chain(&node.below)) {
            if candidate.methods.overlaps(methods) {
                found(candidate.rule);
            }
        }
    }

    /// Returns whether no pattern was added.
    pub(crate) fn is_empty(&self) -> bool {
        matches!(&*self.nodes, [root] if root.there.is_empty() && root.below.is_empty())
    }

    /// Returns whether any pattern matches `text`, a path without its leading slash.
    pub(crate) fn contains(&self, text: &[u8]) -> bool {
        let mut found = false;
        self.find(text, MethodSet::ALL, |_| found = true);
        found
    }
}
