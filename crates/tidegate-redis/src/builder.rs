//! The builder of a store: its servers, its settings, and how it connects.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
#[cfg(doc)]
use tidegate_core::{Atomicity, Store, StoreError};
use tidegate_core::{Clock, ShardId};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::SCRIPT;
use crate::cluster::Cluster;
use crate::connection::Stream;
use crate::credentials::{CredentialSource, Credentials, CredentialsError};
use crate::key::{Prefix, PrefixError};
use crate::node::Node;
use crate::router::{Router, Topology};
use crate::sentinel::Sentinels;
use crate::store::RedisStore;
use crate::tls::{Tls, TlsError, TlsOptions};
use crate::url::{StoreAddress, StoreKind, UrlError};
use crate::worker::{CallScope, Replicas, ServerKind, WorkerSettings};

/// Larger timeouts are reduced to this one, so that adding one to a time cannot overflow.
const CALL_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// If more callers wait, the server does not keep up, and waiting would not help.
const QUEUE_LENGTH_DEFAULT: usize = 16_384;

/// A builder of a [`RedisStore`], created by [`RedisStore::builder`].
///
/// [`build`](RedisStoreBuilder::build) validates the settings.
pub struct RedisStoreBuilder {
    address: Result<StoreAddress, UrlError>,
    prefix: String,
    reads_bans: bool,
    call_scope: CallScope,
    calls_across_slots: bool,
    trusted_pem: Option<Vec<u8>>,
    tls: TlsOptions,
    settings: WorkerSettings,
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

impl RedisStoreBuilder {
    /// Creates a builder with the default settings for these servers.
    pub(crate) fn new(address: Result<StoreAddress, UrlError>) -> RedisStoreBuilder {
        let settings = WorkerSettings {
            tls: None,
            credentials: Arc::new(Credentials::of("the store")),
            sentinel_credentials: Arc::new(Credentials::of("the Sentinels")),
            connector: None,
            script: SCRIPT,
            server_kind: ServerKind::Standalone,
            call_timeout: RedisStoreBuilder::CALL_TIMEOUT_DEFAULT,
            replicas: None,
            queue_length: QUEUE_LENGTH_DEFAULT,
            clock: None,
            stats: Mutex::default(),
            refresh_wanted: Notify::new(),
        };
        RedisStoreBuilder {
            address,
            prefix: "tidegate".into(),
            reads_bans: false,
            call_scope: CallScope::default(),
            calls_across_slots: false,
            trusted_pem: None,
            tls: TlsOptions::default(),
            settings,
        }
    }

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
        self.settings.call_timeout = call_timeout.min(CALL_TIMEOUT_MAX);
        self
    }

    /// Sets the length of the queue in which callers wait until their requests are sent. Defaults to 16,384.
    ///
    /// While the queue is full, further callers get
    /// [`StoreErrorKind::Unavailable`](tidegate_core::StoreErrorKind::Unavailable) at once. A length of 0 becomes 1.
    #[must_use]
    pub fn queue_length(mut self, queue_length: usize) -> Self {
        self.settings.queue_length = queue_length.max(1);
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
        self.settings.replicas = Replicas::new(count, timeout);
        self
    }

    /// Sets where the user name for the Sentinels is read from, at each connect. Defaults to none: the default user of
    /// the Sentinels.
    ///
    /// The user and the password in a `redis+sentinel://` URL are those of the master. Ignored for other URLs.
    #[must_use]
    pub fn sentinel_username_from(mut self, source: CredentialSource) -> Self {
        Arc::make_mut(&mut self.settings.sentinel_credentials).username = Some(source);
        self
    }

    /// Sets where the password for the Sentinels is read from, at each connect. Defaults to none.
    ///
    /// The user and the password in a `redis+sentinel://` URL are those of the master. Ignored for other URLs.
    #[must_use]
    pub fn sentinel_password_from(mut self, source: CredentialSource) -> Self {
        Arc::make_mut(&mut self.settings.sentinel_credentials).password = Some(source);
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
    pub fn username_from(mut self, source: CredentialSource) -> Self {
        Arc::make_mut(&mut self.settings.credentials).username = Some(source);
        self
    }

    /// Sets where the password is read from, at each connect. Defaults to the password in the URL.
    ///
    /// The store needs no restart when a password in a file changes: the next connection uses the new one.
    #[must_use]
    pub fn password_from(mut self, source: CredentialSource) -> Self {
        Arc::make_mut(&mut self.settings.credentials).password = Some(source);
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

    /// Sets the function that opens connections, given the host and the port of the server. Defaults to TCP, with TLS for
    /// `rediss://`.
    ///
    /// The store calls the function for every attempt to connect: to the host and the port in the URL, to the nodes that a
    /// cluster announces, or to the Sentinels and the master that they name. It then authenticates and selects the database
    /// as the URL says, but it does not encrypt: the function must do that if needed. For tests in virtual time, and for
    /// tunnels.
    #[must_use]
    pub fn connector<S, F>(mut self, connect: impl Fn(&str, u16) -> F + Send + Sync + 'static) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = io::Result<S>> + Send + 'static,
    {
        self.settings.connector = Some(Arc::new(move |endpoint| {
            let connecting = connect(&endpoint.host, endpoint.port);
            async { Ok(Box::new(connecting.await?) as Box<dyn Stream>) }.boxed()
        }));
        self
    }

    /// Sets the clock by which checks and refunds are decided. Defaults to the server's clock. For tests.
    ///
    /// Keys of counters then live for at least ten minutes. Bans still end by the server's clock.
    #[must_use]
    pub fn clock_override(mut self, clock: Arc<dyn Clock>) -> Self {
        self.settings.clock = Some(clock);
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
        let address = self.address?;
        let prefix = Prefix::new(&self.prefix)?;
        let (server, endpoints) = (&address.server, address.endpoints());
        let mut settings = self.settings;
        settings.tls = server.is_tls.then(|| Tls::new(self.tls, self.trusted_pem)).transpose()?;
        // They are read again at each connect. One error now is clearer than an error of every decision.
        settings.credentials.read(server)?;
        if address.kind == StoreKind::Sentinel {
            settings.sentinel_credentials.read(&endpoints[0])?;
        }
        let runtime = Handle::try_current().map_err(|_| BuildError::NoRuntime)?;
        let call_scope;
        (call_scope, settings.server_kind) = match (address.kind, self.call_scope) {
            (StoreKind::Cluster, _) if self.calls_across_slots => (CallScope::Node, ServerKind::ClusterNode),
            (StoreKind::Cluster, _) => (CallScope::Slot, ServerKind::ClusterNode),
            (_, CallScope::Server) => (CallScope::Server, ServerKind::Standalone),
            (_, CallScope::Slot | CallScope::Node) => (CallScope::Slot, ServerKind::Master),
        };
        let settings = Arc::new(settings);
        let topology: Arc<dyn Topology> = match address.kind {
            StoreKind::Server => Arc::new(Node::spawn(ShardId::default(), server.clone(), settings.clone(), &runtime)),
            StoreKind::Cluster => Cluster::spawn(endpoints, settings.clone(), runtime),
            StoreKind::Sentinel => Sentinels::spawn(&address, settings.clone(), runtime),
        };
        let reads_bans = self.reads_bans;
        Ok(RedisStore(Arc::new(Router { address, prefix, reads_bans, call_scope, topology, settings })))
    }
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RedisStoreBuilder");
        match &self.address {
            Ok(address) => shown.field("url", address),
            Err(error) => shown.field("url", &error.to_string()),
        };
        shown.field("prefix", &self.prefix).finish_non_exhaustive()
    }
}
