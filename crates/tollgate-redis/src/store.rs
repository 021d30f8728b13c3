//! The store: a URL in, decisions out.

use std::fmt;
use std::future::Future;
use std::io;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tollgate_core::{
    Check, Clock, Cost, Decision, Demand, LimitStatus, Store, StoreError, StoreErrorKind as Kind, StoreFuture, Wait,
};

use crate::connection::{ConnectFuture, Connector, Stream};
use crate::fault::Fault;
use crate::key::{Prefix, PrefixError};
use crate::reply::Reply;
use crate::request::{Step, push_command};
use crate::tls::{Tls, TlsError};
use crate::url::{Endpoint, UrlError};
use crate::worker::{Counters, STEPS_MAX, Work, Worker};
use crate::{SCRIPT, server_check};

/// Long enough for a server that forks or saves; a caller with less patience has a deadline of its own.
const CALL_TIMEOUT_DEFAULT: Duration = Duration::from_millis(250);
/// Whoever would wait longer for one call waits for something else.
const CALL_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// The longest ban, some 285 years: the script counts microseconds exactly up to 2^53.
const BAN_MS_MAX: u128 = (1 << 53) / 1_000;
/// Turns that are confirmed together.
const TURNS_MAX: usize = 1_024;
/// Callers that may wait at once. Past this the store is not busy but lost.
const QUEUE_LENGTH_DEFAULT: usize = 16_384;

/// Counters on one Redis or Valkey server. Cloning is cheap, and clones share the connection.
///
/// Any number of tasks may ask at once. Checks that wait at the same moment go to the server in one call, and calls overlap: a check waits for
/// its own round trip and at most a millisecond or two beside it, however far away the server is.
/// The store has no failure policy. An error says what is known of the call; what to do about it is the caller's to decide.
#[derive(Clone)]
pub struct RedisStore(Arc<Inner>);

struct Inner {
    queue: mpsc::Sender<Work>,
    turns: mpsc::UnboundedSender<oneshot::Sender<()>>,
    prefix: Prefix,
    endpoint: Endpoint,
    reads_bans: bool,
    counters: Arc<Counters>,
    panics: Arc<AtomicU64>,
}

/// How a [`RedisStore`] is made.
pub struct RedisStoreBuilder {
    url: String,
    prefix: String,
    call_timeout: Duration,
    queue_length: usize,
    reads_bans: bool,
    trusted_pem: Option<Vec<u8>>,
    connector: Option<Connector>,
    clock: Option<Arc<dyn Clock>>,
}

/// Why there is no store. Nothing here depends on whether the server is up.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The URL names no server.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The key prefix is unusable.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// What should be trusted is no certificate.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The store works on the runtime in which it is made.
    #[error("a Redis store is made inside a tokio runtime")]
    NoRuntime,
}

/// What the store has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct RedisStats {
    /// Calls to the server.
    pub calls: u64,
    /// Checks sent with them; divided by the calls, the mean batch.
    pub decisions: u64,
    /// Attempts to connect.
    pub connects: u64,
    /// How many calls found that the server had forgotten the script.
    pub scripts_sent: u64,
    /// How often the worker had to be started again. More than none is a bug of ours.
    pub panics: u64,
}

impl RedisStoreBuilder {
    /// What our keys begin with; `tollgate` unless said. Stores with different prefixes know nothing of each other.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How long one call, or one attempt to connect, may take before the connection is dropped; 250 ms unless said, and a
    /// day at most.
    #[must_use]
    pub fn call_timeout(mut self, call_timeout: Duration) -> Self {
        self.call_timeout = call_timeout.min(CALL_TIMEOUT_MAX);
        self
    }

    /// How many callers may wait at once before others are turned away; 16,384 unless said (and at least one).
    #[must_use]
    pub fn queue_length(mut self, queue_length: usize) -> Self {
        self.queue_length = queue_length.max(1);
        self
    }

    /// Sets whether each check also reads the bans of its subjects, which costs the server one key more per subject.
    /// Defaults to `false`; [`Store::ban`] works either way. A limiter built from a configuration or a URL reads bans.
    #[must_use]
    pub fn bans(mut self, reads_bans: bool) -> Self {
        self.reads_bans = reads_bans;
        self
    }

    /// For `rediss://`: also trusts these authorities (certificates in PEM form), beside those that the machine trusts.
    #[must_use]
    pub fn trust(mut self, certificates_pem: impl Into<Vec<u8>>) -> Self {
        self.trusted_pem = Some(certificates_pem.into());
        self
    }

    /// Opens connections with this function instead of TCP to the URL's host and port. Login and database are still the URL's;
    /// encryption is up to the function. For tests in virtual time, and for tunnels.
    #[must_use]
    pub fn connector<S, F>(mut self, connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = io::Result<S>> + Send + 'static,
    {
        self.connector = Some(Arc::new(move || {
            let connecting = connect();
            let boxed: ConnectFuture = Box::pin(async { Ok(Box::new(connecting.await?) as Box<dyn Stream>) });
            boxed
        }));
        self
    }

    /// Decides by this clock instead of the server's, and keeps keys for ten minutes at least. For tests.
    #[must_use]
    pub fn clock_override(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// The store. It connects by itself, now and whenever the connection is lost; the server need not be up.
    ///
    /// # Errors
    /// When the URL, the prefix or a certificate is unusable, or when there is no tokio runtime.
    pub fn build(self) -> Result<RedisStore, BuildError> {
        let endpoint = Endpoint::parse(&self.url)?;
        let prefix = Prefix::new(&self.prefix)?;
        let tls = endpoint.is_tls.then(|| Tls::new(self.trusted_pem.as_deref())).transpose()?;
        let runtime = Handle::try_current().map_err(|_| BuildError::NoRuntime)?;
        let (queue, mut works) = mpsc::channel(self.queue_length);
        let (turns, turns_asked) = mpsc::unbounded_channel();
        let (counters, panics) = (Arc::new(Counters::default()), Arc::new(AtomicU64::new(0)));
        let lane = Worker {
            endpoint: endpoint.clone(),
            tls,
            connector: self.connector,
            script: SCRIPT,
            call_timeout: self.call_timeout,
            clock: self.clock,
            counters: counters.clone(),
        };
        let seen = panics.clone();
        runtime.spawn(async move {
            let serve = async move {
                // Whoever waited in a worker that panicked learns it from a dropped sender; the others are served by the next.
                while AssertUnwindSafe(lane.run(&mut works)).catch_unwind().await.is_err() {
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            };
            tokio::select! {
                // In this order: when a turn is confirmed, the worker has handed out everything that it could read.
                biased;
                () = serve => {}
                () = confirm_turns(turns_asked) => {}
            }
        });
        let inner = Inner { queue, turns, prefix, endpoint, reads_bans: self.reads_bans, counters, panics };
        Ok(RedisStore(Arc::new(inner)))
    }
}

/// Confirms each turn after the worker, which runs in the same task, has had one.
async fn confirm_turns(mut turns: mpsc::UnboundedReceiver<oneshot::Sender<()>>) {
    let mut asked = Vec::new();
    loop {
        if turns.recv_many(&mut asked, TURNS_MAX).await == 0 {
            // The store is gone. The worker ends by itself, once it has served what is in its queue.
            std::future::pending::<()>().await;
        }
        // The runtime looks at its sockets before this task runs again, and then the worker comes first.
        tokio::task::yield_now().await;
        for turn in asked.drain(..) {
            let _ = turn.send(());
        }
    }
}

impl RedisStore {
    /// A store on the server that this URL names: `redis://[user:password@]host[:port][/database]`, or `rediss://`.
    pub fn builder(url: impl Into<String>) -> RedisStoreBuilder {
        RedisStoreBuilder {
            url: url.into(),
            prefix: "tollgate".into(),
            call_timeout: CALL_TIMEOUT_DEFAULT,
            queue_length: QUEUE_LENGTH_DEFAULT,
            reads_bans: false,
            trusted_pem: None,
            connector: None,
            clock: None,
        }
    }

    /// Whether [`RedisStore::builder`] can do anything with this URL. For whoever reads settings long before they are used.
    ///
    /// # Errors
    /// When it names no server, with what would be accepted and without its password.
    pub fn check_url(url: &str) -> Result<(), UrlError> {
        Endpoint::parse(url).map(drop)
    }

    /// What the store has done so far.
    pub fn stats(&self) -> RedisStats {
        let counters = &self.0.counters;
        RedisStats {
            calls: counters.calls.load(Ordering::Relaxed),
            decisions: counters.decisions.load(Ordering::Relaxed),
            connects: counters.connects.load(Ordering::Relaxed),
            scripts_sent: counters.scripts_sent.load(Ordering::Relaxed),
            panics: self.0.panics.load(Ordering::Relaxed),
        }
    }

    /// Which server this is, and whether it can be relied on. For the start of a service.
    ///
    /// # Errors
    /// When the server does not answer or is too old.
    pub async fn check_server(&self) -> Result<server_check::ServerReport, server_check::ServerCheckError> {
        let info = self.command(&["INFO", "server"]).await?;
        // A restricted user may not ask for this; the report then says that it is unknown.
        let policy = self.command(&["CONFIG", "GET", "maxmemory-policy"]).await.ok();
        server_check::report(&info, policy.as_ref())
    }

    /// Asks the server whether it forgets keys when its memory is full. Counters that it forgets start afresh.
    ///
    /// # Errors
    /// Fails if the server does not answer, or does not let this user ask (`INFO`).
    pub async fn eviction(&self) -> Result<server_check::Eviction, StoreError> {
        let info = self.command(&["INFO", "memory", "stats"]).await?;
        Ok(server_check::Eviction::read(&info))
    }

    /// A command of the caller's own, on the connection that the decisions use: a service that keeps a few things beside its
    /// counters needs no second client.
    ///
    /// One command, one reply of at most a megabyte, never repeated. Decisions wait while it runs, so not for commands
    /// that take long or block (`BLPOP`), and not for those that change what the connection is (`SUBSCRIBE`, `MULTI`, `SELECT`).
    ///
    /// ```no_run
    /// # async fn example(store: tollgate_redis::RedisStore) -> Result<(), tollgate_core::StoreError> {
    /// store.command(&["SET", "slug:abc", "https://example.com/", "EX", "3600"]).await?;
    /// assert_eq!(store.command(&["GET", "slug:abc"]).await?.as_text(), Some("https://example.com/"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the server does not answer, or answers an error.
    pub async fn command(&self, parts: &[impl AsRef<[u8]>]) -> Result<Reply, StoreError> {
        if parts.is_empty() {
            // A server does not answer nothing, and the connection would wait for it.
            return Err(StoreError::new(Kind::Protocol, "a command has a name at least"));
        }
        let mut request = Vec::new();
        push_command(&mut request, parts);
        self.ask(|waiter| Work::Command(request, waiter)).await
    }

    async fn ask<T>(&self, work: impl FnOnce(oneshot::Sender<Result<T, Fault>>) -> Work) -> Result<T, StoreError> {
        let (waiter, answer) = oneshot::channel();
        match self.0.queue.try_send(work(waiter)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                return Err(StoreError::new(Kind::Unavailable, "too many callers wait for the store"));
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {
                return Err(StoreError::new(Kind::Unreachable, "the store's runtime has ended"));
            }
        }
        match answer.await {
            Ok(answer) => answer.map_err(StoreError::from),
            Err(_) => Err(StoreError::new(Kind::Interrupted, "the store's worker ended during a call")),
        }
    }

    async fn decide_apart(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let mut answers = Vec::with_capacity(checks.len());
        for chunk in checks.chunks(STEPS_MAX) {
            let steps = chunk.iter().map(|check| Step::check(check, &self.0.prefix, self.0.reads_bans)).collect();
            let decided = self.ask(|waiter| Work::Checks(steps, waiter)).await;
            // What went before was decided and charged, whatever became of this.
            let decided = decided.map_err(|error| if answers.is_empty() { error } else { error.in_part() })?;
            answers.extend(decided.into_iter().map(|answer| answer.map_err(StoreError::from)));
        }
        Ok(answers)
    }

    async fn decide_all(&self, checks: &[Check<'_>]) -> Result<Vec<Decision>, StoreError> {
        let answers = self.decide_apart(checks).await?;
        let is_in_part = answers.iter().any(Result::is_ok);
        let decisions: Result<Vec<Decision>, StoreError> = answers.into_iter().collect();
        decisions.map_err(|error| if is_in_part { error.in_part() } else { error })
    }
}

impl Store for RedisStore {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        Box::pin(self.decide_all(checks))
    }

    fn decide_each<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Result<Decision, StoreError>>> {
        Box::pin(self.decide_apart(checks))
    }

    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            match Step::refund(check, decision, &self.0.prefix) {
                Some(step) => self.ask(|waiter| Work::Refund(step, waiter)).await,
                None => Ok(()),
            }
        })
    }

    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Box::pin(async move { self.command(&["DEL", &self.0.prefix.counter(demand)]).await.map(drop) })
    }

    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Box::pin(async move {
            let peek = demand.cost(Cost::PEEK);
            let decisions = self.decide_all(&[Check::one(&peek)]).await?;
            let line = decisions.first().and_then(|decision| decision.limits.first().copied());
            line.ok_or_else(|| StoreError::new(Kind::Protocol, "the script's reply makes no sense"))
        })
    }

    /// Longer than 285 years is 285 years.
    fn ban<'a>(&'a self, subject: &'a [u8], duration: Option<Duration>) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let key = self.0.prefix.ban(subject);
            let ms = duration.map(|duration| duration.as_millis().clamp(1, BAN_MS_MAX).to_string());
            match &ms {
                Some(ms) => self.command(&["SET", &key, "1", "PX", ms]).await.map(drop),
                None => self.command(&["SET", &key, "1"]).await.map(drop),
            }
        })
    }

    fn unban<'a>(&'a self, subject: &'a [u8]) -> StoreFuture<'a, bool> {
        Box::pin(async move {
            let reply = self.command(&["DEL", &self.0.prefix.ban(subject)]).await?;
            Ok(reply == Reply::Integer(1))
        })
    }

    fn ban_of<'a>(&'a self, subject: &'a [u8]) -> StoreFuture<'a, Option<Wait>> {
        Box::pin(async move {
            match self.command(&["PTTL", &self.0.prefix.ban(subject)]).await? {
                Reply::Integer(-2) => Ok(None),
                Reply::Integer(-1) => Ok(Some(Wait::NEVER)),
                Reply::Integer(ms) => {
                    let us = u64::try_from(ms).ok().and_then(|ms| ms.checked_mul(1_000));
                    Ok(Some(us.map_or(Wait::NEVER, Wait::from_micros)))
                }
                _ => Err(StoreError::new(Kind::Protocol, "the reply to PTTL is not a number")),
            }
        })
    }

    fn catch_up(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let (turn, confirmed) = oneshot::channel();
            // If the worker has ended, nothing is left to hand out.
            if self.0.turns.send(turn).is_ok() {
                let _ = confirmed.await;
            }
        })
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisStore").field(&self.0.endpoint).finish()
    }
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RedisStoreBuilder");
        match Endpoint::parse(&self.url) {
            Ok(endpoint) => shown.field("endpoint", &endpoint),
            Err(error) => shown.field("url", &error.to_string()),
        };
        shown.field("prefix", &self.prefix).finish_non_exhaustive()
    }
}
