//! The seam between the server and its protocols.
//!
//! A protocol is one file with one implementation of [`Listener`], and one line in [`Listeners`] that builds it.
//! Everything else is the same for all of them: accepting, the limit on connections, TLS, worker threads, metrics,
//! readiness and the order of shutdown.
//!
//! ```text
//!   Listeners ──▶ Listener::serve(stream, peer, context)      one task per connection, on a worker thread
//!                    ▲                        │
//!   accept.rs ───────┘                        └─ shutdown signal, receive budget, evictable slot
//! ```
//!
//! A listener gets the stream itself, so it can speak any protocol on it. Those that speak HTTP/1.1 pass it to
//! [`connection::serve`](crate::listeners::http::connection::serve) with a handler whose response bodies may be
//! streams.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

use tokio::net::TcpListener;

use crate::auth_guard::AuthGuard;
use crate::budget::{EvictingBudget, Receiving, Reservation};
use crate::decider::Decider;
use crate::listeners::admin::AdminListener;
use crate::listeners::gateway::{Gateway, GatewayListener};
use crate::listeners::http::HttpListener;
use crate::listeners::resp::{RespListener, RespOptions};
use crate::metrics::{HTTP_ERRORS, ListenerStats, Metrics};
use crate::readiness::Readiness;
use crate::run::ServerOptions;
use crate::shutdown::{Shutdown, ShutdownStage};
use crate::stream::ClientStream;
use crate::tls::Alpn;

/// Any error that ends a connection.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A future that serves one connection. An error is logged at debug level.
pub(crate) type ServeFuture = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

/// The bytes that one connection may hold of an unfinished request if it has a budget of its own.
const OWN_BUDGET_BYTES: usize = 1024 * 1024;

/// A protocol that the server speaks on one of its ports.
pub(crate) trait Listener: Send + Sync + 'static {
    /// Returns the name of the listener in logs, metrics and `/readyz`. Unique within an instance.
    fn name(&self) -> &'static str {
        self.stats().name
    }

    /// Returns the counters of this listener, which the metrics report.
    fn stats(&self) -> &Arc<ListenerStats>;

    /// Returns the bytes that are sent on a connection over the limit before it is closed.
    ///
    /// With TLS nothing is sent, because there was no handshake.
    fn over_limit_reply(&self) -> &'static [u8];

    /// Returns whether this listener serves clients or the operator. Defaults to [`Role::Service`].
    fn role(&self) -> Role {
        Role::Service
    }

    /// Returns how a connection from `peer` is accepted. Defaults to [`PeerPolicy::default`].
    ///
    /// Called with the remote address of a connection, and again with the address in its PROXY protocol header.
    fn peer_policy(&self, peer: IpAddr) -> PeerPolicy {
        let _ = peer;
        PeerPolicy::default()
    }

    /// Returns the application protocols that are offered in the TLS handshake. Defaults to none.
    fn alpn(&self) -> Alpn {
        Alpn::None
    }

    /// Serves the connection of the client at `peer` until it ends.
    ///
    /// The implementation must end the connection after `context.shutdown` has reached `Closing`. A connection that is
    /// still open after the grace period is dropped.
    fn serve(self: Arc<Self>, stream: ClientStream, peer: SocketAddr, context: ConnectionContext) -> ServeFuture;
}

/// The users of a listener. Determines its connection limit, and when it closes during a shutdown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// Clients. At most `Bounds::connections` connections; one more is rejected.
    Service,
    /// The operator and probes. At most `Bounds::admin_connections` connections; one more evicts the connection that
    /// was idle for longest. It keeps a few file descriptors in reserve, is not encrypted on a loopback address, and
    /// closes after all listeners of role `Service`.
    Operator,
}

/// How connections from one address are accepted. By default, they have no PROXY protocol header, and their number is
/// not limited.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct PeerPolicy {
    /// Whether each connection must begin with a [PROXY protocol](crate::proxy_protocol) header.
    pub(crate) expects_proxy_header: bool,
    /// The maximum number of open connections from this address. Further ones are rejected. `None` means no limit.
    pub(crate) connections_max: Option<usize>,
}

/// The shutdown signal, account of received bytes ([`Receiving`]), connection slot and counters of one connection.
pub(crate) struct ConnectionContext {
    pub(crate) shutdown: Shutdown,
    /// Accounts for the bytes of a request that is not complete.
    pub(crate) receiving: Receiving,
    /// The slot that the connection occupies, if it can be evicted while it is idle. The implementation must then
    /// protect it while a request is handled, and end the connection when it is evicted.
    pub(crate) slot: Option<Reservation>,
    /// The counters of the listener.
    pub(crate) stats: Arc<ListenerStats>,
}

impl ConnectionContext {
    /// Creates a context that no other connection shares: with a receive budget of 1 MiB, without a slot, and with
    /// counters that no metrics report.
    ///
    /// Also returns the sender of its shutdown signal; dropping that ends the connection.
    pub(crate) fn unshared() -> (tokio::sync::watch::Sender<ShutdownStage>, ConnectionContext) {
        let (stage, shutdown) = Shutdown::channel();
        let receiving = Receiving::new(EvictingBudget::new(OWN_BUDGET_BYTES, Arc::default()));
        let stats = ListenerStats::new("unshared", HTTP_ERRORS, &[], false);
        (stage, ConnectionContext { shutdown, receiving, slot: None, stats })
    }
}

/// The state that the listeners of one server share, and from which they are built.
pub(crate) struct ServerState {
    pub(crate) options: ServerOptions,
    pub(crate) readiness: Readiness,
    pub(crate) decider: Decider,
    pub(crate) auth_guard: Arc<AuthGuard>,
    pub(crate) metrics: Arc<Metrics>,
}

type BuildListener = Box<dyn FnOnce(&ServerState) -> Arc<dyn Listener> + Send>;

/// The sockets that [`run`](crate::run()) serves, each with its protocol. Empty by default.
#[derive(Default)]
pub struct Listeners(Vec<(TcpListener, BuildListener)>);

impl Listeners {
    /// Adds a socket that serves HTTP: `POST /v1/check`, `POST /v1/refund`, `/v1/forward-auth`, `/openapi.json` and
    /// `/docs`. `None` adds nothing.
    #[must_use]
    pub fn http(self, socket: impl Into<Option<TcpListener>>) -> Listeners {
        self.add(socket, HttpListener::build)
    }

    /// Adds a socket that serves RESP, the protocol of Redis clients. `None` adds nothing.
    #[must_use]
    pub fn resp(self, socket: impl Into<Option<TcpListener>>, options: RespOptions) -> Listeners {
        self.add(socket, |shared| RespListener::build(shared, options))
    }

    /// Adds a socket on which requests are forwarded to the upstreams of `gateway` if the rules admit them.
    ///
    /// HTTP/1.1 and HTTP/2. `None` adds nothing.
    #[must_use]
    pub fn gateway(self, socket: impl Into<Option<TcpListener>>, gateway: Gateway) -> Listeners {
        self.add(socket, |shared| GatewayListener::build(shared, gateway))
    }

    /// Adds a socket that serves the admin API over HTTP: readiness, metrics, rules, counters, bans and reloads.
    ///
    /// `None` adds nothing.
    #[must_use]
    pub fn admin(self, socket: impl Into<Option<TcpListener>>) -> Listeners {
        self.add(socket, AdminListener::build)
    }

    /// Adds a socket that serves the listener which `build` returns. `build` is called when the server starts.
    ///
    /// A socket of `None` adds nothing.
    pub(crate) fn add<L: Listener>(
        mut self,
        socket: impl Into<Option<TcpListener>>,
        build: impl FnOnce(&ServerState) -> L + Send + 'static,
    ) -> Listeners {
        if let Some(socket) = socket.into() {
            self.0.push((socket, Box::new(|shared| Arc::new(build(shared)))));
        }
        self
    }

    /// Builds the listeners from the shared state.
    ///
    /// Returns them with their sockets, in the order in which they were added.
    pub(crate) fn build(self, shared: &ServerState) -> Vec<(TcpListener, Arc<dyn Listener>)> {
        self.0.into_iter().map(|(socket, build)| (socket, build(shared))).collect()
    }
}

impl std::fmt::Debug for Listeners {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sockets = self.0.iter().map(|(socket, _)| socket);
        f.debug_list().entries(sockets).finish()
    }
}
