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
    Atomicity, Check, Clock, Cost, Decision, Demand, LimitStatus, Redeemed, Redemption, Store, StoreError,
    StoreErrorKind as Kind, StoreFuture, Wait,
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
/// The message of the error of a check or redemption of several subjects with one subject per call.
const SEVERAL_SUBJECTS: &str = "a check cannot have several subjects if `one_subject_per_call` is set";
/// The maximum number of [`Store::catch_up`] calls that are completed together.
const CATCH_UPS_MAX: usize = 1_024;
/// If more callers wait, the server does not keep up, and waiting would not help.
const QUEUE_LENGTH_DEFAULT: usize = 16_384;

/// A store of counters on one Redis or Valkey server. Cloning is cheap, and clones share the connection.
///
/// Any number of tasks may use it at once. Checks that wait at the same moment are sent in one call, and the next call
/// is sent before the reply to the previous one arrives. So a check takes its own round trip and about two milliseconds
/// more, or longer if 32 batches are already in flight.
///
/// The store has no failure policy. The [kind](StoreError::kind) of an error tells whether the call may have been
/// executed; the caller decides what to do.
#[derive(Clone)]
pub struct RedisStore(Arc<Inner>);

struct Inner {
    queue: mpsc::Sender<Work>,
    /// Calls of [`Store::catch_up`] that wait for the worker.
    catch_ups: mpsc::UnboundedSender<oneshot::Sender<()>>,
    prefix: Prefix,
    endpoint: Endpoint,
    reads_bans: bool,
    call_scope: CallScope,
    counters: Arc<Counters>,
    panics: Arc<AtomicU64>,
}

/// A builder of a [`RedisStore`], created by [`RedisStore::builder`].
///
/// [`build`](RedisStoreBuilder::build) validates the settings.
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

/// The error of [`RedisStoreBuilder::build`]: a setting is invalid, or there is no tokio runtime.
///
/// Building does not contact the server, so an unreachable server is not an error here.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The URL is invalid, or it is a `rediss://` URL and this crate was built without the feature `tls`.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The key prefix is invalid.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// The URL is `rediss://`, and the certificates given to [`RedisStoreBuilder::trust`] cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The store was built outside a tokio runtime, which it needs for its background task.
    #[error("a Redis store must be built inside a tokio runtime")]
    NoRuntime,
}

/// Counts of a [`RedisStore`] and its clones since the store was built.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct RedisStats {
    /// The number of requests sent to the server: calls of the script and commands. A request that is resent counts
    /// again. The commands that prepare a new connection do not count.
    pub calls: u64,
    /// The number of checks sent to the server, whatever their results. A check that is resent counts once.
    pub decisions: u64,
    /// The number of attempts to connect, including failed ones.
    pub connects: u64,
    /// The number of calls that the server rejected because it did not have the script cached. They were resent.
    pub scripts_sent: u64,
    /// The number of panics of the store's background task, which is restarted. Any panic is a bug in Tollgate.
    pub panics: u64,
}

impl RedisStoreBuilder {
    /// Sets the prefix of all keys. Defaults to `tollgate`.
    ///
    /// A prefix has 1 to 64 printable ASCII characters without braces and spaces. Stores with different prefixes have
    /// separate counters and bans.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the timeout of one call, and of one attempt to connect. Defaults to 250 ms.
    ///
    /// Values above one day become one day. After a timeout the connection is dropped, and all calls without a reply
    /// fail.
    #[must_use]
    pub fn call_timeout(mut self, call_timeout: Duration) -> Self {
        self.call_timeout = call_timeout.min(CALL_TIMEOUT_MAX);
        self
    }

    /// Sets the length of the queue in which callers wait until their requests are sent. Defaults to 16,384.
    ///
    /// While the queue is full, further callers get
    /// [`StoreErrorKind::Unavailable`](tollgate_core::StoreErrorKind::Unavailable) at once. A length of 0 becomes 1.
    #[must_use]
    pub fn queue_length(mut self, queue_length: usize) -> Self {
        self.queue_length = queue_length.max(1);
        self
    }

    /// Sets whether checks read the bans on their subjects. Defaults to `false`: banned subjects are not refused.
    ///
    /// With `true`, a check costs the server one key more per subject. [`Store::ban`], [`Store::unban`] and
    /// [`Store::ban_of`] work either way. A limiter built from a configuration or a URL sets this to `true`.
    #[must_use]
    pub fn bans(mut self, reads_bans: bool) -> Self {
        self.reads_bans = reads_bans;
        self
    }

    /// Sets whether a call of the script names keys of one subject only. Defaults to `false`: a call names any keys.
    ///
    /// A server in cluster mode, and some proxies, require that the keys of a call share a hash slot. With `true`,
    /// each batch is sent as one call per subject. [`Store::atomicity`] becomes [`Atomicity::Subject`], and a check
    /// or redemption of several subjects fails with [`StoreErrorKind::Forbidden`](tollgate_core::StoreErrorKind::Forbidden). The
    /// store still uses one server: it does not follow redirections to other nodes of a cluster. With `false`, a server
    /// in cluster mode is not used: every call fails with
    /// [`StoreErrorKind::Unsupported`](tollgate_core::StoreErrorKind::Unsupported).
    #[must_use]
    pub fn one_subject_per_call(mut self, is_required: bool) -> Self {
        self.call_scope = if is_required { CallScope::Subject } else { CallScope::Server };
        self
    }

    /// Sets certificate authorities to trust in addition to the system's, in PEM form. Defaults to none.
    ///
    /// A second call replaces the first. Ignored for `redis://` URLs.
    #[must_use]
    pub fn trust(mut self, certificates_pem: impl Into<Vec<u8>>) -> Self {
        self.trusted_pem = Some(certificates_pem.into());
        self
    }

    /// Sets the function that opens connections. Defaults to TCP, with TLS for `rediss://`, to the URL's host and port.
    ///
    /// The store calls the function for every attempt to connect. It then authenticates and selects the database as the
    /// URL says, but it does not encrypt: the function must do that if needed. For tests in virtual time, and for
    /// tunnels.
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

    /// Sets the clock by which checks and refunds are decided. Defaults to the server's clock. For tests.
    ///
    /// Keys of counters then live for at least ten minutes. Bans still end by the server's clock.
    #[must_use]
    pub fn clock_override(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Builds the store, and spawns its background task in the current tokio runtime.
    ///
    /// The task connects now and reconnects whenever the connection is lost. It ends after the store and all its clones
    /// are dropped. This method does not wait for the connection, and the server need not be up. For a `rediss://` URL,
    /// it reads the system's trusted certificates from disk.
    ///
    /// # Errors
    /// Returns an error if the URL or the prefix is invalid, if the URL is `rediss://` and a certificate given to
    /// [`trust`](RedisStoreBuilder::trust) cannot be used, or if no tokio runtime is running.
    pub fn build(self) -> Result<RedisStore, BuildError> {
        let endpoint = Endpoint::parse(&self.url)?;
        let prefix = Prefix::new(&self.prefix)?;
        let tls = endpoint.is_tls.then(|| Tls::new(self.trusted_pem.as_deref())).transpose()?;
        let runtime = Handle::try_current().map_err(|_| BuildError::NoRuntime)?;
        let (queue, mut works) = mpsc::channel(self.queue_length);
        let (catch_ups, catch_ups_received) = mpsc::unbounded_channel();
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
                // After a panic, callers whose work the worker had taken from the queue get an error, because their
                // channels are dropped. Callers in the queue are served by the next run.
                while AssertUnwindSafe(worker.run(&mut works)).catch_unwind().await.is_err() {
                    panics_seen.fetch_add(1, Ordering::Relaxed);
                }
            };
            tokio::select! {
                // The worker is polled first: when a `catch_up` completes, the worker has delivered all replies that it
                // could read.
                biased;
                () = serve => {}
                () = complete_catch_ups(catch_ups_received) => {}
            }
        });
        let RedisStoreBuilder { reads_bans, call_scope, .. } = self;
        let inner = Inner { queue, catch_ups, prefix, endpoint, reads_bans, call_scope, counters, panics };
        Ok(RedisStore(Arc::new(inner)))
    }
}

/// Completes calls of [`Store::catch_up`]. Never returns.
///
/// Sends `()` to each received channel after the worker, which is polled in the same task, has been polled once more.
async fn complete_catch_ups(mut catch_ups: mpsc::UnboundedReceiver<oneshot::Sender<()>>) {
    let mut pending = Vec::new();
    loop {
        if catch_ups.recv_many(&mut pending, CATCH_UPS_MAX).await == 0 {
            // The store was dropped. The worker ends by itself once it has served what is in its queue.
            std::future::pending::<()>().await;
        }
        // The runtime polls its sockets before this task runs again, and then the worker runs first.
        tokio::task::yield_now().await;
        for done in pending.drain(..) {
            let _ = done.send(());
        }
    }
}

impl RedisStore {
    /// Creates a builder with the default settings for the server at `url`.
    ///
    /// The form is `redis://[user:password@]host[:port][/database]`, or `rediss://` for TLS. The port defaults to 6379,
    /// the database to 0. The URL is validated by [`RedisStoreBuilder::build`].
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

    /// Checks that `url` is valid for [`RedisStore::builder`]. Does not connect, and needs no tokio runtime.
    ///
    /// # Errors
    /// Returns an error if the URL is invalid, or if it is `rediss://` and this crate was built without the feature
    /// `tls`. The message says what is accepted and does not contain the password.
    pub fn check_url(url: &str) -> Result<(), UrlError> {
        Endpoint::parse(url).map(drop)
    }

    /// Returns the counts of this store and its clones since the store was built. Does no I/O.
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

    /// Asks the server for its name, its version and its `maxmemory-policy`. For the start of a service.
    ///
    /// The report has a warning if the policy is not `noeviction`, because an evicted counter starts again at zero, or
    /// if the server does not reveal its policy.
    ///
    /// # Errors
    /// Returns an error if `INFO` fails, if its reply has no valid version, or if the version is below Redis 7.0 or
    /// Valkey 7.2. A server in cluster mode is an error of the store with the kind
    /// [`StoreErrorKind::Unsupported`](tollgate_core::StoreErrorKind::Unsupported), unless the store makes
    /// [one call per subject](RedisStoreBuilder::one_subject_per_call).
    pub async fn check_server(&self) -> Result<server_check::ServerReport, server_check::ServerCheckError> {
        let info = self.command(&["INFO", "server"]).await?;
        // A restricted user may not be allowed to run this. The report then has a warning.
        let policy = self.command(&["CONFIG", "GET", "maxmemory-policy"]).await.ok();
        server_check::report(&info, policy.as_ref())
    }

    /// Asks the server for its eviction policy and the number of evicted keys. An evicted counter starts again at zero.
    ///
    /// # Errors
    /// Returns an error if `INFO` fails, for example because the server does not answer or the user may not run it. A
    /// field that is missing in the reply is no error but `None`.
    pub async fn eviction(&self) -> Result<server_check::Eviction, StoreError> {
        let info = self.command(&["INFO", "memory", "stats"]).await?;
        Ok(server_check::Eviction::read(&info))
    }

    /// Runs one command on the connection that decisions use, and returns its reply.
    ///
    /// `parts` are the name of the command and its arguments. A service that keeps some data beside its counters needs
    /// no second client. A string in the reply may have up to 1 MiB. The command is never resent. Decisions wait while
    /// it runs, so it must not be slow or blocking (`BLPOP`). It must not change the mode of the connection
    /// (`SUBSCRIBE`, `MULTI`, `SELECT`). If the future is dropped, a command that was not sent yet is not sent.
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
    /// Returns an error if `parts` is empty, if the command cannot be sent (too many callers wait, or the server is not
    /// reachable), if there is no valid reply within the call timeout, or if the reply is an error.
    pub async fn command(&self, parts: &[impl AsRef<[u8]>]) -> Result<Reply, StoreError> {
        if parts.is_empty() {
            // A server does not reply to an empty command, and the connection would wait for the reply.
            return Err(self.error(Fault::new(Kind::Protocol, "a command must have a name")));
        }
        let mut request = Vec::new();
        push_command(&mut request, parts);
        self.submit(|waiter| Work::Command(request, waiter)).await
    }

    /// Puts the work that `work` creates for a result channel into the worker's queue, and waits for the result.
    ///
    /// If the future is dropped, checks and commands that were not sent yet are not sent. A refund or redemption is sent
    /// nevertheless.
    ///
    /// # Errors
    /// Returns the worker's fault as an error that names the server. The kind is `Unavailable` if the queue is full,
    /// `Unreachable` if the worker has ended, and `Interrupted` if it ends or panics before it sends the result.
    async fn submit<T>(&self, work: impl FnOnce(oneshot::Sender<Result<T, Fault>>) -> Work) -> Result<T, StoreError> {
        let (waiter, answer) = oneshot::channel();
        match self.0.queue.try_send(work(waiter)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                return Err(self.error(Fault::new(Kind::Unavailable, "too many callers are waiting")));
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {
                return Err(self.error(Fault::new(Kind::Unreachable, "the tokio runtime of the store has shut down")));
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

    /// Decides the checks and returns one result per check, in the same order.
    ///
    /// # Errors
    /// Returns an error if a call failed as a whole. With [`CallScope::Subject`] such an error is the result of the
    /// checks of that call instead.
    async fn decide_separately(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        match self.0.call_scope {
            CallScope::Server => self.decide_in_chunks(checks).await,
            CallScope::Subject => self.decide_by_subject(checks).await,
        }
    }

    /// Decides the checks in chunks of [`STEPS_MAX`], and returns one result per check, in the same order.
    ///
    /// A chunk is sent after the one before it was decided.
    ///
    /// # Errors
    /// Returns the error of the first chunk that failed as a whole; later chunks are not sent. If an earlier chunk was
    /// decided, the error is [in part](StoreError::in_part).
    async fn decide_in_chunks(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let mut answers = Vec::with_capacity(checks.len());
        for chunk in checks.chunks(STEPS_MAX) {
            let steps = chunk.iter().map(|check| Step::check(check, &self.0.prefix, self.0.reads_bans)).collect();
            let decided = self.submit(|waiter| Work::Checks(steps, waiter)).await;
            // The chunks before this one were decided and charged.
            let decided = decided.map_err(|error| if answers.is_empty() { error } else { error.in_part() })?;
            answers.extend(decided.into_iter().map(|answer| answer.map_err(|fault| self.error(fault))));
        }
        Ok(answers)
    }

    /// Decides the checks of each subject in calls of their own, all subjects at once.
    ///
    /// Returns one result per check, in the same order, and never an outer error. A check of several subjects fails
    /// with the kind `Forbidden` and is not sent. If a call fails as a whole, all checks of its subject fail with its
    /// error.
    async fn decide_by_subject(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let mut answers: Vec<Option<Result<Decision, StoreError>>> = checks.iter().map(|_| None).collect();
        let mut groups: Vec<(&[u8], Vec<usize>, Vec<Check<'_>>)> = Vec::new();
        for (index, check) in checks.iter().enumerate() {
            let subject = check.demands()[0].key.subject();
            if !counts_only(subject, check) {
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
        let decided = join_all(groups.iter().map(|(_, _, checks)| self.decide_in_chunks(checks))).await;
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

    /// Decides the checks and returns one decision per check, in the same order.
    ///
    /// # Errors
    /// Returns the first error if a check cannot be decided. If another check was decided, the error is
    /// [in part](StoreError::in_part).
    async fn decide_all(&self, checks: &[Check<'_>]) -> Result<Vec<Decision>, StoreError> {
        let answers = self.decide_separately(checks).await?;
        let is_in_part = answers.iter().any(Result::is_ok);
        let decisions: Result<Vec<Decision>, StoreError> = answers.into_iter().collect();
        decisions.map_err(|error| if is_in_part { error.in_part() } else { error })
    }
}

/// Returns whether all demands of the check have this subject.
fn counts_only(subject: &[u8], check: &Check<'_>) -> bool {
    check.demands().iter().all(|demand| demand.key.subject() == subject)
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
        Box::pin(self.decide_separately(checks))
    }

    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            match Step::refund(check, decision, &self.0.prefix) {
                Some(step) => self.submit(|waiter| Work::Refund(step, waiter)).await.map(|_done| ()),
                None => Ok(()),
            }
        })
    }

    /// Gives units back and charges units as `redemption` says, unless its id was used before or is expired.
    ///
    /// The used id is stored under a key with the redemption's subject, which lives until the id expires. With one
    /// subject per call ([`RedisStoreBuilder::one_subject_per_call`]), a redemption of several subjects fails with the
    /// kind `Forbidden`.
    fn redeem<'a>(&'a self, redemption: &'a Redemption<'a>) -> StoreFuture<'a, Redeemed> {
        Box::pin(async move {
            let checks = [redemption.refund.map(|(check, _)| check), redemption.charge];
            let is_of_one_subject = checks.iter().flatten().all(|check| counts_only(redemption.subject, check));
            if self.0.call_scope == CallScope::Subject && !is_of_one_subject {
                return Err(self.error(Fault::new(Kind::Forbidden, SEVERAL_SUBJECTS)));
            }
            let step = Step::redemption(redemption, &self.0.prefix);
            self.submit(|waiter| Work::Refund(step, waiter)).await
        })
    }

    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Box::pin(async move { self.command(&["DEL", &self.0.prefix.counter(demand)]).await.map(drop) })
    }

    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Box::pin(async move {
            let peek = demand.cost(Cost::PEEK);
            let decisions = self.decide_all(&[Check::one(&peek)]).await?;
            let status = decisions.first().and_then(|decision| decision.limits.first().copied());
            status.ok_or_else(|| self.error(Fault::new(Kind::Protocol, "the script's reply is malformed")))
        })
    }

    /// Bans `subject` for `duration`, or permanently if `None`. A new ban replaces an earlier one of the subject.
    ///
    /// Stores that read bans ([`RedisStoreBuilder::bans`]) then refuse its checks. The duration is truncated to whole
    /// milliseconds; below one, it becomes one, and above 285 years, it becomes 285 years.
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

    /// Returns the URL of the server, without user and password.
    fn address(&self) -> Option<String> {
        Some(self.0.endpoint.to_string())
    }

    fn catch_up(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let (done, is_done) = oneshot::channel();
            // If the worker has ended, nothing is left to deliver.
            if self.0.catch_ups.send(done).is_ok() {
                let _ = is_done.await;
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
