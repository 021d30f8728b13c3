//! Decides checks for the listeners, by the settings in force.
//!
//! HTTP and RESP differ in how a check is parsed and how its decision is written. Everything else is the same for both,
//! and is in this module: which limiter and rules decide, which settings of the configuration apply, and what is
//! counted.
//!
//! ```text
//!   listeners/http, listeners/resp ──▶ Decider ──▶ Engine::explicit ──▶ Limiter    keys and limits are given
//!                                             └──▶ Engine::check                   requests, decided by rules
//! ```
//!
//! **Explicit checks** name their keys and limits. [`ExplicitResolver`] has the settings of the configuration that apply to
//! them. A reload applies to the next check.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tidegate::engine::{Engine, ExplicitResolver, Outcome, RequestOptions};
use tidegate::rules::{RequestView, RuleSet};
use tidegate::{Check, Cost, Decision, Limiter, NotReady, Timestamp, Unavailable, Wait};
use tokio::time::Instant;

use crate::metrics::DecisionStats;
use crate::receipt_secret::ReceiptSecret;

/// Decides explicit checks and described requests, and counts the decisions. Clones are cheap and share everything.
#[derive(Clone, Debug)]
pub(crate) struct Decider {
    engine: Engine,
    stats: Arc<DecisionStats>,
    receipt_secret: Option<ReceiptSecret>,
}

impl Decider {
    /// Creates a decider by the configuration and the limiter of `engine`, which issues no receipts.
    pub(crate) fn new(engine: impl Into<Engine>, stats: Arc<DecisionStats>) -> Decider {
        Decider { engine: engine.into(), stats, receipt_secret: None }
    }

    /// Sets the secret with which receipts are encrypted. Defaults to `None`: no receipts are issued.
    #[must_use]
    pub(crate) fn with_receipts(self, receipt_secret: Option<ReceiptSecret>) -> Decider {
        Decider { receipt_secret, ..self }
    }

    /// Returns the secret with which receipts are encrypted, if there is one.
    pub(crate) fn receipt_secret(&self) -> Option<&ReceiptSecret> {
        self.receipt_secret.as_ref()
    }

    /// Returns the engine that decides.
    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the limiter of explicit checks.
    pub(crate) fn limiter(&self) -> &Limiter {
        self.engine.limiter()
    }

    /// Returns the rules in use, or `None` without a configuration.
    pub(crate) fn rules(&self) -> Option<RuleSet> {
        Some(self.engine.rules()).filter(RuleSet::is_configured)
    }

    /// Decides an explicit check that `resolver` has resolved, and counts the decision.
    ///
    /// While the kill switch is on, the decision is an admission without limit statuses, and nothing is counted.
    /// `refundable` says whether units may be refunded later, as in [`CheckOptions`].
    ///
    /// # Errors
    /// Returns an error only if the store does not answer and `on_failure` is `deny`.
    pub(crate) async fn check(
        &self,
        resolver: &ExplicitResolver,
        check: &Check<'_>,
        refundable: bool,
    ) -> Result<Decision, Unavailable> {
        let Some(options) = resolver.options(refundable) else { return Ok(unlimited()) };
        let began = Instant::now();
        let answer = self.limiter().check_with(check, options).await;
        self.stats.record_explicit(&answer, began.elapsed());
        answer
    }

    /// Waits until an explicit check is admitted, for at most `wait_max`, and counts the last decision. Its duration is
    /// not recorded.
    ///
    /// Also waits for the delay of a leaky bucket, so an admission has none. If the check is not admitted in time, the
    /// last decision is returned as a denial, and nothing is charged. Checks that wait for the same counters in this
    /// process are admitted in order of arrival. Dropping the future removes the check from the queue. If the kill
    /// switch is on at the start of the wait, the check is admitted at once, as by [`Decider::check`].
    ///
    /// # Errors
    /// Returns an error only if the store does not answer and `on_failure` is `deny`.
    pub(crate) async fn wait(
        &self,
        resolver: &ExplicitResolver,
        check: &Check<'_>,
        wait_max: Duration,
        refundable: bool,
    ) -> Result<Decision, Unavailable> {
        let Some(options) = resolver.options(refundable) else { return Ok(unlimited()) };
        let ready = self.limiter().until_ready_with(check, wait_max, options).await;
        let answer = ready.map(|admitted| without_delay(admitted, check)).or_else(NotReady::into_denial);
        self.stats.count_explicit(&answer);
        answer
    }

    /// Decides explicit checks one after the other, with at most one call to the store, and counts the decisions.
    ///
    /// Returns one result per check, in the same order, each as from [`Decider::check`].
    pub(crate) async fn check_batch(
        &self,
        checks: &[Check<'_>],
        refundable: bool,
    ) -> Vec<Result<Decision, Unavailable>> {
        let Some(options) = self.engine.explicit().options(refundable) else {
            return checks.iter().map(|_| Ok(unlimited())).collect();
        };
        let began = Instant::now();
        let answers = self.limiter().check_batch(checks, options).await;
        let took = began.elapsed();
        answers.iter().for_each(|answer| self.stats.record_explicit(answer, took));
        answers
    }

    /// Decides a described request by the rules and counts the decision. Without a configuration, it is admitted.
    pub(crate) async fn check_request(&self, request: &Request<()>, peer: IpAddr, options: RequestOptions) -> Outcome {
        let began = Instant::now();
        let outcome = self.engine.check(&RequestView::of(request), peer, options).await;
        self.stats.record_by_rules(&outcome, began.elapsed());
        outcome
    }

    /// Counts the decision on a request by rules that was made elsewhere, and records how long it took.
    pub(crate) fn record_by_rules(&self, outcome: &Outcome, took: Duration) {
        self.stats.record_by_rules(outcome, took);
    }
}

/// Removes the delay of a leaky bucket from an admission of `check`, because the delay has passed.
fn without_delay(mut admitted: Decision, check: &Check<'_>) -> Decision {
    let charged = check.demands().iter().zip(&mut admitted.limits).filter(|(demand, _)| demand.cost != Cost::PEEK);
    charged.for_each(|(_, status)| status.retry_after = Wait::ZERO);
    admitted
}

/// Returns the decision of a check to which no limit applies.
fn unlimited() -> Decision {
    Decision::uncounted(Timestamp::ZERO)
}
