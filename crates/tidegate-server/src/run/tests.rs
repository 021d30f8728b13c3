//! Adds a listener of another protocol: one type, and its declaration.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tidegate::Limiter;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::*;
use crate::listener::{ConnectionContext, Listener, PeerPolicy, ServeFuture};
use crate::listeners::admin::ADMIN;
use crate::metrics::ListenerStats;
use crate::stream::ClientStream;

const DEADLINE: Duration = Duration::from_secs(30);

/// The listener of these tests, without policies.
static ADDRESS: ListenerKind = ListenerKind {
    name: "address",
    help: "the listener of a test",
    default_address: "off",
    address_setting: None,
    role: Role::Service,
    decides_for_others: false,
    secret: None,
    example: "",
    build: |_| Arc::new(AddressListener::new(Default::default())),
};

/// The listener with policies for a trusted proxy at 127.0.0.1 and its clients.
static PROXIED: ListenerKind = ListenerKind {
    build: |_| {
        let proxy = PeerPolicy { expects_proxy_header: true, connections_max: None };
        let client = PeerPolicy { expects_proxy_header: false, connections_max: Some(2) };
        Arc::new(AddressListener::new([proxy, client]))
    },
    ..ADDRESS
};

/// Sends each client its own address, and ends on shutdown or with the client.
struct AddressListener {
    stats: Arc<ListenerStats>,
    /// The policy for connections from 127.0.0.1, and for all others.
    policies: [PeerPolicy; 2],
}

impl Listener for AddressListener {
    fn stats(&self) -> &Arc<ListenerStats> {
        &self.stats
    }

    fn over_limit_reply(&self) -> &'static [u8] {
        b"full"
    }

    fn peer_policy(&self, peer: IpAddr) -> PeerPolicy {
        self.policies[usize::from(peer != Ipv4Addr::LOCALHOST)]
    }

    fn serve(self: Arc<Self>, mut stream: ClientStream, peer: SocketAddr, context: ConnectionContext) -> ServeFuture {
        Box::pin(async move {
            stream.write_all(format!("{peer}\n").as_bytes()).await?;
            tokio::select! {
                () = context.shutdown.closing() => Ok(stream.write_all(b"closing").await?),
                _ = stream.read_u8() => Ok(()),
            }
        })
    }
}

impl AddressListener {
    fn new(policies: [PeerPolicy; 2]) -> AddressListener {
        AddressListener { stats: ListenerStats::new(ADDRESS.name, &[], &[], false), policies }
    }
}

async fn bind() -> (TcpListener, SocketAddr) {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

async fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nconnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

#[tokio::test]
async fn another_listener_gets_the_peer_the_limit_metrics_and_the_shutdown() {
    let ((own, own_address), (admin, admin_address)) = (bind().await, bind().await);
    let bounds = Bounds { connections: 1, ..Bounds::default() };
    let (end, ended) = oneshot::channel::<()>();
    let options = ServerOptions::new(Limiter::memory()).bounds(bounds);
    let running = tokio::spawn(run([(&ADDRESS, own), (&ADMIN, admin)], options, async move { drop(ended.await) }));

    let mut client = TcpStream::connect(own_address).await.unwrap();
    let expected = format!("{}\n", client.local_addr().unwrap());
    let mut line = vec![0; expected.len()];
    client.read_exact(&mut line).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&line), expected, "the peer's address");

    let mut rejected = String::new();
    TcpStream::connect(own_address).await.unwrap().read_to_string(&mut rejected).await.unwrap();
    assert_eq!(rejected, "full", "a connection over the limit");

    let metrics = get(admin_address, "/metrics").await;
    for sample in [
        "tidegate_connections{listener=\"address\"} 1\n",
        "tidegate_connections_refused_total{listener=\"address\"} 1\n",
        "tidegate_request_seconds_count{listener=\"address\"} 0\n",
        "tidegate_connections{listener=\"admin\"} 1\n",
    ] {
        assert!(metrics.contains(sample), "{sample}{metrics}");
    }
    assert!(!metrics.contains("\"http\"") && !metrics.contains("\"resp\""), "closed listeners: {metrics}");
    assert!(get(admin_address, "/readyz").await.starts_with("HTTP/1.1 200 "));

    end.send(()).unwrap();
    let mut rest = String::new();
    client.read_to_string(&mut rest).await.unwrap();
    assert_eq!(rest, "closing");
    tokio::time::timeout(DEADLINE, running).await.expect("all connections have ended").unwrap();
}

#[tokio::test]
async fn readiness_names_another_listener_that_has_ended() {
    let ((own, _), (admin, admin_address)) = (bind().await, bind().await);
    // More connections than a semaphore can hold: the task of the listener panics.
    let bounds = Bounds { connections: usize::MAX, ..Bounds::default() };
    let options = ServerOptions::new(Limiter::memory()).bounds(bounds);
    tokio::spawn(run([(&ADDRESS, own), (&ADMIN, admin)], options, std::future::pending()));
    let waiting = async {
        loop {
            let response = get(admin_address, "/readyz").await;
            if response.starts_with("HTTP/1.1 503 ") {
                return response;
            }
            tokio::task::yield_now().await;
        }
    };
    let response = tokio::time::timeout(DEADLINE, waiting).await.expect("not ready");
    assert!(response.contains("\"ended\":[\"address\"]"), "{response}");
}

/// Connects to `address`, sends `bytes`, and returns the connection with its first line. The line is empty if the
/// connection ends before one.
async fn first_line(address: SocketAddr, bytes: &[u8]) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut line = Vec::new();
    let reading = async {
        while let Ok(byte) = stream.read_u8().await
            && byte != b'\n'
        {
            line.push(byte);
        }
    };
    tokio::time::timeout(DEADLINE, reading).await.expect("a line or the end");
    (stream, String::from_utf8(line).unwrap())
}

#[tokio::test]
async fn client_of_a_trusted_proxy_is_that_of_the_proxy_header_and_has_its_own_bound() {
    let (own, address) = bind().await;
    let options = ServerOptions::new(Limiter::memory());
    tokio::spawn(run([(&PROXIED, own)], options, std::future::pending()));
    let header = |client: &str| format!("PROXY TCP4 {client} 198.51.100.7 56324 443\r\n");

    let (first, line) = first_line(address, header("203.0.113.9").as_bytes()).await;
    assert_eq!(line, "203.0.113.9:56324");
    let (_second, line) = first_line(address, header("203.0.113.9").as_bytes()).await;
    assert_eq!(line, "203.0.113.9:56324");
    let (_, line) = first_line(address, header("203.0.113.9").as_bytes()).await;
    assert_eq!(line, "full", "a third connection of one client");
    let (_other, line) = first_line(address, header("203.0.113.10").as_bytes()).await;
    assert_eq!(line, "203.0.113.10:56324", "another client of the same proxy");
    let (probe, line) = first_line(address, b"PROXY UNKNOWN\r\n").await;
    assert_eq!(line, probe.local_addr().unwrap().to_string(), "a connection of the proxy itself");
    let (_, line) = first_line(address, b"GET / HTTP/1.1\r\n\r\n").await;
    assert_eq!(line, "", "a connection without the header is closed");

    drop(first);
    let reconnecting = async {
        loop {
            let (_, line) = first_line(address, header("203.0.113.9").as_bytes()).await;
            if line != "full" {
                return line;
            }
            tokio::task::yield_now().await;
        }
    };
    let line = tokio::time::timeout(DEADLINE, reconnecting).await.expect("the slot of the closed connection");
    assert_eq!(line, "203.0.113.9:56324");
}
