//! Holding the doors open, and closing them in order.
//!
//! Each listener accepts until the shutdown begins; each connection is a task of its own, and there are never more of
//! them than a door allows: one more is told so and closed. When the shutdown begins, nobody new is let in, connections
//! finish what they are answering, and those that do not within the grace are dropped.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tollgate::Limiter;
use tollgate::engine::Engine;

use crate::doors::http::HttpDoor;
use crate::doors::resp::{self, RespOptions};

/// Connections per door.
const CONNECTIONS_MAX: usize = 10_000;
/// How long a shutdown waits for connections to finish.
const GRACE: Duration = Duration::from_secs(10);
/// After a failure to accept (no file descriptors left, say) the door rests for so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Where to listen. A door without a listener is closed.
#[derive(Debug, Default)]
pub struct Listeners {
    /// For `POST /v1/check`.
    pub http: Option<TcpListener>,
    /// For Redis clients.
    pub resp: Option<TcpListener>,
}

/// What stands behind the listeners.
#[derive(Debug)]
pub struct Doors {
    limiter: Limiter,
    http: Arc<HttpDoor>,
    resp: Arc<RespOptions>,
}

impl Doors {
    /// All doors, asking this limiter.
    pub fn new(limiter: Limiter) -> Doors {
        Doors { http: Arc::new(HttpDoor::new(limiter.clone())), resp: Arc::new(RespOptions::default()), limiter }
    }

    /// The HTTP door also answers by rules.
    #[must_use]
    pub fn rules(self, engine: Engine) -> Doors {
        Doors { http: Arc::new(HttpDoor::clone(&self.http).with_rules(engine)), ..self }
    }

    /// The RESP door with other options.
    #[must_use]
    pub fn resp(self, options: RespOptions) -> Doors {
        Doors { resp: Arc::new(options), ..self }
    }
}

/// Serves until `shutdown` is ready, then closes the doors and waits for those inside.
pub async fn run(listeners: Listeners, doors: Doors, shutdown: impl Future<Output = ()>) {
    let (closing, closed) = watch::channel(false);
    let mut accepting = JoinSet::new();
    if let Some(listener) = listeners.http {
        let door = doors.http.clone();
        let refusal = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        accepting.spawn(accept(listener, closed.clone(), refusal, move |stream, closed| {
            let door = door.clone();
            async move {
                if let Err(error) = door.serve(stream, until_closing(closed)).await {
                    tracing::debug!(%error, "an HTTP connection broke");
                }
            }
        }));
    }
    if let Some(listener) = listeners.resp {
        let (limiter, options) = (doors.limiter.clone(), doors.resp.clone());
        let refusal = b"-ERR max number of clients reached\r\n";
        accepting.spawn(accept(listener, closed.clone(), refusal, move |stream, closed| {
            let serving = resp::serve(stream, limiter.clone(), options.clone());
            async move {
                tokio::select! {
                    served = serving => if let Err(error) = served {
                        tracing::debug!(%error, "a RESP connection broke");
                    },
                    () = until_closing(closed) => {}
                }
            }
        }));
    }
    shutdown.await;
    let _ = closing.send(true);
    while accepting.join_next().await.is_some() {}
}

async fn until_closing(mut closed: watch::Receiver<bool>) {
    // An error means that the sender is gone, which is closing too.
    let _ = closed.wait_for(|closing| *closing).await;
}

/// Lets connections in until the doors close, then waits for them.
async fn accept<F, S>(listener: TcpListener, closed: watch::Receiver<bool>, refusal: &'static [u8], serve: S)
where
    F: Future<Output = ()> + Send + 'static,
    S: Fn(TcpStream, watch::Receiver<bool>) -> F,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = until_closing(closed.clone()) => break,
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((stream, _)) => {
                let _ = stream.set_nodelay(true);
                match places.clone().try_acquire_owned() {
                    Ok(place) => {
                        let serving = serve(stream, closed.clone());
                        connections.spawn(async move {
                            serving.await;
                            drop(place);
                        });
                    }
                    Err(_) => refuse(stream, refusal).await,
                }
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    let finished = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, finished).await.is_err() {
        tracing::warn!("some connections did not finish in time and were dropped");
    }
}

/// Says that there is no place, if that can be said without waiting.
async fn refuse(mut stream: TcpStream, refusal: &[u8]) {
    let _ = tokio::time::timeout(Duration::from_millis(10), stream.write_all(refusal)).await;
}
