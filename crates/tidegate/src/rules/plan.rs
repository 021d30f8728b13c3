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
//! The result is the id of the caller's *limit set* ([`LimitSetId`]): the limits of its plan, or an API key's own
//! limits. The id is an index under which every rule that takes its limits from plans keeps these limits, so that
//! finding a caller's limits is one slice access.

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use super::lookup_cache::LookupStats;
use crate::identity::{Identity, KeyDigest, KnownKey};

/// The name and the upgrade URL of a plan of a [`RuleSet`](super::RuleSet).
///
/// Does not contain the plan's limits; [`CompiledRule::policies`](super::CompiledRule::policies) returns them for a
/// rule.
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

    /// Returns the URL where a client can upgrade its plan, or `None` if none is configured.
    pub fn upgrade_url(&self) -> Option<&str> {
        self.upgrade_url.as_deref()
    }
}

/// The id of a limit set: the limits that apply to a caller, which are those of a plan, or an API key's own.
///
/// Returned by [`RuleSet::limit_set`](super::RuleSet::limit_set) and similar methods, and valid only for that rule set.
/// [`CompiledRule::policies`](super::CompiledRule::policies) returns the limits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LimitSetId(pub(crate) u32);

/// What the configuration sets for one API key: owner, plan, own limits, exemption. Does not contain the key.
#[derive(Clone, Debug)]
pub struct KeyEntry {
    pub(crate) name: Option<Arc<str>>,
    pub(crate) plan: Option<Arc<str>>,
    pub(crate) limit_set: Option<LimitSetId>,
    pub(crate) is_exempt: bool,
}

impl KeyEntry {
    /// Returns the name of the key's owner, or `None` if none is configured.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the name of the plan that the configuration assigns to the key, or `None` if it assigns none.
    pub fn plan(&self) -> Option<&Arc<str>> {
        self.plan.as_ref()
    }

    /// Returns the limit set of the key: its own limits, else those of its plan.
    ///
    /// `None` if the key has neither, or if it has only limits of its own and there are no plans.
    pub fn limit_set(&self) -> Option<LimitSetId> {
        self.limit_set
    }

    /// Returns whether callers with this key are exempt from all rules.
    pub fn is_exempt(&self) -> bool {
        self.is_exempt
    }
}

/// Converts to the attributes of the key. Its own limits are left out.
impl From<&KeyEntry> for KnownKey {
    fn from(entry: &KeyEntry) -> KnownKey {
        KnownKey { name: entry.name.clone(), plan: entry.plan.clone(), exempt: entry.is_exempt }
    }
}

/// The caller whose plan a [`PlanLookup`] looks up: everything by which the caller is identified.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct PlanQuestion {
    /// The digest of the API key. `None` if the request has no key, or one that identifies no caller (an unknown one).
    pub api_key: Option<KeyDigest>,
    /// The subject of the verified token. `None` without a valid token.
    pub user: Option<Arc<str>>,
    /// The caller that the application has set: [`RequestView::with_caller`](super::RequestView::with_caller) or
    /// `RateLimitLayer::subject`.
    pub caller: Option<Arc<str>>,
    /// The client's address.
    pub address: IpAddr,
}

impl PlanQuestion {
    /// Creates the question for the caller of a request. May verify the request's token.
    pub fn about(identity: &Identity<'_>) -> PlanQuestion {
        PlanQuestion {
            api_key: identity.api_key().map(|(digest, _)| digest),
            user: identity.user().map(|user| user.subject.clone()),
            caller: identity.named_caller().map(Arc::from),
            address: identity.address(),
        }
    }

    /// Returns whether the caller is identified by more than its address: an API key, a user, or the application.
    pub fn is_identified(&self) -> bool {
        self.api_key.is_some() || self.user.is_some() || self.caller.is_some()
    }

    /// Returns the name of the field of a Redis hash (`PlanHash`) that holds the caller's plan.
    ///
    /// It is `api_key:` and the key's SHA-256 in lowercase hexadecimal, else `user:` and the user, else `caller:` and
    /// the caller that the application has set. `None` if the caller is [not identified](PlanQuestion::is_identified).
    pub fn field(&self) -> Option<String> {
        match (&self.api_key, &self.user, &self.caller) {
            (Some(digest), ..) => Some(digest.field()),
            (None, Some(user), _) => Some(format!("user:{user}")),
            (None, None, Some(caller)) => Some(format!("caller:{caller}")),
            (None, None, None) => None,
        }
    }
}

/// The future returned by [`PlanLookup::plan`]. Resolves to the name of the plan, or to `None` if it is not known.
pub type PlanFuture<'a> = Pin<Box<dyn Future<Output = Option<Arc<str>>> + Send + 'a>>;

/// An external source of callers' plans: a Redis hash (`PlanHash`), a database, a closure.
///
/// An [`Engine`](crate::engine::Engine) awaits it while it decides a request, but only if a matching rule takes its
/// limits from plans and neither API key, address, trusted header nor token determines the caller's plan. The time that
/// it takes counts against the deadline of the decision. If it does not answer within the
/// [deadline of lookups](super::Lookups::deadline), its future is dropped, and the plan is `default` or `anonymous`.
/// Answers are not cached. A panic is logged, counts as a failure, and is treated like an answer of `None`.
///
/// It should resolve to `None` on errors, too. The plan is then that of the next lookup, else `default` or `anonymous`.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::rules::{PlanLookup, PlanQuestion};
///
/// let lookup = |question: &PlanQuestion| question.user.is_some().then(|| Arc::from("pro"));
/// fn accepts(_: &dyn PlanLookup) {}
/// accepts(&lookup);
/// ```
pub trait PlanLookup: Send + Sync {
    /// Looks up the name of a caller's plan.
    ///
    /// The future resolves to `None` if the plan is not known. A name that no plan has is ignored like `None`.
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a>;

    /// Returns the number of calls to the source and of failures. Defaults to zeros, for a source without statistics.
    fn stats(&self) -> LookupStats {
        LookupStats::default()
    }
}

impl<F: Fn(&PlanQuestion) -> Option<Arc<str>> + Send + Sync> PlanLookup for F {
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a> {
        Box::pin(std::future::ready(self(question)))
    }
}
