//! The deadlines of responses in progress, and the task that ends those whose deadline has passed.
//!
//! **Problem.** hyper polls the body of a response only when the client accepts more of it. A client that never does,
//! such as an HTTP/2 stream whose window is zero, stops every timer inside the body. The request would hold its slot at
//! the upstream, and its memory, for as long as the client likes.
//!
//! **Idea.** The deadline of each response is an atomic number in a table. The body moves it when something happens, and
//! one task looks at all of them every [`SWEEP`]. It ends a response whose deadline has passed from the outside:
//!
//! | protocol | how a response is ended |
//! |---|---|
//! | HTTP/1.1 | its connection is dropped |
//! | HTTP/2 | the task that hyper runs for its stream is aborted, which resets the stream; the connection continues |
//!
//! Either drops the body, and with it the slot and the connection to the upstream.
//!
//! A deadline is the earlier of two times: the end of the total time, and the end of the current wait. The body waits
//! either for the upstream, for at most the idle time, or for the client, for at most its [`Allowance`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::connection::Signal;
use crate::metrics::{UpstreamFailure, UpstreamStats};

/// The interval at which deadlines are checked. A response ends at most this long after its deadline.
const SWEEP: Duration = Duration::from_millis(250);
/// The deadline of a response that has been ended.
const ENDED: u64 = u64::MAX;

/// The time that a client may still take to send or to accept a body.
///
/// It begins with the maximum. Waiting for the client uses it up, and each byte that is transferred gives time back: as
/// much as the byte takes at the minimum rate, up to the maximum. So a client may pause for the maximum, but cannot be
/// slower than the minimum rate for longer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowance {
    left: Duration,
    max: Duration,
    /// The minimum rate, in bytes per second. With 0, any byte gives back the maximum.
    rate_min: u32,
}

impl Allowance {
    pub(super) fn new(max: Duration, rate_min: u32) -> Allowance {
        Allowance { left: max, max, rate_min }
    }

    /// Returns how long the client may take from now.
    pub(super) fn left(&self) -> Duration {
        self.left
    }

    /// Sets the time that is left after a wait for the client.
    pub(super) fn set_left(&mut self, left: Duration) {
        self.left = left;
    }

    /// Gives back the time for `bytes` bytes that were transferred.
    pub(super) fn transferred(&mut self, bytes: usize) {
        if bytes > 0 {
            let time = match self.rate_min {
                0 => self.max,
                rate => Duration::from_secs_f64(bytes as f64 / f64::from(rate)),
            };
            self.left = self.left.saturating_add(time).min(self.max);
        }
    }
}

/// Ends a response from the outside.
pub(super) enum EndResponse {
    /// Drops the connection if this is still its current request. The number counts the requests of the connection.
    Connection(UnboundedSender<Signal>, u64),
    /// Aborts the task of the stream. The handle is set as soon as the task has been spawned.
    Stream(Arc<OnceLock<AbortHandle>>),
}

impl EndResponse {
    /// Returns false if the response cannot be ended yet.
    fn run(&self) -> bool {
        match self {
            EndResponse::Connection(signals, request) => {
                let _ = signals.send(Signal::Expired(*request));
                true
            }
            EndResponse::Stream(task) => task.get().map(AbortHandle::abort).is_some(),
        }
    }
}

/// The deadlines of all responses in progress.
pub(super) struct Deadlines {
    epoch: Instant,
    next_id: AtomicU64,
    table: Mutex<HashMap<u64, Arc<Entry>>>,
}

struct Entry {
    /// In milliseconds since the epoch of the table, or [`ENDED`].
    at_ms: AtomicU64,
    waits_for_client: AtomicBool,
    end: EndResponse,
    /// Counts the response if it is ended. `None` if it does not come from an upstream.
    stats: Option<Arc<UpstreamStats>>,
}

impl Deadlines {
    /// Creates an empty table and starts the task that ends responses, which runs until the table is dropped.
    pub(super) fn start() -> Arc<Deadlines> {
        let table = Arc::new(Deadlines { epoch: Instant::now(), next_id: AtomicU64::new(0), table: Mutex::default() });
        tokio::spawn(sweep_periodically(Arc::downgrade(&table)));
        table
    }

    /// Adds a response, which is waiting for its upstream, and must be complete at `total`.
    pub(super) fn add(
        self: &Arc<Self>,
        limits: ResponseLimits,
        end: EndResponse,
        stats: Option<Arc<UpstreamStats>>,
    ) -> Deadline {
        let (id, now) = (self.next_id.fetch_add(1, Ordering::Relaxed), Instant::now());
        let entry = Arc::new(Entry { at_ms: AtomicU64::new(0), waits_for_client: AtomicBool::new(false), end, stats });
        let ResponseLimits { total, idle, rate_min } = limits;
        let allowance = Allowance::new(idle, rate_min);
        let deadline =
            Deadline { id, table: self.clone(), entry: entry.clone(), total, idle, allowance, wait_end: None };
        deadline.set(now + idle);
        self.table.lock().insert(id, entry);
        deadline
    }

    /// Ends the responses whose deadline has passed.
    fn sweep(&self) {
        let now_ms = self.ms(Instant::now());
        let expired: Vec<Arc<Entry>> = {
            let table = self.table.lock();
            table.values().filter(|entry| entry.at_ms.load(Ordering::Relaxed) <= now_ms).cloned().collect()
        };
        for entry in expired {
            if entry.end.run() {
                entry.at_ms.store(ENDED, Ordering::Relaxed);
                let waits_for_client = entry.waits_for_client.load(Ordering::Relaxed);
                let failure = if waits_for_client { UpstreamFailure::SlowClient } else { UpstreamFailure::Timeout };
                entry.stats.iter().for_each(|stats| stats.count_error(failure));
            }
        }
    }

    fn ms(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.epoch).as_millis()).unwrap_or(ENDED - 1)
    }
}

async fn sweep_periodically(table: Weak<Deadlines>) {
    let mut ticks = tokio::time::interval(SWEEP);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(table) = table.upgrade() else { return };
        table.sweep();
    }
}

/// The limits of one response.
#[derive(Clone, Copy)]
pub(super) struct ResponseLimits {
    /// The time at which it must be complete, or `None` if there is no such time.
    pub(super) total: Option<Instant>,
    /// The longest wait for the upstream, and the maximum [`Allowance`] of the client.
    pub(super) idle: Duration,
    /// The minimum rate of the client, in bytes per second.
    pub(super) rate_min: u32,
}

/// The deadline of one response. It is removed from the table when it is dropped.
pub(super) struct Deadline {
    id: u64,
    table: Arc<Deadlines>,
    entry: Arc<Entry>,
    total: Option<Instant>,
    idle: Duration,
    allowance: Allowance,
    /// The end of the current wait for the client, or `None` if the response is not waiting for it.
    wait_end: Option<Instant>,
}

impl Deadline {
    /// Begins a wait for the client, which was given `bytes` bytes.
    pub(super) fn wait_for_client(&mut self, bytes: usize) {
        self.allowance.transferred(bytes);
        let end = Instant::now() + self.allowance.left();
        self.wait_end = Some(end);
        self.entry.waits_for_client.store(true, Ordering::Relaxed);
        self.set(end);
    }

    /// Ends the wait for the client, which wants more.
    pub(super) fn client_is_ready(&mut self) {
        if let Some(end) = self.wait_end.take() {
            self.allowance.set_left(end.saturating_duration_since(Instant::now()));
        }
    }

    /// Begins a wait for the upstream, unless one has begun.
    pub(super) fn wait_for_upstream(&self) {
        if self.entry.waits_for_client.swap(false, Ordering::Relaxed) {
            self.set(Instant::now() + self.idle);
        }
    }

    fn set(&self, end_of_wait: Instant) {
        let end = self.total.map_or(end_of_wait, |total| total.min(end_of_wait));
        self.entry.at_ms.store(self.table.ms(end), Ordering::Relaxed);
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        self.table.table.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_allowance_is_used_up_by_waiting_and_given_back_by_bytes() {
        let mut allowance = Allowance::new(10 * SECOND, 100);
        allowance.transferred(1_000_000);
        assert_eq!(allowance.left(), 10 * SECOND, "no more than the maximum");
        allowance.set_left(SECOND);
        allowance.transferred(0);
        assert_eq!(allowance.left(), SECOND);
        allowance.transferred(50);
        assert_eq!(allowance.left(), SECOND + SECOND / 2);
        let mut without_rate = Allowance::new(10 * SECOND, 0);
        without_rate.set_left(SECOND);
        without_rate.transferred(0);
        assert_eq!(without_rate.left(), SECOND);
        without_rate.transferred(1);
        assert_eq!(without_rate.left(), 10 * SECOND);
    }

    /// A response with these limits, and the messages that would end it.
    fn response(
        table: &Arc<Deadlines>,
        limits: ResponseLimits,
    ) -> (Deadline, tokio::sync::mpsc::UnboundedReceiver<Signal>) {
        let (sender, ended) = tokio::sync::mpsc::unbounded_channel();
        (table.add(limits, EndResponse::Connection(sender, 1), None), ended)
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_is_ended_if_it_waits_for_too_long() {
        let table = Deadlines::start();
        let limits = ResponseLimits { total: None, idle: 10 * SECOND, rate_min: 100 };
        let (mut deadline, mut ended) = response(&table, limits);
        for _ in 0..5 {
            // The upstream is slow, the client is not.
            tokio::time::sleep(9 * SECOND).await;
            deadline.wait_for_client(1);
            deadline.client_is_ready();
            deadline.wait_for_upstream();
        }
        assert!(ended.try_recv().is_err());
        deadline.wait_for_client(1);
        tokio::time::sleep(9 * SECOND).await;
        deadline.client_is_ready();
        deadline.wait_for_client(100);
        tokio::time::sleep(SECOND).await;
        assert!(ended.try_recv().is_err(), "two seconds were left");
        tokio::time::sleep(2 * SECOND).await;
        assert!(matches!(ended.try_recv(), Ok(Signal::Expired(1))));
        tokio::time::sleep(20 * SECOND).await;
        assert!(ended.try_recv().is_err(), "it is ended once");
        drop(deadline);
        assert!(table.table.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_is_ended_when_its_total_time_is_over() {
        let table = Deadlines::start();
        let total = Some(Instant::now() + 5 * SECOND);
        let (mut deadline, mut ended) = response(&table, ResponseLimits { total, idle: 3 * SECOND, rate_min: 0 });
        for _ in 0..6 {
            assert!(ended.try_recv().is_err());
            deadline.wait_for_client(1);
            deadline.client_is_ready();
            tokio::time::sleep(SECOND).await;
        }
        assert!(matches!(ended.try_recv(), Ok(Signal::Expired(1))));
    }
}
