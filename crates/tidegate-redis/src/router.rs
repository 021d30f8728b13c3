//! Sends a request to the server that owns its slot, and follows redirections and failovers. `cluster.rs` and
//! `sentinel.rs` describe the design.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::{Location, ShardId, StoreError};
use tokio::time::sleep;

use crate::cluster::{ATTEMPTS_MAX, Cluster, PAUSES};
use crate::fault::{Fault, Redirect};
use crate::key::Prefix;
use crate::node::Node;
use crate::sentinel::Sentinels;
use crate::url::StoreUrl;
use crate::worker::{CallScope, Delivery, Sharing, Waiter, Work, WorkerSettings};

/// The servers of a store.
pub(crate) struct Router {
    pub(crate) url: StoreUrl,
    pub(crate) call_scope: CallScope,
    pub(crate) servers: Servers,
    pub(crate) settings: Arc<WorkerSettings>,
    /// The pattern of the store's keys, such as `tidegate:tg2:*`, for errors.
    pub(crate) key_pattern: String,
}

/// One server, the nodes of a cluster, or the master that Sentinels name.
pub(crate) enum Servers {
    One(Arc<Node>),
    Cluster(Arc<Cluster>),
    Sentinel(Arc<Sentinels>),
}

/// The reason why a request has no result.
pub(crate) enum Refused {
    /// The request failed. The error names the server.
    Failed(StoreError),
    /// The slot is being moved to another node. Nothing was executed. The request must be sent in calls with fewer
    /// keys.
    SlotIsMoving,
}

/// Which requests may share a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    /// All checks for the node that are waiting at the same time, if calls may have keys of several slots; otherwise as
    /// `Wide`.
    Widest,
    /// All requests for the slot that are waiting at the same time.
    Wide,
    /// Only this request.
    Narrow,
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
        let shard = match &self.servers {
            Servers::One(node) => node.id,
            Servers::Cluster(cluster) => cluster.known_owner(slot).map_or(ShardId::default(), |owner| owner.id),
            Servers::Sentinel(sentinels) => sentinels.known_master().map_or(ShardId::default(), |master| master.id),
        };
        Location::new(slot.into(), shard)
    }

    /// Returns the servers that hold keys. Waits until those of a cluster, or the master, are known.
    ///
    /// # Errors
    /// Returns an error if no node of the cluster, or no Sentinel, answers.
    pub(crate) async fn masters(&self) -> Result<Vec<Arc<Node>>, StoreError> {
        match &self.servers {
            Servers::One(node) => Ok(vec![node.clone()]),
            Servers::Cluster(cluster) => {
                let masters = cluster.masters();
                if !masters.is_empty() {
                    return Ok(masters);
                }
                cluster.refreshed().await.map_err(|fault| self.error(fault))?;
                Ok(cluster.masters())
            }
            Servers::Sentinel(sentinels) => Ok(vec![sentinels.master().await.map_err(|fault| self.error(fault))?]),
        }
    }

    /// Returns the servers that are known to hold keys.
    pub(crate) fn known_masters(&self) -> Vec<Arc<Node>> {
        match &self.servers {
            Servers::One(node) => vec![node.clone()],
            Servers::Cluster(cluster) => cluster.masters(),
            Servers::Sentinel(sentinels) => sentinels.known_master().into_iter().collect(),
        }
    }

    /// Returns all servers with a connection.
    pub(crate) fn nodes(&self) -> Vec<Arc<Node>> {
        match &self.servers {
            Servers::One(node) => vec![node.clone()],
            Servers::Cluster(cluster) => cluster.nodes(),
            Servers::Sentinel(sentinels) => sentinels.known_master().into_iter().collect(),
        }
    }

    /// Sends the work that `work` creates to the owner of the slot, and waits for its result.
    ///
    /// Follows redirections, and a failover to another master. Work that was not executed is created and sent again, at
    /// most [`ATTEMPTS_MAX`] times.
    ///
    /// # Errors
    /// Returns the last failure. Returns [`Refused::SlotIsMoving`] only for a call that is not narrow.
    pub(crate) async fn run<T>(
        &self,
        slot: u16,
        width: Width,
        work: impl Fn(Delivery, Waiter<T>) -> Work,
    ) -> Result<T, Refused> {
        let mut usual = match width {
            Width::Widest if self.call_scope == CallScope::Node => Sharing::Node,
            Width::Widest | Width::Wide => Sharing::Slot,
            Width::Narrow => Sharing::Alone,
        };
        let mut node = self.owner(slot).await?;
        let (mut sharing, mut pauses, mut attempts) = (usual, PAUSES.into_iter(), 0);
        loop {
            let delivery = Delivery { slot: if sharing == Sharing::Node { 0 } else { slot }, sharing };
            let fault = match node.submit(|waiter| work(delivery, waiter)).await {
                Ok(answer) => return Ok(answer),
                Err(fault) => fault,
            };
            attempts += 1;
            if attempts == ATTEMPTS_MAX {
                return Err(self.failed(fault, &node));
            }
            if let Servers::Sentinel(sentinels) = &self.servers
                && let Some(master) = new_master(sentinels, &node, &fault).await
            {
                self.settings.counters.redirections.fetch_add(1, Ordering::Relaxed);
                node = master;
                continue;
            }
            let (Servers::Cluster(cluster), Some(redirect)) = (&self.servers, &fault.redirect) else {
                return Err(self.failed(fault, &node));
            };
            self.settings.counters.redirections.fetch_add(1, Ordering::Relaxed);
            (node, sharing) = match redirect {
                Redirect::Moved(target) => {
                    // Nodes that redirect to each other do not agree yet on the owner of the slot.
                    if attempts > 2
                        && let Some(pause) = pauses.next()
                    {
                        sleep(pause).await;
                    }
                    (cluster.moved(slot, target, &node), usual)
                }
                Redirect::Ask(_) | Redirect::TryAgain if width != Width::Narrow => return Err(Refused::SlotIsMoving),
                Redirect::Ask(target) => (cluster.node_at(target, &node), Sharing::Asking),
                Redirect::NotLocal => {
                    usual = Sharing::Slot;
                    (node, usual)
                }
                Redirect::TryAgain | Redirect::Later => {
                    let Some(pause) = pauses.next() else {
                        return Err(self.failed(fault, &node));
                    };
                    sleep(pause).await;
                    (self.owner(slot).await?, usual)
                }
            };
        }
    }

    /// Sends work like [`Router::run`], in a call of its own if its slot is being moved.
    ///
    /// # Errors
    /// Returns the last failure.
    pub(crate) async fn run_any<T>(
        &self,
        slot: u16,
        work: impl Fn(Delivery, Waiter<T>) -> Work,
    ) -> Result<T, StoreError> {
        match self.run(slot, Width::Wide, &work).await {
            Ok(answer) => Ok(answer),
            Err(Refused::Failed(error)) => Err(error),
            Err(Refused::SlotIsMoving) => self.run_alone(slot, work).await,
        }
    }

    /// Sends work like [`Router::run`], in a call of its own.
    ///
    /// # Errors
    /// Returns the last failure.
    pub(crate) async fn run_alone<T>(
        &self,
        slot: u16,
        work: impl Fn(Delivery, Waiter<T>) -> Work,
    ) -> Result<T, StoreError> {
        match self.run(slot, Width::Narrow, work).await {
            Ok(answer) => Ok(answer),
            Err(Refused::Failed(error)) => Err(error),
            Err(Refused::SlotIsMoving) => Err(self.error(Fault::of_reply("TRYAGAIN"))),
        }
    }

    async fn owner(&self, slot: u16) -> Result<Arc<Node>, Refused> {
        match &self.servers {
            Servers::One(node) => Ok(node.clone()),
            Servers::Cluster(cluster) => cluster.owner(slot).await.map_err(|fault| Refused::Failed(self.error(fault))),
            Servers::Sentinel(sentinels) => {
                sentinels.master().await.map_err(|fault| Refused::Failed(self.error(fault)))
            }
        }
    }

    fn failed(&self, fault: Fault, node: &Node) -> Refused {
        Refused::Failed(fault.naming_keys(&self.key_pattern).into_error(&node.endpoint))
    }

    /// Converts a fault to an error that names the store.
    pub(crate) fn error(&self, fault: Fault) -> StoreError {
        fault.naming_keys(&self.key_pattern).into_error(&self.url)
    }
}

/// Returns the server to which a request that failed with `fault` on `node` must be sent again.
///
/// That is the current master, if it is not `node` and the request was not executed. Otherwise returns `None`. If
/// `node` is a replica, asks the Sentinels first.
async fn new_master(sentinels: &Sentinels, node: &Arc<Node>, fault: &Fault) -> Option<Arc<Node>> {
    if !fault.kind.is_unexecuted() {
        return None;
    }
    if fault.is_read_only() {
        // If no Sentinel answers, `node` is compared with the last known master.
        let _ = sentinels.refreshed().await;
    }
    sentinels.known_master().filter(|master| !Arc::ptr_eq(master, node))
}
