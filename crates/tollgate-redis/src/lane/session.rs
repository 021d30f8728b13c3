//! The time with one connection: calls go out, and their replies come in the same order.
//!
//! **One call, or two.** With one call in flight the server has nothing to do while we hand out its answers and collect the
//! next questions, and we have nothing to do while it works. So when many wait, they go in two halves, the second
//! right behind the first: while one half is decided, the other is told and asks again. Fewer go together:
//! two small calls cost the server more than one, and it is idle anyway.
//!
//! **A reply belongs to the oldest call.** That holds as long as every call gets its reply from this connection. So
//! whatever casts doubt on that (silence, garbage, a broken stream) ends the session, and all calls in flight with it: whether
//! they were run, nobody knows, and their callers are told so. What the server still sends is read by nobody.
//!
//! **Asked again** is only what the server says it has not run: a call of a script that it has forgotten, which goes
//! once more with the script; and a batch in which some key holds something that is not ours, which goes in halves until
//! those who asked for that key are alone with it.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use tokio::sync::mpsc;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};
use tollgate_core::StoreErrorKind as Kind;

use super::batch::Batch;
use super::{Lane, Queue, STEPS_MAX, Work};
use crate::connection::Connection;
use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::Script;

/// Calls in flight at once: one that the server works on, and one that it finds when it has done so.
const CALLS_MAX: usize = 2;
/// So many callers are worth a call of their own behind another. Measured with 64 callers: calls of 32 beat smaller
/// ones.
const SECOND_CALL_FROM: usize = 16;

pub(super) struct Session<'a> {
    lane: &'a Lane,
    connection: Connection,
    /// Calls whose replies have not come yet, the oldest first.
    in_flight: VecDeque<InFlight>,
    /// What the server has refused to run, to be asked another way.
    again: VecDeque<(Batch, Say)>,
    /// How many callers the latest reply was for.
    answered_last: usize,
}

struct InFlight {
    batch: Batch,
    said: Say,
    until: Instant,
}

/// What the server is told of the script.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Say {
    ItsName,
    /// It has forgotten it.
    AllOfIt,
}

impl<'a> Session<'a> {
    pub(super) fn new(lane: &'a Lane, connection: Connection) -> Session<'a> {
        Session { lane, connection, in_flight: VecDeque::new(), again: VecDeque::new(), answered_last: 0 }
    }

    /// Uses the connection until it must be dropped or the queue is closed.
    pub(super) async fn serve(mut self, queue: &mut mpsc::Receiver<Work>, backlog: &mut VecDeque<Work>) -> Queue {
        // Those who wait for a second call wait outside the queue: no more of them than the queue may hold.
        let second_call_from = SECOND_CALL_FROM.min(queue.max_capacity());
        loop {
            while self.has_room()
                && backlog.len() < STEPS_MAX
                && let Ok(work) = queue.try_recv()
            {
                backlog.push_back(work);
            }
            let outcome = if let Some((batch, say)) = self.next_call(backlog, second_call_from) {
                self.send(batch, say).await
            } else if let Some(until) = self.in_flight.front().map(|oldest| oldest.until) {
                // Those who were just answered may be back soon. Were they too few for a call, each of them would wake us in vain.
                let may_make_a_call = self.has_room() && self.answered_last + backlog.len() >= second_call_from;
                tokio::select! {
                    biased;
                    reply = timeout_at(until, self.connection.receive()) => self.heard(reply.unwrap_or_else(timed_out)),
                    Some(work) = queue.recv(), if may_make_a_call => {
                        backlog.push_back(work);
                        Ok(())
                    }
                }
            } else {
                let mut arrived = Vec::new();
                tokio::select! {
                    // First: who comes when the server has just hung up waits for the next connection, and is not sent into this one.
                    biased;
                    () = self.connection.hung_up() => return Queue::Open,
                    count = queue.recv_many(&mut arrived, STEPS_MAX) => if count == 0 { return Queue::Closed },
                }
                backlog.extend(arrived);
                Ok(())
            };
            if let Err(fault) = outcome {
                self.give_up(&fault);
                return Queue::Open;
            }
        }
    }

    fn has_room(&self) -> bool {
        self.in_flight.len() < CALLS_MAX
    }

    /// What should go out now.
    fn next_call(&mut self, backlog: &mut VecDeque<Work>, second_call_from: usize) -> Option<(Batch, Say)> {
        if !self.has_room() {
            return None;
        }
        if let Some(again) = self.again.pop_front() {
            return Some(again);
        }
        if !self.in_flight.is_empty() && backlog.len() < second_call_from {
            return None;
        }
        let callers = backlog.len() + self.in_flight.iter().map(|call| call.batch.callers()).sum::<usize>();
        let are_two_calls = callers / CALLS_MAX >= second_call_from;
        let batch = Batch::next(backlog, if are_two_calls { callers.div_ceil(CALLS_MAX) } else { STEPS_MAX })?;
        self.lane.counters.decisions.fetch_add(batch.checks() as u64, Ordering::Relaxed);
        Some((batch, Say::ItsName))
    }

    /// Sends a call whose reply is for later.
    async fn send(&mut self, batch: Batch, say: Say) -> Result<(), Fault> {
        let script = match say {
            Say::ItsName => Script::Known(self.connection.script_sha()),
            Say::AllOfIt => Script::Whole(self.lane.script),
        };
        let now = self.lane.clock.as_ref().map(|clock| clock.now());
        let request = batch.request(script, now);
        let until = Instant::now() + self.lane.call_timeout;
        // The call before this one is not kept waiting by a server that takes no more.
        let sent_until = self.in_flight.front().map_or(until, |oldest| oldest.until);
        self.in_flight.push_back(InFlight { batch, said: say, until });
        self.lane.counters.calls.fetch_add(1, Ordering::Relaxed);
        timeout_at(sent_until, self.connection.send(&request)).await.unwrap_or_else(timed_out)
    }

    /// Tells those who wait for the oldest call what has come.
    fn heard(&mut self, reply: Result<Reply, Fault>) -> Result<(), Fault> {
        let Some(oldest) = self.in_flight.pop_front() else { return Ok(()) };
        self.answered_last = oldest.batch.callers();
        match reply {
            Ok(reply) => self.answered(oldest, reply)?,
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

    fn answered(&mut self, InFlight { batch, said, .. }: InFlight, reply: Reply) -> Result<(), Fault> {
        if let Reply::Error(message) = &reply
            && batch.calls_script()
        {
            if message.starts_with("NOSCRIPT") && said == Say::ItsName {
                self.lane.counters.scripts_sent.fetch_add(1, Ordering::Relaxed);
                self.again.push_back((batch, Say::AllOfIt));
                return Ok(());
            }
            if Fault::of_reply(message).kind == Kind::Foreign && batch.is_divisible() {
                let (first, second) = batch.halves();
                self.again.push_front((second, Say::ItsName));
                self.again.push_front((first, Say::ItsName));
                return Ok(());
            }
        }
        match batch.answer(reply) {
            Err(fault) if fault.ends_connection() => Err(fault),
            _ => Ok(()),
        }
    }

    /// Tells all who wait that no reply will come.
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

fn timed_out<T>(_: Elapsed) -> Result<T, Fault> {
    Err(Fault::new(Kind::TimedOut, "the server did not answer in time"))
}
