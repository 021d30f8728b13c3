//! Plans: named sets of limits that belong to callers, and how a caller's is found.
//!
//! The first source that has an answer wins:
//!
//! ```text
//!   1 the keys (their own limits, else their plan)      ┐
//!   2 address ranges                                    │ at once:  RuleSet::tariff
//!   3 the header that a trusted proxy sets              │
//!   4 the claim in a verified token                     ┘
//!   5 lookups: a Redis hash, a Rust closure               asked:    PlanLookup
//!   6 `default`, or `anonymous` for callers without identity
//! ```
//!
//! A source that names a plan which does not exist has no answer: a plan that was removed while tokens
//! that name it are still about must neither fail requests nor let them pass unlimited.
//!
//! What is found is a [`Tariff`]: an index under which every rule that takes its limits from plans has them ready, so
//! finding a caller's limits is indexing a slice. A key with limits of its own has a tariff of its own.

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use crate::identity::{Identity, KeyDigest};

/// A named set of limits. The limits themselves are per rule: [`Rule::policies`](super::Rule::policies).
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) name: Arc<str>,
    pub(crate) upgrade_url: Option<Box<str>>,
}

impl Plan {
    /// Its name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Where a refused client can get a larger plan.
    pub fn upgrade_url(&self) -> Option<&str> {
        self.upgrade_url.as_deref()
    }
}

/// Which limits are a caller's: those of a plan, or its own. Only for the rule set that gave it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Tariff(pub(crate) u32);

/// What is known about an API key.
#[derive(Clone, Debug)]
pub struct KeyEntry {
    pub(crate) name: Option<Box<str>>,
    pub(crate) plan: Option<Arc<str>>,
    pub(crate) tariff: Option<Tariff>,
    pub(crate) is_exempt: bool,
}

impl KeyEntry {
    /// Whose it is.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Its plan, if one is named.
    pub fn plan(&self) -> Option<&Arc<str>> {
        self.plan.as_ref()
    }

    /// The limits by which its bearer is held, if that is said: its own, or those of its plan.
    pub fn tariff(&self) -> Option<Tariff> {
        self.tariff
    }

    /// Whether it is never limited.
    pub fn is_exempt(&self) -> bool {
        self.is_exempt
    }
}

/// Whose plan is asked for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct PlanQuestion {
    /// The known API key.
    pub api_key: Option<KeyDigest>,
    /// The verified user.
    pub user: Option<Arc<str>>,
    /// The client's address.
    pub address: IpAddr,
}

impl PlanQuestion {
    /// The question about the one who makes a request.
    pub fn about(identity: &Identity<'_>) -> PlanQuestion {
        PlanQuestion {
            api_key: identity.api_key().map(|(digest, _)| digest),
            user: identity.user().map(|user| user.subject.clone()),
            address: identity.address(),
        }
    }

    /// Whether the caller has an identity beyond its address.
    pub fn is_identified(&self) -> bool {
        self.api_key.is_some() || self.user.is_some()
    }

    /// The field of a hash that holds the plan: `api_key:` and the key's SHA-256 in hexadecimal, else `user:` and the
    /// user. None for callers without identity, for whom no hash is asked.
    pub fn field(&self) -> Option<String> {
        match (&self.api_key, &self.user) {
            (Some(digest), _) => {
                let hex =
                    |byte: &u8| [byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)]));
                Some("api_key:".chars().chain(digest.as_bytes().iter().flat_map(hex)).collect())
            }
            (None, Some(user)) => Some(format!("user:{user}")),
            (None, None) => None,
        }
    }
}

/// The answer of a [`PlanLookup`], when it comes.
pub type PlanFuture<'a> = Pin<Box<dyn Future<Output = Option<Arc<str>>> + Send + 'a>>;

/// Somebody who knows plans and must be asked: a Redis hash (`PlanHash`), a database, a closure.
///
/// It is asked only about callers whose plan nobody else knows, on the request path: it should answer from memory, or
/// fast. An error is `None`: the caller then has the `default` plan.
///
/// ```
/// use std::sync::Arc;
/// use tollgate::rules::{PlanLookup, PlanQuestion};
///
/// let lookup = |question: &PlanQuestion| question.user.is_some().then(|| Arc::from("pro"));
/// fn accepts(_: &dyn PlanLookup) {}
/// accepts(&lookup);
/// ```
pub trait PlanLookup: Send + Sync {
    /// The name of the plan, if it is known.
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a>;
}

impl<F: Fn(&PlanQuestion) -> Option<Arc<str>> + Send + Sync> PlanLookup for F {
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a> {
        Box::pin(std::future::ready(self(question)))
    }
}
