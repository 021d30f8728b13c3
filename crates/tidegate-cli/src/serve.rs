//! `tidegate serve` and `tidegate gateway`: create the store, the limiter, the rules and the listeners, and run them until
//! a signal. The commands differ in their listeners; everything else is [`start`].

mod announce;
mod descriptors;
mod memory;
mod signals;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tidegate::config::{Loaded, Loader, Settings};
use tidegate::engine::Engine;
use tidegate::gateway::ServerUrl;
use tidegate::observe::TracingObserver;
use tidegate::rules::{Charge, Lookups, RuleSet};
use tidegate::{Limit, Limiter, LimiterBuilder, MemoryStore, Rule, Rules, Store, Subject};
use tidegate_redis::{RedisStore, ServerCheckError, ServerReport};
use tidegate_server::listeners::resp::RespOptions;
use tidegate_server::{
    Bounds, Listeners, Readiness, ReceiptSecret, Reloader, ServerOptions, StoreTimes, Tls, Token, is_loopback, run,
    watch_memory,
};
use tokio::net::{TcpListener, TcpSocket};
use tracing_subscriber::EnvFilter;

use self::announce::{Addresses, AdminToken, Announcement};
use self::signals::Signals;
use crate::arguments::{Gateway, Serve, ServiceOptions};
use crate::inherited::InheritedSockets;
use crate::store::check_server;
use crate::{Failure, configuration, secrets};

const ADMIN_DEFAULT: &str = "127.0.0.1:9180";
const GATEWAY_DEFAULT: &str = "127.0.0.1:8000";
/// Interval at which [`watch_eviction`] reads whether the store's server evicts counters.
const EVICTION_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of connections that wait to be accepted. A client beyond that retries after a second. Linux limits it
/// to 4,096.
const BACKLOG: u32 = 4_096;
/// The value of an address option that disables the listener.
const OFF: &str = "off";

/// The listeners of a command, besides the admin listener, and what only they need.
struct Endpoints {
    /// The addresses of the HTTP and the RESP listener, each perhaps `off`.
    http: String,
    resp: String,
    /// The address of the gateway; `None` means that of the configuration file, else `gateway_default`.
    gateway: Option<String>,
    gateway_default: &'static str,
    /// The option that sets the address of the gateway.
    gateway_option: &'static str,
    resp_password_file: Option<PathBuf>,
    http_token_file: Option<PathBuf>,
    receipt_secret_file: Option<PathBuf>,
    /// Whether listeners need no secret on addresses that other machines can reach.
    is_insecure: bool,
    /// The servers of the only upstream, instead of the upstreams of the configuration file.
    servers: Vec<ServerUrl>,
    /// The only limit, instead of a configuration file.
    limit: Option<Limit>,
}

/// Runs `tidegate serve`: starts the service, prints its addresses, and serves until SIGTERM or SIGINT.
///
/// # Errors
/// See [`start`].
pub(crate) async fn serve(arguments: Serve, inherited: InheritedSockets) -> Result<(), Failure> {
    let endpoints = Endpoints {
        http: arguments.http,
        resp: arguments.resp,
        gateway: arguments.gateway,
        gateway_default: OFF,
        gateway_option: "gateway",
        resp_password_file: arguments.resp_password_file,
        http_token_file: arguments.http_token_file,
        receipt_secret_file: arguments.receipt_secret_file,
        is_insecure: arguments.insecure,
        servers: Vec::new(),
        limit: None,
    };
    start(arguments.service, endpoints, inherited).await
}

/// Runs `tidegate gateway`: starts the gateway, prints its address, and serves until SIGTERM or SIGINT.
///
/// # Errors
/// If there is no upstream, and see [`start`].
pub(crate) async fn gateway(arguments: Gateway, inherited: InheritedSockets) -> Result<(), Failure> {
    let endpoints = Endpoints {
        http: OFF.to_owned(),
        resp: OFF.to_owned(),
        gateway: arguments.listen,
        gateway_default: GATEWAY_DEFAULT,
        gateway_option: "listen",
        resp_password_file: None,
        http_token_file: None,
        receipt_secret_file: None,
        is_insecure: false,
        servers: arguments.upstreams,
        limit: arguments.limit,
    };
    start(arguments.service, endpoints, inherited).await
}

/// Starts the service, prints the addresses of its listeners, and serves until SIGTERM or SIGINT.
///
/// Then keeps serving for `--drain`, closes the listeners and returns. A Redis store that is down is not an error; one
/// that answers and cannot be used, such as a node of a cluster, is.
///
/// Also starts logging, raises the process's limit of open files, and generates an admin token and prints it if none
/// was given. Exits the process at a second SIGTERM or SIGINT.
///
/// A listener whose address is that of an inherited socket uses it.
///
/// # Errors
/// If an option, the configuration file, the certificate or a secret is invalid, the store's server cannot be used, a
/// listener cannot be bound, there is no listener, or a listener can be reached from other machines and no token or
/// password was given for it.
async fn start(
    arguments: ServiceOptions,
    endpoints: Endpoints,
    mut inherited: InheritedSockets,
) -> Result<(), Failure> {
    let signals = Signals::install()?;
    start_logs(&arguments.log);
    let loader = loader(&arguments)?;
    let loaded = load(&arguments, &endpoints, &loader)?;
    let settings = match &loaded {
        Some(loaded) => loaded.settings.clone(),
        None => configuration::settings(None, &loader)?,
    };
    let store = settings.redis()?;
    let receipt_secret = receipt_secret(endpoints.receipt_secret_file.as_deref(), &settings)?;
    let decides_checks = endpoints.http != OFF || endpoints.resp != OFF;
    if let Some(loaded) = loaded.as_ref().filter(|_| decides_checks) {
        warn_about_refunds(&loaded.rules, receipt_secret.is_some());
        log_settings_for_requests_only(loaded);
    }
    let server = match &store {
        Some(store) => Some(check_server(store).await?),
        None => None,
    };
    let store_times = Arc::new(StoreTimes::default());
    #[cfg(feature = "otlp")]
    let traces = arguments.otlp.as_deref().map(crate::traces::SpanExport::new).transpose()?;
    let (builder, lookups) = limiter(store.clone(), &settings, &store_times);
    let memory = memory::Share::divide(arguments.memory.unwrap_or_else(memory::default_bytes));
    let builder = builder.memory(MemoryStore::builder().max_bytes(memory.limits_bytes).build());
    #[cfg(feature = "otlp")]
    let builder = match &traces {
        Some(traces) => builder.observer(traces.observer()),
        None => builder,
    };
    let limiter = builder.build();
    let tls = match (&arguments.tls_cert, &arguments.tls_key) {
        (Some(certificate), Some(key)) => Some(Tls::read(certificate, key)?),
        _ => None,
    };

    let token = secrets::admin_token(arguments.admin_token_file.as_deref())?;
    let (admin, admin_disabled) = listen_admin(arguments.admin.as_deref(), token.is_some(), &mut inherited).await?;
    let http = listen("http", "http", &endpoints.http, &mut inherited).await?;
    let resp = listen("resp", "resp", &endpoints.resp, &mut inherited).await?;
    let gateway = gateway_of(&endpoints, loaded.as_ref(), &mut inherited).await?;
    inherited.verify_all_taken()?;
    let http_token = secrets::http_token(endpoints.http_token_file.as_deref())?;
    let resp_options = resp_options(&arguments, endpoints.resp_password_file.as_deref())?;
    if !endpoints.is_insecure {
        let is_protected = [http_token.is_some(), resp_options.password.is_some()];
        for (socket, is_protected, secret) in
            [(&http, is_protected[0], HTTP_SECRET), (&resp, is_protected[1], RESP_SECRET)]
        {
            refuse_exposed(socket.as_ref().filter(|_| !is_protected), secret)?;
        }
    }
    if admin.is_none() && http.is_none() && resp.is_none() && gateway.is_none() {
        return Err(Failure::NothingToServe { admin: admin_disabled });
    }
    let address = |socket: &Option<TcpListener>| socket.as_ref().map(TcpListener::local_addr).transpose();
    let gateway_address = gateway.as_ref().map(|(socket, _)| socket.local_addr()).transpose()?;
    let addresses =
        Addresses { http: address(&http)?, resp: address(&resp)?, gateway: gateway_address, admin: address(&admin)? };
    let is_token_given = token.is_some();
    let token =
        token.map_or_else(Token::made, Ok).map_err(|error| Failure::Token { place: "--admin".into(), error })?;

    let served = [&http, &resp].into_iter().flatten().count() + usize::from(gateway.is_some());
    let bounds = descriptors::fit(bounds(&arguments), served, descriptors::raise_limit());
    let (engine, reloader) = rules(&arguments, loader, loaded, &limiter, (lookups, memory.shield_bytes), tls.clone());
    // The first request already meets the bans. If the store does not answer, the engine reads them later.
    let _ = engine.refresh_bans().await;
    let shared = store.clone().map(|store| Arc::new(store) as Arc<dyn Store>);
    let readiness = Readiness::new(limiter.clone(), shared, reloader.clone());
    let mut listeners = Listeners::default().http(http).resp(resp, resp_options).admin(admin);
    if let Some((socket, gateway)) = gateway {
        if endpoints.servers.is_empty() {
            reloader.follow_upstreams();
        }
        listeners = listeners.gateway(socket, gateway);
    }
    let mut options = ServerOptions::new(engine.clone())
        .bounds(bounds)
        .reloader(reloader.clone())
        .readiness(readiness.clone())
        .store_times(store_times)
        .allowed_origins(arguments.allow_origin.clone())
        .admin_hosts(arguments.admin_host.clone())
        .token(token.clone());
    if let Some(secret) = receipt_secret {
        options = options.receipt_secret(secret);
    }
    let needs_http_token = http_token.is_some();
    if let Some(token) = http_token {
        options = options.http_token(token);
    }
    let announcement = Announcement {
        addresses,
        is_shared: store.is_some(),
        is_encrypted: tls.is_some(),
        needs_http_token,
        token: if is_token_given { AdminToken::Given } else { AdminToken::Generated(&token) },
        admin_disabled,
    };
    tokio::spawn(reloader.clone().watch());
    tokio::spawn(readiness.clone().watch_store());
    tokio::spawn(watch_memory(engine));
    announcement.print();
    if let Some(tls) = tls {
        options = options.tls(tls);
    }
    if let Some(threads) = arguments.threads {
        options = options.threads(threads);
    }
    if let (Some(store), Some(server)) = (store, server) {
        log_server(server);
        tokio::spawn(watch_eviction(store, readiness));
    }
    run(listeners, options, signals.until_shutdown(reloader)).await;
    limiter.withdraw().await;
    #[cfg(feature = "otlp")]
    if let Some(traces) = traces {
        let _ = tokio::task::spawn_blocking(|| traces.finish()).await;
    }
    Ok(())
}

/// Creates the loader of the configuration file.
///
/// The store (see [`configuration::loader`]) and `--instances`, if given, override the file, at the start and in
/// reloads.
///
/// # Errors
/// If the URL of the store is invalid.
fn loader(arguments: &ServiceOptions) -> Result<Loader, Failure> {
    let loader = configuration::loader(&arguments.store)?;
    Ok(match arguments.instances {
        Some(instances) => loader.instances(instances),
        None => loader,
    })
}

/// Returns the secret with which receipts are encrypted: that of the options or the environment, else that of the
/// configuration, else a random one if counters are in memory.
///
/// Returns `None` on a shared store without a secret. Instances with different random secrets could not redeem each
/// other's receipts.
///
/// # Errors
/// If the secret cannot be read or is too short.
fn receipt_secret(file: Option<&Path>, settings: &Settings) -> Result<Option<ReceiptSecret>, Failure> {
    let given = secrets::receipt_secret(file)?;
    let configured = || settings.receipt_secret.as_ref().map(|secret| ReceiptSecret::new(secret.reveal().as_bytes()));
    match given.or_else(configured) {
        None if !settings.is_shared() => Ok(Some(ReceiptSecret::generate()?)),
        secret => Ok(secret),
    }
}

/// Logs a warning about rules with a `charge` other than `always`, if their units cannot be refunded.
///
/// A client reports the outcome of a request with its receipt. Without a receipt secret, there are no receipts. A proxy
/// that uses forward-auth reports no outcome; only a trusted proxy can use it.
fn warn_about_refunds(rules: &RuleSet, has_receipts: bool) {
    let refunding = rules.rules().iter().filter(|rule| rule.charge() != Charge::Always);
    let names: Vec<&str> = refunding.map(|rule| &**rule.name()).collect();
    if names.is_empty() {
        return;
    }
    let by_outcome = names.join(", ");
    if !has_receipts {
        tracing::warn!(
            rules = by_outcome,
            "the charge of these rules depends on the outcome of a request, which clients report with a receipt; \
             without a receipt secret, every request stays charged: set receipt_secret_env or receipt_secret_file"
        );
    } else if !rules.identifier().proxies().networks().is_empty() {
        tracing::warn!(
            rules = by_outcome,
            "the charge of these rules depends on the outcome of a request; a proxy that uses forward-auth does not \
             report it, so its requests stay charged"
        );
    }
}

/// Logs which settings of the configuration have no effect on checks that name their key and limit; logs nothing if none
/// of them is set.
fn log_settings_for_requests_only(loaded: &Loaded) {
    let settings = loaded.settings_for_requests_only();
    if !settings.is_empty() {
        let settings = settings.join(", ");
        tracing::info!(
            settings,
            "these settings apply to requests that are decided by rules, but not to checks that name their key and \
             limit: such a check has no address, API key, path or rule, and its response body is the decision"
        );
    }
}

/// Returns a builder for the limiter, on `store` or in memory without one, and the lookups of plans and API keys that
/// rules do not have. `settings` have the key prefix, the deadline, the number of instances and the Redis hashes.
///
/// The limiter logs each decision if the level is `debug`, and records the durations of calls to a shared store in
/// `store_times`.
fn limiter(store: Option<RedisStore>, settings: &Settings, store_times: &Arc<StoreTimes>) -> (LimiterBuilder, Lookups) {
    let is_shared = store.is_some();
    let (mut builder, lookups) = settings.limiter_on(store);
    if tracing::enabled!(tracing::Level::DEBUG) {
        builder = builder.observer(TracingObserver);
    }
    if is_shared {
        builder = builder.observer(store_times.clone());
    }
    (builder, lookups)
}

/// Creates the engine, which decides by rules, and the reloader of the configuration file and the certificate.
///
/// Without a configuration the engine has no rules, and only the certificate is reloaded, if there is one. `lookups`
/// find plans and API keys that the rules do not have. Counters of shield rules take at most `shield_bytes`.
fn rules(
    arguments: &ServiceOptions,
    loader: Loader,
    loaded: Option<Loaded>,
    limiter: &Limiter,
    (lookups, shield_bytes): (Lookups, usize),
    tls: Option<Tls>,
) -> (Engine, Reloader) {
    let shield = MemoryStore::builder().max_bytes(shield_bytes).build();
    let rules = loaded.as_ref().map(|loaded| loaded.rules.clone()).unwrap_or_default();
    let engine = Engine::with_shield(limiter.clone(), rules, lookups, shield);
    let reloader = match (loaded, &arguments.config) {
        (Some(loaded), Some(file)) => Reloader::rules(file, loader, loaded, engine.clone()),
        (Some(loaded), None) => Reloader::without_file(loaded, engine.clone()),
        (None, _) => Reloader::nothing(),
    };
    match tls {
        Some(tls) => (engine, reloader.tls(tls)),
        None => (engine, reloader),
    }
}

/// Loads the configuration file, or compiles the rule of `--limit`. Returns `None` if there is neither.
///
/// # Errors
/// If the file cannot be read or has an error.
fn load(arguments: &ServiceOptions, endpoints: &Endpoints, loader: &Loader) -> Result<Option<Loaded>, Failure> {
    match (&arguments.config, &endpoints.limit) {
        (Some(file), _) => configuration::load(file, loader).map(Some),
        (None, Some(limit)) => {
            let rules = Rules::new().rule(Rule::new("per-ip").by(Subject::Ip).limit(limit.to_string()));
            rules.compile_with(loader).map(Some).map_err(Failure::Configuration)
        }
        (None, None) => Ok(None),
    }
}

/// Binds the gateway's listener and prepares its upstreams. Returns `None` if it is off.
///
/// # Errors
/// If there is no upstream, an upstream cannot be used, or the address cannot be bound.
async fn gateway_of(
    endpoints: &Endpoints,
    loaded: Option<&Loaded>,
    inherited: &mut InheritedSockets,
) -> Result<Option<(TcpListener, tidegate_server::Gateway)>, Failure> {
    let configured = loaded.map(|loaded| loaded.gateway.clone()).unwrap_or_default();
    let settings = match (endpoints.servers.is_empty(), configured.upstreams.is_empty()) {
        (true, _) => configured,
        (false, true) => configured.with_servers(endpoints.servers.clone()),
        (false, false) => return Err(Failure::UpstreamsTwice),
    };
    let address = endpoints.gateway.as_deref().or(settings.listen.as_deref()).unwrap_or(endpoints.gateway_default);
    if address == OFF {
        if !settings.upstreams.is_empty() {
            tracing::warn!(
                "the configuration has [[upstreams]], but no gateway listens: set `listen` in [gateway], or --{} ADDRESS",
                endpoints.gateway_option
            );
        }
        return Ok(None);
    }
    if settings.upstreams.is_empty() {
        return Err(Failure::NoUpstream);
    }
    if loaded.is_none() {
        tracing::warn!("the gateway has no rules, so nothing is limited: add --limit LIMIT or --config FILE");
    }
    let gateway = tidegate_server::Gateway::new(&settings)?;
    let socket = listen("gateway", endpoints.gateway_option, address, inherited).await?;
    Ok(socket.map(|socket| (socket, gateway)))
}

/// Returns the options of the RESP listener: its password, which is read from a file or the environment, and its idle
/// timeout.
///
/// # Errors
/// If the password cannot be read; see [`secrets::resp_password`].
fn resp_options(arguments: &ServiceOptions, password_file: Option<&Path>) -> Result<RespOptions, Failure> {
    let password = secrets::resp_password(password_file)?;
    let default = RespOptions::default();
    Ok(RespOptions { password, idle: arguments.idle.unwrap_or(default.idle) })
}

/// Returns the limits and timeouts of connections that the options set, with defaults for the others.
fn bounds(arguments: &ServiceOptions) -> Bounds {
    let default = Bounds::default();
    Bounds {
        connections: arguments.connections as usize,
        http_idle: arguments.idle.unwrap_or(default.http_idle),
        drain: arguments.drain,
        ..default
    }
}

/// Returns the inherited socket of `HOST:PORT`, or binds one to the first of its addresses that can be bound, with a
/// queue of [`BACKLOG`] connections.
///
/// # Errors
/// If the host cannot be resolved or none of its addresses can be bound. The error is that of the last one.
async fn bind(address: &str, inherited: &mut InheritedSockets) -> std::io::Result<TcpListener> {
    let addresses: Vec<_> = tokio::net::lookup_host(address).await?.collect();
    if let Some(socket) = inherited.take(&addresses)? {
        return Ok(socket);
    }
    let mut failure = None;
    for address in addresses {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        match socket.bind(address).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.unwrap_or_else(|| ErrorKind::AddrNotAvailable.into()))
}

/// Opens a listener, or returns `None` if the address is `off`. The error message names `listener` and the `option` that
/// sets its address.
async fn listen(
    listener: &'static str,
    option: &'static str,
    address: &str,
    inherited: &mut InheritedSockets,
) -> Result<Option<TcpListener>, Failure> {
    if address == OFF {
        return Ok(None);
    }
    let bound = bind(address, inherited).await;
    bound.map(Some).map_err(|error| Failure::Listen { listener, option, address: address.to_owned(), error })
}

/// Opens the admin listener on `address`, or on the default address if that is `None`.
///
/// `has_token` says whether the operator has set a token. A generated one does not count.
///
/// Returns the listener, and the reason if there is none. The reason is `None` if the address is `off`. If the default
/// address is in use, the service runs without the admin listener, so that a second instance on one machine starts
/// without options.
///
/// # Errors
/// If the address cannot be bound, or can be reached from other machines and there is no token.
async fn listen_admin(
    address: Option<&str>,
    has_token: bool,
    inherited: &mut InheritedSockets,
) -> Result<(Option<TcpListener>, Option<String>), Failure> {
    let listener = match listen("admin", "admin", address.unwrap_or(ADMIN_DEFAULT), inherited).await {
        Ok(listener) => listener,
        Err(Failure::Listen { error, .. }) if address.is_none() && error.kind() == ErrorKind::AddrInUse => {
            return Ok((None, Some(format!("{ADMIN_DEFAULT} is in use"))));
        }
        Err(failure) => return Err(failure),
    };
    if let Some(listener) = &listener {
        let address = listener.local_addr()?;
        if !has_token && !is_loopback(address.ip()) {
            return Err(Failure::AdminExposed { address });
        }
    }
    Ok((listener, None))
}

/// The secret of a listener: the names of the listener and the secret, of the variable and the option that set it.
type ListenerSecret = [&'static str; 4];
const HTTP_SECRET: ListenerSecret = ["http", "token", "TIDEGATE_HTTP_TOKEN", "http-token-file"];
const RESP_SECRET: ListenerSecret = ["resp", "password", "TIDEGATE_RESP_PASSWORD", "resp-password-file"];

/// Returns an error if other machines can reach the socket of a listener that requires no secret.
fn refuse_exposed(
    socket: Option<&TcpListener>,
    [listener, secret, variable, option]: ListenerSecret,
) -> Result<(), Failure> {
    let Some(address) = socket.map(TcpListener::local_addr).transpose()? else { return Ok(()) };
    if is_loopback(address.ip()) {
        Ok(())
    } else {
        Err(Failure::Exposed { listener, address, secret, variable, option })
    }
}

/// Logs the version of the store's server and warnings about its settings, or that it does not answer.
fn log_server(server: Result<ServerReport, ServerCheckError>) {
    match server {
        Ok(report) => {
            tracing::info!(server = report.name, version = report.version, "connected to the store");
            for warning in report.warnings {
                tracing::warn!("{warning}");
            }
        }
        Err(error) => tracing::warn!("{error}; until the store responds, each rule's `on_failure` applies"),
    }
}

/// Reads every five seconds whether the store's server evicts keys, and passes that to `readiness`. Never returns.
async fn watch_eviction(store: RedisStore, readiness: Readiness) {
    loop {
        // The circuit breaker notices a server that does not respond.
        if let Ok(eviction) = store.eviction().await {
            readiness.note_eviction(eviction.policy.as_deref(), eviction.evicted_keys);
        }
        tokio::time::sleep(EVICTION_CHECK_INTERVAL).await;
    }
}

/// The default log filter. `h2` logs a warning for each connection that it closes because of too many resets, so a
/// hostile client could fill the log.
const LOG_FILTER: &str = "info,h2=error";

/// Starts logging to standard error, as JSON if `format` is `json`, else as text.
///
/// `TIDEGATE_LOG` sets the level or a filter, such as `debug` or `tidegate=debug`. If it is not set or invalid, the
/// filter is [`LOG_FILTER`]. Must be called only once.
fn start_logs(format: &str) {
    let filter = EnvFilter::try_from_env("TIDEGATE_LOG").unwrap_or_else(|_| EnvFilter::new(LOG_FILTER));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // If standard error cannot be written to, log lines are dropped. Reporting that on the same stream would panic.
    let logs = logs.log_internal_errors(false);
    match format {
        "json" => logs.json().init(),
        _ => logs.init(),
    }
}
