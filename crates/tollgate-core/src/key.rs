//! Which counter a demand counts on.
//!
//! A counter is named by a subject (who) and a scope (which of the subject's counters):
//!
//! | scope | counts on | so that |
//! |---|---|---|
//! | [`Scope::Explicit`] | (key, algorithm, window) | a changed quota keeps what was used |
//! | [`Scope::Rule`] | (rule, limit name, subject) | quota *and* window may change |
//! | [`Scope::Throttle`] | the key alone | `CL.THROTTLE` behaves as its users know it |
//!
//! The parts are never joined with a separator: they are hashed each for itself (in memory) or escaped (on Redis),
//! so `("a", "b_c")` and `("a_b", "c")` are different counters whatever the
//! bytes are. The state machine is part of the name too: a rule whose algorithm changes to one
//! with another kind of state starts afresh instead of reading a stranger's bytes.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, LazyLock};

use crate::limit::{Limit, Machine};

/// The longest subject: 64 KiB, the longest key a protocol of ours accepts.
pub const SUBJECT_BYTES_MAX: usize = 64 * 1024;

/// Who is counted, and on which of their counters. Borrowed, so that asking allocates nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key<'a> {
    subject: &'a [u8],
    scope: Scope<'a>,
}

/// Which of a subject's counters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Scope<'a> {
    /// The one for the limit's algorithm and window.
    Explicit,
    /// The one of a rule's limit, by their names.
    Rule(RuleScope<'a>),
    /// The one of `CL.THROTTLE`.
    Throttle,
}

impl<'a> Scope<'a> {
    /// The scope of a limit by its name within a rule.
    pub fn rule(rule: &'a str, limit: &'a str) -> Scope<'a> {
        Scope::Rule(RuleScope { rule, limit, digest: digest(rule, limit) })
    }

    /// The scope's part of a counter's name: another number for every other counter of a subject.
    #[inline(always)]
    pub(crate) fn number(self, limit: &Limit) -> u64 {
        match self {
            Scope::Explicit => limit.scope(),
            Scope::Rule(scope) => scope.digest ^ u64::from(machine_tag(limit)),
            Scope::Throttle => THROTTLE_SCOPE | u64::from(machine_tag(limit)),
        }
    }
}

/// A limit by its name within a rule.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RuleScope<'a> {
    rule: &'a str,
    limit: &'a str,
    /// What this process takes for both names: see [`digest`].
    digest: u64,
}

impl<'a> RuleScope<'a> {
    /// The rule's name.
    pub const fn rule(&self) -> &'a str {
        self.rule
    }

    /// The limit's name within the rule.
    pub const fn limit(&self) -> &'a str {
        self.limit
    }
}

/// A [`RuleScope`] to keep: whoever asks for it again and again has its names read only once.
///
/// ```
/// use tollgate_core::{RuleScopeBuf, Scope};
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
    /// The scope of a limit by its name within a rule.
    pub fn new(rule: impl Into<Arc<str>>, limit: impl Into<Arc<str>>) -> RuleScopeBuf {
        let (rule, limit) = (rule.into(), limit.into());
        let digest = digest(&rule, &limit);
        RuleScopeBuf { rule, limit, digest }
    }

    /// The same, borrowed.
    pub fn scope(&self) -> Scope<'_> {
        Scope::Rule(RuleScope { rule: &self.rule, limit: &self.limit, digest: self.digest })
    }
}

/// One number for a rule's name and a limit's, by a hash whose seeds nobody outside knows. Each name ends with a byte that is in no text.
fn digest(rule: &str, limit: &str) -> u64 {
    static SEEDS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    SEEDS.hash_one((rule, limit))
}

/// The subject is longer than [`SUBJECT_BYTES_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a key has at most {SUBJECT_BYTES_MAX} bytes, this one has {bytes}")]
pub struct KeyError {
    /// How long it is.
    pub bytes: usize,
}

impl<'a> Key<'a> {
    /// The counter of `subject` for whatever limit it is checked against.
    ///
    /// # Errors
    /// When the subject is longer than 64 KiB.
    pub fn new<S: AsRef<[u8]> + ?Sized>(subject: &'a S) -> Result<Key<'a>, KeyError> {
        Key::scoped(subject, Scope::Explicit)
    }

    /// The counter of `subject` in a scope.
    ///
    /// # Errors
    /// When the subject is longer than 64 KiB.
    pub fn scoped<S: AsRef<[u8]> + ?Sized>(subject: &'a S, scope: Scope<'a>) -> Result<Key<'a>, KeyError> {
        let subject = subject.as_ref();
        if subject.len() > SUBJECT_BYTES_MAX {
            return Err(KeyError { bytes: subject.len() });
        }
        Ok(Key { subject, scope })
    }

    /// Who is counted.
    pub const fn subject(&self) -> &'a [u8] {
        self.subject
    }

    /// On which of their counters.
    pub const fn scope(&self) -> Scope<'a> {
        self.scope
    }

    /// Whether, under these limits, both keys mean one counter.
    pub(crate) fn is_same_counter(&self, limit: &Limit, other: &Key<'_>, other_limit: &Limit) -> bool {
        let is_same_scope = match (self.scope, other.scope) {
            (Scope::Explicit, Scope::Explicit) => limit.scope() == other_limit.scope(),
            // Names that are the same have the same digest.
            (Scope::Rule(scope), Scope::Rule(other)) => {
                scope.digest == other.digest && scope == other && machine_tag(limit) == machine_tag(other_limit)
            }
            (Scope::Throttle, Scope::Throttle) => machine_tag(limit) == machine_tag(other_limit),
            _ => false,
        };
        is_same_scope && self.subject == other.subject
    }
}

/// A subject of up to sixteen bytes in two words: no other subject of its length has the same.
#[inline(always)]
pub(crate) fn short_subject(subject: &[u8]) -> Option<(u64, u64)> {
    // The ends, which overlap unless it is as long as both.
    match (subject.first_chunk(), subject.last_chunk()) {
        (Some(head), Some(tail)) if subject.len() <= 16 => Some((u64::from_le_bytes(*head), u64::from_le_bytes(*tail))),
        (Some(_), _) => None,
        _ => Some(short_ends(subject)),
    }
}

/// The bits that no [`Limit::scope`] has.
const THROTTLE_SCOPE: u64 = u64::MAX << 2;

/// The ends of up to seven bytes.
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

pub(crate) fn machine_tag(limit: &Limit) -> u8 {
    match limit.machine() {
        Machine::Log(_) => 0,
        Machine::Pair(_) => 1,
        Machine::Bucket(_) => 2,
    }
}
