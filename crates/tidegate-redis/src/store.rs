//! The store on one Redis or Valkey server, on a cluster, or on the master that Sentinels name.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use tidegate_core::{
    Atomicity, BAN_LIST_MAX, BanListing, Check, Clock, Cost, Decision, Demand, InstanceId, LimitStatus, ListedBan,
    LiveInstances, Location, Redeemed, Redemption, Shard, ShardId, Source, Store, StoreError, StoreErrorKind as Kind,
    StoreFuture, Timestamp, Wait,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::cluster::Cluster;
use crate::cluster::slot::slot_of_key;
use crate::connection::{ConnectFuture, Connector, Stream};
use crate::credentials::{Credentials, CredentialsError, SecretSource};
use crate::fault::Fault;
use crate::key::{Prefix, PrefixError};
use crate::node::Node;
use crate::reply::Reply;
use crate::request::{Step, push_command};
use crate::router::{Refused, Router, Topology};
use crate::sentinel::Sentinels;
use crate::tls::{Tls, TlsError, TlsOptions};
use crate::url::{StoreAddress, StoreUrl, UrlError};
use crate::worker::{CallScope, Counters, Replicas, STEPS_MAX, ServerKind, Work, WorkerSettings};
use crate::{INSTANCES_SCRIPT, SCRIPT, server_check};

/// Larger timeouts are reduced to this one, so that adding one to a time cannot overflow.
const CALL_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// The script that reads and changes the ban list.
const BAN_LIST_SCRIPT: &str = include_str!("../lua/bans.lua");
/// The longest ban, some 285 years: the script counts microseconds exactly up to 2^53.
const BAN_MS_MAX: u128 = (1 << 53) / 1_000;
/// The message of the error of a check or redemption whose subjects are in several hash slots.
const SEVERAL_SLOTS: &str = "the subjects are in different hash slots, and cannot be counted together in one call";
/// The maximum number of subjects that are tried to find one on a certain node. More than 16,384 slots need to find each.
const PROBE_SUBJECTS_MAX: u32 = 200_000;
/// The maximum number of instances that are counted. The set then takes about 100 KB, and a call of its script less than
/// a millisecond, even if the clock was set back.
const INSTANCES_MAX: u32 = 1_000;
/// If more callers wait, the server does not keep up, and waiting would not help.
const QUEUE_LENGTH_DEFAULT: usize = 16_384;
/// Replaces a field of a hash if it has the expected value. KEYS: the hash. ARGV: the field, the expected value, the new
/// value. Returns 1 if it was replaced, else 0.
const REPLACE_HASH_FIELD: &str = "\
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1";

/// A store of counters on Redis or Valkey: on one server, on the masters of a cluster, or on the master that Sentinels
/// name. Cloning is cheap, and clones share the connections.
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
    router: Router,
    prefix: Prefix,
    reads_bans: bool,
}

/// A builder of a [`RedisStore`], created by [`RedisStore::builder`].
///
/// [`build`](RedisStoreBuilder::build) validates the settings.
pub struct RedisStoreBuilder {
    url: Result<StoreUrl, UrlError>,
    prefix: String,
    call_timeout: Duration,
    queue_length: usize,
    reads_bans: bool,
    call_scope: CallScope,
    calls_across_slots: bool,
    trusted_pem: Option<Vec<u8>>,
    tls: TlsOptions,
    credentials: Credentials,
    sentinel_credentials: Credentials,
    replicas: Option<Replicas>,
    connector: Option<Connector>,
    clock: Option<Arc<dyn Clock>>,
}

/// The error of [`RedisStoreBuilder::build`]: a setting is invalid, or there is no tokio runtime.
///
/// Building does not contact the server, so an unreachable server is not an error here.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The URL is invalid, or it requires TLS and this crate was built without the feature `tls`.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The key prefix is invalid.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// The URL requires TLS, and the options given to [`RedisStoreBuilder::tls`] or the certificates given to
    /// [`RedisStoreBuilder::trust`] cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The user or the password cannot be read from its file or variable, or there is a user without a password.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
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
    /// The number of requests that a node of a cluster did not execute because it does not own the slot, does not serve
    /// it at the moment, or does not accept keys of several slots in one call, and of requests that the old master did
    /// not execute during a failover. They were sent again, unless their callers gave up.
    pub redirections: u64,
    /// The number of times that the Sentinels named another master than before.
    pub failovers: u64,
    /// The number of panics of the store's background tasks, which are restarted. Any panic is a bug in Tidegate.
    pub panics: u64,
}

impl RedisStoreBuilder {
    /// The default of [`call_timeout`](Self::call_timeout), 250 ms.
    ///
    /// Long enough for a server that forks or saves. Callers that need a result sooner have a deadline of their own.
    pub const CALL_TIMEOUT_DEFAULT: Duration = Duration::from_millis(250);

    /// Sets the prefix of all keys. Defaults to `tidegate`.
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
    /// [`StoreErrorKind::Unavailable`](tidegate_core::StoreErrorKind::Unavailable) at once. A length of 0 becomes 1.
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

    /// Sets whether a call of the script names keys of one hash slot only. Defaults to `false`: a call names any keys.
    ///
    /// Some proxies, and a node of a cluster, require that the keys of a call share a hash slot. With `true`, each batch
    /// is sent as one call per slot. [`Store::atomicity`] becomes [`Atomicity::Subject`], and a check or redemption
    /// whose subjects are in different slots fails with
    /// [`StoreErrorKind::Forbidden`](tidegate_core::StoreErrorKind::Forbidden). The store still uses one server: it does
    /// not follow redirections to other nodes of a cluster. With `false`, a server in cluster mode is not used: every
    /// call fails with [`StoreErrorKind::Unsupported`](tidegate_core::StoreErrorKind::Unsupported).
    ///
    /// Has no effect for a `redis+cluster://` URL, whose calls have keys of one slot anyway, unless
    /// [`calls_across_slots`](RedisStoreBuilder::calls_across_slots) is set.
    #[must_use]
    pub fn one_subject_per_call(mut self, is_required: bool) -> Self {
        self.call_scope = if is_required { CallScope::Slot } else { CallScope::Server };
        self
    }

    /// Sets whether checks of different hash slots share a call to a node of a cluster. Defaults to `false`.
    ///
    /// With `false`, a batch is sent as one call per slot, so under load nearly every check is a call of its own. With
    /// `true`, all checks for a node share calls, as on a single server, which takes a fraction of the node's CPU time.
    /// Decisions are the same, even while slots are being moved: if a node does not have one of the keys, it changes
    /// nothing, and the checks are sent again as with `false`.
    ///
    /// The calls pass their keys to the script as arguments. Redis 7.0 and Valkey 7.2 and later accept this. A managed
    /// service may not: its documentation says whether scripts may access keys that they do not declare.
    ///
    /// Has no effect on a single server and with Sentinels, where all checks share calls anyway.
    #[must_use]
    pub fn calls_across_slots(mut self, may_share: bool) -> Self {
        self.calls_across_slots = may_share;
        self
    }

    /// Sets the number of replicas that must have acknowledged a check, refund or redemption before its result is
    /// returned. Defaults to 0: results are returned as soon as the master has them.
    ///
    /// Replication is asynchronous. A failover loses the charges that the promoted replica has not received, so up to
    /// that many units may be admitted again. With this setting, a returned decision is also on `count` replicas. It
    /// costs a round trip between the master and its replicas, during which the connection executes nothing else. If
    /// too few replicas have acknowledged within `timeout`, the check fails with
    /// [`StoreErrorKind::TimedOut`](tidegate_core::StoreErrorKind::TimedOut), although it was charged on the master.
    /// `timeout` is rounded down to whole milliseconds, and is at least one. It should be shorter than the caller's
    /// deadline. Bans, resets and [commands](RedisStore::command) do not wait.
    #[must_use]
    pub fn replicas(mut self, count: u32, timeout: Duration) -> Self {
        self.replicas = Replicas::new(count, timeout);
        self
    }

    /// Sets where the user name for the Sentinels is read from, at each connect. Defaults to none: the default user of
    /// the Sentinels.
    ///
    /// The user and the password in a `redis+sentinel://` URL are those of the master. Ignored for other URLs.
    #[must_use]
    pub fn sentinel_username_from(mut self, source: SecretSource) -> Self {
        self.sentinel_credentials.username = Some(source);
        self
    }

    /// Sets where the password for the Sentinels is read from, at each connect. Defaults to none.
    ///
    /// The user and the password in a `redis+sentinel://` URL are those of the master. Ignored for other URLs.
    #[must_use]
    pub fn sentinel_password_from(mut self, source: SecretSource) -> Self {
        self.sentinel_credentials.password = Some(source);
        self
    }

    /// Sets how the store uses TLS. Defaults to the system's certificate authorities and no client certificate.
    ///
    /// A second call replaces the first. Ignored for URLs without TLS.
    #[must_use]
    pub fn tls(mut self, options: TlsOptions) -> Self {
        self.tls = options;
        self
    }

    /// Sets where the user name is read from, at each connect. Defaults to the user in the URL.
    #[must_use]
    pub fn username_from(mut self, source: SecretSource) -> Self {
        self.credentials.username = Some(source);
        self
    }

    /// Sets where the password is read from, at each connect. Defaults to the password in the URL.
    ///
    /// The store needs no restart when a password in a file changes: the next connection uses the new one.
    #[must_use]
    pub fn password_from(mut self, source: SecretSource) -> Self {
        self.credentials.password = Some(source);
        self
    }

    /// Sets certificate authorities to trust, in PEM form, in addition to the system's or those of
    /// [`TlsOptions::ca_file`]. Defaults to none.
    ///
    /// A second call replaces the first. Ignored for URLs without TLS.
    #[must_use]
    pub fn trust(mut self, certificates_pem: impl Into<Vec<u8>>) -> Self {
        self.trusted_pem = Some(certificates_pem.into());
        self
    }

    /// Sets the function that opens connections. Defaults to TCP, with TLS for `rediss://`, to the URL's host and port.
    ///
    /// The store calls the function for every attempt to connect. It then authenticates and selects the database as the
    /// URL says, but it does not encrypt: the function must do that if needed. For tests in virtual time, and for
    /// tunnels to one server. For a cluster and for Sentinels, use [`connector_to`](RedisStoreBuilder::connector_to).
    #[must_use]
    pub fn connector<S, F>(self, connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = io::Result<S>> + Send + 'static,
    {
        self.connector_to(move |_, _| connect())
    }

    /// Sets the function that opens connections, given the host and the port of the server.
    ///
    /// Like [`connector`](RedisStoreBuilder::connector), for a cluster, whose nodes announce their addresses, and for
    /// Sentinels and the master that they name.
    #[must_use]
    pub fn connector_to<S, F>(mut self, connect: impl Fn(&str, u16) -> F + Send + Sync + 'static) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = io::Result<S>> + Send + 'static,
    {
        self.connector = Some(Arc::new(move |endpoint| {
            let connecting = connect(&endpoint.host, endpoint.port);
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

    /// Builds the store, and spawns its background tasks in the current tokio runtime: one per server and Sentinel, and
    /// one more for a cluster or Sentinels.
    ///
    /// They connect now and reconnect whenever a connection is lost. They end after the store and all its clones are
    /// dropped. This method does not wait for the connection, and the server need not be up. For a URL with TLS, it
    /// reads the trusted certificates and the client certificate from disk. It also reads the user and the password if
    /// they are in files.
    ///
    /// # Errors
    /// Returns an error if the URL or the prefix is invalid, if the URL requires TLS and the
    /// [options](RedisStoreBuilder::tls) or a certificate given to [`trust`](RedisStoreBuilder::trust) cannot be used,
    /// if the user or the password cannot be read, or if no tokio runtime is running.
    pub fn build(self) -> Result<RedisStore, BuildError> {
        let url = self.url?;
        let prefix = Prefix::new(&self.prefix)?;
        let first = url.first();
        let tls = first.is_tls.then(|| Tls::new(self.tls, self.trusted_pem)).transpose()?;
        // They are read again at each connect. One error now is clearer than an error of every decision.
        self.credentials.read(first)?;
        if let StoreUrl::Sentinel(url) = &url {
            self.sentinel_credentials.read(&url.sentinels[0])?;
        }
        let runtime = Handle::try_current().map_err(|_| BuildError::NoRuntime)?;
        let (call_scope, server_kind) = match (&url, self.call_scope) {
            (StoreUrl::Server(_) | StoreUrl::Sentinel(_), CallScope::Server) => {
                (CallScope::Server, ServerKind::Standalone)
            }
            (StoreUrl::Server(_) | StoreUrl::Sentinel(_), CallScope::Slot | CallScope::Node) => {
                (CallScope::Slot, ServerKind::Master)
            }
            (StoreUrl::Cluster(_), _) if self.calls_across_slots => (CallScope::Node, ServerKind::ClusterNode),
            (StoreUrl::Cluster(_), _) => (CallScope::Slot, ServerKind::ClusterNode),
        };
        let settings = Arc::new(WorkerSettings {
            tls,
            credentials: Arc::new(self.credentials),
            sentinel_credentials: Arc::new(self.sentinel_credentials),
            connector: self.connector,
            script: SCRIPT,
            server_kind,
            call_timeout: self.call_timeout,
            replicas: self.replicas,
            clock: self.clock,
            counters: Counters::default(),
            refresh_wanted: Notify::new(),
        });
        let topology: Arc<dyn Topology> = match &url {
            StoreUrl::Server(endpoint) => {
                let (id, endpoint) = (ShardId::default(), endpoint.clone());
                Arc::new(Node::spawn(id, endpoint, settings.clone(), self.queue_length, &runtime))
            }
            StoreUrl::Cluster(seeds) => Cluster::spawn(seeds.clone(), settings.clone(), self.queue_length, runtime),
            StoreUrl::Sentinel(url) => Sentinels::spawn(url.clone(), settings.clone(), self.queue_length, runtime),
        };
        let router = Router { url, call_scope, topology, settings, key_pattern: prefix.key_pattern() };
        Ok(RedisStore(Arc::new(Inner { router, prefix, reads_bans: self.reads_bans })))
    }
}

impl RedisStore {
    /// Creates a builder with the default settings for the server, the cluster or the Sentinels at `url`.
    ///
    /// The form is `redis://[user:password@]host[:port][/database]` for one server. For a cluster it is
    /// `redis+cluster://[user:password@]host[:port],host[:port],…` with some of its nodes; the others are found through
    /// them. For a master that Sentinels watch under a name it is
    /// `redis+sentinel://[user:password@]host[:port],host[:port],…/NAME[/database]` with some of the Sentinels; user
    /// and password are those of the master. `rediss://`, `rediss+cluster://` and `rediss+sentinel://` use TLS. The
    /// port defaults to 6379, that of a Sentinel to 26379, and the database to 0. The URL is validated by
    /// [`RedisStoreBuilder::build`].
    pub fn builder(url: impl Into<String>) -> RedisStoreBuilder {
        RedisStore::builder_of(StoreUrl::parse(&url.into()))
    }

    /// Creates a builder like [`builder`](RedisStore::builder), for an address instead of a URL.
    pub fn builder_for(address: StoreAddress) -> RedisStoreBuilder {
        RedisStore::builder_of(Ok(address.0))
    }

    fn builder_of(url: Result<StoreUrl, UrlError>) -> RedisStoreBuilder {
        RedisStoreBuilder {
            url,
            prefix: "tidegate".into(),
            call_timeout: RedisStoreBuilder::CALL_TIMEOUT_DEFAULT,
            queue_length: QUEUE_LENGTH_DEFAULT,
            reads_bans: false,
            call_scope: CallScope::default(),
            calls_across_slots: false,
            trusted_pem: None,
            tls: TlsOptions::default(),
            credentials: Credentials::of_store(),
            sentinel_credentials: Credentials::of_sentinels(),
            replicas: None,
            connector: None,
            clock: None,
        }
    }

    /// Checks that `url` is valid for [`RedisStore::builder`]. Does not connect, and needs no tokio runtime.
    ///
    /// # Errors
    /// Returns an error if the URL is invalid, or if it requires TLS and this crate was built without the feature
    /// `tls`. The message says what is accepted and does not contain the password.
    pub fn check_url(url: &str) -> Result<(), UrlError> {
        StoreUrl::parse(url).map(drop)
    }

    /// Returns the counts of this store and its clones since the store was built. Does no I/O.
    pub fn stats(&self) -> RedisStats {
        let counters = &self.0.router.settings.counters;
        RedisStats {
            calls: counters.calls.load(Ordering::Relaxed),
            decisions: counters.decisions.load(Ordering::Relaxed),
            connects: counters.connects.load(Ordering::Relaxed),
            scripts_sent: counters.scripts_sent.load(Ordering::Relaxed),
            redirections: counters.redirections.load(Ordering::Relaxed),
            failovers: counters.failovers.load(Ordering::Relaxed),
            panics: counters.panics.load(Ordering::Relaxed),
        }
    }

    /// Asks each server for its name, its version and its `maxmemory-policy`. For the start of a service.
    ///
    /// The report has a warning if the policy is not `noeviction`, because an evicted counter starts again at zero, or
    /// if the server does not reveal its policy. On a cluster, all masters are asked, and a warning names the node.
    ///
    /// # Errors
    /// Returns an error if `INFO` fails, if its reply has no valid version, or if the version is below Redis 7.0 or
    /// Valkey 7.2. A server in cluster mode behind the URL of a single server is an error of the store with the kind
    /// [`StoreErrorKind::Unsupported`](tidegate_core::StoreErrorKind::Unsupported), unless the store makes
    /// [one call per slot](RedisStoreBuilder::one_subject_per_call).
    pub async fn check_server(&self) -> Result<server_check::ServerReport, server_check::ServerCheckError> {
        let masters = self.0.router.masters().await?;
        let reports = join_all(masters.iter().map(|node| async {
            // All sections: Redis before 7.0 accepts the name of only one, and must be detected as too old.
            let info = node.command(&["INFO"]).await.map_err(|fault| fault.into_error(&node.endpoint))?;
            server_check::report(&info)
        }));
        let named = masters.iter().map(|node| node.endpoint.to_string()).zip(reports.await);
        server_check::combine(named.collect())
    }

    /// Asks each server for its eviction policy and the number of evicted keys. An evicted counter starts again at zero.
    ///
    /// On a cluster, the number is that of all masters, and the policy is one other than `noeviction` if any master has
    /// one.
    ///
    /// # Errors
    /// Returns an error if `INFO` fails, for example because the server does not answer or the user may not run it. A
    /// field that is missing in the reply is no error but `None`.
    pub async fn eviction(&self) -> Result<server_check::Eviction, StoreError> {
        let masters = self.0.router.masters().await?;
        let infos = masters.iter().map(|node| async {
            let info = node.command(&["INFO", "memory", "stats"]).await;
            info.map(|info| server_check::Eviction::read(&info)).map_err(|fault| fault.into_error(&node.endpoint))
        });
        let evictions: Result<Vec<_>, StoreError> = join_all(infos).await.into_iter().collect();
        Ok(server_check::Eviction::sum(evictions?))
    }

    /// Runs one command on the connection that decisions use, and returns its reply.
    ///
    /// `parts` are the name of the command and its arguments. A service that keeps some data beside its counters needs
    /// no second client. A string in the reply may have up to 1 MiB. The command is never resent. Decisions wait while
    /// it runs, so it must not be slow or blocking (`BLPOP`). It must not change the mode of the connection
    /// (`SUBSCRIBE`, `MULTI`, `SELECT`). If the future is dropped, a command that was not sent yet is not sent.
    ///
    /// On a cluster, the command is sent to the node that owns the slot of its first argument, which must be its key.
    ///
    /// ```no_run
    /// # async fn example(store: tidegate_redis::RedisStore) -> Result<(), tidegate_core::StoreError> {
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
        self.run_command(parts.get(1).map_or(&[], |key| key.as_ref()), parts).await
    }

    /// Replaces the value of a field of a Redis hash by `value`, if it is still `expected`. Returns whether it was.
    ///
    /// Returns `false`, and writes nothing, if the field has another value or does not exist. Both steps are one call on
    /// the server, so no change of another writer is lost. The call is never resent. The store's key prefix is not added
    /// to `hash`.
    ///
    /// # Errors
    /// Returns an error in the cases of [`command`](RedisStore::command). After a timeout, the field may have been
    /// replaced.
    pub async fn replace_hash_field(
        &self,
        hash: &str,
        field: &str,
        expected: &[u8],
        value: &[u8],
    ) -> Result<bool, StoreError> {
        let parts = [b"EVAL", REPLACE_HASH_FIELD.as_bytes(), b"1", hash.as_bytes(), field.as_bytes(), expected, value];
        let reply = self.run_command(hash.as_bytes(), &parts).await?;
        Ok(reply == Reply::Integer(1))
    }

    /// Sends a command to the node that owns the slot of `key`, and returns its reply.
    async fn run_command(&self, key: &[u8], parts: &[impl AsRef<[u8]>]) -> Result<Reply, StoreError> {
        let slot = match self.0.router.call_scope {
            CallScope::Server => 0,
            CallScope::Slot | CallScope::Node => slot_of_key(key),
        };
        let mut request = Vec::new();
        push_command(&mut request, parts);
        self.0.router.run_alone(slot, |sharing, waiter| Work::Command(request.clone(), sharing, waiter)).await
    }

    /// Runs the script of the ban list with these arguments.
    async fn call_ban_list(&self, arguments: &[&str]) -> Result<Reply, StoreError> {
        let key = self.0.prefix.ban_list();
        let call = ["EVAL", BAN_LIST_SCRIPT, "1", &key];
        self.run_command(key.as_bytes(), &[&call[..], arguments].concat()).await
    }

    fn error(&self, fault: Fault) -> StoreError {
        self.0.router.error(fault)
    }

    /// Returns the hash slot of a check, or `None` if its subjects are in several.
    fn slot_of(&self, check: &Check<'_>) -> Option<u16> {
        self.common_slot(check.demands().iter().map(|demand| demand.key.subject()))
    }

    /// Returns the hash slot of the subjects, 0 without any, or `None` if they are in several.
    fn common_slot<'s>(&self, mut subjects: impl Iterator<Item = &'s [u8]>) -> Option<u16> {
        if self.0.router.call_scope == CallScope::Server {
            return Some(0);
        }
        let Some(first) = subjects.next() else { return Some(0) };
        let slot = self.0.router.slot(first);
        subjects.all(|subject| subject == first || self.0.router.slot(subject) == slot).then_some(slot)
    }

    /// Decides the checks of each hash slot in calls of their own, all slots at once. Returns one result per check, in
    /// the same order.
    ///
    /// A check of several slots fails with the kind `Forbidden` and is not sent. If a call fails as a whole, all checks of
    /// its slot fail with its error.
    ///
    /// # Errors
    /// Returns an error if all checks are in one slot, and a call failed as a whole.
    async fn decide_separately(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let mut slots = checks.iter().map(|check| self.slot_of(check));
        if let Some(Some(slot)) = slots.next()
            && slots.all(|other| other == Some(slot))
        {
            return self.decide_in_slot(slot, checks).await;
        }
        let mut answers: Vec<Option<Result<Decision, StoreError>>> = checks.iter().map(|_| None).collect();
        let mut groups: Vec<(u16, Vec<usize>, Vec<Check<'_>>)> = Vec::new();
        for (index, check) in checks.iter().enumerate() {
            let Some(slot) = self.slot_of(check) else {
                answers[index] = Some(Err(self.error(Fault::new(Kind::Forbidden, SEVERAL_SLOTS))));
                continue;
            };
            match groups.iter_mut().find(|(group, ..)| *group == slot) {
                Some((_, indices, checks)) => {
                    indices.push(index);
                    checks.push(*check);
                }
                None => groups.push((slot, vec![index], vec![*check])),
            }
        }
        let decided = join_all(groups.iter().map(|(slot, _, checks)| self.decide_in_slot(*slot, checks))).await;
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

    /// Decides checks of one hash slot in chunks of [`STEPS_MAX`], and returns one result per check, in the same order.
    ///
    /// A chunk is sent after the one before it was decided. While the slot is being moved, the checks of a chunk are sent
    /// one after the other.
    ///
    /// # Errors
    /// Returns the error of the first chunk that failed as a whole; later chunks are not sent. If an earlier chunk was
    /// decided, the error is [in part](StoreError::in_part).
    async fn decide_in_slot(
        &self,
        slot: u16,
        checks: &[Check<'_>],
    ) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let mut answers = Vec::with_capacity(checks.len());
        for chunk in checks.chunks(STEPS_MAX) {
            let work = |sharing, waiter| {
                let step = |check| Step::check(check, &self.0.prefix, self.0.reads_bans);
                Work::Checks(chunk.iter().map(step).collect(), sharing, waiter)
            };
            match self.0.router.run_checks(slot, work).await {
                Ok(decided) => {
                    answers.extend(decided.into_iter().map(|answer| answer.map_err(|fault| self.error(fault))))
                }
                Err(Refused::SlotIsMoving) => {
                    for check in chunk {
                        answers.push(self.decide_alone(slot, check).await);
                    }
                }
                // The chunks before this one were decided and charged.
                Err(Refused::Failed(error)) => return Err(if answers.is_empty() { error } else { error.in_part() }),
            }
        }
        Ok(answers)
    }

    /// Decides a check whose hash slot is being moved: the bans of its subjects first, then its limits, in calls that name
    /// as few keys as possible.
    async fn decide_alone(&self, slot: u16, check: &Check<'_>) -> Result<Decision, StoreError> {
        if self.0.reads_bans && check.charges() {
            let mut longest = None;
            for (index, demand) in check.demands().iter().enumerate() {
                let subject = demand.key.subject();
                if check.demands()[..index].iter().all(|earlier| earlier.key.subject() != subject) {
                    longest = longest.max(self.ban_of(subject).await?);
                }
            }
            if let Some(ban) = longest {
                return Ok(Decision::banned(self.server_time(slot).await?, Source::Store, ban, check));
            }
        }
        let work = |sharing, waiter| Work::Checks(vec![Step::check(check, &self.0.prefix, false)], sharing, waiter);
        let decided = self.0.router.run_alone(slot, work).await?;
        let Some(decided) = decided.into_iter().next() else { return Err(self.error(malformed_reply())) };
        decided.map_err(|fault| self.error(fault))
    }

    /// Returns the time by which the owner of a slot decides.
    async fn server_time(&self, slot: u16) -> Result<Timestamp, StoreError> {
        if let Some(clock) = &self.0.router.settings.clock {
            return Ok(clock.now());
        }
        let mut request = Vec::new();
        push_command(&mut request, &["TIME"]);
        let work = |sharing, waiter| Work::Command(request.clone(), sharing, waiter);
        let reply = self.0.router.run_alone(slot, work).await?;
        let part = |index: usize| match &reply {
            Reply::List(parts) => parts.get(index)?.as_text()?.parse::<u64>().ok(),
            _ => None,
        };
        let (Some(seconds), Some(micros)) = (part(0), part(1)) else { return Err(self.error(malformed_reply())) };
        Ok(Timestamp::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros)))
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

/// Returns the version of the ban list in the reply to `HGET`: 0 without a list, or `None` if it is not a number.
fn version_of(reply: &Reply) -> Option<u64> {
    match reply {
        Reply::Nil => Some(0),
        reply => reply.as_text()?.parse().ok(),
    }
}

/// Returns the ban list in a reply of its script, or `None` if the reply has another form.
fn ban_listing(reply: &Reply) -> Option<BanListing> {
    let Reply::List(parts) = reply else { return None };
    let [version, now, Reply::List(fields)] = &parts[..] else { return None };
    let number = |reply: &Reply| reply.as_text()?.parse::<u64>().ok();
    let (version, now) = (number(version)?, number(now)?);
    let mut bans = Vec::with_capacity(fields.len() / 2);
    for pair in fields.chunks_exact(2) {
        let (entry, end) = (pair[0].as_text()?, number(&pair[1])?);
        let remaining = match end {
            0 => Wait::NEVER,
            end => Wait::from_micros(end.saturating_sub(now).saturating_mul(1_000)),
        };
        if entry != "version" && remaining != Wait::ZERO {
            bans.push(ListedBan::new(entry, remaining));
        }
    }
    Some(BanListing::new(version, bans))
}

/// Creates the fault of a reply that does not have the expected form.
fn malformed_reply() -> Fault {
    Fault::new(Kind::Protocol, "the server's reply is malformed")
}

impl Store for RedisStore {
    fn atomicity(&self) -> Atomicity {
        match self.0.router.call_scope {
            CallScope::Server => Atomicity::Check,
            CallScope::Slot | CallScope::Node => Atomicity::Subject,
        }
    }

    fn locate(&self, subject: &[u8]) -> Location {
        self.0.router.locate(subject)
    }

    fn shards(&self) -> Vec<Shard> {
        let shard = |node: &Arc<Node>| Shard::new(node.id, Some(node.endpoint.to_string()));
        self.0.router.topology.known_masters().iter().map(shard).collect()
    }

    /// Returns the number of times that the Sentinels named another master than before. Always 0 for one server and for
    /// a cluster.
    fn failovers(&self) -> u64 {
        self.stats().failovers
    }

    /// Probes a server with a subject whose slot it owns. The shard 0 has the slots without a known owner: for it, finds
    /// out which servers hold keys. For a server that no longer holds keys, does nothing.
    fn probe(&self, shard: ShardId) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let topology = &self.0.router.topology;
            if topology.known_masters().iter().all(|master| master.id != shard) {
                if shard == ShardId::default() {
                    topology.refreshed().await.map_err(|fault| self.error(fault))?;
                }
                return Ok(());
            }
            let subjects = (0..PROBE_SUBJECTS_MAX).map(|number| format!("tidegate-{number}"));
            let mut subjects = std::iter::once("tidegate".to_owned()).chain(subjects);
            let on_shard = |subject: &String| self.0.router.locate(subject.as_bytes()).shard == shard;
            let Some(subject) = subjects.find(on_shard) else { return Ok(()) };
            let demand = Demand::probe_of(&subject);
            self.decide_all(&[Check::one(&demand)]).await.map(drop)
        })
    }

    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        Box::pin(self.decide_all(checks))
    }

    fn decide_each<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Result<Decision, StoreError>>> {
        Box::pin(self.decide_separately(checks))
    }

    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let Some(step) = Step::refund(check, decision, &self.0.prefix) else { return Ok(()) };
            let Some(slot) = self.slot_of(check) else {
                return Err(self.error(Fault::new(Kind::Forbidden, SEVERAL_SLOTS)));
            };
            let work = |sharing, waiter| Work::Refund(step.clone(), sharing, waiter);
            self.0.router.run_any(slot, work).await.map(|_done| ())
        })
    }

    /// Gives units back and charges units as `redemption` says, unless its id was used before or is expired.
    ///
    /// The used id is a bit under a key with the redemption's subject, which lives until the ids of the key expire. On a cluster,
    /// and with [one call per slot](RedisStoreBuilder::one_subject_per_call), a redemption whose subjects are in several
    /// hash slots fails with the kind `Forbidden`.
    fn redeem<'a>(&'a self, redemption: &'a Redemption<'a>) -> StoreFuture<'a, Redeemed> {
        Box::pin(async move {
            let checks = [redemption.refund.map(|(check, _)| check), redemption.charge];
            let demands = checks.iter().flatten().flat_map(|check| check.demands());
            let subjects = demands.map(|demand| demand.key.subject()).chain([redemption.subject]);
            let Some(slot) = self.common_slot(subjects) else {
                return Err(self.error(Fault::new(Kind::Forbidden, SEVERAL_SLOTS)));
            };
            let work = |sharing, waiter| Work::Refund(Step::redemption(redemption, &self.0.prefix), sharing, waiter);
            self.0.router.run_any(slot, work).await
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
            status.ok_or_else(|| self.error(malformed_reply()))
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

    fn list_ban<'a>(&'a self, entry: &'a str, duration: Option<Duration>) -> StoreFuture<'a, bool> {
        Box::pin(async move {
            StoreError::check_ban_entry(entry)?;
            let ms = duration.map_or(0, |duration| duration.as_millis().clamp(1, BAN_MS_MAX)).to_string();
            let reply = self.call_ban_list(&["add", entry, &ms, &BAN_LIST_MAX.to_string()]).await?;
            Ok(reply == Reply::Integer(1))
        })
    }

    fn unlist_ban<'a>(&'a self, entry: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async move { Ok(self.call_ban_list(&["remove", entry]).await? == Reply::Integer(1)) })
    }

    /// Reads the version of the list, in one small call, and the list only if that is not `known`.
    fn listed_bans(&self, known: Option<u64>) -> StoreFuture<'_, Option<BanListing>> {
        Box::pin(async move {
            if known.is_some() {
                let version = self.command(&["HGET", &self.0.prefix.ban_list(), "version"]).await?;
                if version_of(&version) == known {
                    return Ok(None);
                }
            }
            let reply = self.call_ban_list(&["read"]).await?;
            ban_listing(&reply).map(Some).ok_or_else(|| self.error(malformed_reply()))
        })
    }

    /// Announces the instance in one sorted set per key prefix, and counts the live ones, in one call by the server's
    /// clock.
    ///
    /// The set has at most 1,000 instances. While it is full, further ones are not added to it, and the count is 1,000.
    /// The set expires with its newest announcement.
    fn announce(&self, id: InstanceId, lifetime: Duration) -> StoreFuture<'_, Option<LiveInstances>> {
        Box::pin(async move {
            let (key, id) = (self.0.prefix.instances(), id.to_string());
            let (lifetime_ms, size_max) = (lifetime.as_millis().max(1).to_string(), INSTANCES_MAX.to_string());
            let now = self.0.router.settings.clock.as_ref().map(|clock| clock.now().as_micros() / 1_000);
            let now_ms = now.map_or_else(String::new, |ms| ms.to_string());
            let call = ["EVAL", INSTANCES_SCRIPT, "1", &key, &id, &lifetime_ms, &size_max, &now_ms];
            let reply = self.run_command(key.as_bytes(), &call).await?;
            let Reply::List(numbers) = &reply else { return Err(self.error(malformed_reply())) };
            match numbers[..] {
                [Reply::Integer(count @ 1..), Reply::Integer(was_live)] => {
                    let count = u32::try_from(count).unwrap_or(u32::MAX);
                    Ok(Some(LiveInstances::new(count, was_live == 1)))
                }
                _ => Err(self.error(malformed_reply())),
            }
        })
    }

    fn withdraw(&self, id: InstanceId) -> StoreFuture<'_, ()> {
        Box::pin(async move { self.command(&["ZREM", &self.0.prefix.instances(), &id.to_string()]).await.map(drop) })
    }

    fn unanswered_for(&self, shard: ShardId) -> Option<Duration> {
        let nodes = self.0.router.topology.nodes();
        nodes.iter().find(|node| node.id == shard).and_then(|node| node.unanswered_for())
    }

    /// Returns the URL of the server, the cluster or the Sentinels, without user and password.
    fn address(&self) -> Option<String> {
        Some(self.0.router.url.to_string())
    }

    fn catch_up(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let nodes = self.0.router.topology.nodes();
            join_all(nodes.iter().map(|node| node.catch_up())).await;
        })
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisStore").field(&self.0.router.url).finish()
    }
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RedisStoreBuilder");
        match &self.url {
            Ok(url) => shown.field("url", url),
            Err(error) => shown.field("url", &error.to_string()),
        };
        shown.field("prefix", &self.prefix).finish_non_exhaustive()
    }
}
