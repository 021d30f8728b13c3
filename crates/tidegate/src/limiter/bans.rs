//! Bans in the store: of subjects, and the list of banned clients.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::{BanListing, Check, StoreError, Wait};
#[cfg(feature = "rules")]
use tidegate_core::{ShardId, StoreErrorKind};

use super::shared::Shared;
use super::{Backend, Limiter};
#[cfg(feature = "rules")]
use super::{catch_panic, probing, store_calls::NO_TIMER};
use crate::deny_cache::CallSpan;
use crate::observe::StoreCallKind as Call;

impl Limiter {
    /// Bans `subject` for `duration`, or permanently if `None`. A new ban replaces an earlier one of the subject.
    ///
    /// Until the ban ends, every check that counts the subject and takes units is refused with
    /// [`Decision::ban`](crate::Decision::ban) set, and nothing is charged. With a shared store, the ban applies on all
    /// instances that read bans, within a second. While the store does not answer, its bans do not apply.
    ///
    /// # Errors
    /// Returns an error if the store does not answer, does not support bans, or has no room for another one. The store
    /// is called even while the circuit breaker is open.
    pub async fn ban(&self, subject: &[u8], duration: Option<Duration>) -> Result<(), StoreError> {
        self.forgetting_ban(subject, self.call(Call::Ban, 0, async { self.store().ban(subject, duration).await })).await
    }

    /// Lifts the ban on `subject`. Returns whether it was banned. Other instances apply this within a second.
    ///
    /// # Errors
    /// Returns an error if the store does not answer or does not support bans. The store is called even while the
    /// circuit breaker is open.
    pub async fn unban(&self, subject: &[u8]) -> Result<bool, StoreError> {
        self.forgetting_ban(subject, self.call(Call::Ban, 0, async { self.store().unban(subject).await })).await
    }

    /// Returns the time until the ban on `subject` ends, [`Wait::NEVER`] if it is permanent, or `None` if there is
    /// none.
    ///
    /// Asks the store: cached bans are not used. Bans in a configuration are not considered.
    ///
    /// # Errors
    /// Returns an error if the store does not answer or does not support bans. The store is called even while the
    /// circuit breaker is open.
    pub async fn ban_of(&self, subject: &[u8]) -> Result<Option<Wait>, StoreError> {
        self.call(Call::Ban, 0, async { self.store().ban_of(subject).await }).await
    }

    /// Adds an entry to the ban list of the store for `duration`, or permanently if `None`. Replaces an earlier entry
    /// with this text.
    ///
    /// The engines on this store refuse the requests of the clients that the list names: within a second with a shared
    /// store, from the next request on with counters in memory. `rules::ClientBans` documents the entries. Returns
    /// `false`, and changes nothing, if the list already has 10,000 other entries.
    ///
    /// # Errors
    /// Returns an error if the entry is longer than 256 bytes, or if the store does not answer or does not support
    /// bans. The store is called even while the circuit breaker is open.
    pub async fn list_ban(&self, entry: &str, duration: Option<Duration>) -> Result<bool, StoreError> {
        self.call(Call::Ban, 0, async { self.store().list_ban(entry, duration).await }).await
    }

    /// Removes an entry from the ban list of the store. Returns whether the list had it and it had not ended.
    ///
    /// # Errors
    /// Returns an error if the store does not answer or does not support bans. The store is called even while the
    /// circuit breaker is open.
    pub async fn unlist_ban(&self, entry: &str) -> Result<bool, StoreError> {
        self.call(Call::Ban, 0, async { self.store().unlist_ban(entry).await }).await
    }

    /// Returns the ban list of the store.
    ///
    /// # Errors
    /// Returns an error if the store does not answer or does not support bans. The store is called even while the
    /// circuit breaker is open.
    pub async fn listed_bans(&self) -> Result<BanListing, StoreError> {
        let listed = self.call(Call::Ban, 0, async { self.store().listed_bans(None).await }).await;
        listed.map(Option::unwrap_or_default)
    }

    /// Awaits a call that changes the ban on a subject, and forgets the ban that was learnt before and during it.
    async fn forgetting_ban<T>(&self, subject: &[u8], call: impl Future<Output = T>) -> T {
        let forget = || match &self.0.backend {
            Backend::Shared(shared) => shared.deny_cache.iter().for_each(|cache| cache.forget_ban(subject)),
            Backend::Memory(_) => {}
        };
        forget();
        let result = call.await;
        forget();
        result
    }
}

/// For the engine.
#[cfg(feature = "rules")]
impl Limiter {
    /// Returns the ban list if its version is not `known`, for a task that follows the list.
    ///
    /// With a shared store, the call has the deadline of a probe, and is not reported to the observers. With counters
    /// in memory, the result is ready at the first poll.
    ///
    /// # Errors
    /// Returns an error if the store does not answer.
    pub(crate) async fn changed_bans(&self, known: Option<u64>) -> Result<Option<BanListing>, StoreError> {
        match &self.0.backend {
            Backend::Memory(_) => Ok(self.changed_bans_in_memory(known)),
            Backend::Shared(shared) => {
                let deadline = probing::deadline(shared.deadlines.check);
                match shared.within(deadline, ShardId::default(), async { shared.store.listed_bans(known).await }) {
                    Some(call) => call.await,
                    None => Err(StoreError::new(StoreErrorKind::Unreachable, NO_TIMER)),
                }
            }
        }
    }

    /// Returns the ban list if it is in memory and its version is not `known`. Takes no lock if it is.
    #[inline]
    pub(crate) fn changed_bans_in_memory(&self, known: Option<u64>) -> Option<BanListing> {
        match &self.0.backend {
            Backend::Memory(store) if known != Some(store.ban_list_version()) => {
                catch_panic(|| store.listed_bans(known)).flatten()
            }
            Backend::Memory(_) | Backend::Shared(_) => None,
        }
    }
}

impl Shared {
    /// Asks the store in the background which subjects of a refused check are banned, and caches their bans. Does
    /// nothing while such a task is running.
    pub(super) fn find_banned_subjects(self: &Arc<Self>, check: &Check<'_>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.is_finding_ban.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut subjects: Vec<Vec<u8>> = check.demands().iter().map(|demand| demand.key.subject().to_vec()).collect();
        subjects.sort_unstable();
        subjects.dedup();
        let shared = self.clone();
        runtime.spawn(async move {
            for subject in subjects {
                let sent = shared.clock.now();
                let ban = shared.call(Call::Ban, 0, async { shared.store.ban_of(&subject).await }).await;
                if let (Ok(Some(ban)), Some(cache)) = (ban, &shared.deny_cache) {
                    cache.learn_ban_of(&subject, ban, CallSpan { sent, received: shared.clock.now().max(sent) });
                }
            }
            shared.is_finding_ban.store(false, Ordering::Relaxed);
        });
    }
}
