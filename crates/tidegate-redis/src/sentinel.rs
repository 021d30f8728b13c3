//! Finds the master through Sentinels, and follows failovers.
//!
//! ```text
//!   Sentinel ◀── ask, subscribe ── follower (a task) ──┐
//!   Sentinel ◀── ask, subscribe ── follower            ├──▶ answers: address, epoch ──▶ master: a node
//!   Sentinel ◀── ask, subscribe ── follower ───────────┘                                  ▲
//!                                     ▲                                                   │
//!                                     └── READONLY, connection lost ◀── its worker ◀── checks
//! ```
//!
//! **One follower per Sentinel.** It keeps one connection, on which it asks for the master and then subscribes to
//! `+switch-master`. It asks again when a message arrives, when the store requests it, and every 10 s. To ask, it
//! unsubscribes, asks and subscribes in one write, so it misses no message.
//!
//! **The address of the master** is the answer to `SENTINEL GET-MASTER-ADDR-BY-NAME` with the highest configuration
//! epoch, which `SENTINEL MASTER` returns. Each failover has a higher epoch than the one before. The Sentinel that
//! leads a failover knows the new master up to two seconds before the others. Without the epoch, the answer of a
//! Sentinel that does not know it yet would make the store return to the old master. For this reason a message is not
//! used by itself: it has no epoch, and a Sentinel that was cut off may send an old one. The answer of a Sentinel that
//! fails stays in use for 10 s, until the others have learned of it, or have agreed on another master.
//!
//! **A failover.** A new master is a new node: a queue, a worker and a connection. The old node is demoted: nothing more
//! is sent on its connection. Calls in flight get their replies. Work that was not sent fails as not executed, and the
//! router sends it to the new master. If a server reports that it is a replica (`ROLE`, or a `READONLY` reply), the
//! store asks all Sentinels at once.
//!
//! **Sentinels that join or fail.** Those in the URL are asked at the start, and `SENTINEL SENTINELS` names the others.
//! One Sentinel that answers is enough. Without any, the last known master stays in use. A Sentinel that is not in the
//! URL and has failed for a minute is forgotten.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::RwLock;
use tidegate_core::{ShardId, StoreErrorKind as Kind};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use self::answer::MasterAnswer;
use crate::connection::Connection;
use crate::fault::Fault;
use crate::node::Node;
use crate::reply::Reply;
use crate::request::push_command;
use crate::router::{Attempt, Topology, TopologyFuture};
use crate::url::{Endpoint, StoreAddress};
use crate::worker::{ServerKind, WorkerSettings};

pub(crate) mod answer;

/// The channel on which a Sentinel announces a new master.
const SWITCH_MASTER: &str = "+switch-master";
/// The time between two requests to a Sentinel if nothing suggests a change. They also detect a dead connection.
const ASK_EVERY: Duration = Duration::from_secs(10);
/// The pause after a Sentinel has failed for the first time. It doubles up to [`PAUSE_LAST`].
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_LAST: Duration = Duration::from_secs(1);
/// How much longer than the timeout of a call a caller waits for the Sentinels. An attempt to connect that begins after
/// [`PAUSE_FIRST`] and times out ends within this time, so the caller gets its error, and not only that there is no
/// answer yet.
const WAIT_MARGIN: Duration = Duration::from_millis(100);
/// How long the answer of a Sentinel that fails stays in use. The other Sentinels learn of a failover within 2 s.
const ANSWER_KEPT: Duration = Duration::from_secs(10);
/// How long a Sentinel that is not in the URL may fail before it is forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);
/// The maximum number of Sentinels, unless the URL has more.
const SENTINELS_MAX: usize = 16;

/// The Sentinels of a store, and the master that they name.
pub(crate) struct Sentinels {
    /// The name under which the Sentinels know the master.
    name: String,
    /// The database, credentials and TLS setting of the master.
    server: Endpoint,
    settings: Arc<WorkerSettings>,
    runtime: Handle,
    state: RwLock<State>,
    /// The number of the latest request to ask all Sentinels; at least 1. Dropping it ends the followers.
    requests: watch::Sender<u64>,
    /// The number of answers and failures of Sentinels so far.
    outcomes: watch::Sender<u64>,
}

struct State {
    /// The known Sentinels, those of the URL first.
    sentinels: Vec<Sentinel>,
    /// The node of the master; `None` until a Sentinel has named one.
    master: Option<Arc<Node>>,
    /// The number of nodes created so far.
    last_id: u32,
}

/// A Sentinel that is followed.
struct Sentinel {
    endpoint: Endpoint,
    is_in_url: bool,
    /// The latest request for which its answer or failure is known.
    request: u64,
    /// Its latest answer, and when it arrived.
    answer: Option<(MasterAnswer, Instant)>,
    /// Why it failed, and since when it has been failing; `None` if it has answered.
    fault: Option<(Fault, Instant)>,
}

impl Sentinels {
    /// Spawns the followers of the Sentinels in the URL, which connect now. Does not wait for them.
    pub(crate) fn spawn(address: &StoreAddress, settings: Arc<WorkerSettings>, runtime: Handle) -> Arc<Sentinels> {
        let mut sentinels: Vec<Sentinel> = Vec::new();
        for endpoint in address.endpoints() {
            if sentinels.iter().all(|known| known.endpoint.address() != endpoint.address()) {
                sentinels.push(Sentinel { endpoint, is_in_url: true, request: 0, answer: None, fault: None });
            }
        }
        let endpoints: Vec<Endpoint> = sentinels.iter().map(|sentinel| sentinel.endpoint.clone()).collect();
        let state = RwLock::new(State { sentinels, master: None, last_id: 0 });
        let (requests, outcomes) = (watch::Sender::new(1), watch::Sender::new(0));
        let (name, server) = (address.master.clone(), address.server.clone());
        let sentinels = Sentinels { name, server, settings, runtime, state, requests, outcomes };
        let sentinels = Arc::new(sentinels);
        endpoints.into_iter().for_each(|endpoint| sentinels.spawn_follower(endpoint));
        sentinels.spawn_listener();
        sentinels
    }

    fn spawn_follower(self: &Arc<Self>, endpoint: Endpoint) {
        let (weak, requests, settings) = (Arc::downgrade(self), self.requests.subscribe(), self.settings.clone());
        let mut follower = Follower { sentinels: weak, name: self.name.clone(), endpoint, requests, settings };
        self.runtime.spawn(async move {
            while AssertUnwindSafe(follower.run()).catch_unwind().await.is_err() {
                follower.settings.count(|stats| stats.panics += 1);
            }
        });
    }

    /// Spawns the task that asks all Sentinels when a worker requests it: its connection was lost or cannot be opened.
    fn spawn_listener(self: &Arc<Self>) {
        let (weak, settings) = (Arc::downgrade(self), self.settings.clone());
        self.runtime.spawn(async move {
            loop {
                settings.refresh_wanted.notified().await;
                let Some(sentinels) = weak.upgrade() else { return };
                sentinels.ask();
            }
        });
    }

    /// Returns the node of the master, or `None` if no Sentinel has named one yet.
    fn known_master(&self) -> Option<Arc<Node>> {
        self.state.read().master.clone()
    }

    /// Makes all followers ask their Sentinels. Returns the number of the request.
    fn ask(&self) -> u64 {
        let mut number = 0;
        self.requests.send_modify(|request| {
            *request += 1;
            number = *request;
        });
        number
    }

    /// Waits until a Sentinel has answered this request or a later one. Returns `false` if all have failed, or none has
    /// answered within the timeout of a call and [`WAIT_MARGIN`].
    async fn wait_for(&self, request: u64) -> bool {
        let mut outcomes = self.outcomes.subscribe();
        let is_answered =
            |sentinel: &Sentinel| sentinel.request >= request && sentinel.answer.is_some() && sentinel.fault.is_none();
        let wait = async {
            loop {
                outcomes.mark_unchanged();
                let (has_answer, is_over) = {
                    let sentinels = &self.state.read().sentinels;
                    (sentinels.iter().any(is_answered), sentinels.iter().all(|sentinel| sentinel.request >= request))
                };
                // An error would mean that the sender was dropped, but `self` holds it.
                if has_answer || is_over || outcomes.changed().await.is_err() {
                    return has_answer;
                }
            }
        };
        timeout(self.settings.call_timeout + WAIT_MARGIN, wait).await.unwrap_or(false)
    }

    /// Returns a fault with the reasons of all Sentinels. For one that has not failed, the reason is that it has not
    /// answered yet.
    fn fault(&self) -> Fault {
        let sentinels = &self.state.read().sentinels;
        let reason = |sentinel: &Sentinel| {
            let reason = sentinel.fault.as_ref().map_or("no answer yet".into(), |(fault, _)| fault.message.clone());
            format!("Sentinel {}: {reason}", sentinel.endpoint.address())
        };
        let message = sentinels.iter().map(reason).collect::<Vec<_>>().join("; ");
        let kinds: Option<Vec<Kind>> =
            sentinels.iter().map(|sentinel| sentinel.fault.as_ref().map(|(fault, _)| fault.kind)).collect();
        // One that cannot be reached may name the master later.
        let lasting = kinds.filter(|kinds| !kinds.contains(&Kind::Unreachable));
        Fault::new(lasting.and_then(|kinds| kinds.last().copied()).unwrap_or(Kind::Unreachable), message)
    }

    /// Records the answer of a Sentinel, follows the Sentinels that it names, and switches to another master if needed.
    ///
    /// Returns `false` if the Sentinel has been forgotten.
    fn answered(self: &Arc<Self>, from: &Endpoint, request: u64, answer: MasterAnswer) -> bool {
        let mut new = Vec::new();
        let record = |state: &mut State| {
            let others = answer.others.clone();
            let Some(sentinel) = state.sentinels.iter_mut().find(|known| known.endpoint == *from) else { return false };
            sentinel.request = sentinel.request.max(request);
            sentinel.answer = Some((answer, Instant::now()));
            sentinel.fault = None;
            for (host, port) in others {
                let endpoint = from.at(&host, port);
                let is_new = state.sentinels.iter().all(|known| known.endpoint != endpoint);
                if is_new && state.sentinels.len() < SENTINELS_MAX {
                    new.push(endpoint.clone());
                    // No earlier request waits for it.
                    let sentinel = Sentinel { endpoint, is_in_url: false, request, answer: None, fault: None };
                    state.sentinels.push(sentinel);
                }
            }
            self.choose_master(state);
            true
        };
        let is_known = record(&mut self.state.write());
        new.into_iter().for_each(|endpoint| self.spawn_follower(endpoint));
        self.outcomes.send_modify(|count| *count += 1);
        is_known
    }

    /// Records the failure of a Sentinel. Returns `false` if the Sentinel has been forgotten.
    fn failed(&self, from: &Endpoint, request: u64, fault: Fault) -> bool {
        let now = Instant::now();
        let record = |state: &mut State| {
            let Some(index) = state.sentinels.iter().position(|known| known.endpoint == *from) else { return false };
            let sentinel = &mut state.sentinels[index];
            sentinel.request = sentinel.request.max(request);
            let since = sentinel.fault.as_ref().map_or(now, |(_, since)| *since);
            sentinel.fault = Some((fault, since));
            let is_kept = sentinel.is_in_url || now.duration_since(since) < FORGOTTEN_AFTER;
            if !is_kept {
                state.sentinels.remove(index);
            }
            self.choose_master(state);
            is_kept
        };
        let is_known = record(&mut self.state.write());
        self.outcomes.send_modify(|count| *count += 1);
        is_known
    }

    /// Uses the master in the answer with the highest epoch. If it is not the current one, demotes the current one.
    fn choose_master(&self, state: &mut State) {
        let current = state.master.as_ref().map(|node| (node.endpoint.host.clone(), node.endpoint.port));
        let is_valid = |sentinel: &&Sentinel| match (&sentinel.answer, &sentinel.fault) {
            (Some((_, at)), Some(_)) => at.elapsed() < ANSWER_KEPT,
            _ => true,
        };
        let answers = state.sentinels.iter().filter(is_valid).filter_map(|sentinel| sentinel.answer.as_ref());
        // Among equal epochs, the current master is preferred.
        let best = answers.max_by_key(|(answer, _)| (answer.epoch, current.as_ref() == Some(&answer.master)));
        let Some((MasterAnswer { master: (host, port), .. }, _)) = best else { return };
        if current.is_some_and(|current| current == (host.clone(), *port)) {
            return;
        }
        state.last_id = state.last_id.wrapping_add(1);
        let (id, endpoint) = (ShardId::new(state.last_id), self.server.at(host, *port));
        let node = Node::spawn(id, endpoint, self.settings.clone(), &self.runtime);
        if let Some(old) = state.master.replace(node.clone()) {
            old.demote();
            self.settings.count(|stats| stats.failovers += 1);
            tracing::info!(old = %old.endpoint, new = %node.endpoint, "the Sentinels have named another master");
        }
    }
}

impl Topology for Sentinels {
    fn known_owner(&self, _slot: u16) -> Option<Arc<Node>> {
        self.known_master()
    }

    /// Waits until a Sentinel has named a master, or all have failed.
    fn owner(&self, _slot: u16) -> TopologyFuture<'_, Arc<Node>> {
        Box::pin(async {
            if let Some(master) = self.known_master() {
                return Ok(master);
            }
            self.wait_for(1).await;
            self.known_master().ok_or_else(|| {
                self.ask();
                self.fault()
            })
        })
    }

    fn known_masters(&self) -> Vec<Arc<Node>> {
        self.known_master().into_iter().collect()
    }

    fn masters(&self) -> TopologyFuture<'_, Vec<Arc<Node>>> {
        Box::pin(async { Ok(vec![self.owner(0).await?]) })
    }

    /// Asks all Sentinels, and waits until one of them has answered, or all have failed. If none answers, the last known
    /// master stays in use.
    fn refreshed(&self) -> TopologyFuture<'_, ()> {
        Box::pin(async {
            let request = self.ask();
            if self.wait_for(request).await { Ok(()) } else { Err(self.fault()) }
        })
    }

    /// Sends a request that was not executed to the current master, if that is another server. Asks the Sentinels first
    /// if the server is a replica.
    fn retry<'a>(&'a self, attempt: &'a mut Attempt, fault: &'a Fault) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            if !fault.kind.is_unexecuted() {
                return false;
            }
            if fault.is_read_only() {
                // If no Sentinel answers, the server is compared with the last known master.
                let _ = self.refreshed().await;
            }
            let other = self.known_master().filter(|master| !Arc::ptr_eq(master, &attempt.node));
            let Some(master) = other else { return false };
            attempt.send_to(master);
            true
        })
    }
}

impl Drop for Sentinels {
    fn drop(&mut self) {
        // Ends the task that listens for the workers. The followers end because `requests` is dropped.
        self.settings.refresh_wanted.notify_one();
    }
}

/// The background task of a Sentinel: asks it for the master, and waits for its messages.
struct Follower {
    sentinels: Weak<Sentinels>,
    name: String,
    endpoint: Endpoint,
    requests: watch::Receiver<u64>,
    settings: Arc<WorkerSettings>,
}

/// The reason why a follower ends: the store was dropped, or the Sentinel was forgotten.
struct Ended;

impl Follower {
    /// Follows the Sentinel until the store is dropped or the Sentinel is forgotten. Reconnects after a failure.
    async fn run(&mut self) {
        let mut pause = PAUSE_FIRST;
        loop {
            let mut request = *self.requests.borrow_and_update();
            let began = Instant::now();
            let Err(fault) = self.follow(&mut request).await else { return };
            let Some(sentinels) = self.sentinels.upgrade() else { return };
            if !sentinels.failed(&self.endpoint, request, fault) {
                return;
            }
            drop(sentinels);
            let now = Instant::now();
            if now.duration_since(began) > PAUSE_LAST {
                pause = PAUSE_FIRST;
            }
            // A request ends the pause, but a Sentinel that is down is not tried all the time.
            sleep_until(now + PAUSE_FIRST.mul_f64(1.0 + fastrand::f64() / 2.0)).await;
            match timeout_at(now + pause, self.requests.changed()).await {
                Ok(Err(_)) => return,
                Ok(Ok(())) | Err(_) => pause = (pause * 2).min(PAUSE_LAST),
            }
        }
    }

    /// Connects, and asks the Sentinel at once and whenever its answer may have changed. Sets `request` to the number
    /// of the request that it answers.
    ///
    /// # Errors
    /// Returns the reason why the connection cannot be opened or used any more.
    async fn follow(&mut self, request: &mut u64) -> Result<Ended, Fault> {
        let call_timeout = self.settings.call_timeout;
        let no_answer = |_| Fault::new(Kind::Unreachable, format!("no answer within {call_timeout:?}"));
        let until = Instant::now() + call_timeout;
        let open = Connection::open(&self.endpoint, &self.settings, ServerKind::Sentinel, until);
        let mut connection = timeout_at(until, open).await.map_err(no_answer)??;
        let mut is_subscribed = false;
        loop {
            let ask = ask(&mut connection, &self.name, is_subscribed);
            let answer = timeout(call_timeout, ask).await.map_err(no_answer)?.map_err(unexecuted)?;
            is_subscribed = true;
            let Some(sentinels) = self.sentinels.upgrade() else { return Ok(Ended) };
            if !sentinels.answered(&self.endpoint, *request, answer) {
                return Ok(Ended);
            }
            drop(sentinels);
            tokio::select! {
                message = next_switch(&mut connection, &self.name) => message?,
                changed = self.requests.changed() => if changed.is_err() { return Ok(Ended) },
                () = sleep(ASK_EVERY) => {}
            }
            *request = *self.requests.borrow_and_update();
        }
    }
}

/// Asks a Sentinel for the master and the other Sentinels, and subscribes to its messages.
///
/// # Errors
/// Returns a fault if the connection fails, the server is not a Sentinel, or it does not know the master.
async fn ask(connection: &mut Connection, name: &str, is_subscribed: bool) -> Result<MasterAnswer, Fault> {
    let mut request = Vec::new();
    if is_subscribed {
        push_command(&mut request, &["UNSUBSCRIBE", SWITCH_MASTER]);
    }
    for question in ["GET-MASTER-ADDR-BY-NAME", "MASTER", "SENTINELS"] {
        push_command(&mut request, &["SENTINEL", question, name]);
    }
    push_command(&mut request, &["SUBSCRIBE", SWITCH_MASTER]);
    connection.queue(&request);
    // Skips messages that arrived before the reply.
    while is_subscribed && !answer::is_unsubscribed(&connection.receive().await?) {}
    let (address, master) = (connection.receive().await?, connection.receive().await?);
    let (others, subscribed) = (connection.receive().await?, connection.receive().await?);
    if address == Reply::Nil {
        let mut request = Vec::new();
        push_command(&mut request, &["UNSUBSCRIBE", SWITCH_MASTER]);
        push_command(&mut request, &["SENTINEL", "MASTERS"]);
        connection.queue(&request);
        while !answer::is_unsubscribed(&connection.receive().await?) {}
        return Err(answer::unknown_name(name, &connection.receive().await?));
    }
    let answer = MasterAnswer::parse(&address, &master, &others)?;
    match subscribed {
        Reply::Error(message) => Err(answer::rejected(&message)),
        _ => Ok(answer),
    }
}

/// Waits until the Sentinel announces another master with this name.
///
/// # Errors
/// Returns a fault if the connection fails.
async fn next_switch(connection: &mut Connection, name: &str) -> Result<(), Fault> {
    while !answer::is_switch_of(&connection.receive().await?, name) {}
    Ok(())
}

/// Changes the kind of a fault of a request to a Sentinel to one that says that nothing was executed: no check was
/// sent.
fn unexecuted(fault: Fault) -> Fault {
    match fault.kind {
        Kind::Interrupted | Kind::TimedOut => Fault { kind: Kind::Unreachable, ..fault },
        _ => fault,
    }
}
