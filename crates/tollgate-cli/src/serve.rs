//! `tollgate serve`: listeners, a limiter, and an orderly end.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tollgate::Limiter;
use tollgate::config::Settings;
use tollgate::engine::Engine;
use tollgate::observe::TracingObserver;
use tollgate::rules::{PlanHash, PlanLookup};
use tollgate_redis::RedisStore;
use tollgate_server::{Doors, Listeners, run};
use tracing_subscriber::EnvFilter;

use crate::arguments::{Serve, StoreChoice};
use crate::store::MEMORY;
use crate::{Failure, configuration};

type Lookups = Vec<Arc<dyn PlanLookup>>;

pub(crate) async fn serve(arguments: Serve) -> Result<(), Failure> {
    start_logs(&arguments.log);
    let loaded = arguments.config.as_deref().map(|file| configuration::load(file, &arguments.store)).transpose()?;
    let settings = loaded.as_ref().map(|loaded| &loaded.settings);
    let configured = || settings.and_then(|settings| settings.store.as_ref()).map(|url| url.reveal().to_owned());
    let url = arguments.store.said().or_else(configured).unwrap_or_else(|| MEMORY.to_owned());
    let (limiter, lookups) = limiter(&url, &arguments, settings)?;

    let listeners = Listeners {
        http: Some(listen("http", &arguments.http).await?),
        resp: Some(listen("resp", &arguments.resp).await?),
    };
    announce(&listeners, &url)?;
    let mut doors = Doors::new(limiter.clone());
    if let (Some(loaded), Some(file)) = (loaded, arguments.config) {
        let engine = Engine::with_lookups(limiter, loaded.rules, lookups);
        tokio::spawn(reload_when_told(engine.clone(), file, arguments.store));
        doors = doors.rules(engine);
    }
    if url != MEMORY {
        tokio::spawn(look_at_the_server(url));
    }
    run(listeners, doors, asked_to_stop()).await;
    Ok(())
}

/// The limiter, and who is asked for plans that the rules do not know.
fn limiter(url: &str, arguments: &Serve, settings: Option<&Settings>) -> Result<(Limiter, Lookups), Failure> {
    let instances = arguments.instances.or(settings.and_then(|settings| settings.instances)).unwrap_or(1);
    let builder = Limiter::builder().instances(instances).observer(TracingObserver);
    let Some(settings) = settings else {
        return Ok((builder.url(url)?.build(), Vec::new()));
    };
    let builder = builder.deadline(settings.deadline).on_failure(settings.on_failure);
    if url == MEMORY {
        return Ok((builder.build(), Vec::new()));
    }
    let store = RedisStore::builder(url).prefix(settings.prefix.clone()).build()?;
    let Some(name) = &settings.plan_hash else {
        return Ok((builder.store(Arc::new(store)).build(), Vec::new()));
    };
    // The question for the plan comes before the decision, and both together keep the deadline.
    let for_plan = settings.deadline / 4;
    let plans = PlanHash::new(store.clone(), name.as_str()).timeout(for_plan);
    let limiter = builder.deadline(settings.deadline - for_plan).store(Arc::new(store)).build();
    Ok((limiter, vec![Arc::new(plans)]))
}

/// On SIGHUP the file is read again, whole: good rules replace the old ones at once, and a broken file changes nothing.
async fn reload_when_told(engine: Engine, file: PathBuf, store: StoreChoice) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    while hangup.recv().await.is_some() {
        match configuration::load(&file, &store) {
            Ok(loaded) => {
                engine.reload(loaded.rules);
                tracing::info!("the configuration was read again");
            }
            Err(failure) => tracing::error!(%failure, "the configuration is broken; the old rules stay in force"),
        }
    }
}

async fn listen(door: &'static str, address: &str) -> Result<TcpListener, Failure> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| Failure::Listen { door, address: address.to_owned(), error })
}

/// Says where the doors are, and a line to try.
fn announce(listeners: &Listeners, url: &str) -> Result<(), Failure> {
    let kind = if url == MEMORY { "in memory" } else { "on Redis" };
    println!("tollgate {} serves, counters {kind}", env!("CARGO_PKG_VERSION"));
    if let Some(http) = &listeners.http {
        let address = http.local_addr()?;
        println!(
            "  http  {address}   try: curl -d '{{\"key\":\"user:42\",\"limit\":\"10/min\"}}' http://{address}/v1/check"
        );
    }
    if let Some(resp) = &listeners.resp {
        let address = resp.local_addr()?;
        println!(
            "  resp  {address}   try: redis-cli -h {} -p {} TOLLGATE.CHECK user:42 10/min",
            address.ip(),
            address.port()
        );
    }
    Ok(())
}

/// Names the server behind the store and what to know about it. It may be down: the doors are open all the same.
async fn look_at_the_server(url: String) {
    let Ok(store) = RedisStore::builder(url).build() else { return };
    match store.check_server().await {
        Ok(report) => {
            tracing::info!(server = report.name, version = report.version, "the store answers");
            for warning in report.warnings {
                tracing::warn!("{warning}");
            }
        }
        Err(error) => tracing::warn!(%error, "the store cannot be relied on"),
    }
}

async fn asked_to_stop() {
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tracing::info!("closing the doors");
}

fn start_logs(form: &str) {
    let filter = EnvFilter::try_from_env("TOLLGATE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match form {
        "json" => logs.json().init(),
        _ => logs.init(),
    }
}
