//! Clients that close their HTTP/1 connection early: how often the handler starts, and how many units stay charged.
//!
//! | the client closes the connection | handler | `always` | `on_failure` | `on_success` |
//! |---|---|---|---|---|
//! | within the request head | not started | 0 | 0 | 0 |
//! | while a leaky bucket delays the request | not started | 1 | 1 | 1 |
//! | while the handler works | started | 1 | 1 | 1 |
//! | during its upload, and the handler responds 400 | started | 1 | 1 | 0 |
//! | while the body of a 200 is sent | started | 1 | 0 | 1 |
//! | while the body of a 500 is sent | started | 1 | 1 | 0 |

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Path;
use axum::routing::{get, post};
use futures_util::{StreamExt, stream};
use http::StatusCode;
use tidegate::config::{Config, Format};
use tidegate::engine::Engine;
use tidegate::layer::RateLimitLayer;
use tidegate::{Demand, Key, Limiter, Scope};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};

const PEER: [u8; 4] = [203, 0, 113, 9];
const QUOTA: u32 = 1_000;
const CLIENTS: u32 = 10;
const CHARGES: [&str; 3] = ["always", "on_failure", "on_success"];

/// When the client closes the connection.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Stage {
    WithinTheHead,
    WhileDelayed,
    WhileHandled,
    WhileUploading,
    WhileReading(u16),
}

impl Stage {
    /// Returns how often the handler starts for each client, and how many units stay charged.
    fn expected(self, charge: &str) -> (u32, u32) {
        let kept_after = |is_success: bool| match charge {
            "on_failure" => u32::from(!is_success),
            "on_success" => u32::from(is_success),
            _ => 1,
        };
        match self {
            Stage::WithinTheHead => (0, 0),
            Stage::WhileDelayed => (0, 1),
            Stage::WhileHandled => (1, 1),
            Stage::WhileUploading => (1, kept_after(false)),
            Stage::WhileReading(status) => (1, kept_after(status < 400)),
        }
    }
}

/// The starts of the handlers.
struct Seen {
    started: AtomicU32,
    starts: mpsc::UnboundedSender<()>,
    /// Receives a message when an upload handler has read its body to the end.
    uploads: mpsc::UnboundedSender<()>,
}

impl Seen {
    fn start(&self) {
        self.started.fetch_add(1, Ordering::SeqCst);
        self.starts.send(()).unwrap();
    }
}

fn engine(charge: &str) -> Engine {
    let rules = format!(
        "[[rules]]\nname = 'counted'\nby = ['ip']\ncharge = '{charge}'\nlimits = [{{ name = 'day', limit = '{QUOTA}/day' }}]\n\
         [[rules]]\nname = 'held'\nmatch = {{ path = '/held' }}\nby = ['ip']\nlimits = ['1/28s leaky-bucket queue=1000']\n"
    );
    let rules = Config::from_text(&rules, Format::Toml).unwrap_or_else(|report| panic!("{report:?}")).rules;
    Engine::new(Limiter::memory(), rules)
}

fn app(engine: &Engine, seen: &Arc<Seen>) -> Router {
    let [handled, held, uploaded, read] = [(); 4].map(|()| seen.clone());
    Router::new()
        .route(
            "/handled",
            get(|| async move {
                handled.start();
                std::future::pending::<()>().await
            }),
        )
        .route("/held", get(|| async move { held.start() }))
        .route(
            "/uploaded",
            post(|body: Body| async move {
                uploaded.start();
                let mut chunks = body.into_data_stream();
                while let Some(Ok(_)) = chunks.next().await {}
                uploaded.uploads.send(()).unwrap();
                StatusCode::BAD_REQUEST
            }),
        )
        .route(
            "/read/{status}",
            get(|Path(status): Path<u16>| async move {
                read.start();
                let first = stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"first"))]);
                (StatusCode::from_u16(status).unwrap(), Body::from_stream(first.chain(stream::pending())))
            }),
        )
        .layer(
            RateLimitLayer::new(engine.clone(), |_| Some(PEER.into()))
                .wait_at_most(std::time::Duration::from_secs(3_600)),
        )
}

/// Opens a connection and brings it to this stage. Dropping the stream closes the connection.
async fn open(
    address: SocketAddr,
    stage: Stage,
    starts: &mut mpsc::UnboundedReceiver<()>,
    uploads: &mut mpsc::UnboundedReceiver<()>,
) -> TcpStream {
    let mut connection = TcpStream::connect(address).await.unwrap();
    let path = match stage {
        Stage::WithinTheHead | Stage::WhileHandled => "/handled".to_owned(),
        Stage::WhileDelayed => "/held".to_owned(),
        Stage::WhileUploading => "/uploaded".to_owned(),
        Stage::WhileReading(status) => format!("/read/{status}"),
    };
    let head = match stage {
        Stage::WithinTheHead => format!("GET {path} HTTP/1.1\r\nhost: x\r\n"),
        Stage::WhileUploading => format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nfive "),
        _ => format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n"),
    };
    connection.write_all(head.as_bytes()).await.unwrap();
    match stage {
        Stage::WithinTheHead | Stage::WhileDelayed => {}
        Stage::WhileHandled => starts.recv().await.unwrap(),
        Stage::WhileUploading => {
            starts.recv().await.unwrap();
            // Closes the sending direction. The response could still be read.
            connection.shutdown().await.unwrap();
            uploads.recv().await.unwrap();
        }
        Stage::WhileReading(_) => {
            let mut read = Vec::new();
            while !read.ends_with(b"first\r\n") {
                assert!(connection.read_buf(&mut read).await.unwrap() > 0, "{}", String::from_utf8_lossy(&read));
            }
        }
    }
    connection
}

/// Returns how many units of the counted limit are charged.
async fn charged(engine: &Engine) -> u32 {
    let key = Key::scoped("ip:203.0.113.9", Scope::rule("counted", "day")).unwrap();
    let limit = format!("{QUOTA}/day").parse().unwrap();
    let line = engine.limiter().inspect(&Demand::new(limit, key)).await.unwrap();
    QUOTA - line.remaining
}

/// Returns how often the handler started and how many units stayed charged.
async fn outcome(charge: &str, stage: Stage) -> (u32, u32) {
    let engine = engine(charge);
    let (starts, mut started) = mpsc::unbounded_channel();
    let (uploads, mut uploaded) = mpsc::unbounded_channel();
    let seen = Arc::new(Seen { started: AtomicU32::new(0), starts, uploads });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = axum::serve(listener, app(&engine, &seen)).with_graceful_shutdown(async move {
        stopped.await.ok();
    });
    let serving = tokio::spawn(async move { serving.await });
    if stage == Stage::WhileDelayed {
        // The first request into a leaky bucket is not delayed.
        let mut connection = TcpStream::connect(address).await.unwrap();
        connection.write_all(b"GET /held HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        connection.read_to_end(&mut Vec::new()).await.unwrap();
    }
    // The rule has allowed the first request and each delayed one.
    let decided = || engine.rule_stats().iter().map(tidegate::engine::RuleStats::allowed).max().unwrap_or(0);
    let before = decided();
    for n in 1..=u64::from(CLIENTS) {
        let connection = open(address, stage, &mut started, &mut uploaded).await;
        while stage == Stage::WhileDelayed && decided() < before + n {
            tokio::task::yield_now().await;
        }
        drop(connection);
    }
    // The server stops when every connection is closed.
    stop.send(()).unwrap();
    serving.await.unwrap().unwrap();

    (seen.started.load(Ordering::SeqCst), charged(&engine).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_connection_stays_charged_unless_a_response_earned_a_refund() {
    let stages = [
        Stage::WithinTheHead,
        Stage::WhileDelayed,
        Stage::WhileHandled,
        Stage::WhileUploading,
        Stage::WhileReading(200),
        Stage::WhileReading(500),
    ];
    for charge in CHARGES {
        for stage in stages {
            let (started, charged) = outcome(charge, stage).await;
            let (starts, keeps) = stage.expected(charge);
            // The first request, which was answered 200.
            let first = u32::from(stage == Stage::WhileDelayed);
            let first_kept = if charge == "on_failure" { 0 } else { first };
            let expected = (starts * CLIENTS + first, keeps * CLIENTS + first_kept);
            assert_eq!((started, charged), expected, "{charge}, {stage:?}");
        }
    }
}
