//! A connection to one server.
//!
//! Opening it authenticates, checks what kind of server it is, and loads the script. After that, requests are sent and
//! their replies arrive in the same order: a reply belongs to the oldest request without one. When a request is
//! abandoned, the connection must be dropped too, so that a late reply is never read. Nothing else is needed to keep a
//! late reply from being taken for the reply to another request.
//!
//! **Both ways at once.** Requests are put into an outbox. What the stream does not take at once is sent whenever
//! replies are awaited. So a request never waits for a reply, and a server that does not read its requests does not
//! keep the client from reading its replies. The caller that queues requests bounds their number.

use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tidegate_core::{__io_reason as reason, StoreErrorKind as Kind};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, sleep};

use crate::credentials::Login;
use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::push_command;
use crate::sentinel::answer::NOT_A_SENTINEL;
use crate::tls::{self, Tls};
use crate::url::Endpoint;
use crate::worker::{ServerKind, WorkerSettings};

/// The maximum size of the receive buffer. The largest expected reply is that to a full batch, about 100 kB.
const INBOX_BYTES_MAX: usize = 8 << 20;

/// The message of a server in cluster mode behind the URL of a single server.
const CLUSTER_NODE: &str = "the server is a node of a Redis Cluster (cluster_enabled:1), which cannot be used with a redis:// or \
    rediss:// URL, because the node holds only part of the keys; use redis+cluster://, or a server with `cluster-enabled no`";

/// The error message for a Sentinel behind a URL that is not `redis+sentinel://`.
const SENTINEL: &str = "the server is a Sentinel, which holds no keys; use redis+sentinel://host:port/NAME";

/// A byte stream to the server: TCP, TLS, or what a [`Connector`] opened.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// A function that opens a stream to the server, in place of TCP and TLS. See `RedisStoreBuilder::connector`.
pub(crate) type Connector = Arc<dyn Fn(&Endpoint) -> BoxFuture<'static, io::Result<Box<dyn Stream>>> + Send + Sync>;

/// An open connection to the server: authenticated, with the database selected and the script loaded.
pub(crate) struct Connection {
    stream: Box<dyn Stream>,
    /// The received bytes that were not parsed yet.
    inbox: Vec<u8>,
    /// Requests, of which the first `sent` bytes were written to the stream.
    outbox: Vec<u8>,
    sent: usize,
    /// Whether the stream was flushed since the last write.
    is_flushed: bool,
    script_sha: String,
}

impl Connection {
    /// Connects, authenticates, selects the database, loads the script, and checks that the server is of this kind.
    ///
    /// For a Sentinel, no script is loaded.
    ///
    /// `until` is the time at which the caller gives up. It is used to divide the time among the server's addresses;
    /// the caller must enforce it with a timeout. With a connector, TLS is not used.
    ///
    /// # Errors
    /// Returns a fault if a step fails. An I/O error has the kind `Unreachable`, because no check was sent yet; an
    /// error reply has the kind that [`Fault::of_reply`] gives it. A replica has the kind `Unavailable`, a node of a
    /// cluster the kind `Unsupported`, and an invalid reply the kind `Protocol`.
    pub(crate) async fn open(
        endpoint: &Endpoint,
        settings: &WorkerSettings,
        kind: ServerKind,
        until: Instant,
    ) -> Result<Connection, Fault> {
        let stream = match &settings.connector {
            Some(connect) => connect(endpoint).await.map_err(unreachable)?,
            None => connect_tcp(endpoint, settings.tls.as_ref(), until).await?,
        };
        let (inbox, outbox, script_sha) = (Vec::new(), Vec::new(), String::new());
        let mut connection = Connection { stream, inbox, outbox, sent: 0, is_flushed: true, script_sha };
        let credentials = match kind {
            ServerKind::Sentinel => &settings.sentinel_credentials,
            ServerKind::Standalone | ServerKind::Master | ServerKind::ClusterNode => &settings.credentials,
        };
        let login = credentials.login(endpoint).await?;
        connection.prepare(endpoint, login.as_ref(), settings, kind).await.map_err(|fault| {
            match fault.kind {
                // No check has been sent yet, so nothing was executed.
                Kind::Interrupted | Kind::TimedOut => Fault::new(Kind::Unreachable, fault.message),
                _ => fault,
            }
        })?;
        Ok(connection)
    }

    /// Sends `AUTH`, `HELLO`, `SELECT`, `CLIENT SETNAME`, `ROLE` and `SCRIPT LOAD` together, and checks their replies.
    ///
    /// `AUTH` is left out without a password, `SELECT` for database 0, `ROLE` for a node of a cluster, and `ROLE` and
    /// `SCRIPT LOAD` for a Sentinel. Stores the SHA-1 of the script.
    ///
    /// # Errors
    /// Returns the fault of the first command that fails, or whose reply shows that the server is not of this kind, such
    /// as a replica, a node of a cluster, or a Sentinel. Also returns a fault if `SCRIPT LOAD` returns no SHA-1. `HELLO`,
    /// `CLIENT SETNAME` and `ROLE` may fail, unless the reply shows that the server is unavailable or requires a
    /// password.
    async fn prepare(
        &mut self,
        endpoint: &Endpoint,
        login: Option<&Login>,
        settings: &WorkerSettings,
        kind: ServerKind,
    ) -> Result<(), Fault> {
        let (has_keys, reports_role) = match kind {
            ServerKind::Standalone | ServerKind::Master => (true, true),
            ServerKind::ClusterNode => (true, false),
            ServerKind::Sentinel => (false, false),
        };
        let mut request = Vec::with_capacity(settings.script.len() + 512);
        let mut push = |parts: &[&str]| push_command(&mut request, parts);
        match login {
            Some(Login { user: Some(user), password }) => push(&["AUTH", user, password]),
            Some(Login { user: None, password }) => push(&["AUTH", password]),
            None => {}
        }
        // Before SELECT, which a node of a cluster rejects.
        push(&["HELLO"]);
        if endpoint.database != 0 {
            push(&["SELECT", &endpoint.database.to_string()]);
        }
        push(&["CLIENT", "SETNAME", "tidegate"]);
        if reports_role {
            push(&["ROLE"]);
        }
        if has_keys {
            push(&["SCRIPT", "LOAD", settings.script]);
        }
        self.queue(&request);

        let first = self.receive_greeting(login.is_some()).await;
        let first = first.map_err(|fault| self.explain_no_reply(fault, settings, kind))?;
        let hello = if login.is_some() { self.receive_greeting(false).await? } else { first };
        match (kind, hello.field("mode")) {
            (ServerKind::Standalone, Some("cluster")) => return Err(Fault::new(Kind::Unsupported, CLUSTER_NODE)),
            (ServerKind::Sentinel, Some("sentinel")) => {}
            (ServerKind::Sentinel, Some(_)) => return Err(Fault::new(Kind::Unsupported, NOT_A_SENTINEL)),
            (_, Some("sentinel")) => return Err(Fault::new(Kind::Unsupported, SENTINEL)),
            _ => {}
        }
        if endpoint.database != 0 {
            self.receive_greeting(true).await?;
        }
        self.receive_greeting(false).await?;
        if reports_role && self.receive_greeting(false).await?.items().first().and_then(Reply::as_text) == Some("slave")
        {
            return Err(Fault::of_reply("READONLY"));
        }
        if has_keys {
            match self.receive_greeting(true).await?.as_text() {
                Some(sha) if sha.len() == 40 => self.script_sha = sha.into(),
                _ => return Err(Fault::new(Kind::Protocol, "SCRIPT LOAD returned no SHA-1 digest")),
            }
        }
        Ok(())
    }

    /// Receives the reply to a command of the greeting. A restricted user may not be allowed to run one that is not
    /// required, so its error reply is returned like any other.
    ///
    /// # Errors
    /// Returns the fault of an error reply if the command is required, or if the server returns the error to any command:
    /// it has no free connections, or requires a password. Also returns a fault if receiving fails.
    async fn receive_greeting(&mut self, is_required: bool) -> Result<Reply, Fault> {
        let reply = self.receive().await?;
        if let Reply::Error(message) = &reply {
            let fault = Fault::of_reply(message);
            if is_required || fault.kind == Kind::Unavailable || message.starts_with("NOAUTH") {
                return Err(fault);
            }
        }
        Ok(reply)
    }

    /// Adds the probable reason to the fault of a connection that fails before the first reply: one side uses TLS and
    /// the other does not, or a client certificate is missing.
    fn explain_no_reply(&self, fault: Fault, settings: &WorkerSettings, kind: ServerKind) -> Fault {
        let (server, schemes) = match kind {
            ServerKind::Standalone | ServerKind::Master => ("server", "rediss:// or rediss+sentinel://"),
            ServerKind::ClusterNode => ("server", "rediss+cluster://"),
            ServerKind::Sentinel => ("Sentinel", "rediss+sentinel://"),
        };
        let hint = match &settings.tls {
            _ if settings.connector.is_some() => return fault,
            // The first bytes of a TLS alert.
            None if self.inbox.starts_with(&[0x15, 0x03]) => {
                return Fault::new(Kind::Unreachable, format!("the {server} expects TLS; use {schemes}"));
            }
            None => format!("if the port expects TLS, use {schemes}"),
            Some(tls) if !tls.has_client_certificate() => format!("the {server} may require a client certificate"),
            Some(_) => format!("the {server} may reject the client certificate"),
        };
        match fault.kind {
            Kind::Interrupted => Fault::new(fault.kind, format!("{} before the first reply; {hint}", fault.message)),
            _ => fault,
        }
    }

    /// Returns the SHA-1 under which the server has cached the script: 40 hex digits.
    pub(crate) fn script_sha(&self) -> &str {
        &self.script_sha
    }

    /// Returns whether bytes were received that are not part of a reply which [`Connection::receive`] has returned.
    pub(crate) fn has_unread_bytes(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Waits until the server closes the connection, the stream fails, or the server sends a byte, which is discarded.
    ///
    /// For an idle connection: no request may be without a reply. The connection must be dropped when this returns.
    /// Cancel safe: if the future is dropped before, the connection stays usable.
    pub(crate) async fn closed_or_readable(&mut self) {
        let mut byte = [0];
        let _ = self.stream.read(&mut byte).await;
    }

    /// Appends a request, which must be complete RESP, to the outbox. Sends nothing.
    ///
    /// [`send_queued`](Connection::send_queued) and [`receive`](Connection::receive) send the outbox.
    pub(crate) fn queue(&mut self, request: &[u8]) {
        // Usually everything was sent, and this moves nothing.
        self.outbox.drain(..self.sent);
        self.sent = 0;
        self.outbox.extend_from_slice(request);
    }

    /// Sends as much of the outbox as the stream takes without waiting.
    ///
    /// [`receive`](Connection::receive) sends the rest. Must be called after each batch. A server that finds two
    /// batches in one read executes both before it sends the first reply, and is then idle while the client handles
    /// both replies.
    ///
    /// # Errors
    /// Returns a fault if the stream is broken. The connection must be dropped then.
    pub(crate) async fn send_queued(&mut self) -> Result<(), Fault> {
        let send = poll_fn(|context| match self.poll_send(context) {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => Poll::Ready(Ok(())),
        });
        send.await.map_err(interrupted)
    }

    /// Sends the rest of the outbox and returns the next reply: the one to the oldest request without a reply.
    ///
    /// An error reply is `Ok(Reply::Error(_))`. Cancel safe: the future may be dropped and the method called again.
    ///
    /// # Errors
    /// Returns a fault of the kind `Interrupted` if the stream fails or is closed, and of the kind `Protocol` if the
    /// bytes are not RESP2 or exceed the bounds. The connection must be dropped then.
    pub(crate) async fn receive(&mut self) -> Result<Reply, Fault> {
        let invalid = || Fault::new(Kind::Protocol, "the server's reply is not valid RESP2");
        loop {
            if let Some((reply, length)) = Reply::parse(&self.inbox).map_err(|_| invalid())? {
                self.inbox.drain(..length);
                return Ok(reply);
            }
            if self.inbox.len() > INBOX_BYTES_MAX {
                return Err(invalid());
            }
            self.inbox.reserve(16 << 10);
            if poll_fn(|context| self.poll_send_and_read(context)).await.map_err(interrupted)? == 0 {
                return Err(Fault::new(Kind::Interrupted, "the server closed the connection"));
            }
        }
    }

    /// Sends as much of the outbox as the stream takes, and reads into the inbox.
    ///
    /// Ready with the number of bytes read, which is 0 if the server has closed the connection, or with the error of
    /// the stream. Pending while nothing can be read.
    fn poll_send_and_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Err(error)) = self.poll_send(context) {
            return Poll::Ready(Err(error));
        }
        pin!(self.stream.read_buf(&mut self.inbox)).poll(context)
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut stream = Pin::new(&mut self.stream);
        while self.sent < self.outbox.len() {
            let count = ready!(stream.as_mut().poll_write(context, &self.outbox[self.sent..]))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.sent += count;
            self.is_flushed = false;
        }
        self.outbox.clear();
        self.sent = 0;
        if !self.is_flushed {
            ready!(stream.poll_flush(context))?;
            self.is_flushed = true;
        }
        Poll::Ready(Ok(()))
    }
}

/// Converts an I/O error before the first call to a fault of the kind `Unreachable`: nothing was executed.
fn unreachable(error: io::Error) -> Fault {
    Fault::new(Kind::Unreachable, reason(&error))
}

async fn connect_tcp(endpoint: &Endpoint, tls: Option<&Arc<Tls>>, until: Instant) -> Result<Box<dyn Stream>, Fault> {
    let addresses = lookup_host((endpoint.host.as_str(), endpoint.port)).await.map_err(unreachable)?;
    let tcp = connect_to_any(addresses.collect(), until).await.map_err(unreachable)?;
    tcp.set_nodelay(true).map_err(unreachable)?;
    match tls {
        Some(tls) => tls.wrap(tcp, &endpoint.host, until).await,
        None => Ok(Box::new(tcp)),
    }
}

/// Connects to the first address that accepts a connection.
///
/// Tries the addresses in order. The next attempt starts when one fails, or in parallel when an attempt has taken its
/// share of the time until `until`, so an address that does not respond does not block the others. Does not stop at
/// `until` itself.
///
/// # Errors
/// Returns the error of the attempt that failed last if all of them fail, and an error if there is no address.
async fn connect_to_any(addresses: Vec<SocketAddr>, until: Instant) -> io::Result<TcpStream> {
    // One share more than there are addresses: the last one is for preparing the connection.
    let share = until.saturating_duration_since(Instant::now()) / (addresses.len() as u32 + 1);
    let mut untried = addresses.into_iter();
    let mut attempts = FuturesUnordered::new();
    let mut last_error = io::Error::other("the host has no address");
    loop {
        attempts.extend(untried.next().map(TcpStream::connect));
        tokio::select! {
            tried = attempts.next() => match tried {
                Some(Ok(stream)) => return Ok(stream),
                Some(Err(error)) => last_error = error,
                None => return Err(last_error),
            },
            () = sleep(share), if untried.len() > 0 => {}
        }
    }
}

/// Converts an I/O error during a call to a fault of the kind `Interrupted`: the call may have been executed.
fn interrupted(error: io::Error) -> Fault {
    Fault::new(Kind::Interrupted, format!("the connection was lost: {}", tls::reason(&error)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::time::Duration;
    use tokio::net::{TcpListener, TcpSocket};

    const LOCALHOST: Ipv4Addr = Ipv4Addr::LOCALHOST;

    async fn reached(addresses: &[SocketAddr]) -> Option<SocketAddr> {
        let until = Instant::now() + Duration::from_secs(2);
        let reached = tokio::time::timeout_at(until, connect_to_any(addresses.to_vec(), until)).await;
        reached.expect("in time").ok().map(|stream| stream.peer_addr().unwrap())
    }

    #[tokio::test]
    async fn address_that_hangs_or_refuses_does_not_block_the_others() {
        // A listener whose accept queue is full and is never emptied: further connection attempts hang.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((LOCALHOST, 0).into()).unwrap();
        let full = socket.listen(1).unwrap();
        let hangs = full.local_addr().unwrap();
        let mut connected = Vec::new();
        let soon = Duration::from_millis(200);
        while let Ok(stream) = tokio::time::timeout(soon, TcpStream::connect(hangs)).await {
            connected.push(stream.unwrap());
            assert!(connected.len() < 100, "its queue is never full");
        }
        let refuses = TcpListener::bind((LOCALHOST, 0)).await.unwrap().local_addr().unwrap();
        let listener = TcpListener::bind((LOCALHOST, 0)).await.unwrap();
        let accepts = listener.local_addr().unwrap();
        for addresses in [&[accepts][..], &[hangs, accepts], &[refuses, accepts], &[refuses, hangs, refuses, accepts]] {
            assert_eq!(reached(addresses).await, Some(accepts), "{addresses:?}");
        }
        for addresses in [&[][..], &[refuses], &[refuses, refuses]] {
            assert_eq!(reached(addresses).await, None, "{addresses:?}");
        }
    }
}
