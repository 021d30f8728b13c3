//! Observers, which are called after every decision, store call, change of the circuit breaker and reload.
//!
//! A limiter keeps a few counts itself ([`LimiterStats`](crate::LimiterStats)). For more, such as a histogram, a list
//! of the most denied keys or an audit log, add an [`Observer`]:
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering};
//! use tidegate::Limiter;
//! use tidegate::observe::{DecidedCheck, Observer};
//!
//! #[derive(Default)]
//! struct Denials(AtomicU64);
//!
//! impl Observer for Denials {
//!     fn decided(&self, decided: &DecidedCheck<'_>) {
//!         if decided.result.is_ok_and(|decision| !decision.allowed()) {
//!             self.0.fetch_add(1, Ordering::Relaxed);
//!         }
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let denials = Arc::new(Denials::default());
//! let limiter = Limiter::builder().observer(denials.clone()).build();
//! let mut admitted = 0;
//! for _ in 0..3 {
//!     admitted += u32::from(limiter.check_key(&"1/min".parse()?, "user:42").await?.allowed());
//! }
//! assert_eq!((admitted, denials.0.load(Ordering::Relaxed)), (1, 2));
//! # Ok(())
//! # }
//! ```
//!
//! An [`Engine`](crate::engine::Engine) reports to the observers of its limiter what the limiter does not see: refusals
//! by shields, bans in the configuration, exemptions and reloads.
//!
//! **Contract.** Observers are called by the task that decides the request, in the order in which they were added,
//! after the result is known and before it is returned. They cannot change the result, and they delay it, so they
//! should only count or pass on what they get. A panic of an observer is caught, and logged once per observer; the
//! observer is called again next time. Durations are measured by the limiter's clock, which is not read for this if
//! there are no observers.
//!
//! **Confidential data.** An observer sees keys and client addresses. It must not put them into metrics or into logs
//! above debug level. [`TracingObserver`] shows how.

mod traced;

#[cfg(feature = "rules")]
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[cfg(feature = "rules")]
use tidegate_core::Wait;
use tidegate_core::{Check, Clock, Decision, StoreErrorKind, Timestamp};

pub use self::traced::TracingObserver;
use crate::counts::DecisionOutcome;
#[cfg(feature = "rules")]
use crate::rules::RuleSet;

/// Callbacks that a limiter, and an engine that uses it, call when something happens. Each does nothing by default.
///
/// Added by [`LimiterBuilder::observer`](crate::LimiterBuilder::observer).
pub trait Observer: Send + Sync + 'static {
    /// Called after each check that a limiter has decided, by the store, the deny cache, the local share or the failure
    /// policy.
    ///
    /// A batch is one call per check. An engine makes one check for all enforced rules of a request that are not
    /// shields, and one for each shadow rule.
    fn decided(&self, _decided: &DecidedCheck<'_>) {}

    /// Called after each call of a limiter to a shared store, successful or not. Not called for a store in process
    /// memory.
    ///
    /// Lookups of plans are not reported.
    fn store_called(&self, _call: &StoreCall) {}

    /// Called when the circuit breaker of a limiter opens (`is_open` is `true`) or closes (`false`).
    ///
    /// While it is open, decisions do not call the shared store, and the failure policy applies.
    fn breaker_changed(&self, _is_open: bool) {}

    /// Called when an engine refuses a request by a shield rule.
    ///
    /// Shields are decided in process memory and not by the limiter, so [`Observer::decided`] is not called for them.
    #[cfg(feature = "rules")]
    fn shield_refused(&self, _refused: &ShieldRefusal<'_>) {}

    /// Called when an engine refuses a request by a ban of its rule set, or of the ban list of the store.
    ///
    /// A refusal by a ban on a subject in the store is reported to [`Observer::decided`], as a decision with its
    /// [`ban`](Decision::ban) set.
    #[cfg(feature = "rules")]
    fn banned(&self, _request: &BannedRequest) {}

    /// Called when an engine admits a request that rules match, because its path, client address or API key is exempt.
    ///
    /// Not called while the kill switch is on.
    #[cfg(feature = "rules")]
    fn exempted(&self, _request: &ExemptRequest) {}

    /// Called after [`Engine::reload`](crate::engine::Engine::reload), with the new rules, even if they equal the old
    /// ones.
    #[cfg(feature = "rules")]
    fn reloaded(&self, _rules: &RuleSet) {}
}

/// A check that a limiter has decided, and its result. Passed to [`Observer::decided`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DecidedCheck<'a> {
    /// The check. It contains keys, which may be confidential.
    pub check: &'a Check<'a>,
    /// The decision, or the kind of the store's error if a failure policy of the check is
    /// [`OnFailure::Deny`](crate::OnFailure::Deny).
    ///
    /// If the store did not answer, the decision leaves out the limits whose failure policy is
    /// [`OnFailure::Allow`](crate::OnFailure::Allow). A denial from the deny cache may leave out limits whose status is not
    /// cached.
    pub result: Result<&'a Decision, StoreErrorKind>,
    /// The time that the decision took. The same for all checks of a batch.
    pub took: Duration,
}

impl DecidedCheck<'_> {
    /// Returns the outcome: allowed, denied (including by a ban in the store), or unavailable if `result` is an error.
    pub fn outcome(&self) -> DecisionOutcome {
        self.result.map_or(DecisionOutcome::Unavailable, |decision| DecisionOutcome::of(decision.allowed()))
    }
}

/// A call of a limiter to a shared store. Passed to [`Observer::store_called`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StoreCall {
    /// The purpose of the call.
    pub kind: StoreCallKind,
    /// The number of checks in the call: any for `Decide`, 0 for `Reset`, `Ban` and `Announce`, 1 for the others.
    pub checks: usize,
    /// The time that the call took until the store answered, failed or missed the deadline.
    pub took: Duration,
    /// `Ok` if the store answered within the deadline, else the kind of the error.
    pub result: Result<(), StoreErrorKind>,
}

/// The purpose of a call to the store: a decision, a refund, a probe and so on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum StoreCallKind {
    /// Decides checks.
    Decide,
    /// Refunds units of an admission.
    Refund,
    /// Charges the units by which a request has exceeded its estimated cost
    /// ([`Limiter::settle`](crate::Limiter::settle)), or corrects a charge once
    /// ([`Limiter::redeem`](crate::Limiter::redeem)).
    Settle,
    /// Deletes a counter.
    Reset,
    /// Reads a counter.
    Inspect,
    /// Sets, lifts or reads a ban.
    Ban,
    /// Tests, while the circuit breaker is open, whether the store is responding again.
    Probe,
    /// Announces this instance to the others that share the store, and counts them.
    Announce,
}

tidegate_core::__names! {
    "kind of store call" StoreCallKind {
        Decide = "decide",
        Refund = "refund",
        Settle = "settle",
        Reset = "reset",
        Inspect = "inspect",
        Ban = "ban",
        Probe = "probe",
        Announce = "announce",
    }
}

/// A request that the shield rules of an engine have refused. Passed to [`Observer::shield_refused`].
#[cfg(feature = "rules")]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ShieldRefusal<'a> {
    /// The check of all shields that match the request. The scope of each key names its rule. Keys are client
    /// addresses, or their pseudonyms.
    pub check: &'a Check<'a>,
    /// The decision. `None` if no limit denied the request: the shields' store holds a ban on the address, or it
    /// panicked and the failure policy of a shield is `deny`.
    pub decision: Option<&'a Decision>,
}

/// A request that an engine has refused by a ban of its rule set or of the ban list. Passed to [`Observer::banned`].
#[cfg(feature = "rules")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BannedRequest {
    /// The client's address.
    pub address: IpAddr,
    /// Whether the ban is one of the client's address or of the caller.
    pub by: BannedBy,
    /// The time until the ban ends; [`Wait::NEVER`] if it is permanent.
    pub remaining: Wait,
}

/// Whether a ban is one of the client's address or of the caller.
#[cfg(feature = "rules")]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum BannedBy {
    /// A network that contains the client's address is banned.
    Address,
    /// An API key in the request, or its verified user, is banned.
    Caller,
}

/// A request that rules match and that is exempt from them. Passed to [`Observer::exempted`].
#[cfg(feature = "rules")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ExemptRequest {
    /// The client's address.
    pub address: IpAddr,
    /// Whether the path or the caller is exempt.
    pub by: ExemptBy,
}

/// Whether a request is exempt by its path or by its caller.
#[cfg(feature = "rules")]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ExemptBy {
    /// The path is exempt.
    Path,
    /// The client's address or API key is exempt.
    Caller,
}

/// The observers of one limiter, in the order in which they were added. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Observers(Arc<[ObserverSlot]>);

/// An observer, and whether it has panicked.
struct ObserverSlot {
    observer: Arc<dyn Observer>,
    /// Whether a panic of this observer was already logged.
    has_panicked: AtomicBool,
}

impl Observers {
    pub(crate) fn new(observers: Vec<Arc<dyn Observer>>) -> Observers {
        let slot = |observer| ObserverSlot { observer, has_panicked: AtomicBool::new(false) };
        Observers(observers.into_iter().map(slot).collect())
    }

    /// Returns whether there are no observers.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the current time, as the start of an operation that is reported later. `None` if there are no observers.
    pub(crate) fn begin(&self, clock: &dyn Clock) -> Option<Timestamp> {
        (!self.is_empty()).then(|| clock.now())
    }

    /// Calls [`Observer::decided`] for each check and its result, with the time since `begun`.
    ///
    /// `results` must have one result per check, in the same order. Does nothing if `begun`, which
    /// [`begin`](Observers::begin) returned, is `None`.
    pub(crate) fn decided<'a>(
        &self,
        begun: Option<Timestamp>,
        clock: &dyn Clock,
        checks: &[Check<'_>],
        results: impl IntoIterator<Item = Result<&'a Decision, StoreErrorKind>>,
    ) {
        let Some(begun) = begun else { return };
        let took = since(begun, clock);
        for (check, result) in checks.iter().zip(results) {
            self.each(|observer| observer.decided(&DecidedCheck { check, result, took }));
        }
    }

    /// Calls [`Observer::store_called`], with the time since `begun`.
    ///
    /// The tuple is the purpose of the call and its number of checks. Does nothing if `begun`, which
    /// [`begin`](Observers::begin) returned, is `None`.
    pub(crate) fn store_called(
        &self,
        begun: Option<Timestamp>,
        clock: &dyn Clock,
        (kind, checks): (StoreCallKind, usize),
        result: Result<(), StoreErrorKind>,
    ) {
        let Some(begun) = begun else { return };
        let took = since(begun, clock);
        self.each(|observer| observer.store_called(&StoreCall { kind, checks, took, result }));
    }

    /// Calls [`Observer::breaker_changed`] of each observer.
    pub(crate) fn breaker_changed(&self, is_open: bool) {
        self.each(|observer| observer.breaker_changed(is_open));
    }

    /// Calls `call` with each observer, in order. Catches panics, and logs an error for the first one of each observer.
    pub(crate) fn each(&self, call: impl Fn(&dyn Observer)) {
        for slot in self.0.iter() {
            let called = catch_unwind(AssertUnwindSafe(|| call(&*slot.observer)));
            if called.is_err() && !slot.has_panicked.swap(true, Ordering::Relaxed) {
                tracing::error!("an observer of the limiter panicked; decisions are not affected");
            }
        }
    }
}

fn since(begun: Timestamp, clock: &dyn Clock) -> Duration {
    Duration::from_micros(clock.now().as_micros().saturating_sub(begun.as_micros()))
}

#[cfg(test)]
mod tests;
