//! The identity of a counter.
//!
//! A counter is identified by a subject (what is counted) and a scope (which of the subject's counters):
//!
//! | scope | counts on | effect |
//! |---|---|---|
//! | [`Scope::Explicit`] | (subject, algorithm, window) | a changed quota keeps what was used |
//! | [`Scope::Rule`] | (rule, limit name, subject) | quota *and* window may change |
//! | [`Scope::Named`] | (name, subject) | quota *and* window may change; separate from all rules |
//!
//! The parts are never joined with a separator. They are hashed separately (in memory) or escaped (on Redis), so
//! `("a", "b_c")` and `("a_b", "c")` are different counters whatever bytes they contain. The state machine is part of
//! the identity too: when a rule changes to an algorithm with another kind of state, it gets a new counter and never
//! reads the state of the old one.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, LazyLock};

use crate::limit::{Limit, Shape};

/// The maximum length of a subject: 64 KiB, the longest key that any endpoint accepts.
pub const SUBJECT_BYTES_MAX: usize = 64 * 1024;

/// The key of a counter: a subject and a scope.
///
/// Borrows the subject, so creating a key does not allocate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key<'a> {
    subject: &'a [u8],
    scope: Scope<'a>,
}

/// Selects one of a subject's counters.
///
/// The enum is exhaustive on purpose. Every store must give each scope counters of its own, so a new scope must fail to
/// compile in a store that does not know it, instead of sharing the counters of another scope.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope<'a> {
    /// The counter for the limit's algorithm and window.
    Explicit,
    /// The counter of a named limit within a rule.
    Rule(RuleScope<'a>),
    /// The counter of a named use, such as one command of a protocol, whatever the window.
    Named(ScopeName),
}

impl<'a> Scope<'a> {
    /// Creates the scope of the limit named `limit` within the rule named `rule`.
    ///
    /// Hashes both names. Use [`RuleScopeBuf`] to do so once for many requests.
    pub fn rule(rule: &'a str, limit: &'a str) -> Scope<'a> {
        Scope::Rule(RuleScope { rule, limit, digest: digest(rule, limit) })
    }

    /// Returns a number that identifies the counter of `limit` among the counters of one subject.
    ///
    /// Numbers of [`Scope::Rule`] are seeded at random, so they must not be stored beyond this process.
    #[inline(always)]
    pub(crate) fn number(self, limit: &Limit) -> u64 {
        match self {
            Scope::Explicit => limit.scope(),
            Scope::Rule(scope) => scope.digest ^ u64::from(machine_tag(limit)),
            Scope::Named(name) => name.digest | u64::from(machine_tag(limit)),
        }
    }
}

/// The name of a [`Scope::Named`].
///
/// ```
/// use tidegate_core::{Scope, ScopeName};
///
/// const THROTTLE: ScopeName = ScopeName::new("throttle");
/// assert_eq!(THROTTLE.as_str(), "throttle");
/// assert_ne!(Scope::Named(THROTTLE), Scope::Named(ScopeName::new("other")));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ScopeName {
    name: &'static str,
    /// A hash of the name. The highest bit is set, which no [`Limit::scope`] has; the lowest two are free for the state
    /// machine.
    digest: u64,
}

impl ScopeName {
    /// Creates a name. In a `const`, an invalid name is a compile error.
    ///
    /// # Panics
    /// Panics if the name is empty or has other characters than `a` to `z` and `-`.
    pub const fn new(name: &'static str) -> ScopeName {
        let bytes = name.as_bytes();
        assert!(!bytes.is_empty(), "the name of a scope is not empty");
        // FNV-1a. Names are written in code, so no client can construct a collision.
        let (mut digest, mut at) = (0xcbf2_9ce4_8422_2325_u64, 0);
        while at < bytes.len() {
            assert!(matches!(bytes[at], b'a'..=b'z' | b'-'), "the name of a scope has only a to z and -");
            digest = (digest ^ bytes[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
            at += 1;
        }
        ScopeName { name, digest: (digest | 1 << 63) & !0b11 }
    }

    /// Returns the name.
    pub const fn as_str(&self) -> &'static str {
        self.name
    }
}

/// The kind of state that a limit keeps.
///
/// It is part of a counter's identity: a rule that changes to an algorithm of another kind gets a new counter.
/// Exhaustive for the same reason as [`Scope`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StateMachine {
    /// A log of admissions: `sliding`, `sliding-log`.
    Log,
    /// The counts of two windows: `sliding-counter`, `fixed-window`.
    Pair,
    /// The level of a bucket: `token-bucket`, `leaky-bucket`.
    Bucket,
}

impl StateMachine {
    /// Returns the state machine of a limit.
    pub const fn of(limit: &Limit) -> StateMachine {
        match limit.shape() {
            Shape::Log(_) => StateMachine::Log,
            Shape::Pair(_) => StateMachine::Pair,
            Shape::Bucket(_) => StateMachine::Bucket,
        }
    }
}

/// The names of a rule and of one of its limits, which identify a counter of each subject.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RuleScope<'a> {
    rule: &'a str,
    limit: &'a str,
    /// The [`digest`] of both names.
    digest: u64,
}

impl<'a> RuleScope<'a> {
    /// Returns the rule's name.
    pub const fn rule(&self) -> &'a str {
        self.rule
    }

    /// Returns the limit's name within the rule.
    pub const fn limit(&self) -> &'a str {
        self.limit
    }
}

/// An owned [`RuleScope`], for callers that use it for many requests.
///
/// The names are hashed once, when it is created.
///
/// ```
/// use tidegate_core::{RuleScopeBuf, Scope};
///
/// let kept = RuleScopeBuf::new("login", "per-minute");
/// assert_eq!(kept.scope(), Scope::rule("login", "per-minute"));
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RuleScopeBuf {
    rule: Arc<str>,
    limit: Arc<str>,
    digest: u64,
}

impl RuleScopeBuf {
    /// Creates the scope of the limit named `limit` within the rule named `rule`.
    pub fn new(rule: impl Into<Arc<str>>, limit: impl Into<Arc<str>>) -> RuleScopeBuf {
        let (rule, limit) = (rule.into(), limit.into());
        let digest = digest(&rule, &limit);
        RuleScopeBuf { rule, limit, digest }
    }

    /// Returns a [`Scope::Rule`] that borrows the names.
    pub fn scope(&self) -> Scope<'_> {
        Scope::Rule(RuleScope { rule: &self.rule, limit: &self.limit, digest: self.digest })
    }
}

/// Returns a hash of the names of a rule and a limit, seeded at random per process.
///
/// The hash of a `str` ends with the byte 0xFF, which never occurs in UTF-8, so the two names cannot run together.
fn digest(rule: &str, limit: &str) -> u64 {
    static SEEDS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    SEEDS.hash_one((rule, limit))
}

/// The error for a subject that is longer than [`SUBJECT_BYTES_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a key can have at most {SUBJECT_BYTES_MAX} bytes; this one has {bytes}")]
pub struct KeyError {
    /// The length of the subject, in bytes.
    pub bytes: usize,
}

impl<'a> Key<'a> {
    /// Creates a key for `subject` in [`Scope::Explicit`]: one counter per algorithm and window.
    ///
    /// # Errors
    /// Returns an error if the subject is longer than 64 KiB.
    pub fn new<S: AsRef<[u8]> + ?Sized>(subject: &'a S) -> Result<Key<'a>, KeyError> {
        Key::scoped(subject, Scope::Explicit)
    }

    /// Creates a key for `subject` in `scope`.
    ///
    /// # Errors
    /// Returns an error if the subject is longer than 64 KiB.
    pub fn scoped<S: AsRef<[u8]> + ?Sized>(subject: &'a S, scope: Scope<'a>) -> Result<Key<'a>, KeyError> {
        let subject = subject.as_ref();
        if subject.len() > SUBJECT_BYTES_MAX {
            return Err(KeyError { bytes: subject.len() });
        }
        Ok(Key { subject, scope })
    }

    /// Returns the subject: the identity that is counted.
    pub const fn subject(&self) -> &'a [u8] {
        self.subject
    }

    /// Returns the scope, which selects one of the subject's counters.
    pub const fn scope(&self) -> Scope<'a> {
        self.scope
    }

    /// Returns whether a demand of this key and `limit` counts on the same counter as one of `other` and `other_limit`.
    ///
    /// Subjects and scopes must be equal. In [`Scope::Explicit`], so must the limits' algorithms and windows; in other
    /// scopes, their state machines. Quotas and other options are not compared.
    pub(crate) fn is_same_counter(&self, limit: &Limit, other: &Key<'_>, other_limit: &Limit) -> bool {
        let is_same_machine = || machine_tag(limit) == machine_tag(other_limit);
        let is_same_scope = match self.scope {
            Scope::Explicit => other.scope == Scope::Explicit && limit.scope() == other_limit.scope(),
            // Equal names have equal digests, so most different names are told apart by the digest alone.
            Scope::Rule(scope) => {
                matches!(other.scope, Scope::Rule(other) if scope.digest == other.digest && scope == other)
                    && is_same_machine()
            }
            Scope::Named(_) => self.scope == other.scope && is_same_machine(),
        };
        is_same_scope && self.subject == other.subject
    }
}

/// Packs a subject of up to 16 bytes into two words. Returns `None` for a longer one.
///
/// Different subjects of the same length give different words.
#[inline(always)]
pub(crate) fn short_subject(subject: &[u8]) -> Option<(u64, u64)> {
    // The first and the last 8 bytes. They overlap if the subject is shorter than 16 bytes.
    match (subject.first_chunk(), subject.last_chunk()) {
        (Some(head), Some(tail)) if subject.len() <= 16 => Some((u64::from_le_bytes(*head), u64::from_le_bytes(*tail))),
        (Some(_), _) => None,
        _ => Some(short_ends(subject)),
    }
}

/// Packs a subject of at most 7 bytes into two words. Different subjects of the same length give different words.
fn short_ends(subject: &[u8]) -> (u64, u64) {
    if let (Some(head), Some(tail)) = (subject.first_chunk(), subject.last_chunk()) {
        return (u32::from_le_bytes(*head).into(), u32::from_le_bytes(*tail).into());
    }
    match *subject {
        [] => (0, 0),
        [one] => (one.into(), 0),
        [one, two] => (one.into(), two.into()),
        [one, two, three, ..] => (one.into(), u64::from(two) << 8 | u64::from(three)),
    }
}

/// Returns a number for the limit's state machine: 0 for a log, 1 for a pair, 2 for a bucket.
pub(crate) fn machine_tag(limit: &Limit) -> u8 {
    StateMachine::of(limit) as u8
}
