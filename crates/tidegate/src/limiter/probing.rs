//! Probes: calls to a server with the same script as a decision, on a counter of their own.
//!
//! A task probes a server whose breaker has opened, until it answers again. [`Limiter::watch_store`](super::Limiter)
//! probes all other servers, while no decision shows that they answer. Both record in [`ShardHealth`] whether the server
//! answered.
//!
//! **Only an answer in time counts.** Decisions cannot use a store that answers after their deadline. If a late answer
//! closed the breaker, three requests would wait in vain and open it again, several times a second. So only an answer
//! within the limiter's deadline closes it. A probe may take longer, because the first one may have to connect. A late
//! probe is repeated at once, on the connection that it opened.
//!
//! **Foreign data under the probe's key** is an answer of a store that works, so it counts as a success.

use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use tidegate_core::StoreError;
use tokio::runtime::Handle;
use tokio::time::sleep;

use super::health::ShardHealth;
use super::shared::Shared;
use super::stats::Counters;
use super::store_calls::is_of_its_counters;
use crate::breaker::{Phase, probe_after};
use crate::deadline::answer_by;
use crate::observe::StoreCallKind as Call;

/// The bounds of a probe's deadline: long enough to connect, short enough that a store which hangs is probed again.
const DEADLINE_MIN: Duration = Duration::from_millis(250);
const DEADLINE_MAX: Duration = Duration::from_secs(1);
/// The interval at which [`watch`] looks at the servers. Two of them and the breaker's longest pause are less than the two
/// seconds within which a store that is back must be noticed.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// The deadline of a probe of [`watch`]. No request waits for it, so it may take longer than a decision.
const WATCH_DEADLINE: Duration = Duration::from_millis(400);

/// Returns the deadline of a probe, given the deadline of decisions: the same, but at least 250 ms and at most 1 s.
pub(super) fn deadline(of_decisions: Duration) -> Duration {
    of_decisions.clamp(DEADLINE_MIN, DEADLINE_MAX)
}

/// Spawns a task on the caller's tokio runtime that probes a server until it answers in time. Its breaker must be open.
///
/// Without a runtime, no task is spawned, and the breaker closes at once, as if the task had ended without success.
pub(super) fn start(shared: &Arc<Shared>, shard: &Arc<ShardHealth>) {
    let probing = Probing { shared: Arc::downgrade(shared), shard: shard.clone(), phase: shard.breaker.phase() };
    if let Ok(runtime) = Handle::try_current() {
        drop(runtime.spawn(probe_until_recovered(probing)));
    }
}

/// A running probe task. When it is dropped while its phase of the breaker lasts, because its runtime has ended, it
/// closes the breaker, logs that and reports it to the observers. The next checks then call the store.
struct Probing {
    shared: Weak<Shared>,
    shard: Arc<ShardHealth>,
    phase: Phase,
}

impl Drop for Probing {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade()
            && self.shard.breaker.close_without_probe(self.phase)
        {
            tracing::warn!("the task that probes the store has ended; the next checks call the store");
            shared.observers.breaker_changed(shared.health.is_any_open());
        }
    }
}

/// Probes the store at intervals until it answers in time, then closes the breaker.
///
/// Also ends when the limiter is dropped or the breaker has changed its phase.
async fn probe_until_recovered(probing: Probing) {
    for attempt in 0_u32.. {
        let pause = probe_after(attempt, fastrand::f64());
        {
            let Some(shared) = probing.shared.upgrade() else { return };
            let done_after_us = (pause + 2 * deadline(shared.deadlines.check)).as_micros() as u64;
            probing.shard.breaker.set_probe_due(shared.clock.now().plus_micros(done_after_us));
        }
        sleep(pause).await;
        let Some(shared) = probing.shared.upgrade() else { return };
        if probing.shard.breaker.phase() != probing.phase {
            return;
        }
        if has_recovered(&shared, &probing.shard).await {
            if probing.shard.breaker.close(probing.phase) {
                shared.report_recovery(&probing.shard);
            }
            return;
        }
    }
}

/// Probes the servers at intervals, except those whose breaker is open: another task probes these. Never returns, except
/// without a tokio timer.
///
/// If the store has answered decisions since the last look, and none has failed, all servers count as answering.
pub(super) async fn watch(shared: &Shared, counters: &Counters) {
    let mut before = (0, 0);
    loop {
        let now = (counters.store_answers.load(Ordering::Relaxed), counters.store_failures.load(Ordering::Relaxed));
        let has_answered = now.0 > before.0 && now.1 == before.1;
        before = now;
        let look = async |shard: &ShardHealth| {
            if has_answered {
                shard.probed(&Ok(()));
            } else if !shard.breaker.is_open()
                && let Some(call) = shared.within(WATCH_DEADLINE, shard.id, shared.store.probe(shard.id))
            {
                record(shard, call.await);
            }
        };
        let shards = shared.health.of_all(&*shared.store);
        join_all(shards.iter().map(|shard| look(shard))).await;
        sleep(WATCH_INTERVAL).await;
    }
}

/// Records the result of a probe, and returns whether the server answered. Foreign data under the probe's key is an
/// answer.
fn record(shard: &ShardHealth, result: Result<(), StoreError>) -> bool {
    let answered = match result {
        Err(error) if is_of_its_counters(&error) => Ok(()),
        result => result,
    };
    shard.probed(&answered);
    answered.is_ok()
}

/// The result of one probe: answered in time, answered late, or failed.
#[derive(PartialEq, Eq)]
enum Probed {
    /// The store answered within the deadline of decisions.
    InTime,
    /// The store answered after that, within the deadline of probes.
    Late,
    /// The store failed, or did not answer within the deadline of probes.
    Failed,
}

/// Probes the store, and once more if the answer is late. Returns whether the last answer was in time.
async fn has_recovered(shared: &Shared, shard: &ShardHealth) -> bool {
    match probe(shared, shard).await {
        Probed::Late => probe(shared, shard).await == Probed::InTime,
        first => first == Probed::InTime,
    }
}

/// Makes one call to a server, which charges the probe's counter, so that the server must write as for a decision.
///
/// The call is reported to the observers.
async fn probe(shared: &Shared, shard: &ShardHealth) -> Probed {
    let mut call = pin!(shared.call(Call::Probe, 1, shared.store.probe(shard.id)));
    // As for a decision, an answer that has arrived when the deadline is noticed is in time.
    let (answered, probed) = match answer_by(sleep(shared.deadlines.check), &*shared.store, call.as_mut()).await {
        Some(answered) => (answered, Probed::InTime),
        None => (call.await, Probed::Late),
    };
    if record(shard, answered) { probed } else { Probed::Failed }
}
