//! The store on one Redis or Valkey server.

use std::fmt;
use std::future::Future;
use std::io;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tollgate_core::{
    Atomicity, Check, Clock, Cost, Decision, Demand, LimitStatus, Store, StoreError, StoreErrorKind as Kind,
    StoreFuture, Wait,
};

use crate::connection::{ConnectFuture, Connector, Stream};
use crate::fault::Fault;
use crate::key::{Prefix, PrefixError};
use crate::reply::Reply;
use crate::request::{Step, push_command};
use crate::tls::{Tls, TlsError};
use crate::url::{Endpoint, UrlError};
use crate::worker::{CallScope, Counters, STEPS_MAX, Work, Worker};
use crate::{SCRIPT, server_check};

/// Long enough for a server that forks or saves. Callers that need a result sooner have a deadline of their own.
const CALL_TIMEOUT_DEFAULT: Duration = Duration::from_millis(250);
/// Larger timeouts are reduced to this one, so that adding one to a time cannot overflow.
const CALL_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// The longest ban, some 285 years: the script counts microseconds exactly up to 2^53.
const BAN_MS_MAX: u128 = (1 << 53) / 1_000;
/// The maximum number of turns that are confirmed together.
const TURNS_MAX: usize = 1_024;
/// The maximum number of waiting callers. With more, the store does not keep up and waiting would not help.
const QUEUE_LENGTH_DEFAULT: usize = 16_384;

/// A store of counters on one Redis or Valkey server. Cloning is cheap, and clones share the connection.
///
/// Any number of tasks may use it at once. Checks that wait at the same moment are sent in one call, and calls overlap: a
/// check waits for its own round trip and at most two milliseconds more, however far away the server is.
///
/// The store has no failure policy. The kind of an error says whether the call was executed; the caller decides what to
/// do.
#[derive(Clone)]
pub struct RedisStore(Arc<Inner>);

struct Inner {
    queue: mpsc::Sender<Work>,
    turns: mpsc::UnboundedSender<oneshot::Sender<()>>,
    prefix: Prefix,
    endpoint: Endpoint,
    reads_bans: bool,
    call_scope: CallScope,
    counters: Arc<Counters>,
    panics: Arc<AtomicU64>,
}

/// A builder of [`RedisStore`]s.
pub struct RedisStoreBuilder {
    url: String,
    prefix: String,
    call_timeout: Duration,
    queue_length: usize,
    reads_bans: bool,
    call_scope: CallScope,
    trusted_pem: Option<Vec<u8>>,
    connector: Option<Connector>,
    clock: Option<Arc<dyn Clock>>,
}

/// The error of a [`RedisStoreBuilder`]. It does not depend on whether the server is reachable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The URL is not the URL of a server.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The key prefix is invalid.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// The trusted certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The store was built outside a tokio runtime. It needs one for its worker.
    #[error("a Redis store must be built inside a tokio runtime")]
    NoRuntime,
}

/// Statistics of a [`RedisStore`] since it was built.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct RedisStats {
    /// The number of calls to the server.
    pub calls: u64,
    /// The number of checks in these calls. Divided by `calls`, it is the mean size of a batch.
    pub decisions: u64,
    /// The number of attempts to connect.
    pub connects: u64,
    /// The number of calls that were resent because the server did not have the script cached.
    pub scripts_sent: u64,
    /// The number of panics of the worker, which is restarted. Any is a bug in Tollgate.
    pub panics: u64,
}

impl RedisStoreBuilder {
    /// Sets the prefix of all keys. Defaults to `tollgate`.
    ///
    /// Stores with different prefixes have separate counters and bans.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the timeout of one call, and of one attempt to connect. Defaults to 250 ms; the maximum is one day.
    ///
    /// After a timeout the connection is dropped.
    #[must_use]
    pub fn call_timeout(mut self, call_timeout: Duration) -> Self {
        self.call_timeout = call_timeout.min(CALL_TIMEOUT_MAX);
        self
    }

    /// Sets the maximum number of waiting callers. Defaults to 16,384; the minimum is 1.
    ///
    /// Further callers get [`StoreErrorKind::Unavailable`](tollgate_core::StoreErrorKind::Unavailable) at once.
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

    /// Sets whether a call of the script names keys of one subject only. Defaults to `false`: a call names any keys.
    ///
    /// A server in cluster mode, and some proxies, require that the keys of a call share a hash slot. Then each batch is
    /// sent as one call per subject, in one write. [`Store::atomicity`] becomes [`Atomicity::Subject`], and a check of
    /// several subjects fails with [`StoreErrorKind::Forbidden`](tollgate_core::StoreErrorKind::Forbidden). The store
    /// still uses one server: it does not follow redirections to other nodes of a cluster.
    #[must_use]
    pub fn one_subject_per_call(mut self, is_required: bool) -> Self {
        self.call_scope = if is_required { CallScope::Subject } else { CallScope::Server };
        self
    }

    /// Adds trusted certificate authorities for `rediss://` URLs, in PEM form.
    ///
    /// The authorities that the system trusts remain trusted.
    #[must_use]
    pub fn trust(mut self, certificates_pem: impl Into<Vec<u8>>) -> Self {
        self.trusted_pem = Some(certificates_pem.into());
        self
    }

    /// Sets the function that opens connections. Defaults to TCP, with TLS for `rediss://`, to the URL's host and port.
    ///
    /// The user, the password and the database of the URL are still used. The function must encrypt if that is needed.
    /// For tests in virtual time, and for tunnels.
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

    /// Sets the clock of the decisions. Defaults to the server's clock. For tests.
    ///
    /// Keys then live for at least ten minutes.
    #[must_use]
    pub fn clock_override(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Builds the store, and starts its worker in the current tokio runtime.
    ///
    /// The worker connects in the background, now and whenever the connection is lost. The server need not be up.
    ///
    /// # Errors
    /// Returns an error if the URL, the prefix or a certificate is invalid, or if there is no tokio runtime.
    pub fn build(self) -> Result<RedisStore, BuildError> {
        let endpoint = Endpoint::parse(&self.url)?;
        let prefix = Prefix::new(&self.prefix)?;
        let tls = endpoint.is_tls.then(|| Tls::new(self.trusted_pem.as_deref())).transpose()?;
        let runtime = Handle::try_current().map_err(|_| BuildError::NoRuntime)?;
        let (queue, mut works) = mpsc::channel(self.queue_length);
        let (turns, turns_asked) = mpsc::unbounded_channel();
        let (counters, panics) = (Arc::new(Counters::default()), Arc::new(AtomicU64::new(0)));
        let worker = Worker {
            endpoint: endpoint.clone(),
            tls,
            connector: self.connector,
            script: SCRIPT,
            call_scope: self.call_scope,
            call_timeout: self.call_timeout,
            clock: self.clock,
            counters: counters.clone(),
        };
        let panics_seen = panics.clone();
        runtime.spawn(async move {
            let serve = async move {
                // Callers of a worker that panicked notice the dropped channel; callers in the queue are served by the next run.
                while AssertUnwindSafe(worker.run(&mut works)).catch_unwind().await.is_err() {
                    panics_seen.fetch_add(1, Ordering::Relaxed);
                }
            };
            tokio::select! {
                // In this order: when a turn is confirmed, the worker has delivered everything that it could read.
                biased;
                () = serve => {}
                () = confirm_turns(turns_asked) => {}
            }
        });
        let RedisStoreBuilder { reads_bans, call_scope, .. } = self;
        let inner = Inner { queue, turns, prefix, endpoint, reads_bans, call_scope, counters, panics };
        Ok(RedisStore(Arc::new(inner)))
    }
}

/// Confirms each turn after the worker, which runs in the same task, has had one.
async fn confirm_turns(mut turns: mpsc::UnboundedReceiver<oneshot::Sender<()>>) {
    let mut asked = Vec::new();
    loop {
        if turns.recv_many(&mut asked, TURNS_MAX).await == 0 {
            // The store was dropped. The worker ends by itself once it has served what is in its queue.
            std::future::pending::<()>().await;
        }
        // The runtime polls its sockets before this task runs again, and then the worker runs first.
        tokio::task::yield_now().await;
        for turn in asked.drain(..) {
            let _ = turn.send(());
        }
    }
}

impl RedisStore {
    /// Creates a builder of a store on the server with this URL.
    ///
    /// The form is `redis://[user:password@]host[:port][/database]`, or `rediss://` for TLS.
    pub fn builder(url: impl Into<String>) -> RedisStoreBuilder {
        RedisStoreBuilder {
            url: url.into(),
            prefix: "tollgate".into(),
            call_timeout: CALL_TIMEOUT_DEFAULT,
            queue_length: QUEUE_LENGTH_DEFAULT,
            reads_bans: false,
            call_scope: CallScope::default(),
            trusted_pem: None,
            connector: None,
            clock: None,
        }
    }

    /// Checks that [`RedisStore::builder`] accepts a URL, without connecting.
    ///
    /// # Errors
    /// Returns an error if the URL is invalid. The message says what is accepted and does not contain the password.
    pub fn check_url(url: &str) -> Result<(), UrlError> {
        Endpoint::parse(url).map(drop)
    }

    /// Returns statistics since the store was built.
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

    /// Returns the name and version of the server, and warnings about its configuration. For the start of a service.
    ///
    /// # Errors
    /// Returns an error if the server does not answer, does not tell its version, or is too old.
    pub async fn check_server(&self) -> Result<server_check::ServerReport, server_check::ServerCheckError> {
        let info = self.command(&["INFO", "server"]).await?;
        // A restricted user may not be allowed to read this. The report then says that it is unknown.
        let policy = self.command(&["CONFIG", "GET", "maxmemory-policy"]).await.ok();
        server_check::report(&info, policy.as_ref())
    }

    /// Returns the server's eviction policy and the number of evicted keys. An evicted counter starts again at zero.
    ///
    /// # Errors
    /// Returns an error if the server does not answer, or does not allow the user to run `INFO`.
    pub async fn eviction(&self) -> Result<server_check::Eviction, StoreError> {
        let info = self.command(&["INFO", "memory", "stats"]).await?;
        Ok(server_check::Eviction::read(&info))
    }

    /// Runs one command on the connection that decisions use.
    ///
    /// A service that keeps some data beside its counters needs no second client. The reply may have up to a megabyte. The
    /// command is never resent. Decisions wait while it runs, so it must not be slow or blocking (`BLPOP`). It must not
    /// change the mode of the connection (`SUBSCRIBE`, `MULTI`, `SELECT`).
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
    /// Returns an error if `parts` is empty, if the server does not answer, or if it returns an error.
    pub async fn command(&self, parts: &[impl AsRef<[u8]>]) -> Result<Reply, StoreError> {
        if parts.is_empty() {
            // A server does not reply to an empty command, and the connection would wait for the reply.
            return Err(self.error(Fault::new(Kind::Protocol, "a command must have a name")));
        }
        let mut request = Vec::new();
        push_command(&mut request, parts);
        self.ask(|waiter| Work::Command(request, waiter)).await
    }

    /// Puts work into the worker's queue and waits for its result.
    async fn ask<T>(&self, work: impl FnOnce(oneshot::Sender<Result<T, Fault>>) -> Work) -> Result<T, StoreError> {
        let (waiter, answer) = oneshot::channel();
        match self.0.queue.try_send(work(waiter)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                return Err(self.error(Fault::new(Kind::Unavailable, "too many callers are waiting")));
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {
                return Err(self.error(Fault::new(Kind::Unreachable, "the tokio runtime of the store has ended")));
            }
        }
        match answer.await {
            Ok(answer) => answer.map_err(|fault| self.error(fault)),
            Err(_) => Err(self.error(Fault::new(Kind::Interrupted, "the worker of the store ended during a call"))),
        }
    }

    fn error(&self, fault: Fault) -> StoreError {
        fault.into_error(&self.0.endpoint)
    }

    /// Decides the checks, each with its own result.
    async fn decide_apart(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        match self.0.call_scope {
            CallScope::Server => self.decide_in_turn(checks).await,
            CallScope::Subject => self.decide_by_subject(checks).await,
        }
    }

    /// Decides the checks in calls that hold any of them.
    async fn decide_in_turn(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let mut answers = Vec::with_capacity(checks.len());
        for chunk in checks.chunks(STEPS_MAX) {
            let steps = chunk.iter().map(|check| Step::check(check, &self.0.prefix, self.0.reads_bans)).collect();
            let decided = self.ask(|waiter| Work::Checks(steps, waiter)).await;
            // The chunks before this one were decided and charged.
            let decided = decided.map_err(|error| if answers.is_empty() { error } else { error.in_part() })?;
            answers.extend(decided.into_iter().map(|answer| answer.map_err(|fault| self.error(fault))));
        }
        Ok(answers)
    }

    /// Decides the checks in calls that hold those of one subject. The calls of different subjects run at once.
    async fn decide_by_subject(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        const SEVERAL_SUBJECTS: &str = "a check of several subjects cannot be decided with one subject per call";
        let mut answers: Vec<Option<Result<Decision, StoreError>>> = checks.iter().map(|_| None).collect();
        let mut groups: Vec<(&[u8], Vec<usize>, Vec<Check<'_>>)> = Vec::new();
        for (index, check) in checks.iter().enumerate() {
            let subject = check.demands()[0].key.subject();
            if check.demands().iter().any(|demand| demand.key.subject() != subject) {
                answers[index] = Some(Err(self.error(Fault::new(Kind::Forbidden, SEVERAL_SUBJECTS))));
                continue;
            }
            match groups.iter_mut().find(|(group, ..)| *group == subject) {
                Some((_, indices, checks)) => {
                    indices.push(index);
                    checks.push(*check);
                }
                None => groups.push((subject, vec![index], vec![*check])),
            }
        }
        let decided = join_all(groups.iter().map(|(_, _, checks)| self.decide_in_turn(checks))).await;
        for ((_, indices, _), decided) in groups.into_iter().zip(decided) {
            match decided {
                Ok(decided) => indices.into_iter().zip(decided).for_each(|(at, answer)| answers[at] = Some(answer)),
                Err(error) => {
                    let (kind, message) = (error.kind(), error.to_string());
                    indices.into_iter().for_each(|at| answers[at] = Some(Err(StoreError::new(kind, message.clone()))));
                }
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Decides the checks, or fails if one of them cannot be decided.
    async fn decide_all(&self, checks: &[Check<'_>]) -> Result<Vec<Decision>, StoreError> {
        let answers = self.decide_apart(checks).await?;
        let is_in_part = answers.iter().any(Result::is_ok);
        let decisions: Result<Vec<Decision>, StoreError> = answers.into_iter().collect();
        decisions.map_err(|error| if is_in_part { error.in_part() } else { error })
    }
}

impl Store for RedisStore {
    fn atomicity(&self) -> Atomicity {
        match self.0.call_scope {
            CallScope::Server => Atomicity::Check,
            CallScope::Subject => Atomicity::Subject,
        }
    }

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
            line.ok_or_else(|| self.error(Fault::new(Kind::Protocol, "the script's reply is malformed")))
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
            // If the worker has ended, nothing is left to deliver.
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
