//! Holding the doors open, and closing them in order.
//!
//! ```text
//!   serve ─▶ shutdown begins: not ready ─▶ drain: still served ─▶ nobody new is let in,    ─▶ the admin door
//!                                          so that a balancer     those inside finish or      closes last
//!                                          has time to notice     are dropped after the grace
//! ```
//!
//! **Nothing is lost.** Between two requests a busy connection looks like an idle one, and the next request may be on its way. So no
//! connection is ended before its client could know:
//!
//! - An HTTP client that asks while the instance drains reads `connection: close` in its answer.
//! - RESP has no such word. When the doors close, the next answers and the end of the connection are sent in one packet, so a client that
//!   waits for its answers finds the end before it sends again. Nothing that arrives after the end is executed.
//! - A connection without a request is ended half a second after the doors begin to close.
//! - After its end a connection is read until the client ends it, too, for a second at most: to close it with unread bytes would
//!   reset it, and a reset destroys answers that are on their way.
//!
//! Each connection is a task of its own on a thread of the [crew](crate::crew), and there are never more of them than a door
//! has places: one more is told so and closed. What they hold of unfinished requests is [bounded](crate::budget) for all together.

use std::future::Future;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tollgate::engine::Engine;
use tollgate::{Limiter, SystemClock};

use crate::accept::{Acceptor, Closing, Context, ListenerCounts, ShutdownStage, SpareDescriptors, accept};
use crate::admin::token::Token;
use crate::admin::{AdminListener, is_loopback};
use crate::auth_guard::{AuthGuard, UNKNOWN_ADDRESS};
use crate::browser::{BrowserPolicy, Origin};
use crate::budget::Budget;
use crate::listeners::http::{HttpListener, connection};
use crate::listeners::resp::{RespListener, RespOptions};
use crate::metrics::{DecisionStats, ListenerStats, Numbers, StoreTimes};
use crate::readiness::Readiness;
use crate::reload::Reloader;
use crate::tls::Tls;
use crate::worker_pool::WorkerPool;

/// Descriptors that the admin door keeps for itself: so many probes are answered when the process has no others.
const ADMIN_SPARES: usize = 4;
/// An admin connection that sends no whole request header for so long is closed, whatever the other doors allow.
const ADMIN_IDLE: Duration = Duration::from_secs(10);
const HTTP_REFUSAL: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\nretry-after: 1\r\n\r\n";
const RESP_REFUSAL: &[u8] = b"-ERR max number of clients reached\r\n";

/// Where to listen. A door without a listener is closed.
#[derive(Debug, Default)]
pub struct Listeners {
    /// For `POST /v1/check`.
    pub http: Option<TcpListener>,
    /// For Redis clients.
    pub resp: Option<TcpListener>,
    /// For the operator.
    pub admin: Option<TcpListener>,
}

/// How many may be inside, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Connections per door.
    pub connections: usize,
    /// Connections of the admin door: an operator, an orchestrator, a few scrapers. One more takes the place of the one that has
    /// been idle for longest.
    pub admin_connections: usize,
    /// An HTTP connection that sends no whole request header for so long is closed.
    pub http_idle: Duration,
    /// Bytes that each listener holds of requests that are not complete, beside 4 KiB for each connection. When they are used up, the
    /// oldest of these requests is dropped to make room for another.
    pub receive_bytes: usize,
    /// How long a shutdown goes on serving after saying that it is not ready.
    pub drain: Duration,
    /// How long it then waits for connections to finish.
    pub grace: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            connections: 10_000,
            admin_connections: 64,
            http_idle: Duration::from_secs(60),
            receive_bytes: 32 * 1024 * 1024,
            drain: Duration::ZERO,
            grace: Duration::from_secs(10),
        }
    }
}

/// What stands behind the listeners.
#[derive(Debug)]
pub struct BoundListeners {
    limiter: Limiter,
    engine: Option<Engine>,
    resp: Arc<RespOptions>,
    bounds: Bounds,
    tls: Option<Tls>,
    reloader: Reloader,
    readiness: Option<Readiness>,
    token: Option<Token>,
    store_times: Arc<StoreTimes>,
    threads: Option<NonZeroUsize>,
    browsers: BrowserPolicy,
}

impl BoundListeners {
    /// All doors, asking this limiter.
    pub fn new(limiter: Limiter) -> BoundListeners {
        BoundListeners {
            limiter,
            engine: None,
            resp: Arc::default(),
            bounds: Bounds::default(),
            tls: None,
            reloader: Reloader::nothing(),
            readiness: None,
            token: None,
            store_times: Arc::default(),
            threads: None,
            browsers: BrowserPolicy::default(),
        }
    }

    /// The HTTP door also answers by rules.
    #[must_use]
    pub fn rules(self, engine: Engine) -> BoundListeners {
        BoundListeners { engine: Some(engine), ..self }
    }

    /// The RESP door with other options.
    #[must_use]
    pub fn resp(self, options: RespOptions) -> BoundListeners {
        BoundListeners { resp: Arc::new(options), ..self }
    }

    /// Within other bounds.
    #[must_use]
    pub fn bounds(self, bounds: Bounds) -> BoundListeners {
        BoundListeners { bounds, ..self }
    }

    /// Encrypted: the HTTP and the RESP door, and the admin door unless only this machine reaches it.
    #[must_use]
    pub fn tls(self, tls: Tls) -> BoundListeners {
        BoundListeners { tls: Some(tls), ..self }
    }

    /// With what can be read again.
    #[must_use]
    pub fn reloader(self, reloader: Reloader) -> BoundListeners {
        BoundListeners { reloader, ..self }
    }

    /// Telling by this whether to send work here.
    #[must_use]
    pub fn readiness(self, readiness: Readiness) -> BoundListeners {
        BoundListeners { readiness: Some(readiness), ..self }
    }

    /// The admin door opens with this token. Without one it stays closed for everything that needs one.
    #[must_use]
    pub fn token(self, token: Token) -> BoundListeners {
        BoundListeners { token: Some(token), ..self }
    }

    /// With what watches the limiter's store, for the metrics.
    #[must_use]
    pub fn store_times(self, store_times: Arc<StoreTimes>) -> BoundListeners {
        BoundListeners { store_times, ..self }
    }

    /// Served by so many threads; unless said, one for every two cores.
    #[must_use]
    pub fn threads(self, threads: NonZeroUsize) -> BoundListeners {
        BoundListeners { threads: Some(threads), ..self }
    }

    /// Sets the origins whose web pages may send requests. Defaults to none: a request that a browser sends for a page of
    /// another site is refused.
    #[must_use]
    pub fn allowed_origins(mut self, origins: Vec<Origin>) -> BoundListeners {
        self.browsers.origins = origins;
        self
    }

    /// Sets the domain names under which the admin listener may be asked, besides addresses and names without a dot. Defaults
    /// to none.
    #[must_use]
    pub fn admin_hosts(mut self, hosts: Vec<String>) -> BoundListeners {
        self.browsers.admin_hosts = hosts;
        self
    }

    fn gate(
        &self,
        door: &'static str,
        counts: &Arc<ListenerCounts>,
        crew: &Arc<WorkerPool>,
        readiness: &Readiness,
    ) -> Acceptor {
        Acceptor {
            door,
            places: self.bounds.connections,
            evicts_idle: false,
            spares: Arc::default(),
            receive_budget: Budget::new(self.bounds.receive_bytes, counts.evicted.clone()),
            grace: self.bounds.grace,
            refusal: if door == "resp" { RESP_REFUSAL } else { HTTP_REFUSAL },
            tls: self.tls.clone(),
            counts: counts.clone(),
            crew: crew.clone(),
            _attended: readiness.attend(door),
        }
    }
}

/// Serves until `shutdown` is ready, then closes the doors and waits for those inside.
pub async fn run(listeners: Listeners, doors: BoundListeners, shutdown: impl Future<Output = ()>) {
    let readiness = doors.readiness.clone();
    let readiness = readiness.unwrap_or_else(|| Readiness::new(doors.limiter.clone(), None, doors.reloader.clone()));
    let decisions = Arc::new(DecisionStats::default());
    let listener_stats: [Arc<ListenerStats>; 3] = std::array::from_fn(|_| Arc::default());
    let auth_guard = Arc::new(AuthGuard::default());
    let counts: [(&'static str, Arc<ListenerCounts>); 3] =
        ["http", "resp", "admin"].map(|door| (door, Arc::new(ListenerCounts::default())));
    let (close, closing) = Closing::channel();
    let (close_admin, closing_admin) = Closing::channel();

    let crew = Arc::new(WorkerPool::new(doors.threads));
    let mut serving = JoinSet::new();
    if let Some(listener) = listeners.http {
        let gate = doors.gate("http", &counts[0].1, &crew, &readiness);
        serving.spawn(serve_http(listener, &doors, gate, (&decisions, &listener_stats[0]), closing.clone()));
    }
    if let Some(listener) = listeners.resp {
        let gate = doors.gate("resp", &counts[1].1, &crew, &readiness);
        let listening = RespListener {
            limiter: doors.limiter.clone(),
            options: doors.resp.clone(),
            decisions: decisions.clone(),
            stats: listener_stats[1].clone(),
            auth_guard: auth_guard.clone(),
        };
        serving.spawn(serve_resp(listener, listening, gate, closing.clone()));
    }
    let mut serving_admin = JoinSet::new();
    if let Some(listener) = listeners.admin {
        let gate = doors.gate("admin", &counts[2].1, &crew, &readiness);
        let numbers = Arc::new(Numbers {
            limiter: doors.limiter.clone(),
            reloader: doors.reloader.clone(),
            readiness: readiness.clone(),
            decisions,
            store_times: doors.store_times.clone(),
            doors: counts,
            listeners: listener_stats,
        });
        serving_admin.spawn(serve_admin(listener, &doors, gate, (&readiness, auth_guard), numbers, closing_admin));
    }

    shutdown.await;
    readiness.leave();
    let _ = close.send(ShutdownStage::Leaving);
    tokio::time::sleep(doors.bounds.drain).await;
    let _ = close.send(ShutdownStage::Closing);
    while serving.join_next().await.is_some() {}
    let _ = close_admin.send(ShutdownStage::Closing);
    while serving_admin.join_next().await.is_some() {}
}

fn serve_http(
    listener: TcpListener,
    doors: &BoundListeners,
    gate: Acceptor,
    (decisions, stats): (&Arc<DecisionStats>, &Arc<ListenerStats>),
    closing: Closing,
) -> impl Future<Output = ()> + Send + use<> {
    let door = HttpListener::new(doors.limiter.clone())
        .with_stats(decisions.clone(), stats.clone())
        .with_browsers(doors.browsers.clone());
    let door = Arc::new(match &doors.engine {
        Some(engine) => door.with_rules(engine.clone()),
        None => door,
    });
    let idle = doors.bounds.http_idle;
    accept(listener, gate, closing, move |stream, context: Context| {
        let door = door.clone();
        Box::pin(async move {
            if let Err(error) = door.serve(stream, idle, context).await {
                tracing::debug!(%error, "an HTTP connection broke");
            }
        })
    })
}

fn serve_resp(
    listener: TcpListener,
    listening: RespListener,
    gate: Acceptor,
    closing: Closing,
) -> impl Future<Output = ()> + Send + use<> {
    let listening = Arc::new(listening);
    accept(listener, gate, closing, move |stream, context: Context| {
        let peer = stream.peer().unwrap_or(UNKNOWN_ADDRESS);
        let serving = listening.clone().serve(stream, peer, context);
        Box::pin(async move {
            if let Err(error) = serving.await {
                tracing::debug!(%error, "a RESP connection broke");
            }
        })
    })
}

fn serve_admin(
    listener: TcpListener,
    doors: &BoundListeners,
    mut gate: Acceptor,
    (readiness, auth_guard): (&Readiness, Arc<AuthGuard>),
    numbers: Arc<Numbers>,
    closing: Closing,
) -> impl Future<Output = ()> + Send + use<> {
    let is_local = listener.local_addr().is_ok_and(|address| is_loopback(address.ip()));
    gate.places = doors.bounds.admin_connections;
    gate.evicts_idle = true;
    gate.spares = SpareDescriptors::new(ADMIN_SPARES);
    if is_local {
        gate.tls = None;
    }
    let door = Arc::new(AdminListener {
        token: doors.token.clone(),
        readiness: readiness.clone(),
        reloader: doors.reloader.clone(),
        stats: numbers.listeners[2].clone(),
        numbers,
        clock: SystemClock::new(),
        browsers: doors.browsers.clone(),
        auth_guard,
    });
    let idle = doors.bounds.http_idle.min(ADMIN_IDLE);
    accept(listener, gate, closing, move |stream, context: Context| {
        let door = door.clone();
        let peer = stream.peer().unwrap_or(UNKNOWN_ADDRESS);
        Box::pin(async move {
            let answer = |request| door.answer(request, peer);
            if let Err(error) = connection::serve(stream, idle, context, None, answer).await {
                tracing::debug!(%error, "an admin connection broke");
            }
        })
    })
}
