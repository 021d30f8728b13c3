//! Letting connections in: never more than there are places, none that dawdles over its handshake, and none after the doors
//! have begun to close.
//!
//! Accepting is cheap and serving is not, so connections are accepted in batches and handed to the [crew](crate::crew), which
//! takes a few of them at a time. A burst of connections waits there, not in front of those that are being served.

use std::future::{Future, poll_fn};
use std::io;
use std::net::TcpStream as StdTcpStream;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context as TaskContext, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use crate::budget::{Budget, Receiving, Reservation};
use crate::readiness::TaskGuard;
use crate::stream::Stream;
use crate::tls::Tls;
use crate::worker_pool::WorkerPool;

/// After a failure to accept (no file descriptors left, say) the door rests for so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Failures to accept are logged no more often: there may be one for each pause.
const ACCEPT_WARNING_EVERY: Duration = Duration::from_secs(10);
/// Connections that are accepted before other tasks have a turn.
const ACCEPT_BATCH: usize = 64;
/// A client that takes longer to agree on a cipher is not served.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// How long the word that there is no place may take to be said.
const REFUSAL_WITHIN: Duration = Duration::from_millis(10);
/// An evicted connection has ended by then, unless its thread is busy.
const EVICTED_WITHIN: Duration = Duration::from_secs(1);
/// What a connection may hold of a request if it shares nothing.
const RECEIVE_BYTES_ALONE: usize = 1024 * 1024;
/// How long a connection is still served after the doors begin to close, if its client asks for nothing. A client that asks
/// more often than this gets an answer together with the end of the connection. A client that asks
/// less often may be sending a request at the very moment of the end, which it then sees unanswered.
const LAST_CALL: Duration = Duration::from_millis(500);

/// What a door counts of its connections.
#[derive(Debug, Default)]
pub(crate) struct ListenerCounts {
    open: AtomicU64,
    accepted: AtomicU64,
    refused: AtomicU64,
    pub(crate) evicted: Arc<AtomicU64>,
}

impl ListenerCounts {
    /// OpenConnection now, accepted ever, refused ever for want of a place, evicted ever to make room for others.
    pub(crate) fn read(&self) -> [u64; 4] {
        [&self.open, &self.accepted, &self.refused, &self.evicted].map(|count| count.load(Ordering::Relaxed))
    }
}

/// How a door lets clients in.
pub(crate) struct Acceptor {
    /// For logs.
    pub(crate) door: &'static str,
    pub(crate) places: usize,
    /// Evicts the idle connection that was served longest ago when there is no place for a new one.
    pub(crate) evicts_idle: bool,
    pub(crate) spares: Arc<SpareDescriptors>,
    /// For what is being received on all connections together.
    pub(crate) receive_budget: Arc<Budget>,
    pub(crate) grace: Duration,
    /// What a client is told for whom there is no place. Not said over TLS, where it would be noise.
    pub(crate) refusal: &'static [u8],
    pub(crate) tls: Option<Tls>,
    pub(crate) counts: Arc<ListenerCounts>,
    /// Who serves those who are in.
    pub(crate) crew: Arc<WorkerPool>,
    /// Goes with the door, whatever ends it.
    pub(crate) _attended: TaskGuard,
}

/// How far the doors are on their way to being closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ShutdownStage {
    OpenConnection,
    /// Everybody is served, and told not to ask here again where the protocol has a word for it.
    Leaving,
    /// Nobody new is let in, and what has arrived is answered last.
    Closing,
}

/// What a door knows about its closing.
#[derive(Clone)]
pub(crate) struct Closing(watch::Receiver<ShutdownStage>);

impl Closing {
    /// The sender tells the stage. Its going away is closing too.
    pub(crate) fn channel() -> (watch::Sender<ShutdownStage>, Closing) {
        let (tell, stage) = watch::channel(ShutdownStage::OpenConnection);
        (tell, Closing(stage))
    }

    /// Whether an answer should be the last on its connection. Asked for each: looking whether anything was told since the doors
    /// opened locks nothing, and this value never takes note of it.
    pub(crate) fn is_leaving(&self) -> bool {
        self.0.has_changed().unwrap_or(true)
    }

    /// Returns whether the doors have begun to close.
    pub(crate) fn is_closing(&self) -> bool {
        self.is_leaving() && (*self.0.borrow() == ShutdownStage::Closing || self.0.has_changed().is_err())
    }

    /// Completes when the doors begin to close.
    pub(crate) async fn begun(mut self) {
        // An error means that the sender is gone.
        let _ = self.0.wait_for(|stage| *stage == ShutdownStage::Closing).await;
    }

    /// Completes when an idle connection is to end: a little after the doors begin to close.
    pub(crate) async fn last_call(self) {
        self.begun().await;
        tokio::time::sleep(LAST_CALL).await;
    }
}

/// What a connection shares with the others of its listener.
pub(crate) struct Context {
    pub(crate) closing: Closing,
    pub(crate) receiving: Receiving,
    /// The connection's place, if it can be evicted from it while it is idle.
    pub(crate) place: Option<Reservation>,
}

impl Context {
    /// For a connection that shares nothing, and the sender that tells it the stage.
    pub(crate) fn alone() -> (watch::Sender<ShutdownStage>, Context) {
        let (tell, closing) = Closing::channel();
        let receiving = Receiving::new(Budget::new(RECEIVE_BYTES_ALONE, Arc::default()));
        (tell, Context { closing, receiving, place: None })
    }
}

/// Serves one connection.
pub(crate) type Serving = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Lets connections in until the doors close, then waits for them.
pub(crate) async fn accept<S>(listener: TcpListener, gate: Acceptor, closing: Closing, serve: S)
where
    S: Fn(Stream, Context) -> Serving + Clone + Send + 'static,
{
    let mut acceptor = match AcceptLoop::new(listener, gate.spares.clone()) {
        Ok(acceptor) => acceptor,
        Err(error) => return tracing::error!(door = gate.door, %error, "the listener cannot be used"),
    };
    let places = ConnectionPermits::new(&gate);
    let mut begun = pin!(closing.clone().begun());
    loop {
        let accepted = tokio::select! {
            accepted = acceptor.accept() => accepted,
            () = &mut begun => break,
        };
        match accepted {
            Ok(stream) => admit(stream, &places, &gate, &closing, &serve).await,
            Err(error) => {
                places.evict_idle();
                acceptor.rest(gate.door, &error).await;
            }
        }
    }
    // The kernel has completed these connections, and their clients may have sent a request. To close the listener would reset them.
    while let Ok(Some(stream)) = acceptor.accept_waiting() {
        admit(stream, &places, &gate, &closing, &serve).await;
    }
    drop(acceptor);
    let everybody = places.all.acquire_many(u32::try_from(gate.places).unwrap_or(u32::MAX));
    if tokio::time::timeout(gate.grace, everybody).await.is_err() {
        tracing::warn!(door = gate.door, "some connections did not finish in time and were dropped");
    }
}

/// Hands a connection to the crew, or refuses it.
async fn admit<S>(stream: StdTcpStream, places: &ConnectionPermits, gate: &Acceptor, closing: &Closing, serve: &S)
where
    S: Fn(Stream, Context) -> Serving + Clone + Send + 'static,
{
    let _ = stream.set_nodelay(true);
    let Some((permit, place)) = places.take().await else {
        gate.counts.refused.fetch_add(1, Ordering::Relaxed);
        return refuse(stream, gate).await;
    };
    let (serve, tls) = (serve.clone(), gate.tls.clone());
    let receiving = Receiving::new(gate.receive_budget.clone());
    let context = Context { closing: closing.clone(), receiving, place };
    let (open, spares) = (OpenConnection::new(gate.counts.clone()), gate.spares.clone());
    gate.crew.serve(move || async move {
        if let Ok(stream) = TcpStream::from_std(stream)
            && let Some(stream) = handshake(stream, tls).await
        {
            serve(stream, context).await;
        }
        // Before anything else can take the connection's descriptor.
        spares.refill();
        drop((open, permit));
    });
}

/// A listener.
struct AcceptLoop {
    listener: TcpListener,
    /// The same socket, for connections that wait already. The runtime of `listener` need not know of these: they are served by
    /// another.
    direct: std::net::TcpListener,
    /// Connections accepted since other tasks had a turn.
    batch: usize,
    spares: Arc<SpareDescriptors>,
    warned_at: Option<Instant>,
}

impl AcceptLoop {
    fn new(listener: TcpListener, spares: Arc<SpareDescriptors>) -> io::Result<AcceptLoop> {
        let listener = listener.into_std()?;
        let direct = listener.try_clone()?;
        let listener = TcpListener::from_std(listener)?;
        Ok(AcceptLoop { listener, direct, batch: 0, spares, warned_at: None })
    }

    async fn accept(&mut self) -> io::Result<StdTcpStream> {
        loop {
            if self.batch == ACCEPT_BATCH {
                self.batch = 0;
                tokio::task::yield_now().await;
            }
            let accepted = match self.accept_waiting() {
                Ok(Some(stream)) => Ok(stream),
                // Without descriptors it cannot be told whether a connection waits.
                Ok(None) | Err(_) => {
                    self.batch = 0;
                    poll_fn(|cx| self.poll_accept(cx)).await
                }
            };
            match accepted {
                Ok(stream) => {
                    self.spares.refill();
                    self.batch += 1;
                    return Ok(stream);
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for a connection. If there are no descriptors left, accepts it with a spare one.
    fn poll_accept(&self, cx: &mut TaskContext<'_>) -> Poll<io::Result<StdTcpStream>> {
        let accept = |cx: &mut TaskContext<'_>| match ready!(self.listener.poll_accept(cx)) {
            Ok((stream, _)) => Poll::Ready(stream.into_std()),
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

    /// Returns a connection that can be accepted without waiting.
    fn accept_waiting(&self) -> io::Result<Option<StdTcpStream>> {
        match self.direct.accept() {
            Ok((stream, _)) => stream.set_nonblocking(true).map(|()| Some(stream)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits a moment after a failure.
    async fn rest(&mut self, door: &'static str, error: &io::Error) {
        let now = Instant::now();
        if self.warned_at.is_none_or(|at| now - at >= ACCEPT_WARNING_EVERY) {
            self.warned_at = Some(now);
            tracing::warn!(door, %error, "connections cannot be accepted");
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

/// Descriptors that are kept to accept connections with when the process has no others.
#[derive(Debug, Default)]
pub(crate) struct SpareDescriptors {
    max: usize,
    files: Mutex<Vec<std::fs::File>>,
}

impl SpareDescriptors {
    pub(crate) fn new(max: usize) -> Arc<SpareDescriptors> {
        let spares = Arc::new(SpareDescriptors { max, files: Mutex::default() });
        spares.refill();
        spares
    }

    fn give_up_one(&self) -> bool {
        self.files.lock().pop().is_some()
    }

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

/// Returns whether the error is about the connection that would have been accepted, which its client has given up.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
}

/// The places of a listener.
struct ConnectionPermits {
    all: Arc<Semaphore>,
    /// Which of them an idle connection can be evicted from.
    evictable: Option<Arc<Budget>>,
}

impl ConnectionPermits {
    fn new(gate: &Acceptor) -> ConnectionPermits {
        let all = Arc::new(Semaphore::new(gate.places));
        ConnectionPermits {
            all,
            evictable: gate.evicts_idle.then(|| Budget::new(gate.places, gate.counts.evicted.clone())),
        }
    }

    /// Takes a place, if need be that of an idle connection. Returns `None` if all are taken and none may be evicted.
    async fn take(&self) -> Option<(tokio::sync::OwnedSemaphorePermit, Option<Reservation>)> {
        let Some(evictable) = &self.evictable else {
            return Some((self.all.clone().try_acquire_owned().ok()?, None));
        };
        let taking = async {
            let place = evictable.reserve(1).await?;
            Some((self.all.clone().acquire_owned().await.ok()?, Some(place)))
        };
        tokio::time::timeout(EVICTED_WITHIN, taking).await.ok()?
    }

    /// Ends an idle connection, so that its descriptor can be used.
    fn evict_idle(&self) {
        if let Some(evictable) = &self.evictable {
            evictable.evict_oldest();
        }
    }
}

/// Counts a connection for as long as it is there.
struct OpenConnection(Arc<ListenerCounts>);

impl OpenConnection {
    fn new(counts: Arc<ListenerCounts>) -> OpenConnection {
        counts.accepted.fetch_add(1, Ordering::Relaxed);
        counts.open.fetch_add(1, Ordering::Relaxed);
        OpenConnection(counts)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn handshake(stream: TcpStream, tls: Option<Tls>) -> Option<Stream> {
    let Some(tls) = tls else { return Some(Stream::Plain(stream)) };
    // A large future, for which a connection that is not encrypted needs no room.
    match tokio::time::timeout(HANDSHAKE_WITHIN, Box::pin(tls.accept(stream))).await {
        Ok(Ok(stream)) => Some(Stream::Tls(Box::new(stream))),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a TLS handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!("a TLS handshake took too long");
            None
        }
    }
}

/// Says that there is no place, if that can be said without waiting.
async fn refuse(stream: StdTcpStream, gate: &Acceptor) {
    if gate.tls.is_none()
        && let Ok(mut stream) = TcpStream::from_std(stream)
    {
        let _ = tokio::time::timeout(REFUSAL_WITHIN, stream.write_all(gate.refusal)).await;
    }
}
