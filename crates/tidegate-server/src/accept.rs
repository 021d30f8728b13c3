//! Accepts connections: never more than the limit, none that takes too long for its TLS handshake, and none after the
//! listener has begun to close.
//!
//! Accepting is cheap and serving is not. So connections are accepted in batches and handed to the
//! [worker pool](crate::worker_pool), which starts to serve a few of them at a time. A burst of connections waits there
//! and does not delay the connections that are being served.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpStream as StdTcpStream};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::address_slots::{AddressSlot, AddressSlots};
use crate::budget::{EvictingBudget, Receiving, Reservation};
use crate::listener::{ConnectionContext, Listener, ListenerKind, Role, ServerState};
use crate::log_limit::LogLimit;
use crate::proxy_protocol;
use crate::shutdown::Shutdown;
use crate::stream::ClientStream;
use crate::tls::{Alpn, Tls};
use crate::worker_pool::WorkerPool;

/// The pause after a failure to accept, such as a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The least time between two warnings about failures to accept: there may be one failure for each pause.
const ACCEPT_WARNING_INTERVAL: Duration = Duration::from_secs(10);
/// The number of connections that are accepted before other tasks run.
const ACCEPT_BATCH: usize = 64;
/// The time limit for the PROXY protocol header, and separately for the TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection over the limit may take to receive the reply that says so.
const OVER_LIMIT_TIMEOUT: Duration = Duration::from_millis(10);
/// How long an evicted connection has to end. Its worker thread may be busy.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(1);
/// File descriptors that a listener for the operator keeps in reserve, so that this many probes are answered when the
/// process has no others.
const OPERATOR_SPARE_DESCRIPTORS: usize = 4;

/// A connection that was accepted, and the address of its client.
type Accepted = (StdTcpStream, SocketAddr);

/// The accept task of one listener: its connection slots, receive budget, TLS certificate and worker pool.
struct Acceptor {
    listener: Arc<dyn Listener>,
    slots: ConnectionSlots,
    clients: Arc<ClientAdmission>,
    spares: Arc<SpareDescriptors>,
    /// Bounds the bytes that all connections together hold of requests that are not complete.
    receive_budget: Arc<EvictingBudget>,
    grace: Duration,
    tls: Option<Tls>,
    workers: Arc<WorkerPool>,
}

/// Accepts connections on `socket` and serves them on `workers`, until `shutdown` reaches `Closing`.
///
/// Then accepts and serves the connections that already wait, closes `socket`, and waits until all connections have
/// ended, for at most `Bounds::grace`. Logs a warning if some are left; they are not closed here.
///
/// If `socket` cannot be used, logs an error and returns. If the task ends before the instance shuts down, the instance
/// is not ready any more, and `/readyz` names the listener.
pub(crate) async fn accept(
    kind: &'static ListenerKind,
    listener: Arc<dyn Listener>,
    socket: TcpListener,
    shared: Arc<ServerState>,
    workers: Arc<WorkerPool>,
    shutdown: Shutdown,
) {
    let _guard = shared.readiness.guard(listener.name());
    Acceptor::new(kind, listener, &socket, &shared, workers).run(socket, shutdown).await;
}

impl Acceptor {
    /// Creates an acceptor with the limits of the listener's [`Role`].
    ///
    /// For [`Role::Operator`], idle connections are evicted, and four file descriptors are kept in reserve.
    ///
    /// # Panics
    /// If the limit on connections exceeds [`Semaphore::MAX_PERMITS`].
    fn new(
        kind: &ListenerKind,
        listener: Arc<dyn Listener>,
        socket: &TcpListener,
        shared: &ServerState,
        workers: Arc<WorkerPool>,
    ) -> Acceptor {
        let (bounds, evictions) = (&shared.options.bounds, &listener.stats().connections.evicted);
        let is_encrypted = socket.local_addr().map_or(true, |address| kind.encrypts(address));
        let (slots, spares) = match kind.role {
            Role::Service => (ConnectionSlots::new(bounds.connections), Arc::default()),
            Role::Operator => {
                let slots = ConnectionSlots::evicting(bounds.admin_connections, Arc::clone(evictions));
                (slots, SpareDescriptors::new(OPERATOR_SPARE_DESCRIPTORS))
            }
        };
        Acceptor {
            slots,
            clients: Arc::default(),
            spares,
            receive_budget: EvictingBudget::new(bounds.receive_bytes, evictions.clone()),
            grace: bounds.grace,
            tls: shared.options.tls.clone().filter(|_| is_encrypted),
            workers,
            listener,
        }
    }

    async fn run(self, socket: TcpListener, shutdown: Shutdown) {
        let name = self.listener.name();
        let mut accepting = match AcceptLoop::new(socket, self.spares.clone()) {
            Ok(accepting) => accepting,
            Err(error) => return tracing::error!(listener = name, %error, "cannot use the listening socket"),
        };
        let mut closing = pin!(shutdown.clone().closing());
        loop {
            let accepted = tokio::select! {
                accepted = accepting.accept() => accepted,
                () = &mut closing => break,
            };
            match accepted {
                Ok(accepted) => self.admit(accepted, &shutdown).await,
                Err(error) => {
                    self.slots.evict_idle();
                    accepting.pause(name, &error).await;
                }
            }
        }
        // The kernel has completed these connections, and their clients may have sent a request. Closing the listening
        // socket would reset them.
        while let Ok(Some(accepted)) = accepting.accept_waiting() {
            self.admit(accepted, &shutdown).await;
        }
        drop(accepting);
        if tokio::time::timeout(self.grace, self.slots.all_free()).await.is_err() {
            tracing::warn!(listener = name, "dropping connections that did not finish within the grace period");
        }
    }

    /// Takes a slot for a connection and starts to serve it on the worker pool, without waiting for its end.
    ///
    /// A TLS handshake is part of serving it, and so is logging an error of the connection at debug level.
    ///
    /// If no slot can be taken, counts the connection as refused and [rejects](Self::reject) it. Waits up to a second
    /// for a slot if idle connections can be evicted.
    async fn admit(&self, (stream, peer): Accepted, shutdown: &Shutdown) {
        let _ = stream.set_nodelay(true);
        let Some((permit, slot)) = self.slots.take().await else {
            self.listener.stats().connections.count_refused();
            return self.reject(stream).await;
        };
        let (listener, tls, clients) = (self.listener.clone(), self.tls.clone(), self.clients.clone());
        let receiving = Receiving::new(self.receive_budget.clone());
        let stats = listener.stats().clone();
        let context = ConnectionContext { shutdown: shutdown.clone(), receiving, slot, stats };
        let (open, spares) = (listener.stats().connections.open(), self.spares.clone());
        self.workers.serve(move || async move {
            if let Ok(stream) = TcpStream::from_std(stream)
                && let Some((stream, client, _slot)) = clients.admit(stream, peer, &*listener, tls.is_some()).await
                && let Some(stream) = handshake(stream, tls, listener.alpn()).await
            {
                let name = listener.name();
                if let Err(error) = listener.serve(stream, client, context).await {
                    tracing::debug!(listener = name, %error, "connection failed");
                }
            }
            // Before anything else can take the connection's descriptor.
            spares.refill();
            drop((open, permit));
        });
    }

    /// Rejects a connection for which there is no slot, as [`reject`] does.
    async fn reject(&self, stream: StdTcpStream) {
        if let Ok(stream) = TcpStream::from_std(stream) {
            reject(stream, &*self.listener, self.tls.is_some()).await;
        }
    }
}

/// Sends the listener's over-limit reply, waiting at most 10 ms, and closes the connection.
///
/// Sends nothing if the connection is to be encrypted.
async fn reject(mut stream: TcpStream, listener: &dyn Listener, is_encrypted: bool) {
    if !is_encrypted {
        let _ = tokio::time::timeout(OVER_LIMIT_TIMEOUT, stream.write_all(listener.over_limit_reply())).await;
    }
}

/// Determines the client of each new connection, and limits the connections per client.
#[derive(Default)]
struct ClientAdmission {
    addresses: Arc<AddressSlots>,
    log: LogLimit,
}

impl ClientAdmission {
    /// Determines the client of a connection from `peer`, and takes a slot if the client's connections are limited.
    ///
    /// Reads the PROXY protocol header if the listener expects one from `peer`. Returns the stream after it, and the
    /// address of the client: that of the header, or `peer`.
    ///
    /// Returns `None` if the header is invalid or takes longer than 10 s, which is logged, or if the client has too many
    /// connections, which is counted and [answered](reject).
    async fn admit(
        &self,
        mut stream: TcpStream,
        peer: SocketAddr,
        listener: &dyn Listener,
        is_encrypted: bool,
    ) -> Option<(TcpStream, SocketAddr, Option<AddressSlot>)> {
        let (mut client, mut policy) = (peer, listener.peer_policy(peer.ip()));
        if policy.expects_proxy_header {
            let header = tokio::time::timeout(HANDSHAKE_TIMEOUT, proxy_protocol::read_header(&mut stream)).await;
            let reason = match header {
                Ok(Ok(None)) => None,
                Ok(Ok(Some(address))) => {
                    (client, policy) = (address, listener.peer_policy(address.ip()));
                    None
                }
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("the PROXY protocol header took too long".to_owned()),
            };
            if let Some(reason) = reason {
                if let Some(suppressed) = self.log.admit() {
                    let name = listener.name();
                    tracing::warn!(listener = name, suppressed, "closed a connection from a trusted proxy: {reason}");
                }
                return None;
            }
        }
        let Some(max) = policy.connections_max else { return Some((stream, client, None)) };
        match self.addresses.take(client.ip(), max) {
            Some(slot) => Some((stream, client, Some(slot))),
            None => {
                listener.stats().connections.count_refused();
                reject(stream, listener, is_encrypted).await;
                None
            }
        }
    }
}

/// A listening socket from which connections are accepted in batches, if necessary with spare file descriptors.
struct AcceptLoop {
    socket: TcpListener,
    /// The same socket, for connections that wait already. These are served by another runtime, so the runtime of
    /// `socket` need not register them.
    direct: std::net::TcpListener,
    /// The number of connections accepted since other tasks ran.
    batch: usize,
    spares: Arc<SpareDescriptors>,
    warned_at: Option<Instant>,
}

impl AcceptLoop {
    fn new(socket: TcpListener, spares: Arc<SpareDescriptors>) -> io::Result<AcceptLoop> {
        let socket = socket.into_std()?;
        let direct = socket.try_clone()?;
        let socket = TcpListener::from_std(socket)?;
        Ok(AcceptLoop { socket, direct, batch: 0, spares, warned_at: None })
    }

    /// Waits for a connection and returns it, in non-blocking mode. Skips connections that their clients have aborted.
    ///
    /// If the process has no file descriptor left, closes a spare one to accept the connection. Tries to open closed
    /// spares again after each connection. Lets other tasks run after 64 connections in a row without a wait. Cancel
    /// safe: no connection is lost if the future is dropped.
    ///
    /// # Errors
    /// If accepting fails for a reason other than an aborted connection. For a lack of file descriptors, only if there
    /// is no spare one, or closing it does not help.
    async fn accept(&mut self) -> io::Result<Accepted> {
        loop {
            if self.batch == ACCEPT_BATCH {
                self.batch = 0;
                tokio::task::yield_now().await;
            }
            let accepted = match self.accept_waiting() {
                Ok(Some(accepted)) => Ok(accepted),
                // Without descriptors it is unknown whether a connection waits.
                Ok(None) | Err(_) => {
                    self.batch = 0;
                    poll_fn(|cx| self.poll_accept(cx)).await
                }
            };
            match accepted {
                Ok(accepted) => {
                    self.spares.refill();
                    self.batch += 1;
                    return Ok(accepted);
                }
                Err(error) if is_client_abort(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Polls for a connection. If the process has no file descriptor left, closes a spare one and tries once more.
    ///
    /// Opens the spare again only if the second attempt has to wait. Otherwise the caller must refill the spares.
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Accepted>> {
        let accept = |cx: &mut Context<'_>| match ready!(self.socket.poll_accept(cx)) {
            Ok((stream, peer)) => Poll::Ready(stream.into_std().map(|stream| (stream, peer))),
            Err(error) => Poll::Ready(Err(error)),
        };
        match accept(cx) {
            Poll::Ready(Err(error)) if is_out_of_descriptors(&error) && self.spares.close_one() => {
                let accepted = accept(cx);
                if accepted.is_pending() {
                    self.spares.refill();
                }
                accepted
            }
            accepted => accepted,
        }
    }

    /// Returns a connection that can be accepted without waiting, in non-blocking mode, or `None` if there is none.
    fn accept_waiting(&self) -> io::Result<Option<Accepted>> {
        match self.direct.accept() {
            Ok((stream, peer)) => stream.set_nonblocking(true).map(|()| Some((stream, peer))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sleeps for 50 ms after a failure to accept. Logs the error unless one was logged in the last ten seconds.
    async fn pause(&mut self, name: &'static str, error: &io::Error) {
        let now = Instant::now();
        if self.warned_at.is_none_or(|at| now - at >= ACCEPT_WARNING_INTERVAL) {
            self.warned_at = Some(now);
            tracing::warn!(listener = name, %error, "cannot accept connections");
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

/// Open file descriptors that are kept in reserve.
///
/// Closing one allows a connection to be accepted when the process has no other descriptor left.
#[derive(Debug, Default)]
struct SpareDescriptors {
    max: usize,
    files: Mutex<Vec<std::fs::File>>,
}

impl SpareDescriptors {
    fn new(max: usize) -> Arc<SpareDescriptors> {
        let spares = Arc::new(SpareDescriptors { max, files: Mutex::default() });
        spares.refill();
        spares
    }

    /// Closes one spare descriptor. Returns false if there is none.
    fn close_one(&self) -> bool {
        self.files.lock().pop().is_some()
    }

    /// Opens spare descriptors until there are `max` of them, or opening one fails.
    fn refill(&self) {
        let mut files = self.files.lock();
        while files.len() < self.max
            && let Ok(file) = std::fs::File::open("/dev/null")
        {
            files.push(file);
        }
    }
}

/// Returns whether the error means that the process or the machine has no file descriptor left (`EMFILE`, `ENFILE`).
fn is_out_of_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Returns whether accepting failed only because the client aborted its connection. The next one can be accepted.
fn is_client_abort(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
}

/// The slots of a listener: one for each open connection, up to `max_connections`.
struct ConnectionSlots {
    max_connections: usize,
    permits: Arc<Semaphore>,
    /// The same slots as a budget that evicts idle connections; `None` if a connection over the limit is rejected.
    evictable: Option<Arc<EvictingBudget>>,
}

impl ConnectionSlots {
    fn new(max_connections: usize) -> ConnectionSlots {
        ConnectionSlots { max_connections, permits: Arc::new(Semaphore::new(max_connections)), evictable: None }
    }

    /// Creates slots that evict an idle connection when all are taken. Each eviction adds one to `evictions`.
    fn evicting(max_connections: usize, evictions: Arc<std::sync::atomic::AtomicU64>) -> ConnectionSlots {
        let evictable = Some(EvictingBudget::new(max_connections, evictions));
        ConnectionSlots { evictable, ..ConnectionSlots::new(max_connections) }
    }

    /// Takes a slot.
    ///
    /// Returns a permit, which occupies it until dropped, and a reservation if the connection can be evicted.
    ///
    /// If all slots are taken and connections can be evicted, evicts the one that was idle for longest and waits up to
    /// a second for its slot. Returns `None` if there is no slot after that; at once if connections cannot be evicted,
    /// or all of them are being served.
    async fn take(&self) -> Option<(OwnedSemaphorePermit, Option<Reservation>)> {
        let Some(evictable) = &self.evictable else {
            return Some((self.permits.clone().try_acquire_owned().ok()?, None));
        };
        let taking = async {
            let slot = evictable.reserve(1).await?;
            Some((self.permits.clone().acquire_owned().await.ok()?, Some(slot)))
        };
        tokio::time::timeout(EVICTION_TIMEOUT, taking).await.ok()?
    }

    /// Evicts the connection that was idle for longest, so that its file descriptor becomes free.
    ///
    /// Does nothing if the slots do not evict, or at most one connection is open.
    fn evict_idle(&self) {
        if let Some(evictable) = &self.evictable {
            evictable.evict_oldest();
        }
    }

    /// Completes when no connection is open.
    async fn all_free(&self) {
        let all = u32::try_from(self.max_connections).unwrap_or(u32::MAX);
        drop(self.permits.acquire_many(all).await);
    }
}

/// Performs the TLS handshake. Without `tls`, returns the plain stream at once.
///
/// Returns `None` if the handshake fails or takes longer than 10 s, and logs the reason at debug level.
async fn handshake(stream: TcpStream, tls: Option<Tls>, alpn: Alpn) -> Option<ClientStream> {
    let Some(tls) = tls else { return Some(ClientStream::Plain(stream)) };
    // A large future, for which a connection that is not encrypted needs no room.
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, Box::pin(tls.accept(stream, alpn))).await {
        Ok(Ok(stream)) => Some(ClientStream::Tls(Box::new(stream))),
        Ok(Err(error)) => {
            tracing::debug!(%error, "TLS handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!("TLS handshake timed out");
            None
        }
    }
}
