//! Thousands of connections with unfinished requests, beside a client that keeps sending requests.
//!
//! The memory of such connections is bounded: a few KiB each, and for larger requests a budget of bytes that all
//! connections of a listener share. The client beside them receives its responses throughout.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidegate_testkit::poll::poll;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, crypto};

use crate::campaign::{record, scale};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::Serving;

const QUESTION: &str = r#"{"key":"user:42","limit":"10000000/h"}"#;
const NEIGHBOUR_QUESTION: &str = r#"{"key":"neighbour","limit":"10000000/h"}"#;
const NEIGHBOUR_QUOTA: u64 = 10_000_000;
/// Maximum memory of one connection: 10,000 of them are 200 MB.
const CONNECTION_BYTES_MAX: u64 = 20 * 1000;
/// Memory of large unfinished requests: a listener holds up to 32 MiB, and the allocator may need twice as much.
const BUDGET_BYTES: u64 = 2 * 32 * 1024 * 1024;
/// Maximum memory of all connections together.
const ALL_BYTES_MAX: u64 = 200 * 1000 * 1000;
/// Growth of a process under load that does not depend on the number of connections.
const SLACK_BYTES: u64 = 8 * 1024 * 1024;

enum Listener {
    Http,
    Resp,
    Https,
}

/// A kind of connection: the listener, and the bytes that it sends.
struct Kind {
    name: &'static str,
    listener: Listener,
    bytes: Vec<u8>,
    /// Whether to wait for a response before the next connection is opened.
    is_answered: bool,
}

fn kind(name: &'static str, listener: Listener, bytes: impl Into<Vec<u8>>) -> Kind {
    Kind { name, listener, bytes: bytes.into(), is_answered: false }
}

fn post(headers: &str, length: usize) -> String {
    format!("POST /v1/check HTTP/1.1\r\nhost: x\r\n{headers}content-length: {length}\r\n\r\n")
}

/// Returns the kinds with small unfinished requests, all of which a listener holds.
fn small_kinds() -> Vec<Kind> {
    let whole = post("", QUESTION.len()) + QUESTION;
    let half_command = "*3\r\n$14\r\nTIDEGATE.CHECK\r\n$7\r\nus";
    let hello = client_hello();
    vec![
        kind("http-silent", Listener::Http, ""),
        kind("http-half-head", Listener::Http, &whole[..40]),
        kind("http-half-body", Listener::Http, &whole[..whole.len() - 10]),
        kind("http-half-body-close", Listener::Http, post("connection: close\r\n", 34) + "{\"key"),
        Kind { is_answered: true, ..kind("http-answered", Listener::Http, &whole[..]) },
        Kind {
            is_answered: true,
            ..kind("http-answered-by-hyper", Listener::Http, "GET /docs HTTP/1.1\r\nhost: x\r\n\r\n")
        },
        kind("resp-silent", Listener::Resp, ""),
        kind("resp-half-command", Listener::Resp, half_command),
        Kind { is_answered: true, ..kind("resp-answered", Listener::Resp, "PING\r\n") },
        Kind {
            is_answered: true,
            ..kind("resp-pipeline-and-half", Listener::Resp, "PING\r\n".repeat(5_000) + half_command)
        },
        kind("tls-silent", Listener::Https, ""),
        kind("tls-half-hello", Listener::Https, &hello[..100]),
        kind("tls-hello", Listener::Https, hello),
    ]
}

/// Returns the kinds with unfinished requests of which a listener holds as many as fit into its budget: large ones, and
/// those whose body hyper awaits, each of which counts as 32 KiB.
fn large_kinds() -> Vec<Kind> {
    let bulk = format!("$65000\r\n{}\r\n", "x".repeat(65_000));
    let chunked = "POST /v1/check HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
    vec![
        kind("http-body-400k", Listener::Http, post("", 500_000) + &"x".repeat(400_000)),
        kind("http-chunk-400k", Listener::Http, chunked.clone() + "7a120\r\n" + &"x".repeat(400_000)),
        kind("http-half-chunk", Listener::Http, chunked + "22\r\n{\"key"),
        kind("http-expect", Listener::Http, post("expect: 100-continue\r\n", 34)),
        kind("http-head-60k", Listener::Http, format!("POST /v1/check HTTP/1.1\r\nx: {}", "x".repeat(60_000))),
        kind(
            "http-head-60k-behind-another",
            Listener::Http,
            format!("GET /docs HTTP/1.1\r\nhost: x\r\n\r\nGET /docs HTTP/1.1\r\nx: {}", "x".repeat(60_000)),
        ),
        kind("resp-command-200k", Listener::Resp, format!("*4\r\n{}", bulk.repeat(3))),
    ]
}

/// Returns the first TLS message of a client.
fn client_hello() -> Vec<u8> {
    let provider = Arc::new(crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    let mut client = ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap()).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

/// Raises the descriptor limit of this process, which holds one end of each connection.
pub(crate) fn allow_descriptors() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

/// Starts the service, with TLS if the kind needs it.
fn start(kind: &Kind, dir: &Path) -> Serving {
    if !matches!(kind.listener, Listener::Https) {
        return Serving::start(&["--idle", "10min"]);
    }
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (dir.join("cert.pem"), dir.join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let [certificate, key] = [certificate, key].map(|path| path.to_str().unwrap().to_owned());
    Serving::start(&["--idle", "10min", "--tls-cert", &certificate, "--tls-key", &key])
}

/// Starts a client that sends requests until `stop` is set, and returns the duration of each.
///
/// With TLS it uses the admin listener, which is not encrypted here.
fn neighbour(kind: &Kind, serving: &Serving, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<Vec<Duration>> {
    let is_admin = matches!(kind.listener, Listener::Https);
    let mut client = HttpClient::open(if is_admin { &serving.admin } else { &serving.http });
    let mut asked = 0;
    let mut ask = move || {
        if is_admin {
            return client.ask("GET", "/healthz", &[], "");
        }
        let answer = client.ask("POST", "/v1/check", &[], NEIGHBOUR_QUESTION);
        asked += 1;
        // No other client uses this key: every admission is counted exactly once.
        assert_eq!(answer.headers["x-ratelimit-remaining"], (NEIGHBOUR_QUOTA - asked).to_string());
        answer
    };
    assert_eq!(ask().status, 200);
    std::thread::spawn(move || {
        let mut took = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let start = Instant::now();
            assert_eq!(ask().status, 200);
            took.push(start.elapsed());
            // Without a pause, this client would be a burst of its own.
            std::thread::sleep(Duration::from_millis(1));
        }
        took
    })
}

/// Opens connections of a kind. Returns the connections, the time to open them, and the neighbour's response times.
fn burst(kind: &Kind, serving: &Serving, count: usize) -> (Vec<TcpStream>, Duration, Vec<Duration>) {
    let stop = Arc::new(AtomicBool::new(false));
    let neighbour = neighbour(kind, serving, stop.clone());
    let address = if matches!(kind.listener, Listener::Resp) { &serving.resp } else { &serving.http };
    let start = Instant::now();
    let held = (0..count).map(|_| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
        // A listener without memory for more may close the connection before it has read everything.
        let _ = stream.write_all(&kind.bytes);
        if kind.is_answered {
            let mut first = [0];
            stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            std::io::Read::read_exact(&mut stream, &mut first).unwrap();
        }
        stream
    });
    let held = held.collect();
    let took = start.elapsed();
    // The burst is over once the server has accepted all connections.
    let listener = if matches!(kind.listener, Listener::Resp) { "resp" } else { "http" };
    let accepted = format!("tidegate_connections_accepted_total{{listener=\"{listener}\"}} ");
    serving.until("/metrics", |answer| {
        let line = answer.body.lines().find_map(|line| line.strip_prefix(&accepted)).unwrap_or("0");
        line.parse::<usize>().unwrap() >= count
    });
    stop.store(true, Ordering::Relaxed);
    (held, took, neighbour.join().unwrap())
}

/// Waits until the memory of the process no longer changes, and returns it in bytes.
fn settled_bytes(serving: &Serving) -> u64 {
    let mut last = 0;
    let mut is_still = || {
        let now = serving.resident_bytes();
        let is_still = now.abs_diff(last) < 1024 * 1024;
        last = now;
        is_still
    };
    // Several equal readings in a row, because the process may not have run between two of them.
    let mut still = 0;
    poll(|| {
        still = if is_still() { still + 1 } else { 0 };
        still == 20
    });
    last
}

/// Runs a burst of each kind and panics if the memory grows by more than `bound(count)` bytes.
fn run(kinds: Vec<Kind>, count: usize, bound: impl Fn(u64) -> u64) {
    allow_descriptors();
    let dir = tempfile::tempdir().unwrap();
    for kind in kinds {
        let mut serving = start(&kind, dir.path());
        let before = serving.resident_bytes();
        let (held, took, mut waits) = burst(&kind, &serving, count);
        let grown = settled_bytes(&serving).saturating_sub(before);
        waits.sort_unstable();
        let p99 = waits.get(waits.len().saturating_sub(1) * 99 / 100).copied().unwrap_or_default();
        let worst = waits.last().copied().unwrap_or_default();
        record(
            &format!("bursts/{}", kind.name),
            "connections, opened within, neighbour's answers, p99, worst, bytes each, bytes in all",
            format!("{count}, {took:.1?}, {}, {p99:.1?}, {worst:.1?}, {}, {grown}", waits.len(), grown / count as u64),
        );
        assert!(grown <= bound(count as u64), "{}: {grown} bytes for {count} connections", kind.name);
        assert!(serving.child.try_wait().unwrap().is_none(), "{}: the process has exited", kind.name);
        drop(held);
    }
}

#[test]
fn unfinished_small_requests_use_little_memory_and_delay_no_client() {
    run(small_kinds(), scale(500, 9_900), |count| count * CONNECTION_BYTES_MAX + SLACK_BYTES);
}

#[test]
fn unfinished_large_requests_are_bounded_together() {
    // The allocator keeps freed memory for a while. With few connections that is as much as the bound.
    const KEPT_BYTES: u64 = 64 * 1024 * 1024;
    run(large_kinds(), scale(400, 3_000), |count| {
        let bound = count * CONNECTION_BYTES_MAX + BUDGET_BYTES + KEPT_BYTES;
        scale(bound, ALL_BYTES_MAX)
    });
}

/// The oldest unfinished request is evicted, so that a large request of another client is received.
#[test]
fn large_request_is_answered_beside_unfinished_ones() {
    allow_descriptors();
    let serving = Serving::start(&[]);
    let question = format!("{}{QUESTION}", " ".repeat(300_000));
    let mut held = Vec::new();
    for _ in 0..scale(3, 30) {
        for _ in 0..100 {
            let mut stream = TcpStream::connect(&serving.http).unwrap();
            let _ = stream.write_all((post("", 500_000) + &"x".repeat(400_000)).as_bytes());
            held.push(stream);
        }
        assert_eq!(serving.check(&question).status, 200);
        assert_eq!(serving.check(QUESTION).status, 200);
    }
    // The last requests may not have been received yet.
    serving.until("/metrics", |answer| {
        let name = "tidegate_connections_evicted_total{listener=\"http\"} ";
        let evicted = answer.body.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        evicted.parse::<usize>().unwrap() >= held.len() - 100
    });
}
