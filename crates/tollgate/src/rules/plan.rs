//! Plans: named sets of limits that belong to callers, and how a caller's plan is found.
//!
//! The first source that knows the caller's plan wins:
//!
//! ```text
//!   1 the API key (its own limits, else its plan)       ┐
//!   2 address ranges                                    │ in memory:  RuleSet::limit_set
//!   3 the header that a trusted proxy sets              │
//!   4 the claim in a verified token                     ┘
//!   5 lookups: a Redis hash, a Rust closure               async:      PlanLookup
//!   6 `default`, or `anonymous` for callers without identity
//! ```
//!
//! A source that names a plan that does not exist counts as one that does not know the plan. A removed plan that tokens
//! in circulation still name must neither fail their requests nor admit them without a limit.
//!
//! The result is a [`LimitSetId`]: an index under which every rule that takes its limits from plans keeps these limits, so
//! that finding a caller's limits is one slice access. A key with limits of its own has a limit_set of its own.

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use crate::identity::{Identity, KeyDigest};

/// A plan: a named set of limits.
///
/// The limits themselves are kept per rule; see [`CompiledRule::policies`](super::CompiledRule::policies).
#[derive(Clone, Debug)]
pub struct CompiledPlan {
    pub(crate) name: Arc<str>,
    pub(crate) upgrade_url: Option<Box<str>>,
}

impl CompiledPlan {
    /// Returns the name of the plan.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the URL where a client can upgrade its plan, if one is configured.
    pub fn upgrade_url(&self) -> Option<&str> {
        self.upgrade_url.as_deref()
    }
}

/// The id of a caller's set of limits: those of a plan, or an API key's own limits.
///
/// Valid only for the [`RuleSet`](super::RuleSet) that returned it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LimitSetId(pub(crate) u32);

/// An API key of the configuration.
#[derive(Clone, Debug)]
pub struct KeyEntry {
    pub(crate) name: Option<Box<str>>,
    pub(crate) plan: Option<Arc<str>>,
    pub(crate) limit_set: Option<LimitSetId>,
    pub(crate) is_exempt: bool,
}

impl KeyEntry {
    /// Returns the configured name of the key's owner, if any.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the name of the key's plan, if the configuration assigns one.
    pub fn plan(&self) -> Option<&Arc<str>> {
        self.plan.as_ref()
    }

    /// Returns the limit_set of the key's own limits, else of its plan. `None` if it has neither.
    pub fn limit_set(&self) -> Option<LimitSetId> {
        self.limit_set
    }

    /// Returns whether requests with this key are never limited.
    pub fn is_exempt(&self) -> bool {
        self.is_exempt
    }
}

/// The caller whose plan a [`PlanLookup`] looks up.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct PlanQuestion {
    /// The digest of the API key, if the key is an identity.
    pub api_key: Option<KeyDigest>,
    /// The subject of the verified token, if any.
    pub user: Option<Arc<str>>,
    /// The caller that the application has set, if any: `RateLimitLayer::subject`.
    pub caller: Option<Arc<str>>,
    /// The client's address.
    pub address: IpAddr,
}

impl PlanQuestion {
    /// Creates the question for the caller with this identity.
    pub fn about(identity: &Identity<'_>) -> PlanQuestion {
        PlanQuestion {
            api_key: identity.api_key().map(|(digest, _)| digest),
            user: identity.user().map(|user| user.subject.clone()),
            caller: identity.named_caller().map(Arc::from),
            address: identity.address(),
        }
    }

    /// Returns whether the caller has an identity other than its address: an API key, a user or a name.
    pub fn is_identified(&self) -> bool {
        self.api_key.is_some() || self.user.is_some() || self.caller.is_some()
    }

    /// Returns the field of the Redis hash that holds the caller's plan.
    ///
    /// It is `api_key:` and the key's SHA-256 in hexadecimal, else `user:` and the user, else `caller:` and the caller
    /// that the application has set. `None` for callers without identity, which are not in the hash.
    pub fn field(&self) -> Option<String> {
        match (&self.api_key, &self.user, &self.caller) {
            (Some(digest), ..) => {
                let hex =
                    |byte: &u8| [byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)]));
                Some("api_key:".chars().chain(digest.as_bytes().iter().flat_map(hex)).collect())
            }
            (None, Some(user), _) => Some(format!("user:{user}")),
            (None, None, Some(caller)) => Some(format!("caller:{caller}")),
            (None, None, None) => None,
        }
    }
}

/// The future returned by [`PlanLookup::plan`]: the name of the plan, or `None` if it is not known.
pub type PlanFuture<'a> = Pin<Box<dyn Future<Output = Option<Arc<str>>> + Send + 'a>>;

/// An external source of callers' plans: a Redis hash (`PlanHash`), a database, a closure.
///
/// It is called on the request path, but only for callers whose plan the rule set does not know. It should answer from
/// memory or quickly. Return `None` on errors, too: the caller then gets the plan of the next lookup, else the
/// `default` or `anonymous` plan.
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
    /// Looks up the name of a caller's plan. Resolves to `None` if it is not known.
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a>;
}

impl<F: Fn(&PlanQuestion) -> Option<Arc<str>> + Send + Sync> PlanLookup for F {
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a> {
        Box::pin(std::future::ready(self(question)))
    }
}
