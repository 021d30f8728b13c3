//! The RESP door: any Redis client can ask.
//!
//! Everything that has arrived on a connection is decided as one batch and answered in one write. A client that
//! pipelines pays one system call each way and, on Redis, one call to the store for the whole pipeline.
//!
//! ```text
//!   read ──▶ frame::parse ──▶ command::understand ──▶ Limiter::check_batch ──▶ reply ──▶ write
//!            as often as the buffer has a whole command             in the order asked
//! ```
//!
//! Bounds: bytes per argument and command, commands per batch, reply bytes held, connections, idle time, the time that a command
//! takes to arrive, and the time until the password is given: one byte now and then keeps no place. A frame that makes
//! no sense is answered with an error, and the connection is closed; a command that makes no sense is answered with an error
//! that says what was expected, and the connection goes on.
//!
//! **Cross-protocol requests.** A web page can make a browser send an HTTP request to this port, with commands in its body. So an unknown *inline*
//! command ends the connection before the next line is read, whatever it is: a request line, a header, a STUN message.
//! Clients send commands as arrays; an unknown one among these is only answered with an error.

mod command;
mod frame;
#[doc(hidden)]
pub mod fuzz;
mod reply;

use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tollgate::{Check, CheckOptions, Decision, Demand, Limiter, OnFailure, Unavailable};

use self::command::{Command, LimitMemo, ReplyFormat, Session, UNKNOWN, is_http, tell, understand};
use self::frame::{Args, parse};
use self::reply::{Protocol, Replies};
use super::{IdleTimeout, ReadOutcome, finish, read_waiting, send, send_last, shrink};
use crate::accept::Context;
use crate::auth_guard::{Attempt, AuthGuard};
use crate::metrics::{DecisionStats, ListenerStats, Rejection};
use crate::stream::Cork;

/// Commands decided together. Larger pipelines are answered in several writes.
const BATCH_COMMANDS_MAX: usize = 512;
/// Replies are written out when there are this many bytes of them, whatever else has arrived.
const REPLY_BYTES_MAX: usize = 64 * 1024;
/// A command that was begun is waited for no longer, as is a body over HTTP.
const COMMAND_WITHIN: Duration = Duration::from_secs(10);
/// Nor is a client that does not give the password.
const PASSWORD_WITHIN: Duration = Duration::from_secs(10);
/// What a short check takes on the wire, and how many are expected at most before they are counted.
const CHECK_BYTES_MIN: usize = 48;
const GUESS_MAX: usize = 64;
/// What a client is told whose command was dropped before it was complete, because others need the room.
const EVICTED: &str = "ERR too much is being received; the command was dropped before it was complete";

/// What the RESP door needs to know.
#[derive(Clone)]
pub struct RespOptions {
    /// The password that AUTH must give; without one, everybody may ask.
    pub password: Option<String>,
    /// A connection that is silent for longer is closed.
    pub idle: Duration,
}

impl Default for RespOptions {
    fn default() -> Self {
        RespOptions { password: None, idle: Duration::from_secs(300) }
    }
}

impl std::fmt::Debug for RespOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let password = self.password.as_ref().map(|_| "set");
        f.debug_struct("RespOptions").field("password", &password).field("idle", &self.idle).finish()
    }
}

const NOAUTH: &str = "NOAUTH Authentication required";
/// The listener's name in logs.
const LISTENER: &str = "resp";

/// The state that the connections of the RESP listener share.
pub(crate) struct RespListener {
    pub(crate) limiter: Limiter,
    pub(crate) options: Arc<RespOptions>,
    pub(crate) decisions: Arc<DecisionStats>,
    pub(crate) stats: Arc<ListenerStats>,
    pub(crate) auth_guard: Arc<AuthGuard>,
}

impl RespListener {
    /// Serves one connection until the client closes it, is idle or takes too long, breaks the protocol, or the
    /// listener closes.
    ///
    /// When the listener closes, the next replies are sent together with the end of the connection. RESP cannot mark a
    /// reply as the last one, so the end itself is the signal: what a client sends after it is discarded and never
    /// executed.
    pub(crate) async fn serve<S>(self: Arc<Self>, stream: S, peer: IpAddr, context: Context) -> std::io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Cork + Unpin,
    {
        Connection::new(stream, peer, context, self).run().await
    }
}

struct Connection<S> {
    stream: S,
    context: Context,
    listener: Arc<RespListener>,
    client: Client,
    replies: Replies,
    /// Reused from batch to batch.
    args: Args,
}

/// What is remembered of a client between commands.
#[derive(Debug)]
struct Client {
    id: u64,
    address: IpAddr,
    is_authenticated: bool,
    /// The client must be authenticated by then.
    password_by: Instant,
    memo: LimitMemo,
}

/// Whether to go on after a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Read,
    Close,
}

impl<S: AsyncRead + AsyncWrite + Cork + Unpin> Connection<S> {
    fn new(stream: S, address: IpAddr, context: Context, listener: Arc<RespListener>) -> Connection<S> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let client = Client {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            address,
            is_authenticated: listener.options.password.is_none(),
            password_by: Instant::now() + PASSWORD_WITHIN,
            memo: LimitMemo::default(),
        };
        let (replies, args) = (Replies::default(), Args::default());
        Connection { stream, context, listener, client, replies, args }
    }

    async fn run(mut self) -> std::io::Result<()> {
        let mut buffer = BytesMut::new();
        let idle = self.listener.options.idle;
        let mut patience = IdleTimeout::new(idle);
        let mut last_call = pin!(self.context.closing.clone().last_call());
        let mut command_by = None;
        loop {
            let password_by = (!self.client.is_authenticated).then_some(self.client.password_by);
            patience.until(command_by.into_iter().chain(password_by).min());
            let heard = if buffer.is_empty() {
                patience.read(&mut self.stream, &mut buffer, last_call.as_mut()).await?
            } else {
                let mut evicted = pin!(self.context.receiving.evicted());
                let interrupt = poll_fn(|cx| match last_call.as_mut().poll(cx) {
                    Poll::Ready(()) => Poll::Ready(()),
                    Poll::Pending => evicted.as_mut().poll(cx),
                });
                patience.read(&mut self.stream, &mut buffer, pin!(interrupt)).await?
            };
            match heard {
                ReadOutcome::Bytes => {}
                ReadOutcome::Interrupted if self.context.receiving.is_evicted() => {
                    return self.drop_command(buffer).await;
                }
                ReadOutcome::End | ReadOutcome::Late | ReadOutcome::Interrupted => break,
            }
            let bytes_before = buffer.len();
            if self.answer(&mut buffer, patience.last_read_at()).await? == Next::Close {
                return Ok(());
            }
            // What is left is a command in the middle: a new one, if any before it was whole.
            command_by = match (buffer.len(), command_by) {
                (0, _) => None,
                (left, Some(by)) if left == bytes_before => Some(by),
                _ => Some(Instant::now() + COMMAND_WITHIN),
            };
            shrink(&mut buffer, bytes_before);
            if !self.context.receiving.hold_buffer(&mut buffer, 0).await {
                return self.drop_command(buffer).await;
            }
        }
        finish(&mut self.stream, idle).await
    }

    /// Ends the connection because there is no room for the command that is being received.
    async fn drop_command(mut self, buffer: BytesMut) -> std::io::Result<()> {
        drop(buffer);
        self.context.receiving.release();
        self.replies.error(EVICTED);
        send_last(&mut self.stream, self.replies.as_bytes(), self.listener.options.idle).await
    }

    /// Decides and answers every whole command in the buffer, whose last bytes were received at `last_read_at`.
    ///
    /// After [`Next::Close`] the connection has ended.
    async fn answer(&mut self, buffer: &mut BytesMut, last_read_at: Instant) -> std::io::Result<Next> {
        let idle = self.listener.options.idle;
        loop {
            let (consumed, next) = self.batch(buffer, last_read_at).await;
            buffer.advance(consumed);
            let is_last = next == Next::Close
                || buffer.is_empty()
                    && self.context.closing.is_closing()
                    && !read_waiting(&mut self.stream, buffer).await?;
            if is_last {
                send_last(&mut self.stream, self.replies.as_bytes(), idle).await?;
                return Ok(Next::Close);
            }
            if self.replies.len() > 0 {
                send(&mut self.stream, self.replies.as_bytes(), idle).await?;
                self.replies.clear();
            }
            if consumed == 0 || buffer.is_empty() {
                return Ok(next);
            }
        }
    }

    /// One batch from the front of the buffer: how many bytes it took.
    async fn batch(&mut self, buffer: &[u8], last_read_at: Instant) -> (usize, Next) {
        let mut args = std::mem::take(&mut self.args);
        let batch = self.batch_with(buffer, last_read_at, &mut args).await;
        self.args = args;
        batch
    }

    async fn batch_with(&mut self, buffer: &[u8], last_read_at: Instant, args: &mut Args) -> (usize, Next) {
        // A guess at how many there are, so that a pipeline is not moved while it is read.
        let guess = (buffer.len() / CHECK_BYTES_MIN).clamp(1, GUESS_MAX);
        let mut pending: Vec<(Demand<'_>, ReplyFormat)> = Vec::with_capacity(guess);
        let mut at = 0;
        for _ in 0..BATCH_COMMANDS_MAX {
            let frame = &buffer[at..];
            match parse(frame, args) {
                Ok(None) => break,
                Ok(Some(consumed)) => at += consumed,
                Err(error) => {
                    self.decide(&mut pending, last_read_at).await;
                    self.replies.error(&format!("ERR Protocol error: {error}"));
                    return (at, Next::Close);
                }
            }
            match understand(frame, args, &mut self.client.memo) {
                // Put aside, to be decided with its neighbours.
                Ok(Command::Check { demand, words }) if self.client.is_authenticated => pending.push((demand, words)),
                Ok(Command::Nothing) => {}
                Ok(Command::Unknown) if !frame.starts_with(b"*") => {
                    self.decide(&mut pending, last_read_at).await;
                    self.reject_inline(frame, args);
                    return (at, Next::Close);
                }
                other => {
                    self.decide(&mut pending, last_read_at).await;
                    if self.other(other).await == Next::Close {
                        return (at, Next::Close);
                    }
                    if self.replies.len() > REPLY_BYTES_MAX {
                        break;
                    }
                }
            }
        }
        self.decide(&mut pending, last_read_at).await;
        (at, Next::Read)
    }

    /// Answers what is no check, or may not be one, in its turn.
    async fn other(&mut self, command: Result<Command<'_>, String>) -> Next {
        let is_open = self.client.is_authenticated;
        match command {
            Ok(Command::Session(Session::Quit)) => {
                self.replies.simple("OK");
                return Next::Close;
            }
            Ok(Command::Session(Session::Auth { password })) => return self.auth(password).await,
            Ok(Command::Session(Session::Hello { protocol, password })) => return self.hello(protocol, password).await,
            _ if !is_open => self.replies.error(NOAUTH),
            Ok(Command::Session(session)) => self.session(session),
            Ok(Command::Unknown) => self.replies.error(UNKNOWN),
            Ok(Command::Reset { demand }) => match self.listener.limiter.reset(&demand).await {
                Ok(()) => self.replies.simple("OK"),
                Err(error) => {
                    self.replies.error(&format!("UNAVAILABLE the store did not answer ({})", error.kind().name()))
                }
            },
            // Neither comes here: a check waits for its batch, and a blank line needs no answer.
            Ok(Command::Check { .. } | Command::Nothing) => {}
            Err(error) => self.replies.error(&error),
        }
        Next::Read
    }

    /// Answers an unknown inline command. An HTTP request has no answer, as from Redis.
    fn reject_inline(&mut self, frame: &[u8], args: &Args) {
        if is_http(frame, args) {
            let what = "an HTTP request came to the RESP listener, possibly from a web page; its connection was closed";
            self.listener.stats.reject(LISTENER, Rejection::Http, what);
        } else {
            self.replies.error(if self.client.is_authenticated { UNKNOWN } else { NOAUTH });
        }
    }

    async fn decide(&mut self, pending: &mut Vec<(Demand<'_>, ReplyFormat)>, last_read_at: Instant) {
        if pending.is_empty() {
            return;
        }
        let began = Instant::now();
        let options = CheckOptions { on_failure: Some(OnFailure::Local), ..CheckOptions::default() };
        let limiter = &self.listener.limiter;
        let done_at = match &pending[..] {
            // Without the lists that a batch needs.
            [(demand, words)] => {
                let answer = limiter.check_with(&Check::one(demand), options).await;
                let done_at = Instant::now();
                self.tell(demand, *words, &answer, done_at - began);
                done_at
            }
            _ => {
                let checks: Vec<Check<'_>> = pending.iter().map(|(demand, _)| Check::one(demand)).collect();
                let answers = limiter.check_batch(&checks, options).await;
                let done_at = Instant::now();
                let told = pending.iter().zip(&answers);
                told.for_each(|((demand, words), answer)| self.tell(demand, *words, answer, done_at - began));
                done_at
            }
        };
        self.listener.stats.request_times.record_many(done_at - last_read_at, pending.len() as u64);
        pending.clear();
    }

    fn tell(
        &mut self,
        demand: &Demand<'_>,
        words: ReplyFormat,
        answer: &Result<Decision, Unavailable>,
        took: Duration,
    ) {
        self.listener.decisions.record_explicit(answer, took);
        match answer {
            Ok(decision) => tell(decision, demand, words, &mut self.replies),
            Err(unavailable) => self.replies.error(&format!("UNAVAILABLE {}", unavailable.client_message())),
        }
    }

    fn session(&mut self, session: Session<'_>) {
        match session {
            Session::Ping(None) => self.replies.simple("PONG"),
            Session::Ping(Some(text)) | Session::Echo(text) => self.replies.bulk(text),
            Session::Select | Session::ClientOk => self.replies.simple("OK"),
            Session::ClientId => self.replies.integer(self.client.id as i64),
            Session::ClientGetName => self.replies.null(),
            Session::CommandCount => self.replies.integer(4),
            Session::CommandList => self.replies.array(0),
            Session::CommandDocs => self.replies.map(0),
            Session::Info => self.replies.bulk(
                concat!(
                    "# Server\r\nserver_name:tollgate\r\ntollgate_version:",
                    env!("CARGO_PKG_VERSION"),
                    "\r\nloading:0\r\n"
                )
                .as_bytes(),
            ),
            // Answered where they can wait, or close the connection.
            Session::Hello { .. } | Session::Auth { .. } | Session::Quit => {}
        }
    }

    async fn auth(&mut self, password: &[u8]) -> Next {
        if self.listener.options.password.is_none() {
            self.replies.error("ERR AUTH was sent, but no password is set");
            return Next::Read;
        }
        match self.authenticate(password).await {
            Ok(()) => {
                self.replies.simple("OK");
                Next::Read
            }
            Err(next) => next,
        }
    }

    async fn hello(&mut self, protocol: Option<&[u8]>, password: Option<&[u8]>) -> Next {
        if let Some(password) = password
            && let Err(next) = self.authenticate(password).await
        {
            return next;
        }
        self.greet(protocol);
        Next::Read
    }

    /// Looks at a password. Replies with an error if it is not the right one, and returns whether the connection goes on.
    async fn authenticate(&mut self, given: &[u8]) -> Result<(), Next> {
        let RespListener { options, stats, auth_guard, .. } = &*self.listener;
        let Some(password) = &options.password else { return Ok(()) };
        // Takes the same time wherever they differ.
        let is_right = || password.as_bytes().ct_eq(given).into();
        match auth_guard.attempt(LISTENER, self.client.address, &stats.auth_failures, is_right).await {
            Attempt::Right => {
                self.client.is_authenticated = true;
                Ok(())
            }
            Attempt::Wrong => {
                self.replies.error("WRONGPASS invalid password");
                // A pipeline of guesses is not answered beyond the time that a client has for the right one.
                let is_late = !self.client.is_authenticated && self.client.password_by <= Instant::now();
                Err(if is_late { Next::Close } else { Next::Read })
            }
            Attempt::Refused => {
                self.replies.error("ERR too many failed attempts from this address, try again later");
                Err(Next::Close)
            }
        }
    }

    fn greet(&mut self, protocol: Option<&[u8]>) {
        if !self.client.is_authenticated {
            return self.replies.error("NOAUTH HELLO must be called with AUTH here");
        }
        match protocol {
            None => {}
            Some(b"2") => self.replies.protocol = Protocol::Resp2,
            Some(b"3") => self.replies.protocol = Protocol::Resp3,
            Some(_) => return self.replies.error("NOPROTO unsupported protocol version, expected 2 or 3"),
        }
        let version = if self.replies.protocol == Protocol::Resp3 { 3 } else { 2 };
        let replies = &mut self.replies;
        replies.map(7);
        for (name, value) in
            [("server", "tollgate"), ("version", env!("CARGO_PKG_VERSION")), ("mode", "standalone"), ("role", "master")]
        {
            replies.bulk(name.as_bytes());
            replies.bulk(value.as_bytes());
        }
        replies.bulk(b"proto");
        replies.integer(version);
        replies.bulk(b"id");
        replies.integer(self.client.id as i64);
        replies.bulk(b"modules");
        replies.array(0);
    }
}

#[cfg(test)]
mod tests;
