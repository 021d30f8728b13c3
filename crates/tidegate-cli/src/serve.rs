//! `tidegate serve` and `tidegate gateway`: create the store, the limiter, the rules and the listeners, and run them until
//! a signal. The commands differ in their listeners; everything else is [`start`].

mod announce;
mod descriptors;
mod listeners;
mod memory;
mod signals;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tidegate::config::{Loaded, Loader, Settings};
use tidegate::engine::Engine;
use tidegate::gateway::{GatewaySettings, ServerUrl};
use tidegate::observe::TracingObserver;
use tidegate::rules::{Charge, Lookups, RuleSet};
use tidegate::{Limit, Limiter, LimiterBuilder, MemoryStore, Rule, Rules, Store, Subject};
use tidegate_redis::{RedisStore, ServerCheckError, ServerReport};
use tidegate_server::listeners::gateway::GATEWAY;
use tidegate_server::{
    Bounds, Readiness, ReceiptSecret, Reloader, Role, ServerOptions, StoreTimes, Tls, run, watch_memory,
};
use tracing_subscriber::EnvFilter;

use self::announce::announce;
use self::listeners::{OFF, OpenedListener};
use self::signals::Signals;
use crate::arguments::{GatewayArguments, ListenerChoice, Serve, ServiceOptions};
use crate::inherited::InheritedSockets;
use crate::store::check_server;
use crate::{Failure, configuration, secrets};

/// The default address of the gateway in `tidegate gateway`.
const GATEWAY_ADDRESS: &str = "127.0.0.1:8000";
/// Interval at which [`watch_eviction`] reads whether the store's server evicts counters.
const EVICTION_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// What `tidegate serve` and `tidegate gateway` do not have in common.
#[derive(Default)]
struct CommandOptions {
    /// The listeners, besides those of the operator.
    listeners: Vec<ListenerChoice>,
    receipt_secret_file: Option<PathBuf>,
    /// Whether listeners of clients need no secret on addresses that other machines can reach.
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
    let options = CommandOptions {
        listeners: arguments.listeners.0,
        receipt_secret_file: arguments.receipt_secret_file,
        is_insecure: arguments.insecure,
        ..CommandOptions::default()
    };
    start(arguments.service, options, inherited).await
}

/// Runs `tidegate gateway`: starts the gateway, prints its address, and serves until SIGTERM or SIGINT.
///
/// # Errors
/// If there is no upstream, and see [`start`].
pub(crate) async fn gateway(arguments: GatewayArguments, inherited: InheritedSockets) -> Result<(), Failure> {
    let gateway = ListenerChoice {
        kind: &GATEWAY,
        option: "listen",
        address: arguments.listen,
        default_address: GATEWAY_ADDRESS,
        secret_file: None,
    };
    let options = CommandOptions {
        listeners: vec![gateway],
        servers: arguments.upstreams,
        limit: arguments.limit,
        ..CommandOptions::default()
    };
    start(arguments.service, options, inherited).await
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
    command: CommandOptions,
    mut inherited: InheritedSockets,
) -> Result<(), Failure> {
    let signals = Signals::install()?;
    start_logs(&arguments.log);
    let loader = loader(&arguments)?;
    let loaded = load(&arguments, &command, &loader)?;
    let settings = match &loaded {
        Some(loaded) => loaded.settings.clone(),
        None => configuration::settings(None, &loader)?,
    };
    let store = settings.redis()?;
    let receipt_secret = receipt_secret(command.receipt_secret_file.as_deref(), &settings)?;
    let forwarding = forwarding(&command, loaded.as_ref())?;
    let choices: Vec<_> = command.listeners.iter().chain(&arguments.operator_listeners.0).collect();
    let decides_for_others =
        choices.iter().any(|choice| choice.kind.decides_for_others && choice.address(&forwarding) != OFF);
    if let Some(loaded) = loaded.as_ref().filter(|_| decides_for_others) {
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
        Some(traces) => builder.observer(Arc::new(traces.observer())),
        None => builder,
    };
    let limiter = builder.build();
    let tls = match (&arguments.tls_cert, &arguments.tls_key) {
        (Some(certificate), Some(key)) => Some(Tls::read(certificate, key)?),
        _ => None,
    };

    let gateway = prepare_gateway(&choices, &forwarding, loaded.is_some())?;
    let mut listeners = Vec::new();
    for choice in choices {
        let address = choice.address(&forwarding);
        listeners.extend(OpenedListener::open(choice, address, command.is_insecure, &mut inherited).await?);
    }
    inherited.verify_all_taken()?;
    let is_open = |listener: &OpenedListener| listener.socket.is_ok();
    if !listeners.iter().any(is_open) {
        let reasons = listeners.iter().filter_map(OpenedListener::reason).collect();
        return Err(Failure::NothingToServe { reasons });
    }
    let served = listeners.iter().filter(|listener| is_open(listener) && listener.kind.role == Role::Service).count();
    let bounds = descriptors::fit(bounds(&arguments), served, descriptors::raise_limit());
    let (engine, reloader) = rules(&arguments, loader, loaded, &limiter, (lookups, memory.shield_bytes), tls.clone());
    if gateway.is_some() && command.servers.is_empty() {
        reloader.follow_upstreams();
    }
    // The first request already meets the bans. If the store does not answer, the engine reads them later.
    let _ = engine.refresh_bans().await;
    let shared = store.clone().map(|store| Arc::new(store) as Arc<dyn Store>);
    let readiness = Readiness::new(limiter.clone(), shared, reloader.clone());
    tokio::spawn(reloader.clone().watch());
    tokio::spawn(readiness.clone().watch_store());
    tokio::spawn(watch_memory(engine.clone()));
    announce(&listeners, store.is_some(), tls.is_some());
    let mut options = ServerOptions::new(engine)
        .bounds(bounds)
        .reloader(reloader.clone())
        .readiness(readiness.clone())
        .store_times(store_times)
        .allowed_origins(arguments.allow_origin)
        .admin_hosts(arguments.admin_host);
    let mut sockets = Vec::new();
    for OpenedListener { kind, socket, secret, .. } in listeners {
        if let Some(secret) = secret {
            options = options.secret(kind, secret);
        }
        sockets.extend(socket.map(|(socket, _)| (kind, socket)));
    }
    if let Some(gateway) = gateway {
        options = options.gateway(gateway);
    }
    if let Some(secret) = receipt_secret {
        options = options.receipt_secret(secret);
    }
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
    run(sockets, options, signals.until_shutdown(reloader)).await;
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
        builder = builder.observer(Arc::new(TracingObserver));
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
fn load(arguments: &ServiceOptions, command: &CommandOptions, loader: &Loader) -> Result<Option<Loaded>, Failure> {
    match (&arguments.config, &command.limit) {
        (Some(file), _) => configuration::load(file, loader).map(Some),
        (None, Some(limit)) => {
            let rules = Rules::new().rule(Rule::new("per-ip").by(Subject::Ip).limit(limit.to_string()));
            rules.compile_with(loader).map(Some).map_err(Failure::Configuration)
        }
        (None, None) => Ok(None),
    }
}

/// Returns the settings of the gateway: those of the configuration, with the servers of `--upstream` if there are any.
///
/// # Errors
/// If both have upstreams.
fn forwarding(command: &CommandOptions, loaded: Option<&Loaded>) -> Result<GatewaySettings, Failure> {
    let configured = loaded.map(|loaded| loaded.gateway.clone()).unwrap_or_default();
    match (command.servers.is_empty(), configured.upstreams.is_empty()) {
        (true, _) => Ok(configured),
        (false, true) => Ok(configured.with_servers(command.servers.clone())),
        (false, false) => Err(Failure::UpstreamsTwice),
    }
}

/// Prepares the upstreams of the gateway. Returns `None` if there is no gateway.
///
/// # Errors
/// If there is no upstream, or an upstream cannot be used.
fn prepare_gateway(
    listeners: &[&ListenerChoice],
    settings: &GatewaySettings,
    has_rules: bool,
) -> Result<Option<tidegate_server::Gateway>, Failure> {
    let Some(choice) = listeners.iter().find(|choice| choice.kind.name == GATEWAY.name) else { return Ok(None) };
    if choice.address(settings) == OFF {
        if !settings.upstreams.is_empty() {
            tracing::warn!(
                "the configuration has [[upstreams]], but no gateway listens: set `listen` in [gateway], or --{} ADDRESS",
                choice.option
            );
        }
        return Ok(None);
    }
    if settings.upstreams.is_empty() {
        return Err(Failure::NoUpstream);
    }
    if !has_rules {
        tracing::warn!("the gateway has no rules, so nothing is limited: add --limit LIMIT or --config FILE");
    }
    Ok(Some(tidegate_server::Gateway::new(settings)?))
}

/// Returns the limits and timeouts of connections that the options set, with defaults for the others.
fn bounds(arguments: &ServiceOptions) -> Bounds {
    let default = Bounds::default();
    Bounds {
        connections: arguments.connections as usize,
        http_idle: arguments.idle.unwrap_or(default.http_idle),
        resp_idle: arguments.idle.unwrap_or(default.resp_idle),
        drain: arguments.drain,
        ..default
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
