//! The bans at run time of an engine: a copy of the ban list of its store.
//!
//! With counters in memory, the list is in the same process, and the copy is renewed by the first request after a
//! change. With a shared store, a task reads the version of the list several times in two seconds, and the list after a
//! change. So a ban costs a request no call to the store, it refuses requests that no rule counts, and it holds while
//! the store does not answer: the last list that was read stays in force.
//!
//! The task holds the engine weakly and ends with it. If it ends otherwise, because its runtime has ended, the next
//! request starts it again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use tidegate_core::{BanListing, Clock, StoreError, Timestamp};
use tokio::runtime::Handle;
use tokio::time::sleep;

use super::{Engine, Inner};
use crate::rules::ClientBans;

/// The time between two readings of the version. With the time of the calls, a ban takes effect within a second.
const PERIOD: Duration = Duration::from_millis(700);

/// The bans at run time of an engine.
#[derive(Default)]
pub(super) struct RunTimeBans {
    bans: ArcSwap<ClientBans>,
    /// Whether `bans` has any, so that requests need not load it.
    has_bans: AtomicBool,
    /// Whether a task follows the list of the shared store.
    is_followed: AtomicBool,
}

impl RunTimeBans {
    /// Returns the bans, or `None` if there are none.
    #[inline]
    pub(super) fn load(&self) -> Option<Arc<ClientBans>> {
        self.has_bans.load(Ordering::Acquire).then(|| self.bans.load_full())
    }

    fn set(&self, listing: &BanListing, now: Timestamp) {
        let bans = ClientBans::new(listing, now);
        let has_bans = !bans.is_empty();
        self.bans.store(Arc::new(bans));
        self.has_bans.store(has_bans, Ordering::Release);
    }

    fn version(&self) -> u64 {
        self.bans.load().version()
    }
}

impl Engine {
    /// Returns the bans at run time, or `None` if there are none. With counters in memory, reads a changed list first.
    #[inline]
    pub(super) fn run_time_bans(&self) -> Option<Arc<ClientBans>> {
        let bans = &self.0.bans;
        if self.0.limiter.is_in_process()
            && let Some(listing) = self.0.limiter.changed_bans_in_memory(Some(bans.version()))
        {
            bans.set(&listing, self.0.clock.now());
        }
        bans.load()
    }

    /// Reads the ban list of the store, and applies it to the following requests of this engine.
    ///
    /// An engine on a shared store does so by itself, so that a ban takes effect within a second. Call it to apply one
    /// at once, and before the first request of a service.
    ///
    /// # Errors
    /// Returns an error if the store does not answer. The list that was read last stays in force.
    pub async fn refresh_bans(&self) -> Result<(), StoreError> {
        refresh(&self.0).await
    }

    /// Returns the bans at run time that this engine applies, as it has read them last.
    pub fn client_bans(&self) -> Arc<ClientBans> {
        self.run_time_bans().unwrap_or_default()
    }

    /// Starts the task that follows the ban list of a shared store, unless it runs. Needs a tokio runtime.
    #[inline]
    pub(super) fn follow_bans(&self) {
        if !self.0.bans.is_followed.load(Ordering::Relaxed) {
            self.start_following();
        }
    }

    #[cold]
    fn start_following(&self) {
        if self.0.limiter.is_in_process() {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return };
        if !self.0.bans.is_followed.swap(true, Ordering::Relaxed) {
            drop(runtime.spawn(follow(Following(Arc::downgrade(&self.0)))));
        }
    }
}

/// A running task. When it is dropped, the next request starts another one.
struct Following(Weak<Inner>);

impl Drop for Following {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.bans.is_followed.store(false, Ordering::Relaxed);
        }
    }
}

/// Reads the ban list until the engine is dropped. Logs a warning when the list cannot be read for a reason that does
/// not go away by itself, such as a missing permission.
async fn follow(following: Following) {
    let mut has_warned = false;
    loop {
        {
            let Some(inner) = following.0.upgrade() else { return };
            match refresh(&inner).await {
                Ok(()) => has_warned = false,
                Err(error) if !error.is_transient() && !has_warned => {
                    tracing::warn!(%error, "cannot read the ban list; the bans that were read last stay in force");
                    has_warned = true;
                }
                Err(_) => {}
            }
        }
        sleep(PERIOD).await;
    }
}

async fn refresh(inner: &Inner) -> Result<(), StoreError> {
    if let Some(listing) = inner.limiter.changed_bans(Some(inner.bans.version())).await? {
        inner.bans.set(&listing, inner.clock.now());
    }
    Ok(())
}
