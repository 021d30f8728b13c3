//! Announces this instance to the others that share the store, and keeps their number.
//!
//! ```text
//!   every 2.0 s … 2.2 s:  instance ── announce(id, 7 s) ──▶ store: adds or renews the id, drops expired ones
//!                                  ◀── number of live ids ──
//! ```
//!
//! The number divides the quotas while the store does not answer (`failure.rs`). So it has to be known before that, and
//! holds for as long as it lasts.
//!
//! **Lifetime.** An announcement holds for three intervals at their longest, so that two in a row may be lost. An
//! instance that was killed is dropped after 7 s, by the next announcement of another one: at most 2.2 s later.
//!
//! **A store that has lost its instances**, because it was restarted empty or has evicted them, counts only those that
//! have announced themselves since. If it fails again before they all have, a low number would let each of them admit
//! too much. So an instance that finds that it was not known any more keeps its number, unless it grows, for two
//! announcements.
//!
//! **The task** holds no strong reference to the limiter. It ends when the limiter is dropped, and a failed announcement
//! changes nothing. If its runtime ends first, the next check in another runtime starts it again.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate_core::{InstanceId, LiveInstances, ShardId, Store, StoreError, StoreErrorKind as Kind};
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

use super::shared::Shared;
use crate::deadline::timer;
use crate::observe::StoreCallKind as Call;

/// The shortest time between two announcements of an instance.
const INTERVAL: Duration = Duration::from_secs(2);
/// The largest part of the interval that is added at random, so that many instances do not announce at once.
const JITTER: f64 = 0.1;
/// The lifetime of an announcement: three intervals with their jitter, and 400 ms for the calls.
const LIFETIME: Duration = Duration::from_secs(7);
/// The deadline of an announcement, and of a withdrawal.
const DEADLINE: Duration = Duration::from_secs(1);
/// The number of announcements for which the number of instances does not sink after the store has lost them.
const HELD_ANNOUNCEMENTS: u32 = 2;

/// The announcements of an instance, and the number of instances that it knows.
pub(super) struct Announcing {
    id: InstanceId,
    /// The last known number of instances that share the store; 0 if it is not known.
    live: AtomicU32,
    /// Whether nothing has to be started: the task is running, or must not run.
    is_settled: AtomicBool,
    task: Mutex<Task>,
    /// Whether the last announcement failed and was logged.
    has_warned: AtomicBool,
    /// The number of further announcements for which the number of instances does not sink.
    held: AtomicU32,
}

/// The task that announces this instance.
enum Task {
    /// It has not been started, or it has ended with its runtime.
    NotRunning,
    /// It runs on this runtime.
    Running(Handle),
    /// It must not run: the instance is not announced, it was withdrawn, or the store does not count instances.
    Disabled,
}

impl Announcing {
    /// Creates the announcements of an instance with a random id. The task is not started.
    pub(super) fn new(is_enabled: bool) -> Announcing {
        let task = if is_enabled { Task::NotRunning } else { Task::Disabled };
        Announcing {
            id: InstanceId::new(fastrand::u64(..)),
            live: AtomicU32::new(0),
            is_settled: AtomicBool::new(!is_enabled),
            task: Mutex::new(task),
            has_warned: AtomicBool::new(false),
            held: AtomicU32::new(0),
        }
    }

    /// Returns the last known number of instances that share the store, or 1 if it is not known.
    pub(super) fn live_instances(&self) -> u32 {
        self.live.load(Ordering::Relaxed).max(1)
    }

    /// Removes this instance from the store, within [`DEADLINE`], and announces it no more.
    pub(super) async fn withdraw(&self, store: &Arc<dyn Store>) {
        if self.disable().is_some() {
            withdraw(store, self.id).await;
        }
    }

    /// Removes this instance from the store in a task on the runtime that has announced it.
    pub(super) fn withdraw_in_background(&self, store: &Arc<dyn Store>) {
        if let Some(runtime) = self.disable() {
            let (store, id) = (store.clone(), self.id);
            drop(runtime.spawn(async move { withdraw(&store, id).await }));
        }
    }

    /// Ends the task for good, before its next announcement. Returns its runtime if it was running.
    fn disable(&self) -> Option<Handle> {
        let mut task = self.task.lock();
        self.is_settled.store(true, Ordering::Release);
        match std::mem::replace(&mut *task, Task::Disabled) {
            Task::Running(runtime) => Some(runtime),
            Task::NotRunning | Task::Disabled => None,
        }
    }

    /// Adopts the number of live instances, and logs it if it has changed.
    fn learn(&self, live: LiveInstances) {
        self.has_warned.store(false, Ordering::Relaxed);
        let before = self.live.load(Ordering::Relaxed);
        if !live.was_live && before > 0 {
            self.held.store(HELD_ANNOUNCEMENTS, Ordering::Relaxed);
        }
        let held = self.held.load(Ordering::Relaxed);
        self.held.store(held.saturating_sub(1), Ordering::Relaxed);
        if live.count == before || (held > 0 && live.count < before) {
            return;
        }
        self.live.store(live.count, Ordering::Relaxed);
        match before {
            0 => tracing::info!(instances = live.count, "instances that share the store"),
            _ => tracing::info!(before, instances = live.count, "the number of instances that share the store changed"),
        }
    }

    /// Logs that this instance cannot be announced: as a warning, once, if that will not change by itself.
    fn report(&self, error: &StoreError) {
        let lasting =
            [Kind::Forbidden, Kind::Unsupported, Kind::Foreign, Kind::ForeignInPart, Kind::Protocol, Kind::Script];
        let is_lasting = lasting.contains(&error.kind());
        if is_lasting && !self.has_warned.swap(true, Ordering::Relaxed) {
            let instances = self.live_instances();
            tracing::warn!(
                kind = error.kind().as_str(),
                %error,
                instances,
                "cannot count the instances that share the store; without it, quotas are divided by the last known number"
            );
        } else {
            tracing::debug!(kind = error.kind().as_str(), %error, "cannot announce this instance in the store");
        }
    }
}

/// Removes an instance from the store, within [`DEADLINE`]. Ignores errors: its announcement then expires.
async fn withdraw(store: &Arc<dyn Store>, id: InstanceId) {
    if timer(DEADLINE).is_some() {
        let _ = timeout(DEADLINE, store.withdraw(id)).await;
    }
}

/// Spawns the task that announces this instance on the caller's tokio runtime, unless it runs or must not run.
///
/// Without a runtime with a timer, does nothing.
pub(super) fn start(shared: &Arc<Shared>) {
    let announcing = &shared.announcing;
    if announcing.is_settled.load(Ordering::Acquire) || timer(Duration::ZERO).is_none() {
        return;
    }
    let Ok(runtime) = Handle::try_current() else { return };
    {
        let mut task = announcing.task.lock();
        if !matches!(*task, Task::NotRunning) {
            return;
        }
        *task = Task::Running(runtime.clone());
        announcing.is_settled.store(true, Ordering::Release);
    }
    // Not while the lock is held: a runtime that shuts down drops the task at once.
    drop(runtime.spawn(announce_repeatedly(RunningTask(Arc::downgrade(shared)))));
}

/// A running task. When it is dropped while the limiter lives, because its runtime has ended, the next check starts
/// another one.
struct RunningTask(Weak<Shared>);

impl Drop for RunningTask {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            let mut task = shared.announcing.task.lock();
            if matches!(*task, Task::Running(_)) {
                *task = Task::NotRunning;
                shared.announcing.is_settled.store(false, Ordering::Release);
            }
        }
    }
}

/// Announces the instance at intervals, until the limiter is dropped or the task is disabled.
async fn announce_repeatedly(task: RunningTask) {
    loop {
        {
            let Some(shared) = task.0.upgrade() else { return };
            if matches!(*shared.announcing.task.lock(), Task::Disabled) {
                return;
            }
            announce(&shared).await;
        }
        sleep(INTERVAL.mul_f64(1.0 + JITTER * fastrand::f64())).await;
    }
}

/// Announces the instance once, within [`DEADLINE`]. Disables the task if the store does not count instances.
async fn announce(shared: &Shared) {
    let announcing = &shared.announcing;
    let begun = shared.observers.begin(&*shared.clock);
    let call = async { shared.store.announce(announcing.id, LIFETIME).await };
    let Some(call) = shared.within(DEADLINE, ShardId::default(), call) else { return };
    let announced = call.await;
    if let Ok(None) = announced {
        announcing.disable();
        return;
    }
    let result = announced.as_ref().map(drop).map_err(StoreError::kind);
    shared.observers.store_called(begun, &*shared.clock, (Call::Announce, 0), result);
    match announced {
        Ok(live) => live.into_iter().for_each(|live| announcing.learn(live)),
        Err(error) => announcing.report(&error),
    }
}

#[cfg(test)]
mod tests;
