//! Failure policies: how a request is decided when the store does not answer.
//!
//! | `on_failure` | the request | the risk |
//! |---|---|---|
//! | `local` (default) | is decided in process memory, with this instance's share of the quota | across an outage up to twice the quota |
//! | `allow` | is admitted and not counted | the upstream gets unlimited traffic |
//! | `deny` | is refused as unavailable (503, never 429) | the service is unavailable with the store |
//!
//! `local` is the default because a limiter that fails open adds load to the outage that it should contain, and one
//! that fails closed extends the outage to the service. An instance's share is quota / instances, rounded up. The number
//! of instances is the last known number of those that share the store (`limiter/announcing.rs`), or as configured.
//!
//! **Bounds**, for a quota q and n instances that know each other, in one window:
//!
//! | while the store does not answer | at most |
//! |---|---|
//! | all instances | n × ⌈q/n⌉ ≤ q + n − 1 |
//! | with what the store admitted before or admits after | 2q + n − 1 |
//! | an instance that first reached the store less than an interval before it failed, unknown to the others | ⌈q/n⌉ more |
//! | an instance that was started since, and never reached the store | q more: it knows only itself |
//! | one instance that alone cannot reach the store | q of the store, and ⌈q/n⌉ of that instance |
//!
//! After an instance has ended, the number is too high for less than ten seconds, so the others admit less.
//!
//! A cost above the share but within the whole limit never fits into the share, but will fit when the store is back.
//! The time of that is unknown, so such a denial has the limit's window as its `retry_after`.

use std::sync::Arc;

pub use tidegate_core::OnFailure;
use tidegate_core::{Demand, KeyError, Limit, StoreError, StoreErrorKind, Wait};

/// The error of a check whose store did not answer and whose failure policy is [`OnFailure::Deny`].
///
/// `Display` shows the message of the store's error, such as `cannot reach the store redis://127.0.0.1:6379: connection
/// refused`. It may contain the store's address, so it is for logs and operators. Send [`Unavailable::client_message`]
/// to clients. The message contains no key, no client's address and no secret.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Unavailable {
    kind: StoreErrorKind,
    // Shared by all checks of a batch, and by all checks while the circuit breaker is open.
    message: Arc<str>,
}

impl Unavailable {
    /// Creates the error with the message for operators, which must contain no key, no client's address and no secret.
    pub(crate) fn new(kind: StoreErrorKind, message: &str) -> Unavailable {
        Unavailable { kind, message: message.into() }
    }

    /// Returns the kind of the store's error, such as [`StoreErrorKind::Unreachable`].
    pub const fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Returns a message for clients, such as `the store did not answer (unreachable)`, without the store's address.
    pub fn client_message(&self) -> String {
        format!("the store did not answer ({})", self.kind.as_str())
    }
}

impl From<&StoreError> for Unavailable {
    fn from(error: &StoreError) -> Unavailable {
        Unavailable::new(error.kind(), &error.to_string())
    }
}

/// The error of [`Limiter::check_key`](crate::Limiter::check_key).
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckKeyError {
    /// The key is longer than 64 KiB. The store was not called and nothing is charged.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The store did not answer, and the limiter's failure policy is [`OnFailure::Deny`].
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
}

/// Returns the share of a limit that each instance enforces by itself while the store does not answer.
///
/// Quota, burst and queue are divided by `instances` and rounded up; the window stays. Zero instances count as one.
pub(crate) fn local_share(limit: &Limit, instances: u32) -> Limit {
    if instances <= 1 {
        return *limit;
    }
    let share = |units: u32| u64::from(units.div_ceil(instances));
    let mut local = limit.with_quota(share(limit.quota())).unwrap_or(*limit);
    if let Some(burst) = limit.burst() {
        local = local.with_burst(share(burst)).unwrap_or(local);
    }
    if let Some(queue) = limit.queue() {
        local = local.with_queue(share(queue)).unwrap_or(local);
    }
    local
}

/// Returns the `retry_after` of a denial by this instance's share of a limit, while the store does not answer.
///
/// `by_share` is the wait that the share alone gives. It is returned, unless it is [`Wait::NEVER`] and the cost fits
/// into the whole limit: then the result is the limit's window.
pub(crate) fn local_wait(by_share: Wait, demand: &Demand<'_>) -> Wait {
    if by_share == Wait::NEVER && demand.cost.units() <= demand.limit.cost_max() {
        Wait::from_micros(demand.limit.window_us())
    } else {
        by_share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_share_is_rounded_up_and_never_zero() {
        for (text, instances, share) in [
            ("10/min", 1, "10/min"),
            ("10/min", 3, "4/min"),
            ("1/min", 50, "1/min"),
            ("100/min token-bucket burst=20", 8, "13/min token-bucket burst=3"),
            ("100/min leaky-bucket queue=5 count_denied=true", 2, "50/min leaky-bucket queue=3 count_denied=true"),
        ] {
            let limit: Limit = text.parse().unwrap();
            assert_eq!(local_share(&limit, instances).to_string(), share, "{text} over {instances}");
        }
    }

    use std::io::Write;
    use std::sync::Mutex;

    use tidegate_core::{Check, Decision, Key, LimitStatus, Store, StoreFuture};

    use crate::limiter::Limiter;

    /// A store that fails every call with this kind.
    struct Failing(StoreErrorKind);

    impl Failing {
        fn error<T: Send + 'static>(&self) -> StoreFuture<'_, T> {
            let error = StoreError::new(self.0, "cannot reach the store redis://127.0.0.1:1: connection refused");
            Box::pin(std::future::ready(Err(error)))
        }
    }

    impl Store for Failing {
        fn decide<'a>(&'a self, _: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
            self.error()
        }
        fn refund<'a>(&'a self, _: &'a Check<'a>, _: &'a Decision) -> StoreFuture<'a, ()> {
            self.error()
        }
        fn reset<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, ()> {
            self.error()
        }
        fn inspect<'a>(&'a self, _: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
            self.error()
        }
    }

    /// Fails five checks with this kind. Returns the last error, whether the circuit breaker is open, and the log.
    fn failed_five_times(kind: StoreErrorKind) -> (Unavailable, bool, String) {
        #[derive(Clone, Default)]
        struct Log(Arc<Mutex<Vec<u8>>>);
        impl Write for Log {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let (error, is_open) = tracing::subscriber::with_default(subscriber, || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let store = Arc::new(Failing(kind));
                let limiter = Limiter::builder().store(store).on_failure(OnFailure::Deny).build();
                let demand = Demand::new("5/min".parse().unwrap(), Key::new("k").unwrap());
                let mut last = None;
                for _ in 0..5 {
                    last = Some(limiter.check(&Check::one(&demand)).await.unwrap_err());
                }
                (last.unwrap(), limiter.stats().breaker_open)
            })
        });
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        (error, is_open, text)
    }

    #[test]
    fn error_has_the_message_of_the_store_also_while_the_breaker_is_open() {
        let (error, is_open, log) = failed_five_times(StoreErrorKind::Unreachable);
        assert_eq!(error.kind(), StoreErrorKind::Unreachable);
        assert_eq!(error.to_string(), "cannot reach the store redis://127.0.0.1:1: connection refused");
        assert_eq!(error.client_message(), "the store did not answer (unreachable)");
        assert!(is_open && log.contains("WARN") && !log.contains("ERROR"), "{log}");
    }

    #[test]
    fn internal_error_of_a_script_opens_the_breaker_and_is_logged_as_an_error() {
        let (error, is_open, log) = failed_five_times(StoreErrorKind::Script);
        assert_eq!(error.kind(), StoreErrorKind::Script);
        assert!(is_open && log.contains("ERROR"), "{log}");
    }

    #[test]
    fn unsupported_server_opens_the_breaker_and_is_logged_as_an_error() {
        let (error, is_open, log) = failed_five_times(StoreErrorKind::Unsupported);
        assert_eq!(error.kind(), StoreErrorKind::Unsupported);
        assert!(is_open && log.contains("ERROR"), "{log}");
    }

    #[test]
    fn foreign_data_neither_opens_the_breaker_nor_is_logged_as_an_error() {
        let (_, is_open, log) = failed_five_times(StoreErrorKind::Foreign);
        assert!(!is_open && !log.contains("ERROR"), "{log}");
    }
}
