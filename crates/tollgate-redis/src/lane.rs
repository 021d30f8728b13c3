//! The worker behind the store: a queue in front, one connection behind, one call in flight.
//!
//! ```text
//!   callers ──▶ queue ──▶ [ everything that waits ] ──▶ one call ──▶ answers
//!                              ▲                           │
//!                              └──────── meanwhile ────────┘
//! ```
//!
//! **Batches without a timer.** A caller who finds the lane idle goes out at once, alone. Whoever comes while a call is in
//! flight waits for it to return, and then all of them go together. The busier the store, the larger the batches:
//! nothing waits for a batch to fill, and nothing has to be tuned.
//!
//! **Order.** Within a lane, checks are decided in the order in which they came. Checks with one limit each may change
//! places with checks of other counters, which nobody can see; so the same check from many callers
//! becomes one step with a repeat count.
//!
//! **Who has left is not charged.** A caller who gave up while waiting is taken out before the call is made. One
//! who gives up during the call may have been charged.
//!
//! **The connection** is the lane's own. It is opened before it is needed, watched while idle, dropped when a
//! call fails in a way that leaves its state unknown, and opened again, at growing distances, for as long as
//! that fails. While there is none, callers are told at once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tollgate_core::{Clock, Decision, StoreErrorKind as Kind};

use crate::answer::{self, Answer};
use crate::connection::Connection;
use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::{Script, Step, encode_call};
use crate::tls::Tls;
use crate::url::Endpoint;

/// The most checks in one call: past this a call takes so long that others wait for it, and gains nothing more.
pub(crate) const STEPS_MAX: usize = 128;
/// The first pause after a failed attempt to connect; it doubles up to the last. A healed server must be in use again within
/// two seconds: an attempt that hangs (250 ms), this pause with its jitter (300 ms) and what a breaker waits before it asks
/// again (800 ms) leave half a second for the greeting and the question.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_LAST: Duration = Duration::from_millis(200);

/// Something to be done, and who waits for it.
pub(crate) enum Work {
    /// At most [`STEPS_MAX`] checks, answered together.
    Checks(Vec<Step>, oneshot::Sender<Result<Vec<Decision>, Fault>>),
    Refund(Step, oneshot::Sender<Result<(), Fault>>),
    /// A plain command, encoded.
    Command(Vec<u8>, oneshot::Sender<Result<Reply, Fault>>),
}

/// What a lane has done so far.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) calls: AtomicU64,
    pub(crate) decisions: AtomicU64,
    pub(crate) connects: AtomicU64,
    pub(crate) scripts_sent: AtomicU64,
}

pub(crate) struct Lane {
    pub(crate) endpoint: Endpoint,
    pub(crate) tls: Option<Tls>,
    pub(crate) script: &'static str,
    pub(crate) call_timeout: Duration,
    pub(crate) clock: Option<Arc<dyn Clock>>,
    pub(crate) counters: Arc<Counters>,
}

impl Lane {
    /// Serves until the queue is closed.
    pub(crate) async fn run(&self, queue: &mut mpsc::Receiver<Work>) {
        let mut backlog = VecDeque::new();
        let mut pause = PAUSE_FIRST;
        loop {
            let fault = match self.connect().await {
                Ok(connection) => {
                    let calls_before = self.counters.calls.load(Ordering::Relaxed);
                    if self.serve(connection, queue, &mut backlog).await.is_closed() {
                        return;
                    }
                    if self.counters.calls.load(Ordering::Relaxed) > calls_before {
                        pause = PAUSE_FIRST;
                        continue;
                    }
                    Fault::new(Kind::Unreachable, "the server hung up on us")
                }
                Err(fault) => fault,
            };
            backlog.drain(..).for_each(|work| refuse(work, &fault));
            // Up to half as long again, so that many nodes do not come back at the same instant.
            let jittered = pause.mul_f64(1.0 + fastrand::f64() / 2.0);
            if self.refuse_for(jittered, queue, &fault).await.is_closed() {
                return;
            }
            pause = (pause * 2).min(PAUSE_LAST);
        }
    }

    async fn connect(&self) -> Result<Connection, Fault> {
        self.counters.connects.fetch_add(1, Ordering::Relaxed);
        let opened = timeout(self.call_timeout, Connection::open(&self.endpoint, self.tls.as_ref(), self.script)).await;
        opened.unwrap_or_else(|_| Err(Fault::new(Kind::Unreachable, "the server did not greet us in time")))
    }

    /// Uses a connection until it must be dropped or the queue is closed.
    async fn serve(
        &self,
        mut connection: Connection,
        queue: &mut mpsc::Receiver<Work>,
        backlog: &mut VecDeque<Work>,
    ) -> Queue {
        loop {
            if backlog.is_empty() {
                let mut arrived = Vec::new();
                tokio::select! {
                    count = queue.recv_many(&mut arrived, STEPS_MAX) => if count == 0 { return Queue::Closed },
                    () = connection.hung_up() => return Queue::Open,
                }
                backlog.extend(arrived);
            } else {
                while let Ok(work) = queue.try_recv() {
                    backlog.push_back(work);
                    if backlog.len() >= STEPS_MAX {
                        break;
                    }
                }
            }
            if let Err(Lost) = self.turn(&mut connection, backlog).await {
                return Queue::Open;
            }
        }
    }

    /// One call for what stands at the front of the backlog.
    async fn turn(&self, connection: &mut Connection, backlog: &mut VecDeque<Work>) -> Result<(), Lost> {
        let batch = next_batch(backlog);
        match batch {
            Batch::Empty => Ok(()),
            Batch::Checks(works) => self.decide(connection, works).await,
            Batch::Refunds(works) => self.refund(connection, works).await,
            Batch::Command(request, waiter) => {
                let (reply, outcome) = match self.call(connection, &request).await {
                    Ok(Reply::Error(message)) => (Err(Fault::of_reply(&message)), Ok(())),
                    Ok(reply) => (Ok(reply), Ok(())),
                    Err(fault) => (Err(fault), Err(Lost)),
                };
                let _ = waiter.send(reply);
                outcome
            }
        }
    }

    async fn decide(&self, connection: &mut Connection, works: Vec<ChecksWork>) -> Result<(), Lost> {
        let steps: Vec<&Step> = works.iter().flat_map(|(steps, _)| steps).collect();
        let (groups, group_of) = grouped(&steps);
        self.counters.decisions.fetch_add(steps.len() as u64, Ordering::Relaxed);
        let answers = self.answers(connection, &groups).await;
        let outcome = outcome_of(&answers);

        let mut given = vec![0; groups.len()];
        let mut next_answer = group_of.into_iter().map(|group| {
            let answers = answers.as_ref().map_err(Fault::clone)?;
            let results = answers[group].as_ref().map_err(Fault::clone)?;
            given[group] += 1;
            Ok(results[given[group].min(results.len()) - 1].clone())
        });
        for (steps, waiter) in works {
            let decisions: Vec<Result<Decision, Fault>> = next_answer.by_ref().take(steps.len()).collect();
            let _ = waiter.send(joined(decisions));
        }
        outcome
    }

    async fn answers(&self, connection: &mut Connection, groups: &[(&Step, usize)]) -> Result<Vec<Answer>, Fault> {
        let reply = self.call_script(connection, "check", groups).await;
        let answers = reply.and_then(|reply| answer::of_checks(reply, groups));
        if groups.len() == 1 || !answers.as_ref().is_err_and(|fault| fault.kind == Kind::Foreign) {
            return answers;
        }
        // Deep inside one key something is wrong, and the script gave up before it wrote anything. Only the one
        // who asked for that key shall suffer.
        let mut each = Vec::with_capacity(groups.len());
        for group in groups {
            let reply = self.call_script(connection, "check", &[*group]).await?;
            match answer::of_checks(reply, &[*group]) {
                Ok(answers) => each.extend(answers),
                Err(fault) if fault.kind == Kind::Foreign => each.push(Err(fault)),
                Err(fault) => return Err(fault),
            }
        }
        Ok(each)
    }

    async fn refund(&self, connection: &mut Connection, works: Vec<RefundWork>) -> Result<(), Lost> {
        let steps: Vec<(&Step, usize)> = works.iter().map(|(step, _)| (step, 1)).collect();
        let reply = self.call_script(connection, "refund", &steps).await;
        let answers = reply.and_then(|reply| answer::of_refunds(reply, &steps));
        let outcome = outcome_of(&answers);
        for (index, (_, waiter)) in works.into_iter().enumerate() {
            let answer = answers.as_ref().map_err(Fault::clone).and_then(|answers| answers[index].clone());
            let _ = waiter.send(answer);
        }
        outcome
    }

    /// Calls the script. If the server has forgotten it, sends it along: the refusal says that nothing was run.
    async fn call_script(
        &self,
        connection: &mut Connection,
        verb: &str,
        steps: &[(&Step, usize)],
    ) -> Result<Reply, Fault> {
        let now = self.clock.as_ref().map(|clock| clock.now());
        let request = encode_call(Script::Known(connection.script_sha()), now, verb, steps);
        match self.call(connection, &request).await? {
            Reply::Error(message) if message.starts_with("NOSCRIPT") => {
                self.counters.scripts_sent.fetch_add(1, Ordering::Relaxed);
                let request = encode_call(Script::Whole(self.script), now, verb, steps);
                self.call(connection, &request).await
            }
            reply => Ok(reply),
        }
    }

    async fn call(&self, connection: &mut Connection, request: &[u8]) -> Result<Reply, Fault> {
        self.counters.calls.fetch_add(1, Ordering::Relaxed);
        let reply = timeout(self.call_timeout, connection.call(request)).await;
        reply.unwrap_or_else(|_| Err(Fault::new(Kind::TimedOut, "the server did not answer in time")))
    }

    /// Tells everyone who comes within `pause` that there is no connection.
    async fn refuse_for(&self, pause: Duration, queue: &mut mpsc::Receiver<Work>, fault: &Fault) -> Queue {
        let refuse_all = async {
            while let Some(work) = queue.recv().await {
                refuse(work, fault);
            }
        };
        match timeout(pause, refuse_all).await {
            Ok(()) => Queue::Closed,
            Err(_) => Queue::Open,
        }
    }
}

type ChecksWork = (Vec<Step>, oneshot::Sender<Result<Vec<Decision>, Fault>>);
type RefundWork = (Step, oneshot::Sender<Result<(), Fault>>);

/// The connection must not be used again.
struct Lost;

enum Queue {
    Open,
    Closed,
}

impl Queue {
    fn is_closed(&self) -> bool {
        matches!(self, Queue::Closed)
    }
}

enum Batch {
    Empty,
    Checks(Vec<ChecksWork>),
    Refunds(Vec<RefundWork>),
    Command(Vec<u8>, oneshot::Sender<Result<Reply, Fault>>),
}

/// Takes from the front what can go in one call, leaving out whoever does not wait any more.
fn next_batch(backlog: &mut VecDeque<Work>) -> Batch {
    let mut batch = Batch::Empty;
    let mut step_count = 0;
    while let Some(work) = backlog.pop_front() {
        match (work, &mut batch) {
            (Work::Checks(_, waiter), _) if waiter.is_closed() => {}
            (Work::Command(_, waiter), _) if waiter.is_closed() => {}
            // A refund is owed whether or not anybody waits for its end.
            (Work::Checks(steps, waiter), Batch::Empty) => {
                step_count = steps.len();
                batch = Batch::Checks(vec![(steps, waiter)]);
            }
            (Work::Checks(steps, waiter), Batch::Checks(works)) if step_count + steps.len() <= STEPS_MAX => {
                step_count += steps.len();
                works.push((steps, waiter));
            }
            (Work::Refund(step, waiter), Batch::Empty) => batch = Batch::Refunds(vec![(step, waiter)]),
            (Work::Refund(step, waiter), Batch::Refunds(works)) if works.len() < STEPS_MAX => {
                works.push((step, waiter))
            }
            (Work::Command(request, waiter), Batch::Empty) => return Batch::Command(request, waiter),
            (work, _) => {
                backlog.push_front(work);
                break;
            }
        }
    }
    batch
}

/// Puts equal steps together: the distinct steps with their counts, and to which of them each step belongs.
fn grouped<'a>(steps: &[&'a Step]) -> (Vec<(&'a Step, usize)>, Vec<usize>) {
    let mut order: Vec<usize> = (0..steps.len()).collect();
    if steps.iter().all(|step| step.has_one_limit()) {
        order.sort_by_key(|&index| steps[index].order());
    }
    let mut groups: Vec<(&Step, usize)> = Vec::with_capacity(steps.len());
    let mut group_of = vec![0; steps.len()];
    for index in order {
        match groups.last_mut() {
            Some((step, count)) if *step == steps[index] => *count += 1,
            _ => groups.push((steps[index], 1)),
        }
        group_of[index] = groups.len() - 1;
    }
    (groups, group_of)
}

/// One caller's decisions, or why there are none.
fn joined(decisions: Vec<Result<Decision, Fault>>) -> Result<Vec<Decision>, Fault> {
    let failed = decisions.iter().filter(|decision| decision.is_err()).count();
    if failed > 0 && failed < decisions.len() {
        // "Foreign" promises that nothing was executed, which is not so for the others.
        return Err(Fault::new(
            Kind::Protocol,
            "a key of ours holds something else; the batch's other checks were decided",
        ));
    }
    decisions.into_iter().collect()
}

fn outcome_of<T>(answers: &Result<T, Fault>) -> Result<(), Lost> {
    match answers {
        Err(fault) if fault.ends_connection() => Err(Lost),
        _ => Ok(()),
    }
}

fn refuse(work: Work, fault: &Fault) {
    let fault = fault.clone();
    match work {
        Work::Checks(_, waiter) => drop(waiter.send(Err(fault))),
        Work::Refund(_, waiter) => drop(waiter.send(Err(fault))),
        Work::Command(_, waiter) => drop(waiter.send(Err(fault))),
    }
}

#[cfg(test)]
mod tests;
