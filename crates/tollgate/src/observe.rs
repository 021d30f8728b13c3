//! Watching a limiter: what was answered, what the store was asked, whether it is asked at all.
//!
//! A limiter counts a few numbers of itself ([`LimiterStats`](crate::LimiterStats)). Who needs more (a histogram, a list of
//! the most refused, an audit log) adds an [`Observer`]:
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering};
//! use tollgate::observe::{Answered, Observer};
//! use tollgate::{Check, Demand, Key, Limiter};
//!
//! #[derive(Default)]
//! struct Denials(AtomicU64);
//!
//! impl Observer for Denials {
//!     fn decided(&self, answered: &Answered<'_>) {
//!         if answered.answer.is_ok_and(|decision| !decision.allowed()) {
//!             self.0.fetch_add(1, Ordering::Relaxed);
//!         }
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let denials = Arc::new(Denials::default());
//! let limiter = Limiter::builder().observer(denials.clone()).build();
//! let demand = Demand::new("1/min".parse()?, Key::new("user:42")?);
//! for _ in 0..3 {
//!     limiter.check(&Check::one(&demand)).await?;
//! }
//! assert_eq!(denials.0.load(Ordering::Relaxed), 2);
//! # Ok(())
//! # }
//! ```
//!
//! **Contract.** Observers are called on the path of the request, in the order in which they were added, after the answer is
//! known and before the caller has it: they should only count, or hand on. They cannot change an answer. One that panics is
//! called again next time; its panic goes no further. Times are the limiter's clock's, and no clock is read
//! for a limiter that nobody observes.
//!
//! **What must not leak.** An observer sees whole checks, keys included. What it writes above debug level or puts into a
//! metric must name no key. [`TracingObserver`] shows how.

mod traced;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tollgate_core::{Check, Clock, Decision, StoreErrorKind, Timestamp};

pub use self::traced::TracingObserver;
use crate::counts::DecisionOutcome;

/// Somebody who watches a limiter. Every method does nothing unless it is given.
pub trait Observer: Send + Sync + 'static {
    /// A check was answered.
    fn decided(&self, answered: &Answered<'_>) {
        let _ = answered;
    }

    /// The shared store was called, and answered or not. Probes and refunds are calls, too.
    fn store_called(&self, call: &StoreCall) {
        let _ = call;
    }

    /// From here on the store is not asked (`is_open`), or is asked again.
    fn breaker_changed(&self, is_open: bool) {
        let _ = is_open;
    }
}

impl<O: Observer + ?Sized> Observer for Arc<O> {
    fn decided(&self, answered: &Answered<'_>) {
        (**self).decided(answered);
    }
    fn store_called(&self, call: &StoreCall) {
        (**self).store_called(call);
    }
    fn breaker_changed(&self, is_open: bool) {
        (**self).breaker_changed(is_open);
    }
}

/// A check and its answer.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Answered<'a> {
    /// What was asked. It holds keys.
    pub check: &'a Check<'a>,
    /// The decision; or why there is none, where the policy for that is [`OnFailure::Deny`](crate::OnFailure::Deny).
    pub answer: Result<&'a Decision, StoreErrorKind>,
    /// How long it took. The checks of one batch are answered together.
    pub took: Duration,
}

impl Answered<'_> {
    /// `allow`, `deny` or `unavailable`: the word in metrics and logs.
    pub fn verdict(&self) -> &'static str {
        self.answer.map_or(DecisionOutcome::Unavailable, |decision| DecisionOutcome::of(decision.allowed())).name()
    }
}

/// One call of the shared store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StoreCall {
    /// What it was for.
    pub kind: StoreCallKind,
    /// How many checks went with it: none for a reset.
    pub checks: usize,
    /// How long it took, or the deadline if that was earlier.
    pub took: Duration,
    /// Whether the store answered.
    pub result: Result<(), StoreErrorKind>,
}

/// What a call of the store was for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum StoreCallKind {
    /// To decide.
    Decide,
    /// To give units back.
    Refund,
    /// To charge what was used beyond what was reserved.
    Settle,
    /// To forget a counter.
    Reset,
    /// To look at a counter.
    Inspect,
    /// To set, lift or read a ban.
    Ban,
    /// To see whether a store that was away is back.
    Probe,
}

impl StoreCallKind {
    /// The name used in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            StoreCallKind::Decide => "decide",
            StoreCallKind::Refund => "refund",
            StoreCallKind::Settle => "settle",
            StoreCallKind::Reset => "reset",
            StoreCallKind::Inspect => "inspect",
            StoreCallKind::Ban => "ban",
            StoreCallKind::Probe => "probe",
        }
    }
}

/// Everybody who watches one limiter.
#[derive(Clone, Default)]
pub(crate) struct Observers(Arc<[Watching]>);

struct Watching {
    observer: Box<dyn Observer>,
    /// Whether it was already said that this one panics: once is enough.
    has_panicked: AtomicBool,
}

impl Observers {
    pub(crate) fn new(observers: Vec<Box<dyn Observer>>) -> Observers {
        let watching = |observer| Watching { observer, has_panicked: AtomicBool::new(false) };
        Observers(observers.into_iter().map(watching).collect())
    }

    /// When something begins, if anybody wants to know how long it takes.
    pub(crate) fn begin(&self, clock: &dyn Clock) -> Option<Timestamp> {
        (!self.0.is_empty()).then(|| clock.now())
    }

    /// Tells of answers that are the end of what began at `begun`.
    pub(crate) fn decided<'a>(
        &self,
        begun: Option<Timestamp>,
        clock: &dyn Clock,
        checks: &[Check<'_>],
        answers: impl IntoIterator<Item = Result<&'a Decision, StoreErrorKind>>,
    ) {
        let Some(begun) = begun else { return };
        let took = since(begun, clock);
        for (check, answer) in checks.iter().zip(answers) {
            self.tell(|observer| observer.decided(&Answered { check, answer, took }));
        }
    }

    /// Tells of a call that began at `begun` and ended.
    pub(crate) fn store_called(
        &self,
        begun: Option<Timestamp>,
        clock: &dyn Clock,
        (kind, checks): (StoreCallKind, usize),
        result: Result<(), StoreErrorKind>,
    ) {
        let Some(begun) = begun else { return };
        let took = since(begun, clock);
        self.tell(|observer| observer.store_called(&StoreCall { kind, checks, took, result }));
    }

    pub(crate) fn breaker_changed(&self, is_open: bool) {
        self.tell(|observer| observer.breaker_changed(is_open));
    }

    fn tell(&self, what: impl Fn(&dyn Observer)) {
        for watching in self.0.iter() {
            let told = catch_unwind(AssertUnwindSafe(|| what(&*watching.observer)));
            if told.is_err() && !watching.has_panicked.swap(true, Ordering::Relaxed) {
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
