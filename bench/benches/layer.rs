//! The cost of the Tower layer: an axum handler without a layer, behind Tidegate and behind tower_governor, in one run.
//!
//! | contestant | limits | headers |
//! |---|---|---|
//! | bare | none | none |
//! | tidegate | two sliding windows by address, decided together | `ietf` only: two headers, which describe both limits |
//! | tidegate, all headers | as above | `x` and `ietf`, the default: five headers |
//! | tower_governor | one quota by address | its own: two headers |
//!
//! `cargo bench -p tidegate-bench --bench layer`
//!
//! `TIDEGATE_BENCH_ROUNDS` sets the number of rounds. Instructions and allocations are counted by valgrind, under which
//! the program starts itself.

use std::convert::Infallible;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::get;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use rustix::time::{ClockId, clock_gettime};
use tidegate::Limiter;
use tidegate::config::{Config, Format};
use tidegate::engine::Engine;
use tidegate::layer::RateLimitLayer;
use tidegate_bench::measure::{median, print_table, setting};
use tower::Service;
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;

const CONTESTANTS: [&str; 4] = ["bare", "tidegate", "tidegate, all headers", "tower_governor"];
/// The contestant that the others are compared with.
const BASELINE: usize = 3;

/// The number of requests that a contestant makes in process in one round.
const REQUESTS: usize = 200_000;
/// The number of requests that a contestant makes over sockets in one turn. A round over sockets has [`TURNS`] turns:
/// contestants that alternate quickly are exposed to the same other load, and a median of many ratios varies less.
const REQUESTS_OVER_SOCKETS: usize = 4_000;
const TURNS: usize = 12;
/// The number of connections with a request in flight. With several, the server finds the next request when it has
/// answered one. With a single one it would be woken for each request, which would be most of the measured time.
const CONNECTIONS: usize = 16;
/// The numbers of requests under valgrind, where everything takes fifty times as long.
const WARM_UP: usize = 2_000;
const COUNTED: usize = 10_000;
/// Quotas that are never reached: all measured requests are admitted.
const RULES: &str = r#"
[[rules]]
name = "api"
by = ["ip"]
limits = ["1000000/s", "10000000/day"]
"#;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, contestant, "counted", count] = &*arguments.iter().map(String::as_str).collect::<Vec<_>>() {
        let mut app = app(contestant);
        make_requests(&mut app, WARM_UP);
        std::hint::black_box(counted(&mut app, count.parse().expect("a number of requests")));
        return;
    }
    let rounds = setting("TIDEGATE_BENCH_ROUNDS", 9);
    let in_process = in_process(rounds);
    let over_sockets = over_sockets(rounds);
    let rows: Vec<Vec<String>> = CONTESTANTS
        .iter()
        .enumerate()
        .map(|(index, name)| {
            let mut row = vec![name.to_string()];
            for samples in [&in_process, &over_sockets] {
                let ratios = samples[BASELINE].iter().zip(&samples[index]).map(|(baseline, own)| baseline / own);
                row.push(format!("{:.0}", 1e9 / median(samples[index].clone())));
                row.push(format!("{:.2}×", median(ratios.collect())));
            }
            row.push(instructions(name).to_string());
            row.push(allocations(name).to_string());
            row
        })
        .collect();
    println!(
        "requests per second of one thread, in process and over sockets; instructions and allocations per request"
    );
    print_table(&["", "in process", "speed", "over sockets", "speed", "instructions", "allocations"], &rows);
}

fn app(contestant: &str) -> Router {
    let app = Router::new().route("/", get(|| async { "hello" }));
    match contestant {
        "bare" => app,
        "tidegate" | "tidegate, all headers" => {
            let headers = if contestant == "tidegate" { "headers = [\"ietf\"]" } else { "" };
            let rules = Config::from_text(&format!("{RULES}{headers}"), Format::Toml).expect("rules").rules;
            app.layer(RateLimitLayer::axum(Engine::new(Limiter::memory(), rules)))
        }
        "tower_governor" => {
            let mut config = GovernorConfigBuilder::default();
            let config = config.per_nanosecond(1).burst_size(1_000_000).use_headers().finish().expect("a quota");
            app.layer(GovernorLayer::new(config))
        }
        other => panic!("unknown contestant {other}"),
    }
}

/// The remote address of all requests. The cost of many counters is measured by the bench `memory`.
const PEER: (Ipv4Addr, u16) = (Ipv4Addr::new(203, 0, 113, 9), 40_000);

/// Makes requests one after the other, like the server of axum, and returns the number of responses with status 200.
fn make_requests(app: &mut Router, count: usize) -> usize {
    let is_served = |_| {
        let request = Request::get("/").header("host", "example.com").header("accept", "*/*");
        let request = request.extension(ConnectInfo(SocketAddr::from(PEER))).body(Body::empty()).expect("a request");
        let response: Result<Response<Body>, Infallible> =
            app.call(request).now_or_never().expect("a response without waiting");
        response.is_ok_and(|response| response.status() == StatusCode::OK)
    };
    (0..count).map(is_served).filter(|is_served| *is_served).count()
}

/// Makes the requests whose instructions are counted. Not inlined, because callgrind finds it by name.
#[inline(never)]
fn counted(app: &mut Router, count: usize) -> usize {
    make_requests(app, count)
}

/// Returns the CPU time per request in nanoseconds, for each contestant and round.
fn in_process(rounds: usize) -> Vec<Vec<f64>> {
    let mut apps = CONTESTANTS.map(app);
    let mut samples = vec![Vec::new(); apps.len()];
    for app in &mut apps {
        make_requests(app, REQUESTS / 10);
    }
    for _ in 0..rounds {
        for (app, samples) in apps.iter_mut().zip(&mut samples) {
            let start_ns = thread_ns();
            assert_eq!(make_requests(app, REQUESTS), REQUESTS, "every request is admitted");
            samples.push((thread_ns() - start_ns) / REQUESTS as f64);
        }
    }
    samples
}

/// Returns the CPU time per request of the serving thread over kept-alive connections in nanoseconds, for each contestant
/// and turn.
fn over_sockets(rounds: usize) -> Vec<Vec<f64>> {
    let mut servers = CONTESTANTS.map(Server::start);
    let mut samples = vec![Vec::new(); servers.len()];
    for server in &mut servers {
        server.ns_for(REQUESTS_OVER_SOCKETS);
    }
    for _ in 0..rounds * TURNS {
        for (server, samples) in servers.iter_mut().zip(&mut samples) {
            samples.push(server.ns_for(REQUESTS_OVER_SOCKETS) / REQUESTS_OVER_SOCKETS as f64);
        }
    }
    samples
}

/// An app that is served by a thread of its own on a free port, and its clients.
struct Server {
    clients: Vec<TcpStream>,
    /// Makes the serving thread send its CPU time.
    request_time: tokio::sync::mpsc::UnboundedSender<()>,
    time_ns: mpsc::Receiver<f64>,
}

impl Server {
    fn start(contestant: &str) -> Server {
        let (app, (send_address, address)) = (app(contestant), mpsc::channel());
        let (request_time, mut time_requests) = tokio::sync::mpsc::unbounded_channel();
        let (send_time, time_ns) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
                send_address.send(listener.local_addr().expect("an address")).expect("a receiver");
                let service = app.into_make_service_with_connect_info::<SocketAddr>();
                tokio::spawn(async move { axum::serve(listener, service).await });
                while let Some(()) = time_requests.recv().await {
                    send_time.send(thread_ns()).ok();
                }
            });
        });
        let address = address.recv().expect("a server");
        let clients = (0..CONNECTIONS).map(|_| {
            let client = TcpStream::connect(address).expect("a connection");
            client.set_nodelay(true).expect("a socket");
            client.set_nonblocking(true).expect("a socket");
            client
        });
        Server { clients: clients.collect(), request_time, time_ns }
    }

    /// Sends requests on all connections and returns the CPU time that the serving thread used, in nanoseconds.
    ///
    /// Every response must have status 200.
    fn ns_for(&mut self, requests: usize) -> f64 {
        let start_ns = self.time_ns();
        let mut response = [0; 4_096];
        for _ in 0..requests / CONNECTIONS {
            for client in &mut self.clients {
                client.write_all(b"GET / HTTP/1.1\r\nhost: example.com\r\naccept: */*\r\n\r\n").expect("a server");
            }
            for client in &mut self.clients {
                let read = read_spinning(client, &mut response);
                // A response is short and is written at once, so one read returns all of it.
                let is_served = response.starts_with(b"HTTP/1.1 200 ") && response[..read].ends_with(b"hello");
                assert!(is_served, "every request is admitted");
            }
        }
        self.time_ns() - start_ns
    }

    /// Returns the CPU time of the serving thread in nanoseconds.
    fn time_ns(&self) -> f64 {
        self.request_time.send(()).expect("a running server");
        self.time_ns.recv().expect("the time of the server")
    }
}

/// Reads once from a non-blocking socket, without going to sleep.
///
/// Waking a sleeping client would be work of the serving thread, and how often that happens is random.
fn read_spinning(client: &mut TcpStream, buffer: &mut [u8]) -> usize {
    loop {
        match client.read(buffer) {
            Ok(read) => return read,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => panic!("no response: {error}"),
        }
    }
}

/// Returns the CPU time of this thread in nanoseconds.
fn thread_ns() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

/// Returns the instructions per request, counted by callgrind.
fn instructions(contestant: &str) -> u64 {
    let tool = ["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=layer::counted*"];
    number_after("Collected :", &valgrind(&tool, contestant, COUNTED)) / COUNTED as u64
}

/// Returns the allocations per request: the difference between a longer and a shorter run.
fn allocations(contestant: &str) -> u64 {
    let run = |count| number_after("total heap usage:", &valgrind(&["--leak-check=no"], contestant, count));
    (run(2 * COUNTED) - run(COUNTED)) / COUNTED as u64
}

/// Runs this program under valgrind with one contestant and returns the report.
fn valgrind(tool: &[&str], contestant: &str, count: usize) -> String {
    let run = Command::new("valgrind")
        .args(tool)
        .arg(std::env::current_exe().expect("the path of this program"))
        .args([contestant, "counted", &count.to_string()])
        .stdin(Stdio::null())
        .output()
        .expect("valgrind (install the package valgrind)");
    String::from_utf8_lossy(&run.stderr).into_owned()
}

/// Returns the number that follows `words` in the report. Panics if there is none or if it is 0.
fn number_after(words: &str, report: &str) -> u64 {
    let rest = report.lines().find_map(|line| line.split_once(words)).map(|(_, rest)| rest.trim().replace(',', ""));
    let number = rest.and_then(|rest| rest.split_whitespace().next().and_then(|number| number.parse().ok()));
    number.filter(|&number: &u64| number > 0).unwrap_or_else(|| panic!("no count in the report of valgrind:\n{report}"))
}
