//! Serves all listeners, and closes them in order.
//!
//! ```text
//!   serving ─▶ shutdown: not ready ─▶ draining: still served,   ─▶ closing: no new connections,  ─▶ the operator's
//!                                     so that a load balancer      open ones finish or are          listener closes
//!                                     has time to notice           dropped after the grace          last
//! ```
//!
//! **No request is lost.** Between two requests a busy connection looks like an idle one, and the next request may be
//! on its way. So no connection is ended before its client could know:
//!
//! - An HTTP client that sends a request while the instance drains reads `connection: close` in the response.
//! - RESP has no such message. When the listener closes, the next replies and the end of the connection are sent in one
//!   packet, so a client that waits for its replies finds the end before it sends again. What arrives after the end is
//!   not executed.
//! - A connection without a request is ended half a second after its listener begins to close.
//! - After its end a connection is read until the client ends it too, for a second at most. To close a socket with unread
//!   bytes would reset it, and a reset destroys responses that are on their way.
//!
//! Each connection is a task of its own on a thread of the [worker pool](crate::worker_pool). A listener serves a
//! bounded number of connections, and rejects one more. The bytes that they hold of unfinished requests are
//! [bounded](crate::budget) for all connections of a listener together.

use std::future::Future;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use tidegate::engine::Engine;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::accept::accept;
use crate::browser::{BrowserPolicy, WebOrigin};
use crate::decider::Decider;
use crate::listener::{ListenerKind, Role, ServerState};
use crate::listeners::gateway::Gateway;
use crate::metrics::{DecisionStats, Metrics, StoreTimes};
use crate::readiness::Readiness;
use crate::receipt_secret::ReceiptSecret;
use crate::reload::Reloader;
use crate::secret::ListenerSecret;
use crate::shutdown::{Shutdown, ShutdownStage};
use crate::tls::Tls;
use crate::worker_pool::WorkerPool;

/// Connection limits and timeouts.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The number of open connections of each listener, except the admin listener. One more is rejected. Defaults to
    /// 10,000.
    pub connections: usize,
    /// The number of open connections of the admin listener. One more evicts the connection that was idle for longest.
    /// Defaults to 64.
    pub admin_connections: usize,
    /// How long an HTTP client may take until its next request header is complete, or to accept a response. Defaults to
    /// 60 s; the admin listener allows at most 10 s.
    pub http_idle: Duration,
    /// How long a Redis client may be silent, or take to accept a reply. Defaults to 300 s.
    pub resp_idle: Duration,
    /// The bytes that each listener holds of requests that are not complete, besides 4 KiB for each connection. When
    /// they are used up, the oldest of these requests is dropped to make room for another. Defaults to 32 MiB.
    pub receive_bytes: usize,
    /// How long a shutdown continues to serve after it has reported that the instance is not ready. Defaults to zero.
    pub drain: Duration,
    /// How long a shutdown then waits for open connections to finish. Defaults to 10 s.
    pub grace: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            connections: 10_000,
            admin_connections: 64,
            http_idle: Duration::from_secs(60),
            resp_idle: Duration::from_secs(300),
            receive_bytes: 32 * 1024 * 1024,
            drain: Duration::ZERO,
            grace: Duration::from_secs(10),
        }
    }
}

/// Options that the listeners share.
#[derive(Debug)]
pub struct ServerOptions {
    pub(crate) engine: Engine,
    pub(crate) bounds: Bounds,
    pub(crate) tls: Option<Tls>,
    pub(crate) reloader: Reloader,
    pub(crate) gateway: Gateway,
    /// The secrets that were set, each with the name of its listener.
    secrets: Vec<(&'static str, ListenerSecret)>,
    pub(crate) browsers: BrowserPolicy,
    receipt_secret: Option<ReceiptSecret>,
    readiness: Option<Readiness>,
    store_times: Arc<StoreTimes>,
    threads: Option<NonZeroUsize>,
}

impl ServerOptions {
    /// Creates options for listeners that decide by this engine, with defaults for everything else.
    ///
    /// If it is a [`Limiter`](tidegate::Limiter), or an engine without a
    /// [configuration](tidegate::rules::RuleSet::is_configured), described requests (`{"request": …}` in the body of a
    /// check) are rejected with 400.
    pub fn new(engine: impl Into<Engine>) -> ServerOptions {
        ServerOptions {
            engine: engine.into(),
            bounds: Bounds::default(),
            tls: None,
            reloader: Reloader::nothing(),
            gateway: Gateway::default(),
            secrets: Vec::new(),
            browsers: BrowserPolicy::default(),
            receipt_secret: None,
            readiness: None,
            store_times: Arc::default(),
            threads: None,
        }
    }

    /// Sets the secret under which receipts are encrypted. Defaults to none: checks that ask for a receipt are rejected.
    #[must_use]
    pub fn receipt_secret(self, secret: ReceiptSecret) -> ServerOptions {
        ServerOptions { receipt_secret: Some(secret), ..self }
    }

    /// Sets connection limits and timeouts. Defaults to [`Bounds::default`].
    #[must_use]
    pub fn bounds(self, bounds: Bounds) -> ServerOptions {
        ServerOptions { bounds, ..self }
    }

    /// Encrypts all listeners with this certificate, except an admin listener on a loopback address.
    ///
    /// Defaults to plain text.
    #[must_use]
    pub fn tls(self, tls: Tls) -> ServerOptions {
        ServerOptions { tls: Some(tls), ..self }
    }

    /// Sets the reloader, whose configuration the admin API shows and reloads. Defaults to one without files.
    ///
    /// Without it, `/v1/explain` and `/v1/keys?rule=…` answer 400, and `/v1/reload` answers 409.
    #[must_use]
    pub fn reloader(self, reloader: Reloader) -> ServerOptions {
        ServerOptions { reloader, ..self }
    }

    /// Sets the readiness that `/readyz` reports. Defaults to that of an instance without a shared store.
    #[must_use]
    pub fn readiness(self, readiness: Readiness) -> ServerOptions {
        ServerOptions { readiness: Some(readiness), ..self }
    }

    /// Sets the secret that clients of a listener must send.
    ///
    /// Defaults to none: every client of the HTTP and the RESP listener can send checks, and the admin listener answers
    /// 401 on all paths but `/healthz`, `/readyz`, `/metrics`, `/openapi.json` and `/docs`.
    #[must_use]
    pub fn secret(mut self, listener: &ListenerKind, secret: ListenerSecret) -> ServerOptions {
        self.secrets.push((listener.name, secret));
        self
    }

    /// Sets the upstreams of the gateway, and the limits of its listener.
    ///
    /// Defaults to no upstreams: the gateway answers every request that the rules admit with 404.
    #[must_use]
    pub fn gateway(self, gateway: Gateway) -> ServerOptions {
        ServerOptions { gateway, ..self }
    }

    /// Sets the observer whose durations of store calls `/metrics` reports. Defaults to one that records nothing.
    #[must_use]
    pub fn store_times(self, store_times: Arc<StoreTimes>) -> ServerOptions {
        ServerOptions { store_times, ..self }
    }

    /// Sets the number of threads that serve connections. Defaults to one for every two cores, rounded up. The
    /// connections of the admin listener have one more.
    #[must_use]
    pub fn threads(self, threads: NonZeroUsize) -> ServerOptions {
        ServerOptions { threads: Some(threads), ..self }
    }

    /// Sets the origins whose web pages may send requests.
    ///
    /// Defaults to none: a check, or a request to the admin listener except for `/healthz`, that a browser sends for a
    /// page of another site is rejected with 403.
    #[must_use]
    pub fn allowed_origins(mut self, origins: Vec<WebOrigin>) -> ServerOptions {
        self.browsers.origins = origins;
        self
    }

    /// Sets the domain names that requests to the admin listener may have in `Host`. Defaults to none.
    ///
    /// IP addresses and names without a dot are always accepted. Any other name is rejected with 421, except for
    /// `/healthz`. An HTTP listener without a token accepts the same names in checks and refunds that browsers send, and
    /// rejects others with 403, unless the [origin is allowed](Self::allowed_origins).
    #[must_use]
    pub fn admin_hosts(mut self, hosts: Vec<String>) -> ServerOptions {
        self.browsers.admin_hosts = hosts;
        self
    }

    /// Returns the secret that was set last for a listener, or `None` if it has none.
    pub(crate) fn secret_of(&self, listener: &ListenerKind) -> Option<ListenerSecret> {
        let secret = self.secrets.iter().rev().find(|(name, _)| *name == listener.name);
        secret.map(|(_, secret)| secret.clone())
    }

    pub(crate) fn into_shared(self) -> ServerState {
        let (readiness, limiter) = (self.readiness.clone(), self.engine.limiter().clone());
        let readiness = readiness.unwrap_or_else(|| Readiness::new(limiter.clone(), None, self.reloader.clone()));
        let decisions = Arc::new(DecisionStats::default());
        let metrics = Metrics::new(
            limiter,
            self.reloader.clone(),
            readiness.clone(),
            decisions.clone(),
            self.store_times.clone(),
        );
        let decider = Decider::new(self.engine.clone(), decisions).with_receipts(self.receipt_secret.clone());
        ServerState { options: self, readiness, decider, auth_guard: Arc::default(), metrics: Arc::new(metrics) }
    }
}

/// The accept tasks of listeners that close together, and their shutdown signal.
struct ListenerGroup {
    stage: watch::Sender<ShutdownStage>,
    shutdown: Shutdown,
    tasks: JoinSet<()>,
}

impl ListenerGroup {
    fn new() -> ListenerGroup {
        let (stage, shutdown) = Shutdown::channel();
        ListenerGroup { stage, shutdown, tasks: JoinSet::new() }
    }

    /// Makes the listeners stop accepting, and waits until their connections have ended or the grace period is over.
    ///
    /// Connections that are left are not closed here.
    async fn close(mut self) {
        let _ = self.stage.send(ShutdownStage::Closing);
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Serves the sockets, each as a listener of its kind, until `shutdown` completes, then closes them and waits for their connections.
///
/// From then on the instance is not ready. It serves for another [`Bounds::drain`]. Then it closes all listeners except
/// the admin listener and waits up to [`Bounds::grace`] for their connections, and then does the same for the admin
/// listener. Connections that are still open are then dropped, as are all connections if the future is dropped.
///
/// Starts the worker threads, and does not wait until they have ended. A listener that fails is logged and makes the
/// instance not ready; the others continue. Must be called in a tokio runtime with timers and I/O.
pub async fn run(
    listeners: impl IntoIterator<Item = (&'static ListenerKind, TcpListener)>,
    options: ServerOptions,
    shutdown: impl Future<Output = ()>,
) {
    let shared = Arc::new(options.into_shared());
    let listeners: Vec<_> = listeners.into_iter().map(|(kind, socket)| (kind, socket, (kind.build)(&shared))).collect();
    shared.metrics.set_listeners(listeners.iter().map(|(.., listener)| listener.stats().clone()).collect());

    let workers = Arc::new(WorkerPool::new("tidegate", shared.options.threads));
    // An answer to the operator may take milliseconds, in which no check must wait for it.
    let operator_workers = Arc::new(WorkerPool::new("admin", Some(NonZeroUsize::MIN)));
    let (mut service, mut operator) = (ListenerGroup::new(), ListenerGroup::new());
    for (kind, socket, listener) in listeners {
        let (group, workers) = match kind.role {
            Role::Service => (&mut service, &workers),
            Role::Operator => (&mut operator, &operator_workers),
        };
        group.tasks.spawn(accept(kind, listener, socket, shared.clone(), workers.clone(), group.shutdown.clone()));
    }

    shutdown.await;
    shared.readiness.leave();
    let _ = service.stage.send(ShutdownStage::Draining);
    tokio::time::sleep(shared.options.bounds.drain).await;
    service.close().await;
    operator.close().await;
}

#[cfg(test)]
mod tests;
