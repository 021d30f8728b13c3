//! What the layer costs: a bare axum handler, the same behind Tollgate, and behind tower_governor, in one run.
//!
//! | contestant | limits | headers |
//! |---|---|---|
//! | bare | none | none |
//! | tollgate | two sliding windows by address, decided together | `ietf` alone: two, which tell of both limits |
//! | tollgate, all headers | the same | `x` and `ietf`, as unless said: five |
//! | tower_governor | one quota by address | its own: two |
//!
//! `cargo bench -p tollgate-bench --bench layer`; the number of rounds by `TOLLGATE_BENCH_ROUNDS`. Instructions and allocations are
//! counted by valgrind, in which this program runs itself.

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
use tollgate::Limiter;
use tollgate::config::{Config, Format};
use tollgate::engine::Engine;
use tollgate::layer::RateLimitLayer;
use tollgate_bench::measure::{median, print_table, setting};
use tower::Service;
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;

const CONTESTANTS: [&str; 4] = ["bare", "tollgate", "tollgate, all headers", "tower_governor"];
/// The contestant that the others are compared with.
const BASELINE: usize = 3;

/// How many requests one round makes in process, and one turn over sockets. A round has many turns there: contestants that take turns
/// quickly share whatever else goes on in the machine, and of many ratios the middle one wanders less.
const REQUESTS: usize = 200_000;
const REQUESTS_OVER_SOCKETS: usize = 4_000;
const TURNS: usize = 12;
/// How many connections ask at the same time: as under any load, the server finds the next request when it has answered one.
/// With a single one it would be woken for each, and that would be most of what is measured.
const CONNECTIONS: usize = 16;
/// Under valgrind, where everything takes fifty times as long.
const WARM_UP: usize = 2_000;
const COUNTED: usize = 10_000;
/// Quotas that nobody reaches: what is measured is the way of a request that passes.
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
    let rounds = setting("TOLLGATE_BENCH_ROUNDS", 9);
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
        "requests per second of one thread, in process and over sockets; instructions and allocations of a request"
    );
    print_table(&["", "in process", "speed", "over sockets", "speed", "instructions", "allocations"], &rows);
}

fn app(contestant: &str) -> Router {
    let app = Router::new().route("/", get(|| async { "hello" }));
    match contestant {
        "bare" => app,
        "tollgate" | "tollgate, all headers" => {
            let headers = if contestant == "tollgate" { "headers = [\"ietf\"]" } else { "" };
            let rules = Config::from_text(&format!("{RULES}{headers}"), Format::Toml).expect("rules").rules;
            app.layer(RateLimitLayer::axum(Engine::new(Limiter::memory(), rules)))
        }
        "tower_governor" => {
            let mut config = GovernorConfigBuilder::default();
            let config = config.per_nanosecond(1).burst_size(1_000_000).use_headers().finish().expect("a quota");
            app.layer(GovernorLayer::new(config))
        }
        other => panic!("no contestant is called {other}"),
    }
}

/// Who makes them all: what many counters cost is measured elsewhere.
const PEER: (Ipv4Addr, u16) = (Ipv4Addr::new(203, 0, 113, 9), 40_000);

/// Makes requests, one after the other, as axum's server would; how many were served.
fn make_requests(app: &mut Router, count: usize) -> usize {
    let served = |_| {
        let request = Request::get("/").header("host", "example.com").header("accept", "*/*");
        let request = request.extension(ConnectInfo(SocketAddr::from(PEER))).body(Body::empty()).expect("a request");
        let response: Result<Response<Body>, Infallible> =
            app.call(request).now_or_never().expect("nothing here waits for anything");
        response.is_ok_and(|response| response.status() == StatusCode::OK)
    };
    (0..count).map(served).filter(|served| *served).count()
}

/// Named to callgrind, hence neither inlined nor mangled beyond recognition.
#[inline(never)]
fn counted(app: &mut Router, count: usize) -> usize {
    make_requests(app, count)
}

/// Nanoseconds of processor time per request, by contestant and round.
fn in_process(rounds: usize) -> Vec<Vec<f64>> {
    let mut apps = CONTESTANTS.map(app);
    let mut samples = vec![Vec::new(); apps.len()];
    for app in &mut apps {
        make_requests(app, REQUESTS / 10);
    }
    for _ in 0..rounds {
        for (app, samples) in apps.iter_mut().zip(&mut samples) {
            let begun_ns = thread_ns();
            assert_eq!(make_requests(app, REQUESTS), REQUESTS, "every request passes");
            samples.push((thread_ns() - begun_ns) / REQUESTS as f64);
        }
    }
    samples
}

/// The same over kept connections: what the thread that serves was given.
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

/// An app, served by a thread of its own on a free port.
struct Server {
    clients: Vec<TcpStream>,
    ask_time: tokio::sync::mpsc::UnboundedSender<()>,
    time_ns: mpsc::Receiver<f64>,
}

impl Server {
    fn start(contestant: &str) -> Server {
        let (app, (tell_address, address)) = (app(contestant), mpsc::channel());
        let (ask_time, mut asked) = tokio::sync::mpsc::unbounded_channel();
        let (tell_time, time_ns) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
                tell_address.send(listener.local_addr().expect("an address")).expect("somebody waits");
                let service = app.into_make_service_with_connect_info::<SocketAddr>();
                tokio::spawn(async move { axum::serve(listener, service).await });
                while let Some(()) = asked.recv().await {
                    tell_time.send(thread_ns()).ok();
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
        Server { clients: clients.collect(), ask_time, time_ns }
    }

    fn ns_for(&mut self, requests: usize) -> f64 {
        let begun_ns = self.time_ns();
        let mut answer = [0; 4_096];
        for _ in 0..requests / CONNECTIONS {
            for client in &mut self.clients {
                client.write_all(b"GET / HTTP/1.1\r\nhost: example.com\r\naccept: */*\r\n\r\n").expect("a server");
            }
            for client in &mut self.clients {
                let read = read_awake(client, &mut answer);
                // It is short, and written at once.
                let is_served = answer.starts_with(b"HTTP/1.1 200 ") && answer[..read].ends_with(b"hello");
                assert!(is_served, "every request passes");
            }
        }
        self.time_ns() - begun_ns
    }

    fn time_ns(&self) -> f64 {
        self.ask_time.send(()).expect("the server goes on");
        self.time_ns.recv().expect("the server answers")
    }
}

/// Reads without going to sleep: to wake a client is work of the thread that answers it, and how often that happens is a matter of
/// chance, not of what is measured.
fn read_awake(client: &mut TcpStream, answer: &mut [u8]) -> usize {
    loop {
        match client.read(answer) {
            Ok(read) => return read,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => panic!("an answer: {error}"),
        }
    }
}

/// The processor time that this thread was given.
fn thread_ns() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

fn instructions(contestant: &str) -> u64 {
    let tool = ["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=layer::counted*"];
    number_after("Collected :", &valgrind(&tool, contestant, COUNTED)) / COUNTED as u64
}

/// By how many allocations a longer run differs from a shorter one.
fn allocations(contestant: &str) -> u64 {
    let run = |count| number_after("total heap usage:", &valgrind(&["--leak-check=no"], contestant, count));
    (run(2 * COUNTED) - run(COUNTED)) / COUNTED as u64
}

fn valgrind(tool: &[&str], contestant: &str, count: usize) -> String {
    let run = Command::new("valgrind")
        .args(tool)
        .arg(std::env::current_exe().expect("this program has a path"))
        .args([contestant, "counted", &count.to_string()])
        .stdin(Stdio::null())
        .output()
        .expect("valgrind is needed to count instructions: install the package valgrind");
    String::from_utf8_lossy(&run.stderr).into_owned()
}

fn number_after(words: &str, report: &str) -> u64 {
    let rest = report.lines().find_map(|line| line.split_once(words)).map(|(_, rest)| rest.trim().replace(',', ""));
    let number = rest.and_then(|rest| rest.split_whitespace().next().and_then(|number| number.parse().ok()));
    number.filter(|&number: &u64| number > 0).unwrap_or_else(|| panic!("valgrind did not count:\n{report}"))
}
