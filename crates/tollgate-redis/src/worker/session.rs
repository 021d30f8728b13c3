//! The time with one connection: calls go out, and their replies come in the same order.
//!
//! **When a call leaves.** A check that finds the connection idle leaves at once. While calls are in flight, checks are collected, because a
//! batch of 32 costs the server a third of 32 calls. They leave together at the first of these moments:
//!
//! ```text
//!   nothing is in flight     the next call leaves at once, with everything that waits
//!   one call is in flight    a second leaves as soon as 16 callers wait: the server finds it when it has done the first
//!   1 to 31 are in flight    the next leaves when its oldest caller has waited for 1 ms, or when it is full
//! ```
//!
//! The second line keeps a near server busy while we distribute its answers. Callers are shared between the two calls, since two of 32
//! cost less than many small ones. The third line is for a server that is far away. Its replies are not waited for, so a check pays
//! its own round trip and a millisecond, however long the round trip is. With a near server the reply comes before the millisecond is over, and
//! the timer has no effect.
//!
//! **One timer.** It ticks every millisecond while calls are in flight. At each tick the worker takes what has come into the queue, and sends it if it is
//! due; the tick also ends calls that take too long. No timer is set per check or per call, and callers do not wake the worker unless they may
//! fill the second call.
//!
//! **Sending and receiving at once.** Requests are put into the connection's outbox. What the socket does not take at once is sent while replies are received. A server that
//! does not read cannot keep us from reading. The number of calls in flight bounds the outbox, and the oldest call's time bounds the wait.
//!
//! **A reply belongs to the oldest call.** That holds as long as every call gets its reply from this connection. So
//! whatever casts doubt on that (silence, garbage, a broken stream) ends the session, and all calls in flight with it. It is unknown whether
//! they were run; their callers get an error that says so. What the server still sends is not read.
//!
//! **Time for a call** counts from when it is put into the outbox, so it includes the time behind the calls before it.
//!
//! **Sent again** is only what the server says it has not run: a call of a script that it has forgotten; and a batch in which some key
//! holds something that is not ours, which goes in halves until the checks of that key are alone. Such calls go in the order of
//! their first attempt and before new ones, but behind the calls that were already in flight.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};
use tollgate_core::StoreErrorKind as Kind;

use super::batch::Batch;
use super::{QueueState, STEPS_MAX, Work, Worker};
use crate::connection::Connection;
use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::Script;

/// Calls in flight at once. With a call each millisecond this covers a round trip of 32 ms; farther away, batches grow instead.
const CALLS_MAX: usize = 32;
/// Up to so many calls in flight, one leaves as soon as it has [`CALLERS_WORTH_A_CALL`]: one that the server works on, and one that it
/// finds when it has done so.
const EAGER_CALLS_MAX: usize = 2;
/// So many callers are worth a second call behind the first. Measured with 64 callers: calls of 32 beat smaller ones.
const CALLERS_WORTH_A_CALL: usize = 16;
/// No caller waits longer for others to share its call, while there is room for one more call.
const WAIT_MAX: Duration = Duration::from_millis(1);
/// Tokio's timer counts whole milliseconds and rounds up: this ticks every millisecond.
const TICK: Duration = Duration::from_micros(500);

pub(super) struct Session<'a> {
    lane: &'a Worker,
    connection: Connection,
    /// Calls whose replies have not come yet, the oldest first.
    in_flight: VecDeque<InFlight>,
    /// What the server has refused to run, to be sent again.
    again: VecDeque<(Batch, ScriptRef)>,
    /// How many callers the latest reply was for.
    answered_last: usize,
    /// When the queue was last emptied. Whatever is found in it came later.
    looked_at: Instant,
    /// Since when the oldest caller in the backlog may have waited.
    waiting_since: Option<Instant>,
    tick: Interval,
}

struct InFlight {
    batch: Batch,
    script: ScriptRef,
    until: Instant,
}

/// How a call names the script.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScriptRef {
    Sha,
    /// By its hash once more, because a call with the source went out in the meantime.
    ShaAgain,
    Source,
}

impl<'a> Session<'a> {
    pub(super) fn new(lane: &'a Worker, connection: Connection) -> Session<'a> {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Session {
            lane,
            connection,
            in_flight: VecDeque::new(),
            again: VecDeque::new(),
            answered_last: 0,
            looked_at: Instant::now(),
            waiting_since: None,
            tick,
        }
    }

    /// Uses the connection until it must be dropped or the queue is closed.
    pub(super) async fn serve(mut self, queue: &mut mpsc::Receiver<Work>, backlog: &mut VecDeque<Work>) -> QueueState {
        // The backlog is outside the queue: no more callers wait there for a second call than the queue may hold.
        let worth_a_call = CALLERS_WORTH_A_CALL.min(queue.max_capacity());
        loop {
            self.collect(queue, backlog);
            if let Some((batch, script)) = self.next_call(backlog, worth_a_call) {
                if let Err(fault) = self.send(batch, script).await {
                    self.give_up(&fault);
                    return QueueState::Open;
                }
                continue;
            }
            let outcome = if self.in_flight.is_empty() {
                let mut arrived = Vec::new();
                tokio::select! {
                    // First: who comes when the server has just hung up waits for the next connection, and is not sent into this one.
                    biased;
                    () = self.connection.hung_up() => return QueueState::Open,
                    count = queue.recv_many(&mut arrived, STEPS_MAX) => if count == 0 { return QueueState::Closed },
                }
                backlog.extend(arrived);
                Ok(())
            } else {
                // The callers that were just answered may be back soon. Were they too few for a call, each of them would wake us in vain.
                let may_fill_a_call =
                    self.in_flight.len() < EAGER_CALLS_MAX && self.answered_last + backlog.len() >= worth_a_call;
                tokio::select! {
                    biased;
                    reply = self.connection.receive() => self.receive(reply),
                    Some(work) = queue.recv(), if may_fill_a_call => {
                        backlog.push_back(work);
                        Ok(())
                    }
                    // By when it was due, not by when we got to run: if we are late, the reply may be here already.
                    due = self.tick.tick() => self.check_timeout(due),
                }
            };
            if let Err(fault) = outcome {
                self.give_up(&fault);
                return QueueState::Open;
            }
        }
    }

    fn has_room(&self) -> bool {
        self.in_flight.len() < CALLS_MAX
    }

    /// Moves what has come from the queue to the backlog, if a call could leave with it.
    fn collect(&mut self, queue: &mut mpsc::Receiver<Work>, backlog: &mut VecDeque<Work>) {
        let looked_before = std::mem::replace(&mut self.looked_at, Instant::now());
        while self.has_room()
            && backlog.len() < STEPS_MAX
            && let Ok(work) = queue.try_recv()
        {
            backlog.push_back(work);
        }
        self.waiting_since = (!backlog.is_empty()).then(|| self.waiting_since.unwrap_or(looked_before));
    }

    /// Returns the call that should leave now, if any.
    fn next_call(&mut self, backlog: &mut VecDeque<Work>, worth_a_call: usize) -> Option<(Batch, ScriptRef)> {
        if !self.has_room() {
            return None;
        }
        if let Some(again) = self.again.pop_front() {
            return Some(again);
        }
        let is_eager = self.in_flight.len() < EAGER_CALLS_MAX;
        let is_full = backlog.len() >= if is_eager { worth_a_call } else { STEPS_MAX };
        let is_due = self.waiting_since.is_some_and(|since| self.looked_at.duration_since(since) >= WAIT_MAX);
        if !(self.in_flight.is_empty() || is_full || is_due) {
            return None;
        }
        let callers = backlog.len() + self.in_flight.iter().map(|call| call.batch.callers()).sum::<usize>();
        let is_shared = is_eager && callers / EAGER_CALLS_MAX >= worth_a_call;
        let batch = Batch::next(backlog, if is_shared { callers.div_ceil(EAGER_CALLS_MAX) } else { STEPS_MAX })?;
        self.lane.counters.decisions.fetch_add(batch.checks() as u64, Ordering::Relaxed);
        Some((batch, ScriptRef::Sha))
    }

    /// Sends a call, without waiting for a server that does not read: what it does not take now is sent while replies are received.
    async fn send(&mut self, batch: Batch, script: ScriptRef) -> Result<(), Fault> {
        let name = match script {
            ScriptRef::Sha | ScriptRef::ShaAgain => Script::Known(self.connection.script_sha()),
            ScriptRef::Source => Script::Whole(self.lane.script),
        };
        let now = self.lane.clock.as_ref().map(|clock| clock.now());
        let request = batch.request(name, now);
        let until = Instant::now() + self.lane.call_timeout;
        self.in_flight.push_back(InFlight { batch, script, until });
        self.lane.counters.calls.fetch_add(1, Ordering::Relaxed);
        self.connection.send(&request).await
    }

    fn check_timeout(&self, now: Instant) -> Result<(), Fault> {
        match self.in_flight.front() {
            Some(oldest) if oldest.until <= now => Err(Fault::new(Kind::TimedOut, "the server did not answer in time")),
            _ => Ok(()),
        }
    }

    /// Gives the callers of the oldest call what was received.
    fn receive(&mut self, reply: Result<Reply, Fault>) -> Result<(), Fault> {
        let Some(oldest) = self.in_flight.pop_front() else { return Ok(()) };
        self.answered_last = oldest.batch.callers();
        match reply {
            Ok(reply) => self.answer(oldest, reply)?,
            Err(fault) => {
                oldest.batch.refuse(&fault);
                return Err(fault);
            }
        }
        if self.in_flight.is_empty() && self.connection.has_said_more() {
            return Err(Fault::new(Kind::Protocol, "the server answers what nobody asked"));
        }
        Ok(())
    }

    fn answer(&mut self, InFlight { batch, script, .. }: InFlight, reply: Reply) -> Result<(), Fault> {
        if let Reply::Error(message) = &reply
            && batch.calls_script()
        {
            if message.starts_with("NOSCRIPT") && script != ScriptRef::Source {
                self.lane.counters.scripts_sent.fetch_add(1, Ordering::Relaxed);
                // One source is enough for all calls that the server refuses at this moment; whatever is in flight is behind this one.
                let source_is_sent = self.in_flight.iter().any(|call| call.script == ScriptRef::Source);
                let is_first = script == ScriptRef::Sha;
                let script = if is_first && source_is_sent { ScriptRef::ShaAgain } else { ScriptRef::Source };
                self.again.push_back((batch, script));
                return Ok(());
            }
            if Fault::of_reply(message).kind == Kind::Foreign && batch.is_divisible() {
                let (first, second) = batch.halves();
                self.again.push_back((first, ScriptRef::Sha));
                self.again.push_back((second, ScriptRef::Sha));
                return Ok(());
            }
        }
        match batch.answer(reply) {
            Err(fault) if fault.ends_connection() => Err(fault),
            _ => Ok(()),
        }
    }

    /// Tells all callers that no reply will come.
    fn give_up(self, fault: &Fault) {
        let in_flight = match fault.kind {
            Kind::TimedOut => fault.clone(),
            _ => Fault::new(Kind::Interrupted, "the connection was given up during a call"),
        };
        self.in_flight.into_iter().for_each(|call| call.batch.refuse(&in_flight));
        let unexecuted = Fault::new(Kind::Unreachable, "the connection was given up before the call");
        self.again.into_iter().for_each(|(batch, _)| batch.refuse(&unexecuted));
    }
}
