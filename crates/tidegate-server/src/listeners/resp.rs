//! The RESP listener, for Redis clients.
//!
//! All commands that have arrived on a connection are decided as one batch and answered in one write. A client that
//! pipelines costs one system call each way and, with Redis as the store, one call to the store for the whole pipeline.
//!
//! ```text
//!   read ──▶ frame::parse ──▶ command::parse_command ──▶ Decider::check_batch ──▶ reply ──▶ write
//!            once per complete command in the buffer                in the same order
//! ```
//!
//! Other commands are answered one by one, between two batches of checks: `TIDEGATE.REQUEST` by the rules (`request.rs`),
//! and `TIDEGATE.WAIT` when there is room (`wait.rs`).
//!
//! Bounds: bytes per argument and command, commands per batch, bytes of unsent replies, connections, idle time, the
//! time in which a command must arrive, and the time in which the password must be given. So a client that sends single
//! bytes does not keep its connection. A malformed frame is answered with an error, and the connection is closed. A
//! malformed command is answered with an error that says what is expected, and the connection stays open.
//!
//! **Cross-protocol requests.** A web page can make a browser send an HTTP request to this port, with commands in its
//! body. So an unknown *inline* command ends the connection before the next line is read, whatever it is: a request
//! line, a header, a STUN message. Clients send commands as arrays; an unknown command in an array is only answered
//! with an error.

mod check;
mod command;
mod frame;
#[doc(hidden)]
pub mod fuzz;
mod reply;
mod request;
mod wait;

use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tidegate::{Check, Decision, Demand, Redeemed, Unavailable};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use self::check::{LastElement, LimitCache, PendingCheck, PendingChecks, reply};
use self::command::{RespCommand, UNKNOWN, is_http, parse_command};
use self::frame::{Args, parse};
use self::reply::{Replies, RespVersion};
use super::io::{IdleTimeout, ReadOutcome, close, read_waiting, send, send_last, shrink};
use crate::auth_guard::{Attempt, AuthGuard};
use crate::decider::Decider;
use crate::listener::{ConnectionContext, Listener, ListenerKind, Role, SecretKind, ServeFuture, ServerState};
use crate::metrics::{ListenerStats, RESP_ERRORS, Rejection};
use crate::receipts::RefundError;
use crate::secret::{ListenerSecret, SecretForm};
use crate::stream::{ClientStream, Cork};

/// The maximum number of commands that are answered together. Larger pipelines are answered in several writes.
const BATCH_COMMANDS_MAX: usize = 512;
/// The number of limits at which no further check is added to a batch.
const BATCH_LIMITS_MAX: usize = 512;
/// The size at which replies are written although more commands have arrived.
const REPLY_BYTES_MAX: usize = 64 * 1024;
/// The time from the first byte of a command to its last. A body of an HTTP request has the same.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// The time in which a client must give the password, if one is set.
const PASSWORD_TIMEOUT: Duration = Duration::from_secs(10);
/// The bytes of a short check on the wire, from which the number of commands in a buffer is estimated.
const CHECK_BYTES_MIN: usize = 48;
const ESTIMATE_MAX: usize = 64;
/// The error reply to a command that was dropped while it was incomplete or waited, because its bytes were evicted.
const EVICTED: &str = "ERR too many bytes of incomplete or waiting commands are buffered; this command was dropped";
const NOAUTH: &str = "NOAUTH Authentication required";
const OVER_LIMIT_REPLY: &[u8] = b"-ERR max number of clients reached\r\n";

/// The RESP listener.
pub static RESP: ListenerKind = ListenerKind {
    name: "resp",
    help: "the RESP listener, for Redis clients",
    default_address: "127.0.0.1:6380",
    address_setting: None,
    role: Role::Service,
    decides_for_others: true,
    secret: Some(SecretKind {
        form: SecretForm::Password,
        help: "Redis clients must send",
        variable: "TIDEGATE_RESP_PASSWORD",
        option: "resp-password-file",
    }),
    example: "redis-cli -h {ip} -p {port}{tls} TIDEGATE.CHECK user:42 10/min",
    build: |state| Arc::new(RespListener::build(state)),
};

/// Options of the RESP listener.
#[derive(Clone, Debug)]
pub(crate) struct RespOptions {
    /// The password that clients must give with `AUTH` or `HELLO`, within 10 s. Any user name is accepted. `None` if
    /// they need none.
    pub(crate) password: Option<ListenerSecret>,
    /// The time after which a silent connection is closed, or one that does not accept its replies.
    pub(crate) idle: Duration,
}

/// The RESP listener: answers the commands of Redis clients.
pub(crate) struct RespListener {
    decider: Decider,
    options: RespOptions,
    stats: Arc<ListenerStats>,
    auth_guard: Arc<AuthGuard>,
}

impl Listener for RespListener {
    fn stats(&self) -> &Arc<ListenerStats> {
        &self.stats
    }

    fn over_limit_reply(&self) -> &'static [u8] {
        OVER_LIMIT_REPLY
    }

    fn serve(self: Arc<Self>, stream: ClientStream, peer: SocketAddr, context: ConnectionContext) -> ServeFuture {
        Box::pin(async move { Ok(self.serve_stream(stream, peer.ip(), context).await?) })
    }
}

impl RespListener {
    fn new(decider: Decider, options: RespOptions) -> RespListener {
        let stats = ListenerStats::new(RESP.name, RESP_ERRORS, &[Rejection::Http], true);
        RespListener { decider, options, stats, auth_guard: Arc::default() }
    }

    /// Creates the RESP listener of a server from the state that its listeners share.
    pub(crate) fn build(shared: &ServerState) -> RespListener {
        let (password, idle) = (shared.options.secret_of(&RESP), shared.options.bounds.resp_idle);
        let options = RespOptions { password, idle };
        RespListener { auth_guard: shared.auth_guard.clone(), ..RespListener::new(shared.decider.clone(), options) }
    }

    /// Serves one connection until it ends.
    ///
    /// It ends when the client ends it (also while a command waits) or sends `QUIT`, is silent for the idle time, takes
    /// longer than 10 s for a command or for its password, sends a malformed frame or an unknown inline command, or makes
    /// too many wrong guesses; when its command is evicted from the receive budget; or when the listener closes.
    ///
    /// When the listener closes, the next replies are sent together with the end of the connection. RESP cannot mark a
    /// reply as the last one, so the end itself is the signal. Commands that arrive after it are discarded and never
    /// executed.
    ///
    /// # Errors
    /// If the connection breaks, or the client does not accept its replies within the idle time.
    async fn serve_stream<S>(
        self: Arc<Self>,
        stream: S,
        peer: IpAddr,
        context: ConnectionContext,
    ) -> std::io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Cork + Unpin,
    {
        RespConnection::new(stream, peer, context, self).run().await
    }
}

struct RespConnection<S> {
    stream: S,
    context: ConnectionContext,
    listener: Arc<RespListener>,
    client: RespClient,
    replies: Replies,
    /// Reused from batch to batch.
    args: Args,
}

/// The state of a client that lasts from one command to the next.
#[derive(Debug)]
struct RespClient {
    id: u64,
    address: IpAddr,
    is_authenticated: bool,
    /// The time until which the client must be authenticated.
    password_deadline: Instant,
    limits: LimitCache,
}

/// What happens to a connection after a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterBatch {
    KeepOpen,
    Close,
    /// The next command is a `TIDEGATE.WAIT` of this many bytes. It is complete, and still in the buffer.
    Wait(usize),
}

impl<S: AsyncRead + AsyncWrite + Cork + Unpin> RespConnection<S> {
    fn new(stream: S, address: IpAddr, context: ConnectionContext, listener: Arc<RespListener>) -> RespConnection<S> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let client = RespClient {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            address,
            is_authenticated: listener.options.password.is_none(),
            password_deadline: Instant::now() + PASSWORD_TIMEOUT,
            limits: LimitCache::default(),
        };
        let (replies, args) = (Replies::counted(listener.stats.clone()), Args::default());
        RespConnection { stream, context, listener, client, replies, args }
    }

    async fn run(mut self) -> std::io::Result<()> {
        let mut buffer = BytesMut::new();
        let idle = self.listener.options.idle;
        let mut timeout = IdleTimeout::new(idle);
        let mut shutdown = pin!(self.context.shutdown.clone().idle_grace_over());
        let mut command_deadline = None;
        loop {
            let password_deadline = (!self.client.is_authenticated).then_some(self.client.password_deadline);
            timeout.set_deadline(command_deadline.into_iter().chain(password_deadline).min());
            let outcome = if buffer.is_empty() {
                timeout.read(&mut self.stream, &mut buffer, shutdown.as_mut()).await?
            } else {
                let mut evicted = pin!(self.context.receiving.evicted());
                let interrupt = poll_fn(|cx| match shutdown.as_mut().poll(cx) {
                    Poll::Ready(()) => Poll::Ready(()),
                    Poll::Pending => evicted.as_mut().poll(cx),
                });
                timeout.read(&mut self.stream, &mut buffer, pin!(interrupt)).await?
            };
            match outcome {
                ReadOutcome::Bytes => {}
                ReadOutcome::Interrupted if self.context.receiving.is_evicted() => {
                    return self.drop_command(&mut buffer).await;
                }
                ReadOutcome::End | ReadOutcome::TimedOut | ReadOutcome::Interrupted => break,
            }
            let bytes_before = buffer.len();
            let Some(consumed) = self.answer(&mut buffer, &mut timeout).await? else { return Ok(()) };
            // The rest is the beginning of a command. It is a new one if a command before it was complete.
            command_deadline = match (buffer.len(), command_deadline) {
                (0, _) => None,
                (_, Some(deadline)) if consumed == 0 => Some(deadline),
                _ => Some(Instant::now() + COMMAND_TIMEOUT),
            };
            shrink(&mut buffer, bytes_before);
            if !self.context.receiving.hold_buffer(&mut buffer, 0).await {
                return self.drop_command(&mut buffer).await;
            }
        }
        close(&mut self.stream, idle).await
    }

    /// Ends the connection with an error reply, because the receive budget has no room for the command in `buffer`.
    async fn drop_command(&mut self, buffer: &mut BytesMut) -> std::io::Result<()> {
        *buffer = BytesMut::new();
        self.context.receiving.release();
        self.replies.error(EVICTED);
        send_last(&mut self.stream, self.replies.as_bytes(), self.listener.options.idle).await
    }

    /// Answers every complete command in the buffer, and removes it from there. An incomplete one stays.
    ///
    /// Sends the replies. When the listener closes, ends the connection once no more commands have arrived.
    ///
    /// The durations in the metrics are counted from the time at which `timeout` last read bytes. The idle time starts
    /// again after a command that waits.
    ///
    /// Returns the number of bytes removed, or `None` if the connection has been ended.
    async fn answer(&mut self, buffer: &mut BytesMut, timeout: &mut IdleTimeout) -> std::io::Result<Option<usize>> {
        let idle = self.listener.options.idle;
        let mut total = 0;
        loop {
            let (consumed, after) = self.batch(buffer, timeout.last_read_at()).await;
            buffer.advance(consumed);
            total += consumed;
            if let AfterBatch::Wait(bytes) = after {
                self.send_replies().await?;
                // A large future, for which a connection that never waits has no room.
                if !Box::pin(self.wait(bytes, buffer)).await? {
                    return Ok(None);
                }
                timeout.restart();
                total += bytes;
                continue;
            }
            let is_last = after == AfterBatch::Close
                || buffer.is_empty()
                    && self.context.shutdown.is_closing()
                    && !read_waiting(&mut self.stream, buffer).await?;
            if is_last {
                send_last(&mut self.stream, self.replies.as_bytes(), idle).await?;
                return Ok(None);
            }
            self.send_replies().await?;
            if consumed == 0 || buffer.is_empty() {
                return Ok(Some(total));
            }
        }
    }

    /// Sends the replies that were appended so far, if there are any.
    async fn send_replies(&mut self) -> std::io::Result<()> {
        if self.replies.len() > 0 {
            send(&mut self.stream, self.replies.as_bytes(), self.listener.options.idle).await?;
            self.replies.clear();
        }
        Ok(())
    }

    /// Decides one batch of at most 512 commands from the front of the buffer, and appends their replies.
    ///
    /// Ends earlier after a command that closes the connection, before one that waits, after a check if 512 limits or
    /// more are to be decided together, and after another command if the replies exceed 64 KiB. Checks are decided
    /// together, up to the next command of another kind.
    ///
    /// Returns the length of the commands in bytes, 0 if none is complete, and what happens next.
    async fn batch(&mut self, buffer: &[u8], last_read_at: Instant) -> (usize, AfterBatch) {
        let mut args = std::mem::take(&mut self.args);
        let batch = self.batch_with(buffer, last_read_at, &mut args).await;
        args.clear();
        self.args = args;
        batch
    }

    async fn batch_with(&mut self, buffer: &[u8], last_read_at: Instant, args: &mut Args) -> (usize, AfterBatch) {
        // An estimate of the number of commands, so that the list does not grow while a pipeline is parsed.
        let estimate = (buffer.len() / CHECK_BYTES_MIN).clamp(1, ESTIMATE_MAX);
        let mut pending = PendingChecks::with_capacity(estimate);
        let mut at = 0;
        for _ in 0..BATCH_COMMANDS_MAX {
            let frame = &buffer[at..];
            let length = match parse(frame, args) {
                Ok(None) => break,
                Ok(Some(length)) => length,
                Err(error) => {
                    self.decide(&mut pending, last_read_at).await;
                    self.replies.error(&format!("ERR Protocol error: {error}"));
                    return (at, AfterBatch::Close);
                }
            };
            at += length;
            let limits = pending.demands.len();
            let command = parse_command(frame, args, &mut self.client.limits, &mut pending.demands);
            if let (Ok(RespCommand::Check(check)), true) = (&command, self.client.is_authenticated) {
                if !pending.checks.is_empty() && pending.have_receipts() != check.has_receipt {
                    let next = pending.demands.split_off(limits);
                    self.decide(&mut pending, last_read_at).await;
                    pending.demands = next;
                }
                match self.check_receipt(*check, &pending.demands[pending.demands.len() - check.limits..]) {
                    // Decided together with its neighbours.
                    Ok(()) => pending.checks.push(*check),
                    Err(error) => {
                        pending.demands.truncate(pending.demands.len() - check.limits);
                        self.decide(&mut pending, last_read_at).await;
                        self.replies.error(&error);
                    }
                }
                if pending.demands.len() >= BATCH_LIMITS_MAX {
                    break;
                }
                continue;
            }
            pending.demands.truncate(limits);
            match command {
                Ok(RespCommand::Nothing) => {}
                Ok(RespCommand::Wait { .. }) if self.client.is_authenticated => {
                    self.decide(&mut pending, last_read_at).await;
                    return (at - length, AfterBatch::Wait(length));
                }
                Ok(RespCommand::Unknown) if !frame.starts_with(b"*") => {
                    self.decide(&mut pending, last_read_at).await;
                    self.reject_inline(frame, args);
                    return (at, AfterBatch::Close);
                }
                other => {
                    self.decide(&mut pending, last_read_at).await;
                    if self.answer_other(other, last_read_at).await == AfterBatch::Close {
                        return (at, AfterBatch::Close);
                    }
                    if self.replies.len() > REPLY_BYTES_MAX {
                        break;
                    }
                }
            }
        }
        self.decide(&mut pending, last_read_at).await;
        (at, AfterBatch::KeepOpen)
    }

    /// Appends the reply to a command that is not a check. Returns whether the connection stays open.
    ///
    /// Also answers malformed commands (`Err`). A client that is not authenticated gets `NOAUTH` for everything but
    /// `QUIT`, `AUTH` and `HELLO`. Appends nothing for a check or a wait of an authenticated client, and for a blank
    /// line.
    async fn answer_other(&mut self, command: Result<RespCommand<'_>, String>, last_read_at: Instant) -> AfterBatch {
        match command {
            Ok(RespCommand::Quit) => {
                self.replies.simple("OK");
                return AfterBatch::Close;
            }
            Ok(RespCommand::Auth { password }) => return self.auth(password).await,
            Ok(RespCommand::Hello { protocol, password }) => return self.hello(protocol, password).await,
            _ if !self.client.is_authenticated => self.replies.error(NOAUTH),
            Ok(RespCommand::Fixed(reply)) => self.replies.fixed(reply),
            Ok(RespCommand::ClientId) => self.replies.integer(self.client.id as i64),
            Ok(RespCommand::Unknown) => self.replies.error(&UNKNOWN),
            Ok(RespCommand::Request(request, peer)) => {
                // A large future, for which a connection that only sends checks has no room.
                Box::pin(self.request(&request, peer)).await;
                self.listener.stats.request_times.record(last_read_at.elapsed());
            }
            Ok(RespCommand::Refund { receipt, settlement }) => {
                match self.listener.decider.redeem(receipt, settlement).await {
                    Ok(redeemed) => self.replies.integer((redeemed == Redeemed::Done).into()),
                    Err(error) => self.replies.error(&refund_error(error)),
                }
            }
            Ok(RespCommand::Reset { demand }) => match self.listener.decider.limiter().reset(&demand).await {
                Ok(()) => self.replies.simple("OK"),
                Err(error) => {
                    self.replies.error(&format!("UNAVAILABLE the store did not answer ({})", error.kind().as_str()))
                }
            },
            // Handled by the caller: a check is decided with its batch, a wait after it, and a blank line has no reply.
            Ok(RespCommand::Check(_) | RespCommand::Wait { .. } | RespCommand::Nothing) => {}
            Err(error) => self.replies.error(&error),
        }
        AfterBatch::KeepOpen
    }

    /// Appends an error reply to an unknown inline command.
    ///
    /// The error is `NOAUTH` if the client is not authenticated. An HTTP request gets no reply, as from Redis, but is
    /// counted and logged. The caller must close the connection.
    fn reject_inline(&mut self, frame: &[u8], args: &Args) {
        if is_http(frame, args) {
            let warning =
                "closed a connection that sent an HTTP request to the RESP listener, possibly from a web page";
            self.listener.stats.reject(Rejection::Http, warning);
        } else {
            self.replies.error(if self.client.is_authenticated { &UNKNOWN } else { NOAUTH });
        }
    }

    /// Decides the pending checks together, appends their replies in the same order, and records their durations.
    ///
    /// Empties `pending`, and does nothing if it is empty.
    async fn decide(&mut self, pending: &mut PendingChecks<'_>, last_read_at: Instant) {
        if pending.checks.is_empty() {
            return;
        }
        let decider = &self.listener.decider;
        match &pending.checks[..] {
            // Avoids the lists that a batch needs.
            [only] => {
                let check = Check::of_distinct(&pending.demands);
                let answer = decider.check(&decider.engine().explicit(), &check, only.has_receipt).await;
                self.reply(&check, *only, &answer);
            }
            _ => {
                let checks: Vec<Check<'_>> = pending.iter().map(|(_, check)| check).collect();
                let answers = decider.check_batch(&checks, pending.have_receipts()).await;
                for ((pending, check), answer) in pending.iter().zip(&answers) {
                    self.reply(&check, pending, answer);
                }
            }
        };
        self.listener.stats.request_times.record_many(last_read_at.elapsed(), pending.checks.len() as u64);
        pending.clear();
    }

    /// Checks that a receipt can be issued for a check with these demands, if it asks for one. `Err` is the error reply.
    fn check_receipt(&self, check: PendingCheck, demands: &[Demand<'_>]) -> Result<(), String> {
        if check.has_receipt {
            self.listener.decider.check_receipt(demands).map_err(|error| format!("ERR {error}"))
        } else {
            Ok(())
        }
    }

    fn reply(&mut self, check: &Check<'_>, pending: PendingCheck, answer: &Result<Decision, Unavailable>) {
        match answer {
            Ok(decision) if pending.has_receipt => {
                let receipt = self.listener.decider.receipt(check, decision);
                let last = LastElement::Receipt(receipt.as_ref().map(|receipt| &*receipt.text));
                reply(decision, check, pending.format, last, &mut self.replies);
            }
            Ok(decision) => reply(decision, check, pending.format, LastElement::Numbers, &mut self.replies),
            Err(unavailable) => self.replies.error(&format!("UNAVAILABLE {}", unavailable.client_message())),
        }
    }

    async fn auth(&mut self, password: &[u8]) -> AfterBatch {
        if self.listener.options.password.is_none() {
            self.replies.error("ERR AUTH was sent, but no password is set");
            return AfterBatch::KeepOpen;
        }
        match self.authenticate(password).await {
            Ok(()) => {
                self.replies.simple("OK");
                AfterBatch::KeepOpen
            }
            Err(after) => after,
        }
    }

    async fn hello(&mut self, protocol: Option<&[u8]>, password: Option<&[u8]>) -> AfterBatch {
        if let Some(password) = password
            && let Err(after) = self.authenticate(password).await
        {
            return after;
        }
        self.reply_to_hello(protocol);
        AfterBatch::KeepOpen
    }

    /// Checks a password and marks the client as authenticated. `Ok` also if the listener has no password.
    ///
    /// If the password is wrong, or too many attempts of the address are waiting, appends an error reply and returns as
    /// `Err` whether the connection stays open. It closes in the second case, and after a wrong password if the client
    /// is not authenticated 10 s after it connected. The result may be delayed by up to 1 s; see
    /// [`AuthGuard::attempt`].
    async fn authenticate(&mut self, given: &[u8]) -> Result<(), AfterBatch> {
        let RespListener { options, stats, auth_guard, .. } = &*self.listener;
        let Some(password) = &options.password else { return Ok(()) };
        let attempt =
            auth_guard.attempt(stats.name, self.client.address, &stats.auth_failures, || password.matches(given));
        match attempt.await {
            Attempt::Right => {
                self.client.is_authenticated = true;
                Ok(())
            }
            Attempt::Wrong => {
                self.replies.error("WRONGPASS invalid password");
                // A pipeline of guesses is not answered beyond the time in which the password must be given.
                let is_late = !self.client.is_authenticated && self.client.password_deadline <= Instant::now();
                Err(if is_late { AfterBatch::Close } else { AfterBatch::KeepOpen })
            }
            Attempt::Refused => {
                self.replies.error("ERR too many failed attempts from this address; try again later");
                Err(AfterBatch::Close)
            }
        }
    }

    /// Appends the reply to `HELLO`, and uses the version of the protocol that the client asks for, if any.
    ///
    /// Appends an error instead if the client is not authenticated or the version is neither 2 nor 3.
    fn reply_to_hello(&mut self, protocol: Option<&[u8]>) {
        if !self.client.is_authenticated {
            return self.replies.error("NOAUTH HELLO must be called with AUTH here");
        }
        match protocol {
            None => {}
            Some(b"2") => self.replies.version = RespVersion::Resp2,
            Some(b"3") => self.replies.version = RespVersion::Resp3,
            Some(_) => return self.replies.error("NOPROTO unsupported protocol version, expected 2 or 3"),
        }
        let version = if self.replies.version == RespVersion::Resp3 { 3 } else { 2 };
        let replies = &mut self.replies;
        replies.map(7);
        for (name, value) in
            [("server", "tidegate"), ("version", env!("CARGO_PKG_VERSION")), ("mode", "standalone"), ("role", "master")]
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

/// Returns the error reply to a refund.
fn refund_error(error: RefundError) -> String {
    let code = match error {
        RefundError::NoSecret | RefundError::Invalid(_) => "ERR",
        RefundError::OtherInstance => "OTHERINSTANCE",
        RefundError::Store(_) => "UNAVAILABLE",
    };
    format!("{code} {error}")
}

#[cfg(test)]
mod tests;
