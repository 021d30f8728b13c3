//! `tollgate serve`: listeners, a limiter, and an orderly end.

mod announce;
mod descriptors;
mod memory;
mod signals;

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket};
use tollgate::config::{Loaded, Loader, Settings};
use tollgate::engine::Engine;
use tollgate::observe::TracingObserver;
use tollgate::rules::{Charge, PlanLookup, RuleSet};
use tollgate::{Limiter, LimiterBuilder, MemoryStore, Store};
use tollgate_redis::RedisStore;
use tollgate_server::listeners::resp::RespOptions;
use tollgate_server::{
    Bounds, Listeners, Readiness, Reloader, ServerOptions, StoreTimes, Tls, Token, is_loopback, run, watch_memory,
};
use tracing_subscriber::EnvFilter;

use self::announce::{Addresses, Announcement, TokenWord};
use self::signals::Signals;
use crate::arguments::Serve;
use crate::{Failure, configuration, secrets};

const ADMIN_DEFAULT: &str = "127.0.0.1:9090";
/// How often the store's server is asked whether it evicts counters.
const EVICTION_LOOK_EVERY: Duration = Duration::from_secs(5);
/// Connections that wait to be accepted. A client beyond them waits for a second before it tries again; Linux allows 4,096.
const BACKLOG: u32 = 4_096;
/// In place of an address: the door stays closed.
const OFF: &str = "off";

type Lookups = Vec<Arc<dyn PlanLookup>>;

pub(crate) async fn serve(arguments: Serve) -> Result<(), Failure> {
    let signals = Signals::install()?;
    start_logs(&arguments.log);
    let loader = loader(&arguments)?;
    let loaded = arguments.config.as_deref().map(|file| configuration::load(file, &loader)).transpose()?;
    if let Some(loaded) = &loaded {
        warn_of_refunds(&loaded.rules);
    }
    let settings = match &loaded {
        Some(loaded) => loaded.settings.clone(),
        None => configuration::settings(None, &loader)?,
    };
    let store = settings.redis()?;
    let store_times = Arc::new(StoreTimes::default());
    #[cfg(feature = "otlp")]
    let traces = arguments.otlp.as_deref().map(crate::traces::Traces::to).transpose()?;
    let (builder, lookups) = limiter(store.clone(), &settings, &store_times);
    let memory = memory::Share::of(arguments.memory.unwrap_or_else(memory::default_bytes));
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
    let (admin, admin_closed) = listen_admin(arguments.admin.as_deref(), token.is_some()).await?;
    let http = listen("http", &arguments.http).await?;
    let resp = listen("resp", &arguments.resp).await?;
    let address = |socket: &Option<TcpListener>| socket.as_ref().map(TcpListener::local_addr).transpose();
    let addresses = Addresses { http: address(&http)?, resp: address(&resp)?, admin: address(&admin)? };
    let given = token.is_some();
    let token =
        token.map_or_else(Token::made, Ok).map_err(|error| Failure::Token { place: "--admin".into(), error })?;

    let served = [&http, &resp].into_iter().flatten().count();
    let bounds = descriptors::fit(bounds(&arguments), served, descriptors::raise_limit());
    let (engine, reloader) = rules(&arguments, loader, loaded, &limiter, (lookups, memory.shield_bytes), tls.clone());
    let shared = store.clone().map(|store| Arc::new(store) as Arc<dyn Store>);
    let readiness = Readiness::new(limiter.clone(), shared, reloader.clone());
    let listeners = Listeners::default().http(http).resp(resp, resp_options(&arguments)?).admin(admin);
    let mut options = ServerOptions::new(limiter.clone())
        .bounds(bounds)
        .reloader(reloader.clone())
        .readiness(readiness.clone())
        .store_times(store_times)
        .allowed_origins(arguments.allow_origin.clone())
        .admin_hosts(arguments.admin_host.clone())
        .token(token.clone());
    let announcement = Announcement {
        addresses,
        is_shared: store.is_some(),
        is_encrypted: tls.is_some(),
        token: if given { TokenWord::Given } else { TokenWord::Made(&token) },
        admin_closed,
    };
    tokio::spawn(reloader.clone().watch());
    tokio::spawn(readiness.clone().watch_store());
    tokio::spawn(watch_memory(limiter.clone(), engine.clone()));
    announcement.print();
    if let Some(engine) = engine {
        options = options.rules(engine);
    }
    if let Some(tls) = tls {
        options = options.tls(tls);
    }
    if let Some(threads) = arguments.threads {
        options = options.threads(threads);
    }
    if let Some(store) = store {
        tokio::spawn(look_at_the_server(store, readiness));
    }
    run(listeners, options, signals.until_told_to_end(reloader)).await;
    #[cfg(feature = "otlp")]
    if let Some(traces) = traces {
        let _ = tokio::task::spawn_blocking(|| traces.finish()).await;
    }
    Ok(())
}

/// What reads the configuration, now and later: what the command line says holds whatever the file says.
fn loader(arguments: &Serve) -> Result<Loader, Failure> {
    let loader = configuration::loader(&arguments.store)?;
    Ok(match arguments.instances {
        Some(instances) => loader.instances(instances),
        None => loader,
    })
}

/// A door decides before the work and does not learn how it ended, so what a rule would give back stays charged.
fn warn_of_refunds(rules: &RuleSet) {
    let refunding = rules.rules().iter().filter(|rule| rule.charge() != Charge::Always);
    let rules: Vec<&str> = refunding.map(|rule| &**rule.name()).collect();
    if !rules.is_empty() {
        let rules = rules.join(", ");
        tracing::warn!(
            rules,
            "these rules charge by how a request ends, which no door learns: all of it stays charged"
        );
    }
}

/// The limiter, and who is asked for plans that the rules do not know.
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

/// The engine, if there are rules, and what can be read again.
fn rules(
    arguments: &Serve,
    loader: Loader,
    loaded: Option<Loaded>,
    limiter: &Limiter,
    (lookups, shield_bytes): (Lookups, usize),
    tls: Option<Tls>,
) -> (Option<Engine>, Reloader) {
    let (engine, reloader) = match (loaded, &arguments.config) {
        (Some(loaded), Some(file)) => {
            let shield = MemoryStore::builder().max_bytes(shield_bytes).build();
            let engine = Engine::with_shield(limiter.clone(), loaded.rules.clone(), lookups, shield);
            (Some(engine.clone()), Reloader::rules(file, loader, loaded, engine))
        }
        _ => (None, Reloader::nothing()),
    };
    match tls {
        Some(tls) => (engine, reloader.tls(tls)),
        None => (engine, reloader),
    }
}

fn resp_options(arguments: &Serve) -> Result<RespOptions, Failure> {
    let password = secrets::resp_password(arguments.resp_password_file.as_deref())?;
    let default = RespOptions::default();
    Ok(RespOptions { password, idle: arguments.idle.unwrap_or(default.idle) })
}

fn bounds(arguments: &Serve) -> Bounds {
    let default = Bounds::default();
    Bounds {
        connections: arguments.connections as usize,
        http_idle: arguments.idle.unwrap_or(default.http_idle),
        drain: arguments.drain,
        ..default
    }
}

/// As `TcpListener::bind`, with a longer queue.
async fn bind(address: &str) -> std::io::Result<TcpListener> {
    let mut failure = None;
    for address in tokio::net::lookup_host(address).await? {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        match socket.bind(address).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.unwrap_or_else(|| ErrorKind::AddrNotAvailable.into()))
}

async fn listen(door: &'static str, address: &str) -> Result<Option<TcpListener>, Failure> {
    if address == OFF {
        return Ok(None);
    }
    let bound = bind(address).await;
    bound.map(Some).map_err(|error| Failure::Listen { door, address: address.to_owned(), error })
}

/// The admin door, or why it is closed. An address that nobody asked for is no reason not to serve: a second instance on a
/// machine goes without.
async fn listen_admin(
    address: Option<&str>,
    has_token: bool,
) -> Result<(Option<TcpListener>, Option<String>), Failure> {
    let listener = match listen("admin", address.unwrap_or(ADMIN_DEFAULT)).await {
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

/// Names the server behind the store and what to know about it. It may be down: the doors are open all the same. Then looks
/// every few seconds whether the server forgets counters, until the process ends.
async fn look_at_the_server(store: RedisStore, readiness: Readiness) {
    match store.check_server().await {
        Ok(report) => {
            tracing::info!(server = report.name, version = report.version, "the store answers");
            for warning in report.warnings {
                tracing::warn!("{warning}");
            }
        }
        Err(error) => tracing::warn!(%error, "the store cannot be relied on"),
    }
    loop {
        // A server that does not answer is noticed elsewhere.
        if let Ok(eviction) = store.eviction().await {
            readiness.note_eviction(eviction.policy.as_deref(), eviction.evicted_keys);
        }
        tokio::time::sleep(EVICTION_LOOK_EVERY).await;
    }
}

fn start_logs(form: &str) {
    let filter = EnvFilter::try_from_env("TOLLGATE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Whoever logs goes on though nobody can hear it; to tell that on the same broken stream would be a panic.
    let logs = logs.log_internal_errors(false);
    match form {
        "json" => logs.json().init(),
        _ => logs.init(),
    }
}
