//! The CPU time per response, and the responses per second, of `tidegate gateway`, of bare proxies on hyper, and of
//! nginx, in front of the same upstream.
//!
//! ```text
//! cargo bench -p tidegate-bench --bench gateway
//! ```
//!
//! Needs `wrk`, and two cores. The servers under test take turns on the first core. wrk and the upstream share the
//! second one. `TIDEGATE_BENCH_ROUNDS` sets the number of rounds, and `TIDEGATE_BENCH_SECONDS` the length of a turn.
//!
//! The bare proxies forward every request with its headers, or refuse every request with a constant 429. They have no
//! limiter, no timeouts and no validation. Of those that forward, one uses the pooling client of hyper-util. The other
//! one has a list of connections and relies on short responses: its cost is the minimum of a proxy on hyper. They and
//! the upstream are this program, started again. Each server has one thread that serves connections.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::{Arc, Mutex};

use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::Either;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tidegate_bench::endpoint::{Process, free_addr, tidegate_binary};
use tidegate_bench::measure::{median, print_table, setting};
use tokio::net::{TcpListener, TcpStream};

const CONNECTIONS: usize = 16;

/// The core of the servers under test, and that of wrk and the upstream.
const CORES: [&str; 2] = ["0", "1"];

/// The path and the headers of a request as a browser sends it.
const PATH: &str = "/api/items?page=2";
const HEADERS: [&str; 6] = [
    "Host: www.example.com",
    "user-agent: Mozilla/5.0 (X11; Linux x86_64)",
    "accept: text/html,application/json",
    "accept-language: en-US,en;q=0.5",
    "accept-encoding: gzip, deflate, br",
    "cookie: session=0123456789abcdef",
];

type Body = Either<Incoming, Full<Bytes>>;

/// Idle connections of the bare proxy.
type Pool = Arc<Mutex<Vec<SendRequest<Incoming>>>>;

/// Forwards a request with the client of hyper-util.
async fn forward_by_client(
    mut request: Request<Incoming>,
    upstream: SocketAddr,
    client: Client<HttpConnector, Incoming>,
) -> Result<Response<Body>, hyper_util::client::legacy::Error> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let uri = Uri::builder().scheme("http").authority(upstream.to_string()).path_and_query(path);
    *request.uri_mut() = uri.build().expect("a URI");
    Ok(client.request(request).await?.map(Either::Left))
}

/// Forwards a request on an idle connection of the pool, or on a new one.
async fn forward(request: Request<Incoming>, upstream: SocketAddr, pool: Pool) -> Result<Response<Body>, hyper::Error> {
    let idle = pool.lock().expect("no panic").pop();
    let mut sender = match idle {
        Some(sender) => sender,
        None => {
            let stream = TcpStream::connect(upstream).await.expect("the upstream listens");
            let _ = stream.set_nodelay(true);
            let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            sender
        }
    };
    sender.ready().await?;
    let response = sender.send_request(request).await?;
    // The body is in the buffer of the connection already: it is short.
    pool.lock().expect("no panic").push(sender);
    Ok(response.map(Either::Left))
}

/// The headers and the body of a refusal by `tidegate gateway`.
const REFUSAL_HEADERS: [(&str, &str); 8] = [
    ("content-type", "application/json"),
    ("cache-control", "no-store"),
    ("retry-after", "86400"),
    ("x-ratelimit-limit", "1"),
    ("x-ratelimit-remaining", "0"),
    ("x-ratelimit-reset", "1795030417"),
    ("ratelimit", "\"per-day\";r=0;t=86400"),
    ("ratelimit-policy", "\"per-day\";q=1;w=86400"),
];
const REFUSAL_BODY: &str = "{\"error\":\"rate_limited\",\"message\":\"the limit of 1 per day has been reached; try again in \
    86400 seconds\",\"limit\":1,\"retry_after\":86400,\"retry_after_ms\":86399988,\"policy\":\"per-day\",\"rule\":\"per-ip\"}";

fn refuse(headers: &[(&'static str, &'static str)], body: &'static str) -> Response<Body> {
    let mut response = Response::new(Either::Right(Full::new(Bytes::from_static(body.as_bytes()))));
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    response.headers_mut().reserve(headers.len());
    for (name, value) in headers {
        response.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

/// Runs the bare proxy, or the upstream, on one thread.
fn run(role: &str, address: &str, upstream: Option<SocketAddr>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let role = role.to_owned();
    runtime.block_on(async move {
        let socket = TcpListener::bind(address).await.expect("a free port");
        let pool = Pool::default();
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client: Client<_, Incoming> = Client::builder(TokioExecutor::new()).build(connector);
        while let Ok((stream, _)) = socket.accept().await {
            let _ = stream.set_nodelay(true);
            let (pool, client, role) = (pool.clone(), client.clone(), role.clone());
            tokio::spawn(async move {
                let io = TokioIo::new(stream);
                let builder = hyper::server::conn::http1::Builder::new();
                let _ = match (role.as_str(), upstream) {
                    ("proxy", Some(upstream)) => {
                        let service = service_fn(move |request| forward(request, upstream, pool.clone()));
                        builder.serve_connection(io, service).await
                    }
                    ("client", Some(upstream)) => {
                        let service = service_fn(move |request| forward_by_client(request, upstream, client.clone()));
                        builder.serve_connection(io, service).await
                    }
                    ("refuse", _) => {
                        let service = service_fn(|_| async { Ok::<_, Infallible>(refuse(&[], "")) });
                        builder.serve_connection(io, service).await
                    }
                    ("refuse-alike", _) => {
                        let refuse = || refuse(&REFUSAL_HEADERS, REFUSAL_BODY);
                        let service = service_fn(move |_| async move { Ok::<_, Infallible>(refuse()) });
                        builder.serve_connection(io, service).await
                    }
                    _ => {
                        let hello = || Response::new(Full::new(Bytes::from_static(b"hello from the upstream")));
                        let service = service_fn(move |_| async move { Ok::<_, Infallible>(hello()) });
                        builder.serve_connection(io, service).await
                    }
                };
            });
        }
    });
}

/// Returns the command for a program that runs on one core.
fn on_core(core: &str, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", core]).arg(program);
    command
}

/// Starts this program in a role.
fn start(role: &str, upstream: Option<SocketAddr>) -> Process {
    let address = free_addr();
    let core = CORES[usize::from(role == "upstream")];
    let mut command = on_core(core, std::env::current_exe().expect("the path of this program"));
    command.args(["role", role, &address.to_string()]).args(upstream.map(|upstream| upstream.to_string()));
    Process::start(&mut command, address)
}

fn gateway(upstream: SocketAddr, limit: &str) -> Process {
    let address = free_addr();
    let mut command = on_core(CORES[0], tidegate_binary());
    command.args(["gateway", "--admin", "off", "--threads", "1", "--upstream", &format!("http://{upstream}")]);
    command.args(["--listen", &address.to_string(), "--limit", limit]);
    Process::start(&mut command, address)
}

/// Starts nginx with `proxy_pass` and keep-alive to the upstream, and with this rate of `limit_req`.
fn nginx(upstream: SocketAddr, rate: &str, dir: &std::path::Path) -> Option<Process> {
    let address = free_addr();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary = temporary.map(|what| format!("{what}_temp_path {what};\n")).concat();
    let config = format!(
        "daemon off; master_process off; pid pid; error_log /dev/null crit;\nevents {{ }}\nhttp {{ access_log off;\n{temporary}\
         keepalive_requests 100000000;\nlimit_req_zone $binary_remote_addr zone=z:1m rate={rate};\nlimit_req_status 429;\n\
         upstream u {{ server {upstream}; keepalive 64; keepalive_requests 100000000; }}\n\
         server {{ listen {address}; location / {{ limit_req zone=z burst=10000000 nodelay; proxy_pass http://u;\n\
         proxy_http_version 1.1; proxy_set_header Connection ''; proxy_set_header Host $host; }} }} }}\n"
    );
    let config = if rate == "1r/m" { config.replace(" burst=10000000 nodelay", "") } else { config };
    std::fs::create_dir_all(dir).expect("a directory");
    std::fs::write(dir.join("nginx.conf"), config).expect("a file");
    let binary = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools/bin/nginx");
    let mut command = Command::new(if binary.exists() { binary } else { "nginx".into() });
    command.arg("-p").arg(dir).args(["-c", "nginx.conf", "-e", "/dev/null"]);
    command.current_dir(dir);
    command.arg("-t").output().ok().filter(|output| output.status.success())?;
    let mut command = on_core(CORES[0], command.get_program());
    command.arg("-p").arg(dir).args(["-c", "nginx.conf", "-e", "/dev/null"]).current_dir(dir);
    Some(Process::start(&mut command, address))
}

/// Sends requests with wrk for some seconds. Returns the number of responses.
fn send(address: SocketAddr, seconds: usize) -> u64 {
    let mut command = on_core(CORES[1], "wrk");
    command.args(["-t1", &format!("-c{CONNECTIONS}"), &format!("-d{seconds}s")]);
    for header in HEADERS {
        command.args(["-H", header]);
    }
    let output = command.arg(format!("http://{address}{PATH}")).output().expect("wrk, from the package wrk");
    let text = String::from_utf8_lossy(&output.stdout);
    let count = text.split(" requests in").next().and_then(|before| before.split_whitespace().last()?.parse().ok());
    count.unwrap_or_else(|| {
        panic!("wrk printed no number of requests: {text}{}", String::from_utf8_lossy(&output.stderr))
    })
}

/// The samples of one server, one for each round.
#[derive(Default)]
struct Samples {
    cpu_us: Vec<f64>,
    rates: Vec<f64>,
    /// The CPU time of the first server of the table, divided by that of this one.
    ratios: Vec<f64>,
}

/// Measures the processes, one after the other in each round, and prints a table.
fn measure(title: &str, processes: &[(&str, Process)]) {
    let (rounds, seconds) = (setting("TIDEGATE_BENCH_ROUNDS", 9), setting("TIDEGATE_BENCH_SECONDS", 2));
    let mut all: Vec<Samples> = processes.iter().map(|_| Samples::default()).collect();
    for round in 0..=rounds {
        let mut first = 0.0;
        for ((_, process), samples) in processes.iter().zip(&mut all) {
            let before = process.cpu_seconds();
            let responses = send(process.addr, seconds) as f64;
            let us = (process.cpu_seconds() - before) * 1e6 / responses;
            first = if first == 0.0 { us } else { first };
            // Round 0 is for warming up.
            if round > 0 {
                samples.cpu_us.push(us);
                samples.rates.push(responses / seconds as f64);
                samples.ratios.push(first / us);
            }
        }
    }
    println!("\n{title}, median of {rounds} rounds");
    let row = |((name, _), samples): (&(&str, Process), Samples)| {
        let [us, rate, ratio] = [samples.cpu_us, samples.rates, samples.ratios].map(median);
        vec![(*name).to_owned(), format!("{us:.1} µs"), format!("{rate:.0}"), format!("{ratio:.2}×")]
    };
    let rows: Vec<Vec<String>> = processes.iter().zip(all).map(row).collect();
    print_table(&["", "CPU per response", "responses per second", "by CPU"], &rows);
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, word, role, address, upstream @ ..] = &arguments[..]
        && word == "role"
    {
        return run(role, address, upstream.first().map(|upstream| upstream.parse().expect("an address")));
    }
    let upstream = start("upstream", None);
    let dir = std::env::temp_dir().join(format!("tidegate-bench-gateway-{}", std::process::id()));
    let mut admitting = vec![
        ("bare proxy on hyper-util's client", start("client", Some(upstream.addr))),
        ("bare proxy on a list of connections", start("proxy", Some(upstream.addr))),
        ("tidegate gateway", gateway(upstream.addr, "10000000/s token-bucket")),
    ];
    let mut refusing = vec![
        ("bare refusal with the same headers and body", start("refuse-alike", None)),
        ("bare refusal without them", start("refuse", None)),
        ("tidegate gateway", gateway(upstream.addr, "1/day token-bucket")),
    ];
    admitting
        .extend(nginx(upstream.addr, "1000000r/s", &dir.join("admit")).map(|process| ("nginx, limit_req", process)));
    refusing.extend(nginx(upstream.addr, "1r/m", &dir.join("refuse")).map(|process| ("nginx, limit_req", process)));
    measure("Forwarding", &admitting);
    measure("Refusing", &refusing);
    drop((admitting, refusing));
    let _ = std::fs::remove_dir_all(dir);
}
