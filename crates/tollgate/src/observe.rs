//! Observers: called after every decision, store call, change of the circuit breaker and reload.
//!
//! A limiter keeps a few counts itself ([`LimiterStats`](crate::LimiterStats)). For more, such as a histogram, a list of
//! the most denied keys or an audit log, add an [`Observer`]:
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering};
//! use tollgate::Limiter;
//! use tollgate::observe::{DecidedCheck, Observer};
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
//! by shields, bans of the configuration, exemptions and reloads.
//!
//! **Contract.** Observers are called by the task that decides the request, in the order in which they were added, when
//! the result is known and before the caller has it. They cannot change it, and they delay it, so they should only count
//! or pass on what they see. A panic of an observer is caught and logged once; the observer is called again next time.
//! Durations are measured by the limiter's clock, which is not read for a limiter without observers.
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
use tollgate_core::Wait;
use tollgate_core::{Check, Clock, Decision, StoreErrorKind, Timestamp};

pub use self::traced::TracingObserver;
use crate::counts::DecisionOutcome;
#[cfg(feature = "rules")]
use crate::rules::RuleSet;

/// An observer of a limiter, and of the engine that uses it. Every method does nothing by default.
pub trait Observer: Send + Sync + 'static {
    /// Called after a check was decided, by the store, the deny cache, the local share or the failure policy.
    fn decided(&self, decided: &DecidedCheck<'_>) {
        let _ = decided;
    }

    /// Called after a call to the shared store has succeeded or failed. Refunds and probes are calls, too.
    fn store_called(&self, call: &StoreCall) {
        let _ = call;
    }

    /// Called when the circuit breaker opens (`is_open`), so that the store is not called, or closes again.
    fn breaker_changed(&self, is_open: bool) {
        let _ = is_open;
    }

    /// Called when an engine refuses a request because its shields have no room for it.
    ///
    /// Shields are decided in process memory and not by the limiter, so [`Observer::decided`] is not called for them.
    #[cfg(feature = "rules")]
    fn shield_refused(&self, refused: &ShieldRefusal<'_>) {
        let _ = refused;
    }

    /// Called when an engine refuses a request by a ban of its configuration.
    ///
    /// A ban in the store is a decision with its [`ban`](Decision::ban) set: see [`Observer::decided`].
    #[cfg(feature = "rules")]
    fn banned(&self, request: &BannedRequest) {
        let _ = request;
    }

    /// Called when rules match a request, but its path, its client address or its API key is exempt from limits.
    #[cfg(feature = "rules")]
    fn exempted(&self, request: &ExemptRequest) {
        let _ = request;
    }

    /// Called after an engine has replaced its rules by `rules`, whether or not they differ.
    #[cfg(feature = "rules")]
    fn reloaded(&self, rules: &RuleSet) {
        let _ = rules;
    }
}

impl<O: Observer + ?Sized> Observer for Arc<O> {
    fn decided(&self, decided: &DecidedCheck<'_>) {
        (**self).decided(decided);
    }

    fn store_called(&self, call: &StoreCall) {
        (**self).store_called(call);
    }

    fn breaker_changed(&self, is_open: bool) {
        (**self).breaker_changed(is_open);
    }

    #[cfg(feature = "rules")]
    fn shield_refused(&self, refused: &ShieldRefusal<'_>) {
        (**self).shield_refused(refused);
    }

    #[cfg(feature = "rules")]
    fn banned(&self, request: &BannedRequest) {
        (**self).banned(request);
    }

    #[cfg(feature = "rules")]
    fn exempted(&self, request: &ExemptRequest) {
        (**self).exempted(request);
    }

    #[cfg(feature = "rules")]
    fn reloaded(&self, rules: &RuleSet) {
        (**self).reloaded(rules);
    }
}

/// A check and its result.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DecidedCheck<'a> {
    /// The check. It contains keys.
    pub check: &'a Check<'a>,
    /// The decision; or the store's error, if the failure policy is [`OnFailure::Deny`](crate::OnFailure::Deny).
    pub result: Result<&'a Decision, StoreErrorKind>,
    /// The duration of the decision. The checks of one batch have the same.
    pub took: Duration,
}

impl DecidedCheck<'_> {
    /// Returns whether the check was allowed, denied, or not decided.
    pub fn outcome(&self) -> DecisionOutcome {
        self.result.map_or(DecisionOutcome::Unavailable, |decision| DecisionOutcome::of(decision.allowed()))
    }
}

/// A call to the shared store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StoreCall {
    /// The purpose of the call.
    pub kind: StoreCallKind,
    /// The number of checks in the call; 0 for a reset.
    pub checks: usize,
    /// The duration of the call, at most the deadline.
    pub took: Duration,
    /// Whether the store answered in time, or the kind of its error.
    pub result: Result<(), StoreErrorKind>,
}

/// The purpose of a call to the store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum StoreCallKind {
    /// To decide checks.
    Decide,
    /// To refund units.
    Refund,
    /// To charge units that were used beyond those that were reserved.
    Settle,
    /// To delete a counter.
    Reset,
    /// To read a counter.
    Inspect,
    /// To set, lift or read a ban.
    Ban,
    /// To find out whether a store that failed answers again.
    Probe,
}

tollgate_core::__names! {
    "kind of store call" StoreCallKind {
        Decide = "decide",
        Refund = "refund",
        Settle = "settle",
        Reset = "reset",
        Inspect = "inspect",
        Ban = "ban",
        Probe = "probe",
    }
}

/// A request that the shields of an engine have refused.
#[cfg(feature = "rules")]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ShieldRefusal<'a> {
    /// The limits of the shields that match the request. The scope of each key names its rule.
    pub check: &'a Check<'a>,
    /// The decision; `None` if the shields could not decide and the failure policy of one is `deny`.
    pub decision: Option<&'a Decision>,
}

/// A request that an engine has refused by a ban of its configuration.
#[cfg(feature = "rules")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BannedRequest {
    /// The client's address.
    pub address: IpAddr,
    /// What the ban names.
    pub by: BannedBy,
    /// The time until the ban ends; [`Wait::NEVER`] if it has no end.
    pub remaining: Wait,
}

/// What a ban of the configuration names.
#[cfg(feature = "rules")]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum BannedBy {
    /// A network that contains the client's address.
    Address,
    /// An API key in the request, or its user.
    Caller,
}

/// A request that rules match and that is exempt from limits.
#[cfg(feature = "rules")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ExemptRequest {
    /// The client's address.
    pub address: IpAddr,
    /// What the exemption names.
    pub by: ExemptBy,
}

/// What an exemption names.
#[cfg(feature = "rules")]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ExemptBy {
    /// A pattern that matches the path.
    Path,
    /// A network that contains the client's address, or the API key.
    Caller,
}

/// The observers of one limiter.
#[derive(Clone, Default)]
pub(crate) struct Observers(Arc<[ObserverSlot]>);

struct ObserverSlot {
    observer: Box<dyn Observer>,
    /// Whether a panic of this observer was already logged.
    has_panicked: AtomicBool,
}

impl Observers {
    pub(crate) fn new(observers: Vec<Box<dyn Observer>>) -> Observers {
        let slot = |observer| ObserverSlot { observer, has_panicked: AtomicBool::new(false) };
        Observers(observers.into_iter().map(slot).collect())
    }

    /// Returns whether there are no observers.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the time at which an operation starts, or `None` without observers.
    pub(crate) fn begin(&self, clock: &dyn Clock) -> Option<Timestamp> {
        (!self.is_empty()).then(|| clock.now())
    }

    /// Reports the results of checks that started at `begun`.
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

    /// Reports a call to the store that started at `begun`.
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

    /// Reports that the circuit breaker has opened or closed.
    pub(crate) fn breaker_changed(&self, is_open: bool) {
        self.each(|observer| observer.breaker_changed(is_open));
    }

    /// Calls each observer. A panic is logged once per observer and goes no further.
    pub(crate) fn each(&self, call: impl Fn(&dyn Observer)) {
        for slot in self.0.iter() {
            let called = catch_unwind(AssertUnwindSafe(|| call(&*slot.observer)));
            if called.is_err() && !slot.has_panicked.swap(true, Ordering::Relaxed) {
                tracing::error!("an observer of the limiter panicked; no decision depends on it");
            }
        }
    }
}

fn since(begun: Timestamp, clock: &dyn Clock) -> Duration {
    Duration::from_micros(clock.now().as_micros().saturating_sub(begun.as_micros()))
}

#[cfg(test)]
mod tests;
