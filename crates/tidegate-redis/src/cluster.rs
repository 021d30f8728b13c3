//! A cluster: which node owns which slot, and how the store keeps up with changes.
//!
//! ```text
//!                      ┌─────────────── slot map: slot → node ◀── CLUSTER SLOTS ── refresher (a task)
//!   check ──▶ slot ────┤                    ▲                                           ▲
//!                      ▼                    │ MOVED                                     │ MOVED, connection lost
//!                 node's queue ──▶ worker ──┴──▶ the node ──────────────────────────────┘
//! ```
//!
//! **One worker per master.** A node is a queue and a worker with a connection, as for a single server. All keys of a call
//! are in one slot, and a slot has one owner, so a call goes to one worker. A node that hangs or is lost delays only the
//! calls on its own slots.
//!
//! **Redirections** are followed by the caller's own future, so that they end with the caller's deadline. Each of these
//! replies means that the call was not executed, so it is made again. It is made at most [`ATTEMPTS_MAX`] times:
//!
//! | reply | meaning | what is done |
//! |---|---|---|
//! | `MOVED` | another node owns the slot | the slot map is updated, and the call is made to that node |
//! | `ASK` | the slot is being moved, and the keys of the call are on the target node, or do not exist | the call is made to the target once, after `ASKING` |
//! | `TRYAGAIN` | the slot is being moved, and some keys of the call are on each node | the call is split, or made again after a pause |
//! | `CLUSTERDOWN`, `LOADING` | the node does not serve the slot now | the call is made again after a pause |
//!
//! A timeout or a broken connection is different: the call may have been executed, and is never made again.
//!
//! **A slot that is being moved.** A node executes a call if all its keys are present, and redirects it if all are
//! absent. A call of many checks usually has keys of both kinds. Then each check is sent alone, and its ban is read by
//! a call of its own, because the ban key is usually absent. A check of one limit then has one key, and a call with one
//! key is never answered with `TRYAGAIN`. A check of several limits whose counters are on both nodes is repeated for
//! some milliseconds and then fails with [`Relocating`](tidegate_core::StoreErrorKind::Relocating), as does a
//! redemption.
//!
//! **The slot map** comes from `CLUSTER SLOTS`. It is read at the start, every 30 s, after a `MOVED` and when a
//! connection is lost. While nodes stay unreachable, it is read again after pauses that grow from 0.1 s to a second. A
//! few masters are asked first, and if none of them answers, all known nodes and those in the URL. The first valid
//! answer is used. If it is outdated, calls are redirected or fail to reach a node, and the map is read again. So
//! replicas that are promoted, and nodes that join or leave, are noticed without a restart. A node that owns no slot
//! and was not named by a redirection is dropped.
//!
//! **The nodes in the URL** must be nodes of one cluster. The first reading compares the first answer with those that
//! arrive in the next 100 ms. If one of them has no owner in common with it, none is used.
//!
//! **Addresses** are those that the nodes announce. If the host is unknown (empty, or `?`), that of the node that was
//! asked is used. The credentials and the TLS setting of the URL apply to all nodes.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use parking_lot::RwLock;
use tidegate_core::{ShardId, StoreErrorKind as Kind};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use self::slot::SLOTS;
use self::slot_map::SlotRange;
use crate::fault::{Fault, Redirect, Target};
use crate::node::Node;
use crate::router::{Attempt, Topology, TopologyFuture};
use crate::url::Endpoint;
use crate::worker::{Sharing, WorkerSettings};

pub(crate) mod slot;
mod slot_map;

/// The time between two readings of the slot map if nothing suggests a change.
const REFRESH_EVERY: Duration = Duration::from_secs(30);
/// The shortest time between two readings of the slot map. It doubles up to [`REFRESH_PAUSE_MAX`] while the map is read
/// again and again, because a node stays down.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);
const REFRESH_PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long the first reading of the slot map waits for the answers of all nodes in the URL, to compare them.
const SEEDS_WAIT: Duration = Duration::from_millis(100);
/// The number of masters that are asked for the slot map at the same time.
const ASKED_MAX: usize = 2;

/// The nodes of a cluster, and the owners of the slots.
pub(crate) struct Cluster {
    /// The nodes named in the URL; at least one.
    seeds: Vec<Endpoint>,
    settings: Arc<WorkerSettings>,
    runtime: Handle,
    state: RwLock<State>,
    /// The number of attempts to read the slot map, successful or not.
    refreshes: watch::Sender<u64>,
}

struct State {
    /// The owner of each slot; `None` if it is not known.
    owners: Vec<Option<Arc<Node>>>,
    /// All nodes that have a worker, by host and port.
    nodes: HashMap<(String, u16), Arc<Node>>,
    /// The addresses of all masters and replicas as of the last reading of the slot map. They are asked if no master
    /// answers.
    addresses: HashSet<(String, u16)>,
    /// The number of nodes created so far.
    last_id: u32,
    /// The reason why the last reading of the slot map failed; `None` if it succeeded.
    fault: Option<Fault>,
}

impl Cluster {
    /// Spawns the task that reads the slot map, which connects to the nodes of the URL. Does not wait for it.
    pub(crate) fn spawn(seeds: Vec<Endpoint>, settings: Arc<WorkerSettings>, runtime: Handle) -> Arc<Cluster> {
        let (nodes, addresses) = (HashMap::new(), HashSet::new());
        let state = State { owners: vec![None; SLOTS], nodes, addresses, last_id: 0, fault: None };
        let (state, refreshes) = (RwLock::new(state), watch::Sender::new(0));
        let cluster = Cluster { seeds, settings: settings.clone(), runtime: runtime.clone(), state, refreshes };
        let cluster = Arc::new(cluster);
        let weak = Arc::downgrade(&cluster);
        runtime.spawn(async move {
            while AssertUnwindSafe(keep_up(&weak, &settings)).catch_unwind().await.is_err() {
                settings.count(|stats| stats.panics += 1);
            }
        });
        cluster
    }

    /// Makes the node that a `MOVED` reply of `sender` names the owner of the slot, and returns it.
    fn moved(&self, slot: u16, target: &Target, sender: &Node) -> Arc<Node> {
        let owner = self.node_at(target, sender);
        let before = self.state.write().owners[usize::from(slot)].replace(owner.clone());
        if before.is_none_or(|before| !Arc::ptr_eq(&before, &owner)) {
            self.settings.refresh_wanted.notify_one();
        }
        owner
    }

    /// Returns the node that a redirection of `sender` names.
    fn node_at(&self, target: &Target, sender: &Node) -> Arc<Node> {
        let host = target.host.as_deref().unwrap_or(&sender.endpoint.host);
        let node = self.node(&mut self.state.write(), host, target.port);
        node.was_named.store(true, Ordering::Relaxed);
        node
    }

    /// Reads the slot map from a node. Returns whether every slot has an owner.
    async fn refresh(&self) -> bool {
        let mut masters = self.known_masters();
        fastrand::shuffle(&mut masters);
        masters.truncate(ASKED_MAX);
        let read = match first_answer(&masters).await {
            Ok(read) => Ok(read),
            Err(_) => {
                let all: Vec<Arc<Node>> = {
                    let state = &mut *self.state.write();
                    let seeds = self.seeds.iter().map(|seed| (seed.host.clone(), seed.port));
                    let addresses: HashSet<_> = state.addresses.iter().cloned().chain(seeds).collect();
                    addresses.iter().map(|(host, port)| self.node(state, host, *port)).collect()
                };
                let is_first = self.state.read().addresses.is_empty();
                if is_first { common_answer(&all).await } else { first_answer(&all).await }
            }
        };
        let is_complete = {
            let state = &mut *self.state.write();
            state.fault = read.map(|(ranges, from)| self.apply(state, &ranges, &from)).err();
            state.fault.is_none() && state.owners.iter().all(Option::is_some)
        };
        self.refreshes.send_modify(|count| *count += 1);
        is_complete
    }

    /// Sets the owners of all slots, and drops the nodes that are no longer needed.
    fn apply(&self, state: &mut State, ranges: &[SlotRange], from: &Node) {
        let address = |target: &Target| (target.host.as_ref().unwrap_or(&from.endpoint.host).clone(), target.port);
        let mut owners = vec![None; SLOTS];
        state.addresses.clear();
        for range in ranges {
            let (host, port) = address(&range.owner);
            owners[range.slots.clone()].fill(Some(self.node(state, &host, port)));
            state.addresses.extend(std::iter::once(&range.owner).chain(&range.replicas).map(address));
        }
        state.owners = owners;
        // One reference in the map; each owned slot has another.
        state.nodes.retain(|_, node| Arc::strong_count(node) > 1 || node.was_named.swap(false, Ordering::Relaxed));
    }

    /// Returns the node at an address, and spawns its worker if it is new.
    fn node(&self, state: &mut State, host: &str, port: u16) -> Arc<Node> {
        let State { nodes, last_id, .. } = state;
        let node = nodes.entry((host.to_owned(), port)).or_insert_with(|| {
            *last_id = last_id.wrapping_add(1);
            let (id, endpoint) = (ShardId::new(*last_id), self.seeds[0].at(host, port));
            Node::spawn(id, endpoint, self.settings.clone(), &self.runtime)
        });
        node.clone()
    }
}

impl Topology for Cluster {
    fn known_owner(&self, slot: u16) -> Option<Arc<Node>> {
        self.state.read().owners[usize::from(slot)].clone()
    }

    /// Waits until the slot map has been read for the first time.
    fn owner(&self, slot: u16) -> TopologyFuture<'_, Arc<Node>> {
        Box::pin(async move {
            if let Some(owner) = self.known_owner(slot) {
                return Ok(owner);
            }
            let mut refreshes = self.refreshes.subscribe();
            // An error would mean that the sender was dropped, but `self` holds it.
            let _ = refreshes.wait_for(|&count| count > 0).await;
            self.known_owner(slot).ok_or_else(|| {
                let fault = self.state.read().fault.clone();
                self.settings.refresh_wanted.notify_one();
                fault.unwrap_or_else(|| Fault::new(Kind::Unavailable, "no node of the cluster owns this slot"))
            })
        })
    }

    fn known_masters(&self) -> Vec<Arc<Node>> {
        let mut masters: Vec<Arc<Node>> = Vec::new();
        for owner in self.state.read().owners.iter().flatten() {
            // Slots of one owner are usually neighbours.
            if masters.last().is_none_or(|last| last.id != owner.id)
                && masters.iter().all(|master| master.id != owner.id)
            {
                masters.push(owner.clone());
            }
        }
        masters
    }

    fn nodes(&self) -> Vec<Arc<Node>> {
        self.state.read().nodes.values().cloned().collect()
    }

    /// Waits for an attempt to read the slot map that begins after this call.
    fn refreshed(&self) -> TopologyFuture<'_, ()> {
        Box::pin(async {
            let mut refreshes = self.refreshes.subscribe();
            let before = *refreshes.borrow_and_update();
            self.settings.refresh_wanted.notify_one();
            // An attempt in progress may have read the map before this call.
            let _ = refreshes.wait_for(|&count| count > before + u64::from(before > 0)).await;
            self.state.read().fault.clone().map_or(Ok(()), Err)
        })
    }

    /// Follows redirections. A request for a slot that is being moved fails unless it is in a call of its own. Its caller
    /// then makes calls with fewer keys.
    fn retry<'a>(&'a self, attempt: &'a mut Attempt, fault: &'a Fault) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let Some(redirect) = &fault.redirect else { return false };
            match redirect {
                Redirect::Moved(target) => {
                    // Nodes that redirect to each other do not agree yet on the owner of the slot.
                    if attempt.count > 2 {
                        attempt.pause().await;
                    }
                    let owner = self.moved(attempt.slot, target, &attempt.node);
                    attempt.send_to(owner);
                }
                Redirect::Ask(_) | Redirect::TryAgain if attempt.usual != Sharing::Alone => return false,
                Redirect::Ask(target) => {
                    attempt.node = self.node_at(target, &attempt.node);
                    attempt.sharing = Sharing::Asking;
                }
                Redirect::NotLocal => {
                    attempt.usual = Sharing::Slot(attempt.slot);
                    attempt.send_to(attempt.node.clone());
                }
                Redirect::TryAgain | Redirect::Later => {
                    if !attempt.pause().await {
                        return false;
                    }
                    let Ok(owner) = self.owner(attempt.slot).await else { return false };
                    attempt.send_to(owner);
                }
            }
            true
        })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Ends the task that reads the slot map.
        self.settings.refresh_wanted.notify_one();
    }
}

/// Reads the slot map at the start and whenever it may have changed, until the cluster is dropped.
async fn keep_up(cluster: &Weak<Cluster>, settings: &WorkerSettings) {
    let mut pause = REFRESH_PAUSE;
    loop {
        let is_complete = match cluster.upgrade() {
            Some(cluster) => cluster.refresh().await,
            None => return,
        };
        sleep(pause).await;
        let read_at = Instant::now();
        if is_complete {
            let _ = timeout(REFRESH_EVERY, settings.refresh_wanted.notified()).await;
        }
        let is_soon = read_at.elapsed() < REFRESH_PAUSE_MAX;
        pause = if is_soon { (pause * 2).min(REFRESH_PAUSE_MAX) } else { REFRESH_PAUSE };
    }
}

/// Asks all nodes for the slot map, and returns the first valid answer with the node that sent it.
///
/// # Errors
/// Returns a fault with the reasons of all nodes if none of them answers.
async fn first_answer(nodes: &[Arc<Node>]) -> Result<(Vec<SlotRange>, Arc<Node>), Fault> {
    next_answer(&mut ask_all(nodes)).await
}

/// Asks all nodes like [`first_answer`], and compares the first answer with those that arrive within [`SEEDS_WAIT`].
///
/// # Errors
/// Returns a fault with the reasons of all nodes if none of them answers, or if two are nodes of different clusters.
async fn common_answer(nodes: &[Arc<Node>]) -> Result<(Vec<SlotRange>, Arc<Node>), Fault> {
    let mut asked = ask_all(nodes);
    let first = next_answer(&mut asked).await?;
    let ids = |ranges: &[SlotRange]| ranges.iter().map(|range| range.owner_id.clone()).collect::<HashSet<_>>();
    let (until, known) = (Instant::now() + SEEDS_WAIT, ids(&first.0));
    // Ends when all nodes have answered or failed, or the time is over.
    while let Ok(Ok((ranges, node))) = timeout_at(until, next_answer(&mut asked)).await {
        if known.is_disjoint(&ids(&ranges)) {
            let (one, other) = (first.1.endpoint.address(), node.endpoint.address());
            return Err(Fault::new(Kind::Unsupported, format!("{one} and {other} are nodes of different clusters")));
        }
    }
    Ok(first)
}

/// A pending request for the slot map, which returns the answer and the node that was asked.
type Asked = BoxFuture<'static, (Result<Vec<SlotRange>, Fault>, Arc<Node>)>;

fn ask_all(nodes: &[Arc<Node>]) -> FuturesUnordered<Asked> {
    let ask = |node: &Arc<Node>| -> Asked {
        let node = node.clone();
        Box::pin(async move {
            let reply = node.command(&["CLUSTER", "SLOTS"]).await;
            (reply.and_then(|reply| slot_map::parse(&reply)), node)
        })
    };
    nodes.iter().map(ask).collect()
}

/// Returns the next valid answer with the node that sent it.
///
/// # Errors
/// Returns a fault with the reasons of the remaining nodes if none of them answers.
async fn next_answer(asked: &mut FuturesUnordered<Asked>) -> Result<(Vec<SlotRange>, Arc<Node>), Fault> {
    let mut faults: Vec<Fault> = Vec::new();
    while let Some((read, node)) = asked.next().await {
        match read {
            Ok(ranges) => return Ok((ranges, node)),
            Err(fault) => {
                let message = format!("{}: {}", node.endpoint.address(), fault.message);
                // No check was sent yet, so nothing was executed.
                let kind = if fault.kind.is_unexecuted() { fault.kind } else { Kind::Unreachable };
                faults.push(Fault::new(kind, message));
            }
        }
    }
    let kind = faults.last().map_or(Kind::Unreachable, |fault| fault.kind);
    Err(Fault::new(kind, faults.iter().map(|fault| &*fault.message).collect::<Vec<_>>().join("; ")))
}
