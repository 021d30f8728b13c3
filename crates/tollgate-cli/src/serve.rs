//! `tollgate serve`: listeners, a limiter, and an orderly end.

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tollgate_redis::RedisStore;
use tollgate_server::{Doors, Listeners, run};
use tracing_subscriber::EnvFilter;

use crate::Failure;
use crate::arguments::Serve;

pub(crate) async fn serve(arguments: Serve) -> Result<(), Failure> {
    start_logs(&arguments.log);
    let url = arguments.store.url();
    let limiter = arguments.store.builder()?.instances(arguments.instances).build();
    let listeners = Listeners {
        http: Some(listen("http", &arguments.http).await?),
        resp: Some(listen("resp", &arguments.resp).await?),
    };
    announce(&listeners, &url)?;
    if url != "memory" {
        tokio::spawn(look_at_the_server(url));
    }
    run(listeners, Doors::new(limiter), asked_to_stop()).await;
    Ok(())
}

async fn listen(door: &'static str, address: &str) -> Result<TcpListener, Failure> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| Failure::Listen { door, address: address.to_owned(), error })
}

/// Says where the doors are, and a line to try.
fn announce(listeners: &Listeners, url: &str) -> Result<(), Failure> {
    let kind = if url == "memory" { "in memory" } else { "on Redis" };
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
