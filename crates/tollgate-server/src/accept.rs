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

use crate::budget::{EvictingBudget, Receiving, Reservation};
use crate::listener::{ConnectionContext, Listener, Role, ServerState};
use crate::listeners::admin::is_loopback;
use crate::shutdown::Shutdown;
use crate::stream::ClientStream;
use crate::tls::Tls;
use crate::worker_pool::WorkerPool;

/// The pause after a failure to accept, such as a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The least time between two warnings about failures to accept: there may be one failure for each pause.
const ACCEPT_WARNING_INTERVAL: Duration = Duration::from_secs(10);
/// The number of connections that are accepted before other tasks run.
const ACCEPT_BATCH: usize = 64;
/// The time that a client has for its TLS handshake.
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

/// Accepts the connections of one listener.
struct Acceptor {
    listener: Arc<dyn Listener>,
    slots: ConnectionSlots,
    spares: Arc<SpareDescriptors>,
    /// Bounds the bytes that all connections together hold of requests that are not complete.
    receive_budget: Arc<EvictingBudget>,
    grace: Duration,
    tls: Option<Tls>,
    workers: Arc<WorkerPool>,
}

/// Accepts the connections of `listener` until `shutdown` closes it, then waits for them to end, up to the grace period.
///
/// If this ends in any other way, `/readyz` reports it.
pub(crate) async fn accept(
    listener: Arc<dyn Listener>,
    socket: TcpListener,
    shared: Arc<ServerState>,
    workers: Arc<WorkerPool>,
    shutdown: Shutdown,
) {
    let _guard = shared.readiness.guard(listener.name());
    Acceptor::new(listener, &socket, &shared, workers).run(socket, shutdown).await;
}

impl Acceptor {
    /// Creates an acceptor with the limits of the listener's [`Role`].
    ///
    /// # Panics
    /// If the limit on connections exceeds what a semaphore can hold.
    fn new(
        listener: Arc<dyn Listener>,
        socket: &TcpListener,
        shared: &ServerState,
        workers: Arc<WorkerPool>,
    ) -> Acceptor {
        let (bounds, evictions) = (&shared.options.bounds, &listener.stats().connections.evicted);
        let is_local = socket.local_addr().is_ok_and(|address| is_loopback(address.ip()));
        let (slots, spares, is_plain) = match listener.role() {
            Role::Service => (ConnectionSlots::new(bounds.connections), Arc::default(), false),
            Role::Operator => {
                let slots = ConnectionSlots::evicting(bounds.admin_connections, Arc::clone(evictions));
                (slots, SpareDescriptors::new(OPERATOR_SPARE_DESCRIPTORS), is_local)
            }
        };
        Acceptor {
            slots,
            spares,
            receive_budget: EvictingBudget::new(bounds.receive_bytes, evictions.clone()),
            grace: bounds.grace,
            tls: shared.options.tls.clone().filter(|_| !is_plain),
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
        // The kernel has completed these connections, and their clients may have sent a request. To close the listening
        // socket would reset them.
        while let Ok(Some(accepted)) = accepting.accept_waiting() {
            self.admit(accepted, &shutdown).await;
        }
        drop(accepting);
        if tokio::time::timeout(self.grace, self.slots.all_free()).await.is_err() {
            tracing::warn!(listener = name, "dropping connections that did not finish within the grace period");
        }
    }

    /// Hands a connection to the worker pool, or rejects it if there is no free slot.
    async fn admit(&self, (stream, peer): Accepted, shutdown: &Shutdown) {
        let _ = stream.set_nodelay(true);
        let Some((permit, slot)) = self.slots.take().await else {
            self.listener.stats().connections.count_refused();
            return self.reject(stream).await;
        };
        let (listener, tls) = (self.listener.clone(), self.tls.clone());
        let receiving = Receiving::new(self.receive_budget.clone());
        let context = ConnectionContext { shutdown: shutdown.clone(), receiving, slot };
        let (open, spares) = (listener.stats().connections.open(), self.spares.clone());
        self.workers.serve(move || async move {
            if let Ok(stream) = TcpStream::from_std(stream)
                && let Some(stream) = handshake(stream, tls).await
            {
                let name = listener.name();
                if let Err(error) = listener.serve(stream, peer, context).await {
                    tracing::debug!(listener = name, %error, "connection failed");
                }
            }
            // Before anything else can take the connection's descriptor.
            spares.refill();
            drop((open, permit));
        });
    }

    /// Sends the reply for a connection over the limit, if that is possible without waiting, and closes the connection.
    async fn reject(&self, stream: StdTcpStream) {
        if self.tls.is_none()
            && let Ok(mut stream) = TcpStream::from_std(stream)
        {
            let reply = self.listener.over_limit_reply();
            let _ = tokio::time::timeout(OVER_LIMIT_TIMEOUT, stream.write_all(reply)).await;
        }
    }
}

/// A listening socket.
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

    /// Waits for a connection. Errors that concern a single connection are skipped.
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
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for a connection. If there are no descriptors left, accepts it with a spare one.
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Accepted>> {
        let accept = |cx: &mut Context<'_>| match ready!(self.socket.poll_accept(cx)) {
            Ok((stream, peer)) => Poll::Ready(stream.into_std().map(|stream| (stream, peer))),
            Err(error) => Poll::Ready(Err(error)),
        };
        match accept(cx) {
            Poll::Ready(Err(error)) if is_out_of_descriptors(&error) && self.spares.give_up_one() => {
                let accepted = accept(cx);
                if accepted.is_pending() {
                    self.spares.refill();
                }
                accepted
            }
            accepted => accepted,
        }
    }

    /// Returns a connection that can be accepted without waiting, or `None` if there is none.
    fn accept_waiting(&self) -> io::Result<Option<Accepted>> {
        match self.direct.accept() {
            Ok((stream, peer)) => stream.set_nonblocking(true).map(|()| Some((stream, peer))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Logs a failure to accept, at most every ten seconds, and waits 50 ms.
    async fn pause(&mut self, name: &'static str, error: &io::Error) {
        let now = Instant::now();
        if self.warned_at.is_none_or(|at| now - at >= ACCEPT_WARNING_INTERVAL) {
            self.warned_at = Some(now);
            tracing::warn!(listener = name, %error, "cannot accept connections");
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

/// File descriptors that are kept to accept connections with when the process has no others.
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

    /// Closes one of the descriptors. Returns false if there is none.
    fn give_up_one(&self) -> bool {
        self.files.lock().pop().is_some()
    }

    /// Opens descriptors up to the maximum, as far as the system has any.
    fn refill(&self) {
        let mut files = self.files.lock();
        while files.len() < self.max
            && let Ok(file) = std::fs::File::open("/dev/null")
        {
            files.push(file);
        }
    }
}

/// Returns whether the process or the machine has no descriptors left.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Returns whether the error concerns only the connection that would have been accepted, which its client has aborted.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
}

/// The limit on the open connections of a listener.
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

    /// Creates slots that idle connections are evicted from, counted in `evictions`.
    fn evicting(max_connections: usize, evictions: Arc<std::sync::atomic::AtomicU64>) -> ConnectionSlots {
        let evictable = Some(EvictingBudget::new(max_connections, evictions));
        ConnectionSlots { evictable, ..ConnectionSlots::new(max_connections) }
    }

    /// Takes a slot, if need be that of the connection that was idle for longest. Returns `None` if all are taken and none
    /// can be evicted within a second.
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

    /// Ends an idle connection, so that its descriptor can be used.
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

/// Performs the TLS handshake if there is a certificate. Returns `None` if it failed or took too long.
async fn handshake(stream: TcpStream, tls: Option<Tls>) -> Option<ClientStream> {
    let Some(tls) = tls else { return Some(ClientStream::Plain(stream)) };
    // A large future, for which a connection that is not encrypted needs no room.
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, Box::pin(tls.accept(stream))).await {
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
