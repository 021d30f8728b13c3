//! An observer that emits `tracing` events.

use std::fmt;

use tidegate_core::{Check, Source};

#[cfg(feature = "rules")]
use super::{BannedBy, BannedRequest, ExemptBy, ExemptRequest, ShieldRefusal};
use super::{DecidedCheck, Observer, StoreCall};
#[cfg(feature = "rules")]
use crate::rules::RuleSet;

/// An [`Observer`] that emits a `tracing` event for each call. No field contains a key, an address or a secret.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::Limiter;
/// use tidegate::observe::TracingObserver;
///
/// let limiter = Limiter::builder().observer(Arc::new(TracingObserver)).build();
/// ```
///
/// | event | level | fields |
/// |---|---|---|
/// | `decided` | debug | `limits`, `verdict`, `source` (or `kind` of the store's error), `took_us` |
/// | `store called` | debug | `call`, `checks`, `took_us`, `kind` if it failed |
/// | `shield refused` | debug | `limits`, `verdict` |
/// | `banned` | debug | `by`: `address` or `caller` |
/// | `exempted` | debug | `by`: `path` or `caller` |
/// | `rules reloaded` | debug | `rules`: their number |
///
/// `limits` is the texts of the limits, separated by commas. `verdict` is `allow`, `deny` (including bans in the store)
/// or `unavailable`; of a shield, `deny` if a limit denied the request, else `unavailable`. `took_us` is in
/// microseconds. Changes of the circuit breaker are no events of this observer: every limiter logs that its breaker
/// opens (warn) or closes (info).
#[derive(Clone, Copy, Debug, Default)]
pub struct TracingObserver;

impl Observer for TracingObserver {
    fn decided(&self, decided: &DecidedCheck<'_>) {
        let (verdict, took_us) = (decided.outcome().as_str(), decided.took.as_micros() as u64);
        let limits = LimitTexts(decided.check);
        match decided.result.map(|decision| decision.source) {
            Ok(source) => tracing::debug!(%limits, verdict, source = Source::as_str(source), took_us, "decided"),
            Err(kind) => tracing::debug!(%limits, verdict, kind = kind.as_str(), took_us, "decided"),
        }
    }

    fn store_called(&self, call: &StoreCall) {
        let StoreCall { kind, checks, took, result } = *call;
        let (call, took_us) = (kind.as_str(), took.as_micros() as u64);
        match result {
            Ok(()) => tracing::debug!(call, checks, took_us, "store called"),
            Err(kind) => tracing::debug!(call, checks, took_us, kind = kind.as_str(), "store called"),
        }
    }

    #[cfg(feature = "rules")]
    fn shield_refused(&self, refused: &ShieldRefusal<'_>) {
        let limits = LimitTexts(refused.check);
        let verdict = if refused.decision.is_some() { "deny" } else { "unavailable" };
        tracing::debug!(%limits, verdict, "shield refused");
    }

    #[cfg(feature = "rules")]
    fn banned(&self, request: &BannedRequest) {
        let by = match request.by {
            BannedBy::Address => "address",
            BannedBy::Caller => "caller",
        };
        tracing::debug!(by, "banned");
    }

    #[cfg(feature = "rules")]
    fn exempted(&self, request: &ExemptRequest) {
        let by = match request.by {
            ExemptBy::Path => "path",
            ExemptBy::Caller => "caller",
        };
        tracing::debug!(by, "exempted");
    }

    #[cfg(feature = "rules")]
    fn reloaded(&self, rules: &RuleSet) {
        tracing::debug!(rules = rules.rules().len(), "rules reloaded");
    }
}

/// Displays the limits of a check, separated by commas, without its keys.
struct LimitTexts<'a>(&'a Check<'a>);

impl fmt::Display for LimitTexts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, demand) in self.0.demands().iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            demand.limit.fmt(f)?;
        }
        Ok(())
    }
}
