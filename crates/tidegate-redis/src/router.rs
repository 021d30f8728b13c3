//! Sends a request to the server that owns its slot, and sends it again if it was not executed and another server may
//! execute it.
//!
//! ```text
//!   Router::run ─▶ Topology::owner ─▶ Node::submit ─▶ answer
//!                                       ▲    │ fault
//!                                       │    ▼
//!                                     Topology::retry     one server: never; a cluster: redirections; Sentinels: failovers
//! ```
//!
//! `cluster.rs` and `sentinel.rs` describe when a request is sent again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tidegate_core::{Location, ShardId, StoreError, StoreErrorKind as Kind};
use tokio::time::sleep;

use crate::fault::Fault;
use crate::key::Prefix;
use crate::node::Node;
use crate::url::StoreAddress;
use crate::worker::{CallScope, Job, Sharing, Waiter, WorkerSettings};

/// The maximum number of times that a request is sent.
const ATTEMPTS_MAX: usize = 8;
/// The pauses before a request that a server could not execute is sent again. Their sum is less than the default
/// deadline.
const PAUSES: [Duration; 4] =
    [Duration::from_millis(1), Duration::from_millis(2), Duration::from_millis(4), Duration::from_millis(8)];

/// The servers of a store: one server, the nodes of a cluster, or the master that Sentinels name.
pub(crate) trait Topology: Send + Sync {
    /// Returns the server that owns a slot, or `None` if it is not known.
    fn known_owner(&self, slot: u16) -> Option<Arc<Node>>;

    /// Returns the server that owns a slot. Waits until the servers are known.
    ///
    /// # Errors
    /// Returns a fault if the slot has no owner, or the servers cannot be found.
    fn owner(&self, slot: u16) -> TopologyFuture<'_, Arc<Node>>;

    /// Returns the servers that are known to hold keys, each once.
    fn known_masters(&self) -> Vec<Arc<Node>>;

    /// Returns the servers that hold keys, each once. Waits until they are known.
    ///
    /// # Errors
    /// Returns a fault if they cannot be found.
    fn masters(&self) -> TopologyFuture<'_, Vec<Arc<Node>>> {
        Box::pin(async {
            if self.known_masters().is_empty() {
                self.refreshed().await?;
            }
            Ok(self.known_masters())
        })
    }

    /// Returns all servers with a connection.
    fn nodes(&self) -> Vec<Arc<Node>> {
        self.known_masters()
    }

    /// Finds out again which servers hold keys. Does nothing for one server.
    ///
    /// # Errors
    /// Returns a fault if they cannot be found.
    fn refreshed(&self) -> TopologyFuture<'_, ()>;

    /// Returns whether a request that failed with `fault` is sent again, and changes `attempt` to where and how. Waits
    /// for a pause if the server may execute it later.
    ///
    /// Returns `true` only if the request was not executed.
    fn retry<'a>(&'a self, attempt: &'a mut Attempt, fault: &'a Fault) -> BoxFuture<'a, bool>;
}

/// A future of a [`Topology`] that may fail.
pub(crate) type TopologyFuture<'a, T> = BoxFuture<'a, Result<T, Fault>>;

/// A request that was sent at least once.
pub(crate) struct Attempt {
    /// The slot of its keys.
    pub(crate) slot: u16,
    /// The server to which it is sent.
    pub(crate) node: Arc<Node>,
    /// With which other work it shares a call, unless a redirection changes that for one attempt.
    pub(crate) usual: Sharing,
    /// With which other work it shares this call.
    pub(crate) sharing: Sharing,
    /// How many times it was sent.
    pub(crate) count: usize,
    pauses: std::array::IntoIter<Duration, 4>,
}

impl Attempt {
    /// Waits for the next of the [`PAUSES`]. Returns `false` at once if all are used up.
    pub(crate) async fn pause(&mut self) -> bool {
        match self.pauses.next() {
            Some(pause) => {
                sleep(pause).await;
                true
            }
            None => false,
        }
    }

    /// Sends the request to `node` next, with its usual sharing.
    pub(crate) fn send_to(&mut self, node: Arc<Node>) {
        (self.node, self.sharing) = (node, self.usual);
    }
}

/// The topology of one server, which owns all slots.
impl Topology for Arc<Node> {
    fn known_owner(&self, _slot: u16) -> Option<Arc<Node>> {
        Some(self.clone())
    }

    fn owner(&self, _slot: u16) -> TopologyFuture<'_, Arc<Node>> {
        Box::pin(async { Ok(self.clone()) })
    }

    fn known_masters(&self) -> Vec<Arc<Node>> {
        vec![self.clone()]
    }

    fn refreshed(&self) -> TopologyFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn retry<'a>(&'a self, _: &'a mut Attempt, _: &'a Fault) -> BoxFuture<'a, bool> {
        Box::pin(async { false })
    }
}

/// Sends requests to the servers of a store.
pub(crate) struct Router {
    pub(crate) address: StoreAddress,
    pub(crate) prefix: Prefix,
    /// Whether checks read the bans on their subjects.
    pub(crate) reads_bans: bool,
    pub(crate) call_scope: CallScope,
    pub(crate) topology: Arc<dyn Topology>,
    pub(crate) settings: Arc<WorkerSettings>,
}

impl Router {
    /// Returns the hash slot of a subject; 0 if one call may have keys in any slots.
    pub(crate) fn slot(&self, subject: &[u8]) -> u16 {
        match self.call_scope {
            CallScope::Server => 0,
            CallScope::Slot | CallScope::Node => Prefix::slot(subject),
        }
    }

    pub(crate) fn locate(&self, subject: &[u8]) -> Location {
        let slot = self.slot(subject);
        let shard = self.topology.known_owner(slot).map_or(ShardId::default(), |owner| owner.id);
        Location::new(slot.into(), shard)
    }

    /// Returns the servers that hold keys. Waits until those of a cluster, or the master, are known.
    ///
    /// # Errors
    /// Returns an error if no node of the cluster, or no Sentinel, answers.
    pub(crate) async fn masters(&self) -> Result<Vec<Arc<Node>>, StoreError> {
        self.topology.masters().await.map_err(|fault| self.error(fault))
    }

    /// Sends the checks that `job` creates to the owner of the slot, and waits for their results.
    ///
    /// They share a call with all checks for the same server if calls may have keys of several slots, else with those of
    /// the same slot. If a server did not execute them and another one may, they are created and sent again, at most
    /// [`ATTEMPTS_MAX`] times in all.
    ///
    /// # Errors
    /// Returns the last failure. The kind is `Relocating` if the slot is being moved to another node. Then the checks
    /// were not executed, and may be decided in calls with fewer keys.
    pub(crate) async fn run_checks<T>(&self, slot: u16, job: impl Fn(Waiter<T>) -> Job) -> Result<T, StoreError> {
        let sharing = if self.call_scope == CallScope::Node { Sharing::Node } else { Sharing::Slot(slot) };
        self.run(slot, sharing, job).await
    }

    /// Sends work like [`Router::run_checks`], in a call with other work of the same slot or, if the slot is being
    /// moved, in a call of its own.
    ///
    /// # Errors
    /// Returns the last failure.
    pub(crate) async fn run_any<T>(&self, slot: u16, job: impl Fn(Waiter<T>) -> Job) -> Result<T, StoreError> {
        match self.run(slot, Sharing::Slot(slot), &job).await {
            Err(error) if error.kind() == Kind::Relocating => self.run_alone(slot, job).await,
            answer => answer,
        }
    }

    /// Sends work like [`Router::run_checks`], in a call of its own.
    ///
    /// # Errors
    /// Returns the last failure.
    pub(crate) async fn run_alone<T>(&self, slot: u16, job: impl Fn(Waiter<T>) -> Job) -> Result<T, StoreError> {
        self.run(slot, Sharing::Alone, job).await
    }

    async fn run<T>(&self, slot: u16, sharing: Sharing, job: impl Fn(Waiter<T>) -> Job) -> Result<T, StoreError> {
        let node = match self.topology.known_owner(slot) {
            Some(node) => node,
            None => self.topology.owner(slot).await.map_err(|fault| self.error(fault))?,
        };
        let mut attempt = Attempt { slot, node, usual: sharing, sharing, count: 0, pauses: PAUSES.into_iter() };
        loop {
            let fault = match attempt.node.submit(attempt.sharing, &job).await {
                Ok(answer) => return Ok(answer),
                Err(fault) => fault,
            };
            attempt.count += 1;
            let sender = attempt.node.clone();
            if attempt.count == ATTEMPTS_MAX || !self.topology.retry(&mut attempt, &fault).await {
                return Err(fault.naming_keys(&self.prefix).into_error(&sender.endpoint));
            }
            self.settings.count(|stats| stats.redirections += 1);
        }
    }

    /// Converts a fault to an error that names the store.
    pub(crate) fn error(&self, fault: Fault) -> StoreError {
        fault.naming_keys(&self.prefix).into_error(&self.address)
    }
}
