//! One connection: opened, logged in, the script loaded; then requests go out, and their replies come in the same order.
//!
//! **Both ways at once.** Requests are put into an outbox, which is sent whenever replies are waited for. So a request never
//! waits for a reply, and a server that does not read its requests does not keep us from reading its replies. The session bounds the number of requests.
//!
//! A reply needs no number: it belongs to the oldest request that has none. When a request is given up, the connection
//! must go with it, and whatever the server still sends is read by nobody. That is the whole protection
//! against a late reply being taken for another's.

use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, sleep};
use tollgate_core::StoreErrorKind as Kind;

use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::push_command;
use crate::tls::Tls;
use crate::url::Endpoint;

/// The largest reply we expect is a full batch, some 100 kB.
const INBOX_BYTES_MAX: usize = 8 << 20;

pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Opens a stream to the server. Replaces TCP and TLS where the builder was given one.
pub(crate) type Connector = Arc<dyn Fn() -> ConnectFuture + Send + Sync>;
pub(crate) type ConnectFuture = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send>>;

pub(crate) struct Connection {
    stream: Box<dyn Stream>,
    inbox: Vec<u8>,
    /// Requests, of which the first `sent` bytes are on their way.
    outbox: Vec<u8>,
    sent: usize,
    /// Whether the stream holds back nothing of what was written to it.
    is_flushed: bool,
    script_sha: String,
}

impl Connection {
    /// Connects, logs in, chooses the database, loads the script, and makes sure that this is no replica. Whoever waits gives up at `until`.
    pub(crate) async fn open(
        endpoint: &Endpoint,
        tls: Option<&Tls>,
        connector: Option<&Connector>,
        script: &str,
        until: Instant,
    ) -> Result<Connection, Fault> {
        let stream = match connector {
            Some(connect) => connect().await.map_err(|_| unreachable())?,
            None => connect_tcp(endpoint, tls, until).await?,
        };
        let (inbox, outbox, script_sha) = (Vec::new(), Vec::new(), String::new());
        let mut connection = Connection { stream, inbox, outbox, sent: 0, is_flushed: true, script_sha };
        connection.greet(endpoint, script).await.map_err(|fault| match fault.kind {
            // No check has been sent yet.
            Kind::Interrupted | Kind::TimedOut => Fault::new(Kind::Unreachable, "the server hung up on us"),
            _ => fault,
        })?;
        Ok(connection)
    }

    async fn greet(&mut self, endpoint: &Endpoint, script: &str) -> Result<(), Fault> {
        let mut request = Vec::with_capacity(script.len() + 512);
        let mut wants_ok = Vec::new();
        let mut push = |is_needed: bool, parts: &[&str]| {
            push_command(&mut request, parts);
            wants_ok.push(is_needed);
        };
        match (&endpoint.user, &endpoint.password) {
            (Some(user), Some(password)) => push(true, &["AUTH", user, password]),
            (None, Some(password)) => push(true, &["AUTH", password]),
            (_, None) => {}
        }
        if endpoint.database != 0 {
            push(true, &["SELECT", &endpoint.database.to_string()]);
        }
        // Nice to have: a restricted user may not be allowed either of the two.
        push(false, &["CLIENT", "SETNAME", "tollgate"]);
        push(false, &["ROLE"]);
        push(true, &["SCRIPT", "LOAD", script]);
        let mut replies = Vec::with_capacity(wants_ok.len());
        self.queue(&request);
        for is_needed in wants_ok {
            let reply = self.receive().await?;
            if let Reply::Error(message) = &reply {
                let fault = Fault::of_reply(message);
                // A server that is full, or wants a password, says so whatever it is asked.
                if is_needed || fault.kind == Kind::Unavailable || message.starts_with("NOAUTH") {
                    return Err(fault);
                }
            }
            replies.push(reply);
        }
        let role = replies.get(replies.len() - 2);
        if let Some(Reply::List(role)) = role
            && role.first().and_then(Reply::as_text) == Some("slave")
        {
            return Err(Fault::of_reply("READONLY"));
        }
        match replies.last().and_then(Reply::as_text) {
            Some(sha) if sha.len() == 40 => self.script_sha = sha.into(),
            _ => return Err(Fault::new(Kind::Protocol, "the server did not name the loaded script")),
        }
        Ok(())
    }

    /// The name under which the server knows the script.
    pub(crate) fn script_sha(&self) -> &str {
        &self.script_sha
    }

    /// Whether the server has said more than the replies that were taken.
    pub(crate) fn has_said_more(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Returns when the server has hung up, or has said something although nobody asked.
    pub(crate) async fn hung_up(&mut self) {
        let mut byte = [0];
        let _ = self.stream.read(&mut byte).await;
    }

    /// Puts a request into the outbox. [`receive`](Connection::receive) sends it.
    pub(crate) fn queue(&mut self, request: &[u8]) {
        // Mostly the outbox is sent completely, and this moves nothing.
        self.outbox.drain(..self.sent);
        self.sent = 0;
        self.outbox.extend_from_slice(request);
    }

    /// Sends what is in the outbox and returns the next reply: that to the oldest request without one. May be dropped and called
    /// again; if it fails, the connection must be dropped.
    pub(crate) async fn receive(&mut self) -> Result<Reply, Fault> {
        let garbled = || Fault::new(Kind::Protocol, "the server does not speak RESP");
        loop {
            if let Some((reply, length)) = Reply::parse(&self.inbox).map_err(|_| garbled())? {
                self.inbox.drain(..length);
                return Ok(reply);
            }
            if self.inbox.len() > INBOX_BYTES_MAX {
                return Err(garbled());
            }
            self.inbox.reserve(16 << 10);
            if poll_fn(|context| self.poll_both_ways(context)).await.map_err(interrupted)? == 0 {
                return Err(interrupted(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    /// Sends as much as the stream takes, and reads into the inbox. Ready with the number of bytes read.
    fn poll_both_ways(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
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

fn unreachable() -> Fault {
    Fault::new(Kind::Unreachable, "the server cannot be reached")
}

async fn connect_tcp(endpoint: &Endpoint, tls: Option<&Tls>, until: Instant) -> Result<Box<dyn Stream>, Fault> {
    let addresses = lookup_host((endpoint.host.as_str(), endpoint.port)).await.map_err(|_| unreachable())?;
    let tcp = reach_any(addresses.collect(), until).await.ok_or_else(unreachable)?;
    tcp.set_nodelay(true).map_err(|_| unreachable())?;
    match tls {
        Some(tls) => tls.wrap(tcp, &endpoint.host).await,
        None => Ok(Box::new(tcp)),
    }
}

/// A connection to the first of the addresses that takes one. The next is tried when one refuses, and also, beside it, when it has kept us
/// waiting for its share of the time: an address that swallows what it is sent must not keep the others from us.
async fn reach_any(addresses: Vec<SocketAddr>, until: Instant) -> Option<TcpStream> {
    // The last share is for the greeting.
    let share = until.saturating_duration_since(Instant::now()) / (addresses.len() as u32 + 1);
    let mut untried = addresses.into_iter();
    let mut attempts = FuturesUnordered::new();
    loop {
        attempts.extend(untried.next().map(TcpStream::connect));
        tokio::select! {
            tried = attempts.next() => if let Ok(stream) = tried? {
                return Some(stream);
            },
            () = sleep(share), if untried.len() > 0 => {}
        }
    }
}

fn interrupted(_: io::Error) -> Fault {
    Fault::new(Kind::Interrupted, "the connection broke during a call")
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
        let reached = tokio::time::timeout_at(until, reach_any(addresses.to_vec(), until)).await;
        reached.expect("in time").map(|stream| stream.peer_addr().unwrap())
    }

    #[tokio::test]
    async fn an_address_that_swallows_or_refuses_leaves_the_others_to_be_tried() {
        // A listener whose queue is full and is never emptied: to who comes later it says nothing at all.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((LOCALHOST, 0).into()).unwrap();
        let full = socket.listen(1).unwrap();
        let swallows = full.local_addr().unwrap();
        let mut guests = Vec::new();
        let soon = Duration::from_millis(200);
        while let Ok(guest) = tokio::time::timeout(soon, TcpStream::connect(swallows)).await {
            guests.push(guest.unwrap());
            assert!(guests.len() < 100, "its queue is never full");
        }
        let refuses = TcpListener::bind((LOCALHOST, 0)).await.unwrap().local_addr().unwrap();
        let listener = TcpListener::bind((LOCALHOST, 0)).await.unwrap();
        let takes = listener.local_addr().unwrap();
        for addresses in [&[takes][..], &[swallows, takes], &[refuses, takes], &[refuses, swallows, refuses, takes]] {
            assert_eq!(reached(addresses).await, Some(takes), "{addresses:?}");
        }
        for addresses in [&[][..], &[refuses], &[refuses, refuses]] {
            assert_eq!(reached(addresses).await, None, "{addresses:?}");
        }
    }
}
