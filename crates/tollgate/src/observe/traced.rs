//! A limiter's doings as `tracing` events.

use std::fmt;

use tollgate_core::{Check, Source};

use super::{Answered, Observer, StoreCall};

/// Emits an event for every answer and every call of the store, at debug level. No field holds a key, an address or a
/// secret: a check is told by the texts of its limits.
///
/// ```
/// use tollgate::Limiter;
/// use tollgate::observe::TracingObserver;
///
/// let limiter = Limiter::builder().observer(TracingObserver).build();
/// ```
///
/// | event | level | fields |
/// |---|---|---|
/// | `decided` | debug | `limits`, `verdict`, `source` (or `kind`: why nobody decided), `took_us` |
/// | `store called` | debug | `call`, `checks`, `took_us`, `kind` if it failed |
///
/// That the breaker opens (warn) or closes (info) is said by every limiter, with this observer or without.
#[derive(Clone, Copy, Debug, Default)]
pub struct TracingObserver;

impl Observer for TracingObserver {
    fn decided(&self, answered: &Answered<'_>) {
        let (verdict, took_us) = (answered.verdict(), answered.took.as_micros() as u64);
        let limits = Limits(answered.check);
        match answered.answer.map(|decision| decision.source) {
            Ok(source) => tracing::debug!(%limits, verdict, source = Source::name(source), took_us, "decided"),
            Err(kind) => tracing::debug!(%limits, verdict, kind = kind.name(), took_us, "decided"),
        }
    }

    fn store_called(&self, call: &StoreCall) {
        let StoreCall { kind, checks, took, result } = *call;
        let (call, took_us) = (kind.name(), took.as_micros() as u64);
        match result {
            Ok(()) => tracing::debug!(call, checks, took_us, "store called"),
            Err(kind) => tracing::debug!(call, checks, took_us, kind = kind.name(), "store called"),
        }
    }
}

/// The limits of a check, without its keys.
struct Limits<'a>(&'a Check<'a>);

impl fmt::Display for Limits<'_> {
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
