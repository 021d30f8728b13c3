//! Counters of a proxy, and waits for its progress.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Timeout of a wait for progress. Progress takes microseconds, so a proxy that takes this long is stuck.
const PROGRESS_MAX: Duration = Duration::from_secs(10);

/// Counters of connections, bytes and applied faults, which the proxy's thread updates and its owner reads or waits
/// for.
#[derive(Default, Debug)]
pub(super) struct Gauge {
    accepted: AtomicU64,
    progress: Mutex<Progress>,
    progressed: Condvar,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
}

#[derive(Default, Debug)]
struct Progress {
    open: u64,
    /// The number of the last change of the fault that the proxy has applied.
    applied_change: u64,
}

/// A guard that counts one open connection until it is dropped.
pub(super) struct OpenGuard(Arc<Gauge>);

impl Gauge {
    /// Counts an accepted connection. It counts as open until the returned guard is dropped.
    pub(super) fn count_accepted(self: &Arc<Gauge>) -> OpenGuard {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        self.lock().open += 1;
        OpenGuard(Arc::clone(self))
    }

    /// Records that the proxy has applied the change of the fault with this number, and wakes up the waiting owner.
    pub(super) fn mark_applied(&self, change: u64) {
        self.lock().applied_change = change;
        self.progressed.notify_all();
    }

    pub(super) fn count_up(&self, bytes: usize) {
        self.bytes_up.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn count_down(&self, bytes: usize) {
        self.bytes_down.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    pub(super) fn open(&self) -> u64 {
        self.lock().open
    }

    pub(super) fn bytes_up(&self) -> u64 {
        self.bytes_up.load(Ordering::Relaxed)
    }

    pub(super) fn bytes_down(&self) -> u64 {
        self.bytes_down.load(Ordering::Relaxed)
    }

    /// Blocks until the proxy has applied the change of the fault with this number. Panics after [`PROGRESS_MAX`].
    pub(super) fn wait_until_applied(&self, change: u64) {
        self.wait_while(|progress| progress.applied_change < change);
    }

    /// Blocks until no connection is open. Panics after [`PROGRESS_MAX`].
    pub(super) fn wait_until_none_open(&self) {
        self.wait_while(|progress| progress.open > 0);
    }

    fn wait_while(&self, condition: impl Fn(&Progress) -> bool) {
        let waited = self.progressed.wait_timeout_while(self.lock(), PROGRESS_MAX, |progress| condition(progress));
        let (progress, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        assert!(!timeout.timed_out(), "the fault proxy is stuck: {progress:?}");
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenGuard {
    pub(super) fn gauge(&self) -> &Gauge {
        &self.0
    }
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.0.lock().open -= 1;
        self.0.progressed.notify_all();
    }
}
