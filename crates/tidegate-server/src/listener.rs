//! The seam between the server and its protocols.
//!
//! A protocol is one file in `listeners`, with an implementation of [`Listener`] and its declaration, a
//! [`ListenerKind`], and one row in [`LISTENERS`](crate::listeners::LISTENERS). Everything else is the same for all of
//! them. The server accepts connections, limits their number, encrypts them, runs the worker threads, reports metrics
//! and readiness, and shuts down. The command has an option for the address, and one for the file with the secret,
//! opens the socket, refuses to start if other machines could reach it without the secret, and prints the example.
//!
//! ```text
//!   LISTENERS ─▶ ListenerKind::build(state) ─▶ Listener::serve(stream, peer, context)
//!                                                 ▲                       │   one task per connection, on a worker thread
//!                accept.rs ───────────────────────┘                       └─ shutdown signal, receive budget, evictable slot
//! ```
//!
//! A listener gets the stream itself, so it can speak any protocol on it. Those that speak HTTP/1.1 pass it to
//! [`connection::serve`](crate::listeners::http::connection::serve) with a handler whose response bodies may be
//! streams.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

use tidegate::gateway::GatewaySettings;

use crate::auth_guard::AuthGuard;
use crate::budget::{EvictingBudget, Receiving, Reservation};
use crate::decider::Decider;
use crate::metrics::{HTTP_ERRORS, ListenerStats, Metrics};
use crate::readiness::Readiness;
use crate::run::ServerOptions;
use crate::secret::SecretForm;
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

/// The declaration of a listener, from which its options, its messages and its treatment follow.
#[derive(Clone, Copy, Debug)]
pub struct ListenerKind {
    /// The name in logs, metrics, messages and `/readyz`, and the option of `tidegate serve` that sets the address.
    pub name: &'static str,
    /// The listener in help texts, after "Address of", such as `the RESP listener, for Redis clients`.
    pub help: &'static str,
    /// The address if neither the option nor the configuration sets one: `HOST:PORT`, or `off`.
    pub default_address: &'static str,
    /// The setting of the configuration file for the address. `None` if there is none.
    pub address_setting: Option<AddressSetting>,
    /// The users of the listener.
    pub role: Role,
    /// Whether it decides requests that other programs serve, so that it sees only what these report of their outcome.
    pub decides_for_others: bool,
    /// The secret that clients must send. `None` if the protocol has none.
    pub secret: Option<SecretKind>,
    /// A command that tries the listener. In it, `{url}`, `{ip}` and `{port}` are replaced by the address of the
    /// listener, `{tls}` by ` --tls` if it is encrypted, and `{auth}` by the option with which curl sends its token.
    pub example: &'static str,
    /// Creates the listener when the server starts.
    pub(crate) build: fn(&ServerState) -> Arc<dyn Listener>,
}

impl ListenerKind {
    /// Returns whether connections to `address` are encrypted if the server has a certificate.
    ///
    /// False only for an operator's listener on a loopback address.
    pub fn encrypts(&self, address: SocketAddr) -> bool {
        self.role == Role::Service || !is_loopback(address.ip())
    }
}

/// A setting of the configuration file for the address of a listener.
#[derive(Clone, Copy, Debug)]
pub struct AddressSetting {
    /// The setting in help texts, such as `` `listen` of `[gateway]` ``.
    pub help: &'static str,
    /// Returns the address, or `None` if it is not set.
    pub read: fn(&GatewaySettings) -> Option<&str>,
}

/// The secret of a kind of listener, and where the operator sets it.
///
/// If the operator sets none, the command starts only if no other machine can reach the listener. For one of role
/// [`Service`](Role::Service), `--insecure` allows it anywhere; for one of role [`Operator`](Role::Operator), a token is
/// generated.
#[derive(Clone, Copy, Debug)]
pub struct SecretKind {
    /// The form of the secret.
    pub form: SecretForm,
    /// Who sends it, in help texts after "the password that", such as `Redis clients must send`.
    pub help: &'static str,
    /// The environment variable with the secret.
    pub variable: &'static str,
    /// The option with the file that contains the secret, without dashes.
    pub option: &'static str,
}

/// The users of a listener. Determines its connection limit, and when it closes during a shutdown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Clients. At most `Bounds::connections` connections; one more is rejected.
    Service,
    /// The operator and probes. At most `Bounds::admin_connections` connections; one more evicts the connection that
    /// was idle for longest. It keeps a few file descriptors in reserve, is not encrypted on a loopback address, and
    /// closes after all listeners of role `Service`.
    Operator,
}

/// Returns whether `address` is a loopback address (127.0.0.0/8, `::1`), also if it is mapped from IPv4 to IPv6.
///
/// Only this machine can reach such an address.
pub fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
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
