//! Plans: named sets of limits that belong to callers, and how a caller's plan is found.
//!
//! The first source that knows the caller's plan wins:
//!
//! ```text
//!   1 the API key (its own limits, else its plan)       ┐
//!   2 address ranges                                    │ in memory:  Facts::assigned_plan
//!   3 the header that a trusted proxy sets              │
//!   4 the claim in a verified token                     ┘
//!   5 lookups: a Redis hash, a Rust closure               async:      Facts::plan
//!   6 `default`, or `anonymous` for callers without identity
//! ```
//!
//! A source that names a plan that does not exist counts as one that does not know the plan. A removed plan that tokens
//! in circulation still name must neither fail their requests nor admit them without a limit.
//!
//! The result is the caller's *limit set* ([`LimitSet`]): the limits of its plan, or an API key's own limits. It has an
//! index under which every rule that takes its limits from plans keeps these limits. So finding the limits of a plan, or
//! of a key in the configuration, is one slice access. The own limits of a key that a lookup found are not known when
//! the rules are compiled. The limit set then carries them, and the engine lays out what a request of this caller
//! demands once per limit set, like for the others (`engine/check_plan.rs`).

use std::borrow::Cow;
use std::future::Future;
use std::net::IpAddr;
#[cfg(feature = "redis")]
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::Arc;

use tidegate_core::Store;

use super::lookup_cache::LookupError;
use super::own_limits::OwnLimits;
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

/// The limits that apply to a caller: those of a plan, or an API key's own.
///
/// Returned by [`Facts::plan`](super::Facts::plan) and methods of [`RuleSet`](super::RuleSet), and valid only for that rule set.
/// [`CompiledRule::policies`](super::CompiledRule::policies) returns the limits. Clones are cheap.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct LimitSet {
    /// The limits of a plan, or of a key in the configuration.
    pub(crate) id: LimitSetId,
    /// The own limits of a key that a lookup found. They replace those of the plan `id`.
    pub(crate) own: Option<OwnLimits>,
}

impl LimitSet {
    /// Returns the own limits of an API key that a lookup found. `None` for the limits of a plan, and of a key in the
    /// configuration.
    pub fn own_limits(&self) -> Option<&OwnLimits> {
        self.own.as_ref()
    }
}

impl From<LimitSetId> for LimitSet {
    fn from(id: LimitSetId) -> LimitSet {
        LimitSet { id, own: None }
    }
}

/// The index of a limit set that is known when the rules are compiled.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct LimitSetId(pub(crate) u32);

/// An API key that the configuration lists.
#[derive(Clone, Debug)]
pub(crate) struct CompiledKey {
    /// Its attributes, without limits of its own.
    pub(crate) known: KnownKey,
    /// Its own limits, else those of its plan. `None` if it has neither, or if there are no plans.
    pub(crate) limit_set: Option<LimitSetId>,
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
    pub(crate) fn about(identity: &Identity<'_>) -> PlanQuestion {
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

    /// Returns the question about a caller with the same [field](PlanQuestion::field), without everything else: equal for
    /// all requests whose plan is in this field. `None` if there is no field.
    #[cfg(feature = "redis")]
    pub(crate) fn of_field(&self) -> Option<PlanQuestion> {
        let (api_key, address) = (self.api_key, Ipv4Addr::UNSPECIFIED.into());
        let user = self.user.clone().filter(|_| api_key.is_none());
        let caller = self.caller.clone().filter(|_| api_key.is_none() && user.is_none());
        self.is_identified().then_some(PlanQuestion { api_key, user, caller, address })
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

/// The future returned by [`PlanLookup::plan`]: the name of the plan, `None` if it is not known, or an error.
pub type PlanFuture<'a> = Pin<Box<dyn Future<Output = Result<Option<Arc<str>>, LookupError>> + Send + 'a>>;

/// An external source of callers' plans: a Redis hash (`PlanHash`), a database, an asynchronous closure.
///
/// An [`Engine`](crate::engine::Engine) asks it while it decides a request, but only if a matching rule takes its
/// limits from plans and neither API key, address, trusted header nor token determines the caller's plan. Answers are
/// cached, including that no plan is known, so only a small part of the requests calls this; see
/// [`Lookups`](super::Lookups) for the bounds.
///
/// If a lookup fails, panics or does not answer in time, the last cached answer about the caller is used, even if it has
/// expired. Without one, the plan is that of the next source, else `default` or `anonymous`. The error is logged, at
/// most every ten seconds. After a failure, the source is not asked for 250 ms, as described for
/// [`KeyLookup`](super::KeyLookup). In a tokio runtime, a lookup whose request no longer waits continues in the
/// background. It is dropped after five seconds.
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::Arc;
/// use tidegate::rules::{PlanLookup, PlanQuestion};
///
/// # let rows = HashMap::from([("ann".to_owned(), "pro".to_owned())]);
/// # struct Database { rows: HashMap<String, String> }
/// # impl Database {
/// #     async fn plan_of(&self, user: &str) -> Result<Option<String>, std::io::Error> {
/// #         Ok(self.rows.get(user).cloned())
/// #     }
/// # }
/// # let database = Database { rows };
/// let database = Arc::new(database);
/// let lookup = move |question: PlanQuestion| {
///     let database = database.clone();
///     async move {
///         match &question.user {
///             Some(user) => database.plan_of(user).await,
///             None => Ok(None),
///         }
///     }
/// };
/// fn accepts(_: &dyn PlanLookup) {}
/// accepts(&lookup);
/// ```
pub trait PlanLookup: Send + Sync {
    /// Looks up the name of a caller's plan.
    ///
    /// The future resolves to `Ok(None)` if the plan is not known, and to an error if the source failed. A name that no
    /// plan has is ignored like `Ok(None)`.
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a>;

    /// Returns the part of the question that the answer depends on, or `None` if the source is not to be asked about such
    /// a caller. Defaults to the whole question.
    ///
    /// [`plan`](PlanLookup::plan) is called with the result, and callers with equal results share a cached answer.
    fn relevant<'q>(&self, question: &'q PlanQuestion) -> Option<Cow<'q, PlanQuestion>> {
        Some(Cow::Borrowed(question))
    }

    /// Returns the store whose connection the lookup uses, or `None` if it uses another one. Defaults to `None`.
    ///
    /// On a busy machine, a reply of this store may be received before the deadline and not yet be delivered when it
    /// passes. Such a reply is still used.
    fn store(&self) -> Option<&dyn Store> {
        None
    }
}

impl<F, Found, P, E> PlanLookup for F
where
    F: Fn(PlanQuestion) -> Found + Send + Sync,
    Found: Future<Output = Result<Option<P>, E>> + Send + 'static,
    P: Into<Arc<str>>,
    E: Into<LookupError>,
{
    fn plan<'a>(&'a self, question: &'a PlanQuestion) -> PlanFuture<'a> {
        let found = self(question.clone());
        Box::pin(async move { found.await.map(|plan| plan.map(Into::into)).map_err(Into::into) })
    }
}
