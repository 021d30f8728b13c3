//! Decides checks for the listeners, by the settings in force.
//!
//! HTTP and RESP differ in how a check is parsed and how its decision is written. Everything else is the same for both,
//! and is in this module: which limiter and rules decide, which settings of the configuration apply, and what is
//! counted.
//!
//! ```text
//!   listeners/http, listeners/resp ──▶ Decider ──▶ Limiter    explicit checks: key and limit are given
//!                                             └──▶ Engine     requests: decided by rules
//! ```
//!
//! **Explicit checks** name their keys and limits. These settings of the configuration apply to them: `on_failure`,
//! `headers`, `expose_headers`, `kill_switch`, and bans in the store. The others need a request: an explicit check has no
//! address, API key or path that could be exempt, banned by the configuration or anonymized, and its response body is the
//! decision. A reload applies to the next check.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tidegate::answer::Styles;
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::rules::{RequestView, RuleSet};
use tidegate::{Check, CheckOptions, Cost, Decision, Limiter, NotReady, OnFailure, Timestamp, Unavailable, Wait};
use tokio::time::Instant;

use crate::metrics::DecisionStats;
use crate::receipt_secret::ReceiptSecret;

/// Decides explicit checks and described requests, and counts the decisions. Clones are cheap and share everything.
#[derive(Clone, Debug)]
pub(crate) struct Decider {
    limiter: Limiter,
    engine: Option<Engine>,
    stats: Arc<DecisionStats>,
    receipt_secret: Option<ReceiptSecret>,
}

/// The settings of the configuration that apply to explicit checks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct ExplicitSettings {
    /// Whether the kill switch is on: every check is allowed and counted nowhere.
    pub(crate) is_off: bool,
    /// How a check is decided if the store does not answer. `None` is the limiter's own policy.
    pub(crate) on_failure: Option<OnFailure>,
    /// The styles of the rate-limit headers.
    pub(crate) styles: Styles,
    /// Whether the headers are listed in `Access-Control-Expose-Headers`.
    pub(crate) exposes_headers: bool,
}

impl Decider {
    /// Creates a decider of explicit checks by `limiter`, and of requests by `engine` if there is one.
    pub(crate) fn new(limiter: Limiter, engine: Option<Engine>, stats: Arc<DecisionStats>) -> Decider {
        Decider { limiter, engine, stats, receipt_secret: None }
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

    /// Returns the engine that decides requests, if there are rules.
    pub(crate) fn engine(&self) -> Option<&Engine> {
        self.engine.as_ref()
    }

    /// Returns the limiter of explicit checks.
    pub(crate) fn limiter(&self) -> &Limiter {
        &self.limiter
    }

    /// Returns the rules in use, or `None` if there are none.
    pub(crate) fn rules(&self) -> Option<RuleSet> {
        self.engine.as_ref().map(Engine::rules)
    }

    /// Returns the settings that apply to explicit checks: those of the configuration, or the defaults without one.
    pub(crate) fn explicit_settings(&self) -> ExplicitSettings {
        let Some(rules) = self.rules() else { return ExplicitSettings::default() };
        ExplicitSettings {
            is_off: rules.is_off(),
            on_failure: Some(rules.on_failure()),
            styles: rules.styles(),
            exposes_headers: rules.exposes_headers(),
        }
    }

    /// Decides an explicit check and counts the decision.
    ///
    /// While the kill switch is on, the decision is an admission without limit statuses, and nothing is counted.
    /// `refundable` says whether units may be refunded later, as in [`CheckOptions`].
    ///
    /// # Errors
    /// Returns an error only if the store does not answer and `on_failure` is `deny`.
    pub(crate) async fn check(&self, check: &Check<'_>, refundable: bool) -> Result<Decision, Unavailable> {
        let Some(options) = self.explicit_options(refundable) else { return Ok(unlimited()) };
        let began = Instant::now();
        let answer = self.limiter.check_with(check, options).await;
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
        check: &Check<'_>,
        wait_max: Duration,
        refundable: bool,
    ) -> Result<Decision, Unavailable> {
        let Some(options) = self.explicit_options(refundable) else { return Ok(unlimited()) };
        let ready = self.limiter.until_ready_with(check, wait_max, options).await;
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
        let Some(options) = self.explicit_options(refundable) else {
            return checks.iter().map(|_| Ok(unlimited())).collect();
        };
        let began = Instant::now();
        let answers = self.limiter.check_batch(checks, options).await;
        let took = began.elapsed();
        answers.iter().for_each(|answer| self.stats.record_explicit(answer, took));
        answers
    }

    /// Decides a described request by the rules and counts the decision. Returns `None` if there are no rules.
    pub(crate) async fn check_request(
        &self,
        request: &Request<()>,
        peer: IpAddr,
        options: RequestOptions,
    ) -> Option<Outcome> {
        let engine = self.engine.as_ref()?;
        let began = Instant::now();
        let outcome = engine.check(&RequestView::of(request), peer, options).await;
        self.stats.record_by_rules(&outcome, began.elapsed());
        Some(outcome)
    }

    /// Counts the decision on a request by rules that was made elsewhere, and records how long it took.
    pub(crate) fn record_by_rules(&self, outcome: &Outcome, took: Duration) {
        self.stats.record_by_rules(outcome, took);
    }

    /// Returns the options of an explicit check, or `None` if the kill switch is on.
    fn explicit_options(&self, refundable: bool) -> Option<CheckOptions<'static>> {
        let ExplicitSettings { is_off, on_failure, .. } = self.explicit_settings();
        (!is_off).then_some(CheckOptions { on_failure, refundable, ..CheckOptions::default() })
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
