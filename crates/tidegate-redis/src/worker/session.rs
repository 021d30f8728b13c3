//! One connection in use: calls are sent, and their replies arrive in the same order.
//!
//! **When a batch is sent.** A check that finds the connection idle is sent at once. While calls are in flight, checks
//! are collected, because a call with 32 checks costs the server a third of 32 calls. They are sent together at the
//! first of these moments:
//!
//! ```text
//!   nothing is in flight       the next batch is sent at once, with everything that waits
//!   one batch is in flight     a second is sent as soon as 16 callers wait, so that the server finds it when it is done
//!   1 to 31 are in flight      the next is sent when its oldest caller has waited for 1 ms, or when it is full
//! ```
//!
//! The second line keeps a nearby server busy while the worker distributes its replies. Callers are divided between the
//! two batches, because two calls of 32 cost less than many small ones. The third line is for a distant server: a check
//! waits for its own round trip and a millisecond, as long as fewer than 32 batches are in flight. A nearby server
//! replies before the millisecond is over, so the timer has no effect.
//!
//! **A batch is one call or several.** A server that runs scripts with any keys gets one call. A node of a cluster gets
//! one call per hash slot. All of them are put into the outbox together, so they are usually sent in one write. Limits on
//! what is in flight count batches.
//!
//! **`ASKING`** makes a node execute the next command although it does not own the slot yet. It is sent right before the
//! call, also when the call is resent, and its own reply is skipped.
//!
//! **`WAIT`** makes the server reply when enough replicas have acknowledged what this connection has written. If the
//! store [requires replicas](crate::RedisStoreBuilder::replicas), it is sent after the calls of each batch, and the
//! results are held until its reply arrives. If too few replicas have acknowledged in time, the callers get an error:
//! their checks were charged, but a failover may lose the charges. Meanwhile the server executes nothing else on this
//! connection, so there is one batch per round trip to the replicas. At most two batches are then in flight, and
//! batches grow instead.
//!
//! **One timer.** It ticks every millisecond while calls are in flight. At each tick the worker takes what has come
//! into the queue, and sends it if it is due. The tick also detects calls that take too long. No timer is set per check
//! or per call, and callers do not wake the worker unless they may fill the second batch.
//!
//! **Sending and receiving at once.** Requests are put into the connection's outbox. What the socket does not take at
//! once is sent while replies are received. So a server that does not read cannot keep the worker from reading. The
//! number of batches in flight bounds the outbox, and the timeout of the oldest call bounds the wait.
//!
//! **A reply belongs to the oldest call.** That holds as long as every call gets its reply from this connection.
//! Whatever casts doubt on that (a timeout, invalid bytes, a broken stream) ends the session and all calls in flight.
//! It is unknown whether they were executed, and their callers get an error that says so. Later replies are not read.
//!
//! **A server that became a replica** (`READONLY`) must not be used any more, but the order of its replies is not in
//! doubt. So nothing more is sent, and the calls in flight get their own replies, which usually say that they were not
//! executed. Then the session ends.
//!
//! **A server that is demoted**, because the Sentinels have named another master, is treated in the same way. Work that
//! was not sent fails at once, so that it can be sent to the other server.
//!
//! **The timeout of a call** starts when the call is put into the outbox, so it includes the time that earlier calls
//! take.
//!
//! **Resent** are only calls that the server has not executed: a call of a script that the server does not have
//! cached, and a batch with a foreign key, which is resent in halves until the checks of that key are alone. Such calls
//! are resent in the order of their first attempt and before new ones, but behind the calls that were already in
//! flight.

use std::collections::VecDeque;
use std::time::Duration;

use tidegate_core::StoreErrorKind as Kind;
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use super::batch::Batch;
use super::{QueueState, STEPS_MAX, Sharing, Work, Worker, fail_unsent};
use crate::connection::Connection;
use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::Script;

/// The maximum number of batches in flight. With one each millisecond this covers a round trip of 32 ms; at a longer
/// one, batches grow instead.
const BATCHES_MAX: usize = 32;
/// With fewer batches in flight than this, the next one is sent as soon as it has [`BATCH_CALLERS_MIN`]: one that
/// the server works on, and one that it finds when it is done.
const EAGER_BATCHES_MAX: usize = 2;
/// The number of callers that are worth a second batch behind the first. Measured with 64 callers: calls of 32 beat
/// smaller ones.
const BATCH_CALLERS_MIN: usize = 16;
/// The maximum time for which a caller waits for others to share its call, while another batch may be sent.
const WAIT_MAX: Duration = Duration::from_millis(1);
/// The period of the timer. Tokio's timer counts whole milliseconds and rounds up, so it ticks every millisecond.
const TICK: Duration = Duration::from_micros(500);

/// The command `ASKING`, encoded.
const ASKING: &[u8] = b"*1\r\n$6\r\nASKING\r\n";

/// A worker's use of one connection, from the first call until the connection is dropped.
pub(super) struct Session<'a> {
    worker: &'a Worker,
    connection: Connection,
    /// Calls without a reply, the oldest first.
    in_flight: VecDeque<InFlight>,
    /// The number of batches in flight: those whose last call has no reply yet.
    batches_in_flight: usize,
    /// Executed calls with their replies, which are held until replicas have acknowledged the calls.
    held: Vec<(Call, Reply)>,
    /// Calls to be resent, which the server has not executed.
    to_resend: VecDeque<Call>,
    /// The number of callers that got the latest reply.
    callers_answered: usize,
    /// When work was last moved from the queue to the backlog.
    collected_at: Instant,
    /// The earliest time at which the oldest work in the backlog may have arrived; `None` if the backlog is empty.
    waiting_since: Option<Instant>,
    tick: Interval,
    /// The reason why nothing more is sent on this connection; `None` while it is in normal use.
    draining: Option<Fault>,
}

/// A call that is sent, or is to be sent.
struct Call {
    batch: Batch,
    script: ScriptRef,
}

impl Call {
    /// Returns whether `ASKING` is sent before it.
    fn is_asking(&self) -> bool {
        self.batch.sharing == Sharing::Asking
    }
}

struct InFlight {
    sent: Sent,
    sent_at: Instant,
    until: Instant,
    /// Whether this is the last request of its batch.
    ends_batch: bool,
    /// Whether the next reply is that to `ASKING`, and the one after it that to the call.
    awaits_asking: bool,
}

/// A request without a reply.
enum Sent {
    Call(Call),
    /// `WAIT`, for the calls before it.
    Wait,
}

impl Sent {
    fn callers(&self) -> usize {
        match self {
            Sent::Call(call) => call.batch.callers(),
            Sent::Wait => 0,
        }
    }

    fn sends_source(&self) -> bool {
        matches!(self, Sent::Call(Call { script: ScriptRef::Source, .. }))
    }
}

/// How an attempt to run a call refers to the script.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScriptRef {
    /// By its SHA-1, in the first attempt.
    Sha,
    /// By its SHA-1 in a second attempt: another call in flight has sent the source.
    ShaAgain,
    /// By its source.
    Source,
}

impl<'a> Session<'a> {
    pub(super) fn new(worker: &'a Worker, connection: Connection) -> Session<'a> {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Session {
            worker,
            connection,
            in_flight: VecDeque::new(),
            batches_in_flight: 0,
            held: Vec::new(),
            to_resend: VecDeque::new(),
            callers_answered: 0,
            collected_at: Instant::now(),
            waiting_since: None,
            tick,
            draining: None,
        }
    }

    /// Sends the work in `queue` and `backlog` until the connection must be dropped or the queue is closed.
    ///
    /// Returns `Closed` if the queue is closed and all work is done. Else returns `Open`: the connection must be
    /// dropped, calls without a reply have failed, and work that was not sent stays in `backlog` and `queue`.
    pub(super) async fn serve(mut self, queue: &mut mpsc::Receiver<Work>, backlog: &mut VecDeque<Work>) -> QueueState {
        // The backlog is outside the queue: no more callers wait there for a second batch than the queue may hold.
        let batch_callers = BATCH_CALLERS_MIN.min(queue.max_capacity());
        loop {
            self.collect(queue, backlog);
            let sent = match self.send_next(backlog, batch_callers).await {
                Ok(sent) => sent,
                Err(fault) => {
                    self.give_up(&fault);
                    return QueueState::Open;
                }
            };
            if sent {
                continue;
            }
            *self.worker.waiting.lock() = self.in_flight.front().map(|oldest| oldest.sent_at);
            let outcome = if self.in_flight.is_empty() {
                if let Some(fault) = self.draining.take().or_else(|| self.worker.is_demoted().then(Fault::demoted)) {
                    self.give_up(&fault);
                    return QueueState::Open;
                }
                let mut arrived = Vec::new();
                tokio::select! {
                    // The connection first: a check that arrives after the server has closed it must wait for the next
                    // connection.
                    biased;
                    () = self.connection.closed_or_readable() => return QueueState::Open,
                    count = queue.recv_many(&mut arrived, STEPS_MAX) => if count == 0 { return QueueState::Closed },
                }
                backlog.extend(arrived);
                Ok(())
            } else {
                // The callers that were just answered may be back soon. If they were too few for a batch, each of them
                // would wake the worker for nothing.
                let may_fill_a_batch = self.batches_in_flight < EAGER_BATCHES_MAX
                    && self.callers_answered + backlog.len() >= batch_callers
                    && self.draining.is_none()
                    && !self.worker.is_demoted();
                tokio::select! {
                    biased;
                    reply = self.connection.receive() => self.receive(reply),
                    Some(work) = queue.recv(), if may_fill_a_batch => {
                        backlog.push_back(work);
                        Ok(())
                    }
                    // The time at which the tick was due, not the current time: if this task runs late, the reply may
                    // have arrived.
                    due = self.tick.tick() => self.check_timeout(due),
                }
            };
            if let Err(fault) = outcome {
                self.give_up(&fault);
                return QueueState::Open;
            }
        }
    }

    /// Returns whether another batch may be sent.
    ///
    /// `false` if [`BATCHES_MAX`] are in flight, or [`EAGER_BATCHES_MAX`] if the store waits for replicas. Also `false`
    /// if the session is draining or the server is demoted.
    fn has_room(&self) -> bool {
        let batches_max = if self.worker.settings.replicas.is_some() { EAGER_BATCHES_MAX } else { BATCHES_MAX };
        self.batches_in_flight < batches_max && self.draining.is_none() && !self.worker.is_demoted()
    }

    /// Moves work from the queue to the backlog, until it has [`STEPS_MAX`] callers.
    ///
    /// Moves nothing if no batch may be sent. If the server is demoted, fails all work that was not sent. Also updates
    /// `collected_at` and `waiting_since`.
    fn collect(&mut self, queue: &mut mpsc::Receiver<Work>, backlog: &mut VecDeque<Work>) {
        let collected_before = std::mem::replace(&mut self.collected_at, Instant::now());
        if self.worker.is_demoted() {
            fail_unsent(queue, backlog);
            self.to_resend.drain(..).for_each(|call| call.batch.fail(&Fault::demoted()));
        }
        while self.has_room()
            && backlog.len() < STEPS_MAX
            && let Ok(work) = queue.try_recv()
        {
            backlog.push_back(work);
        }
        self.waiting_since = (!backlog.is_empty()).then(|| self.waiting_since.unwrap_or(collected_before));
    }

    /// Sends the oldest call to be resent, or else the next batch if it is due. Returns whether something was sent.
    ///
    /// Sends nothing if no batch may be sent ([`Session::has_room`]). Counts the checks of a new batch. With fewer than
    /// [`EAGER_BATCHES_MAX`] batches in flight, `batch_callers` waiting callers make a batch due.
    ///
    /// # Errors
    /// Returns a fault if the connection is broken.
    async fn send_next(&mut self, backlog: &mut VecDeque<Work>, batch_callers: usize) -> Result<bool, Fault> {
        if !self.has_room() {
            return Ok(false);
        }
        if let Some(call) = self.to_resend.pop_front() {
            self.queue(call, true);
            return self.connection.send_queued().await.map(|()| true);
        }
        let is_eager = self.batches_in_flight < EAGER_BATCHES_MAX;
        let is_full = backlog.len() >= if is_eager { batch_callers } else { STEPS_MAX };
        let is_due = self.waiting_since.is_some_and(|since| self.collected_at.duration_since(since) >= WAIT_MAX);
        if !(self.in_flight.is_empty() || is_full || is_due) {
            return Ok(false);
        }
        let callers = backlog.len() + self.in_flight.iter().map(|in_flight| in_flight.sent.callers()).sum::<usize>();
        let is_shared = is_eager && callers / EAGER_BATCHES_MAX >= batch_callers;
        let callers_max = if is_shared { callers.div_ceil(EAGER_BATCHES_MAX) } else { STEPS_MAX };
        let mut calls = Batch::next(backlog, callers_max).into_iter().peekable();
        if calls.peek().is_none() {
            return Ok(false);
        }
        while let Some(batch) = calls.next() {
            self.worker.settings.count(|stats| stats.decisions += batch.checks() as u64);
            self.queue(Call { batch, script: ScriptRef::Sha }, calls.peek().is_none());
        }
        self.connection.send_queued().await.map(|()| true)
    }

    /// Puts a call into the outbox, counts it, and records it as in flight. Sends nothing.
    ///
    /// The timeout of the call starts now. `ends_batch` tells whether it is the last call of its batch. Then `WAIT`
    /// follows if the store requires replicas, unless the batch is a command.
    fn queue(&mut self, call: Call, ends_batch: bool) {
        let name = match call.script {
            ScriptRef::Sha | ScriptRef::ShaAgain => Script::Sha(self.connection.script_sha()),
            ScriptRef::Source => Script::Source(self.worker.settings.script),
        };
        let now = self.worker.settings.clock.as_ref().map(|clock| clock.now());
        let request = call.batch.request(name, now);
        let awaits_asking = call.is_asking();
        if awaits_asking {
            self.connection.queue(ASKING);
        }
        self.connection.queue(&request);
        let sent_at = Instant::now();
        let until = sent_at + self.worker.settings.call_timeout;
        let replicas = self.worker.settings.replicas.filter(|_| call.batch.calls_script());
        let is_last = ends_batch && replicas.is_none();
        let sent = Sent::Call(call);
        self.in_flight.push_back(InFlight { sent, sent_at, until, ends_batch: is_last, awaits_asking });
        if let Some(replicas) = replicas.filter(|_| ends_batch) {
            self.connection.queue(&replicas.command());
            let sent = Sent::Wait;
            self.in_flight.push_back(InFlight { sent, sent_at, until, ends_batch, awaits_asking: false });
        }
        self.batches_in_flight += usize::from(ends_batch);
        self.worker.count_call();
    }

    fn check_timeout(&self, now: Instant) -> Result<(), Fault> {
        match self.in_flight.front() {
            Some(oldest) if oldest.until <= now => {
                let message = format!("no answer within {:?}", self.worker.settings.call_timeout);
                Err(Fault::new(Kind::TimedOut, message))
            }
            _ => Ok(()),
        }
    }

    /// Handles the reply to the oldest call in flight, or the fault with which receiving it failed.
    ///
    /// Sends the results to the callers. Instead, a call that the server has not executed may be queued to be resent. A
    /// `READONLY` reply makes the session drain.
    ///
    /// # Errors
    /// Returns a fault if the connection must be dropped: receiving failed, the reply shows that the connection's state
    /// is unknown ([`Fault::ends_connection`]), or bytes are left although no call is in flight. The callers of the
    /// oldest call have received their results or the fault, unless it is to be resent; those of other calls have not.
    fn receive(&mut self, reply: Result<Reply, Fault>) -> Result<(), Fault> {
        if let (Some(oldest), Ok(_)) = (self.in_flight.front_mut(), &reply)
            && std::mem::take(&mut oldest.awaits_asking)
        {
            // If the server rejects `ASKING`, the reply to the call says what to do.
            return Ok(());
        }
        let Some(oldest) = self.in_flight.pop_front() else { return Ok(()) };
        self.batches_in_flight -= usize::from(oldest.ends_batch);
        match (oldest.sent, reply) {
            (Sent::Call(call), Ok(reply)) if self.is_held(&call, &reply) => self.held.push((call, reply)),
            (Sent::Call(call), Ok(reply)) => {
                self.callers_answered = call.batch.callers();
                self.answer(call, reply)?;
            }
            (Sent::Wait, Ok(reply)) => self.release(&reply)?,
            (Sent::Call(call), Err(fault)) => {
                call.batch.fail(&fault);
                return Err(fault);
            }
            (Sent::Wait, Err(fault)) => return Err(fault),
        }
        if self.in_flight.is_empty() && self.connection.has_unread_bytes() {
            return Err(Fault::new(Kind::Protocol, "the server sent a reply without a request"));
        }
        Ok(())
    }

    /// Returns whether the results in a reply are held until replicas have acknowledged the call: it was executed.
    fn is_held(&self, call: &Call, reply: &Reply) -> bool {
        self.worker.settings.replicas.is_some() && call.batch.calls_script() && !matches!(reply, Reply::Error(_))
    }

    /// Handles the reply to `WAIT`: sends the held results to their callers, or an error if too few replicas have
    /// acknowledged them.
    ///
    /// # Errors
    /// Returns a fault if the reply to a call shows that the connection must be dropped.
    fn release(&mut self, reply: &Reply) -> Result<(), Fault> {
        let missing = self.worker.settings.replicas.and_then(|replicas| replicas.missing(reply));
        self.callers_answered = self.held.iter().map(|(call, _)| call.batch.callers()).sum();
        for (call, reply) in std::mem::take(&mut self.held) {
            match &missing {
                Some(fault) => call.batch.fail(fault),
                None => self.answer(call, reply)?,
            }
        }
        Ok(())
    }

    fn answer(&mut self, Call { batch, script }: Call, reply: Reply) -> Result<(), Fault> {
        if let Reply::Error(message) = &reply
            && batch.calls_script()
        {
            if message.starts_with("NOSCRIPT") && script != ScriptRef::Source {
                self.worker.settings.count(|stats| stats.scripts_sent += 1);
                // One source is enough for all calls that the server rejects at this moment: the calls in flight were
                // sent after this one.
                let source_is_sent = self.in_flight.iter().any(|other| other.sent.sends_source());
                let is_first = script == ScriptRef::Sha;
                let script = if is_first && source_is_sent { ScriptRef::ShaAgain } else { ScriptRef::Source };
                self.to_resend.push_back(Call { batch, script });
                return Ok(());
            }
            if Fault::of_reply(message).kind == Kind::Foreign && batch.is_divisible() {
                let resent = |batch| Call { batch, script: ScriptRef::Sha };
                self.to_resend.extend(batch.halves().map(resent));
                return Ok(());
            }
        }
        match batch.answer(reply) {
            Err(fault) if fault.is_read_only() => {
                self.draining.get_or_insert(fault);
                Ok(())
            }
            Err(fault) if fault.ends_connection() => Err(fault),
            _ => Ok(()),
        }
    }

    /// Fails all calls without a reply.
    ///
    /// Calls in flight may have been executed: their callers get `TimedOut` or `Interrupted`. Calls to be resent were
    /// not executed: their callers get `Unreachable`.
    fn give_up(self, fault: &Fault) {
        let in_flight = match fault.kind {
            Kind::TimedOut | Kind::Interrupted => fault.clone(),
            _ => Fault::new(Kind::Interrupted, format!("the connection was dropped during a call: {}", fault.message)),
        };
        let sent = self.in_flight.into_iter().filter_map(|oldest| match oldest.sent {
            Sent::Call(call) => Some(call),
            Sent::Wait => None,
        });
        let held = self.held.into_iter().map(|(call, _)| call);
        held.chain(sent).for_each(|call| call.batch.fail(&in_flight));
        let message = format!("the connection was dropped before the call was sent: {}", fault.message);
        let unexecuted = Fault::new(Kind::Unreachable, message);
        self.to_resend.into_iter().for_each(|call| call.batch.fail(&unexecuted));
    }
}
