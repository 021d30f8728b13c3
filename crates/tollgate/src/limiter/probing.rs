//! Who finds out that a store is back: a task that asks it what a decision would ask.
//!
//! **In time, or not at all.** A store that answers, but later than decisions wait, is of no use to them: if its answer closed the breaker, three
//! requests would wait in vain and open it again, several times a second and for as long as it is slow. So only an answer within the
//! limiter's deadline counts. A probe is given longer than that because the first one may have to pay for a connection, and it must not be cut off
//! from one; then it is repeated at once, and the second has no such excuse.
//!
//! **Something else under the probe's key** is an answer of a store that works. What that says of one key is not said of the others.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::sleep;
use tollgate_core::{Check, Demand, Key, Limit};

use super::shared::{Shared, is_foreign};
use crate::breaker::{Phase, probe_after};
use crate::deadline::answer_by;
use crate::observe::StoreCallKind as Call;

/// Nobody waits for a probe but the next one, and a store that hangs and then heals must be found out.
const DEADLINE_MIN: Duration = Duration::from_millis(250);
const DEADLINE_MAX: Duration = Duration::from_secs(1);
/// What a probe spends: one unit of a limit that nobody can exhaust, so that it writes like a decision does.
const SUBJECT: &str = "tollgate-probe";
const LIMIT: &str = "10000000/s token-bucket";

/// How long a probe may take where decisions may take so long.
pub(super) fn deadline(of_decisions: Duration) -> Duration {
    of_decisions.clamp(DEADLINE_MIN, DEADLINE_MAX)
}

/// Begins to probe, on the runtime of the caller.
pub(super) fn start(shared: &Arc<Shared>) {
    let probing = Probing { shared: Arc::downgrade(shared), phase: shared.breaker().phase() };
    // Without a runtime there is nobody to probe.
    if let Ok(runtime) = Handle::try_current() {
        drop(runtime.spawn(probe_until_healed(probing)));
    }
}

/// Somebody probes. If it ends and the store was not found healed, because a runtime ended, the next callers find out themselves.
struct Probing {
    shared: Weak<Shared>,
    phase: Phase,
}

impl Drop for Probing {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade()
            && shared.breaker().leave_ajar(self.phase)
        {
            tracing::warn!("nobody probes the store any more; it is asked again");
            shared.observers.breaker_changed(false);
        }
    }
}

/// Asks the store every now and then until it answers in time, then closes the breaker. Ends with the limiter, or with the phase.
async fn probe_until_healed(probing: Probing) {
    for attempt in 0_u32.. {
        let pause = probe_after(attempt, fastrand::f64());
        {
            let Some(shared) = probing.shared.upgrade() else { return };
            let done_after_us = (pause + 2 * deadline(shared.deadline)).as_micros() as u64;
            shared.breaker().probe_is_due_at(shared.clock.now().plus_micros(done_after_us));
        }
        sleep(pause).await;
        let Some(shared) = probing.shared.upgrade() else { return };
        if shared.breaker().phase() != probing.phase {
            return;
        }
        if is_healed(&shared).await {
            if shared.breaker().close(probing.phase) {
                shared.tell_of_healing();
            }
            return;
        }
    }
}

#[derive(PartialEq, Eq)]
enum Probed {
    InTime,
    Late,
    Failed,
}

async fn is_healed(shared: &Shared) -> bool {
    match probe(shared).await {
        Probed::Late => probe(shared).await == Probed::InTime,
        first => first == Probed::InTime,
    }
}

async fn probe(shared: &Shared) -> Probed {
    let limit: Limit = LIMIT.parse().expect("a valid limit");
    let demand = Demand::new(limit, Key::new(SUBJECT).expect("a short key"));
    let check = Check::one(&demand);
    let mut call = pin!(shared.call(Call::Probe, 1, shared.decide(std::slice::from_ref(&check))));
    // By the same measure as a decision: an answer that is there when the deadline is noticed is in time.
    let (answered, probed) = match answer_by(sleep(shared.deadline), shared.store(), call.as_mut()).await {
        Some(answered) => (answered, Probed::InTime),
        None => (call.await, Probed::Late),
    };
    match answered {
        Err(error) if !is_foreign(&error) => Probed::Failed,
        _ => probed,
    }
}
